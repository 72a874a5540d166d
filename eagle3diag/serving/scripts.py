"""What scripts and other programs print: vLLM's offline example, benchmark tables, llama.cpp, ModelOpt, Automodel.

Each yields counts or a stated number; positions that a script prints beyond its chain are told apart from positions that were never
accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3diag.serving.tally import Tally

__all__ = ["Stated", "read_scripts"]

_NAMED = re.compile(
    rb"(total_num_output_tokens|num_drafts|num_draft_tokens|num_accepted_tokens|mean acceptance length)\s*[:=]\s*(\d+(?:\.\d+)?)"
)
_AT = re.compile(rb"acceptance at token (\d+):\s*(\d*\.\d+|\d+)")
_AT_COUNT = re.compile(rb"accept@pos (\d+)\s*:\s*(\d*\.\d+|\d+)\s*\((\d+)\)")
_DRAFTS = re.compile(rb"(?:num_drafts|drafts)\s*[:=]?\s*([\d,]+)|([\d,]+) drafts")
_AL = re.compile(rb"\bAL\b\s*[:=]?\s*(\d+\.\d+)")
_LLAMA = re.compile(rb"n_(draft|predict|drafted|accept)\s*=\s*(\d+)|\baccept\s*=\s*(\d+\.\d+)%")
_MODELOPT = re.compile(rb"Average Acceptance Length\s*\{'accept': ([\d.]+), 'count': ([\d.]+), 'ratio': ([\d.]+)")
_BENCH = re.compile(rb"ccept(?:ance)?[ _][Ll]ength:?\s+(\d+\.\d+)")  # begins with letters that are searched fast


@dataclass(slots=True)
class Stated:
    """Numbers that came without counts, and what was odd."""

    lengths: list[float] = field(default_factory=list)
    beyond: list[tuple[int, int]] = field(default_factory=list)  #: (positions printed, k)
    wrong: list[str] = field(default_factory=list)
    checked: int = 0


def _check(stated: Stated, what: str, printed: float, follows: float, slack: float = 0.0051) -> None:
    stated.checked += 1
    if abs(printed - follows) > slack:
        stated.wrong.append(f"{what}: {printed:g} is printed, {follows:.4g} follows from the counts")


def read_scripts(data: bytes, tally: Tally, stated: Stated) -> None:
    """Everything of this kind in a block."""
    if b"num_accepted_tokens" in data:
        _offline(data, tally, stated)
    if b"accept@pos" in data:
        _at_pos(data, tally, stated)
    if b"n_accept" in data:
        _llama(data, tally, stated)
    for m in _MODELOPT.finditer(data) if b"Acceptance Length" in data else ():
        accept, count, ratio = map(float, m.groups())
        if count > 0:
            _check(stated, "ModelOpt's ratio", ratio, accept / count)
            tally.add_one("ModelOpt acceptance line", accepted=max(0.0, accept - count), drafts=count)
    for m in _BENCH.finditer(data):
        if data[data.rfind(b"\n", 0, m.start()) + 1 : m.start()].strip() not in (b"A", b"a"):
            continue  # of a line that begins with something else
        tally.formats["benchmark table"] += 1
        stated.lengths.append(float(m[1]))


def _offline(data: bytes, tally: Tally, stated: Stated) -> None:
    """vLLM's offline example: totals, then one line per position; a new ``num_drafts`` begins another run."""
    runs: list[dict[str, Any]] = []
    for m in re.finditer(_NAMED.pattern + rb"|" + _AT.pattern, data):
        if m[1] is not None:
            name = m[1].decode()
            if not runs or name in runs[-1]:
                runs.append({})
            runs[-1][name] = float(m[2])
        elif runs:
            runs[-1].setdefault("at", {})[int(m[3])] = float(m[4])
    for run in runs:
        drafts, drafted, accepted = run.get("num_drafts"), run.get("num_draft_tokens"), run.get("num_accepted_tokens")
        if not drafts or drafted is None or accepted is None:
            continue
        k = round(drafted / drafts) if abs(drafted / drafts - round(drafted / drafts)) < 0.005 else None
        tally.add_one("vLLM offline script", accepted=accepted, drafts=drafts, drafted=drafted, k=k)
        if "mean acceptance length" in run:
            _check(stated, "mean acceptance length", run["mean acceptance length"], 1 + accepted / drafts)
        at = run.get("at", {})
        rates = [at[i] for i in range(len(at)) if i in at]
        if rates:
            chain = rates[:k] if k else rates
            if k and len(rates) > k:
                stated.beyond.append((len(rates), k))
            _check(stated, "sum of the positions", sum(chain), accepted / drafts, 0.0051 * len(chain) + 0.001)
            tally.add_positions([r * drafts for r in chain], drafts)


def _at_pos(data: bytes, tally: Tally, stated: Stated) -> None:
    """``accept@pos 0 : 0.622 (4098)``: counts by position; the drafts follow from them, or stand beside them."""
    counts = {int(i): (float(r), int(n)) for i, r, n in _AT_COUNT.findall(data)}
    rates = [counts[i] for i in range(len(counts)) if i in counts]
    if not rates or not 0 < rates[0][0] <= 1 or rates[0][1] < rates[0][0]:
        return
    told = [int((a or b).replace(b",", b"")) for a, b in _DRAFTS.findall(data)]
    guess = rates[0][1] / rates[0][0]
    drafts = next((d for d in told if abs(d - guess) <= 0.002 * guess + 1), round(guess))
    accepted = sum(n for _, n in rates)
    tally.add_one("accept@pos script", accepted=accepted, drafts=drafts, drafted=drafts * len(rates), k=len(rates))
    tally.add_positions([float(n) for _, n in rates], drafts)
    length = _AL.search(data)
    if length:
        _check(stated, "AL", float(length[1]), 1 + accepted / drafts)
    for i, (rate, n) in enumerate(rates):
        _check(stated, f"position {i}", rate, n / drafts, 0.00051)


def _llama(data: bytes, tally: Tally, stated: Stated) -> None:
    """llama.cpp: drafted, accepted and predicted tokens; every token not accepted from a draft was the target's own."""
    runs: list[dict[str, float]] = []
    for m in _LLAMA.finditer(data):
        name = m[1].decode() if m[1] else "share"
        if not runs or name in runs[-1]:
            runs.append({})
        runs[-1][name] = float(m[2] or m[3])
    for run in runs:
        drafted, accepted, predicted = run.get("drafted"), run.get("accept"), run.get("predict")
        if not drafted or accepted is None:
            continue
        k = int(run["draft"]) if run.get("draft") else None
        # chains are cut where the draft is unsure, so drafted / k is a lower bound of the verifications
        drafts = predicted - accepted if predicted and predicted > accepted else drafted / k if k else 0.0
        tally.add_one("llama.cpp", accepted=accepted, drafts=drafts, drafted=drafted, k=k)
        if "share" in run:
            _check(stated, "accept", run["share"], 100 * accepted / drafted, 0.00051)
