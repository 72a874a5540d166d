"""What the slots of a dump really are: their depth, whether one is the embedding, whether the final state went through the norm.

Facts used: an RMSNorm output divided by its weight has RMS 1 in every row (x / rms(x) * w); the residual stream of a pre-norm model grows
with depth and turns towards the final state; HF index 0 is the embedding row itself, up to a factor (Gemma scales it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from eagle3diag.hidden.alignment import SAME, Tables
from eagle3diag.hidden.model import Slot
from eagle3diag.hidden.scan import DumpScan, Probe

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DepthOrder",
    "NormFact",
    "depth_order",
    "embedding_slots",
    "equal_slots",
    "is_embedding",
    "median_rms",
    "misplaced",
    "norm_fact",
    "rows_of",
]

_LEAST_ROWS, _MOST_ROWS = 16, 4096
_MATCHED = 64  #: rows of a sample that are looked up in the embedding
_POST_MEDIAN, _POST_SPREAD = 0.05, 0.03  #: of RMS(h / w); after the norm 1 and 0.0001 in float16, 0.002 in bfloat16
_PRE_MEDIAN, _PRE_SPREAD = 0.3, 0.06  #: before it the median is anything and the spread 0.1 to 1
_GROWTH = 1.3  #: neighbours in depth count as told apart from this ratio of norms on
_SLACK, _TURN = 0.02, 0.05  #: of cosines: how far far layers may exceed near ones, and how far the ends must fall behind
_STRANGER = 0.1  #: of cosines: by how much a slot may resemble a far layer more than its neighbours in depth


def rows_of(scan: DumpScan, slot: Slot) -> Tensor:
    """Sound rows of a slot from all probes, first tokens left out, 4,096 at most: [n, hidden] float32, the same rows for every slot."""
    import torch

    end = 1 + _MOST_ROWS // max(1, len(scan.probes))
    found = [p.states[slot.position][1:end][p.good[1:end]].float() for p in scan.probes if len(p.good) > 1]
    return torch.cat(found) if found else torch.zeros(0, scan.dump.hidden)


def median_rms(scan: DumpScan, slot: Slot) -> float | None:
    """Median RMS of a slot's rows; None where there are fewer than 16."""
    x = rows_of(scan, slot)
    return float(x.square().mean(-1).sqrt().median()) if len(x) >= _LEAST_ROWS and x.shape[1] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFact:
    """Where the final state stands against the target's final norm.

    ``rms`` and ``spread`` are the median, and the standard deviation over the mean, of RMS(h / w) over ``rows``.
    """

    status: Literal["pre", "post", "unknown"]
    rms: float
    spread: float
    rows: int


def norm_fact(scan: DumpScan, tables: Tables) -> NormFact | None:
    """Judges the final state; None without one, without the norm's weight, or on fewer than 16 rows."""
    final, weight = scan.dump.final, tables.final_norm
    if final is None or weight is None or weight.shape != (scan.dump.hidden,):
        return None
    w = weight.float()
    used = w.abs() > 0.05 * w.abs().median()  # a weight near zero leaves nothing but rounding
    x = rows_of(scan, final)[:, used] / w[used]
    if len(x) < _LEAST_ROWS:
        return None
    rms = x.square().mean(-1).sqrt()
    middle, spread = float(rms.median()), float(rms.std() / rms.mean())
    status: Literal["pre", "post", "unknown"] = "unknown"
    if abs(middle - 1) < _POST_MEDIAN and spread < _POST_SPREAD:
        status = "post"
    elif abs(middle - 1) > _PRE_MEDIAN or spread > _PRE_SPREAD:
        status = "pre"
    return NormFact(status=status, rms=middle, spread=spread, rows=len(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthOrder:
    """Aux slots in order of depth as the states tell it.

    ``order`` are positions; ``rms``, and ``cosine`` with the end of the stream (the final state, else the deepest slot), by position.
    """

    order: tuple[int, ...]
    rms: dict[int, float]
    cosine: dict[int, float]


def depth_order(scan: DumpScan, slots: Sequence[Slot], tables: Tables | None = None, *, normed: bool = False) -> DepthOrder | None:
    """The order of depth of some aux slots; None where their states do not tell it for every pair of them.

    Two readings have to agree: norms grow, and states resemble those of near layers more than those of far ones (for a before b
    before c, cosine(a, c) is below cosine(a, b) and cosine(b, c)). The final state stands at the end, taken back through its norm where
    it is after it.

    Args:
        tables: for the weight of the final norm.
        normed: the final state is after the norm.
    """
    import torch

    rms = {s.position: median_rms(scan, s) or 0.0 for s in slots}
    if not slots or not min(rms.values()) > 0:
        return None
    by_norm = sorted(slots, key=lambda s: rms[s.position])
    if any(rms[b.position] < _GROWTH * rms[a.position] for a, b in pairwise(by_norm)):
        return None
    states = [rows_of(scan, s) for s in by_norm]
    final, weight = scan.dump.final, tables.final_norm if tables is not None else None
    if final is not None and not normed:
        states.append(rows_of(scan, final))
    elif final is not None and weight is not None and weight.shape == (scan.dump.hidden,):
        w = weight.float()
        states.append(rows_of(scan, final) / torch.where(w.abs() > 0.05 * w.abs().median(), w, torch.inf))
    n = len(states)
    if n < 3:
        return None
    like = [[float(torch.cosine_similarity(a, b).median()) for b in states] for a in states]
    for i in range(n):
        for j in range(i + 1, n):
            for k in range(j + 1, n):
                if like[i][k] > min(like[i][j], like[j][k]) + _SLACK:
                    return None
    if like[0][-1] > max(like[i][i + 1] for i in range(n - 1)) - _TURN:
        return None
    return DepthOrder(order=tuple(s.position for s in by_norm), rms=rms, cosine={s.position: like[i][-1] for i, s in enumerate(by_norm)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """Slots that resemble a far layer clearly more than the layers recorded next to theirs.

    ``pairs`` are ``(slot, the layer it resembles)``, the clearest first; ``exchanged`` the two slots that put everything right once they
    change places, None where no single exchange does.
    """

    pairs: tuple[tuple[Slot, Slot], ...]
    exchanged: tuple[Slot, Slot] | None


def misplaced(scan: DumpScan, slots: Sequence[Slot]) -> Misplaced | None:
    """Whether slots are recorded under other layers' numbers; None where not.

    Args:
        slots: in recorded order of depth, four or more (with fewer every layer is a neighbour).
    """
    import torch

    if len(slots) < 4 or any(median_rms(scan, s) is None for s in slots):
        return None
    states = [rows_of(scan, s) for s in slots]
    like = [[float(torch.cosine_similarity(x, y).median()) for y in states] for x in states]
    order = list(range(len(slots)))
    found = _strangers(like, order)
    if not found:
        return None
    exchanged = None
    for i in order:
        for j in order[i + 1 :]:
            other = order[:]
            other[i], other[j] = j, i
            if exchanged is None and not _strangers(like, other):
                exchanged = (slots[i], slots[j])
    return Misplaced(pairs=tuple((slots[a], slots[b]) for _, a, b in found), exchanged=exchanged)


def _strangers(like: list[list[float]], order: list[int]) -> list[tuple[float, int, int]]:
    """``(margin, slot, the one it resembles)`` of slots that stand among strangers in this order, the clearest first."""
    out = []
    for at, i in enumerate(order):
        near = max(like[i][order[k]] for k in (at - 1, at + 1) if 0 <= k < len(order))
        best = max((k for k in range(len(order)) if k != at), key=lambda k: like[i][order[k]])
        margin = like[i][order[best]] - near
        if abs(best - at) > 1 and margin > _STRANGER:
            out.append((margin, i, order[best]))
    return sorted(out, reverse=True)


def embedding_slots(scan: DumpScan, tables: Tables) -> dict[int, float]:
    """Median cosine of each aux slot's rows with the embedding of their tokens, by position; empty without tables or rows."""
    import torch

    if tables.embedding is None or tables.embedding.shape[-1] != scan.dump.hidden:
        return {}
    out = {}
    for slot in scan.dump.aux:
        likeness = []
        for p in scan.probes:
            ids = p.token_ids[:_MATCHED]
            use = p.good[:_MATCHED] & tables.known(ids)
            if bool(use.any()):
                rows = tables.embed(ids[use]).float()
                likeness.append(torch.cosine_similarity(p.states[slot.position][:_MATCHED][use].float(), rows))
        if likeness and sum(map(len, likeness)) >= _LEAST_ROWS:
            out[slot.position] = float(torch.cat(likeness).median())
    return out


def is_embedding(cosine: float) -> bool:
    """Whether rows with this median cosine are the embedding."""
    return cosine > SAME


def equal_slots(scan: DumpScan) -> tuple[tuple[Slot, Slot], ...]:
    """Pairs of slots with the same bits in every sound row of every probe (and the rows are not few)."""
    import torch

    def same(p: Probe, a: Slot, b: Slot) -> bool:
        return torch.equal(p.states[a.position][p.good], p.states[b.position][p.good])

    if sum(int(p.good.sum()) for p in scan.probes) < 4:
        return ()
    slots = scan.dump.slots
    pairs = [(a, b) for i, a in enumerate(slots) for b in slots[i + 1 :]]
    return tuple((a, b) for a, b in pairs if all(same(p, a, b) for p in scan.probes))
