"""The site builds without a warning and loads nothing from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

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
