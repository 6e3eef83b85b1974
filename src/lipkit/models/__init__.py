"""Architectures, and the table that recipes name them by."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lipkit.errors import OptionError, check_choice, check_flag, suggestion
from lipkit.layers import Scale
from lipkit.models.constrained import Converted, Kept
from lipkit.models.convert import Conversion, convert, rebuild
from lipkit.models.convolutional import convnet, kwlarge, lbdn_conv, lipconvnet, sllnet, small
from lipkit.models.frame import find, make_activation, split_gain
from lipkit.models.lbdn import LBDN, from_network, lbdn
from lipkit.models.mlp import mlp
from lipkit.models.patches import bronet, liresnet, patchnet, vision_transformer
from lipkit.models.resnets import resnet9, resnet_plain, wide_resnet, wrn_plain
from lipkit.models.sequences import recurrent, sequence_classifier, sequence_regressor
from lipkit.models.unet import autoencoder, denoiser, unet

MODELS: dict[str, Callable[..., nn.Module]] = {
    made.__name__: made
    for made in (
        *(bronet, convnet, kwlarge, lbdn, lbdn_conv, lipconvnet, liresnet, mlp, patchnet, rebuild, resnet9),
        *(resnet_plain, sequence_classifier, sllnet, small, vision_transformer, wide_resnet, wrn_plain),
    )
}
"""The architectures by the names that recipes give them."""


def check_names(name: str, options: Mapping[str, Any]) -> None:
    """Raise an OptionError for an unknown architecture, option, layer or activation."""
    check_choice("model", name, MODELS)
    try:
        inspect.signature(MODELS[name]).bind_partial(**{key: options[key] for key in options if key != "split"})
    except TypeError as error:
        raise _sentence(name, error) from None
    known = recurrent if name == "sequence_classifier" else find
    for key in ("layer", "first_blocks", "last_blocks"):
        if options.get(key) is not None:
            known(options[key])
    activations = options.get("activation")
    for activation in activations if isinstance(activations, list | tuple) else [activations]:
        make_activation(activation)


def _sentence(name: str, error: TypeError) -> OptionError:
    """The ``OptionError`` for a call that the signature of an architecture refuses; it lists the known options."""
    if not (unknown := re.search("unexpected keyword argument '(.*)'", str(error))):
        return OptionError(f"model {name}: {error}")
    known = [
        p.name if p.kind is not p.VAR_KEYWORD else "those of its layers"
        for p in inspect.signature(MODELS[name]).parameters.values()
    ]
    hint = suggestion(unknown[1], known) or f"; known: {', '.join(known)}"
    return OptionError(f"model {name}: unknown option {unknown[1]!r}{hint}")


def build(name: str, **options: Any) -> nn.Module:
    """The architecture of this name in `MODELS`, with its options; ``OptionError`` for an unknown name or option.

    With ``lipschitz`` every architecture takes ``split=True``: equal factors of the gain in front of all layers instead
    of the whole gain in front of the first, see `lipkit.models.frame.split_gain`.

    >>> type(build("small", input_shape=(1, 8, 8), classes=10)).__name__
    'Sequential'
    """
    check_names(name, options)
    split = options.pop("split", False)  # handled here, not by the architecture
    check_flag("split", split)
    if split and "lipschitz" not in options:
        raise OptionError(f"model {name}: expected the option lipschitz beside split, got none to split")
    try:
        model = MODELS[name](**options)
    except TypeError as error:
        raise _sentence(name, error) from None
    if split and options["lipschitz"] != 1 and not any(isinstance(part, Scale) for part in model.children()):
        raise OptionError(f"model {name}: expected no split, since its gain is inside its layer, got split={split}")
    return split_gain(model, options["lipschitz"]) if split else model


__all__ = ["MODELS", "build"]  # the table
__all__ += ["bronet", "convnet", "kwlarge", "lbdn_conv", "lipconvnet", "liresnet", "patchnet", "resnet9"]  # of images
__all__ += ["resnet_plain", "sllnet", "small", "vision_transformer", "wide_resnet", "wrn_plain"]
__all__ += ["LBDN", "from_network", "lbdn", "mlp", "sequence_classifier", "sequence_regressor"]  # vectors, sequences
__all__ += ["autoencoder", "denoiser", "unet"]  # from images to images
__all__ += ["Conversion", "Converted", "Kept", "convert"]  # existing networks

__dir__ = __all__.copy
