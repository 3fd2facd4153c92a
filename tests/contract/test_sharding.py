"""Meshes of eight CPU devices, explicit and automatic: the state lies where the parameters lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import registry
from tests.support import trees

_SPECS = {"tall": P("x", "y"), "wide": P("y", "x")}
_NAMES = ("scale_by_mars", "scale_by_mars_lion", "scale_by_mars_shampoo", "scale_by_mars_m")


def _host_tree(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "tall": rng.standard_normal((8, 4)).astype(np.float32),
        "wide": rng.standard_normal((4, 8)).astype(np.float32),
    }


def _mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")
    if len(devices) < 8:
        raise absltest.SkipTest("needs eight CPU devices, which tests/conftest.py asks for")
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2, devices=devices[:8])


class ShardingTest(parameterized.TestCase):
    @parameterized.product(name=_NAMES, axis_type=[AxisType.Auto, AxisType.Explicit])
    def test_state_and_updates_are_sharded_like_the_parameters(self, name, axis_type):
        tx = registry.get(name).shared()
        expected, _, _ = trees.run(tx, _host_tree(0), [_host_tree(1), _host_tree(2)], apply=False)
        mesh = _mesh(axis_type)
        with jax.set_mesh(mesh):
            shardings = {key: NamedSharding(mesh, spec) for key, spec in _SPECS.items()}
            params, *grads = (jax.device_put(_host_tree(seed), shardings) for seed in (0, 1, 2))
            state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
            for gradient in grads:
                updates, state = update(gradient, state, params)
            for tree in (updates, state.mu, state.prev_grad):
                for key, leaf in tree.items():
                    self.assertTrue(
                        leaf.sharding.is_equivalent_to(shardings[key], leaf.ndim),
                        f"{key}: {leaf.sharding}",
                    )
            # Sums over shards are added in another order; Newton-Schulz amplifies it.
            tolerance = 1e-4 if name in _NAMES[2:] else 1e-6
            trees.assert_close(updates, expected, rtol=tolerance, atol=tolerance)

    @parameterized.parameters(*_NAMES)
    def test_types_on_an_explicit_mesh_name_the_sharding(self, name: str):
        tx = registry.get(name).make()
        mesh = _mesh(AxisType.Explicit)
        with jax.set_mesh(mesh):
            shardings = {key: NamedSharding(mesh, spec) for key, spec in _SPECS.items()}
            params = jax.device_put(_host_tree(0), shardings)
            state = jax.jit(tx.init)(params)
            _, new_state = jax.jit(tx.update)(params, state, params)
            self.assertEqual(jax.tree.map(jax.typeof, new_state), jax.tree.map(jax.typeof, state))
            for key, leaf in state.prev_grad.items():
                self.assertEqual(jax.typeof(leaf).sharding.spec, _SPECS[key])

    @parameterized.parameters("mars", "mars_m")
    def test_an_optimizer_trains_a_data_parallel_model(self, name: str):
        tx = registry.get(name).shared()
        host = {"kernel": _host_tree(0)["tall"], "bias": np.zeros(4, np.float32)}
        x = _host_tree(3)["wide"].T @ np.ones((4, 8), np.float32)

        def step(params, state, x):
            grads = jax.grad(lambda p: jnp.mean((x @ p["kernel"] + p["bias"] - 1) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        expected, _ = jax.jit(step)(host, tx.init(host), x)
        mesh = _mesh(AxisType.Auto)
        with jax.set_mesh(mesh):
            params = jax.device_put(host, NamedSharding(mesh, P()))
            batch = jax.device_put(x, NamedSharding(mesh, P("x")))
            actual, _ = jax.jit(step)(params, jax.jit(tx.init)(params), batch)
            trees.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    def test_the_correction_is_elementwise_and_stays_on_its_device(self):
        entry = registry.get("correct_gradients")
        tx = entry.make()
        mesh = _mesh(AxisType.Auto)
        shardings = {key: NamedSharding(mesh, spec) for key, spec in _SPECS.items()}
        params = jax.device_put(_host_tree(0), shardings)
        state = jax.jit(tx.init)(params)
        text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
        for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
            self.assertNotIn(collective, text)


if __name__ == "__main__":
    absltest.main()
