"""How a variant's step is executed: on every leaf, widened on entry and narrowed on exit."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mars_optax._src import execute, in_shard_map, trees, types
from mars_optax._src.leaf import clipping, correction, precision

# (grad, prev_grad, clip, *moments, **scalars) -> (direction, *moments), all elementwise. What a
# setting leaves out is None: the previous gradient, the clip's factor, a moment.
Step = Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Finish:
    """What makes new parameters of directions: decay, learning rate, and adding the update.

    Attributes:
      params: The parameters.
      scale: Minus the learning rate.
      decay: The weight decay.
      decays: A tree of bools, which parameters decay.
    """

    params: Any
    scale: jax.Array
    decay: jax.Array
    decays: Any

    def tree(self, directions: Any) -> Any:
        """The new parameters."""
        return jax.tree.map(
            lambda u, p, decays: finished(u, p, self.scale, self.decay if decays else None),
            directions,
            self.params,
            self.decays,
        )


def finished(direction: Any, param: Any, scale: Any, decay: Any) -> jax.Array:
    """A new parameter, in its own dtype: the update is rounded to it, and so is the sum.

    The first rounding XLA may leave out on a GPU, as it may between `update` and `apply_updates`.
    """
    wide = precision.widen(param)
    if decay is not None:
        direction = direction + decay * wide
    update = (scale * direction).astype(param.dtype)
    # As :func:`optax.apply_updates` adds: in low precision the same as rounding the exact sum.
    result: jax.Array = (wide + precision.widen(update)).astype(param.dtype)
    return result


def run_step(
    step: Step,
    updates: optax.Updates,
    prev_grad: Any,
    moments: tuple[Any, ...],
    *,
    coefficient: Any,
    max_norm: Any,
    axes: Any,
    implementation: types.Implementation | None,
    specs: Any = None,
    finish: Finish | None = None,
    **scalars: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """Runs `step` on every leaf.

    Args:
      step: The elementwise update of one leaf. It gets arrays of at least float32, the factor of
        the clip broadcast along the axes of its norm, and the scalars; it never reduces or
        reshapes.
      updates: The gradients.
      prev_grad: The previous gradients, or None.
      moments: The moving averages, each a tree or None.
      coefficient: That of the correction.
      max_norm: The bound on each matrix's corrected gradient, or None.
      axes: Each leaf's `Axes`, over which its norm is taken.
      implementation: What executes it, see :func:`execute.elementwise`.
      specs: Each leaf's partition spec inside a shard_map, or None.
      finish: If given, what follows the step, and is executed with it.
      **scalars: Hyperparameters that the step takes besides `coefficient`.

    Returns:
      The directions in at least float32, which :func:`narrow` gives the dtype of the gradients, or
      the new parameters; and the new moments in the dtypes of the old ones.
    """
    scalars = {"coefficient": coefficient, **scalars}
    # Python numbers are exact, and constants of a program; arrays are its operands.
    constants = {k: x for k, x in scalars.items() if isinstance(x, bool | int | float)}
    arrays = {k: jnp.asarray(x) for k, x in scalars.items() if k not in constants}
    values = list(arrays.values()) + ([] if finish is None else [finish.scale, finish.decay])
    has_prev, kept = prev_grad is not None, [moment is not None for moment in moments]

    def fn_of(decays: bool) -> execute.Elementwise:
        def fn(operands: Any, clip: Any, values: Any) -> tuple[Any, ...]:
            dtype = precision.compute_dtype(*operands)
            rest = iter(operands)
            grad = precision.widen(next(rest), dtype)
            prev = precision.widen(next(rest), dtype) if has_prev else None
            old = [precision.widen(next(rest), dtype) if is_kept else None for is_kept in kept]
            values = [precision.widen_scalar(x, dtype) for x in values]
            named = dict(zip(arrays, values, strict=False))
            direction, *new = step(grad, prev, clip, *old, **named, **constants)
            if finish is not None:
                scale, decay = values[len(named) :]
                direction = finished(direction, next(rest), scale, decay if decays else None)
            return direction, *(x for x, is_kept in zip(new, kept, strict=True) if is_kept)

        return fn

    def leaf_of(clip: Any, grad: Any, prev: Any, param: Any, *old: Any) -> execute.Leaf:
        present = [jnp.asarray(x) for x in (grad, prev, *old, param) if x is not None]
        wide = precision.widen(grad, precision.compute_dtype(*present))
        first = wide.dtype if param is None else present[-1].dtype
        out_dtypes = (first, *(x.dtype for x in old if x is not None))
        # The moments, and the parameter, are written over what they were.
        begin = 1 + has_prev
        aliases = {1 + i: begin + i for i in range(len(out_dtypes) - 1)}
        if param is not None:
            aliases[0] = len(present) - 1
        return execute.Leaf(tuple(present), clip, out_dtypes, aliases)

    params, all_decays = (None, None) if finish is None else (finish.params, finish.decays)
    table = trees.rows((updates, prev_grad, params, *moments))
    clips: list[Any] = [None] * len(table)
    if max_norm is not None:
        others = (*moments, params)
        squares = _squares(updates, prev_grad, axes, others, coefficient, implementation)
        clips = [
            clipping.factor_of_squares(x, precision.widen_scalar(max_norm, x.dtype))
            for x in sum_shards(squares, updates, axes, specs)
        ]
    decay_of = [decays for _, decays in trees.rows((updates, all_decays))]
    outputs: list[Any] = [None] * len(table)
    for decays in (False, True):
        mine = [i for i, its in enumerate(decay_of) if bool(its) is decays]
        leaves = [leaf_of(clips[i], *table[i]) for i in mine]
        results = execute.elementwise(fn_of(decays), leaves, values, implementation)
        for i, (direction, *new) in zip(mine, results, strict=True):
            rest = iter(new)
            outputs[i] = (direction, *(next(rest) if is_kept else None for is_kept in kept))
    direction, *new_moments = trees.unzip(outputs, (updates, *moments))
    return direction, tuple(new_moments)


def _squares(
    updates: Any,
    prev_grad: Any,
    axes: Any,
    others: tuple[Any, ...],
    coefficient: Any,
    implementation: types.Implementation | None,
) -> list[jax.Array]:
    """The squares of the norms of each leaf's corrected gradient."""

    def corrected(operands: Any, scalars: Any, dtype: Any) -> jax.Array:
        grad, *prev = (precision.widen(x, dtype) for x in operands)
        k = precision.widen_scalar(scalars[0], dtype)
        return correction.corrected_gradient(grad, prev[0] if prev else None, k)

    leaves = []
    for grad, prev, leaf_axes, *rest in trees.rows((updates, prev_grad, axes, *others)):
        present = [jnp.asarray(x) for x in (grad, prev, *rest) if x is not None]
        operands = tuple(present[: 1 if prev is None else 2])
        norm_axes = sorted(axis % jnp.ndim(grad) for axis in leaf_axes.of_one_norm)
        leaves.append(
            execute.NormLeaf(operands, tuple(norm_axes), precision.compute_dtype(*present))
        )
    return execute.squares(corrected, leaves, [coefficient], implementation)


def sum_shards(squares: list[jax.Array], tree: Any, axes: Any, specs: Any) -> list[jax.Array]:
    """Squares of norms, each summed over the devices that hold a part of its matrix."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    rows = trees.rows((tree, specs, axes))
    names = [
        tuple(n for part in in_shard_map.sharded(x, s, a.of_one_norm, path, "a norm") for n in part)
        for path, (x, s, a) in zip(paths, rows, strict=True)
    ]
    return in_shard_map.sums(squares, names)


def narrow(tree: Any, like: Any) -> Any:
    """`tree` in the dtypes of `like`, leaf by leaf."""
    return jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), tree, like)
