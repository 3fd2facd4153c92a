"""Haiku: parameters by module and name, where a module's name holds the path, with `/` and `~`."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.ecosystem import plain
from tests.support import trees


class Mlp(hk.Module):
    def __init__(self):
        super().__init__(name="mlp")
        # Made in the constructor, modules get `~` into their names.
        self.first, self.second = hk.Linear(5, name="first"), hk.Linear(2, name="second")

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


NET = hk.without_apply_rng(hk.transform(lambda x: Mlp()(x)))


def _from_plain(params):
    return {
        f"mlp/~/{name}": {"b": layer["bias"], "w": layer["kernel"]}
        for name, layer in params.items()
    }


def _loss(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(NET.apply(params, x) - y))


class HaikuTest(parameterized.TestCase):
    def test_parameters_are_those_of_the_module(self):
        params = NET.init(jax.random.key(0), plain.batch(0)[0])
        trees.assert_same_types(params, _from_plain(plain.params()))

    def test_a_transformed_module_is_trained_as_plain_arrays(self):
        self._check("mars_m", "exact")

    @pytest.mark.slow
    def test_a_transformed_module_is_trained_as_plain_arrays_without_exact_mode(self):
        self._check("mars", "approx")

    def _check(self, name, correction):
        tx = plain.optimizer(name, correction=correction)

        @plain.jit
        def step(params, state, batch):
            grads = jax.grad(_loss)(params, batch)
            updates, state = tx.update(
                grads, state, params, grad_fn=lambda p: jax.grad(_loss)(p, batch)
            )
            return optax.apply_updates(params, updates), state

        params = _from_plain(plain.params())
        state = tx.init(params)
        for t in range(plain.STEPS):
            params, state = step(params, state, plain.batch(t))
        expected, _ = plain.trained(name, correction=correction)
        trees.assert_close(params, _from_plain(expected), **plain.CLOSE)

    @parameterized.parameters("^mlp/~/second/w$", "second/w", r"mlp/~/s\w+/w$", "~/second")
    def test_rules_see_the_whole_path(self, pattern):
        params = _from_plain(plain.params())
        rules = mars_optax.dimension_numbers_by_path([(pattern, None)])
        report = mars_optax.describe(params, mars_optax.mars_m(0.1, weight_dimension_numbers=rules))
        matrices = [leaf.path for leaf in report.leaves if leaf.rule == "matrix"]
        self.assertEqual(matrices, ["mlp/~/first/w"])

    @pytest.mark.slow
    def test_a_layer_stack_with_declared_axes_is_its_layers(self):
        def net(x):
            layer = hk.experimental.layer_stack(3)(lambda h: jnp.tanh(hk.Linear(4, name="in")(h)))
            return layer(x)

        net = hk.without_apply_rng(hk.transform(net))
        x = jnp.ones((2, 4))
        params = net.init(jax.random.key(0), x)
        (name,) = params
        self.assertEqual(params[name]["w"].shape, (3, 4, 4))
        rules = mars_optax.dimension_numbers_by_path(
            [("in/w$", MuonDimensionNumbers(reduction_axis=1, output_axis=2)), ("in/b$", None)]
        )
        tx = plain.optimizer("mars_m", weight_dimension_numbers=rules)
        grads = jax.grad(lambda p: jnp.sum(jnp.square(net.apply(p, x))))(params)
        together, _ = plain.jit(tx.update)(grads, tx.init(params), params)
        single = plain.optimizer("mars_m")
        alone = jax.vmap(lambda g, p: single.update(g, single.init(p), p)[0])
        trees.assert_close(together, plain.jit(alone)(grads, params), **plain.CLOSE)


if __name__ == "__main__":
    absltest.main()
