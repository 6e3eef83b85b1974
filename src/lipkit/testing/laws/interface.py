"""Laws of a layer's interface: export (3), options act (8), refusals (13)."""

import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipkit.errors import LipkitError, OptionError, ShapeError
from lipkit.lowering import export, lipschitz
from lipkit.modules import load, save
from lipkit.modules.storage import describe
from lipkit.testing.case import Case, Refusal, forward, require, require_same


def exported(case: Case) -> dict[str, float]:
    """Law 3, at every input shape: the export is equal to the layer, also to a freshly loaded one that never ran."""
    worst = 0.0
    for shape in case.input_shapes:
        x, eps = case.x(shape), case.eps(shape)
        layer = case.moved(case.layer()).eval()
        y = forward(layer, x)
        before = torch.get_rng_state()  # a search for norms in an export must not draw random numbers
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
        fresh = case.layer(extra=7)  # other weights
        fresh.load_state_dict(layer.state_dict())
        again = forward(export(fresh, shape), x)
        require_same(again, y, eps, f"input {shape}: export of a freshly loaded layer before any forward pass")
        if shape == case.shape:
            with tempfile.TemporaryDirectory() as folder:
                loaded = load(save(network, Path(folder)))
            require_same(forward(loaded, x), y, eps, f"input {shape}: export after save and load")
    return {"difference": worst}


def _observe(case: Case, option: str, value: Any) -> list[Tensor] | None:
    """Outputs and claims in both modes at one seed, or None if the value is refused."""
    try:
        # Moved, because options may agree at special initial weights, such as orthogonal ones.
        layer = case.moved(case.layer(**{option: value}))
        x = case.x(dtype=value if isinstance(value, torch.dtype) else None)
        seen = []
        for training in (True, False):
            layer.train(training)
            seen += [forward(layer, x), lipschitz(layer, case.shape).detach()]
    except LipkitError:
        return None
    return seen


def options_act(case: Case) -> dict[str, float]:
    """Law 8: two values of an option give different outputs or claims (in at least one bit), or one is refused."""
    refused = 0
    for option, values in case.options.items():
        require(len(values) > 1, f"option {option}: expected at least two values to compare, got {values}")
        seen = [(value, _observe(case, option, value)) for value in values]
        accepted = [(value, found) for value, found in seen if found is not None]
        refused += len(seen) - len(accepted)
        require(bool(accepted), f"option {option}: expected at least one value that is accepted, got none of {values}")
        for (v, a), (w, b) in combinations(accepted, 2):
            same = all(s.dtype == t.dtype and torch.equal(s, t) for s, t in zip(a, b, strict=True))
            what = f"option {option}: expected {v!r} and {w!r} to act differently (or to be refused)"
            require(not same, f"{what}, got the same outputs and claims")
    return {"options": float(len(case.options)), "refused": float(refused)}


def refusals(case: Case) -> dict[str, float]:
    """Law 13: each bad argument raises its error, whose message has "expected ..., got ..." and both values."""
    shape, other = case.shape, (*case.shape[:-1], case.shape[-1] + 1)  # an export accepts one shape only
    what, words = f"the layer exported for {shape} called on {other}", (str(shape[-1]), str(other[-1]))
    other_size = Refusal(what, lambda make: export(make(), shape)(case.x(other)), ShapeError, words)
    table = (other_size, *case.refusals)
    for refusal in table:
        error: Exception | None = None
        try:
            refusal.call(case.layer)
        except Exception as raised:
            error = raised
        got = "no error" if error is None else f"{type(error).__name__}: {error}"
        fits = isinstance(error, refusal.error)
        require(fits, f"{refusal.what}: expected {refusal.error.__name__}, got {got}")
        missing = [word for word in ("expected", "got", *refusal.words) if word not in str(error)]
        require(not missing, f"{refusal.what}: expected a message that holds {missing}, got {str(error)!r}")
    return {"refusals": float(len(table))}
