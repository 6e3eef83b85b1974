"""What products of fewer digits do to orthogonality: singular values of layers in TF32 and in bfloat16.

python benchmarks/precision.py

A layer is applied to a basis, once as it trains and once exported, and the table shows how far the singular values of
the matrix that results are from 1. TF32 and bfloat16 are emulated: both factors of every matrix product and of every
convolution are rounded to 11 and to 8 significant bits, products and sums stay in float32, inverses and factorisations
are untouched, as on an accelerator. Where this machine has bfloat16 products of its own they are shown beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lipkit import export
from lipkit.layers.families import FAMILIES
from lipkit.testing.reference import dense_matrix

CHANNELS, SIDE = 16, 8
ORTHOGONAL = ("cayley", "eco", "soc", "bcop", "cayley_bcop", "lot")
# Position of the first factor among the arguments.
FACTORS = {"mm": 0, "bmm": 0, "convolution": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}


def significant(x: Tensor, bits: int) -> Tensor:
    """Float32 numbers rounded to nearest with ``bits`` significant bits, and to even between two.

    >>> significant(torch.tensor([1.0, 1 + 2**-11, 1 + 3 * 2**-11]), 11).tolist() == [1.0, 1.0, 1 + 2**-9]
    True
    """
    if x.is_complex():
        return torch.view_as_complex(significant(torch.view_as_real(x.resolve_conj()), bits))
    dropped = 24 - bits
    whole = x.contiguous().view(torch.int32)
    last = (whole >> dropped) & 1
    return (((whole + (1 << (dropped - 1)) - 1 + last) >> dropped) << dropped).view(torch.float32)


class Rounded(TorchDispatchMode):
    """The factors of float32 products are rounded to so many bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = FACTORS.get(func.overloadpacket.__name__)
        if first is not None and args[first].dtype in (torch.float32, torch.complex64):
            args = list(args)
            args[first : first + 2] = [significant(t, self.bits) for t in args[first : first + 2]]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def of_this_machine() -> Iterator[None]:
    """Float32 products of matrices and convolutions by oneDNN in bfloat16."""
    backends = torch.backends.mkldnn
    backends.matmul.fp32_precision = backends.conv.fp32_precision = "bf16"
    try:
        yield
    finally:
        backends.matmul.fp32_precision = backends.conv.fp32_precision = "none"


def layer_of(name: str) -> nn.Module:
    """A layer without bias, some way from where it was born."""
    torch.manual_seed(0)
    layer = FAMILIES[name].conv(CHANNELS, CHANNELS, 4 if name == "eco" else 3, bias=False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * parameter.abs().mean() * torch.randn_like(parameter))
    return layer.eval()


def distance_from_one(f: Callable[[Tensor], Tensor], arithmetic: Any) -> float:
    """The largest ``|s - 1|`` of the singular values of ``f`` as evaluated in this arithmetic."""
    with torch.no_grad(), arithmetic:
        matrix = dense_matrix(f, (CHANNELS, SIDE, SIDE), torch.float32)
    return float(np.abs(np.linalg.svd(matrix.astype(np.float64), compute_uv=False) - 1).max())


def main() -> None:
    """Print the table."""
    arithmetics = {
        "float32": contextlib.nullcontext,
        "TF32": lambda: Rounded(11),
        "bfloat16": lambda: Rounded(8),
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        arithmetics["bfloat16 of this CPU"] = of_this_machine
    print("| layer | form | " + " | ".join(arithmetics) + " |")
    print("|:--|:--|" + "--:|" * len(arithmetics))
    for name in ORTHOGONAL:
        layer = layer_of(name)
        for form, f in (("training", layer), ("exported", export(layer, (CHANNELS, SIDE, SIDE)))):
            found = [f"{distance_from_one(f, make()):.1e}" for make in arithmetics.values()]
            print(f"| {name} | {form} | " + " | ".join(found) + " |")


if __name__ == "__main__":
    main()
