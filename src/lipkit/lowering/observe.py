"""The values of a graph's nodes as it runs: sizes, constants, and which tensors are overwritten in place.

The nodes of a graph stand for values, but an in-place call changes every tensor that shares its memory. Two runs with
batches of different size show these calls, whatever their name: they raise the version counters of tensors.
The network that runs is an independent copy with constant weights (`lipkit.lowering.copies`).
"""

import copy
import math
import operator
import pickle
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lipkit.errors import NoRuleError, rewording
from lipkit.lowering import tracing
from lipkit.lowering.calls import Calls, difference, tensors
from lipkit.lowering.copies import contents, contents_of, equal
from lipkit.lowering.tracing import BATCHES, ROWS, VALUES, Root, batch_axis, dependence, evaluate, flat, sample, where

# The network itself runs for all of these batch sizes, its graph only for `BATCHES`.
SAMPLES = (1, 2, 3, 8, 65)
# The largest batch is left out if its inputs have more numbers than this.
LARGEST = 2**14


class Varies:
    """A value that depends on the batch size, even where it is the same in both runs."""

    def __repr__(self) -> str:
        return "a value that depends on the size of the batch"


VARIES = Varies()


@dataclass(frozen=True, repr=False)
class Rows(Varies):
    """A constant tensor that repeats ``row`` for each sample along dimension ``axis``, where ``row`` has size 1."""

    row: Tensor
    axis: int


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that changes with the input, of sizes (*before, B inner, *after), B the size of the batch.

    Attributes:
        shape: of one sample: (*before, inner, *after), or (*before, *after) where ``inner`` is 1.
        dtype: its format.
        axis: the dimension of the batch; -1 if samples are mixed, or if only one run was recorded.
        inner: number of entries of each sample that are merged into the dimension of the batch.
        number: index of the value in the wiring; -1 before it is wired.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int = 0
    inner: int = 1
    number: int = -1

    @property
    def ndim(self) -> int:
        """Number of dimensions after the batch has been moved to the front."""
        return len(self.shape) + 1

    @property
    def rank(self) -> int:
        """Number of dimensions of the tensor that the network computes."""
        return len(self.shape) + (self.inner == 1)

    @property
    def place(self) -> tuple[int, int, int]:
        """Where the batch is: (axis, inner, rank). (0, 1, n): the first of n dimensions, nothing merged into it."""
        return self.axis, self.inner, self.rank

    def moved(self, dim: int) -> int:
        """Index of dimension ``dim`` after the batch has been moved to the front."""
        return dim + 1 if dim < self.axis or self.inner > 1 else dim


@dataclass(frozen=True)
class Observed:
    """Values and outputs of a graph, merged from the runs for both batch sizes.

    In ``values``, a tensor that depends on the input is an :class:`Operand` without number, several are a tuple, and
    anything else that depends on it is the name of its type. Values that depend on the batch size alone are
    :class:`Rows` or :data:`VARIES`. All others are constants, as they are.
    """

    values: dict[fx.Node, Any]
    how: dict[fx.Node, str]  # as `dependence` gives it
    outputs: tuple[Any, Any]  # of both runs
    calls: list[tuple[Any, ...]]  # of the second run
    axes: list[list[int | None]]  # for each call, the dimension of the batch in each tensor of its result


def _changes_state(name: str, root: nn.Module) -> NoRuleError:
    # torch.fx's name of tensors that no module holds
    held = not name.startswith("_tensor_constant")
    part = repr(name.removeprefix("net.")) if held else "a tensor that it neither keeps nor makes of its input"
    return NoRuleError(
        "analyze: expected a forward pass that leaves parameters, buffers and whatever else the network keeps as they "
        f"are, got one that changes {part}{_hint(root)}"
    )


@dataclass
class _Run:
    values: dict[fx.Node, Any]
    rewrites: list[tuple[fx.Node, fx.Node]]
    output: Any
    calls: Calls


def observe(root: Root, graph: fx.Graph, input_shape: tuple[int, ...]) -> Observed:
    """Run the graph for two batch sizes and put the result of each in-place call where its tensor is read later.

    Changes ``graph``: afterwards every node stands for its value before any later in-place call. Refuses calls that
    change parameters, or a tensor that is read later in another form than the call returns.
    """
    with _for_any_batch(f"{BATCHES[0]} or {BATCHES[1]} samples"):
        runs = [_run(root, graph, sample(root, input_shape, batch)) for batch in BATCHES]
    position = {node: i for i, node in enumerate(graph.nodes)}
    changed = list(dict.fromkeys((*runs[0].rewrites, *runs[1].rewrites)))
    # From the last call to the first: readers of the tensor after a call read the result of that call.
    for old, new in sorted(changed, key=lambda pair: -position[pair[1]]):
        for user in list(old.users):
            if position[user] > position[new]:
                user.replace_input_with(old, new)
    how, values = dict[fx.Node, str](), dict[fx.Node, Any]()
    for n in graph.nodes:
        tracing.note_dependence(n, how)
        values[n] = _merged(how.get(n), runs[0].values.get(n), runs[1].values.get(n))
        given = [values[m] for m in n.all_input_nodes if how.get(m) == ROWS]
        # A step function of 1 / B may be the same for both batch sizes and another for a third.
        if how.get(n) == ROWS and (VARIES in given or not _for_many_rows(n, values)):
            values[n] = VARIES
        n.meta["varies"] = values[n] is VARIES
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
        last.update(dict.fromkeys(node.all_input_nodes, i))  # the last reader wins
    how = dependence(graph)
    live: dict[fx.Node, Any] = {}
    x = x.clone()  # in-place calls may overwrite it
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
                if odd := [type(t).__name__ for t in tensors(live[node]) if type(t) not in (Tensor, nn.Parameter)]:
                    got = f"got a {odd[0]} from {node.name!r}{where(node)}, whose operations are its own"
                    raise NoRuleError(f"analyze: expected ordinary tensors, {got}: replace it by a torch.Tensor")
                if how.get(node) and isinstance(live[node], (np.ndarray, torch.UntypedStorage, torch.TypedStorage)):
                    raise NoRuleError(
                        f"analyze: expected tensors, got their memory from {node.name!r}{where(node)}, in which "
                        "changes cannot be seen"
                    )
                for n, versions in before.items():
                    if versions != [t._version for t in tensors(live[n])]:
                        if n.op == "get_attr":
                            raise _changes_state(str(n.target), root)
                        run.rewrites += [(old, node) for old in _overwritten(node, n, live, last, i)]
            run.values[node] = _summary(live[node], how.get(node) == VALUES)
            live = {n: v for n, v in live.items() if last.get(n, -1) > i or n is node}  # the rest is not read again
    return run


def _overwritten(
    node: fx.Node, changed: fx.Node, live: dict[fx.Node, Any], last: dict[fx.Node, int], now: int
) -> Iterator[fx.Node]:
    """The nodes, read later, that hold the same whole tensor as the one that ``node`` changed in place and returned.

    A later read of another view of the same memory is refused.
    """
    result = live[node]
    memory = {t.untyped_storage().data_ptr() for t in tensors(live[changed])}
    for other, value in live.items():
        if other is node or last.get(other, -1) <= now:
            continue
        if not any(t.untyped_storage().data_ptr() in memory for t in tensors(value)):
            continue
        both = isinstance(value, Tensor) and isinstance(result, Tensor)
        views = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (value, result)] if both else [0, 1]
        if views[0] != views[1]:
            raise NoRuleError(
                f"analyze: the in-place call {node.name!r}{where(node)} changes the tensor {other.name!r}"
                f"{where(other)} that is read again later: expected a call that leaves its input as it is "
                "(inplace=False, or the function without the underscore)"
            )
        yield other


def _summary(value: Any, dependent: bool) -> Any:
    if not dependent:
        return value.clone() if isinstance(value, Tensor) else value
    if isinstance(value, Tensor):
        return Operand(tuple(value.shape), value.dtype, -1)  # two runs will say where its batch is
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
            return Operand(shape, a.dtype, axis if a.dtype == b.dtype else -1, inner)
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            return tuple(_merged(how, x, y) for x, y in zip(a, b, strict=True))
        return a if isinstance(a, str) else "pieces of the batch"
    if how == ROWS and isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        rows = tuple(_merged(how, x, y) for x, y in zip(a, b, strict=True))
        return VARIES if any(one is VARIES for one in rows) else rows
    if how == ROWS and isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype:
        axis, inner = batch_axis(a.shape, b.shape) or (0, 0)
        if inner == 1 and all(equal(t, a.narrow(axis, 0, 1).expand_as(t)) for t in (a, b)):
            return Rows(a.narrow(axis, 0, 1), axis)
    if how:
        return VARIES
    return a if equal(contents(a, {}), contents(b, {})) else VARIES


def _for_many_rows(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """False if a call of rows may cut some off, or read several at once, for batches larger than `BATCHES`."""
    rows, many = values[node.all_input_nodes[0]], 2**20
    if not isinstance(rows, Rows) or node.target not in (F.normalize, operator.getitem, torch.split, "split"):
        return True
    given: Any = fx.node.map_arg((node.args[1:], node.kwargs), values.get)
    if node.target is F.normalize:  # the norm of many rows is above its eps
        return bool(given[1].get("dim", (*given[0][1:], 1)[0]) % rows.row.ndim != rows.axis)
    with suppress(Exception):  # of entries that a tensor chooses
        first = rows.row.to("meta").expand([many if d == rows.axis else -1 for d in range(rows.row.ndim)])
        return all(many in t.shape for t in tensors(evaluate(nn.Module(), node, (first, *given[0]), given[1])))
    return False


def check_outputs(
    root: Root, observed: Observed, input_shape: tuple[int, ...], model: nn.Module, other_way: str | None
) -> None:
    """Compare the runs of the graph with the network itself, for other batches and in the other modes of torch.

    Refused are networks that draw random numbers, change their own state, mix samples, ask for the size of the batch or
    the mode, or are not the function of the graph. The original ``model`` runs once, at the end, when everything that
    could change it has been refused.
    """
    x = sample(root, input_shape, BATCHES[1])
    more = torch.cat([x, sample(root, input_shape, SAMPLES[-1])])  # its first rows are x, whose outputs are known
    sizes = [n for n in SAMPLES if n < SAMPLES[-1] or n * math.prod(input_shape) <= LARGEST]
    before = _random_states()
    inference = _recorded(root, x, torch.inference_mode(), observed)
    kept = copy.deepcopy(contents_of(root))  # after one run, which may fill what is made on first use
    derivatives = _recorded(root, x, torch.enable_grad(), observed)
    changed = [name for name, value in contents_of(root).items() if not equal(value, kept.get(name))]
    batches: dict[int, Any] = {n: _alone(root, more[:n]) for n in sizes if n != len(x)}
    direct, calls = _recorded(root, x, torch.no_grad(), observed) or (None, [])
    batches[len(x)] = direct
    if before != _random_states():
        raise NoRuleError(
            f"analyze: expected a forward pass without random numbers, got one that draws them{_hint(root)}"
        )
    # After one run and after several, of which an even number may bring a sign back.
    changed += [name for name, value in contents_of(root).items() if not equal(value, kept.get(name))]
    if changed:
        raise _changes_state(changed[0], root)
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
    compared = [(f"{few} and {many} samples", batches[many][:few], batches[few]) for few, many in pairwise(sizes)]
    turned = _alone(root, more[: sizes[-1]].flip(0)).flip(0)  # the last samples of the largest batch stand in no other
    for what, one, other in (*compared, ("samples in the opposite order", batches[sizes[-1]], turned)):
        # Flat, because the output of a single sample may lack dimensions.
        if not close(one.flatten(), other.flatten()):
            raise NoRuleError(
                "analyze: expected an output for each sample alone, got one that depends on the whole batch: "
                f"{what} differ"
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

    def same_for(given: Tensor, kind: str, why: str) -> None:
        found: Any = direct
        with suppress(Exception):  # some views, and calls in place on a leaf, may fail
            found = root(given)
        if not close(direct, found):
            raise NoRuleError(
                f"analyze: expected the same output for an input that {kind}, got a forward pass that {why}"
            )

    back = [*range(x.ndim)][::-1]
    # With gaps, which sums do not keep, and with the last dimension first in memory, which they do keep.
    for laid in (torch.stack((x, x), -1)[..., 0], x.permute(back).contiguous().permute(back)):
        writes = "writes into what is a copy for some inputs and the input itself for others, as contiguous() is"
        with torch.no_grad():
            same_for(laid, "is not contiguous", writes)
    with torch.enable_grad():
        same_for(x.clone().requires_grad_(), "requires a gradient", "goes on after the error of a call in place")
    at = next((t.device for t in (*model.parameters(), *model.buffers())), x.device)  # the copy is on the CPU
    start = "analyze: expected a network that runs as its copy does, got "
    with torch.no_grad(), rewording(NoRuleError, start, Exception, named=True):
        own = model(x.to(device=at))
    if not (isinstance(own, Tensor) and close(direct, own.cpu())):
        raise NoRuleError(
            "analyze: expected a network whose copy computes the same, got one that depends on the identity or the "
            "location of its own parts"
        )


def _hint(root: nn.Module) -> str:
    return " in training mode: call model.eval()" if any(m.training for m in [*root.modules()][1:]) else ""


def _random_states() -> tuple[Any, ...]:
    return bytes(torch.get_rng_state().numpy()), random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


def _for_any_batch(given: str, end: str = "") -> AbstractContextManager[None]:
    """Rewords what the forward pass, which is the user's and may raise anything, raises for so many samples."""
    start = f"analyze: expected a forward pass for batches of any size, got one that fails for {given}: "
    return rewording(NoRuleError, start, Exception, end=end)


def _alone(root: Root, x: Tensor) -> Tensor:
    with torch.no_grad(), _for_any_batch(f"{len(x)} sample{'s' if len(x) > 1 else ''}", _hint(root)):
        return torch.as_tensor(root(x.clone()))


def _recorded(
    root: Root, x: Tensor, mode: AbstractContextManager[Any], observed: Observed
) -> tuple[Any, list[tuple[Any, ...]]] | None:
    """Output and calls of the network in a mode of torch; None if the mode forbids a call, such as an in-place one."""
    try:
        with mode, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers taken from weights that require a gradient
            for p in root.parameters():
                p.requires_grad_(torch.is_grad_enabled() and p.is_floating_point())
            given = x.clone().requires_grad_(torch.is_grad_enabled()).clone()  # no leaf: in-place calls may change it
            calls = Calls(given, observed.axes)
            with calls.leaves(root), calls:
                return root(given), list(calls.made)
    except RuntimeError:
        return None
    finally:
        root.requires_grad_(False)


def stays_float64(root: Root, input_shape: tuple[int, ...], output: Tensor) -> bool:
    """True if a copy of the network in float64 computes every value that depends on its input in float64.

    Casts to a fixed format prevent that, products with tensors that are neither parameters nor buffers, and code that
    asks for the format and gives another ``output`` for the first recorded batch.
    """
    twin = copy.deepcopy(root).double()
    try:
        graph, _ = tracing.trace(twin, input_shape)  # anew: a graph holds the formats that a forward pass asks for
        run = _run(twin, graph, sample(twin, input_shape, BATCHES[0]).double())
    except Exception:  # the calls are the user's and may raise anything
        return False
    summaries = flat([run.values.get(n) for n, how in dependence(graph).items() if how == VALUES])
    wide = all(s.dtype == torch.float64 for s in summaries if isinstance(s, Operand))
    return wide and close(run.output.to(output.dtype), output)


def close(a: Tensor, b: Tensor) -> bool:
    """True if two outputs agree within rounding: entry by entry within 2 % plus 1e-3 of the largest entry."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.double(), b.double()
    scale = float(a.nan_to_num(posinf=0, neginf=0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.02, atol=1e-3 * scale, equal_nan=True)
