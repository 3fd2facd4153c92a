"""The command from its flags to its files."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized

from benchmarks.training import gpt2, language_model, models
from tests.benchmarks import flags


class CommandTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.text = self.folder / "text.txt"
        self.text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)

    def run_command(self, *arguments: str, text: bool = True) -> str:
        output = io.StringIO()
        given = [f"--data_file={self.text}"] if text else []
        with contextlib.redirect_stdout(output):
            language_model.main(
                flags.last(f"--out={self.folder / 'out'}", "--devices=1", *given, *arguments)
            )
        return output.getvalue()

    def test_a_comparison_writes_its_files_and_prints_who_won(self):
        printed = self.run_command(
            "--optimizers=adamw,mars,mars:gamma=0.025",
            "--learning_rates=1e-2,2e-3",
            "--seeds=0,1",
            "--width=32",
            "--layers=1",
            "--context=16",
            "--batch_size=4",
            "--steps=20",
            "--eval_every=10",
            "--extend=0",
            "--diagnose",
        )
        for name in ("curves.png", "diagnostics.png"):
            self.assertStartsWith((self.folder / "out" / name).read_bytes(), b"\x89PNG")
        results = json.loads((self.folder / "out/results.json").read_text())
        records = results["records"]
        self.assertLen(records, 2 * 2 * 2)
        for record in records:
            loss = record["curves"]["validation_loss"]
            self.assertLess(record["train_loss"][-1], record["train_loss"][0])
            self.assertLess(loss[-1], loss[0])
            self.assertEqual("measure/cosine" in record["curves"], record["optimizer"] == "mars")
            self.assertEqual(record["every_setting"]["eps"], 1e-8)
        starts = {(record["seed"], record["curves"]["validation_loss"][0]) for record in records}
        self.assertLen(starts, 2)
        self.assertContainsSubset(
            {"device", "jax", "jaxlib", "optax", "flax", "mars_optax", "python", "commit"},
            results["environments"][0],
        )
        self.assertEqual(results["task"]["model"]["dtype"], "float32")
        self.assertFalse(results["task"]["model"]["tied"])
        self.assertRegex(printed, r"\nmars against adamw: (mars wins|adamw wins|no winner)")
        self.assertIn("`mars:gamma=0.025` is left out: its settings are those of `mars`", printed)
        self.assertIn("state bytes", printed)
        self.assertStartsWith(printed.partition("\n")[2], "language_model: adamw, mars, ")

    def test_the_default_model_is_the_one_of_the_recorded_runs(self):
        args = language_model.parser().parse_args(["--devices=1"])
        config = gpt2.model_config(args, 256, "cpu")
        self.assertEqual(
            config, models.GPTConfig(256, 64, 64, 3, 4, dtype="float32", attention="xla")
        )
        self.assertEqual((args.steps, args.batch_size, args.eval_every), (1000, 16, 50))
        self.assertEqual(args.eval_windows, 256)

    @parameterized.named_parameters(
        ("missing_file", ["--data_file=nowhere.txt"], "'nowhere.txt', which is not there"),
        ("small_file", ["--batch_size=100000"], "Expected at least 6400001 training tokens"),
        ("optimizer", ["--optimizers=adamw,sgd"], "got 'sgd'"),
        ("learning_rate", ["--learning_rates=1e-3,x"], "learning rates from"),
        ("no_learning_rate", ["--learning_rates="], "learning rates from"),
        ("seed", ["--seeds=0,a"], "whole numbers"),
        ("seed_twice", ["--seeds=0,0"], "different whole numbers"),
        ("same_seed", ["--seeds=1,01"], "as --seeds, got '1,01'"),
        ("large_seed", ["--seeds=99999999999999999999"], "below 2**32"),
        ("out", [f"--out={__file__}"], "a folder that can be made as --out"),
        ("no_out", ["--out="], "a folder that can be made as --out"),
        ("warmup", ["--steps=10", "--warmup_steps=10"], "warm-up shorter than the run"),
        ("vocabulary", ["--vocabulary_size=100"], "vocabulary_size=100, got 122"),
    )
    def test_a_wrong_flag_ends_with_its_reason(self, arguments: list[str], message: str):
        with self.assertRaises(SystemExit) as context:
            self.run_command(*arguments)
        self.assertRegex(str(context.exception.code), r"^language_model: (--\w+: )?Expected.*$")
        self.assertIn(message, str(context.exception.code))
        self.assertFalse((self.folder / "out").exists())

    def test_a_validation_file_alone_is_an_error(self):
        with self.assertRaisesRegex(SystemExit, "Expected --data_file beside"):
            self.run_command(f"--validation_file={self.text}", text=False)


if __name__ == "__main__":
    absltest.main()
