"""Schedules, and runs of the smallest model: comparable, repeatable, learning."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import nnx

from benchmarks.training import data, models, report, resumable

_CONFIG = models.GPTConfig(vocabulary_size=7, context=8, width=16, layers=1, heads=2)
_TOKENS = np.tile(np.arange(7, dtype=np.uint8), 100)
# More than one evaluation batch, and not a multiple of it.
_HELD_OUT = data.validation_windows(_TOKENS, context=8, count=80)


class ScheduleTest(parameterized.TestCase):
    def test_it_warms_up_to_the_peak_and_ends_at_the_final_fraction(self):
        schedule = resumable.Schedule(100, 10, 0.1, 50).learning_rate(jnp.float32(2.0))
        rates = [float(schedule(step)) for step in range(101)]
        self.assertAlmostEqual(rates[0], 0.2, places=6)
        self.assertAlmostEqual(rates[10], 2.0, places=6)
        self.assertAlmostEqual(rates[100], 0.2, places=6)
        self.assertEqual(max(rates), rates[10])

    @parameterized.parameters((20, 10, [0, 10, 20], 10), (7, 3, [0, 3, 6, 7], 1), (4, 9, [0, 4], 4))
    def test_evaluations_fall_between_two_compiled_calls(
        self, steps: int, every: int, evaluated: list[int], per_call: int
    ):
        schedule = resumable.Schedule(steps, 0, 0.1, every)
        self.assertEqual(schedule.evaluated_steps(), evaluated)
        self.assertEqual(schedule.steps_per_call(), per_call)


class TrainingTest(absltest.TestCase):
    def test_evaluation_averages_over_all_windows(self):
        graph, params = nnx.split(models.GPT(_CONFIG, rngs=nnx.Rngs(0)))
        expected = models.loss(nnx.merge(graph, params), jnp.asarray(_HELD_OUT))
        self.assertAlmostEqual(
            float(models.evaluate(graph, params, _HELD_OUT)), float(expected), places=5
        )

    def test_a_diverged_run_ends_at_infinity(self):
        run = report.Run("adamw", 1.0, 0, [0, 1], [5.0, float("nan")], [5.0], 0.1, 8)
        self.assertEqual(run.final_loss, float("inf"))


class ModelTest(absltest.TestCase):
    def test_a_logit_depends_on_no_later_token(self):
        model = models.GPT(_CONFIG, rngs=nnx.Rngs(0))
        tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 0, 1]])
        changed = model(tokens.at[0, 4].set(0)) != model(tokens)
        np.testing.assert_array_equal(jnp.any(changed[0], axis=-1), np.arange(8) >= 4)

    def test_an_untrained_model_knows_nothing(self):
        model = models.GPT(_CONFIG, rngs=nnx.Rngs(0))
        untrained = float(models.loss(model, jnp.asarray(_HELD_OUT)))
        self.assertAlmostEqual(untrained, np.log(7), delta=0.05)


if __name__ == "__main__":
    absltest.main()
