"""A gamma that follows from the gradients: its recursion, and the best one where that is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests.support import meshes, trees

STEPS = 10
B1 = 0.9
SHAPES = {"kernel": (4, 3), "stack": (2, 4, 3), "bias": (3,)}
# The axes of each matrix's norm.
NORMS = {"kernel": (0, 1), "stack": (1, 2), "bias": (0,)}
NUMBERS = {
    "kernel": MuonDimensionNumbers(0, 1),
    "stack": MuonDimensionNumbers(1, 2),
    "bias": None,
}
RULE = mars_optax.AdaptiveGamma(decay=0.8, initial=0.1, low=-0.2, high=0.4)
NS = {"ns_dtype": "float64", "ns_steps": 2}


def _sequence(seed, shapes=SHAPES, steps=STEPS):
    """Normal numbers, those of all leaves but the bias around a drift."""
    rng = np.random.default_rng(seed)
    time = np.arange(steps)
    return {
        name: rng.normal(size=(steps, *shape))
        + 0.6 * (name != "bias") * rng.normal(size=shape) * time.reshape(-1, *(1,) * len(shape))
        for name, shape in shapes.items()
    }


def _at(tree, t):
    return {name: jnp.asarray(leaf[t]) for name, leaf in tree.items()}


def _transcription(grads, others, axes, *, exact, rule=RULE, first_step="zeros"):
    """Gammas, corrected gradients and averages of one leaf; `others` is what exact mode gets."""
    inner = functools.partial(np.sum, axis=axes, keepdims=True)
    a = w = np.zeros_like(grads[0])
    cross = square = inner(a)
    gammas, estimates = [], []
    for t, g in enumerate(grads):
        if t == 0:
            previous = g if first_step == "no_correction" else np.zeros_like(g)
        else:
            previous = others[t] if exact else grads[t - 1]
        gamma = np.where(square > 0, cross / np.where(square > 0, square, 1), rule.initial)
        gamma = np.where(square > 0, np.clip(gamma, rule.low, rule.high), gamma)
        unseen = previous if exact else g
        cross = rule.decay * cross + (1 - rule.decay) * inner(w * (unseen - a))
        square = rule.decay * square + (1 - rule.decay) * inner(w * w)
        a = B1 * a + (1 - B1) * g
        w = B1 * (w + g - previous)
        gammas.append(gamma)
        estimates.append(g + gamma * B1 / (1 - B1) * (g - previous))
    return np.stack(gammas), np.stack(estimates), (cross, square, a, w)


def _momentum(estimates):
    mu = np.zeros_like(estimates[0])
    for c in estimates:
        mu = B1 * mu + (1 - B1) * c
    return mu


def _extra(others, t, exact):
    return {"grad_fn": lambda _: _at(others, t)} if exact else {}


class RecursionTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())

    @parameterized.product(correction=["approx", "exact"], first_step=["zeros", "no_correction"])
    def test_it_is_that_of_a_transcription(self, correction, first_step):
        exact = correction == "exact"
        grads, others = _sequence(0), _sequence(1)
        if exact:  # As of the same batches.
            others = {k: 0.5 * (grads[k] + others[k]) for k in SHAPES}
        tx = mars_optax.correct_gradients(
            RULE,
            B1,
            correction=correction,
            first_step=first_step,
            weight_dimension_numbers=NUMBERS,
        )
        state = tx.init(_at(grads, 0))
        expected = {
            k: _transcription(grads[k], others[k], NORMS[k], exact=exact, first_step=first_step)
            for k in SHAPES
        }
        met = np.concatenate([gammas.ravel() for gammas, _, _ in expected.values()])
        self.assertContainsSubset({RULE.low, RULE.high}, met)
        self.assertGreater(len(set(met)), 10)  # and many between the bounds
        for t in range(STEPS):
            c, state = tx.update(_at(grads, t), state, _at(grads, 0), **_extra(others, t, exact))
            trees.assert_close(c, {k: expected[k][1][t] for k in SHAPES}, rtol=1e-11, atol=1e-11)
        for k in SHAPES:
            actual = jax.tree.map(
                lambda tree, k=k: tree[k],
                state.gamma_state,
                is_leaf=lambda x: isinstance(x, dict),
            )
            trees.assert_close(tuple(actual), expected[k][2], rtol=1e-11, atol=1e-11)
            np.testing.assert_allclose(
                actual.effect + actual.plain,
                _transcription_at_one(grads[k], others[k], exact, first_step),
                rtol=1e-11,
            )

    @parameterized.parameters(("zeros", 2), ("no_correction", 3))
    def test_the_first_steps_have_the_initial_gamma(self, first_step, steps):
        tx = mars_optax.correct_gradients(RULE, B1, first_step=first_step)
        state = tx.init(jnp.zeros(3))
        for t in range(steps + 1):
            (gamma,) = RULE.gammas(state.gamma_state)
            self.assertEqual(float(gamma) == RULE.initial, t < steps)
            _, state = tx.update(jnp.arange(3.0) + t, state)

    @parameterized.product(
        name=["mars", "mars_lion", "mars_m", "mars_shampoo"], optimize_1d=[False, True]
    )
    def test_it_is_the_same_in_the_optimizers(self, name, optimize_1d):
        options = {"optimize_1d": optimize_1d} if name != "mars_m" else {}
        if name in ("mars_m", "mars_shampoo"):
            options |= NS
        tx = getattr(mars_optax, name)(
            0.1, b1=B1, gamma=RULE, max_norm=None, weight_dimension_numbers=NUMBERS, **options
        )
        grads = _sequence(0)
        params = _at(grads, 0)
        state = tx.init(params)
        for t in range(STEPS):
            updates, state = tx.update(_at(grads, t), state, params)
            params = optax.apply_updates(params, updates)
        (mu,) = trees.fields(state, "mu")
        (gamma_state,) = trees.fields(state, "gamma_state")
        for k in SHAPES:
            if k == "bias" and not options.get("optimize_1d"):
                self.assertIsInstance(gamma_state.plain[k], optax.MaskedNode)
                continue
            _, estimates, _ = _transcription(grads[k], None, NORMS[k], exact=False)
            np.testing.assert_allclose(mu[k], _momentum(estimates), rtol=1e-10, atol=1e-12)


def _transcription_at_one(grads, others, exact, first_step):
    """The momentum at gamma = 1, which is a + w."""
    rule = mars_optax.AdaptiveGamma(decay=0.5, initial=1.0, low=1.0, high=1.0)
    return _momentum(
        _transcription(grads, others, (0,), exact=exact, rule=rule, first_step=first_step)[1]
    )


def _drift(slope, noise, steps, size=(40, 40)):
    """Gradients that grow by `slope` a step, with noise of its own in every one."""
    rng = np.random.default_rng(0)
    return slope * np.arange(steps).reshape(-1, 1, 1) + noise * rng.normal(size=(steps, *size))


def _best_of_drift(slope, noise):
    """The best gamma of the momentum m_{t-1} for the true gradient of step t.

    With b for B1, the average lags by L = slope b / (1 - b), and one step more where it predicts.
    Its noise has the variance V = noise^2 (1 - b) / (1 + b) and the covariance noise^2 (1 - b) with
    the last gradient's. w_{t-1} = g_{t-1} - a_{t-1}, so that

        E w (g_t - a) = L (L + slope) + V - (1 - b) noise^2,
        E w^2 = L^2 + noise^2 + V - 2 (1 - b) noise^2.
    """
    lag, squared = slope * B1 / (1 - B1), noise**2
    variance = squared * (1 - B1) / (1 + B1)
    cross = lag * (lag + slope) + variance - (1 - B1) * squared
    return cross / (lag**2 + squared + variance - 2 * (1 - B1) * squared)


def _swinging_quadratic(rng, steps, noise, additive):
    """Gradients of (h + xi) x + zeta on a path x_t that swings.

    Returns:
      The gradients g_t, those of the same batches at x_{t-1}, and the true ones h x_t.
    """
    size = (20, 20)
    h, phase = rng.uniform(0.5, 1.5, size=size), rng.uniform(0, 2 * np.pi, size=size)
    x = np.cos(0.15 * np.arange(-1, steps).reshape(-1, 1, 1) + phase)
    xi = noise * rng.normal(size=(steps, *size))
    zeta = additive * rng.normal(size=(steps, *size))
    return (h + xi) * x[1:] + zeta, (h + xi) * x[:-1] + zeta, h * x[1:]


def _brute_force(grads, others, target, begin):
    """The gamma out of a grid whose momentum is closest to `target`, with one after it."""
    grid = np.linspace(-0.2, 1.2, 141).reshape(-1, 1, 1)
    mu, errors = np.zeros((141, *grads[0].shape)), np.zeros(141)
    for t in range(len(grads) - 1):
        c = grads[t] + grid * B1 / (1 - B1) * (grads[t] - others[t])
        mu = B1 * mu + (1 - B1) * c
        if t >= begin:
            errors += np.sum((mu - target[t]) ** 2, axis=(1, 2))
    return float(grid.ravel()[np.argmin(errors)])


def _gammas(rule, grads, others=None):
    """Gamma of every step for one matrix, by scan."""
    correction = "approx" if others is None else "exact"
    tx = mars_optax.correct_gradients(rule, B1, correction=correction)
    params = jnp.asarray(grads[0])

    def step(state, inputs):
        g, other = inputs
        gamma = rule.gammas(state.gamma_state)
        _, state = tx.update(g, state, params, grad_fn=lambda _: other)
        return state, gamma.reshape(())

    inputs = jnp.asarray(grads), jnp.asarray(grads if others is None else others)
    return jax.jit(functools.partial(jax.lax.scan, step))(tx.init(params), inputs)[1]


WIDE = mars_optax.AdaptiveGamma(decay=0.99, low=-0.5, high=1.5)


class OptimumTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())

    @parameterized.parameters((0.0, 1.0), (0.02, 1.0), (0.05, 1.0), (0.1, 1.0), (0.1, 0.01))
    def test_it_finds_that_of_a_drift_in_noise(self, slope, noise):
        best = _best_of_drift(slope, noise)
        actual = _gammas(WIDE, _drift(slope, noise, 600))[300:]
        # Averages over some hundred steps of 1,600 entries.
        np.testing.assert_allclose(jnp.mean(actual), best, atol=0.01)
        np.testing.assert_allclose(actual, best, atol=0.03)

    def test_the_closed_form(self):
        """As the documentation has it."""
        for slope, noise in ((0.0, 1.0), (0.05, 1.0), (0.1, 0.3)):
            d, s = (slope / (1 - B1)) ** 2, noise**2 / (1 + B1)
            expected = (d - (1 - B1) * s) / (B1 * (d + 2 * s))
            self.assertAlmostEqual(_best_of_drift(slope, noise), expected, places=12)
        self.assertAlmostEqual(_best_of_drift(0.0, 1.0), -(1 - B1) / (2 * B1), places=12)
        self.assertAlmostEqual(_best_of_drift(1.0, 0.0), 1 / B1, places=12)

    @parameterized.parameters((0.0, 0.3), (0.5, 1.0), (1.0, 1.0), (2.0, 2.0))
    def test_in_exact_mode_it_finds_the_best_fixed_one(self, noise, additive):
        """Which knows the true gradients."""
        rng = np.random.default_rng(1)
        grads, others, true = _swinging_quadratic(rng, 600, noise, additive)
        best = _brute_force(grads, others, true, 200)
        actual = _gammas(WIDE, grads, others)[200:]
        np.testing.assert_allclose(jnp.mean(actual), best, atol=0.03)

    @parameterized.parameters(0.3, 1.0)
    def test_in_approximate_mode_it_finds_the_best_fixed_one(self, additive):
        """For the true gradient of the step after."""
        rng = np.random.default_rng(2)
        grads, _, true = _swinging_quadratic(rng, 600, 0.0, additive)
        others = np.concatenate([np.zeros_like(grads[:1]), grads[:-1]])
        best = _brute_force(grads, others, true[1:], 200)
        actual = _gammas(WIDE, grads)[200:]
        np.testing.assert_allclose(jnp.mean(actual), best, atol=0.03)

    def test_pure_noise_goes_to_the_least_and_none_to_the_largest(self):
        rule = mars_optax.AdaptiveGamma()
        self.assertEqual(float(jnp.max(_gammas(rule, _drift(0.0, 1.0, 300))[100:])), rule.low)
        np.testing.assert_array_equal(_gammas(rule, _drift(0.1, 0.0, 300))[100:], rule.high)


class DiagnoseTest(parameterized.TestCase):
    def test_it_measures_what_the_step_does(self):
        grads = {k: x.astype(np.float32) for k, x in _sequence(0).items()}
        tx = mars_optax.correct_gradients(RULE, B1, weight_dimension_numbers=NUMBERS)
        state = tx.init(_at(grads, 0))
        for t in range(4):
            measures = mars_optax.diagnose(_at(grads, t), state, gamma=RULE, b1=B1)
            c, state = tx.update(_at(grads, t), state)
            gammas = [_transcription(grads[k], None, NORMS[k], exact=False)[0][t] for k in SHAPES]
            expected = np.concatenate([x.ravel() for x in gammas]).mean()
            np.testing.assert_allclose(measures["gamma"], expected, rtol=1e-4)
            np.testing.assert_allclose(measures["corrected_norm"], optax.tree.norm(c), rtol=1e-5)

    def test_the_state_of_another_gamma_is_an_error(self):
        tx, params = mars_optax.correct_gradients(0.1), {"kernel": jnp.ones((4, 3))}
        with self.assertRaisesRegex(ValueError, "`state.gamma_state`: expected a tree.*got None"):
            mars_optax.diagnose(params, tx.init(params), gamma=RULE)


class StateTest(parameterized.TestCase):
    @parameterized.product(dtype=["float32", "bfloat16"], correction=["approx", "exact"])
    def test_types_never_drift_and_bounds_hold(self, dtype, correction):
        tx = mars_optax.mars(
            0.1,
            gamma=RULE,
            correction=correction,
            optimize_1d=True,
            weight_dimension_numbers=NUMBERS,
        )
        grads, others = _sequence(0), _sequence(1)
        params = optax.tree.cast(_at(grads, 0), dtype)
        state = tx.init(params)
        self.assertEmpty(trees.weak_leaves(state))
        for t in range(3):
            extra = {"grad_fn": lambda _, t=t: optax.tree.cast(_at(others, t), dtype)}
            _, new = tx.update(optax.tree.cast(_at(grads, t), "float32"), state, params, **extra)
            trees.assert_same_types(new, state)
            state = new
        (its,) = trees.fields(state, "gamma_state")
        for k in SHAPES:
            gamma = np.asarray(RULE.gammas(its)[k])
            self.assertTrue(np.all((gamma >= RULE.low) & (gamma <= RULE.high)))
            self.assertEqual(gamma.shape, (2, 1, 1) if k == "stack" else (1,) * len(SHAPES[k]))
            self.assertEqual({x[k].dtype.name for x in its[2:]}, {dtype})

    def test_a_stack_under_vmap_is_the_declared_one(self):
        tx = mars_optax.correct_gradients(RULE, B1, weight_dimension_numbers=NUMBERS["stack"])
        alone = mars_optax.correct_gradients(RULE, B1)
        grads = _sequence(0)["stack"].astype(np.float32)
        state = tx.init(grads[0])
        mapped = jax.vmap(alone.init)(grads[0])
        for g in grads[:4]:
            expected, state = tx.update(g, state)
            actual, mapped = jax.vmap(alone.update)(g, mapped)
            trees.assert_close(actual, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(np.nan, np.inf, 1e30)
    def test_what_is_not_finite_does_not_spread(self, value):
        """Nor what has a norm that overflows: such a step does not count in the averages."""
        tx = mars_optax.correct_gradients(RULE, B1, weight_dimension_numbers=NUMBERS)
        grads = {k: x.astype(np.float32) for k, x in _sequence(0).items()}
        grads["stack"][2, 0, 0, 0] = value
        state = tx.init(_at(grads, 0))
        for t in range(6):
            c, state = tx.update(_at(grads, t), state)
            hit = np.zeros(SHAPES["stack"], bool)
            hit[0, 0, 0] = t in (2, 3)
            np.testing.assert_array_equal(jnp.abs(c["stack"]) < 1e20, ~hit)
            self.assertTrue(trees.all_finite(state.gamma_state[:2]))


LARGE = {"kernel": (8, 4), "stack": (2, 4, 8)}
SPECS = {"kernel": P("x", "y"), "stack": P(None, "y", "x")}


class MeshTest(parameterized.TestCase):
    def _run(self, name, correction, specs=None):
        numbers = {k: NUMBERS[k] for k in LARGE}
        options = {"ns_dtype": "float32", "ns_steps": 2} if name == "mars_m" else {}
        tx = getattr(mars_optax, name)(
            0.1,
            gamma=RULE,
            correction=correction,
            max_norm=None,
            weight_dimension_numbers=numbers,
            **options,
        )
        extra = {} if specs is None else {"param_specs": specs}

        def train(params, grads, others):
            state = tx.init(params)
            for t in range(3):
                g, other = ({k: x[t] for k, x in tree.items()} for tree in (grads, others))
                updates, state = tx.update(g, state, params, grad_fn=lambda _, o=other: o, **extra)
                params = optax.apply_updates(params, updates)
            return params

        return train

    def _inputs(self):
        grads, others = (
            {k: x.astype(np.float32) for k, x in _sequence(s, LARGE, 3).items()} for s in (0, 1)
        )
        return {k: x[0] for k, x in grads.items()}, grads, others

    @parameterized.product(
        name=["mars", "mars_m"], correction=["approx", "exact"], manual=[False, True]
    )
    def test_on_a_mesh_as_on_one_device(self, name, correction, manual):
        inputs = self._inputs()
        expected = jax.jit(self._run(name, correction))(*inputs)
        mesh = meshes.mesh(AxisType.Auto, (2, 4))
        over_time = {k: P(None, *spec) for k, spec in SPECS.items()}
        specs = (SPECS, over_time, over_time)
        if manual:
            train = jax.shard_map(
                self._run(name, correction, SPECS),
                mesh=mesh,
                in_specs=specs,
                out_specs=SPECS,
            )
        else:
            train = self._run(name, correction)
            shardings = jax.tree.map(
                lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
            )
            inputs = jax.device_put(inputs, shardings)
        with jax.set_mesh(mesh):
            actual = jax.jit(train)(*inputs)
        # Sums over devices are added in another order; Newton-Schulz amplifies it.
        tolerance = 1e-4 if name == "mars_m" else 1e-5
        trees.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class BadInputTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"decay": 1.0}, ValueError, r"`decay`: expected a decay rate in \[0, 1\), got 1.0"),
        ({"decay": "0.9"}, TypeError, "`decay`.*got '0.9'"),
        ({"initial": None}, TypeError, "`initial`.*got None"),
        ({"low": lambda count: 0.1}, TypeError, "`low`"),
        ({"high": True}, TypeError, "`high`.*got True"),
        ({"low": 0.5, "high": 0.1}, ValueError, "`low`: expected a number up to `high`=0.1"),
    )
    def test_an_attribute_out_of_its_range_is_an_error(self, options, kind, message):
        with self.assertRaisesRegex(kind, message):
            mars_optax.AdaptiveGamma(**options)

    @parameterized.parameters("none", "storm", "svrg", "sarah")
    def test_other_corrections_want_a_number(self, correction):
        for make in (mars_optax.correct_gradients, mars_optax.scale_by_mars):
            with self.assertRaisesRegex(ValueError, f"`gamma`.*'{correction}', got AdaptiveGamma"):
                make(gamma=RULE, correction=correction)

    def test_the_form_without_the_previous_gradient_wants_a_number(self):
        with self.assertRaisesRegex(ValueError, "`keep_prev_grad`: expected True with a `gamma`"):
            mars_optax.scale_by_mars_lion(gamma=RULE, max_norm=None, keep_prev_grad=False)

    def test_a_bad_gradient_changes_nothing(self):
        tx = mars_optax.correct_gradients(RULE, correction="exact")
        params = {"kernel": jnp.ones((4, 3))}
        _, state = tx.update(params, tx.init(params), params, grad_fn=lambda p: p)
        before = trees.copy(state)
        with self.assertRaisesRegex(ValueError, "`grad_fn`"):
            tx.update(params, state, params)
        with self.assertRaisesRegex(ValueError, "`updates`.*'kernel'|`grad_fn`"):
            tx.update({"kernel": jnp.ones((4, 1))}, state, params, grad_fn=lambda p: p)
        trees.assert_equal(state, before)


if __name__ == "__main__":
    absltest.main()
