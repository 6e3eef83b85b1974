"""1,000 random recurrent layers after wild training: gain, contraction and proof of each; and rounding against length.

    python -m benchmarks.recurrent --models 1000 --out records/recurrent/study.json

R2DN (phi an activation, an LBDN, Cayley layers with MaxMin), REN and linear systems of random sizes, gains (0.03 to 30)
and rates (0.2 to 1), in float32 and float64 in turn, each after 50 steps of Adam at 0.3 that push its gain up. Of the
exported numbers, in float64: the gain that ascent over whole sequences finds, as a share of gamma; the largest ratio of
two states under the same input, as a share of the rate (states at distances near 1, so that no ratio is of rounding);
whether the gain proved is gamma or less, and the rate the claimed one. Then the bound of what float32 rounding adds to
the outputs of T steps, over the root of T, beside what it adds.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lipkit
from lipkit.layers import CayleyLinear, LinearSystem, MaxMin, R2dn, Ren
from lipkit.layers.recurrent import RecurrentLayer
from lipkit.modules import Recurrent, contraction, local_error
from lipkit.proof.roundoff import FLOAT32

KINDS = ("linear", "r2dn abs", "r2dn relu", "r2dn lbdn", "r2dn cayley", "ren tanh", "ren relu")


def draw(index: int) -> tuple[str, RecurrentLayer]:
    """The layer of this number."""
    torch.manual_seed(index)
    kind = KINDS[index % len(KINDS)]
    inputs, outputs, states = (int(n) for n in torch.randint(1, 5, (3,)))
    units = 2 * int(torch.randint(1, 4, ()))
    rate = 1.0 if index % 3 == 0 else 0.2 + 0.8 * float(torch.rand(()))
    options: dict[str, Any] = {"gamma": 10 ** (3 * float(torch.rand(())) - 1.5), "rate": rate}
    name, _, phi = kind.partition(" ")
    if name == "linear":
        layer: RecurrentLayer = LinearSystem(inputs, outputs, states, **options)
    elif name == "ren":
        layer = Ren(inputs, outputs, states, units, phi, **options)
    else:
        inner: Any = phi
        if phi == "lbdn":
            inner = lipkit.models.lbdn([units, 6, 4, units])
        elif phi == "cayley":
            inner = nn.Sequential(CayleyLinear(units, 6), MaxMin(), CayleyLinear(6, units))
        layer = R2dn(inputs, outputs, states, units, inner, **options)
    return kind, layer.to(torch.float64 if (index // len(KINDS)) % 2 else torch.float32)


def ascend(module: nn.Module, inputs: int, rounds: int, lr: float) -> float:
    """Largest ratio of output to input differences over 8 pairs of sequences of 6 steps."""
    dtype = next(iter(module.state_dict().values())).dtype
    u = torch.randn(8, 6, inputs, dtype=dtype).requires_grad_()
    d = (0.3 * torch.randn_like(u)).detach().requires_grad_()
    optimiser, best = torch.optim.Adam([u, d], lr), 0.0
    for _ in range(rounds):
        one, other = module(torch.cat((u + d, u))).chunk(2)
        gain = (one - other).flatten(1).norm(dim=1) / d.flatten(1).norm(dim=1)
        best = max(best, float(gain.detach().max()))
        optimiser.zero_grad()
        (-gain.log().sum()).backward()
        optimiser.step()
    return best


def checked(index: int) -> dict[str, Any]:
    """One model, trained, exported and searched."""
    kind, layer = draw(index)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.3)
    u = torch.randn(4, 6, layer.in_features, dtype=layer.state_bias.dtype)
    for _ in range(50):
        loss = -(y := layer(u)).sub(y.flip(0)).flatten(1).norm(dim=1).mean() / layer.gamma
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    plain = lipkit.export(layer, (6, layer.in_features))[0]
    assert isinstance(plain, Recurrent)
    exact = copy.deepcopy(plain).double()
    gain = ascend(exact, layer.in_features, 20, 0.05)
    x = torch.randn(2, 256, layer.states, dtype=torch.float64)
    now = torch.randn(256, layer.in_features, dtype=torch.float64)
    after = torch.stack([exact.step(one, now)[0] for one in x])
    ratio = float(((after[0] - after[1]).norm(dim=1) / (x[0] - x[1]).norm(dim=1)).max())
    proved = float(lipkit.lipschitz(plain))
    return {
        "kind": kind, "dtype": str(plain.matrix.dtype), "gain": gain / layer.gamma, "contraction": ratio / layer.rate,
        "proved": proved <= layer.gamma and contraction(plain) == layer.rate,
    }  # fmt: skip


def rounding(rate: float) -> list[dict[str, float]]:
    """The bound of rounding in float32 against the number of steps."""
    torch.manual_seed(0)
    plain = lipkit.export(R2dn(3, 2, 8, 16, gamma=2.0, rate=rate), (1, 3))[0]
    exact, rows = copy.deepcopy(plain).double(), []
    for steps in (1, 10, 100, 1000):
        u = torch.randn(4, steps, 3)
        bound = local_error(exact, (steps, 3), FLOAT32)(u.double()).error.at.max()
        lost = (plain(u).double() - exact(u.double())).flatten(1).norm(dim=1).max()
        root = steps**0.5
        rows.append({"rate": rate, "steps": steps, "bound": float(bound) / root, "lost": float(lost.detach()) / root})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, table = time.process_time(), dict[str, dict[str, Any]]()
    lines = [row for rate in (0.5, 0.9, 1.0) for row in rounding(rate)]
    for index in range(options.models):
        found = checked(index)
        row = table.setdefault(
            f"{found['kind']}, {found['dtype']}", {"models": 0, "gain": 0.0, "contraction": 0.0, "proved": 0}
        )
        row["models"] += 1
        row["proved"] += found["proved"]
        for key in ("gain", "contraction"):
            row[key] = max(row[key], found[key])
        if index % 100 == 99 or index == options.models - 1:
            record = {"models": index + 1, "seconds": round(time.process_time() - start), "largest shares": table}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record | {"rounding of float32 / sqrt(T)": lines}, indent=1) + "\n")
            print(index + 1, record["seconds"], flush=True)


if __name__ == "__main__":
    main()
