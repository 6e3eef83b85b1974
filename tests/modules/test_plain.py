"""A module from outside answers everything by one row: constant, rounding, storage, range, integer program, ONNX."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit.errors import NoRuleError, OptionError
from lipkit.modules import ROWS, Plain, add_plain, exact, lipschitz_rule, one_sign


class Turn(nn.Module):
    """Each pair (a, b) of the two halves of a vector by a quarter turn: (-b, a)."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        return torch.cat((-b, a), dim=1)


def program(builder: Any, module: Turn, value: Any, gain: float) -> Any:
    matrix = module(torch.eye(*2 * value.shape)).T
    return builder.linear(value, gain, value.shape, matrix, None, lambda change: float(change.norm()))


@pytest.fixture(autouse=True)
def row() -> Iterator[None]:
    add_plain(Plain(Turn, constant=1.0, rounding=exact, stored={}, range=one_sign, integer=program))
    yield
    del ROWS[Turn]


def network() -> lipkit.modules.Network:
    torch.manual_seed(0)
    net = lipkit.export(nn.Sequential(nn.Linear(4, 6), Turn(), nn.ReLU(), Turn(), nn.Linear(6, 3)), (4,))
    net.input_range = (0.0, 1.0)
    return net


@pytest.mark.parametrize("evaluator", ["float64", "float32", "integer"])
def test_it_is_bounded_and_certified(evaluator: str) -> None:
    net, x = network(), torch.rand(20, 4)
    assert [type(m) for m in net] == [nn.Linear, Turn, nn.ReLU, Turn, nn.Linear]
    norms = [float(torch.linalg.matrix_norm(net[i].weight.double(), 2)) for i in (0, 4)]
    assert float(lipkit.lipschitz(net)) == pytest.approx(math.prod(norms), rel=1e-9)
    y = net(x).argmax(1)
    found = lipkit.certify(net, x, y, evaluator=evaluator).radius
    ignored = lipkit.certify(net, x, y, rounding="ignore").radius
    assert (found <= ignored).all()
    torch.testing.assert_close(found, ignored, rtol=1e-3, atol=1e-5)


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    net, x = network(), torch.rand(5, 4)
    assert torch.equal(lipkit.load(lipkit.save(net, tmp_path / "net"))(x), net(x))


def test_its_range_limits_products() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = Turn()

        def forward(self, x: Tensor) -> Tensor:
            return self.turn(x) * x

    product = lipkit.export(Squares(), (4,), box=(-1.0, 3.0))[0].nodes[1]
    assert product.limits.tolist() == pytest.approx([3.0, 3.0], rel=1e-5)  # 1 + 4 by the constant alone


@pytest.mark.thorough
def test_it_is_written_as_onnx(tmp_path: Path) -> None:
    if importlib.util.find_spec("onnx") is None:
        pytest.skip("onnx is not installed")
    from lipkit.interop import onnx_runtime, write_onnx

    net, x = network(), torch.rand(5, 4)
    torch.testing.assert_close(onnx_runtime(write_onnx(net, tmp_path / "net.onnx"))(x), net(x), rtol=0, atol=1e-5)


def test_what_a_row_does_not_answer_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = network(), torch.rand(2, 4), torch.zeros(2, dtype=torch.int64)
    bare = Plain(Turn, 1.0, exact)
    for row, call, words in (
        (bare, lambda: lipkit.certify(net, x, y, evaluator="integer"), "an integer program .*Turn"),
        (bare, lambda: lipkit.save(net, tmp_path), "expected a plain module .*Turn"),
        (bare._replace(rounding=None), lambda: lipkit.certify(net, x, y), "rounding='sound': .*Turn, which has none"),
    ):
        monkeypatch.setitem(ROWS, Turn, row)
        with pytest.raises((NoRuleError, OptionError), match=words):
            call()


def test_a_type_and_a_name_have_one_row() -> None:
    with pytest.raises(NoRuleError, match="Turn already has a rule"):
        add_plain(Plain(Turn))
    with pytest.raises(NoRuleError, match="Turn already has a rule"):
        lipschitz_rule(Turn)(lambda module, shape: 1.0)
    other = type("ReLU", (nn.Module,), {})
    with pytest.raises(NoRuleError, match=r"activation\.ReLU already has a rule"):
        add_plain(Plain(other, 1.0, stored={}))
    assert other not in ROWS
