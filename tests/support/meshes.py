"""Meshes of eight CPU devices, which tests/conftest.py asks for."""

import jax
from absl.testing import absltest
from jax.sharding import AxisType


def mesh(
    x_type: AxisType, shape: tuple[int, int] = (4, 2), y_type: AxisType | None = None
) -> jax.sharding.Mesh:
    """A mesh with the axes "x" and "y", of one type unless the second is given."""
    devices = jax.devices("cpu")
    if len(devices) < 8:
        raise absltest.SkipTest("needs eight CPU devices")
    mine = devices[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("x", "y"), axis_types=(x_type, y_type or x_type), devices=mine)
