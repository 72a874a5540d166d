"""One ranked list of causes for the acceptance that a log shows, with the evidence for and against each, and the next experiment.

Evidence comes from the log (its pattern, its warnings, the layers it names), from the rules' findings, from what the draft does on a
dump, from the training run's metrics and from another draft's log on the same server. Each piece adds to or takes from the causes it
bears on; what the counts exclude stands below everything they allow. Weights are few and round: 4 settles, 2 counts, 1 hints. Two answers
are always among the candidates: the checkpoint is innocent, and the wiring is sound but the draft weak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Piece, Shown, data, plain
from eagle3diag.errors import CheckpointError
from eagle3diag.rules.explain_words import CAUSES, CODES, FAULTS, WIRING_KINDS, experiment
from eagle3diag.rules.model import Case, Report, Severity
from eagle3diag.rules.registry import NotJudged

if TYPE_CHECKING:
    from eagle3diag.checkpoint.wiring import Wiring
    from eagle3diag.draft.wirings import Candidate
    from eagle3diag.rules.srv_look import Expected
    from eagle3diag.serving.compatible import Compared, Compatibility
    from eagle3diag.serving.model import ServingLog

__all__ = ["Cause", "Explanation", "explain"]

SETTLES, COUNTS, HINTS = 4.0, 2.0, 1.0
_LOW = 1.3  #: length up to which a reference draft is taken to collapse too
_LOW_RATE = 0.18  # drafted rate, in chains of up to 5
_WELL = 1.6  #: length from which it is taken to be well served
_LISTED = 12
_LONGEST = 8  # chain up to which a log that does not tell its own may reach


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Cause(Piece):
    """One candidate.

    Attributes:
        name: in words; for wirings the difference to what was trained, several where counts cannot tell them apart.
        kind: which sort (`explain_words.CAUSES`).
        score: sum of the evidence; only its order means something.
        for_, against: the pieces of evidence in words.
        group: number of the wirings' group, 0 for other causes.
        excluded: the counts rule it out.
        members: names of the wirings of a group, the nearest first.
    """

    name: str
    kind: str
    score: float
    for_: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    group: int = 0
    excluded: bool = False
    members: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one cause."""
        return data(
            {
                "name": self.name,
                "kind": self.kind,
                "score": round(self.score, 2),
                "for": list(self.for_),
                "against": list(self.against),
                "group": self.group or None,
                "excluded": self.excluded,
                "members": list(self.members),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """The causes, the likeliest first, and what would separate the first two.

    ``compared`` is what the dump says of the wirings, None without one.
    """

    observed: float
    causes: tuple[Cause, ...]
    experiment: str
    compared: Compatibility | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``explanation``."""
        return {
            "observed_length": plain(round(self.observed, 4)),
            "causes": [c.to_dict() for c in self.causes],
            "next_experiment": self.experiment,
            "compatible": None if self.compared is None else self.compared.to_dict(),
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class _Scales:
    """Evidence by kind of cause."""

    score: dict[str, float] = field(default_factory=dict)
    pro: dict[str, list[str]] = field(default_factory=dict)
    contra: dict[str, list[str]] = field(default_factory=dict)

    def add(self, weight: float, text: str, *kinds: str) -> None:
        for kind in kinds:
            self.score[kind] = self.score.get(kind, 0.0) + weight
            side = self.pro if weight > 0 else self.contra
            told = side.setdefault(kind, [])
            if text not in told:
                told.append(text)


def explain(report: Report) -> Explanation | None:
    """Why acceptance is what the log shows; None where there is no log, or too little in it.

    Args:
        report: of a case with a log; its findings count as evidence.
    """
    from eagle3diag.serving.patterns import enough

    case = report.case
    log = case.log
    if log is None or log.acceptance_length is None or not enough(log):
        return None
    wrong = any(f.code.startswith("SRV") and f.severity is not Severity.INFO for f in report.findings)
    if not (wrong or case.has("draft") or case.control is not None or case.training is not None):
        return None  # nothing to explain, and nothing to explain it with
    scales = _Scales()
    notes: list[str] = []
    _findings(report, scales)
    _pattern(log, scales)
    _warnings(case, log, scales)
    _control(case, log, scales)
    compared, predicted = _dump(case, log, scales, notes)
    _training(case, log, scales)
    _settled(case, scales, predicted is not None)
    causes = _listed(scales, compared)
    return Explanation(
        observed=log.acceptance_length,
        causes=tuple(causes),
        experiment=experiment(causes, case, compared, [f for f in report.findings if f.severity is Severity.ERROR]),
        compared=compared,
        notes=tuple(notes),
    )


# ------------------------------------------------------------------ evidence
def _findings(report: Report, scales: _Scales) -> None:
    for f in report.findings:
        kinds = CODES.get(f.code)
        if kinds is None or f.severity is Severity.INFO:
            continue
        weight = COUNTS + HINTS if f.severity is Severity.ERROR else HINTS
        scales.add(weight, f"{f.code}: {f.title}", *kinds)
    weak = [f for f in report.findings if f.code == "AGR707"]
    if weak:
        scales.add(COUNTS, f"AGR707: {weak[0].title}", "weak")


def _pattern(log: ServingLog, scales: _Scales) -> None:
    from eagle3diag.serving.patterns import collapsed, decay, flat, nan_signature, recurrence, wrong_features

    if found := nan_signature(log):
        scales.add(SETTLES, found.text, "nan")
    if found := recurrence(log):
        scales.add(SETTLES, found.text, "recurrence")
        scales.add(-COUNTS, f"the first position is sound ({100 * log.per_position[0]:.0f} %)", "states", "mapping", "method", "weights")
    if found := wrong_features(log):
        scales.add(COUNTS, found.text, "states", "mapping", "weights", "method")
        scales.add(-COUNTS, f"already the first position fails ({100 * log.per_position[0]:.1f} %)", "recurrence", "weak", "texts")
    elif (found := collapsed(log)) and not nan_signature(log):
        scales.add(HINTS, found.text, "states", "mapping", "weights", "method")
        scales.add(-COUNTS, "a trained draft is never this bad", "weak", "texts")
    if found := flat(log):
        scales.add(HINTS, found.text, "repetition")
    if falls := decay(log.contexts):
        scales.add(
            SETTLES,
            f"length {falls.short:.2f} at {falls.short_context:,.0f} tokens of context, {falls.long:.2f} at {falls.long_context:,.0f}",
            "context",
        )
    for t in log.traps:
        if t.kind == "simulated":
            scales.add(2 * SETTLES, t.text, "simulated")
        elif t.kind in ("bonus left out", "long chain", "tree", "above one", "requests", "bonus in rate"):
            scales.add(HINTS if (log.acceptance_length or 1.0) < _WELL else COUNTS, t.text, "metric")


def _warnings(case: Case, log: ServingLog, scales: _Scales) -> None:
    """Lines of the log that bear on a cause, and the layers it names."""
    for w in log.warnings:
        kind = {"weight dropped": "weights", "weights not initialised": "weights", "not a number": "nan", "context cut": "context"}.get(
            w.key
        )
        if kind is not None:
            scales.add(SETTLES, f"the log says: {w.text}", kind)
    method = (log.launched.method or "").lower()
    if method and case.has("draft") and case.spec.algorithm == "eagle3" and method not in ("eagle3", "eagle-3") and "eagle3" not in method:
        scales.add(SETTLES, f"the log names the method {log.launched.method}", "method")
    elif method in ("eagle3", "eagle-3"):
        scales.add(-HINTS, f"the log names the method {log.launched.method}", "method")
    layers = log.launched.aux_layers
    trained = case.spec.wiring.aux_layers if case.has("draft") else None
    if layers is not None and trained is not None:
        shift = case.served.aux.shift if case.served is not None else None
        read = {tuple(sorted(k + by for k in layers)) for by in ((shift,) if shift is not None else (0, 1))}
        ids, own = ", ".join(map(str, layers)), ", ".join(map(str, trained))
        if tuple(sorted(trained)) in read:
            scales.add(-COUNTS, f"the log names the layers it was trained on ({ids})", "states")
        else:
            scales.add(SETTLES, f"the log names layers {ids}, the draft was trained on {own}", "states")


def _control(case: Case, log: ServingLog, scales: _Scales) -> None:
    """Another draft on the same server."""
    other = case.control
    if other is None or other.acceptance_length is None:
        return
    length, own = other.acceptance_length, log.acceptance_length or 1.0
    rate = f" (drafted rate {100 * other.acceptance_rate:.0f} %)" if other.acceptance_rate is not None else ""
    low = length <= _LOW or (length < _WELL and other.k is not None and other.k <= 5 and (other.acceptance_rate or 1.0) <= _LOW_RATE)
    if low or (own < _WELL and length < own + 0.15 and length < _WELL):
        told = f"another draft on the same server is accepted badly too: length {length:.2f}{rate}"
        scales.add(SETTLES, told, "engine")
        scales.add(-COUNTS, told, "weights", "mapping", "file", "weak", "texts", "config")
    elif length >= own + 0.3:
        told = f"another draft on the same server reaches {length:.2f}{rate}"
        scales.add(-SETTLES, told, "engine")
        scales.add(HINTS, told, "weights", "mapping", "file", "config", "weak")


def _dump(case: Case, log: ServingLog, scales: _Scales, notes: list[str]) -> tuple[Compatibility | None, Expected | None]:
    """What the trained wiring gets offline, and which wirings would give the log's numbers."""
    from eagle3diag.rules.agr_look import look, served
    from eagle3diag.rules.srv_look import from_dump, own_chain
    from eagle3diag.serving.compatible import OWN, Wirings, observed

    if not (case.has("draft") and case.has("dump")):
        return None, None
    seen = observed(log)
    assert seen is not None
    try:
        expected = from_dump(case, own_chain(log))
        at = look(case)
        wirings = Wirings(at.bench, case.target, extra=_as_served(case, at.bench.base))
        compared = wirings.compare(seen, alone=True)
    except (NotJudged, CheckpointError) as why:
        notes.append(f"the dump says nothing: {why}")
        return None, None
    chain = "" if log.k is not None else f" in chains of {expected.k} (the log does not tell its own)"
    told = f"the draft's own wiring gets {expected.length:.2f} on the dump{chain}, {seen.length:.2f} in service"
    own = compared.own
    if own.compatible:
        scales.add(SETTLES, f"{told}: within {own.z:.1f} standard errors", "weak" if expected.length < 1.8 else "sound")
        scales.add(-COUNTS, f"{told}: as predicted", *FAULTS, "engine", "texts")
        return compared, expected
    if log.k is None and seen.length > expected.length:
        longest = from_dump(case, _LONGEST)
        if seen.length <= longest.length + 2 * seen.error + longest.error:
            words = f"{told}, {longest.length:.2f} in chains of {_LONGEST}: in between"
            scales.add(COUNTS, words, "weak" if longest.length < 1.8 else "sound")
            return compared, expected
    if seen.length > expected.length + 2 * seen.error + expected.error:
        scales.add(COUNTS, f"{told}: service is easier than the dump", "repetition", "texts")
        scales.add(-SETTLES, f"{told}: more than predicted", *FAULTS, "engine", "weak")
        return compared, expected
    by = "below" if seen.length < expected.length - 0.02 else "away by position (" + _positions(seen.joint, own.joint) + ")"
    scales.add(-2 * SETTLES, f"{told}: {own.z:.1f} standard errors {by}", "weak", "sound")
    scales.add(COUNTS, told, "engine")
    scales.add(HINTS, told, "texts")
    compared = wirings.compare(seen)
    if case.served is not None:
        try:
            engine = served(case)
        except (NotJudged, CheckpointError):
            engine = None
        if engine is not None and engine.change:
            k = min(seen.k, max(engine.served.expected_length))
            length = engine.served.expected_length[k]
            near = abs(length - seen.length) <= 0.05 + 3 * seen.error
            label = case.served.contract.label
            kinds = _kinds_of(at.bench.base.differences(case.served.wiring))
            if near:
                scales.add(SETTLES, f"{label} would run it with {engine.change}, which gets {length:.2f} on the dump", *kinds)
            else:
                scales.add(HINTS, f"{label} would run it with {engine.change}, but that gets {length:.2f}", *kinds)
    if not any(c.name != OWN for c in compared.compatible):
        scales.add(HINTS, "no single wiring fault gives these counts on the dump", "engine", "texts")
    return compared, expected


def _as_served(case: Case, base: Wiring) -> list[Candidate]:
    """The wiring that the engine would run, where it is another than the draft's own."""
    from eagle3diag.draft.wirings import Candidate, described

    served = case.served
    if served is None or served.refused is not None or not base.differences(served.wiring):
        return []
    change = base.differences(served.wiring)
    name = f"{described(base, served.wiring)} (as {served.contract.label} would run it)"
    return [Candidate(name=name, kind="engine", wiring=served.wiring, change=change)]


def _positions(seen: Sequence[float], own: Sequence[float]) -> str:
    a, b = (" ".join(f"{100 * p:.1f}" for p in some[: len(own)]) for some in (seen, own))
    return f"{a} % against {b} %"


def _kinds_of(change: Iterable[str]) -> tuple[str, ...]:
    """Kinds of cause that a change of these fields of a wiring is about."""
    return tuple(sorted({WIRING_KINDS[name] for name in change}))


def _training(case: Case, log: ServingLog, scales: _Scales) -> None:
    from eagle3diag.rules.srv_look import from_training, own_chain

    if case.training is None or log.acceptance_length is None:
        return
    try:
        expected = from_training(case, own_chain(log))
    except NotJudged:
        return
    share = (log.acceptance_length - 1) / (expected.length - 1) if expected.length > 1 else 1.0
    first = f"{100 * expected.joint[0]:.1f} % at the first step, " if expected.joint else ""
    told = (
        f"training ({expected.source}): {first}length {expected.length:.2f} in chains of {expected.k}; service {log.acceptance_length:.2f}"
    )
    if share < 0.7:
        scales.add(-COUNTS, told, "weak")
        scales.add(HINTS, told, "engine", "states", "weights", "mapping", "recurrence", "texts")
    elif share >= 0.85:
        scales.add(HINTS, told, "weak", "sound")
        scales.add(-HINTS, told, *FAULTS)


def _settled(case: Case, scales: _Scales, predicted: bool) -> None:
    """Candidates that stand even where nothing speaks for them."""
    for kind in ("engine", "weak"):
        scales.score.setdefault(kind, 0.0)
    files = case.has("draft")
    if files and not predicted and scales.score["engine"] < COUNTS and all(s <= 0 for k, s in scales.score.items() if k in FAULTS):
        scales.add(HINTS, "nothing found in the files explains it", "engine")


# ------------------------------------------------------------------ the list
def _listed(scales: _Scales, compared: Compatibility | None) -> list[Cause]:
    from eagle3diag.serving.compatible import OWN

    wirings = [c for c in compared.compared if c.name != OWN] if compared is not None else []
    allowed = [c for c in wirings if c.compatible]
    causes = [_group([c for c in allowed if c.group == g], scales) for g in sorted({c.group for c in allowed})]
    covered = {kind for c in allowed for kind in _kinds_of(c.change)}
    tried = {kind for c in wirings for kind in _kinds_of(c.change)}
    for kind, score in scales.score.items():
        if kind in covered and kind in FAULTS:
            continue
        excluded = kind in FAULTS and kind in tried
        contra = list(scales.contra.get(kind, ()))
        if excluded:
            nearest = min((c for c in wirings if kind in _kinds_of(c.change)), key=lambda c: c.counts_z)
            contra.append(
                f"tried on the dump, the nearest ({nearest.name}) gets {nearest.length:.2f}: {nearest.z:.1f} standard errors away"
            )
        elif score < 0 and not scales.pro.get(kind):
            excluded = True
        name = CAUSES[kind]
        causes.append(
            Cause(name=name, kind=kind, score=score, for_=tuple(scales.pro.get(kind, ())), against=tuple(contra), excluded=excluded)
        )
    causes.sort(key=lambda c: (c.excluded, -round(c.score, 6), c.group or len(causes), c.name))
    return causes[:_LISTED]


def _group(members: Sequence[Compared], scales: _Scales) -> Cause:
    """Wirings that counts cannot tell apart, as one cause: the best evidence of any member counts."""
    kinds = list(dict.fromkeys(kind for c in members for kind in _kinds_of(c.change)))
    best = max(kinds, key=lambda k: scales.score.get(k, 0.0))
    first = members[0]
    # what this engine is known to run is named first, whichever the counts happen to come nearest to; then what the files speak for
    backed = sorted(members, key=lambda c: (c.kind != "engine", -max((scales.score.get(k, 0.0) for k in _kinds_of(c.change)), default=0.0)))
    names = tuple(c.name for c in backed)
    shown = names[0] if len(names) == 1 else f"one of {len(names)} wirings that these counts cannot tell apart: " + "; ".join(names[:4])
    shown += f"; and {len(names) - 4} more" if len(names) > 4 else ""
    fits = f"{first.name} gets {first.length:.2f} on the dump, {first.z:.1f} standard errors from the log"
    pro = (fits, *dict.fromkeys(t for k in kinds for t in scales.pro.get(k, ())))
    contra = tuple(dict.fromkeys(t for t in scales.contra.get(best, ())))
    score = scales.score.get(best, 0.0) + COUNTS + HINTS * (1 - min(first.counts_z, 3.0) / 3)
    return Cause(name=shown, kind=best, score=score, for_=pro, against=contra, group=first.group, members=names)
