"""Law 4: everything exists when ``__init__`` returns, and every parameter takes part."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lipkit.testing.case import Case, forward, require


def _inventory(layer: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def complete(case: Case) -> dict[str, float]:
    """Law 4: names and shapes before and after a forward pass; a finite non-zero gradient of each parameter."""
    layer = case.layer()
    lazy = [name for name, t in (*layer.named_parameters(), *layer.named_buffers()) if is_lazy(t)]
    require(not lazy, f"expected every parameter in its final shape after __init__, got uninitialised {lazy}")
    if case.claim != "none":
        require(
            "weight" not in dict(layer.named_parameters(recurse=False)),
            "expected the free parameter of a constrained layer to have another name, got 'weight'",
        )
    before = _inventory(layer)
    forward(layer, case.x())
    after = _inventory(layer)
    require(
        before == after, f"expected the same parameters after a forward pass, {sorted(before)}, got {sorted(after)}"
    )
    layer = case.moved(case.layer())
    if not any(p.requires_grad for p in layer.parameters()):
        return {"parameters": 0.0}
    y = layer(case.x())
    with case.random(5):
        direction = torch.randn_like(y)
    require(y.requires_grad, "expected an output that depends on the parameters, got one without a gradient")
    (y * direction).sum().backward()
    for name, p in layer.named_parameters():
        if not p.requires_grad:
            continue
        grad = p.grad
        require(grad is not None, f"parameter {name}: expected a gradient, got None: the output does not depend on it")
        assert grad is not None
        require(bool(torch.isfinite(grad).all()), f"parameter {name}: expected a finite gradient, got {grad}")
        require(bool((grad != 0).any()), f"parameter {name}: expected a gradient that is not all zero, got zeros")
    return {"parameters": float(sum(p.numel() for p in layer.parameters()))}
