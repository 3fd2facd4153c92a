"""One text for GitHub and for the site: relative links, rewritten where a page lies elsewhere."""

import json
import os
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = ROOT / "colabs"
# Where the site's copies of the notebooks lie: Sphinx reads nothing outside of docs/.
NOTEBOOK_COPIES = DOCS / "_colabs"

# Files outside of docs/ that a page of the site includes as a whole.
INCLUDED_BY = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/equal_tokens_h200.md": "large_batches.md",
    "benchmarks/results/gpt2_33m_1000_h200.md": "evidence.md",
    "benchmarks/results/gpt2_33m_4000_h200.md": "evidence.md",
    "benchmarks/results/gpt2_33m_8000_h200.md": "evidence.md",
    "benchmarks/results/large_batch_h200.md": "large_batches.md",
    "benchmarks/results/vision_resnet18_12_h200.md": "evidence.md",
    "benchmarks/results/vision_vit_20_h200.md": "evidence.md",
    "colabs/README.md": "notebooks.md",
    "mars_optax/_src/README.md": "architecture.md",
    "tests/data/README.md": "recorded_trajectories.md",
}

# The site has an entrance of its own in the README's place.
_PAGES = {"README.md": "index.md", **INCLUDED_BY}

_CODE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def rewrite(text: str, source: pathlib.Path, page_folder: pathlib.Path) -> str:
    """Markdown of `source` with its relative links made right for a page in `page_folder`.

    Links to nowhere are left as they are: the strict build reports them.
    """

    def link(match: re.Match[str]) -> str:
        path = (source.parent / match[2]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        if name in _PAGES:
            path = DOCS / _PAGES[name]
        elif path.parent == NOTEBOOKS and path.suffix == ".ipynb":
            path = NOTEBOOK_COPIES / path.name
        return match[1] + pathlib.Path(os.path.relpath(path, page_folder)).as_posix() + match[3]

    # Code may look like a link. Inline code stays, too, also where it is a link's text.
    codes: list[str] = []

    def hide(match: re.Match[str]) -> str:
        codes.append(match[0])
        return f"\0{len(codes) - 1}\0"

    hidden = _LINK.sub(link, _CODE.sub(hide, text))
    return re.sub(r"\0(\d+)\0", lambda match: codes[int(match[1])], hidden)


def copy_notebooks() -> None:
    """Copies the notebooks, with their stored outputs, to where Sphinx finds them."""
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    NOTEBOOK_COPIES.mkdir(exist_ok=True)
    for copy in NOTEBOOK_COPIES.glob("*.ipynb"):
        if not (NOTEBOOKS / copy.name).exists():
            copy.unlink()
    for path in notebooks:
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                # A list of lines or one string: the format allows both.
                cell["source"] = rewrite("".join(cell["source"]), path, NOTEBOOK_COPIES)
        # How cells are highlighted, where a notebook was stored without what ran it.
        notebook.setdefault("metadata", {}).setdefault("language_info", {"name": "python"})
        content = json.dumps(notebook)
        copy = NOTEBOOK_COPIES / path.name
        # An unchanged copy keeps its time, so that Sphinx does not read it again.
        if not copy.exists() or copy.read_text() != content:
            copy.write_text(content)
