"""Eight-bit storage: an array as 8-bit floats with a float32 scale for each row."""

from typing import Any

import jax
import jax.numpy as jnp

from mars_optax._src.leaf import precision


def is_scaled(dtype: Any) -> bool:
    """Whether an array of this dtype needs a scale: its range is too small for gradients."""
    return dtype is not None and jnp.dtype(dtype).itemsize == 1


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of an array: one for each row along the last axis."""
    return (*shape[:-1], 1) if shape else ()


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`x` as values of `dtype` and the scales that give it back.

    The largest entry of a row becomes the largest number of `dtype`. A row of zeros has scale 1,
    one that is not finite becomes NaN. Dtypes of more than 8 bits, as complex ones, have scale 1.
    Derivatives take 8 bits for constants: theirs would have 8 bits, too, and vanish.
    """
    shape = scale_shape(x.shape)
    if not is_scaled(dtype):
        return x.astype(dtype), jnp.ones(shape, jnp.float32)
    wide = jax.lax.stop_gradient(precision.upcast(x))
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True, initial=0) if x.ndim else abs(wide)
    scale = (largest / float(jnp.finfo(dtype).max)).astype(jnp.float32)
    scale = jnp.where(scale == 0, precision.beside(1, scale), scale)
    return (wide / scale).astype(dtype), scale


def dequantize(values: jax.Array, scale: jax.Array) -> jax.Array:
    """What :func:`quantize` was given, to the precision of its dtype."""
    return precision.upcast(values) * scale
