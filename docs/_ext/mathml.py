"""Formulas as MathML, made at build time: a browser needs no script and no network for them."""

import re
from typing import Any

from docutils import nodes
from latex2mathml import converter


def convert(latex: str, display: str) -> str:
    """One formula; what the converter does not know is an error."""
    mathml = converter.convert(latex, display=display)
    # The converter takes commands that it does not know for names.
    unknown = re.findall(r"\\\w+", mathml)
    if unknown:
        raise ValueError(f"formula: expected LaTeX that latex2mathml knows, got {unknown[0]}")
    return mathml


def _inline(writer: Any, node: nodes.Node) -> None:
    writer.body.append(convert(node.astext(), "inline"))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Node) -> None:
    writer.body.append('<div class="math">')
    # As for Sphinx's own renderers, an empty line begins a new formula.
    for latex in re.split(r"\n\s*\n", node.astext().strip()):
        aligned = r"\\" in latex and r"\begin" not in latex
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}" if aligned else latex
        writer.body.append(convert(latex, "block"))
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Registers the renderer, to be chosen by `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
