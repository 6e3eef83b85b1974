"""What users call, on every device that is here: the same numbers as on the CPU, and results where they belong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit import attacks, certificates, conformal, layers, models, wasserstein
from lipkit.interop import write_c, write_onnx
from lipkit.layers import families
from lipkit.training import LipschitzPenalty, PgdAdversary

pytestmark = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
    ],
)


@pytest.fixture(autouse=True)
def whole_float32() -> Iterator[None]:
    """Convolutions of a GPU in float32, not in TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return models.small("cayley", input_shape=(3, 8, 8), classes=4, width=1)


def dense_net(outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return models.mlp([16, 16], layer="sandwich", input_shape=(6,), classes=outputs)


def plain_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(96, 4))


def samples(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def exported(model: nn.Module, device: str) -> lipkit.modules.Network:
    shape = (3, 8, 8) if any(isinstance(m, nn.Flatten) for m in model.modules()) else (6,)
    network = lipkit.export(copy.deepcopy(model).to(device).eval(), shape)
    network.input_range = (0.0, 1.0)
    return network


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    a, b = found.detach().cpu().double(), wanted.detach().cpu().double()
    assert a.shape == b.shape
    assert float((a - b).abs().max()) <= tolerance * float(1 + b.abs().max()), (a - b).abs().max()


@pytest.mark.thorough
@pytest.mark.parametrize("evaluator", ["float64", "float32", "float32_blocked", "integer"])
def test_certificates(device: str, evaluator: str) -> None:
    network = exported(dense_net(), "cpu")
    x = samples(9, 6)
    y = network(x).argmax(1)
    network = exported(dense_net(), device)
    there = certificates.certify(network, x.to(device), y.to(device), evaluator=evaluator, device=device)
    here = certificates.certify(exported(dense_net(), "cpu"), x, y, evaluator=evaluator)
    close(there.radius, here.radius, 1e-5)
    assert there.correct.all()
    assert there.constant == pytest.approx(here.constant, rel=1e-6)


@pytest.mark.thorough
def test_certificates_of_convolutions(device: str) -> None:
    x = samples(5, 3, 8, 8)
    network = exported(conv_net(), device)
    y = network(x.to(device)).argmax(1)
    close(certificates.certify(network, x, y, device=device).radius, certificates.certify(network, x, y).radius, 1e-6)


def test_float32_convolutions_of_a_gpu_are_refused(device: str) -> None:
    network, x = exported(conv_net(), device), samples(2, 3, 8, 8)
    if device == "cpu":
        certificates.certify(network, x, torch.zeros(2).long(), evaluator="float32_blocked", device=device)
    else:
        with pytest.raises(lipkit.errors.OptionError, match="cuDNN"):
            certificates.certify(network, x, torch.zeros(2).long(), evaluator="float32", device=device)


def test_errors_of_rounding_hold(device: str) -> None:
    network = exported(dense_net(), device)
    x = samples(200, 6).to(device)
    proof = lipkit.prove(network, evaluator="float32", device=device)
    y = network(x).argmax(1)
    exact = copy.deepcopy(network).double()(x.double())
    off = (network(x).double() - exact).norm(dim=1)
    sound = certificates.certify(network, x, y, evaluator="float32", device=device, proof=proof)
    ignored = certificates.certify(network, x, y, rounding="ignore")
    proved = 2**0.5 * sound.constant * (ignored.radius - sound.radius)  # what rounding costs, in units of the outputs
    assert 0 < float(off.max()) < 1e-5
    assert bool((off.cpu() <= proved).all())


@pytest.mark.thorough
# MaxMin and the rules of convolutions: tests/certificates/test_local.py.
@pytest.mark.parametrize("make", [pytest.param(conv_net, marks=pytest.mark.slow), plain_net])
def test_local_certificates(device: str, make: Callable[[], nn.Module]) -> None:
    network, x = exported(make(), device), samples(3, 3, 8, 8)
    y = network(x.to(device)).argmax(1)
    there = certificates.certify(network, x.to(device), y, method="local", device=device)
    here = certificates.certify(network, x, y.cpu(), method="local")
    close(there.radius, here.radius, 1e-5)
    assert (there.radius > 0).all()


@pytest.mark.thorough
def test_other_certificates(device: str, tmp_path: Path) -> None:
    network, x = exported(dense_net(1), device), samples(8, 6)
    certificates.certify_regression(network, x, torch.zeros(8, 1), delta=0.1, device=device)
    certificates.auroc(network, x[:4], x[4:], 0.1)
    box = (torch.zeros(6), torch.ones(6))
    trained_elsewhere = exported(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)), device)
    assert (certificates.gain_matrix(trained_elsewhere) >= 0).all()
    assert certificates.monotone(trained_elsewhere).shape == (2, 6)
    gain = certificates.local_gain(trained_elsewhere, box)
    assert 0 < gain <= float(lipkit.lipschitz(certificates.tight(trained_elsewhere))) * (1 + 1e-6)


@pytest.mark.thorough
def test_files(device: str, tmp_path: Path) -> None:
    network, x = exported(dense_net(), device), samples(3, 6)
    lipkit.save(network, tmp_path / "net")
    close(lipkit.load(tmp_path / "net")(x), network(x.to(device)), 1e-6)
    write_onnx(network, tmp_path / "net.onnx")
    write_c(network, tmp_path / "net.c")
    if device != "cpu":
        analysed = lipkit.analyze(plain_net().to(device), (3, 8, 8))
        assert analysed.upper >= analysed.lower


@pytest.mark.parametrize("attack", ["pgd", "apgd", "fab", "carlini_wagner", "autoattack"])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_attacks(device: str, attack: str, norm: str) -> None:
    if device == "cpu":
        pytest.skip("tests/attacks")
    model, x = plain_net().to(device).eval(), samples(6, 3, 8, 8).to(device)
    y = model(x).argmax(1)
    options: dict = {"eps": 0.5} if attack in ("pgd", "apgd", "autoattack") else {"steps": 5}
    options |= {"steps": 5} if attack in ("pgd", "apgd") else {}
    options |= {"norm": norm} if attack != "carlini_wagner" else {}
    if attack == "autoattack":
        pytest.importorskip("pyautoattack")
        options["parts"] = ("apgd-ce",)
    found = getattr(attacks, attack)(model, x, y, **options)
    assert found.device.type == device
    assert bool(((found >= 0) & (found <= 1)).all())


@pytest.mark.parametrize("kind", ["r2dn", "ren", "lti"])
def test_recurrent_layers(device: str, kind: str) -> None:
    torch.manual_seed(0)
    here = {
        "r2dn": lambda: layers.R2dn(3, 2, 4, 8),
        "ren": lambda: layers.Ren(3, 2, 4, 8),
        "lti": lambda: layers.LinearSystem(3, 2, 4),
    }[kind]()
    there, u = copy.deepcopy(here).to(device), samples(5, 7, 3)
    a, b = here(u), there(u.to(device))
    close(b, a, 1e-5)
    a.square().sum().backward()
    b.square().sum().backward()
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        close(q.grad, p.grad, 1e-4)
    plain = lipkit.export(there.eval(), (7, 3))
    assert float(lipkit.lipschitz(plain)) <= 1 + 1e-5
    close(plain(u.to(device)), a, 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["adam", "spectral"])
def test_training(device: str, optimizer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = samples(64, 3, 8, 8), torch.arange(64) % 4
    stiefel = models.patchnet(2, [(8, 1)], dense=[16], input_shape=(3, 8, 8), classes=4)
    model = stiefel if optimizer == "spectral" else conv_net()
    options = {"accelerator": device, "batch_size": 16, "optimizer": optimizer}
    run = lipkit.fit(model, (x, y), epochs=1, run_dir=tmp_path / "run", ema=0.9, **options)
    more = lipkit.fit(model, (x, y), epochs=2, run_dir=tmp_path / "two", ema=0.9, precision="bf16-mixed", **options)
    assert (len(run.history), len(more.history)) == (1, 2)
    assert more.history[-1]["memory_mib"] > 0
    plain = lipkit.export(more.result, (3, 8, 8))
    assert float(lipkit.lipschitz(plain)) <= 2


def test_adversarial_training_and_penalties(device: str) -> None:
    kinds = {"penalty": LipschitzPenalty(weight=0.1), "adversary": PgdAdversary(eps=0.1, steps=2)}
    data = samples(32, 3, 8, 8), torch.arange(32) % 4
    run = lipkit.fit(plain_net(), data, epochs=1, batch_size=16, accelerator=device, **kinds)
    assert np.isfinite(run.history[-1]["loss"])


@pytest.mark.thorough
def test_other_models(device: str) -> None:
    torch.manual_seed(0)
    for model, shape in (
        (
            models.vision_transformer(patch=4, width=16, depth=1, dense=(16,), input_shape=(3, 8, 8), classes=4),
            (3, 8, 8),
        ),
        (models.unet(8, 1, 1, input_shape=(3, 8, 8)), (3, 8, 8)),
        (models.lbdn([6, 8, 3]), (6,)),
        (models.sequence_classifier(4, 8, features=3, input_shape=(5, 3), classes=2), (5, 3)),
    ):
        x, there = samples(2, *shape), copy.deepcopy(model).to(device).eval()
        close(there(x.to(device)), model.eval()(x), 1e-4)
        plain = lipkit.export(there, shape)
        close(plain(x.to(device)), model(x), 1e-4)
        lipkit.lipschitz(plain)


def test_distances(device: str) -> None:
    x, y = samples(64, 3), samples(64, 3) + 1
    found = wasserstein.distance(x, y, steps=5, batch_size=16, device=device)
    assert np.isfinite(found.value)


def test_intervals(device: str) -> None:
    network, x = exported(dense_net(), device), samples(40, 6)
    conformal.calibrate(network, x, torch.arange(40) % 4)


@pytest.mark.parametrize("name", families.names())
def test_families(device: str, name: str) -> None:
    torch.manual_seed(0)
    family = families.get(name)
    kernel = 2 if name == "eco" else 3
    layer = family.conv(4, 4, kernel)
    x = samples(2, 4, 8, 8)
    there = copy.deepcopy(layer).to(device)
    close(there(x.to(device)), layer(x), 1e-4)
    plain = lipkit.export(there.eval(), (4, 8, 8))
    close(plain(x.to(device)), layer.eval()(x), 1e-4)
    assert float(lipkit.lipschitz(plain)) <= 1 + 1e-4
    assert float(lipkit.lipschitz(there, (4, 8, 8)).detach()) <= 1 + 1e-4


@pytest.mark.parametrize("optimizer", ["adam", "spectral"])
def test_recorded_steps(device: str, optimizer: str, tmp_path: Path) -> None:
    """A CUDA graph makes the steps that it recorded, over epochs whose last batch is smaller, and after a resume."""
    x, y = samples(150, 3, 8, 8), torch.arange(150) % 4
    options = {"accelerator": device, "batch_size": 32, "optimizer": optimizer, "lr": 0.01, "epochs": 4}
    options["precision"] = "64-true"  # spectral steps multiply rounding; a recorded step has its rate in float32

    def run(**more: Any) -> nn.Module:
        torch.manual_seed(0)
        stiefel = {"stages": [(512, 2)], "dense": [16], "input_shape": (3, 8, 8), "classes": 4}
        model = models.patchnet(2, **stiefel) if optimizer == "spectral" else plain_net()
        return lipkit.fit(model.double(), (x.double(), y), **{**options, **more}).model

    if device == "cpu":
        with pytest.raises(lipkit.errors.OptionError, match="expected one CUDA device, got cpu"):
            run(cuda_graph=True)
        return
    plain, recorded = run(), run(cuda_graph=True)
    for a, b in zip(plain.parameters(), recorded.parameters(), strict=True):
        close(b, a, 1e-5)
    run(cuda_graph=True, run_dir=tmp_path / "r", max_minutes=1e-9, checkpoint_every=1)
    continued = run(cuda_graph=True, run_dir=tmp_path / "r", resume=True)
    for a, b in zip(continued.parameters(), recorded.parameters(), strict=True):
        close(b, a, 1e-5)


def test_what_waits_for_the_device_is_not_recorded(device: str) -> None:
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * float(self.layer.weight.abs().max().detach())

    if device == "cuda":
        with pytest.raises(lipkit.errors.OptionError, match="do not wait for numbers"):
            lipkit.fit(Waits(), (samples(64, 4), torch.arange(64) % 2), epochs=5, batch_size=16, cuda_graph=True)
