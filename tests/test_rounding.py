"""`stochastic_apply_updates`: right on average, and exact where nothing is to be rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

import mars_optax


class StochasticApplyUpdatesTest(parameterized.TestCase):
    @parameterized.parameters("bfloat16", "float16")
    def test_a_sum_goes_to_one_of_its_neighbours_with_odds_that_keep_the_mean(self, dtype: str):
        # A tenth, a third and four fifths of the way from 1 to the next number, and back from 2.
        step = float(jnp.finfo(dtype).eps)
        shares = np.array([0.1, 1 / 3, 0.8, -0.25], np.float32)
        start = np.array([1.0, 1.0, 1.0, 2.0], np.float32)
        params = jnp.asarray(np.tile(start, (20_000, 1)), dtype)
        updates = jnp.asarray(np.tile(shares * step, (20_000, 1)), jnp.float32)
        rounded = mars_optax.stochastic_apply_updates(params, updates, jax.random.key(0))
        self.assertEqual(rounded.dtype, jnp.dtype(dtype))
        steps = (np.asarray(rounded, np.float32) - start) / step
        self.assertContainsSubset(set(np.unique(steps[:, :3])), {0.0, 1.0})
        self.assertContainsSubset(set(np.unique(steps[:, 3])), {-1.0, -0.5, 0.0})
        # Four standard errors of a mean of 20,000 draws of 0 or 1.
        np.testing.assert_allclose(steps.mean(0), shares, atol=4 * 0.5 / np.sqrt(20_000))

    def test_what_needs_no_rounding_is_exact(self):
        params = {
            "single": jnp.ones(3),
            "complex": jnp.ones(3, jnp.complex64),
            "half": jnp.ones(3, jnp.bfloat16),
            "none": None,
            "empty": jnp.zeros((0, 2), jnp.bfloat16),
        }
        updates = jax.tree.map(lambda p: jnp.full(p.shape, 0.5, p.dtype), params)
        actual = jax.jit(mars_optax.stochastic_apply_updates)(params, updates, jax.random.key(1))
        expected = optax.apply_updates(params, updates)
        self.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            self.assertEqual(one.dtype, other.dtype)
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    def test_what_is_not_finite_stays_what_it_is(self):
        params = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 3e38], jnp.bfloat16)
        updates = jnp.array([1.0, 1.0, 1.0, 1e30], jnp.float32)
        rounded = mars_optax.stochastic_apply_updates(params, updates, jax.random.key(2))
        np.testing.assert_array_equal(
            np.asarray(rounded, np.float32),
            np.asarray([np.nan, np.inf, -np.inf, params[3]], np.float32),
        )

    def test_small_updates_add_up_where_rounding_to_nearest_loses_them(self):
        params = nearest = jnp.full(4_000, 1.0, jnp.bfloat16)
        updates = jnp.full(4_000, 5e-4, jnp.bfloat16)
        for step in range(200):
            key = jax.random.fold_in(jax.random.key(3), step)
            params = mars_optax.stochastic_apply_updates(params, updates, key)
            nearest = optax.apply_updates(nearest, updates)
        self.assertEqual(float(nearest.mean()), 1.0)
        self.assertAlmostEqual(float(jnp.mean(params.astype(jnp.float32))), 1.1, delta=2e-3)

    def test_derivatives_are_those_of_apply_updates(self):
        params = {"half": jnp.ones((3, 2), jnp.bfloat16), "single": jnp.ones(2)}
        updates = jax.tree.map(lambda p: jnp.full(p.shape, 0.003, jnp.float32), params)
        key = jax.random.key(5)

        def loss(apply):
            def of(params, updates):
                moved = jax.tree.leaves(apply(params, updates))
                return sum(jnp.sum(3.0 * x.astype(jnp.float32)) for x in moved)

            return jax.grad(of, argnums=(0, 1))(params, updates)

        actual = loss(lambda p, u: mars_optax.stochastic_apply_updates(p, u, key))
        jax.tree.map(np.testing.assert_array_equal, actual, loss(optax.apply_updates))
        run = jax.jit(lambda p, u: mars_optax.stochastic_apply_updates(p, u, key))
        _, tangents = jax.jvp(run, (params, updates), (params, updates))
        expected = jax.jvp(optax.apply_updates, (params, updates), (params, updates))[1]
        jax.tree.map(np.testing.assert_array_equal, tangents, expected)

    def test_leaves_draw_numbers_of_their_own(self):
        params = {"a": jnp.ones(200, jnp.bfloat16), "b": jnp.ones(200, jnp.bfloat16)}
        updates = jax.tree.map(lambda p: jnp.full(p.shape, 0.003, jnp.float32), params)
        rounded = mars_optax.stochastic_apply_updates(params, updates, jax.random.key(4))
        self.assertFalse(bool(jnp.all(rounded["a"] == rounded["b"])))


if __name__ == "__main__":
    absltest.main()
