"""Every family's network in onnxruntime and as a torch.export program: outputs, certificates, any batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tests.interop.test_read_back import claimed, comes_back, traced_once, written
from torch import Tensor, nn

import lipkit
from lipkit import interop, models, modules
from lipkit.errors import CertificateViolation, DataError, NoRuleError, OptionError, ShapeError
from lipkit.experiments.build import load_data
from lipkit.experiments.recipe import load_recipe
from lipkit.layers import CayleyConv2d, CayleyLinear, MaxMin, families

SHAPE = (1, 6, 6)


def network(family: str, seed: int = 0) -> modules.Network:
    torch.manual_seed(seed)
    return lipkit.export(models.build("small", layer=family, input_shape=SHAPE, classes=4), SHAPE)


# Together they export to every module that a family exports to; the others give parts of these graphs.
KINDS = ("cayley", "sll", "sandwich")


@pytest.mark.thorough
def test_the_kinds_are_all() -> None:
    made = {}
    for name in families.names():
        parts = [m for m in network(name).modules() if not isinstance(m, modules.Network)]
        made[name] = {
            (type(m), getattr(m, "padding_mode", ""), *dict(m.named_parameters(recurse=False))) for m in parts
        }
    assert set.union(*(made[name] for name in KINDS)) == set.union(*made.values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in families.names()]
)
def test_onnx_and_program_compute_the_same_for_every_family(family: str, tmp_path: Path) -> None:
    exported = network(family)
    x, y = torch.rand(9, *SHAPE), torch.arange(9) % 4
    with traced_once():
        onnx_file = interop.write_onnx(exported, tmp_path / "new" / "network.onnx")
        program, torch_runtime = written(exported, tmp_path / "network.pt2")
    stored = onnx.load(onnx_file)
    assert not any("complex" in str(t.data_type) for t in stored.graph.initializer)
    assert {node.domain for node in stored.graph.node} <= {"", "ai.onnx"}
    for runtime in (interop.onnx_runtime(onnx_file), torch_runtime):
        check = interop.check_runtime(exported, runtime, x, y, eps=(0.0, 0.05), batch_size=4)
        assert check.samples == check.same == 9
        assert check.difference < 1e-4
        assert check.certified == check.runtime
        # a batch of one, which traces easily take for a constant
        torch.testing.assert_close(runtime(x[:1]), exported(x[:1]), rtol=0, atol=1e-5)
    # All of both files is made again for one kind, with every tensor and node; the others are found by their claims.
    (comes_back if family == "sll" else claimed)(exported, onnx_file, program)


@pytest.mark.thorough
def test_float64_stays_float64(tmp_path: Path) -> None:
    layers = [CayleyConv2d(1, 4, 2, stride=2), MaxMin(), nn.Flatten(), CayleyLinear(36, 4)]
    exported = lipkit.export(nn.Sequential(*layers).double(), SHAPE)
    runtime = interop.onnx_runtime(interop.write_onnx(exported, tmp_path / "n.onnx"))
    x = torch.rand(3, *SHAPE, dtype=torch.float64)
    assert runtime(x).dtype is torch.float64
    torch.testing.assert_close(runtime(x), exported(x), rtol=0, atol=1e-12)


@pytest.mark.thorough
def test_a_network_of_halves_is_written_and_one_of_bfloat16_refused(tmp_path: Path) -> None:
    exported = lipkit.export(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten()).half(), SHAPE)
    file = interop.write_onnx(exported, tmp_path / "network.onnx")
    x = torch.rand(3, *SHAPE).half()
    assert interop.onnx_runtime(file)(x).dtype == torch.float16
    assert torch.equal(interop.load_onnx(file)(x), exported(x))
    with pytest.raises(OptionError, match=r"float16, float32 or float64, got bfloat16: write network\.float\(\)"):
        interop.write_onnx(exported.bfloat16(), tmp_path / "network.onnx")


@pytest.mark.thorough
def test_a_runtime_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    exported = network("cayley")
    x, y = torch.rand(4, *SHAPE), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(CertificateViolation, match=r"of the network's, got a difference of 0\.001"):
        interop.check_runtime(exported, lambda part: exported(part) + 1e-3, x, y)
    with pytest.raises(CertificateViolation, match="got a difference of nan"):
        interop.check_runtime(exported, lambda part: exported(part) * torch.nan, x, y)
    with pytest.raises(ShapeError, match=r"expected outputs of shape \(4, 4\), got \(4, 3\)"):
        interop.check_runtime(exported, lambda part: exported(part)[:, :3], x, y)
    with pytest.raises(OptionError, match="at least one sample"):
        interop.check_runtime(exported, exported, x[:0], y[:0])


def test_the_margins_of_the_runtime_decide() -> None:
    """A runtime whose logits are off by less than the tolerance moves the certified accuracy it reports."""
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    linear = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight)
    exported = modules.Network([linear], (2,))
    x, y = torch.tensor([[0.5, 0.0], [0.25, 0.0]]), torch.zeros(2, dtype=torch.int64)
    push = torch.tensor([[-4e-5, 0.0]])
    check = interop.check_runtime(exported, lambda part: exported(part) + push, x, y, eps=(0.24999,))
    assert check.certified == (1.0,)
    assert check.runtime == (0.5,)


def test_what_is_not_a_network_or_not_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoRuleError, match="expected an exported network"):
        interop.write_onnx(nn.Linear(2, 2), tmp_path / "a.onnx")
    with pytest.raises(NoRuleError, match="expected an exported network"):
        interop.write_program(nn.Linear(2, 2), tmp_path / "a.pt2")
    broken = tmp_path / "broken"
    broken.write_bytes(np.random.default_rng(0).bytes(500))
    with pytest.raises(DataError, match="expected an ONNX model"):
        interop.onnx_runtime(broken)
    with pytest.raises(DataError, match=r"expected a torch.export program"):
        interop.program_runtime(broken)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.names())
def test_trained_digits_keep_their_certified_accuracy_in_onnxruntime(family: str, tmp_path: Path) -> None:
    recipe = load_recipe(f"digits_{family}", ["train.epochs=2"])
    data = load_data(recipe)
    torch.manual_seed(0)
    model = models.build(recipe.model.name, **{"input_shape": data.input_shape, "classes": 10, **recipe.model.options})
    lipkit.fit(model, data.train, epochs=2, batch_size=64, lr=0.01)
    exported = lipkit.export(model, data.input_shape)
    x, y = data.test.batch(torch.arange(len(data.test)))
    runtime = interop.onnx_runtime(interop.write_onnx(exported, tmp_path / "network.onnx"))
    check = interop.check_runtime(exported, runtime, x, y, eps=(36 / 255, 72 / 255))
    assert check.difference < 1e-4
    assert check.certified == check.runtime
    assert check.certified[0] > 0.3


def test_gradients_flow_through_the_robustbench_form() -> None:
    wrapped = interop.RobustBenchModel(network("cayley"))
    assert not wrapped.train().training
    x = torch.rand(2, *SHAPE, requires_grad=True)
    wrapped(x).sum().backward()
    assert isinstance(x.grad, Tensor)
    assert bool(x.grad.abs().sum() > 0)
    assert not any(p.requires_grad for p in wrapped.parameters())
    with pytest.raises(ShapeError, match="expected a network of images"):
        interop.RobustBenchModel(modules.Network([nn.ReLU()], (3,)))
    with pytest.raises(NoRuleError, match="expected an exported network"):
        interop.RobustBenchModel(nn.ReLU())
