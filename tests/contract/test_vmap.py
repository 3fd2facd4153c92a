"""`jax.vmap`: over optimizers with hyperparameters of their own, and over stacked parameters."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absl.testing import absltest, parameterized

from tests import registry
from tests.support import trees

_RATES = (0.1, 0.01, 0.3)
_GAMMAS = (0.025, 0.0, 0.5)


def _stack(members):
    return jax.tree.map(lambda *x: jnp.stack(x), *members)


class VmapTest(parameterized.TestCase):
    @parameterized.named_parameters(*registry.select("optimizer", core=True))
    def test_members_with_their_own_rate_and_gamma_equal_a_loop(self, entry: registry.Entry):
        params = entry.params()
        grads = [entry.grads(step) for step in range(2)]

        def train(rate, gamma):
            tx = entry.precise(learning_rate=rate, gamma=gamma)
            p, state = params, tx.init(params)
            for gradient in grads:
                updates, state = tx.update(gradient, state, p)
                p = optax.apply_updates(p, updates)
            return p

        together = jax.jit(jax.vmap(train))(jnp.asarray(_RATES), jnp.asarray(_GAMMAS))
        alone = jax.jit(train)
        loop = _stack([alone(r, g) for r, g in zip(_RATES, _GAMMAS, strict=True)])
        # Newton-Schulz amplifies the rounding of another order of additions.
        tolerance = entry.tolerance(1e-6)
        trees.assert_close(together, loop, rtol=tolerance, atol=tolerance)

    @parameterized.named_parameters(*registry.select(core=True))
    def test_stacked_parameters_equal_a_loop(self, entry: registry.Entry):
        self._check_stacked(entry)

    @parameterized.named_parameters(*registry.select(where=lambda entry: not entry.core))
    @pytest.mark.slow
    def test_stacked_parameters_equal_a_loop_in_every_setting(self, entry: registry.Entry):
        self._check_stacked(entry)

    def _check_stacked(self, entry: registry.Entry):
        tx, params = entry.shared(), entry.params()
        models = [optax.tree.scale(scale, params) for scale in (1.0, 0.5, -2.0)]
        grads = [entry.grads(seed, scale=0.1 + seed) for seed in range(3)]
        update = trees.jitted_update(tx)
        singles = [
            update(g, update(p, tx.init(p), p)[1], p) for p, g in zip(models, grads, strict=True)
        ]
        stacked, stacked_grads = _stack(models), _stack(grads)
        vmapped = jax.jit(jax.vmap(tx.update))
        state = jax.vmap(tx.init)(stacked)
        _, state = vmapped(stacked, state, stacked)
        actual = vmapped(stacked_grads, state, stacked)
        # As above.
        tolerance = entry.tolerance(1e-5)
        trees.assert_close(actual, _stack(singles), rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    absltest.main()
