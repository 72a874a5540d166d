"""A serving log with all that was given beside it, read and judged once: what the notebook on logs stands on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Shown
from eagle3diag.errors import UsageError

if TYPE_CHECKING:
    from eagle3diag.rules.explain import Explanation
    from eagle3diag.rules.model import Report
    from eagle3diag.serving.compatible import Compatibility
    from eagle3diag.serving.model import ServingLog
    from eagle3diag.serving.payoff import Payoff

__all__ = ["LogStudy", "log_study"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LogStudy(Shown):
    """One log: the verdict on it (with a draft, on both), what explains its number, whether it pays."""

    report: Report
    explanation: Explanation | None
    payoff: Payoff | None

    @property
    def log(self) -> ServingLog:
        """The log, read."""
        assert self.report.case.log is not None
        return self.report.case.log

    @property
    def pictures(self) -> tuple[Any, ...]:
        """The course of the log, where it has one."""
        return (self.log,) if len(self.log.series) > 1 else ()

    @property
    def causes(self) -> tuple[Explanation, ...]:
        """What explains the number, where there is something to explain."""
        return () if self.explanation is None else (self.explanation,)

    @property
    def wirings(self) -> tuple[Compatibility, ...]:
        """Wirings that would give the log, where a dump was given."""
        found = None if self.explanation is None else self.explanation.compared
        return () if found is None else (found,)

    @property
    def pays(self) -> tuple[Payoff, ...]:
        """Whether speculation pays, where a baseline was given and the log tells a throughput."""
        return () if self.payoff is None else (self.payoff,)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the shape of ``log``."""
        from eagle3diag.report import jsonout

        done: dict[str, Any] = jsonout.plain(jsonout.checked(self.report, self.explanation))
        return done


def log_study(
    log: str | None = None,
    draft: str | None = None,
    target: str | None = None,
    dump: str | None = None,
    engine: str | None = None,
    control: str | None = None,
    baseline: float | None = None,
    metrics: str | None = None,
) -> LogStudy:
    """Read and judge.

    Args:
        log: a file, a folder of rotated files, or ``http://HOST:PORT``; None for the packaged log, draft, target and dumps.
        draft, target, dump, engine: what was served, where at hand; without a draft the log is judged alone.
        control: the same server's log with another draft.
        baseline: tokens per second without speculation.
        metrics: of the training run.

    Raises:
        CheckpointError: an input cannot be read.
        UsageError: inputs that make no sense together.
    """
    from eagle3diag.rules.case import check
    from eagle3diag.rules.explain import explain
    from eagle3diag.rules.logcase import check_log
    from eagle3diag.serving.payoff import payoff

    if baseline is not None and not baseline > 0:
        raise UsageError(f"baseline is {baseline:g}: tokens per second without speculation are more than 0")
    if log is None:
        from eagle3diag.report.sample import sample

        paths = sample()
        log = paths.log
        if draft is None:
            draft, target, dump = paths.draft, target or paths.target, dump or paths.dumps
    if draft is None:
        if target is not None or dump is not None or engine is not None:
            raise UsageError("target, dump and engine are judged together with a draft: give the draft too")
        report = check_log(log, control=control, baseline=baseline, metrics=metrics)
    else:
        report = check(draft, target=target, engine=engine, dump=dump, log=log, control=control, baseline=baseline, metrics=metrics)
    read = report.case.log
    pays = payoff(read, baseline) if read is not None and baseline is not None else None
    return LogStudy(report=report, explanation=explain(report), payoff=pays)
