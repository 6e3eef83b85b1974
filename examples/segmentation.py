"""Segmentation with a certified accuracy: handwritten digits on photographs, every pixel background or ink.

    python examples/segmentation.py --keep records/segmentation

The scenes are made from real digits and the two photographs of scikit-learn. `lipkit.certificates.dense` bounds the
worst-case pixel accuracy and IoU from the network's margins, with one budget for all pixels. The network is orthogonal
and has fewer outputs than inputs, so an attack nearly reaches these bounds.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import lipkit
from lipkit.certificates import dense
from lipkit.layers import CayleyConv2d, MaxMin

SIDE, DIGIT, CLASSES, TEMPERATURE = 16, 14, 2, 0.3


def scenes(digits: lipkit.data.Split, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 16, 16) in [0, 1] and labels (N, 16, 16): 0 for background, 1 for ink.

    Each scene has one digit, painted in a light colour at a random place on a darkened patch of a photograph.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (1,), generator=random))

    photographs = [torch.from_numpy(np.array(p)).permute(2, 0, 1) / 255 for p in load_sample_images().images]
    x, _ = digits.batch(torch.randint(len(digits), (count,), generator=random))
    x = nn.functional.interpolate(x, (DIGIT, DIGIT), mode="bilinear")
    images = torch.empty(count, 3, SIDE, SIDE)
    labels = torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for i in range(count):
        photograph = photographs[draw(2)]
        top, left = (draw(n - SIDE) for n in photograph.shape[1:])
        images[i] = photograph[:, top : top + SIDE, left : left + SIDE] / 2
        row, column = draw(SIDE - DIGIT + 1), draw(SIDE - DIGIT + 1)
        place = (slice(row, row + DIGIT), slice(column, column + DIGIT))
        colour = 0.7 + 0.3 * torch.rand(3, 1, 1, generator=random)
        images[i][:, *place] += x[i, 0] * (colour - images[i][:, *place])
        labels[i][place] = (x[i, 0] > 0.4).long()
    return images, labels


def network() -> nn.Sequential:
    """Orthogonal layers on patches of 4 x 4 pixels."""
    layers: list[nn.Module] = [nn.PixelUnshuffle(4)]
    for channels in (3 * 4 * 4, 64, 64, 64):
        layers += [CayleyConv2d(channels, 64, 3), MaxMin()]
    return nn.Sequential(*layers, CayleyConv2d(64, CLASSES * 4 * 4, 1), nn.PixelShuffle(4))


def trained(data: tuple[Tensor, Tensor], steps: int) -> lipkit.modules.Network:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(len(data[0]), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0][batch]) / TEMPERATURE, data[1][batch]).backward()
        optimizer.step()
        schedule.step()
    return lipkit.export(model, (3, SIDE, SIDE))


def attacked(net: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int = 40) -> Tensor:
    """The smallest number of correct pixels (N,) that gradient descent finds within eps.

    It attacks the pixels of least margin, as many as the bound allows for a multiple of eps, and pushes each just past
    the boundary.
    """

    def margins(images: Tensor) -> Tensor:
        outputs = net(images)
        others = outputs.scatter(1, y[:, None], -9.0).amax(1, keepdim=True)
        return (outputs.gather(1, y[:, None]) - others).flatten(1)

    with torch.no_grad():
        clean = margins(x).clamp_min(0)
    least, order = clean.sort(1)
    cost = (least.square() / 2).cumsum(1).sqrt()
    fewest = torch.full((len(x),), y[0].numel())
    for multiple in (0.7, 0.85, 1.0, 1.15):
        chosen = torch.zeros_like(clean).scatter(1, order, (cost <= multiple * eps).to(clean))
        moved = torch.zeros_like(x)
        for step in range(steps):
            moved.requires_grad_()
            margin = margins(x + moved)
            fewest = torch.minimum(fewest, (margin > 0).sum(1))
            (slope,) = torch.autograd.grad((chosen * (margin + 0.02).clamp_min(0)).square().sum(), moved)
            size = eps / 8 * (1 + math.cos(math.pi * step / steps))
            moved = (moved - size * slope / slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1).clamp_min(1e-30)).detach()
            moved = moved * (eps / moved.flatten(1).norm(dim=1)).clamp(max=1).view(-1, 1, 1, 1)
    return fewest


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--eps", type=float, nargs="+", default=[0.25, 0.5, 0.65, 1.0])
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args(arguments)
    digits = lipkit.data.load("digits")
    start = time.process_time()
    net = trained(scenes(digits.train, 8000, 0), given.steps)
    x, y = scenes(digits.test, given.images, 1)
    rows, proof, exact = [], lipkit.prove(net), lipkit.modules.storage.float64_copy(net)
    for eps in given.eps:
        found = dense(net, x, y, eps, proof=proof)
        parts = zip(x.double().split(100), y.split(100), strict=True)
        left = torch.cat([attacked(exact, a, b, eps) for a, b in parts])
        attack = float(left.sum() / found.positions.sum())
        broken = int((left < found.worst).sum())
        print(f"{found}\nattack {100 * attack:.1f} %, below the bound in {broken} of {len(left)} images")
        one = float(found.alone.sum() / found.positions.sum())
        figures = (eps, found.worst_accuracy, one, attack, found.worst_mean_iou, broken)
        rows.append([round(figure, 4) for figure in figures])
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        record = {
            "clean": [round(found.clean_accuracy, 4), round(found.mean_iou, 4)],
            "constant": found.proof.constant, "steps": given.steps, "images": given.images, "torch": torch.__version__,
            "columns": ["eps", "certified", "one radius for each pixel", "attack", "certified mean IoU", "broken"],
            "rows": rows, "seconds": round(time.process_time() - start, 1),
        }  # fmt: skip
        (given.keep / "digits-on-photographs.json").write_text(json.dumps(record).replace("], [", "],\n [") + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
