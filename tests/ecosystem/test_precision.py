"""Mixed precision: computation in half precision, master weights, and scaled losses."""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from flax.training import dynamic_scale

import mars_optax
from tests.ecosystem import plain
from tests.support import trees


def _half(tree):
    return optax.tree.cast(tree, jnp.bfloat16)


def half_loss(params, batch):
    """The loss of parameters in any dtype, computed in bfloat16 and averaged in float32."""
    x, y = batch
    error = plain.apply(_half(params), _half(x)) - _half(y)
    return jnp.mean(jnp.square(error.astype(jnp.float32)))


class MasterState(NamedTuple):
    master: Any  # the parameters in float32
    inner: Any


def with_master_weights(tx):
    """Trains a copy of the parameters in float32, and gives the parameters its rounded value."""
    tx = optax.with_extra_args_support(tx)

    def wide(tree):
        return optax.tree.cast(tree, jnp.float32)

    def init(params):
        return MasterState(wide(params), tx.init(wide(params)))

    def update(grads, state, params, **extra_args):
        updates, inner = tx.update(wide(grads), state.inner, state.master, **extra_args)
        master = optax.apply_updates(state.master, updates)
        # Added to the parameters in float32, it gives the rounded copy.
        updates = jax.tree.map(
            lambda m, p: m.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32),
            master,
            params,
        )
        return updates, MasterState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)


class MasterWeightsTest(parameterized.TestCase):
    def test_the_wrapper_is_the_one_of_the_page(self):
        for part in (MasterState, with_master_weights):
            self.assertIn(inspect.getsource(part), plain.page())

    def test_half_parameters_with_a_master_are_wide_ones_computed_on_in_half(self):
        self._check("mars_m", "exact")

    @pytest.mark.slow
    def test_half_parameters_with_a_master_without_exact_mode(self):
        self._check("mars", "approx")

    def _check(self, name, correction):
        tx = plain.optimizer(name, correction=correction)
        start = optax.tree.cast(_half(plain.params()), jnp.float32)
        grad = jax.grad(half_loss)
        expected, expected_state = plain.train(tx, start, grad=grad)
        params, state = plain.train(with_master_weights(tx), _half(start), grad=grad)
        trees.assert_close(state.master, expected, **plain.CLOSE)
        trees.assert_equal(params, _half(state.master))
        trees.assert_same_types(state.inner, expected_state)

    def test_gradients_of_wide_parameters_are_wide(self):
        grads = jax.eval_shape(jax.grad(half_loss), plain.params(), plain.batch(0))
        trees.assert_same_types(grads, plain.params())


class LossScaleTest(parameterized.TestCase):
    SCALE = 2.0**10

    def _scaled_grad(self, params, batch):
        return jax.grad(lambda p: self.SCALE * plain.loss(p, batch))(params)

    def test_unscaled_before_the_update_a_scale_leaves_no_trace(self):
        self._check("mars", "approx")

    @pytest.mark.slow
    def test_unscaled_in_grad_fn_too_a_scale_leaves_no_trace(self):
        self._check("mars_m", "exact")

    def _check(self, name, correction):
        def unscaled(params, batch):
            return optax.tree.scale(1 / self.SCALE, self._scaled_grad(params, batch))

        actual, _ = plain.train(
            plain.optimizer(name, correction=correction), plain.params(), grad=unscaled
        )
        expected, _ = plain.trained(name, correction=correction)
        # A power of two is exact; the compiler contracts other products.
        trees.assert_close(actual, expected, **plain.CLOSE)

    def test_a_scale_left_in_changes_what_is_clipped(self):
        """What the page warns of: Adam alone would not notice."""
        link = mars_optax.clip_by_leaf_norm(1.0)
        small = {"w": np.full((2, 2), 0.1, np.float32)}
        update = plain.jit(lambda g: link.update(g, link.init(g))[0])
        trees.assert_equal(update(small), small)
        scaled = update(optax.tree.scale(self.SCALE, small))
        np.testing.assert_allclose(scaled["w"] / self.SCALE, 0.5 / self.SCALE, rtol=1e-6)

    @pytest.mark.slow
    def test_a_dynamic_scale_skips_what_overflows_and_nothing_else(self):
        """Flax's `DynamicScale` gives gradients without the scale; `apply_if_finite` skips."""
        tx = optax.apply_if_finite(plain.optimizer("mars"), max_consecutive_errors=100)
        # In float16 the first scales overflow.
        scale = dynamic_scale.DynamicScale(scale=2.0**18, backoff_factor=0.25)

        def loss(params, batch):
            error = plain.apply(params, batch[0]) - batch[1]
            return jnp.mean(jnp.square(error.astype(jnp.float16)).astype(jnp.float32))

        @plain.jit
        def step(params, state, scale, batch):
            scale, finite, _, grads = scale.value_and_grad(lambda p: loss(p, batch))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, scale, grads, finite

        params, seen = plain.params(), []
        state = tx.init(params)
        for t in range(plain.STEPS):
            params, state, scale, grads, finite = step(params, state, scale, plain.batch(t))
            seen.append((bool(finite), grads))
        finite = [g for ok, g in seen if ok]
        self.assertBetween(len(finite), 1, plain.STEPS - 1)

        by_hand = plain.optimizer("mars")
        _, expected, expected_state = trees.run(by_hand, plain.params(), finite)
        trees.assert_close(params, expected, **plain.CLOSE)
        trees.assert_close(state.inner_state, expected_state, **plain.CLOSE)


if __name__ == "__main__":
    absltest.main()
