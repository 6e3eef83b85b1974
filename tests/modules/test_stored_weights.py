"""Weights as integers: numpy's rounding, sizes, proofs about what a file holds, and no harm from files that lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lipkit
from lipkit.errors import DataError, OptionError
from lipkit.modules import FourierConv2d, MaxMin, Network, load, save, sha256
from lipkit.modules.storage import from_integers, to_integers


def _orthogonal(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.qr(torch.randn(layer.in_features, layer.out_features))[0].T)
    return layer


def _network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    dense = _orthogonal(nn.Linear(288, 128))
    return Network([nn.Conv2d(2, 8, 3), MaxMin(), nn.Flatten(), dense, MaxMin(), nn.Linear(128, 5)], (2, 8, 8)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(64, 8, 8, 8), (211, 157)])
def test_integers_are_those_of_numpy(shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> None:
    weight = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    weight.view(-1)[128:192] = 0
    stored = to_integers({"w": weight, "small": torch.randn(181, 181)}, bits)
    assert stored["w"].dtype == {8: torch.int8, 16: torch.int16}[bits]
    assert stored["small"].dtype == torch.float32
    assert stored.keys() == {"w", "w.steps", "small"}
    read = from_integers(stored)
    assert read.keys() == {"w", "small"}
    assert read["w"].dtype == dtype
    flat, rounded = weight.double().numpy().ravel(), read["w"].double().numpy().ravel()
    tiny = np.finfo(str(dtype).removeprefix("torch.")).eps
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        step = np.abs(block).max() / (2 ** (bits - 1) - 1)
        error = np.abs(rounded[start : start + 64] - block).max()
        # At most half a step, and of 64 numbers, or the 39 of the last block, some have nearly that.
        assert 0.3 * step <= error <= 0.5 * step + 2 * tiny * np.abs(block).max() or step == error == 0


def test_what_is_not_finite_and_what_underflows_stays() -> None:
    broken, tiny = torch.full((200, 200), torch.inf), torch.full((200, 200), 1e-45)
    read = from_integers(to_integers({"broken": broken, "tiny": tiny}, 8))
    assert torch.equal(read["broken"], broken)
    assert ((read["tiny"] == 0) | (read["tiny"] == tiny)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-10])
def test_no_number_of_a_narrow_format_turns_its_sign(dtype: torch.dtype, bits: int, scale: float) -> None:
    weight = torch.linspace(-scale, scale, 1 << 15, dtype=torch.float64).view(64, -1).T.to(dtype)
    read = from_integers(to_integers({"w": weight}, bits))["w"]
    assert (read.double() - weight.double()).abs().max() <= scale * (2**-7 if bits == 8 else 0)


@pytest.mark.parametrize(("bits", "excess", "size"), [(8, 0.02, 0.29), (16, 1e-4, 0.54)])
def test_the_bound_is_that_of_the_stored_numbers(bits: int, excess: float, size: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = [_orthogonal(nn.Linear(*sizes, bias=False)) for sizes in ((512, 256), (256, 128))]
    network = Network([dense[0], MaxMin(), dense[1]], (512,))
    save(network, tmp_path / "whole")
    save(network, tmp_path / "small", bits=bits)
    read = load(tmp_path / "small")
    assert sha256(read) != sha256(network)
    assert sha256(load(tmp_path / "whole")) == sha256(network)
    norms = [np.linalg.norm(m.weight.double().numpy(), 2) for m in read if isinstance(m, nn.Linear)]
    proved = float(lipkit.lipschitz(read))
    assert np.prod(norms) <= proved <= np.prod(norms) * (1 + 1e-9)
    assert 1 < proved <= 1 + excess
    files = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "whole")]
    assert files[0] <= size * files[1]


def test_each_tensor_has_bits_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Network([nn.Linear(256, 256), MaxMin(), nn.Linear(256, 128), MaxMin(), nn.Linear(128, 300)], (256,))
    save(network, tmp_path, bits={"0.weight": 8, "2.weight": 16})
    read = load(tmp_path)
    for place, most in ((0, 1 / 127), (2, 1 / 32767), (4, 0.0)):  # half of a step of the largest number in a block
        error = (read[place].weight - network[place].weight).abs().max()
        assert 0.2 * most / 16 <= float(error) <= 0.51 * most / 11  # weights up to 1/16 or 1/11
    assert (tmp_path / "model.safetensors").stat().st_size < 256 * 256 * 1.1 + 256 * 128 * 2.2 + 128 * 300 * 4.2
    with pytest.raises(OptionError, match=r"bits of tensors of the network, got 1\.weight"):
        save(network, tmp_path, bits={"1.weight": 8})
    with pytest.raises(OptionError, match="expected bits to be 8, 16 or None, got 4"):
        save(network, tmp_path, bits={"0.weight": 4})


@pytest.mark.thorough
def test_a_rounded_network_is_certified_as_it_reads(tmp_path: Path) -> None:
    network = _network()
    save(network, tmp_path, bits=8)
    read, again = load(tmp_path), load(tmp_path)
    assert sha256(read) == sha256(again)
    x, y = torch.rand(20, 2, 8, 8), torch.randint(5, (20,))
    certificate = lipkit.certify(read, x, y)
    assert certificate.network_sha256 == sha256(read)
    assert torch.equal(certificate.prediction, read.double()(x.double()).argmax(1))
    save(read.float(), tmp_path / "again")
    assert sha256(load(tmp_path / "again")) == certificate.network_sha256


def test_frequencies_are_rounded_too(tmp_path: Path) -> None:
    layer = lipkit.layers.CayleyConv2d(32, 32, 3)
    network = lipkit.export(nn.Sequential(layer), (32, 8, 8))
    assert isinstance(network[0], FourierConv2d)
    save(network, tmp_path, bits=8)
    x = torch.randn(4, 32, 8, 8)
    difference = (load(tmp_path)(x) - network(x)).norm() / x.norm()
    assert 0 < float(difference) < 0.02
    assert 1 < float(lipkit.lipschitz(load(tmp_path))) < 1.03


@pytest.mark.parametrize("bits", [4, 0, True, "8"])
def test_other_sizes_are_refused(bits: object, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"expected bits to be 8, 16 or None, got"):
        save(_network(), tmp_path / "n", bits=bits)  # type: ignore[arg-type]
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize(
    "step",
    [
        None,
        torch.ones(575),
        torch.ones(576, 1),
        -torch.ones(576),
        torch.full((576,), torch.nan),
        torch.full((576,), torch.inf),
        torch.zeros(576),
        torch.ones(576, dtype=torch.int32),
    ],
)
def test_steps_that_lie_are_refused(step: Tensor | None, tmp_path: Path) -> None:
    save(_network(), tmp_path, bits=8)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["3.weight.steps"]
    save_file(tensors | ({} if step is None else {"3.weight.steps": step}), tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"3\.weight: expected 576 positive finite steps"):
        load(tmp_path)


def test_another_step_is_another_network(tmp_path: Path) -> None:
    save(_network(), tmp_path, bits=8)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["3.weight.steps"] *= 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="expected the network with sha256"):
        load(tmp_path)


def test_steps_without_integers_are_refused(tmp_path: Path) -> None:
    save(_network(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"3.weight.steps": torch.ones(576)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"3\.weight\.steps: expected shape None, got \(576,\)"):
        load(tmp_path)
