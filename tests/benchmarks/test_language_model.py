"""The command from its flags to its files."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl import flags
from absl.testing import absltest, flagsaver, parameterized

from benchmarks import language_model


class CommandTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.text = self.folder / "text.txt"
        self.text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)

    def run_command(self, *arguments: str, text: bool = True) -> str:
        output = io.StringIO()
        given = [f"--data_file={self.text}"] if text else []
        with flagsaver.flagsaver(), contextlib.redirect_stdout(output):
            flags.FLAGS(["language_model", f"--out={self.folder / 'out'}", *given, *arguments])
            language_model.main(["language_model"])
        return output.getvalue()

    def test_a_comparison_writes_its_files_and_prints_who_won(self):
        printed = self.run_command(
            "--optimizers=adamw,mars,mars:gamma=0.025",
            "--learning_rates=1e-2,2e-3",
            "--seeds=0,1",
            "--size=tiny",
            "--context=16",
            "--batch_size=4",
            "--steps=20",
            "--eval_every=10",
        )
        self.assertStartsWith((self.folder / "out/curves.png").read_bytes(), b"\x89PNG")
        results = json.loads((self.folder / "out/results.json").read_text())
        self.assertLen(results["runs"], 2 * 2 * 2)
        for run in results["runs"]:
            self.assertLess(run["train_loss"][-1], run["train_loss"][0])
            self.assertLess(run["validation_loss"][-1], run["validation_loss"][0])
        starts = {(run["seed"], run["validation_loss"][0]) for run in results["runs"]}
        self.assertLen(starts, 2)
        self.assertContainsSubset(
            {"device", "jax", "jaxlib", "optax", "flax", "mars_optax", "python", "commit"},
            results["environment"],
        )
        self.assertEqual(results["settings"]["learning_rates"], [2e-3, 1e-2])
        self.assertEqual(results["settings"]["optimizers"]["adamw"]["weight_decay"], 0.1)
        mars = results["results"][1]
        self.assertEqual(mars["optimizer"], "mars")
        self.assertLen(mars["grid"], 2)
        self.assertIn(mars["verdict"], printed)
        self.assertIn("`mars:gamma=0.025` is left out: its settings are those of `mars`", printed)
        self.assertIn("state bytes", printed)
        self.assertIn(f"sha256 {results['data']['sha256']}", printed)

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
        self.assertStartsWith(str(context.exception.code), "language_model: Expected")
        self.assertIn(message, str(context.exception.code))
        self.assertFalse((self.folder / "out").exists())

    def test_a_validation_file_alone_is_an_error(self):
        with self.assertRaisesRegex(SystemExit, "Expected --data_file beside"):
            self.run_command(f"--validation_file={self.text}", text=False)


if __name__ == "__main__":
    absltest.main()
