"""Forward passes that try to be bounded as another network than they are: exported as they compute, or refused."""

from __future__ import annotations

import collections
import copy
import dataclasses
import importlib
import itertools
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import lipkit_check
from lipkit import analyze, certify, export, lipschitz, load, save
from lipkit.certificates import certify_regression
from lipkit.errors import NoRuleError, ShapeError
from lipkit.layers import CayleyConv2d
from lipkit.lowering import function_module
from lipkit.lowering.build import FUNCTIONS
from lipkit.modules import ROWS, Plain
from lipkit.testing.reference import jacobians

V, M, I = (4,), (3, 4), (2, 6, 6)  # noqa: E741
Forward = Callable[[Any, Tensor], Any]


@dataclasses.dataclass
class Outputs:
    y: Tensor


class Net(nn.Module):
    """A forward pass in one function of the parts and the input."""

    total = 0

    def __init__(self, f: Forward) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.f, self.calls, self.seen = f, 0, list[Any]()
        self.w = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.a, self.relu, self.drop, self.same = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(), nn.Identity()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.larger, self.around = nn.UpsamplingBilinear2d(scale_factor=2), nn.ReflectionPad2d(1)
        self.layer, self.group = nn.LayerNorm(4), nn.GroupNorm(2, 4)
        self.register_buffer("mid", torch.rand(4, generator=generator))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 2)
            for t in (self.norm.running_mean, self.norm.running_var):
                t.copy_(torch.rand(2, generator=generator) + 0.2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Any:
        return self.f(self, x)


# What the network does to other values, or at another call, than the tracing sees.


def by_type(s: Net, x: Tensor) -> Tensor:
    return s.a(9 * x if isinstance(x, Tensor) and float(x.max()) > 50 else x)


def by_numpy(s: Net, x: Tensor) -> Tensor:
    return s.a(9 * x if type(x) is Tensor and np.abs(x.detach().numpy()).max() > 50 else x)


def by_where(s: Net, x: Tensor) -> Tensor:
    return s.a(torch.where(x > 50, 9 * x, x) if isinstance(x, Tensor) else x)


def _traced(x: Any) -> bool:
    return isinstance(x, torch.fx.Proxy)


def by_clamp(s: Net, x: Tensor) -> Tensor:
    return s.a(x.clamp(-50, 50) if _traced(x) else x)


def by_tracing(s: Net, x: Tensor) -> Tensor:
    from torch.fx._symbolic_trace import is_fx_tracing

    return s.a(x if is_fx_tracing() else torch.maximum(x, 20 * x - 1000))


def by_error(s: Net, x: Tensor) -> Tensor:
    try:
        return s.a(9 * x if float(x.max()) > 50 else x)
    except TypeError:
        return s.a(x)


def by_any_error(s: Net, x: Tensor) -> Tensor:
    try:
        if bool(s.a(x).mean(1, keepdim=True)[0] > 50):
            return 9 * s.a(x)
    except Exception:
        pass
    return s.a(x)


def by_length(s: Net, x: Tensor) -> Tensor:
    try:
        return s.a(x) * (2 if len(x) > 100 else 1)
    except Exception:
        return s.a(x)


def by_call(s: Net, x: Tensor) -> Tensor:
    s.seen.append(0)
    return s.a(x) * (1 + 1e-4 * len(s.seen))


def by_memory(s: Net, x: Tensor) -> Tensor:
    s.seen[:] = [*s.seen[-1:], s.w.sum() * 1e-6 + (s.seen[-1] if s.seen else 0)]
    return s.a(x) + s.seen[-1]


def by_chance(s: Net, x: Tensor) -> Tensor:
    return s.a(x) * (1 + 1e-3 * random.random())


def by_numpy_chance(s: Net, x: Tensor) -> Tensor:
    return s.a(x) + 1e-4 * float(np.random.rand())  # noqa: NPY002


def by_generator(s: Net, x: Tensor) -> Tensor:
    s.seen = s.seen or [torch.Generator().manual_seed(1)]
    return s.a(x) + 1e-4 * torch.rand(4, generator=s.seen[0])


def by_lower_precision(s: Net, x: Tensor) -> Tensor:
    if _traced(x):
        return s.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return s.a(x).float()


def by_disabled_overrides(s: Net, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return s.a(x)


def power(s: Net, x: Tensor) -> Tensor:
    y = x.clone()
    y **= 2
    return y


TRICKS: dict[str, tuple[tuple[int, ...], Forward, str]] = {
    "type": (V, by_type, "traced graph.*the network calls max"),
    "type, numpy": (V, by_numpy, "traced graph.*the network calls"),
    "type, where": (V, by_where, "traced graph.*the network calls gt"),
    "type, clamp": (V, by_clamp, "traced graph.*calls"),
    "is tracing": (V, by_tracing, "traced graph.*calls"),
    "error": (V, by_error, "control flow.*number of Python"),
    "any error": (V, by_any_error, "control flow.*decides"),
    "length": (V, by_length, "control flow.*length of a tensor"),
    "list of calls": (V, by_call, "changes 'seen'"),
    "tensor kept in a list": (V, by_memory, "traced graph|depends on the size|any size"),
    "random": (V, by_chance, "random numbers"),
    "numpy random": (V, by_numpy_chance, "random numbers"),
    "own generator": (V, by_generator, "traced graph|copied|changes|add"),
    "autocast where it is not traced": (V, by_lower_precision, "traced graph|autocast"),
    "overrides disabled": (V, by_disabled_overrides, "traced graph|record"),
    "power in place": (V, power, "traced graph|pow"),
}

# What looks at the size of the batch: the same for the batches that are traced, another function for a larger one.


def table_of_batches(s: Net, x: Tensor) -> Tensor:
    return x * {100: 100.0}.get(x.shape[0], 1.0)


def whole_number(s: Net, x: Tensor) -> Tensor:
    return 9 * x if isinstance(x.shape[0], int) and x.shape[0] > 99 else x


def caught(s: Net, x: Tensor) -> Tensor:
    try:
        return 9 * x if int(x.shape[0]) > 99 else s.a(x)
    except Exception:
        return s.a(x)


def filled(s: Net, x: Tensor) -> Tensor:
    y = torch.zeros((), device=x.device)
    y.add_(x.shape[0] // 99)
    return 9 * x if y > 0 else x


def filled_by_values(s: Net, x: Tensor) -> Tensor:
    y = torch.zeros((), device=x.device)
    y.add_(F.relu(x.sum() - 1000))
    return 9 * x if y > 0 else x


def rows_filled(s: Net, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y.add_(x.shape[0] // 99)
    return x + y


MADE = "made from the size of the batch"
FILLED = "as they are, got one that changes a tensor that it neither keeps nor makes of its input"
LOOKS: dict[str, tuple[Forward, str]] = {
    "quotient": (lambda s, x: x * (1 + 100 * (x.shape[0] // 4)), f"operator.mul.*'add', {MADE}"),
    "shift": (lambda s, x: x * (1 + (x.size(0) >> 2)), MADE),
    "entries": (lambda s, x: x * (1 + x.numel() // 399), MADE),
    "entries of a constant": (lambda s, x: x * (1 + torch.arange(x.shape[0]).numel() // 5), MADE),
    "sum of ones": (lambda s, x: x * (1 + 100 * F.relu(torch.ones(x.shape[0]).sum() - 3)), MADE),
    "sum of ones, added": (lambda s, x: x + 100 * F.relu(torch.ones(x.shape[0]).sum() - 3), MADE),
    "limited sum": (lambda s, x: x * (torch.ones(x.shape[0]).sum().clamp(min=3) - 2), MADE),
    "sum of rows": (lambda s, x: x * torch.zeros_like(x).sum().clamp(min=1), MADE),
    "rows that are no rows": (
        lambda s, x: x + F.relu(torch.ones_like(x).cumsum(0) - 99),
        "depends on the size of the batch",
    ),
    "value of rows": (lambda s, x: x + x.new_full((x.shape[0], 1), x.shape[0] // 99), MADE),
    "rows filled": (rows_filled, MADE),
    "slices of samples": (lambda s, x: torch.cat([9 * x[: (n := x.shape[0] // 4 * 4)], x[n:]]), f"getitem.*{MADE}"),
    "slices of a sample": (lambda s, x: F.pad(x[:, : 4 - (n := x.shape[0] // 99)], (0, n)), f"getitem.*{MADE}"),
    "slice of a constant": (lambda s, x: x + s.w[: x.shape[0] // 99].sum(), MADE),
    "size of a constant": (lambda s, x: x * x.new_zeros(4, x.shape[0] // 99 + 1).shape[1], MADE),
    "dimensions": (lambda s, x: x * torch.zeros([1] * (x.shape[0] // 99 + 1)).dim(), MADE),
    "other rows": (lambda s, x: x.view((n := x.shape[0]) - n // 99 * 50, -1).softmax(1).view(n, -1), f"view.*{MADE}"),
    "another size": (lambda s, x: x[:, :1].expand((n := x.shape[0]), 4 + n // 99)[:, :4], f"expand.*{MADE}"),
    "slice to a large end": (lambda s, x: x[: 2**60], "batch"),  # torch.export writes 2**63 - 1 for no end
    "list": (lambda s, x: x * (1 + sum([1] * (x.shape[0] // 99))), "control flow.*iterated"),
    "table": (table_of_batches, "traced graph.*__hash__"),
    "table by words": (lambda s, x: x * {"100": 100.0}.get(f"{x.shape[0]}", 1.0), "traced graph.*__format__"),
    "whole number": (whole_number, "traced graph.*__gt__"),
    "caught": (caught, "control flow.*number of Python"),
    "condition on what is filled": (filled, FILLED),
    "condition on what values fill": (filled_by_values, FILLED),
}


# What keeps something outside of parameters and buffers, or asks for the mode.
COUNTS = [0]


def in_a_list(s: Net, x: Tensor) -> Tensor:
    s.seen.append(1)
    return x * (1 + 100 * (len(s.seen) > 99))


def in_a_nest(s: Net, x: Tensor) -> Tensor:
    s.seen = s.seen or [{"a": collections.deque([set()])}]
    s.seen[0]["a"][0].add(len(s.seen[0]["a"][0]))
    return x


def in_an_iterator(s: Net, x: Tensor) -> Tensor:
    s.seen = s.seen or [itertools.count()]
    return x * (1 + 100 * (next(s.seen[0]) > 99))


def in_a_global(s: Net, x: Tensor) -> Tensor:
    COUNTS[0] += 1
    return x * (1 + 100 * (COUNTS[0] > 9999))


def in_the_class(s: Net, x: Tensor) -> Tensor:
    Net.total += 1
    return x


def behind_the_counter(s: Net, x: Tensor) -> Tensor:
    s.mid.data.mul_(1.001)  # no version tells
    return x * s.mid


def in_a_default(s: Net, x: Tensor, memory: list[int] = [0]) -> Tensor:  # noqa: B006
    memory[0] += 1
    return x * (1 + 100 * (memory[0] > 999))


def in_a_number_that_is_none(s: Net, x: Tensor, memory: list[float] = [0.0] * 999) -> Tensor:
    memory[memory.count(0.0) - 1] = math.nan
    return x * (1 + 100 * (memory.count(0.0) == 0))


def in_the_sign_of_zero(s: Net, x: Tensor) -> Tensor:
    s.calls = -float(s.calls)
    return x


def in_the_sign_of_a_tensor(s: Net, x: Tensor) -> Tensor:
    s.seen = s.seen or [torch.zeros(2)]
    s.seen[0].neg_()
    return x


def in_a_closure() -> Forward:
    count = 0

    def forward(s: Net, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * (1 + 100 * (count > 999))

    return forward


KEEPS: dict[str, tuple[Forward, str]] = {
    "list": (in_a_list, "changes 'seen'"),
    "nested": (in_a_nest, "changes 'seen'"),
    "iterator": (in_an_iterator, "changes 'seen'"),
    "global": (in_a_global, "changes"),
    "class": (in_the_class, "changes 'total'"),
    "default": (in_a_default, "changes 'f'"),
    "not a number": (in_a_number_that_is_none, "changes 'f'"),
    "sign of zero": (in_the_sign_of_zero, "changes 'calls'"),
    "sign of a tensor": (in_the_sign_of_a_tensor, "changes 'seen'"),
    "closure": (in_a_closure(), "changes 'f'"),
    "buffer": (behind_the_counter, "changes 'mid'"),
    "random numbers unused": (lambda s, x: _first(x, torch.rand(1)), "random numbers"),
    "inference": (lambda s, x: 9 * x if torch.is_inference_mode_enabled() else x, "inference mode"),
    "inference, large values": (lambda s, x: x.clamp(-50, 50) if torch.is_inference_mode_enabled() else x, "inference"),
    "derivatives, large values": (lambda s, x: x.clamp(-50, 50) if torch.is_grad_enabled() else x, "derivatives"),
    "derivatives of weights": (lambda s, x: 9 * x if s.w.requires_grad else x, "derivatives"),
}


def analyzed(model: nn.Module, shape: tuple[int, ...]) -> Any:
    return analyze(model, shape, restarts=0)


# The bound traces as the export does, and the constant is that of the export: they are asked of every second and third.
NAMES = [*(("looks", name) for name in LOOKS), *(("keeps", name) for name in KEEPS)]
ASKED = [
    pytest.param(name, f, marks=[pytest.mark.slow] * (i % every > 0))
    for i, name in enumerate(NAMES)
    for f, every in ((export, 1), (analyzed, 2), (lipschitz, 3))
]


class Fivefold(Tensor):
    """A tensor with operations of its own."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        return 5 * found if function.__name__ in ("mul", "div", "linear", "__rmul__") else found


@pytest.mark.parametrize("verb", [export, lipschitz, analyze])
@pytest.mark.parametrize(
    "f", [lambda k, x: x * k, lambda k, x: x / k, lambda k, x: F.linear(x, torch.diag(k).as_subclass(Fivefold))]
)
def test_tensors_with_operations_of_their_own_are_refused(f: Callable[..., Tensor], verb: Callable[..., Any]) -> None:
    factor = torch.full((4,), 2.0).as_subclass(Fivefold)
    with pytest.raises(NoRuleError, match="expected ordinary tensors, got a Fivefold"):
        verb(Part(lambda x: f(factor, x)), (4,))


class Part(nn.Module):
    """A part without numbers of its own."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


@pytest.mark.parametrize(
    "part",
    [
        Part(lambda x: 0.1 * x),
        Part(lambda x: 1e-50 * x),
        nn.Sequential(nn.Sigmoid(), nn.Sequential(nn.Threshold(0.1, 0.1))),
    ],
)
def test_a_part_without_numbers_computes_in_the_format_of_the_others(part: nn.Module) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), part).double(), torch.randn(3, 4, dtype=torch.float64)
    plain = export(model, (4,))
    assert plain(x).dtype == torch.float64
    torch.testing.assert_close(plain(x), model(x), rtol=1e-14, atol=0.0)
    slope = float(torch.linalg.matrix_norm(torch.func.jacrev(lambda v: model(v[None])[0])(x[0]).detach(), 2))
    for bound in (lipschitz(model, (4,)), lipschitz(plain)):
        assert slope * (1 - 1e-9) <= float(bound.detach())
    half = export(nn.Sequential(nn.Linear(4, 4), Part(lambda x: 0.1 * x)).half(), (4,))
    assert {p.dtype for p in (*half.parameters(), *half.buffers())} == {torch.float16}
    for verb in (export, lipschitz):  # alone, in float32, this part would be the identity
        with pytest.raises(NoRuleError, match=r"float64, got torch\.float32"):
            verb(nn.Sequential(nn.Linear(4, 4), Part(lambda x: x.float().double())).double(), (4,))


@pytest.mark.parametrize(("name", "function"), ASKED)
def test_no_constant_of_the_batch_and_no_state(name: tuple[str, str], function: Callable[..., Any]) -> None:
    forward, message = (LOOKS if name[0] == "looks" else KEEPS)[name[1]]
    with pytest.raises(NoRuleError, match=message):
        function(Net(forward).eval(), V)


@pytest.mark.parametrize(
    "made",
    [
        *("torch.zeros(x.shape[0], 4)", "torch.ones(x.size(0), 4, dtype=x.dtype)", "torch.zeros((x.shape[0], 4))"),
        *("s.mid.expand(x.shape[0], -1)", "s.mid.repeat(x.shape[0], 1)", "s.mid.expand(x.shape[0], -1)[:, :2]"),
        *("s.mid.expand(x.shape[0], -1).chunk(2, 1)[1]", "torch.zeros(x.shape[0], 4).sigmoid().split([1, 3], 1)[1]"),
        *("F.embedding(torch.arange(2).expand(x.shape[0], -1), s.w)[:, 1]", "torch.tile(s.mid, (x.shape[0], 1))"),
        *("torch.broadcast_to(s.mid, x.shape)", "s.mid[None].repeat_interleave(x.shape[0], 0).softmax(-1)"),
        "torch.where(s.mid.expand(x.shape[0], -1) > 0.5, 1.0, 2.0)",
        "(~torch.zeros(x.shape[0], 4).bool()).cumsum(1)",  # positions, as DETR counts them
        *("F.layer_norm(s.mid.expand(x.shape[0], 4), (4,))", "F.normalize(s.mid.expand(x.shape[0], -1), dim=1)"),
    ],
)
def test_rows_of_the_size_of_the_batch_are_recorded(made: str) -> None:
    kept = torch.zeros, torch.ones, Tensor.expand, Tensor.repeat
    network = Net(eval(f"lambda s, x: torch.cat((x[:, :3], {made}, s.a(x), {made}), 1)")).eval()
    x = torch.rand(5, 4)
    assert torch.equal(export(network, V)(x), network(x))
    slope = float(torch.linalg.matrix_norm(torch.func.jacrev(lambda v: network(v[None])[0])(x[0]).detach(), 2))
    for bound in (lipschitz(network, V), analyze(network, V, restarts=0).upper):
        assert slope * (1 - 1e-6) <= float(torch.as_tensor(bound).detach()) <= 1.5 * slope
    assert kept == (torch.zeros, torch.ones, Tensor.expand, Tensor.repeat)  # as they were before the trace


@pytest.mark.parametrize(
    "made",
    [
        "torch.zeros(x.shape[0], 4)[:1]",  # one row, which broadcasting would hide
        "torch.stack((torch.zeros(x.shape[0], 4), torch.zeros(x.shape[0], 4)), 0).chunk(2, 0)[0]",
        "torch.ones(x.shape[0], 4).chunk(2, 0)[0]",
        "torch.full((x.shape[0], 4), 1 / x.shape[0])",
        "torch.ones(x.shape[0], 4)[:, : x.shape[0]]",
        "torch.empty(x.shape[0], 4)",
        "s.mid.expand(x.shape[0], -1).softmax(0)",
        "F.normalize(s.mid.expand(x.shape[0], -1), dim=0)",
        "torch.where(torch.zeros(x.shape[0], 4).softmax(0) < 0.02, 2.0, 1.0)",
        "torch.tile(s.w, (x.shape[0], 1))[: x.shape[0]]",
        "F.normalize(s.mid.expand(x.shape[0], -1), dim=0, eps=99.0)",  # below eps for fewer than 5000 samples
        "torch.zeros(x.shape[0], 4)[-100:]",
        "torch.zeros(x.shape[0], 4).split(100)[0]",
    ],
)
def test_rows_that_change_with_the_batch_are_refused(made: str) -> None:
    for function in (export, analyzed):
        with pytest.raises((NoRuleError, ShapeError)):
            function(Net(eval(f"lambda s, x: s.a(x) * {made}")).eval(), V)


@pytest.mark.parametrize(
    "size",
    [
        *("torch.zeros(x.shape[0])[:100].shape[0]", "torch.zeros(x.shape[0], 4).split(100)[0].shape[0]"),
        "torch.zeros(x.shape[0], 4).view(-1)[:400].shape[0] // 4",
        "torch.zeros(torch.zeros(x.shape[0])[:100].shape[0], 4).shape[0]",
        "torch.where(torch.ones(x.shape[0]).cumsum(0) < 101)[0].shape[0]",
    ],
)
def test_sizes_of_rows_that_are_cut_are_not_those_of_the_batch(size: str) -> None:
    network = Net(eval(f"lambda s, x: s.a(x).reshape({size}, -1, 4).mean(1)")).eval()
    assert network(torch.zeros(100, 4)).shape == (100, 4)
    assert network(torch.zeros(200, 4)).shape == (100, 4)  # a mean over two samples
    for function in (export, analyzed, lipschitz):
        with pytest.raises(NoRuleError, match="made from the size of the batch"):
            function(network, V)


def _unpacked(x: Tensor) -> Tensor:
    a, b, c = x
    return a - 2 * b.relu() + c


# What Python reads item by item.
ITEMS: dict[str, tuple[tuple[int, ...], Forward]] = {
    "weights": (V, lambda s, x: sum((x * w for w in s.w), x) * len(s.w)),
    "sizes of weights": (V, lambda s, x: sum(x.view(-1, s.w.shape[0]) * s.w[k] for k in range(s.w.size(0)))),
    "rows": (M, lambda s, x: sum(k * t for k, t in enumerate(x.transpose(0, 1))) / len(x.mT.transpose(0, 1))),
    "rows in a list": (M, lambda s, x: torch.stack([*x.permute(2, 0, 1)], 2)),
    "unpacked": (M, lambda s, x: _unpacked(x.transpose(0, 1))),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_of_values_and_weights_are_followed(name: str) -> None:
    shape, forward = ITEMS[name]
    network, x = Net(forward).eval().double(), torch.randn(5, *shape, dtype=torch.float64)
    plain = export(network, shape)
    torch.testing.assert_close(plain(x), network(x))
    moved = x + torch.randn_like(x) / 10
    secants = (plain(moved) - plain(x)).flatten(1).norm(dim=1) / (moved - x).flatten(1).norm(dim=1)
    assert float(secants.max()) <= float(lipschitz(network, shape))


@pytest.mark.parametrize(
    "forward", [lambda s, x: sum(t for t in x), lambda s, x: x * len(x), lambda s, x: torch.stack([*x])]
)
def test_the_batch_has_no_length(forward: Forward) -> None:
    with pytest.raises(NoRuleError, match="control flow on values or on the size of the batch"):
        export(Net(forward).eval(), V)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_hooks_of_torch_are_removed_by_torch(name: str) -> None:
    network, x = nn.Sequential(nn.Linear(4, 4)), torch.rand(3, 4)
    prune.random_unstructured(network[0], name, 3)
    with pytest.raises(NoRuleError, match=rf"torch.nn.utils.prune by prune.remove\(layer, '{name}'\)$"):
        lipschitz(network, V)
    expected = network(x)
    prune.remove(network[0], name)
    assert torch.equal(network(x), expected)
    network.requires_grad_(False)
    norm = float(np.linalg.norm(network[0].weight.detach().double().numpy(), 2))
    assert norm <= float(lipschitz(network, V)) <= norm * (1 + 1e-6)


BRANCH = "lambda s, x: s.a(x) if x.sum() > 0 else x"


@pytest.mark.parametrize("source", [BRANCH, "lambda s, x: s.mid.expand(len(x), 4)", "lambda s, x: s.a(x).cumprod(1)"])
def test_refusals_name_the_line_of_the_network(source: str) -> None:
    home = {"__name__": "a_network", "torch": torch}  # code of the user, where it is not a class of this file
    forward = eval(compile("\n" * 41 + source, "/somewhere/net.py", "eval"), home)
    with pytest.raises(NoRuleError, match=r"\(net.py:42\)"):
        analyze(Net(forward).eval(), V)


def test_code_of_exec_has_no_module() -> None:
    home: dict[str, Any] = {}
    exec("import torch\nclass Twice(torch.nn.Module):\n    def forward(self, x): return 2 * x", home)
    x = torch.rand(3, 4)
    assert torch.equal(export(home["Twice"](), V)(x), 2 * x)
    exec("class Peeks(Twice):\n    def forward(self, x): return 2 * x if len(x) > 1 else x", home)
    with pytest.raises(NoRuleError, match="control flow on values or on the size of the batch"):
        export(home["Peeks"](), V)


@pytest.mark.parametrize("function", [analyze, export, lipschitz])
@pytest.mark.parametrize(
    "forward", [lambda s, x: F.log_softmax(s.a(x), dim=1), lambda s, x: x.log_softmax(-1), lambda s, x: s.log(x)]
)
def test_a_log_softmax_is_left_to_the_loss(forward: Forward, function: Callable[..., Any]) -> None:
    network = Net(forward)
    network.log = nn.LogSoftmax(1)
    with pytest.raises(NoRuleError, match="changes no class and no radius: leave it to the loss"):
        function(network.eval(), V)


class Peeks(nn.Module):
    """Has a rule, and looks at the batch all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x.shape[0] // self.most)

    most = 5


@pytest.mark.parametrize(("most", "message"), [(5, "3 and 8 samples differ"), (60, "8 and 65 samples differ")])
def test_larger_batches_are_a_second_line(monkeypatch: pytest.MonkeyPatch, most: int, message: str) -> None:
    monkeypatch.setattr(Peeks, "most", most)
    monkeypatch.setitem(ROWS, Peeks, Plain(Peeks, 1.0))
    network = Net(lambda s, x: s.same(x) + x)
    network.same = Peeks()
    with pytest.raises(NoRuleError, match=message):
        lipschitz(network.eval(), V)


class Held(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x


@pytest.mark.thorough
def test_training_mode_is_named() -> None:
    # One value a channel: torch itself refuses a batch of one sample.
    flat = nn.BatchNorm1d(4)
    with pytest.raises(NoRuleError, match=r"Expected more than 1 value.* in training mode: call model\.eval\(\)"):
        export(Held(flat), V)
    for forward, shape in (
        (lambda s, x: s.norm(s.conv(x)) + x, I),
        (lambda s, x: F.dropout(x, 0.5, s.training) + x, V),
        (lambda s, x: 9 * x if s.training else x, V),
    ):
        with pytest.raises(NoRuleError, match=r"in training mode: call model\.eval\(\)"):
            export(Net(forward), shape)
        export(Net(forward).eval(), shape)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LSTM(4, 4), "LSTM.*its input, forget, cell and output gates multiply values"),
        (nn.GRU(4, 4), "GRU.*its reset and update gates multiply values"),
        (nn.RNN(4, 4), r"RNN.*(expected batch_first=True|mixes the batch)"),
        (nn.TransformerDecoderLayer(4, 2, 8), r"TransformerDecoderLayer.*on a box only.*box=\(low, high\)"),
    ],
)
def test_modules_of_torch_without_a_rule_say_what_is_missing(module: nn.Module, message: str) -> None:
    two = isinstance(module, nn.TransformerDecoderLayer)
    network = Net(lambda s, x: s.same(x, x) if two else s.same(x)[0])
    network.same = module
    for found in (network.eval(), nn.Sequential(module).eval()):
        with pytest.raises(NoRuleError, match=message):
            export(found, M)


def test_hooks_of_the_backward_pass_change_nothing_and_stay() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    bound, seen = analyze(network, V, restarts=0).upper, list[int]()
    network[0].register_full_backward_hook(lambda *given: seen.append(1))
    network[1].register_full_backward_pre_hook(lambda *given: seen.append(2))
    assert analyze(network, V, restarts=0).upper == bound
    x = torch.randn(2, 4, requires_grad=True)
    assert torch.equal(export(network, V)(x), network(x))
    network(x).sum().backward()
    assert seen == [2, 1]


def test_lazy_modules_are_told_to_run_once() -> None:
    network = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    for verb in (export, analyze, lipschitz):
        with pytest.raises(NoRuleError, match=r"expected known weights, got .*LazyLinear before its first batch"):
            verb(network, V)
    network(torch.zeros(1, *V))
    assert float(lipschitz(export(network, V))) == float(lipschitz(network).detach())


# Outputs (N,).
NUMBERS: dict[str, Forward] = {
    "squeezed": lambda s, x: s.a(x)[:, :1].squeeze(-1),
    "first": lambda s, x: s.a(x)[:, 0],
    "flattened": lambda s, x: s.a(x)[:, :1].flatten(),
    "sum": lambda s, x: s.a(x).sum(1),
    "mean": lambda s, x: s.a(x).mean(-1),
    "mean of everything": lambda s, x: s.a(x).view(-1, 2, 2).mean((1, 2)),
    "by its size": lambda s, x: s.a(x)[:, :1].view(x.shape[0]),
    "smaller of two": lambda s, x: torch.min(s.a(x)[:, 0], 2 * s.a(x)[:, 1] - 1).tanh() * s.mid[0],
    "and back": lambda s, x: torch.stack([s.a(x)[:, 0], s.a(x).sum(1)], 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NUMBERS)
def test_outputs_without_dimensions(name: str, tmp_path: Path) -> None:
    model = Net(NUMBERS[name]).eval()
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    plain = export(model, V)
    expected = model(x).detach()
    assert torch.allclose(plain(x), expected, atol=1e-6)
    assert plain(x).shape == expected.shape
    truth = slope(copy.deepcopy(plain).double(), x.double())
    assert truth <= float(lipschitz(plain, V)) <= float(lipschitz(model, V).detach()) * (1 + 1e-6)
    assert analyze(model, V, restarts=0).upper >= truth
    assert torch.equal(load(save(plain, tmp_path / "network"))(x), plain(x))
    if expected.ndim == 1:
        with pytest.raises(ShapeError, match=r"K >= 2 classes, got \(9,\): .*certify_regression"):
            certify(plain, x, torch.zeros(9, dtype=torch.int64))
        with pytest.raises(lipkit_check.Refused, match=r"Reshape of \(1,\) to \(\)"):  # it is no classifier
            lipkit_check._moves({"type": "Reshape", "shape": []}, (1,))
        found, beside = (certify_regression(plain, x, y, delta=0.1) for y in (expected, expected[:, None]))
        moved = plain.double()(x.double() + 0.05)  # by 0.1
        assert bool(((moved - expected).abs() <= found.output_deviation[0] + 1e-6).all())
        assert torch.equal(found.worst_error, beside.worst_error)


def test_numbers_are_no_channels() -> None:
    network = Net(lambda s, x: s.same(x[:, 0]))
    network.same = nn.Softmax(-1)
    with pytest.raises(NoRuleError, match=r"softmax in 'same' .*other than the batch"):
        analyze(network.eval(), V)


# Calls without a plain form, or with arguments that their rules do not cover.
REFUSED: dict[str, tuple[tuple[int, ...], Forward, str]] = {
    "index by True": (V, lambda s, x: x[:, True], "getitem"),
    "part of the batch": (V, lambda s, x: x[:2], "getitem|row per sample"),
    "samples in steps": (V, lambda s, x: x[::2], "getitem.*batch whole|row per sample"),
    "samples reversed": (V, lambda s, x: x.flip(0), "Tensor.flip"),
    "new first dimension": (V, lambda s, x: x[None], "row per sample|getitem"),
    "no entries": (V, lambda s, x: x[:, 4:], "getitem.*pieces with entries"),
    "flattened batch": (M, lambda s, x: x.flatten(), "Tensor.flatten.*row per sample"),
    "sizes swapped": (V, lambda s, x: x.reshape(4, -1).relu().reshape(-1, 4), "Tensor.reshape.*row per sample"),
    "unsqueezed batch": (V, lambda s, x: x.unsqueeze(0), "Tensor.unsqueeze.*row per sample"),
    "length of the batch": (M, lambda s, x: x.view(len(x), 12), "control flow"),
    "rolled flat": (M, lambda s, x: x.roll(1), "Tensor.roll.*other than the batch"),
    "rolled samples": (V, lambda s, x: x.roll(1, 0), "Tensor.roll.*mixes samples"),
    "rolled by one of two": (M, lambda s, x: torch.roll(x, (1, 1), (0, 1)), "torch.roll.*mixes samples"),
    "expanded in front": (V, lambda s, x: x.expand(3, -1, -1), "Tensor.expand.*row per sample"),
    "repeated behind a new dimension": (V, lambda s, x: x.repeat(1, 1, 2), "Tensor.repeat.*row per sample"),
    "tiled samples": (V, lambda s, x: x.tile(2, 1), "Tensor.tile.*row per sample"),
    "interleaved": (V, lambda s, x: torch.repeat_interleave(x, 2), "repeat_interleave"),
    "samples repeated": (V, lambda s, x: x.repeat(2, 1), "Tensor.repeat.*row per sample"),
    "split of the batch": (V, lambda s, x: x.split(1)[0], "Tensor.split"),
    "unbound batch": (V, lambda s, x: torch.stack(x.unbind(0)), "Tensor.unbind|any size"),
    "stacked with rows": (
        V,
        lambda s, x: torch.stack([x, torch.full_like(x, x.shape[0])], 1),
        "made from the size",
    ),
    "stacked in front": (V, lambda s, x: torch.stack([x, x]), "torch.stack.*row per sample"),
    "joined batches": (V, lambda s, x: torch.cat([x, x]), "torch.cat.*mixes samples"),
    "outer sum": (V, lambda s, x: x[:, :, None] + x[:, None] + x.mean(0), "Tensor.mean"),
    "broadcast over the batch": (V, lambda s, x: x[:, None, None] * x, "row per sample"),
    "zeros around the batch": (V, lambda s, x: F.pad(x, (0, 0, 1, 0)), "pad.*row per sample"),
    "zeros around everything": (I, lambda s, x: F.pad(x, (0,) * 8), "functional.pad"),
    "padding by infinity": (I, lambda s, x: F.pad(x, (1, 1), value=math.inf), "functional.pad.*finite number.*inf"),
    "copies of a long row": ((1, 4097), lambda s, x: F.pad(x, (1, 1), mode="circular"), "pad.*at most 4096"),
    "mean in another format": (V, lambda s, x: x - x.mean(1, keepdim=True, dtype=torch.float64), "Tensor.mean"),
    "mean over samples": (V, lambda s, x: x - x.mean(0), "Tensor.mean"),
    "sum of all": (V, lambda s, x: x / 2 + x.sum(), "Tensor.sum"),
    "variance": (V, lambda s, x: x.var(1, keepdim=True) + x, r"square in 'var' .*box=\(0, 1\)"),
    "deviation of all": (V, lambda s, x: x.std() + x, "at 'std' .*dimensions other than the batch"),
    "variance of all, unbiased": (V, lambda s, x: x.var(True) + x, "at 'var' .*dimensions other than the batch"),
    "deviation of samples": (V, lambda s, x: x.std(0) + x, "Tensor.mean in 'std' .*mixes the batch"),
    "norm": (V, lambda s, x: x.norm(1, dim=1, keepdim=True) + x, "Tensor.norm.*expected the norm p=2, got .1"),
    "norm of matrices": (M, lambda s, x: torch.linalg.norm(x, 2, (1, 2)), "norm.*expected the norm p=2"),
    "largest of samples": (V, lambda s, x: x.amax(0, keepdim=True) + x, "Tensor.amax.*row per sample"),
    "running product": (V, lambda s, x: x.cumprod(1), "Tensor.cumprod"),
    "smooth largest": (V, lambda s, x: torch.logsumexp(x, 1), "torch.logsumexp.*no plain form"),
    "square": (V, lambda s, x: x.square(), "Tensor.square"),
    "square root": (V, lambda s, x: x.relu().sqrt(), "Tensor.sqrt"),
    "exponential": (V, lambda s, x: x.exp(), "Tensor.exp"),
    "logarithm": (V, lambda s, x: torch.log(x), "torch.log"),
    "logsumexp": (V, lambda s, x: torch.logsumexp(x, 1), "torch.logsumexp.*no plain form"),
    "product": (V, lambda s, x: x * s.a(x), "mul.*one factor to be constant"),
    "product by a method": (V, lambda s, x: x.mul(x), "mul.*one factor to be constant"),
    "product in place": (V, lambda s, x: x.clone().mul_(s.a(x)), "mul_.*one factor to be constant"),
    "matrix product": (M, lambda s, x: x @ x.transpose(1, 2), "matmul.*one factor to be constant"),
    "matrix product of samples": (V, lambda s, x: x @ x.transpose(0, 1) @ x, "matmul|transpose"),
    "batched product": (M, lambda s, x: torch.bmm(x, x.transpose(1, 2)), "torch.bmm"),
    "einsum of a diagonal": ((4, 4), lambda s, x: torch.einsum("bii,ij->bj", x, s.w), "einsum.*letter once.*'bii"),
    "einsum of two sizes": (
        V,
        lambda s, x: torch.einsum("bi,ij->bj", x, s.w[:1]),
        "einsum.*one size of 'i' in 'bi,ij->bj'",
    ),
    "einsum over rows": (V, lambda s, x: torch.einsum("bi,bi->i", x, torch.ones_like(x)), "einsum.*'bi,bi->i'|mixes"),
    "einsum of two that move": (V, lambda s, x: torch.einsum("bi,bi->b", x, x), "einsum.*one factor to be constant"),
    "vector of samples": (V, lambda s, x: s.mid[: x.shape[0]] @ x + x, "matmul|batch|getitem"),
    "addmm over the batch": (V, lambda s, x: torch.addmm(s.mid, x.T, x, beta=2), "matmul in 'addmm' .*mixes the batch"),
    "one of the batch selected": (M, lambda s, x: x + x.transpose(0, 1).select(1, 0), "Tensor.select.*row per"),
    "outputs in a class": (V, lambda s, x: Outputs(s.a(x)), r"^export: tests\.lowering\.test_structure\.Outputs"),
    "bilinear": (V, lambda s, x: F.bilinear(x, x, s.w[None]), "einsum in 'bilinear' .*one factor"),
    "quotient": (V, lambda s, x: x / s.a(x), "truediv.*constant divisor"),
    "constant over input": (V, lambda s, x: 1 / x, "truediv"),
    "rounded quotient": (V, lambda s, x: torch.div(x, 2, rounding_mode="floor"), "torch.div.*rounding_mode"),
    "remainder": (V, lambda s, x: x % 2, "mod"),
    "whole quotient": (V, lambda s, x: x // 2, "floordiv"),
    "power": (V, lambda s, x: x**2, "pow.*no Lipschitz constant"),
    "broken power": (V, lambda s, x: x**2.5, "pow.*expected -2, .* as exponent, got 2.5"),
    "no chosen entries": (V, lambda s, x: x[:, s.mid > 2], "expected entries of dimension 1, got none"),
    "entries of two dimensions": (M, lambda s, x: x[:, [0, 1], [0, 1]], "getitem.*leave the batch whole"),
    "complex factor": (V, lambda s, x: (x * 1j).real, "mul.*complex64"),
    "factor of the batch": (V, lambda s, x: x / x.shape[0], "truediv.*size of the batch"),
    "shift of the batch": (V, lambda s, x: x + x.size(0), "add.*size of the batch"),
    "weight of an operand": (V, lambda s, x: torch.add(x, x, alpha=x.shape[0]), "torch.add.*size of the batch"),
    "running maximum": (V, lambda s, x: torch.cummax(x, 1)[0], "torch.cummax"),
    "interpolation by the input": (V, lambda s, x: torch.lerp(x, s.a(x), x), "torch.lerp.*one factor to be constant"),
    "interpolation without end": (V, lambda s, x: torch.lerp(x, s.a(x), math.inf), "torch.lerp.*finite.*got inf"),
    "running minimum": (V, lambda s, x: torch.cummin(x, 1)[0], "torch.cummin"),
    "limit beyond all numbers": (V, lambda s, x: x.clamp_min(-math.inf), "clamp_min.*numbers as limits"),
    "limits in the wrong order": (V, lambda s, x: torch.clamp(x, 2, -1), "torch.clamp"),
    "median": (V, lambda s, x: torch.median(x, 1)[0], "torch.median"),
    "second smallest": (V, lambda s, x: torch.kthvalue(x, 2, 1)[0], "torch.kthvalue"),
    "maximum over samples": (V, lambda s, x: torch.max(x, 0)[0] + x, "torch.max"),
    "where sorted entries were": (V, lambda s, x: x.sort(1)[1].float(), "Tensor.sort.*int64"),
    "whole numbers": (V, lambda s, x: x.long().float(), "Tensor.long.*int64"),
    "bits": (V, lambda s, x: x.view(torch.int32).view(torch.float32), "Tensor.view.*int32"),
    "halves": (V, lambda s, x: x.half().float(), "Tensor.half.*float16"),
    "comparison": (V, lambda s, x: x * (x > 1), "gt.*torch.bool"),
    "rounding": (V, lambda s, x: x.round(), "Tensor.round"),
    "softmax of the batch": (V, lambda s, x: x.softmax(0), "Tensor.softmax.*mixes samples"),
    "softmax from the end": (V, lambda s, x: x.softmax(-2), "Tensor.softmax.*mixes samples"),
    "softmax of any dimension": (M, lambda s, x: F.softmax(x), "functional.softmax"),
    "log softmax": (V, lambda s, x: F.log_softmax(x, 1), "all logits by one number"),
    "dropout at work": (V, lambda s, x: F.dropout(x), "random numbers"),
    "dropout of everything": (V, lambda s, x: F.dropout(x, 1.0, True), "Dropout.*evaluation mode"),
    "dropout of nothing": (V, lambda s, x: F.dropout(x, 0.0, True), "Dropout.*evaluation mode"),
    "batch norm at work": ((4, 3), lambda s, x: F.batch_norm(x, None, None, training=True), "each sample alone"),
    "instance norm that learns": (
        I,
        lambda s, x: F.instance_norm(x, s.norm.running_mean, s.norm.running_var),
        r"at 'instance_norm' \(test_structure.py:\d+\): expected the statistics of the sample",
    ),
    "distance by another norm": (V, lambda s, x: torch.cdist(x, s.w, 1.0), "norm in 'cdist' .*expected the norm p=2"),
    "distances of samples": (V, lambda s, x: torch.cdist(x, x) @ x, "in 'cdist'.*mixes the batch"),
    "local response": (I, lambda s, x: F.local_response_norm(x, 2), "record|local_response_norm|functional"),
    "normalised by another norm": (V, lambda s, x: F.normalize(x, p=1), "expected the norm p=2, got 1"),
    "places of maxima": (I, lambda s, x: F.max_pool2d(x, 2, return_indices=True)[0], "max_pool2d_with_indices"),
    "norm pooling": (I, lambda s, x: F.lp_pool2d(x, 2.0, 2), "record|lp_pool2d|functional|pow"),
    "overlapping windows": (I, lambda s, x: F.adaptive_max_pool2d(x, 4), "AdaptiveMaxPool2d.*divides"),
    "grid": (I, lambda s, x: F.grid_sample(x, x.new_zeros(x.shape[0], 2, 2, 2)), "grid_sample"),
    "weights from the input": (I, lambda s, x: F.conv2d(x, x[:1, :, :3, :3]), "getitem|constant weight"),
    "weights of a linear layer": (V, lambda s, x: F.linear(x, x.mean(0, keepdim=True)), "mean|constant weight"),
    "input as weights": (I, lambda s, x: F.conv2d(torch.ones(2, 2, 6, 6), x), "conv2d.*row per sample"),
    "bias from the input": (V, lambda s, x: F.linear(x, s.w, s.a(x)[0]), "getitem|bias"),
    "samples as channels": ((6, 6), lambda s, x: F.conv2d(x, s.conv.weight), "any size"),
    "hard shrink": (V, lambda s, x: F.hardshrink(x), "hardshrink"),
    "threshold": (V, lambda s, x: F.threshold(x, 0.1, 20.0), "at 'threshold' .*expected the value 0.1 below"),
    "gate": (V, lambda s, x: F.glu(x), "operator.mul in 'glu'.*no Lipschitz constant"),
    "early softplus": (V, lambda s, x: F.softplus(x, 2.0, 0.1), "Softplus.*threshold"),
    "falling celu": (V, lambda s, x: F.celu(x, alpha=-1.0), "CELU.*positive"),
    "random slopes": (V, lambda s, x: F.rrelu(x, training=True), "rrelu|random"),
    "attention": (M, lambda s, x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention"),
    "view written to": (V, lambda s, x: _first(y := s.a(x), y.view(-1, 2, 2).add_(1)) * 2, "add_.*inplace=False"),
    "slice written to": (V, lambda s, x: _first(y := s.a(x), y[:, 1:].mul_(2)) * 2, "mul_.*inplace=False"),
    "data written to": (V, lambda s, x: _first(y := s.a(x), y.data.add_(1)) * 2, "add_|Tensor.data"),
    "input as output": (V, lambda s, x: torch.add(x, 1, out=x), "torch.add"),
    "weights changed": (V, lambda s, x: x + s.mid.add_(1), "changes 'mid'"),
    "own attribute": (V, lambda s, x: _first(s.a(x), s.__setattr__("calls", s.calls + 1)), "changes 'calls'"),
    "two outputs": (V, lambda s, x: (x, s.a(x)), "one output tensor, got tuple: bound a module of yours"),
    "named outputs": (V, lambda s, x: {"y": s.a(x)}, "one output tensor, got dict: bound a module of yours"),
    "no output": (V, lambda s, x: None, "one output tensor, got NoneType$"),
    "constant output": (V, lambda s, x: x.new_ones(3, 4) * s.mid, "any size|each sample alone|row per"),
    "copies by numpy": (V, lambda s, x: torch.from_numpy(x.numpy().copy()), "record"),
    "value as a number": (V, lambda s, x: x * x.sum().item(), "Tensor.sum|item"),
    "loop over the batch": (V, lambda s, x: torch.stack([row * 2 for row in x]), "control flow|iterated"),
    "loop while values are large": (V, lambda s, x: x / 2 if bool((x > 1).any()) else x, "control flow"),
}


def _first(value: Any, *rest: Any) -> Any:
    return value


@pytest.mark.parametrize("name", [*TRICKS, *REFUSED])
def test_refused_by_name(name: str) -> None:
    shape, forward, message = (TRICKS | REFUSED)[name]
    model = Net(forward).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about what these forward passes do
        with pytest.raises((NoRuleError, ShapeError), match=message):
            export(model, shape)
        if name in TRICKS:
            with pytest.raises(NoRuleError, match=message):
                lipschitz(model, shape)


def twice(s: Net, x: Tensor) -> Tensor:
    y = s.conv(x)
    return s.norm(y) + y + x


# What is odd but has one meaning.
RIGHT: dict[str, tuple[tuple[int, ...], Forward]] = {
    "mask": (V, lambda s, x: x * (s.mid > 0.5)),
    # A normalisation is folded only where nobody else reads what it reads, under whatever name.
    "norm behind dropout": (I, lambda s, x: (s.norm(s.drop(y := s.conv(x)))) + y + x),
    "norm behind an identity": (I, lambda s, x: (s.norm(s.same(y := s.conv(x)))) + y + x),
    "norm behind two identities": (I, lambda s, x: s.norm(s.same(s.drop(y := s.conv(x)))) + s.same(y) + x),
    "norm before an identity": (I, lambda s, x: s.norm(y := s.conv(x)) + s.same(y) + x),
    "norm and identity of the same": (I, lambda s, x: s.same(y := s.conv(x)) + s.norm(y) + x),
    "norm of a norm": (I, lambda s, x: s.norm(s.norm(s.conv(x))) + x),
    "norm read twice": (I, twice),
    "shared convolution": (I, lambda s, x: s.norm(s.conv(s.norm(s.conv(x)))) + x),
    "shared weights": (I, lambda s, x: F.conv2d(s.norm(s.conv(x)), s.conv.weight, padding=1) + x),
    # Memory.
    "in place on the input": (V, lambda s, x: s.relu(x) + x),
    "in place in between": (V, lambda s, x: s.relu(y := s.a(x)) + y),
    "sum in place": (V, lambda s, x: _first(y := s.a(x), y.add_(1)) * 2),
    "sums in place": (V, lambda s, x: s.a(x).add_(1).mul_(3)),
    # Numbers and broadcasting.
    "column": (M, lambda s, x: x * s.mid[:3, None]),
    "row": (M, lambda s, x: x * s.mid),
    "growing factor": ((1, 4), lambda s, x: x * s.mid[:, None]),
    "growing sum": (M, lambda s, x: x[:, :, :1] + x[:, :1]),
    "constant with a batch of one": (V, lambda s, x: x * s.mid[None]),
    "reversed difference": (V, lambda s, x: 3 - x),
    "reversed weighted difference": (V, lambda s, x: torch.rsub(x, s.mid, alpha=2)),
    "maximum with a constant": (V, lambda s, x: torch.maximum(x, s.mid)),
    "maximum over a dimension": (V, lambda s, x: torch.max(x, 1)[0]),
    "difference of a constant": (V, lambda s, x: torch.sub(x, s.mid, alpha=2)),
    "weighted difference": (V, lambda s, x: torch.sub(x, s.a(x), alpha=3)),
    "constant plus weighted": (V, lambda s, x: torch.add(s.mid, x, alpha=-2)),
    "difference in place": (V, lambda s, x: x.clone().sub_(s.a(x), alpha=2)),
    "whole divisors": (V, lambda s, x: x / torch.tensor([1, 2, 3, 4])),
    "truth value": (V, lambda s, x: x * True + False),
    "matrix": (V, lambda s, x: x @ s.w),
    "matrix and its transpose": (V, lambda s, x: torch.mm(x @ s.w.T, s.w)),
    "matrix from the left": ((4, 3), lambda s, x: s.w @ x),
    "matrices of sequences": (M, lambda s, x: x @ s.w[None] + F.linear(x, s.w, s.mid)),
    "minimum": (V, lambda s, x: torch.min(x, s.a(x)) + torch.max(x, s.a(x))),
    "maximum of a repeated one": (M, lambda s, x: torch.maximum(x, x[:, :1])),
    # Views.
    "from the end": (M, lambda s, x: x[:, -2:, ..., -3:-1]),
    "new dimensions": (M, lambda s, x: x[:, None, :, 1][..., None]),
    "every third": ((7,), lambda s, x: x[:, 1::3]),
    "beyond the end": ((7,), lambda s, x: x[:, 5:99]),
    "pieces in another order": ((5,), lambda s, x: torch.cat(x.split([1, 4], 1)[::-1], -1)),
    "uneven chunks": ((5,), lambda s, x: torch.cat(torch.chunk(x, 2, -1)[::-1], 1)),
    "unbound": (M, lambda s, x: x.unbind(1)[0] - x.unbind(1)[-1]),
    "sum of unbound": (M, lambda s, x: sum(x.unbind(-1))),
    "stacked": (V, lambda s, x: torch.stack([x, s.a(x)], -1)),
    "permuted from the end": ((3, 4, 5), lambda s, x: x.permute(0, -1, 1, -2).transpose(1, -1)),
    "rolled": (M, lambda s, x: torch.roll(x, (-1, 2), (1, -1))),
    "cut by padding": (I, lambda s, x: F.pad(x, (1, -2, 0, 1, 1, 0))),
    "sizes by arithmetic": (M, lambda s, x: x.view(x.shape[0], x.shape[1] * x.shape[2] // 2, 2)),
    "sizes of the batch": (V, lambda s, x: x.view(x.shape[0], 2, -1).reshape(x.size(0), -1).expand(x.size(0), 4)),
    "sizes that are kept": (V, lambda s, x: _first(s.a(x), s.__setattr__("last", x.shape))),
    "sizes of everything": (M, lambda s, x: x.view(x.numel() // 12, 12).view_as(x.flatten(1))),
    "squeezed": ((1, 4), lambda s, x: x.squeeze(1).unflatten(1, (2, 2)).unsqueeze(-1)),
    "expanded": ((1, 4), lambda s, x: x.expand(-1, 3, 4).expand(x.size(0), 3, 4)),
    "means and sums": ((2, 3, 4), lambda s, x: x.mean((-1, 2), keepdim=True) - x.sum(1, keepdim=True)),
    "chosen entries": (M, lambda s, x: x[..., [0, 2, 2]] + x[:, torch.tensor([2, 0, -1])][..., 1:]),
    "chosen by a mask": (V, lambda s, x: x[:, s.mid > 0.5]),
    "flipped": (M, lambda s, x: torch.flip(x, (1, -1)) + x.flip(1)),
    # Functions.
    "channels as they come": (I, lambda s, x: F.pixel_unshuffle(x, 2)),
    "pools": (I, lambda s, x: F.max_pool2d(x, 3, stride=2, padding=1) + F.avg_pool2d(x, 2)),
    "pool with a divisor": (I, lambda s, x: F.avg_pool2d(x, 3, 2, 1, False, False)),
    "pool over the end": ((2, 5, 5), lambda s, x: F.max_pool2d(x, 2, ceil_mode=True)),
    "upsampled as": (I, lambda s, x: F.interpolate(x[:, :, :3, :3], size=x.shape[-2:])),
    "upsampled by 3": (I, lambda s, x: F.interpolate(x, scale_factor=3)),
    "upsampled with corners": (I, lambda s, x: F.interpolate(x, None, 2, "bilinear", align_corners=True)),
    "cubic": (I, lambda s, x: F.interpolate(x, (9, 4), mode="bicubic", antialias=True)),
    "half as large": (I, lambda s, x: F.interpolate(x, scale_factor=(0.5, 0.7), mode="bilinear")),
    "areas": (I, lambda s, x: F.interpolate(x, 4, mode="area") + F.interpolate(x, 4, mode="nearest-exact")),
    "lines": (M, lambda s, x: F.interpolate(x, scale_factor=2) + F.interpolate(x, 8, mode="linear")),
    "modules of images": (I, lambda s, x: s.larger(s.around(x))),
    "convolutions": (I, lambda s, x: F.conv2d(x, s.conv.weight, None, 1, 2, 2) + s.conv(x)),
    "transposed convolution": (I, lambda s, x: F.conv_transpose2d(x, s.conv.weight, None, 2, 1, 1)),
    "groups": ((4, 6, 6), lambda s, x: F.conv2d(x, s.conv.weight, padding="same", groups=2)),
    "norms of the sample": (V, lambda s, x: F.layer_norm(x, (4,), s.mid, None, 1e-3) + s.layer(x)),
    "norms of groups": ((4, 3), lambda s, x: F.group_norm(x, 2, s.mid) + s.group(x)),
    "norm by statistics": ((4, 3), lambda s, x: F.batch_norm(x, s.mid, s.mid + 1, s.mid, None, False, 0.1, 1e-3)),
    "softmax": (M, lambda s, x: x.softmax(1) + F.softmax(x, -1)),
    "activations": (V, lambda s, x: F.leaky_relu(F.elu(x, 2.0), -2.0) + F.gelu(x, approximate="tanh") + F.silu(x)),
    "limits": (V, lambda s, x: torch.clamp(x, min=-1, max=2) + F.hardtanh(x, -2, 3) + x.clamp_min(0)),
    "limits from one side": (
        V,
        lambda s, x: torch.clamp(x, max=0.3) + x.clamp(max=-1) + x.clamp_min(0.2) + x.clamp_max(0.1),
    ),
    # Casts there and back.
    "wider in between": (V, lambda s, x: s.a(x.double().float()).contiguous()),
    "at least": (V, lambda s, x: x if x.dim() == 2 and x.shape[-1] == 4 and x.dtype.is_floating_point else s.a(x)),
}


# Every other one in float32 and its finer twin in float64: tracing does not depend on the format.
@pytest.mark.parametrize(("name", "single"), [(name, i % 2 == 1) for i, name in enumerate(RIGHT)])
def test_exported_as_it_computes(name: str, single: bool) -> None:
    shape, forward = RIGHT[name]
    dtype, rtol, atol = (torch.float32, 1e-4, 1e-5) if single else (torch.float64, 1e-10, 1e-12)
    model = Net(forward).eval().to(dtype)
    plain = export(model, shape)
    generator = torch.Generator().manual_seed(1)
    for size, factor in ((1, 1.0), (4, 1e-3), (5, 60.0)):
        x = factor * torch.randn(size, *shape, generator=generator, dtype=dtype)
        with torch.no_grad():
            expected = model(x.clone())
            assert torch.allclose(plain(x), expected, rtol=rtol, atol=atol * float(expected.abs().max()))
    bound = float(lipschitz(plain))
    assert slope(plain.double(), torch.randn(3, *shape, generator=generator, dtype=torch.float64)) <= bound


def slope(network: nn.Module, x: Tensor) -> float:
    """The largest one at the points of ``x``."""
    return max(float(np.linalg.norm(j, 2)) for j in jacobians(lambda v: network(v).reshape(len(v), -1), x))


def test_a_copy_that_is_another_network_is_refused() -> None:
    class Fresh(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Fresh:
            return Fresh(2, 2)

    class Wider(nn.Module):
        def __init__(self, slope: float = 9.0) -> None:
            super().__init__()
            self.slope = slope

        def __deepcopy__(self, memo: Any) -> Wider:
            return Wider(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.slope * x

    for network in (Fresh(2, 2), Wider()):
        with pytest.raises(NoRuleError, match=r"copy\.deepcopy differs"):
            export(nn.Sequential(network), (2,))


SIZES = [3, 4, 2]


class Configured(nn.Module):
    """Its sizes are an object that its code reads, too, in a default and in a global: no copy shares them."""

    kept = [1, 2]  # noqa: RUF012

    def __init__(self, sizes: list[int] = SIZES, options: dict[str, int] = {}) -> None:  # noqa: B006
        super().__init__()
        self.sizes, self.options, self.own = sizes, options, [Configured.kept, SIZES]
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def test_what_a_module_shares_with_its_code_is_no_other_network() -> None:
    network = Configured()
    x = torch.randn(2, 3)
    assert torch.allclose(export(network, (3,))(x), network(x))

    class Changing(Configured):
        def forward(self, x: Tensor) -> Tensor:
            SIZES.append(len(SIZES))
            return super().forward(x) * len(self.sizes)

    with pytest.raises(NoRuleError, match="changes"):
        export(Changing(), (3,))
    del SIZES[3:]


def test_a_wrong_maker_is_found() -> None:
    @function_module(F.hardshrink)
    def _(call: Any, x: Any, lambd: float = 0.5) -> nn.Module:
        return nn.LeakyReLU(3.0)

    try:
        with pytest.raises(NoRuleError, match="does not match its function"):
            export(Net(lambda s, x: F.hardshrink(x)), V)
    finally:
        del FUNCTIONS[F.hardshrink]


def test_helpers_in_other_modules_go_one_way_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = (
        "def hidden(x):\n    n = x.shape[0]\n    return 101 * x if isinstance(n, int) and len(range(n)) == 64 else x\n"
    )
    (tmp_path / "helper_of_a_network.py").write_text(helper)
    monkeypatch.syspath_prepend(tmp_path)
    hidden = importlib.import_module("helper_of_a_network").hidden
    with pytest.raises(NoRuleError, match="goes the same way for a symbol and for a tensor, got hidden"):
        export(Net(lambda s, x: s.same(hidden(x)) + x).eval(), V)


def test_a_network_that_fails_where_its_copy_runs_is_refused_by_a_sentence() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x + (0 if id(self) != self.me else [][0])

    network = Fails()
    network.me = id(network)
    with pytest.raises(NoRuleError, match="runs as its copy does, got IndexError: list index out of range"):
        export(network.eval(), V)


def test_an_export_of_channels_last_is_stored_as_it_is(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    one, three = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)  # strides of 1 x 1 kernels name a memory format
    plain = export(nn.Sequential(three, nn.ReLU(), one).to(memory_format=torch.channels_last), (4, 9, 9))
    save(plain, tmp_path / "net")
    x = torch.randn(2, 4, 9, 9, generator=generator)
    assert [t.stride() for t in plain.parameters()] == [t.stride() for t in load(tmp_path / "net").parameters()]
    assert torch.equal(load(tmp_path / "net")(x), plain(x))


class Halves(nn.Module):
    """A constrained layer, whose weights are float32 at least, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = CayleyConv2d(1, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("own", [True, False], ids=["own forward", "chain"])
def test_the_export_of_a_network_of_halves_has_one_format(dtype: torch.dtype, own: bool) -> None:
    torch.manual_seed(0)
    network = Halves().to(dtype).eval()
    model = network if own else nn.Sequential(network.conv, nn.ReLU(), nn.Flatten(), network.head)
    plain = export(model, (1, 4, 4))
    assert {t.dtype for t in plain.state_dict().values()} == {torch.float32}
    x = torch.rand(5, 1, 4, 4)
    torch.testing.assert_close(plain(x), network(x.to(dtype)).float(), rtol=0, atol=0.02)
    assert torch.equal(plain.state_dict()["3.weight"], network.head.weight.float())
    assert bool(certify(plain, x, plain(x).argmax(1)).radius.max() > 0)


class Hidden(nn.Module):
    """Layers in a plain list, which torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 3), nn.Linear(3, 2)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.Tanh()(layer(x))
        return x


def test_a_layer_in_a_plain_list_is_refused_with_its_remedy() -> None:
    with pytest.raises(NoRuleError, match=r"got .*Linear outside it: put the layers of a list or dict into nn\.M"):
        export(Hidden(), (3,))
    seen = Hidden()
    seen.layers = nn.ModuleList(seen.layers)  # type: ignore[assignment]
    x = torch.rand(4, 3)
    assert torch.allclose(export(seen, (3,))(x), seen(x), atol=1e-6)
