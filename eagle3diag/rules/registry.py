"""The registry: every rule by its code, and the one place that runs them.

A rule is a generator function over a ``Case``. Its docstring is its page: the first line is the summary, the sections become
``docs/rules/CODE.md``. Registration does no more than a few dict look-ups, because ``check --headers-only`` has a start-up budget;
the sections are checked by a test. A rule that lacks its evidence is skipped with a reason in words, a rule that raises is listed
as crashed with the reason; neither ever counts as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from eagle3diag.display import Piece
from eagle3diag.errors import CheckpointError, UsageError, escaped
from eagle3diag.rules.model import Case, Finding, Outcome, Report, Severity

__all__ = ["CATALOGUE", "RULES", "SECTIONS", "NotJudged", "Rule", "finding", "in_catalogue", "load_all", "rule", "run"]

Look = Callable[[Case], Iterator[Finding]]

#: family -> first and last number in the catalogue. Codes are stable: extend a family at its end, never renumber.
CATALOGUE: dict[str, tuple[int, int]] = {
    "CFG": (101, 115),
    "KEY": (201, 210),
    "VAL": (301, 310),
    "AUX": (401, 407),
    "ENG": (501, 508),
    "DMP": (601, 610),
    "AGR": (701, 707),
    "SRV": (801, 809),
}

#: sections every rule's docstring has, in this order, each a line ``## …``.
SECTIONS = (
    "What is wrong",
    "Why it costs acceptance",
    "How it is detected",
    "How to fix it",
    "Engine versions",
    "Source",
)

#: modules that register rules when imported (each may import further ones of its family).
MODULES = (
    "cfg",
    "cfg_shapes",
    "cfg_forward",
    "key",
    "key_shapes",
    "key_files",
    "val",
    "aux_layers",
    "aux_target",
    "eng",
    "eng_engine",
    "dmp",
    "dmp_slots",
    "dmp_profile",
    "agr",
    "srv",
    "srv_more",
)


class NotJudged(Exception):
    """Raised by a rule whose evidence is there but says too little; the reason, one line, is listed as why it was skipped."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rule(Piece):
    """One registered rule.

    Attributes:
        needs: evidence without which the rule is skipped; ``a|b`` is satisfied by either.
        summary: the first line of the docstring.
        look: the generator that yields findings.
    """

    code: str
    severity: Severity
    needs: tuple[str, ...]
    summary: str
    look: Look


#: every registered rule by code, in the order of registration; ``load_all`` fills and sorts it.
RULES: dict[str, Rule] = {}


def in_catalogue(code: str) -> bool:
    """Whether ``code`` is one of the catalogue's codes."""
    first, last = CATALOGUE.get(code[:3], (1, 0))
    return code[3:].isdigit() and first <= int(code[3:]) <= last


def rule(code: str, *, severity: Severity, needs: tuple[str, ...] = ("draft",)) -> Callable[[Look], Look]:
    """Registers a rule.

    Args:
        code: a code of the catalogue, not yet taken.
        severity: the default of its findings.
        needs: what the case must hold: ``draft``, ``values``, ``target``, ``engine``, ``launch``, ``other``, ``dump``,
            ``dump-file``, ``log``, ``baseline``, ``metrics``, or ``a|b``.

    Raises:
        ValueError: the code is not in the catalogue or already taken.
    """

    def register(look: Look) -> Look:
        if not in_catalogue(code):
            raise ValueError(f"{code} is not in the rule catalogue")
        if code in RULES and RULES[code].look.__qualname__ != look.__qualname__:
            raise ValueError(f"{code} is registered twice: {RULES[code].look.__qualname__} and {look.__qualname__}")
        summary = (look.__doc__ or "").strip().split("\n", 1)[0]
        RULES[code] = Rule(code=code, severity=severity, needs=needs, summary=summary, look=look)
        return look

    return register


def load_all() -> Mapping[str, Rule]:
    """Imports every family once and returns the rules in the order of their codes."""
    for module in MODULES:
        import_module(f"eagle3diag.rules.{module}")
    ordered = sorted(RULES.items(), key=lambda item: int(item[0][3:]))
    RULES.clear()
    RULES.update(ordered)
    return RULES


def finding(
    code: str,
    title: str,
    *,
    severity: Severity | None = None,
    evidence: Mapping[str, Any] | None = None,
    remedy: str = "",
    where: str = "",
    engines: Iterable[str] = (),
) -> Finding:
    """A finding with the rule's default severity unless one is given."""
    return Finding(
        code=code,
        severity=RULES[code].severity if severity is None else severity,
        title=title,
        evidence=dict(evidence or {}),
        remedy=remedy,
        engines=tuple(engines),
        where=where,
    )


_MISSING = {
    "target": "no target given: pass --target",
    "engine": "no engine given: pass --engine, for example --engine sglang==0.5.9",
    "launch": "no launch line given: pass --launch or --launch-file",
    "other": "no second draft given to compare with",
    "draft": "no draft given",
    "dump": "no hidden-state dump given: pass --dump to check",
    "dump-file": "no hidden-state dump given: pass --dump to check",
    "log": "no serving log given: pass --log",
    "baseline": "no throughput without speculation given: pass --baseline TOK_PER_S",
    "metrics": "no training metrics given: pass --metrics",
}


def _lacking(case: Case, needs: Iterable[str]) -> str:
    """Why the rule cannot run, in words; empty where all evidence is there."""
    reasons = []
    for need in needs:
        ways = need.split("|")
        if any(case.has(way) for way in ways):
            continue
        if "values" in ways:
            reasons.append("tensor values not read: --headers-only" if case.headers_only else "the draft holds no tensors")
        else:
            if "dump" in ways and case.has("dump-file"):
                reasons.append("no sample of the dump can be read")
            else:
                reasons.append(" or ".join(_MISSING[way] for way in ways))
    return "; ".join(reasons)


def _chosen(select: Iterable[str] | None) -> list[Rule]:
    if select is None:
        return list(RULES.values())
    wanted = [s.upper() for s in ([select] if isinstance(select, str) else select)]
    for s in wanted:
        if not any(code.startswith(s) for code in RULES) or not s:
            families = ", ".join(sorted({code[:3] for code in RULES}))
            raise UsageError(f"no rule {escaped(s)!r}: give a code such as CFG101, or one of the families {families}")
    return [r for r in RULES.values() if any(r.code.startswith(s) for s in wanted)]


def outcome(case: Case, chosen: Rule) -> Outcome:
    """What one rule makes of a case; a rule on the dump alone is asked once, though rules on the draft ask for its outcome too."""
    if chosen.code.startswith("DMP"):
        return case.workings.once(chosen.code, (*case.measured_on, chosen), lambda: _outcome(case, chosen))
    return _outcome(case, chosen)


def _outcome(case: Case, chosen: Rule) -> Outcome:
    why = _lacking(case, chosen.needs)
    if why:
        return Outcome(code=chosen.code, status="skipped", why=why)
    try:
        found = tuple(chosen.look(case))
    except NotJudged as little:
        return Outcome(code=chosen.code, status="skipped", why=str(little))
    except CheckpointError as error:  # data behind a sound header that cannot be read: KEY210 says so, this rule judged nothing
        return Outcome(code=chosen.code, status="skipped", why=f"could not read what it judges: {error}")
    except Exception as error:  # a bug in one rule must not hide the other findings
        why = f"the rule crashed, nothing was judged: {type(error).__name__}: {escaped(error, 160)}"
        return Outcome(code=chosen.code, status="crashed", why=why)
    return Outcome(code=chosen.code, status="ran", findings=found)


def run(case: Case, select: Iterable[str] | None = None) -> Report:
    """Runs the rules over a case.

    Args:
        case: what the user handed in.
        select: codes or family prefixes (``CFG``); all rules where None.

    Returns:
        One outcome per rule: ran, skipped (why) or crashed (why).

    Raises:
        UsageError: ``select`` names no rule.
    """
    load_all()
    outcomes = []
    for chosen in _chosen(select):
        outcomes.append(outcome(case, chosen))
    return Report(case=case, outcomes=tuple(outcomes))
