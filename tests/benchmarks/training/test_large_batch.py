"""Large batches: accumulation, pieces, grids that follow the batch size, and what noise is."""

import contextlib
import functools
import io
import json
import pathlib
import tempfile
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from benchmarks.training import gradient_noise, grid, large_batch, resumable
from tests.benchmarks import flags
from tests.benchmarks.training import test_grid

_SIZES = ("--layers=1", "--width=16", "--context=8", "--eval_windows=4", "--dtype=float32")
_LENGTH = ("--steps=12", "--eval_every=6", "--steps_per_call=3", "--batch_tokens=32,64")
_NEVER = resumable.Deadline(None, 0.0)


def axis(*given: str) -> large_batch.Axis:
    given = (*_SIZES, *_LENGTH, f"--data_file={pathlib.Path(__file__)}", *given)
    return large_batch.Axis(large_batch.parser().parse_args(flags.last(*given)))


@functools.cache
def task(name: str, size: int = 0, *given: str) -> tuple[large_batch.Training, grid.Cell]:
    comparison = axis(f"--optimizers={name}", *given)
    ((optimizer, _),) = comparison.optimizers
    work = comparison.training(*comparison.sizes[size], optimizer)
    return work, grid.Cell(optimizer, 1e-2, 0)


def gradients(size: int, *given: str, step: int = 0, seed: int = 0) -> tuple[Any, Any]:
    work, cell = task("adamw", size, *given)
    cell = grid.Cell(cell.optimizer, cell.learning_rate, seed)
    _, _, step, count, tokens = work.program.arguments([cell], step, work.microbatches)
    params = work.program.init(0)["params"]
    function = jax.jit(work.program.value_and_gradient)
    loss, gradient = function(params, np.uint32(seed), step, count, tokens)
    return loss, gradient


class ProgramTest(parameterized.TestCase):
    def test_accumulation_is_the_big_batch(self):
        (loss, whole), (other_loss, parts) = gradients(1, "--microbatch_tokens=64"), gradients(1)
        self.assertEqual(task("adamw", 1, "--microbatch_tokens=64")[0].microbatches, 1)
        self.assertEqual(task("adamw", 1)[0].microbatches, 2)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        # float32 sums in another order, of terms up to 0.1.
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), parts, whole
        )

    def test_a_batch_is_decided_by_seed_and_step(self):
        losses = [gradients(0, step=step, seed=seed)[0] for step, seed in ((0, 0), (1, 0), (0, 1))]
        self.assertLen(set(map(float, losses)), 3)
        self.assertEqual(losses[0], gradients(0)[0])

    def test_windows_are_pieces_of_the_text(self):
        work, _ = task("adamw")
        text = pathlib.Path(__file__).read_bytes()
        windows = work.program.windows(np.uint32(0), 5, 0, work.program.arguments([], 0, 0)[-1])
        self.assertEqual(windows.shape, (4, 9))
        for window in np.asarray(windows):
            self.assertIn(bytes(window.tolist()), text)
        self.assertLen({bytes(window.tolist()) for window in np.asarray(windows)}, 4)


class RunTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def train(self, name: str, size: int = 1, seeds: tuple[int, ...] = (0,), **options: Any) -> Any:
        work, cell = task(name, size)
        cells = [grid.Cell(cell.optimizer, cell.learning_rate, seed) for seed in seeds]
        options = {"deadline": _NEVER, **options}
        return resumable.train(work, cells, self.folder / "run", **options)

    def check_pieces(self, name: str) -> None:
        (whole,) = self.train(name)
        self.assertIsNone(self.train(name, deadline=test_grid.After(1)))
        # Ctrl-C in the third call; every call before has left a checkpoint.
        work, _ = task(name, 1)
        calls = [work.program._advance[True]]

        def interrupted(*arguments: Any) -> Any:
            if not calls:
                raise KeyboardInterrupt
            return calls.pop()(*arguments)

        with (
            mock.patch.dict(work.program._advance, {True: interrupted}),
            self.assertRaises(KeyboardInterrupt),
        ):
            self.train(name, save_every=0.0)
        (pieces,) = self.train(name)
        self.assertEqual(pieces["pieces"], 3)
        self.assertEqual(pieces["curves"], whole["curves"])
        self.assertEqual(pieces["train_loss"], whole["train_loss"])
        self.assertLess(whole["train_loss"][-1], whole["train_loss"][0])

    def test_a_run_in_pieces_is_bit_for_bit_the_run_at_once(self):
        self.check_pieces("mars")

    @parameterized.parameters("mars_m", "mars:correction=exact")
    @pytest.mark.slow
    def test_runs_of_others_in_pieces_are_bit_for_bit_the_run_at_once(self, name: str):
        self.check_pieces(name)

    def test_runs_made_together_are_those_made_alone(self):
        together = self.train("mars", 0, seeds=(0, 1))
        for seed, run in enumerate(together):
            (alone,) = self.train("mars", 0, seeds=(seed,))
            np.testing.assert_allclose(
                run["curves"]["validation_loss"], alone["curves"]["validation_loss"], rtol=1e-4
            )


class CommandTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def run_command(self, *given: str, command: Any = large_batch) -> str:
        output = io.StringIO()
        files = [f"--data_file={pathlib.Path(__file__)}", f"--out={self.folder / 'out'}"]
        with contextlib.redirect_stdout(output):
            self.assertEqual(command.main(flags.last(*_SIZES, *_LENGTH, *files, *given)), 0)
        return output.getvalue()

    def test_the_grid_follows_the_batch_size(self):
        given = ("--optimizers=adamw", "--grid=3", "--extend=0", "--final_seeds=1,2")
        self.assertIn("Give the same command again", self.run_command(*given, "--limit=0"))
        self.run_command(*given)
        rates = {}
        for size in (32, 64):
            results = json.loads((self.folder / f"out/batch_{size}/results.json").read_text())
            self.assertEqual(results["task"]["tokens_per_step"], size)
            rates[size] = {
                seed: sorted(r["learning_rate"] for r in results["records"] if r["seed"] == seed)
                for seed in (0, 1, 2)
            }
        self.assertEqual(rates[32][0], [1e-3, 2e-3, 4e-3])
        (best,) = rates[32][1]
        self.assertEqual(rates[64][0], [best / 2, best, 2 * best])
        # The highest wins at this length, or the grid could not be seen to move.
        self.assertEqual(best, 4e-3)

    def test_gradient_noise_of_every_batch_size(self):
        self.run_command("--optimizers=adamw", "--learning_rates=1e-2", command=gradient_noise)
        tree = json.loads((self.folder / "out/results.json").read_text())
        found = [(row["tokens"], row["step"]) for row in tree["rows"]]
        self.assertEqual(found, [(32, 0), (32, 6), (64, 0), (64, 6)])
        small, _, large, _ = tree["rows"]
        for row in tree["rows"]:
            # The same batch at both parameters has no noise to differ by.
            self.assertLess(row["exact"], row["difference"])
        # Twice the tokens, half the variance: about, as one pair of batches says.
        self.assertBetween(small["noise"] / large["noise"], 1.3, 3.0)

    @parameterized.named_parameters(
        ("not_a_number", ["--batch_tokens=32,x"], "--batch_tokens: Expected a whole number"),
        ("twice", ["--batch_tokens=32,32"], "Expected --batch_tokens that differ"),
        ("none", ["--batch_tokens="], "--batch_tokens: Expected a whole number"),
        ("zero", ["--batch_tokens=0"], "--batch_tokens: Expected a whole number from 1"),
        ("window", ["--batch_tokens=36"], "multiples of a window's 8"),
        ("microbatch", ["--microbatch_tokens=24", "--batch_tokens=64"], "above --microbatch"),
        ("optimizer", ["--optimizers=adamw,sgd"], "got 'sgd'"),
        ("heads", ["--heads=3"], "multiple of the heads, got 16 and 3"),
        ("cudnn", ["--attention=cudnn"], "where there is no GPU"),
    )
    def test_a_wrong_flag_ends_with_its_reason(self, given: list[str], message: str):
        with self.assertRaises(SystemExit) as context:
            self.run_command(*given)
        self.assertStartsWith(str(context.exception.code), "large_batch: ")
        self.assertIn(message, str(context.exception.code))
        self.assertFalse((self.folder / "out").exists())


if __name__ == "__main__":
    absltest.main()
