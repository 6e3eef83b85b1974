"""Modules of certified networks. The file of a module holds all its rules: constant, export, rounding, storage."""

from lipkit.modules import chains, convolutions  # noqa: F401 (their rows are added)
from lipkit.modules.activations import (
    Activation,
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
from lipkit.modules.elementary import Elementary
from lipkit.modules.fourier import FourierConv2d
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Maximum
from lipkit.modules.guarding import guard
from lipkit.modules.isometric import HalfAbs, Householder, LPReLU, NActivation
from lipkit.modules.machine import exact, local_error
from lipkit.modules.network import Network
from lipkit.modules.normalization import BatchLipNorm, Center, LayerCenter, UnitNorm
from lipkit.modules.plain import (
    ROWS,
    Plain,
    RoundingBound,
    Shape,
    Stored,
    add_plain,
    export_rule,
    lipschitz_rule,
    rules,
)
from lipkit.modules.pooling import L2NormPool2d, Mean
from lipkit.modules.products import MatrixProduct, Product
from lipkit.modules.ranges import Range, around, monotone, one_sign
from lipkit.modules.recurrent import Recurrent, contraction
from lipkit.modules.registry import output_shape
from lipkit.modules.sandwich import SandwichBlock, SlopeResidual
from lipkit.modules.spread import SpreadConv2d
from lipkit.modules.storage import load, save, sha256
from lipkit.modules.taylor import TaylorConv2d
from lipkit.modules.views import Enlarge, EnlargeBilinear, Expand, Pad, Permute, Piece, Reshape, Roll, Shift2d

__all__ = [
    "ROWS",
    "Activation",
    "Add",
    "Affine",
    "Attraction",
    "BatchLipNorm",
    "Blend",
    "Center",
    "Concatenate",
    "Cosine",
    "Elementary",
    "Enlarge",
    "EnlargeBilinear",
    "Expand",
    "FourierConv2d",
    "GradientStep",
    "Graph",
    "GroupSort",
    "HalfAbs",
    "Householder",
    "L2NormPool2d",
    "LPReLU",
    "LayerCenter",
    "MatrixProduct",
    "MaxMin",
    "MaxMinShift2d",
    "Maximum",
    "Mean",
    "NActivation",
    "Network",
    "Pad",
    "Permute",
    "Piece",
    "Plain",
    "PositionCode",
    "Product",
    "Range",
    "Recurrent",
    "Reshape",
    "Roll",
    "RoundingBound",
    "SandwichBlock",
    "Shape",
    "Shift2d",
    "Sine",
    "SlopeResidual",
    "SpreadConv2d",
    "Stored",
    "TaylorConv2d",
    "UnitNorm",
    "add_activation",
    "add_plain",
    "around",
    "contraction",
    "exact",
    "export_rule",
    "group_sort",
    "guard",
    "lipschitz_rule",
    "load",
    "local_error",
    "maxmin",
    "monotone",
    "one_sign",
    "output_shape",
    "rules",
    "save",
    "sha256",
]

__dir__ = __all__.copy
