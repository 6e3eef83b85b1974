from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lipkit import export, lipschitz
from lipkit.analysis import analyze
from lipkit.errors import DataError, LipkitError, NoRuleError, ShapeError
from lipkit.interop import write_onnx
from lipkit.interop.onnx_reader import load_onnx, read_onnx

onnx = pytest.importorskip("onnx")
H = onnx.helper


def write(path, nodes, stored, shape, dtype=np.float32):
    tensors = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in stored.items()]
    x = H.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)
    y = H.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    model = H.make_model(H.make_graph(nodes, "net", [x], [y], tensors), opset_imports=[H.make_opsetid("", 13)])
    onnx.save(model, str(path))
    return path


@pytest.fixture
def numbers():
    return np.random.default_rng(0)


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
        (("Exp", {}), "got Exp"),
        (("Softplus", {"domain": "com.microsoft"}), "got com.microsoft.Softplus"),
        (("Mul", {}), "two operands"),
        (("Sign", {}), "got Sign"),
        (("MaxPool", {"kernel_shape": [2, 2], "auto_pad": "SAME_UPPER"}), "explicit padding"),
        (("MaxPool", {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}), "same padding on both sides"),
        (("AveragePool", {"kernel_shape": [2, 2], "ceil_mode": 1}), "ceil_mode 0"),
        (("Flatten", {"axis": 0}), "axis 1"),
        (("ReduceMean", {}), "axes"),
        (("Cast", {"to": 6}), "got Cast"),
        (("Where", {}), "got Where"),
        (("ArgMax", {}), "got ArgMax"),
        (("QuantizeLinear", {}), "got QuantizeLinear"),
        (("Relu", {"slope": 3.0}), "attributes that its rule covers, got slope"),
        (("BatchNormalization", {"spatial": 0}), "operand 1|spatial 1"),
    ],
)
def test_refused_by_name(tmp_path, node, message):
    op, attributes = node
    path = write(tmp_path / "net.onnx", [H.make_node(op, ["x"], ["y"], **attributes)], {}, [1, 1, 4, 4])
    with pytest.raises(NoRuleError, match=message):
        read_onnx(path)


def changed(path, change):
    model = onnx.load(str(path))
    change(model)
    onnx.save(model, str(path))
    return path


def test_operators_that_mean_something_else_are_refused(tmp_path):
    squared = H.make_function(
        "", "Relu", ["a"], ["b"], [H.make_node("Mul", ["a", "a"], ["b"])], [H.make_opsetid("", 13)]
    )
    changes = {
        "version 7 or later, got 6": lambda model: setattr(model.opset_import[0], "version", 6),
        r"functions of the file in their place: \['Relu'\]": lambda model: model.functions.append(squared),
        "floating-point input, got 'x' of type INT32": lambda model: setattr(
            model.graph.input[0].type.tensor_type, "elem_type", onnx.TensorProto.INT32
        ),
    }
    for message, change in changes.items():
        path = write(tmp_path / "net.onnx", [H.make_node("Relu", ["x"], ["y"])], {}, [1, 4])
        assert analyze(read_onnx(path), (4,), restarts=0).upper == 1
        with pytest.raises(NoRuleError, match=message):
            read_onnx(changed(path, change))


def test_a_name_has_one_meaning(tmp_path):
    nodes = [H.make_node("Relu", ["x"], ["w"]), H.make_node("MatMul", ["x", "w"], ["y"])]
    path = write(tmp_path / "net.onnx", nodes, {"w": np.eye(4, dtype=np.float32)}, [1, 4])
    with pytest.raises(NoRuleError, match="'w', which is defined already"):
        read_onnx(path)
    constant = H.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(np.ones(4, np.float32)))
    path = write(tmp_path / "net.onnx", [constant, H.make_node("Add", ["x", "w"], ["w"])], {}, [1, 4])
    with pytest.raises(NoRuleError, match="'w', which is defined already"):
        read_onnx(path)
    # Names that differ in a dot and an underscore are two tensors.
    stored = {"a.b": np.full(4, 1, np.float32), "a_b": np.full(4, 10, np.float32)}
    nodes = [H.make_node("Add", ["x", "a.b"], ["c"]), H.make_node("Add", ["c", "a_b"], ["y"])]
    net = read_onnx(write(tmp_path / "net.onnx", nodes, stored, [1, 4]))
    assert net(torch.zeros(1, 4)).tolist() == [[11.0] * 4]


def test_a_first_size_of_one_is_the_batch_of_a_file_for_one_sample(tmp_path):
    nodes, stored = [H.make_node("Reshape", ["x", "s"], ["y"])], {"s": np.array([1, -1])}
    assert analyze(read_onnx(write(tmp_path / "net.onnx", nodes, stored, [1, 2, 2])), (2, 2), restarts=0).upper == 1
    with pytest.raises(NoRuleError, match="keeps the batch first"):
        read_onnx(write(tmp_path / "net.onnx", nodes, stored, ["batch", 2, 2]))


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
    with pytest.raises(NoRuleError, match="stored weights"):
        read_onnx(path)


@pytest.mark.parametrize("sizes", [None, [1, 3, 2]])
def test_pieces_in_any_order(tmp_path, sizes):
    stored = {} if sizes is None else {"s": np.array(sizes)}
    options = {"num_outputs": 3} if sizes is None else {}
    nodes = [
        H.make_node("Split", ["x", *stored], ["a", "b", "c"], axis=1, **options),
        H.make_node("Concat", ["c", "a", "b"], ["y"], axis=1),
    ]
    x = torch.randn(2, 6)
    a, b, c = x.chunk(3, 1) if sizes is None else x.split(sizes, 1)
    found = load_onnx(write(tmp_path / "net.onnx", nodes, stored, [1, 6]))
    assert torch.equal(found(x), torch.cat([c, a, b], 1))
    assert float(lipschitz(found)) == pytest.approx(1, rel=1e-9)


def test_swish_as_older_files_write_it(tmp_path):
    nodes = [H.make_node("Sigmoid", ["x"], ["s"]), H.make_node("Mul", ["s", "x"], ["y"])]
    found = load_onnx(write(tmp_path / "net.onnx", nodes, {}, [1, 4]))
    x = torch.randn(3, 4)
    assert torch.allclose(found(x), F.silu(x))
    assert float(lipschitz(found)) == pytest.approx(1.09984, abs=1e-4)
    # A gate that something else reads too, or of another value, is a product.
    for more in (H.make_node("Add", ["p", "s"], ["y"]), H.make_node("Mul", ["p", "s"], ["y"])):
        nodes = [H.make_node("Sigmoid", ["x"], ["s"]), H.make_node("Mul", ["s", "x"], ["p"]), more]
        with pytest.raises(NoRuleError, match="no Lipschitz constant"):
            load_onnx(write(tmp_path / "net.onnx", nodes, {}, [1, 4]))


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
    "numbers that are not there": (ADD, raw([10**6, 10**6, 10**6]), ROW, "well-formed"),
    "sizes beyond all numbers": (ADD, raw([2**62, 4]), ROW, "well-formed"),
    "fewer numbers": (ADD, raw([4], bytes(12)), ROW, "well-formed"),
    "part of a number": (ADD, raw([4], bytes(7)), ROW, "well-formed"),
    "unknown format": (ADD, raw([4], bytes(16), 99), ROW, "well-formed"),
    "no format": (ADD, raw([4], bytes(16), 0), ROW, "well-formed"),
    "complex": (ADD, raw([4], bytes(32), 14), ROW, "complex64|format"),
    "another shape": (ADD, np.ones(3, np.float32), ROW, "does not accept"),
    "weights elsewhere": (ADD, raw([4], location="none.bin"), ROW, "not an ONNX file|with its weights"),
    "weights of the system": (ADD, raw([4], location="/etc/hostname"), ROW, "not an ONNX file"),
    "weights above": (ADD, raw([4], location="../../../../etc/hostname"), ROW, "not an ONNX file"),
    "weights of a device": (ADD, raw([4], location="/dev/zero"), ROW, "not an ONNX file"),
    "cycle": ([("Add", ["x", "b"], {}, "a"), ("Relu", ["a"], {}, "b"), ("Relu", ["b"], {})], None, ROW, "'b' before"),
    "value of itself": ([("Add", ["x", "y"], {})], None, ROW, "'y' before it is made"),
    "value of later": ([("Add", ["x", "a"], {}), ("Relu", ["x"], {}, "a")], None, ROW, "'a' before it is made"),
    "no result": ([("Relu", ["x"], {}, "z")], None, ROW, "'y', which none does"),
    "no operands": ([("Relu", [], {})], None, ROW, "well-formed"),
    "no operands of Identity": ([("Identity", [], {})], None, ROW, "well-formed"),
    "no operands of Erf": ([("Erf", [], {})], None, ROW, "well-formed"),
    "no name": ([("Relu", [""], {})], None, ROW, "not NoneType"),
    "unknown operator": ([("Sin", ["x"], {})], None, ROW, "got Sin"),
    "number for a tensor": ([("Constant", [], {"value": 3.0}, "w"), *ADD], None, ROW, "well-formed"),
    "no groups": ([("Conv", ["x", "w"], {"group": 0})], ONE, IMAGE, "well-formed"),
    "many groups": ([("Conv", ["x", "w"], {"group": 2**40})], ONE, IMAGE, "well-formed"),
    "three paddings": ([("Conv", ["x", "w"], {"pads": [1] * 3})], ONE, IMAGE, "four paddings"),
    "one dilation": ([("Conv", ["x", "w"], {"dilations": [1]})], ONE, IMAGE, "two dilations"),
    "another kernel": ([("Conv", ["x", "w"], {"kernel_shape": [1, 1]})], ONE, IMAGE, r"kernel_shape \[1, 1\]"),
    "transposed": ([("ConvTranspose", ["x", "w"], {"kernel_shape": [1, 1]})], ONE, IMAGE, "kernel_shape"),
    "image of everything": ([("Conv", ["x", "w"], {"pads": [2**20] * 4})], ONE, IMAGE, "at most 268435456 numbers"),
    "vector for a matrix": ([("Gemm", ["x", "w"], {})], np.ones(4, np.float32), ROW, "well-formed"),
    "bias of another length": (
        [("Gemm", ["x", "w", "w"], {})], np.ones((4, 4), np.float32), ROW, "well-formed"
    ),
    "text for a number": ([("LeakyRelu", ["x"], {"alpha": "abc"})], None, ROW, "well-formed"),
    "bytes that are no text": ([("Gelu", ["x"], {"approximate": b"\xff\xfe"})], None, ROW, "well-formed"),
    "no order": ([("Transpose", ["x"], {"perm": [0, 9]})], None, ROW, "does not accept|well-formed"),
    "shape of real numbers": ([("Reshape", ["x", "w"], {})], np.ones(2, np.float32), ROW, "got float"),
    "huge shape": ([("Reshape", ["x", "w"], {})], np.array([0, 2**40]), ROW, "does not accept"),
    "huge padding": ([("Pad", ["x", "w"], {})], np.array([0, 0, 0, 2**40]), ROW, "at most 268435456 numbers"),
    "doubled forty times": (
        [("Concat", [f"v{i}" if i else "x"] * 2, {"axis": 1}, f"v{i + 1}" if i < 39 else "y") for i in range(40)],
        None, ROW, "at most 268435456 numbers",
    ),
    "huge input": ([("Relu", ["x"], {})], None, [1, 10**5, 10**6], "at most 268435456 numbers"),
    "input beyond all numbers": ([("Relu", ["x"], {})], None, [1, 2**40, 2**40], "does not accept|numbers"),
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


def test_numbers_that_are_none_bound_nothing(tmp_path):
    stored = {"w": np.diag(np.full(4, np.nan, np.float32))}
    path = write(tmp_path / "net.onnx", [H.make_node("MatMul", ["x", "w"], ["y"])], stored, [1, 4])
    assert float(lipschitz(load_onnx(path))) == float("inf")


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


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("geometry", [{"padding": 1}, {"padding": 1, "stride": 2, "groups": 2}, {"padding": "same"}])
def test_pixels_copied_around_images_become_the_padding_of_a_convolution(tmp_path, mode, geometry):
    torch.manual_seed(0)
    kernel = 2 if geometry["padding"] == "same" else 3
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, kernel, padding_mode=mode, **geometry), torch.nn.ReLU())
    net.requires_grad_(False)
    write_onnx(export(net.eval(), (2, 6, 6)), tmp_path / "net.onnx")
    back = read_onnx(tmp_path / "net.onnx")
    x = torch.randn(3, 2, 6, 6)
    torch.testing.assert_close(back(x), net(x))
    assert float(lipschitz(back, (2, 6, 6))) == pytest.approx(float(lipschitz(net, (2, 6, 6))), rel=1e-9)
    assert [type(m) for m in export(back, (2, 6, 6))] == [torch.nn.Conv2d, torch.nn.ReLU]


@pytest.mark.parametrize(
    ("pads", "conv", "words"),
    [
        ([0, 0, 1, 0, 0, 0, 0, 0], {}, "on both sides"),
        ([0, 0, 1, 1, 0, 0, 1, 1], {"pads": [1] * 4}, "no zeros"),
        ([0, 1, 0, 0, 0, 1, 0, 0], {}, "copied around images"),
    ],
)
def test_other_copies_of_pixels_are_refused(tmp_path, pads, conv, words):
    nodes = [H.make_node("Pad", ["x", "p"], ["a"], mode="edge"), H.make_node("Conv", ["a", "w"], ["y"], **conv)]
    stored = {"p": np.array(pads), "w": np.ones((1, 1, 2, 2), np.float32)}
    with pytest.raises(NoRuleError, match=words):
        read_onnx(write(tmp_path / "net.onnx", nodes, stored, ["batch", 1, 6, 6]))


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
