"""Models of sequences: constants, exports for every length, certificates under attack, storage and ONNX of one step."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import lipkit
from lipkit import interop, models, modules
from lipkit.attacks import pgd
from lipkit.errors import OptionError, ShapeError
from lipkit.models import sequences
from lipkit.models.sequences import SumOverTime

MEAN, STD = [0.5, -1.0, 0.0], [0.5, 2.0, 1.0]


@pytest.mark.thorough
@pytest.mark.parametrize("layer", ["r2dn", "ren", "linear"])
def test_a_classifier_is_certified_for_every_length(layer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.sequence_classifier(
        4, 6, layer, input_shape=(8, 3), classes=3, lipschitz=2.0, rate=0.9, mean=MEAN, std=STD
    )
    assert float(lipkit.lipschitz(model, (8, 3))) == pytest.approx(4.0)
    for steps in (5, 8):
        plain, x = lipkit.export(model, (steps, 3)), torch.randn(6, steps, 3)
        assert torch.allclose(plain(x), model(x), atol=1e-5)
        assert 3.99 < float(lipkit.lipschitz(plain)) <= 4.0 * (1 + 1e-6)
        certificate = lipkit.certify(plain, x, plain(x).argmax(1))
        assert (certificate.radius > 0).any()
        for i in range(2):
            radius = float(certificate.radius[i])
            if radius > 0:
                found = pgd(
                    plain, x[i : i + 1], certificate.label[i : i + 1], eps=radius, norm="l2", steps=10, box=None
                )
                assert plain(found).argmax(1) == certificate.label[i]
    modules.save(plain, tmp_path)
    assert modules.sha256(modules.load(tmp_path)) == modules.sha256(plain)


def test_a_mask_is_a_shorter_sequence() -> None:
    torch.manual_seed(0)
    model = models.sequence_classifier(4, 6, input_shape=(8, 3), classes=3, mean=MEAN, std=STD)
    u, mask = torch.randn(2, 8, 3), torch.arange(8)[None] < torch.tensor([[8], [3]])
    assert torch.allclose(model(u, mask)[1:], model(u[1:, :3]), atol=1e-6)
    assert SumOverTime()(torch.ones(1, 3, 2), torch.zeros(1, 3, dtype=torch.bool)).tolist() == [[0.0, 0.0]]


@pytest.mark.thorough
def test_a_regression_and_its_step_as_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = models.sequence_regressor(4, 3, "ren", outputs=2, input_shape=(7, 3), lipschitz=3.0)
    plain, u = lipkit.export(model, (7, 3)), torch.randn(2, 7, 3)
    assert float(lipkit.lipschitz(plain)) == 3.0
    session = onnxruntime.InferenceSession(interop.write_onnx(plain[0].one_step(), tmp_path / "step.onnx"))
    x, y = np.zeros((2, 4), dtype=np.float32), []
    for t in range(7):
        after = session.run(None, {"input": np.concatenate((x, u[:, t].numpy()), 1)})[0]
        x, now = after[:, :4], after[:, 4:]
        y.append(torch.from_numpy(now))
    assert torch.allclose(torch.stack(y, 1), plain(u), atol=1e-5)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"sequence_classifier: expected an input shape \(steps, features\)"):
        models.sequence_classifier(input_shape=(1, 8, 8), classes=3)
    with pytest.raises(OptionError, match="layer: expected one of r2dn, ren, linear, got 'lstm'"):
        models.sequence_regressor(layer="lstm", input_shape=(8, 3))
    with pytest.raises(OptionError, match="expected mean and std of equally many finite numbers"):
        models.sequence_regressor(input_shape=(8, 3), mean=[0.0] * 3, std=[1.0])
    for mean, std in (([math.nan] * 3, [1.0] * 3), ([0.0] * 3, [math.inf] * 3), ([0.0] * 3, [1.0, 1.0, 0.0]), (0, 1)):
        with pytest.raises(OptionError, match=r"mean|std"):
            models.sequence_regressor(input_shape=(8, 3), mean=mean, std=std)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="features: expected an integer of at least 1, got 0"):
        models.sequence_classifier(input_shape=(8, 3), classes=3, features=0)


@pytest.mark.parametrize("layer", sequences.LAYERS)
def test_recipes_name_the_recurrent_layer(layer: str) -> None:
    model = models.build("sequence_classifier", layer=layer, states=4, units=4, input_shape=(6, 3), classes=2)
    assert type(model[0]) is sequences.LAYERS[layer]
    with pytest.raises(OptionError, match="layer: expected one of r2dn, ren, linear, got 'cayley'"):
        models.build("sequence_classifier", layer="cayley", input_shape=(6, 3), classes=2)
