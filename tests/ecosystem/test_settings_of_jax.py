"""JAX's strict settings, and libraries that take functions apart: what runs in Optax runs here."""

import copy
import pickle

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mars_optax
from tests import registry
from tests.ecosystem import plain
from tests.support import trees

_STRICT = {
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
}
_OPTIMIZERS = (
    mars_optax.mars,
    mars_optax.mars_lion,
    mars_optax.mars_m,
    mars_optax.mars_shampoo,
)
_BY_NAME = tuple((f"_{factory.__name__}", factory) for factory in _OPTIMIZERS)


def _params(dtype="float32"):
    return {"w": jnp.arange(24.0, dtype=dtype).reshape(6, 4) / 24, "b": jnp.zeros(4, dtype)}


def _grads(params):
    return jax.tree.map(lambda p: (0.1 * p + 0.3).astype(p.dtype), params)


class StrictTest(parameterized.TestCase):
    # The schedules of these entries add a float to a count, which is the user's to widen.
    @parameterized.named_parameters(
        *registry.select(contracts=["strict"], where=lambda entry: "schedules" not in entry.name)
    )
    def test_nothing_is_promoted(self, entry):
        for dtype in ("float32", "bfloat16"):
            params, grads = entry.params(dtype), entry.grads(0, dtype)
            for setting in _STRICT.values():
                with setting():
                    # Made anew: what was traced without the setting is not traced again.
                    tx = entry.make()
                    state = jax.eval_shape(tx.init, params)
                    updates, _ = jax.eval_shape(tx.update, grads, state, params)
            trees.assert_same_types(updates, params)

    @parameterized.named_parameters(*_BY_NAME)
    def test_injected_hyperparameters_of_low_precision(self, factory):
        params = _params("bfloat16")
        with jax.numpy_dtype_promotion("strict"):
            tx = optax.inject_hyperparams(factory)(learning_rate=0.1)
            jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)

    def test_tools_give_the_same(self):
        params, half = _params(), _params("bfloat16")
        state = mars_optax.mars(0.1).init(params)

        def run():
            return (
                mars_optax.orthogonalize(params["w"]),
                mars_optax.stochastic_apply_updates(half, params, jax.random.key(0)),
                mars_optax.diagnose(params, state),
            )

        expected = run()
        for setting in _STRICT.values():
            with setting():
                trees.assert_equal(run(), expected)

    @parameterized.named_parameters(*_BY_NAME)
    def test_zeros_make_neither_nan_nor_infinity(self, factory):
        params = jax.tree.map(jnp.zeros_like, _params())
        with jax.debug_nans(True), jax.debug_infs(True):
            tx = factory(0.1)
            updates, _ = plain.jit(tx.update)(params, tx.init(params), params)
        trees.assert_equal(updates, params)

    @parameterized.named_parameters(*_BY_NAME[:2])
    def test_no_tracer_leaks(self, factory):
        params = _params()
        with jax.checking_leaks():
            tx = optax.inject_hyperparams(factory)(learning_rate=0.1)
            plain.jit(tx.update)(params, tx.init(params), params)


class ClosureTest(parameterized.TestCase):
    @parameterized.product(factory=_OPTIMIZERS, correction=("approx", "exact"))
    def test_pickled_it_takes_the_same_steps(self, factory, correction):
        params = _params()
        tx = factory(0.1, correction=correction, mask=lambda p: jax.tree.map(jnp.ndim, p))
        extra = {"grad_fn": _grads} if correction == "exact" else {}
        state = tx.init(params)
        expected, _ = tx.update(_grads(params), state, params, **extra)
        for other in (cloudpickle.loads(cloudpickle.dumps(tx)), copy.deepcopy(tx)):
            self.assertEqual(repr(other), repr(tx))
            again = pickle.loads(pickle.dumps(state))
            actual, _ = other.update(_grads(params), again, params, **extra)
            trees.assert_equal(actual, expected)

    @parameterized.named_parameters(*_BY_NAME)
    def test_functions_may_become_trees(self, factory):
        """Optimistix makes callable trees of an optimizer's closures, and the user's functions."""
        numbers = optax.contrib.MuonDimensionNumbers()
        settings = {
            "mask": lambda p: jax.tree.map(lambda x: jnp.ndim(x) > 1, p),
            "weight_dimension_numbers": lambda p: {"w": numbers, "b": None},
            "gamma": lambda count: 0.02,
        }
        params = _params()
        for tx in (factory(0.1), factory(0.1, **settings)):
            state = tx.init(params)
            expected, _ = tx.update(_grads(params), state, params)
            converted = eqx.internal.closure_to_pytree(tx)
            trees.assert_same_types(converted.init(params), state)
            actual, _ = converted.update(_grads(params), state, params)
            trees.assert_equal(actual, expected)

    def test_a_tree_that_can_be_called_is_a_tree(self):
        class Model(eqx.Module):
            w: object

            def __call__(self, x):
                raise AssertionError("called")

        params = Model(jnp.ones((2, 3)))
        tx = mars_optax.mars_m(
            0.1,
            weight_dimension_numbers=Model(optax.contrib.MuonDimensionNumbers()),
            mask=Model(False),
        )
        tx.update(params, tx.init(params), params)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="JAX moves nothing to the host's memory")
class HostMemoryTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select(core=True))
    def test_parameters_of_the_host_begin_as_those_of_a_device(self, entry):
        mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
        host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
        params, tx = entry.params(), entry.make()
        in_host = jax.device_put(params, host)
        expected = tx.init(params)
        trees.assert_equal(plain.jit(tx.init)(in_host), expected)
        state = jax.jit(tx.init, out_shardings=host)(in_host)
        self.assertTrue(all(x.sharding == host for x in jax.tree.leaves(state)))
        if "host_memory" not in entry.skips:
            # All in one memory, as Optax has it.
            jax.eval_shape(tx.update, in_host, state, in_host)


class DerivativeTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("_mars", mars_optax.mars, {}),
        ("_mars_eps_root", mars_optax.mars, {"eps_root": 1e-3}),
        ("_mars_optimize_1d", mars_optax.mars, {"optimize_1d": True}),
        ("_mars_amsgrad", mars_optax.mars, {"amsgrad": True, "eps_root_1d": 1e-3}),
        ("_mars_lion", mars_optax.mars_lion, {"eps_root_1d": 1e-3}),
        ("_mars_m", mars_optax.mars_m, {"ns_dtype": "float64"}),
        ("_mars_shampoo", mars_optax.mars_shampoo, {"ns_dtype": "float64", "eps_root_1d": 1e-3}),
    )
    def test_through_training_it_is_that_of_finite_differences(self, factory, settings):
        with trees.float64():
            rng = np.random.default_rng(0)
            # One entry, and all of a leaf, have gradients of 0 at the first step or at all.
            start = {"w": rng.standard_normal((6, 4)), "b": np.zeros(4)}
            start["w"][0, 0] = 0
            start = jax.tree.map(jnp.asarray, start)

            def outcome(learning_rate):
                tx = factory(learning_rate, **settings)
                params, state = start, tx.init(start)
                for _ in range(3):
                    updates, state = tx.update(params, state, params)
                    params = optax.apply_updates(params, updates)
                return sum(jnp.sum((x - 0.3) ** 2) for x in jax.tree.leaves(params))

            value, h = jax.jit(outcome), 1e-6
            expected = (value(1e-2 + h) - value(1e-2 - h)) / (2 * h)
            actual = jax.jit(jax.grad(outcome))(1e-2)
            # Differences of second order, of a function that bends like 1e3.
            np.testing.assert_allclose(actual, expected, rtol=1e-5)

    @parameterized.parameters(0.0, 1e-2)
    def test_eps_root_is_that_of_adamw(self, eps_root):
        params = _params()
        pairs = {
            "mars": mars_optax.mars(
                0.1, 0.9, 0.99, correction="none", max_norm=None, optimize_1d=True,
                eps_root=eps_root,
            ),
            "mars_1d": mars_optax.mars(
                0.1, b2_1d=0.99, weight_decay_1d=0.0, eps_root_1d=eps_root,
                weight_dimension_numbers=mars_optax.dimension_numbers_by_path([], "vector"),
            ),
            "mars_shampoo": mars_optax.mars_shampoo(
                0.1, b2_1d=0.99, weight_decay_1d=0.0, eps_root_1d=eps_root,
                weight_dimension_numbers=mars_optax.dimension_numbers_by_path([], "vector"),
            ),
        }  # fmt: skip
        reference = optax.adamw(0.1, 0.9, 0.99, weight_decay=0.0, eps_root=eps_root)
        grads = [_grads(params), params]
        for name, tx in pairs.items():
            with self.subTest(name):
                actual, *_ = trees.run(tx, params, grads)
                expected, *_ = trees.run(reference, params, grads)
                trees.assert_close(actual, expected, rtol=1e-5, atol=1e-7)

    @parameterized.parameters(False, True)
    def test_eps_root_of_storm(self, nesterov):
        params = _params()
        tx = mars_optax.storm_adamw(
            0.1, gamma=1.0, weight_decay=0.0, eps_root=1e-2, nesterov=nesterov
        )
        reference = optax.adamw(0.1, 0.9, 0.99, eps_root=1e-2, weight_decay=0.0, nesterov=nesterov)
        actual, _ = tx.update(_grads(params), tx.init(params), params, grad_fn=_grads)
        expected, _ = reference.update(_grads(params), reference.init(params), params)
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


class ReprTest(parameterized.TestCase):
    def test_it_shows_the_settings_that_are_not_the_defaults(self):
        tx = mars_optax.mars(1e-3, 0.95, eps=1e-6, mask={"w": True}, learning_rate_1d=jnp.ones(()))
        self.assertEqual(
            repr(tx),
            "mars(learning_rate=0.001, eps=1e-06, mask={'w': True}, "
            f"learning_rate_1d={jnp.ones(())!r})",
        )
        self.assertEqual(
            repr(mars_optax.cautious(mars_optax.scale_by_mars(amsgrad=True))),
            "cautious(inner=scale_by_mars(amsgrad=True))",
        )
        self.assertStartsWith(
            repr(mars_optax.mars_m(optax.constant_schedule(0.1))),
            "mars_m(learning_rate=constant_schedule.",
        )

    @parameterized.parameters(
        (lambda: optax.scale_by_factored_rms(), "scale_by_factored_rms(...)"),
        (lambda: optax.chain(optax.clip(1.0), optax.scale_by_adam()), "chain(...)"),
        (lambda: optax.scale(2.0), "scale(...)"),
        (lambda: mars_optax.scale_by_mars(amsgrad=True), "scale_by_mars(amsgrad=True)"),
    )
    def test_of_an_optax_transformation_it_shows_the_name(self, make, name):
        tx = mars_optax.variance_reduced(make(), 0.1)
        self.assertEqual(repr(tx), f"variance_reduced(inner={name}, learning_rate=0.1)")

    def test_it_shows_no_addresses(self):
        tx = mars_optax.mars(0.1, mask={"w": lambda p: p, "b": [_params]})
        self.assertNotIn(" at 0x", repr(tx))
        self.assertIn("mask={'w': <function ReprTest.", repr(tx))

    def test_a_description_begins_with_it(self):
        tx = mars_optax.mars_lion(1e-3)
        self.assertStartsWith(str(mars_optax.describe(_params(), tx)), repr(tx) + "\n")
        chain = optax.chain(tx)
        self.assertStartsWith(str(mars_optax.describe(_params(), chain)), "leaf ")


if __name__ == "__main__":
    absltest.main()
