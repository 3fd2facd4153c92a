"""Moving averages: the momentum that Lion, Shampoo and MARS-M share, and bias corrections."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src.leaf.correction import corrected_gradient


def momentum_step(
    grad: jax.Array,
    prev_grad: jax.Array | None,
    clip: jax.Array | None,
    mu: jax.Array,
    *,
    coefficient: Any,
    b1: Any,
    next_gamma: Any = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Lines 4 to 6 of Algorithm 1 of the paper: the momentum, and what the state keeps of it.

    With `next_gamma` there is no previous gradient and no clip, and the state keeps
    :math:`n_t = m_t - \gamma_{t+1} g_t`. Unclipped, the correction is linear, and

    .. math::

      m_t &= \beta_1 m_{t-1} + (1-\beta_1) g_t + \gamma_t \beta_1 (g_t - g_{t-1}) \\
          &= \beta_1 n_{t-1} + (1-\beta_1)(1 + k_t) g_t, \qquad
      k_t = \gamma_t \frac{\beta_1}{1-\beta_1}

    needs no more than that. For a constant gamma :math:`n_t` is :math:`1-\gamma` times the moving
    average of the gradients, so that :math:`m_t = \gamma g_t + (1-\gamma) \mathrm{EMA}(g)_t`:
    quasi-hyperbolic momentum (Ma and Yarats, arXiv 1810.06801).
    """
    if next_gamma is None:
        c = corrected_gradient(grad, prev_grad, coefficient, clip)
        mu = optax.tree.update_moment(c, mu, b1, 1)
        return mu, mu
    momentum = b1 * mu + (1 - b1) * (1 + coefficient) * grad
    return momentum, momentum - next_gamma * grad


@jax.jit
def bias_correction(decay: Any, count: jax.Array) -> jax.Array:
    """1 - decay^count, the sum of the weights of a moving average that began with 0.

    Compiled: an eager power with a concrete exponent is compiled anew for every count.
    """
    # A float to an integer's power is meant, also where promotion is strict.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.subtract(1, decay**count)
