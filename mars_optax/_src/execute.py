"""The one door to `kernels/`: a function on many leaves, by kernels or, also without them, XLA."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from mars_optax._src import mesh
from mars_optax._src.leaf import clipping, precision

# (operands, factor, scalars) -> outputs, all elementwise; an absent factor is None.
Elementwise = Callable[[tuple[Any, ...], Any, tuple[Any, ...]], tuple[Any, ...]]
# (operands, scalars, dtype) -> the array whose norms are taken, elementwise and of that dtype.
Normed = Callable[[tuple[Any, ...], tuple[Any, ...], Any], jax.Array]

# An array, or None where no kernel knows how it lies, and a divisor for each of its matrices.
Source = tuple[Any, jax.Array]

_INTERPRET: Final = "MARS_OPTAX_PALLAS_INTERPRET"
# Those that kernels read and write.
_DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})


@dataclasses.dataclass(frozen=True)
class _Operands:
    """What a function reads of one leaf, arrays of one shape, and in which dtypes it returns."""

    operands: tuple[jax.Array, ...]
    out_dtypes: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of each operand."""
        return self.operands[0].shape

    @property
    def size(self) -> int:
        """Elements of each operand."""
        return self.operands[0].size

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of all operands and outputs."""
        dtypes = (*(x.dtype for x in self.operands), *self.out_dtypes)
        return tuple(str(jnp.dtype(dtype)) for dtype in dtypes)


@dataclasses.dataclass(frozen=True)
class Leaf(_Operands):
    """What an elementwise function reads and writes of one leaf."""

    factor: jax.Array | None  # of the leaf's rank, and broadcast to its shape
    aliases: Mapping[int, int]  # outputs to operands of their dtypes, whose buffers they may take

    @property
    def rows(self) -> int | None:
        """The equal rows of the flat leaf, each with its factor; None if it has no such."""
        if self.factor is None or self.factor.size == 1:
            return 1
        shape = self.factor.shape
        leading = next((i for i, n in enumerate(shape) if n == 1), len(shape))
        return self.factor.size if math.prod(shape[:leading]) == self.factor.size else None


@dataclasses.dataclass(frozen=True)
class NormLeaf(_Operands):
    """What norms are taken of; the one dtype is that of the arithmetic, and of the sums."""

    axes: tuple[int, ...]  # those of a norm, not negative and in order

    @property
    def rows(self) -> int | None:
        """The equal rows of the flat leaf, each with its norm; None if it has no such."""
        leading = len(self.shape) - len(self.axes)
        is_last = self.axes == tuple(range(leading, len(self.shape)))
        return math.prod(self.shape[:leading]) if is_last else None


def elementwise(
    fn: Elementwise, leaves: Sequence[Leaf], scalars: Sequence[jax.Array], implementation: Any
) -> list[tuple[jax.Array, ...]]:
    """The outputs of `fn` on each leaf; all have as many operands and outputs.

    `scalars` are of shape () and one dtype. "pallas" takes kernels for all that fills a block, and
    raises where they cannot run; "xla" takes none; None takes those measured to be faster.
    """
    chosen: Sequence[int] = ()
    message = None
    if implementation == "pallas":
        _require_none([_refusal(), *map(_obstacle, leaves)])
        chosen, message = _kernels().all_but_huge(leaves), _message
    elif implementation is None and kernels_are_faster([x for y in leaves for x in y.operands]):
        known = {i: x for i, x in enumerate(leaves) if x.factor is None and not _unknown(x)}
        chosen = _kernels().small_and_many(known)
    return _divided("elementwise", fn, leaves, scalars, chosen, _by_xla, message)


def squares(
    fn: Normed, leaves: Sequence[NormLeaf], scalars: Sequence[Any], implementation: Any
) -> list[jax.Array]:
    """The squares of the norms of `fn` of each leaf, with the axes of a norm kept at length 1.

    All leaves have as many operands; `scalars` are numbers or arrays of shape (). "pallas" takes
    kernels on one Hopper GPU outside of meshes with types, for float32 arithmetic on leaves whose
    blocks end with the norms; "xla" takes none; None those of large leaves, measured to be faster.
    """
    chosen: Sequence[int] = ()
    operands = [x for leaf in leaves for x in leaf.operands]
    known = {i: x for i, x in enumerate(leaves) if x.dtypes[-1] == "float32" and not _unknown(x)}
    if implementation == "pallas" and can_run() and mesh.is_plain(operands):
        chosen = [i for i, leaf in known.items() if _kernels().tiling_of_norms(leaf)]
    elif implementation is None and kernels_are_faster(operands):
        chosen = _kernels().large(known)
    return _divided("squares", fn, leaves, scalars, chosen, _squares_by_xla)


def newton_schulz(
    iterated: Callable[..., jax.Array],
    x: jax.Array,
    table: jax.Array,
    implementation: Any,
    is_local: bool,
) -> jax.Array:
    """`iterated(x, table)` of a stack of matrices, perhaps with a `polynomial` made by kernels.

    `is_local` says that the stack is all that one device has. "pallas" takes kernels on Hopper
    GPUs for matrices of 16 bits, and raises on what is neither one nor a TPU; "xla" takes none,
    and None those measured to be faster.
    """
    is_wanted = False
    if implementation == "pallas":
        _require_none([_refusal()])
    # Along automatic axes beside others no kernel can be told its part.
    is_known = mesh.is_local(x) or mesh.explicit(x) is not None
    if is_local or (is_known and not mesh.automatic(x)):
        if implementation == "pallas":
            is_wanted = _kernels().has_products(x, is_interpreted())
        elif implementation is None and kernels_are_faster([x], is_local):
            is_wanted = _kernels().products_are_faster(x)
    if not is_wanted:
        return iterated(x, table)
    message = _message if implementation == "pallas" else None
    result: jax.Array = _kernels().newton_schulz(iterated, x, table, is_interpreted(), message)
    return result


def stacked(stacks: Sequence[jax.Array], sources: Sequence[Source]) -> jax.Array:
    """Stacks of matrices as one, by a kernel from what they were made of, or by XLA.

    `sources`, if any, which is where `kernels_are_faster`, has of each stack of one matrix that
    matrix, which may be turned, before it was divided and rounded.
    """
    matrices = [x for x, _ in sources]
    if len(stacks) == 1:
        return stacks[0]
    is_known = bool(matrices) and all(x is not None for x in matrices)
    if is_known and _kernels().can_stack(stacks[0], matrices):
        result: jax.Array = _kernels().stacked(stacks, sources, is_interpreted())
        return result
    return jnp.concatenate(stacks)


def kernels_are_faster(operands: Sequence[Any], is_local: bool = False) -> bool:
    """Whether this process runs on the one device for which kernels were measured to be faster.

    On several devices the leaves of a call would have to be sharded alike to be small and many.
    Meshes with types, and the user's shard_map, do without also on one, unless the operands are
    known to be a device's own (`is_local`). Outside of a compiled program each call would make its
    kernels anew. Kernels read no memory of the host.
    """
    # Pallas changes from version to version: by default it is used where it was run.
    is_known = (0, 11) <= jax.__version_info__ < (0, 12)
    is_one_gpu = mesh.is_for_gpus() and (is_local or mesh.is_plain(operands))
    is_traced = any(isinstance(x, jax.core.Tracer) for x in operands)
    is_near = all(precision.host_memory_of(x) is None for x in operands)
    return is_known and is_one_gpu and is_traced and is_near and can_run()


def can_run() -> bool:
    """Whether kernels can run in this process, as far as that is known before compilation."""
    return _refusal() is None


def is_interpreted() -> bool:
    """Whether the environment asks for Pallas's interpreter."""
    return os.environ.get(_INTERPRET, "0") not in ("", "0")


def _kernels() -> Any:
    """What launches kernels, imported where it is needed: the package works without it."""
    from mars_optax._src.kernels import calls

    return calls


def _divided(
    name: str, fn: Any, leaves: Any, scalars: Any, chosen: Sequence[int], by_xla: Any, *more: Any
) -> list[Any]:
    """The results of all leaves: by kernels of the chosen ones, those on one mesh together."""
    others = [i for i in range(len(leaves)) if i not in set(chosen)]
    results = {i: by_xla(fn, leaves[i], scalars) for i in others}
    groups: dict[Any, list[int]] = {}
    for i in chosen:
        groups.setdefault(mesh.explicit(leaves[i].operands[0]), []).append(i)
    for group in groups.values():
        launch, mine = getattr(_kernels(), name), [leaves[i] for i in group]
        outputs = launch(fn, mine, scalars, by_xla, is_interpreted(), *more)
        results.update(zip(group, outputs, strict=True))
    return [results[i] for i in range(len(leaves))]


def _by_xla(fn: Elementwise, leaf: Leaf, scalars: Sequence[Any]) -> tuple[jax.Array, ...]:
    outputs = fn(leaf.operands, leaf.factor, tuple(scalars))
    return tuple(x.astype(dtype) for x, dtype in zip(outputs, leaf.out_dtypes, strict=True))


def _squares_by_xla(fn: Normed, leaf: NormLeaf, scalars: Sequence[Any]) -> jax.Array:
    return clipping.squares(fn(leaf.operands, tuple(scalars), *leaf.out_dtypes), leaf.axes)


def _unknown(leaf: Any) -> set[str]:
    """The dtypes of a leaf that kernels do not have."""
    return set(leaf.dtypes) - _DTYPES


def _obstacle(leaf: Leaf) -> str | None:
    """Why there is no kernel for a leaf."""
    other = _unknown(leaf)
    return f"a leaf is kept or computed in {min(other)}, not in 16 or 32 bits" if other else None


def _require_none(reasons: Sequence[str | None]) -> None:
    """Raises with the first reason why kernels that were asked for cannot run."""
    if reason := next(filter(None, reasons), None):
        raise NotImplementedError(_message(reason))


def _message(reason: str) -> str:
    return (
        f"`implementation`: expected what can run here, got 'pallas': {reason}. Pass 'xla', or "
        f"None to take what there is; with {_INTERPRET}=1 in the environment kernels are "
        "interpreted, slowly."
    )


def _refusal() -> str | None:
    """Why no kernel can run in this process, as far as that is known before compilation."""
    try:
        _kernels()
    except ImportError as error:
        return f"this copy of the package has no kernels ({error})"
    if is_interpreted():
        return None
    if jax.__version_info__ < (0, 10):
        return f"it needs JAX 0.10 or newer, this is {jax.__version__}"
    if mesh.is_for_gpus():
        # Not every make of device has this attribute.
        capability = getattr(jax.devices()[0], "compute_capability", "unknown")
        if capability != "9.0":
            return f"it needs a Hopper GPU (compute capability 9.0), this one has {capability}"
    return None
