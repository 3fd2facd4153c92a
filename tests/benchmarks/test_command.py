"""Flags: of one vocabulary, read once, each error a line; and processes that are interrupted."""

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

import jax
import pytest
from absl.testing import absltest, parameterized

from benchmarks import command, output, planning
from benchmarks.steps import newton_schulz_forms, sharded_step, step_time, utilization
from benchmarks.training import (
    evidence,
    gpt2,
    gradient_noise,
    language_model,
    large_batch,
    study,
    vision,
)

_ROOT = pathlib.Path(command.__file__).parents[1]
_COMMANDS = {
    module.__name__: module.parser
    for module in (
        *(gpt2, language_model, vision, step_time, sharded_step, newton_schulz_forms, planning),
        *(evidence, large_batch, utilization, gradient_noise),
    )
}


def failure(parser: command.Flags, *flags: str) -> str:
    """Returns the line that a command line ends with."""
    try:
        parser.parse_args(flags)
    except SystemExit as end:
        return str(end.code)
    raise AssertionError(f"{flags} are read")


class FlagsTest(parameterized.TestCase):
    @parameterized.parameters(
        (("--table=main", "--optimizers=adamw"), "Expected one of --optimizers and --table"),
        (("--learning_rates=0.1", "--grid=3"), "Expected one of --learning_rates and --grid"),
        (("--learning_rates=0.1", "--grid=1"), "Expected one of --learning_rates and --grid"),
        (("--grid=0",), "--grid: Expected a whole number from 1 to 31, got '0'"),
        (("--grid=32",), "from 1 to 31, got '32'"),
        (("--vmap=0",), "from 1 to 9223372036854775807, got '0'"),
        ((f"--vmap={'9' * 5000}",), "from 1 to 9223372036854775807, got '9999"),
        (("--extend=32",), "from 0 to 31, got '32'"),
        ((f"--extend={'9' * 5000}",), "from 0 to 31, got '9999"),
        (("--seed=1",), "Unknown command line flag 'seed'"),
        (("--seeds=1", "--seeds=2"), "--seeds=2: already defined"),
        (("adamw",), "Expected flags only, got ['adamw']. Write --name=value."),
    )
    def test_an_error_is_a_line(self, flags: tuple[str, ...], message: str):
        line = failure(study.parser("training.gpt2", ""), *flags)
        self.assertStartsWith(line, "gpt2: ")
        self.assertIn(message, line)
        self.assertNotIn("\n", line)
        self.assertLess(len(line), 250)

    @parameterized.parameters(*_COMMANDS)
    def test_help_has_a_line_for_each_flag(self, module: str):
        output = io.StringIO()
        parser = _COMMANDS[module]()
        self.assertEqual(parser.name, module.rpartition(".")[2])
        with contextlib.redirect_stdout(output), self.assertRaises(SystemExit) as end:
            parser.parse_args(["--help"])
        self.assertEqual(end.exception.code, 0)
        self.assertIn(f"\npython -m {module} ", output.getvalue())
        lines = output.getvalue().splitlines()
        self.assertLess(max(map(len, lines)), 160)
        self.assertNotIn("None", output.getvalue())
        flags = [line for line in lines if line.startswith("  --")]
        self.assertLen(flags, len(vars(parser.parse_args([]))) - 1)

    def test_one_name_has_one_meaning(self):
        kinds: dict[str, set[str]] = {}
        for parser in _COMMANDS.values():
            for name in ("out", "optimizers", "batch_size", "microbatch", "commit", "attention"):
                if name in vars(parser().parse_args([])):
                    parsed = parser().parse_args(
                        [f"--{name}={'auto' if name == 'attention' else 2}"]
                    )
                    kinds.setdefault(name, set()).add(repr(getattr(parsed, name)))
        self.assertLen(kinds, 6)
        for name, values in kinds.items():
            self.assertLen(values, 1, name)

    @parameterized.parameters(
        (["mars*"], ["mars", "mars_m"]), (["mars_m", "adamw"], ["adamw", "mars_m"])
    )
    def test_patterns_pick_names_in_their_order(self, patterns: list[str], names: list[str]):
        self.assertEqual(command.matching(patterns, ["adamw", "mars", "mars_m"]), names)

    @parameterized.parameters(
        (1, "cpu", "one CPU device"),
        (8, "cpu", "8 CPU devices"),
        (2, "NVIDIA H200", "2 NVIDIA H200 devices"),
    )
    def test_devices_in_words(self, count: int, kind: str, words: str):
        device = mock.Mock(device_kind=kind)
        with mock.patch.multiple(jax, devices=lambda: [device], device_count=lambda: count):
            self.assertEqual(output.devices(), words)


_MODEL = ("--layers=1", "--width=16", "--context=8", "--batch_size=2", "--eval_windows=4")
_RUNS = {
    "language_model": (*_MODEL, "--steps=4000", "--eval_every=1000", "--learning_rates=1e-2"),
    "gpt2": (*_MODEL, "--steps=4000", "--eval_every=1000", "--learning_rates=1e-2"),
    "vision": ("--model=vit", "--width=16", "--depth=1", "--epochs=40", "--eval_every=10"),
}


class PagerTest(absltest.TestCase):
    def test_help_may_be_read_in_part(self):
        reader, writer = os.pipe()
        os.close(reader)  # as `head` leaves it
        program = "from benchmarks import command; command.Flags('a', 'b').parse_args(['--help'])"
        root = pathlib.Path(command.__file__).parents[1]
        told = subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
        os.close(writer)
        self.assertEqual((told.returncode, told.stderr), (0, b""))


class InterruptTest(parameterized.TestCase):
    """Processes that get a real signal."""

    def start(self, name: str, out: pathlib.Path) -> subprocess.Popen[str]:
        text = () if name == "vision" else (f"--data_file={__file__}", "--devices=1")
        arguments = (*_RUNS[name], *text, "--optimizers=mars", f"--out={out}", "--commit=none")
        return subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.training.{name}", *arguments],
            cwd=_ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def check(self, name: str, number: int) -> None:
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        process = self.start(name, folder / "pieces")
        log = folder / "pieces/log.jsonl"
        # The first evaluation is logged when a part of the run is behind it, and much ahead.
        for _ in range(1200):
            if log.exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(number)
        output, errors = process.communicate()
        self.assertEqual(process.returncode, 128 + number, errors)
        self.assertNotIn("Traceback", errors)
        (line,) = [line for line in output.splitlines() if "interrupted" in line]
        saved = int(line.partition(" is saved at step ")[2].partition(" of ")[0])
        self.assertGreater(saved, 0)
        self.assertIn(f"Go on with: python -m benchmarks.training.{name} --", line)
        resumed = self.start(name, folder / "pieces")
        _, errors = resumed.communicate()
        self.assertEqual(resumed.returncode, 0, errors)
        self.assertIn(f"goes on from step {saved}", errors)
        whole = self.start(name, folder / "whole")
        _, errors = whole.communicate()
        self.assertEqual(whole.returncode, 0, errors)
        found = [
            json.loads((folder / part / "records.jsonl").read_text())
            for part in ("pieces", "whole")
        ]
        self.assertEqual([record["pieces"] for record in found], [2, 1])
        for key in ("curves", "train_loss"):
            self.assertEqual(found[0][key], found[1][key])

    @parameterized.parameters(
        ("gpt2", signal.SIGINT), ("language_model", signal.SIGTERM), ("vision", signal.SIGINT)
    )
    @pytest.mark.slow  # Three processes that compile; test_resumable.py has the same within one.
    def test_an_interrupted_run_goes_on_bit_for_bit(self, name: str, number: int):
        self.check(name, number)

    @parameterized.parameters("training.gpt2", "steps.step_time")
    def test_an_interrupt_during_the_imports_has_no_traceback(self, name: str):
        # In a shell's background this process may ignore the signal, which would be inherited.
        with command.Interrupt():
            process = subprocess.Popen(
                [sys.executable, "-X", "importtime", "-m", f"benchmarks.{name}", "--help"],
                cwd=_ROOT,
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        for line in process.stderr:
            if line.endswith(" jax\n"):  # one of the first, and much is to come
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
        self.assertEqual(process.returncode, -signal.SIGINT)
        self.assertEqual(output, "")
        self.assertNotIn("Traceback", errors)

    def test_a_first_signal_is_noted_and_a_second_ends(self):
        before = signal.getsignal(signal.SIGTERM)
        with command.Interrupt() as interrupt:
            signal.raise_signal(signal.SIGTERM)
            self.assertEqual(interrupt.number, signal.SIGTERM)
            with self.assertRaises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        self.assertIs(signal.getsignal(signal.SIGTERM), before)


if __name__ == "__main__":
    absltest.main()
