"""The bound of every value in a graph, from those it is computed from: which bound each layer gets, and how a batch
normalisation and the linear layer beside it are bounded as one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn

from lipkit.analysis.calls import Call, Operand, apply
from lipkit.bounds import METHODS, symbol_sup
from lipkit.errors import NoRuleError, OptionError
from lipkit.lowering import lipschitz
from lipkit.lowering.running import Observed
from lipkit.lowering.tracing import Root, fetch
from lipkit.lowering.visiting import Walk, called, path_of
from lipkit.modules import Shape
from lipkit.modules.convolutions import kernel_with_stride
from lipkit.modules.forms import Form, source
from lipkit.modules.guarding import guard
from lipkit.proof.roundoff import gamma, to_double, up


def check_method(method: str) -> str:
    """``method`` if it is ``"auto"``, ``"best"`` or a name in ``lipkit.bounds.METHODS``.

    Raises:
        OptionError: another name.
    """
    names = ("auto", "best", *METHODS)
    if method not in names:
        raise OptionError(f"method: expected one of {', '.join(names)}, got {method!r}")
    return method


def layer_bound(
    module: nn.Module, input_shape: tuple[int, ...], method: str = "auto", tolerance: float | None = None
) -> tuple[Tensor, str]:
    """Lipschitz bound of one layer and the name of the method.

    ``method`` applies to two-dimensional convolutions with zero padding; everything else has the one rule of its type.
    With ``"auto"`` that is :func:`lipkit.bounds.symbol_sup` with its ``tolerance``, or None for its default.

    >>> layer_bound(nn.ReLU(), (3,))[1]
    'rule'
    """
    with torch.no_grad():
        if type(module) is not nn.Conv2d or module.padding_mode != "zeros" or method == "auto":
            if _searched(module) and tolerance is not None and len(input_shape) == 3:
                guard(module)
                bound = symbol_sup(kernel_with_stride(module), groups=module.groups, tolerance=tolerance)
                return bound.detach(), _default(module)
            return lipschitz(module, input_shape).detach(), _default(module)
        names = list(METHODS) if method == "best" else [method]
        kernel = kernel_with_stride(module)
        found = {name: METHODS[name](kernel, groups=module.groups).detach() for name in names}
        best = min(found, key=lambda name: float(found[name]))
        return found[best].to(torch.float64), best


def _default(module: nn.Module) -> str:
    if type(module) is nn.Linear:
        return "spectral_norm"
    if type(module) in (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d):
        return "circular" if module.padding_mode == "circular" else "symbol_sup"
    return "rule"


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _searched(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """True for a layer whose rule is `symbol_sup`."""
    return type(module) is nn.Conv2d and module.padding_mode == "zeros"


def price(kernel: Tensor, groups: int) -> float:
    """Cost of `symbol_sup` for a kernel ``(cout, cin / groups, kh, kw)``, up to a factor: cells and their matrices.

    >>> price(torch.zeros(64, 64, 3, 3), 1), price(torch.zeros(64, 64, 1, 1), 1)
    (1048576.0, 0.0)
    """
    cout, cin, kh, kw = kernel.shape
    cells = math.prod(k - 1 for k in (kh, kw) if k > 1) if max(kh, kw) > 1 else 0
    # Small matrices cost a call.
    return float(cells * groups * max(min(cout // groups, cin), 32) ** 3)


def shared_tolerances(prices: list[float], mean: float) -> list[float]:
    r"""Tolerances of several proofs for the smallest price in all, at most the given mean over those with a price.

    A proof of tolerance t costs :math:`a / t`: with the sum of all t fixed, the cheapest are those proportional to the
    roots of the prices a. None is above ten times the mean.

    >>> [round(t, 4) for t in shared_tolerances([1.0, 9.0, 0.0], 0.01)]
    [0.005, 0.015, 0.01]
    """
    roots = [math.sqrt(p) for p in prices if p > 0]
    shares = [len(roots) * math.sqrt(p) / sum(roots) if p > 0 else 1.0 for p in prices]
    return [min(max(mean * min(share, 10.0), 1e-4), 1.0) for share in shares]


def foldable(linear: nn.Module, norm: nn.Module, linear_shape: tuple[int, ...]) -> bool:
    """True if the channels of both are the same dimension; ``linear_shape`` is a sample of either's input.

    >>> foldable(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), (1, 5, 5)), foldable(nn.Linear(4, 2), nn.BatchNorm1d(3), (3, 4))
    (True, False)
    """
    if type(norm) not in NORMS or norm.running_var is None:
        return False
    return type(linear) in (*CONVOLUTIONS, *TRANSPOSED) or (type(linear) is nn.Linear and len(linear_shape) == 1)


def folded_bound(
    linear: nn.Module, norm: nn.Module, *, norm_first: bool, bound: Callable[[nn.Module], Tensor]
) -> Tensor:
    """Lipschitz bound of both together: ``bound`` of the folded kernel, and what its rounding can add.

    Args:
        linear: convolution, transposed convolution or linear layer.
        norm: batch normalisation in evaluation mode.
        norm_first: whether the normalisation comes before the linear layer.
        bound: Lipschitz bound of one module.

    Returns:
        0-d float64.

    Guarantee:
        Upper, including rounding.

    >>> import torch; from lipkit import lipschitz
    >>> norm = nn.BatchNorm1d(2, eps=0.0).eval()
    >>> _ = norm.running_var.copy_(torch.tensor([0.25, 4.0])); layer = nn.Linear(2, 2)
    >>> _ = layer.weight.data.copy_(torch.diag(torch.tensor([1.0, 2.0])))
    >>> round(folded_bound(layer, norm, norm_first=False, bound=lipschitz).item(), 9)
    2.0
    """
    scale = (to_double(norm.running_var) + norm.eps).rsqrt()  # type: ignore[arg-type, operator]
    if norm.weight is not None:
        scale = scale * to_double(norm.weight)  # type: ignore[arg-type]
    weight = to_double(linear.weight.detach())  # type: ignore[operator]
    groups = int(getattr(linear, "groups", 1))
    # Rows of a transposed convolution are its input channels.
    along_rows = norm_first if type(linear) in TRANSPOSED else not norm_first
    if along_rows:
        folded = weight * scale.view(-1, *(1,) * (weight.ndim - 1))
    else:
        blocks = weight.unflatten(0, (groups, -1)) * scale.view(groups, 1, -1, *(1,) * (weight.ndim - 2))
        folded = blocks.flatten(0, 1)
    layer = copy.deepcopy(linear)
    layer.weight = nn.Parameter(folded, requires_grad=False)
    layer.bias = None  # type: ignore[assignment]
    # Each entry carries a few roundings; taps add up in the worst case, channels by the Frobenius norm.
    size = folded.abs().reshape(*folded.shape[:2], -1).sum(-1).square().sum().sqrt()
    lost = up(size, folded.numel() + 8) * gamma(16)
    # Squares and products below the normal range are lost, unless there is nothing to lose.
    moves = (weight != 0).any() & (scale != 0).any()
    return up(bound(layer) + lost + moves.double() * 2.0**-500, 2)  # in float32 it would be 0


Key = tuple[int, Shape]


@dataclass(frozen=True)
class LayerBound:
    r"""One use of a layer in a network.

    Attributes:
        name: path of the module (a shared one is listed at each use), or of the module that calls the function.
        type: class of the module, or name of the function.
        method: how its bound was found.
        bound: its Lipschitz bound.
        fraction: its part of the logarithm of the network's bound:
            :math:`\log(\text{bound})\,\partial \log L / \partial \log(\text{bound})\,/ \log L`. In a chain the
            fractions add up to 1; otherwise the remainder is what sums and concatenations add, the last entry. 0 where
            L is 0, 1 or infinite.
    """

    name: str
    type: str
    method: str
    bound: float
    fraction: float


@dataclass
class _Row:
    name: str
    type: str
    method: str
    constant: Tensor


class Propagation(Walk):
    """The bound of every value, from the input to the output.

    Args:
        root: the network.
        graph, observed: as left by :func:`lipkit.lowering.running.observe`.
        method: of convolutions.
        tolerance: of those by `symbol_sup`, on average.
    """

    def __init__(self, root: Root, graph: fx.Graph, observed: Observed, method: str, tolerance: float) -> None:
        super().__init__(root, graph, observed)
        self._method = method
        self._rows: list[_Row] = []
        # A module used twice on one shape has one bound; its weights cannot change in between.
        self._bounds: dict[Key, tuple[Tensor, str]] = {}
        # Layers without a bound of their own: it is one with that of the normalisation behind them.
        self._left: set[fx.Node] = set()
        used = (fetch(root, str(node.target)) for node in graph.nodes if node.op == "call_module")
        found = {id(module): price(kernel_with_stride(module), module.groups) for module in used if _searched(module)}
        self._tolerance = dict(zip(found, shared_tolerances(list(found.values()), tolerance), strict=True))

    def result(self) -> tuple[float, tuple[LayerBound, ...]]:
        output = self.output()
        if output is None:
            return 0.0, ()
        total = output.form.total()
        return float(total.detach()), self._table(total)

    def source(self) -> Form:
        return source()

    def _bound(self, module: nn.Module, shape: Shape, stored: nn.Module | None = None) -> tuple[Tensor, str]:
        """Of a module, which may stand for a ``stored`` one of the network."""
        return layer_bound(module, shape, self._method, self._tolerance.get(id(stored or module)))

    def _record(self, name: str, kind: str, constant: Tensor, method: str) -> Tensor:
        leaf = constant.detach().clone().requires_grad_()
        self._rows.append(_Row(name, kind, method, leaf))
        return leaf

    # Modules.

    def module(self, node: fx.Node, x: Operand) -> Form:
        module = fetch(self.root, str(node.target))
        if self._put_off(node, module, x.shape):
            self._left.add(node)
            return x.form.scaled(torch.tensor(math.inf, dtype=torch.float64))  # nobody reads it
        try:
            # Of a normalisation that the layer before was left to, only to refuse one that is not what its type says.
            found, folded = self._plain(node, module, x), self._fold(node, module, x)
            left = not self._left.isdisjoint(node.all_input_nodes)
            if folded is not None and (left or bool(folded[0].total() < found[0].total())):
                found = folded
        except NoRuleError as error:
            raise NoRuleError(f"analyze: at {path_of(node)!r}: {error}") from None
        self._rows.append(found[1])
        return found[0]

    def _put_off(self, node: fx.Node, module: nn.Module, shape: Shape) -> bool:
        """True if nobody asks for the bound of this layer but as one with the normalisation behind it.

        It is the smaller one, as far as the rules of ``"auto"`` are tight. A second reader needs the layer's own bound,
        and so does a linear layer behind the normalisation, which may be folded into that one instead.
        """
        (user, *others) = node.users or (None,)
        norm = None if user is None or user.op != "call_module" else fetch(self.root, str(user.target))
        if user is None or norm is None or others or self._method != "auto" or not foldable(module, norm, shape):
            return False
        behind = (fetch(self.root, str(after.target)) for after in user.users if after.op == "call_module")
        return not any(type(after) in (*CONVOLUTIONS, *TRANSPOSED, nn.Linear) for after in behind)

    def _plain(self, node: fx.Node, module: nn.Module, x: Operand) -> tuple[Form, _Row]:
        """The bound of this layer alone."""
        key = (id(module), x.shape)
        if key not in self._bounds:
            self._bounds[key] = self._bound(module, x.shape or (1,))
        bound, method = self._bounds[key]
        constant = bound.detach().clone().requires_grad_()
        return x.form.scaled(constant), _Row(path_of(node), type(module).__qualname__, method, constant)

    def _fold(self, node: fx.Node, module: nn.Module, x: Operand) -> tuple[Form, _Row] | None:
        """The bound of this layer and the one before as one, if one of them is a batch normalisation."""
        (previous,) = node.all_input_nodes
        if previous.op != "call_module":
            return None
        before = fetch(self.root, str(previous.target))
        (origin,) = previous.all_input_nodes
        start = self.known[origin]
        norm_first = type(before) in NORMS
        linear, norm = (module, before) if norm_first else (before, module)
        shape = x.shape if norm_first else start.shape
        if not foldable(linear, norm, shape):
            return None
        methods: list[str] = []

        def bound(layer: nn.Module) -> Tensor:
            value, method = self._bound(layer, shape, linear)
            methods.append(method)
            return value

        constant = folded_bound(linear, norm, norm_first=norm_first, bound=bound).detach().requires_grad_()
        name = f"{path_of(previous)} + {path_of(node)}"
        kind = f"{type(before).__qualname__} + {type(module).__qualname__}"
        return start.form.scaled(constant), _Row(name, kind, f"{methods[0]}, folded", constant)

    # Functions and tensor methods.

    def function(self, node: fx.Node, shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...]) -> Any:
        where = str(node.meta.get("where", ""))
        name = called(node)

        def bound(module: nn.Module, shape: Shape) -> Tensor:
            try:
                return self._bound(module, shape)[0]
            except NoRuleError as error:
                raise NoRuleError(f"analyze: {self.what(node)}: {error}") from None

        def record(constant: Tensor, method: str) -> Tensor:
            return self._record(where, name, constant, method)

        call = Call(name, where, shapes, dtypes, bound, record)
        args, kwargs = self.arguments(node)
        return apply(call, node.target, args, kwargs)

    def _table(self, total: Tensor) -> tuple[LayerBound, ...]:
        constants = [row.constant for row in self._rows]
        log = math.log(float(total.detach())) if 0 < float(total.detach()) < math.inf else 0.0
        slopes = [0.0] * len(constants)
        if log and total.requires_grad:
            found = torch.autograd.grad(total.log(), constants, allow_unused=True)
            slopes = [0.0 if g is None else float(g * c.detach()) for g, c in zip(found, constants, strict=True)]
        layers, used = [], [g != 0 or not log for g in slopes]
        for row, slope, counts in zip(self._rows, slopes, used, strict=True):
            constant = float(row.constant.detach())
            fraction = slope * math.log(constant) / log if log and 0 < constant < math.inf else 0.0
            if counts:
                layers.append(LayerBound(row.name, row.type, row.method, constant, fraction))
        rest = 1 - sum(layer.fraction for layer in layers) if log else 0.0
        if abs(rest) > 1e-9:
            layers.append(LayerBound("", "sums and concatenations", "remainder", math.exp(rest * log), rest))
        return tuple(layers)
