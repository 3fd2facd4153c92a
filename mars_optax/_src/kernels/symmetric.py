"""Half of the symmetric products of Newton-Schulz, by Mosaic GPU kernels for Hopper.

X X^T and a I + b A + c A A are symmetric for a symmetric A: a kernel computes the blocks on and
below the diagonal, and writes each of those below a second time, transposed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# What a row of a tile in shared memory has, in elements of 16 bits: as much is loaded at once.
_SWIZZLED: Final = 64
# Registers of a thread that loads.
_LOADER: Final = 40
# Before, transposed references are written from a layout of their own.
_TRANSPOSES: Final = jax.__version_info__ >= (0, 11)
# Rows up to which small blocks were measured to be faster.
_NARROW: Final = 1408


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a product is cut, and who computes it.

    Attributes:
      block: rows and columns of a block of the result, a multiple of 64 times `parts`.
      stages: loads under way, at least 2.
      groups: blocks that a program works on in turn; one is written while the next is computed.
      parts: warpgroups that share a block, each with rows of its own.
      programs: of a launch, as many as an H200 has multiprocessors. A program computes with
        `groups * parts` warpgroups, at least 2.
    """

    block: int = 128
    stages: int = 5
    groups: int = 2
    parts: int = 1
    programs: int = 132


_WIDE: Final = Tuning(block=192, stages=3, groups=1, parts=3)


def padded(x: jax.Array) -> jax.Array:
    """A stack whose rows and columns the kernels take; those of zeros stay zero."""
    return jnp.pad(x, ((0, 0), *((0, -size % _SWIZZLED) for size in x.shape[1:])))


@functools.cache
def polynomial(interpret: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """What makes a I + b A + c A A of a padded stack X, A = X X^T, and the coefficients.

    The square of A is not rounded before it is added.
    """

    def run(x: jax.Array, coefficients: jax.Array) -> jax.Array:
        how = {"tuning": _WIDE if x.shape[1] > _NARROW else Tuning(), "interpret": interpret}
        # The kernel counts in 32 bits.
        with jax.enable_x64(False):
            return _compiled(_compiled(x, None, **how), coefficients, **how)

    return run


def place(index: Any, blocks: Any) -> tuple[Any, Any]:
    """Row and column of a block on or below the diagonal, of `blocks` rows of blocks.

    Rows r and blocks - 1 - r have blocks + 1 such blocks together: they are one line.
    """
    line, at = lax.div(index, blocks + 1), lax.rem(index, blocks + 1)
    is_first = at <= line
    return (
        lax.select(is_first, line, blocks - 1 - line),
        lax.select(is_first, at, at - line - 1),
    )


def product(
    x: jax.Array,
    coefficients: jax.Array | None = None,
    tuning: Tuning = Tuning(),
    interpret: Any = False,
) -> jax.Array:
    """X X^T of each matrix X, or a I + b X + c X X of a symmetric one.

    Args:
      x: shape=(batch, rows, columns), `padded`.
      coefficients: (a, b, c), or None for X X^T.
      tuning: how the product is cut.
      interpret: whether Pallas's interpreter of GPU kernels runs it, or parameters of that.
    """
    if interpret is True:
        interpret = plgpu.InterpretGPUParams()  # type: ignore[attr-defined, unused-ignore]
    batch, m, n = x.shape
    block, depth, stages = tuning.block, _SWIZZLED, tuning.stages
    # A warpgroup has `side` rows of a block, cut into squares.
    side, warpgroups = block // tuning.parts, tuning.groups * tuning.parts
    blocks, steps = pl.cdiv(m, block), pl.cdiv(n, depth)
    of_matrix = blocks * (blocks + 1) // 2
    programs = min(tuning.programs, batch * of_matrix)

    scratch = {
        "lhs": swizzled((stages, block, depth), x.dtype),
        "rhs": swizzled((stages, block, depth), x.dtype),
        "written": swizzled((warpgroups, tuning.parts, side, side), x.dtype),
        # Each group waits for its own blocks: a barrier must not complete twice between two waits.
        "filled": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.groups * stages),
        "emptied": plgpu.Barrier(num_arrivals=tuning.parts, num_barriers=stages),
        "added": plgpu.Barrier(num_arrivals=tuning.parts, num_barriers=warpgroups),
    }

    def body(x_ref: Any, *refs: Any) -> None:
        *coefficients_ref, out_ref = refs
        program, me = lax.axis_index("program"), lax.axis_index("warpgroup")
        group, part = lax.div(me, tuning.parts), lax.rem(me, tuning.parts)
        mine = lax.div(batch * of_matrix - program + programs - 1, programs)

        def located(turn: Any) -> tuple[Any, Any, Any]:
            index = program + turn * programs
            matrix, index = lax.div(index, of_matrix), lax.rem(index, of_matrix)
            return (matrix, *place(index, jnp.int32(blocks)))

        def run(lhs: Any, rhs: Any, written: Any, filled: Any, emptied: Any, added: Any) -> None:
            def load(turn: Any, _: Any) -> None:
                matrix, *both = located(turn)

                def load_columns(k: Any, _: Any) -> None:
                    slot = lax.rem(turn * steps + k, stages)
                    plgpu.barrier_wait(emptied.at[slot])
                    for at, ref in zip(both, (lhs, rhs), strict=True):
                        source = x_ref.at[matrix, pl.ds(at * block, block), pl.ds(k * depth, depth)]
                        barrier = filled.at[lax.rem(turn, tuning.groups) * stages + slot]
                        plgpu.copy_gmem_to_smem(source, ref.at[slot], barrier)

                lax.fori_loop(0, steps, load_columns, None)

            def multiply(acc: Any, slot: Any) -> None:
                factor = rhs.at[slot].transpose((1, 0))
                plgpu.wgmma(acc, lhs.at[slot, pl.ds(part * side, side)], factor)
                plgpu.wgmma_wait(1)

            def compute(i: Any, _: Any) -> None:
                turn = i * tuning.groups + group
                matrix, row, column = located(turn)
                buffer = written.at[me]
                numbers = [ref[i] for ref in coefficients_ref for i in range(3)]
                rows = pl.ds(row * block + part * side, side)
                squares = [pl.ds(column * block + s * side, side) for s in range(tuning.parts)]

                def get_added() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for s, columns in enumerate(squares):
                        source = x_ref.at[matrix, rows, columns]
                        plgpu.copy_gmem_to_smem(source, buffer.at[s], added.at[me])

                def add_columns(acc: Any, k: Any, _: Any) -> None:
                    step = turn * steps + k
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(filled.at[group * stages + slot])
                    if acc is not None:
                        multiply(acc, slot)

                    @pl.when(k > 0)
                    def give_up_the_slot_before() -> None:
                        plgpu.barrier_arrive(emptied.at[lax.rem(step + stages - 1, stages)])

                    if numbers:
                        # By now what was written before has left its place.
                        pl.when(k == min(2, steps - 1))(get_added)

                def add_all(acc: Any) -> jax.Array:
                    # A warpgroup whose rows are all past the end only gives up the slots.
                    is_inside = row * block + part * side < m
                    can_be_outside = blocks * block - m >= side
                    count: Any = lax.select(is_inside, steps, 0) if can_be_outside else steps
                    lax.fori_loop(0, count, functools.partial(add_columns, acc), None)
                    lax.fori_loop(count, steps, functools.partial(add_columns, None), None)
                    return acc[...]

                total = pl.run_scoped(add_all, plgpu.WGMMAAccumulatorRef((side, block)))
                plgpu.barrier_arrive(emptied.at[lax.rem((turn + 1) * steps - 1, stages)])
                if numbers:
                    plgpu.barrier_wait(added.at[me])
                else:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                values = []
                for s in range(tuning.parts):
                    value = total[:, s * side : (s + 1) * side]
                    if numbers:
                        a, b, c = numbers
                        value = b * buffer[s].astype(jnp.float32) + c * value
                        on_diagonal = (row == column) & (part == s)
                        value += lax.select(on_diagonal, a, 0.0) * _identity(side)
                    values.append(value.astype(x.dtype))
                    buffer[s] = values[s]
                plgpu.commit_smem()
                for s, columns in enumerate(squares):
                    plgpu.copy_smem_to_gmem(buffer.at[s], out_ref.at[matrix, rows, columns])

                @pl.when(row > column)
                def write_transposed() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for s, value in enumerate(values):
                        store_transposed(buffer.at[s], value)
                    plgpu.commit_smem()
                    for s, columns in enumerate(squares):
                        plgpu.copy_smem_to_gmem(buffer.at[s], out_ref.at[matrix, columns, rows])

            @pl.when(me == warpgroups)
            def load_all() -> None:
                plgpu.set_max_registers(_LOADER, action="decrease")
                lax.fori_loop(0, mine, load, None)
                # Every slot is given up once more than it is filled.
                for slot in range(stages):
                    plgpu.barrier_wait(emptied.at[slot])

            @pl.when(me < warpgroups)
            def compute_all() -> None:
                plgpu.set_max_registers(_registers(warpgroups), action="increase")

                @pl.when(group == 0)
                def give_up_all_slots() -> None:
                    for slot in range(stages):
                        plgpu.barrier_arrive(emptied.at[slot])

                ours = lax.div(mine - group + tuning.groups - 1, tuning.groups)
                lax.fori_loop(0, ours, compute, None)
                plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(run, **scratch, collective_axes="warpgroup")

    run = pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, m, m), x.dtype),
        mesh=plgpu.Mesh(
            grid=(programs,),
            grid_names=("program",),
            num_threads=warpgroups + 1,
            thread_name="warpgroup",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        name="mars_symmetric",
    )
    return run(x) if coefficients is None else run(x, coefficients.astype(jnp.float32))


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for matrices of 16 bits, as products and transposes take them."""
    tiling = plgpu.TilingTransform((8, _SWIZZLED)), plgpu.SwizzleTransform(128)
    return plgpu.SMEM(shape, dtype, transforms=tiling)


def _registers(warpgroups: int) -> int:
    """Of a thread that computes: what a launch gives to all, less what the loading ones keep."""
    # Asking for more than there is would wait for ever.
    launched = 65536 // (128 * (warpgroups + 1)) // 8 * 8
    return (launched * (warpgroups + 1) - _LOADER) // warpgroups // 8 * 8


def _identity(side: int) -> jax.Array:
    rows, columns = (
        plgpu.broadcasted_iota(jnp.int32, (side, side), axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )
    return (rows == columns).astype(jnp.float32)


def store_transposed(ref: Any, value: jax.Array) -> None:
    """Writes the transpose of a matrix, laid out as a product, to swizzled memory."""
    if not _TRANSPOSES:
        value = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    ref.transpose((1, 0))[...] = value


# By itself, a product is lowered once for all steps.
_compiled = jax.jit(product, static_argnames=("tuning", "interpret"))
