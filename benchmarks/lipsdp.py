"""The tables of docs/lab/lipsdp.md: what the LMI's proof of a gain costs, what it gains over the product of norms.

    python benchmarks/lipsdp.py > docs/lab/lipsdp.md

Process time on one thread; about six minutes of it in all.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from lipkit.bounds.lmi import lmi_matrix, proves_gain
from lipkit.bounds.lmi_solver import GainProgram
from lipkit.certificates import lipsdp
from lipkit.modules import Add, Graph, Network

Result = TypeVar("Result")
NETWORKS = [
    [4, 20, 20, 20, 3],
    [12, 64, 64, 4],
    [4, 60, 60, 60, 3],
    [4, 100, 100, 100, 3],
    [4, 200, 200, 200, 3],
    [16, *[64] * 8, 4],
    [10, *[128] * 8, 10],
    [784, 256, 256, 10],
    [784, 190, 190, 128, 10],
    [4, 1000, 3],
    [4, 400, 400, 400, 3],
    [784, 1024, 1024, 10],
]
# Residual blocks: their number, their width, and the units of each.
BLOCKS = [(4, 32, 64), (4, 64, 128), (8, 64, 128), (8, 64, 256)]
# A network, and the most hidden units in an LMI: all, then halves, then none.
SPLIT = ([16, *[64] * 8, 4], (512, 256, 128, 64, 63))


def mlp(sizes: list[int]) -> Network:
    """A random network; with ReLU, though no proof here depends on which activation it is."""
    generator = torch.Generator().manual_seed(0)
    modules: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layer = nn.Linear(n, m, dtype=torch.float64)
        layer.weight.data = torch.randn(m, n, generator=generator, dtype=torch.float64) / n**0.5
        modules += [layer, nn.ReLU()]
    return Network(modules[:-1], (sizes[0],))


def residual(blocks: int, width: int, units: int) -> Network:
    """16 inputs, blocks ``x + W relu(V x + b)``, 4 outputs, as torch initialises them."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(16, width)]
    for _ in range(blocks):
        layers = [nn.Linear(width, units), nn.ReLU(), nn.Linear(units, width)]
        modules.append(Graph([*layers, Add(1, 1)], [[0], [1], [2], [0, 3]]))
    return Network([*modules, nn.Linear(width, 4)], (16,)).double()


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Result and seconds of process time."""
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def name(sizes: list[int]) -> str:
    return " - ".join(str(n) for n in sizes)


def row(sizes: list[int]) -> None:
    """Print one line of the table."""
    network = mlp(sizes)
    proof, seconds = timed(lambda: lipsdp.solve(network))
    proved, check = timed(lambda: lipsdp.verify(network, proof.gain, proof.multipliers))
    if not proved:
        raise RuntimeError(f"expected a gain that verify proves, got {proof.gain} of {sizes}")
    cells = (
        name(sizes), sum(sizes), f"{seconds:.2f}", proof.steps, f"{check:.3f}", f"{proof.gain:.4g}",
        f"{proof.product:.4g}", f"{proof.product / proof.gain:.2f}",
    )  # fmt: skip
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def one_step(sizes: list[int]) -> tuple[float, float]:
    """Seconds of one step near the start, with its line search, and of one proof."""
    network = mlp(sizes)
    weights = [m.weight for m in network if isinstance(m, nn.Linear)]
    ones = [torch.ones(n, dtype=torch.float64) for n in sizes[1:-1]]
    _, check = timed(lambda: proves_gain(weights, ones, 1e3))
    program = GainProgram([w / torch.linalg.matrix_norm(w, 2) for w in weights])
    start = torch.ones(1 + sum(sizes[1:-1]), dtype=torch.float64)
    start[0] = 1.1
    _, step = timed(lambda: program.minimum(start, 0.0, 2))
    return step / 2, check


def clarabel_gain(network: Network) -> tuple[float, float]:
    """The same semidefinite program by a general conic solver: its gamma (not proved) and seconds."""
    import clarabel
    from scipy import sparse

    weights = [m.weight for m in network if isinstance(m, nn.Linear)]
    widths = [w.shape[0] for w in weights[:-1]]

    def entries(gain: float, multipliers: torch.Tensor) -> np.ndarray:
        h = lmi_matrix(weights, list(multipliers.split(widths)), gain).numpy()
        rows, columns = np.triu_indices(len(h))
        order = np.lexsort((rows, columns))
        return (h * np.where(np.eye(len(h)) == 1, 1, 2**0.5))[rows[order], columns[order]]

    # H is affine in gamma and the multipliers: its columns are differences.
    ones = torch.ones(sum(widths), dtype=torch.float64)
    at_one = entries(1.0, ones)
    unit = torch.eye(len(ones), dtype=torch.float64)
    columns = np.stack([entries(2.0, ones), *(entries(1.0, ones + e) for e in unit)], axis=1) - at_one[:, None]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    goal, n = np.eye(columns.shape[1])[0], columns.shape[1]
    cone = [clarabel.PSDTriangleConeT(weights[0].shape[1] + sum(w.shape[0] for w in weights))]
    problem = clarabel.DefaultSolver(
        sparse.csc_matrix((n, n)), goal, sparse.csc_matrix(-columns), at_one - columns.sum(1), cone, settings
    )
    solution, seconds = timed(problem.solve)
    return float(solution.x[0]), seconds


INTRODUCTION = """# Time and size of LipSDP

`lipsdp.solve` finds multipliers of the LMI by a primal-dual method that uses its structure, and proves the gain
that they give: two layers of 256 take 2 to 5 seconds, two of 1,024 two minutes. `lipsdp.verify` proves a gain with
given multipliers, such as an LBDN's own.

Both take every run of dense layers with activations of slope in [0, 1] in a network: in a chain, between other
modules, in the branches of a graph. What is linear between two activations (a product and a sum written apart,
scalings, several products, heads that are summed or concatenated) counts as one layer. `lipsdp.attach` gives the
multipliers to the network, and `lipkit.lipschitz` then uses them: for three public ACAS Xu networks the gain falls by
factors of 51 to 572.

Made by `python benchmarks/lipsdp.py > docs/lab/lipsdp.md`: process time on one thread of a shared 2-core x86-64
machine, random networks (entries of variance 1 / inputs, ReLU, float64). `N` is the total width, inputs and
outputs included. (`solve` reduces inputs beyond the first hidden width, 784 to 190, by a QR factorisation.)
`product` is that of the layers' norms; `ratio` is the product over the proved gain.

| network | N | solve, s | steps | verify, s | proved gain | product | ratio |
|---|---|---|---|---|---|---|---|"""
AGAINST = """
## Residual blocks

Blocks `x + W relu(V x + b)`, 16 inputs, 4 outputs, as torch initialises them, in float64. *Alone*: an LMI for each
block, whose gains count as 1 + g. One LMI for all of them is dense, so it is slower than that of a chain.

| blocks | width | units of each | solve, s | verify, s | proved gain | alone | product |
|--:|--:|--:|--:|--:|--:|--:|--:|
{residual}

## Splitting

`lipschitz(network, tight=True)` puts up to 2,048 hidden units in one LMI. `units` of `lipsdp.solve` sets another
limit: a run with more is cut at activations, and a wider layer counts by its norm. The loss for
{name}:

| units | solve, s | proved gain | over that of one LMI |
|---|---|---|---|
{split}

## Against a general solver

{text}

## Where it stops

The time of a step and of a proof grows with the cube of N, the memory with its square. One step and one proof,
for three hidden layers of equal width:

| N | step, s | proof, s |
|---|---|---|"""
END = """
Twenty steps take {now:.1f} minutes at N = {n}; at N = {large} they would take {then:.0f} minutes (extrapolated), and
some 15 matrices of N x N would take {memory:.0f} GB. `verify` is one factorisation, so an LBDN of that size is still
proved from its own multipliers."""


def split() -> str:
    """Rows of the table of splittings."""
    network, limits = mlp(SPLIT[0]), SPLIT[1]
    found = [timed(functools.partial(lipsdp.solve, network, units=limit)) for limit in limits]
    return "\n".join(
        f"| {limit} | {seconds:.2f} | {proof.gain:.4g} | {proof.gain / found[0][0].gain:.2f} |"
        for limit, (proof, seconds) in zip(limits, found, strict=True)
    )


def blocks_in_one() -> str:
    """Rows of the table of residual blocks."""
    rows = []
    for blocks, width, units in BLOCKS:
        network = residual(blocks, width, units)
        proof, seconds = timed(functools.partial(lipsdp.solve, network))
        proved, check = timed(functools.partial(lipsdp.verify, network, proof.gain, proof.multipliers))
        if not proved:
            raise RuntimeError(f"expected a gain that verify proves, got {proof.gain} of {blocks} blocks")
        alone = lipsdp.solve(network, units=units).gain
        cells = [f"{seconds:.1f}", f"{check:.3f}", *(f"{gain:.4g}" for gain in (proof.gain, alone, proof.product))]
        rows.append(f"| {' | '.join([str(blocks), str(width), str(units), *cells])} |")
    return "\n".join(rows)


def against_clarabel() -> str:
    """A sentence about the smallest network."""
    if importlib.util.find_spec("clarabel") is None:
        return "Not measured: clarabel is not installed."
    network = mlp(NETWORKS[0])
    gain, other = clarabel_gain(network)
    proof, seconds = timed(lambda: lipsdp.solve(network))
    return (
        f"{name(NETWORKS[0])}: Clarabel (direct conic form, one cone) takes {other:.2f} s for {gain:.6f}, not proved;\n"
        f"`solve` takes {seconds:.2f} s for {proof.gain:.6f}, proved. `tests/certificates/test_lipsdp.py` compares\n"
        "the two on more networks."
    )


def main() -> None:
    torch.set_num_threads(1)
    print(INTRODUCTION)
    for sizes in NETWORKS:
        row(sizes)
    print(AGAINST.format(residual=blocks_in_one(), name=name(SPLIT[0]), split=split(), text=against_clarabel()))
    n, step = 0, 0.0
    for width in (160, 330, 660):
        sizes = [10, width, width, width, 10]
        n, (step, check) = sum(sizes), one_step(sizes)
        print(f"| {n} | {step:.3f} | {check:.3f} |", flush=True)
    large, now = 5000, 20 * step / 60
    print(END.format(now=now, n=n, large=large, then=now * (large / n) ** 3, memory=15 * 8e-9 * large**2))


if __name__ == "__main__":
    main()
