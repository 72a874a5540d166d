"""Checks that go by the tokens: loss masks, the thinking span, and whether one prefix always has the same states."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from eagle3diag.hidden.model import Slot
from eagle3diag.hidden.scan import DumpScan

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Conflict", "MaskFacts", "conflicts", "mask_facts", "unmasked_thinking"]

_LEAST_PREFIX = 4
_PLACEHOLDERS = 8  #: so many equal tokens in a row stand for an image or padding, whose states are not told by the token
_DIFFERENT = 0.2  #: relative difference, median over the prefix; numerics of other batches and kernels reach a few hundredths
_LEAST_THOUGHT = 4  #: tokens between the tags; fewer is an empty tag the template put there


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFacts:
    """Loss masks of a dump, by sample names.

    ``full`` masks are true everywhere, the last token aside (SpecForge clears it).
    """

    masked: int
    empty: tuple[str, ...]
    full: tuple[str, ...]


def mask_facts(scan: DumpScan) -> MaskFacts:
    """Which masks choose nothing, and which choose everything."""
    masks = {s.name: s.loss_mask for s in scan.samples if s.loss_mask is not None and len(s.loss_mask)}
    empty = tuple(n for n, m in masks.items() if not bool(m.any()))
    full = tuple(n for n, m in masks.items() if bool(m.any()) and bool(m[: max(1, len(m) - 1)].all()))
    return MaskFacts(masked=len(masks), empty=empty, full=full)


def unmasked_thinking(scan: DumpScan, tags: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Samples whose answers are trained on but not the thinking before them: (first, last) token of the first such span, by name.

    Args:
        tags: ids of the tokens that open and close the thinking.
    """
    out = {}
    for s in scan.samples:
        if s.loss_mask is None or len(s.loss_mask) != s.tokens:
            continue
        opened = (s.token_ids == tags[0]).nonzero().flatten().tolist()
        for at in opened:
            closed = (s.token_ids[at:] == tags[1]).nonzero().flatten()
            if not len(closed):
                continue
            end = at + int(closed[0])
            inside, after = s.loss_mask[at + 1 : end], s.loss_mask[end + 1 :]
            answered = len(after) > 0 and bool(after[: min(len(after), 8)].any())
            if len(inside) >= _LEAST_THOUGHT and answered and float(inside.double().mean()) < 0.1:
                out[s.name] = (at + 1, end - 1)
                break
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two samples that begin with the same ``tokens`` tokens and have other states there.

    ``difference`` is |a - b| / max(|a|, |b|), median over the prefix, in the slot where it is largest; ``first`` the first row beyond 0.2.
    """

    samples: tuple[str, str]
    tokens: int
    slot: Slot
    difference: float
    first: int


def conflicts(scan: DumpScan, leave_out: Collection[str] = ()) -> tuple[tuple[Conflict, ...], int]:
    """Conflicts between samples that share a beginning, and how many pairs share one.

    Args:
        leave_out: samples whose rows are known to be wrong.
    """
    probes = sorted((p for p in scan.probes if p.name not in leave_out), key=lambda p: p.token_ids.tolist())
    found, pairs = [], 0
    for a, b in pairwise(probes):
        n = _shared(a.token_ids, b.token_ids)
        use = a.good[:n] & b.good[:n]
        if int(use.sum()) < _LEAST_PREFIX:
            continue
        pairs += 1
        worst: Conflict | None = None
        for slot in scan.dump.slots:
            x, y = a.states[slot.position][:n].float(), b.states[slot.position][:n].float()
            size = x.norm(dim=-1).maximum(y.norm(dim=-1)).clamp(min=1e-30)
            apart = (x - y).norm(dim=-1) / size
            middle = float(apart[use].median())
            if middle > _DIFFERENT and (worst is None or middle > worst.difference):
                first = int(((apart > _DIFFERENT) & use).nonzero()[0])
                worst = Conflict(samples=(a.name, b.name), tokens=n, slot=slot, difference=middle, first=first)
        if worst is not None:
            found.append(worst)
    return tuple(found), pairs


def _shared(a: Tensor, b: Tensor) -> int:
    """Length of the shared beginning, cut before a run of placeholders."""
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()
    n = int(differ[0]) if len(differ) else n
    run = 1
    for i in range(1, n):
        run = run + 1 if int(a[i]) == int(a[i - 1]) else 1
        if run >= _PLACEHOLDERS:
            return i - run + 1
    return n
