"""Proved constants of a network and its float64 outputs at the samples, from which every certificate is made."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipkit import modules
from lipkit.certificates import evaluators, margins
from lipkit.certificates.evaluators import Evaluator, inner_products_only
from lipkit.errors import DataError, NoRuleError, OptionError, ShapeError, interval, warn_of_bytes
from lipkit.integer.program import Program
from lipkit.integer.quantisation import quantise
from lipkit.linalg.matrices import check_integer
from lipkit.linalg.precision import check_underflow
from lipkit.modules.chains import ChainProof, prove_chain
from lipkit.modules.guarding import guard, parts, refuse_wrapper, type_name
from lipkit.modules.storage import Contents, contents, describe, rebuilt, same_contents, stored_tensors
from lipkit.proof.roundoff import Arithmetic, check_readable
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
        """:func:`pair_constants` of this network."""
        return self.pairs or pair_constants(self.chain, classes)

    def check(self, network: modules.Network, rounding: str, made_for: Evaluator) -> None:
        """Raise unless this proof was made for exactly this network, its attributes included, and this evaluation."""
        guard(*(module for _, module in parts(network)))
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
        _check_alike(network, self.network, known, "prove this network again")


def _asked(
    network: modules.Network, rounding: str, evaluator: str, device: str | torch.device
) -> tuple[torch.device, Evaluator]:
    """The device to compute on, and the evaluator with the present settings of torch."""
    check_underflow()  # small float32 numbers would be lost on their way to float64
    where = float64_device("cpu" if evaluator == "integer" else device)  # an integer program runs on the CPU
    return where, evaluators.evaluator(evaluator, where, network, rounding)


# Attributes that no forward pass of exactly these types reads: a line of the source, the initial value of a weight.
_IDLE = {"where": (modules.Product, modules.MatrixProduct, modules.Elementary), "init": (torch.nn.PReLU,)}

# Attributes of every module that `guard` checks, or that no forward pass reads.
_NO_SWITCHES = vars(torch.nn.Module()).keys() - {"training"} | {"input_range"}


# Only values of exactly these types are compared: a subclass may define its own comparison.
_PLAIN = (bool, int, float, str, type(None), np.float64, torch.dtype, types.FunctionType, types.BuiltinFunctionType)


def _exact(value: Any) -> bool:
    """True if == compares the value reliably: one of the types `_PLAIN`, or a tuple, list or set of such values."""
    return all(map(_exact, value)) if type(value) in (tuple, list, set, torch.Size) else type(value) in _PLAIN


def exact_copy(network: modules.Network, device: str | torch.device = "cpu") -> modules.Network:
    """A float64 copy, rebuilt from what is stored and hashed; on the CPU if ``device`` has no float64.

    Raises:
        NoRuleError, OptionError: hooks, methods, attributes or buffers of the network differ from its stored form.
    """
    guard(*(module for _, module in parts(network)))
    numbers = {name: t.detach().to("cpu", torch.float64, copy=True) for name, t in stored_tensors(network).items()}
    try:
        exact = rebuilt({"network": describe(network)}, numbers, run=False)  # no trial run: the proof runs it
    except (DataError, OptionError):  # a network that no file could hold, such as one with a wrong in_features
        exact = float64_copy(network)
        for name, copied in stored_tensors(exact).items():
            if not torch.equal(copied.double().view(torch.int64), numbers[name].view(torch.int64)):
                raise OptionError(f"expected a copy with the same numbers, got others in {name!r}") from None
    exact.input_range = network.input_range
    for (_, module), (_, twin) in zip(parts(network), parts(exact), strict=True):
        for key in ("training", "inplace"):  # they are not stored
            if hasattr(module, key):
                setattr(twin, key, getattr(module, key))
    _check_alike(network, exact, "expected the module {!r} as its stored form gives it", "make it anew")
    return exact.to(float64_device(device))


def _check_alike(network: modules.Network, exact: modules.Network, expected: str, remedy: str) -> None:
    """Raise if a network differs from the float64 copy of its stored form: in types, attributes or unstored buffers."""
    for (name, module), (_, twin) in zip(parts(network), parts(exact), strict=True):
        kind, unread = type(module), {key for key, types in _IDLE.items() if type(module) in types}
        pairs = {"type": (kind, type(twin))}
        # No forward pass reads an attribute that the copy and its class lack.
        for key in dict.fromkeys((*vars(module), *vars(twin))):
            if key not in _NO_SWITCHES | unread and hasattr(module, key) and hasattr(twin, key):
                pairs[key] = getattr(module, key), getattr(twin, key)
        if kind is type(twin) and getattr(module, "padding_mode", None) == "zeros":
            pairs.pop("_reversed_padding_repeated_twice", None)  # torch reads it in other modes only
        for key, pair in pairs.items():
            if key != "type" and not all(map(_exact, pair)):
                what = f"{key} as a number of Python or a word, got {pair[0]!r}"
                raise OptionError(f"{type_name(kind)}: expected {what}: make a tensor a buffer")
            value, then = (tuple(v) if isinstance(v, list) else v for v in pair)
            if value != then:
                raise OptionError(f"{expected.format(name)}, with {key} = {then!r}, got {value!r}: {remedy}")
        for key in twin._non_persistent_buffers_set:  # the twin has made them anew, from its sizes
            now, anew = getattr(module, key), getattr(twin, key).cpu()
            if not torch.equal(now.cpu(), anew.to(now.dtype)):
                raise OptionError(f"expected {key!r} of {module} as its sizes give it, got other numbers: load it anew")


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
    return Proof(
        constant=chain.constant,
        body_constant=chain.body_constant,
        network_sha256=modules.sha256(network),
        rounding=rounding,
        evaluator=made_for,
        chain=chain,
        arithmetic=arithmetic,
        network=exact,
        stored=[(text, numbers.copy()) for text, numbers in contents(network)],  # a copy: the caller may go on training
        pairs=pair_constants(chain, n) if chain.last and (n := len(chain.last.weight)) <= 256 else None,
        device=where,
        program=program,
        logits=logits,
    )


def pair_constants(proof: ChainProof, classes: int) -> tuple[Tensor, Tensor | None]:
    """Proved constants (K, K) of differences of two outputs; and the distances of the last layer's rows, or None."""
    constants = margins.global_constants(proof.constant * proof.slack, classes)
    if proof.last is None or proof.body_constant is None:
        return constants, None
    distances = margins.row_distances(proof.last.weight.cpu())
    body = margins.last_layer_constants(distances, proof.body_constant * proof.slack)
    return torch.minimum(constants, body), margins.last_layer_constants(distances, 1.0)


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
        if not isinstance(proof, Proof):
            raise OptionError(f"proof: expected the result of lipkit.prove, got {type(proof).__name__}")
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
    proof = prove(network) if proof is None else proof
    name, where = proof.evaluator.option, proof.device
    return measure(network, x, rounding=proof.rounding, evaluator=name, device=where, proof=proof)


Samples = Tensor | np.ndarray[Any, Any]
"""Samples or labels."""


def float64_copy(network: modules.Network) -> modules.Network:
    """A copy in float64, on the CPU, that holds exactly the same numbers."""
    return copy.deepcopy(network).cpu().double()  # first to the CPU: mps cannot even hold a float64 tensor


def float64_device(device: str | torch.device) -> torch.device:
    """``device``, or the CPU where that device has no float64."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise OptionError(f"device: expected a device of torch, such as 'cpu' or 'cuda', got {device!r}") from None
    return torch.device("cpu") if found.type == "mps" else found


def as_tensor(values: object) -> Tensor:
    """Samples or labels as a tensor; numpy arrays are copied, and anything else, such as a DataLoader, is refused."""
    kinds = "" if isinstance(values, np.ma.MaskedArray) else "fiub"
    if isinstance(values, np.ndarray) and values.dtype.kind in kinds and values.dtype.itemsize <= 8:
        # torch takes only the machine's byte order.
        return torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
    if isinstance(values, Tensor):
        check_readable(values)
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
