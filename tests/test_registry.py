"""The registry: what it refuses, what it skips and why, what a crash becomes; and that the pages are the docstrings."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.report.sample import sample
from eagle3diag.rules import registry
from eagle3diag.rules.case import check, make_case
from eagle3diag.rules.model import Case, Finding, Outcome, Report, Severity, Workings
from eagle3diag.rules.pages import pages, write
from eagle3diag.rules.registry import CATALOGUE, RULES, SECTIONS, finding, load_all, rule, run
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft

ROOT = Path(__file__).resolve().parent.parent
load_all()


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> dict[str, registry.Rule]:
    """An empty registry for one test."""
    mine: dict[str, registry.Rule] = {}
    monkeypatch.setattr(registry, "RULES", mine)
    monkeypatch.setattr(registry, "MODULES", ())
    return mine


def nothing(case: Case) -> Iterator[Finding]:
    """Nothing to say."""
    yield from ()


def test_a_code_is_taken_once(only: dict[str, registry.Rule]) -> None:
    def other(case: Case) -> Iterator[Finding]:
        yield from ()

    rule("CFG101", severity=Severity.ERROR)(nothing)
    with pytest.raises(ValueError, match="CFG101 is registered twice"):
        rule("CFG101", severity=Severity.ERROR)(other)


@pytest.mark.parametrize("code", ["CFG100", f"CFG{CATALOGUE['CFG'][1] + 1}", "ABC101", "KEY301", "CFG", "CFG1O1", ""])
def test_a_code_outside_the_catalogue_is_refused(only: dict[str, registry.Rule], code: str) -> None:
    with pytest.raises(ValueError, match="not in the rule catalogue"):
        rule(code, severity=Severity.INFO)(nothing)
    assert not only


def test_catalogue_is_filled_without_a_gap() -> None:
    codes = [f"{family}{n}" for family, (first, last) in CATALOGUE.items() for n in range(first, last + 1)]
    assert codes == list(load_all())


@pytest.mark.parametrize("code", sorted(RULES))
def test_every_docstring_has_its_sections_in_order(code: str) -> None:
    doc = inspect.cleandoc(RULES[code].look.__doc__ or "")
    assert [line[3:] for line in doc.splitlines() if line.startswith("## ")] == list(SECTIONS)
    summary, *_ = doc.splitlines()
    assert summary == RULES[code].summary
    assert 10 < len(summary) <= 140
    for part in doc.split("\n## ")[1:]:
        assert len(part.split("\n", 1)[1].strip()) > 2, part


def test_missing_evidence_is_a_reason_in_words(draft: Path) -> None:
    why = {o.code: o.why for o in run(make_case(draft, headers_only=True)).outcomes if o.status == "skipped"}
    assert why["CFG112"] == "no target given: pass --target"
    assert why["KEY203"].startswith("no engine given: pass --engine")
    assert why["VAL301"] == "tensor values not read: --headers-only"
    assert why["CFG108"] == "no target given: pass --target or no launch line given: pass --launch or --launch-file"
    assert why["VAL310"] == "tensor values not read: --headers-only; no second draft given to compare with"


def test_a_crash_is_no_pass(only: dict[str, registry.Rule], draft: Path) -> None:
    def broken(case: Case) -> Iterator[Finding]:
        raise RuntimeError("on\npurpose")
        yield

    rule("CFG101", severity=Severity.ERROR)(broken)
    report = run(make_case(draft))
    (outcome,) = report.outcomes
    assert outcome.status == "crashed"
    assert "RuntimeError" in outcome.why
    assert "\n" not in outcome.why
    assert report.skipped == (outcome,)
    assert "CFG101" not in report.to_dict()["passed"]


def test_data_that_cannot_be_read_skips_the_rule(only: dict[str, registry.Rule], draft: Path) -> None:
    def reads(case: Case) -> Iterator[Finding]:
        raise CheckpointError("model.safetensors: ends at 10 of 20 bytes")
        yield

    rule("VAL301", severity=Severity.ERROR)(reads)
    (outcome,) = run(make_case(draft)).outcomes
    assert outcome.status == "skipped"
    assert "ends at 10 of 20 bytes" in outcome.why


def test_default_severity_and_override(only: dict[str, registry.Rule]) -> None:
    rule("CFG103", severity=Severity.WARNING)(nothing)
    assert finding("CFG103", "x").severity is Severity.WARNING
    assert finding("CFG103", "x", severity=Severity.INFO).severity is Severity.INFO


def test_select(draft: Path) -> None:
    case = make_case(draft)
    assert {o.code[:3] for o in run(case, ["key"]).outcomes} == {"KEY"}
    assert [o.code for o in run(case, ["CFG101", "KEY210"]).outcomes] == ["CFG101", "KEY210"]
    with pytest.raises(UsageError, match="no rule 'XYZ'"):
        run(case, ["XYZ"])


def test_outcomes_come_in_the_order_of_codes(draft: Path) -> None:
    codes = [o.code for o in check(draft).outcomes]
    assert codes == sorted(codes, key=lambda c: int(c[3:]))


# ------------------------------------------------------------------ case building
LINE = "python -m sglang.launch_server --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path d"


def test_the_engine_comes_from_the_launch_line_where_none_is_given(draft: Path) -> None:
    case = make_case(draft, launch=LINE)
    assert case.served is not None
    assert case.served.contract.engine == "sglang"
    assert any("newest on record" in n for n in case.notes)


def test_an_explicit_engine_wins(draft: Path) -> None:
    case = make_case(draft, engine="sglang==0.5.9", launch=LINE)
    assert case.served is not None
    assert case.served.contract.version == "0.5.9"
    assert case.notes == ()


def test_an_engine_without_version_is_the_newest_and_says_so(draft: Path) -> None:
    case = make_case(draft, engine="vllm")
    assert case.served is not None
    assert case.served.contract.version == "0.33.0"
    assert any("0.33.0" in n and "newest on record" in n for n in case.notes)
    assert run(case, ["CFG101"]).to_dict()["notes"] == list(case.notes)


def test_a_launch_line_of_another_engine_is_refused(draft: Path) -> None:
    with pytest.raises(UsageError, match=r"vllm.*launch line starts sglang"):
        make_case(draft, engine="vllm", launch=LINE)


@pytest.mark.parametrize(
    ("engine", "says"), [("sglang@/somewhere", "/somewhere: no such file or folder"), ("vllm==0.33.0@/x", "expected ENGINE@PATH")]
)
def test_a_source_that_is_not_there_is_refused_plainly(draft: Path, engine: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_case(draft, engine=engine)


def test_opened_objects_are_taken_as_they_are(draft: Path, tmp_path: Path) -> None:
    first = make_case(draft, target=tiny_target(tmp_path / "target"))
    again = make_case(first.draft, target=first.target)
    assert again.draft is first.draft
    assert again.target is first.target
    assert again.spec.aux == first.spec.aux
    assert replace(again, headers_only=True).has("values") is False


# ------------------------------------------------------------------ pages
def test_pages_in_the_repository_are_the_docstrings() -> None:
    folder = ROOT / "docs" / "rules"
    assert {p.name: p.read_text(encoding="utf-8") for p in folder.glob("*.md")} == pages(), (
        "run python -m eagle3diag.rules.pages docs/rules"
    )


def test_every_code_has_a_page_and_a_line_in_the_index(tmp_path: Path) -> None:
    (tmp_path / "CFG999.md").write_text("gone", encoding="utf-8")
    assert write(tmp_path) == len(RULES) + 1
    assert not (tmp_path / "CFG999.md").exists()
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    for code, one in RULES.items():
        text = (tmp_path / f"{code}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {code}: ")
        assert f"**{one.severity.value}** by default" in text
        assert f"[{code}]({code}.md)" in index


def test_what_rules_work_out_is_held_as_long_as_its_inputs_are_the_same() -> None:
    asked: list[str] = []

    def answer(what: str) -> str:
        asked.append(what)
        return what

    kept, one, two = Workings(), object(), object()
    assert kept.once("a", (one,), lambda: answer("first")) == "first"
    assert kept.once("a", (one,), lambda: answer("again")) == "first"
    assert kept.once("a", (two,), lambda: answer("other")) == "other"
    assert kept.once("b", (two,), lambda: answer("b")) == "b"
    assert asked == ["first", "other", "b"]
    with pytest.raises(ZeroDivisionError):
        kept.once("c", (), lambda: 1 // 0)
    assert kept.once("c", (), lambda: 1) == 1
    assert pickle.loads(pickle.dumps(kept)).once("b", (two,), lambda: "anew") == "anew"


def test_the_rules_hold_nothing_between_cases() -> None:
    """No rule module keeps what a case told it: a list or dict of a module that a check changes would."""
    held = {}
    for module in [m for n, m in sys.modules.items() if n.startswith("eagle3diag.rules.") and not n.endswith(".registry")]:
        held |= {
            f"{module.__name__}.{n}": v for n, v in vars(module).items() if isinstance(v, (list, dict, set)) and not n.startswith("__")
        }
    before = {n: len(v) for n, v in held.items()}
    paths = sample()
    check(paths.draft, target=paths.target, dump=str(Path(paths.dumps, "sample_0.safetensors")), select=("DMP", "AGR701"))
    assert {n: len(v) for n, v in held.items()} == before


def test_the_dump_is_read_and_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3diag.hidden import scan

    registry.load_all()
    asked: list[str] = []
    for code, one in list(registry.RULES.items()):
        if code.startswith("DMP"):
            look = one.look

            def counted(case: Case, code: str = code, look: Any = look) -> Any:
                asked.append(code)
                return look(case)

            monkeypatch.setitem(registry.RULES, code, replace(one, look=counted))
    read, real = [], scan.scan
    monkeypatch.setattr(scan, "scan", lambda dump: (read.append(dump), real(dump))[1])
    paths = sample()
    first = check(paths.draft, target=paths.target, dump=paths.dumps, engine="sglang==0.5.9", select=("DMP", "AGR701"))
    assert sorted(set(asked)) == sorted(asked) != []
    assert len(read) == 1
    case = first.case
    second = check(case.draft, target=case.target, dump=case.dump, engine="vllm", select=("DMP", "AGR701"), like=case)
    assert sorted(set(asked)) == sorted(asked)
    assert len(read) == 1
    assert [o.code for o in second.outcomes] == [o.code for o in first.outcomes]


def test_among_equals_the_cause_comes_before_what_it_leads_to() -> None:
    codes = ("SRV803", "AGR706", "DMP601", "AUX401", "ENG501", "VAL301", "KEY203", "CFG101")
    found = tuple(Finding(code=c, severity=Severity.ERROR, title=c) for c in codes)
    whole = Report(case=None, outcomes=(Outcome(code="CFG101", status="ran", findings=found),))  # type: ignore[arg-type]
    assert [f.code for f in whole.findings] == list(reversed(codes))
    assert {c[:3] for c in RULES} == {c[:3] for c in codes}  # a family that is new has its place too
