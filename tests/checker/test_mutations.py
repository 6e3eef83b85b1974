"""The kept list of changes of the checker: each is still one, and is found."""

from __future__ import annotations

import ast
import os

import pytest
from tests.checker.mutations import CHECKER, HARMLESS, MUTATIONS, changed, main


@pytest.mark.thorough
def test_each_change_is_one_of_the_checker_as_it_stands() -> None:
    assert len(MUTATIONS) >= 60
    pairs = [(old, new) for _, old, new in MUTATIONS]
    assert len(set(pairs)) == len(pairs)
    assert set(HARMLESS) <= set(pairs)
    assert all(len(reason) > 20 for reason in HARMLESS.values())
    parts = CHECKER.read_text().split("\n\n\n")  # statements of the module
    for old, new in pairs:
        both = zip(parts, changed(old, new).split("\n\n\n"), strict=True)
        ((before, after),) = [(a, b) for a, b in both if a != b]
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)), old


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each change has a process of its own")
def test_every_change_is_found_or_harmless() -> None:
    assert main([]) == []
