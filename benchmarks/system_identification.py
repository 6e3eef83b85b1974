"""Models of dynamic systems from real input-output data: R2DN beside nn.LSTM and a linear state-space model.

    python -m benchmarks.system_identification --folder DATA --out records/recurrent/system_identification.json

DATA holds files of the nonlinear benchmarks and of DaISy as CSV with a header, each with its columns in `DATA_SETS`:
``tanque.csv`` (cascaded tanks with overflow), ``exchanger.csv`` (steam heat exchanger), ``robot-arm.csv`` (flexible
arm), as in github.com/Rafa7046/Non_Linear_Identification/src/data. The linear model is N4SID of the package nfoursid.
Models see inputs alone, from rest, and are compared by the root mean square error of their simulated outputs on the
last part (the validation file of the tanks) behind the first 50 steps, in units of the output. Inputs and outputs are
standardised by the training part. Networks have about as many parameters each and the same number of trials; the best
on the last fifth of the training part trains the seeds on all of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import lipkit

# File: input and output for training, and for the test (the same names: the last fourth of the file).
DATA_SETS = {
    "tanque.csv": (("uEst", "yEst"), ("uVal", "yVal")), "exchanger.csv": (("q", "th"), ("q", "th")),
    "robot-arm.csv": (("u", "y"), ("u", "y")),
}  # fmt: skip
WASHOUT, WINDOW = 50, 200
Pair = tuple[Tensor, Tensor]


def load(path: Path) -> tuple[Pair, Pair, float]:
    """Training and test part, (T,) each, standardised, and the unit of the output."""
    head, *rows = [line.replace('"', "").split(",") for line in path.read_text().splitlines() if line.strip()]
    wanted = {name for pair in DATA_SETS[path.name] for name in pair}
    columns = {name: np.array([float(row[head.index(name)]) for row in rows]) for name in wanted}
    (u, y), (v, z) = ((columns[a], columns[b]) for a, b in DATA_SETS[path.name])
    if DATA_SETS[path.name][0] == DATA_SETS[path.name][1]:
        cut = 3 * len(u) // 4
        (u, v), (y, z) = (u[:cut], u[cut:]), (y[:cut], y[cut:])
    unit = float(y.std())
    scaled = [torch.tensor((a - b.mean()) / b.std(), dtype=torch.float32) for a, b in ((u, u), (y, y), (v, u), (z, y))]
    return (scaled[0], scaled[1]), (scaled[2], scaled[3]), unit


class Lstm(nn.Module):
    """LSTM and a linear layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(1, hidden, batch_first=True), nn.Linear(hidden, 1)

    def forward(self, u: Tensor) -> Tensor:
        y: Tensor = self.head(self.cells(u)[0])
        return y


def make(kind: str, gain: float) -> nn.Module:
    """About 3,000 parameters each; the gain is R2DN's."""
    if kind == "LSTM":
        return Lstm(26)
    return lipkit.models.sequence_regressor(16, 44, "r2dn", input_shape=(WINDOW, 1), lipschitz=gain, phi="relu")


def error(model: nn.Module, data: Pair) -> float:
    """Root mean square of the simulation error behind the washout, in standard deviations."""
    u, y = data
    with torch.no_grad():
        return float((model(u[None, :, None])[0, :, 0] - y)[WASHOUT:].square().mean().sqrt())


def train(model: nn.Module, data: Pair, lr: float, steps: int) -> nn.Module:
    """Adam, one cycle, windows that overlap, squared error behind the washout."""
    u, y = (part.unfold(0, min(WINDOW, len(part)), 25) for part in data)
    optimiser = torch.optim.Adam(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(u), (16,))
        loss = (model(u[rows][..., None])[..., 0] - y[rows])[:, WASHOUT:].square().mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


def subspace(known: Pair, test: Pair, order: int) -> float:
    """N4SID by nfoursid: its error in simulation."""
    import pandas  # type: ignore[import-untyped]
    from nfoursid.nfoursid import NFourSID  # type: ignore[import-not-found]

    frame = pandas.DataFrame({"u": known[0].double().numpy(), "y": known[1].double().numpy()})
    method = NFourSID(frame, output_columns=["y"], input_columns=["u"], num_block_rows=15)
    method.subspace_identification()
    found, _ = method.system_identification(rank=order)
    x, y = np.zeros((order, 1)), []
    for u in test[0].double().numpy():
        y.append((found.c @ x + found.d * u).item())
        x = found.a @ x + found.b * u
    return float(np.sqrt(np.mean((np.array(y) - test[1].numpy())[WASHOUT:] ** 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", nargs="+", default=list(DATA_SETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"steps": options.steps, "seeds": options.seeds}
    for name in options.data:
        known, test, unit = load(options.folder / name)
        cut = 4 * len(known[0]) // 5
        fit: Pair = (known[0][:cut], known[1][:cut])
        held: Pair = (known[0][cut:], known[1][cut:])
        orders = range(1, 9)
        best = min(orders, key=lambda order: subspace(fit, held, order))
        rows: dict[str, Any] = {"N4SID": {"order": best, "error": [unit * subspace(known, test, best)]}}
        for kind in ("R2DN", "LSTM"):
            start = time.process_time()
            # As many trials each: learning rates and gains, or learning rates alone.
            trials = [(lr, gain) for lr in (0.01, 0.03) for gain in (1.5, 4.0)]
            if kind == "LSTM":
                trials = [(lr, 1.0) for lr in (0.003, 0.01, 0.02, 0.03)]
            scores = []
            for lr, gain in trials:
                torch.manual_seed(0)
                scores.append(error(train(make(kind, gain), fit, lr, options.steps), held))
            lr, gain = trials[scores.index(min(scores))]
            found, proved = list[float](), list[float]()
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                model = train(make(kind, gain), known, lr, options.steps)
                found.append(unit * error(model, test))
                if kind == "R2DN":
                    proved.append(float(lipkit.lipschitz(lipkit.export(model, (len(test[0]), 1)))))
            count = sum(p.numel() for p in model.parameters())
            rows[kind] = {"parameters": count, "lr": lr, "error": found, "seconds": round(time.process_time() - start)}
            if proved:
                rows[kind] |= {"gain between standardised signals, proved": max(proved)}
        record[name] = rows
        shown = {kind: f"{statistics.mean(row['error']):.4g}" for kind, row in rows.items()}
        print(name, shown, rows, flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
