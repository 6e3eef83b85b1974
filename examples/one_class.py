"""A detector with a certified AUROC: one digit of MNIST is normal, no other digit is seen in training.

    python examples/one_class.py --root DATA --keep records/detectors

The network maps an image to a score and is 1-Lipschitz by construction. It learns from the normal digit alone, against
negatives made of it: quarter turns, and mismatched halves of two images. Loss: HKR (Serrurier et al., CVPR 2021).
The program prints the exported network's AUROC on the test images, and the smallest AUROC if every image, normal or
not, may move by eps in l2.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

import lipkit
from lipkit.certificates import auroc
from lipkit.training.losses import hkr

RADII = (0.1, 0.25, 0.5)


def strangers(x: Tensor, random: torch.Generator) -> Tensor:
    """Negatives (N, 1, 28, 28) made of normal images: turned, or put together from halves that do not fit."""
    n, side = len(x), x.shape[-1]
    other = x[torch.randperm(n, generator=random)]
    shift = torch.randint(4, 9, (n,), generator=random) * (2 * torch.randint(2, (n,), generator=random) - 1)
    rows = (torch.arange(side) - shift[:, None]) % side
    moved = other.gather(2, rows[:, None, :, None].expand_as(x))
    top = (torch.arange(side) < side // 2)[:, None]
    made = [
        torch.rot90(x, 1, (2, 3)),
        torch.rot90(x, 3, (2, 3)),
        torch.where(top, x, other.flip(2, 3)),
        torch.where(top, x, moved),
        torch.where(top, x.mT, moved).mT,
    ]
    return torch.stack(made)[torch.arange(n) % len(made), torch.arange(n)]


def detector(x: Tensor, steps: int, seed: int = 0) -> lipkit.modules.Network:
    """Train on the normal images alone; returns the exported network, whose score is larger for normal images."""
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = lipkit.models.mlp((128, 128), "cayley", input_shape=(1, 28, 28), classes=1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    target = torch.arange(2).repeat_interleave(128).flip(0)
    for _ in range(steps):
        normal = x[torch.randint(len(x), (128,), generator=random)]
        scores = model(torch.cat((normal, strangers(normal, random))))
        optimizer.zero_grad()
        hkr(scores, target).backward()
        optimizer.step()
        schedule.step()
    return lipkit.export(model, (1, 28, 28))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args(arguments)
    data = lipkit.data.load("mnist", root=given.root)
    x, y = data.train.batch(slice(None))
    test, label = data.test.batch(slice(None))
    record: dict[str, object] = {"radii": RADII, "steps": given.steps, "torch": torch.__version__}
    start = time.process_time()
    for digit in range(10):
        network = detector(x[y == digit], given.steps)
        proof = lipkit.prove(network)
        found = [auroc(network, test[label == digit], test[label != digit], eps, proof=proof) for eps in RADII]
        row = [round(found[0].auroc, 4), *(round(each.worst_auroc, 4) for each in found)]
        print(f"digit {digit}\n{found[1]}")
        record[str(digit)] = row
    record["seconds"] = round(time.process_time() - start, 1)
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
        (given.keep / "mnist-one-class.json").write_text(json.dumps(record).replace(', "', ',\n "') + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
