"""The site builds without a warning, loads nothing from elsewhere, and has every public name in its reference.

In one file, for one process and one build.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from inspect import isclass, isfunction, ismodule, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lipkit

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


class _Loads(HTMLParser):
    """What a browser fetches by itself when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "embed", "video", "audio"):
            self.found.append(values.get("src") or "")
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "edit"):
            self.found.append(values.get("href") or "")


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        assert not [url for url in loads.found if re.match(r"(?:https?:)?//", url)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet


def test_the_site_holds_pages_and_not_the_tools_that_made_them(site: Path) -> None:
    assert (site / "guide/modules.html").exists()
    assert not (site / "_tools").exists()
    assert {path.stem for path in site.rglob("*.py")} == {"by_hand", "controller", "denoiser", "verify_onnx"}


def test_formulas_are_drawn(site: Path) -> None:
    pages = {p.relative_to(site).as_posix(): p.read_text() for p in site.rglob("*.html")}
    assert pages["rounding.html"].count("<math") > 20
    assert pages["mathematics/frequency.html"].count("<math") > 10
    for name, text in pages.items():
        shown = re.sub(r"<(code|script|style|title)\b.*?</\1>", "", text, flags=re.S)
        assert not re.search(r"formula(?:inline|block)[0-9a-f]*", text), name
        assert not re.search(r"\$[^$<]*\\", shown), f"{name}: a formula that was not found"
        assert not re.search(r"<m(?:i|n|o|text)\b[^>]*>\\", text), f"{name}: a command of LaTeX that was not understood"


def test_the_guide_has_every_level_in_the_order_of_the_layout() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/guide/index.md").read_text(), re.M)
    listed = [name for row in rows for name in re.findall(r"\w+", row)]
    layout = re.findall(r"^      (\w+)/ ", (ROOT / "docs/design.md").read_text(), re.M)
    assert listed == [name for name in layout if name != "testing"] + ["testing"]


def test_every_image_is_used_and_small() -> None:
    pages = "".join(p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    images = sorted((ROOT / "docs/images").iterdir())
    assert images
    for image in images:
        assert f"images/{image.name}" in pages, image
        assert image.stat().st_size < (150_000 if image.suffix == ".png" else 60_000), image


def test_documents_name_their_figures_command() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        for name in re.findall(r"images/(\w+)\.svg", text):
            assert f"`python benchmarks/docs_figures.py {name}`" in text, f"{page}: {name}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", ["index", "layers", "rounding", "guide/modules", "reference/layers"])
def test_pages_fit_every_screen(flaws: Callable[..., list[str]], site: Path, page: str) -> None:
    for width in (390, 1280) if page.startswith("reference") else (390, 768, 1280):  # it takes seconds at each
        assert flaws((site / f"{page}.html").as_uri(), width) == [], width


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_and_the_table_of_layers_fit_a_laptop(browser: Any, site: Path) -> None:
    shown = browser.new_page(viewport={"width": 1280, "height": 900})
    cut = "[...document.querySelectorAll('.md-content pre code, .md-typeset__scrollwrap')]"
    for page in ("index", "layers", "tutorials/classifier", "tutorials/pretrained", "adding_a_family"):
        shown.goto((site / f"{page}.html").as_uri())
        assert not shown.evaluate(f"{cut}.filter(box => box.scrollWidth > box.clientWidth + 1).length"), page
    shown.close()


def test_the_first_page_is_the_readme_with_a_certified_curve_and_its_command(site: Path) -> None:
    first = (ROOT / "README.md").read_text()
    assert first.index("images/first_page.svg") < first.index("docs_figures.py first_page") < first.index("\n## ")
    page = (site / "index.html").read_text()
    assert page.index("images/first_page.svg") < page.index('id="install-and-try"') < page.index('id="where-to-start"')
    assert "Beside other libraries" not in page


# --- the reference: every public name, and docstrings without a trace of their markup ---

# Roles, directives, LaTeX, doctests and sections, as the sources have them.
MARKUP = re.compile(r":\w+:`|`|::|\\\w|&gt;&gt;&gt;|<blockquote>|\*\*|^(?:Args|Raises|Returns):", re.M)
PACKAGES = [name for name in lipkit.__all__ if ismodule(getattr(lipkit, name))]


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """The articles, without what stands around them."""
    pages = {path.stem: path.read_text() for path in (site / "reference").glob("*.html")}
    return {name: re.findall(r"<article.*</article>", text, re.S)[0] for name, text in pages.items()}


def _public(module: ModuleType) -> dict[str, Any]:
    """The names in ``__all__``; without it, the classes and functions that the module defines."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names}


def _kind(value: Any) -> str:
    kinds = {"module": ismodule, "class": isclass, "function": isfunction}
    return next((kind for kind, holds in kinds.items() if holds(value)), "attribute")


def _expected(module: ModuleType) -> dict[str, str]:
    expected = {name: _kind(value) for name, value in _public(module).items()}
    for value in _public(module).values():
        if ismodule(value):
            expected |= _expected(value)
    return expected


def _shown(page: str) -> dict[str, str]:
    heading = r'<h\d id="([\w.]+)" class="doc doc-heading">\s*<span class="doc doc-object-name doc-(\w+)-name">'
    return dict(re.findall(heading, page))


def test_every_public_name_has_its_place(pages: dict[str, str]) -> None:
    assert sorted(pages) == sorted(["index", *PACKAGES])
    for name in PACKAGES:
        missing = _expected(getattr(lipkit, name)).items() - _shown(pages[name]).items()
        assert not missing, name
        assert f'href="{name}.html"' in pages["index"]
    verbs = {name: _kind(value) for name, value in _public(lipkit).items() if not ismodule(value)}
    assert not verbs.items() - _shown(pages["index"]).items()


def test_no_page_shows_what_is_not_public(pages: dict[str, str]) -> None:
    for name in PACKAGES:
        package = getattr(lipkit, name)
        shown = {path for path in _shown(pages[name]) if path.count(".") == 2}
        assert shown == set(_public(package)), name


def test_no_docstring_shows_its_markup(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        text = re.sub(r"<(code|pre|math)\b.*?</\1>", "", page, flags=re.S)
        left = MARKUP.search(text)
        assert left is None, f"{name}: {text[max(0, left.start() - 80) : left.end() + 80]}"
        code = re.findall(r"<code>(.*?)</code>", page, re.S)
        assert not [c for c in code if re.search(r"\\(?:frac|sqrt|mathrm|top|_|\|)|:math:", c)], name


def test_architectures_show_the_parameters_that_their_frame_adds(pages: dict[str, str]) -> None:
    text = re.sub(r"<[^>]+>", "", pages["models"])
    for name in ("bronet", "kwlarge"):
        shown = re.search(rf"\n{name}\((.*?)\n\)", text, re.S)
        assert shown is not None
        stated = re.findall(r"^ *\**(\w+):", shown[1], re.M)
        assert stated == list(signature(getattr(lipkit.models, name)).parameters)
    assert text.count("mean, std: input normalisation") >= 13


def test_sections_formulas_and_links(pages: dict[str, str]) -> None:
    layer = re.split(r'<h2 id="([\w.]+)"', pages["layers"])
    cayley = layer[layer.index("lipkit.layers.CayleyConv2d") + 1]
    assert re.findall(r"<dt>(\w+)</dt>", cayley) == ["Guarantee", "Cost", "References"]
    shared = re.split(r'<h\d id="([\w.]+)"', pages["layers"])
    common = shared[shared.index("lipkit.layers.base.ConstrainedConv2d") + 1]
    assert {"Arguments", "Shapes", "Raises"} <= set(re.findall(r"<dt>(\w+)</dt>", common))
    assert cayley.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') == 1
    assert common.count('href="errors.html#lipkit.errors.') >= 2
    assert re.search(r'<div class="[^"]*highlight"><pre>.*?&gt;&gt;&gt; ', cayley, re.S)
    assert sum(page.count("<math") for page in pages.values()) > 200
