"""The square wave of [LBDN] with the settings of the authors' code, which differ from those in the paper."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from lipkit import fit, models
from lipkit.data.embedded import square_wave
from lipkit.data.split import Split
from lipkit.evaluation import evaluate_regression
from lipkit.layers import AolLinear, Scale, SllLinear
from lipkit.layers.sandwich import CayleyPairLinear
from lipkit.lowering import export


def network(family: str, gamma: float) -> nn.Module:
    """Nine hidden layers as in the authors' code; for ``sll`` eight blocks, each with 128 hidden features.

    >>> [sum(p.numel() for p in network(family, 1.0).parameters()) for family in ("aol", "cayley", "sandwich", "sll")]
    [132481, 132491, 127474, 133120]
    """
    if family == "sandwich":
        return models.lbdn(hidden=[86] * 9, gamma=gamma, input_shape=(1,), classes=1)
    if family != "sll":
        return models.mlp([128] * 9, family, gamma, input_shape=(1,), classes=1, activation="relu")
    root = math.sqrt(gamma)
    sizes = [1, *[128] * 7, 1]
    blocks = [SllLinear(p, q, hidden=128) for p, q in pairwise(sizes)]
    return nn.Sequential(Scale(root), *blocks, Scale(root))


@torch.no_grad()
def start(model: nn.Module) -> nn.Module:
    """Draw the parameters as the authors' code does: by Xavier's rule (AOL, SLL), as ``nn.Linear`` (sandwich)."""
    for layer in model.modules():
        if isinstance(layer, AolLinear | SllLinear):
            nn.init.xavier_normal_(layer.free)
            bound = 1 / math.sqrt(layer.free.shape[1])
            layer.bias.uniform_(-bound, bound)  # type: ignore[union-attr]
        if isinstance(layer, SllLinear):
            layer.log_q.copy_(torch.rand_like(layer.log_q).clamp_min(1e-6).log())
        if isinstance(layer, CayleyPairLinear):
            free = nn.Linear(layer.in_features + layer.out_features, layer.out_features)
            x, y = free.weight.T.split([layer.out_features, layer.in_features])
            layer.x_free.copy_(x)
            layer.x_scale.copy_(x.norm())
            layer.y_free.copy_(y)
            layer.y_scale.copy_(y.norm())
            layer.bias.copy_(free.bias)  # type: ignore[union-attr]
    return model


def square_wave_fit(
    *, seed: int = 0, family: str, gamma: float, epochs: int = 200, restarts: int = 64, steps: int = 200
) -> dict[str, float]:
    """Train and certify one network, gradients unclipped, on 300 points drawn by the seed.

    Args:
        family: aol, cayley, sll or sandwich.
        gamma: the prescribed gain.
        epochs: of batches of 50, by Adam with a triangular schedule that peaks at 0.01.
        restarts, steps: of the search for the steepest secant.

    Returns:
        ``lower``, the slope of the steepest secant found; ``lipschitz``, the proved constant; ``reached`` and
        ``tightness``, their quotients lower / gamma and lower / lipschitz; ``test_mse`` on 200 equispaced points.

    >>> found = square_wave_fit(family="cayley", gamma=1.0, epochs=1, restarts=2, steps=2)
    >>> 0 < found["lower"] <= found["lipschitz"] < 1.00001
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x, t = 4 * torch.rand(300, 1) - 2, torch.linspace(-2, 2, 200)[:, None]
        model = start(network(family, gamma))
        fit(
            model, Split(x, square_wave(x)), epochs=epochs, batch_size=50, lr=0.01, loss=F.mse_loss, seed=seed,
            accelerator="cpu",
        )  # fmt: skip
        found = evaluate_regression(
            export(model.eval(), (1,)), Split(t, square_wave(t)), restarts=restarts, steps=steps, seed=seed
        )
    lower, proved = found.search.lower, found.certificate.constant
    return {
        "reached": lower / gamma, "tightness": lower / proved, "test_mse": found.mse, "lower": lower,
        "lipschitz": proved,
    }  # fmt: skip
