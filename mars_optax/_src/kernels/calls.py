"""Leaves gathered into calls of kernels: which ones fill blocks, and what shares a launch."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mars_optax._src import mesh
from mars_optax._src.kernels import shards, tiling

# The leaves are those of `execute.py`, which hands in how XLA computes one of them.
Leaf = Any
_Outputs = tuple[jax.Array, ...]

# Programs of a call, each with a sum of its own: about eight for each of a Hopper GPU's 132
# multiprocessors. More only where there are more rows than that.
_PROGRAMS: Final = 1024


def all_but_huge(leaves: Sequence[Leaf]) -> list[int]:
    """The leaves for which there is a kernel at all."""
    return [i for i, leaf in enumerate(leaves) if 0 < leaf.size <= tiling.LARGEST]


def small_and_many(leaves: Mapping[int, Leaf]) -> list[int]:
    """The leaves that fill whole groups, so that one launch takes the place of many."""
    keys = {
        i: (leaf.size, leaf.dtypes)
        for i, leaf in leaves.items()
        if tiling.WARPGROUP <= leaf.size <= tiling.SMALL and tiling.fills(leaf.size)
    }
    room = {key: n - n % tiling.GROUP for key, n in Counter(keys.values()).items()}
    chosen = []
    for i, key in keys.items():
        if room[key]:
            room[key] -= 1
            chosen.append(i)
    return chosen


def whole_blocks(leaves: Mapping[int, Leaf]) -> list[int]:
    """The leaves whose norms end with a block."""
    return [i for i, leaf in leaves.items() if tiling_of_norms(leaf) is not None]


def large(leaves: Mapping[int, Leaf]) -> list[int]:
    """The leaves with one norm, which XLA would reduce in two passes of some hundred numbers.

    Of the 49 such matrices of GPT-2 small the second passes take about a tenth of a step. And the
    largest blocks: smaller ones were not measured.
    """

    def is_large(leaf: Leaf) -> bool:
        tiles = tiling_of_norms(leaf)
        is_fast = tiles is not None and tiles.rows == 1 and tiles.block == tiling.BLOCKS[0]
        return is_fast and math.prod(leaf.shape) > tiling.SMALL

    return [i for i, leaf in leaves.items() if is_large(leaf)]


def tiling_of_norms(leaf: Leaf) -> tiling.Tiling | None:
    """The blocks of a leaf whose norms are taken; None where they do not end with one."""
    size = math.prod(leaf.shape)
    if leaf.rows is None or not 0 < size <= tiling.LARGEST:
        return None
    return tiling.tile(size, leaf.rows, is_whole=True)


def elementwise(
    fn: Any,
    leaves: Sequence[Leaf],
    scalars: Sequence[Any],
    by_xla: Callable[[Any, Leaf, Sequence[Any]], _Outputs],
    *,
    refusal: Callable[[str], str] | None,
    interpret: bool,
) -> list[_Outputs]:
    """`fn` by kernels, each on its device's shards; under transformations, by XLA.

    Args:
      fn: The elementwise function.
      leaves: What it is run on.
      scalars: Its further arguments.
      by_xla: The outputs of `fn` on one leaf.
      refusal: The message for a reason, where kernels were asked for: a platform without them is
        an error. None leaves such a platform, and TPUs, to XLA.
      interpret: Whether to run in Pallas's interpreter.
    """
    data, on = _of_arrays(leaves, ("operands", "factor"))
    xla = on(lambda mine, table: [by_xla(fn, leaf, tuple(table)) for leaf in mine])
    gpu = on(lambda mine, table: _on_gpu(fn, mine, table, by_xla, interpret))
    platforms = {"cuda": gpu, "tpu": xla, "default": xla}
    if refusal is not None:
        platforms["tpu"] = on(lambda mine, table: [_on_tpu(fn, leaf, table) for leaf in mine])
        refused = functools.partial(_refused_p.bind, refusal=refusal)
        platforms["default"] = lambda *args: jax.tree.map(refused, xla(*args))
    local = gpu if interpret else _by_platform(platforms)
    n_outputs = len(leaves[0].out_dtypes)
    run_shards = functools.partial(shards.on_shards, local, n_outputs)
    outputs: list[_Outputs] = mesh.opaque(run_shards, xla)(_table(scalars), data)
    return outputs


def squares(
    fn: Any,
    leaves: Sequence[Leaf],
    scalars: Sequence[Any],
    by_xla: Callable[[Any, Leaf, Sequence[Any]], jax.Array],
    *,
    interpret: bool,
) -> list[jax.Array]:
    """Squares of norms by kernels that share launches and the last pass, in programs for GPUs.

    Elsewhere and under transformations, by XLA. The arguments are those of `elementwise`.
    """
    data, on = _of_arrays(leaves, ("operands",))
    xla = on(lambda mine, table: [by_xla(fn, leaf, tuple(table)) for leaf in mine])
    gpu = on(lambda mine, table: _squares_on_gpu(fn, mine, table, interpret))
    run = mesh.opaque(gpu if interpret else _by_platform({"cuda": gpu, "default": xla}), xla)
    results: list[jax.Array] = run(_table(scalars), data)
    return results


def _of_arrays(leaves: Sequence[Leaf], names: Sequence[str]) -> tuple[list[Any], Any]:
    """Their arrays, and what makes of a function of leaves and a table one of table and arrays."""

    def on(run: Callable[[list[Leaf], jax.Array], Any]) -> Callable[..., Any]:
        def from_arrays(table: jax.Array, data: Any) -> Any:
            fields = (dict(zip(names, arrays, strict=True)) for arrays in data)
            pairs = zip(leaves, fields, strict=True)
            return run([dataclasses.replace(leaf, **own) for leaf, own in pairs], table)

        return from_arrays

    return [tuple(getattr(leaf, name) for name in names) for leaf in leaves], on


def _by_platform(functions: Mapping[str, Any]) -> Callable[..., Any]:
    """Each function in the programs of its platform."""
    return lambda *args: jax.lax.platform_dependent(*args, **functions)


def _table(scalars: Sequence[Any]) -> jax.Array:
    """Scalars as the one array that kernels get."""
    return jnp.asarray(scalars or [0.0], jnp.float32)


def _on_gpu(
    fn: Any, leaves: Sequence[Leaf], table: jax.Array, by_xla: Any, interpret: bool
) -> list[_Outputs]:
    """Small leaves of one size and their dtypes share a call."""
    # Imported where it is needed: it is neither light nor everywhere.
    from mars_optax._src.kernels import mosaic_gpu

    tiled = [
        leaf.rows is not None and tiling.tile(leaf.size, leaf.rows) is not None for leaf in leaves
    ]
    flat = [
        _flat(leaf if fits else _broadcast(leaf)) for leaf, fits in zip(leaves, tiled, strict=True)
    ]
    keys = [
        (x.size, x.rows, x.dtypes, x.factor is None, fits)
        for x, fits in zip(flat, tiled, strict=True)
    ]
    # One function for equal calls, which are then lowered once.
    programs: dict[Any, Any] = {}
    results: dict[int, _Outputs] = {}
    for indices in tiling.group(
        keys, [tiling.GROUP if x.size <= tiling.SMALL else 1 for x in leaves]
    ):
        key, mine = keys[indices[0]], [flat[i] for i in indices]
        of_block = fn if key[-1] else _factor_last(fn)
        tiles = tiling.tile(mine[0].size, mine[0].rows or 1)
        assert tiles is not None
        ends: Any = [()] * len(mine)
        if tiles.rest:
            ends, mine = _ended(functools.partial(by_xla, of_block), mine, table, tiles.covered)
        if not tiles.covered:
            results.update(zip(indices, ends, strict=True))
            continue
        if key not in programs:
            programs[key] = jax.jit(
                functools.partial(
                    mosaic_gpu.call,
                    of_block,
                    out_dtypes=mine[0].out_dtypes,
                    aliases=mine[0].aliases,
                    tiles=tiles,
                    interpret=interpret,
                )
            )
        outputs = programs[key]([(x.operands, x.factor) for x in mine], table)
        for i, output, end in zip(indices, outputs, ends, strict=True):
            results[i] = tuple(
                jnp.concatenate([x[: tiles.covered], end[k]])
                if tiles.rest and k not in mine[0].aliases
                else x
                for k, x in enumerate(output)
            )
    return [tuple(x.reshape(leaf.shape) for x in results[i]) for i, leaf in enumerate(leaves)]


def _ended(
    by_xla: Any, leaves: Sequence[Leaf], table: jax.Array, start: int
) -> tuple[list[_Outputs], list[Leaf]]:
    """The outputs from `start` on, which no block covers, and the leaves with them in place.

    What is written over an operand is written before a kernel gets that, which leaves its end
    alone. Written into what the kernel returns, in a loop, XLA of JAX 0.11 took it for a part of
    the kernel, and failed.
    """
    replace, all_operands = dataclasses.replace, [x.operands for x in leaves]
    ends = [
        by_xla(replace(leaf, operands=tuple(x[start:] for x in leaf.operands)), tuple(table))
        for leaf in leaves
    ]
    # Operands are overwritten: without an order the compiler would copy them.
    in_order: Any = jax.lax.optimization_barrier
    ends, all_operands = in_order((ends, all_operands))
    results = []
    for leaf, mine, end in zip(leaves, map(list, all_operands), ends, strict=True):
        for output, operand in leaf.aliases.items():
            mine[operand] = jax.lax.dynamic_update_slice(mine[operand], end[output], (start,))
        results.append(replace(leaf, operands=tuple(mine)))
    return ends, results


def _on_tpu(fn: Any, leaf: Leaf, table: jax.Array) -> _Outputs:
    """Each leaf in its own shape: flattened, it would be laid out anew."""
    from mars_optax._src.kernels import mosaic_tpu

    if leaf.rows is None:
        fn, leaf = _factor_last(fn), _broadcast(leaf)
    factors = None if leaf.factor is None else leaf.factor.reshape(-1)
    return mosaic_tpu.call(fn, leaf.operands, factors, table, leaf.out_dtypes, leaf.aliases)


def _flat(leaf: Leaf) -> Leaf:
    flat = functools.partial(jnp.reshape, shape=-1)
    factor, operands = jax.tree.map(flat, (leaf.factor, leaf.operands))
    return dataclasses.replace(leaf, operands=operands, factor=factor)


def _broadcast(leaf: Leaf) -> Leaf:
    """The factor as one more operand, where it does not fall into equal rows."""
    factor = jnp.broadcast_to(leaf.factor, leaf.shape)
    return dataclasses.replace(leaf, operands=(*leaf.operands, factor), factor=None)


def _factor_last(fn: Any) -> Any:
    """`fn` of operands whose last one is the factor."""
    return lambda operands, _, scalars: fn(operands[:-1], operands[-1], scalars)


def programs_per_row(blocks: int, most: int) -> int:
    """How many programs share the blocks of a row.

    As many blocks each where a number from half of `most` on allows it: a compiler can unroll a
    loop whose length is fixed.
    """
    most = max(1, min(blocks, most))
    alike = (n for n in range(most, most // 2, -1) if blocks % n == 0)
    return next(alike, most)


def _squares_on_gpu(
    fn: Any, leaves: Sequence[Leaf], table: jax.Array, interpret: bool
) -> list[jax.Array]:
    """Leaves of one kind share a call and its last sum."""
    from mars_optax._src.kernels import mosaic_gpu

    keys = [(math.prod(x.shape), x.rows, x.dtypes) for x in leaves]
    # One function for equal calls, which are then lowered once.
    programs: dict[Any, Any] = {}
    results: dict[int, jax.Array] = {}
    for indices in tiling.group(keys, [tiling.GROUP] * len(leaves)):
        mine = [leaves[i] for i in indices]
        tiles = tiling_of_norms(mine[0])
        assert tiles is not None
        per_row = programs_per_row(tiles.blocks, _PROGRAMS // (len(mine) * tiles.rows))
        key = keys[indices[0]], len(mine)
        if key not in programs:
            programs[key] = jax.jit(
                functools.partial(
                    mosaic_gpu.partial_squares,
                    lambda operands, scalars: fn(operands, scalars, jnp.dtype("float32")),
                    tiles=tiles,
                    per_row=per_row,
                    interpret=interpret,
                )
            )
        sums = programs[key]([[x.reshape(-1) for x in leaf.operands] for leaf in mine], table)
        # A call's sums are added by themselves: one sum for all calls was measured to be slower.
        totals = jnp.sum(sums, axis=2)
        for i, total in zip(indices, totals, strict=True):
            shape = leaves[i].shape[: len(leaves[i].shape) - len(leaves[i].axes)]
            results[i] = total.reshape(*shape, *(1,) * len(leaves[i].axes))
    return [results[i] for i in range(len(leaves))]


# Its compilation is the refusal: which platform a program is for is not known before.
_refused_p: Final[Any] = Primitive("mars_optax_kernels")
_refused_p.def_abstract_eval(lambda aval, refusal: aval)


def _refuse(ctx: Any, *unused: Any, refusal: Callable[[str], str]) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    raise NotImplementedError(refusal(f"there is no kernel for {' and '.join(platforms)}"))


mlir.register_lowering(_refused_p, _refuse)
