"""All that the given inputs allow, opened once: what the notebooks and ``report`` stand on.

A ``Study`` is one draft seen by several engines: a report per engine and, with a second draft, the diff. With nothing given it is the
packaged sample, so that every notebook runs as it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Shown
from eagle3diag.errors import UsageError

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
    from eagle3diag.engines.model import ServedDraft
    from eagle3diag.rules.model import Report

__all__ = ["Study", "study"]

DEFAULT_ENGINES = ("sglang", "vllm")  #: the newest of each on record


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Study(Shown):
    """One draft, every engine asked for.

    Attributes:
        reports: one per engine in the order asked for, never empty.
        diff: against the second draft, headers and values, or None.
    """

    checkpoint: Checkpoint
    spec: DraftSpec
    target: TargetSpec | None
    reports: tuple[Report, ...]
    other: Checkpoint | None = None
    diff: Any = None

    @property
    def served(self) -> tuple[ServedDraft, ...]:
        """The draft as each engine runs it."""
        return tuple(r.case.served for r in self.reports if r.case.served is not None)

    def to_dict(self) -> dict[str, Any]:
        """Verdict per engine, for JSON."""
        verdicts = [{"engine": engine_of(r), "verdict": r.verdict} for r in self.reports]
        return {"schema": 1, "draft": self.checkpoint.path, "reports": verdicts}


def engine_of(report: Report) -> str:
    """The engine a report is about, in words."""
    return "no engine" if report.case.served is None else report.case.served.contract.label


def _engines(engines: str | None, launch: str | None) -> list[str | None]:
    if engines is None:
        return [None] if launch else list(DEFAULT_ENGINES)
    asked = [e.strip() for e in engines.split(",") if e.strip()]
    if len(set(asked)) != len(asked):
        raise UsageError(f"an engine is given twice: {', '.join(asked)}")
    return list(asked) or [None]


def study(
    draft: str | None = None,
    target: str | None = None,
    engines: str | None = None,
    launch: str | None = None,
    other: str | None = None,
    *,
    headers_only: bool = False,
) -> Study:
    """Open, serve and judge.

    Args:
        draft: path of the draft; None for the packaged sample, which then brings its own target.
        target: path of the target's folder or config.
        engines: names with versions, comma-separated; None for the launch line's, or else the newest of each engine; empty for none.
        launch: a launch line; it belongs to one engine.
        other: a second draft to compare with.
        headers_only: read no tensor values.

    Raises:
        CheckpointError: an input cannot be read.
        UsageError: an engine or the launch line makes no sense.
    """
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.target import open_target
    from eagle3diag.rules.case import check

    if draft is None:
        from eagle3diag.report.sample import sample

        paths = sample()
        draft, target = paths.draft, target or paths.target
    checkpoint = open_checkpoint(draft)
    aim = None if target is None else open_target(target)
    second = None if other is None else open_checkpoint(other)
    reports = tuple(
        check(checkpoint, target=aim, engine=e, launch=launch, other=second, headers_only=headers_only) for e in _engines(engines, launch)
    )
    changes = None
    if second is not None:
        from eagle3diag.weights.diff import diff

        changes = diff(checkpoint, second, values=not headers_only)
    return Study(checkpoint=checkpoint, spec=reports[0].case.spec, target=aim, reports=reports, other=second, diff=changes)
