"""A handful of test images kept with a run: the ones certified with the largest and smallest radius, and the worst
mistakes.

They lie in ``examples.safetensors``: ``image`` (M, *input_shape) float32, ``index``, ``label``, ``prediction``,
``group`` (M,) int64, ``radius``, ``margin`` (M,) float64. Groups: 0 easiest (largest radius), 1 hardest (smallest
margin among the correct), 2 mistakes (most negative margin). safetensors hold numbers only, no code.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lipkit.certificates import Certificate
from lipkit.errors import RunError
from lipkit.files import read_bytes, write_atomic

if TYPE_CHECKING:
    from lipkit.data import Split

EXAMPLES = "examples.safetensors"
GROUPS = ("Largest certified radius", "Correct, with the smallest margin", "Wrong, with the largest margin")
_KEYS = ("image", "index", "label", "prediction", "group", "radius", "margin")


@dataclasses.dataclass(frozen=True)
class Example:
    """One kept sample."""

    image: Tensor
    index: int
    label: int
    prediction: int
    group: int
    radius: float
    margin: float


def choose(certificate: Certificate, count: int = 8) -> list[Tensor]:
    """Sample indices of each group, most extreme first, at most ``count`` of each, none twice."""
    radius, margin, correct = certificate.radius, certificate.margin, certificate.correct
    margin = torch.where(margin.isnan(), -torch.inf, margin)
    right, wrong = correct.nonzero()[:, 0], (~correct).nonzero()[:, 0]
    easiest = right[torch.sort(radius[right], descending=True, stable=True).indices][:count]
    rest = right[~torch.isin(right, easiest)]
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
        "label": certificate.label[index],
        "prediction": certificate.prediction[index],
        "group": torch.cat([torch.full_like(group, number) for number, group in enumerate(groups)]),
        "radius": certificate.radius[index],
        "margin": certificate.margin[index],
    }
    write_atomic(folder / EXAMPLES, save({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}))


def load_examples(folder: Path) -> list[Example]:
    """Read ``examples.safetensors``; an absent file is no example.

    Raises:
        RunError: the file is corrupt or its tensors do not fit together.
    """
    path = folder / EXAMPLES
    if not path.exists():
        return []
    try:
        tensors = load(read_bytes(path))
        columns = [tensors[key] for key in _KEYS]
    except (SafetensorError, KeyError, OSError) as error:
        raise RunError(f"{path}: expected the tensors {', '.join(_KEYS)}, got {error!r}") from None
    if len({len(column) for column in columns}) != 1 or any(column.ndim != 1 for column in columns[1:]):
        raise RunError(f"{path}: expected tensors of one length, got {[tuple(column.shape) for column in columns]}")
    if any(group not in range(len(GROUPS)) for group in tensors["group"].tolist()):
        raise RunError(f"{path}: expected groups 0 to {len(GROUPS) - 1}, got {tensors['group'].tolist()}")
    return [Example(row[0], *(column.item() for column in row[1:])) for row in zip(*columns, strict=True)]
