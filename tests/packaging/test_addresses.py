"""One place for the addresses, and what follows from it."""

import contextlib
import email
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from importlib import util
from unittest import mock

import pytest
from absl.testing import absltest, parameterized
from IPython.core.inputtransformer2 import TransformerManager

from colabs import execute

_ROOT = pathlib.Path(__file__).parent.parent.parent
_SPEC = util.spec_from_file_location("addresses", _ROOT / ".ci" / "addresses.py")
addresses = util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(addresses)

_REPOSITORY = "https://github.com/someone/mars-optax"
_DOCUMENTATION = "https://someone.github.io/mars-optax"
_NAMES = [path.stem for path in execute.notebooks()]


def _first_cell(path: pathlib.Path) -> str:
    return next(
        "".join(cell["source"])
        for cell in json.loads(path.read_text())["cells"]
        if cell["cell_type"] == "code"
    )


class StoredTest(absltest.TestCase):
    def test_what_is_stored_follows_from_the_one_place(self):
        for path, text in addresses.files().items():
            self.assertEqual(path.read_text(), text, f"{path}: python .ci/addresses.py")

    def test_the_citation_has_the_version_of_the_package(self):
        text = (_ROOT / "CITATION.cff").read_text()
        (version,) = re.findall(r"^version: (.+)$", text, re.MULTILINE)
        source = (_ROOT / "mars_optax" / "_version.py").read_text()
        self.assertEqual(source, f'__version__ = "{version}"\n')


class FirstCellTest(parameterized.TestCase):
    def _run(self, repository: str, importable: bool) -> list[str]:
        """Runs the first cell; returns the commands that it gives to pip."""
        shell = mock.Mock()
        found = object() if importable else None
        code = TransformerManager().transform_cell(addresses.install_cell(repository))
        with mock.patch.object(util, "find_spec", return_value=found):
            exec(code, {"get_ipython": lambda: shell})
        return [" ".join(call.args) for call in shell.run_line_magic.call_args_list]

    @parameterized.parameters("", _REPOSITORY)
    def test_it_does_nothing_where_the_package_is(self, repository: str):
        self.assertEmpty(self._run(repository, importable=True))

    def test_without_an_address_it_says_what_to_do_and_stops(self):
        with self.assertRaisesRegex(ModuleNotFoundError, r"[Cc]lone .* pip install"):
            self._run("", importable=False)

    def test_with_an_address_it_installs_from_there(self):
        (command,) = self._run(_REPOSITORY, importable=False)
        self.assertEqual(command, f'pip install -q "mars-optax[bench] @ git+{_REPOSITORY}"')


class AppliedTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        files = ["CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md"]
        for name in files:
            shutil.copy(_ROOT / name, cls.root)
        ignore = shutil.ignore_patterns("__pycache__")
        for name in (".ci", "colabs", "mars_optax"):
            shutil.copytree(_ROOT / name, cls.root / name, ignore=ignore)
        text = (_ROOT / "pyproject.toml").read_text()
        for key, value in {"repository": _REPOSITORY, "documentation": _DOCUMENTATION}.items():
            text, count = re.subn(rf'^{key} = ".*"$', f'{key} = "{value}/"', text, flags=re.M)
            assert count == 1, key
        (cls.root / "pyproject.toml").write_text(text)
        subprocess.run([sys.executable, cls.root / ".ci" / "addresses.py"], check=True)

    def test_a_second_run_changes_nothing_and_none_is_left_where_the_address_goes(self):
        for path, text in addresses.files(self.root).items():
            self.assertEqual(path.read_text(), text)
        gone = {"repository": "", "documentation": ""}
        pyproject, citation = (
            (self.root / name).read_text() for name in ("pyproject.toml", "CITATION.cff")
        )
        urls = tomllib.loads(addresses.project_urls(pyproject, gone))["project"]["urls"]
        self.assertTrue(all("arxiv.org" in url for url in urls.values()), urls)
        self.assertNotIn("someone", addresses.citation(citation, gone))

    def test_the_project_has_its_urls(self):
        urls = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["urls"]
        expected = {
            "Source": _REPOSITORY,
            "Documentation": _DOCUMENTATION,
            "Changelog": f"{_REPOSITORY}/blob/HEAD/CHANGELOG.md",
            "Issues": f"{_REPOSITORY}/issues",
        }
        self.assertEqual(urls, urls | expected)
        citation = (self.root / "CITATION.cff").read_text()
        self.assertIn(f'repository-code: "{_REPOSITORY}"\n', citation)

    @parameterized.parameters(*_NAMES)
    def test_a_notebook_has_its_badge_and_installs_and_keeps_its_outputs(self, name: str):
        path = self.root / "colabs" / f"{name}.ipynb"
        before, after = (
            execute.nbformat.read(file, as_version=4) for file in (execute.FOLDER / path.name, path)
        )
        address = "https://colab.research.google.com/github/someone/mars-optax/blob/HEAD/colabs/"
        self.assertIn(f"]({address}{name}.ipynb)\n\n", after.cells[0].source)
        self.assertEqual(_first_cell(path), addresses.install_cell(_REPOSITORY))
        self.assertEqual(after.cells[2:], before.cells[2:])
        self.assertEqual(execute.code_hash(after), execute.code_hash(before))

    def test_other_hosts_have_no_badge(self):
        self.assertEmpty(addresses.badge("https://example.org/mars-optax", "x"))

    @pytest.mark.slow
    def test_the_wheel_has_the_urls_and_absolute_links(self):
        out = self.root / "dist"
        command = [sys.executable, self.root / ".ci" / "build_dist.py", "--no-isolation", out]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1735689600"}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        (wheel,) = out.glob("*.whl")
        with contextlib.closing(zipfile.ZipFile(wheel)) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
            message = email.message_from_bytes(archive.read(name))
        urls = message.get_all("Project-URL")
        self.assertIn(f"Source, {_REPOSITORY}", urls)
        self.assertIn(f"Documentation, {_DOCUMENTATION}", urls)
        links = re.findall(r"\]\(([^)#][^)]*)\)", message.get_payload())
        self.assertNotEmpty([link for link in links if link.startswith(f"{_REPOSITORY}/blob/")])
        self.assertEmpty([link for link in links if not link.startswith("https://")])


if __name__ == "__main__":
    absltest.main()
