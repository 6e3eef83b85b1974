"""Version and date of a release are the same everywhere; its wheel works without the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import lipkit

ROOT = Path(__file__).parents[1]


def test_version_and_date_are_the_same_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.findall(r"^## \[(.*?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = next(entry for entry in newest if entry[0] != "Unreleased")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == lipkit.__version__ == cited["version"] == released[0]
    assert str(cited["date-released"]) == released[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel."""
    pytest.importorskip("hatchling")
    tmp_path = tmp_path_factory.mktemp("built")
    build = "import sys; from hatchling import build; build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert sdist.name == f"lipkit-{lipkit.__version__}.tar.gz"
    with zipfile.ZipFile(wheel) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}
        file.extractall(tmp_path / "site")
    assert tops == {"lipkit", "lipkit_check.py", f"lipkit-{lipkit.__version__}.dist-info"}
    return tmp_path / "site"


@pytest.mark.thorough
def test_the_wheel_holds_every_file_of_the_package(site: Path) -> None:
    package = ROOT / "src/lipkit"
    files = {file.relative_to(package) for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert {file.relative_to(site / "lipkit") for file in (site / "lipkit").rglob("*") if file.is_file()} == files


@pytest.mark.slow  # .ci/run installs and uses the wheel
def test_the_wheel_works_without_the_repository(site: Path, tmp_path: Path) -> None:
    code = (
        "import lipkit, lipkit_check; print(lipkit.__file__); print(lipkit.load('digits-cayley').input_shape);"
        "from lipkit.experiments import load_recipe; print(load_recipe('digits_cayley').model.name)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:2] == [str(site / "lipkit/__init__.py"), "(1, 8, 8)"]
