"""A function of a stack of matrices on a mesh: whole matrices on every device, moved once."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# The short side from which a device works on its part of a stack, rather than on all of it. Five
# steps of Newton-Schulz on an m x n matrix take 20 m^2 n operations or more, sending the result in
# 16 bits takes 2 m n bytes: at some 2000 operations in the time of a byte both are even at m = 200.
SHORTEST_TO_DIVIDE: Final = 256

# (stack, *constants) -> stack.
StackFn = Callable[..., jax.Array]

_partition_spec: Any = PartitionSpec  # untyped in JAX
_OPEN: Final[Any] = PartitionSpec.UNCONSTRAINED


def explicit_mesh(x: jax.Array) -> Any:
    """The mesh of an array whose type says how it is sharded, or None."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def whole(x: jax.Array) -> jax.Array:
    """An array whose type says that it is sharded, on every device; any other as it is."""
    return x if explicit_mesh(x) is None else _reshard(x, _partition_spec(*(None,) * x.ndim))


def laid_out(x: jax.Array, like: jax.Array) -> jax.Array:
    """An array sharded as another one."""
    if explicit_mesh(like) is not None:
        return _reshard(x, jax.typeof(like).sharding.spec)
    if AxisType.Auto in jax.typeof(like).sharding.mesh.axis_types and isinstance(x, jax.core.Tracer):
        return shard_alike(x, like)[0]
    return x


def by_types(fn: StackFn, stack: jax.Array, constants: Sequence[jax.Array]) -> jax.Array:
    """`fn` on a stack with explicit sharding, of the same sharding."""
    mesh, spec = explicit_mesh(stack), jax.typeof(stack).sharding.spec
    own = _names(spec[0])
    held = _devices(mesh, own)
    free = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit and name not in own
    ]
    more: tuple[str, ...] = ()
    if stack.shape[1] >= SHORTEST_TO_DIVIDE:
        more = max(_subsets(free), key=lambda names: _gain(mesh, names, stack.shape[0] // held))
    is_whole = spec[1] is None and spec[2] is None
    if is_whole and (own or not more):
        return fn(stack, *constants)
    # Where matrices do not come out even, devices get zeros, which stay zeros.
    missing = -stack.shape[0] % (held * _devices(mesh, more))
    padded = jnp.pad(stack, ((0, missing), (0, 0), (0, 0))) if missing else stack
    path = _path(spec, (*own, *more))
    for place in path[1:]:
        padded = _reshard(padded, _spec(place))
    result = fn(padded, *constants)
    for place in reversed(path[:-1]):
        result = _reshard(result, _spec(place))
    return result[: stack.shape[0]] if missing else result


def by_propagation(
    fn: StackFn, stack: jax.Array, constants: Sequence[jax.Array], *, is_one_leaf: bool
) -> jax.Array:
    """`fn` on a stack whose sharding only the compiler knows, of the same sharding.

    Constraints name the mesh axes of the first axis of the array and leave open where the others
    are, so the compiler takes over what it knows of the operand. One mesh axis moves after the
    other, the last one first: of all in one step, compilers gather everything.

    Args:
      fn: As in :func:`by_types`.
      stack: With automatic axes, whose mesh its type says.
      constants: Further operands of `fn`.
      is_one_leaf: Whether the stack itself may be divided along its first axis.
    """
    mesh = jax.typeof(stack).sharding.mesh
    if mesh.empty or not isinstance(stack, jax.core.Tracer):
        return fn(stack, *constants)
    names: tuple[str, ...] = ()
    if stack.shape[1] >= SHORTEST_TO_DIVIDE:
        names = max(
            _subsets(mesh.axis_names), key=lambda names: _gain(mesh, names, stack.shape[0])
        )
    missing = -stack.shape[0] % _devices(mesh, names)
    padded = jnp.pad(stack, ((0, missing), (0, 0), (0, 0))) if missing else stack
    # An axis of the array for each mesh axis, that each may move on its own.
    sizes = [mesh.shape[name] for name in names]
    first = _OPEN if is_one_leaf else None

    def constrained(x: jax.Array, *parts: Any) -> jax.Array:
        place = NamedSharding(mesh, _partition_spec(*parts))
        return jax.lax.with_sharding_constraint(x, place)

    steps = [
        (*(_OPEN,) * k, *names[k:], _OPEN, _OPEN, _OPEN) for k in range(len(names) - 1, 0, -1)
    ]
    before = constrained(padded, first, _OPEN, _OPEN)
    path = [before.reshape(*sizes, -1, *stack.shape[1:])]
    for step in steps:
        path.append(constrained(_late(path[-1]), *step))
    whole = (*names, None if names else first, None, None)
    moved = constrained(_late(path[-1]), *whole)
    result = fn(moved.reshape(padded.shape), *constants).reshape(moved.shape)
    result = constrained(result, *whole)
    for step, like in zip(reversed(steps), reversed(path), strict=False):
        result = shard_alike(constrained(_late(result), *step), like)[0]
    result = constrained(_late(result).reshape(padded.shape), first, _OPEN, _OPEN)
    result = shard_alike(result, before)[0]
    return result[: stack.shape[0]] if missing else result


def _late(x: jax.Array) -> jax.Array:
    """`x` itself, by way of a sum of one, through which compilers pass shardings on last."""
    result: jax.Array = jax.lax.reduce(x[None], np.zeros((), x.dtype), jax.lax.add, (0,))
    return result


def _gain(mesh: Any, names: Sequence[str], slices: int) -> tuple[int, int]:
    """Greater for fewer matrices on each device, then for fewer devices."""
    devices = _devices(mesh, names)
    return -math.ceil(slices / devices), -devices


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [s for n in range(len(names) + 1) for s in itertools.combinations(names, n)]


def _devices(mesh: Any, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _names(part: Any) -> tuple[str, ...]:
    """The mesh axes in one part of a partition spec."""
    if part is None:
        return ()
    return tuple(part) if isinstance(part, tuple) else (part,)


# The mesh axes that each axis of a stack is divided over.
_Place = tuple[tuple[str, ...], ...]


def _path(spec: Any, names: Sequence[str]) -> list[_Place]:
    """The places of a stack on its way to whole matrices that are divided over `names`.

    One axis of the array after the other is made whole, and each step is one gather or one
    all-to-all: of all in one step, compilers gather everything. Only the first step of an axis may
    gather: mesh axes not in `names`, and those that are beyond them.
    """
    place = tuple(_names(part) for part in (*spec, None, None, None)[:3])
    path = [place]

    def step(*after: Sequence[str]) -> None:
        if tuple(after) != path[-1]:
            path.append(tuple(tuple(part) for part in after))

    for axis in (1, 2):
        stack, *sides = path[-1]
        moved = tuple(itertools.takewhile(lambda name: name in names, sides[axis - 1]))
        sides[axis - 1] = moved
        step(stack, *sides)
        sides[axis - 1] = ()
        step((*stack, *moved), *sides)
    stack = path[-1][0]
    step((*stack, *(name for name in names if name not in stack)), (), ())
    return path


def _spec(place: Sequence[Sequence[str]]) -> PartitionSpec:
    spec: PartitionSpec = _partition_spec(*(tuple(part) or None for part in place))
    return spec


def _reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(explicit_mesh(x), spec)
    result: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return result
