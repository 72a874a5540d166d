"""Rows that belong to other tokens: states shifted against the tokens, or another sample's.

Each role is judged by the evidence that is strongest for it (``alignment``): the aux states by the identity of tokens in their lowest
layer, the final state by what it predicts, HF index 0 by the embedding itself. Deep layers lean towards the next token, so there a
shift of one ahead alone proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from eagle3diag.hidden.alignment import Scores, Tables, identity_scores, lookup_scores, prediction_scores
from eagle3diag.hidden.model import Slot
from eagle3diag.hidden.rowstats import one_thread, shared_beginning
from eagle3diag.hidden.scan import DumpScan, Probe

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Alignment", "Misaligned", "alignment"]

_SURE = 8.0  #: score a wrong place must reach
_RIVAL = 0.85  #: the right place must score below this share of it
_FOREIGN = 3.0  #: below this a sample shows nothing of its own tokens
_KNOWN = 15.0  #: what the other samples must show then
_LEAST_ROWS = 32
_WIDE = 64  #: how far to look where nothing near fits
_HALVED = 128  #: rows from which halves are judged too

Scorer = Callable[["Tensor", "Tensor", "Tensor", int], Scores]  #: (states, tokens, good, shifts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misaligned:
    """One sample whose rows are not those of its tokens.

    Attributes:
        kind: ``shift``, ``swapped`` (they fit another sample's tokens) or ``foreign`` (they fit no sample's, where all others fit).
        shift: places by which the rows fit later tokens; -1: rows one late.
        other: the sample whose tokens they fit.
        rows: first and last row of the half concerned, None for all.
        slots: names of the slots.
        by: the evidence: ``identity``, ``prediction`` or ``embedding``.
        fits, here: score where they fit, and where they stand.
    """

    sample: str
    kind: Literal["shift", "swapped", "foreign"]
    slots: tuple[str, ...]
    by: str
    fits: float
    here: float
    shift: int = 0
    other: str = ""
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """What was found, and how many samples had enough in them to tell."""

    judged: int
    found: tuple[Misaligned, ...] = ()

    @property
    def samples(self) -> frozenset[str]:
        """Names of samples that are out of place."""
        return frozenset(m.sample for m in self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    slot: Slot
    by: str
    score: Scorer
    ahead: bool  #: whether +1 alone proves something


def alignment(scan: DumpScan, tables: Tables | None = None, *, normed: bool = False) -> Alignment:
    """Judges the probes of a scan.

    Args:
        tables: rows of the target's embedding and head, where known.
        normed: the final states have been through the final norm already.
    """
    found: list[Misaligned] = []
    judged: set[str] = set()
    with one_thread():
        for role in _roles(scan, tables, normed):
            whole = (role.ahead and role.by != "embedding") or role.slot.role == "final"
            moved = _swapped(scan, role) if whole else []
            swapped = {m.sample for m in moved if m.kind == "swapped"} | {m.sample for m in found if m.kind == "swapped"}
            shifted = _shifted(scan, role, judged, swapped)
            elsewhere = {m.sample for m in shifted}
            found += [*(m for m in moved if m.kind == "swapped" or m.sample not in elsewhere), *shifted]
    return Alignment(judged=len(judged), found=tuple(_together(found)))


def _roles(scan: DumpScan, tables: Tables | None, normed: bool) -> Iterable[_Role]:
    aux = [s for s in scan.dump.aux if s.hf != 0]
    if tables is not None and tables.embedding is not None:

        def embeds(x: Tensor, t: Tensor, good: Tensor, n: int) -> Scores:
            return lookup_scores(x, t, good, tables, n)

        for slot in scan.dump.slots:
            if slot.hf == 0:
                yield _Role(slot=slot, by="embedding", score=embeds, ahead=True)
    if aux:
        known = [s for s in aux if s.hf is not None]
        first = min(known, key=lambda s: s.hf or 0) if len(known) == len(aux) else max(aux, key=lambda s: _strength(scan, s))
        for slot in _few(aux, first):
            yield _Role(slot=slot, by="identity", score=identity_scores, ahead=slot is first)
    final = scan.dump.final
    if final is None:
        return
    if tables is not None and tables.head is not None and (normed or tables.final_norm is not None):

        def predicts(x: Tensor, t: Tensor, good: Tensor, n: int) -> Scores:
            return prediction_scores(x, t, good, tables, norm=not normed, shifts=n)

        yield _Role(slot=final, by="prediction", score=predicts, ahead=True)
    else:
        yield _Role(slot=final, by="identity", score=identity_scores, ahead=False)


def _few(aux: list[Slot], first: Slot) -> list[Slot]:
    """The lowest slot, and at most three more, spread over the rest: a writer shifts all of them or whole groups."""
    rest = [s for s in aux if s is not first]
    step = -(-len(rest) // 3) if rest else 1
    return [first, *rest[::-1][::step][::-1]]


def _strength(scan: DumpScan, slot: Slot) -> float:
    return sum(identity_scores(p.states[slot.position], p.token_ids, p.good, 2).top for p in scan.probes)


def _wrong(s: Scores, scale: float, ahead: bool) -> bool:
    """Whether the rows surely belong ``s.best`` places on."""
    if s.best == 0 or (s.best == 1 and not ahead):
        return False
    return s.top / scale >= _SURE and s.now < _RIVAL * s.top


def _shifted(scan: DumpScan, role: _Role, judged: set[str], swapped: set[str]) -> list[Misaligned]:
    found: list[Misaligned] = []
    weak: list[tuple[Probe, Scores]] = []
    for p in scan.probes:
        if p.name in swapped:
            judged.add(p.name)
            continue
        x = p.states[role.slot.position]
        s = role.score(x, p.token_ids, p.good, 8)
        if not s.by_shift:
            continue
        if (s.best or s.top < 2 * _SURE) and len(p.token_ids) > 2 * _WIDE:
            far = role.score(x, p.token_ids, p.good, _WIDE)
            s = far if far.top >= 2 * _SURE and far.top > 1.2 * s.top else s
        if s.top >= _SURE:
            judged.add(p.name)
            if _wrong(s, 1.0, role.ahead):
                found.append(_shift(p.name, role, s))
            elif s.best == 0 and len(p.token_ids) >= _HALVED:
                found += _from_the_middle(p, role)
        else:
            weak.append((p, s))
    if not found and len(weak) > 1:  # too short each, together perhaps not
        total = sum((s for _, s in weak), Scores())
        if total.top / len(weak) ** 0.5 >= _SURE:
            judged.update(p.name for p, _ in weak)
            if _wrong(total, len(weak) ** 0.5, role.ahead):
                found += [_shift(p.name, role, total) for p, _ in weak]
    return found


def _from_the_middle(p: Probe, role: _Role) -> list[Misaligned]:
    """Rows that are out of place in one half of a sample only: a request was cut into pieces and put together wrongly."""
    x, n = p.states[role.slot.position], len(p.token_ids)
    for part in (slice(0, n // 2), slice(n // 2, n)):
        s = role.score(x[part], p.token_ids[part], p.good[part], 8)
        if _wrong(s, 1.0, role.ahead):
            return [replace(_shift(p.name, role, s), rows=(part.start, part.stop - 1))]
    return []


def _shift(name: str, role: _Role, s: Scores) -> Misaligned:
    return Misaligned(
        sample=name, kind="shift", slots=(role.slot.name,), by=role.by, fits=round(s.top, 1), here=round(s.now, 1), shift=s.best
    )


def _at(p: Probe, tokens: Tensor, role: _Role, common: int) -> float | None:
    """Score of a sample's rows under some tokens, from row ``common`` on; None where there is too little."""
    end = min(len(p.token_ids), len(tokens))
    if end - common < _LEAST_ROWS:
        return None
    part = slice(common, end)
    s = role.score(p.states[role.slot.position][part], tokens[part], p.good[part], 0)
    return s.now if s.by_shift else None


def _swapped(scan: DumpScan, role: _Role) -> list[Misaligned]:
    probes = scan.probes
    if len(probes) < 2:
        return []
    start = {
        p.name: min(max(shared_beginning(p.token_ids, q.token_ids) for q in probes if q is not p), len(p.token_ids) // 2) for p in probes
    }
    own = {p.name: _at(p, p.token_ids, role, start[p.name]) for p in probes}
    scores = sorted(v for v in own.values() if v is not None)
    if not scores:
        return []
    middle = scores[len(scores) // 2]
    found = []
    for p in probes:
        mine = own[p.name]
        if mine is None or (mine >= _SURE and mine >= middle / 2):
            continue
        best, name = 0.0, ""
        for q in probes:
            common = shared_beginning(p.token_ids, q.token_ids)
            there = None if q is p else _at(p, q.token_ids, role, common)
            here = None if there is None else _at(p, p.token_ids, role, common)
            if there is not None and here is not None and there > best and there >= _SURE and here < 0.6 * there:
                best, name = there, q.name
        slots = (role.slot.name,)
        if name:
            found.append(
                Misaligned(sample=p.name, kind="swapped", slots=slots, by=role.by, fits=round(best, 1), here=round(mine, 1), other=name)
            )
        elif mine < _FOREIGN and middle >= _KNOWN and len(scores) >= 3:
            found.append(Misaligned(sample=p.name, kind="foreign", slots=slots, by=role.by, fits=round(middle, 1), here=round(mine, 1)))
    return found


def _together(found: Iterable[Misaligned]) -> Iterable[Misaligned]:
    """One entry for slots that are out of place in the same way, with the strongest evidence."""
    groups: dict[tuple[str, str, int, str], list[Misaligned]] = {}
    for m in found:
        groups.setdefault((m.sample, m.kind, m.shift, m.other), []).append(m)
    for (sample, kind, shift, other), members in groups.items():
        best = max(members, key=lambda m: (m.rows is None, m.fits - m.here))
        slots = tuple(dict.fromkeys(n for m in members for n in m.slots))
        yield Misaligned(
            sample=sample,
            kind=best.kind if kind == best.kind else "shift",
            slots=slots,
            by=best.by,
            fits=best.fits,
            here=best.here,
            shift=shift,
            other=other,
            rows=best.rows,
        )
