"""Accuracies or errors of a network on test data, checked against its certificates."""

from lipkit.evaluation.attack import (
    Attack,
    Attacked,
    Attempt,
    CrossCheck,
    Examples,
    attack_samples,
    check_examples,
    choose_samples,
)
from lipkit.evaluation.classification import EPS, ClassRow, Evaluation, evaluate, per_class
from lipkit.evaluation.latency import Latency, latency
from lipkit.evaluation.regression import RegressionEvaluation, evaluate_regression

__all__ = ["EPS", "ClassRow", "Evaluation", "RegressionEvaluation", "evaluate", "evaluate_regression", "per_class"]
__all__ += ["Attack", "Attacked", "Attempt", "CrossCheck", "Examples"]  # attacks against certificates
__all__ += ["attack_samples", "check_examples", "choose_samples"]
__all__ += ["Latency", "latency"]

__dir__ = __all__.copy
