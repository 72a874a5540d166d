"""Explorers: what each panel says is what the library computes for that setting; nothing is saved that would load from a network."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import eagle3diag
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.draft.agreement import agree_bench
from eagle3diag.draft.measure import Bench
from eagle3diag.draft.switches import Switchboard, affordable_rows, switches
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.hidden.tokens import token_norms
from eagle3diag.report import explore as door
from eagle3diag.report.explore.explorer import Panel
from eagle3diag.report.layout import View
from eagle3diag.report.opened import opened
from eagle3diag.report.sample import variant
from eagle3diag.report.study import study
from eagle3diag.report.text import of
from eagle3diag.weights.diff import diff
from tests.factory import tiny_config, tiny_tensors, write_draft

SAMPLE = Path(__file__).parent.parent / "data_samples" / "smollm2-eagle3"

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def words(panel: Panel) -> str:
    return re.sub(r"\s+", " ", of(panel.view))


@pytest.fixture(scope="module")
def board() -> Switchboard:
    this = opened()
    return Switchboard(Bench.prepare(this.checkpoint, this.spec, this.dump, this.target, steps=3, max_rows=150), this.target)


# ------------------------------------------------------------------ the door


def test_the_public_name_is_the_door() -> None:
    assert eagle3diag.explore is door.explore


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (View(title="", summary=""), "a View cannot be explored; there are explorers of WeightDiff"),
        (3, "an int cannot be explored"),
    ],
)
def test_what_has_no_explorer_is_refused(result: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        door.explore(result)


def test_a_result_without_its_rows_says_what_to_explore(board: Switchboard) -> None:
    with pytest.raises(UsageError, match="an Agreement cannot be explored, it keeps numbers and no rows to run again: explore what"):
        door.explore(agree_bench(board.bench, on_policy=False, distribution=False))


@pytest.mark.parametrize("installed", [True, False])
def test_a_plain_session_is_told_in_text(installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "IPython", None)
    door.explore(token_norms(open_dump(SAMPLE / "dumps"), 0))
    told = capsys.readouterr().out
    assert told.startswith("Attention sinks")
    assert "192 tokens" in told
    assert "In a live notebook controls stand here: move through the tokens" in told
    assert "object at" not in told
    assert "base64" not in told
    assert max(map(len, told.splitlines())) < 400


def test_without_somebody_there_is_a_sentence_and_no_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        kernel = object()

    shown: list[Any] = []
    monkeypatch.setattr("IPython.get_ipython", lambda: Shell())
    monkeypatch.setattr("IPython.display.display", lambda *a, **k: shown.append(a[0]))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # not even imported
    norms = token_norms(open_dump(SAMPLE / "dumps"), 0)
    assert not door.live()
    door.explore(norms)
    assert "image/png" in shown[0]
    assert "Attention sinks" in shown[1]["text/html"]
    assert "192 tokens" in shown[2].data
    assert "In a live notebook controls stand here: move through the tokens" in shown[3].data
    assert len(shown) == 4
    shown.clear()
    door.explore(norms, static=False)
    assert len(shown) == 1


def test_a_live_notebook_without_ipywidgets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3DIAG_WIDGETS", "1")
    monkeypatch.setattr("IPython.display.display", lambda *a, **k: None)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(UsageError, match=r"explore need ipywidgets: python -m pip install 'eagle3diag\[notebook\]'"):
        door.explore(token_norms(open_dump(SAMPLE / "dumps"), 0))


@pytest.mark.parametrize(("content", "there"), [({"allow_stdin": True}, True), ({"allow_stdin": False}, False), ({}, False)])
def test_the_front_end_tells_whether_somebody_is_there(content: dict[str, bool], there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def get_parent(self, _channel: str) -> dict[str, Any]:
            return {"content": content}

    class Shell:
        kernel = Kernel()

    monkeypatch.setattr("IPython.get_ipython", lambda: Shell())
    assert door.live() is there


def test_an_unattended_run_saves_no_widget(tmp_path: Path) -> None:
    """nbclient alone, as papermill and nbconvert use it, without our runner."""
    import nbformat
    from nbclient import NotebookClient

    code = f"""
import sys; sys.path.insert(0, {str(SAMPLE.parent.parent)!r})
import eagle3diag as e3
e3.explore(e3.open_dump({str(SAMPLE / "dumps")!r}))
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = nbformat.writes(notebook)
    assert "widgets" not in notebook.metadata
    assert "widget-view" not in text
    assert "controls stand here" in text


def test_rendered_notebooks_hold_no_widget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3diag.report import notebooks

    monkeypatch.chdir(tmp_path)
    done = notebooks.run("02_weight_diff", {}, "page.html")
    page = Path(done.html).read_text(encoding="utf-8")
    executed = json.loads(Path(done.notebook).read_text(encoding="utf-8"))
    assert not re.search(r"unpkg|cdnjs|<script|widget-view|widget-state", page)
    assert "widgets" not in executed["metadata"]
    assert "widget-view" not in json.dumps(executed)
    assert "controls stand here: pick tensors" in page
    assert page.count("14 of 15 tensors are equal") == 1  # the caption, with the picture and not once more under it


# ------------------------------------------------------------------ weights


def test_picked_tensors_are_compared_alone() -> None:
    first = open_checkpoint(SAMPLE / "draft")
    change = diff(first, variant(first), values=True)
    explorer = door.explorer(change)
    name = change.changed[0].name
    assert explorer.start["tensors"][0] == name
    one = explorer.panel(tensors=(name,))
    assert f"{change.changed[0].relative:.6g}" in words(one)
    assert words(one).startswith("1 tensor: 0 equal, 1 with other values")
    assert "fc.weight" not in words(one)
    assert one.png.startswith(b"\x89PNG")
    assert name in one.alt
    assert words(explorer.panel(tensors=("fc.weight",))).startswith("1 tensor: 1 equal")
    assert words(explorer.panel(tensors=())) == "no tensor picked"


def test_tensors_on_one_side_and_of_another_shape_can_be_picked(tmp_path: Path) -> None:
    a = write_draft(tmp_path / "a", tiny_tensors(), tiny_config())
    tensors = tiny_tensors(drop=["norm.weight"])
    tensors["fc.weight"] = tensors["fc.weight"][:, :8].clone()
    explorer = door.explorer(diff(a, write_draft(tmp_path / "b", tensors, tiny_config()), values=True))
    assert explorer.start["tensors"][:2] == ("norm.weight", "fc.weight")
    panel = explorer.panel(tensors=("norm.weight", "fc.weight"))
    assert panel.view.status == "warning"
    assert "2 without a counterpart" in words(panel)
    assert "Shapes that differ" in words(panel)


def test_a_diff_without_values_that_agrees_has_nothing_to_explore() -> None:
    with pytest.raises(UsageError, match="values were not compared"):
        door.explorer(diff(SAMPLE / "draft", SAMPLE / "draft"))


# ------------------------------------------------------------------ states


def test_a_token_at_a_state_is_the_dump_s() -> None:
    dump = open_dump(SAMPLE / "dumps")
    explorer = door.explorer(dump)
    for sample, layer, token in ((0, 3, 59), (2, 7, 100), (1, 10, 0)):
        states = dump.read(dump.samples[sample]).states[dump.slots[layer].position]
        panel = explorer.panel(sample=sample, layer=layer, token=token)
        assert f"L2 norm {float(states[token].float().norm()):.6g}," in words(panel)
        assert f"Token {token} of {dump.samples[sample].name}" in words(panel)
        assert panel.png.startswith(b"\x89PNG")
    assert "a sink" in words(explorer.panel(sample=0, layer=3, token=59))
    assert explorer.highs is not None
    assert explorer.highs(explorer.start) == {"token": 191}


def test_norms_of_one_sample_can_be_explored_without_the_dump() -> None:
    norms = token_norms(open_dump(SAMPLE / "dumps"), 1)
    explorer = door.explorer(norms)
    assert [c.key for c in explorer.controls] == ["layer", "token"]
    assert f"{norms.l2[4][7]:.6g}" in words(explorer.panel(layer=4, token=7))
    with pytest.raises(UsageError, match="no token 500"):
        explorer.panel(token=500)


def test_a_broken_row_says_so() -> None:
    norms = token_norms(open_dump(SAMPLE / "dumps"), 0)
    rows = tuple((*row[:5], float("nan"), *row[6:]) for row in norms.l2)
    panel = door.explorer(replace(norms, l2=rows, broken=(5,))).panel(token=5)
    assert panel.view.status == "error"
    assert "NaN or Inf in this row" in words(panel)


def test_an_empty_dump_has_nothing_to_explore() -> None:
    with pytest.raises(UsageError, match="the dump has no sample"):
        door.explorer(replace(open_dump(SAMPLE / "dumps"), samples=()))


# ------------------------------------------------------------------ switches


def test_the_switches_are_those_the_dump_can_show(board: Switchboard) -> None:
    found = {s.field: s for s in board.switches}
    assert found["aux_layers"].values[:3] == ((2, 15, 27), (3, 16, 28), (1, 14, 26))
    assert found["aux_layers"].words[1] == "3, 16, 28"
    assert found["norm_output"].flag
    assert not found["rope_theta"].flag
    assert "fc_norm" not in found  # the draft has no such tensor
    for s in board.switches:
        assert s.values[0] == getattr(board.bench.base, s.field)
        assert len(set(map(repr, s.values))) == len(s.values) == len(s.words) > 1


@pytest.mark.parametrize(
    "change", [{}, {"norm_output": True}, {"aux_layers": (3, 16, 28)}, {"aux_layers": (3, 16, 28), "final_norm": False}]
)
def test_a_setting_is_what_agreement_computes(change: dict[str, Any], board: Switchboard) -> None:
    result = board.measure(change)
    expected = agree_bench(board.bench, replace(board.bench.base, **change), on_policy=False, distribution=False)
    assert result.served.expected_length == expected.expected_length
    assert result.served.rates.joint == tuple(s.joint for s in expected.steps)
    assert board.measure(change) is result  # kept


def test_an_unknown_switch_is_refused(board: Switchboard) -> None:
    with pytest.raises(UsageError, match="no switch theta: there are"):
        board.measure({"theta": 3})


def test_rows_are_bounded_by_the_size_of_the_draft(board: Switchboard) -> None:
    bench = board.bench
    assert affordable_rows(bench) > 500
    big = dict(bench.weights.tensors)
    big["extra"] = bench.weights.tensors["fc.weight"].new_zeros(1).expand(10**9)
    assert affordable_rows(replace(bench, weights=replace(bench.weights, tensors=big))) == 64


@pytest.mark.parametrize("rows", [1, 40, 100, 10**6])
def test_fewer_rows_are_the_beginnings_of_samples(rows: int) -> None:
    this = opened()
    whole = Bench.prepare(this.checkpoint, this.spec, this.dump, this.target, steps=3)
    some = whole.within(rows)
    n = len(some.all(some.base))
    assert n <= len(whole.all(whole.base))
    assert n >= min(rows, 1)
    assert (some is whole) == (rows == 10**6)
    if rows in (40, 100):
        assert rows <= n <= rows + 2 * len(some.samples)
    names = [s.name for s, _ in whole.samples]
    for k, (sample, greedy) in enumerate(some.samples):
        at = names.index(sample.name)
        left, right = some.run(k, some.base), whole.run(at, whole.base)
        assert bool((left.right == right.right[: len(left)]).all())
        assert len(greedy) == len(sample.token_ids)


def test_the_explorer_of_an_opened_draft() -> None:
    this = opened()
    explorer = door.explorer(this)
    board_ = {c.key: c for c in explorer.controls}
    assert board_["norm_output"].kind == "toggle"
    assert board_["norm_output"].label == "norm_output (trained: off)"
    assert board_["aux_layers"].options[0] == ("2, 15, 27 (as trained)", 0)
    start = explorer.panel()
    assert "every switch as trained" in words(start)
    other = explorer.panel(norm_before_residual=True)
    assert "Switched: norm_before_residual true in place of false" in words(other)
    assert ": a loss" in words(other)
    assert "as switched" in words(other)
    assert "as switched" not in words(start)
    assert other.png != start.png
    late = explorer.panel(aux_layers=1)
    assert "layers 3, 16, 28 in place of 2, 15, 27" in words(late)
    assert words(explorer.panel(norm_before_residual=False)) == words(start)


def test_switches_of_a_bench_alone(board: Switchboard) -> None:
    explorer = door.explorer(board.bench)
    assert {c.key for c in explorer.controls} <= {s.field for s in switches(board.bench)}


# ------------------------------------------------------------------ findings


def test_findings_of_several_engines_are_filtered() -> None:
    one = study(str(SAMPLE / "draft"), str(SAMPLE / "target"), "sglang==0.5.9, vllm==0.33.0")
    explorer = door.explorer(one)
    every = explorer.panel().view
    assert f"{len(every.blocks)} of {len(every.blocks)} findings shown" in every.summary
    errors = explorer.panel(severity="error").view
    assert {b.code for b in errors.blocks} == {"KEY203"}
    assert errors.blocks[0].engines == "sglang 0.5.9"
    label = next(value for words_, value in explorer.controls[2].options if "vllm" in words_)
    assert all(b.code != "KEY203" for b in explorer.panel(engine=label).view.blocks)
    assert {b.code for b in explorer.panel(code="KEY").view.blocks} == {"KEY203"}
    assert {b.code for b in explorer.panel(text="Dropped SILENCE").view.blocks} == {"KEY203"}
    assert explorer.panel(text="no such word").view.blocks == ()


def test_findings_of_one_report_and_of_a_healthy_one(tmp_path: Path) -> None:
    broken = eagle3diag.check(write_draft(tmp_path / "a", tiny_tensors(drop=["fc.weight"]), tiny_config()), engine="sglang==0.5.9")
    explorer = door.explorer(broken)
    assert [c.key for c in explorer.controls] == ["severity", "code", "text"]
    assert len(explorer.panel(severity="error").view.blocks) == sum(f.severity == "error" for f in broken.findings)
    assert "0 of 0 findings shown" in words(door.explorer(replace(broken, outcomes=())).panel())


# ------------------------------------------------------------------ widgets


def test_the_widgets_follow_and_never_hide_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    from eagle3diag.report.explore.widgets import board as widgets

    explorer = door.explorer(open_dump(SAMPLE / "dumps"))
    whole = widgets(explorer)
    controls, _, shown = whole.children
    sample, layer, token = controls.children
    assert token.max == 191
    before = shown.value
    token.value = 60
    assert "Token 60 of" in shown.value != before
    layer.value = 0
    assert "at HF 0" in shown.value
    assert sample.options[0] == ("0: sample_0", 0)

    def fails(error: Exception) -> str:
        def panel(_setting: Any) -> Panel:
            raise error

        return str(widgets(replace(explorer, shown=panel, highs=None)).children[2].value)

    assert "no such &lt;state&gt;" in fails(CheckpointError("no such <state>"))
    assert "this setting failed: ZeroDivisionError: x" in fails(ZeroDivisionError("x"))


def test_a_sample_of_other_length_moves_the_end_of_the_slider() -> None:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    from eagle3diag.report.explore.widgets import board as widgets

    explorer = door.explorer(open_dump(SAMPLE / "dumps"))
    short = replace(explorer, highs=lambda setting: {"token": 191 if setting["sample"] == 0 else 50})
    whole = widgets(short)
    sample, _, token = whole.children[0].children
    token.value = 120
    sample.value = 1
    assert (token.max, token.value) == (50, 50)
    assert "Token 50 of sample_1" in whole.children[2].value


def test_names_from_a_file_are_escaped_in_widgets(tmp_path: Path) -> None:
    pytest.importorskip("ipywidgets", reason="ipywidgets is not installed")
    from eagle3diag.report.explore.widgets import board as widgets

    tensors = tiny_tensors()
    tensors["<img src=x onerror=alert(1)>"] = tensors["norm.weight"].clone()
    change = diff(
        write_draft(tmp_path / "a", tiny_tensors(), tiny_config()), write_draft(tmp_path / "b", tensors, tiny_config()), values=True
    )
    whole = widgets(door.explorer(change))
    assert "<img src=x" not in whole.children[2].value
    assert "&lt;img src=x" in whole.children[2].value
