"""Explore a draft on a dump: toggle the switches of its wiring, see what becomes of its acceptance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.errors import UsageError
from eagle3diag.report.explore.explorer import Control, Explorer, Panel, Setting
from eagle3diag.report.layout import View, count, figure_text, percent, table
from eagle3diag.report.views.draft import acceptance_records, length_text

if TYPE_CHECKING:
    from eagle3diag.draft.measure import Bench
    from eagle3diag.draft.served import ServedAcceptance
    from eagle3diag.draft.switches import Switch, Switchboard
    from eagle3diag.report.opened import Opened

__all__ = ["bench_explorer", "opened_explorer", "switched_view"]

STEPS = 4
ROWS = 1000  #: read from the dump at most


def switched_view(result: ServedAcceptance) -> View:
    """Both lengths in one sentence, then step by step, and what was switched."""
    own, k = length_text(result.trained), max(result.trained.expected_length)
    t, n = result.tokens, result.nats
    if not result.change:
        summary = f"expected acceptance length {length_text(result.served)} in chains of {k}, every switch as trained"
    else:
        summary = f"expected acceptance length {length_text(result.served)} in chains of {k}; as trained {own}"
        lost = result.significant and result.loss >= 0
        gained = t.z > 2 or n.z < -2
        summary += ": a loss" if lost else ": a gain" if gained else ": no difference that these rows can show"
    wide = 3 if result.change else 2
    rows = ((str(r["step"]), percent(r["trained"]), percent(r["served"]))[:wide] for r in acceptance_records(result))
    told = f"{t.mean:+.3f} tokens per verification (z {figure_text(t.z, 2)}), {n.mean:+.3f} nats a token (z {figure_text(n.z, 2)})"
    notes = [f"Switched: {result.change}.", f"Switched minus trained, row by row: {told}; fewer nats are better."] if result.change else []
    return View(
        title="",
        summary=summary,
        tables=(table("Steps 0 to s all right (joint)", ("step s", "as trained", "as switched")[:wide], rows),),
        notes=(*notes, f"On {count(result.trained.rates.rows, 'row')}; intervals hold 95 %."),
    )


def opened_explorer(opened: Opened) -> Explorer:
    """Toggle wiring switches on what was opened.

    Raises:
        CheckpointError: draft and dump do not fit, or nothing says what the target chose.
        UsageError: nothing can be switched.
    """
    from eagle3diag.draft.measure import Bench

    bench = Bench.prepare(opened.checkpoint, opened.spec, opened.dump, opened.target, steps=STEPS, max_rows=ROWS)
    return _explorer(bench, opened.target)


def bench_explorer(bench: Bench) -> Explorer:
    """The same on rows that are already read.

    Raises:
        UsageError: nothing can be switched.
    """
    return _explorer(bench, None)


def _explorer(bench: Bench, target: Any) -> Explorer:
    from eagle3diag.draft.switches import Switchboard

    board = Switchboard(bench, target)
    if not board.switches:
        raise UsageError("nothing to explore: no switch of the wiring can be shown on this dump")
    return Explorer(
        static=(switched_view(board.measure({})),),
        how="toggle the switches of the wiring and see the acceptance length change, computed on the dump's rows each time",
        controls=tuple(_control(s) for s in board.switches),
        shown=lambda setting: _panel(board, setting),
    )


def _control(switch: Switch) -> Control:
    if switch.flag:
        trained = "on" if switch.values[0] else "off"
        return Control(key=switch.field, label=f"{switch.label} (trained: {trained})", kind="toggle", value=switch.values[0])
    words = [f"{w} (as trained)" if k == 0 else w for k, w in enumerate(switch.words)]
    return Control(
        key=switch.field,
        label=switch.label,
        kind="choice",
        value=0,
        options=tuple((w if words.count(w) == 1 else f"{w} ({k})", k) for k, w in enumerate(words)),
    )


def _chosen(board: Switchboard, setting: Setting) -> dict[str, Any]:
    """Values by field; choices are set by their number, since a value may be a mapping."""
    return {s.field: setting[s.field] if s.flag else s.values[setting[s.field]] for s in board.switches}


def _panel(board: Switchboard, setting: Setting) -> Panel:
    from eagle3diag.report import figures
    from eagle3diag.report.figures.draft import bars

    result = board.measure(_chosen(board, setting))
    view = switched_view(result)
    figure = bars(result.trained, result.served if result.change else None, "Acceptance, step by step", "as switched")
    return Panel(view=view, png=figures.png(figure), alt=f"Bar chart of joint agreement by draft step. {view.summary}.")
