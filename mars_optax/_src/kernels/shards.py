"""An elementwise function of many leaves, on the shards of each device.

A kernel is opaque to the compiler: of sharded operands it would be given whole arrays, gathered.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

_Kind = jax.sharding.AxisType
# The arrays of one leaf, of one rank: the first has its shape, others may have sides of length 1.
Arrays = Sequence[jax.Array]


def by_mesh(arrays: Mapping[int, jax.Array]) -> list[list[int]]:
    """Keys of the arrays that lie on the same explicit mesh, or on none, in their order."""
    groups: dict[Any, list[int]] = {}
    for key, array in arrays.items():
        mesh = jax.typeof(array).sharding.mesh
        groups.setdefault(mesh if _Kind.Explicit in mesh.axis_types else None, []).append(key)
    return list(groups.values())


def on_shards(
    local: Callable[..., tuple[jax.Array, ...]],
    leaves: Sequence[Arrays],
    replicated: jax.Array,
    n_outputs: int,
) -> tuple[jax.Array, ...]:
    """Runs `local` on what each device holds of the leaves, without communication.

    Args:
      local: ``(replicated, *arrays of all leaves) -> outputs of all leaves``.
      leaves: The arrays of each leaf, which are sharded alike; all on one mesh.
      replicated: An array that every device gets whole.
      n_outputs: Outputs of each leaf, which have its shape.
    """
    operands = [x for arrays in leaves for x in arrays]
    mesh = jax.typeof(operands[0]).sharding.mesh
    if _Kind.Explicit in mesh.axis_types:
        _require_known_axes(mesh)
        ins = [jax.typeof(x).sharding.spec for x in operands]
        outs = [jax.typeof(arrays[0]).sharding.spec for arrays in leaves for _ in range(n_outputs)]
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), *ins),  # type: ignore[no-untyped-call]
            out_specs=tuple(outs),
            check_vma=False,
        )
        return tuple(mapped(replicated, *operands))
    if is_one_device() or _Kind.Manual in mesh.axis_types:
        return local(replicated, *operands)
    if not has_partitioner():
        raise NotImplementedError(
            "`implementation`: expected a mesh with explicit axes, got 'pallas' on TPUs with "
            "automatic ones, where no kernel can be told its shards. Use explicit axes or your own "
            "shard_map, or pass 'xla', or None to take what there is."
        )
    return tuple(_partitioned(local, leaves, n_outputs)(replicated, *operands))


def _require_known_axes(mesh: Any) -> None:
    """Axes that are not explicit would be gathered: no type tells what lies along them."""
    automatic = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == _Kind.Auto and mesh.shape[name] > 1
    ]
    if automatic:
        raise NotImplementedError(
            "`implementation`: expected a mesh whose axes are all explicit or all automatic, got "
            f"'pallas' on one with {', '.join(map(str, automatic))} automatic beside explicit "
            "ones, along which no kernel can be told its shards. Use explicit axes, or pass 'xla', "
            "or None to take what there is."
        )


def is_one_device() -> bool:
    """Whether there is one device, so that nothing can be sharded."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 and (mesh.empty or mesh.size == 1)


def is_plain(arrays: Sequence[Any]) -> bool:
    """Whether there is one device, and no mesh on which arrays have types of their own."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    kinds = {
        kind for mesh in (jax.sharding.get_abstract_mesh(), *meshes) for kind in mesh.axis_types
    }
    return is_one_device() and kinds <= {_Kind.Auto}


def has_partitioner() -> bool:
    """Whether JAX can ask for the shards of an operation: not on TPUs (jax issue 38196)."""
    return jax.default_backend() != "tpu"


def _partitioned(
    local: Callable[..., Any], leaves: Sequence[Arrays], n_outputs: int
) -> Callable[..., Any]:
    """`local` as an operation of its own, which the partitioner runs on the shards."""
    firsts = [1 + sum(len(arrays) for arrays in leaves[:i]) for i in range(len(leaves))]
    owners = [i for i, arrays in enumerate(leaves) for _ in arrays]
    shapes = [arrays[0].shape for arrays in leaves]

    def outputs_of(per_leaf: Sequence[Any]) -> list[Any]:
        return [x for x in per_leaf for _ in range(n_outputs)]

    def infer(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        del mesh, result_shape
        return outputs_of([arg_shapes[i].sharding for i in firsts])

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        del result_shape
        specs = [arg_shapes[i].sharding.spec for i in firsts]

        def of(array: Any, owner: int) -> NamedSharding:
            shape, spec = shapes[owner], specs[owner]
            parts = (
                part if array.shape[axis] == shape[axis] else None for axis, part in enumerate(spec)
            )
            return NamedSharding(mesh, PartitionSpec(*parts))  # type: ignore[no-untyped-call]

        ins = [of(x, owner) for x, owner in zip(arg_shapes[1:], owners, strict=True)]
        outs = outputs_of([NamedSharding(mesh, spec) for spec in specs])
        whole = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        return mesh, local, tuple(outs), (whole, *ins)

    # Elementwise: a factor for each axis of each leaf, and one of its own for a side of length 1.
    def factors(array: jax.Array, owner: int, k: int) -> str:
        same = (n == m for n, m in zip(array.shape, shapes[owner], strict=True))
        return " ".join(
            f"leaf{owner}axis{axis}" if is_same else f"array{k}axis{axis}"
            for axis, is_same in enumerate(same)
        )

    arrays = [x for arrays in leaves for x in arrays]
    ins = [factors(x, owner, k) for k, (x, owner) in enumerate(zip(arrays, owners, strict=True))]
    outs = outputs_of([factors(leaf[0], i, 0) for i, leaf in enumerate(leaves)])
    call: Any = custom_partitioning(local)  # type: ignore[no-untyped-call]
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=f"replicated, {', '.join(ins)} -> {', '.join(outs)}",
    )
    result: Callable[..., Any] = call
    return result
