"""Estimators for scikit-learn: its own checks, its tools, guarantees against attacks, and what they refuse."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import joblib
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from lipkit.certificates import certify, monotone
from lipkit.errors import CertificateViolation, OptionError
from lipkit.interop import onnx_runtime
from lipkit.modules import MaxMin, Network
from lipkit.sklearn import LipschitzClassifier, LipschitzRegressor, _check_signs

SMALL = {"hidden_layer_sizes": (16,), "max_iter": 30, "learning_rate_init": 0.03, "random_state": 0}
IRIS, CANCER, DIABETES = (load(return_X_y=True) for load in (load_iris, load_breast_cancer, load_diabetes))
SCALED = (DIABETES[0] * 20, DIABETES[1])


@pytest.fixture(scope="module")
def iris() -> LipschitzClassifier:
    return LipschitzClassifier(**SMALL).fit(*IRIS)


@pytest.fixture(scope="module")
def diabetes() -> LipschitzRegressor:
    return LipschitzRegressor(**SMALL).fit(*SCALED)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [LipschitzClassifier, pytest.param(LipschitzRegressor, marks=pytest.mark.slow)])
def test_scikit_learns_checks_pass_without_exemptions(kind: type) -> None:
    check_estimator(kind(**{**SMALL, "hidden_layer_sizes": (8,), "max_iter": 12}), on_skip=None)


@pytest.mark.thorough
def test_tools_of_scikit_learn(iris: LipschitzClassifier, tmp_path: Path) -> None:
    X, y = IRIS
    model = LipschitzClassifier(**SMALL)
    assert make_pipeline(MinMaxScaler(), model).fit(X, y).score(X, y) > 0.9
    found = GridSearchCV(model, {"lipschitz": [1.0, 5.0]}, cv=2).fit(X, y)
    assert found.best_params_["lipschitz"] in (1.0, 5.0)
    assert (cross_val_predict(model, X, y, cv=3) == y).mean() > 0.9
    assert CalibratedClassifierCV(model, cv=2).fit(X, y).predict_proba(X).shape == (150, 3)
    twin = clone(iris).fit(X, y)
    np.testing.assert_array_equal(twin.predict_proba(X), iris.predict_proba(X))
    joblib.dump(iris, tmp_path / "model.joblib")
    for back in (joblib.load(tmp_path / "model.joblib"), pickle.loads(pickle.dumps(iris))):
        np.testing.assert_array_equal(back.predict_proba(X), iris.predict_proba(X))


@pytest.mark.thorough
def test_the_constant_is_proved_and_kept(iris: LipschitzClassifier, diabetes: LipschitzRegressor) -> None:
    assert 0 < iris.lipschitz_ <= iris.lipschitz
    assert 0 < diabetes.lipschitz_ <= diabetes.lipschitz * DIABETES[1].std() * (1 + 1e-12)
    norms = [np.linalg.norm(m.weight.numpy(), 2) for m in iris.export_ if isinstance(m, nn.Linear)]
    assert iris.lipschitz_ == pytest.approx(math.prod(norms), rel=1e-6)


def attack(model: LipschitzClassifier, X: np.ndarray, y: np.ndarray, eps: float) -> np.ndarray:
    """One step of the size eps in scaled features against the label's margin, in the units of X."""
    z = torch.from_numpy((X - model.mean_) / model.scale_).requires_grad_()
    outputs = Network(list(model.export_), z.shape[1:]).double()(z)
    own = outputs.gather(1, torch.from_numpy(y)[:, None])
    (slope,) = torch.autograd.grad((own - outputs.scatter(1, torch.from_numpy(y)[:, None], -99).amax(1)).sum(), z)
    moved = z - eps * slope / slope.norm(dim=1, keepdim=True)
    return moved.detach().numpy() * model.scale_ + model.mean_


@pytest.mark.thorough
def test_certificates_sets_and_worst_cases_hold_under_attack() -> None:
    order = np.random.default_rng(0).permutation(569)
    X, y = CANCER[0][order], CANCER[1][order]
    model = LipschitzClassifier(**SMALL).fit(X[:300], y[:300]).calibrate(X[300:450], y[300:450])
    X, y, eps = X[450:], y[450:], 0.3
    certified = model.certify(X, y).certified(eps)
    assert 0.5 < float(certified.double().mean()) < 1
    moved = attack(model, X, y, eps * 0.999)
    assert (model.predict(moved)[certified.numpy()] == y[certified.numpy()]).all()
    assert (model.predict_set(moved, 0.05, eps) >= model.predict_set(X, 0.05)).all()
    assert model.predict_set(moved, 0.05, eps)[np.arange(len(y)), y].mean() > 0.9
    low, high = np.moveaxis(model.worst_case(X, eps), 2, 0)
    for each in (model.predict_proba(X), model.predict_proba(moved)):
        assert ((low <= each) & (each <= high)).all()
    assert (high - low).max() < 1


def test_signs_are_proved_and_an_input_that_is_not_read_has_both() -> None:
    net = Network([nn.Linear(3, 1, bias=False)], (3,))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[2.0, -1.0, 0.0]]))
    for last in (-1, 0, 1):
        _check_signs(net, np.array([1, -1, last]))
    for signs in ([-1, 0, 0], [0, 1, 0]):
        with pytest.raises(CertificateViolation, match="slopes of the signs"):
            _check_signs(net, np.array(signs))


def test_rounding_of_the_scaling_counts_at_the_mean_and_eps_is_checked(iris: LipschitzClassifier) -> None:
    mean, label = iris.mean_[None], iris.predict(iris.mean_[None])
    plain = certify(iris.export_, torch.zeros(1, 4, dtype=torch.float64), torch.from_numpy(label))
    assert float(iris.certify(mean, label).radius) <= float(plain.radius) * (1 - 8 * 2.0**-53)
    for eps in (-1.0, math.nan, math.inf, True):
        with pytest.raises(OptionError, match="eps: expected a finite number"):
            iris.worst_case(mean, eps)


@pytest.mark.thorough
def test_intervals_and_worst_cases_of_a_regression(diabetes: LipschitzRegressor) -> None:
    X, y = SCALED
    model = clone(diabetes).fit(X[:200], y[:200]).calibrate(X[200:320], y[200:320])
    plain, wide = model.predict_interval(X[320:], 0.1), model.predict_interval(X[320:], 0.1, 0.2)
    assert np.allclose(wide[:, 1] - plain[:, 1], 0.2 * model.lipschitz_, rtol=1e-6)
    assert ((wide[:, 0] <= y[320:]) & (y[320:] <= wide[:, 1])).mean() > 0.85
    ends = model.worst_case(X, 0.2)
    step = np.random.default_rng(0).normal(size=X.shape)
    moved = model.predict(X + 0.2 * model.scale_ * step / np.linalg.norm(step, axis=1, keepdims=True))
    assert ((ends[:, 0] < moved) & (moved < ends[:, 1])).all()
    assert model.certify(X, y, 0.2).deviation == pytest.approx(0.2 * model.lipschitz_, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [(), (16,), (16, 16)])
def test_monotone_features(sizes: tuple[int, ...]) -> None:
    X, y = SCALED
    signs = [0, -1, 1, 1, 0, 0, 0, 0, 1, 0]
    model = LipschitzRegressor(**SMALL | {"hidden_layer_sizes": sizes}, monotonic_cst=signs).fit(X, y)
    proved = monotone(model.export_)[0].numpy()
    assert all(p == s for p, s in zip(proved, signs, strict=True) if s)
    z = torch.randn(500, 10, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(Network(list(model.export_), (10,)).double()(z).sum(), z)
    assert float((slope * torch.tensor(signs)).min()) >= 0
    assert model.score(X, y) > 0.4
    X, y = CANCER
    binary = LipschitzClassifier(**SMALL, monotonic_cst=[-1] * 30).fit(X, y)
    before, after = (binary.predict_proba(X + move * binary.scale_)[:, 1] for move in (0, 0.5))
    assert (after <= before).all()
    assert binary.score(X, y) > 0.9


@pytest.mark.thorough
def test_weights_are_repeated_rows_bit_for_bit() -> None:
    X, y = IRIS
    weights = np.random.default_rng(0).integers(0, 4, len(y))
    one = LipschitzClassifier(**SMALL).fit(X, y, weights)
    two = LipschitzClassifier(**SMALL).fit(np.repeat(X, weights, 0)[::-1], np.repeat(y, weights)[::-1])
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))
    heavy = LipschitzClassifier(**SMALL, class_weight={0: 1, 1: 50, 2: 1}).fit(X, y)
    assert (heavy.predict(X) == 1).sum() > (one.predict(X) == 1).sum()


def test_gains_bound_derivatives(iris: LipschitzClassifier) -> None:
    z = torch.randn(300, 4, dtype=torch.float64)
    network = Network(list(iris.export_), (4,)).double()
    slopes = torch.func.vmap(torch.func.jacrev(lambda v: network(v[None])[0]))(z).norm(dim=1).amax(0)
    gains = iris.feature_gains()
    assert (slopes.numpy() <= gains).all()
    assert (gains <= iris.lipschitz_ * (1 + 1e-9)).all()
    assert len(iris.plot_gains().patches) == 4


def test_early_stopping_ends_before_max_iter() -> None:
    options = SMALL | {"max_iter": 200, "n_iter_no_change": 3}
    stopped = LipschitzClassifier(**options, early_stopping=True).fit(*IRIS)
    assert stopped.n_iter_ < 200


@pytest.mark.thorough
def test_onnx_takes_unscaled_features(tmp_path: Path) -> None:
    X, y = IRIS
    unscaled = LipschitzClassifier(**SMALL, scale=[1, 2, 1, 0.5]).fit(X, y)
    assert unscaled.scale_.tolist() == [1, 2, 1, 0.5]
    run = onnx_runtime(unscaled.to_onnx(tmp_path / "model.onnx"))
    logits = np.asarray(run(torch.from_numpy(X).float()))
    np.testing.assert_allclose(torch.from_numpy(logits).softmax(1).numpy(), unscaled.predict_proba(X), atol=1e-4)


def test_frames_keep_their_names() -> None:
    pandas = pytest.importorskip("pandas")
    X, y = DIABETES
    frame = pandas.DataFrame(X, columns=[f"f{i}" for i in range(10)])
    model = LipschitzRegressor(**SMALL, monotonic_cst={"f2": 1}).fit(frame, y)
    assert list(model.feature_names_in_) == list(frame.columns)
    assert monotone(model.export_)[0, 2] == 1
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"f0": "g"}))


def test_the_network_is_dense_layers_and_maxmin(iris: LipschitzClassifier) -> None:
    assert [type(m) for m in iris.export_] == [nn.Linear, MaxMin, nn.Linear]


@pytest.mark.parametrize(
    ("changes", "data", "words"),
    [
        ({}, (np.full((9, 2), np.nan), [0, 1, 2] * 3), "Input X contains NaN"),
        ({}, (np.array([["a", "b"]] * 4), [0, 1, 0, 1]), "could not convert string"),
        ({}, (np.ones((4, 2)), [1, 1, 1, 1]), "expected at least 2 classes, got 1 class"),
        ({"hidden_layer_sizes": (3,)}, IRIS, "hidden_layer_sizes: expected even numbers"),
        ({"lipschitz": 0}, IRIS, "lipschitz: expected a positive finite number, got 0"),
        ({"max_iter": 0}, IRIS, "max_iter: expected an integer of at least 1"),
        ({"scale": "range"}, IRIS, "scale: expected 'std', None or 4 positive numbers, one a feature, got 'range'"),
        ({"validation_fraction": 2}, IRIS, r"validation_fraction: expected a number in \(0, 1\), got 2"),
        ({"scale": [1.0]}, IRIS, "scale: expected 'std', None or 4 positive numbers"),
        ({"monotonic_cst": [1, 0, 0, 0]}, IRIS, "monotonic_cst: expected two classes"),
        ({"monotonic_cst": [2, 0, 0, 0]}, IRIS, "monotonic_cst must be"),
    ],
)
def test_bad_input_gets_one_sentence(changes: dict[str, object], data: tuple[object, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LipschitzClassifier(**SMALL | changes).fit(*data)


@pytest.mark.thorough
def test_labels_are_strings_of_any_dtype_and_others_are_named() -> None:
    X, y = np.arange(12.0)[:, None], np.array(["no", "yes"])[np.arange(12) // 6]
    for labels in (y, y.astype(object), y.tolist()):
        model = LipschitzClassifier((2,), max_iter=2).fit(X, labels)
        assert model.certify(X, labels).label.tolist() == [0] * 6 + [1] * 6
        for other, words in ((["maybe", "no"], r"'no', 'yes'\], got \['maybe'\]"), ([0, 1], r"got \[0, 1\]")):
            with pytest.raises(ValueError, match=words):
                model.certify(X[:2], other)


@pytest.mark.thorough
def test_sets_need_a_calibration_that_is_large_enough(iris: LipschitzClassifier) -> None:
    X, y = IRIS
    with pytest.raises(NotFittedError, match=r"expected calibrate\(X, y\)"):
        iris.predict_set(X)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        clone(iris).calibrate(X, y)
    model = clone(iris).fit(X, y).calibrate(X[::15], y[::15])
    with pytest.raises(ValueError, match=r"alpha: expected a number from 1/\(n \+ 1\) = 0.09"):
        model.predict_set(X, 0.05)
    with pytest.raises(ValueError, match=r"expected labels among \[0, 1, 2\], got \[7\]"):
        model.calibrate(X[:1], [7])


@pytest.mark.parametrize("kind", [LipschitzClassifier, LipschitzRegressor])
def test_a_new_fit_drops_the_calibration_of_the_old_network(kind: type) -> None:
    X, y = SCALED[0][:60], (SCALED[1][:60] > 140).astype(int)
    model = kind(hidden_layer_sizes=(), max_iter=2, random_state=0).fit(X, y).calibrate(X, y)
    predict = model.predict_set if kind is LipschitzClassifier else model.predict_interval
    predict(X)
    with pytest.raises(OptionError, match="eps: expected"):
        predict(X, 0.1, "1")
    model.fit(X, 1 - y)
    with pytest.raises(NotFittedError, match="calibrate"):
        predict(X)


@pytest.mark.parametrize("scale", [1e3, 1e100, 1e300, 1e307])
def test_worst_cases_of_huge_inputs_hold(iris: LipschitzClassifier, scale: float) -> None:
    X = IRIS[0][::15] * scale
    low, high = np.moveaxis(iris.worst_case(X, 0.1), -1, 0)
    found = iris.predict_proba(X)
    # Probabilities are positive, however small.
    assert ((low <= np.nan_to_num(found, nan=0.5)) & (found <= high) | np.isnan(found)).all()
    assert ((low >= 0) & (high > 0) & (low <= high)).all()


@pytest.mark.thorough
def test_constant_features_do_not_count() -> None:
    X, y = CANCER
    model = LipschitzClassifier(**SMALL).fit(np.column_stack((X, np.full(len(X), 0.1))), y)
    assert model.scale_[-1] == 1
    assert model.score(np.column_stack((X, np.full(len(X), 0.1))), y) > 0.9
