"""Micro-batches: what the correction has to see is the gradient of the whole batch.

`optax.MultiSteps` is in `tests/contract/test_wrappers.py`, and in exact mode in
`tests/parity/test_exact.py`.
"""

import jax
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

import mars_optax
from tests.ecosystem import plain
from tests.support import trees

EVERY = 4


def scan_mean(params, batch):
    """The mean over micro-batches, one after the other."""
    micro = jax.tree.map(lambda x: x.reshape(EVERY, -1, *x.shape[1:]), batch)

    def add(total, part):
        return optax.tree.add(total, plain.grad(params, part)), None

    total, _ = jax.lax.scan(add, optax.tree.zeros_like(params), micro)
    return optax.tree.scale(1 / EVERY, total)


def optax_mean(params, batch):
    """The same by `optax.microbatch`."""
    mean = optax.microbatching.AccumulationType.MEAN
    size = len(batch[0]) // EVERY
    return optax.microbatch(plain.grad, argnums=1, microbatch_size=size, accumulator=mean)(
        params, batch
    )


class AccumulationTest(parameterized.TestCase):
    def test_a_mean_over_micro_batches_is_the_batch(self):
        self._check("mars", "approx", scan_mean)

    @pytest.mark.slow
    def test_a_mean_over_micro_batches_is_the_batch_in_exact_mode(self):
        self._check("mars_m", "exact", scan_mean)

    @pytest.mark.slow
    def test_optax_s_own_micro_batches_are_the_batch(self):
        if not hasattr(optax, "microbatch"):
            self.skipTest("this version of Optax has no `microbatch`")
        self._check("mars", "exact", optax_mean)

    def _check(self, name, correction, mean):
        tx = plain.optimizer(name, correction=correction)
        actual, _ = plain.train(tx, plain.params(), grad=mean)
        expected, _ = plain.trained(name, correction=correction)
        trees.assert_close(actual, expected, **plain.CLOSE)

    def test_an_update_for_each_micro_batch_corrects_by_the_wrong_gradient(self):
        """What the page warns of, in the momentum of two steps by hand."""
        link = mars_optax.correct_gradients(0.2, 0.9)
        # Two batches of two micro-batches.
        g = np.random.default_rng(6).standard_normal((2, 2, 3, 2)).astype(np.float32)

        @plain.jit
        def corrected(grads):
            def step(state, g):
                c, state = link.update(g, state)
                return state, c

            return jax.lax.scan(step, link.init(grads[0]), grads)[1]

        of_batches = corrected(g.mean(1))[-1]
        of_each = corrected(g.reshape(4, 3, 2))[-2:].mean(0)
        k = 0.2 * 0.9 / 0.1
        np.testing.assert_allclose(
            of_batches, g[1].mean(0) + k * (g[1].mean(0) - g[0].mean(0)), rtol=1e-5, atol=1e-5
        )
        # The differences telescope: the two last micro-batches are all that is left.
        np.testing.assert_allclose(
            of_each, g[1].mean(0) + k / 2 * (g[1, 1] - g[0, 1]), rtol=1e-5, atol=1e-5
        )


if __name__ == "__main__":
    absltest.main()
