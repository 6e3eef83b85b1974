"""Stored networks that torch does not compute, or computes otherwise: refused by `load` and by the checker alike."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checker.forger import BASES, fault, faults, write
from torch import nn

import lipkit
import lipkit_check as k
from lipkit import modules
from lipkit.errors import DataError
from lipkit.modules.plain import Stored, row_of, stored_types

NORM = {"eps": 1e-3, "elementwise_affine": False, "bias": False}
CONV = {"in_channels": 2, "out_channels": 1, "kernel_size": [1, 1], "stride": [1, 1], "padding": [0, 0],
        "dilation": [1, 1], "groups": 1, "padding_mode": "zeros", "bias": False}  # fmt: skip
POOL = {"stride": 1, "padding": 0, "ceil_mode": False}


def test_every_stored_type_is_forged() -> None:
    assert {type(part) for module, _ in BASES for part in module.modules()} >= set(stored_types())


def test_the_checker_knows_the_arguments_of_every_type() -> None:
    known = {kind: {name.rstrip("?.'*/|~%!") for name in names} for kind, names in k.ARGUMENTS.items()}
    for kind in stored_types():
        stored = row_of(kind).stored
        assert isinstance(stored, Stored)
        assert known.pop(kind.__name__, set()) == set(stored.arguments), kind
    assert not known


@pytest.mark.parametrize(("config", "shape"), [
    ({"type": "Softmax", "dim": -2}, (3,)), ({"type": "Softmax", "dim": 0}, (3,)),
    ({"type": "Softmax", "dim": -3}, (3, 2)), ({"type": "Softmax", "dim": 2}, (3,)),
    ({"type": "Softmax", "dim": None}, (3, 2)), ({"type": "LayerNorm", "normalized_shape": [3], **NORM}, (3, 4)),
    ({"type": "Pad", "padding": [0, 0, 1, -1]}, (3,)), ({"type": "Flatten", "start_dim": 0, "end_dim": 1}, (1,)),
    ({"type": "Flatten", "start_dim": 1, "end_dim": 2}, (1, 3)), ({"type": "Conv2d", **CONV}, (2, 1, 3, 1)),
    ({"type": "Conv2d", **CONV}, (2, 3)), ({"type": "LeakyReLU", "negative_slope": "0.5"}, (3,)),
    ({"type": "PReLU", "negative_slope": 0.5}, (3,)), ({"type": "GELU", "approximate": "other"}, (3,)),
    ({"type": "ReLU", "multipliers": {}}, (3,)),
    ({"type": "Hardtanh", "min_val": 1.0, "max_val": 1.0}, (3,)), ({"type": "GroupSort", "group_size": 1}, (1,)),
    ({"type": "Conv2d", **CONV, "padding": "same", "stride": [1, 2]}, (2, 1, 4)),
    ({"type": "Conv2d", **CONV, "padding": [0, 3], "padding_mode": "reflect"}, (2, 1, 3)),
    ({"type": "Conv2d", **CONV, "padding_mode": "edge"}, (2, 1, 3)),
    ({"type": "Conv2d", **CONV, "kernel_size": 1}, (2, 1, 3)), ({"type": "Conv2d", **CONV, "stride": [1]}, (2, 1, 3)),
    ({"type": "Graph", "modules": [{"type": "Add", "signs": [1, True]}], "sources": [[0, 0]]}, (3,)),
    ({"type": "Graph", "modules": [{"type": "Maximum", "dim": 1}], "sources": [[0, 0]]}, (3,)),
    ({"type": "AvgPool2d", "kernel_size": 2, **POOL, "count_include_pad": True}, (1, 4, 4)),
    ({"type": "MaxPool2d", "kernel_size": 2, **POOL, "stride": None, "dilation": 1}, (1, 4, 4)),
    ({"type": "L2NormPool2d", "kernel_size": True}, (1, 4, 4)),
    ({"type": "L2NormPool2d", "kernel_size": [2, 2]}, (1, 4, 4)),
    ({"type": "Pad", "padding": [True, 0, 0, 0]}, (1, 4, 4)), ({"type": "Pad", "padding": 1}, (1, 4, 4)),
    ({"type": "EnlargeBilinear", "rows": [2], "cols": 2}, (1, 4, 4)),
    ({"type": "AdaptiveAvgPool2d", "output_size": None}, (1, 4, 4)),
    ({"type": "Graph", "modules": [{"type": "Reshape", "shape": [1, 3]},
                                   {"type": "Add", "signs": [1, 1]}], "sources": [[0], [0, 1]]}, (3,)),
])  # fmt: skip
def test_what_torch_computes_otherwise_is_refused_by_both(
    config: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    seen = Counter[str]()
    base = {"Conv2d": nn.Conv2d(2, 1, 1, bias=False)}.get(config["type"], nn.Identity())
    assert fault(tmp_path, config, shape, base, seen) is None
    assert set(seen) == {"refused, refused"}


@pytest.mark.parametrize("dim", [-1, -2, 1, 2])
def test_dimensions_are_counted_as_torch_does(dim: int, tmp_path: Path) -> None:
    seen = Counter[str]()
    assert fault(tmp_path, {"type": "Softmax", "dim": dim}, (3, 4), nn.Identity(), seen) is None
    assert set(seen) == {"loaded, checked"}


@pytest.mark.thorough
@pytest.mark.parametrize("case", range(len(BASES)), ids=[type(module).__name__ for module, _ in BASES])
def test_no_forged_network_is_taken(case: int) -> None:
    alike = sum(type(module) is type(BASES[case][0]) for module, _ in BASES)
    assert faults(case, 0.04 if alike < 3 else 0.02, False)[0] == []


def test_words_for_true_and_false(tmp_path: Path) -> None:
    import torch

    for value in (True, "no", 1, None):
        config = {"type": "Linear", "in_features": 3, "out_features": 2, "bias": value}
        stored = {"0.weight": torch.ones(2, 3), "0.bias": torch.ones(2)}
        write(tmp_path, config, (3,), stored)
        network, arrays, _ = k.load_network(tmp_path)
        if value is True:
            assert modules.load(tmp_path)(torch.ones(1, 3)).tolist() == [[4.0, 4.0]]
            assert k.Network(network["network"], arrays).gain == pytest.approx(6**0.5)
            continue
        with pytest.raises(DataError, match="bias"):
            lipkit.load(tmp_path)
        with pytest.raises(k.Refused, match="bias"):
            k.Network(network["network"], arrays)


def test_keys_that_stand_twice(tmp_path: Path) -> None:
    write(tmp_path, {"type": "LeakyReLU", "negative_slope": 0.5}, (2,), {})
    assert len(lipkit.load(tmp_path)) == 1
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"negative_slope"', '"negative_slope": 0.1, "negative_slope"'))
    with pytest.raises(DataError, match="a key twice"):
        lipkit.load(tmp_path)
    with pytest.raises(k.Refused, match="twice"):
        k.load_network(tmp_path)


def test_multipliers_and_chains_stand_as_lipkit_writes_them() -> None:
    chain: dict[str, Any] = {"type": "Network", "input_shape": [2], "multipliers": {}}
    parts = [{"type": "ReLU"}]
    bad = [({}, [*parts, {**chain, "modules": parts}])] + [({key: 2}, parts) for key in ("1", "00", " 0", "-1", "x")]
    for multipliers, modules_ in [*bad, ({"0": True}, parts), ({"0": 2.0}, parts), ([2], parts)]:
        config = {**chain, "modules": modules_, "multipliers": multipliers}
        with pytest.raises(k.Refused):
            k.Network(config, {f"multiplier{i}": np.ones(2) for i in multipliers})
    good = k.Network({**chain, "modules": parts, "multipliers": {"0": 2}}, {"multiplier0": np.ones(2)})
    assert good.gain == 1
