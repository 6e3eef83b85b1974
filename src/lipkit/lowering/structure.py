"""A network with its own forward pass as a chain of modules, with a `Graph` wherever values branch.

The forward pass is traced (`lipkit.lowering.tracing`), run for two batch sizes and compared with the network
(`lipkit.lowering.observe`). Then its calls become modules (`lipkit.lowering.interpreter`): the network's own modules,
modules that compute a function (`lipkit.lowering.functional`), and modules that only move or join numbers
(`lipkit.lowering.functions`). Everything else is refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.linalg.precision import without_autocast
from lipkit.lowering.copies import constant_copy
from lipkit.lowering.interpreter import Interpreter
from lipkit.lowering.observe import close
from lipkit.lowering.tracing import BATCHES, Root, sample
from lipkit.modules.guarding import type_name
from lipkit.modules.plain import Shape
from lipkit.modules.registry import LATER, export_plain, lipschitz
from lipkit.modules.views import Reshape


def structure(model: nn.Module, input_shape: Shape, *, own: bool = False) -> tuple[nn.Sequential, Tensor]:
    """The forward pass of ``model`` as a chain of modules, and its outputs for a `tracing.sample` of ``BATCHES[1]``.

    Args:
        model: traced in the mode that it is in, on the CPU.
        input_shape: of one sample.
        own: the result calls the modules of ``model`` itself, so that bounds have derivatives; otherwise copies whose
            normalised weights (spectral, weight, orthogonal) are plain numbers.

    Raises:
        NoRuleError: a node has no plain form (the message names it and its module), or `lipkit.analyze` refuses it.
        ShapeError: the forward pass does not accept inputs of this shape.

    >>> class Residual(nn.Module):
    ...     def __init__(self): super().__init__(); self.body = nn.Linear(2, 2)
    ...     def forward(self, x): return torch.relu(x + self.body(x))
    >>> graph, last = structure(Residual(), (2,))[0]
    >>> list(graph.nodes), last
    ([Linear(in_features=2, out_features=2, bias=True), Add(1, 1)], ReLU())
    >>> [list(read) for read in graph.sources]
    [[0], [0, 1]]
    """
    function = "lipschitz" if own else "export"
    with torch.inference_mode(False), without_autocast(), torch.random.fork_rng(devices=[]):
        try:
            root = Root(constant_copy(model))
            lowering = Interpreter(root, input_shape, Root(model) if own else root, exact=own)
            output = lowering.output()
            lowering.check(model)
        except NoRuleError as error:
            # The refusals are worded for analyze.
            raise NoRuleError(f"{function}: {str(error).removeprefix('analyze: ')}") from None
    if output is None:
        raise NoRuleError(f"{function}: expected an output that depends on the input, got a constant one")
    chain = nn.Sequential(*lowering.wiring.chain(output.number), *([] if output.shape else [Reshape()]))
    return chain, lowering.observed.outputs[1]


def check_same(plain: nn.Module, model: nn.Module, input_shape: Shape, expected: Tensor | None = None) -> None:
    """Raise ``NoRuleError`` if two networks differ on one batch. This proves nothing, but reveals wrong rules.

    ``expected`` are the outputs of ``model``, if they are known.
    """
    x = sample(model, input_shape, BATCHES[1])
    with torch.no_grad():
        own = x.to(sample(plain, input_shape, 1).dtype)  # wider than that of halves with constrained layers
        found, expected = plain(own.clone()), model(x.clone()) if expected is None else expected
    if found.dtype != expected.dtype:  # a cast at the end
        found = found.to(expected.dtype)
    if not close(found, expected):
        raise NoRuleError(
            "export: expected plain modules that compute the same as the network, got other outputs: a rule of "
            "lipkit.lowering.function_module or lipkit.modules.export_rule does not match its function"
        )


def _structure_constant(module: nn.Module, input_shape: Shape | None) -> Tensor:
    if input_shape is None:
        raise NoRuleError(
            f"lipschitz: expected an input_shape, because {type_name(type(module))} has its own forward pass, which "
            "has to be traced, got none: lipkit.lipschitz(network, input_shape=(3, 32, 32)), for instance"
        )
    return lipschitz(structure(module, input_shape, own=True)[0], input_shape)


def _structure_export(module: nn.Module, input_shape: Shape) -> nn.Module:
    chain, expected = structure(module, input_shape)
    training = any(part.training for part in module.modules())
    if training:
        check_same(chain, module, input_shape, expected)
    network = export_plain(chain, input_shape)
    # The chain holds copies. An export is in evaluation mode, whose outputs may differ from those in training mode.
    check_same(network, chain.eval(), input_shape, None if training else expected)
    return network.to(next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu")))


LATER.update(lipschitz=_structure_constant, export=_structure_export, constant=constant_copy)
