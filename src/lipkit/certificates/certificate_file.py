"""Certificates as files: JSON lines, a header and one line per sample.

    {"kind": "lipkit certificate", "schema_version": "1.0", "network_sha256": ..., "data": {...}, "constant": ..., ...}
    {"index": 0, "label": 7, "prediction": 7, "radius": 0.3125, "radius_ignored": 0.3125, "margin": 0.61}
    ...

Numbers are written so that they read back exactly; infinity is the string "Infinity", NaN "NaN". Nothing in a file is
believed: `lipkit.certificates.certificate_file.verify` proves every radius again from the network and the data.
"""

import dataclasses
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipkit
from lipkit import modules
from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.evaluators import Evaluator
from lipkit.certificates.measurement import Samples, as_tensor
from lipkit.errors import CertificateViolation, DataError, OptionError
from lipkit.files import open_regular, parse_json, write_atomic
from lipkit.text import printable

KIND, SCHEMA_VERSION = "lipkit certificate", "1.0"
# What every file states, word for word: from other words a reader could not tell what is certified.
STATEMENTS = {"task": "classification", "norm": "l2"}
PROOF = "spectral norms by Cholesky factorisation in float64 with a-priori rounding bounds"
LOCAL_PROOF = f"linear bounds around each sample in float64 with a-priori rounding bounds, or {PROOF}"
# Keys of each sample's line.
COLUMNS = ("index", "label", "prediction", "radius", "radius_ignored", "margin")


def data_sha256(x: Samples, y: Samples) -> str:
    """Hash of samples and labels: shapes, dtypes and every byte, in order."""
    digest = hashlib.sha256()
    for values in map(as_tensor, (x, y)):
        flat = values.detach().cpu().contiguous()
        digest.update(f"{flat.dtype} {tuple(flat.shape)}".encode())  # equal bytes of other shapes are other data
        digest.update(flat.reshape(-1)[:, None].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class CertificateFile:
    """A certificate with its data, architecture and versions.

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


def describe(certificate: Certificate, network: modules.Network, x: Samples, y: Samples, name: str) -> CertificateFile:
    """The file of a certificate that ``certify(network, x, y)`` returned, for samples called ``name``.

    A certificate of another network, or of another number of samples, is refused.
    """
    if modules.sha256(network) != certificate.network_sha256 or len(x) != len(certificate):
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
    """Write header and lines, whole or not at all; compressed by gzip if the name ends in ``.gz``."""
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
        "proof": LOCAL_PROOF if found.method == "local" else PROOF,
        **({"input_range": found.input_range} if found.method == "local" or found.evaluator.name == "integer" else {}),
        "dtype": found.dtype,
        "rounding": found.rounding,
        "evaluator": dataclasses.asdict(found.evaluator),
        "data": dict(file.data),
        "versions": dict(file.versions),
    }
    rows = zip(range(len(found)), *(getattr(found, name).tolist() for name in COLUMNS[1:]), strict=True)
    lines = [_dump(header), *(_dump(dict(zip(COLUMNS, row, strict=True))) for row in rows)]
    path, data = Path(path), ("\n".join(lines) + "\n").encode()
    write_atomic(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def _dump(values: Mapping[str, Any]) -> str:
    return json.dumps({key: _worded(value) for key, value in values.items()}, allow_nan=False, separators=(",", ":"))


def _worded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_worded(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# Limits of what is read, in bytes: lipkit writes lines of a few hundred, and headers of some thousand.
_LONGEST_LINE, _LONGEST_HEADER = 1 << 12, 1 << 20
_WORDS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_PROVED = ("constant", "body_constant", "method", "dtype", "input_shape", "network_sha256", "rounding", "input_range")
_KNOWN = {"kind", *STATEMENTS, "proof", *_PROVED, "architecture", "evaluator", "data", "versions"}


def read_certificate(path: str | Path) -> CertificateFile:
    """Read a file of `write_certificate`; only its form is checked, not its claims.

    A name that ends in ``.gz`` is a file that gzip has compressed.
    """
    path = Path(path)
    try:
        # Lines are read one by one, so that a small file cannot unpack to a large one.
        with open_regular(path) as file, gzip.open(file) if path.suffix == ".gz" else file as stream:
            header = _parse(f"{path}, line 1", stream.readline(_LONGEST_HEADER + 1), _LONGEST_HEADER)
            _check_header(path, header)
            columns = list(zip(*_rows(path, stream, header["data"]["samples"]), strict=True))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a certificate, got: {getattr(error, 'strerror', None) or error}") from None
    read: dict[str, Any] = dict(zip(COLUMNS, (torch.tensor(c, dtype=torch.float64) for c in columns), strict=True))
    whole = {name: read[name].long() for name in ("label", "prediction")}
    certificate = Certificate(
        **{name: read[name] for name in COLUMNS[1:]} | whole,
        evaluator=_evaluator(path, header.get("evaluator")),
        **{key: header[key] for key in _PROVED},
    )
    known = _KNOWN | ({"schema_version"} if header["schema_version"] == SCHEMA_VERSION else set())
    other = {key: value for key, value in header.items() if key not in known}
    return CertificateFile(certificate, header["data"], tuple(header["architecture"]), header["versions"], other)


def _parse(where: str, line: bytes, longest: int) -> dict[str, Any]:
    if len(line) > longest or not line.endswith(b"\n"):
        raise DataError(f"{where}: expected a whole line of at most {longest} bytes, got {len(line)}")
    try:
        values = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected JSON, got: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected an object, got {type(values).__name__}")
    return values


def _check_header(path: Path, header: dict[str, Any]) -> None:
    version, major = header.get("schema_version"), SCHEMA_VERSION.split(".")[0]
    stated = header.get("kind") == KIND and isinstance(version, str)
    # Minor versions only add fields.
    if not stated or not re.fullmatch(rf"{major}\.[0-9]{{1,4}}", str(version)):
        raise DataError(
            f"{path}: expected a {KIND} of schema version {SCHEMA_VERSION}, got {str(header.get('kind'))[:40]!r} of "
            f"{str(version)[:40]!r}"
        )
    local = header.get("method") == "local"
    for key, statement in (*STATEMENTS.items(), ("proof", LOCAL_PROOF if local else PROOF)):
        _expect(path, header.get(key, statement) == statement, f"{key} {statement!r}", header.get(key))
    header["constant"] = _number(path, "constant", header.get("constant"), least=0)
    body = header.setdefault("body_constant", None)
    header["body_constant"] = None if body is None else _number(path, "body_constant", body, least=0)
    data, shape = header.get("data"), header.get("input_shape")
    named = isinstance(data, dict) and all(isinstance(data.get(key), str) for key in ("sha256", "name"))
    counted = isinstance(data, dict) and type(data.get("samples")) is int and data["samples"] >= 1
    _expect(path, named and counted, "data with a name, a sha256 and samples >= 1", data)
    whole = isinstance(shape, list) and len(shape) > 0 and all(type(n) is int and n > 0 for n in shape)
    _expect(path, whole, "input_shape as positive integers", shape)
    header["input_shape"] = tuple(header["input_shape"])
    for key in ("method", "dtype", "network_sha256", "rounding"):
        _expect(path, isinstance(header.get(key), str), f"{key} as a string", header.get(key))
    _expect(path, header["rounding"] in ("sound", "ignore"), "rounding 'sound' or 'ignore'", header["rounding"])
    limits = header.setdefault("input_range", None)
    if limits is not None:
        ends: list[Any] = [_WORDS.get(str(value), value) for value in limits] if isinstance(limits, list) else []
        rising = len(ends) == 2 and all(type(value) in (int, float) for value in ends) and ends[0] < ends[1]
        _expect(path, rising, "input_range as two rising numbers", limits)
        header["input_range"] = tuple(_number(path, "input_range", value) for value in ends)
    for key, kind, empty in (("architecture", list, []), ("versions", dict, {})):
        _expect(path, isinstance(header.setdefault(key, empty), kind), f"{key} as a {kind.__name__}", header[key])


def _evaluator(path: Path, values: Any) -> Evaluator:
    kinds: dict[str, tuple[type, ...]] = dict.fromkeys(("name", "dtype", "device", "torch"), (str,))
    kinds |= {"block": (int, type(None)), "settings": (dict,)}
    whole = isinstance(values, dict) and kinds.keys() == values.keys()
    _expect(path, whole, f"an evaluator with {', '.join(kinds)}", values)
    for key, kind in kinds.items():
        _expect(path, type(values[key]) in kind, f"a valid {key} of the evaluator", values[key])
    return Evaluator(**values)


def _expect(where: object, good: bool, what: str, got: object) -> None:
    if not good:
        raise DataError(f"{where}: expected {what}, got {str(got)[:80]!r}")


def _number(where: object, key: str, value: Any, least: float | None = None) -> float:
    """Read a number of a file as a float: infinities and NaN are words; refuse one below ``least``, if given."""
    number: Any = _WORDS.get(value) if isinstance(value, str) else value
    good = type(number) in (int, float) and (least is None or number >= least)
    _expect(where, good, f"{key} as a number" + (" >= 0" if least == 0 else ""), value)
    try:
        return float(number)
    except OverflowError:
        raise DataError(f"{where}: expected a number that float64 holds, got {str(number)[:20]}...") from None


def _rows(path: Path, stream: Any, samples: int) -> Iterator[list[float]]:
    """Yield the numbers of each sample's line in the order of `COLUMNS`, after a check of the line."""
    count = 0
    while line := stream.readline(_LONGEST_LINE + 1):
        where = f"{path}, line {count + 2}"
        if count == samples:
            raise DataError(f"{path}: expected {samples} lines of samples, got more")
        values = _parse(where, line, _LONGEST_LINE)
        if further := set(values) - set(COLUMNS):
            raise DataError(f"{where}: expected {', '.join(COLUMNS)}, got {str(min(further))[:40]!r} too")
        row = [_number(where, key, values.get(key)) for key in COLUMNS]
        index, label, prediction, radius, ignored = row[:5]
        whole = all(type(values[key]) is int for key in COLUMNS[:3])  # 7.0 and 7e0 are other claims to other readers
        if index != count or not whole or not 0 <= label < 2**31 or not -1 <= prediction < 2**31:
            raise DataError(f"{where}: expected index {count} and whole labels, got {line[:80]!r}")
        if not radius >= 0 or not ignored >= 0:  # not <: NaN is refused, too
            raise DataError(f"{where}: expected radii >= 0, got {radius} and {ignored}")
        count += 1
        yield row
    if count != samples:
        raise DataError(f"{path}: expected {samples} lines of samples, got {count}: the file is cut")


# Relative difference that the rounding of another machine's libraries may make in a recomputed radius.
TOLERANCE = 1e-9
# Most lines of claims that are shown: more would push what was proved off the screen.
MOST_CLAIMS = 24
# Characters of one claim: all settings of torch together fit.
LONGEST_CLAIM = 2000


def verify(file: CertificateFile, network: modules.Network, x: Samples, y: Samples) -> Certificate:
    r"""Prove every radius of a certificate again, from the network and the samples alone.

    Args:
        file: from `lipkit.certificates.certificate_file.read_certificate`.
        network: the exported network, from `lipkit.modules.load`.
        x, y: the samples, in order; tensors or numpy arrays.

    Every other field of the file is compared with what is found here, except those of `unchecked`.

    Returns:
        A new certificate whose radii are the smaller of the file's and the recomputed ones. All else in it is
        recomputed here.

    Raises:
        DataError: another network or other samples than the file's hashes name.
        OptionError: settings of torch other than those of the certificate's evaluator.
        CertificateViolation: the file says something else than is found here: larger radii or smaller constants, or
            other margins, by more than a relative 1e-9; another prediction, method, architecture, input shape, ...
    """
    x, y = as_tensor(x), as_tensor(y)
    claimed = file.certificate
    if modules.sha256(network) != claimed.network_sha256:
        raise DataError(
            f"expected the network with sha256 {printable(claimed.network_sha256, 80)}, got one with "
            f"{modules.sha256(network)}"
        )
    if len(x) != len(claimed) or data_sha256(x, y) != file.data["sha256"]:
        raise DataError(
            f"expected the {len(claimed)} samples of {printable(repr(file.data['name']), 80)} with sha256 "
            f"{printable(file.data['sha256'], 80)}, got {len(x)} samples with {data_sha256(x, y)}"
        )
    method = "local" if claimed.method == "local" else "global"
    proved = certify(network, x, y, method=method, rounding=claimed.rounding, evaluator=claimed.evaluator.option)
    _check_claims(file, proved, network)
    told, most = (torch.stack((each.radius, each.radius_ignored)) for each in (claimed, proved))
    larger = ~(told <= most * (1 + TOLERANCE))  # not >: a NaN in the file is not confirmed
    wrong = larger.any(0) | (claimed.label != proved.label)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        ignored = int(larger[1, i] & ~larger[0, i])  # which of the two radii is too large
        raise CertificateViolation(
            f"sample {i}: expected a radius of at most {float(most[ignored, i]):.9g}{' (radius_ignored)' * ignored} "
            f"for the label {int(proved.label[i])}, got {float(told[ignored, i]):.9g} for {int(claimed.label[i])} "
            f"({int(wrong.sum())} of {len(claimed)} samples are not confirmed)"
        )
    other = (claimed.prediction != proved.prediction) | ~_near(claimed.margin, proved.margin)
    if bool(other.any()):
        i = int(other.nonzero()[0])
        raise CertificateViolation(
            f"sample {i}: expected the prediction {int(proved.prediction[i])} with a margin of "
            f"{float(proved.margin[i]):.9g}, got {int(claimed.prediction[i])} with {float(claimed.margin[i]):.9g}"
        )
    return dataclasses.replace(
        proved,
        radius=torch.minimum(proved.radius, claimed.radius),
        radius_ignored=torch.minimum(proved.radius_ignored, claimed.radius_ignored),
    )


def unchecked(file: CertificateFile) -> dict[str, str]:
    """The claims of a file that no verification can prove: a dict from dotted name to one printable line.

    These are the name of the data and how they were prepared, the machine and the versions that the certificate was
    made with, and fields that this version does not know. `verify` checks all others.
    """
    evaluator = dataclasses.asdict(file.certificate.evaluator)
    claims: dict[str, Any] = {f"data.{key}": v for key, v in file.data.items() if key not in ("sha256", "samples")}
    claims |= {f"evaluator.{key}": v for key, v in evaluator.items() if key not in ("name", "dtype", "block")}
    claims |= {"versions": dict(file.versions)} | {f"other.{key}": value for key, value in file.other.items()}
    shown = list(claims.items())[:MOST_CLAIMS]
    lines = {
        printable(key, 40): printable(json.dumps(value, ensure_ascii=False), LONGEST_CLAIM) for key, value in shown
    }
    return lines | ({"further fields": str(len(claims) - len(lines))} if len(claims) > len(lines) else {})


def _check_claims(file: CertificateFile, proved: Certificate, network: modules.Network) -> None:
    """Raise if a file claims smaller constants than were proved, or another method, evaluator or architecture."""
    claimed = file.certificate
    for name, bound, least in (
        ("a Lipschitz constant", claimed.constant, proved.constant),
        ("a body_constant", claimed.body_constant, proved.body_constant),
    ):
        if (bound is None) != (least is None):
            raise CertificateViolation(f"expected {name} of {least}, got {bound}")
        if bound is not None and least is not None and not bound >= least * (1 - TOLERANCE):
            raise CertificateViolation(f"expected {name} of at least {least:.12g}, got {bound:.12g}")
    # Local radii hold in the range that was known, and an integer program is made for one.
    if (claimed.method == "local" or claimed.input_range is not None) and claimed.input_range != network.input_range:
        raise CertificateViolation(f"expected input_range {network.input_range}, got {claimed.input_range}")
    architecture = tuple(type(module).__name__ for module in network)
    evaluators = (f"{e.name} ({e.dtype}, block {e.block})" for e in (claimed.evaluator, proved.evaluator))
    for name, told, found in (
        ("method", claimed.method, proved.method),
        ("dtype", claimed.dtype, proved.dtype),
        ("evaluator", *evaluators),
        ("input_shape", tuple(claimed.input_shape), proved.input_shape),
        ("architecture", tuple(file.architecture) or architecture, architecture),
    ):
        if told != found:
            raise CertificateViolation(f"expected {name} {found!r}, got {printable(repr(told), 80)}")


def _near(claimed: Tensor, measured: Tensor) -> Tensor:
    """True where margins agree up to TOLERANCE times the largest one, as rounding errors of logits have one size."""
    finite = measured[measured.isfinite()].abs()
    allowed = TOLERANCE * float(finite.max()) if len(finite) else 0.0
    return ((claimed - measured).abs() <= allowed) | (claimed == measured) | (claimed.isnan() & measured.isnan())
