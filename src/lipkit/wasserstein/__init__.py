"""The Wasserstein-1 distance of two distributions from samples, bounded from below by a critic of proved constant."""

from lipkit.wasserstein import wgan as wgan
from lipkit.wasserstein.critics import hinge_kr_loss, kr_loss
from lipkit.wasserstein.estimate import Estimate, distance
from lipkit.wasserstein.samples import assignment

__all__ = ["Estimate", "assignment", "distance", "hinge_kr_loss", "kr_loss", "wgan"]

__dir__ = __all__.copy
