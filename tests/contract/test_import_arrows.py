"""Imports: they point down, touch public names only, and load nothing that was not asked for."""

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from absl.testing import absltest, parameterized

import mars_optax

_ROOT = pathlib.Path(mars_optax.__file__).parent
_PACKAGE = "mars_optax"
_INSIDE = f"{_PACKAGE}._src"

# The map of `mars_optax/_src/README.md`, from the ground up. A module imports from floors below
# its own; a new module has to be given a floor.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "leaf.clipping",
        "leaf.correction",
        "leaf.momentum",
        "leaf.newton_schulz",
        "leaf.precision",
        "leaf.quantization",
        "leaf.root",
    ),
    ("arguments", "checks", "mesh", "named", "trees", "types"),
    (
        "adaptive",
        "in_shard_map",
        "kernels.rewrite",
        "kernels.shards",
        "kernels.tiling",
        "partition",
    ),
    ("kernels.gather", "kernels.mosaic_gpu", "kernels.mosaic_tpu", "kernels.symmetric"),
    ("kernels.calls",),
    ("execute",),
    ("estimator", "reshard", "run"),
    ("stacks", "states"),
    ("describe", "fused", "orthogonalize", "row_normalization", "transformation"),
    ("assembly", "links"),
    (
        "diagnose",
        "rounding",
        "wrappers",
        "variants.adamw",
        "variants.any",
        "variants.lion",
        "variants.mars_m",
        "variants.shampoo",
        "variants.soap",
        "variants.storm",
    ),
)

# Arrows between neighbours of one floor.
BESIDE: frozenset[tuple[str, str]] = frozenset(
    {
        ("leaf.correction", "leaf.precision"),
        ("leaf.clipping", "leaf.precision"),
        ("named", "arguments"),
        ("kernels.gather", "kernels.symmetric"),
        ("leaf.newton_schulz", "leaf.precision"),
        ("leaf.quantization", "leaf.precision"),
        # AdamW is the partner of every variant for the leaves that are no matrices.
        ("variants.any", "variants.adamw"),
        ("variants.lion", "variants.adamw"),
        ("variants.mars_m", "variants.adamw"),
        ("variants.shampoo", "variants.adamw"),
        ("variants.soap", "variants.adamw"),
        ("variants.storm", "variants.adamw"),
    }
)

# The one module that imports the kernels, where it needs them: the package works without.
_DOOR = "execute"

# What a layer may import from outside; the rest of the package takes these and its own.
OUTSIDE = frozenset({"jax", "numpy", "optax"})
FLOOR = {module: floor for floor, modules in enumerate(LAYERS) for module in modules}

_HEAVY = ("flax", "chex", "matplotlib", "absl", "orbax", "jax.experimental.pallas")


def _files() -> list[pathlib.Path]:
    return sorted(_ROOT.rglob("*.py"))


def _module(path: pathlib.Path) -> str:
    """The module's name inside `_src`, such as `leaf.precision`."""
    return ".".join(path.relative_to(_ROOT / "_src").with_suffix("").parts)


def _imports(path: pathlib.Path) -> Iterator[str]:
    """The full name of everything a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path}: relative import in line {node.lineno}")
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _inside(name: str) -> str | None:
    """The module of `_src` that an imported name is or lies in."""
    name = name.removeprefix(f"{_INSIDE}.")
    while name and name not in FLOOR:
        name = name.rpartition(".")[0]
    return name or None


class ImportArrowsTest(parameterized.TestCase):
    def test_every_module_has_a_floor_and_every_floor_its_modules(self):
        modules = {
            _module(path) for path in (_ROOT / "_src").rglob("*.py") if path.stem != "__init__"
        }
        self.assertSetEqual(modules, set(FLOOR))

    def test_arrows_point_down(self):
        upward = []
        for path in (_ROOT / "_src").rglob("*.py"):
            if path.stem == "__init__":
                self.assertEmpty(list(_imports(path)), f"{path} has imports")
                continue
            module = _module(path)
            for name in _imports(path):
                if not name.startswith(f"{_PACKAGE}."):
                    continue
                self.assertTrue(name.startswith(f"{_INSIDE}."), f"{module} imports {name}")
                target = _inside(name)
                self.assertIsNotNone(target, f"{module} imports {name}")
                if FLOOR[target] >= FLOOR[module] and (module, target) not in BESIDE:
                    upward.append(f"{module} -> {target}")
        self.assertEmpty(upward)

    def test_kernels_are_behind_one_door(self):
        outside = {
            _module(path)
            for path in (_ROOT / "_src").rglob("*.py")
            if not _module(path).startswith("kernels.")
            and any(f"{_INSIDE}.kernels" in name for name in _imports(path))
        }
        self.assertEqual(outside, {_DOOR})

    def test_no_arrow_is_allowed_in_vain(self):
        arrows = {
            (_module(path), _inside(name))
            for path in (_ROOT / "_src").rglob("*.py")
            for name in _imports(path)
            if name.startswith(f"{_INSIDE}.")
        }
        self.assertContainsSubset(BESIDE, arrows)

    def test_only_public_names_of_others_are_used(self):
        for path in _files():
            for name in _imports(path):
                if name.split(".")[0] == _PACKAGE:
                    continue
                private = [part for part in name.split(".") if part.startswith("_")]
                self.assertEmpty(private, f"{path.name} imports {name}")
            for node in ast.walk(ast.parse(path.read_text())):
                # optax._src, jax._src and the like can also be reached without an import.
                if isinstance(node, ast.Attribute) and node.attr == "_src":
                    self.fail(f"{path.name}: `_src` in line {node.lineno}")

    def test_only_jax_numpy_and_optax_are_needed(self):
        for path in _files():
            for name in _imports(path):
                root = name.split(".")[0]
                if root not in (_PACKAGE, *sys.stdlib_module_names):
                    self.assertIn(root, OUTSIDE, f"{path.name} imports {name}")

    def test_the_entrance_lists_names_and_holds_no_logic(self):
        tree = ast.parse((_ROOT / "__init__.py").read_text())
        for node in tree.body[1:]:
            is_dir = isinstance(node, ast.FunctionDef) and node.name == "__dir__"
            is_list = isinstance(node, ast.ImportFrom | ast.Assign)
            self.assertTrue(is_list or is_dir, f"line {node.lineno}")


class ImportCostTest(absltest.TestCase):
    def test_importing_loads_nothing_heavy(self):
        # Modules that JAX and Optax load on their own are not ours to answer for.
        program = (
            "import sys, jax, optax\n"
            "before = set(sys.modules)\n"
            "import mars_optax\n"
            "print('\\n'.join(sorted(set(sys.modules) - before)))\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        loaded = result.stdout.split()
        self.assertIn("mars_optax._src.leaf.precision", loaded)
        heavy = [m for m in loaded if any(m == h or m.startswith(f"{h}.") for h in _HEAVY)]
        self.assertEmpty(heavy)
        roots = {module.partition(".")[0] for module in loaded}
        self.assertContainsSubset(roots, {_PACKAGE, *OUTSIDE, *sys.stdlib_module_names})

    def test_importing_starts_no_backend_and_changes_no_configuration(self):
        program = (
            "import jax, optax\n"
            "before = dict(jax.config.values)\n"
            "import mars_optax\n"
            "assert dict(jax.config.values) == before\n"
            # The number of devices can be set only while no backend runs.
            "jax.config.update('jax_num_cpu_devices', 3)\n"
            "assert len(jax.devices('cpu')) == 3\n"
        )
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True
        )
        self.assertEqual(result.returncode, 0, result.stderr)


if __name__ == "__main__":
    absltest.main()
