"""Law 3: the export is the same function, made of plain constant modules, independent of the layer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from lipkit.errors import OptionError
from lipkit.modules import export, load, save
from lipkit.modules.configuration import describe
from lipkit.testing.case import Case, forward, require, require_same


def exported(case: Case) -> dict[str, float]:
    """Law 3, at every input shape, from a layer with a bias and from a freshly loaded one that never ran."""
    worst = 0.0
    for shape in case.input_shapes:
        x, eps = case.x(shape), case.eps(shape)
        layer = case.moved(case.layer()).eval()
        y = forward(layer, x)
        before = torch.get_rng_state()
        network = export(layer, shape)
        drawn = not torch.equal(before, torch.get_rng_state())
        require(not drawn, "expected an export that leaves the random state as it is, got one that draws from it")
        worst = max(worst, require_same(forward(network, x), y, eps, f"input {shape}: output of the export"))
        try:
            describe(network)
        except OptionError as error:
            require(False, f"expected an export of plain modules, got another one: {error}")
        asking = [name for name, p in network.named_parameters() if p.requires_grad]
        require(not asking, f"expected an export without trainable parameters, got {asking}")
        require(not any(m.training for m in network.modules()), "expected an export in evaluation mode, got training")
        fresh = case.layer(extra=7)
        fresh.load_state_dict(layer.state_dict())
        again = forward(export(fresh, shape), x)
        require_same(again, y, eps, f"input {shape}: export of a freshly loaded layer before any forward pass")
        if shape == case.shape:
            with tempfile.TemporaryDirectory() as folder:
                loaded = load(save(network, Path(folder)))
            require_same(forward(loaded, x), y, eps, f"input {shape}: export after save and load")
        before = forward(network, x)
        case.moved(layer, extra=3)
        require(
            torch.equal(forward(network, x), before),
            "expected an export that is independent of the layer, got one that changed with its parameters",
        )
    return {"difference": worst}
