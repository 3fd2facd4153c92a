"""Schedules, and runs of the smallest model: comparable, repeatable, learning."""

import functools

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from benchmarks import data, gpt, optimizers, training

_CONFIG = gpt.GPTConfig(vocabulary_size=7, context=8, width=16, layers=1, heads=2)
_SCHEDULE = training.Schedule(steps=20, warmup_steps=2, final_fraction=0.1, eval_every=10)
_TOKENS = np.tile(np.arange(7, dtype=np.uint8), 100)
_CORPUS = data.Corpus(_TOKENS, _TOKENS, 7, {})
# More than one evaluation batch, and not a multiple of it.
_HELD_OUT = data.validation_windows(_TOKENS, context=8, count=80)


@functools.cache
def trainer(name: str) -> training.Trainer:
    return training.Trainer(_CONFIG, optimizers.parse_optimizer(name), _SCHEDULE)


def train(name: str, *, rate: float = 1e-2, seed: int = 0) -> training.Run:
    return trainer(name).train(_CORPUS, _HELD_OUT, learning_rate=rate, seed=seed, batch_size=4)


class ScheduleTest(parameterized.TestCase):
    def test_it_warms_up_to_the_peak_and_ends_at_the_final_fraction(self):
        schedule = training.Schedule(100, 10, 0.1, 50).learning_rate(jnp.float32(2.0))
        rates = [float(schedule(step)) for step in range(101)]
        self.assertAlmostEqual(rates[0], 0.2, places=6)
        self.assertAlmostEqual(rates[10], 2.0, places=6)
        self.assertAlmostEqual(rates[100], 0.2, places=6)
        self.assertEqual(max(rates), rates[10])

    @parameterized.parameters((20, 10, [0, 10, 20], 10), (7, 3, [0, 3, 6, 7], 1), (4, 9, [0, 4], 4))
    def test_evaluations_fall_between_two_compiled_calls(
        self, steps: int, every: int, evaluated: list[int], per_call: int
    ):
        schedule = training.Schedule(steps, 0, 0.1, every)
        self.assertEqual(schedule.evaluated_steps(), evaluated)
        self.assertEqual(schedule.steps_per_call(), per_call)


class TrainingTest(absltest.TestCase):
    def test_optimizers_start_from_the_same_weights_and_see_the_same_batches(self):
        # So small a learning rate leaves float32 weights as they are: losses show the batches.
        adamw, mars = (train(name, rate=1e-30) for name in ("adamw", "mars"))
        self.assertEqual(adamw.validation_loss[0], mars.validation_loss[0])
        np.testing.assert_allclose(adamw.train_loss, mars.train_loss, rtol=1e-6)
        other = train("adamw", rate=1e-30, seed=1)
        self.assertNotEqual(adamw.validation_loss[0], other.validation_loss[0])

    def test_losses_fall_and_a_second_run_gives_the_same_ones(self):
        first, second = train("adamw"), train("adamw")
        self.assertLess(first.train_loss[-1], first.train_loss[0])
        self.assertLess(first.final_loss, first.validation_loss[0])
        self.assertEqual(first.validation_loss, second.validation_loss)
        self.assertEqual(first.steps, [0, 10, 20])
        self.assertGreater(first.seconds_per_step, 0)

    def test_state_bytes_are_two_copies_of_the_parameters_and_counters_for_adamw(self):
        params = nnx.state(gpt.GPT(_CONFIG, rngs=nnx.Rngs(0)))
        counters = train("adamw").state_bytes - 2 * training.tree_bytes(params)
        self.assertBetween(counters, 4, 16)

    def test_evaluation_averages_over_all_windows(self):
        graph, params = nnx.split(gpt.GPT(_CONFIG, rngs=nnx.Rngs(0)))
        expected = gpt.loss(nnx.merge(graph, params), jnp.asarray(_HELD_OUT))
        self.assertAlmostEqual(
            float(training.evaluate(graph, params, _HELD_OUT)), float(expected), places=5
        )

    def test_a_diverged_run_ends_at_infinity(self):
        run = training.Run("adamw", 1.0, 0, [0, 1], [5.0, float("nan")], [5.0], 0.1, 8)
        self.assertEqual(run.final_loss, float("inf"))


class ModelTest(absltest.TestCase):
    def test_a_logit_depends_on_no_later_token(self):
        model = gpt.GPT(_CONFIG, rngs=nnx.Rngs(0))
        tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 0, 1]])
        changed = model(tokens.at[0, 4].set(0)) != model(tokens)
        np.testing.assert_array_equal(jnp.any(changed[0], axis=-1), np.arange(8) >= 4)

    def test_an_untrained_model_knows_nothing(self):
        model = gpt.GPT(_CONFIG, rngs=nnx.Rngs(0))
        untrained = float(gpt.loss(model, jnp.asarray(_HELD_OUT)))
        self.assertAlmostEqual(untrained, np.log(7), delta=0.05)


if __name__ == "__main__":
    absltest.main()
