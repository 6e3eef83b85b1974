"""Algebra of convolution kernels: symbols, products in Fourier space, resampling."""

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
    "Spectrum",
    "Symbol",
    "apply_symbol",
    "check_kernel",
    "downsample",
    "fold",
    "frequencies",
    "kernel_symbol",
    "symbol",
    "symbol_at",
    "symbol_parts",
    "transform_matrices",
]
