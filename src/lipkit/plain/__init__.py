"""The plain modules that exported networks are made of, beside those of ``torch.nn``, and their storage."""

from lipkit.plain.activations import GroupSort, MaxMin, group_sort, maxmin
from lipkit.plain.elementwise import Affine, ConvexResidual
from lipkit.plain.fourier import FourierConv2d
from lipkit.plain.network import Network
from lipkit.plain.phase import PhaseConv2d
from lipkit.plain.sandwich import SandwichBlock
from lipkit.plain.slope_residual import ResizeChannels, SlopeResidual
from lipkit.plain.storage import load, save, sha256
from lipkit.plain.sum import Sum
from lipkit.plain.taylor import TaylorConv2d

__all__ = [
    "Affine",
    "ConvexResidual",
    "FourierConv2d",
    "GroupSort",
    "MaxMin",
    "Network",
    "PhaseConv2d",
    "ResizeChannels",
    "SandwichBlock",
    "SlopeResidual",
    "Sum",
    "TaylorConv2d",
    "group_sort",
    "load",
    "maxmin",
    "save",
    "sha256",
]
