"""What the sources must not do: read files in a format that runs code; import what measures."""

import ast
import pathlib
from collections.abc import Iterator

from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).parents[2]
_RUN_CODE = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(alias.name for alias in node.names)]
    return []


def _unsafe(source: str) -> Iterator[str]:
    """Imports of modules that read objects, and NumPy told to."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                value = keyword.value
                is_off = isinstance(value, ast.Constant) and value.value is False
                if keyword.arg == "allow_pickle" and not is_off:
                    yield ast.unparse(node)
        yield from (name for name in _imported(node) if name.split(".")[0] in _RUN_CODE)


class PickleTest(parameterized.TestCase):
    @parameterized.parameters("mars_optax", "benchmarks", "tests")
    def test_nothing_is_unpickled(self, folder: str):
        paths = sorted((_ROOT / folder).rglob("*.py"))
        # These read what they have just written: users' tools pickle optimizers.
        paths = [
            path
            for path in paths
            if path.parent.name != "differential"
            and path.name not in ("test_flat_state.py", "test_settings_of_jax.py")
        ]
        self.assertGreater(len(paths), 5)
        found = {str(path): list(_unsafe(path.read_text())) for path in paths}
        self.assertEmpty({path: what for path, what in found.items() if what})

    @parameterized.parameters(
        "import pickle",
        "import os, shelve as s",
        "from marshal import loads",
        "from six.moves import cPickle, pickle",
        "import _pickle",
        "np.load(file, allow_pickle=True)",
        "np.load(file, allow_pickle=flag)",
        "numpy.load(file, mmap_mode=None, allow_pickle=1)",
    )
    def test_the_walk_finds_it(self, source: str):
        self.assertNotEmpty(list(_unsafe(source)))

    def test_the_walk_lets_others_pass(self):
        self.assertEmpty(list(_unsafe("np.load(a); np.load(b, allow_pickle=False); import json")))


class BoundaryTest(parameterized.TestCase):
    @parameterized.parameters(("mars_optax", ("benchmarks", "tests")), ("tests", ("benchmarks",)))
    def test_nothing_imports_what_stands_above(self, folder: str, above: tuple[str, ...]):
        paths = [
            path
            for path in (_ROOT / folder).rglob("*.py")
            if "benchmarks" not in path.relative_to(_ROOT).parts
        ]
        self.assertGreater(len(paths), 5)
        for path in paths:
            nodes = ast.walk(ast.parse(path.read_text()))
            roots = {name.split(".")[0] for node in nodes for name in _imported(node)}
            self.assertEmpty(roots.intersection(above), path)


if __name__ == "__main__":
    absltest.main()
