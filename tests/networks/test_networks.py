"""The networks of the package: small, whole, and certified again here, on what the tests have of their data."""

from __future__ import annotations

import gzip
import json
import os
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import lipkit
from lipkit import networks
from lipkit.certificates.certificate_file import read_certificate, verify
from lipkit.cli.main import main
from lipkit.errors import DataError, OptionError
from lipkit.experiments.recipe import load_recipe
from lipkit.explorer.runs import open_run
from lipkit.modules import sha256
from lipkit.report import Record, read_record

HERE = Path(__file__).parent
CERTIFICATE = "certificate.jsonl.gz"
certificate = cache(lambda name: read_certificate(networks.folder(name) / CERTIFICATE))
CERTIFIED = [name for name in networks.names() if (networks.folder(name) / CERTIFICATE).exists()]


def test_there_are_some() -> None:
    assert {"digits-cayley"} <= set(CERTIFIED)


@pytest.mark.thorough
@pytest.mark.parametrize("name", networks.names())
def test_a_network_is_whole_and_small(name: str) -> None:
    folder = networks.folder(name)
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 5_000_000
    network = lipkit.load(name)
    assert sha256(network) == sha256(lipkit.load(folder / "network"))
    card = (folder / "README.md").read_text()
    assert f'lipkit.load("{name}")' in card
    assert sha256(network) in card
    for file in folder.rglob("*"):
        assert not file.is_file() or b'"root": "' not in file.read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("name", CERTIFIED)
def test_record_recipe_and_certificate_belong_together(name: str) -> None:
    folder = networks.folder(name)
    record, file = read_record(folder), certificate(name)
    assert isinstance(record, Record)
    found = file.certificate
    assert record.name == name
    assert record.network_sha256 == found.network_sha256 == sha256(lipkit.load(name))
    assert record.clean.count == int((found.label == found.prediction).sum())
    assert record.clean.total == len(found)
    for row in record.certified:
        assert row.share.count == int(((found.label == found.prediction) & (found.radius > row.eps)).sum())
    assert record.rounding.rounding == found.rounding == "sound"
    assert load_recipe(folder / "recipe.yaml").data.spec == record.data.name


def test_the_page_of_accuracies_speaks_of_the_network_that_is_shipped() -> None:
    record = read_record(networks.folder("mnist-patchnet"))
    assert isinstance(record, Record)
    (line,) = (
        row for row in (HERE.parents[1] / "docs/accuracy.md").read_text().splitlines() if row.startswith("MNIST")
    )
    clean, small, large, pgd = map(float, re.findall(r"(?:clean|36/255\)|108/255|PGD) (\d+\.\d+)", line))
    assert clean == pytest.approx(100 * record.clean.value)
    found = {round(255 * row.eps): 100 * row.share.value for row in record.certified}
    assert (small, large) == pytest.approx((found[36], found[108]))
    assert pgd == pytest.approx(100 * record.attacked[0].share.value)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CERTIFIED)
def test_samples_are_certified_again(name: str) -> None:
    """All of the digits, which come with the package; of the others the first test images."""
    file, network = certificate(name), lipkit.load(name)
    data = load_recipe(networks.folder(name) / "recipe.yaml").data.spec
    if data == "digits":
        x, y = lipkit.data.load("digits").test.batch(slice(None))
        assert len(verify(file, network, x, y)) == len(file.certificate)
        return
    with np.load(HERE / f"{data}.npz") as part:
        x, y = torch.from_numpy(part["x"]).float() / 255, torch.from_numpy(part["y"])
    again = lipkit.certify(network, x, y)
    claimed = file.certificate
    assert torch.equal(claimed.label[: len(x)], y)
    assert torch.equal(again.prediction, claimed.prediction[: len(x)])
    # The LMI of the LBDN has since been proved on its Schur complement, which gives 1e-8 more.
    sharper = 2e-8 if name == "mnist-lbdn" else 1e-9
    assert torch.allclose(again.radius, claimed.radius[: len(x)], rtol=sharper, atol=0)
    assert bool((again.radius >= claimed.radius[: len(x)] * (1 - 1e-9)).all())
    assert int((again.radius > 36 / 255).sum()) >= len(x) // 2
    assert again.constant == pytest.approx(claimed.constant, rel=sharper)
    assert again.constant <= claimed.constant * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.skipif("LIPKIT_DATA" not in os.environ, reason="needs the data sets")
@pytest.mark.parametrize("name", CERTIFIED)
def test_all_samples_are_certified_again(name: str) -> None:
    file = read_certificate(networks.folder(name) / CERTIFICATE)
    x, y = lipkit.data.load(load_recipe(networks.folder(name) / "recipe.yaml").data.spec).test.batch(slice(None))
    assert len(verify(file, lipkit.load(name), x, y)) == len(x)


def test_the_critic_is_proved_and_tells_fours_from_nines() -> None:
    estimate = json.loads((networks.folder("mnist-critic") / "estimate.json").read_text())
    critic = lipkit.load("mnist-critic")
    proved = float(lipkit.lipschitz(critic))
    norms = [np.linalg.norm(m.weight.double().numpy(), 2) for m in critic if isinstance(m, torch.nn.Linear)]
    assert np.prod(norms) <= proved <= np.prod(norms) * (1 + 1e-6)
    assert proved == pytest.approx(estimate["constant"], rel=1e-12)
    assert 0 < estimate["low"] < estimate["value"] < estimate["high"]
    with np.load(HERE / "mnist.npz") as part:
        x, y = torch.from_numpy(part["x"]).float() / 255, torch.from_numpy(part["y"])
    values = critic(x).flatten()
    assert values[y == 4].min() > values[y == 9].max()


def test_the_list_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "networks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(networks.names())
    line = next(line for line in lines if line.startswith("digits-cayley"))
    record = json.loads((networks.folder("digits-cayley") / "record.json").read_text())
    assert f"clean {100 * record['clean']['value']:.2f} %" in line
    assert f"certified(36/255) {100 * record['certified'][0]['share']['value']:.2f} %" in line


def test_the_explorer_opens_them() -> None:
    data = lipkit.data.load("digits")
    run = open_run(networks.resolved("digits-cayley"), data.test, data.classes)
    assert run.sample(0)["correct"]
    curve = run.summary(1.0)["curve"]["certified"]
    assert curve[0] == run.record.clean.value


def test_a_folder_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert networks.resolved("digits-cayley") == networks.folder("digits-cayley")
    own = lipkit.modules.Network([torch.nn.ReLU()], (3,))
    lipkit.save(own, "digits-cayley")
    assert sha256(lipkit.load("digits-cayley")) == sha256(own)


def test_wrong_names_are_met_with_near_ones() -> None:
    with pytest.raises(DataError, match=r"digits-caley: expected .*, did you mean 'digits-cayley'\?$"):
        lipkit.load("digits-caley")
    with pytest.raises(OptionError, match=r"unknown network '\.\./modules'; known: "):
        networks.folder("../modules")


@pytest.mark.thorough
@pytest.mark.parametrize("harm", ["cut", "not gzip", "altered", "endless line"])
def test_compressed_certificates_that_are_broken_are_refused(harm: str, tmp_path: Path) -> None:
    whole = (networks.folder("digits-cayley") / CERTIFICATE).read_bytes()
    path = tmp_path / CERTIFICATE
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "not gzip": gzip.decompress(whole),
            "altered": whole[:200] + bytes(50) + whole[250:],
            "endless line": gzip.compress(b'{"kind": "' + b"a" * (1 << 24)),
        }[harm]
    )
    with pytest.raises(DataError, match=r"certificate\.jsonl\.gz.*expected"):
        read_certificate(path)
