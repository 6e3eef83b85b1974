"""Activations and normalisations that a network writes out, found by their patterns.

``x * sigmoid(x)`` is a product of two values and has no constant on all of space; as `torch.nn.SiLU` it has one.
A pattern is a name, which stands for one value, a number, or (operator of ONNX, operands, attributes).
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lipkit.lowering.functions import centred, root_mean_square, standardised, swish
from lipkit.lowering.observe import Observed, Operand
from lipkit.lowering.tracing import Root, fetch, flat
from lipkit.modules.activations import ACTIVATIONS


def _gates() -> Iterator[tuple[Any, Callable[[], nn.Module]]]:
    """Pairs: a pattern in x, and a function that makes the activation which the pattern computes."""
    exact: Any = [("Erf", ("Div", "x", math.sqrt(2))), ("Erf", ("Mul", "x", math.sqrt(0.5)))]
    scale = math.sqrt(2 / math.pi)
    cubes = ("Pow", "x", 3.0), ("Mul", ("Mul", "x", "x"), "x")
    cubic: Any = [("Mul", scale, ("Add", "x", ("Mul", 0.044715, cube))) for cube in cubes]
    cubic.append(("Mul", ("Mul", "x", scale), ("Add", 1.0, ("Mul", ("Mul", 0.044715, "x"), "x"))))
    for inner, kind in (*((e, "none") for e in exact), *((("Tanh", c), "tanh") for c in cubic)):
        gate = ("Add", 1.0, inner)
        for one, two, three in (("x", 0.5, gate), (0.5, "x", gate), (gate, 0.5, "x")):
            yield ("Mul", one, ("Mul", two, three)), partial(nn.GELU, kind)
    clipped: Any = ("Clip", ("Add", "x", 3.0), 0.0, 6.0)
    hard: Any = [("HardSigmoid", "x", {"alpha": 1 / 6, "beta": 0.5}), ("Div", clipped, 6.0), ("Mul", clipped, 1 / 6)]
    for whole in (*(("Mul", "x", h) for h in hard), ("Div", ("Mul", "x", clipped), 6.0)):
        yield whole, nn.Hardswish
    yield ("Mul", "x", ("Sigmoid", "x")), nn.SiLU
    yield ("Mul", "x", ("Tanh", ("Softplus", "x"))), nn.Mish
    yield ("Log", ("Sigmoid", "x")), nn.LogSigmoid
    yield ("Sub", "x", ("Tanh", "x")), nn.Tanhshrink
    yield ("Div", "x", ("Add", 1.0, ("Abs", "x"))), nn.Softsign
    yield ("Where", ("Greater", "x", 20.0), "x", ("Softplus", "x")), nn.Softplus
    positive, negative = ("Greater", "x", 0.0), ("Less", "x", 0.0)
    chosen: Any = [("Where", positive, "x", 0.0), ("Where", negative, 0.0, "x"), ("MaskedFill", "x", negative, 0.0)]
    for whole in (*chosen, ("Mul", "x", positive), ("Mul", "x", ("Cast", positive))):
        yield whole, nn.ReLU


def _functions() -> Iterator[tuple[Any, Callable[..., Tensor]]]:
    """Pairs: a pattern in x and some of dims, eps and slope, and the function of these that it computes."""
    scaled: Any = ("Mul", "x", "slope")
    yield ("Where", ("Greater", "x", 0.0), "x", scaled), F.leaky_relu
    yield ("Where", ("Less", "x", 0.0), scaled, "x"), F.leaky_relu
    yield ("Mul", "x", ("Sigmoid", scaled)), swish
    moved: Any = ("Sub", "x", ("Mean", "x", "dims"))
    kinds: Any = [("x", root_mean_square), (moved, standardised)]
    squares = [(v, ("Mean", s, "dims"), f) for v, f in kinds for s in (("Pow", v, 2.0), ("Mul", v, v))]
    for value, square, function in squares:
        raised: Any = ("Add", square, "eps")
        for root in (("Sqrt", raised), ("Pow", raised, 0.5)):
            yield ("Div", value, root), function
            yield ("Mul", value, ("Div", 1.0, root)), function
            yield ("Mul", value, ("Reciprocal", root)), function
        yield ("Mul", value, ("Rsqrt", raised)), function
        yield ("Mul", value, ("Pow", raised, -0.5)), function
    yield moved, centred


GATES, FUNCTIONS = tuple(_gates()), tuple(_functions())
ENDS = {pattern[0] for pattern, _ in (*GATES, *FUNCTIONS)}
Look = Callable[[Any, str, Mapping[str, float]], Sequence[Any] | None]


def fits(pattern: Any, value: Any, look: Look, equals: Callable[[Any, float], bool], found: dict[str, Any]) -> bool:
    """True if ``value`` is computed as ``pattern`` (see the module docstring) describes.

    Args:
        look: ``look(value, operator, attributes)`` gives the operands if this operator made the value, else None.
        equals: ``equals(value, number)`` is True if the value is this number.
        found: receives the value of each name, and under "inside" the list of values that the pattern computes.
    """
    if isinstance(pattern, str):
        return bool(found.setdefault(pattern, value) == value)
    if isinstance(pattern, float):
        return equals(value, pattern)
    kind, *parts = pattern
    given = look(value, kind, parts.pop() if isinstance(parts[-1], dict) else {})
    for order in (parts, parts[::-1])[: 1 + (kind in ("Add", "Mul"))]:  # these two commute
        trial = {**found, "inside": [*found.get("inside", ())]}  # a failed order leaves no trace
        alike = given is not None and len(given) == len(parts)
        if alike and all(fits(part, one, look, equals, trial) for part, one in zip(order, given or (), strict=True)):
            found.update(trial)
            found["inside"].append(value)
            return True
    return False


# The operators of ONNX and torch's names of them; those of the first line have the same name, in lower case.
_SAME = "Abs Add Erf HardSigmoid Log Mean Pow Reciprocal Rsqrt Sigmoid Softplus Sqrt Square Tanh Where"
_WORDS = {
    **{kind: kind.lower() for kind in _SAME.split()},
    "Mul": "mul multiply",
    "Sub": "sub subtract",
    "Div": "div divide true_divide truediv",
    "Clip": "relu6 hardtanh clamp clip",
    "Cast": "to type type_as float double",
    "MaskedFill": "masked_fill",
    "Greater": "gt greater ge greater_equal",
    "Less": "lt less le less_equal",
}
_HOMES = torch, F, operator, torch.special
# The operator of each function, method by its name, and module.
KINDS: dict[Any, str] = {nn.Tanh: "Tanh", nn.Sigmoid: "Sigmoid", nn.Hardsigmoid: "HardSigmoid", nn.ReLU6: "Clip"}
for _kind, _words in _WORDS.items():
    for _word in _words.split():
        _found = (getattr(home, name, None) for home in _HOMES for name in (_word, f"i{_word}", f"{_word}_"))
        KINDS.update(dict.fromkeys([_word, f"{_word}_", *filter(None, _found)], _kind))
# Operands that may be given by name, in their order.
_OPERANDS = ("input", "other", "exponent", "dim", "min", "max")
# Irrational numbers, which no program holds exactly. Correct to these digits, they give the module's values and slopes.
_ROOTS, _DIGITS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi)), 1e-11


def recognise(root: Root, graph: fx.Graph, observed: Observed) -> None:
    """Replace each pattern in an observed graph by one call."""

    def look(value: Any, kind: str, wanted: Mapping[str, float]) -> Sequence[Any] | None:
        if not isinstance(value, fx.Node):
            return None
        module = value.op == "call_module"
        target = type(fetch(root, str(value.target))) if module else value.target
        own = KINDS.get(target)
        args, named = [*value.args], dict(value.kwargs)
        named.pop("inplace", None)
        args += [named.pop(name) for name in _OPERANDS if name in named]
        if own == "Square":
            own, args = "Pow", [*args, 2.0]
        if own == "Where" and value.op == "call_method":
            args[:2] = args[1::-1]  # x.where(condition, y)
        if own == "Cast":  # of truth values, which every format holds
            args, named = args[:1], {}
        if own == "Mean":
            named |= dict(zip(("keepdim",), args[2:], strict=False))
            args, named = args[:2], {} if named == {"keepdim": True} else {"other": named}
        if own == "Clip" and len(args) == 1:
            args += [0.0, 6.0] if target in (F.relu6, nn.ReLU6) else []
        return args if own == kind and not named else None

    def number(value: Any) -> float:
        if isinstance(value, fx.Node) and value.target is torch.zeros_like:
            return 0.0
        value = observed.values[value] if isinstance(value, fx.Node) else value
        real = isinstance(value, Tensor) and not value.is_complex()
        stored = isinstance(value, int | float) or (real and value.shape in ((), (1,)))
        return float(value) if stored else math.nan

    def equals(value: Any, wanted: float) -> bool:
        # A bound is of the function as it is written: x / (0.9999999 + |x|) is steeper than Softsign.
        return math.isclose(number(value), wanted, rel_tol=_DIGITS if wanted in _ROOTS else 0.0)

    gone: set[fx.Node] = set()
    for node in [*graph.nodes][::-1]:  # the largest pattern ends last
        target = node.target if node.op != "call_module" else type(fetch(root, str(node.target)))
        if node in gone or KINDS.get(target) not in ENDS or not isinstance(observed.values[node], Operand):
            continue
        for pattern, make in (*GATES, *FUNCTIONS):
            found: dict[str, Any] = {}
            if not fits(pattern, node, look, equals, found):
                continue
            numbers = {name: number(found[name]) for name in ("eps", "slope") if name in found}
            if not numbers.get("eps", 1.0) > 0 or not math.isfinite(numbers.get("slope", 1.0)):
                continue
            given, dims = observed.values.get(found["x"]), flat(found.get("dims", ()))
            if not isinstance(given, Operand) or not all(type(d) is int and d % given.rank != given.axis for d in dims):
                continue
            if (given.shape, given.place) != (observed.values[node].shape, observed.values[node].place):
                continue  # zeros of another shape repeat x
            function: Any = make
            named: dict[str, Any] = {}
            if (pattern, make) in GATES:
                row = ACTIVATIONS[type(module := function())]
                function, named = row.functions[0], {name: getattr(module, name) for name in row.arguments or ()}
            options = *([found["dims"]] if "dims" in found else []), *numbers.values()
            node.op, node.target, node.args, node.kwargs = "call_function", function, (found["x"], *options), named
            for inner in found["inside"][-2::-1]:
                if inner not in gone and not inner.users:
                    graph.erase_node(inner)
                    gone.add(inner)
            break
