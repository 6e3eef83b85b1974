"""Algebra of convolution kernels: symbols, products in Fourier space, strides, exponentials, block products."""

from lipkit.conv.block import bcop_kernel, block_convolve, two_taps
from lipkit.conv.cayley_conv import cayley_conv2d
from lipkit.conv.exponential_conv import exponential_conv2d
from lipkit.conv.kernel_exponential import adjoint, skew, taylor_features
from lipkit.conv.resample import downsample
from lipkit.conv.spectrum import Symbol, apply_symbol, kernel_symbol
from lipkit.conv.symbol import circular_conv2d, fold, symbol

__all__ = [
    "Symbol",
    "adjoint",
    "apply_symbol",
    "bcop_kernel",
    "block_convolve",
    "cayley_conv2d",
    "circular_conv2d",
    "downsample",
    "exponential_conv2d",
    "fold",
    "kernel_symbol",
    "skew",
    "symbol",
    "taylor_features",
    "two_taps",
]


def __dir__() -> list[str]:
    return sorted(__all__)
