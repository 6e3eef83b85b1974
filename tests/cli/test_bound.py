from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lipkit
from lipkit.analysis import analyze
from lipkit.cli.bound import parse_shape
from lipkit.cli.certify import exported, steep
from lipkit.cli.main import main
from lipkit.errors import RecipeError
from lipkit.experiments import load_recipe
from lipkit.report import read_record

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(3, 2)
        self.norm.weight.data.copy_(torch.tensor([20.0, 3.0, 1.0]))
    def forward(self, x):
        return self.head(nn.functional.gelu(self.norm(self.conv(x)) + x).mean((2, 3)))

def factory():
    torch.manual_seed(0)
    return Net()

def unknown():
    return nn.Sequential(nn.Linear(3, 3), nn.Hardshrink())

def nothing():
    return 3

trained = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

def policy():
    torch.manual_seed(1)
    layers = [nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    return Named(nn.Sequential(*layers))

def wide():
    return nn.Sequential(nn.Linear(2, 601), nn.ReLU(), nn.Linear(601, 1))

def steep():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    torch.nn.init.orthogonal_(body[1].weight, 8.0)
    return body

class Named(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
    def forward(self, x):
        return self.body(x)

class gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.value, self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.value(x) * torch.sigmoid(self.gate(x)))

class Gate(nn.Module):
    def forward(self, x):
        return x * torch.tanh(2 * x)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "bound_test_networks.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "bound_test_networks"


@pytest.mark.thorough
def test_a_factory(module, capsys):
    assert main(["bound", f"{module}:factory", "--input-shape", "1,6,6"]) == 0
    out, err = capsys.readouterr()
    assert "runs the code" in err
    lines = out.splitlines()
    assert lines[0].startswith("L <= ")
    assert "(proved), L >= " in lines[0]
    assert "tight not tried: no run of dense layers" in lines[1]
    factors = [1 / float(n) if sign == "/" else float(n) for sign, n in re.findall(r"^([x/]) ([0-9.]+)", out, re.M)]
    assert factors == sorted(factors, reverse=True)
    assert math.prod(factors) == pytest.approx(float(lines[0].split()[2]), rel=2e-2)
    assert lines[-1].startswith("next: lipkit certify")
    assert "conv + norm" in out
    assert "skip connections" in out


def test_a_network_that_a_module_holds(module, capsys):
    assert main(["bound", f"{module}:trained", "--input-shape", "1,2,2"]) == 0
    assert capsys.readouterr().out.startswith("L <= ")


@pytest.mark.thorough
def test_a_folder(tmp_path, capsys):
    plain = lipkit.export(lipkit.models.build("small", input_shape=(1, 8, 8), classes=10), (1, 8, 8))
    lipkit.save(plain, tmp_path / "net")
    assert main(["bound", str(tmp_path)]) == 2  # a run
    assert f"{tmp_path / 'net'} has them" in capsys.readouterr().err
    assert main(["bound", str(tmp_path / "net"), "--restarts", "0", "--all"]) == 0
    assert "L <= 1" in capsys.readouterr().out
    assert main(["bound", str(tmp_path / "net"), "--input-shape", "3,8,8"]) == 2
    assert "expected --input-shape 1,8,8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["net.pt", "net.pth", "net.pkl", "net.CKPT"])
def test_pickles_are_refused_unread(tmp_path, name, capsys):
    (tmp_path / name).write_bytes(b"never read")
    assert main(["bound", str(tmp_path / name), "--input-shape", "3"]) == 2
    assert "runs the code in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{m}:unknown", "--input-shape", "3"], "at '1': lipschitz has no rule for torch.nn.modules.activation"),
        (["{m}:nothing", "--input-shape", "3"], "expected an nn.Module, got int"),
        (["{m}:missing", "--input-shape", "3"], "expected a function to import"),
        (["{m}:factory"], "expected --input-shape"),
        (["{m}:factory", "--input-shape", "1,x"], "expected positive sizes"),
        (["{m}:factory", "--input-shape", "2,6,6"], "does not accept inputs of shape (2, 6, 6)"),
        (["{m}:factory", "--input-shape", "1,6,6", "--method", "magic"], "expected one of auto, best"),
        (["{m}:Gate", "--input-shape", "3"], "lipkit bound --box 0,1"),
        (["{m}:Gate", "--input-shape", "3", "--box", "0"], "--box: expected two numbers, the smaller one first"),
        (["{m}:Gate", "--input-shape", "3", "--box", "1,0"], "the smaller one first"),
        (["{m}:Gate", "--input-shape", "3", "--box", "0,inf"], "--box: expected two finite numbers, the smaller"),
        (["somewhere"], "which is none of them"),
        ([""], "which is none of them"),
        (["missing.onnx"], "onnx"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(module, arguments, message, capsys):
    assert main(["bound", *(a.replace("{m}", module) for a in arguments)]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("lipkit: ")
    assert message in err


def test_the_table_hides_what_has_no_influence():
    found = analyze(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (2,), restarts=0)
    assert "1 without influence" in str(found)
    assert "ReLU" in found.describe(everything=True)
    assert "found" not in str(found)
    assert "for inputs in" not in str(found)


@pytest.mark.thorough
def test_a_product_is_bounded_in_a_box(module, capsys):
    # The largest derivative of x tanh(2 x), at 0.6; products are bounded coarsely.
    assert main(["bound", f"{module}:Gate", "--input-shape", "3", "--box", "-1,1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("for inputs in [-1, 1]")
    upper, lower = (float(word) for word in re.findall(r"L [<>]= ([0-9.]+)", out.splitlines()[0]))
    assert lower == pytest.approx(1.1996, rel=5e-2)
    assert 1.1996 <= upper <= 3


@pytest.mark.thorough
def test_a_policy_has_its_tight_bound_by_default_and_less_on_a_box(module, capsys):
    command = ["bound", f"{module}:policy", "--input-shape", "5", "--json"]

    def found(*options: str) -> dict[str, Any]:
        assert main([*command, *options]) == 0
        return json.loads(capsys.readouterr().out)

    plain, loose, box = found(), found("--no-tight", "--restarts", "0"), found("--box", "-0.1,0.1", "--restarts", "0")
    assert plain["product"] == loose["product"] == loose["upper"] > 2.5 * plain["upper"]
    assert plain["lower"] < plain["tight"] == plain["upper"] == pytest.approx(0.47, abs=0.01)
    assert (plain["how"], loose["tight"], loose["lower"]) == ("LipSDP", None, 0)
    assert box["upper"] < 0.6 * plain["upper"]
    assert [layer["name"] for layer in box["layers"]] == ["body.0", "body.1", "body.2", "body.3", "body.4"]
    assert main([*command[:-1], "--restarts", "0"]) == 0
    out = capsys.readouterr().out
    assert "product of the layers 1.3867117 | tight 0.4713" in out.splitlines()[1]
    assert out.splitlines()[3].split() == ["factor", "bound", "type", "method", "layer"]


@pytest.mark.thorough
def test_wide_networks_are_tight_on_request(module, capsys):
    command = ["bound", f"{module}:wide", "--input-shape", "2", "--restarts", "0"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "tight not tried: 601 hidden units, more than 600 (--tight" in out
    assert "next: lipkit bound MODEL --tight" in out
    assert main([*command, "--tight", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["how"] == "LipSDP"


@pytest.mark.thorough
def test_the_users_names_stay_in_a_box(module, capsys):
    """Of products too, whose limits come from an export."""
    assert main(["bound", f"{module}:gated", "--input-shape", "4", "--box", "0,1", "--restarts", "0"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}\n" in out for name in ("value", "gate", "head"))
    assert "skip connections" in out


def test_shapes():
    assert parse_shape("3x4") == (3, 4)
    assert parse_shape(None) is None


def test_the_run_of_any_file_has_a_name_that_recipes_accept(tmp_path):
    network = lipkit.export(nn.Linear(2, 2), (2,))
    for stem, name in (("net", "net"), ("_a b", "a_b"), ("größe", "gr__e"), ("--", "network"), ("x" * 101, "x" * 100)):
        assert exported(str(lipkit.save(network, tmp_path / stem)), None)[1] == name
        load_recipe("digits_cayley", [f"name={name}"])


def test_infinite_bounds_are_shown():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].weight.data.fill_(float("inf"))
    with torch.no_grad():
        assert "inf" in str(analyze(model, (1,), restarts=0))


@pytest.mark.thorough
def test_a_network_from_elsewhere_is_certified_and_becomes_a_run(module, tmp_path, capsys) -> None:
    from lipkit.certificates.certificate_file import read_certificate
    from lipkit.experiments import read_recipe

    (tmp_path / "own_test_network.py").write_text(SOURCE.replace("nn.Linear(3, 2)", "nn.Linear(3, 10)"))
    arguments = ["certify", "own_test_network:factory", "digits", "--input-shape", "1,8,8"]
    quick = ["data.limit=16", "certify.attack_samples=8", "certify.attack_steps=5", "--out", str(tmp_path / "out")]
    assert main([*arguments, *quick]) == 0
    folder = tmp_path / "out" / "own_test_network_factory-001"
    network = lipkit.load(folder / "network")
    assert network.input_range == (0.0, 1.0)
    certificate = read_certificate(folder / "certificate.jsonl").certificate
    assert certificate.constant == pytest.approx(analyze(network, (1, 8, 8), restarts=0).upper)
    assert read_recipe(folder, build=False).model.name == "own_test_network:factory"
    capsys.readouterr()
    # Like any run: checked, attacked and certified again.
    for limit in ([], ["--limit", "16"]):  # by default as many samples as the certificate has
        assert main(["check", str(folder / "certificate.jsonl"), str(folder / "network"), "digits", *limit]) == 0
        assert "confirmed" in capsys.readouterr().out
    assert main(["certify", str(folder), "certify.attack_samples=4", "certify.attack_steps=5"]) == 0
    # So is one that came as a file: its name cannot be built, and need not be.
    assert main(["certify", str(folder / "network"), "digits", *quick]) == 0
    again = tmp_path / "out" / "network-001"
    assert main(["certify", str(again), "certify.attack_samples=4", "certify.attack_steps=5"]) == 0
    assert main(["attack", str(again), "--samples", "2", "--steps", "5"]) == 0
    with pytest.raises(RecipeError, match=r"model: expected one of .*, got '.*network'"):
        read_recipe(again)
    assert main(["certify", "own_test_network:factory", "mnist", "--input-shape", "1,8,8"]) != 0
    assert main(["certify", str(tmp_path / "nowhere")]) != 0


@pytest.mark.thorough
@pytest.mark.parametrize(("option", "method"), [((), "local"), (("--method", "global"), "last layer")])
def test_a_foreign_network_gets_local_radii_unless_told_otherwise(module, tmp_path, capsys, option, method) -> None:
    from lipkit.certificates.certificate_file import read_certificate

    quick = ["data.limit=12", "certify.attack_samples=2", "certify.attack_steps=1", "--out", str(tmp_path / "out")]
    assert main(["certify", f"{module}:steep", "digits", "--input-shape", "1,8,8", *quick, *option]) == 0
    err = capsys.readouterr().err
    assert ("radii by local bounds: layer 1 has the constant 8" in err) == (not option)
    (folder,) = (tmp_path / "out").iterdir()
    assert read_certificate(folder / "certificate.jsonl").certificate.method == method


@pytest.mark.thorough
def test_what_is_bounded_by_construction_is_not_steep() -> None:
    built = [lipkit.models.build("small", layer=layer, input_shape=(1, 8, 8), classes=10) for layer in ("aol", "sll")]
    assert [steep(lipkit.export(model, (1, 8, 8))) for model in built] == ["", ""]
    assert steep(lipkit.export(lipkit.models.lbdn([3, 8, 8, 2], gamma=5.0), (3,))) == ""
    assert "layer 0 has" in steep(lipkit.export(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)), (64,)))


@pytest.mark.thorough
def test_windows_of_sensors_are_certified_in_a_range_of_their_own(module, tmp_path, capsys) -> None:
    """Samples (C, H, W) that are no images: without a range they are refused, and the message names the key."""
    x = np.random.default_rng(0).uniform(-20, 60, (24, 1, 8, 8)).astype(np.float32)
    y = np.arange(24) % 2
    np.savez("windows.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    arguments = ["certify", f"{module}:factory", "npz:windows.npz", "--input-shape", "1,8,8", "--out", "out"]
    quick = ["certify.attack_samples=4", "certify.attack_steps=2", "certify.eps=1"]
    assert main([*arguments, *quick]) == 2
    assert "data.range=LOW,HIGH" in capsys.readouterr().err
    assert main([*arguments, *quick, "data.range=-20,60"]) == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert lipkit.load(folder / "network").input_range == (-20.0, 60.0)
    assert read_record(folder).attack.box == (-20.0, 60.0)
    assert main(["check", str(folder / "certificate.jsonl"), str(folder / "network"), "npz:windows.npz"]) == 0
    assert main(["attack", str(folder), "--eps", "1", "--steps", "2", "--samples", "4"]) == 0
    # The network and the data state their ranges: others would give radii in other units.
    np.savez("unit.npz", x_train=x / 80 + 0.25, y_train=y, x_test=x / 80 + 0.25, y_test=y)
    for again in (
        ["certify", str(folder / "network"), "npz:unit.npz"],
        ["certify", str(folder), "data.spec=npz:unit.npz"],
    ):
        assert main([*again, *quick, "data.range=0,1"]) == 2
        assert "input_range [-20, 60], got npz:unit.npz in [0, 1]" in capsys.readouterr().err
