"""Law 12: the function stays the same under another dtype, device, compiler or functional transform."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import OptionError
from lipkit.lowering import export
from lipkit.testing.case import Case, LawBroken, forward, require, require_same, require_small
from lipkit.testing.reference import tolerance

OBJECTS = ("weight", "kernel", "symbol", "generator")


def moves(case: Case) -> dict[str, float]:
    """Law 12: outputs agree in other dtypes, on other devices, and in autocast, torch.compile, .func and .export."""
    layer = case.moved(case.layer())
    x = case.x()
    y = forward(layer, x)
    measured = {"float64": _to_double(case, layer, x, y)}
    if case.dtype == torch.float32:
        measured["autocast"] = _autocast(layer, x, y)
    _another_device(layer, x, y, case)
    for backend in case.backends:
        measured[backend] = _compile(layer, x, backend, case)
    measured["torch.func"] = _transforms(layer, x, y, case.eps())
    plain = export(layer, case.shape)
    with _quiet():
        program = torch.export.export(plain, (x,)).module()
    measured["torch.export"] = require_same(program(x), forward(plain, x), case.eps(), "torch.export of the export")
    return measured


def _to_double(case: Case, layer: nn.Module, x: Tensor, y: Tensor) -> float:
    z = forward(copy.deepcopy(layer).double(), x.double())
    require(z.dtype == torch.float64, f"layer.double(): expected a float64 output, got {z.dtype}")
    require(y.dtype == case.dtype, f"expected an output of dtype {case.dtype}, got {y.dtype}")
    return require_same(z, y, case.eps(), "layer.double()")


def _parts(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for part in value for t in _parts(part)]


@contextmanager
def _recorded(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the constrained weights, kernels, symbols and generators that a forward pass makes."""
    made: list[Tensor] = []

    def recorder(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            value = method(*args, **kwargs)
            made.extend(_parts(value))
            return value

        return call

    touched = [(m, name) for m in layer.modules() for name in OBJECTS if callable(getattr(type(m), name, None))]
    for module, name in touched:
        setattr(module, name, recorder(getattr(module, name)))
    try:
        yield made
    finally:
        for module, name in touched:
            delattr(module, name)  # uncovers the method of the class


def _autocast(layer: nn.Module, x: Tensor, y: Tensor) -> float:
    layer, x = copy.deepcopy(layer), x.clone().requires_grad_()
    with _recorded(layer) as exact:
        layer(x)
    with _recorded(layer) as low, torch.autocast(x.device.type, torch.bfloat16):
        z = layer(x)
    for a, b in zip(exact, low, strict=True):
        dtypes = f"{a.dtype}, got {b.dtype}"
        require(b.dtype == a.dtype, f"bfloat16 autocast: expected a constrained object of dtype {dtypes}")
        require_same(b, a, tolerance(64, a.dtype), "bfloat16 autocast: constrained object against float32")
    gap = require_same(z, y, tolerance(1, torch.bfloat16), "bfloat16 autocast: outputs")
    z.float().square().sum().backward()
    for name, p in layer.named_parameters():
        fine = p.grad is None or (p.grad.dtype == p.dtype and bool(p.grad.isfinite().all()))
        require(fine, f"bfloat16 autocast: expected a finite {p.dtype} gradient of {name}, got {p.grad}")
    return gap


def _another_device(layer: nn.Module, x: Tensor, y: Tensor, case: Case) -> None:
    # The meta device needs no hardware, and a constant left on the CPU raises there, too. It holds no values, so a
    # layer whose steps depend on values raises; only the check of shapes is lost then.
    try:
        z = copy.deepcopy(layer).to("meta")(x.to("meta"))
    except (NotImplementedError, OptionError):
        pass
    else:
        require(z.shape == y.shape and z.is_meta, f"device meta: expected shape {tuple(y.shape)}, got {tuple(z.shape)}")
    if torch.cuda.is_available():
        there = copy.deepcopy(layer).cuda()
        require_same(forward(there, x.cuda()), y, 4 * case.eps(), "device cuda")  # sums in another order


# Warnings of torch's tracers are about their own deprecated code and the speed of complex operators.
_quiet = partial(warnings.catch_warnings, action="ignore")


def _waves(like: Tensor) -> Tensor:
    """Numbers between -1 and 1 without the symmetries of a layer."""
    return torch.cos(torch.arange(like.numel(), dtype=torch.float64)).reshape(like.shape).to(like)


def _transforms(layer: nn.Module, x: Tensor, y: Tensor, eps: float) -> float:
    """Compare vmap over the samples, jvp and grad of ``torch.func`` with ordinary outputs and derivatives."""
    values = {name: p.detach() for name, p in layer.named_parameters()}

    def call(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, values, (x,))

    to = _waves(y)
    inputs = [*layer.parameters(), x.clone().requires_grad_()]  # the input last
    slopes = torch.autograd.grad((layer(inputs[-1]) * to).sum(), inputs, allow_unused=True, materialize_grads=True)
    along = {name: _waves(p) * float(p.norm()) / p.numel() ** 0.5 for name, p in values.items()}  # as long as p
    try:
        with torch.no_grad(), _quiet():
            each = torch.func.vmap(lambda one: call(values, one[None])[0])(x)
            change = torch.func.jvp(call, (values, x), (along, _waves(x)))[1]
        for_values, for_x = torch.func.grad(lambda values, x: (call(values, x) * to).sum(), (0, 1))(values, x)
    except (RuntimeError, NotImplementedError) as error:
        line = str(error).strip().split("\n")[0]
        raise LawBroken(
            "torch.func: expected a layer that vmap, jvp and grad can follow (an autograd.Function needs setup_context "
            f"and rules for vmap and jvp), got {type(error).__name__}: {line}"
        ) from None
    gap = require_same(each, y, eps, "torch.func.vmap over the samples")
    # Compare with the size of the output: for an orthogonal layer, gradients of a norm nearly cancel.
    size = float(to.norm() * max(1.0, float(y.norm())))
    ways = [*along.values(), _waves(x)]
    expected = sum(float((slope * way).sum()) for slope, way in zip(slopes, ways, strict=True))
    require_small(abs(float((change * to).sum()) - expected) / size, 32 * eps, "torch.func.jvp")
    for slope, (name, g) in zip(slopes, [*for_values.items(), ("the input", for_x)], strict=True):
        require_small(float((slope - g).norm()) / size, 32 * eps, f"torch.func.grad of {name}")
    return gap


def _compile(layer: nn.Module, x: Tensor, backend: str, case: Case) -> float:
    plain, compiled = copy.deepcopy(layer), copy.deepcopy(layer)
    x = x.clone().requires_grad_()
    torch.compiler.reset()  # else graphs of other layers of this class are tried first
    with _quiet():
        z = torch.compile(compiled, backend=backend, fullgraph=case.fullgraph)(x)
        z.square().sum().backward()
    y = plain(x)
    y.square().sum().backward()
    gap = require_same(z, y, case.eps(), f"torch.compile(backend={backend!r})")
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        if p.grad is not None:
            if q.grad is None:
                raise LawBroken(f"torch.compile(backend={backend!r}): expected a gradient of {name}, got None")
            # Compare with the size of the output: for an orthogonal layer, gradients of a norm nearly cancel.
            size = max(float(p.grad.norm()), float(y.detach().norm()))
            off = float((p.grad - q.grad).norm()) / size
            require_small(off, 16 * case.eps(), f"torch.compile(backend={backend!r}), gradient of {name}")
    return gap
