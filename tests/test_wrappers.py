"""`cautious` and `ignore_absent_gradients`, and the decay that is independent of the rate.

That cautious directions follow those of timm and pytorch_optimizer is tested in
`tests/parity/test_trajectories.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests.support import trees

SHAPES = {"kernel": (4, 3), "other": (4, 3), "bias": (3,), "scale": ()}


def _tree(seed, dtype="float32", **replaced):
    rng = np.random.default_rng(seed)
    tree = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    return {**tree, **replaced}


def _sparse(seed, *absent):
    """Gradients of which some leaves are zero everywhere."""
    tree = _tree(seed)
    return {k: jnp.zeros_like(x) if k in absent else x for k, x in tree.items()}


class CautiousTest(parameterized.TestCase):
    def _direction(self, rescale, direction, grads):
        tx = mars_optax.cautious(
            optax.stateless(lambda updates, params: direction), rescale=rescale
        )
        return tx.update(grads, tx.init(grads))[0]

    @parameterized.parameters("mean", "count", "none")
    def test_it_equals_numpy(self, rescale):
        direction, grads = _tree(1), _tree(2)
        actual = self._direction(rescale, direction, grads)
        for leaf in SHAPES:
            u, g = np.asarray(direction[leaf]), np.asarray(grads[leaf])
            mask = (u * g > 0).astype(np.float32)
            scale = {
                "mean": 1 / max(mask.mean(), 1e-3),
                "count": mask.size / (mask.sum() + 1),
                "none": 1.0,
            }[rescale]
            np.testing.assert_allclose(actual[leaf], u * mask * scale, rtol=1e-6, err_msg=leaf)

    @parameterized.parameters("mean", "count", "none")
    def test_where_nothing_agrees_nothing_moves_and_nothing_is_divided_by_zero(self, rescale):
        grads = _tree(1)
        for direction in (
            optax.tree.scale(-1.0, grads),
            optax.tree.zeros_like(grads),
        ):
            for leaf in self._direction(rescale, direction, grads).values():
                np.testing.assert_array_equal(leaf, 0.0)

    @parameterized.parameters(("mean", 1.0), ("none", 1.0), ("count", 12 / 13))
    def test_where_all_agrees_the_direction_is_kept(self, rescale, factor):
        grads = _tree(1)
        direction = optax.tree.scale(2.0, grads)
        actual = self._direction(rescale, direction, grads)
        np.testing.assert_allclose(actual["kernel"], factor * direction["kernel"], rtol=1e-6)

    def test_the_scale_has_a_floor_for_rare_agreement(self):
        """One entry of 10000 is not scaled by 10000, but by 1000."""
        direction = {"w": jnp.full((100, 100), -1.0).at[3, 4].set(1.0)}
        actual = self._direction("mean", direction, {"w": jnp.ones((100, 100))})
        np.testing.assert_allclose(actual["w"][3, 4], 1000.0, rtol=1e-6)
        self.assertEqual(int(jnp.sum(actual["w"] != 0)), 1)

    def test_leaves_are_scaled_on_their_own(self):
        grads = {"a": jnp.ones(4), "b": jnp.ones(4)}
        direction = {"a": jnp.asarray([1.0, -1.0, -1.0, -1.0]), "b": jnp.ones(4)}
        actual = self._direction("mean", direction, grads)
        np.testing.assert_allclose(actual["a"], [4.0, 0.0, 0.0, 0.0], rtol=1e-6)
        np.testing.assert_allclose(actual["b"], direction["b"], rtol=1e-6)

    @parameterized.parameters(("mean", 4.0), ("count", 2.0), ("none", 1.0))
    def test_what_is_zero_agrees_with_nothing(self, rescale, factor):
        direction = {"w": jnp.asarray([1.0, 1.0, 0.0, -1.0])}
        grads = {"w": jnp.asarray([1.0, 0.0, 1.0, 1.0])}
        actual = self._direction(rescale, direction, grads)
        np.testing.assert_array_equal(actual["w"], [factor, 0.0, 0.0, 0.0])

    def test_complex_numbers_agree_within_a_right_angle(self):
        grads = {"w": jnp.asarray([1.0 + 0.0j, 1.0, 1.0, 1.0j])}
        direction = {"w": jnp.asarray([1.0 + 5.0j, -1.0 + 5.0j, 1.0 - 1.0j, 1.0 + 2.0j])}
        actual = self._direction("none", direction, grads)
        np.testing.assert_array_equal(actual["w"] != 0, [True, False, True, True])

    @parameterized.parameters("mean", "count", "none")
    def test_the_state_is_that_without_it(self, rescale):
        inner = mars_optax.scale_by_mars()
        tx = mars_optax.cautious(inner, rescale=rescale)
        state, plain = tx.init(_tree(0)), inner.init(_tree(0))
        for seed in range(3):
            direction, state = tx.update(_tree(seed), state)
            expected, plain = inner.update(_tree(seed), plain)
            trees.assert_equal(state, plain)
        agrees = expected["kernel"] * _tree(2)["kernel"] > 0
        self.assertTrue(0 < int(agrees.sum()) < agrees.size)
        np.testing.assert_array_equal(direction["kernel"] != 0, agrees)

    @parameterized.parameters("bfloat16", "float32")
    def test_dtypes_are_kept(self, dtype):
        params = {**_tree(0, dtype), "none": jnp.zeros((0, 3), dtype)}
        for rescale in ("mean", "count", "none"):
            tx = mars_optax.cautious(mars_optax.scale_by_mars(), rescale=rescale)
            state = jax.eval_shape(tx.init, params)
            direction, new_state = jax.eval_shape(tx.update, params, state)
            trees.assert_same_types(new_state, state)
            trees.assert_same_types(direction, params)
            self.assertEmpty(trees.weak_leaves(direction))

    def test_sign_and_mask_commute_for_lion(self):
        """Timm masks the momentum before the sign, whose scale it does not see."""
        b1, first, second = 0.9, _tree(1), _tree(2)
        tx = mars_optax.cautious(
            mars_optax.scale_by_mars_lion(b1, gamma=0.0, max_norm=None), rescale="none"
        )
        _, state = tx.update(first, tx.init(first))
        actual, state = tx.update(second, state)
        for leaf in SHAPES:
            momentum, g = np.asarray(state.mu[leaf]), np.asarray(second[leaf])
            expected = np.sign(momentum * (momentum * g > 0))
            np.testing.assert_array_equal(actual[leaf], expected, err_msg=leaf)

    def test_extra_arguments_reach_the_inner_transformation(self):
        tx = mars_optax.cautious(mars_optax.scale_by_mars(correction="exact"))
        params = _tree(0)
        direction, state = tx.update(_tree(1), tx.init(params), params, grad_fn=lambda p: p)
        self.assertTrue(trees.all_finite((direction, state)))
        with self.assertRaisesRegex(ValueError, "grad_fn"):
            tx.update(_tree(1), state, params)

    @parameterized.parameters("max", None, True)
    def test_another_rescale_is_refused(self, rescale):
        with self.assertRaises(ValueError) as caught:
            mars_optax.cautious(mars_optax.scale_by_mars(), rescale=rescale)
        for fragment in ("`rescale`", "mean", "count", "none", str(rescale)):
            self.assertIn(fragment, str(caught.exception))


class IgnoreAbsentGradientsTest(parameterized.TestCase):
    FACTORIES = (
        ("link", functools.partial(mars_optax.correct_gradients, 0.4)),
        ("mars", functools.partial(mars_optax.mars, 0.1, gamma=0.4, optimize_1d=True)),
        ("lion", functools.partial(mars_optax.mars_lion, 0.1, gamma=0.4, optimize_1d=True)),
        ("mars_m", functools.partial(mars_optax.mars_m, 0.1, gamma=0.4, ns_dtype="float32")),
    )

    def _run(self, tx, *grads):
        """All updates, and the last state, operation by operation, which compiles little."""
        params = _tree(0)
        state, history = tx.init(params), []
        for gradient in grads:
            updates, state = tx.update(gradient, state, params)
            history.append(updates)
        return history, state

    @parameterized.parameters(None, "bfloat16", "float8_e4m3fn", "float8_e5m2")
    def test_an_absent_leaf_is_corrected_by_nothing_and_remembers(self, dtype):
        tx = mars_optax.ignore_absent_gradients(
            mars_optax.correct_gradients(0.4, prev_grad_dtype=dtype)
        )
        _, before = self._run(tx, _tree(1))
        (_, corrected), after = self._run(tx, _tree(1), _sparse(2, "kernel", "scale"))
        for leaf in ("kernel", "scale"):
            np.testing.assert_array_equal(corrected[leaf], 0.0)
            for field in ("prev_grad", "prev_grad_scale"):
                old, new = getattr(before, field), getattr(after, field)
                if old is not None:
                    np.testing.assert_array_equal(old[leaf], new[leaf], err_msg=field)
        # What is there is corrected as ever, and remembered anew.
        (_, expected), plain = self._run(
            mars_optax.correct_gradients(0.4, prev_grad_dtype=dtype), _tree(1), _tree(2)
        )
        for leaf in ("other", "bias"):
            np.testing.assert_array_equal(corrected[leaf], expected[leaf])
            np.testing.assert_array_equal(after.prev_grad[leaf], plain.prev_grad[leaf])
        self.assertEqual(int(after.count), 2)

    @parameterized.parameters(None, "float8_e4m3fn")
    def test_the_leaf_that_returns_is_corrected_by_its_last_gradient(self, dtype):
        kwargs = {"gamma": 0.4, "prev_grad_dtype": dtype}
        tx = mars_optax.ignore_absent_gradients(mars_optax.correct_gradients(**kwargs))
        gone = _sparse(9, "kernel")
        history, _ = self._run(tx, _tree(1), gone, gone, _tree(2))
        (_, expected), _ = self._run(mars_optax.correct_gradients(**kwargs), _tree(1), _tree(2))
        np.testing.assert_allclose(history[-1]["kernel"], expected["kernel"], rtol=1e-6)

    def test_without_it_an_absent_leaf_is_stepped_back(self):
        k = 0.4 * 0.95 / 0.05
        tx = mars_optax.correct_gradients(0.4)
        (_, corrected), _ = self._run(tx, _tree(1), _sparse(2, "kernel"))
        np.testing.assert_allclose(corrected["kernel"], -k * _tree(1)["kernel"], rtol=1e-6)

    @parameterized.named_parameters(*FACTORIES)
    def test_where_no_gradient_is_absent_it_changes_nothing(self, factory):
        grads = [_tree(seed) for seed in range(1, 4)]
        # A single entry of zero is no absent gradient.
        grads[1]["kernel"] = grads[1]["kernel"].at[:-1].set(0.0)
        tx = factory()
        actual = self._run(mars_optax.ignore_absent_gradients(tx), *grads)
        trees.assert_close(actual, self._run(tx, *grads), rtol=1e-6, atol=1e-7)

    @parameterized.named_parameters(*FACTORIES)
    def test_other_leaves_do_not_notice(self, factory):
        tx = mars_optax.ignore_absent_gradients(factory())
        whole = [_tree(seed) for seed in range(1, 4)]
        broken = [whole[0], {**whole[1], "kernel": jnp.zeros((4, 3))}, whole[2]]
        (actual, _), (expected, _) = self._run(tx, *broken), self._run(tx, *whole)
        for ours, theirs in zip(actual, expected, strict=True):
            for leaf in ("other", "bias", "scale"):
                np.testing.assert_allclose(ours[leaf], theirs[leaf], rtol=1e-6, atol=1e-7)
        self.assertTrue(bool(jnp.any(actual[1]["kernel"] != expected[1]["kernel"])))

    @parameterized.named_parameters(*FACTORIES[1:3])
    def test_momentum_of_an_absent_leaf_decays_as_that_of_adamw(self, factory):
        tx = mars_optax.ignore_absent_gradients(factory())
        _, before = self._run(tx, _tree(1))
        _, after = self._run(tx, _tree(1), _sparse(2, "kernel"))
        (mu,), (old,) = trees.fields(after, "mu"), trees.fields(before, "mu")
        np.testing.assert_allclose(mu["kernel"], 0.95 * old["kernel"], rtol=1e-6)
        for nu, old_nu in zip(trees.fields(after, "nu"), trees.fields(before, "nu"), strict=True):
            np.testing.assert_allclose(nu["kernel"], 0.99 * old_nu["kernel"], rtol=1e-6)

    def test_an_adaptive_gamma_learns_nothing_from_a_leaf_that_is_absent(self):
        gamma = mars_optax.AdaptiveGamma(decay=0.5, low=-10.0, high=10.0)
        tx = mars_optax.ignore_absent_gradients(mars_optax.correct_gradients(gamma))
        _, before = self._run(tx, *map(_tree, (1, 2, 3)))
        (*_, corrected), after = self._run(tx, *map(_tree, (1, 2, 3)), _sparse(4, "kernel"))
        np.testing.assert_array_equal(corrected["kernel"], 0.0)
        old, new = gamma.gammas(before.gamma_state), gamma.gammas(after.gamma_state)
        np.testing.assert_array_equal(old["kernel"], new["kernel"])
        for leaf in ("other", "bias"):
            self.assertGreater(float(jnp.max(jnp.abs(old[leaf] - new[leaf]))), 1e-3)
        # The momentum that gamma belongs to decays, and so do its parts.
        for field in ("plain", "effect"):
            was, now = getattr(before.gamma_state, field), getattr(after.gamma_state, field)
            np.testing.assert_allclose(now["kernel"], 0.95 * was["kernel"], rtol=1e-6)

    @parameterized.parameters("zeros", "no_correction")
    def test_a_leaf_absent_from_the_start_is_as_one_that_begins_later(self, first_step):
        tx = mars_optax.ignore_absent_gradients(
            mars_optax.correct_gradients(0.4, first_step=first_step)
        )
        gone = _sparse(5, "kernel")
        (_, corrected), _ = self._run(tx, gone, _tree(1))
        np.testing.assert_allclose(
            corrected["kernel"], (1 + 0.4 * 19) * _tree(1)["kernel"], rtol=1e-5
        )

    def test_it_runs_in_scan(self):
        tx = mars_optax.ignore_absent_gradients(mars_optax.mars(0.1, gamma=0.4))
        grads = [_tree(1), _sparse(2, "kernel"), _tree(3), _sparse(4, "other", "bias")]
        expected, expected_state = self._run(tx, *grads)
        params = _tree(0)

        def step(state, grads):
            updates, state = tx.update(grads, state, params)
            return state, updates

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
        state, history = jax.jit(functools.partial(jax.lax.scan, step))(tx.init(params), stacked)
        trees.assert_close(state, expected_state, rtol=1e-6, atol=1e-7)
        for t, updates in enumerate(expected):
            actual = jax.tree.map(lambda x, t=t: x[t], history)
            trees.assert_close(actual, updates, rtol=1e-5, atol=1e-6)

    @parameterized.named_parameters(
        (
            "masked",
            lambda tx: optax.masked(tx, {name: name != "other" for name in SHAPES}),
        ),
        (
            "partition",
            lambda tx: optax.partition(
                {"a": tx, "b": optax.sgd(0.1)},
                {name: "b" if name == "other" else "a" for name in SHAPES},
            ),
        ),
        ("chain", lambda tx: optax.chain(optax.identity(), tx, optax.scale(1.0))),
        (
            "injected",
            lambda tx: optax.chain(
                tx, optax.inject_hyperparams(mars_optax.correct_gradients)(gamma=0.1)
            ),
        ),
    )
    def test_it_sees_through_wrappers_and_is_seen_through(self, wrap):
        inner = mars_optax.mars(0.1, gamma=0.4)
        grads = [_tree(1), _sparse(2, "kernel"), _tree(3)]
        outside = mars_optax.ignore_absent_gradients(wrap(inner))
        inside = wrap(mars_optax.ignore_absent_gradients(inner))
        (around, state), (within, _) = self._run(outside, *grads), self._run(inside, *grads)
        plain, _ = self._run(wrap(inner), *grads)
        self.assertEqual(jax.tree.structure(state), jax.tree.structure(wrap(inner).init(_tree(0))))
        if len(trees.fields(state, "prev_grad")) == 1:
            trees.assert_close(around, within, rtol=1e-6, atol=1e-7)
        difference = jnp.abs(around[1]["kernel"] - plain[1]["kernel"])
        self.assertGreater(float(jnp.max(difference)), 1e-3)

    def test_micro_batches_are_judged_by_their_average(self):
        tx = mars_optax.ignore_absent_gradients(mars_optax.correct_gradients(0.4))
        multi = optax.MultiSteps(tx, every_k_schedule=2).gradient_transformation()
        gone = _sparse(9, "kernel")
        history, state = self._run(multi, _tree(1), gone, gone, gone)
        np.testing.assert_array_equal(history[3]["kernel"], 0.0)
        (prev_grad,) = trees.fields(state.inner_opt_state, "prev_grad")
        np.testing.assert_allclose(prev_grad["kernel"], _tree(1)["kernel"] / 2, rtol=1e-6)

    @parameterized.named_parameters(
        ("adamw", optax.adamw(0.1)),
        ("memory_free", mars_optax.mars_lion(0.1, max_norm=None, keep_prev_grad=False)),
        ("no_correction", mars_optax.mars(0.1, correction="none")),
    )
    def test_without_a_previous_gradient_there_is_nothing_to_wrap(self, tx):
        with self.assertRaisesRegex(ValueError, "`inner`.*keeps a previous gradient"):
            mars_optax.ignore_absent_gradients(tx).init(_tree(0))

    @parameterized.parameters(None, "float8_e4m3fn")
    def test_types_are_a_fixed_point(self, dtype):
        tx = mars_optax.ignore_absent_gradients(mars_optax.mars(0.1, prev_grad_dtype=dtype))
        params, grads = _tree(0, "bfloat16"), _tree(1)
        state = jax.eval_shape(tx.init, params)
        updates, new_state = jax.eval_shape(tx.update, grads, state, params)
        trees.assert_same_types(new_state, state)
        trees.assert_same_types(updates, params)

    def test_a_nan_is_no_absent_gradient(self):
        tx = mars_optax.ignore_absent_gradients(mars_optax.correct_gradients(0.4))
        bad = _sparse(2, "kernel")
        bad["kernel"] = bad["kernel"].at[0, 0].set(jnp.nan)
        (_, corrected), _ = self._run(tx, _tree(1), bad)
        self.assertTrue(bool(jnp.isnan(corrected["kernel"][0, 0])))


class IndependentDecayTest(parameterized.TestCase):
    @parameterized.product(
        factory=[mars_optax.mars, mars_optax.mars_lion], rate=["constant", "schedule"]
    )
    def test_decay_after_the_optimizer_does_not_depend_on_the_rate(self, factory, rate):
        """The recipe gives p (1 - wd) - lr u, whatever the schedule of lr."""
        decay = 0.01
        learning_rate = 0.1 if rate == "constant" else lambda count: 0.1 * count
        bare = factory(learning_rate, weight_decay=0.0, weight_decay_1d=0.0)
        recipe = optax.chain(bare, optax.add_decayed_weights(-decay))
        params, moved = _tree(0), _tree(0)
        state, bare_state = recipe.init(params), bare.init(params)
        for seed in range(1, 4):
            updates, state = recipe.update(_tree(seed), state, params)
            undecayed, bare_state = bare.update(_tree(seed), bare_state, params)
            moved = jax.tree.map(lambda p, u: p * (1 - decay) + u, params, undecayed)
            params = optax.apply_updates(params, updates)
            trees.assert_close(params, moved, rtol=1e-6, atol=1e-7)

    def test_decay_inside_depends_on_it(self):
        params, zeros = _tree(0), optax.tree.zeros_like(_tree(0))
        tx = mars_optax.mars(0.0, weight_decay=0.01)
        updates, _ = tx.update(zeros, tx.init(params), params)
        trees.assert_equal(optax.apply_updates(params, updates), params)
        recipe = optax.chain(
            mars_optax.mars(0.0, weight_decay=0.0, weight_decay_1d=0.0),
            optax.add_decayed_weights(-0.01),
        )
        updates, _ = recipe.update(zeros, recipe.init(params), params)
        decayed = optax.tree.scale(0.99, params)
        trees.assert_close(optax.apply_updates(params, updates), decayed, rtol=1e-6, atol=1e-7)


if __name__ == "__main__":
    absltest.main()
