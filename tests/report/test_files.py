"""Images, examples, radii and metrics as files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from safetensors.torch import save_file
from torch import nn

from lipkit import modules
from lipkit.certificates import Certificate, certify
from lipkit.data import Split
from lipkit.errors import RunError, ShapeError
from lipkit.report.examples import EXAMPLES, choose, data_uri, load_examples, png, save_examples
from lipkit.report.run_files import certificate_in, certified_curve, read_series


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (3, 5, 7), (1, 1, 1), (3, 64, 1)])
def test_png_decodes_to_the_same_pixels(shape: tuple[int, ...]) -> None:
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    decoded = (imread(io.BytesIO(png(pixels / 255)), format="png") * 255).round().astype(int)
    expected = pixels.numpy() if len(shape) == 2 else pixels.permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(decoded.reshape(expected.shape), expected)


def test_png_clips_and_survives_nan() -> None:
    image = torch.tensor([[-1.0, 2.0, float("nan"), 0.5]])
    assert (imread(io.BytesIO(png(image)), format="png") * 255).round().tolist() == [[0, 255, 0, 128]]
    assert data_uri(image).startswith("data:image/png;base64,iVBOR")


def test_png_refuses_what_is_no_image() -> None:
    with pytest.raises(ShapeError, match=r"got \(2, 4, 4\)"):
        png(torch.zeros(2, 4, 4))


@pytest.fixture
def certified() -> tuple[Certificate, Split]:
    torch.manual_seed(0)
    network = modules.Network([nn.Flatten(), nn.Linear(16, 3)], (1, 4, 4))
    x = torch.rand(30, 1, 4, 4)
    y = network(x).argmax(dim=1)
    y[:4] = (y[:4] + 1) % 3
    return certify(network, x, y), Split(x, y)


def test_examples_are_the_extremes(certified: tuple[Certificate, Split]) -> None:
    certificate, _ = certified
    easiest, hardest, mistakes = choose(certificate, 5)
    right = certificate.radius[4:]
    assert certificate.radius[easiest].tolist() == sorted(right.tolist(), reverse=True)[:5]
    assert certificate.margin[hardest].tolist() == sorted(certificate.margin[4:].tolist())[:5]
    assert certificate.margin[mistakes].tolist() == sorted(certificate.margin[:4].tolist())
    easiest, hardest, mistakes = choose(certificate, 100)
    assert len(torch.cat([easiest, hardest, mistakes]).unique()) == 30


def test_examples_round_trip(certified: tuple[Certificate, Split], tmp_path: Path) -> None:
    certificate, data = certified
    save_examples(tmp_path, certificate, data, 3)
    examples = load_examples(tmp_path)
    assert [example.group for example in examples] == [0] * 3 + [1] * 3 + [2] * 3
    for example in examples:
        assert torch.equal(example.image, data.x[example.index])
        assert example.label == int(data.y[example.index])
        assert example.prediction == int(certificate.prediction[example.index])
        assert example.radius == float(certificate.radius[example.index])
        assert (example.label == example.prediction) == (example.group < 2)


def test_examples_absent_or_corrupt(tmp_path: Path) -> None:
    assert load_examples(tmp_path) == []
    (tmp_path / EXAMPLES).write_bytes(b"not tensors")
    with pytest.raises(RunError, match="expected the tensors image, index"):
        load_examples(tmp_path)
    names = ("image", "index", "label", "prediction", "group", "radius", "margin")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / EXAMPLES)
    with pytest.raises(RunError, match=r"expected whole numbers \(int64\), got torch.float32 for index"):
        load_examples(tmp_path)


def test_the_curve_of_a_certificate_is_its_certified_accuracy(
    certified: tuple[Certificate, Split], tmp_path: Path
) -> None:
    certificate, _ = certified
    assert certificate_in(tmp_path) is None
    grid = np.concatenate([np.linspace(0, 2, 50), certificate.radius.numpy()])
    want = [certificate.accuracy(eps) for eps in grid]
    np.testing.assert_allclose(certified_curve(certificate, grid), want, rtol=1e-12)


def test_series_skip_what_is_no_number(tmp_path: Path) -> None:
    assert read_series(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text(
        '{"epoch": 1, "loss": 2.0, "note": "x", "done": true}\n{"epoch": 2, "loss": null, "accuracy": 1}\n'
        f'{{"epoch": 3, "loss": {10**400}, "accuracy": 1e999}}\n'  # beyond all floats
    )
    assert read_series(tmp_path) == {"loss": [(1.0, 2.0)], "accuracy": [(2.0, 1.0)]}
