r"""Norms of a kernel read as a matrix, in one way or in four, times the root of the number of windows over a pixel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipkit.bounds.kernels import scaled_bound
from lipkit.errors import OptionError
from lipkit.linalg.transforms import differentiated
from lipkit.proof.norms import scale_to, spectral_norm, spectral_norms
from lipkit.proof.roundoff import up


def reshaped(kernel: Tensor, *, groups: int = 1, stride: int | tuple[int, int] = 1) -> Tensor:
    r"""Differentiable upper bound of the spectral norm of a convolution by one matrix norm, for every image size.

    .. math:: \|K\| \le \|\mathrm{reshape}(K, c_{out} \times c_{in} k_h k_w)\|_2
              \sqrt{\lceil k_h/s_1 \rceil \lceil k_w/s_2 \rceil}

    A convolution multiplies each window by that matrix; the number under the root bounds the windows of one pixel.

    Args:
        kernel, groups: ``(cout, cin / groups, kh, kw)``; the bound is the maximum over the groups.
        stride: of the convolution; with circular padding it must divide the image (else leave it at 1).

    Guarantee:
        Upper bound, including rounding, for zero padding of any width, for circular padding of at most ``k - 1`` per
        axis in total, and any dilation (with dilation, leave the stride at 1). Exact for windows that do not overlap.

    Cost:
        One Gram matrix, eigenvalue problem and Cholesky factorisation.

    Raises:
        ShapeError, OptionError: a wrong kernel shape, groups or stride.

    >>> 1.0 <= float(reshaped(torch.full((1, 1, 2, 2), 0.5), stride=2)) < 1.0 + 1e-9
    True

    References:
        Tsuzuku, Sato & Sugiyama, NeurIPS 2018; used by RKO (Li et al. 2019) with stride 1.
    """
    pair = tuple(stride) if isinstance(stride, tuple | list) else (stride, stride)
    if len(pair) != 2 or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in pair):
        raise OptionError(f"stride: expected one or two integers of at least 1, got {stride!r}")

    def bound(kernels: Tensor) -> Tensor:
        windows = math.prod(-(-k // s) for k, s in zip(kernels.shape[-2:], pair, strict=True))
        return up(spectral_norm(kernels.flatten(2)) * math.sqrt(windows), 4)

    return scaled_bound(kernel, groups, bound)


def fantastic_four(kernel: Tensor, *, groups: int = 1) -> Tensor:
    r"""Upper bound of the spectral norm of a convolution by four matrix norms, for every image size.

    .. math:: \|K\| \le \sqrt{k_h k_w} \min(\|R\|, \|S\|, \|T\|, \|U\|)

    R is ``(cout kh) x (cin kw)``, S ``(cout kw) x (cin kh)``, T ``cout x (cin kh kw)``, U ``(cout kh kw) x cin``.

    Arguments and guarantee are those of :func:`lipkit.bounds.lipbound`: the convolution may have any stride.

    Cost:
        Four Gram matrices, eigenvalue problems and Cholesky factorisations.

    >>> 1.0 <= float(fantastic_four(torch.full((1, 1, 3, 3), 1 / 9))) < 1.0 + 1e-6
    True

    References:
        Singla & Feizi, ICLR 2021, "Fantastic Four", theorem 1.
    """

    def bound(kernels: Tensor) -> Tensor:
        order = kernels.permute(0, 1, 3, 2, 4), kernels.permute(0, 1, 4, 2, 3)
        matrices = [m.flatten(3).flatten(1, 2) for m in order]
        matrices += [kernels.flatten(2), kernels.permute(0, 1, 3, 4, 2).flatten(1, 3)]
        norms, which = torch.stack([spectral_norms(m) for m in matrices]).min(0)  # of the four, for each group
        group = int(norms.argmax())
        found, chosen = norms[group], matrices[int(which[group])][group]
        found = scale_to(found, spectral_norm(chosen)) if differentiated(chosen) else found
        return up(found * math.sqrt(kernels.shape[-2] * kernels.shape[-1]), 4)

    return scaled_bound(kernel, groups, bound)
