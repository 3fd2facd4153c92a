"""Squares of the norms of matrices: by XLA, or by kernels that share launches and the last pass.

XLA reduces each large matrix in two passes. Of the 49 such matrices of GPT-2 small the second ones,
of some hundred numbers each, take about a tenth of a step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from mars_optax._src import types
from mars_optax._src.kernels import execute, shards, tiling, transforms
from mars_optax._src.leaf import clipping

# (operands, scalars, dtype) -> the array whose norms are taken, elementwise and of that dtype.
Elementwise = Callable[[tuple[Any, ...], tuple[Any, ...], Any], jax.Array]

# Programs of a call, each with a sum of its own: about eight for each of a Hopper GPU's 132
# multiprocessors. More only where there are more rows than that.
_PROGRAMS: Final = 1024


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What norms are taken of.

    Attributes:
      operands: Arrays of one shape.
      axes: Those of a norm, not negative and in order.
      dtype: That of the arithmetic, and of the sums.
    """

    operands: tuple[jax.Array, ...]
    axes: tuple[int, ...]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """That of each operand."""
        return self.operands[0].shape

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the norms."""
        return tuple(1 if axis in self.axes else n for axis, n in enumerate(self.shape))

    @property
    def rows(self) -> int | None:
        """The equal rows of the flat leaf, each with its norm; None if it has no such."""
        leading = len(self.shape) - len(self.axes)
        is_last = self.axes == tuple(range(leading, len(self.shape)))
        return math.prod(self.shape[:leading]) if is_last else None


def squares(
    fn: Elementwise,
    leaves: Sequence[Leaf],
    scalars: Sequence[Any],
    implementation: types.Implementation | None,
) -> list[jax.Array]:
    """The squares of the norms of `fn` of each leaf, with the axes of a norm kept at length 1.

    Args:
      fn: The function of a leaf, or of a block of one.
      leaves: What it is run on; all have as many operands.
      scalars: Its further arguments, numbers or arrays of shape ().
      implementation: "pallas" takes kernels on one Hopper GPU outside of meshes with types, for
        float32 arithmetic on leaves whose blocks end with the norms; "xla" takes none; None takes
        them for large leaves, where they were measured to be faster.
    """
    chosen: list[int] = []
    operands = [x for leaf in leaves for x in leaf.operands]
    if implementation == "pallas" and execute.can_run() and shards.is_plain(operands):
        chosen = [i for i, leaf in enumerate(leaves) if _tiling(leaf) is not None]
    elif implementation is None and execute.kernels_pay(operands):
        chosen = [i for i, leaf in enumerate(leaves) if _is_large(leaf)]
    results = {
        i: _by_xla(fn, leaf, scalars) for i, leaf in enumerate(leaves) if i not in set(chosen)
    }
    if chosen:
        sums = _by_kernels(fn, [leaves[i] for i in chosen], scalars)
        results.update(zip(chosen, sums, strict=True))
    return [results[i] for i in range(len(leaves))]


def _by_xla(fn: Elementwise, leaf: Leaf, scalars: Sequence[Any]) -> jax.Array:
    return clipping.squares(fn(leaf.operands, tuple(scalars), leaf.dtype), leaf.axes)


def _tiling(leaf: Leaf) -> tiling.Tiling | None:
    """The blocks of a leaf that kernels can take."""
    is_known = leaf.dtype == jnp.float32 and execute.DTYPES.issuperset(
        str(x.dtype) for x in leaf.operands
    )
    size = math.prod(leaf.shape)
    if not is_known or leaf.rows is None or not 0 < size <= tiling.LARGEST:
        return None
    return tiling.tile(size, leaf.rows, is_whole=True)


def _is_large(leaf: Leaf) -> bool:
    """Whether it has one norm, which XLA would reduce in two passes.

    And the largest blocks: smaller ones were not measured.
    """
    tiles = _tiling(leaf)
    is_fast = tiles is not None and tiles.rows == 1 and tiles.block == tiling.BLOCKS[0]
    return is_fast and math.prod(leaf.shape) > tiling.SMALL


def _by_kernels(fn: Elementwise, leaves: Sequence[Leaf], scalars: Sequence[Any]) -> list[jax.Array]:
    """By kernels in programs for GPUs; elsewhere and under transformations, by XLA."""
    n_operands = len(leaves[0].operands)

    def rebuilt(flat: Sequence[jax.Array]) -> list[Leaf]:
        return [
            dataclasses.replace(leaf, operands=tuple(flat[i * n_operands :][:n_operands]))
            for i, leaf in enumerate(leaves)
        ]

    def xla(table: jax.Array, *flat: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_by_xla(fn, leaf, tuple(table)) for leaf in rebuilt(flat))

    def gpu(table: jax.Array, *flat: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_on_gpu(fn, rebuilt(flat), table))

    def local(*args: jax.Array) -> tuple[jax.Array, ...]:
        if execute.is_interpreted():
            return gpu(*args)
        results: tuple[jax.Array, ...] = jax.lax.platform_dependent(*args, cuda=gpu, default=xla)
        return results

    table = execute.table_of(scalars)
    operands = [x for leaf in leaves for x in leaf.operands]
    return list(transforms.opaque(local, xla)(table, *operands))


def _programs(blocks: int, most: int) -> int:
    """How many programs share the blocks of a row.

    As many blocks each where a number from half of `most` on allows it: a compiler can unroll a
    loop whose length is fixed.
    """
    most = max(1, min(blocks, most))
    alike = (n for n in range(most, most // 2, -1) if blocks % n == 0)
    return next(alike, most)


def _on_gpu(fn: Elementwise, leaves: Sequence[Leaf], table: jax.Array) -> list[jax.Array]:
    """Leaves of one kind share a call and its last sum."""
    # Imported where it is needed: it is neither light nor everywhere.
    from mars_optax._src.kernels import mosaic_gpu

    keys = [(math.prod(x.shape), x.rows, tuple(str(y.dtype) for y in x.operands)) for x in leaves]
    # One function for equal calls, which are then lowered once.
    programs: dict[Any, Any] = {}
    results: dict[int, jax.Array] = {}
    for indices in tiling.group(keys, [tiling.GROUP] * len(leaves)):
        mine = [leaves[i] for i in indices]
        tiles = _tiling(mine[0])
        assert tiles is not None
        per_row = _programs(tiles.blocks, _PROGRAMS // (len(mine) * tiles.rows))
        key = keys[indices[0]], len(mine)
        if key not in programs:
            programs[key] = jax.jit(
                functools.partial(
                    mosaic_gpu.partial_squares,
                    lambda operands, scalars: fn(operands, scalars, jnp.dtype("float32")),
                    tiles=tiles,
                    per_row=per_row,
                    interpret=execute.is_interpreted(),
                )
            )
        sums = programs[key]([[x.reshape(-1) for x in leaf.operands] for leaf in mine], table)
        # A call's sums are added by themselves: one sum for all calls was measured to be slower.
        totals = jnp.sum(sums, axis=2)
        for i, total in zip(indices, totals, strict=True):
            results[i] = total.reshape(leaves[i].kept)
    return [results[i] for i in range(len(leaves))]
