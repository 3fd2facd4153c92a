"""Leaves gathered into calls of kernels: which ones fill blocks, and what shares a launch.

The leaves are those of `execute.py`, which hands in how XLA computes one of them: `by_xla`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mars_optax._src import mesh
from mars_optax._src.kernels import shards, tiling

_Outputs = tuple[jax.Array, ...]

# Programs of a call, each with a sum of its own: about eight for each of a Hopper GPU's 132
# multiprocessors. More only where there are more rows than that.
_PROGRAMS: Final = 1024
# Before, Pallas interprets no transposed references.
_INTERPRETS: Final = (0, 11)
# Rows of matrices from which on kernels make symmetric products faster, and for which they are.
_SHORTEST: Final = 576
_LEAST: Final = 32
# Most leaves of a launch that makes a stack.
_MOST: Final = 64
# A Hopper GPU's multiprocessors, each of which computes one tile of so many rows at a time.
_AT_ONCE: Final = 132
_TILE: Final = 128


def all_but_huge(leaves: Sequence[Any]) -> list[int]:
    """The leaves for which there is a kernel at all."""
    return [i for i, leaf in enumerate(leaves) if 0 < leaf.size <= tiling.LARGEST]


def small_and_many(leaves: Mapping[int, Any]) -> list[int]:
    """The leaves that fill whole groups, so that one launch takes the place of many."""
    keys = {
        i: (leaf.size, leaf.dtypes)
        for i, leaf in leaves.items()
        if tiling.WARPGROUP <= leaf.size <= tiling.SMALL and tiling.fills(leaf.size)
    }
    order = list(keys)
    groups = tiling.group(list(keys.values()), [tiling.GROUP] * len(keys))
    return sorted(order[k] for group in groups if len(group) == tiling.GROUP for k in group)


def large(leaves: Mapping[int, Any]) -> list[int]:
    """The leaves with one norm, which XLA would reduce in two passes of some hundred numbers.

    Of the 49 such matrices of GPT-2 small the second passes take about a tenth of a step. And the
    largest blocks: smaller ones were not measured.
    """
    tiles = {i: tiling_of_norms(leaf) for i, leaf in leaves.items() if leaf.size > tiling.SMALL}
    return [i for i, t in tiles.items() if t and t.rows == 1 and t.block == tiling.BLOCKS[0]]


def tiling_of_norms(leaf: Any) -> tiling.Tiling | None:
    """The blocks of a leaf whose norms are taken; None where they do not end with one."""
    if leaf.rows is None or not 0 < leaf.size <= tiling.LARGEST:
        return None
    return tiling.tile(leaf.size, leaf.rows, is_whole=True)


def elementwise(
    fn: Any, leaves: Any, scalars: Any, by_xla: Any, interpret: bool, message: Any
) -> list[_Outputs]:
    """`fn` on leaves of one mesh, by kernels on each device's shards.

    Where kernels were asked for, `message` is the message for a reason: a platform without them is
    an error. None leaves such a platform, and TPUs, to XLA.
    """
    data, on = _of_arrays(leaves, "operands", "factor")
    xla = on(lambda mine, table: [by_xla(fn, leaf, tuple(table)) for leaf in mine])
    gpu = on(functools.partial(_on_gpu, fn, by_xla, interpret))
    platforms = {"cuda": gpu, "tpu": xla, "default": xla}
    if message is not None:
        refused = functools.partial(_refused_p.bind, message=message)
        platforms["tpu"] = on(lambda mine, table: [_on_tpu(fn, leaf, table) for leaf in mine])
        platforms["default"] = lambda *args: jax.tree.map(refused, xla(*args))
    n_outputs = len(leaves[0].out_dtypes)
    run = functools.partial(shards.on_shards, _by_platform(platforms, interpret), n_outputs)
    return mesh.opaque(run, xla)(_table(scalars), data)


def squares(fn: Any, leaves: Any, scalars: Any, by_xla: Any, interpret: bool) -> list[jax.Array]:
    """Squares of norms by kernels that share launches and the last pass; by XLA but on GPUs."""
    data, on = _of_arrays(leaves, "operands")
    xla = on(lambda mine, table: [by_xla(fn, leaf, tuple(table)) for leaf in mine])
    gpu = on(functools.partial(_squares_on_gpu, fn, interpret))
    run = mesh.opaque(_by_platform({"cuda": gpu, "default": xla}, interpret), xla)
    return run(_table(scalars), data)


def has_products(x: jax.Array, interpret: bool) -> bool:
    """Whether there is a kernel for the symmetric products of a stack of matrices.

    Of small ones little more than what they are padded with would be left.
    """
    can_run = not interpret or jax.__version_info__ >= _INTERPRETS
    return (
        can_run and str(x.dtype) in ("bfloat16", "float16") and x.size > 0 and x.shape[1] >= _LEAST
    )


def products_are_faster(x: jax.Array) -> bool:
    """Whether the kernel was measured to be faster on matrices of these sizes.

    Where XLA computes all tiles at once, or in two turns, half of them gain nothing.
    """
    slices, rows, columns = x.shape
    is_padded = any(-size % 64 > size // 16 for size in (rows, columns))
    are_few = slices * (-(-rows // _TILE)) ** 2 <= 2 * _AT_ONCE
    is_large = rows >= _SHORTEST and not is_padded and not are_few
    return is_large and has_products(x, interpret=False)


def can_stack(stack: jax.Array, matrices: Sequence[jax.Array]) -> bool:
    """Whether there is a kernel that makes one stack of matrices; `stack` is that of the first."""
    is_whole = all(size % tiling.SIDE == 0 for size in stack.shape[1:])
    is_rounded = str(stack.dtype) in ("bfloat16", "float16")
    are_known = all(str(x.dtype) == "float32" for x in matrices)
    return is_whole and is_rounded and are_known and stack.size > 0


def stacked(stacks: Sequence[jax.Array], sources: Sequence[Any], interpret: bool) -> jax.Array:
    """Stacks of one matrix each as one: by XLA of them, on GPUs of (matrix, divisor)."""

    def gpu(stacks: Sequence[jax.Array], matrices: Any, divisors: jax.Array) -> jax.Array:
        from mars_optax._src.kernels import gather

        like = (stacks[0].shape[1:], stacks[0].dtype)
        runs = [slice(i, i + _MOST) for i in range(0, len(matrices), _MOST)]
        parts = [gather.stacked(matrices[run], divisors[run], *like, interpret) for run in runs]
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def xla(stacks: Sequence[jax.Array], *unused: Any) -> jax.Array:
        return jnp.concatenate(stacks)

    matrices, divisors = zip(*sources, strict=True)
    run = mesh.opaque(_by_platform({"cuda": gpu, "default": xla}, interpret), xla)
    ones = jnp.concatenate([x.reshape(1) for x in divisors])
    result: jax.Array = run(tuple(stacks), matrices, ones)
    return result


def newton_schulz(
    by_xla: Any, x: jax.Array, table: jax.Array, interpret: bool, message: Any = None
) -> jax.Array:
    """The iteration on a stack of matrices, which a device has whole, with half of the products.

    `by_xla` iterates on a stack with a table of coefficients, and takes a `polynomial`; `message`
    is as in `elementwise`.
    """

    def gpu(x: jax.Array, table: jax.Array) -> jax.Array:
        from mars_optax._src.kernels import symmetric

        result = by_xla(symmetric.padded(x), table, polynomial=symmetric.polynomial(interpret))
        return result[:, : x.shape[1], : x.shape[2]]

    platforms = {"cuda": gpu, "tpu": by_xla, "default": by_xla}
    if message is not None:
        platforms["default"] = lambda *args: _refused_p.bind(by_xla(*args), message=message)
    run = mesh.opaque(_by_platform(platforms, interpret), by_xla)
    if mesh.explicit(x) is None:
        result: jax.Array = run(x, table)
        return result

    def local(table: jax.Array, data: Any) -> list[_Outputs]:
        return [(run(data[0][0][0], table),)]

    return shards.on_shards(local, 1, table, [((x,), None)])[0][0]


def _of_arrays(leaves: Sequence[Any], *names: str) -> tuple[list[Any], Any]:
    """Their arrays, and what makes of a function of leaves and a table one of table and arrays."""

    def on(run: Callable[[list[Any], jax.Array], Any]) -> Callable[..., Any]:
        def from_arrays(table: jax.Array, data: Any) -> Any:
            fields = [dict(zip(names, arrays, strict=True)) for arrays in data]
            pairs = zip(leaves, fields, strict=True)
            return run([dataclasses.replace(leaf, **own) for leaf, own in pairs], table)

        return from_arrays

    return [tuple(getattr(leaf, name) for name in names) for leaf in leaves], on


def _by_platform(functions: Mapping[str, Any], interpret: bool) -> Callable[..., Any]:
    """Each function in the programs of its platform; the GPU's is the one that is interpreted."""
    gpu: Callable[..., Any] = functions["cuda"]
    return gpu if interpret else lambda *args: jax.lax.platform_dependent(*args, **functions)


def _table(scalars: Sequence[Any]) -> jax.Array:
    """Scalars as the one array that kernels get."""
    return jnp.asarray(scalars or [0.0], jnp.float32)


def _on_gpu(fn: Any, by_xla: Any, interpret: bool, leaves: Any, table: jax.Array) -> list[_Outputs]:
    """Small leaves of one size and their dtypes share a call."""
    # Imported where it is needed: it is neither light nor everywhere.
    from mars_optax._src.kernels import mosaic_gpu

    flat, keys = [], []
    for leaf in leaves:
        fits = leaf.rows is not None and tiling.tile(leaf.size, leaf.rows) is not None
        x = leaf if fits else _broadcast(leaf)
        factor, operands = jax.tree.map(lambda y: y.reshape(-1), (x.factor, x.operands))
        x = dataclasses.replace(x, operands=operands, factor=factor)
        flat.append(x)
        keys.append((x.size, x.rows, x.dtypes, x.factor is None, fits))
    # One function for calls of one key and number of leaves, which are then lowered once.
    programs: dict[Any, Any] = {}
    results: dict[int, _Outputs] = {}
    lengths = [tiling.GROUP if x.size <= tiling.SMALL else 1 for x in leaves]
    for indices in tiling.group(keys, lengths):
        key, mine = keys[indices[0]], [flat[i] for i in indices]
        of_block = fn if key[-1] else _factor_last(fn)
        tiles, aliases = tiling.tile(mine[0].size, mine[0].rows or 1), mine[0].aliases
        assert tiles is not None
        ends: Any = [()] * len(mine)
        if tiles.rest:
            ends, mine = _ended(functools.partial(by_xla, of_block), mine, table, tiles.covered)
        outputs: Any = ends
        if tiles.covered:
            call = functools.partial(mosaic_gpu.call, of_block, tiles=tiles, interpret=interpret)
            call = functools.partial(call, out_dtypes=mine[0].out_dtypes, aliases=aliases)
            program = programs.setdefault(key, jax.jit(call))
            outputs = program([(x.operands, x.factor) for x in mine], table)
        for i, output, end in zip(indices, outputs, ends, strict=True):
            is_cut = tiles.covered and tiles.rest
            results[i] = tuple(
                jnp.concatenate([x[: tiles.covered], end[k]]) if is_cut and k not in aliases else x
                for k, x in enumerate(output)
            )
    return [tuple(x.reshape(leaf.shape) for x in results[i]) for i, leaf in enumerate(leaves)]


def _ended(by_xla: Any, leaves: Any, table: jax.Array, start: int) -> tuple[list[Any], list[Any]]:
    """The outputs from `start` on, which no block covers, and the leaves with them in place.

    What is written over an operand is written before a kernel gets that, which leaves its end
    alone. Written after the kernel, in a loop, XLA of JAX 0.11 took it for part of it, and failed.
    """
    replace = dataclasses.replace
    last = [replace(leaf, operands=tuple(x[start:] for x in leaf.operands)) for leaf in leaves]
    ends = [by_xla(leaf, tuple(table)) for leaf in last]
    # Operands are overwritten: without an order the compiler would copy them.
    in_order: Any = jax.lax.optimization_barrier
    ends, operands = in_order((ends, [x.operands for x in leaves]))
    results = []
    for leaf, mine, end in zip(leaves, map(list, operands), ends, strict=True):
        for output, operand in leaf.aliases.items():
            mine[operand] = jax.lax.dynamic_update_slice(mine[operand], end[output], (start,))
        results.append(replace(leaf, operands=tuple(mine)))
    return ends, results


def _on_tpu(fn: Any, leaf: Any, table: jax.Array) -> _Outputs:
    from mars_optax._src.kernels import mosaic_tpu

    if leaf.rows is None:
        fn, leaf = _factor_last(fn), _broadcast(leaf)
    factors = None if leaf.factor is None else leaf.factor.reshape(-1)
    return mosaic_tpu.call(fn, leaf.operands, factors, table, leaf.out_dtypes, leaf.aliases)


def _broadcast(leaf: Any) -> Any:
    """The factor as one more operand, where it does not fall into equal rows."""
    factor = jnp.broadcast_to(leaf.factor, leaf.shape)
    return dataclasses.replace(leaf, operands=(*leaf.operands, factor), factor=None)


def _factor_last(fn: Any) -> Any:
    """`fn` of operands whose last one is the factor."""
    return lambda operands, _, scalars: fn(operands[:-1], operands[-1], scalars)


def programs_per_row(blocks: int, most: int) -> int:
    """Programs that share the blocks of a row, evenly if possible: known loops can be unrolled."""
    most = max(1, min(blocks, most))
    return next((n for n in range(most, most // 2, -1) if blocks % n == 0), most)


def _squares_on_gpu(fn: Any, interpret: bool, leaves: Any, table: jax.Array) -> list[jax.Array]:
    """Leaves of one kind share a call and its last sum."""
    from mars_optax._src.kernels import mosaic_gpu

    keys = [(leaf.size, leaf.rows, leaf.dtypes) for leaf in leaves]
    programs: dict[Any, Any] = {}
    results: dict[int, jax.Array] = {}
    for indices in tiling.group(keys, [tiling.GROUP] * len(leaves)):
        mine = [leaves[i] for i in indices]
        tiles = tiling_of_norms(mine[0])
        assert tiles is not None
        per_row = programs_per_row(tiles.blocks, _PROGRAMS // (len(mine) * tiles.rows))
        how: Any = {"tiles": tiles, "per_row": per_row, "interpret": interpret}
        call = functools.partial(
            mosaic_gpu.partial_squares, lambda x, k: fn(x, k, jnp.dtype("float32")), **how
        )
        program = programs.setdefault((keys[indices[0]], len(mine)), jax.jit(call))
        sums = program([[x.reshape(-1) for x in leaf.operands] for leaf in mine], table)
        # A call's sums are added by themselves: one sum for all calls was measured to be slower.
        for i, leaf, total in zip(indices, mine, jnp.sum(sums, axis=2), strict=True):
            ones = len(leaf.axes)
            results[i] = total.reshape(*leaf.shape[: len(leaf.shape) - ones], *(1,) * ones)
    return [results[i] for i in range(len(leaves))]


# Its compilation is the refusal: which platform a program is for is not known before.
_refused_p: Final[Any] = Primitive("mars_optax_kernels")
_refused_p.def_abstract_eval(lambda aval, message: aval)


def _refuse(ctx: Any, *unused: Any, message: Callable[[str], str]) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    raise NotImplementedError(message(f"there is no kernel for {' and '.join(platforms)}"))


mlir.register_lowering(_refused_p, _refuse)
