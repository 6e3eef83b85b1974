from __future__ import annotations

import os

import pytest

from lipkit import files


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.bin"
    for content in (b"", b"one", b"\x00" * 100_000):
        files.write_atomic(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch, broken):
    path = tmp_path / "a.bin"
    files.write_atomic(path, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_failed_write_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        files.write_atomic(tmp_path / "no" / "a.bin", b"new")
    assert caught.value.filename == str(tmp_path / "no" / "a.bin")


def test_content_is_synced_before_it_takes_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    files.write_atomic(tmp_path / "a", b"x")
    assert calls == ["fsync", "replace", "fsync"]


def test_mode_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_atomic(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.write_atomic(tmp_path / "none" / "a", b"x")


def test_append_line(tmp_path):
    for line in ("a", "ü", ""):
        files.append_line(tmp_path / "log", line)
    assert (tmp_path / "log").read_text("utf-8") == "a\nü\n\n"
    with pytest.raises(ValueError, match="expected one line"):
        files.append_line(tmp_path / "log", "a\nb")
