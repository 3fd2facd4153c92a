"""Without the previous gradient (`keep_prev_grad=False`) the trajectory is the same.

Covers all optimizers and directions against their own stored form in float64, the recorded
trajectories of the published memory-free form of MARS-M and its buffer, the memory that is saved,
and what is refused.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from tests.parity import test_trajectories as recorded
from tests.support import goldens, trees

STEPS = 200
SHAPES = {"wide": (3, 5), "tall": (4, 2), "bias": (5,), "scale": ()}
NEEDED = {"max_norm": None, "keep_prev_grad": False}
GAMMAS = {
    "constant": 0.05,
    # It rises and falls, and takes every sign.
    "schedule": lambda count: 0.04 * jnp.cos(0.1 * count) + 0.02,
}


def _factories():
    """Every factory with the settings in which the form exists."""
    for name in ("mars", "mars_lion"):
        for optimize_1d in (False, True):
            yield name, {"optimize_1d": optimize_1d}
    yield "mars_shampoo", {}
    yield "mars_m", {}


def _arguments(name, kwargs):
    """What the two forms share."""
    if name.endswith("mars"):
        kwargs = {"second_moment": "gradient", **kwargs}
    if name.endswith(("_shampoo", "_m")):
        kwargs = {"ns_dtype": "float64", "ns_steps": 3, **kwargs}
    return kwargs


CASES = tuple(
    (name, gamma, first_step, kwargs)
    for (name, kwargs), (gamma, first_step) in itertools.product(
        _factories(), itertools.product(GAMMAS, ("zeros", "no_correction"))
    )
)
# Each factory in one setting, in turns constant from zeros and scheduled from the first gradient.
FAST = CASES[0::8] + CASES[7::8]


def _gradients():
    """A drifting mean and noise, the mean of each leaf of another size."""
    rng = np.random.default_rng(0)
    time = np.arange(STEPS)
    return {
        name: jnp.asarray(
            rng.normal(size=(STEPS, *shape))
            + 2.0 * np.cos(0.03 * time).reshape(STEPS, *(1,) * len(shape)) * rng.normal(size=shape)
        )
        for name, shape in SHAPES.items()
    }


def _params():
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def _only_matrices(tree):
    return {name: leaf for name, leaf in tree.items() if len(SHAPES[name]) == 2}


class TrajectoryTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(trees.float64())

    def assert_same_trajectory(self, stored, free, params, grads):
        def step(carry, grads):
            results = []
            for tx, (params, state) in zip((stored, free), carry, strict=True):
                updates, state = tx.update(grads, state, params)
                results.append((optax.apply_updates(params, updates), state))
            return results, [params for params, _ in results]

        start = [(params, tx.init(params)) for tx in (stored, free)]
        _, (expected, actual) = jax.jit(
            functools.partial(jax.lax.scan, step), compiler_options=recorded.QUICKLY
        )(start, grads)
        for leaf in params:
            goldens.assert_close(actual[leaf], expected[leaf], rtol=1e-12, atol=1e-12, what=leaf)
            self.assertGreater(np.max(np.abs(expected[leaf][-1] - params[leaf])), 0.01)

    def check(self, name, gamma, first_step, kwargs):
        factory = functools.partial(
            getattr(mars_optax, name),
            learning_rate=lambda count: 0.02 / (1.0 + 0.01 * count),
            gamma=GAMMAS[gamma],
            first_step=first_step,
            weight_decay=0.1,
            max_norm=None,
            **_arguments(name, kwargs),
        )
        self.assert_same_trajectory(
            factory(), factory(keep_prev_grad=False), _params(), _gradients()
        )

    @parameterized.parameters(*FAST)
    def test_it_is_that_of_the_stored_form(self, *case):
        self.check(*case)

    @parameterized.parameters(*(case for case in CASES if case not in FAST))
    @pytest.mark.slow
    def test_it_is_that_of_the_stored_form_in_every_setting(self, *case):
        self.check(*case)

    @parameterized.parameters(
        "scale_by_mars", "scale_by_mars_lion", "scale_by_mars_shampoo", "scale_by_mars_m"
    )
    def test_that_of_a_direction_is_so_too(self, name):
        stored, free = (
            optax.chain(
                getattr(mars_optax, name)(
                    gamma=GAMMAS["schedule"], b1=0.8, max_norm=None, **extra, **_arguments(name, {})
                ),
                optax.scale(-0.01),
            )
            for extra in ({}, {"keep_prev_grad": False})
        )
        only = _only_matrices if name.endswith(("_shampoo", "_m")) else dict
        self.assert_same_trajectory(stored, free, only(_params()), only(_gradients()))

    def test_a_correction_that_is_off_by_b1_stays_off(self):
        stored, free = (
            mars_optax.mars_lion(0.01, b1=0.0, gamma=0.3, max_norm=None, keep_prev_grad=keep)
            for keep in (True, False)
        )
        self.assert_same_trajectory(stored, free, _params(), _gradients())

    def test_amsgrad_and_injected_constants_change_nothing(self):
        factory = optax.inject_hyperparams(
            mars_optax.mars, static_args="gamma", hyperparam_dtype=jnp.float64
        )
        options = {
            "learning_rate": 0.01,
            "gamma": 0.1,
            "amsgrad": True,
            "optimize_1d": True,
            "max_norm": None,
            "second_moment": "gradient",
        }
        stored, free = (factory(keep_prev_grad=keep, **options) for keep in (True, False))
        self.assert_same_trajectory(stored, free, _params(), _gradients())

    def test_it_is_quasi_hyperbolic_momentum(self):
        """For a constant gamma: m = gamma g + (1 - gamma) EMA(g), `mu` being the second term."""
        b1, gamma = 0.9, 0.2
        tx = mars_optax.scale_by_mars_lion(b1, gamma, **NEEDED)
        params, grads = _params(), _gradients()
        state = tx.init(params)
        average = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for t in range(5):
            g = jax.tree.map(lambda x, t=t: x[t], grads)
            direction, state = tx.update(g, state)
            for leaf in SHAPES:
                average[leaf] = b1 * average[leaf] + (1 - b1) * np.asarray(g[leaf])
                np.testing.assert_allclose(
                    state.mu[leaf], (1 - gamma) * average[leaf], rtol=1e-12, atol=1e-14
                )
                momentum = gamma * np.asarray(g[leaf]) + (1 - gamma) * average[leaf]
                np.testing.assert_array_equal(direction[leaf], np.sign(momentum))


class RecordedTest(recorded.RecordedTestCase):
    """The published memory-free form of MARS-M, whose buffer is `mu` / b1."""

    @parameterized.parameters(
        *(name for name in goldens.names() if name.startswith("mars_m_efficient__"))
    )
    def test_recorded_trajectory_and_its_buffer_are_followed(self, name):
        golden = goldens.load(name)
        with recorded.precision_of(golden):
            history, state = recorded.follow(golden, keep_prev_grad=False)
            state = goldens.state_by_field(state)
            self.assertNotIn("prev_grad", state)
            # The form recorded there keeps B with m_t - gamma g_t = b1 B_t.
            state["mu"] |= {
                leaf: state["mu"][leaf] / golden.hyperparameters["momentum"]
                for leaf in golden.matrices
            }
            for leaf in golden.leaves:
                self.assert_params_follow(golden, leaf, history)
                self.assert_state_matches(golden, leaf, "mu", state)
            self.assertContainsSubset(golden.matrices, golden.state["mu"])


class MemoryTest(parameterized.TestCase):
    @parameterized.product(
        case=list(_factories())
        + [(f"scale_by_{name}", {}) for name in ("mars", "mars_lion", "mars_shampoo", "mars_m")],
        dtype=["float32", "bfloat16"],
    )
    def test_one_buffer_less_is_kept(self, case, dtype):
        name, kwargs = case
        factory = getattr(mars_optax, name)
        if not name.startswith("scale_by"):
            factory = functools.partial(factory, 0.1)
        kwargs = _arguments(name, kwargs)
        params = optax.tree.cast(_params(), dtype)
        if name.startswith(("scale_by_mars_shampoo", "scale_by_mars_m")) and name[-5:] != "_lion":
            params = _only_matrices(params)
        # Vectors with AdamW's rule have no previous gradient in either form.
        saved = params
        if not name.startswith("scale_by") and not kwargs.get("optimize_1d", False):
            saved = _only_matrices(params)
        stored, free = (
            jax.eval_shape(factory(max_norm=None, keep_prev_grad=keep, **kwargs).init, params)
            for keep in (True, False)
        )
        difference = trees.shapes([stored])
        for shape in trees.shapes([free]):
            difference.remove(shape)
        self.assertEqual(difference, trees.shapes([saved]))
        nbytes = [
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(s)) for s in (stored, free)
        ]
        self.assertEqual(nbytes[0] - nbytes[1], sum(x.nbytes for x in jax.tree.leaves(saved)))
        self.assertEmpty(trees.fields(free, "prev_grad"))
        self.assertEmpty(trees.fields(free, "prev_params"))

    def test_types_of_the_state_are_a_fixed_point(self):
        for name, kwargs in _factories():
            kwargs = _arguments(name, kwargs) | {
                "mu_dtype": "bfloat16",
                "gamma": GAMMAS["schedule"],
            }
            tx = getattr(mars_optax, name)(0.1, **NEEDED, **kwargs)
            for params_dtype, grads_dtype in itertools.product(("bfloat16", "float32"), repeat=2):
                params = optax.tree.cast(_params(), params_dtype)
                grads = optax.tree.cast(params, grads_dtype)
                state = jax.eval_shape(tx.init, params)
                updates, new_state = jax.eval_shape(tx.update, grads, state, params)
                trees.assert_same_types(new_state, state)
                trees.assert_same_types(updates, params)
                for leaf in jax.tree.leaves(trees.fields(new_state, "mu")):
                    self.assertEqual(leaf.dtype, jnp.bfloat16)


class RefusalTest(parameterized.TestCase):
    def assert_refused(self, name, argument, kwargs):
        factory = getattr(mars_optax, name)
        if not name.startswith("scale_by"):
            factory = functools.partial(factory, 0.1)
        factory(**NEEDED, **_arguments(name, {}))
        with self.assertRaises(ValueError) as caught:
            factory(**{**NEEDED, **_arguments(name, {}), **kwargs})
        self.assertIn("`keep_prev_grad`", str(caught.exception))
        self.assertIn(f"`{argument}`", str(caught.exception))

    @parameterized.product(
        name=[
            prefix + name
            for prefix in ("", "scale_by_")
            for name in ("mars", "mars_lion", "mars_shampoo", "mars_m")
        ],
        conflict=[
            {"max_norm": 1.0},
            {"correction": "exact"},
            {"correction": "none"},
            {"prev_grad_dtype": "bfloat16"},
            {"prev_grad_dtype": "float8_e4m3fn"},
        ],
    )
    def test_what_needs_the_previous_gradient_is_named(self, name, conflict):
        (argument,) = conflict
        self.assert_refused(name, argument, conflict)

    @parameterized.parameters("mars", "scale_by_mars")
    def test_a_second_moment_of_the_corrected_gradient_needs_it(self, name):
        self.assert_refused(name, "second_moment", {"second_moment": "corrected"})

    def test_vectors_of_shampoo_need_it_under_optimize_1d(self):
        self.assert_refused("mars_shampoo", "optimize_1d", {"optimize_1d": True})

    @parameterized.parameters("mars", "mars_lion", "mars_shampoo", "mars_m")
    def test_the_defaults_do_not_go_with_it(self, name):
        with self.assertRaises(ValueError) as caught:
            getattr(mars_optax, name)(0.1, keep_prev_grad=False)
        self.assertIn("`keep_prev_grad`", str(caught.exception))


if __name__ == "__main__":
    absltest.main()
