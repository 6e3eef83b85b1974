"""The gain of every autograd Function of the package over its plain twin: the table of docs/lab/performance.md.

    python -m benchmarks.functions

Forward and backward of both, float32, one thread, process time, in turns; medians. `saved` is what autograd keeps
from the forward pass to the backward one, in MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from benchmarks.speed.clock import cpu_clock, interleaved, measuring, median, ratio
from benchmarks.speed.memory import saved_bytes
from torch import Tensor

from lipkit.conv import cayley_conv, circular, phases, spectrum, spread
from lipkit.conv.normal_matrices import (
    NormalMatrices,
    _add_gram,
    _AddGram,
    _Solution,
    _solution,
    normal_matrices,
    plain_solve,
)
from lipkit.conv.spectrum import transform_matrices
from lipkit.layers.soc import _QuickNorm
from lipkit.linalg import skew_polynomial
from lipkit.linalg.cayley import _plain as plain_product
from lipkit.linalg.cayley import _Product, factorize
from lipkit.linalg.exponential import SQUARINGS, gram_norm
from lipkit.linalg.polar import _TallPolar
from lipkit.memory import keep_freed_memory
from lipkit.modules import activations

Function = Callable[..., Any]


class Pair(NamedTuple):
    """A Function and its twin on the same inputs; each returns the output whose derivative is taken."""

    name: str
    size: str
    function: Function
    plain: Function
    inputs: tuple[Tensor, ...]


def leaf(*shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    """Normal numbers of this size that want a gradient."""
    return (size * torch.randn(shape, dtype=dtype)).requires_grad_()


# Channels, side and batch of a layer, as the papers have them.
CONVOLUTIONS = [(64, 32, 128), (128, 16, 128), (256, 8, 128)]


def _sorted_halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), dim=1)


def convolution_pairs(c: int, side: int, batch: int) -> Iterator[Pair]:
    """What a Cayley layer and a Fourier layer of these sizes call."""
    size = f"{c}@{side}, batch {batch}"
    n_real, n_pair = 4, (side**2 - 4) // 2
    x = leaf(batch, c, side, side)
    yield Pair("MaxMin", size, lambda x: activations._MaxMinShift.apply(x, 0), _sorted_halves, (x,))
    pads = (1, 1, 1, 1)
    yield Pair(
        "circular padding (circular._Pad)",
        size,
        lambda x: circular._Pad.apply(x, pads),
        lambda x: F.pad(x, pads, mode="circular"),
        (x,),
    )
    matrices = transform_matrices(side, side, dtype=torch.float32)
    real, pair = leaf(n_real, c, c, size=c**-0.5), leaf(n_pair, 2, c, c, size=c**-0.5)
    bias = leaf(c)
    yield Pair(
        "symbol on images (spectrum._Apply)",
        size,
        lambda *t: spectrum._Apply.apply(*t, *matrices),
        lambda *t: spectrum._plain(*t, matrices),
        (real, pair, bias, x),
    )
    kernel = torch.randn(c, c, 3, 3) / (3 * c**0.5)
    normal = normal_matrices(kernel, side, side)
    inputs = tuple(t.detach().requires_grad_() for t in normal[:2])

    def solved(x: Tensor, bias: Tensor, real: Tensor, pair: Tensor) -> Tensor:
        return cayley_conv.solve_form("wide", x, NormalMatrices(real, pair, None, None), bias=bias)

    def solved_plainly(x: Tensor, bias: Tensor, real: Tensor, pair: Tensor) -> Tensor:
        return plain_solve("wide", x, bias, None, NormalMatrices(real, pair, None, None))

    yield Pair("solve form (cayley_conv._Solved)", size, solved, solved_plainly, (x, bias, *inputs))
    w = leaf(n_pair, c, c, dtype=torch.complex64)
    a = leaf(n_pair, c, c, dtype=torch.complex64)
    yield Pair(
        "Gram matrix (normal_matrices._AddGram)",
        size,
        lambda a, w: _AddGram.apply(a, w, True),
        lambda a, w: _add_gram(a, w, True),
        (a, w),
    )
    rows = leaf(n_pair, c // 2, c, dtype=torch.complex64)
    well = (torch.eye(c) + 0.3 * normal.pair.detach()).requires_grad_()
    # A sandwich layer has the factors already, for its other half.
    factors = factorize(well.detach(), batch)
    yield Pair(
        "half of a transform (normal_matrices._Solution)",
        size,
        lambda *t: _Solution.apply(*t, *factors),
        _solution,
        (well, rows),
    )


def first_layer_pairs(cout: int, side: int, batch: int) -> Iterator[Pair]:
    """A first Cayley layer of three inputs."""
    x, kernel, bias = leaf(batch, 3, side, side), leaf(cout, 3, 3, 3, size=0.2), leaf(cout)
    yield Pair(
        "first layer (spread._Convolved)",
        f"3->{cout}@{side}, batch {batch}",
        spread._Convolved.apply,
        spread._plain,
        (kernel, x, bias),
    )


def matrix_pairs(n: int, batch: int) -> Iterator[Pair]:
    """What a dense layer of this width and batch, or a batch of matrices, calls."""
    size = f"{batch} of {n} x {n}"
    u = leaf(batch, n, n, size=n**-0.5)
    yield Pair(
        "Taylor exponential (linalg.skew_polynomial)",
        size,
        lambda u: skew_polynomial._TaylorExponential.apply(u, 5, SQUARINGS),
        lambda u: skew_polynomial._taylor_exponential(u, 5, SQUARINGS),
        (u,),
    )

    def plain_polar(u: Tensor) -> Tensor:
        left, _, right = torch.linalg.svd(u, full_matrices=False)
        return left @ right

    yield Pair("polar factor (linalg.polar)", size, lambda u: _TallPolar.apply(u)[0], plain_polar, (u,))


def dense_pairs(n: int, batch: int) -> Iterator[Pair]:
    """A dense Cayley layer."""
    w, x, bias = leaf(n, n, size=n**-0.5), leaf(batch, n), leaf(n)
    size = f"{n} x {n}, batch {batch}"
    yield Pair("dense layer (linalg.cayley)", size, _Product.apply, plain_product, (w, x, bias))


def norm_pairs(m: int, n: int) -> Iterator[Pair]:
    """The proved norm of SOC's skew kernels, reshaped."""
    a = leaf(m, n, size=n**-0.5)
    yield Pair(
        "norm by Lanczos steps (layers.soc)", f"{m} x {n}", lambda a: _QuickNorm.apply(a, False)[0], gram_norm, (a,)
    )


def phase_pairs(c: int, side: int, batch: int) -> Iterator[Pair]:
    """ECO's layer of kernel 3."""
    # In the memory format in which ECO layers pass their features on.
    x = torch.randn(batch, c, side, side).to(memory_format=torch.channels_last).requires_grad_()
    real, pair, bias = leaf(1, c, c, size=c**-0.5), leaf(4, 1, c, c, size=c**-0.5), leaf(c)
    matrices = transform_matrices(3, 3, dtype=torch.float32)

    def plain(real: Tensor, pair: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        return phases._plain(real, pair, bias, x, matrices, (3, 3))

    yield Pair(
        "phase form (phases._PhaseProduct)",
        f"{c}@{side}, batch {batch}",
        lambda *t: phases._PhaseProduct.apply(*t, matrices[0], (3, 3)),
        plain,
        (real, pair, bias, x),
    )


def pairs() -> Iterator[Pair]:
    """Every Function at the sizes of the papers."""
    for c, side, batch in CONVOLUTIONS:
        yield from convolution_pairs(c, side, batch)
    for batch in (32, 128):
        yield from first_layer_pairs(32, 32, batch)
    for c, side, batch in ((32, 24, 128), (128, 12, 128), (512, 3, 128)):
        yield from phase_pairs(c, side, batch)
    for n, batch in ((64, 64), (128, 5), (512, 1)):
        yield from matrix_pairs(n, batch)
    for n, batch in ((256, 128), (1024, 256)):
        yield from dense_pairs(n, batch)
    for m, n in ((128, 1152), (512, 4608)):
        yield from norm_pairs(m, n)


def step(function: Function, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """Forward and backward, with an upstream gradient that is there already."""
    upstream = torch.randn_like(function(*inputs))

    def work() -> object:
        return torch.autograd.grad(function(*inputs), inputs, upstream)

    return work


def row(pair: Pair) -> str:
    """One line of the table."""
    work = {"function": step(pair.function, pair.inputs), "plain": step(pair.plain, pair.inputs)}
    samples = interleaved(work, cpu_clock, seconds=1.0, repeats=15, least=3)
    kept = [saved_bytes(lambda f=f: f(*pair.inputs)) / 2**20 for f in (pair.function, pair.plain)]
    return (
        f"| {pair.name} | {pair.size} | {1e3 * median(samples['function']):.2f} | "
        f"{ratio(samples['plain'], samples['function']):.2f} | {kept[0]:.1f} | {kept[1]:.1f} |"
    )


def main() -> None:
    keep_freed_memory()
    torch.manual_seed(0)
    print("| Function | size | ms | plain / Function | saved MiB | plain's |\n|:--|:--|--:|--:|--:|--:|")
    with measuring("cpu"):
        for pair in pairs():
            print(row(pair), flush=True)


if __name__ == "__main__":
    main()
