"""The checker confirms, by other means, what `certify` proved of every family and module, and refuses all else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checker.corruptions import CORRUPTIONS, Run, corrupted
from tests.checker.runs import digits, tiny, verdict, write_run
from torch import nn

import lipkit
import lipkit_check as k
from lipkit import layers, models, modules
from lipkit.certificates import tight
from lipkit.layers import families
from lipkit.layers.families import names
from lipkit.networks import resolved

CHECKER = Path(k.__file__)
SHAPE = (1, 8, 8)
SMOOTH = [
    nn.Sigmoid(), nn.Tanh(), nn.Tanhshrink(), nn.Softsign(), nn.LogSigmoid(), nn.SiLU(), nn.Mish(), nn.GELU(),
    nn.GELU(approximate="tanh"), nn.Hardsigmoid(), nn.Hardswish(), nn.ReLU6(), nn.Hardtanh(-0.3, 0.4), nn.SELU(),
    nn.ELU(0.7), nn.ELU(1.7), nn.CELU(0.5), nn.Softplus(), nn.Softplus(3.0), nn.Softshrink(0.2), nn.Softmax(1),
    modules.Sine(), modules.Cosine(), modules.Arctan(), modules.Arcsinh(),
    modules.Elementary("exp", torch.tensor([-1.0, 1.0])),
]  # fmt: skip
EXACT = [
    nn.ReLU(),
    nn.LeakyReLU(0.1),
    nn.LeakyReLU(-1.5),
    nn.PReLU(),
    nn.PReLU(16),
    layers.MaxMin(),
    layers.GroupSort(4),
    layers.GroupSort(None),
    modules.HalfAbs(),
    modules.NActivation(16, -0.1, 0.2),
    modules.Householder(16, order=2),
]
IMAGES = [
    nn.AvgPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.MaxPool2d(2), nn.ZeroPad2d((1, -2, 0, 3)), nn.PixelUnshuffle(2),
    nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)), modules.Pad(0, 0, 0, 0, 0, 4), nn.BatchNorm2d(1),
    nn.Sequential(modules.Pad(0, 0, 0, 0, 0, 8), modules.Shift2d(9, 2)), modules.Pad(0, 0), layers.Scale(0.3),
    nn.Conv2d(1, 2, 3, 2, 1), nn.Conv2d(1, 4, 3, padding="same", padding_mode="circular"), layers.Residual(nn.ReLU()),
    layers.SocConv2d(1, 2, 3, padding_mode="zeros"),
    nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 16)), nn.Conv1d(4, 4, 3)),
]  # fmt: skip
NORMALIZED = [
    nn.LayerNorm([8, 8]),
    nn.LayerNorm([8], elementwise_affine=False),
    nn.GroupNorm(1, 1),
    nn.InstanceNorm2d(1, affine=True),
    modules.LayerCenter(2, 3),
    modules.UnitNorm(2, 3, eps=0.5),
    nn.AdaptiveAvgPool2d(5),
    nn.Upsample(scale_factor=(2, 4), mode="bilinear"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checked") / "run"
    write_run(folder, tiny(), digits(12)[0])
    return folder


def confirmed(folder: Path, model: nn.Module, capsys: Any, *options: str, lost: float = 1e-6) -> Any:
    """Write a run and confirm it; the checker's constant is not far from lipkit's."""
    x = digits(12)[0]
    certificate = write_run(folder, model, x)
    assert certificate.radius.max() > 0
    assert verdict(folder, *options) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert said.startswith("confirmed  12 radii confirmed, 0 refused")
    assert float(said.split("at most ")[1].split()[0]) <= lost
    return certificate


# Together they export to every module of all families (tests/interop/test_runtimes.py); the checker sees no other.
KINDS = ("cayley", "eco", "ossn", "sll", "sandwich")


def small(name: str) -> nn.Module:
    return models.small(layer=name, **({"kernel_size": 2} if name == "eco" else {}))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in KINDS)) for n in names()])
def test_every_family(name: str, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(1)
    confirmed(tmp_path, small(name), capsys, lost=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["cayley", "eco", pytest.param("bcop", marks=pytest.mark.thorough)])
def test_families_without_floating_point(name: str, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(2)
    confirmed(tmp_path, small(name), capsys, "--exact", lost=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sll", "cpl", "sandwich", "aol"])
def test_other_families_without_floating_point(name: str, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(2)
    model = small(name)
    if name != "aol":  # the factor of a matrix of Python's integers costs the third power of its size
        conv = families.get(name).conv(4, 4, 3)
        model = nn.Sequential(nn.PixelUnshuffle(2), conv, nn.Flatten(), layers.CayleyLinear(64, 10))
    confirmed(tmp_path, model, capsys, "--exact", lost=1e-5)


@pytest.mark.thorough
def test_every_activation(tmp_path: Path, capsys: Any) -> None:
    for i, activation in enumerate([*SMOOTH, *EXACT]):
        torch.manual_seed(i)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), activation, nn.Linear(16, 10))
        confirmed(tmp_path / str(i), model, capsys, *["--exact"] * (activation in EXACT))


@pytest.mark.thorough
def test_every_module_of_images(tmp_path: Path, capsys: Any) -> None:
    for i, module in enumerate([*IMAGES, *NORMALIZED]):
        torch.manual_seed(i)
        count = module.eval()(torch.zeros(1, *SHAPE)).numel()
        model = nn.Sequential(module, nn.Flatten(), nn.Linear(count, 10))
        confirmed(tmp_path / str(i), model, capsys, *["--exact"] * (module in IMAGES))


@pytest.mark.thorough
def test_branches(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(3)
    wide = nn.Sequential(nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 20))
    total = modules.Graph([nn.Linear(64, 20), wide, modules.Add(1, 1)], [[0], [0], [1, 2]])
    body, share = nn.Sequential(nn.Linear(20, 16), nn.ReLU()), modules.Blend(torch.tensor(0.3))
    blend = modules.Graph([body, nn.Linear(20, 16), share], [[0], [0], [1, 2]])
    model = nn.Sequential(nn.Flatten(), total, blend, nn.Linear(16, 10))
    confirmed(tmp_path, model, capsys)


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "exact"), [
    ({"sizes": [64, 32, 32, 10], "gamma": 2.0}, False), ({"sizes": [64, 32, 32, 32, 10], "activation": "tanh"}, False),
    ({"sizes": [64, 24, 24, 10], "gamma": 0.5}, True),
])  # fmt: skip
def test_multipliers_prove_the_gain(options: dict[str, Any], exact: bool, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Flatten(), models.lbdn(**options))
    certificate = confirmed(tmp_path, model, capsys, *["--exact"] * exact, lost=1e-5 if exact else 1e-6)
    norms = [np.linalg.norm(a, 2) for name, a in Run(tmp_path).tensors.items() if name.endswith("weight")]
    assert certificate.constant < 0.9 * np.prod(norms)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change", [lambda m: m * 1.2, lambda m: m * 0, lambda m: -m, lambda m: m * np.resize([1, 5], len(m))]
)
def test_multipliers_that_prove_nothing_leave_the_product(change: Any, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(4)
    write_run(tmp_path, nn.Sequential(nn.Flatten(), models.lbdn([64, 32, 32, 10], gamma=2.0)), digits(12)[0])
    found = Run(tmp_path)
    for name in found.tensors:
        if "multiplier" in name:
            found.tensors[name] = np.ascontiguousarray(change(found.tensors[name]), dtype=np.float32)
    found.write()
    assert verdict(tmp_path) == 1
    assert "constant: claimed" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("model", [
    lambda: models.lbdn_conv(blocks=2, width=4, hidden=(32, 16), input_shape=SHAPE, classes=10),
    # Small networks of their layers are in `test_every_family`.
    pytest.param(lambda: models.kwlarge(dense=(48, 32), input_shape=SHAPE), marks=pytest.mark.slow),
    pytest.param(lambda: models.kwlarge(layer="sll", dense=(48, 32), input_shape=SHAPE), marks=pytest.mark.slow),
    lambda: models.kwlarge(layer="bcop", dense=(48, 32), input_shape=SHAPE, pool=True),
    lambda: models.mlp((32, 32), gamma=3.0, input_shape=SHAPE, classes=10, mean=[0.1], std=[0.3]),
    lambda: models.patchnet(patch=2, stages=((16, 2), (64, 2)), dense=(32,), input_shape=SHAPE),
    lambda: models.mlp((32, 32), layer="sandwich", input_shape=SHAPE, classes=10),
    lambda: models.vision_transformer(patch=2, width=8, heads=2, slots=12, dense=[16], input_shape=SHAPE),
])  # fmt: skip
def test_models(model: Any, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(5)
    confirmed(tmp_path, model(), capsys)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "options", "side"), [
    ("resnet9", {"width": 8}, 16), pytest.param("wide_resnet", {"widen": 1}, 16, marks=pytest.mark.slow),
    ("lipconvnet", {"width": 0.25, "first_blocks": "soc", "last_blocks": "soc"}, 24),
])  # fmt: skip
def test_larger_models(name: str, options: dict[str, Any], side: int, tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(6)
    write_run(tmp_path, models.build(name, input_shape=(1, side, side), **options), torch.rand(4, 1, side, side))
    assert verdict(tmp_path) == 0, capsys.readouterr().out


@pytest.mark.thorough
def test_integers_of_8_bits(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(7)
    x = digits(12)[0]
    write_run(tmp_path, models.small(layer="cayley"), x)
    plain = lipkit.load(lipkit.save(lipkit.load(tmp_path / "network"), tmp_path / "rounded", bits=8))
    write_run(tmp_path, plain, x)
    lipkit.save(plain, tmp_path / "network", bits=8)
    assert "int8" in str(
        {kind for _, kind in k.safetensors((tmp_path / "network/model.safetensors").read_bytes()).values()}
    )
    assert verdict(tmp_path) == 0, capsys.readouterr().out


@pytest.mark.thorough
def test_a_certificate_that_comes_with_the_package(capsys: Any) -> None:
    assert k.main([str(resolved("digits-cayley"))]) == 0
    assert "confirmed  359 radii confirmed" in capsys.readouterr().out


@pytest.mark.thorough
def test_only_numpy_is_imported_and_a_copy_is_enough(run: Path, tmp_path: Path) -> None:
    shutil.copy(CHECKER, tmp_path)
    code = (
        "import sys, lipkit_check; code = lipkit_check.main(sys.argv[1:]);"
        "print(sorted({'torch', 'lipkit', 'scipy', 'sklearn', 'safetensors'} & set(sys.modules))); sys.exit(code)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code, str(run), str(run / "samples.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_radius_that_is_not_reached_is_printed_with_its_share(run: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "run"
    shutil.copytree(run, target)
    found = Run(target)
    best = max(range(12), key=lambda i: found.rows[i]["radius"])
    own = found.rows[best]["radius"]
    found.rows[best]["radius"] = own * 1.25
    found.write()
    assert verdict(target) == 1
    said = capsys.readouterr().out
    assert f"refused  sample {best}: radius {own * 1.25:.9g}, proved here {own:.9g}"[:40] in said
    assert "20 % lost" in said
    assert "REFUSED  11 radii confirmed, 1 refused" in said


@pytest.mark.thorough
def test_radii_within_the_tolerance_are_confirmed_and_no_others(run: Path, tmp_path: Path) -> None:
    for share, code in ((-0.5, 0), (0.9e-5, 0), (1.2e-5, 1)):
        target = tmp_path / str(share)
        shutil.copytree(run, target)
        found = Run(target)
        for row in found.rows:
            row["radius"] *= 1 + share
        found.write()
        assert verdict(target) == code


@pytest.mark.thorough
def test_constants_within_the_tolerance_are_confirmed_and_no_others(run: Path, tmp_path: Path, capsys: Any) -> None:
    for key in ("constant", "body_constant"):
        for share, code in ((-1.2e-5, 1), (-0.8e-5, 0), (0.5, 0)):
            target = tmp_path / f"{key}{share}"
            shutil.copytree(run, target)
            found = Run(target)
            found.header[key] *= 1 + share
            found.write()
            assert verdict(target) == code
            assert capsys.readouterr().out.splitlines()[-1].startswith("REFUSED" if code else "confirmed")


def test_samples_outside_the_range_of_the_network(run: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "run"
    shutil.copytree(run, target)
    found = Run(target)
    for limits in ([0.0, 0.9], [0.1, 1.0]):
        found.config["input_range"] = limits
        found.write()
        assert verdict(target) == 1
        assert "samples outside" in capsys.readouterr().out


def test_data_that_are_missing_are_named(run: Path, tmp_path: Path, capsys: Any) -> None:
    np.savez(tmp_path / "other.npz", a=1)
    for name, reason in {
        "nothing": "nothing.npz: No such file or directory",
        "other": "missing entry: 'x_test",
    }.items():
        assert k.main([str(run), str(tmp_path / f"{name}.npz")]) == 1
        found = capsys.readouterr().out
        assert found.startswith("REFUSED  ")
        assert reason in found
        assert "Error" not in found
        assert "Errno" not in found


@pytest.mark.thorough
def test_the_first_samples_alone(run: Path, capsys: Any) -> None:
    assert verdict(run, "--samples", "3") == 0
    assert "3 radii confirmed" in capsys.readouterr().out
    for count in ("0", "-1"):
        assert verdict(run, "--samples", count) == 1
        assert "expected at least one sample" in capsys.readouterr().out


def test_a_run_without_certificate(tmp_path: Path, capsys: Any) -> None:
    assert k.main([str(tmp_path)]) == 1
    assert "no network/config.json" in capsys.readouterr().out
    lipkit.save(lipkit.export(nn.Linear(2, 3), (2,)), tmp_path / "network")
    assert k.main([str(tmp_path)]) == 1
    assert "expected one certificate.jsonl[.gz] (none with --gain), got 0" in capsys.readouterr().out


def controller(outputs: int) -> nn.Module:
    scales = layers.Normalize([0.5, 0.0, 1.0], [2.0, 0.5, 1.0]), layers.Rescale([-4.0, 0.1][:outputs])
    return nn.Sequential(scales[0], models.lbdn([3, 8, 8, outputs], 1.5, activation="tanh"), scales[1])


GAINS: list[tuple[nn.Module, tuple[int, ...], float]] = [  # the gain that is claimed, above what a search finds
    (controller(2), (3,), 12.0), (controller(1), (3,), 12.0), (models.lbdn([2, 4, 4, 3], 2.0), (2,), 2.0),
    (layers.Residual(layers.CayleyLinear(4, 4)), (4,), 1.0), (layers.CayleyConv2d(2, 4, 3), (2, 6, 6), 1.0),
    (nn.Sequential(nn.Linear(3, 2), nn.Sigmoid()), (3,), 3.0), (layers.R2dn(2, 3, 4, 6), (9, 2), 1.0),
    (nn.Sequential(layers.Ren(2, 3, 4, 6), nn.Linear(3, 2)), (9, 2), 3.0), (layers.LinearSystem(2, 1, 3), (9, 2), 1.0),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(GAINS)))
def test_a_gain_is_confirmed_of_a_saved_network_without_certificate(case: int, tmp_path: Path, capsys: Any) -> None:
    model, shape, claim = GAINS[case]
    plain = lipkit.export(model, shape)
    lipkit.save(plain, tmp_path / "saved")
    smooth = any(type(part).__name__ in k.FLOATING for part in plain)
    for options in ([], *[["--exact"]] * (not smooth)):
        assert k.main([str(tmp_path / "saved"), "--gain", str(claim), *options]) == 0
        assert f"confirmed  gain: claimed {claim:g}, proved here" in capsys.readouterr().out
    found = lipkit.analysis.lipschitz_lower_bound(plain, restarts=4, steps=20).lower
    assert 0 < found <= claim * (1 + 1e-6)
    assert k.main([str(tmp_path / "saved"), "--gain", str(found * 0.999)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("REFUSED  gain: claimed")
    assert float(re.findall(r"proved here ([\d.e+-]+)", said)[0]) >= found * 0.999


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    made = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return [part for layer in made for part in (layer, activation())][:-1]


@pytest.mark.parametrize(("parts", "shape"), [
    ([nn.Linear(3, 4), layers.Residual(nn.Sequential(*dense(4, 6, 4))), nn.ReLU(), nn.Linear(4, 2)], (3,)),
    ([layers.Residual(nn.Sequential(*dense(4, 6, 4, activation=nn.Tanh))), *dense(4, 2)], (3, 4)),
    ([*dense(3, 5, 3), nn.GELU(), *dense(3, 5, 5, 2)], (3,)),  # two inequalities
    ([nn.Softmax(-1), layers.Residual(nn.Sequential(*dense(3, 5, 3), nn.GELU()))], (2, 3)),  # one within a graph
], ids=["blocks", "tokens", "two", "within"])  # fmt: skip
def test_the_gain_of_tight_is_confirmed(parts: list[nn.Module], shape: tuple[int, ...], tmp_path: Path) -> None:
    proved = tight(lipkit.export(nn.Sequential(*parts), shape))
    gain = float(lipkit.lipschitz(proved))
    lipkit.save(proved, tmp_path)
    assert k.main([str(tmp_path), "--gain", str(gain)]) == 0
    assert k.main([str(tmp_path), "--gain", str(gain * 0.9999)]) == 1  # the same multipliers prove no less


def test_no_gain_is_confirmed_beyond_the_tolerance_or_of_other_numbers(tmp_path: Path, capsys: Any) -> None:
    plain = lipkit.export(nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU()), (1,))
    with torch.no_grad():
        plain[0].weight.fill_(2.0)
    lipkit.save(plain, tmp_path)
    for claim, code in (("2", 0), ("1.99999", 0), ("1.99997", 1), ("0", 1), ("-2", 1), ("nan", 1), ("inf", 1)):
        assert k.main([str(tmp_path), f"--gain={claim}"]) == code
        assert ("confirmed" in capsys.readouterr().out) == (code == 0)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("ReLU", "Tanh"))  # its hash is another one
    assert k.main([str(tmp_path), "--gain=9"]) == 1
    assert "its hash is" in capsys.readouterr().out


def test_few_weights_of_a_convolution_pay_for_the_inequality_of_many_units(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = [nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.AvgPool2d(30), nn.Flatten()]
    proved = modules.Network(parts, (1, 30, 30), {1: torch.full((900,), 0.03)})
    lipkit.save(proved, tmp_path)
    assert lipkit.lipschitz(proved) < 0.7 * lipkit.lipschitz(modules.Network(parts, (1, 30, 30)))
    assert k.main([str(tmp_path), f"--gain={float(lipkit.lipschitz(proved))}"]) == 0


@pytest.mark.parametrize("scale", [1e-8, 1e12])
def test_multipliers_that_a_narrow_format_loses_leave_the_product(scale: float, tmp_path: Path) -> None:
    torch.manual_seed(5)
    parts = dense(3, 6, 6, 2)
    with torch.no_grad():
        parts[0].weight.mul_(scale), parts[-1].weight.div_(scale)
    proved = tight(modules.Network(parts, (3,)))
    for values in proved.multipliers().values():
        values.copy_(values.half())
    assert all(bool(((m == 0) | m.isinf()).any()) for m in list(proved.multipliers().values())[-1:])
    lipkit.save(proved, tmp_path)
    assert k.main([str(tmp_path), f"--gain={float(lipkit.lipschitz(proved)) * (1 + 1e-6)}"]) == 0


def test_a_gain_is_that_of_the_folder_that_is_named(tmp_path: Path, capsys: Any) -> None:
    lipkit.save(lipkit.export(nn.Sequential(nn.ReLU()), (1,)), tmp_path / "network")
    assert k.main([str(tmp_path), "--gain=1"]) == 0
    assert k.main([str(tmp_path / "misspelt"), "--gain=1"]) == 1  # the network beside it is another one
    assert "no network/config.json" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("kind", range(len(CORRUPTIONS)), ids=[c.__name__ for c in CORRUPTIONS])
def test_corruptions_are_refused(kind: int, run: Path, tmp_path: Path, capsys: Any) -> None:
    for turn in range(4):
        name = corrupted(run, kind + turn * len(CORRUPTIONS), tmp_path / "run")
        assert verdict(tmp_path / "run") == 1, (name, turn)
        said = capsys.readouterr().out
        assert "REFUSED  " in said
        assert "MemoryError" not in said


@pytest.mark.parametrize("one", [True, 1.0])
def test_what_equals_a_size_is_not_taken_for_it(one: object, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    forged = Run(tmp_path / "run")
    assert forged.header["input_shape"][0] == one
    forged.header["input_shape"][0] = one
    forged.write(rehash=False)
    assert verdict(tmp_path / "run") == 1


def test_radii_by_hand() -> None:
    k.ops = k.Floats()
    two, one = Fraction(2), Fraction(1)
    table = [[one, one, two], [one, one, one], [two, one, one]]
    logits = np.array([3.0, 1.0, 2.0])
    assert k.radius(logits, 0, table, Fraction(0))[:2] == (Fraction(1, 2), 1)
    own, _, near = k.radius(logits, 0, table, Fraction(1, 8))
    assert near >= Fraction(1, 8) * Fraction(141421356, 10**8)
    assert own == (1 - near) / 2
    assert k.radius(logits, 1, table, Fraction(0))[0] == 0
    assert k.radius(logits, 0, table, Fraction(1))[0] == 0  # the margin drowns in the error
    assert k.radius(logits, 0, [[one * 0] * 3] * 3, Fraction(0))[0] is None
    assert k.radius(np.array([1.0, 1.0]), 0, [[one, one]] * 2, Fraction(0))[0] == 0
    with pytest.raises(k.Refused, match="label 3 of 3"):
        k.radius(logits, 3, table, Fraction(0))


def test_pairs_of_the_last_layer(tmp_path: Path) -> None:
    """K is the smaller one of sqrt(2) L and L_body times the distance of two rows."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), layers.MaxMin(), nn.Linear(6, 10))
    write_run(tmp_path, model, digits(3)[0])
    k.ops = k.Floats()
    config, tensors, _ = k.load_network(tmp_path / "network")
    network = k.Network(config["network"], tensors)
    first, last = (tensors[name].astype(np.float64) for name in ("1.weight", "3.weight"))
    body = np.linalg.norm(first, 2)
    whole = body * np.linalg.norm(last, 2)
    assert float(network.gain) == pytest.approx(whole, rel=1e-8)
    assert network.gain >= Fraction(whole) * (1 - Fraction(1, 10**13))
    table = network.constants()
    seen = set()
    for t in range(10):
        for i in set(range(10)) - {t}:
            pair = body * np.linalg.norm(last[t] - last[i])
            least = min(pair, np.sqrt(2) * whole)
            seen.add(pair < np.sqrt(2) * whole)
            assert least * (1 - 1e-13) <= float(table[t][i]) <= least * (1 + 1e-8)
    assert True in seen


def test_json_is_strict() -> None:
    assert k.parse('{"a": [1, 2.5]}') == json.loads('{"a": [1, 2.5]}')
    for text in ('{"a": NaN}', '{"a": 1, "a": 2}', '{"a": Infinity}'):
        with pytest.raises(k.Refused):
            k.parse(text)
