"""The site builds without a warning and loads nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

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
    assert {path.name for path in site.rglob("*.py")} == {"controller.py", "denoiser.py", "verify_onnx.py"}


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
    pages = "".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
    images = sorted((ROOT / "docs/images").iterdir())
    assert images
    for image in images:
        assert f"images/{image.name}" in pages, image
        assert image.stat().st_size < (150_000 if image.suffix == ".png" else 60_000), image


def test_documents_name_their_figures_command() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        for name in re.findall(r"images/(\w+)\.svg", text):
            assert f"`python benchmarks/docs_figures.py {name}`" in text, f"{page}: {name}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("page", ["index", "layers", "rounding", "guide/modules", "reference/layers"])
def test_pages_fit_every_screen(flaws: Callable[..., list[str]], site: Path, page: str) -> None:
    for width in (390, 768, 1280):
        assert flaws((site / f"{page}.html").as_uri(), width) == [], width


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_and_the_table_of_layers_fit_a_laptop(browser: Any, site: Path) -> None:
    shown = browser.new_page(viewport={"width": 1280, "height": 900})
    cut = "[...document.querySelectorAll('.md-content pre code, .md-typeset__scrollwrap')]"
    for page in ("index", "layers", "tutorials/classifier", "tutorials/pretrained", "adding_a_family"):
        shown.goto((site / f"{page}.html").as_uri())
        assert not shown.evaluate(f"{cut}.filter(box => box.scrollWidth > box.clientWidth + 1).length"), page
    shown.close()


def test_the_first_page_shows_a_certified_curve_and_its_command() -> None:
    first = (ROOT / "docs/index.md").read_text()
    assert first.index("images/first_page.svg") < first.index("docs_figures.py first_page") < first.index("\n## ")
