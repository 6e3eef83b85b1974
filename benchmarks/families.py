"""The table of docs/families.md: what each family's new and trained convolution is, measured on its dense matrix.

    python benchmarks/families.py > docs/families.md

Singular values come from numpy's SVD of the dense matrix (of the Jacobians, for layers with their own activation), in
float64, at 4 -> 4 channels, kernel 3, image 9 x 9, after twenty steps of Adam on a random regression.
"""

from __future__ import annotations

import torch
from torch import nn

import lipkit
from lipkit.layers import after_step
from lipkit.layers.families import FAMILIES, Family
from lipkit.testing.reference import operators, singular_values

SHAPE, KERNEL = (4, 9, 9), 3


def trained(family: Family) -> nn.Module:
    """A convolution of the family after twenty optimiser steps (and its projection, where it has one)."""
    torch.manual_seed(0)
    layer = family.conv(SHAPE[0], SHAPE[0], KERNEL, dtype=torch.float64)
    x, y = torch.randn(16, *SHAPE, dtype=torch.float64), torch.randn(16, *SHAPE, dtype=torch.float64)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(20):
        optimizer.zero_grad()
        (layer(x) - y).square().mean().backward()
        optimizer.step()
    after_step(layer, SHAPE)
    return layer.eval()


def row(family: Family) -> str:
    """One line of the table."""
    layer = trained(family)
    plain = lipkit.export(layer, SHAPE)
    x = torch.randn(3, *SHAPE, dtype=torch.float64)
    values = singular_values(operators(plain, x))
    parameters = sum(p.numel() for p in layer.parameters())
    kinds = ", ".join(dict.fromkeys(type(m).__name__ for m in plain))
    bound = lipkit.lipschitz(plain).item()
    cells = (
        family.name, family.title, family.paper, family.equation, family.claim, family.sizes,
        f"{values.min():.6f}", f"{values.max():.6f}", f"{bound:.6f}", str(parameters), kinds,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    print("# Families of layers\n")
    print("Made by `python benchmarks/families.py > docs/families.md`: convolutions with 4 -> 4 channels and a 3 x 3")
    print(
        "kernel on 9 x 9 images, float64, after twenty steps of Adam. Singular values are those of the dense matrix of"
    )
    print("the exported layer (of its Jacobians at three points for layers with their own activation), by numpy's SVD;")
    print("`bound` is `lipschitz` of the exported layer, recomputed from its numbers.\n")
    heads = (
        "name", "method", "paper", "where", "promises", "accepts", "smallest s.v.", "largest s.v.", "bound",
        "parameters", "exports to",
    )  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for family in FAMILIES.values():
        print(row(family))


if __name__ == "__main__":
    main()
