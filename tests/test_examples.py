"""Examples in docstrings run, and every public function has one."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import eagle3diag

ROOT = Path(__file__).parent.parent
WITH_EXAMPLES = sorted(p for p in (ROOT / "eagle3diag").rglob("*.py") if ">>> " in p.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda p: p.stem)
def test_examples_of_a_module_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    done = doctest.testmod(import_module(name))
    assert done.attempted
    assert not done.failed


@pytest.mark.parametrize("name", eagle3diag.__all__)
def test_every_public_function_has_an_example(name: str) -> None:
    assert not callable(thing := getattr(eagle3diag, name)) or ">>> " in (thing.__doc__ or "")
