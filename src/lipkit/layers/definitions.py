r"""Every family as its paper writes it: a few lines of plain torch, at all frequencies of the image.

Read these first. The layers compute the same faster and in less memory; `tests/layers/test_definitions.py` compares
them. A convolution with kernel K multiplies the Fourier transform of an image by a matrix at each frequency,

.. math:: \hat y(f) = \hat K(f)\, \hat x(f), \qquad
          \hat K(f) = \sum_s K[s]\, e^{2\pi i \langle f,\, (s - c) / n \rangle},

with the centre c = (k - 1) // 2, and a dense layer is a convolution on one pixel. A stride s first moves each s x s
patch into the channels. A definition maps a layer and its input, (N, C, H, W) or (N, features), to the output, by the
free parameters of the layer; each `Family` names its own.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lipkit.bounds import symbol_sup
from lipkit.conv.phases import frequency_map
from lipkit.linalg.exponential import SMALLEST_NORM, skew_bound
from lipkit.linalg.table import function_name

Definition = Callable[[Any, Tensor], Tensor]


def waves(n: int, k: int, centre: int) -> Tensor:
    r""":math:`e^{2\pi i f (s - c) / n}` for every frequency f of n pixels and every tap s of k: ``(n, k)``."""
    turns = torch.outer(torch.arange(n), torch.arange(k) - centre).double() / n  # integers: exact before the division
    return torch.polar(torch.ones_like(turns), 2 * math.pi * turns)


def symbol(kernel: Tensor, h: int, w: int) -> Tensor:
    """The matrices of a kernel (cout, cin, kh, kw) at the frequencies of h x w: ``(h, w, cout, cin)``, complex128."""
    kh, kw = kernel.shape[-2:]
    rows, columns = waves(h, kh, (kh - 1) // 2), waves(w, kw, (kw - 1) // 2)
    return torch.einsum("ha,wb,oiab->hwoi", rows, columns, kernel.to(torch.complex128))


def apply(symbol: Tensor, x: Tensor) -> Tensor:
    """Multiply the transforms of images (N, cin, h, w) by the matrices ``symbol`` (h, w, cout, cin); real result."""
    spectrum = torch.einsum("hwoi,nihw->nohw", symbol, torch.fft.fft2(x.to(torch.complex128)))
    return torch.fft.ifft2(spectrum).real  # the rest is rounding: a real kernel has conjugate matrices at f and -f


def as_kernel(free: Tensor) -> Tensor:
    """A matrix as a kernel of one tap."""
    return free if free.ndim == 4 else free[..., None, None]


def as_images(layer: Any, x: Tensor) -> Tensor:
    """Features as images of one pixel; images with each s x s patch moved into the channels."""
    return x[..., None, None] if x.ndim == 2 else F.pixel_unshuffle(x, layer.stride)


def biased(layer: Any, y: Tensor) -> Tensor:
    return y if layer.bias is None else y + layer.bias[:, None, None]


def linear(of: Callable[[Any, int, int], Tensor]) -> Definition:
    """A definition ``(layer, x) -> y`` from ``of(layer, h, w)``, the matrices of an affine layer at all frequencies."""

    @functools.wraps(of)
    def definition(layer: Any, x: Tensor) -> Tensor:
        images = as_images(layer, x)
        y = biased(layer, apply(of(layer, *images.shape[-2:]), images))
        return y.flatten(1) if x.ndim == 2 else y

    return definition


def polar_factor(w: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, to which the iterations of Björck and of Newton and Schulz converge."""
    u, _, vh = torch.linalg.svd(w, full_matrices=False)
    return u @ vh


def cayley_transform(w: Tensor) -> Tensor:
    r"""For :math:`W = [U; V]` and :math:`Z = U - U^* + V^* V`: :math:`[(I - Z)(I + Z)^{-1};\ -2 V (I + Z)^{-1}]`."""
    if w.shape[-2] < w.shape[-1]:
        return cayley_transform(w.mH).mH  # orthonormal rows instead of columns
    n = w.shape[-1]
    u, v, eye = w[..., :n, :], w[..., n:, :], torch.eye(n, dtype=w.dtype)
    z = u - u.mH + v.mH @ v  # skew plus positive semidefinite, so I + Z is invertible
    inverse = torch.linalg.inv(eye + z)
    return torch.cat(((eye - z) @ inverse, -2 * v @ inverse), -2)


def semi_orthogonal(layer: Any, w: Tensor) -> Tensor:
    """The semi-orthogonal matrix that the layer's ``orthogonalize`` makes of a free one."""
    papers = {"cayley": cayley_transform, **dict.fromkeys(("bjorck", "newton_schulz", "polar"), polar_factor)}
    return papers.get(function_name(layer.orthogonalize), layer.orthogonalize)(w)


@linear
def cayley(layer: Any, h: int, w: int) -> Tensor:
    """Trockman & Kolter, ICLR 2021, algorithm 1: the transform at each frequency of the normalised kernel."""
    return cayley_transform(symbol(as_kernel(layer.scale * layer.free / layer.free.norm()), h, w))


@linear
def lot(layer: Any, h: int, w: int) -> Tensor:
    """Xu, Li & Li, NeurIPS 2022, equation 4: the polar factor at each frequency."""
    return semi_orthogonal(layer, symbol(layer.free, h, w))


@linear
def bro(layer: Any, h: int, w: int) -> Tensor:
    """Lai et al., ICML 2025, section 4: I - 2 V (V* V)^-1 V* at each frequency, cut to the layer's channels."""
    v = symbol(layer.directions(), h, w)
    reflector = torch.eye(v.shape[-2]) - 2 * v @ torch.linalg.inv(v.mH @ v) @ v.mH
    outputs, inputs = layer.shape[:2]  # of a weight
    return reflector[..., :outputs, :inputs]  # a part of an orthogonal matrix is a contraction


@linear
def eco(layer: Any, h: int, w: int) -> Tensor:
    """Yu et al., ICLR 2022, algorithm 1: orthogonal matrices at the kh x kw frequencies of a dilated kernel."""
    kh, kw = layer.kernel_size
    a = layer.free - layer.free.mT
    a = a / skew_bound(a, layer.squarings).clamp_min(SMALLEST_NORM)[..., None, None]
    p0 = exponential(a, layer.terms)[frequency_map((kh, kw))]  # conjugate frequencies share a matrix
    # Dilated by (h / kh, w / kw), a kernel has the same matrix at f and f + (kh, kw).
    f1, f2 = torch.meshgrid(torch.arange(h) % kh, torch.arange(w) % kw, indexing="ij")
    return p0[f1, f2][..., : layer.out_channels, : layer.inner_channels].to(torch.complex128)


@linear
def soc(layer: Any, h: int, w: int) -> Tensor:
    """Singla & Feizi, ICML 2021, algorithm 1: the exponential of a skew kernel, scaled to norm at most 1."""
    powers = exponential(symbol(layer.generator(), h, w), layer.terms)
    return powers[..., : layer.out_channels, : layer.inner_channels]


def exponential(a: Tensor, terms: int) -> Tensor:
    """The Taylor polynomial of the matrix exponential."""
    total = power = torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a)
    for i in range(1, terms + 1):
        power = power @ a / i
        total = total + power  # power is A^i / i!
    return total


def projector_product(h: Tensor, v: Any, image: tuple[int, int], kernel: tuple[int, int], centre: Any) -> Tensor:
    """The product of two-tap factors P_i + (I - P_i) z and of H at each frequency of an image, with P_i = V_i V_i^T.

    z is the wave of a shift by one pixel along the factor's axis; axes alternate, and the longer side of the ``kernel``
    takes the last ones. Along each axis, the first, third, ... factor exchanges P_i and I - P_i. ``centre`` is the tap
    that multiplies the pixel itself.
    """
    if h.shape[0] < h.shape[1]:
        return projector_product(h.mT, v, image, kernel, centre).mT  # the factors act on the larger side
    shared = min(kernel) - 1
    # Each factor adds a tap along its axis; the longer axis takes the rest.
    axes = [0, 1] * shared + [0 if kernel[0] > kernel[1] else 1] * abs(kernel[0] - kernel[1])
    v = h.new_zeros(len(axes), max(h.shape), 0) if v is None else v  # one channel: no projectors but 0 and 1
    z = [waves(n, 2, 0)[:, 1] for n in image]
    # Taps count from the centre: z^-c moves it to the origin.
    shift = [wave**-c for wave, c in zip(z, centre, strict=True)]
    total = torch.einsum("h,w,oi->hwoi", *shift, h.to(torch.complex128))
    eye, seen = torch.eye(max(h.shape), dtype=torch.complex128), [0, 0]
    on_grid = z[0][:, None, None, None], z[1][:, None, None]  # shapes that broadcast to (h, w, n, n)
    for vectors, axis in zip(v, axes, strict=True):
        p = (vectors @ vectors.mT).to(torch.complex128)
        p = eye - p if seen[axis] % 2 == 0 else p  # alternate, so that the taps stay centred even where V_i is empty
        seen[axis] += 1
        total = (p + (eye - p) * on_grid[axis]) @ total
    return total


@linear
def bcop(layer: Any, h: int, w: int) -> Tensor:
    """Li et al., NeurIPS 2019, algorithm 1 (with the Cayley transform: Trockman & Kolter 2021, section 5)."""
    v = None if layer.projectors is None else semi_orthogonal(layer, layer.projectors)
    centre = [(k - 1) // 2 for k in layer.kernel_size]
    return projector_product(semi_orthogonal(layer, layer.free), v, (h, w), layer.kernel_size, centre)


def aoc(layer: Any, x: Tensor) -> Tensor:
    """Boissin et al., ICML 2025: BCOP at stride 1, then a semi-orthogonal matrix on each patch of the stride."""
    made, stride = layer.construction, layer.stride[0]
    kernel = (layer.kernel_size[0] - stride + 1, layer.kernel_size[1] - stride + 1)
    matrix = semi_orthogonal(made, made.free[0])
    v = None if made.projectors is None else semi_orthogonal(made, made.projectors)
    # Torch pads a strided layer by k // 2 pixels, and one of stride 1 by (k - 1) // 2 on the left.
    centre = [k // 2 if stride > 1 else (k - 1) // 2 for k in kernel]
    y = apply(projector_product(matrix, v, (x.shape[-2], x.shape[-1]), kernel, centre), x)
    if made.last is not None:
        y = torch.einsum("oi,nihw->nohw", semi_orthogonal(made, made.last[0]), F.pixel_unshuffle(y, stride))
    return biased(layer, y)


@linear
def rko(layer: Any, h: int, w: int) -> Tensor:
    """Li et al., NeurIPS 2019, section 4.1: the reshaped kernel, made semi-orthogonal, divided by sqrt(kh kw)."""
    kernel = semi_orthogonal(layer, layer.free.flatten(1)).reshape(layer.free.shape)
    return symbol(kernel / math.sqrt(math.prod(layer.kernel_size)), h, w)  # kh kw windows share a pixel


@linear
def cholesky(layer: Any, h: int, w: int) -> Tensor:
    """Hu et al., ICLR 2024: L^-1 W with L L^T = W W^T + e I, divided by sqrt(kh kw)."""
    wide = layer.free.flatten(1)
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.mT  # the smaller Gram matrix
    gram = wide @ wide.mT
    factor = torch.linalg.cholesky(gram + layer.ridge * gram.diagonal().mean() * torch.eye(len(gram)))
    made = torch.linalg.inv(factor) @ wide
    kernel = as_kernel((made if made.shape == layer.free.flatten(1).shape else made.mT).reshape(layer.free.shape))
    return symbol(kernel / math.sqrt(math.prod(kernel.shape[2:])), h, w)


@linear
def aol(layer: Any, h: int, w: int) -> Tensor:
    """Prach & Lampert, ECCV 2022, theorem 2: each input channel i divided by the root of row i's sum of |K^T * K|."""
    kernel = as_kernel(layer.free)
    return symbol(kernel / row_sums(kernel.transpose(0, 1)).sqrt()[:, None, None], h, w)  # along the inputs


def row_sums(kernel: Tensor, weights: Tensor | None = None) -> Tensor:
    """For each output i: the sum of ``|K * K^T|_ij`` over j and all lags, times ``weights_ij``."""
    reach = (kernel.shape[-2] - 1, kernel.shape[-1] - 1)
    gram = F.conv2d(kernel, kernel, padding=reach).abs().sum((2, 3))  # outputs are the samples; padding gives all lags
    return (gram if weights is None else gram * weights).sum(1)


@linear
def ossn(layer: Any, h: int, w: int) -> Tensor:
    """Gouk et al., Machine Learning 2021, section 3: the kernel divided by its convolution's norm on this image."""
    matrices = symbol(layer.free, h, w)
    return matrices / torch.linalg.matrix_norm(matrices, 2).amax()  # the largest over all frequencies


@linear
def svcm(layer: Any, h: int, w: int) -> Tensor:
    """Sedghi, Gupta & Long, ICLR 2019: the kernel itself; `lipkit.layers.svcm.project` acts between the steps."""
    return symbol(layer.free, h, w)


@linear
def liresnet(layer: Any, h: int, w: int) -> Tensor:
    """Hu et al., NeurIPS 2023, section 3: identity plus a free kernel, divided by a bound of the sum's norm."""
    noise, (kh, kw) = layer.free, layer.kernel_size
    kernel = layer.scale * noise / math.sqrt(layer.depth)
    centre = torch.zeros(kh, kw)
    centre[(kh - 1) // 2, (kw - 1) // 2] = 1
    kernel = kernel + torch.eye(*noise.shape[:2])[:, :, None, None] * centre
    return symbol(kernel / symbol_sup(kernel, tolerance=0.02, finer=False), h, w)


def residual(layer: Any, x: Tensor, multiplier: Tensor) -> Tensor:
    """x - F* (Lambda act(F x + b)), with zeros for missing inputs, and surplus outputs dropped."""
    images, kernel = as_images(layer, x), as_kernel(layer.free)
    images = F.pad(images, (0, 0, 0, 0, 0, kernel.shape[1] - images.shape[1]))  # channels, the third from the end
    matrices = symbol(kernel, *images.shape[-2:])
    inside = layer.activation(biased(layer, apply(matrices, images)))
    y = (images - apply(matrices.mH, multiplier[:, None, None] * inside))[:, : layer.shape[0]]
    return y.flatten(1) if x.ndim == 2 else y


def sll(layer: Any, x: Tensor) -> Tensor:
    """Araujo et al., ICLR 2023, theorem 3: Lambda = 2 T^-1, T_ii the sum of |F F*|_ij q_j / q_i."""
    q = layer.log_q.exp()
    return residual(layer, x, 2 / row_sums(as_kernel(layer.free), q[None, :] / q[:, None]))


def cpl(layer: Any, x: Tensor) -> Tensor:
    """Meunier et al., ICML 2022, equation 8: Lambda = 2 / |F|^2, with a proved bound of the norm on all images."""
    norm = symbol_sup(as_kernel(layer.free), tolerance=0.02, finer=False)
    return residual(layer, x, (2 / norm.square()).expand(layer.hidden))


def sandwich(layer: Any, x: Tensor) -> Tensor:
    """Wang & Manchester, ICML 2023, equation 10 and algorithm 1: sqrt2 A* Psi act(sqrt2 Psi^-1 B x + b).

    [A B] is the Cayley transform of the wide [X Y]; the dense layer keeps X and Y transposed.
    """
    images = as_images(layer, x)
    free = [
        scale * free / free.norm() for free, scale in ((layer.x_free, layer.x_scale), (layer.y_free, layer.y_scale))
    ]
    kernels = [one if one.ndim == 4 else as_kernel(one.mT) for one in free]  # the dense layer stores them tall
    both = cayley_transform(symbol(torch.cat(kernels, 1), *images.shape[-2:]))
    q, psi = len(kernels[0]), layer.log_psi.exp()[:, None, None]
    v = math.sqrt(2) * apply(both[..., q:], images) / psi
    y = math.sqrt(2) * apply(both[..., :q].mH, psi * layer.activation(biased(layer, v)))
    return y.flatten(1) if x.ndim == 2 else y
