"""Lipschitz bounds of whole networks with their own forward pass."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.analysis.layers import Constants, LayerBound
from lipkit.analysis.lipschitz_search import lipschitz_lower_bound
from lipkit.bounds import METHODS
from lipkit.certificates import gains
from lipkit.errors import CertificateViolation, NoRuleError, OptionError, ShapeError, check_choice, interval
from lipkit.linalg.matrices import check_integer
from lipkit.linalg.precision import check_underflow, without_autocast
from lipkit.lowering import export, lipschitz
from lipkit.lowering.copies import constant_copy
from lipkit.lowering.observe import Operand, stays_float64
from lipkit.lowering.structure import Interpreter
from lipkit.lowering.tracing import Root, sample
from lipkit.modules.network import checked_shape
from lipkit.modules.registry import Shape
from lipkit.shown import Shown, axes, upper
from lipkit.shown import lower as rounded_down
from lipkit.text import table

Hull = tuple[float, float] | None
# A bound above this many times the slope that a search found leaves little for certificates.
_USEFUL = 4.0
_BAR = 12


@dataclass(frozen=True, repr=False)
class NetworkBound(Shown):
    """Proved bounds and a searched estimate of a network's Lipschitz constant, layer by layer.

    Attributes:
        upper: proved Lipschitz bound (l2), the smaller of `product` and `tight`.
        lower: largest difference quotient that the search found; 0 if none was asked for. Never a certificate.
        product: the proved bound from the constants of the `layers`, which are in the order of the forward pass.
        tight: the proved bound by LipSDP, or by slopes in the box if there is one; None if it was not tried.
        how: what made `tight`, or why it was not tried.
        box: (low, high) of the inputs that the bounds are for, numbers or tensors; None for all inputs.
    """

    upper: float
    lower: float
    product: float
    tight: float | None
    how: str
    layers: tuple[LayerBound, ...]
    input_shape: Shape
    box: gains.Box | None = None

    @property
    def verdict(self) -> tuple[str, str]:
        """How useful the bound is, and what to try next, in words."""
        local = (
            "lipkit certify MODEL DATA --method local; lipkit.convert makes a network with a small constant to train"
        )
        if not self.upper < math.inf:
            return "no bound: a layer has none, or a number in it is not finite", local
        if self.lower and self.upper <= _USEFUL * self.lower:
            close = f"at most {self.upper / self.lower:.2g} times what a search found"
            return f"useful for certificates: {close}", "lipkit certify MODEL DATA"
        if "--tight" in self.how:
            local = "lipkit bound MODEL --tight, or lipkit certify MODEL DATA --method local"
        if not self.lower:
            return "proved; how close it is, a search from below says (restarts)", local
        far = f"{self.upper / self.lower:.2g} times what a search found"
        return f"true, but too large: {far}; try local, convert, fine-tune", local

    def describe(self, everything: bool = False) -> str:
        """The bounds, and the factor of each layer, the largest first; ``everything`` shows factors of 1, too."""
        layers = sorted(self.layers, key=lambda layer: -layer.factor)
        shown = [x for x in layers if everything or abs(x.factor - 1) >= 5e-4]
        most = max((abs(math.log(x.factor)) for x in shown if 0 < x.factor < math.inf), default=0.0)
        rows = [["factor", "", "bound", "type", "method", "layer"]]
        for x in shown:
            factor = f"x {x.factor:.3g}" if x.factor >= 1 or not x.factor else f"/ {1 / x.factor:.3g}"
            size = abs(math.log(x.factor)) / most if most and 0 < x.factor < math.inf else 1.0  # bars are logarithmic
            bar = ("#" if x.factor >= 1 else "-") * max(1, round(_BAR * size))
            rows.append([factor, bar.ljust(_BAR), upper(x.bound, 6), x.type, x.method, x.name])
        head = f"L <= {upper(self.upper)} (proved)"
        if self.lower:
            head += f", L >= {rounded_down(self.lower, 6)} (found by search, no certificate)"
        if self.box is not None:
            low, high = self.box
            head += "  for inputs in " + ("a box" if isinstance(low, Tensor) else f"[{low:g}, {high:g}]")
        tight = f"tight {self.how}" if self.tight is None else f"tight {upper(self.tight)} ({self.how})"
        figures = [f"product of the layers {upper(self.product)}", *([tight] if self.how else [])]
        if self.lower:
            figures.append(f"found {rounded_down(self.lower, 6)}")
        left = len(layers) - len(shown)
        omitted = [f"and {left} without influence (--all or describe(everything=True) shows them)"] if left else []
        lines = ["", table([], rows), *omitted, ""] if layers else []
        words, following = self.verdict
        return "\n".join([head, " | ".join(figures), *lines, words, f"next: {following}"])

    def to_json(self) -> str:
        """Every figure as JSON; null where a number is not finite."""
        words, following = self.verdict
        text = json.dumps(asdict(self) | {"verdict": words, "next": following}, default=Tensor.tolist)
        return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2)  # inf and NaN are no JSON

    def plot(self, ax: Any = None) -> Any:
        """Draw the twenty layers that raise the bound most into axes of matplotlib (None: new ones); return them."""
        ax = axes(ax, f"Lipschitz bound of the layer (network: {self.upper:.4g})", "")
        most = sorted(self.layers, key=lambda layer: -max(layer.factor, 1 / (layer.factor or 1)))[:20]
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
    box: gains.Box | None = None,
    tight: bool | None = False,
) -> NetworkBound:
    r"""Lower and upper bound of the Lipschitz constant of any network that torch.fx can trace.

    .. math:: \|f(x) - f(y)\|_2 \le \text{upper}\,\|x - y\|_2 \quad\text{for all } x, y

    The bound of each value in the network is found from those it is computed from: products along chains, sums at
    additions, roots of sums of squares at concatenations (the maximum, where the branches read disjoint pieces made
    by ``chunk`` or ``split``). Batch normalisation is folded into the linear layer beside it where that is smaller.

    Args:
        model: a module in evaluation mode; it is not changed. Modules without a rule (``lipkit.modules.rules()``) are
            traced down to modules and functions (:func:`lipkit.analysis.function_rules`) that have one.
        input_shape: shape of one sample, without the batch.
        method: bound of zero-padded 2-D convolutions: ``"auto"`` (the rule of the module), ``"best"``, or the name of
            one in :mod:`lipkit.bounds`.
        tolerance: of ``"auto"``: how far the bounds of those convolutions may lie above their norms, on average over
            all layers, in [1e-4, 1]. Large kernels, whose proofs cost most, get more of it.
        restarts, steps, seed: of the search for ``lower`` (`lipkit.analysis.lipschitz_lower_bound`); 0 restarts: none.
        box: (low, high) of the inputs, as for `lipkit.certificates.local_gain`; the search stays inside. Slopes of
            activations in the box may lower the bound, and a product of two values has a constant only in a box.
        tight: bound runs of dense layers by LipSDP, too (`lipkit.certificates.tight`); None does so for at most 600
            hidden units.

    Guarantee:
        ``upper`` bounds the function that the stored weights define in exact arithmetic, rounding of the computation
        of the bound included, for inputs of this shape and batches of any size. A cast to a format that holds every
        number of the network's own counts as the identity; any other is refused. Rounding and overflow in the network's
        own format are not covered: :func:`lipkit.certify` bounds them.

    Cost:
        A few forward passes, one bound of each layer, and ``restarts (2 steps + 10)`` passes back for the search.

    Raises:
        NoRuleError: anything without a rule, by name; values that depend on the input and are not floating-point
            numbers of at least the network's format; control flow on values; samples of a batch that mix; in-place
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
    check_choice("method", method, ("auto", "best", *METHODS))
    if not 1e-4 <= tolerance <= 1:
        raise OptionError(f"tolerance: expected a number in [1e-4, 1], got {tolerance}")
    check_integer("restarts", restarts, 0)
    check_integer("steps", steps, 1)
    check_underflow()
    input_shape = checked_shape(input_shape)
    ends = None if box is None else gains.box_ends(box, input_shape)
    hull = None if ends is None else interval("box", (float(ends[0].min()), float(ends[1].max())))
    # Tracing needs version counters, derivatives and the network's own formats; a network that draws random numbers,
    # for which it is refused, must leave the caller's stream as it is.
    with torch.inference_mode(False), without_autocast(), torch.random.fork_rng(devices=[]):
        root, lowering, output = _lowered(model, input_shape, hull)
        product, layers = 0.0, tuple[LayerBound, ...]()
        if output is not None:
            product, layers = Constants(lowering, output.number, method, tolerance, hull).result()
        lowering.check(model)
        tight_bound, how = _tight(model, input_shape, ends, hull, tight)
        bound, lower = min(product, product if tight_bound is None else tight_bound), 0.0
        if restarts and stays_float64(root, input_shape, lowering.observed.outputs[0]):
            lower = _search(_Copied(root), input_shape, ends, restarts, steps, seed)
        elif restarts:
            lower = _random_secants(_Copied(root), input_shape, ends, restarts * steps)
    if lower > bound * (1 + 1e-6):  # the search measures in floating point
        raise CertificateViolation(
            f"analyze: expected no secant steeper than the upper bound {bound:.9g}, got one of slope {lower:.9g}: a "
            "rule is wrong"
        )
    lower = min(lower, bound)  # where both meet, rounding may put the secant above the bound
    same = ends is None or all(bool((end == end.flatten()[0]).all()) for end in ends)  # in every entry: two numbers
    return NetworkBound(bound, lower, product, tight_bound, how, layers, input_shape, hull if same else ends)


def _lowered(model: nn.Module, input_shape: Shape, hull: Hull) -> tuple[Root, Interpreter, Operand | None]:
    """A copy of the network, the interpreter that traced its calls to modules, and the network's output.

    Calls are traced as for `lipschitz`. If one has no Lipschitz constant, such as a product, and a box is given, they
    are traced as for `export`, whose products can get limits from the box.
    """

    def lowered(bounding: bool) -> tuple[Root, Interpreter, Operand | None]:
        root = Root(constant_copy(model))
        lowering = Interpreter(root, input_shape, root, exact=True, bounding=bounding)
        return root, lowering, lowering.output()

    try:
        return lowered(True)
    except NoRuleError:
        if hull is None:
            raise
    return lowered(False)


def _tight(
    model: nn.Module, input_shape: Shape, ends: tuple[Tensor, Tensor] | None, hull: Hull, tight: bool | None
) -> tuple[float | None, str]:
    """The bound by LipSDP, or by slopes in a box, and the method's name; or None and the reason if there is neither."""
    if ends is None and tight is False:
        return None, ""
    try:
        plain = export(constant_copy(model).double(), input_shape, box=hull)  # narrower: folded numbers are rounded
    except (NoRuleError, OptionError, ShapeError):
        return None, "not tried: the network has no plain form in float64"
    units = gains.hidden_units(plain) if tight is not False else 0
    many = tight is None and units > gains.UNITS
    if units and not many:
        plain = gains.tight(plain, units=gains.UNITS if tight is None else 2048)
    if ends is not None:
        return gains.local_gain(plain, ends), "slopes in the box"
    if many:
        return None, f"not tried: {units} hidden units, more than {gains.UNITS} (--tight, tight=True)"
    return (float(lipschitz(plain)), "LipSDP") if units else (None, "not tried: no run of dense layers")


def _search(model: nn.Module, input_shape: Shape, box: gains.Box | None, restarts: int, steps: int, seed: int) -> float:
    own = {value.dtype for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()}
    dtype = torch.float32 if own <= {torch.float32} else torch.float64  # float32 is several times as fast
    try:
        return lipschitz_lower_bound(
            model, box, input_shape=input_shape, restarts=restarts, steps=steps, seed=seed, dtype=dtype
        ).lower
    except RuntimeError:
        # Some in-place calls cannot be differentiated. Secants between random points need no derivatives.
        return _random_secants(model.double(), input_shape, box, restarts * steps)


def _random_secants(model: nn.Module, input_shape: Shape, box: gains.Box | None, count: int) -> float:
    """Largest slope of secants between random points, less its possible rounding error."""
    ends = 3 * sample(model, input_shape, 2 * count)  # two ends of each secant
    if box is not None:
        # The distribution function makes normal numbers uniform.
        ends = (box[0] + (box[1] - box[0]) * torch.special.ndtr(ends / 3)).to(ends)
    best = 0.0
    for pair in ends.split(2):
        with torch.no_grad():
            y = model(pair).reshape(2, -1).double()
        x = pair.flatten(1).double()
        lost = 64 * torch.finfo(pair.dtype).eps * y.norm()
        distance = float((x[0] - x[1]).norm())
        if distance > 0:  # a box of one point has no secants
            best = max(best, float((y[0] - y[1]).norm() - lost) / distance)
    return best


class _Copied(Root):
    """Calls the network on a copy of its input, so that in-place calls leave the input as it is."""

    def forward(self, x: Tensor) -> Any:
        return self.net(x.clone())
