"""Every estimator is the one formula, in every variant, and is computed in one place.

Covers the corrections of the optimizers, the directions and `correct_gradients` against float64
NumPy; SVRG and SARAH with anchors of their own; and what changes with the one function that
corrects.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax
from mars_optax._src.leaf import correction as leaf_correction
from tests.support import interpreter, trees

STEPS = 5
SHAPES = {"kernel": (4, 3), "wide": (3, 5), "bias": (3,)}
MATRICES = ("kernel", "wide")
GAMMA, B1 = 0.3, 0.8
CORRECTIONS = ("none", "approx", "exact", "storm", "svrg", "sarah")
ANCHORED = ("svrg", "sarah")
NS = {"ns_dtype": "float64", "ns_steps": 2}
VARIANTS = {"mars": {}, "mars_lion": {}, "mars_m": NS, "mars_shampoo": NS}


def _tree(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


BATCHES, ANCHORS = range(10, 10 + STEPS), {2: 20, 4: 21}  # seeds


def _grad(params, batch):
    """The gradient of a sum of sin(p) b: no two parameters have the same."""
    return jax.tree.map(lambda p, b: b * jnp.cos(p), params, batch)


def _batches(params):
    return [{name: tree[name] for name in params} for tree in map(_tree, BATCHES)]


def _anchors(params):
    return {t: {name: _tree(seed)[name] for name in params} for t, seed in ANCHORS.items()}


def _estimates(correction, path, *, anchors=None, alphas=None, factor=1):
    """The c of every step in NumPy, along a path of parameters; `factor` multiplies k."""
    anchors, history = anchors or {}, []
    alphas = np.ones(STEPS) if alphas is None else alphas
    for name in path[0]:
        c, snapshot, a, last, its = None, None, None, 0.0, []
        for t, batch in enumerate(_batches(path[0])):
            x, b = np.asarray(path[t][name]), np.asarray(batch[name])
            g = b * np.cos(x)
            stale = b * np.cos(np.asarray(path[t - 1][name])) if t else np.zeros_like(g)
            k = factor * GAMMA * B1 / (1 - B1)
            is_new = t == 0 or t in anchors
            fresh = np.asarray(anchors[t][name]) if t in anchors else g
            if correction == "none":
                c = g
            elif correction == "approx":
                c = g + k * (g - last)
            elif correction == "exact":
                c = g + k * (g - stale)
            elif correction == "storm":
                c = g if t == 0 else g + factor * (1 - GAMMA) * (c - stale)
            elif correction == "sarah":
                c = g + factor * (fresh - g) if is_new else g + factor * (c - stale)
            else:
                if is_new:
                    snapshot, a = x, fresh
                c = g - factor * alphas[t] * (b * np.cos(snapshot) - a)
            last = g
            its.append(c)
        history.append(np.stack(its))
    return dict(zip(path[0], history, strict=True))


def _momentum(estimates):
    """The moving average after the last step."""
    mu = np.zeros_like(estimates[0])
    for c in estimates:
        mu = B1 * mu + (1 - B1) * c
    return mu


def _train(tx, params, anchors=None):
    """Updates and parameters of all steps, and the last state; operation by operation."""
    state, path, updates = tx.init(params), [], []
    for t, batch in enumerate(_batches(params)):
        path.append(params)
        extra = {"anchor_grad": anchors[t]} if anchors and t in anchors else {}
        grads, grad_fn = _grad(params, batch), functools.partial(_grad, batch=batch)
        update, state = tx.update(grads, state, params, grad_fn=grad_fn, **extra)
        params = optax.apply_updates(params, update)
        updates.append(update)
    return jax.tree.map(lambda *x: jnp.stack(x), *updates), path, state


def _link(correction, **kwargs):
    return mars_optax.correct_gradients(GAMMA, B1, correction=correction, **kwargs)


def _optimizer(name, correction, **kwargs):
    settings = {"b1": B1, "gamma": GAMMA, "max_norm": None, "learning_rate_1d": 0.1}
    settings |= VARIANTS[name] | kwargs
    return getattr(mars_optax, name)(0.1, correction=correction, **settings)


def _close(actual, expected):
    trees.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


class EstimatorTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())


class FormulaTest(EstimatorTestCase):
    @parameterized.product(
        correction=ANCHORED, alpha=["number", "schedule"], has_anchors=[False, True]
    )
    def test_the_link_is_the_transcription(self, correction, alpha, has_anchors):
        alphas = {"number": np.full(STEPS, 0.6), "schedule": 1 / (1 + np.arange(STEPS))}[alpha]
        given = 0.6 if alpha == "number" else lambda count: jnp.asarray(alphas)[count]
        tx = optax.chain(_link(correction, alpha=given), optax.scale(-0.1))
        params = _tree(0)
        anchors = _anchors(params) if has_anchors else None
        updates, path, _ = _train(tx, params, anchors)
        expected = _estimates(correction, path, anchors=anchors, alphas=alphas)
        _close(jax.tree.map(lambda u: u / -0.1, updates), expected)

    @parameterized.product(correction=ANCHORED)
    def test_a_flag_that_is_traced_says_when_and_nothing_is_compiled_again(self, correction):
        tx = optax.chain(_link(correction, alpha=0.6), optax.scale(-0.1))
        params = _tree(0)
        anchors = _anchors(params)
        expected, _, expected_state = _train(tx, params, anchors)
        batches = jax.tree.map(lambda *x: jnp.stack(x), *_batches(params))
        # NaN where there is none: what is not taken does not show.
        absent = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
        given = [anchors.get(t, absent) for t in range(STEPS)]
        given = jax.tree.map(lambda *x: jnp.stack(x), *given)
        flags = jnp.asarray([t in anchors for t in range(STEPS)])

        def step(carry, inputs):
            params, state = carry
            batch, anchor, flag = inputs
            update, state = tx.update(
                _grad(params, batch),
                state,
                params,
                grad_fn=functools.partial(_grad, batch=batch),
                anchor_grad=anchor,
                refresh_anchor=flag,
            )
            return (optax.apply_updates(params, update), state), update

        start = params, tx.init(params)
        (_, state), updates = jax.jit(functools.partial(jax.lax.scan, step))(
            start, (batches, given, flags)
        )
        _close((updates, state), (expected, expected_state))
        traces, carry, history = [], start, []
        jitted = jax.jit(lambda *its: (traces.append(1), step(*its))[1])
        for t in range(STEPS):
            inputs = jax.tree.map(lambda x, t=t: x[t], (batches, given, flags))
            carry, update = jitted(carry, inputs)
            history.append(update)
        self.assertLen(traces, 1)
        _close(jax.tree.map(lambda *x: jnp.stack(x), *history), expected)

    @parameterized.parameters(*CORRECTIONS)
    def test_without_momentum_only_the_corrections_of_mars_are_off(self, correction):
        """What the description of `b1` says of 0."""
        tx = mars_optax.correct_gradients(GAMMA, 0.0, correction=correction)
        params, grads = _tree(0), _tree(1)
        _, state = tx.update(_tree(2), tx.init(params), params, grad_fn=lambda _: _tree(3))
        corrected, _ = tx.update(grads, state, params, grad_fn=lambda _: _tree(4))
        is_off = correction in ("none", "approx", "exact")
        self.assertEqual(bool(jnp.all(corrected["kernel"] == grads["kernel"])), is_off)

    @parameterized.parameters(*CORRECTIONS)
    def test_gamma_and_alpha_act_on_the_corrections_that_have_them(self, correction):
        """What the descriptions of both say."""

        def corrected(gamma=GAMMA, alpha=1.0):
            tx = mars_optax.correct_gradients(gamma, B1, correction=correction, alpha=alpha)
            params = _tree(0)
            _, state = tx.update(_tree(2), tx.init(params), params, grad_fn=lambda _: _tree(3))
            return tx.update(_tree(1), state, params, grad_fn=lambda _: _tree(4))[0]["kernel"]

        for changed, acts in (
            (corrected(gamma=7.0), correction in ("approx", "exact", "storm")),
            (corrected(alpha=7.0), correction == "svrg"),
        ):
            self.assertEqual(bool(jnp.any(changed != corrected())), acts)

    def test_where_the_snapshot_is_the_parameters_the_estimate_is_the_anchor(self):
        params, anchor = _tree(0), _tree(1)
        for correction in ANCHORED:
            tx = _link(correction)
            state = tx.init(params)
            for seed in (2, 3):
                c, state = tx.update(
                    _tree(seed), state, params, grad_fn=lambda _: _tree(4), anchor_grad=anchor
                )
                # g + (anchor - g), rounded.
                trees.assert_close(c, anchor, rtol=1e-14, atol=1e-14)
                trees.assert_equal(state.prev_params, params)

    def test_the_snapshot_stays_and_the_previous_parameters_move(self):
        params, later = _tree(0), _tree(1)
        for correction, expected in (("svrg", params), ("sarah", later)):
            tx = _link(correction)
            _, state = tx.update(_tree(2), tx.init(params), params, grad_fn=lambda p: p)
            _, state = tx.update(_tree(3), state, later, grad_fn=lambda p: p)
            trees.assert_equal(state.prev_params, expected)

    def test_svrg_converges_linearly_where_sgd_stalls(self):
        """A sum of eight quadratics, whose minimum is none of theirs."""
        rng, n = np.random.default_rng(0), 8
        curvature = jnp.asarray(rng.uniform(0.5, 2.0, size=(n, 6)))
        center = jnp.asarray(rng.normal(size=(n, 6)))
        minimum = jnp.sum(curvature * center, axis=0) / jnp.sum(curvature, axis=0)
        order = jnp.asarray(rng.integers(n, size=300))

        def distances(tx, period):
            def step(carry, inputs):
                x, state = carry
                i, t = inputs
                full = jnp.mean(curvature * (x - center), axis=0)
                update, state = tx.update(
                    curvature[i] * (x - center[i]),
                    state,
                    x,
                    grad_fn=lambda x: curvature[i] * (x - center[i]),
                    anchor_grad=full,
                    refresh_anchor=t % period == 0,
                )
                x = optax.apply_updates(x, update)
                return (x, state), jnp.linalg.norm(x - minimum)

            start = jnp.zeros(6), tx.init(jnp.zeros(6))
            return jax.jit(functools.partial(jax.lax.scan, step))(start, (order, jnp.arange(300)))[
                1
            ]

        svrg = distances(optax.chain(_link("svrg"), optax.sgd(0.1)), 16)
        sgd = distances(optax.chain(_link("none"), optax.sgd(0.1)), 16)
        for t in (50, 100, 150):
            self.assertLess(float(svrg[t + 50] / svrg[t]), 0.05)
        self.assertGreater(float(jnp.mean(sgd[200:])), 0.05)


class PlacesTest(EstimatorTestCase):
    @parameterized.product(name=list(VARIANTS), correction=CORRECTIONS)
    def test_the_link_in_front_is_the_rule_itself(self, name, correction):
        rule = getattr(mars_optax, f"scale_by_{name}")
        options = {"b1": B1, "max_norm": None, **VARIANTS[name]}
        whole = rule(gamma=GAMMA, correction=correction, **options)
        parts = optax.chain(_link(correction), rule(correction="none", **options))
        params = _tree(0, {k: SHAPES[k] for k in MATRICES})
        anchors = _anchors(params)
        scale = optax.scale(-0.1)
        actual, path, state = _train(optax.chain(whole, scale), params, anchors)
        expected, _, _ = _train(optax.chain(parts, scale), params, anchors)
        _close(actual, expected)
        estimates = _estimates(correction, path, anchors=anchors)
        _close(state[0].mu, {k: _momentum(estimates[k]) for k in MATRICES})

    @parameterized.product(name=list(VARIANTS), correction=["storm", *ANCHORED])
    def test_in_an_optimizer_vectors_on_adamw_are_not_corrected(self, name, correction):
        tx, params = _optimizer(name, correction, b1_1d=B1), _tree(0)
        anchors = _anchors(params)
        _, path, state = _train(tx, params, anchors)
        expected = _estimates(correction, path, anchors=anchors)
        expected["bias"] = _estimates("none", path)["bias"]
        _close(state.mu, {k: _momentum(expected[k]) for k in SHAPES})

    @parameterized.product(name=["mars", "mars_lion"], correction=["storm", *ANCHORED])
    def test_with_optimize_1d_they_are(self, name, correction):
        tx, params = _optimizer(name, correction, optimize_1d=True), _tree(0)
        anchors = _anchors(params)
        _, path, state = _train(tx, params, anchors)
        expected = _estimates(correction, path, anchors=anchors)
        _close(state.mu, {k: _momentum(expected[k]) for k in SHAPES})

    def test_storm_in_mars_is_storm_adamw(self):
        shared = {"gamma": GAMMA, "b1": B1, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.3}
        storm = mars_optax.storm_adamw(0.1, **shared)
        mars = mars_optax.mars(0.1, correction="storm", max_norm=None, optimize_1d=True, **shared)
        expected, actual = (_train(tx, _tree(0))[0] for tx in (storm, mars))
        _close(actual, expected)


def _twice(
    grad, prev_grad, coefficient, estimate=None, original=leaf_correction.corrected_gradient
):
    return original(grad, prev_grad, 2 * coefficient, estimate)


def _twice_the_coefficient(gamma, b1, original=leaf_correction.correction_coefficient):
    return 2 * original(gamma, b1)


PATCHES = {
    "corrected_gradient": _twice,
    "correction_coefficient": _twice_the_coefficient,
}


def _patched(function):
    return mock.patch.object(leaf_correction, function, PATCHES[function])


class OnePlaceTest(EstimatorTestCase):
    """With the correction doubled in its one place, it is doubled everywhere."""

    @parameterized.product(name=list(VARIANTS), correction=CORRECTIONS[1:], function=list(PATCHES))
    def test_in_every_variant(self, name, correction, function):
        if function == "correction_coefficient" and correction not in ("approx", "exact"):
            return  # The others have a k of their own.
        params = _tree(0)
        anchors = _anchors(params)
        with _patched(function):
            _, path, state = _train(_optimizer(name, correction, b1_1d=B1), params, anchors)
        expected = _estimates(correction, path, anchors=anchors, factor=2)
        _close({k: state.mu[k] for k in MATRICES}, {k: _momentum(expected[k]) for k in MATRICES})

    @parameterized.product(correction=CORRECTIONS[1:])
    def test_in_the_link(self, correction):
        params = _tree(0)
        anchors = _anchors(params)
        with _patched("corrected_gradient"):
            tx = optax.chain(_link(correction), optax.scale(-0.1))
            updates, path, _ = _train(tx, params, anchors)
        expected = _estimates(correction, path, anchors=anchors, factor=2)
        _close(jax.tree.map(lambda u: u / -0.1, updates), expected)

    @parameterized.product(function=list(PATCHES))
    def test_in_the_form_without_the_previous_gradient(self, function):
        with _patched(function):
            stored, free = (
                _train(_optimizer("mars_lion", "approx", keep_prev_grad=keep), _tree(0))
                for keep in (True, False)
            )
        _close(free[0], stored[0])
        doubled = GAMMA * 2
        n = jax.tree.map(
            lambda m, g: m - doubled * g,
            {k: stored[2].mu[k] for k in MATRICES},
            {k: stored[2].prev_grad[k] for k in MATRICES},
        )
        _close({k: free[2].mu[k] for k in MATRICES}, n)

    @parameterized.product(function=list(PATCHES))
    def test_in_what_is_measured(self, function):
        tx, params = _link("approx"), _tree(0)
        _, state = tx.update(_tree(1), tx.init(params))
        measure = functools.partial(mars_optax.diagnose, _tree(2), state, b1=B1)
        with _patched(function):
            actual = measure(gamma=GAMMA)
        trees.assert_close(actual, measure(gamma=2 * GAMMA), rtol=1e-6, atol=1e-6)
        plain = measure(gamma=GAMMA)
        self.assertGreater(float(actual["corrected_norm"] - plain["corrected_norm"]), 0.1)

    @parameterized.product(name=["mars", "mars_lion"], max_norm=[None, 1.0], function=list(PATCHES))
    @interpreter.always()
    def test_in_the_kernels(self, name, max_norm, function):
        rule = getattr(mars_optax, f"scale_by_{name}")
        params = {"kernel": jnp.ones((8, 128), jnp.float32)}
        grads = [optax.tree.cast(_tree(seed, {"kernel": (8, 128)}), "float32") for seed in (1, 2)]

        def momentum(implementation, gamma):
            tx = rule(b1=B1, gamma=gamma, max_norm=max_norm, implementation=implementation)
            state = tx.init(params)
            for g in grads:
                _, state = tx.update(g, state)
            return state.mu

        with _patched(function):
            actual = momentum("pallas", GAMMA)
        trees.assert_close(actual, momentum("xla", 2 * GAMMA), rtol=1e-5, atol=1e-5)
        difference = jnp.max(jnp.abs(actual["kernel"] - momentum("xla", GAMMA)["kernel"]))
        self.assertGreater(float(difference), 1e-3)


class BadInputTest(EstimatorTestCase):
    @parameterized.product(
        correction=[*ANCHORED, "exact", "storm"], name=["correct_gradients", "mars"]
    )
    def test_an_anchor_that_does_not_fit_changes_nothing(self, correction, name):
        tx = _link(correction) if name != "mars" else _optimizer("mars", correction)
        params = _tree(0)
        state = tx.init(params)
        before = trees.copy(state)
        short = {**_tree(1), "kernel": jnp.ones((4, 1))}
        codes = {**_tree(1), "kernel": _tree(1)["kernel"].astype("int32")}
        for extra, message in (
            ({"anchor_grad": short}, r"`anchor_grad`.*'kernel'.*got \(4, 1\)"),
            ({"anchor_grad": {"kernel": params["kernel"]}}, "`anchor_grad`.*no leaf 'bias'"),
            ({"anchor_grad": codes}, "`anchor_grad`: expected a real.*'kernel'.*got dtype int32"),
            ({"anchor_grad": optax.tree.cast(params, "complex64")}, "`anchor_grad`.*complex64"),
            ({"refresh_anchor": True}, "`anchor_grad`.*got None. Call .*anchor_grad="),
            ({"anchor_grad": params, "refresh_anchor": jnp.ones(3, bool)}, "`refresh_anchor`"),
            ({"anchor_grad": params, "refresh_anchor": 1}, "`refresh_anchor`.*got 1"),
        ):
            with self.assertRaisesRegex((TypeError, ValueError), message):
                tx.update(_tree(1), state, params, grad_fn=lambda p: p, **extra)
        with self.assertRaisesRegex(ValueError, "`grad_fn`"):
            tx.update(_tree(1), state, params)
        trees.assert_equal(state, before)
        tx.update(_tree(1), state, params, grad_fn=lambda p: p)

    @parameterized.parameters("approx", "exact", "storm", "none")
    def test_others_leave_the_anchor_alone(self, correction):
        tx, params = _link(correction), _tree(0)
        extra = {"anchor_grad": _tree(5), "refresh_anchor": True}
        actual, expected = (
            tx.update(_tree(1), tx.init(params), params, grad_fn=lambda p: p, **its)
            for its in (extra, {})
        )
        trees.assert_equal(actual, expected)


if __name__ == "__main__":
    absltest.main()
