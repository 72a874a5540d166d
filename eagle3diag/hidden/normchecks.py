"""Norm profiles no healthy target has: a rotated residual stream, a slot of another scale, a sample unlike the others.

Trained models put a few channels far above the rest, and the first token's state, a sink of tens to hundreds of times the usual norm,
into one of them (Sun et al. 2024, "Massive Activations"). A rotation (QuaRot, SpinQuant, R1) keeps every norm and spreads those channels
over all: the kurtosis over channels falls from tens or hundreds to 3, that of noise, sink included. So a sink of kurtosis 3 is the proof;
without a sink, states that no longer fit the target's own tables are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from eagle3diag.hidden.alignment import Tables, embedding_scores, identity_scores, prediction_scores
from eagle3diag.hidden.model import Slot
from eagle3diag.hidden.rowstats import one_thread
from eagle3diag.hidden.scan import DumpScan, Probe
from eagle3diag.hidden.slotchecks import median_rms, rows_of

__all__ = ["Jump", "Rotated", "Scale", "jumps", "rotated", "scales"]

_LEAST_ROWS, _LEAST_WIDTH = 32, 256
_FLAT = 5.0  #: median kurtosis over channels: 2.9 to 3.0 when rotated (3.5 by blocks of 64), 20 to 150 otherwise
_SINK, _SINK_FLAT = 4.0, 10.0  #: a sink has this many times the median norm; its kurtosis is near the width, 3 when rotated
_LOST, _CLEAR = 6.0, 15.0  #: scores of ``alignment``: nothing fits the tables, yet tokens are clearly there
_FACTOR = 16.0  #: regression of a slot on the one before: 0.8 to 2.5 between neighbours in a healthy stream
_RELATED = 0.1  #: cosine from which that regression means something
_JUMP, _DEVIATIONS = math.log(2.0), 10.0  #: of a sample's median log norm from that of all samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """A slot whose channels carry no outliers although they must.

    Attributes:
        kurtosis: median over rows (3 for noise).
        sink: norm of the largest row over the median norm, and ``sink_kurtosis`` its kurtosis; None where there is no such row.
        lost: best score of any slot against the target's tables, None where that was not the proof.
        samples: the samples concerned; empty for all.
    """

    slot: Slot
    kurtosis: float
    sink: float | None = None
    sink_kurtosis: float | None = None
    lost: float | None = None
    samples: tuple[str, ...] = ()


def rotated(scan: DumpScan, tables: Tables | None = None) -> tuple[Rotated, ...]:
    """Slots of a rotated stream, in all samples or in some; none without proof, and none on fewer than 32 rows or 256 channels."""
    if scan.dump.hidden < _LEAST_WIDTH:
        return ()
    found = _rotated(scan, scan.probes, tables)
    if found:
        return found
    some: dict[int, Rotated] = {}
    for p in scan.probes:
        for r in _rotated(scan, (p,), tables):
            before = some.get(r.slot.position)
            some[r.slot.position] = replace(before or r, samples=(*(before.samples if before else ()), p.name))
    return tuple(some[k] for k in sorted(some))


def _rotated(scan: DumpScan, probes: Sequence[Probe], tables: Tables | None) -> tuple[Rotated, ...]:
    import torch

    out, unproven = [], []
    for slot in scan.dump.slots:
        parts = [(p.states[slot.position], p.kurtosis[slot.position], p.good) for p in probes]
        if slot.hf == 0 or sum(int(good[1:].sum()) for _, _, good in parts) < _LEAST_ROWS - 1:
            continue
        middle = float(torch.cat([k[1:][good[1:]] for _, k, good in parts]).median())
        if not middle < _FLAT:
            continue
        norms = torch.cat([x[good].float().norm(dim=-1) for x, _, good in parts])
        kurtosis = torch.cat([k[good] for _, k, good in parts])
        ratio = norms / norms.median()
        sinks = ratio > _SINK
        if bool(sinks.any()) and float(kurtosis[sinks].median()) < _SINK_FLAT:
            out.append(Rotated(slot=slot, kurtosis=middle, sink=float(ratio.max()), sink_kurtosis=float(kurtosis[sinks].median())))
        else:
            unproven.append((slot, middle))
    if out:  # one stream, one basis: what is as flat beside a proven slot is rotated too
        out += [Rotated(slot=slot, kurtosis=middle) for slot, middle in unproven]
    elif unproven and tables is not None:
        lost = _lost(scan, probes, tables)
        if lost is not None:
            out = [Rotated(slot=slot, kurtosis=middle, lost=lost) for slot, middle in unproven]
    return tuple(sorted(out, key=lambda r: r.slot.position))


def _lost(scan: DumpScan, probes: Sequence[Probe], tables: Tables) -> float | None:
    """The best score of any slot against the tables where all are noise although tokens are clearly there; None otherwise."""
    best, clear, tried = 0.0, False, False
    with one_thread():
        for p in probes:
            for slot in scan.dump.slots:
                x = p.states[slot.position]
                clear = clear or identity_scores(x, p.token_ids, p.good, 1).top >= _CLEAR
                found = []
                if tables.embedding is not None:
                    found.append(embedding_scores(x, p.token_ids, p.good, tables))
                if tables.head is not None:
                    found += [prediction_scores(x, p.token_ids, p.good, tables, norm=n) for n in (True, False)]
                tried = tried or any(s.by_shift for s in found)
                best = max([best, *(s.top for s in found)])
    return best if tried and clear and best < _LOST else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A slot of another scale than its neighbours: it is ``factor`` times what the slot before it (or after it) leads to expect."""

    slot: Slot
    factor: float
    against: Slot


def scales(scan: DumpScan, slots: Sequence[Slot]) -> tuple[Scale, ...]:
    """Slots out of scale.

    Args:
        slots: of the residual stream (no normed state, no HF index 0), in order of depth.
    """
    import torch

    ratios: list[float] = []
    for a, b in pairwise(slots):
        x, y = rows_of(scan, a), rows_of(scan, b)
        if len(x) < _LEAST_ROWS:
            return ()
        slope = float(((x * y).sum(-1) / x.square().sum(-1)).median())
        related = float(torch.cosine_similarity(x, y).median()) >= _RELATED
        ratios.append(slope if related and slope > 0 else 1.0)
    out: list[Scale] = []
    rms = {s.position: median_rms(scan, s) or 0.0 for s in slots}
    for i, ratio in enumerate(ratios):
        if 1 / _FACTOR <= ratio <= _FACTOR:
            continue
        a, b = slots[i], slots[i + 1]
        rest = [rms[s.position] for s in slots if s not in (a, b) and rms[s.position] > 0]
        centre = sum(map(math.log, rest)) / len(rest) if rest else math.log(rms[a.position])
        odd_a = abs(math.log(rms[a.position]) - centre) > abs(math.log(rms[b.position]) - centre)
        slot, other, factor = (a, b, 1 / ratio) if odd_a else (b, a, ratio)
        if all(s.slot is not slot for s in out):
            out.append(Scale(slot=slot, factor=factor, against=other))
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A sample whose norms in a slot are ``factor`` times those of the other samples."""

    sample: str
    slot: Slot
    factor: float


def jumps(scan: DumpScan) -> tuple[Jump, ...]:
    """Samples unlike the others, from four samples of 16 sound rows on."""
    import torch

    out = []
    for slot in scan.dump.slots:
        middles = {}
        for s in scan.samples:
            rows = s.rows[slot.position]
            l2 = rows.l2[1:][rows.good[1:]]
            if len(l2) >= 16 and float(l2.median()) > 0:
                middles[s.name] = math.log(float(l2.median()))
        if len(middles) < 4:
            continue
        values = torch.tensor(list(middles.values()), dtype=torch.float64)
        centre = float(values.median())
        limit = max(_JUMP, _DEVIATIONS * 1.4826 * float((values - centre).abs().median()))
        out += [Jump(sample=n, slot=slot, factor=math.exp(v - centre)) for n, v in middles.items() if abs(v - centre) > limit]
    return tuple(out)
