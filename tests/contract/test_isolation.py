"""What must not spread: NaN between leaves and slices; and what zero gradients do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from optax.contrib import MuonDimensionNumbers

import mars_optax
from tests import registry
from tests.support import trees


def _keeps_leaves_apart(entry: registry.Entry) -> bool:
    # `correction_clip` bounds the norm of all leaves together.
    several = len(jax.tree.leaves(entry.params())) > 1
    return several and "correction_clip" not in entry.kwargs


class ContainmentTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select(where=_keeps_leaves_apart))
    def test_nan_in_one_leaf_reaches_no_other_leaf(self, entry: registry.Entry):
        tx, params = entry.shared(), entry.params()
        update = trees.jitted_update(tx)
        grads = [entry.grads(step) for step in range(2)]

        def two_steps(grads):
            state = tx.init(params)
            for gradient in grads:
                updates, state = update(gradient, state, params)
            return updates

        clean = jax.tree.leaves(two_steps(grads))
        flat, structure = jax.tree.flatten(grads[0])
        for sick in range(len(flat)):
            first = structure.unflatten(
                [jnp.full_like(g, jnp.nan) if i == sick else g for i, g in enumerate(flat)]
            )
            for i, leaf in enumerate(jax.tree.leaves(two_steps([first, grads[1]]))):
                if i != sick:
                    np.testing.assert_array_equal(leaf, clean[i])

    @parameterized.product(
        name=[
            "mars_specs",
            "mars_shampoo_specs",
            "mars_m_specs",
            "scale_by_mars_shampoo_specs",
            "scale_by_mars_m_specs",
            "clip_by_leaf_norm_specs",
        ],
        value=[np.nan, np.inf],
    )
    def test_nan_in_one_slice_of_a_stack_reaches_no_other_slice(self, name, value):
        entry = registry.get(name)
        tx, params = entry.shared(), entry.params()
        update = trees.jitted_update(tx)

        def two_steps(first):
            _, state = update(first, tx.init(params), params)
            return update(entry.grads(1), state, params)[0]["kernel"]

        grads = entry.grads(0)
        clean = two_steps(grads)
        sick = {**grads, "kernel": grads["kernel"].at[1, 2, 3].set(value)}
        for healthy in (0, 2):
            np.testing.assert_array_equal(two_steps(sick)[healthy], clean[healthy])

    def test_a_leaf_with_a_nan_is_not_clipped(self):
        # Even under a bound below 1, the norm that stands in for one that is no number.
        tx = mars_optax.clip_by_leaf_norm(0.5)
        grads = {"w": jnp.asarray([jnp.nan, 0.3, 4.0])}
        clipped, _ = tx.update(grads, tx.init(grads))
        np.testing.assert_array_equal(clipped["w"], grads["w"])

    def test_an_undeclared_stack_is_clipped_as_one(self):
        grads = {"w": jnp.ones((2, 3, 4)) * jnp.asarray([1.0, 100.0])[:, None, None]}
        together = mars_optax.clip_by_leaf_norm(1.0)
        clipped, _ = together.update(grads, together.init(grads))
        np.testing.assert_allclose(jnp.linalg.norm(clipped["w"]), 1.0, rtol=1e-6)
        apart = mars_optax.clip_by_leaf_norm(
            1.0, weight_dimension_numbers=MuonDimensionNumbers(1, 2)
        )
        clipped, _ = apart.update(grads, apart.init(grads))
        np.testing.assert_allclose(
            jnp.linalg.norm(clipped["w"], axis=(1, 2)), [1.0, 1.0], rtol=1e-6
        )


class ZeroTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select(where=lambda e: not e.evaluates()))
    def test_zero_gradients_give_zero(self, entry: registry.Entry):
        decay = {name: 0.0 for name in ("weight_decay", "weight_decay_1d") if entry.accepts(name)}
        params, zeros = entry.params(), optax.tree.zeros_like(entry.params())
        updates, _, state = trees.run(entry.make(**decay), params, [zeros, zeros])
        trees.assert_equal(updates, zeros)
        for field in ("mu", "nu", "prev_grad"):
            for leaf in jax.tree.leaves(trees.fields(state, field)):
                self.assertFalse(bool(jnp.any(leaf)))

    @parameterized.named_parameters(*registry.select(core=True))
    def test_gradients_near_the_ends_of_float32_stay_finite(self, entry: registry.Entry):
        for scale in (1e-38, 1e-20, 1e15):
            grads = [entry.grads(step, scale=scale) for step in range(2)]
            updates, _, state = trees.run(entry.shared(), entry.params(), grads)
            self.assertTrue(trees.all_finite((updates, state)), f"{scale=}")

    def test_a_zero_gradient_after_another_one_gives_the_negative_correction(self):
        tx = mars_optax.correct_gradients(gamma=0.2, b1=0.75)
        first, zero = {"w": jnp.asarray([[1.0, -2.0]])}, {"w": jnp.zeros((1, 2))}
        state = tx.init(first)
        _, state = tx.update(first, state)
        corrected, _ = tx.update(zero, state)
        np.testing.assert_allclose(corrected["w"], -0.6 * first["w"], rtol=1e-6)

    @parameterized.parameters("scale_by_mars", "scale_by_mars_lion", "scale_by_mars_m")
    def test_the_negative_correction_enters_the_momentum(self, name: str):
        entry = registry.get(name)
        tx, params = entry.make(gamma=0.2, b1=0.75, max_norm=None), entry.params()
        first, zero = entry.grads(), optax.tree.zeros_like(params)
        _, _, before = trees.run(tx, params, [first])
        _, _, after = trees.run(tx, params, [first, zero])
        expected = jax.tree.map(lambda m, g: 0.75 * m + 0.25 * -0.6 * g, before.mu, first)
        trees.assert_close(after.mu, expected, rtol=1e-5, atol=1e-6)

    def test_no_first_correction_leaves_the_first_gradient_as_it_is(self):
        for first_step, factor in (("zeros", 1.475), ("no_correction", 1.0)):
            tx = mars_optax.correct_gradients(first_step=first_step)
            g1, g2 = {"w": jnp.ones((2, 2))}, {"w": jnp.full((2, 2), 3.0)}
            c1, state = tx.update(g1, tx.init(g1))
            c2, _ = tx.update(g2, state)
            np.testing.assert_allclose(c1["w"], factor, rtol=1e-6)
            np.testing.assert_allclose(c2["w"], 3 + 0.475 * 2, rtol=1e-6)

    def test_clipping_stops_exactly_at_the_norm(self):
        tx = mars_optax.clip_by_leaf_norm(2.0)
        for norm, expected in ((0.0, 0.0), (1.9, 1.9), (2.0, 2.0), (7.0, 2.0)):
            grads = {"w": jnp.full((2, 2), norm / 2)}
            clipped, _ = tx.update(grads, tx.init(grads))
            np.testing.assert_allclose(jnp.linalg.norm(clipped["w"]), expected, rtol=1e-6)


if __name__ == "__main__":
    absltest.main()
