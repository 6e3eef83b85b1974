"""The thirteen laws over the table of families, float32 and float64: few shapes, each for a reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lipkit.errors import LipkitError
from lipkit.layers.families import FAMILIES, Family
from lipkit.testing import LAWS, check_layer, conv_options, conv_refusals, linear_options, linear_refusals

DTYPES = (torch.float32, torch.float64)
# The image sizes that one 3 x 3 layer is given, in this order: even, non-square, odd, kernel as large as the image, 1.
IMAGES = ((6, 6), (5, 9), (3, 9), (7, 7), (3, 3), (1, 1))
# Further layers: what -> (in_channels, out_channels, kernel_size, stride, images).
EXTRA: dict[str, tuple[int, int, int, int, tuple[tuple[int, int], ...]]] = {
    "fewer channels out": (6, 3, 3, 1, ((5, 7), (3, 6))),
    "kernel of 7 on 7": (3, 4, 7, 1, ((7, 7),)),
    "kernel of 5 on 1, 3 and 5": (4, 4, 5, 1, ((1, 1), (3, 4), (5, 5))),
    "even kernel": (3, 5, 2, 1, ((4, 6), (2, 2))),
    "stride 2": (2, 9, 3, 2, ((6, 12),)),
    "stride 2 that narrows": (3, 5, 3, 2, ((6, 6),)),
    "stride 3": (1, 8, 3, 3, ((9, 9),)),
    "stride 3 to one pixel": (2, 6, 1, 3, ((3, 3),)),
}
each_law = pytest.mark.parametrize("number", LAWS, ids=lambda n: f"{n}-{LAWS[n].name.replace(' ', '-')}")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_family = pytest.mark.parametrize("name", FAMILIES)


def promises(family: Family) -> dict[str, Any]:
    """What the table says about a family, as arguments of ``check_layer``."""
    return {
        "claim": family.claim,
        "slack": family.slack,
        "attained": family.attained,
        "train_gap": family.train_gap,
        "smooth": family.smooth,
    }


def inputs(family: Family, channels: int, kernel: int, stride: int, images: Any, most: int) -> list[tuple[int, ...]]:
    """The input shapes that the family accepts, at most ``most``."""
    return [(channels, h, w) for h, w in images if family.accepts(kernel, h // stride, w // stride)][:most]


def dense_families() -> list[str]:
    """Families with a dense layer that no family before them in the table has."""
    first: dict[Any, str] = {}
    for name, family in FAMILIES.items():
        layer = family.linear
        key = (layer.func, str(layer.keywords)) if isinstance(layer, partial) else layer
        first.setdefault(key, name)
    return list(first.values())


@each_law
@each_dtype
@each_family
def test_convolution(name: str, dtype: torch.dtype, number: int) -> None:
    family = FAMILIES[name]
    shapes = inputs(family, 3, 3, 1, IMAGES, 4)
    check_layer(
        partial(family.conv, in_channels=3, out_channels=8, kernel_size=3),
        input_shape=shapes,
        dtype=dtype,
        laws=[number],
        options={**conv_options(), **family.options},
        refusals=conv_refusals(*shapes[0]),
        # Compiling is the dearest part of the suite: once for each family.
        backends=("aot_eager",) if dtype == torch.float32 else (),
        **promises(family),
    )


@each_law
@each_dtype
@pytest.mark.parametrize("name", dense_families())
def test_dense_layer(name: str, dtype: torch.dtype, number: int) -> None:
    family = FAMILIES[name]
    check_layer(
        partial(family.linear, in_features=5, out_features=7),
        input_shape=(5,),
        dtype=dtype,
        laws=[number],
        options=linear_options(),
        refusals=linear_refusals(5),
        backends=("aot_eager",) if dtype == torch.float32 else (),
        **promises(family),
    )


@each_family
@pytest.mark.parametrize("what", EXTRA)
def test_bounds_of_other_shapes(name: str, what: str) -> None:
    family = FAMILIES[name]
    cin, cout, kernel, stride, images = EXTRA[what]
    shapes = inputs(family, cin, kernel, stride, images, 2)
    if not shapes:
        h, w = images[0]
        with pytest.raises(LipkitError, match=r"expected .*got "):
            family.conv(cin, cout, kernel, stride)(torch.zeros(1, cin, h, w))
        return
    make = partial(family.conv, cin, cout, kernel, stride)
    check_layer(make, input_shape=shapes, dtype=torch.float64, laws=(1, 2, 3, 11), **promises(family))
    check_layer(make, input_shape=shapes[:1], dtype=torch.float32, laws=(1, 2), **promises(family))


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)], ids=str)
@pytest.mark.parametrize("name", dense_families())
def test_bounds_of_other_dense_shapes(name: str, shape: tuple[int, int]) -> None:
    family = FAMILIES[name]
    for dtype in DTYPES:
        make = partial(family.linear, *shape)
        check_layer(make, input_shape=(shape[0],), dtype=dtype, laws=(1, 2, 3), **promises(family))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES)[:2])
def test_inductor(name: str) -> None:
    family = FAMILIES[name]
    shapes = inputs(family, 3, 3, 1, IMAGES, 1)
    make = partial(family.conv, 3, 8, 3)
    check_layer(make, input_shape=shapes, dtype=torch.float32, laws=[12], backends=["inductor"], **promises(family))
