"""The matrices of many leaves as a few stacks, each worked on at once."""

import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from mars_optax._src import execute, mesh, partition, reshard

# Elements of a stack: they fill a GPU many times; beside the leaves two or three are needed.
LARGEST: Final = 1 << 28


def map_stacks(
    fn: reshard.StackFn,
    leaves: Sequence[jax.Array],
    axes: Sequence[partition.Axes],
    constants: Sequence[jax.Array] = (),
    sources: Sequence[execute.Source] | None = None,
) -> list[jax.Array]:
    """Applies a function of a stack of matrices to the matrices of leaves, sharded as they were.

    `fn`, a `reshard.StackFn`, makes of a stack (slices, short, long) and `constants`, which every
    device has, a stack of that shape, each matrix on its own; zeros stay zeros. Leaves of both
    orientations share a stack, and `axes` says of each which are those of its matrices. `fn` must
    capture no array. `sources` says of each leaf which array by which divisor it is, where kernels
    may make a stack of those.
    """
    stacks = [_stack(x, a) for x, a in zip(leaves, axes, strict=True)]
    pairs = zip(sources or [], axes, strict=False)
    matrices = [(_matrix(x, a), divisor) for (x, divisor), a in pairs]
    groups: dict[Any, list[int]] = {}
    for i, stack in enumerate(stacks):
        groups.setdefault(_key(i, stack), []).append(i)
    results: dict[int, jax.Array] = {}
    for group in groups.values():
        for chunk in _chunks(group, [stacks[i].size for i in group]):
            mine = [matrices[i] for i in chunk if matrices]
            joined = _joined(fn, [stacks[i] for i in chunk], constants, mine)
            results.update(zip(chunk, joined, strict=True))
    return [_leaf(results[i], x, a) for i, (x, a) in enumerate(zip(leaves, axes, strict=True))]


def _stack(x: jax.Array, axes: partition.Axes) -> jax.Array:
    """The matrices of a leaf, turned where they are tall: (slices, short, long)."""
    # Axes that are merged must not be sharded.
    is_simple = len(axes.reduction) == len(axes.output) == 1 and len(axes.batch) <= 1
    stack = axes.to_stack(x if is_simple else mesh.whole(x))
    return jnp.swapaxes(_in_rows(stack), 1, 2) if stack.shape[1] > stack.shape[2] else stack


def _matrix(x: jax.Array, axes: partition.Axes) -> jax.Array | None:
    """A leaf as the one matrix that it is in memory, which `_stack` turns if it is tall."""
    order = axes.batch + axes.reduction + axes.output
    slices, *shape = axes.stack_shape(x.shape)
    return x.reshape(shape) if slices == 1 and order == tuple(range(x.ndim)) else None


def _leaf(stack: jax.Array, like: jax.Array, axes: partition.Axes) -> jax.Array:
    """The inverse of `_stack`."""
    if stack.shape != axes.stack_shape(like.shape):
        stack = _in_rows(jnp.swapaxes(stack, 1, 2))
    return mesh.laid_out(axes.from_stack(stack, like.shape), like)


def _in_rows(stack: jax.Array) -> jax.Array:
    """The stack as it is, on a GPU in memory, too.

    Flat, it has one layout. Else XLA computes the momentum of a leaf that is turned, and its new
    parameters, in the transposed layout: from transposed copies of all that they are made of.
    """
    if not (mesh.is_for_gpus() and mesh.is_undivided(stack)):
        return stack
    return jax.lax.optimization_barrier(stack.reshape(-1)).reshape(stack.shape)


def _key(i: int, stack: jax.Array) -> Any:
    """What leaves have in common that share a stack."""
    # Inside a shard_map, joined leaves would vary over the axes of all.
    kind = (stack.shape[1:], str(stack.dtype), mesh.varying(stack))
    if mesh.explicit(stack) is not None:
        spec = tuple(jax.typeof(stack).sharding.spec)
        # Matrices that lie on different devices stay there.
        return (*kind, spec, None if spec[0] is None else i)
    # Where nobody can be asked, no two leaves are known to lie alike.
    return kind if mesh.is_one_device() or mesh.has_partitioner() else (*kind, i)


def _chunks(group: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Runs of leaves that have `LARGEST` elements at most, or are one leaf."""
    chunks: list[list[int]] = []
    total = LARGEST + 1
    for i, size in zip(group, sizes, strict=True):
        if total + size > LARGEST:
            chunks.append([])
            total = 0
        chunks[-1].append(i)
        total += size
    return chunks


def _joined(
    fn: reshard.StackFn,
    stacks: Sequence[jax.Array],
    constants: Sequence[jax.Array],
    matrices: Sequence[Any] = (),
) -> Sequence[jax.Array]:
    """The results for some leaves by one call of `fn`."""
    is_explicit = mesh.explicit(stacks[0]) is not None
    is_local = mesh.is_local(stacks[0]) or not stacks[0].size
    if not is_explicit and not is_local and mesh.has_partitioner():
        return reshard.by_partitioner(fn, stacks, constants)
    stack = execute.stacked(stacks, matrices)
    run = reshard.by_types if is_explicit else _in_pieces
    return reshard.split(run(fn, stack, constants), stacks)


def _in_pieces(fn: reshard.StackFn, stack: jax.Array, constants: Sequence[jax.Array]) -> jax.Array:
    """`fn` on a stack that may be larger than one should be."""
    slices = max(1, LARGEST // max(1, math.prod(stack.shape[1:])))
    if stack.shape[0] <= slices:
        return fn(stack, *constants)
    pieces = (stack[i : i + slices] for i in range(0, len(stack), slices))
    return jnp.concatenate([fn(piece, *constants) for piece in pieces])
