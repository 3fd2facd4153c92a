"""Prints the lowest versions that pyproject.toml allows, as pins for pip.

    python -m pip install $(python .ci/lower_bounds.py test)

Args: names of extras, whose requirements are pinned, too. A requirement without a lower bound is
an error: it would promise every version there ever was.
"""

import pathlib
import re
import sys
import tomllib

# Refuses the lowest JAX; without it its tests are skipped.
_LEFT_OUT = ("optimistix",)
_PYPROJECT = pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml"


def pins(project: dict, extras: list[str]) -> list[str]:
    """`name==version` for each requirement `name>=version` of a project and some of its extras."""
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    found = {}
    for requirement in requirements:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)", requirement.strip())
        if match is None:
            raise ValueError(f"expected `name>=version`, got {requirement!r}")
        name, version = match.groups()
        if found.setdefault(name, version) != version:
            raise ValueError(f"{name} has two lower bounds: {found[name]} and {version}")
    return [f"{name}=={version}" for name, version in found.items() if name not in _LEFT_OUT]


if __name__ == "__main__":
    print("\n".join(pins(tomllib.loads(_PYPROJECT.read_text())["project"], sys.argv[1:])))
