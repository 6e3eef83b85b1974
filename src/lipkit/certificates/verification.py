"""Verification of certificate files: every radius is proved again, from the network and the samples alone."""

from __future__ import annotations

import dataclasses

import torch

from lipkit import plain
from lipkit.certificates.certificate import Certificate, certify
from lipkit.certificates.certificate_file import CertificateFile, data_sha256
from lipkit.certificates.exported import Samples, as_tensors
from lipkit.errors import CertificateViolation, DataError, OptionError

# How much a recomputed radius may differ by the rounding of another machine's libraries.
TOLERANCE = 1e-9


def verify(
    file: CertificateFile, network: plain.Network, x: Samples, y: Samples, *, batch_size: int = 256
) -> Certificate:
    r"""Prove every radius of a certificate again, from the network and the samples alone.

    Args:
        file: from `lipkit.certificates.certificate_reader.read_certificate`.
        network: the exported network, from `lipkit.plain.load`.
        x, y: the samples, in order; tensors or numpy arrays.

    Returns:
        A new certificate whose radii are the smaller ones of the file's and the recomputed: what both say.

    Raises:
        DataError: another network or other samples than the file's hashes name.
        OptionError: settings of torch other than those of the certificate's evaluator.
        CertificateViolation: a radius, a prediction or the constant is not confirmed: larger radii or smaller
            constants than can be proved here, by more than a relative 1e-9.
    """
    x, y = as_tensors(x, y)
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
