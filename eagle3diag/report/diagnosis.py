"""One diagnosis from symptom to proof, in steps a notebook can show: what was served, what mends it, and what the mended draft would do.

With nothing given it is the story of the packaged sample on an SGLang that drops its layer; on a user's files the same steps are taken as
far as the files allow, and what cannot be told is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from eagle3diag.display import Piece
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.report.findings import engine_of, joined
from eagle3diag.report.layout import View, figure_text, table

if TYPE_CHECKING:
    from eagle3diag.draft.served import Acceptance
    from eagle3diag.report.acceptance import EngineAcceptance
    from eagle3diag.rules.model import Report
    from eagle3diag.serving.model import ServingLog
    from eagle3diag.weights.convert import Conversion

__all__ = ["Mended", "Served", "cost", "mended", "outcome", "served_here"]

MENDED = "the converted draft"  #: stands in for the path of a folder that is gone when the notebook ends


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Served(Piece):
    """Paths of what was served, the log of it where there is one, and the engine.

    Attributes:
        logs: the log, read; empty without.
        engine: ``sglang==0.5.9``; None where nobody said.
    """

    draft: str
    target: str | None
    dump: str | None
    logs: tuple[ServingLog, ...]
    engine: str | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Mended(Piece):
    """What conversion made of a draft.

    Attributes:
        conversions: the one done; empty where there was nothing to convert, and then ``why`` says so.
        reports: of the converted draft with the same engine, in the same number.
        keep: holds a temporary folder for as long as this is used.
    """

    conversions: tuple[Conversion, ...] = ()
    reports: tuple[Report, ...] = ()
    why: str = ""
    keep: TemporaryDirectory[str] | None = None


def served_here(
    draft: str | None = None,
    target: str | None = None,
    log: str | None = None,
    dump: str | None = None,
    engine: str | None = None,
) -> Served:
    """What was served.

    Args:
        draft: path; None for the packaged sample, which brings its target, its dumps, and the log of a server that lost its layer.
        engine: None for what the log says.

    Raises:
        CheckpointError: the log cannot be read.
        UsageError: no sample here.
    """
    from eagle3diag.rules.logcase import engine_of_log, opened_log

    if draft is None:
        from eagle3diag.report.sample import sample

        paths = sample()
        draft, target, log, dump = paths.draft, target or paths.target, log or paths.lost, dump or paths.dumps
    logs = () if log is None else (opened_log(log),)
    return Served(draft=draft, target=target, dump=dump, logs=logs, engine=engine or (engine_of_log(logs[0]) if logs else None))


def cost(report: Report, dump: str | None, steps: int = 4) -> tuple[EngineAcceptance, ...]:
    """The acceptance a draft was trained for beside the one its engine gives it, on a dump; nothing without a dump or an engine.

    Raises:
        CheckpointError: the dump cannot be read, or does not fit the draft.
    """
    from eagle3diag.checkpoint.spec import state_width
    from eagle3diag.hidden.dumps import open_dump
    from eagle3diag.report.acceptance import acceptances

    case = report.case
    if dump is None or case.served is None:
        return ()
    return acceptances(
        case.draft, case.spec, open_dump(dump, hidden=state_width(case.spec, case.target)), (case.served,), case.target, steps=steps
    )


def mended(report: Report, out: str | None = None) -> Mended:
    """The draft converted for its engine, and judged again.

    Args:
        report: of the draft as it was served.
        out: folder to write, which must not be there yet; None for a temporary one.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.rules.case import check
    from eagle3diag.weights.convert import convert

    case = report.case
    if case.served is None:
        return Mended(why="No engine is known: convert wants to know for which reader.")
    if report.verdict == "healthy":
        return Mended(why="The files need no mending for this engine.")
    engine = f"{case.served.contract.engine}=={case.served.contract.version}"
    keep = TemporaryDirectory(prefix="eagle3diag-") if out is None else None
    try:
        done = convert(case.draft, f"{keep.name}/draft" if keep is not None else str(out), engine)
    except (UsageError, CheckpointError) as error:
        return Mended(why=f"Not converted: {error}", keep=keep)
    draft = open_checkpoint(done.written)
    if keep is not None:
        done, draft = replace(done, written=MENDED), replace(draft, path=MENDED)
    again = check(draft, target=case.target, engine=engine, launch=None)
    return Mended(conversions=(done,), reports=(again,), keep=keep)


def outcome(served: Served, before: Report, fixed: Mended, costs: Sequence[EngineAcceptance], regained: Sequence[EngineAcceptance]) -> View:
    """The end of the story: what was wrong, what mends it, and the acceptance on every step of the way."""
    after = fixed.reports[0] if fixed.reports else None
    codes = [j.finding.code for j in joined([before]) if j.finding.severity.value != "info"]
    told = f"{before.verdict} with {engine_of(before)}" + (f" ({', '.join(dict.fromkeys(codes))})" if codes else "")
    if after is not None:
        told += f"; {after.verdict} with the same engine once converted"
    last = after or before
    left = [j.finding for j in joined([last]) if j.finding.severity.value != "info"]
    return View(
        title="",
        summary=told,
        status={"broken": "error", "suspect": "warning", "healthy": "ok"}[last.verdict],
        tables=(
            table("Tokens per verification, the bonus token counted", ("where", "length"), _lengths(served, costs, regained)),
            table(
                "Still to do",
                ("code", "what", "fix"),
                ((f.code, f.title, f.remedy) for f in left),
                status=(f.severity.value for f in left),
            ),
        ),
        notes=(fixed.why,) if fixed.why else (),
    )


def _lengths(served: Served, costs: Sequence[EngineAcceptance], regained: Sequence[EngineAcceptance]) -> list[tuple[str, str]]:
    rows = [("in the server's log", figure_text(log.acceptance_length, 3)) for log in served.logs]
    for one in costs:
        rows.append(("on the dump, as trained", _with_interval(one.trained)))
        if one.result is not None:
            rows.append((f"on the dump, as {one.engine} runs it", _with_interval(one.result.served)))
    rows += [
        (f"on the dump, as {one.engine} runs the converted draft", _with_interval(one.result.served)) for one in regained if one.result
    ]
    return rows


def _with_interval(acceptance: Acceptance) -> str:
    lengths, intervals = acceptance.expected_length, acceptance.interval
    k = max(lengths)
    low, high = intervals[k]
    return f"{lengths[k]:.2f} ({low:.2f} to {high:.2f})"
