"""Writes the addresses of `[tool.mars-optax]` in pyproject.toml to every file that stores them.

    python .ci/addresses.py

Run it after a change of an address. The files are pyproject.toml itself (the project URLs, which
the wheel carries), CITATION.cff, and the notebooks (badge and first cell). The README's links stay
relative: `.ci/build_dist.py` makes those of the distributions absolute.
"""

import pathlib
import re
import tomllib

import nbformat

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def read(root: pathlib.Path = _ROOT) -> dict[str, str]:
    """The addresses of `[tool.mars-optax]`, without a slash at the end; empty where unknown."""
    table = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mars-optax"]
    return {key: table[key].rstrip("/") for key in ("repository", "documentation")}


def project_urls(text: str, addresses: dict[str, str]) -> str:
    """pyproject.toml with the project URLs that follow from the addresses."""
    repository = addresses["repository"]
    urls = {
        "Source": repository,
        "Documentation": addresses["documentation"],
        "Changelog": repository and f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": repository and f"{repository}/issues",
    }
    text = re.sub(rf"^(?:{'|'.join(urls)}) = .*\n", "", text, flags=re.MULTILINE)
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items() if url)
    return text.replace("[project.urls]\n", f"[project.urls]\n{lines}")


def citation(text: str, addresses: dict[str, str]) -> str:
    """CITATION.cff with the addresses."""
    values = {"repository-code": addresses["repository"], "url": addresses["documentation"]}
    text = re.sub(r"^(?:repository-code|url): .*\n", "", text, flags=re.MULTILINE)
    return text + "".join(f'{key}: "{value}"\n' for key, value in values.items() if value)


def install_cell(repository: str) -> str:
    """The first cell of a notebook. Where the package can be imported, it does nothing."""
    if repository:
        install = f'%pip install -q "mars-optax[bench] @ git+{repository}"'
    else:
        install = """raise ModuleNotFoundError(
        "mars_optax is not installed. Clone its repository, run `python -m pip install '.[bench]'` "
        "there, and restart this notebook's kernel."
    )"""
    return f"""# Installs the package where it is missing, as in Colab.
import importlib.util

if importlib.util.find_spec("mars_optax") is None:
    {install}"""


def badge(repository: str, name: str) -> str:
    """Markdown that opens a notebook in Colab, which reads from GitHub alone."""
    if not repository.startswith("https://github.com/"):
        return ""
    colab = "https://colab.research.google.com"
    path = repository.removeprefix("https://github.com/")
    image = f"![Open in Colab]({colab}/assets/colab-badge.svg)"
    return f"[{image}]({colab}/github/{path}/blob/HEAD/colabs/{name}.ipynb)\n\n"


def notebook(path: pathlib.Path, repository: str) -> str:
    """The text of a notebook with its badge and its first cell."""
    content = nbformat.read(path, as_version=4)
    title, _, text = content.cells[0].source.partition("\n\n")
    text = re.sub(r"^\[!\[Open in Colab\].*\n\n", "", text)
    content.cells[0].source = f"{title}\n\n{badge(repository, path.stem)}{text}"
    content.cells[1].source = install_cell(repository)
    return nbformat.writes(content) + "\n"


def files(root: pathlib.Path = _ROOT) -> dict[pathlib.Path, str]:
    """The files that store addresses, each with the text that it should have."""
    addresses = read(root)
    found = {
        path: write(path.read_text(), addresses)
        for path, write in (
            (root / "pyproject.toml", project_urls),
            (root / "CITATION.cff", citation),
        )
    }
    for path in sorted((root / "colabs").glob("*.ipynb")):
        found[path] = notebook(path, addresses["repository"])
    return found


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
