"""Worst-case counts and IoU of many decisions against every choice of the attacker, and against attacks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipkit import export, layers
from lipkit.certificates import dense, dense_outputs, prove
from lipkit.errors import OptionError, ShapeError
from lipkit.modules import Network
from lipkit.modules.dense import blocked


def identity(classes: int, positions: int) -> Network:
    """Outputs are the inputs."""
    layer = nn.Conv1d(classes, classes, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(classes)[:, :, None])
    return export(layer.double(), (classes, positions))


def sample(count: int, classes: int, positions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, classes, positions, generator=generator, dtype=torch.float64)
    y = torch.where(
        torch.rand(count, positions, generator=generator) < 0.7,
        x.argmax(1),
        torch.randint(classes, (count, positions), generator=generator),
    )
    return x, y


def best_iou(x: np.ndarray, y: np.ndarray, eps: float, k: int) -> float:
    """The least IoU of class k over all samples, by every prediction of every position."""
    choices = []
    for scores, labels in zip(x, y, strict=True):
        found = set()
        for predicted in itertools.product(range(len(scores)), repeat=len(labels)):
            energy, inside, union = 0.0, 0, 0
            for p, c in enumerate(predicted):
                now = int(scores[:, p].argmax())
                energy += (scores[now, p] - scores[c, p]) ** 2 / 2
                inside += c == k == labels[p]
                union += c == k or labels[p] == k
            if energy <= eps**2:
                found.add((inside, union))
        choices.append(found)
    totals = [np.sum(each, axis=0) for each in itertools.product(*choices)]
    return min((i / u for i, u in totals if u), default=math.nan)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eps", [0.2, 0.6, 1.0])
def test_counts_and_iou_against_every_choice(seed: int, eps: float) -> None:
    x, y = sample(2, 3, 4, seed)
    found = dense(identity(3, 4), x, y, eps)
    for i in range(len(x)):
        others = x[i].scatter(0, y[i][None], -math.inf).amax(0)
        margins = (x[i].gather(0, y[i][None])[0] - others).tolist()
        prices = [m * m / 2 for m in margins if m > 0]
        most = max(
            len(turned)
            for k in range(len(prices) + 1)
            for turned in itertools.combinations(prices, k)
            if sum(turned) <= eps**2
        )
        assert int(found.right[i]) == len(prices)
        assert int(found.worst[i]) == len(prices) - most
        assert int(found.alone[i]) == sum(p > eps**2 for p in prices)
    for k in range(3):
        assert float(found.worst_iou[k]) == pytest.approx(best_iou(x.numpy(), y.numpy(), eps, k), abs=1e-9)
    assert bool((found.worst_iou <= found.iou).all())


@pytest.mark.thorough
def test_attacks_never_get_below_the_bound_which_a_tight_one_reaches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layers.CayleyConv2d(3, 8, 3), layers.MaxMin(), nn.Conv2d(8, 4, 1))
    net = export(model, (3, 6, 6))
    x = torch.rand(20, 3, 6, 6)
    y = net(x).argmax(1)
    proof, eps = prove(net), 1.2
    found = dense(net, x, y, eps, proof=proof)
    assert float(found.worst_accuracy) > found._fraction(found.alone)
    exact, moved = export(model, (3, 6, 6)).double(), torch.zeros_like(x, dtype=torch.float64)
    for step in range(15):
        moved.requires_grad_()
        outputs = exact(x.double() + moved)
        margin = outputs.gather(1, y[:, None]) - outputs.scatter(1, y[:, None], -9.0).amax(1, keepdim=True)
        right = (margin > 0).flatten(1).sum(1)
        assert bool((right >= found.worst).all())
        (slope,) = torch.autograd.grad(torch.sigmoid(-margin * (5 + step)).sum(), moved)
        moved = (moved + eps / 4 * slope / slope.flatten(1).norm(dim=1).view(-1, 1, 1, 1)).detach()
        moved = moved * (eps / moved.flatten(1).norm(dim=1)).clamp(max=1).view(-1, 1, 1, 1)
    assert bool((right < found.right).any())


def test_a_last_layer_on_each_position_counts_by_its_rows() -> None:
    layer = nn.Conv2d(1, 2, 1, bias=False)
    with torch.no_grad():  # the two rows differ by 0.1, their common part moves no decision
        layer.weight.copy_(torch.tensor([3.05, 2.95]).view(2, 1, 1, 1))
    x = torch.full((1, 1, 2, 2), 1.0)
    found = dense(Network([layer], (1, 2, 2)), x, torch.zeros(1, 2, 2, dtype=torch.int64), 0.99)
    assert int(found.worst) == 4
    assert int(dense(Network([layer], (1, 2, 2)), x, torch.zeros(1, 2, 2, dtype=torch.int64), 1.01).worst) == 3


def pointwise(rows: list[float], bias: list[float], channels: int, size: int, **options: object) -> Network:
    layer = nn.Conv2d(channels, len(rows), 1, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows).view_as(layer.weight))
        layer.bias.copy_(torch.tensor(bias))
    return Network([layer], (channels, size, size))


def test_rows_count_only_where_they_read_the_same_features_at_each_position() -> None:
    groups = pointwise([1.0, 1.0], [0.0, 0.0], 2, 1, groups=2)  # equal rows of two different channels
    one = torch.zeros(1, 1, 1, dtype=torch.int64)
    assert int(dense(groups, torch.tensor([1.0, 0.0]).view(1, 2, 1, 1), one, 0.72).worst) == 0
    copied = pointwise([1.0, -1.0], [0.0, 0.0], 1, 1, padding=1, padding_mode="replicate")  # nine times one pixel
    assert int(dense(copied, torch.ones(1, 1, 1, 1), torch.zeros(1, 3, 3, dtype=torch.int64), 1.01).worst) == 0
    same = pointwise([1.0, 1.0], [1.0, 0.0], 1, 1)  # no input reaches the second class
    found = dense(same, torch.zeros(1, 1, 1, 1), one, 9.0)
    assert int(found.worst) == 1
    assert found.worst_iou.tolist() == pytest.approx([1.0, math.nan], nan_ok=True)


def test_the_error_of_a_vector_counts_in_two_directions() -> None:
    margin, error, norm = (torch.tensor([v], dtype=torch.float64) for v in (1.0, 0.5, 2.0))
    found = float(dense_outputs._energy(margin, error, norm))
    assert ((1 - 0.5**0.5) / 2) ** 2 * (1 - 1e-14) <= found <= ((1 - 0.5**0.5) / 2) ** 2


def test_ties_overflow_and_budgets_without_end() -> None:
    x = torch.tensor([[[1.0, 2.0], [1.0, 0.0]]], dtype=torch.float64)
    for label in (0, 1):
        assert int(dense(identity(2, 2), x, torch.tensor([[label, 0]]), 0.0).right) == 1  # a tie is not right
    found = dense(identity(2, 2), x, torch.zeros(1, 2, dtype=torch.int64), 1e200)
    assert int(found.worst) == 0
    assert found.worst_iou.tolist() == [0.0, 0.0]
    # A class that no label or prediction holds: nothing is known, until an attack can add it.
    far = dense(identity(2, 2), x, torch.tensor([[-100, 0]]), 0.1).worst_iou[1], found.worst_iou[1]
    assert [math.isnan(float(value)) for value in far] == [True, False]
    net = linear([[-1e200], [-1e-200]], (1,))  # -inf and -1
    broken = dense(net, x[:, :1, 0] * 1e200, torch.tensor([0]), 0.0, proof=prove(net, rounding="ignore"))
    assert [int(broken.right), int(broken.worst)] == [0, 0]
    assert float(broken.worst_iou[1]) == 0.0  # no margin is known, so any input may have the other class


def test_yes_and_no_of_each_output() -> None:
    net = identity(2, 2)
    x = torch.tensor([[[0.3, -0.1], [0.4, 2.0]]], dtype=torch.float64)
    y = torch.tensor([[[1, 0], [0, 1]]])
    found = dense(net, x, y, 0.2)
    assert [int(t) for t in (found.positions, found.right, found.worst)] == [4, 3, 2]
    # The first label: 0.3 stays, -0.1 may join; the second: 0.4 is wrong, 2.0 stays.
    assert found.worst_iou.tolist() == pytest.approx([0.5, 0.5])
    assert found.iou.tolist() == pytest.approx([1.0, 0.5])
    # One budget for both labels: either can turn, not both. An output of 0 says neither no nor yes.
    both = torch.full((1, 2, 1), 0.3, dtype=torch.float64)
    assert int(dense(identity(2, 1), both, torch.ones(1, 2, 1, dtype=torch.int64), 0.35).worst) == 1
    zero = dense(identity(2, 1), 0 * both, torch.zeros(1, 2, 1, dtype=torch.int64), 0.0)
    assert [int(zero.right), *zero.iou.tolist()] == [0, 0.0, 0.0]


def test_sequences_with_classes_last_and_ignored_positions() -> None:
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    net = Network([layer], (3, 2))
    y = torch.tensor([[0, 1, -100]])
    assert [int(t) for t in (dense(net, x, y, 0.1, dim=-1).positions, dense(net, x, y, 0.1, dim=-1).worst)] == [2, 2]
    assert int(dense(net, x, y, 0.8, dim=-1).worst) == 1
    assert "2 decisions" in str(dense(net, x, y, 0.8, dim=-1))


def test_rounding_of_a_narrow_evaluator_is_part_of_the_budget() -> None:
    layer = nn.Conv1d(1, 2, 1, bias=True).float()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 1.0]).view(2, 1, 1))
        layer.bias.copy_(torch.tensor([2.0**-20, 0.0]))
    net = export(layer, (1, 1))
    x, y = torch.full((1, 1, 1), 1000.0), torch.zeros(1, 1, dtype=torch.int64)
    assert int(dense(net, x, y, 1e-9).worst) == 1
    assert int(dense(net, x, y, 1e-9, proof=prove(net, evaluator="float32")).worst) == 0


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"eps": -1.0}, OptionError, "eps: expected a finite number >= 0"),
        ({"y": torch.zeros(2, 3, dtype=torch.int64)}, ShapeError, "expected labels of shape"),
        ({"y": torch.full((2, 4), 3)}, OptionError, "expected labels from 0 to 2"),
        ({"y": torch.full((2, 3, 4), 2)}, OptionError, "expected labels from 0 to 1"),
        ({"y": torch.zeros(2, 4)}, OptionError, "expected integer labels"),
        ({"y": torch.full((2, 4), -100)}, OptionError, "other than ignore_index"),
        ({"dim": 0}, OptionError, "dim: expected"),
        ({"ignore_index": None}, OptionError, "ignore_index: expected an integer from .* got None"),
        ({"proof": 3}, OptionError, r"proof: expected the result of lipkit\.prove, got int"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], kind: type[Exception], words: str) -> None:
    x, y = sample(2, 3, 4)
    given: dict[str, object] = {"x": x, "y": y, "eps": 0.1} | changes
    with pytest.raises(kind, match=words):
        dense(identity(3, 4), **given)  # type: ignore[arg-type]


def test_a_network_without_modules_decides_by_its_inputs() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    y = x.argmax(1)
    empty, same = Network([], (2,)), Network([nn.Flatten()], (2,))
    for eps, right in ((0.7, [1, 1]), (0.71, [0, 0])):  # 1 / sqrt(2) turns each
        assert dense(empty, x, y, eps).worst.tolist() == dense(same, x, y, eps).worst.tolist() == right


@pytest.mark.thorough
def test_labels_may_be_integers_of_any_size() -> None:
    x, y = sample(3, 4, 5)
    expected = dense(identity(4, 5), x, y, 0.1)
    for kind in (torch.int8, torch.uint8, torch.int32):
        assert torch.equal(dense(identity(4, 5), x, y.to(kind), 0.1).worst, expected.worst)
    with pytest.raises(OptionError, match="expected labels from 0 to 3, got 156 to 156"):  # -100 as one byte
        dense(identity(4, 5), x, torch.full_like(y, 156, dtype=torch.uint8), 0.1)


def linear(rows: list[list[float]], shape: tuple[int, ...]) -> Network:
    layer = nn.Linear(len(rows[0]), len(rows), bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(rows, dtype=torch.float64))
    return Network([layer], shape)


def test_labels_that_read_the_same_features_turn_together() -> None:
    y = torch.ones(1, 2, dtype=torch.int64)
    found = dense(linear([[1.0], [1.0]], (1,)), torch.ones(1, 1), y, 1.1)  # a step of 1 turns both
    assert [int(t) for t in (found.right, found.worst, found.alone)] == [2, 0, 0]
    # Each label by its row; by the norm 3 of all outputs one of them could turn.
    net, x = linear([[3.0, 0.0], [0.0, 1.0]], (2,)), torch.tensor([[1.0, 1.0]])
    assert int(dense(net, x, y, 0.5).worst) == 2
    assert int(dense(net, x, y[:, 0] * 0, 0.5).worst) == 1  # of one class each, without positions
    with pytest.raises(ShapeError, match=r"shape \(1,\), or \(1, 2\)"):
        dense(net, x, torch.zeros(2, 1, dtype=torch.int64), 0.5)


def test_labels_at_positions_of_a_sequence_under_every_step() -> None:
    torch.manual_seed(0)
    net = linear(torch.randn(3, 2).tolist(), (2, 2))
    x = torch.randn(4, 2, 2, dtype=torch.float64)
    outputs = net(x)
    for eps in (0.2, 0.5, 1.0):
        found = dense(net, x, (outputs > 0).long(), eps, dim=-1)
        steps = torch.randn(2000, 1, 2, 2, dtype=torch.float64)
        steps = steps * (eps / steps.flatten(1).norm(dim=1)).view(-1, 1, 1, 1)
        kept = (net((x + steps).flatten(0, 1)).view(2000, 4, 2, 3) * outputs > 0).sum((2, 3)).amin(0)
        assert bool((found.worst <= kept).all())
        assert bool((found.alone <= 6).all())


def test_rows_of_the_last_layer_count_along_their_own_dimension_alone() -> None:
    # Classes along the first dimension, which has as many entries: the rows, nearly equal, say nothing about them.
    net, x = linear([[1.0, 0.0], [1.0, 0.001]], (2, 2)), torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    found = dense(net, x, torch.zeros(1, 2, dtype=torch.int64), 0.8)
    assert int(found.right) == 2
    assert int(found.worst) == 0
    assert net(torch.tensor([[[0.49, 0.0], [0.5, 0.0]]], dtype=torch.float64)).argmax(1).tolist() == [[1, 1]]


@pytest.mark.thorough
def test_ratios_of_large_counts_are_compared_in_float64() -> None:
    count, inside, free = 2**21, 2**20, 2**21 // 3
    energy = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    leave, join = torch.full((2, 1, 1, count), math.inf, dtype=torch.float64)
    leave[..., :inside], join[..., inside : inside + free] = energy[:inside], 2 * energy[inside : inside + free]
    counts, union = torch.tensor([[inside]]), torch.tensor([[count - free]])
    square = torch.tensor([32000.0], dtype=torch.float64)
    decisions = dense_outputs._Decisions(counts[0], leave[0], leave[0], leave, join, counts, union)
    away, more = (np.cumsum(np.sort(e[0, 0].numpy())) for e in (leave, join))
    away, more = away[away <= 32000.0], more[more < math.inf]
    joined = np.searchsorted(more, 32000.0 - away, side="right")
    least = ((inside - 1 - np.arange(len(away))) / (count - free + joined)).min()
    assert least * (1 - 2.0**-38) <= float(dense_outputs._worst_iou(decisions, square)) <= least


def test_a_kernel_of_another_size_than_its_layer_says_reads_several_positions() -> None:
    torch.manual_seed(0)
    named, stale = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 1)
    stale.weight, stale.bias = named.weight, named.bias
    x = torch.randn(4, 2, 8, 8)
    found = [Network([conv], (2, 8, 8)) for conv in (named, stale)]
    y = found[0](x).argmax(1)
    one, two = (dense(network, x, y, 0.5) for network in found)
    assert torch.equal(one.worst, two.worst)
    assert not torch.equal(one.worst, one.right)


def test_blocks_of_a_kernel_turned_by_a_quarter_are_summed_as_it_is() -> None:
    conv = nn.Conv2d(2, 3, (1, 3), bias=False)
    conv.weight = nn.Parameter(torch.randn(2, 3, 3, 1).transpose(0, 1))
    x = torch.randn(1, 2, 5, 5)
    assert torch.allclose(blocked(conv)(x), conv(x), atol=1e-5)
