"""Fantastic Four: the smallest of four norms of the reshaped kernel."""

from __future__ import annotations

import math

from torch import Tensor

from lipkit.bounds.kernels import constant, finite_groups, unscaled
from lipkit.bounds.reshaped import smallest_reshape
from lipkit.proof.roundoff import up


def fantastic_four(kernel: Tensor, *, groups: int = 1) -> Tensor:
    r"""Upper bound of the spectral norm of a convolution by four matrix norms, for every image size.

    .. math:: \|K\| \le \sqrt{k_h k_w} \min(\|R\|, \|S\|, \|T\|, \|U\|)

    R is ``(cout kh) x (cin kw)``, S ``(cout kw) x (cin kh)``, T ``cout x (cin kh kw)``, U ``(cout kh kw) x cin``.

    Args:
        kernel: ``(cout, cin / groups, kh, kw)``.
        groups: number of groups; the bound is the maximum over them.

    Returns:
        0-d float64, differentiable.

    Guarantee:
        Upper bound, including rounding, for zero padding of any width, for circular padding of at most ``k - 1`` per
        axis in total, for any stride and dilation.

    Cost:
        Four Gram matrices, eigenvalue problems and Cholesky factorisations.

    Raises:
        ShapeError, OptionError: a wrong kernel shape or groups.

    >>> import torch
    >>> 1.0 <= float(fantastic_four(torch.full((1, 1, 3, 3), 1 / 9))) < 1.0 + 1e-6
    True

    References:
        Singla & Feizi, ICLR 2021, "Fantastic Four", theorem 1.
    """
    found = finite_groups(kernel, groups)
    if isinstance(found, float):
        return constant(found, kernel)
    kernels, exponent = found
    order = kernels.permute(0, 1, 3, 2, 4), kernels.permute(0, 1, 4, 2, 3)
    matrices = [m.flatten(3).flatten(1, 2) for m in order]
    matrices += [kernels.flatten(2), kernels.permute(0, 1, 3, 4, 2).flatten(1, 3)]
    taps = kernels.shape[-2] * kernels.shape[-1]
    return unscaled(up(smallest_reshape(matrices) * math.sqrt(taps), 4), exponent)
