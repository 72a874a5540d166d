"""The command line: streams, exit status, shapes, and that nothing a user or a file does ends in a traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3diag import cli
from eagle3diag.cli import commands
from eagle3diag.cli.parser import NAMES, build_parser
from eagle3diag.rules import registry
from eagle3diag.rules.model import Case, Finding, Severity
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft

ROOT = Path(__file__).parent.parent
OLD, NEW = "sglang==0.5.9", "vllm==0.33.0"


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_target(tmp_path / "target")


class Run:
    """One call of ``main`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *argv: object) -> tuple[int, str, str]:
        status = cli.main([str(a) for a in argv])
        out, err = self.capsys.readouterr()
        assert "Traceback" not in out + err
        return status, out, err

    def json(self, *argv: object) -> Any:
        status, out, err = self(*argv, "--format", "json")
        assert err == ""
        assert status in (0, 1)
        return json.loads(out)

    def refused(self, *argv: object) -> str:
        status, out, err = self(*argv)
        assert status == 2
        assert out == ""
        assert len(err.splitlines()) == 1
        assert err.startswith("eagle3diag: ")
        return err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


# ------------------------------------------------------------------ check


def test_a_sound_draft_is_healthy(run: Run, draft: Path, target: Path) -> None:
    status, out, err = run("check", draft, "--target", target, "--engine", NEW)
    assert (status, err) == (0, "")
    assert "HEALTHY" in out.splitlines()[0] + out.splitlines()[1]


def test_findings_give_status_one_and_the_shape(run: Run, draft: Path) -> None:
    status, out, err = run("check", draft, "--engine", OLD, "--format", "json")
    assert (status, err) == (1, "")
    body = json.loads(out)
    assert (body["schema"], body["verdict"]) == (1, "broken")
    assert "KEY203" in {f["code"] for f in body["findings"]}
    assert {"code", "severity", "title", "evidence", "remedy", "engines"} <= set(body["findings"][0])
    assert {"code", "why"} <= set(body["skipped"][0])
    assert body["draft"]["dialect"]["name"]
    assert body["engine"]["label"] == "sglang 0.5.9"


def test_fail_on_warning_lowers_the_bar(run: Run, tmp_path: Path) -> None:
    short = write_draft(tmp_path / "short", tiny_tensors(), tiny_config(max_position_embeddings=64))
    target = tiny_target(tmp_path / "target")
    given = ("check", short, "--target", target, "--engine", NEW)
    body = run.json(*given)
    assert {f["severity"] for f in body["findings"]} & {"error", "warning"} == {"warning"}
    assert run(*given)[0] == 0
    assert run(*given, "--fail-on", "warning")[0] == 1


def test_headers_only_lists_value_rules_as_skipped(run: Run, draft: Path) -> None:
    body = run.json("check", draft, "--headers-only")
    why = {s["code"]: s["why"] for s in body["skipped"]}
    for code in [c for c in registry.load_all() if c.startswith("VAL")]:
        assert "headers-only" in why[code]
    assert body["headers_only"] is True


def test_a_launch_line_comes_from_the_line_or_a_file(run: Run, draft: Path, tmp_path: Path) -> None:
    line = (
        "python -m sglang.launch_server --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path d "
        "--speculative-num-steps 4 --speculative-eagle-topk 1 --speculative-num-draft-tokens 24"
    )
    file = tmp_path / "launch.sh"
    file.write_text(line.replace(" --", " \\\n  --"))
    for given in (("--launch", line), ("--launch-file", file)):
        body = run.json("check", draft, "--engine", "sglang==0.5.23", *given)
        assert "ENG503" in {f["code"] for f in body["findings"]}
    assert "not allowed with" in run.refused("check", draft, "--launch", line, "--launch-file", file)


@pytest.mark.parametrize("form", ["text", "json", "html", "markdown", "sarif"])
def test_every_format_to_a_file(run: Run, draft: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "result"
    status, said, err = run("check", draft, "--engine", OLD, "--format", form, "-o", out)
    assert (status, said, err) == (1, "", "")
    shown = out.read_text(encoding="utf-8")
    assert "KEY203" in shown
    assert shown.endswith("\n")
    assert "\x1b" not in shown
    assert [p.name for p in tmp_path.iterdir()] == [p.name for p in tmp_path.iterdir() if not p.name.startswith(".eagle3diag")]


def test_a_crashed_rule_prints_the_report_and_gives_status_two(run: Run, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(case: Case) -> Iterator[Finding]:
        raise ZeroDivisionError("a bug")
        yield  # a generator, as every rule is

    rules = dict(registry.load_all())
    rules["CFG102"] = registry.Rule(code="CFG102", severity=Severity.INFO, needs=("draft",), summary="x", look=look)
    monkeypatch.setattr(registry, "RULES", rules)
    status, out, err = run("check", draft, "--format", "json")
    assert status == 2
    assert len(err.splitlines()) == 1
    assert "CFG102" in err
    crashed = [s for s in json.loads(out)["skipped"] if s["status"] == "crashed"]
    assert [c["code"] for c in crashed] == ["CFG102"]
    assert "ZeroDivisionError" in crashed[0]["why"]


def test_sarif_lists_results_and_no_skipped_rule_as_one(run: Run, draft: Path) -> None:
    status, out, err = run("check", draft, "--engine", OLD, "--headers-only", "--format", "sarif")
    assert (status, err) == (1, "")
    body = json.loads(out)
    (one,) = body["runs"]
    assert body["version"] == "2.1.0"
    rules = one["tool"]["driver"]["rules"]
    assert [r["id"] for r in rules] == list(registry.load_all())
    for result in one["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
    assert "KEY203" in {r["ruleId"] for r in one["results"]}
    noted = {n["descriptor"]["id"] for n in one["invocations"][0]["toolExecutionNotifications"]}
    assert noted
    assert not noted & {r["ruleId"] for r in one["results"]}


# ------------------------------------------------------------------ the other commands


def test_inspect(run: Run, draft: Path) -> None:
    body = run.json("inspect", draft)
    assert set(body) >= {"schema", "dialect", "configs", "spec", "tensors"}
    assert body["spec"]["hidden_size"] == {"value": 64, "source": "config: config.json: hidden_size"}
    assert set(body["tensors"][0]) == {"name", "dtype", "shape", "bytes", "file"}
    assert body["configs"] == [{"file": "config.json", "schema": "flat"}]
    assert "hidden_size" in run("inspect", draft)[1]


def test_serve_gives_one_element_an_engine_in_order(run: Run, draft: Path, target: Path) -> None:
    body = run.json("serve", draft, "--target", target, "--engine", OLD, "--engine", NEW)
    assert [(b["engine"], b["version"]) for b in body] == [("sglang", "0.5.9"), ("vllm", "0.33.0")]
    assert body[0]["tensors"]["layers.0.mlp.up_proj.weight"]["fate"] == "dropped"
    assert body[0]["never_filled"]["layers.0.hidden_norm.weight"] == "ones"
    assert body[1]["never_filled"] == {"embed_tokens.weight": "target"}
    assert body[1]["aux"]["prefill_hf"] == [2, 6, 9]
    assert body[1]["refused"] is None
    for key in ("schema", "runner", "fc", "wiring", "fails_later", "algorithm", "ignored"):
        assert key in body[0]
    assert "needs at least one --engine" in run.refused("serve", draft)


def test_diff(run: Run, draft: Path, tmp_path: Path) -> None:
    tensors = tiny_tensors(layer="midlayer")
    tensors["fc.weight"][0, 0] += 1
    other = write_draft(tmp_path / "other", tensors, tiny_config())
    body = run.json("diff", draft, other, "--values")
    assert {r["by"] for r in body["renamed"]} == {"dialect"}
    assert [v["name"] for v in body["values"] if not v["equal"]] == ["fc.weight"]
    assert (body["added"], body["removed"], body["schema"]) == ([], [], 1)
    assert "fc.weight" in run("diff", draft, other, "--values")[1]


def test_convert_writes_beside_and_never_into(run: Run, draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "converted"
    body = run.json("convert", draft, out, "--to", "speculators")
    assert body["schema"] == 1
    assert set(body) >= {"written", "to", "renamed", "translated", "lost"}
    assert (out / "config.json").is_file()
    assert run.json("inspect", out)["algorithm"] == "eagle3"
    run.refused("convert", draft, draft, "--to", "sglang")
    assert "elsewhere" in run.refused("convert", draft, tmp_path / "x", "--to", "elsewhere")


SAMPLE = ROOT / "data_samples" / "smollm2-eagle3"
MEASURED = (SAMPLE / "draft", SAMPLE / "dumps" / "sample_0.safetensors", "--target", SAMPLE / "target")


def test_norms(run: Run) -> None:
    body = run.json("norms", SAMPLE / "dumps")
    assert (body["schema"], body["samples"], body["tokens"]) == (1, 3, 576)
    assert [x["hf"] for x in body["layers"]] == [0, 1, 2, 3, 14, 15, 16, 26, 27, 28, None]
    assert {"hf", "slot", "l2_mean", "rms_mean", "max_abs"} <= set(body["layers"][0])
    assert body["dump"]["format"] == "portable"
    status, out, err = run("norms", SAMPLE / "dumps", "--full")
    assert (status, err) == (0, "")
    assert "the first token is a sink" in " ".join(out.split())
    assert "kurtosis" in out


def test_norms_of_two_dumps(run: Run) -> None:
    body = run.json("norms", SAMPLE / "dumps", SAMPLE / "dumps" / "sample_1.safetensors")
    assert body["comparison"]["verdict"] == "the same states"
    assert (body["comparison"]["samples"], body["samples"]) == (1, 3)
    assert "the same states in both" in " ".join(run("norms", SAMPLE / "dumps", SAMPLE / "dumps")[1].split())


def test_norms_on_several_processes_are_the_same(tmp_path: Path) -> None:
    one, two = (process("norms", SAMPLE / "dumps", "--format", "json", *more, cwd=tmp_path) for more in ((), ("--workers", "2")))
    assert one.stderr == two.stderr == ""
    assert one.stdout == two.stdout


def test_agree(run: Run) -> None:
    body = run.json("agree", *MEASURED, "--steps", "2")
    assert (body["schema"], body["tokens"], body["rows"]) == (1, "forced", body["steps"][0]["n"])
    assert [s["step"] for s in body["steps"]] == [0, 1]
    assert {"joint", "conditional", "marginal", "expected_acceptance", "kl"} <= set(body["steps"][0])
    assert set(body["expected_length"]) == {"1", "2"}
    assert body["expected_length"]["2"] == pytest.approx(1 + body["steps"][0]["joint"] + body["steps"][1]["joint"], abs=1e-5)
    own = run.json("agree", *MEASURED, "--steps", "2", "--tokens", "on-policy")
    assert own["steps"][0]["marginal"] == body["steps"][0]["marginal"]
    assert own["steps"][1]["marginal"] < own["forced"][1]["marginal"]


def test_wirings(run: Run) -> None:
    body = run.json("wirings", *MEASURED, "--steps", "2", "--quick")
    assert body["schema"] == 1
    assert body["baseline"]["wiring"]["aux_layers"] == [2, 15, 27]
    assert {"name", "change", "delta_nll", "z", "agreement", "expected_length", "group"} <= set(body["ranking"][0])
    assert body["found"] is None


def test_serve_with_a_dump_gives_both_acceptances(run: Run) -> None:
    draft, dump, *target = MEASURED
    body = run.json("serve", draft, *target, "--dump", dump, "--engine", OLD, "--engine", NEW, "--engine", "sglang==0.4.6")
    lost, sound, refused = (b["acceptance"] for b in body)
    assert lost["trained"]["expected_length"]["4"] - lost["served"]["expected_length"]["4"] > 0.2
    assert lost["significant"]
    assert sound["served"]["expected_length"] == sound["trained"]["expected_length"]
    assert refused["served"] is None
    assert "refuses" in refused["why"]
    assert "acceptance" not in run.json("serve", draft, *target, "--engine", NEW)[0]


def test_capture_refuses_before_it_loads_anything(run: Run, target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Say hello.\n")
    given = ("capture", target, "--text", prompts)
    assert "-o" in run.refused(*given)
    assert "--layers 2;15" in run.refused(*given, "-o", tmp_path / "out", "--layers", "2;15")
    assert "checkpoint folder" in run.refused(*given, "-o", target / "out")
    assert "give one of them" in run.refused(*given, "-o", tmp_path / "out", "--no-decode", "--decode-output", tmp_path / "two")
    assert "nowhere" in run.refused("capture", target, "--text", "nowhere", "-o", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.txt", "target"]


def test_rules_lists_and_explains(run: Run) -> None:
    body = run.json("rules")
    assert [r["code"] for r in body["rules"]] == list(registry.load_all())
    assert run.json("rules", "key203")["rules"][0]["page"].count("## ") >= 4
    assert "KEY203" in run("rules", "KEY")[1]
    for form in ("text", "markdown"):
        page = run("rules", "KEY203", "--format", form)[1]
        assert "How to fix it: " in page
        assert "\\n" not in page
        assert "# What" not in page
    assert "no rule XYZ" in run.refused("rules", "XYZ")


def test_demo_finds_every_planted_fault(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    body = run.json("demo")
    assert [s["found"] for s in body["stories"]] == [True] * 5
    assert body["stories"][0]["verdict"] == "healthy"
    assert "5 of 5 stories come out as they should" in run("demo")[1]


def test_a_command_alone_has_the_options_it_has_among_all() -> None:
    whole = build_parser()
    (commands,) = (a.choices for a in whole._actions if isinstance(a.choices, dict))
    assert tuple(commands) == NAMES
    for name, one in commands.items():
        (alone,) = (a.choices for a in build_parser(name)._actions if isinstance(a.choices, dict))
        assert list(alone) == [name]
        assert alone[name].format_help() == one.format_help()


def test_version_and_help(run: Run) -> None:
    from eagle3diag import __version__

    assert run("--version")[1] == f"eagle3diag {__version__}\n"
    status, out, _ = run("--help")
    assert status == 0
    known = "check inspect serve diff convert rules demo report notebook norms agree wirings capture"
    for name in known.split():
        assert name in out
    assert "exit status" in run("check", "--help")[1]


# ------------------------------------------------------------------ what cannot be answered


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "no command"),
        (("chekc", "x"), "invalid choice"),
        (("check",), "DRAFT"),
        (("check", "x", "--eng", "sglang"), "--eng"),
        (("check", "x", "--baseline", "90"), "give --log too"),
        (("log", "nowhere"), "nowhere: no such log file"),
        (("log", ""), "the path of the log is empty"),
        (("norms", ""), "the path of the dump is empty"),
        (("log", "x", "--baseline", "0"), "no throughput"),
        (("check", "x", "--engine", "a", "--engine", "b"), "given twice"),
        (("check", "x", "--format", "yaml"), "yaml"),
        (("check", "x", "--fail-on", "info"), "info"),
        (("check", "no\x1b[31m/such\u202e/place"), "no"),
        (("inspect", "nowhere"), "nowhere"),
        (("convert", "x", "y"), "--to"),
        (("notebook", "nothing"), "no notebook nothing: there are 00_start_here, 01_checkpoint"),
        (("notebook", "01_checkpoint", "-p", "draft", "a", "-p", "draft", "b"), "given twice"),
        (("rules", "--fail-on", "error"), "--fail-on"),
        (("norms", "nowhere"), "nowhere: no such file"),
        (("norms", "x", "--workers", "0"), "no whole number from 1"),
        (("agree", "x"), "DUMP"),
        (("agree", "x", "y", "--steps", "0"), "no whole number from 1 to 32"),
        (("agree", "x", "y", "--tokens", "free"), "free"),
        (("wirings", "x", "y", "--observed", "0.4"), "no acceptance length"),
        (("wirings", "nowhere", "y"), "nowhere"),
        (("capture", "x", "-o", "y"), "--text"),
    ],
)
def test_one_line_and_status_two(run: Run, argv: tuple[str, ...], says: str) -> None:
    said = run.refused(*argv)
    assert says in said
    assert "\x1b" not in said
    assert "\u202e" not in said


def test_engines_nobody_knows(run: Run, draft: Path) -> None:
    run.refused("check", draft, "--engine", "tensorrt==1.0")
    run.refused("check", draft, "--engine", "sglang==")
    run.refused("check", draft, "--engine", "sglang@/some/where")
    run.refused("serve", draft, "--engine", "")


def test_outputs_appear_whole_or_not_at_all(run: Run, draft: Path, tmp_path: Path) -> None:
    before = sorted(p.name for p in draft.iterdir())
    assert "checkpoint folder" in run.refused("check", draft, "-o", draft / "report.txt")
    assert "checkpoint folder" in run.refused("report", draft, "-o", draft / "report.html")
    assert "does not exist" in run.refused("check", draft, "-o", tmp_path / "no" / "report.txt")
    assert sorted(p.name for p in draft.iterdir()) == before
    kept = tmp_path / "kept.txt"
    kept.write_text("before")
    run.refused("check", tmp_path / "nowhere", "-o", kept)
    assert kept.read_text() == "before"


def test_an_output_never_takes_the_place_of_an_input(run: Run, draft: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in draft.iterdir()}
    weights, link, log = draft / "model.safetensors", tmp_path / "link.md", tmp_path / "server.log"
    link.symlink_to(weights)
    log.write_text("a log")
    for out in (draft / "config.json", draft / "new.md"):
        assert "checkpoint folder" in run.refused("check", weights, "-o", out)
    for out in (weights, link):
        assert "is an input" in run.refused("check", weights, "-o", out)
    assert "checkpoint folder" in run.refused("notebook", "report", "-p", "draft", draft, "-o", draft / "page.html")
    assert "is an input" in run.refused("check", draft, "--log", log, "-o", log)
    assert "is an input" in run.refused("log", log, "-o", log)
    assert {p: p.read_bytes() for p in draft.iterdir()} == before
    assert log.read_text() == "a log"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system here")
def test_an_output_never_takes_the_place_of_a_device(run: Run, draft: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is no ordinary file" in run.refused("check", draft, "-o", pipe)
    assert pipe.is_fifo()


def test_a_link_is_written_through(run: Run, draft: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.md"
    link.symlink_to(tmp_path / "real.md")
    assert run("check", draft, "-o", link)[0] == 0
    assert link.is_symlink()
    assert "HEALTHY" in (tmp_path / "real.md").read_text(encoding="utf-8")


def test_a_full_disk_is_told_with_the_place(run: Run, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "out.md was not written: No space left on device; choose another place" in run.refused("check", draft, "-o", tmp_path / "out.md")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["draft"]


def test_a_launch_file_of_absurd_length(run: Run, draft: Path, tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_bytes(b"x" * (commands.MAX_LAUNCH_BYTES + 1))
    assert "no launch line is that long" in run.refused("check", draft, "--launch-file", file)
    assert "nowhere.sh: No such file" in run.refused("check", draft, "--launch-file", "nowhere.sh")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "out of memory"),
        (RecursionError(), "nested too deeply"),
        (KeyboardInterrupt(), "stopped"),
        (PermissionError(13, "Permission denied", "file\n\x1b[2J"), "Permission denied"),
        (ValueError("a bug\nin two lines"), "a fault in eagle3diag"),
    ],
)
def test_whatever_happens_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, says: str) -> None:
    def fail(a: object) -> int:
        raise error

    monkeypatch.delenv("EAGLE3DIAG_TRACEBACK", raising=False)
    monkeypatch.setattr(commands, "rules", fail)
    said = run.refused("rules")
    assert says in said
    assert "\x1b" not in said


# ------------------------------------------------------------------ as a process


def process(*argv: object, **kw: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "eagle3diag", *map(str, argv)], capture_output=True, text=True, env=env, timeout=120, **kw)


def test_the_process_hands_its_status_on(draft: Path, tmp_path: Path) -> None:
    assert process("check", draft, "--engine", OLD, "--headers-only", cwd=tmp_path).returncode == 1
    assert process("check", tmp_path / "nowhere").returncode == 2


def test_a_reader_that_goes_away_is_no_error(draft: Path) -> None:
    shell = shutil.which("bash")
    assert shell is not None
    command = f"set -o pipefail; {sys.executable} -m eagle3diag rules --format json | head -c 10"
    done = subprocess.run([shell, "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.returncode == 0
    assert done.stderr == ""


def test_headers_only_imports_nothing_heavy(draft: Path, target: Path) -> None:
    code = (
        "import sys; from eagle3diag.cli import main;"
        f"main(['check', {str(draft)!r}, '--headers-only', '--target', {str(target)!r}, '--engine', 'sglang==0.5.9']);"
        "heavy = {'torch', 'numpy', 'matplotlib', 'IPython', 'papermill', 'pandas', 'jinja2', 'safetensors'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert done.stderr == "[]\n"


def test_stdout_that_cannot_spell_a_sign_is_no_error(draft: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle3diag", "check", str(draft), "--engine", OLD, "--headers-only"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        timeout=60,
    )
    assert done.returncode == 1
    assert b"KEY203" in done.stdout
    assert done.stderr == b""


def test_a_folder_without_weights_is_no_healthy_draft(tmp_path):
    (tmp_path / "config.json").write_text((SAMPLE / "draft" / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "eagle3diag", "check", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no draft to judge" in done.stderr


def test_a_version_that_is_not_on_record_is_named_beside_what_stands_in(run: Run, draft: Path) -> None:
    status, out, _ = run("serve", draft, "--engine", "sglang==9.9", "--engine", OLD)
    assert status == 0
    assert out.count("sglang 9.9 is not on record: served as 0.5.23, the nearest recorded release") == 1
    assert out.count("not on record") == 1


def test_the_notebooks_are_listed_without_the_notebook_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nbformat", "nbconvert", "papermill"):
        monkeypatch.setitem(sys.modules, name, None)
    status, out, _ = run("notebook")
    assert status == 0
    assert "00_start_here" in out
    status, _, err = run("notebook", "01_checkpoint")
    assert status == 2
    assert "python -m pip install 'eagle3diag[notebook]'" in err
    assert err.count("\n") == 1
