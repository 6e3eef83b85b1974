r"""Certificates of an exported network: radii from bounds recomputed in float64 on its own numbers."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from lipkit import plain
from lipkit.certificates import margins
from lipkit.certificates.exported import (
    check_inputs,
    dtype_name,
    float64_copy,
    float64_device,
    proved_bound,
    split_last_layer,
)
from lipkit.certificates.regression import LOGIT_SLACK, RegressionCertificate, certify_regression
from lipkit.errors import OptionError, ShapeError
from lipkit.files import write_atomic


@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    r"""What was proved about N samples. All tensors are on the CPU.

    Attributes:
        radius: (N,) float64, certified l2 radius in units of the input, rounded down; 0 where nothing is certified.
        prediction: (N,) int64; -1 where a logit is NaN.
        label: (N,) int64.
        margin: (N,) float64, signed margin ``y_t - max_{i != t} y_i``.
        constant: proved upper bound L of the network's l2 Lipschitz constant, rounded up.
        body_constant: the same for everything before the last linear layer; None without such a split.
        method: ``"last layer"`` (pairwise, with `body_constant`) or ``"global"`` (margin / (sqrt(2) L)).
        dtype: arithmetic of bounds and logits.
        input_shape: shape of one input.
        network_sha256: fingerprint of the network that was certified.
    """

    radius: Tensor
    prediction: Tensor
    label: Tensor
    margin: Tensor
    constant: float
    body_constant: float | None
    method: str
    dtype: str
    input_shape: tuple[int, ...]
    network_sha256: str

    def __len__(self) -> int:
        return len(self.label)

    @property
    def correct(self) -> Tensor:
        """(N,) bool: the prediction is the label."""
        return self.prediction == self.label

    @property
    def clean_accuracy(self) -> float:
        """Share of samples whose prediction is the label."""
        return float(self.correct.double().mean())

    def certified(self, eps: float) -> Tensor:
        """(N,) bool: correct, with a radius above ``eps``."""
        if not eps >= 0:
            raise OptionError(f"expected a radius >= 0, got {eps}")
        return self.correct & (self.radius > eps)

    def accuracy(self, eps: float) -> float:
        """Certified accuracy: share of samples that are correct with a radius above ``eps`` (units of the input)."""
        return float(self.certified(eps).double().mean())

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write ``index,label,prediction,correct,radius,margin``, one row a sample, numbers that read back exactly."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["index", "label", "prediction", "correct", "radius", "margin"])
        columns = (self.label, self.prediction, self.correct.long(), self.radius, self.margin)
        rows = zip(range(len(self)), *(column.tolist() for column in columns), strict=True)
        writer.writerows(rows)
        write_atomic(Path(path), text.getvalue().encode())


@overload
def certify(
    network: plain.Network,
    x: Tensor,
    y: Tensor,
    *,
    delta: None = None,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
) -> Certificate: ...


@overload
def certify(
    network: plain.Network,
    x: Tensor,
    y: Tensor,
    *,
    delta: float,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
) -> RegressionCertificate: ...


def certify(
    network: plain.Network,
    x: Tensor,
    y: Tensor,
    *,
    delta: float | None = None,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
) -> Certificate | RegressionCertificate:
    r"""Certified l2 radii of a classifier; with ``delta``, certified output deviations of a regression.

    With ``K_ti = min(sqrt(2) L, L_b ||w_t - w_i||)`` (the second only for a network that ends in ``nn.Linear``)

        r(x) = min_{i != t} (y_t(x) - y_i(x)) / K_ti        if the prediction is the label t, else 0

    **Guarantee.** The prediction of the network, its stored numbers taken as exact and its arithmetic as real, is the
    label on the open l2 ball of radius r(x), whatever training produced the numbers. L and L_b are computed here, in
    float64, on a copy of the network (`lipkit.lipschitz`), and rounded up; radii are rounded down. Logits are
    evaluated in float64; 9e-13 of the largest number added up by the last layer is taken off each margin for their
    rounding, an allowance far above the usual error of float64, not a proof of it. An input normalisation is a layer
    of the network and so part of L.

    Args:
        network: a `lipkit.plain.Network`, from `lipkit.export` or `lipkit.plain.load`.
        x: (N, *input_shape), floating point, on any device.
        y: (N,) int64 labels; with ``delta`` (N, d) floating-point targets.
        delta: for regression: l2 norm of the input deviation that output deviations are certified for; see
            `lipkit.certificates.certify_regression`, which is then called.
        batch_size: samples evaluated at once; the radii do not depend on it beyond rounding.
        device: where the logits are evaluated. A device without float64 (mps) is replaced by the CPU.

    Raises:
        NoRuleError: ``network`` is not an exported network, or holds a module without a rule.
        ShapeError: ``x`` does not fit the network, or ``y`` does not fit ``x``.
        OptionError: labels are not integers in [0, K), there is no sample, or ``delta`` is given for labels.

    References: Tsuzuku, Sato, Sugiyama, "Lipschitz-Margin Training", NeurIPS 2018, Prop. 1 (global); Singla, Singla,
    Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022, Sec. 4 (last layer).
    """
    if delta is not None:
        return certify_regression(network, x, y, delta=delta, batch_size=batch_size, device=device)
    check_inputs(network, x, batch_size)
    _check_labels(x, y)
    network64 = float64_copy(network, device)
    device = float64_device(device)
    constant = proved_bound(network64, network64.input_shape)
    split = split_last_layer(network64)
    body_constant = None if split is None else proved_bound(split[0], network64.input_shape)

    logits, scale = [], []
    with torch.no_grad():
        for xs in x.split(batch_size):
            xs = xs.to(device=device, dtype=torch.float64)
            if split is None:
                out = network64(xs)
                size = out.abs()
            else:
                body, last = split
                features = body(xs)
                out = last(features)
                size = features.abs() @ last.weight.abs().T + (0.0 if last.bias is None else last.bias.abs())
            margins.check_logits(out, torch.zeros(len(xs), dtype=torch.int64))
            logits.append(out.cpu())
            scale.append(size.amax(dim=1).cpu())
    outputs, labels = torch.cat(logits), y.cpu()
    margins.check_logits(outputs, labels)

    constants = margins.global_constants(constant, outputs.shape[1])
    if split is not None and body_constant is not None:
        last_layer = margins.last_layer_constants(split[1].weight.cpu(), body_constant)
        constants = torch.minimum(constants, last_layer)
    return Certificate(
        radius=margins.radii(outputs, labels, constants, logit_error=LOGIT_SLACK * torch.cat(scale)),
        prediction=margins.predictions(outputs),
        label=labels.clone(),
        margin=margins.margins(outputs, labels),
        constant=constant,
        body_constant=body_constant,
        method="global" if split is None else "last layer",
        dtype="float64",
        input_shape=tuple(network.input_shape),
        network_sha256=plain.sha256(network),
    )


def _check_labels(x: Tensor, y: Tensor) -> None:
    if y.is_floating_point():
        raise OptionError(
            f"expected integer class labels (int64), got {dtype_name(y)}: for regression targets give delta, the input "
            "deviation to bound the output deviation for"
        )
    if y.shape != x.shape[:1]:
        raise ShapeError(f"expected {len(x)} labels of shape ({len(x)},), got {tuple(y.shape)}")
