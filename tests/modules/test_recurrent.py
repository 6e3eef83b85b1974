"""Constant recurrent networks: what is proved of them against an LMI built apart in numpy, and searches for more."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lipkit import export, lipschitz
from lipkit.bounds.dissipation import System, dissipation_matrix, least_gain, proves_dissipation
from lipkit.errors import NoRuleError, ShapeError
from lipkit.layers import Ren
from lipkit.linalg.scan import simulate
from lipkit.modules import HalfAbs, Mean, Pad, Recurrent, contraction, local_error
from lipkit.modules.recurrent import Outputs
from lipkit.proof.roundoff import FLOAT32, FLOAT64

HALF = torch.tensor([[0.5, 1.0], [1.0, 0.0]], dtype=torch.float64)  # x+ = x / 2 + u, y = x: its gain is 2


def drawn(nv: int, nx: int, nu: int, ny: int, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(nv + nx + ny, nv + nx + nu, dtype=torch.float64)


def storage_function(system: System, p: np.ndarray, lam: np.ndarray, gain: float, rate: float) -> np.ndarray:
    """The quadratic form in (w, x, u) that must not be positive: the definition, term by term."""
    (nv, nw), nx = system.units, system.states
    m = system.matrix.numpy().copy()
    for i in range(nv):
        for j in range(nw):
            if j // system.block >= i // system.block:
                m[i, j] = 0
    v, s, o = m[:nv], m[nv : nv + nx], m[nv + nx :]
    eye = np.eye(m.shape[1])
    w, x, u = eye[:nw], eye[nw : nw + nx], eye[nw + nx :]
    q = s.T @ p @ s - rate**2 * x.T @ p @ x + o.T @ o / gain - gain * u.T @ u
    if system.lipschitz is None:
        return q + w.T @ np.diag(lam) @ (v - w) + (v - w).T @ np.diag(lam) @ w
    return q + system.lipschitz**2 * v.T @ np.diag(lam) @ v - w.T @ np.diag(lam) @ w


def test_a_product_below_the_normal_range_proves_nothing() -> None:
    # v = 1e280 u, w = phi(v) of constant 1e-100, y = 1e-150 w: the gain is 1e30, and L Lambda = 1e-349 is 0.
    m = torch.tensor([[0.0, 1e280], [1e-150, 0.0]], dtype=torch.float64)
    multiplier = torch.tensor([1e-249], dtype=torch.float64)
    assert not proves_dissipation(System(m, 0, (1, 1), 1, 1e-100), torch.zeros(0, 0), multiplier, 1.0, 1.0)


@pytest.mark.parametrize("bound", [None, 1.0, 1.5])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_the_matrix_is_the_dissipation_inequality(bound: float | None, block: int) -> None:
    torch.manual_seed(block)
    decided = set()
    for scale in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5):
        system = System(drawn(4, 3, 2, 2, scale), 3, (4, 4), block, bound)
        p = torch.eye(3, dtype=torch.float64) + 0.1 * torch.ones(3, 3)
        lam = torch.rand(4, dtype=torch.float64) + 0.5
        h, _ = dissipation_matrix(system, p, lam, 1.3, 0.9)
        top = np.linalg.eigvalsh(storage_function(system, p.numpy(), lam.numpy(), 1.3, 0.9))[-1]
        assert (float(torch.linalg.eigvalsh(h)[0]) >= 0) == (top <= 0)
        assert proves_dissipation(system, p, lam, 1.3, 0.9) == (top <= 0)
        decided.add(top <= 0)
        inner = h[: h.shape[0] - h.shape[0] + 9, :9].numpy()
        ends = h[9:, 9:].numpy()
        schur = inner - h[9:, :9].numpy().T @ np.linalg.solve(ends, h[9:, :9].numpy())
        assert np.allclose(-schur, storage_function(system, p.numpy(), lam.numpy(), 1.3, 0.9), atol=1e-10)
    assert decided == {True, False}


@pytest.mark.thorough
def test_the_gain_of_a_filter_is_its_largest_frequency_response() -> None:
    torch.manual_seed(0)
    m = drawn(0, 3, 2, 3, 0.35)
    a, b, c, d = (part.numpy() for part in (m[:3, :3], m[:3, 3:], m[3:, :3], m[3:, 3:]))
    grid = np.exp(1j * np.linspace(0, np.pi, 1001))
    response = max(np.linalg.norm(c @ np.linalg.solve(z * np.eye(3) - a, b) + d, 2) for z in grid)
    found = least_gain(System(m, 3, (0, 0), 1))
    assert response <= found.gain <= response * 1.001
    assert not proves_dissipation(System(m, 3, (0, 0), 1), found.metric, found.multiplier, response * 0.999, 1.0)


def ascended(module: nn.Module, steps: int, rounds: int = 60) -> float:
    """A gain of whole sequences, from below."""
    u = torch.randn(8, steps, module.in_features, dtype=torch.float64).requires_grad_()
    d = (0.3 * torch.randn_like(u)).detach().requires_grad_()
    optimiser, best = torch.optim.Adam([u, d], lr=0.05), 0.0
    for _ in range(rounds):
        gain = (module(u + d) - module(u)).flatten(1).norm(dim=1) / d.flatten(1).norm(dim=1)
        best = max(best, float(gain.detach().max()))
        optimiser.zero_grad()
        (-gain.log().sum()).backward()
        optimiser.step()
    return best


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "layers"), [("tanh", 1), ("relu", 2)])
def test_networks_of_torch(kind: str, layers: int) -> None:
    torch.manual_seed(0)
    rnn = nn.RNN(2, 3, layers, nonlinearity=kind, batch_first=True, dtype=torch.float64)
    plain = export(rnn, (8, 2))
    u = torch.randn(3, 8, 2, dtype=torch.float64)
    assert torch.allclose(plain(u), rnn(u)[0], atol=1e-12)
    bound = float(lipschitz(plain))
    assert 0.3 * bound < ascended(plain[0], 8, 20) <= bound
    x, by_steps = torch.zeros(3, 3 * layers, dtype=torch.float64), []
    for t in range(8):
        x, y = plain[0].step(x, u[:, t])
        by_steps.append(y)
    assert torch.allclose(torch.stack(by_steps, 1), rnn(u)[0], atol=1e-12)


@pytest.mark.thorough
def test_a_network_that_expands_has_a_gain_over_some_steps_only() -> None:
    torch.manual_seed(0)
    rnn = nn.RNN(2, 2, batch_first=True, nonlinearity="relu", dtype=torch.float64)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(1.2 * torch.eye(2))
    plain = export(rnn, (4, 2))
    assert plain[0].rate > 1.19
    assert float(lipschitz(plain)) < math.inf
    assert ascended(plain[0], 4, 30) <= float(lipschitz(plain)) < float(lipschitz(plain[0], (5, 2)))
    assert contraction(plain[0]) == plain[0].rate
    with pytest.raises(NoRuleError, match="expected a Recurrent of an exported network, got Network"):
        contraction(plain)
    with pytest.raises(ShapeError, match=r"a gain over T steps only, got none"):
        lipschitz(plain[0])
    with torch.no_grad():
        rnn.weight_hh_l0.mul_(0.1)
    assert 0 < float(lipschitz(rnn)) < float(lipschitz(plain))


@pytest.mark.parametrize("rnn", [
    nn.RNN(2, 3), nn.RNN(2, 3, batch_first=True, bidirectional=True),
    nn.RNN(2, 3, 2, batch_first=True, dropout=0.5),
])  # fmt: skip
def test_other_networks_of_torch_are_refused(rnn: nn.RNN) -> None:
    with pytest.raises(NoRuleError, match=r"nn\.RNN: expected batch_first=True, one direction and no dropout"):
        lipschitz(rnn)


@pytest.mark.thorough
def test_a_trained_network_with_its_own_forward_pass() -> None:
    class Trained(nn.Module):
        def __init__(self, last: bool, start: Callable[[Tensor], Any] | None = None, layers: int = 1) -> None:
            super().__init__()
            self.rnn, self.head, self.last = nn.RNN(2, 3, layers, batch_first=True), nn.Linear(3, 2), last
            self.start = start

        def forward(self, u: Tensor) -> Tensor:
            start = self.start(u) if self.start else ()
            outputs, state = self.rnn(**start) if isinstance(start, dict) else self.rnn(u, *start)
            return self.head(outputs[:, -1] if self.last else state[-1])

    torch.manual_seed(0)
    model, u = Trained(last=True).eval(), torch.randn(4, 6, 2)
    plain = export(model, (6, 2))
    assert torch.allclose(plain(u), model(u), atol=1e-6)
    assert 0 < float(lipschitz(plain)) < 10
    by_state = Trained(last=False).eval()
    by_state.load_state_dict(model.state_dict())
    assert torch.equal(export(by_state, (6, 2))(u), plain(u))
    assert float(lipschitz(by_state, (6, 2)).detach()) == float(lipschitz(plain))
    with pytest.raises(NoRuleError, match=r"the last states: read outputs\[:, -1\]"):  # of two layers
        export(Trained(last=False, layers=2).eval(), (6, 2))
    for start in (lambda u: [torch.zeros(1, u.size(0), 3)], lambda u: [None]):
        beginning = Trained(True, start).eval()
        beginning.load_state_dict(model.state_dict())
        assert torch.equal(export(beginning, (6, 2))(u), plain(u))
    for start in (
        lambda u: [torch.ones(1, u.size(0), 3)],
        lambda u: [torch.cat((u, u), -1)[:, :1, :3].transpose(0, 1)],
        lambda u: {"hx": torch.zeros(1, u.size(0), 3), "input": u},
    ):
        with pytest.raises(NoRuleError, match="expected a module from one tensor to one, got 2 arguments"):
            export(Trained(True, start).eval(), (6, 2))


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, "input, forget, cell and output"), (nn.GRU, "reset and update")])
def test_gates_are_refused_by_their_names(kind: type[nn.Module], gates: str) -> None:
    with pytest.raises(NoRuleError, match=rf"{kind.__name__}: its {gates} gates multiply values"):
        lipschitz(kind(2, 3, batch_first=True))


class Steps(nn.Module):
    """A cell called step by step, whose state starts at zero, or at what ``start`` makes of the input."""

    def __init__(self, cell: nn.RNNCellBase, start: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.cell, self.start, self.out = cell, start, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None if self.start is None else self.start(x)
        if state is not None and isinstance(self.cell, nn.LSTMCell):
            state = state, state
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


STARTS = {"none": None, "zeros": lambda x: torch.zeros(x.shape[0], 3, dtype=x.dtype), "of the input": lambda x: x[:, 0]}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.RNNCell, partial(nn.RNNCell, nonlinearity="relu"), nn.GRUCell, nn.LSTMCell])
def test_cells_called_step_by_step(kind: Callable[..., nn.RNNCellBase], bias: bool, start: str) -> None:
    cell = kind(3, 3, bias=bias)  # made here, where the numbers are drawn with the seed of the test
    model = Steps(cell, STARTS[start]).double().eval()
    gated, x = not isinstance(cell, nn.RNNCell), torch.rand(99, 2, 3, dtype=torch.float64) * 2 - 1
    if gated:
        with pytest.raises(NoRuleError, match="box"):
            export(model, (2, 3))
    plain = export(model, (2, 3), box=(-1, 1) if gated else None)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-12, atol=1e-12)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: plain(v[None])[0]))(x).flatten(1, 1).flatten(2)
    slope = float(torch.linalg.matrix_norm(jacobians.detach(), 2).max())
    assert slope <= float(lipschitz(plain)) <= (100 if gated else 5) * slope


def test_one_step_of_a_cell() -> None:
    cell = nn.RNNCell(2, 3).double()
    want = float(torch.linalg.matrix_norm(cell.weight_ih.detach(), 2))  # from the state 0, which does not move
    assert want <= float(lipschitz(cell, (2,)).detach()) <= want * (1 + 1e-6)


CASES = {
    "filter": (0, 1, nn.Identity()), "tanh": (6, 6, nn.Tanh()), "relu in blocks": (6, 3, nn.ReLU()),
    "abs": (6, 6, nn.LeakyReLU(-1.0)), "one by one": (6, 1, nn.Tanh()), "half abs": (6, 2, HalfAbs()),
    "network": (6, 6, nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))),
}  # fmt: skip


def system(name: str, rate: float = 0.9) -> Recurrent:
    torch.manual_seed(1)
    nv, block, phi = CASES[name]
    phi = copy.deepcopy(phi).requires_grad_(False)
    if isinstance(phi, nn.Sequential):
        for layer in phi[::2]:
            nn.init.orthogonal_(layer.weight, 0.9)
    m = drawn(nv, 4, 2, 3, 0.12)
    m[nv : nv + 4, nv : nv + 4] += 0.4 * torch.eye(4)
    sizes = torch.randn(nv + 7, dtype=torch.float64), torch.eye(4).double(), torch.ones(nv).double()
    return Recurrent(m, *sizes, phi.double(), 4, (nv, nv), block, 3.0, rate)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_claims_hold_or_are_not_believed(name: str) -> None:
    module = system(name)
    assert float(lipschitz(module)) == 3.0
    assert contraction(module) == 0.9
    assert 0 < ascended(module, 10, 12) <= 3.0
    u, states = torch.randn(20, 64, 2, dtype=torch.float64), 3 * torch.randn(2, 64, 4, dtype=torch.float64)
    for now in u:
        before = (states[0] - states[1]).norm(dim=1)
        states = torch.stack([module.step(x, now)[0] for x in states])
        assert ((states[0] - states[1]).norm(dim=1) <= 0.9 * before + 1e-12).all()
    module.gain, module.rate = 0.01, 0.1
    assert float(lipschitz(module)) == math.inf
    assert contraction(module) == math.inf
    module = system(name)
    with torch.no_grad():
        module.bias[0] = math.nan
    assert float(lipschitz(module)) == math.inf


def test_blocks_of_a_phi_that_mixes_units_are_refused() -> None:
    """The mean of two units has a constant of 1/sqrt(2), that of eight a smaller one: here the gain is 1."""
    m = torch.zeros(10, 10, dtype=torch.float64)
    m[0, 9] = m[1, 9] = m[9, 0] = 1
    p, lam = 0.1 * torch.eye(1, dtype=torch.float64), torch.full((8,), 3.0, dtype=torch.float64)
    for phi in (nn.Sequential(Mean(1, keepdim=True), Pad(0, 1)), nn.Softmax(1)):
        module = Recurrent(m, torch.zeros(10).double(), p, lam, phi, 1, (8, 8), 2, 0.8, 0.9)
        with pytest.raises(NoRuleError, match="a phi that acts on each unit alone, got blocks of 2"):
            lipschitz(module)
    assert float(module(torch.ones(1, 1, 1).double())) == 0.5


def test_what_changes_a_network_of_torch_inside_is_refused() -> None:
    class Tenfold(nn.RNN):
        def forward(self, *given: Tensor) -> Any:
            y, state = super().forward(*given)
            return 10 * y, state

    rnn = nn.RNN(2, 2, batch_first=True)
    rnn.register_forward_hook(lambda m, x, y: (10 * y[0], y[1]))
    for function in (lipschitz, export):
        with pytest.raises(NoRuleError, match="forward hooks"):
            function(Outputs(rnn), (3, 2))
        with pytest.raises(NoRuleError, match=r"expected exactly an nn\.RNN, got Tenfold"):
            function(Outputs(Tenfold(2, 2, batch_first=True)), (3, 2))


@pytest.mark.thorough
def test_a_network_of_torch_with_parametrizations_after_a_run() -> None:
    torch.manual_seed(0)
    rnn, u = nn.RNN(2, 2, batch_first=True), torch.randn(2, 4, 2)
    parametrize.register_parametrization(rnn, "weight_hh_l0", nn.Tanh())
    rnn(u)
    plain = export(rnn, (4, 2))
    assert torch.allclose(plain(u), rnn(u)[0], atol=1e-6)
    assert float(lipschitz(plain)) == pytest.approx(float(lipschitz(rnn, (4, 2))), rel=1e-3)
    assert torch.allclose(export(Outputs(rnn), (4, 2))(u), rnn(u)[0], atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_all_ways_to_run_are_one_function(name: str) -> None:
    module, u = system(name), torch.randn(3, 7, 2, dtype=torch.float64)
    y = module(u)
    stream, x, one = module.stream(3), torch.zeros(3, 4, dtype=torch.float64), module.one_step()
    for t in range(7):
        assert torch.allclose(stream.step(u[:, t]), y[:, t], atol=1e-12)
        after = one(torch.cat((x, u[:, t]), 1))
        x, now = module.step(x, u[:, t])
        assert torch.allclose(now, y[:, t], atol=1e-12)
        assert torch.allclose(after, torch.cat((x, now), 1), atol=1e-12)
    for given in (u[:1, 0], u[:, 0, :1]):
        with pytest.raises(ShapeError, match=r"expected an input of shape \(3, 2\), got \("):
            stream.step(given)
    with pytest.raises(ShapeError, match=r"expected states of shape \(B, 4\), got \(3, 1\)"):
        module.step(x[:, :1], u[:, 0])


@pytest.mark.parametrize("name", [name for name in CASES if name != "network"])
def test_the_backward_pass_is_that_of_the_definition(name: str) -> None:
    module, grads = system(name), []
    for by_hand in (True, False):
        given = [
            t.clone().requires_grad_() for t in (module.matrix, module.bias, torch.linspace(-1, 1, 30).view(3, 5, 2))
        ]
        matrix, bias, u = (t.double() for t in given)
        y, _ = simulate(matrix, bias, 4, module.units, module.block, module.phi, u, by_hand)
        grads.append(torch.autograd.grad(y.square().sum(), given))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*grads, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["tanh", "one by one", "network"])
def test_rounding_is_bounded_for_sequences_of_any_length(name: str) -> None:
    module, bounds = system(name), []
    single = copy.deepcopy(module).float()
    exact = copy.deepcopy(single).double()
    for steps in (4, 16, 48):
        u = torch.randn(3, steps, 2)
        local = local_error(exact, (steps, 2), FLOAT32)(u.double())
        error = (single(u).double() - exact(u.double())).flatten(1).norm(dim=1)
        assert (error <= local.error.at).all()
        assert (local.error.at < 3e4 * error).all()
        moved = u + 0.1 * torch.randn_like(u)
        far = (moved - u).double().flatten(1).norm(dim=1)
        error = (single(moved).double() - exact(moved.double())).flatten(1).norm(dim=1)
        assert (error <= local.error.at + local.error.slope * far).all()
        assert (local.peak.at >= exact(u.double()).abs().amax((1, 2))).all()
        bounds.append(float(local.error.at.max()) / steps**0.5)
        assert (local_error(exact, (steps, 2), FLOAT64)(u.double()).error.at < 1e-8 * local.error.at).all()
    assert bounds[2] < 1.8 * bounds[1]  # a contraction forgets its errors
    exact.rate = 1.0
    assert local_error(exact, (48, 2), FLOAT32)(u.double()).error.at.max() > 1.3 * bounds[2] * 48**0.5


def test_shapes_that_do_not_fit_are_refused() -> None:
    module = system("tanh")
    with pytest.raises(ShapeError, match=r"expected sequences \(B, T, 2\), got \(3, 2\)"):
        module(torch.zeros(3, 2))
    with pytest.raises(ShapeError, match="blocks that divide the units"):
        Recurrent(HALF, HALF[0], HALF[:1, :1], HALF[0, :0], nn.Identity(), 2, (0, 0), 1, 1.0, 1.0)
    with pytest.raises(ShapeError, match=r"units \(0, 1\)"):  # a unit behind none
        Recurrent(torch.zeros(2, 3), HALF[0], HALF[:1, :1], HALF[0, :0], nn.ReLU(), 1, (0, 1), 1, 1.0, 1.0)


def test_a_phi_that_is_still_trained_has_a_constant() -> None:
    through = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])  # y = phi(u)
    phi = nn.PReLU(init=2.0)
    module = Recurrent(through, torch.zeros(3), torch.eye(1), torch.tensor([0.5]), phi, 1, (1, 1), 1, 2.001, 1.0)
    assert 2 <= lipschitz(module) <= 2.002


def test_autocast_leaves_the_recursion_in_its_format() -> None:
    torch.manual_seed(0)
    layer, u = Ren(2, 3, 4, 6), torch.randn(2, 5, 2, requires_grad=True)
    for network in (layer, export(layer, (5, 2))):
        expected = network(u)
        with torch.autocast("cpu", torch.bfloat16):
            found = network(u)
            (slope,) = torch.autograd.grad(found.sum(), u)
            rounded = network(u.bfloat16()).float()  # as behind a layer that autocast has rounded
        assert torch.equal(found, expected)
        # Products of torch outside of the loop are rounded there.
        assert torch.allclose(slope, torch.autograd.grad(expected.sum(), u)[0], atol=0.02)
        assert torch.allclose(rounded, expected, atol=0.1)
