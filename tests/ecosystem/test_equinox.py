"""Equinox: filtered modules, whose trees hold None and whose kernels are (out, in)."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.ecosystem import plain
from tests.support import trees


def is_linear(node):
    return isinstance(node, eqx.nn.Linear)


def linear_weights(params):
    """Weights of `eqx.nn.Linear` are matrices of (out, in), all else are vectors."""
    numbers = MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def of_module(node):
        return jax.tree.map(lambda x: numbers if is_linear(node) and x.ndim == 2 else None, node)

    return jax.tree.map(of_module, params, is_leaf=is_linear)


class Net(eqx.Module):
    first: eqx.nn.Linear
    activation: object  # a function is no array: None among the parameters
    second: eqx.nn.Linear
    calls: jax.Array  # nor are integers trained

    def __init__(self):
        first, second = plain.params().values()
        key = jax.random.key(0)
        self.first, self.second = eqx.nn.Linear(3, 5, key=key), eqx.nn.Linear(5, 2, key=key)
        self.first = _with_values(self.first, first)
        self.second = _with_values(self.second, second)
        self.activation = jnp.tanh
        self.calls = jnp.zeros([], jnp.int32)

    def __call__(self, x):
        return self.second(self.activation(self.first(x)))


def _with_values(linear, values):
    new = (values["kernel"].T, values["bias"])
    return eqx.tree_at(lambda m: (m.weight, m.bias), linear, new)


def _as_plain(model):
    return {
        name: {"bias": layer.bias, "kernel": layer.weight.T}
        for name, layer in (("first", model.first), ("second", model.second))
    }


def _loss(model, batch):
    x, y = batch
    return jnp.mean(jnp.square(jax.vmap(model)(x) - y))


def _train(tx):
    @eqx.filter_jit
    def step(model, state, batch):
        value, grads = eqx.filter_value_and_grad(_loss)(model, batch)
        trained, rest = eqx.partition(model, eqx.is_inexact_array)

        def grad_fn(trained):
            return eqx.filter_grad(lambda t: _loss(eqx.combine(t, rest), batch))(trained)

        updates, state = tx.update(grads, state, trained, grad_fn=grad_fn)
        return eqx.apply_updates(model, updates), state, value

    model = Net()
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    for t in range(plain.STEPS):
        model, state, value = step(model, state, plain.batch(t))
    return model, state, value


class EquinoxTest(parameterized.TestCase):
    def test_the_rule_is_the_one_of_the_page(self):
        self.assertIn(inspect.getsource(linear_weights), plain.page())

    def test_a_module_is_trained_as_a_dict_of_transposed_kernels(self):
        self._check("mars_shampoo", "exact")

    @pytest.mark.slow
    def test_a_module_is_trained_as_a_dict_without_exact_mode(self):
        self._check("mars", "approx")

    def _check(self, name, correction):
        tx = plain.optimizer(name, correction=correction, weight_dimension_numbers=linear_weights)
        model, state, _ = _train(tx)
        expected, _ = plain.trained(name, correction=correction)
        trees.assert_close(_as_plain(model), expected, **plain.CLOSE)
        # What is not trained is left alone, and has no state.
        self.assertIs(model.activation, jnp.tanh)
        self.assertEqual(int(model.calls), 0)
        of_modules = {np.shape(x) for x in jax.tree.leaves(state)}
        self.assertEqual(of_modules, {(), (5, 3), (5,), (2, 5), (2,)})

    def test_without_the_rule_the_shape_factor_is_that_of_the_transpose(self):
        """What the page warns of: (out, in) is taken for (in, out), and nothing fails."""
        params = eqx.filter(Net(), eqx.is_inexact_array)
        for name, factor in (("mars_shampoo", (5 / 3) ** 0.5), ("mars_m", 1.0)):

            @plain.jit
            def updates(params, name=name):
                settings = {"weight_decay": 0.0, "max_norm": None}
                pair = (
                    plain.optimizer(name, weight_dimension_numbers=numbers, **settings)
                    for numbers in (linear_weights, None)
                )
                return [tx.update(params, tx.init(params), params)[0] for tx in pair]

            declared, default = updates(params)
            # The factor of MARS-Shampoo is max(1, out / in) ** 0.5, here of 5 from 3; that of
            # MARS-M is the same for a matrix and its transpose.
            np.testing.assert_allclose(
                declared.first.weight, factor * default.first.weight, rtol=1e-4, atol=1e-6
            )

    def test_describe_shows_the_axes(self):
        params = eqx.filter(Net(), eqx.is_inexact_array)
        tx = mars_optax.mars_m(0.1, weight_dimension_numbers=linear_weights)
        report = mars_optax.describe(params, tx)
        self.assertEqual(
            {leaf.path: leaf.axes for leaf in report.leaves},
            {
                "first/weight": MuonDimensionNumbers(1, 0),
                "first/bias": None,
                "second/weight": MuonDimensionNumbers(1, 0),
                "second/bias": None,
            },
        )

    @pytest.mark.slow
    def test_stacked_modules_have_a_batch_axis(self):
        keys = jax.random.split(jax.random.key(0), 3)
        layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 2, key=key))(keys)
        stack = eqx.filter(layers, eqx.is_inexact_array)
        numbers = MuonDimensionNumbers(reduction_axis=2, output_axis=1)
        rules = mars_optax.dimension_numbers_by_path([("weight$", numbers), ("bias$", None)])
        stacked = plain.optimizer("mars_m", weight_dimension_numbers=rules)
        single = plain.optimizer("mars_m", weight_dimension_numbers=linear_weights)
        together, _ = plain.jit(stacked.update)(stack, stacked.init(stack), stack)
        alone = jax.vmap(lambda layer: single.update(layer, single.init(layer), layer)[0])
        trees.assert_close(together, plain.jit(alone)(stack), **plain.CLOSE)


if __name__ == "__main__":
    absltest.main()
