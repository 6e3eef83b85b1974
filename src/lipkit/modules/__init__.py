"""Modules of certified networks, and what each must answer: constant, export, rounding, storage."""

from lipkit.modules import chains, convolutions  # noqa: F401 (their rows are added)
from lipkit.modules.activations import Activation, GroupSort, MaxMin, MaxMinShift2d, add_activation, group_sort, maxmin
from lipkit.modules.attention import Attraction, GradientStep
from lipkit.modules.dense import Affine, PositionCode
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

__all__ = ["ROWS", "Plain", "RoundingBound", "Shape", "Stored"]  # what a module answers, and the table
__all__ += ["add_plain", "export_rule", "lipschitz_rule", "rules"]
__all__ += ["Range", "around", "exact", "guard", "local_error", "monotone", "one_sign", "output_shape"]  # rules
__all__ += ["Network", "load", "save", "sha256"]  # networks
__all__ += ["Activation", "GroupSort", "HalfAbs", "Householder", "LPReLU", "MaxMin"]  # activations
__all__ += ["NActivation", "add_activation", "group_sort", "maxmin"]
__all__ += ["Affine", "FourierConv2d", "PositionCode", "SpreadConv2d", "TaylorConv2d"]  # linear and affine maps
__all__ += ["Attraction", "GradientStep", "Recurrent"]  # with an activation
__all__ += ["SandwichBlock", "SlopeResidual", "contraction"]
__all__ += ["BatchLipNorm", "Center", "L2NormPool2d", "LayerCenter", "Mean", "UnitNorm"]  # norms, pools
__all__ += ["Add", "Blend", "Concatenate", "Graph", "MatrixProduct", "Maximum", "Product"]  # branches
__all__ += ["Enlarge", "EnlargeBilinear", "Expand", "MaxMinShift2d", "Pad"]  # moved numbers
__all__ += ["Permute", "Piece", "Reshape", "Roll", "Shift2d"]

__dir__ = __all__.copy
