"""How a variant's step is executed: on every leaf, widened on entry and narrowed on exit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import execute, in_shard_map, mesh, trees, types
from mars_optax._src.leaf import clipping, precision

# (c, grad, *moments, **scalars) -> (direction, *moments), all elementwise; c is the corrected and
# clipped gradient, and a moment that a setting leaves out is None.
Step = Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Finish:
    """What makes new parameters of directions: decay, learning rate, and adding the update."""

    params: Any
    scale: Any  # minus the learning rate
    decay: Any
    decays: Any  # a tree of bools, which parameters decay

    def updates(self, directions: Any) -> Any:
        """The updates, in at least float32."""

        def on_leaf(u: Any, p: Any, decays: bool) -> jax.Array:
            dtype = precision.compute_dtype(u)
            scale, decay = (precision.upcast_scalar(x, dtype) for x in (self.scale, self.decay))
            return updated(u, p, scale, decay if decays else None)

        rows = trees.rows((directions, self.params, self.decays))
        return jax.tree.unflatten(jax.tree.structure(directions), [on_leaf(*row) for row in rows])

    def tree(self, directions: Any) -> Any:
        """The new parameters."""
        return jax.tree.map(applied, self.updates(directions), self.params)


def updated(direction: Any, param: Any, scale: Any, decay: Any) -> jax.Array:
    """An update, in the dtype of the direction."""
    if decay is not None:
        direction = direction + decay * precision.upcast(param, precision.compute_dtype(direction))
    return scale * direction


def applied(update: jax.Array, param: Any) -> jax.Array:
    """A new parameter, in its own dtype: the update is rounded to it, and so is the sum.

    The first rounding XLA may leave out on a GPU, as it may between `update` and `apply_updates`.
    """
    wide, update = precision.upcast(param), update.astype(param.dtype)
    # As :func:`optax.apply_updates` adds: in low precision the same as rounding the exact sum.
    return (wide + precision.upcast(update)).astype(param.dtype)


def run_step(
    step: Step,
    updates: optax.Updates,
    estimate: Any,
    moments: tuple[Any, ...],
    *,
    max_norm: Any,
    axes: Any,
    implementation: types.Implementation | None,
    norms: types.Implementation | None = "xla",
    apart: bool = False,
    specs: Any = None,
    finish: Finish | None = None,
    **scalars: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """Runs `step` on every leaf, with arrays of at least float32 and the scalars.

    `estimate` is the estimator's, and `moments` are the moving averages, each a tree or None, the
    momentum first. Norms, executed as `norms` says, are over each leaf's `axes`, inside a shard_map
    divided by `specs`. `apart` says that what comes next reads the directions leaf by leaf.

    Returns the directions in at least float32, or with `finish`, which is executed with the step,
    the new parameters; and the new moments in the dtypes of the old ones.
    """
    scalars = {"coefficient": estimate.coefficient, "next_gamma": estimate.next_gamma, **scalars}
    # Python numbers are exact, and constants of a program; arrays are its operands.
    constants = {k: x for k, x in scalars.items() if x is None or isinstance(x, bool | int | float)}
    arrays = {k: jnp.asarray(x) for k, x in scalars.items() if k not in constants}
    values = list(arrays.values()) + ([] if finish is None else [finish.scale, finish.decay])
    has_other, kept = estimate.other is not None, [moment is not None for moment in moments]

    def fn_of(decays: bool) -> execute.Elementwise:
        def fn(operands: Any, clip: Any, values: Any) -> tuple[Any, ...]:
            dtype = precision.compute_dtype(*operands)
            rest = iter(operands)
            grad = precision.upcast(next(rest), dtype)
            other = precision.upcast(next(rest), dtype) if has_other else None
            old = [precision.upcast(next(rest), dtype) if is_kept else None for is_kept in kept]
            values = [precision.upcast_scalar(x, dtype) for x in values]
            named = dict(zip(arrays, values, strict=False)) | constants
            c = estimate.corrected(grad, other, named.pop("coefficient"))
            next_gamma = named.pop("next_gamma")
            direction, *new = step(c if clip is None else c * clip, grad, *old, **named)
            if next_gamma is not None:
                new[0] = estimate.kept(new[0], grad, next_gamma)
            if finish is not None:
                scale, decay = values[len(arrays) :]
                param = next(rest)
                update = updated(direction, param, scale, decay if decays else None)
                direction = applied(update, param)
            return direction, *(x for x, is_kept in zip(new, kept, strict=True) if is_kept)

        return fn

    def leaf_of(clip: Any, grad: Any, other: Any, param: Any, *old: Any) -> execute.Leaf:
        present = [jnp.asarray(x) for x in (grad, other, *old, param) if x is not None]
        wide = precision.upcast(grad, precision.compute_dtype(*present))
        first = wide.dtype if param is None else present[-1].dtype
        out_dtypes = (first, *(jnp.result_type(x) for x in old if x is not None))
        # The moments, and the parameter, are written over what they were.
        aliases = {i: has_other + i for i in range(1, len(out_dtypes))}
        if param is not None:
            aliases[0] = len(present) - 1
        return execute.Leaf(tuple(present), out_dtypes, clip, aliases)

    params, all_decays = (None, None) if finish is None else (finish.params, finish.decays)
    table = trees.rows((updates, estimate.other, params, *moments))
    outputs: list[Any] = [None] * len(table)
    clips: list[Any] = [None] * len(table)
    if max_norm is not None:
        squares = _squares(updates, estimate, axes, (*moments, params), norms)
        squares = in_shard_map.sum_parts(squares, updates, axes, specs)
        if apart and mesh.is_for_gpus():
            # Else XLA makes one fusion of leaves whose norms are of one array, and writes copies.
            squares = jax.lax.optimization_barrier(squares)
        bounds = [precision.upcast_scalar(max_norm, x.dtype) for x in squares]
        clips = list(map(clipping.factor_of_squares, squares, bounds))
    for decays in (False, True):
        rows = enumerate(trees.rows((updates, all_decays)))
        mine = [i for i, (_, its) in rows if bool(its) is decays]
        leaves = [leaf_of(clips[i], *table[i]) for i in mine]
        results = execute.elementwise(fn_of(decays), leaves, values, implementation)
        for i, (direction, *new) in zip(mine, results, strict=True):
            rest = iter(new)
            outputs[i] = (direction, *(next(rest) if is_kept else None for is_kept in kept))
    direction, *new_moments = trees.unzip(outputs, (updates, *moments))
    return direction, tuple(new_moments)


def _squares(
    updates: Any, estimate: Any, axes: Any, others: tuple[Any, ...], implementation: Any
) -> list[jax.Array]:
    """The squares of the norms of each leaf's corrected gradient."""

    def corrected(operands: Any, scalars: Any, dtype: Any) -> Any:
        grad, *other = (precision.upcast(x, dtype) for x in operands)
        k = precision.upcast_scalar(scalars[0], dtype)
        return estimate.corrected(grad, other[0] if other else None, k)

    leaves = []
    for grad, other, leaf_axes, *rest in trees.rows((updates, estimate.other, axes, *others)):
        present = [jnp.asarray(x) for x in (grad, other, *rest) if x is not None]
        operands = tuple(present[: 1 if other is None else 2])
        norm_axes = tuple(sorted(leaf_axes.norm_axes))
        leaves.append(execute.NormLeaf(operands, (precision.compute_dtype(*present),), norm_axes))
    return execute.squares(corrected, leaves, [estimate.coefficient], implementation)
