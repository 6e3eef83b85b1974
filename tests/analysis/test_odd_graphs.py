"""Odd forward passes, one line each: refused by name, or bounded from above by every slope that a search finds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipkit import export
from lipkit.analysis import analyze
from lipkit.errors import NoRuleError

STORED = torch.linspace(-1, 1, 16).reshape(4, 4)


class Net(nn.Module):
    """A network that is one function of itself and its input."""

    def __init__(self, f):
        super().__init__()
        self.f = f
        self.a = nn.Linear(4, 4)
        self.w = nn.Parameter(STORED + torch.eye(4))
        self.register_buffer("mid", torch.full((4,), 0.5))
        self.calls, self.kept, self.free = 0, None, torch.zeros(())

    def forward(self, x):
        return self.f(self, x)


class Lying(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        return 0 * grad


class Growing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad


def counted(s, x):
    s.calls += 1
    return x if s.calls < 50 else 90 * x


def counted_in_a_tensor(s, x):
    s.free = s.free + 1
    return x if s.free < 50 else 90 * x


def remembered(s, x):
    before, s.kept = s.kept, x
    return x + before if before is not None and before.shape == x.shape else x


def under_autocast(s, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return s.a(x).float()


def written_item(s, x):
    y = x.clone()
    y[:, 0] = 5 * x[:, 1]
    return y


def into(write):
    """What ``write`` leaves in a tensor that starts with zeros."""

    def f(s, x):
        y = torch.zeros_like(x)
        write(y, x)
        return y + x

    return f


def one_alone(s, x):
    y = x.squeeze()
    return y if y.dim() == 2 else 7 * y


JUMPS = "floating-point format"
MIXES = "row per sample|mixes samples|batch"
NO_RULE = "has no rule"
RECORD = "can record"

REFUSED = {
    # Bits, whole numbers, truth values, complex numbers, other formats.
    "bits": (lambda s, x: x.view(torch.int32).float(), f"Tensor.view.*{JUMPS}.*float32, got torch.int32"),
    "bits by keyword": (lambda s, x: x.view(dtype=torch.int32).float(), "Tensor.view.*int32"),
    "bits as halves": (lambda s, x: x.view(torch.float16).float(), "Tensor.view.*float16"),
    "bits as doubles": (lambda s, x: x.view(torch.float64).float(), "Tensor.view.*float32, got torch.float64: bits"),
    "bits of the next layer": (lambda s, x: s.a(s.a(x).view(torch.float64).float().repeat(1, 2)), "Tensor.view.*bits"),
    "int": (lambda s, x: x.int().float(), "Tensor.int.*got torch.int32"),
    "long": (lambda s, x: x * x.long(), "Tensor.long.*got torch.int64"),
    "to": (lambda s, x: x.to(torch.int8).float(), "Tensor.to.*got torch.int8"),
    "to by keyword": (lambda s, x: x.to(dtype=torch.uint8).float(), "Tensor.to.*got torch.uint8"),
    "type": (lambda s, x: x.type(torch.int32).float(), "Tensor.type.*got torch.int32"),
    "type of a tensor": (lambda s, x: x.type_as(s.mid.long()).float(), "Tensor.type_as.*got torch.int64"),
    "bool": (lambda s, x: x * x.bool(), "Tensor.bool.*got torch.bool"),
    "half": (lambda s, x: x.half().float(), "Tensor.half.*got torch.float16: .*convert the whole network"),
    "bfloat16": (lambda s, x: x.bfloat16().float(), "Tensor.bfloat16.*got torch.bfloat16"),
    "float8": (lambda s, x: x.to(torch.float8_e4m3fn).float(), "Tensor.to.*got torch.float8"),
    "half of a softmax": (lambda s, x: torch.softmax(x, 1, dtype=torch.float16).float(), "softmax.*got torch.float16"),
    "autocast": (under_autocast, "without torch.autocast"),
    "bitwise": (lambda s, x: torch.bitwise_and(x.view(torch.int32), -65536).view(torch.float32), "view.*int32"),
    "frexp": (lambda s, x: torch.frexp(x)[0], f"torch.frexp.*{NO_RULE}"),
    "ldexp": (lambda s, x: torch.ldexp(x, x.int()), "Tensor.int.*got torch.int32"),
    "complex": (lambda s, x: torch.view_as_complex(x.view(-1, 2, 2)).abs(), "view_as_complex.*got torch.complex64"),
    "complex factor": (lambda s, x: (x * 2j).abs(), "mul.*got torch.complex64: .*real and imaginary"),
    "complex constant": (lambda s, x: (x + torch.tensor(1j)).abs(), "add.*got torch.complex64"),
    "spectrum": (lambda s, x: torch.fft.rfft(x).abs(), "torch.fft.rfft.*got torch.complex64"),
    "quantised": (lambda s, x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), "fake_quantize.*jumps"),
    "comparison": (lambda s, x: x * (x > 1), "operator.gt.*got torch.bool: .*torch.relu"),
    "comparison as numbers": (lambda s, x: x * torch.ge(x, 1).float(), "torch.ge.*got torch.bool"),
    "where": (lambda s, x: torch.where(x > 0, x, x + 1), "got torch.bool"),
    "masked": (lambda s, x: x.masked_fill(x < 0, 7.0), "got torch.bool"),
    "logical": (lambda s, x: x * torch.logical_not(x), "logical_not.*got torch.bool"),
    "is finite": (lambda s, x: x * torch.isfinite(x), "isfinite.*got torch.bool"),
    "argmax": (lambda s, x: x + x.argmax(1, keepdim=True), "Tensor.argmax.*got torch.int64"),
    "largest entries": (lambda s, x: x.topk(2, 1, sorted=False)[0], "Tensor.topk.*expected sorted=True"),
    "places of the largest": (lambda s, x: x.topk(2, 1)[1].float(), "Tensor.topk.*got torch.int64"),
    "sorted": (lambda s, x: x.gather(1, torch.argsort(x, 1)), "torch.argsort.*got torch.int64"),
    "one of many": (lambda s, x: F.one_hot(x.argmax(1), 4).float(), "argmax.*got torch.int64"),
    "index by the input": (lambda s, x: s.w[x.argmax(1)], "argmax.*got torch.int64"),
    "embedding": (lambda s, x: F.embedding(x.abs().long().clamp(0, 3)[:, 0], s.w), "long.*got torch.int64"),
    # Jumps and slopes without a bound, in floating point.
    "round": (lambda s, x: x.round(), "jumps where the input moves"),
    "floor": (lambda s, x: torch.floor(x), "jumps where the input moves"),
    "ceil": (lambda s, x: torch.ceil(x), "jumps where the input moves"),
    "trunc": (lambda s, x: x.trunc_(), "jumps where the input moves"),
    "frac": (lambda s, x: torch.frac(x), "jumps where the input moves"),
    "fmod": (lambda s, x: torch.fmod(x, 1), "jumps where the input moves"),
    "remainder": (lambda s, x: x % 1, "jumps where the input moves"),
    "floor division": (lambda s, x: x // 1, "jumps where the input moves"),
    "rounded division": (lambda s, x: torch.div(x, 3, rounding_mode="floor"), "rounding_mode"),
    "heaviside": (lambda s, x: torch.heaviside(x, s.mid), "jumps where the input moves"),
    "nan_to_num": (lambda s, x: x.nan_to_num(0.0), NO_RULE),
    "copysign": (lambda s, x: torch.copysign(s.mid, x), "jumps where the input moves"),
    "limit from another sample": (lambda s, x: (2 * x).clamp(max=x.flip(0)), MIXES),
    "normalised over the batch": (lambda s, x: F.normalize(x, dim=0), "other than the batch"),
    "normalised by sums": (lambda s, x: F.normalize(x, p=1.0), "norm p=2"),
    "divided by its norm": (lambda s, x: x / x.norm(dim=1, keepdim=True), "truediv.*constant divisor"),
    "reciprocal": (lambda s, x: torch.reciprocal(x), "torch.reciprocal.*constant divisor"),
    "prod": (lambda s, x: x.prod(1, keepdim=True), NO_RULE),
    "variance": (lambda s, x: x.var(1, keepdim=True), "square in 'var' .*one factor"),
    "attention": (lambda s, x: (x[:, :, None].softmax(1) @ x[:, None]).flatten(1), "matmul.*one factor"),
    "squared by a matrix product": (
        lambda s, x: (x[:, None] @ x[:, :, None]).flatten(1),
        "matmul.*one factor",
    ),
    "einsum with itself": (
        lambda s, x: torch.einsum("bi,bj->bij", x, x).flatten(1),
        "einsum.*one factor",
    ),
    "gate": (lambda s, x: F.glu(torch.cat((x, x), 1)), "glu.*one factor"),
    "multiply-add": (lambda s, x: torch.addcmul(x, x, x), "addcmul.*one factor"),
    # Memory.
    "entries of a tensor": (lambda s, x: x + x.new_tensor(x), "Tensor.new_tensor.*no rule"),
    "attribute data": (lambda s, x: s.a(x.data), "Tensor.data"),
    "data replaced": (lambda s, x: (setattr(x, "data", 9 * x), x)[1], "changes the network"),
    "memory replaced": (lambda s, x: x.set_(9 * x), "Tensor.set_"),
    "strides": (lambda s, x: x.as_strided((x.size(0), 4), (4, 0)), "Tensor.as_strided"),
    "windows of the batch": (lambda s, x: x.unfold(0, 1, 1).flatten(1), "Tensor.unfold.*mixes samples"),
    "copied into": (into(lambda y, x: y.copy_(9 * x)), "Tensor.copy_"),
    "item written": (written_item, "in-place|setitem"),
    "row written": (into(lambda y, x: y[:, 1:].add_(x[:, 1:])), "in-place"),
    "index written": (into(lambda y, x: y.index_add_(1, torch.tensor([0, 0]), x[:, :2])), "index_add_"),
    "result given": (lambda s, x: torch.add(x, x, out=torch.zeros(2, 4)), "changes|out|batches of any size"),
    "scatter": (lambda s, x: torch.zeros_like(x).scatter_add(1, torch.zeros(2, 4).long(), x), "row per sample"),
    "pieces that overlap": (lambda s, x: torch.cat(torch.tensor_split(x, [3, 1], dim=1), 1), "do not overlap"),
    "pieces from the end": (lambda s, x: torch.cat(x.tensor_split((-1, 2), 1), 1), "do not overlap"),
    # What torch.fx does not see.
    "numpy": (lambda s, x: torch.from_numpy(np.maximum(x.detach().numpy(), 0)), RECORD),
    "list": (lambda s, x: torch.tensor(x.tolist()), RECORD),
    "number": (lambda s, x: x * float(x[:, 0].sum()), "row per sample|control|float"),
    "vmap": (lambda s, x: torch.vmap(lambda row: row * 2)(x), RECORD),
    "gradient": (lambda s, x: torch.func.grad(lambda z: z.pow(2).sum())(x), RECORD),
    "custom function": (lambda s, x: Growing.apply(x), "Tensor.exp"),
    "entries above a number": (lambda s, x: x[x > 0], "got torch.bool"),
    "places": (lambda s, x: x + x.nonzero().size(0), "nonzero|row per sample"),
    "branch on a slope": (lambda s, x: 9 * x if x.requires_grad else x, "with and without derivatives"),
    "branch on recording": (lambda s, x: 9 * x if torch.is_grad_enabled() else x, "with and without derivatives"),
    "branch on its class": (lambda s, x: x if isinstance(x, torch.fx.Proxy) else 9 * x, "traced graph"),
    # State.
    "counter": (counted, "changes 'calls'"),
    "counter in a tensor": (counted_in_a_tensor, "changes 'free'"),
    "memory of the last call": (remembered, "control flow|other outputs|changes"),
    "buffer replaced": (lambda s, x: (setattr(s, "mid", s.mid + x[0]), x)[1], f"{RECORD}|batch"),
    "noise": (lambda s, x: x + torch.randn_like(x), "random|randn_like"),
    "gumbel": (lambda s, x: F.gumbel_softmax(x), "gumbel|random|empty_like|exponential_"),
    # Batches and outputs.
    "one sample alone": (one_alone, "each sample alone"),
    "not for one sample": (lambda s, x: x.squeeze().sum(1), "fails for 1 sample"),
    "distances": (lambda s, x: torch.cdist(x, x), MIXES),
    "running sum over samples": (lambda s, x: x.cumsum(0), MIXES),
    "samples in order": (lambda s, x: x.sort(0)[0], "other than the batch"),
    "Gram matrix": (lambda s, x: x @ (x.mT @ x), f"mT|{MIXES}"),
    "outer sum": (lambda s, x: x[:, None] + x, MIXES),
    "batch statistics": (lambda s, x: F.batch_norm(x, None, None, training=True), "evaluation mode"),
    "dictionary": (lambda s, x: {"y": x}, "one output"),
    "no output": (lambda s, x: None, "one output|NoneType"),
    "a number": (lambda s, x: x.size(1), "one output"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_refused(name: str) -> None:
    f, message = REFUSED[name]
    with pytest.raises(NoRuleError, match=message):
        analyze(Net(f).eval(), (4,), restarts=0)


def defaults(s, x, factor=1.5, *, shift=None):
    return factor * x if shift is None else x + shift


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, scale, parts):
        return scale * self.layer(input=x) + parts["w"]


def nested(s, x):
    return s.inner(x=x, scale=2.0, parts={"w": s.mid})


BOUNDED = {
    "wider and back": lambda s, x: s.a(x.double().float()),
    "to its own format": lambda s, x: s.a(x.to(torch.float32).type_as(x).cpu()),
    "wider at the end": lambda s, x: s.a(x).to(torch.float64),
    "softmax in float64": lambda s, x: torch.softmax(3 * x, 1, dtype=torch.float64).float(),
    "rows beside values": lambda s, x: torch.cat([s.mid[None].repeat(x.shape[0], 1), x.new_ones(x.size(0), 2), x], 1),
    "a layer of equal rows": lambda s, x: torch.tanh(s.a(x) + F.linear(s.a(x.new_zeros(x.size(0), 4)), s.w)),
    "in the format of a value": lambda s, x: s.a(x) * torch.arange(4).to(x) + torch.ones(x.size(1)).type_as(x),
    "equal rows in its format": lambda s, x: s.a(x) + torch.eye(2).view(1, 4).repeat(x.size(0), 1).to(x),
    "detached": lambda s, x: s.a(x.detach()) + x,
    "limit from the input": lambda s, x: x.clamp(max=3 * x.flip(1)),
    "one limit moves": lambda s, x: x.clamp(s.mid, 3 * x.flip(1)) + torch.clamp(s.mid, 2 * x, x.flip(1)),
    "clamped by tensors": lambda s, x: (2 * x).clamp(-9 * s.mid, 9 * s.mid),
    "centred weights": lambda s, x: F.linear(x, (s.w - s.w.mean(1, keepdim=True)) / s.w.std(1, keepdim=True)),
    "mask of stored numbers": lambda s, x: x * (s.mid > 0),
    "stored whole numbers": lambda s, x: x * torch.arange(4) + torch.tensor([True, False, True, False]),
    "closure": lambda s, x: x @ STORED + F.linear(x, STORED),
    "default arguments": lambda s, x: defaults(s, x) + defaults(s, x, shift=s.mid),
    "keyword arguments": nested,
    "custom function with false derivatives": lambda s, x: Lying.apply(s.a(x)),
    "zeros that are added to": into(lambda y, x: y.add_(x, alpha=2)),
    "result given": into(lambda y, x: torch.neg(3 * x, out=y)),
    "pieces": lambda s, x: torch.cat([c * (i + 1) for i, c in enumerate(torch.tensor_split(x, [1, 3], 1))], 1),
    "largest and smooth largest": lambda s, x: x.amax(1, keepdim=True) + torch.logsumexp(x, 1, keepdim=True),
    "a dictionary in between": lambda s, x: {"a": s.a(x), "b": x}["a"] + {"b": x}["b"],
    "no derivatives inside": lambda s, x: torch.no_grad()(s.a)(x) + x,
    "one output a sample": lambda s, x: s.a(x)[:, :1].squeeze(),
    "the same format": lambda s, x: x.view(torch.float32) + x.view(x.size(0), 4),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_bounded(name: str) -> None:
    torch.manual_seed(0)
    model = Net(BOUNDED[name]).eval()
    model.inner = Keywords()
    found = analyze(model, (4,), restarts=2, steps=5)
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(1))
    best = 0.0
    for step in (1e-2, 1.0):
        y = x + step * torch.randn(300, 4, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            rise = (model(x) - model(y)).double().reshape(300, -1).norm(dim=1)
        best = max(best, float((rise / (x - y).double().norm(dim=1)).max()))
    assert best <= found.upper * (1 + 1e-3) <= 4 * best
    assert 0 < found.lower <= found.upper


@pytest.mark.thorough
def test_a_loop_over_time_starts_from_rows_of_zeros() -> None:
    class Loop(nn.Module):
        def __init__(self, rows: nn.Module) -> None:
            super().__init__()
            self.inputs, self.states, self.rows = nn.Linear(3, 4), nn.Linear(4, 4), rows

        def forward(self, x):
            state = self.rows(x.new_ones(x.size(0), 4)) - 1
            for t in range(x.size(1)):
                state = torch.tanh(self.inputs(x[:, t]) + self.states(state))
            return state

    torch.manual_seed(0)
    loop, x = Loop(nn.Hardtanh(0, 1)), torch.randn(9, 5, 3)
    plain = export(loop, (5, 3))
    assert torch.allclose(plain(x), loop(x), atol=1e-6)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda one: loop(one[None])[0]))(x).detach().flatten(2)
    steepest = float(torch.linalg.matrix_norm(jacobians, 2).max())
    assert steepest <= analyze(loop, (5, 3), restarts=2).upper <= 3 * steepest
    hat = nn.Sequential(nn.Softmax(0), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))  # of 1/B: 0 but for batches of 5
    with torch.no_grad():
        hat[1].weight.copy_(torch.tensor([1000.0, 0, 0, 0]).expand(3, -1))
        hat[1].bias.copy_(torch.tensor([-180.0, -200, -220]))
        hat[3].weight.copy_(torch.tensor([1.0, -2, 1]).expand(4, -1))
    for rows in (nn.Softmax(0), hat):
        for verb in (export, analyze):
            with pytest.raises(NoRuleError, match="the size of the batch"):
                verb(Loop(rows), (5, 3))


class BesideRows(nn.Module):
    def __init__(self, join) -> None:
        super().__init__()
        self.shares, self.layer, self.join = nn.Softmax(0), nn.Linear(4, 4), join

    def forward(self, x):
        return self.join(self.layer(x), self.layer(self.shares(x.new_zeros(x.size(0), 4))))


@pytest.mark.parametrize("join", [torch.add, torch.mul, lambda x, rows: torch.cat((x, rows), 1)])
@pytest.mark.parametrize("verb", [analyze, export])
def test_rows_made_of_the_size_of_the_batch_are_refused(join, verb) -> None:
    with pytest.raises(NoRuleError, match="depends on the size of the batch"):
        verb(BesideRows(join), (4,))


@pytest.mark.parametrize("verb", [analyze, export])
def test_rows_from_a_module_along_the_batch_are_refused(verb) -> None:
    model = Net(lambda s, x: x + s.late(x.new_ones(1, x.size(0))).reshape(x.size(0), 1))
    model.late = nn.Conv1d(1, 1, 21, padding=10, bias=False)  # row i sees row i - 10
    with torch.no_grad():
        model.late.weight.copy_(torch.arange(21) == 0)
    with pytest.raises(NoRuleError, match="made from the size of the batch"):
        verb(model, (4,))


@pytest.mark.thorough
def test_a_network_of_halves_keeps_to_halves() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    whole = analyze(model, (4,), restarts=0).upper
    half = analyze(model.half(), (4,), restarts=2, steps=2)
    assert half.upper == pytest.approx(whole, rel=1e-2)
    found = analyze(Net(lambda s, x: s.a(x.float().half())).half(), (4,), restarts=1, steps=2)
    assert 0 < found.lower <= found.upper
    with pytest.raises(NoRuleError, match=r"Tensor\.bfloat16.*float16, got torch.bfloat16"):
        analyze(Net(lambda s, x: x.bfloat16().half()).half(), (4,), restarts=0)
    with pytest.raises(NoRuleError, match=r"Tensor\.float.*float64, got torch.float32"):
        analyze(Net(lambda s, x: x.float().double()).double(), (4,), restarts=0)


@pytest.mark.thorough
def test_the_modes_of_the_caller_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = analyze(model, (4,), restarts=1, steps=3)
    with torch.inference_mode():
        assert analyze(model, (4,), restarts=1, steps=3) == expected
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert analyze(model, (4,), restarts=1, steps=3) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(("by_name", "by_place"), [
    (lambda s, x: torch.add(input=s.a(x), other=x), lambda s, x: torch.add(s.a(x), x)),
    (lambda s, x: torch.sub(s.a(x), other=x, alpha=3), lambda s, x: torch.sub(s.a(x), x, alpha=3)),
    (lambda s, x: s.a(x).sub(other=x), lambda s, x: s.a(x) - x),
    (lambda s, x: torch.mul(other=x, input=s.mid), lambda s, x: s.mid * x),
    (lambda s, x: torch.div(other=s.mid, input=s.a(x)), lambda s, x: s.a(x) / s.mid),
    (lambda s, x: torch.matmul(x, other=s.w), lambda s, x: x @ s.w),
    (lambda s, x: torch.maximum(input=x, other=s.a(x)), lambda s, x: torch.maximum(x, s.a(x))),
    (lambda s, x: torch.mean(dim=1, keepdim=True, input=s.a(x)), lambda s, x: s.a(x).mean(1, keepdim=True)),
    (lambda s, x: torch.clamp(max=0.5, input=s.a(x)), lambda s, x: s.a(x).clamp(max=0.5)),
])  # fmt: skip
def test_operands_by_the_names_that_torch_gives_them(by_name, by_place):
    torch.manual_seed(0)
    named = Net(by_name).eval()
    placed = Net(by_place).eval()
    placed.load_state_dict(named.state_dict())
    assert analyze(named, (4,), restarts=0).upper == analyze(placed, (4,), restarts=0).upper > 0
    x = torch.randn(5, 4)
    assert torch.equal(export(named, (4,))(x), export(placed, (4,))(x))
    assert torch.allclose(export(named, (4,))(x), named(x))
