"""torch.func, dual numbers and batches of gradients against ordinary derivatives."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lipkit.bounds import aol, fantastic_four, gram, lipbound, reshaped, spectral_norm, symbol_sup
from lipkit.conv import Symbol, apply_symbol, cayley_conv2d, kernel_symbol
from lipkit.conv.phases import apply_phases
from lipkit.errors import OptionError
from lipkit.linalg import ORTHOGONALIZE, cayley, polar, taylor_exponential, transforms
from lipkit.linalg.exponential import gram_norm
from lipkit.linalg.transforms import differentiated, outside, transformed

Function = Callable[[Tensor], Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X = random(3, 2, 5, 4, seed=7)

# Bounds: their value is a proved number, and their derivative that of a near-equal function.
BOUNDS: dict[str, tuple[Function, Tensor]] = {
    "spectral_norm": (spectral_norm, random(2, 4, 3)),
    "spectral_norm of equal singular values": (spectral_norm, torch.eye(3, dtype=torch.float64)),
    "symbol_sup": (symbol_sup, random(3, 2, 3, 3)),
    "symbol_sup on a grid": (lambda k: symbol_sup(k, points=7), random(3, 2, 3, 3)),
    "gram": (gram, random(3, 2, 3, 3)),
    "reshaped": (reshaped, random(3, 2, 3, 3)),
    "aol": (aol, random(3, 2, 3, 3)),
    "lipbound": (lipbound, random(3, 2, 3, 3)),
    "fantastic_four": (fantastic_four, random(3, 2, 3, 3)),
    "gram_norm": (gram_norm, random(4, 3)),
}
MAPS: dict[str, tuple[Function, Tensor]] = {
    "cayley": (cayley, random(5, 3)),
    "polar": (polar, random(5, 3)),
    "polar of a square": (polar, random(3, 3)),
    "polar at repeated singular values": (polar, torch.eye(4, 3, dtype=torch.float64)),
    "taylor_exponential": (lambda w: taylor_exponential(w, 5), random(4, 4)),
    "taylor_exponential of a wide one": (lambda w: taylor_exponential(w, 5), random(2, 6)),
    "cayley_conv2d, tall": (lambda k: cayley_conv2d(k, X), random(3, 2, 3, 3)),
    "cayley_conv2d, wide": (lambda k: cayley_conv2d(k, X), random(1, 2, 3, 3)),
    "cayley_conv2d of images": (lambda x: cayley_conv2d(random(4, 2, 3, 2), x), X),
    "apply_symbol": (lambda k: apply_symbol(kernel_symbol(k, 5, 4), X), random(3, 2, 3, 3)),
    "apply_phases": (lambda m: apply_phases(Symbol(m[:2], m[2:, None]), X, (1, 4)), random(3, 3, 2)),
}
EVERYTHING = {**BOUNDS, **MAPS}


@pytest.mark.parametrize("name", EVERYTHING)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forwards_and_backwards_agree(name: str) -> None:
    function, a = EVERYTHING[name]
    along = random(*a.shape, seed=3)
    value = function(a)
    to = random(*value.shape, seed=5)
    b = a.clone().requires_grad_()
    (slope,) = torch.autograd.grad((function(b) * to).sum(), b)
    expected = float((slope * along).sum())
    again, change = torch.func.jvp(function, (a,), (along,))
    torch.testing.assert_close(again, value, rtol=1e-12, atol=1e-12)
    assert float((change * to).sum()) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(a, along)))
        assert float((dual.tangent * to).sum()) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(torch.func.grad(lambda a: (function(a) * to).sum())(a), slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MAPS)
def test_a_batch_of_gradients_through_one_graph(name: str) -> None:
    function, a = MAPS[name]
    b = a.clone().requires_grad_()
    y = function(b)
    many = random(4, *y.shape, seed=2)
    together = torch.func.vmap(lambda g: torch.autograd.grad(y, b, g, retain_graph=True)[0])(many)
    one_by_one = torch.stack([torch.autograd.grad(y, b, g, retain_graph=True)[0] for g in many])
    torch.testing.assert_close(together, one_by_one, rtol=1e-10, atol=1e-10)
    (batched,) = torch.autograd.grad(y, b, many, retain_graph=True, is_grads_batched=True)
    torch.testing.assert_close(batched, one_by_one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MAPS)
def test_saved_tensors_are_unpacked_once(name: str) -> None:
    # A checkpoint makes them again at the first unpacking, and refuses a second one.
    function, a = MAPS[name]
    b = a.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(b).square().sum(), b)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], list.pop):
        y = function(b).square().sum()
    assert torch.equal(torch.autograd.grad(y, b)[0], expected)


def test_saved_tensors_of_half_precision_are_unpacked_once() -> None:
    kernel, x = random(4, 4, 3, 3).float().requires_grad_(), random(8, 4, 5, 4).bfloat16()
    (expected,) = torch.autograd.grad(cayley_conv2d(kernel, x).float().square().sum(), kernel)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], list.pop):
        y = cayley_conv2d(kernel, x).float().square().sum()
    assert torch.equal(torch.autograd.grad(y, kernel)[0], expected)


@pytest.mark.parametrize("name", [name for name in (*MAPS, "gram_norm") if name[0] not in "pt"])
def test_second_derivatives_where_saved_tensors_have_hooks(name: str) -> None:
    function, a = EVERYTHING[name]

    def second() -> Tensor:
        b = a.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(b).square().sum(), b, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), b)[0]

    expected = second()
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone):  # as offloading does
        assert torch.equal(second(), expected)


@pytest.mark.parametrize("name", ORTHOGONALIZE)
def test_a_batch_of_matrices_by_vmap(name: str) -> None:
    batch = random(3, 4, 2)
    function = ORTHOGONALIZE[name]
    torch.testing.assert_close(torch.func.vmap(function)(batch), function(batch), rtol=1e-10, atol=1e-10)


def test_a_batch_of_kernels_is_not_proved_as_one() -> None:
    for proof in (lambda k: outside(k).__enter__(), spectral_norm, lambda k: symbol_sup(k[None, None])):
        with pytest.raises(OptionError, match=r"expected one matrix or kernel for a proof, got a batch .* use a loop"):
            torch.func.vmap(proof)(random(2, 3, 3))
        with pytest.raises(OptionError, match="got a batch"):
            torch.func.vmap(torch.func.grad(lambda k: proof(k).sum()))(random(2, 3, 3))  # noqa: B023


def test_what_is_at_work() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(transformed() and differentiated(x))
        return x.sum()

    x = torch.ones(2)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(torch.ones(2, 2))
    with forward_ad.dual_level():
        look(x)
    look(x)
    assert seen == [True, True, True, False]
    with torch.no_grad():
        assert not differentiated(x.requires_grad_())
    assert differentiated(x)


NAMES = {
    "torch._C._are_functorch_transforms_active": "no public way; transforms of torch.func count as not at work",
    "torch.autograd.forward_ad._current_level": "no public way; dual numbers count as not at work",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": "no public way; no proofs inside of torch.func",
    "torch._C._functorch.is_gradtrackingtensor": "no public way; no proofs inside of torch.func",
    "torch._C._functorch.is_legacy_batchedtensor": "no public way; a batch of gradients then fails in torch",
    "torch._C._functorch.is_batchedtensor": "no public way; no proofs inside of torch.func",
    "torch._C._functorch.get_unwrapped": "no public way; no proofs inside of torch.func",
    "torch._C._get_nnpack_enabled": "torch.backends.nnpack.set_flags returns it, but sets it; NNPACK counts as enabled",
    "torch.overrides._get_current_function_mode_stack": "no public way; function modes are not refused",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "no public way; dispatch modes are not refused",
    "torch.utils._device.DeviceContext": "torch.get_default_device says the device; lipkit is not imported",
    "torch.nn.modules.module._global_forward_hooks": "no public way; lipschitz and export raise AttributeError",
    "torch.nn.modules.module._global_forward_pre_hooks": "no public way; lipschitz and export raise AttributeError",
}
"""Private name -> its public counterpart; what happens without it."""

ATTRIBUTES = {
    "torch.nn.Module": ("_forward_hooks", "_forward_pre_hooks", "_parameters", "_buffers", "_modules", "_apply"),
    "torch.nn.Conv2d": ("_reversed_padding_repeated_twice",),
    "torch.Tensor": ("_version",),
}
"""Private attributes of public classes, used where they are needed: no public getter returns as much."""


@pytest.mark.parametrize("name", NAMES)
def test_torch_still_has_each_private_name(name: str) -> None:
    parts = name.split(".")
    found = torch
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            with contextlib.suppress(ImportError):
                import_module(".".join(parts[:i]))
        assert hasattr(found, part), f"torch has no {name} any more: {NAMES[name]}"
        found = getattr(found, part)


def test_torch_still_has_the_private_attributes_of_its_classes() -> None:
    made = {"torch.nn.Module": torch.nn.Module(), "torch.nn.Conv2d": torch.nn.Conv2d(1, 1, 1), "torch.Tensor": X}
    for kind, attributes in ATTRIBUTES.items():
        for attribute in attributes:
            assert hasattr(made[kind], attribute), f"{kind} has no {attribute} any more"


def private_names(tree: ast.AST) -> list[str]:
    """The private names of torch in a program: imported, written out, or asked for by a string."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            path = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            path = ast.unparse(node).split(".")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            path = [*ast.unparse(node.args[0]).split("."), ast.unparse(node.args[1]).strip("'")]
        else:
            continue
        if path[0] in ("torch", "nn") and any(p.startswith("_") and not p.startswith("__") for p in path):
            found.append(".".join(path))
    return found


@pytest.mark.thorough
def test_private_names_of_torch_stand_in_one_file() -> None:
    assert private_names(ast.parse("import torch\ntorch._C.f(nn.modules.x._Norm)\nfrom torch.a import _b")) != []
    package = Path(transforms.__file__).parents[1]
    found = {
        path.relative_to(package).as_posix(): private_names(ast.parse(path.read_text()))
        for path in package.rglob("*.py")
    }
    assert len(found.pop("linalg/transforms.py")) > 5
    assert {path: names for path, names in found.items() if names} == {}
