"""``lipkit check``: verify a certificate file against a network and data, however the network was made."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lipkit.cli.attack import read_radii
from lipkit.cli.main import LARGE_EPS

if TYPE_CHECKING:
    from lipkit.certificates import Certificate
    from lipkit.certificates.certificate_file import CertificateFile

CLAIMED = "claimed, not checked:"


@click.command("check")
@click.argument("certificate", type=click.Path(path_type=Path))
@click.argument("network", type=click.Path(path_type=Path))
@click.argument("data")
@click.option("--root", type=click.Path(path_type=Path), metavar="DATA", help="Folder of the data sets.")
@click.option("--limit", type=click.IntRange(min=1), help="Number of samples; default: that of the certificate.")
@click.option("--eps", multiple=True, metavar="EPS", help="Radii of certified accuracies to print; default 36/255, ...")
@LARGE_EPS
def command(
    certificate: Path, network: Path, data: str, root: Path | None, limit: int | None, eps: tuple[str, ...],
    large_eps: bool,
) -> None:  # fmt: skip
    """Prove every radius in CERTIFICATE again for NETWORK on the test samples of DATA.

    CERTIFICATE is RUN/certificate.jsonl, NETWORK an exported network (RUN/network), DATA the name of a data set or
    folder:PATH, npz:FILE, ... Hashes of network and data must agree. A radius that cannot be proved again, or any other
    false field, is an error. Claims that cannot be checked (the name of the data, how they were prepared, where the
    file was made) are printed below.
    """
    import torch

    from lipkit import data as datasets
    from lipkit import modules
    from lipkit.certificates.certificate_file import read_certificate, verify
    from lipkit.certificates.intervals import check_radii
    from lipkit.evaluation import EPS

    radii = [radius for text in eps for radius in read_radii(text)] or list(EPS)
    file = read_certificate(certificate)
    stored = modules.load(network)
    count = limit or len(file.certificate)
    loaded = datasets.load(data, root=root, limit=count, limits=stored.input_range)  # the network's range
    check_radii(radii if eps else (), loaded.input_shape, loaded.input_range, name="--eps", large=large_eps)
    x, y = loaded.test.batch(torch.arange(len(loaded.test)))
    click.echo(report(file, verify(file, stored, x, y), loaded.name, radii))


def report(file: CertificateFile, confirmed: Certificate, data: str, radii: Sequence[float]) -> str:
    """The text of the command: figures computed here, then the claims of the file that cannot be checked."""
    from lipkit.certificates.certificate_file import unchecked
    from lipkit.shown import upper
    from lipkit.text import format_radius, printable

    larger = file.certificate.radius > confirmed.radius  # `verify` allows no more than rounding
    lines = [
        f"confirmed  {len(confirmed)} samples of {printable(data)}, network {confirmed.network_sha256[:16]}...",
        f"constant   {upper(confirmed.constant, 9)} ({confirmed.method}); rounding {confirmed.rounding}, "
        f"evaluator {confirmed.evaluator.name}",
        f"clean      {100 * confirmed.clean_accuracy:.2f} %",
    ]
    lines += [f"certified({format_radius(r)})  {100 * confirmed.accuracy(r, large_eps=True):.2f} %" for r in radii]
    if count := int(larger.sum()):
        most = float((file.certificate.radius / confirmed.radius - 1)[larger].max())
        lines.append(
            f"rounding   {count} radii of the file are larger than those proved here, by a relative {most:.0e} at "
            "most; the latter count"
        )
    lines += ["", CLAIMED]
    for name, value in unchecked(file).items():
        # Wrap here: if the terminal wrapped, text from the file could begin a line and look like lipkit's own output.
        width = 76 if value.isascii() else 52  # other scripts have letters two columns wide
        lines += textwrap.wrap(value, width, initial_indent=f"  {name:<24}  ", subsequent_indent=" " * 28) or [
            f"  {name}"
        ]
    return "\n".join(lines)
