"""Freed memory that stays: seen in the page faults of a fresh process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import resource
from lipkit.memory import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
def allocate():
    bytearray(50_000_000)
allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_memory_is_mapped_once() -> None:
    faults = {}
    for keep in (False, True):
        code = [sys.executable, "-c", CODE.format(keep=keep)]
        faults[keep] = int(subprocess.run(code, capture_output=True, check=True).stdout)
    assert faults[False] > 10_000  # ten times 50 MB in pages of 4 KiB are 122,000; huge pages would be fewer
    assert faults[True] < 1000
