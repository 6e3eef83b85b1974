"""The SLL networks: sizes as printed, gain as asked for, certificates as of any network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipkit.certificates import certify
from lipkit.errors import OptionError, ShapeError
from lipkit.lowering import export, lipschitz
from lipkit.models import build, sllnet
from lipkit.modules import load, save
from lipkit.testing import dense_matrix


def count(**options: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in sllnet(**options).parameters())  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "millions", "tiny"), [("small", 41, 165), ("medium", 78, 314), ("large", 118, None), ("xlarge", 236, None)]
)
def test_the_sizes_have_the_printed_numbers_of_parameters(size: str, millions: int, tiny: int | None) -> None:
    # [LBDN] table 2 prints 41M, 78M and 118M, table 3 236M; 165M and 314M for Tiny-ImageNet: whole millions.
    assert count(size=size, classes=100) // 10**6 == millions
    if tiny is not None:
        assert count(size=size, classes=200, input_shape=(3, 64, 64)) // 10**6 == tiny
    assert count(size="small", classes=200, input_shape=(3, 64, 64), last_layer_normalization=True) // 10**6 == 167


def test_the_number_by_hand() -> None:
    convolutions = 2 * (5 * 4 * 9 + 5 + 5)
    dense = 3 * 16 + 3 + 3 + 7 * 16 + 7 + 7
    assert count(channels=4, depth=2, dense=[3, 7], input_shape=(3, 8, 8)) == convolutions + dense


@pytest.mark.thorough
@pytest.mark.parametrize("last", [False, True])
def test_gain_and_certificate_of_the_export(last: bool, tmp_path) -> None:
    torch.manual_seed(0)
    options = {"channels": 4, "depth": 2, "dense": [8, 8], "input_shape": (3, 8, 8), "classes": 5}
    net = build("sllnet", **options, last_layer_normalization=last, lipschitz=2.0).double()
    plain = export(net, (3, 8, 8))
    x = torch.rand(6, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(plain(x), net(x))
    if not last:
        assert 2 <= float(lipschitz(plain)) < 2 * (1 + 1e-9)
    certificate = certify(plain, x, torch.arange(6) % 5)
    assert certificate.radius.shape == (6,)
    assert float(certificate.radius.max()) > 0
    loaded = load(save(plain, tmp_path / "net"))
    assert torch.equal(loaded(x), plain(x))


def test_the_pooling_has_norm_one() -> None:
    pool = next(m for m in sllnet(channels=3, depth=1, dense=[2]) if isinstance(m, nn.AvgPool2d))
    norm = torch.linalg.matrix_norm(torch.as_tensor(dense_matrix(pool, (1, 8, 8))), 2)
    assert float(norm) == pytest.approx(1, rel=1e-12)


def test_refusals() -> None:
    with pytest.raises(OptionError, match="size: expected one of small, medium, large, xlarge, got 'huge'"):
        sllnet("huge")
    with pytest.raises(OptionError, match="channels: expected at least the 3 of the images, got 2"):
        sllnet(channels=2)
    with pytest.raises(OptionError, match="at least 100 features, one for each class, got 12"):
        sllnet(channels=3, input_shape=(3, 8, 8), classes=100)
    with pytest.raises(ShapeError, match="multiples of 4"):
        sllnet(input_shape=(3, 30, 30))
    with pytest.raises(OptionError, match="last_layer_normalization: expected True or False, got 1"):
        sllnet(last_layer_normalization=1)  # type: ignore[arg-type]
