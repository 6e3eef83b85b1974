"""Networks of others, with the forward pass of their papers' code: bound, exported, certified, saved, in ONNX."""

from __future__ import annotations

import itertools
import logging
import warnings
from pathlib import Path

import pytest
import torch
from benchmarks.architectures import NETWORKS, ON_A_BOX, SMALL, BasicBlock, Bottleneck, ResNet, settle
from torch import nn

from lipkit import analyze, certify, export, lipschitz, load, save
from lipkit.analysis import lipschitz_lower_bound
from lipkit.data import as_split
from lipkit.errors import NoRuleError, OptionError
from lipkit.evaluation import Attack, evaluate
from lipkit.interop import load_onnx, onnx_runtime, write_onnx

# One block of each kind: with all blocks, they are bounded and certified in tests/certificates and tests/checker.
SHORT = {
    "ResNet-18": lambda: ResNet(BasicBlock, (1, 1, 1, 1), 4),
    "ResNet-50": lambda: ResNet(Bottleneck, (1, 2, 1, 1), 2),
}
EVERYWHERE = [name for name in SMALL if name not in ON_A_BOX]


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(1)
    shape = NETWORKS[name][1]
    model = settle((SHORT.get(name) or SMALL[name])()).float()
    return model, shape


# Their bounds, outputs and radii are kept in tests/certificates/reference_certificates.json.
LONG = ("DenseNet", "SqueezeNet", "ConvNeXt", "WRN-16-4")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in LONG]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*(name for name in EVERYWHERE if name not in LONG), *SLOW])
def test_bounded_exported_certified_and_saved(name: str, tmp_path: Path) -> None:
    model, shape = network(name)
    plain = export(model, shape)
    assert not any("BatchNorm" in type(m).__name__ for m in plain.modules())
    x = torch.rand(4, *shape)
    with torch.no_grad():
        y = model(x)
        scale = float(y.abs().max())
        assert torch.allclose(plain(x), y, rtol=1e-4, atol=1e-5 * scale)
        assert torch.allclose(plain.double()(100 * x.double()), model.double()(100 * x.double()), rtol=1e-3)
    plain, model = plain.float(), model.float()
    bound = float(lipschitz(plain))
    upper = analyze(model, shape, restarts=0).upper
    # The same graph before batch normalisation is folded, with tolerances that differ.
    # Both bound each kernel within one per cent, analyze on average: none is better by more than that.
    kernels = sum(isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1) for module in model.modules())
    assert bound <= upper * 1.01**kernels * (1 + 1e-4)
    assert lipschitz_lower_bound(plain.double(), restarts=1, steps=5).lower <= min(bound, upper)
    folder = save(plain.float(), tmp_path / "net")
    twin = load(folder)
    assert torch.equal(twin(x), plain(x))
    if name == "U-Net":
        assert float(lipschitz(twin)) == pytest.approx(bound, rel=1e-12)
        return
    labels = plain(x).argmax(1)
    sound, ignored = (certify(twin, x, labels, rounding=rounding) for rounding in ("sound", "ignore"))
    assert sound.constant == pytest.approx(bound, rel=1e-12)
    assert bool((sound.radius <= ignored.radius).all())
    assert bool((sound.radius > 0.5 * ignored.radius).all())


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ResNet-18", *SLOW])
def test_onnx_there_and_back(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, shape = network(name)
    plain = export(model, shape)
    x = torch.rand(3, *shape)
    path = write_onnx(plain, tmp_path / "net.onnx")
    assert torch.allclose(onnx_runtime(path)(x), plain(x), rtol=1e-4, atol=1e-5)
    back = load_onnx(path)
    assert torch.allclose(back(x), plain(x), rtol=1e-4, atol=1e-5)
    assert float(lipschitz(back)) == pytest.approx(float(lipschitz(plain)), rel=1e-5)
    assert torch.equal(load(save(back, tmp_path / "saved"))(x), back(x))


OTHERS = ["ConvNeXt", "MobileNetV2", "DenseNet", "SqueezeNet", "U-Net", *ON_A_BOX]
REST = [("LeNet", 17), *itertools.product(OTHERS, [17, 18, 20, 21])]
LATE = [pytest.param(*one, marks=pytest.mark.slow) for one in REST]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "opset"), [("LeNet", 20), *LATE])
def test_files_of_plain_pytorch(name: str, opset: int, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model, shape = network(name)
    path = tmp_path / "net.onnx"
    logger = logging.getLogger("torch.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = logger.level
        logger.setLevel(logging.ERROR)
        torch.onnx.export(
            model,
            (torch.zeros(2, *shape),),
            path,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
        logger.setLevel(level)
    box = (0.0, 1.0) if name in ON_A_BOX else None
    found = load_onnx(path, box=box)
    x = torch.rand(3, *shape)
    assert float(lipschitz(found)) == pytest.approx(float(lipschitz(export(model, shape, box=box))), rel=1e-4)
    assert torch.allclose(found(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["LeNet", pytest.param("DenseNet", marks=pytest.mark.slow)])
def test_attacks_find_nothing_inside_radii(name: str) -> None:
    model, shape = network(name)
    plain = export(model, shape)
    x = torch.rand(12, *shape)
    with torch.no_grad():
        plain[-1].bias -= plain(x).mean(0)  # so that not all samples have the same class
    split = as_split((x, plain(x).argmax(1)))
    # Raises where an example lies inside a certified radius.
    found = evaluate(plain, split, eps=(0.1, 3.0), attack=Attack(steps=10, samples=None), large_eps=True)
    assert bool((found.certificate.radius > 0).all())
    assert found.cross_check.compared > 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_A_BOX)
def test_products_have_a_constant_on_a_box(name: str, tmp_path: Path) -> None:
    model, shape = network(name)
    for refused in (lambda: export(model, shape), lambda: lipschitz(model, shape), lambda: analyze(model, shape)):
        with pytest.raises(NoRuleError, match=r"mul in '.*'|'blocks.0'"):
            refused()
    plain = export(model, shape, box=(0, 1))
    assert plain.input_range == (0.0, 1.0)
    corners = torch.randint(0, 2, (8, *shape)).float()
    x = torch.cat([torch.rand(8, *shape), corners])
    with torch.no_grad():
        assert torch.allclose(plain(x), model(x), rtol=1e-4, atol=1e-5)
    bound = float(lipschitz(plain))
    upper = analyze(model, shape, box=(0, 1), restarts=0).upper  # never looser: on the box it may know more
    assert 0.9 * bound <= upper <= bound * (1 + 1e-6)
    assert lipschitz_lower_bound(plain.double(), restarts=1, steps=3).lower <= bound
    twin = load(save(plain.float(), tmp_path / "net"))
    assert torch.equal(twin(x), plain(x))
    certificate = certify(twin, x, plain(x).argmax(1))
    assert bool((certificate.radius > 0).all())
    assert certificate.input_range == (0.0, 1.0)
    with pytest.raises(OptionError, match="expected inputs in"):
        certify(twin, 2 * x, plain(x).argmax(1))
