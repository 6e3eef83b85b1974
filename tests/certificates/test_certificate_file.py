"""Certificate files: they read back exactly, are proved again, and broken ones are refused in one sentence."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lipkit
from lipkit import modules
from lipkit.certificates.certificate_file import (
    CertificateFile,
    data_sha256,
    describe,
    read_certificate,
    unchecked,
    verify,
    write_certificate,
)
from lipkit.errors import CertificateViolation, DataError, LipkitError, OptionError


def problem(dtype: torch.dtype = torch.float32) -> tuple[modules.Network, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, last = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 3, dtype=dtype)
    with torch.no_grad():
        for parameter in (*first.parameters(), *last.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    network = modules.Network([first, nn.ReLU(), last], (6,))
    x = torch.rand(20, 6, generator=generator)
    with torch.no_grad():
        y = network(x.to(dtype)).argmax(1)
    y[:3] = (y[:3] + 1) % 3
    return network, x, y


@pytest.fixture(params=["sound", "ignore"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, modules.Network, Tensor, Tensor]:
    network, x, y = problem()
    certificate = lipkit.certify(network, x, y, rounding=request.param)
    return write_certificate(describe(certificate, network, x, y, "toy"), tmp_path / "c.jsonl"), network, x, y


def same(a: CertificateFile, b: CertificateFile) -> None:
    for field in dataclasses.fields(a.certificate):
        left, right = getattr(a.certificate, field.name), getattr(b.certificate, field.name)
        if isinstance(left, Tensor):
            assert left.dtype == right.dtype
            assert torch.equal(left, right)
        elif field.name != "sample_range":  # a file does not hold the samples
            assert left == right, field.name
    assert dict(a.data) == dict(b.data)


def test_a_file_reads_back_exactly_and_is_proved_again(written: Any) -> None:
    path, network, x, y = written
    file = read_certificate(path)
    certificate = lipkit.certify(network, x, y, rounding=file.certificate.rounding)
    same(file, describe(certificate, network, x, y, "toy"))
    same(file, read_certificate(write_certificate(file, path.with_suffix(".gz"))))
    proved = verify(file, network, x, y)
    assert torch.equal(proved.radius, certificate.radius)
    assert bool((proved.radius > 0).any())
    header = json.loads(path.read_text().splitlines()[0])
    assert header["data"]["sha256"] == data_sha256(x, y)
    assert header["architecture"] == ["Linear", "ReLU", "Linear"]
    assert header["evaluator"]["name"] == ("float64" if file.certificate.rounding == "sound" else "real")


def test_infinite_and_nan_numbers_survive(tmp_path: Path) -> None:
    network, x, y = problem()
    certificate = lipkit.certify(network, x, y)
    radius, margin = certificate.radius.clone(), certificate.margin.clone()
    radius[0], margin[1], margin[2] = math.inf, math.nan, -math.inf
    changed = dataclasses.replace(certificate, radius=radius, margin=margin, constant=5e-324)
    path = write_certificate(describe(changed, network, x, y, "toy"), tmp_path / "c.jsonl")
    back = read_certificate(path).certificate
    assert torch.equal(back.radius, radius)
    assert torch.equal(back.margin, margin) or bool(torch.isnan(back.margin[1]))
    assert back.constant == 5e-324
    assert "NaN" in path.read_text()
    with pytest.raises(CertificateViolation, match="sample 0"):
        verify(dataclasses.replace(read_certificate(path), certificate=dataclasses.replace(certificate, radius=radius)),
               network, x, y)  # fmt: skip


def changed_line(path: Path, number: int, **values: Any) -> None:
    lines = path.read_text().splitlines()
    lines[number] = json.dumps({**json.loads(lines[number]), **values})
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.thorough
def test_a_larger_radius_a_smaller_constant_another_label_are_violations(written: Any) -> None:
    path, network, x, y = written
    good = path.read_text()
    sample = int((read_certificate(path).certificate.radius > 0).nonzero()[0])
    radius = float(read_certificate(path).certificate.radius[sample])
    for values in ({"radius": radius * 1.0001}, {"radius_ignored": radius * 1.1}, {"radius": "Infinity"}):
        path.write_text(good)
        changed_line(path, sample + 1, **values)
        with pytest.raises(CertificateViolation, match=f"sample {sample}: expected a radius of at most"):
            verify(read_certificate(path), network, x, y)
    path.write_text(good)
    changed_line(path, sample + 1, radius_ignored=7.5)  # the message shows the radius that is too large, not the other
    with pytest.raises(CertificateViolation, match=r"at most \S+ \(radius_ignored\) for the label \d, got 7\.5 for"):
        verify(read_certificate(path), network, x, y)
    path.write_text(good)
    changed_line(path, sample + 1, label=int(y[sample] + 1) % 3)
    with pytest.raises(CertificateViolation, match=f"sample {sample}"):
        verify(read_certificate(path), network, x, y)
    path.write_text(good)
    changed_line(path, 0, constant=0.1)
    with pytest.raises(CertificateViolation, match="expected a Lipschitz constant of at least"):
        verify(read_certificate(path), network, x, y)
    path.write_text(good)
    changed_line(path, sample + 1, radius=radius / 2)  # a smaller claim is true
    assert float(verify(read_certificate(path), network, x, y).radius[sample]) == radius / 2


def test_other_networks_and_samples_are_refused(written: Any) -> None:
    path, network, x, y = written
    file = read_certificate(path)
    other, _, _ = problem(torch.float64)
    with pytest.raises(DataError, match="expected the network with sha256"):
        verify(file, other, x, y)
    for xs, ys in ((x + 1e-7, y), (x, (y + 1) % 3), (x[:19], y[:19]), (x.double(), y), (x.flip(0), y.flip(0))):
        with pytest.raises(DataError, match="expected the 20 samples of 'toy'"):
            verify(file, network, xs, ys)
    with pytest.raises(OptionError, match="expected the network and the samples"):
        describe(file.certificate, other, x, y, "toy")


@pytest.mark.parametrize(
    ("number", "values", "message"),
    [
        (0, {"kind": "other"}, "expected a lipkit certificate of schema version"),
        (0, {"schema_version": "2.0"}, "expected a lipkit certificate of schema version"),
        (0, {"constant": -1}, "expected constant as a number >= 0"),
        (0, {"constant": "NaN"}, "expected constant as a number >= 0"),
        (0, {"constant": True}, "expected constant as a number >= 0"),
        (0, {"constant": 10**400}, "that float64 holds"),
        (0, {"data": 3}, "expected data with a name"),
        (0, {"data": {"name": "a", "sha256": "b", "samples": 10**12}}, "expected 1000000000000 lines"),
        (0, {"data": {"name": "a", "sha256": "b", "samples": 0}}, "samples >= 1"),
        (0, {"input_shape": [0]}, "expected input_shape"),
        (0, {"rounding": "maybe"}, "expected rounding"),
        (0, {"evaluator": {}}, "expected an evaluator with"),
        (0, {"evaluator": None}, "expected an evaluator with"),
        (0, {"method": 3}, "expected method as a string"),
        (3, {"index": 7}, "line 4: expected index 2"),
        (3, {"label": 0.5}, "expected index 2 and whole labels"),
        (3, {"label": -1}, "whole labels"),
        (3, {"label": 0.0}, "whole labels"),
        (3, {"index": 2.0}, "whole labels"),
        (3, {"prediction": "NaN"}, "whole labels"),
        (3, {"radius": -0.1}, "expected radii >= 0"),
        (3, {"radius": "NaN"}, "expected radii >= 0"),
        (3, {"radius": None}, "expected radius as a number"),
        (3, {"radius": [1]}, "expected radius as a number"),
        (3, {"radius": "1.0"}, "expected radius as a number"),
        (3, {"note": 1}, "line 4: expected index, .* got 'note' too"),
        (0, {"norm": "linf"}, "expected norm 'l2', got 'linf'"),
        (0, {"task": "regression"}, "expected task 'classification'"),
        (0, {"proof": "none"}, "expected proof 'spectral norms"),
        (0, {"schema_version": 1.0}, "expected a lipkit certificate of schema version"),
    ],
)
def test_altered_files_are_refused(written: Any, number: int, values: dict[str, Any], message: str) -> None:
    path = written[0]
    changed_line(path, number, **values)
    with pytest.raises(DataError, match=message):
        read_certificate(path)


@pytest.mark.parametrize(
    "key",
    ["kind", "schema_version", "constant", "data", "input_shape", "method", "dtype", "network_sha256", "rounding",
     "evaluator"],
)  # fmt: skip
def test_a_header_without_a_field_is_refused(written: Any, key: str) -> None:
    path = written[0]
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    del header[key]
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    with pytest.raises(DataError, match="expected"):
        read_certificate(path)


def test_a_key_twice_is_refused(written: Any) -> None:
    """People and programs may read different ones of the two."""
    path = written[0]
    path.write_text(path.read_text().replace('"radius":', '"radius":1.0,"radius":', 1))
    with pytest.raises(DataError, match="line 2: expected JSON, got: a key twice"):
        read_certificate(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"body_constant": 0.1}, "expected a body_constant of at least"),
        ({"body_constant": None}, "expected a body_constant of .*, got None"),
        ({"method": "global"}, "expected method 'last layer', got 'global'"),
        ({"dtype": "float32"}, "expected dtype 'float64', got 'float32'"),
        ({"input_shape": [2, 3]}, "expected input_shape"),
        (
            {
                "evaluator": dict.fromkeys(("device", "torch"), "")
                | {"name": "float64", "dtype": "float16", "block": None, "settings": {}}
            },
            r"expected evaluator '\w+ \(\w+, block None\)', got 'float64 \(float16, block None\)'",
        ),
        ({"architecture": ["Linear", "Tanh", "Linear"]}, "expected architecture"),
    ],
)
def test_what_a_header_says_of_the_network_is_compared(written: Any, values: dict[str, Any], message: str) -> None:
    path, network, x, y = written
    changed_line(path, 0, **values)
    with pytest.raises(CertificateViolation, match=message):
        verify(read_certificate(path), network, x, y)


@pytest.mark.parametrize("sample", [0, 5])  # of radius 0, and of a positive one
@pytest.mark.parametrize("values", [{"prediction": -1}, {"prediction": 0}, {"margin": 1e3}, {"margin": "NaN"}])
def test_predictions_and_margins_are_compared(written: Any, sample: int, values: dict[str, Any]) -> None:
    path, network, x, y = written
    if values.get("prediction") == read_certificate(path).certificate.prediction[sample]:
        values = {"prediction": 1}
    changed_line(path, sample + 1, **values)
    with pytest.raises(CertificateViolation, match=f"sample {sample}: expected the prediction"):
        verify(read_certificate(path), network, x, y)


def test_what_a_later_version_adds_is_a_claim(written: Any) -> None:
    path, network, x, y = written
    changed_line(path, 0, schema_version="1.3", energy={"kWh": 1})
    file = read_certificate(path)
    verify(file, network, x, y)
    claims = unchecked(file)
    assert (claims["other.energy"], claims["other.schema_version"]) == ('{"kWh": 1}', '"1.3"')
    changed_line(path, 0, **{f"field{i}": i for i in range(50)})
    claims = unchecked(read_certificate(path))
    assert (len(claims), claims["further fields"]) == (25, str(50 + 8 - 24))


def test_cut_long_and_missing_files_are_refused(written: Any, tmp_path: Path) -> None:
    path = written[0]
    good = path.read_bytes()
    for content, message in (
        (good[:-1], "expected a whole line"),
        (good[: good.rindex(b"{")], "expected 20 lines of samples, got 19: the file is cut"),
        (good + b"{}\n", "expected 20 lines of samples, got more"),
        (b"", "line 1: expected a whole line"),
        (b"x" * (1 << 21), "expected a whole line of at most"),
        (b"[" * 100_000 + b"\n", "expected JSON|expected a whole line"),
        (b"[]\n", "expected an object"),
        (good.replace(b'"radius":0.', b'"radius":NaN,"x":0.', 1), "expected JSON"),
        (b"\xff\xfe\n", "expected JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_certificate(path)
    with pytest.raises(DataError, match="expected a certificate"):
        read_certificate(tmp_path / "none")
    with pytest.raises(DataError, match="expected a certificate"):
        read_certificate(tmp_path)


@functools.cache
def good_file() -> bytes:
    import tempfile

    network, x, y = problem()
    certificate = lipkit.certify(network, x[:3], y[:3], rounding="ignore")
    with tempfile.TemporaryDirectory() as folder:
        described = describe(certificate, network, x[:3], y[:3], "toy")
        return write_certificate(described, Path(folder) / "c.jsonl").read_bytes()


@pytest.mark.thorough
@settings(max_examples=60)
@given(st.data())
def test_any_bytes_give_a_certificate_or_one_error(data: st.DataObject) -> None:
    """Random edits of a good file: read, or refused with an error of ours."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.jsonl"
        content = bytearray(good_file())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content)))
            cut = data.draw(st.integers(0, 8))
            content[at : at + cut] = data.draw(st.binary(max_size=8))
        path.write_bytes(bytes(content))
        try:
            file = read_certificate(path)
        except LipkitError:
            return
        assert len(file.certificate) == 3


@pytest.mark.thorough
def test_the_command_confirms_and_refuses(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from lipkit import data as datasets
    from lipkit.cli.check import command

    torch.manual_seed(0)
    network = lipkit.export(lipkit.models.build("small", input_shape=(1, 8, 8), classes=10), (1, 8, 8))
    modules.save(network, tmp_path / "network")
    split = datasets.load("digits", limit=30).test
    x, y = split.batch(torch.arange(len(split)))
    certificate = lipkit.certify(network, x, y)
    path = write_certificate(describe(certificate, network, x, y, "digits"), tmp_path / "certificate.jsonl")
    arguments = [str(path), str(tmp_path / "network"), "digits", "--limit", "30", "--eps", "0", "--eps", "1/255"]
    outcome = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert f"confirmed  {len(x)} samples of digits" in outcome.output
    assert f"certified(1/255)  {100 * certificate.accuracy(1 / 255):.2f} %" in outcome.output
    assert "rounding  " not in outcome.output
    outcome = CliRunner().invoke(command, [*arguments, "--limit", "29"])
    assert isinstance(outcome.exception, DataError)
    larger = dataclasses.replace(certificate, radius=certificate.radius * (1 + 2.0**-40))
    write_certificate(describe(larger, network, x, y, "digits"), path)
    outcome = CliRunner().invoke(command, arguments[:3], catch_exceptions=False)  # as many samples as the file has
    assert "radii of the file are larger than those proved here, by a relative 9e-13 at most" in outcome.output
    outcome = CliRunner().invoke(command, [*arguments, "--eps", "2**3"])
    assert outcome.exit_code == 2
    assert "2**3" in outcome.output


@pytest.mark.thorough
def test_the_certificate_of_an_integer_program_names_the_range_that_it_is_made_for(tmp_path: Path) -> None:
    network, x, y = problem()
    low, high = float(x.min()), float(x.max())
    network.input_range = (2 * min(low, 0.0), 2 * max(high, 0.0))
    wide = lipkit.certify(network, x, y, evaluator="integer")
    path = write_certificate(describe(wide, network, x, y, "some"), tmp_path / "c.jsonl")
    assert read_certificate(path).certificate.input_range == network.input_range
    verify(read_certificate(path), network, x, y)
    network.input_range = (low, high)  # another program, with larger radii, of the same hash
    assert bool((lipkit.certify(network, x, y, evaluator="integer").radius >= wide.radius).all())
    with pytest.raises(CertificateViolation, match="expected input_range"):
        verify(read_certificate(path), network, x, y)
