"""Rules of convolutions against the dense matrix of the layer that torch runs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import lipkit
from lipkit.errors import NoRuleError, ShapeError
from lipkit.modules.convolutions import copies

EXACT = 1 - 1e-12


def truth(layer: nn.Module, shape: tuple[int, ...]) -> float:
    layer = layer.double()
    with torch.no_grad():
        for p in layer.parameters():
            if p.ndim == 1:
                p.zero_()
        eye = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
        return float(np.linalg.norm(layer(eye).flatten(1).numpy(), 2))


@pytest.mark.thorough
@pytest.mark.usual(16)
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(
    ("k", "padding", "size"),
    [(3, 1, 6), (3, 1, 3), (5, 2, 5), (5, 2, 3), (3, 2, 5), ((1, 5), (0, 2), 4), (3, (2, 1), 3), (1, 1, 4)],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_borders_that_copy(mode: str, k: int, padding: int, size: int, groups: int) -> None:
    torch.manual_seed(0)
    for stride in (1, 2):
        layer = nn.Conv2d(2, 4, k, padding=padding, padding_mode=mode, groups=groups, stride=stride)
        with torch.no_grad():
            layer.weight.abs_()  # low-pass: borders count most
        exact = truth(layer, (2, size, size))
        known, unknown = (lipkit.lipschitz(layer, s).item() for s in ((2, size, size), None))
        assert exact * EXACT <= known <= unknown
        assert known <= 7 * exact


def test_a_bound_without_the_border_would_be_wrong() -> None:
    layer = nn.Conv1d(1, 1, 3, padding=1, padding_mode="replicate", bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[1.0, 0.0, 0.0]]]))
    assert truth(layer, (1, 5)) == pytest.approx(math.sqrt(2))
    assert math.sqrt(2) <= lipkit.lipschitz(layer, (1, 5)).item() <= math.sqrt(2) * 1.01


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "zeros"])
def test_copies_are_counted_as_torch_makes_them(mode: str) -> None:
    for n, before, after in itertools.product(range(1, 7), range(4), range(4)):
        if max(before, after) > {"reflect": n - 1, "circular": n}.get(mode, 9):
            continue
        image = torch.arange(n, dtype=torch.float64).reshape(1, 1, n)
        torch_mode = {"mode": "constant", "value": -1} if mode == "zeros" else {"mode": mode}
        padded = nn.functional.pad(image, (before, after), **torch_mode)
        most = max(int((padded == i).sum()) for i in range(n))
        assert most == copies(mode, before, after, n)
        assert most <= copies(mode, before, after, None)


ONE_D = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 5, "padding": 0, "stride": 2},
    {"kernel_size": 4, "padding": 3, "dilation": 2},
    {"kernel_size": 3, "padding": "same", "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 2, "dilation": 2, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
]


@pytest.mark.parametrize("options", ONE_D, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_one_dimension(options: dict[str, object], groups: int) -> None:
    torch.manual_seed(1)
    layer = nn.Conv1d(4, 6, groups=groups, **options)  # type: ignore[arg-type]
    exact = truth(layer, (4, 9))
    for shape in ((4, 9), None):
        assert exact * EXACT <= lipkit.lipschitz(layer, shape).item() <= 2 * exact
    if options.get("padding") == "same":
        assert lipkit.lipschitz(layer, (4, 9)).item() <= exact * (1 + 1e-10)


TRANSPOSED = [
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 4, "stride": 3, "dilation": 2, "output_padding": 2},
    {"kernel_size": 2, "stride": 3, "padding": 2},
]


@pytest.mark.parametrize("options", TRANSPOSED, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d])
def test_transposed(kind: type[nn.Module], options: dict[str, object], groups: int) -> None:
    torch.manual_seed(2)
    layer = kind(4, 6, groups=groups, **options)
    shape = (4, 7) if kind is nn.ConvTranspose1d else (4, 5, 4)
    exact = truth(layer, shape)
    for known in (shape, None):
        assert exact * EXACT <= lipkit.lipschitz(layer, known).item() <= 2.5 * exact


@pytest.mark.parametrize("kind", [nn.Conv3d, nn.ConvTranspose3d])
def test_three_dimensions_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(
        NoRuleError, match=f"nn.{kind.__name__}: expected a convolution of one or two dimensions, got three"
    ):
        lipkit.lipschitz(kind(1, 1, 3))


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (nn.Conv1d(2, 2, 3), (2, 5, 5)),
        (nn.Conv2d(2, 2, 3), (2, 5)),
        (nn.ConvTranspose1d(2, 2, 3), (2, 5, 5)),
        (nn.ConvTranspose2d(2, 2, 3), (2, 5)),
    ],
)
def test_a_batch_is_not_taken_for_channels(layer: nn.Module, wrong: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"dimensions without the batch, got"):
        lipkit.lipschitz(layer, wrong)
    with pytest.raises(ShapeError):
        lipkit.export(layer, wrong)


def test_another_padding_mode_is_refused() -> None:
    layer = nn.Conv2d(1, 1, 3, padding=1)
    layer.padding_mode = "mirror"
    with pytest.raises(NoRuleError, match="got 'mirror'"):
        lipkit.lipschitz(layer)
    up = nn.ConvTranspose2d(1, 1, 3)
    up.padding_mode = "circular"
    with pytest.raises(NoRuleError, match="expected padding_mode 'zeros', got 'circular'"):
        lipkit.lipschitz(up)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 6)),
        (nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
        (nn.ConvTranspose1d(2, 3, 2, stride=2), (2, 3)),
    ],
)
def test_export_copies(layer: nn.Module, shape: tuple[int, ...]) -> None:
    plain = lipkit.export(layer, shape)
    x = torch.randn(2, *shape)
    assert torch.equal(plain(x), layer(x))
    assert not any(p.requires_grad for p in plain.parameters())


# Windows that overlap or not, sizes that the stride divides or not, one axis strided, borders, groups.
STRIDED = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": (1, 3), "stride": (1, 2)},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 5, "stride": 2, "padding": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 4, "stride": 2, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 3, "stride": 2, "padding": 1, "padding_mode": "replicate"},
    {"kernel_size": 2, "stride": 2, "dilation": 2},
    {"kernel_size": 2, "stride": 2, "dilation": 3},
    {"kernel_size": 1, "stride": 2, "dilation": 3},
]


@pytest.mark.thorough
@pytest.mark.usual(22)
@pytest.mark.parametrize("options", STRIDED, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_strides(kind: type[nn.Module], options: dict[str, object], groups: int) -> None:
    if kind is nn.ConvTranspose2d and options.get("padding_mode", "zeros") != "zeros":
        pytest.skip("transposed convolutions have zero padding only")
    for seed, size in ((0, 6), (1, 7), (2, 8), (2, 7)):
        torch.manual_seed(seed)
        layer = kind(4, 2, groups=groups, bias=False, **options)
        if seed == 2:
            with torch.no_grad():
                layer.weight.abs_()
        exact = truth(layer, (4, size, size))
        for shape in ((4, size, size), None):
            assert exact * EXACT <= lipkit.lipschitz(layer, shape).item()


@pytest.mark.parametrize(("padding_mode", "slack"), [("zeros", 0.03), ("circular", 1e-10)])
def test_a_strided_bound_is_tight(padding_mode: str, slack: float) -> None:
    """Where the stride is not used it is up to twice as large: more than 1.2 times for these kernels."""
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 8, 3, stride=2, padding=1, padding_mode=padding_mode, bias=False)
    exact = truth(layer, (2, 16, 16))
    assert exact * EXACT <= lipkit.lipschitz(layer, (2, 16, 16)).item() <= (1 + slack) * exact
    same = nn.Conv2d(2, 8, 3, padding=1, padding_mode=padding_mode, bias=False)
    same.weight.data = layer.weight.data
    assert lipkit.lipschitz(same, (2, 16, 16)).item() > 1.2 * exact


def test_windows_that_do_not_overlap_are_one_matrix() -> None:
    """The patch embedding of a vision transformer: no longer than its matrix."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 16, 4, stride=4)
    exact = np.linalg.norm(layer.weight.detach().double().flatten(1).numpy(), 2)
    assert lipkit.lipschitz(layer, (3, 16, 16)).item() == pytest.approx(exact, rel=1e-12)


def test_the_image_may_be_no_multiple_of_the_stride() -> None:
    """On three pixels of a circle the second window of stride 2 meets the first one again."""
    layer = nn.Conv1d(1, 1, 2, stride=2, padding=1, padding_mode="circular", bias=False)
    layer.weight.data.fill_(1.0)
    with pytest.raises(NoRuleError, match="at most"):
        lipkit.lipschitz(layer, (1, 3))
    layer = nn.Conv1d(1, 1, 3, stride=2, padding=1, padding_mode="circular", bias=False)
    layer.weight.data.fill_(1.0)
    exact = truth(layer, (1, 3))
    assert exact == pytest.approx(math.sqrt(6))  # two windows, both all three pixels
    assert exact * EXACT <= lipkit.lipschitz(layer, (1, 3)).item()
