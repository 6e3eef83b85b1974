"""Convolution kernels and their symbols (Fourier transforms)."""

from lipkit.conv.block import bcop_kernel, block_convolve
from lipkit.conv.cayley_conv import cayley_conv2d
from lipkit.conv.circular import circular_conv2d
from lipkit.conv.exponential_conv import adjoint, exponential_conv2d, skew
from lipkit.conv.patches import downsample
from lipkit.conv.spectrum import Symbol, apply_symbol, kernel_symbol
from lipkit.conv.symbol import fold, symbol, symbol_at
from lipkit.linalg.cayley import cayley_linear

__all__ = [
    "Symbol",
    "adjoint",
    "apply_symbol",
    "bcop_kernel",
    "block_convolve",
    "cayley_conv2d",
    "cayley_linear",
    "circular_conv2d",
    "downsample",
    "exponential_conv2d",
    "fold",
    "kernel_symbol",
    "skew",
    "symbol",
    "symbol_at",
]

__dir__ = __all__.copy
