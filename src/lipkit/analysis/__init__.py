"""Bounds of whole networks: any module that torch.fx can trace."""

from lipkit.analysis.layers import LayerBound
from lipkit.analysis.lipschitz_search import SecantSearch, lipschitz_lower_bound
from lipkit.analysis.network import NetworkBound, analyze
from lipkit.lowering.build import Build, function_rule, function_rules
from lipkit.lowering.observe import Operand

__all__ = ["LayerBound", "NetworkBound", "SecantSearch", "analyze", "lipschitz_lower_bound"]
__all__ += ["Build", "Operand", "function_rule", "function_rules"]  # rules for functions

__dir__ = __all__.copy
