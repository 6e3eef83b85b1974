"""Lipschitz bounds of whole networks with their own forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lipkit.analysis import functions as functions
from lipkit.analysis import layer_functions as layer_functions
from lipkit.analysis.calls import Call, Operand, apply, function_name
from lipkit.analysis.folding import NORMS, foldable, folded_bound
from lipkit.analysis.forms import Form, source
from lipkit.analysis.methods import check_method, layer_bound
from lipkit.analysis.prepare import constant_copy, sample
from lipkit.analysis.running import BATCHES, Observed, Sizes, Varies, check_outputs, observe
from lipkit.analysis.tracing import Root, fetch, trace
from lipkit.attacks import lipschitz_lower_bound
from lipkit.errors import CertificateViolation, NoRuleError, OptionError
from lipkit.protocol import Shape, output_shape

Key = tuple[int, Shape]


@dataclass(frozen=True)
class LayerBound:
    r"""One use of a layer in a network.

    Attributes:
        name: path of the module (a shared one is listed at each use), or of the module that calls the function.
        type: class of the module, or name of the function.
        method: how its bound was found.
        bound: its Lipschitz bound.
        share: its part of the logarithm of the network's bound: :math:`\log(\text{bound})\,\partial \log L / \partial
            \log(\text{bound})\,/ \log L`. In a chain the shares add up to 1; otherwise the remainder is what sums and
            concatenations add, the last entry. 0 where L is 0, 1 or infinite.
    """

    name: str
    type: str
    method: str
    bound: float
    share: float


@dataclass(frozen=True)
class NetworkBound:
    """What :func:`analyze` finds.

    Attributes:
        upper: proved Lipschitz bound (l2).
        lower: slope of a secant that was found by search; 0 if none was asked for. Never a certificate.
        layers: in the order of the forward pass; the last entry is what sums and concatenations add.
        input_shape: of one sample.
    """

    upper: float
    lower: float
    layers: tuple[LayerBound, ...]
    input_shape: Shape


def analyze(
    model: nn.Module,
    input_shape: Shape,
    *,
    method: str = "auto",
    restarts: int = 4,
    steps: int = 10,
    seed: int = 0,
) -> NetworkBound:
    r"""Lower and upper bound of the Lipschitz constant of any network that torch.fx can trace.

    .. math:: \|f(x) - f(y)\|_2 \le \text{upper}\,\|x - y\|_2 \quad\text{for all } x, y

    The bound of each value in the network is found from those it is computed from: products along chains, sums at
    additions, roots of sums of squares at concatenations (the maximum, where the branches read disjoint pieces made
    by ``chunk`` or ``split``). Batch normalisation is folded into the linear layer beside it where that is smaller.

    Args:
        model: a module in evaluation mode. Modules with a rule (``lipkit.protocol.rules()``) count by it, functions and
            tensor methods by those of :func:`lipkit.analysis.function_rules`; other modules are looked into. It is
            left as it is.
        input_shape: shape of one sample, without the batch.
        method: bound of zero-padded 2-D convolutions: ``"auto"`` (the rule of the module), ``"best"``, or the name of
            one in :mod:`lipkit.bounds`.
        restarts, steps: of the search for ``lower``; see :func:`lipkit.attacks.lipschitz_lower_bound`. No restarts, no
            search.
        seed: of the search.

    Returns:
        :class:`NetworkBound`.

    Guarantee:
        ``upper`` bounds the function that the stored weights define in exact arithmetic, rounding of the computation
        of the bound included, for inputs of this shape and batches of any size.

    Cost:
        A few forward passes with up to three samples, one bound of each layer, and the search, about
        ``6 restarts x steps`` float64 passes forward and backward.

    Raises:
        NoRuleError: anything without a rule, by name; control flow on values; a batch that is not kept apart; in-place
            calls whose effect on other values is not clear; hooks; training mode of modules that differ in it.
        ShapeError: the model does not accept ``input_shape``.
        OptionError: a method, restarts or steps out of range.
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
    if restarts < 0 or steps < 1:
        raise OptionError(f"expected restarts >= 0 and steps >= 1, got restarts={restarts}, steps={steps}")
    root = Root(constant_copy(model))
    output_shape(_Copied(root), input_shape)
    input_shape = tuple(input_shape)
    with torch.no_grad():
        graph = trace(root, sample(root, input_shape, BATCHES[0]))
        observed = observe(root, graph, input_shape)
    upper, layers = _Propagation(root, graph, observed, method).result()
    check_outputs(root, observed, input_shape)
    lower = _search(_Copied(root), input_shape, restarts, steps, seed) if restarts else 0.0
    if lower > upper * (1 + 1e-6):
        raise CertificateViolation(
            f"analyze: expected no secant steeper than the upper bound {upper:.9g}, got one of slope {lower:.9g}: a "
            "rule is wrong"
        )
    # Where both meet, the secant is beyond by its rounding.
    return NetworkBound(upper, min(lower, upper), layers, input_shape)


def _search(model: nn.Module, input_shape: Shape, restarts: int, steps: int, seed: int) -> float:
    try:
        return lipschitz_lower_bound(model, input_shape=input_shape, restarts=restarts, steps=steps, seed=seed).lower
    except RuntimeError:
        # Some in-place calls cannot be differentiated. Secants between random points need no derivatives.
        model = model.double()
        ends = 3 * sample(model, input_shape, 2 * restarts * steps)
        with torch.no_grad():
            rises = [model(pair).flatten(1) for pair in ends.split(2)]
        slopes = [(y[0] - y[1]).norm() / (x[0] - x[1]).norm() for x, y in zip(ends.split(2), rises, strict=True)]
        return float(torch.stack(slopes).max())


class _Copied(nn.Module):
    """The network on a copy of its input, which in-place calls would overwrite."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x.clone())


@dataclass
class _Row:
    name: str
    type: str
    method: str
    constant: Tensor


class _Propagation:
    """The bound of every value, from the input to the output."""

    def __init__(self, root: Root, graph: fx.Graph, observed: Observed, method: str) -> None:
        self._root, self._graph, self._values, self._method = root, graph, observed.values, method
        self._rows: list[_Row] = []
        # A module used twice on one shape has one bound; its weights cannot change in between.
        self._bounds: dict[Key, tuple[Tensor, str]] = {}
        self._known: dict[fx.Node, Any] = {}

    def result(self) -> tuple[float, tuple[LayerBound, ...]]:
        for node in self._graph.nodes:
            if node.op != "output":
                self._known[node] = self._visit(node)
                continue
            (last,) = node.args
            output = self._known[last] if isinstance(last, fx.Node) else last
            if not isinstance(output, (Operand, Tensor, Varies)):
                raise NoRuleError(f"analyze: expected one output tensor, got {type(output).__name__}")
        if not isinstance(output, Operand):
            # The output does not depend on the input.
            return 0.0, ()
        total = output.form.total()
        return float(total.detach()), self._table(total)

    def _visit(self, node: fx.Node) -> Any:
        value = self._values[node]
        if node.op == "placeholder":
            return Operand(source(), self._sample_shape(node, value))
        if not isinstance(value, (Sizes, str)) and not _has_sizes(value):
            return value
        if isinstance(value, str):
            raise NoRuleError(
                f"analyze: {self._what(node)}: expected a tensor, got {value}, which depends on the values of the input"
            )
        shapes = [self._sample_shape(node, v) for v in (value if isinstance(value, tuple) else (value,))]
        if node.op == "call_module":
            forms: Any = self._module(node, value)
        else:
            forms = self._function(node, value, shapes)
        if isinstance(value, tuple):
            return tuple(Operand(form, shape) for form, shape in zip(forms, shapes, strict=True))
        return Operand(forms, shapes[0])

    def _what(self, node: fx.Node) -> str:
        where = f" in {node.meta['where']!r}" if node.meta.get("where") else ""
        if node.op == "call_module":
            module = fetch(self._root, str(node.target))
            return f"{type(module).__module__}.{type(module).__qualname__} at {_path(node)!r}"
        return f"{function_name(node.target)}{where}"

    def _sample_shape(self, node: fx.Node, value: Any) -> Shape:
        if not isinstance(value, Sizes) or value.sample is None:
            raise NoRuleError(
                f"analyze: {self._what(node)}: expected a result with one row per sample, got one whose shape mixes "
                "the batch with other dimensions"
            )
        return value.sample

    def _bound(self, module: nn.Module, shape: Shape) -> tuple[Tensor, str]:
        return layer_bound(module, shape, self._method)

    def _record(self, name: str, kind: str, constant: Tensor, method: str) -> Tensor:
        leaf = constant.detach().clone().requires_grad_()
        self._rows.append(_Row(name, kind, method, leaf))
        return leaf

    # Modules.

    def _module(self, node: fx.Node, value: Any) -> Form:
        module = fetch(self._root, str(node.target))
        given = [self._known[a] if isinstance(a, fx.Node) else a for a in (*node.args, *node.kwargs.values())]
        if len(given) != 1 or not isinstance(given[0], Operand) or not isinstance(value, Sizes):
            raise NoRuleError(f"analyze: {self._what(node)}: expected one tensor in and one out, got {given!r}")
        x = given[0]
        key = (id(module), x.shape)
        if key not in self._bounds:
            try:
                self._bounds[key] = self._bound(module, x.shape)
            except NoRuleError as error:
                raise NoRuleError(f"analyze: at {_path(node)!r}: {error}") from None
        bound, method = self._bounds[key]
        name, kind = _path(node), type(module).__qualname__
        constant = bound.detach().clone().requires_grad_()
        plain, row = x.form.scaled(constant), _Row(name, kind, method, constant)
        folded = self._fold(node, module, x)
        if folded is not None and bool(folded[0].total() < plain.total()):
            plain, row = folded
        self._rows.append(row)
        return plain

    def _fold(self, node: fx.Node, module: nn.Module, x: Operand) -> tuple[Form, _Row] | None:
        """The bound of this layer and the one before as one, if one of them is a batch normalisation."""
        (previous,) = node.all_input_nodes
        if previous.op != "call_module":
            return None
        before = fetch(self._root, str(previous.target))
        (origin,) = previous.all_input_nodes
        start = self._known[origin]
        norm_first = type(before) in NORMS
        linear, norm = (module, before) if norm_first else (before, module)
        shape = x.shape if norm_first else start.shape
        if not foldable(linear, norm, shape):
            return None
        methods: list[str] = []

        def bound(layer: nn.Module) -> Tensor:
            value, method = self._bound(layer, shape)
            methods.append(method)
            return value

        constant = folded_bound(linear, norm, norm_first=norm_first, bound=bound).detach().requires_grad_()
        name = f"{_path(previous)} + {_path(node)}"
        kind = f"{type(before).__qualname__} + {type(module).__qualname__}"
        return start.form.scaled(constant), _Row(name, kind, f"{methods[0]}, folded", constant)

    # Functions and tensor methods.

    def _function(self, node: fx.Node, value: Any, shapes: list[Shape]) -> Any:
        where = str(node.meta.get("where", ""))
        name = function_name(node.target)

        def bound(module: nn.Module, shape: Shape) -> Tensor:
            try:
                return self._bound(module, shape)[0]
            except NoRuleError as error:
                raise NoRuleError(f"analyze: {self._what(node)}: {error}") from None

        def record(constant: Tensor, method: str) -> Tensor:
            return self._record(where, name, constant, method)

        single = isinstance(value, Sizes)
        call = Call(name, where, shapes[0] if single else (), len(shapes), bound, record)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._known.__getitem__)
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
            share = slope * math.log(constant) / log if log and 0 < constant < math.inf else 0.0
            if counts:
                layers.append(LayerBound(row.name, row.type, row.method, constant, share))
        rest = 1 - sum(layer.share for layer in layers) if log else 0.0
        if abs(rest) > 1e-9:
            layers.append(LayerBound("", "sums and concatenations", "remainder", math.exp(rest * log), rest))
        return tuple(layers)


def _has_sizes(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(v, (Sizes, str)) for v in value)


def _path(node: fx.Node) -> str:
    return str(node.target).removeprefix("net").removeprefix(".")
