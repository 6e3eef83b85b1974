"""Architectures, one per file, and the table that recipes name them by."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.models.bronet import bronet
from lipkit.models.convert import Conversion, Converted, Kept, convert
from lipkit.models.kwlarge import kwlarge, small
from lipkit.models.lbdn import LBDN, from_network, lbdn
from lipkit.models.lbdn_conv import lbdn_conv
from lipkit.models.lipconvnet import lipconvnet
from lipkit.models.liresnet import liresnet
from lipkit.models.mlp import mlp
from lipkit.models.patchnet import patchnet
from lipkit.models.plain_networks import convnet, wrn_plain
from lipkit.models.resnet9 import resnet9
from lipkit.models.wide_resnet import wide_resnet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "bronet": bronet,
    "convnet": convnet,
    "kwlarge": kwlarge,
    "lbdn": lbdn,
    "lbdn_conv": lbdn_conv,
    "lipconvnet": lipconvnet,
    "liresnet": liresnet,
    "mlp": mlp,
    "patchnet": patchnet,
    "resnet9": resnet9,
    "small": small,
    "wide_resnet": wide_resnet,
    "wrn_plain": wrn_plain,
}
"""The architectures by the names that recipes give them."""


def build(name: str, **options: Any) -> nn.Module:
    """The architecture ``name`` with these options.

    Raises:
        OptionError: unknown name, or an option that the architecture does not have.

    >>> type(build("small", input_shape=(1, 8, 8), classes=10)).__name__
    'Sequential'
    """
    if name not in MODELS:
        raise OptionError(f"model: expected one of {', '.join(MODELS)}, got {name!r}")
    try:
        inspect.signature(MODELS[name]).bind(**options)
        return MODELS[name](**options)
    except TypeError as error:
        raise OptionError(f"model {name}: {error}") from None


__all__ = [
    "LBDN",
    "MODELS",
    "Conversion",
    "Converted",
    "Kept",
    "bronet",
    "build",
    "convert",
    "convnet",
    "from_network",
    "kwlarge",
    "lbdn",
    "lbdn_conv",
    "lipconvnet",
    "liresnet",
    "mlp",
    "patchnet",
    "resnet9",
    "small",
    "wide_resnet",
    "wrn_plain",
]


def __dir__() -> list[str]:
    return sorted(__all__)
