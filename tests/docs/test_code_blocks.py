"""Every Python block of the documents runs, page by page, and prints what stands below it.

The blocks of a page are one program. ``<!-- run`` ... ``-->`` is a block that readers do not see. A ``text`` block
right below a block of Python is what that prints: the words must agree, the numbers nearly (rounding differs between
processors, and training amplifies it).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lipkit.modules import ROWS, guarding

ROOT = Path(__file__).parents[2]
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"])
# Run by a test of its own, which compares the numbers in its comments too.
ELSEWHERE = {"docs/lbdn.md": "tests/test_examples.py"}

_BLOCK = re.compile(
    r"^<!-- run\n(?P<hidden>.*?)^-->$"
    r"|^```python[^\n]*\n(?P<shown>.*?)^```$(?:\s*^```text\n(?P<output>.*?)^```$)?",
    re.S | re.M,
)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")
RELATIVE, ABSOLUTE = 0.25, 0.05


@dataclass(frozen=True)
class Block:
    """A block of Python, the line of its page where it starts, and the output printed below it."""

    code: str
    line: int
    output: str | None


def blocks_of(text: str) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(text):
        name = "hidden" if match["shown"] is None else "shown"
        found.append(Block(match[name], text.count("\n", 0, match.start(name)), match["output"]))
    return found


WITH_CODE = [page for page in PAGES if page not in ELSEWHERE and blocks_of((ROOT / page).read_text())]


def differences(printed: str, stated: str) -> list[str]:
    """The lines that do not agree."""
    ours, theirs = printed.rstrip().splitlines(), stated.rstrip().splitlines()
    if len(ours) != len(theirs):
        return [f"expected {len(theirs)} lines as stated, got {len(ours)}: {printed!r}"]
    found = []
    for a, b in zip(ours, theirs, strict=True):
        first, second = _NUMBER.findall(a), _NUMBER.findall(b)
        words = [re.sub(r"[\s-]+", " ", _NUMBER.sub("#", line)).strip() for line in (a, b)]
        near = len(first) == len(second) and all(
            float(v) == pytest.approx(float(w), rel=RELATIVE, abs=ABSOLUTE if abs(float(w)) > 1e-3 else None)
            for v, w in zip(first, second, strict=True)
        )
        if words[0] != words[1] or not near:
            found.append(f"expected {b!r}, got {a!r}")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("page", WITH_CODE)
def test_a_page_runs_and_prints_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Classes of a page are found again by pickle, and their rules end with the page.
    module = types.ModuleType("page_" + re.sub(r"\W", "_", page))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    threads, state, always = torch.get_num_threads(), torch.get_rng_state(), torch.is_warn_always_enabled()
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # warnings that come once in a process would blame one page only
    torch.manual_seed(0)
    wrong = []
    try:
        for block in blocks_of((ROOT / page).read_text()):
            printed = io.StringIO()
            # Blank lines in front keep the line numbers of the page in tracebacks.
            code = compile("\n" * block.line + block.code, str(ROOT / page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, module.__dict__)
            if block.output is not None:
                wrong += [f"{page}:{block.line}: {text}" for text in differences(printed.getvalue(), block.output)]
    finally:
        torch.set_warn_always(always)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        for table in (ROWS, guarding._METHODS):
            for kind in [kind for kind in table if kind.__module__ == module.__name__]:
                del table[kind]
    assert not wrong, "\n".join(wrong)


def test_blocks_are_found_and_compared() -> None:
    text = "a\n<!-- run\nx = 1\n-->\n\n```python\nprint(x)\n```\n\n```text\n1\n```\n\n```yaml\nx: 1\n```\n"
    assert [(b.code, b.line, b.output) for b in blocks_of(text)] == [("x = 1\n", 2, None), ("print(x)\n", 6, "1\n")]
    assert not differences("gain 1.02 at 36/255\n", "gain 1.03 at 36/255")
    assert differences("gain 1.02", "gain 1.52")
    assert differences("gain 1.02", "loss 1.02")
    assert differences("gain 1e-7", "gain 1e-3")
    assert differences("one\ntwo", "one")
    assert differences("gain inf", "gain 3")


def test_every_page_with_code_is_run() -> None:
    """No block of Python hides in an indented or differently named fence."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        fences = len(re.findall(r"^ *(?:```|~~~) ?(?:py|python|python3|pycon)\b", text, re.M))
        shown = len([m for m in _BLOCK.finditer(text) if m["shown"] is not None])
        assert fences == shown, page
        if page != "docs/design.md":  # a sketch of the interface
            outside = re.sub(r"```.*?```", "", text, flags=re.S)
            indented = re.search(r"^ {4,}.*\blipkit(?:\.\w+)+\(.*", outside, re.M)
            assert indented is None, f"{page}: {indented}"
