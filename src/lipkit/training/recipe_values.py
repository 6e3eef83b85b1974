"""How numbers are written in recipes: ``36/255`` is a number, and nothing is ever evaluated."""

from __future__ import annotations

import re
from typing import Any

from lipkit.text import printable

_DECIMAL = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(rf"\s*({_DECIMAL})\s*(?:/\s*({_DECIMAL})\s*)?", re.ASCII)


def parse_number(value: Any) -> Any:
    """A number, or the text of a decimal or of a quotient of two, as a float (an int stays one).

    Raises:
        ValueError: another text, a bool, or a zero denominator.

    >>> parse_number("36/255") == 36 / 255, parse_number("1e-3"), parse_number(2)
    (True, 0.001, 2)
    >>> parse_number("2**0.5")
    Traceback (most recent call last):
    ValueError: expected a number such as 0.5 or 36/255, got '2**0.5'
    """
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        denominator = float(match[2]) if match and match[2] else 1.0
        if match and denominator != 0:
            return float(match[1]) / denominator
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError(f"expected a number such as 0.5 or 36/255, got {printable(repr(value), 80)}")


def parse_numbers(value: Any) -> Any:
    """A list of numbers; also a single one, or a text with commas. None stays None.

    >>> parse_numbers("1/2, 1"), parse_numbers([1, "1/4"]), parse_numbers(0.5)
    ((0.5, 1.0), (1, 0.25), (0.5,))
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        value = [value]
    return tuple(parse_number(part) for part in value)


def option_values(value: Any) -> Any:
    """Options as YAML gives them, texts that are numbers turned into numbers; null is no options.

    >>> option_values({"eps0": "36/255", "layer": "cayley", "std": ["1/4"]})["std"]
    [0.25]
    """
    if value is None:
        return {}
    return _converted(value)


def _converted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _converted(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_converted(part) for part in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return parse_number(value)
    return value
