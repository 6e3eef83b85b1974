"""Measurements of a trained, exported network beyond its certificates; Wasserstein distances by critics of a family."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipkit import data as datasets
from lipkit import lowering, modules
from lipkit import wasserstein as w1
from lipkit.analysis import lipschitz_lower_bound
from lipkit.attacks import ATTACKS, run_attack
from lipkit.attacks.ascent import ball, clip, misclassified
from lipkit.bounds import spectral_norm
from lipkit.certificates import format_radius
from lipkit.data import Data
from lipkit.evaluation.attack import choose_samples
from lipkit.experiments.recipe_schema import parse_numbers
from lipkit.modules.storage import float64_copy
from lipkit.report.run_files import read_series

ATTACKED = 1000  # default number of samples that `attack` attacks
BATCH = 250  # samples that are attacked at once


def drawn(data: Data, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """At most ``samples`` test samples: those that `lipkit.evaluation.evaluate` attacks with this seed."""
    return data.test.batch(choose_samples(len(data.test), samples, seed))


def attack(
    network: modules.Network,
    data: Data,
    *,
    seed: int = 0,
    name: str,
    eps: float | str | Sequence[float | str],
    norm: str = "l2",
    steps: int | None = None,
    restarts: int | None = None,
    samples: int = ATTACKED,
) -> dict[str, float]:
    """Accuracy under an attack, with a figure ``NAME(eps)``, or ``NAME_linf(eps)``, for each radius.

    Args:
        seed: of the choice of samples, and of the attack.
        name, norm, steps, restarts: see `lipkit.attacks.run_attack`.
        eps: radii in units of the norm, also as text such as ``36/255``.
        samples: number of samples to attack, if there are so many.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = network.to(device)
    x, y = drawn(data, samples, seed)
    radii = parse_numbers(eps)
    survived = dict.fromkeys(radii, 0)
    for some, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        clean, labels = some.to(device), labels.to(device)
        with torch.no_grad():
            wrong = misclassified(network(clean), labels)
        reach = torch.where(wrong, 0.0, math.inf)  # distance of the closest example
        for radius in [None] if ATTACKS[name].minimum_norm else radii:
            points = run_attack(
                name, network, clean, labels, eps=radius, norm=norm, steps=steps, restarts=restarts,
                box=data.input_range, generator=torch.Generator().manual_seed(seed),
            ).points  # fmt: skip
            with torch.no_grad():
                wrong = misclassified(network(points), labels)
            reach = torch.where(wrong, torch.minimum(reach, ball(norm).distance(points, clean)), reach)
        for radius in radii:
            survived[radius] += int((reach > radius).sum())
    suffix = "_linf" if norm == "linf" else ""
    return {f"{name}{suffix}({format_radius(radius)})": count / len(x) for radius, count in survived.items()}


def accuracy(network: modules.Network, data: Data, *, seed: int = 0, samples: int = ATTACKED) -> dict[str, float]:
    """``clean_attacked``: accuracy on the test samples that `attack` attacks."""
    x, y = drawn(data, samples, seed)
    with torch.no_grad():
        wrong = torch.cat([misclassified(network(a), b) for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True)])
    return {"clean_attacked": float((~wrong).double().mean())}


def responses(network: modules.Network, data: Data, *, seed: int = 0) -> dict[str, float]:
    """``fit(x)``: the output of a network R -> R at 61 equispaced x from -0.3 to 0.3, in float64."""
    x = torch.linspace(-0.3, 0.3, 61, dtype=torch.float64)
    with torch.no_grad():
        y = float64_copy(network)(x[:, None])[:, 0]
    return {f"fit({a:.6g})": b for a, b in zip(x.tolist(), y.tolist(), strict=True)}


def local_lipschitz(
    network: modules.Network, data: Data, *, seed: int = 0, samples: int = 64, steps: int = 100
) -> dict[str, float]:
    """``lower``: slope of the steepest secant that a search from test samples found, a lower bound of the constant."""
    x, _ = data.test.batch(slice(None))
    found = lipschitz_lower_bound(network, data.input_range, start=x, restarts=samples, steps=steps, seed=seed)
    return {"lower": found.lower}


def attack_steps(network: modules.Network, data: Data, *, steps: Sequence[int], **options: Any) -> dict[str, float]:
    """``NAME_after(S)``: accuracy under `attack` at one radius, for each number S of ``steps``."""
    figures = {}
    for count in steps:
        (value,) = attack(network, data, steps=count, **options).values()
        figures[f"{options['name']}_after({count})"] = value
    return figures


def secant_slopes(
    network: modules.Network,
    data: Data,
    *,
    seed: int = 0,
    eps: float | str = "36/255",
    steps: int = 10,
    samples: int = 1000,
    batch_size: int = 250,
) -> dict[str, float]:
    r"""``emp_lip``: mean over test samples of the slope of the steepest secant found from each of them.

    .. math:: \frac1n \sum_i \max_{\|d\| \le \epsilon} \frac{\|f(x_i + d) - f(x_i)\|_2}{\|d\|_2}

    The search is projected gradient ascent with steps of eps / 4. Each term, and so the mean, is at most the Lipschitz
    constant. ``emp_lip_batch`` is the mean over batches of the largest slope in each, as the published code prints it.

    References:
        Yang et al., NeurIPS 2020, whose norms are l1 and l_inf; [Cayley] section 5.2, which names no norms, and its
        code (locuslab/orthogonal-convolutions), which has l2, one batch of 256 and a start on the sphere of eps.
    """
    (radius,) = parse_numbers(eps)
    generator = torch.Generator().manual_seed(seed)
    box, space = data.input_range, ball("l2")
    x = drawn(data, samples, seed)[0].double()
    f = float64_copy(network)
    slopes = []
    for part in x.split(batch_size):
        here = f(part).flatten(1)
        start = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        y = clip(part + 0.5 * radius * space.direction(start, generator), box)
        best, around = (torch.full((len(part),), value, dtype=torch.float64) for value in (0.0, radius))
        for step in range(steps + 1):
            y = y.detach().requires_grad_()
            slope = (f(y).flatten(1) - here).norm(dim=1) / (y - part).flatten(1).norm(dim=1).clamp_min(1e-12)
            best = torch.maximum(best, slope.detach())
            if step < steps:
                (gradient,) = torch.autograd.grad(slope.sum(), y)
                ahead = y.detach() + radius / 4 * space.direction(gradient, generator)
                y = space.project(ahead, part, around, box)
        slopes.append(best)
    largest = torch.stack([part.amax() for part in slopes])
    return {"emp_lip": float(torch.cat(slopes).mean()), "emp_lip_batch": float(largest.mean())}


def jacobian_norms(
    network: modules.Network, data: Data, *, seed: int = 0, samples: int = 1000, batch_size: int = 100
) -> dict[str, float]:
    """``jacobian_mean`` and ``jacobian(Q)``: mean and every fifth percentile Q of the spectral norm of the logits'
    Jacobian at test samples."""
    x, _ = drawn(data, samples, seed)
    norms = []
    for part in x.split(batch_size):
        part = part.requires_grad_()
        y = network.cpu()(part)
        rows = [torch.autograd.grad(c.sum(), part, retain_graph=True)[0].flatten(1) for c in y.unbind(1)]
        norms.append(torch.linalg.matrix_norm(torch.stack(rows, 1).double(), 2))
    found = torch.cat(norms)
    quantiles = {f"jacobian({q})": float(found.quantile(q / 100)) for q in range(0, 101, 5)}
    return {"jacobian_mean": float(found.mean()), **quantiles}


def layer_norms(network: modules.Network, data: Data, *, seed: int = 0) -> dict[str, float]:
    """``norm_product`` and ``largest_norm``: product and maximum of the dense layers' spectral norms."""
    norms = [float(spectral_norm(m.weight)) for m in network.modules() if isinstance(m, nn.Linear)]
    return {"norm_product": math.prod(norms), "largest_norm": max(norms, default=0.0)}


def layer_gains(
    network: modules.Network, data: Data, *, seed: int = 0, restarts: int = 64, steps: int = 200
) -> dict[str, float]:
    r"""Lower bounds of the gain of each dense layer with its activation, which is at most 1 by construction.

    A sandwich layer is 1-Lipschitz in the norms :math:`z^\top S_k z` of its input and output. The Schur complements

    .. math:: S_0 = \gamma I, \qquad S_{k+1} = 2\Lambda_k - \Lambda_k W_k S_k^{-1} W_k^\top \Lambda_k, \qquad
        S_{L+1} = I / \gamma

    come from the network's multipliers and its proved gain. The gains of other layers are in the l2 norm.

    Args:
        network: exported; dense layers with an activation between each two.
        seed: of the search, which covers all inputs, as in the paper. Half of its starts make every unit of a ReLU
            positive; a random input makes only half of the units positive.
        restarts, steps: see `lipkit.analysis.lipschitz_lower_bound`.

    Returns:
        For layer K = 0, 1, ...: ``layer_gain(K)``, the slope of the steepest secant found, and ``layer_norm(K)``, the
        spectral norm of its weight. ``least_layer_gain`` is the smallest of the gains.

    References:
        [LBDN] equations 5 and 10, figure 4.
    """
    chain = [*float64_copy(network)]
    places = [i for i, m in enumerate(chain) if isinstance(m, nn.Linear)]
    multipliers = network.multipliers()
    gain = float(lowering.lipschitz(network)) if multipliers else 1.0
    figures: dict[str, float] = {}
    metric = math.sqrt(gain) * torch.eye(chain[places[0]].in_features, dtype=torch.float64)
    for k, i in enumerate(places):
        weight, scale = chain[i].weight.detach(), multipliers.get(i + 1)
        whitened = torch.linalg.solve(metric, weight, left=False)
        if scale is not None:
            inner = scale.double()[:, None] * whitened
            metric = torch.linalg.cholesky(2 * scale.double().diag() - inner @ inner.mT, upper=True)
        else:
            metric = torch.eye(len(weight), dtype=torch.float64) / math.sqrt(gain)
        first, last = (nn.utils.skip_init(nn.Linear, n, len(weight)) for n in (weight.shape[1], len(weight)))
        first.weight, first.bias, last.weight = map(nn.Parameter, (whitened, chain[i].bias.detach(), metric))
        last.bias = None
        between = chain[i + 1 : (places[k + 1] if k + 1 < len(places) else None)]
        layer = nn.Sequential(first, *between, last)
        start = _gain_starts(first, restarts, seed)
        found = lipschitz_lower_bound(layer, start=start, restarts=restarts, steps=steps, seed=seed)
        figures |= {f"layer_gain({k})": found.lower, f"layer_norm({k})": float(spectral_norm(weight))}
    return {"least_layer_gain": min(v for name, v in figures.items() if "gain" in name), **figures}


def _gain_starts(first: nn.Linear, count: int, seed: int) -> Tensor:
    """Starts ``(2 count, n)``: normal points, and points that ``first`` maps, in least squares, to positive values."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = first.weight.shape
    anywhere = 3 * torch.randn(count, columns, generator=generator, dtype=torch.float64)
    positive = 3 * torch.randn(count, rows, generator=generator, dtype=torch.float64).abs()
    # Without rtol, nearly singular directions would put points so far away that rounding swamps the secants.
    inverse = torch.linalg.pinv(first.weight.detach(), rtol=0.01)
    return torch.cat((anywhere, (positive - first.bias.detach()) @ inverse.mT))


def learning_curve(folder: Path) -> dict[str, float]:
    """``error_after(E)``: 1 - accuracy on test samples after each epoch E at which the training evaluated."""
    return {f"error_after({epoch:g})": 1 - value for epoch, value in read_series(folder).get("clean", [])}


def wasserstein(
    *,
    seed: int = 0,
    root: Path | None = None,
    family: str,
    data: str,
    samples: int = 5000,
    generator_steps: int = 2000,
    steps: int = 2000,
    batch_size: int = 64,
    rates: Sequence[float] = (0.1, 0.01, 0.001, 0.0001),
) -> dict[str, float]:
    """The best held-out lower bound of W1(data, generator) by critics of a family, one trained at each rate.

    The generator is the same for every family: it is trained first, against a Cayley critic with ``seed``.

    Args:
        family: acronym of the critic's layers.
        data: name of the data set.
        samples: number of images, and of generated images.
        generator_steps: training steps of the generator.
        steps: training steps of each critic.
        batch_size: samples in a step.
        rates: learning rates of the critic.

    Returns:
        ``distance`` and its interval ``low`` and ``high``, in the l2 norm of images in [0, 1]; ``rate``; the
        critic's proved ``constant``.
    """
    x, _ = datasets.load(data, root=root, limit=samples).train.batch(torch.arange(samples))
    made = w1.wgan.train(x, steps=generator_steps, batch_size=batch_size, seed=seed)
    fake = made.sample(len(x), seed=seed)
    found = {
        rate: w1.distance(x, fake, critic=family, steps=steps, batch_size=batch_size, lr=rate, seed=seed)
        for rate in rates
    }
    rate, best = max(found.items(), key=lambda item: item[1].value)
    return {"distance": best.value, "low": best.low, "high": best.high, "rate": rate, "constant": best.constant}
