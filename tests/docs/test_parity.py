"""The names of ours on the page for people of other libraries."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
NAMES = sorted(
    set(re.findall(r"`((?:layers|modules|models|training|bounds|linalg|analysis)\.[\w.]+)", PAGE.read_text()))
)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_can_be_imported(name: str) -> None:
    module, _, attribute = f"lipkit.{name}".rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_there_are_names() -> None:
    assert len(NAMES) > 30
