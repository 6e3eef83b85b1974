"""Proved constants of a network and its float64 outputs at the samples, from which every certificate is made."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipkit import modules
from lipkit.certificates import evaluators, margins
from lipkit.certificates.evaluators import Evaluator, inner_products_only
from lipkit.errors import NoRuleError, OptionError, ShapeError, interval, warn_of_bytes
from lipkit.integer.program import Program
from lipkit.integer.quantisation import quantise
from lipkit.linalg.matrices import check_integer
from lipkit.linalg.precision import check_underflow
from lipkit.modules.chains import ChainProof, prove_chain
from lipkit.modules.guarding import refuse_wrapper
from lipkit.modules.storage import (
    Contents,
    check_alike,
    contents,
    digest,
    exact_copy,
    float64_device,
    guard_parts,
    same_contents,
)
from lipkit.proof.roundoff import WIDE, Arithmetic, check_readable
from lipkit.shown import Shown, Told, upper


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Proof(Shown):
    """Proved constants of a network and rounding errors of its modules in one arithmetic, from `lipkit.prove`.

    A proof holds its own float64 copy of the network and is never stored: certificates made with it hold for exactly
    the numbers of `network_sha256`.

    Attributes:
        constant: proved upper bound L of the network's l2 Lipschitz constant, rounded up; `inf` where nothing is known.
        body_constant: the same for everything before a last linear layer; None without one.
        network_sha256: of the network that was proved (`lipkit.modules.sha256`).
        rounding: ``"sound"`` or ``"ignore"``.
        evaluator: whose arithmetic was proved, and the settings it was proved under.
        chain: constants and rounding errors, module by module.
        arithmetic: of the evaluator.
        network: the copy in float64, on `device`.
        stored: a copy of what a file of the network holds (`lipkit.modules.storage.contents`), to recognise it.
        pairs: `pair_constants` of a network that ends in a linear layer with at most 256 outputs; else None.
        program: of the evaluator ``"integer"``; else None.
        logits: maps inputs in float64 to outputs with their rounding errors; None where rounding is ignored.
    """

    constant: float
    body_constant: float | None
    network_sha256: str
    rounding: str
    evaluator: Evaluator
    chain: ChainProof
    arithmetic: Arithmetic
    network: modules.Network
    stored: Contents
    pairs: tuple[Tensor, Tensor | None] | None
    device: torch.device
    program: Program | None
    logits: Callable[[Tensor], margins.Logits] | None

    def describe(self) -> str:
        """The proved constant, and what it was proved for."""
        included = "included" if self.rounding == "sound" else "ignored"
        return (
            f"L <= {upper(self.constant)} (proved), rounding {included}\n"
            f"from the stored numbers, for {self.evaluator.name} evaluation"
        )

    def pair_constants(self, classes: int) -> tuple[Tensor, Tensor | None]:
        """`lipkit.certificates.margins.pair_constants` of this network."""
        return self.pairs or margins.pair_constants(self.chain, classes)

    def check(self, network: modules.Network, rounding: str, made_for: Evaluator) -> None:
        """Raise unless this proof was made for exactly this network, its attributes included, and this evaluation."""
        guard_parts(network)
        wanted = (rounding, made_for.name, made_for.device)
        got = (self.rounding, self.evaluator.name, self.evaluator.device)
        if wanted != got or not same_contents(contents(network), self.stored):
            asked, made = ("rounding={!r}, evaluator={!r} on {}".format(*each) for each in (wanted, got))
            raise OptionError(
                f"proof: expected one of the network with sha256 {modules.sha256(network)} for {asked}, got one of "
                f"{self.network_sha256} for {made}: prove this network with lipkit.prove"
            )
        if self.program is not None and network.input_range != self.network.input_range:
            raise OptionError(
                f"proof: expected one for inputs in {network.input_range}, got one for {self.network.input_range}: the "
                "integer program depends on them, prove this network again"
            )
        known = "proof: expected the module {!r} as it was proved"
        check_alike(network, self.network, known, "prove this network again")


def _asked(
    network: modules.Network, rounding: str, evaluator: str, device: str | torch.device
) -> tuple[torch.device, Evaluator]:
    """The device to compute on, and the evaluator with the present settings of torch."""
    check_underflow()  # small float32 numbers would be lost on their way to float64
    where = float64_device("cpu" if evaluator == "integer" else device)  # an integer program runs on the CPU
    return where, evaluators.evaluator(evaluator, where, network, rounding)


def prove(
    network: modules.Network,
    *,
    rounding: str = "sound",
    evaluator: str = "float64",
    device: str | torch.device = "cpu",
) -> Proof:
    """Prove once what all certificates of a network need; `lipkit.certify` takes the result any number of times.

    **Guarantee.** As for `lipkit.certify`: the constants are proved in float64 from the stored numbers and rounded up.
    Each use compares the network with the proof, byte by byte, and refuses a proof of other numbers, of another
    structure, or for another evaluator. A certificate is the same with the proof and without.

    Args:
        network: a `lipkit.modules.Network`, from `lipkit.export` or `lipkit.load`.
        rounding, evaluator, device: as they will be given to `lipkit.certify`. The program of ``"integer"`` is part of
            what is proved.

    Cost:
        The bounds of all layers, and memory for a copy and three float64 numbers per number of the network.

    Raises:
        NoRuleError: ``network`` is not an exported network, or holds a module without a rule.
        OptionError: an unknown ``rounding`` or ``evaluator``, or settings of torch whose arithmetic is not IEEE or
            flushes.

    >>> net = modules.Network([torch.nn.Linear(2, 2, bias=False)], (2,))
    >>> _ = net[0].weight.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    >>> proof = prove(net)
    >>> round(proof.constant, 6), proof.body_constant
    (3.0, 1.0)
    """
    check_network(network, "prove")
    where, made_for = _asked(network, rounding, evaluator, device)
    exact = exact_copy(network, where)
    arithmetic = evaluators.arithmetic(evaluator, network)
    chain = prove_chain(exact, arithmetic if rounding == "sound" else None)
    program: Program | None = None
    logits: Callable[[Tensor], margins.Logits] | None = None
    if evaluator == "integer":
        with torch.no_grad():
            program = quantise(exact, chain)
        logits = functools.partial(margins.integer_logits, program)
    elif rounding == "sound":
        zero = torch.zeros(1, *network.input_shape, dtype=torch.float64, device=where)
        logits = margins.Evaluation(chain, arithmetic, zero)
    stored = [(text, numbers.copy()) for text, numbers in contents(network)]  # a copy: the caller may go on training
    return Proof(
        constant=chain.constant,
        body_constant=chain.body_constant,
        network_sha256=digest(stored),
        rounding=rounding,
        evaluator=made_for,
        chain=chain,
        arithmetic=arithmetic,
        network=exact,
        stored=stored,
        pairs=margins.pair_constants(chain, n) if chain.last and (n := len(chain.last.weight)) <= 256 else None,
        device=where,
        program=program,
        logits=logits,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """Outputs of a proved network at N samples.

    Attributes:
        proof: of the network.
        outputs: (N, K) float64, on the CPU.
        logits: the same outputs with their rounding errors; None where rounding is ignored.
        evaluator: the evaluation that certificates hold for, and the settings of the measurement.
    """

    proof: Proof
    outputs: Tensor
    logits: margins.Logits | None
    evaluator: Evaluator

    def errors(self, distance: float) -> tuple[Tensor, Tensor]:
        """Bounds (N, 1 or K) of the errors of `outputs`, and of the machine's within ``distance``; 0 if ignored."""
        if self.logits is None:
            zero = torch.zeros(len(self.outputs), 1, dtype=torch.float64)
            return zero, zero
        last = self.proof.chain.last
        weight = None if last is None else last.weight.detach().cpu()
        return margins.output_errors(self.logits, distance, weight, self.proof.arithmetic)


def measure(
    network: modules.Network,
    x: Tensor,
    *,
    rounding: str,
    evaluator: str,
    device: str | torch.device,
    proof: Proof | None,
    batch_size: int = 128,
    check: Callable[[Tensor], None] | None = None,
    progress: Told | None = None,
) -> Measurement:
    """Evaluate a network in float64 at inputs that `check_inputs` accepted; without a ``proof``, prove it first.

    ``check`` gets the outputs of each batch and may raise; all other arguments are those of `lipkit.certify`.
    """
    check_integer("batch_size", batch_size, 1)
    if proof is None:
        proof = prove(network, rounding=rounding, evaluator=evaluator, device=device)
        made_for = proof.evaluator
    else:
        check_proof(proof)
        made_for = _asked(network, rounding, evaluator, device)[1]
        proof.check(network, rounding, made_for)
    return evaluate(proof, x, made_for, batch_size, check, progress)


def evaluate(
    proof: Proof, x: Tensor, made_for: Evaluator, batch_size: int = 128, check: Callable[[Tensor], None] | None = None,
    progress: Told | None = None,
) -> Measurement:  # fmt: skip
    """Evaluate the network of a proof in float64, batch by batch: `measure` without its checks."""
    outputs, logits = [], []
    with torch.no_grad(), inner_products_only(proof.device, proof.rounding == "sound"):
        for part in x.split(batch_size):
            part = part.to(device=proof.device, dtype=torch.float64, copy=True)  # modules may work in place
            if proof.logits is None:
                outputs.append(proof.network(part).cpu())
            else:
                logits.append(proof.logits(part))
                outputs.append(logits[-1].values)
            if check is not None:
                check(outputs[-1])
            if progress is not None:
                progress("evaluated", sum(map(len, outputs)), len(x))
    return Measurement(proof, torch.cat(outputs), margins.merged(logits, torch.cat) if logits else None, made_for)


def measure_by(network: modules.Network, x: Tensor, proof: Proof | None) -> Measurement:
    """`measure` with the rounding, evaluator and device of a proof; None proves the network with the defaults."""
    check_inputs(network, x)
    proof = prove(network) if proof is None else check_proof(proof)
    name, where = proof.evaluator.option, proof.device
    return measure(network, x, rounding=proof.rounding, evaluator=name, device=where, proof=proof)


def check_proof(proof: Proof) -> Proof:
    """Return ``proof``; raise unless it is the result of `prove`."""
    if not isinstance(proof, Proof):
        raise OptionError(f"proof: expected the result of lipkit.prove, got {type(proof).__name__}")
    return proof


Samples = Tensor | np.ndarray[Any, Any]
"""Samples or labels."""


def as_tensor(values: object) -> Tensor:
    """Samples or labels as a tensor; numpy arrays are copied, and anything else, such as a DataLoader, is refused."""
    kinds = "" if isinstance(values, np.ma.MaskedArray) else "fiub"
    if isinstance(values, np.ndarray) and values.dtype.kind in kinds and values.dtype.itemsize <= 8:
        # torch takes only the machine's byte order.
        return torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
    if isinstance(values, Tensor):
        check_readable(values)
        if values.is_complex() or (values.is_floating_point() and values.dtype not in WIDE):
            raise OptionError(f"expected real samples and labels of 16 to 64 bits, got {dtype_name(values)}")
        return values
    kind = "a masked array" if isinstance(values, np.ma.MaskedArray) else "an array"
    got = f"{kind} of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
    raise OptionError(
        f"expected samples and labels as two tensors or numpy arrays of numbers, got {got}: collect a DataLoader "
        "first, x, y = (torch.cat(parts) for parts in zip(*loader))"
    )


def check_network(network: object, verb: str) -> None:
    """Raise unless ``network`` is exported; the message tells users to ``verb`` the export instead."""
    refuse_wrapper(network, verb)
    if not isinstance(network, modules.Network):
        raise NoRuleError(
            f"expected an exported network (lipkit.modules.Network), got {type(network).__name__}: "
            f"{verb} lipkit.export(model, input_shape)"
        )


def check_inputs(network: modules.Network, x: Tensor) -> tuple[float, float]:
    """The range of x; raises unless ``network`` is exported and ``x`` holds finite inputs of its shape and range."""
    check_network(network, "certify")
    shape = tuple(network.input_shape)
    if tuple(x.shape[1:]) != shape or x.ndim != len(shape) + 1:
        hint = " (channels last: x.permute(0, 3, 1, 2))" if (*x.shape[3:], *x.shape[1:3]) == shape else ""
        raise ShapeError(f"expected inputs of shape (N, {', '.join(map(str, shape))}), got {tuple(x.shape)}{hint}")
    if not x.is_floating_point():
        raise OptionError(f"expected floating-point inputs (images in [0, 1]), got {dtype_name(x)}")
    if len(x) == 0:
        raise OptionError("expected at least one sample to certify, got 0")
    least, most = (float(value) for value in torch.aminmax(x.detach()))
    if not (math.isfinite(least) and math.isfinite(most)):
        raise OptionError("expected finite inputs, got NaN or infinity")
    if network.input_range is None:
        warn_of_bytes(x, "x / 255, or network.input_range = (0, 255) if the network takes them so")
    else:
        low, high = interval("input_range", network.input_range, finite=False)
        slack = 1e-6 * (high - low)  # for rounding when they were scaled
        if least < low - slack or most > high + slack:
            raise OptionError(
                f"expected inputs in [{low:g}, {high:g}], for which the network was made, got values from {least:.9g} "
                f"to {most:.9g}: rescale them (8-bit images: / 255), or set network.input_range = None"
            )
    return least, most


def dtype_name(values: Tensor) -> str:
    """The dtype of a tensor as a message writes it."""
    return str(values.dtype).removeprefix("torch.")
