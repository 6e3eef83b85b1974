"""What is written is read back, from .onnx and .pt2: the same network, to the bit, multipliers and all."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import lipkit
from lipkit import interop, models, modules
from lipkit.errors import LipkitError, OptionError
from lipkit.interop import onnx_reader, program_reader, runtimes
from lipkit.interop.runtimes import CLAIM
from lipkit.modules.activations import ACTIVATIONS


def comes_back(network: modules.Network, onnx_file: Path, program: Path) -> None:
    """The network, from both of its files."""
    for back in (interop.load_onnx(onnx_file), interop.load_program(program)):
        assert modules.sha256(back) == modules.sha256(network)
        assert back.input_range == network.input_range
        assert back.multipliers().keys() == network.multipliers().keys()
        assert float(lipkit.lipschitz(back)) == float(lipkit.lipschitz(network))


def written(network: modules.Network, path: Path) -> tuple[Path, Callable[[Tensor], Tensor]]:
    """The file of a program, and the program as `write_program` loaded its bytes: to load takes as long as to write."""
    loaded = []

    def load(draft: Path) -> Callable[[Tensor], Tensor]:
        loaded.append(interop.program_runtime(draft))
        return loaded[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtimes, "program_runtime", load)
        interop.write_program(network, path)
    return path, loaded[0]


@contextmanager
def traced_once() -> Iterator[None]:
    """Within it, torch traces equal networks once, for both of their files: that takes most of the time."""
    traced: dict[Any, torch.export.ExportedProgram] = {}
    trace = runtimes._program

    def cached(network: modules.Network) -> torch.export.ExportedProgram:
        try:
            key = modules.sha256(network), torch.export.export  # which a test may replace
        except OptionError:  # a module of the test, which cannot be stored
            return trace(network)
        if key not in traced:
            traced[key] = trace(network)
        return traced[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtimes, "_program", cached)
        yield


def claimed(network: modules.Network, onnx_file: Path, program: Path) -> None:
    """As `comes_back`, but the files of an equal network are not made again: that they are equal is tested below."""
    before = onnx.load(onnx_file)
    before.ClearField("metadata_props")
    content, same = program.read_bytes(), modules.sha256(network)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_reader, "onnx_model", lambda found: before if modules.sha256(found) == same else None)
        patch.setattr(program_reader, "program_bytes", lambda found: content if modules.sha256(found) == same else b"")
        comes_back(network, onnx_file, program)


def agree(network: modules.Network, folder: Path) -> None:
    with traced_once():
        files = interop.write_onnx(network, folder / "net.onnx"), interop.write_program(network, folder / "net.pt2")
    comes_back(network, *files)


@pytest.mark.thorough
def test_every_activation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kinds = [kind(4) if kind is modules.NActivation else kind() for kind in ACTIVATIONS]
    agree(lipkit.export(nn.Sequential(nn.Linear(4, 4), *kinds, nn.Linear(4, 4)), (4,)), tmp_path)


def lbdn() -> modules.Network:
    torch.manual_seed(0)
    network: modules.Network = lipkit.export(
        models.build("lbdn", hidden=(5, 5), input_shape=(6,), classes=3).eval(), (6,)
    )
    network.input_range = (-1.0, 1.0)
    return network


def without_claim(path: Path) -> Path:
    model = onnx.load(path)
    model.ClearField("metadata_props")
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.thorough
def test_an_lbdn_keeps_its_gain(tmp_path: Path) -> None:
    network = lbdn()
    agree(network, tmp_path)
    bare = interop.load_onnx(without_claim(tmp_path / "net.onnx"))
    x = torch.randn(7, 6)
    torch.testing.assert_close(bare(x), network(x))
    assert float(lipkit.lipschitz(bare)) > 1.01 * float(lipkit.lipschitz(network))


def claims(path: Path, change: dict[str, object]) -> Path:
    """The file with other entries in its claim."""
    if path.suffix == ".onnx":
        model = onnx.load(path)
        (entry,) = model.metadata_props
        entry.value = json.dumps({**json.loads(entry.value), **change})
        path.write_bytes(model.SerializeToString())
        return path
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            forged = json.dumps({**json.loads(content), **change}).encode() if name.endswith(CLAIM) else content
            archive.writestr(name, forged)
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("end", [pytest.param("onnx", marks=pytest.mark.thorough), "pt2"])
def test_a_claim_is_never_trusted(end: str, tmp_path: Path) -> None:
    network, path = lbdn(), tmp_path / f"net.{end}"
    write, read = {
        "onnx": (interop.write_onnx, interop.load_onnx),
        "pt2": (interop.write_program, interop.load_program),
    }[end]
    small = lipkit.export(nn.Linear(6, 3), (6,))
    other = [m if type(m) is not nn.ReLU else nn.Tanh() for m in network]
    written = write(network, path).read_bytes()
    for forged in (
        {"network": modules.storage.describe(small)},
        {"network": modules.storage.describe(modules.Network(other, (6,), network.multipliers()))},
        {"network": None}, {"stored": ["no"]}, {"stored": [], "more": ""}, {"more": "!"}, {"input_range": [2, 1]},
    ):  # fmt: skip
        path.write_bytes(written)
        back = read(claims(path, forged))
        x = torch.randn(5, 6)
        torch.testing.assert_close(back(x), network(x))
        assert not back.multipliers()
        assert float(lipkit.lipschitz(back)) > 1.01 * float(lipkit.lipschitz(network))


@pytest.mark.thorough
def test_false_multipliers_prove_nothing(tmp_path: Path) -> None:
    network = lbdn()
    wrong = modules.Network(list(network), (6,), {i: 1e-3 * m for i, m in network.multipliers().items()})
    back = interop.load_onnx(interop.write_onnx(wrong, tmp_path / "net.onnx"))
    with torch.no_grad():
        jacobian: Tensor = torch.func.jacrev(lambda x: back(x[None])[0])(torch.zeros(6))
    try:
        assert float(lipkit.lipschitz(back)) >= torch.linalg.matrix_norm(jacobian.double(), 2).item()
    except LipkitError:
        return


@pytest.mark.thorough
def test_a_graph_of_other_weights_is_read_as_it_is(tmp_path: Path) -> None:
    network = lbdn()
    path = interop.write_onnx(network, tmp_path / "net.onnx")
    model = onnx.load(path)
    model.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(3 * onnx.numpy_helper.to_array(model.graph.initializer[0]), "0.weight")
    )
    model.graph.node[1].op_type = "Tanh"
    path.write_bytes(model.SerializeToString())
    back = interop.load_onnx(path)
    assert [type(m) for m in back][1] is nn.Tanh
    assert not back.multipliers()
    x = torch.randn(4, 6)
    torch.testing.assert_close(back(x), interop.onnx_runtime(path)(x))
