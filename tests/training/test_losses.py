from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import lipkit
from lipkit.errors import OptionError
from lipkit.training import losses
from lipkit.training.options import chosen


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    return y, torch.randint(5, (40,), generator=generator)


def log_softmax(y: np.ndarray) -> np.ndarray:
    shifted = y - y.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def test_hinge_equals_its_formula(batch):
    y, t = batch
    n, total, margin = y.numpy(), 0.0, math.sqrt(2) * 3.0 * 0.2
    for row, label in zip(n, t.tolist(), strict=True):
        total += sum(max(0.0, margin - row[label] + row[i]) for i in range(5) if i != label) / 5
    assert losses.hinge(y, t, eps0=0.2, lipschitz=3.0).item() == pytest.approx(total / len(n), rel=1e-12)


def test_hinge_is_zero_exactly_when_the_radius_is_certified():
    eps0, constant = 0.3, 2.0
    edge = math.sqrt(2) * constant * eps0
    label = torch.tensor([0])
    for margin, zero in ((edge * (1 + 1e-6), True), (edge * (1 - 1e-6), False)):
        y = torch.tensor([[margin, 0.0]], dtype=torch.float64)
        assert (losses.hinge(y, label, eps0=eps0, lipschitz=constant).item() == 0) is zero


def test_offset_cross_entropy_equals_its_formula(batch):
    y, t = batch
    n = y.numpy().copy()
    rows = np.arange(len(n))
    n[rows, t.numpy()] -= 1.7
    expected = -0.25 * log_softmax(n / 0.25)[rows, t.numpy()].mean()
    found = losses.offset_cross_entropy(y, t, temperature=0.25, offset=1.7)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_label_smoothing_equals_its_formula() -> None:
    y = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]], dtype=torch.float64)
    t = torch.tensor([0, 2])
    logs = (y - y.exp().sum(1, keepdim=True).log()).numpy()
    expected = -np.mean([0.9 * row[label] + 0.1 * row.mean() for row, label in zip(logs, t, strict=True)])
    assert chosen("loss", "cross_entropy", smoothing=0.1)(y, t).item() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(OptionError, match=r"smoothing: expected a number in \[0, 1\), got 1"):
        chosen("loss", "cross_entropy", smoothing=1.0)


def test_offset_cross_entropy_without_offset_is_cross_entropy(batch):
    found = losses.offset_cross_entropy(*batch, temperature=1.0, offset=0.0)
    assert found.item() == pytest.approx(losses.cross_entropy(*batch).item(), rel=1e-12)


def test_emma_equals_its_formula_and_holds_the_shift_fixed(batch):
    y, t = batch
    n, label, reach, temperature = y.numpy(), t.numpy(), math.sqrt(2) * 2.0 * 0.3, 0.5
    rows = np.arange(len(n))
    raised = np.clip((n[rows, label][:, None] - n) / reach, 0.01, 1)
    raised[rows, label] = 0
    logs = log_softmax((n + raised * reach) / temperature)
    leaf = y.clone().requires_grad_()
    found = losses.emma(leaf, t, eps=0.3, temperature=temperature, lipschitz=2.0)
    assert found.item() == pytest.approx(-temperature * logs[rows, label].mean(), rel=1e-12)
    found.backward()
    expected = np.exp(logs)
    expected[rows, label] -= 1
    np.testing.assert_allclose(leaf.grad.numpy(), expected / len(n), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("power", [0.0, 1.0, 5.0])
def test_logit_annealing_equals_its_formula(batch, power):
    y, t = batch
    n, rows = y.numpy().copy(), np.arange(40)
    n[rows, t.numpy()] -= 0.6
    logs = log_softmax(n / 0.75)[rows, t.numpy()]
    expected = (-0.75 * (1 - np.exp(logs)) ** power * logs).mean()
    found = losses.logit_annealing(y, t, offset=0.6, power=power)
    assert found.item() == pytest.approx(expected, rel=1e-10)


def test_logit_annealing_is_finite_where_everything_is_learnt():
    y = torch.tensor([[200.0, 0.0]], requires_grad=True)
    losses.logit_annealing(y, torch.tensor([0]), power=0.5).backward()
    assert torch.isfinite(y.grad).all()


def test_certificate_regularized_equals_its_formula(batch):
    y, t = batch
    n, rows = y.numpy(), np.arange(40)
    others = np.where(np.eye(5, dtype=bool)[t.numpy()], -np.inf, n).max(axis=1)
    radius = np.maximum(0, n[rows, t.numpy()] - others) / (math.sqrt(2) * 1.5)
    assert radius.max() > 0
    assert radius.min() == 0
    expected = -log_softmax(n)[rows, t.numpy()].mean() - 0.4 * radius.mean()
    found = losses.certificate_regularized_cross_entropy(y, t, weight=0.4, lipschitz=1.5)
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_hkr_equals_its_formula(batch, alpha):
    y, t = batch
    n, labels, distance, short = y.numpy(), t.numpy(), 0.0, 0.0
    for k in range(5):
        distance += (n[labels == k, k].mean() - n[labels != k, k].mean()) / 5
    for row, label in zip(n, labels.tolist(), strict=True):
        for k in range(5):
            sign, weight = (1, 4) if k == label else (-1, 1)
            short += weight * max(0.0, 0.6 - sign * row[k]) / 5 / len(n)
    found = losses.hkr(y, t, alpha=alpha, min_margin=1.2)
    assert found.item() == pytest.approx(alpha * short - (1 - alpha) * distance, rel=1e-12)


def test_hkr_of_two_classes_is_the_distance_of_the_critic():
    critic = torch.tensor([[4.0], [2.0], [-1.0]], dtype=torch.float64)
    labels = torch.tensor([1, 1, 0])
    assert losses.hkr(critic, labels, alpha=0.0).item() == -4.0
    assert losses.hkr(critic, labels, alpha=1.0, min_margin=5.0).item() == pytest.approx((0 + 0.5 + 1.5) / 3)
    assert losses.hkr(critic[:2], labels[:2], alpha=0.0).item() == -3.0  # nobody on the other side
    with pytest.raises(OptionError, match=r"alpha in \[0, 1\], got 1.5"):
        losses.hkr(critic, labels, alpha=1.5)


def test_largest_hinge_equals_its_formula(batch):
    y, t = batch
    n, label = y.numpy(), t.numpy()
    others = np.where(np.eye(5, dtype=bool)[label], -np.inf, n).max(axis=1)
    expected = np.maximum(0, math.sqrt(2) * 3.0 * 0.2 - n[np.arange(40), label] + others).mean()
    assert losses.largest_hinge(y, t, eps0=0.2, lipschitz=3.0).item() == pytest.approx(expected, rel=1e-12)


def test_the_logistic_loss_of_one_output():
    y, t = torch.tensor([[1.5], [-0.3], [0.2]], dtype=torch.float64), torch.tensor([1, 1, 0])
    signed = np.array([1.5, -0.3, -0.2]) - 0.4
    expected = 0.5 * np.log1p(np.exp(-signed / 0.5)).mean()
    assert losses.offset_cross_entropy(y, t, temperature=0.5, offset=0.4).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("alpha", "size"), [(0.0, 3.0), (0.3, 3.0), (1.0, 3.0), (0.3, 0.1)])
def test_soft_and_smooth_hkr_equal_their_formulas(batch, alpha, size):
    y, t = size * batch[0], batch[1]
    n, soft, smooth = y.numpy(), 0.0, 0.0
    inverse, sharpness = 2.0 * 0.5 / max(0.5, np.abs(n).mean()), 2 * math.log(4) / (0.5 * 0.7)
    for row, label in zip(n, t.tolist(), strict=True):
        others = [k for k in range(5) if k != label]
        weights = np.exp(inverse * row[others]) / np.exp(inverse * row[others]).sum()
        parts = [(1.0, row[label])] + [(w, -row[k]) for w, k in zip(weights, others, strict=True)]
        soft += sum(w * (alpha * max(0.0, 0.25 - s) - (1 - alpha) * s) for w, s in parts) / 40
        rival = np.log(np.exp(sharpness * 1.5 * row[others]).sum()) / sharpness
        own = 1.5 * row[label]
        smooth += (alpha * (max(0.0, 0.25 - own) + max(0.0, 0.25 + rival)) - (1 - alpha) * (own - rival)) / 40
    found = losses.soft_hkr(y, t, alpha=alpha, min_margin=0.5, temperature=2.0)
    assert found.item() == pytest.approx(soft, rel=1e-12)
    found = losses.lse_hkr(y, t, alpha=alpha, min_margin=0.5, temperature=1.5, penalty=0.7)
    assert found.item() == pytest.approx(smooth, rel=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_cosine_equals_its_formula(batch, share):
    y, t = batch
    expected = 0.0
    for row, label in zip(y.numpy(), t.tolist(), strict=True):
        missing = np.array(
            [max(0.0, 0.3 - (row[label] - row[k]) / (math.sqrt(2) * 1.5)) for k in range(5) if k != label]
        )
        weights = np.exp(missing) / np.exp(missing).sum()
        expected += (share * (weights * missing).sum() - (1 - share) * row[label] / np.linalg.norm(row)) / 40
    assert losses.cosine(y, t, share=share, eps=0.3, lipschitz=1.5).item() == pytest.approx(expected, rel=1e-12)


def test_trades_equals_its_formula(batch):
    y, t = batch
    t = t[:20].repeat(2)
    clean, moved = log_softmax(y.numpy()[:20]), log_softmax(y.numpy()[20:])
    change = (np.exp(clean) * (clean - moved)).sum(1).mean()
    expected = -clean[np.arange(20), t.numpy()[:20]].mean() + 2.5 * change
    assert losses.trades(y, t, beta=2.5).item() == pytest.approx(expected, rel=1e-12)
    for part in (slice(1, None), slice(2, None)):  # an odd number; and labels that are not those of the first half
        with pytest.raises(OptionError, match=r"then their adversarial examples.*: set adversary.beside"):
            losses.trades(y[part], t[part])


# The gradient of these holds some of what they compute fixed: emma its shifts, soft_hkr its temperature (a batch of
# small outputs has a fixed one).
@pytest.mark.parametrize("name", sorted({*losses.LOSSES} - {"emma", "mse"}))
def test_gradients_are_those_of_finite_differences(batch, name):
    y, t = batch
    loss, t = chosen("loss", name), t[:3].repeat(2)  # as trades needs it
    assert torch.autograd.gradcheck(lambda x: loss(x, t), (0.3 * y[:6]).requires_grad_())


PEERS = {
    "SoftHKRMulticlassLoss(alpha=0.7, min_margin=0.5, alpha_mean=0.0)": ("soft_hkr", {"alpha": 0.7, "min_margin": 0.5}),
    "LseHKRMulticlassLoss(alpha=0.7, min_margin=0.5, temperature=2.0, penalty=1.5)": (
        "lse_hkr", {"alpha": 0.7, "min_margin": 0.5, "temperature": 2.0, "penalty": 1.5},
    ),
    "CategoricalHingeLoss(min_margin=0.5)": ("largest_hinge", {"eps0": 0.5 / math.sqrt(2)}),
    "TauCrossEntropyLoss(tau=4.0)": ("offset_cross_entropy", {"temperature": 0.25, "offset": 0.0}),
    "TauBCEWithLogitsLoss(tau=4.0)": ("offset_cross_entropy", {"temperature": 0.25, "offset": 0.0}),
    "CosineLoss()": ("cosine", {}),
    "Cosine_VRA_Loss(gamma=0.3, L=0.5)": ("cosine", {"share": 0.3, "lipschitz": 0.5 * math.sqrt(2)}),
}  # fmt: skip


@pytest.mark.parametrize("expression", PEERS)
@pytest.mark.filterwarnings("ignore")
def test_losses_of_peers(batch, expression):
    package = "orthogonium.losses" if expression.startswith("Cosine") else "deel.torchlip"
    theirs = eval(expression, vars(pytest.importorskip(package, exc_type=ImportError)))
    (y, t), (name, options) = batch, PEERS[expression]
    target = t if package.startswith("orthogonium") else torch.nn.functional.one_hot(t, 5).double()
    if "BCE" in expression:
        y, t = y[:, :1], (t > 2).long()
        target = t[:, None].double()
    expected = theirs(y, target)
    assert chosen("loss", name, **options)(y, t).item() == pytest.approx(expected.item(), rel=1e-6)


def test_every_loss_has_a_finite_gradient(batch):
    y, t = batch
    t = t[:20].repeat(2)  # as trades needs it
    for name in losses.LOSSES:
        leaf = y.clone().requires_grad_()
        chosen("loss", name)(leaf, y.flip(0) if name in losses.REGRESSION else t).backward()
        assert torch.isfinite(leaf.grad).all(), name
        assert leaf.grad.abs().max() > 0, name


def test_mse_refuses_shapes_that_would_broadcast():
    with pytest.raises(OptionError, match=r"expected targets of shape \(4, 1\), got \(4,\)"):
        losses.mse(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hing", {}, "expected loss as one of hinge, .*got 'hing'"),
        ("hinge", {"eps": 0.1}, "among eps0, lipschitz, got 'eps'"),
        ("cross_entropy", {"eps0": 0.1}, r"among smoothing, got 'eps0'"),
        ("hinge", {"eps0": 0}, "expected eps0 > 0, got 0"),
        ("hinge", {"eps0": float("nan")}, "expected eps0 of loss 'hinge' as a finite number, got nan"),
        ("hinge", {"eps0": True}, "finite number, got True"),
        ("hinge", {"lipschitz": -1}, "expected lipschitz > 0, got -1"),
        ("offset_cross_entropy", {"temperature": 0}, "expected temperature > 0"),
        ("offset_cross_entropy", {"offset": -1}, "expected offset >= 0"),
        ("certificate_regularized", {"weight": -1}, "expected weight >= 0"),
        ("logit_annealing", {"power": -1}, "expected power >= 0"),
        ("soft_hkr", {"temperature": 0}, "expected temperature > 0"),
        ("lse_hkr", {"penalty": 0}, "expected penalty > 0"),
    ],
)
def test_build_refuses(name, options, message):
    with pytest.raises(OptionError, match=message):
        chosen("loss", name, **options)


def test_gloro_equals_its_formula() -> None:
    y = torch.tensor([[2.0, 1.5, -1.0], [0.0, 3.0, 2.9]], dtype=torch.float64, requires_grad=True)
    t, constant = torch.tensor([0, 2]), torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    found = losses.gloro(y, t, eps=0.3, lipschitz=constant)
    rows = y.detach().numpy()
    reach = math.sqrt(2) * 0.3 * 1.7
    expected = 0.0
    for row, target in zip(rows, t.tolist(), strict=True):
        best = max(range(3), key=lambda i: row[i])
        rival = max(row[i] + reach for i in range(3) if i != best)
        logits = [*row, rival]
        expected += (math.log(sum(math.exp(v) for v in logits)) - row[target]) / 2
    assert found.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda y, c: losses.gloro(y, t, eps=0.3, lipschitz=c), (y, constant))
    with pytest.raises(OptionError, match="lipschitz > 0"):
        losses.gloro(y, t, lipschitz=0.0)


@pytest.mark.thorough
def test_gloro_trains_layers_without_a_constraint() -> None:
    torch.manual_seed(0)
    # Two classes on either side of a line, a margin of 1 apart: a constant of about 1 separates them.
    x = torch.randn(128, 2)
    x[:, 0] += torch.where(x[:, 0] > 0, 0.5, -0.5)
    t = (x[:, 0] > 0).long()
    certified = {}
    for name in ("gloro", "cross_entropy"):
        torch.manual_seed(0)
        sizes = [torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.ReLU()]
        net = torch.nn.Sequential(*sizes, torch.nn.Linear(16, 2))
        optimizer = torch.optim.Adam(net.parameters(), 0.02)
        for _ in range(120):
            optimizer.zero_grad()
            options = {"eps": 0.45, "lipschitz": lipkit.lipschitz(net)} if name == "gloro" else {}
            losses.LOSSES[name](net(x), t, **options).backward()
            optimizer.step()
        plain = lipkit.export(net.eval(), (2,))
        certified[name] = float(lipkit.certify(plain, x, t).accuracy(0.45))
    assert certified["gloro"] > 0.8
    assert certified["cross_entropy"] < certified["gloro"] - 0.2
