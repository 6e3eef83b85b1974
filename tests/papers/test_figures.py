"""Pictures of tables: points lie where the records and the papers have them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from papers.__main__ import main
from papers.figures import draw, panels
from papers.table_runs import TableRecord, measurement_record
from papers.tables import TABLES, Picture, Reference, Row, Table

from papers import tables


def found(*figures: dict[str, float]) -> list[TableRecord]:
    return [TableRecord("full", seed, measurement_record("r", "m", {}, seed, f, 1.0)) for seed, f in enumerate(figures)]


def table(picture: Picture, **rows: tuple[float | None, ...]) -> Table:
    return Table(
        source="Paper, figure 1",
        description="a test",
        columns={"clean": "clean", "norm": "norm"},
        figure=picture,
        rows=tuple(Row(label=label.replace("_", " "), measure="truncation", published=p) for label, p in rows.items()),
    )


def test_a_row_is_a_point_at_its_mean_and_at_the_papers() -> None:
    picture = Picture(rows="(?P<panel>.) (?P<series>.) (?P<x>[0-9]+)", y=("clean", "norm"), y_labels={"norm": "N"})
    made = table(picture, a_u_2=(50.0, 3.0), a_u_1=(None, None), a_v_1=(), b_u_1=(), other=())
    runs = {
        "a u 2": found({"clean": 0.25, "norm": 1.0}, {"clean": 0.75, "norm": 3.0}),
        "a u 1": found({"clean": 0.125}),
    }
    got = panels(made, runs)
    assert [(p.title, p.y_label, p.per_cent) for p in got] == [
        ("a", "clean", (False, True)), ("a", "N", (False, False)),
    ]  # fmt: skip
    assert [p.title for p in panels(made.model_copy(update={"rows": made.rows[1:]}), {})] == ["a", "a", "b", "b"]
    clean, norm = got[0].curves, got[1].curves
    assert [c.name for c in clean] == ["u", "v"]
    assert (clean[0].ours, clean[0].published) == ([(1, 0.125), (2, 0.5)], [(2, 0.5)])
    assert (norm[0].ours, norm[0].published) == ([(2, 2.0)], [(2, 3.0)])
    assert not clean[1].ours


def test_x_may_be_a_figure_and_a_row_may_be_a_curve() -> None:
    points = table(Picture(x="norm", y=("clean",), points=True), a=(50.0, 3.0))
    curve = panels(points, {"a": found({"clean": 0.5, "norm": 2.0})})[0].curves[0]
    assert (curve.ours, curve.published, curve.joined) == ([(2.0, 0.5)], [(3.0, 0.5)], False)
    curves = table(Picture(y=("gap(*)",)), a=())
    curve = panels(curves, {"a": found({"gap(10)": 1.0, "gap(5)": 2.0, "gaps(1)": 0.0, "ms": 4.0})})[0].curves[0]
    assert curve.ours == [(5, 2.0), (10, 1.0)]


@pytest.mark.thorough
def test_what_a_paper_prints_beside_a_curve_is_drawn() -> None:
    beside = (Reference(figure="clean", x=9), Reference(figure="norm", through=(1, 2)), Reference(figure="norm"))
    made = table(Picture(y=("gap(*)",), beside={"gap(*)": beside}), a=(50.0, 3.0), b=(None, None))
    runs = {"a": found({"gap(5)": 2.0, "clean": 0.25, "norm": 1.0})}
    a, b = panels(made, runs)[0].curves
    assert (a.ours, a.published, list(a.lines)) == (
        [(5, 2.0), (9, 0.25)], [(9, 0.5)], [((1, 2), 3.0), ((0, 3.0), 0.0)],
    )  # fmt: skip
    assert (list(b.ours), list(b.published), list(b.lines)) == ([], [], [])
    text = draw("t", made, runs)
    assert text.count("stroke-dasharray") == 2
    assert "(hollow and dashed: the paper's)" in " ".join(re.findall(r">([^<>]+)</text>", text))


@pytest.mark.parametrize(
    ("name", "points", "slopes", "levels"),
    [
        ("lbdn_figure3", [], [4.8, 6.5, 6.8, 9.4], []),
        ("lbdn_figure4", [0.772, 0.741, 0.999], [], [0.991] * 3),
    ],
)
def test_figures_3_and_4_of_lbdn_have_the_printed_slopes_and_levels(name, points, slopes, levels) -> None:
    curves = panels(TABLES[name], {})[0].curves
    lines = [line for c in curves for line in c.lines]
    assert [y for c in curves for _, y in c.published] == pytest.approx(points)
    assert [slope for _, slope in lines if slope] == slopes
    assert [point[1] for point, slope in lines if not slope] == pytest.approx(levels)


@pytest.mark.thorough
def test_contours_go_around_the_largest_value() -> None:
    figures = {f"z({i},{j})": float(9 - (i - 1) ** 2 - (j - 2) ** 2) for i in range(4) for j in range(4)}
    made = table(Picture(rows="(?P<panel>.*)", y=("z(*,*)",)), a=())
    (panel,) = panels(made, {"a": found({**figures, "clean": 1.0})})
    assert len(panel.curves[0].ours) == 16
    assert max(panel.curves[0].ours, key=lambda point: point[2]) == (1, 2, 9)
    assert "#c2410c" in draw("t", made, {"a": found(figures)})


@pytest.mark.thorough
def test_a_picture_is_a_file_with_every_point_once(monkeypatch, tmp_path, capsys) -> None:
    picture = Picture(rows="(?P<series>.*) (?P<x>[0-9]+)", y=("clean",), log_x=True)
    made = table(picture, u_1=(50.0, None), u_10=(), v_10=(25.0, None))
    text = draw("t", made, {"u 1": found({"clean": 0.5}), "u 10": found({"clean": 0.25})})
    root = ElementTree.fromstring(text)
    uses = [e for e in root.iter("{http://www.w3.org/2000/svg}use") if "marker" not in e.attrib]
    colours = {m for e in uses for m in re.findall(r"#[0-9a-f]{6}", e.get("style", ""))}
    assert "var(" not in text
    assert "(hollow: the paper's)" in " ".join(re.findall(r">([^<>]+)</text>", text))
    assert {"#2563eb", "#c2410c"} <= colours  # u and v
    marks = [e.get("style", "") for e in uses if re.search("#2563eb|#c2410c", e.get("style", ""))]
    assert sum("fill-opacity: 0" in m or "fill: none" in m for m in marks) == 2 + 1  # in the axes, and v in the legend
    assert len(marks) == 2 + 2 + 1 + 1
    assert "prints no points" in draw("t", table(picture, u_1=()), {"u 1": found({"clean": 0.5})})

    monkeypatch.setitem(tables.TABLES, "t", made)
    assert main(["t", "--records", str(tmp_path), "--figures", str(tmp_path / "f")]) == 0
    assert f"figure: {tmp_path / 'f' / 't.svg'}" in capsys.readouterr().out
    assert ElementTree.parse(tmp_path / "f" / "t.svg").getroot().tag.endswith("svg")
    assert main(["t", "--records", str(tmp_path)]) == 0
    assert "figure:" not in capsys.readouterr().out
    assert main(["t", "--out", str(tmp_path / "runs"), "--print"]) == 0
    assert not (tmp_path / "runs" / "t" / "t.svg").exists()  # nothing was made


# Points of the papers that are drawn, counted in the papers; slopes and levels of LBDN's figures 3 and 4 are lines.
PRINTED = {
    "cayley_figure1": 16,
    "cayley_figure2": 5,
    "cayley_figure5": 2,
    "lbdn_2": 40,
    "lbdn_figure4": 3,
    "lbdn_gamma": 4,
    "lipbound_figure2": 2,
}


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.figure])
def test_every_packaged_picture_has_rows_and_figures_of_its_table(name: str) -> None:
    made = TABLES[name]
    assert made.figure is not None
    labels = [row.label for row in made.rows if re.fullmatch(made.figure.rows, row.label)]
    assert labels
    measured = {y for y in made.figure.y if not y.endswith("*)")}
    beside = {one.figure for ones in made.figure.beside.values() for one in ones}
    assert beside <= {*made.columns.values()}
    assert {*made.figure.beside} <= {*made.figure.y}
    assert {*measured, *filter(None, [made.figure.x])} <= {*made.columns.values(), *made.also}
    assert sum(len(c.published) for p in panels(made, {}) for c in p.curves) == PRINTED.get(name, 0)
