"""Clipping to a norm: the reduction of a step, apart from its elementwise part."""

from typing import Any

import jax
import jax.numpy as jnp

from mars_optax._src.leaf import precision


def inner(x: jax.Array, y: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The real part of <x, y> over `axes`, which are kept with length 1."""
    return jnp.sum(jnp.real(x * jnp.conj(y)), axis=axes, keepdims=True)


def squares(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """||x||^2 over `axes`."""
    return inner(x, x, axes)


def factor_of_squares(squares: jax.Array, max_norm: Any) -> jax.Array:
    """min(1, max_norm / ||x||) from ||x||^2.

    As in the reference code the bound holds strictly (equation (3.5) of the paper), a norm that
    overflows gives 0, and a NaN leaves the factor at 1, so that it stays where it is.
    """
    # A square root has no derivative at 0: take it of 1 there, and leave the factor at 1.
    is_positive, one = squares > 0, precision.beside(1, squares)
    norm = jnp.sqrt(jnp.where(is_positive, squares, one))
    return jnp.where(is_positive & (norm > max_norm), max_norm / norm, one)
