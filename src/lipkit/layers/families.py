"""The table of layer families: acronym -> constructors, paper, equation, what it promises, what it accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers.cayley import CayleyConv2d, CayleyLinear

Accepts = Callable[[int, int, int], bool]


@dataclass(frozen=True)
class Family:
    """One way to constrain a layer.

    Attributes:
        name: acronym, as used in recipes (``layer=cayley``).
        title: the method in words.
        paper, equation: where it comes from.
        conv, linear: constructors with the argument order of ``nn.Conv2d`` and ``nn.Linear``.
        claim: 'orthogonal' (all singular values 1), 'contraction' (at most 1), or 'none' (``lipschitz`` computes the
            constant from the numbers).
        sizes: the kernels and images it accepts, in words.
        accepts: the same as a predicate of kernel size, height and width (after downsampling).
        options: keyword options of the convolution and the values that the laws try.
        slack: relative amount by which ``lipschitz`` of a layer may exceed 1 (a truncation error in the bound).
        attained: share of its bound that the norm of a new layer reaches at least (not for 'orthogonal').
        train_gap: declared relative difference between training and evaluation mode (Taylor terms).
        smooth: whether the layer is differentiable where singular values of a parameter coincide.
    """

    name: str
    title: str
    paper: str
    equation: str
    conv: Callable[..., nn.Module]
    linear: Callable[..., nn.Module]
    claim: str = "orthogonal"
    sizes: str = "any kernel, any image"
    accepts: Accepts = field(default=lambda k, h, w: True)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    slack: float = 0.0
    attained: float | None = None
    train_gap: float = 0.0
    smooth: bool = True


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="cayley",
            title="Cayley transform at each frequency",
            paper="Trockman & Kolter, ICLR 2021",
            equation="algorithm 1, proposition A.7",
            conv=CayleyConv2d,
            linear=CayleyLinear,
        ),
    )
}


def get(name: str) -> Family:
    """The family of this acronym.

    Raises:
        OptionError: unknown acronym; the message lists the known ones.

    >>> get("cayley").conv.__name__
    'CayleyConv2d'
    """
    if name not in FAMILIES:
        raise OptionError(f"layer: expected one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def names() -> list[str]:
    """Every acronym, in the order of the table."""
    return list(FAMILIES)
