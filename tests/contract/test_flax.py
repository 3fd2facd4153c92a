"""Flax: `nnx.Optimizer` and Linen's `TrainState` take every optimizer of the family."""

import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized
from flax import linen, nnx
from flax.training import train_state

import mars_optax
from tests import registry
from tests.support import trees


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(2)(linen.relu(linen.Dense(4)(x)))


def _optimizers():
    for name, entry in registry.select("optimizer", core=True):
        yield name, entry.make()
        yield f"{name}_chained", optax.chain(optax.clip_by_global_norm(1.0), entry.make())
    for name in ("mars_optimize_1d", "mars_schedules", "mars_shampoo_schedules"):
        yield f"_{name}", registry.get(name).make()
    for name, entry in registry.select("optimizer", core=True):
        yield (
            f"{name}_partitioned",
            optax.partition(
                {"kernel": entry.make(), "rest": optax.sgd(0.1)},
                lambda params: jax.tree.map(lambda x: "kernel" if x.ndim == 2 else "rest", params),
            ),
        )


@nnx.jit
def _train_step(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    def loss(model: Net) -> jax.Array:
        return jnp.mean((model(x) - 1.0) ** 2)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


class FlaxTest(parameterized.TestCase):
    @parameterized.named_parameters(*_optimizers())
    def test_nnx_optimizer_takes_jitted_steps(self, tx: optax.GradientTransformation):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        x = jnp.ones((5, 3)) * jnp.arange(5.0)[:, None]
        before = trees.copy(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        for _ in range(2):
            _train_step(model, optimizer, x)
        after = trees.copy(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self.assertTrue(trees.all_finite(after))
        self.assertEqual(int(optimizer.step[...]), 2)
        for name in ("inner", "outer"):
            self.assertGreater(abs(after[name]["kernel"] - before[name]["kernel"]).max(), 0)
            self.assertGreater(abs(after[name]["bias"] - before[name]["bias"]).max(), 0)

    def test_nnx_updates_equal_those_on_plain_arrays(self):
        tx = mars_optax.mars_m(0.1, ns_dtype="float32")
        model = Net(nnx.Rngs(0))
        state = nnx.state(model, nnx.Param)
        plain = nnx.to_pure_dict(state)
        wrapped, _ = tx.update(state, tx.init(state), state)
        expected, _ = tx.update(plain, tx.init(plain), plain)
        trees.assert_close(nnx.to_pure_dict(wrapped), expected, rtol=1e-6, atol=1e-7)

    @parameterized.named_parameters(*registry.select("optimizer", core=True))
    def test_linen_train_state_takes_a_jitted_step(self, entry: registry.Entry):
        model, x = LinenNet(), jnp.ones((5, 3))
        state = train_state.TrainState.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(0), x)["params"],
            tx=entry.make(),
        )

        @jax.jit
        def step(state):
            def loss(params):
                return jnp.mean((state.apply_fn({"params": params}, x) - 1.0) ** 2)

            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        new_state = step(step(state))
        self.assertEqual(int(new_state.step), 2)
        self.assertTrue(trees.all_finite(new_state.params))
        trees.assert_same_types(new_state.opt_state, state.opt_state)

    @parameterized.named_parameters(*registry.select("optimizer", core=True))
    def test_boxes_around_parameters_are_kept_and_change_nothing(self, entry: registry.Entry):
        def boxed(tree):
            names = {0: (), 1: ("mlp",), 2: ("embed", "mlp")}
            return jax.tree.map(lambda x: linen.LogicallyPartitioned(x, names[x.ndim]), tree)

        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        expected, _, expected_state = trees.run(tx, params, [grads, entry.grads(1)])
        updates, _, state = trees.run(tx, boxed(params), [boxed(grads), boxed(entry.grads(1))])
        self.assertEqual(jax.tree.structure(updates), jax.tree.structure(boxed(params)))
        trees.assert_equal(linen.unbox(updates), expected)
        trees.assert_equal(linen.unbox(state), expected_state)
        # The names of the boxes reach the buffers, where the sharding of the state is read off.
        specs = linen.get_partition_spec(state)
        of_kernels = [spec for spec in jax.tree.leaves(specs) if len(spec) == 2]
        self.assertGreaterEqual(len(of_kernels), 2)
        self.assertEqual(set(of_kernels), {jax.sharding.PartitionSpec("embed", "mlp")})

    def test_rules_by_path_reach_stacked_nnx_layers(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(key: jax.Array) -> nnx.Linear:
            return nnx.Linear(4, 4, rngs=nnx.Rngs(key))

        class Deep(nnx.Module):
            def __init__(self):
                self.layers = stack(jax.random.split(jax.random.key(0), 3))

            def __call__(self, x: jax.Array) -> jax.Array:
                @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
                def forward(x: jax.Array, layer: nnx.Linear) -> jax.Array:
                    return layer(x)

                return forward(x, self.layers)

        specs = mars_optax.dimension_numbers_by_path(
            [
                ("layers/kernel$", optax.contrib.MuonDimensionNumbers(1, 2)),
                ("layers/bias$", None),
            ]
        )
        model = Deep()
        tx = mars_optax.mars_m(0.1, weight_dimension_numbers=specs)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        x = jnp.arange(8.0).reshape(2, 4)
        _train_step(model, optimizer, x)
        state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        self.assertTrue(trees.all_finite(state))
        kept = trees.shapes(trees.fields(optimizer.opt_state, "prev_grad"))
        self.assertEqual(kept, [(3, 4, 4)])


if __name__ == "__main__":
    absltest.main()
