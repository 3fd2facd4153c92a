"""A model trained on a sharded batch, with whole parameters on each device, and as on one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import registry
from tests.support import meshes, trees


class ShardingTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select("optimizer", core=True))
    def test_an_optimizer_trains_a_data_parallel_model(self, entry: registry.Entry):
        tx, rng = entry.shared(), np.random.default_rng(0)
        kernel = rng.standard_normal((8, 4)).astype(np.float32)
        host = {"kernel": kernel, "bias": np.zeros(4, np.float32)}
        x = rng.standard_normal((8, 8)).astype(np.float32)

        def step(params, state, x):
            grads = jax.grad(lambda p: jnp.mean((x @ p["kernel"] + p["bias"] - 1) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        expected, _ = jax.jit(step)(host, tx.init(host), x)
        mesh = meshes.mesh(AxisType.Auto)
        with jax.set_mesh(mesh):
            params = jax.device_put(host, NamedSharding(mesh, P()))
            batch = jax.device_put(x, NamedSharding(mesh, P("x")))
            actual, _ = jax.jit(step)(params, jax.jit(tx.init)(params), batch)
            # Sums over the batch are added in another order.
            trees.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    absltest.main()
