"""A module that may stand in a certified network, with all that it must answer: constant, export, rounding, storage."""

from lipkit.modules import chains, convolutions, ranges  # noqa: F401 (their rules are registered)
from lipkit.modules.activations import Activation, GroupSort, MaxMin, add_activation, group_sort, maxmin
from lipkit.modules.configuration import stored
from lipkit.modules.dense import Affine, Elementwise, PositionCode
from lipkit.modules.fourier import FourierConv2d
from lipkit.modules.graph import Add, Blend, Concatenate, Graph, Maximum
from lipkit.modules.guarding import guard
from lipkit.modules.isometric import HalfAbs, Householder, LPReLU, NActivation
from lipkit.modules.machine import Local, local_error, rounding_rule, rounding_rules
from lipkit.modules.network import Network
from lipkit.modules.normalization import BatchLipNorm, Center, LayerCenter
from lipkit.modules.phase import PhaseConv2d
from lipkit.modules.pooling import L2NormPool2d, Mean
from lipkit.modules.products import MatrixProduct, Product
from lipkit.modules.rearrange import ResizeChannels, Shift2d
from lipkit.modules.registry import Shape, export_rule, lipschitz_rule, output_shape, rules
from lipkit.modules.residual import SlopeResidual
from lipkit.modules.sandwich import SandwichBlock
from lipkit.modules.spread import SpreadConv2d
from lipkit.modules.storage import load, save, sha256
from lipkit.modules.taylor import TaylorConv2d
from lipkit.modules.views import Enlarge, EnlargeBilinear, Expand, Pad, Permute, Piece, Reshape, Roll

__all__ = [
    "Activation",
    "Add",
    "Affine",
    "BatchLipNorm",
    "Blend",
    "Center",
    "Concatenate",
    "Elementwise",
    "Enlarge",
    "EnlargeBilinear",
    "Expand",
    "FourierConv2d",
    "Graph",
    "GroupSort",
    "HalfAbs",
    "Householder",
    "L2NormPool2d",
    "LPReLU",
    "LayerCenter",
    "Local",
    "MatrixProduct",
    "MaxMin",
    "Maximum",
    "Mean",
    "NActivation",
    "Network",
    "Pad",
    "Permute",
    "PhaseConv2d",
    "Piece",
    "PositionCode",
    "Product",
    "Reshape",
    "ResizeChannels",
    "Roll",
    "SandwichBlock",
    "Shape",
    "Shift2d",
    "SlopeResidual",
    "SpreadConv2d",
    "TaylorConv2d",
    "add_activation",
    "export_rule",
    "group_sort",
    "guard",
    "lipschitz_rule",
    "load",
    "local_error",
    "maxmin",
    "output_shape",
    "rounding_rule",
    "rounding_rules",
    "rules",
    "save",
    "sha256",
    "stored",
]


def __dir__() -> list[str]:
    return sorted(__all__)
