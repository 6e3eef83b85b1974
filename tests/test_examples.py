"""The worked example runs and proves what it says; the documents' code runs and gives the numbers beside it."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import lipkit
from lipkit.certificates import lipsdp
from lipkit.modules.activations import slope_restricted

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]


def script(path: str) -> ModuleType:
    """A file outside the package as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def flown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and printout of the example after a short training."""
    folder = tmp_path_factory.mktemp("controller")
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *text, end="\n": printed.append(" ".join(map(str, text)) + end))
        threads = torch.get_num_threads()
        script("examples/controller.py").main(["--steps", "30", "--out", str(folder)])
        torch.set_num_threads(threads)
    return folder, "".join(printed)


def test_the_example_proves_its_gain_twice(flown: tuple[Path, str]) -> None:
    text = flown[1]
    assert "gain 16 from input to output, with the network's own multipliers: proved" in text
    assert "proved: gain of 12 -> 64 -> 64 -> 4 between the scalings <= 2 (" in text
    assert "gain from input to output <= 2 * 2 * 4 = 16\n" in text
    found = re.search(r"scalings ([\d.]+) \(found\) <= gain <= ([\d.]+) <= 2\n", text)
    assert found is not None
    assert 0.1 < float(found[1]) <= float(found[2]) <= 2


def test_onnxruntime_computes_what_lipkit_exported(flown: tuple[Path, str]) -> None:
    line = next(line for line in flown[1].splitlines() if "largest difference" in line)
    differences = [float(v) for v in re.findall(r"\d\.\de[+-]\d\d", line)]
    # Thrust is about 10 N, torques at most about 0.5 N m; float32 sums of 64 terms.
    assert len(differences) == 4
    assert max(differences) < 64 * 20 * torch.finfo(torch.float32).eps


def test_documents_quote_the_example(flown: tuple[Path, str]) -> None:
    """Line by line the same but for numbers."""
    text = (ROOT / "docs/lbdn.md").read_text()
    quoted = re.search(r"```text\n(.*?)```", text, re.S)
    assert quoted is not None
    number = r"\d[\d.]*(e[+-]\d+)?"
    assert [re.sub(number, "#", v) for v in quoted[1].splitlines()] == [
        re.sub(number, "#", v) for v in flown[1].splitlines()
    ]


def weight(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(t for t in model.graph.initializer if t.name == name)


def test_the_check_fails_for_every_other_file(flown: tuple[Path, str], tmp_path: Path) -> None:
    checker, source, changed = (
        script("examples/verify_onnx.py"),
        flown[0] / "controller.onnx",
        tmp_path / "changed.onnx",
    )
    assert checker.main(str(source)) == 0

    def proved(change: object) -> bool:
        model = onnx.load(source)
        change(model)  # type: ignore[operator]
        onnx.save(model, changed)
        return bool(checker.main(str(changed)) == 0)

    def scaled(name: str, factor: float) -> object:
        def change(model: onnx.ModelProto) -> None:
            tensor = weight(model, name)
            tensor.CopyFrom(onnx.numpy_helper.from_array(factor * onnx.numpy_helper.to_array(tensor), name))

        return change

    def claimed(key: str, value: str) -> object:
        def change(model: onnx.ModelProto) -> None:
            next(entry for entry in model.metadata_props if entry.key == key).value = value

        return change

    def renamed(before: str, after: str) -> object:
        def change(model: onnx.ModelProto) -> None:
            next(node for node in model.graph.node if node.op_type == before).op_type = after

        return change

    weights = [n.input[1] for n in onnx.load(source).graph.node if n.op_type == "Gemm"]
    assert proved(scaled(weights[1], 0.0))
    for name in weights:
        assert not proved(scaled(name, 3.0))
    biases = [n.input[2] for n in onnx.load(source).graph.node if n.op_type == "Gemm"]
    for name in weights + biases:
        with pytest.raises(ValueError, match="expected finite numbers"):
            proved(scaled(name, float("nan")))
    assert not proved(claimed("lipkit.gamma", "0.2"))
    assert not proved(claimed("lipkit.gamma", "nan"))
    with pytest.raises(ValueError, match="one multiplier for each hidden unit"):
        proved(claimed("lipkit.multipliers", "[[1.0], [1.0]]"))
    with pytest.raises(ValueError, match="got Exp"):
        proved(renamed("Relu", "Exp"))
    with pytest.raises(ValueError, match="got Sub"):
        proved(renamed("Add", "Sub"))

    def transposed(model: onnx.ModelProto) -> None:
        # 64 x 64: the shapes fit either way, the function does not.
        gemm = [n for n in model.graph.node if n.op_type == "Gemm"][1]
        next(a for a in gemm.attribute if a.name == "transB").i = 0

    def doubled(model: onnx.ModelProto) -> None:
        gemm = next(n for n in model.graph.node if n.op_type == "Gemm")
        kept = [a for a in gemm.attribute if a.name != "alpha"]
        del gemm.attribute[:]
        gemm.attribute.extend([*kept, onnx.helper.make_attribute("alpha", 2.0)])

    def redefined(model: onnx.ModelProto) -> None:
        node = onnx.helper.make_node("Exp", ["x"], ["y"])
        model.functions.append(onnx.helper.make_function("local", "f", ["x"], ["y"], [node], model.opset_import))

    assert not proved(transposed)
    with pytest.raises(ValueError, match="expected Gemm as"):
        proved(doubled)
    with pytest.raises(ValueError, match="no functions of its own"):
        proved(redefined)


def test_the_check_agrees_with_eigenvalues() -> None:
    checker, rng = script("examples/verify_onnx.py"), np.random.default_rng(0)
    for _ in range(20):
        sizes = rng.integers(1, 9, 4)
        weights = [rng.standard_normal((m, n)) for n, m in pairwise(sizes)]
        lambdas = [10.0 ** rng.uniform(-2, 2, n) for n in sizes[1:-1]]

        def smallest(gamma: float, w: list[np.ndarray] = weights, v: list[np.ndarray] = lambdas) -> float:
            n = [w[0].shape[1], *map(len, w)]
            blocks = [[np.zeros((a, b)) for b in n] for a in n]
            for k, diagonal in enumerate([np.full(n[0], gamma), *(2 * x for x in v), np.full(n[-1], gamma)]):
                blocks[k][k] = np.diag(diagonal)
            for k in range(len(w)):
                blocks[k + 1][k] = -w[k] if k == len(v) else -np.diag(v[k]) @ w[k]
                blocks[k][k + 1] = blocks[k + 1][k].T
            return float(np.linalg.eigvalsh(np.block(blocks))[0])

        # Weights shrunk until the multipliers prove some gain; then the smallest such gain, by bisection.
        while smallest(1e6) < 1e-6:
            weights[:] = [w / 2 for w in weights]
        low, high = 0.0, 1e6
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if smallest(middle) > 0 else (middle, high)
        assert checker.proves(weights, lambdas, high * 1.001)
        assert not checker.proves(weights, lambdas, high * 0.999)


def test_the_benchmark_compares_the_same_problem() -> None:
    benchmark = script("benchmarks/lipsdp.py")
    network = benchmark.mlp([3, 7, 5, 2])
    assert benchmark.clarabel_gain(network)[0] == pytest.approx(lipsdp.solve(network).gain, rel=1e-4)


def test_the_code_of_the_document_gives_the_numbers_beside_it() -> None:
    text = (ROOT / "docs/lbdn.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    values: dict[str, object] = {}
    exec(compile(code, "docs/lbdn.md", "exec"), values)
    stated = re.findall(r"^([\w, ]+?) = .*# ([\d., ]+)$", code, re.M)
    assert len(stated) == 6
    for names, numbers in stated:
        for name, number in zip(names.split(", "), numbers.split(", "), strict=True):
            # Rounding differs between processors, and training amplifies it.
            assert values[name] == pytest.approx(float(number), rel=0.3 if "error" in name else 0.05)


def test_the_table_of_activations_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \| (\S+) to (\S+) \|", (ROOT / "docs/lbdn.md").read_text(), re.M)
    x = torch.linspace(-40, 40, 80001, dtype=torch.float64, requires_grad=True)
    for name, admitted, low, high in rows:
        module = getattr(nn, name)().double().eval() if name == "RReLU" else getattr(nn, name)().double()
        assert slope_restricted(module) == (admitted == "yes"), name
        if name == "RReLU":
            module = module.train()
        (slopes,) = torch.autograd.grad(module(x).sum(), x)
        assert float(slopes.min()) == pytest.approx(float(low), abs=1e-3), name
        assert float(slopes.max()) == pytest.approx(float(high), abs=1e-3), name
    named = {name for name, *_ in rows}
    other = {"Threshold", "Softmax", "Softmin", "LogSoftmax", "GLU", "Softmax2d", "MultiheadAttention"}
    assert named | other == set(nn.modules.activation.__all__)


def test_the_denoiser_is_proved_and_its_steps_never_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "2", "--iterations", "6", "--channels", "8", "--blocks", "1", "--depth", "1"]
    script("examples/denoiser.py").main([*arguments, "--out", str(tmp_path)])
    ours, deblurred, theirs, _ = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"orthogonal: .* L\(N\) <= (0\.999\d+)", ours)
    assert found is not None
    assert float(found[1]) <= 1
    assert deblurred.endswith("longer than the one before 0 times")
    assert float(theirs.rpartition(" ")[2]) > 1
    assert (tmp_path / "deblurring.svg").stat().st_size > 1000
    assert lipkit.load(tmp_path / "orthogonal").input_shape == (3, 192, 192)


def test_by_hand_trains_certifies_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("examples/by_hand.py").main(["--epochs", "1", "--out", str(tmp_path / "digits.onnx")])
    text = capsys.readouterr().out
    found = re.search(r"^claimed constant (\S+), proved (\S+)$", text, re.M)
    assert found is not None
    assert [float(number) for number in found.groups()] == pytest.approx([1, 1], abs=1e-4)
    assert "change 0 predictions" in text
    onnx.checker.check_model(tmp_path / "digits.onnx", full_check=True)


def test_a_loop_is_closed_by_the_small_gain_theorem_and_only_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    example = script("examples/small_gain.py")
    threads = torch.get_num_threads()
    example.main(["--steps", "2"])
    torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert "product 0.9000: the loop is stable" in text
    assert "refused: small gain: expected proved gains with a product below 1, got 3.36" in text
    assert "input, forget, cell and output gates" in text
    plant = example.plant()
    plant[0].gain *= 0.9  # a claim that the metric does not prove
    with pytest.raises(SystemExit, match="may be unstable, and is not closed"):
        example.closed_loop_bound(plant, lipkit.export(lipkit.layers.R2dn(1, 1, 2, 2, gamma=0.29), (1, 1)))
