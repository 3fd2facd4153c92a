"""Stochastic rounding, where parameters of low precision are updated."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks
from mars_optax._src.leaf import precision


def _round_stochastically(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """`x` in `dtype`: one of its two neighbours there, with odds that keep the mean."""
    nearest = x.astype(dtype)
    rest = x - nearest.astype(x.dtype)
    # Not infinity: some 8-bit floats have none.
    largest = jnp.finfo(dtype).max
    towards = jnp.where(rest < 0, -largest, largest).astype(dtype)
    other = jnp.nextafter(nearest, towards)
    step = jnp.abs(other.astype(x.dtype) - nearest.astype(x.dtype))
    odds = jax.random.uniform(key, x.shape, x.dtype)
    moves = jnp.isfinite(step) & (odds * step < jnp.abs(rest))
    return jnp.where(moves, other, nearest)


# Its derivative is that of rounding to the nearest: the choice between neighbours has none.
_straight_through = jax.custom_jvp(lambda rounded, x: rounded)
_straight_through.defjvp(lambda xs, dots: (xs[0], dots[1].astype(xs[0].dtype)))


def stochastic_apply_updates(
    params: optax.Params, updates: optax.Updates, key: jax.Array
) -> optax.Params:
    r"""Adds updates to parameters, and rounds the sum at random to the parameters' dtypes.

    In bfloat16 an update below 0.2 to 0.4 % of its parameter is rounded away, step after step, and
    late in training nearly all are. Here the sum, taken in at least float32, goes to one of its two
    neighbours in the parameter's dtype with odds that make the rounding right on average,
    :math:`E[\mathrm{round}(x)] = x`, so that small updates add up. Where the sum has the
    parameter's dtype, and for complex ones, it is that of :func:`optax.apply_updates`. It is for
    parameters that are kept in low precision without a copy in float32. The moments need it less:
    with b1 = 0.95 their averages move by 5 %, and second moments are in float32 by default.

    Args:
      params: Parameters.
      updates: A tree of the same structure and shapes, as `update` of an optimizer returns it.
      key: A key of :func:`jax.random.key`, another one at every step: for example
        ``jax.random.fold_in(key, step)``. Devices that hold copies of a parameter need the same.

    Returns:
      The new parameters, in their dtypes. NaN and infinities stay what they are. Derivatives are
      those of :func:`optax.apply_updates`.

    Raises:
      ValueError: If `updates` has another structure or other shapes than `params`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import mars_optax
      >>> import optax
      >>> params = rounded = jnp.ones(1000, jnp.bfloat16)
      >>> for step in range(100):
      ...     updates = jnp.full(1000, 1e-3, jnp.bfloat16)
      ...     params = optax.apply_updates(params, updates)
      ...     key = jax.random.fold_in(jax.random.key(0), step)
      ...     rounded = mars_optax.stochastic_apply_updates(rounded, updates, key)
      >>> print(f"{float(params.mean()):.1f} {float(rounded.mean()):.1f}")
      1.0 1.1

    References:
      Gupta et al., `Deep Learning with Limited Numerical Precision
      <https://arxiv.org/abs/1502.02551>`_, 2015.
    """
    advice = "Pass what `update` returned for these parameters."
    checks.same_shapes("updates", updates, params, "`params`", advice)
    keys = optax.tree.split_key_like(key, params)

    def on_leaf(param: Any, update: Any, leaf_key: jax.Array) -> jax.Array:
        dtype = jnp.result_type(param)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.asarray(param + update).astype(dtype)
        total = precision.upcast(param) + precision.upcast(update)
        if total.dtype == dtype or jnp.iscomplexobj(total):
            return total.astype(dtype)
        rounded = _round_stochastically(jax.lax.stop_gradient(total), dtype, leaf_key)
        return _straight_through(rounded, total)

    return jax.tree.map(on_leaf, params, updates, keys)
