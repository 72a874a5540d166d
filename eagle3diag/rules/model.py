"""The nouns of judgement: what the user handed in (``Case``), what was found (``Finding``), and the sum (``Report``).

Findings never raise. A rule that lacks its evidence is skipped with a reason, a rule that crashes is listed as crashed, and
neither counts as passed. The verdict: ``broken`` (an error), ``suspect`` (a warning), ``healthy``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from eagle3diag.display import Piece, Shown, data

if TYPE_CHECKING:  # a check without an engine never pays for the nouns of that room
    from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
    from eagle3diag.engines.model import Launch, ServedDraft
    from eagle3diag.hidden.model import HiddenDump
    from eagle3diag.serving.model import ServingLog, Training

__all__ = ["Case", "Finding", "Outcome", "Report", "Severity", "Workings", "family_rank"]

T = TypeVar("T")

#: causes first: what lies in the files and what the engine does with them, then what that does to the states, the acceptance and the log
FAMILIES = ("CFG", "KEY", "VAL", "ENG", "AUX", "DMP", "AGR", "SRV")


def family_rank(code: str) -> int:
    """0 for the family whose findings cause those of the others."""
    return FAMILIES.index(code[:3]) if code[:3] in FAMILIES else len(FAMILIES)


class Severity(StrEnum):
    """How much a finding harms this draft."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return ("error", "warning", "info").index(self.value)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Finding(Piece):
    """One judged fact.

    Attributes:
        title: one line, what is wrong with *this* draft, with names and numbers.
        evidence: names and numbers, JSON-able, shown as a table.
        remedy: one or two sentences: what to do.
        engines: labels of the engines concerned, empty for all.
        where: tensor, config key or flag the finding is about.
    """

    code: str
    severity: Severity
    title: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    engines: tuple[str, ...] = ()
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of a finding."""
        return data(
            {
                "code": self.code,
                "severity": self.severity.value,
                "title": self.title,
                "where": self.where,
                "evidence": dict(self.evidence),
                "remedy": self.remedy,
                "engines": list(self.engines),
            }
        )


class Workings:
    """What rules worked out on the way, so that one does not repeat what another did: a dump read, a draft run on it.

    It lives as long as the case it belongs to, and holds one answer a question: the last, with what it depends on.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[str, tuple[tuple[object, ...], Any]] = {}

    def once(self, question: str, of: tuple[object, ...], answer: Callable[[], T]) -> T:
        """The answer held, where it was given on the same inputs; else it is worked out.

        Args:
            question: a name.
            of: everything the answer depends on.
        """
        held = self._held.get(question)
        if held is None or not all(a is b or a == b for a, b in zip(held[0], of, strict=True)):
            held = self._held[question] = (of, answer())
        done: T = held[1]
        return done

    def __reduce__(self) -> tuple[type[Workings], tuple[()]]:
        return Workings, ()  # a copy of a case works it out again


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Case(Piece):
    """What the user handed in, opened and normalised once. Rules look at nothing else.

    ``other`` is a second draft to compare with (VAL310). ``dump`` holds hidden states of the target; one that could not be opened is
    there without samples and with the reason among its issues (DMP601). ``headers_only`` forbids reading tensor data. ``log`` is what a
    server printed, ``control`` the same server's log with another draft, ``baseline`` its tokens per second without one, ``training`` what
    the training run says of this draft. ``notes`` say what was assumed on the way (the newest version on record, an engine taken from
    the launch line). ``workings`` is what rules found out on the way. Where a log alone is judged there is no draft: ``draft`` is
    an empty checkpoint then.
    """

    draft: Checkpoint
    spec: DraftSpec
    target: TargetSpec | None = None
    served: ServedDraft | None = None
    launch: Launch | None = None
    other: Checkpoint | None = None
    dump: HiddenDump | None = None
    headers_only: bool = False
    notes: tuple[str, ...] = ()
    log: ServingLog | None = None
    control: ServingLog | None = None
    baseline: float | None = None
    training: Training | None = None
    workings: Workings = field(default_factory=Workings, compare=False, repr=False)

    @property
    def measured_on(self) -> tuple[object, ...]:
        """What everything about the dump and the draft on it depends on; the engine is not among it."""
        return self.draft, self.spec, self.dump, self.target

    def has(self, need: str) -> bool:
        """Whether the evidence ``need`` (draft, values, target, engine, launch, other, dump, dump-file, log, baseline, metrics) is there.

        ``dump`` is a dump with samples to read, ``dump-file`` anything that was handed in as one.
        """
        present = {
            "draft": self.draft.form != "none" or bool(self.draft.configs) or self.log is None,
            "values": not self.headers_only and bool(self.draft.tensors),
            "target": self.target is not None,
            "engine": self.served is not None,
            "launch": self.launch is not None,
            "other": self.other is not None,
            "dump": self.dump is not None and len(self.dump) > 0,
            "dump-file": self.dump is not None,
            "log": self.log is not None,
            "baseline": self.baseline is not None,
            "metrics": self.training is not None,
        }
        return present[need]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome(Piece):
    """What became of one rule: ``ran`` (findings, maybe none), ``skipped`` (why) or ``crashed`` (why)."""

    code: str
    status: Literal["ran", "skipped", "crashed"]
    findings: tuple[Finding, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(Shown):
    """All outcomes of one case."""

    case: Case
    outcomes: tuple[Outcome, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Worst first, and among equals the cause before its consequence."""
        found = [f for o in self.outcomes for f in o.findings]
        return tuple(sorted(found, key=lambda f: (f.severity.rank, family_rank(f.code), f.code, f.where)))

    @property
    def skipped(self) -> tuple[Outcome, ...]:
        """Rules that did not run, with the reason; crashed ones included."""
        return tuple(o for o in self.outcomes if o.status != "ran")

    @property
    def verdict(self) -> Literal["broken", "suspect", "healthy"]:
        """``broken`` with an error, ``suspect`` with a warning, else ``healthy``."""
        worst = min((f.severity.rank for f in self.findings), default=2)
        return ("broken", "suspect", "healthy")[worst]

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``check``: verdict, draft, engine, findings, skipped, passed, and what was assumed; with a log also that.

        Of a log alone there is no ``draft``, ``engine`` and ``target``.
        """
        case = self.case
        about = {"draft": _draft(case), "engine": _engine(case), "target": _target(case), "headers_only": case.headers_only}
        return data(
            {
                "schema": 1,
                "verdict": self.verdict,
                **(about if case.has("draft") else {}),
                **_logged(case),
                "findings": [f.to_dict() for f in self.findings],
                "skipped": [{"code": o.code, "why": o.why, "status": o.status} for o in self.skipped],
                "passed": [o.code for o in self.outcomes if o.status == "ran" and not o.findings],
                "notes": list(case.notes),
            }
        )


def _draft(case: Case) -> dict[str, Any]:
    """The draft in a few facts."""
    draft, spec = case.draft, case.spec
    return {
        "path": draft.path,
        "form": draft.form,
        "files": list(draft.files),
        "configs": [c.file for c in draft.configs],
        "tensors": len(draft.tensors),
        "bytes": draft.bytes_total,
        "dialect": spec.dialect.to_dict(),
        "algorithm": spec.algorithm,
        "aux": spec.aux.to_dict(),
    }


def _engine(case: Case) -> dict[str, Any] | None:
    if case.served is None:
        return None
    contract = case.served.contract
    return {
        "label": contract.label,
        "engine": contract.engine,
        "version": contract.asked,
        "contract": contract.version,
        "runner": contract.runner,
        "origin": contract.origin,
    }


def _target(case: Case) -> dict[str, Any] | None:
    return None if case.target is None else {"path": case.target.path, "architecture": case.target.architecture.value}


def _logged(case: Case) -> dict[str, Any]:
    """What a log adds; nothing without one."""
    if case.log is None:
        return {}
    from eagle3diag.serving.payoff import payoff

    pay = payoff(case.log, case.baseline) if case.baseline is not None else None
    parts = {"log": case.log, "control": case.control, "training": case.training, "payoff": pay}
    return {name: None if part is None else part.to_dict() for name, part in parts.items()}
