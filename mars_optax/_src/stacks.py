"""Matrices of many leaves as a few stacks, worked on at once, and shared out over a mesh."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mars_optax._src import partition

# Elements of a stack: one of so many fills a GPU many times over, and two or three of its size are
# all that is needed besides the leaves.
LARGEST: Final = 1 << 28
# The short side from which a device orthogonalizes only its part of a stack. Five steps cost
# 20 m^2 n operations or more, sending the result 2 m n bytes: at some 2000 operations for each byte
# that an interconnect moves, both take the same time at m = 200.
SHORTEST_TO_DIVIDE: Final = 256


_partition_spec: Any = PartitionSpec  # untyped in JAX


@dataclasses.dataclass(frozen=True)
class _Part:
    """The matrices of one leaf, wide ones: shape (slices, short, long)."""

    matrices: jax.Array
    is_turned: bool


def map_stacks(
    fn: Callable[[jax.Array], jax.Array],
    leaves: Sequence[jax.Array],
    axes: Sequence[partition.Axes],
) -> list[jax.Array]:
    """Applies a function of a stack of wide matrices, each on its own, to the matrices of leaves.

    Args:
      fn: From a stack (slices, short, long) to one of the same shape; fn(X^T) = fn(X)^T, so that
        leaves of both orientations share a stack. It keeps zeros.
      leaves: Arrays of any rank.
      axes: Which axes of each are those of its matrices.

    Returns:
      Arrays of the shapes of `leaves`, in the dtypes that `fn` returns.
    """
    parts = [_part(x, a) for x, a in zip(leaves, axes, strict=True)]
    groups: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        groups.setdefault(_key(i, part.matrices), []).append(i)
    results: dict[int, jax.Array] = {}
    for indices in groups.values():
        for chunk in _chunks(indices, [parts[i].matrices.size for i in indices]):
            matrices = [parts[i].matrices for i in chunk]
            for i, result in zip(chunk, _on_stack(fn, matrices), strict=True):
                results[i] = result
    return [_leaf(results[i], parts[i], leaves[i], axes[i]) for i in range(len(leaves))]


def whole(x: jax.Array) -> jax.Array:
    """An array whose type says that it is sharded, on every device; any other as it is."""
    return x if _explicit_mesh(x) is None else _reshard(x, _partition_spec(*(None,) * x.ndim))


def laid_out(x: jax.Array, like: jax.Array) -> jax.Array:
    """An array sharded as another one, where types say so or the compiler is to find out."""
    if _explicit_mesh(like) is not None:
        return _reshard(x, jax.typeof(like).sharding.spec)
    if _axes(jax.sharding.get_abstract_mesh(), AxisType.Auto):
        _, x = shard_alike(like, x)  # type: ignore[no-untyped-call]
    return x


def _part(x: jax.Array, axes: partition.Axes) -> _Part:
    # Axes that are merged must not be sharded.
    stack = axes.to_stack(x if _is_one_stack(axes) else whole(x))
    is_turned = stack.shape[-2] > stack.shape[-1]
    return _Part(jnp.swapaxes(stack, -2, -1) if is_turned else stack, is_turned)


def _leaf(result: jax.Array, part: _Part, like: jax.Array, axes: partition.Axes) -> jax.Array:
    x = jnp.swapaxes(result, -2, -1) if part.is_turned else result
    return laid_out(axes.from_stack(x, like.shape), like)


def _is_one_stack(axes: partition.Axes) -> bool:
    return len(axes.reduction) == len(axes.output) == 1 and len(axes.batch) <= 1


def _key(i: int, matrices: jax.Array) -> Any:
    """What leaves of one stack have in common."""
    shape, dtype = matrices.shape[1:], str(matrices.dtype)
    if _explicit_mesh(matrices) is not None:
        spec = tuple(jax.typeof(matrices).sharding.spec)
        # Matrices that lie on different devices stay there.
        return (shape, dtype, spec, i if spec[0] is not None else None)
    mesh = jax.sharding.get_abstract_mesh()
    if jax.device_count() > 1 and (mesh.empty or matrices.shape[0] > 1):
        # How they are sharded is not known: a stack of leaves might have to be gathered.
        return (shape, dtype, None, i)
    return (shape, dtype, None, None)


def _chunks(indices: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Consecutive indices whose sizes add up to `LARGEST` at most, but for one that is larger."""
    chunks: list[list[int]] = []
    total = LARGEST
    for i, size in zip(indices, sizes, strict=True):
        if total + size > LARGEST:
            chunks.append([])
            total = 0
        chunks[-1].append(i)
        total += size
    return chunks


def _on_stack(
    fn: Callable[[jax.Array], jax.Array], matrices: Sequence[jax.Array]
) -> list[jax.Array]:
    """The results for the leaves that share a stack."""
    stack = jnp.concatenate(matrices) if len(matrices) > 1 else matrices[0]
    plan = _plan(stack, is_joined=len(matrices) > 1 or matrices[0].shape[0] == 1)
    if plan is None:
        result = _in_pieces(fn, stack)
    else:
        # Devices that are left over get zeros, which stay zeros.
        missing = -stack.shape[0] % plan.devices
        padded = jnp.pad(stack, ((0, missing), (0, 0), (0, 0))) if missing else stack
        result = plan.constrain(fn(plan.constrain(padded, plan.whole)), plan.back)
        result = result[: stack.shape[0]] if missing else result
    if len(matrices) == 1:
        return [result]
    bounds = [sum(m.shape[0] for m in matrices[:i]) for i in range(len(matrices) + 1)]
    return [result[i:j] for i, j in itertools.pairwise(bounds)]


def _in_pieces(fn: Callable[[jax.Array], jax.Array], stack: jax.Array) -> jax.Array:
    """A stack that is larger than all should be, piece by piece."""
    slices = max(1, LARGEST // max(1, math.prod(stack.shape[1:])))
    if stack.shape[0] <= slices or jax.device_count() > 1:
        return fn(stack)
    pieces = [fn(stack[i : i + slices]) for i in range(0, stack.shape[0], slices)]
    return jnp.concatenate(pieces)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a stack lies while it is worked on, and after.

    Attributes:
      whole: Every matrix on one device, or on all.
      back: As the leaves want it.
      devices: How many share the stack out.
      constrain: Lays an array out.
    """

    whole: PartitionSpec
    back: PartitionSpec
    devices: int
    constrain: Callable[[jax.Array, PartitionSpec], jax.Array]


def _plan(stack: jax.Array, *, is_joined: bool) -> _Plan | None:
    """The plan for a stack, or None where nothing is to be moved, or nothing known."""
    is_worth_dividing = stack.shape[1] >= SHORTEST_TO_DIVIDE
    mesh = _explicit_mesh(stack)
    if mesh is not None:
        spec = jax.typeof(stack).sharding.spec
        own = spec[0] if isinstance(spec[0], tuple) else () if spec[0] is None else (spec[0],)
        others = [a for a in _axes(mesh, AxisType.Explicit) if a not in own]
        held = math.prod(mesh.shape[a] for a in own)
        more = _fitting(others, mesh, stack.shape[0] // held) if is_worth_dividing else ()
        is_whole = spec[1] is None and spec[2] is None
        if is_whole and (own or not more):
            return None
        names = (*own, *more)
        return _Plan(_spec(names), spec, math.prod(mesh.shape[a] for a in names), _reshard)
    mesh = jax.sharding.get_abstract_mesh()
    auto = _axes(mesh, AxisType.Auto)
    if not auto:
        return None
    free = PartitionSpec.UNCONSTRAINED
    names = _fitting(auto, mesh, stack.shape[0]) if is_worth_dividing else ()
    whole = _spec(names) if names or is_joined else _partition_spec(free, None, None)
    back = _partition_spec(None if is_joined else free, free, free)
    devices = math.prod(mesh.shape[a] for a in names)
    return _Plan(whole, back, devices, jax.lax.with_sharding_constraint)


def _spec(names: Sequence[str]) -> PartitionSpec:
    spec: PartitionSpec = _partition_spec(tuple(names) or None, None, None)
    return spec


def _axes(mesh: Any, axis_type: AxisType) -> list[str]:
    """Names of the axes of this type along which there are several devices."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, t in pairs if t == axis_type and mesh.shape[name] > 1]


def _fitting(names: Sequence[str], mesh: Any, slices: int) -> tuple[str, ...]:
    """The axes over which so many matrices can be spread with something for every device."""
    fitting: tuple[str, ...] = ()
    for name in names:
        if math.prod(mesh.shape[a] for a in (*fitting, name)) <= slices:
            fitting = (*fitting, name)
    return fitting


def _explicit_mesh(x: jax.Array) -> Any:
    """The mesh of an array whose type says how it is sharded, or None."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def _reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(_explicit_mesh(x), spec)
    result: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return result
