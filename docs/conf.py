"""Configuration of the site: `sphinx-build -W -n --keep-going -b html docs docs/_build/html`."""

import pathlib
import sys
from typing import Any

_DOCS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_DOCS.parent), str(_DOCS / "_ext")]

import external_names  # noqa: E402
import site_links  # noqa: E402

from mars_optax import __version__  # noqa: E402

project = "mars-optax"
author = "The mars-optax authors"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "breaks",
    "formulas",
]
exclude_patterns = ["_build", "_ext", "_static", "_tools"]

# -- Markdown and notebooks ----------------------------------------------------------------------

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4  # links to headings, as GitHub makes them
html_math_renderer = "formulas"
nb_execution_mode = "off"  # the notebooks' tests run them; the site shows what they stored

# -- Docstrings ----------------------------------------------------------------------------------

add_module_names = False
default_role = "code"  # single backticks, too
autodoc_member_order = "bysource"
# JAX's and Optax's names for kinds of argument are unions of a dozen types, and fill a screen for
# each signature: the docstrings state each argument's kind in words, and the site shows those.
autodoc_typehints = "none"
maximum_signature_line_length = 90
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

# -- HTML ----------------------------------------------------------------------------------------

html_theme = "sphinx_book_theme"
html_title = html_short_title = project
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "logo": {"text": project},
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navigation_with_keys": False,
    "navbar_persistent": [],  # the sidebar has the search
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True  # not the outputs

# -- One text for GitHub and for the site --------------------------------------------------------


def _page(app: Any, docname: str, source: list[str]) -> None:
    path = _DOCS / f"{docname}.md"
    if path.exists():
        source[0] = site_links.rewrite(source[0], path, path.parent)


def _included(app: Any, relative_path: pathlib.Path, parent: str, source: list[str]) -> None:
    if relative_path.suffix == ".md":
        path = (_DOCS / relative_path).resolve()
        # Only pages at the top of docs/ include others.
        source[0] = site_links.rewrite(source[0], path, _DOCS)


def _external(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Links to the names of other packages, without a network at build time."""
    from docutils import nodes

    url = external_names.URLS.get(node.get("reftarget"))
    if url is None:
        return None  # reported by the strict build
    return nodes.reference("", "", content, internal=False, refuri=url)


def setup(app: Any) -> None:
    """Connects the above."""
    app.connect("builder-inited", lambda app: site_links.copy_notebooks())
    app.connect("source-read", _page)
    app.connect("include-read", _included)
    app.connect("missing-reference", _external)
