"""Rounding errors of machine evaluation, proved in advance: what makes a certificate hold for the machine."""

from __future__ import annotations

from lipkit.certificates.rounding import (  # register the rules
    block_rules,
    fourier_rules,
    linear_rules,
    normalization_rules,
    pointwise_rules,
)
from lipkit.certificates.rounding.arithmetic import Arithmetic, Line
from lipkit.certificates.rounding.evaluators import Evaluator, machine
from lipkit.certificates.rounding.registry import Local, local_error, rounding_rule, rounding_rules

__all__ = [
    "Arithmetic",
    "Evaluator",
    "Line",
    "Local",
    "block_rules",
    "fourier_rules",
    "linear_rules",
    "local_error",
    "machine",
    "normalization_rules",
    "pointwise_rules",
    "rounding_rule",
    "rounding_rules",
]
