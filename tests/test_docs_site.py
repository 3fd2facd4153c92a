"""What the site shows is complete: every public name, every page, every link outside of docs/.

The pages are read as text: Sphinx need not be installed. `.ci/run` builds the site.
"""

import importlib.util
import inspect
import json
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

import mars_optax

_DOCS = pathlib.Path(__file__).parent.parent / "docs"


def _module(name: str):
    spec = importlib.util.spec_from_file_location(name, _DOCS / "_ext" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site_links = _module("site_links")
external_names = _module("external_names")


def _pages() -> list[pathlib.Path]:
    return sorted([*_DOCS.glob("*.md"), *(_DOCS / "api").glob("*.md")])


def _contents() -> list[str]:
    """The entries of all tables of contents."""
    entries = []
    for page in _pages():
        for body in re.findall(r"^```{toctree}\n(.*?)^```$", page.read_text(), re.M | re.S):
            lines = body.splitlines()
            entries += [line for line in lines if line and not line.startswith(":")]
    return entries


def _documented(page: str = "*") -> list[tuple[str, str]]:
    """The kind and the name of everything on one page of the reference, or on all."""
    texts = [path.read_text() for path in (_DOCS / "api").glob(f"{page}.md")]
    return re.findall(r"^\.\. auto(\w+):: mars_optax\.(\w+)$", "\n".join(texts), re.M)


class ReferenceTest(parameterized.TestCase):
    def test_every_public_name_is_documented_once(self):
        public = {name for name in vars(mars_optax) if not name.startswith("_")}
        public -= {name for name in public if inspect.ismodule(getattr(mars_optax, name))}
        self.assertCountEqual(public, mars_optax.__all__)
        self.assertCountEqual([name for _, name in _documented()], mars_optax.__all__)

    def test_tables_have_the_names_of_their_page_in_its_order(self):
        index = (_DOCS / "api.md").read_text()
        rows = re.findall(r"^\| \[.*\]\(api/(\w+)\.md\) \| (.*) \|$", index, re.M)
        self.assertLen(rows, len(list((_DOCS / "api").glob("*.md"))))
        for page, names in rows:
            expected = [name for _, name in _documented(page)]
            self.assertEqual(names, ", ".join(f"`{name}`" for name in expected))
            text = (_DOCS / "api" / f"{page}.md").read_text()
            summary = re.search(
                r"^\.\. autosummary::\n   :nosignatures:\n\n(.*?)^```$", text, re.M | re.S
            )
            self.assertEqual(summary[1].split(), expected, page)

    def test_classes_are_documented_as_classes(self):
        for kind, name in _documented():
            is_class = inspect.isclass(getattr(mars_optax, name))
            self.assertEqual(kind, "class" if is_class else "function", name)

    def test_names_of_other_packages_have_a_page(self):
        sources = [inspect.getdoc(getattr(mars_optax, name)) or "" for _, name in _documented()]
        names = re.findall(r":\w+:`((?:jax|optax|re)\.[\w.]+)`", "\n".join(sources))
        self.assertGreater(len(names), 10)
        self.assertLessEqual(set(names), set(external_names.URLS))


class ContentsTest(parameterized.TestCase):
    def test_every_notebook_is_listed_once_and_on_their_page(self):
        page = (site_links.NOTEBOOKS / "README.md").read_text()
        expected = re.findall(r"\((\w+)\.ipynb\)", page)
        listed = [entry for entry in _contents() if entry.startswith("_colabs/")]
        self.assertCountEqual(listed, [f"_colabs/{name}" for name in expected])
        self.assertCountEqual(
            expected, [path.stem for path in site_links.NOTEBOOKS.glob("*.ipynb")]
        )

    def test_every_page_is_in_a_table_of_contents(self):
        entries = _contents()
        for page in _pages():
            name = page.relative_to(_DOCS).with_suffix("").as_posix()
            if name != "index":
                self.assertEqual(entries.count(name), 1, name)

    def test_the_menu_has_four_groups_of_about_twenty_pages(self):
        home = (_DOCS / "index.md").read_text()
        groups = re.findall(
            r"^```{toctree}\n:hidden:\n:caption: (\w+)\n\n(.*?)^```$", home, re.M | re.S
        )
        self.assertEqual([name for name, _ in groups], ["Learn", "Choose", "Scale", "Develop"])
        # What is of no use to most readers goes below another page.
        self.assertLessEqual(sum(len(body.split()) for _, body in groups), 21)
        # The list on the page leads to pages of the group.
        for name, body in groups:
            row = re.search(rf"^- \*\*{name}\*\*: (.*)$", home, re.M)[1]
            self.assertContainsSubset(re.findall(r"\((\w+)\.md\)", row), body.split())

    def test_the_home_page_installs_as_the_readme_does(self):
        for path in (_DOCS / "index.md", _DOCS / "getting_started.md"):
            readme = (_DOCS.parent / "README.md").read_text()
            install = re.search(r"^## Install\n.*?^(```bash\n.*?^```$)", readme, re.M | re.S)[1]
            self.assertIn(install, path.read_text())

    def test_every_entry_without_a_pattern_is_a_page(self):
        for entry in _contents():
            if "*" not in entry and not entry.startswith("_colabs/"):
                self.assertTrue((_DOCS / f"{entry}.md").exists(), entry)

    @parameterized.parameters(*site_links.INCLUDED_BY.items())
    def test_files_elsewhere_are_included_by_their_page(self, name: str, page: str):
        self.assertIn(f"```{{include}} ../{name}\n```", (_DOCS / page).read_text())
        self.assertTrue((_DOCS.parent / name).exists())


class LinksTest(parameterized.TestCase):
    @parameterized.parameters(
        ("README.md", "[a](docs/faq.md#x)", "[a](faq.md#x)"),
        ("README.md", "[`a`](benchmarks/README.md#b)", "[`a`](benchmarks.md#b)"),
        ("benchmarks/README.md", "![a](results/x.png)", "![a](results/x.png)"),
        ("benchmarks/README.md", "[a](../docs/kernels.md)", "[a](kernels.md)"),
        (
            "benchmarks/README.md",
            "![a](results/step_time_small_h100.png)",
            "![a](../benchmarks/results/step_time_small_h100.png)",
        ),
        ("docs/faq.md", "[a](../README.md)", "[a](index.md)"),
        ("docs/faq.md", "[a](which_mars.md)", "[a](which_mars.md)"),
        ("docs/faq.md", "[a](https://b.c/d) [e](#f)", "[a](https://b.c/d) [e](#f)"),
        ("docs/faq.md", "`[a](../README.md)`", "`[a](../README.md)`"),
        (
            "docs/faq.md",
            "```python\nx = y[0](../README.md)\n```\n[a](../README.md)",
            "```python\nx = y[0](../README.md)\n```\n[a](index.md)",
        ),
        ("README.md", "[a\nb](LICENSE)", "[a\nb](../LICENSE)"),
    )
    def test_links_are_right_on_the_site(self, source: str, text: str, expected: str):
        self.assertEqual(site_links.rewrite(text, site_links.ROOT / source, _DOCS), expected)

    def test_notebooks_are_copied_with_outputs_and_links_of_the_site(self):
        root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())).resolve()
        docs, notebooks = root / "docs", root / "colabs"
        paths = {"ROOT": root, "DOCS": docs, "NOTEBOOKS": notebooks}
        self.enterContext(
            mock.patch.multiple(site_links, NOTEBOOK_COPIES=docs / "_colabs", **paths)
        )
        code = {"cell_type": "code", "source": "x[0](two.ipynb)", "outputs": ["kept"]}
        links = ["[a](../docs/page.md) [b](two.ipynb)\n", "[c](../README.md#use)"]
        cells = [{"cell_type": "markdown", "source": links}, code]
        docs.mkdir()
        notebooks.mkdir()
        for name, text in {
            "README.md": "",
            "docs/page.md": "",
            "colabs/one.ipynb": json.dumps({"cells": cells}),
            "colabs/two.ipynb": '{"cells": []}',
        }.items():
            (root / name).write_text(text)
        site_links.copy_notebooks()
        first, second = json.loads((docs / "_colabs" / "one.ipynb").read_text())["cells"]
        self.assertEqual(first["source"], "[a](../page.md) [b](two.ipynb)\n[c](../index.md#use)")
        self.assertEqual(second, code)
        (notebooks / "two.ipynb").unlink()
        site_links.copy_notebooks()
        self.assertEqual([path.name for path in (docs / "_colabs").iterdir()], ["one.ipynb"])

    @parameterized.parameters(
        *(page.relative_to(site_links.ROOT).as_posix() for page in sorted(_DOCS.glob("*.md"))),
        "README.md",
        "CONTRIBUTING.md",
        "benchmarks/README.md",
    )
    def test_tables_are_narrow(self, name: str):
        text = (site_links.ROOT / name).read_text()
        rows = re.findall(r"^\|(?: ?:?-+:? ?\|)+$", text, re.M)
        self.assertEqual([row for row in rows if row.count("|") > 6], [])


if __name__ == "__main__":
    absltest.main()
