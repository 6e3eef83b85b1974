"""No number of a proof passes through a narrow format: a lint of every module that proves, and slips that it refuses.

`torch.full((n,), 1 / 3).double()` is 1/3 rounded to float32, and has broken certificates twice. Each number that is put
into a tensor names a wide format, and no tensor is cast to another. Exceptions are listed below, each with its reason.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import lipkit

ROOT = Path(lipkit.__file__).parent.parent

pytestmark = pytest.mark.thorough

WIDE = {"float64", "complex128", "int64", "int32", "int16", "int8", "uint8", "uint32", "bool", "object", "float", "int"}
NARROW = {"float32", "float16", "bfloat16", "complex64", "half", "single"}
FILLED = {"full", "tensor", "as_tensor", "scalar_tensor", "asarray", "linspace", "logspace"}
FILLED_LIKE = {"new_full", "new_tensor", "full_like"}
EMPTY = {"zeros", "ones", "empty", "eye", "rand", "randn"}
CASTS = {"to", "type", "astype", "type_as", "view"}
GLOBAL = {"set_default_dtype", "set_default_tensor_type", "FloatTensor", "HalfTensor", "Tensor"}

OF_LAYERS = "makes weights and outputs of layers in the caller's format: proofs read exported numbers, in float64"
SEARCHES = "looks for examples and secants, and proves nothing"
GUESSES = "a guess, which a factorisation in float64 proves or refuses"
STORED = "numbers that become part of the network, and are proved as they are stored"
MACHINE = "what the machine computes, in its own format"
DATA = "samples, as the format of the file or the data set says"

# Of a folder, a file or a function.
EXCEPTIONS = {
    "lipkit/attacks": SEARCHES,
    "lipkit/analysis/lipschitz_search.py": SEARCHES,
    "lipkit/analysis/network.py:_random_secants": SEARCHES,
    "lipkit/bounds/peak.py": "where a norm is largest: symbol_sup proves the norm itself in float64",
    "lipkit/bounds/power.py:start_vector": SEARCHES,
    "lipkit/bounds/gram_symbol.py:GramSymbol._minus": "float32 where its unit is in the error that _test takes off",
    "lipkit/bounds/gram_symbol.py:GramSymbol.single_table": "as _minus",
    "lipkit/bounds/gram_symbol.py:GramSymbol._test": "as _minus",
    "lipkit/certificates/evaluators.py:machine": MACHINE,
    "lipkit/modules/storage.py:check_alike": "compared in the format of the network",
    "lipkit/modules/storage.py:exact_copy": "to a device",
    "lipkit/certificates/properties.py:_rounded": "rounded to the evaluator's format outwards, compared as fractions",
    "lipkit/certificates/properties.py:_Group.among": "a point in the evaluator's format, tried there and in fractions",
    "lipkit/conv/cayley_conv.py": OF_LAYERS,
    "lipkit/conv/cayley_rounded.py": OF_LAYERS,
    "lipkit/conv/exponential_conv.py:exponential_conv2d": OF_LAYERS,
    "lipkit/conv/spread.py": OF_LAYERS,
    "lipkit/conv/normal_matrices.py": OF_LAYERS,
    "lipkit/conv/phases.py:apply_phases": OF_LAYERS,
    "lipkit/conv/phases.py:_PhaseProduct.backward": OF_LAYERS,
    "lipkit/conv/phases.py:kernel_of_symbol": OF_LAYERS,
    "lipkit/conv/symbol.py:wave_table": "the format of the kernel, which proofs give in float64",
    "lipkit/conv/spectrum.py:Symbol.to": OF_LAYERS,
    "lipkit/conv/spectrum.py:_Apply.backward": OF_LAYERS,
    "lipkit/conv/spectrum.py:apply_symbol": OF_LAYERS,
    "lipkit/conv/spectrum.py:transform_matrices": "the format is an argument, which proofs give as float64",
    "lipkit/linalg/cayley.py:_plain": OF_LAYERS,
    "lipkit/linalg/cayley.py:_Product.forward": OF_LAYERS,
    "lipkit/linalg/cayley.py:_Product.backward": OF_LAYERS,
    "lipkit/linalg/cayley.py:_gradients": OF_LAYERS,
    "lipkit/linalg/matrices.py:all_finite": "widens formats of eight bits",
    "lipkit/linalg/matrices.py:at_least_float32": "widens half precision",
    "lipkit/linalg/matrices.py:thin_svd": OF_LAYERS,
    "lipkit/modules/activations.py:_exchanged": "zeros and ones",
    "lipkit/modules/activations.py:_MaxMinShift.backward": "zeros and ones",
    "lipkit/modules/storage.py:to_integers": STORED,
    "lipkit/modules/storage.py:from_integers": STORED,
    "lipkit/modules/isometric.py": STORED,
    "lipkit/modules/normalization.py:fold_norm": STORED,
    "lipkit/modules/normalization.py:_export_batch_norm": STORED,
    "lipkit/modules/normalization.py:_export_center": STORED,
    "lipkit/modules/normalization.py:Center.forward": "statistics of training",
    "lipkit/modules/normalization.py:BatchLipNorm.forward": "statistics of training",
    "lipkit/modules/limits.py:Elementary.forward": MACHINE,
    "lipkit/modules/limits.py:Elementary.within": STORED,
    "lipkit/modules/limits.py:Limited.clipped": MACHINE,
    "lipkit/modules/limits.py:Limited.within": STORED,
    "lipkit/modules/fourier.py:FourierConv2d.from_symbol": STORED,
    "lipkit/modules/spread.py:SpreadConv2d.from_parts": STORED,
    "lipkit/modules/recurrent.py:_torch_export": STORED,
    "lipkit/modules/recurrent.py:Recurrent.run": "inputs under autocast, to the format of the weights",
    "lipkit/lowering/axes.py": "another call of a function, no cast",
    "lipkit/lowering/composed.py:_fold": "zeros and ones",
    "lipkit/lowering/functions.py:_shown": "zeros and ones",
    "lipkit/lowering/moves.py:mapped": "to the format of constants, float64 for bounds",
    "lipkit/lowering/tracing.py:sample": "random inputs",
    "lipkit/lowering/observe.py:_alone": "an output, to compare",
    "lipkit/lowering/observe.py:stays_float64": "an output, to compare",
    "lipkit/lowering/structure.py:check_same": "an output, to compare",
    "lipkit/lowering/structure.py:_structure_export": "to a device, no cast",
    "lipkit/modules/registry.py:export_plain": "to the widest format of all weights (multipliers are claims)",
    "lipkit/lowering/build.py:Build.number": STORED,
    "lipkit/proof/norms.py:_lanczos": GUESSES,
    "lipkit/proof/norms.py:quick_spectral_norm": GUESSES,
    "lipkit/proof/norms.py:quick_norm_estimate": GUESSES,
    "lipkit/proof/roundoff.py:to_double": "both formats are wide",
    "lipkit_check.py:numbers": DATA,
    "lipkit_check.py:load_samples": DATA,
}


class Lint(ast.NodeVisitor):
    """The slips of a source: line, enclosing function and code of each."""

    def __init__(self, source: str) -> None:
        self.found: list[tuple[int, str, str]] = []
        self.scopes: list[tuple[str, set[str]]] = [("", set())]
        self.visit(ast.parse(source))

    def _hit(self, node: ast.expr) -> None:
        self.found.append((node.lineno, ".".join(name for name, _ in self.scopes[1:]), ast.unparse(node)))

    def _scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for part in [*node.decorator_list, *getattr(getattr(node, "args", None), "defaults", [])]:
            self.visit(part)
        self.scopes.append((node.name, _written(node)))
        for part in node.body:
            self.visit(part)
        self.scopes.pop()

    visit_FunctionDef = visit_ClassDef = _scope

    def visit_Assign(self, node: ast.Assign) -> None:
        # Zeros are exact in every format; numbers that are written into them are not.
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        of, name = _call(node.value)
        if names & self.scopes[-1][1] and of == "torch" and name in EMPTY and not _wide_dtype(node.value):
            self._hit(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        of, name = _call(node)
        if (name in FILLED and of == "torch") or name in FILLED_LIKE:
            data = node.args[1:] if name in ("full", "full_like", "new_full") else node.args
            if not (_wide_dtype(node) or all(map(_exact, data))):
                self._hit(node)
        elif name in CASTS and of not in ("", "torch", "np"):
            formats = [*node.args, *(k.value for k in node.keywords if k.arg in ("dtype", "other"))]
            narrows = [a for a in formats if not (_wide(a) or _place(a))]
            if narrows and (name != "view" or any("float" in ast.unparse(a) for a in narrows)):
                self._hit(node)
        elif (
            (name in GLOBAL and of == "torch")
            or (name in NARROW and of)
            or (name == "float" and of and not node.args)
            or any(k.arg == "dtype" and _last(k.value) in NARROW for k in node.keywords)
        ):
            self._hit(node)
        self.generic_visit(node)


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _call(node: ast.expr) -> tuple[str, str]:
    """Of ``a.b(...)`` the two names; the first is "." where it is no name."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return getattr(function.value, "id", "."), function.attr
    return "", getattr(function, "id", "")


def _wide(node: ast.expr) -> bool:
    return _last(node) in WIDE or (isinstance(node, ast.Constant) and str(node.value) in (*WIDE, "<f8", ">f8"))


def _place(node: ast.expr) -> bool:
    return _last(node) == "device" or (isinstance(node, ast.Constant) and node.value in ("cpu", "cuda", "meta"))


def _wide_dtype(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and any(k.arg == "dtype" and _wide(k.value) for k in node.keywords)


def _exact(node: ast.expr) -> bool:
    """True for small integers and infinity, and lists of them."""
    if isinstance(node, ast.UnaryOp):
        return _exact(node.operand)
    if isinstance(node, ast.List | ast.Tuple):
        return all(map(_exact, node.elts))
    return _last(node) == "inf" or (isinstance(node, ast.Constant) and node.value in range(257))


def _written(function: ast.AST) -> set[str]:
    """Names whose entries are written in a function."""
    found = set()
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AugAssign):
            found |= {t.value.id for t in targets if isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name)}
        of, name = _call(node) if isinstance(node, ast.Call) else ("", "")
        if name.endswith("_") and not name.startswith("_"):
            found.add(of)
    return found


def files() -> list[str]:
    """Of all modules that certify, lipschitz and analyze import, wherever the import stands, and of the checker."""
    found = {"lipkit_check": ROOT / "lipkit_check.py"}
    names = [vars(lipkit)["_HOME"][name] for name in ("certify", "lipschitz", "analyze")]
    while names:
        name = names.pop()
        stem = ROOT.joinpath(*name.split("."))
        file = next((f for f in (stem / "__init__.py", stem.with_suffix(".py")) if f.exists()), None)
        if name in found or not name.startswith("lipkit.") or file is None:
            continue
        found[name] = file
        names.append(name.rpartition(".")[0])
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(str(file.relative_to(ROOT)) for file in found.values())


SLIPS = (
    "torch.full((3,), 1 / x).double()",
    "torch.full((3,), x)",
    "torch.tensor([x, 0.1])",
    "torch.as_tensor(x)",
    "torch.tensor(0.1, device=v.device)",
    "torch.tensor(x, dtype=v.dtype)",
    "torch.linspace(0.0, x, 5)",
    "v.new_full((2,), x)",
    "v.new_tensor([x])",
    "torch.full_like(v, x)",
    "v.to(torch.float32)",
    "v.to(v.dtype)",
    "v.abs().to(other)",
    "v.float()",
    "v.half().double()",
    "v.type(torch.float32)",
    "v.type_as(other)",
    "torch.zeros(3, dtype=torch.float32)",
    "v.sum(0, dtype=torch.bfloat16)",
    "np.float32(x)",
    "np.asarray(x).astype(np.float32)",
    "np.full(3, x, dtype=np.float32)",
    "torch.set_default_dtype(torch.float32)",
    "torch.Tensor([x])",
)
FILLS = (
    "    a = torch.zeros(3)\n    a[0] = x",
    "    b = torch.ones(3)\n    b.mul_(x)",
    "    c = torch.empty(2)\n    c[:] += x",
)
PLANTED = "\n\ndef _planted(v, other, x):\n" + "\n".join([*(f"    {slip}" for slip in SLIPS), *FILLS]) + "\n"
RIGHT = """
def _right(v, x):
    torch.full((3,), x, dtype=torch.float64), torch.tensor([1, 2]), torch.full_like(v, math.inf), v.new_full((2,), 0)
    v.to(v.device), v.to("cpu"), v.to(torch.complex128), v.double(), v.new_zeros(3), v.view(-1, 3), float(x), type(x)
    torch.zeros(3).double(), np.zeros(3), np.asarray(x).astype(np.float64), v.sum(0, dtype=torch.float64)
    a = torch.zeros(3, dtype=torch.float64)
    a[0] = x
"""

FILES = files()


@functools.cache
def planted(file: str) -> list[tuple[int, str, str]]:
    """The findings in a file, with some lines of code planted at its end."""
    return Lint((ROOT / file).read_text() + PLANTED + RIGHT).found


def reason(file: str, function: str) -> str | None:
    """The key of the exception that covers a function of a file."""
    places = [file, file.rsplit("/", 1)[0], f"{file}:{function}"]
    return next((place for place in places if place in EXCEPTIONS), None)


def test_no_number_of_a_proof_passes_through_a_narrow_format() -> None:
    wrong, used = [], set()
    for file in FILES:
        for line, function, code in planted(file):
            if function in ("_planted", "_right"):
                continue
            used.add(reason(file, function))
            if reason(file, function) is None:
                wrong.append(f"{file}:{line}: {code}")
    assert not wrong, "expected dtype=torch.float64 and no casts to narrower formats, got\n" + "\n".join(wrong)
    assert set(EXCEPTIONS) <= used, f"expected exceptions that are needed, got {sorted(set(EXCEPTIONS) - used)}"


def test_the_rooms_that_prove_are_among_the_files() -> None:
    rooms = {file.split("/")[1] for file in FILES if "/" in file}
    assert {"proof", "bounds", "modules", "certificates", "linalg", "conv", "analysis"} <= rooms
    assert "lipkit_check.py" in FILES
    wholly = [file for file in FILES if file in EXCEPTIONS or file.rsplit("/", 1)[0] in EXCEPTIONS]
    for room in ("proof", "bounds", "certificates", "modules"):
        assert sum(f"/{room}/" in file for file in wholly) <= 2


@pytest.mark.parametrize("file", [file for file in FILES if reason(file, "_planted") is None])
def test_a_planted_slip_is_refused(file: str) -> None:
    linted = planted(file)
    found = {code for _, function, code in linted if function == "_planted"}
    expected = {slip.removesuffix(".double()") for slip in SLIPS} | {
        "torch.zeros(3)",
        "torch.ones(3)",
        "torch.empty(2)",
    }
    assert {ast.unparse(ast.parse(code)) for code in expected} <= found
    assert "_right" not in {function for _, function, _ in linted}
