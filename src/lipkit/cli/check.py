"""``lipkit check``: verify a certificate file against a network and data, however the network was made."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("check")
@click.argument("certificate", type=click.Path(path_type=Path))
@click.argument("network", type=click.Path(path_type=Path))
@click.argument("data")
@click.option("--root", type=click.Path(path_type=Path), metavar="DATA", help="Folder of the data sets.")
@click.option("--limit", type=click.IntRange(min=1), help="Samples of the data, if the certificate is of a part.")
@click.option("--eps", multiple=True, metavar="EPS", help="Radii to print certified accuracies at; default 36/255, ...")
def command(
    certificate: Path, network: Path, data: str, root: Path | None, limit: int | None, eps: tuple[str, ...]
) -> None:
    """Prove every radius in CERTIFICATE again for NETWORK on the test samples of DATA.

    CERTIFICATE is RUN/certificate.jsonl, NETWORK an exported network (RUN/network), DATA the name of a data set or
    folder:PATH, npz:FILE, ... Hashes of network and data must agree; a radius that cannot be proved again is an error.
    """
    import torch

    from lipkit import data as datasets
    from lipkit import plain
    from lipkit.certificates import format_radius
    from lipkit.certificates.certificate_reader import read_certificate
    from lipkit.certificates.verification import verify
    from lipkit.errors import OptionError
    from lipkit.evaluation import EPS
    from lipkit.training.recipe_values import parse_number

    try:
        radii = [float(parse_number(text)) for text in eps] or list(EPS)
    except ValueError as error:
        raise OptionError(f"--eps: {error}") from None
    file = read_certificate(certificate)
    stored = plain.load(network)
    split = datasets.load(data, root=root, limit=limit).test
    x, y = split.batch(torch.arange(len(split)))
    confirmed = verify(file, stored, x, y)
    claimed = file.certificate
    lines = [
        f"confirmed  {len(confirmed)} samples of {file.data['name']}, network {claimed.network_sha256[:16]}...",
        f"constant   {confirmed.constant:.9g} ({confirmed.method}); rounding {confirmed.rounding}, "
        f"evaluator {confirmed.evaluator.name}",
        f"clean      {100 * confirmed.clean_accuracy:.2f} %",
    ]
    lines += [f"certified({format_radius(r)})  {100 * confirmed.accuracy(r):.2f} %" for r in radii]
    click.echo("\n".join(lines))
