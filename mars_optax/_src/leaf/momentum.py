"""Moving averages: the momentum that Lion, Shampoo and MARS-M share, and bias corrections."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def momentum_step(c: jax.Array, grad: jax.Array, mu: jax.Array, *, b1: Any) -> Any:
    """Line 6 of Algorithm 1 of the paper: the momentum, which is direction and state."""
    mu = optax.tree.update_moment(c, mu, b1, 1)
    return mu, mu


@jax.jit
def bias_correction(decay: Any, count: jax.Array) -> jax.Array:
    """1 - decay^count, the sum of the weights of a moving average that began with 0.

    Compiled: an eager power with a concrete exponent is compiled anew for every count.
    """
    # A float to an integer's power is meant, also where promotion is strict.
    with jax.numpy_dtype_promotion("standard"):
        return jnp.subtract(1, decay**count)
