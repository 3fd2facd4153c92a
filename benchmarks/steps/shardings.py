"""Where the parameters and the state of a GPT-2 lie on a mesh with one axis."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "devices"
# The leaves, as in `gpt2_shapes.LAYOUTS`, and how they are sharded.
LAYOUTS = (
    "flat/replicated",
    "flat/fsdp",
    "stacked/replicated",
    "stacked/fsdp",
    "stacked/layers",
)

_spec: Any = PartitionSpec  # untyped in JAX


def mesh(devices: int) -> Mesh:
    """Makes a mesh of the first of the devices, whose axis is left to the compiler."""
    return Mesh(np.array(jax.devices()[:devices]), (AXIS,), axis_types=(AxisType.Auto,))


def fsdp_spec(shape: Sequence[int], devices: int) -> PartitionSpec:
    """Returns the spec of an array that is cut along its largest axis.

    Args:
      shape: of the array.
      devices: number of pieces.

    Returns:
      A spec with the largest axis that is a multiple of `devices`, the first of equally large ones.
      An array without such an axis stays whole.
    """
    divisible = [axis for axis, size in enumerate(shape) if size and size % devices == 0]
    if not divisible:
        spec: PartitionSpec = _spec()
        return spec
    largest = max(divisible, key=lambda axis: shape[axis])
    spec = _spec(*(AXIS if axis == largest else None for axis in range(len(shape))))
    return spec


def _layers_spec(path: Any, shape: Sequence[int], devices: int) -> PartitionSpec:
    if getattr(path[0], "key", None) != "blocks":
        return fsdp_spec(shape, devices)
    if shape[0] % devices:
        raise ValueError(
            f"Expected a multiple of {devices} layers, to give each device as many, got "
            f"{shape[0]}. Take a number of --devices that divides it."
        )
    spec: PartitionSpec = _spec(AXIS)
    return spec


def of_params(params: Any, sharding: str, mesh: Mesh) -> Any:
    """Chooses the shardings of the parameters.

    Args:
      params: tree of :func:`gpt2_shapes.shapes`, concrete or abstract.
      sharding: "replicated"; "fsdp", see :func:`fsdp_spec`; or "layers", the leaves of all layers
        along their first axis, and the others as in "fsdp".
      mesh: of one axis, `AXIS`.

    Returns:
      A tree of shardings.

    Raises:
      ValueError: If the layers do not come out even.
    """
    devices = mesh.shape[AXIS]
    specs: dict[str, Callable[[Any, Sequence[int]], PartitionSpec]] = {
        "replicated": lambda path, shape: _spec(),
        "fsdp": lambda path, shape: fsdp_spec(shape, devices),
        "layers": lambda path, shape: _layers_spec(path, shape, devices),
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, specs[sharding](path, leaf.shape)), params
    )


def of_state(state: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Chooses the shardings of an optimizer's state: each buffer lies as its parameter.

    Args:
      state: the state, concrete or abstract, in whatever wrappers.
      params: the parameters that it was made for, likewise.
      shardings: those of the parameters.
      mesh: their mesh.

    Returns:
      A tree of shardings: those of leaves whose path ends with a parameter's and which have its
      shape are the parameter's; the others are replicated.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    by_path = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    }
    lengths = {len(path) for path in by_path}

    def of_leaf(path: Any, leaf: Any) -> NamedSharding:
        for length in lengths:
            shape, sharding = by_path.get(path[len(path) - length :], (None, None))
            if sharding is not None and shape == leaf.shape:
                found: NamedSharding = sharding
                return found
        return NamedSharding(mesh, _spec())

    return jax.tree_util.tree_map_with_path(of_leaf, state)
