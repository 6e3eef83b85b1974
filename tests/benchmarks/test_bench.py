from __future__ import annotations

import dataclasses
import json

import pytest
from benchmarks.speed import run, table
from benchmarks.speed.__main__ import command, plan_of
from benchmarks.speed.others import COLUMNS, read_others
from benchmarks.speed.run import QUICK, Plan
from click.testing import CliRunner

from lipkit.errors import OptionError

TINY = ["--family", "cayley", "--family", "eco", "--shape", "4@6", "--batch", "2", "--repeats", "2", "--seconds", "0"]


def bench(*arguments):
    return CliRunner().invoke(command, list(arguments))


@pytest.fixture
def measured(tmp_path):
    done = bench(*TINY, "--json", str(tmp_path / "m.json"))
    assert done.exit_code == 0, done.output
    return done, tmp_path / "m.json"


@pytest.mark.thorough
def test_one_tiny_shape(measured, tmp_path):
    done, file = measured
    lines = [line for line in done.stdout.splitlines() if line.startswith("| 4@6")]
    assert len(lines) == 4  # two families, two phases
    assert all("nan" not in line for line in lines)
    heads = [line for line in done.stdout.splitlines() if line.startswith("| shape")]
    assert all(name in heads[0] for name in ("batch", "conv ms", "zero", "lipkit", "textbook", "floor ms", "gap"))
    assert "[1/2" in done.stderr
    found = json.loads(file.read_text())
    assert [(c["shape"], c["batch"], c["phase"]) for c in found["cells"]] == [
        ("4@6", 2, "train"),
        ("4@6", 2, "forward"),
    ]
    for cell in found["cells"]:
        members = {f"{family}:{maker}" for family in ("cayley", "eco") for maker in ("lipkit", "textbook")}
        assert {"conv", "zero", *members} <= set(cell["samples"])
        assert all(len(s) == 2 and min(s) > 0 for s in cell["samples"].values())
    assert set(found["gate"]) == {"cayley", "eco", "cayley textbook", "eco textbook"}
    assert max(found["gate"].values()) <= 1e-5
    assert found["hardware"]["cores"] >= 1
    assert found["rates"]["operations"] > 0 < found["rates"]["bytes"]
    assert found["command"].startswith("python -m benchmarks.speed --family cayley --family eco --shape 4@6")

    document = tmp_path / "page.md"
    document.write_text("before\n<!-- bench cpu layers -->\nold\n<!-- end of cpu layers -->\nafter\n")
    again = bench("--from", str(file), "--doc", str(document))
    assert again.exit_code == 0, again.output
    assert again.stdout == done.stdout  # the tables follow from the samples
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "### eco: exported forward" in text
    bench("--from", str(file), "--doc", str(document))
    assert document.read_text() == text

    document.write_text("no markers\n")
    refused = bench("--from", str(file), "--doc", str(document))
    assert refused.exit_code != 0
    assert "expected the lines <!-- bench cpu layers -->" in str(refused.exception)
    assert document.read_text() == "no markers\n"


@pytest.mark.thorough
def test_all_under_autocast(tmp_path):
    file, document = tmp_path / "m.json", tmp_path / "page.md"
    document.write_text("<!-- bench cpu autocast layers -->\n<!-- end of cpu autocast layers -->\n")
    done = bench(*TINY, "--autocast", "--json", str(file), "--doc", str(document))
    assert done.exit_code == 0, done.output
    assert "all under autocast to bfloat16" in done.stdout
    assert "floor ms" not in done.stdout  # its rates are those of float32
    train, forward = (set(cell["samples"]) for cell in json.loads(file.read_text())["cells"])
    assert "cayley:bfloat16 weights" in forward - train
    assert "| 4@6" in document.read_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 2, "cells": []}'])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    file = tmp_path / "x.json"
    file.write_text(content)
    done = bench("--from", str(file))
    assert done.exit_code == 2
    assert "expected a file written by --json" in done.output


def test_figures_of_others_stand_beside_the_measured_ones(tmp_path):
    file = tmp_path / "others.csv"
    file.write_text("library,family,shape,batch,phase,ratio\nTheirs,cpl,8@4,2,train,2.5\nTheirs,cpl,8@4,2,forward,9\n")
    samples = {"conv": [1.0, 1.0], "cpl:lipkit": [3.0, 3.0]}
    cells = [{"shape": shape, "batch": 2, "phase": "train", "samples": samples} for shape in ("8@4", "8@8")]
    head, _, first, second, mean = table.family_table({"cells": cells}, "cpl", "train", read_others(file)).splitlines()
    assert [cell.strip() for cell in head.split("|")[-3:-1]] == ["lipkit", "Theirs*"]
    assert [cell.strip() for cell in first.split("|")[-3:-1]] == ["3", "2.5"]
    assert [cell.strip() for cell in second.split("|")[-3:-1]] == ["3", "-"]
    assert [cell.strip() for cell in mean.split("|")[-3:-1]] == ["3", ""]
    assert "Theirs" not in table.family_table({"cells": cells}, "cpl", "train")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a,b", "expected the columns library, family, shape, batch, phase, ratio, got a, b"),
        ("", "got none"),
        ("HEAD\nx,cpl,8@4,2,train", "line 2: expected library, family"),
        ("HEAD\nx,cpl,8,2,train,1", "line 2: expected library, family"),
        ("HEAD\nx,cpl,8@4,2,train,1\nx,cpl,8@4,2,training,1", "line 3: expected the phase train or forward"),
        ("HEAD\nx,cpl,8@4,2,train,nan", "a positive ratio, got train, nan"),
        ("HEAD\nx,cpl,8@4,2,train,1\nx,cpl,8->8@4,2,train,2", "expected one ratio of x for cpl, 8@4, 2, train"),
    ],
)
def test_a_file_of_others_that_is_none_is_refused(tmp_path, lines, message):
    file = tmp_path / "others.csv"
    file.write_text(lines.replace("HEAD", ",".join(COLUMNS)))
    with pytest.raises(OptionError) as refused:
        read_others(file)
    assert message in str(refused.value)


def given(**changes):
    nothing = {"families": (), "shapes": (), "batches": (), "parts": (), "repeats": None, "seconds": None}
    return plan_of({**nothing, "device": "cpu", "compiled": False, "autocast": False, "quick": False, **changes})


def test_options_make_the_plan():
    assert given() == dataclasses.replace(Plan(), keep_memory=True)
    assert given(quick=True) == dataclasses.replace(QUICK, keep_memory=True)
    assert given(families=("soc",)).parts == ("layers",)
    assert given(families=("cayley",), parts=("memory",)).parts == ("memory",)
    assert given(quick=True, repeats=7).repeats == 7
    names = [name for _, names in Plan().cells() for name in names]
    assert names.count("eco") == 9
    assert names.count("cayley") == 7
    # The others share seven shapes, of which SLL and CPL have the three with as many outputs as inputs.
    assert sorted(len(names) for _, names in Plan().cells() if names != ["eco"]) == [8] * 4 + [10] * 3
    assert [label for label, *_ in run.memory_jobs(Plan())] == 2 * ["conv", "cayley:lipkit", "cayley:textbook"]


def test_memory_and_networks_have_tables():
    cell = {"shape": "128@16", "batch": 128, "phase": "train"}
    result = {
        "memory": [
            {"label": "conv", **cell, "peak": 9e6, "added": 1e6, "saved": 5e5},
            {"label": "cayley:lipkit", **cell, "peak": 12e6, "added": 3e6, "saved": 25e5},
        ],
        "networks": [{"title": "net", "batch": 128, "samples": {"plain": [1.0, 3.0], "lipkit": [4.0, None]}}],
    }
    memory = [text.strip() for text in table.memory_table(result).splitlines()[-1].split("|")]
    assert memory[1:4] == ["cayley:lipkit", "128@16", "128"]
    assert memory[5:-1] == ["12", "3", "3", "2.5", "5", "4", "missed"]  # added three times, saved five times as much
    networks = [text.strip() for text in table.network_table(result).splitlines()[-1].split("|")]
    assert networks[1:-1] == ["net", "128", "2", "4", "4", "782", "1564"]
