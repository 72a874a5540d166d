"""Rendering: golden text, escaping in every medium, determinism, pictures with words. ``UPDATE_GOLDEN=1`` writes the golden files anew."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eagle3diag.checkpoint.model import Checkpoint
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.checkpoint.target import open_target
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.engines.contract import load_contract
from eagle3diag.engines.model import AuxCapture, Contract, Fact, FcState, Refusal, ServedDraft, TensorFate
from eagle3diag.errors import UsageError
from eagle3diag.report import figures, html, jsonout, markdown, text, views
from eagle3diag.report.figures import served as figures_served
from eagle3diag.report.layout import Table, View, size, table, value_text
from eagle3diag.report.sample import planted, sample, variant
from eagle3diag.rules.model import Case, Finding, Outcome, Report, Severity
from eagle3diag.weights.diff import diff
from eagle3diag.weights.stats import tensor_stats
from tests.factory import tiny_config, tiny_target, tiny_tensors, write_draft

GOLDEN = Path(__file__).parent / "golden"
EVIL = "<img src=x onerror=alert(1)>\x1b[31m\u202egnp.exe`|*[x](http://e.example)"


def served(**change: Any) -> ServedDraft:
    """What an old SGLang makes of a draft whose layer it does not map."""
    names = ["layers.0.hidden_norm.weight", "layers.0.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight"]
    kept = {n: TensorFate("loaded", f"model.{n}") for n in ("fc.weight", "norm.weight")}
    fields: dict[str, Any] = {
        "contract": Contract(
            engine="sglang",
            version="0.5.9",
            asked="0.5.9",
            runner=None,
            draft_class="llama",
            facts={"embed": Fact("target", "a.py:1", "run")},
        ),
        "refused": None,
        "tensors": {n: TensorFate("dropped", "", "no parameter of that name") for n in names} | kept,
        "never_filled": {n: "ones" if "norm" in n else "uninitialised" for n in names},
        "fc": FcState(True, 192, 64),
        "aux": AuxCapture((1, 5, 8), "config.json: eagle_config", (2, 6, 9), (2, 6, 8), shift=1, hook=True),
        "wiring": Wiring(aux_layers=(2, 6, 9)),
        "ignored": {"norm_before_residual": "never read"},
    }
    return ServedDraft(**{**fields, **change})


@pytest.fixture
def draft(tmp_path: Path) -> Checkpoint:
    folder = write_draft(tmp_path / "draft", tiny_tensors(), tiny_config())
    return replace(open_checkpoint(str(folder)), path="drafts/tiny")


@pytest.fixture
def report(draft: Checkpoint) -> Report:
    found = Finding(
        code="KEY203",
        severity=Severity.ERROR,
        title="10 tensors of layers.0.* are dropped in silence",
        evidence={"tensors": 10, "prefix": "layers.0.", "share": 0.25, "names": ["a", "b"]},
        remedy="Rename the layer.",
        engines=("sglang 0.5.9",),
        where="layers.0",
    )
    noted = Finding(code="AUX402", severity=Severity.INFO, title="ids are not read here")
    likely = Finding(code="CFG103", severity=Severity.WARNING, title="two configs disagree", evidence={"file": "config_speculators.json"})
    case = Case(draft=draft, spec=draft_spec(draft), served=served(), headers_only=True, notes=("sglang 0.5.9 is the newest on record",))
    outcomes = (
        Outcome(code="CFG101", status="ran"),
        Outcome(code="CFG103", status="ran", findings=(likely,)),
        Outcome(code="KEY203", status="ran", findings=(found,)),
        Outcome(code="VAL301", status="skipped", why="tensor values not read: --headers-only"),
        Outcome(code="VAL302", status="skipped", why="tensor values not read: --headers-only"),
        Outcome(code="AUX402", status="ran", findings=(noted,)),
        Outcome(code="AUX404", status="skipped", why="no target given: pass --target"),
    )
    return Report(case=case, outcomes=outcomes)


def golden(name: str, shown: str) -> None:
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(shown + "\n", encoding="utf-8")
    assert shown + "\n" == file.read_text(encoding="utf-8")


def test_report_text(report: Report) -> None:
    golden("report.txt", text.render(report))


def test_report_markdown(report: Report) -> None:
    golden("report.md", markdown.render(report))


def test_served_text() -> None:
    golden("served.txt", text.render(served()))


def test_refused_text() -> None:
    refused = Refusal("load_weights", "KeyError: 'layers.0.mlp.gate_up_proj.weight'", "the loader knows no such parameter")
    golden("refused.txt", text.render(served(refused=refused)))


def test_diff_text(draft: Checkpoint) -> None:
    golden("diff.txt", text.render(diff(draft, variant(draft), values=True)))


def test_report_json_has_the_agreed_shape(report: Report) -> None:
    body = json.loads(jsonout.dumps(jsonout.checked(report)))
    assert list(body)[:3] == ["schema", "verdict", "draft"]
    assert body["schema"] == 1
    assert body["verdict"] == "broken"
    assert [f["code"] for f in body["findings"]] == ["KEY203", "CFG103", "AUX402"]
    assert set(body["findings"][0]) >= {"code", "severity", "title", "evidence", "remedy", "engines"}
    assert body["skipped"][0] == {"code": "VAL301", "why": "tensor values not read: --headers-only", "status": "skipped"}
    assert body["passed"] == ["CFG101"]
    assert body["engine"]["label"] == "sglang 0.5.9"
    assert body["notes"] == ["sglang 0.5.9 is the newest on record"]


def test_served_json_has_the_agreed_shape() -> None:
    body = json.loads(jsonout.dumps([jsonout.served(served())]))[0]
    assert (body["schema"], body["engine"], body["version"], body["runner"], body["refused"]) == (1, "sglang", "0.5.9", None, None)
    assert body["tensors"]["layers.0.mlp.up_proj.weight"] == {"fate": "dropped", "as": "", "why": "no parameter of that name"}
    assert body["never_filled"]["layers.0.hidden_norm.weight"] == "ones"
    assert body["fc"] == {"runs": True, "width_in": 192, "bypassed_at_width": 64}
    assert (body["aux"]["ids"], body["aux"]["prefill_hf"], body["aux"]["verify_hf"]) == ([1, 5, 8], [2, 6, 9], [2, 6, 8])
    assert body["wiring"]["aux_layers"] == [2, 6, 9]
    assert body["fails_later"] == []


def test_json_has_no_numbers_that_json_lacks() -> None:
    import torch

    given = {
        "nan": float("nan"),
        "inf": float("-inf"),
        "tensor": torch.tensor(3),
        "set": {"b", "a"},
        "severity": Severity.ERROR,
        1: (True, None),
    }
    said = json.loads(jsonout.dumps(given), parse_constant=lambda c: pytest.fail(f"{c} in the output"))
    assert said == {"nan": "nan", "inf": "-inf", "tensor": 3, "set": ["a", "b"], "severity": "error", "1": [True, None]}


def test_a_crash_is_never_healthy(report: Report) -> None:
    crashed = replace(report, outcomes=(Outcome(code="CFG101", status="crashed", why="ZeroDivisionError: x"),))
    shown = text.render(crashed)
    assert "incomplete, 1 rule crashed" in shown
    assert "ZeroDivisionError" in shown
    assert views.view(crashed).status == "error"


# ------------------------------------------------------------------ what comes from a file stays text


class Tags(HTMLParser):
    """Collects tags and attribute names."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.fixture
def evil(report: Report) -> Report:
    bad = Finding(code="KEY202", severity=Severity.ERROR, title=EVIL, evidence={EVIL: EVIL}, remedy=EVIL, engines=(EVIL,), where=EVIL)
    case = replace(report.case, draft=replace(report.case.draft, path=EVIL), notes=(EVIL,))
    return Report(
        case=case, outcomes=(Outcome(code="KEY202", status="ran", findings=(bad,)), Outcome(code="KEY203", status="skipped", why=EVIL))
    )


def test_nothing_from_a_file_is_html(evil: Report) -> None:
    for shown in (html.render(evil, EVIL), views.html(evil), html.render(served(tensors={EVIL: TensorFate("dropped", EVIL, EVIL)}))):
        seen = Tags()
        seen.feed(shown)
        assert "img" not in seen.tags
        assert not seen.attributes & {"onerror", "src", "style"}
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "&lt;img" in shown


def test_nothing_from_a_file_drives_a_terminal(evil: Report) -> None:
    for shown in (text.render(evil), repr(evil), markdown.render(evil), jsonout.dumps(jsonout.checked(evil))):
        assert not any(ord(c) < 32 and c != "\n" for c in shown)
        assert "\u202e" not in shown


def test_nothing_from_a_file_is_markdown(evil: Report) -> None:
    shown = markdown.render(evil)
    assert "<img" not in shown
    assert "](http" not in shown
    assert "\\`" in shown


def test_a_picture_takes_names_as_text() -> None:
    strange = replace(served().contract, asked="$\\frac{1}{0$ \x1b[1m")
    assert figures.png(figures.plot(served(contract=strange))).startswith(b"\x89PNG")


# ------------------------------------------------------------------ every result shows itself


def results(draft: Checkpoint, target: Path) -> list[Any]:
    changed = diff(draft, variant(draft), values=True)
    return [
        draft,
        draft_spec(draft),
        open_target(str(target)),
        load_contract("vllm", "0.33.0", runner="v2"),
        served(),
        changed,
        changed.values[0],
        tensor_stats(draft, "fc.weight"),
    ]


def test_every_result_has_repr_html_and_frame(draft: Checkpoint, report: Report, tmp_path: Path) -> None:
    for result in [*results(draft, tiny_target(tmp_path / "target")), report]:
        shown = repr(result)
        assert 1 < len(shown.splitlines()) <= views.MAX_LINES, type(result)
        assert not shown.startswith("<"), type(result)
        page = result._repr_html_()
        assert page is not None
        assert "<table>" in page
        assert '<th scope="col">' in page
        assert len(page) < 64_000
        assert len(result.to_frame()) > 0
        assert json.loads(jsonout.dumps(result.to_dict()))


def test_unknown_results_are_refused() -> None:
    with pytest.raises(UsageError, match="a dict has no view"):
        views.view({})
    with pytest.raises(UsageError, match="a dict has no picture"):
        figures.plot({})


def test_long_tables_are_cut_with_a_count() -> None:
    one = table("t", ("n",), ((k,) for k in range(352)), kinds=["unchanged"] * 352)
    assert len(one.rows) == 40
    assert one.more == "312 more, all unchanged"
    view = View(title="x", summary="y", tables=(one,))
    assert "… 312 more, all unchanged" in text.of(view)
    assert "… 312 more, all unchanged" in html.fragment(view)
    assert "… 312 more, all unchanged" in markdown.of(view)


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert text.colour_wanted(Terminal())  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not text.colour_wanted(Terminal())  # type: ignore[arg-type]
    assert "\x1b[1;31m" in text.render(served(), colour=True)
    assert "\x1b" not in text.render(served())


def test_signs_say_the_same_without_colour(report: Report) -> None:
    for shown in (text.render(report), html.render(report), markdown.render(report)):
        assert "✖ ERROR" in shown
        assert "▲ WARNING" in shown


def test_a_page_loads_nothing(report: Report) -> None:
    page = html.render(report)
    assert "<script" not in page
    assert "url(" not in page
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page
    assert page == html.render(report)


# ------------------------------------------------------------------ pictures


def test_pictures_are_deterministic_and_have_words(draft: Checkpoint) -> None:
    for result in (served(), served(refused=Refusal("construct", "KeyError")), diff(draft, variant(draft), values=True)):
        assert figures.png(figures.plot(result)) == figures.png(result.plot())
        assert len(figures.alt(result)) > 40
        assert figures.caption(result).endswith(".")


def test_the_picture_marks_what_is_lost() -> None:
    states = {p.name: (p.state, p.note) for p in figures_served.components(served())}
    assert states["layer 0 attention"] == ("lost", "uninitialised")
    assert states["layer 0 norms"] == ("lost", "starts as ones")
    assert states["fc"] == ("ok", "")
    bypassed = served(wiring=Wiring(fc="bypassed", head="uninitialised", mapping="missing", embedding="draft"))
    states = {p.name: (p.state, p.note) for p in figures_served.components(bypassed)}
    assert states["fc"] == ("skipped", "bypassed")
    assert states["lm_head"] == ("lost", "uninitialised")
    assert states["embed_tokens"] == ("ok", "own")
    assert "lm_head (uninitialised)" in figures.caption(bypassed)


def test_the_picture_counts_layers() -> None:
    deep = served(
        tensors={f"layers.{k}.mlp.up_proj.weight": TensorFate("loaded", f"model.layers.{k}.mlp.gate_up_proj.weight") for k in range(4)}
    )
    assert sum(p.name.startswith("layer ") for p in figures_served.components(deep)) == 12
    assert figures.png(figures.plot(deep)).startswith(b"\x89PNG")


def test_a_picture_has_an_end_however_many_layers_and_states_there_are() -> None:
    names = [f"layers.{k}.mlp.up_proj.weight" for k in range(1000)]
    endless = served(
        tensors={n: TensorFate("loaded", f"model.{n}") for n in names[:500]},
        never_filled=dict.fromkeys(names[500:], "uninitialised"),
        aux=AuxCapture(None, "draft config", tuple(range(500)), None, hook=True),
    )
    last = [p for p in figures_served.components(endless) if p.name.startswith("layer")][-1]
    assert (last.name, last.state, last.note) == ("layers 8 to 999", "lost", "500 of 992 not what was trained")
    figure = figures.plot(endless)
    assert figure.get_figheight() < 40
    assert len(figures.png(figure)) < 1_000_000
    assert len(figures.caption(endless)) < 4000


def test_a_picture_without_taps_says_why() -> None:
    for hook in (False, None):
        aux = AuxCapture(None, "unknown", None, None, hook=hook)
        assert figures.png(figures.plot(served(aux=aux))).startswith(b"\x89PNG")
        assert "unknown" in figures.alt(served(aux=aux))


def test_a_diff_without_anything_to_draw_says_so(draft: Checkpoint) -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        figures.plot(diff(draft, draft))


def test_the_weight_map_shows_what_changed(draft: Checkpoint) -> None:
    from eagle3diag.report.figures.weights import rows

    changed = rows(diff(draft, variant(draft), values=True))
    assert [r.name for r in changed if r.kind == "changed"] == ["layers.0.mlp.up_proj.weight"]
    assert changed[0].name == "fc.weight"


def test_planting_changes_only_what_it_says(draft: Checkpoint) -> None:
    import torch

    other = planted(draft, "other", tensors={"fc.weight": torch.zeros_like(draft.read("fc.weight"))}, rename=lambda n: f"x.{n}")
    assert set(other.tensors) == {f"x.{n}" for n in draft.tensors}
    assert not other.read("x.fc.weight").any()
    assert b"".join(bytes(b) for b in other.blocks("x.fc.weight", 100)) == bytes(other.tensors["x.fc.weight"].nbytes)
    assert torch.equal(other.read("x.norm.weight"), draft.read("norm.weight"))
    assert b"".join(bytes(b) for b in other.blocks("x.d2t")) == b"".join(bytes(b) for b in draft.blocks("d2t"))


def test_sizes_and_values_read_well() -> None:
    assert [size(n) for n in (0, 999, 1000, 12_605_344, 4_700_000_000)] == ["0 B", "999 B", "1.0 kB", "12.6 MB", "4.7 GB"]
    assert value_text([2, None, {"a": 1e-5, "b": True}]) == "[2, not stated, a: 1e-05, b: true]"
    assert len(value_text("x" * 1000)) == 400


def test_the_sample_is_found() -> None:
    assert Path(sample().draft, "config.json").is_file()


def test_empty_tables_are_left_out() -> None:
    view = View(title="t", summary="s", tables=(Table(caption="none", head=("a",), rows=()),))
    assert "none" not in text.of(view) + html.fragment(view) + markdown.of(view)


def test_a_long_sentence_in_a_table_goes_on_below_and_a_long_name_is_cut() -> None:
    why = "no serving log given: pass --log; no throughput without speculation given: pass --baseline TOK_PER_S"
    lines = text.of(View(title="t", summary="", tables=(table("c", ("why", "rules"), ((why, "SRV807"), ("x" * 90, "y"))),))).splitlines()
    assert "…" not in "".join(lines[:-1])
    assert " ".join(line[2:64].replace("SRV807", "").strip() for line in lines[-3:-1]) == why
    assert "SRV807" in lines[-3]
    assert lines[-1] == f"  {'x' * 60}…  y"
