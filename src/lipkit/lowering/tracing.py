"""A network as a graph of calls (torch.fx), traced for inputs of one shape.

The sizes of one sample are known while tracing, so that control flow which depends on them (shape checks, for
instance) is followed; the size of the batch and all values stay symbols, and control flow on them is refused, even if
the forward pass catches the error. Values made from the size of the batch are marked (`dependence`).
"""

from __future__ import annotations

import operator
import os.path
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partialmethod, reduce
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lipkit.errors import LipkitError, NoRuleError, ShapeError, first_line, lacks_memory
from lipkit.lowering.composed import COMPOSED
from lipkit.lowering.patched import einops_by_torch, replaced
from lipkit.modules.activations import ACTIVATIONS
from lipkit.modules.guarding import type_name
from lipkit.modules.network import Network, first_floating
from lipkit.modules.plain import bounded
from lipkit.modules.registry import TRACED

# A graph is traced and run for these two batch sizes. The dimension in which a tensor's two sizes differ is its batch.
BATCHES = (2, 3)
# Attributes and methods that do not depend on a tensor's values.
METADATA = ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout", "itemsize")
METADATA_METHODS = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "get_device")
# Functions that make a new tensor from the metadata of an existing one.
LIKE = (torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like)
LIKE_METHODS = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
# Those of the above that do not depend on the batch size either.
_STATIC = ("ndim", "dtype", "device", "requires_grad", "is_cuda", "layout", "itemsize", *LIKE_METHODS)
_STATIC_METHODS = ("dim", "is_floating_point", "is_complex", "get_device")

# How a value depends on the input: on its values; it is the batch size; it has one equal row for each sample; or it
# depends on the batch size in another way.
VALUES, SIZE, ROWS, BATCH = "values", "size", "rows", "batch"
# Functions that make a given number of equal rows, functions and modules that keep rows equal (also beside constants),
# and those of these that take sizes. A convolution, for instance, may run along the batch. Along it a softmax depends
# on its size, which two runs show; for cuts and norms `lipkit.lowering.observe` looks at many rows.
_FILLED = (torch.zeros, torch.ones, torch.full, "new_zeros", "new_ones", "new_full", "expand", "repeat", torch.tile,
           "tile", torch.broadcast_to, "broadcast_to", torch.repeat_interleave, "repeat_interleave")  # fmt: skip
_SIZED = ("view", "reshape", torch.reshape)
_ROWWISE = (*_SIZED, "clone", "contiguous", "detach", "to", "type", "type_as", "float", "double", "add_", "mul_",
            "add", "sub", "mul", "div", operator.add, operator.sub, operator.mul, operator.truediv, torch.cat,
            "expand", "repeat", operator.neg, "neg", operator.pow, "pow", torch.exp, "exp", torch.sqrt, "sqrt", "clamp",
            torch.clamp, "transpose", "permute", "unsqueeze", torch.transpose, torch.permute, torch.unsqueeze,
            "flatten", "unflatten", operator.matmul, torch.matmul, "matmul", F.linear,
            operator.getitem, torch.stack, torch.chunk, "chunk", torch.split, "split", torch.unbind, "unbind",
            nn.Identity, nn.Dropout, nn.Linear, nn.LayerNorm, nn.Embedding, nn.Softmax, F.layer_norm, F.embedding,
            F.softmax, torch.softmax, "softmax", F.normalize, torch.where, "where", "masked_fill",
            operator.gt, operator.lt, operator.ge, operator.le, operator.eq, operator.ne, operator.invert, "bool",
            torch.cumsum, "cumsum",
            *(one for row in ACTIVATIONS.values() if row.functions for one in (row.kind, *row.functions)))  # fmt: skip


def dependence(graph: fx.Graph) -> dict[fx.Node, str]:
    """How the value of each node depends on the input; nodes with constant values are left out."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        note_dependence(node, found)
    return found


def note_dependence(node: fx.Node, found: dict[fx.Node, str]) -> None:
    """Add the dependence of ``node`` to ``found``, which holds all earlier nodes."""
    # Of a tensor y, x.to(y) and x.type_as(y) read the format.
    given = flat(node.args[:1] if node.target in ("to", "type_as") else (node.args, node.kwargs))
    hows = [found.get(a) if isinstance(a, fx.Node) else None for a in given] or [None]
    read = node.args[1] if node.target is getattr else node.target
    metadata = read in (METADATA if node.target is getattr else (*LIKE, *METADATA_METHODS, *LIKE_METHODS))
    allowed = {ROWS, None, *[SIZE] * (node.target in _SIZED and hows[0] == ROWS)}  # to give rows again
    # A call that reads the metadata of its first argument ignores its values; x.new_tensor(y) holds those of y.
    if node.op == "placeholder" or VALUES in hows[metadata:]:
        found[node] = VALUES
    elif node.op == "output" or not any(hows):
        return
    elif node.meta.get("batch") and BATCH not in hows:
        found[node] = SIZE
    elif node.meta.get("kind", node.target) in _ROWWISE and {*hows} <= allowed:
        found[node] = ROWS
    elif hows[0] in (VALUES, ROWS) and not any(hows[1:]):
        if read not in (*_STATIC, *_STATIC_METHODS):
            whole = node.target == "size" and not node.all_input_nodes[0].meta.get("varies")  # by cut rows
            found[node] = SIZE if whole else ROWS if node.target in LIKE[:-1] else BATCH
    else:
        made = [how for how in hows if how in (SIZE, BATCH)]
        filled = node.target in _FILLED and made == [SIZE]
        found[node] = ROWS if filled else BATCH


def flat(value: Any) -> list[Any]:
    """The items of nested tuples, lists and dictionaries, and the ends of slices."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    value = tuple(value.values()) if isinstance(value, dict) else value
    return [v for item in value for v in flat(item)] if isinstance(value, (tuple, list)) else [value]


def where(node: fx.Node) -> str:
    """Text for messages: the module that calls a node, and the line of its code, `` in 'path' (net.py:12)``."""
    return (f" in {node.meta['where']!r}" if node.meta.get("where") else "") + node.meta.get("line", "")


def fetch(root: nn.Module, path: str) -> Any:
    """The module, parameter or other attribute at a dotted path."""
    return reduce(getattr, path.split("."), root)


def evaluate(root: nn.Module, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out the call of one node."""
    if node.op == "get_attr":
        return fetch(root, str(node.target))
    if node.op == "call_module":
        return fetch(root, str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert node.op == "call_function"
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_leaf(module: nn.Module) -> bool:
    """True for a module that is one call of the graph (with a rule, or of torch); False if its own calls are traced."""
    kind = type(module)
    if kind in (nn.Sequential, Network, nn.Softmax):
        # A run of layers that multipliers bound together is one unit. The function of a softmax may have a mask.
        return isinstance(module, Network) and bool(module.multipliers())
    return bounded(kind) or (kind.__module__.startswith("torch.nn.modules") and kind not in TRACED)


class Root(nn.Module):
    """A module around the network, so that the network itself can be a leaf of the graph."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


# Folders of installed code.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Path:
    """Records the bytecode instructions that the network's own code executes inside the ``with`` block.

    Tracing does not see a condition such as ``isinstance(n, int) and len(range(n)) == 64`` on the batch size n. While
    tracing, n is a symbol, so the code takes another branch than in a run; comparing the two records shows it. The
    network's own code is that of its classes' Python modules, and all code that is not installed.
    """

    def __init__(self, root: nn.Module) -> None:
        homes = {one.__module__ for m in root.modules() for one in (*type(m).__mro__, type(m).forward)}
        self._own = {name for name in map(str, homes) if not _foreign(name)}  # None in code of ``exec``
        self._taken: dict[CodeType, list[int]] = {}
        self.paused = False  # True: nothing is recorded

    if sys.version_info >= (3, 12):  # there, the first call of a function under settrace may miss instructions

        def __enter__(self) -> Path:
            monitoring = sys.monitoring
            self._thread = threading.get_ident()  # events come from all threads
            free = [i for i in (4, 3, 5, 2, 1, 0) if monitoring.get_tool(i) is None]  # 0 to 2 are those of debuggers
            if not free:
                raise NoRuleError("expected a free tool of sys.monitoring to watch the forward pass, got none of six")
            self._tool = free[0]
            monitoring.use_tool_id(self._tool, "lipkit")
            monitoring.restart_events()  # of code that was foreign to another network
            monitoring.register_callback(self._tool, monitoring.events.INSTRUCTION, self._executed)
            monitoring.set_events(self._tool, monitoring.events.INSTRUCTION)
            return self

        def __exit__(self, *error: object) -> None:
            sys.monitoring.set_events(self._tool, 0)
            sys.monitoring.register_callback(self._tool, sys.monitoring.events.INSTRUCTION, None)
            sys.monitoring.free_tool_id(self._tool)

        def _executed(self, code: CodeType, offset: int) -> Any:
            if code not in self._taken and not self._follows(sys._getframe(1)):  # 1: the frame that executes ``code``
                return sys.monitoring.DISABLE
            if threading.get_ident() == self._thread and not self.paused:
                self._taken.setdefault(code, []).append(offset)
            return None

    else:

        def __enter__(self) -> Path:
            self._before = sys.gettrace()
            sys.settrace(self._called)
            return self

        def __exit__(self, *error: object) -> None:
            sys.settrace(self._before)

        def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
            if self.paused or not self._follows(frame):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._stepped

        def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode" and not self.paused:
                self._taken.setdefault(frame.f_code, []).append(frame.f_lasti)
            return self._stepped

    def _follows(self, frame: FrameType) -> bool:
        name = str(frame.f_globals.get("__name__"))
        installed = frame.f_code.co_filename.startswith(("<frozen", *_INSTALLED))
        return name in self._own or not (_foreign(name) or installed)

    def line(self, error: BaseException | None = None) -> str:
        """The line of the network's own code that runs now, or raised an error, `` (net.py:12)``; empty without one."""
        steps = [*traceback.walk_tb(error.__traceback__)][::-1] if error else traceback.walk_stack(sys._getframe())
        inside = takewhile(lambda step: step[0].f_code is not trace.__code__, steps)  # behind: the caller of lipkit
        own = ((frame.f_code.co_filename, number) for frame, number in inside if self._follows(frame))
        return next((f" ({os.path.basename(file)}:{number})" for file, number in own), "")

    def other(self, path: Path) -> str | None:
        """Name of the first function that both paths enter but execute differently; None if they agree."""
        both = (code for code in self._taken if code in path._taken)
        return next((code.co_qualname for code in both if self._taken[code] != path._taken[code]), None)


def _foreign(name: str) -> bool:
    return name.partition(".")[0] in ("builtins", "torch", "lipkit")


def batch_axis(few: Sequence[int], many: Sequence[int]) -> tuple[int, int] | None:
    """(dimension of the batch, entries per sample merged into it), from the sizes for both of `BATCHES`, or None."""
    found = [i for i, (m, n) in enumerate(zip(few, many, strict=False)) if m != n]
    if len(few) != len(many) or len(found) != 1 or few[found[0]] * BATCHES[1] != many[found[0]] * BATCHES[0]:
        return None
    return found[0], few[found[0]] // BATCHES[0]  # B inner entries for B samples


def sample(model: nn.Module, input_shape: tuple[int, ...], batch: int) -> Tensor:
    """Normal random inputs ``(batch, *input_shape)`` in the dtype of ``model``, always the same."""
    x = torch.randn(batch, *input_shape, generator=torch.Generator().manual_seed(0))
    return x.to(first_floating(model).dtype)


def trace(root: Root, input_shape: tuple[int, ...]) -> tuple[fx.Graph, str | None]:
    """The graph of a network for inputs of this shape, and the name of a function that runs differently when traced.

    That name is None if no function does. ``meta["where"]`` of a node is the path of the module that made it.
    """
    name = type(root.net).__qualname__
    x = sample(root, input_shape, BATCHES[0]), sample(root, input_shape, BATCHES[1])
    try:
        with torch.no_grad(), Path(root) as direct:
            root(x[0].clone())
    except Exception as error:  # the forward pass is the user's and may raise anything
        if isinstance(error, LipkitError) or lacks_memory(error):
            raise
        why, line = first_line(error), direct.line(error)
        if isinstance(error, TypeError) and not line:  # raised by the call itself
            raise NoRuleError(f"analyze: expected a forward pass of one tensor, got {name}, for which {why}") from error
        raise ShapeError(f"{name} does not accept inputs of shape {input_shape}: {why}{line}") from error
    try:
        with torch.no_grad(), _sizes_recorded(), einops_by_torch(_Proxy), Path(root) as symbolic:
            tracer = _Tracer(x, symbolic)
            graph = tracer.trace(root)
        if tracer.refusal is not None:  # caught by the forward pass
            raise tracer.refusal
        return graph, direct.other(symbolic)
    except fx.proxy.TraceError as error:
        raise NoRuleError(
            f"analyze: expected a forward pass without control flow on values or on the size of the batch, got "
            f"{name}, in which {first_line(error)}{symbolic.line(error)}"
        ) from error
    except Exception as error:  # the forward pass is the user's and may raise anything
        if isinstance(error, LipkitError) or lacks_memory(error):
            raise
        raise NoRuleError(
            "analyze: expected a forward pass that torch.fx can record, with symbols for values and the size of the "
            f"batch, got {name}, which raises {type(error).__name__}{symbolic.line(error)}: {first_line(error)}"
        ) from error


def _sizes_recorded() -> AbstractContextManager[None]:
    """Record functions, and methods of stored tensors, whose sizes are symbols: torch refuses torch.zeros(n, 4)."""

    def recorded(home: Any, name: str) -> Callable[..., Any]:
        function = getattr(home, name)
        kind, target = ("call_method", name) if home is Tensor else ("call_function", function)

        def call(*args: Any, **options: Any) -> Any:
            for n in flat(args):
                if isinstance(n, fx.Proxy):
                    return n.tracer.create_proxy(kind, target, args, options)
            return function(*args, **options)

        return call

    makers = ("zeros", "ones", "empty", "rand", "randn")
    places = [*((torch, name) for name in makers), (Tensor, "expand"), (Tensor, "repeat")]
    return replaced({place: recorded(*place) for place in places})


class _Proxy(fx.Proxy):
    """A symbolic tensor. Its sizes are numbers except for the batch; its in-place operators are recorded in place."""

    tracer: _Tracer
    __array_ufunc__ = None  # a number of numpy on the left leaves the call to the symbol, as it does to a tensor

    def _shape(self) -> tuple[int, ...] | None:
        """Shape for the sample batch; None if the value is not a tensor, or if its rank may depend on the batch."""
        value = self.tracer.value(self.node)
        return value.shape if isinstance(value, Tensor) and self.tracer.how.get(self.node) != BATCH else None

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return self.size()
        if name in ("dtype", "device") and isinstance(value := self.tracer.value(self.node), Tensor):
            return getattr(value, name)  # no symbol, which torch.finfo and ``x.device.type`` would not take
        if name in ("T", "mT"):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        shape = self._shape() if name == "ndim" else None
        return super().__getattr__(name) if shape is None else len(shape)

    def __len__(self) -> int:
        if (known := self.tracer.length(self.node)) is not None:
            return known
        return self.tracer.refuse("the length of a tensor, its batch, is asked for: in a shape, write x.shape[0]")

    def __iter__(self) -> Iterator[Any]:
        return self.tracer.iter(self)  # torch.fx unpacks ``a, b = x`` by other calls than torch

    def dim(self) -> Any:
        shape = self._shape()
        return super().__getattr__("dim")() if shape is None else len(shape)

    def size(self, dim: int | None = None) -> Any:
        value = self.tracer.value(self.node)
        if not isinstance(value, Tensor):
            return super().__getattr__("size")(*(() if dim is None else (dim,)))
        if dim is None:
            return tuple(self.size(d) for d in range(value.ndim))
        if self._shape() is not None and self.tracer.is_fixed(self.node, dim):
            return value.shape[dim]
        return self.tracer.create_proxy("call_method", "size", (self, dim), {})

    def _number(self) -> Any:
        self.tracer.refuse("a value, or what is made from the size of the batch, becomes a number of Python")

    __int__ = __float__ = _number

    def _changed(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    __iadd__, __isub__ = partialmethod(_changed, operator.iadd), partialmethod(_changed, operator.isub)
    __imul__, __itruediv__ = partialmethod(_changed, operator.imul), partialmethod(_changed, operator.itruediv)

    def __setitem__(self, index: Any, value: Any) -> None:
        # The tensor changes: found, like every other change in place, when the graph is run.
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


class _Tracer(fx.Tracer):
    def __init__(self, x: tuple[Tensor, Tensor], watch: Path) -> None:
        super().__init__()
        self._x, self._watch = x, watch
        self._values: dict[fx.Node, tuple[Any, Any]] = {}
        self._static: set[fx.Node] = set()
        self.how: dict[fx.Node, str] = {}
        self.refusal: fx.proxy.TraceError | None = None
        self._evaluating = False
        self._path: list[str] = []

    def refuse(self, why: str) -> NoReturn:
        """Raise an error, which `trace` raises again if the forward pass catches it."""
        self.refusal = fx.proxy.TraceError(why)
        raise self.refusal

    def value(self, node: fx.Node, batch: int = 0) -> Any:
        """The value of a node for one of the sample batches."""
        if node not in self._values:
            assert node.op == "get_attr"
            self._values[node] = (self._computed(lambda: fetch(self.root, str(node.target))),) * 2
        return self._values[node][batch]

    def is_fixed(self, node: fx.Node, dim: int) -> bool:
        """True if this size of a tensor is the same for every batch."""
        if node not in self.how:
            return True
        few, many = (self.value(node, batch) for batch in (0, 1))
        found = batch_axis(few.shape, many.shape) if isinstance(many, Tensor) else None
        return found is not None and dim % few.ndim != found[0]

    def _evaluated(self, node: fx.Node, batch: int) -> Any:
        given = fx.node.map_arg((node.args, node.kwargs), lambda n: self.value(n, batch))
        return self._computed(lambda: evaluate(self.root, node, given[0], given[1]))

    def _computed(self, call: Callable[[], Any]) -> Any:
        self._evaluating = True
        try:
            return call()
        finally:
            self._evaluating = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        return super().create_arg(a.tolist() if isinstance(a, (np.generic, np.ndarray)) else a)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Proxy:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            # The graph does not record autocast: its runs would compute in another format.
            raise NoRuleError("analyze: expected a forward pass without torch.autocast, got one that enters it")
        if kind in ("call_function", "call_method") and target in COMPOSED:
            name = getattr(target, "__name__", target).lstrip("_")
            self._path.append(".".join((*filter(None, self._path[-1:]), name)))
            try:
                return COMPOSED[target](*args, **kwargs)
            except NoRuleError as error:
                raise NoRuleError(f"analyze: at {self._path[-1]!r}{self._watch.line()}: {error}") from None
            except (TypeError, ValueError) as error:
                what = "expected arguments that its rule covers, got other ones"
                raise NoRuleError(f"analyze: at {self._path[-1]!r}{self._watch.line()}: {what}: {error}") from error
            finally:
                self._path.pop()
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        node = proxy.node
        node.meta["where"] = self._path[-1] if self._path else ""
        node.meta["line"] = self._watch.line()
        if kind == "call_module":
            node.meta["kind"] = type(fetch(self.root, target))
        inputs = node.all_input_nodes
        note_dependence(node, self.how)
        named_static = node.target in _STATIC_METHODS or (node.target is getattr and node.args[1] in _STATIC)
        if node.op == "get_attr" or named_static or (inputs and all(n in self._static for n in inputs)):
            self._static.add(node)
        if node.op == "placeholder":
            self._values[node] = (self._x[0].clone(), self._x[1].clone())
        elif node.op != "output":
            hows = [self.how.get(n) for n in inputs]
            found, more = self._evaluated(node, 0), None
            self._watch.paused = True  # `Path` records one run of the network
            with suppress(Exception):  # what fails for another batch is refused when the graph runs
                more = self._evaluated(node, 1)
            self._watch.paused = False
            self._values[node] = found, more
            if target in (operator.floordiv, operator.mul) and hows == [SIZE] and type(found) is int:
                few, many = BATCHES
                # An integer times the size of the batch, for every batch: a product, or a quotient without rest.
                inner = self.value(inputs[0]) // few
                whole = target is operator.mul or (type(args[1]) is int and inner % args[1] == 0)
                node.meta["batch"] = whole and found > 0 and found % few == 0 and more == found // few * many
                note_dependence(node, self.how)
        return proxy

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._evaluating:
            return forward(*args, **kwargs)
        if m not in (self.submodule_paths or {}):  # in no module: nn.ReLU()(x) is what it calls
            if next(m.parameters(), None) is not None:
                raise NoRuleError(
                    f"expected every layer in the model, got {type_name(type(m))} outside it: put the layers of a "
                    "list or dict into nn.ModuleList or nn.ModuleDict, or they are neither trained nor saved with it"
                )
            return forward(*args, **kwargs)
        self._path.append(self.path_of_module(m).removeprefix("net").removeprefix("."))  # "net": of `Root`
        try:
            if type(m) is Network and not is_leaf(m):
                # Its own forward pass checks the input shape, which runs of the whole network do too.
                return reduce(lambda x, child: child(x), m, *args)
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._path.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    def to_bool(self, obj: fx.Proxy) -> bool:
        if obj.node in self._static and obj.node not in self.how:
            # Recorded as a call, so that runs of the graph see the value after in-place calls.
            return bool(self.value(self.create_proxy("call_function", operator.truth, (obj,), {}).node))
        return self.refuse("a value, or what is made from the size of the batch, decides what is computed")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        if (known := self.length(obj.node)) is None:
            return self.refuse("a tensor, or what is made from the size of the batch, is iterated over")
        items: Any = obj.unbind(0) if isinstance(self.value(obj.node), Tensor) else obj
        return iter([operator.getitem(items, i) for i in range(known)])

    def length(self, node: fx.Node) -> int | None:
        """The number of items of a value; None if it may depend on the batch."""
        value = self.value(node)
        if isinstance(value, Tensor):
            return len(value) if value.ndim and self.is_fixed(node, 0) else None
        return len(value) if isinstance(value, (tuple, list)) and self.how.get(node) != BATCH else None
