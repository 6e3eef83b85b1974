"""VNN-LIB (version 1): properties of networks, as boxes of inputs with half-spaces of outputs that must not be met.

A file describes a counterexample by a formula of comparisons of linear terms. It is read as a disjunction of *cases*: a
box, and half-spaces to be met together, in exact fractions. Source: https://www.vnnlib.org.
"""

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from lipkit.certificates.measurement import check_network
from lipkit.errors import OptionError
from lipkit.files import read_text
from lipkit.modules import Network
from lipkit.modules.registry import output_shape

_NUMBER = re.compile(r"[+-]?(\d{1,400}\.?\d{0,400}|\.\d{1,400})([eE][+-]?\d{1,3})?", re.ASCII)
_FLIPPED = {"<=": ">", "<": ">=", ">=": "<", ">": "<=", "=": "!=", "==": "!=", "!=": "="}
_MOST_CASES = 1 << 16
# Commands of SMT-LIB that assert nothing: anywhere, and behind all assertions.
_SETTINGS, _LAST = ("set-logic", "set-info", "set-option"), (["check-sat"], ["get-model"], ["exit"])


class Atom(NamedTuple):
    """A condition ``sum_i f_i v_i <= bound``, or ``<`` if strict; variables v are pairs such as ``("X", 3)``."""

    factors: tuple[tuple[tuple[str, int], Fraction], ...]
    bound: Fraction
    strict: bool

    def met(self, values: Mapping[str, Sequence[Any] | Mapping[int, Any]]) -> bool:
        """True if these inputs and outputs meet the condition, in exact arithmetic."""
        total = sum((f * Fraction(values[name][i]) for (name, i), f in self.factors), Fraction())
        return total < self.bound if self.strict else total <= self.bound


class Case(NamedTuple):
    """One way to violate a property: (lowest, highest) of each input, and conditions that hold together."""

    box: tuple[tuple[Fraction, Fraction], ...]
    outputs: tuple[Atom, ...]
    inputs: tuple[Atom, ...]


def read_vnnlib(path: str | os.PathLike[str], network: Network) -> list[Case]:
    """The cases of a file about an exported network, for `lipkit.certificates.verify_property`.

    Raises:
        NoRuleError: a network that is not exported.
        OptionError: not a VNN-LIB file, a condition that is not linear or mixes inputs, an input without both limits.
    """
    check_network(network, "check")
    sizes = math.prod(network.input_shape), math.prod(output_shape(network, network.input_shape))
    try:
        return cases(read_text(path), *sizes)
    except OSError as error:
        raise OptionError(f"{path}: expected a file of VNN-LIB, got: {error.strerror or error}") from None
    except (RecursionError, UnicodeDecodeError):
        raise OptionError(f"{path}: expected a text of VNN-LIB, got other bytes or terms nested too deep") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None


def cases(text: str, inputs: int, outputs: int) -> list[Case]:
    """The cases of a property; an empty list if no input and output can meet it.

    >>> unsafe = "(assert (>= X_0 0)) (assert (<= X_0 1.5)) (assert (or (<= Y_0 Y_1) (>= Y_0 3)))"
    >>> [(str(case.box[0][1]), len(case.outputs)) for case in cases(unsafe, 1, 2)]
    [('3/2', 1), ('3/2', 1)]
    """
    formulas, sizes, terms = [], {"X": inputs, "Y": outputs}, _terms(text)
    while terms and terms[-1] in _LAST:
        terms.pop()
    for term in terms:
        if isinstance(term, list) and term and term[0] in _SETTINGS:
            continue
        known = isinstance(term, list) and term[:1] in (["assert"], ["declare-const"], ["declare-fun"])
        if not known or term == ["assert"]:
            raise OptionError(f"expected (declare-const NAME Real) and (assert FORMULA), got {str(term)[:80]}")
        if term[0] == "assert":
            formulas += term[1:]
        else:
            _linear(str(term[1:2] and term[1]), sizes)  # refuses no name, or a variable of another network
    found = (_case(clause, inputs) for clause in _normal(["and", *formulas], False, sizes))
    return [case for case in found if case is not None]


def _terms(text: str) -> list[Any]:
    """The terms of a text without comments: words, and lists of terms in parentheses."""
    stack: list[list[Any]] = [[]]
    for token in re.findall(r"[()]|[^\s()]+", re.sub(r";[^\n]*", "", text)):
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
    return stack[0]


def _normal(term: Any, negated: bool, sizes: dict[str, int]) -> list[list[Atom]]:
    """The disjunctive normal form of a formula, or of its negation: a list of clauses."""
    head, rest = (term[0], term[1:]) if isinstance(term, list) and term else (None, [])
    if head == "not" and len(rest) == 1:
        return _normal(rest[0], not negated, sizes)
    if head == "=>" and len(rest) == 2:
        return _normal(["or", ["not", rest[0]], rest[1]], negated, sizes)
    if head in ("and", "or"):
        parts = [_normal(part, negated, sizes) for part in rest]
        if (head == "or") != negated:  # De Morgan: a negated and is an or
            return [clause for part in parts for clause in part]
        if math.prod(len(part) for part in parts) > _MOST_CASES:
            raise OptionError(f"expected a formula of at most {_MOST_CASES} cases, got more")
        return [list(itertools.chain(*chosen)) for chosen in itertools.product(*parts)]
    if head in ("<=", "<", ">=", ">", "=") and len(rest) > 2:  # (<= a b c): a <= b and b <= c
        return _normal(["and", *([head, *pair] for pair in itertools.pairwise(rest))], negated, sizes)
    if not isinstance(head, str) or head not in _FLIPPED or len(rest) != 2:
        raise OptionError(f"expected and, or, not, => or a comparison of two terms, got {str(term)[:80]}")
    sign = _FLIPPED[head] if negated else head
    apart = _linear(["-", *rest], sizes)
    less, more = (
        Atom(tuple((key, s * f) for key, f in apart.items() if key and f), -s * apart.get(None, Fraction()), strict)
        for s, strict in ((1, sign in ("<", "!=")), (-1, sign in (">", "!=")))
    )
    if sign == "!=":
        return [[less], [more]]
    return [[less, more] if sign in ("=", "==") else [less if "<" in sign else more]]


def _linear(term: Any, sizes: dict[str, int]) -> dict[Any, Fraction]:
    """A linear term as a dict from variables, such as ("X", 3) for X_3, to coefficients; None holds the constant."""
    if isinstance(term, str):
        name, _, place = term.partition("_")
        if _NUMBER.fullmatch(term):
            return {None: Fraction(term)}
        if not (name in sizes and re.fullmatch(r"[0-9]{1,9}", place) and int(place) < sizes[name]):
            known = f"{sizes['X']} inputs X and {sizes['Y']} outputs Y"
            raise OptionError(f"expected a number or a variable of a network with {known}, got {term[:80]}")
        return {(name, int(place)): Fraction(1)}
    head, parts = (term[0], [_linear(part, sizes) for part in term[1:]]) if term else ("", [])
    moving = [part for part in parts if set(part) != {None}]
    if head == "/" and len(parts) > 1 and all(set(part) == {None} and part[None] for part in parts[1:]):
        divisor = math.prod(part[None] for part in parts[1:])
        return {key: f / divisor for key, f in parts[0].items()}
    if head not in ("+", "-", "*") or not parts or (head == "*" and len(moving) > 1):
        known = "numbers, variables, +, -, * and / by numbers other than 0"
        raise OptionError(f"expected a linear term of {known}, got {str(term)[:80]}")
    if head == "*":
        factor = math.prod((part[None] for part in parts if set(part) == {None}), start=Fraction(1))
        return {key: factor * f for key, f in (moving or [{None: Fraction(1)}])[0].items()}
    total: dict[Any, Any] = Counter()
    for i, part in enumerate(parts):
        for key, f in part.items():
            total[key] += f if head == "+" or (i == 0 and len(parts) > 1) else -f  # (- a b) is a - b, (- a) is -a
    return total


def _case(clause: list[Atom], inputs: int) -> Case | None:
    """The case, a box and half-spaces, that a conjunction describes; None if its box is empty or it is false."""
    ends: tuple[dict[int, Fraction], ...] = ({}, {})
    for atom in clause:
        names = {name for (name, _), _ in atom.factors}
        if not names and not atom.met({}):
            return None
        if "X" in names and len(atom.factors) > 1:
            raise OptionError("expected conditions on one input or on outputs alone, got one that mixes variables")
        if "X" in names:
            (((_, i), factor),) = atom.factors
            known, limit = ends[factor > 0], atom.bound / factor
            known[i] = (min if factor > 0 else max)(known.get(i, limit), limit)
    for i in range(inputs):
        if i not in ends[0] or i not in ends[1]:
            raise OptionError(f"expected a lowest and a highest value of each input, got none of X_{i}")
    box = tuple((ends[0][i], ends[1][i]) for i in range(inputs))
    outputs, given = (tuple(a for a in clause if a.factors and a.factors[0][0][0] == name) for name in "YX")
    if any(low > high for low, high in box):
        return None
    # One end of the box meets a strict condition, unless no input in it does.
    met = (any(atom.met({"X": {i: end}}) for end in box[i]) for atom in given for (_, i), _ in atom.factors)
    return Case(box, outputs, given) if all(met) else None
