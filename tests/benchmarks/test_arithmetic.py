from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from benchmarks.speed import floor
from benchmarks.speed.clock import clock_of, cpu_clock, geometric_mean, interleaved, measuring, median, ratio
from benchmarks.speed.memory import here, resident, saved_bytes
from benchmarks.speed.networks import NETWORKS, epoch
from benchmarks.speed.shapes import ECO_SHAPES, SHAPES, Shape, parse
from benchmarks.speed.targets import TARGETS, Target, verdicts

from lipkit.errors import OptionError


def test_medians_leave_out_absent_rounds():
    assert median([5.0, None, 1.0]) == 3.0
    assert math.isnan(median([None]))


def test_a_ratio_is_over_shared_rounds_only():
    # In its own two rounds the reference took 1; that it took 100 later says nothing about the other.
    assert ratio([3.0, 3.0, None, None, None], [1.0, 1.0, 100.0, 100.0, 100.0]) == 3.0
    assert math.isnan(ratio([None, 1.0], [1.0, None]))


def test_geometric_means():
    assert geometric_mean([0.25, 4.0]) == 1.0
    assert geometric_mean([2.0, 4.0, 8.0]) == pytest.approx(4.0, rel=1e-15)
    assert math.isnan(geometric_mean([]))
    assert math.isnan(geometric_mean([1.0, 0.0]))
    assert math.isnan(geometric_mean([1.0, math.nan]))


def fake(costs: dict[str, float]):
    """Contenders of known cost, their order of calls, and a clock that knows the costs."""
    order: list[str] = []
    work = {name: (lambda name=name: order.append(name)) for name in costs}

    def clock(run, calls):
        for _ in range(calls):
            run()
        return costs[order[-1]]

    return work, clock, order


def test_contenders_take_turns_within_their_budgets():
    work, clock, order = fake({"a": 1.0, "b": 0.5, "slow": 40.0})
    samples = interleaved(work, clock, seconds=3.0, repeats=4, least=2)
    assert samples == {
        "a": [1.0, 1.0, 1.0, 1.0],
        "b": [0.5, 0.5, 0.5, 0.5],
        "slow": [40.0, 40.0, None, None],
    }
    # Once each unmeasured, then rounds in alternating order.
    rounds = [["a", "b", "slow"], ["a", "b", "slow"], ["slow", "b", "a"], ["a", "b"], ["b", "a"]]
    assert order == [name for turn in rounds for name in turn]


def test_short_work_is_called_several_times_in_a_row():
    work, clock, order = fake({"a": 1e-3, "b": 1.0})
    interleaved(work, clock, seconds=0.0, repeats=1, least=1)
    assert Counter(order) == {"a": 2 + 2, "b": 1 + 1}  # twice to learn how long it takes, then one sample of 2 ms


def test_the_reference_runs_whenever_another_one_does():
    work, clock, _ = fake({"ref": 100.0, "fast": 1.0})
    samples = interleaved(work, clock, seconds=5.0, repeats=6, least=1)
    assert samples["fast"].count(1.0) == 5
    assert samples["ref"] == [100.0] * 5


@pytest.mark.parametrize(("repeats", "least"), [(0, 1), (1, 0)])
def test_at_least_one_sample(repeats, least):
    with pytest.raises(OptionError, match="expected repeats and least >= 1"):
        interleaved({"a": int}, cpu_clock, repeats=repeats, least=least)


def test_measuring_gives_all_settings_back():
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    with measuring("cpu"):
        assert torch.get_num_threads() == 1
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.get_num_threads(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark) == before


def test_an_unknown_device_is_refused():
    with pytest.raises(OptionError, match="device: expected cpu"):
        clock_of("meta")


@pytest.mark.parametrize("shape", [*SHAPES, *ECO_SHAPES, Shape(8, 16, 12, 2)], ids=str)
def test_shapes_are_read_as_they_are_written(shape):
    assert parse(str(shape)) == shape


@pytest.mark.parametrize("text", ["", "128", "@16", "128@0", "3->32s2@15", "a->3@4"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(OptionError, match="shape: expected"):
        parse(text)


def test_the_shapes_of_the_tables():
    assert [str(s) for s in SHAPES][:2] == ["3->32@32", "32->32s2@32"]
    assert (SHAPES[1].kernel, SHAPES[1].inner, SHAPES[1].out) == (1, 128, 16)
    assert all(s.side % 3 == 0 for s in ECO_SHAPES)


def cell(shape, batch, phase, **samples):
    return {
        "shape": shape,
        "batch": batch,
        "phase": phase,
        "samples": {k.replace("_", ":"): v for k, v in samples.items()},
    }


def test_verdicts():
    target = Target("t", "cayley", "train", 1.0, least_channels=64, worst=1.5)
    cells = [
        cell("128@16", 128, "train", conv=[1.0], cayley_lipkit=[0.5]),
        cell("256@8", 128, "train", conv=[1.0], cayley_lipkit=[1.125]),
        cell("3->32@32", 128, "train", conv=[1.0], cayley_lipkit=[99.0]),  # too few channels
        cell("128@16", 32, "train", conv=[1.0], cayley_lipkit=[99.0]),  # another batch
        cell("128@16", 128, "forward", conv=[1.0], cayley_lipkit=[99.0]),
        cell("64@8", 128, "train", conv=[1.0], cayley_lipkit=[99.0]),  # not one of the table's shapes
    ]
    (found,) = verdicts(cells, [target])
    assert (found.mean, found.worst, found.shapes, found.of, found.met) == (0.75, 1.125, 2, 5, True)
    cells.append(cell("512@4", 128, "train", conv=[1.0], cayley_lipkit=[1.6]))
    (found,) = verdicts(cells, [target])
    assert found.mean < 1.0  # the mean holds, one shape does not
    assert found.met is False
    assert verdicts([], [target])[0].met is None


def test_every_target_of_the_table_is_there():
    limits = {(t.family, t.against, t.phase, t.batch, t.least_channels): t.limit for t in TARGETS}
    assert limits["eco", "conv", "train", 128, 0] == 0.30
    assert limits["eco", "conv", "forward", 128, 0] == 0.25
    assert limits["cayley", "conv", "train", 128, 64] == 0.9
    assert limits["cayley", "conv", "forward", 32, 128] == 0.6
    assert limits["cayley", "cayley:textbook", "forward", 32, 0] == pytest.approx(1 / 12)
    assert limits["sandwich", "cayley:lipkit", "train", 128, 0] == 2.2
    assert {f for f, *_ in limits} == {"eco", "cayley", "sandwich", "bcop", "cayley_bcop", "rko", "soc"}


def test_floors_count_what_a_plain_convolution_would_need_nine_times():
    shape, plain = Shape(64, 64, 12), 2 * 9 * 128 * 144 * 64**2
    assert floor.operations("eco", shape, 128, "forward") == plain / 9
    # Half as many complex products as pixels: 4 real ones per pixel and pair, that is 4/18 of the convolution.
    transforms = 2 * 2 * (12 + 12) * 144 * 128 * 64
    assert floor.operations("cayley", shape, 128, "forward") == pytest.approx(plain * 4 / 18 + transforms)
    rates = floor.Rates(operations=1e9, bytes=1e18)
    assert floor.floor("eco", shape, 128, "forward", rates) == plain / 9 / 1e9
    assert floor.floor("eco", shape, 128, "forward", floor.Rates(1e18, 1e9)) == 2 * 4 * 128 * 144 * 64 / 1e9
    for family in floor.FAMILIES:
        assert floor.operations(family, shape, 8, "train") > 3 * floor.operations(family, shape, 8, "forward") * 0.99


def test_rates_are_positive():
    found = floor.measure_rates(cpu_clock, side=64, megabytes=1, runs=2)
    assert found.operations > 0 < found.bytes


def test_saved_bytes_count_each_storage_once():
    weight, x = torch.ones(10, 10, requires_grad=True), torch.ones(5, 10)
    assert saved_bytes(lambda: (x @ weight) * 2) == 4 * 50  # the gradient of the input is not asked for
    assert saved_bytes(lambda: x.reshape(50).reshape(5, 10) @ weight + x @ weight) == 4 * 50
    assert saved_bytes(lambda: (x @ weight).square()) == 4 * 50 + 4 * 50


def test_memory_of_a_layer():
    shape = Shape(16, 16, 12)
    own = here("cayley:lipkit", shape, 8, "train")
    plain = here("conv", shape, 8, "train")
    # The circular convolution keeps its padded input and its weight.
    assert 4 * 8 * 16 * 14 * 14 <= plain["saved"] <= 4 * 8 * 16 * (14 * 14 + 12 * 12) + 4 * 9 * 16 * 16
    assert own["saved"] >= 4 * 8 * 16 * 144
    assert here("conv", shape, 8, "forward")["saved"] == 0
    if resident("VmRSS"):
        assert own["peak"] >= plain["added"] >= 0
        now = resident("VmRSS")  # read before the peak, which never falls
        assert resident("VmHWM") >= now > 1 << 20


def test_an_epoch_has_391_steps_of_128():
    assert epoch(1.0, 128) == 391


@pytest.mark.parametrize("title", NETWORKS)
def test_networks_and_their_plain_counterparts_have_the_same_widths(title, monkeypatch):
    def widths(network):
        return [m.bias.shape[0] for m in network.modules() if getattr(m, "bias", None) is not None]

    build, plain = NETWORKS[title]
    # Only sizes are compared: the initial values of large matrices would take seconds.
    monkeypatch.setattr(torch.nn.init, "orthogonal_", lambda tensor: tensor)
    assert widths(build()) == widths(plain())
