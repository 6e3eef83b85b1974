"""The same layers of orthogonium and deel-torchlip, where these are installed. They are no dependencies of lipkit."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from benchmarks.speed.shapes import Shape
from torch import nn
from torch.nn.utils import parametrize

# (library, family of lipkit) -> module and class; all take the arguments of nn.Conv2d.
LAYERS = {
    ("orthogonium", "cayley"): ("orthogonium.legacy.cayley_ortho_conv", "Cayley"),
    ("orthogonium", "soc"): ("orthogonium.layers.conv.adaptiveSOC", "AdaptiveSOCConv2d"),
    ("orthogonium", "bcop"): ("orthogonium.layers.conv.AOC", "AdaptiveOrthoConv2d"),
    ("orthogonium", "aol"): ("orthogonium.layers.conv.AOL.aol", "AOLConv2D"),
    ("torchlip", "rko"): ("deel.torchlip", "SpectralConv2d"),
}
LIBRARIES = {"orthogonium": "orthogonium", "torchlip": "deel-torchlip"}


def installed() -> dict[str, str]:
    """Versions of the libraries that are installed, by name.

    >>> set(installed()) <= {"orthogonium", "torchlip"}
    True
    """
    found = {}
    for name, distribution in LIBRARIES.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def build(library: str, family: str, shape: Shape) -> nn.Module:
    """The layer of that library that comes closest to a family: circular, kernel 3, its own way of striding.

    Raises:
        LookupError: it has none. Otherwise whatever that library raises.
    """
    module, name = LAYERS[library, family]
    make: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    if name == "Cayley":  # halves the kernel of a strided layer by itself; its padding is that of the transform
        strided = {"stride": shape.stride} if shape.stride > 1 else {}
        return make(shape.cin, shape.cout, kernel_size=3, **strided)
    # The kernel of orthogonium's SOC grows with its exponential, and so does the padding that keeps the size.
    padding = "same" if shape.stride == 1 and library == "orthogonium" else 1
    return make(shape.cin, shape.cout, kernel_size=3, stride=shape.stride, padding=padding, padding_mode="circular")


def evaluated(layer: nn.Module) -> nn.Module:
    """What that library's documentation recommends for evaluation: constant weights where it knows how."""
    frozen = copy.deepcopy(layer).eval()
    export: Any = getattr(frozen, "vanilla_export", None)
    if export is not None:
        plain: nn.Module = export()
        return plain.eval()
    if parametrize.is_parametrized(frozen):
        for name in list(frozen.parametrizations):  # type: ignore[arg-type]
            parametrize.remove_parametrizations(frozen, name)
    return frozen
