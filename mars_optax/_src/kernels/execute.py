"""Executes an elementwise function on many leaves: chooses between XLA and the kernels."""

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mars_optax._src import types
from mars_optax._src.kernels import shards, tiling, transforms

# (operands, factor, scalars) -> outputs, all elementwise; an absent factor is None.
Elementwise = Callable[[tuple[Any, ...], Any, tuple[Any, ...]], tuple[Any, ...]]

_INTERPRET: Final = "MARS_OPTAX_PALLAS_INTERPRET"
# Those that kernels read and write.
DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What an elementwise function reads and writes of one leaf.

    Attributes:
      operands: Arrays of one shape.
      factor: An array of the same rank that is broadcast to that shape, or None.
      out_dtypes: That of each output.
      aliases: From an output to the operand whose buffer it may take, which has its dtype.
    """

    operands: tuple[jax.Array, ...]
    factor: jax.Array | None
    out_dtypes: tuple[Any, ...]
    aliases: Mapping[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of each operand."""
        return self.operands[0].shape

    @property
    def size(self) -> int:
        """Elements of each operand."""
        return self.operands[0].size

    def slice(self, start: int) -> "Leaf":
        """The end of a flat leaf."""
        return dataclasses.replace(self, operands=tuple(x[start:] for x in self.operands))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of all operands and outputs."""
        return tuple(
            str(jnp.dtype(d)) for d in (*(x.dtype for x in self.operands), *self.out_dtypes)
        )

    @property
    def rows(self) -> int | None:
        """The equal rows of the flat leaf, each with its factor; None if it has no such."""
        if self.factor is None or self.factor.size == 1:
            return 1
        shape = self.factor.shape
        leading = next((i for i, n in enumerate(shape) if n == 1), len(shape))
        return self.factor.size if math.prod(shape[:leading]) == self.factor.size else None


def elementwise(
    fn: Elementwise,
    leaves: Sequence[Leaf],
    scalars: Sequence[jax.Array],
    implementation: types.Implementation | None,
) -> list[tuple[jax.Array, ...]]:
    """The outputs of `fn` on each leaf.

    Args:
      fn: The function of an array, or of a block of one.
      leaves: What it is run on; all have as many operands and outputs.
      scalars: Its further arguments, of shape () and one dtype.
      implementation: "pallas" takes kernels for all that fills a block, and raises where they
        cannot run; "xla" takes none; None takes them where they were measured to be faster.
    """
    chosen: Sequence[int] = ()
    if implementation == "pallas":
        _require_kernels(leaves)
        chosen = [i for i, leaf in enumerate(leaves) if 0 < leaf.size <= tiling.LARGEST]
    elif implementation is None and kernels_pay([x for y in leaves for x in y.operands]):
        chosen = _small_and_many(leaves)
    results = {
        i: _by_xla(fn, leaf, scalars) for i, leaf in enumerate(leaves) if i not in set(chosen)
    }
    for mine in shards.by_mesh({i: leaves[i].operands[0] for i in chosen}):
        outputs = _by_kernels(fn, [leaves[i] for i in mine], scalars, implementation)
        results.update(zip(mine, outputs, strict=True))
    return [results[i] for i in range(len(leaves))]


def kernels_pay(operands: Sequence[Any]) -> bool:
    """Whether this process runs on the one device for which kernels were measured to be faster.

    On several devices the leaves of a call would have to be sharded alike to be small and many.
    Meshes with types, and the user's shard_map, do without also on one. Outside of a compiled
    program each call would make its kernels anew.
    """
    # Pallas changes from version to version: by default it is used where it was run.
    is_known = (0, 11) <= jax.__version_info__ < (0, 12)
    is_one_gpu = jax.default_backend() == "gpu" and shards.is_plain(operands)
    is_traced = any(isinstance(x, jax.core.Tracer) for x in operands)
    return is_known and is_one_gpu and is_traced and can_run()


def can_run() -> bool:
    """Whether kernels can run in this process, as far as that is known before compilation."""
    return _refusal() is None


def table_of(scalars: Sequence[Any]) -> jax.Array:
    """Scalars as the one array that kernels get."""
    return jnp.asarray(scalars or [0.0], jnp.float32)


def _by_xla(fn: Elementwise, leaf: Leaf, scalars: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    outputs = fn(leaf.operands, leaf.factor, tuple(scalars))
    return tuple(x.astype(dtype) for x, dtype in zip(outputs, leaf.out_dtypes, strict=True))


def _require_kernels(leaves: Sequence[Leaf]) -> None:
    """Raises with the reason where kernels were asked for and cannot run."""
    reason = _refusal()
    for leaf in leaves:
        if other := set(leaf.dtypes) - DTYPES:
            reason = reason or f"a leaf is kept or computed in {min(other)}, not in 16 or 32 bits"
    if reason:
        raise NotImplementedError(_message(reason))


def _message(reason: str) -> str:
    return (
        f"`implementation`: expected what can run here, got 'pallas': {reason}. Pass 'xla', or "
        f"None to take what there is; with {_INTERPRET}=1 in the environment kernels are "
        "interpreted, slowly."
    )


def _refusal() -> str | None:
    """Why no kernel can run in this process, as far as that is known before compilation."""
    if is_interpreted():
        return None
    if jax.__version_info__ < (0, 10):
        return f"it needs JAX 0.10 or newer, this is {jax.__version__}"
    if jax.default_backend() == "gpu":
        # Not every make of device has this attribute.
        capability = getattr(jax.devices()[0], "compute_capability", "unknown")
        if capability != "9.0":
            return f"it needs a Hopper GPU (compute capability 9.0), this one has {capability}"
    return None


def is_interpreted() -> bool:
    """Whether the environment asks for Pallas's interpreter."""
    return os.environ.get(_INTERPRET, "0") not in ("", "0")


def _small_and_many(leaves: Sequence[Leaf]) -> list[int]:
    """The leaves that fill whole groups, so that one launch takes the place of many."""
    keys = {
        i: (leaf.size, leaf.dtypes)
        for i, leaf in enumerate(leaves)
        if leaf.factor is None
        and tiling.WARPGROUP <= leaf.size <= tiling.SMALL
        and tiling.fills(leaf.size)
        and DTYPES.issuperset(leaf.dtypes)
    }
    room = {key: n - n % tiling.GROUP for key, n in Counter(keys.values()).items()}
    chosen = []
    for i, key in keys.items():
        if room[key]:
            room[key] -= 1
            chosen.append(i)
    return chosen


def _by_kernels(
    fn: Elementwise,
    leaves: Sequence[Leaf],
    scalars: Sequence[jax.Array],
    implementation: types.Implementation | None,
) -> list[tuple[jax.Array, ...]]:
    """`fn` by kernels, each on its device's shards; under transformations, by XLA."""
    n_outputs = len(leaves[0].out_dtypes)
    arrays = [
        leaf.operands if leaf.factor is None else (*leaf.operands, leaf.factor) for leaf in leaves
    ]

    def rebuilt(flat: Sequence[jax.Array]) -> list[Leaf]:
        result, start = [], 0
        for leaf, mine in zip(leaves, arrays, strict=True):
            n, stop = len(leaf.operands), start + len(mine)
            factor = None if leaf.factor is None else flat[stop - 1]
            result.append(
                dataclasses.replace(leaf, operands=tuple(flat[start : start + n]), factor=factor)
            )
            start = stop
        return result

    def xla(table: jax.Array, *flat: jax.Array) -> tuple[jax.Array, ...]:
        by_leaf = (_by_xla(fn, leaf, tuple(table)) for leaf in rebuilt(flat))
        return tuple(x for outputs in by_leaf for x in outputs)

    def gpu(table: jax.Array, *flat: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x for outputs in _on_gpu(fn, rebuilt(flat), table) for x in outputs)

    def tpu(table: jax.Array, *flat: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x for leaf in rebuilt(flat) for x in _on_tpu(fn, leaf, table))

    def local(*args: jax.Array) -> tuple[jax.Array, ...]:
        if is_interpreted():
            return gpu(*args)
        is_asked_for = implementation == "pallas"
        results: tuple[jax.Array, ...] = jax.lax.platform_dependent(
            *args,
            cuda=gpu,
            tpu=tpu if is_asked_for else xla,
            default=(lambda *args: _refused(*xla(*args))) if is_asked_for else xla,
        )
        return results

    def by_shards(table: jax.Array, *flat: jax.Array) -> tuple[jax.Array, ...]:
        rest = iter(flat)
        return shards.on_shards(local, [[next(rest) for _ in a] for a in arrays], table, n_outputs)

    run = transforms.opaque(by_shards, xla)
    outputs = run(table_of(scalars), *(x for mine in arrays for x in mine))
    return [tuple(outputs[i * n_outputs : (i + 1) * n_outputs]) for i in range(len(leaves))]


def _on_gpu(
    fn: Elementwise, leaves: Sequence[Leaf], table: jax.Array
) -> list[tuple[jax.Array, ...]]:
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
    results: dict[int, tuple[jax.Array, ...]] = {}
    for indices in tiling.group(
        keys, [tiling.GROUP if x.size <= tiling.SMALL else 1 for x in leaves]
    ):
        key, mine = keys[indices[0]], [flat[i] for i in indices]
        of_block = fn if key[-1] else _factor_last(fn)
        tiles = tiling.tile(mine[0].size, mine[0].rows or 1)
        assert tiles is not None
        ends: Any = [()] * len(mine)
        if tiles.rest:
            ends, mine = _ended(of_block, mine, table, tiles.covered)
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
                    interpret=is_interpreted(),
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
    fn: Elementwise, leaves: Sequence[Leaf], table: jax.Array, start: int
) -> tuple[list[tuple[jax.Array, ...]], list[Leaf]]:
    """The outputs from `start` on, which no block covers, and the leaves with them in place.

    What is written over an operand is written before a kernel gets that, which leaves its end
    alone. Written into what the kernel returns, in a loop, XLA of JAX 0.11 took it for a part of
    the kernel, and failed.
    """
    ends = [_by_xla(fn, x.slice(start), tuple(table)) for x in leaves]
    # Operands are overwritten: without an order the compiler would copy them.
    in_order: Any = jax.lax.optimization_barrier
    ends, operands = in_order((ends, [x.operands for x in leaves]))
    results = []
    for leaf, mine, end in zip(leaves, map(list, operands), ends, strict=True):
        for output, operand in leaf.aliases.items():
            mine[operand] = jax.lax.dynamic_update_slice(mine[operand], end[output], (start,))
        results.append(dataclasses.replace(leaf, operands=tuple(mine)))
    return ends, results


def _on_tpu(fn: Elementwise, leaf: Leaf, table: jax.Array) -> tuple[jax.Array, ...]:
    """Each leaf in its own shape: flattened, it would be laid out anew."""
    from mars_optax._src.kernels import mosaic_tpu

    if leaf.rows is None:
        fn, leaf = _factor_last(fn), _broadcast(leaf)
    factors = None if leaf.factor is None else leaf.factor.reshape(-1)
    return mosaic_tpu.call(fn, leaf.operands, factors, table, leaf.out_dtypes, leaf.aliases)


def _flat(leaf: Leaf) -> Leaf:
    factor = None if leaf.factor is None else leaf.factor.reshape(-1)
    return dataclasses.replace(
        leaf, operands=tuple(x.reshape(-1) for x in leaf.operands), factor=factor
    )


def _broadcast(leaf: Leaf) -> Leaf:
    """The factor as one more operand, where it does not fall into equal rows."""
    assert leaf.factor is not None
    factor = jnp.broadcast_to(leaf.factor, leaf.shape)
    return dataclasses.replace(leaf, operands=(*leaf.operands, factor), factor=None)


def _factor_last(fn: Elementwise) -> Elementwise:
    """`fn` of operands whose last one is the factor."""
    return lambda operands, _, scalars: fn(operands[:-1], operands[-1], scalars)


# Its compilation is the refusal: which platform a program is for is not known before.
_refused_p: Final[Any] = Primitive("mars_optax_kernels")
_refused_p.multiple_results = True
_refused_p.def_abstract_eval(lambda *avals: list(avals))


def _refused(*outputs: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_refused_p.bind(*outputs))


def _refuse(ctx: Any, *unused: Any) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    raise NotImplementedError(_message(f"there is no kernel for {' and '.join(platforms)}"))


mlir.register_lowering(_refused_p, _refuse)
