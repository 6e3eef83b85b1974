"""A few test images kept with a run: those with the largest radius, the smallest correct margin, the worst mistakes.

They lie in ``examples.safetensors``: ``image`` (M, *input_shape) float32, ``index``, ``label``, ``prediction``,
``group`` (M,) int64, ``radius``, ``margin`` (M,) float64. Groups: 0 easiest (largest radius), 1 hardest (smallest
margin among the correct), 2 mistakes (most negative margin). safetensors hold numbers only, no code.
"""

import base64
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from lipkit.certificates import Certificate
from lipkit.data import Split
from lipkit.errors import RunError, ShapeError
from lipkit.report.run_files import read_tensors, write_tensors

EXAMPLES = "examples.safetensors"
GROUPS = ("Largest certified radius", "Correct, with the smallest margin", "Wrong, with the largest margin")


def is_image(shape: tuple[int, ...]) -> bool:
    """True if inputs of this shape can be shown as images: (H, W), (1, H, W) or (3, H, W)."""
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def png(image: Tensor) -> bytes:
    """An 8-bit greyscale or RGB PNG of (H, W), (1, H, W) or (3, H, W), clipped to [0, 1]; NaN becomes 0."""
    if not is_image(tuple(image.shape)):
        raise ShapeError(f"expected an image of shape (H, W), (1, H, W) or (3, H, W), got {tuple(image.shape)}")
    pixels = image.detach().cpu().float().nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8)
    array = pixels if pixels.ndim == 2 else pixels.movedim(0, -1).squeeze(-1)  # (H, W, 3), (H, W)
    buffer = io.BytesIO()
    Image.fromarray(array.numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def class_name(classes: Sequence[str], label: int) -> str:
    """The name of a class, or its number if it has none."""
    return classes[label] if 0 <= label < len(classes) else str(label)


def data_uri(image: Tensor) -> str:
    """The PNG as a ``data:`` address, for a page that loads nothing."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


@dataclasses.dataclass(frozen=True)
class Example:
    """One kept sample; its fields are the tensors of the file, in this order."""

    image: Tensor
    index: int  # in the test set
    label: int
    prediction: int
    group: int  # of GROUPS
    radius: float
    margin: float


def choose(certificate: Certificate, count: int = 8) -> list[Tensor]:
    """Sample indices of each group, most extreme first, at most ``count`` of each, none twice."""
    radius, margin, correct = certificate.radius, certificate.margin, certificate.correct
    margin = torch.where(margin.isnan(), -torch.inf, margin)  # NaN would sort last, like the surest prediction
    right, wrong = correct.nonzero()[:, 0], (~correct).nonzero()[:, 0]
    easiest = right[torch.sort(radius[right], descending=True, stable=True).indices][:count]
    rest = right[~torch.isin(right, easiest)]  # no sample in two groups
    hardest = rest[torch.sort(margin[rest], stable=True).indices][:count]
    mistakes = wrong[torch.sort(margin[wrong], stable=True).indices][:count]
    return [easiest, hardest, mistakes]


def save_examples(folder: Path, certificate: Certificate, split: Split, count: int = 8) -> None:
    """Write ``examples.safetensors`` for the samples of ``split`` that were certified."""
    groups = choose(certificate, count)
    index = torch.cat(groups)
    tensors = {
        "image": split.batch(index)[0].float(),
        "index": index,
        "group": torch.cat([torch.full_like(group, number) for number, group in enumerate(groups)]),
        **{name: getattr(certificate, name)[index] for name in ("label", "prediction", "radius", "margin")},
    }
    write_tensors(folder / EXAMPLES, tensors)


def load_examples(folder: Path) -> list[Example]:
    """Read ``examples.safetensors``; no examples if it is absent, RunError if its tensors do not fit together."""
    path = folder / EXAMPLES
    tensors = read_tensors(path, [field.name for field in dataclasses.fields(Example)])
    if tensors is None:
        return []
    columns = list(tensors.values())
    if len({len(column) for column in columns}) != 1 or any(column.ndim != 1 for column in columns[1:]):
        raise RunError(f"{path}: expected tensors of one length, got {[tuple(column.shape) for column in columns]}")
    if wrong := [name for name in ("index", "label", "prediction", "group") if tensors[name].dtype != torch.int64]:
        raise RunError(f"{path}: expected whole numbers (int64), got {tensors[wrong[0]].dtype} for {wrong[0]}")
    if any(group not in range(len(GROUPS)) for group in tensors["group"].tolist()):
        raise RunError(f"{path}: expected groups 0 to {len(GROUPS) - 1}, got {tensors['group'].tolist()}")
    return [Example(row[0], *(column.item() for column in row[1:])) for row in zip(*columns, strict=True)]
