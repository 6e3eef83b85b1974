"""Convolution kernels and their symbols (Fourier transforms)."""

from lipkit.conv.block import bcop_kernel, block_convolve
from lipkit.conv.cayley_conv import cayley_conv2d
from lipkit.conv.circular import circular_conv2d
from lipkit.conv.exponential_conv import adjoint, exponential_conv2d, skew
from lipkit.conv.patches import downsample
from lipkit.conv.spectrum import Symbol, apply_symbol, kernel_symbol
from lipkit.conv.symbol import fold, symbol, symbol_at
from lipkit.linalg.cayley import cayley_linear

__all__ = ["adjoint", "bcop_kernel", "block_convolve", "downsample", "fold", "skew"]  # kernels
__all__ += ["Symbol", "kernel_symbol", "symbol", "symbol_at"]  # their symbols
__all__ += ["apply_symbol", "cayley_conv2d", "cayley_linear", "circular_conv2d", "exponential_conv2d"]  # their products

__dir__ = __all__.copy
