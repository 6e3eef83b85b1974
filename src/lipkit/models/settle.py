"""Turns layers of other libraries, and parametrised ones, into plain layers with fixed weights."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipkit.errors import LipkitError, NoRuleError, OptionError, ShapeError
from lipkit.layers.export import torch_layer
from lipkit.layers.projections import watched
from lipkit.layers.structure import Scale
from lipkit.lowering.copies import computed_tensors
from lipkit.models.constrained import Converted
from lipkit.modules import Affine, GroupSort, Householder, L2NormPool2d, LayerCenter, LPReLU, MaxMin, Shape
from lipkit.modules.network import first_floating
from lipkit.modules.parametrised import settled as settled_module
from lipkit.modules.plain import bounded

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)


def _folded(module: Any, gain: float) -> nn.Module:
    """A `Householder` equal to torchlip's, which keeps the other side of the line: its angles are theta plus 2 pi."""
    angles = module.theta.detach().reshape(1, -1) + 2 * math.pi
    fold = Householder(2 * angles.shape[1]).to(angles)  # one angle for each pair of channels
    fold.angles.data.copy_(angles)
    return fold if gain == 1 else nn.Sequential(fold, Scale(gain))


def _ascending(group_size: int | None) -> nn.Module:
    """A `GroupSort` in ascending order, as torchlip sorts; lipkit sorts downwards."""
    before, behind = (Affine(torch.tensor([-1.0]), torch.tensor([0.0])) for _ in range(2))  # -sort(-x)
    return nn.Sequential(before, GroupSort(group_size), behind)


def _centred(module: Any) -> nn.Module:
    """A `LayerCenter`, with negative dimensions counted as for images (four axes): `_compare` refuses other inputs."""
    dims = [d % 4 for d in getattr(module, "dim", (-2, -1))]  # images have four axes
    if module.bias is None:
        return LayerCenter(*dims)
    bias = module.bias.detach().flatten()
    return nn.Sequential(LayerCenter(*dims), Affine(torch.ones_like(bias), bias))


def _clipped(module: Any) -> nn.Module:
    ours = LPReLU(module.num_parameters).to(module.weight)
    ours.slopes.data.copy_(module.weight)
    return ours


# Layers of other libraries, by package and class. `_compare` refuses one with a constant other than 1.
OURS: dict[tuple[str, str], Callable[[Any], nn.Module]] = {
    ("deel", "GroupSort"): lambda m: _ascending(m.group_size),
    ("deel", "GroupSort2"): lambda m: _ascending(2),
    ("deel", "FullSort"): lambda m: _ascending(None),
    ("deel", "HouseHolder"): lambda m: _folded(m, 1.0),
    ("deel", "LPReLU"): _clipped,
    ("deel", "LayerCentering"): _centred,
    ("orthogonium", "LayerCentering2D"): _centred,
    ("deel", "ScaledL2NormPool2d"): lambda m: L2NormPool2d(m.kernel_size),
    ("orthogonium", "MaxMin"): lambda m: MaxMin(),
    ("orthogonium", "HouseHolder"): lambda m: _folded(m, math.sqrt(0.5)),
}


def plain_form(module: nn.Module) -> nn.Module | None:
    """The plain layer that ``module`` claims to compute now; None if it is plain already, or nothing is known of it.

    A subclass of a linear layer or convolution of torch, or one with parametrisations or hooks, becomes that layer with
    the present value of the attribute ``weight``. Layers named in `OURS` become their counterparts, other ones of
    deel-torchlip the result of their ``vanilla_export``.

    >>> layer = nn.utils.parametrizations.orthogonal(nn.Linear(3, 2))
    >>> type(plain_form(layer)), plain_form(nn.Linear(3, 2))
    (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    kind = type(module)
    original = kind.__mro__[1] if parametrize.is_parametrized(module) else kind  # torch makes a subclass
    known = OURS.get((original.__module__.split(".")[0], original.__name__))
    if known is not None:
        return known(module)
    base = next((k for k in PLAIN if isinstance(module, k)), None)
    dressed = kind is not base or bool(module._forward_pre_hooks)  # older spectral_norm is a hook
    if (not dressed and base is not None) or (kind not in PLAIN and bounded(kind)):
        return None
    exported = getattr(module, "vanilla_export", None)
    leaf = all(name == "parametrizations" for name, _ in module.named_children())  # a layer, not a whole network
    if callable(exported) and leaf:
        result = exported()
        return result if isinstance(result, nn.Module) and result is not module else None
    if base is not None:
        # An older hook sets the attribute `weight` in a forward pass only, so it may be outdated.
        now: Any = settled_module(module) if module._forward_pre_hooks else module
        return torch_layer(base, now, now.weight, now.bias)
    if parametrize.is_parametrized(module):
        return copy.deepcopy(settled_module(module))
    return None


def settled(
    model: nn.Module, input_shape: Shape, skip: Callable[[str], bool]
) -> tuple[nn.Module, list[Converted], list[LipkitError]]:
    """Replace parametrised and foreign layers by plain ones, in a copy; returns it, rows of the report, and errors.

    The errors are those of layers that could not be replaced. Each replaced layer, and the whole network, is compared
    with the original on one random input, which finds a layer whose forward pass differs from that of its base class.
    Certificates do not depend on this comparison: they are proved from the result.
    """
    twin = copy.deepcopy(model, computed_tensors(model))
    modes = {module: module.training for module in twin.modules()}
    forms: dict[str, tuple[nn.Module, nn.Module]] = {}
    new: dict[nn.Module, nn.Module] = {}
    rows: list[Converted] = []
    errors: list[LipkitError] = []
    with torch.no_grad():
        for name, module in twin.eval().named_modules():
            # Skip modules inside a replaced layer, such as its parametrisations.
            if not skip(name) and not any(name.startswith(f"{outer}." if outer else "") for outer in forms):
                try:
                    form = plain_form(module)
                except LipkitError as error:
                    errors.append(error)
                else:
                    forms |= {} if form is None else {name: (module, form.eval())}
        expected, calls = tried(twin, input_shape, [m for m, _ in forms.values()]) if forms else (None, {})
        for name, (module, form) in forms.items():
            try:
                if module not in calls:
                    raise ShapeError(f"convert: expected an input that reaches every layer, got none at {name!r}")
                x, y = calls[module][-1]  # one call is enough: weights are the same in all
                _compare(form(x), y, f"{name!r}, {type(module).__name__} as {form}")
            except LipkitError as error:
                errors.append(error)
            else:
                new[module] = form.train(modes[module])  # the mode that it had before eval()
                rows.append(Converted(name, type(module).__name__, type(form).__name__, "the same function"))
    for module, mode in modes.items():
        module.training = mode
    result = replaced(twin, new)
    try:
        if rows:
            _compare(tried(result, input_shape)[0], expected, "the network")
    except NoRuleError as error:
        return copy.deepcopy(model, computed_tensors(model)), [], [error]  # replace all or none
    return result, rows, errors


def replaced(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """The model with ``new[module]`` in place of each module; ``new[model]`` if the model itself is among them."""
    if model in new:
        return new[model]
    for parent in list(model.modules()):
        # named_children lists a child that is registered twice only once.
        for name, child in list(parent._modules.items()):
            if child is not None and child in new:
                setattr(parent, name, new[child])
    return model


def tried(
    model: nn.Module, input_shape: Shape, modules: Iterable[nn.Module] = ()
) -> tuple[Tensor, dict[nn.Module, list[tuple[Tensor, Tensor]]]]:
    """The output for one random input in evaluation mode, and (input, output) of each call of ``modules``."""
    x = torch.rand(1, *input_shape, generator=torch.Generator().manual_seed(0)).to(first_floating(model))
    out, found = watched(model, x, modules)
    if not isinstance(out, Tensor):
        raise OptionError(f"expected a model that returns a tensor, got {type(out).__name__}")
    calls: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
    for module, given, made in found:
        calls.setdefault(module, []).append((given, made))
    return out, calls


def _compare(found: Any, expected: Any, what: str) -> None:
    if isinstance(found, Tensor) and isinstance(expected, Tensor) and found.shape == expected.shape:
        # Both have the same weights, but may sum in another order.
        size = 1e3 * torch.finfo(expected.dtype).eps * float(expected.abs().max().clamp_min(1e-30))
        if bool((found - expected).abs().max() <= size):  # False with NaN
            return
    raise NoRuleError(
        f"convert: expected a plain layer that computes the same, got other outputs at {what}: write the layer as "
        "modules of torch or lipkit"
    )
