"""Bounds of whole networks: any module that torch.fx can trace."""

from lipkit.analysis.calls import Call, Operand, function_rule, function_rules
from lipkit.analysis.lipschitz_search import SecantSearch, lipschitz_lower_bound
from lipkit.analysis.network import NetworkBound, analyze
from lipkit.analysis.propagation import LayerBound

__all__ = [
    "Call",
    "LayerBound",
    "NetworkBound",
    "Operand",
    "SecantSearch",
    "analyze",
    "function_rule",
    "function_rules",
    "lipschitz_lower_bound",
]


def __dir__() -> list[str]:
    return sorted(__all__)
