"""Row normalization: evens out the root mean squares of a matrix's rows, as NorMuon does."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import checks, in_shard_map, partition, trees, types
from mars_optax._src.leaf import clipping, precision
from mars_optax._src.leaf.root import root


class NormalizeRowsState(NamedTuple):
    """State of :func:`normalize_rows`."""

    # One number for each row, of the parameter's rank; real, dtype=nu_dtype or at least float32.
    nu: optax.Updates


def normalize_rows(
    b2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    nu_dtype: types.DType = None,
    weight_dimension_numbers: types.WeightDimensionNumbers = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides each row of a matrix by its running root mean square, and keeps the matrix's norm.

    .. math::

      v_t = \beta_2 v_{t-1} + (1-\beta_2) \, \mathrm{mean}_\mathrm{in} |u_t|^2, \qquad
      \hat u_t = \frac{u_t}{\sqrt{v_t} + \varepsilon}, \qquad
      u_t' = \hat u_t \frac{\lVert u_t \rVert_F}{\lVert \hat u_t \rVert_F}

    A row is what belongs to one neuron: one entry of the output axes, so a column of a kernel
    (in, out) and a row of a PyTorch weight (out, in). The norm makes a bias correction of
    :math:`v_t` superfluous: after the first step all rows have one root mean square. Rows and
    matrices of zeros stay zero, and a NaN stays in its matrix.

    Differences: NorMuon's Algorithm 1 scales the matrix to a root mean square of 0.2, its code to
    the norm before, as here, with an epsilon of 1e-10. With exactly orthogonal matrices and
    MARS-M's factor both are the same.

    References:
      Li et al., `NorMuon <https://arxiv.org/abs/2510.05491>`_, 2025, Algorithm 1. Code:
      ``normuon.py`` of https://github.com/zichongli5/NorMuon.
    """
    checks.decay_rate("b2", b2)
    checks.non_negative("eps", eps)
    nu_dtype = checks.recursive_dtype("nu_dtype", nu_dtype)
    partition.check_spec(weight_dimension_numbers)
    axes_of = functools.partial(partition.resolve_axes, weight_dimension_numbers)

    def init_fn(params: optax.Params) -> NormalizeRowsState:
        axes = axes_of(params)
        partition.require_matrices(axes, params, "normalize_rows")
        zeros = trees.zeros(params, nu_dtype, averages_squares=True)
        # Reduced as in every later step, they lie on a mesh as those do.
        nu = jax.tree.map(lambda x, a: jnp.sum(x, a.reduction, keepdims=True), zeros, axes)
        return NormalizeRowsState(nu)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        checks.state_type(state, NormalizeRowsState, "normalize_rows")
        specs = in_shard_map.specs_of(extra_args, updates)
        table = in_shard_map.table(updates, specs, state.nu, axes_of(updates))
        direction, nu = trees.unzip([on_leaf(*row) for row in table], (updates, state.nu))
        return direction, NormalizeRowsState(nu)

    def on_leaf(path: Any, x: jax.Array, spec: Any, nu: jax.Array, axes: partition.Axes) -> Any:
        # The mesh axes inside a shard_map that divide each row, and those that divide the rows.
        within, across = (
            tuple(n for part in in_shard_map.sharded(path, x, spec, dims, "a row") for n in part)
            for dims in (axes.reduction, axes.output)
        )
        dtype = precision.compute_dtype(x, nu)
        x = precision.upcast(x, dtype)
        squares = _over_devices(clipping.squares(x, axes.reduction), within)
        length = axes.fans(x.shape)[0] * _over_devices(1, within)
        mean = squares / max(length, 1)
        decay = precision.upcast_scalar(b2, dtype)
        average = optax.tree.update_moment(mean, nu.astype(dtype), decay, 1)
        divisor = _nonzero(root(average) + precision.upcast_scalar(eps, dtype))
        both = jnp.stack([squares, (root(squares) / divisor) ** 2])
        totals = jnp.sum(both, [1 + i for i in axes.output], keepdims=True)
        before, after = _over_devices(totals, across)
        return x / divisor * root(before / _nonzero(after)), average.astype(nu.dtype)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _over_devices(x: Any, names: tuple[str, ...]) -> Any:
    """The sum over mesh axes inside a shard_map."""
    return jax.lax.psum(x, names) if names else x


def _nonzero(x: jax.Array) -> jax.Array:
    """`x` >= 0 with 1 in place of 0, as a divisor of 0."""
    return x + (x == 0).astype(x.dtype)
