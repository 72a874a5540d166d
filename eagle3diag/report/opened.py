"""A draft, its target and a dump, opened for measuring: what ``agree`` and ``wirings`` and their notebooks stand on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Shown, data
from eagle3diag.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
    from eagle3diag.draft.observed import Explanations
    from eagle3diag.engines.model import ServedDraft
    from eagle3diag.hidden.model import HiddenDump
    from eagle3diag.rules.model import Report

__all__ = ["ENGINES", "Opened", "dump_verdict", "opened"]

ENGINES = "sglang==0.5.9, sglang, vllm"  #: an old one that drops what speculators names, and the newest of each


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Opened(Shown):
    """What was opened; nothing has been computed."""

    checkpoint: Checkpoint
    spec: DraftSpec
    dump: HiddenDump
    target: TargetSpec | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what was opened."""
        target = None if self.target is None else self.target.to_dict()
        return data({"schema": 1, **self.spec.to_dict(), **self.checkpoint.to_dict(), "dump": self.dump.to_dict(), "target": target})

    def served(self, engines: str | None = None) -> tuple[ServedDraft, ...]:
        """The draft as each engine runs it.

        Args:
            engines: names with versions, comma-separated; None for `ENGINES`.

        Raises:
            UsageError: an engine nobody knows.
        """
        from eagle3diag.engines.serve import serve

        names = dict.fromkeys(e.strip() for e in (ENGINES if engines is None else engines).split(",") if e.strip())
        return tuple(serve(self.checkpoint, engine=e, target=self.target, spec=self.spec) for e in names)

    def explained(self, observed: float, steps: int, rows: int) -> Explanations:
        """Which wirings would give an acceptance length that was seen.

        Args:
            observed: tokens per verification, bonus token counted.
            steps: of the server's chains.
            rows: read about as many.

        Raises:
            UsageError: no chain of that many steps gives such a length.
        """
        from eagle3diag.draft.measure import Bench
        from eagle3diag.draft.observed import explain

        bench = Bench.prepare(self.checkpoint, self.spec, self.dump, self.target, steps=steps, max_rows=rows)
        return explain(bench, observed, self.target)

    def judged(self, *families: str) -> Report:
        """The verdict of the rules on the dump and on what the draft makes of it.

        Args:
            families: rule codes or families; DMP and AGR where none is named.
        """
        from eagle3diag.rules.case import check

        return check(self.checkpoint, target=self.target, dump=self.dump, select=families or ("DMP", "AGR"))


def dump_verdict(dump: HiddenDump, draft: str | None = None, target: str | None = None) -> tuple[Report, ...]:
    """The DMP rules on a dump, as one report; none where it cannot be told which draft it is meant for.

    Args:
        dump: opened.
        draft: path; None for the packaged one where ``dump`` is the packaged sample's.
        target: folder of the target.
    """
    from eagle3diag.report.sample import sample
    from eagle3diag.rules.case import check

    if draft is None:
        try:
            paths = sample()
        except UsageError:
            return ()
        if paths.dumps != dump.path:
            return ()
        draft, target = paths.draft, target or paths.target
    return (check(draft, target=target, dump=dump, select=("DMP",)),)


def opened(draft: str | None = None, dump: str | None = None, target: str | None = None) -> Opened:
    """Open all three.

    Args:
        draft: path; None for the packaged sample, which brings its own target and dumps.
        dump: file or folder of hidden states.
        target: folder of the target, or of its config and rows.

    Raises:
        CheckpointError: an input cannot be read.
        UsageError: a draft without a dump, or no sample here.
    """
    from eagle3diag.rules.case import make_case

    if draft is None:
        from eagle3diag.report.sample import sample

        paths = sample()
        draft, target, dump = paths.draft, target or paths.target, dump or paths.dumps
    if dump is None:
        raise UsageError("no dump given: name a file or folder of the target's hidden states")
    case = make_case(draft, target=target, dump=dump)
    assert case.dump is not None
    if case.dump.format == "unknown":  # a check says so as a finding; nothing can be measured on it
        raise CheckpointError(case.dump.issues[0].message)
    return Opened(checkpoint=case.draft, spec=case.spec, dump=case.dump, target=case.target)
