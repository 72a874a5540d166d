"""What a log's numbers look like, by the signatures that reports of real faults share (field_reports.md 1.14).

Each pattern says what it needs to be told from chance: few verifications are no pattern. Thresholds are set so that weak but sound drafts,
whose rates fall fast, match none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3diag.serving.model import ContextBin, ServingLog

__all__ = ["Decay", "Pattern", "collapsed", "decay", "flat", "nan_signature", "partly_collapsed", "recurrence", "wrong_features"]

LEAST = 50  #: verifications below which nothing is said
COLLAPSED = 1.06  #: length up to which next to nothing is accepted
LITTLE = 1.15  #: length up to which hardly anything is
_SOUND_FIRST = 0.25  # first position from which it counts as sound
_BROKEN = 0.12  # conditional rate below which a later position counts as gone
_FALL = 0.35  # against the conditional rate before it
_FEW = 0.12  # first position below which the states are taken to be wrong
_FLAT = 0.97  # last position over first from which rates are flat
_LONG = 1000  # tokens below which no context is long
_STRETCH = 20  # SGLang's decode lines (800 steps) that are a stretch of the log
_SPAN = 3.0  # times the context over which a fall is judged


@dataclass(frozen=True, slots=True)
class Pattern:
    """A signature that was seen."""

    kind: str
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decay:
    """How the length falls with context."""

    short: float
    long: float
    short_context: float
    long_context: float
    z: float


def enough(log: ServingLog) -> bool:
    """Whether the log rests on enough to be judged."""
    if log.basis in ("lifetime", "stated"):
        return log.readable
    return log.weight >= LEAST


def collapsed(log: ServingLog) -> Pattern | None:
    """Nothing, or hardly anything, is accepted."""
    length = log.acceptance_length
    if length is None or not enough(log):
        return None
    surely = length + 2 * (log.error or 0.0)
    if length <= COLLAPSED and surely <= LITTLE:
        return Pattern("collapsed", f"acceptance length {length:.2f}: next to nothing is accepted, every token costs a verification")
    if length <= LITTLE and surely <= LITTLE + 0.05:
        return Pattern("little", f"acceptance length {length:.2f}: hardly anything is accepted")
    return None


def partly_collapsed(log: ServingLog) -> Pattern | None:
    """The pooled length hides a collapse: of one of several engines, or of everything since some moment (a restart, another draft)."""
    length = log.acceptance_length
    if length is None or length <= LITTLE:
        return None
    for share in log.by_engine:
        told = share.windows >= _STRETCH if share.drafts is None else share.drafts >= LEAST
        if told and share.length <= COLLAPSED:
            others = max(s.length for s in log.by_engine)
            text = f"{share.label}: acceptance length {share.length:.2f}, next to nothing is accepted, while others reach {others:.2f}"
            return Pattern("one engine", text, {"engine": share.label, "its_length": round(share.length, 4), "its_lines": share.windows})
    windows = 0
    for point in reversed(log.series):
        if point.length > COLLAPSED:
            break
        windows += point.windows
    before = [p for p in log.series if p.length > COLLAPSED]
    total = sum(p.windows for p in log.series)
    least = _STRETCH if log.basis == "windows" else _STRETCH // 2
    if before and windows >= least and total - windows >= 3:
        text = f"the last {windows:,} of {total:,} lines are at 1.00, where the log reached {max(p.length for p in before):.2f} before"
        return Pattern("since then", f"{text}: nothing is accepted any more", {"lines_at_1": windows, "lines": total})
    return None


def _surely_below(rate: float, of: float, limit: float) -> bool:
    """Whether a share of ``of`` trials is below ``limit`` by three standard errors of the limit."""
    limit = min(limit, 1.0)
    return of > 0 and rate < limit and (limit - rate) * of > 3 * math.sqrt(of * limit * (1 - limit))


def recurrence(log: ServingLog) -> Pattern | None:
    """A position that breaks off although those before it are sound: what is fed back between draft steps is wrong."""
    joint, drafts = log.per_position, float(log.drafts or 0)
    if len(joint) < 2 or joint[0] < _SOUND_FIRST or drafts < LEAST:
        return None
    before, alive = joint[0], drafts * joint[0]
    for i in range(1, len(joint)):
        rate = joint[i] / joint[i - 1] if joint[i - 1] > 0 else 0.0
        if rate < _BROKEN and rate < _FALL * before and _surely_below(rate, alive, max(_BROKEN, _FALL * before)):
            shown = ", ".join(f"{100 * p:.1f}" for p in joint)
            return Pattern(
                "recurrence",
                f"the first {'position is' if i == 1 else f'{i} positions are'} sound ({100 * joint[i - 1]:.1f} % reach "
                f"{'it' if i == 1 else 'the last of them'}), of those only {100 * rate:.1f} % pass position {i + 1}: {shown} %",
                {
                    "breaks_at": i + 1,
                    "conditional": round(rate, 4),
                    "before": round(before, 4),
                    "per_position": [round(p, 4) for p in joint],
                },
            )
        before, alive = rate, drafts * joint[i]
    return None


def wrong_features(log: ServingLog) -> Pattern | None:
    """A few per cent at the first position, and next to nothing after it: states, head or mapping are not what was trained."""
    joint, drafts = log.per_position, float(log.drafts or 0)
    if not joint or drafts < LEAST or joint[0] >= _FEW or not _surely_below(joint[0], drafts, _FEW + 0.05):
        return None
    later = joint[1] / joint[0] if len(joint) > 1 and joint[0] > 0 else 0.0
    if len(joint) > 1 and later > 0.4 and joint[1] > 0.02:
        return None
    shown = ", ".join(f"{100 * p:.1f}" for p in joint[:6])
    return Pattern(
        "wrong features",
        f"only {100 * joint[0]:.1f} % pass the first position and next to nothing the second ({shown} %)",
        {"per_position": [round(p, 4) for p in joint], "drafts": log.drafts},
    )


def nan_signature(log: ServingLog) -> Pattern | None:
    """Verifications accept none or all, and nothing in between."""
    k = log.k
    histogram = log.histogram
    if histogram is not None and len(histogram) > 2 and sum(histogram) >= 30:
        total, between = sum(histogram), sum(histogram[1:-1])
        none, every = histogram[0], histogram[-1]
        # a log in which only some requests are hit has a few in between
        few = between == 0 or (between <= 0.02 * total and none >= 0.2 * total)
        if few and min(none, every) >= 0.05 * total:
            rest = f"{between} something" if between else "none"
            text = f"of {total} verifications {none} accept nothing and {every} all {len(histogram) - 1}, {rest} in between"
            return _nan(text, {"histogram": list(histogram)})
    elif log.per_position and k and k >= 2 and (log.drafts or 0) >= 100 and histogram is None:
        first, last = log.per_position[0], log.per_position[-1]
        same = max(abs(p - first) for p in log.per_position) <= 0.0006
        if same and 0.05 <= first <= 0.8 and last > 0:
            text = f"every position is accepted in {100 * first:.1f} %: a verification accepts all {k} tokens or none"
            return _nan(text, {"per_position": [round(p, 4) for p in log.per_position]})
    if k and k >= 2 and (log.drafts or 0) >= 100 and log.drafted and log.accepted == log.drafted:
        return _nan(f"each of {log.drafts:,} verifications accepts all {k} tokens", {"drafts": log.drafts, "accepted": log.accepted})
    if log.basis == "windows" and k and log.lengths and log.windows >= 6:
        full = sum(n for length, n in log.lengths.items() if abs(length - (k + 1)) < 0.005)
        ends = full + sum(n for length, n in log.lengths.items() if length <= 1.005)
        counted = sum(log.lengths.values())
        if ends == counted and 0.05 * counted <= full:
            rest = f", the other {counted - full} exactly 1.00" if full < counted else ""
            text = f"{full} of {counted} windows have a length of exactly {k + 1}{rest}"
            return _nan(text, {"lengths": {f"{length:.2f}": n for length, n in log.lengths.items()}, "k": k})
    return None


def _nan(text: str, evidence: dict[str, Any]) -> Pattern:
    return Pattern("not a number", text, evidence)


def flat(log: ServingLog) -> Pattern | None:
    """Later positions are accepted as often as the first: the text repeats itself, and the draft with it."""
    joint, drafts = log.per_position, float(log.drafts or 0)
    nan = nan_signature(log)
    if nan is not None and not (log.acceptance_length and log.k and log.acceptance_length >= log.k + 0.995):
        return None
    if len(joint) >= 3 and drafts >= LEAST and joint[0] >= 0.5 and joint[-1] >= _FLAT * joint[0]:
        return Pattern(
            "repetition",
            f"the last position is accepted nearly as often as the first ({100 * joint[-1]:.1f} % against {100 * joint[0]:.1f} %)",
            {"per_position": [round(p, 4) for p in joint]},
        )
    histogram = log.histogram
    if histogram is not None and len(histogram) > 3 and sum(histogram) >= LEAST:
        total = sum(histogram)
        if histogram[-1] >= 0.5 * total and histogram[0] >= 0.05 * total and sum(histogram[1:-1]) <= 0.05 * total:
            return Pattern(
                "repetition",
                f"{histogram[-1]} of {total} verifications accept all, {histogram[0]} nothing, {sum(histogram[1:-1])} something in between",
                {"histogram": list(histogram)},
            )
    length, k = log.acceptance_length, log.k
    if not joint and length is not None and k and k >= 3 and log.weight >= LEAST and length >= 1 + 0.95 * k:
        return Pattern("repetition", f"acceptance length {length:.2f} of at most {k + 1}: nearly every drafted token is accepted", {"k": k})
    return None


def decay(contexts: Sequence[ContextBin]) -> Decay | None:
    """A fall of the length with the context of the requests, beyond what its windows scatter.

    The shortest and the longest third of the windows are compared, which have to lie far enough apart, and the bins between have to go the
    same way.
    """
    bins = [c for c in contexts if c.windows > 0]
    total = sum(c.windows for c in bins)
    if total < 24 or len(bins) < 4:
        return None
    short, long = _end(bins, total / 4), _end(bins[::-1], total / 4)
    if long[0] < max(_LONG, _SPAN * short[0]):
        return None
    error = math.hypot(short[2], long[2])
    z = (short[1] - long[1]) / error if error > 0 else 0.0
    lost = short[1] - long[1]
    if z < 4 or lost < 0.15 or lost < 0.25 * (short[1] - 1):
        return None
    # steadily, or in one step that takes half of what is accepted
    if _falls(bins) > -0.6 and (lost < 0.5 * (short[1] - 1) or _falls(bins, alike=0.25 * lost) > -0.6):
        return None
    return Decay(short=short[1], long=long[1], short_context=short[0], long_context=long[0], z=z)


def _end(bins: Sequence[ContextBin], least: float) -> tuple[float, float, float]:
    """(context, length, error) of the first bins that hold ``least`` windows."""
    n = context = length = error = 0.0
    for c in bins:
        n += c.windows
        context += c.windows * c.context
        length += c.windows * c.length
        error += (c.windows * max(c.error, 0.005 / math.sqrt(c.windows))) ** 2
        if n >= least:
            break
    return context / n, length / n, math.sqrt(error) / n


def _falls(bins: Sequence[ContextBin], alike: float = 0.0) -> float:
    """Rank correlation of context and length over the bins, weighted by nothing: -1 where every bin is below the one before.

    Pairs that differ by no more than ``alike`` do not count.
    """
    lengths = [c.length for c in bins]
    steps = [lengths[j] - lengths[i] for i in range(len(lengths)) for j in range(i + 1, len(lengths))]
    told = [s for s in steps if abs(s) > alike] if alike else steps
    return sum((s > 0) - (s < 0) for s in told) / len(told) if told else 0.0
