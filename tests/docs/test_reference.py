"""The reference pages of the site: every public name, and docstrings without a trace of their markup."""

from __future__ import annotations

import re
from inspect import isclass, isfunction, ismodule, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lipkit

pytestmark = pytest.mark.thorough

# Roles, directives, LaTeX, doctests and sections, as the sources have them.
MARKUP = re.compile(r":\w+:`|`|::|\\\w|&gt;&gt;&gt;|<blockquote>|\*\*|^(?:Args|Raises|Returns):", re.M)
PACKAGES = [name for name in lipkit.__all__ if ismodule(getattr(lipkit, name))]


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    """The articles, without what stands around them."""
    pages = {path.stem: path.read_text() for path in (site / "reference").glob("*.html")}
    return {name: re.findall(r"<article.*</article>", text, re.S)[0] for name, text in pages.items()}


def _public(module: ModuleType) -> dict[str, Any]:
    """What the module exports; without ``__all__``, the classes and functions that it defines."""
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
    assert re.findall(r"<dt>(\w+)</dt>", cayley) == ["Arguments", "Guarantee", "Cost", "References"]
    shared = re.split(r'<h\d id="([\w.]+)"', pages["layers"])
    common = shared[shared.index("lipkit.layers.base.ConstrainedConv2d") + 1]
    assert {"Arguments", "Shapes", "Raises"} <= set(re.findall(r"<dt>(\w+)</dt>", common))
    assert cayley.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') == 1
    assert common.count('href="errors.html#lipkit.errors.') >= 2
    assert re.search(r'<div class="[^"]*highlight"><pre>.*?&gt;&gt;&gt; ', cayley, re.S)
    assert sum(page.count("<math") for page in pages.values()) > 200
