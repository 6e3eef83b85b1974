from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.interop.test_read_back import without_claim

from lipkit import export, lipschitz
from lipkit.analysis import analyze
from lipkit.errors import DataError, LipkitError, NoRuleError, ShapeError
from lipkit.interop import onnx_reader, reading, write_onnx
from lipkit.interop.onnx_operators import OPERATORS
from lipkit.interop.onnx_reader import load_onnx, read_onnx

onnx = pytest.importorskip("onnx")
onnx_files = pytest.importorskip("benchmarks.onnx_files")
H = onnx.helper


def write(path, nodes, stored, shape, opset=13):
    tensors = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in stored.items()]
    x = H.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    y = H.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    model = H.make_model(H.make_graph(nodes, "net", [x], [y], tensors), opset_imports=[H.make_opsetid("", opset)])
    onnx.save(model, str(path))
    return path


@pytest.fixture
def numbers():
    return np.random.default_rng(0)


@pytest.mark.thorough
def test_every_operator(tmp_path, numbers):
    def make(*shape):
        return numbers.normal(size=shape).astype(np.float32)

    stored = {
        "w1": make(4, 2, 3, 3), "b1": make(4), "w2": make(4, 2, 3, 3), "s": make(4), "t": make(4), "m": make(4),
        "v": np.abs(make(4)) + 0.1, "shape": np.array([-1, 24]), "g": make(5, 24), "gb": make(5), "mm": make(5, 3),
        "c": make(3),
    }  # fmt: skip
    nodes = [
        H.make_node("Conv", ["x", "w1", "b1"], ["a"], name="first.conv", pads=[1, 1, 1, 1], strides=[1, 1]),
        H.make_node("BatchNormalization", ["a", "s", "t", "m", "v"], ["b"], epsilon=1e-3),
        H.make_node("Relu", ["b"], ["c0"]),
        H.make_node("Conv", ["c0", "w2"], ["d"], group=2, pads=[0, 0, 2, 2]),
        H.make_node("Add", ["d", "c0"], ["e"]),
        H.make_node("Dropout", ["e"], ["e1"]),
        H.make_node("Identity", ["e1"], ["e2"]),
        H.make_node("MaxPool", ["e2"], ["f"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        H.make_node("AveragePool", ["f"], ["g0"], kernel_shape=[2, 2], strides=[1, 1]),
        H.make_node("GlobalAveragePool", ["g0"], ["h"]),
        H.make_node("Flatten", ["h"], ["h1"]),
        H.make_node("ReduceMean", ["g0"], ["h2"], axes=[2, 3], keepdims=0),
        H.make_node("Reshape", ["g0", "shape"], ["i"]),
        H.make_node("Concat", ["h1", "h2"], ["j"], axis=1),
        H.make_node("Gemm", ["i", "g", "gb"], ["k"], transB=1),
        H.make_node("MatMul", ["k", "mm"], ["l"]),
        H.make_node("Add", ["l", "c"], ["n"]),
        H.make_node("Concat", ["n", "j"], ["y"], axis=-1),
    ]
    net = read_onnx(write(tmp_path / "net.onnx", nodes, stored, ["batch", 2, 8, 6]))
    assert net.input_shape == (2, 8, 6)
    x = torch.randn(3, 2, 8, 6)
    t = {k: torch.from_numpy(np.asarray(v)) for k, v in stored.items()}
    c0 = torch.relu(F.batch_norm(F.conv2d(x, t["w1"], t["b1"], padding=1), t["m"], t["v"], t["s"], t["t"], eps=1e-3))
    f = F.max_pool2d(F.conv2d(F.pad(c0, (0, 2, 0, 2)), t["w2"], groups=2) + c0, 3, 2, 1)
    g0 = F.avg_pool2d(f, 2, 1)
    n = F.linear(g0.reshape(3, -1), t["g"], t["gb"]) @ t["mm"] + t["c"]
    expected = torch.cat((n, g0.mean((2, 3)), g0.mean((2, 3))), 1)
    assert torch.allclose(net(x), expected, atol=1e-5)
    found = analyze(net, (2, 8, 6), restarts=2, steps=5)
    assert 0 < found.lower <= found.upper
    assert any("Conv2d + BatchNorm2d" in layer.type for layer in found.layers)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (("Tan", {}), "the operators Tan: nothing"),
        (("Softplus", {"domain": "com.microsoft"}), "the operators com.microsoft.Softplus: nothing"),
        (("Mul", {}), "Mul: not well-formed in version 13 of ONNX: .* input size 1"),
        (("Sign", {}), "the operators Sign: nothing"),
        (("MaxPool", {"kernel_shape": [2, 2], "pads": [0, 0, 2, 1]}), "paddings below the size of the window"),
        (("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}), "windows that fit"),
        (("MaxPool", {"kernel_shape": [2, 2], "dilations": [2, 2], "pads": [1] * 4}), "no pads beside it or dilations"),
        (
            ("MaxPool", {"kernel_shape": [1, 1], "strides": [2, 2], "ceil_mode": 1}),
            "overlapping windows with ceil_mode 1",
        ),
        (("Flatten", {"axis": 0}), "axis 1, got 0"),
        (("Flatten", {"axis": 3}), "axis 1, got 3"),
        (("ReduceMean", {}), "axes"),
        (("Cast", {"to": 6}), "the format torch.float32 of the network, got torch.int32"),
        (("ReduceProd", {}), "the operators ReduceProd: nothing"),
        (("ReduceMax", {}), "axes other than the batch"),
        (("ArgMax", {}), "the operators ArgMax: nothing"),
        (("QuantizeLinear", {}), "the operators QuantizeLinear: nothing"),
        (("Relu", {"slope": 3.0}), "not well-formed .* Unrecognized attribute: slope"),
        (("AveragePool", {"kernel_shape": [2, 2], "auto_pad": "VALID", "pads": [0, 1, 0, 1]}), "beside auto_pad=VALID"),
        (("Erf", {}), "the operators Erf: nothing"),
        (("Constant", {"value_float": 1.0}), "numbers as its value|input size 1"),
    ],
)
def test_refused_by_name(tmp_path, node, message):
    op, attributes = node
    path = write(tmp_path / "net.onnx", [H.make_node(op, ["x"], ["y"], **attributes)], {}, ["b", 1, 4, 4])
    with pytest.raises((NoRuleError, DataError), match=message):
        read_onnx(path)


def changed(path, change):
    model = onnx.load(str(path))
    change(model)
    onnx.save(model, str(path))
    return path


@pytest.mark.thorough
def test_operators_that_mean_something_else_are_refused(tmp_path):
    squared = H.make_function(
        "", "Relu", ["a"], ["b"], [H.make_node("Mul", ["a", "a"], ["b"])], [H.make_opsetid("", 13)]
    )
    changes = {
        r"one version from 6 to \d+, got \[5\]": lambda model: setattr(model.opset_import[0], "version", 5),
        r"one version from 6 to \d+, got \[2000\]": lambda model: setattr(model.opset_import[0], "version", 2000),
        r"one version .* got \[12, 13\]": lambda model: model.opset_import.append(H.make_opsetid("ai.onnx", 12)),
        r"functions of the file: \['.Relu'\]": lambda model: model.functions.append(squared),
        "floating-point input, got 'x' of type INT32": lambda model: setattr(
            model.graph.input[0].type.tensor_type, "elem_type", onnx.TensorProto.INT32
        ),
    }
    for message, change in changes.items():
        path = write(tmp_path / "net.onnx", [H.make_node("Relu", ["x"], ["y"])], {}, [1, 4])
        assert analyze(read_onnx(path), (4,), restarts=0).upper == 1
        with pytest.raises(NoRuleError, match=message):
            read_onnx(changed(path, change))


def test_the_table_has_operators_of_onnx_alone():
    assert OPERATORS.keys() <= {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}


def test_a_version_that_no_rule_covers_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "net.onnx", [H.make_node("Relu", ["x"], ["y"])], {}, [1, 4])
    monkeypatch.setattr(onnx_reader, "NEWEST", 12)
    with pytest.raises(NoRuleError, match="expected Relu of a version up to 12, got version 13"):
        read_onnx(path)


@pytest.mark.parametrize(("opset", "axis", "merged"), [(7, None, 1), (12, 1, 1), (11, 2, 2), (11, -1, 2), (13, 1, 0)])
def test_softmax_of_older_versions_takes_all_from_the_axis_on(tmp_path, numbers, opset, axis, merged):
    options = {} if axis is None else {"axis": axis}
    path = write(tmp_path / "net.onnx", [H.make_node("Softmax", ["x"], ["y"], **options)], {}, ["b", 3, 4], opset)
    x = numbers.normal(size=(5, 3, 4)).astype(np.float32)
    over = {0: (1,), 1: (1, 2), 2: (2,)}[merged]
    expected = np.exp(x) / np.exp(x).sum(over, keepdims=True)
    np.testing.assert_allclose(load_onnx(path)(torch.from_numpy(x)).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("opset", [7, 10])
def test_negative_axes_of_older_versions(tmp_path, numbers, opset):
    nodes = [
        H.make_node("Split", ["x"], ["a", "b"], axis=-1, split=[1, 3]),
        H.make_node("Concat", ["b", "a"], ["c"], axis=-1),
        H.make_node("Squeeze", ["c"], ["d"], axes=[-2]),
        H.make_node("ReduceMean", ["d"], ["y"], axes=[-1], keepdims=1),
    ]
    path = write(tmp_path / "net.onnx", nodes, {}, ["b", 1, 4], opset)
    x = numbers.normal(size=(2, 1, 4)).astype(np.float32)
    np.testing.assert_allclose(load_onnx(path)(torch.from_numpy(x)).numpy(), x[:, 0].mean(1, keepdims=True), rtol=1e-5)
    with pytest.raises(NoRuleError, match="expected an axis from 0 to 2, got -1"):
        read_onnx(write(path, [H.make_node("Flatten", ["x"], ["y"], axis=-1)], {}, ["b", 1, 4], opset))


@pytest.mark.parametrize(
    ("node", "operands", "versions"),
    [
        (("Clip", {"min": -1.0, "max": 0.5}), [np.float32(-1), np.float32(0.5)], (10, 11)),
        (("Squeeze", {"axes": [1]}), [np.array([1])], (12, 13)),
        (("Unsqueeze", {"axes": [2]}), [np.array([2])], (12, 13)),
        (("ReduceMean", {"axes": [2], "keepdims": 0}), [np.array([2])], (17, 18)),
        (("Pad", {"pads": [0, 0, 1, 0, 0, 2]}), [np.array([0, 0, 1, 0, 0, 2])], (10, 11)),
        (("Slice", {"starts": [1], "ends": [9], "axes": [2]}), [np.array([1]), np.array([9]), np.array([2])], (9, 10)),
        (("Split", {"split": [4], "axis": 2}), [np.array([4])], (12, 13)),
    ],
)
def test_attributes_that_became_operands(tmp_path, node, operands, versions):
    op, attributes = node
    kept = {key: value for key, value in attributes.items() if key in ("keepdims", "axis")}
    old = ([H.make_node(op, ["x"], ["y"], **attributes)], {})
    names = {f"o{i}": value for i, value in enumerate(operands)}
    new = ([H.make_node(op, ["x", *names], ["y"], **kept)], names)
    x, found = torch.randn(2, 1, 4), []
    for (nodes, stored), opset, other in zip((old, new), versions, versions[::-1], strict=True):
        found.append(load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 1, 4], opset))(x))
        with pytest.raises(DataError, match="not well-formed in version"):
            read_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 1, 4], other))
    assert torch.equal(*found)
    assert op == "Split" or not torch.equal(x, found[0])


def relu_of(domain, op, opset=13):
    """A function of the file with the name of an operator: the Relu of its first operand, or 3."""
    given = {"Constant": [], "Sigmoid": ["a"], "Erf": ["a"]}.get(op, ["a", "b"])
    three = onnx.numpy_helper.from_array(np.float32(3))
    body = H.make_node("Relu", ["a"], ["r"]) if given else H.make_node("Constant", [], ["r"], value=three)
    return H.make_function(domain, op, given, ["r"], [body], [H.make_opsetid("", opset)], ["value"] * (not given))


def gated():
    one = H.make_node("Constant", [], ["one"], value=onnx.numpy_helper.from_array(np.float32(1)))
    stored = {"root": np.float32(np.sqrt(2)), "half": np.float32(0.5)}
    gelu = [("Div", ["x", "root"], "d"), ("Erf", ["d"], "e"), ("Add", ["e", "one"], "f"), ("Mul", ["x", "f"], "g")]
    nodes = [one, *(H.make_node(op, given, [made]) for op, given, made in (*gelu, ("Mul", ["g", "half"], "h")))]
    swish = [H.make_node("Sigmoid", ["h"], ["s"]), H.make_node("Mul", ["h", "s"], ["y"])]
    return [*nodes, *swish], stored


@pytest.mark.thorough
@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("defined", [True, False])
def test_operators_of_another_domain_are_nowhere_taken_for_those_of_onnx(tmp_path, position, defined):
    nodes, stored = gated()
    x = torch.randn(3, 4)
    whole = load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 4]))
    assert torch.allclose(whole(x), F.silu(F.gelu(x)), atol=1e-6)
    nodes[position].domain = "my"

    def change(model):
        model.opset_import.append(H.make_opsetid("my", 1))
        model.functions.extend([relu_of("my", nodes[position].op_type)] * defined)

    path = changed(write(tmp_path / "net.onnx", nodes, stored, ["b", 4]), change)
    with pytest.raises(
        NoRuleError, match="functions of the file" if defined else f"operators .*my.{nodes[position].op_type}: nothing"
    ):
        read_onnx(path)
    nodes[position].domain = "ai.onnx"
    found = load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 4]))
    assert torch.equal(found(x), whole(x))


def test_a_number_of_more_dimensions_is_part_of_no_activation(tmp_path):
    nodes, stored = gated()
    stored["half"] = np.full((1, 1, 1), 0.5, np.float32)
    with pytest.raises(NoRuleError, match="the operators Erf: nothing"):
        read_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 4]))


@pytest.mark.parametrize(
    ("nodes", "stored", "words"),
    [
        ([("Squeeze", ["x", "i"], {})], {"i": [1]}, "is invalid for input"),
        ([("Split", ["x"], {"axis": 2}, ["y", "z"])], {}, "split_with_sizes|sum exactly"),
        ([("Softmax", ["x"], {"axis": 0})], {}, "mixes samples"),
        ([("Slice", ["x", "i", "j", "i", "s"], {})], {"i": [0], "j": [2**31 - 1], "s": [2]}, "the batch"),
        ([("Slice", ["x", "i", "j", "a", "s"], {})], {"i": [0], "j": [3], "a": [1], "s": [-1]}, "got none"),
        ([("Slice", ["x", "i", "j", "a", "s"], {})], {"i": [3], "j": [-9], "a": [0], "s": [-1]}, "steps from 1 on"),
        ([("Tile", ["x", "r"], {})], {"r": [2]}, "repeats, one for each axis, got .2."),
        ([("Unsqueeze", ["x", "i"], {})], {"i": [1, 1]}, "each once"),
        ([("Reshape", ["x", "i"], {})], {"i": [-1, -1, 3]}, "one size -1 at most"),
        ([("MatMul", ["w", "x"], {})], {"w": np.ones(3, np.float32)}, r"operands of \[1, 3\] dimensions"),
        ([("Reshape", ["x", "w"], {})], {"w": [15, 1]}, r"size 15 \* batch$"),
        ([("BatchNormalization", ["x", *"wwww"], {}, ["y", *"abcd"])], {"w": np.ones(3, np.float32)}, "got 5"),
        ([("Clip", ["x", "w", "v"], {})], {"w": np.float32(2), "v": np.float32(1)}, "the lower one first"),
        ([("ReduceProd", ["w"], {"noop_with_empty_axes": 1}, ["p"]), ("Mul", ["x", "p"], {})],
         {"w": np.full(5, 3, np.float32)}, "axes other than the batch, got none"),
        ([("Mul", ["x", "w"], {})], {"w": np.ones(5)}, "input's format torch.float32, got .*float64"),
    ],
)  # fmt: skip
def test_what_a_runtime_refuses_or_takes_otherwise_is_refused(tmp_path, nodes, stored, words):
    made = [H.make_node(op, given, out[0] if out else ["y"], **more) for op, given, more, *out in nodes]
    stored = {key: np.array(value) for key, value in stored.items()}
    opset = {"ReduceProd": 18, "BatchNormalization": 9}.get(made[0].op_type, 13)
    with pytest.raises(LipkitError, match=words):
        load_onnx(write(tmp_path / "net.onnx", made, stored, ["b", 3, 5], opset))


@pytest.mark.parametrize("last", [[], [H.make_node("Unsqueeze", ["m", "i"], ["y"])]])
def test_one_number_for_each_sample(tmp_path, last):
    mean = H.make_node("ReduceMean", ["x"], ["m" if last else "y"], axes=[1, 2], keepdims=0)
    path = write(tmp_path / "net.onnx", [mean, *last], {"i": np.array([1])} if last else {}, ["b", 3, 5], 13)
    x = torch.rand(4, 3, 5)
    found = load_onnx(path)
    torch.testing.assert_close(found(x), x.mean((1, 2))[:, None] if last else x.mean((1, 2)))
    assert float(lipschitz(found)) == pytest.approx(15**-0.5)


def beside(tmp_path, dims, size, **part):
    """A file whose weight lies beside it, in ``size`` bytes of which the file system keeps none."""
    with open(tmp_path / "weights.bin", "wb") as file:
        file.truncate(size)
    path = write(tmp_path / "net.onnx", [H.make_node("Add", ["x", "w"], ["y"])], {}, [1, 4])
    model = onnx.load(str(path))
    tensor = raw(dims, location="weights.bin")
    for key, value in part.items():
        tensor.external_data.add(key=key, value=str(value))
    model.graph.initializer.append(tensor)
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_beside_the_file_are_read_by_their_sizes(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    stored = {"w": np.arange(4, dtype=np.float32), "v": np.full((1, 4), 2.5, np.float32)}
    nodes = [H.make_node("Mul", ["x", "v"], ["a"]), H.make_node("Add", ["a", "w"], ["y"])]
    model = onnx.load(str(write(tmp_path / "net.onnx", nodes, stored, ["b", 4])))
    onnx.save_model(model, str(tmp_path / "net.onnx"), save_as_external_data=True, location="w.bin", size_threshold=0)
    assert torch.equal(load_onnx(tmp_path / "net.onnx")(torch.ones(2, 4)), 2.5 + torch.arange(4.0).expand(2, 4))
    assert load_onnx(beside(tmp_path, [4], 24, offset=8)).input_shape == (4,)
    assert load_onnx(beside(tmp_path, [4], 16), [4]).input_shape == (4,)  # sizes in any sequence
    with pytest.raises(ShapeError, match=r"input_shape: expected positive sizes .*, got 4"):  # not the file's fault
        load_onnx(beside(tmp_path, [4], 16), 4)
    for size, part in ((15, {}), (17, {}), (24, {"offset": 9}), (99, {"length": 17}), (99, {"offset": -16})):
        with pytest.raises(DataError, match="expected 16 bytes of 'w', got"):
            read_onnx(beside(tmp_path, [4], size, **part))


def test_a_large_file_beside_a_small_one_is_not_read(tmp_path):
    tracemalloc.start()
    for dims, size, words in (([4], 1 << 40, "expected 16 bytes"), ([1 << 30], 1 << 32, "at most 268435456 stored")):
        with pytest.raises(DataError, match=words):
            read_onnx(beside(tmp_path, dims, size))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 26
    path = beside(tmp_path, [4], 16)
    (tmp_path / "weights.bin").unlink()
    (tmp_path / "weights.bin").symlink_to("/etc/hostname")
    with pytest.raises(DataError, match="within the folder of the file, got 'weights"):
        read_onnx(path)
    (tmp_path / "weights.bin").unlink()
    os.mkfifo(tmp_path / "weights.bin")
    with pytest.raises(DataError, match="a pipe in place of a regular file"):
        read_onnx(path)


def test_values_have_a_budget_together(tmp_path):
    nodes = [H.make_node("Pad", ["x", "p"], ["a"]), H.make_node("Slice", ["a", "s", "e", "i"], ["y"])]
    stored = {"p": np.array([0, 0, 0, 2**26]), "s": np.array([0]), "e": np.array([4]), "i": np.array([1])}
    with pytest.raises(DataError, match="pad: expected values of at most 67108864 numbers together"):
        load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 4]))


@pytest.mark.thorough
def test_files_of_many_forms_are_read_as_the_runtime_reads_them_or_refused(tmp_path):
    verdicts = [onnx_files.check(seed, tmp_path) for seed in range(30)]
    assert 10 <= verdicts.count("read") <= 23


def test_a_name_has_one_meaning(tmp_path):
    nodes = [H.make_node("Relu", ["x"], ["w"]), H.make_node("MatMul", ["x", "w"], ["y"])]
    path = write(tmp_path / "net.onnx", nodes, {"w": np.eye(4, dtype=np.float32)}, [1, 4])
    with pytest.raises(NoRuleError, match="'w', defined already"):
        read_onnx(path)
    constant = H.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(np.ones(4, np.float32)))
    path = write(tmp_path / "net.onnx", [constant, H.make_node("Add", ["x", "w"], ["w"])], {}, [1, 4])
    with pytest.raises(NoRuleError, match="'w', defined already"):
        read_onnx(path)
    twice = [H.make_node("Dropout", ["x"], ["a", "mask"]), H.make_node("Dropout", ["a"], ["y", "mask"])]
    with pytest.raises(NoRuleError, match="'mask', defined already"):
        read_onnx(write(tmp_path / "net.onnx", twice, {}, [1, 4]))
    # Names that differ in a dot and an underscore are two tensors.
    stored = {"a.b": np.full(4, 1, np.float32), "a_b": np.full(4, 10, np.float32)}
    nodes = [H.make_node("Add", ["x", "a.b"], ["c"]), H.make_node("Add", ["c", "a_b"], ["y"])]
    net = read_onnx(write(tmp_path / "net.onnx", nodes, stored, [1, 4]))
    assert net(torch.zeros(1, 4)).tolist() == [[11.0] * 4]


def test_a_first_size_of_one_is_the_batch_of_a_file_for_one_sample(tmp_path):
    nodes, stored = [H.make_node("Reshape", ["x", "s"], ["y"])], {"s": np.array([1, -1])}
    assert analyze(read_onnx(write(tmp_path / "net.onnx", nodes, stored, [1, 2, 2])), (2, 2), restarts=0).upper == 1
    with pytest.raises(NoRuleError, match="one row per sample"):
        load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["batch", 2, 2]))


def test_formats_that_torch_cannot_read_are_refused(tmp_path):
    for kind, values in ((onnx.TensorProto.BFLOAT16, [1.0] * 4), (onnx.TensorProto.STRING, [b"a"] * 4)):
        path = write(tmp_path / "net.onnx", [H.make_node("Add", ["x", "w"], ["y"])], {}, [1, 4])
        stored = H.make_tensor("w", kind, [4], values)
        changed(path, lambda model, stored=stored: model.graph.initializer.append(stored))
        with pytest.raises(DataError, match=r"format of numpy.*'w'"):
            read_onnx(path)


def test_weights_that_are_computed_are_refused(tmp_path):
    path = write(tmp_path / "net.onnx", [H.make_node("MatMul", ["x", "x"], ["y"])], {}, [1, 4, 4])
    with pytest.raises(NoRuleError, match=r"two that depend on the input|no Lipschitz constant"):
        load_onnx(path)
    path = write(tmp_path / "net.onnx", [H.make_node("Reshape", ["x", "x"], ["y"])], {}, [1, 4])
    with pytest.raises(NoRuleError, match="stored numbers as operand 1"):
        read_onnx(path)


@pytest.mark.parametrize("sizes", [None, [1, 3, 2]])
def test_pieces_in_any_order(tmp_path, sizes):
    stored = {} if sizes is None else {"s": np.array(sizes)}
    options = {"num_outputs": 3} if sizes is None else {}  # since version 18
    nodes = [
        H.make_node("Split", ["x", *stored], ["a", "b", "c"], axis=1, **options),
        H.make_node("Concat", ["c", "a", "b"], ["y"], axis=1),
    ]
    x = torch.randn(2, 6)
    a, b, c = x.chunk(3, 1) if sizes is None else x.split(sizes, 1)
    found = load_onnx(write(tmp_path / "net.onnx", nodes, stored, [1, 6], 18))
    assert torch.equal(found(x), torch.cat([c, a, b], 1))
    assert float(lipschitz(found)) == pytest.approx(1, rel=1e-9)


MATRIX = np.arange(12, dtype=np.float32).reshape(4, 3) / 8
UPWARDS = ("Slice", ["w", "i", "j", "a", "s"], ["z"], {})
BACK = {"w": MATRIX, "i": [4, 1], "j": [-20, -9], "a": [0, 1], "s": [-2, -1]}


@pytest.mark.parametrize(
    ("rows", "stored", "expected"),
    [
        ([("Dropout", ["x"], ["d", "mask"], {}), ("Relu", ["d"], ["y"], {})], {}, lambda x: x.clip(0)),
        ([("GlobalMaxPool", ["x"], ["y"], {})], {}, lambda x: x.max(2, keepdims=True)),
        ([("MatMul", ["x", "v"], ["y"], {})], {"v": MATRIX[:, 2]}, lambda x: x @ MATRIX[:, 2]),
        ([("ReduceMax", ["x"], ["y"], {"axes": [2], "keepdims": 0})], {}, lambda x: x.max(2)),
        ([("ReduceMin", ["x"], ["y"], {"axes": [1, -1]})], {}, lambda x: x.min((1, 2), keepdims=True)),
        ([("Tile", ["x", "r"], ["y"], {})], {"r": [1, 2, 1]}, lambda x: np.tile(x, (1, 2, 1))),
        (
            [("Pad", ["x", "p", "n"], ["y"], {})],
            {"p": [0, 0, 1, 0, 2, 0], "n": np.float32(1.5)},
            lambda x: np.pad(x, ((0, 0), (0, 2), (1, 0)), constant_values=1.5),
        ),
        ([UPWARDS, ("MatMul", ["x", "z"], ["y"], {})], BACK, lambda x: x @ MATRIX[::-2, 1::-1]),
    ],
)
def test_what_exporters_write(tmp_path, numbers, rows, stored, expected):
    nodes = [H.make_node(op, given, made, **more) for op, given, made, more in rows]
    shape = [3, 2] if stored is BACK else [3, 4]
    found = load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", *shape], 13))
    x = numbers.normal(size=(5, *shape)).astype(np.float32)
    np.testing.assert_allclose(found(torch.from_numpy(x)).numpy(), expected(x), rtol=1e-5, atol=1e-6)
    matrix = {"v": MATRIX[:, 2:], "w": MATRIX[::-2, 1::-1], "r": np.ones((2, 1))}.get(next(iter(stored), ""), np.eye(1))
    assert float(lipschitz(found)) == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-6)


def test_backwards_from_before_a_tensor_is_from_its_first_number(tmp_path):
    nodes = made(("Slice", [*"wijas"], "z", {}), ("Add", ["x", "z"], "y", {}))
    stored = {"w": MATRIX, "i": [-9, 1], "j": [-20, -9], "a": [0, 1], "s": [-1, -1]}
    found = load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 2], 13))
    assert found(torch.zeros(1, 2)).tolist() == MATRIX[:1, 1::-1].tolist()


@pytest.mark.parametrize("divisor", [0, 1e-40])
def test_a_divisor_without_a_reciprocal_is_refused(tmp_path, divisor):
    stored = {"w": np.array([1, divisor], np.float32)}
    path = write(tmp_path / "net.onnx", made(("Div", ["x", "w"], "y", {})), stored, ["b", 2])
    with pytest.raises(NoRuleError, match="reciprocal"):
        load_onnx(path)


def test_a_vector_without_a_batch(tmp_path):
    stored = {"w": MATRIX, "b": MATRIX[:, 0], "v": MATRIX[:3]}
    nodes = [H.make_node("MatMul", ["w", "x"], ["a"]), H.make_node("Add", ["a", "b"], ["c"]),
             H.make_node("Relu", ["c"], ["r"]), H.make_node("MatMul", ["r", "w"], ["d"]),
             H.make_node("MatMul", ["v", "d"], ["y"])]  # fmt: skip
    found = load_onnx(write(tmp_path / "net.onnx", nodes, stored, [3]))
    x = np.array([0.5, -2, 1], np.float32)
    expected = MATRIX[:3] @ (np.maximum(MATRIX @ x + MATRIX[:, 0], 0) @ MATRIX)
    np.testing.assert_allclose(found(torch.from_numpy(x)[None])[0].numpy(), expected, rtol=1e-5)
    # Operators that need the batch, and constants that would add a dimension.
    for node in (("Pad", ["x", "p"], {}), ("Add", ["x", "w"]), ("MatMul", ["x", "t"])):
        op, given, *more = node
        more_stored = {**stored, "p": np.array([0, 1]), "t": np.ones((1, 3, 2), np.float32)}
        path = write(tmp_path / "net.onnx", [H.make_node(op, given, ["y"], **(more or [{}])[0])], more_stored, [3])
        with pytest.raises(NoRuleError, match="an input with the batch first"):
            load_onnx(path)


def run_by_onnx(path, x):
    return onnx.reference.ReferenceEvaluator(str(path)).run(None, {"x": x})[0]


WITHOUT_A_BATCH = {
    "places": ([5], [
        ("Slice", ["x", "one", "five"], "a", {}), ("Gather", ["x", "places"], "b", {"axis": -1}),
        ("Concat", ["seven", "a", "b"], "c", {"axis": 0}), ("Softmax", ["c"], "d", {"axis": 0}),
        ("Split", ["d", "halves"], "e f", {}), ("Max", ["e", "f"], "g", {}), ("ReduceSum", ["g"], "t", {"keepdims": 1}),
        ("Concat", ["g", "t"], "h", {"axis": 0}),
        ("Unsqueeze", ["h", "zero"], "y", {}),
    ]),
    "matrix": ([2, 3], [
        ("Transpose", ["x"], "a", {}), ("MatMul", ["a", "m"], "b", {}), ("Add", ["b", "v"], "c", {}),
        ("MatMul", ["m", "x"], "d", {}), ("Reshape", ["d", "flat"], "e", {}), ("Relu", ["e"], "f", {}),
        ("Flatten", ["c"], "g", {"axis": 0}), ("Reshape", ["f", "row"], "h", {}), ("Add", ["g", "h"], "y", {}),
    ]),
    "lost": ([1, 2, 3], [
        ("Reshape", ["x", "flat"], "a", {}), ("MatMul", ["a", "w"], "b", {}), ("Add", ["b", "v"], "c", {}),
        ("Squeeze", ["x", "zero"], "d", {}), ("ReduceMax", ["d"], "e", {"axes": [1], "keepdims": 0}),
        ("Gather", ["x", "first"], "f", {}), ("ReduceMin", ["f"], "g", {"axes": [-1], "keepdims": 0}),
        ("Sub", ["e", "g"], "h", {}), ("Concat", ["c", "h"], "y", {"axis": 0}),
    ]),
    "one sample": ([1, 2, 3], [
        ("Unsqueeze", ["x", "zero"], "a", {}), ("Squeeze", ["a", "second"], "b", {}), ("Sub", ["x", "b"], "c", {}),
        ("ReduceMax", ["c"], "d", {"keepdims": 1}),
        ("Flatten", ["x"], "f", {"axis": 3}), ("Add", ["f", "row_"], "g", {}), ("Flatten", ["g"], "h", {"axis": 0}),
        ("Add", ["h", "h"], "k", {}), ("Reshape", ["d", "row"], "l", {}), ("Add", ["k", "l"], "r", {}),
        ("Reshape", ["r", "flat"], "n", {}), ("Concat", ["n", "n"], "y", {"axis": 0}),
    ]),
    "scalar": ([1, 2, 3], [("ReduceMean", ["x"], "y", {"keepdims": 0})]),
    "rows": ([1, 1, 2], [
        ("Squeeze", ["x"], "a", {}), ("Gather", ["x", "first"], "b", {}), ("Gather", ["b", "zero"], "c", {}),
        ("Gather", ["c", "first"], "d", {}), ("Concat", ["a", "d"], "y", {"axis": 0}),
    ]),
    "products of vectors": ([2], [("MatMul", ["v", "x"], "a", {}), ("MatMul", ["x", "v"], "b", {}),
                                  ("Sub", ["a", "two"], "c", {}), ("Max", ["c", "b"], "y", {})]),
    "last time step": ([1, 3, 2], [
        ("Transpose", ["x"], "a", {"perm": [1, 0, 2]}), ("Gather", ["a", "second"], "b", {}),
        ("Transpose", ["b"], "y", {"perm": [1, 0, 2]}),
    ]),
    "parallel": ([4, 3], [("Reshape", ["x", "last"], "a", {}), ("Gather", ["a", "first"], "y", {"axis": 1})]),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_A_BATCH)
def test_values_without_a_batch(tmp_path, name, numbers):
    shape, rows = WITHOUT_A_BATCH[name]
    stored = {
        "one": [1], "five": [5], "zero": [0], "halves": [4, 4], "flat": [-1], "row": [1, -1], "first": 0, "second": [1],
        "two": np.float32(2),
        "row_": np.float32([[7]]),
        "places": [4, 0, 0], "seven": np.float32([7]), "last": [-1, 4, 3],
        "m": numbers.normal(size=(2, 2)).astype(np.float32), "w": numbers.normal(size=(6, 2)).astype(np.float32),
        "v": numbers.normal(size=2).astype(np.float32),
    }  # fmt: skip
    nodes = [H.make_node(op, given, out.split(), **more) for op, given, out, more in rows]
    path = write(tmp_path / "net.onnx", nodes, {k: np.asarray(v) for k, v in stored.items()}, shape)
    found = load_onnx(path)
    assert found.input_shape == tuple(shape[shape[0] == 1 :])
    x = numbers.normal(size=(3, *found.input_shape)).astype(np.float32)
    for one, y in zip(x, found(torch.from_numpy(x)).numpy(), strict=True):
        expected = run_by_onnx(path, one.reshape(shape))
        np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [("Gather", "i"), ("Squeeze", "last"), ("Reshape", "row")])
def test_another_dimension_in_front_of_the_batch_is_not_the_batch(tmp_path, more):
    """Of x.T, sizes (3, 1) in the file, Gather takes one number: in the network the first dimension has three."""
    nodes = [H.make_node("Transpose", ["x"], ["a"]), H.make_node(more[0], ["a", more[1]], ["b"]),
             H.make_node("Transpose", ["b"], ["y"])]  # fmt: skip
    stored = {"i": np.array([0]), "last": np.array([1]), "row": np.array([1, 3])}
    path = write(tmp_path / "net.onnx", nodes, stored, [1, 3])
    assert run_by_onnx(path, np.ones((1, 3), np.float32)).size == (1 if more[0] == "Gather" else 3)
    with pytest.raises(NoRuleError, match=r"a value with the batch first, got sizes \[3, batch\]"):
        load_onnx(path)


def test_a_number_of_each_sample_becomes_a_row(tmp_path):
    x = torch.randn(4, 3)
    for shape in ([1, 3], ["n", 3]):
        nodes = made(("Gather", ["x", "i"], "a", {"axis": 1}), ("Flatten", ["a"], "y", {"axis": 1}))
        assert torch.equal(load_onnx(write(tmp_path / "net.onnx", nodes, {"i": np.array(1)}, shape))(x), x[:, 1:2])


def test_entries_of_a_dimension_in_front_of_the_batch(tmp_path):
    nodes = made(("Transpose", ["x"], "a", {"perm": [1, 0, 2]}), ("Gather", ["a", "i"], "y", {}))
    path, x = write(tmp_path / "net.onnx", nodes, {"i": np.array(-1)}, ["n", 3, 2]), torch.randn(4, 3, 2)
    assert torch.equal(load_onnx(path)(x), x[:, -1])
    nodes[1].attribute.append(H.make_attribute("axis", 1))
    with pytest.raises(NoRuleError, match="entries of another axis than the batch, got 1"):
        load_onnx(write(path, nodes, {"i": np.array(0)}, ["n", 3, 2]))


def test_a_first_size_that_is_no_batch(tmp_path):
    path = write(tmp_path / "net.onnx", [H.make_node("Transpose", ["x"], ["y"])], {}, [2, 3])
    x = torch.randn(4, 2, 3)
    assert torch.equal(load_onnx(path)(x), x.mT)
    path = write(tmp_path / "net.onnx", [H.make_node("Relu", ["x"], ["y"])], {}, [2, 3])
    assert load_onnx(path).input_shape == (3,)
    assert load_onnx(path, (2, 3)).input_shape == (2, 3)
    path = write(path, [H.make_node("Add", ["x", "w"], ["y"])], {"w": np.ones((5, 2, 3), np.float32)}, [2, 3])
    with pytest.raises(NoRuleError, match="the first size of the input, 2, is taken for the batch"):
        load_onnx(path)
    path = write(path, [H.make_node("Relu", ["x"], ["y"])], {}, [1, 3])
    with pytest.raises(ShapeError, match=r"input_shape of one sample, \[3\], got \(1, 3\)"):
        load_onnx(path, (1, 3))


@pytest.mark.thorough
def test_swish_as_older_files_write_it(tmp_path):
    nodes = [H.make_node("Sigmoid", ["x"], ["s"]), H.make_node("Mul", ["s", "x"], ["y"])]
    found = load_onnx(write(tmp_path / "net.onnx", nodes, {}, [1, 4]))
    x = torch.randn(3, 4)
    assert torch.allclose(found(x), F.silu(x))
    assert float(lipschitz(found)) == pytest.approx(1.09984, abs=1e-4)
    # Something else may read the gate too; a gate of another value is a product.
    nodes = [H.make_node("Sigmoid", ["x"], ["s"]), H.make_node("Mul", ["s", "x"], ["p"])]
    found = load_onnx(write(tmp_path / "net.onnx", [*nodes, H.make_node("Add", ["p", "s"], ["y"])], {}, [1, 4]))
    assert torch.allclose(found(x), F.silu(x) + x.sigmoid())
    with pytest.raises(NoRuleError, match="no Lipschitz constant"):
        load_onnx(write(tmp_path / "net.onnx", [*nodes, H.make_node("Mul", ["p", "s"], ["y"])], {}, [1, 4]))


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"\x00no onnx")
    with pytest.raises(DataError, match="not an ONNX file"):
        read_onnx(tmp_path / "net.onnx")
    with pytest.raises(DataError, match="expected an ONNX file"):
        read_onnx(tmp_path / "none.onnx")


def raw(dims, data=b"", kind=1, location=None):
    tensor = onnx.TensorProto(name="w", dims=dims, data_type=kind)
    if location is None:
        tensor.raw_data = data
    else:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
    return tensor


ADD, ROW, IMAGE = [("Add", ["x", "w"], {})], [1, 4], [1, 1, 4, 4]
ONE = np.ones((2, 1, 3, 3), np.float32)
FORGED = {
    "numbers that are not there": (ADD, raw([10**6, 10**6, 10**6]), ROW, "at most 268435456 stored"),
    "sizes beyond all numbers": (ADD, raw([2**62, 4]), ROW, "at most 268435456 stored"),
    "fewer numbers": (ADD, raw([4], bytes(12)), ROW, "cannot reshape"),
    "part of a number": (ADD, raw([4], bytes(7)), ROW, "multiple of element size"),
    "unknown format": (ADD, raw([4], bytes(16), 99), ROW, "99"),
    "no format": (ADD, raw([4], bytes(16), 0), ROW, "UNDEFINED"),
    "complex": (ADD, raw([4], bytes(32), 14), ROW, "input's format torch.float32, got .*complex64"),
    "another shape": (ADD, np.ones(3, np.float32), ROW, "Add: expected what its rule covers"),
    "weights elsewhere": (ADD, raw([4], location="none.bin"), ROW, "with its weights, got no .*none.bin"),
    "weights of the system": (ADD, raw([4], location="/etc/hostname"), ROW, "within the folder"),
    "weights above": (ADD, raw([4], location="../../../../etc/hostname"), ROW, "within the folder"),
    "weights of a device": (ADD, raw([4], location="/dev/zero"), ROW, "within the folder"),
    "cycle": ([("Add", ["x", "b"], {}, "a"), ("Relu", ["a"], {}, "b"), ("Relu", ["b"], {})], None, ROW, "a circle of"),
    "value of itself": ([("Add", ["x", "y"], {})], None, ROW, "a circle of"),
    "no result": ([("Relu", ["x"], {}, "z")], None, ROW, "'y', which none does"),
    "no operands": ([("Relu", [], {})], None, ROW, "well-formed"),
    "no operands of Identity": ([("Identity", [], {})], None, ROW, "well-formed"),
    "no operands of Erf": ([("Erf", [], {})], None, ROW, "well-formed"),
    "no name": ([("Relu", [""], {})], None, ROW, "well-formed"),
    "unknown operator": ([("Tan", ["x"], {})], None, ROW, "the operators Tan: nothing"),
    "number for a tensor": ([("Constant", [], {"value": 3.0}, "w"), *ADD], None, ROW, "well-formed"),
    "no groups": ([("Conv", ["x", "w"], {"group": 0})], ONE, IMAGE, "groups must be a positive integer"),
    "many groups": ([("Conv", ["x", "w"], {"group": 2**40})], ONE, IMAGE, "divisible by groups"),
    "three paddings": ([("Conv", ["x", "w"], {"pads": [1] * 3})], ONE, IMAGE, "two paddings of each axis"),
    "one dilation": ([("Conv", ["x", "w"], {"dilations": [1]})], ONE, IMAGE, "a dilation"),
    "another kernel": ([("Conv", ["x", "w"], {"kernel_shape": [1, 1]})], ONE, IMAGE, r"kernel_shape \[1, 1\]"),
    "transposed": ([("ConvTranspose", ["x", "w"], {"kernel_shape": [1, 1]})], ONE, IMAGE, "kernel_shape"),
    "image of everything": ([("Conv", ["x", "w"], {"pads": [2**20] * 4})], ONE, IMAGE, "at most 67108864 numbers"),
    "vector for a matrix": ([("Gemm", ["x", "w"], {})], np.ones(4, np.float32), ROW, "Gemm: expected what its"),
    "bias of another length": (
        [("Gemm", ["x", "w", "w"], {})], np.ones((4, 4), np.float32), ROW, "Gemm: expected what its rule covers"
    ),
    "text for a number": ([("LeakyRelu", ["x"], {"alpha": "abc"})], None, ROW, "well-formed"),
    "bytes that are no text": ([("Gelu", ["x"], {"approximate": b"\xff\xfe"})], None, ROW, "No Op registered for Gelu"),
    "no order": ([("Transpose", ["x"], {"perm": [0, 9]})], None, ROW, "Dimension out of range"),
    "shape of real numbers": ([("Reshape", ["x", "w"], {})], np.ones(2, np.float32), ROW, "got float"),
    "huge shape": ([("Reshape", ["x", "w"], {})], np.array([0, 2**40]), ROW, r"shape .\[batch, \d+\]. is invalid"),
    "huge padding": ([("Pad", ["x", "w"], {})], np.array([0, 0, 0, 2**40]), ROW, "at most 67108864 numbers together"),
    "doubled forty times": (
        [("Concat", [f"v{i}" if i else "x"] * 2, {"axis": 1}, f"v{i + 1}" if i < 39 else "y") for i in range(40)],
        None, ROW, "at most 67108864 numbers together",
    ),
    "huge input": ([("Relu", ["x"], {})], None, [1, 10**5, 10**6], "at most 67108864 numbers together"),
    "input beyond all numbers": ([("Relu", ["x"], {})], None, [1, 2**40, 2**40], "does not accept|numbers|overflow"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_forged_files_are_refused_before_memory_is_taken(tmp_path, name):
    rows, weight, shape, message = FORGED[name]
    nodes = [H.make_node(op, given, result or ["y"], **named) for op, given, named, *result in rows]
    path = write(tmp_path / "net.onnx", nodes, {}, shape)
    if weight is not None:
        tensor = weight if isinstance(weight, onnx.TensorProto) else onnx.numpy_helper.from_array(weight, "w")
        model = onnx.load(str(path))
        model.graph.initializer.append(tensor)
        path.write_bytes(model.SerializeToString())
    with pytest.raises((DataError, NoRuleError, ShapeError), match=message):
        load_onnx(path)


def test_weights_of_one_name_are_refused(tmp_path):
    path = write(tmp_path / "net.onnx", [H.make_node("Add", ["x", "w"], ["y"])], {"w": np.ones(4, np.float32)}, [1, 4])
    with pytest.raises(NoRuleError, match=r"\['w'\], defined twice"):
        read_onnx(changed(path, lambda model: model.graph.initializer.append(model.graph.initializer[0])))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, number):
    for nodes in ([H.make_node("MatMul", ["x", "w"], ["y"])], [H.make_node("Add", ["x", "w"], ["y"])]):
        stored = {"w": np.diag(np.full(4, number, np.float32))}
        path = write(tmp_path / "net.onnx", nodes, stored, [1, 4] if nodes[0].op_type == "MatMul" else [1, 4, 4])
        with pytest.raises(DataError, match="expected finite numbers in the file, got infinite ones or NaN in"):
            load_onnx(path)


@pytest.mark.thorough
def test_damaged_files_raise_errors_of_ours(tmp_path, numbers):
    stored = {"w": ONE, "g": np.ones((3, 32), np.float32)}
    nodes = [
        H.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        H.make_node("Relu", ["a"], ["r"]),
        H.make_node("Add", ["a", "r"], ["s"]),
        H.make_node("Flatten", ["s"], ["f"]),
        H.make_node("Gemm", ["f", "g"], ["y"], transB=1),
    ]
    path = write(tmp_path / "net.onnx", nodes, stored, IMAGE)
    whole, refused = path.read_bytes(), 0
    for i in range(120):
        damaged = bytearray(whole[: numbers.integers(len(whole))] if i < 30 else whole)
        for _ in range(numbers.integers(1, 4) if damaged and i >= 30 else 0):
            damaged[numbers.integers(len(damaged))] = numbers.integers(256)
        path.write_bytes(damaged)
        try:
            read_onnx(path)
        except LipkitError:
            refused += 1
    assert 40 <= refused < 120


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
def test_images_are_enlarged_as_they_are_stretched(tmp_path, policy):
    nodes = [H.make_node("Resize", ["x", "", "s"], ["y"], mode="nearest", coordinate_transformation_mode="asymmetric",
                         nearest_mode="floor", keep_aspect_ratio_policy=policy)]  # fmt: skip
    path = write(tmp_path / "net.onnx", nodes, {"s": np.array([1, 1, 2, 2], np.float32)}, ["batch", 2, 3, 4], 18)
    if policy != "stretch":
        with pytest.raises(NoRuleError, match="Resize: expected images enlarged"):
            read_onnx(path)
        return
    x = torch.randn(2, 2, 3, 4)
    torch.testing.assert_close(read_onnx(path)(x), F.interpolate(x, scale_factor=2))


def test_letters_of_the_batch_are_not_summed(tmp_path):
    stored = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    path = tmp_path / "net.onnx"
    net = load_onnx(
        write(path, made(("Einsum", ["x", "w"], "y", {"equation": "bni,ij->bjn"})), stored, ["batch", 2, 3])
    )
    x = torch.randn(5, 2, 3)
    torch.testing.assert_close(net(x), (x @ torch.from_numpy(stored["w"])).mT)
    norm = np.linalg.norm(stored["w"].astype(np.float64), 2)
    assert norm <= float(lipschitz(net)) <= norm * (1 + 1e-6)
    for equation in ("bni,cni->bc", "bni,bni->ni", "bni,cmi->cmn"):
        write(path, made(("Einsum", ["x", "x"], "y", {"equation": equation})), {}, ["batch", 2, 3])
        with pytest.raises((NoRuleError, ShapeError)):
            load_onnx(path)


@pytest.mark.thorough
def test_pixels_copied_around_images_become_the_padding_of_a_convolution(tmp_path):
    torch.manual_seed(0)
    strided = {"padding": 1, "stride": 2, "groups": 2}
    convs = [
        torch.nn.Conv2d(2, 4, 3, padding_mode="circular", padding=1),
        torch.nn.Conv2d(4, 4, 2, padding_mode="reflect", padding="same"),
        torch.nn.Conv2d(4, 4, 3, padding_mode="replicate", **strided),
        torch.nn.Conv2d(4, 4, 2, padding_mode="circular", padding="same"),
        torch.nn.Conv2d(4, 4, 3, padding_mode="reflect", **strided),
    ]
    net = torch.nn.Sequential(*(part for conv in convs for part in (conv, torch.nn.ReLU())))
    net.requires_grad_(False)
    back = read_onnx(without_claim(write_onnx(export(net.eval(), (2, 8, 8)), tmp_path / "net.onnx")))
    x = torch.randn(3, 2, 8, 8)
    torch.testing.assert_close(back(x), net(x))
    assert float(lipschitz(back, (2, 8, 8))) == pytest.approx(float(lipschitz(net, (2, 8, 8))), rel=1e-9)
    assert [type(m) for m in export(back, (2, 8, 8))] == 5 * [torch.nn.Conv2d, torch.nn.ReLU]


@pytest.mark.parametrize("mode", ["wrap", "reflect", "edge"])
@pytest.mark.parametrize(
    ("pads", "conv"),
    [([0, 0, 1, 0, 0, 0, 0, 2], {}), ([0, 0, 1, 1, 0, 0, 1, 1], {"pads": [1] * 4}), ([0, 1, 0, 0, 0, 1, 0, 0], {})],
)
def test_other_copies_of_pixels_are_pieces_beside_each_other(tmp_path, mode, pads, conv, numbers):
    nodes = [H.make_node("Pad", ["x", "p"], ["a"], mode=mode), H.make_node("Conv", ["a", "w"], ["y"], **conv)]
    channels = 2 + pads[1] + pads[5]
    stored = {"p": np.array(pads), "w": numbers.normal(size=(1, channels, 2, 2)).astype(np.float32)}
    net = load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["batch", 2, 6, 6], 19))
    x = numbers.normal(size=(3, 2, 6, 6))
    padded = np.pad(x, list(zip(pads[:4], pads[4:], strict=True)), mode)
    expected = F.conv2d(torch.from_numpy(padded).float(), torch.from_numpy(stored["w"]), padding=1 if conv else 0)
    torch.testing.assert_close(net(torch.from_numpy(x).float()), expected)


def test_copied_pixels_that_something_else_reads_are_kept(tmp_path):
    nodes = [
        H.make_node("Pad", ["x", "p"], ["a"], mode="edge"),
        H.make_node("Conv", ["a", "w"], ["b"]),
        H.make_node("Conv", ["a", "w"], ["c"]),
        H.make_node("Add", ["b", "c"], ["d"]),
        H.make_node("MaxPool", ["a"], ["e"], kernel_shape=[2, 2], strides=[1, 1]),
        H.make_node("Add", ["d", "e"], ["y"]),
    ]
    stored = {"p": np.array([0, 0, 0, 0, 0, 0, 1, 1]), "w": np.ones((1, 1, 2, 2), np.float32)}
    net = read_onnx(write(tmp_path / "net.onnx", nodes, stored, ["batch", 1, 4, 4]))
    x = torch.randn(2, 1, 4, 4)
    around = F.pad(x, (0, 1, 0, 1), mode="replicate")
    torch.testing.assert_close(net(x), 2 * F.conv2d(around, torch.ones(1, 1, 2, 2)) + F.max_pool2d(around, 2, 1))


def made(*rows):
    return [H.make_node(op, given, [out], **more) for op, given, out, more in rows]


FACTOR = [("Cast", ["n"], "f", {"to": 1}), ("Mul", ["x", "f"], "y", {})]
TURNED = ("Transpose", ["x"], "t", {"perm": [1, 0]})
FIRST, SECOND = ("Gather", ["s", "i0"], "n", {"axis": 0}), ("Gather", ["s", "i1"], "n", {"axis": 0})
STORED = {"i0": np.array(0), "i1": np.array(1), "l0": np.array([0]), "l1": np.array([1]), "l5": np.array([5]),
          "all": np.array([-1])}  # fmt: skip


@pytest.mark.parametrize(
    "nodes",
    [
        made(("Shape", ["x"], "s", {}), FIRST, *FACTOR),
        made(("Shape", ["x"], "s", {}), ("Gather", ["s", "i0"], "m", {}), ("Min", ["m", "i1"], "n", {}), *FACTOR),
        made(("Reshape", ["x", "all"], "a", {}), ("Shape", ["a"], "s", {}), FIRST, *FACTOR),
        made(TURNED, ("Slice", ["t", "l0", "l5", "l1"], "a", {}), ("Shape", ["a"], "s", {}), SECOND, *FACTOR),
        made(TURNED, ("MatMul", ["x", "t"], "a", {}), ("Slice", ["a", "l0", "l5", "l1"], "b", {}),
             ("Shape", ["b"], "s", {}), SECOND, *FACTOR),
        # The sum of as many copies as there are samples.
        made(("Shape", ["x"], "s", {}), ("Slice", ["s", "l0", "l1", "l0"], "n", {}),
             ("Concat", ["n", "l1", "l1"], "to", {"axis": 0}), ("Unsqueeze", ["x", "l0"], "a", {}),
             ("Expand", ["a", "to"], "b", {}), ("ReduceSum", ["b", "l0"], "y", {"keepdims": 0})),
    ],
)  # fmt: skip
def test_numbers_made_from_the_size_of_the_batch_are_refused(tmp_path, nodes):
    path = write(tmp_path / "net.onnx", nodes, STORED, ["b", 4])
    for read in (load_onnx, lambda path: analyze(read_onnx(path), (4,), restarts=0)):
        with pytest.raises(NoRuleError, match=r"batch|made from that"):
            read(path)


def test_values_for_pairs_of_samples_are_no_matter_of_memory(tmp_path):
    """As where attention was written for one sample, and its tokens lie beside those of other samples."""
    nodes = made(("Reshape", ["x", "rows"], "a", {}), ("Transpose", ["a"], "t", {}), ("MatMul", ["a", "t"], "y", {}))
    path = write(tmp_path / "net.onnx", nodes, {"rows": np.array([-1, 3])}, ["b", 9, 3])
    with pytest.raises(NoRuleError, match="samples apart from each other, got values of several together"):
        load_onnx(path)


def test_a_sum_of_samples_beside_them_is_no_matter_of_memory(tmp_path):
    nodes = made(("ReduceSum", ["x", "i"], "a", {}), ("Concat", ["x", "a"], "y", {"axis": 0}))
    with pytest.raises(NoRuleError, match="samples apart from each other, got values of several together"):
        load_onnx(write(tmp_path / "net.onnx", nodes, {"i": np.array([0])}, ["b", 9]))


def test_other_sizes_are_numbers(tmp_path):
    nodes = made(("Shape", ["x"], "s", {}), SECOND, *FACTOR)
    x = torch.randn(3, 4)
    assert torch.equal(load_onnx(write(tmp_path / "net.onnx", nodes[::-1], STORED, ["b", 4]))(x), 4 * x)


def test_operators_without_rules_are_named_all_at_once(tmp_path):
    kinds = ("Tan", "ArgMax", "Relu", "NonZero", "Less", "Acos")
    nodes = [H.make_node(kind, [f"v{i}" if i else "x"] * (2 if kind == "Less" else 1), [f"v{i + 1}"])
             for i, kind in enumerate(kinds)]  # fmt: skip
    with pytest.raises(NoRuleError, match="the operators Acos, ArgMax, Less, NonZero, Tan: nothing is assumed"):
        read_onnx(
            changed(
                write(tmp_path / "net.onnx", nodes, {}, ["b", 4]), lambda m: setattr(m.graph.output[0], "name", "v6")
            )
        )


@pytest.mark.parametrize("axis", [None, 0, -1])
def test_whole_numbers_with_scales_are_weights(tmp_path, numbers, axis):
    whole = numbers.integers(-128, 128, (4, 3)).astype(np.int8)
    scale = np.float32(0.03) if axis is None else numbers.uniform(0.01, 0.1, whole.shape[axis]).astype(np.float32)
    zero = numbers.integers(-9, 9, scale.shape).astype(np.int8)
    nodes = [
        H.make_node("DequantizeLinear", ["w", "s", "z"], ["m"], **({} if axis is None else {"axis": axis})),
        H.make_node("DequantizeLinear", ["b", "t"], ["c"], **({} if axis is None else {"axis": 0})),
        H.make_node("MatMul", ["x", "m"], ["h"]),
        H.make_node("Add", ["h", "c"], ["y"]),
    ]
    stored = {"w": whole, "s": scale, "z": zero, "b": np.array([90, -7, 100000], np.int32), "t": np.float32(0.02)}
    path = write(tmp_path / "net.onnx", nodes, stored, ["n", 4], opset=21)
    x = numbers.normal(size=(5, 4)).astype(np.float32)
    found = load_onnx(path)
    np.testing.assert_allclose(found(torch.from_numpy(x)).numpy(), run_by_onnx(path, x), rtol=1e-5, atol=1e-5)
    exact = whole.astype(np.float64) - zero if axis != 0 else whole - zero[:, None].astype(np.float64)
    exact = exact * (scale[:, None] if axis == 0 else scale)
    assert float(lipschitz(found)) == pytest.approx(np.linalg.norm(exact, 2), rel=1e-6)


def test_rounding_to_whole_numbers_is_refused_with_its_reason(tmp_path):
    stored = {"s": np.float32(0.1), "z": np.int8(0)}
    nodes = [H.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
             H.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])]  # fmt: skip
    words = "the operators DequantizeLinear, QuantizeLinear: .*rounding to whole numbers jumps where the input moves"
    with pytest.raises(NoRuleError, match=words):
        load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["n", 4]))


def test_masks_are_conditions_or_minus_infinity(tmp_path, numbers):
    hidden = np.array([[0, 1, 0], [1, 0, 1], [0, 0, 0]], bool)
    stored = {
        "k": hidden, "i": np.float32(-np.inf), "m": np.where(hidden.T, np.float32(-np.inf), np.float32(0.5)),
        "w": numbers.normal(size=(3, 3)).astype(np.float32),
    }  # fmt: skip
    nodes = [
        H.make_node("Where", ["k", "w", "x"], ["a"]),
        H.make_node("Where", ["k", "i", "a"], ["b"]),
        H.make_node("Softmax", ["b"], ["c"]),
        H.make_node("Add", ["c", "m"], ["d"]),
        H.make_node("Softmax", ["d"], ["y"]),
    ]
    path = write(tmp_path / "net.onnx", nodes, stored, ["n", 3, 3])
    x = numbers.normal(size=(5, 3, 3)).astype(np.float32)
    found = load_onnx(path)
    np.testing.assert_allclose(found(torch.from_numpy(x)).numpy(), run_by_onnx(path, x), atol=1e-6)
    assert 0.1 < float(lipschitz(found)) <= 1
    path = write(tmp_path / "open.onnx", [H.make_node("Where", ["k", "i", "x"], ["y"])], stored, ["n", 3, 3])
    with pytest.raises(NoRuleError, match="expected finite numbers"):
        load_onnx(path)
    path = write(
        tmp_path / "moved.onnx",
        [H.make_node("Cast", ["x"], ["t"], to=9), H.make_node("Where", ["t", "w", "x"], ["y"])],
        stored,
        ["n", 3, 3],
    )
    with pytest.raises(NoRuleError, match="Cast: expected the format"):
        load_onnx(path)


def test_minus_infinity_is_no_factor(tmp_path):
    path = write(tmp_path / "net.onnx", [H.make_node("Mul", ["x", "w"], ["y"])], {"w": np.float32(-np.inf)}, ["n", 3])
    with pytest.raises(DataError, match="expected -inf in masks alone"):
        load_onnx(path)


def test_a_log_softmax_is_left_to_the_loss(tmp_path):
    path = write(tmp_path / "net.onnx", made(("LogSoftmax", ["x"], "y", {"axis": 1})), {}, ["b", 4])
    with pytest.raises(NoRuleError, match="changes no class and no radius: leave it to the loss"):
        load_onnx(path)


def test_sizes_of_what_has_no_rule_are_no_reason(tmp_path):
    nodes = made(("Tan", ["x"], "a", {}), ("Shape", ["a"], "s", {}), ("Equal", ["s", "all"], "e", {}),
                 ("Where", ["e", "l1", "s"], "t", {}), ("Expand", ["a", "t"], "y", {}))  # fmt: skip
    with pytest.raises(NoRuleError, match="the operators Tan: nothing"):
        read_onnx(write(tmp_path / "net.onnx", nodes, STORED, ["b", 4]))


@pytest.mark.parametrize("first", [True, False])
def test_a_row_for_each_sample(tmp_path, first, numbers):
    token = numbers.normal(size=(1, 1, 3)).astype(np.float32)
    size = [
        ("Shape", ["x"], "s", {}),
        ("Gather", ["s", "l0"], "n", {"axis": 0}),
        ("Concat", ["n", "m"], "to", {"axis": 0}),
    ]
    nodes = made(*size, ("Expand", ["token", "to"], "row", {}),
                 ("Concat", ["row", "x"] if first else ["x", "row"], "y", {"axis": 1}))  # fmt: skip
    stored = {**STORED, "m": np.array([1, 3]), "token": token}
    x, row = torch.randn(5, 2, 3), torch.from_numpy(token).expand(5, 1, 3)
    found = load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 2, 3]))
    assert torch.equal(found(x), torch.cat([row, x] if first else [x, row], 1))
    assert float(lipschitz(found)) == pytest.approx(1)


@pytest.mark.thorough
def test_arithmetic_with_a_row_for_each_sample(tmp_path):
    row = made(
        ("Shape", ["x"], "s", {}), ("Slice", ["s", "l0", "l1", "l0"], "n", {}),
        ("Concat", ["n", "four"], "to", {"axis": 0}), ("Expand", ["one", "to"], "r", {}),
        ("Mul", ["r", "half"], "h", {}), ("Add", ["h", "k"], "e", {}),
    )  # fmt: skip
    stored = {**STORED, "four": np.array([4]), "one": np.float32([[1]]), "half": np.float32(0.5)}
    stored["k"] = np.arange(4, dtype=np.float32)
    used = made(("Add", ["x", "e"], "z", {}), ("Concat", ["z", "e"], "y", {"axis": 1}))
    found = load_onnx(write(tmp_path / "net.onnx", [*row, *used], stored, ["b", 4]))
    x, e = torch.randn(5, 4), torch.arange(4) + 0.5
    assert torch.equal(found(x), torch.cat([x + e, e.expand(5, 4)], 1))
    assert float(lipschitz(found)) == pytest.approx(1)
    # Their sum counts the samples, and their products with each other hold as many numbers as there are pairs.
    count = made(("ReduceSum", ["e", "l0"], "c", {"keepdims": 0}), ("Add", ["x", "c"], "y", {}))
    pairs = made(("Transpose", ["e"], "t", {}), ("MatMul", ["e", "t"], "p", {}), ("MatMul", ["p", "x"], "y", {}))
    for nodes in (count, pairs):
        with pytest.raises(NoRuleError, match="size of the batch"):
            load_onnx(write(tmp_path / "net.onnx", [*row, *nodes], stored, ["b", 4]))


def test_values_of_stored_numbers_have_a_budget(tmp_path):
    column, row = np.zeros((2**14, 1), np.float32), np.zeros((1, 2**14), np.float32)
    nodes = made(("Add", ["c", "r"], "w", {}), ("MatMul", ["x", "w"], "y", {}))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"at most 671\d{5} numbers together"):
        read_onnx(write(tmp_path / "net.onnx", nodes, {"c": column, "r": row}, ["b", 2**14]))
    filled = made(("ConstantOfShape", ["n"], "c", {}), ("Add", ["x", "c"], "y", {}))
    with pytest.raises(DataError, match="at most 67108866 numbers together"):
        read_onnx(write(tmp_path / "net.onnx", filled, {"n": np.array([1, 2**40])}, ["b", 4], 9))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 26


def test_large_weights_are_no_values(tmp_path, monkeypatch, numbers):
    monkeypatch.setattr(reading, "VALUES", 600)
    stored = {
        "w": numbers.normal(size=(30, 20)).astype(np.float32),
        "k": numbers.normal(size=(20, 20)).astype(np.float32),
    }
    nodes = made(
        ("Gemm", ["x", "w"], "a", {}), ("Transpose", ["k"], "t", {"perm": [1, 0]}), ("MatMul", ["a", "t"], "y", {})
    )
    x = numbers.normal(size=(3, 30)).astype(np.float32)
    found = load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 30]))
    np.testing.assert_allclose(found(torch.from_numpy(x)).numpy(), x @ stored["w"] @ stored["k"].T, rtol=1e-4)
    nodes[2:2] = made(("Add", ["t", "t"], "u", {}), ("Add", ["u", "u"], "v", {}), ("Add", ["v", "v"], "z", {}))
    nodes[-1].input[1] = "z"
    with pytest.raises(DataError, match="at most 1600 numbers together"):
        load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 30]))


@pytest.mark.parametrize("training", [False, True])
def test_version_6(tmp_path, numbers, training):
    make = lambda *shape: numbers.normal(size=shape).astype(np.float32)  # noqa: E731
    stored = {"c": make(3), "m": make(4, 5), "one": make(1), "slope": np.abs(make(3)), "w": make(60, 2), "b": make(2),
              "shape": np.array([0, -1]), "s": make(3), "v": np.abs(make(3)) + 1}  # fmt: skip
    mode = {"is_test": int(not training)}
    nodes = made(
        ("Add", ["x", "c"], "a", {"broadcast": 1, "axis": 1}), ("Mul", ["a", "m"], "d", {"broadcast": 1}),
        ("Sub", ["d", "m"], "e", {"broadcast": 1, "axis": -2}), ("Div", ["e", "one"], "f", {"broadcast": 1}),
        ("PRelu", ["f", "slope"], "g", {}), ("Dropout", ["g"], "h", mode),
        ("BatchNormalization", ["h", "s", "c", "c", "v"], "i", {"is_test": 1}),
        ("Reshape", ["i", "shape"], "j", {}), ("Gemm", ["j", "w", "b"], "y", {"broadcast": 1}),
    )  # fmt: skip
    path = write(tmp_path / "net.onnx", nodes, stored, ["n", 3, 4, 5], 6)
    if training:
        with pytest.raises(NoRuleError, match="Dropout"):
            load_onnx(path)
        nodes[5] = H.make_node("Dropout", ["g"], ["h"], is_test=1)
        nodes[6].ClearField("attribute")
        with pytest.raises(NoRuleError, match="training_mode 0"):
            load_onnx(write(path, nodes, stored, ["n", 3, 4, 5], 6))
        return
    x, channels = make(2, 3, 4, 5), (slice(None), None, None)
    y = ((x + stored["c"][channels]) * stored["m"] - stored["m"]) / stored["one"]
    y = np.maximum(y, 0) + stored["slope"][channels] * np.minimum(y, 0)
    y = (y - stored["c"][channels]) / np.sqrt(stored["v"][channels] + 1e-5) * stored["s"][channels] + stored["c"][
        channels
    ]
    expected = y.reshape(2, -1) @ stored["w"] + stored["b"]
    np.testing.assert_allclose(load_onnx(path)(torch.from_numpy(x)).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_refusals_that_say_what_to_do(tmp_path):
    pointer = tmp_path / "pointer.onnx"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(DataError, match="git lfs pull"):
        load_onnx(pointer)
    path = write(tmp_path / "net.onnx", made(("Relu", ["x"], "y", {}), ("Relu", ["y"], "z", {})), {}, ["b", 3])
    more = H.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)
    with pytest.raises(DataError, match=r"got \['x'\] and \['y', 'z'\]: onnx.utils.extract_model"):
        load_onnx(changed(path, lambda model: model.graph.output.append(more)))
    path = write(path, [H.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml")], {}, ["b", 3])
    changed(path, lambda model: model.opset_import[0].CopyFrom(H.make_opsetid("ai.onnx.ml", 1)))
    with pytest.raises(NoRuleError, match=r"the operators ai.onnx.ml.Scaler: nothing"):
        load_onnx(path)


def test_a_product_of_stored_vectors_is_evaluated(tmp_path, numbers):
    stored = {"v": numbers.normal(size=4).astype(np.float32), "w": numbers.normal(size=(4, 4)).astype(np.float32)}
    nodes = made(("MatMul", ["v", "w"], "c", {}), ("Add", ["x", "c"], "y", {}))
    network = load_onnx(write(tmp_path / "net.onnx", nodes, stored, ["b", 4]))
    x = torch.randn(3, 4)
    np.testing.assert_allclose(network(x), x.numpy() + stored["v"] @ stored["w"], rtol=1e-5, atol=1e-5)


def test_a_size_of_the_batch_behind_a_first_size_of_one(tmp_path):
    """As `x.view(1, *x.shape)` is written for one sample: both sizes are 1."""
    nodes = made(
        ("Shape", ["x"], "s", {}), ("Concat", ["one", "s"], "to", {"axis": 0}), ("Reshape", ["x", "to"], "a", {}),
        ("Flatten", ["a"], "b", {}), ("Gemm", ["b", "w"], "y", {}),
    )  # fmt: skip
    stored = {"one": np.array([1]), "w": np.diag(np.arange(1, 7, dtype=np.float32))}
    path = write(tmp_path / "net.onnx", nodes, stored, [1, 2, 3])
    x = torch.randn(4, 2, 3)
    torch.testing.assert_close(load_onnx(path)(x), x.flatten(1) * torch.arange(1.0, 7.0))


@pytest.mark.parametrize("kind", ["ReduceL1", "ReduceL2", "ReduceSumSquare"])
@pytest.mark.parametrize("keep", [0, 1])
def test_norms(tmp_path, kind, keep):
    x = torch.rand(4, 2, 5) - 0.3
    row = (kind, ["x"], "y", {"axes": [1], "keepdims": keep})
    network = load_onnx(write(tmp_path / "net.onnx", made(row), {}, ["b", 2, 5]), box=(-1.0, 1.0))
    wanted = {"ReduceL1": x.abs().sum(1), "ReduceL2": x.norm(dim=1), "ReduceSumSquare": (x * x).sum(1)}[kind]
    torch.testing.assert_close(network(x), wanted[:, None] if keep else wanted)
    constant = {"ReduceL1": 2**0.5, "ReduceL2": 1.0, "ReduceSumSquare": 2 * 2**0.5}[kind]
    assert constant <= float(lipschitz(network)) <= constant * (1 + 1e-5)


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("exclusive", [0, 1])
def test_running_sums(tmp_path, reverse, exclusive):
    row = ("CumSum", ["x", "axis"], "y", {"reverse": reverse, "exclusive": exclusive})
    network = load_onnx(write(tmp_path / "net.onnx", made(row), {"axis": np.array(-1)}, ["b", 2, 5]))
    matrix = np.tril(np.ones((5, 5)), -exclusive)  # of the sum over the entries before, and its own
    matrix = matrix.T if reverse else matrix
    x = np.random.default_rng(0).normal(size=(3, 2, 5))
    np.testing.assert_allclose(network(torch.from_numpy(x).float()), x @ matrix.T, rtol=1e-5, atol=1e-5)
    constant = np.linalg.norm(matrix, 2)
    assert constant * (1 - 1e-6) <= float(lipschitz(network)) <= (3 if exclusive else 1 + 1e-5) * constant


@pytest.mark.parametrize(("largest", "opset"), [(1, 9), (1, 11), (0, 11)])
def test_largest_numbers(tmp_path, largest, opset):
    """Before version 10 the number is an attribute, and only the largest are taken."""
    attributes, stored = ({"k": 2}, {}) if opset < 10 else ({"largest": largest}, {"k": np.array([2])})
    node = H.make_node("TopK", ["x", *stored], ["y", "places"], axis=1, **attributes)
    network = load_onnx(write(tmp_path / "net.onnx", [node], stored, ["b", 4, 3], opset))
    x = torch.randn(6, 4, 3)
    wanted = np.sort(x.numpy(), 1)
    np.testing.assert_array_equal(network(x), wanted[:, :-3:-1] if largest else wanted[:, :2])
    assert 1 <= float(lipschitz(network)) <= 1 + 1e-6
    node.attribute.append(H.make_attribute("sorted", 0))
    if opset > 9:
        with pytest.raises(NoRuleError, match="the order is open"):
            load_onnx(write(tmp_path / "net.onnx", [node], stored, ["b", 4, 3], opset))


def test_responses_of_neighbours(tmp_path):
    row = ("LRN", ["x"], "y", {"size": 3, "alpha": 0.6, "beta": 0.5, "bias": 2.0})
    path = write(tmp_path / "net.onnx", made(row), {}, ["b", 4, 2, 2])
    network, x = load_onnx(path, box=(-1.0, 1.0)), np.random.default_rng(0).uniform(-1, 1, (3, 4, 2, 2))
    squares = np.pad(x**2, ((0, 0), (1, 1), (0, 0), (0, 0)))
    wanted = x / np.sqrt(2 + 0.2 * (squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]))
    np.testing.assert_allclose(network(torch.from_numpy(x).float()), wanted, rtol=1e-5, atol=1e-6)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: network(v[None])[0].flatten()))(torch.from_numpy(x).float())
    slope = float(torch.linalg.matrix_norm(jacobians.detach().flatten(2), 2).max())
    assert slope <= float(lipschitz(network)) <= 10 * slope
    with pytest.raises(NoRuleError, match="an odd size"):
        load_onnx(write(path, made(("LRN", ["x"], "y", {"size": 2})), {}, ["b", 4, 2, 2]), box=(-1.0, 1.0))


def test_a_mean_of_values(tmp_path):
    nodes = made(("Tanh", ["x"], "t", {}), ("Mean", ["x", "t", "c"], "y", {}))
    network = load_onnx(write(tmp_path / "net.onnx", nodes, {"c": np.ones((1, 3), np.float32)}, ["b", 3]))
    x = torch.randn(5, 3)
    torch.testing.assert_close(network(x), (x + x.tanh() + 1) / 3)
    assert 2 / 3 <= float(lipschitz(network)) <= 2 / 3 * (1 + 1e-6)
