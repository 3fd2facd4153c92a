"""What type checkers see of an editable installation, from outside of the repository."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv

import pytest
from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parent.parent.parent
_CONSUMER = """import mars_optax

mars_optax.mars(1e-3, correction="exact")
mars_optax.mars(1e-3, correction="exakt")
"""


# Nothing of this checkout.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
class EditableTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        scratch = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        checkout, cls.project = scratch / "checkout", scratch / "project"
        shutil.copytree(_ROOT / "mars_optax", checkout / "mars_optax")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(_ROOT / name, checkout)
        cls.project.mkdir()
        (cls.project / "consumer.py").write_text(_CONSUMER)
        # An environment of its own, which has this one's packages, but not its editable ones: those
        # are in .pth files, which count in an environment's own folder alone.
        venv.create(scratch / "venv", with_pip=False)
        cls.python = str(scratch / "venv" / "bin" / "python")
        paths = sysconfig.get_paths(vars={"base": str(scratch / "venv")}, scheme="venv")
        ours = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
        pathlib.Path(paths["purelib"], "ours.pth").write_text("\n".join(sorted(ours)))
        pip = (sys.executable, "-m", "pip", "--python", cls.python, "install", "--quiet")
        offline = ("--no-build-isolation", "--no-deps", "--no-index")
        subprocess.run([*pip, *offline, "-e", checkout], check=True)
        where = "import mars_optax; print(mars_optax.__file__)"
        output = subprocess.check_output(
            [cls.python, "-c", where], text=True, cwd=cls.project, env=_ENVIRONMENT
        )
        assert output.strip() == str(checkout / "mars_optax" / "__init__.py"), output

    def _errors(self, *command: str) -> list[tuple[str, str]]:
        result = subprocess.run(
            [*command, "consumer.py"],
            capture_output=True,
            text=True,
            cwd=self.project,
            env=_ENVIRONMENT,
        )
        lines = re.findall(r"consumer\.py:(\d+):.*error: ", result.stdout)
        rules = re.findall(r"[\[(](\S+)[\])]$", result.stdout, re.MULTILINE)
        return list(zip(lines, rules, strict=True))

    def test_mypy_finds_the_package_and_a_wrong_literal(self):
        mypy = (
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--cache-dir",
            str(self.project / "cache"),
        )
        errors = self._errors(*mypy, "--python-executable", self.python)
        self.assertEqual(errors, [("4", "arg-type")])

    def test_pyright_finds_the_package_and_a_wrong_literal(self):
        pyright = shutil.which("pyright", path=pathlib.Path(sys.executable).parent)
        if pyright is None:
            self.skipTest("pyright is not installed")
        errors = self._errors(pyright, "--pythonpath", self.python)
        self.assertEqual(errors, [("4", "reportArgumentType")])


if __name__ == "__main__":
    absltest.main()
