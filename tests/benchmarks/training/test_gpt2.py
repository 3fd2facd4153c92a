"""GPT-2 runs: from flags to files, in pieces, together, divided; the same data for everyone."""

import contextlib
import functools
import io
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from benchmarks.training import gpt2, grid, resumable, study
from tests.benchmarks import flags
from tests.benchmarks.training import test_grid

_SIZES = ("--layers=1", "--width=16", "--context=8", "--eval_windows=4", "--dtype=float32")
_LENGTH = ("--steps=28", "--eval_every=14", "--batch_size=4")
_NEVER = resumable.Deadline(None, 0.0)


def build(*given: str) -> study.Study:
    text = pathlib.Path(__file__)
    given = (*_SIZES, *_LENGTH, "--devices=1", f"--data_file={text}", *given)
    return gpt2.build(gpt2.parser().parse_args(flags.last(*given)))


@functools.cache
def task(name: str, *flags: str) -> tuple[resumable.Task, grid.Cell]:
    comparison = build(f"--optimizers={name}", *flags)
    ((optimizer, _),) = comparison.optimizers
    return comparison.make(optimizer), grid.Cell(optimizer, 1e-2, 0)


class FolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def train(
        self, name: str, *flags: str, seeds: tuple[int, ...] = (0,), rate: float = 1e-2
    ) -> list[grid.Record]:
        work, cell = task(name, *flags)
        cells = [grid.Cell(cell.optimizer, rate, seed) for seed in seeds]
        return resumable.train(work, cells, self.folder / "run", deadline=_NEVER)


class TrainingTest(FolderTest):
    def check_pieces(self, name: str) -> None:
        (whole,) = self.train(name)
        work, cell = task(name)
        for _ in range(2):
            stopped = resumable.train(
                work, [cell], self.folder / "pieces", deadline=test_grid.After(1)
            )
            self.assertIsNone(stopped)
        # The rest, from the state on disk: the previous gradient, too, has to be the same.
        (pieces,) = resumable.train(work, [cell], self.folder / "pieces", deadline=_NEVER)
        self.assertEqual(pieces["pieces"], 3)
        self.assertEqual(pieces["curves"], whole["curves"])
        self.assertEqual(pieces["train_loss"], whole["train_loss"])
        self.assertLess(whole["train_loss"][-1], whole["train_loss"][0])

    def test_a_run_in_pieces_is_bit_for_bit_the_run_at_once(self):
        self.check_pieces("mars")

    @parameterized.parameters(
        "mars_m", "mars:correction=exact", "mars:prev_grad_dtype=float8_e4m3fn"
    )
    @pytest.mark.slow
    def test_a_run_with_others_in_pieces_is_bit_for_bit_the_run_at_once(self, name: str):
        self.check_pieces(name)

    def test_optimizers_start_from_the_same_weights_and_see_the_same_batches(self):
        # So small a learning rate leaves float32 weights as they are: losses show the batches.
        adamw, mars = (self.train(name, rate=1e-30)[0] for name in ("adamw", "mars"))
        first = [run["curves"]["validation_loss"][0] for run in (adamw, mars)]
        self.assertEqual(*first)
        np.testing.assert_allclose(adamw["train_loss"], mars["train_loss"], rtol=1e-6)
        other = self.train("adamw", rate=1e-30, seeds=(1,))[0]
        self.assertNotEqual(other["curves"]["validation_loss"][0], first[0])

    @pytest.mark.slow
    def test_runs_made_together_are_those_made_alone(self):
        together = self.train("mars", seeds=(0, 1))
        for seed, run in enumerate(together):
            (alone,) = self.train("mars", seeds=(seed,))
            np.testing.assert_allclose(
                run["curves"]["validation_loss"], alone["curves"]["validation_loss"], rtol=1e-4
            )
            self.assertEqual(run["state_bytes"], alone["state_bytes"])
            self.assertEqual((run["together"], alone["together"]), (2, 1))

    @parameterized.parameters("--microbatch=2", "--devices=2")
    @pytest.mark.slow
    def test_a_divided_batch_gives_the_same_losses(self, flag: str):
        (whole,), (divided,) = self.train("mars"), self.train("mars", flag)
        np.testing.assert_allclose(divided["train_loss"], whole["train_loss"], rtol=1e-4)


class TaskTest(FolderTest):
    def test_everything_that_decides_on_a_result_is_in_the_key_of_a_run(self):
        given = build()
        optimizer, _ = given.optimizers[0]
        cell = grid.Cell(optimizer, 1e-2, 0)
        other = self.folder / "other.txt"
        other.write_text("another text to evaluate on, of more than four windows")
        flags = (
            "--microbatch=2",
            "--batch_size=8",
            "--eval_windows=3",
            "--steps=29",
            "--layers=2",
            f"--validation_file={other}",
            f"--data_file={gpt2.__file__}",
        )
        keys = {grid.key(cell, build(flag).task) for flag in flags}
        self.assertLen(keys | {grid.key(cell, given.task)}, len(flags) + 1)

    def test_another_split_of_one_file_has_another_key(self):
        given = build().task
        with mock.patch.object(
            gpt2.data, "load_files", functools.partial(gpt2.data.load_files, held_out=0.1)
        ):
            other = build().task
        self.assertNotEqual(other.pop("validation_sha256"), given.pop("validation_sha256"))
        self.assertEqual(other, given)


class CommandTest(FolderTest):
    def run_command(self, *more: str, text: bool = True) -> str:
        output = io.StringIO()
        given = [f"--data_file={pathlib.Path(__file__)}"] if text else []
        with contextlib.redirect_stdout(output):
            arguments = [*_SIZES, *_LENGTH, *given, f"--out={self.folder / 'out'}", *more]
            self.assertEqual(gpt2.main(flags.last("--devices=1", *arguments)), 0)
        return output.getvalue()

    def test_finished_runs_are_not_made_again(self):
        flags = ("--optimizers=adamw", "--learning_rates=1e-2", "--seeds=0,1")
        stopped = self.run_command(*flags, "--limit=0")
        self.assertIn("Runs done: 0", stopped)
        self.assertIn("Give the same command again", stopped)
        printed = self.run_command(*flags)
        results = json.loads((self.folder / "out/results.json").read_text())
        self.assertLen(results["records"], 2)
        for record in results["records"]:
            self.assertLess(record["train_loss"][-1], record["train_loss"][0])
            self.assertGreater(record["seconds_per_step"], 0)
        self.assertContainsSubset({"device", "jax", "flax", "commit"}, results["environments"][0])
        self.assertStartsWith((self.folder / "out/curves.png").read_bytes(), b"\x89PNG")
        self.assertEmpty(list((self.folder / "out/checkpoints").iterdir()))
        log = list(grid.read_lines(self.folder / "out/log.jsonl"))
        self.assertEqual([line["step"] for line in log], [14, 28, 14, 28])
        with mock.patch.object(resumable, "train", side_effect=AssertionError):
            again = self.run_command(*flags)
        table = printed[printed.index("optimizer") : printed.index("Runs done")]
        self.assertIn(table, again)

    @parameterized.named_parameters(
        ("missing_file", ["--data_file=nowhere.txt"], "'nowhere.txt', which is not there"),
        ("optimizer", ["--optimizers=adamw,sgd"], "got 'sgd'"),
        ("table", ["--table=mars"], "as --table, got 'mars'"),
        ("no_table", ["--table="], "as --table, got ''"),
        ("matrices", ["--optimizers=mars:matrices=dense"], "matrices out of all, hidden"),
        ("learning_rate", ["--learning_rates=1e-3,x"], "learning rates from"),
        ("no_learning_rate", ["--learning_rates="], "learning rates from"),
        ("seed", ["--seeds=0,a"], "as --seeds, got '0,a'"),
        ("final_seed", ["--final_seeds=1,1"], "as --final_seeds, got '1,1'"),
        ("no_final_seed", ["--final_seeds="], "as --final_seeds, got ''"),
        ("same_seed", ["--seeds=1,01"], "as --seeds, got '1,01'"),
        ("large_seed", ["--seeds=4294967296"], "below 2**32"),
        ("long_seed", [f"--seeds={'9' * 5000}"], "below 2**32"),
        (
            "final_fraction",
            ["--final_fraction=nan"],
            "--final_fraction: Expected a finite number from 0 to 1, got",
        ),
        ("out", [f"--out={__file__}"], "a folder that can be made as --out"),
        ("no_out", ["--out="], "a folder that can be made as --out"),
        ("warmup", ["--warmup_steps=28"], "a warm-up shorter than the run, got 28"),
        ("layers", [f"--layers={10**24}"], "--layers: Expected a whole number from 1 to 1000"),
        ("heads", ["--heads=3"], "multiple of the heads, got 16 and 3"),
        ("microbatch", ["--microbatch=3"], "multiple of the microbatch"),
        ("cudnn", ["--attention=cudnn"], "--attention=auto or --attention=xla where there is no"),
        ("devices", ["--devices=3"], "microbatch that is a multiple"),
    )
    def test_a_wrong_flag_ends_with_its_reason(self, flags: list[str], message: str):
        with self.assertRaises(SystemExit) as context:
            self.run_command(*flags)
        self.assertRegex(str(context.exception.code), r"^gpt2: (--\w+: )?Expected.*$")
        self.assertIn(message, str(context.exception.code))
        self.assertFalse((self.folder / "out").exists())

    @parameterized.parameters("--limit=nan", "--limit=-1", "--save_every=inf", "--save_every=x")
    def test_seconds_are_finite_numbers_from_zero(self, flag: str):
        with self.assertRaisesRegex(SystemExit, "Expected a finite number from 0 to inf, got"):
            self.run_command(flag)

    def test_a_validation_file_alone_is_an_error(self):
        with self.assertRaisesRegex(SystemExit, "Expected --data_file beside"):
            self.run_command("--validation_file=a.txt", text=False)


if __name__ == "__main__":
    absltest.main()
