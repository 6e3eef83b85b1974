"""Docstrings say what a thing is or returns; none begins with "What", "Whether" or "The same", or holds an escape."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lipkit

PACKAGE = Path(lipkit.__file__).parent
ROOMS = sorted({path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")})
_VAGUE = re.compile(r"(?:What|Whether|The same)\b")
_ESCAPE = re.compile(r"[\x00-\x07\x09\x0b-\x1f]")  # click reads \b, \x08


def vague(source: str) -> Iterator[tuple[int, str]]:
    """Line and first words of every docstring that begins so: of modules, classes, functions and values."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value.strip()
            if _VAGUE.match(text) or _ESCAPE.search(text):
                yield node.lineno, text.splitlines()[0]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_say_what_a_thing_is(room: str) -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).with_suffix("").parts[0] == room]
    found = [f"{path.relative_to(PACKAGE)}:{line}: {text}" for path in files for line, text in vague(path.read_text())]
    assert not found, "\n".join(["say what it is or returns:", *found])


def test_every_kind_of_docstring_is_read() -> None:
    source = '''"""What a module holds."""
X = 1
"""The same as Y."""
class C:
    """Whether it is."""
    def f(self):
        """
        What f does."""
def g():
    """Whatever the case, this is fine."""
    "What"
    return "What"
def h():
    "In mathematics \text, which is not raw, has a tab."
'''
    assert sorted(line for line, _ in vague(source)) == [1, 3, 5, 7, 11, 14]
