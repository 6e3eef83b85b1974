"""Activations and normalisations that are written out have the constant of the module that they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipkit import analyze, certify, export, interop, lipschitz, load, save
from lipkit.errors import NoRuleError

Forward = Callable[[Tensor], Tensor]
ROOT = math.sqrt(2 / math.pi)


class Written(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function, self.clip, self.gate = function, nn.ReLU6(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


ACTIVATIONS: dict[str, tuple[Forward, nn.Module]] = {
    "gelu": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), nn.GELU()),
    "gelu, halved last": (lambda x: 0.5 * (x * (1 + torch.special.erf(x * 0.5**0.5))), nn.GELU()),
    "gelu by tanh": (lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3))), nn.GELU("tanh")),
    "gelu by pow": (lambda x: 0.5 * x * (1 + (ROOT * (x + 0.044715 * x.pow(3.0))).tanh()), nn.GELU("tanh")),
    "fast gelu": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        nn.GELU("tanh"),
    ),
    "silu": (lambda x: torch.sigmoid(x).mul(x), nn.SiLU()),
    "silu in place": (lambda x: x.sigmoid().mul_(x), nn.SiLU()),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), nn.Mish()),
    "hardswish": (lambda x: x * F.relu6(x + 3, inplace=True) / 6, nn.Hardswish()),
    "hardswish by limits": (lambda x: x * (torch.clamp(x + 3, min=0, max=6) / 6), nn.Hardswish()),
    "hardswish by its gate": (lambda x: x * F.hardsigmoid(x), nn.Hardswish()),
    "log sigmoid": (lambda x: torch.log(x.sigmoid()), nn.LogSigmoid()),
    "softsign": (lambda x: x / (1 + x.abs()), nn.Softsign()),
    "relu by a choice": (lambda x: torch.where(x >= 0, x, torch.zeros_like(x)), nn.ReLU()),
    "relu by the other choice": (lambda x: torch.where(x < 0, 0.0, x), nn.ReLU()),
    "relu by a mask": (lambda x: (x > 0) * x, nn.ReLU()),
    "relu by filling": (lambda x: x.masked_fill(x.lt(0), 0), nn.ReLU()),
    "relu by a choice of the value": (lambda x: x.where(x >= 0, torch.tensor(0.0)), nn.ReLU()),
    "relu by a mask of its format": (lambda x: (x >= 0).to(x.dtype) * x, nn.ReLU()),
    "relu by a mask of a format": (lambda x: x.mul(torch.gt(x, 0).float()), nn.ReLU()),
    "relu by a mask like a value": (lambda x: x * (x > 0).type_as(x), nn.ReLU()),
    "leaky relu": (lambda x: torch.where(x > 0, x, 0.1 * x), nn.LeakyReLU(0.1)),
    "leaky relu by the value": (lambda x: x.where(x >= 0, x * torch.tensor([-2.5])), nn.LeakyReLU(-2.5)),
    "leaky relu, the other side": (lambda x: torch.where(x <= 0, 3 * x, x), nn.LeakyReLU(3.0)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_written_activation_is_the_module(name: str) -> None:
    function, module = ACTIVATIONS[name]
    plain = export(Written(function), (5,))
    assert repr(plain[0]) == repr(module)
    x = 3 * torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(plain(x), function(x), atol=1e-6)
    assert float(analyze(Written(function), (5,), restarts=0).upper) == float(lipschitz(module))


@pytest.mark.parametrize("slope", [1.702, -0.3, torch.tensor([2.0])])
def test_a_gate_with_a_slope_has_the_constant_of_silu(slope: float) -> None:
    net = Written(lambda x: x * torch.sigmoid(slope * x))
    plain, x = export(net, (5,)), 3 * torch.randn(20, 5)
    torch.testing.assert_close(plain(x), net(x))
    a = torch.linspace(-4, 4, 10**5, dtype=torch.float64, requires_grad=True)
    steepest = torch.autograd.grad((a * torch.sigmoid(slope * a)).sum(), a)[0].abs().max()
    for bound in (float(lipschitz(plain)), analyze(net, (5,)).upper):
        assert float(steepest) <= bound == pytest.approx(float(lipschitz(nn.SiLU())), rel=1e-6)


def rms(x: Tensor, dim: int | tuple[int, ...], eps: float = 0.01) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


def by_variance(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return (x - x.mean(dim, keepdim=True)) * (x.var(dim, unbiased=False, keepdim=True) + 0.01) ** -0.5


def by_root(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    mean = x.mean(dim, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(dim, keepdim=True) + 0.01)


def by_difference(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    moved = x - torch.mean(x, dim=dim, keepdim=True)
    return moved * (1 / (moved.square().mean(dim=dim, keepdim=True).add(0.01)).sqrt())


NORMS: dict[str, Callable[[Tensor, int | tuple[int, ...]], Tensor]] = {
    "rms": rms,
    "rms by a product": lambda x, dim: x / (torch.mean(x * x, dim, keepdim=True) + 0.01).sqrt(),
    "rms by reciprocal": lambda x, dim: torch.reciprocal(((x**2).mean(dim, True) + 0.01) ** 0.5) * x,
    "by variance": by_variance,
    "by correction": lambda x, dim: (
        (x - x.mean(dim, True)) * torch.rsqrt(x.var(dim, correction=0, keepdim=True) + 0.01)
    ),
    "by a root": by_root,
    "by a difference": by_difference,
}


@pytest.mark.thorough
@pytest.mark.usual(19)
@pytest.mark.parametrize(("dim", "shape"), [(-1, (6,)), (1, (4, 3, 2)), ((1, 3), (4, 3, 2)), ((-2, -1), (2, 3, 4))])
@pytest.mark.parametrize("name", NORMS)
def test_a_written_normalisation_has_its_constant(
    name: str, dim: int | tuple[int, ...], shape: tuple[int, ...]
) -> None:
    function = NORMS[name]
    net = Written(lambda x: function(x, dim))
    plain = export(net, shape)
    x = torch.randn(20, *shape, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(plain(x), net(x), atol=1e-5)
    expected = 1 / math.sqrt(0.01)
    for bound in (float(lipschitz(plain)), float(analyze(net, shape, restarts=0).upper)):
        assert expected * (1 - 1e-6) <= bound <= expected * (1 + 1e-6)
    # Attained: a small change about 0 in a direction of mean 0.
    small = torch.zeros(1, *shape, dtype=torch.float64)
    first = small[0].movedim(-1 if isinstance(dim, tuple) else dim - 1 if dim > 0 else dim, 0)
    first[0].fill_(1e-6), first[1].fill_(-1e-6)
    slope = float(net(small).norm() / small.norm())
    assert slope == pytest.approx(expected, rel=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "normalized"), [((6,), 6), ((3, 4, 2), (4, 2))])
def test_a_root_mean_square_norm_is_exported_certified_and_stored(
    shape: tuple[int, ...], normalized: int | tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    norm = nn.RMSNorm(normalized, eps=0.1).requires_grad_(False)
    nn.init.normal_(norm.weight)
    plain, x = export(norm, shape), torch.randn(50, *shape)
    assert torch.allclose(plain(x), norm(x), atol=1e-6)
    expected = float(norm.weight.abs().max()) / math.sqrt(0.1)
    assert expected * (1 - 1e-6) <= float(lipschitz(plain)) <= expected * (1 + 1e-6)
    # On a box away from 0 it is flatter, and no secant is steeper.
    boxed = export(norm, shape, box=(0.5, 1.0))
    bound = float(lipschitz(boxed))
    assert bound < expected / 1.2
    a, b = 0.5 + 0.5 * torch.rand(2, 4000, *shape, dtype=torch.float64)
    slopes = (norm.double()(a) - norm(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
    assert 0.2 * bound < float(slopes.max()) <= bound
    net = export(nn.Sequential(norm.float(), nn.Flatten(), nn.Linear(math.prod(shape), 3)), shape)
    certificate = certify(net, x, net(x).argmax(1))
    assert bool((certificate.radius > 0).all())
    assert torch.equal(load(save(net, tmp_path / "net"))(x), net(x))


def test_networks_in_float64_keep_their_digits() -> None:
    net = Written(lambda x: by_root(x, 1))
    net.register_buffer("wide", torch.ones((), dtype=torch.float64))
    x = torch.randn(9, 6, dtype=torch.float64)
    torch.testing.assert_close(export(net, (6,))(x), net(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dim", [1, 2, -1, -2])
def test_gated_halves_and_flips_along_each_dimension(dim: int) -> None:
    net = Written(lambda x: torch.flip(F.glu(x, dim), dims=(dim,)))
    plain, x = export(net, (4, 6), box=(0, 1)), torch.rand(5, 4, 6)
    torch.testing.assert_close(plain(x), net(x))
    slope = (net(x[:1]) - net(x[1:])).norm(dim=(1, 2)) / (x[:1] - x[1:]).norm(dim=(1, 2))
    assert float(slope.max()) <= float(lipschitz(plain)) < 0.8  # on the box: (sigmoid(1)^2 + 1/16)^(1/2) is 0.773


REFUSED: dict[str, tuple[Forward, str]] = {
    "another gate": (lambda x: x * torch.sigmoid(2 * x + 1), "no Lipschitz constant"),
    "a gate that is open": (lambda x: x * torch.sigmoid(0 * x), "slope of modulus 0.01 to 100"),
    "zeros that repeat x": (
        lambda x: torch.relu(x) + torch.where((a := x[:, None]) > torch.zeros_like(x[:, :, None] + a), a, 0.0).mean(1),
        "truth values jump",
    ),
    "a gate that overflows": (lambda x: x * torch.sigmoid(1e38 * x), "slope of modulus 0.01 to 100"),
    "a gate of complex slope": (lambda x: x * torch.sigmoid(x * torch.tensor(1j)), "complex numbers have no rules"),
    "a gate with a slope for each entry": (lambda x: x * torch.sigmoid(x * torch.ones(6)), "no Lipschitz constant"),
    "gate of another value": (lambda x: x * torch.sigmoid(x.roll(1, 1)), "no Lipschitz constant"),
    "another root": (lambda x: x * 0.5 * (1 + torch.erf(x / 1.4)), "torch.erf"),
    # Steeper than the module by 1e-7, which a bound would have to say.
    "nearly one": (lambda x: x / (0.9999999 + x.abs()), "divisor"),
    "nearly six": (lambda x: x * (x + 3).clamp(0, 6) / 5.999999, "no Lipschitz constant"),
    "nearly a half": (lambda x: 0.50000009 * x * (1 + torch.erf(x / math.sqrt(2.0))), "torch.erf"),
    "nearly a square": (lambda x: x * torch.rsqrt(x.pow(2.0000002).mean(1, keepdim=True) + 0.1), "pow|rsqrt"),
    "sum with a factor": (lambda x: x * 0.5 * torch.add(1.0, torch.erf(x / math.sqrt(2)), alpha=2), "torch.erf"),
    "without eps": (lambda x: rms(x, -1, 0.0), "pow|rsqrt"),
    "a choice that jumps": (lambda x: torch.where(x > 1, x, 0.0), "operator.gt"),
    "the falling side": (lambda x: torch.where(x > 0, 0.0, x - 1), "operator.gt"),
    "the steep side above": (lambda x: torch.where(x > 0, 0.1 * x, x), "operator.gt"),
    "a choice of the value that jumps": (lambda x: x.where(x < 0, 0.1 * x + 1), "operator.lt"),
    "another threshold": (lambda x: torch.where(x > 1e-9, x, 0.1 * x), "operator.gt"),
    "leaky from another value": (lambda x: torch.where(x > 0, x, 0.1 * x.roll(1, 1)), "operator.gt"),
    "a slope without end": (lambda x: torch.where(x > 0, x, math.inf * x), "operator.gt"),
    "a slope for each entry": (lambda x: torch.where(x > 0, x, x * torch.ones(6)), "operator.gt"),
    "a slope that moves": (lambda x: torch.where(x > 0, x, x * x), "operator.gt"),
    "a mask of a format that jumps": (lambda x: x * (x > 0.5).float(), "operator.gt"),
    "a mask of other numbers": (lambda x: (x - 1) * (x > 0), "operator.gt"),
    "of the batch": (lambda x: rms(x, 0), "pow|Tensor.mean"),
    "unbiased": (lambda x: (x - x.mean(1, True)) * torch.rsqrt(x.var(1, keepdim=True) + 0.1), "square in 'var'"),
    "mean of other entries": (
        lambda x: (x.unflatten(1, (2, 3)) * (x.unflatten(1, (2, 3)).pow(2).mean(1, True) + 0.1).sqrt()).flatten(1),
        "pow|Tensor.sqrt",
    ),
    "eps of the input": (lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + x[:, :1]), "pow|rsqrt"),
    "without an eps of its own": (lambda x: F.rms_norm(x, (6,)), "rms_norm.*expected eps, got None.*set eps=1.19"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_written_otherwise_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    for call in (lambda net: export(net, (6,)), lambda net: analyze(net, (6,))):
        with pytest.raises(NoRuleError, match=message):
            call(Written(function))


@pytest.mark.thorough
def test_the_mean_subtracted_has_constant_one_and_a_later_change_in_place_is_seen() -> None:
    plain = export(Written(lambda x: x - x.mean((1, 2), keepdim=True)), (3, 4))
    assert float(lipschitz(plain)) == 1
    changed = Written(lambda x: (y := x + 1, s := y.sigmoid(), y.mul_(3), y * s)[3])  # 3 (x + 1) sigmoid(x + 1)
    with pytest.raises(NoRuleError, match="no Lipschitz constant"):
        export(changed, (4,))


def test_the_batch_may_be_another_dimension() -> None:
    net = Written(
        lambda x: rms(x.permute(1, 0, 2), 0).permute(1, 0, 2) + by_root(x.permute(2, 1, 0), 1).permute(2, 1, 0)
    )
    plain, x = export(net, (4, 3)), torch.randn(5, 4, 3)
    assert torch.allclose(plain(x), net(x), atol=1e-5)


@pytest.mark.thorough
def test_files_of_both_forms_write_them_out_too(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    helper, numbers = onnx.helper, onnx.numpy_helper.from_array
    stored = {"two": 2.0, "eps": 0.01}
    nodes = [
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"]),
        helper.make_node("Sub", ["x", "mean"], ["moved"]),
        helper.make_node("Pow", ["moved", "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares", "axes"], ["variance"]),
        helper.make_node("Add", ["variance", "eps"], ["raised"]),
        helper.make_node("Sqrt", ["raised"], ["root"]),
        helper.make_node("Div", ["moved", "root"], ["y"]),
    ]
    tensors = [numbers(torch.tensor(value).numpy(), name) for name, value in stored.items()]
    tensors.append(numbers(torch.tensor([1]).numpy(), "axes"))
    values = [helper.make_tensor_value_info(name, 1, ["n", 4, 3]) for name in "xy"]
    graph = helper.make_graph(nodes, "written", values[:1], values[1:], tensors)
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    x = torch.randn(7, 4, 3)
    found = interop.load_onnx(path)
    (expected,) = runtime.InferenceSession(path).run(None, {"x": x.numpy()})
    assert torch.allclose(found(x), torch.from_numpy(expected), atol=1e-5)
    assert float(lipschitz(found)) == pytest.approx(10, rel=1e-6)
    net = Written(lambda x: by_root(0.5 * x * (1 + torch.erf(x / math.sqrt(2))), 1))
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    torch.export.save(program, tmp_path / "net.pt2")
    read = interop.load_program(tmp_path / "net.pt2")
    assert torch.allclose(read(x), net(x), atol=1e-5)
    assert [type(part) for part in read][:2] == [nn.GELU, type(found[0])]


@pytest.mark.parametrize(
    "relu", [lambda x: torch.where(x > 0, x, 0.0), lambda x: torch.where(x <= 0, torch.zeros_like(x), x)]
)
def test_programs_choose_too(relu: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    program = torch.export.export(Written(relu), (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    torch.export.save(program, tmp_path / "net.pt2")
    assert [type(part) for part in interop.load_program(tmp_path / "net.pt2")] == [nn.ReLU]


@pytest.mark.parametrize("bias", [None, torch.ones(4)])
def test_a_layer_norm_without_weight_is_stored(bias: Tensor | None, tmp_path: Path) -> None:
    plain, x = export(Written(lambda x: F.layer_norm(x, (4,), None, bias, 0.1)), (3, 4)), torch.randn(5, 3, 4)
    torch.testing.assert_close(load(save(plain, tmp_path / "net"))(x), F.layer_norm(x, (4,), None, bias, 0.1))


@pytest.mark.parametrize("memory", [lambda z: z.numpy()[:], lambda z: z.untyped_storage()])
def test_zeros_whose_memory_is_written_are_not_taken_for_zeros(memory: Callable[[Tensor], object]) -> None:
    def jumps(x: Tensor) -> Tensor:
        memory(zeros := torch.zeros_like(x))  # may be filled by what torch does not see
        return torch.where(x > 0, x, zeros)

    with pytest.raises(NoRuleError, match="expected tensors, got their memory"):
        lipschitz(Written(jumps), (4,))
