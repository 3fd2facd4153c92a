"""Python blocks of the documentation's pages, as text and as modules."""

import pathlib
import re
import types

DOCS = pathlib.Path(__file__).resolve().parent.parent.parent / "docs"


def blocks(name: str) -> list[str]:
    """The Python blocks of a page, in their order."""
    page = (DOCS / name).read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def example_text() -> str:
    """The file of the variant that docs/add_a_variant.md is about."""
    return next(block for block in blocks("add_a_variant.md") if block.startswith('"""'))


def example_variant() -> types.ModuleType:
    """The same, as if it were a file of the package."""
    module = types.ModuleType("example_variant")
    exec(compile(example_text(), str(DOCS / "add_a_variant.md"), "exec"), module.__dict__)
    return module
