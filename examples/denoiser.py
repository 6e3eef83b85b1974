"""A denoiser that cannot diverge: trained on photographs, proved firmly non-expansive, put into a deblurring iteration.

    python examples/denoiser.py [--steps 4000] [--out runs/denoiser]

Two networks of the same sizes learn to remove Gaussian noise of 25/255: one of orthogonal convolutions, D = (I + N) / 2
with N proved to be 1-Lipschitz, and one of ordinary convolutions, D = I + N. Both then take the place of the prior in a
plug-and-play iteration, which must converge with the first. docs/tutorials/denoiser.md has the results.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import lipkit
from lipkit.models import denoiser, unet
from lipkit.modules import Add, Graph

SIDE, PATCH, NOISE = 192, 48, 25 / 255


def photographs() -> tuple[list[Tensor], list[Tensor]]:
    """Two photographs of scikit-learn (BSD): strips around the centre to train on, the centre to test on."""
    train, test = [], []
    for image in load_sample_images().images:
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        top, left = ((n - SIDE) // 2 for n in x.shape[1:])
        test.append(x[:, top : top + SIDE, left : left + SIDE])
        train += [x[:, :, :left], x[:, :, left + SIDE :], x[:, :top], x[:, top + SIDE :]]
    return train, test


def patches(strips: Sequence[Tensor], count: int, generator: torch.Generator) -> Tensor:
    """Random patches, turned, mirrored, with colours exchanged and inverted, since two photographs have few patches."""

    def draw(n: int) -> int:
        return int(torch.randint(n, (1,), generator=generator))

    areas = torch.tensor([math.prod(n - PATCH + 1 for n in strip.shape[1:]) for strip in strips], dtype=torch.float64)
    found = []
    for i in torch.multinomial(areas, count, replacement=True, generator=generator).tolist():
        top, left = (draw(n - PATCH + 1) for n in strips[i].shape[1:])
        patch = strips[i][:, top : top + PATCH, left : left + PATCH][torch.randperm(3, generator=generator)]
        patch = torch.rot90(patch, draw(4), (1, 2))
        patch = patch.flip(2) if draw(2) else patch
        found.append(1 - patch if draw(2) else patch)
    return torch.stack(found)


def noisy(x: Tensor, size: float, seed: int) -> Tensor:
    return x + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)


def psnr(x: Tensor, truth: Tensor) -> float:
    """Peak signal-to-noise ratio in dB for values in [0, 1]."""
    return -10 * math.log10(float((x - truth).square().mean()))


def network(name: str, sizes: tuple[int, int, int]) -> nn.Module:
    """The untrained network, each kind in its best form: the unconstrained one learns the noise, D = I + N."""
    if name == "orthogonal":
        return denoiser(*sizes)
    body = unet(*sizes, layer="plain_conv", mean=0.5)
    nn.init.zeros_(body[-2].bias)
    return Graph([body, Add(1, 1)], [[0], [0, 1]])


def train(net: nn.Module, strips: Sequence[Tensor], steps: int, rate: float, seed: int = 0) -> float:
    """Train by Adam on the mean squared error, with a cosine schedule; returns the process time in seconds."""
    generator = torch.Generator().manual_seed(seed)
    optimiser, start = torch.optim.Adam(net.parameters(), lr=rate), time.process_time()
    for step in range(steps):
        warm, falling = min(1.0, 20 * (step + 1) / steps), math.cos(math.pi * step / steps / 2) ** 2
        optimiser.param_groups[0]["lr"] = rate * warm * falling
        clean = patches(strips, 16, generator)
        loss = (net(clean + NOISE * torch.randn(clean.shape, generator=generator)) - clean).square().mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
    return time.process_time() - start


class Trajectory(NamedTuple):
    """PSNR of each iterate, and length of each step (the residual)."""

    psnr: list[float]
    residual: list[float]


def blur_transform(width: float = 1.6) -> Tensor:
    """Transfer function (192, 97) of a circular Gaussian blur; it lies in (0, 1], so the blur has norm 1."""
    rows, columns = torch.fft.fftfreq(SIDE, dtype=torch.float64), torch.fft.rfftfreq(SIDE, dtype=torch.float64)
    squares = rows[:, None].square() + columns.square()
    return torch.exp(-2 * math.pi**2 * width**2 * squares)


def filtered(x: Tensor, transfer: Tensor) -> Tensor:
    return torch.fft.irfft2(torch.fft.rfft2(x) * transfer, s=x.shape[-2:])


@torch.no_grad()
def deblur(net: nn.Module, blurred: Tensor, truth: Tensor, *, strength: float, iterations: int) -> Trajectory:
    """x <- (1 - s) z + s D(z), z = x - A^T (A x - b): a non-expansive map, then a firmly non-expansive one."""
    transfer, x = blur_transform(), blurred
    found = Trajectory([], [])
    for _ in range(iterations):
        z = x - filtered(filtered(x, transfer) - blurred, transfer)
        following = (1 - strength) * z + strength * net(z[None])[0]
        found.residual.append(float((following - x).norm()))
        found.psnr.append(psnr(following, truth))
        x = following
    return found


def draw(paths: dict[str, Trajectory]) -> plt.Figure:
    """PSNR and length of the step over the iterations, a curve for each network."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for name, path in paths.items():
        left.plot(range(1, len(path.psnr) + 1), path.psnr, label=name)
        right.loglog(range(1, len(path.residual) + 1), path.residual, label=name)
    left.set(xlabel="iteration", ylabel="PSNR (dB)", xscale="log")
    right.set(xlabel="iteration", ylabel="length of the step")
    left.legend()
    return figure


def main(arguments: list[str] | None = None) -> dict[str, Trajectory]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--strength", type=float, default=0.02)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/denoiser"))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    strips, tests = photographs()
    shape = (3, SIDE, SIDE)
    paths: dict[str, Trajectory] = {}
    sizes = given.channels, given.depth, given.blocks
    for name, rate in (("orthogonal", 0.005), ("unconstrained", 0.001)):
        torch.manual_seed(0)
        net = network(name, sizes)
        seconds = train(net, strips, given.steps, rate)
        plain = lipkit.export(net, shape)
        of, part = ("N", net.nodes[0]) if name == "orthogonal" else ("D", net)
        constant = float(lipkit.lipschitz(lipkit.export(part, shape)))
        with torch.no_grad():
            removed = [psnr(plain(noisy(x, NOISE, 7)[None])[0], x) for x in tests]
        print(f"{name}: {seconds:.0f} s, PSNR {removed[0]:.2f} and {removed[1]:.2f} dB, L({of}) <= {constant:.6f}")
        lipkit.save(plain, given.out / name)
        truth = tests[1].double()
        blurred = noisy(filtered(truth, blur_transform()), 0.01, 8)
        path = deblur(plain.double(), blurred, truth, strength=given.strength, iterations=given.iterations)
        pairs = zip(path.residual, path.residual[1:], strict=False)
        rising = sum(b > a * (1 + 1e-9) for a, b in pairs if a > 1e-10)  # below, float64 decides
        print(
            f"  deblurring: {psnr(blurred, truth):.2f} dB -> {path.psnr[-1]:.2f} dB (best {max(path.psnr):.2f}), step "
            f"{path.residual[0]:.3g} -> {path.residual[-1]:.3g}, longer than the one before {rising} times"
        )
        paths[name] = path
    figure = draw(paths)
    figure.savefig(given.out / "deblurring.svg")
    plt.close(figure)
    return paths


if __name__ == "__main__":
    main()
