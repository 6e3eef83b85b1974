from __future__ import annotations

import re
import subprocess
import sys
import warnings

import click
import pytest

from lipkit.cli import main as module
from lipkit.cli.main import VERBS, main
from lipkit.errors import RunError


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.thorough
def test_help_imports_neither_torch_nor_pydantic_nor_any_other_heavy_package():
    heavy = {
        "torch",
        "numpy",
        "pydantic",
        "rich",
        "yaml",
        "matplotlib",
        "lightning_fabric",
        "scipy",
        "sklearn",
        "jinja2",
    }
    code = (
        "import sys; from lipkit.cli.main import main; code = main(['--help']);"
        f"found = {heavy!r} & set(sys.modules); print('CODE', code, sorted(found))"
    )
    done = python(code)
    assert "CODE 0 []" in done.stdout, done.stdout + done.stderr
    for verb in VERBS:
        assert verb in done.stdout


@pytest.mark.thorough
def test_the_help_of_a_verb_and_the_lists_are_as_light():
    done = python(
        "import sys; from lipkit.cli.main import main;"
        f"[main([verb, '--help']) for verb in {VERBS}];"
        "[main(['list', kind]) for kind in ('layers', 'models', 'recipes')];"
        "print('HEAVY', sorted({'torch', 'pydantic'} & set(sys.modules)))"
    )
    assert "HEAVY []" in done.stdout
    assert "lipkit list recipes" in done.stdout


def test_without_the_packages_of_the_command_line_the_extra_is_named():
    done = python("import sys; sys.modules['click'] = None; from lipkit.cli import run; print('CODE', run())")
    assert "CODE 2" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "pip install 'lipkit[train]'" in done.stderr


@pytest.mark.thorough
def test_the_command_runs_what_the_entry_point_names():
    done = python("import sys; sys.argv = ['lipkit', 'list', 'recipes']; from lipkit.cli import run; sys.exit(run())")
    assert done.returncode == 0
    assert "digits_cayley" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"Usage: lipkit {verb}" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert "lipkit, version" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'; known: train, certify, "),
        (["tran"], "No such command 'tran', did you mean 'train'"),
        (["tra", "digits_cayley"], "No such command 'tra', did you mean 'train'"),
        (["train", "--epochs", "5"], "No such option '--epochs': a key of the recipe is written train.epochs=5$"),
        (["train", "--lr=0.1", "digits_cayley"], "written train.lr=0.1$"),
        (["train", "--batch-size", "8"], "written train.batch_size=8 or certify.batch_size=8$"),
        (["train", "--data", "npz:a"], "written data=npz:a$"),
        (["train", "--train.lr", "train.seed=1"], "written train.lr=VALUE$"),
        (["train", "--epoch", "-1"], "written train.epochs=VALUE$"),
        (["certify", "RUN", "--eps", "36/255"], "written certify.eps=36/255$"),
        (["recipe", "show", "--lr", "3"], "written train.lr=3$"),
        (["train", "--frobnicate", "3"], "Keys of the recipe are written KEY=VALUE; lipkit recipe show lists them$"),
        (["report", "--epochs", "3"], r"No such option.*--epochs[^=]*$"),
        (
            ["train", "cifar10"],
            "did you mean 'cifar10_cayley', .*'cifar10_lbdn', .* or 'cifar10_wrn28_10_at_lipreg'. lipkit",
        ),
        (["train", "--nope"], "No such option.*--nope"),
        (["train", "--seeds", "0"], "0 is not in the range"),
        (["train", "a", "b"], "expected one recipe and changes KEY=VALUE, got 'a' and 'b'"),
        (["train", "--resume", "x", "train.lr=1"], "--resume takes all from the run"),
        (["train", "nothing"], "unknown recipe 'nothing'"),
        (["train", ""], "unknown recipe ''"),  # of a variable that is not set: not the default
        (["train", "nothing.yaml"], "expected a recipe file, got 'nothing.yaml': No such file"),
        (["train", "train.epoch=1"], "unknown key 'train.epoch', did you mean 'train.epochs'"),
        (["train", "--resume", "/nowhere"], "expected a run folder with recipe.yaml, got /nowhere"),
        (["certify", "/nowhere"], "expected the folder of a run, or MODEL DATA, got '/nowhere', which does not exist"),
        (["certify", "/nowhere", "train.lr=1"], "expected changes certify.KEY=VALUE or data.KEY=VALUE"),
        (["certify", "/nowhere", "npz:/a=b.npz"], "an ONNX or a .pt2 file, got '/nowhere', which is none of them"),
        (["train", "train.epochs=nan", "train.epochs=1"], "each key once, got train.epochs=nan and train.epochs=1$"),
        (["train", "train.devices=1", "--devices", "2"], "each key once, got train.devices=1 and train.devices=2$"),
        (["recipe", "show", "digits_aol", "train.lr=1", "train.lr=1"], "expected each key once"),
        (["certify", "RUN", "digits", "--method", "local", "certify.method=best"], "expected each key once"),
        (["certify", "RUN", "--out", "there", "--seconds", "3"], "certify RUN does not use --out, --seconds$"),
        (["certify", "NET", "p.vnnlib", "certify.eps=1"], "MODEL PROPERTY.vnnlib does not use certify.eps=1$"),
        (["attack", "RUN", "--attack", "cw", "--steps", "3", "--restarts", "2"], "cw does not use --restarts$"),
        (["attack", "RUN", "--attack", "autoattack", "--steps", "3"], "autoattack does not use --steps$"),
        (["attack", "RUN", "--seed", str(2**63)], "is not in the range"),
        (["certify"], "Missing argument 'RUN|MODEL'"),
        (["report", "/nowhere"], "expected a run folder, got /nowhere"),
        (["list", "colours"], "'colours' is not one of 'layers', 'models', 'datasets', 'recipes'"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.strip()
    assert "\n" not in line
    assert line.startswith("lipkit: ")
    assert re.search(message, line), line


def test_a_missing_certificate_is_said_without_the_number_of_an_error(capsys):
    assert main(["check", "/nowhere", "/nowhere", "digits"]) == 2
    assert capsys.readouterr().err == "lipkit: /nowhere: expected a certificate, got: No such file or directory\n"


@pytest.fixture
def train(monkeypatch):
    def put(action):
        monkeypatch.setattr(
            module._Lazy, "get_command", lambda self, ctx, name: click.Command("train", callback=action)
        )

    return put


def test_an_error_of_the_system_and_a_warning_are_a_line_each(train, capsys):
    def act():
        warnings.warn("mind the gap", stacklevel=1)
        open("/nowhere")  # noqa: SIM115

    train(act)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["train"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["lipkit: warning: mind the gap", "lipkit: /nowhere: No such file or directory"]


@pytest.mark.parametrize("arguments", [["--debug", "train"], ["train", "--debug"]])
def test_debug_shows_the_traceback(train, capsys, arguments):
    def fail():
        raise RunError("expected a, got b")

    train(fail)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "lipkit: expected a, got b\n"
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("lipkit: expected a, got b\n")


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (FileNotFoundError(2, "No such file or directory", "/x"), 2, "/x: No such file or directory"),
        (MemoryError(), 2, "MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "not enough memory: DefaultCPUAllocator"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "unexpected ZeroDivisionError: division by zero (--debug shows where)",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_exit_codes(train, capsys, error, code, text):
    def fail():
        raise error

    train(fail)
    assert main(["train"]) == code
    line = capsys.readouterr().err.strip()
    assert text in line
    assert "\n" not in line


@pytest.mark.thorough
def test_output_into_a_closed_pipe_is_no_traceback():
    code = "import sys; from lipkit.cli.main import main; sys.exit(main(['list', 'datasets']))"
    done = subprocess.run(
        f'{sys.executable} -c "{code}" | true', shell=True, capture_output=True, text=True, timeout=300, check=False
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
