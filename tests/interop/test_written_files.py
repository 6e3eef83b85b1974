"""What `write_onnx`, `write_program` and `write_c` write computes what the network computes, or is not written."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from tests.interop.test_read_back import claimed, traced_once
from tests.interop.test_read_back import written as written_program
from tests.interop.test_runtimes import KINDS
from tests.interop.test_runtimes import network as family
from torch import Tensor, nn

import lipkit
from lipkit import interop, models, modules
from lipkit.errors import CertificateViolation, DataError, NoRuleError
from lipkit.integer import c_source
from lipkit.interop import runtimes
from lipkit.modules.limits import CURVES
from lipkit.modules.plain import stored_types

IMAGE = (2, 8, 8)
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]
Files = tuple[str, Any, Path]


def conv(*given: Any, **options: Any) -> Case:
    return lambda: nn.Conv2d(2, 4, *given, **options), IMAGE


def pool(*given: Any, **options: Any) -> Case:
    return lambda: nn.AvgPool2d(*given, **options), IMAGE


def joined(first: nn.Module, join: nn.Module) -> nn.Module:
    return modules.Graph([first, join], [[0], [0, 1]])


def random(module: nn.Module) -> nn.Module:
    for tensor in module.state_dict().values():
        tensor.normal_(std=0.3)
    return module


def linear_system() -> nn.Module:
    """A recurrent network without units."""
    sizes = torch.randn(5), torch.eye(3), torch.randn(0)
    return modules.Recurrent(0.3 * torch.randn(5, 5), *sizes, nn.ReLU(), 3, (0, 0), 1, 1.0, 1.0)


def recurrent(phi: nn.Module, block: int = 4) -> Case:
    sizes = torch.randn(8), torch.eye(3), torch.ones(4)
    return lambda: modules.Recurrent(0.3 * torch.randn(8, 9), *sizes, phi, 3, (4, 4), block, 1.0, 1.0), (4, 2)


PLAIN: list[Case] = [
    (lambda: modules.Pad(*(1, 2, 0, 2)), IMAGE),
    (nn.Flatten, IMAGE),
    (lambda: modules.Pad(0, 0, 0, 0, 0, 3), IMAGE),
    (lambda: modules.Pad(0, -3), (5,)),
    (lambda: modules.Shift2d(9, 2), (9, 2, 3)),
    (nn.ReLU, (3,)),
    (lambda: nn.LeakyReLU(-0.5), (3,)),
    (lambda: nn.LeakyReLU(2), (3,)),
    (lambda: nn.PReLU(2, -0.7), IMAGE),
    (lambda: nn.PReLU(1, 1.7), (3,)),
    (lambda: nn.ELU(0.3), (3,)),
    (lambda: nn.CELU(0.3), (3,)),
    (nn.SELU, (3,)),
    (nn.GELU, (3,)),
    (lambda: nn.GELU("tanh"), (3,)),
    (nn.SiLU, (3,)),
    (nn.Mish, (3,)),
    (nn.Tanh, (3,)),
    (nn.Sigmoid, (3,)),
    (lambda: nn.Softplus(2, 0.5), (3,)),
    (lambda: nn.Softplus(0.5, 30), (3,)),
    (nn.Softsign, (3,)),
    (nn.LogSigmoid, (3,)),
    (lambda: nn.Hardtanh(-2.0, 0.5), (3,)),
    (nn.Hardsigmoid, (3,)),
    (nn.Hardswish, (3,)),
    (lambda: nn.Softshrink(0.2), (3,)),
    (nn.Tanhshrink, (3,)),
    (modules.MaxMin, (4, 3)),
    (lambda: modules.GroupSort(3), (6, 2)),
    (modules.Sine, (3,)),
    (modules.Arctan, (3,)),
    (modules.Arcsinh, (3,)),
    (modules.Cosine, (3,)),
    *((lambda name=name: modules.Elementary(name, torch.tensor([0.5, 1.5])), (3,)) for name in CURVES),
    (lambda: nn.Softmax(1), (3, 2)),
    (lambda: nn.Softmax(-2), (3, 4, 2)),
    (lambda: nn.Linear(3, 4, bias=False), (2, 5, 3)),
    (lambda: modules.Affine(torch.randn(2), torch.randn(2)), IMAGE),
    (lambda: modules.Affine(torch.randn(1), torch.randn(1)), (3,)),
    (lambda: modules.Affine(torch.randn(2, 1, 8), torch.randn(1, 8, 1)), IMAGE),
    (lambda: modules.LayerCenter(3, 1), IMAGE),
    (lambda: modules.UnitNorm(1, eps=0.25), IMAGE),
    (lambda: random(nn.LayerNorm((3, 4), 0.5, bias=False)), (2, 3, 4)),
    (lambda: nn.LayerNorm(4, 1e-2, elementwise_affine=False), (2, 3, 4)),
    (lambda: nn.Conv2d(2, 3, (1, 3), padding="same", dilation=(1, 2)), (2, 1, 7)),
    (lambda: nn.ConvTranspose2d(4, 6, (1, 3), (1, 2), (0, 1), (0, 1), dilation=(1, 2)), (4, 1, 5)),
    (lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 3), (1, 0), (1, 2), bias=False), IMAGE),
    (lambda: nn.ConvTranspose2d(2, 3, 2, 1, (1, 2), 1, dilation=2), IMAGE),
    conv((3, 2), (1, 2), (2, 1), (1, 2), 2, bias=False),
    conv(3, padding=(1, 2), padding_mode="reflect"),
    conv(3, padding=(1, 2), padding_mode="replicate"),
    conv(2, 2),
    conv(2, 2, padding="valid"),
    conv(2, 2, padding=1),
    (lambda: modules.NActivation(2, 0.3, -0.2), IMAGE),
    (modules.HalfAbs, (5, 2)),
    (lambda: random(modules.Householder(4, 3)), (4, 3)),
    pool((3, 2), 2, 1),
    pool(3, 2, 1, count_include_pad=False),
    pool(4, divisor_override=4),
    pool(2, divisor_override=-4),
    pool((3, 2), 2, 1, count_include_pad=False, divisor_override=5),
    pool((2, 3), (1, 2), (1, 0), divisor_override=1),
    pool((3, 2), (3, 2), 1, ceil_mode=True, divisor_override=5),
    pool(3, 2, (0, 1), ceil_mode=True, divisor_override=7),
    (lambda: nn.MaxPool2d((3, 2), (2, 3), (1, 0)), IMAGE),
    (lambda: nn.MaxPool2d(2, 1), (3, 4)),
    (lambda: nn.AvgPool2d(2, divisor_override=3), (3, 4)),
    (lambda: nn.AdaptiveAvgPool2d(2), (3, 4)),
    (lambda: modules.L2NormPool2d(2), IMAGE),
    (modules.L2NormPool2d, IMAGE),
    (lambda: nn.AdaptiveAvgPool2d((None, 1)), IMAGE),
    (lambda: nn.AdaptiveAvgPool2d((3, 5)), IMAGE),
    (lambda: modules.Mean(3, 1, keepdim=True), IMAGE),
    (lambda: modules.Mean(2, 3), IMAGE),
    (lambda: modules.Graph([nn.ReLU(), nn.Tanh(), modules.Add(1, 1)], [[0], [0], [1, 2]]), (3,)),
    (
        lambda: modules.Graph([nn.Linear(3, 3), nn.ReLU(), modules.Blend(torch.tensor(0.3))], [[0], [0], [1, 2]]),
        (3,),
    ),
    recurrent(nn.LeakyReLU(-1.0)),
    (linear_system, (4, 2)),
    (lambda: modules.Reshape(4, 32), IMAGE),
    (lambda: modules.Permute(3, 1, 2), IMAGE),
    (lambda: modules.Piece(2, 1, 7, 3), IMAGE),
    (lambda: modules.Roll(3, -3), IMAGE),
    (lambda: modules.Roll(1, 5), IMAGE),
    (lambda: modules.Pad(1, 2, 0, 3), IMAGE),
    (lambda: modules.EnlargeBilinear(2, 4), IMAGE),
    (lambda: modules.Expand(2, 8, 8), (2, 1, 8)),
    (lambda: modules.Expand(2, 8, 2, 4, 3), (2, 8, 1, 4, 1)),
    (lambda: random(modules.FourierConv2d(2, 3, 5, 6)), (2, 5, 6)),
    (lambda: random(modules.FourierConv2d(2, 4, 6, 9, (3, 3), True)), (2, 6, 9)),
    (lambda: random(modules.FourierConv2d(2, 4, 4, 6, (2, 3), bias=False)), (2, 4, 6)),
    (lambda: random(modules.TaylorConv2d(2, 3, (3, 5), terms=4)), IMAGE),
    (lambda: modules.SandwichBlock(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2), torch.ones(5)), (3,)),
    (lambda: modules.SlopeResidual(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), torch.ones(5)), (3,)),
    (lambda: modules.Attraction(2), (5, 4)),
    (lambda: modules.GradientStep(nn.Linear(3, 5), nn.Softmax(-1), torch.tensor(0.5)), (4, 3)),
    (lambda: joined(nn.ReLU(), modules.Add(-1, 1)), (3,)),
    (lambda: joined(nn.ReLU(), modules.Concatenate(3)), IMAGE),
    (lambda: joined(modules.Permute(1, 3, 2), modules.Maximum()), IMAGE),
    (lambda: joined(nn.Tanh(), modules.Blend(torch.tensor(1.3))), (3,)),
    (lambda: joined(nn.Tanh(), modules.Product(torch.tensor([0.3, 0.4]))), (3,)),
    (lambda: joined(modules.Permute(1, 3, 2), modules.MatrixProduct(3, 4, 3, torch.tensor([0.9, 1.4]))), (2, 3, 4)),
]
CIRCULAR: list[Case] = [
    conv(3, padding=(1, 2), padding_mode="circular"),
    conv((2, 3), padding="same", padding_mode="circular"),
    conv(3, 2, 2, 2, padding_mode="circular"),
    (lambda: nn.Conv2d(2, 4, (1, 3), (1, 2), (0, 2), groups=2, padding_mode="circular"), (2, 1, 7)),
    (lambda: random(modules.SpreadConv2d(modules.FourierConv2d(2, 2, 3, 4, bias=False), 3, (3, 2))), (2, 3, 4)),
]
# Pairs of runtimes disagree about some of these; the reference evaluator of onnx cannot crop, and wants one group.
CEIL: list[Case] = [
    pool((3, 2), (3, 1), 1, ceil_mode=True, count_include_pad=False),
    pool(3, 2, 1, ceil_mode=True),
    (lambda: nn.MaxPool2d(2, (1, 2), 1, 2, ceil_mode=True), IMAGE),
    (lambda: nn.MaxPool2d(3, (3, 2), 1, ceil_mode=True), IMAGE),
]
ODD: list[Case] = [
    (lambda: modules.Pad(*(1, -1, 0, 2)), IMAGE),
    (lambda: modules.Pad(1, -2, 0, 3), IMAGE),
    (lambda: nn.ConvTranspose2d(4, 6, (1, 3), (1, 2), (0, 1), (0, 1), 2, dilation=(1, 2)), (4, 1, 5)),
]
# A graph of all modules at once would take minutes to write. Cases of one shape share a node that makes it.
SORTED = sorted(PLAIN, key=lambda case: case[1])
TABLES = {f"plain{i}": SORTED[-(-len(PLAIN) // 8) * i :][: -(-len(PLAIN) // 8)] for i in range(8)}
TABLES |= {"circular": CIRCULAR, "ceil": CEIL, "odd": ODD}
# What is written differently in float64, and what has numbers of its own.
DOUBLE: list[Case] = [
    conv(2, 2),
    conv((3, 2), (3, 2)),
    conv(2, 2, padding=1),
    pool(4, divisor_override=4),
    (nn.GELU, (3,)),
    (lambda: nn.LayerNorm(4, 1e-2, elementwise_affine=False), (2, 3, 4)),
    (lambda: random(modules.FourierConv2d(2, 3, 5, 6)), (2, 5, 6)),
]


def beside_each_other(cases: Iterable[Case], dtype: torch.dtype) -> modules.Network:
    """One network of all cases, which read the same 216 numbers; the outputs stand one behind the other."""
    torch.manual_seed(0)
    nodes: list[nn.Module] = []
    sources, ends, given = [], [], dict[tuple[int, ...], int]()

    def put(node: nn.Module, value: int) -> int:
        nodes.append(node)
        sources.append([value])
        return len(nodes)

    for make, shape in cases:
        if shape not in given:
            given[shape] = put(modules.Reshape(*shape), put(modules.Piece(1, 0, torch.Size(shape).numel()), 0))
        ends.append(put(nn.Flatten(), put(make(), given[shape])))
    graph = modules.Graph([*nodes, modules.Concatenate(1)], [*sources, ends])
    # The first module gives a network of pools a dtype.
    return modules.Network([modules.Affine(torch.ones(1), torch.zeros(1)), graph], (216,)).to(dtype)


def differences(network: modules.Network, runtime: Callable[[Tensor], Tensor]) -> list[str]:
    """The cases whose numbers are not those of the network, for batches that torch did not see."""
    x = 2 * torch.randn(8, 216, dtype=network[0].scale.dtype)
    wanted, got = network(x), torch.cat([runtime(x[:7]), runtime(x[7:])])
    assert got.dtype is wanted.dtype
    assert got.shape == wanted.shape
    graph = network[1]
    values = [x]
    for node, read in zip(graph.nodes, graph.sources, strict=True):
        values.append(node(*(values[value] for value in read)))
    parts = [values[end].shape[1] for end in graph.sources[-1]]
    pairs = zip(graph.sources[-1], wanted.split(parts, 1), got.split(parts, 1), strict=True)
    return [str(graph.nodes[i - 2]) for i, a, b in pairs if not torch.allclose(a, b, rtol=1e-5, atol=2e-5)]


def reference(path: Path) -> Callable[[Tensor], Tensor]:
    evaluator = ReferenceEvaluator(onnx.load(path))
    return lambda x: torch.from_numpy(evaluator.run(None, {"input": x.numpy()})[0])


def openvino(path: Path) -> Callable[[Tensor], Tensor]:
    core = pytest.importorskip("openvino", reason='needs OpenVINO: pip install "lipkit[openvino]"').Core()
    model = core.compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda x: torch.from_numpy(model([x.numpy()])[0])


@pytest.fixture(scope="module", params=TABLES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    """The name of a table, its network, and the path of its ONNX file."""
    network = beside_each_other(TABLES[request.param], torch.float32)
    folder = tmp_path_factory.mktemp("w")
    with traced_once():
        path = interop.write_onnx(network, folder / "network.onnx")
        assert [file.name for file in folder.iterdir()] == ["network.onnx"]
        yield request.param, network, path


@pytest.mark.thorough
def test_every_module_with_odd_options_is_the_same_in_onnx(written: Files) -> None:
    table, network, path = written
    assert differences(network, interop.onnx_runtime(path)) == []
    if table != "odd":
        assert differences(network, reference(path)) == []
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    wraps = any(a.s == b"wrap" for node in model.graph.node for a in node.attribute if node.op_type == "Pad")
    assert wraps == (table == "circular")
    assert [entry.version for entry in model.opset_import] == [22 if table == "ceil" else 19]


@pytest.mark.thorough
def test_every_module_is_the_same_in_openvino(written: Files) -> None:
    """It has no circular padding, and counts pixels beyond the padding where ceil_mode makes a window overhang."""
    table, network, path = written
    runtime = openvino(path) if table not in ("circular", "ceil") else pytest.skip("OpenVINO computes something else")
    assert differences(network, runtime) == []


@pytest.mark.thorough
@pytest.mark.usual(4)
def test_every_module_is_the_same_as_a_program(written: Files, tmp_path: Path) -> None:
    """Torch stores the graph that is written as ONNX above."""
    assert differences(written[1], written_program(written[1], tmp_path / "n.pt2")[1]) == []


@pytest.mark.parametrize("table", ["double", *(pytest.param(t, marks=pytest.mark.slow) for t in list(TABLES)[:-1])])
@pytest.mark.thorough
def test_float64_is_the_same_in_the_reference_evaluator(table: str, tmp_path: Path) -> None:
    """onnxruntime has no convolution in float64: the file was compared in the reference evaluator."""
    network = beside_each_other((TABLES | {"double": DOUBLE})[table], torch.float64)
    assert differences(network, reference(interop.write_onnx(network, tmp_path / "network.onnx"))) == []


@pytest.mark.parametrize("gate", [nn.GELU(), nn.GELU("tanh"), nn.Hardswish()])
def test_gates_of_large_halves_are_finite(gate: nn.Module, tmp_path: Path) -> None:
    network = modules.Network([nn.Linear(1, 1), gate], (1,)).half()
    network[0].load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    x = torch.tensor([[6e4], [2e4], [-1e4]]).half()
    written = reference(interop.write_onnx(network, tmp_path / "network.onnx"))
    with np.errstate(over="ignore"):  # of cubes inside tanh
        assert torch.equal(written(x), x.relu())


@pytest.mark.thorough
def test_float64_that_nothing_here_can_evaluate_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"network\.onnx: expected to write a valid ONNX model, got "):
        interop.write_onnx(beside_each_other(ODD[-1:], torch.float64), tmp_path / "network.onnx")
    assert list(tmp_path.iterdir()) == []


def test_every_stored_type_is_in_the_table() -> None:
    network = beside_each_other(itertools.chain(*TABLES.values()), torch.float32)
    assert set(stored_types()) <= {type(module) for module in network.modules()}


MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "bronet": ({"width": 8, "blocks": 1, "dense": (8,), "neck": 8}, (3, 8, 8)),
    "convnet": ({}, (1, 8, 8)),
    "kwlarge": ({"layer": "aol", "pool": True, "dense": (16, 16)}, (1, 16, 16)),
    "lbdn": ({"hidden": (8, 8)}, (3,)),
    "lbdn_conv": ({"width": 4, "blocks": 1, "hidden": (8,)}, (3, 8, 8)),
    "lipconvnet": ({"width": 0.0625}, (3, 16, 16)),
    "liresnet": ({"width": 8, "blocks": 1, "dense": (8,), "neck": 8}, (3, 8, 8)),
    "mlp": ({"hidden": (8,)}, (3,)),
    "patchnet": ({"patch": 2, "stages": ((16, 1),), "dense": (8,)}, (1, 8, 8)),
    "resnet9": ({"layer": "aol", "width": 2}, (3, 16, 16)),
    "resnet_plain": ({"blocks": (1, 1, 1, 1), "width": 4, "classes": 5}, (3, 32, 32)),
    "sequence_classifier": ({"states": 4, "units": 6}, (3, 3)),
    "sllnet": ({"channels": 6, "depth": 1, "dense": (8,)}, (3, 16, 16)),
    "small": ({}, (1, 8, 8)),
    "vision_transformer": (
        {"patch": 4, "width": 8, "depth": 1, "heads": 2, "slots": 5, "dense": (8,)},
        (1, 8, 8),
    ),
    "wide_resnet": ({"layer": "aol", "widen": 1}, (1, 16, 16)),
    "wrn_plain": ({"depth": 10, "widen": 1}, (3, 16, 16)),
}


# Their modules are in the files of other models or families; or their joins and pools in the tables, and a ResNet in
# tests/analysis/test_twelve.py.
ALIKE = (
    *("bronet", "convnet", "kwlarge", "lbdn", "lbdn_conv", "lipconvnet", "liresnet", "mlp", "resnet9"),
    *("resnet_plain", "sllnet", "small", "wide_resnet", "wrn_plain"),
)


def exported(name: str) -> modules.Network:
    options, shape = MODELS[name]
    torch.manual_seed(0)
    built = models.build(name, **{"input_shape": shape, "classes": 5, **options})
    network: modules.Network = lipkit.export(built.eval(), shape)
    return network


def types(network: nn.Module) -> set[tuple[type[nn.Module], str]]:
    return {(type(module), getattr(module, "padding_mode", "")) for module in network.modules()}


def test_every_model_is_in_the_table() -> None:
    assert set(models.MODELS) - {"rebuild"} == set(MODELS)  # that one is made of the modules of another network


@pytest.mark.thorough
def test_alike_models_have_no_module_of_their_own() -> None:
    others = [types(exported(name)) for name in MODELS if name not in ALIKE] + [types(family(k)) for k in KINDS]
    residual = {(kind, "") for kind in (modules.Graph, nn.ModuleList, modules.Add, modules.Blend)}
    pools = {(kind, "") for kind in (nn.AvgPool2d, nn.MaxPool2d)}
    for name in ALIKE:
        assert types(exported(name)) <= set.union(residual, pools, *others), name


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in MODELS])
def test_every_model_is_the_same_in_both_files(name: str, tmp_path: Path) -> None:
    network, shape = exported(name), MODELS[name][1]
    with traced_once():
        path = interop.write_onnx(network, tmp_path / "network.onnx")
        program, runtime = written_program(network, tmp_path / "network.pt2")
    others = [interop.onnx_runtime(path), reference(path), runtime]
    claimed(network, path, program)
    if importlib.util.find_spec("openvino") and b"wrap" not in path.read_bytes():
        others.append(openvino(path))
    x = torch.rand(5, *shape)
    for other in others:
        assert other(x).numpy() == pytest.approx(network(x).numpy(), rel=1e-4, abs=1e-5)


@pytest.mark.thorough
def test_halves_keep_their_range(tmp_path: Path) -> None:
    """Squares of 300 and an eps of 1e-9 are beyond it."""
    network = modules.Network([nn.LayerNorm(4, 1e-9), nn.LayerNorm(4, 1e-9, elementwise_affine=False)], (4,)).half()
    program = runtimes._program(network)
    x = torch.stack([torch.linspace(0, 300, 4), torch.zeros(4)]).half()
    got = ReferenceEvaluator(runtimes.model_of(program)).run(None, {"input": x.numpy()})[0]
    assert got == pytest.approx(network(x).numpy(), abs=2e-3)
    for lost in (nn.Softplus(1e6), nn.Softplus(1e-8)):
        program = runtimes._program(modules.Network([nn.Linear(4, 4), lost], (4,)).half())
        with pytest.raises(NoRuleError, match=r"expected numbers within the range of torch\.float16, got 1"):
            runtimes.model_of(program)


@pytest.mark.thorough
def test_what_a_choice_leaves_out_may_overflow(tmp_path: Path) -> None:
    """onnxruntime has no ELU in float64, and the evaluator that is asked instead takes exp(800)."""
    network = modules.Network([nn.ELU(), nn.Linear(2, 2)], (2,)).double()
    network.input_range = (700.0, 800.0)
    assert interop.write_onnx(network, tmp_path / "network.onnx").exists()


class Ends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x.narrow(2, -3, 3), scale_factor=2, mode="bilinear", align_corners=True)


def test_places_counted_from_the_end() -> None:
    network, x = modules.Network([Ends()], (1, 4, 2)), torch.randn(3, 1, 4, 2)
    got = ReferenceEvaluator(runtimes.model_of(runtimes._program(network))).run(None, {"input": x.numpy()})[0]
    assert got == pytest.approx(network(x).numpy(), abs=1e-6)


class Erfinv(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erfinv(0.5 * torch.tanh(x))


def test_a_function_without_a_rule_is_named() -> None:
    program = runtimes._program(modules.Network([nn.Linear(3, 2), Erfinv()], (3,)))
    with pytest.raises(NoRuleError, match=r"expected operators that have a rule in ONNX, got aten\.erfinv\.default"):
        runtimes.model_of(program)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_holds_large_weights_once(dtype: torch.dtype, tmp_path: Path) -> None:
    layers = [nn.Conv2d(4, 64, 8, 8), nn.Flatten(2), modules.Permute(2, 1), nn.Linear(64, 300), nn.Flatten()]
    network = modules.Network(layers, (4, 16, 16)).to(dtype)
    weights = sum(t.numel() * t.itemsize for t in network.state_dict().values())
    assert weights < interop.write_onnx(network, tmp_path / "network.onnx").stat().st_size < 1.02 * weights + 4096


def drops_the_divisor(network: modules.Network) -> nn.Module:
    return modules.Network(
        [nn.AvgPool2d(4) if isinstance(m, nn.AvgPool2d) else m for m in network], network.input_shape
    )


@pytest.mark.thorough
def test_a_file_of_another_function_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = modules.Network([nn.AvgPool2d(4, divisor_override=4), nn.Flatten()], (1, 8, 8))
    path = tmp_path / "network.onnx"
    path.write_bytes(b"before")
    written = runtimes._program
    with monkeypatch.context() as patch:
        patch.setattr(runtimes, "_program", lambda network: written(drops_the_divisor(network)))
        with pytest.raises(CertificateViolation, match="expected outputs of the runtime within"):
            interop.write_onnx(network, path)
    assert path.read_bytes() == b"before"
    real = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda net, *a, **o: real(drops_the_divisor(net), *a, **o))
    with pytest.raises(CertificateViolation, match="expected outputs of the runtime within"):
        interop.write_program(network, tmp_path / "network.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["network.onnx"]


@pytest.mark.thorough
def test_small_outputs_are_compared_at_their_own_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = modules.Affine(torch.tensor([1e-6]), torch.tensor([0.0]))
    network = modules.Network([tiny, nn.AvgPool2d(4, divisor_override=4)], (1, 8, 8))
    assert interop.write_program(network, tmp_path / "a.pt2").exists()
    monkeypatch.setattr(torch.export, "export", _exports(torch.export.export))
    with pytest.raises(CertificateViolation):
        interop.write_program(network, tmp_path / "b.pt2")


def _exports(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda net, *given, **options: real(drops_the_divisor(net), *given, **options)


@pytest.mark.skipif(c_source.compiler() is None, reason="no C compiler")
def test_a_c_file_of_another_function_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = modules.Network([nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)], (3,))
    network.input_range = (0.0, 1.0)
    monkeypatch.setitem(
        c_source._FUNCTIONS, "fold", c_source._FUNCTIONS["fold"].replace(": x[i];", ": x[i] + (1 << 20);")
    )
    with pytest.raises(CertificateViolation, match=r"expected .*network\.c to compute the integer program"):
        interop.write_c(network, tmp_path / "network.c")
    assert list(tmp_path.iterdir()) == []
