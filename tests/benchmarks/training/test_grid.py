"""Cells, records, learning rates beyond an edge, runs in pieces, and tables of the results."""

import argparse
import contextlib
import io
import json
import math
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks.training import evidence, gpt2, grid, optimizers, report, resumable, study, vision
from tests.support import versions

_RESULTS = pathlib.Path(grid.__file__).parents[1] / "results"
_TASK = {
    "model": "none",
    "parameters": 1_500_000,
    "schedule": {"steps": 2000},
    "tokens_per_step": 64,
}


def optimizer(name: str = "adamw") -> optimizers.Optimizer:
    return optimizers.parse_optimizer(name, gpt2.DOMAIN)


def figures(loss: float | None) -> grid.Record:
    return {
        "steps": [0, 10, 20],
        "curves": {"validation_loss": [5.0, 4.0, loss]},
        "train_loss": [4.0, 3.0],
        "seconds_per_step": 0.5,
        "state_bytes": 1000,
        "together": 1,
        "environment": {"device": "none"},
    }


def valley(rate: float) -> float:
    """A loss whose minimum over learning rates is at 1e-3."""
    return abs(math.log(rate / 1e-3))


class FolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.records = grid.Records(self.folder / "records.jsonl", _TASK)


class RecordsTest(FolderTest):
    def test_a_finished_run_is_found_again_by_its_settings(self):
        self.records.add([(grid.Cell(optimizer("mars"), 1e-3, 0), figures(1.0))])
        again = grid.Records(self.folder / "records.jsonl", _TASK)
        found = again.find(grid.Cell(optimizer("mars:gamma=0.025"), 1e-3, 0))
        self.assertEqual(found["curves"]["validation_loss"], [5.0, 4.0, 1.0])
        for other in (
            grid.Cell(optimizer("mars:gamma=0.05"), 1e-3, 0),
            grid.Cell(optimizer("mars"), 2e-3, 0),
            grid.Cell(optimizer("mars"), 1e-3, 1),
        ):
            self.assertIsNone(again.find(other))
        elsewhere = grid.Records(self.folder / "records.jsonl", {"model": "another"})
        self.assertIsNone(elsewhere.find(grid.Cell(optimizer("mars"), 1e-3, 0)))
        self.assertEmpty(elsewhere.of_task())

    def test_a_line_that_was_not_finished_is_left_out_and_harms_no_other(self):
        path = self.folder / "records.jsonl"
        self.records.add([(grid.Cell(optimizer(), 1e-3, 0), figures(1.0))])
        with path.open("a") as file:
            file.write('{"key": "ab')
        again = grid.Records(path, _TASK)
        again.add([(grid.Cell(optimizer(), 1e-3, 1), figures(2.0))])
        seeds = [record["seed"] for record in grid.Records(path, _TASK).of_task()]
        self.assertEqual(seeds, [0, 1])

    def test_lines_that_are_no_records_are_passed_over(self):
        path = self.folder / "records.jsonl"
        path.write_bytes(b'[1, 2]\n1\n{"key": 2}\n\xff\xfe\n')
        again = grid.Records(path, _TASK)
        self.assertEmpty(again.of_task())
        again.add([(grid.Cell(optimizer(), 1e-3, 0), figures(1.0))])
        self.assertLen(grid.Records(path, _TASK).of_task(), 1)


class RatesTest(parameterized.TestCase):
    @parameterized.parameters(
        ({1e-3: 1.0, 2e-3: 2.0}, 5e-4),
        ({1e-3: 2.0, 2e-3: 1.0}, 4e-3),
        ({1e-3: 2.0, 2e-3: 1.0, 4e-3: 3.0}, None),
        ({1e-3: math.inf, 2e-3: math.inf}, 5e-4),
        ({1e-3: 1.0}, None),
        ({3e-3: 1.0, 3e-2: 2.0}, 3e-4),
        ({1e-30: 1.0, 2e-30: 2.0}, None),
        ({1e-20: 1.0, 1e30: 1.0, 1e29: 0.5}, None),
        ({1e29: 2.0, 1e30: 1.0}, None),
    )
    def test_the_grid_is_continued_where_its_best_is_at_an_edge(
        self, losses: dict[float, float], expected: float | None
    ):
        self.assertEqual(grid.beyond_edge(losses), expected)

    @parameterized.parameters((1, [4e-3]), (2, [2e-3, 4e-3]), (3, [2e-3, 4e-3, 8e-3]))
    def test_a_grid_lies_around_the_optimizers_own_rate(self, count: int, expected: list[float]):
        self.assertEqual(grid.around(4e-3, count), expected)


class RoundsTest(FolderTest):
    def make(self, rates: list[float], protocol: grid.Protocol) -> list[list[tuple[float, int]]]:
        seen = []
        for cells in grid.rounds(optimizer(), rates, protocol, self.records.of):
            seen.append([(cell.learning_rate, cell.seed) for cell in cells])
            missing = [cell for cell in cells if self.records.find(cell) is None]
            self.records.add([(cell, figures(valley(cell.learning_rate))) for cell in missing])
        return seen

    def chosen(self, protocol: grid.Protocol) -> report.Summary:
        ((chosen,), left_out) = grid.summarize(self.records.of_task(), protocol)
        self.assertEmpty(left_out)
        return chosen

    def test_first_the_grid_then_beyond_its_edge_then_the_final_seeds_at_the_best(self):
        seen = self.make([4e-3, 8e-3], grid.Protocol([0], [1, 2], extend=4))
        grids = [[(4e-3, 0), (8e-3, 0)], [(2e-3, 0)], [(1e-3, 0)], [(5e-4, 0)]]
        self.assertEqual(seen, [*grids, [(1e-3, 1), (1e-3, 2)]])
        chosen = self.chosen(grid.Protocol([0], [1, 2]))
        self.assertEqual(chosen.learning_rate, 1e-3)
        self.assertFalse(chosen.at_edge)
        self.assertLen(chosen.grid, 5)
        self.assertEqual([run.seed for run in chosen.runs], [1, 2])

    def test_it_goes_no_further_than_allowed_and_the_edge_is_marked(self):
        seen = self.make([4e-3, 8e-3], grid.Protocol([0], [0], extend=1))
        self.assertEqual(seen, [[(4e-3, 0), (8e-3, 0)], [(2e-3, 0)], [(2e-3, 0)]])
        self.assertTrue(self.chosen(grid.Protocol([0], [0])).at_edge)
        # Nor does the same command again.
        self.assertEqual(
            self.make([4e-3, 8e-3], grid.Protocol([0], [0], extend=1)), [seen[0], seen[2]]
        )

    @parameterized.parameters(([2e-3, 4e-3, 8e-3],), ([1e-3],), ([2e-3],))
    def test_another_grid_later_is_added_to_what_there_is(self, rates: list[float]):
        self.make([5e-4, 1e-3, 2e-3], grid.Protocol([0], [0], extend=4))
        later = grid.Protocol([0], [1, 2], extend=4)
        self.assertEqual(
            self.make(rates, later), [[(rate, 0) for rate in rates], [(1e-3, 1), (1e-3, 2)]]
        )
        chosen = self.chosen(later)
        self.assertEqual(chosen.learning_rate, 1e-3)
        self.assertEqual(list(chosen.grid), sorted({5e-4, 1e-3, 2e-3, *rates}))

    def test_a_learning_rate_without_all_tuning_seeds_does_not_count(self):
        self.make([1e-3, 2e-3], grid.Protocol([0], [0]))
        seen = self.make([2e-3, 4e-3], grid.Protocol([0, 1], [5]))
        self.assertEqual(seen[1:], [[(2e-3, 5)]])
        self.assertEqual(list(self.chosen(grid.Protocol([0, 1], [5])).grid), [2e-3, 4e-3])

    def test_the_mean_over_the_tuning_seeds_of_what_decides_chooses(self):
        protocol = grid.Protocol([0, 1], [1], 0, "validation_error", "test_error", "percent")
        # By the first seed, the last, or by what is compared it would be another learning rate.
        losses = {1e-3: (1.0, 6.0), 2e-3: (3.0, 3.0), 4e-3: (7.0, 0.0)}
        cells = [grid.Cell(optimizer(), rate, seed) for rate in losses for seed in (0, 1)]
        runs = []
        for cell in cells:
            run = figures(None)
            decides = losses[cell.learning_rate][cell.seed]
            run["curves"] = {"validation_error": [9.0, 9.0, decides], "test_error": [9.0, 8.0, 7.5]}
            if cell.learning_rate == 4e-3:
                run["curves"]["test_error"] = [9.0, 8.0, 7.0]
            runs.append((cell, run))
        self.records.add(runs)
        *_, final = grid.rounds(optimizer(), list(losses), protocol, self.records.of)
        self.assertEqual([(cell.learning_rate, cell.seed) for cell in final], [(2e-3, 1)])
        chosen = self.chosen(protocol)
        self.assertEqual(chosen.learning_rate, 2e-3)
        self.assertEqual(chosen.grid, {1e-3: 3.5, 2e-3: 3.0, 4e-3: 3.5})
        self.assertEqual([run.validation_loss for run in chosen.runs], [[9.0, 8.0, 7.5]])
        named = (chosen.metric, chosen.chosen_by, chosen.unit)
        self.assertEqual(named, ("test error", "validation error", "percent"))

    def test_an_optimizer_without_its_seeds_is_left_out_and_the_reason_is_named(self):
        self.records.add([(grid.Cell(optimizer(), 1e-3, 0), figures(1.0))])
        for seeds, final, why in (
            ([0], [0, 1, 2], "0.001, its best, has not run at seeds 1, 2"),
            ([0, 3], [0], "no learning rate has run at all of seeds 0, 3"),
        ):
            summaries, left_out = grid.summarize(
                self.records.of_task(), grid.Protocol(seeds, final), ["adamw", "mars"]
            )
            self.assertEmpty(summaries)
            self.assertEqual(left_out, {"adamw": why, "mars": "no run"})


class Decay:
    """A task of two numbers that shrink, or diverge at a learning rate of 2; without a compiler."""

    steps = 40
    steps_per_call = 5
    evaluated_steps = (0, 20, 40)
    calls = 0

    def init(self, cells: Sequence[grid.Cell]) -> dict[str, Any]:
        seeds = jnp.asarray([float(1 + cell.seed) for cell in cells])
        return {"x": seeds[0] if len(cells) == 1 else seeds, "opt_state": (jnp.int32(0),)}

    def advance(self, state: dict[str, Any], step: int, cells: Sequence[grid.Cell]) -> Any:
        self.calls += 1
        rates = np.float32([cell.learning_rate for cell in cells])
        x, losses = np.atleast_1d(np.asarray(state["x"])), []
        for _ in range(self.steps_per_call):
            x = np.where(rates >= 2, np.float32(np.nan), x * (1 - rates))
            losses.append(x)
        count = state["opt_state"][0] + self.steps_per_call
        assert int(count) == step + self.steps_per_call
        one = len(cells) == 1
        losses = np.stack(losses, axis=-1)
        return (
            {"x": jnp.asarray(x[0] if one else x), "opt_state": (count,)},
            jnp.asarray(losses[0] if one else losses),
        )

    def evaluate(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"validation_loss": state["x"]}


class After:
    """A deadline that passes when it has been asked a number of times."""

    def __init__(self, questions: int) -> None:
        self.questions = questions

    def passed(self, seconds: float = 0.0) -> bool:
        self.questions -= 1
        return self.questions < 0


_NEVER = resumable.Deadline(None, 0.0)


class PiecesTest(FolderTest):
    @parameterized.parameters(1, 2)
    def test_a_run_in_pieces_is_the_run_at_once(self, together: int):
        cells = [grid.Cell(optimizer(), 0.1, seed) for seed in range(together)]
        whole = resumable.train(Decay(), cells, self.folder / "a", deadline=_NEVER)
        for expected_calls in (3, 2):
            task = Decay()
            stopped = resumable.train(
                task, cells, self.folder / "b", deadline=After(expected_calls)
            )
            self.assertIsNone(stopped)
            self.assertEqual(task.calls, expected_calls)
        pieces = resumable.train(Decay(), cells, self.folder / "b", deadline=_NEVER)
        self.assertLen(whole, together)
        for one, other in zip(whole, pieces, strict=True):
            self.assertEqual(one["curves"], other["curves"])
            self.assertEqual(one["train_loss"], other["train_loss"])
            self.assertLess(one["train_loss"][1], one["train_loss"][0])
        self.assertEqual((whole[0]["pieces"], pieces[0]["pieces"]), (1, 3))
        self.assertFalse((self.folder / "b").exists())

    def test_a_checkpoint_is_saved_on_the_way(self):
        cells = [grid.Cell(optimizer(), 0.1, 0)]
        seen = []

        def report(steps: int, progress: resumable.Progress) -> None:
            seen.append((self.folder / "a").is_dir())

        resumable.train(
            Decay(), cells, self.folder / "a", deadline=_NEVER, save_every=0.0, report=report
        )
        self.assertEqual(seen, [False, False, *[True] * 7])
        self.assertFalse((self.folder / "a").exists())

    def test_a_group_that_diverged_ends_early_and_one_that_did_not_goes_on(self):
        task = Decay()
        (record,) = resumable.train(
            task, [grid.Cell(optimizer(), 2.0, 0)], self.folder / "a", deadline=_NEVER
        )
        self.assertEqual(task.calls, 4)
        self.assertEqual(record["curves"]["validation_loss"], [1.0, None, None])
        self.assertEqual(grid.last(record, "validation_loss"), math.inf)
        cells = [grid.Cell(optimizer(), rate, 0) for rate in (2.0, 0.1)]
        both = resumable.train(Decay(), cells, self.folder / "a", deadline=_NEVER)
        self.assertIsNone(both[0]["train_loss"][-1])
        self.assertLess(both[1]["train_loss"][-1], 0.1)

    def test_a_deadline_counts_what_is_to_come(self):
        deadline = resumable.Deadline(100.0, time.perf_counter())
        self.assertFalse(deadline.passed())
        self.assertTrue(deadline.passed(101.0))


class StudyTest(FolderTest):
    def study(self, *flags: str) -> tuple[study.Study, argparse.Namespace]:
        given = [f"--out={self.folder}", "--commit=none", *flags]
        args = study.parser("training.gpt2", "").parse_args(given)
        chosen = study.parse_optimizers(args, gpt2.DOMAIN)
        protocol = study.protocol(args)
        return study.Study("gpt2", chosen, protocol, _TASK, {}, lambda optimizer: Decay()), args

    def made(self, *flags: str) -> list[grid.Record]:
        comparison, args = self.study("--optimizers=adamw", *flags)
        never = resumable.Deadline(None, 0.0)
        self.assertIsNone(study.complete(comparison, args, self.records, never))
        return self.records.of_task()

    def test_so_many_runs_are_made_together(self):
        made = self.made("--learning_rates=0.1", "--seeds=0,1,2", "--vmap=2")
        self.assertEqual([record["together"] for record in made], [2, 2, 1])

    def test_so_many_learning_rates_beyond_the_grid_are_tried(self):
        made = self.made("--learning_rates=0.1,0.2", "--extend=1")
        self.assertEqual([record["learning_rate"] for record in made], [0.1, 0.2, 0.4])

    @parameterized.parameters(("5", 5.0), ("0", math.inf))
    def test_checkpoints_are_so_many_seconds_apart(self, flag: str, seconds: float):
        with mock.patch.object(resumable, "train", wraps=resumable.train) as train:
            self.made("--learning_rates=0.1", f"--save_every={flag}")
        self.assertEqual([call.kwargs["save_every"] for call in train.call_args_list], [seconds])

    def test_a_bar_knows_all_steps_from_the_beginning(self):
        flags = ("--optimizers=adamw,mars", "--learning_rates=0.1,0.2", "--extend=0", "--seeds=0")
        comparison, args = self.study(*flags, "--final_seeds=0,1")
        steps = []
        make = study.tqdm.tqdm

        def show(**settings: Any) -> Any:
            bar = make(**settings, file=io.StringIO())
            update = bar.update
            bar.update = lambda n: (update(n), steps.append((bar.n, bar.total)))
            return bar

        with mock.patch.object(study.tqdm, "tqdm", show):
            # In the second run of two optimizers, of three each.
            self.assertIsNotNone(study.complete(comparison, args, self.records, After(12)))
            self.assertEqual((steps[0], steps[-1]), ((0, 240), (60, 240)))
            steps.clear()
            self.assertIsNone(study.complete(comparison, args, self.records, _NEVER))
            self.assertEqual((steps[0], steps[-1]), ((20, 200), (200, 200)))

    def test_a_bar_counts_no_steps_that_a_diverged_run_does_not_make(self):
        written = io.StringIO()
        with contextlib.redirect_stderr(written):
            self.made("--learning_rates=2", "--extend=0")
        self.assertIn("| 20/20 ", written.getvalue())

    def test_who_is_left_out_of_the_table_is_printed_with_the_reason(self):
        self.made("--learning_rates=0.1")
        comparison, args = self.study("--learning_rates=0.1", "--final_seeds=1", "--limit=0")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            study.run(comparison, args, time.perf_counter())
        printed = output.getvalue()
        self.assertIn("`adamw` is left out: 0.1, its best, has not run at seeds 1.", printed)
        self.assertIn("`mars` is left out: no run.", printed)

    def test_of_optimizers_with_the_same_settings_the_first_is_kept(self):
        args = study.parser("training.gpt2", "").parse_args(["--table=mars/betas"])
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            ((chosen, _),) = study.parse_optimizers(args, vision.DOMAIN)
        self.assertEqual(chosen.name, "mars")
        self.assertEqual(
            output.getvalue(),
            "`mars:b2=0.99` is left out: its settings are those of `mars`.\n"
            "`mars:b1=0.95:b2=0.99` is left out: its settings are those of `mars`.\n",
        )
        self.assertLen(study.parse_optimizers(args, gpt2.DOMAIN), 3)


class TablesTest(FolderTest):
    @parameterized.parameters(
        *[f"mars/{name}" for name in optimizers.ABLATIONS if name != "iterations"],
        *[
            f"mars_m/{name}"
            for name in ("gamma", "clip", "previous_gradient", "correction", "iterations")
        ],
        *optimizers.TABLES,
    )
    def test_every_row_of_a_table_is_an_optimizer(self, name: str):
        domain = vision.DOMAIN if "convolutions" in name else gpt2.DOMAIN
        rows = [optimizers.parse_optimizer(text, domain) for text in optimizers.table(name)]
        self.assertGreater(len(rows), 1)
        for row in rows:
            versions.skip_if_optax_lacks(row.base)
            params = {"blocks": {"0": {"kernel": jnp.zeros((2, 2))}}}
            row.transformation(lambda count: 0.1).init(params)

    @parameterized.parameters(
        "",
        "[]",
        '{"rows": []}',
        '{"name": ["gpt2"]}',
        '{"name": "gpt2"}',
        '{"name": "gpt2", "task": 5, "records": []}',
    )
    def test_other_results_are_an_error_that_names_the_file(self, text: str):
        path = self.folder / "other.json"
        path.write_text(text)
        with self.assertRaisesRegex(
            ValueError, "Expected results of gpt2, language_model, large_batch, vision, got .*other"
        ):
            evidence.write(path, ["main"], self.folder)

    def test_a_file_that_is_not_there_is_an_error_that_names_it(self):
        message = (
            "Expected results of gpt2, language_model, large_batch, vision, got '.*nowhere.json'"
        )
        with self.assertRaisesRegex(SystemExit, message):
            evidence.main([str(self.folder / "nowhere.json")])

    @parameterized.parameters("records.jsonl", "log.jsonl", "results.json")
    def test_a_folder_in_the_place_of_a_file_is_an_error(self, name: str):
        args = study.parser("training.gpt2", "").parse_args([f"--out={self.folder}"])
        protocol = study.protocol(args)
        comparison = study.Study("gpt2", [], protocol, _TASK, {}, None)
        (self.folder / name).mkdir()
        with self.assertRaisesRegex(SystemExit, f"gpt2: Expected a folder of results .*{name}"):
            study.run(comparison, args, 0.0)

    @parameterized.parameters("mars", "mars/", "sgd/gamma", "mars/other")
    def test_an_unknown_table_is_an_error(self, name: str):
        with self.assertRaisesRegex(ValueError, f"--table, got '{name}'"):
            optimizers.table(name)

    @parameterized.parameters("adamw/gamma", "mars_m/betas", "adamw/clip")
    def test_a_table_of_settings_that_an_optimizer_lacks_is_an_error(self, name: str):
        with self.assertRaisesRegex(ValueError, f"settings that .* has, .* got '{name}'"):
            optimizers.table(name)

    def test_an_empty_folder_of_the_tables_is_an_error(self):
        with self.assertRaisesRegex(SystemExit, "evidence: Expected a folder .* as --out"):
            evidence.main([str(_RESULTS / "vision_vit_20_h200.json"), "--out="])

    def tree(self, losses: dict[str, float], *, name: str = "gpt2") -> dict[str, Any]:
        """Returns results at one learning rate and two seeds, 0.01 apart."""
        domain = evidence.DOMAINS[name]
        for text, loss in losses.items():
            chosen = optimizers.parse_optimizer(text, domain)
            self.records.add(
                [(grid.Cell(chosen, 1e-3, seed), figures(loss + seed / 100)) for seed in (0, 1)]
            )
        comparison = study.Study(name, [], grid.Protocol([0], [0, 1]), _TASK, {}, None)
        return json.loads(json.dumps(study.results(comparison, self.records.of_task())))

    def test_settings_and_learning_rates_are_found_again_in_the_results(self):
        name = "mars:gamma=0.0333333333"
        self.records.add([(grid.Cell(optimizer(name), 1 / 3, 0), figures(1 / 3))])
        comparison = study.Study("gpt2", [], grid.Protocol([0], [0]), _TASK, {}, None)
        tree = json.loads(json.dumps(study.results(comparison, self.records.of_task())))
        (record,) = grid.named(tree["records"], [optimizer(name)])
        self.assertEqual(record["learning_rate"], 1 / 3)
        self.assertEqual(record["curves"]["validation_loss"][-1], 0.333333)

    def test_a_control_that_is_not_there_is_named_above_the_table(self):
        said = (
            "Compared with MARS-M (0.95), gamma 0.01, as MARS-M (0.95), gamma 0, the control, is "
            "not there."
        )
        tree = self.tree({"adamw": 1.0, "mars_m:gamma=0.01": 3.0, "mars_m:gamma=0.05": 2.0})
        text, _ = evidence.section(tree, "mars_m/gamma")
        self.assertLess(text.index(said), text.index("| baseline |"))
        self.assertIn("Not complete: MARS-M (0.95), gamma 0 (no run)", text)
        text, _ = evidence.section(self.tree({"mars_m:gamma=0": 4.0}), "mars_m/gamma")
        self.assertNotIn("Compared with", text)
        self.assertIn("| MARS-M (0.95), gamma 0 | 0.001 (1) |", text)

    def test_without_adamw_the_main_table_says_what_it_compares_with(self):
        text, _ = evidence.section(self.tree({"muon": 1.0, "lion": 2.0}), "main")
        self.assertIn("Compared with Lion (0.9, 0.99), as AdamW (0.9, 0.95), the control", text)
        text, _ = evidence.section(self.tree({"adamw": 1.5}), "all")
        self.assertIn("| AdamW (0.9, 0.95) |", text)
        self.assertNotIn("Compared with", text)

    def test_a_row_with_the_settings_of_another_is_left_out(self):
        tree = self.tree({"mars": 2.0, "mars:max_norm=none": 3.0}, name="vision")
        text, summaries = evidence.section(tree, "mars/clip")
        shown = [summary.optimizer for summary in summaries]
        self.assertEqual(shown, ["mars", "mars:max_norm=none"])
        self.assertIn(
            "`mars:global_clip=none` is left out: its settings are those of `mars`.", text
        )
        self.assertNotIn("Not complete", text)

    def test_results_become_a_table_and_a_plot(self):
        protocol = grid.Protocol([0], [1, 2])
        losses = {"adamw": 3.0, "mars:gamma=0": 2.5, "mars": 2.0}
        for name, loss in losses.items():
            cells = [grid.Cell(optimizer(name), 1e-3, seed) for seed in range(3)]
            self.records.add([(cell, figures(loss + 0.01 * cell.seed)) for cell in cells])
        comparison = study.Study("gpt2", [], protocol, _TASK, {"source": "none"}, None)
        path = self.folder / "some.json"
        tree = study.results(comparison, self.records.of_task())
        path.write_text(json.dumps(tree))
        evidence.main([str(path), "--tables=main,mars/gamma,main"])
        text = (self.folder / "some.md").read_text()
        self.assertStartsWith(
            text, "**Language: a GPT of 1.5 million parameters, 2,000 steps of 64 tokens**\n"
        )
        self.assertEqual(text.count("**Table "), 2)
        main, ablation = text.split("**Table `mars/gamma`**")
        mars = "| MARS-AdamW (0.9, 0.95), gamma 0.025 | 0.001 (1) | 2.0150 (2.0100 to 2.0200) |"
        self.assertIn(f"{mars} -1.0000 to", main)
        self.assertIn("Not complete: Lion (0.9, 0.99) (no run), Muon (0.95) (no run)", main)
        self.assertIn(f"{mars} -0.5", ablation)
        self.assertIn("device none", text)
        for name in ("some_main.png", "some_mars_gamma.png"):
            self.assertStartsWith((self.folder / name).read_bytes(), b"\x89PNG")


if __name__ == "__main__":
    absltest.main()
