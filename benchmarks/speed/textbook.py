r"""The layers as their papers print them, written from the equations: what lipkit's own are compared with.

Complex FFTs with permuted copies, ``torch.linalg.inv`` at every frequency and in every pass, Taylor series as one
convolution per term. Parameters have the names and the meaning of lipkit's layers, so ``load_state_dict`` copies them
over; nothing of lipkit computes here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cayley_matrix(w: Tensor) -> Tensor:
    """``[(I + Z)^-1 (I - Z); -2 V (I + Z)^-1]`` of a batch of matrices ``[U; V]``, Z = U - U* + V* V."""
    m, n = w.shape[-2:]
    if m < n:
        return cayley_matrix(w.mH).mH
    u, v = w[..., :n, :], w[..., n:, :]
    eye = torch.eye(n, dtype=w.dtype, device=w.device)
    z = u - u.mH + v.mH @ v
    inverse = torch.linalg.inv(eye + z)
    return torch.cat((inverse @ (eye - z), -2 * v @ inverse), -2)


def fourier_weight(kernel: Tensor, h: int, w: int) -> Tensor:
    """Frequency matrices ``(h (w // 2 + 1), cout, cin)`` of a padded kernel, centred at tap ``(k - 1) // 2``."""
    cout, cin, kh, kw = kernel.shape
    if kh > h or kw > w:
        raise ValueError(f"expected a kernel of at most {h} x {w}, got {kh} x {kw}")
    f1 = torch.fft.fftfreq(h, dtype=kernel.dtype, device=kernel.device)[:, None] * ((kh - 1) // 2)
    f2 = torch.fft.rfftfreq(w, dtype=kernel.dtype, device=kernel.device) * ((kw - 1) // 2)
    shift = torch.polar(torch.ones_like(f1 + f2), -2 * math.pi * (f1 + f2))
    symbol = torch.fft.rfft2(kernel, (h, w)).conj() * shift
    return symbol.permute(2, 3, 0, 1).reshape(-1, cout, cin)


def to_fourier(x: Tensor) -> Tensor:
    """Features ``(B, C, h, w)`` to ``(h (w // 2 + 1), C, B)``."""
    return torch.fft.rfft2(x).permute(2, 3, 1, 0).reshape(-1, x.shape[1], x.shape[0])


def from_fourier(y: Tensor, h: int, w: int) -> Tensor:
    """Inverse of `to_fourier`."""
    return torch.fft.irfft2(y.reshape(h, w // 2 + 1, *y.shape[1:]).permute(3, 2, 0, 1), s=(h, w))


def normalised(free: Tensor, scale: Tensor) -> Tensor:
    """``scale * free / ||free||_F``."""
    return scale * free / free.norm()


def like_conv(c: int, n: int, kernel: int) -> nn.Parameter:
    """A free kernel with the initial values of ``nn.Conv2d``."""
    return nn.Parameter(nn.init.kaiming_uniform_(torch.empty(c, n, kernel, kernel), a=math.sqrt(5)))


class Cayley(nn.Module):
    """[Cayley] algorithm 1 as in its appendix: padded kernel, FFT, one explicit inverse per frequency."""

    def __init__(self, cin: int, cout: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.free = like_conv(cout, cin * stride**2, kernel)
        self.scale = nn.Parameter(self.free.detach().norm())
        self.bias = nn.Parameter(torch.zeros(cout))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, self.stride)
        h, w = x.shape[-2:]
        q = cayley_matrix(fourier_weight(normalised(self.free, self.scale), h, w))
        return from_fourier(q @ to_fourier(x), h, w) + self.bias[:, None, None]


class Sandwich(nn.Module):
    """[LBDN] algorithm 1: one Cayley transform per frequency, four FFTs, ReLU inside."""

    def __init__(self, cin: int, cout: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.x_free = like_conv(cout, cout, kernel)
        self.y_free = like_conv(cout, cin * stride**2, kernel)
        self.x_scale = nn.Parameter(self.x_free.detach().norm())
        self.y_scale = nn.Parameter(self.y_free.detach().norm())
        self.log_psi = nn.Parameter(torch.zeros(cout))
        self.bias = nn.Parameter(torch.zeros(cout))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_unshuffle(x, self.stride)
        h, w = x.shape[-2:]
        free = torch.cat((normalised(self.x_free, self.x_scale), normalised(self.y_free, self.y_scale)), 1)
        both = cayley_matrix(fourier_weight(free, h, w))
        q, psi = self.bias.numel(), self.log_psi.exp()[:, None]
        inner = from_fourier(math.sqrt(2) / psi * (both[..., q:] @ to_fourier(x)), h, w)
        active = torch.relu(inner + self.bias[:, None, None])
        return from_fourier(math.sqrt(2) * (both[..., :q].mH @ (psi * to_fourier(active))), h, w)


class PowerIteration(nn.Module):
    """Estimates of the spectral norms of a batch of matrices; one more step at each pass in training mode."""

    vector: Tensor

    def __init__(self, matrices: Tensor, first: int = 50) -> None:
        super().__init__()
        start = torch.randn(*matrices.shape[:-2], matrices.shape[-1], 1)
        self.register_buffer("vector", start / start.norm(dim=-2, keepdim=True), persistent=False)
        for _ in range(first):
            self.step(matrices.detach())

    def step(self, matrices: Tensor) -> Tensor:
        left = matrices @ self.vector
        left = left / left.norm(dim=-2, keepdim=True).clamp_min(1e-12)
        right = matrices.mT @ left
        self.vector = right / right.norm(dim=-2, keepdim=True).clamp_min(1e-12)
        return left

    def forward(self, matrices: Tensor) -> Tensor:
        with torch.no_grad():
            left = self.step(matrices) if self.training else F.normalize(matrices @ self.vector, dim=-2)
        return (left.mT @ matrices @ self.vector)[..., 0, 0]


def skew_kernel(free: Tensor) -> Tensor:
    """``M - conv_transpose(M)``."""
    return free - free.transpose(0, 1).flip(2, 3)


def four_reshapings(kernel: Tensor) -> list[Tensor]:
    """The matrices whose norms, times k, bound the norm of a convolution (Singla & Feizi, ICLR 2021)."""
    c, n, kh, kw = kernel.shape
    return [
        kernel.permute(0, 2, 1, 3).reshape(c * kh, n * kw),
        kernel.permute(0, 3, 1, 2).reshape(c * kw, n * kh),
        kernel.reshape(c, n * kh * kw),
        kernel.permute(0, 2, 3, 1).reshape(c * kh * kw, n),
    ]


class Soc(nn.Module):
    """Skew Orthogonal Convolutions, algorithm 1: one convolution per Taylor term, in training and in evaluation."""

    def __init__(self, cin: int, cout: int, kernel: int, stride: int = 1, terms: tuple[int, int] = (5, 12)) -> None:
        super().__init__()
        c = max(cin * stride**2, cout)
        self.stride, self.inner, self.terms = stride, cin * stride**2, terms
        self.free = like_conv(c, c, kernel)
        self.bias = nn.Parameter(torch.zeros(cout))
        self.norms = nn.ModuleList(map(PowerIteration, four_reshapings(skew_kernel(self.free.detach()))))

    def forward(self, x: Tensor) -> Tensor:
        kernel = skew_kernel(self.free)
        matrices = four_reshapings(kernel)
        norms = torch.stack([norm(matrix) for norm, matrix in zip(self.norms, matrices, strict=True)])
        half = kernel.shape[-1] // 2
        kernel = kernel / (kernel.shape[-1] * norms.amin())
        x = F.pad(F.pixel_unshuffle(x, self.stride), (0, 0, 0, 0, 0, len(kernel) - self.inner))
        y = term = x
        for i in range(1, self.terms[0 if self.training else 1] + 1):
            padded = F.pad(term, (half,) * 4, mode="circular") if half else term
            term = F.conv2d(padded, kernel) / i
            y = y + term
        return y[:, : self.bias.numel()] + self.bias[:, None, None]


def eco_index(k: int) -> Tensor:
    """``I[p, q]``: the matrix used at frequency (p, q) of k x k, self-conjugate frequencies first; for odd k."""
    index = torch.full((k, k), -1, dtype=torch.int64)
    index[0, 0] = 0
    half = range(1, (k + 1) // 2)
    # One frequency of each pair (p, q), (-p, -q), in the order in which the layer stores its matrices.
    order = [(0, q) for q in half] + [(p, 0) for p in half]
    order += [(p, q) for p in half for q in half] + [(p, -q) for p in half for q in half]
    for number, (p, q) in enumerate(order, start=1):
        index[p % k, q % k] = index[-p % k, -q % k] = number
    return index


def eco_kernel(matrices: Tensor, k: int) -> Tensor:
    """W0 ``(cout, cin, k, k)``: the inverse DFT of the matrices at their frequencies, centred."""
    symbol = matrices[eco_index(k).to(matrices.device)]
    return torch.fft.ifft2(symbol, dim=(0, 1)).real.roll(((k - 1) // 2,) * 2, (0, 1)).permute(2, 3, 0, 1)


class Eco(nn.Module):
    """[ECO] algorithms 1 and 2: real matrices, power iteration, explicit Taylor powers, one dilated convolution."""

    def __init__(self, cin: int, cout: int, kernel: int, terms: tuple[int, int] = (5, 10)) -> None:
        super().__init__()
        if cin != cout or kernel % 2 == 0:
            raise ValueError(f"expected equal channels and an odd kernel, got {cin} -> {cout}, kernel {kernel}")
        self.kernel_size, self.terms = kernel, terms
        free = torch.empty((kernel**2 + 1) // 2, cout, cin)
        for matrix in free:
            nn.init.orthogonal_(matrix)
        self.free = nn.Parameter(free)
        self.bias = nn.Parameter(torch.zeros(cout))
        self.norm = PowerIteration(free - free.mT)

    def kernel(self) -> Tensor:
        skew = self.free - self.free.mT
        skew = skew / self.norm(skew)[:, None, None]
        term = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device).expand_as(skew)
        total = term
        for i in range(1, self.terms[0 if self.training else 1] + 1):
            term = term @ skew / i
            total = total + term
        return eco_kernel(total, self.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        step = [n // self.kernel_size for n in x.shape[-2:]]
        half = self.kernel_size // 2
        pads = [half * step[1]] * 2 + [half * step[0]] * 2
        return F.conv2d(F.pad(x, pads, mode="circular"), self.kernel(), self.bias, dilation=step)


LAYERS: dict[str, type[nn.Module]] = {"cayley": Cayley, "sandwich": Sandwich, "soc": Soc, "eco": Eco}


def build(family: str, cin: int, cout: int, kernel: int, stride: int) -> nn.Module | None:
    """The textbook layer of a family, or None where there is none.

    >>> build("cayley", 3, 8, 3, 1)(torch.zeros(1, 3, 5, 5)).shape
    torch.Size([1, 8, 5, 5])
    """
    if family not in LAYERS or (family == "eco" and (stride != 1 or cin != cout)):
        return None
    sizes: tuple[Any, ...] = (cin, cout, kernel) if family == "eco" else (cin, cout, kernel, stride)
    return LAYERS[family](*sizes)


def evaluated(layer: nn.Module, side: int) -> nn.Module:
    """What is run in evaluation: ECO stores its kernel; the others build their weights anew in each pass.

    Args:
        layer: of this file.
        side: height and width of the images.
    """
    layer = layer.eval()
    if not isinstance(layer, Eco):
        return layer
    c, k = layer.bias.numel(), layer.kernel_size
    stored = nn.Conv2d(c, c, k, padding="same", dilation=side // k, padding_mode="circular", device=layer.bias.device)
    with torch.no_grad():
        stored.weight.copy_(layer.kernel())
        if stored.bias is not None:
            stored.bias.copy_(layer.bias)
    return stored.eval()
