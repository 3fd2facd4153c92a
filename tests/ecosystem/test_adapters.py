"""Low-rank adapters (LoRA) with everything else frozen, on plain trees.

With Flax NNX they are in `tests/ecosystem/test_nnx.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from tests.ecosystem import plain
from tests.support import trees

RANK = 2


def _adapters():
    """A of both kernels at random, B at zero, so that they change nothing at first."""
    rng = np.random.default_rng(5)
    return {
        name: {
            "a": jnp.asarray(rng.standard_normal((layer["kernel"].shape[0], RANK)), "float32"),
            "b": jnp.zeros((RANK, layer["kernel"].shape[1])),
        }
        for name, layer in plain.params().items()
    }


def _merged(base, adapters):
    return {
        name: {**layer, "kernel": layer["kernel"] + adapters[name]["a"] @ adapters[name]["b"]}
        for name, layer in base.items()
    }


def _loss(model, batch):
    return plain.loss(_merged(model["base"], model["lora"]), batch)


def _model():
    return {"base": plain.params(), "lora": _adapters()}


def _partitioned(tx):
    return optax.partition(
        {"trained": tx, "frozen": optax.set_to_zero()}, {"base": "frozen", "lora": "trained"}
    )


@functools.cache
def _trained_alone(name, correction):
    """The plain loop on the adapters, with the rest a constant."""
    base = plain.params()
    grad = jax.grad(lambda adapters, batch: plain.loss(_merged(base, adapters), batch))
    return plain.train(plain.optimizer(name, correction=correction), _adapters(), grad=grad)


class AdapterTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_adapters_in_a_frozen_model_are_adapters_alone(self):
        self._check_trained("mars_m", "exact")

    @pytest.mark.slow
    def test_adapters_in_a_frozen_model_without_exact_mode(self):
        self._check_trained("mars", "approx")

    def _check_trained(self, name, correction):
        tx = _partitioned(plain.optimizer(name, correction=correction))
        model = _model()
        state = tx.init(model)

        @plain.jit
        def step(model, state, batch):
            def grad_fn(seen):
                # Where the frozen ones are, `seen` has `optax.MaskedNode()`.
                grads = jax.grad(lambda lora: _loss({**model, "lora": lora}, batch))(seen["lora"])
                return {**seen, "lora": grads}

            grads = jax.grad(_loss)(model, batch)
            updates, state = tx.update(grads, state, model, grad_fn=grad_fn)
            return optax.apply_updates(model, updates), state

        for t in range(plain.STEPS):
            model, state = step(model, state, plain.batch(t))
        expected, expected_state = _trained_alone(name, correction)
        trees.assert_close(model["lora"], expected, **plain.CLOSE)
        trees.assert_equal(model["base"], plain.params())
        self.assertEqual(trees.shapes([state]), trees.shapes([expected_state]))

    @pytest.mark.slow
    def test_the_first_step_of_mars_moves_b_and_leaves_a(self):
        self._check_first_step("mars")

    def test_the_first_step_of_mars_m_moves_b_and_leaves_a(self):
        self._check_first_step("mars_m")

    def _check_first_step(self, name):
        """At B = 0 the gradient of A is zero: no step, and no division by its norm."""
        tx = plain.optimizer(name, weight_decay=0.0)
        adapters, base = _adapters(), plain.params()

        @plain.jit
        def update(adapters):
            grads = jax.grad(lambda a: plain.loss(_merged(base, a), plain.batch(0)))(adapters)
            return tx.update(grads, tx.init(adapters), adapters)

        updates, state = update(adapters)
        for layer in updates.values():
            np.testing.assert_array_equal(layer["a"], 0.0)
            self.assertGreater(float(jnp.min(jnp.abs(layer["b"]).max(1))), 1e-3)
        self.assertTrue(trees.all_finite(state))

    def test_describe_tells_what_is_frozen(self):
        report = mars_optax.describe(_model(), _partitioned(mars_optax.mars_m(0.1)))
        self.assertEqual(report.counts, {"matrix": 4, "vector": 0, "frozen": 4})
        for leaf in report.leaves:
            trained = leaf.path.startswith("lora")
            self.assertEqual(leaf.rule, "matrix" if trained else "frozen")
            size = 4 * int(np.prod(leaf.shape))
            self.assertEqual(leaf.state_bytes, 2 * size if trained else 0)


if __name__ == "__main__":
    absltest.main()
