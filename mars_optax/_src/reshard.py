"""A function of a stack of matrices on a mesh: whole matrices on every device, moved once."""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mars_optax._src import mesh

# The short side from which a device works on its part of a stack, rather than on all of it. Five
# steps of Newton-Schulz on an m x n matrix take 20 m^2 n operations or more, sending the result in
# 16 bits takes 2 m n bytes: at some 2000 operations in the time of a byte both are even at m = 200.
SHORTEST_TO_DIVIDE: Final = 256

# (stack, *constants, is_local=False) -> stack; `by_partitioner` says `is_local`, of what one device
# has.
StackFn = Callable[..., jax.Array]
# The mesh axes that each axis of a stack is divided over.
_Place = tuple[tuple[str, ...], ...]


def by_specs(fn: Callable[..., Any], specs: Sequence[Any]) -> Callable[..., Any]:
    """A function of leaves first, for which automatic axes are explicit where specs are known.

    Then constraints say all that has to move, and the program can be serialized.
    """

    def run(leaves: Sequence[jax.Array], *args: Any) -> Any:
        meshes = (jax.typeof(x).sharding.mesh for x in leaves)
        found = next((one for one in meshes if not one.empty), None)
        # Early versions of JAX have no way to a mesh but the user's `jax.set_mesh`.
        enter: Any = getattr(jax.sharding, "use_abstract_mesh", None)
        if enter is None and not jax.sharding.get_abstract_mesh().empty:
            enter = contextlib.nullcontext
        if not enter or None in specs or not found or set(found.axis_types) != {AxisType.Auto}:
            return fn(leaves, *args)
        explicit = jax.sharding.explicit_axes(
            lambda leaves: fn(leaves, *args), in_sharding=(list(specs),)
        )
        with enter(found):
            return explicit(list(leaves))

    return run


def by_types(fn: StackFn, stack: jax.Array, constants: Sequence[jax.Array]) -> jax.Array:
    """`fn` on a stack with explicit sharding, of the same sharding."""
    on, spec = mesh.explicit(stack), jax.typeof(stack).sharding.spec
    own = mesh.names(spec[0])
    names = _dividing(on.shape, mesh.axes_of(on, AxisType.Explicit), own, *stack.shape[:2])
    is_whole = spec[1] is None and spec[2] is None
    if is_whole and (own or not names):
        return fn(stack, *constants)
    # Where matrices do not come out even, devices get zeros, which stay zeros.
    missing = -stack.shape[0] % _devices(on.shape, names)
    padded = jnp.pad(stack, ((0, missing), (0, 0), (0, 0))) if missing else stack
    path = _path(spec, names)
    for place in path[1:]:
        padded = mesh.reshard(padded, _spec(place))
    result = fn(padded, *constants)
    for place in reversed(path[:-1]):
        result = mesh.reshard(result, _spec(place))
    return result[: stack.shape[0]] if missing else result


def by_partitioner(
    fn: StackFn, stacks: Sequence[jax.Array], constants: Sequence[jax.Array]
) -> list[jax.Array]:
    """`fn` on stacks of one kind of matrix, whose shardings only the compiler knows.

    For the compiler it is one operation, each of whose results is sharded as its operand: no wish
    of ours reaches the parameters. Inside, those sharded alike move together to whole matrices.
    """
    # What JAX keeps, such as rules of derivatives, must hold on to no array.
    count, others = len(stacks), len(constants)

    def whole(*args: jax.Array) -> tuple[jax.Array, ...]:
        parts = args[:count]
        return split(fn(jnp.concatenate(parts), *args[count:]), parts)

    def infer(_: Any, arg_shapes: Any, unused: Any) -> Any:
        return tuple(x.sharding for x in arg_shapes[:count])

    def partition(on: Any, arg_shapes: Any, unused: Any) -> Any:
        groups: dict[Any, list[int]] = {}
        places: list[Any] = []
        for i, x in enumerate(arg_shapes[:count]):
            place = _path(x.sharding.spec, ())[0]
            # The compiler moves what does not come out even.
            rests = (n % _devices(on.shape, p) for n, p in zip(x.shape, place, strict=True))
            place = ((), (), ()) if any(rests) else place
            places.append(NamedSharding(on, _spec(place)))
            groups.setdefault((place, i if place[0] else None), []).append(i)
        paths = {}
        for (place, i), group in groups.items():
            slices = sum(arg_shapes[k].shape[0] for k in group)
            names = _dividing(on.shape, on.axis_names, place[0], slices, arg_shapes[0].shape[1])
            paths[place, i] = _path(place, names)

        def local(*args: jax.Array) -> tuple[jax.Array, ...]:
            results = list(args[:count])
            for key, group in groups.items():
                parts, path = [args[i] for i in group], paths[key]
                stack = jnp.concatenate(parts)
                # Where matrices do not come out even, some are sent twice. XLA for CPUs fails on an
                # all-to-all of what has several layouts: behind the barrier it has one.
                missing = -stack.shape[0] % _devices(on.shape, path[-1][0][len(path[0][0]) :])
                resized = jnp.resize(stack, (stack.shape[0] + missing, *stack.shape[1:]))
                stack = jax.lax.optimization_barrier(resized)
                stack = _moved(fn(_moved(stack, path), *args[count:], is_local=True), path[::-1])
                for i, result in zip(group, split(stack, parts), strict=True):
                    results[i] = result
            return tuple(results)

        return on, local, tuple(places), (*places, *[NamedSharding(on, PartitionSpec())] * others)

    factors = [f"slice{i} short{i} long{i}" for i in range(count)]
    axes = [[f"constant{i}axis{axis}" for axis in range(x.ndim)] for i, x in enumerate(constants)]
    rule = f"{', '.join([*factors, *map(' '.join, axes)])} -> {', '.join(factors)}"
    call: Any = custom_partitioning(whole)
    call.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)

    def bound(*args: jax.Array) -> tuple[jax.Array, ...]:
        programs = {"whole": jax.make_jaxpr(whole)(*args), "call": jax.make_jaxpr(call)(*args)}
        return tuple(_stacks_p.bind(*args, **programs))

    return list(mesh.opaque(bound, whole)(*stacks, *constants))


# The partitioner calls back into Python, which cannot be serialized: an exported program has the
# function itself, which the partitioner divides as it can. Both are programs, in which JAX looks
# for what has to know the devices.
_stacks_p: Final[Any] = Primitive("mars_optax_stacks")
_stacks_p.multiple_results = True
_stacks_p.def_impl(lambda *args, whole, call: jaxpr_as_fun(call)(*args))
_stacks_p.def_abstract_eval(
    lambda *avals, whole, call: [
        x.update(dtype=y.dtype) for x, y in zip(avals, call.out_avals, strict=False)
    ]
)


def _lower(ctx: Any, *args: Any, whole: Any, call: Any) -> Any:
    is_exported = getattr(ctx.module_context.lowering_parameters, "for_export", False)
    chosen = jaxpr_as_fun(whole if is_exported else call)
    return mlir.lower_fun(chosen, multiple_results=True)(ctx, *args)


mlir.register_lowering(_stacks_p, _lower)


def split(stack: jax.Array, parts: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """What `parts` became that were joined."""
    bounds = itertools.accumulate((x.shape[0] for x in parts), initial=0)
    return tuple(stack[i:j] for i, j in itertools.pairwise(bounds))


def _dividing(
    sizes: Mapping[str, int], axes: Sequence[str], own: tuple[str, ...], slices: int, short: int
) -> tuple[str, ...]:
    """Its own mesh axes, and those that leave each of the fewest devices the fewest matrices."""
    if short < SHORTEST_TO_DIVIDE:
        return own
    free, mine = [name for name in axes if name not in own], slices // _devices(sizes, own)
    subsets = (s for n in range(len(free) + 1) for s in itertools.combinations(free, n))

    def cost(names: Sequence[str]) -> tuple[int, int]:
        devices = _devices(sizes, names)
        return math.ceil(mine / devices), devices

    return (*own, *min(subsets, key=cost))


def _devices(sizes: Mapping[str, int], names: Sequence[str]) -> int:
    return math.prod(sizes[name] for name in names)


def _path(spec: Any, names: Sequence[str]) -> list[_Place]:
    """The places of a stack on its way to whole matrices that are divided over `names`.

    One axis of the array after the other is made whole, and each step is one gather or one
    all-to-all: of all in one step, compilers gather everything. Only the first step of an axis may
    gather: mesh axes not in `names`, and those that are beyond them.
    """
    path = [tuple(mesh.names(part) for part in (*spec, None, None, None)[:3])]
    for axis in (1, 2):
        stack, *sides = path[-1]
        moved = tuple(itertools.takewhile(lambda name: name in names, sides[axis - 1]))
        sides[axis - 1] = moved
        path.append((stack, *sides))
        sides[axis - 1] = ()
        path.append(((*stack, *moved), *sides))
    stack = path[-1][0]
    path.append(((*stack, *(name for name in names if name not in stack)), (), ()))
    return [place for place, _ in itertools.groupby(path)]


def _moved(x: jax.Array, path: Sequence[_Place]) -> jax.Array:
    """What a device has of a stack at the end of a path, which may be one that is walked back."""
    for before, after in itertools.pairwise(path):
        changed = [axis for axis in range(3) if before[axis] != after[axis]]
        if len(changed) == 2:
            # Mesh axes go from a side to the stack, or back.
            source, target = changed if len(before[0]) > len(after[0]) else reversed(changed)
            names = before[source][len(after[source]) :]
            x = jax.lax.all_to_all(x, names, split_axis=target, concat_axis=source, tiled=True)
        else:
            (axis,) = changed
            kept = min(len(before[axis]), len(after[axis]))
            x = mesh.gathered(x, [axis], [before[axis][kept:]])
            x = mesh.part(x, [axis], [after[axis][kept:]])
    return x


def _spec(place: _Place) -> Any:
    return PartitionSpec(*(part or None for part in place))
