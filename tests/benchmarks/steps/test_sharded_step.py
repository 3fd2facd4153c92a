"""The benchmark of sharded steps: where leaves lie, the collectives counted, and the command."""

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

from benchmarks import gpt2_shapes
from benchmarks.steps import sharded_step

_ROOT = pathlib.Path(__file__).parents[3]
_ENTRIES = {one.name: one for one in sharded_step.entries()}
_THRESHOLD = "mars_optax._src.reshard.SHORTEST_TO_DIVIDE"


class ShardingsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("largest", (16, 64), 8, P(None, "devices")),
        ("largest_that_divides", (50257, 768), 2, P(None, "devices")),
        ("first_of_equals", (4, 64, 64), 8, P(None, "devices", None)),
        ("vector", (64,), 8, P("devices")),
        ("nothing_divides", (3, 5), 2, P()),
        ("fewer_than_devices", (4,), 8, P()),
        ("scalar", (), 8, P()),
        ("empty", (0, 7), 2, P()),
    )
    def test_fsdp_takes_the_largest_axis_that_comes_out_even(self, shape, devices, expected):
        self.assertEqual(sharded_step.fsdp_spec(shape, devices), expected)

    def specs(self, leaves: str, sharding: str, devices: int = 2):
        tree = sharded_step.of_params(
            gpt2_shapes.shapes("tiny", leaves), sharding, sharded_step.make_mesh(devices)
        )
        return jax.tree.map(lambda one: one.spec, tree)

    def test_stacks_lie_by_layers_and_the_others_as_in_fsdp(self):
        specs = self.specs("stacked", "layers")
        self.assertEqual(set(jax.tree.leaves(specs["blocks"])), {P("devices")})
        self.assertEqual(specs["embed"], P("devices", None))
        self.assertEqual(specs["norm"]["scale"], P("devices"))
        replicated = jax.tree.leaves(self.specs("flat", "replicated"))
        self.assertEqual(set(replicated), {P()})
        with self.assertRaisesRegex(ValueError, "multiple of 8 layers"):
            self.specs("stacked", "layers", devices=8)

    @parameterized.parameters("mars_m", "mars", "muon", "adamw")
    def test_the_state_lies_as_the_parameters(self, name: str):
        params = gpt2_shapes.shapes("tiny", "flat")
        mesh = sharded_step.make_mesh(8)
        where = sharded_step.of_params(params, "fsdp", mesh)
        state = jax.eval_shape(_ENTRIES[name].candidate.build(params).init, params)
        found = sharded_step.of_state(state, params, where, mesh)
        kernels = [
            (leaf.shape, one.spec)
            for leaf, one in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
            if leaf.shape in ((64, 256), (256, 64), ())
        ]
        expected = {(64, 256): P(None, "devices"), (256, 64): P("devices", None), (): P()}
        for shape, spec in kernels:
            self.assertEqual(spec, expected[shape])
        # Of two layers, with a momentum at the least.
        self.assertGreaterEqual(sum(shape != () for shape, _ in kernels), 4)


class MeasureTest(absltest.TestCase):
    def test_redundant_work_moves_other_bytes_than_divided_work(self):
        abstract = {"kernel": jax.eval_shape(lambda: jnp.zeros((16, 32, 64)))}
        host = gpt2_shapes.operands(abstract)
        found = {}
        with mock.patch(_THRESHOLD, 16):
            for name in ("mars_m", "mars_m_redundant"):
                found[name] = sharded_step.measure(
                    _ENTRIES[name], host, "flat/fsdp", 8, steps=2, repeats=1, loop_if=0.0
                )
        kinds = {name: {one["kind"] for one in row["collectives"]} for name, row in found.items()}
        # Divided, pieces go to where their matrix is whole and back; else everything to everyone.
        self.assertIn("all-to-all", kinds["mars_m"])
        self.assertIn("all-gather", kinds["mars_m_redundant"])
        self.assertNotIn("all-gather", kinds["mars_m"])
        self.assertLess(
            found["mars_m"]["collective_bytes"], found["mars_m_redundant"]["collective_bytes"]
        )
        for row in found.values():
            self.assertFalse(row["collective_in_loop"])
            self.assertNotIn("loop_ms", row)


class CommandTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.result = folder / "out" / "results.json"

    def run_command(self, *arguments: str) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            sharded_step.main(
                [f"--out={self.result.parent}", "--repeats=2", "--steps=2", *arguments]
            )
        return output.getvalue()

    def test_a_run_writes_every_figure(self):
        printed = self.run_command(
            "--optimizers=adamw,mars,mars_m_redundant",
            "--devices=1,8",
            "--shardings=flat/fsdp",
            "--loop_if=600",
            "--commit=abc",
        )
        tree = json.loads(self.result.read_text())
        self.assertContainsSubset(
            {"device", "jax", "jaxlib", "optax", "mars_optax", "backend"}, tree["environment"]
        )
        self.assertEqual(tree["environment"]["commit"], "abc")
        self.assertEqual(tree["environment"]["devices"], 8)
        rows = [(row["name"], row["layout"], row["devices"]) for row in tree["rows"]]
        alone, spread = ("flat/replicated", 1), ("flat/fsdp", 8)
        self.assertEqual(
            rows,
            [
                ("mars", *alone),
                ("adamw", *alone),
                ("mars_m_redundant", *spread),
                ("mars", *spread),
                ("adamw", *spread),
            ],
        )
        for row in tree["rows"]:
            self.assertNotIn("error", row)
            for prefix in ("", "loop_"):
                self.assertGreater(row[f"{prefix}ms_min"], 0)
                self.assertLessEqual(row[f"{prefix}ms_min"], row[f"{prefix}ms"])
                self.assertLessEqual(row[f"{prefix}ms"], row[f"{prefix}ms_max"])
                self.assertGreater(row[f"{prefix}compile_seconds"], 0)
                self.assertGreater(row[f"{prefix}over_adamw"], 0)
            self.assertGreater(row["trace_seconds"], 0)
            self.assertIsInstance(row["temporary_bytes"], int)
            self.assertEqual((row["leaves"], row["parameters"]), (28, 136_960))
            # Nothing that a step communicates was taken out of the loop.
            self.assertEqual(row["loop_collective_bytes"], row["collective_bytes"])
        mars_alone, _, redundant, mars, adamw = tree["rows"]
        self.assertEqual(mars_alone["collectives"], [])
        self.assertEqual(adamw["collectives"], [])
        # The clip's norms, one for each matrix: 8 kernels and 2 embeddings.
        self.assertEqual([one["kind"] for one in mars["collectives"]], ["all-reduce"])
        self.assertEqual(mars["collective_bytes"], 10 * 4)
        # Each kernel is gathered in 16 bits, and its norm summed up.
        kernels = 2 * 2 * (64 * 192 + 64 * 64 + 2 * 64 * 256)
        self.assertGreaterEqual(redundant["collective_bytes"], kernels)
        self.assertIn("SHORTEST_TO_DIVIDE = ", redundant["patched"])
        self.assertIn("tiny, flat/fsdp, 8 devices: 136,960 parameters in 28 leaves", printed)
        self.assertRegex(printed, r"\nmars +\d.* 1 all-reduce|\nmars +\d.* 10 all-reduce")

    def test_rows_that_cannot_be_say_why_and_the_others_survive(self):
        printed = self.run_command(
            "--optimizers=adamw",
            "--devices=8",
            "--shardings=stacked/layers,stacked/fsdp",
            "--loop_if=0",
        )
        uneven, adamw = json.loads(self.result.read_text())["rows"]
        self.assertStartsWith(uneven["error"], "ValueError: Expected a multiple of 8 layers")
        self.assertIn("adamw: no figures. ValueError: Expected a multiple", printed)
        self.assertGreater(adamw["ms"], 0)

    def test_after_the_limit_no_row_begins(self):
        with mock.patch.object(sharded_step, "measure") as measure:
            self.run_command("--limit=0", "--devices=2", "--optimizers=adamw,muon")
        measure.assert_not_called()
        rows = json.loads(self.result.read_text())["rows"]
        self.assertLen(rows, 2 * 3)
        for row in rows:
            self.assertStartsWith(row["error"], "TimeoutError: left out, as --limit=0")

    def test_what_was_measured_before_a_crash_is_on_disk(self):
        figures = {"ms": 1.0, "ms_min": 1.0, "ms_max": 1.0}
        with (
            mock.patch.object(sharded_step, "measure", side_effect=[figures, KeyboardInterrupt]),
            self.assertRaises(KeyboardInterrupt),
        ):
            self.run_command("--devices=2")
        self.assertLen(json.loads(self.result.read_text())["rows"], 1)

    @parameterized.named_parameters(
        ("model", ["--model=huge"], "--model: Expected some of"),
        ("sharding", ["--shardings=flat/layers"], "--shardings: Expected some of"),
        ("no_row", ["--optimizers=nothing"], "patterns of mars_m, "),
        ("too_many", ["--devices=1,9"], "from 1 to the 8 that there are"),
        ("no_number", ["--devices=all"], "from 1 to the 8 that there are"),
    )
    def test_a_wrong_flag_ends_with_its_reason(self, arguments: list[str], message: str):
        with self.assertRaisesRegex(SystemExit, "sharded_step: .*" + re.escape(message)):
            self.run_command(*arguments)
        self.assertFalse(self.result.exists())

    @pytest.mark.slow  # A process of its own; the others have the same on devices already there.
    def test_devices_of_the_processor_are_made(self):
        command = [
            *(sys.executable, "-m", "benchmarks.steps.sharded_step", "--host_devices=3"),
            *(
                "--optimizers=adamw",
                "--shardings=flat/fsdp",
                "--loop_if=0",
                f"--out={self.result.parent}",
            ),
        ]
        subprocess.run(command, cwd=_ROOT, check=True, env={**os.environ, "XLA_FLAGS": ""})
        (row,) = json.loads(self.result.read_text())["rows"]
        self.assertEqual(row["devices"], 3)
        self.assertGreater(row["ms"], 0)


if __name__ == "__main__":
    absltest.main()
