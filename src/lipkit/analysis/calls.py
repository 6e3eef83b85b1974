"""The third registry: rules of functions and tensor methods, by the function itself or the method's name.

A rule is called with the arguments of the function. Tensors that change with the network's input come as
:class:`Operand`, everything else as its value (:data:`~lipkit.analysis.running.VARIES` where that depends on the size
of the batch), and it returns the bound of the result.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit.analysis.forms import Form
from lipkit.analysis.running import VARIES
from lipkit.errors import LipkitError, NoRuleError

Shape = tuple[int, ...]
Result = Form | tuple[Form, ...]
FunctionRule = Callable[..., Result]

_FUNCTIONS: dict[Any, FunctionRule] = {}


def function_rule(*targets: Callable[..., Any] | str) -> Callable[[FunctionRule], FunctionRule]:
    """Register ``rule(call, *arguments) -> bound`` for exactly these functions and tensor methods (by name).

    The rule vouches for the l2 Lipschitz constant of each sample's part of the result.

    Raises:
        NoRuleError: a target already has a rule.

    >>> def halve(x): return x / 2
    >>> @function_rule(halve)
    ... def _(call, x): return call.scale(x, 0.5)
    >>> halve in function_rules()
    True
    """

    def put(rule: FunctionRule) -> FunctionRule:
        for target in targets:
            if target in _FUNCTIONS:
                raise NoRuleError(f"{function_name(target)} already has a rule; expected one rule for each function")
            _FUNCTIONS[target] = rule
        return rule

    return put


def function_rules() -> dict[Any, FunctionRule]:
    """Every function and method name with its rule (a copy)."""
    return dict(_FUNCTIONS)


def function_name(target: Any) -> str:
    """How a person calls a function.

    >>> function_name(F.max_pool2d), function_name(torch.add), function_name("view")
    ('torch.nn.functional.max_pool2d', 'torch.add', 'Tensor.view')
    """
    if isinstance(target, str):
        return f"Tensor.{target}"
    for home in (F, torch, torch.special, torch.linalg, torch.fft):
        for name in dir(home):
            if not name.startswith("_") and getattr(home, name, None) is target:
                return f"{home.__name__}.{name}"
    return f"{getattr(target, '__module__', None) or ''}.{getattr(target, '__qualname__', target)}".lstrip("._")


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that changes with the network's input: its bound, the shape of one sample, and its dtype."""

    form: Form
    shape: Shape
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Dimensions, the batch included."""
        return len(self.shape) + 1


@dataclass(frozen=True)
class Call:
    """One call in the graph, as its rule sees it.

    Attributes:
        name: of the function, for messages.
        where: the module that calls it.
        shapes: of one sample of each tensor in the result.
        dtypes: of these tensors, all floating point.
        bound: ``(module, input_shape) -> Lipschitz bound``, 0-d float64.
        record: ``(constant, method) -> constant``, which enters a constant in the table of layers.
    """

    name: str
    where: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    bound: Callable[[nn.Module, Shape], Tensor]
    record: Callable[[Tensor, str], Tensor]

    @property
    def shape(self) -> Shape:
        """Of one sample of the (first) tensor in the result."""
        return self.shapes[0]

    @property
    def pieces(self) -> int:
        """Number of tensors in the result."""
        return len(self.shapes)

    def refuse(self, expected: str) -> NoRuleError:
        """The error for arguments that the rule does not cover."""
        place = f" in {self.where!r}" if self.where else ""
        return NoRuleError(f"analyze: {self.name}{place}: {expected}")

    def keep(self, x: Operand) -> Form:
        """A map of constant 1 that moves, drops or leaves entries: not in the table.

        Raises:
            NoRuleError: the result has another dtype: bits that are read in another format are other numbers.
        """
        if self.operand(x).dtype not in self.dtypes:
            raise self.refuse(
                f"expected a result of the input's dtype {x.dtype}, got {self.dtypes[0]}: bits read in another "
                "format are other numbers; convert them with x.to(dtype)"
            )
        return x.form

    def scale(self, x: Operand, factor: float | Tensor, method: str = "closed form") -> Form:
        """A map of Lipschitz constant ``factor``."""
        constant = torch.as_tensor(factor, dtype=torch.float64)
        return self.operand(x).form.scaled(self.record(constant, method))

    def module(self, x: Operand, module: nn.Module, method: str = "rule of its module") -> Form:
        """The map that ``module`` computes, by the rule of its type."""
        return self.scale(x, self.bound(module, self.operand(x).shape), method)

    def operand(self, x: Any) -> Operand:
        """``x`` if it is a tensor that changes with the input; refuses anything else."""
        if not isinstance(x, Operand):
            raise self.refuse(f"expected a tensor that depends on the input as its argument, got {_kind(x)}")
        return x

    def constant(self, x: Any, name: str) -> Any:
        """``x`` if it is the same for every input and batch; refuses anything else."""
        if any(isinstance(v, Operand) for v in _flat(x)):
            raise self.refuse(f"expected a constant {name}, got a tensor that depends on the input")
        if any(v is VARIES for v in _flat(x)):
            raise self.refuse(f"expected a constant {name}, got one that depends on the size of the batch")
        return x

    def dims(self, x: Operand, dims: Any) -> list[int]:
        """Dimensions counted from the front, 0 the batch, which must not be among them."""
        given = [dims] if isinstance(dims, int) else dims
        if not isinstance(given, (tuple, list)) or not all(type(d) is int for d in given):
            raise self.refuse(f"expected dimensions other than the batch, got {_kind(dims)}")
        counted = [d + x.ndim if d < 0 else d for d in given]
        if not all(0 < d < x.ndim for d in counted):
            raise self.refuse(f"expected dimensions other than the batch (dimension 0), got {dims!r}: it mixes samples")
        return counted

    def broadcast(self, x: Operand) -> Form:
        """The operand repeated to the shape of the result, as elementwise functions do."""
        return self.operand(x).form.scaled(torch.tensor(self.repetition(x), dtype=torch.float64))

    def repetition(self, x: Operand) -> float:
        """Constant of broadcasting ``x`` to the shape of the result: the root of the copies of each entry."""
        if len(x.shape) != len(self.shape):
            raise self.refuse(
                f"expected operands with the {len(self.shape) + 1} dimensions of the result, got {x.ndim}: the batch "
                "would be broadcast against another dimension"
            )
        return root(math.prod(self.shape) // max(math.prod(x.shape), 1))


def root(count: int) -> float:
    """Square root of an integer, rounded up unless it is exact.

    >>> root(9), root(2) > 2**0.5
    (3.0, True)
    """
    floor = math.isqrt(count)
    return float(floor) if floor * floor == count else math.nextafter(math.sqrt(count), math.inf)


def _flat(value: Any) -> list[Any]:
    return [v for item in value for v in _flat(item)] if isinstance(value, (tuple, list)) else [value]


def _kind(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def apply(call: Call, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """The bound of a call by the rule of its function.

    Raises:
        NoRuleError: no rule, or arguments that the rule does not cover.
    """
    rule = _FUNCTIONS.get(target)
    if rule is None:
        raise call.refuse(
            "it has no rule, and nothing is assumed to be 1-Lipschitz; register one with "
            "lipkit.analysis.function_rule, or put it into a module with a rule of its own"
        )
    try:
        inspect.signature(rule).bind(call, *args, **kwargs)
    except TypeError as error:
        raise call.refuse(f"expected arguments that its rule covers, got other ones: {error}") from None
    try:
        return rule(call, *args, **kwargs)
    except LipkitError:
        raise
    except Exception as error:  # arguments of kinds that the rule does not expect
        raise call.refuse(f"expected arguments that its rule covers, got other ones: {error}") from error
