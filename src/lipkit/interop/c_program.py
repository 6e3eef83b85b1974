"""The integer program of a network as one C99 file and a header, with its certified radius."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch

from lipkit import modules
from lipkit.certificates import margins
from lipkit.certificates.margins import pair_constants
from lipkit.certificates.measurement import prove
from lipkit.errors import CertificateViolation, OptionError
from lipkit.integer import Program, c_source
from lipkit.interop.check import Runtime, random_inputs, write_checked
from lipkit.modules.chains import ChainProof
from lipkit.proof.roundoff import FLOAT64


def integer_program(network: modules.Network) -> tuple[Program, ChainProof]:
    """The integer program of an exported network, and the proof in float64 of its constants.

    Raises:
        NoRuleError, OptionError: as `lipkit.integer.quantise`.

    >>> net = modules.Network([torch.nn.Linear(2, 3)], (2,))
    >>> net.input_range = (0.0, 1.0)
    >>> integer_program(net)[0](torch.zeros(1, 2)).shape
    torch.Size([1, 3])
    """
    proof = prove(network, evaluator="integer")
    assert proof.program is not None
    return proof.program, proof.chain


def write_c(network: modules.Network, path: str | Path, prefix: str = "lipkit") -> Path:
    """Write the integer program of an exported network as a C99 file, and a header of the same name beside it.

    The program is the one that ``certify(..., evaluator="integer")`` certifies, bit for bit, on every target with
    integers of 32 and 64 bits; it computes the certified radius as well, rounded down. The header states a proved bound
    of the distance of its outputs from the exact ones. With ``-DLIPKIT_MAIN``, a ``main`` reads inputs from a file.

    Args:
        network: with an ``input_range``; with a single output, the class is always 0.
        path: of the C file, such as ``network.c``.
        prefix: of the names that the header declares.

    Raises:
        NoRuleError: a module that no integer program can compute.
        OptionError: no ``input_range``, nothing to compute, a prefix that is not a C name, or a path without ``.c``.
        CertificateViolation: compiled, it gives other bits for random inputs; no file is left.
    """
    if not (prefix.isascii() and prefix.isidentifier()):
        raise OptionError(f"prefix: expected a name of C, got {prefix!r}")
    program, proof = integer_program(network)
    if not program.operations:
        raise OptionError("expected a network that computes something, got one that returns its input")
    path = Path(path)
    if path.suffix != ".c" or not re.fullmatch(r"[\w.-]+", path.name, re.ASCII):
        raise OptionError(f"expected a file name of letters, digits and -_. that ends in .c, got {path.name!r}")
    header = path.with_suffix(".h")
    source, declared = c_source.c_files(
        program, _radii(program, proof), sha256=modules.sha256(network), header=header.name, prefix=prefix
    )

    def check(draft: Path) -> None:
        if c_source.compiler() is not None:
            compiled, x = c_source.compile_c(draft, draft.with_name("network"), ()), random_inputs(network)
            found = c_source.run_c(compiled, program.quantise(x)).logits
            if not torch.equal(found.double() * 2.0**-program.fraction, program(x)):
                raise CertificateViolation(f"expected {path} to compute the integer program bit for bit, it does not")

    return write_checked({path: source.encode(), header: declared.encode()}, check)


def _radii(program: Program, proof: ChainProof) -> c_source.Radii:
    """The errors and rates, as integers, from which the C program computes its radii."""
    classes = program.operations[-1][0].size
    constants, rows = pair_constants(proof, classes)
    logits = margins.integer_logits(program, torch.zeros(classes, *program.input_shape))
    last_weight = None if proof.last is None else proof.last.weight.cpu()
    error = float(margins.output_errors(logits, 0.0, last_weight, FLOAT64)[1].max()) * 2.0**program.fraction
    if not math.isfinite(error):
        raise OptionError(f"expected outputs whose proved error is finite, got {error}: the weights are too large")
    at, slope = margins.margin_errors(logits, torch.arange(classes), rows)
    errors = (at * 2.0**program.fraction * (1 + 2.0**-40)).ceil().clamp_max(2.0**40)  # above 2^40 no margin is left
    # 2^-40 covers one addition and one division in float64; a margin has at most 33 bits.
    rates = 2.0 ** (c_source.RADIUS_FRACTION - program.fraction) / (constants + slope) * (1 - 2.0**-40)
    moving = rates[rates.isfinite() & (rates > 0)]
    fraction = min(max(29 - math.frexp(float(moving.max()))[1], 0), 62) if len(moving) else 0  # rates below 2^29
    stored_rates = torch.where(rates.isinf(), -1.0, (rates * 2.0**fraction).floor().clamp_max(2.0**29))
    tables = errors.long().flatten().tolist(), stored_rates.long().flatten().tolist()
    return c_source.Radii(classes, *tables, fraction, math.ceil(error))


def c_runtime(source: str | Path, network: modules.Network, folder: str | Path) -> Runtime:
    """The C program of a network, compiled into a folder; without a compiler the same operations in torch.

    Raises:
        RunError: the compiler refuses the file. NoRuleError, OptionError: as `integer_program`.
    """
    program, _ = integer_program(network)
    if c_source.compiler() is None:
        return program
    compiled = c_source.compile_c(source, Path(folder) / "network")
    return lambda x: c_source.run_c(compiled, program.quantise(x)).logits.double() * 2.0**-program.fraction
