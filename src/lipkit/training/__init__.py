"""Training: options, losses, schedules, the loop and its run folders, regularisation, adversarial training."""

from lipkit.training.adversarial import PgdAdversary
from lipkit.training.loop import Run, fit
from lipkit.training.optim import RiemannianAdam, SpectralDescent, Together
from lipkit.training.options import TrainOptions
from lipkit.training.progress import Progress
from lipkit.training.regularisation import LipschitzPenalty

__all__ = ["Progress", "Run", "TrainOptions", "fit"]  # the loop
__all__ += ["LipschitzPenalty", "PgdAdversary", "RiemannianAdam", "SpectralDescent", "Together"]  # its parts

__dir__ = __all__.copy
