"""What has no rule is refused by name; in-place calls are followed or refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lipkit.analysis import analyze, function_rule
from lipkit.errors import NoRuleError, ShapeError
from lipkit.lowering.build import FUNCTIONS


class Function(nn.Module):
    """A network that is one function."""

    def __init__(self, f, **children):
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.eye(4))
        self.register_buffer("count", torch.zeros(()))
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        return self.f(self, x)


def unknown(s, x):
    return torch.special.expm1(x)


REFUSED = {
    "unknown function": (unknown, "torch.special"),
    "unknown method": (lambda s, x: x.exp(), "Tensor.exp"),
    "product of activations": (lambda s, x: x * x, "no Lipschitz"),
    "power": (lambda s, x: x**2, "pow.*no Lipschitz"),
    "division by an activation": (lambda s, x: 1 / x, "truediv"),
    "attention": (lambda s, x: F.scaled_dot_product_attention(x, x, x), "scaled_dot_product_attention"),
    "functional layer norm without eps": (lambda s, x: F.layer_norm(x, (4,), eps=0.0), "eps a positive finite number"),
    "layer norm by activations": (lambda s, x: F.layer_norm(x, (4,), x[0]), "batch|constant weight"),
    "control flow on values": (lambda s, x: x if x.sum() > 0 else -x, "control flow"),
    "control flow on the batch": (lambda s, x: x if x.shape[0] > 1 else -x, "control flow"),
    "iteration over the batch": (lambda s, x: torch.stack(list(x)), "control flow|iterat"),
    "a number from values": (lambda s, x: x / 2 + x.max().item(), "max|item"),
    "mean over the batch": (lambda s, x: x - x.mean(0, keepdim=True), "Tensor.mean.*batch"),
    "mean over everything": (lambda s, x: x - x.mean(), "mean"),
    "first sample": (lambda s, x: x - x[0], "batch"),
    "flip of the batch": (lambda s, x: x.flip(0), "mixes samples"),
    "shift of the batch": (lambda s, x: F.pad(x, (0, 0, 1, -1)), "batch"),
    "number that is the batch": (lambda s, x: x * x.shape[0], "size of the batch"),
    "cat along the batch": (lambda s, x: torch.cat((x, x), 0)[: x.size(0)], "torch.cat.*batch"),
    "softmax over the batch": (lambda s, x: torch.softmax(x, 0), "mixes samples"),
    "sum over the batch, broadcast": (lambda s, x: x.view(-1, 2, 2).sum(2) + x.sum(1), "batches of any size"),
    "random": (lambda s, x: x + torch.rand(4), "random numbers"),
    "random mask": (lambda s, x: x * torch.bernoulli(torch.full((4,), 0.5)), "random numbers"),
    "random like": (lambda s, x: x * torch.rand_like(x), "rand_like"),
    "dropout in training": (lambda s, x: F.dropout(x, 0.5, True), "training"),
    "two outputs": (lambda s, x: (x, x), "one output"),
    "state": (lambda s, x: x + s.count.add_(1), "changes .*count"),
    "assignment into a constant": (lambda s, x: s.w.copy_(s.w + 1)[0] + x, "changes 'w'"),
    "view changed in place": (lambda s, x: (x.view(-1, 2, 2).relu_().flatten(1), x)[1], "in-place"),
    "slice changed in place": (lambda s, x: (x[:, :2].relu_(), x)[1], "in-place"),
    "item assignment": (lambda s, x: (x.__setitem__((slice(None), 0), 0), x)[1], "in-place|setitem"),
    "detour through numpy": (lambda s, x: torch.from_numpy(x.numpy()), "record"),
    "conversion to integers": (lambda s, x: x.to(torch.int64).float(), "Tensor.to"),
    "sign": (lambda s, x: torch.sign(x), "torch.sign"),
    "largest ones": (lambda s, x: x - torch.topk(x, 1, sorted=False).values, "torch.topk"),
    "two moving arguments of a linear": (
        lambda s, x: torch.matmul(x.view(-1, 2, 2), x.view(-1, 2, 2)).flatten(1),
        "one factor to be constant",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    f, message = REFUSED[name]
    with pytest.raises(NoRuleError, match=message):
        analyze(Function(f), (4,), restarts=1, steps=1)


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (nn.RMSNorm(4), (4,), "rms_norm.*set eps=1.19"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Threshold(0.0, 1.0))),
            (4,),
            "at '0.1.0.threshold': expected the value 0",
        ),
        (nn.BatchNorm1d(4), (4,), "evaluation mode"),
        (nn.Dropout(), (4,), "evaluation mode"),
        (nn.Conv2d(1, 1, 3, padding=2, padding_mode="circular"), (1, 4, 4), "circular padding"),
        (nn.MultiheadAttention(4, 1), (2, 4), "MultiheadAttention|record|one tensor"),
        (torch.jit.ScriptModule(), (4,), "at '0': analyze: expected modules in Python, got ScriptModule"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (4,), "call .eval"),
        (nn.utils.spectral_norm(nn.Linear(4, 4)), (4,), "call .eval"),
    ],
)
def test_modules_refused(module: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises((NoRuleError, ValueError), match=message):
        analyze(nn.Sequential(module), shape)


def test_a_type_error_inside_of_the_forward_pass_is_not_taken_for_a_wrong_signature() -> None:
    class OfTwo(nn.Module):
        def forward(self, x, y):
            return x + y

    with pytest.raises(NoRuleError, match=r"expected a forward pass of one tensor, got .*OfTwo.*argument: 'y'"):
        analyze(OfTwo(), (4,))
    with pytest.raises(ShapeError, match=r"does not accept inputs of shape \(4,\): .*\(test_refusals.py:\d+\)"):
        analyze(Function(lambda s, x: x + "1"), (4,))


def test_random_parametrizations_and_other_hooks_are_refused() -> None:
    class Noise(nn.Module):
        def forward(self, w):
            return w + torch.randn_like(w)

    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Noise())
    with pytest.raises(NoRuleError, match=r"at '0'.*\['weight'\].*the same numbers at each evaluation"):
        analyze(nn.Sequential(layer), (4,))
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.raises(NoRuleError, match=r"at '0'.*hooks"):
        analyze(nn.Sequential(layer), (4,))
    model = Function(lambda s, x: x)
    model.forward = lambda x: 2 * x  # type: ignore[method-assign]
    with pytest.raises(NoRuleError, match="instance-level 'forward'"):
        analyze(model, (4,))


def steepest(model: nn.Module, x: torch.Tensor) -> float:
    """Largest norm of the Jacobians at the points, by differences: in-place calls cannot always be differentiated."""
    step = 1e-3 if x.dtype == torch.float32 else 1e-7
    norms = []
    for point in x:
        ends = torch.cat((point[None], point + step * torch.eye(len(point), dtype=x.dtype)))
        with torch.no_grad():
            y = model(ends).flatten(1).double().numpy()
        norms.append(np.linalg.norm((y[1:] - y[0]) / step, 2))
    return float(max(norms))


def inplace_twice(s, x):
    y = s.a(x)
    z = torch.relu_(y)
    y *= 3
    return y + z + s.a(x)


def inplace_shortcut(s, x):
    h = s.a(x)
    out = s.act(h)
    return out + h


def inplace_input(s, x):
    y = s.act(x)
    return s.a(y) - x


def alias(s, x):
    h = s.a(x)
    same = s.identity(h)
    h += 2 * x
    return same + h


def sum_of_saved(s, x):
    kept = [s.a(x)]
    for _ in range(3):
        kept.append(F.leaky_relu(kept[-1], -2.0, inplace=True))
    return torch.cat(kept, 1)


ALLOWED = {
    "in place twice": inplace_twice,
    "shortcut reads the overwritten value": inplace_shortcut,
    "the input is overwritten": inplace_input,
    "an alias sees the sum": alias,
    "a list of one tensor": sum_of_saved,
    "static control flow": lambda s, x: x if x.dim() == 2 and x.size(1) == 4 and x.dtype.is_floating_point else -9 * x,
    "view in place, not read again": lambda s, x: torch.relu_(s.a(x).view(-1, 2, 2)).flatten(1),
    "matrix products": lambda s, x: x @ s.w.t() + F.linear(x, 2 * s.w, s.w[0]),
    "slices": lambda s, x: torch.cat((x[:, 1:], x[..., :1], x[:, None, 2]), 1),
    "maximum": lambda s, x: torch.maximum(s.a(x), -x) + torch.clamp(x, -1, 1),
    "broadcast": lambda s, x: x + s.a(x).sum(1, keepdim=True) - x.mean(-1, keepdim=True) * s.w,
    "constants from sizes": lambda s, x: torch.cat((x, x.new_zeros(x.shape[0], 2)), 1) / s.w.diagonal().sum(),
    "unbind and stack": lambda s, x: torch.stack(torch.unbind(s.a(x), 1)[::-1], 1).flatten(1),
    "repeat": lambda s, x: torch.relu(x.unsqueeze(1).expand(-1, 3, -1)).reshape(x.size(0), -1),
    "interpolate": lambda s, x: F.interpolate(x.view(-1, 1, 2, 2), scale_factor=2).flatten(1),
    "functional convolutions": lambda s, x: (
        F.conv_transpose2d(
            torch.conv2d(x.view(-1, 1, 2, 2), s.w.view(4, 1, 2, 2), padding=1), s.w[:2].view(4, 1, 2, 1), s.w[0, :1]
        ).flatten(1)
        + F.conv1d(x.view(-1, 2, 2), s.w.view(4, 2, 2), None, 1, 1).sum((1, 2)).unsqueeze(1)
    ),
    "loop over chunks": lambda s, x: torch.cat([(i + 1) * c for i, c in enumerate(x.chunk(2, 1))], 1),
    "reverse subtraction": lambda s, x: 1 - 2 * x - (3 - s.a(x)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_bounded(name: str) -> None:
    torch.manual_seed(1)
    model = Function(ALLOWED[name], a=nn.Linear(4, 4), act=nn.ReLU(inplace=True), identity=nn.Identity())
    if name == "broadcast":
        model.w.data = torch.rand(1, 4)
    found = analyze(model, (4,), restarts=4, steps=20)
    x = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = model.double()
    if name == "constants from sizes":
        x = x.float()
        model = model.float()
    norm = steepest(model, x)
    assert 0 < found.lower <= found.upper
    assert norm <= found.upper * (1 + 1e-3) <= 8 * norm


def test_in_place_follows_the_memory() -> None:
    # relu_ changes h before the sum reads it: 2 relu(h), not relu(h) + h; both have norm 2 |w|, of which relu_ on a
    # scaled leak tells more: h is replaced by -2 h below zero, then added to itself.
    def f(s, x):
        h = x.clone()
        y = F.leaky_relu(h, -2.0, inplace=True)
        return y + h

    found = analyze(Function(f), (4,), restarts=4, steps=20)
    assert found.upper == pytest.approx(4)
    assert found.lower == pytest.approx(4, rel=0.1)


def test_a_function_of_the_user() -> None:
    def third(x):
        return x / 3

    torch.fx.wrap  # noqa: B018
    halve = torch.nn.functional.hardshrink  # has jumps: no rule of its own
    assert third(3.0) == 1

    @function_rule(halve)
    def _(call, x, lambd=0.5):
        return call.scale(x, 7.0, "by hand")

    try:
        found = analyze(Function(lambda s, x: halve(x)), (4,), restarts=0)
    finally:
        del FUNCTIONS[halve]
    assert (found.upper, found.layers[0].type, found.layers[0].method) == (
        7.0,
        "torch.nn.functional.hardshrink",
        "by hand",
    )
    with pytest.raises(NoRuleError, match="already has a rule"):
        function_rule(torch.relu)(lambda call, x: x)


@pytest.mark.parametrize("kind", ["spectral", "weight", "hook spectral", "hook weight", "orthogonal"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_normalised_weights_are_bounded_as_they_are_used(kind: str) -> None:
    torch.manual_seed(0)
    make = {
        "spectral": nn.utils.parametrizations.spectral_norm,
        "weight": nn.utils.parametrizations.weight_norm,
        "orthogonal": nn.utils.parametrizations.orthogonal,
        "hook spectral": nn.utils.spectral_norm,
        "hook weight": nn.utils.weight_norm,
    }[kind]
    layer = make(nn.Linear(4, 3))
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2))
    if "spectral" in kind:
        model(torch.randn(2, 4))  # a power iteration; leaves a computed weight on the module
    model.eval()
    if "hook" in kind:
        model(torch.randn(2, 4))
    weight = layer.weight.detach().double()
    truth = torch.linalg.matrix_norm(weight, 2) * torch.linalg.matrix_norm(model[2].weight.detach().double(), 2)
    keys = list(model.state_dict())
    found = analyze(model, (4,), restarts=1, steps=1)
    assert found.upper == pytest.approx(truth.item(), rel=1e-6)
    assert found.upper >= truth
    assert list(model.state_dict()) == keys


def test_the_message_of_lipschitz_points_here() -> None:
    from lipkit import lipschitz

    with pytest.raises(NoRuleError, match=re.escape("lipkit.analyze")):
        lipschitz(Function(unknown), (4,))
