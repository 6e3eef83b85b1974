"""Constant elementwise maps and the constant convex residual."""

from __future__ import annotations

from torch import Tensor, nn

from lipkit.errors import ShapeError


class Affine(nn.Module):
    """``y = scale * x + shift`` per channel (dimension 1), with constant buffers.

    Args:
        scale, shift: tensors ``(C,)``, or ``(1,)`` for one value for every channel.

    Raises:
        ShapeError: other shapes, or an input with another number of channels (it would be repeated).

    >>> import torch
    >>> Affine(torch.tensor([2.0]), torch.tensor([1.0]))(torch.zeros(1, 3)).tolist()
    [[1.0, 1.0, 1.0]]
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        if scale.ndim != 1 or scale.shape != shift.shape or not len(scale):
            raise ShapeError(
                f"Affine: expected scale and shift of one shape (C,), got {tuple(scale.shape)} and {tuple(shift.shape)}"
            )
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("shift", shift.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or len(self.scale) not in (1, x.shape[1]):
            raise ShapeError(f"Affine: expected {len(self.scale)} channels in dimension 1, got shape {tuple(x.shape)}")
        shape = (-1,) + (1,) * (x.ndim - 2)
        return x * self.scale.view(shape) + self.shift.view(shape)

    def extra_repr(self) -> str:
        return f"channels={len(self.scale)}"


class ConvexResidual(nn.Module):
    """``y = s f(x) + (1 - s) g(x)`` with a constant share s in [0, 1]; the shortcut g is the identity by default.

    Args:
        body: f.
        share: s, 0-d.
        shortcut: g, with the output shape of f.

    Raises:
        ShapeError: ``share`` is not 0-d, or body and shortcut end in different shapes (one would be repeated).

    >>> import torch
    >>> ConvexResidual(nn.Identity(), torch.tensor(0.25))(torch.ones(1, 2)).tolist()
    [[1.0, 1.0]]
    """

    share: Tensor

    def __init__(self, body: nn.Module, share: Tensor, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        if share.ndim:
            raise ShapeError(f"ConvexResidual: expected a 0-d share, got shape {tuple(share.shape)}")
        self.body = body
        self.shortcut = nn.Identity() if shortcut is None else shortcut
        self.register_buffer("share", share.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y, kept = self.body(x), self.shortcut(x)
        if y.shape != kept.shape:
            raise ShapeError(
                f"ConvexResidual: expected a body that ends in the shape of its shortcut {tuple(kept.shape)}, "
                f"got {tuple(y.shape)}"
            )
        return self.share * y + (1 - self.share) * kept
