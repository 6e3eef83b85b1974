"""Modules of certified networks. The file of a module holds all its rules: constant, export, rounding, storage."""

from lipkit.modules import chains, convolutions  # noqa: F401 (their rows are added)
from lipkit.modules.activations import (
    Activation,
    Arcsinh,
    Arctan,
    Cosine,
    GroupSort,
    MaxMin,
    MaxMinShift2d,
    Sine,
    add_activation,
    group_sort,
    maxmin,
)
from lipkit.modules.attention import Attraction, GradientStep
from lipkit.modules.dense import Affine, PositionCode
from lipkit.modules.fourier import FourierConv2d, TaylorConv2d
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Maximum
from lipkit.modules.guarding import guard
from lipkit.modules.isometric import HalfAbs, Householder, LPReLU, NActivation
from lipkit.modules.limits import Elementary, MatrixProduct, Product
from lipkit.modules.machine import exact, local_error
from lipkit.modules.network import Network
from lipkit.modules.normalization import BatchLipNorm, Center, LayerCenter, UnitNorm
from lipkit.modules.plain import (
    ROWS,
    Plain,
    Range,
    RoundingBound,
    Shape,
    Stored,
    add_plain,
    around,
    export_rule,
    lipschitz_rule,
    monotone,
    one_sign,
    rules,
)
from lipkit.modules.pooling import L2NormPool2d, Mean
from lipkit.modules.recurrent import Recurrent, contraction
from lipkit.modules.registry import output_shape
from lipkit.modules.sandwich import SandwichBlock, SlopeResidual
from lipkit.modules.spread import SpreadConv2d
from lipkit.modules.storage import load, save, sha256
from lipkit.modules.views import Enlarge, EnlargeBilinear, Expand, Pad, Permute, Piece, Reshape, Roll, Shift2d

__all__ = ["ROWS", "Plain", "RoundingBound", "Shape", "Stored"]  # the table, and what its rules say
__all__ += ["add_activation", "add_plain", "export_rule", "lipschitz_rule", "rules"]  # how it grows
__all__ += ["Range", "around", "exact", "guard", "local_error", "monotone", "one_sign", "output_shape"]  # for rules
__all__ += ["Network", "load", "save", "sha256"]  # what is exported and stored
__all__ += ["Affine", "BatchLipNorm", "Center", "LayerCenter", "PositionCode", "UnitNorm"]  # scales and shifts
__all__ += [
    "Activation",
    "Arcsinh",
    "Arctan",
    "Cosine",
    "Elementary",
    "GroupSort",
    "HalfAbs",
    "Householder",
    "LPReLU",
]  # activations
__all__ += ["MaxMin", "MaxMinShift2d", "NActivation", "Sine", "group_sort", "maxmin"]
__all__ += ["FourierConv2d", "SandwichBlock", "SlopeResidual", "SpreadConv2d", "TaylorConv2d"]  # linear maps
__all__ += ["Enlarge", "EnlargeBilinear", "Expand", "L2NormPool2d", "Mean"]  # other sizes
__all__ += ["Pad", "Permute", "Piece", "Reshape", "Roll", "Shift2d"]  # numbers that move
__all__ += ["Attraction", "GradientStep", "Recurrent", "contraction"]  # tokens and sequences
__all__ += ["Add", "Blend", "Concatenate", "Graph", "MatrixProduct", "Maximum", "Product"]  # branches

__dir__ = __all__.copy
