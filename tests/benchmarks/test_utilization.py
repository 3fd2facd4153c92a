"""The utilization of training: every row's figures, and what cannot be measured."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from benchmarks import utilization

_SIZES = ("--layers=1", "--width=16", "--context=8", "--vocabulary_size=64", "--dtype=float32")
_CEILINGS = {"bfloat16_matmul_flop_per_second": 1e9}


class UtilizationTest(absltest.TestCase):
    def run_command(self, *flags: str) -> None:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            mock.patch.object(utilization.ceilings, "measure", return_value=_CEILINGS),
        ):
            self.assertEqual(utilization.main([*_SIZES, "--batch_size=32", *flags]), 0)

    def test_rows(self):
        out = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "out.json"
        self.run_command(
            "--microbatch=16", "--calls=1", "--vary=microbatch=12,runs=2", f"--out={out}"
        )
        given, wrong, two = json.loads(out.read_text())["rows"]
        self.assertEqual((given["tokens"], given["microbatch"], two["tokens"]), (32, 16, 64))
        self.assertIn("multiples of a window's", wrong["error"])
        # 6 (12 d^2 + 2 d + V d) + 12 T d operations a token.
        flops = 6 * (12 * 16**2 + 2 * 16 + 64 * 16) + 12 * 8 * 16
        for row in (given, two):
            share = row["tokens"] * flops / (row["ms"] / 1000) / 1e9
            self.assertAlmostEqual(row["utilization"] / share, 1, places=4)

    def test_an_unknown_flag_in_a_row_is_an_error(self):
        with self.assertRaisesRegex(SystemExit, "Expected flags in --vary, got 'depth'"):
            self.run_command("--vary=depth=3")


if __name__ == "__main__":
    absltest.main()
