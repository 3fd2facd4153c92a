"""An elementwise function of many leaves, on the shards of each device.

A kernel is opaque to the compiler: of sharded operands it would be given whole arrays, gathered.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from mars_optax._src import mesh

# For each leaf its operands, of one shape, and its factor, with sides of length 1, or None.
Data = Sequence[tuple[Sequence[Any], Any]]


def on_shards(
    local: Callable[..., Any], n_outputs: int, replicated: jax.Array, data: Data
) -> list[tuple[jax.Array, ...]]:
    """Runs `local` on what each device holds of the leaves, without communication.

    `local` makes of `replicated`, an array that every device gets whole, and of `data`, whose
    arrays are sharded alike in each leaf and all on one mesh, `n_outputs` in the shape of each.
    """
    first, run = data[0][0][0], local
    if (on := mesh.explicit(first)) is not None:
        # Axes that are not explicit would be gathered: no type tells what lies along them.
        if automatic := mesh.automatic(first):
            raise NotImplementedError(
                "`implementation`: expected a mesh whose axes are all explicit or all automatic, "
                f"got 'pallas' on one with {', '.join(map(str, automatic))} automatic beside "
                "explicit ones, along which no kernel can be told its shards. Use explicit axes, "
                "or pass 'xla', or None to take what there is."
            )
        ins = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, list(data))
        outs = [(operands[0],) * n_outputs for operands, _ in ins]
        specs = (PartitionSpec(), ins)
        run = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=outs, check_vma=False)
    elif not mesh.is_local(first):
        if not mesh.has_partitioner():
            raise NotImplementedError(
                "`implementation`: expected a mesh with explicit axes, got 'pallas' on TPUs with "
                "automatic ones, where no kernel can be told its shards. Use explicit axes or your "
                "own shard_map, or pass 'xla', or None to take what there is."
            )
        run = _partitioned(local, data, n_outputs)
    return run(replicated, data)


def _partitioned(local: Callable[..., Any], data: Data, n_outputs: int) -> Callable[..., Any]:
    """`local` as an operation of its own, which the partitioner runs on the shards."""

    def infer(_: Any, arg_shapes: Any, unused: Any) -> Any:
        return [(operands[0].sharding,) * n_outputs for operands, _ in arg_shapes[1]]

    def partition(on: Any, arg_shapes: Any, unused: Any) -> Any:
        def of(x: Any, first: Any) -> NamedSharding:
            sides = zip(first.sharding.spec, x.shape, first.shape, strict=False)
            return NamedSharding(
                on, PartitionSpec(*(part if n == m else None for part, n, m in sides))
            )

        ins = [jax.tree.map(lambda x, like=leaf[0][0]: of(x, like), leaf) for leaf in arg_shapes[1]]
        outs = [(of(x[0], x[0]),) * n_outputs for x, _ in arg_shapes[1]]
        return on, local, outs, (NamedSharding(on, PartitionSpec()), ins)

    # Elementwise: a factor for each axis of each leaf, and one of its own for a side of length 1.
    def factors(x: Any, leaf: int, k: int = 0) -> str:
        sides = zip(x.shape, data[leaf][0][0].shape, strict=True)
        names = ((f"leaf{leaf}" if n == m else f"array{k}") + "axis" for n, m in sides)
        return " ".join(f"{name}{axis}" for axis, name in enumerate(names))

    owned = [(x, i) for i, leaf in enumerate(data) for x in jax.tree.leaves(leaf)]
    ins = [factors(x, i, k) for k, (x, i) in enumerate(owned)]
    outs = [factors(x[0], i) for i, (x, _) in enumerate(data) for _ in range(n_outputs)]
    rule = f"replicated, {', '.join(ins)} -> {', '.join(outs)}"
    call: Any = custom_partitioning(local)
    call.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return call
