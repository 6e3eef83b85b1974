"""A network with its own forward pass as a chain of modules, with a `Graph` wherever values branch.

The forward pass is traced (`lipkit.lowering.tracing`), run for two batch sizes and compared with the network
(`lipkit.lowering.observe`). What it calls becomes modules: its own, those that compute the same as a function
(`lipkit.lowering.functional`), and for what only moves or joins numbers the ones below. What has a Lipschitz constant
but no plain form becomes a leaf `Bounded`, which `lipkit.analyze` alone takes. Everything else is refused by name.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lipkit.errors import NoRuleError
from lipkit.lowering.axes import RULES, Call, Placing, along, behind, joined, multiplied, viewed
from lipkit.lowering.copies import constant_copy
from lipkit.lowering.functional import FUNCTIONAL, covered, first_operand, with_tensors
from lipkit.lowering.interpreter import FunctionCall, Interpreter, Operand, called, function_name, path_of
from lipkit.lowering.observe import Varies, check_outputs, close, observe, sample, traced
from lipkit.lowering.tracing import BATCHES, Root, fetch, flat
from lipkit.modules.dense import Affine
from lipkit.modules.graph import Add, Concatenate, Maximum, Wiring
from lipkit.modules.guarding import type_name
from lipkit.modules.plain import Shape
from lipkit.modules.pooling import Mean
from lipkit.modules.products import Limited, MatrixProduct, Product
from lipkit.modules.registry import _TRACED, export_plain, lipschitz
from lipkit.modules.views import Expand, Pad, Permute, Piece, Reshape, Roll
from lipkit.proof.roundoff import reciprocal_up, root, to_double

Value = int | tuple[int, ...]

PLAIN: dict[Any, Callable[..., Value]] = {}
"""Functions, and tensor methods by name, to ``rule(call, *arguments) -> number of the value``; a tuple for several."""

BOUNDED: dict[Any, Callable[..., Value]] = {}
"""Rules, in the same form, of functions that have a Lipschitz constant but no plain form."""


def structure(model: nn.Module, input_shape: Shape, *, own: bool = False) -> nn.Sequential:
    """The modules that the forward pass of ``model`` is made of, one behind the other.

    Args:
        model: traced in the mode that it is in, on the CPU.
        input_shape: of one sample.
        own: the result calls the modules of ``model`` itself, so that bounds have derivatives; otherwise copies whose
            normalised weights (spectral, weight, orthogonal) are plain numbers.

    Raises:
        NoRuleError: what has no plain form, by the name of the node and its module, and what `lipkit.analyze` refuses.
        ShapeError: the forward pass does not accept inputs of this shape.

    >>> class Residual(nn.Module):
    ...     def __init__(self): super().__init__(); self.body = nn.Linear(2, 2)
    ...     def forward(self, x): return torch.relu(x + self.body(x))
    >>> structure(Residual(), (2,))
    Sequential(
      (0): Graph(
        sources=[[0], [0, 1]]
        (nodes): ModuleList(
          (0): Linear(in_features=2, out_features=2, bias=True)
          (1): Add(1, 1)
        )
      )
      (1): ReLU()
    )
    """
    function = "lipschitz" if own else "export"
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        try:
            root = Root(constant_copy(model))
            lowering = Lowering(root, input_shape, Root(model) if own else root)
            output = lowering.output()
            lowering.check(model)
        except NoRuleError as error:
            # The same refusals serve bounds.
            raise NoRuleError(f"{function}: {str(error).removeprefix('analyze: ')}") from None
    if output is None:
        raise NoRuleError(f"{function}: expected an output that depends on the input, got a constant one")
    chain = nn.Sequential(*lowering.wiring.chain(output.form), *([] if output.shape else [Reshape()]))
    if not own:
        check_same(chain, root, input_shape, lowering.observed.outputs[1])
    return chain


def check_same(plain: nn.Module, model: nn.Module, input_shape: Shape, expected: Tensor | None = None) -> None:
    """Raise ``NoRuleError`` if two networks differ on a batch: no proof, but it finds a rule that is wrong."""
    x = sample(model, input_shape, BATCHES[1])
    with torch.no_grad():
        found, expected = plain(x.clone()), model(x.clone()) if expected is None else expected
    if found.dtype != expected.dtype:  # a cast at the end
        found = found.to(expected.dtype)
    if not close(found, expected):
        raise NoRuleError(
            "export: expected plain modules that compute the same as the network, got other outputs: a rule of "
            "lipkit.lowering.function_module or lipkit.modules.export_rule does not match its function"
        )


class Bounded(nn.Module):
    """A leaf of a wiring of which a Lipschitz constant is known, and how, but no plain form."""

    def __init__(self, constant: float | Tensor, method: str) -> None:
        super().__init__()
        self.constant, self.method = torch.as_tensor(constant, dtype=torch.float64), method


@dataclass(frozen=True)
class Label:
    """A name, as the user knows it, of that which a module of a wiring was made from.

    Attributes:
        name: path of the module, or of the one that calls the function.
        type: class of the module, or name of the function.
        what: how a message names it.
        own: whether it is a module of the network.
    """

    name: str
    type: str
    what: str
    own: bool


class Lowering(Interpreter):
    """A network as a wiring of modules: every operand is the number of a value in it.

    Args:
        root: an independent copy with constant weights, which is traced and run.
        input_shape: of one sample.
        bound_to: holds the modules that are wired, ``root`` or the network itself.
        bounding: whether constants are all that is asked for: there may be leaves `Bounded`, shifts are left out, and
            factors have float64.

    Attributes:
        wiring, labels: the modules and what they were made from.
    """

    def __init__(self, root: Root, input_shape: Shape, bound_to: Root, bounding: bool = False) -> None:
        graph, self._other_way = traced(root, input_shape)
        self.observed = observe(root, graph, input_shape)
        super().__init__(root, graph, self.observed)
        self.wiring, self.labels = Wiring(), list[Label]()
        self._input_shape, self._bound_to, self._bounding = input_shape, bound_to, bounding

    def check(self, model: nn.Module) -> None:
        """Refuse a network that is not the function of its graph: `lipkit.lowering.observe.check_outputs`."""
        check_outputs(self.root, self.observed, self._input_shape, model, self._other_way)

    def shapes(self) -> dict[int, Shape]:
        """Of one sample of each value that a node of the graph makes."""
        operands = [x for x in flat(list(self.known.values())) if isinstance(x, Operand)]
        return {x.form: x.shape or (1,) for x in operands}

    def source(self) -> int:
        return 0

    def _labelled(self, label: Label) -> None:
        self.labels += [label] * (len(self.wiring.modules) - len(self.labels))

    def module(self, node: fx.Node, x: Operand) -> int:
        module = fetch(self._bound_to, str(node.target))
        if getattr(module, "inplace", False):
            # Whoever reads the overwritten tensor later reads this value: see `observe`.
            module = copy.copy(module)
            module.inplace = False
        value, path = self.wiring.add(module, x.form), path_of(node)
        self._labelled(Label(path, type(module).__qualname__, f"at {path!r}", own=True))
        return value

    def function(self, node: fx.Node, shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...]) -> Value:
        like = torch.zeros((), dtype=torch.float64 if self._bounding else self._format)
        where = str(node.meta.get("where", ""))
        call = Build(called(node), where, shapes, dtypes, self.wiring, like, self._bounding)
        args, kwargs = self.arguments(node)
        target: Any = node.target
        rule = PLAIN.get(target) or (BOUNDED.get(target) if self._bounding else None)
        value: Value
        if target in FUNCTIONAL:
            module = covered(call, FUNCTIONAL[target], args, kwargs)
            value = call.add(module, first_operand(call, FUNCTIONAL[target], args, kwargs))
        elif rule is not None:
            value = covered(call, rule, args, kwargs)
        elif self._bounding:
            raise call.refuse(
                "it has no rule, and nothing is assumed to be 1-Lipschitz; register one with "
                "lipkit.analysis.function_rule, or put it into a module with a rule of its own"
            )
        else:
            raise call.refuse(
                "it has no plain form that could be exported; register the module that computes it with "
                "lipkit.lowering.function_module, or put it into a module with rules of its own (lipkit.analyze bounds "
                "more functions than can be exported)"
            )
        self._labelled(Label(where, call.name, self.what(node), own=False))
        return value


@dataclass(frozen=True)
class Build(FunctionCall):
    """A call that becomes modules.

    Attributes:
        wiring: where they go.
        like: a number in the format that constants get.
        bounding: of `Lowering`.
    """

    wiring: Wiring
    like: Tensor
    bounding: bool

    def scale(self, x: Operand, factor: float | Tensor, method: str = "closed form") -> int:
        """A map of Lipschitz constant ``factor`` that has no plain form."""
        return self.add(Bounded(factor, method), x)

    def keep(self, x: Operand) -> int:
        """A map of constant 1, which has no plain form, to the same format."""
        return self.scale(self.same_format(x), 1.0)

    def moving(self, *values: Any) -> list[Operand]:
        """The operands; constants beside them count for nothing in a bound, and have no plain form."""
        return [self.operand(x) for x in values if not (self.bounding and isinstance(x, (Tensor, Varies)))]

    def add(self, module: nn.Module, *operands: Operand) -> int:
        """The value that a module makes of operands."""
        return self.wiring.add(module, *(operand.form for operand in operands))

    def then(self, module: nn.Module, *values: int) -> int:
        """The value that a module makes of values, by their numbers."""
        return self.wiring.add(module, *values)

    def reshaped(self, value: int, before: Shape, after: Shape) -> int:
        """A value under another shape of the same entries; numbers of shape () are vectors of one entry."""
        before, after = before or (1,), after or (1,)
        if before == after:
            return value
        return self.then(nn.Flatten() if len(after) == 1 else Reshape(*after), value)

    def broadcast(self, x: Any) -> Operand:
        """``x`` repeated to the shape of the result, as elementwise functions do."""
        if self.operand(x).shape == self.shape:
            return self.operand(x)
        self.repetition(x)
        return Operand(self.add(Expand(*self.shape), x), self.shape, x.dtype)

    def number(
        self, x: Any, name: str, of: Callable[[Tensor], Tensor] = torch.clone, axes: int | None = None
    ) -> Tensor:
        """``of`` a constant without the batch, of at most ``axes`` dimensions, in the format of the network."""
        axes = len(self.shape) if axes is None else axes
        value = self.constant(x, name)
        value = to_double(value.detach()) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        if value.is_complex():
            raise self.refuse(f"expected real numbers as {name}, got {value.dtype}")
        if value.ndim == axes + 1 and len(value) == 1:
            value = value[0]
        if value.ndim > axes:
            raise self.refuse(f"expected a {name} without a batch, got shape {tuple(value.shape)}")
        return of(value).to(self.like)

    def shift(self, x: Any) -> Tensor:
        """A constant that is added, which no bound depends on."""
        return self.like if self.bounding else self.number(x, "term")

    def elementwise(self, x: Any, *, scale: Tensor | None = None, shift: Tensor | None = None) -> int:
        """``scale * x + shift``, repeated as torch would repeat them."""
        given = self.broadcast(x)
        numbers = [self.like + 1 if scale is None else scale, self.like if shift is None else shift]
        axes = len(given.shape) or 1
        full = [t.reshape((1,) * (axes - t.ndim) + tuple(t.shape)) for t in numbers]
        if all(t.shape[1:].numel() == 1 for t in full):
            channels = max(t.shape[0] for t in full)
            return self.add(Affine(*(t.reshape(-1).expand(channels) for t in full)), given)
        return self.add(Affine(*full), given)

    def named(self, product: Limited) -> Limited:
        """A product that messages name by this call."""
        if self.bounding:
            raise self.refuse(
                "expected one constant factor or constant matrix, got two that depend on the input: such a product has "
                "no Lipschitz constant on all of space; analyze(..., box=(0, 1)), or lipkit bound --box 0,1, bounds it "
                "for inputs in a box"
            )
        product.where = f"{self.name} in {self.where!r}" if self.where else self.name
        return product

    def piece(self, x: Operand, dim: int, entries: range) -> int:
        """Some entries of one dimension."""
        if entries == range(x.shape[dim - 1]):
            value: int = x.form
            return value
        if not entries and self.bounding:
            return self.scale(x, 0.0)
        if not entries:
            raise self.refuse(f"expected pieces with entries, got none of dimension {dim}")
        return self.add(Piece(dim, entries.start, entries.stop, entries.step), x)


def plain(
    *targets: Callable[..., Any] | str, place: Callable[[Placing], Call] | None = None
) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Register a rule of `PLAIN`, and the one that finds the batch, without which it is first."""

    def put(rule: Callable[..., Value]) -> Callable[..., Value]:
        PLAIN.update(dict.fromkeys(targets, rule))
        RULES.update(dict.fromkeys(targets, place) if place else {})
        return rule

    return put


def function_rule(*targets: Callable[..., Any] | str) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Register ``rule(call, *arguments) -> value`` for exactly these functions and tensor methods (by name).

    For functions that have a Lipschitz constant but no module that computes the same: `lipkit.analyze` bounds them,
    nothing exports them. The rule is called with the arguments of the function, tensors that change with the network's
    input as `lipkit.analysis.Operand`, and vouches for the l2 Lipschitz constant of each sample's part of the result:
    ``call.scale(x, factor)`` or ``call.keep(x)``.

    Raises:
        NoRuleError: a target already has a rule, or a module that computes the same.

    >>> def halve(x): return x / 2
    >>> @function_rule(halve)
    ... def _(call, x): return call.scale(x, 0.5)
    >>> BOUNDED.pop(halve) is _
    True
    """

    def put(rule: Callable[..., Value]) -> Callable[..., Value]:
        for target in targets:
            if target in function_rules():
                raise NoRuleError(f"{function_name(target)} already has a rule; expected one rule for each function")
            BOUNDED[target] = rule
        return rule

    return put


def function_rules() -> dict[Any, Callable[..., Any]]:
    """Every function and method name with its rule, or with what makes the module that computes the same (a copy)."""
    return {**BOUNDED, **PLAIN, **FUNCTIONAL}


# Reading the same entries under another shape or in another order.


@plain(
    *(torch.flatten, torch.reshape, torch.clone, torch.squeeze, torch.unsqueeze, torch.detach, operator.pos),
    *("flatten", "unflatten", "view", "reshape", "clone", "contiguous", "squeeze", "unsqueeze", "detach"),
    *("view_as", "reshape_as"),
    place=viewed,
)
def _moved(call: Build, x: Operand, *shape: Any, **options: Any) -> int:
    before = call.same_format(x).shape
    if math.prod(before) != math.prod(call.shape):
        raise call.refuse(f"expected as many entries as before, got {call.shape} from {before}")
    return call.reshaped(x.form, before, call.shape)


@plain("expand", "expand_as", torch.broadcast_to, place=joined)
def _expand(call: Build, x: Operand, *sizes: Any) -> int:
    value: int = call.broadcast(call.same_format(x)).form
    return value


@plain("to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", place=viewed)
def _cast(call: Build, x: Operand, *format: Any, **options: Any) -> int:
    value: int = call.operand(x).form
    return value


@plain("permute")
def _permute(call: Build, x: Operand, *dims: Any) -> int:
    return call.add(Permute(*dims[1:]), call.same_format(x))


@plain(torch.roll, "roll", place=along(2, "dims"))
def _roll(call: Build, x: Operand, shifts: Any, dims: Any = None) -> int:
    value = call.same_format(x).form
    shifts = [shifts] if isinstance(shifts, int) else list(call.constant(shifts, "shift"))
    for dim, shift in zip(call.dims(x, dims), shifts, strict=True):
        value = call.then(Roll(dim, shift), value)
    return int(value)


@plain(operator.getitem)
def _getitem(call: Build, x: Any, index: Any) -> Value:
    if isinstance(x, (tuple, list)):
        picked = x[call.constant(index, "index")]
        return tuple(call.operand(t).form for t in picked) if isinstance(picked, (tuple, list)) else picked.form
    operand, dim = call.same_format(x), 0
    shape = list(operand.shape)
    for item in index[1:]:
        if item is None:
            continue
        dim += 1
        every = range(shape[dim - 1])
        taken = every[item] if isinstance(item, slice) else every[every[item] :][:1]
        operand = Operand(call.piece(operand, dim, taken), operand.shape, operand.dtype)
        shape[dim - 1] = len(taken)
        operand = Operand(operand.form, tuple(shape), operand.dtype)
    return call.reshaped(operand.form, operand.shape, call.shape)


def _split(call: Build, x: Operand, *parts: Any, dim: int | None = None) -> Value:
    # The last argument is the dimension where there are as many as can be, the sizes of the pieces say the rest.
    single = "unbind" in call.name
    at = dim if dim is not None else parts[-1] if len(parts) > (0 if single else 1) else 0
    (cut_at,) = call.dims(call.same_format(x), at)
    sizes = [1 if single else shape[cut_at - 1] for shape in call.shapes]
    if sum(sizes) != x.shape[cut_at - 1]:
        raise call.refuse(f"expected pieces that do not overlap, got sizes {sizes} of {x.shape[cut_at - 1]} entries")
    values, begin = [], 0
    for size, after in zip(sizes, call.shapes, strict=True):
        piece = call.piece(x, cut_at, range(begin, begin + size))
        before = (*x.shape[: cut_at - 1], size, *x.shape[cut_at:])
        values.append(call.reshaped(piece, before, after))
        begin += size
    return tuple(values)


plain(torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split", place=along(2, default=0))(_split)
plain(torch.unbind, "unbind", place=along(1, default=0))(_split)


@plain(F.pad, place=behind(lambda x, pad, *rest: len(pad) // 2))
def _pad(call: Build, x: Operand, pad: Any, mode: str = "constant", value: Any = None) -> int:
    sizes = call.constant(pad, "padding")
    plain = call.constant(value, "value") in (None, 0) or call.bounding
    if mode != "constant" or not plain or len(sizes) // 2 >= call.operand(x).ndim:
        raise call.refuse(f"expected zeros around dimensions other than the batch, got {mode!r} {value} by {pad!r}")
    return call.add(Pad(*sizes), x)


# Sums, and products with constants.


@plain(
    *(operator.add, operator.sub, operator.iadd, operator.isub),
    *(torch.add, torch.sub, torch.subtract, "add", "add_", "sub", "sub_"),
    place=joined,
)
def _add(call: Build, x: Any, y: Any, *, alpha: Any = 1) -> int:
    sign = -1 if "sub" in call.name else 1
    weight = call.number(alpha, "alpha")
    if isinstance(x, Operand) and isinstance(y, Operand):
        if float(weight) == 1:
            return call.add(Add(1, sign), call.broadcast(x), call.broadcast(y))
        return call.then(Add(1, sign), call.broadcast(x).form, call.elementwise(y, scale=weight))
    if isinstance(x, Operand):
        return call.elementwise(x, shift=sign * weight * call.shift(y))
    return call.elementwise(y, scale=sign * weight, shift=call.shift(x))


@plain(operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", place=joined)
def _mul(call: Build, x: Any, y: Any) -> int:
    if isinstance(x, Operand) and isinstance(y, Operand):
        return call.add(call.named(Product()), call.broadcast(x), call.broadcast(y))
    moving, constant = (x, y) if isinstance(x, Operand) else (y, x)
    return call.elementwise(moving, scale=call.number(constant, "factor"))


@plain(operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_", place=joined)
def _div(call: Build, x: Any, y: Any) -> int:
    if call.bounding:
        smallest = call.number(y, "divisor").abs().nan_to_num(nan=0.0).amin()
        return call.scale(call.broadcast(x), reciprocal_up(float(smallest)))
    return call.elementwise(x, scale=call.number(y, "divisor", lambda divisor: 1 / divisor))


@plain(operator.neg, torch.neg, "neg", "neg_", place=viewed)
def _neg(call: Build, x: Operand, *, out: Any = None) -> int:
    return call.elementwise(x, scale=-1 - call.like)


@plain(operator.matmul, torch.matmul, "matmul", torch.mm, "mm", torch.bmm, "bmm", place=multiplied)
def _matmul(call: Build, x: Any, y: Any) -> int:
    if isinstance(x, Operand) and isinstance(y, Operand):
        if x.ndim < 3 or x.ndim != y.ndim or x.shape[:-2] != y.shape[:-2]:
            raise call.refuse(f"expected matrices of each sample, got shapes {x.shape} and {y.shape}")
        return call.then(call.named(MatrixProduct(x.shape[-2], x.shape[-1], y.shape[-1])), x.form, y.form)
    moving, constant = (x, y) if isinstance(x, Operand) else (y, x)
    matrix = call.number(constant, "matrix", axes=2)
    left = moving is y
    # From the left, a matrix mixes dimension -2, which is the batch of a tensor (B, n).
    if matrix.ndim != 2 or call.operand(moving).ndim < (3 if left else 2):
        raise call.refuse(f"expected a matrix that leaves the batch alone, got {tuple(matrix.shape)}")
    matrix = matrix.clone() if left else matrix.T.contiguous()
    layer = with_tensors(call, nn.Linear(matrix.shape[1], matrix.shape[0], device="meta"), weight=matrix, bias=None)
    if not left:
        return call.add(layer, moving)
    order = list(range(1, moving.ndim))
    order[-2:] = order[:-3:-1]
    turned = call.then(layer, call.add(Permute(*order), moving))
    return call.then(Permute(*order), turned)


# Several values beside each other, and reductions.


@plain(torch.cat, torch.concat, torch.concatenate, place=along(1, default=0))
def _cat(call: Build, tensors: Any, dim: int = 0) -> int:
    moving = call.moving(*tensors) if call.bounding else [t for t in tensors if isinstance(t, Operand)]
    (at,) = call.dims(moving[0], dim)
    if call.bounding or len(moving) == len(tensors):
        return call.add(Concatenate(at), *moving)
    # Constants before and behind moving values: zeros around these, and a shift.
    here = [isinstance(t, Operand) for t in tensors]
    first, stop, sizes = here.index(True), len(here) - here[::-1].index(True), [t.shape[at - 1] for t in tensors]
    if not all(here[first:stop]):
        raise call.refuse("expected constants before or behind what depends on the input, got some in between")
    joined = call.add(Concatenate(at), *moving) if len(moving) > 1 else moving[0].form
    padding = (*(0, 0) * (len(call.shape) - at), sum(sizes[:first]), sum(sizes[stop:]))
    numbers = [call.like.expand(t.shape) if isinstance(t, Operand) else call.number(t, "tensor") for t in tensors]
    padded = Operand(call.then(Pad(*padding), joined), call.shape, call.dtypes[0])
    return call.elementwise(padded, shift=torch.cat(numbers, at - 1))


@plain(torch.stack)
def _stack(call: Build, tensors: Any, dim: int = 0) -> int:
    given = call.moving(*tensors)
    at = dim % (given[0].ndim + 1)
    if at == 0:
        raise call.refuse(f"expected a new dimension behind the batch, got {dim}")
    values = [call.reshaped(x.form, x.shape, (*x.shape[: at - 1], 1, *x.shape[at - 1 :])) for x in given]
    return call.then(Concatenate(at), *values)


@plain(torch.maximum, torch.fmax, "maximum", torch.max, place=joined)
def _maximum(call: Build, x: Any, y: Any) -> int:
    return call.add(Maximum(), *map(call.broadcast, call.moving(x, y)))


@plain(torch.minimum, torch.fmin, "minimum", torch.min, place=joined)
def _minimum(call: Build, x: Any, y: Any) -> int:
    minus = [call.elementwise(t, scale=-1 - call.like) for t in call.moving(x, y)]
    return call.then(Affine(-1 - call.like[None], call.like[None]), call.then(Maximum(), *minus))


@plain(torch.mean, "mean", torch.sum, "sum", place=along(1))
def _mean(call: Build, x: Operand, dim: Any = None, keepdim: bool = False) -> int:
    dims = sorted(set(call.dims(call.operand(x), dim)))
    count = math.prod(x.shape[d - 1] for d in dims)
    if call.bounding and call.name.endswith("sum"):
        return call.scale(x, root(count))
    mean = call.add(Mean(*dims, keepdim=keepdim or not call.shape), x)
    if not call.shape:
        mean = call.reshaped(mean, (1,) * len(x.shape), ())
    if not call.name.endswith("sum"):
        return mean
    return call.then(Affine(call.like[None] + count, call.like[None]), mean)


@plain(torch.clamp, torch.clip, "clamp", "clamp_", "clip", place=joined)
def _clamp(call: Build, x: Operand, min: Any = None, max: Any = None) -> int:
    ends = [call.constant(end, "limit") for end in (min, max)]
    if call.bounding:
        return call.scale(call.broadcast(x), 1.0)
    if ends == [0, None]:
        return call.add(nn.ReLU(), x)
    given = [end for end in ends if end is not None]
    if not given or not all(type(end) in (int, float) and math.isfinite(end) for end in given):
        raise call.refuse(f"expected numbers as limits, got {min} and {max}")
    if len(given) == 2:
        return call.add(nn.Hardtanh(float(given[0]), float(given[1])), call.broadcast(x))
    # a + relu(x - a), or a - relu(a - x)
    limit, sign = call.like + given[0], call.like + (1 if max is None else -1)
    turned = call.then(nn.ReLU(), call.elementwise(x, scale=sign, shift=-sign * limit))
    return call.then(Affine(sign[None], limit[None]), turned)


@plain(torch.clamp_min, "clamp_min", "clamp_min_", place=joined)
def _clamp_min(call: Build, x: Operand, limit: Any) -> Value:
    return _clamp(call, x, limit)


# What has a constant, but no plain form.


@function_rule("repeat")
def _repeat(call: Build, x: Operand, *sizes: Any) -> int:
    return call.scale(x, root(math.prod(call.shape) // max(math.prod(call.operand(x).shape), 1)))


@function_rule(torch.flip, "flip")
def _flip(call: Build, x: Operand, *dims: Any) -> int:
    call.dims(call.operand(x), dims[0] if len(dims) == 1 else dims)
    return call.keep(x)


@function_rule(torch.amax, torch.amin, torch.logsumexp, "amax", "amin", "logsumexp")
def _extreme(call: Build, x: Operand, dim: Any = (), keepdim: bool = False) -> int:
    # Of max: the change of the largest entry; of logsumexp: its gradient is a softmax, of norm at most 1.
    call.dims(call.operand(x), dim if dim != () else None)
    return call.keep(x)


@function_rule(torch.abs, operator.abs, "abs", "abs_", torch.sin, torch.cos, "sin", "cos", torch.atan, "atan")
def _slope_one(call: Build, x: Operand) -> int:
    return call.keep(x)


@function_rule(torch.clamp_max, "clamp_max", "clamp_max_")
def _clamp_max(call: Build, x: Operand, limit: Any) -> int:
    call.constant(limit, "limit")
    return call.scale(call.broadcast(x), 1.0)


def _structure_constant(module: nn.Module, input_shape: Shape | None) -> Tensor:
    if input_shape is None:
        raise NoRuleError(
            f"lipschitz: expected an input_shape, because {type_name(type(module))} has a forward pass of its own that "
            "has to be traced, got none: lipkit.lipschitz(network, input_shape=(3, 32, 32)), for instance"
        )
    return lipschitz(structure(module, input_shape, own=True), input_shape)


def _structure_export(module: nn.Module, input_shape: Shape) -> nn.Module:
    chain = structure(module, input_shape)
    network = export_plain(chain, input_shape)
    # An export is in evaluation mode; the chain is of copies.
    check_same(network, chain.eval(), input_shape)
    return network


_TRACED.update(lipschitz=_structure_constant, export=_structure_export)
