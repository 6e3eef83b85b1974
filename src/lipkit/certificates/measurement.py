"""The proved constants of a network and its outputs at the samples in float64: every certificate is made from them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipkit import modules
from lipkit.certificates import evaluators, sound
from lipkit.certificates.evaluators import Evaluator, inner_products_only
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.linalg.precision import check_underflow
from lipkit.modules.chains import Proof, prove
from lipkit.modules.guarding import refuse_wrapper
from lipkit.modules.quantisation import quantise
from lipkit.proof.arithmetic import Arithmetic


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """Constants of a network and its outputs at N samples.

    Attributes:
        proof: of the network in float64: its constants, and the rounding errors of its modules.
        outputs: (N, K) float64, on the CPU.
        logits: the same outputs with their rounding errors; None where rounding is ignored.
        arithmetic: of the evaluator.
        evaluator: that is certified, and the settings it was measured under.
    """

    proof: Proof
    outputs: Tensor
    logits: sound.Logits | None
    arithmetic: Arithmetic
    evaluator: Evaluator

    @property
    def weight(self) -> Tensor | None:
        """(K, n) of a last dense layer, float64, on the CPU; None without one."""
        return None if self.proof.last is None else self.proof.last.weight.detach().cpu()


def measure(
    network: modules.Network,
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
        network: exported; ``x`` (N, *input_shape) fits it, see `lipkit.certificates.measurement.check_inputs`.
        rounding, evaluator, batch_size, device: as in `lipkit.certify`.
        check: called with the outputs of each batch, to refuse them before the next one is evaluated.

    Raises:
        NoRuleError: the network holds a module without a rule.
        OptionError: an unknown ``rounding`` or ``evaluator``, or settings of torch whose arithmetic is not IEEE or
            flushes.

    >>> net = modules.Network([torch.nn.Linear(2, 2, bias=False)], (2,))
    >>> _ = net[0].weight.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    >>> options = {"evaluator": "float64", "batch_size": 1, "device": "cpu"}
    >>> found = measure(net, torch.ones(2, 2), rounding="sound", **options)
    >>> round(found.proof.constant, 6), found.proof.body_constant, found.outputs.tolist()
    (3.0, 1.0, [[3.0, 1.0], [3.0, 1.0]])
    """
    check_underflow()
    where = float64_device("cpu" if evaluator == "integer" else device)
    made_for = evaluators.named(rounding, evaluator, where, network)
    exact = float64_copy(network, where)
    arithmetic = evaluators.arithmetic(evaluator, network)
    proof = prove(exact, arithmetic if rounding == "sound" else None)
    evaluation: Callable[[Tensor], sound.Logits] | None = None
    if evaluator == "integer":
        evaluation = functools.partial(sound.integer_logits, quantise(exact, proof))
    elif rounding == "sound":
        evaluation = sound.Evaluation(proof, arithmetic)
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
        proof=proof,
        outputs=torch.cat(outputs),
        logits=sound.Logits.join(logits) if logits else None,
        arithmetic=arithmetic,
        evaluator=made_for,
    )


Samples = Tensor | np.ndarray[Any, Any]
"""Numbers of a data set."""


def float64_copy(network: modules.Network, device: str | torch.device = "cpu") -> modules.Network:
    """A copy in float64 that holds exactly the same numbers; on the CPU where ``device`` has no float64."""
    return copy.deepcopy(network).cpu().double().to(float64_device(device))  # mps cannot even hold a float64 tensor


def float64_device(device: str | torch.device) -> torch.device:
    """``device``, or the CPU where that device has no float64.

    >>> float64_device("mps")
    device(type='cpu')
    """
    device = torch.device(device)
    return torch.device("cpu") if device.type == "mps" else device


def as_tensors(x: object, y: object) -> tuple[Tensor, Tensor]:
    """Samples and labels as tensors; numpy arrays are copied.

    Raises:
        OptionError: anything else, such as a DataLoader.

    >>> [t.dtype for t in as_tensors(np.zeros((1, 2), np.float32), np.zeros(1, np.int32))]
    [torch.float32, torch.int32]
    """
    return _as_tensor(x), _as_tensor(y)


def _as_tensor(values: object) -> Tensor:
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub":
        # In the machine's byte order, with rows in order: torch takes no others.
        return torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
    if isinstance(values, Tensor):
        return values
    got = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
    raise OptionError(
        f"expected samples and labels as two tensors or numpy arrays of numbers, got {got}: collect a DataLoader "
        "first, x, y = (torch.cat(parts) for parts in zip(*loader))"
    )


def check_inputs(network: object, x: Tensor, batch_size: int) -> None:
    """Raise unless ``network`` is exported and ``x`` holds at least one floating-point input of its shape and range."""
    refuse_wrapper(network, "certify")
    if not isinstance(network, modules.Network):
        raise NoRuleError(
            f"expected an exported network (lipkit.modules.Network), got {type(network).__name__}: "
            "certify lipkit.export(model, input_shape)"
        )
    shape = tuple(network.input_shape)
    if tuple(x.shape[1:]) != shape or x.ndim != len(shape) + 1:
        raise ShapeError(f"expected inputs of shape (N, {', '.join(map(str, shape))}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise OptionError(f"expected floating-point inputs (images in [0, 1]), got {dtype_name(x)}")
    if len(x) == 0:
        raise OptionError("expected at least one sample to certify, got 0")
    if network.input_range is not None:
        low, high = network.input_range
        found = [float(value) for value in torch.aminmax(x.detach())]
        slack = 1e-6 * (high - low)  # of whoever scaled them
        if found[0] < low - slack or found[1] > high + slack:
            raise OptionError(
                f"expected inputs in [{low:g}, {high:g}], for which the network was made, got values from {found[0]:g} "
                f"to {found[1]:g}: rescale them (8-bit images: / 255), or set network.input_range = None"
            )
    if batch_size < 1:
        raise OptionError(f"expected batch_size >= 1, got {batch_size}")


def dtype_name(values: Tensor) -> str:
    """How a message writes the dtype of a tensor.

    >>> dtype_name(torch.zeros(1))
    'float32'
    """
    return str(values.dtype).removeprefix("torch.")
