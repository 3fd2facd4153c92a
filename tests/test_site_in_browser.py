"""The built site in a browser: measured on a desk and on a phone, light and dark.

`MARS_OPTAX_SITE` names a built site; without it the slow test builds one, where Sphinx is there.
"""

import functools
import html.parser
import http.server
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import Any

import pytest
from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).parent.parent
_BUILDERS = ("sphinx", "sphinx_book_theme", "sphinx_copybutton", "myst_nb", "ziamath")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class _Loads(html.parser.HTMLParser):
    """What a page loads from other hosts."""

    def __init__(self):
        super().__init__()
        self.foreign = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(_LOADED.get(tag, "")) or ""
        if re.match(r"(https?:)?//", address):
            self.foreign.append(f"{tag}: {address}")


def _foreign(page: str) -> list[str]:
    parser = _Loads()
    parser.feed(page)
    return parser.foreign


def _foreign_style(style: str) -> list[str]:
    return re.findall(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^"')\s]*""", style)


def _pages(site: pathlib.Path) -> list[str]:
    pages = (path.relative_to(site) for path in sorted(site.rglob("*.html")))
    return [page.as_posix() for page in pages if page.parts[0] != "_static"]


# Runs in a page that the server below adds to the site, so that the browser lets it look into the
# frames in which it loads the others.
_PROBE = r"""
<!doctype html><meta charset="utf-8"><body><script>
const DESK = 1400, PHONE = 420;
const found = {faults: [], pages: 0, formulas: 0, results: {}};

async function load(frame, address) {
  const loaded = new Promise(resolve => frame.onload = resolve);
  frame.src = address;
  await loaded;
  return frame.contentWindow;
}

const name = e => e.tagName.toLowerCase() + (e.className.baseVal ?? e.className)
  .split(/\s+/).filter(Boolean).map(c => "." + c).join("") +
  " " + JSON.stringify((e.getAttribute("aria-label") || e.textContent).trim().slice(0, 50));
const scrolls = (view, e) => /auto|scroll/.test(view.getComputedStyle(e).overflowX);
const hides = (view, e) => /hidden|clip/.test(view.getComputedStyle(e).overflowX);

function luminance(colour) {
  const [r, g, b] = colour.match(/[\d.]+/g).slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function background(view, e) {
  for (; e; e = e.parentElement) {
    const colour = view.getComputedStyle(e).backgroundColor;
    if (!/, 0\)$|transparent/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
}

function contrast(view, e) {
  const [low, high] = [view.getComputedStyle(e).color, background(view, e)]
    .map(luminance).sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// Whether a reader can scroll `e` to its end: code anywhere; tables and formulas on a phone.
function mayScroll(view, width, e) {
  if (!scrolls(view, e)) return false;
  return e.matches("pre, .highlight") || e.querySelector(":scope > pre") !== null ||
    (width == PHONE && (e.matches("div.math") || e.querySelector("table") !== null));
}

function cut(view, width, article, report) {
  const style = view.getComputedStyle(article), box = article.getBoundingClientRect();
  const left = box.left + parseFloat(style.paddingLeft);
  const right = box.right - parseFloat(style.paddingRight);
  const visit = (e, low, high) => {
    const css = view.getComputedStyle(e), rect = e.getBoundingClientRect();
    if (css.display == "none" || css.visibility == "hidden" || rect.width <= 1) return;
    if (rect.left < low - 1 || rect.right > high + 1) {
      report("cut or too wide", name(e) + ` ${rect.left}..${rect.right} of ${low}..${high}`);
      return;
    }
    if (mayScroll(view, width, e) || e.tagName == "svg") return;
    if (scrolls(view, e) || hides(view, e)) {
      low = Math.max(low, rect.left);
      high = Math.min(high, rect.right);
    }
    for (const child of e.children) visit(child, low, high);
  };
  for (const child of article.children) visit(child, left, right);
}

function measure(view, width, report) {
  const page = view.document, root = page.documentElement;
  if (root.scrollWidth > width) report("wider than the screen", root.scrollWidth);
  const article = page.querySelector("article");
  if (!article) return;
  cut(view, width, article, report);
  for (const e of article.querySelectorAll("svg.formula")) {
    const {width, height} = e.getBoundingClientRect(), uses = [...e.querySelectorAll("use")];
    found.formulas++;
    if (width < 2 || height < 2) report("formula without size", name(e));
    if (!uses.every(use => page.getElementById(use.getAttribute("href").slice(1))))
      report("formula without its glyphs", name(e));
    else if (uses.every(use => use.getBBox().width == 0))
      report("formula without ink", name(e));
    if (contrast(view, e) < 4.5) report("formula too pale", name(e));
  }
  for (const e of article.querySelectorAll("p, li, td, th, code"))
    if (contrast(view, e) < 4.5) report("text too pale", name(e));
  for (const e of article.querySelectorAll("img"))
    if (!e.naturalWidth) report("image missing", e.getAttribute("src"));
  const texts = page.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (texts.nextNode())
    if (/\\[a-z]{2}/.test(texts.currentNode.data) &&
        !texts.currentNode.parentElement.closest("code, pre, script, style"))
      report("formula as text", texts.currentNode.data.trim().slice(0, 50));
}

async function run() {
  for (const address of PAGES) {
    found.pages++;
    for (const width of [DESK, PHONE]) {
      const frame = document.createElement("iframe");
      frame.style = `width: ${width}px; height: 900px; border: 0`;
      document.body.append(frame);
      const view = await load(frame, "/" + address);
      for (const theme of ["light", "dark"]) {
        view.document.documentElement.dataset.theme = theme;
        const report = (fault, what) => found.faults.push({address, width, theme, fault, what});
        measure(view, width, report);
        if (theme == "dark")
          for (const {name} of view.performance.getEntriesByType("resource"))
            if (!name.startsWith(location.origin) && !name.startsWith("data:"))
              report("from another host", name);
      }
      frame.remove();
    }
  }
  for (const query of QUERIES) {
    const frame = document.createElement("iframe");
    document.body.append(frame);
    const view = await load(frame, "/search.html?q=" + query);
    // The page shows what it found one by one, and then says how much it was.
    const summary = () => view.document.querySelector("#search-results .search-summary");
    for (let i = 0; i < 100 && !/\d|not match/.test(summary()?.textContent); i++)
      await new Promise(resolve => setTimeout(resolve, 100));
    found.results[query] = [...view.document.querySelectorAll("#search-results li a")]
      .map(a => new URL(a.href).pathname.slice(1));
    frame.remove();
  }
}

run().catch(error => found.faults.push({fault: "the probe failed", what: String(error.stack)}))
  .then(() => fetch("/__found__", {method: "POST", body: JSON.stringify(found)}));
</script>
"""


class _Server(http.server.SimpleHTTPRequestHandler):
    """A site, the page that measures it, and a place for what that finds."""

    probe: str
    found: dict[str, Any]
    done: threading.Event

    def do_GET(self) -> None:
        if self.path != "/__probe__":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.probe.encode())

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.found.update(json.loads(self.rfile.read(length)))
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


def _measured(browser: str, site: pathlib.Path, queries: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the browser finds on all pages of `site`, without a network."""
    values = f"const PAGES = {json.dumps(_pages(site))}, QUERIES = {json.dumps(queries)};"
    probe = _PROBE.replace("<script>", f"<script>{values}", 1)
    handler = type("Server", (_Server,), {"probe": probe, "found": {}, "done": threading.Event()})
    handler = functools.partial(handler, directory=str(site))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        # Chromium's processes may still write into it while it is removed.
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-dev-shm-usage", "--remote-debugging-port=0"),
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            f"http://127.0.0.1:{server.server_port}/__probe__",
        ]
        log = pathlib.Path(profile, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            if not handler.func.done.wait(120):
                raise TimeoutError(f"expected the browser's report within 120 s: {log.read_text()}")
        finally:
            process.terminate()
            process.wait()
            server.shutdown()
    return handler.func.found


def _browser() -> str:
    paths = [path for name in _BROWSERS if (path := shutil.which(name))]
    if not paths:
        pytest.skip(f"no browser: none of {', '.join(_BROWSERS)} is installed")
    return paths[0]


_FORMULA = (
    '<svg class="formula" role="img" aria-label="x" style="width:9px;height:9px" '
    'viewBox="0 0 9 9"><symbol id="x" viewBox="0 0 9 9"><path d="M0 0L9 9L9 0Z"/></symbol>'
    '<use href="#x" width="9" height="9"/></svg>'
)
_WIDE = '<p style="width: {}px">x</p>'
# A page's content, the fault in it, and whether the reader of a desk has it.
_PLANTED = {
    "good": (f"<p>{_FORMULA} is</p><pre>{'x' * 999}</pre><table><td>1</table>", None, False),
    "wide_text": (_WIDE.format(1350), "cut or too wide", True),
    "wide_on_phones": (_WIDE.format(500), "cut or too wide", False),
    "wide_page": ('<p style="width: 3000px">x</p>', "wider than the screen", True),
    "wide_table": (
        f'<div style="overflow-x: auto"><table><td>{"x" * 300}</table></div>',
        "cut or too wide",
        True,
    ),
    "hidden": (
        f'<div style="overflow: hidden">{_WIDE.format(2000)}</div>',
        "cut or too wide",
        True,
    ),
    "no_size": (_FORMULA.replace("width:9px", "width:0"), "formula without size", True),
    "no_glyph": (_FORMULA.replace('symbol id="x"', 'symbol id="y"'), "without its glyphs", True),
    "no_ink": (re.sub("<use.*?/>", "", _FORMULA), "formula without ink", True),
    "pale": (f'<p style="color: #ccc">{_FORMULA}</p>', "formula too pale", True),
    "text": (r"<p>The rate is \gamma_t here.</p>", "formula as text", True),
    "no_image": ('<img src="none.png">', "image missing", True),
    "foreign": ('<img src="http://example.com/x.png">', "from another host", True),
}


@pytest.mark.slow
class PlantedFaultsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        browser = _browser()
        site = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        for name, (content, _, _) in _PLANTED.items():
            page = (
                '<!doctype html><meta charset="utf-8"><style>pre { overflow-x: auto }'
                "body { margin: 0 } article { max-width: 1300px } html[data-theme=dark] "
                "{ background: #111; color: #eee }</style>"
                f'<article class="bd-article">{content}</article>'
            )
            (site / f"{name}.html").write_text(page)
        cls.found = _measured(browser, site)

    @parameterized.parameters(*_PLANTED)
    def test_the_measurement_notices(self, name: str):
        _, fault, on_desk = _PLANTED[name]
        faults = [x for x in self.found["faults"] if x.get("address") == f"{name}.html"]
        matching = {x["width"] for x in faults if fault and fault in x["fault"]}
        if fault is None:
            self.assertEmpty(faults)
        else:
            self.assertEqual(1400 in matching, on_desk, faults)
            self.assertNotEmpty(matching)

    def test_every_page_is_measured(self):
        self.assertEqual(self.found["pages"], len(_PLANTED))


@pytest.mark.slow
class SiteTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if named := os.environ.get("MARS_OPTAX_SITE"):
            cls.site = pathlib.Path(named).resolve()
            return
        missing = [name for name in _BUILDERS if importlib.util.find_spec(name) is None]
        if missing:
            pytest.skip(f"MARS_OPTAX_SITE names no built site; to build one lacks {missing}")
        cls.site = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", _ROOT / "docs", cls.site]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(_ROOT)})

    def test_pages_load_nothing_from_other_hosts(self):
        pages = _pages(self.site)
        self.assertGreater(len(pages), 30)
        for page in pages:
            self.assertEmpty(_foreign((self.site / page).read_text()), page)
        for path in self.site.rglob("*.css"):
            self.assertEmpty(_foreign_style(path.read_text()), path)

    def test_pages_fit_the_screen_and_formulas_show(self):
        found = _measured(_browser(), self.site, ("newton", "qqxyzzy"))
        faults = [" | ".join(map(str, fault.values())) for fault in found["faults"]]
        self.assertEmpty(faults, "\n".join(faults))
        self.assertEqual(found["pages"], len(_pages(self.site)))
        # Two widths and two themes.
        drawn = [(self.site / page).read_text() for page in _pages(self.site)]
        formulas = sum(page.count('class="formula"') for page in drawn)
        self.assertGreater(formulas, 100)
        self.assertEqual(found["formulas"], 4 * formulas)
        self.assertNotEmpty(found["results"]["newton"])
        self.assertContainsSubset(found["results"]["newton"], _pages(self.site))
        self.assertEmpty(found["results"]["qqxyzzy"])


class SourcesTest(parameterized.TestCase):
    @parameterized.parameters(
        ('<script src="https://a.b/c.js"></script>', True),
        ('<link rel="stylesheet" href="//a.b/c.css">', True),
        ('<img src="http://a.b/c.png">', True),
        ("<iframe src=https://a.b></iframe>", True),
        ('<img src="_images/c.png"><a href="https://a.b">c</a>', False),
    )
    def test_the_check_of_pages_notices(self, page: str, foreign: bool):
        self.assertLen(_foreign(page), int(foreign))

    @parameterized.parameters(
        ('@import "https://a.b/c.css";', True),
        ("a { background: url(//a.b/c.png) }", True),
        ("a { background: url(c.png) } /* https://a.b */", False),
    )
    def test_the_check_of_styles_notices(self, style: str, foreign: bool):
        self.assertLen(_foreign_style(style), int(foreign))

    def test_sources_load_nothing_from_other_hosts(self):
        pages = [*(_ROOT / "docs").glob("*.md"), *_ROOT.glob("*.md")]
        self.assertGreater(len(pages), 20)
        for path in pages:
            text = re.sub(r"!\[[^\]]*\]\(([^)\s]*)[^)]*\)", r'<img src="\1">', path.read_text())
            self.assertEmpty(_foreign(text), path)
        for path in (_ROOT / "docs" / "_static").glob("*.css"):
            self.assertEmpty(_foreign_style(path.read_text()), path)


class FormulasTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        pytest.importorskip("ziamath", reason="formulas are drawn by ziamath, of the extra `docs`")
        path = _ROOT / "docs" / "_ext" / "formulas.py"
        spec = importlib.util.spec_from_file_location("formulas", path)
        cls.formulas = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(cls.formulas)

    def test_glyphs_come_once_per_page(self):
        drawn = set()
        first, second = (self.formulas.draw(r"x_t", True, drawn) for _ in range(2))
        self.assertEqual((first.count("<symbol"), second.count("<symbol")), (2, 0))
        self.assertEqual((first.count("<use"), second.count("<use")), (2, 2))
        self.assertIn('aria-label="x_t"', second)
        self.assertNotIn("black", first)

    @parameterized.parameters(r"\nonsense x", "\N{CJK UNIFIED IDEOGRAPH-4E2D}")
    def test_what_cannot_be_drawn_is_an_error(self, latex: str):
        with self.assertRaisesRegex(ValueError, "formula: expected"):
            self.formulas.draw(latex, True, set())


if __name__ == "__main__":
    absltest.main()
