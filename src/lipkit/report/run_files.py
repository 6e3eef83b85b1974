"""Files of a run folder besides the record: the certificate, and metrics by epoch."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lipkit.certificates import Certificate
from lipkit.certificates.certificate_file import read_certificate
from lipkit.errors import RunError
from lipkit.files import read_bytes, write_atomic
from lipkit.text import printable
from lipkit.training.checkpoints import read_metrics

NETWORK, CERTIFICATE = "network", "certificate.jsonl"


def certificate_in(folder: Path) -> Certificate | None:
    """Read the certificate of a run folder or packaged network (compressed), proving nothing; None if absent."""
    for path in (folder / CERTIFICATE, folder / f"{CERTIFICATE}.gz"):
        if path.exists():
            return read_certificate(path).certificate
    return None


def certified_curve(certificate: Certificate, eps: np.ndarray) -> np.ndarray:
    """Certified accuracy at each of the radii ``eps`` (M,): fraction of samples, correct and with a larger radius."""
    ordered = np.sort(certificate.radius[certificate.correct].numpy())  # a wrong prediction is certified at no radius
    return (len(ordered) - np.searchsorted(ordered, eps, side="right")) / len(certificate)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    write_atomic(path, save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, Tensor] | None:
    """Read the tensors of these names from a safetensors file; None if there is no file, RunError for a corrupt one."""
    if not path.exists():
        return None
    try:
        tensors = load(read_bytes(path))
        return {name: tensors[name] for name in names}
    except (SafetensorError, KeyError, OSError) as error:
        raise RunError(f"{path}: expected the tensors {', '.join(names)}, got {error!r}") from None


def read_series(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Numbers of ``metrics.jsonl`` by name: (epoch, value) pairs; lines without an epoch count from 1."""
    series: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(read_metrics(folder), 1):
        epoch = row.get("epoch", number)
        if not _is_number(epoch):
            continue
        for name, value in row.items():
            if name != "epoch" and _is_number(value):
                series.setdefault(printable(name, 60), []).append((float(epoch), float(value)))
    return series


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
