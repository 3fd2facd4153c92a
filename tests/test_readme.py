"""The Python of the README and of the documentation runs, in the order in which it stands there."""

import inspect
import pathlib
import re

import jax
import optax
from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).parent.parent
_PAGES = [
    _ROOT / "README.md",
    *sorted((_ROOT / "docs").glob("*.md")),
    *sorted((_ROOT / "docs" / "api").glob("*.md")),
    *(_ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")),
    _ROOT / "benchmarks" / "README.md",
    _ROOT / "colabs" / "README.md",
    _ROOT / "mars_optax" / "_src" / "README.md",
    _ROOT / "tests" / "data" / "README.md",
]


def _run_blocks(page: pathlib.Path) -> tuple[int, dict]:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
    return len(blocks), namespace


class ReadmeTest(parameterized.TestCase):
    def test_the_readme_runs_and_trains(self):
        blocks, names = _run_blocks(_ROOT / "README.md")
        self.assertEqual(blocks, 2)
        self.assertLess(float(names["loss"](names["params"])), 0.1)
        self.assertEqual(names["optimizer"].step[...], 1)

    def test_the_readme_is_short(self):
        self.assertLessEqual(len((_ROOT / "README.md").read_text().splitlines()), 140)

    @parameterized.parameters(*(page.name for page in (_ROOT / "docs").glob("*.md")))
    def test_a_page_of_the_documentation_runs(self, name: str):
        if name == "kernels.md" and jax.__version_info__ < (0, 10):
            self.skipTest("kernels need JAX 0.10")
        muon = inspect.signature(optax.contrib.muon).parameters
        if name == "large_batches.md" and "consistent_rms" not in muon:
            self.skipTest("Optax's Muon has no `consistent_rms` yet")
        _run_blocks(_ROOT / "docs" / name)

    @parameterized.parameters(*_PAGES)
    def test_links_lead_to_files(self, page: pathlib.Path):
        for target in re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            self.assertTrue((page.parent / target).exists(), f"{page.name}: {target}")


if __name__ == "__main__":
    absltest.main()
