"""Law 6: copies are equal, and independent of each other."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lipkit.testing.case import Case, distance, forward, require, require_same


def _saved(layer: nn.Module) -> dict[str, torch.Tensor]:
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def _independent(case: Case, copied: nn.Module, original: nn.Module, what: str) -> None:
    x, eps = case.x(), case.eps()
    y = forward(original, x)
    case.moved(copied, extra=11)
    if any(True for _ in copied.parameters()):
        require_same(forward(original, x), y, eps, f"the original after a change of its {what}")
        require(
            distance(forward(copied, x), y) > eps, f"expected a changed {what} to give another output, got the same"
        )


def round_trips(case: Case) -> dict[str, float]:
    """Law 6: load before any forward pass, deepcopy and pickle before and after one, and an EMA copy."""
    x, eps = case.x(), case.eps()
    layer = case.moved(case.layer())
    unused = copy.deepcopy(layer)
    y = layer(x).detach()  # with a graph, as in training: a weight kept from it could not be copied
    worst = require_same(forward(unused, x), y, eps, "deepcopy made before a forward pass")
    fresh = case.layer(extra=7)
    fresh.load_state_dict(_saved(layer))
    worst = max(worst, require_same(forward(fresh, x), y, eps, "fresh layer with the saved state_dict"))
    loaded = pickle.loads(pickle.dumps(layer))  # the bytes made here, in this process
    for copied, what in ((copy.deepcopy(layer), "deepcopy"), (loaded, "pickled copy")):
        worst = max(worst, require_same(forward(copied, x), y, eps, what))
        _independent(case, copied, layer, what)
    if any(True for _ in layer.parameters()):
        _ema(case, layer)
    return {"difference": worst}


def _ema(case: Case, layer: nn.Module) -> None:
    x, eps = case.x(), case.eps()
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(layer)
    y = forward(layer, x)
    first = {name: t.detach().clone() for name, t in layer.state_dict().items()}
    case.moved(layer, extra=13)
    require_same(forward(average.module, x), y, eps, "EMA copy after a change of the layer")
    average.update_parameters(layer)
    reference = case.layer(extra=7)
    trained = {name for name, _ in layer.named_parameters()}
    mean = {name: (first[name] + t) / 2 if name in trained else t for name, t in layer.state_dict().items()}
    reference.load_state_dict(mean)
    require_same(
        forward(average.module, x), forward(reference, x), eps, "EMA copy against a layer of averaged parameters"
    )
