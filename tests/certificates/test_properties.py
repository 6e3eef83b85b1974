"""Properties on boxes, against exact minima of piecewise linear functions, and VNN-LIB against its direct meaning."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import types
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lipkit
from lipkit.certificates import evaluators, properties, read_vnnlib, verify_property
from lipkit.certificates.vnnlib import Case, cases
from lipkit.cli.main import main
from lipkit.errors import NoRuleError, OptionError
from lipkit.modules import Network


def box(*ends: tuple[Any, Any]) -> str:
    return "".join(f"(assert (>= X_{i} {low}))(assert (<= X_{i} {high}))" for i, (low, high) in enumerate(ends))


def kinks(layers: list[nn.Linear], low: float, high: float) -> list[float]:
    """Where a ReLU network of one input bends, and the ends: between them it is straight."""
    points = [low, high]
    for depth in range(1, len(layers)):
        found = list(points)
        for a, b in itertools.pairwise(points):
            at_a, at_b = (value(layers[:depth], x) for x in (a, b))
            with np.errstate(divide="ignore", invalid="ignore"):
                roots = a + (b - a) * at_a / (at_a - at_b)
            found += [float(x) for x in roots if a < x < b]
        points = sorted(found)
    return points


def value(layers: list[nn.Linear], x: float) -> np.ndarray[Any, Any]:
    h = np.array([x])
    for i, layer in enumerate(layers):
        h = layer.weight.double().numpy() @ (h if i == 0 else np.maximum(h, 0)) + layer.bias.double().numpy()
    return h


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at it is a second: a slow machine bounds as many boxes, so that "unknown" says what was not proved."""
    monkeypatch.setattr(properties, "time", types.SimpleNamespace(monotonic=itertools.count().__next__))


class Residual(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, -0.5 * x) - torch.cat((torch.relu(x[:, 3:]), x[:, :3]), 1)


@pytest.mark.thorough
@pytest.mark.fast
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_the_exact_minimum(seed: int) -> None:
    torch.manual_seed(seed)
    layers = [nn.Linear(1, 7), nn.Linear(7, 7), nn.Linear(7, 2)]
    network = Network([layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]], (1,))
    least = min(float(value(layers, x) @ [1.0, -2.0]) for x in kinks(layers, -1.5, 2.0))
    for off, answers in [(-1e-3, {"holds"}), (-1e-9, {"holds", "unknown"}), (1e-9, {"violated", "unknown"})]:
        unsafe = cases(f"{box((-1.5, 2))}(assert (<= (- Y_0 (* 2.0 Y_1)) {least + off!r}))", 1, 2)
        found = verify_property(network, unsafe, seconds=10 if len(answers) < 2 else 0.05, evaluator="float64")
        assert found.answer in answers
    text = f"{box((-1.5, 2))}(assert (<= (- Y_0 (* 2.0 Y_1)) {least + 1e-3!r}))(assert (<= Y_0 100))"
    found = verify_property(network, cases(text, 1, 2))
    assert found.answer == "violated"
    assert found.point is not None
    assert found.outputs is not None
    assert found.point.dtype == torch.float32
    assert torch.equal(found.outputs, network(found.point[None])[0])
    assert -1.5 <= found.point.item() <= 2
    assert found.outputs[0] - 2 * found.outputs[1] <= least + 1e-3
    # Both conditions can be met, but nowhere at once: boxes have to be cut until one of them fails in each.
    middle = float(value(layers, 0.1)[0])
    ends = f"(assert (<= Y_0 {middle!r}))(assert (>= Y_0 {middle + 0.01!r}))"
    assert verify_property(network, cases(box((-1.5, 2)) + ends, 1, 2)).answer == "holds"


@pytest.mark.thorough
@pytest.mark.fast
@pytest.mark.parametrize("last", [nn.GELU(), nn.Softmax(1), Residual()], ids=["scalar", "leaf", "joins"])
def test_what_can_be_violated_never_holds(monkeypatch, clock: None, last: nn.Module) -> None:
    """Even if the search finds nothing."""
    for name in ("among", "descend"):
        monkeypatch.setattr(properties._Group, name, lambda *_: None)
    torch.manual_seed(0)
    layers = [nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6), last, nn.Linear(6, 2)]
    network = lipkit.export(nn.Sequential(*layers).eval(), (2,))
    y = network(2 * torch.rand(2000, 2) - 1).double()
    a, b = (float(y[:, i].sort().values[5]) for i in (0, 1))
    met = y[(y[:, 0] > a) & (y[:, 1] > b)][0].tolist()
    for unsafe in (
        f"(or (<= Y_0 -9) (<= Y_1 {b!r}))",
        f"(or (<= Y_0 {a!r}) (<= Y_1 -9))",
        f"(and (<= Y_0 {met[0]!r}) (>= Y_0 {met[0]!r}) (<= Y_1 {met[1]!r}))",
    ):
        (low, high), third = ("-1", "1"), "0.3333333333333333333333333333333"
        halves = f"(or (and (<= X_1 {third}) (>= X_1 -1)) (and (<= X_1 1) (>= X_1 {third})))"
        text = box((low, high)) + f"(assert {halves}) (assert {unsafe})"
        assert verify_property(network, cases(text, 2, 2), seconds=5, batch=8).answer == "unknown"


@pytest.mark.thorough
@pytest.mark.fast
def test_the_answer_is_about_the_evaluator(monkeypatch, clock: None) -> None:
    """y = x - 2^-25 x is below 1 for x <= 1, but not in float32."""
    first, last = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0], [2.0**-25]]))
        last.weight.copy_(torch.tensor([[1.0, -1.0]]))
    network = Network([first, last], (1,))
    unsafe = cases(box((0.5, 1)) + "(assert (>= Y_0 1))", 1, 1)
    assert verify_property(network, unsafe, evaluator="float64").answer == "holds"
    found = verify_property(network, unsafe)
    assert (found.answer, found.evaluator.name) == ("violated", "float32")
    assert str(found).splitlines()[1] == "at X = 1.0"
    with pytest.raises(OptionError, match="evaluator"):
        verify_property(network, unsafe, evaluator="integer")
    monkeypatch.setattr(properties._Group, "among", lambda *_: None)
    assert verify_property(network, unsafe, seconds=20).answer == "unknown"
    # Convolutions in float32 may be no inner products: then float64 is meant.
    conv = Network([nn.Conv2d(1, 1, 2)], (1, 2, 2))
    monkeypatch.setattr(evaluators, "nnpack_enabled", lambda: True)
    found = verify_property(conv, cases(box(*[(0, 1)] * 4) + "(assert (>= Y_0 9))", 4, 1))
    assert (found.answer, found.evaluator.name) == ("holds", "float64")


@pytest.mark.fast
@pytest.mark.parametrize(("evaluator", "answer"), [("float64", "holds"), ("float32", "unknown")])
def test_nothing_holds_where_the_evaluator_may_overflow(evaluator: str, answer: str) -> None:
    network = Network([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)], (1,))
    for layer in network:
        nn.init.constant_(layer.weight, 1e30)
    unsafe = cases(box((1, 1)) + "(assert (<= Y_0 -1))", 1, 1)  # a point: it cannot be cut
    assert verify_property(network, unsafe, evaluator=evaluator).answer == answer


@pytest.mark.thorough
def test_numbers_are_not_rounded_towards_an_answer(monkeypatch, clock: None) -> None:
    same = nn.Linear(1, 1, bias=False)
    nn.init.ones_(same.weight)
    network = Network([same], (1,)).double()
    tenth = Fraction(1, 10) + Fraction(1, 10**30)
    decimal = "0.1" + "0" * 28 + "1"  # above 1/10 by less than float64 can tell
    assert Fraction(decimal) == tenth
    near = verify_property(network, cases(box(("0.1", decimal)) + "(assert (>= Y_0 0.1))", 1, 1), seconds=50)
    assert near.answer == "unknown"  # no float64 lies in the box, and 0.1 itself meets the condition
    for sign, answer in [("<=", "violated"), ("<", "holds")]:
        unsafe = box((0.5, 1)) + f"(assert ({sign} Y_0 0.5))"
        assert verify_property(network, cases(unsafe, 1, 1), seconds=50).answer in (answer, "unknown")
    # A factor that is no float64: 1 + 2^-70 of y = 1 is above 1, which no sum of float64 tells.
    factor = "1.00000000000000000000084703294725430"
    for sign, answer in [(">=", "violated"), ("<=", "unknown")]:
        unsafe = box((1, 1)) + f"(assert ({sign} (* {factor} Y_0) 1.0000000000000000000008))"
        assert verify_property(network, cases(unsafe, 1, 1), seconds=50).answer == answer
    monkeypatch.setattr(properties._Group, "among", lambda *_: None)
    for low, limit in [("0.1", "0.1"), ("0.3", "0.3"), ("0.7", "0.7")]:
        for sign in ("<=", ">="):
            unsafe = cases(box((low, low)) + f"(assert ({sign} (* {factor} Y_0) {limit}))", 1, 1)
            assert bounded_by(unsafe)


@pytest.mark.fast
@pytest.mark.parametrize("place", [0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(("batch", "least"), [(128, 0.95), (1, 0.5)])
def test_the_halves_of_a_box_are_all_of_it(
    place: float, batch: int, least: float, monkeypatch: pytest.MonkeyPatch, clock: None
) -> None:
    """Wherever the inputs lie that meet y = x: all others are proved, half by half."""
    for name in ("among", "descend"):
        monkeypatch.setattr(properties._Group, name, lambda *_: None)
    same = Network([nn.Linear(1, 1, bias=False)], (1,))
    nn.init.ones_(same[0].weight)
    near = f"(and (<= X_0 1) (>= X_0 0) (>= Y_0 {place}) (<= Y_0 {place + 0.001}))"
    far = "(and (<= X_0 3) (>= X_0 2) (<= Y_0 0))"
    found = verify_property(same, cases(f"(assert (or {far} {near}))", 1, 1), seconds=10, batch=batch)
    assert found.answer == "unknown"
    assert least < found.proved < 1


@pytest.mark.fast
@pytest.mark.parametrize(("off", "answer"), [(0.25, "holds"), (0.75, "unknown")])
def test_what_factors_may_be_off_is_taken_off(off: float, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of y = 1, which is not below 0.5 if its factor is 1 - 0.25."""

    class Group(properties._Group):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.off = torch.full_like(self.off, off)

    monkeypatch.setattr(properties, "_Group", Group)
    same = Network([nn.Linear(1, 1, bias=False)], (1,))
    nn.init.ones_(same[0].weight)
    assert verify_property(same, cases(box((1, 1)) + "(assert (<= Y_0 0.5))", 1, 1)).answer == answer


def bounded_by(unsafe: list[Case]) -> bool:
    """Boxes lie around the ones meant, limits above, and factors are off by no more than is taken off for it."""
    group = properties._Group(unsafe, Network([nn.Identity()], (1,)), torch.float64, 1)
    (end,), (atom,) = unsafe[0].box, unsafe[0].outputs
    low, high, limit, row, off = (Fraction(t.item()) for t in (*group.ends, group.limits, group.rows, group.off))
    return low <= end[0] <= high and atom.bound <= limit and abs(row - atom.factors[0][1]) <= off


def formula(rng: random.Random, depth: int) -> Any:
    if depth and rng.random() < 0.8:
        head = rng.choice(["and", "or", "not", "=>"])
        return [head, *(formula(rng, depth - 1) for _ in range({"not": 1, "=>": 2}.get(head) or rng.randint(1, 3)))]
    terms = [["*", str(rng.randint(-2, 2)), f"Y_{rng.randint(0, 1)}"] for _ in range(rng.randint(1, 2))]
    left = ["+", *terms, str(rng.randint(-1, 1))] if rng.random() < 0.7 else ["-", ["/", "Y_0", "3"], "0.5", "Y_1"]
    return [
        rng.choice(["<=", "<", ">=", ">", "==", "!="]),
        left,
        rng.choice(["Y_1", "0", "-1.5", ["-", ["/", "1", "2", "-4"]]]),
    ]


def meaning(term: Any, y: list[Fraction]) -> Any:
    if isinstance(term, str):
        return y[int(term[2:])] if term[0] == "Y" else Fraction(term)
    head, parts = term[0], [meaning(part, y) for part in term[1:]]
    if head in ("and", "or", "not", "=>"):
        return {"and": all(parts), "or": any(parts), "not": not parts[0], "=>": parts[-1] or not parts[0]}[head]
    if head == "/":
        return parts[0] / math.prod(parts[1:])
    if head in ("+", "*", "-"):
        return {"+": sum(parts), "*": parts[0] * parts[-1], "-": parts[0] - sum(parts[1:]) if parts[1:] else -parts[0]}[
            head
        ]
    a, b = parts
    return {"<=": a <= b, "<": a < b, ">=": a >= b, ">": a > b, "==": a == b, "!=": a != b}[head]


def written(term: Any) -> str:
    return term if isinstance(term, str) else f"({' '.join(map(written, term))})"


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(5))
def test_formulas_keep_their_meaning(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        term = formula(rng, 3)
        ways = cases(f"; a comment (\n{box((0, 1))} (assert {written(term)})", 1, 2)
        for y in itertools.product([-1.5, -0.5, 0.0, 0.5, 1.0], repeat=2):
            met = any(all(atom.met({"X": [0.5], "Y": y}) for atom in way.outputs) for way in ways)
            assert met == meaning(term, [Fraction(v) for v in y]), written(term)


@pytest.mark.fast
def test_boxes_of_cases() -> None:
    text = """; two boxes, of which one is empty
    (declare-const X_0 Real) (declare-const Y_1 Real)
    (assert (and (>= X_0 -1.0) (<= X_0 1e0) (<= X_0 5) (>= X_1 0) (<= X_1 0)))
    (assert (or (and (>= X_2 0) (<= X_2 1)) (and (>= X_2 3) (<= X_2 2))))
    (assert (and (<= (* -2 X_3) 1) (<= X_3 .5)))
    (assert (<= Y_1 (+ Y_0 1)))
    """
    (case,) = cases(text, 4, 2)
    assert [(float(low), float(high)) for low, high in case.box] == [(-1, 1), (0, 0), (0, 1), (-0.5, 0.5)]
    assert case.outputs[0].met({"Y": [0.0, 1.0]})
    assert not case.outputs[0].met({"Y": [0.0, 1.0 + 2**-52]})
    chained, apart = "(assert (<= 0 X_0 1))(assert (not (< Y_0 Y_1 3)))", "(assert (or (>= Y_0 Y_1) (>= Y_1 3)))"
    assert cases(chained, 1, 2) == cases(box((0, 1)) + apart, 1, 2)
    framed = "(set-logic QF_LRA)(set-info :status sat)" + box((0, "(/ 2 3)")) + "(assert (> X_0 0))(check-sat)(exit)"
    assert cases(framed, 1, 2)[0].box == ((0, Fraction(2, 3)),)
    assert cases(box((0, 1)) + "(assert (> X_0 1))", 1, 2) == cases(box((0, 0)) + "(assert (< X_0 0))", 1, 2) == []
    assert cases(box((1, 0)), 1, 2) == cases(box((0, 1)) + "(assert (<= 1 0))", 1, 2) == []


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(assert (<= X_0 1))", "a lowest and a highest value of each input, got none of X_0"),
        (box((0, 1)) + "(assert (<= Y_7 1))", "1 inputs X and 2 outputs Y, got Y_7"),
        (box((0, 1)) + "(declare-const X_3 Real)", "1 inputs X and 2 outputs Y, got X_3"),
        (box((0, 1)) + "(declare-const)", "expected a number or a variable"),
        (box((0, 1)) + "(assert (<= Y_0 X_0))", "that mixes variables"),
        (box((0, 1)) + "(assert (<= (* Y_0 Y_0) X_0))", "expected a linear term"),
        (box((0, 1)) + "(assert (<= (/ 2 Y_0) 1))", "/ by numbers other than 0, got ['/', '2', 'Y_0']"),
        (box((0, 1)) + "(assert (<= (/ Y_0 (- 1 1)) 1))", "expected a linear term"),
        (box((0, 1)) + "(check-sat)(assert (<= Y_0 1))", "got ['check-sat']"),
        (box((0, 1)) + "(assert (xor (<= Y_0 1)))", "expected and, or, not"),
        (box((0, 1)) + "(assert ((and) (<= Y_0 1)))", "expected and, or, not"),
        (box((0, 1)) + "(assert (<= Y_0 1e9999999))", "got 1e9999999"),
        (box((0, 1)) + "(assert (<= Y_0 1)", "expected a ')' for each '('"),
        (box((0, 1)) + "))", "expected a '(' for each ')'"),
        ("hello", "expected (declare-const NAME Real)"),
        (box((0, 1)) + "(assert (<= Y_0 \u0661))", "expected a number or a variable"),  # an Arabic 1
        (box((0, 1)) + "(assert (<= Y_\u0660 1))", "expected a number or a variable"),
        ("(vnnlib-version <2.0>)", "got ['vnnlib-version', '<2.0>']"),
        (box((0, 1)) + "(assert (<= Y_-1 1))", "got Y_-1"),
        (box((0, 1)) + "(assert ())", "expected and, or"),
        (box((0, 1)) + "(assert (<= () 1))", "expected a linear term"),
        (box((0, 1)) + "(assert (and" + 17 * " (or (<= Y_0 1) (<= Y_1 1))" + "))", "at most 65536 cases"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        cases(text, 1, 2)
    assert message in str(error.value)


@pytest.mark.thorough
@pytest.mark.fast
def test_the_command_line_answers(tmp_path, capsys) -> None:
    torch.manual_seed(0)
    lipkit.save(lipkit.export(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), (2,)), tmp_path / "net")
    for limit, answer in [(9, "holds"), (-9, "violated")]:
        (tmp_path / "p.vnnlib").write_text(box((0, 1), (-1, 1)) + f"(assert (>= Y_0 {limit}))")
        assert main(["certify", str(tmp_path / "net"), str(tmp_path / "p.vnnlib"), "--seconds", "5"]) == 0
        assert capsys.readouterr().out.splitlines()[0] == answer
    deep = tmp_path / "deep.vnnlib"
    deep.write_text("(assert " + 5000 * "(and " + "(<= Y_0 1)" + 5000 * ")" + ")")
    assert main(["certify", str(tmp_path / "net"), str(deep)]) == 2
    assert "nested too deep" in capsys.readouterr().err
    for path, message in (
        (deep, "text of VNN-LIB, got other"),
        (tmp_path, "file of VNN-LIB, got: "),
        (deep / "x", "file"),
    ):
        with pytest.raises(OptionError, match=rf"{path.name}: expected a {message}"):
            read_vnnlib(path, lipkit.load(tmp_path / "net"))


def test_without_a_condition_on_outputs_every_input_of_the_box_is_a_counterexample() -> None:
    net = Network([nn.Linear(1, 2), nn.ReLU()], (1,))
    found = verify_property(net, cases(box((0, 1)), 1, 2))
    assert found.answer == "violated"
    assert found.point is not None
    assert 0 <= float(found.point) <= 1
    # No float32 number lies in this box, so that only real inputs would do.
    assert verify_property(net, cases(box((0.1, 0.1)), 1, 2), evaluator="float32").answer == "unknown"
    unsafe = cases(box((0, 1)), 1, 2)
    for options, message in (
        ({"batch": 0}, "batch: expected an integer of at least 1, got 0"),
        ({"batch": "3"}, "batch: expected an integer of at least 1, got '3'"),
        ({"seconds": "a"}, "seconds: expected a finite number >= 0, got 'a'"),
        ({"seconds": float("nan")}, "seconds: expected a finite number >= 0, got nan"),
        ({"seconds": -1.0}, "seconds: expected a finite number >= 0, got -1"),
    ):
        with pytest.raises(OptionError, match=message):
            verify_property(net, unsafe, **options)


@pytest.mark.fast
def test_a_network_made_of_modules_in_place_reports_the_point_that_it_was_evaluated_at() -> None:
    network = Network([nn.ELU(inplace=True), nn.Linear(1, 1)], (1,))
    found = verify_property(network, cases(box((-1, 0)) + "(assert (<= Y_0 100))", 1, 1))
    assert found.point is not None
    assert found.outputs is not None
    exact = nn.functional.elu(found.point.double()) * network[1].weight.double() + network[1].bias.double()
    assert abs(float(exact - found.outputs)) < 2.0**-20


def test_of_weights_that_are_not_finite_nothing_is_known_at_once() -> None:
    network = Network([nn.Linear(1, 2)], (1,))
    network[0].weight.fill_(float("nan"))
    found = verify_property(network, cases(box((0, 1)) + "(assert (<= Y_0 -9))", 1, 2), seconds=float("inf"))
    assert (found.answer, found.boxes, found.proved) == ("unknown", 0, 0.0)


def test_cases_of_another_network_are_refused() -> None:
    box = "(assert (>= X_0 0)) (assert (<= X_0 1))"
    one, two = (lipkit.export(nn.Linear(1, outputs), (1,)) for outputs in (1, 2))
    unsafe = cases(box + "(assert (>= Y_1 9))", 1, 2)
    assert verify_property(two, unsafe).answer == "holds"
    for network, given, message in (
        (one, unsafe, r"1 inputs and 1 outputs, got some with 1 inputs and Y_1"),
        (lipkit.export(nn.Linear(2, 2), (2,)), unsafe, r"2 inputs and 2 outputs, got some with 1 inputs"),
        (two, "prop.vnnlib", r"read_vnnlib\(path, network\), got a sequence of str"),
    ):
        with pytest.raises(OptionError, match=message):
            verify_property(network, given)  # type: ignore[arg-type]
    empty = cases("(assert (>= X_0 1)) (assert (<= X_0 0)) (assert (>= Y_0 9))", 1, 1)
    with pytest.raises(OptionError, match="cases: expected one or more, got none: no input meets the conditions"):
        verify_property(one, empty)
    assert verify_property(two, iter(unsafe)).answer == "holds"  # type: ignore[arg-type]
    with pytest.raises(NoRuleError, match=r"got Linear: check lipkit\.export"):
        read_vnnlib("property.vnnlib", nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="FORMULA"):
        cases(box + "(assert)", 1, 1)


@pytest.mark.parametrize(("boxes", "words"), [(1, "on 1 box"), (2, "on 2 boxes")])
def test_an_answer_counts_its_boxes(boxes: int, words: str) -> None:
    unsafe = cases("(assert (and (>= X_0 0) (<= X_0 1) (>= Y_0 9)))", 1, 1)
    answer = verify_property(lipkit.export(nn.Linear(1, 1), (1,)), unsafe)
    assert dataclasses.replace(answer, boxes=boxes).describe().endswith(words)
    left = dataclasses.replace(answer, answer="unknown", proved=1 - 2.0**-20)
    assert left.describe().endswith(": 99.99 % of the volume")  # what is open never prints as 100 %
