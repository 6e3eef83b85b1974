"""``lipschitz`` and ``export``: open functions that read the rows of `lipkit.modules.plain`."""

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError, OptionError, ShapeError, first_line, interval, lacks_memory
from lipkit.linalg.matrices import all_finite
from lipkit.linalg.precision import SERIAL, check_underflow, without_autocast
from lipkit.modules.guarding import guard, refuse_wrapper, type_name
from lipkit.modules.network import Network, checked_shape, first_floating, flatten
from lipkit.modules.parametrised import settled
from lipkit.modules.plain import Plain, Shape, bounded, row_of, rules

# Modules of torch whose own forward pass is traced, as that of a user's module is.
TRACED = (
    *(nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.RMSNorm, nn.GLU, nn.CosineSimilarity),
    *(nn.PairwiseDistance, nn.Softmin, nn.Softmax2d, nn.Threshold, nn.Bilinear, nn.Fold, nn.LocalResponseNorm),
    *(nn.RNNCell, nn.GRUCell, nn.LSTMCell),
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
    *(nn.ConstantPad1d, nn.ConstantPad2d, nn.CircularPad1d, nn.CircularPad2d, nn.ZeroPad1d, nn.Unfold),
    *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad1d, nn.ReplicationPad2d),
)


def what_is_missing(module: nn.Module) -> str | None:
    """Why a module of torch has no rule, and what to write instead; None if neither is known."""
    kind = type_name(type(module))
    if bounded(type(module)):
        return None
    if kind.endswith(".LogSoftmax"):
        return "it shifts all logits by one number, which changes no class and no radius: leave it to the loss"
    if kind.startswith("torch.nn.modules.rnn."):
        gates = "reset and update gates" if "GRU" in kind else "input, forget, cell and output gates"
        return (
            f"its {gates} multiply values that both depend on the input, so it has no gain over all inputs: train a "
            "lipkit.layers.R2dn or Ren, whose gain is prescribed, or an nn.RNN; on a box, call its cell step by step"
        )
    if kind.endswith("Attention") or kind.startswith("torch.nn.modules.transformer."):
        return (
            "attention multiplies values that depend on the input and has a constant on a box only: in a forward pass "
            "of your own, call an nn.MultiheadAttention as attention(x, x, x)[0], or write it with torch.matmul and "
            "torch.softmax, and export with box=(low, high)"
        )
    return None


def _rule(module: nn.Module, function: str) -> Callable[[Any, Any], Any]:
    if not isinstance(module, nn.Module):
        raise NoRuleError(f"{function}: expected an nn.Module, got {type_name(type(module))}")
    refuse_wrapper(module, function)  # before its hooks are complained about
    guard(module)
    kind = type(module)
    for part, _ in flatten([module]) if kind is nn.Sequential else ():
        # Traced alone, a part that holds no numbers would run in float32, whatever the format of the others, and one
        # of einops must keep the batch apart, which the next one may do for it.
        odd = first_floating(part).dtype != first_floating(module).dtype or "einops." in type(part).__module__
        if odd and _rule(part, function) is LATER.get(function):
            return LATER[function]
    if (found := _answer(kind, function)) is not None:
        return found
    if kind in TRACED or (kind not in rules() and not kind.__module__.startswith("torch.nn.")):
        # Its own forward pass says what it computes.
        return LATER[function]
    if why := what_is_missing(module):
        raise NoRuleError(f"{function} has no rule for {type_name(kind)}: {why}")
    parents = [type_name(base) for base in kind.__mro__[1:] if _answer(base, function)]
    why = f" (a rule of its base {parents[0]} does not carry over: the forward pass may differ)" if parents else ""
    raise NoRuleError(
        f"{function} has no rule for {type_name(kind)}{why}: nothing is assumed to be 1-Lipschitz; register one with "
        f"lipkit.modules.{function}_rule, or replace the module by a layer that has one"
    )


def _answer(kind: type, function: str) -> Callable[[Any, Any], Any] | None:
    row = row_of(kind)
    if function == "export":
        return row.export or (export_copy if row.stored is not None and row.constant is not None else None)
    constant = row.constant
    return constant if constant is None or callable(constant) else lambda module, shape: constant


def export_copy(module: nn.Module, input_shape: Shape) -> nn.Module:
    """A copy of a module that is already plain. Options for which `lipschitz` has no rule raise its errors."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    if all(t.ndim < 2 for t in own):  # the proof of a matrix's norm takes long and is made where it is needed
        lipschitz(module, input_shape)
    output_shape(module, input_shape)
    plain: Any = copy.deepcopy(module)
    if hasattr(plain, "inplace"):
        plain.inplace = False  # a constant network leaves its input as it is
    return plain


# Functions that are registered later, by modules that import this one:
# "lipschitz", "export": of a module with its own forward pass (`lipkit.lowering.structure`);
# "limited": limits products to what a box can reach; "refused": refuses products without limits (`products`);
# "tight": adds the multipliers of LipSDP (`lipkit.certificates.gains`);
# "constant": copies a module with constant weights (`lipkit.lowering.copies`).
LATER: dict[str, Callable[..., Any]] = {}


def check_dims(module: nn.Module, input_shape: Shape | None, least: int, most: int = 9) -> None:
    """``ShapeError`` unless samples have ``least`` to ``most`` dimensions: torch may take the batch for channels."""
    if input_shape is not None and not least <= len(input_shape) <= most:
        dims = f"{least}" if least == most else f"at least {least}"
        name = "nn." * type(module).__module__.startswith("torch.nn.") + type(module).__name__
        raise ShapeError(f"{name}: expected {dims} dimensions without the batch, got {input_shape}")


def check_samples_apart(module: nn.Module, input_shape: Shape | None) -> None:
    """Refuse modules of torch that would mix samples of this shape, or take the batch for channels."""
    check_dims(module, input_shape, *row_of(type(module)).dims)
    if isinstance(module, nn.Softmax | nn.Flatten | nn.Unflatten):
        dim = module.start_dim if isinstance(module, nn.Flatten) else module.dim
        least, most = (1, 9) if input_shape is None else (len(input_shape),) * 2
        if type(dim) is not int or dim == 0 or not -least <= dim <= most:
            expected = "expected dimensions that leave the batch (dimension 0) alone"
            why = "its output would mix samples; count from 1" if dim is not None else "torch guesses it; give -1, say"
            got = f"got {dim!r} for inputs of shape {input_shape}: {why}"
            raise NoRuleError(f"nn.{type(module).__name__}: {expected}, {got}")


def lipschitz(module: nn.Module, input_shape: Shape | None = None, *, tight: bool = False) -> Tensor:
    r"""Upper bound of the l2 Lipschitz constant of ``module`` in exact arithmetic.

    .. math:: \|f(x) - f(y)\|_2 \le L \|x - y\|_2 \quad\text{for all } x, y

    Args:
        module: a module with a rule: lipkit's layers and models, and the ``torch.nn`` modules listed by
            `lipkit.modules.rules`; or one whose own forward pass can be traced down to such modules
            (`lipkit.lowering.structure`), which needs ``input_shape``.
        input_shape: shape of one input without the batch; some bounds need it, some get tighter.
        tight: bound runs of dense layers by LipSDP (`lipkit.certificates.tight`; seconds to minutes). A module that is
            not exported is exported first, in float64: narrower formats would round the folded weights.

    Returns:
        0-d float64, differentiable (a learnable gain has a gradient) unless ``tight``.

    Guarantee:
        Upper bound. For an exported network it is computed from the stored numbers in float64, rounding included,
        and does not rely on the layer that made them. It is ``inf`` if one of them is not finite. Every module has its
        own factor, with a derivative; `export` and `lipkit.analyze` fold batch norms first, so they can be smaller.

    Raises:
        NoRuleError: no rule, anything that :func:`guard` refuses, or a mode in which the module has no Lipschitz
            constant (BatchNorm or Dropout in training), anywhere inside.
        OptionError: ``torch.set_flush_denormal(True)``.
        ShapeError: a wrong or missing ``input_shape``.

    >>> float(lipschitz(nn.Sequential(nn.ReLU(), nn.LeakyReLU(0.1))))
    1.0
    """
    if tight:
        if "tight" not in LATER:
            raise OptionError("tight=True: expected lipkit.lipschitz, or lipkit.certificates to be imported")
        if type(module) is not Network:
            if input_shape is None:
                raise ShapeError("tight=True: expected an input_shape, such as (12,), or an exported network, got none")
            module = export(LATER["constant"](module).double(), checked_shape(input_shape))
        module = LATER["tight"](module)
    with without_autocast():
        module = settled(module)
        rule = _rule(module, "lipschitz")
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        check_underflow(workers=any(t.numel() >= SERIAL for t in own))
        shape = None if input_shape is None else checked_shape(input_shape)
        check_samples_apart(module, shape)
        value = rule(module, shape)
    for name, at in (("in_features", -1), ("in_channels", 0)):
        size = getattr(module, name, None) if bounded(type(module)) and not module._modules else None
        weight = getattr(module, "weight", None)  # what counts where it is stored: its description may be stale
        columns = weight.shape[1] if isinstance(weight, Tensor) and weight.ndim > 1 else None
        if size is not None and shape and shape[at] not in (size, columns):
            raise ShapeError(f"{type_name(type(module))}: expected {name}={size}, got inputs of shape {shape}")
    try:
        bound = torch.as_tensor(value, dtype=torch.float64).reshape(())
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, or several
        bound = torch.tensor(-1.0)
    if bool(bound < 0) or (isinstance(value, Tensor) and value.is_complex()):  # NaN passes, see below
        raise NoRuleError(f"the rule of {type_name(type(module))} gave {value!r}, expected one number >= 0")
    # Comparisons with NaN are all false, so NaN must not leave this function: it becomes an infinite bound.
    # A forward pass that is traced is bounded through its parts. Buffers of modules with parts may be claims, or masks.
    buffers = () if module._modules else module.buffers()
    own = () if rule is LATER.get("lipschitz") else (*module.parameters(), *buffers)
    known = all_finite(*own) and not bool(bound.isnan())
    return bound if known else torch.full_like(bound, math.inf)


def export(module: nn.Module, input_shape: Shape, *, box: tuple[float, float] | None = None) -> Network:
    """The function of ``module`` with constant weights, as a chain of plain modules in evaluation mode.

    This is the trust boundary: evaluation, certificates, attacks and deployment work on the result, and its bound is
    computed from its numbers. Batch normalisation after a convolution is folded into it.

    Args:
        module: a module with a rule, or one whose own forward pass can be traced (`lipkit.lowering.structure`).
        input_shape: shape of one input without the batch. The result accepts no other.
        box: (low, high) of every entry of the inputs that the network is for, its ``input_range``. Products of two
            values, such as those of attention, have a Lipschitz constant only in a box: the result limits the factors
            to the values that they have for inputs in it (`lipkit.modules.limits`), so that the result has a constant
            everywhere, and is the function of ``module`` for inputs in the box. None: no
            limits, and the range of a ``module`` that is exported already.

    Returns:
        :class:`lipkit.modules.Network`: ``torch.nn`` modules and those of :mod:`lipkit.modules`, independent of
        ``module``; nothing in it requires a gradient.

    Raises:
        NoRuleError: as :func:`lipschitz`.
        ShapeError: the module does not accept ``input_shape``.
        OptionError: a ``box`` that is not an interval, or parameters so large that a constrained weight is singular.

    >>> export(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval(), (2,))
    Network(
      input_shape=(2,)
      (0): Linear(in_features=2, out_features=2, bias=True)
    )
    """
    limits = None if box is None else interval("box", box)
    network = export_plain(module, input_shape)
    with without_autocast():
        output_shape(network, network.input_shape)  # a rule may not have run what it made
    if limits is None:
        LATER["refused"](network)
        network.input_range = module.input_range if isinstance(module, Network) else None
        return network
    return LATER["limited"](network, limits)


def export_plain(module: nn.Module, input_shape: Shape) -> Network:
    """:func:`export` without limits for products, and without refusing products that have none."""
    with torch.no_grad(), without_autocast():
        module = settled(module)
    rule = _rule(module, "export")
    cuda = sorted({p.device.index for p in module.parameters() if p.is_cuda})  # have random streams, too
    # Constructors draw random initial values, which are overwritten: the caller's random stream must not change.
    with torch.no_grad(), without_autocast(), torch.random.fork_rng(devices=cuda):
        try:
            shape = checked_shape(input_shape)
            check_samples_apart(module, shape)
            if not isinstance(made := rule(module, shape), nn.Module):
                raise NoRuleError(f"the export rule of {type_name(type(module))} gave {made!r}, expected a module")
            own, parts = ({*map(id, (*m.modules(), *m.parameters(), *m.buffers()))} for m in (module, made))
            # A copy of shared parts: a network takes gradients and training mode from what it holds.
            made = made if own.isdisjoint(parts) else copy.deepcopy(made)
            network = _generalised(Network([made], shape), type(module))
            buffers = {b.dtype for b in network.buffers() if b.is_floating_point()} - {torch.float64}  # as multipliers
            formats = buffers | {p.dtype for p in network.parameters()}
            if len(formats) > 1:  # constrained weights of a network of halves are float32: one format for all parts
                network = network.to(functools.reduce(torch.promote_types, formats))
            for tensor in (*network.parameters(), *network.buffers()):
                # In the memory format of files, as torch rounds differently in others. ``contiguous()`` would not do:
                # a 1 x 1 kernel counts as contiguous in two formats.
                tensor.data = tensor.clone(memory_format=torch.contiguous_format)
            if not all_finite(*network.parameters()) and all_finite(*module.parameters(), *module.buffers()):
                raise torch.linalg.LinAlgError("got NaN or infinity")
            return network
        except torch.linalg.LinAlgError as error:
            # I + Z is invertible, but beside a huge Z the identity is rounded away.
            largest = max((float(p.detach().abs().amax()) for p in module.parameters() if p.numel()), default=0.0)
            raise OptionError(
                f"export: the constrained weights of {type_name(type(module))} cannot be computed in float64 from "
                f"parameters of size {largest:.3g}: expected about 1e6 or less ({error})"
            ) from None


def export_part(module: nn.Module, input_shape: Shape) -> nn.Module:
    """:func:`export` of a part of a module: the one module of the chain, or the chain if it holds several."""
    network = export(module, input_shape)
    return network[0] if len(network) == 1 else network


def export_parts(parts: Iterable[nn.Module], input_shape: Shape) -> list[nn.Module]:
    """`export_part` of each of several modules that follow each other."""
    found: list[nn.Module] = []
    for part in parts:
        found.append(export_part(part, input_shape))
        input_shape = output_shape(found[-1], input_shape)
    return found


def _generalised(network: Network, kind: type[nn.Module]) -> Network:
    """``network``, made by the export rule of ``kind``, with each module that cannot be stored exported in turn."""
    partial = [type(m) is nn.Flatten and (m.start_dim, m.end_dim) != (1, -1) for m in network]  # is not stored
    rows = [Plain(kind) if type(m) is kind else row_of(type(m)) for m in network]
    again = [row.export is not None and (row.stored is None or flat) for row, flat in zip(rows, partial, strict=True)]
    if not any(again):
        return network
    parts, shape = list[Network](), network.input_shape
    for i, (module, replaced) in enumerate(zip(network, again, strict=True)):
        parts.append(export_plain(module, shape) if replaced else Network([module], shape))
        multiplier = network.multiplier(i)
        if multiplier is not None and len(parts[-1]) == 1:
            parts[-1].carry(0, multiplier)
        shape = output_shape(module, shape)
    return Network(parts, network.input_shape)


def output_shape(module: nn.Module, *input_shapes: Shape) -> Shape:
    """Shape of the output for one input (a join: several) of this shape, found by running a batch of two zeros.

    Raises:
        ShapeError: the module does not accept that shape, or does not keep the samples of a batch apart.

    >>> output_shape(nn.Flatten(), (3, 4, 4))
    (48,)
    """
    like = first_floating(module)
    zeros = [torch.zeros(2, *shape, dtype=like.dtype, device=like.device) for shape in input_shapes]
    try:
        with torch.no_grad():
            y = module(*zeros)
    except ShapeError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if lacks_memory(error):  # the shape may be accepted
            raise
        name, shapes = type_name(type(module)), " and ".join(map(str, input_shapes))
        raise ShapeError(f"{name} does not accept inputs of shape {shapes}: {first_line(error)}") from None
    if not isinstance(y, Tensor) or y.ndim < 1 or len(y) != 2:
        got = tuple(y.shape) if isinstance(y, Tensor) else type_name(type(y))
        raise ShapeError(f"{type_name(type(module))}: expected one output per sample of a batch of 2, got {got}")
    return tuple(y.shape[1:])
