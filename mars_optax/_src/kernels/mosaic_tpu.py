"""Elementwise functions as Mosaic TPU kernels: one leaf in one call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mars_optax._src.kernels import rewrite

# The largest block, in rows and columns. Ten of them in float32, twice because they are loaded
# ahead, are 10 MiB of the 16 MiB of vector memory.
_ROWS: Final = 256
_COLUMNS: Final = 512


def call(
    fn: Callable[..., tuple[Any, ...]],
    operands: Sequence[jax.Array],
    factors: jax.Array | None,
    scalars: jax.Array,
    out_dtypes: Sequence[Any],
    aliases: Mapping[int, int],
    *,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Runs `fn` of (operands, factor, scalars) on every block of a leaf, in the leaf's shape.

    Flattened, operands would be laid out anew. The factors, if any, are one for each of the equal
    parts along the leading axes. `aliases` names the operand that an output is written over.
    """
    fn = rewrite.rewritten(fn, rewrite.TPU)
    shape = operands[0].shape
    scalar_operands = [scalars] if factors is None else [scalars, factors]
    parts = 1 if factors is None else factors.size
    columns = shape[-1] if shape else 1
    view = (parts, operands[0].size // (parts * columns), columns)
    block = (1, _side(view[1], _ROWS, 16), _side(view[2], _COLUMNS, 128))

    def body(*refs: Any) -> None:
        numbers, refs = refs[: len(scalar_operands)], refs[len(scalar_operands) :]
        factor = None if factors is None else numbers[1][pl.program_id(0)]
        values = tuple(ref[...] for ref in refs[: len(operands)])
        outputs = fn(values, factor, tuple(numbers[0][k] for k in range(scalars.size)))
        for ref, value, dtype in zip(refs[len(operands) :], outputs, out_dtypes, strict=True):
            ref[...] = value.astype(dtype)

    spec = pl.BlockSpec(block, lambda *indices: indices)
    before = len(scalar_operands)
    results = pl.pallas_call(
        body,
        out_shape=tuple(jax.ShapeDtypeStruct(view, dtype) for dtype in out_dtypes),
        grid=tuple(pl.cdiv(n, b) for n, b in zip(view, block, strict=True)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * before + [spec] * len(operands),
        out_specs=(spec,) * len(out_dtypes),
        input_output_aliases={before + operand: out for out, operand in aliases.items()},
        interpret=interpret,
    )(*scalar_operands, *(x.reshape(view) for x in operands))
    return tuple(x.reshape(shape) for x in results)


def _side(size: int, largest: int, tile: int) -> int:
    """A side of the block: a whole number of tiles, dividing `size` if there is such a one."""
    if size <= largest:
        return size
    return next((n for n in range(largest, 0, -tile) if size % n == 0), largest)
