"""Law 9: gradients agree with differences, and stay finite where a formula could divide by zero."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call

from lipkit.testing.case import Case, LawBroken, require


def _semi_orthogonal(rows: int, cols: int) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(max(rows, cols), min(rows, cols), dtype=torch.float64))
    return q if rows >= cols else q.mT  # orthonormal columns, or rows


def _repeated_matrices(p: Tensor) -> Tensor:
    """Semi-orthogonal matrices in the last two dimensions: all their singular values are 1."""
    if p.ndim < 2:
        return p
    flat = p.reshape(-1, *p.shape[-2:])
    return torch.stack([_semi_orthogonal(*p.shape[-2:]) for _ in flat]).reshape(p.shape)


def _repeated_kernel(p: Tensor) -> Tensor:
    """A kernel of one tap, a semi-orthogonal matrix: all singular values of the convolution are 1."""
    if p.ndim != 4:
        return _repeated_matrices(p)
    kernel = torch.zeros_like(p)
    kernel[:, :, (p.shape[2] - 1) // 2, (p.shape[3] - 1) // 2] = _semi_orthogonal(*p.shape[:2])
    return kernel


POINTS: dict[str, Callable[[Tensor], Tensor]] = {
    "random parameters": lambda p: p,
    "repeated singular values of matrices": _repeated_matrices,
    "repeated singular values of a kernel": _repeated_kernel,
    "zero matrices": lambda p: torch.zeros_like(p) if p.ndim >= 2 else p,
    "zero parameters": torch.zeros_like,
}


def _finite(layer: nn.Module, x: Tensor, where: str) -> None:
    x = x.clone().requires_grad_()
    y = layer(x)
    bad = int((~y.isfinite()).sum())
    require(not bad, f"{where}: expected a finite output, got {bad} others")
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    for name, p in (("input", x), *layer.named_parameters()):
        grad = p.grad
        bad = 0 if grad is None else int((~grad.isfinite()).sum())
        require(not bad, f"{where}: expected a finite gradient of {name}, got {bad} entries that are not")


def _right(layer: nn.Module, x: Tensor, where: str) -> None:
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters() if p.requires_grad]

    def f(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            gradcheck(f, (x.clone().requires_grad_(), *values), fast_mode=True)  # along random directions
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise LawBroken(f"{where}: expected gradients that agree with finite differences, got {reason}") from None


def gradients(case: Case) -> dict[str, float]:
    """Law 9, in float64: gradcheck at random weights and repeated singular values; finite there and at zero."""
    x = case.x(batch=2, dtype=torch.float64)  # finite differences need float64
    for where, point in POINTS.items():
        layer = case.moved(case.layer(dtype=torch.float64))
        with case.random(31), torch.no_grad():
            for p in layer.parameters():
                p.copy_(point(p.detach().clone()))
        _finite(layer, x, where)
        if where.startswith("random") or (where.startswith("repeated") and case.smooth):
            _right(layer, x, where)
        if not any(True for _ in layer.parameters()):
            break
    return {}
