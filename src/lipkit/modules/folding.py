"""Batch normalisation folded into the layers before it, in a network that keeps its own forward pass."""

from __future__ import annotations

import collections

import torch
from torch import nn

from lipkit.errors import NoRuleError
from lipkit.modules.normalization import fold_norm
from lipkit.modules.registry import Shape
from lipkit.modules.running import BATCHES, Observed, Sizes, check_outputs, close, constant_copy, observe, sample
from lipkit.modules.tracing import Root, fetch, trace


def fold(model: nn.Module, input_shape: Shape) -> nn.Module:
    """A copy of ``model`` in which convolutions and linear layers do the work of the batch normalisation behind them.

    ``lipkit.export`` folds anyway; this is for networks that go on as they are, to other tools or to further training.
    A normalisation is folded if it reads nothing but the layer's output, nobody else reads that, both are called once,
    and their weights are read nowhere else; it becomes an ``nn.Identity``.

    Args:
        model: in evaluation mode; it is not changed.
        input_shape: of one input, without the batch.

    Returns:
        The same function within rounding, on the CPU, without gradients.

    Raises:
        NoRuleError: a forward pass that cannot be traced, or in training mode; one that reads other attributes of a
            normalisation.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
    >>> [type(m).__name__ for m in fold(net, (1, 5, 5))]
    ['Conv2d', 'Identity', 'ReLU']
    """
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        root = Root(constant_copy(model))
        try:
            graph = trace(root, sample(root, input_shape, BATCHES[0]))
            observed = observe(root, graph, input_shape)
            check_outputs(root, observed, input_shape)
        except NoRuleError as error:
            raise NoRuleError(f"fold: {str(error).removeprefix('analyze: ')}") from None
    calls = collections.Counter(node.target for node in graph.nodes if node.op == "call_module")
    read = {id(fetch(root, str(node.target))) for node in graph.nodes if node.op == "get_attr"}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "call_module" or len(inputs) != 1 or inputs[0].op != "call_module":
            continue
        before, between = inputs[0], observed.values[inputs[0]]
        alone = len(before.users) == 1 and calls[node.target] == calls[before.target] == 1
        if not alone or not isinstance(between, Sizes) or between.sample is None:
            continue
        layer, norm = fetch(root, str(before.target)), fetch(root, str(node.target))
        if any(id(t) in read for m in (layer, norm) for t in (*m.parameters(), *m.buffers())):
            continue
        folded = fold_norm(layer, norm, between.sample)
        if folded is not None:
            _replace(root, layer, folded)
            _replace(root, norm, nn.Identity())
    _check_same(root, observed, input_shape)
    net: nn.Module = root.net
    return net


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Under each of its names."""
    for parent in list(root.modules()):
        for name, child in parent._modules.items():
            if child is old:
                setattr(parent, name, new)


def _check_same(root: Root, observed: Observed, input_shape: Shape) -> None:
    try:
        with torch.no_grad():
            found = root(sample(root, input_shape, BATCHES[1]))
        same = close(found, observed.outputs[1])
    except Exception:  # the forward pass is the user's and may raise anything
        same = False
    if not same:
        raise NoRuleError(
            "fold: expected a forward pass that only calls its normalisations, got one that reads other attributes of "
            "them: it computes something else without them"
        )
