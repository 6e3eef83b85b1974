"""Law 5: a forward pass is a function of parameters and input, and leaves no trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lipkit.testing.case import Case, forward, require, require_same

_OWN = ("_parameters", "_buffers", "_modules", "training")


def _attributes(layer: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value for name, m in layer.named_modules() for key, value in vars(m).items() if key not in _OWN
    }


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
