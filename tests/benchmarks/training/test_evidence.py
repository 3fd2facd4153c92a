"""The pictures and tables that are shown are those of the recorded results; so are the README's."""

import dataclasses
import itertools
import math
import pathlib
import re
import tempfile
import warnings
from unittest import mock

import numpy as np
import PIL.Image
from absl.testing import absltest, parameterized
from matplotlib.text import Text

from benchmarks.training import curves, evidence, optimizers, report
from benchmarks.training.report import Run

_ROOT = pathlib.Path(evidence.__file__).parents[2]


def summary(name: str, losses: list[float], *, rate: float = 1e-3) -> report.Summary:
    runs = [
        Run(
            optimizer=name,
            learning_rate=rate,
            seed=seed,
            steps=[0, 10, 20],
            validation_loss=[5.0, (5.0 + loss) / 2, loss],
            train_loss=[4.0, 3.0],
            seconds_per_step=0.5,
            state_bytes=1000,
        )
        for seed, loss in enumerate(losses)
    ]
    return report.summarize(runs)[0]


def recorded(stem: str) -> set[str]:
    """The losses of a file as pages write them: mean, lowest and highest over seeds."""
    tree = evidence.read(evidence.RESULTS / f"{stem}.json")
    domain, digits = (evidence.DOMAINS[tree["name"]], 2 if tree["name"] == "vision" else 3)
    names = dict.fromkeys(record["optimizer"] for record in tree["records"])
    found, _ = evidence.summarize(
        tree, [optimizers.parse_optimizer(name, domain) for name in names]
    )
    values = [v for each in found for v in (each.loss, min(each.losses), max(each.losses))]
    return {f"{value:.{digits}f}" for value in values}


class RecordedTest(parameterized.TestCase):
    @parameterized.parameters(*evidence.TABLES)
    def test_tables_are_those_of_the_results(self, name: str):
        self.assertEqual(
            (evidence.RESULTS / f"{name}.md").read_text(), evidence.recorded_page(name)
        )

    @parameterized.parameters(*evidence.PICTURES)
    def test_pictures_show_the_results(self, name: str):
        with PIL.Image.open(evidence.IMAGES / f"{name}.png") as picture:
            self.assertEqual(picture.info["Description"], curves.describe(evidence.panels(name)))

    def test_no_other_picture_is_kept(self):
        kept = [path.stem for path in evidence.IMAGES.glob("*.png")]
        axes = [picture.stem for _, _, picture in evidence.AXES.values()]
        self.assertCountEqual(kept, [*evidence.PICTURES, *axes])

    @parameterized.parameters(*evidence.PICTURES)
    def test_pictures_have_few_curves_and_are_on_a_page(self, name: str):
        for panel in evidence.panels(name):
            self.assertLessEqual(len(panel.curves), 6)
        pages = [_ROOT / "README.md", *(_ROOT / "docs").glob("*.md")]
        shown = [
            re.search(rf"!\[[^\]]{{20,}}\]\([^)]*images/{name}.png\)", p.read_text()) for p in pages
        ]
        self.assertTrue(any(shown), "on no page, or without a text for who cannot see it")

    def test_tables_of_the_pages_have_at_most_five_columns(self):
        pages = [_ROOT / "README.md", _ROOT / "docs/evidence.md", _ROOT / "docs/which_mars.md"]
        pages.append(_ROOT / "docs/large_batches.md")
        pages += evidence.RESULTS.glob("*.md")
        for page in pages:
            rows = re.findall(r"^\|.*\|$", page.read_text(), re.MULTILINE)
            self.assertNotEmpty(rows, page.name)
            self.assertLessEqual(max(row.count(" | ") for row in rows), 4, page.name)

    def test_losses_and_errors_of_the_evidence_are_recorded(self):
        known = set().union(*map(recorded, evidence.TABLES))
        page = (_ROOT / "docs" / "evidence.md").read_text().split("## What others find")[0]
        rows = "\n".join(re.findall(r"^\|.*\|$", page, re.MULTILINE))
        told = set(re.findall(r"(?<![-+.\d])(?:4\.\d{3}|3\.9\d{2}|\d{1,2}\.\d{2})(?![\d)])", rows))
        self.assertGreater(len(told), 60)
        self.assertEmpty(told - known - {"0.05", "0.95", "0.99"})

    def test_losses_and_errors_of_large_batches_are_recorded(self):
        stems = ("mars_m_gamma_524288_h200", "gpt2_small_572_h200", "vision_resnet18_1024_h200")
        known = recorded("large_batch_524288_h200").union(*map(recorded, stems))
        # Of AdamW all rates are shown.
        small = evidence.read(evidence.RESULTS / "gpt2_small_572_h200.json")["records"]
        ends = [record["curves"]["validation_loss"][-1] for record in small]
        ends += [record["train_loss"][-1] for record in small]
        known |= {f"{loss:.3f}" for loss in ends}
        page = (_ROOT / "docs" / "large_batches.md").read_text()
        answers = page.split("## GPT-2 small")[1].split("<details>")[0]
        rows = "\n".join(re.findall(r"^\|.*\|$", answers, re.MULTILINE))
        told = re.findall(r"(?<![-+.\d])(?:[3-5]\.\d{3}|(?:9|[12]\d)\.\d{2})(?!\d)", rows)
        self.assertLen(told, 55)
        self.assertEmpty(set(told) - known)
        gradients = page.split("### Equal numbers of gradients")[1].split("\n## ")[0]
        rows = re.findall(r"^\|.* steps \|.*$", gradients, re.MULTILINE)
        for row, stem in zip(rows, ("nadamw_640_{}_h200", "large_batch_{}_h200"), strict=True):
            for loss, size in zip(
                re.findall(r"[45]\.\d{3}", row), (8192, 32768, 131072), strict=True
            ):
                self.assertIn(loss, recorded(stem.format(size)))
        rates = page.split("### A rate of their own for embeddings")[1].split("###")[0]
        rows = [
            row.split("|")[2:4] for row in re.findall(r"^\|.*\(0\.\d+\) \|$", rates, re.MULTILINE)
        ]
        self.assertLen(rows, 5)
        for column, size in zip(zip(*rows, strict=True), (8192, 131072), strict=True):
            losses = {cell.split()[0] for cell in column if cell.strip()}
            self.assertContainsSubset(losses, recorded(f"large_batch_{size}_h200"))

    def test_the_readmes_table_has_the_recorded_numbers(self):
        text = (_ROOT / "README.md").read_text()
        for name, label in evidence.PICTURES["text"][0].labels.items():
            (row,) = re.findall(rf"^\| {label} .*$", text, re.MULTILINE)
            _, memory, cost, *losses = (cell.strip(" *") for cell in row.strip("|").split("|"))
            records = []
            for stem in ("gpt2_33m_4000_h200", "gpt2_33m_8000_h200"):
                tree = evidence.read(evidence.RESULTS / f"{stem}.json")
                chosen = [optimizers.parse_optimizer(name, evidence.DOMAINS["gpt2"])]
                ((found,), _) = evidence.summarize(tree, chosen)
                records.append(found)
            self.assertEqual(losses, [f"{found.loss:.3f}" for found in records], label)
            size = records[0].runs[0].state_bytes / tree["task"]["parameters"]
            self.assertEqual(memory, f"{size:.1f}", label)
            seconds = np.median([run.seconds_per_step for run in records[0].runs])
            self.assertEqual(cost, f"{1000 * seconds:.1f}", label)


class NamesTest(parameterized.TestCase):
    @parameterized.parameters(
        ("gpt2", "adamw:b2=0.999", "AdamW (0.9, 0.999)"),
        ("gpt2", "mars", "MARS-AdamW (0.9, 0.95), gamma 0.025"),
        ("vision", "mars", "MARS-AdamW (0.95, 0.99), gamma 0.025"),
        ("gpt2", "mars:max_norm=none", "MARS-AdamW (0.9, 0.95), gamma 0.025, max_norm none"),
        ("gpt2", "muon:beta=0.9:b2_1d=0.99", "Muon (0.9), b2_1d 0.99"),
    )
    def test_a_row_says_its_betas_and_gamma_given_or_not(
        self, domain: str, text: str, expected: str
    ):
        chosen = optimizers.parse_optimizer(text, evidence.DOMAINS[domain])
        self.assertEqual(curves.row_name(chosen), expected)

    def test_every_optimizer_has_a_name_for_readers(self):
        for name in optimizers.OPTIMIZERS:
            self.assertNotEqual(curves.name(name), name)
        self.assertEqual(curves.name("mars:gamma=0.1"), "MARS-AdamW, gamma 0.1")

    def test_tables_and_folder_are_for_files_that_are_named(self):
        write = self.enter_context(mock.patch.object(evidence, "write_recorded"))
        for flag in ("--tables=main", "--pairs=a/b", "--out=x"):
            with self.assertRaises(SystemExit) as raised:
                evidence.main([flag])
            self.assertTrue(raised.exception.code)
        write.assert_not_called()


class CurvesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "curves.png"

    @parameterized.parameters(math.nan, math.inf, 0.0)
    def test_runs_without_a_positive_loss_are_drawn(self, loss: float):
        diverged = summary("adamw", [loss])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            curves.plot([diverged], self.path)
            curves.plot([diverged, summary("mars", [1.0])], self.path)

    def test_the_band_is_from_the_lowest_to_the_highest_seed(self):
        (curve,) = curves.over_steps([summary("mars", [1.0, 2.0, 1.5])]).curves
        self.assertEqual((curve.low[-1], curve.mean[-1], curve.high[-1]), (1.0, 1.5, 2.0))
        self.assertEqual(curve.x, [10, 20])
        self.assertEqual(curve.label, "MARS-AdamW: 1.500")

    @parameterized.product(last=(1.0, 1.01, 3.0), settings=("", ":b1=0.95:correction=exact" * 2))
    def test_names_do_not_overlap_and_are_in_the_picture(self, last: float, settings: str):
        names = ["adamw", "nadamw", "muon", f"mars{settings}", "mars_m", "lion"]
        losses = np.linspace(1.0, last, len(names))
        summaries = [summary(*pair) for pair in zip(names, [[x] for x in losses], strict=True)]
        with mock.patch.object(curves.plt, "close") as close:
            curves.plot(summaries, self.path)
        (figure,), _ = close.call_args
        figure.draw_without_rendering()  # at the resolution of the figure, not of the file
        boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # no lines
        curves.plt.close(figure)
        self.assertLen(boxes, len(names))
        boxes.sort(key=lambda box: box.y0)
        for lower, upper in itertools.pairwise(boxes):
            self.assertLessEqual(lower.y1, upper.y0 + 1)
        inside = figure.bbox
        for box in boxes:
            self.assertTrue(inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1))

    def test_the_file_says_what_it_shows(self):
        pair = [summary("adamw", [3.0]), summary("muon", [1.0])]
        curves.plot(pair, self.path)
        with PIL.Image.open(self.path) as picture:
            said = picture.info["Description"]
        self.assertStartsWith(
            said, "validation loss (nats per token): AdamW: 3.000; Muon: 1.000. Data "
        )
        other = curves.over_steps([pair[0], summary("muon", [1.0001])])
        self.assertNotEqual(curves.describe([other]), said)

    def test_learning_rates_are_drawn_where_several_were_tried(self):
        swept = dataclasses.replace(summary("mars", [1.0]), grid={1e-3: 1.0, 2e-3: 2.0})
        (curve,) = curves.over_rates([swept]).curves
        self.assertEqual((curve.x, curve.mean), ([1e-3, 2e-3], [1.0, 2.0]))
        heights = []
        for chosen in (swept, summary("mars", [1.0])):
            curves.plot([chosen], self.path)
            with PIL.Image.open(self.path) as picture:
                heights.append(picture.height)
        self.assertEqual(heights[0], 2 * heights[1])


if __name__ == "__main__":
    absltest.main()
