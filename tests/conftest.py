"""The marker ``fast``, seeds, no waiting for the disk, reports without plots, a headless Chromium and its pages."""

from __future__ import annotations

import gc
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# A verdict depends on the code alone: new draws are the work of benchmarks/soundness.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
# Wide things may scroll inside boxes of their own; scripts of formulas and text that is not shown may be small.
FLAWS = """() => {
  const flaws = [], page = document.documentElement.clientWidth, scrolls = "table, pre, math, .md-typeset__table";
  const flaw = (what, node, more) => flaws.push(`${what}: ${node.nodeName} ${node.getAttribute("class")} ${more}`);
  const box = (node) => node.getBoundingClientRect();
  if (document.documentElement.scrollWidth > page) flaw("wider than the page", document.body, page);
  for (const node of document.body.querySelectorAll("*"))
    if (box(node).width > 1 && box(node).right > page + 1 && !node.closest(scrolls)) flaw("cut", node, box(node).right);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement, matrix = node.getScreenCTM?.();
    const size = parseFloat(getComputedStyle(node).fontSize) * (matrix ? Math.hypot(matrix.a, matrix.b) : 1);
    const shown = texts.currentNode.data.trim() && box(node).width > 1 && !node.closest("math");
    if (shown && size < 10.99) flaw("small text", node, `${size} ${texts.currentNode.data}`);
  }
  for (const plot of document.querySelectorAll("svg.plot")) {
    const legends = [...plot.querySelectorAll("[id*=legend_]")].map(box).filter((r) => r.width);
    const outside = (r) => r.right > box(plot).right + 1 || r.left < box(plot).left - 1;
    for (const text of plot.querySelectorAll("text")) if (outside(box(text))) flaw("cut", text, text.textContent);
    for (const curve of plot.querySelectorAll("[id*=axes_] > [id*=line2d_] > path")) {
      const top = box(curve.closest("[id*=axes_]").querySelector("[id*=patch_]")).top; // above it, curves are clipped
      for (let i = 0; i <= 50 && box(plot).width; i += 1) {
        const p = curve.getPointAtLength((i / 50) * curve.getTotalLength()).matrixTransform(curve.getScreenCTM());
        const under = (r) => p.x > r.left && p.x < r.right && p.y > Math.max(r.top, top) && p.y < r.bottom;
        if (legends.some(under)) flaw("covered", curve, i);
      }
    }
  }
  return flaws;
}"""


# Of a test with more cases than this, as many are fast, evenly spread.
FAST_CASES = 3


def _seed(item: pytest.Item) -> int:
    return zlib.crc32(item.nodeid.encode())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases beyond those that ``usual`` allows are slow; of the others, those without a slower mark are fast."""
    cases: dict[tuple[Any, str], list[pytest.Item]] = {}
    for item in items:
        if not isinstance(item, pytest.DoctestItem):
            cases.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for alike in cases.values():
        usual = alike[0].get_closest_marker("usual")
        # Drawn, as every third case of a product may be the same third of one factor.
        for item in sorted(alike, key=_seed)[usual.args[0] if usual else len(alike) :]:
            item.add_marker("slow")
        quick = [item for item in alike if not {"slow", "thorough"} & {mark.name for mark in item.iter_markers()}]
        for place in range(min(FAST_CASES, len(quick))):
            quick[place * len(quick) // min(FAST_CASES, len(quick))].add_marker("fast")


def pytest_collection_finish() -> None:
    """Imports and collection leave a million objects that stay: no later search for garbage looks at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power: files need not be on the disk before it goes on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A seed from the name of the test: it draws the same numbers alone, in any order, and in any process."""
    torch.manual_seed(_seed(item))


@pytest.fixture(scope="module")
def no_plots() -> Iterator[None]:
    """Reports without plots, which take most of their time. tests/report draws them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("plots", "curve"):
            patch.setattr(f"lipkit.report.{module}.both", lambda draw, name: f"<p>{name}</p>")
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None and "CI" not in os.environ:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield made
        made.close()


@pytest.fixture
def flaws(browser: Any) -> Iterator[Callable[..., list[str]]]:
    """Of an address at a width: what is cut, too small to read, or covered by a legend."""
    page = browser.new_page()

    def found(address: str, width: int, ready: str = "body") -> list[str]:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(address)
        page.wait_for_selector(ready, timeout=60_000)
        return page.evaluate(FLAWS)

    yield found
    page.close()
