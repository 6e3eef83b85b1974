"""From scratch to a certified ONNX file, in plain torch, to be read from top to bottom.

    python examples/by_hand.py [--epochs 30] [--out digits.onnx]

Nothing here needs `lipkit.fit`, a recipe or the command line: an ordinary module, an ordinary loop. After 20 seconds on
one CPU core, 96.7 % of the test digits are classified correctly, 93.6 % provably within 36/255 in l2.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipkit
from lipkit.interop import write_onnx
from lipkit.layers import CayleyConv2d, CayleyLinear, MaxMin, SvcmConv2d, after_step

EPS = 36 / 255  # the radius to certify, l2, of images in [0, 1]
SHAPE = (1, 8, 8)  # of one input


class Net(nn.Module):
    """An ordinary module with its own forward pass; every layer that it calls has constant 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = CayleyConv2d(1, 16, 3)  # orthogonal at every step: the weight is made in the forward pass
        self.second = SvcmConv2d(16, 32, 1, stride=2)  # kept near norm 1 by a projection between steps
        self.hidden = CayleyLinear(32 * 4 * 4, 128)
        self.last = CayleyLinear(128, 10)
        self.maxmin = MaxMin()  # keeps the norm; ReLU has constant 1, too, but drops what lies below zero

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxmin(self.first(x))
        x = self.maxmin(self.second(x))
        x = self.maxmin(self.hidden(x.flatten(1)))
        return self.last(x)


def margin_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy that asks for a margin.

    A network of constant 1 certifies the radius m / sqrt(2), where m is the margin between its two largest logits:
    their difference changes by at most sqrt(2) |x' - x|. So we lower the right logit by the margin for 2 EPS, and a
    small temperature makes cross-entropy sensitive to margins of that size.
    """
    wanted = 2 * 2**0.5 * EPS * F.one_hot(labels, logits.shape[1])
    return 0.25 * F.cross_entropy((logits - wanted) / 0.25, labels)


def train(net: Net, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Train in an ordinary loop; returns a copy of the network with an average of its last weights."""
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    for epoch in range(epochs):
        for rows in torch.randperm(len(x)).split(128):
            loss = margin_loss(net(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            after_step(net, SHAPE)  # projects SVCM's kernel; layers that build their weight need nothing
            average.update_parameters(net)
        schedule.step()
        print(f"epoch {epoch + 1:2d}  loss {loss.item():.4f}")
    # Averaged parameters still make orthogonal weights; only the average of SVCM's kernels must be projected again.
    after_step(average.module, SHAPE)
    return average.module.eval()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("digits.onnx"))
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    digits = lipkit.data.load("digits")
    net = train(Net(), digits.train.x, digits.train.y, given.epochs)

    # Export: constant weights, plain modules. From here on nothing depends on how the weights were made.
    plain = lipkit.export(net, SHAPE)
    print(f"\nclaimed constant {lipkit.lipschitz(net, SHAPE).item():.7f}, proved {lipkit.lipschitz(plain).item():.7f}")

    # Certify: a radius for each image, proved from the exported numbers, rounding of the evaluation included.
    x, y = digits.test.x, digits.test.y
    certificate = lipkit.certify(plain, x, y)
    print(f"clean {100 * certificate.accuracy(0):.1f} %, certified(36/255) {100 * certificate.accuracy(EPS):.1f} %")

    # Look for a counterexample: inside a certified radius there is none, or the proof is wrong.
    gradient = torch.autograd.grad(margin_loss(plain(x.requires_grad_()), y), x)[0].flatten(1)
    moved = x.detach() + certificate.radius.float()[:, None, None, None] * F.normalize(gradient).view_as(x) * (1 - 1e-6)
    changed = (plain(moved).argmax(1) != certificate.prediction) & (certificate.radius > 0)
    print(f"steepest steps to the edge of each radius change {int(changed.sum())} predictions")

    # Ship: an ONNX file that any runtime evaluates.
    write_onnx(plain, given.out)
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
