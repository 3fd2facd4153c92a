"""Runs in pieces, by a clock that tasks set: when they end, and what is recorded of their time."""

import pathlib
import signal
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks import command
from benchmarks.training import grid, optimizers, resumable

_NEVER = resumable.Deadline(None, 0.0)


class Clock:
    """Stands for `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Scripted:
    """A task whose losses are given, by step and by evaluation, for each run.

    Its first call, which compiles, takes 100 seconds, the others 6.
    """

    steps = 8
    steps_per_call = 2
    evaluated_steps = (0, 4, 8)

    def __init__(self, clock: Clock, train: Any, validation: Any) -> None:
        self.clock, self.calls = clock, 0
        self.train, self.validation = np.asarray(train), iter(validation)

    def init(self, cells: Sequence[grid.Cell]) -> dict[str, Any]:
        return {"opt_state": jnp.zeros((len(cells), 3))}

    def advance(self, state: dict[str, Any], step: int, cells: Sequence[grid.Cell]) -> Any:
        self.clock.now += 6.0 if self.calls else 100.0
        self.calls += 1
        losses = self.train[: len(cells), step : step + self.steps_per_call]
        return state, losses[0] if len(cells) == 1 else losses

    def evaluate(self, state: dict[str, Any]) -> dict[str, Any]:
        values = np.asarray(next(self.validation), float)
        return {"validation_loss": values[0] if len(state["opt_state"]) == 1 else values}


class ResumableTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "run"
        self.clock = Clock()
        self.enterContext(mock.patch.object(resumable, "time", self.clock))

    def run_task(
        self, train: Any, validation: Any, *, deadline: resumable.Deadline = _NEVER
    ) -> tuple[Scripted, list[grid.Record] | None]:
        adamw = optimizers.parse_optimizer("adamw")
        cells = [grid.Cell(adamw, 1e-3, seed) for seed in range(len(train))]
        task = Scripted(self.clock, train, validation)
        return task, resumable.train(task, cells, self.folder, deadline=deadline)

    @parameterized.parameters(1, 2)
    def test_one_infinite_training_loss_ends_no_run(self, together: int):
        losses = np.ones((together, 8))
        losses[0, 1] = np.inf
        task, records = self.run_task(losses, [[3.0] * 2, [2.0] * 2, [1.0] * 2])
        self.assertEqual(task.calls, 4)
        self.assertEqual(records[0]["curves"]["validation_loss"], [3.0, 2.0, 1.0])
        self.assertEqual(records[0]["train_loss"], [None, 1.0])

    @parameterized.parameters(1, 2)
    def test_a_held_out_loss_that_is_not_finite_is_the_last_alone_and_with_others(
        self, together: int
    ):
        task, records = self.run_task(
            np.ones((together, 8)), [[3.0, 3.0], [np.inf, 2.0], [1.0, 1.0]]
        )
        self.assertEqual(task.calls, 2 if together == 1 else 4)
        self.assertEqual(records[0]["curves"]["validation_loss"], [3.0, None, None])
        self.assertEqual(records[0]["train_loss"], [1.0, None])
        for other in records[1:]:
            self.assertEqual(other["curves"]["validation_loss"], [3.0, 2.0, 1.0])
            self.assertEqual(other["train_loss"], [1.0, 1.0])

    @parameterized.parameters(1, 3)
    def test_seconds_are_of_one_step_of_one_run_and_bytes_of_one_state(self, together: int):
        _, records = self.run_task(np.ones((together, 8)), [[3.0] * 3] * 3)
        for record in records:
            # A call is of two steps.
            self.assertEqual(record["seconds_per_step"], 6.0 / 2 / together)
            self.assertEqual(record["state_bytes"], 3 * 4)
            self.assertEqual(record["together"], together)

    def test_a_signal_stops_after_the_call_and_its_state_is_saved(self):
        class Interrupted(Scripted):
            def advance(self, state: Any, step: int, cells: Sequence[grid.Cell]) -> Any:
                if step == 2:
                    signal.raise_signal(signal.SIGINT)
                return super().advance(state, step, cells)

        adamw = optimizers.parse_optimizer("adamw")
        cells = [grid.Cell(adamw, 1e-3, 0)]
        task = Interrupted(self.clock, np.ones((1, 8)), [[3.0]] * 3)
        with command.Interrupt() as interrupt:
            deadline = resumable.Deadline(None, 0.0, interrupt)
            self.assertIsNone(resumable.train(task, cells, self.folder, deadline=deadline))
        self.assertEqual(task.calls, 2)
        _, progress = resumable.restore(self.folder, task.init(cells))
        self.assertEqual(progress.step, 4)

    def test_a_call_that_would_pass_the_deadline_is_not_begun(self):
        # After three calls it is 112, and the fourth would end at 118.
        late = resumable.Deadline(117.0, 0.0)
        task, records = self.run_task(np.ones((1, 8)), [[3.0]] * 3, deadline=late)
        self.assertIsNone(records)
        self.assertEqual(task.calls, 3)


if __name__ == "__main__":
    absltest.main()
