"""The table of layer families: acronym -> constructors, paper, equation, what it promises, what it accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from lipkit.errors import OptionError
from lipkit.layers.aol import AolConv2d, AolLinear
from lipkit.layers.bcop import BcopConv2d, cayley_bcop
from lipkit.layers.cayley import CayleyConv2d, CayleyLinear
from lipkit.layers.dense import BjorckLinear, OrthogonalLinear
from lipkit.layers.eco import EcoConv2d
from lipkit.layers.lot import LotConv2d
from lipkit.layers.ossn import OssnConv2d
from lipkit.layers.rko import RkoConv2d, crko_conv2d
from lipkit.layers.sandwich import SandwichLinear
from lipkit.layers.sandwich_conv import SandwichConv2d
from lipkit.layers.sll import CplConv2d, CplLinear, SllConv2d, SllLinear
from lipkit.layers.soc import SocConv2d
from lipkit.layers.svcm import SvcmConv2d

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
        own_activation: whether the layers contain their activation: a model puts none after them.
        affine: constructor of the affine dense layer that ends a network, where ``linear`` is not affine.
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
    own_activation: bool = False
    affine: Callable[..., nn.Module] | None = None

    def last(self, in_features: int, out_features: int, **options: Any) -> nn.Module:
        """The affine dense layer of this family: the last one of a network."""
        return (self.affine or self.linear)(in_features, out_features, **options)


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
        Family(
            name="aol",
            title="Almost-orthogonal: columns rescaled by a diagonal bound",
            paper="Prach & Lampert, ECCV 2022",
            equation="theorems 1 and 2",
            conv=AolConv2d,
            linear=AolLinear,
            claim="contraction",
            smooth=False,
        ),
        Family(
            name="rko",
            title="reshaped kernel, Björck orthonormalisation, divided by the root of its taps",
            paper="Li et al., NeurIPS 2019",
            equation="section 4.1",
            conv=RkoConv2d,
            linear=BjorckLinear,
            claim="contraction",
            options={"orthogonalize": ("bjorck", "polar", "exponential")},
        ),
        Family(
            name="crko",
            title="reshaped kernel, Cayley transform, divided by the root of its taps",
            paper="Trockman & Kolter, ICLR 2021",
            equation="section 6",
            conv=crko_conv2d,
            linear=CayleyLinear,
            claim="contraction",
            options={"orthogonalize": ("cayley", "householder")},
        ),
        Family(
            name="ossn",
            title="divided by its norm, estimated by the convolutional power method",
            paper="Gouk et al., Machine Learning 2021",
            equation="section 3",
            conv=OssnConv2d,
            linear=BjorckLinear,
            claim="none",
            smooth=False,
        ),
        Family(
            name="svcm",
            title="singular values clipped by alternating projections between optimiser steps",
            paper="Sedghi, Gupta & Long, ICLR 2019",
            equation="section 3, algorithm 1",
            conv=SvcmConv2d,
            linear=BjorckLinear,
            claim="none",
        ),
        Family(
            name="lot",
            title="Polar factor at each frequency",
            paper="Xu, Li & Li, NeurIPS 2022",
            equation="equation 4, algorithm 1",
            conv=LotConv2d,
            linear=partial(OrthogonalLinear, orthogonalize="polar"),
            options={"orthogonalize": ("polar", "bjorck", "newton_schulz", "cayley")},
        ),
        Family(
            name="soc",
            title="Exponential of a skew kernel, by Taylor terms",
            paper="Singla & Feizi, ICML 2021",
            equation="theorems 2 to 4, algorithm 1",
            conv=SocConv2d,
            linear=CayleyLinear,
            sizes="odd kernels, any image",
            accepts=lambda k, h, w: k % 2 == 1,
            options={"train_terms": (3, 5), "eval_terms": (5, 10)},
            slack=1e-3,
            train_gap=1.5e-3,
        ),
        Family(
            name="eco",
            title="Exponential of skew matrices at the k^2 frequencies of a dilated kernel",
            paper="Yu, Li, Cai & Li, ICLR 2022",
            equation="algorithm 1, equations 14 to 17, appendices A and B",
            conv=EcoConv2d,
            linear=CayleyLinear,
            sizes="kernels that divide the image (after downsampling), odd or even",
            accepts=lambda k, h, w: h % k == 0 and w % k == 0,
            options={
                "orthogonalize": ("taylor", "exponential", "cayley"),
                "train_terms": (3, 5),
                "eval_terms": (5, 10),
                "complex_p0": (False, True),
                "evaluation": ("phase", "dilated"),
            },
            slack=1e-3,
            train_gap=1.5e-3,
        ),
        Family(
            name="bcop",
            title="Block convolution of projectors, by Björck iteration",
            paper="Li et al., NeurIPS 2019",
            equation="algorithm 1",
            conv=BcopConv2d,
            linear=BjorckLinear,
            options={"orthogonalize": ("bjorck", "cayley")},
        ),
        Family(
            name="cayley_bcop",
            title="Block convolution of projectors, by the Cayley transform",
            paper="Trockman & Kolter, ICLR 2021",
            equation="section 5; Li et al. 2019, algorithm 1",
            conv=cayley_bcop,
            linear=CayleyLinear,
        ),
        Family(
            name="sll",
            title="Residual around an activation, weight used twice, diagonal bound",
            paper="Araujo et al., ICLR 2023",
            equation="theorem 3",
            conv=SllConv2d,
            linear=SllLinear,
            claim="contraction",
            smooth=False,
            sizes="odd kernels, any image",
            accepts=lambda k, h, w: k % 2 == 1,
            options={"activation": ("relu", "tanh"), "hidden": (4, 6)},
            own_activation=True,
            affine=CayleyLinear,
        ),
        Family(
            name="cpl",
            title="Residual around an activation, weight used twice, divided by its squared norm",
            paper="Meunier et al., ICML 2022",
            equation="equation 8",
            conv=CplConv2d,
            linear=CplLinear,
            claim="contraction",
            smooth=False,
            sizes="odd kernels, any image",
            accepts=lambda k, h, w: k % 2 == 1,
            options={"activation": ("relu", "tanh"), "hidden": (4, 6)},
            own_activation=True,
            affine=CayleyLinear,
        ),
        Family(
            name="sandwich",
            title="linear map, activation and linear map, from one Cayley transform at each frequency",
            paper="Wang & Manchester, ICML 2023",
            equation="equation 10, algorithm 1",
            conv=SandwichConv2d,
            linear=SandwichLinear,
            claim="contraction",
            options={"activation": ("relu", "tanh", None)},
            own_activation=True,
            affine=partial(SandwichLinear, activation=None),
        ),
    )
}
"""Every family by its acronym, which the models take as ``layer``."""


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
