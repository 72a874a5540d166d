"""What a report says of its origin: digests where they are cheap, words where they are not; and no home folder in what leaves."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3diag.report import origin
from eagle3diag.report.findings import joined
from eagle3diag.report.layout import View
from eagle3diag.report.private import shared, without_home
from eagle3diag.report.study import Study, study
from eagle3diag.report.views.findings import findings_view
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft
from tests.fixtures_srv import sglang_line, written


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    write_draft(tmp_path / "draft", tiny_tensors(drop=["fc.weight"]), tiny_config(hidden_size=True))
    tiny_target(tmp_path / "target")
    written(tmp_path, [sglang_line(i, 1.5) for i in range(40)])
    monkeypatch.chdir(tmp_path)
    return study("draft", "target", "sglang==0.5.9, vllm==0.33.0", other="draft", log="server.log")


def inputs(view: View) -> list[tuple[str, ...]]:
    return list(next(t for t in view.tables if t.caption == "Inputs").rows)


def test_every_input_has_its_size_and_digest(made: Study) -> None:
    rows = inputs(made.origin({"draft": "draft", "launch": None}))
    assert {r[0] for r in rows} == {"draft", "target", "second draft", "log"}
    for role, file, size, digest in rows:
        raw = Path(file).read_bytes()
        assert (size, digest) == (f"{len(raw):,} bytes", hashlib.sha256(raw).hexdigest()), role
    parameters = next(t for t in made.origin({"draft": "draft", "launch": None}).tables if t.caption == "Parameters")
    assert parameters.rows == (("draft", "draft"), ("launch", "not given"))
    versions = origin.libraries()
    assert all(f"{name} {number}" in made.origin({}).summary for name, number in versions.items())
    assert {"python", "torch", "safetensors"} <= set(versions)


def test_what_costs_too_much_is_said_not_to_be_hashed(made: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "HASHED", 2_000)
    rows = {Path(r[1]).name: r[3] for r in inputs(made.origin({})) if r[0] == "draft"}
    assert rows["model.safetensors"] == "not hashed: above 2.0 kB"
    assert len(rows["config.json"]) == 64
    monkeypatch.setattr(origin, "FILES", 1)
    row = next(r for r in inputs(made.origin({})) if r[0] == "draft")
    assert row[1] == "draft: 2 files"
    assert row[3] == "not hashed: more than 1 files"
    far = replace(made, checkpoint=replace(made.checkpoint, path="hf://org/repo", remote=True))
    assert ("draft", "hf://org/repo", "", "not hashed: not on this machine") in inputs(far.origin({}))


def test_a_finding_of_every_engine_is_said_once_and_causes_come_first(made: Study) -> None:
    found = joined(made.reports)
    assert len(found) < sum(len(r.findings) for r in made.reports)
    ranks = [(j.finding.severity.rank, j.finding.code) for j in found]
    assert [r for r, _ in ranks] == sorted(r for r, _ in ranks)
    told = {j.finding.code: j for j in found}
    assert told["KEY203"].engines == ("sglang 0.5.9",)
    everywhere = [j for j in found if not j.engines]
    assert everywhere
    assert all(all(j.finding.code in {f.code for f in r.findings} for r in made.reports) for j in everywhere)
    view = findings_view(made.reports)
    assert [b.code for b in view.blocks] == [j.finding.code for j in found]
    assert sum(t.caption.startswith("Skipped") for t in view.tables) in (1, 2)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/alice/drafts/x", "~/drafts/x"),
        ("a '/home/alice' b", "a '~' b"),
        ("file:///home/alice/x", "file://~/x"),
        ("/home/alice2/x /home/alice-b/x", "/home/alice2/x /home/alice-b/x"),
        ("/mnt/home/alice/x", "/mnt/home/alice/x"),
        ("nothing", "nothing"),
    ],
)
def test_the_home_folder_becomes_a_tilde(text: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    assert without_home(text) == left
    assert json.loads(json.dumps(shared({text: [text, (1, None, text)]}))) == {left: [left, [1, None, left]]}


def test_without_a_home_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    assert without_home("/x/y") == "/x/y"
