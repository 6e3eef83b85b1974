"""Constrained layers, one construction in one file; :mod:`lipkit.layers.families` is their table."""

from lipkit.layers import base as base
from lipkit.layers import export as export
from lipkit.layers.aol import AolConv2d, AolLinear
from lipkit.layers.attention import MemoryAttention, TokenAttention
from lipkit.layers.bcop import BcopConv2d
from lipkit.layers.bro import BroConv2d, BroLinear, LiResConv2d
from lipkit.layers.cayley import CayleyConv2d, CayleyLinear
from lipkit.layers.dense import BjorckLinear, NormalizedLinear, OrthogonalLinear
from lipkit.layers.eco import EcoConv2d
from lipkit.layers.families import FAMILIES, Family
from lipkit.layers.lot import LotConv2d
from lipkit.layers.native import NativeConv1d, NativeConv2d, NativeConvTranspose1d, NativeConvTranspose2d
from lipkit.layers.recurrent import LinearSystem, R2dn, Ren
from lipkit.layers.rko import CholeskyConv2d, CholeskyLinear, RkoConv2d
from lipkit.layers.sandwich import ContractionLinear, SandwichConv2d, SandwichLinear
from lipkit.layers.sll import CplConv2d, CplLinear, SllConv2d, SllLinear
from lipkit.layers.soc import SocConv2d
from lipkit.layers.steps import AfterStep, StiefelConv2d, StiefelLinear, after_step, register_after_step
from lipkit.layers.structure import ConvexSum, HalfThrough, Normalize, Rescale, Residual, Scale, ScaledAvgPool2d
from lipkit.layers.svcm import OssnConv2d, SvcmConv2d
from lipkit.modules import (
    BatchLipNorm,
    Center,
    GroupSort,
    HalfAbs,
    Householder,
    L2NormPool2d,
    LayerCenter,
    LPReLU,
    MaxMin,
    NActivation,
    PositionCode,
)

__all__ = [
    "FAMILIES",
    "AfterStep",
    "AolConv2d",
    "AolLinear",
    "BatchLipNorm",
    "BcopConv2d",
    "BjorckLinear",
    "BroConv2d",
    "BroLinear",
    "CayleyConv2d",
    "CayleyLinear",
    "Center",
    "CholeskyConv2d",
    "CholeskyLinear",
    "ContractionLinear",
    "ConvexSum",
    "CplConv2d",
    "CplLinear",
    "EcoConv2d",
    "Family",
    "GroupSort",
    "HalfAbs",
    "HalfThrough",
    "Householder",
    "L2NormPool2d",
    "LPReLU",
    "LayerCenter",
    "LiResConv2d",
    "LinearSystem",
    "LotConv2d",
    "MaxMin",
    "MemoryAttention",
    "NActivation",
    "NativeConv1d",
    "NativeConv2d",
    "NativeConvTranspose1d",
    "NativeConvTranspose2d",
    "Normalize",
    "NormalizedLinear",
    "OrthogonalLinear",
    "OssnConv2d",
    "PositionCode",
    "R2dn",
    "Ren",
    "Rescale",
    "Residual",
    "RkoConv2d",
    "SandwichConv2d",
    "SandwichLinear",
    "Scale",
    "ScaledAvgPool2d",
    "SllConv2d",
    "SllLinear",
    "SocConv2d",
    "StiefelConv2d",
    "StiefelLinear",
    "SvcmConv2d",
    "TokenAttention",
    "after_step",
    "base",
    "export",
    "register_after_step",
]

__dir__ = __all__.copy
