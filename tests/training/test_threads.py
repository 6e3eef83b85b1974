"""Small work takes one thread, and the process has its own again afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lipkit.training.devices import threads_for

CPU, GPU = (SimpleNamespace(device=torch.device(kind)) for kind in ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("fabric", "parameters", "numbers", "inside"),
    [(CPU, 1000, 4096, 1), (CPU, 10**6, 4096, 3), (CPU, 1000, 10**5, 3), (GPU, 1000, 4096, 3)],
    ids=["small", "many parameters", "large batch", "another device"],
)
def test_small_work_takes_one_thread(
    fabric: SimpleNamespace, parameters: int, numbers: int, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with threads_for(fabric, parameters, numbers):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        with threads_for(fabric, parameters, numbers):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
