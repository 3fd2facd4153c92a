"""A function of a stack of matrices on a mesh: whole matrices on every device, moved once."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# The short side from which a device works on its part of a stack, rather than on all of it. Five
# steps of Newton-Schulz on an m x n matrix take 20 m^2 n operations or more, sending the result in
# 16 bits takes 2 m n bytes: at some 2000 operations in the time of a byte both are even at m = 200.
SHORTEST_TO_DIVIDE: Final = 256

# (stack, *constants) -> stack.
StackFn = Callable[..., jax.Array]

_partition_spec: Any = PartitionSpec  # untyped in JAX


def explicit_mesh(x: jax.Array) -> Any:
    """The mesh of an array whose type says how it is sharded, or None."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def whole(x: jax.Array) -> jax.Array:
    """An array whose type says that it is sharded, on every device; any other as it is."""
    return x if explicit_mesh(x) is None else _reshard(x, _partition_spec(*(None,) * x.ndim))


def laid_out(x: jax.Array, like: jax.Array) -> jax.Array:
    """An array sharded as another one, where types say how that is."""
    return x if explicit_mesh(like) is None else _reshard(x, jax.typeof(like).sharding.spec)


def by_specs(fn: Callable[..., Any], specs: Sequence[Any]) -> Callable[..., Any]:
    """A function of leaves first, for which automatic axes are explicit where specs are known.

    Then constraints say all that has to move, and the program can be serialized.
    """

    def run(leaves: Sequence[jax.Array], *args: Any) -> Any:
        meshes = [jax.typeof(x).sharding.mesh for x in leaves]
        mesh = next((mesh for mesh in meshes if not mesh.empty), None)
        # Early versions of JAX have no way to a mesh but the user's `jax.set_mesh`.
        enter: Any = getattr(jax.sharding, "use_abstract_mesh", None)
        if enter is None and not jax.sharding.get_abstract_mesh().empty:
            enter = contextlib.nullcontext
        if mesh is None or set(mesh.axis_types) != {AxisType.Auto} or None in specs or not enter:
            return fn(leaves, *args)
        explicit = jax.sharding.explicit_axes(
            lambda leaves: fn(leaves, *args), in_sharding=(list(specs),)
        )
        with enter(mesh):
            return explicit(list(leaves))

    return run


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


def by_partitioner(
    fn: StackFn, stacks: Sequence[jax.Array], constants: Sequence[jax.Array]
) -> list[jax.Array]:
    """`fn` on stacks of one kind of matrix, whose shardings only the compiler knows.

    For the compiler it is one operation, each of whose results is sharded as its operand: no wish
    of ours reaches the parameters. Inside, those that are sharded alike move together to where
    their matrices are whole, and back.
    """
    # What JAX keeps, such as rules of derivatives, must hold on to no array.
    count, others = len(stacks), len(constants)

    def whole(*args: jax.Array) -> tuple[jax.Array, ...]:
        parts = args[:count]
        return split(fn(jnp.concatenate(parts), *args[count:]), parts)

    def infer(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        del mesh, result_shape
        return tuple(x.sharding for x in arg_shapes[:count])

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        del result_shape
        groups: dict[Any, list[int]] = {}
        for i, x in enumerate(arg_shapes[:count]):
            place = _path(x.sharding.spec, ())[0]
            # The compiler moves what does not come out even.
            place = place if _is_even(mesh, x.shape, place) else ((), (), ())
            groups.setdefault((place, i if place[0] else None), []).append(i)
        paths = {
            key: _path(_spec(key[0]), _shared(mesh, key[0], [arg_shapes[i].shape for i in group]))
            for key, group in groups.items()
        }
        places: list[Any] = [None] * count
        for key, group in groups.items():
            for i in group:
                places[i] = NamedSharding(mesh, _spec(key[0]))

        def local(*args: jax.Array) -> tuple[jax.Array, ...]:
            results = list(args[:count])
            for key, group in groups.items():
                parts, path = [args[i] for i in group], paths[key]
                stack = jnp.concatenate(parts)
                slices = stack.shape[0]
                # Where matrices do not come out even, some are sent twice. XLA for CPUs fails on an
                # all-to-all of what has several layouts: behind the barrier it has one.
                total = slices + -slices % _devices(mesh, path[-1][0][len(path[0][0]) :])
                barrier: Any = jax.lax.optimization_barrier  # untyped in JAX
                stack = barrier(jnp.resize(stack, (total, *stack.shape[1:])))
                for before, after in itertools.pairwise(path):
                    stack = _moved(mesh, stack, before, after)
                stack = fn(stack, *args[count:])
                for before, after in itertools.pairwise(reversed(path)):
                    stack = _moved(mesh, stack, before, after)
                for i, result in zip(group, split(stack, parts), strict=True):
                    results[i] = result
            return tuple(results)

        everywhere = NamedSharding(mesh, _spec(()))
        return mesh, local, tuple(places), (*places, *(everywhere,) * others)

    factors = [f"slice{i} short{i} long{i}" for i in range(count)]
    replicated = [
        " ".join(f"constant{i}axis{axis}" for axis in range(x.ndim))
        for i, x in enumerate(constants)
    ]
    call: Any = custom_partitioning(whole)  # type: ignore[no-untyped-call]
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=f"{', '.join([*factors, *replicated])} -> {', '.join(factors)}",
    )

    @jax.custom_batching.custom_vmap
    def batched(*args: jax.Array) -> tuple[jax.Array, ...]:
        programs = {"whole": jax.make_jaxpr(whole)(*args), "call": jax.make_jaxpr(call)(*args)}
        return tuple(_stacks_p.bind(*args, **programs))

    @batched.def_vmap
    def _batched(size: int, is_batched: Sequence[bool], *args: jax.Array) -> Any:
        axes = [0 if batched else None for batched in is_batched]
        return jax.vmap(whole, axes, axis_size=size)(*args), (True,) * count

    run = jax.custom_jvp(batched)

    @run.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        return jax.jvp(whole, primals, tangents)

    return list(run(*stacks, *constants))


# The partitioner calls back into Python, which cannot be serialized: an exported program has the
# function itself, which the partitioner divides as it can. Both are programs, in which JAX looks
# for what has to know the devices.
_stacks_p: Final[Any] = Primitive("mars_optax_stacks")
_stacks_p.multiple_results = True
_stacks_p.def_impl(lambda *args, whole, call: jaxpr_as_fun(call)(*args))


def _abstract(*avals: Any, whole: Any, call: Any) -> list[Any]:
    return [x.update(dtype=y.dtype) for x, y in zip(avals, call.out_avals, strict=False)]


def _lower(ctx: Any, *args: Any, whole: Any, call: Any) -> Any:
    is_exported = getattr(ctx.module_context.lowering_parameters, "for_export", False)
    chosen = jaxpr_as_fun(whole if is_exported else call)
    lowered: Any = mlir.lower_fun(chosen, multiple_results=True)
    return lowered(ctx, *args)


_stacks_p.def_abstract_eval(_abstract)
mlir.register_lowering(_stacks_p, _lower)


def split(stack: jax.Array, parts: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """What `parts` became that were joined."""
    bounds = itertools.accumulate((x.shape[0] for x in parts), initial=0)
    return tuple(stack[i:j] for i, j in itertools.pairwise(bounds))


def _shared(mesh: Any, place: Any, shapes: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """The mesh axes over which matrices of some shapes that lie in one place are divided."""
    own = place[0]
    if shapes[0][1] < SHORTEST_TO_DIVIDE:
        return tuple(own)
    slices = sum(shape[0] for shape in shapes) // _devices(mesh, own)
    more = max(
        _subsets([name for name in mesh.axis_names if name not in own]),
        key=lambda names: _gain(mesh, names, slices),
    )
    return (*own, *more)


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


def _moved(mesh: Any, x: jax.Array, before: _Place, after: _Place) -> jax.Array:
    """What a device has of a stack after one step of a path, or of one that is walked back."""
    changed = [axis for axis in range(3) if before[axis] != after[axis]]
    if len(changed) == 2:
        # Mesh axes go from a side to the stack, or back.
        source, target = changed if len(before[0]) > len(after[0]) else reversed(changed)
        names = before[source][len(after[source]) :]
        swap: Any = jax.lax.all_to_all  # untyped in JAX
        exchanged: jax.Array = swap(x, names, split_axis=target, concat_axis=source, tiled=True)
        return exchanged
    (axis,) = changed
    kept = min(len(before[axis]), len(after[axis]))
    if len(before[axis]) > kept:
        gathered: jax.Array = jax.lax.all_gather(x, before[axis][kept:], axis=axis, tiled=True)
        return gathered
    size = x.shape[axis] // _devices(mesh, after[axis][kept:])
    start = jax.lax.axis_index(after[axis][kept:]) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def _is_even(mesh: Any, shape: Sequence[int], place: _Place) -> bool:
    return all(n % _devices(mesh, names) == 0 for n, names in zip(shape, place, strict=True))


def _spec(place: Sequence[Sequence[str]]) -> PartitionSpec:
    spec: PartitionSpec = _partition_spec(*(tuple(part) or None for part in place))
    return spec


def _reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(explicit_mesh(x), spec)
    result: jax.Array = jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call]
    return result
