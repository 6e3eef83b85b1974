r"""The Cayley transform of a tall convolution with few inputs: the first layer of a network.

With the symbol :math:`[W_1; W_2]` of its kernel

.. math:: y = [t - x;\, -W_2 t], \qquad N t = 2x, \qquad N = I + W_1 - W_1^* + W_2^* W_2 .

N is the symbol of a small kernel. Only the few inputs are transformed, for the solve, and one plain convolution makes
all outputs from t. (:mod:`lipkit.conv.cayley_conv` transforms the outputs, too.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.conv.circular import circular_conv2d, circular_pads
from lipkit.conv.spectrum import Symbol, apply_symbol, is_dense, kernel_symbol
from lipkit.conv.symbol import centred, check_kernel, taps_of
from lipkit.linalg.matrices import at_least_float32, eye_like
from lipkit.linalg.precision import without_autocast
from lipkit.linalg.transforms import plain_gradients, transformed

# Most inputs. Small matrices multiply by passes over all images, with memory for as many copies of them.
FEW = 4


def spread_pays(kernel: Tensor, h: int, w: int) -> bool:
    r"""True if a tall layer is cheaper by one convolution than by inverse transforms of all its outputs.

    An output pixel takes ``cin kh kw`` products by the kernel, and about ``w + 2 h`` by an inverse transform (``h w``
    where it is dense). The convolution must take at most half as many.

    >>> spread_pays(torch.ones(32, 3, 3, 3), 32, 32), spread_pays(torch.ones(64, 32, 3, 3), 16, 16)
    (True, False)
    """
    cout, cin, kh, kw = kernel.shape
    terms = h * w if is_dense(h, w) else w + 2 * h
    return cin <= FEW and cout >= 2 * cin and kh <= h and kw <= w and 2 * cin * kh * kw <= terms


def normal_kernel(kernel: Tensor) -> Tensor:
    r"""The kernel ``(cin, cin, k1, k2)`` of odd sizes whose symbol is :math:`N = I + W_1 - W_1^* + W_2^* W_2`."""
    check_kernel(kernel)
    n, (kh, kw) = kernel.shape[1], kernel.shape[2:]
    own, rest = centred(kernel[:n]), kernel[n:].transpose(0, 1)
    # The autocorrelation of W_2 in one call: inputs are few.
    gram = F.conv2d(rest, rest, padding=(kh - 1, kw - 1)).transpose(0, 1)
    skew = own - own.flip(2, 3).transpose(0, 1)  # W_1^* has reversed taps and exchanged channels
    more = [(a - b) // 2 for a, b in zip(gram.shape[2:], own.shape[2:], strict=True)]
    return gram + F.pad(skew, (more[1], more[1], more[0], more[0])) + _identity(gram)


def _identity(kernel: Tensor) -> Tensor:
    """The kernel of the identity map on the input channels of ``kernel``, of the same kh x kw."""
    return F.pad(eye_like(kernel, kernel.shape[1])[:, :, None, None], circular_pads(*kernel.shape[2:]))


def spread_parts(kernel: Tensor, h: int, w: int) -> tuple[Symbol, Tensor]:
    """The symbol that maps x to t, and the kernel ``(cout, cin, kh, kw)`` that maps t to ``y + [x; 0]``."""
    solution = kernel_symbol(normal_kernel(kernel), h, w).map(lambda normal: 2 * torch.linalg.inv(normal))
    return solution, torch.cat((_identity(kernel), -kernel[kernel.shape[1] :]))


def _plain(kernel: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The function of :class:`_Convolved`, in operations that torch can trace and differentiate to any order."""
    exact, (solution, outputs) = x.to(kernel.dtype), spread_parts(kernel, *x.shape[-2:])
    y = circular_conv2d(apply_symbol(solution, exact), outputs, bias)
    return (y - F.pad(exact, (0, 0, 0, 0, 0, y.shape[1] - x.shape[1]))).to(x.dtype)


def _adjoint(g: Tensor, kernel: Tensor) -> Tensor:
    """The transposed circular convolution of ``g``, for a kernel that fits: one product, then a sum over its taps."""
    cout, cin, kh, kw = kernel.shape
    b, _, h, w = g.shape
    by_tap = kernel.permute(2, 3, 1, 0).reshape(1, -1, cout).expand(b, -1, -1)
    # Sum the taps, and transform the sum, in float32 at least.
    taps = at_least_float32(torch.bmm(by_tap, g.flatten(2)).view(b, kh, kw, cin, h, w))
    for centre, dim in zip(_centre(kernel), (-2, -1), strict=True):
        parts = taps.unbind(1)  # rolled to their places and added, in place, to the central one
        for tap, part in enumerate(parts):
            if tap != centre:
                parts[centre].add_(part.roll(tap - centre, dim))
        taps = parts[centre]
    return taps


def _centre(kernel: Tensor) -> tuple[int, int]:
    return (kernel.shape[2] - 1) // 2, (kernel.shape[3] - 1) // 2


def _spectra(kernel: Tensor, h: int, w: int) -> Tensor:
    """The symbol ``(h (w // 2 + 1), cout, cin)`` of a kernel that fits, at the frequencies of a real transform."""
    (kh, kw), (up, left) = kernel.shape[2:], _centre(kernel)
    placed = F.pad(kernel, (0, w - kw, 0, h - kh)).roll((-up, -left), (2, 3))
    # A cross-correlation multiplies by the conjugate of its kernel's transform.
    return torch.fft.rfft2(placed).conj_physical_().permute(2, 3, 0, 1).flatten(0, 1)


class _Convolved(torch.autograd.Function):
    """`spread_cayley` with a hand-written derivative: autograd of many small parts would dominate the products.

    On an AMD EPYC 1.35 to 1.56 times as fast as autograd.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        n, (h, w) = x.shape[1], x.shape[-2:]
        exact = x.to(kernel.dtype)
        own, rest = _spectra(kernel, h, w).split([n, len(kernel) - n], 1)
        normal = torch.baddbmm(own - own.mT.conj_physical(), rest.mH, rest)
        normal.diagonal(dim1=-2, dim2=-1).add_(1)  # the I of N
        inverse = torch.linalg.inv_ex(normal).inverse
        solution = (2 * inverse).view(h, -1, n, n).permute(2, 3, 0, 1).contiguous()
        spectrum = torch.fft.rfft2(exact[:, None])
        # With few channels, passes over images beat tiny products.
        t = torch.fft.irfft2((solution * spectrum).sum(2), s=(h, w))
        # One kernel maps t to both parts [t; -W_2 t] of the outputs; x is subtracted from the first part below.
        outputs = torch.cat((_identity(kernel), -kernel[n:]))
        # Inputs are few, outputs many: only the convolution runs in the dtype of autocast.
        padded, outputs = F.pad(t.to(x.dtype), circular_pads(*kernel.shape[2:]), mode="circular"), outputs.to(x.dtype)
        y = F.conv2d(padded, outputs, None if bias is None else bias.to(x.dtype))
        y[:, :n].sub_(exact)
        ctx.save_for_backward(kernel, x, bias, rest, inverse, solution, spectrum, padded, outputs)
        return y

    @staticmethod
    @without_autocast()
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kernel, x, bias, rest, inverse, solution, spectrum, padded, outputs = ctx.saved_tensors
        if torch.is_grad_enabled() or transformed(g):
            return plain_gradients(_plain, (kernel, x, bias), g)
        n, (h, w) = x.shape[1], x.shape[-2:]
        for_kernel, for_x = None, None
        for_t = torch.fft.rfft2(_adjoint(g, outputs))  # for_v: the gradient of v, here at each frequency
        if ctx.needs_input_grad[1]:
            through_t = (solution.conj() * for_t[:, :, None]).sum(1)
            for_x = torch.fft.irfft2(through_t, s=(h, w)).sub_(g[:, :n])
        if ctx.needs_input_grad[0]:
            # The half-spectrum suffices: the real inverse transform adds the conjugate at -f to each f.
            for_solution = (for_t[:, :, None] * spectrum.conj_physical()).sum(0).permute(2, 3, 0, 1).flatten(0, 1)
            adjoint = inverse.mH
            for_normal = torch.baddbmm(for_solution, torch.bmm(adjoint, for_solution), adjoint, beta=0, alpha=-2)
            mirrored = for_normal.mT.conj_physical()  # N holds W_1 and W_1^*, W_2 and W_2^*
            for_rest = torch.bmm(rest, for_normal + mirrored)
            spectra = torch.cat((for_normal - mirrored, for_rest), 1).unflatten(0, (h, -1))
            for_kernel = taps_of(spectra, h, w, kernel.shape[2:])  # the adjoint of `_spectra`, divided by h w
            # The outputs -W_2 t depend on W_2 twice: through t, and directly.
            options = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1, (False, True, False))  # the last: only the kernel's
            direct = torch.ops.aten.convolution_backward(g, padded, outputs, None, *options)[1]
            for_kernel[n:].sub_(direct[n:])
        for_bias = g.sum((0, 2, 3)).to(kernel.dtype) if ctx.needs_input_grad[2] else None
        return for_kernel, for_x, for_bias


def spread_cayley(kernel: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Orthogonal convolution of ``x`` with the Cayley transform of a tall ``kernel`` that fits the image.

    The convolution runs in the dtype of x, N and the solve in that of the kernel; call it without autocast.

    Cost:
        Two transforms of x, inverses of size cin at about h w / 2 frequencies, and one plain convolution. Between
        the transforms, memory for cin copies of x.
    """
    if torch.compiler.is_compiling() or transformed():
        return _plain(kernel, x, bias)
    return _Convolved.apply(kernel, x, bias)
