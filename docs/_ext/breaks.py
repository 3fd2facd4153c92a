"""Long names in tables may break after a separator, so that tables fit on a phone."""

import re
from typing import Any

from docutils import nodes

_LONG = re.compile(r"\S{12,}")
_SEPARATOR = re.compile(r"(?<=[_/.=,(|])(?=\w)")


def allow(app: Any, doctree: nodes.document, docname: str) -> None:
    """Puts `<wbr>` after separators of the long words of every table."""
    for cell in list(doctree.findall(nodes.entry)):
        for element in list(cell.findall(nodes.TextElement)):
            if not isinstance(element, nodes.math):
                element[:] = [part for child in element.children for part in _broken(child)]


def _broken(node: nodes.Node) -> list[nodes.Node]:
    if not isinstance(node, nodes.Text) or not _LONG.search(node):
        return [node]
    first, *rest = (nodes.Text(part) for part in _SEPARATOR.split(node))
    return [first, *(x for part in rest for x in (nodes.raw("", "<wbr>", format="html"), part))]


def setup(app: Any) -> dict[str, bool]:
    """Connects it."""
    app.connect("doctree-resolved", allow)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
