"""The table and the plot of results at several batch sizes, from files made up for it."""

import contextlib
import io
import json
import pathlib
import tempfile
from typing import Any

import PIL.Image
from absl.testing import absltest, parameterized

from benchmarks.training import batch_axis, curves, evidence


def _record(optimizer: str, seed: int, loss: float) -> dict[str, Any]:
    return {
        "optimizer": optimizer,
        "learning_rate": 1e-3,
        "seed": seed,
        "steps": [0, 10],
        "curves": {"validation_loss": [9.0, loss]},
        "train_loss": [8.0],
        "seconds_per_step": 0.1,
        "state_bytes": 8,
    }


class BatchAxisTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def write(self, tokens: int, name: str = "large_batch", steps: int = 10) -> str:
        # muon is 0.5 below adamw at the small batch, by more than the spread of 0.2; at the large
        # one 0.1, by less; mars has run at one seed of two.
        gain = 0.5 if tokens == 64 else 0.1
        records = [
            _record(optimizer, seed, 5.0 - shift + 0.2 * seed)
            for optimizer, shift in (("adamw", 0.0), ("muon", gain))
            for seed in (0, 1)
        ]
        tree = {
            "name": name,
            "task": {
                "tokens_per_step": tokens,
                "microbatch": tokens,
                "model_flops_per_step": tokens,
                "schedule": {"steps": steps},
            },
            "protocol": {"seeds": [0], "final_seeds": [0, 1]},
            "records": [*records, _record("mars", 0, 4.0)],
        }
        path = self.folder / f"{tokens}.json"
        path.write_text(json.dumps(tree))
        return str(path)

    def test_table_and_plot(self):
        files = [self.write(512), self.write(64)]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            given = [*files, "--pairs=muon/adamw", f"--out={self.folder}"]
            self.assertEqual(evidence.main(given), 0)
        self.assertIn(str(self.folder / "batch_axis.md"), output.getvalue())
        self.assertEqual(
            (self.folder / "batch_axis.md").read_text(),
            "| loss (rate), tokens a batch: | 64 | 512 |\n"
            "| --- | --- | --- |\n"
            "| AdamW (0.9, 0.95) | 5.100 (0.001) | 5.100 (0.001) |\n"
            "| Muon (0.95) | 4.600 (0.001) | 5.000 (0.001) |\n\n"
            "| difference, tokens a batch: | 64 | 512 |\n"
            "| --- | --- | --- |\n"
            "| Muon (0.95) minus AdamW (0.9, 0.95) | -0.500, wins | -0.100, no winner |\n",
        )
        with PIL.Image.open(self.folder / "batch_axis.png") as picture:
            self.assertStartsWith(
                picture.info["Description"],
                "validation loss (nats per token): AdamW; Muon. "
                "minus AdamW (nats per token): Muon. Data ",
            )

    @parameterized.parameters(*evidence.AXES)
    def test_what_is_shown_is_of_the_recorded_results(self, name: str):
        paths, view, drawn = evidence.AXES[name]
        axis = batch_axis.read(paths)
        text = (evidence.RESULTS / f"{name}.md").read_text()
        self.assertEqual(text, batch_axis.table(axis, view) + "\n")
        with PIL.Image.open(drawn) as picture:
            made = batch_axis.panels(axis, view)
            self.assertEqual(picture.info["Description"], curves.describe(made))
        self.assertLessEqual(max(len(panel.curves) for panel in made), 6)

    def test_a_band_is_from_the_lowest_to_the_highest_seed(self):
        axis = batch_axis.read([pathlib.Path(self.write(64))])
        losses, _ = batch_axis.panels(
            axis, batch_axis.View({"adamw": "A", "muon": "M"}, [("muon", "adamw")])
        )
        (_, muon) = losses.curves
        self.assertEqual((muon.x, muon.low, muon.high), ([64], [4.5], [4.7]))

    @parameterized.named_parameters(
        ("pair", {}, ["--pairs=muon/lion"], "--pairs of adamw, muon"),
        ("others", {"name": "gpt2"}, ["--pairs=muon/adamw"], "results of large_batch"),
        ("tasks", {"steps": 20}, ["--pairs=muon/adamw"], "differ in the batch size alone"),
    )
    def test_what_cannot_be_compared_ends_with_its_reason(self, changes, flags, message):
        files = [self.write(64), self.write(512, **changes)]
        with self.assertRaises(SystemExit) as context:
            evidence.main([*files, *flags])
        self.assertStartsWith(str(context.exception.code), "evidence: Expected")
        self.assertIn(message, str(context.exception.code))

    def test_equal_numbers_of_tokens_can_be_compared(self):
        files = [pathlib.Path(self.write(64, steps=80)), pathlib.Path(self.write(512))]
        self.assertEqual(list(batch_axis.read(files)), [64, 512])

    def test_rows_of_two_files_are_joined(self):
        file = pathlib.Path(self.write(64))
        tree = json.loads(file.read_text())
        parts = []
        for optimizer in ("adamw", "muon"):
            records = [r for r in tree["records"] if r["optimizer"] == optimizer]
            parts.append(self.folder / f"{optimizer}.json")
            parts[-1].write_text(json.dumps({**tree, "records": records}))
        self.assertEqual(batch_axis.read(parts), batch_axis.read([file]))


if __name__ == "__main__":
    absltest.main()
