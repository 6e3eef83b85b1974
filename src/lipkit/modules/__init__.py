"""A module that may stand in a certified network, with all that it must answer: constant, export, rounding, storage."""

from lipkit.modules import chains, convolutions  # noqa: F401 (their rules are registered)
from lipkit.modules.activations import Activation, GroupSort, MaxMin, add_activation, group_sort, maxmin
from lipkit.modules.configuration import stored
from lipkit.modules.dense import Affine, PositionCode
from lipkit.modules.fourier import FourierConv2d
from lipkit.modules.guarding import guard
from lipkit.modules.isometric import HalfAbs, Householder, LPReLU, NActivation
from lipkit.modules.machine import Local, local_error, rounding_rule, rounding_rules
from lipkit.modules.network import Network
from lipkit.modules.normalization import Center
from lipkit.modules.phase import PhaseConv2d
from lipkit.modules.pooling import L2NormPool2d
from lipkit.modules.rearrange import ResizeChannels, Shift2d
from lipkit.modules.registry import Shape, export, export_rule, lipschitz, lipschitz_rule, output_shape, rules
from lipkit.modules.residual import ConvexResidual, SlopeResidual, Sum
from lipkit.modules.sandwich import SandwichBlock
from lipkit.modules.storage import load, save, sha256
from lipkit.modules.taylor import TaylorConv2d

__all__ = [
    "Activation",
    "Affine",
    "Center",
    "ConvexResidual",
    "FourierConv2d",
    "GroupSort",
    "HalfAbs",
    "Householder",
    "L2NormPool2d",
    "LPReLU",
    "Local",
    "MaxMin",
    "NActivation",
    "Network",
    "PhaseConv2d",
    "PositionCode",
    "ResizeChannels",
    "SandwichBlock",
    "Shape",
    "Shift2d",
    "SlopeResidual",
    "Sum",
    "TaylorConv2d",
    "add_activation",
    "export",
    "export_rule",
    "group_sort",
    "guard",
    "lipschitz",
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
