"""What a network is worth on test data: accuracies or errors, held against what was certified."""

from __future__ import annotations

from lipkit.evaluation.classification import EPS, ClassRow, Evaluation, evaluate, per_class
from lipkit.evaluation.cross_check import (
    Attack,
    Attacked,
    CrossCheck,
    attack_certificate,
    check_accuracy,
    check_examples,
)
from lipkit.evaluation.latency import Latency, latency
from lipkit.evaluation.regression import RegressionEvaluation, evaluate_regression

__all__ = [
    "EPS",
    "Attack",
    "Attacked",
    "ClassRow",
    "CrossCheck",
    "Evaluation",
    "Latency",
    "RegressionEvaluation",
    "attack_certificate",
    "check_accuracy",
    "check_examples",
    "evaluate",
    "evaluate_regression",
    "latency",
    "per_class",
]
