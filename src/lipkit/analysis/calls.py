"""The third registry: rules of functions and tensor methods, by the function itself or the method's name.

A rule is called with the arguments of the function. Tensors that change with the network's input come as
:class:`Operand`, everything else as its value (:data:`~lipkit.lowering.running.VARIES` where that depends on the size
of the batch), and it returns the bound of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.lowering.functional import FUNCTIONAL, covered, first_operand
from lipkit.lowering.visiting import FunctionCall, Operand, function_name
from lipkit.modules import Shape
from lipkit.modules.forms import Form

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
            if target in _FUNCTIONS or target in FUNCTIONAL:
                raise NoRuleError(f"{function_name(target)} already has a rule; expected one rule for each function")
            _FUNCTIONS[target] = rule
        return rule

    return put


def function_rules() -> dict[Any, Callable[..., Any]]:
    """Every function and method name with its rule, or with what makes the module that computes the same (a copy)."""
    return {**_FUNCTIONS, **FUNCTIONAL}


@dataclass(frozen=True)
class Call(FunctionCall):
    """One call in the graph, as its rule sees it.

    Attributes:
        bound: ``(module, input_shape) -> Lipschitz bound``, 0-d float64.
        record: ``(constant, method) -> constant``, which enters a constant in the table of layers.
    """

    bound: Callable[[nn.Module, Shape], Tensor]
    record: Callable[[Tensor, str], Tensor]

    def keep(self, x: Operand) -> Form:
        """A map of constant 1 that moves, drops or leaves entries: not in the table.

        Raises:
            NoRuleError: the result has another dtype.
        """
        return self.form(self.same_format(x))

    def form(self, x: Any) -> Form:
        """The bound of an operand."""
        form: Form = self.operand(x).form
        return form

    def scale(self, x: Operand, factor: float | Tensor, method: str = "closed form") -> Form:
        """A map of Lipschitz constant ``factor``."""
        constant = torch.as_tensor(factor, dtype=torch.float64)
        return self.form(x).scaled(self.record(constant, method))

    def module(self, x: Operand, module: nn.Module, method: str = "rule of its module") -> Form:
        """The map that ``module`` computes, by the rule of its type."""
        return self.scale(x, self.bound(module, self.operand(x).shape or (1,)), method)

    def broadcast(self, x: Operand) -> Form:
        """The operand repeated to the shape of the result, as elementwise functions do."""
        return self.form(x).scaled(torch.tensor(self.repetition(x), dtype=torch.float64))


def apply(call: Call, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """The bound of a call by the rule of its function, or of the module that computes the same.

    Raises:
        NoRuleError: no rule, or arguments that the rule does not cover.
    """
    if target in FUNCTIONAL:
        module = covered(call, FUNCTIONAL[target], args, kwargs)
        return call.module(first_operand(call, FUNCTIONAL[target], args, kwargs), module)
    if target not in _FUNCTIONS:
        raise call.refuse(
            "it has no rule, and nothing is assumed to be 1-Lipschitz; register one with "
            "lipkit.analysis.function_rule, or put it into a module with a rule of its own"
        )
    result: Result = covered(call, _FUNCTIONS[target], args, kwargs)
    return result
