"""One of each thing is added from outside the package, by public names only, and works wherever its name is read.

In a process of its own: what is registered stays registered.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import torch
from torch import nn

import lipkit

torch.manual_seed(0)
x, y = torch.rand(40, 6), torch.arange(40) % 3
"""
ADDITIONS = {
    "an activation": """
from lipkit.layers import SandwichLinear
from lipkit.modules import Activation, add_activation

class HalfRelu(nn.Module):
    def forward(self, x):
        return x.relu() / 2

add_activation(Activation(HalfRelu, slope=0.5, rounding=(1.0, 0.0), restricted=True))
assert float(lipkit.lipschitz(HalfRelu())) == 0.5
layer = SandwichLinear(6, 3, activation="halfrelu")
assert isinstance(layer.activation, HalfRelu)
network = lipkit.export(nn.Sequential(nn.Linear(6, 6), HalfRelu(), nn.Linear(6, 3)), (6,))
certificate = lipkit.certify(network, x, y, evaluator="float32")
assert float(certificate.radius.max()) > 0
assert lipkit.modules.sha256(lipkit.load(lipkit.save(network, "net"))) == certificate.network_sha256
""",
    "a module of exported networks": """
from lipkit.modules import Plain, add_plain, exact

class Negate(nn.Module):
    def forward(self, x):
        return -x

add_plain(Plain(Negate, constant=1.0, rounding=exact, stored={}))
network = lipkit.export(nn.Sequential(Negate(), nn.Linear(6, 3)), (6,))
assert float(lipkit.certify(network, x, y).radius.max()) > 0
assert torch.equal(lipkit.load(lipkit.save(network, "net"))(x), network(x))
""",
    "a training option": """
import json
from lipkit.training import TrainOptions

class Noisy(TrainOptions):
    noise: float = 0.0

    def noisy(self):
        return self.changed(augment=lambda x, generator: x + self.noise * torch.randn(x.shape, generator=generator))

options = Noisy(epochs=1, batch_size=10, accelerator="cpu", noise=0.25)
lipkit.fit(nn.Linear(6, 3), (x, y), options, run_dir="run", lr=0.01)
assert json.load(open("run/settings.json"))["noise"] == 0.25
try:
    Noisy(epochs=1, nose=0.25)
except lipkit.errors.OptionError as error:
    assert "'nose'" in str(error)
else:
    raise AssertionError("expected an unknown option to be refused")
""",
    "an attack": """
from lipkit import attacks, evaluation
from lipkit.data import Split

def sideways(model, x, y, *, eps, box=None, generator=None):
    return x + torch.as_tensor(eps).reshape(-1, 1) / x[0].numel() ** 0.5

attacks.ATTACKS["sideways"] = attacks.Named(sideways, "a step along the diagonal")
network = lipkit.export(nn.Linear(6, 3), (6,))
found = attacks.run_attack("sideways", network, x, y, eps=0.1, box=None)
assert found.ran == "a step along the diagonal"
measured = evaluation.evaluate(network, Split(x, y), eps=[0.1], attack=evaluation.Attack(name="sideways", box=None))
assert "sideways(0.1)" in measured.metrics()
""",
    "a data set": """
from lipkit import data

def load(root):
    return data.Data("toy", data.Split(x, y), data.Split(x, y), ("a", "b", "c"))

data.DATASETS["toy"] = data.Entry("forty points", load, "made up")
assert len(data.load("toy").train) == 40
""",
    "a layer family": """
from lipkit.layers import FAMILIES, CayleyConv2d, CayleyLinear, Family
from lipkit.testing import check_layer

FAMILIES["mine"] = Family("mine", "Cayley again", "-", "-", CayleyConv2d, CayleyLinear)
model = lipkit.models.small(layer="mine", input_shape=(1, 8, 8), classes=3)
assert any(isinstance(m, CayleyConv2d) for m in model)
measured = check_layer(lambda **options: FAMILIES["mine"].linear(4, 4, **options), input_shape=(4,), laws=[1, 2])
assert abs(measured[2]["largest"] - 1) < 1e-9
""",
}


@pytest.mark.thorough
def test_one_of_each_is_added_from_outside(tmp_path: Path) -> None:
    for i, code in enumerate(ADDITIONS.values()):
        (tmp_path / f"addition{i}.py").write_text(SETUP + code)
    every = "; ".join(f"import addition{i}" for i in range(len(ADDITIONS)))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:lipkit", "-c", every],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
