r"""Certificates of an exported network: radii from bounds recomputed in float64 on its own numbers."""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from lipkit import plain
from lipkit.certificates import margins
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.files import write_atomic
from lipkit.protocol import lipschitz

# Float64 evaluation of a network errs by about 1e-15 of the numbers it adds up; this share of them (9e-13) is taken off
# every margin. It costs nothing visible and keeps noise on an exact tie from becoming a radius.
_LOGIT_SLACK = 2.0**-40


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


def certify(
    network: plain.Network,
    x: Tensor,
    y: Tensor,
    *,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
) -> Certificate:
    r"""Certified l2 radii of an exported network.

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
        y: (N,) int64 labels.
        batch_size: samples evaluated at once; the radii do not depend on it beyond rounding.
        device: where the logits are evaluated. A device without float64 (mps) is replaced by the CPU.

    Raises:
        NoRuleError: ``network`` is not an exported network, or holds a module without a rule.
        ShapeError: ``x`` does not fit the network, or ``y`` does not fit ``x``.
        OptionError: labels are not integers in [0, K), or there is no sample.

    References: Tsuzuku, Sato, Sugiyama, "Lipschitz-Margin Training", NeurIPS 2018, Prop. 1 (global); Singla, Singla,
    Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022, Sec. 4 (last layer).
    """
    _check(network, x, y, batch_size)
    network64 = float64_copy(network, device)
    device = float64_device(device)
    constant = _bound(network64, network64.input_shape)
    split = split_last_layer(network64)
    body_constant = None if split is None else _bound(split[0], network64.input_shape)

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
        radius=margins.radii(outputs, labels, constants, logit_error=_LOGIT_SLACK * torch.cat(scale)),
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


def float64_copy(network: plain.Network, device: str | torch.device = "cpu") -> plain.Network:
    """A copy in float64 that holds exactly the same numbers; on the CPU where ``device`` has no float64."""
    return copy.deepcopy(network).cpu().double().to(float64_device(device))  # mps cannot even hold a float64 tensor


def float64_device(device: str | torch.device) -> torch.device:
    """``device``, or the CPU where that device has no float64.

    >>> float64_device("mps")
    device(type='cpu')
    """
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def split_last_layer(network: plain.Network) -> tuple[nn.Sequential, nn.Linear] | None:
    """(everything before it, the last layer) of a network that ends in exactly an ``nn.Linear``, else None."""
    modules = list(network)
    if not modules or type(modules[-1]) is not nn.Linear:
        return None
    return nn.Sequential(*modules[:-1]), modules[-1]


def _bound(network: nn.Sequential, input_shape: tuple[int, ...]) -> float:
    if len(network) == 0:
        return 1.0
    bound = float(lipschitz(network, input_shape))
    margins.check_constant(bound)
    return math.nextafter(bound, math.inf) if bound > 0 else 0.0


def _check(network: object, x: Tensor, y: Tensor, batch_size: int) -> None:
    if not isinstance(network, plain.Network):
        raise NoRuleError(
            f"expected an exported network (lipkit.plain.Network), got {type(network).__name__}: "
            "certify lipkit.export(model, input_shape)"
        )
    shape = tuple(network.input_shape)
    if tuple(x.shape[1:]) != shape or x.ndim != len(shape) + 1:
        raise ShapeError(f"expected inputs of shape (N, {', '.join(map(str, shape))}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise OptionError(f"expected floating-point inputs (images in [0, 1]), got {_name(x.dtype)}")
    if y.is_floating_point():
        raise OptionError(
            f"expected integer class labels (int64), got {_name(y.dtype)}: certificates for regression targets "
            "are not available, only lipkit.lipschitz bounds such a network"
        )
    if len(x) == 0:
        raise OptionError("expected at least one sample to certify, got 0")
    if y.shape != x.shape[:1]:
        raise ShapeError(f"expected {len(x)} labels of shape ({len(x)},), got {tuple(y.shape)}")
    if batch_size < 1:
        raise OptionError(f"expected batch_size >= 1, got {batch_size}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
