"""Text of others on a screen: what a file or a folder says must not look like what lipkit says."""

from __future__ import annotations

from typing import Any


def printable(text: object, longest: int | None = None) -> str:
    r"""One line without a character that moves the cursor, colours, hides or reorders what is read.

    Control characters (line breaks and ANSI escapes among them), format characters (overrides of the writing
    direction, zero width), surrogates, unassigned characters and all separators but the space are written as their
    escapes in a Python string.

    Args:
        text: a string, or a value whose ``str`` is shown.
        longest: number of characters after which the text is cut, with "..." in place of the rest; None for no limit.

    >>> print(printable("digits\n\x1b[1mcertified\u202e 100 %"))
    digits\n\x1b[1mcertified\u202e 100 %
    >>> printable("Größe", 4)
    'G...'
    """
    whole = str(text)
    if longest is not None and len(whole) > longest:
        whole = f"{whole[: max(longest - 3, 0)]}..."
    if whole.isprintable():
        return whole
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in whole)


def visible(value: Any) -> Any:
    """A value as a template shows it: strings `printable`, all else (numbers, markup) as it is."""
    return printable(value) if type(value) is str else value


def printable_lines(text: str) -> str:
    r"""`printable` for a text of several lines, whose line breaks stay.

    >>> printable_lines("a\nb\x1b")
    'a\nb\\x1b'
    """
    return "\n".join(map(printable, text.split("\n")))
