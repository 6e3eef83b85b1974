"""The plain modules that exported networks are made of, beside those of ``torch.nn``, and their storage."""

from lipkit.plain.activations import GroupSort, MaxMin, group_sort, maxmin
from lipkit.plain.elementwise import Affine, ConvexResidual
from lipkit.plain.fourier import FourierConv2d
from lipkit.plain.network import Network
from lipkit.plain.storage import load, save, sha256

__all__ = [
    "Affine",
    "ConvexResidual",
    "FourierConv2d",
    "GroupSort",
    "MaxMin",
    "Network",
    "group_sort",
    "load",
    "maxmin",
    "save",
    "sha256",
]
