"""Elementwise functions, and sums of their squares, as Mosaic GPU kernels for Hopper.

Flat leaves of one size share a call: `leaves` has the operands of each, shape=(size,). `scalars`
are float32, `tiles` says how each leaf is cut, `interpret` runs on any machine.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mars_optax._src.kernels import rewrite, tiling

_AXES = ("leaf", "row", "block")
_struct = jax.ShapeDtypeStruct


def call(
    fn: Callable[..., tuple[Any, ...]],
    leaves: Sequence[tuple[Sequence[jax.Array], jax.Array | None]],
    scalars: jax.Array,
    out_dtypes: Sequence[Any],
    aliases: Mapping[int, int],
    tiles: tiling.Tiling,
    *,
    interpret: bool = False,
) -> list[tuple[jax.Array, ...]]:
    """Runs `fn` of (operands, factor, scalars) on every block; leaves have factors, shape=(rows,).

    An output may be written over the operand of its dtype that `aliases` names, and keeps the rest
    of that. The rest of any other output is undefined.
    """
    n_operands, n_outputs = len(leaves[0][0]), len(out_dtypes)
    has_factor = leaves[0][1] is not None
    stride = n_operands + has_factor
    if not interpret:
        fn = rewrite.rewritten(fn, rewrite.GPU)

    def body(where: Callable[[int], Any], scalars_ref: Any, *refs: Any) -> None:
        out_refs = refs[stride * len(leaves) :]
        row, block = where(1), where(2)
        at = pl.ds((row * tiles.blocks + block) * tiles.block, tiles.block)

        def on_leaf(i: int) -> None:
            mine = refs[i * stride : (i + 1) * stride]
            values = tuple(_laid_out(ref[at], tiles.block, interpret) for ref in mine[:n_operands])
            factor = mine[n_operands][row] if has_factor else None
            outputs = fn(values, factor, tuple(scalars_ref[k] for k in range(scalars.size)))
            for k, (value, dtype) in enumerate(zip(outputs, out_dtypes, strict=True)):
                out_refs[i * n_outputs + k][at] = value.astype(dtype)

        _for_leaf(where(0), len(leaves), on_leaf)

    # The scalars come before the leaves.
    operands = [scalars, *(x for leaf in leaves for x in jax.tree.leaves(leaf))]
    targets = {
        i * n_outputs + out: 1 + i * stride + operand
        for i in range(len(leaves))
        for out, operand in aliases.items()
    }
    shapes = [_struct(leaves[0][0][0].shape, dtype) for _ in leaves for dtype in out_dtypes]
    grid = (len(leaves), tiles.rows, tiles.blocks)
    results = _launch(body, grid, operands, shapes, targets, "mars_step", interpret)
    return [tuple(results[i * n_outputs : (i + 1) * n_outputs]) for i in range(len(leaves))]


def partial_squares(
    fn: Callable[..., jax.Array],
    leaves: Sequence[Sequence[jax.Array]],
    scalars: jax.Array,
    tiles: tiling.Tiling,
    per_row: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Sums the squares of `fn` of (operands, scalars), in float32; `tiles` have no rest.

    Each of `per_row` programs sums every `per_row`-th block of a row: shape=(leaf, rows, per_row).
    """
    n_operands, n_sums = len(leaves[0]), tiles.rows * per_row
    if not interpret:
        fn = rewrite.rewritten(fn, rewrite.GPU)

    def body(where: Callable[[int], Any], scalars_ref: Any, *refs: Any) -> None:
        row, first = where(1), where(2)

        def on_leaf(i: int) -> None:
            mine = refs[i * n_operands : (i + 1) * n_operands]

            def add(k: Any, total: jax.Array) -> jax.Array:
                block = row * tiles.blocks + first + k * per_row
                at = pl.ds(block * tiles.block, tiles.block)
                values = tuple(_laid_out(ref[at], tiles.block, interpret) for ref in mine)
                value = fn(values, tuple(scalars_ref[k] for k in range(scalars.size)))
                return total + value * value

            zero = _laid_out(jnp.zeros(tiles.block, jnp.float32), tiles.block, interpret)
            rounds: Any = tiles.blocks // per_row
            if tiles.blocks % per_row:
                rounds = (tiles.blocks - first + per_row - 1) // per_row
            total = jax.lax.fori_loop(0, rounds, add, zero)
            refs[-1][i * n_sums + row * per_row + first] = jnp.sum(total)

        _for_leaf(where(0), len(leaves), on_leaf)

    operands = [scalars, *(x for arrays in leaves for x in arrays)]
    shapes = [_struct((len(leaves) * n_sums,), jnp.float32)]
    grid = (len(leaves), tiles.rows, per_row)
    (sums,) = _launch(body, grid, operands, shapes, {}, "mars_norms", interpret)
    return sums.reshape(grid)


def _for_leaf(leaf: Any, n_leaves: int, on_leaf: Callable[[int], None]) -> None:
    """Calls `on_leaf` with the index of a program's leaf, as a Python number."""
    if n_leaves == 1:
        on_leaf(0)
        return
    for i in range(n_leaves):
        # Branches of their own: those of one switch would each carry all references.
        pl.when(leaf == i)(functools.partial(on_leaf, i))


def _laid_out(value: jax.Array, block: int, interpret: bool) -> jax.Array:
    """Every operand of a thread's at the same places, whatever the widths of their dtypes."""
    if interpret:
        return value
    layout = plgpu.Layout.WG_STRIDED((block,), vec_size=min(2, block // tiling.WARPGROUP))
    return plgpu.layout_cast(value, layout)


def _launch(
    body: Any, grid: Any, operands: Any, shapes: Any, targets: Any, name: str, interpret: bool
) -> list[jax.Array]:
    """Runs `body` on a GPU, where an aliased output is the reference of its operand."""
    if interpret:
        # Pallas's interpreter has no meshes.
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        outputs = pl.pallas_call(
            lambda *refs: body(pl.program_id, *refs),
            out_shape=tuple(shapes),
            grid=grid,
            in_specs=[anywhere] * len(operands),
            out_specs=(anywhere,) * len(shapes),
            input_output_aliases={operand: out for out, operand in targets.items()},
            interpret=True,
            name=name,
        )(*operands)
        return list(outputs)
    fresh = [i for i in range(len(shapes)) if i not in targets]

    def kernel(*refs: Any) -> None:
        of = {out: refs[operand] for out, operand in targets.items()}
        of.update(zip(fresh, refs[len(operands) :], strict=True))
        where = [jax.lax.axis_index(name) for name in _AXES]
        body(where.__getitem__, *refs[: len(operands)], *(of[i] for i in range(len(shapes))))

    run = pl.kernel(
        kernel,
        out_type=tuple(shapes[i] for i in fresh),
        mesh=plgpu.Mesh(grid=grid, grid_names=_AXES),
        compiler_params=plgpu.CompilerParams(),
        name=name,
    )

    def on_references(refs: Any) -> None:
        arguments = list(operands)
        for out, operand in targets.items():
            arguments[operand] = refs[out]
        for out, value in zip(fresh, run(*arguments), strict=True):
            refs[out][...] = value

    # The references end here: derivatives and batching could not pass through them.
    initial = [
        operands[targets[i]] if i in targets else jnp.zeros(shape.shape, shape.dtype)
        for i, shape in enumerate(shapes)
    ]
    return list(pl.run_state(on_references)(initial))
