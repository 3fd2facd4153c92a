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
    """Runs `fn` on every block of a leaf.

    Args:
      fn: ``(operands, factor, scalars) -> outputs``, elementwise; the factor is a scalar or None.
      operands: All of one shape (..., columns); flattened, they would be laid out anew.
      factors: One for each of the equal parts along the leading axes, shape=(parts,), or None.
      scalars: shape=(number of scalars,), dtype=float32.
      out_dtypes: That of each output.
      aliases: From an output to the operand that it is written over, which has its dtype.
      interpret: What :func:`jax.experimental.pallas.pallas_call` takes.

    Returns:
      The outputs, in the shape of the operands.
    """
    fn = rewrite.rewritten(fn, rewrite.TPU)
    shape = operands[0].shape
    parts = 1 if factors is None else factors.size
    columns = shape[-1] if shape else 1
    view = (parts, operands[0].size // (parts * columns), columns)
    block = (1, _side(view[1], _ROWS, 16), _side(view[2], _COLUMNS, 128))
    grid = tuple(pl.cdiv(n, b) for n, b in zip(view, block, strict=True))
    scalar_operands = [scalars] if factors is None else [scalars, factors]

    def body(*refs: Any) -> None:
        scalars_ref, refs = refs[0], refs[1:]
        factor = None
        if factors is not None:
            factor, refs = refs[0][pl.program_id(0)], refs[1:]
        in_refs, out_refs = refs[: len(operands)], refs[len(operands) :]
        values = tuple(ref[...] for ref in in_refs)
        outputs = fn(values, factor, tuple(scalars_ref[k] for k in range(scalars.size)))
        for ref, value, dtype in zip(out_refs, outputs, out_dtypes, strict=True):
            ref[...] = value.astype(dtype)

    spec = pl.BlockSpec(block, lambda *indices: indices)
    struct: Any = jax.ShapeDtypeStruct
    results = pl.pallas_call(
        body,
        out_shape=tuple(struct(view, dtype) for dtype in out_dtypes),
        grid=grid,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalar_operands)
        + [spec] * len(operands),
        out_specs=(spec,) * len(out_dtypes),
        input_output_aliases={
            len(scalar_operands) + operand: out for out, operand in aliases.items()
        },
        interpret=interpret,
    )(*scalar_operands, *(x.reshape(view) for x in operands))
    return tuple(x.reshape(shape) for x in results)


def _side(size: int, largest: int, tile: int) -> int:
    """A side of the block: a whole number of tiles, dividing `size` if there is such a one."""
    if size <= largest:
        return size
    divisors = (n for n in range(largest, 0, -tile) if size % n == 0)
    return next(divisors, largest)
