"""``settle``: networks of other libraries' layers, or of parametrised ones, as plain layers with fixed numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipkit.errors import NoRuleError, ShapeError
from lipkit.layers.export import filled
from lipkit.layers.structure import Scale
from lipkit.modules import Affine, GroupSort, Householder, L2NormPool2d, LayerCenter, LPReLU, MaxMin
from lipkit.modules.running import carry_out, computed_tensors

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)


def _folded(module: Any, gain: float) -> nn.Module:
    """torchlip's fold keeps the opposite side of the line, which is our angle plus 2 pi."""
    angles = module.theta.detach().reshape(1, -1) + 2 * math.pi
    fold = Householder(2 * angles.shape[1]).to(angles)
    fold.angles.data.copy_(angles)
    return fold if gain == 1 else nn.Sequential(fold, Scale(gain))


def _ascending(group_size: int | None) -> nn.Module:
    """torchlip sorts upwards, lipkit downwards."""

    def turn() -> nn.Module:
        return Affine(torch.tensor([-1.0]), torch.tensor([0.0]))

    return nn.Sequential(turn(), GroupSort(group_size), turn())


def _centred(module: Any) -> nn.Module:
    """Dimensions counted from the end are those of images; other samples show in the comparison of outputs."""
    dims = [d % 4 for d in getattr(module, "dim", (-2, -1))]
    if module.bias is None:
        return LayerCenter(*dims)
    bias = module.bias.detach().flatten()
    return nn.Sequential(LayerCenter(*dims), Affine(torch.ones_like(bias), bias))


def _clipped(module: Any) -> nn.Module:
    ours = LPReLU(module.num_parameters).to(module.weight)
    ours.slopes.data.copy_(module.weight)
    return ours


# Layers of other libraries, by package and class; a constant other than 1 shows in the comparison of outputs.
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
    """The plain layer that computes what ``module`` computes now, by what it says of itself; None if it is plain.

    A subclass of a linear layer or a convolution of torch, or one with parametrisations or hooks, becomes that layer
    with the weight that the attribute ``weight`` has now; a layer of deel-torchlip what its ``vanilla_export`` returns.

    >>> layer = nn.utils.parametrizations.orthogonal(nn.Linear(3, 2))
    >>> type(plain_form(layer)), plain_form(nn.Linear(3, 2))
    (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    kind = type(module)
    original = kind.__mro__[1] if parametrize.is_parametrized(module) else kind
    known = OURS.get((original.__module__.split(".")[0], original.__name__))
    if known is not None:
        return known(module)
    base = next((k for k in PLAIN if isinstance(module, k)), None)
    dressed = kind is not base or bool(module._forward_pre_hooks)
    if not dressed and base is not None:
        return None
    exported = getattr(module, "vanilla_export", None)
    if callable(exported) and not _holds_layers(module):
        result = exported()
        return result if isinstance(result, nn.Module) and result is not module else None
    if base is not None:
        return _rebuilt(base, module)
    if parametrize.is_parametrized(module):
        fixed = copy.deepcopy(module)
        carry_out(fixed)
        return fixed
    return None


def _holds_layers(module: nn.Module) -> bool:
    return any(name != "parametrizations" for name, _ in module.named_children())


def _rebuilt(base: type[Any], module: Any) -> nn.Module:
    weight, bias = module.weight.detach(), module.bias
    sizes: tuple[Any, ...] = (module.in_features, module.out_features) if base is nn.Linear else ()
    options: dict[str, Any] = {}
    if not sizes:
        sizes = (module.in_channels, module.out_channels, module.kernel_size)
        names = ["stride", "padding", "dilation", "groups", "padding_mode"]
        if base in (nn.ConvTranspose1d, nn.ConvTranspose2d):
            names.append("output_padding")
        options = {name: getattr(module, name) for name in names}
    plain = base(*sizes, bias=bias is not None, device=weight.device, dtype=weight.dtype, **options)
    if plain.weight.shape != weight.shape:
        raise NoRuleError(
            f"{type(module).__name__}: expected a weight of shape {tuple(plain.weight.shape)}, as of "
            f"nn.{base.__name__}, got {tuple(weight.shape)}"
        )
    return filled(plain, weight, bias)


def settle(model: nn.Module, sample: Tensor) -> nn.Module:
    """A copy of ``model`` in evaluation mode whose parametrised and foreign layers are plain ones with fixed numbers.

    The way in for networks built with ``torch.nn.utils.parametrizations`` (or parametrisations of one's own),
    the older ``torch.nn.utils.spectral_norm``, deel-torchlip or orthogonium: the result can be bounded, exported and
    certified. Each layer that was replaced, and the whole, is compared with the original on ``sample``. That finds a
    layer whose forward pass is not that of its base class; certificates need no trust in it, since they are
    made from the numbers of the result.

    Args:
        model: left as it is.
        sample: a batch of inputs that reaches every layer.

    Raises:
        NoRuleError: a layer whose plain form computes something else; it names the layer.
        ShapeError: ``sample`` does not reach a layer that has to be replaced.

    >>> import lipkit
    >>> net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), nn.ReLU())
    >>> settled = settle(net, torch.ones(1, 4))
    >>> settled[0], bool(lipkit.lipschitz(settled) > 0.5)
    (Linear(in_features=4, out_features=3, bias=True), True)
    """
    twin = copy.deepcopy(model, computed_tensors(model)).eval()
    forms: dict[str, nn.Module] = {}
    with torch.no_grad():
        for name, module in twin.named_modules(remove_duplicate=False):
            # What is inside of a replaced layer (its parametrisations, for instance) goes with it.
            if not any(name.startswith(f"{outer}." if outer else "") for outer in forms):
                form = plain_form(module)
                if form is not None:
                    forms[name] = form.eval()
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        handles = [
            twin.get_submodule(name).register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0], y)}))
            for name in forms
        ]
        expected = twin(sample)
        for handle in handles:
            handle.remove()
        for name, form in forms.items():
            if name not in seen:
                raise ShapeError(f"settle: expected a sample that reaches every layer, got none at {name!r}")
            x, y = seen[name]
            _compare(form(x), y, f"{name!r}, {type(twin.get_submodule(name)).__name__} as {form}")
            parent, _, own = name.rpartition(".")
            if name:
                setattr(twin.get_submodule(parent), own, form)
        settled = forms.get("", twin)
        _compare(settled(sample), expected, "the network")
    return settled


def _compare(found: Any, expected: Any, what: str) -> None:
    same = isinstance(found, Tensor) and isinstance(expected, Tensor) and found.shape == expected.shape
    if same:
        # Sums in another order; a weight is the same number in both.
        size = 1e3 * torch.finfo(expected.dtype).eps * float(expected.abs().max().clamp_min(1e-30))
        same = bool((found - expected).abs().max() <= size)
    if not same:
        raise NoRuleError(
            f"settle: expected a plain layer that computes the same, got other outputs at {what}: write the layer as "
            "modules of torch or lipkit"
        )
