"""SVCM: a free kernel, whose singular values are clipped by an explicit projection between optimiser steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.bounds import circular, symbol_sup
from lipkit.conv import fold, symbol
from lipkit.errors import ShapeError
from lipkit.layers._base import KernelConv2d, check_positive
from lipkit.layers._export import export_kernel_conv, resampled_size
from lipkit.layers.ossn import delta_orthogonal_free
from lipkit.linalg import at_least_float32
from lipkit.protocol import Shape, export_rule, lipschitz_rule


def clip(matrices: Tensor) -> Tensor:
    """Matrices ``(..., m, n)`` with every singular value above 1 replaced by 1; the others are not touched.

    >>> clip(torch.diag(torch.tensor([3.0, 0.5]))).round(decimals=5)
    tensor([[1.0000, 0.0000],
            [0.0000, 0.5000]])
    """
    wide = matrices.shape[-2] < matrices.shape[-1]
    gram = matrices @ matrices.mH if wide else matrices.mH @ matrices
    values, vectors = torch.linalg.eigh(gram)
    # On the smaller side: W (V diag(1 - min(1, 1/s)) V*) is what has to go. Exactly 0 where s <= 1.
    excess = 1 - values.clamp_min(1).rsqrt()
    surplus = (vectors * excess[..., None, :].to(vectors.dtype)) @ vectors.mH
    return matrices - (surplus @ matrices if wide else matrices @ surplus)


def _support(symbols: Tensor, h: int, w: int, kh: int, kw: int) -> Tensor:
    """The taps ``(cout, cin, kh, kw)`` of a symbol ``(h, w // 2 + 1, cout, cin)``; what lies outside is dropped."""
    taps = torch.fft.irfft2(symbols.conj().permute(2, 3, 0, 1), s=(h, w))
    return taps.roll(((kh - 1) // 2, (kw - 1) // 2), (-2, -1))[..., :kh, :kw]


def _unfold(kernel: Tensor, h: int, w: int, kh: int, kw: int) -> Tensor:
    """The smallest kernel of kh x kw taps that folds to ``kernel``: each tap shared among those that meet in it."""
    for dim, n, k in ((-2, h, kh), (-1, w, kw)):
        if k > n:
            place = torch.remainder(torch.arange(k, device=kernel.device) - (k - 1) // 2 + (n - 1) // 2, n)
            count = torch.bincount(place, minlength=n).to(kernel.dtype)
            kernel = kernel.index_select(dim, place) / count[place].reshape((-1,) + (1,) * (-1 - dim))
    return kernel


def project(kernel: Tensor, h: int, w: int, rounds: int = 50) -> Tensor:
    r"""A kernel near ``kernel`` whose convolution on a circular ``h x w`` image has norm about 1 or less.

    Alternating projections between two convex sets: clip the singular values of :math:`\hat K(f)` to 1 at every
    frequency f, then set to zero what left the kh x kw taps. A kernel that is already in both sets is a fixed point.

    Args:
        kernel: ``(cout, cin, kh, kw)``. Taps beyond the image wrap around; what has to change is then shared equally
            among the taps that coincide.
        h, w: size of the image (after downsampling).
        rounds: number of alternations, at least 1; it stops early when nothing exceeds 1.

    Returns:
        Kernel of the same shape and dtype, without a gradient.

    Guarantee:
        None: the last step restricts the taps, which can raise the norm again, so it ends slightly above 1: 1.00 to
        1.015 after 50 rounds from random kernels of norm 1 to 70; 1.02 to 1.04 in the hardest case known, a kernel
        of equal taps (norm 9 to 25) on a large image. ``lipschitz`` computes what it is.

    Cost:
        Per round one eigenvalue problem of size min(cout, cin) at each of h (w // 2 + 1) frequencies.

    Raises:
        ShapeError: not a kernel, or an empty image. OptionError: ``rounds`` below 1.

    >>> k = project(torch.full((1, 1, 3, 3), 1.0), 6, 6)
    >>> k.shape, bool(k.sum() < 1.02)
    (torch.Size([1, 1, 3, 3]), True)

    References:
        Sedghi, Gupta & Long, ICLR 2019, section 3 and algorithm 1; [Cayley] section 6 (about 50 rounds).
    """
    check_positive(rounds=rounds)
    if h < 1 or w < 1:
        raise ShapeError(f"image: expected a height and width of at least 1, got {h} x {w}")
    kh, kw = kernel.shape[-2:]
    with torch.no_grad():
        start = fold(at_least_float32(kernel), h, w)
        folded = start
        for _ in range(rounds):
            before = symbol(folded, h, w)
            # The Frobenius norm bounds the spectral one: only what may exceed 1 needs its eigenvalues.
            open_ = torch.linalg.matrix_norm(before) > 1
            if not bool(open_.any()):
                break
            after = before.clone()
            after[open_] = clip(before[open_])
            if torch.equal(after, before):
                break
            folded = _support(after, h, w, *start.shape[-2:])
        if folded is start:
            return kernel.detach().clone()
        return (kernel + _unfold(folded - start, h, w, kh, kw)).to(kernel.dtype)


class SvcmConv2d(KernelConv2d):
    r"""Singular value clipping: the free kernel itself, kept near norm 1 by an explicit :meth:`project_`.

    Args:
        in_channels, out_channels, kernel_size: as ``nn.Conv2d``; the kernel may be larger than the image.
        stride: s, emulated by invertible downsampling; ``kernel_size`` applies after it.
        padding: 'same', or the integer that preserves the size.
        dilation, groups: 1.
        bias: whether a bias is added.
        padding_mode: 'circular'.
        device, dtype: of the parameters (float32 or float64).

    Parameters ``free`` (out_channels, s^2 in_channels, kh, kw), with all singular values 1 at the start, and
    ``bias``. Nothing happens to the kernel between projections: call :func:`project_all`, or give
    :func:`project_every` to ``training.fit`` as its ``post_step``.

    Shapes:
        ``(B, in_channels, H, W) -> (B, out_channels, H / s, W / s)``, any H and W that s divides.

    Guarantee:
        No claimed constant: ``lipschitz`` computes one from the numbers, for the input shape if it is given, else
        for every image size.

    Raises:
        OptionError: an argument that is not supported. ShapeError: an input that does not fit.

    >>> from lipkit.protocol import lipschitz
    >>> layer = SvcmConv2d(2, 2, 3)
    >>> _ = nn.init.normal_(layer.free)
    >>> layer.project_((6, 6))
    >>> lipschitz(layer, (2, 6, 6)).item() < 1.02
    True

    References:
        Sedghi, Gupta & Long, ICLR 2019; [Cayley] section 6 (the baseline SVCM).
    """

    def make_parameters(self, device: Any, dtype: Any) -> None:
        self.free = delta_orthogonal_free((self.out_channels, self.inner_channels, *self.kernel_size), device, dtype)

    def kernel(self) -> Tensor:
        return at_least_float32(self.free)

    @torch.no_grad()
    def project_(self, input_size: tuple[int, int], rounds: int = 50) -> None:
        """Replace the kernel by its projection, in place.

        Args:
            input_size: (H, W) of this layer's input, before downsampling.
            rounds: see :func:`project`.

        Raises:
            ShapeError: the layer does not accept that size. OptionError: ``rounds`` below 1.
        """
        size = resampled_size(self, (self.in_channels, *input_size))
        self.free.copy_(project(self.free, *size, rounds))


@lipschitz_rule(SvcmConv2d)
def _svcm(layer: SvcmConv2d, input_shape: Shape | None) -> Tensor:
    if input_shape is None:
        return symbol_sup(layer.kernel())
    return circular(layer.kernel(), *resampled_size(layer, input_shape))


export_rule(SvcmConv2d)(export_kernel_conv)


def _named(model: nn.Module) -> Iterator[tuple[str, SvcmConv2d]]:
    yield from ((name, m) for name, m in model.named_modules() if isinstance(m, SvcmConv2d))


@torch.no_grad()
def input_sizes(model: nn.Module, input_shape: Shape) -> list[tuple[SvcmConv2d, tuple[int, int]]]:
    """Every :class:`SvcmConv2d` in ``model`` with each (H, W) it sees when ``model`` gets ``input_shape``.

    A copy of the model in evaluation mode runs one zero input; the model itself is not touched.

    >>> [size for _, size in input_sizes(nn.Sequential(nn.AvgPool2d(2), SvcmConv2d(1, 1, 3)), (1, 8, 6))]
    [(4, 3)]
    """
    if not any(True for _ in _named(model)):
        return []
    twin = copy.deepcopy(model).eval()
    seen: list[tuple[str, tuple[int, int]]] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            entry = (name, (int(args[0].shape[-2]), int(args[0].shape[-1])))
            if entry not in seen:
                seen.append(entry)

        return note

    for name, module in _named(twin):
        module.register_forward_pre_hook(watch(name))
    like = next(_named(model))[1].free
    twin(torch.zeros(1, *input_shape, dtype=like.dtype, device=like.device))
    layers = dict(_named(model))
    return [(layers[name], size) for name, size in seen]


def project_all(model: nn.Module, input_shape: Shape, rounds: int = 50) -> int:
    """Project every :class:`SvcmConv2d` in ``model``, each for the image size it sees, in place.

    Args:
        model: any module; layers of other types are not touched.
        input_shape: of one input of the model, without the batch.
        rounds: see :func:`project`.

    Returns:
        The number of projections: 0 if the model has no such layer.

    >>> project_all(nn.Sequential(SvcmConv2d(1, 2, 3), SvcmConv2d(2, 2, 3, stride=2)), (1, 8, 8))
    2
    """
    sizes = input_sizes(model, input_shape)
    for layer, size in sizes:
        layer.project_(size, rounds)
    return len(sizes)


def project_every(input_shape: Shape, steps: int = 100, rounds: int = 50) -> Callable[[nn.Module, int, bool], None]:
    """The ``post_step`` of ``training.fit``: :func:`project_all` every ``steps`` steps and at the end of each epoch.

    Raises:
        OptionError: ``steps`` or ``rounds`` below 1.

    >>> project_every((1, 8, 8))(nn.Sequential(SvcmConv2d(1, 2, 3)), 100, False)
    """
    check_positive(steps=steps, rounds=rounds)

    def post_step(model: nn.Module, step: int, epoch_end: bool) -> None:
        if epoch_end or step % steps == 0:
            project_all(model, input_shape, rounds)

    return post_step
