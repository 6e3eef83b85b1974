"""Saved networks: exact round trips, and no harm from files that lie."""

from __future__ import annotations

import json
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lipkit import export, lipschitz
from lipkit.certificates.certificate_file import data_sha256
from lipkit.errors import DataError, OptionError
from lipkit.modules import (
    Add,
    Affine,
    Blend,
    Enlarge,
    FourierConv2d,
    GradientStep,
    Graph,
    GroupSort,
    MaxMin,
    Network,
    Recurrent,
    Reshape,
    SandwichBlock,
    Shift2d,
    SlopeResidual,
    SpreadConv2d,
    load,
    save,
    sha256,
)
from lipkit.modules.plain import stored_types
from lipkit.modules.storage import build, describe

IMAGE = (2, 8, 8)
EXAMPLES: dict[type[nn.Module], tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    nn.Linear: (lambda: nn.Linear(3, 4), (3,)),
    nn.Conv2d: (lambda: nn.Conv2d(2, 4, (3, 2), (1, 2), (2, 1), (1, 2), 2, bias=False), IMAGE),
    nn.ConvTranspose2d: (lambda: nn.ConvTranspose2d(2, 3, (3, 2), (1, 2), bias=False), IMAGE),
    nn.Flatten: (nn.Flatten, IMAGE),
    nn.AvgPool2d: (lambda: nn.AvgPool2d((3, 2), 2, 1, True, False, 5), IMAGE),
    nn.MaxPool2d: (lambda: nn.MaxPool2d(2, (1, 2), 1, 2, ceil_mode=True), IMAGE),
    nn.AdaptiveAvgPool2d: (lambda: nn.AdaptiveAvgPool2d((None, 1)), IMAGE),
    nn.ReLU: (nn.ReLU, (3,)),
    nn.LeakyReLU: (lambda: nn.LeakyReLU(0.1), (3,)),
    nn.PReLU: (lambda: nn.PReLU(3, 0.7), (3,)),
    nn.ELU: (lambda: nn.ELU(0.3), (3,)),
    nn.CELU: (lambda: nn.CELU(0.3), (3,)),
    nn.SELU: (nn.SELU, (3,)),
    nn.GELU: (lambda: nn.GELU("tanh"), (3,)),
    nn.SiLU: (nn.SiLU, (3,)),
    nn.Mish: (nn.Mish, (3,)),
    nn.Tanh: (nn.Tanh, (3,)),
    nn.Sigmoid: (nn.Sigmoid, (3,)),
    nn.Softplus: (lambda: nn.Softplus(2, 30), (3,)),
    nn.Softsign: (nn.Softsign, (3,)),
    nn.LogSigmoid: (nn.LogSigmoid, (3,)),
    nn.Hardtanh: (lambda: nn.Hardtanh(-2.0, 0.5), (3,)),
    nn.Hardsigmoid: (nn.Hardsigmoid, (3,)),
    nn.Hardswish: (nn.Hardswish, (3,)),
    nn.Softshrink: (lambda: nn.Softshrink(0.2), (3,)),
    nn.Tanhshrink: (nn.Tanhshrink, (3,)),
    nn.Softmax: (lambda: nn.Softmax(1), (3,)),
    nn.LayerNorm: (lambda: nn.LayerNorm((3, 4), 1e-3, bias=False), (2, 3, 4)),
    MaxMin: (MaxMin, (4,)),
    GroupSort: (lambda: GroupSort(3), (6,)),
    FourierConv2d: (lambda: randomised(FourierConv2d(2, 3, 8, 8, bias=False)), IMAGE),
    SpreadConv2d: (
        lambda: randomised(SpreadConv2d(FourierConv2d(2, 2, 3, 4, bias=False), 3, (3, 2))),
        (2, 3, 4),
    ),
    Shift2d: (lambda: Shift2d(5, 1), (5, 2, 3)),
    Affine: (lambda: Affine(torch.randn(2), torch.randn(2)), IMAGE),
    Recurrent: (lambda: recurrent(4, 2, nn.Tanh()), (5, 2)),
}


def recurrent(units: int, block: int, phi: nn.Module) -> Recurrent:
    m, sizes = (
        0.3 * torch.randn(units + 3 + 1, units + 3 + 2),
        (torch.randn(units + 4), torch.eye(3), torch.ones(units)),
    )
    return Recurrent(m, *sizes, phi, 3, (units, units), block, 2.0, 0.9)


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_()
    return module


def network() -> Network:
    torch.manual_seed(0)
    fourier = FourierConv2d(4, 4, 4, 4)
    for buffer in (fourier.real, fourier.pair, fourier.bias):
        buffer.normal_()
    return Network(
        [
            Affine(torch.tensor([2.0]), torch.tensor([0.5])),
            Reshape(4, 4, 4),
            fourier,
            MaxMin(),
            Graph([nn.Conv2d(4, 4, 3, padding=1), nn.LeakyReLU(0.1), Blend(torch.tensor(0.3))], [[0], [1], [2, 0]]),
            nn.Flatten(),
            nn.Linear(64, 5),
            nn.ReLU(),
            nn.Linear(5, 3),
        ],
        (1, 8, 8),
        {7: torch.ones(5)},
    )


@pytest.mark.parametrize("kind", list(EXAMPLES), ids=lambda k: k.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_plain_type_comes_back(kind: type[nn.Module], dtype: torch.dtype, tmp_path: Path) -> None:
    make, shape = EXAMPLES[kind]
    net = Network([make(), nn.Sequential()], shape).to(dtype)
    assert all(type(m) is kind for m in net)
    save(net, tmp_path / "a" / "b")
    back = load(tmp_path / "a" / "b")
    assert type(back) is Network
    assert back.input_shape == net.input_shape
    x = torch.randn(3, *shape, dtype=dtype)
    assert torch.equal(back(x), net(x))
    assert sha256(back) == sha256(net)
    assert not back.training
    assert not any(p.requires_grad for p in back.parameters())
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]


def test_every_torch_module_of_the_closed_list_is_tried() -> None:
    assert {k for k in set(stored_types()) if k.__module__.startswith("torch.")} <= set(EXAMPLES)


OTHERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Flatten(1, 2), IMAGE), (nn.Flatten(-1, -1), IMAGE), (nn.Unflatten(1, (2, -1)), (6,)), (nn.ReLU6(), (3,)),
    (nn.PixelUnshuffle(2), (3, 4, 6)), (nn.PixelShuffle(2), (8, 3, 4)), (nn.PixelShuffle(2), (3, 2, 4, 2, 5)),
    (nn.PixelUnshuffle(3), (2, 1, 3, 6)), (nn.ChannelShuffle(3), (6, 2, 5)), (nn.ZeroPad2d((1, -1, 0, 2)), IMAGE),
    (nn.Conv1d(2, 3, 3, padding="same", bias=False), (2, 7)), (nn.AvgPool1d(3, 2, 1), (2, 8)),
    (nn.Conv1d(2, 4, 3, 2, 2, 2, 2, padding_mode="reflect"), (2, 9)), (nn.MaxPool1d(3, 2, 1, 2), (2, 9)),
    (nn.Conv1d(2, 4, 3, 1, 1, padding_mode="circular"), (2, 9)), (nn.AdaptiveAvgPool1d(3), (2, 7)),
    (nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, 2, dilation=2), (4, 5)), (nn.Upsample(scale_factor=2), IMAGE),
    (Enlarge(2, 3), IMAGE), (nn.Sequential(nn.Identity(), nn.Dropout()).eval(), (3,)),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shape"), OTHERS, ids=lambda part: str(part)[:40])
def test_types_that_others_stand_for(module: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    net, x = export(module, shape), torch.randn(3, *shape)
    assert {type(part) for part in net} <= set(stored_types()) - {type(module)} | {nn.Flatten}
    assert all(type(part) is nn.Parameter for part in net.parameters())  # torch.export asks for them
    assert torch.equal(net(x), module(x))
    assert torch.equal(load(save(net, tmp_path))(x), net(x))
    assert float(lipschitz(net)) == pytest.approx(float(lipschitz(module, shape).detach()), rel=1e-9)


PARTS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (GradientStep(nn.Linear(4, 3), nn.ReLU6(), torch.tensor(0.3)), (2, 4)),
    (SandwichBlock(nn.Linear(4, 3), nn.ReLU6(), nn.Linear(3, 4), torch.ones(3)), (2, 4)),
    (SlopeResidual(nn.Conv1d(4, 3, 1), nn.ReLU6(), nn.Conv1d(3, 4, 1), torch.ones(3)), (4, 5)),
]


@pytest.mark.parametrize(("module", "shape"), PARTS, ids=lambda part: str(part)[:12])
def test_parts_that_others_stand_for(module: nn.Module, shape: tuple[int, ...], tmp_path: Path) -> None:
    net, x = export(module, shape), 9 * torch.randn(3, *shape)
    assert {type(part) for part in net.modules()} <= set(stored_types())
    assert torch.equal(load(save(net, tmp_path))(x), module(x))
    assert float(lipschitz(net)) == pytest.approx(float(lipschitz(module, shape).detach()), rel=1e-9)


@pytest.mark.parametrize("dim", [True, 1.0, [1], 2])
def test_flatten_of_anything_but_whole_samples_is_not_read(dim: Any) -> None:
    with pytest.raises(DataError, match="Flatten: expected a value that start_dim accepts"):
        build({"type": "Flatten", "start_dim": dim, "end_dim": -1})


@pytest.mark.parametrize("kind", list(EXAMPLES), ids=lambda k: k.__name__)
def test_descriptions_are_json_and_rebuild_the_same_module(kind: type[nn.Module]) -> None:
    module = EXAMPLES[kind][0]()
    config = describe(module)
    again = build(json.loads(json.dumps(config)))
    assert type(again) is kind
    assert describe(again) == config
    assert {n: t.shape for n, t in again.state_dict().items()} == {n: t.shape for n, t in module.state_dict().items()}


def test_a_whole_network_comes_back(tmp_path: Path) -> None:
    net = network()
    state = torch.get_rng_state()
    assert save(net, tmp_path) == tmp_path
    back = load(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(back(x), net(x))
    assert back.multipliers().keys() == {7}
    assert describe(back) == describe(net)
    assert json.loads((tmp_path / "config.json").read_text())["sha256"] == sha256(net)


def test_a_shared_module_is_stored_as_often_as_it_is_applied(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    net = Network([layer, nn.ReLU(), layer], (3,))
    save(net, tmp_path)
    x = torch.randn(2, 3)
    assert torch.equal(load(tmp_path)(x), net(x))
    relu = nn.ReLU()
    save(Network([relu, layer, relu], (3,)), tmp_path)
    assert len(load(tmp_path)) == 3


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    save(network(), tmp_path)
    save(Network([nn.Linear(3, 2)], (3,)), tmp_path)
    assert len(load(tmp_path)) == 1


def test_non_contiguous_and_shared_memory(tmp_path: Path) -> None:
    net = Network([nn.Linear(3, 3), nn.Linear(3, 3)], (3,))
    net[1].weight = nn.Parameter(net[0].weight.T, requires_grad=False)
    save(net, tmp_path)
    assert torch.equal(load(tmp_path)[1].weight, net[0].weight.T)


# ---------------------------------------------------------------- hash


def changed(net: Network, name: str) -> Network:
    if name == "weight":
        net[6].weight[0, 0] += 1e-6
    elif name == "last bit of a weight":
        net[6].weight[0, 0] = torch.nextafter(net[6].weight[0, 0], torch.tensor(9.0))
    elif name == "buffer":
        net[2].pair[0, 0, 0, 0] += 1
    elif name == "share":
        net[4].nodes[2].share.add_(0.1)
    elif name == "slope":
        net[4].nodes[1].negative_slope = 0.2
    elif name == "padding":
        net[4].nodes[0].padding = (2, 2)
    elif name == "order":
        return Network([*net[:3], nn.ReLU(), *net[4:]], (1, 8, 8), {7: torch.ones(5)})
    elif name == "input shape":
        net.input_shape = (1, 8, 9)
    elif name == "dtype":
        net.double()
    elif name == "multiplier":
        net.multiplier(7).mul_(2)  # type: ignore[union-attr]
    elif name == "shape":
        net[6].weight = nn.Parameter(net[6].weight.reshape(64, 5), requires_grad=False)
    elif name == "negative zero":
        net[0].shift.fill_(-0.0)
    return net


def test_the_hash_changes_with_any_change() -> None:
    names = ["", "weight", "last bit of a weight", "buffer", "share", "slope", "padding", "order", "input shape"]
    names += ["dtype", "multiplier", "shape", "negative zero"]
    hashes = [sha256(changed(network(), name)) for name in names]
    assert len(set(hashes)) == len(names)
    assert sha256(network()) == hashes[0]
    assert all(len(h) == 64 for h in hashes)


def test_the_hash_ignores_what_does_not_matter() -> None:
    net = network()
    before = sha256(net)
    net.train()
    net.requires_grad_(True)
    assert sha256(net) == before


# ---------------------------------------------------------------- refusals on saving


class Mine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class MyReLU(nn.ReLU):
    pass


@pytest.mark.parametrize(
    "module", [Mine(), MyReLU(), nn.Dropout(), nn.BatchNorm1d(3), Graph([Mine(), Add(1, 1)], [[0], [0, 1]])]
)
def test_only_the_closed_list_is_saved(module: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a plain module"):
        save(Network([module], (3,)), tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("module", [nn.LeakyReLU(float("nan")), nn.LeakyReLU(float("inf")), nn.ELU(torch.tensor(1.0))])
def test_what_could_not_be_read_back_is_not_saved(module: nn.Module, tmp_path: Path) -> None:
    with pytest.raises((OptionError, TypeError)):
        save(Network([module], (3,)), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_only_networks_are_saved(tmp_path: Path) -> None:
    for other in (nn.Sequential(nn.ReLU()), nn.ReLU()):
        with pytest.raises(OptionError, match=r"expected the result of lipkit\.export"):
            save(other, tmp_path)  # type: ignore[arg-type]


# ---------------------------------------------------------------- files that lie


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(network(), tmp_path_factory.mktemp("saved") / "net")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "net"))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


class Largest(TorchDispatchMode):
    """The largest tensor that really takes memory."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.numel = max(self.numel, tensor.numel())
        return out


def refused(folder: Path, match: str | None = None) -> None:
    """``load`` refuses, with a short message and without taking memory, in Python or in torch."""
    tracemalloc.start()
    try:
        with Largest() as largest, pytest.raises(DataError, match=match) as caught:
            load(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6
    assert largest.numel < 1e5
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, "got no")
    (folder / name).mkdir()
    refused(folder, "cannot be read")


def test_the_folder_above_names_the_one_that_was_meant(folder: Path) -> None:
    run = folder.parent / "run"
    shutil.copytree(folder, run / "network")
    with pytest.raises(DataError, match=r"got no .*run/config\.json; .*run/network has them$"):
        load(run)


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '{"schema_version": 1}',
        '{"schema_version": 2}',
        '{"schema_version": 3}',
        '{"schema_version": 2, "network": {"type": "ReLU"}}',
        '{"schema_version": 2, "network": NaN}',
        '{"schema_version": 2, "network": {"type": "LeakyReLU", "negative_slope": Infinity}}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 10_000,
        "\ud800",
    ],
    ids=lambda t: ascii(t[:40]),
)
def test_configurations_that_are_none(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(folder)


@pytest.mark.parametrize("keep", [0, 4, 7, 8, 20, 200, -1, -100])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder)


def test_weights_with_a_header_that_claims_terabytes(folder: Path) -> None:
    path = folder / "model.safetensors"
    header = json.dumps({"0.scale": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    refused(folder)
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    refused(folder)


@pytest.mark.thorough
def test_flipped_bits_in_the_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    refused(folder, "sha256")


def set_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("6.weight"),
        lambda t: t.update({"extra": torch.zeros(1)}),
        lambda t: t.update({"6.weight": torch.zeros(5, 65)}),
        lambda t: t.update({"6.weight": torch.zeros(64, 5)}),
        lambda t: t.update({"6.weight": torch.zeros(5, 64, dtype=torch.int32)}),
        lambda t: t.update({"6.weight": torch.zeros(5, 64, dtype=torch.bool)}),
        lambda t: t.update({"6.weight": torch.zeros(5, 64, dtype=torch.float8_e4m3fn)}),
        lambda t: t.update({"2.transform0": torch.zeros(16, 16)}),
        lambda t: t.update({"6.weight": torch.zeros(5, 64)}),
        lambda t: t.update({"multiplier7": torch.full((5,), 2.0)}),
        lambda t: t.update({"multiplier3": torch.ones(5)}),
        lambda t: t.clear(),
    ],
    ids=[
        "missing",
        "extra",
        "wrong",
        "transposed",
        "int",
        "bool",
        "float8",
        "transform",
        "zeroed",
        "multiplier",
        "m3",
        "none",
    ],
)
def test_weights_that_do_not_fit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    set_weights(folder, change)
    refused(folder)


def module(index: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["network"]["modules"][index].update(values)

    return change


def network_value(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["network"].update(values)


def replace(index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["network"]["modules"][index] = value

    return change


def nested(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {"type": "ReLU"}
    for _ in range(depth):
        config = {"type": "Graph", "modules": [config], "sources": [[0]]}
    return config


LIES = {
    "unknown type": module(3, type="Evil"),
    "dotted type": module(3, type="os.system"),
    "torch type not in the list": module(3, type="Dropout"),
    "type is no string": module(3, type=3),
    "no type": replace(3, {}),
    "module is a string": replace(3, "MaxMin"),
    "module is a list": replace(3, []),
    "modules is a string": network_value(modules="ReLU"),
    "modules is a number": network_value(modules=3),
    "modules missing": lambda c: c["network"].pop("modules"),
    "extra key": network_value(code="import os"),
    "extra argument": module(6, device="cuda"),
    "missing argument": lambda c: c["network"]["modules"][6].pop("bias"),
    "top is a graph": lambda c: c["network"].update(type="Graph"),
    "huge linear": module(6, in_features=10**9, out_features=10**9),
    "beyond int64": module(6, in_features=10**30),
    "overflowing linear": module(6, in_features=2**31 - 1, out_features=2**31 - 1),
    "negative linear": module(6, in_features=-3),
    "empty linear": module(6, in_features=0),
    "float features": module(6, in_features=64.0),
    "boolean features": module(6, in_features=True),
    "string features": module(6, in_features="64"),
    "null features": module(6, in_features=None),
    "list of features": module(6, in_features=[64]),
    "bias is a number": module(6, bias=1),
    "huge fourier": module(2, height=10**6, width=10**6),
    "very huge fourier": module(2, height=10**15, width=10**15),
    "thin fourier": module(2, height=1, width=10**6),
    "empty fourier": module(2, in_channels=0, height=10**6, width=10**6),
    "negative fourier": module(2, height=-4),
    "huge phase convolution": replace(
        3,
        {
            "type": "FourierConv2d",
            "in_channels": 4,
            "out_channels": 4,
            "height": 10**9,
            "width": 10**9,
            "kernel_size": [3, 3],
            "complex_pairs": False,
            "bias": True,
        },
    ),
    "endless series": replace(
        3,
        {
            "type": "TaylorConv2d",
            "in_channels": 4,
            "out_channels": 4,
            "kernel_size": [1, 1],
            "terms": 10**9,
            "bias": True,
        },
    ),
    "huge affine": module(0, channels=10**15),
    "empty affine": module(0, channels=0),
    "string slope": lambda c: c["network"]["modules"][4]["modules"][1].update(negative_slope="0.1"),
    "infinite slope": lambda c: c["network"]["modules"][4]["modules"][1].update(negative_slope=10**400),
    "list slope": lambda c: c["network"]["modules"][4]["modules"][1].update(negative_slope=[0.1]),
    "word padding": lambda c: c["network"]["modules"][4]["modules"][0].update(padding="other"),
    "huge kernel": lambda c: c["network"]["modules"][4]["modules"][0].update(kernel_size=[10**9, 10**9]),
    "nested kernel": lambda c: c["network"]["modules"][4]["modules"][0].update(kernel_size=[[3], [3]]),
    "empty kernel": lambda c: c["network"]["modules"][4]["modules"][0].update(kernel_size=[2, 0]),
    "zero groups": lambda c: c["network"]["modules"][4]["modules"][0].update(groups=0),
    "negative padding": lambda c: c["network"]["modules"][4]["modules"][0].update(padding=[-1, -1]),
    "mode": lambda c: c["network"]["modules"][4]["modules"][0].update(padding_mode="wrap"),
    "graph without modules": lambda c: c["network"]["modules"][4].pop("modules"),
    "modules are null": lambda c: c["network"]["modules"][4].update(modules=None),
    "deep": replace(3, nested(200)),
    "chain does not fit": module(1, shape=[8, 4, 4]),
    "input shape does not fit": network_value(input_shape=[1, 8, 9]),
    "input shape is empty": network_value(input_shape=[]),
    "input shape is a string": network_value(input_shape="188"),
    "input shape is negative": network_value(input_shape=[1, -8, 8]),
    "input shape is a float": network_value(input_shape=[1.0, 8.0, 8.0]),
    "input shape is enormous": network_value(input_shape=[2**31 - 1, 2**31 - 1, 2**31 - 1]),
    "multipliers is a list": network_value(multipliers=[5]),
    "multiplier elsewhere": network_value(multipliers={"3": 5}),
    "multiplier out of range": network_value(multipliers={"70": 5}),
    "multiplier is no index": network_value(multipliers={"x": 5}),
    "multiplier of another size": network_value(multipliers={"7": 10**15}),
    "multiplier of a float": network_value(multipliers={"7": 5.0}),
    "another slope": lambda c: c["network"]["modules"][4]["modules"][1].update(negative_slope=0.2),
    "another activation": replace(3, {"type": "ReLU"}),
    "no hash": lambda c: c.pop("sha256"),
    "another hash": lambda c: c.update(sha256="0" * 64),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(LIES))
def test_configurations_that_lie(folder: Path, name: str) -> None:
    edit(folder, LIES[name])
    refused(folder)


@pytest.mark.thorough
def test_a_small_file_cannot_ask_for_a_large_transform(tmp_path: Path) -> None:
    # A row of 4096 pixels with one channel takes 16 kB in the file and 64 MB as a transform; many take too much.
    count, width = 20, 4096
    real = {f"{i}.real": torch.zeros(2, 1, 1) for i in range(count)}
    pair = {f"{i}.pair": torch.zeros((width - 2) // 2, 2, 1, 1) for i in range(count)}
    layer = {"type": "FourierConv2d", "in_channels": 1, "out_channels": 1, "height": 1, "width": width, "bias": False}
    layer |= {"kernel_size": [1, width], "complex_pairs": True}
    chain = {"type": "Network", "input_shape": [1, 1, width], "multipliers": {}, "modules": [layer] * count}
    save_file(real | pair, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": 2, "sha256": "", "network": chain}))
    refused(tmp_path, "Fourier transforms")


def test_loading_runs_nothing_that_a_file_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("os.system", lambda *a: called.append(a))
    for kind in ("os.system", "builtins.eval", "__import__", "Network.forward", "nn.Module"):
        edit(folder, module(3, type=kind))
        refused(folder, "unknown or missing")
    assert called == []


def test_a_number_that_lies_apart_has_the_hash_of_its_bytes() -> None:
    # A stride of a lone entry means nothing, and torch keeps whatever it was.
    def hashed(value: Tensor) -> str:
        return sha256(Network([Affine(value, value)], (1, 2)))

    values = torch.tensor([[0.5, 1.0], [2.0, 3.0]])
    assert hashed(torch.tensor(0.5).expand(1)) == hashed(values[:1, 0]) == hashed(torch.tensor([0.5]))
    x = values[:1, 1:]
    assert data_sha256(x, torch.zeros(1).long()) == data_sha256(x.clone(), torch.zeros(1).long())


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (nn.LeakyReLU(np.float32(0.1)), "negative_slope", float(np.float32(0.1))),
        (nn.CELU(np.int64(1)), "alpha", 1),
        (nn.LayerNorm(np.int8(4), np.float32(1e-3), elementwise_affine=False), "normalized_shape", (4,)),
        (Reshape(np.int64(2), np.int64(2)), "shape", (2, 2)),
    ],
)
def test_numbers_of_numpy_are_stored_as_those_of_python(
    module: nn.Module, name: str, value: Any, tmp_path: Path
) -> None:
    given = getattr(module, name)
    assert float(lipschitz(module, (4,))) > 0
    assert getattr(module, name) is given  # the user's module stays as it is
    for network in (export(module, (4,)), Network([module], (4,))):
        assert load(save(network, tmp_path)) is not network
        got = getattr(network[0], name)
        assert got == value
        assert {type(one) for one in (got if type(got) is tuple else (got,))} <= {int, float}


def test_a_tensor_as_an_option_is_refused_by_a_sentence() -> None:
    with pytest.raises(OptionError, match=r"LeakyReLU: expected negative_slope as a number.*got tensor\(0\.5"):
        sha256(Network([nn.LeakyReLU(torch.tensor(0.5))], (2,)))  # type: ignore[arg-type]
