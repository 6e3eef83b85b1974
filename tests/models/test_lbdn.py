"""LBDN: the prescribed gain is proved from the exported numbers, is not a gift, and every feasible network is one."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipkit.bounds.lmi import gain_bound, lmi_matrix, proves_gain
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.layers import MaxMin
from lipkit.lowering import export, lipschitz
from lipkit.models import LBDN, build, lbdn
from lipkit.models.lbdn import from_network
from lipkit.modules import Network, SlopeResidual, load, save
from lipkit.testing import check_layer

DTYPES = (torch.float32, torch.float64)


def trained(sizes: list[int], gamma: float, dtype: torch.dtype, steps: int, seed: int = 0, **options: object) -> LBDN:
    """After Adam steps of rate 0.1 towards a function that is steeper than gamma."""
    torch.manual_seed(seed)
    network = LBDN(sizes, gamma, dtype=dtype, **options)
    optimiser = torch.optim.Adam(network.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(32, sizes[0], dtype=dtype)
        y = 5 * gamma * x.sum(1, keepdim=True).sin()
        optimiser.zero_grad()
        (network(x) - y).square().mean().backward()
        optimiser.step()
    return network


def parts(network: Network) -> tuple[list[Tensor], list[Tensor]]:
    weights = [m.weight.double() for m in network if isinstance(m, nn.Linear)]
    return weights, [m.double() for m in network.multipliers().values()]


def smallest_eigenvalue(weights: list[Tensor], multipliers: list[Tensor], gamma: float) -> float:
    """Of H with its diagonal scaled to 1: its sign is that of H's."""
    h = lmi_matrix(weights, multipliers, gamma)
    scale = h.diagonal().rsqrt()
    return float(torch.linalg.eigvalsh(scale[:, None] * h * scale)[0])


@pytest.mark.thorough
@pytest.mark.usual(15)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("steps", [0, 6])
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 10])
def test_the_export_proves_the_prescribed_gain_and_nothing_is_wasted(
    depth: int, steps: int, dtype: torch.dtype
) -> None:
    gamma = (0.1, 2.0)[depth % 2]
    network = trained([3, *[8] * depth, 2], gamma, dtype, steps, seed=depth)
    plain = export(network, (3,))
    assert [type(m) for m in plain] == [nn.Linear, nn.ReLU] * depth + [nn.Linear]
    weights, multipliers = parts(plain)
    assert proves_gain(weights, multipliers, gamma)
    assert float(lipschitz(plain)) <= gamma
    assert float(lipschitz(network)) == gamma
    x = 2 * torch.randn(50, 3, dtype=dtype)
    assert torch.allclose(plain(x), network(x), rtol=1e-4 if dtype == torch.float32 else 1e-9, atol=1e-6 * gamma)

    # One weight raised until the smallest eigenvalue of the LMI is 0; a further 2 % and the proof fails.
    where = divmod(int(weights[-1].abs().argmax()), weights[-1].shape[1])

    def raised(factor: float) -> list[Tensor]:
        last = weights[-1].clone()
        last[where] *= factor
        return [*weights[:-1], last]

    low, high = 1.0, 2.0
    while smallest_eigenvalue(raised(high), multipliers, gamma) > 0:
        low, high = high, 2 * high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if smallest_eigenvalue(raised(middle), multipliers, gamma) > 0 else (low, middle)
    assert proves_gain(raised(1 + (low - 1) * 0.999), multipliers, gamma)
    assert not proves_gain(raised(1.02 * high), multipliers, gamma)


@pytest.mark.thorough
def test_the_multiplier_of_the_main_text_fails() -> None:
    network = trained([3, 8, 8, 2], 1.0, torch.float64, 20)
    weights, multipliers = parts(export(network, (3,)))
    assert proves_gain(weights, multipliers, 1.0)
    assert not proves_gain(weights, [m / 2 for m in multipliers], 1.0)
    assert smallest_eigenvalue(weights, [m / 2 for m in multipliers], 1.0) < -1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("activation", ["relu", "tanh", nn.LeakyReLU(0.3), ["softplus", "elu"]], ids=str)
def test_secants_never_exceed_gamma_and_come_near(activation: object) -> None:
    gamma = 5.0
    network = trained([2, 16, 16, 1], gamma, torch.float64, 60, activation=activation)
    plain = export(network, (2,))
    x = torch.randn(4000, 2, dtype=torch.float64)
    worst = 0.0
    for step in (1e-4, 0.1, 3.0):
        d = step * torch.randn(4000, 2, dtype=torch.float64)
        worst = max(worst, float(((plain(x + d) - plain(x)).norm(dim=1) / d.norm(dim=1)).max()))
    bound = float(lipschitz(plain))
    assert worst <= bound * (1 + 1e-9)
    assert bound <= gamma
    assert worst >= 0.5 * gamma


@pytest.mark.thorough
def test_the_laws() -> None:
    make = partial(LBDN, [4, 6, 5, 3], gamma=2.0)
    for dtype in DTYPES:
        check_layer(
            make,
            input_shape=(4,),
            dtype=dtype,
            claim="contraction",
            gamma=2.0,
            # Law 3 in float64 asks for less than the reduction of the weights by about 1e-13.
            laws=(1, 2, *([3] if dtype == torch.float32 else []), 4, 5, 6, 7, 8, 9, 10, 11, 13),
            options={"activation": ("relu", "tanh"), "bias": (True, False), "gamma": (1.0, 2.0)}
            if dtype == torch.float32
            else {},
        )
    shallow = partial(LBDN, [4, 6, 3], gamma=2.0)
    check_layer(shallow, input_shape=(4,), dtype=torch.float32, claim="contraction", gamma=2.0, laws=(12,))


def test_the_bound_sees_hooks_and_replaced_activations() -> None:
    network = LBDN([2, 3, 1])
    network.hidden[0].activation = MaxMin()
    for function in (lipschitz, lambda n: export(n, (2,))):
        with pytest.raises(NoRuleError, match=r"expected an activation with slope in \[0, 1\]"):
            function(network)
    network = LBDN([2, 3, 1])
    network.output.register_forward_hook(lambda *_: None)
    with pytest.raises(NoRuleError, match="hooks"):
        lipschitz(network)


@pytest.mark.thorough
def test_learnable_gamma_is_trained_and_bounds_the_export() -> None:
    network = LBDN([3, 8, 2], gamma=0.5, learnable_gamma=True)
    assert float(lipschitz(network).detach()) == pytest.approx(0.5)
    lipschitz(network).backward()
    assert float(network.log_gamma.grad) == pytest.approx(0.5)
    network = trained([3, 8, 1], 0.5, torch.float32, 20, learnable_gamma=True)
    gamma = float(lipschitz(network).detach())
    assert gamma > 0.55
    assert float(lipschitz(export(network, (3,)))) <= gamma


def test_an_export_without_a_proof_is_refused() -> None:
    network = LBDN([2, 3, 1])
    with torch.no_grad():
        network.hidden[0].y_scale.fill_(math.nan)
    with pytest.raises(OptionError, match=r"proof of gain 1\.0, got none .* the largest is nan"):
        export(network, (2,))
    network = LBDN([6, 1, 3, 5], dtype=torch.float64)
    with torch.no_grad():
        network.output.y_scale.fill_(1e256)
    with pytest.raises(OptionError, match=r"got none .* the largest is 1e\+256"):
        export(network, (6,))
    with pytest.raises(ShapeError, match=r"expected input of shape \(\.\.\., 2\), got \(3,\)"):
        export(LBDN([2, 3, 1]), (3,))


@pytest.mark.parametrize("sizes", [[3, 6], [3, 4, 6]])
def test_a_network_of_tiny_weights_is_exported(sizes: list[int]) -> None:
    network = LBDN(sizes, dtype=torch.float64)
    with torch.no_grad():
        network.output.y_scale.fill_(1e-308)
    plain = export(network, (3,))
    assert 0 < float(plain[-1].weight.abs().max()) < 1e-307
    assert float(lipschitz(plain)) <= 1


def test_a_network_of_zero_weights_is_exported() -> None:
    network = LBDN([3, 4, 4, 2], gamma=2.0)
    for layer in (network.hidden[0], network.output):
        nn.init.zeros_(layer.y_scale)
    plain = export(network, (3,))
    assert float(lipschitz(plain)) == 0
    assert proves_gain([m.weight for m in plain if isinstance(m, nn.Linear)], list(plain.multipliers().values()), 2.0)
    assert torch.equal(plain(torch.randn(5, 3)), network.output.bias.detach().expand(5, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [3]}, "sizes: expected inputs, hidden layers and outputs, got"),
        ({"sizes": [3, 0, 1]}, r"sizes\[1\]: expected an integer of at least 1, got 0"),
        ({"sizes": "31"}, "sizes.*expected .* got"),
        ({"sizes": [3, 2], "gamma": 0.0}, "gamma: expected a positive finite number, got 0.0"),
        ({"sizes": [3, 2], "gamma": math.inf}, "gamma: expected a positive finite number, got inf"),
        ({"sizes": [3, 4, 2], "activation": ["relu", "relu"]}, "expected one for each of 1 hidden layers, got 2"),
        ({"sizes": [3, 4, 2], "activation": "gelu"}, r"expected one with slope in \[0, 1\]"),
        ({"sizes": [3, 4, 2], "activation": nn.Tanh}, r"expected one with slope in \[0, 1\]"),
        ({"sizes": [3, 4, 2], "activation": MaxMin()}, r"expected one with slope in \[0, 1\]"),
        ({"sizes": [3, 2], "classes": 4}, "sizes: expected no classes beside it"),
        ({"hidden": [3], "classes": 4}, "expected sizes, or hidden, input_shape and classes, got"),
        ({"sizes": [3, 2], "dtype": torch.float16}, "dtype: expected torch.float32 or torch.float64"),
    ],
)
def test_refused_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        lbdn(**arguments)


@pytest.mark.thorough
def test_build_for_images_and_for_vectors(tmp_path: Path) -> None:
    network = build("lbdn", input_shape=(1, 5, 5), classes=3, hidden=[8, 6], gamma=0.5, mean=[0.5], std=[0.25])
    assert [type(m).__name__ for m in network] == ["Normalize", "Flatten", "LBDN"]
    assert float(lipschitz(network)) == pytest.approx(2.0)
    plain = export(network, (1, 5, 5))
    assert [type(m).__name__ for m in plain] == ["Affine", "Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert float(lipschitz(plain)) <= 2.0 * (1 + 1e-12)
    loaded = load(save(plain, tmp_path))
    assert sorted(loaded.multipliers()) == [3, 5]
    assert float(lipschitz(loaded)) == float(lipschitz(plain))
    assert [type(m).__name__ for m in build("lbdn", input_shape=(4,), classes=1, hidden=[])] == ["LBDN"]
    assert build("lbdn", sizes=[12, 64, 4], gamma=2).sizes == (12, 64, 4)
    with pytest.raises(ShapeError, match="input_shape: expected positive sizes"):
        lbdn(hidden=[3], input_shape=(0, 2), classes=2)


# Completeness.


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [0, 30])
@pytest.mark.parametrize("sizes", [[4, 2], [3, 8, 2], [2, 5, 7, 4], [1, 3, 3, 3, 3, 3, 1], [9, 3, 9]], ids=str)
def test_round_trip(sizes: list[int], steps: int) -> None:
    gamma = 3.0
    plain = export(trained(sizes, gamma, torch.float64, steps), (sizes[0],))
    weights, multipliers = parts(plain)
    before = copy.deepcopy(plain.state_dict())
    back = from_network(plain, gamma)
    assert float(lipschitz(back)) == gamma
    for made, given in zip(back.weights(), weights, strict=True):
        assert torch.allclose(made, given, rtol=0, atol=1e-8 * float(given.norm()))
    for made, given in zip(back.multipliers(), multipliers, strict=True):
        assert torch.allclose(made, given, rtol=1e-12)
    x = 3 * torch.randn(20, sizes[0], dtype=torch.float64)
    assert torch.allclose(back(x), plain(x), rtol=1e-8, atol=1e-8)
    assert all(torch.equal(before[k], v) for k, v in plain.state_dict().items())
    # And once more, from the LBDN's own export.
    assert torch.allclose(from_network(export(back, (sizes[0],)), gamma)(x), plain(x), rtol=1e-8, atol=1e-8)


@pytest.mark.thorough
def test_a_trained_plain_network_is_certified_imported_and_fine_tuned() -> None:
    from lipkit.certificates.lipsdp import solve

    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    ).double()
    proof = solve(export(plain, (2, 2)))
    by_order = [proof.multipliers[i] for i in sorted(proof.multipliers)]
    network = from_network(plain, proof.gain, by_order)
    assert [type(m).__name__ for m in network] == ["Flatten", "LBDN"]
    x = torch.randn(8, 2, 2, dtype=torch.float64)
    assert torch.allclose(network(x), plain(x), atol=1e-6)
    assert float(lipschitz(network)) <= proof.gain * (1 + 1e-12)
    assert all(p.requires_grad for p in plain.parameters())
    # Every parameter moves within a few steps, and the guarantee stays.
    start = copy.deepcopy(network.state_dict())
    optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(5):
        optimiser.zero_grad()
        loss = (network(x) - x.flatten(1)[:, :2]).square().mean()
        loss.backward()
        optimiser.step()
    assert all(not torch.equal(start[k], v) for k, v in network.state_dict().items())
    assert float(lipschitz(export(network, (2, 2)))) <= proof.gain * (1 + 1e-12)


def test_multipliers_of_any_size_are_imported() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    for size in (1e-6, 1.0, 1e6):
        multipliers = [size * torch.ones(2)]
        smallest = gain_bound([plain[0].weight, plain[2].weight], multipliers)
        network = from_network(plain, (1 + 1e-9) * smallest, multipliers)
        for made, given in zip(network.weights(), (plain[0].weight, plain[2].weight), strict=True):
            assert torch.allclose(made, given, atol=1e-6)


def test_default_gamma_is_the_smallest_that_is_proved() -> None:
    plain = export(trained([3, 6, 2], 2.0, torch.float64, 0), (3,))
    smallest = gain_bound(*parts(plain))
    assert smallest < 2.0
    assert float(lipschitz(from_network(plain))) == smallest


@pytest.mark.parametrize(
    ("inward", "outward"),
    [
        # H = [[1, -1, 0], [-1, 2, -1], [0, -1, 1]] in the first unit: singular. A unit without inputs: A = 1, B = 0.
        ([1.0, 0.5, 0.0], [1.0, 1.0, 1.0]),
        # B = 1 and A = 0 in the first unit, whose output must not be used.
        ([2**0.5, 0.5, 0.0], [0.0, 1.0, 2**0.5]),
    ],
)
def test_on_the_boundary_with_singular_factors(inward: list[float], outward: list[float]) -> None:
    first, last = (torch.diag(torch.tensor(v, dtype=torch.float64)) for v in (inward, outward))
    layers = [nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3, bias=False)]
    plain = nn.Sequential(*layers).double()
    with torch.no_grad():
        plain[0].weight.copy_(first)
        plain[2].weight.copy_(last)
    network = from_network(plain, 1.0, [torch.ones(3)])
    assert network.output.bias is None
    for made, given in zip(network.weights(), (first, last), strict=True):
        assert torch.allclose(made, given, atol=1e-8)


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [1.001, 1.1])
def test_an_infeasible_lmi_is_refused(factor: float) -> None:
    plain = export(trained([3, 6, 2], 1.0, torch.float64, 30), (3,))
    smallest = gain_bound(*parts(plain))
    with pytest.raises(OptionError, match=r"expected weights and multipliers whose LMI holds at gamma = .* got layer"):
        from_network(plain, smallest / factor)


def test_networks_that_cannot_be_imported() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"expected a lipkit\.modules\.Network or nn\.Sequential, got .*Linear"):
        from_network(linear)
    hooked = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    hooked[1].register_forward_hook(lambda module, given, output: 3 * output)
    with pytest.raises(NoRuleError, match="forward hooks"):
        from_network(hooked, None, [torch.ones(2)])
    chain = nn.Sequential(linear, nn.GELU(), linear)
    with pytest.raises(OptionError, match=r"expected Linear, activation .* got Linear, GELU, Linear"):
        from_network(chain, 1.0, [torch.ones(2)])
    with pytest.raises(OptionError, match=r"one for each of 1 activations \(lipsdp\.solve\), got 0"):
        from_network(nn.Sequential(linear, nn.ReLU(), linear), 1.0)
    with pytest.raises(ShapeError, match="multiplier 0: expected shape"):
        from_network(nn.Sequential(linear, nn.ReLU(), linear), 1.0, [torch.ones(3)])
    for wrong, got in (([-1.0, -1.0], "-1 to -1"), ([1.0, math.inf], "1 to inf")):
        with pytest.raises(OptionError, match=f"expected positive finite entries, got {got}"):
            from_network(nn.Sequential(linear, nn.ReLU(), linear), 1.0, {1: torch.tensor(wrong)})
    deep = nn.Sequential(linear, nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), linear)
    with pytest.raises(OptionError, match="expected a positive gain that the multipliers prove, got inf"):
        from_network(deep, None, [1e-6 * torch.ones(2), torch.ones(2)])


@pytest.mark.thorough
@pytest.mark.parametrize("gamma", [0.5, 3.0])
def test_weighted_norms_of_the_layers_bound_the_network(gamma: float) -> None:
    """Proposition C.1: weighted norms are at most 1 (sqrt(2 gamma) at the ends), their product bounds Jacobians."""
    network = trained([3, 8, 6, 2], gamma, torch.float64, steps=6)
    weights = [w.detach().numpy() for w in network.weights()]
    (a, b, psi), *others = [
        (at.detach().numpy(), b.detach().numpy(), layer.psi().detach().numpy())
        for layer in network.hidden
        for at, b in [layer.factors()]
    ]
    norms = [np.linalg.norm(np.linalg.pinv(b) @ (psi[:, None] * weights[0]), 2)]
    for weight, (a_k, b_k, psi_k) in zip(weights[1:-1], others, strict=True):
        norms.append(np.linalg.norm(np.linalg.pinv(b_k) @ (psi_k[:, None] * weight / psi) @ np.linalg.inv(a) / 2, 2))
        a, psi = a_k, psi_k
    norms.append(np.linalg.norm(weights[-1] / psi @ np.linalg.inv(a), 2))
    end = math.sqrt(2 * gamma)
    assert all(0 < norm <= limit * (1 + 1e-10) for norm, limit in zip(norms, [end, 1, end], strict=True))
    product = math.prod(norms) / 2
    jacobians = [torch.autograd.functional.jacobian(network, x) for x in torch.randn(50, 3, dtype=torch.float64)]
    assert max(float(torch.linalg.matrix_norm(j, 2)) for j in jacobians) <= product <= gamma * (1 + 1e-10)
    # Remark C.2: the plain norms have a larger product.
    assert math.prod(np.linalg.norm(w, 2) for w in weights) > 1.5 * gamma


def test_a_residual_layer_that_no_sll_layer_is() -> None:
    """Example 4.1: h(x) = x + G relu(W x) satisfies the LMI (13) for its constant 1.001, but G is no -2 W^T T^-1."""
    gamma, w, g = Fraction(1001, 1000), (0, 1), (1, Fraction(1, 1000))
    multipliers = (1001, gamma**2 - gamma)
    for wi, gi, li in zip(w, g, multipliers, strict=True):  # all matrices are diagonal: 2 x 2 blocks, in exact numbers
        block = (gamma**2 - 1, -(gi + wi * li), 2 * li - gi**2)
        assert min(block[0], block[2]) >= 0
        assert block[0] * block[2] - block[1] ** 2 >= 0
    slopes = [max(abs(1 + gi * wi * d) for d in (0, 1)) for wi, gi in zip(w, g, strict=True)]
    assert max(slopes) == gamma
    # As a layer of lipkit the product of the norms bounds it: W_2 = -W_1^T Lambda, the form of SLL, has no solution.
    first, second = (nn.Linear(2, 2, bias=False).double().requires_grad_(False) for _ in range(2))
    with torch.no_grad():
        first.weight.copy_(torch.diag(torch.tensor(w)))
        second.weight.copy_(torch.diag(torch.tensor([float(gi) for gi in g])))
    plain = SlopeResidual(first, nn.ReLU(), second, torch.tensor([float(li) for li in multipliers]))
    assert float(lipschitz(plain, (2,))) == pytest.approx(2, rel=1e-12)
