"""Certificates as files: JSON lines, a header and one line a sample, and their independent verification.

    {"kind": "lipkit certificate", "schema_version": "1.0", "network_sha256": ..., "data": {...}, "constant": ..., ...}
    {"index": 0, "label": 7, "prediction": 7, "radius": 0.3125, "radius_ignored": 0.3125, "margin": 0.61}
    ...

Numbers are written so that they read back exactly; infinity is the string "Infinity", NaN "NaN". Nothing in a file is
believed: `verify` proves every radius again from the network and the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipkit
from lipkit import plain
from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.rounding.evaluators import Evaluator
from lipkit.errors import CertificateViolation, DataError, OptionError
from lipkit.files import write_atomic

KIND, SCHEMA_VERSION = "lipkit certificate", "1.0"
# A line is a few hundred bytes, the header some kilobytes: longer ones are not ours, and are never read whole.
_LONGEST_LINE, _LONGEST_HEADER = 1 << 12, 1 << 20
_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_ROW = ("index", "label", "prediction", "radius", "radius_ignored", "margin")
# How much a recomputed radius may differ by the rounding of another machine's libraries.
TOLERANCE = 1e-9


def data_sha256(x: Tensor, y: Tensor) -> str:
    """Hash of samples and labels: shapes, dtypes and every byte, in order.

    >>> data_sha256(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))[:8]
    '6817504a'
    """
    digest = hashlib.sha256()
    for values in (x, y):
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
        architecture: types of the network's modules, in order; for the reader's eye, the hash decides.
        versions: of lipkit and torch.
    """

    certificate: Certificate
    data: Mapping[str, Any]
    architecture: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def describe(certificate: Certificate, network: plain.Network, x: Tensor, y: Tensor, name: str) -> CertificateFile:
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
        "task": "classification",
        "norm": "l2",
        "network_sha256": found.network_sha256,
        "architecture": list(file.architecture),
        "input_shape": list(found.input_shape),
        "constant": found.constant,
        "body_constant": found.body_constant,
        "method": found.method,
        "proof": "spectral norms by Cholesky factorisation in float64 with a-priori rounding bounds",
        "dtype": found.dtype,
        "rounding": found.rounding,
        "evaluator": dataclasses.asdict(found.evaluator),
        "data": dict(file.data),
        "versions": dict(file.versions),
    }
    columns = (found.label, found.prediction, found.radius, found.radius_ignored, found.margin)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = [_dump(header)]
    lines += [_dump(dict(zip(_ROW, (index, *row), strict=True))) for index, row in enumerate(rows)]
    write_atomic(Path(path), ("\n".join(lines) + "\n").encode())
    return Path(path)


def read_certificate(path: str | Path) -> CertificateFile:
    """Read a file of `write_certificate`; what it claims is not checked against anything but its own form.

    Raises:
        DataError: the file is missing, truncated or altered in form, or of another schema version.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream:
            header = _parse(path, 1, stream.readline(_LONGEST_HEADER + 1), _LONGEST_HEADER)
            _check_header(path, header)
            rows = _rows(path, stream, header["data"]["samples"])
            columns = list(zip(*rows, strict=True))
    except OSError as error:
        raise DataError(f"{path}: expected a certificate, got: {error}") from None
    tensors = [torch.tensor(column, dtype=torch.float64) for column in columns]
    certificate = Certificate(
        label=tensors[1].long(),
        prediction=tensors[2].long(),
        radius=tensors[3],
        radius_ignored=tensors[4],
        margin=tensors[5],
        evaluator=_evaluator(path, header.get("evaluator")),
        input_shape=tuple(header["input_shape"]),
        **{key: header[key] for key in ("constant", "body_constant", "method", "dtype", "network_sha256", "rounding")},
    )
    return CertificateFile(certificate, header["data"], tuple(header["architecture"]), header["versions"])


def verify(
    file: CertificateFile, network: plain.Network, x: Tensor, y: Tensor, *, batch_size: int = 256
) -> Certificate:
    r"""Prove every radius of a certificate again, from the network and the samples alone.

    Args:
        file: from `read_certificate`.
        network: the exported network, from `lipkit.plain.load`.
        x, y: the samples, in order.

    Returns:
        A new certificate whose radii are the smaller ones of the file's and the recomputed: what both say.

    Raises:
        DataError: another network or other samples than the file's hashes name.
        OptionError: settings of torch other than those of the certificate's evaluator.
        CertificateViolation: a radius, a prediction or the constant is not confirmed: larger radii or smaller
            constants than can be proved here, by more than a relative 1e-9.
    """
    claimed = file.certificate
    if plain.sha256(network) != claimed.network_sha256:
        raise DataError(
            f"expected the network with sha256 {claimed.network_sha256}, got one with {plain.sha256(network)}"
        )
    if len(x) != len(claimed) or data_sha256(x, y) != file.data["sha256"]:
        raise DataError(
            f"expected the {len(claimed)} samples of {file.data['name']!r} with sha256 {file.data['sha256']}, "
            f"got {len(x)} samples with {data_sha256(x, y)}"
        )
    name = "float64" if claimed.evaluator.name == "real" else claimed.evaluator.name
    proved = certify(network, x, y, rounding=claimed.rounding, evaluator=name, batch_size=batch_size)
    ours, theirs = proved.evaluator, claimed.evaluator
    if (ours.name, ours.dtype, ours.block) != (theirs.name, theirs.dtype, theirs.block):
        raise OptionError(f"expected the evaluator {theirs}, got {ours}")
    if claimed.constant < proved.constant * (1 - TOLERANCE):
        raise CertificateViolation(
            f"expected a Lipschitz constant of at least {proved.constant:.12g}, got {claimed.constant:.12g}"
        )
    wrong = (claimed.label != proved.label) | ((claimed.prediction != proved.prediction) & (claimed.radius > 0))
    for theirs_at, ours_at in ((claimed.radius, proved.radius), (claimed.radius_ignored, proved.radius_ignored)):
        # not <=: a NaN in the file is not confirmed
        wrong |= ~(theirs_at <= ours_at * (1 + TOLERANCE))
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise CertificateViolation(
            f"sample {i}: expected a radius of at most {float(proved.radius[i]):.9g} for the label "
            f"{int(proved.label[i])}, got {float(claimed.radius[i]):.9g} for {int(claimed.label[i])} "
            f"({int(wrong.sum())} of {len(claimed)} samples are not confirmed)"
        )
    return dataclasses.replace(
        proved,
        radius=torch.minimum(proved.radius, claimed.radius),
        radius_ignored=torch.minimum(proved.radius_ignored, claimed.radius_ignored),
    )


def _dump(values: Mapping[str, Any]) -> str:
    return json.dumps({key: _worded(value) for key, value in values.items()}, allow_nan=False, separators=(",", ":"))


def _worded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _parse(path: Path, number: int, line: bytes, longest: int) -> dict[str, Any]:
    if len(line) > longest or not line.endswith(b"\n"):
        raise DataError(f"{path}, line {number}: expected a whole line of at most {longest} bytes, got {len(line)}")
    try:
        values = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number}: expected JSON, got: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}, line {number}: expected an object, got {type(values).__name__}")
    return values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"a bare {text}")


def _check_header(path: Path, header: dict[str, Any]) -> None:
    if (
        header.get("kind") != KIND
        or str(header.get("schema_version", "")).split(".")[0] != SCHEMA_VERSION.split(".")[0]
    ):
        raise DataError(
            f"{path}: expected a {KIND} of schema version {SCHEMA_VERSION}, got {str(header.get('kind'))[:40]!r} of "
            f"{str(header.get('schema_version'))[:40]!r}"
        )
    for key in ("constant", "body_constant"):
        value = header.get(key)
        if isinstance(value, str):
            value = _WORDS.get(value)
        if not (value is None and key == "body_constant"):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise DataError(f"{path}: expected {key} as a number >= 0, got {str(header.get(key))[:40]!r}")
            value = _float(path, value)
        header[key] = value
    data, shape = header.get("data"), header.get("input_shape")
    good = isinstance(data, dict) and isinstance(data.get("sha256"), str) and isinstance(data.get("name"), str)
    if not good or not isinstance(data, dict) or type(data.get("samples")) is not int or data["samples"] < 1:
        raise DataError(f"{path}: expected data with a name, a sha256 and samples >= 1, got {str(data)[:80]!r}")
    if not isinstance(shape, list) or not shape or not all(type(n) is int and n > 0 for n in shape):
        raise DataError(f"{path}: expected input_shape as positive integers, got {str(shape)[:80]!r}")
    for key in ("method", "dtype", "network_sha256", "rounding"):
        if not isinstance(header.get(key), str):
            raise DataError(f"{path}: expected {key} as a string, got {str(header.get(key))[:40]!r}")
    if header["rounding"] not in ("sound", "ignore"):
        raise DataError(f"{path}: expected rounding 'sound' or 'ignore', got {header['rounding'][:40]!r}")
    for key, kind, empty in (("architecture", list, []), ("versions", dict, {})):
        if not isinstance(header.setdefault(key, empty), kind):
            raise DataError(f"{path}: expected {key} as a {kind.__name__}, got {str(header[key])[:40]!r}")


def _evaluator(path: Path, values: Any) -> Evaluator:
    kinds = {"name": str, "dtype": str, "block": (int, type(None)), "device": str, "torch": str, "settings": dict}
    if not isinstance(values, dict) or set(values) != set(kinds):
        raise DataError(f"{path}: expected an evaluator with {', '.join(kinds)}, got {str(values)[:80]!r}")
    for key, kind in kinds.items():
        if not isinstance(values[key], kind):  # type: ignore[arg-type]
            raise DataError(f"{path}: expected another {key} of the evaluator, got {str(values[key])[:40]!r}")
    return Evaluator(**values)


def _float(path: Path, value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise DataError(f"{path}: expected a number that float64 holds, got {str(value)[:20]}...") from None


def _rows(path: Path, stream: Any, samples: int) -> Iterator[list[float]]:
    """The numbers of each line, in the order of the columns."""
    count = 0
    while line := stream.readline(_LONGEST_LINE + 1):
        if count == samples:
            raise DataError(f"{path}: expected {samples} lines of samples, got more")
        values = _parse(path, count + 2, line, _LONGEST_LINE)
        row = []
        for key in _ROW:
            value = values.get(key)
            value = _WORDS.get(value) if isinstance(value, str) else value
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise DataError(
                    f"{path}, line {count + 2}: expected {key} as a number, got {str(values.get(key))[:40]!r}"
                )
            row.append(_float(path, value))
        index, label, prediction, radius, ignored = row[:5]
        whole = all(number == int(number) if math.isfinite(number) else False for number in (label, prediction))
        if index != count or not whole or not 0 <= label < 2**31 or not -1 <= prediction < 2**31:
            raise DataError(f"{path}, line {count + 2}: expected index {count} and whole labels, got {line[:80]!r}")
        if not radius >= 0 or not ignored >= 0:
            raise DataError(f"{path}, line {count + 2}: expected radii >= 0, got {radius} and {ignored}")
        count += 1
        yield row
    if count != samples:
        raise DataError(f"{path}: expected {samples} lines of samples, got {count}: the file is cut")
