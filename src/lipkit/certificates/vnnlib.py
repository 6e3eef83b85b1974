r"""VNN-LIB: properties of networks, read as boxes of inputs and conditions on outputs that must not be met there.

A file asserts what a counterexample is: a formula of ``and``, ``or``, ``not`` and comparisons of linear terms. Here it
is a disjunction of *cases*: a box of inputs, and half-spaces of outputs that are all met. Numbers are fractions, so
that nothing is rounded. Version 1 (``X_0``, ``Y_0``) and version 2 with one network (``X[0,3]``) are read.

Source: the VNN-LIB standard, https://www.vnnlib.org.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from lipkit.errors import OptionError
from lipkit.modules import Network
from lipkit.modules.registry import output_shape

_TOKEN = re.compile(r"[()]|[^\s()\[\]]*\[[^\]]*\]|[^\s()\[\]]+")
_NUMBER = re.compile(r"[+-]?(\d{1,400}\.?\d{0,400}|\.\d{1,400})([eE][+-]?\d{1,3})?")
_VARIABLE = re.compile(r"([A-Za-z]\w*?)(?:_(\d{1,9})|\[([\d,\s]*)\])")
_FLIPPED = {"<=": ">", "<": ">=", ">=": "<", ">": "<=", "==": "!=", "=": "!=", "!=": "="}
_DECLARATIONS = ("declare-network", "declare-const", "declare-fun", "vnnlib-version", "set-logic", "check-sat")
_MOST_CASES = 1 << 16


class Atom(NamedTuple):
    """``sum_i f_i v_i <= bound``, or ``<`` where it is strict; v are pairs such as ``("X", 3)``."""

    factors: tuple[tuple[tuple[str, int], Fraction], ...]
    bound: Fraction
    strict: bool

    def met(self, values: dict[str, Sequence[float]]) -> bool:
        """Whether exactly these inputs and outputs meet it."""
        total = sum((f * Fraction(values[name][i]) for (name, i), f in self.factors), Fraction(0))
        return total < self.bound if self.strict else total <= self.bound


class Case(NamedTuple):
    """A way to violate a property.

    Attributes:
        box: (lowest, highest) of each input.
        outputs: half-spaces of the outputs, all of which are met.
        inputs: the conditions that make the box.
    """

    box: tuple[tuple[Fraction, Fraction], ...]
    outputs: tuple[Atom, ...]
    inputs: tuple[Atom, ...]


def read_vnnlib(path: str | os.PathLike[str], network: Network) -> list[Case]:
    """The cases of a file about an exported network, for `lipkit.certificates.verify_property`.

    Raises:
        OptionError: no VNN-LIB, a condition that is not linear or mixes inputs, an input without both limits.
    """
    sizes = math.prod(network.input_shape), math.prod(output_shape(network, network.input_shape))
    try:
        return cases(Path(path).read_text(encoding="utf-8"), *sizes)
    except (RecursionError, UnicodeDecodeError):
        raise OptionError(f"{path}: expected a text of VNN-LIB, got other bytes or terms nested too deep") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None


def cases(text: str, inputs: int, outputs: int) -> list[Case]:
    """The cases of a property; none where no input and output meets it.

    >>> unsafe = "(assert (>= X_0 0)) (assert (<= X_0 1.5)) (assert (or (<= Y_0 Y_1) (>= Y_0 3)))"
    >>> [(str(case.box[0][1]), len(case.outputs)) for case in cases(unsafe, 1, 2)]
    [('3/2', 1), ('3/2', 1)]
    """
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.findall(re.sub(r";[^\n]*", "", text)):
        if token == "(":
            stack.append([])
        elif token != ")":
            stack[-1].append(token)
        elif len(stack) > 1:
            stack[-2].append(stack.pop())
        else:
            raise OptionError("expected a '(' for each ')', got one less")
    if len(stack) > 1:
        raise OptionError(f"expected a ')' for each '(', got {len(stack) - 1} less")
    reader = _Reader({"X": inputs, "Y": outputs})
    formulas = [term[1] for term in stack[0] if not reader.declares(term)]
    found = (_case(clause, inputs) for clause in reader.formula(["and", *formulas], False))
    return [case for case in found if case is not None]


class _Reader:
    """Formulas and terms, as nested lists of words, of a network with these numbers of inputs X and outputs Y."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes, self.shapes = sizes, dict[str, tuple[str, list[int]]]()

    def declares(self, term: Any) -> bool:
        """Whether this is a declaration, which is read, and no assertion."""
        head = term[0] if isinstance(term, list) and term else None
        if head == "assert" and len(term) == 2:
            return False
        if head not in _DECLARATIONS:
            raise OptionError(f"expected declarations and (assert FORMULA), got {str(term)[:80]}")
        for part in term[2:] if head == "declare-network" else ():
            kind, name, *_, shape = part if isinstance(part, list) and len(part) > 2 else (None, "", "")
            role = {"declare-input": "X", "declare-output": "Y"}.get(str(kind))
            if role is None or role in {known for known, _ in self.shapes.values()}:
                raise OptionError(f"expected one network with one input and one output, got {str(part)[:80]}")
            self.shapes[str(name)] = role, [int(n) for n in re.findall(r"\d+", str(shape))]
        return True

    def formula(self, term: Any, negated: bool) -> list[list[Atom]]:
        """The disjunctive normal form of a formula, or of its negation."""
        head, rest = (term[0], term[1:]) if isinstance(term, list) and term else (None, [])
        if head == "not" and len(rest) == 1:
            return self.formula(rest[0], not negated)
        if head in ("and", "or"):
            parts = [self.formula(part, negated) for part in rest]
            if (head == "or") != negated:
                return [clause for part in parts for clause in part]
            if math.prod(len(part) for part in parts) > _MOST_CASES:
                raise OptionError(f"expected a formula of at most {_MOST_CASES} cases, got more")
            return [list(itertools.chain(*chosen)) for chosen in itertools.product(*parts)]
        if head not in _FLIPPED or len(rest) != 2:
            raise OptionError(f"expected and, or, not or a comparison of two terms, got {str(term)[:80]}")
        sign, (left, right) = _FLIPPED[head] if negated else head, map(self.linear, rest)
        apart = {key: left.get(key, Fraction()) - right.get(key, Fraction()) for key in {**left, **right}}
        less, more = (
            Atom(tuple((key, s * f) for key, f in apart.items() if key and f), -s * apart.get(None, Fraction()), strict)
            for s, strict in ((1, sign in ("<", "!=")), (-1, sign in (">", "!=")))
        )
        if sign == "!=":
            return [[less], [more]]
        return [[less, more] if sign in ("=", "==") else [less if "<" in sign else more]]

    def linear(self, term: Any) -> dict[Any, Fraction]:
        """The factors of the variables, and the constant under None."""
        if isinstance(term, str):
            return {None: Fraction(term)} if _NUMBER.fullmatch(term) else {self.variable(term): Fraction(1)}
        head, parts = (term[0], [self.linear(part) for part in term[1:]]) if term else ("", [])
        if head == "*" and sum(set(part) > {None} or None not in part for part in parts) <= 1 and parts:
            factor = math.prod((part[None] for part in parts if set(part) == {None}), start=Fraction(1))
            moving = next((part for part in parts if set(part) != {None}), {None: Fraction(1)})
            return {key: factor * f for key, f in moving.items()}
        if head not in ("+", "-") or not parts:
            raise OptionError(f"expected a linear term of numbers, variables, +, - and *, got {str(term)[:80]}")
        total = dict[Any, Fraction]()
        for i, part in enumerate(parts):
            sign = 1 if head == "+" or (i == 0 and len(parts) > 1) else -1
            for key, f in part.items():
                total[key] = total.get(key, Fraction()) + sign * f
        return total

    def variable(self, word: str) -> tuple[str, int]:
        """("X", 3) for X_3, or for an entry of a tensor by its indices."""
        name, place, indices = found.groups() if (found := _VARIABLE.fullmatch(word)) else ("", None, "")
        role, shape = self.shapes.get(name, (name, []))
        index = int(place or 0)
        if place is None:
            at = [int(n) for n in indices.split(",") if n.strip().isdecimal()]
            fits = len(at) == len(shape) > 0 and all(i < n for i, n in zip(at, shape, strict=True))
            index = sum(i * math.prod(shape[k + 1 :]) for k, i in enumerate(at)) if fits else -1
        if not 0 <= index < self.sizes.get(role, 0):
            known = f"{self.sizes['X']} inputs X and {self.sizes['Y']} outputs Y"
            raise OptionError(f"expected a number or a variable of a network with {known}, got {word[:80]}")
        return role, index


def _case(clause: list[Atom], inputs: int) -> Case | None:
    """A conjunction as a box and half-spaces; None if nothing meets it."""
    ends: list[list[Fraction | None]] = [[None, None] for _ in range(inputs)]
    for atom in clause:
        names = {name for (name, _), _ in atom.factors}
        if not names and not atom.met({}):
            return None
        if "X" in names and len(atom.factors) > 1:
            raise OptionError("expected conditions on one input or on outputs alone, got one that mixes variables")
        if "X" in names:
            (((_, i), factor),) = atom.factors
            side, limit = int(factor > 0), atom.bound / factor
            known = ends[i][side]
            ends[i][side] = limit if known is None else (min if side else max)(known, limit)
    box = [(low, high) for low, high in ends if low is not None and high is not None]
    if len(box) < inputs:
        i = next(i for i, end in enumerate(ends) if None in end)
        raise OptionError(f"expected a lowest and a highest value of each input, got none of X_{i}")
    parts = [tuple(atom for atom in clause if atom.factors and atom.factors[0][0][0] == name) for name in "YX"]
    return None if any(low > high for low, high in box) else Case(tuple(box), *parts)
