"""The links in front of optimizers of Optax: MARS for whatever comes next."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests.parity.test_trajectories import QUICKLY
from tests.support import trees

SHAPES = {"kernel": (4, 6), "square": (3, 3), "bias": (6,), "scale": ()}
OPTIMIZERS = {
    "adafactor": functools.partial(optax.adafactor, 0.1, min_dim_size_to_factor=2, momentum=0.9),
    "lion": functools.partial(optax.lion, 0.1),
    "muon": functools.partial(optax.contrib.muon, 0.1),
    "schedule_free": functools.partial(optax.contrib.schedule_free_adamw, 0.1),
    "sgd": functools.partial(optax.sgd, 0.1, momentum=0.9, nesterov=True),
}

_jit = functools.partial(jax.jit, compiler_options=QUICKLY)


def _tree(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in SHAPES.items()}


def _behind_links(optimizer, gamma=0.2, max_norm=1.0, **kwargs):
    return optax.chain(
        mars_optax.correct_gradients(gamma, 0.9, **kwargs),
        mars_optax.clip_by_leaf_norm(max_norm),
        optimizer,
    )


def _quadratic(params, target):
    return jax.tree.map(lambda p, t: p - t, params, target)


def _run(tx, steps=3, grad=_quadratic):
    """Jitted steps towards targets that change: the parameters and the state."""
    params = _tree(0)

    @_jit
    def step(params, state, target):
        grads = grad(params, target)
        updates, state = tx.update(
            grads, state, params, grad_fn=functools.partial(grad, target=target)
        )
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for t in range(steps):
        params, state = step(params, state, _tree(t + 1))
    return params, state


@functools.cache
def _plain(name):
    return _run(optax.with_extra_args_support(OPTIMIZERS[name]()))


class AnyOptimizerTest(parameterized.TestCase):
    @parameterized.parameters(*OPTIMIZERS)
    def test_corrected_steps_are_finite_and_differ(self, name):
        plain, _ = _plain(name)
        corrected, state = _run(_behind_links(OPTIMIZERS[name]()))
        self.assertTrue(trees.all_finite((corrected, state)))
        self.assertGreater(float(jnp.max(jnp.abs(corrected["kernel"] - plain["kernel"]))), 1e-4)
        self.assertEqual(int(state[0].count), 3)

    @parameterized.parameters(*OPTIMIZERS)
    def test_without_correction_and_clip_it_is_the_plain_optimizer(self, name):
        actual, state = _run(_behind_links(OPTIMIZERS[name](), gamma=0.0, max_norm=None))
        expected, expected_state = _plain(name)
        # The compiler contracts products and sums where it likes; Muon's bfloat16 amplifies it.
        tolerance = 2e-2 if name == "muon" else 1e-6
        trees.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        trees.assert_same_types(state[2], expected_state)

    @parameterized.parameters(("muon", "exact"), ("lion", "storm"))
    def test_gradients_at_the_previous_parameters_serve_any_optimizer(self, name, correction):
        tx = _behind_links(OPTIMIZERS[name](), correction=correction)
        params, state = _run(tx)
        self.assertTrue(trees.all_finite((params, state)))
        self.assertIsNotNone(state[0].prev_params)

    def test_the_links_serve_an_optimizer_that_needs_more_arguments(self):
        """Sophia estimates the Hessian from the loss, which is handed on."""

        def loss(params):
            return sum(jnp.sum((p - 1) ** 2) for p in jax.tree.leaves(params))

        def fit(tx):
            @_jit
            def step(params, state):
                updates, state = tx.update(jax.grad(loss)(params), state, params, obj_fn=loss)
                return optax.apply_updates(params, updates), state

            params = _tree(0)
            state = tx.init(params)
            for _ in range(3):
                params, state = step(params, state)
            return params

        sophia = optax.contrib.sophia(0.1)
        corrected, plain = fit(_behind_links(sophia)), fit(sophia)
        self.assertTrue(trees.all_finite(corrected))
        trees.assert_close(
            fit(_behind_links(sophia, gamma=0.0, max_norm=None)), plain, rtol=1e-6, atol=1e-6
        )

    def test_the_links_and_a_momentum_that_takes_their_rate_are_mars(self):
        options = {"b1": 0.9, "b2": 0.99}
        expected, _ = _run(mars_optax.mars(0.1, gamma=0.2, optimize_1d=True, **options))
        actual, _ = _run(_behind_links(optax.adam(0.1, **options)))
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


class VarianceReducedTest(parameterized.TestCase):
    @parameterized.product(correction=["approx", "exact"], optimize_1d=[False, True])
    def test_with_adam_it_is_mars(self, correction, optimize_1d):
        options = {
            "gamma": 0.2,
            "weight_decay": 0.1,
            "mask": {"kernel": False, "square": True, "bias": True, "scale": False},
            "correction": correction,
            "optimize_1d": optimize_1d,
        }
        expected, its = _run(mars_optax.mars(0.1, 0.9, 0.99, **options))
        inner = optax.scale_by_adam(0.9, 0.99)
        actual, state = _run(mars_optax.variance_reduced(inner, 0.1, b1=0.9, **options))
        trees.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        for field in ("mu", "nu"):
            kept, wanted = getattr(state.inner_state, field), getattr(its, field)
            for name in SHAPES if optimize_1d else ("kernel", "square"):
                np.testing.assert_allclose(kept[name], wanted[name], rtol=1e-5, atol=1e-7)

    def test_a_state_may_have_keys_and_numbers_and_be_none(self):
        """Eagerly, too: a key has no `astype`, and neither has a number."""
        params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
        noise = mars_optax.variance_reduced(optax.add_noise(0.1, 0.5, jax.random.key(0)), 0.1)
        state = noise.init(params)
        eager, _ = noise.update(params, state, params)
        jitted, _ = jax.jit(noise.update)(params, state, params)
        trees.assert_close(jitted, eager, rtol=1e-6, atol=1e-6)

        def inner(zero: Any, one: Any) -> optax.GradientTransformation:
            return optax.GradientTransformation(lambda p: zero, lambda u, s, p=None: (u, one))

        for before, after in (({"n": jnp.zeros(())}, {"n": 1.0}), (None, None)):
            tx = mars_optax.variance_reduced(inner(before, after), 0.1)
            state = tx.init(params)
            _, new_state = tx.update(params, state, params)
            trees.assert_same_types(new_state, state)

    def test_a_preconditioner_gets_matrices_in_float32_parameters_and_extra_arguments(self):
        seen = []

        def update(updates, state, params=None, **extra_args):
            seen.append((updates, params, extra_args["value"]))
            return updates, jax.tree.map(lambda x: x.astype("float32") + 0.1, state)

        def init(params):
            return {"sums": jax.tree.map(lambda p: jnp.zeros(len(p), p.dtype), params)}

        inner = optax.GradientTransformationExtraArgs(init, update)
        tx = mars_optax.variance_reduced(inner, 0.5, gamma=0.0, max_norm=1.0, correction="none")
        params = optax.tree.cast({k: v for k, v in _tree(0).items() if k != "scale"}, "bfloat16")
        grads = jax.tree.map(lambda p: jnp.full_like(p, 3.0), params)
        state = tx.init(params)
        updates, new_state = tx.update(grads, state, params, value=7.0)
        ((direction, given, value),) = seen
        self.assertEqual(value, 7.0)
        for tree in (direction, given, state.inner_state["sums"]):
            self.assertIsInstance(tree["bias"], optax.MaskedNode)
        trees.assert_equal(given["kernel"], params["kernel"])
        self.assertEqual(direction["square"].dtype, jnp.float32)
        np.testing.assert_allclose(direction["square"], np.full((3, 3), 1 / 3), rtol=1e-6)
        np.testing.assert_allclose(
            np.asarray(updates["square"], "float32"), np.full((3, 3), -1 / 6), rtol=2**-8
        )
        # The state keeps the dtypes that it began with.
        trees.assert_same_types(new_state, state)
        self.assertGreater(float(new_state.inner_state["sums"]["kernel"][0]), 0.0)

    @parameterized.parameters("approx", "exact")
    def test_only_arguments_of_the_user_reach_the_preconditioner(self, correction):
        """Line searches refuse arguments that they do not know."""

        def loss(params: Any) -> jax.Array:
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))

        seen: list[Any] = []

        def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
            seen.append(set(extra_args))
            return updates, state

        inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
        tx = mars_optax.variance_reduced(inner, 0.1, correction=correction)
        params = _tree(0)
        given = {"value": loss(params), "grad_fn": jax.grad(loss)}
        tx.update(params, tx.init(params), params, **given)
        self.assertEqual(seen, [{"value", "grad_fn"}])
        if correction == "approx":
            inner = optax.chain(optax.scale_by_adam(), optax.scale_by_backtracking_linesearch(3))
            tx = mars_optax.variance_reduced(inner, 1.0, optimize_1d=True)
            given = {"value": loss(params), "value_fn": loss, "grad": jax.grad(loss)(params)}
            updates, _ = tx.update(given["grad"], tx.init(params), params, **given)
            self.assertLess(loss(optax.apply_updates(params, updates)), given["value"])

    @parameterized.parameters("bfloat16", "float16")
    def test_branches_in_a_preconditioner_agree_where_parameters_are_narrow(self, dtype):
        params = optax.tree.cast(_tree(0), dtype)
        plain, branched = (
            mars_optax.variance_reduced(wrap(optax.scale_by_adam()), 0.1)
            for wrap in (lambda inner: inner, lambda inner: optax.apply_if_finite(inner, 3))
        )
        state, other = plain.init(params), branched.init(params)
        for t in range(2):
            grads = optax.tree.cast(_tree(t), dtype)
            expected, state = plain.update(grads, state, params)
            actual, new = branched.update(grads, other, params)
            trees.assert_same_types(new, other)
            trees.assert_equal(actual, expected)
            other = new

    @parameterized.parameters(False, True)
    def test_gradients_of_other_shapes_are_refused_where_no_gradient_is_kept(self, optimize_1d):
        tx = mars_optax.variance_reduced(
            optax.scale_by_adam(), 0.1, correction="none", optimize_1d=optimize_1d
        )
        state = tx.init({"kernel": jnp.ones((1, 3))})
        with self.assertRaisesRegex(ValueError, "expected the 3 arrays .* of these gradients"):
            tx.update({"kernel": jnp.ones((4, 3))}, state)

    @parameterized.product(names=["b", "", "bk", "bknz"], dtype=["float32", "float16"])
    def test_gradients_of_another_tree_are_refused_where_no_gradient_is_kept(self, names, dtype):
        tx = mars_optax.variance_reduced(
            optax.scale_by_adam(), 0.1, correction="none", optimize_1d=True
        )
        state = tx.init({key: jnp.ones((4, 3), dtype) for key in "bkn"})
        number = 1 + 2 * len(names)
        message = f"^`state.inner_state`: expected the {number} arrays .* these gradients, got 7, "
        with self.assertRaisesRegex(ValueError, message):
            tx.update({key: jnp.ones((2, 3), dtype) for key in names}, state)

    def test_errors_of_a_preconditioner_stay_its_own(self):
        tx = mars_optax.variance_reduced(
            optax.scale_by_factored_rms(), 0.1, correction="none", optimize_1d=True
        )
        params = {"kernel": jnp.ones((1, 3))}
        with self.assertRaisesRegex(ValueError, "you are not passing `params`"):
            tx.update(params, tx.init(params))

    def test_numbers_as_parameters_leave_no_weak_types(self):
        params = {"a": 1.0}
        tx = mars_optax.variance_reduced(optax.scale_by_adam(), 0.1, optimize_1d=True)
        state = tx.init(params)
        self.assertFalse(any(x.weak_type for x in jax.tree.leaves(state)))
        trees.assert_same_types(tx.update(params, state, params)[1], state)

    def test_a_rule_as_preconditioner_hides_no_axes(self):
        numbers = {"stack": optax.contrib.MuonDimensionNumbers(1, 2)}
        tx = mars_optax.variance_reduced(
            mars_optax.scale_by_mars(), 0.1, weight_dimension_numbers=numbers
        )
        (leaf,) = mars_optax.describe({"stack": jnp.ones((2, 4, 3))}, tx).leaves
        self.assertEqual(leaf.axes, numbers["stack"])


if __name__ == "__main__":
    absltest.main()
