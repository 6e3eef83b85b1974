"""Algebra of convolution kernels: symbols, products in Fourier space, resampling."""

from lipkit.conv.block import bcop_kernel, block_convolve, two_taps
from lipkit.conv.cayley_conv import cayley_conv2d, cayley_linear, solve_form, solves_pay
from lipkit.conv.exponential_conv import exponential_conv2d
from lipkit.conv.kernel_exponential import adjoint, skew, taylor_features, taylor_norm
from lipkit.conv.normal_matrices import NormalMatrices, normal_matrices, normal_matrices_of, prepare
from lipkit.conv.resample import check_divides, downsample, patch_kernel
from lipkit.conv.spectrum import (
    Spectrum,
    Symbol,
    apply_symbol,
    as_complex,
    as_pair,
    frequencies,
    kernel_symbol,
    transform_matrices,
)
from lipkit.conv.symbol import check_kernel, circular_conv2d, fold, symbol, symbol_at, symbol_parts

__all__ = [
    "NormalMatrices",
    "Spectrum",
    "Symbol",
    "adjoint",
    "apply_symbol",
    "as_complex",
    "as_pair",
    "bcop_kernel",
    "block_convolve",
    "cayley_conv2d",
    "cayley_linear",
    "check_divides",
    "check_kernel",
    "circular_conv2d",
    "downsample",
    "exponential_conv2d",
    "fold",
    "frequencies",
    "kernel_symbol",
    "normal_matrices",
    "normal_matrices_of",
    "patch_kernel",
    "prepare",
    "skew",
    "solve_form",
    "solves_pay",
    "symbol",
    "symbol_at",
    "symbol_parts",
    "taylor_features",
    "taylor_norm",
    "transform_matrices",
    "two_taps",
]


def __dir__() -> list[str]:
    return sorted(__all__)
