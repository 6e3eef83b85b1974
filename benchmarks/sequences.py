"""Certified classification of sequences: R2DN and REN beside LSTM, GRU, a temporal CNN with Cayley layers, and linear.

    pip download --no-deps aeon==1.6.0
    python -m benchmarks.sequences --wheel aeon-1.6.0-py3-none-any.whl --out records/recurrent

The .ts files of JapaneseVowels, BasicMotions and ItalyPowerDemand lie inside the wheel of aeon (a zip), and are read
from there: aeon itself needs numba. Networks have about 6,000 parameters each (the linear one as many as it takes);
each has the same grid of settings. The best of them on a fifth of the training data (clean accuracy plus accuracy
under PGD at the middle radius) is trained with five seeds on all of it. Radii are l2 in the units of the file, over
the whole sequence; what stands behind its end is masked, or zero. Certified: `lipkit.certify` of the exports, one for
each length, with rounding. PGD: 40 steps, margin loss. LSTM and GRU have no certificate. A record that is there is
continued: what it lacks of the search and of the seeds is made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import t as student
from torch import Tensor, nn

import lipkit
from lipkit.attacks.ascent import margin_loss
from lipkit.layers import CayleyConv2d, CayleyLinear, MaxMin
from lipkit.layers.recurrent import masked
from lipkit.models.sequences import SumOverTime

RADII = {"JapaneseVowels": (0.1, 0.3, 0.5), "BasicMotions": (0.5, 1.0, 2.0), "ItalyPowerDemand": (0.1, 0.3, 0.5)}
GRID = [*itertools.product((0.003, 0.01, 0.03), ((0.25, 0.5), (0.25, 1.0), (0.1, 0.5)))]
Batch = tuple[Tensor, Tensor, Tensor]


def read(wheel: Path, name: str, part: str) -> tuple[list[Tensor], list[str]]:
    """Sequences (T, features) and their labels: channels apart by ':', values by ',', the label last."""
    text = zipfile.ZipFile(wheel).read(f"aeon/datasets/data/{name}/{name}_{part}.ts").decode()
    x, y = list[Tensor](), list[str]()
    for row in text.splitlines():
        if row and row[0] not in "@#":
            *channels, label = row.split(":")
            x.append(torch.tensor([[float(v) for v in channel.split(",")] for channel in channels]).T)
            y.append(label)
    return x, y


def load(wheel: Path, name: str) -> tuple[Batch, Batch, int]:
    """Training and test data, each as inputs (N, T, n), mask (N, T) and labels, and the number of classes."""
    parts = [read(wheel, name, part) for part in ("TRAIN", "TEST")]
    names, steps = sorted(set(parts[0][1])), max(len(x) for xs, _ in parts for x in xs)

    def padded(xs: list[Tensor], ys: list[str]) -> Batch:
        x = torch.stack([F.pad(one, (0, 0, 0, steps - len(one))) for one in xs])
        mask = torch.stack([torch.arange(steps) < len(one) for one in xs])
        return x, mask, torch.tensor([names.index(y) for y in ys])

    return padded(*parts[0]), padded(*parts[1]), len(names)


class Gated(nn.Module):
    """LSTM or GRU, mean over the steps that count, linear layer."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.cells, self.head = kind(inputs, hidden, batch_first=True), nn.Linear(hidden, classes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(SumOverTime()(self.cells(x)[0], mask))
        return logits


class Temporal(nn.Module):
    """Circular convolutions along time by Cayley layers, each with MaxMin, as an image (features, steps, 1)."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        convs = [CayleyConv2d(inputs, width, (3, 1)), MaxMin(), CayleyConv2d(width, width, (3, 1)), MaxMin()]
        self.convs, self.sum, self.head = nn.Sequential(*convs), SumOverTime(), CayleyLinear(width, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if mask is None else masked(x, mask)
        features = self.convs(x.transpose(1, 2)[..., None])
        logits: Tensor = self.head(self.sum(features[..., 0].transpose(1, 2)))
        return logits


class Flat(nn.Module):
    """One orthogonal layer on the whole padded sequence."""

    def __init__(self, steps: int, inputs: int, classes: int) -> None:
        super().__init__()
        self.head = CayleyLinear(steps * inputs, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head((x if mask is None else masked(x, mask)).flatten(1))
        return logits


def makers(steps: int, inputs: int, classes: int, parameters: int) -> dict[str, Callable[[], nn.Module]]:
    """Of each network, in the size that comes nearest to this number of parameters."""
    shape = (steps, inputs)

    def recurrent(layer: str, n: int) -> nn.Module:
        return lipkit.models.sequence_classifier(n, 2 * n, layer, input_shape=shape, classes=classes)

    def fitted(make: Callable[[int], nn.Module], sizes: range) -> Callable[[], nn.Module]:
        def distance(n: int) -> int:
            return abs(sum(p.numel() for p in make(n).parameters()) - parameters)

        best = min(sizes, key=distance)
        return lambda: make(best)

    return {
        "linear": lambda: Flat(steps, inputs, classes),
        "R2DN": fitted(lambda n: recurrent("r2dn", n), range(6, 26)),
        "TCN, Cayley": fitted(lambda n: Temporal(inputs, n, classes), range(6, 60, 2)),
        "LSTM": fitted(lambda n: Gated(nn.LSTM, inputs, n, classes), range(4, 60)),
        "GRU": fitted(lambda n: Gated(nn.GRU, inputs, n, classes), range(4, 60)),
        "REN": fitted(lambda n: recurrent("ren", n), range(6, 26)),
    }


def train(model: nn.Module, data: Batch, lr: float, temperature: float, offset: float, epochs: int) -> nn.Module:
    """Adam, one cycle, offset cross-entropy."""
    x, mask, y = data
    size = max(8, len(x) // 9)
    steps = epochs * -(-len(x) // size)
    optimiser = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps)
    for _ in range(epochs):
        for i in torch.randperm(len(x)).split(size):
            logits = model(x[i], mask[i])
            shifted = (logits - offset * F.one_hot(y[i], logits.shape[1])) / temperature
            loss = temperature * F.cross_entropy(shifted, y[i])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def attacked(model: nn.Module, data: Batch, radius: float, steps: int) -> float:
    """Accuracy under PGD in the l2 ball."""
    x, mask, y = data
    moved, right = torch.zeros_like(x), margin_loss(model(x, mask), y) < 0
    for _ in range(steps):
        moved.requires_grad_()
        loss = margin_loss(model(x + moved, mask), y)
        (grad,) = torch.autograd.grad(loss.sum(), moved)
        with torch.no_grad():
            right &= loss < 0
            size = grad.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None]
            moved = masked(moved + 4 * radius / steps * grad / size, mask)
            moved *= (radius / moved.flatten(1).norm(dim=1).clamp_min(1e-12)).clamp_max(1)[:, None, None]
    with torch.no_grad():
        right &= margin_loss(model(x + moved, mask), y) < 0
    return 100 * float(right.float().mean())


def certified(model: nn.Module, data: Batch) -> Tensor:
    """The radius of each sample: from the export for its length, where the model reads lengths."""
    x, mask, y = data
    radius, lengths = torch.zeros(len(x), dtype=torch.float64), mask.sum(1)
    apart = not isinstance(model, Temporal | Flat)
    for length in lengths.unique().tolist() if apart else [x.shape[1]]:
        rows = lengths == length if apart else torch.ones_like(lengths, dtype=torch.bool)
        given = masked(x[rows], mask[rows])[:, :length]
        radius[rows] = lipkit.certify(lipkit.export(model, (length, x.shape[2])), given, y[rows]).radius
    return radius


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of its 95 % interval."""
    spread = statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), float(student.ppf(0.975, len(values) - 1)) * spread


def keep(path: Path, record: dict[str, Any], start: float) -> None:
    """Write what there is; ``start`` is the process time at which the work would have begun in this process."""
    record["seconds"] = round(time.process_time() - start, 1)
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="+", default=list(RADII))
    parser.add_argument("--networks", nargs="+")
    parser.add_argument("--parameters", type=int, default=6000)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.data:
        known, test, classes = load(options.wheel, name)
        order = torch.randperm(len(known[2]), generator=torch.Generator().manual_seed(0))
        held, rest = ((known[0][i], known[1][i], known[2][i]) for i in order.tensor_split([len(order) // 5]))
        networks = makers(known[0].shape[1], known[0].shape[2], classes, options.parameters)
        for kind in options.networks or networks:
            make = networks[kind]
            path = options.out / f"{name}-{kind.replace(', ', '-')}.json".lower()
            record: dict[str, Any] = {
                "data": name, "network": kind, "parameters": sum(p.numel() for p in make().parameters()),
                "epochs": options.epochs, "tuning": [], "setting": None, "seconds": 0.0, "percent": {},
            }  # fmt: skip
            if path.exists():
                record |= json.loads(path.read_text())
            start, scores, rows = time.process_time() - record["seconds"], record["tuning"], record["percent"]
            for lr, (temperature, offset) in [] if record["setting"] else GRID[len(scores) :]:
                torch.manual_seed(0)
                model = train(make(), rest, lr, temperature, offset, options.epochs)
                scores.append(attacked(model, held, 0.0, 0) + attacked(model, held, RADII[name][1], 10))
                keep(path, record, start)
            if record["setting"] is None:
                lr, (temperature, offset) = GRID[scores.index(max(scores))]
                record["setting"] = {"lr": lr, "temperature": temperature, "offset": offset}
            for seed in range(len(rows.get("clean", ())), options.seeds):
                torch.manual_seed(seed)
                model = train(make(), known, **record["setting"], epochs=options.epochs)
                found = {"clean": attacked(model, test, 0.0, 0)}
                radius = None if isinstance(model, Gated) else certified(model, test)
                for r in RADII[name]:
                    if radius is not None:
                        found[f"certified({r})"] = 100 * float((radius > r).double().mean())
                    found[f"PGD({r})"] = attacked(model, test, r, 40)
                for key, value in found.items():
                    rows.setdefault(key, []).append(value)
                keep(path, record, start)
            shown = {key: "{:.1f} +- {:.1f}".format(*interval(v)) for key, v in rows.items() if len(v) > 1}
            print(name, kind, record["parameters"], record["setting"], shown, f"{record['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
