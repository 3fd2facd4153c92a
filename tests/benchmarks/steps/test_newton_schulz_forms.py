"""The benchmark of forms of Newton-Schulz: they agree, and the command writes."""

import contextlib
import io
import json
import pathlib
import re
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from benchmarks.steps import newton_schulz_forms, timing


class FormsTest(parameterized.TestCase):
    @parameterized.parameters(*newton_schulz_forms.FORMS)
    def test_every_form_is_the_polynomial(self, name: str):
        # Far from 0, where the one on A alone goes wrong in bfloat16; in float32 all agree.
        x = np.stack([np.eye(8, 16), 2 * np.eye(8, 16, k=3)]).astype(np.float32)
        x += 0.1 * np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
        x /= np.linalg.norm(x, axis=(1, 2), keepdims=True)
        u, s, vh = np.linalg.svd(x.astype(np.float64), full_matrices=False)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        actual = jax.jit(newton_schulz_forms.FORMS[name])(jnp.asarray(x))
        # `orthogonalize` iterates in bfloat16 by default.
        atol = 5e-2 if name == "mars_optax.orthogonalize" else 1e-4
        np.testing.assert_allclose(actual, (u * s[:, None]) @ vh, atol=atol)

    def test_operations_are_those_of_three_products(self):
        # X X^T and P X have 2 m m n each, A A has 2 m m m.
        self.assertEqual(newton_schulz_forms.operations(3, 4, 10), 3 * 5 * (2 * 2 * 160 + 2 * 64))


class CommandTest(parameterized.TestCase):
    def test_a_run_writes_its_rows(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        output = io.StringIO()
        flags = (f"--out={folder}", "--stacks=2x8x16", "--form=P X, [lw]*", "--repeats=1")
        with (
            # The ceilings of this machine take longer than all else, and have a test of their own.
            mock.patch.object(
                timing, "ceilings", return_value={"bfloat16_matmul_flop_per_second": 1e9}
            ),
            contextlib.redirect_stdout(output),
        ):
            newton_schulz_forms.main(flags)
        tree = json.loads((folder / "results.json").read_text())
        self.assertEqual([row["name"] for row in tree["rows"]], ["P X, loop", "P X, written out"])
        ceiling = tree["ceilings"]["bfloat16_matmul_flop_per_second"]
        for row in tree["rows"]:
            flops = newton_schulz_forms.operations(2, 8, 16) / (row["ms"] / 1000)
            # JSON has six digits of each.
            np.testing.assert_allclose(row["ceiling_share"], flops / ceiling, rtol=1e-5)
            self.assertIn(f"{row['ms']:.3f}", output.getvalue())

    @parameterized.parameters(
        ("--stacks=3x4", "--stacks: Expected BATCHxMxN"),
        ("--stacks=3x8x4", "got '3x8x4'"),
        (f"--stacks=2x8x{'9' * 5000}", "got '2x8x999"),
        ("--form=nothing", "as --form, got 'nothing'"),
    )
    def test_flags_that_make_no_sense_are_refused(self, flag: str, message: str):
        with self.assertRaisesRegex(SystemExit, re.escape(message)):
            newton_schulz_forms.main([flag])


if __name__ == "__main__":
    absltest.main()
