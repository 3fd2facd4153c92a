"""`optax.inject_hyperparams`: every number becomes a tracer, and precision survives."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from tests import registry
from tests.support import trees


def _static(entry: registry.Entry) -> tuple[str, ...]:
    """Arguments that shape the program, or whose value is a callable that is no schedule."""
    shaping = ("precondition_frequency", "max_precond_dim")
    names = ("mask", "weight_dimension_numbers", "newton_schulz_fn")
    static = tuple(name for name in names if callable(entry.kwargs.get(name)))
    static += tuple(name for name in shaping if entry.accepts(name))
    # Without the previous gradient the next step's gamma has to be known.
    return static if entry.kwargs.get("keep_prev_grad", True) else (*static, "gamma")


def _inject(entry: registry.Entry, hyperparam_dtype=None, **overrides):
    factory = optax.inject_hyperparams(
        entry.factory, static_args=_static(entry), hyperparam_dtype=hyperparam_dtype
    )
    return factory(**{**entry.kwargs, **overrides})


class InjectTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select(core=True, contracts=["rounding"]))
    def test_injected_equals_plain(self, entry: registry.Entry):
        self._check_injected(entry)

    @parameterized.named_parameters(
        *registry.select(contracts=["rounding"], where=lambda entry: not entry.core)
    )
    @pytest.mark.slow
    def test_injected_equals_plain_in_every_setting(self, entry: registry.Entry):
        self._check_injected(entry)

    def _check_injected(self, entry: registry.Entry):
        grads = [entry.grads(step) for step in range(3)]
        actual, _, state = trees.run(_inject(entry, **entry.precision()), entry.params(), grads)
        expected, _, plain = trees.run(entry.shared(), entry.params(), grads)
        # Coefficients are float32 here and Python numbers there; Newton-Schulz amplifies it.
        rtol, atol = entry.tolerance(1e-4), entry.tolerance(1e-5)
        trees.assert_close(actual, expected, rtol=rtol, atol=atol)
        if not any(callable(value) for value in entry.kwargs.values()):
            # (A schedule of its own needs a counter that an injected number does not.)
            trees.assert_close(state.inner_state, plain, rtol=1e-4, atol=1e-5)

    @parameterized.named_parameters(*registry.select(core=True))
    def test_every_number_is_injected(self, entry: registry.Entry):
        state = _inject(entry).init(entry.params())
        numbers = {
            name
            for name, parameter in inspect.signature(entry.factory).parameters.items()
            if type(parameter.default) in (int, float)
        }
        self.assertContainsSubset(numbers - set(_static(entry)), set(state.hyperparams))

    @parameterized.product(
        entry=[entry for _, entry in registry.select()],
        params_dtype=["float32", "bfloat16"],
        hyperparam_dtype=[None, "float32"],
    )
    def test_types_are_a_fixed_point(self, entry, params_dtype, hyperparam_dtype):
        tx = _inject(entry, hyperparam_dtype and jnp.dtype(hyperparam_dtype))
        params = entry.params(params_dtype)
        for grads_dtype in ("float32", "bfloat16"):
            grads = entry.grads(0, grads_dtype)
            state = jax.eval_shape(tx.init, params)
            updates, new_state = jax.eval_shape(tx.update, grads, state, params)
            trees.assert_same_types(new_state.inner_state, state.inner_state)
            like = params if entry.kind == "optimizer" else grads
            trees.assert_same_types(updates, like)

    @parameterized.named_parameters(*registry.select(core=True))
    def test_half_precision_hyperparameters_give_finite_results(self, entry: registry.Entry):
        # Without `hyperparam_dtype` Optax rounds what it injects to bfloat16: 0.99 becomes 0.9883.
        grads = [entry.grads(step, "bfloat16") for step in range(3)]
        params = entry.params("bfloat16")
        updates, params, state = trees.run(_inject(entry), params, grads)
        self.assertTrue(trees.all_finite((updates, params, state.inner_state)))

    def test_coefficient_keeps_float32_accuracy_beside_half_precision_parameters(self):
        tx = optax.inject_hyperparams(mars_optax.correct_gradients, hyperparam_dtype=jnp.float32)(
            gamma=0.025, b1=0.95
        )
        params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
        grads = {"w": jnp.ones((2, 2), jnp.float32)}
        corrected, _ = jax.jit(tx.update)(grads, tx.init(params), params)
        np.testing.assert_allclose(corrected["w"] - 1, 0.475, rtol=0, atol=1e-6)

    def test_coefficient_of_injected_mars_keeps_float32_accuracy(self):
        tx = optax.inject_hyperparams(mars_optax.mars, hyperparam_dtype=jnp.float32)(
            0.1, max_norm=None, mu_dtype="float32"
        )
        params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
        grads = {"w": jnp.ones((2, 2), jnp.float32)}
        _, state = jax.jit(tx.update)(grads, tx.init(params), params)
        (mu,) = [mu for mu in trees.fields(state, "mu") if jax.tree.leaves(mu)]
        np.testing.assert_allclose(mu["w"] / 0.05, 1.475, rtol=2e-6, atol=0)

    def test_hyperparameters_changed_in_the_state_take_effect(self):
        tx = optax.inject_hyperparams(mars_optax.correct_gradients)(gamma=0.025, b1=0.5)
        params = grads = {"w": jnp.ones((2, 2))}
        state = tx.init(params)
        state.hyperparams["gamma"] = jnp.asarray(1.0)
        corrected, _ = tx.update(grads, state, params)
        np.testing.assert_allclose(corrected["w"], 2.0, rtol=1e-6)

    def test_rules_by_path_are_to_be_static(self):
        rules = mars_optax.dimension_numbers_by_path([("kernel", None)])
        tx = optax.inject_hyperparams(mars_optax.mars)(0.1, weight_dimension_numbers=rules)
        with self.assertRaisesRegex(ValueError, "name `weight_dimension_numbers` in `static_args`"):
            tx.init({"kernel": jnp.ones((3, 4))})

    @parameterized.named_parameters(
        *registry.select("optimizer", core=True, contracts=["rounding"])
    )
    def test_schedules_pass_through_inject(self, entry: registry.Entry):
        schedules = {
            "learning_rate": lambda count: 0.1 / (1 + count),
            "gamma": lambda count: 0.02 + 0.01 * count,
        }
        grads = [entry.grads(step) for step in range(3)]
        precise = entry.precision()
        actual, _, _ = trees.run(_inject(entry, **schedules, **precise), entry.params(), grads)
        expected, _, _ = trees.run(entry.make(**schedules, **precise), entry.params(), grads)
        # As in `test_injected_equals_plain`.
        trees.assert_close(actual, expected, rtol=1e-3, atol=1e-4)

    @parameterized.named_parameters(
        ("numbers", {"learning_rate_1d": 0.05, "weight_decay_1d": 0.3, "eps_1d": 1e-6}),
        ("schedule", {"learning_rate_1d": lambda count: 0.1 / (1 + count)}),
    )
    def test_the_vector_leaves_options_pass_through_inject(self, options):
        for name in ("mars", "mars_m"):
            entry = registry.get(name)
            grads = [entry.grads(step) for step in range(3)]
            actual, _, _ = trees.run(_inject(entry, **options), entry.params(), grads)
            expected, _, _ = trees.run(entry.make(**options), entry.params(), grads)
            np.testing.assert_allclose(
                actual["layer"]["bias"], expected["layer"]["bias"], rtol=1e-4, atol=1e-6
            )

    @parameterized.named_parameters(
        ("mars", "mars", ("mu_dtype", "nu_dtype", "prev_grad_dtype")),
        ("mars_lion", "mars_lion", ("mu_dtype", "prev_grad_dtype")),
        ("mars_shampoo", "mars_shampoo", ("mu_dtype", "prev_grad_dtype", "nu_dtype", "ns_dtype")),
        ("mars_m", "mars_m", ("mu_dtype", "prev_grad_dtype", "ns_dtype")),
        ("scale_by_mars", "scale_by_mars", ("mu_dtype", "nu_dtype", "prev_grad_dtype")),
        ("scale_by_mars_m", "scale_by_mars_m", ("mu_dtype", "ns_dtype")),
        ("correct_gradients", "correct_gradients", ("prev_grad_dtype",)),
    )
    def test_dtypes_that_are_callable_survive_inject(self, name: str, arguments):
        # jnp.bfloat16 is callable, hence a schedule for Optax, which passes on its value.
        entry = registry.get(name)
        for argument in arguments:
            with self.subTest(argument):
                tx, params = _inject(entry, **{argument: jnp.bfloat16}), entry.params("bfloat16")
                state = jax.eval_shape(tx.init, params)
                updates, new_state = jax.eval_shape(tx.update, entry.grads(), state, params)
                trees.assert_same_types(new_state.inner_state, state.inner_state)
                self.assertEqual(jax.tree.structure(updates), jax.tree.structure(params))
                field = argument.removesuffix("_dtype")
                for leaf in jax.tree.leaves(trees.fields(state, field)):
                    self.assertEqual(leaf.dtype, jnp.bfloat16)

    @parameterized.named_parameters(("mars", "mars", "mu_dtype"), ("mars_m", "mars_m", "ns_dtype"))
    def test_dtypes_given_as_strings_are_kept_by_inject(self, name: str, argument: str):
        entry = registry.get(name)
        tx = _inject(entry, **{argument: "bfloat16"})
        updates, _, state = trees.run(tx, entry.params(), [entry.grads()])
        self.assertTrue(trees.all_finite(updates))
        if argument == "mu_dtype":
            for leaf in jax.tree.leaves(trees.fields(state, "mu")):
                self.assertEqual(leaf.dtype, jnp.bfloat16)

    def test_arrays_serve_as_hyperparameters(self):
        arrays = {
            "learning_rate": np.float32(0.1),
            "b1": jnp.asarray(0.9),
            "gamma": np.asarray(0.05),
            "max_norm": jnp.asarray(0.5),
            "ns_steps": jnp.asarray(3),
        }
        numbers = {"learning_rate": 0.1, "b1": 0.9, "gamma": 0.05, "max_norm": 0.5, "ns_steps": 3}
        entry = registry.get("mars_m")
        grads = [entry.grads(step) for step in range(2)]
        actual, _, _ = trees.run(entry.precise(**arrays), entry.params(), grads)
        expected, _, _ = trees.run(entry.precise(**numbers), entry.params(), grads)
        # Newton-Schulz amplifies the last digit of the float32 coefficients.
        trees.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    absltest.main()
