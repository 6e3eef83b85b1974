"""The page: complete from the folder alone, loads nothing, and shows names without obeying them."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lipkit import modules
from lipkit.data import Split
from lipkit.errors import RunError, ShapeError
from lipkit.evaluation import Attack, evaluate
from lipkit.report import save_evaluation, write_report
from lipkit.report.html import flatten
from lipkit.report.plots import _accuracy, accuracy_curve, training_curves
from lipkit.report.record import Record, from_evaluation, read_record, write_record
from lipkit.report.run_files import certificate_in
from lipkit.report.schema import ShareRecord
from lipkit.report.tables import accuracy_rows, class_rows, summary
from lipkit.text import table

pytestmark = pytest.mark.thorough

EVIL = "<script>alert('x')</script>&\"$x$"


def make_run(folder: Path, *, shape: tuple[int, ...] = (1, 4, 4), metrics: bool = True) -> Record:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    features = torch.Size(shape).numel()
    network = modules.Network([nn.Flatten(), nn.Linear(features, 3)], shape)
    x = torch.rand(40, *shape)
    y = network(x).argmax(dim=1)
    y[:5] = (y[:5] + 1) % 3
    data = Split(x, y)
    classes = (EVIL, "b", "c")
    result = evaluate(network, data, eps=(36 / 255, 0.5), attack=Attack(steps=5), classes=classes)
    record = from_evaluation(
        result, name=EVIL, data=EVIL, classes=classes, recipe={EVIL: EVIL, "model": {"width": 2}}, seed=0
    )
    save_evaluation(folder, result, network, data, record)
    if metrics:
        rows = [{"epoch": e, "loss": 1.0 / e, "accuracy": 1 - 0.5 / e, EVIL + " loss": 2.0} for e in range(1, 5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return record


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "toy-001"
    make_run(folder)
    return folder


@pytest.fixture(scope="module")
def written(run: Path) -> Path:
    return write_report(run)


@pytest.fixture(scope="module")
def crowded(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of level curves so close that a legend among them covers one."""
    folder = Path(shutil.copytree(run, tmp_path_factory.mktemp("crowded") / "toy-001"))
    levels = {f"certified({number}/255)": number / 16 for number in range(17)}
    rows = [{"epoch": epoch, "loss": 1 / epoch, **levels} for epoch in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report(folder)


class Page(HTMLParser):
    """Tags, addresses and text of a page; complains about tags that do not close."""

    VOID = frozenset({"meta", "br", "img", "hr", "link", "input", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_complete(run: Path, written: Path) -> None:
    page = Page(written.read_text("utf-8"))
    record = read_record(run)
    assert page.tags.count("svg") == 2 * 2  # for wide and for narrow pages
    assert page.tags.count("img") == 8 + 8 + 5
    assert page.tags.count("h1") == 1
    for expected in (
        f"{100 * record.clean.value:.2f} %",
        f"{100 * record.certified[0].share.value:.2f} %",
        f"{100 * record.certified[0].share.low:.2f} to",
        "36/255",
        record.network_sha256,
        record.versions["torch"],
        "model.width",
    ):
        assert expected in page.text


def test_page_loads_nothing(written: Path) -> None:
    text = written.read_text("utf-8")
    page = Page(text)
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in page.addresses)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"' <]*", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_names_are_shown_not_obeyed(written: Path) -> None:
    text = written.read_text("utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert Page(text).text.count("<script>alert('x')</script>&\"$x$") >= 4


def test_made_from_the_folder_alone(run: Path, written: Path, tmp_path: Path) -> None:
    first = written.read_bytes()
    copy = tmp_path / "elsewhere"
    shutil.copytree(run, copy)
    (copy / "report.html").unlink()
    assert write_report(copy).read_bytes() == first


@pytest.mark.parametrize("shape", [(12,), (2, 3, 3)])
def test_inputs_that_are_no_images_and_no_training(tmp_path: Path, shape: tuple[int, ...]) -> None:
    make_run(tmp_path, shape=shape, metrics=False)
    page = Page(write_report(tmp_path).read_text("utf-8"))
    assert page.tags.count("svg") == 2
    assert page.tags.count("img") == 0


def test_the_record_is_enough(tmp_path: Path) -> None:
    make_run(tmp_path, metrics=False)
    (tmp_path / "certificate.jsonl").unlink()
    (tmp_path / "examples.safetensors").unlink()
    assert Page(write_report(tmp_path).read_text("utf-8")).tags.count("svg") == 2


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"expected a run folder with record\.json"):
        write_report(tmp_path)
    with pytest.raises(RunError, match="no such folder"):
        write_report(tmp_path / "missing")


def test_plots_are_svg_with_the_page_s_colours(run: Path) -> None:
    record = read_record(run)
    curve = accuracy_curve(record, certificate_in(run))
    training = training_curves({"loss": [(1, 2.0), (2, 1.0)], "certified(36/255)": [(1, 0.5)]})
    identifiers = []
    for svg in (curve, training):
        root = ElementTree.fromstring(f"<div>{svg}</div>")
        assert len(root.findall("div/{http://www.w3.org/2000/svg}svg")) == 2
        identifiers += [element.get("id") for element in root.iter() if element.get("id")]
        assert "#0102" not in svg
        assert "var(--plot-1" in svg
    assert len(identifiers) == len(set(identifiers))
    assert curve == accuracy_curve(record, certificate_in(run))
    assert "36/255" in curve
    assert "certified-curve" in curve


def test_no_training_curve_without_numbers() -> None:
    assert training_curves({}) == ""
    assert training_curves({"lr": [(1, 0.1), (2, 0.1)]}) == ""
    assert training_curves({"loss": [(1, 2.0)], "clean": [(1, 0.5)]}) == ""  # one epoch is no curve


def test_a_record_without_attack_or_radii(run: Path) -> None:
    record = read_record(run)
    assert "<svg" in accuracy_curve(record.model_copy(update={"attacked": []}))
    assert "<svg" in accuracy_curve(record.model_copy(update={"attacked": [], "certified": []}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_is_cut_small_or_covered(
    flaws: Callable[..., list[str]], written: Path, crowded: Path, width: int
) -> None:
    assert flaws(written.as_uri(), width) == []
    assert flaws(crowded.as_uri(), width) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_figures_of_the_tiles_stand_in_line(browser: Any, written: Path) -> None:
    page = browser.new_page()
    page.goto(written.as_uri())
    page.evaluate("document.querySelector('.tile span').textContent = 'a label of several lines '.repeat(4)")
    text = "b => { const r = document.createRange(); r.selectNodeContents(b); return r.getBoundingClientRect(); }"
    for width, edge in ((390, "right"), (1280, "bottom")):
        page.set_viewport_size({"width": width, "height": 900})
        edges = page.evaluate(f"[...document.querySelectorAll('.tile b')].map({text}).map(box => box.{edge})")
        assert len(edges) == 4
        assert max(edges) - min(edges) < 1, edge
    page.close()


def test_tables(run: Path) -> None:
    record = read_record(run)
    text = summary(record)
    assert f"{100 * record.certified[0].share.value:.2f} %" in text
    assert len({len(line) for line in table(*class_rows(record)).splitlines()[1:]}) == 1
    assert table(*class_rows(record), markdown=True).count("\n") == 4
    with pytest.raises(ShapeError, match="rows of 2 cells, got 1"):
        table(["a", "b"], [["1"]])


def test_a_part_that_was_attacked_is_counted_beside_all(run: Path) -> None:
    """12 % certified of all beside 0 % under attack of a part looked like a contradiction."""
    record = read_record(run)
    total = record.clean.total
    assert accuracy_rows(record)[0][:4] == ["l2 radius", "certified", "95 % interval", "PGD"]  # all were attacked
    share = ShareRecord(value=0.0, count=0, total=total // 2, low=0.0, high=0.5)
    part = [row.model_copy(update={"share": share, "certified": share}) for row in record.attacked]
    header, _ = accuracy_rows(record.model_copy(update={"attacked": part}))
    assert header[1] == f"certified (all {total})"
    assert header[3] == f"PGD ({total // 2} of them)"


def test_settings_that_the_attack_chose_itself_are_left_out(written: Path) -> None:
    assert "(PGD l2, margin loss, 5 steps, at each radius" in written.read_text()


def test_no_line_joins_the_points_of_an_attack(run: Path) -> None:
    record = read_record(run)
    for radii in (None, certificate_in(run)):
        lines = [line for line in _accuracy(record, radii, False).axes[0].lines if line.get_marker() == "o"]
        assert lines
        assert {line.get_linestyle() for line in lines} == {"None"}
    assert f"PGD ({record.attacked[0].share.total} attacked)" in accuracy_curve(record)


def test_flatten_keeps_order_and_empty_settings() -> None:
    assert list(flatten({"b": {}, "a": {"x": None}, "c": []})) == [("b", "{}"), ("a.x", "None"), ("c", "")]


def test_changed_keys_are_marked_and_the_model_is_named(run: Path, tmp_path: Path) -> None:
    recipe = {"model": {"name": "small", "options": {"layer": "<b>aol"}}, "train": {"epochs": 5}}
    record = read_record(run)
    assert "<b>changed</b>" not in write_report(run).read_text()
    write_record(record.model_copy(update={"recipe": recipe, "changed": ["train.epochs"]}), tmp_path / "record.json")
    page = write_report(tmp_path).read_text()
    assert page.count("<b>changed</b>") == 1
    assert "<td>train.<wbr>epochs</td><td><code>5</code> <b>changed</b></td>" in page
    assert "small, layer &lt;b&gt;aol · " in page


def test_a_page_says_that_radii_are_local(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "toy-002"))
    page = write_report(folder).read_text()
    assert "<td>pairwise margins of the last layer</td>" in page
    record = (folder / "record.json").read_text()
    (folder / "record.json").write_text(record.replace('"method": "last layer"', '"method": "local"'))
    assert (
        "<td>linear bounds around each sample, or the constants where those say more</td>"
        in write_report(folder).read_text()
    )
