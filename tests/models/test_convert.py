"""Conversion of ordinary networks: shapes, starts, reports, and that the original stays as it was."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipkit
from lipkit.conv import circular_conv2d
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import families
from lipkit.linalg import cayley, polar
from lipkit.models import convert
from lipkit.models.constrained import inverse_cayley, kernel_size, obstacle, start_near, unstrided_kernel

CONVERTIBLE = [name for name in families.names() if name not in ("sll", "cpl")]


class Block(nn.Module):
    """A residual block with its own forward."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.norm(self.conv1(x))))


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), Block(8), nn.Flatten(), nn.Linear(8 * 4 * 4, 5)
    )


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Conv2d(2, 3, 5, stride=2, padding=2),
        nn.Conv2d(2, 3, (3, 5), stride=2, padding=(1, 2)),
        nn.Conv2d(2, 3, 4, stride=2, padding=1),
        nn.Conv2d(2, 3, 3, stride=3),
        nn.Conv2d(2, 3, 1, stride=2),
        nn.Conv2d(2, 3, 2, stride=2),
        nn.Conv2d(2, 3, 3, padding="same"),
        nn.Conv2d(2, 3, 5, padding=2),
    ],
    ids=repr,
)
def test_the_unstrided_kernel_is_the_same_map(conv: nn.Conv2d) -> None:
    assert obstacle(conv) is None
    twin = copy.deepcopy(conv).double()
    x = torch.randn(2, 2, 12, 12, dtype=torch.float64)
    kernel = unstrided_kernel(twin)
    assert kernel.shape[2:] == kernel_size(twin)
    # The reference reads its input around the border; taps before the first pixel are its left padding.
    kh, kw = twin.kernel_size
    top, left = ((kh - 1) // 2, (kw - 1) // 2) if twin.padding == "same" else twin.padding
    wrapped = x.roll((top, left), (-2, -1))
    wrapped = torch.cat((wrapped, wrapped[:, :, :kh]), 2)
    wrapped = torch.cat((wrapped, wrapped[:, :, :, :kw]), 3)
    step = twin.stride[0]
    reference = F.conv2d(wrapped, twin.weight, stride=step)[:, :, : 12 // step, : 12 // step]
    found = circular_conv2d(F.pixel_unshuffle(x, step), kernel)
    assert torch.allclose(found, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("conv", "word"),
    [
        (nn.Conv2d(4, 4, 3, groups=2, padding=1), "groups=2"),
        (nn.Conv2d(4, 4, 3, dilation=2, padding=2), "dilation"),
        (nn.Conv2d(4, 4, 3), "padding 0"),
        (nn.Conv2d(4, 4, 3, padding="valid"), "valid"),
        (nn.Conv2d(4, 4, 3, stride=(1, 2), padding=1), "stride"),
        (nn.Conv2d(4, 4, 3, padding=2), "padding 2"),
    ],
)
def test_what_changes_the_size_is_kept_and_named(conv: nn.Conv2d, word: str) -> None:
    result = convert(nn.Sequential(conv), "lot")
    assert not result.converted
    assert word in result.kept[0].reason
    assert type(result.model[0]) is nn.Conv2d


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_every_family_converts_a_network_with_its_own_forward(name: str) -> None:
    torch.manual_seed(0)
    model = network()
    before = copy.deepcopy(model.state_dict())
    # ECO's kernels divide the image, so 3 x 3 does not fit 4 x 4.
    size = 12 if name == "eco" else 8
    if name == "eco":
        model[4] = nn.Linear(8 * 6 * 6, 5)
        before = copy.deepcopy(model.state_dict())
    result = convert(model, name, input_shape=(3, size, size))
    assert [row.name for row in result.converted] == ["0", "2.conv1", "2.conv2", "4"]
    assert [row.name for row in result.kept] == ["2.norm"]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    block = result.model[2]
    assert isinstance(block, Block)
    x = torch.randn(2, 3, size, size)
    out = result.model.train()(x)
    out.square().sum().backward()
    assert out.shape == (2, 5)
    bound = lipkit.lipschitz(block.conv1.eval(), (8, size // 2, size // 2))
    assert bound.item() < (1.1 if name == "svcm" else 1.05)  # its projections end near 1


@pytest.mark.parametrize("name", ["lot", "svcm"])
def test_a_feasible_convolution_keeps_its_function(name: str) -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", dtype=torch.float64)
    with torch.no_grad():
        conv.weight.zero_()
        nn.init.orthogonal_(conv.weight[:, :, 0, 2])
    result = convert(nn.Sequential(conv), name, input_shape=(4, 6, 6))
    assert (result.converted[0].start, result.converted[0].note) == ("nearest", "")
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    assert torch.allclose(result.model(x), conv(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)])
@pytest.mark.parametrize("name", ["rko", "lot", "cayley"])
def test_dense_layers_start_at_the_polar_factor(name: str, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(*shape, generator=generator, dtype=torch.float64)
    wanted = scipy.linalg.polar(weight.numpy(), side="right" if shape[0] >= shape[1] else "left")[0]
    if shape[0] == shape[1] and np.linalg.det(wanted) < 0:
        weight[0] *= -1
        wanted = scipy.linalg.polar(weight.numpy())[0]
    linear = nn.Linear(shape[1], shape[0], dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(weight)
    result = convert(linear, name)
    assert result.converted[0].start == "nearest"
    assert np.allclose(result.model.weight().detach().numpy(), wanted, rtol=0, atol=1e-10)
    assert torch.equal(result.model.bias, linear.bias)


def test_inverse_cayley_returns_to_its_argument_and_refuses_what_has_none() -> None:
    for m, n in ((6, 6), (6, 3), (3, 6), (4, 1)):
        q = cayley(torch.randn(m, n, generator=torch.Generator().manual_seed(m + n), dtype=torch.float64))
        raw = inverse_cayley(q)
        assert raw is not None
        assert torch.allclose(cayley(raw), q, rtol=0, atol=1e-11)
    assert inverse_cayley(torch.diag(torch.tensor([1.0, 1.0, -1.0]))) is None
    reflection = nn.Linear(3, 3)
    with torch.no_grad():
        reflection.weight.copy_(torch.diag(torch.tensor([1.0, 1.0, -1.0])))
    assert convert(reflection, "cayley").converted[0].start == "own start"


def test_rko_starts_at_the_polar_factor_of_the_matrix() -> None:
    kernel = torch.randn(3, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer = families.get("rko").conv(4, 3, 3, dtype=torch.float64)
    assert start_near(layer, kernel) == "nearest"
    assert torch.allclose(layer.kernel().flatten(1) * 3, polar(kernel.flatten(1)), rtol=0, atol=1e-10)


def test_svcm_is_projected_where_its_image_is_known() -> None:
    conv = nn.Conv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        conv.weight *= 3
    known, unknown = (convert(conv, "svcm", input_shape=shape, orthogonal=False) for shape in ((4, 8, 8), None))
    assert (known.converted[0].start, unknown.converted[0].start) == ("nearest", "not projected yet")
    assert lipkit.lipschitz(known.model, (4, 8, 8)).item() < 1.02 < lipkit.lipschitz(unknown.model, (4, 8, 8)).item()


def test_rescaled_families_keep_the_direction() -> None:
    kernel = 5 * torch.randn(3, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer = families.get("ossn").conv(4, 3, 3, dtype=torch.float64)
    assert start_near(layer, kernel) == "rescaled"
    made = layer.kernel(8, 8).detach()
    cosine = float((made * kernel).sum() / (made.norm() * kernel.norm()))
    assert math.isclose(cosine, 1, abs_tol=1e-12)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_weight_without_a_nearest_one_leaves_the_own_start(bad: float) -> None:
    layer = families.get("lot").conv(2, 2, 3)
    before = layer.free.detach().clone()
    assert start_near(layer, torch.full((2, 2, 3, 3), bad)) == "own start"
    assert torch.equal(layer.free, before)


def test_a_module_used_twice_is_replaced_once() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    result = convert(model, "cayley")
    assert result.model[0] is result.model[2]
    assert type(result.model[2]).__name__ == "CayleyLinear"
    assert float(lipkit.lipschitz(result.model)) == 1.0


def test_layers_that_no_family_replaces_are_reported() -> None:
    torch.manual_seed(0)
    steep, dropout = nn.ConvTranspose2d(3, 3, 2, stride=2), nn.Dropout()
    steep.weight.data *= 9
    model = nn.Sequential(steep, nn.PReLU(), nn.ReLU(), nn.GELU(), nn.MaxPool2d(3, 2), nn.MaxPool2d(2), dropout)
    reasons = {row.name: row.reason for row in convert(model, "cayley").kept}
    assert reasons.pop("0") == f"its constant is {float(lipkit.lipschitz(steep).detach()):.4g}"
    assert reasons == {
        "1": "no family replaces it: its constant may grow in training",
        "3": "its constant is 1.129",
        "4": "its constant is 2",
    }


def test_skip_refusals_and_unknown_words() -> None:
    result = convert(network(), "lot", skip=["2"], input_shape=(3, 8, 8))
    assert [row.name for row in result.converted] == ["0", "4"]
    assert [row.reason for row in result.kept] == ["skipped", "skipped"]
    with pytest.raises(OptionError, match="expected names of modules of the model, got \\['tail'\\]"):
        convert(network(), "lot", skip=["tail"])
    with pytest.raises(OptionError, match="contain their activation"):
        convert(network(), "sll")
    with pytest.raises(OptionError, match="expected options of the family 'lot', got \\['wrong'\\]"):
        convert(network(), "lot", wrong=1)
    with pytest.raises(OptionError, match="layer: expected one of"):
        convert(network(), "nonsense")
    with pytest.raises(ShapeError, match=r"Sequential does not accept inputs of shape \(4, 8, 8\): .*channels"):
        convert(network(), "lot", input_shape=(4, 8, 8))


def test_options_that_do_not_go_together() -> None:
    net, shape = nn.Sequential(nn.Linear(2, 2)), (2,)
    for options, words in (
        ({"forward": "new"}, "forward: expected 'keep' or 'rebuild', got 'new'"),
        ({"forward": "rebuild"}, "input_shape: expected the shape of one input, to run the model on, got None"),
        ({"layer": None}, "input_shape: expected the shape of one input"),
        ({"layer": None, "input_shape": shape, "forward": "rebuild"}, "layer: expected a family for forward='rebuild'"),
        ({"layer": None, "input_shape": shape, "factor": 2}, "layer: expected a family for .*{'factor': 2}, got None"),
        ({"input_shape": shape, "activation": "maxmin"}, "activation: expected None where the forward pass is kept"),
        ({"input_shape": shape, "box": (0, 1)}, "box: expected None where the forward pass is kept, got"),
        ({"input_shape": shape, "forward": "rebuild", "skip": ["0"]}, "skip: expected no names where .* rebuilt"),
    ):
        with pytest.raises(OptionError, match=words):
            convert(net, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [True, False])
def test_parametrised_layers_are_settled_first_and_layers_that_lie_are_kept(training: bool) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    other = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    model = nn.Sequential(spectral, nn.ReLU(), Doubled(4, 4), other, spectral).train(training)
    before = copy.deepcopy(model.state_dict())
    result = convert(model, "cayley", input_shape=(4,), skip=["3"])
    assert [(row.name, row.new) for row in result.converted] == [("0", "CayleyLinear")]
    assert [row.name for row in result.kept] == ["2", "3"]
    assert result.model[0] is result.model[4]
    assert type(result.model[2]) is Doubled
    assert all(m.training is training for m in result.model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with pytest.raises(NoRuleError, match=r"convert: .* got other outputs at '2', Doubled as Linear"):
        convert(model, None, input_shape=(4,))
    kept = convert(model, "cayley").kept
    assert "with input_shape, it becomes a plain layer" in next(r.reason for r in kept if r.name == "0")


def test_a_network_that_reads_its_layers_from_outside_is_not_settled() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1 + hasattr(self.layer, "parametrizations"))

    with pytest.raises(NoRuleError, match="got other outputs at the network"):
        convert(Reads(), None, input_shape=(3,))
    result = convert(Reads(), "cayley", input_shape=(3,))
    assert not result.converted
    assert hasattr(result.model.layer, "parametrizations")


def test_sizes_that_do_not_fit_are_kept_and_hooks_removed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.Flatten())
    result = convert(model, "eco", input_shape=(3, 9, 9))
    assert [row.name for row in result.converted] == ["0"]
    assert result.kept[0].reason == "the stride 2 does not divide its image of 9 x 9"
    assert not any(m._forward_pre_hooks for m in result.model.modules())
    assert all(m.training for m in result.model.modules())
    result = convert(model, "eco", input_shape=(3, 8, 8))
    assert "eco accepts kernels that divide the image" in result.kept[0].reason


def test_hooks_unknown_modules_and_half_precision() -> None:
    class Unknown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    model = nn.Sequential(nn.Linear(3, 3), Unknown(), nn.Linear(3, 3).to(torch.bfloat16))
    model[0].register_forward_hook(lambda *_: None)
    result = convert(model, "cayley")
    assert [(row.name, row.kind) for row in result.kept] == [("0", "Linear"), ("1", "Unknown")]
    assert "hooks" in result.kept[0].reason
    assert result.model[2].free.dtype is torch.float32


class ByName(nn.Module):
    """Hands its convolution the image by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv: nn.Module = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(input=x)
        return y


def test_a_layer_may_get_its_input_by_name() -> None:
    model = ByName()
    with pytest.raises(OptionError, match=r"one input, by position, got .* unexpected keyword argument 'input'"):
        convert(model, "lot", input_shape=(3, 6, 6))
    model.conv = nn.utils.parametrizations.weight_norm(model.conv)
    assert [row.name for row in convert(model, None, input_shape=(3, 6, 6)).converted] == ["conv"]


def test_one_name_to_skip_is_not_taken_letter_by_letter() -> None:
    with pytest.raises(OptionError, match="skip: expected a list of names, got '10'"):
        convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), skip="10")
