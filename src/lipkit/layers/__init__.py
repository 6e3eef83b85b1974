"""Constrained layers, one family per file; :mod:`lipkit.layers.families` is their table."""

from lipkit.layers.cayley import CayleyConv2d, CayleyLinear
from lipkit.layers.families import FAMILIES, Family
from lipkit.layers.structure import Normalize, Residual, Scale, ScaledAvgPool2d
from lipkit.plain import GroupSort, MaxMin

__all__ = [
    "FAMILIES",
    "CayleyConv2d",
    "CayleyLinear",
    "Family",
    "GroupSort",
    "MaxMin",
    "Normalize",
    "Residual",
    "Scale",
    "ScaledAvgPool2d",
]
