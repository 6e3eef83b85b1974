"""`certify` against closed forms on linear networks, and everything it must refuse."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lipkit import modules
from lipkit.attacks import pgd
from lipkit.certificates import certify, certify_regression
from lipkit.certificates.certificate_file import describe, verify
from lipkit.data import Split
from lipkit.errors import NoRuleError, OptionError, ShapeError
from lipkit.evaluation import Attack, evaluate
from lipkit.modules.storage import float64_device


def linear_network(seed: int = 0, features: int = 6, classes: int = 4) -> modules.Network:
    torch.manual_seed(seed)
    return modules.Network([nn.Linear(features, classes)], (features,))


def samples(network: modules.Network, count: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, *network.input_shape, generator=torch.Generator().manual_seed(1))
    return x, network(x).argmax(dim=1)


def distances(network: modules.Network, x: Tensor, y: Tensor) -> np.ndarray:
    """Distance from each sample to the nearest point where its class loses, for one linear layer."""
    last = network[-1]
    weight, bias = last.weight.double().numpy(), last.bias.double().numpy()
    logits = x.double().numpy() @ weight.T + bias
    result = []
    for row, label in zip(logits, y.tolist(), strict=True):
        others = [i for i in range(len(weight)) if i != label]
        result.append(min((row[label] - row[i]) / np.linalg.norm(weight[label] - weight[i]) for i in others))
    return np.array(result)


def test_linear_network_gets_exactly_the_distance_to_the_decision_boundary() -> None:
    network = linear_network()
    x, y = samples(network)
    certificate = certify(network, x, y)
    truth = distances(network, x, y)
    assert certificate.method == "last layer"
    assert certificate.body_constant == 1.0
    # a margin keeps 9e-13 of the logits' size back, which matters where the margin itself is tiny
    np.testing.assert_allclose(certificate.radius.numpy(), truth, rtol=1e-9, atol=1e-11)
    assert (certificate.radius.numpy() < truth).all()


def test_the_prediction_changes_just_outside_the_radius_and_not_just_inside() -> None:
    network = linear_network().double()
    x, y = samples(network.float())
    network = network.double()
    certificate = certify(network, x, y)
    weight, bias = network[-1].weight, network[-1].bias
    for point, label, radius in zip(x.double(), y, certificate.radius, strict=True):
        logits = weight @ point + bias
        pairs = (logits[label] - logits) / (weight[label] - weight).norm(dim=1)
        rival = pairs.nan_to_num(math.inf).argmin()
        direction = (weight[rival] - weight[label]) / (weight[rival] - weight[label]).norm()
        assert network(point[None] + radius * (1 - 1e-6) * direction).argmax() == label
        assert network(point[None] + radius * (1 + 1e-6) * direction + 1e-12 * direction).argmax() != label


def test_constant_is_the_spectral_norm_from_above() -> None:
    network = linear_network()
    x, y = samples(network)
    constant = certify(network, x, y).constant
    truth = np.linalg.norm(network[-1].weight.double().numpy(), 2)
    assert truth <= constant <= truth * (1 + 1e-6)


def test_a_network_without_a_last_linear_layer_uses_the_global_constant() -> None:
    network = modules.Network([nn.Linear(6, 4), modules.MaxMin()], (6,))
    x, y = samples(network)
    certificate = certify(network, x, y)
    assert certificate.method == "global"
    assert certificate.body_constant is None
    expected = certificate.margin.clamp_min(0) / (math.sqrt(2) * certificate.constant)
    torch.testing.assert_close(certificate.radius, expected, rtol=1e-9, atol=1e-11)
    assert (certificate.radius <= expected).all()


def test_input_normalisation_multiplies_radii_by_the_smallest_std() -> None:
    torch.manual_seed(0)
    last = nn.Linear(3 * 4 * 4, 5)
    std, mean = torch.tensor([0.25, 0.5, 0.125]), torch.tensor([0.5, 0.4, 0.3])
    normalised = modules.Network([modules.Affine(1 / std, -mean / std), nn.Flatten(), last], (3, 4, 4))
    bare = modules.Network([nn.Flatten(), last], (3, 4, 4))
    x, _ = samples(bare)
    z = (x - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    y = bare(z).argmax(dim=1)
    inside, outside = certify(normalised, x, y), certify(bare, z, y)
    torch.testing.assert_close(inside.radius, outside.radius * 0.125, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(inside.body_constant, 8.0, rtol=1e-6, atol=0)
    assert inside.constant == pytest.approx(8 * outside.constant, rel=1e-6)


def random_networks() -> list[modules.Network]:
    torch.manual_seed(3)
    dense = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5)]
    conv = [nn.Conv2d(1, 4, 3, padding=1), modules.MaxMin(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(64, 5)]
    tanh = [nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 6), modules.MaxMin()]
    return [modules.Network(chain, (1, 8, 8)) for chain in (dense, conv, tanh)]


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(3))
def test_pgd_never_beats_the_certificate(number: int) -> None:
    network = random_networks()[number]
    x, y = samples(network)
    certificate = certify(network, x, y)
    attacked = pgd(network, x, y, eps=certificate.radius, steps=40, box=None)
    with torch.no_grad():
        assert (network.double()(attacked.double()).argmax(dim=1) == y).all()
    # and the radii are not idle: ten times as far, the same attack finds nearly all
    network = random_networks()[number]
    attacked = pgd(network, x, y, eps=certificate.radius * 10, steps=40, box=None)
    assert (network(attacked).argmax(dim=1) != y).float().mean() > 0.5


def test_float32_and_float64_networks_of_the_same_numbers_agree_exactly() -> None:
    network = random_networks()[1]
    x, y = samples(network)
    single = certify(network, x, y)
    double = certify(random_networks()[1].double(), x, y)
    assert torch.equal(single.radius, double.radius)
    assert single.constant == double.constant
    assert next(iter(network.parameters())).dtype == torch.float32  # the copy was certified, not the caller's


def test_batch_size_does_not_matter() -> None:
    network = random_networks()[0]
    x, y = samples(network)
    torch.testing.assert_close(
        certify(network, x, y, batch_size=7).radius, certify(network, x, y).radius, rtol=1e-9, atol=1e-12
    )


def test_wrong_labels_and_ties_get_no_radius() -> None:
    network = linear_network()
    x, y = samples(network)
    wrong = certify(network, x, (y + 1) % 4)
    assert wrong.radius.eq(0).all()
    assert wrong.clean_accuracy == 0
    assert (wrong.margin < 0).all()
    last = nn.Linear(2, 2)
    last.weight.data, last.bias.data = torch.ones(2, 2), torch.zeros(2)
    tied = certify(modules.Network([last], (2,)), torch.rand(9, 2), torch.zeros(9, dtype=torch.int64))
    assert tied.radius.eq(0).all()


def test_a_constant_network_is_certified_at_every_radius() -> None:
    last = nn.Linear(2, 2)
    last.weight.data, last.bias.data = torch.zeros(2, 2), torch.tensor([1.0, 0.0])
    certificate = certify(modules.Network([last], (2,)), torch.rand(3, 2), torch.tensor([0, 0, 1]))
    assert certificate.radius.tolist() == [math.inf, math.inf, 0.0]
    assert certificate.accuracy(1e9, large_eps=True) == pytest.approx(2 / 3)
    assert "certified(0.5) 66.7 %" in certificate.describe()  # inf has no quantiles


def test_accuracy_counts_radii_strictly_above() -> None:
    network = linear_network()
    x, y = samples(network)
    certificate = certify(network, x, y)
    eps = float(certificate.radius.median())
    assert certificate.accuracy(eps) == float((certificate.radius > eps).double().mean())
    assert certificate.accuracy(math.inf) == 0
    with pytest.raises(OptionError, match="expected one radius >= 0, such as 36 / 255, got -1"):
        certificate.accuracy(-1)
    with pytest.raises(OptionError, match="got nan"):
        certificate.accuracy(math.nan)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_that_are_not_finite_are_refused(value: float) -> None:
    network = linear_network()
    x, y = samples(network)
    x[3, 1] = value
    with pytest.raises(OptionError, match="expected finite inputs, got NaN or infinity"):
        certify(network, x, y)
    with pytest.raises(OptionError, match="expected finite inputs"):
        certify_regression(network, x, network(x), delta=0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [1, 2])
def test_a_constant_layer_before_weights_that_are_not_finite_proves_nothing(value: float, place: int) -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    layers[0].weight.data.zero_()
    layers[place].weight.data.fill_(value)
    network = modules.Network([layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]], (2,))
    for rounding in ("sound", "ignore"):
        assert not certify(network, torch.rand(3, 2), torch.tensor([0, 1, 0]), rounding=rounding).radius.any()


def image_network() -> modules.Network:
    torch.manual_seed(0)
    return modules.Network([nn.Flatten(), nn.Linear(48, 3)], (3, 4, 4))


def test_a_radius_that_forgets_its_255_is_warned_of_where_the_range_is_not_known() -> None:
    """36 for 36/255 was 0.0 in silence. Samples of a sensor, in their own units, have radii in these."""
    network = linear_network()
    x, y = samples(network)
    certificate = certify(network, x, y)
    with pytest.warns(UserWarning, match=r"got 36 for samples in \[0\.\d+, 0\.\d+\]; did you mean 36/255\?"):
        assert certificate.accuracy(36) == 0
    assert certificate.accuracy(36, large_eps=True) == 0  # warnings are errors in this suite
    assert certify(network, 100 * x - 50, y).accuracy(36) < 1
    with pytest.warns(UserWarning, match="did you mean 36/255"):
        evaluate(network, Split(x, y), eps=(36.0,), attack=Attack(eps=()))
    network.input_range = (0.0, 1.0)
    with pytest.raises(OptionError, match="did you mean 36/255"):
        certify(network, x, y).accuracy(36)


def test_images_from_0_to_255_are_warned_of_where_the_range_is_not_known() -> None:
    network = image_network()
    x = torch.linspace(0, 255, 2 * 48).reshape(2, 3, 4, 4)
    y = torch.tensor([0, 1])
    with pytest.warns(UserWarning, match=r"expected images in \[0, 1\], got values up to 255: x / 255, or network"):
        certify(network, x, y)
    certify(network, x - 128, y)  # a sensor's
    network.input_range = (0.0, 255.0)
    certify(network, x, y)


def test_one_hot_labels_and_channels_last_arrays_are_named() -> None:
    network = image_network()
    x, y = torch.rand(2, 3, 4, 4), torch.tensor([0, 1])
    hot = nn.functional.one_hot(y, 3)
    with pytest.raises(ShapeError, match=r"got \(2, 3\) \(one-hot labels: y.argmax\(1\)\)"):
        certify(network, x, hot)
    with pytest.raises(OptionError, match=r"got float32 \(one-hot labels: y.argmax\(1\)\)"):
        certify(network, x, hot.float())
    with pytest.raises(ShapeError, match=r"\(channels last: x.permute\(0, 3, 1, 2\)\)"):
        certify(network, x.permute(0, 2, 3, 1), y)


def test_certificate_is_frozen_and_names_its_network() -> None:
    network = linear_network()
    x, y = samples(network)
    certificate = certify(network, x, y)
    assert certificate.network_sha256 == modules.sha256(network)
    assert certificate.network_sha256 != certify(linear_network(1), x, y).network_sha256
    assert (certificate.dtype, certificate.input_shape, len(certificate)) == ("float64", (6,), 40)
    with pytest.raises(dataclasses.FrozenInstanceError):
        certificate.constant = 0.0  # type: ignore[misc]


def test_csv_reads_back_exactly(tmp_path: Path) -> None:
    network = linear_network()
    x, y = samples(network)
    certificate = certify(network, x, y)
    certificate.save_csv(tmp_path / "radii.csv")
    with (tmp_path / "radii.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["index", "label", "prediction", "correct", "radius", "margin", "radius_ignored"]
    assert [float(row["radius_ignored"]) for row in rows] == certificate.radius_ignored.tolist()
    assert [float(row["radius"]) for row in rows] == certificate.radius.tolist()
    assert [float(row["margin"]) for row in rows] == certificate.margin.tolist()
    assert [int(row["index"]) for row in rows] == list(range(40))
    assert [int(row["correct"]) for row in rows] == certificate.correct.long().tolist()


def test_refuses_what_is_not_exported() -> None:
    with pytest.raises(NoRuleError, match=r"got Sequential: certify lipkit\.export"):
        certify(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2), torch.tensor([0]))  # type: ignore[arg-type]


def test_refuses_a_network_that_was_tampered_with() -> None:
    network = linear_network()
    network[-1].register_forward_hook(lambda module, args, output: 10 * output)
    with pytest.raises(NoRuleError, match="hook"):
        certify(network, *samples(linear_network()))


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), ShapeError, r"\(N, 6\), got \(3, 5\)"),
        (torch.zeros(6), torch.zeros(6, dtype=torch.int64), ShapeError, r"got \(6,\)"),
        (torch.zeros(3, 6), torch.zeros(2, dtype=torch.int64), ShapeError, "expected 3 labels"),
        (torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64), OptionError, "at least one sample"),
        (torch.zeros(3, 6), torch.zeros(3, 1), OptionError, "regression targets"),
        (torch.zeros(3, 6, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), OptionError, "got uint8"),
        (torch.zeros(3, 6), torch.full((3,), 9), OptionError, "from 0 to 3"),
    ],
)
def test_refusals(x: Tensor, y: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        certify(linear_network(), x, y)


def test_numpy_arrays_are_the_tensors_of_the_same_numbers() -> None:
    network = linear_network()
    x, y = samples(network)
    expected = certify(network, x, y)
    file = describe(expected, network, x, y, "toy")
    fixed = x.numpy()
    fixed.flags.writeable = False
    swapped, labels = x.numpy()[::-1].astype(">f4")[::-1], y.numpy().astype(">i8")
    for samples_, labels_ in ((fixed, y.numpy()), (swapped, labels), (x, y.numpy())):
        found = certify(network, samples_, labels_)
        assert torch.equal(found.radius, expected.radius)
        assert torch.equal(found.label, y)
        assert describe(found, network, samples_, labels_, "toy").data == file.data
        assert torch.equal(verify(file, network, samples_, labels_).radius, expected.radius)


def test_loaders_are_refused_with_the_remedy() -> None:
    network = linear_network()
    x, y = samples(network)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    remedy = r"got DataLoader: collect a DataLoader first, x, y = \(torch\.cat\(parts\) for parts in zip\(\*loader\)\)"
    for call in (lambda: certify(network, loader), lambda: certify_regression(network, loader, y, delta=0.1)):
        with pytest.raises(OptionError, match=remedy):
            call()
    collected = [torch.cat(parts) for parts in zip(*loader, strict=True)]
    assert torch.equal(certify(network, *collected).radius, certify(network, x, y).radius)
    for other, name in (
        (list(x), "list"),
        (x.numpy().astype(object), "an array of object"),
        (x.numpy().astype(np.longdouble), "an array of (longdouble|float128)"),
        (np.ma.masked_greater(x.numpy(), 0.5), "a masked array of float32"),
        (loader.dataset, "TensorD"),
    ):
        with pytest.raises(OptionError, match=f"two tensors or numpy arrays of numbers, got {name}"):
            certify(network, other, y)
    with pytest.raises(OptionError, match="numpy arrays of numbers, got NoneType"):
        certify(network, x)
    for strange, remedy in ((x.to_sparse(), r"use \.to_dense"), (x.to("meta"), "load its numbers first")):
        with pytest.raises(OptionError, match=remedy):
            certify(network, strange, y)
    for strange in (x + 0j, x.to(torch.float8_e4m3fn)):
        name = str(strange.dtype).removeprefix("torch.")
        for call in (lambda z: certify(network, z, y), lambda z: certify_regression(network, x, z, delta=0.1)):
            with pytest.raises(OptionError, match=f"real samples and labels of 16 to 64 bits, got {name}"):
                call(strange)
    assert certify(network, x.to_sparse().to_dense(), y).radius.equal(certify(network, x, y).radius)


@pytest.mark.parametrize("eps", ["36/255", None, math.nan, [0.1, 0.2], np.array([0.1, 0.2]), torch.ones(2)])
def test_what_is_no_radius_is_refused(eps: Any) -> None:
    network = linear_network()
    found = certify(network, *samples(network))
    for function in (found.accuracy, found.certified):
        with pytest.raises(OptionError, match="expected one radius >= 0, such as 36 / 255, got "):
            function(eps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1, got 0"),
        ({"batch_size": "3"}, "batch_size: expected an integer of at least 1, got '3'"),
        ({"batch_size": 1.5}, "batch_size: expected an integer of at least 1, got 1.5"),
        ({"device": "gpu"}, "device: expected a device of torch, such as 'cpu' or 'cuda', got 'gpu'"),
        ({"device": None}, "device: expected a device of torch, such as 'cpu' or 'cuda', got None"),
        ({"proof": 1.0}, "proof: expected the result of lipkit.prove, got float"),
    ],
)
def test_options_of_another_type_are_refused(options: dict, message: str) -> None:
    network = linear_network()
    with pytest.raises(OptionError, match=message):
        certify(network, *samples(network), **options)


def test_devices_without_float64_are_replaced_by_the_cpu() -> None:
    assert float64_device("mps") == torch.device("cpu")
    assert float64_device("cuda:1") == torch.device("cuda:1")
