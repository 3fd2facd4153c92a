"""Compiling: once and never again; optimizers built inside jitted functions leak nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized

import mars_optax
from tests import registry
from tests.support import trees


@contextmanager
def _compilations() -> Iterator[list[str]]:
    """Collects what JAX says it compiles."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("Compiling"):
                messages.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles(True):
            yield messages
    finally:
        logger.removeHandler(handler)


class CompilationTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # The messages are for `_compilations`, not for the terminal.
        logger = logging.getLogger("jax")
        self.addCleanup(setattr, logger, "propagate", logger.propagate)
        logger.propagate = False

    def test_the_counter_counts(self):
        with _compilations() as messages:
            jax.jit(lambda x: x * 3.5)(jnp.ones(7))
        self.assertNotEmpty(messages)

    @parameterized.named_parameters(*registry.select())
    def test_the_second_jitted_step_compiles_nothing(self, entry: registry.Entry):
        tx, params = entry.shared(), entry.params()
        update = trees.jitted_update(tx)
        grads = [entry.grads(i) for i in range(3)]
        _, state = update(grads[0], tx.init(params), params)
        with _compilations() as messages:
            for gradient in grads[1:]:
                _, state = update(gradient, state, params)
        self.assertEmpty(messages)

    @parameterized.named_parameters(*registry.select(core=True))
    def test_the_third_eager_step_compiles_nothing(self, entry: registry.Entry):
        tx, params = entry.make(), entry.params()
        grads = [entry.grads(i) for i in range(3)]
        state = tx.init(params)
        for gradient in grads[:2]:
            _, state = tx.update(gradient, state, params)
        with _compilations() as messages:
            tx.update(grads[2], state, params)
        self.assertEmpty(messages)

    @parameterized.named_parameters(*registry.select("optimizer", core=True))
    def test_a_traced_learning_rate_does_not_recompile(self, entry: registry.Entry):
        params, grads, traces = entry.params(), entry.grads(), []

        @jax.jit
        def step(lr, gamma, params):
            traces.append(1)
            tx = entry.make(learning_rate=lr, gamma=gamma)
            return tx.update(grads, tx.init(params), params)[0]

        first = step(0.1, 0.025, params)
        second = step(0.2, 0.05, params)
        self.assertLen(traces, 1)
        self.assertTrue(trees.all_finite((first, second)))

    @parameterized.named_parameters(*registry.select(core=True))
    def test_an_optimizer_built_inside_jit_serves_outside(self, entry: registry.Entry):
        params, kept = entry.params(), []

        @jax.jit
        def build(params):
            kept.append(entry.precise())
            return kept[0].init(params)

        with jax.checking_leaks():
            state = build(params)
        (tx,) = kept

        actual, _ = jax.jit(tx.update)(entry.grads(), state, params)
        expected, _, _ = trees.run(entry.shared(), params, [entry.grads()], apply=False)
        trees.assert_close(actual, expected, rtol=1e-6, atol=1e-6)

    def test_step_does_not_bake_the_schedule_in(self):
        # The count is data: the same compiled step serves the first and the last step.
        tx = mars_optax.mars(optax.linear_schedule(1.0, 0.0, 4))
        params = {"w": jnp.ones((3, 2))}
        step = jax.jit(tx.update)
        state, norms = tx.init(params), []
        for _ in range(5):
            updates, state = step(params, state, params)
            norms.append(float(optax.tree.norm(updates)))
        self.assertGreater(norms[0], norms[3])
        self.assertEqual(norms[4], 0.0)


if __name__ == "__main__":
    absltest.main()
