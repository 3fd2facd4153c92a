"""Optax's wrappers and schedules around an optimizer of the family, against loops by hand.

Chains, `masked`, `partition`, `MultiSteps` and `apply_if_finite` are in
`tests/contract/test_wrappers.py`, `inject_hyperparams` in `tests/contract/test_inject.py`, and the
links in front of optimizers of Optax in `tests/test_any_optimizer.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from optax import contrib

import mars_optax
from tests.ecosystem import plain
from tests.support import trees

GAMMA, B1, B2, RATE = 0.2, 0.9, 0.99, 0.1
K = GAMMA * B1 / (1 - B1)
_RNG = np.random.default_rng(2)
# Gradients of one matrix, one that is not finite, and parameters.
GRADS = [{"w": _RNG.standard_normal((3, 2)).astype(np.float32)} for _ in range(5)]
BROKEN = {"w": np.full((3, 2), np.nan, np.float32)}
START = {"w": np.ones((3, 2), np.float32)}
TREE = {"a": np.ones((3, 2), np.float32), "b": np.ones(4, np.float32)}


@functools.cache
def _mars(**kwargs):
    return plain.optimizer("mars", **{"max_norm": 8.0, **kwargs})


@functools.cache
def _step(tx):
    return plain.jit(tx.update)


def _loop(tx, grads=GRADS, params=START, **each):
    """`update` on one gradient after the other: every update, the parameters and the state.

    Args:
      tx: The transformation.
      grads: A gradient for each step.
      params: The parameters.
      **each: Extra arguments, a value for each step.
    """
    update, state, updates = _step(tx), tx.init(params), []
    for t, gradient in enumerate(grads):
        extra = {name: values[t] for name, values in each.items()}
        new, state = update(gradient, state, params, **extra)
        params = optax.apply_updates(params, new)
        updates.append(new)
    return updates, params, state


def _schedule_free_by_hand(exact, steps=4):
    """Schedule-Free around the links and RMSprop, in NumPy, on the loss |p - target_t|^2 / 2.

    Returns the parameters that are trained (y), and the ones to evaluate (x).
    """
    z = y = x = np.ones((3, 2))
    nu, weights, previous_grad, previous_y = 0.0, 0.0, 0.0, None
    for t in range(1, steps + 1):
        target = np.asarray(GRADS[t - 1]["w"], np.float64)
        g = y - target
        if exact and t > 1:
            previous_grad = previous_y - target
        c = g + K * (g - previous_grad)
        c = c / max(1.0, np.linalg.norm(c))
        nu = B2 * nu + (1 - B2) * c**2
        previous_grad, previous_y = g, y
        z = z - RATE * c / (np.sqrt(nu / (1 - B2**t)) + 1e-8)
        weights += RATE**2
        x = x + RATE**2 / weights * (z - x)
        y = B1 * x + (1 - B1) * z
    return y, x


class ScheduleTest(parameterized.TestCase):
    def test_a_plateau_behind_the_optimizer_scales_its_updates(self):
        losses = [3.0, 2.0, 2.5, 2.5, 2.5]
        scales = [1.0, 1.0, 1.0, 0.5, 0.5]  # halved by the second that is no better
        tx = optax.chain(_mars(), contrib.reduce_on_plateau(factor=0.5, patience=2))
        actual, params, _ = _loop(tx, value=[jnp.asarray(x) for x in losses])

        state, expected = _mars().init(START), START
        for gradient, scale, update in zip(GRADS, scales, actual, strict=True):
            updates, state = _step(_mars())(gradient, state, expected)
            updates = optax.tree.scale(scale, updates)
            trees.assert_close(update, updates, rtol=1e-5, atol=1e-7)
            expected = optax.apply_updates(expected, updates)
        trees.assert_close(params, expected, rtol=1e-5, atol=1e-6)

    def test_a_scale_in_front_of_the_optimizer_is_normalized_away(self):
        """What the page warns of: a plateau's scale belongs behind."""
        tx = _mars(weight_decay=0.0, max_norm=None)
        updates, _, _ = _loop(tx)
        scaled, _, _ = _loop(tx, [optax.tree.scale(0.5, g) for g in GRADS])
        trees.assert_close(scaled, updates, rtol=1e-4, atol=1e-6)

    @parameterized.parameters("approx", "exact")
    def test_schedule_free_with_the_links_is_the_loop_by_hand(self, correction):
        base = optax.chain(
            mars_optax.correct_gradients(GAMMA, B1, correction=correction),
            mars_optax.clip_by_leaf_norm(1.0),
            optax.scale_by_rms(B2, eps=1e-8, eps_in_sqrt=False, bias_correction=True),
            optax.scale_by_learning_rate(RATE),
        )
        tx = contrib.schedule_free(base, RATE, b1=B1)

        @plain.jit
        def step(params, state, target):
            def grad_fn(p):
                return {"w": p["w"] - target["w"]}

            updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
            return optax.apply_updates(params, updates), state

        params, state = START, tx.init(START)
        for target in GRADS[:4]:
            params, state = step(params, state, target)
        y, x = _schedule_free_by_hand(correction == "exact")
        np.testing.assert_allclose(params["w"], y, rtol=1e-4, atol=1e-5)
        evaluated = contrib.schedule_free_eval_params(state, params)
        np.testing.assert_allclose(evaluated["w"], x, rtol=1e-4, atol=1e-5)

    def test_without_momentum_of_its_own_the_optimizer_does_not_correct(self):
        """Why Schedule-Free gets the links: they name the rate of a momentum that is elsewhere."""
        results = [
            _loop(contrib.schedule_free(_mars(b1=0.0, gamma=gamma), RATE))[1]
            for gamma in (0.0, 0.5)
        ]
        trees.assert_equal(*results)


class AverageTest(parameterized.TestCase):
    def test_lookahead_is_a_loop_with_a_slow_copy(self):
        tx = optax.lookahead(_mars(), sync_period=2, slow_step_size=0.5)
        start = optax.LookaheadParams.init_synced(START)
        _, params, state = _loop(tx, params=start)

        fast = slow = START
        inner = _mars().init(START)
        for t, gradient in enumerate(GRADS):
            updates, inner = _step(_mars())(gradient, inner, fast)
            fast = optax.apply_updates(fast, updates)
            if t % 2 == 1:
                fast = slow = jax.tree.map(lambda f, s: s + 0.5 * (f - s), fast, slow)
        trees.assert_close(params.fast, fast, rtol=1e-5, atol=1e-6)
        trees.assert_close(params.slow, slow, rtol=1e-5, atol=1e-6)
        trees.assert_close(state.fast_state, inner, rtol=1e-5, atol=1e-6)

    def test_lookahead_that_resets_starts_the_correction_anew(self):
        tx = optax.lookahead(_mars(), sync_period=2, slow_step_size=0.5, reset_state=True)
        start = optax.LookaheadParams.init_synced(START)
        _, _, state = _loop(tx, GRADS[:2], start)
        trees.assert_equal(state.fast_state, _mars().init(START))
        trees.assert_same_types(state.fast_state, _mars().init(START))

    def test_lookahead_hands_no_grad_fn_on(self):
        """In Optax it takes no extra arguments: the exact mode is not for it."""
        tx = optax.lookahead(_mars(correction="exact"), sync_period=2, slow_step_size=0.5)
        start = optax.LookaheadParams.init_synced(START)
        with self.assertRaisesRegex(ValueError, r"`grad_fn`: expected a function"):
            optax.chain(tx).update(START, (tx.init(start),), start, grad_fn=lambda p: p)

    def test_averaged_parameters_are_beside_the_training_and_do_not_enter_it(self):
        params, averages = START, START
        state, history = _mars().init(START), [START["w"]]
        for gradient in GRADS:
            updates, state = _step(_mars())(gradient, state, params)
            params = optax.apply_updates(params, updates)
            averages = optax.incremental_update(params, averages, step_size=0.1)
            history.append(params["w"])
        weights = [0.9**5, *(0.1 * 0.9 ** (4 - t) for t in range(5))]
        expected = sum(w * np.asarray(p, np.float64) for w, p in zip(weights, history, strict=True))
        np.testing.assert_allclose(averages["w"], expected, rtol=1e-5)
        trees.assert_equal(params, _loop(_mars())[1])

    def test_ema_behind_the_optimizer_averages_updates_instead(self):
        actual, _, _ = _loop(optax.chain(_mars(weight_decay=0.0), optax.ema(0.9, debias=False)))
        updates, _, _ = _loop(_mars(weight_decay=0.0))
        average = 0.0
        for update, averaged in zip(updates, actual, strict=True):
            average = 0.9 * average + 0.1 * np.asarray(update["w"], np.float64)
            np.testing.assert_allclose(averaged["w"], average, rtol=1e-4, atol=1e-6)


class SkippedStepTest(parameterized.TestCase):
    def test_multi_steps_skips_what_is_not_finite(self):
        tx = optax.MultiSteps(
            _mars(), every_k_schedule=1, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation()
        _, expected, plain_state = _loop(_mars())
        _, params, state = _loop(tx, [GRADS[0], BROKEN, *GRADS[1:]])
        trees.assert_close(params, expected, rtol=1e-6, atol=1e-7)
        trees.assert_close(state.inner_opt_state, plain_state, rtol=1e-6, atol=1e-7)

    def test_conditionally_mask_waits(self):
        tx = optax.conditionally_mask(_mars(), lambda step: step % 2 == 0)
        updates, params, state = _loop(tx)
        _, expected, plain_state = _loop(_mars(), GRADS[::2])
        trees.assert_close(params, expected, rtol=1e-6, atol=1e-7)
        trees.assert_close(state.inner_state, plain_state, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(updates[1]["w"], 0.0)

    @parameterized.named_parameters(
        ("from_the_third_step_on", lambda step: step >= 2, {3: 2, 4: 3}),
        # The one before is then that of the last step that was let through.
        ("every_other_step", lambda step: step % 2 == 0, {2: 0, 4: 2}),
    )
    def test_a_correction_on_some_steps_starts_from_the_last_that_it_saw(self, when, previous):
        """`previous` has, for a corrected step, the step whose gradient comes off."""
        link = mars_optax.correct_gradients(GAMMA, B1, first_step="no_correction")
        corrected, _, _ = _loop(optax.conditionally_transform(link, when))
        for t, c in enumerate(corrected):
            g = np.asarray(GRADS[t]["w"])
            before = np.asarray(GRADS[previous.get(t, t)]["w"])
            np.testing.assert_allclose(c["w"], g + K * (g - before), rtol=1e-5, atol=1e-6)

    def test_a_schedule_of_gamma_has_the_gradient_before(self):
        """The other way to begin late: the previous gradient is there from the first step on."""
        link = mars_optax.correct_gradients(lambda count: jnp.where(count < 2, 0.0, GAMMA), B1)
        corrected, _, _ = _loop(link)
        for t, c in enumerate(corrected):
            g, before = np.asarray(GRADS[t]["w"]), np.asarray(GRADS[max(t - 1, 0)]["w"])
            expected = g + (K if t >= 2 else 0.0) * (g - before)
            np.testing.assert_allclose(c["w"], expected, rtol=1e-5, atol=1e-6)


class FlattenTest(parameterized.TestCase):
    def _gradients(self):
        rng = np.random.default_rng(3)
        return [
            jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), TREE)
            for _ in range(4)
        ]

    def test_flattened_the_clip_is_of_all_leaves_together(self):
        tx = mars_optax.mars(RATE, B1, B2, gamma=GAMMA, optimize_1d=True, weight_decay_1d=0.0)
        by_parts = optax.chain(
            mars_optax.correct_gradients(GAMMA, B1),
            optax.clip_by_global_norm(1.0),
            optax.adam(RATE, B1, B2),
        )
        grads = self._gradients()
        _, actual, _ = _loop(optax.flatten(tx), grads, TREE)
        _, expected, _ = _loop(by_parts, grads, TREE)
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)

    def test_flattened_there_are_no_matrices_and_all_is_adamw(self):
        """What the page warns of: the rules for matrices see a vector."""
        tx = mars_optax.mars_m(RATE, b1_1d=B1, b2_1d=B2, weight_decay=0.1)
        adamw = optax.adamw(RATE, B1, B2, weight_decay=0.1)
        grads = self._gradients()
        _, actual, _ = _loop(optax.flatten(tx), grads, TREE)
        _, expected, _ = _loop(adamw, grads, TREE)
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        report = mars_optax.describe(TREE, optax.flatten(tx))
        self.assertEqual(report.counts, {"matrix": 0, "vector": 0, "frozen": 2})


class PrivacyTest(parameterized.TestCase):
    def test_private_gradients_are_corrected_after_the_noise(self):
        """So the correction is computed from what is public already."""
        make = functools.partial(
            contrib.differentially_private_aggregate, 0.5, 1.1, key=jax.random.key(0)
        )
        per_example = [{"w": np.stack([g["w"], -2 * g["w"], g["w"] ** 2])} for g in GRADS]
        _, actual, _ = _loop(optax.chain(make(), _mars()), per_example)
        aggregate = make()
        state, public = aggregate.init(START), []
        for gradients in per_example:
            noisy, state = _step(aggregate)(gradients, state)
            public.append(noisy)
        _, expected, _ = _loop(_mars(), public)
        trees.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


if __name__ == "__main__":
    absltest.main()
