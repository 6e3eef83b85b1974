"""A trained model as a folder for a model hub: built again from the table of models, offline, without code in a file.

config.json          name and options of the architecture, input shape, classes, hashes
model.safetensors    the free parameters: what training continues from
network/             the exported network (lipkit.modules): what is certified and deployed
README.md            the model card
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import nn
from torch.overrides import TorchFunctionMode

from lipkit import models, modules
from lipkit.errors import DataError, LipkitError, OptionError, first_line
from lipkit.files import parse_json, read_bytes, read_text, write_atomic
from lipkit.lowering import export
from lipkit.modules import Shape
from lipkit.modules.storage import check_tensors

SCHEMA_VERSION = 1
KNOWN = [name for name in models.MODELS if name != "rebuild"]  # that one starts from the files of another network
CONFIG, WEIGHTS, NETWORK, CARD = "config.json", "model.safetensors", "network", "README.md"


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str,
    options: Mapping[str, Any],
    input_shape: Shape,
    input_range: tuple[float, float] | None = None,
    classes: Sequence[str] = (),
    card: str = "",
) -> Path:
    """Write a model of `lipkit.models` as a folder for `from_pretrained`, together with its export.

    Args:
        model: what ``lipkit.models.build(name, **options)`` made, trained; options are numbers, strings and lists.
        folder: made if needed.
        input_shape, input_range: of one input; (low, high) of its entries, which the exported network then asks for.
        classes: names of the classes.
        card: text of README.md, from `model_card`.

    Raises:
        OptionError: an architecture that is not in the table, options that JSON does not hold, or a model that
            ``name`` and ``options`` do not make.
    """
    if name not in KNOWN:
        raise OptionError(
            f"expected a model of the table ({', '.join(KNOWN)}), got {name!r}: a folder holds no code and no second "
            "network, so another one could not be built again"
        )
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()}
    blob = save_safetensors(tensors)
    network = export(model, tuple(input_shape))
    network.input_range = input_range
    config = {
        "schema_version": SCHEMA_VERSION,
        "library": "lipkit",
        "model": {"name": name, "options": dict(options)},
        "input_shape": list(input_shape),
        "classes": list(classes),
        "sha256": hashlib.sha256(blob).hexdigest(),
        "network_sha256": modules.sha256(network),
    }
    try:
        text = json.dumps(config, indent=1, allow_nan=False) + "\n"
        check_tensors(_skeleton(json.loads(text), len(tensors)), tensors)
    except (DataError, TypeError, ValueError) as error:
        raise OptionError(f"expected a model that its name and options make again, got: {error}") from None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    modules.save(network, folder / NETWORK)
    write_atomic(folder / WEIGHTS, blob)
    if card:
        write_atomic(folder / CARD, card.encode())
    write_atomic(folder / CONFIG, text.encode())
    return folder


def from_pretrained(folder: str | Path) -> nn.Module:
    """The model of a folder written by `save_pretrained`, in evaluation mode; nothing is downloaded.

    The architecture is looked up by name in ``lipkit.models.MODELS``, without ``rebuild``; no file can name anything
    else. Hash and shapes are checked before memory is allocated. For inference and certificates load the exported
    network instead: ``lipkit.load(folder / "network")``.

    Raises:
        DataError: a file is missing, broken or altered, or the weights do not fit the architecture.
    """
    folder = Path(folder)
    try:
        config = parse_json(read_text(folder / CONFIG, 1 << 20))
        blob = read_bytes(folder / WEIGHTS)
    except OSError as error:
        raise DataError(f"{folder}: expected {CONFIG} and {WEIGHTS}, got: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{folder / CONFIG}: expected JSON, got: {error}") from None
    if not isinstance(config, dict) or config.get("schema_version") != SCHEMA_VERSION:
        got = config.get("schema_version") if isinstance(config, dict) else type(config).__name__
        raise DataError(f"{folder / CONFIG}: expected schema_version {SCHEMA_VERSION}, got {got!r}")
    if hashlib.sha256(blob).hexdigest() != config.get("sha256"):
        raise DataError(f"{folder / WEIGHTS}: expected the weights with sha256 {config.get('sha256')}, got others")
    try:
        tensors = load_safetensors(blob)
        model = _skeleton(config, len(tensors))
        check_tensors(model, tensors)
    except SafetensorError as error:
        raise DataError(f"{folder / WEIGHTS}: expected a safetensors file, got: {error}") from None
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    model = model.to_empty(device="cpu")
    model.load_state_dict(tensors, assign=True)
    return model.eval()


class _Steps(TorchFunctionMode):
    """Ends a construction that calls torch more than ``most`` times: options may ask for any number of layers.

    A tensor of a model takes four calls.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.left = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.left -= 1
        if self.left < 0:
            raise DataError("a model with many more tensors than its file has")
        return func(*args, **(kwargs or {}))


def _skeleton(config: Mapping[str, Any], tensors: int) -> nn.Module:
    """The architecture of a configuration on torch's meta device, shapes without memory, for so many ``tensors``."""
    section, shape, classes = config.get("model"), config.get("input_shape"), config.get("classes")
    if not isinstance(section, dict) or not isinstance(section.get("options"), dict):
        raise DataError(f"expected a model with a name and options, got {str(section)[:80]!r}")
    if not isinstance(section.get("name"), str) or section["name"] not in KNOWN:
        raise DataError(f"expected a model of the table ({', '.join(KNOWN)}), got {section.get('name')!r}")
    if not isinstance(shape, list) or not isinstance(classes, list):
        raise DataError(f"expected input_shape and classes as lists, got {shape!r} and {classes!r}")
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in section["options"].items()}
    try:
        with torch.device("meta"), _Steps(1000 + 100 * tensors):
            return models.build(section["name"], **options)
    except (LipkitError, RuntimeError, TypeError, ValueError, ArithmeticError, NotImplementedError) as error:
        reason = first_line(error)
        raise DataError(f"model {section['name']}: expected options that build it, got: {reason:.500}") from None
