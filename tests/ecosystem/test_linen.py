"""Flax Linen: a `TrainState` with batch statistics, and one that hands `grad_fn` on.

That `TrainState` takes every optimizer is tested in `tests/contract/test_flax.py`.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from absl.testing import absltest, parameterized
from flax import linen
from flax.training import train_state

import mars_optax
from tests.ecosystem import plain
from tests.support import trees


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        # A bias would have a gradient of zero, whose rounding Adam makes a step of.
        hidden = linen.Dense(5, use_bias=False, name="first")(x)
        hidden = linen.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(hidden)
        return linen.Dense(2, name="second")(jnp.tanh(hidden))


class TrainState(train_state.TrainState):
    """A training state with batch statistics, whose optimizer may get `grad_fn`."""

    batch_stats: Any = None

    def apply_gradients(self, *, grads, grad_fn=None, **changes):
        extra = {} if grad_fn is None else {"grad_fn": grad_fn}
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params, **extra)
        params = optax.apply_updates(self.params, updates)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **changes)


def _plain_loss(params, batch):
    """The same network by hand: the loss, and the statistics of the batch."""
    x, y = batch
    hidden = x @ params["first"]["kernel"]
    mean, var = hidden.mean(0), hidden.var(0)
    norm = params["norm"]
    hidden = (hidden - mean) / jnp.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]
    out = jnp.tanh(hidden) @ params["second"]["kernel"] + params["second"]["bias"]
    return jnp.mean(jnp.square(out - y)), {"mean": mean, "var": var}


def _batch_stats():
    return {"norm": {"mean": jnp.zeros(5), "var": jnp.ones(5)}}


def _params():
    norm = {"bias": jnp.zeros(5), "scale": jnp.ones(5)}
    params = plain.params()
    return {**params, "first": {"kernel": params["first"]["kernel"]}, "norm": norm}


def _by_hand(tx):
    """The plain loop: parameters, state, and running averages of the batches' statistics."""
    grad = jax.grad(_plain_loss, has_aux=True)

    def step(carry, batch):
        params, state, stats = carry
        grads, of_batch = grad(params, batch)
        updates, state = tx.update(grads, state, params, grad_fn=lambda p: grad(p, batch)[0])
        stats = jax.tree.map(lambda s, b: 0.9 * s + 0.1 * b, stats, {"norm": of_batch})
        return (optax.apply_updates(params, updates), state, stats), None

    carry = _params(), tx.init(_params()), _batch_stats()
    return plain.jit(lambda carry: jax.lax.scan(step, carry, plain.BATCHES)[0])(carry)


def _loss(state, stats, batch):
    """A function of the parameters: the loss, and the new statistics."""
    x, y = batch

    def loss(params):
        variables = {"params": params, "batch_stats": stats}
        out, changed = state.apply_fn(variables, x, True, mutable=["batch_stats"])
        return jnp.mean(jnp.square(out - y)), changed["batch_stats"]

    return jax.grad(loss, has_aux=True)


class LinenTest(parameterized.TestCase):
    def test_the_state_is_the_one_of_the_page(self):
        self.assertIn(inspect.getsource(TrainState), plain.page())

    def test_a_state_that_hands_grad_fn_on_is_the_plain_loop(self):
        tx = plain.optimizer("mars_m", correction="exact")
        state = TrainState.create(
            apply_fn=Net().apply, params=_params(), tx=tx, batch_stats=_batch_stats()
        )

        @plain.jit
        def step(state, batch):
            grad_fn = _loss(state, state.batch_stats, batch)
            grads, batch_stats = grad_fn(state.params)
            # The statistics of the second evaluation are dropped.
            return state.apply_gradients(
                grads=grads, grad_fn=lambda p: grad_fn(p)[0], batch_stats=batch_stats
            )

        for t in range(plain.STEPS):
            state = step(state, plain.batch(t))
        expected, expected_state, stats = _by_hand(tx)
        trees.assert_close(state.params, expected, **plain.CLOSE)
        trees.assert_same_types(state.opt_state, expected_state)
        trees.assert_close(state.batch_stats, stats, **plain.CLOSE)
        self.assertEqual(int(state.step), plain.STEPS)

    @pytest.mark.slow
    def test_flax_s_own_state_is_the_plain_loop(self):
        tx = plain.optimizer("mars")
        state = train_state.TrainState.create(apply_fn=Net().apply, params=_params(), tx=tx)
        stats = _batch_stats()

        @plain.jit
        def step(state, stats, batch):
            grads, stats = _loss(state, stats, batch)(state.params)
            return state.apply_gradients(grads=grads), stats

        for t in range(plain.STEPS):
            state, stats = step(state, stats, plain.batch(t))
        expected, _, expected_stats = _by_hand(tx)
        trees.assert_close(state.params, expected, **plain.CLOSE)
        trees.assert_close(stats, expected_stats, **plain.CLOSE)

    def test_flax_s_own_state_hands_no_grad_fn_on(self):
        tx = mars_optax.mars(0.1, correction="exact")
        state = train_state.TrainState.create(apply_fn=plain.apply, params=plain.params(), tx=tx)
        with self.assertRaisesRegex(ValueError, r"`grad_fn`: expected a function"):
            state.apply_gradients(grads=plain.params())


if __name__ == "__main__":
    absltest.main()
