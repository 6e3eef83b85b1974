"""Exported networks as ONNX: the same weights bit for bit, the same outputs for any batch."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import lipkit
from lipkit.layers import Normalize, Rescale
from lipkit.models import lbdn

pytestmark = pytest.mark.thorough


def to_onnx(network: lipkit.modules.Network) -> onnx.ModelProto:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
        program = torch.onnx.export(
            network,
            (torch.zeros(2, *network.input_shape),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def outputs(model: onnx.ModelProto, x: torch.Tensor) -> torch.Tensor:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_an_lbdn_in_physical_units_keeps_its_numbers(activation: str) -> None:
    torch.manual_seed(0)
    scalings = Normalize([1.0, 0.0, -2.0], [0.5, 2.0, 1.0]), Rescale([4.0, 0.1], [9.8, 0.0])
    network = lipkit.export(nn.Sequential(scalings[0], lbdn([3, 16, 9, 2], 2.0, activation), scalings[1]), (3,))
    model = to_onnx(network)
    kinds = [node.op_type for node in model.graph.node]
    act = activation.title()
    assert kinds == ["Mul", "Add", "Gemm", act, "Gemm", act, "Gemm", "Mul", "Add"]
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    gemms = [node for node in model.graph.node if node.op_type == "Gemm"]
    linears = [module for module in network if isinstance(module, nn.Linear)]
    for node, linear in zip(gemms, linears, strict=True):
        assert np.array_equal(stored[node.input[1]], linear.weight.numpy())
        assert np.array_equal(stored[node.input[2]], linear.bias.numpy())
    for batch in (1, 7):
        x = torch.randn(batch, 3)
        torch.testing.assert_close(outputs(model, x), network(x), rtol=1e-5, atol=1e-5)
