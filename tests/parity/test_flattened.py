"""The one-file form of `mars` that docs/_tools makes for Optax: the same steps, bit for bit."""

import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import pytest
from absl.testing import absltest, parameterized

from tests import registry
from tests.support import trees

_TOOL = pathlib.Path(__file__).parent.parent.parent / "docs" / "_tools" / "flatten_mars.py"
_TEXT = subprocess.run([sys.executable, _TOOL], capture_output=True, text=True, check=True).stdout

_MODULE = types.ModuleType("flattened_mars")
exec(compile(_TEXT, "_mars.py", "exec"), _MODULE.__dict__)

_MEMORY_FREE = {"keep_prev_grad": False, "max_norm": None, "second_moment": "gradient"}


class FlattenedTest(parameterized.TestCase):
    @parameterized.parameters(
        ("mars", "float32", {}),
        ("mars_schedules", "bfloat16", {"mu_dtype": "float32"}),
        ("scale_by_mars", "float32", {}),
    )
    def test_it_takes_the_same_steps(self, name: str, dtype: str, overrides: dict[str, Any]):
        self._check_steps(name, dtype, overrides)

    @parameterized.parameters(
        ("mars_optimize_1d", "float32", {}),
        ("mars_amsgrad", "float32", {}),
        ("mars_second_moment", "bfloat16", {}),
        ("mars", "float32", _MEMORY_FREE),
        ("scale_by_mars_amsgrad", "bfloat16", {}),
    )
    @pytest.mark.slow
    def test_it_takes_the_same_steps_in_every_setting(
        self, name: str, dtype: str, overrides: dict[str, Any]
    ):
        self._check_steps(name, dtype, overrides)

    def _check_steps(self, name: str, dtype: str, overrides: dict[str, Any]):
        entry = registry.get(name)
        options = {**entry.kwargs, **overrides}
        ours, theirs = entry.factory(**options), getattr(_MODULE, entry.factory.__name__)(**options)
        params, grads = entry.params(dtype), [entry.grads(step, dtype) for step in range(3)]

        def three_steps(tx: Any) -> Any:
            _, moved, state = trees.run(tx, params, grads)
            # By the path of the parameter: the file keeps matrices and vectors apart.
            buffers = {
                (field, jax.tree_util.keystr(path)): leaf
                for field in ("mu", "nu")
                for tree in trees.fields(state, field)
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            }
            return moved, [buffers[key] for key in sorted(buffers)]

        actual, expected = three_steps(theirs), three_steps(ours)
        trees.assert_equal(actual, expected)
        for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(actual[0]), strict=True):
            self.assertFalse(bool((before == after).all()))

    def test_it_is_one_file_of_a_size_to_review(self):
        self.assertNotIn("mars_optax", _TEXT)
        self.assertNotIn("INLINE", _TEXT)
        self.assertLess(_TEXT.count("\n"), 450)

    @parameterized.parameters(("check",), ("format", "--check"))
    def test_its_text_is_in_order(self, *command: str):
        arguments = ("--line-length", "100", "--stdin-filename", "_mars.py", "-")
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *arguments],
            input=_TEXT,
            text=True,
            capture_output=True,
        )
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


if __name__ == "__main__":
    absltest.main()
