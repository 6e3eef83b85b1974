"""The explorer in a headless Chromium: the slider moves, picture and verdict follow, nothing leaves the machine."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
import torch

from lipkit.explorer import ExploredRun, listen, serve

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def address(runs: list[ExploredRun]) -> str:
    listener, found = listen()
    threading.Thread(target=lambda: serve(runs, listener), daemon=True).start()
    return found


@pytest.fixture
def page(browser: sync_api.Browser, address: str) -> Iterator[sync_api.Page]:
    made = browser.new_page(viewport={"width": 1200, "height": 1500})
    asked: list[str] = []
    problems: list[str] = []
    made.on("request", lambda request: asked.append(request.url))
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    made.goto(address)
    sync_api.expect(made.locator("#radius")).to_have_attribute("data-shown", "36", timeout=60_000)
    yield made
    made.close()
    assert not problems
    assert asked
    assert {urlsplit(url).netloc for url in asked if not url.startswith("data:")} == {urlsplit(address).netloc}


def slide(page: sync_api.Page, value: int) -> None:
    page.evaluate(
        "value => { const s = document.getElementById('radius'); s.value = value;"
        " s.dispatchEvent(new Event('input', {bubbles: true})); }",
        value,
    )
    sync_api.expect(page.locator("#radius")).to_have_attribute("data-shown", str(value), timeout=60_000)


def test_the_slider_changes_verdict_picture_and_cursor(page: sync_api.Page, runs: list[ExploredRun]) -> None:
    run = runs[0]
    both = runs[0].certificate.certified(0.05) & runs[1].certificate.certified(0.05)
    chosen = int(both.nonzero()[0][0])
    page.fill("#index", str(chosen))
    page.locator("#index").press("Enter")
    _, y = run.split.batch(torch.tensor([chosen]))
    sync_api.expect(page.locator("#run-0 .truth")).to_have_text(str(int(y[0])))
    slide(page, 1)
    verdict = page.locator("#run-0 .verdict")
    assert "certified: no change" in verdict.inner_text()
    assert page.locator("#run-0 .adversarial").get_attribute("src") is None
    clean = page.locator("#run-0 .clean").get_attribute("src")
    before = page.locator("#cursor").get_attribute("x1")
    for step in (17, 1):
        slide(page, step)
        legend = page.locator("#legend").inner_text()
        assert f"{100 * run.certificate.accuracy(step / 255):.1f} % certified" in legend

    slide(page, int(page.locator("#radius").get_attribute("max") or 0))
    assert "an adversarial example exists" in verdict.inner_text()
    shown = page.locator("#run-0 .adversarial").get_attribute("src")
    assert shown is not None
    assert shown != clean
    assert page.locator("#run-0 .difference").get_attribute("src") not in (None, shown, clean)
    assert float(page.locator("#cursor").get_attribute("x1") or 0) > float(before or 0)
    assert page.locator("#legend").inner_text() != legend
    norm = float(page.locator("#run-0 .norm").inner_text())
    assert norm >= float(run.certificate.radius[chosen]) * 0.999
    assert "an adversarial example exists" in page.locator("#run-1 .verdict").inner_text()

    slide(page, 0)
    assert "certified: no change" in verdict.inner_text()


def test_keys_move_the_slider_and_samples_can_be_picked(page: sync_api.Page) -> None:
    page.locator("#radius").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.locator("#radius")).to_have_attribute("data-shown", "38", timeout=60_000)
    assert page.locator("#radius-text").inner_text() == "38/255"
    label = page.locator("#samples button").first.get_attribute("aria-label")
    assert label is not None
    assert re.fullmatch("sample 0, (certified|not certified|misclassified)", label)
    assert page.locator("#samples button").count() == 24
    page.locator("#later").click()
    page.wait_for_selector("#samples button[data-index='24']")
    page.locator("#samples button[data-index='25']").click()
    sync_api.expect(page.locator("#index")).to_have_value("25")
    sync_api.expect(page.locator("#samples [aria-current=true]")).to_have_attribute("data-index", "25")


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_is_cut_or_too_small(flaws: Callable[..., list[str]], address: str, width: int) -> None:
    assert flaws(address, width, "#radius[data-shown='36']") == []


def test_names_stay_text_and_the_page_can_be_photographed(page: sync_api.Page) -> None:
    assert "<img src=x onerror=alert(1)>" in page.locator("#run-1 h2").inner_text()
    assert page.locator("img[src='x']").count() == 0
    if target := os.environ.get("LIPKIT_SCREENSHOT"):
        slide(page, 60)
        page.screenshot(path=target)
