"""Integer programs: networks in int32 and int64 arithmetic, with a proved bound of their error and C source."""

from lipkit.integer import rules as rules  # registers them
from lipkit.integer.program import Program
from lipkit.integer.quantisation import Builder, IntValue, integer_rule, quantise

__all__ = ["Builder", "IntValue", "Program", "integer_rule", "quantise"]

__dir__ = __all__.copy
