"""kill -9 in the middle of an epoch and in the middle of a checkpoint, then resume, in real processes."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch

from lipkit.training import checkpoints as run_folder

pytestmark = pytest.mark.thorough

SUBJECT = """
import torch
from torch import nn
from lipkit import training
from lipkit.data import random_flip

def run(folder, resume=False, post_step=None):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 3))
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(40, 1, 4, 4, generator=generator)
    y = torch.arange(40) % 3
    return training.fit(
        model, (x, y), epochs=4, batch_size=8, lr=0.05, augment=random_flip, run_dir=folder, resume=resume,
        post_step=post_step, accelerator="cpu", ema=0.9, accumulate=3,
    )
"""


def namespace():
    found: dict = {}
    exec(compile(SUBJECT, "kill_subject", "exec"), found)
    return found["run"]


def killed_at(where, folder):
    """Train here until the process kills itself."""

    def write_atomic(path, content, write=run_folder.write_atomic):
        if where == "checkpoint" and "epoch-0003" in str(path) and path.name == "state.pt":
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    def post_step(model, step, epoch_end):
        if where == "epoch" and step == 11:
            os.kill(os.getpid(), signal.SIGKILL)

    run_folder.write_atomic = write_atomic
    namespace()(folder, post_step=post_step)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with the run folders of two processes, epoch and checkpoint, that were killed there."""
    folder = tmp_path_factory.mktemp("killed")
    for where in ("epoch", "checkpoint"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: threads are not in the fork
            child = os.fork()  # a new interpreter would take longer to import than to train
        if child == 0:
            signal.alarm(120)  # a child that hangs fails
            try:
                killed_at(where, folder / where)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return folder


@pytest.fixture
def subject():
    threads = torch.get_num_threads()
    yield namespace()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("where", "done"), [("epoch", 2), ("checkpoint", 2)])
def test_kill_9_loses_at_most_the_epoch_in_progress(tmp_path, killed, subject, where, done):
    folder = killed / where
    assert run_folder.load_checkpoint(folder)[0] == done
    assert len(run_folder.read_metrics(folder)) == (3 if where == "checkpoint" else 2)

    resumed = subject(folder, resume=True)
    whole = subject(tmp_path / "whole")
    assert resumed.epochs_done == whole.epochs_done == 4
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
        assert torch.equal(whole.average.state_dict()[name], resumed.average.state_dict()[name]), name
        assert value.numel() == 0 or not torch.equal(value, whole.average.state_dict()[name]), name
    assert [row["loss"] for row in run_folder.read_metrics(folder)] == [row["loss"] for row in whole.history]
    assert not list(Path(folder).rglob("*.tmp"))
