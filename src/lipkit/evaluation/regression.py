"""Errors of a regression network, its certified deviations, and a search for inputs that would disprove them."""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from lipkit import modules
from lipkit.analysis import SecantSearch, lipschitz_lower_bound
from lipkit.certificates import RegressionCertificate, certify_regression
from lipkit.certificates.measurement import Proof, prove
from lipkit.certificates.measurement import evaluate as measured
from lipkit.certificates.regression import columns
from lipkit.data import as_split
from lipkit.errors import CertificateViolation
from lipkit.proof.roundoff import grow, size
from lipkit.shown import Shown, figures


@dataclasses.dataclass(frozen=True, repr=False)
class RegressionEvaluation(Shown):
    """The findings of `evaluate_regression`.

    Attributes:
        certificate: of the test samples.
        mse: mean of the squared errors over samples and outputs.
        rmse: (d,) root of the mean squared error of each output.
        search: the steepest pair of inputs found; ``search.lower`` is their slope, less its possible rounding error.
        output_slopes: (d,) the steepest slope of each output over that pair and neighbouring samples, less rounding.
        times: seconds.
    """

    certificate: RegressionCertificate
    mse: float
    rmse: tuple[float, ...]
    search: SecantSearch
    output_slopes: tuple[float, ...]
    times: dict[str, float]

    @property
    def lower(self) -> float:
        """Lower bound of the Lipschitz constant: the steepest slope seen; never a certificate."""
        return max(self.search.lower, *self.output_slopes)

    @property
    def tightness(self) -> float:
        """Lower bound divided by upper bound, at most 1; NaN for a constant network."""
        upper = self.certificate.constant
        return self.lower / upper if upper > 0 else float("nan")

    def metrics(self) -> dict[str, float]:
        """Flat numbers, for a line of metrics."""
        constant = self.certificate.constant
        return {"test_mse": self.mse, "lipschitz": constant, "lower": self.lower, "tightness": self.tightness}

    def describe(self) -> str:
        """The certificate, and every figure."""
        return "\n".join([self.certificate.describe(), figures(self.metrics())])


def evaluate_regression(
    network: modules.Network,
    split: Any,
    *,
    delta: float = 0.1,
    restarts: int = 64,
    steps: int = 200,
    batch_size: int = 256,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> RegressionEvaluation:
    """Certify a regression network, measure its error, search for its steepest slope, and stop if they disagree.

    The search (`lipkit.analysis.lipschitz_lower_bound`) starts at the samples and may leave their range, since the
    certified bound holds everywhere.

    **Guarantee.** If this returns, no slope found by the search or between neighbouring samples is above the certified
    constant, of the network and of each output. That is a test of the bounds; they do not depend on it.

    Args:
        network: an exported network (`lipkit.export`).
        split: samples and floating-point targets (N, d), as `lipkit.data.as_split` takes them: a pair (x, y), say.
        delta: as in `lipkit.certificates.certify_regression`.
        restarts, steps, seed: of the search.
        batch_size, device: as in `lipkit.certify`.

    Raises:
        CertificateViolation: a slope is above the certified constant: the bound is wrong.
    """
    start = time.perf_counter()
    x, y = as_split(split).batch(slice(None))
    proof = prove(network, device=device)
    certificate = certify_regression(network, x, y, delta=delta, batch_size=batch_size, device=device, proof=proof)
    certified_at = time.perf_counter()
    search = lipschitz_lower_bound(network, start=x, restarts=restarts, steps=steps, seed=seed)
    x = x.detach().cpu().double()
    whole, slopes = _slopes(proof, torch.cat((search.x[None], x[:-1])), torch.cat((search.y[None], x[1:])), batch_size)
    search = search._replace(lower=float(whole[0]))  # the search's pair comes first, then neighbouring samples
    check_slopes(certificate, search.lower, slopes)
    return RegressionEvaluation(
        certificate=certificate,
        mse=certificate.mse,
        rmse=tuple(certificate.error.square().mean(dim=0).sqrt().tolist()),
        search=search,
        output_slopes=tuple(slopes.tolist()),
        times={"certify": certified_at - start, "search": time.perf_counter() - certified_at},
    )


def check_slopes(certificate: RegressionCertificate, lower: float, slopes: Tensor) -> None:
    """Raise if a lower bound of the slope of the network or of an output (d,) exceeds its constant."""
    names = ["the network", *(f"output {j}" for j in range(len(slopes)))]
    seen, proved = [lower, *slopes.tolist()], [certificate.constant, *certificate.output_constants.tolist()]
    for name, slope, constant in zip(names, seen, proved, strict=True):
        if slope > constant:
            raise CertificateViolation(
                f"{name}: expected no slope above the certified constant {constant:.9g}, got {slope:.9g} between two "
                "inputs"
            )


def _slopes(proof: Proof, x: Tensor, y: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Lower bounds of slopes over the pairs x, y (n, ...): (n,) of the network; (d,) the largest of each output."""
    found = measured(proof, torch.cat((x, y)), proof.evaluator, batch_size)
    (fx, fy), (error_x, error_y) = columns(found.outputs).chunk(2), found.errors(0.0)[0].chunk(2)
    rise = ((fy - fx).abs() - grow(error_x + error_y)).clamp_min(0.0) * (1 - 2.0**-30)  # for the rounding of norms
    run = grow(size((y - x).flatten(1)))
    return torch.linalg.vector_norm(rise, dim=1) / run, (rise / run[:, None]).amax(dim=0)
