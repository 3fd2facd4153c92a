"""The fast GPT: its cross-entropy beside float64, the model beside `models.GPT`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from flax import nnx

from benchmarks.training import fast_gpt, gpt2, large_batch, models, optimizers

_CONFIG = fast_gpt.Config(
    vocabulary_size=64, context=8, width=16, layers=2, heads=2, dtype="float32", logits_chunk=4
)


def _reference(x: Any, embed: Any, targets: Any) -> tuple[float, Any, Any]:
    """The mean cross-entropy and its gradients in float64."""
    x, embed = np.asarray(x, np.float64), np.asarray(embed, np.float64)
    logits = x @ embed.T
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    rows = np.arange(len(x))
    loss = -np.log(p[rows, targets]).mean()
    p[rows, targets] -= 1
    return loss, p @ embed / len(x), p.T @ x / len(x)


class CrossEntropyTest(parameterized.TestCase):
    @parameterized.parameters(1, 4, 5, 12, 100)
    def test_it_is_the_plain_one_with_its_gradients(self, chunk: int):
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=(12, 5)), jnp.float32)
        embed = jnp.asarray(3 * rng.normal(size=(7, 5)), jnp.float32)
        targets = jnp.asarray(rng.integers(7, size=12))

        def three_times(x: jax.Array, embed: jax.Array) -> jax.Array:
            return 3 * fast_gpt.cross_entropy(x, embed, targets, chunk)

        loss, (d_x, d_embed) = jax.value_and_grad(three_times, (0, 1))(x, embed)
        expected, expected_x, expected_embed = _reference(x, embed, targets)
        np.testing.assert_allclose(loss, 3 * expected, rtol=1e-6)
        np.testing.assert_allclose(d_x, 3 * expected_x, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(d_embed, 3 * expected_embed, rtol=1e-5, atol=1e-6)
        # Not differentiated, other code computes it.
        np.testing.assert_allclose(three_times(x, embed), 3 * expected, rtol=1e-6)

    def test_bfloat16_products_leave_float32_sums(self):
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=(256, 16)), jnp.bfloat16)
        embed = jnp.asarray(rng.normal(size=(32, 16)), jnp.float32)
        targets = jnp.asarray(rng.integers(32, size=256))
        loss, (d_x, d_embed) = jax.value_and_grad(fast_gpt.cross_entropy, (0, 1))(
            x, embed, targets, 4
        )
        expected, _, expected_embed = _reference(
            x, embed.astype(jnp.bfloat16).astype(jnp.float32), targets
        )
        self.assertEqual((d_x.dtype, d_embed.dtype), (jnp.bfloat16, jnp.float32))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        # Each softmax is rounded to bfloat16, 2**-9; sums of 256 of them are not rounded again.
        error = np.linalg.norm(d_embed - expected_embed) / np.linalg.norm(expected_embed)
        self.assertLess(error, 2**-8)


def _stacked(state: Any, layers: int) -> fast_gpt.Params:
    """The parameters of a `models.GPT` as this model has them."""
    pure = nnx.to_pure_dict(state)
    blocks = [pure["blocks"][layer] for layer in range(layers)]
    return {
        "embed": pure["embed"]["embedding"],
        "position_embed": pure["position_embed"]["embedding"],
        "blocks": jax.tree.map(lambda *x: jnp.stack(x), *blocks),
        "norm": pure["norm"],
    }


class ModelTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        config = models.GPTConfig(64, 8, 16, 2, 2, tied=True)
        cls.graph, cls.state = nnx.split(models.GPT(config, rngs=nnx.Rngs(0)))
        cls.params = _stacked(cls.state, 2)
        rng = np.random.default_rng(0)
        cls.windows = jnp.asarray(rng.integers(64, size=(6, 9)))

    def gradients(self, **changes: Any) -> tuple[jax.Array, Any]:
        config = dataclasses.replace(_CONFIG, **changes)
        function = jax.value_and_grad(lambda p: fast_gpt.loss(config, p, self.windows))
        loss, gradient = jax.jit(function)(self.params)
        return loss, gradient

    def expected(self) -> tuple[jax.Array, Any]:
        def loss(state: Any) -> jax.Array:
            return models.loss(nnx.merge(self.graph, state), self.windows)

        value, gradient = jax.jit(jax.value_and_grad(loss))(self.state)
        return value, gradient

    @parameterized.parameters(({},), ({"unroll": False},), ({"remat": True},))
    def test_loss_and_gradients_are_those_of_the_other_gpt(self, changes: dict[str, bool]):
        loss, gradient = self.gradients(**changes)
        expected_loss, expected = self.expected()
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
            gradient,
            _stacked(expected, 2),
        )

    def test_bfloat16_is_close(self):
        loss, gradient = self.gradients(dtype="bfloat16", logits_dtype="bfloat16")
        expected_loss, expected = self.expected()
        np.testing.assert_allclose(loss, expected_loss, rtol=2**-7)
        # bfloat16 rounds by 2**-9, and a gradient passes some ten roundings: 0.5 to 1 percent here.
        jax.tree.map(
            lambda x, y: self.assertLess(jnp.linalg.norm(x - y), 2**-5 * jnp.linalg.norm(y)),
            gradient,
            _stacked(expected, 2),
        )

    def test_initial_parameters_have_the_scales_of_the_other_gpt(self):
        params = fast_gpt.init(_CONFIG, jax.random.key(0))
        self.assertEqual(jax.tree.map(jnp.shape, params), jax.tree.map(jnp.shape, self.params))
        for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(self.params), strict=True):
            # Of 128 normal numbers or more, which the smallest leaf but the norms' has.
            np.testing.assert_allclose(jnp.std(ours), jnp.std(theirs), rtol=0.2)
            np.testing.assert_allclose(jnp.mean(ours), jnp.mean(theirs), atol=0.006)

    def check_step(self, name: str) -> None:
        _, gradient = self.gradients()
        after = []
        for params, grads, domain in (
            (self.params, gradient, large_batch.DOMAIN),
            (self.state, self.expected()[1], gpt2.DOMAIN),
        ):
            optimizer = optimizers.parse_optimizer(name, domain)
            schedule = optax.constant_schedule(1e-2)
            state = optimizer.transformation(schedule).init(params)
            step = jax.jit(
                lambda g, s, p, optimizer=optimizer, schedule=schedule: optimizer.step(
                    schedule, lambda p: p, g, s, p
                )
            )
            # A second step, for the correction to count.
            first, state = step(grads, state, params)
            last, _ = step(jax.tree.map(lambda g, p: g + 0.01 * p, grads, first), state, first)
            after.append(last)
        jax.tree.map(
            # Adam's direction is the gradient's sign where the gradient itself is rounding.
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=5e-5),
            after[0],
            _stacked(after[1], 2),
        )

    def test_a_step_is_that_of_the_other_gpt(self):
        self.check_step("mars_m")

    @parameterized.parameters("adamw", "nadamw", "mars", "muon")
    @pytest.mark.slow
    def test_steps_of_others_are_those_of_the_other_gpt(self, name: str):
        self.check_step(name)

    def test_operations_of_gpt2_small(self):
        small = fast_gpt.Config(50304, 1024, 768, 12, 12)
        # 85 million parameters in the blocks, 38.6 in the output layer, and the attention.
        self.assertAlmostEqual(small.flops_per_token() / 1e6, 6 * (84.95 + 38.63) + 113.2, delta=1)


if __name__ == "__main__":
    absltest.main()
