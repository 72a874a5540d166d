"""All that the given inputs allow, opened once: what the notebooks and ``report`` stand on.

A ``Study`` is one draft seen by several engines: a report per engine; with a second draft, the diff; with a dump, the norms of its states,
the draft's agreement, and the acceptance each engine would get. With nothing given it is the packaged sample, so that every notebook runs
as it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Shown
from eagle3diag.errors import UsageError
from eagle3diag.report.findings import engine_of
from eagle3diag.report.origin import origin_view
from eagle3diag.report.views.findings import findings_view

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
    from eagle3diag.draft.agreement import Agreement
    from eagle3diag.engines.model import ServedDraft
    from eagle3diag.hidden.model import HiddenDump
    from eagle3diag.hidden.norms import NormProfile
    from eagle3diag.report.acceptance import EngineAcceptance
    from eagle3diag.report.layout import View
    from eagle3diag.rules.explain import Explanation
    from eagle3diag.rules.model import Report
    from eagle3diag.serving.model import ServingLog

__all__ = ["Study", "study"]

DEFAULT_ENGINES = ("sglang", "vllm")  #: the newest of each on record


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Study(Shown):
    """One draft, every engine asked for.

    Attributes:
        reports: one per engine in the order asked for, never empty.
        diff: against the second draft, headers and values, or None.
        dump: hidden states of the target, or None; ``profile`` of its norms.
        agreement: of the draft as it was trained, on that dump; None where it cannot be told, and then ``unmeasured`` says why.
        acceptances: one per engine.
        explanations: of a log's acceptance, one per engine; none without a log.
    """

    checkpoint: Checkpoint
    spec: DraftSpec
    target: TargetSpec | None
    reports: tuple[Report, ...]
    other: Checkpoint | None = None
    diff: Any = None
    dump: HiddenDump | None = None
    profile: NormProfile | None = None
    agreement: Agreement | None = None
    acceptances: tuple[EngineAcceptance, ...] = ()
    explanations: tuple[Explanation, ...] = ()
    unmeasured: str = "No dump of hidden states given: how often the draft is right was not measured."

    @property
    def served(self) -> tuple[ServedDraft, ...]:
        """The draft as each engine runs it."""
        return tuple(r.case.served for r in self.reports if r.case.served is not None)

    @property
    def measures(self) -> tuple[Any, ...]:
        """What was measured on the dump: agreement, the acceptance with each engine, the norms."""
        return tuple(m for m in (self.agreement, *self.acceptances, self.profile) if m is not None)

    @property
    def pictures(self) -> tuple[Any, ...]:
        """Those of ``measures`` that a picture adds something to."""
        changed = tuple(a for a in self.acceptances if a.result is not None and a.result.change)
        drawn = self.profile is not None and any(x.rows for x in self.profile.layers)
        return tuple(m for m in (self.agreement, *changed, self.profile if drawn else None) if m is not None)

    @property
    def logs(self) -> tuple[ServingLog, ...]:
        """The log, where one was given."""
        log = self.reports[0].case.log
        return () if log is None else (log,)

    @property
    def findings(self) -> View:
        """The findings of all reports as one section."""
        return findings_view(self.reports)

    def origin(self, parameters: Mapping[str, Any]) -> View:
        """What this was made from and by: versions, inputs with sizes and digests, and the parameters given."""
        return origin_view(self, parameters)

    def to_dict(self) -> dict[str, Any]:
        """Verdict per engine, for JSON."""
        verdicts = [{"engine": engine_of(r), "verdict": r.verdict} for r in self.reports]
        return {"schema": 1, "draft": self.checkpoint.path, "reports": verdicts}


def _engines(engines: str | None, launch: str | None, log: ServingLog | None) -> list[str | None]:
    if engines is None:
        if log is not None:
            from eagle3diag.rules.logcase import engine_of_log

            told = engine_of_log(log)
            if told is not None and not launch:
                return [told]
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
    dump: str | None = None,
    log: str | None = None,
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
        dump: file or folder of the target's hidden states.
        log: of a server that ran this draft; it tells the engine where none is named.
        headers_only: read no tensor values.

    Raises:
        CheckpointError: an input cannot be read.
        UsageError: an engine or the launch line makes no sense.
    """
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.rules.case import check

    if draft is None:
        from eagle3diag.report.sample import sample

        paths = sample()
        draft, target = paths.draft, target or paths.target
    second = None if other is None else open_checkpoint(other)
    read = None
    if log is not None:
        from eagle3diag.rules.logcase import opened_log

        read = opened_log(log)
    reports: list[Report] = []
    opened: dict[str, Any] = {"draft": draft, "target": target, "dump": dump}
    for engine in _engines(engines, launch, read):
        given: dict[str, Any] = {
            "engine": engine,
            "launch": launch,
            "other": second,
            "headers_only": headers_only,
            "log": read,
            "like": reports[0].case if reports else None,
        }
        reports.append(check(**opened, **given))
        first = reports[0].case
        opened = {"draft": first.draft, "target": first.target, "dump": first.dump}  # once for all engines
    changes = None
    if second is not None:
        from eagle3diag.weights.diff import diff

        changes = diff(first.draft, second, values=not headers_only)
    found = Study(checkpoint=first.draft, spec=first.spec, target=first.target, reports=tuple(reports), other=second, diff=changes)
    if read is not None:
        from eagle3diag.rules.explain import explain

        found = replace(found, explanations=tuple(e for e in map(explain, reports) if e is not None))
    return found if first.dump is None else _measured(found, first.dump)


def _measured(study: Study, dump: HiddenDump) -> Study:
    """The study with what the dump tells; a dump that cannot be used says why, and the rest of the study stands."""
    from eagle3diag.draft.agreement import agree_bench
    from eagle3diag.draft.measure import Bench
    from eagle3diag.errors import CheckpointError
    from eagle3diag.hidden.norms import profile
    from eagle3diag.report.acceptance import measured

    norms = profile(dump) if dump.samples else None
    try:
        bench = Bench.prepare(study.checkpoint, study.spec, dump, study.target)
        own, found = agree_bench(bench, on_policy=False), measured(bench, study.served)
    except CheckpointError as error:
        return replace(study, dump=dump, profile=norms, unmeasured=f"The draft could not be run on the dump: {error}")
    return replace(study, dump=dump, profile=norms, agreement=own, acceptances=found, unmeasured="")
