"""SVCM and OSSN: free kernels, projected between optimiser steps or divided by an estimate of their own norm."""

from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds import circular, symbol_sup
from lipkit.bounds.power import krylov_lower_estimate
from lipkit.conv import circular_conv2d, fold, symbol
from lipkit.conv.symbol import folded_places, taps_of
from lipkit.errors import ShapeError, check_flag
from lipkit.layers import definitions
from lipkit.layers.base import ConstrainedConv2d, Family, KernelConv2d, check_positive, half_through_float32
from lipkit.layers.dense import BjorckLinear, delta_orthogonal_free
from lipkit.layers.export import circular_module, export_kernel_conv, resampled_size, stride_modules
from lipkit.layers.projections import AfterStep
from lipkit.linalg import at_least_float32, polar
from lipkit.linalg.matrices import near_one
from lipkit.linalg.precision import autocast_off
from lipkit.modules import Shape, export_rule, lipschitz_rule


def clip(matrices: Tensor) -> Tensor:
    """Replace every singular value above 1 of matrices ``(..., m, n)`` by 1, and keep the others."""
    # The Frobenius norm bounds the spectral one: only matrices above 1 in it need eigenvalues.
    large = torch.linalg.matrix_norm(matrices) > 1
    some, made = matrices[large], matrices.clone()
    wide = matrices.shape[-2] < matrices.shape[-1]
    values, vectors = torch.linalg.eigh(some @ some.mH if wide else some.mH @ some)
    # On the smaller side, subtract W (V diag(1 - min(1, 1/s)) V*): exactly 0 where s <= 1.
    excess = 1 - values.clamp_min(1).rsqrt()  # eigenvalues are s^2
    surplus = (vectors * excess[..., None, :].to(vectors.dtype)) @ vectors.mH
    made[large] = some - (surplus @ some if wide else some @ surplus)
    return made


def _unfold(kernel: Tensor, h: int, w: int, kh: int, kw: int) -> Tensor:
    """The kernel of kh x kw taps, of least norm, that folds to ``kernel``: taps that coincide share a value equally."""
    for dim, n, k in ((-2, h, kh), (-1, w, kw)):
        if k > n:
            place = folded_places(k, n).to(kernel.device)
            count = torch.bincount(place, minlength=n).to(kernel.dtype)
            kernel = kernel.index_select(dim, place) / count[place].reshape((-1,) + (1,) * (-1 - dim))
    return kernel


def project(kernel: Tensor, h: int, w: int, rounds: int = 50, *, orthogonal: bool = True) -> Tensor:
    r"""A kernel near ``kernel`` whose convolution on a circular ``h x w`` image is nearly orthogonal.

    Alternating projections: at every frequency f, replace :math:`\hat K(f)` by its polar factor, whose singular values
    are all 1, or only clip those above 1 to 1; then drop all taps outside kh x kw. A fixed point ends it early.

    Args:
        kernel: ``(cout, cin, kh, kw)``; taps that coincide on the image share the change equally.
        h, w: size of the image (after downsampling).
        rounds: number of alternations, at least 1, each with an eigenvalue problem at h (w // 2 + 1) frequencies.
        orthogonal: polar factors, as [Cayley] describes its baseline; False clips, as Sedghi et al. do: both sets are
            then convex, and singular values below 1 stay as they are.

    Guarantee:
        None: the last step restricts the taps, which can raise the norm; ``lipschitz`` computes it.

    References:
        [Cayley] section 5 (orthogonal, about 50 rounds); Sedghi, Gupta & Long, ICLR 2019, section 3 and algorithm 1.
    """
    check_positive(rounds=rounds)
    if h < 1 or w < 1:
        raise ShapeError(f"image: expected a height and width of at least 1, got {h} x {w}")
    kh, kw = kernel.shape[-2:]
    with torch.no_grad():
        start = folded = fold(at_least_float32(kernel), h, w)
        for _ in range(rounds):
            before = symbol(folded, h, w)
            after = polar(before) if orthogonal else clip(before)
            change = float((after - before).abs().amax())
            # Clipping changes nothing, to the bit, where nothing exceeds 1; a polar factor is rounded.
            if change == 0 or (orthogonal and change < 8 * torch.finfo(start.dtype).eps):
                break
            folded = taps_of(after, h, w, start.shape[-2:])
        if folded is start:
            return kernel.detach().clone()
        # Coinciding taps share only the change, so their differences stay.
        return (kernel + _unfold(folded - start, h, w, kh, kw)).to(kernel.dtype)


class SvcmConv2d(KernelConv2d, AfterStep):
    r"""Singular value clipping: the free kernel itself, kept near orthogonal by an explicit :meth:`project_`.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        orthogonal: project to singular values 1; False: only clip those above 1. See :func:`project`.

    Parameters ``free`` (out_channels, s^2 in_channels, kh, kw), with all singular values 1 at the start, and
    ``bias``. **A training loop has to project**: ``lipkit.fit`` does, every 100 steps and at the end of each epoch; a
    loop of your own calls `lipkit.layers.after_step`, or `lipkit.layers.register_after_step` once.

    Guarantee:
        No claimed constant: ``lipschitz`` computes one from the numbers, for the input shape if it is given, else
        for every image size. It reveals a loop that forgets to project.

    >>> from lipkit.lowering import lipschitz
    >>> layer = SvcmConv2d(2, 2, 3, orthogonal=False)
    >>> _ = torch.nn.init.normal_(layer.free)
    >>> layer.project_((6, 6))
    >>> lipschitz(layer, (2, 6, 6)).item() < 1.02
    True

    References:
        Sedghi, Gupta & Long, ICLR 2019; [Cayley] section 5 (the baseline SVCM).
    """

    shown = ("orthogonal",)
    interval = 100  # fifty eigenvalue problems at each frequency cost far more than a step

    def make_parameters(self, device: Any, dtype: Any, *, orthogonal: bool = True) -> None:
        check_flag("orthogonal", orthogonal)
        self.orthogonal = orthogonal
        self.free = delta_orthogonal_free(self.shape, device, dtype)

    def kernel(self) -> Tensor:
        return at_least_float32(self.free)

    @torch.no_grad()
    def project_(self, input_size: tuple[int, int], rounds: int = 50) -> None:
        """Replace the kernel, in place, by :func:`project` for inputs of size (H, W) before downsampling."""
        size = resampled_size(self, (self.in_channels, *input_size))
        self.free.copy_(project(self.free, *size, rounds, orthogonal=self.orthogonal))

    def after_step(self, input_shape: Shape) -> None:
        self.project_((input_shape[-2], input_shape[-1]))


@lipschitz_rule(SvcmConv2d)
def _svcm(layer: SvcmConv2d, input_shape: Shape | None) -> Tensor:
    if input_shape is None:
        return symbol_sup(layer.kernel())  # for all image sizes
    return circular(layer.kernel(), *resampled_size(layer, input_shape))


export_rule(SvcmConv2d)(export_kernel_conv)


class OssnConv2d(ConstrainedConv2d):
    r"""One-sided spectral normalisation: :math:`K = V / \hat\sigma_{H \times W}(V)`.

    :math:`\hat\sigma` is a *lower* estimate on the image size at hand (``bounds.power.krylov_lower_estimate``), so the
    layer's norm is 1 or slightly above. The estimate starts from a fixed vector; the layer keeps no state.

    Args:
        in_channels, out_channels, ..., dtype: those of :class:`lipkit.layers.base.ConstrainedConv2d`.
        iterations: steps of the estimate, at least 1; few channels need none.

    Parameters ``free`` V (out_channels, s^2 in_channels, kh, kw) and ``bias``. V starts with all singular values 1.

    Guarantee:
        No claimed constant: ``lipschitz(layer, input_shape)`` proves one from the numbers, at least 1 up to rounding;
        without the shape it raises ``ShapeError``.
        The hardest kernels are random ones: 78 of them, with 32 to 256 channels, had a constant of 1.002 on average and
        of at most 1.041.

    Cost:
        Per forward pass about eight convolutions of one image and products by vectors at 16 frequencies; next to
        nothing backward. With few channels, eigenvalues at all frequencies instead: the estimate is then the norm.

    >>> from lipkit.lowering import lipschitz
    >>> 0.9999 < lipschitz(OssnConv2d(3, 8, 3), (3, 7, 5)).item() < 1.001
    True

    References:
        [Cayley] section 5 (the baseline OSSN); Gouk et al., Machine Learning 110 (2021); Miyato et al., ICLR 2018.
    """

    shown = ("iterations",)

    def make_parameters(self, device: Any, dtype: Any, *, iterations: int = 16) -> None:
        check_positive(iterations=iterations)
        self.iterations = iterations
        self.free = delta_orthogonal_free(self.shape, device, dtype)

    def kernel(self, height: int, width: int) -> Tensor:
        """The kernel divided by its estimated norm on ``height x width`` (after downsampling); zero stays zero."""
        # Dividing by the largest entry keeps powers from over- and underflow; the result does not depend on it.
        free = near_one(fold(at_least_float32(self.free), height, width), (0, 1, 2, 3))
        norm = krylov_lower_estimate(free, height, width, self.iterations)
        return free / torch.where(norm > 0, norm, 1)

    @half_through_float32
    def forward(self, x: Tensor) -> Tensor:
        x = self.resample(x)
        with autocast_off(x):
            kernel = self.kernel(*x.shape[-2:])
        return circular_conv2d(x, kernel, self.bias_as(kernel))


@lipschitz_rule(OssnConv2d)
def _ossn(layer: OssnConv2d, input_shape: Shape | None) -> Tensor:
    if input_shape is None:
        raise ShapeError(
            "OssnConv2d: expected an input_shape such as (3, 32, 32), got None: the kernel is divided by its norm on "
            "that image size"
        )
    size = resampled_size(layer, input_shape)
    return circular(layer.kernel(*size), *size)


@export_rule(OssnConv2d)
def _export_ossn(layer: OssnConv2d, input_shape: Shape) -> nn.Module:
    kernel = layer.kernel(*resampled_size(layer, input_shape))  # already folded to the image
    return nn.Sequential(*stride_modules(layer), circular_module(kernel, layer.bias))


SVCM = Family(
    name="svcm",
    title="orthogonal by alternating projections between optimiser steps",
    paper="Sedghi, Gupta & Long, ICLR 2019",
    equation="clipped singular values; in turns with k x k kernels: Trockman & Kolter 2021, section 5",
    definition=definitions.svcm,
    conv=SvcmConv2d,
    linear=BjorckLinear,
    claim="none",
)
OSSN = Family(
    name="ossn",
    title="divided by its norm, estimated by power and Krylov steps",
    paper="Gouk et al., Machine Learning 2021",
    equation="section 3",
    definition=definitions.ossn,
    conv=OssnConv2d,
    linear=BjorckLinear,
    claim="none",
    smooth=False,
)
