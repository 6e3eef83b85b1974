"""Lipschitz constants of the modules of a traced network; batch normalisations may be folded into linear layers.

`lipkit.modules.graph` combines them to the constant of the network.
"""

import collections
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lipkit.bounds import METHODS, symbol_sup
from lipkit.errors import NoRuleError
from lipkit.lowering import lipschitz
from lipkit.lowering.build import Bounded
from lipkit.lowering.structure import Interpreter
from lipkit.modules import Network, Shape
from lipkit.modules.convolutions import kernel_with_stride
from lipkit.modules.forms import Form
from lipkit.modules.graph import Graph, Join, forms_of
from lipkit.modules.guarding import guard
from lipkit.modules.limits import ToLimit, limited
from lipkit.modules.normalization import LINEAR, NORMS, foldable, running_affine, scaled_layer
from lipkit.modules.registry import export_plain, output_shape
from lipkit.modules.views import Reshape
from lipkit.proof.roundoff import gamma, up


def layer_bound(
    module: nn.Module, input_shape: tuple[int, ...], method: str = "auto", tolerance: float | None = None
) -> tuple[Tensor, str]:
    """Lipschitz bound of one layer, and the name of the method that gave it.

    ``method`` applies to zero-padded nn.Conv2d only. ``"auto"`` bounds these by :func:`lipkit.bounds.symbol_sup` with
    this ``tolerance`` (None: its default).
    """
    with torch.no_grad():
        if _searched(module) and method != "auto":
            kernel, names = kernel_with_stride(module), METHODS if method == "best" else [method]
            found = {name: METHODS[name](kernel, groups=module.groups) for name in names}
            best = min(found, key=lambda name: float(found[name]))
            return found[best], best
        if _searched(module) and tolerance is not None and len(input_shape) == 3:
            guard(module)
            bound = symbol_sup(kernel_with_stride(module), groups=module.groups, tolerance=tolerance)
            return bound, _default(module)
        return lipschitz(module, input_shape).detach(), _default(module)


def _default(module: nn.Module) -> str:
    """The name of the method by which `lipschitz` bounds this module."""
    if type(module) is nn.Linear:
        return "spectral_norm"
    if type(module) in (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d):
        return "circular" if module.padding_mode == "circular" else "symbol_sup"
    return "rule"


def _searched(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """True for the convolutions to which ``method`` and ``tolerance`` apply."""
    return type(module) is nn.Conv2d and module.padding_mode == "zeros"


def price(kernel: Tensor, groups: int) -> float:
    """Relative cost of `symbol_sup` for a kernel ``(cout, cin / groups, kh, kw)``: cells times a matrix side cubed."""
    cout, cin, kh, kw = kernel.shape
    cells = math.prod(k - 1 for k in (kh, kw) if k > 1) if max(kh, kw) > 1 else 0
    # A small matrix costs at least a call, as much as one of 32 x 32.
    return float(cells * groups * max(min(cout // groups, cin), 32) ** 3)


def shared_tolerances(prices: list[float], mean: float) -> list[float]:
    r"""The tolerances of several proofs that minimise their total cost, where their mean is given.

    A proof of tolerance t costs :math:`a / t`: with the sum of all t fixed, the cheapest are those proportional to the
    square roots of the prices a. No tolerance exceeds ten times the mean; a proof without a price gets the mean.
    """
    roots = [math.sqrt(p) for p in prices if p > 0]
    weights = [len(roots) * math.sqrt(p) / sum(roots) if p > 0 else 1.0 for p in prices]  # of mean 1
    return [min(max(mean * min(weight, 10.0), 1e-4), 1.0) for weight in weights]


def folded_bound(
    linear: nn.Module, norm: nn.Module, *, norm_first: bool, bound: Callable[[nn.Module], Tensor]
) -> Tensor:
    """Lipschitz bound of a linear layer W and a batch normalisation of scales D: ``bound(D W)``, or ``bound(W D)``.

    Guarantee:
        An upper bound, including rounding, if ``bound`` maps a module to one.
    """
    given: Any = linear
    layer: Any = scaled_layer(linear, norm, inputs=norm_first)
    folded, layer.bias = layer.weight, None
    # Each entry carries a few roundings; taps add up in the worst case, channels by the Frobenius norm.
    size = folded.abs().reshape(*folded.shape[:2], -1).sum(-1).square().sum().sqrt()
    lost = up(size, folded.numel() + 8) * gamma(16)
    # Squares and products below the normal range are lost, unless there is nothing to lose.
    moves = (given.weight != 0).any() & (running_affine(norm)[0] != 0).any()  # type: ignore[arg-type]
    return up(bound(layer) + lost + moves.double() * 2.0**-500, 2)  # in float32 it would be 0


@dataclass(frozen=True)
class LayerBound:
    r"""One use of a layer in a network.

    Attributes:
        name: path of the module (a shared one is listed at each use), or of the module that calls the function.
        type: class of the module, or name of the function.
        method: how its bound was found.
        bound: its Lipschitz bound.
        factor: its contribution to the network's bound, :math:`\text{bound}^s` with
            :math:`s = \partial \log L / \partial \log(\text{bound})`, which is 1 in a chain. The product of all is L;
            the last entry, "skip connections", is what sums and concatenations add.
    """

    name: str
    type: str
    method: str
    bound: float
    factor: float


def _to_limit(module: nn.Module) -> bool:
    """True if the module holds a product or quotient without limits, which has no Lipschitz constant yet."""
    return any(isinstance(part, ToLimit) for part in module.modules())


class Constants:
    """Computes the Lipschitz constants of a traced network and of its modules.

    ``lowering`` has traced the network; ``output`` is the index of the network's output among its values. ``method``
    and the mean ``tolerance`` bound the convolutions, as in `layer_bound`. Products of two values need a ``box``.
    """

    def __init__(
        self, lowering: Interpreter, output: int, method: str, tolerance: float, box: tuple[float, float] | None
    ) -> None:
        values = lowering.wiring.used(output)
        self._modules, self._sources = lowering.wiring.part(values)
        self._labels = [lowering.labels[value - 1] for value in values]
        shapes = lowering.shapes()
        self._shapes = {i: shapes[value] for i, value in enumerate((0, *values)) if value in shapes}
        if box is not None and any(map(_to_limit, self._modules)):
            self._modules = self._limited(box)
        self._readers: dict[int, list[int]] = collections.defaultdict(list)
        for i, read in enumerate(self._sources):
            for value in read:
                self._readers[value].append(i)
        self._method = method
        self._rows: list[tuple[LayerBound, Tensor]] = []
        # A module used twice on one shape has one bound; its weights cannot change in between.
        self._bounds: dict[tuple[int, Shape], tuple[Tensor, str]] = {}
        # Values without a bound of their own: the normalisation after them has the folded bound of both.
        self._delayed: set[int] = set()
        prices = {id(m): price(kernel_with_stride(m), m.groups) for m in self._modules if _searched(m)}
        self._tolerance = dict(zip(prices, shared_tolerances(list(prices.values()), tolerance), strict=True))

    def result(self) -> tuple[float, tuple[LayerBound, ...]]:
        """The network's constant, and the table of its layers."""
        total = forms_of(self._modules, self._sources, self._form_after)[-1].total()
        return float(total.detach()), self._table(total)

    def _limited(self, box: tuple[float, float]) -> list[nn.Module]:
        """The modules, with limits on products and quotients; for inputs in the box no value exceeds its limits."""
        nodes: list[nn.Module] = []
        for m, read in zip(self._modules, self._sources, strict=True):
            chain: list[nn.Module] = []
            if not isinstance(m, Join | ToLimit):
                chain = list(export_plain(m, shape := self._shape(read[0]))) or [Reshape(*shape)]
            nodes.append(Graph(chain, [[i] for i in range(len(chain))]) if chain else m)  # one node, with its ranges
        found = limited(Network([Graph(nodes, self._sources)], self._shape(0)), box)[0].nodes
        return [new if _to_limit(m) else m for new, m in zip(found, self._modules, strict=True)]

    def _shape(self, value: int) -> Shape:
        """Shape of one sample of a value; where tracing did not record it, zeros are run through the module."""
        if value not in self._shapes:
            module, before = self._modules[value - 1], [self._shape(read) for read in self._sources[value - 1]]
            if isinstance(module, Bounded) and module.shape is not None:
                return module.shape
            joined = isinstance(module, Join)
            found = module(*(torch.zeros(1, *shape) for shape in before)).shape[1:] if joined else ()
            self._shapes[value] = tuple(found) if joined else output_shape(module, before[0])
        return self._shapes[value]

    def _form_after(self, i: int, forms: Sequence[Form]) -> Form:
        """The Lipschitz bound from the input to the output of module i, the smaller of `_plain` and `_fold`."""
        if self._put_off(i):
            self._delayed.add(i + 1)
            return forms[0].scaled(torch.tensor(math.inf, dtype=torch.float64))  # a placeholder, which is not read
        label = self._labels[i]
        try:
            # Needed even if only the folded bound counts: it refuses a normalisation that is not what its type says.
            found, row = self._plain(i, forms)
            folded = self._fold(i, forms)
            if folded is not None and (self._sources[i][0] in self._delayed or bool(folded[0].total() < found.total())):
                found, row = folded
        except NoRuleError as error:
            raise NoRuleError(f"analyze: {label.what}: {error}") from None
        if label.own or row[0].bound != 1:
            self._rows.append(row)
        return found

    def _plain(self, i: int, forms: Sequence[Form]) -> tuple[Form, tuple[LayerBound, Tensor]]:
        """The bound from the input to the output of module i, without folding, and the module's row of the table."""
        module, (value,), label = self._modules[i], self._sources[i], self._labels[i]
        if isinstance(module, Bounded):
            bound, method = module.constant, module.method
        else:
            shape = self._shape(value)
            key = (id(module), shape)
            if key not in self._bounds:
                self._bounds[key] = layer_bound(module, shape, self._method, self._tolerance.get(id(module)))
            bound, method = self._bounds[key]
        row = _row(bound, label.name, label.type, method)
        return forms[value].scaled(row[1]), row

    def _put_off(self, i: int) -> bool:
        """True if it is enough to bound layer i together with the normalisation after it, folded into it.

        With tight rules (``"auto"``) the folded bound is the smaller one. The layer's own bound is needed if its output
        has a second reader, or if a linear layer follows: the normalisation may be folded into that one instead.
        """
        readers = self._readers[i + 1]
        if len(readers) != 1 or self._method != "auto" or not self._foldable(i, readers[0]):
            return False
        return not any(type(self._modules[after]) in LINEAR for after in self._readers[readers[0] + 1])

    def _foldable(self, linear: int, norm: int) -> bool:
        layer = self._modules[linear]
        return type(layer) in LINEAR and foldable(layer, self._modules[norm], self._shape(self._sources[linear][0]))

    def _fold(self, i: int, forms: Sequence[Form]) -> tuple[Form, tuple[LayerBound, Tensor]] | None:
        """As `_plain`, with module i and the one before it folded; None unless one is a batch normalisation."""
        before = self._sources[i][0] - 1
        if before < 0:
            return None
        norm_first = type(self._modules[before]) in NORMS
        linear, norm = (i, before) if norm_first else (before, i)
        if not self._foldable(linear, norm):
            return None
        layer, shape = self._modules[linear], self._shape(self._sources[linear][0])
        methods: list[str] = []  # how the one folded layer was bounded: `folded_bound` passes on its bound alone

        def bound(folded: nn.Module) -> Tensor:
            value, method = layer_bound(folded, shape, self._method, self._tolerance.get(id(layer)))
            methods.append(method)
            return value

        constant = folded_bound(layer, self._modules[norm], norm_first=norm_first, bound=bound)
        both = (self._labels[before], self._labels[i])
        name, kind = (" + ".join(words) for words in zip(*((label.name, label.type) for label in both), strict=True))
        row = _row(constant, name, kind, f"{methods[0]}, folded")
        return forms[self._sources[before][0]].scaled(row[1]), row

    def _table(self, total: Tensor) -> tuple[LayerBound, ...]:
        constants = [constant for _, constant in self._rows]
        exponents: list[float] = [1.0] * len(constants)  # s of `LayerBound`
        # The derivative by a constant near an end of float64's range would overflow or vanish.
        finite = 2.0**-1000 < float(total.detach()) < math.inf
        finite = finite and not any(0 < float(c.detach()) < 2.0**-1000 for c in constants)
        if finite and constants and total.requires_grad:
            gradients = torch.autograd.grad(total.log(), constants, allow_unused=True)
            exponents = [0.0 if g is None else float(g * c.detach()) for g, c in zip(gradients, constants, strict=True)]
        rows = [(row, s) for (row, _), s in zip(self._rows, exponents, strict=True) if s]
        layers = [replace(row, factor=row.bound**s if finite else row.bound) for row, s in rows]
        # By logarithms: the product of many factors may leave the range of float64.
        rest = math.log(float(total.detach())) - sum(math.log(layer.factor) for layer in layers) if finite else 0.0
        if abs(rest) > 1e-9:
            factor = math.exp(rest) if rest < 700 else math.inf  # exp overflows at 709.8
            layers.append(LayerBound("", "skip connections", "sums", factor, factor))
        return tuple(layers)


def _row(constant: Tensor, name: str, kind: str, method: str) -> tuple[LayerBound, Tensor]:
    """A row of the table, and its constant as a leaf tensor, whose gradient becomes the row's factor."""
    constant = constant.detach().clone().requires_grad_()
    return LayerBound(name, kind, method, float(constant.detach()), 1.0), constant
