"""Runs of many steps: counters at their end, averages in low precision, schedules, decay alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from mars_optax._src.leaf import momentum
from tests.support import numpy_reference, trees

LAST = 2**31 - 1
SHORT, LONG = 10_000, 1_000_000
BFLOAT16 = {"mu_dtype": "bfloat16", "prev_grad_dtype": "bfloat16"}
START = -0.75
TARGET = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]], np.float32)
CURVATURE = np.array([[1.0, 0.1, 3.0], [0.5, 1.0, 2.0]], np.float32)


def _rate(count: Any) -> Any:
    return 0.05 / (1.0 + 1e-3 * count)


def _gamma(count: Any) -> Any:
    """Crosses 0 every 500 steps."""
    return 0.05 * jnp.cos(count * (np.pi / 500))


VARIANTS: dict[str, Callable[..., Any]] = {
    "mars": mars_optax.mars,
    "mars_gamma": functools.partial(mars_optax.mars, gamma=_gamma),
    "mars_exact": functools.partial(mars_optax.mars, correction="exact", max_norm=None),
    "mars_amsgrad": functools.partial(mars_optax.mars, amsgrad=True),
    "mars_bfloat16": functools.partial(mars_optax.mars, nu_dtype="bfloat16", **BFLOAT16),
    "mars_float8": functools.partial(mars_optax.mars, prev_grad_dtype="float8_e4m3fn"),
    "mars_lion": mars_optax.mars_lion,
    "mars_shampoo": mars_optax.mars_shampoo,
    "mars_m": mars_optax.mars_m,
    "mars_m_memory_free": functools.partial(
        mars_optax.mars_m, keep_prev_grad=False, max_norm=None, gamma=_gamma
    ),
    "storm_adamw": mars_optax.storm_adamw,
}


def _noise(count: Any) -> Any:
    """Of every entry and step another. Two steps cancel, so that the optimum stays where it is."""
    phases = 1.0 + jnp.arange(6.0).reshape(2, 3)
    return 0.1 * (1 - 2 * (count % 2)) * jnp.cos((count // 2 % 997) * phases)


@functools.cache
def _program(name: str) -> Callable[..., tuple[Any, Any, Any]]:
    """Steps on a quadratic with noisy gradients, compiled once for all tests of a variant."""

    @jax.jit
    def run(steps: Any, count: Any, rate: Any, decay: Any, scale: Any) -> Any:
        tx = VARIANTS[name](lambda count: rate * _rate(count), weight_decay=decay)

        def step(i: Any, carry: Any) -> Any:
            params, state, largest = carry
            grad_fn = lambda p: scale * (CURVATURE * (p - TARGET) + _noise(i))  # noqa: E731
            updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
            params = optax.apply_updates(params, updates)
            distance = jnp.where(10 * i >= 9 * steps, jnp.max(jnp.abs(params - TARGET)), 0.0)
            return params, state, jnp.maximum(largest, distance)

        params = jnp.zeros_like(TARGET) + START
        state = optax.tree.set(tx.init(params), count=count)
        return jax.lax.fori_loop(0, steps, step, (params, state, 0.0))

    return run


def _run(
    name: str,
    steps: int,
    *,
    count: int = 0,
    rate: float = 1.0,
    decay: float = 0.0,
    scale: float = 1.0,
) -> tuple[Any, Any, float]:
    """The parameters and state, and the largest distance to the optimum in the last tenth.

    Args:
      name: The variant.
      steps: The number of steps.
      count: Where the state's counters begin.
      rate: The learning rate, in units of `_rate`.
      decay: The weight decay.
      scale: That of the gradients.
    """
    params, state, distance = _program(name)(steps, jnp.int32(count), rate, decay, scale)
    return params, state, float(distance)


class ManyStepsTest(parameterized.TestCase):
    def check(self, name: str, steps: int):
        _, _, before = _run(name, steps // 10)
        params, state, distance = _run(name, steps)
        self.assertTrue(trees.all_finite((params, state)))
        counts = trees.fields(state, "count")
        self.assertNotEmpty(counts)
        for count in counts:
            self.assertEqual(int(count), steps)
        # Steps of the size of the learning rate that go to and fro with noise make a walk, drawn
        # back by the gradient: its width goes with the root of the rate. It began 3.75 away.
        self.assertLess(distance, float(np.sqrt(_rate(0.9 * steps))))
        self.assertLess(distance, before)

    @parameterized.parameters(*VARIANTS)
    def test_it_is_at_the_optimum_after_ten_thousand_steps(self, name: str):
        self.check(name, SHORT)

    @parameterized.parameters(*VARIANTS)
    @pytest.mark.slow
    def test_it_is_at_the_optimum_after_a_million_steps(self, name: str):
        self.check(name, LONG)

    @parameterized.parameters(*VARIANTS)
    def test_the_count_stays_at_the_last_number(self, name: str):
        for steps in (1, 3):
            # Schedules of the learning rate and of gamma meet the last count, too.
            params, state, _ = _run(name, steps, count=LAST - 1, rate=1e6)
            self.assertTrue(trees.all_finite((params, state)))
            self.assertTrue(np.all(np.asarray(params) != START))
            counts = trees.fields(state, "count")
            self.assertNotEmpty(counts)
            for count in counts:
                self.assertEqual(int(count), LAST)
                self.assertEqual(count.dtype, jnp.int32)

    @parameterized.parameters(*VARIANTS)
    def test_a_learning_rate_of_zero_leaves_the_parameters_and_moves_the_state(self, name: str):
        params, state, _ = _run(name, 1000, rate=0.0, decay=0.1)
        np.testing.assert_array_equal(params, START)
        averages = jax.tree.leaves(trees.fields(state, "mu"))
        self.assertNotEmpty(averages)
        for average in averages:
            self.assertTrue(np.all(np.asarray(average) != 0.0))

    @parameterized.parameters(*VARIANTS)
    def test_without_gradients_only_the_decay_is_left(self, name: str):
        params, state, _ = _run(name, 1000, decay=0.1, scale=0.0)
        expected = START * np.prod(1 - 0.1 * _rate(np.arange(1000.0)))
        # Each step rounds the update and the sum.
        np.testing.assert_allclose(params, expected, rtol=1000 * 2.0**-23)
        for average in jax.tree.leaves(trees.fields(state, "mu") + trees.fields(state, "nu")):
            np.testing.assert_array_equal(np.asarray(average, np.float32), 0.0)


class BiasCorrectionTest(parameterized.TestCase):
    COUNTS = (1, 2, 10, 1_000, 100_000, 2**24 + 1, LAST - 1)

    @parameterized.parameters(0.0, 0.9, 0.95, 0.99, 0.999, 0.9999)
    def test_it_is_that_of_float64(self, decay: float):
        counts = np.array(self.COUNTS)
        actual = momentum.bias_correction(decay, jnp.asarray(counts, jnp.int32))
        expected = -np.expm1(counts * np.log(np.maximum(decay, 1e-300)))
        # float32 rounds the decay by 2^-25, which is 2^-25 / (1 - decay) of the first correction;
        # the power of a large count is rounded some times.
        np.testing.assert_allclose(actual, expected, rtol=2.0**-23 / (1 - decay))
        forgotten = decay**counts < 2.0**-25
        self.assertTrue(np.all(forgotten[-2:]))
        np.testing.assert_array_equal(np.asarray(actual)[forgotten], 1.0)

    def test_a_direction_has_it_at_every_count(self):
        b1, b2 = 0.95, 0.999
        tx = mars_optax.scale_by_mars(b1, b2, eps=0.0, correction="none", max_norm=None)
        update = jax.jit(tx.update)
        for count in self.COUNTS:
            state = tx.init(jnp.zeros(1))._replace(count=jnp.asarray(count - 1, jnp.int32))
            direction, _ = update(jnp.full(1, 3.0), state)
            corrections = -np.expm1(count * np.log([b1, b2]))
            expected = (1 - b1) / corrections[0] / np.sqrt((1 - b2) / corrections[1])
            np.testing.assert_allclose(direction, expected, rtol=2.0**-23 / (1 - b2))


class LowPrecisionTest(parameterized.TestCase):
    """Where averages stored in bfloat16 stop to move, and float32 ones do not.

    A bfloat16 number has neighbours at 2^-8 to 2^-7 of its size. An average m moves towards x only
    where (1 - b) |x - m| is more than half of that.
    """

    def averages(self, decay: float, dtype: str) -> list[float]:
        """Both averages, mu and nu, of gradients of 1, and after as many zeros."""
        tx = mars_optax.scale_by_mars(
            decay, decay, correction="none", max_norm=None, mu_dtype=dtype, nu_dtype=dtype
        )

        @jax.jit
        def run(grad: Any, state: Any) -> Any:
            step = lambda _, state: tx.update(grad, state)[1]  # noqa: E731
            return jax.lax.fori_loop(0, 100_000, step, state)

        risen = run(jnp.ones(1), tx.init(jnp.zeros(1)))
        fallen = run(jnp.zeros(1), risen)
        return [float(x[0]) for x in (risen.mu, risen.nu, fallen.mu, fallen.nu)]

    @parameterized.parameters(0.95, 0.999)
    def test_float32_averages_reach_what_they_average(self, decay: float):
        *risen, fell_mu, fell_nu = self.averages(decay, "float32")
        np.testing.assert_allclose(risen, 1.0, rtol=2.0**-23 / (1 - decay))
        np.testing.assert_array_less([fell_mu, fell_nu], 1e-37)

    @parameterized.parameters((0.9, 0.984375), (0.95, 0.9609375), (0.99, 0.8046875), (0.999, 0.25))
    def test_bfloat16_averages_stop_before(self, decay: float, reached: float):
        *risen, fell_mu, fell_nu = self.averages(decay, "bfloat16")
        np.testing.assert_array_equal(risen, reached)
        # What is left to go is half the distance to the next number at most: ties go to the even.
        spacing = float(np.spacing(np.float32(reached))) * 2.0**16
        self.assertLessEqual(np.float32((1 - decay) * (1 - reached)), spacing / 2)
        # With 1 - b < 2^-9 they do not fall, either.
        remains = reached if 1 - decay < 2.0**-9 else 0.0
        np.testing.assert_array_equal([fell_mu, fell_nu], remains)


class GammaTest(absltest.TestCase):
    def test_a_gamma_that_crosses_zero_follows_float64(self):
        steps = SHORT
        counts = np.arange(steps)
        grads = np.asarray(jax.vmap(_noise)(jnp.asarray(counts))) + 0.02
        kwargs = {"b1": 0.95, "b2": 0.99, "max_norm": None, "second_moment": "gradient"}
        expected = numpy_reference.mars_leaf(
            TARGET,
            grads,
            rule="adamw",
            lr=0.05 / (1.0 + 1e-3 * counts),
            gamma=0.05 * np.cos(counts * (np.pi / 500)),
            weight_decay=0.01,
            **kwargs,
        )
        for keep_prev_grad in (True, False):
            tx = mars_optax.mars(
                _rate, gamma=_gamma, weight_decay=0.01, keep_prev_grad=keep_prev_grad, **kwargs
            )

            def step(carry: Any, grad: Any, tx: Any = tx) -> Any:
                params, state = carry
                updates, state = tx.update(grad, state, params)
                params = optax.apply_updates(params, updates)
                return (params, state), params

            params = jnp.asarray(TARGET)
            (_, state), history = jax.jit(
                lambda carry, step=step: jax.lax.scan(step, carry, jnp.asarray(grads, jnp.float32))
            )((params, tx.init(params)))
            # The sum of 10,000 updates, each rounded by 2^-23 at most: a walk of about 100 of them.
            np.testing.assert_allclose(history, expected.params, rtol=1e-4, atol=1e-4)
            (nu,) = jax.tree.leaves(trees.fields(state, "nu"))
            np.testing.assert_allclose(nu, expected.nu, rtol=1e-4)


if __name__ == "__main__":
    absltest.main()
