"""Verification of certificate files: every radius is proved again, from the network and the samples alone."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from lipkit import modules
from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.certificate_file import CertificateFile, data_sha256
from lipkit.certificates.measurement import Samples, as_tensors
from lipkit.errors import CertificateViolation, DataError, OptionError
from lipkit.text import printable

# How much a recomputed radius may differ by the rounding of another machine's libraries.
TOLERANCE = 1e-9
# More lines of claims than these would only push what was proved off the screen.
MOST_CLAIMS = 24
# Characters of one claim: all settings of torch together fit.
LONGEST_CLAIM = 2000


def verify(
    file: CertificateFile, network: modules.Network, x: Samples, y: Samples, *, batch_size: int = 256
) -> Certificate:
    r"""Prove every radius of a certificate again, from the network and the samples alone.

    Args:
        file: from `lipkit.certificates.certificate_file.read_certificate`.
        network: the exported network, from `lipkit.modules.load`.
        x, y: the samples, in order; tensors or numpy arrays.

    Every other field of the file is compared with what is found here, but for those of `unchecked`.

    Returns:
        A new certificate whose radii are the smaller ones of the file's and the recomputed: what both say. All else
        in it is found here, nothing is the file's.

    Raises:
        DataError: another network or other samples than the file's hashes name.
        OptionError: settings of torch other than those of the certificate's evaluator.
        CertificateViolation: the file says something else than is found here: larger radii or smaller constants, or
            other margins, by more than a relative 1e-9; another prediction, method, architecture, input shape, ...
    """
    x, y = as_tensors(x, y)
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
    name = "float64" if claimed.evaluator.name == "real" else claimed.evaluator.name
    proved = certify(network, x, y, rounding=claimed.rounding, evaluator=name, batch_size=batch_size)
    ours, theirs = proved.evaluator, claimed.evaluator
    if (ours.name, ours.dtype, ours.block) != (theirs.name, theirs.dtype, theirs.block):
        raise OptionError(f"expected the evaluator {theirs}, got {ours}")
    _check_header(file, proved, network)
    wrong = claimed.label != proved.label
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
    """The claims of a file that no verification can prove, as one printable line by dotted name.

    The name of the data and how they were prepared, the machine and the versions that the certificate was made with,
    and whatever this version does not know. Hash and number of the samples, and all that `verify` compares, are not
    among them.
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


def _check_header(file: CertificateFile, proved: Certificate, network: modules.Network) -> None:
    """Compare what a file says about the network with what was proved of it."""
    claimed = file.certificate
    for name, bound, known in (
        ("a Lipschitz constant", claimed.constant, proved.constant),
        ("a body_constant", claimed.body_constant, proved.body_constant),
    ):
        if bound is None or known is None:
            if bound is not known:
                raise CertificateViolation(f"expected {name} of {known}, got {bound}")
        elif not bound >= known * (1 - TOLERANCE):
            raise CertificateViolation(f"expected {name} of at least {known:.12g}, got {bound:.12g}")
    architecture = tuple(type(module).__name__ for module in network)
    for name, told, found in (
        ("method", claimed.method, proved.method),
        ("dtype", claimed.dtype, proved.dtype),
        ("input_shape", tuple(claimed.input_shape), proved.input_shape),
        ("architecture", tuple(file.architecture) or architecture, architecture),
    ):
        if told != found:
            raise CertificateViolation(f"expected {name} {found!r}, got {printable(repr(told), 80)}")


def _near(claimed: Tensor, measured: Tensor) -> Tensor:
    """True where margins agree up to rounding; it acts on logits, so all margins together set the scale."""
    finite = measured[measured.isfinite()].abs()
    allowed = TOLERANCE * float(finite.max()) if len(finite) else 0.0
    return ((claimed - measured).abs() <= allowed) | (claimed == measured) | (claimed.isnan() & measured.isnan())
