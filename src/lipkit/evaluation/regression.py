"""Errors of a regression network, its certified deviations, and a search for inputs that would disprove them."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipkit import modules
from lipkit.analysis import SecantSearch, lipschitz_lower_bound
from lipkit.certificates import RegressionCertificate, certify_regression
from lipkit.certificates.measurement import float64_copy
from lipkit.errors import CertificateViolation
from lipkit.shown import Shown, figures

if TYPE_CHECKING:
    from lipkit.data import Split

# Relative allowance for the rounding of slopes in float64.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True, repr=False)
class RegressionEvaluation(Shown):
    """The findings of `evaluate_regression`.

    Attributes:
        certificate: of the test samples.
        mse: mean of the squared errors over samples and outputs.
        rmse: (d,) root of the mean squared error of each output.
        search: the steepest pair of inputs found; ``search.lower`` is a finite-difference lower bound of the constant.
        output_slopes: (d,) the steepest slope seen of each output, between that pair or neighbouring samples.
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
        """Lower bound of the Lipschitz constant; never a certificate."""
        return self.search.lower

    @property
    def tightness(self) -> float:
        """Lower over upper bound, at most 1; NaN for a constant network."""
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
    split: Split,
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
        split: samples and floating-point targets (N, d).
        delta: as in `lipkit.certificates.certify_regression`.
        restarts, steps, seed: of the search.
        batch_size, device: as in `lipkit.certify`.

    Raises:
        CertificateViolation: a slope is above the certified constant: the bound is wrong.
    """
    start = time.perf_counter()
    x, y = split.batch(torch.arange(len(split)))
    certificate = certify_regression(network, x, y, delta=delta, batch_size=batch_size, device=device)
    certified_at = time.perf_counter()
    search = lipschitz_lower_bound(network, start=x, restarts=restarts, steps=steps, seed=seed)
    slopes = torch.maximum(_slopes(network, search.x[None], search.y[None]), _slopes(network, x[:-1], x[1:]))
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
    """Raise if an observed slope, of the network or of an output (d,), exceeds its constant by more than rounding."""
    names = ["the network", *(f"output {j}" for j in range(len(slopes)))]
    seen, proved = [lower, *slopes.tolist()], [certificate.constant, *certificate.output_constants.tolist()]
    for name, slope, constant in zip(names, seen, proved, strict=True):
        if slope > constant * (1 + _ROUNDING):
            raise CertificateViolation(
                f"{name}: expected no slope above the certified constant {constant:.9g}, got {slope:.9g} between two "
                "inputs"
            )


def _slopes(network: modules.Network, x: Tensor, y: Tensor) -> Tensor:
    """(d,) largest slope of each output over the pairs (x, y), in float64; pairs too close to measure count as 0."""
    exact, x, y = float64_copy(network), x.detach().cpu().double(), y.detach().cpu().double()
    with torch.no_grad():
        rise = (exact(y) - exact(x)).abs() if len(x) else exact(y.new_zeros(1, *network.input_shape)) * 0
        run = torch.linalg.vector_norm((y - x).flatten(1), dim=1, keepdim=True)
        reach = 1 + torch.linalg.vector_norm(x.flatten(1), dim=1, keepdim=True) + rise.amax(dim=1, keepdim=True)
    slopes = torch.where(run > 1e-7 * reach, rise / run.clamp_min(1e-300), 0.0) if len(x) else rise
    return slopes.amax(dim=0)
