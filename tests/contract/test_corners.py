"""Corners in which something was once wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax


class GammaTest(parameterized.TestCase):
    def _final(self, tx):
        params = jnp.zeros((2, 2))
        state = tx.init(params)
        for value in (1.0, -2.0, 3.0):
            updates, state = tx.update(jnp.full((2, 2), value), state, params)
        return float(updates[0, 0])

    def test_the_form_without_the_previous_gradient_wants_to_know_the_next_gamma(self):
        kwargs = {
            "learning_rate": 1.0,
            "gamma": lambda count: 0.5 * 0.9 ** (count + 1),
            "max_norm": None,
            "second_moment": "gradient",
        }
        expected = self._final(mars_optax.mars(**kwargs, weight_decay_1d=0.0))
        injected = optax.inject_hyperparams(mars_optax.mars)
        with self.assertRaisesRegex(ValueError, "`keep_prev_grad`.*`gamma`.*static_args='gamma'"):
            injected(**kwargs, keep_prev_grad=False).init(jnp.zeros((2, 2)))
        static = optax.inject_hyperparams(mars_optax.mars, static_args="gamma")
        actual = self._final(static(**kwargs, keep_prev_grad=False))
        np.testing.assert_allclose(actual, expected, rtol=1e-5)

    def test_storm_takes_a_small_gamma_of_low_precision_at_its_value(self):
        tx = mars_optax.correct_gradients(gamma=jnp.bfloat16(0.001), correction="storm")
        zero, one = jnp.zeros(1), jnp.ones(1)
        state = tx.init(zero)
        for _ in range(2):
            c, state = tx.update(one, state, zero, grad_fn=lambda _: 2 * one)
        # c_2 = 1 + (1 - gamma)(1 - 2) = gamma
        np.testing.assert_allclose(c, float(jnp.bfloat16(0.001)), rtol=1e-3)

    def test_a_coefficient_of_low_precision_numbers_is_not_rounded_to_it(self):
        b1 = jnp.bfloat16(0.1)
        tx = mars_optax.correct_gradients(gamma=1.0, b1=b1)
        c, _ = tx.update(jnp.ones(1), tx.init(jnp.ones(1)))
        np.testing.assert_allclose(c, 1 + float(b1) / (1 - float(b1)), rtol=1e-6)


class DerivativesTest(absltest.TestCase):
    def test_a_correction_of_zero_has_a_derivative_under_its_clip(self):
        tx = mars_optax.correct_gradients(correction_clip=1.0, first_step="no_correction")
        grad = jax.grad(lambda g: tx.update(g, tx.init(g))[0].sum())(jnp.ones(2))
        np.testing.assert_array_equal(grad, 1.0)

    def test_a_matrix_of_zeros_has_a_derivative(self):
        for steps in (5, np.int64(5)):
            grad = jax.grad(lambda x, n=steps: mars_optax.orthogonalize(x, steps=n).sum())(
                jnp.zeros((2, 2))
            )
            self.assertTrue(bool(jnp.all(jnp.isfinite(grad))))


class RefusalTest(parameterized.TestCase):
    def test_a_gradient_of_another_rank_is_named_by_an_optimizer(self):
        params = {"k": jnp.ones((3, 2)), "b": jnp.ones(2)}
        tx = mars_optax.mars(0.1)
        with self.assertRaisesRegex(ValueError, r"shape \(2,\) for leaf 'b'.*got \(2, 1\)"):
            tx.update({"k": jnp.ones((3, 2)), "b": jnp.ones((2, 1))}, tx.init(params), params)

    def test_a_dtype_without_a_zero_is_refused(self):
        with self.assertRaisesRegex(ValueError, "`prev_grad_dtype`.*has a 0"):
            mars_optax.mars(0.1, prev_grad_dtype=jnp.float8_e8m0fnu)

    def test_the_epsilon_that_was_passed_is_named(self):
        with self.assertRaisesRegex(ValueError, "`eps`"):
            mars_optax.mars(0.1, eps=-1.0)

    def test_gradients_under_other_paths_cannot_be_told_to_be_absent(self):
        inner = optax.flatten(mars_optax.correct_gradients())
        with self.assertRaisesRegex(
            ValueError, "`inner`.*at other paths.*Pass one that keeps paths"
        ):
            mars_optax.ignore_absent_gradients(inner).init({"a": jnp.ones(2)})

    @parameterized.parameters(
        lambda: mars_optax.mars(1e-2),
        lambda: mars_optax.storm_adamw(1e-2),
        lambda: mars_optax.variance_reduced(optax.scale_by_adam(), 1e-2),
    )
    def test_an_optimizer_makes_no_directions(self, make):
        for wrap in (mars_optax.cautious, lambda tx: mars_optax.variance_reduced(tx, 1e-2)):
            with self.assertRaisesRegex(ValueError, "`inner`: expected directions .* opposite"):
                wrap(make())
        # Of directions, too, and of others' transformations, of which nothing is known.
        mars_optax.cautious(mars_optax.cautious(mars_optax.scale_by_mars()))
        mars_optax.cautious(optax.chain(mars_optax.scale_by_mars(), optax.identity()))

    @parameterized.parameters(({"a": True},), ({"a": True, "b": None},), ([True, False],))
    def test_a_mask_of_another_tree_is_refused_at_init(self, mask):
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
        for given in (mask, lambda params: mask):
            with self.assertRaisesRegex(ValueError, "`mask`: expected a tree with the structure"):
                mars_optax.mars(1e-2, mask=given).init(params)
        mars_optax.mars(1e-2, mask={"a": True, "b": False}).init(params)

    def test_diagnose_wants_the_gradients_of_the_state(self):
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
        state = mars_optax.mars(1e-2).init(params)
        with self.assertRaisesRegex(ValueError, r"Gradient 'a': .* \(2, 2\) .* got \(1, 2, 2\)"):
            mars_optax.diagnose(jax.tree.map(lambda x: x[None], params), state)
        with self.assertRaisesRegex(TypeError, "Gradient '.*count'"):
            mars_optax.diagnose(state, params)

    def test_accumulation_goes_around_what_ignores_absent_gradients(self):
        inner = mars_optax.mars(1e-2)
        params = jnp.ones((2, 2))
        with self.assertRaisesRegex(ValueError, "one inside `optax.MultiSteps`"):
            mars_optax.ignore_absent_gradients(optax.MultiSteps(inner, 2)).init(params)
        optax.MultiSteps(mars_optax.ignore_absent_gradients(inner), 2).init(params)

    def test_rules_are_a_sequence(self):
        with self.assertRaisesRegex(TypeError, "`rules`.*sequence"):
            mars_optax.dimension_numbers_by_path(None)


class StateSurgeryTest(parameterized.TestCase):
    @parameterized.parameters("masked", "partition")
    def test_rules_may_be_of_frozen_parameters(self, wrapper):
        params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
        rules = mars_optax.dimension_numbers_by_path([("bias$", None), ("kernel", None)])
        tx = mars_optax.mars_m(1e-2, weight_dimension_numbers=rules)
        if wrapper == "masked":
            tx = optax.masked(tx, {"kernel": True, "bias": False})
        else:
            labels = {"kernel": "train", "bias": "freeze"}
            tx = optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels)
        updates, _ = tx.update(params, tx.init(params), params)
        self.assertLess(float(jnp.max(updates["kernel"])), 0.0)
        # One label may be of a whole subtree, of which no path is left.
        rules = mars_optax.dimension_numbers_by_path([("out/bias", None), ("in", None)])
        tree = {"in": params["kernel"], "out": params}
        with self.assertRaisesRegex(ValueError, "got 'biass'"):
            mars_optax.dimension_numbers_by_path([("biass", None)])(tree)
        tx = optax.masked(
            mars_optax.mars_m(1e-2, weight_dimension_numbers=rules), {"in": True, "out": False}
        )
        updates, _ = tx.update(tree, tx.init(tree), tree)
        self.assertLess(float(jnp.max(updates["in"])), 0.0)

    def test_a_python_number_stands_for_an_array_in_a_state(self):
        tx = mars_optax.mars(1e-2)
        params = {"scale": jnp.float32(2.0)}
        state = tx.init(params)
        plain = state._replace(mu={"scale": 0.0}, nu={"scale": 0.0})
        expected, _ = tx.update(params, state, params)
        updates, new = tx.update(params, plain, params)
        self.assertEqual(float(updates["scale"]), float(expected["scale"]))
        self.assertEqual(new.mu["scale"].dtype, jnp.float32)


class IntegersTest(absltest.TestCase):
    def test_integers_are_added_as_integers(self):
        params = {"n": jnp.array([16_777_217]), "u": jnp.array([3_735_928_559], jnp.uint32)}
        updates = jax.tree.map(jnp.zeros_like, params)
        new = mars_optax.stochastic_apply_updates(params, updates, jax.random.key(0))
        for leaf, expected in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(leaf, expected)


class OwnDtypesTest(parameterized.TestCase):
    """Rules see float32; masks and axes are asked of the parameters as they are."""

    def setUp(self):
        super().setUp()
        self.params = {"half": jnp.ones((4, 3), jnp.bfloat16), "single": jnp.ones((4, 3))}

    def _is_half(self, tree):
        return jax.tree.map(lambda x: x.dtype == jnp.bfloat16, tree)

    @parameterized.parameters("mars", "mars_lion", "mars_m", "mars_soap", "storm_adamw")
    def test_a_mask_by_dtype(self, name):
        grads = jax.tree.map(jnp.zeros_like, self.params)
        tx = getattr(mars_optax, name)(0.1, weight_decay=0.5, mask=self._is_half)
        updates, _ = tx.update(grads, tx.init(self.params), self.params, grad_fn=lambda p: grads)
        adamw = optax.adamw(0.1, weight_decay=0.5, mask=self._is_half)
        expected, _ = adamw.update(grads, adamw.init(self.params), self.params)
        for key in self.params:
            np.testing.assert_array_equal(updates[key], expected[key])

    @parameterized.product(
        name=["mars", "mars_lion", "mars_shampoo", "mars_soap"], optimize_1d=[False, True]
    )
    def test_axes_by_dtype(self, name, optimize_1d):
        if optimize_1d and name == "mars_soap":
            return

        def numbers(tree):
            axes = optax.contrib.MuonDimensionNumbers()
            return jax.tree.map(lambda half: axes if half else None, self._is_half(tree))

        options = {"optimize_1d": True} if optimize_1d else {}
        tx = getattr(mars_optax, name)(0.1, weight_dimension_numbers=numbers, **options)
        state = tx.init(self.params)
        _, new_state = tx.update(self.params, state, self.params)
        self.assertEqual(jax.tree.structure(new_state), jax.tree.structure(state))


class NumbersTest(parameterized.TestCase):
    @parameterized.parameters("learning_rate", "weight_decay")
    def test_none_is_no_rate(self, name):
        with self.assertRaisesRegex(TypeError, f"`{name}`: expected a real number.*got None"):
            mars_optax.mars_m(**{"learning_rate": 0.1, name: None})

    @parameterized.parameters(0, 0.0, np.float32(0), np.int64(0))
    def test_no_decay_needs_no_parameters(self, zero):
        grads = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
        tx = mars_optax.mars(0.1, weight_decay=zero, weight_decay_1d=zero)
        updates, _ = tx.update(grads, tx.init(grads))
        self.assertEqual(updates["bias"].shape, (2,))

    def test_a_class_is_no_schedule(self):
        with self.assertRaisesRegex(TypeError, "`gamma`: expected a real number .*call the class"):
            mars_optax.mars(0.1, gamma=mars_optax.AdaptiveGamma)

    def test_bounds_of_gamma_that_are_no_numbers(self):
        with self.assertRaisesRegex(ValueError, "`low`: expected a number up to `high`"):
            mars_optax.AdaptiveGamma(low=float("nan"))
        bounds = jax.jit(lambda low: mars_optax.AdaptiveGamma(low=low).low)
        self.assertEqual(bounds(0.5), 0.5)

    def test_gamma_goes_on_after_a_gradient_beyond_the_range_of_its_buffers(self):
        params, rule = jnp.zeros((2, 2), jnp.float16), mars_optax.AdaptiveGamma(decay=0.5)
        tx = mars_optax.mars(0.1, gamma=rule)
        state = tx.init(params)
        for step in range(40):
            grads = jnp.full((2, 2), 1.0 + 0.01 * step)
            grads = grads.at[0, 0].set(70000.0) if step == 3 else grads
            _, state = tx.update(grads, state, params)
        self.assertTrue(all(bool(jnp.isfinite(x).all()) for x in state.gamma_state))


if __name__ == "__main__":
    absltest.main()
