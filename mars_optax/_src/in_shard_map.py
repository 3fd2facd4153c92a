"""Inside the user's `jax.shard_map`: sums and matrices of leaves of which a device holds a part.

There a leaf is an array like any other, and nothing says which part of what it is. The extra
argument `param_specs` of `update` does: the partition specs by which the parameters came in. On
automatic axes outside, `reshard.by_specs` takes it.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mars_optax._src import checks, mesh, trees

ARGUMENT = "param_specs"


def specs_of(extra_args: Mapping[str, Any], tree: Any) -> Any:
    """A spec for each leaf of `tree`, from the extra arguments, or None where there are none."""
    specs = extra_args.get(ARGUMENT)
    return jax.tree.map(lambda _: specs, tree) if isinstance(specs, PartitionSpec) else specs


def table(tree: Any, specs: Any, *others: Any) -> list[tuple[Any, ...]]:
    """For each leaf its path, itself, its spec, and those of other trees."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    rows = trees.rows((tree, specs, *others))
    return [(path, *row) for path, row in zip(paths, rows, strict=True)]


def sharded(path: tuple[Any, ...], x: Any, spec: Any, dims: Sequence[int], what: str) -> list[Any]:
    """The mesh axes over which each of `dims` of a leaf is divided, inside a shard_map.

    Of the leaf, `x` is what the device has, `spec` is its spec, or None if none was given; `path`
    is where it is and `what` needs to know, for errors.
    """
    manual = mesh.manual_axes()
    if not manual:
        return [()] * len(dims)
    if spec is None:
        varied = mesh.varying(x)
        # Where a shard_map keeps track of what varies, its own index does.
        if not varied and mesh.varying(jax.lax.axis_index(manual[0])):
            # The same on every device.
            return [()] * len(dims)
        over = f"varies over the mesh axes {sorted(varied)}" if varied else "may be a part"
        raise ValueError(
            f"`{ARGUMENT}`: expected the partition specs of the parameters, got None, and leaf "
            f"'{checks.path_string(path)}' {over} inside a shard_map, where {what} cannot know "
            f"what is missing. Pass the specs by which the parameters came in: `update(grads, "
            f"state, params, {ARGUMENT}=specs)`, `PartitionSpec()` for whole ones, as under "
            "`jax.pmap`. Gradients of each device's own batch are to be averaged before, by "
            "`jax.lax.pmean`."
        )
    if len(spec) > jnp.ndim(x):
        raise ValueError(
            f"`{ARGUMENT}`: expected a spec with at most {jnp.ndim(x)} parts for leaf "
            f"'{checks.path_string(path)}', got {_text(spec)}. Pass that of the parameter."
        )
    parts = [*spec, *(None,) * (jnp.ndim(x) - len(spec))]
    return [tuple(name for name in mesh.names(parts[dim]) if name in manual) for dim in dims]


def sum_parts(values: Sequence[jax.Array], tree: Any, axes: Any, specs: Any) -> list[jax.Array]:
    """Sums over whole matrices from those of each device; over the same mesh axes in one go."""
    results, keys = list(values), []
    for value, (path, x, spec, a) in zip(values, table(tree, specs, axes), strict=True):
        parts = sharded(path, x, spec, a.norm_axes, "a norm")
        # Joined, values would vary over the axes of all.
        keys.append((tuple(itertools.chain(*parts)), mesh.varying(value)))
    for key in dict.fromkeys(key for key in keys if key[0]):
        mine = [i for i, other in enumerate(keys) if other == key]
        total = jax.lax.psum(jnp.concatenate([values[i].reshape(-1) for i in mine]), key[0])
        ends = itertools.accumulate(values[i].size for i in mine)
        for i, end in zip(mine, ends, strict=True):
            piece = total[end - values[i].size : end]
            results[i] = piece.reshape(values[i].shape).astype(values[i].dtype)
    return results


class Layout(NamedTuple):
    """How the matrices of a leaf are divided over the devices."""

    axes: Any  # the leaf's `Axes`
    dims: tuple[int, ...]  # those of a matrix
    names: list[Any]  # the mesh axes that divide each
    spec: Any  # the leaf's

    def whole(self, x: jax.Array) -> jax.Array:
        """The leaf with whole matrices."""
        return mesh.gathered(x, self.dims, self.names)

    def part(self, x: jax.Array) -> jax.Array:
        """What a device has of it."""
        return mesh.part(x, self.dims, self.names)

    def stack(self, x: Any) -> jax.Array:
        """The leaf as a stack of whole matrices."""
        return self.axes.to_stack(mesh.whole(self.whole(jnp.asarray(x))))

    def leaf(self, stack: jax.Array, like: jax.Array) -> jax.Array:
        """A device's part of a leaf, which lies as another does, from a stack of its matrices."""
        whole = self.axes.from_stack(stack, self.whole(like).shape)
        x = mesh.laid_out(self.part(whole), like)
        # On automatic axes the operand that is never chosen says where the result is to lie.
        like = like if jnp.iscomplexobj(x) else jnp.real(like)
        return jnp.where(jnp.zeros_like(like, dtype=bool), like.astype(x.dtype), x)


def layouts(tree: Any, axes: Any, extra_args: Mapping[str, Any], what: str) -> list[Layout]:
    """The layout of each leaf; inside a shard_map a device may hold parts of matrices."""
    results = []
    for path, x, spec, a in table(tree, specs_of(extra_args, tree), axes):
        dims = a.reduction + a.output
        results.append(Layout(a, dims, sharded(path, x, spec, dims, what), spec))
    return results


def require_whole(tree: Any, extra_args: Mapping[str, Any], what: str) -> None:
    """Raises inside a shard_map where a leaf is not whole, for what works on whole leaves only."""
    for path, x, spec in table(tree, specs_of(extra_args, tree)):
        if any(sharded(path, x, spec, range(jnp.ndim(x)), what)):
            raise NotImplementedError(
                f"{what} inside a shard_map: expected whole leaves, got "
                f"'{checks.path_string(path)}' with {_text(spec)}. Use it outside the "
                "shard_map, where the compiler knows the shards."
            )


def _text(spec: Any) -> str:
    """A spec as it is written: JAX's versions print it in different ways."""
    return f"PartitionSpec{tuple(spec)!r}"
