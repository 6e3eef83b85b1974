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
from lipkit.layers.geometry import NativeConv1d, NativeConv2d, NativeConvTranspose1d, NativeConvTranspose2d
from lipkit.layers.lot import LotConv2d
from lipkit.layers.projections import AfterStep, after_step, register_after_step
from lipkit.layers.recurrent import LinearSystem, R2dn, Ren
from lipkit.layers.rko import CholeskyConv2d, CholeskyLinear, RkoConv2d
from lipkit.layers.sandwich import ContractionLinear, SandwichConv2d, SandwichLinear
from lipkit.layers.sll import CplConv2d, CplLinear, SllConv2d, SllLinear
from lipkit.layers.soc import SocConv2d
from lipkit.layers.stiefel import StiefelConv2d, StiefelLinear
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

__all__ = ["FAMILIES", "Family", "base", "export"]  # the table and its parts
__all__ += ["AolLinear", "BjorckLinear", "BroLinear", "CayleyLinear", "CholeskyLinear"]  # dense layers
__all__ += ["ContractionLinear", "NormalizedLinear", "OrthogonalLinear", "StiefelLinear"]
__all__ += ["AolConv2d", "BcopConv2d", "BroConv2d", "CayleyConv2d", "CholeskyConv2d", "EcoConv2d"]  # convolutions
__all__ += ["LiResConv2d", "LotConv2d", "OssnConv2d", "RkoConv2d", "SocConv2d", "StiefelConv2d", "SvcmConv2d"]
__all__ += ["NativeConv1d", "NativeConv2d", "NativeConvTranspose1d", "NativeConvTranspose2d"]  # torch's geometry
__all__ += ["CplConv2d", "CplLinear", "SandwichConv2d", "SandwichLinear", "SllConv2d", "SllLinear"]  # activation inside
__all__ += ["LinearSystem", "MemoryAttention", "PositionCode", "R2dn", "Ren", "TokenAttention"]  # sequences, tokens
__all__ += ["ConvexSum", "HalfThrough", "Normalize", "Rescale", "Residual", "Scale", "ScaledAvgPool2d"]  # structure
__all__ += ["GroupSort", "HalfAbs", "Householder", "LPReLU", "MaxMin", "NActivation"]  # activations
__all__ += ["BatchLipNorm", "Center", "L2NormPool2d", "LayerCenter"]  # norms, pools
__all__ += ["AfterStep", "after_step", "register_after_step"]  # after a step

__dir__ = __all__.copy
