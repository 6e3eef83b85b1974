"""Algebra of convolution kernels: symbols, products in Fourier space, resampling."""

from lipkit.conv.block import bcop_kernel, block_convolve, two_taps
from lipkit.conv.cayley_conv import NormalMatrices, cayley_conv2d, normal_matrices, prepare, solve_form
from lipkit.conv.kernel_exponential import adjoint, skew, taylor_features, taylor_norm
from lipkit.conv.resample import downsample
from lipkit.conv.spectrum import (
    Spectrum,
    Symbol,
    apply_symbol,
    frequencies,
    kernel_symbol,
    transform_matrices,
)
from lipkit.conv.symbol import check_kernel, fold, symbol, symbol_at, symbol_parts

__all__ = [
    "NormalMatrices",
    "Spectrum",
    "Symbol",
    "adjoint",
    "apply_symbol",
    "bcop_kernel",
    "block_convolve",
    "cayley_conv2d",
    "check_kernel",
    "downsample",
    "fold",
    "frequencies",
    "kernel_symbol",
    "normal_matrices",
    "prepare",
    "skew",
    "solve_form",
    "symbol",
    "symbol_at",
    "symbol_parts",
    "taylor_features",
    "taylor_norm",
    "transform_matrices",
    "two_taps",
]
