"""Lipschitz bounds of whole networks with their own forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.analysis.layers import Constants, LayerBound, check_method
from lipkit.analysis.lipschitz_search import Box, lipschitz_lower_bound
from lipkit.errors import CertificateViolation, OptionError
from lipkit.linalg.precision import check_underflow
from lipkit.lowering import export
from lipkit.lowering.copies import constant_copy
from lipkit.lowering.interpreter import Interpreter
from lipkit.lowering.observe import sample, stays_float64
from lipkit.lowering.tracing import Root
from lipkit.modules.registry import Shape, checked_shape
from lipkit.shown import Shown, axes, upper
from lipkit.text import table


@dataclass(frozen=True, repr=False)
class NetworkBound(Shown):
    """Proved bound and searched estimate of a network's Lipschitz constant, layer by layer.

    Attributes:
        upper: proved Lipschitz bound (l2).
        lower: largest difference quotient that the search found; 0 if none was asked for. Never a certificate.
        layers: in the order of the forward pass; the last entry is what sums and concatenations add.
        input_shape: of one sample.
        box: (low, high) of every entry of the inputs that the bounds are for; None for all inputs.
    """

    upper: float
    lower: float
    layers: tuple[LayerBound, ...]
    input_shape: Shape
    box: Box | None = None

    def describe(self, everything: bool = False) -> str:
        """The bounds and a table of the layers, what raises the bound most first.

        Args:
            everything: show layers that contribute nothing, too.
        """
        # Below 1 the logarithm is negative, and so are the fractions of what raises the bound.
        layers = sorted(self.layers, key=lambda layer: layer.fraction if self.upper < 1 else -layer.fraction)
        shown = [layer for layer in layers if everything or abs(layer.fraction) >= 5e-4 or layer.bound == float("inf")]
        rows = [["fraction", "bound", "type", "method", "layer"]]
        rows += [[f"{100 * x.fraction:.1f} %", f"{x.bound:.6g}", x.type, x.method, x.name] for x in shown]
        head = f"L <= {upper(self.upper)} (proved)"
        if self.lower:
            head += f", L >= {self.lower:.6g} (found by search, no certificate)"
        if self.box is not None:
            head += f"  for inputs in [{self.box[0]:g}, {self.box[1]:g}]"
        left = len(layers) - len(shown)
        end = [f"and {left} without influence (--all or describe(everything=True) shows them)"] if left else []
        return "\n".join([head, "", table([], rows), *end])

    def plot(self, ax: Any = None) -> Any:
        """Draw the bounds of the twenty layers that raise the bound most, in the network's order; returns the axes.

        Args:
            ax: axes of matplotlib; None makes new ones.

        Raises:
            OptionError: matplotlib is not installed.
        """
        ax = axes(ax, f"Lipschitz bound of the layer (network: {self.upper:.4g})", "")
        most = sorted(self.layers, key=lambda layer: -abs(layer.fraction))[:20]
        shown = [layer for layer in self.layers if any(layer is one for one in most)]
        ax.barh(range(len(shown)), [layer.bound for layer in shown])
        ax.set_yticks(range(len(shown)), [layer.name or layer.type for layer in shown])
        ax.invert_yaxis()
        return ax


def analyze(
    model: nn.Module,
    input_shape: Shape,
    *,
    method: str = "auto",
    tolerance: float = 0.01,
    restarts: int = 4,
    steps: int = 10,
    seed: int = 0,
    box: Box | None = None,
) -> NetworkBound:
    r"""Lower and upper bound of the Lipschitz constant of any network that torch.fx can trace.

    .. math:: \|f(x) - f(y)\|_2 \le \text{upper}\,\|x - y\|_2 \quad\text{for all } x, y

    The bound of each value in the network is found from those it is computed from: products along chains, sums at
    additions, roots of sums of squares at concatenations (the maximum, where the branches read disjoint pieces made
    by ``chunk`` or ``split``). Batch normalisation is folded into the linear layer beside it where that is smaller.

    Args:
        model: a module in evaluation mode. Modules with a rule (``lipkit.modules.rules()``) count by it, functions and
            tensor methods by those of :func:`lipkit.analysis.function_rules`; other modules are looked into. It is
            left as it is.
        input_shape: shape of one sample, without the batch.
        method: bound of zero-padded 2-D convolutions: ``"auto"`` (the rule of the module), ``"best"``, or the name of
            one in :mod:`lipkit.bounds`.
        tolerance: of ``"auto"``: how far the bounds of those convolutions may lie above their norms, on average over
            all layers, in [1e-4, 1]. Large kernels, whose proofs are dear, get more of it than small ones.
        restarts, steps: of the search for ``lower``; see :func:`lipkit.analysis.lipschitz_lower_bound`. No restarts, no
            search.
        seed: of the search.
        box: (low, high) of every entry of the inputs. Where products of two values have no constant on all of space,
            the bound is that of ``lipkit.export(model, input_shape, box=box)``, which is the same function for inputs
            in the box. The search stays in it.

    Returns:
        :class:`NetworkBound`.

    Guarantee:
        ``upper`` bounds the function that the stored weights define in exact arithmetic, rounding of the computation
        of the bound included, for inputs of this shape and batches of any size. There a cast to a format that holds
        every number of the network's own changes nothing; any other is refused. What the network's format itself
        rounds, or loses beyond its range (65504 in float16), is not in it: :func:`lipkit.certify` bounds that.

    Cost:
        A few forward passes with up to three samples, one bound of each layer, and the search, about
        ``2 restarts x steps + 10 restarts`` passes forward and backward, in float32 where that is the network's format.

    Raises:
        NoRuleError: anything without a rule, by name; values that depend on the input and are no floating-point
            numbers of at least the network's format; control flow on values; a batch that is not kept apart; in-place
            calls whose effect on other values is not clear; hooks; training mode of modules that differ in it.
        ShapeError: the model does not accept ``input_shape``.
        OptionError: a method, tolerance, restarts, steps or box out of range.
        CertificateViolation: the search found a steeper secant than the upper bound allows: a rule is wrong.

    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body = nn.Linear(2, 2)
    ...     def forward(self, x): return x + torch.relu(self.body(x))
    >>> block = Block(); _ = block.body.weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    >>> found = analyze(block, (2,))
    >>> round(found.upper, 9), 3.99 < found.lower <= found.upper
    (4.0, True)
    >>> [(layer.name, layer.type, round(layer.bound, 9)) for layer in found.layers][:1]
    [('body', 'Linear', 3.0)]

    References:
        Szegedy et al., ICLR 2014, section 4.3 (products of layer norms); [LipBound] section 6 (whole networks).
    """
    check_method(method)
    if not 1e-4 <= tolerance <= 1:
        raise OptionError(f"tolerance: expected a number in [1e-4, 1], got {tolerance}")
    check_underflow()
    if box is not None:
        exported = export(model, input_shape, box=box)
        model, box = exported, exported.input_range
    if restarts < 0 or steps < 1:
        raise OptionError(f"expected restarts >= 0 and steps >= 1, got restarts={restarts}, steps={steps}")
    # Versions of tensors and derivatives are needed, and the formats that the network itself says; random numbers that
    # it draws (and is refused for) are not the caller's.
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        root = Root(constant_copy(model))
        input_shape = checked_shape(input_shape)
        lowering = Interpreter(root, input_shape, root, bounding=True)
        output = lowering.output()
        upper, layers = 0.0, tuple[LayerBound, ...]()
        if output is not None:
            upper, layers = Constants(lowering, output.number, method, tolerance).result()
        lowering.check(model)
        lower = 0.0
        if restarts and stays_float64(root, lowering.graph, input_shape):
            lower = _search(_Copied(root), input_shape, box, restarts, steps, seed)
        elif restarts:
            lower = _random_secants(_Copied(root), input_shape, box, restarts * steps)
    if lower > upper * (1 + 1e-6):
        raise CertificateViolation(
            f"analyze: expected no secant steeper than the upper bound {upper:.9g}, got one of slope {lower:.9g}: a "
            "rule is wrong"
        )
    # Where both meet, the secant is beyond by its rounding.
    return NetworkBound(upper, min(lower, upper), layers, input_shape, box)


def _search(model: nn.Module, input_shape: Shape, box: Box | None, restarts: int, steps: int, seed: int) -> float:
    try:
        return lipschitz_lower_bound(
            model, box, input_shape=input_shape, restarts=restarts, steps=steps, seed=seed, dtype=_search_dtype(model)
        ).lower
    except RuntimeError:
        # Some in-place calls cannot be differentiated. Secants between random points need no derivatives.
        return _random_secants(model.double(), input_shape, box, restarts * steps)


def _search_dtype(model: nn.Module) -> torch.dtype:
    """float32, which is several times as fast, where it is the network's own format."""
    own = {value.dtype for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()}
    return torch.float32 if own <= {torch.float32} else torch.float64


def _random_secants(model: nn.Module, input_shape: Shape, box: Box | None, count: int) -> float:
    """Largest slope of secants between random points in the network's own format, less what its rounding may add."""
    ends = 3 * sample(model, input_shape, 2 * count)
    if box is not None:
        # The normal distribution's own function takes its numbers to uniform ones.
        ends = box[0] + (box[1] - box[0]) * torch.special.ndtr(ends / 3)
    best = 0.0
    for pair in ends.split(2):
        with torch.no_grad():
            y = model(pair).reshape(2, -1).double()
        x = pair.flatten(1).double()
        lost = 64 * torch.finfo(pair.dtype).eps * y.norm()
        best = max(best, float((y[0] - y[1]).norm() - lost) / float((x[0] - x[1]).norm()))
    return best


class _Copied(nn.Module):
    """The network on a copy of its input, which in-place calls would overwrite."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x.clone())
