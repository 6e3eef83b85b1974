"""The LMI solver against an interior-point solver of another kind, and its proofs against sampled gains."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lipkit
from lipkit.bounds.lmi import lmi_matrix
from lipkit.certificates import lipsdp, local_gain
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.lowering import lipschitz
from lipkit.modules import Add, Affine, Graph, Network, Reshape, Roll


def mlp(sizes: list[int], activation: type[nn.Module] = nn.ReLU, seed: int = 0, spread: float = 1.0) -> Network:
    """A random network with rows of about unit norm."""
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layer = nn.Linear(a, b, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(
                torch.randn(b, a, generator=generator, dtype=torch.float64) * a**-0.5 * spread ** (i % 3)
            )
        modules += [layer, activation()]
    return Network(modules[:-1], (sizes[0],))


def clarabel_gain(network: Network) -> float:
    """The same semidefinite program by Clarabel: minimise gamma with svec(H(gamma, lambda)) in the PSD cone."""
    clarabel = pytest.importorskip("clarabel")
    from scipy import sparse

    weights = [m.weight.detach().numpy().astype(float) for m in network if isinstance(m, nn.Linear)]
    widths = [w.shape[0] for w in weights[:-1]]

    def h(gamma: float, lam: np.ndarray) -> np.ndarray:
        parts = np.split(lam, np.cumsum(widths)[:-1])
        sizes = [weights[0].shape[1], *widths, weights[-1].shape[0]]
        starts = np.cumsum([0, *sizes])
        out = np.zeros((starts[-1], starts[-1]))
        for k, w in enumerate(weights):
            block = w if k == len(widths) else parts[k][:, None] * w
            out[starts[k + 1] : starts[k + 2], starts[k] : starts[k + 1]] = -block
        out = out + out.T
        out[np.diag_indices_from(out)] = np.concatenate([np.full(sizes[0], gamma), 2 * lam, np.full(sizes[-1], gamma)])
        return out

    n = 1 + sum(widths)
    constant = h(0.0, np.zeros(n - 1))
    size = len(constant)
    upper = [(i, j) for j in range(size) for i in range(j + 1)]
    rows, cols = np.array(upper).T
    factor = np.where(rows == cols, 1.0, np.sqrt(2.0))

    def svec(m: np.ndarray) -> np.ndarray:
        return m[rows, cols] * factor

    unit = np.eye(n)
    columns = [svec(h(unit[i, 0], unit[i, 1:]) - constant) for i in range(n)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    problem = clarabel.DefaultSolver(
        sparse.csc_matrix((n, n)),
        np.eye(n)[0],
        sparse.csc_matrix(-np.array(columns).T),
        svec(constant),
        [clarabel.PSDTriangleConeT(size)],
        settings,
    )
    solution = problem.solve()
    assert str(solution.status) in ("Solved", "AlmostSolved")
    return float(solution.x[0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sizes", "spread"),
    [([3, 8, 8, 2], 1.0), ([4, 12, 12, 12, 3], 1.0), ([9, 5, 7], 1.0), ([2, 6, 5, 6, 7], 4.0), ([3, *[5] * 7, 2], 1.0)],
)
def test_solver_agrees_with_clarabel(sizes: list[int], spread: float) -> None:
    network = mlp(sizes, spread=spread)
    proof, reference = lipsdp.solve(network), clarabel_gain(network)
    assert reference * (1 - 1e-5) <= proof.gain <= reference * 1.0005
    assert lipsdp.verify(network, proof.gain, proof.multipliers)
    assert not lipsdp.verify(network, reference * 0.99, proof.multipliers)


@pytest.mark.thorough
def test_sixty_units_three_times_below_the_product() -> None:
    proof = lipsdp.solve(mlp([4, 60, 60, 60, 3]))
    assert proof.product / proof.gain > 3


@pytest.mark.thorough
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LeakyReLU])
def test_no_sampled_gain_exceeds_the_proof(activation: type[nn.Module]) -> None:
    network = mlp([3, 10, 10, 2], activation, seed=3)
    gain = lipsdp.solve(network).gain
    x = torch.randn(400, 3, dtype=torch.float64) * 3
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: network(v[None])[0]))(x)
    reached = float(torch.linalg.matrix_norm(jacobians, 2).max())
    assert reached <= gain
    assert reached > 0.02 * gain


def test_exact_for_one_hidden_layer_of_positive_weights() -> None:
    """Positive weights: all units can be active at once, so the gain is ||W1 W0||, which the LMI must not undercut."""
    network = mlp([3, 6, 2])
    with torch.no_grad():
        for module in network:
            if isinstance(module, nn.Linear):
                module.weight.abs_()
    true = float(torch.linalg.matrix_norm(network[2].weight @ network[0].weight, 2))
    assert true <= lipsdp.solve(network).gain <= 1.2 * true


@pytest.mark.thorough
def test_attached_multipliers_bound_the_network_and_wrong_ones_do_no_harm() -> None:
    network = mlp([4, 12, 12, 3])
    proof = lipsdp.solve(network)
    product = lipschitz(network)
    assert float(lipschitz(lipsdp.attach(network, proof.multipliers))) == pytest.approx(proof.gain, rel=1e-4)
    wrong = {i: torch.rand(len(m)) + 1e-3 for i, m in proof.multipliers.items()}
    bound = lipschitz(lipsdp.attach(network, wrong))
    assert proof.gain * (1 - 1e-4) <= float(bound) <= float(product)


@pytest.mark.thorough
@pytest.mark.parametrize("spoil", [
    lambda net: net.register_forward_hook(lambda module, given, output: 3 * output),
    lambda net: net.register_forward_pre_hook(lambda module, given: (3 * given[0],)),
    lambda net: net.__dict__.update(forward=lambda x: 3 * x[:, :2]),
    lambda net: net[1].register_forward_hook(lambda module, given, output: 3 * output),
])  # fmt: skip
def test_no_gain_is_proved_of_a_network_that_computes_something_else(
    spoil: Callable[[Network], object], tmp_path: Path
) -> None:
    network, x = mlp([3, 4, 2]), torch.zeros(1, 3, dtype=torch.float64)
    before = network(x)
    spoil(network)
    assert not torch.equal(network(x + 1), before)
    for use in (
        lambda: lipsdp.verify(network, 100.0, [torch.ones(4)]),
        lambda: lipsdp.solve(network),
        lambda: lipsdp.attach(network, {}) and lipschitz(lipsdp.attach(network, {})),
        lambda: lipschitz(network, tight=True),
        lambda: lipkit.save(network, tmp_path),
    ):
        with pytest.raises(NoRuleError, match=r"hook|hides the method"):
            use()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("layer", [0, 2])
def test_no_gain_is_verified_of_a_bias_that_is_not_finite(number: float, layer: int) -> None:
    network = mlp([3, 4, 2])
    gain, ones = 1.01 * float(lipschitz(lipsdp.attach(network, {1: torch.ones(4)}))), [torch.ones(4)]
    assert lipsdp.verify(network, gain, ones)
    with torch.no_grad():
        network[layer].bias[0] = number
    assert not lipsdp.verify(network, gain, ones)


def test_scaling_around_the_run_counts() -> None:
    network = mlp([4, 12, 3])
    proof = lipsdp.solve(network)
    units = Affine(torch.tensor([10.0, 1.0, 1.0, 1.0]), torch.zeros(4))
    outer = Network([units, network, Affine(torch.tensor([3.0]), torch.ones(1))], (4,))
    scaled = lipsdp.solve(outer)
    assert scaled.gain == pytest.approx(30 * proof.gain, rel=1e-9)
    assert sorted(scaled.multipliers) == [2]
    assert lipsdp.verify(outer, scaled.gain * (1 + 1e-12), scaled.multipliers)
    assert not lipsdp.verify(outer, proof.gain, scaled.multipliers)


def same(found: float, expected: float, rel: float = 1e-9) -> bool:
    return found == pytest.approx(expected, rel=rel)


@pytest.mark.thorough
def test_linear_modules_that_follow_each_other_are_one_layer() -> None:
    """Against the same network folded by hand, exactly: small integers."""
    numbers = torch.Generator().manual_seed(5)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=numbers).double()

    a, b, c, d, scale = whole(4, 3), whole(6, 4), whole(5, 6), whole(2, 5), torch.tensor([3.0, 1, 2, -1, 1, 4]).double()
    first, second, third, last = (nn.Linear(*w.shape[::-1], bias=False, dtype=torch.float64) for w in (a, b, c, d))
    for layer, weight in zip((first, second, third, last), (a, b, c, d), strict=True):
        layer.weight.data = weight
    chain = [
        nn.Tanh(),
        nn.Flatten(),
        Affine(scale, scale),
        Reshape(6),
        third,
        Affine(torch.ones(1), d[0, :1]),
    ]
    written = Network([first, Reshape(1, 4), second, Affine(scale[:1], scale[:1]), *chain, nn.ReLU(), last], (3,))
    folded = Network([nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)], (3,)).double()
    for i, weight in ((0, 3 * b @ a), (2, c * scale), (4, d)):
        folded[i].weight.data = weight
    proof, expected = lipsdp.solve(written), lipsdp.solve(folded)
    assert same(proof.gain, expected.gain)
    assert proof.gain < 0.7 * proof.product
    assert sorted(proof.multipliers) == [4, 10]
    attached = lipsdp.attach(written, proof.multipliers)
    assert same(float(lipschitz(attached)), proof.gain)
    assert lipsdp.verify(written, proof.gain * (1 + 1e-12), proof.multipliers)
    assert not lipsdp.verify(written, proof.gain * (1 - 1e-3), proof.multipliers)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(attached(x), written(x))


def test_what_is_linear_has_the_norm_of_its_product() -> None:
    weights = [torch.tensor(w).double() for w in ([[2.0, 0.0], [0.0, 0.5]], [[0.5, 0.0], [0.0, 3.0]])]
    layers = [nn.Linear(2, 2, dtype=torch.float64) for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight
    for chain, gain, product in (
        (layers[:1], 2.0, 2.0),
        (layers, 1.5, 6.0),
        ([layers[0], nn.GELU(), layers[1]], 6.8, 6.8),
    ):
        proof = lipsdp.solve(Network(chain, (2,)))
        assert gain * (1 - 1e-2) <= proof.gain <= gain * (1 + 1e-2), chain
        assert same(proof.product, product, 1e-2)
        assert list(proof.multipliers) == ([1] if gain < product else [])
    network, proof = Network(layers, (2,)), lipsdp.solve(Network(layers, (2,)))
    attached = lipsdp.attach(network, proof.multipliers)
    assert 1.5 <= proof.gain == float(lipschitz(attached)) <= 1.5 * (1 + 1e-9)
    assert lipsdp.verify(network, 1.5 * (1 + 1e-9), proof.multipliers)
    assert not lipsdp.verify(network, 1.5 * (1 - 1e-9), proof.multipliers)


@pytest.mark.parametrize("scale", [1.0, 1e100, 1e-100, 1e-155, 1e-160])
def test_the_rounding_of_a_product_is_inside_the_proof(scale: float) -> None:
    """Layers that nearly cancel: what float64 makes of their product is far from it."""
    third = 1 / 3
    first, second = nn.Linear(1, 2, bias=False, dtype=torch.float64), nn.Linear(2, 1, bias=False, dtype=torch.float64)
    first.weight.data = torch.tensor([[third * scale], [third * scale]], dtype=torch.float64)
    second.weight.data = torch.tensor([[1.0 + 2**-30, -1.0 + 2**-52]], dtype=torch.float64) * scale
    exact = sum(
        Fraction(float(a)) * Fraction(float(b))
        for a, b in zip(first.weight.detach(), second.weight.detach()[0], strict=True)
    )
    last = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    last.weight.data.fill_(1.0)
    for network in (Network([first, second], (1,)), Network([first, second, nn.ReLU(), last], (1,))):
        proof = lipsdp.solve(network)
        assert Fraction(proof.gain) >= abs(exact)
        assert proof.gain <= abs(float(exact)) * (1 + 1e-4) or scale != 1


@pytest.mark.thorough
def test_runs_inside_graphs_and_branches_get_their_own_multipliers() -> None:
    """The gain of the whole is that of its parts, each found on a chain alone."""

    def seeded(sizes: list[int], seed: int) -> Network:
        return mlp(sizes, nn.Tanh, seed)

    front, branch, back = seeded([3, 4], 1), seeded([4, 9, 9, 4], 2), seeded([4, 8, 2], 3)
    block = Graph([*branch, Add(1, -1), nn.GELU()], [[0], [1], [2], [3], [4], [0, 5], [6]])
    network = Network([*front, nn.Sigmoid(), block, *back], (3,))
    proof = lipsdp.solve(network)
    inner, outer = lipsdp.solve(branch).gain, lipsdp.solve(back).gain
    gelu = float(lipschitz(nn.GELU()))
    expected = float(lipschitz(front)) * 0.25 * (1 + inner) * gelu * outer
    assert same(proof.gain, expected, 1e-6)
    assert proof.gain < proof.product / 2
    assert set(proof.multipliers) == {4, "2.nodes.0.1", "2.nodes.0.3"}
    attached = lipsdp.attach(network, proof.multipliers)
    assert same(float(lipschitz(attached)), proof.gain)
    assert lipsdp.verify(network, proof.gain * (1 + 1e-9), proof.multipliers)
    assert not lipsdp.verify(network, proof.gain * (1 - 1e-3), proof.multipliers)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.equal(attached(x), network(x))
    again = lipkit.export(attached, (3,))
    assert same(float(lipschitz(again)), proof.gain)
    branches = Network([Graph([branch, Add(1, 1)], [[0], [1, 0]]), *back], (4,))
    found = lipsdp.solve(branches)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: branches(v[None])[0]))(torch.randn(500, 4).double())
    assert float(torch.linalg.matrix_norm(jacobians, 2).max()) <= found.gain < 0.8 * (1 + inner) * outer  # in one LMI
    assert branches[0].nodes[0].multipliers() == {}
    joint = lipsdp.attach(branches, found.multipliers)
    assert {i: len(m) for i, m in joint.multipliers().items()} == {0: 18, 2: 8}
    assert lipsdp.verify(branches, found.gain * (1 + 1e-9), found.multipliers)
    assert not lipsdp.verify(branches, found.gain * (1 - 1e-3), found.multipliers)
    assert lipsdp.verify(branches, found.gain * (1 + 1e-9), list(joint.multipliers().values()))
    assert same(float(lipschitz(lipkit.export(joint, (4,)))), found.gain)
    changed = {**found.multipliers, 0: found.multipliers[0] * torch.linspace(0.5, 2, 18)}
    assert float(lipschitz(lipsdp.attach(branches, changed))) > found.gain * (1 + 1e-3)
    with pytest.raises(ShapeError, match="multiplier"):
        lipschitz(lipsdp.attach(branches, {**found.multipliers, 0: torch.ones(17)}))


def test_weights_with_zero_and_extreme_norms() -> None:
    network = mlp([3, 5, 5, 2])
    with torch.no_grad():
        network[0].weight.mul_(1e8)
        network[4].weight.mul_(1e-9)
    proof = lipsdp.solve(network)
    assert 0 < proof.gain <= proof.product
    with torch.no_grad():
        network[2].weight.zero_()
    assert lipsdp.solve(network).gain <= 1e-300


def test_refusals() -> None:
    network = mlp([3, 4, 2])
    good = [torch.ones(4)]
    with pytest.raises(OptionError, match=r"lipkit\.export"):
        lipsdp.verify(nn.Sequential(nn.Linear(2, 2)), 1.0, [])
    with pytest.raises(NoRuleError, match="one linear layer or more"):
        lipsdp.solve(Network([nn.ReLU(), nn.MaxPool2d(2)], (1, 2, 2)))
    for place in (5, "1", "x", "1.2"):
        with pytest.raises((OptionError, ShapeError), match="index"):
            lipsdp.attach(network, {place: torch.ones(4, 1) if place == "1" else good[0]})
    assert lipsdp.verify(network, 1e3, [[1.0] * 4])  # as JSON has them
    with pytest.raises(ShapeError, match=r"expected shape \(4,\)"):
        lipsdp.verify(network, 1.0, [torch.ones(5)])
    with pytest.raises(OptionError, match="positive"):
        lipsdp.verify(network, 1.0, [torch.tensor([1.0, 1.0, 0.0, 1.0])])
    with pytest.raises(ShapeError, match="multipliers: expected one"):
        lipsdp.verify(network, 1.0, good * 2)
    assert lipsdp.attach(network, good).multipliers().keys() == {1}
    alone = lipsdp.solve(network, units=0)  # every layer is wider: the product of the norms stays
    assert alone.gain == alone.product == float(lipschitz(network))
    assert not alone.multipliers
    assert f"norms {lipkit.shown.upper(alone.product)}\n" in alone.describe()
    for gamma in (0.0, -1.0, float("nan")):
        assert not lipsdp.verify(network, gamma, good)
    with torch.no_grad():
        network[0].weight[0, 0] = float("nan")
    with pytest.raises(OptionError, match="finite"):
        lipsdp.solve(network)


@pytest.mark.parametrize("branches", [False, True])
def test_multipliers_at_the_ends_of_float64_are_no_crash(branches: bool) -> None:
    """Eigenvalues that do not converge propose no gain: the norms remain."""
    torch.manual_seed(0)

    def block() -> Graph:
        return Graph([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), Add(1, 1)], [[0], [1], [2], [0, 3]])

    middle = [block(), block()] if branches else []
    network = Network([nn.Linear(3, 3), nn.Tanh(), *middle, nn.Linear(3, 2)], (3,)).double()
    norms = float(lipschitz(network))
    for first, rest in ((1e308, 1e-308), (5e-324, 5e-324), (1e305, 1e305), (5e-324, 1e308)):
        for i, n in ((1, 3), (2, 4), (3, 4)) if branches else ((1, 3),):
            network.carry(i, torch.tensor([first, *[rest] * (n - 1)], dtype=torch.float64))
        assert float(lipschitz(network)) <= norms * (1 + 1e-12)


def scaled(network: Network, first: float, last: float) -> Network:
    """A dense network with its own multipliers; its first and last weights are scaled by these factors."""
    network[0].weight.data.mul_(first)
    network[-1].weight.data.mul_(last)
    return lipsdp.attach(network, lipsdp.solve(network).multipliers)


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e-3])
def test_multipliers_of_parts_prove_what_the_parts_prove(ratio: float) -> None:
    """Each part is balanced alone, the run that they make is not: the product of the parts' gains remains."""
    first, second = scaled(mlp([3, 6, 3]), 1.0, ratio), scaled(mlp([3, 6, 3], seed=1), 1 / ratio, 1.0)
    layer, scale = nn.Linear(3, 3, bias=False, dtype=torch.float64), Affine(torch.full((3,), ratio), torch.zeros(3))
    nn.init.orthogonal_(layer.weight, ratio)
    for parts in (
        [first, second],
        [layer, first],
        [second, layer],
        [first, scale.double(), second],
        [first, Roll(1, 1)],
    ):
        network = Network(parts, (3,))
        limit = math.prod(float(lipschitz(part)) for part in parts)
        jacobians = torch.func.vmap(torch.func.jacrev(lambda v, net=network: net(v[None])[0]))(
            torch.randn(200, 3).double()
        )
        slope, found = float(torch.linalg.matrix_norm(jacobians, 2).max()), float(lipschitz(network))
        assert slope * (1 - 1e-12) <= found <= limit * (1 + 1e-9)
        assert lipsdp.verify(network, found * (1 + 1e-9), network.multipliers())
        assert not lipsdp.verify(network, slope * (1 - 1e-9), network.multipliers())
        certificate = lipkit.certify(network, torch.randn(2, 3).double(), torch.zeros(2, dtype=torch.int64))
        assert certificate.constant <= limit * (1 + 1e-9)


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_multipliers_that_a_narrow_format_loses_leave_the_norms(size: float) -> None:
    network = mlp([3, 4, 2]).float()
    given = lipsdp.solve(network).multipliers[1]
    narrow = Network(list(network), (3,), {1: size * given}).half()
    assert not bool(((narrow.multiplier(1) > 0) & narrow.multiplier(1).isfinite()).any())  # type: ignore[union-attr,operator]
    assert float(lipschitz(narrow)) == pytest.approx(float(lipschitz(Network(list(narrow), (3,)))), rel=1e-12)


def test_products_at_the_ends_of_float64_have_their_norms() -> None:
    def layers(*sizes: float) -> list[nn.Module]:
        made = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in sizes]
        for layer, size in zip(made, sizes, strict=True):
            nn.init.constant_(layer.weight, size)
        return [*made]

    def scaling(size: float) -> Affine:
        return Affine(torch.tensor([size], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))

    for parts, true in (
        ([scaling(1e-200), *layers(1e200, 1e200)], 1e200),  # the layers' product overflows
        ([scaling(1e-200), *layers(1e200, 1e200), nn.ReLU(), *layers(1e-300)], 1e-100),
        ([scaling(1e300), *layers(1e-170, 1e-170)], 1e-40),
    ):
        network = Network(parts, (1,))
        norms = float(lipschitz(network))
        assert true * (1 - 1e-12) <= float(lipschitz(network, tight=True)) <= norms <= true * (1 + 1e-12)


@pytest.mark.parametrize("branches", [False, True])
def test_a_prelu_counts_as_its_numbers_are(branches: bool) -> None:
    """Slopes in [0, 1] are in the LMI; numbers that are changed afterwards are not, whatever multipliers say."""
    torch.manual_seed(0)
    act = nn.PReLU(4)
    act.weight.data.copy_(torch.tensor([0.0, 0.25, 0.7, 1.0]))
    inner: list[nn.Module] = [nn.Linear(3, 4), act, nn.Linear(4, 3)]
    layers = [Graph([*inner, Add(1, 1)], [[0], [1], [2], [0, 3]]), nn.Linear(3, 2)] if branches else inner
    network = Network([m.double() for m in layers], (3,))
    x = 4 * torch.rand(200, 3, dtype=torch.float64) - 2

    def slope(net: nn.Module) -> float:
        found = [torch.autograd.functional.jacobian(lambda v, net=net: net(v[None])[0], one) for one in x]
        return max(float(torch.linalg.matrix_norm(j, 2)) for j in found)

    proved = lipsdp.attach(network, lipsdp.solve(network).multipliers)
    assert slope(network) * (1 - 1e-12) <= float(lipschitz(proved)) < 0.98 * float(lipschitz(network))
    for number in (-3.0, 5.0, math.nan):
        next(m for m in proved.modules() if type(m) is nn.PReLU).weight.data[1] = number
        found = float(lipschitz(proved))
        assert found == pytest.approx(float(lipschitz(Network(list(proved), (3,)))), rel=1e-12)
        assert found == math.inf or found >= slope(proved) * (1 - 1e-12)


@pytest.mark.parametrize("length", [0, 4, 7, 9])
def test_multipliers_of_another_length_are_refused_by_their_place(length: int) -> None:
    block = Graph([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)], [[0], [1], [2], [3], [4]])
    network = Network([nn.Linear(3, 3), nn.Tanh(), block], (3,))
    network.carry(1, torch.ones(3))
    network.carry(2, torch.ones(8))
    assert float(lipschitz(network)) > 0
    network.carry(2, torch.ones(length))
    with pytest.raises(ShapeError, match=re.escape(f"multiplier 2: expected shape (8,), got ({length},)")):
        lipschitz(network)


def test_formats_of_multipliers() -> None:
    network = Network([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)], (2,))
    expected = float(lipschitz(lipsdp.attach(network, [torch.ones(2)])))
    network.carry(1, torch.ones(2).to(torch.float8_e4m3fn))
    assert float(lipschitz(network)) == expected
    network.carry(1, torch.ones(2, dtype=torch.complex64))
    with pytest.raises(OptionError, match="multiplier 0: expected real entries, got"):
        lipschitz(network)
    with pytest.raises(OptionError, match="expected the index or path of an activation"):
        lipsdp.attach(network, {"9" * 5000: torch.ones(2)})


def test_matrix_matches_its_definition() -> None:
    w0, w1 = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
    expected = [[5.0, 0, -7, 0], [0, 5, -14, 0], [-7, -14, 14, -3], [0, 0, -3, 5]]
    assert lmi_matrix([w0, w1], [torch.tensor([7.0])], 5.0).tolist() == expected


@pytest.mark.parametrize(
    "sizes",
    [
        (1e-200, 1e-200),
        (1e-200, 1.0),
        (1e-160, 1e-160),
        (1e-200, 1e200),
        (1e-200, 1e-200, 1e300),
        (1e-320, 1e308, 1e3),
        (1e-100, 1e-100, 1e-100),
        (1e150, 1e150, 1e-300),
        (1e200, 1e200),
        (1e-30, 1e30),
        (5e-324, 5e-324),
        (1.0, 0.0),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e300, 1e-300])
def test_gains_of_weights_of_every_size_are_upper_bounds(sizes: tuple[float, ...], scale: float) -> None:
    layers: list[nn.Module] = [Affine(torch.tensor([scale], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))]
    true = Fraction(scale)
    for size in sizes:
        layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(layer.weight, size)
        true *= Fraction(size)
        layers += [layer, nn.ReLU()]
    network = Network(layers[:-1], (1,))
    proof = lipsdp.solve(network)
    for found in (proof.gain, proof.product):
        assert found == math.inf or Fraction(found) >= true  # on the half-line where all is positive it is reached
    if all(1e-250 < abs(value) < 1e250 for value in (true, true / Fraction(scale))):
        assert Fraction(proof.gain) <= true * Fraction(1001, 1000)
    bound = float(lipschitz(lipsdp.attach(network, proof.multipliers)))
    assert bound == math.inf or Fraction(bound) >= true


def residual(width: int) -> Graph:
    return Graph([nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, width), Add(1, 1)], [[0], [1], [2], [0, 3]])


def doubled(width: int) -> Graph:
    return Graph([nn.Linear(width, width), Add(1, 1)], [[0], [0, 1]])


TOKENS: dict[str, Callable[[int, int, int], list[nn.Module]]] = {
    "a block between": lambda t, i, d: [nn.Linear(i, d), residual(d), nn.Linear(d, 2)],
    "a block behind an activation": lambda t, i, d: [
        nn.Linear(i, d),
        nn.ReLU(),
        residual(d),
        nn.ReLU(),
        nn.Linear(d, 2),
    ],
    "a block first": lambda t, i, d: [residual(i), nn.Linear(i, 2)],
    "a linear graph": lambda t, i, d: [nn.Linear(i, d), nn.ReLU(), doubled(d), nn.ReLU(), nn.Linear(d, 2)],
    "a linear graph first": lambda t, i, d: [doubled(i), nn.ReLU(), nn.Linear(i, 3)],
    "two blocks": lambda t, i, d: [nn.Linear(i, d), nn.ReLU(), nn.Linear(d, 2), residual(2), nn.ReLU(), residual(2)],
    "rows that are joined": lambda t, i, d: [nn.Linear(i, d), residual(d), nn.Flatten(), nn.Linear(t * d, 2)],
}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize(("tokens", "inputs", "width"), [(1, 3, 4), (3, 3, 6), (2, 6, 3), (3, 2, 2)])
def test_layers_of_rows_beside_graphs_of_whole_samples(name: str, tokens: int, inputs: int, width: int) -> None:
    torch.manual_seed(0)
    network = Network([m.double() for m in TOKENS[name](tokens, inputs, width)], (tokens, inputs)).eval()
    gain = lipsdp.solve(network).gain
    x = 4 * torch.rand(300, tokens, inputs, dtype=torch.float64) - 2
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: network(v[None])[0].flatten()))(x).flatten(2)
    slope = float(torch.linalg.matrix_norm(jacobians, 2).max())
    for found in (gain, local_gain(network, (-2.0, 2.0))):
        assert slope <= found <= float(lipschitz(network))
