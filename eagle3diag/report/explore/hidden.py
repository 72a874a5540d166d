"""Explore a dump: scrub through the tokens and the states of a sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from eagle3diag.errors import UsageError, escaped
from eagle3diag.report.explore.explorer import Control, Explorer, Panel, Setting
from eagle3diag.report.layout import View, figure_text, table
from eagle3diag.report.views.hidden import slot_name

if TYPE_CHECKING:
    from eagle3diag.hidden.model import HiddenDump, Slot
    from eagle3diag.hidden.tokens import TokenNorms

__all__ = ["dump_explorer", "token_view", "tokens_explorer"]

SAMPLES = 2000  #: that can be chosen among
KEPT = 8  #: samples whose norms are kept


def token_view(norms: TokenNorms, slot: int, token: int) -> View:
    """One token at one state, and the same token at every other.

    Args:
        slot: place among ``norms.slots``.
        token: place in the sample.

    Raises:
        UsageError: the sample has no such token or state.
    """
    if not (0 <= slot < len(norms.slots) and 0 <= token < len(norms.l2[slot])):
        rows = len(norms.l2[slot]) if 0 <= slot < len(norms.slots) else 0
        raise UsageError(
            f"{escaped(norms.sample)}: no token {token} at state {slot}; there are {len(norms.slots)} states, {rows} rows here"
        )
    value, times = norms.l2[slot][token], norms.times(slot, token)
    if math.isnan(value):
        told, status = "NaN or Inf in this row", "error"
    else:
        told = f"L2 norm {figure_text(value, 6)}, {figure_text(times, 4)} times the median of this state"
        status = "none"
        if token in norms.sinks:
            told += ": the token is a sink" + ("" if times >= 10 else " at another state")
    ids = norms.token_ids
    rows_ = (
        (
            slot_name(s),
            figure_text(norms.l2[k][token], 6) if token < len(norms.l2[k]) else "no row",
            figure_text(norms.times(k, token), 4) if token < len(norms.l2[k]) else "–",
            figure_text(norms.medians[k], 6),
        )
        for k, s in enumerate(norms.slots)
    )
    return View(
        title=f"Token {token} of {norms.sample} at {slot_name(norms.slots[slot])}",
        summary=told,
        status=status,
        tables=(
            table(
                f"Token {token}, id {ids[token] if token < len(ids) else 'none'}, state by state",
                ("state", "L2 norm", "times the median", "median"),
                rows_,
                limit=200,
            ),
        ),
    )


def _panel(norms: TokenNorms, slot: int, token: int) -> Panel:
    from eagle3diag.report import figures
    from eagle3diag.report.figures.hidden import token_plot

    view = token_view(norms, slot, token)
    alt = f"Line chart of the L2 norm of every token of the sample at {slot_name(norms.slots[slot])}, token {token} marked: {view.summary}."
    return Panel(view=view, png=figures.png(token_plot(norms, slot, token)), alt=alt)


def _controls(slots: tuple[Slot, ...], rows: int, token: int) -> tuple[Control, Control]:
    stops = tuple((slot_name(s), k) for k, s in enumerate(slots))
    return (
        Control(key="layer", label="state", kind="stops", value=len(slots) // 2, options=_distinct(stops), live=True),
        Control(key="token", label="token", kind="slider", value=min(token, max(0, rows - 1)), high=max(0, rows - 1), live=True),
    )


def _distinct(stops: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Words that name one slot each."""
    words = [w for w, _ in stops]
    return tuple((w if words.count(w) == 1 else f"{w} (slot {k})", k) for w, k in stops)


def _rows(norms: TokenNorms) -> int:
    return max((len(row) for row in norms.l2), default=0)


def tokens_explorer(norms: TokenNorms) -> Explorer:
    """Scrub token and state of one sample.

    Raises:
        UsageError: the sample has no row.
    """
    if not _rows(norms):
        raise UsageError(f"{escaped(norms.sample)}: nothing to explore, the sample has no row")
    return Explorer(
        static=(norms,),
        pictures=(norms,),
        how="move through the tokens of the sample and through the states of the target",
        controls=_controls(norms.slots, _rows(norms), max(norms.sinks, default=1)),
        shown=lambda setting: _panel(norms, setting["layer"], setting["token"]),
    )


def dump_explorer(dump: HiddenDump) -> Explorer:
    """The same over every sample of a dump; one sample is read at a time.

    Raises:
        UsageError: the dump has no sample, or no state.
        CheckpointError: its first sample cannot be read.
    """
    if not dump.samples or not dump.slots:
        raise UsageError(f"{escaped(dump.path, 200)}: nothing to explore, the dump has no sample")
    norms = _reader(dump)
    first = norms(0)
    options = tuple((f"{k}: {ref.name}", k) for k, ref in enumerate(dump.samples[:SAMPLES]))

    def shown(setting: Setting) -> Panel:
        one = norms(setting["sample"])
        return _panel(one, setting["layer"], min(setting["token"], _rows(one) - 1))

    return Explorer(
        static=(dump,),
        how="choose a sample, and move through its tokens and through the states of the target",
        controls=(
            Control(key="sample", label="sample", kind="choice", value=0, options=options),
            *_controls(dump.slots, _rows(first), max(first.sinks, default=1)),
        ),
        shown=shown,
        highs=lambda setting: {"token": max(0, _rows(norms(setting["sample"])) - 1)},
    )


def _reader(dump: HiddenDump) -> Callable[[int], TokenNorms]:
    from eagle3diag.hidden.tokens import token_norms

    @lru_cache(maxsize=KEPT)
    def read(sample: int) -> TokenNorms:
        return token_norms(dump, sample)

    return read
