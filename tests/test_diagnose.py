"""`diagnose` measures the correction that the next update applies, on any nesting of states."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax import nnx

import mars_optax
from tests.support import trees

SHAPES = {"kernel": (4, 3), "stack": (2, 4, 3), "bias": (3,), "scale": ()}
MATRICES = ("kernel", "stack")  # what `mars` corrects by default
ALL = {"gradient_norm", "corrected_norm", "clip_fraction", "cosine", "correction_share"}


def _tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
        for name, shape in SHAPES.items()
    }


def _expected(grads, previous, leaves, *, gamma=0.025, b1=0.95, max_norm=1.0):
    """The measures in NumPy, over some leaves."""
    g, p = (
        [np.asarray(tree[leaf], np.float64).ravel() for leaf in leaves]
        for tree in (grads, previous)
    )
    k = gamma * b1 / (1 - b1)
    c = [x + k * (x - y) for x, y in zip(g, p, strict=True)]
    clip_fraction = np.mean([np.linalg.norm(x) > max_norm for x in c])
    g, p, c = (np.concatenate(x) for x in (g, p, c))
    norms = np.linalg.norm(g) * np.linalg.norm(p)
    return {
        "gradient_norm": np.linalg.norm(g),
        "corrected_norm": np.linalg.norm(c),
        "clip_fraction": clip_fraction,
        "cosine": g @ p / norms if norms else 0.0,
        "correction_share": abs(k) * np.linalg.norm(g - p) / np.linalg.norm(c),
    }


def _after(tx, *grads, **kwargs):
    """The state after steps with these gradients; the parameters stay."""
    params = _tree(0)
    state = tx.init(params)
    for gradient in grads:
        _, state = tx.update(gradient, state, params, **kwargs)
    return state


class DiagnoseTestCase(parameterized.TestCase):
    def assert_measures(self, actual, expected):
        self.assertEqual(set(actual), set(expected))
        for name, value in expected.items():
            self.assertEqual((actual[name].dtype, actual[name].shape), (jnp.float32, ()), name)
            # Sums of float32 products.
            np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


class ValueTest(DiagnoseTestCase):
    @parameterized.parameters(
        (False, {}, True),
        (True, {"gamma": 0.4, "b1": 0.8}, False),
        (False, {"gamma": -0.1, "max_norm": 3.0}, False),
        (True, {"gamma": 0.0, "b1": 0.0}, True),
    )
    def test_it_equals_numpy(self, optimize_1d, settings, jit):
        tx = mars_optax.mars(0.1, optimize_1d=optimize_1d, **settings)
        first, second = _tree(1), _tree(2)
        state = _after(tx, first)
        diagnose = functools.partial(mars_optax.diagnose, **settings)
        actual = (jax.jit(diagnose) if jit else diagnose)(second, state)
        leaves = SHAPES if optimize_1d else MATRICES
        self.assert_measures(actual, _expected(second, first, leaves, **settings))

    def test_it_tells_what_the_update_then_does(self):
        """The momentum of an unclipped step shows the corrected gradient."""
        tx = mars_optax.scale_by_mars_lion(0.95, 0.3, max_norm=None)
        first, second = _tree(1), _tree(2)
        state = _after(tx, first)
        measures = mars_optax.diagnose(second, state, gamma=0.3, max_norm=None)
        _, later = tx.update(second, state)
        corrected = jax.tree.map(lambda new, old: (new - 0.95 * old) / 0.05, later.mu, state.mu)
        np.testing.assert_allclose(
            measures["corrected_norm"], optax.tree.norm(corrected), rtol=1e-4
        )

    @parameterized.parameters(0.5, 1e3)
    def test_the_clip_of_the_correction_is_taken_into_account(self, clip):
        tx = mars_optax.correct_gradients(0.4, 0.9, correction_clip=clip)
        first, second = _tree(1), _tree(2)
        state, settings = _after(tx, first), {"gamma": 0.4, "b1": 0.9, "max_norm": None}
        actual = mars_optax.diagnose(second, state, correction_clip=clip, **settings)
        corrected, _ = tx.update(second, state)
        added = optax.tree.norm(jax.tree.map(jnp.subtract, corrected, second))
        norm = optax.tree.norm(corrected)
        np.testing.assert_allclose(actual["corrected_norm"], norm, rtol=1e-5)
        np.testing.assert_allclose(actual["correction_share"], added / norm, rtol=1e-5)
        free = mars_optax.diagnose(second, state, **settings)
        is_met = bool(free["corrected_norm"] != actual["corrected_norm"])
        self.assertEqual(is_met, clip == 0.5)

    def test_the_first_step_is_that_of_zeros(self):
        grads, state = _tree(1), _after(mars_optax.mars(0.1, optimize_1d=True))
        actual = mars_optax.diagnose(grads, state)
        expected = _expected(grads, optax.tree.zeros_like(grads), SHAPES)
        self.assert_measures(actual, expected)
        self.assertEqual(float(actual["cosine"]), 0.0)
        np.testing.assert_allclose(actual["correction_share"], 0.475 / 1.475, rtol=1e-6)

    def test_gradients_of_zeros_are_no_division(self):
        zeros = optax.tree.zeros_like(_tree(0))
        for state in (_after(mars_optax.mars(0.1)), _after(mars_optax.mars(0.1), zeros)):
            for value in mars_optax.diagnose(zeros, state).values():
                self.assertEqual(float(value), 0.0)
        # A gradient that vanished has a correction, and no angle.
        gone = mars_optax.diagnose(zeros, _after(mars_optax.mars(0.1), _tree(1)))
        self.assertEqual(float(gone["cosine"]), 0.0)
        np.testing.assert_allclose(gone["correction_share"], 1.0, rtol=1e-6)

    @parameterized.parameters((1.0, 1.0), (-1.0, -1.0))
    def test_the_cosine_of_parallel_gradients(self, sign, cosine):
        grads, state = _tree(1), _after(mars_optax.mars(0.1), _tree(1))
        actual = mars_optax.diagnose(optax.tree.scale(3 * sign, grads), state)
        np.testing.assert_allclose(actual["cosine"], cosine, rtol=1e-6)

    @parameterized.parameters((0.01, 0.0), (0.3, 0.5), (10.0, 1.0))
    def test_the_clip_fraction_counts_leaves_above_the_bound(self, kernel, fraction):
        """A stack of 24 entries of 0.02 stays below 1; the kernel's 12 entries cross it."""
        tx = mars_optax.mars(0.1)
        constant = {"kernel": kernel, "stack": 0.02 if kernel < 1 else kernel}
        grads = {k: jnp.full(shape, constant.get(k, 1.0)) for k, shape in SHAPES.items()}
        actual = mars_optax.diagnose(grads, _after(tx, grads))
        self.assertEqual(float(actual["clip_fraction"]), fraction)

    def test_a_scheduled_gamma_is_taken_at_the_count_of_the_state(self):
        def gamma(count):
            return 0.1 * (1.0 + count)

        tx = mars_optax.mars(0.1, gamma=gamma)
        first, second = _tree(1), _tree(2)
        state = _after(tx, _tree(3), _tree(4), first)
        actual = mars_optax.diagnose(second, state, gamma=gamma)
        self.assert_measures(actual, _expected(second, first, MATRICES, gamma=0.4))

    @parameterized.parameters("bfloat16", "float8_e4m3fn", "float8_e5m2")
    def test_what_is_stored_in_few_bits_is_read_by_its_scale(self, dtype):
        tx = mars_optax.mars(0.1, prev_grad_dtype=dtype)
        first, second = _tree(1, 1e-6), _tree(2, 1e-6)
        actual = mars_optax.diagnose(second, _after(tx, first))
        expected = _expected(second, first, MATRICES)
        for name, value in expected.items():
            # Half a unit in the last of three significant bits.
            np.testing.assert_allclose(actual[name], value, rtol=0.13, err_msg=name)

    def test_half_precision_is_summed_in_float32(self):
        """4096 squares of 1 would stop at 256 in bfloat16."""
        params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        state = mars_optax.mars(0.1).init(params)
        actual = mars_optax.diagnose(params, state)
        np.testing.assert_allclose(actual["gradient_norm"], 64.0, rtol=1e-6)
        self.assertEqual({x.dtype.name for x in actual.values()}, {"float32"})

    def test_complex_leaves_count_by_their_modulus(self):
        params = {"w": jnp.asarray([[3.0 + 4.0j, 0.0]])}
        tx = mars_optax.mars(0.1)
        _, state = tx.update(params, tx.init(params), params)
        actual = mars_optax.diagnose({"w": 1j * params["w"]}, state, gamma=0.0)
        np.testing.assert_allclose(actual["gradient_norm"], 5.0, rtol=1e-6)
        np.testing.assert_allclose(actual["cosine"], 0.0, atol=1e-6)

    def test_float64_gives_float32(self):
        with trees.float64():
            params = {"w": jnp.ones((2, 2))}
            measures = mars_optax.diagnose(params, mars_optax.mars(0.1).init(params))
            self.assertEqual({x.dtype.name for x in measures.values()}, {"float32"})


class LeftOutTest(DiagnoseTestCase):
    def test_without_a_bound_nothing_is_clipped(self):
        state = _after(mars_optax.mars(0.1, max_norm=None), _tree(1))
        actual = mars_optax.diagnose(_tree(2), state, max_norm=None)
        self.assertEqual(set(actual), ALL - {"clip_fraction"})

    @parameterized.named_parameters(
        ("exact", mars_optax.mars(0.1, correction="exact")),
        ("exact_link", mars_optax.correct_gradients(correction="exact")),
        ("storm", mars_optax.storm_adamw(0.1)),
        ("memory_free", mars_optax.mars_lion(0.1, max_norm=None, keep_prev_grad=False)),
        ("no_correction", mars_optax.mars(0.1, correction="none")),
        ("another_package", optax.adamw(0.1)),
        ("stateless", optax.sgd(0.1)),
    )
    def test_without_a_previous_gradient_only_the_norm_is_known(self, tx):
        extra = (
            {"grad_fn": lambda p: p}
            if isinstance(tx, optax.GradientTransformationExtraArgs)
            else {}
        )
        grads = _tree(2)
        actual = mars_optax.diagnose(grads, _after(tx, _tree(1), **extra))
        self.assertEqual(set(actual), {"gradient_norm"})
        np.testing.assert_allclose(actual["gradient_norm"], optax.tree.norm(grads), rtol=1e-6)

    @parameterized.parameters("mars_shampoo", "mars_m", "mars_lion")
    def test_vectors_with_the_rule_of_adamw_are_left_out(self, name):
        tx = getattr(mars_optax, name)(0.1)
        first, second = _tree(1), _tree(2)
        leaves = MATRICES if name == "mars_lion" else ("kernel",)
        actual = mars_optax.diagnose(second, _after(tx, first))
        self.assert_measures(actual, _expected(second, first, leaves))

    def test_wrong_arguments_are_refused_by_name(self):
        state = _after(mars_optax.mars(0.1))
        for kwargs in (
            {"b1": 1.0},
            {"max_norm": 0.0},
            {"gamma": "0.1"},
            {"correction_clip": 0.0},
        ):
            (argument,) = kwargs
            with self.assertRaises((ValueError, TypeError)) as caught:
                mars_optax.diagnose(_tree(1), state, **kwargs)
            self.assertIn(f"`{argument}`", str(caught.exception))


class NestingTest(DiagnoseTestCase):
    @parameterized.named_parameters(
        ("chain", lambda tx: optax.chain(optax.identity(), tx, optax.scale(1.0)), MATRICES),
        ("named_chain", lambda tx: optax.named_chain(("a", optax.identity()), ("b", tx)), MATRICES),
        ("apply_if_finite", lambda tx: optax.apply_if_finite(tx, 3), MATRICES),
        (
            "masked",
            lambda tx: optax.masked(tx, {name: name != "stack" for name in SHAPES}),
            ("kernel",),
        ),
        (
            "partition",
            lambda tx: optax.partition(
                {"a": tx, "b": optax.set_to_zero()},
                {name: "b" if name == "kernel" else "a" for name in SHAPES},
            ),
            ("stack",),
        ),
        (
            "two_of_the_family",
            lambda tx: optax.partition(
                {"a": tx, "b": mars_optax.mars_lion(0.1, optimize_1d=True)},
                {name: "a" if name in MATRICES else "b" for name in SHAPES},
            ),
            tuple(SHAPES),
        ),
        (
            "ignore_absent_gradients",
            mars_optax.ignore_absent_gradients,
            MATRICES,
        ),
    )
    def test_the_state_is_found(self, wrap, leaves):
        tx = wrap(mars_optax.mars(0.1))
        first, second = _tree(1), _tree(2)
        actual = mars_optax.diagnose(second, _after(tx, first))
        self.assert_measures(actual, _expected(second, first, leaves))

    def test_it_is_found_in_multi_steps_between_two_emissions(self):
        """The previous gradient is that of the last emission, an average of micro-batches."""
        multi = optax.MultiSteps(mars_optax.mars(0.1), every_k_schedule=2)
        params, update = _tree(0), jax.jit(multi.update)
        state = multi.init(params)
        for seed in (1, 3, 4):
            _, state = update(_tree(seed), state, params)
        first = jax.tree.map(lambda x, y: (x + y) / 2, _tree(1), _tree(3))
        actual = mars_optax.diagnose(_tree(2), state)
        self.assert_measures(actual, _expected(_tree(2), first, MATRICES))

    def test_injected_hyperparameters_can_be_handed_over(self):
        tx = optax.inject_hyperparams(mars_optax.mars)(learning_rate=0.1, gamma=0.3, b1=0.9)
        first, second = _tree(1), _tree(2)
        state = _after(tx, first)
        chosen = {name: state.hyperparams[name] for name in ("gamma", "b1", "max_norm")}
        actual = jax.jit(mars_optax.diagnose)(second, state, **chosen)
        self.assert_measures(actual, _expected(second, first, MATRICES, gamma=0.3, b1=0.9))

    def test_it_runs_beside_the_step_in_scan_and_changes_nothing(self):
        tx, params = mars_optax.mars(0.1), _tree(0)
        grads = jax.tree.map(lambda *x: jnp.stack(x), *(_tree(seed) for seed in (1, 2, 3)))

        def run(measured):
            def step(carry, grads):
                params, state = carry
                measures = mars_optax.diagnose(grads, state) if measured else None
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), measures

            return jax.jit(lambda: jax.lax.scan(step, (params, tx.init(params)), grads))()

        plain, _ = run(False)
        carry, measures = run(True)
        trees.assert_close(carry, plain, rtol=1e-6, atol=1e-7)
        for t in (1, 2):
            actual = {name: values[t] for name, values in measures.items()}
            self.assert_measures(actual, _expected(_tree(t + 1), _tree(t), MATRICES))

    @parameterized.parameters(True, False)
    def test_the_state_of_an_nnx_optimizer_serves(self, jit):
        class Net(nnx.Module):
            def __init__(self):
                for name, value in _tree(0).items():
                    setattr(self, name, nnx.Param(value))

        def loss(model, weights):
            return sum(jnp.sum(getattr(model, name)[...] * weights[name]) for name in SHAPES)

        def step(model, optimizer, weights):
            grads = nnx.grad(loss)(model, weights)
            measures = mars_optax.diagnose(grads, optimizer.opt_state)
            optimizer.update(model, grads)
            return measures

        model = Net()
        optimizer = nnx.Optimizer(model, mars_optax.mars(0.1), wrt=nnx.Param)
        step = nnx.jit(step) if jit else step
        first, second = _tree(1), _tree(2)
        step(model, optimizer, first)
        actual = step(model, optimizer, second)
        self.assert_measures(actual, _expected(second, first, MATRICES))


class NamesOfStatesTest(absltest.TestCase):
    def test_parameters_may_have_a_field_named_as_the_state_has(self):
        class Params(NamedTuple):
            prev_grad: Any
            count: Any

        params = Params(jnp.ones((2, 2)), jnp.ones(2))
        tx = mars_optax.mars(0.1, optimize_1d=True)
        measures = mars_optax.diagnose(params, tx.init(params))
        np.testing.assert_allclose(measures["gradient_norm"], np.sqrt(6.0), rtol=1e-6)


if __name__ == "__main__":
    absltest.main()
