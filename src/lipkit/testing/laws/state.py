"""Laws of parameters and state: complete at birth (4), pure (5), round trips (6), never stale (7)."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lipkit.testing.case import Case, LawBroken, distance, forward, require, require_same


def _inventory(layer: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def complete(case: Case) -> dict[str, float]:
    """Law 4: a forward pass changes no name or shape of a parameter; each parameter has a finite, non-zero gradient."""
    layer = case.layer()
    lazy = [name for name, t in (*layer.named_parameters(), *layer.named_buffers()) if is_lazy(t)]
    require(not lazy, f"expected every parameter in its final shape after __init__, got uninitialised {lazy}")
    named = case.claim != "none" and "weight" in dict(layer.named_parameters(recurse=False))
    require(not named, "expected the free parameter of a constrained layer to have another name, got 'weight'")
    before = _inventory(layer)
    forward(layer, case.x())
    after = _inventory(layer)
    names = f"{sorted(before)}, got {sorted(after)}"
    require(before == after, f"expected the same parameters after a forward pass, {names}")
    layer = case.moved(case.layer())
    if not any(p.requires_grad for p in layer.parameters()):
        return {"parameters": 0.0}
    y = layer(case.x())
    with case.random(5):
        direction = torch.randn_like(y)  # not the norm, whose gradient vanishes for orthogonal layers
    require(y.requires_grad, "expected an output that depends on the parameters, got one without a gradient")
    (y * direction).sum().backward()
    for name, p in layer.named_parameters():
        if not p.requires_grad:
            continue
        if (grad := p.grad) is None:
            raise LawBroken(f"parameter {name}: expected a gradient, got None: the output does not depend on it")
        require(bool(torch.isfinite(grad).all()), f"parameter {name}: expected a finite gradient, got {grad}")
        require(bool((grad != 0).any()), f"parameter {name}: expected a gradient that is not all zero, got zeros")
    return {"parameters": float(sum(p.numel() for p in layer.parameters()))}


_OWN = ("_parameters", "_buffers", "_modules", "training")


def _attributes(layer: nn.Module) -> dict[str, Any]:
    modules = layer.named_modules()
    return {f"{name}.{key}": value for name, m in modules for key, value in vars(m).items() if key not in _OWN}


def pure(case: Case) -> dict[str, float]:
    """Law 5, in both modes: equal outputs, same state, attributes and random state; train() equals eval()."""
    layer = case.moved(case.layer())
    x, eps = case.x(), case.eps()
    outputs = {}
    for training in (True, False):
        layer.train(training)
        state = {name: t.detach().clone() for name, t in layer.state_dict().items()}
        attributes = _attributes(layer)
        with torch.random.fork_rng(devices=[]):
            generator = torch.get_rng_state()
            outputs[training] = layer(x).detach()
            drawn = not torch.equal(generator, torch.get_rng_state())
        require(not drawn, "expected a forward pass that draws no random numbers, got one that does")
        same = require_same(forward(layer, x), outputs[training], eps, f"second forward pass (training={training})")
        now = layer.state_dict()
        changed = [n for n in {**state, **now} if n not in state or n not in now or not torch.equal(state[n], now[n])]
        require(not changed, f"expected a forward pass that keeps the state_dict, got changes of {changed}")
        later = _attributes(layer)
        hidden = [n for n in {**attributes, **later} if later.get(n, _OWN) is not attributes.get(n, _OWN)]
        require(not hidden, f"expected a forward pass that sets no attributes, got changes of {hidden}")
    gap = require_same(outputs[True], outputs[False], eps + case.train_gap, "train() against eval()")
    return {"repeated": same, "train against eval": gap}


def _independent(case: Case, copied: nn.Module, original: nn.Module, what: str) -> None:
    x, eps = case.x(), case.eps()
    y = forward(original, x)
    case.moved(copied, extra=11)
    if any(True for _ in copied.parameters()):
        require_same(forward(original, x), y, eps, f"the original after a change of its {what}")
        gap = distance(forward(copied, x), y)
        require(gap > eps, f"expected a changed {what} to give another output, got the same")


def round_trips(case: Case) -> dict[str, float]:
    """Law 6: loaded, deepcopied, pickled and EMA copies give the outputs of the layer, and change independently."""
    x, eps = case.x(), case.eps()
    layer = case.moved(case.layer())
    unused = copy.deepcopy(layer)
    y = layer(x).detach()  # record a graph, as in training: deepcopy fails if the layer keeps a weight from it
    worst = require_same(forward(unused, x), y, eps, "deepcopy made before a forward pass")
    fresh = case.layer(extra=7)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    worst = max(worst, require_same(forward(fresh, x), y, eps, "fresh layer with the saved state_dict"))
    loaded = pickle.loads(pickle.dumps(layer))  # safe: the bytes were made here
    for copied, what in ((copy.deepcopy(layer), "deepcopy"), (loaded, "pickled copy")):
        worst = max(worst, require_same(forward(copied, x), y, eps, what))
        _independent(case, copied, layer, what)
    if any(True for _ in layer.parameters()):
        _ema(case, layer)
    return {"difference": worst}


def _ema(case: Case, layer: nn.Module) -> None:
    x, eps = case.x(), case.eps()
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(layer)  # the first update copies
    y = forward(layer, x)
    first = {name: t.detach().clone() for name, t in layer.state_dict().items()}
    case.moved(layer, extra=13)
    require_same(forward(average.module, x), y, eps, "EMA copy after a change of the layer")
    average.update_parameters(layer)
    reference = case.layer(extra=7)
    trained = {name for name, _ in layer.named_parameters()}  # buffers are copied, not averaged
    mean = {name: (first[name] + t) / 2 if name in trained else t for name, t in layer.state_dict().items()}
    reference.load_state_dict(mean)
    averaged = forward(average.module, x)
    require_same(averaged, forward(reference, x), eps, "EMA copy against a layer of averaged parameters")


def _optimiser_step(case: Case, layer: nn.Module) -> None:
    layer(case.x()).square().mean().backward()
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.5)
    with case.random(17):
        for p in layer.parameters():
            # Replace the gradient, so that every parameter moves by about half of its size.
            p.grad = torch.randn(p.shape, dtype=p.dtype).to(p.device) * (p.detach().square().mean().sqrt() + 0.1)
    optimiser.step()
    optimiser.zero_grad()  # a remaining gradient would be state, too


def _data(case: Case, layer: nn.Module) -> None:
    for p, q in zip(layer.parameters(), case.moved(case.layer(extra=29), extra=29).parameters(), strict=True):
        p.data = q.data.clone()  # not seen by the version counter


CHANGES: dict[str, Callable[[Case, nn.Module], object]] = {
    "an optimiser step": _optimiser_step,
    "load_state_dict": lambda case, layer: layer.load_state_dict(case.moved(case.layer(extra=19), 19).state_dict()),
    "an in-place edit": lambda case, layer: case.moved(layer, extra=23),
    "an assignment of .data": _data,
}


def never_stale(case: Case) -> dict[str, float]:
    """Law 7: after each change the output is that of a new layer with the same state, in both modes."""
    x, eps = case.x(), case.eps()
    worst = 0.0
    for training in (True, False):
        for what, change in CHANGES.items():
            layer = case.moved(case.layer()).train(training)
            if not any(p.requires_grad for p in layer.parameters()):
                return {"difference": 0.0}
            before = forward(layer, x)
            change(case, layer)
            after = forward(layer, x)
            place = f"output after {what} (training={training})"
            require(distance(before, after) > eps, f"{place}: expected one that follows the change, got the old one")
            fresh = case.layer(extra=7).train(training)
            fresh.load_state_dict(layer.state_dict())
            worst = max(worst, require_same(after, forward(fresh, x), eps, f"{place} against a new layer"))
    return {"difference": worst}
