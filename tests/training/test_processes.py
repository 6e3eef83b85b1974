"""Training in two processes (gloo): data parallel, against one process, and stopped and resumed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning_fabric.strategies import ModelParallelStrategy

from lipkit import training
from lipkit.errors import OptionError
from lipkit.lowering import lipschitz
from lipkit.training import checkpoints as run_folder
from lipkit.training import devices

pytestmark = pytest.mark.thorough

# 45 samples in batches of 8, so that the last batch has 5, and one rank has more of it than the other.
SUBJECT = """
import torch
from torch import nn
from lipkit import training
from lipkit.data import random_flip
from lipkit.layers import CayleyConv2d, CayleyLinear, SllLinear

def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        CayleyConv2d(1, 2, 3), nn.Flatten(), CayleyLinear(32, 8), nn.ReLU(), nn.Dropout(dropout), SllLinear(8, 8),
        nn.Linear(8, 3),
    )

def data(n=45):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(n, 1, 4, 4, generator=generator), torch.arange(n) % 3

def evaluate(model):
    return {"norm": sum(float(p.square().sum()) for p in model.parameters())}

def plain(**options):
    return training.fit(
        network(), data(), epochs=3, batch_size=8, lr=0.02, grad_clip=0.5, ema=0.9, accumulate=2, evaluate=evaluate,
        accelerator="cpu", **options,
    )

class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(16, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x.flatten(1))

def unused(**options):
    torch.manual_seed(0)
    return training.fit(Unused(), data(), epochs=2, batch_size=8, lr=0.02, accelerator="cpu", **options)

def random(folder, **options):
    return training.fit(
        network(0.5), data(120), epochs=2, batch_size=4, lr=0.02, augment=random_flip, ema=0.9, run_dir=folder,
        accelerator="cpu", **options,
    )
"""

WORKER = """
import atexit, os, pathlib, sys, torch
torch.set_num_threads(1)
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from process_subject import plain, random, unused
from lipkit import training
from lipkit.errors import OptionError, RunError
child = os.fork()  # the imports take longer than the trainings
os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), "0" if child else "1"))
# Registered before the library's own: so it runs after that, and still with a living interpreter.
atexit.register(lambda: (out / f"ended{os.environ['RANK']}").write_text(str(not dist.is_initialized())))
out = pathlib.Path(sys.argv[1])
runs = {"plain": plain()}
runs["whole"] = random(out / "whole")
part = random(out / "part", max_minutes=1e-9)
runs["resumed"] = random(out / "part", resume=True)
found = {
    name: {"model": run.model.state_dict(), "average": run.average.state_dict(),
           "rows": [r["loss"] for r in run.history], "norm": [r.get("norm") for r in run.history]}
    for name, run in runs.items()
}
found["part"] = {"finished": part.finished, "epochs": part.epochs_done, "world": dist.get_world_size()}
try:
    random(out / "whole")
except RunError as error:
    found["taken"] = str(error)
try:
    unused()
except OptionError as error:
    found["unused"] = str(error)
found["unused_taken"] = unused(strategy="ddp_find_unused_parameters_true").model.state_dict()
torch.save(found, out / f"rank{dist.get_rank()}.pt")
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def launch(folder):
    """Start two processes with the environment that torchrun gives them; returns what each found."""
    (folder / "process_subject.py").write_text(SUBJECT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1", "GROUP_RANK": "0",
    }  # fmt: skip
    command = [sys.executable, "-c", WORKER, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **common}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    namespace: dict = {}
    exec(compile(SUBJECT, "process_subject", "exec"), namespace)
    return namespace, folder, launch(folder)


def test_both_processes_end_with_the_same_weights(found):
    _, _, (first, second) = found
    assert first["part"]["world"] == 2
    for name in ("plain", "whole", "resumed"):
        for part in ("model", "average"):
            for key, value in first[name][part].items():
                assert torch.equal(value, second[name][part][key]), (name, part, key)


def test_two_processes_do_what_one_does_with_the_same_batches(found):
    namespace, _, (first, _) = found
    with torch.random.fork_rng(devices=[]):
        one = namespace["plain"]()
    start = namespace["network"]().state_dict()
    for model, part in ((one.model, "model"), (one.average, "average")):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(first["plain"][part][key], value, rtol=0, atol=1e-5)
    moved = max(float((value - start[key]).abs().max()) for key, value in one.model.state_dict().items())
    assert moved > 0.05
    losses = [row["loss"] for row in one.history]
    assert first["plain"]["rows"] == pytest.approx(losses, abs=1e-5)
    assert first["plain"]["norm"] == pytest.approx([row["norm"] for row in one.history], rel=1e-4)


def test_the_clock_stops_both_within_an_epoch_and_a_resume_continues_bit_for_bit(found):
    _, folder, ranks = found
    for rank in ranks:
        assert (rank["part"]["finished"], rank["part"]["epochs"]) == (False, 0)
        for part in ("model", "average"):
            for key, value in rank["whole"][part].items():
                assert torch.equal(value, rank["resumed"][part][key]), (part, key)
    assert ranks[0]["whole"]["rows"] == ranks[0]["resumed"]["rows"]
    kept = sorted(p.name for p in (folder / "part" / "checkpoints").iterdir())
    assert kept == ["epoch-0002"]
    assert len(run_folder.read_metrics(folder / "part")) == 2


def test_what_the_first_process_refuses_all_refuse(found):
    _, _, ranks = found
    assert all("expected a new run folder" in rank["taken"] for rank in ranks)


def test_parameters_without_a_gradient_need_another_strategy(found):
    namespace, _, ranks = found
    expected = "expected every parameter in the loss, or strategy='ddp_find_unused_parameters_true'"
    with torch.random.fork_rng(devices=[]):
        one = namespace["unused"]().model.state_dict()  # which one process takes
    for rank in ranks:
        assert rank["unused"].startswith(expected)
        for key, value in rank["unused_taken"].items():
            torch.testing.assert_close(value, one[key], rtol=0, atol=1e-5)


def test_a_strategy_that_keeps_parameters_in_parts_is_refused():
    plain = SimpleNamespace(precision="32-true")
    sharded = SimpleNamespace(strategy=ModelParallelStrategy(lambda model, mesh: model), world_size=1)
    sharded.strategy.precision = plain
    with pytest.raises(OptionError, match="leaves parameters whole, got Fabric's ModelParallelStrategy"):
        training.fit(torch.nn.Linear(2, 2), (torch.rand(8, 2), torch.arange(8) % 2), epochs=1, fabric=sharded)


def test_the_process_group_ends_before_the_interpreter(found):
    """gloo's threads would otherwise abort some of the processes after their work was done."""
    _, folder, _ = found
    assert [(folder / f"ended{rank}").read_text() for rank in (0, 1)] == ["True", "True"]


def test_a_process_group_of_the_caller_is_not_ended(monkeypatch):
    registered = []
    monkeypatch.setattr(devices.atexit, "register", registered.append)
    options = training.TrainOptions(epochs=1, accelerator="cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        devices.make_fabric(options)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    devices.make_fabric(options)  # one process makes no group
    assert not dist.is_initialized()
    assert devices._end_group not in registered  # other libraries may register what they like


def test_the_trained_network_keeps_its_constraint(found):
    namespace, _, (first, _) = found
    model = namespace["network"]()
    model.load_state_dict(first["plain"]["model"])
    assert lipschitz(model[:6].eval(), (1, 4, 4)).item() == pytest.approx(1, abs=1e-5)
