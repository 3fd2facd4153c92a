"""The distributions: the same at each build, complete, and importable from where they land."""

import email
import hashlib
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from importlib import util

import pytest
from absl.testing import absltest

import mars_optax

_ROOT = pathlib.Path(__file__).parent.parent.parent
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def _load(name: str):
    spec = util.spec_from_file_location(name, _ROOT / ".ci" / f"{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(*command, **kwargs) -> str:
    result = subprocess.run(command, capture_output=True, text=True, **kwargs)
    if result.returncode:
        raise AssertionError(result.stdout + result.stderr)
    return result.stdout


class LowerBoundsTest(absltest.TestCase):
    def test_every_requirement_has_a_lower_bound_and_one_in_all_extras(self):
        extras = list(_PROJECT["optional-dependencies"])
        pins = _load("lower_bounds").pins(_PROJECT, extras)
        self.assertContainsSubset({"jax==0.7.1", "optax==0.2.6"}, pins)
        self.assertLen({pin.split("==")[0] for pin in pins}, len(pins))

    def test_a_requirement_without_a_bound_and_two_bounds_are_errors(self):
        pins = _load("lower_bounds").pins
        with self.assertRaisesRegex(ValueError, "jax"):
            pins({"dependencies": ["jax"]}, [])
        two = {"dependencies": ["jax>=0.7"], "optional-dependencies": {"test": ["jax>=0.8"]}}
        with self.assertRaisesRegex(ValueError, "two lower bounds"):
            pins(two, ["test"])

    def test_the_python_of_the_classifiers_is_the_one_required(self):
        minor = {
            int(classifier.rpartition(".")[2])
            for classifier in _PROJECT["classifiers"]
            if classifier.startswith("Programming Language :: Python :: 3.")
        }
        self.assertEqual(_PROJECT["requires-python"], f">=3.{min(minor)}")
        self.assertIn(sys.version_info.minor, minor)


class ReadmeLinksTest(absltest.TestCase):
    def test_relative_links_become_absolute_and_others_stay(self):
        text = "[a](docs/x.md#y) [b](https://z.org/q) [c](#here) ![d](pic.png)"
        actual = _load("build_dist").absolute_links(text, "https://host/repo")
        self.assertEqual(
            actual,
            "[a](https://host/repo/blob/HEAD/docs/x.md#y) [b](https://z.org/q) [c](#here) "
            "![d](https://host/repo/raw/HEAD/pic.png)",
        )


@pytest.mark.slow
class DistributionsTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.scratch = pathlib.Path(scratch.name)
        cls.wheel, cls.sdist = cls._build("first", mask=0o022)

    @classmethod
    def _build(cls, name: str, mask: int) -> tuple[pathlib.Path, pathlib.Path]:
        out = cls.scratch / name
        _run(
            *(sys.executable, _ROOT / ".ci" / "build_dist.py", "--no-isolation", out),
            env={**os.environ, "SOURCE_DATE_EPOCH": "1735689600"},
            umask=mask,
        )
        (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
        return wheel, sdist

    def test_a_second_build_is_the_same_to_the_last_byte(self):
        second = self._build("second", mask=0o077)
        for a, b in zip((self.wheel, self.sdist), second, strict=True):
            self.assertEqual(a.name, b.name)
            digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (a, b)}
            self.assertLen(digests, 1, a.name)

    def test_the_index_would_take_them(self):
        output = _run(sys.executable, "-m", "twine", "check", "--strict", self.wheel, self.sdist)
        self.assertEqual(output.count("PASSED"), 2)

    def test_the_wheel_holds_the_package_and_nothing_else(self):
        with zipfile.ZipFile(self.wheel) as wheel:
            names = set(wheel.namelist())
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            message = email.message_from_bytes(wheel.read(metadata))
        info = metadata.rpartition("/")[0]
        self.assertSetEqual({name for name in names if not name.startswith(info)}, _sources())
        self.assertIn("mars_optax/py.typed", names)
        self.assertIn(f"{info}/licenses/LICENSE", names)
        self.assertEqual(message["Version"], mars_optax.__version__)
        self.assertEqual(message["License-Expression"], "Apache-2.0")
        self.assertEqual(message["Description-Content-Type"], "text/markdown")
        self.assertNotIn("License ::", str(message.get_all("Classifier")))

    def test_the_wheel_works_where_it_is_installed(self):
        target = self.scratch / "target"
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
        _run(*pip, "--target", target, self.wheel)
        program = (
            "import sys, jax, numpy, optax\n"
            "before = set(sys.modules)\n"
            "import mars_optax\n"
            "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
            "known = {'jax', 'mars_optax', 'numpy', 'optax'} | set(sys.stdlib_module_names)\n"
            "print(mars_optax.__file__, *new - known)\n"
            "tx = mars_optax.mars_lion(0.5)\n"
            "params = jax.numpy.ones((2, 2))\n"
            "updates, _ = tx.update(params, tx.init(params), params)\n"
            "assert (updates == -0.5).all()\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(target)}
        output = _run(sys.executable, "-c", program, env=environment, cwd=self.scratch)
        # From the target, and of no other package than these.
        self.assertEqual(output.split(), [str(target / "mars_optax/__init__.py")])

    def test_the_source_distribution_holds_what_installs_and_is_small(self):
        with tarfile.open(self.sdist) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
        made = {"PKG-INFO", "setup.cfg"}
        files = {name for name in names if ".egg-info/" not in name} - made
        root = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
        self.assertSetEqual(files, root | _sources())
        self.assertLess(self.sdist.stat().st_size, 1_000_000)


def _sources() -> set[str]:
    """The files of the package; the map of its inside is for those who have the repository."""
    return {
        str(path.relative_to(_ROOT))
        for path in (_ROOT / "mars_optax").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


if __name__ == "__main__":
    absltest.main()
