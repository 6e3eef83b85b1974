"""The thirteen laws over the table of families, float32 and float64: few shapes, each for a reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lipkit.errors import LipkitError
from lipkit.layers.bro import BroLinear
from lipkit.layers.dense import BjorckLinear, OrthogonalLinear
from lipkit.layers.families import FAMILIES, Family
from lipkit.layers.rko import CholeskyLinear
from lipkit.layers.sandwich import SandwichLinear
from lipkit.layers.sll import CplLinear, SllLinear
from lipkit.linalg import bjorck
from lipkit.linalg.table import ORTHOGONALIZE
from lipkit.testing import LAWS, check_layer, conv_options, conv_refusals, linear_options, linear_refusals

DTYPES = (torch.float32, torch.float64)
# pytest -m fast takes float64 only, and compiles nothing.
COMPILED = 12
REFUSALS = 13
# The image sizes that one 3 x 3 layer is given, in this order: even, non-square, odd, kernel as large as the image, 1.
IMAGES = ((6, 6), (5, 4), (3, 9), (5, 5), (3, 3), (1, 1))
# Further layers: what -> (in_channels, out_channels, kernel_size, stride, images).
EXTRA: dict[str, tuple[int, int, int, int, tuple[tuple[int, int], ...]]] = {
    "fewer channels out": (4, 2, 3, 1, ((5, 4), (3, 6))),
    "kernel of 7 on 7": (2, 3, 7, 1, ((7, 7),)),
    "kernel of 5 on 1, 3 and 5": (3, 3, 5, 1, ((1, 1), (3, 4), (5, 5))),
    "even kernel": (3, 5, 2, 1, ((4, 6), (2, 2))),
    "stride 2": (1, 5, 3, 2, ((6, 12),)),
    "stride 2 that narrows": (2, 5, 3, 2, ((6, 6),)),
    "stride 3": (1, 8, 3, 3, ((9, 9),)),
    "stride 3 to one pixel": (2, 6, 1, 3, ((3, 3),)),
    "1 x 1": (3, 5, 1, 1, ((4, 6), (1, 1))),
    "1 x 1 with stride 2": (2, 9, 1, 2, ((6, 4),)),
}
# The proved norms inside CPL and LiResNet depend on values: they compile in pieces, and slowly.
GRAPH_BREAKS = {"cpl", "liresnet"}
# Unrolled iterations take seconds to compile; two steps are as telling.
FEWER: dict[str, dict[str, Any]] = {
    "ossn": {"iterations": 2},
    **{key: {"orthogonalize": partial(bjorck, iterations=2)} for key in ("bcop", "rko")},
}
# The laws about rounding hold in both formats. Of the others, law 12 is about leaving float32, and all else is tested
# in float64: it is not torch's default, so that a forgotten dtype shows.
FORMATS = {1: DTYPES, 2: DTYPES, 3: DTYPES, 10: DTYPES, 11: DTYPES, COMPILED: (torch.float32,)}
each_law = pytest.mark.parametrize(
    ("dtype", "number"),
    [
        pytest.param(
            dtype,
            n,
            marks=pytest.mark.thorough if n == COMPILED or dtype == torch.float32 else [],
            id=f"{str(dtype).removeprefix('torch.')}-{n}-{LAWS[n].name.replace(' ', '-')}",
        )
        for n in LAWS
        if n != REFUSALS
        for dtype in FORMATS.get(n, (torch.float64,))
    ],
)
each_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.thorough, id="float32"), pytest.param(torch.float64, id="float64")],
)
# pytest -m fast: a closed form, an iteration, phases, and a block that is more than a linear map.
CORE = {"cayley", "rko", "eco", "sandwich"}
COMPILED_CONV = "aol"
COMPILED_BY_DEFAULT = {"cayley", "sandwich"}  # a linear map, and (of dense layers) more than one
each_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in CORE else pytest.mark.thorough) for name in FAMILIES]
)


def promises(family: Family) -> dict[str, Any]:
    """What the table says about a family, as arguments of ``check_layer``."""
    return {
        "claim": family.claim,
        "slack": family.slack,
        "attained": family.attained,
        "train_gap": family.train_gap,
        "smooth": family.smooth,
        "fullgraph": family.name not in GRAPH_BREAKS,
    }


def inputs(family: Family, channels: int, kernel: int, stride: int, images: Any, most: int) -> list[tuple[int, ...]]:
    """The input shapes that the family accepts, at most ``most``."""
    return [(channels, h, w) for h, w in images if family.accepts(kernel, h // stride, w // stride)][:most]


def dense_layers() -> dict[str, tuple[Callable[..., nn.Module], Family]]:
    """Every dense constructor of the table once, under the name of the first family that has it."""
    found: dict[Any, tuple[str, Callable[..., nn.Module], Family]] = {}
    for name, family in FAMILIES.items():
        for what, layer in ((name, family.linear), (f"{name} affine", family.affine)):
            key = (layer.func, str(layer.keywords)) if isinstance(layer, partial) else layer
            if layer is not None:
                found.setdefault(key, (what, layer, family))
    return {what: (layer, family) for what, layer, family in found.values()}


DENSE = dense_layers()
# Options of the dense constructors, beside those of nn.Linear.
DENSE_OPTIONS: dict[Any, dict[str, tuple[Any, ...]]] = {
    SllLinear: {"activation": ("relu", "tanh"), "hidden": (4, 6)},
    CplLinear: {"activation": ("relu", "tanh"), "hidden": (4, 6)},
    SandwichLinear: {"activation": ("relu", "tanh", None)},
    BroLinear: {"rank": (1, 2), "depth": (1, 4)},
    CholeskyLinear: {"ridge": (1e-3, 0.1)},
}


@pytest.mark.thorough
@pytest.mark.usual(120)
@each_law
@each_family
def test_convolution(name: str, dtype: torch.dtype, number: int) -> None:
    family = FAMILIES[name]
    shapes = inputs(family, 3, 3, 1, IMAGES, 3)[::2]
    fewer = FEWER.get(name, {}) if number == 12 else {}
    check_layer(
        partial(family.conv, in_channels=3, out_channels=5, kernel_size=3, **fewer),
        input_shape=shapes,
        dtype=dtype,
        laws=[number],
        options={**conv_options(), **family.options},
        # Compiling is the dearest part of the suite: here one family, below the others.
        backends=("aot_eager",) if name == COMPILED_CONV else (),
        **promises(family),
    )


@each_family
def test_refusals_of_a_convolution(name: str) -> None:
    family = FAMILIES[name]
    shape, *_ = inputs(family, 3, 3, 1, IMAGES, 1)
    make = partial(family.conv, in_channels=3, out_channels=5, kernel_size=3)
    check_layer(make, input_shape=shape, laws=[REFUSALS], refusals=conv_refusals(*shape), **promises(family))


@pytest.mark.parametrize("name", DENSE)
def test_refusals_of_a_dense_layer(name: str) -> None:
    layer, family = DENSE[name]
    make = partial(layer, in_features=5, out_features=7)
    check_layer(make, input_shape=(5,), laws=[REFUSALS], refusals=linear_refusals(5), **promises(family))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in GRAPH_BREAKS | {COMPILED_CONV}])
def test_compiled_convolution(name: str) -> None:
    family = FAMILIES[name]
    make = partial(family.conv, in_channels=3, out_channels=5, kernel_size=3, **FEWER.get(name, {}))
    shapes = inputs(family, 3, 3, 1, IMAGES, 3)
    options = {"dtype": torch.float32, "backends": ("aot_eager",)}
    check_layer(make, input_shape=shapes, laws=[COMPILED], **options, **promises(family))


@pytest.mark.thorough
@pytest.mark.usual(64)
@each_law
@pytest.mark.parametrize("name", DENSE)
def test_dense_layer(name: str, dtype: torch.dtype, number: int) -> None:
    layer, family = DENSE[name]
    fewer = {"iterations": 2} if layer is BjorckLinear and number == 12 else {}
    check_layer(
        partial(layer, in_features=5, out_features=7, **fewer),
        input_shape=(5,),
        dtype=dtype,
        laws=[number],
        options={**linear_options(), **DENSE_OPTIONS.get(layer, {})},
        backends=("aot_eager",) if name in COMPILED_BY_DEFAULT else (),
        **promises(family),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DENSE if name not in COMPILED_BY_DEFAULT | GRAPH_BREAKS])
def test_compiled_dense_layer(name: str) -> None:
    layer, family = DENSE[name]
    make = partial(layer, in_features=5, out_features=7, **({"iterations": 2} if layer is BjorckLinear else {}))
    check_layer(make, input_shape=(5,), dtype=torch.float32, laws=[COMPILED], **promises(family))


def test_every_way_to_orthogonalise_a_dense_layer_differs() -> None:
    make = partial(OrthogonalLinear, in_features=5, out_features=7)
    check_layer(make, input_shape=(5,), laws=[8], options={"orthogonalize": tuple(ORTHOGONALIZE)})


@pytest.mark.thorough
@each_dtype
@pytest.mark.parametrize("function", ORTHOGONALIZE)
def test_dense_layer_of_each_function(function: str, dtype: torch.dtype) -> None:
    make = partial(OrthogonalLinear, 6, 4, orthogonalize=function)
    laws = (1, 2, 3, 10) if dtype == torch.float32 else (*range(1, 8), 9, 10)
    check_layer(make, input_shape=(6,), dtype=dtype, laws=laws)


@pytest.mark.thorough
@pytest.mark.usual(72)
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
    # Every layer is sound and attains its bound; of exports, sizes and float32 every second one, in turns.
    every_second = (list(FAMILIES).index(name) + list(EXTRA).index(what)) % 2 == 0
    laws = (1, 2, 3, 11) if every_second else (1, 2)
    check_layer(make, input_shape=shapes, dtype=torch.float64, laws=laws, **promises(family))
    if stride > 1 and every_second:  # float32 without a stride: test_convolution
        check_layer(make, input_shape=shapes[:1], dtype=torch.float32, laws=(1, 2), **promises(family))


@pytest.mark.thorough
@pytest.mark.usual(16)
@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 6)], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_bounds_of_other_dense_shapes(name: str, shape: tuple[int, int]) -> None:
    layer, family = DENSE[name]
    for dtype in DTYPES:
        check_layer(partial(layer, *shape), input_shape=(shape[0],), dtype=dtype, laws=(1, 2, 3), **promises(family))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES)[:2])
def test_inductor(name: str) -> None:
    family = FAMILIES[name]
    shapes = inputs(family, 3, 3, 1, IMAGES, 1)
    make = partial(family.conv, 3, 8, 3)
    check_layer(make, input_shape=shapes, dtype=torch.float32, laws=[12], backends=["inductor"], **promises(family))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GRAPH_BREAKS))
def test_compiled_in_pieces(name: str) -> None:
    family = FAMILIES[name]
    make = partial(family.linear, 5, 7)
    check_layer(make, input_shape=(5,), dtype=torch.float32, laws=[12], **promises(family))
