"""What every certificate is made from: the proved constants of a network, and its outputs at the samples in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from lipkit import plain
from lipkit.certificates.exported import float64_copy, float64_device, proved_parts, split_last_layer
from lipkit.certificates.rounding import evaluators, sound
from lipkit.certificates.rounding.arithmetic import Arithmetic
from lipkit.certificates.rounding.evaluators import Evaluator, inner_products_only
from lipkit.linalg.precision import check_underflow


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """Constants of a network and its outputs at N samples.

    Attributes:
        constant: proved upper bound of the network's l2 Lipschitz constant, rounded up.
        body_constant: the same for everything before the last ``nn.Linear``; None without one.
        weight: (K, n) of that last layer, float64, on the CPU; None without one.
        outputs: (N, K) float64, on the CPU.
        logits: the same outputs with their rounding errors; None where rounding is ignored.
        slack: what the exact transforms of Fourier layers can add to a constant, as a factor; 1 where it is ignored.
        arithmetic: of the evaluator.
        evaluator: that is certified, and the settings it was measured under.
    """

    constant: float
    body_constant: float | None
    weight: Tensor | None
    outputs: Tensor
    logits: sound.Logits | None
    slack: float
    arithmetic: Arithmetic
    evaluator: Evaluator


def measure(
    network: plain.Network,
    x: Tensor,
    *,
    rounding: str,
    evaluator: str,
    batch_size: int,
    device: str | torch.device,
    check: Callable[[Tensor], None] | None = None,
) -> Measurement:
    """Prove the constants of a network in float64 and evaluate it, batch by batch.

    Args:
        network: exported; ``x`` (N, *input_shape) fits it, see `lipkit.certificates.exported.check_inputs`.
        rounding, evaluator, batch_size, device: as in `lipkit.certify`.
        check: called with the outputs of each batch, to refuse them before the next one is evaluated.

    Raises:
        NoRuleError: the network holds a module without a rule.
        OptionError: an unknown ``rounding`` or ``evaluator``, or settings of torch whose arithmetic is not IEEE or
            flushes.

    >>> net = plain.Network([torch.nn.Linear(2, 2, bias=False)], (2,))
    >>> _ = net[0].weight.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    >>> options = {"evaluator": "float64", "batch_size": 1, "device": "cpu"}
    >>> found = measure(net, torch.ones(2, 2), rounding="sound", **options)
    >>> round(found.constant, 6), found.body_constant, found.outputs.tolist()
    (3.0, 1.0, [[3.0, 1.0], [3.0, 1.0]])
    """
    check_underflow()
    where = float64_device(device)
    made_for = evaluators.named(rounding, evaluator, where, network)
    exact = float64_copy(network, where)
    constant, body_constant, gains = proved_parts(exact)
    split = split_last_layer(exact)
    arithmetic = evaluators.arithmetic(evaluator, network)
    evaluation = None
    if rounding == "sound":
        evaluation = sound.Evaluation(list(exact), exact.input_shape, arithmetic, gains, split is not None)
    outputs, logits = [], []
    with torch.no_grad(), inner_products_only(where, rounding == "sound"):
        for part in x.split(batch_size):
            part = part.to(device=where, dtype=torch.float64)
            if evaluation is None:
                outputs.append(exact(part).cpu())
            else:
                logits.append(evaluation(part))
                outputs.append(logits[-1].values)
            if check is not None:
                check(outputs[-1])
    return Measurement(
        constant=constant,
        body_constant=body_constant,
        weight=None if split is None else split[1].weight.detach().cpu(),
        outputs=torch.cat(outputs),
        logits=sound.Logits.join(logits) if logits else None,
        slack=sound.transform_slack(exact) if rounding == "sound" else 1.0,
        arithmetic=arithmetic,
        evaluator=made_for,
    )
