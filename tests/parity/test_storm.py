"""STORM's estimator in front of AdamW: the recursion, its limits, and what it needs.

Covers `correct_gradients(correction="storm")` and `storm_adamw`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests.parity import test_trajectories as recorded
from tests.support import trees

STEPS = 6
SHAPES = {"kernel": (4, 3), "stack": (2, 4, 3), "bias": (3,), "scale": ()}
_jit = functools.partial(jax.jit, compiler_options=recorded.QUICKLY)


def _tree(seed, steps=None, dtype=None):
    """Normal numbers; with `steps`, along a leading axis."""
    rng = np.random.default_rng(seed)
    leading = () if steps is None else (steps,)
    return {
        name: jnp.asarray(rng.normal(size=leading + shape), dtype) for name, shape in SHAPES.items()
    }


def _at(tree, t):
    return jax.tree.map(lambda x: x[t], tree)


def _stacked(history):
    return jax.tree.map(lambda *x: jnp.stack(x), *history)


def _grad(params, batch):
    """The gradient of a sum of sin(p) b: no two parameters have the same."""
    return jax.tree.map(lambda p, b: b * jnp.cos(p), params, batch)


def _storm(gamma=0.3, **kwargs):
    return mars_optax.correct_gradients(gamma, correction="storm", **kwargs)


def _train(tx, params, batches, grad=_grad, *, passes_grad_fn=True):
    """The parameters after each step, the updates, and the last state.

    Operation by operation: nothing is contracted, and little is compiled.
    """
    state, history, updates = tx.init(params), [], []
    for t in range(STEPS):
        batch = _at(batches, t)
        extra = {"grad_fn": functools.partial(grad, batch=batch)} if passes_grad_fn else {}
        update, state = tx.update(grad(params, batch), state, params, **extra)
        params = optax.apply_updates(params, update)
        history.append(params)
        updates.append(update)
    return _stacked(history), _stacked(updates), state


class EstimatorTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())

    def _transcription(self, params, batches, gammas, clip=None):
        """STORM in NumPy along the path on which c is subtracted: c at every step."""
        params, previous, c, history = dict(params), None, None, []
        for t in range(STEPS):
            batch = _at(batches, t)
            g = jax.tree.map(np.asarray, _grad(params, batch))
            if previous is None:
                c = g
            else:
                stale = jax.tree.map(np.asarray, _grad(previous, batch))
                added = {k: (1 - gammas[t]) * (c[k] - stale[k]) for k in SHAPES}
                norm = np.sqrt(sum(np.sum(x**2) for x in added.values()))
                if clip is not None and norm > clip:
                    added = {k: x * (clip / norm) for k, x in added.items()}
                c = {k: g[k] + added[k] for k in SHAPES}
            previous, params = params, {k: params[k] - 0.1 * c[k] for k in SHAPES}
            history.append(c)
        return {k: np.stack([c[k] for c in history]) for k in SHAPES}

    @parameterized.product(
        gamma=["constant", "schedule", "negative"],
        clip=[None, 0.5],
    )
    def test_the_recursion_is_that_of_a_transcription(self, gamma, clip):
        gammas = {
            "constant": np.full(STEPS, 0.3),
            "schedule": 1.0 / (1.0 + np.arange(STEPS)),
            "negative": np.full(STEPS, -0.1),
        }[gamma]
        tx = optax.chain(
            _storm(lambda count: jnp.asarray(gammas)[count], correction_clip=clip),
            optax.scale(-0.1),
        )
        params, batches = _tree(0), _tree(1, STEPS)
        _, updates, state = _train(tx, params, batches)
        expected = self._transcription(params, batches, gammas, clip)
        trees.assert_close(
            jax.tree.map(lambda u: u / -0.1, updates), expected, rtol=1e-12, atol=1e-12
        )
        trees.assert_close(state[0].prev_corrected, _at(expected, -1), rtol=1e-12, atol=1e-12)

    @parameterized.parameters(0.0, 0.3, 1.0)
    def test_the_first_estimate_is_the_gradient_to_the_last_bit(self, gamma):
        tx, params, grads = _storm(gamma), _tree(0), _tree(1)
        corrected, state = tx.update(grads, tx.init(params), params, grad_fn=lambda p: p)
        trees.assert_equal(corrected, grads)
        trees.assert_equal(state.prev_corrected, grads)

    def test_without_noise_it_is_the_gradient(self):
        """The error decays by 1 - gamma, and begins with 0."""
        params, batch = _tree(0), _tree(1)
        batches = jax.tree.map(lambda x: jnp.broadcast_to(x, (STEPS, *x.shape)), batch)
        tx = optax.chain(_storm(0.1), optax.scale(-0.1))
        history, updates, _ = _train(tx, params, batches)
        for t in range(STEPS - 1):
            expected = _grad(_at(history, t), batch)
            actual = jax.tree.map(lambda u, t=t: u[t + 1] / -0.1, updates)
            trees.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

    def test_gamma_zero_adds_differences_only_and_gamma_one_is_the_gradient(self):
        params, batches = _tree(0), _tree(1, STEPS)
        _, updates, state = _train(optax.chain(_storm(1.0), optax.scale(-1.0)), params, batches)
        history, plain, _ = _train(optax.scale(-1.0), params, batches, passes_grad_fn=False)
        trees.assert_equal(updates, plain)
        tx = _storm(0.0)
        first, state = tx.update(_tree(2), tx.init(params), params, grad_fn=lambda p: p)
        second, _ = tx.update(_tree(3), state, _at(history, 0), grad_fn=lambda p: _tree(4))
        expected = jax.tree.map(lambda a, b, c: a + b - c, first, _tree(3), _tree(4))
        trees.assert_close(second, expected, rtol=1e-15, atol=1e-15)

    @parameterized.product(gamma=[0.0, 0.025, 0.5, 0.9], steps=[3])
    def test_with_the_stored_gradient_nothing_is_estimated(self, gamma, steps):
        """With g_{t-1} for the gradient at the previous parameters c_t = g_t for ever."""
        params = _tree(0)
        tx, plain = (
            mars_optax.storm_adamw(0.1, gamma, weight_decay=0.1),
            optax.adamw(0.1, 0.9, 0.99, weight_decay=0.1),
        )
        link = _storm(gamma)
        state, plain_state, link_state = tx.init(params), plain.init(params), link.init(params)
        stored = optax.tree.zeros_like(params)
        for t in range(steps):
            grads = _tree(10 + t)
            grad_fn = functools.partial(lambda _, g: g, g=stored)
            corrected, link_state = link.update(grads, link_state, params, grad_fn=grad_fn)
            trees.assert_equal(corrected, grads)
            updates, state = tx.update(grads, state, params, grad_fn=grad_fn)
            expected, plain_state = plain.update(grads, plain_state, params)
            trees.assert_close(updates, expected, rtol=1e-14, atol=1e-14)
            params, stored = optax.apply_updates(params, updates), grads

    @parameterized.parameters(0.1, 1.0, 100.0)
    def test_the_clip_bounds_the_norm_of_what_is_added_over_all_leaves(self, clip):
        params = _tree(0)
        bounded, free = _storm(0.2, correction_clip=clip), _storm(0.2)
        state = bounded.init(params)
        _, state = bounded.update(_tree(1), state, params, grad_fn=lambda p: p)
        grads, stale = _tree(2), _tree(3)
        added = {}
        for name, tx in (("bounded", bounded), ("free", free)):
            corrected, _ = tx.update(grads, state, params, grad_fn=lambda _: stale)
            added[name] = jax.tree.map(jnp.subtract, corrected, grads)
        norm, free_norm = optax.tree.norm(added["bounded"]), optax.tree.norm(added["free"])
        self.assertBetween(float(free_norm), 1.0, 100.0)  # so that both cases are met
        self.assertAlmostEqual(float(norm), min(clip, float(free_norm)), delta=1e-12)
        scaled = optax.tree.scale(norm / free_norm, added["free"])
        trees.assert_close(added["bounded"], scaled, rtol=1e-10, atol=1e-12)

    def test_the_clip_of_the_mars_corrections_is_the_same(self):
        params, grads = _tree(0), _tree(1)
        tx = mars_optax.correct_gradients(0.5, correction="exact", correction_clip=0.3)
        corrected, _ = tx.update(grads, tx.init(params), params, grad_fn=lambda p: p)
        added = jax.tree.map(jnp.subtract, corrected, grads)
        self.assertAlmostEqual(float(optax.tree.norm(added)), 0.3, delta=1e-12)

    @parameterized.parameters(0.3, 1e3)
    def test_the_clip_bounds_the_correction_of_an_adaptive_gamma(self, clip):
        grads, gamma = _tree(1), mars_optax.AdaptiveGamma(initial=0.5)
        free, bounded = (
            mars_optax.correct_gradients(gamma, correction_clip=x) for x in (None, clip)
        )
        (c, state), (bounded_c, bounded_state) = (
            tx.update(grads, tx.init(grads)) for tx in (free, bounded)
        )
        trees.assert_equal(bounded_state, state)
        added, its = (jax.tree.map(jnp.subtract, x, grads) for x in (c, bounded_c))
        norm = optax.tree.norm(added)
        self.assertBetween(float(norm), 1.0, 100.0)  # so that both cases are met
        scaled = optax.tree.scale(jnp.minimum(1.0, clip / norm), added)
        trees.assert_close(its, scaled, rtol=1e-10, atol=1e-12)

    @parameterized.parameters((1e30, 1.0), (1e200, 0.0))
    def test_an_outlier_leaves_no_more_behind_than_the_clip(self, scale, left):
        """As in the clip of a leaf, what has a norm that overflows becomes 0."""
        params, grads = _tree(0), _tree(1)
        tx = _storm(0.5, correction_clip=1.0)
        _, state = tx.update(
            optax.tree.scale(scale, grads), tx.init(params), params, grad_fn=lambda p: p
        )
        corrected, _ = tx.update(grads, state, params, grad_fn=lambda _: grads)
        added = jax.tree.map(jnp.subtract, corrected, grads)
        self.assertAlmostEqual(float(optax.tree.norm(added)), left, delta=1e-12)


class AdamWTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())

    @parameterized.product(
        nesterov=[False, True], learning_rate=["constant", "schedule"], masked=[False, True]
    )
    def test_gamma_one_is_adamw(self, nesterov, learning_rate, masked):
        options = {
            "learning_rate": 0.1
            if learning_rate == "constant"
            else lambda count: 0.1 / (1 + count),
            "b1": 0.8,
            "b2": 0.95,
            "eps": 1e-6,
            "weight_decay": 0.3,
            "mask": {name: name != "kernel" for name in SHAPES} if masked else None,
            "nesterov": nesterov,
        }
        storm, adamw = mars_optax.storm_adamw(gamma=1.0, **options), optax.adamw(**options)
        params, batches = _tree(0), _tree(1, STEPS)
        history, _, _ = _train(storm, params, batches)
        expected, _, _ = _train(adamw, params, batches, passes_grad_fn=False)
        trees.assert_close(history, expected, rtol=1e-14, atol=1e-14)

    def test_the_defaults_are_those_of_adamw_but_for_b2_and_gamma(self):
        params, batches = _tree(0), _tree(1, STEPS)
        storm = mars_optax.storm_adamw(0.1, gamma=1.0)
        expected, _, _ = _train(
            optax.adamw(0.1, b1=0.9, b2=0.99, eps=1e-8, weight_decay=1e-4),
            params,
            batches,
            passes_grad_fn=False,
        )
        history, _, _ = _train(storm, params, batches)
        trees.assert_close(history, expected, rtol=1e-14, atol=1e-14)
        defaults, _, _ = _train(mars_optax.storm_adamw(0.1), params, batches)
        chain, _, _ = _train(mars_optax.storm_adamw(0.1, 0.025), params, batches)
        trees.assert_equal(defaults, chain)

    @parameterized.parameters(False, True)
    def test_it_is_the_estimator_in_front_of_adamw(self, nesterov):
        options = {"weight_decay": 0.3, "nesterov": nesterov}
        storm = mars_optax.storm_adamw(0.1, 0.2, 0.8, 0.95, correction_clip=1.0, **options)
        chain = optax.chain(
            _storm(0.2, correction_clip=1.0), optax.adamw(0.1, 0.8, 0.95, **options)
        )
        params, batches = _tree(0), _tree(1, STEPS)
        actual, _, state = _train(storm, params, batches)
        expected, _, _ = _train(chain, params, batches)
        trees.assert_close(actual, expected, rtol=1e-13, atol=1e-14)
        self.assertEqual(
            trees.shapes(trees.fields(state, "prev_corrected")), trees.shapes([params])
        )


class StateTest(parameterized.TestCase):
    def _after(self, tx, params_dtype, grads_dtype):
        """The abstract state at the start and after a step, and the updates."""
        params, grads = _tree(0, dtype=params_dtype), _tree(1, dtype=grads_dtype)
        state = jax.eval_shape(tx.init, params)
        updates, new_state = jax.eval_shape(
            lambda state: tx.update(
                grads, state, params, grad_fn=lambda p: optax.tree.cast(p, grads_dtype)
            ),
            state,
        )
        return state, new_state, updates, params

    @parameterized.product(
        options=[{}, {"nesterov": True}, {"mu_dtype": "float32"}, {"correction_clip": 1.0}],
        params_dtype=["bfloat16", "float32"],
        grads_dtype=["bfloat16", "float32"],
    )
    def test_types_never_drift(self, options, params_dtype, grads_dtype):
        tx = mars_optax.storm_adamw(0.1, **options)
        state, new_state, updates, params = self._after(tx, params_dtype, grads_dtype)
        trees.assert_same_types(new_state, state)
        trees.assert_same_types(updates, params)
        self.assertEmpty(trees.weak_leaves((state, updates)))
        for field in ("mu", "prev_params", "prev_corrected"):
            dtype = options.get("mu_dtype", params_dtype) if field == "mu" else params_dtype
            for leaf in jax.tree.leaves(trees.fields(state, field)):
                self.assertEqual(leaf.dtype, dtype, field)

    @parameterized.parameters(None, "float32", "bfloat16")
    def test_the_link_keeps_its_types(self, dtype):
        tx = _storm(prev_grad_dtype=dtype)
        for params_dtype in ("bfloat16", "float32"):
            for grads_dtype in ("bfloat16", "float32"):
                state, new_state, updates, _ = self._after(tx, params_dtype, grads_dtype)
                trees.assert_same_types(new_state, state)
                self.assertEqual({x.dtype.name for x in updates.values()}, {grads_dtype})
                for leaf in state.prev_corrected.values():
                    self.assertEqual(leaf.dtype, dtype or params_dtype)

    def test_the_same_link_in_front_of_plain_adam_drifts(self):
        """Why `storm_adamw` has an Adam of its own; delete this once Optax's keeps its types."""
        tx = optax.chain(_storm(), optax.scale_by_adam())
        state, new_state, _, _ = self._after(tx, "bfloat16", "float32")
        trees.assert_same_types(new_state[0], state[0])
        self.assertNotEqual(trees.types(new_state[1]), trees.types(state[1]))

    def test_half_precision_runs_in_scan(self):
        params, batches = _tree(0, dtype="bfloat16"), _tree(1, STEPS)
        tx = mars_optax.storm_adamw(0.1, 0.2)

        def grad(params, batch):
            return _grad(optax.tree.cast(params, jnp.float32), batch)

        def step(carry, batch):
            params, state = carry
            updates, state = tx.update(
                grad(params, batch), state, params, grad_fn=lambda p: grad(p, batch)
            )
            params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), history = _jit(functools.partial(jax.lax.scan, step))(
            (params, tx.init(params)), batches
        )
        self.assertTrue(trees.all_finite((history, state)))
        for leaf, start in params.items():
            self.assertEqual(history[leaf].dtype, jnp.bfloat16)
            self.assertTrue(bool(jnp.any(history[leaf][-1] != start)))

    @parameterized.parameters(False, True)
    def test_a_step_that_is_not_finite_leaves_every_field_alone(self, nesterov):
        storm = mars_optax.storm_adamw(0.1, 0.2, nesterov=nesterov)
        tx = optax.apply_if_finite(storm, max_consecutive_errors=3)
        params = _tree(0)

        @_jit
        def step(params, state, batch):
            grad_fn = functools.partial(_grad, batch=batch)
            updates, state = tx.update(_grad(params, batch), state, params, grad_fn=grad_fn)
            return optax.apply_updates(params, updates), state

        params, state = step(params, tx.init(params), _tree(1))
        broken = {**_tree(2), "scale": jnp.asarray(jnp.nan)}
        same_params, same = step(params, state, broken)
        trees.assert_equal(same_params, params)
        trees.assert_equal(same.inner_state, state.inner_state)
        self.assertFalse(bool(same.last_finite))

    def test_parameters_gradients_and_state_can_all_be_donated(self):
        tx, params, grads = _storm(), _tree(0), _tree(1)
        _, state = tx.update(grads, tx.init(params), params, grad_fn=lambda p: p)

        def step(params, grads, state):
            updates, state = tx.update(grads, state, params, grad_fn=lambda p: p)
            return optax.apply_updates(params, updates), updates, state

        results = _jit(step, donate_argnums=(0, 1, 2))(params, grads, state)
        self.assertTrue(trees.all_finite(results))


class RefusalTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("storm_adamw", mars_optax.storm_adamw(0.1)), ("correct_gradients", _storm())
    )
    def test_update_says_how_to_pass_what_is_missing(self, tx):
        params = _tree(0)
        state = tx.init(params)
        for kwargs, wanted in (
            ({}, "grad_fn"),
            ({"grad_fn": None}, "grad_fn"),
            ({"params": None, "grad_fn": lambda p: p}, "params"),
            ({"grad_fn": lambda p: {"kernel": p["kernel"]}}, "grad_fn"),
            ({"grad_fn": lambda p: {**p, "bias": jnp.zeros(4)}}, "grad_fn"),
        ):
            with self.subTest(str(kwargs)), self.assertRaises(ValueError) as caught:
                tx.update(_tree(1), state, **{"params": params, **kwargs})
            self.assertIn(f"`{wanted}`", str(caught.exception))
        with self.assertRaisesRegex(ValueError, r"update\(grads, state, params, grad_fn=grad_fn\)"):
            tx.update(_tree(1), state, params)

    @parameterized.parameters("float8_e4m3fn", "float8_e5m2")
    def test_eight_bits_are_too_few_for_what_is_fed_back(self, dtype):
        with self.assertRaises(ValueError) as caught:
            _storm(prev_grad_dtype=dtype)
        self.assertIn("`prev_grad_dtype`", str(caught.exception))
        self.assertIn(dtype, str(caught.exception))


if __name__ == "__main__":
    absltest.main()
