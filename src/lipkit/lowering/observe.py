"""The nodes of a graph as it runs: sizes, constants, and which tensors are overwritten in place.

A graph records values, but an in-place call changes every tensor that shares its memory. Two runs with batches of
different size show which: calls that overwrite are found by the version counters of the tensors, whatever their name.
What runs is an independent copy with constant weights: weight and spectral normalisation become plain numbers.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
import pickle
import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.spectral_norm import remove_spectral_norm as remove_spectral_hook
from torch.nn.utils.weight_norm import WeightNorm
from torch.nn.utils.weight_norm import remove_weight_norm as remove_weight_hook

from lipkit.errors import LipkitError, NoRuleError, ShapeError, first_line
from lipkit.linalg.transforms import normalisations
from lipkit.lowering.calls import Calls, difference, tensors
from lipkit.lowering.tracing import BATCHES, ROWS, VALUES, Path, Root, batch_axis, dependence, evaluate, flat, trace
from lipkit.modules.guarding import guard, refuse_wrapper, type_name

# In evaluation mode the weight is a function of stored numbers alone, which is all that is used of them.
PARAMETRIZATIONS = normalisations()


def constant_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose normalised weights are the numbers that its forward pass uses now.

    Parametrized (``torch.nn.utils.parametrizations``) and hook-based spectral and weight normalisation are carried
    out; ``model`` is left as it is. The copy is on the CPU.

    Raises:
        NoRuleError: a wrapper such as DataParallel; any other parametrization, hook, or method replaced on an
            instance; spectral normalisation in training mode, where each forward pass changes the weight; a module
            that cannot be copied.

    >>> layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    >>> type(constant_copy(layer))
    <class 'torch.nn.modules.linear.Linear'>
    """
    if not isinstance(model, nn.Module):
        raise NoRuleError(f"analyze: expected an nn.Module, got {type(model).__qualname__}")
    for name, module in model.named_modules():
        refuse_wrapper(module, f"{_at(name)}analyze")
        if isinstance(module, torch.jit.ScriptModule):
            raise NoRuleError(
                f"{_at(name)}analyze: expected modules in Python, got {type(module).__qualname__}: pass the network "
                "that it was made from"
            )
    try:
        twin = copy.deepcopy(model, computed_tensors(model))
    except Exception as error:  # the module is the user's and may raise anything
        raise NoRuleError(
            f"analyze: expected a module that can be copied, got {type(error).__name__}: {first_line(error)}"
        ) from error
    if not _same_numbers(model, twin):
        raise NoRuleError(
            "analyze: expected a module whose copy holds the same modules and numbers, got "
            f"{type(model).__qualname__}, whose copy by copy.deepcopy differs: see its __deepcopy__ or __reduce__"
        )
    for name, module in list(twin.named_modules()):
        _materialise(name, module)
    for name, module in twin.named_modules():
        try:
            guard(module)
        except NoRuleError as error:
            raise NoRuleError(f"{_at(name)}{error}") from None
    return twin.requires_grad_(False).cpu()


def computed_tensors(model: nn.Module) -> dict[int, object]:
    """Copies of the tensors that deepcopy refuses: results of a computation, as hook-based weights are."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return memo


def _same_numbers(model: nn.Module, twin: nn.Module) -> bool:
    first, second = (
        {
            **{f"type of {name}": type_name(type(module)) for name, module in one.named_modules()},
            **_kept(one, (*model.modules(), *twin.modules())),
        }
        for one in (model, twin)
    )
    return first.keys() == second.keys() and all(_equal(value, second[name]) for name, value in first.items())


def _materialise(name: str, module: nn.Module) -> None:
    if parametrize.is_parametrized(module):
        lists = module.parametrizations
        for tensor_name in list(lists):  # type: ignore[arg-type]
            for kind in lists[tensor_name]:  # type: ignore[index]
                if type(kind) not in PARAMETRIZATIONS:
                    raise NoRuleError(
                        f"{_at(name)}parametrization {type(kind).__qualname__} of {tensor_name!r}: expected spectral "
                        "or weight normalisation or orthogonal of torch.nn.utils.parametrizations: make the weight "
                        "constant with lipkit.convert(model, None, input_shape=...)"
                    )
                if type(kind).__name__ == "_SpectralNorm" and kind.training:
                    raise _still_changing(name)
        carry_out(module)
    for hook in list(module._forward_pre_hooks.values()):
        if type(hook) is SpectralNorm:
            if module.training:
                raise _still_changing(name)
            remove_spectral_hook(module, hook.name)
        elif type(hook) is WeightNorm:
            remove_weight_hook(module, hook.name)


def carry_out(module: nn.Module) -> None:
    """Make the parametrized tensors of ``module`` plain numbers; a module that it was copied from stays as it is."""
    # A copy shares the class that holds the parametrized tensors as properties, which torch takes out of the class.
    kind = type(module)
    module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    for name in list(module.parametrizations):  # type: ignore[arg-type]
        parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def _still_changing(name: str) -> NoRuleError:
    return NoRuleError(
        f"{_at(name)}spectral normalisation: expected evaluation mode, got training mode, where each forward pass "
        "changes the weight; call .eval()"
    )


def _at(name: str) -> str:
    return f"at {name!r}: " if name else ""


def sample(model: nn.Module, input_shape: tuple[int, ...], batch: int) -> Tensor:
    """Normal random inputs ``(batch, *input_shape)`` in the dtype of ``model``, always the same."""
    floating = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    like = floating[0] if floating else torch.zeros(())
    x = torch.randn(batch, *input_shape, generator=torch.Generator().manual_seed(0))
    return x.to(like.dtype)


# The graph runs for `BATCHES`, the network itself for all of these.
SAMPLES = (1, 2, 3, 8, 65)
# Numbers in the inputs of the last run; larger ones leave it out.
LARGEST = 2**14


class Varies:
    """Stands for the size of the batch, and for constants that are made from it, whatever the runs agree on."""

    def __repr__(self) -> str:
        return "a value that depends on the size of the batch"


VARIES = Varies()


@dataclass(frozen=True)
class Rows(Varies):
    """A constant that is repeated for each sample along dimension ``axis``: one ``row``, of size 1 there."""

    row: Tensor
    axis: int


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that changes with the input, of sizes (*before, B inner, *after), B the size of the batch.

    Attributes:
        form: what a walk knows of it: its bound (`lipkit.modules.forms.Form`), or its number in a network.
        shape: of one sample: (*before, inner, *after), or (*before, *after) where ``inner`` is 1.
        dtype: its format.
        axis: the dimension of the batch; -1 where samples are not kept apart, and in a single run.
        inner: how many numbers of each sample are merged with the batch.
    """

    form: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int = 0
    inner: int = 1

    @property
    def ndim(self) -> int:
        """Dimensions of the value whose batch comes first."""
        return len(self.shape) + 1

    @property
    def rank(self) -> int:
        """Dimensions where it is computed."""
        return len(self.shape) + (self.inner == 1)

    @property
    def place(self) -> tuple[int, int, int]:
        """Where its batch is; (0, 1, n) if it comes first, alone."""
        return self.axis, self.inner, self.rank

    def plain(self, dim: int) -> int:
        """The place of a dimension in the value whose batch comes first."""
        return dim + 1 if dim < self.axis or self.inner > 1 else dim


@dataclass(frozen=True)
class Observed:
    """Values and outputs of a graph, as both runs agree on them.

    Attributes:
        values: for nodes that change with the input an :class:`Operand` without a form, a tuple of them, or another
            type's name; for the others their value, :class:`Rows` or :data:`VARIES`.
        how: of `lipkit.lowering.tracing.dependence`.
        outputs: of both runs.
        calls: of the second run (`lipkit.lowering.calls`).
        axes: for each of these calls, the dimension of the batch in each tensor of its result, if it has one.
    """

    values: dict[fx.Node, Any]
    how: dict[fx.Node, str]
    outputs: tuple[Any, Any]
    calls: list[tuple[Any, ...]]
    axes: list[list[int | None]]


def _changes_state(name: str, root: nn.Module) -> NoRuleError:
    return NoRuleError(
        "analyze: expected a forward pass that leaves parameters, buffers and whatever else the network keeps as they "
        f"are, got one that changes {name.removeprefix('net.')!r}{_hint(root)}"
    )


@dataclass
class _Run:
    values: dict[fx.Node, Any]
    rewrites: list[tuple[fx.Node, fx.Node]]
    output: Any
    calls: Calls


def observe(root: Root, graph: fx.Graph, input_shape: tuple[int, ...]) -> Observed:
    """Run the graph for two batch sizes and put the result of each in-place call where its tensor is read later.

    Changes ``graph``: afterwards every node means the value it has when it is made.

    Raises:
        NoRuleError: an in-place call changes the parameters, or a tensor that is read later in another form than the
            one that the call returns; the output is no tensor with one row per sample.
    """
    try:
        runs = [_run(root, graph, sample(root, input_shape, batch)) for batch in BATCHES]
    except LipkitError:
        raise
    except Exception as error:  # the calls are the user's and may raise anything
        raise NoRuleError(
            f"analyze: expected a forward pass for batches of any size, got one that fails for {BATCHES[0]} or "
            f"{BATCHES[1]} samples: {first_line(error)}"
        ) from error
    position = {node: i for i, node in enumerate(graph.nodes)}
    changed = list(dict.fromkeys((*runs[0].rewrites, *runs[1].rewrites)))
    # From the last call to the first: what is read after the last one becomes its result.
    for old, new in sorted(changed, key=lambda pair: -position[pair[1]]):
        for user in list(old.users):
            if position[user] > position[new]:
                user.replace_input_with(old, new)
    how = dependence(graph)
    values = {n: _merged(how.get(n), runs[0].values.get(n), runs[1].values.get(n)) for n in graph.nodes}
    # A condition is a constant; in-place calls may have changed it since.
    if any(n.target is operator.truth and (n in how or value is VARIES) for n, value in values.items()):
        raise NoRuleError(
            "analyze: expected a forward pass without control flow on values or on the size of the batch, got a "
            "condition on a tensor that in-place calls fill with them"
        )
    shapes = zip(runs[0].calls.shapes, runs[1].calls.shapes, strict=False)
    axes = [[(batch_axis(*both) or (None,))[0] for both in zip(*made, strict=False)] for made in shapes]
    return Observed(values, how, (runs[0].output, runs[1].output), runs[1].calls.made, axes)


def _run(root: Root, graph: fx.Graph, x: Tensor) -> _Run:
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(graph.nodes):
        last.update(dict.fromkeys(node.all_input_nodes, i))
    how = dependence(graph)
    live: dict[fx.Node, Any] = {}
    x = x.clone()
    run = _Run({}, [], None, Calls(x))
    with torch.no_grad(), run.calls.leaves(root):
        for i, node in enumerate(graph.nodes):
            given = fx.node.map_arg((node.args, node.kwargs), live.__getitem__)
            if node.op == "output":
                run.output = given[0][0]
                break
            if node.op == "placeholder":
                live[node] = x
            else:
                before = {n: [t._version for t in tensors(live[n])] for n in node.all_input_nodes}
                with run.calls:
                    live[node] = evaluate(root, node, given[0], given[1])
                for n, versions in before.items():
                    if versions != [t._version for t in tensors(live[n])]:
                        if n.op == "get_attr":
                            raise _changes_state(str(n.target), root)
                        run.rewrites += [(old, node) for old in _overwritten(node, n, live, last, i)]
            run.values[node] = _summary(live[node], how.get(node) == VALUES)
            live = {n: v for n, v in live.items() if last.get(n, -1) > i or n is node}
    return run


def _overwritten(
    node: fx.Node, changed: fx.Node, live: dict[fx.Node, Any], last: dict[fx.Node, int], now: int
) -> Iterator[fx.Node]:
    """The nodes read later that are, in whole, the tensor that ``node`` changed and returned."""
    result = live[node]
    memory = {t.untyped_storage().data_ptr() for t in tensors(live[changed])}
    for other, value in live.items():
        if other is node or last.get(other, -1) <= now:
            continue
        if not any(t.untyped_storage().data_ptr() in memory for t in tensors(value)):
            continue
        if not (isinstance(value, Tensor) and isinstance(result, Tensor) and _same_view(value, result)):
            raise NoRuleError(
                f"analyze: the in-place call {node.name!r}{_where(node)} changes the tensor {other.name!r}"
                f"{_where(other)} that is read again later: expected a call that leaves its input as it is "
                "(inplace=False, or the function without the underscore)"
            )
        yield other


def _same_view(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _where(node: fx.Node) -> str:
    return f" in {node.meta['where']!r}" if node.meta.get("where") else ""


def _summary(value: Any, dependent: bool) -> Any:
    if not dependent:
        return value.clone() if isinstance(value, Tensor) else value
    if isinstance(value, Tensor):
        return Operand(None, tuple(value.shape), value.dtype, -1)
    if isinstance(value, (tuple, list)):
        return [_summary(item, dependent) for item in value]
    return type(value).__name__


def _merged(how: str | None, a: Any, b: Any) -> Any:
    """The summaries of two runs as one."""
    if how == VALUES:
        if isinstance(a, Operand) and isinstance(b, Operand):
            axis, inner = batch_axis(a.shape, b.shape) or (-1, 1)
            merged = [inner] if inner > 1 else []
            shape = a.shape if axis < 0 else (*a.shape[:axis], *merged, *a.shape[axis + 1 :])
            return Operand(None, shape, a.dtype, axis if a.dtype == b.dtype else -1, inner)
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            return tuple(_merged(how, x, y) for x, y in zip(a, b, strict=True))
        return a if isinstance(a, str) else "pieces of the batch"
    if how == ROWS and isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype:
        axis, inner = batch_axis(a.shape, b.shape) or (0, 0)
        if inner == 1 and all(_equal(t, a.narrow(axis, 0, 1).expand_as(t)) for t in (a, b)):
            return Rows(a.narrow(axis, 0, 1), axis)
    if how:
        return VARIES
    return a if _equal(_contents(a, {}), _contents(b, {})) else VARIES


def traced(root: Root, input_shape: tuple[int, ...]) -> tuple[fx.Graph, str | None]:
    """The graph of a network that takes one tensor of this shape, and what of its code goes another way when traced.

    Raises:
        ShapeError: inputs that the network does not accept.
        NoRuleError: it takes not one tensor, or cannot be traced.
    """
    name = type(root.net).__qualname__
    try:
        with torch.no_grad(), Path(root) as direct:
            root(sample(root, input_shape, BATCHES[0]))
    except LipkitError:
        raise
    except TypeError as error:
        raise NoRuleError(f"analyze: expected a forward pass of one tensor, got {name}, for which {error}") from error
    except Exception as error:  # the forward pass is the user's and may raise anything
        raise ShapeError(f"{name} does not accept inputs of shape {input_shape}: {first_line(error)}") from error
    with Path(root) as symbolic:
        graph = trace(root, (sample(root, input_shape, BATCHES[0]), sample(root, input_shape, BATCHES[1])))
    return graph, direct.other(symbolic)


def check_outputs(
    root: Root, observed: Observed, input_shape: tuple[int, ...], model: nn.Module, other_way: str | None
) -> None:
    """Compare the runs of the graph with the network itself, for other batches and in the other modes of torch.

    Args:
        root: the copy that was traced.
        observed: the runs of its graph.
        input_shape: of one input.
        model: what was copied. It runs once, after all that would change it was refused.
        other_way: of `traced`.

    Raises:
        NoRuleError: the network draws random numbers, changes what it keeps, mixes samples, asks for the size of the
            batch or the mode, or is not the function of the graph.
    """
    x = sample(root, input_shape, BATCHES[1])
    more = torch.cat([x, sample(root, input_shape, SAMPLES[-1])])
    sizes = [n for n in SAMPLES if n < SAMPLES[-1] or n * math.prod(input_shape) <= LARGEST]
    before = _random_states()
    inference = _recorded(root, x, torch.inference_mode(), observed)
    kept = _kept(root)
    derivatives = _recorded(root, x, torch.enable_grad(), observed)
    batches: dict[int, Any] = {n: _alone(root, more[:n]) for n in sizes if n != len(x)}
    direct, calls = _recorded(root, x, torch.no_grad(), observed) or (None, [])
    batches[len(x)] = direct
    if before != _random_states():
        raise NoRuleError(
            f"analyze: expected a forward pass without random numbers, got one that draws them{_hint(root)}"
        )
    for name, value in _kept(root).items():
        if not _equal(value, kept.get(name)):
            raise _changes_state(name, root)
    if not isinstance(direct, Tensor) or not close(direct, observed.outputs[1]):
        raise NoRuleError(
            "analyze: expected the traced graph to compute the same as the network, got other outputs: its forward "
            "pass changes the network, or depends on the type of its argument"
        )
    if other := difference(calls, observed.calls):
        raise NoRuleError(
            f"analyze: expected the traced graph to call the same functions as the network, got other ones: {other}; "
            "its forward pass depends on the values or the type of its argument, or changes from call to call"
        )
    for few, many in pairwise(sizes):
        # The output of one sample may lack dimensions.
        if not close(batches[many][:few].flatten(), batches[few].flatten()):
            raise NoRuleError(
                "analyze: expected an output for each sample alone, got one that depends on the whole batch: "
                f"{few} and {many} samples differ"
            )
    for name, found in (("with and without derivatives", derivatives), ("in and outside inference mode", inference)):
        if found and not (isinstance(found[0], Tensor) and close(direct, found[0]) and not difference(calls, found[1])):
            raise NoRuleError(
                f"analyze: expected the same output {name}, got a forward pass that asks torch.is_grad_enabled() or "
                "torch.is_inference_mode_enabled(), or whether a tensor requires a gradient"
            )
    evaluated = _recorded(copy.deepcopy(root).eval(), x, torch.no_grad(), observed) if _hint(root) else None
    if evaluated and difference(calls, evaluated[1]):
        raise NoRuleError(f"analyze: expected the function of evaluation mode, got another one{_hint(root)}")
    if other_way:
        raise NoRuleError(
            f"analyze: expected a forward pass that goes the same way for a symbol and for a tensor, got {other_way}, "
            "which goes another one: it asks for the type of a value, such as the size of the batch"
        )
    strided: Any = direct
    with torch.no_grad(), suppress(Exception):  # a view of what is not contiguous may not exist
        strided = root(torch.stack((x, x), -1)[..., 0])
    if not close(direct, strided):
        raise NoRuleError(
            "analyze: expected the same output for an input that is not contiguous, got a forward pass that writes "
            "into what is a copy for some inputs and the input itself for others, as contiguous() is"
        )
    at = next((t.device for t in (*model.parameters(), *model.buffers())), x.device)
    try:
        with torch.no_grad():
            own = model(x.to(device=at))
    except Exception as error:  # the forward pass is the user's and may raise anything
        raise NoRuleError(
            f"analyze: expected a network that runs as its copy does, got {type(error).__name__}: {first_line(error)}"
        ) from error
    if not (isinstance(own, Tensor) and close(direct, own.cpu())):
        raise NoRuleError(
            "analyze: expected a network whose copy computes the same, got one that asks for the identity or the place "
            "of its own parts"
        )


def _hint(root: nn.Module) -> str:
    return " in training mode: call model.eval()" if any(m.training for m in [*root.modules()][1:]) else ""


def _random_states() -> tuple[Any, ...]:
    return bytes(torch.get_rng_state().numpy()), random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


def _alone(root: Root, x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            return torch.as_tensor(root(x.clone()))
    except Exception as error:  # the forward pass is the user's and may raise anything
        raise NoRuleError(
            f"analyze: expected a forward pass for batches of any size, got one that fails for {len(x)} "
            f"sample{'s' if len(x) > 1 else ''}: {first_line(error)}{_hint(root)}"
        ) from error


def _recorded(
    root: Root, x: Tensor, mode: AbstractContextManager[Any], observed: Observed
) -> tuple[Any, list[tuple[Any, ...]]] | None:
    """Output and calls of the network in a mode of torch; None where it forbids some, as in-place ones."""
    try:
        with mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers taken from weights that require a gradient
            for p in root.parameters():
                p.requires_grad_(torch.is_grad_enabled() and p.is_floating_point())
            given = x.clone().requires_grad_(torch.is_grad_enabled()).clone()
            calls = Calls(given, observed.axes)
            with calls.leaves(root), calls:
                return root(given), list(calls.made)
    except RuntimeError:
        return None
    finally:
        root.requires_grad_(False)


_PLAIN = vars(nn.Module()).keys() - {"training"}


def _kept(root: nn.Module, known: Iterable[nn.Module] = ()) -> dict[str, Any]:
    """Copies of what modules hold, and of what their own code reads elsewhere, by name; of ``known`` ones the type."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {id(module): module for module in (*root.modules(), *known)}
    for path, module in root.named_modules():
        own: dict[str, Any] = {}
        for kind in reversed(type(module).__mro__):
            own |= {} if kind.__module__.startswith(("builtins", "lipkit", "torch")) else vars(kind)
        own |= {name: value for name, value in vars(module).items() if name not in _PLAIN}
        for name, value in (own | module._parameters | module._buffers).items():
            found[f"{path}.{name}"] = _contents(value, seen)
    return found


def _contents(value: Any, seen: dict[int, Any]) -> Any:
    """The numbers, strings and tensors in a value, through containers, objects and functions, as nested lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (int, float, complex, str, bytes)):
        return int.__int__(value) if isinstance(value, int) else value  # sizes of batches are of a type of their own
    if id(value) in seen or isinstance(value, (type, ModuleType)):
        return type(value)
    seen[id(value)] = value
    parts: Any
    try:
        if isinstance(value, FunctionType):
            used, home = inspect.getclosurevars(value), value.__module__
            parts = [v for v in used.globals.values() if not isinstance(v, FunctionType) or v.__module__ == home]
            parts += [*used.nonlocals.values(), value.__defaults__, value.__kwdefaults__, vars(value)]
        elif isinstance(value, (tuple, list, dict)):
            parts = value.items() if isinstance(value, dict) else value
        elif isinstance(value, set):
            parts = sorted(value, key=repr)
        else:
            parts = [list(p) if hasattr(p, "__next__") else p for p in value.__reduce_ex__(4)[1:]]
    except Exception:  # what cannot be copied is not looked into
        return type(value)
    return [_contents(part, seen) for part in parts]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if type(a) not in (Tensor, nn.Parameter) or a.is_meta or a.layout is not torch.strided or a.is_quantized:
            return type(a) is type(b)  # refused wherever it holds a weight
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
    return type(a) is type(b) and bool(a == b or a != a)


def stays_float64(root: Root, graph: fx.Graph, input_shape: tuple[int, ...]) -> bool:
    """True if a copy of the network in float64 computes every value that depends on its input in float64.

    Casts to a fixed format do not, nor do products with tensors that are no parameters or buffers.
    """
    twin = copy.deepcopy(root).double()
    try:
        run = _run(twin, graph, sample(twin, input_shape, BATCHES[0]).double())
    except Exception:  # the calls are the user's and may raise anything
        return False
    summaries = flat([run.values.get(n) for n, how in dependence(graph).items() if how == VALUES])
    return all(s.dtype == torch.float64 for s in summaries if isinstance(s, Operand))


def close(a: Tensor, b: Tensor) -> bool:
    """True if two outputs are the same but for rounding, in whatever format and order of operations."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.double(), b.double()
    scale = float(a.nan_to_num(posinf=0, neginf=0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.02, atol=1e-3 * scale, equal_nan=True)
