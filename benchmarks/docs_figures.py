"""The figures of the documents, drawn from the package's own computations.

python benchmarks/docs_figures.py                  # all, into docs/images
python benchmarks/docs_figures.py NAME [NAME ...]  # some
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import PercentFormatter
from torch import Tensor, nn

import lipkit
from families import SHAPE, trained
from lipkit.bounds.lmi import lmi_matrix
from lipkit.conv.block import two_taps
from lipkit.conv.phases import frequency_map
from lipkit.conv.spectrum import to_rows, transform_matrices
from lipkit.layers.families import FAMILIES
from lipkit.layers.svcm import project
from lipkit.linalg import bjorck
from lipkit.linalg.exponential import skew_part, taylor
from lipkit.report.record import read_record
from lipkit.testing import jacobians

FOLDER = Path(__file__).parents[1] / "docs" / "images"
# Text stays text and identifiers do not change from run to run: small files, small differences.
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "lipkit", "font.size": 9, "font.family": "sans-serif",
    "axes.spines.top": False, "axes.spines.right": False, "path.simplify_threshold": 0.5,
}  # fmt: skip


def jacobian(function: nn.Module, shape: tuple[int, ...]) -> np.ndarray:
    """The dense matrix of the derivative at a random point, outputs by inputs."""
    x = torch.randn(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return jacobians(function, x)[0]


def singular_values() -> plt.Figure:
    found = {
        name: np.linalg.svd(jacobian(lipkit.export(trained(family), SHAPE), SHAPE), compute_uv=False)
        for name, family in FAMILIES.items()
    }
    panels = {
        "orthogonal": [n for n, f in FAMILIES.items() if f.claim == "orthogonal"],
        "rescaled or projected": [n for n, f in FAMILIES.items() if f.claim != "orthogonal" and not f.own_activation],
        "with an activation, at one point": [n for n, f in FAMILIES.items() if f.own_activation],
    }
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.2), sharey=True, layout="constrained")
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            axis.plot(np.arange(1, len(found[name]) + 1)[::9], found[name][::9], lw=1.4, label=name)
        axis.set(title=title, ylim=(0, 1.08), xlabel="singular values, in order")
        axis.legend(frameon=False, fontsize=8)
    return figure


def real_transform() -> plt.Figure:
    torch.manual_seed(0)
    channels, side = 2, 4
    conv = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64)
    pixels = torch.from_numpy(jacobian(conv, (channels, side, side)))
    matrices = transform_matrices(side, side, dtype=torch.float64)
    # Rows of the transform: coefficients by channel, for each unit image.
    basis = to_rows(torch.eye(channels * side**2, dtype=torch.float64).reshape(-1, channels, side, side), matrices)
    t = basis.permute(0, 2, 1).reshape(channels * side**2, -1)
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
    for axis, matrix, title in ((axes[0], pixels, "pixels"), (axes[1], t @ pixels @ t.T, "real Fourier basis")):
        axis.imshow(matrix.abs().numpy(), cmap="Blues", vmin=0, interpolation="nearest")
        axis.set(title=f"|A| in the basis of {title}" if title == "pixels" else f"|A| in the {title}")
        axis.set_xticks([]), axis.set_yticks([])
    return figure


def eco_frequencies() -> plt.Figure:
    figure, axes = plt.subplots(1, 3, figsize=(7, 2.6), layout="constrained", width_ratios=(3, 4, 5))
    for axis, k in zip(axes, (3, 4, 5), strict=True):
        table = frequency_map((k, k)).numpy()
        axis.imshow(table, cmap="tab20", interpolation="nearest")
        for (p, q), value in np.ndenumerate(table):
            axis.text(q, p, str(value), ha="center", va="center", fontsize=8)
        axis.set(title=f"k = {k}: {table.max() + 1} matrices", xticks=[], yticks=[], xlabel="q", ylabel="p")
    return figure


def exponential() -> plt.Figure:
    torch.manual_seed(0)
    a = skew_part(torch.randn(64, 16, 16, dtype=torch.float64))
    a = a / torch.linalg.matrix_norm(a, 2)[:, None, None]
    exact, terms = torch.linalg.matrix_exp(a), range(1, 13)
    worst = [float(torch.linalg.matrix_norm(taylor(a, n) - exact, 2).max()) for n in terms]
    figure, axis = plt.subplots(figsize=(5, 2.8), layout="constrained")
    axis.semilogy(terms, [1 / math.factorial(n + 1) for n in terms], label="proved bound", color="0.5")
    axis.semilogy(terms, worst, "o", label="largest of 64 random matrices", markersize=4)
    axis.set(xlabel="T, terms up to $A^T/T!$", ylabel="error of the sum, ||A|| = 1", xticks=terms)
    axis.legend(frameon=False)
    return figure


def bcop() -> plt.Figure:
    torch.manual_seed(0)
    channels = 8
    kernel = bjorck(nn.init.orthogonal_(torch.empty(channels, channels, dtype=torch.float64)))[:, :, None, None]
    stages = [kernel]
    for dim, swap in ((3, False), (2, False), (3, True), (2, True)):
        v = torch.linalg.qr(torch.randn(channels, channels // 2, dtype=torch.float64))[0]
        stages.append(two_taps(stages[-1], v, dim, swap))
    figure, axes = plt.subplots(1, 5, figsize=(8, 2), layout="constrained")
    for axis, stage in zip(axes, stages, strict=True):
        size = torch.linalg.matrix_norm(stage.permute(2, 3, 0, 1)).square().numpy() / channels
        axis.imshow(size, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        for (p, q), value in np.ndenumerate(size):
            ink = "white" if value > 0.5 else "black"
            axis.text(q, p, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
        axis.set(title=f"{size.shape[0]} x {size.shape[1]}, sum {size.sum():.2f}", xticks=[], yticks=[])
    return figure


def svcm() -> plt.Figure:
    torch.manual_seed(0)
    kernel = torch.randn(8, 8, 3, 3, dtype=torch.float64) / 8
    rounds = [0, 1, 2, 3, 5, 8, 12, 20, 30, 50, 80, 120]
    shown = [kernel if n == 0 else project(kernel, 12, 12, n, orthogonal=False) for n in rounds]
    largest = [float(lipkit.bounds.circular(k, 12, 12)) for k in shown]
    figure, axis = plt.subplots(figsize=(5, 2.8), layout="constrained")
    axis.plot(rounds, largest, "o-", markersize=3)
    axis.axhline(1, color="0.6", lw=0.6)
    axis.set(xlabel="rounds of clipping and cutting back to 3 x 3", ylabel="largest singular value", ylim=(0.9, None))
    return figure


def residual() -> plt.Figure:
    x = torch.linspace(-3, 3, 121, dtype=torch.float64)
    figure, axes = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
    for axis, (name, act) in zip(axes, (("ReLU", torch.relu), ("tanh", torch.tanh)), strict=True):
        for bias in (-1.0, 0.0, 1.0):
            # One channel and one hidden unit of weight 1: T = w^2, so f(x) = x - 2 sigma(x + b).
            axis.plot(x, x - 2 * act(x + bias), lw=1.3, label=f"b = {bias:g}")
        axis.set(title=f"x - 2 {name}(x + b)", xlabel="x")
        axis.set_aspect("equal")
    axes[0].legend(frameon=False)
    return figure


def lmi() -> plt.Figure:
    torch.manual_seed(0)
    network = lipkit.export(lipkit.models.lbdn([4, 8, 8, 3], gamma=2.0).double(), (4,))
    weights = [m.weight for m in network if isinstance(m, nn.Linear)]
    h = lmi_matrix(weights, list(network.multipliers().values()), 2.0)
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.2), layout="constrained")
    axes[0].imshow(h.abs().sqrt().numpy(), cmap="Blues", vmin=0, interpolation="nearest")
    axes[0].set(title="sqrt |H|, 4 -> 8 -> 8 -> 3", xticks=[], yticks=[])
    gains = np.linspace(1.0, 3.0, 81)
    smallest = [
        float(torch.linalg.eigvalsh(lmi_matrix(weights, list(network.multipliers().values()), g))[0]) for g in gains
    ]
    axes[1].plot(gains, smallest)
    axes[1].axhline(0, color="0.6", lw=0.6)
    axes[1].set(xlabel="gamma", title="smallest eigenvalue of H")
    return figure


def on_digits(model: Callable[..., nn.Module]) -> tuple[lipkit.modules.Network, lipkit.data.Dataset]:
    """A model trained on the digits for ten epochs and exported, and the digits."""
    data = lipkit.data.load("digits")
    torch.manual_seed(0)
    network = model(input_shape=(1, 8, 8), classes=10)
    lipkit.fit(network, data.train, epochs=10, batch_size=64, lr=0.01, loss="hinge", accelerator="cpu")
    return lipkit.export(network, (1, 8, 8)), data


def proved_and_attacked(plain: lipkit.modules.Network, x: Tensor, y: Tensor, radii: Tensor) -> list[np.ndarray]:
    """Certified accuracy, and accuracy under FAB's nearest examples, at each radius."""
    certificate = lipkit.certify(plain, x, y)
    distance = (lipkit.attacks.fab(plain, x, y, targets=3, steps=20) - x).flatten(1).double().norm(dim=1)
    distance = torch.where(~certificate.correct, 0.0, torch.where(distance > 0, distance, torch.inf))
    proved = [certificate.accuracy(float(r)) for r in radii]
    return [np.array(proved), np.array([float((distance > r).double().mean()) for r in radii])]


def certified_accuracy() -> plt.Figure:
    plain, data = on_digits(lipkit.models.small)
    radii = torch.linspace(0, 1.5, 151, dtype=torch.float64)
    proved, attacked = proved_and_attacked(plain, *data.test.batch(slice(None)), radii)
    figure, axis = plt.subplots(figsize=(5.5, 3), layout="constrained")
    axis.plot(radii, proved, label="certified: proved from below")
    axis.plot(radii, attacked, label="attacked: found from above")
    axis.set(xlabel="l2 radius", ylabel="share of test images", ylim=(0, 1.02), xlim=(0, 1.5))
    axis.legend(frameon=False)
    return figure


def first_page() -> plt.Figure:
    radii = torch.linspace(0, 1.2, 121, dtype=torch.float64)
    plt.rcParams["font.size"] = 10.5  # of the first page only: it stays readable on a phone
    figure, axis = plt.subplots(figsize=(4.6, 3.1), layout="constrained")
    models = (("Cayley layers", lipkit.models.small), ("ordinary", lipkit.models.convnet))
    for number, (name, model) in enumerate(models):
        plain, data = on_digits(model)
        proved, attacked = proved_and_attacked(plain, *data.test.batch(slice(None)), radii)
        axis.plot(radii, proved, color=f"C{number}", lw=2, label=f"{name}: proved")
        axis.plot(radii, attacked, color=f"C{number}", lw=1, ls="--", label=f"{name}: attacked")
        axis.fill_between(radii, proved, attacked, color=f"C{number}", alpha=0.12, lw=0)
    axis.set(xlabel="largest change of the image (l2)", ylabel="accuracy", xlim=(0, 1.2), ylim=(0, 1.02))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(-0.16, 1), handlelength=1.5, columnspacing=1)
    return figure


def deblurring() -> plt.Figure:
    """Trains two denoisers first: about five minutes of one core."""
    sys.path.insert(0, str(FOLDER.parents[1] / "examples"))
    import denoiser

    with tempfile.TemporaryDirectory() as folder:
        return denoiser.draw(denoiser.main(["--out", folder]))


def ratios(batch: int, phase: str) -> dict[str, float]:
    """By family, medians over those of a circular convolution: 128 channels on 16 x 16, for ECO on 12 x 12."""
    record = json.loads((FOLDER.parents[1] / "records" / "speed" / "families.json").read_text())
    found = {}
    for cell in record["cells"]:
        samples = cell["samples"]
        if (cell["batch"], cell["phase"]) == (batch, phase):
            for name, times in samples.items():
                family, _, kind = name.partition(":")
                if kind == "lipkit" and cell["shape"] == ("128@12" if family == "eco" else "128@16"):
                    pair = np.array((times, samples["conv"]), dtype=float)  # NaN where one did not run
                    own, plain = np.median(pair[:, ~np.isnan(pair).any(0)], 1)
                    found[family] = own / plain
    return found


def speed() -> plt.Figure:
    """The families of `records/speed` at batch 128, the fastest first."""
    train, forward = ratios(128, "train"), ratios(128, "forward")
    names = sorted(train, key=lambda name: train[name])
    figure, axis = plt.subplots(figsize=(4.8, 5.4), layout="constrained")
    places = np.arange(len(names))
    for k, (phase, found) in enumerate((("training step", train), ("exported forward", forward))):
        bars = axis.barh(places + 0.4 * k - 0.2, [found[name] for name in names], 0.4, label=phase)
        axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axis.axvline(1, color="0.3", linewidth=1)
    axis.set(yticks=places, yticklabels=names, xlabel="times a circular nn.Conv2d (less is faster)", xscale="log")
    axis.set(xticks=[0.25, 0.5, 1, 2], xticklabels=["0.25", "0.5", "1", "2"], xlim=(0.2, 3.5))
    axis.minorticks_off()
    axis.invert_yaxis()
    axis.legend(frameon=False)
    return figure


# Certified accuracy at 36/255 after hours of an A100, the best of seven methods and four sizes: Prach, Brau, Buttazzo,
# Lampert, "1-Lipschitz Layers Compared", CVPR 2024, table 9.
A100_HOURS = {2: 0.616, 10: 0.660, 24: 0.663}


def accuracy_by_time() -> plt.Figure:
    """The rows of `records/budget` against the time of one CPU core, and published marks."""
    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    runs: dict[str, list[tuple[float, float]]] = {}
    for path in sorted((FOLDER.parents[1] / "records" / "budget").glob("*/*.json")):
        record = read_record(path)
        amount, unit = re.fullmatch(r"([\d.]+)(s|h)", record.recipe["train"]["budget"]).groups()  # type: ignore[union-attr]
        hours = float(amount) / (3600 if unit == "s" else 1)
        name = "PatchNet" if "patchnet" in path.parent.name else "other networks"
        if "bf16" in path.parent.name:
            name += ", bfloat16"
        runs.setdefault(name, []).append((hours, record.certified[0].share.value))
    for (name, points), marker in zip(sorted(runs.items()), "ovs", strict=True):
        axis.plot(*zip(*points, strict=True), marker, label=f"{name}, one CPU core", markersize=5)
    mean = {hours: np.mean([y for x, y in runs["PatchNet"] if x == hours]) for hours, _ in runs["PatchNet"]}
    axis.plot(sorted(mean), [mean[hours] for hours in sorted(mean)], color="C0", linewidth=1)
    gpu = [read_record(path) for path in (FOLDER.parents[1] / "records" / "gpu").glob("patchnet-*.json")]
    axis.plot(
        [record.times["train"] / 3600 for record in gpu], [record.certified[0].share.value for record in gpu], "D",
        color="C3", label="PatchNet, one H200", markersize=5,
    )  # fmt: skip
    axis.plot(
        *zip(*A100_HOURS.items(), strict=True), "^--", color="0.4", label="best of seven methods, A100 (CVPR 2024)"
    )
    axis.axhline(0.592, color="0.6", linewidth=1, linestyle=":")
    axis.annotate("Cayley, 100 epochs of a GPU (ICLR 2021)", (0.015, 0.597), fontsize=8, color="0.4")
    axis.set(xscale="log", xlabel="hours of training", ylabel="certified at 36/255", xlim=(0.012, 36), ylim=(0.2, 0.7))
    axis.set(xticks=[1 / 60, 1 / 9, 1, 2, 10, 24], xticklabels=["1 min", "400 s", "1", "2", "10", "24"])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


DRAWN = (
    singular_values, real_transform, eco_frequencies, exponential, bcop, svcm, residual, lmi, certified_accuracy,
    first_page, deblurring, speed, accuracy_by_time,
)  # fmt: skip
FIGURES: dict[str, Callable[[], plt.Figure]] = {f.__name__: f for f in DRAWN}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    plt.switch_backend("svg")
    FOLDER.mkdir(exist_ok=True)
    for name in names or FIGURES:
        with plt.rc_context(STYLE):
            figure = FIGURES[name]()
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
        print(f"{FOLDER / name}.svg  {(FOLDER / f'{name}.svg').stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
