"""Schedules and the two groups of leaves: every knob turns what it names and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests import registry
from tests.support import trees

_FAMILY = registry.names(
    "optimizer",
    core=True,
    contracts=["vector_rule"],
    where=lambda entry: entry.accepts("learning_rate_1d"),
)


def _matrices(tree):
    return [tree["embed"], tree["layer"]["kernel"]]


def _vectors(tree):
    return [tree["layer"]["bias"], tree["scale"]]


def _updates(name: str, steps: int = 3, **kwargs):
    """The updates of some steps at resting parameters."""
    entry = registry.get(name)
    tx = entry.precise(**kwargs) if kwargs else entry.shared()
    params = entry.params()
    update, state, result = trees.jitted_update(tx), tx.init(params), []
    for step in range(steps):
        updates, state = update(entry.grads(step), state, params)
        result.append(updates)
    return result


class LearningRateTest(parameterized.TestCase):
    @parameterized.parameters(*_FAMILY)
    def test_the_schedule_multiplies_the_update(self, name: str):
        constant = _updates(name, learning_rate=1.0)
        scheduled = _updates(name, learning_rate=lambda count: 0.5 / (1.0 + count))
        for step, (expected, actual) in enumerate(zip(constant, scheduled, strict=True)):
            expected = optax.tree.scale(0.5 / (1 + step), expected)
            trees.assert_close(actual, expected, rtol=1e-5, atol=1e-7)

    @parameterized.parameters(*_FAMILY)
    def test_a_constant_schedule_equals_the_number(self, name: str):
        actual = _updates(name, learning_rate=lambda _: 0.1, gamma=lambda _: 0.025)
        trees.assert_close(actual, _updates(name), rtol=1e-5, atol=1e-7)

    @parameterized.parameters(*_FAMILY)
    def test_the_vectors_rate_leaves_the_matrices_alone(self, name: str):
        base = _updates(name)
        moved = _updates(name, learning_rate_1d=lambda count: 0.2 + 0.1 * count)
        for step, (expected, actual) in enumerate(zip(base, moved, strict=True)):
            trees.assert_equal(_matrices(actual), _matrices(expected))
            factor = (0.2 + 0.1 * step) / 0.1
            trees.assert_close(
                _vectors(actual),
                [factor * x for x in _vectors(expected)],
                rtol=1e-5,
                atol=1e-7,
            )

    @parameterized.parameters(*_FAMILY)
    def test_the_matrices_rate_leaves_the_vectors_alone(self, name: str):
        base = _updates(name, learning_rate_1d=0.05)
        moved = _updates(name, learning_rate_1d=0.05, learning_rate=lambda count: 0.2 + count)
        for expected, actual in zip(base, moved, strict=True):
            trees.assert_equal(_vectors(actual), _vectors(expected))
        # The first step of SOAP moves no matrix.
        for expected, actual in zip(base[1:], moved[1:], strict=True):
            self.assertFalse(np.array_equal(actual["embed"], expected["embed"]))

    @parameterized.parameters(*_FAMILY)
    def test_without_a_rate_of_their_own_the_vectors_follow_the_schedule(self, name: str):
        base = _updates(name, learning_rate=1.0)
        moved = _updates(name, learning_rate=lambda count: 0.5 / (1.0 + count))
        for step, (expected, actual) in enumerate(zip(base, moved, strict=True)):
            expected = [x * (0.5 / (1 + step)) for x in _vectors(expected)]
            trees.assert_close(_vectors(actual), expected, rtol=1e-5, atol=1e-7)

    @parameterized.parameters(*_FAMILY)
    def test_a_rate_of_zero_stops_the_parameters_but_not_the_state(self, name: str):
        entry = registry.get(name)
        updates, _, state = trees.run(
            entry.make(learning_rate=0.0), entry.params(), [entry.grads(i) for i in range(2)]
        )
        trees.assert_equal(updates, optax.tree.zeros_like(updates))
        for field in ("mu", "prev_grad"):
            for leaf in jax.tree.leaves(trees.fields(state, field)):
                self.assertTrue(bool(jnp.any(leaf != 0)))


class DecayTest(parameterized.TestCase):
    @parameterized.parameters(*_FAMILY)
    def test_setting_one_decay_leaves_the_other_group_bit_identical(self, name: str):
        base = _updates(name, weight_decay=0.2, weight_decay_1d=0.3)
        matrices = _updates(name, weight_decay=0.7, weight_decay_1d=0.3)
        vectors = _updates(name, weight_decay=0.2, weight_decay_1d=0.9)
        for expected, m, v in zip(base, matrices, vectors, strict=True):
            trees.assert_equal(_vectors(m), _vectors(expected))
            trees.assert_equal(_matrices(v), _matrices(expected))
            self.assertFalse(np.array_equal(m["embed"], expected["embed"]))
            self.assertFalse(np.array_equal(v["scale"], expected["scale"]))

    @parameterized.parameters(*_FAMILY)
    def test_decay_is_multiplied_by_the_rate_of_the_group(self, name: str):
        entry = registry.get(name)
        tx = entry.make(
            learning_rate=0.1, learning_rate_1d=0.3, weight_decay=0.5, weight_decay_1d=0.2
        )
        params = entry.params()
        updates, _, _ = trees.run(tx, params, [optax.tree.zeros_like(params)])
        trees.assert_close(
            _matrices(updates), [-0.05 * x for x in _matrices(params)], rtol=1e-5, atol=0
        )
        trees.assert_close(
            _vectors(updates), [-0.06 * x for x in _vectors(params)], rtol=1e-5, atol=0
        )

    @parameterized.parameters(("mars", 0.1), ("mars_lion", 0.1), ("mars_shampoo", 0.1))
    def test_vectors_decay_by_default_as_in_the_reference_code(self, name: str, decay: float):
        trees.assert_equal(_updates(name), _updates(name, weight_decay=0.0, weight_decay_1d=decay))

    def test_mars_m_decays_all_leaves_alike_by_default(self):
        trees.assert_equal(_updates("mars_m"), _updates("mars_m", weight_decay_1d=0.1))

    @parameterized.parameters(*_FAMILY)
    def test_no_vector_decay_means_that_of_the_matrices(self, name: str):
        trees.assert_equal(
            _updates(name, weight_decay=0.3, weight_decay_1d=None),
            _updates(name, weight_decay=0.3, weight_decay_1d=0.3),
        )

    @parameterized.parameters("mars", "mars_lion", "mars_shampoo")
    def test_with_optimize_1d_the_main_values_count_for_all_leaves(self, name: str):
        base = _updates(name, optimize_1d=True, weight_decay=0.2)
        other = _updates(
            name,
            optimize_1d=True,
            weight_decay=0.2,
            weight_decay_1d=0.7,
            learning_rate_1d=7.0,
            b1_1d=0.1,
            b2_1d=0.1,
            eps_1d=1.0,
        )
        trees.assert_equal(other, base)


class GammaTest(parameterized.TestCase):
    def test_the_schedule_is_read_at_the_count_of_finished_steps(self):
        tx = mars_optax.correct_gradients(gamma=lambda count: 0.5 * count, b1=0.5)
        params = {"w": jnp.zeros((2, 2))}
        g = [{"w": jnp.full((2, 2), value)} for value in (1.0, 3.0, 4.0)]
        state, corrected = tx.init(params), []
        for gradient in g:
            c, state = tx.update(gradient, state, params)
            corrected.append(float(c["w"][0, 0]))
        # The coefficients are 0, 0.5 and 1; the gradient before the first one is zero.
        np.testing.assert_allclose(corrected, [1.0, 3.0 + 0.5 * 2.0, 4.0 + 1.0], rtol=1e-6)

    @parameterized.parameters(*_FAMILY)
    def test_gamma_moves_the_matrices_only(self, name: str):
        base = _updates(name)
        moved = _updates(name, gamma=lambda count: 0.3 + 0.1 * count)
        for step, (expected, actual) in enumerate(zip(base, moved, strict=True)):
            trees.assert_equal(_vectors(actual), _vectors(expected))
            if step and name != "mars_lion":  # signs need not change
                self.assertFalse(np.array_equal(actual["embed"], expected["embed"]))

    @parameterized.parameters(*_FAMILY)
    def test_gamma_and_learning_rate_schedules_are_independent(self, name: str):
        def gamma(count):
            return 0.3 + 0.1 * count

        both = _updates(name, gamma=gamma, learning_rate=lambda count: 0.5 / (1.0 + count))
        alone = _updates(name, gamma=gamma, learning_rate=1.0)
        for step, (actual, expected) in enumerate(zip(both, alone, strict=True)):
            expected = optax.tree.scale(0.5 / (1 + step), expected)
            trees.assert_close(actual, expected, rtol=1e-5, atol=1e-7)

    @parameterized.parameters(*_FAMILY)
    def test_negative_gamma_is_allowed(self, name: str):
        self.assertTrue(trees.all_finite(_updates(name, gamma=-0.01)))


if __name__ == "__main__":
    absltest.main()
