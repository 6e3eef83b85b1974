"""What is checked before anything is timed: a fast layer that is wrong is worth nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from benchmarks.speed import textbook
from benchmarks.speed.shapes import Shape
from torch import Tensor, nn

from lipkit.errors import RunError
from lipkit.layers.families import Family
from lipkit.lowering import export
from lipkit.testing import dense_matrix

TOLERANCE = 1e-5
MIXED = 2**-6
"""Relative, for layers in bfloat16: features that pass several products lose more than one rounding, 2^-9."""
CHANNELS, SIDE = 4, 9


def off_isometry(f: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> float:
    """The largest distance of a singular value of an affine map from 1.

    >>> off_isometry(lambda x: 2 * x + 1, (1, 1, 2))
    1.0
    """
    matrix = dense_matrix(f, shape, torch.float32)
    return float(np.abs(np.linalg.svd(matrix, compute_uv=False) - 1).max())


def expansion(f: Callable[[Tensor], Tensor], shape: tuple[int, int, int]) -> float:
    """By how much outputs of 64 random pairs are farther apart than their inputs, at most; relative.

    >>> round(expansion(lambda x: 2 * x + 1, (1, 1, 2)), 6)
    1.0
    """
    with torch.no_grad():
        a, b = torch.randn(2, 64, *shape, generator=torch.Generator().manual_seed(0))
        apart = (f(a) - f(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
    return float((apart - 1).clamp_min(0).max())


def check_small(family: Family) -> float:
    """Check a new float32 layer of 4 channels on 9 x 9: its export against itself, and both against the promise.

    Orthogonal families: every singular value within 1e-5 of 1. Others: no two outputs are farther apart than their
    inputs, up to 1e-5.

    Returns:
        The largest deviation found, relative.

    Raises:
        RunError: it is above the tolerance.
    """
    torch.manual_seed(0)
    shape = (CHANNELS, SIDE, SIDE)
    layer = family.conv(CHANNELS, CHANNELS, 3).eval()
    plain = export(layer, shape)
    found = []
    if family.claim == "orthogonal":
        for name, f in (("layer", layer), ("export", plain)):
            found.append((f"singular values of the {name}", off_isometry(f, shape)))
    else:
        found.append(("distances of outputs over those of inputs", expansion(plain, shape)))
    with torch.no_grad():
        x = torch.randn(4, *shape)
        found.append(("outputs of the export", float((plain(x) - layer(x)).norm() / layer(x).norm())))
    return _worst(family.name, found)


def check_textbook(name: str) -> float:
    """The same for the textbook layer of an orthogonal family; the sandwich layer's distances do not grow.

    Raises:
        RunError: it is not what its paper says.
    """
    torch.manual_seed(0)
    shape = (CHANNELS, SIDE, SIDE)
    built = textbook.build(name, CHANNELS, CHANNELS, 3, 1)
    assert built is not None
    layer = textbook.evaluated(built, SIDE)
    error = expansion(layer, shape) if name == "sandwich" else off_isometry(layer, shape)
    return _worst(f"textbook {name}", [("singular values", error)])


def check_timed(family: Family, shape: Shape, layer: nn.Module, plain: nn.Module, x: Tensor) -> float:
    """At the shape that is timed: the export computes the layer's function, and an isometry keeps norms.

    Args:
        family, shape: what is timed.
        layer, plain: the layer and its export; the layer is put into evaluation mode and back.
        x: the inputs that are timed; the first two are used.

    Raises:
        RunError: a deviation above the tolerance.
    """
    training = layer.training
    layer.eval()
    with torch.no_grad():
        x = x[:2].detach()
        y, exported, origin = layer(x), plain(x), plain(torch.zeros_like(x))
    layer.train(training)
    found = [("outputs of the export", float((exported - y).norm() / y.norm()))]
    if family.claim == "orthogonal" and shape.cout >= shape.inner:
        found.append(("norms of outputs", abs(float((exported - origin).norm() / x.norm()) - 1)))
    return _worst(f"{family.name} {shape}", found)


def check_mixed(family: Family, shape: Shape, layer: nn.Module, plain: nn.Module, x: Tensor) -> float:
    """Under autocast to bfloat16 the layer and its export compute what they compute in float32, up to `MIXED`.

    Raises:
        RunError: they do not.
    """
    x, found = x[:2].detach(), []
    for name, module in (("the layer", layer), ("the export", plain)):
        with torch.no_grad():
            y = module(x)
            with torch.autocast(x.device.type, torch.bfloat16):
                mixed = module(x)
        found.append((f"outputs of {name} under autocast", float((mixed.float() - y).norm() / y.norm())))
    return _worst(f"{family.name} {shape}", found, MIXED, "of float32")


def _worst(what: str, found: list[tuple[str, float]], tolerance: float = TOLERANCE, where: str = "in float32") -> float:
    for name, error in found:
        if not error <= tolerance:
            raise RunError(f"{what}: expected {name} within {tolerance} {where}, got an error of {error:.2e}")
    return max(error for _, error in found)
