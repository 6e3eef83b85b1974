"""Unconstrained networks: published shapes and sizes, and that they can be exported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipkit.errors import OptionError, ShapeError
from lipkit.lowering import export, lipschitz
from lipkit.models import build, wrn_plain
from lipkit.modules import Graph


def test_wrn_28_10_has_the_published_size_and_depth() -> None:
    with torch.device("meta"):
        model = wrn_plain()
    assert sum(p.numel() for p in model.parameters()) == 36_479_194
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert sum(m.kernel_size == (3, 3) for m in convs) == 25
    assert [(m.in_channels, m.out_channels, m.stride) for m in convs if m.kernel_size == (1, 1)] == [
        (16, 160, (1, 1)), (160, 320, (2, 2)), (320, 640, (2, 2))
    ]  # fmt: skip
    assert sum(isinstance(m, Graph) for m in model.modules()) == 12
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 25


def test_a_block_is_the_published_one() -> None:
    """The whole of WRN-10-1 written out, with torch's functions."""
    torch.manual_seed(0)
    model = wrn_plain(10, 1, input_shape=(2, 8, 8), classes=3).double().eval()
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    h = convs[0](x)
    h = h + convs[2](torch.relu(norms[1](convs[1](torch.relu(norms[0](h))))))  # same width: the skip is the identity
    for i in (1, 2):
        first, second, skip = convs[3 * i : 3 * i + 3]
        active = torch.relu(norms[2 * i](h))
        h = second(torch.relu(norms[2 * i + 1](first(active)))) + skip(active)
    expected = model[-1](torch.relu(norms[-1](h)).mean((2, 3)))
    assert torch.allclose(model(x), expected, atol=1e-10)


@pytest.mark.thorough
def test_resnet_101_has_the_published_size_and_depth() -> None:
    with torch.device("meta"):
        model, smaller = build("resnet_plain"), build("resnet_plain", blocks=(3, 4, 6, 3))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, smaller)]
    assert sizes == [44_549_160, 25_557_032]  # of ResNet-101 and ResNet-50 with 1000 classes
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len([m for m in convs if m.kernel_size == (3, 3)]) == 33
    assert [m.in_channels for m in convs if m.stride == (2, 2)] == [3, 128, 256, 256, 512, 512, 1024]


def test_a_bottleneck_is_the_published_one() -> None:
    """The whole of a network of one block a stage, with torch's functions."""
    torch.manual_seed(0)
    model = build("resnet_plain", blocks=[1, 1, 1, 1], width=2, input_shape=(3, 32, 64), classes=3).double()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias)
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    pairs = iter(zip(convs, norms, strict=True))

    def step(h: torch.Tensor) -> torch.Tensor:
        conv, norm = next(pairs)
        y = nn.functional.conv2d(h, conv.weight, None, conv.stride, conv.padding)
        return nn.functional.batch_norm(y, None, None, norm.weight, norm.bias, training=True)

    x = torch.randn(2, 3, 32, 64, dtype=torch.float64)
    h = nn.functional.max_pool2d(torch.relu(step(x)), 3, 2, 1)
    for _ in range(4):
        body = step(torch.relu(step(torch.relu(step(h)))))
        h = torch.relu(body + step(h))
    assert h.shape == (2, 64, 1, 2)
    assert torch.allclose(model(x), list(model)[-1](h.mean((2, 3))), atol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("resnet_plain", {"blocks": [1, 2, 1, 1], "width": 2}, (3, 32, 32)),
        ("wrn_plain", {"depth": 10, "widen": 1, "dropout": 0.2}, (3, 12, 8)),
        ("convnet", {}, (1, 8, 8)),
        ("convnet", {"width": 2, "batch_norm": False}, (3, 28, 28)),
    ],
)
def test_they_train_and_export(name, options, shape) -> None:
    torch.manual_seed(0)
    model = build(name, input_shape=shape, classes=4, mean=[0.4] * shape[0], std=[0.3] * shape[0], **options)
    x = torch.rand(5, *shape)
    model(x).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    model.eval()
    exported = export(model, shape)
    assert torch.allclose(exported(x), model(x), atol=1e-4)
    assert exported(x).shape == (5, 4)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("wrn_plain", {"depth": 27}, OptionError),
        ("wrn_plain", {"widen": 0}, OptionError),
        ("wrn_plain", {"dropout": 1.0}, OptionError),
        ("wrn_plain", {"input_shape": (3, 30, 32)}, ShapeError),
        ("convnet", {"width": 0}, OptionError),
        ("convnet", {"batch_norm": 1}, OptionError),
        ("convnet", {"input_shape": (1, 6, 8)}, ShapeError),
        ("convnet", {"classes": 1}, OptionError),
    ],
)
def test_refusals(name, options, error) -> None:
    with pytest.raises(error):
        build(name, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("kwlarge", {"layer": "plain", "dense": [24, 16], "activation": "relu"}, (3, 8, 8)),
        ("kwlarge", {"layer": "plain_conv", "dense": [24, 16]}, (1, 8, 12)),
        ("lipconvnet", {"layer": "plain_conv", "width": 0.0625}, (3, 32, 32)),
        ("lipconvnet", {"layer": "plain", "width": 0.0625, "depth": 10}, (3, 24, 24)),
        ("resnet9", {"layer": "plain_conv", "width": 4}, (3, 16, 16)),
        ("wide_resnet", {"layer": "plain", "widen": 1}, (3, 16, 16)),
    ],
)
def test_unconstrained_counterparts_have_strides_and_whole_kernels(name, options, shape) -> None:
    torch.manual_seed(0)
    model = build(name, input_shape=shape, classes=4, **options).double()
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    dense = [m for m in model.modules() if isinstance(m, nn.Linear)]
    mode = "circular" if options["layer"] == "plain_conv" else "zeros"
    assert convs
    assert {m.padding_mode for m in convs} == {mode}
    assert bool(dense) == (options["layer"] == "plain")
    if name in ("kwlarge", "lipconvnet"):
        strided = [m for m in convs if m.stride != (1, 1)]
        assert [m.kernel_size for m in strided] == [(3, 3)] * (2 if name == "kwlarge" else 4)
    x = torch.rand(3, *shape, dtype=torch.float64)
    y = model.eval()(x)
    assert y.shape == (3, 4)
    exported = export(model, shape)
    assert torch.allclose(exported(x), y, atol=1e-9)
    assert float(lipschitz(exported)) > 0


def test_wrong_options_of_plain_convolutions_are_refused() -> None:
    with pytest.raises(OptionError, match="expected an odd number for plain convolutions, got 2"):
        build("kwlarge", layer="plain", kernel_size=2)
    with pytest.raises(OptionError, match=r"sandwich, .*plain, plain_conv, got 'plane'"):
        build("kwlarge", layer="plane")
    with pytest.raises(OptionError, match="padding: expected 1 for kernel_size 3, got 0"):
        build("kwlarge", layer="plain_conv", padding=0)
