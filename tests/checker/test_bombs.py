"""Small files that ask for much: refused before the memory is taken or the work is done."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lipkit_check as k

Bomb = tuple[list[dict[str, Any]], list[int], dict[str, Any]]
PLAIN = {"stride": [1, 1], "dilation": [1, 1], "groups": 1, "bias": False}
POOL = {"stride": 1, "padding": 0, "ceil_mode": False}


def of(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"type": kind, **arguments}


def conv(mode: str = "zeros", padding: int = 1) -> dict[str, Any]:
    shape = {"in_channels": 1, "out_channels": 1, "kernel_size": [3, 3], "padding": [padding] * 2}
    return of("Conv2d", **PLAIN, **shape, padding_mode=mode)


def linear(m: int, n: int) -> dict[str, Any]:
    return of("Linear", in_features=n, out_features=m, bias=False)


def many_pieces(n: int) -> dict[str, Any]:
    """Values of n pieces each, one beside the other."""
    cut = [of("Piece", dim=1, start=i % 4, stop=i % 4 + 1, step=1) for i in range(n)]
    turned = [of("ReLU")] * n
    pieces = [of("Piece", dim=1, start=0, stop=1, step=1) for _ in range(n)]
    joins = [of("Add", signs=[1] * n)] + [of("Concatenate", dim=1), of("Piece", dim=1, start=0, stop=1, step=1)] * n
    sources = [[0]] * n + [[i + 1] for i in range(n)] + [[n + i + 1] for i in range(n)]
    sources += [[2 * n + i + 1 for i in range(n)]]
    for i in range(n):
        at = 3 * n + 1 + 2 * i
        sources += [[at, 3 * n + 1], [at + 1]]
    return of("Graph", modules=[*cut, *turned, *pieces, *joins], sources=sources)


def doubled(n: int) -> dict[str, Any]:
    joins = [of("Concatenate", dim=1)] * n
    return of("Graph", modules=joins, sources=[[i, i] for i in range(n)])


def narrow(n: int) -> Bomb:
    """A matrix inequality of n rows, from layers of one number on one side."""
    tensors = {"0.weight": np.ones((n, 1)), "2.weight": np.ones((2, n)), "multiplier1": np.ones(n)}
    return [linear(n, 1), of("ReLU"), linear(2, n)], [1], tensors


def plane(n: int) -> Bomb:
    sizes = {"height": n, "width": 1, "kernel_size": [n, 1], "complex_pairs": True}
    layer = of("FourierConv2d", in_channels=1, out_channels=1, bias=False, **sizes)
    tensors = {"0.real": np.zeros((2, 1, 1)), "0.pair": np.zeros(((n - 2) // 2, 2, 1, 1))}
    return [layer], [1, n, 1], tensors


def series(n: int) -> Bomb:
    layer = of("TaylorConv2d", in_channels=1, out_channels=1, kernel_size=[1, 1], terms=100, bias=False)
    return [layer] * n, [1, 1, 1], {f"{i}.kernel": np.ones((1, 1, 1, 1)) for i in range(n)}


# By name: a network of a size, whose files hold next to nothing.
BOMBS: dict[str, Callable[[int], Bomb]] = {
    "AdaptiveAvgPool2d": lambda n: ([of("AdaptiveAvgPool2d", output_size=[n, 1])], [1, 8, 8], {}),
    "AvgPool2d": lambda n: ([of("Expand", shape=[1, n, 1]), of("AvgPool2d", kernel_size=1, **POOL,
                             count_include_pad=True, divisor_override=None)], [1, 1, 1], {}),
    "MaxPool2d": lambda n: ([of("Expand", shape=[1, n, 1]), of("MaxPool2d", kernel_size=[n // 2, 1], dilation=1,
                             **POOL)], [1, 1, 1], {}),
    "EnlargeBilinear": lambda n: ([of("EnlargeBilinear", rows=n, cols=1)], [1, 8, 1], {}),
    "Expand": lambda n: ([of("Expand", shape=[n, n])], [1, 1], {}),
    "Pad": lambda n: ([of("Pad", padding=[n, 0])], [1], {}),
    "Pad and back": lambda n: ([of("Pad", padding=[n, 0]), of("Pad", padding=[-n, 0])], [4], {}),
    "Pad twice": lambda n: ([of("Pad", padding=[0, n, 0, n])], [1, 1], {}),
    "Concatenate": lambda n: ([doubled(n.bit_length())], [4], {}),
    "MatrixProduct": lambda n: ([of("Expand", shape=[1, n, 1]), of("Reshape", shape=[n, 1]),
                                 of("Graph", modules=[of("Permute", dims=[2, 1]),
                                    of("MatrixProduct", rows=n, inner=1, cols=n)], sources=[[0], [0, 1]])],
                                [1, 1, 1], {"2.nodes.1.limits": np.ones(2)}),
    "convolution": lambda n: ([of("Expand", shape=[1, n, n]), conv()], [1, 1, 1], {"1.weight": np.ones((1, 1, 3, 3))}),
    "replicated": lambda n: ([of("Expand", shape=[1, n, 4]), conv("replicate")], [1, 1, 4],
                             {"1.weight": np.ones((1, 1, 3, 3))}),
    "FourierConv2d": plane, "TaylorConv2d": series, "multipliers": narrow,
    "Mean": lambda n: ([of("Mean", dims=[1], keepdim=True)], [n], {}),
    "input": lambda n: ([of("ReLU")], [n, n, n, n], {}),
    "logits": lambda n: ([of("Pad", padding=[n, 0])], [2], {}),
    "modules": lambda n: ([of("ReLU")] * n, [2], {}),
    "pieces": lambda n: ([many_pieces(n)], [4], {}),
    "Householder": lambda n: ([of("Householder", channels=2, order=n)], [2], {"0.angles": np.zeros((n, 1))}),
    "slopes": lambda n: ([of("LeakyReLU", negative_slope=1e37)] * n, [2], {}),
}  # fmt: skip


def network(bomb: Bomb) -> None:
    """The checker reads it."""
    modules, shape, tensors = bomb
    multipliers = {name[10:]: len(t) for name, t in tensors.items() if name.startswith("multiplier")}
    top = {"type": "Network", "modules": modules, "input_shape": shape, "multipliers": multipliers}
    k.ops = k.Floats()
    k.Network(top, tensors).constants()


def cost(bomb: Bomb) -> tuple[bool, int, int]:
    """Whether it is refused for its size, the peak of memory in bytes, and calls of functions."""
    calls, refused = 0, False

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        network(bomb)
    except k.Refused as reason:
        refused = any(text in str(reason) for text in ("pay for", "2^1100", "1 to 4096"))
        if not refused and "logits" not in str(reason):
            raise
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return refused, peak, calls


SIZES = {"AdaptiveAvgPool2d": 1 << 20, "Pad": 1 << 30, "Pad and back": 1 << 30, "pieces": 10,
         "Mean": 1 << 22, "logits": 1 << 20, "modules": 1 << 12, "TaylorConv2d": 50, "slopes": 100}  # fmt: skip
LONG = ("modules", "pieces")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in LONG)) for n in BOMBS])
def test_bombs_are_refused_before_they_cost_anything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    part = 8 if name in LONG else 1
    monkeypatch.setattr(k, "FREE", k.FREE // part)  # what is allowed in proportion
    refused, peak, calls = cost(BOMBS[name](SIZES.get(name, 1 << 14)))
    assert refused
    assert peak < (64 << 20) // part
    assert calls < 4_000_000 // part


ONE = {"kernel_size": [1, 1], "in_channels": 1, "out_channels": 1, "bias": False}
EACH: list[tuple[dict[str, Any], tuple[int, ...], dict[str, Any], str]] = [
    (of("Graph", modules=[linear(1, 1)] * 9, sources=[[i] for i in range(9)]), (1,),
     {f"nodes.{i}.weight": np.ones((1, 1)) for i in range(9)}, "a norm"),
    (conv(), (1, 1, 12_000), {"weight": np.ones((1, 1, 3, 3))}, "the angles"),
    (conv(), (1, 200, 900), {"weight": np.ones((1, 1, 3, 3))}, "a convolution on"),
    (of("ReLU"), (1 << 22,), {}, "an activation"), (of("Pad", padding=[1 << 22, 0]), (1,), {}, "an activation"),
    (of("Householder", channels=2, order=4096), (2,), {"angles": np.zeros((4096, 1))}, "^4096 angles"),
    (of("TaylorConv2d", **ONE, terms=100), (1, 1, 1), {"kernel": np.ones((1, 1, 1, 1))}, "a polynomial"),
    (of("FourierConv2d", **ONE, height=512, width=1, complex_pairs=True) | {"kernel_size": [512, 1]}, (1, 512, 1),
     {"real": np.zeros((2, 1, 1)), "pair": np.zeros((255, 2, 1, 1))}, "a symbol"),
    (of("Mean", dims=[1], keepdim=True), (1 << 20,), {}, "a mean"),
    (of("EnlargeBilinear", rows=2, cols=1), (1, 1024, 1), {}, "an enlargement"),
    (of("MaxPool2d", kernel_size=[2048, 1], dilation=1, **POOL), (1, 4096, 1), {}, "pooling windows"),
    (of("AvgPool2d", kernel_size=1, count_include_pad=True, divisor_override=1, **POOL), (1, 1024, 1), {}, "pooling"),
    (of("AdaptiveAvgPool2d", output_size=[1 << 18, 1]), (1, 8, 8), {}, "an output size"),
    (of("Graph", modules=[of("Add", signs=[1] * 16)], sources=[[0] * 16]), (1 << 19,), {}, "an activation"),
    (of("Network", modules=[linear(2, 1)], input_shape=[1 << 23, 1], multipliers={}), (), {}, "input shape"),
    (of("Network", modules=[of("Pad", padding=[1 << 10, 0])], input_shape=[2], multipliers={}), (), {}, "pairs of"),
    (of("Network", modules=narrow(1024)[0], input_shape=[1], multipliers={"1": 1024}), (), narrow(1024)[2], "a matrix"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(EACH)), ids=[why for *_, why in EACH])
def test_each_kind_of_work_is_paid_before_it_is_done(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape, tensors, why = EACH[case]
    monkeypatch.setattr(k, "ROW", 0)  # else multipliers pay for their inequality
    k.ops = k.Floats()
    tracemalloc.start()
    try:
        k.ops.left = k.FREE >> 5 * (why == "a norm")
        with pytest.raises(k.Refused, match=f"{why}.*: more than the stored numbers pay for"):
            k.build(config, k.Tensors(tensors), shape) if shape else k.Network(config, tensors)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_multipliers_pay_for_their_inequality_up_to_a_limit() -> None:
    k.ops = k.Floats()
    for count, paid in ((1, k.ROW), (100, 100 * k.ROW), (10_000, k.MOST)):
        config = of("Network", modules=[of("ReLU")], input_shape=[1], multipliers={"0": count})
        k.Network(config, {"multiplier0": np.ones(count)}, classes=False)
        assert paid <= k.ops.left + 4096 <= paid + k.FREE + k.SHARE * count + 4096
    assert not cost(narrow(1024))[0]
    assert cost(narrow(3000))[0]


def test_an_exact_factor_takes_longer_than_its_memory_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "ops", k.Integers())
    for n, paid in ((40, True), (200, False)):
        k.ops.left = 1 << 18
        assert k.positive(np.eye(n, dtype=np.int64) << k.PLACES, k.Fraction(0)) == paid


@pytest.mark.thorough
def test_forms_of_many_pieces_are_paid() -> None:
    k.ops = k.Floats()
    k.ops.left = k.FREE
    form = {(0, 1, i, i + 1, 1): k.Fraction(1) for i in range(1 + (1 << 16))}
    with pytest.raises(k.Refused, match="values of many pieces"):
        k.join(of("Add", signs=[1]), k.Tensors({}), [(1,)]).form([form], [])
    k.ops.left = k.FREE
    with pytest.raises(k.Refused, match="values of many pieces"):
        k.settled([form], [{}])
    k.ops.left = float("inf")
    with pytest.raises(k.Refused, match="pay for"):
        k.spend(k.LIMIT + 1, "anything")


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOMBS)
def test_what_is_just_small_enough_costs_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2
    monkeypatch.setattr(k, "FREE", k.FREE // 32)  # what is allowed in proportion
    monkeypatch.setattr(k, "ROW", 0)
    while not (found := cost(BOMBS[name](2 * size)))[0]:
        size, (_, peak, calls) = 2 * size, found
        assert peak < 4 << 20, size
        assert calls < 125_000, size
