"""Optax's wrappers: MultiSteps, masked, partition, chains, apply_if_finite, extra arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from tests import registry
from tests.support import trees


def _nan_like(grads):
    return jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), grads)


def _keeps_state(entry: registry.Entry) -> bool:
    return entry.core and entry.corrects()


def _keeps_leaves_apart(entry: registry.Entry) -> bool:
    # `correction_clip` bounds the norm of all leaves together.
    several = len(jax.tree.leaves(entry.params())) > 1
    return several and "correction_clip" not in entry.kwargs


class MultiStepsTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select(core=True, contracts=["rounding"]))
    def test_micro_batches_equal_the_big_batch(self, entry: registry.Entry):
        tx = entry.shared()
        micro = [[entry.grads(10 * step + i) for i in range(3)] for step in range(3)]
        big = [jax.tree.map(lambda *g: sum(g) / 3, *batch) for batch in micro]
        _, expected, _ = trees.run(tx, entry.params(), big)
        multi = optax.MultiSteps(tx, every_k_schedule=3)
        every = [grads for batch in micro for grads in batch]
        _, actual, state = trees.run(multi, entry.params(), every)
        # The running mean and the sum round differently; Newton-Schulz amplifies it.
        tolerance = entry.tolerance(1e-4)
        trees.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        for count in trees.fields(state.inner_opt_state, "count"):
            self.assertEqual(int(count), 3)

    @parameterized.named_parameters(*registry.select(where=_keeps_state))
    def test_the_previous_gradient_advances_only_on_emit(self, entry: registry.Entry):
        multi = optax.MultiSteps(entry.make(), every_k_schedule=3)
        params, update = entry.params(), jax.jit(multi.update)
        state, kept = multi.init(params), []
        for step in range(6):
            _, state = update(entry.grads(step), state, params)
            kept.append(trees.copy(trees.fields(state.inner_opt_state, "prev_grad")))
        trees.assert_equal(kept[0], optax.tree.zeros_like(kept[0]))
        trees.assert_equal(kept[1], kept[0])
        trees.assert_equal(kept[3], kept[2])
        trees.assert_equal(kept[4], kept[2])
        for a, b in zip(jax.tree.leaves(kept[2]), jax.tree.leaves(kept[5]), strict=True):
            self.assertFalse(np.array_equal(a, b))

    @parameterized.named_parameters(*registry.select())
    def test_half_precision_parameters_accumulate_float32_gradients(self, entry):
        if optax.__version__ == "0.2.6" and entry.kind != "optimizer":
            self.skipTest("MultiSteps of Optax 0.2.6 wants updates in the parameters' dtype")
        multi = optax.MultiSteps(entry.make(), every_k_schedule=3)
        params, grads = entry.params("bfloat16"), entry.grads(0, "float32")
        state = jax.eval_shape(multi.init, params)
        updates, new_state = jax.eval_shape(multi.update, grads, state, params)
        trees.assert_same_types(new_state, state)
        if entry.kind == "optimizer":
            trees.assert_same_types(updates, params)

    def test_half_precision_parameters_move_when_the_gradient_is_emitted(self):
        entry = registry.get("mars")
        multi = optax.MultiSteps(entry.make(), every_k_schedule=3)
        params = entry.params("bfloat16")
        grads = [entry.grads(step) for step in range(2)]
        _, still, _ = trees.run(multi, params, grads)
        trees.assert_equal(still, params)
        _, moved, _ = trees.run(multi, params, [*grads, entry.grads(2)])
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
            self.assertFalse(bool(jnp.array_equal(a, b)))


class SubsetTest(parameterized.TestCase):
    def _check_frozen(self, entry: registry.Entry, frozen: int):
        params = entry.params()
        flat, structure = jax.tree.flatten(params)
        grads = [entry.grads(step) for step in range(2)]
        full, _, _ = trees.run(entry.shared(), params, grads)
        mask = structure.unflatten([i != frozen for i in range(len(flat))])
        # A frozen leaf's gradient, here a huge one, must not reach any norm.
        loud = [
            jax.tree.map(lambda keep, g: g if keep else 1e6 * jnp.ones_like(g), mask, g)
            for g in grads
        ]
        actual, _, state = trees.run(optax.masked(entry.shared(), mask), params, loud)
        if flat[frozen].ndim:  # the counts are scalars, too
            self.assertNotIn(flat[frozen].shape, trees.shapes([state]))
        kept, expected = (
            jax.tree.map(lambda keep, u: u if keep else None, mask, tree) for tree in (actual, full)
        )
        trees.assert_close(kept, expected, rtol=1e-5, atol=1e-6)

    @parameterized.named_parameters(*registry.select(where=_keeps_leaves_apart))
    def test_frozen_leaves_have_no_state_and_change_no_other_leaf(self, entry: registry.Entry):
        self._check_frozen(entry, 0)

    # An average of the kernel's rows has the bias's shape, by which a frozen bias is looked for.
    @parameterized.named_parameters(
        *registry.select(
            where=lambda entry: _keeps_leaves_apart(entry) and not entry.name.endswith("_factored")
        )
    )
    @pytest.mark.slow
    def test_any_leaf_may_be_the_frozen_one(self, entry: registry.Entry):
        for frozen in range(1, len(jax.tree.leaves(entry.params()))):
            self._check_frozen(entry, frozen)

    @parameterized.named_parameters(*registry.select("optimizer", core=True))
    def test_partition_trains_some_leaves_and_freezes_the_rest(self, entry: registry.Entry):
        labels = {"embed": "frozen", "layer": "trained", "scale": "trained"}
        tx = optax.partition({"trained": entry.shared(), "frozen": optax.set_to_zero()}, labels)
        params, grads = entry.params(), [entry.grads(step) for step in range(2)]
        updates, new_params, state = trees.run(tx, params, grads)
        expected, _, _ = trees.run(entry.shared(), params, grads)
        trees.assert_equal(new_params["embed"], params["embed"])
        trees.assert_close(updates["layer"], expected["layer"], rtol=1e-6, atol=1e-7)
        self.assertNotIn((5, 4), [leaf.shape for leaf in jax.tree.leaves(state)])

    def test_two_optimizers_of_the_family_share_a_model(self):
        entry = registry.get("mars")
        tx = optax.partition(
            {"m": mars_optax.mars_m(0.1, ns_dtype="float32"), "lion": mars_optax.mars_lion(0.01)},
            {"embed": "lion", "layer": "m", "scale": "m"},
        )
        grads = [entry.grads(step) for step in range(2)]
        updates, _, _ = trees.run(tx, entry.params(), grads, apply=False)
        lion, _, _ = trees.run(mars_optax.mars_lion(0.01), entry.params(), grads, apply=False)
        trees.assert_close(updates["embed"], lion["embed"], rtol=1e-6, atol=1e-7)

    def test_decay_mask_is_the_one_of_adamw(self):
        params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
        grads = optax.tree.zeros_like(params)
        for mask in ({"a": True, "b": False}, lambda p: {"a": True, "b": False}):
            for factory in (mars_optax.mars, mars_optax.mars_lion, mars_optax.mars_m):
                tx = factory(0.1, weight_decay=0.5, mask=mask)
                updates, _ = tx.update(grads, tx.init(params), params)
                np.testing.assert_allclose(updates["a"], -0.05, rtol=1e-6)
                np.testing.assert_array_equal(updates["b"], 0.0)

    def test_decay_mask_reaches_the_vector_leaves_too(self):
        params = {"bias": jnp.ones(3), "kernel": jnp.ones((2, 2)), "scale": jnp.ones(3)}
        grads = optax.tree.zeros_like(params)
        tx = mars_optax.mars(
            0.1, weight_decay_1d=0.5, mask={"bias": False, "kernel": True, "scale": True}
        )
        updates, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_array_equal(updates["bias"], 0.0)
        np.testing.assert_allclose(updates["scale"], -0.05, rtol=1e-6)


class ChainTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select(core=True))
    def test_chains_hold_it_and_their_state_is_found_by_name(self, entry: registry.Entry):
        params, grads = entry.params(), [entry.grads(step) for step in range(2)]
        expected, _, _ = trees.run(
            entry.shared(), params, [optax.tree.scale(0.5, g) for g in grads], apply=False
        )
        chained = optax.chain(optax.scale(0.5), entry.shared())
        named = optax.named_chain(("half", optax.scale(0.5)), ("main", entry.shared()))
        for tx in (chained, named):
            actual, _, state = trees.run(tx, params, grads, apply=False)
            trees.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
            if entry.corrects():
                self.assertNotEmpty(trees.fields(state, "prev_grad"))
        self.assertEqual(set(state), {"half", "main"})

    @parameterized.named_parameters(*registry.select("direction", core=True))
    def test_optax_tree_get_finds_every_field(self, entry: registry.Entry):
        tx = optax.chain(optax.clip_by_global_norm(1e9), entry.shared(), optax.scale(-0.1))
        params, grads = entry.params(), entry.grads()
        _, _, state = trees.run(tx, params, [grads, grads], apply=False)
        trees.assert_equal(optax.tree.get(state, "prev_grad"), grads)
        # A preconditioner has a count of its own, and may have the momentum.
        counts, momenta = (
            [x for _, x in optax.tree.get_all_with_path(state, field) if x is not None]
            for field in ("count", "mu")
        )
        self.assertEqual({int(count) for count in counts}, {2})
        self.assertEqual([jax.tree.structure(x) for x in momenta], [jax.tree.structure(params)])

    @parameterized.named_parameters(*registry.select(core=True))
    def test_unknown_extra_arguments_are_ignored(self, entry: registry.Entry):
        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        state = tx.init(params)
        expected = trees.jitted_update(tx)(grads, state, params)
        actual = jax.jit(tx.update)(grads, state, params, value=jnp.asarray(1.0), anything={"a": 1})
        trees.assert_equal(actual, expected)

    @parameterized.named_parameters(*registry.select("direction", "link", core=True))
    def test_directions_do_not_need_the_parameters(self, entry: registry.Entry):
        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        state = tx.init(params)
        update = trees.jitted_update(tx)
        trees.assert_equal(update(grads, state), update(grads, state, params))

    @parameterized.named_parameters(*registry.select("direction", "link", core=True))
    def test_directions_point_uphill_as_those_of_optax(self, entry: registry.Entry):
        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        # The first step of SOAP has no direction.
        updates, _, _ = trees.run(tx, params, [grads, grads], apply=False)
        self.assertGreater(float(optax.tree.vdot(updates, grads)), 0.0)

    @parameterized.named_parameters(*registry.select("optimizer", core=True))
    def test_optimizers_go_downhill(self, entry: registry.Entry):
        tx, params, grads = entry.shared(), entry.params(), entry.grads(scale=10.0)
        updates, _, _ = trees.run(tx, optax.tree.zeros_like(params), [grads])
        self.assertLess(float(optax.tree.vdot(updates, grads)), 0.0)


class ApplyIfFiniteTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select(core=True))
    def test_a_step_of_nan_leaves_no_trace(self, entry: registry.Entry):
        tx = optax.apply_if_finite(entry.shared(), max_consecutive_errors=5)
        params = entry.params()
        first, second = entry.grads(0), entry.grads(1)
        with_nan = trees.run(tx, params, [first, _nan_like(first), second])
        without = trees.run(tx, params, [first, second])
        trees.assert_equal(with_nan[1], without[1])
        trees.assert_equal(with_nan[2].inner_state, without[2].inner_state)

    @parameterized.named_parameters(*registry.select(where=_keeps_state))
    def test_count_and_previous_gradient_wait_for_finite_gradients(self, entry):
        tx = optax.apply_if_finite(entry.shared(), max_consecutive_errors=5)
        params, grads = entry.params(), entry.grads()
        _, _, before = trees.run(tx, params, [grads], apply=False)
        _, after = jax.jit(tx.update)(_nan_like(grads), before, params)
        for field in ("count", "prev_grad", "mu"):
            trees.assert_equal(trees.fields(after, field), trees.fields(before, field))
        self.assertFalse(bool(after.last_finite))


if __name__ == "__main__":
    absltest.main()
