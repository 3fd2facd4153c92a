"""The utilization of training: every row's figures, and what cannot be measured."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from benchmarks.steps import utilization

_SIZES = ("--layers=1", "--width=16", "--context=8", "--vocabulary_size=64", "--dtype=float32")
_CEILINGS = {"bfloat16_matmul_flop_per_second": 1e9}


class UtilizationTest(parameterized.TestCase):
    def run_command(self, *flags: str) -> None:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            mock.patch.object(utilization.timing, "ceilings", return_value=_CEILINGS),
        ):
            self.assertEqual(utilization.main([*_SIZES, "--batch_tokens=32", *flags]), 0)

    def test_rows(self):
        out = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.run_command(
            "--microbatch_tokens=16",
            "--repeats=1",
            "--vary=microbatch_tokens=12,vmap=2:rolled=true",
            f"--out={out}",
        )
        given, wrong, two = json.loads((out / "results.json").read_text())["rows"]
        self.assertEqual((given["tokens"], given["microbatch"], two["tokens"]), (32, 16, 64))
        self.assertIn("multiples of a window's", wrong["error"])
        # 6 (12 d^2 + 2 d + V d) + 12 T d operations a token.
        flops = 6 * (12 * 16**2 + 2 * 16 + 64 * 16) + 12 * 8 * 16
        for row in (given, two):
            share = row["tokens"] * flops / (row["ms"] / 1000) / 1e9
            self.assertAlmostEqual(row["utilization"] / share, 1, places=4)

    @parameterized.parameters(
        ("depth=3", "Expected a flag, got 'depth'"),
        ("vmap=0", "--vmap: Expected a whole number from 1"),
        ("rolled", "Expected true or false as --rolled, got ''"),
    )
    def test_a_row_that_cannot_be_is_an_error(self, row: str, message: str):
        with self.assertRaisesRegex(SystemExit, f"^utilization: .*{message}"):
            self.run_command(f"--vary={row}")


if __name__ == "__main__":
    absltest.main()
