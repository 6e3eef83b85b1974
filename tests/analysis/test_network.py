from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.architectures import settle
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lipkit
from lipkit import certificates
from lipkit.analysis import analyze, layers
from lipkit.analysis.layers import folded_bound, shared_tolerances
from lipkit.bounds import symbol_sup
from lipkit.errors import CertificateViolation, NoRuleError, OptionError, ShapeError
from lipkit.testing.reference import dense_matrix


def test_a_chain_is_the_product_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    product = math.prod(torch.linalg.matrix_norm(model[i].weight.detach(), 2).item() for i in (0, 2))
    found = analyze(model, (3,), restarts=0)
    assert product <= found.upper <= product * (1 + 1e-9)
    assert found.lower == 0
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    assert lipkit.lipschitz(model).item() == pytest.approx(found.upper, rel=1e-12)


def test_printed_bounds_are_bounds() -> None:
    layer = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(layer.weight, 1 + 2.0**-24)  # 1 to six digits
    (row,) = [line for line in analyze(layer, (1,)).describe(everything=True).splitlines() if "Linear" in line]
    assert " 1.00001 " in row
    nn.init.constant_(layer.weight, 1 - 2.0**-24)
    assert "L >= 0.999999 (found" in analyze(layer, (1,), restarts=1).describe()


def test_sum_concatenation_and_shared_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            y = self.f(self.f(x))
            return torch.cat((y - x, 2 * x, x / 4), 1)

    model = Net().double()
    model.f.weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0])))
    found = analyze(model, (2,), restarts=0)
    assert found.upper == pytest.approx(math.sqrt(10**2 + 2**2 + 0.25**2), rel=1e-9)
    assert sum(layer.name == "f" for layer in found.layers) == 2


def test_branches_on_disjoint_pieces_count_by_their_maximum() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            a, b = x.split(2, dim=1)
            return torch.cat((self.f(a), 2 * b), 1)

    model = Net().double()
    model.f.weight.data.copy_(3 * torch.eye(2))
    assert analyze(model, (4,), restarts=0).upper == pytest.approx(3, rel=1e-9)


class Lambda(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.thorough
def test_slices_without_common_entries_count_by_their_maximum() -> None:
    apart = Lambda(lambda x: torch.cat((3 * x[:, :2], 2 * x[:, 2:]), 1))
    assert analyze(apart, (4,), restarts=0).upper == pytest.approx(3, rel=1e-9)
    together = Lambda(lambda x: torch.cat((3 * x[:, :3], 2 * x[:, 1:]), 1))
    found = analyze(together, (4,), restarts=2, steps=20)
    assert found.upper == pytest.approx(math.hypot(3, 2), rel=1e-9)
    assert found.lower > 3.5


def test_what_has_no_plain_form_is_bounded_but_not_exported() -> None:
    model = Lambda(lambda x: 4 * torch.logsumexp(x.view(-1, 2, 2), 2).sum(1, keepdim=True))
    found = analyze(model, (4,), restarts=0)
    assert found.upper == pytest.approx(4 * math.sqrt(2))
    rows = [(layer.type, layer.bound) for layer in found.layers if layer.factor != 1]
    assert rows == [("Tensor.sum", pytest.approx(math.sqrt(2))), ("operator.mul", 4.0)]
    with pytest.raises(NoRuleError, match=r"export: torch\.logsumexp.*: it has no plain form"):
        lipkit.export(model, (4,))


@pytest.mark.thorough
def test_factors_are_not_rounded_to_the_format_of_the_network() -> None:
    for divisor in (3.0, 7.0, 10.0):
        upper = analyze(Lambda(lambda x, d=divisor: x / d), (4,), restarts=0).upper
        assert 1 <= Fraction(upper) * Fraction(divisor) <= 1 + Fraction(1, 2**50)
        assert analyze(Lambda(lambda x, d=divisor: (1 / d) * x), (4,), restarts=0).upper == 1 / divisor


def test_a_reversible_block_is_a_matrix_of_gains() -> None:
    class Net(nn.Module):
        def forward(self, x):
            a, b = x.chunk(2, dim=1)
            a = a + 3 * b
            return torch.cat((a, b + 2 * a), 1)

    truth = torch.linalg.matrix_norm(torch.tensor([[1.0, 3.0], [2.0, 7.0]], dtype=torch.float64), 2).item()
    assert analyze(Net(), (4,), restarts=0).upper == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Linear])
def test_batch_normalisation_is_folded(kind: type, groups: int, first: bool) -> None:
    torch.manual_seed(0)
    if kind is nn.Linear:
        linear, norm, shape = nn.Linear(4, 4), nn.BatchNorm1d(4), (4,)
    else:
        linear, norm, shape = nn.Conv2d(4, 4, 3, padding=1, groups=groups), nn.BatchNorm2d(4), (4, 5, 5)
    model = settle(nn.Sequential(norm, linear) if first else nn.Sequential(linear, norm), seed=groups)
    found = analyze(model, shape, restarts=0)
    truth = float(np.linalg.norm(dense_matrix(model, shape), 2))
    assert truth <= found.upper < lipkit.lipschitz(model, shape).item()
    assert found.upper <= truth * (1.3 if kind is nn.Conv2d else 1 + 1e-6)
    assert [layer.name for layer in found.layers if layer.factor != 1] == ["0 + 1"]


@pytest.mark.thorough
def test_a_layer_that_only_a_normalisation_reads_is_bounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def counted(kernel, *, groups, tolerance):
        seen.append(tolerance)
        return symbol_sup(kernel, groups=groups, tolerance=tolerance)

    monkeypatch.setattr(layers, "symbol_sup", counted)
    # A second reader needs the bound of the convolution alone; the normalisation may go with the layer behind it.
    for again, activation, bounds in ((False, True, 2), (True, True, 3), (False, False, 4)):
        seen.clear()
        model = settle(ConvNet(again, activation))
        found = analyze(model, (3, 6, 6), restarts=0)
        assert len(seen) == bounds
        truth = float(np.linalg.norm(dense_matrix(model, (3, 6, 6)), 2))
        assert truth <= found.upper < 3 * truth
        # Both kernels have the mean tolerance in all; the larger one has more of it.
        assert min(seen) < 0.01 < max(seen)
        assert min(seen) + max(seen) == pytest.approx(0.02)


class ConvNet(nn.Module):
    def __init__(self, again: bool = False, activation: bool = True) -> None:
        super().__init__()
        self.activation = nn.LeakyReLU(1.0) if activation else nn.Identity()
        self.conv, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.last, self.again = nn.Conv2d(64, 64, 3, padding=1), again

    def forward(self, x):
        y = self.conv(x)
        z = self.last(self.activation(self.norm(y)) if type(self.activation) is nn.LeakyReLU else self.norm(y))
        return torch.cat((z, y), 1) if self.again else z


def test_what_is_folded_is_still_looked_at() -> None:
    changes = {
        "hooks": lambda layer: layer.register_forward_hook(lambda *_: None),
        "replaced": lambda layer: setattr(layer, "forward", torch.tanh),
        "training": lambda layer: layer.train(),
    }
    for place in ("conv", "norm", "last"):
        for name, change in changes.items():
            if name != "training" or place == "norm":
                model = settle(ConvNet())
                change(model.get_submodule(place))
                with pytest.raises(NoRuleError):
                    analyze(model, (3, 6, 6), restarts=0)


def test_a_convolution_with_a_tolerance_is_guarded_like_one_without() -> None:
    for tolerance in (None, 0.01):
        layer = nn.Conv2d(3, 3, 3)
        assert layers.layer_bound(layer, (3, 5, 5), tolerance=tolerance)[1] == "symbol_sup"
        layer.register_forward_hook(lambda *_: None)
        with pytest.raises(NoRuleError, match="forward hooks"):
            layers.layer_bound(layer, (3, 5, 5), tolerance=tolerance)


@pytest.mark.thorough
@given(prices=st.lists(st.floats(0, 1e9), min_size=1, max_size=20), mean=st.floats(1e-3, 0.1), seed=st.integers(0, 99))
def test_shared_tolerances_keep_their_mean_and_are_cheapest(prices: list[float], mean: float, seed: int) -> None:
    found = np.array(shared_tolerances(prices, mean))
    assert (found >= 1e-4).all()
    assert (found <= 10 * mean + 1e-12).all()
    dear = np.array(prices) > 0
    shares = np.array(prices)[dear] / max(max(prices), 1e-300)
    assert found[dear].sum() <= dear.sum() * (mean + 1e-4) * (1 + 1e-9)
    if dear.any() and (shares > 1e-3).all():  # no limit was met, or the sum is below
        others = mean * dear.sum() * np.random.default_rng(seed).dirichlet(np.ones(int(dear.sum())))
        if found[dear].max() < 10 * mean - 1e-9 and found[dear].min() > 1e-4:
            assert (shares / found[dear]).sum() <= (shares / others).sum() * (1 + 1e-9)


@pytest.mark.thorough
def test_a_wider_tolerance_bounds_as_well() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 40, 3), nn.ReLU(), nn.Conv2d(40, 4, 2))
    tight = analyze(model, (3, 9, 9), restarts=0, tolerance=1e-3).upper
    for tolerance in (0.01, 0.1):
        found = analyze(model, (3, 9, 9), restarts=0, tolerance=tolerance).upper
        assert tight * (1 - 3e-3) <= found <= tight * (1 + tolerance) ** 3
    assert found > tight * 1.05
    for tolerance in (0.0, 2.0, math.nan):
        with pytest.raises(OptionError, match=r"tolerance: expected a number in \[1e-4, 1\]"):
            analyze(model, (3, 9, 9), tolerance=tolerance)


def test_a_folded_weight_below_the_range_of_float64_is_no_zero() -> None:
    # 1e-200 times 1e-200 is lost, and so are the squares of 1e-170: neither bound may be below the exact product.
    for weight, scale in ((1e-200, 1e-200), (1e-170, 1.0)):
        layer, norm = nn.Linear(3, 3, bias=False).double(), nn.BatchNorm1d(3, eps=0.0).double().eval()
        layer.weight.data.copy_(weight * torch.eye(3).double())
        norm.weight.data.fill_(scale)
        found = folded_bound(layer, norm, norm_first=False, bound=lipkit.lipschitz)
        assert float(found.detach()) > 2.0**-501


class Functional(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor([0.5, -3.0, 1.0, 3.0]).double())
        self.bias = nn.Parameter(torch.ones(4).double())

    def forward(self, x):
        return self.function(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("model", "shape", "weight"),
    [
        (Functional(lambda x, w, b: F.layer_norm(x, (4,), w, b, 0.01)), (4,), 3.0),
        (Functional(lambda x, w, b: F.layer_norm(x, (2, 4), eps=0.01)), (2, 4), 1.0),
        (Functional(lambda x, w, b: F.group_norm(x, 2, w, b, 0.01)), (4, 3), 3.0),
        (Functional(lambda x, w, b: F.group_norm(x, 4, eps=0.01)), (4, 3), 1.0),
        (nn.Sequential(nn.LayerNorm(4, 0.01)), (4,), 1.0),
        (nn.Sequential(nn.GroupNorm(2, 4, 0.01)), (4, 3), 1.0),
        (nn.Sequential(nn.InstanceNorm1d(4, 0.01)), (4, 3), 1.0),
    ],
)
def test_normalisation_by_the_sample_has_a_constant(model: nn.Module, shape: tuple[int, ...], weight: float) -> None:
    found = analyze(model.double().eval(), shape, restarts=2, steps=30)
    assert found.upper == pytest.approx(weight / 0.1, rel=1e-12)
    assert found.upper >= weight / 0.1
    assert 0.1 < found.lower <= found.upper


def test_normalisation_that_is_smaller_unfolded_stays_so() -> None:
    # A Linear on (B, 3, 4) acts on the last dimension and the normalisation on the middle one.
    model = settle(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(3)))
    found = analyze(model, (3, 4), restarts=0)
    assert np.linalg.norm(dense_matrix(model, (3, 4)), 2) <= found.upper
    assert len(found.layers) == 2


@pytest.mark.thorough
def test_an_exported_network_is_looked_into() -> None:
    net = lipkit.models.build("small", input_shape=(1, 8, 8), classes=10)
    plain = lipkit.export(net, (1, 8, 8))
    found = analyze(plain, (1, 8, 8), restarts=0)
    assert len(found.layers) > 3
    assert found.upper == pytest.approx(lipkit.lipschitz(plain).item(), rel=1e-6)


def test_a_module_that_torch_fx_made_is_bounded_unless_its_graph_runs_ahead() -> None:
    net = Lambda(lambda x: torch.relu(x) - 2 * x).eval()
    made, x = torch.fx.symbolic_trace(net), torch.randn(9, 4)
    assert analyze(made, (4,)).upper == analyze(net, (4,)).upper == pytest.approx(3)
    assert torch.allclose(lipkit.export(made, (4,))(x), net(x), atol=1e-6)
    (last,) = (node for node in made.graph.nodes if node.op == "output")
    with made.graph.inserting_before(last):
        last.args = (made.graph.call_function(torch.mul, (last.args[0], 5.0)),)
    with pytest.raises(NoRuleError, match=r"whose copy by copy\.deepcopy differs"):  # it has not been compiled again
        analyze(made, (4,))


def test_the_model_is_left_as_it_is() -> None:
    model = settle(nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True)))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    analyze(model, (2, 8, 8), restarts=1, steps=1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("model", "shape"), [(nn.AvgPool2d(3, 2), (1, 7, 7)), (nn.AvgPool2d(2), (2, 4, 4))])
def test_a_network_without_parameters_is_searched(model: nn.Module, shape: tuple[int, ...]) -> None:
    # Two random points, which is what is left without derivatives, see about half of the constant.
    found = analyze(model, shape)
    assert 0.95 * found.upper < found.lower <= found.upper


def test_a_constant_network() -> None:
    class Net(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    found = analyze(Net(), (3,))
    assert (found.upper, found.lower, found.layers) == (0.0, 0.0, ())


def test_weights_that_are_no_numbers_bound_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].weight.data[0, 0] = math.nan
    assert analyze(model, (2,), restarts=0).upper == math.inf


class Cast(nn.Linear):
    """Keeps a network from the search in float64: secants between random points take its place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(torch.float32), self.weight, self.bias)


def test_a_box_of_one_point_has_no_secants() -> None:
    point = torch.tensor([0.0, 1.0])
    for model in (nn.Linear(2, 2), Cast(2, 2)):
        found = analyze(model, (2,), box=(point, point))
        assert found.lower == 0 < found.upper


def test_arguments() -> None:
    with pytest.raises(ShapeError, match="does not accept"):
        analyze(nn.Linear(3, 2), (4,))
    with pytest.raises(OptionError, match="expected one of auto, best"):
        analyze(nn.Linear(3, 2), (3,), method="magic")
    for restarts in (-1, 1.5):
        with pytest.raises(OptionError, match="restarts: expected an integer of at least 0"):
            analyze(nn.Linear(3, 2), (3,), restarts=restarts)  # type: ignore[arg-type]
    with pytest.raises(NoRuleError, match=r"expected an nn\.Module"):
        analyze(torch.relu, (3,))  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["symbol_sup", "best"])
def test_methods(method: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"))
    found = analyze(model, (2, 6, 6), method=method, restarts=0)
    assert found.upper <= analyze(model, (2, 6, 6), restarts=0).upper * (1 + 1e-9)
    assert found.layers[1].method == "circular"


def test_a_wrong_rule_is_found_by_the_search() -> None:
    class Wrong(nn.Module):
        def forward(self, x):
            return 2 * x

    @lipkit.modules.lipschitz_rule(Wrong)
    def _(module, input_shape):
        return 1.0

    with pytest.raises(CertificateViolation, match="a rule is wrong"):
        analyze(Wrong(), (3,))


def test_a_module_that_treats_the_last_of_many_samples_otherwise_is_refused() -> None:
    class Late(nn.Module):
        def forward(self, x):
            return torch.cat((x[:8], 2 * x[8:]))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.late = Late()

        def forward(self, x):
            return self.late(x) + 1

    lipkit.modules.lipschitz_rule(Late)(lambda module, shape: 2.0)
    with pytest.raises(NoRuleError, match="samples in the opposite order differ"):
        analyze(Net(), (3,))


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrised_network_is_left_as_it_is(how: str) -> None:
    torch.manual_seed(0)
    layer = getattr(torch.nn.utils.parametrizations, how)(nn.Linear(3, 3))
    if how == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(layer, "bias", dim=None)
    net = nn.Sequential(layer).eval()
    x = torch.randn(2, 3)
    before = net(x)
    bound = lipkit.analyze(net, (3,), restarts=0).upper
    assert torch.equal(net(x), before)
    norm = float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))
    assert norm <= float(bound) <= norm * 1.02


@pytest.mark.thorough
def test_boxes_for_each_entry_or_channel_are_never_looser() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))
    low, high = torch.tensor([-0.1, 0.5]), torch.tensor([0.2, 0.6])
    everywhere = analyze(model, (2, 2, 2), restarts=4)
    channels = analyze(model, (2, 2, 2), box=(low, high))
    shaped = (low.view(2, 1, 1).expand(2, 2, 2).numpy(), high.view(2, 1, 1).expand(2, 2, 2).tolist())
    entries = analyze(model, (2, 2, 2), box=shaped)
    hull = analyze(model, (2, 2, 2), box=(-0.1, 0.6), restarts=0)
    assert channels.lower <= channels.upper == entries.upper <= hull.upper < 0.8 * everywhere.upper
    assert (channels.product, channels.how) == (everywhere.product, "slopes in the box")
    assert [x.name for x in channels.layers] == [x.name for x in everywhere.layers]
    x = low.view(2, 1, 1) + (high - low).view(2, 1, 1) * torch.rand(200, 2, 2, 2)
    slopes = torch.linalg.matrix_norm(torch.func.vmap(torch.func.jacrev(lambda v: model(v[None])[0]))(x).flatten(2), 2)
    assert 0.5 * channels.upper < float(slopes.detach().max()) <= channels.upper * (1 + 1e-6)
    assert "for inputs in a box" in str(channels)
    assert "for inputs in [-0.1, 0.6]" in str(hull)
    with pytest.raises(ShapeError, match=r"box: expected ends of shape \(2, 2, 2\) or per channel, got \(3,\)"):
        analyze(model, (2, 2, 2), box=(torch.zeros(3), 1))
    with pytest.raises(OptionError, match="the smaller one first"):
        analyze(model, (2, 2, 2), box=(high, low))


@pytest.mark.thorough
def test_one_front_door_for_tight_bounds() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    plain = lipkit.export(model, (5,))
    found = float(lipkit.lipschitz(plain, tight=True))
    assert (
        found == float(lipkit.lipschitz(certificates.tight(plain))) == float(lipkit.lipschitz(model, (5,), tight=True))
    )
    assert found < 0.4 * float(lipkit.lipschitz(plain))
    bound = analyze(model, (5,), restarts=0, tight=True)
    assert (bound.upper, bound.tight, bound.how) == (found, found, "LipSDP")
    assert bound.product == pytest.approx(float(lipkit.lipschitz(plain)), rel=1e-9)
    with pytest.raises(ShapeError, match=r"tight=True: expected an input_shape, .* got none"):
        lipkit.lipschitz(model, tight=True)
    branches = analyze(Lambda(lambda x: torch.logsumexp(x, 1, keepdim=True)), (5,), restarts=0, tight=True)
    assert (branches.tight, branches.how) == (None, "not tried: the network has no plain form in float64")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_folded_is_not_rounded_to_the_format_of_the_network(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(1)
    norm.running_var.fill_(0.1 + float(torch.rand(())))
    model = nn.Sequential(nn.Linear(1, 1), norm, nn.ReLU(), nn.Linear(1, 1)).eval().to(dtype)
    first, last = (float(model[i].weight.detach()) for i in (0, 3))
    true = abs(first * last) / math.sqrt(float(norm.running_var) + norm.eps)  # in float64
    bounds = [analyze(model, (1,), box=box, restarts=0, tight=True).upper for box in (None, (-99.0, 99.0))]
    for bound in (*bounds, float(lipkit.lipschitz(model, (1,), tight=True))):
        assert true * (1 - 1e-15) <= bound <= true * (1 + 1e-9)


@pytest.mark.parametrize(
    ("dtype", "forward", "true"),
    [
        (torch.float32, lambda x: x / 41, 1 / 41),  # the nearest float32 lies below
        (torch.float32, lambda x: torch.relu(torch.tanh(x / 41) + x / 41), 2 / 41),
        (torch.bfloat16, lambda x: torch.tanh(torch.relu(x * 0.7 + x) * 0.7), 0.7 * 1.7),
        (torch.float16, lambda x: torch.lerp(x / 3, x * 0.7, 0.25), 0.25 + 0.7 / 4),
        (torch.bfloat16, lambda x: x.expand(-1, 257).sum(1), 257.0),  # 256 in bfloat16
    ],
)
def test_constants_of_a_forward_pass_count_as_they_are_written(dtype: torch.dtype, forward, true: float) -> None:
    model = nn.Sequential(Scaled(dtype), Lambda(forward))
    for bound in (float(lipkit.lipschitz(model, (1,)).detach()), analyze(model, (1,), restarts=0).upper):
        assert true * (1 - 1e-15) <= bound <= true * (1 + 1e-9)


@pytest.mark.thorough
def test_constants_in_front_of_a_product_count_as_they_are_written() -> None:
    model = nn.Sequential(Scaled(torch.bfloat16), Lambda(lambda x: (x * 0.7) * (x * 0.7)))
    assert 2 * 0.7**2 <= analyze(model, (1,), box=(0.0, 1.0), restarts=0).upper <= 2 * 0.7**2 * (1 + 1e-5)


class Scaled(nn.Module):
    """The identity in a format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.one
