"""MARS-Lion: the sign of the momentum of the corrected gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import assembly, named, transformation, types
from mars_optax._src.adaptive import Gamma
from mars_optax._src.leaf.momentum import momentum_step
from mars_optax._src.states import MomentumState, State
from mars_optax._src.variants import adamw


class ScaleByMarsLionState(MomentumState):
    """State of :func:`scale_by_mars_lion`."""


def lion_step(*arrays: Any, **scalars: Any) -> tuple[jax.Array, jax.Array]:
    """Lines 4 to 7 of Algorithm 3 of the paper, without learning rate and decay."""
    momentum, mu = momentum_step(*arrays, **scalars)
    return jnp.sign(momentum), mu


@named.named
def scale_by_mars_lion(
    b1: jax.typing.ArrayLike = 0.95,
    gamma: Gamma = 0.025,
    *,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    mu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    implementation: types.Implementation | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by the rule of MARS-Lion, for every leaf alike.

    .. math::

      c_t &= g_t + \gamma_t \frac{\beta_1}{1-\beta_1} (g_t - g_{t-1}), \qquad
      \tilde c_t = c_t \min(1, \mathrm{max\_norm} / \lVert c_t \rVert_2) \\
      m_t &= \beta_1 m_{t-1} + (1-\beta_1) \tilde c_t, \qquad
      u_t = \mathrm{sign}(m_t)

    with sign(0) = 0, and z / abs(z) for complex numbers. There is one moving average and no bias
    correction, which a sign would not show; unlike :func:`optax.scale_by_lion` there is no second
    decay rate, whose interpolation the correction contains (Lemma 3.4 of the paper). The direction
    :math:`u_t` has the sign of the gradient and its dtype. At the first step both values of
    `first_step` give the same sign for :math:`k > -1`.

    Args:
      weight_dimension_numbers: ... None: each leaf is clipped as a whole.

    Returns:
      A transformation with state :class:`ScaleByMarsLionState`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> tx = mars_optax.scale_by_mars_lion()
      >>> params = jnp.zeros((1, 3))
      >>> state = tx.init(params)
      >>> direction, state = tx.update(jnp.array([[0.3, 0.0, -2.0]]), state)
      >>> print(direction)
      [[ 1.  0. -1.]]

    References:
      Yuan et al., `MARS <https://arxiv.org/abs/2411.10438>`_, 2025, Algorithm 3. Reference code:
      ``MARS/optimizers/mars.py``, ``mars_type="mars-lion"``, of https://github.com/AGI-Arena/MARS.
    """
    name, state_type = "scale_by_mars_lion", ScaleByMarsLionState
    return transformation.momentum_rule(name, state_type, locals(), step=lion_step)


class MarsLionState(State):
    """State of :func:`mars_lion`."""


@named.named
def mars_lion(
    learning_rate: types.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.95,
    gamma: Gamma = 0.025,
    weight_decay: types.ScalarOrSchedule = 0.0,
    mask: types.Mask | None = None,
    *,
    max_norm: jax.typing.ArrayLike | None = 1.0,
    correction: types.Correction = "approx",
    first_step: types.FirstStep = "zeros",
    optimize_1d: bool = False,
    learning_rate_1d: types.ScalarOrSchedule | None = None,
    b1_1d: jax.typing.ArrayLike = 0.9,
    b2_1d: jax.typing.ArrayLike = 0.95,
    eps_1d: jax.typing.ArrayLike | None = None,
    weight_decay_1d: types.ScalarOrSchedule | None = 0.1,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
    mu_dtype: types.DType = None,
    prev_grad_dtype: types.DType = None,
    keep_prev_grad: bool = True,
    implementation: types.Implementation | None = None,
    eps_root_1d: jax.typing.ArrayLike | None = None,
    alpha: types.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    r"""MARS-Lion: sign descent on variance-reduced gradients.

    Matrices are updated by :math:`x_{t+1} = x_t - \eta_t (\mathrm{sign}(m_t) + \lambda x_t)` with
    the momentum :math:`m_t` of :func:`scale_by_mars_lion`, whose docstring has the equations, the
    first step and the references, and all other leaves by AdamW with the values `*_1d`.

    Differences from the reference code: as for :func:`mars`, and there is no second moment, which
    is allocated there and stays zero.

    Args:
      learning_rate: ... Every entry moves by it: choose it well below AdamW's.
      learning_rate_1d: ... AdamW wants a larger one than a sign does.
      weight_dimension_numbers: ... None: all leaves of rank >= 2, each as a whole.

    Examples:
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> params = jnp.array([[1.0, -2.0], [3.0, 0.5]])
      >>> tx = mars_optax.mars_lion(learning_rate=0.1)
      >>> updates, state = tx.update(params, tx.init(params), params)  # of half the sum of squares
      >>> print(updates)
      [[-0.1  0.1]
       [-0.1 -0.1]]
    """
    settings = locals()
    vectors = adamw.for_vectors(settings)
    return assembly.optimizer("mars_lion", scale_by_mars_lion, settings, MarsLionState, vectors)
