"""Tables with guarantees: prediction sets under attack, and monotone networks, beside scikit-learn's models.

    python -m benchmarks.tables coverage --splits 100 --keep records/tables
    python -m benchmarks.tables monotone --splits 10 --keep records/tables

Coverage: half of a data set trains, a quarter calibrates, a quarter is tested, features scaled to unit deviation of the
training part. Sets of the Lipschitz network are made for eps, those of MLPClassifier (MLPRegressor) for no attack; both
meet an attack of 20 steps of their own network within eps. Monotone: each model is tuned by the same search (three
values of one option, three folds) on each split.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from torch import Tensor, nn

from lipkit.attacks.ascent import margin_loss
from lipkit.certificates import monotone
from lipkit.modules.storage import float64_copy
from lipkit.sklearn import LipschitzClassifier, LipschitzRegressor

DATA: dict[str, Callable[..., Any]] = {
    "digits": load_digits,
    "breast_cancer": load_breast_cancer,
    "diabetes": load_diabetes,
}
LIPSCHITZ = {"digits": 3.0, "breast_cancer": 2.0, "diabetes": 0.5}
ALPHAS, RADII = (0.05, 0.1), (0.1, 0.3)
SIZES = (64, 64)
# What a physician expects to raise the progression of diabetes, and to speak for a malignant tumour (class 0).
SIGNS = {
    "diabetes": {2: 1, 3: 1, 8: 1, 9: 1},
    "breast_cancer": dict.fromkeys((0, 2, 3, 6, 7, 20, 22, 23, 26, 27), -1),
}


def torch_twin(model: MLPClassifier | MLPRegressor) -> nn.Module:
    """The network of scikit-learn in torch, with two logits for two classes."""
    layers: list[nn.Module] = []
    for weight, bias in zip(model.coefs_, model.intercepts_, strict=True):
        layer = nn.Linear(*weight.shape).double()
        layer.weight.data, layer.bias.data = torch.from_numpy(weight.T.copy()), torch.from_numpy(bias.copy())
        layers += [layer, nn.ReLU()]
    last = layers[-2]
    if isinstance(model, MLPClassifier) and len(last.weight) == 1:
        last.weight.data = torch.cat((-last.weight.data, last.weight.data)) / 2
        last.bias.data = torch.cat((-last.bias.data, last.bias.data)) / 2
    return nn.Sequential(*layers[:-1]).requires_grad_(False)


def score(outputs: Tensor, y: Tensor) -> Tensor:
    """max over other classes minus the label's logit, or the distance from the target."""
    if y.is_floating_point():
        return (outputs[:, 0] - y).abs()
    return margin_loss(outputs, y)


def attacked(network: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int = 20) -> Tensor:
    """The samples, moved within eps so that the score of the label grows."""
    best, moved = torch.zeros_like(x), torch.zeros_like(x)
    top = score(network(x), y)
    for _ in range(steps):
        moved.requires_grad_()
        (slope,) = torch.autograd.grad(score(network(x + moved), y).sum(), moved)
        moved = (moved + eps / 4 * slope / slope.norm(dim=1, keepdim=True).clamp_min(1e-30)).detach()
        moved = moved * (eps / moved.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp(max=1)
        found = score(network(x + moved), y)
        best, top = torch.where((found > top)[:, None], moved, best), torch.maximum(found, top)
    return x + best


def plain_sets(network: nn.Module, calibration: tuple[Tensor, Tensor], alpha: float) -> Callable[[Tensor], Tensor]:
    """Split conformal prediction as usual: a function to sets (N, K), or to half of the width (N, 1)."""
    scores = score(network(calibration[0]), calibration[1]).sort().values
    q = scores[math.ceil(round((len(scores) + 1) * (1 - alpha), 9)) - 1]
    if calibration[1].is_floating_point():
        return lambda x: q.expand(len(x), 1)

    def sets(x: Tensor) -> Tensor:
        outputs = network(x)
        labels = range(outputs.shape[1])
        return torch.stack([score(outputs, torch.full((len(x),), k)) for k in labels], 1) <= q

    return sets


def coverage(name: str, seed: int, max_iter: int = 200) -> list[dict[str, float]]:
    """One split: rows of alpha, eps, coverages and sizes."""
    X, y = DATA[name](return_X_y=True)
    labels = name != "diabetes"
    halves = train_test_split(X, y, test_size=0.5, random_state=seed)
    train, rest = halves[::2], halves[1::2]
    parts = train_test_split(*rest, test_size=0.5, random_state=seed)
    kind, other = (LipschitzClassifier, MLPClassifier) if labels else (LipschitzRegressor, MLPRegressor)
    model = kind(SIZES, lipschitz=LIPSCHITZ[name], max_iter=max_iter, random_state=seed).fit(*train)
    z = [torch.from_numpy((part - model.mean_) / model.scale_) for part in (train[0], parts[0], parts[1])]
    middle, unit = (0.0, 1.0) if labels else (train[1].mean(), train[1].std())
    t = [torch.from_numpy(np.asarray((part - middle) / unit if not labels else part)) for part in parts[2:]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = other(hidden_layer_sizes=SIZES, max_iter=max_iter, random_state=seed)
        plain.fit(z[0].numpy(), train[1] if labels else (train[1] - middle) / unit)
    mine, twin = float64_copy(model.export_), torch_twin(plain)
    model.calibrate(parts[0], parts[2])
    target = torch.from_numpy(np.asarray(parts[3]))
    rows = []
    for eps in RADII:
        moved, moved_twin = attacked(mine, z[2], target, eps), attacked(twin, z[2], t[1], eps)
        back = [x.numpy() * model.scale_ + model.mean_ for x in (z[2], moved)]
        for alpha in ALPHAS:
            usual = plain_sets(twin, (z[1], t[0]), alpha)
            row = {"alpha": alpha, "eps": eps}
            if labels:
                clean, robust = (model.predict_set(x, alpha, eps) for x in back)
                own, label = model.predict_set(back[0], alpha, 0.0), parts[3]
                each = np.arange(len(label))
                row |= {
                    "coverage": float(robust[each, label].mean()), "size": float(robust.sum(1).mean()),
                    "clean_coverage": float(clean[each, label].mean()), "clean_size": float(clean.sum(1).mean()),
                    "size_for_no_attack": float(own.sum(1).mean()),
                    "mlp_coverage": float(usual(moved_twin)[each, label].double().mean()),
                    "mlp_clean_coverage": float(usual(z[2])[each, label].double().mean()),
                    "mlp_size": float(usual(moved_twin).sum(1).double().mean()),
                    "mlp_clean_size": float(usual(z[2]).sum(1).double().mean()),
                }  # fmt: skip
            else:
                clean, robust = (model.predict_interval(x, alpha, eps) for x in back)
                own = model.predict_interval(back[0], alpha, 0.0)
                half = usual(moved_twin)[:, 0]
                row |= {
                    "coverage": float(((robust[:, 0] <= parts[3]) & (parts[3] <= robust[:, 1])).mean()),
                    "clean_coverage": float(((clean[:, 0] <= parts[3]) & (parts[3] <= clean[:, 1])).mean()),
                    "size": float((robust[:, 1] - robust[:, 0]).mean()),
                    "size_for_no_attack": float((own[:, 1] - own[:, 0]).mean()),
                    "mlp_coverage": float((score(twin(moved_twin), t[1]) <= half).double().mean()),
                    "mlp_clean_coverage": float((score(twin(z[2]), t[1]) <= half).double().mean()),
                    "mlp_clean_size": float(2 * half.mean() * unit),
                }
            row |= {"score": float(model.score(parts[1], parts[3]))}
            row |= {"mlp_score": float(plain.score(z[2].numpy(), t[1].numpy()))}
            rows.append(row)
    return rows


def tuned(model: Any, option: str, values: tuple[float, ...], X: Any, y: Any) -> Any:
    return GridSearchCV(model, {option: list(values)}, cv=3).fit(X, y).best_estimator_


def monotonic(name: str, seed: int, max_iter: int = 200) -> dict[str, float]:
    """One split: test scores of free and monotone models, tuned alike."""
    X, y = DATA[name](return_X_y=True)
    labels = name != "diabetes"
    train, test, a, b = train_test_split(X, y, test_size=0.3, random_state=seed, stratify=y if labels else None)
    signs = [SIGNS[name].get(i, 0) for i in range(X.shape[1])]
    kind = LipschitzClassifier if labels else LipschitzRegressor
    trees = HistGradientBoostingClassifier if labels else HistGradientBoostingRegressor
    gains = (1.0, 2.0, 5.0) if labels else (0.3, 0.5, 1.0)
    row = {}
    for title, given in (("free", None), ("monotone", signs)):
        own = kind(SIZES, max_iter=max_iter, random_state=seed, monotonic_cst=given)
        found = tuned(own, "lipschitz", gains, train, a)
        row[f"lipschitz_{title}"] = found.score(test, b)
        if given is not None:
            proved = monotone(found.export_)[-1].numpy()
            row["proved"] = float(all(p == s for p, s in zip(proved, signs, strict=True) if s))
        boosted = trees(random_state=seed, monotonic_cst=given)
        row[f"boosting_{title}"] = tuned(boosted, "learning_rate", (0.03, 0.1, 0.3), train, a).score(test, b)
    return row


def summary(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Mean and standard deviation over splits of every figure; alpha and eps as they are."""
    found = {}
    for key in rows[0]:
        values = np.array([row[key] for row in rows])
        found[key] = [round(float(values.mean()), 5), round(float(values.std()), 5)]
    return {key: value[0] if key in ("alpha", "eps") else value for key, value in found.items()}


def written(record: object) -> str:
    """JSON with a line for each pair of numbers."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[\s+(-?[\d.]+),\s+(-?[\d.]+)\s+\]", r"[\1, \2]", text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["coverage", "monotone"])
    parser.add_argument("--data", nargs="+", default=None, choices=list(DATA))
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--max-iter", type=int, default=100)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.data or (DATA if given.what == "coverage" else SIGNS):
        start = time.process_time()
        record: dict[str, Any] = {
            "study": given.what, "data": name, "max_iter": given.max_iter, "lipschitz": LIPSCHITZ[name],
            "torch": torch.__version__, "scikit-learn": sklearn.__version__, "python": platform.python_version(),
        }  # fmt: skip
        splits: list[Any] = []
        for seed in range(given.splits):
            one = coverage if given.what == "coverage" else monotonic
            splits.append(one(name, seed, given.max_iter))
            if (seed + 1) % 5 and seed + 1 < given.splits:
                continue
            record |= {"splits": len(splits), "seconds": round(time.process_time() - start, 1)}
            if given.what == "coverage":
                record["rows"] = [summary([split[i] for split in splits]) for i in range(len(splits[0]))]
            else:
                record |= {"signs": SIGNS[name], "scores": summary(splits)}
            if given.keep is not None:
                given.keep.mkdir(parents=True, exist_ok=True)
                (given.keep / f"{given.what}-{name}.json").write_text(written(record))
        print(written(record))


if __name__ == "__main__":
    main()
