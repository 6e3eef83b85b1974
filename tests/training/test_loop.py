from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

from lipkit import training
from lipkit.data import Split, random_crop
from lipkit.errors import DataError, OptionError, RunError
from lipkit.lowering import export
from lipkit.training import checkpoints as run_folder
from lipkit.training import schedules
from lipkit.training.sources import batches

COMMON = {"batch_size": 16, "accelerator": "cpu"}


def blobs(n: int = 96) -> Split:
    """Three classes of 1 x 4 x 4 images that a linear map separates."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 3
    x = 0.3 * torch.rand(n, 1, 4, 4, generator=generator)
    for label in range(3):
        x[y == label, 0, label] += 0.6
    return Split(x, y)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
        )


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def timeless(history):
    """The history without what depends on the clock or the machine."""
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "cpu_seconds", "samples_per_second", "memory_mib")}
        for row in history
    ]


def jiggle(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return random_crop(x, 1, generator)


def accuracy(model: nn.Module) -> dict[str, float]:
    torch.rand(3)  # an evaluation may draw from the global state
    data = blobs(30)
    return {"clean": float((model.eval()(data.x).argmax(1) == data.y).float().mean())}


def test_sgd_equals_a_loop_written_out_in_numpy():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, 3, generator=generator)
    y = torch.rand(20, 2, generator=generator)
    model = nn.Linear(3, 2)
    w, b = model.weight.detach().numpy().astype(np.float64), model.bias.detach().numpy().astype(np.float64)
    velocity_w, velocity_b, epochs, steps, lr = 0.0, 0.0, 3, 3, 0.3
    training.fit(
        model, (x, y), loss="mse", epochs=epochs, batch_size=8, lr=lr, optimizer="sgd", momentum=0.8,
        weight_decay=0.05, seed=5, accelerator="cpu",
    )  # fmt: skip
    step = 0
    for epoch in range(epochs):
        for index, _, _ in batches(20, 8, seed=5, epoch=epoch):
            step += 1
            rate = lr * np.interp(step / (epochs * steps), [0, 0.4, 0.8, 1], [0, 1, 0.05, 0])
            xs, ys = x[index].double().numpy(), y[index].double().numpy()
            error = 2 * (xs @ w.T + b - ys) / ys.size
            velocity_w = 0.8 * velocity_w + error.T @ xs + 0.05 * w
            velocity_b = 0.8 * velocity_b + error.sum(0) + 0.05 * b
            w, b = w - rate * velocity_w, b - rate * velocity_b
    np.testing.assert_allclose(model.weight.detach().numpy(), w, atol=1e-6)
    np.testing.assert_allclose(model.bias.detach().numpy(), b, atol=1e-6)


@pytest.mark.thorough
def test_learns_and_returns_the_model_itself_without_wrapper():
    model = network()
    run = training.fit(model, blobs(), epochs=12, lr=0.03, evaluate=accuracy, evaluate_every=5, **COMMON)
    assert run.model is model
    assert not model.training
    assert run.epochs_done == len(run.history) == 12
    assert [row["epoch"] for row in run.history if "clean" in row] == [5, 10, 12]
    assert run.history[-1]["clean"] > 0.9
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    export(model, (1, 4, 4))


def test_history_holds_the_mean_loss_and_accuracy_of_the_epoch():
    seen = []

    def loss(outputs, targets):
        value = nn.functional.cross_entropy(outputs, targets)
        seen.append((value.item(), len(targets), int((outputs.argmax(1) == targets).sum())))
        return value

    run = training.fit(network(), blobs(50), loss=loss, epochs=1, lr=0.01, **COMMON)
    assert not run.model.training
    total = sum(n for _, n, _ in seen)
    assert total == 50
    assert run.history[0]["loss"] == pytest.approx(sum(v * n for v, n, _ in seen) / total, rel=1e-6)
    assert run.history[0]["accuracy"] == sum(c for _, _, c in seen) / total


ROWS = torch.rand(60, 4, generator=torch.Generator().manual_seed(3))


class Labelled(Dataset):
    """Samples of `ROWS`, each with the labels that ``label`` makes of it."""

    def __init__(self, label):
        self.label = label

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index], self.label(ROWS[index])


def cross_entropy_1(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs.flatten(), targets.flatten().double().to(outputs))


@pytest.mark.parametrize(
    ("model", "loss", "label", "right"),
    [  # one logit of class 1 against 0, with an axis of classes and without
        (nn.Linear(4, 1), "hkr", lambda x: (x[0] > x[1]).long(), lambda o, y: (o[:, 0] > 0) == (y > 0)),
        (nn.Linear(4, 1), "offset_cross_entropy", lambda x: (x[0] > 0.4).long(), lambda o, y: (o[:, 0] > 0) == y),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), cross_entropy_1, lambda x: int(x[0] > 0.4),
         lambda o, y: (o > 0) == y),
        # several labels a sample: of positions, and of independent classes
        (nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (3, 2))), "cross_entropy", lambda x: (3 * x[:2]).long(),
         lambda o, y: (o.argmax(1) == y).double().mean(1)),
        (nn.Linear(4, 3), cross_entropy_1, lambda x: (x[:3] > 0.6).long(),
         lambda o, y: ((o > 0) == y).double().mean(1)),
    ],
)  # fmt: skip
def test_accuracy_is_the_fraction_of_labels_predicted(model, loss, label, right):
    data, held = Labelled(label), []
    y = torch.stack([torch.as_tensor(label(x)) for x in ROWS])
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    model.register_forward_hook(lambda _, x, out: held.append((x[0], out.detach())))
    run = training.fit(model, data, loss=loss, epochs=1, lr=0.1, **COMMON)
    counted = 0.0
    for x, outputs in held:
        index = [int((row == ROWS).all(1).nonzero()) for row in x]
        counted += float(right(outputs, y[index]).double().sum())
    assert run.history[0]["accuracy"] == pytest.approx(counted / len(ROWS), abs=1e-6)
    assert 0 < counted < len(ROWS)


def test_outputs_whose_classes_are_not_second_are_named():
    model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))  # (N, positions, classes)

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs.transpose(1, 2), targets)

    with pytest.raises(DataError, match=r"\(n, K, ...\) for labels .*, got outputs \(16, 2, 3\) and labels \(16, 2\)"):
        training.fit(model, Labelled(lambda x: (3 * x[:2]).long()), loss=loss, epochs=1, **COMMON)


@pytest.mark.parametrize("loss", ["hinge", "hkr", "emma", "cross_entropy", "gloro"])
def test_labels_of_a_data_set_that_are_none_are_named(loss):
    for label, message in (
        (lambda x: -1, "expected labels >= 0, got -1"),
        (lambda x: (x[:3] > 0.6).long(), r"expected labels of shape \(16,\), got \(16, 3\) \(one-hot: y.argmax\(1\)\)"),
    ):
        with pytest.raises(DataError, match=message):
            training.fit(nn.Linear(4, 3), Labelled(label), loss=loss, epochs=1, **COMMON)


def test_the_rate_follows_the_schedule_step_by_step():
    rates = []
    kinds = []
    for schedule in ("cosine", schedules.constant):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        before = [model[1].bias.detach().clone()]

        def watch(model, step, epoch_end, before=before):
            moved = model[1].bias.detach() - before[0]
            rates.append(float(moved.abs().max()))
            kinds.append((step, epoch_end))
            before[0] = model[1].bias.detach().clone()

        # the gradient of this loss in each bias is 1, so plain SGD moves it by exactly the rate
        training.fit(
            model, blobs(40), loss=lambda y, _: y.sum() / len(y), epochs=2, lr=0.5, optimizer="sgd", momentum=0.0,
            schedule=schedule, post_step=watch, **COMMON,
        )  # fmt: skip
    expected = [0.5 * 0.5 * (1 + math.cos(math.pi * s / 6)) for s in range(1, 7)] + [0.5] * 6
    assert rates == pytest.approx(expected, abs=1e-5)
    assert kinds == 2 * [(s, s in (3, 6)) for s in range(1, 7)]


@pytest.mark.thorough
def test_the_same_call_gives_the_same_weights_and_another_seed_others():
    def trained(**changes):
        return training.fit(network(), blobs(), epochs=2, lr=0.05, augment=jiggle, **(COMMON | changes)).model

    first = trained()
    torch.rand(7)
    assert same(first, trained())
    assert not same(first, trained(seed=1))


def test_the_callers_random_state_is_left_alone():
    before = torch.get_rng_state()
    training.fit(network(), blobs(), epochs=1, lr=0.05, evaluate=accuracy, **COMMON)
    assert torch.equal(before, torch.get_rng_state())


def test_an_evaluation_that_draws_random_numbers_does_not_change_the_training():
    with_it = training.fit(network(), blobs(), epochs=2, lr=0.05, evaluate=accuracy, **COMMON)
    assert same(with_it.model, training.fit(network(), blobs(), epochs=2, lr=0.05, **COMMON).model)


@pytest.mark.parametrize(("count", "options"), [(33, {}), (32, {"accumulate": 16})])
def test_a_single_sample_is_too_few_for_batch_norm(count, options):
    with pytest.raises(
        OptionError, match=r"expected 2 samples or more for batch norm, got 1: change batch_size or accumulate"
    ):
        training.fit(network(), blobs(count), epochs=1, lr=0.05, **COMMON, **options)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_an_evaluation_sees_the_evaluation_mode_and_leaves_batch_norm_alone(ema):
    modes = []

    def evaluate(model):
        modes.append({module.training for module in model.modules()})
        model(3 + blobs(30).x)  # in training mode these would enter the running statistics
        return {}

    options = {"epochs": 2, "lr": 0.05, "ema": ema, **COMMON}
    with_it = training.fit(network(), blobs(), evaluate=evaluate, **options)
    assert modes == [{False}, {False}]
    assert same(with_it.model, training.fit(network(), blobs(), **options).model)


class Stop(Exception):
    pass


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_resume_continues_bit_for_bit(tmp_path, optimizer):
    def run(folder, resume=False, stop=None):
        def post_step(model, step, epoch_end):
            if step == stop:
                raise Stop
            if epoch_end:
                model[1].weight.clamp_(-0.9, 0.9)

        return training.fit(
            network(seed=3 if resume else 0), blobs(), epochs=5, lr=0.05, optimizer=optimizer, weight_decay=0.01,
            augment=jiggle, evaluate=accuracy, evaluate_every=2, post_step=post_step, run_dir=folder, resume=resume,
            **COMMON,
        )  # fmt: skip

    whole = run(tmp_path / "whole")
    for stop, done in ((2, 0), (15, 2), (30, 4)):
        folder = tmp_path / f"cut{stop}"
        with pytest.raises(Stop):
            run(folder, stop=stop)
        assert len(run_folder.read_metrics(folder)) == done
        if done == 0:
            continue  # nothing was saved: a resume starts from the model it is given
        resumed = run(folder, resume=True)
        assert same(whole.model, resumed.model)
        assert timeless(whole.history) == timeless(resumed.history)
        assert run_folder.read_metrics(folder) == resumed.history
        states = [run_folder.load_checkpoint(f) for f in (whole.folder, folder)]
        assert states[0][0] == states[1][0] == 5
        assert all(torch.equal(states[0][1][name], states[1][1][name]) for name in states[0][1])


def test_a_resume_trains_the_same_parameters(tmp_path):
    def model(frozen):
        made = network()
        for name in frozen:
            made.get_parameter(name).requires_grad_(False)
        return made

    options = {"epochs": 2, "run_dir": tmp_path, "lr": 0.05, "max_minutes": 1e-9, **COMMON}
    assert not training.fit(model(["1.bias"]), blobs(), **options).finished
    for frozen, message in ((["2.bias"], "1.bias frozen, as in the run in .*, got it trained"),  # of the same shape
                            (["1.bias", "2.bias"], "2.bias trained, as in the run in .*, got it frozen")):  # fmt: skip
        other = model(frozen)
        with pytest.raises(RunError, match=f"expected {message}"):
            training.fit(other, blobs(), resume=True, **options)
        assert same(other, network())
    whole = training.fit(model(["1.bias"]), blobs(), **COMMON, epochs=2, lr=0.05)
    again = training.fit(model(["1.bias"]), blobs(), resume=True, **options | {"max_minutes": None})
    assert same(whole.model, again.model)


@pytest.mark.thorough
def test_metrics_beyond_the_checkpoint_are_dropped_on_resume(tmp_path):
    training.fit(network(), blobs(), epochs=3, lr=0.05, run_dir=tmp_path, **COMMON)
    expected = run_folder.read_metrics(tmp_path)
    (tmp_path / "checkpoints" / "epoch-0003" / "checkpoint.json").unlink()
    run = training.fit(network(), blobs(), epochs=3, lr=0.05, run_dir=tmp_path, resume=True, **COMMON)
    assert [row["epoch"] for row in run.history] == [1, 2, 3]
    assert [row["loss"] for row in run.history] == [row["loss"] for row in expected]


def test_a_finished_run_resumes_to_itself(tmp_path):
    first = training.fit(network(), blobs(), epochs=1, lr=0.05, run_dir=tmp_path, **COMMON)
    again = training.fit(network(7), blobs(), epochs=1, lr=0.05, run_dir=tmp_path, resume=True, **COMMON)
    assert same(first.model, again.model)
    assert again.history == first.history


@pytest.mark.thorough
def test_a_resume_in_double_precision_loses_no_bit(tmp_path):
    def run(**options):
        return training.fit(network(), blobs(), epochs=2, lr=0.05, precision="64-true", ema=0.9, **COMMON, **options)

    whole = run()
    assert not run(run_dir=tmp_path, max_minutes=1e-9).finished
    resumed = run(run_dir=tmp_path, resume=True)
    assert resumed.model[1].weight.dtype == torch.float64
    assert same(whole.model, resumed.model)
    assert same(whole.average, resumed.average)


@pytest.mark.thorough
def test_a_run_folder_is_not_overwritten_and_not_resumed_otherwise(tmp_path):
    training.fit(network(), blobs(), epochs=1, lr=0.05, run_dir=tmp_path, **COMMON)
    with pytest.raises(RunError, match="expected a new run folder"):
        training.fit(network(), blobs(), epochs=1, lr=0.05, run_dir=tmp_path, **COMMON)
    with pytest.raises(RunError, match=r"expected lr = 0\.05, .* got 0\.06"):
        training.fit(network(), blobs(), epochs=1, lr=0.06, run_dir=tmp_path, resume=True, **COMMON)
    with pytest.raises(RunError, match="expected samples = 96"):
        training.fit(network(), blobs(95), epochs=1, lr=0.05, run_dir=tmp_path, resume=True, **COMMON)
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(RunError, match="expected the model of the run in"):
        training.fit(other, blobs(), epochs=1, lr=0.05, run_dir=tmp_path, resume=True, **COMMON)
    with pytest.raises(RunError, match=r"expected a run folder with settings.json"):
        training.fit(network(), blobs(), epochs=1, lr=0.05, run_dir=tmp_path / "x", resume=True, **COMMON)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path, bad):
    calls = []

    def loss(outputs, targets):
        calls.append(1)
        value = nn.functional.cross_entropy(outputs, targets)
        return value * bad if len(calls) == 15 else value

    with pytest.raises(RunError, match=f"expected a finite loss, got {bad} at epoch 3, step 3 of 6"):
        training.fit(network(), blobs(), loss=loss, epochs=4, lr=0.05, run_dir=tmp_path, **COMMON)
    epoch, weights, _ = run_folder.load_checkpoint(tmp_path)
    assert epoch == 2
    assert all(torch.isfinite(w).all() for w in weights.values())
    assert len(run_folder.read_metrics(tmp_path)) == 2


def test_weights_made_nonfinite_by_the_last_step_stop_too(tmp_path):
    def spoil(model, step, epoch_end):
        if step == 12:
            model[1].weight[0, 0] = float("nan")

    with pytest.raises(RunError, match=r"expected finite weights, got NaN or infinity in 1.weight at .* epoch 2"):
        training.fit(network(), blobs(), epochs=3, lr=0.05, post_step=spoil, run_dir=tmp_path, **COMMON)
    assert run_folder.load_checkpoint(tmp_path)[0] == 1


def test_grad_clip_limits_the_step():
    moves = []
    for clip in (None, 1e-3):
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        start = [p.detach().clone() for p in model.parameters()]
        training.fit(
            model, blobs(16), epochs=1, lr=1.0, optimizer="sgd", momentum=0.0, schedule="constant", grad_clip=clip,
            **COMMON,
        )  # fmt: skip
        moved = [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)]
        moves.append(torch.cat([m.flatten() for m in moved]).norm().item())
    assert moves[0] > 1e-2
    assert moves[1] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.thorough
def test_progress_reports_every_epoch_and_its_steps():
    events = []
    training.fit(network(), blobs(), epochs=2, lr=0.05, batch_size=2, accelerator="cpu", progress=events.append)
    assert [(e.epoch, e.step, e.row is not None) for e in events] == [
        (epoch, step, step == 48) for epoch in (1, 2) for step in (20, 40, 48)
    ]
    assert events[-1].row["loss"] == events[-1].loss


@pytest.mark.thorough
def test_slow_steps_are_reported_one_by_one(monkeypatch):
    events, fast = [], []
    for progress, every in ((events, 0.0), (fast, 9.0)):
        monkeypatch.setattr("lipkit.training.progress.READ_SECONDS", every)
        training.fit(network(), blobs(), epochs=1, lr=0.05, batch_size=2, accelerator="cpu", progress=progress.append)
    assert [e.step for e in events] == list(range(1, 49))
    assert events[-1].loss == fast[-1].loss


@pytest.mark.thorough
def test_regression_with_a_torch_dataset():
    class Line(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return torch.tensor([i / 64]), i / 32

    torch.manual_seed(0)
    run = training.fit(nn.Linear(1, 1), Line(), loss="mse", epochs=60, lr=0.2, **COMMON)
    assert "accuracy" not in run.history[0]
    assert run.model.weight.item() == pytest.approx(2, abs=0.1)


def test_precision_is_fabrics():
    seen = set()

    class Watch(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.add(y.dtype)
            return y

    model = nn.Sequential(nn.Flatten(), Watch(16, 3))
    training.fit(model, blobs(16), epochs=1, lr=0.1, precision="bf16-mixed", **COMMON)
    assert seen == {torch.bfloat16}
    assert model[1].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"epochs": 0}, OptionError, "epochs: expected greater than or equal to 1, got 0"),
        ({"epochs": 1.5}, OptionError, "epochs: expected a valid integer, got 1.5"),
        ({"batch_size": True}, OptionError, "batch_size: expected a valid integer, got True"),
        ({"seed": -1}, OptionError, "seed: expected greater than or equal to 0, got -1"),
        ({"lr": 0.0}, OptionError, "lr: expected greater than 0, got 0.0"),
        ({"lr": float("nan")}, OptionError, "lr: expected greater than 0, got nan"),
        ({"momentum": 1.0}, OptionError, "momentum: expected less than 1, got 1.0"),
        ({"weight_decay": -1.0}, OptionError, "weight_decay: expected greater than or equal to 0, got -1.0"),
        ({"grad_clip": 0.0}, OptionError, "grad_clip: expected greater than 0, got 0.0"),
        ({"evaluate_every": 0}, OptionError, "evaluate_every: expected greater than or equal to 1"),
        (
            {"optimizer": "lbfgs"},
            OptionError,
            "optimizer: expected 'adam', 'adamw', 'sgd', .*, got 'lbfgs'",
        ),
        ({"loss": "hing"}, OptionError, "expected loss as one of"),
        ({"loss": 3}, OptionError, "loss: expected a name or a function, got 3"),
        ({"schedule": "no"}, OptionError, "expected schedule as one of"),
        ({"epoch": 3}, OptionError, "unknown option 'epoch', did you mean 'epochs'"),
        ({"colour": 3}, OptionError, "unknown option 'colour', expected one of epochs, "),
        ({"options": torch.zeros(3)}, OptionError, "options by name, got Tensor"),
        ({"options": {"epochs": 1}}, OptionError, r"expected fit\(module, \(x, y\), epochs=10\), .*got dict"),
        ({"model": network}, OptionError, "got function"),
        ({"train": DataLoader([0])}, DataError, "got DataLoader: pass its dataset"),
        ({"train": torch.zeros(3, 2)}, DataError, r"got Tensor: pass \(x, y\)"),
        ({"resume": True}, OptionError, "expected run_dir with resume=True"),
        ({"precision": "8"}, OptionError, "precision: expected '32-true', '64-true'"),
        ({"accelerator": "abacus"}, OptionError, "expected devices that Lightning Fabric can use"),
        ({"train": 3}, DataError, "a torch Dataset, got int"),
        ({"model": nn.Linear(3, 2).double()}, OptionError, "precision='64-true' for a network of float64 .* '32-true'"),
        (
            {"model": nn.Linear(3, 2).half()},
            OptionError,
            r"in float32 or float64 \(network.float\(\)\), got torch.float16",
        ),
        ({"evaluate": lambda model: None}, OptionError, "evaluate: expected numbers by name, a dict, got NoneType"),
        (
            {"evaluate": lambda model: {"epoch": 7}},
            OptionError,
            "names beside accuracy.* got 'epoch': .*'test_epoch'",
        ),
        ({"evaluate": lambda model: {"seconds": 1}}, OptionError, "evaluate: expected names .*, got 'seconds'"),
        ({"evaluate": lambda model: {3: 1.0}}, OptionError, "evaluate: expected names .*, got 3"),
        ({"evaluate": lambda model: {"a": torch.ones(2)}}, OptionError, "expected numbers, got {'a': tensor"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(16, 1), nn.Flatten(0))},
            DataError,
            r"outputs of shape \(16, K\), got \(16,\)",
        ),
        ({"model": nn.Flatten()}, OptionError, "expected a model with parameters to train, got Flatten"),
    ],
)
def test_refusals(change, error, message):
    arguments = {"model": network(), "train": blobs(), "epochs": 1, "lr": 0.1, **COMMON} | change
    with pytest.raises(error, match=message):
        training.fit(arguments.pop("model"), arguments.pop("train"), **arguments)


LABELS, IMAGES = torch.arange(8) % 4, torch.rand(8, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("x", "y", "loss", "message"),
    [
        (IMAGES, LABELS, "hinge", "expected labels below the number of outputs 3, got 3"),
        (IMAGES, LABELS, "cross_entropy", "expected labels below the number of outputs 3, got 3"),
        (IMAGES, nn.functional.one_hot(LABELS).float(), "hinge", r"labels \(int64\).*one-hot: y.argmax\(1\)"),
        (IMAGES, nn.functional.one_hot(LABELS), "hinge", r"one-hot labels: y.argmax\(1\)"),
        (IMAGES, LABELS.float(), "cross_entropy", "a regression: loss='mse'"),
        (IMAGES.permute(0, 2, 3, 1), LABELS % 3, "hinge", r"\(8, 4, 4, 3\) \(channels last: x.permute"),
    ],
)
def test_data_that_do_not_fit_the_network_or_the_loss_are_named(x, y, loss, message):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    sources = [(x, y)] if y.ndim == 2 else [(x, y), ConcatDataset([TensorDataset(x, y)])]
    for train in sources:  # tensors, whose labels are all known, and items
        with pytest.raises(DataError, match=message):
            training.fit(model, train, loss=loss, epochs=1, accelerator="cpu")


def test_a_loss_of_ones_own_keeps_its_error():
    def loss(outputs, targets):
        raise RuntimeError("of my own")

    with pytest.raises(RuntimeError, match="of my own"):
        training.fit(nn.Linear(2, 3), (torch.rand(8, 2), torch.rand(8)), loss=loss, epochs=1, accelerator="cpu")
    with pytest.raises(OptionError, match=r"expected targets of shape \(8, 3\), got \(8, 1\)"):
        training.fit(nn.Linear(2, 3), (torch.rand(8, 2), torch.rand(8)), loss="mse", epochs=1, accelerator="cpu")
    each = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(OptionError, match=r"one number from the loss, a mean, got .* and torch.Size\(\[8\]\)"):
        training.fit(nn.Linear(2, 3), (torch.rand(8, 2), LABELS % 3), loss=each, epochs=1, accelerator="cpu")
    for model, value, got in (
        (nn.Linear(2, 3), lambda outputs, targets: 1.0, r"torch.Size\(\[8, 3\]\) and float"),
        (nn.GRU(2, 3), lambda outputs, targets: outputs[0].mean(), r"tuple and torch.Size\(\[\]\)"),
    ):
        with pytest.raises(OptionError, match=f"a tensor of outputs and one number from the loss, a mean, got {got}"):
            training.fit(model, (torch.rand(8, 2), LABELS % 3), loss=value, epochs=1, accelerator="cpu")
    # A regression has no accuracy, so its network may return anything that the loss takes.
    targets, options = torch.rand(8, 2), {"epochs": 1, "accelerator": "cpu"}
    run = training.fit(nn.GRU(2, 3), (targets, targets), loss=lambda outputs, _: outputs[0].square().mean(), **options)
    assert run.history[0]["loss"] > 0
    with pytest.raises(DataError, match="expected labels below the number of outputs 3, got 3"):
        training.fit(
            nn.Linear(2, 3), (torch.rand(8, 2), LABELS), loss=nn.CrossEntropyLoss(), epochs=1, accelerator="cpu"
        )


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (torch.linspace(0, 255, 8 * 48).reshape(8, 3, 4, 4), LABELS % 3, {}, "got values up to 255: x / 255 or uint8"),
        (IMAGES, 0 * LABELS, {}, "expected labels of several classes, got 0 alone"),
        (IMAGES, LABELS % 3, {"batch_size": 9}, "batch_size: 9 for 8 samples is one step an epoch"),
    ],
)
def test_data_that_are_probably_wrong_are_warned_of(x, y, options, message):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    with pytest.warns(UserWarning, match=message) as warned:
        training.fit(model, (x, y), epochs=1, accelerator="cpu", **options)
    assert [w.filename for w in warned] == [__file__]  # the line of the call, not one of lipkit


def test_samples_of_a_sensor_are_taken_without_a_word():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    training.fit(model, (300 * IMAGES - 20, LABELS % 3), epochs=1, accelerator="cpu")  # warnings are errors here
