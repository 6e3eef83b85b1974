"""Programs in int32: a network with one rounding for each number, the proof of its error, and its text in C."""

from lipkit.integer import rules as rules  # registers them
from lipkit.integer.program import Program
from lipkit.integer.quantisation import Builder, IntValue, integer_rule, quantise

__all__ = ["Builder", "IntValue", "Program", "integer_rule", "quantise"]

__dir__ = __all__.copy
