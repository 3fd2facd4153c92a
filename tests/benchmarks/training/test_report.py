"""Choosing learning rates, judging differences, and what is printed and written."""

import dataclasses
import json
import math
import pathlib
import re
import tempfile

from absl.testing import absltest, parameterized

from benchmarks import output
from benchmarks.training import evidence, report
from benchmarks.training.report import Run


def run(optimizer: str, loss: float, *, seed: int = 0, rate: float = 1e-3) -> Run:
    return Run(
        optimizer=optimizer,
        learning_rate=rate,
        seed=seed,
        steps=[0, 10, 20],
        validation_loss=[5.0, (5.0 + loss) / 2, loss],
        train_loss=[4.0, 3.0],
        seconds_per_step=0.5,
        state_bytes=1000,
    )


def summary(optimizer: str, losses: list[float]) -> report.Summary:
    runs = [run(optimizer, loss, seed=seed) for seed, loss in enumerate(losses)]
    return report.summarize(runs)[0]


class SummaryTest(parameterized.TestCase):
    def test_the_learning_rate_with_the_lowest_mean_over_seeds_is_chosen(self):
        runs = [
            run("mars", loss, seed=seed, rate=rate)
            for rate, losses in ((1e-3, (1.0, 4.0)), (2e-3, (2.0, 2.2)), (4e-3, (3.0, 3.0)))
            for seed, loss in enumerate(losses)
        ]
        (chosen,) = report.summarize(runs)
        self.assertEqual(chosen.learning_rate, 2e-3)
        self.assertEqual(chosen.losses, [2.0, 2.2])
        self.assertFalse(chosen.at_edge)
        self.assertEqual(chosen.grid, {1e-3: 2.5, 2e-3: 2.1, 4e-3: 3.0})

    @parameterized.parameters(((1.0, 2.0, 3.0), True), ((3.0, 2.0, 1.0), True), ((1.0,), False))
    def test_the_edge_of_a_grid_is_marked(self, losses: tuple[float, ...], at_edge: bool):
        runs = [run("mars", loss, rate=10.0**-index) for index, loss in enumerate(losses)]
        (chosen,) = report.summarize(runs)
        self.assertEqual(chosen.at_edge, at_edge)
        self.assertEqual("(edge)" in report.table([chosen]), at_edge)
        self.assertEqual("wider grid" in report.text([chosen]), at_edge)

    def test_a_diverged_learning_rate_is_never_chosen(self):
        runs = [run("mars", math.nan, rate=1.0), run("mars", 9.0, rate=0.1)]
        self.assertEqual(report.summarize(runs)[0].learning_rate, 0.1)

    def test_adamw_is_the_baseline_wherever_it_stands(self):
        pair = [summary("mars", [1.0]), summary("adamw", [2.0])]
        self.assertEqual(report.baseline_of(pair).optimizer, "adamw")

    def test_without_adamw_the_first_is_the_baseline(self):
        pair = [summary("muon", [1.0]), summary("mars", [2.0])]
        self.assertEqual(report.baseline_of(pair).optimizer, "muon")


class StepsTest(parameterized.TestCase):
    def test_the_first_evaluation_at_the_loss_counts(self):
        self.assertEqual(report.steps_to_reach(run("mars", 1.0), 3.0), 10)
        self.assertEqual(report.steps_to_reach(run("mars", 1.0), 2.9), 20)
        self.assertIsNone(report.steps_to_reach(run("mars", 1.0), 0.9))

    def test_every_seed_is_compared_with_the_baseline_at_that_seed(self):
        baseline = summary("adamw", [3.0, 2.0])
        self.assertEqual(report.mean_steps_to_reach(summary("mars", [1.0, 2.0]), baseline), 15)

    @parameterized.parameters(
        ([1.0, 2.0], [3.0, 2.0], "15", "7.5"),
        ([1.0, 2.1], [3.0, 2.0], "1 of 2 seeds", "1 of 2 seeds"),
        ([3.1, 2.1], [3.0, 2.0], "never", "never"),
        ([1.0, 2.0], [math.inf, math.nan], "-", "-"),
        ([1.0, 2.0], [3.0, math.nan], "-", "-"),
    )
    def test_tables_say_how_many_seeds_get_there(
        self, ours: list[float], theirs: list[float], steps: str, seconds: str
    ):
        baseline, candidate = summary("adamw", theirs), summary("mars", ours)
        self.assertEqual(report.when_reached(candidate, baseline, ".0f"), steps)
        row = report.table([baseline, candidate]).splitlines()[-1]
        self.assertEqual(re.split(" {2,}", row)[5], steps)
        _, cost = evidence.markdown_tables([baseline, candidate], baseline)
        cells = [cell.strip() for cell in cost.splitlines()[-1].split("|")]
        self.assertEqual((cells[2], cells[4]), (steps, seconds))

    @parameterized.parameters(math.inf, math.nan)
    def test_the_loss_of_a_run_that_diverged_is_never_reached(self, loss: float):
        self.assertIsNone(report.steps_to_reach(run("mars", 1.0), loss))


class UnknownTimeTest(absltest.TestCase):
    def test_a_step_of_unknown_time_has_no_seconds(self):
        runs = [dataclasses.replace(run("adamw", 2.0), seconds_per_step=math.nan)]
        unknown = report.summarize(runs)
        self.assertNotIn("nan", report.table(unknown))
        _, cost = evidence.markdown_tables(unknown, unknown[0])
        cells = cost.splitlines()[-1].split(" | ")
        self.assertEqual(cells[-4:-1], ["20", "-", "-"])


class VerdictTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("win", [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], "wins", "mars wins"),
        ("loss", [2.0, 2.1, 2.2], [1.0, 1.1, 1.2], "loses", "adamw wins"),
        ("inside_the_spread", [1.0, 1.1, 1.2], [1.1, 1.2, 1.3], "no winner", "no winner"),
        ("inside_that_of_the_other", [1.0, 1.0], [1.0, 1.9], "no winner", "no winner"),
        ("tie", [1.0, 1.1], [1.0, 1.1], "no winner", "no winner"),
        ("ahead_at_one_seed", [1.0], [1.5], "one seed", "mars is ahead by 0.5000 at one seed. One"),
        ("behind_at_one", [1.5], [1.0], "one seed", "adamw is ahead by 0.5000 at one seed. One"),
        ("tie_at_one_seed", [1.0], [1.0], "one seed", "a tie at one seed"),
        ("diverged", [math.nan, 1.0], [9.0, 9.5], "diverged", "adamw wins, mars diverged"),
        ("baseline_diverged", [9.0], [math.inf], "wins", "mars wins, adamw diverged"),
        ("both_diverged", [math.nan], [math.inf], "both diverged", "no winner, both diverged"),
    )
    def test_it_says_who_won(
        self, ours: list[float], theirs: list[float], word: str, expected: str
    ):
        candidate, baseline = summary("mars", ours), summary("adamw", theirs)
        sentence = report.verdict(candidate, baseline)
        self.assertStartsWith(sentence, f"mars against adamw: {expected}")
        quality, _ = evidence.markdown_tables([baseline, candidate], baseline)
        outcomes = [line.split("|")[5].strip() for line in quality.splitlines()[2:]]
        self.assertEqual(outcomes, ["baseline", word])

    def test_the_difference_and_the_spread_are_printed(self):
        sentence = report.verdict(summary("mars", [1.0, 1.5]), summary("adamw", [1.25, 1.375]))
        self.assertIn("-0.0625 (-0.2500 to +0.1250 over 2 seeds)", sentence)
        self.assertIn("inside the seed spread of 0.5000", sentence)

    def test_the_report_names_the_lowest_loss_even_if_that_is_the_baseline(self):
        text = report.text([summary("adamw", [1.0, 1.1]), summary("mars", [2.0, 2.1])])
        self.assertIn("Lowest validation loss: adamw (1.0500).", text)
        self.assertIn("adamw wins", text)
        self.assertNotIn("adamw against", text)


class OutputTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.runs = [
            run(name, loss + offset, seed=seed, rate=rate)
            for name, offset in (("adamw", 0.0), ("mars", 0.3))
            for rate, loss in ((1e-3, 2.0), (1e-2, math.nan))
            for seed in (0, 1)
        ]
        self.summaries = report.summarize(self.runs)

    def test_the_table_has_every_number(self):
        header, _, adamw, mars = report.table(self.summaries).splitlines()
        for title in ("minus adamw", "steps to adamw's loss", "ms/step", "state bytes"):
            self.assertIn(title, header)
        for cell in ("adamw", "0.001", "2.0000", "500.0", "1,000", "20"):
            self.assertIn(cell, adamw)
        self.assertIn("+0.3000", mars)

    def test_the_whole_grid_is_reported(self):
        self.assertIn("diverged", report.grid_table(self.summaries))
        self.assertIn(report.grid_table(self.summaries), report.text(self.summaries))

    def test_the_json_file_has_null_for_what_is_not_finite(self):
        tree = output.jsonable({"curves": [5.0, math.inf, math.nan], "settings": {"b1": 1 / 3}})
        output.write_json(tree, self.folder / "results.json")
        read = json.loads((self.folder / "results.json").read_text())
        self.assertEqual(read, {"curves": [5.0, None, None], "settings": {"b1": 1 / 3}})

    def test_a_list_of_numbers_takes_one_line(self):
        output.write_json({"a": [1, 2.5], "b": ["c"]}, self.folder / "results.json")
        self.assertIn('"a": [ 1, 2.5 ]', (self.folder / "results.json").read_text())


if __name__ == "__main__":
    absltest.main()
