"""The thirteen laws for the layers that shape a network: activations, normalisation, gain, residual, pooling."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.laws.test_families import FORMATS, REFUSALS
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import (
    CayleyConv2d,
    CayleyLinear,
    GroupSort,
    HalfAbs,
    Householder,
    L2NormPool2d,
    LPReLU,
    MaxMin,
    NActivation,
    Normalize,
    PositionCode,
    Residual,
    Scale,
    ScaledAvgPool2d,
)
from lipkit.lowering import lipschitz
from lipkit.modules import output_shape
from lipkit.testing import LAWS, Refusal, check_layer


def bad(what: str, call: Any, error: Any, *words: str) -> Refusal:
    return Refusal(what, call, error, words)


def residual_network(dtype: torch.dtype) -> nn.Module:
    return Residual(
        nn.Sequential(CayleyLinear(6, 6, dtype=dtype), MaxMin(), CayleyLinear(6, 6, dtype=dtype)), 0.7, dtype=dtype
    )


def residual_convolution(dtype: torch.dtype, weight: float = 0.5) -> nn.Module:
    return Residual(CayleyConv2d(4, 4, 3, dtype=dtype), weight, shortcut=nn.Sequential(MaxMin()), dtype=dtype)


def network(dtype: torch.dtype) -> nn.Module:
    """A bit of everything, with a target constant of 3."""
    return nn.Sequential(
        Scale(3.0, dtype=dtype),
        CayleyConv2d(3, 8, 3, stride=2, dtype=dtype),
        MaxMin(),
        ScaledAvgPool2d(2),
        nn.Flatten(),
        CayleyLinear(8, 6, dtype=dtype),
    )


# Arguments of check_layer, by name. A law about bounds needs the true constant: `attained` is its reached share.
LAYERS: dict[str, dict[str, Any]] = {
    "MaxMin": {
        "make": MaxMin,
        "input_shape": [(6,), (4, 3, 5)],
        "output_shape": lambda shape: shape,
        "refusals": [bad("odd channels", lambda make: output_shape(make(), (5,)), ShapeError, "5")],
    },
    "GroupSort": {
        "make": partial(GroupSort, group_size=3),
        "input_shape": [(6,), (9, 2, 3)],
        "output_shape": lambda shape: shape,
        "options": {"group_size": (2, 3, 6)},
        "refusals": [
            bad("group_size=1", lambda make: make(group_size=1), OptionError, "group_size", "1"),
            bad("channels", lambda make: output_shape(make(), (7,)), ShapeError, "7", "3"),
        ],
    },
    "full sort": {
        "make": partial(GroupSort, group_size=None),
        "input_shape": [(7,), (3, 2, 3)],
        "output_shape": lambda shape: shape,
    },
    "HalfAbs": {
        "make": HalfAbs,
        "input_shape": [(6,), (5, 3, 5), (1,)],
        "output_shape": lambda shape: shape,
    },
    "NActivation": {
        "make": partial(NActivation, 4),
        "input_shape": [(4,), (4, 3, 3)],
        "output_shape": lambda shape: shape,
        "options": {"low": (-0.5, 0.7), "high": (0.5, 0.1)},
        "refusals": [
            bad("channels", lambda make: output_shape(make(), (5,)), ShapeError, "4", "5"),
            bad("none", lambda make: NActivation(0), OptionError, "0"),
            bad("low=nan", lambda make: make(low=float("nan")), OptionError, "nan"),
        ],
    },
    "LPReLU": {
        "make": partial(LPReLU, 4),
        "input_shape": [(4,), (4, 3, 3)],
        "output_shape": lambda shape: shape,
        "options": {"init": (0.25, -3.0, 5.0)},
        "claim": "contraction",
        "attained": 1.0,
        "refusals": [bad("none", lambda make: LPReLU(0), OptionError, "0")],
    },
    "Householder": {
        "make": partial(Householder, 4),
        "input_shape": [(4,), (4, 3, 3)],
        "output_shape": lambda shape: shape,
        "options": {"order": (1, 2, 3)},
        "refusals": [
            bad("odd", lambda make: Householder(3), OptionError, "3"),
            bad("order=0", lambda make: Householder(4, 0), OptionError, "0"),
            bad("channels", lambda make: output_shape(make(), (6,)), ShapeError, "6", "4"),
            bad("odd channels", lambda make: output_shape(make(), (5,)), ShapeError, "5", "4"),
        ],
    },
    "PositionCode": {
        "make": partial(PositionCode, 2, 3, 4),
        "input_shape": (2, 3, 4),
        "output_shape": lambda shape: shape,
        "refusals": [
            bad("shape", lambda make: output_shape(make(), (2, 3, 1)), ShapeError, "(2, 3, 4)", "1"),
            bad("none", lambda make: PositionCode(2, 0, 4), OptionError, "0"),
        ],
    },
    "L2NormPool2d": {
        "make": L2NormPool2d,
        "input_shape": [(2, 4, 6), (3, 2, 4)],
        "output_shape": lambda shape: (shape[0], 1, 1),
        "refusals": [
            bad("kernel_size=0", lambda make: L2NormPool2d(0), OptionError, "kernel_size", "0"),
            bad("odd image", lambda make: output_shape(L2NormPool2d(2), (2, 5, 4)), ShapeError, "2", "5"),
        ],
    },
    "L2NormPool2d of windows": {
        "make": partial(L2NormPool2d, 2),
        "input_shape": [(2, 4, 6), (3, 2, 4)],
        "output_shape": lambda shape: (shape[0], shape[1] // 2, shape[2] // 2),
    },
    "Normalize": {
        "make": partial(Normalize, mean=[0.5, 0.2], std=[0.25, 0.5]),
        "input_shape": [(2, 3, 5), (2,)],
        "output_shape": lambda shape: shape,
        "claim": "contraction",
        "gamma": 4.0,
        "attained": 1.0,
        "options": {"mean": ([0.5, 0.2], [0.0, 0.2]), "std": ([0.25, 0.5], [0.3, 0.5])},
        "refusals": [
            bad("std=0", lambda make: make(std=[0.25, 0.0]), OptionError, "0.0"),
            bad("std=nan", lambda make: make(std=[0.25, float("nan")]), OptionError, "nan"),
            bad("another length", lambda make: make(std=[0.25]), OptionError, "[0.25]"),
            bad("channels", lambda make: output_shape(make(), (3, 4, 4)), ShapeError, "2", "3"),
            bad("dtype", lambda make: make(dtype=torch.float16), OptionError, "torch.float16"),
        ],
    },
    "Scale": {
        "make": partial(Scale, 3.0),
        "input_shape": [(4,), (2, 3, 3)],
        "output_shape": lambda shape: shape,
        "gamma": 3.0,
        "refusals": [
            bad("gamma=0", lambda make: Scale(0.0), OptionError, "gamma", "0.0"),
            bad("gamma=inf", lambda make: Scale(float("inf")), OptionError, "gamma", "inf"),
            bad("above float32", lambda make: Scale(1e39, learnable=True), OptionError, "torch.float32", "1e+39"),
            bad("below float32", lambda make: Scale(1e-46), OptionError, "torch.float32", "1e-46"),
        ],
    },
    # Its constant is whatever it has learnt, so it is computed, not claimed.
    "learnable Scale": {
        "make": partial(Scale, learnable=True, gamma=0.5),
        "input_shape": (4,),
        "claim": "none",
        "attained": 1.0,
        "options": {"gamma": (0.5, 2.0)},
    },
    "Residual": {
        "make": residual_network,
        "input_shape": (6,),
        "claim": "contraction",
        "attained": 0.3,
        "refusals": [
            bad("weight=1", lambda make: Residual(nn.ReLU(), 1.0), OptionError, "weight", "1.0"),
            bad(
                "shape",
                lambda make: output_shape(Residual(CayleyLinear(3, 4)), (3,)),
                ShapeError,
                ", 3)",
                ", 4)",
            ),
            bad(
                "in-place body",
                lambda make: lipschitz(Residual(nn.ReLU(inplace=True))),
                NoRuleError,
                "in-place",
                "ReLU",
            ),
        ],
    },
    "Residual of convolutions": {
        "backends": (),
        "make": residual_convolution,
        "input_shape": [(4, 5, 3), (4, 2, 2)],
        "claim": "contraction",
        "attained": 0.3,
        "options": {"weight": (0.5, 0.9)},
    },
    "ScaledAvgPool2d": {
        "make": partial(ScaledAvgPool2d, kernel_size=2),
        "input_shape": [(2, 6, 6), (3, 2, 4)],
        "output_shape": lambda shape: (shape[0], shape[1] // 2, shape[2] // 2),
        "options": {"kernel_size": (2, 3, 6)},
        "refusals": [
            bad("kernel_size=0", lambda make: make(kernel_size=0), OptionError, "kernel_size", "0"),
            bad("odd image", lambda make: output_shape(make(), (2, 5, 4)), ShapeError, "2", "5"),
        ],
    },
    "a network": {
        "backends": (),  # each of its layers is compiled by itself
        "make": network,
        "input_shape": (3, 4, 4),
        "claim": "contraction",
        "gamma": 3.0,
        "attained": 0.3,
    },
}


@pytest.mark.thorough
@pytest.mark.usual(102)
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        pytest.param(dtype, n, id=f"{str(dtype).removeprefix('torch.')}-{n}-{LAWS[n].name.replace(' ', '-')}")
        for n in LAWS
        if n != REFUSALS
        for dtype in FORMATS.get(n, (torch.float64,))
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_structure(name: str, dtype: torch.dtype, number: int) -> None:
    backends = ("aot_eager",) if dtype == torch.float32 else ()
    check_layer(**{"dtype": dtype, "laws": [number], "backends": backends, **LAYERS[name]})


@pytest.mark.parametrize("name", LAYERS)
def test_refusals(name: str) -> None:
    check_layer(**{"laws": [REFUSALS], **LAYERS[name]})


class Halved(nn.ModuleList):
    """x / 2: an empty list, which Python takes for false."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_a_shortcut_that_python_takes_for_false_is_used() -> None:
    assert not Halved()
    assert Residual(nn.Identity(), 0.5, shortcut=Halved())(torch.ones(1, 2)).tolist() == [[0.75, 0.75]]
