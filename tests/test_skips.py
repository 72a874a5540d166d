"""The list of allowed skips is held: an unnamed skip fails a strict run, a named one and an ordinary run do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import allowed_skips, is_allowed

HERE = Path(__file__).parent

TESTS = """
import pytest

@pytest.mark.skip(reason="no such machine")
def test_skipped(): pass

def test_runs(): assert True
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "allowed_skips.txt").write_text("# none\n")
    return tmp_path


def test_an_unnamed_skip_fails_a_strict_run(folder: Path) -> None:
    done = run(folder, "--strict-skips")
    assert done.returncode == 1
    assert "test_x.py::test_skipped (Skipped: no such machine)" in done.stdout


def test_an_unnamed_skip_fails_with_workers_too(folder: Path) -> None:
    assert run(folder, "--strict-skips", "-n", "1").returncode == 1


def test_a_named_skip_passes(folder: Path) -> None:
    (folder / "allowed_skips.txt").write_text("test_x.py::test_skipped # the machine is elsewhere\n")
    assert run(folder, "--strict-skips").returncode == 0


def test_without_the_option_nothing_changes(folder: Path) -> None:
    assert run(folder).returncode == 0


def test_every_entry_has_a_reason_and_names_a_file() -> None:
    entries = allowed_skips()
    assert entries
    for test, reason in entries.items():
        assert len(reason) > 20, test
        assert (HERE.parent / test.split("::")[0]).is_file(), test


def test_only_what_is_named_is_allowed() -> None:
    allowed = {"tests/test_a.py::test_x": "r", "tests/test_b.py::*": "r"}
    assert is_allowed("tests/test_a.py::test_x", allowed)
    assert is_allowed("tests/test_b.py::test_y[1]", allowed)
    assert not is_allowed("tests/test_a.py::test_x2", allowed)
