"""The dtype rule: compute in at least float32, store in the storage dtype."""

from typing import Any

import jax
import jax.numpy as jnp


def compute_dtype(*arrays: Any) -> jnp.dtype:
    """The real dtype in which these arrays are worked on: at least float32."""
    # Not by JAX's promotion, which has no rule for 8-bit floats, and none at all if it is strict.
    is_double = any(jnp.result_type(x) in (jnp.float64, jnp.complex128) for x in arrays)
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)


def _complex_of(dtype: Any) -> jnp.dtype:
    """The complex dtype whose parts are at least as wide as the real `dtype`."""
    return jnp.dtype(jnp.complex128 if dtype == jnp.float64 else jnp.complex64)


def upcast(x: Any, dtype: Any = None) -> jax.Array:
    """`x` in at least float32, or in the real `dtype`; complex stays complex."""
    array = jnp.asarray(x)
    dtype = compute_dtype(array) if dtype is None else dtype
    if jnp.iscomplexobj(array):
        dtype = _complex_of(dtype)
    return array.astype(dtype)


def upcast_scalar(x: Any, dtype: Any = None) -> Any:
    """A hyperparameter, ready to be multiplied with arrays of the real `dtype`.

    Python numbers stay what they are: they are exact to double precision and take the dtype of the
    array they meet, whereas 1 - b2 computed from a float32 0.99 is already off by 1e-6.
    """
    if isinstance(x, bool | int | float):
        return float(x) if isinstance(x, float) else x  # NumPy's float64 is one, too
    x = jnp.asarray(x)
    return x.astype(compute_dtype(x) if dtype is None else dtype)


def beside(x: Any, like: jax.Array) -> Any:
    """The constant `x` in the memory of `like`: JAX does not choose or add across memories."""
    host = host_memory_of(like)
    return x if host is None else jax.device_put(jnp.asarray(x, jnp.result_type(like)), host)


def host_memory_of(x: jax.Array) -> Any:
    """The memory of the host, where an array is said to lie there by its type, else None."""
    memory = getattr(jax.typeof(x), "memory_space", None)
    return memory if getattr(memory, "name", None) == "Host" else None


def storage_dtype(x: Any, dtype: Any = None, *, averages_squares: bool = False) -> jnp.dtype:
    """The dtype in which a quantity belonging to the parameter `x` is kept.

    Where the user asked for none it is the parameter's own. An average of squares is real, and
    then in at least float32: in bfloat16 one with b2 = 0.999 stops to move.
    """
    own = jnp.result_type(x)
    if averages_squares:
        return compute_dtype(x) if dtype is None else available(dtype)
    if dtype is None:
        return jnp.dtype(own)
    if jnp.issubdtype(own, jnp.complexfloating):
        dtype = _complex_of(dtype)
    return available(dtype)


def copied(x: Any, dtype: Any) -> jax.Array:
    """A copy of `x` in a storage dtype. Of one with less range, finite numbers keep to it.

    Kept in float16 as infinity, 70000 would make the next correction infinite, by a clip of 0 NaN.
    """
    x = jnp.asarray(x)
    if not jnp.iscomplexobj(x) and jnp.finfo(dtype).maxexp < jnp.finfo(x.dtype).maxexp:
        largest = float(jnp.finfo(dtype).max)
        # bfloat16 rounds the largest number of float16 up, beyond its range.
        x = upcast(x)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return jnp.array(x, dtype=dtype, copy=True)


def available(dtype: Any) -> jnp.dtype:
    """The dtype that JAX has for `dtype` where this is called: float32 for float64 without x64."""
    return jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
