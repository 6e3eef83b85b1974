"""Recipes are parsed once: the tables ask for the same few files and overrides thousands of times."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import pytest

from lipkit.experiments import recipe


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    load = functools.cache(recipe._load)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "_load", lambda *given: copy.deepcopy(load(*given)))
        yield
