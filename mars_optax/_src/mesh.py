"""Meshes of devices: what types and programs say of them, and how arrays move on them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def is_one_device() -> bool:
    """Whether there is one device, so that nothing can be sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 and (mesh.empty or mesh.size == 1)


def is_plain(arrays: Sequence[Any]) -> bool:
    """Whether there is one device, and no mesh on which arrays have types of their own."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)]
    kinds = {kind for mesh in meshes for kind in mesh.axis_types}
    return is_one_device() and kinds <= {AxisType.Auto}


def is_local(x: Any) -> bool:
    """Whether an array is all that there is, or the part of a device inside a shard_map."""
    return is_one_device() or AxisType.Manual in jax.typeof(x).sharding.mesh.axis_types


def is_undivided(x: Any) -> bool:
    """Whether an array is local, and no automatic or explicit axes divide it further."""
    return is_local(x) and explicit(x) is None and not automatic(x)


def has_partitioner() -> bool:
    """Whether JAX can ask for the shards of an operation: not on TPUs (jax issue 38196)."""
    return jax.default_backend() != "tpu"


def is_for_gpus() -> bool:
    """Whether programs are for GPUs, as far as is known before they are compiled."""
    return jax.default_backend() == "gpu"


def explicit(x: Any) -> Any:
    """The mesh of an array whose type says how it is sharded, or None."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh if AxisType.Explicit in mesh.axis_types else None


def axes_of(mesh: Any, kind: AxisType) -> list[str]:
    """The axes of a mesh that are of one kind."""
    # An empty mesh may have None for types.
    pairs = zip(mesh.axis_names, mesh.axis_types or (), strict=False)
    return [name for name, its in pairs if its == kind]


def automatic(x: Any) -> list[str]:
    """The automatic axes that may divide an array, about which its type says nothing."""
    on = jax.typeof(x).sharding.mesh
    return [name for name in axes_of(on, AxisType.Auto) if on.shape[name] > 1]


def manual_axes() -> list[str]:
    """The axes of the shard_map that the program is in."""
    return axes_of(jax.sharding.get_abstract_mesh(), AxisType.Manual)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which the type of an array says that it varies, inside a shard_map."""
    kind: Any = jax.typeof(x)
    if hasattr(kind, "vma"):  # before JAX 0.10
        return frozenset(kind.vma)
    return frozenset(kind.manual_axis_type.varying)


def names(part: Any) -> tuple[str, ...]:
    """The mesh axes in one part of a partition spec."""
    return part if isinstance(part, tuple) else () if part is None else (part,)


def reshard(x: jax.Array, to: Any) -> jax.Array:
    """An array on an explicit mesh, with another partition spec."""
    return jax.sharding.reshard(x, NamedSharding(explicit(x), to))


def whole(x: jax.Array) -> jax.Array:
    """An array whose type says that it is sharded, on every device; any other as it is."""
    return x if explicit(x) is None else reshard(x, PartitionSpec(*(None,) * x.ndim))


def laid_out(x: jax.Array, like: jax.Array) -> jax.Array:
    """An array sharded as another one, where types say how that is."""
    return x if explicit(like) is None else reshard(x, jax.typeof(like).sharding.spec)


def gathered(x: jax.Array, dims: Sequence[int], over: Sequence[Sequence[str]]) -> jax.Array:
    """A device's part of an array made whole along `dims`, each divided over some mesh axes."""
    for dim, axes in zip(dims, over, strict=True):
        if axes:
            x = jax.lax.all_gather(x, tuple(axes), axis=dim, tiled=True)
    return x


def part(x: jax.Array, dims: Sequence[int], over: Sequence[Sequence[str]]) -> jax.Array:
    """The part of a device, which `gathered` makes whole."""
    for dim, axes in zip(dims, over, strict=True):
        if axes:
            size = x.shape[dim] // math.prod(map(jax.lax.axis_size, axes))
            start = jax.lax.axis_index(tuple(axes)) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=dim)
    return x


def invariant(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, equal on devices over which `like` does not vary, with that in its type.

    In a shard_map the type of what was gathered does not say that it is equal on all devices.
    """
    over = tuple(sorted(varying(x) - varying(like)))
    return jax.lax.psum(jnp.where(jax.lax.axis_index(over) == 0, x, 0), over) if over else x


def opaque(fn: Callable[..., Any], xla: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which no transformation looks into: batched and differentiated as `xla`."""
    batched: Any = jax.custom_batching.custom_vmap(lambda *args: fn(*args))

    @batched.def_vmap  # type: ignore[untyped-decorator]
    def _batched(size: int, is_batched: Sequence[Any], *args: Any) -> Any:
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
        outputs = jax.vmap(xla, axes, axis_size=size)(*args)
        return outputs, jax.tree.map(lambda _: True, outputs)

    run: Any = jax.custom_jvp(batched)
    run.defjvp(lambda primals, tangents: jax.jvp(xla, primals, tangents))
    return run
