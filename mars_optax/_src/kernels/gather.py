"""Matrices of many leaves, divided and rounded, as one stack: a Mosaic GPU kernel for Hopper."""

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mars_optax._src.kernels import symmetric, tiling

_SIDE: Final = tiling.SIDE
_AXES: Final = ("leaf", "row", "column")


def stacked(
    leaves: Sequence[jax.Array], divisors: jax.Array, shape: Any, dtype: Any, interpret: Any = False
) -> jax.Array:
    """The matrices of leaves, each by its divisor, as a stack (slices, short, long).

    Args:
      leaves: float32 matrices (short, long), or (long, short), which are turned.
      divisors: shape=(slices,).
      shape: (short, long), a tuple of multiples of `tiling.SIDE`.
      dtype: of the stack, one of 16 bits.
      interpret: whether Pallas's interpreter of GPU kernels runs it, or parameters of that.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()  # type: ignore[attr-defined, unused-ignore]

    def body(divisors_ref: Any, *refs: Any) -> None:
        *leaf_refs, out_ref = refs
        leaf, *place = map(lax.axis_index, _AXES)
        rows, columns = (pl.ds(at * _SIDE, _SIDE) for at in place)

        def move(i: int) -> None:
            ref = leaf_refs[i]

            def divided(source: Any, layout: Any) -> jax.Array:
                how: Any = {"layout": layout, "optimized": False}
                return (plgpu.load(source, **how) / divisors_ref[i]).astype(dtype)

            if leaves[i].shape == shape:
                four = plgpu.Layout.WG_STRIDED((_SIDE, _SIDE), vec_size=4)
                out_ref[i, rows, columns] = divided(ref.at[rows, columns], four)
                return
            value = divided(ref.at[columns, rows], plgpu.Layout.WGMMA)

            def write(written: Any) -> None:
                symmetric.store_transposed(written, value)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(written, out_ref.at[i, rows, columns])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            pl.run_scoped(write, symmetric.swizzled((_SIDE, _SIDE), dtype))

        for i in range(len(leaves)):
            pl.when(leaf == i)(functools.partial(move, i))

    run = pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(leaves), *shape), dtype),
        mesh=plgpu.Mesh(grid=(len(leaves), *(n // _SIDE for n in shape)), grid_names=_AXES),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="mars_gather",
    )
    return run(divisors, *leaves)
