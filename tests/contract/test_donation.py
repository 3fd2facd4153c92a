"""Buffers: the state never holds an array of the caller, and everything can be donated."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized

from tests import registry
from tests.support import trees


def _pointers(tree: Any) -> set[int]:
    # Empty buffers may share one address.
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.size}


class DonationTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select())
    def test_a_fresh_state_shares_no_buffer_with_the_parameters(self, entry: registry.Entry):
        params = entry.params()
        state = entry.make().init(params)
        self.assertNoCommonElements(_pointers(state), _pointers(params))
        self.assertLen(_pointers(state), sum(leaf.size > 0 for leaf in jax.tree.leaves(state)))

    @parameterized.named_parameters(*registry.select(core=True))
    def test_an_eager_update_shares_no_buffer_with_its_arguments(self, entry: registry.Entry):
        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        updates, state = tx.update(grads, tx.init(params), params)
        self.assertNoCommonElements(_pointers(state), _pointers((grads, params)))
        self.assertNoCommonElements(_pointers(state), _pointers(updates))

    @parameterized.named_parameters(*registry.select())
    def test_a_jitted_update_shares_no_buffer_with_its_arguments(self, entry: registry.Entry):
        # jit returns an argument that passes through untouched as the very same buffer.
        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        update = trees.jitted_update(tx)
        updates, state = update(grads, tx.init(params), params)
        self.assertNoCommonElements(_pointers(state), _pointers((grads, params)))
        self.assertNoCommonElements(_pointers(state), _pointers(updates))

    @parameterized.named_parameters(*registry.select(core=True))
    def test_all_arguments_may_be_donated_after_an_eager_update(self, entry: registry.Entry):
        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        state = tx.init(params)
        expected = trees.run(tx, params, [grads, grads], apply=False)
        _, state = tx.update(grads, state, params)

        def step(params, grads, state):
            updates, state = tx.update(grads, state, params)
            return params, updates, state

        donating = jax.jit(step, donate_argnums=(0, 1, 2))
        arguments = (params, grads, state)
        _, updates, state = donating(*arguments)
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
            self.assertTrue(leaf.is_deleted(), trees.path_of(path))
        tolerance = entry.tolerance(1e-5)  # eager rounds otherwise
        trees.assert_close(updates, expected[0], rtol=tolerance, atol=tolerance)

    @parameterized.named_parameters(*registry.select(core=True))
    def test_a_gradient_outlives_the_donated_state_it_was_given_to(self, entry: registry.Entry):
        tx, params, grads = entry.shared(), entry.params(), entry.grads()
        update = jax.jit(tx.update, donate_argnums=1)
        state = tx.init(params)
        for _ in range(3):
            _, state = update(grads, state, params)
        self.assertTrue(trees.all_finite((grads, state)))

    def test_training_loop_with_donation(self):
        entry = registry.get("mars")
        tx = entry.make()

        def loss(params):
            return sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(params))

        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        step = jax.jit(step, donate_argnums=(0, 1))
        params = entry.params()
        state, losses = tx.init(params), []
        for _ in range(20):
            params, state, value = step(params, state)
            losses.append(float(value))
        self.assertLess(losses[-1], 0.5 * losses[0])


if __name__ == "__main__":
    absltest.main()
