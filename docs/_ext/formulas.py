"""Formulas as drawings, made at build time: a page needs no script, no font and no network."""

import re
from typing import Any
from xml.etree import ElementTree

import ziamath
from docutils import nodes

_SIZE = 16  # of the letters, in the drawing's units
_TEXT = _SIZE / 1.1  # the page's text: the small letters of screen fonts are higher than the font's
ziamath.config.precision = 2


def draw(latex: str, inline: bool, drawn: set[str]) -> str:
    """One formula as SVG, without the glyphs `drawn` before on the page; adds its own to them.

    Raises:
      ValueError: for a command that the converter does not know, or a sign that the font lacks.
    """
    formula = ziamath.Latex(latex, size=_SIZE, inline=inline, color="currentColor")
    # The converter takes commands that it does not know for names.
    if unknown := re.search(r"\\\w+", formula.mathmlstr()):
        raise ValueError(f"formula: expected LaTeX that ziamath knows, got {unknown[0]}: {latex}")
    svg = formula.svgxml()
    for glyph in svg.findall("symbol"):
        name = glyph.attrib["id"]
        if name.endswith("_0"):
            raise ValueError(f"formula: expected signs that the font has, got {latex}")
        if name in drawn:
            svg.remove(glyph)
        drawn.add(name)
    width, height = (float(svg.attrib.pop(name)) / _TEXT for name in ("width", "height"))
    depth = (formula.getyofst() - formula.margin) / _TEXT
    del svg.attrib["xmlns"]
    svg.attrib |= {
        "class": "formula",
        "role": "img",
        "aria-label": latex,
        "style": f"width:{width:.3f}em;height:{height:.3f}em;vertical-align:{depth:.3f}em",
    }
    return ElementTree.tostring(svg, encoding="unicode")


def _drawn(writer: Any) -> set[str]:
    """The glyphs on the page that `writer` writes."""
    return vars(writer).setdefault("drawn_glyphs", set())


def _inline(writer: Any, node: nodes.Node) -> None:
    writer.body.append(draw(node.astext(), True, _drawn(writer)))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Node) -> None:
    writer.body.append('<div class="math">')
    # As for Sphinx's own renderers, an empty line begins a new formula.
    for latex in re.split(r"\n\s*\n", node.astext().strip()):
        aligned = r"\\" in latex and r"\begin" not in latex
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}" if aligned else latex
        writer.body.append(f"<div>{draw(latex, False, _drawn(writer))}</div>")
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def keep_punctuation(app: Any, doctree: nodes.document, docname: str) -> None:
    """Forbids the line breaks that browsers allow between a formula and its punctuation."""
    for formula in list(doctree.findall(nodes.math)):
        parent, together = formula.parent, nodes.inline(classes=["together"])
        index = parent.index(formula)
        before, after = parent[:index], parent[index + 1 :]
        opening = closing = ""
        if before and isinstance(before[-1], nodes.Text):
            text, opening = re.fullmatch(r"(.*?)([(\[]*)", before[-1], re.DOTALL).groups()
            before[-1] = nodes.Text(text)
        if after and isinstance(after[0], nodes.Text):
            closing, text = re.fullmatch(r"([)\].,;:!?]*)(.*)", after[0], re.DOTALL).groups()
            after[0] = nodes.Text(text)
        if opening or closing:
            together.extend([nodes.Text(opening), formula, nodes.Text(closing)])
            parent[:] = [*before, together, *after]


def setup(app: Any) -> dict[str, bool]:
    """Registers the renderer, to be chosen by `html_math_renderer = "formulas"`."""
    app.add_html_math_renderer("formulas", (_inline, None), (_block, None))
    app.connect("doctree-resolved", keep_punctuation)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
