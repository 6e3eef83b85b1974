"""A network compared with another runtime: outputs, predictions and certified accuracy computed there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lipkit import modules
from lipkit.certificates import certify, margins
from lipkit.certificates.measurement import prove
from lipkit.errors import CertificateViolation, OptionError, ShapeError
from lipkit.files import write_atomic
from lipkit.modules.network import first_floating
from lipkit.modules.storage import float64_copy
from lipkit.text import format_radius

# Inputs (N, *input_shape) to outputs, whatever computes them.
Runtime = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RuntimeCheck:
    """The agreement of a runtime with the float64 network, as `check_runtime` finds it.

    Attributes:
        difference: largest absolute difference between an output of the runtime and of the float64 network.
        same: number of ``samples`` with the same prediction (all of them for a regression).
        certified, runtime: accuracy certified at each l2 radius of ``eps``, from the float64 logits and the runtime's.
    """

    samples: int
    difference: float
    same: int
    eps: tuple[float, ...] = ()
    certified: tuple[float, ...] = ()
    runtime: tuple[float, ...] = ()

    def __str__(self) -> str:
        same = f", {self.same} same predictions" if self.eps else ""  # a regression has none
        lines = [f"{self.samples} samples: outputs within {self.difference:.3g} of float64{same}"]
        for eps, ours, theirs in zip(self.eps, self.certified, self.runtime, strict=True):
            lines.append(
                f"certified({format_radius(eps)})  {100 * ours:.2f} % here, {100 * theirs:.2f} % in the runtime"
            )
        return "\n".join(lines)


def check_runtime(
    network: modules.Network,
    runtime: Runtime,
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    eps: Sequence[float] = (36 / 255,),
    tolerance: float = 1e-4,
    batch_size: int = 256,
) -> RuntimeCheck:
    r"""Evaluate samples in a runtime, compare with the network in float64, and certify again from its logits.

    The constants are proved for the stored numbers, which the runtime has as well; its margins replace the float64
    ones in ``r = min_i (y_t - y_i) / K_ti``. The rounding of the runtime is measured on these samples, not bounded.

    Args:
        network: the exported network.
        runtime: the same network elsewhere (`lipkit.interop.onnx_runtime`, ...).
        x: (N, *input_shape); None: `random_inputs`. ``batch_size`` of them are evaluated at once.
        y: (N,) labels; None, or (N, d) targets of a regression: only outputs are compared.
        eps: radii at which certified accuracies are compared.
        tolerance: largest difference of an output that is accepted, relative to the largest output; a hundred times
            the error of the network's own rounding is allowed besides.

    Raises:
        CertificateViolation: an output differs by more than ``tolerance``: the runtime computes another function.
        ShapeError, OptionError: outputs of another shape, no sample, or ``y`` that `lipkit.certify` refuses.
    """
    x = random_inputs(network) if x is None else x.cpu()
    if len(x) == 0:
        raise OptionError("expected at least one sample to check a runtime with, got 0")
    exact, same = float64_copy(network), module_runtime(network)
    outputs = []
    for part in x.split(batch_size):
        with torch.no_grad():
            outputs.append((exact(part.double()), same(part).double(), runtime(part).double()))
        ours, _, theirs = outputs[-1]
        if theirs.shape != ours.shape:
            raise ShapeError(f"expected outputs of shape {tuple(ours.shape)}, got {tuple(theirs.shape)}")
    wanted, own, got = map(torch.cat, zip(*outputs, strict=True))
    difference = float((wanted - got).abs().max())
    limit = tolerance * float(wanted.abs().max()) + 100 * float((wanted - own).abs().max())
    if not difference <= limit:  # also for NaN
        raise CertificateViolation(
            f"expected outputs of the runtime within {limit:.3g} of the network's, got a difference of {difference:.3g}"
        )
    if y is None or y.is_floating_point():
        return RuntimeCheck(len(x), difference, len(x))
    proof, labels = prove(network), y.cpu()
    certificate = certify(network, x, y, batch_size=batch_size, proof=proof)
    radius = margins.radii(got, labels, proof.pair_constants(got.shape[1])[0])
    correct, same_class = margins.predictions(got) == labels, wanted.argmax(1) == got.argmax(1)
    own_share = tuple(certificate.accuracy(value, large_eps=True) for value in eps)
    other_share = tuple(float((correct & (radius > value)).double().mean()) for value in eps)
    return RuntimeCheck(len(x), difference, int(same_class.sum()), tuple(eps), own_share, other_share)


def module_runtime(module: nn.Module) -> Runtime:
    """A module of torch as a runtime: evaluated as it is, without gradients."""
    first = first_floating(module)

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = module(x.to(device=first.device, dtype=first.dtype))
        return out.cpu()

    return run


def write_checked(files: Mapping[Path, bytes], check: Callable[[Path], None]) -> Path:
    """Write files of one folder once ``check``, called with the path of the first draft, has accepted the drafts.

    Returns the path of the first file.
    """
    first = next(iter(files))
    with tempfile.TemporaryDirectory() as folder:
        for path, content in files.items():
            Path(folder, path.name).write_bytes(content)
        check(Path(folder, first.name))
    first.parent.mkdir(parents=True, exist_ok=True)
    for path, content in reversed([*files.items()]):
        write_atomic(path, content)
    return first


def random_inputs(network: modules.Network) -> Tensor:
    """Four random inputs from the network's range, or [-2, 2], in its dtype; always the same."""
    low, high = network.input_range or (-2.0, 2.0)
    dtype = first_floating(network).dtype
    drawn = torch.rand(4, *network.input_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (low + (high - low) * drawn).to(dtype)  # in float64: a range wider than float16 gives no NaN
