"""Files of torch.export: the same constants as the networks that they were made of; forged ones are refused."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import math
import pickle
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.architectures import NETWORKS, SMALL, settle
from torch import Tensor, nn

from lipkit import certify, export, lipschitz
from lipkit.cli.bound import read
from lipkit.errors import DataError, NoRuleError, ShapeError
from lipkit.interop import load_program
from lipkit.interop.program_reader import OPERATORS, _function, read_program

SLOW = ("LeNet", "VGG-11", "ResNet-18", "ResNet-50", "WRN-16-4", "DenseNet", "SqueezeNet", "MobileNetV2", "ConvNeXt")


def write(model: nn.Module, shape: tuple[int, ...], path: Path, dynamic: bool = True) -> Path:
    batch = ({0: torch.export.Dim("batch")},) if dynamic else None
    torch.export.save(torch.export.export(model, (torch.rand(2, *shape),), dynamic_shapes=batch), path)
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SMALL])
def test_networks_of_others_have_the_same_constants(name: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    shape = NETWORKS[name][1]
    model = settle(SMALL[name]()).float().eval()
    box = (0.0, 1.0) if name in ("EfficientNet block", "ViT") else None
    path = write(model, shape, tmp_path / "net.pt2")
    found, known = load_program(path, box=box), export(model, shape, box=box)
    x = torch.rand(3, *shape)
    assert torch.allclose(found(x), known(x), rtol=1e-5, atol=1e-5)
    assert float(lipschitz(found)) == pytest.approx(float(lipschitz(known)), rel=1e-9)


class Every(nn.Module):
    """Operators that the networks above do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.instance, self.slopes = nn.Linear(8, 4), nn.PReLU(4, 0.3)
        self.same = nn.Conv2d(4, 4, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        a = F.leaky_relu_(self.conv(x), 0.2)
        a = self.norm(a).narrow(2, 0, 8)
        b = F.elu(a) + F.softplus(a) - torch.maximum(a, -a) + F.hardswish(a).clamp(-1, 2)
        b = self.same(b.unflatten(2, (2, 4)).roll(1, 3)) + F.pixel_shuffle(a.unsqueeze(3).reshape(-1, 4, 2, 4), 1)
        b = F.interpolate(F.pad(b, (1, 1)), scale_factor=2.0)[:, :, ::2, 1:9]
        c, d = b.split([1, 3], 1)
        e = torch.cat((c, torch.minimum(d, c)), 1).permute(0, 2, 3, 1)
        e = self.instance(e.flatten(1).select(1, 0).unsqueeze(1) + e.reshape(-1, 8, 8)[:, 0])
        return self.slopes(F.dropout(e, 0.5, self.training)).tanh().div(2.0).sub(e, alpha=0.5).squeeze(0)


@pytest.mark.thorough
def test_every_other_operator_computes_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, shape = Every().eval(), (2, 10)
    network = read_program(write(model, shape, tmp_path / "net.pt2"))
    x = torch.randn(5, *shape)
    with torch.no_grad():
        assert torch.allclose(network(x), model(x), atol=1e-6)
    assert network.input_shape == shape
    for name in OPERATORS:  # the schema of each is the one that its arguments are named after
        base, overload = name.split(".")
        assert hasattr(getattr(torch.ops.aten, base), overload), name


class Part(nn.Module):
    def __init__(self, f: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.slopes = f, nn.PReLU(4, 0.3)
        self.same, self.w = nn.Conv1d(4, 4, 3, padding="same"), nn.Parameter(torch.rand(4, 4) + 0.5)
        self.token = nn.Buffer(torch.rand(1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def standardised(s: Any, x: Tensor) -> Tensor:
    w = s.w.T.mT.T
    return F.linear(x.mT, (w - w.mean(1, True)) * torch.rsqrt(w.var([1], keepdim=True) + 0.1) + s.w.pow(2).sqrt())


def tokens(s: Any, x: Tensor) -> Tensor:
    x = torch.cat((s.w[None].expand(x.shape[0], -1, -1), x.mT), dim=1)  # the tokens of a class
    q, _ = x.reshape(-1, 10, 2, 2).permute(2, 0, 1, 3).unbind(0)
    return torch.stack((q, q), 2)[:, 0]


def steps(s: Any, x: Tensor, *start: Any) -> Tensor:
    """A recurrent network that starts from constant rows."""
    state = torch.zeros(x.shape[0], 4, device=x.device, dtype=x.dtype) + x.new_full((x.size(0), 4), 0.5)
    state = state + x.new_zeros(x.size(0), 1) + torch.ones(x.size(0), 4)
    for now in x.unbind(2):
        state = torch.tanh(F.linear(now, s.w) + 0.1 * state.to(x.device))
    return state


def constants(s: Any, x: Tensor) -> Tensor:
    fours = torch.full_like(s.w, 4.0) + torch.ones_like(s.w) + torch.full((4, 4), 0.5) + s.w.new_ones(4, 4)
    return F.linear(x.mT, torch.eye(4) + torch.eye(4, 4) + fours * 2 ** torch.arange(4.0) + torch.arange(1, 9, 2))


def in_place(s: Any, x: Tensor) -> Tensor:
    x = F.selu(F.celu(s.same(x), 0.5, inplace=True), inplace=True)
    return F.mish(F.hardswish(F.silu(x, inplace=True), inplace=True), inplace=True)


def masks(s: Any, x: Tensor) -> Tensor:
    hidden = torch.tril(torch.ones(4, 6)) == 0
    seen = torch.logical_not(torch.ones(4, 6).triu(3)) != 0
    y = torch.where(~hidden, x, -math.inf).softmax(-1) + x.masked_fill(~seen, -math.inf).softmax(-1)
    rows = -(torch.exp(s.w[0, :1].expand(x.shape[0], 1)) ** 2)
    return y * torch.linspace(0, 1, 6) + rows.unsqueeze(-1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "f",
    [
        steps,
        masks,
        constants,
        in_place,
        lambda s, x: x.unfold(2, 2, 2).mean(-1) + x.unfold(2, 3, 1).mean(-1)[:, :, 1:],
        lambda s, x: F.unfold(x.unsqueeze(1), (2, 3), (1, 2), (1, 0), (2, 1)),
        lambda s, x: F.fold(x.unsqueeze(3).expand(-1, -1, -1, 2).flatten(2), (4, 5), 2, 1, 0, (1, 1)),
        lambda s, x: x[:, [3, 0, 1]][..., torch.tensor([0, 0, 5])],
        lambda s, x: F.instance_norm(x, weight=s.w[0], bias=s.w[1], eps=0.5),
        lambda s, x: F.linear(x.mT, s.w[: x.size(1), : x.size(1)]),
        lambda s, x: F.linear(x.mT, torch._weight_norm(s.w, s.w[:, :1], 0)),
        lambda s, x: s.slopes(s.same(x))[:, :3, 1:4],
        standardised,
        tokens,
        lambda s, x: torch.addmm(s.w[0], torch.einsum("bcn,cd->bnd", x, s.w).select(1, 2), s.w),
        lambda s, x: torch.cat((s.token.expand((x.shape[0], -1, -1)), x), 1).clamp(min=torch.tensor(-0.5)),
        lambda s, x: torch.mm(F.adaptive_avg_pool1d(x, 2)[:, :, 1], s.w.t()),
        lambda s, x: F.interpolate(x.unsqueeze(1), scale_factor=2.0, mode="bilinear"),
    ],
    ids=[
        "constant rows",
        "masks",
        "constants",
        "activations in place",
        "windows along a dimension",
        "windows of an image",
        "windows put together",
        "chosen entries",
        "instance normalisation",
        "the whole of a weight",
        "normalised weights",
        "slices, slopes",
        "standardised weights",
        "tokens",
        "sums of products",
        "a stored token",
        "products",
        "bilinear",
    ],
)
def test_parts_of_common_networks_have_the_same_constants(f: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Part(f).eval(), torch.randn(5, 4, 6)
    found, known = load_program(write(model, (4, 6), tmp_path / "net.pt2")), export(model, (4, 6))
    torch.testing.assert_close(found(x), model(x), rtol=1e-6, atol=1e-6)
    assert float(lipschitz(found)) == pytest.approx(float(lipschitz(known)), rel=1e-9)


def test_functions_take_the_arguments_of_their_operators_in_their_order() -> None:
    """A function of the same name as an operator may be another one: F.unfold is im2col, not unfold."""
    checked = 0
    for schema in torch._C._jit_get_all_schemas():
        home, _, base = schema.name.partition("::")
        name = f"{base}.{schema.overload_name or 'default'}"
        function = None if home != "aten" or name in OPERATORS or name.endswith("out") else _function(name)
        given = [a.name.replace("train", "training") for a in schema.arguments if not a.kwarg_only]
        try:
            found = [*inspect.signature(function).parameters] if function in vars(F).values() else []
        except ValueError:  # of C++, whose functions are the operators themselves
            continue
        if found[:1] == ["input"] and function is not F.log_softmax:  # which is refused
            assert given[1:] == found[1 : len(given)], schema
            checked += 1
    assert checked > 10


@pytest.mark.thorough
def test_a_read_program_is_certified(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))
    path = write(model.eval(), (1, 6, 6), tmp_path / "net.pt2")
    network, shape = read(str(path), None)
    assert shape == (1, 6, 6)
    plain, x = export(network, shape), torch.rand(8, 1, 6, 6)
    assert [type(m).__name__ for m in plain] == ["Conv2d", "ReLU", "Flatten", "Linear"]
    radii = certify(plain, x, model(x).argmax(1)).radius
    assert torch.equal(radii, certify(export(model, shape), x, model(x).argmax(1)).radius)
    with pytest.raises(ShapeError, match=r"expected the input_shape \(1, 6, 6\), got \(1, 7, 7\)"):
        load_program(path, (1, 7, 7))
    assert load_program(path, [1, 6, 6]).input_shape == (1, 6, 6)  # type: ignore[arg-type]


class Alias(nn.Module):
    """What is changed in place is read later."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        z = y.view(-1, 4)
        y.relu_()
        return z + y


@pytest.mark.thorough
def test_changes_in_place_are_seen_or_refused(tmp_path: Path) -> None:
    path = write(Alias().eval(), (4,), tmp_path / "net.pt2")
    x = torch.randn(6, 4)
    assert torch.equal(read_program(path)(x), 4 * x.relu())
    assert torch.allclose(load_program(path)(x), 4 * x.relu())


class Refused(nn.Module):
    def __init__(self, f: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Any:
        return self.f(x)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: torch.fft.fft(x).real, "fft"),
        (lambda x: torch.where(x > 0, x, -x), r"Tensor\.gt"),
        (lambda x: (x, x + 1), "one as output"),
        (lambda x: F.dropout(x, 0.5, True), "random"),
        (lambda x: x * x, "constant"),
        (lambda x: x.kthvalue(2, 1).values, "kthvalue"),
        (lambda x: x - x.mean(0, keepdim=True), "batch"),
        (lambda x: x + torch.rand_like(x), "rand"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(f: Any, words: str, tmp_path: Path) -> None:
    path = write(Refused(f).eval(), (4,), tmp_path / "net.pt2")
    with pytest.raises(NoRuleError, match=words):
        load_program(path)


@pytest.mark.thorough
class Odd(nn.Module):
    """Numbers that a file holds as words, arguments in another order, several results."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f, self.layer = f, nn.Linear(4, 4)
        self.register_buffer("hidden", torch.tensor([True, False, True, False]))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, -torch.inf, 1.0]))

    def forward(self, x: Tensor) -> Any:
        return self.f(self, self.layer(x))


def test_masks_of_minus_infinity_and_products_along_dimensions(tmp_path: Path) -> None:
    for f in (
        lambda s, x: x.masked_fill(s.hidden, -torch.inf).softmax(1) + (x + s.mask).softmax(1),
        lambda s, x: torch.tensordot(x.unflatten(1, (2, 2)), s.layer.weight[:2, :2], dims=([2, 1], [0, 1])),
        lambda s, x: torch.inner(x, s.layer.weight) + x.unflatten(1, (2, 2)).rot90(1, (1, 2)).flatten(1),
    ):
        torch.manual_seed(0)
        model = Odd(f).eval()
        found, x = load_program(write(model, (4,), tmp_path / "net.pt2")), torch.randn(5, 4)
        torch.testing.assert_close(found(x).reshape(model(x).shape), model(x))
        assert float(lipschitz(found)) == pytest.approx(float(lipschitz(export(model, (4,)))), rel=1e-6)
    with pytest.raises(NoRuleError, match="expected finite numbers"):
        load_program(write(Odd(lambda s, x: x + s.mask), (4,), tmp_path / "open.pt2"))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, about itself
def test_several_outputs_are_no_matter_of_the_mode(tmp_path: Path) -> None:
    path = write(Odd(lambda s, x: (x, -x)).eval(), (4,), tmp_path / "net.pt2")
    with pytest.raises(NoRuleError, match="got 1 inputs and 2 outputs: export a module that takes one of them"):
        load_program(path)
    counting = torch.export.export(Odd(lambda s, x: x + s.mask.add_(1)).eval(), (torch.rand(2, 4),))
    torch.export.save(counting.run_decompositions(), path)
    with pytest.raises(NoRuleError, match=r"no change of buffers, got outputs .*: export in evaluation mode"):
        load_program(path)


def test_a_program_of_training_mode_or_of_one_batch_size_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(NoRuleError, match="batch"):
        load_program(write(model.train(), (4,), tmp_path / "a.pt2"))
    fixed = write(Refused(lambda x: x.view(2, 2, 2).flatten(1)).eval(), (4,), tmp_path / "b.pt2", dynamic=False)
    with pytest.raises((NoRuleError, ShapeError)):
        load_program(fixed)


def entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None], method: int = zipfile.ZIP_STORED) -> Path:
    found = entries(path)
    change(found)
    target = path.with_name("forged.pt2")
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, content in found.items():
            archive.writestr(name, content)
    return target


def edit(end: str, change: Callable[[Any], None]) -> Callable[[dict[str, bytes]], None]:
    def apply(found: dict[str, bytes]) -> None:
        (name,) = (name for name in found if name.endswith(end))
        content = json.loads(found[name])
        change(content)
        found[name] = json.dumps(content).encode()

    return apply


def first(content: Any) -> Any:
    return next(iter(content["config"].values()))


def node(content: Any, number: int = 0) -> Any:
    return content["graph_module"]["graph"]["nodes"][number]


WEIGHTS, GRAPH = "weights_config.json", "models/model.json"
FORGERIES: dict[str, Callable[[dict[str, bytes]], None]] = {
    "pickled numbers": edit(WEIGHTS, lambda c: first(c).update(use_pickle=True)),
    "huge sizes": edit(WEIGHTS, lambda c: first(c)["tensor_meta"].update(sizes=[{"as_int": 1 << 40}, {"as_int": 4}])),
    "huge sizes without strides": edit(
        WEIGHTS,
        lambda c: first(c)["tensor_meta"].update(sizes=[{"as_int": 1 << 40}] * 2, strides=[{"as_int": 0}] * 2),
    ),
    "negative offset": edit(WEIGHTS, lambda c: first(c)["tensor_meta"].update(storage_offset={"as_int": -3})),
    "negative stride": edit(WEIGHTS, lambda c: first(c)["tensor_meta"]["strides"][0].update(as_int=-4)),
    "offset behind the end": edit(WEIGHTS, lambda c: first(c)["tensor_meta"].update(storage_offset={"as_int": 9})),
    "unknown format": edit(WEIGHTS, lambda c: first(c)["tensor_meta"].update(dtype=9)),
    "no file of numbers": edit(WEIGHTS, lambda c: first(c).update(path_name="../../etc/passwd")),
    "another version": edit(GRAPH, lambda c: c["schema_version"].update(major=9)),
    "an unknown operator": edit(GRAPH, lambda c: node(c).update(target="torch.ops.aten.system.default")),
    "a function of Python": edit(GRAPH, lambda c: node(c).update(target="os.system")),
    "an operator of another library": edit(GRAPH, lambda c: node(c).update(target="torch.ops.mine.linear.default")),
    "a value that nobody makes": edit(GRAPH, lambda c: node(c)["inputs"][0].update(arg={"as_tensor": {"name": "no"}})),
    "an argument of another kind": edit(GRAPH, lambda c: node(c)["inputs"][0].update(arg={"as_graph": {}})),
    "an argument too many": edit(GRAPH, lambda c: node(c, 1)["inputs"].append({"name": "cmd", "arg": {"as_int": 1}})),
    "no output": edit(GRAPH, lambda c: c["graph_module"]["signature"].update(output_specs=[])),
    "two inputs": edit(GRAPH, lambda c: c["graph_module"]["signature"]["input_specs"].append(
        {"user_input": {"arg": {"as_tensor": {"name": "more"}}}})),
    "no graph": lambda found: found.pop(next(n for n in found if n.endswith(GRAPH))),
    "no JSON": lambda found: found.update({next(n for n in found if n.endswith(GRAPH)): b"\xff{"}),
    "more numbers than the memory holds, in few bytes": edit(WEIGHTS, lambda c: c["config"].update(
        {f"w{i}": {**first(c), "tensor_meta": {**first(c)["tensor_meta"], "sizes": [{"as_int": 1 << 28}],
                                               "strides": [{"as_int": 0}]}} for i in range(9)})),
    "numbers too short": lambda found: found.update({next(n for n in found if n.endswith("weight_0")): b"\0" * 8}),
}  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    return write(model, (4,), tmp_path_factory.mktemp("program") / "net.pt2")


@pytest.mark.parametrize("what", FORGERIES)
def test_forged_files_are_refused(what: str, program: Path) -> None:
    forged = rewritten(program, FORGERIES[what])
    with pytest.raises((DataError, NoRuleError, ShapeError)):
        load_program(forged)


@pytest.mark.thorough
def test_what_is_pickled_is_never_read(program: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "trapped",))

    trap = pickle.dumps(Trap())
    trap += bytes(-len(trap) % 4)
    for more in (b"", b"!"):

        def spring(found: dict[str, bytes], more: bytes = more) -> None:
            for name in found:
                if name.endswith(".pt") or "weight_" in name:
                    found[name] = trap + more

        if more:
            with pytest.raises((DataError, NoRuleError)):
                load_program(rewritten(program, spring))
        else:
            # As many bytes as some number of floats has are numbers, whatever they were meant to be.
            assert load_program(rewritten(program, spring)).input_shape == (4,)
    only = rewritten(program, lambda found: found.update({n: pickle.dumps(Trap()) for n in found if n.endswith(".pt")}))
    assert load_program(only).input_shape == (4,)  # the sample inputs are not looked at
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("other", [str.upper, str.lower])
def test_two_entries_of_one_name_are_refused(other: Callable[[str], str], program: Path, tmp_path: Path) -> None:
    """torch reads the first one."""
    forged = tmp_path / "forged.pt2"
    forged.write_bytes(program.read_bytes())
    (name,) = (name for name in entries(program) if name.endswith("weight_0"))
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(forged, "a") as archive:
        archive.writestr(name.replace("weight_0", other("weight_0")), bytes(64))
    with pytest.raises(DataError, match="entries of different names"):
        load_program(forged)


def test_numbers_are_read_where_torch_reads_them(program: Path) -> None:
    def put(found: dict[str, bytes]) -> None:
        zeros = {n.replace("/data", "/inner/data"): bytes(len(c)) for n, c in found.items() if "/weight_" in n}
        whole = dict(sorted(found.items(), key=lambda entry: "/weights/" in entry[0]))  # weights do not come first
        found.clear()
        found.update(dict([*whole.items()][:1]) | zeros | whole)

    x, forged = torch.randn(2, 4), rewritten(program, put)
    torch.testing.assert_close(load_program(forged)(x), torch.export.load(forged).module()(x))


def test_bombs_and_fragments(program: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not compressed"):
        load_program(rewritten(program, lambda found: None, zipfile.ZIP_DEFLATED))
    content, target = program.read_bytes(), tmp_path / "cut.pt2"
    for length in (0, 10, len(content) // 2, len(content) - 1):
        target.write_bytes(content[:length])
        with pytest.raises(DataError):
            load_program(target)
    with pytest.raises(DataError, match="got none"):
        load_program(tmp_path / "nowhere.pt2")
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer)
    target.write_bytes(buffer.getvalue())
    with pytest.raises(DataError):
        load_program(target)


@pytest.mark.thorough
def test_arguments_are_bound_by_name(program: Path) -> None:
    x, whole = torch.randn(3, 4), load_program(program)
    reordered = rewritten(program, edit(GRAPH, lambda c: node(c)["inputs"].reverse()))
    assert torch.equal(load_program(reordered)(x), whole(x))
    twice = rewritten(program, edit(GRAPH, lambda c: node(c)["inputs"].append(node(c)["inputs"][0])))
    with pytest.raises(DataError, match=r"each argument of torch.ops.aten.linear.default once"):
        load_program(twice)
    other = rewritten(program, edit(GRAPH, lambda c: node(c)["inputs"][1].update(name="mat")))
    with pytest.raises((DataError, NoRuleError, ShapeError), match=r"missing .*weight"):
        load_program(other)


@pytest.mark.thorough
def test_numbers_of_a_sparse_file_are_not_read(program: Path, tmp_path: Path) -> None:
    content, target = program.read_bytes(), tmp_path / "large.pt2"
    with open(target, "wb") as file:  # the archive starts behind 4 GB that the file system does not keep
        file.truncate(1 << 32)
        file.seek(1 << 32)
        file.write(content)
    tracemalloc.start()
    with contextlib.suppress(DataError):
        load_program(target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 26


def test_an_operator_is_refused_by_name_where_the_file_does_not_say_which_line_made_it(tmp_path: Path) -> None:
    def without_gradient(x: Tensor) -> Tensor:
        with torch.no_grad():  # a call of a graph inside the graph
            x = x * 2
        return x + 1

    with pytest.raises(NoRuleError, match=r"no rule for the operator torch\.ops\.higher_order\.wrap_with_set_grad"):
        load_program(write(Refused(without_gradient).eval(), (4,), tmp_path / "net.pt2"))


def test_values_too_large_for_memory_are_refused_before_it_is_taken(tmp_path: Path) -> None:
    path = write(Refused(lambda x: F.pad(x, (0, 2**20)) + 1).eval(), (4,), tmp_path / "net.pt2")
    huge = edit(GRAPH, lambda c: node(c)["inputs"][1].update(arg={"as_ints": [0, 2**40]}))
    with pytest.raises(DataError, match="pad: expected values of at most 67108864 numbers together, got 1099511627780"):
        load_program(rewritten(path, huge))
    path = write(Refused(lambda x: x + torch.zeros(2**20, 4).sum(0)).eval(), (4,), tmp_path / "net.pt2")
    huge = edit(GRAPH, lambda c: node(c)["inputs"][0].update(arg={"as_ints": [2**38, 4]}))
    with pytest.raises(DataError, match="expected values of at most 67108864 numbers together, got 1099511627"):
        load_program(rewritten(path, huge))


def test_a_parameter_of_whole_numbers(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([1, -3], dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    found = load_program(write(Scaled(), (2,), tmp_path / "net.pt2"))
    assert found(torch.ones(3, 2)).tolist() == [[1, -3]] * 3
    assert float(lipschitz(found)) == pytest.approx(3)
