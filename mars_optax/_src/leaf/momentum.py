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
) -> tuple[jax.Array, jax.Array]:
    """Lines 4 to 6 of Algorithm 1 of the paper: the momentum, as direction and as state."""
    c = corrected_gradient(grad, prev_grad, coefficient, clip)
    mu = optax.tree.update_moment(c, mu, b1, 1)
    return mu, mu


@jax.jit
def bias_correction(decay: Any, count: jax.Array) -> jax.Array:
    """1 - decay^count, the sum of the weights of a moving average that began with 0.

    Compiled: an eager power with a concrete exponent is compiled anew for every count.
    """
    return jnp.subtract(1, decay**count)
