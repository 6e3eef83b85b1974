"""Certificates as files: JSON lines, a header and one line a sample.

    {"kind": "lipkit certificate", "schema_version": "1.0", "network_sha256": ..., "data": {...}, "constant": ..., ...}
    {"index": 0, "label": 7, "prediction": 7, "radius": 0.3125, "radius_ignored": 0.3125, "margin": 0.61}
    ...

Numbers are written so that they read back exactly; infinity is the string "Infinity", NaN "NaN". Nothing in a file is
believed: `lipkit.certificates.verification.verify` proves every radius again from the network and the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import lipkit
from lipkit import plain
from lipkit.certificates.certificate import Certificate
from lipkit.certificates.exported import Samples, as_tensors
from lipkit.errors import OptionError
from lipkit.files import write_atomic

KIND, SCHEMA_VERSION = "lipkit certificate", "1.0"
# What every file states in these words: a reader that finds others does not know what is certified.
STATEMENTS = {
    "task": "classification",
    "norm": "l2",
    "proof": "spectral norms by Cholesky factorisation in float64 with a-priori rounding bounds",
}
# Of the lines of samples.
COLUMNS = ("index", "label", "prediction", "radius", "radius_ignored", "margin")


def data_sha256(x: Samples, y: Samples) -> str:
    """Hash of samples and labels: shapes, dtypes and every byte, in order.

    >>> data_sha256(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))[:8]
    '6817504a'
    """
    digest = hashlib.sha256()
    for values in as_tensors(x, y):
        flat = values.detach().cpu().contiguous()
        digest.update(f"{flat.dtype} {tuple(flat.shape)}".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class CertificateFile:
    """A certificate and what it is about.

    Attributes:
        certificate: radii, predictions, labels, constants, evaluator.
        data: name of the data set, number of samples, `data_sha256`, and how inputs are to be prepared.
        architecture: types of the network's modules, in order; empty where the file does not say.
        versions: of lipkit and torch.
        other: fields of the header that this version does not know.
    """

    certificate: Certificate
    data: Mapping[str, Any]
    architecture: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def describe(certificate: Certificate, network: plain.Network, x: Samples, y: Samples, name: str) -> CertificateFile:
    """The file of a certificate that ``certify(network, x, y)`` returned, for samples called ``name``.

    Raises:
        OptionError: a certificate of another network, or of another number of samples.
    """
    if plain.sha256(network) != certificate.network_sha256 or len(x) != len(certificate):
        raise OptionError("expected the network and the samples that the certificate was made for, got others")
    data = {
        "name": name,
        "samples": len(x),
        "sha256": data_sha256(x, y),
        "preprocessing": "none: inputs as the data set gives them (images in [0, 1]); normalisation is in the network",
    }
    versions = {"lipkit": lipkit.__version__, "torch": torch.__version__}
    return CertificateFile(certificate, data, tuple(type(module).__name__ for module in network), versions)


def write_certificate(file: CertificateFile, path: str | Path) -> Path:
    """Write header and lines, whole or not at all."""
    found = file.certificate
    header = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        **STATEMENTS,
        "network_sha256": found.network_sha256,
        "architecture": list(file.architecture),
        "input_shape": list(found.input_shape),
        "constant": found.constant,
        "body_constant": found.body_constant,
        "method": found.method,
        "dtype": found.dtype,
        "rounding": found.rounding,
        "evaluator": dataclasses.asdict(found.evaluator),
        "data": dict(file.data),
        "versions": dict(file.versions),
    }
    columns = (found.label, found.prediction, found.radius, found.radius_ignored, found.margin)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = [_dump(header)]
    lines += [_dump(dict(zip(COLUMNS, (index, *row), strict=True))) for index, row in enumerate(rows)]
    write_atomic(Path(path), ("\n".join(lines) + "\n").encode())
    return Path(path)


def _dump(values: Mapping[str, Any]) -> str:
    return json.dumps({key: _worded(value) for key, value in values.items()}, allow_nan=False, separators=(",", ":"))


def _worded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
