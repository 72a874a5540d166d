"""Norms token by token in one sample: where the sink sits, where rows are broken, and what a profile averages over.

A norm profile keeps means; this keeps every token of one sample, which is what a picture of layers against tokens needs. A token
counts as a sink where its norm is at least ten times the median of its slot: massive activations stand at the first token in most
models, and at a delimiter in some (Sun et al. 2024, "Massive Activations in Large Language Models").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle3diag.display import Shown, data
from eagle3diag.errors import CheckpointError, UsageError, escaped
from eagle3diag.hidden.model import HiddenDump, Slot

__all__ = ["SINK", "TokenNorms", "token_norms"]

SINK = 10.0  #: times the median norm of the slot


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TokenNorms(Shown):
    """L2 norms of one sample.

    Attributes:
        path, sample: the dump and the sample's name.
        slots: of the dump, by position.
        token_ids: one per token.
        l2: one tuple a slot, one norm a row; NaN where the row holds NaN or Inf.
        medians: per slot, over finite rows but the first; NaN without any.
        sinks: tokens whose norm is at least ten times the median in some slot.
        broken: rows that are not finite in some slot.
    """

    path: str
    sample: str
    slots: tuple[Slot, ...]
    token_ids: tuple[int, ...]
    l2: tuple[tuple[float, ...], ...]
    medians: tuple[float, ...]
    sinks: tuple[int, ...]
    broken: tuple[int, ...]

    def times_median(self, token: int) -> float:
        """The norm of one token over its slot's median, in the slot where that is largest."""
        found = [row[token] / m for row, m in zip(self.l2, self.medians, strict=True) if token < len(row) and m > 0]
        return max((x for x in found if x == x), default=float("nan"))

    def times(self, slot: int, token: int) -> float:
        """The norm of one token at one slot over that slot's median; NaN where either is not there."""
        row, median = self.l2[slot], self.medians[slot]
        return row[token] / median if token < len(row) and median > 0 else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return data(
            {
                "path": self.path,
                "sample": self.sample,
                "token_ids": list(self.token_ids),
                "slots": [
                    {"slot": s.position, "hf": s.hf, "role": s.role, "l2": list(n)} for s, n in zip(self.slots, self.l2, strict=False)
                ],
                "sinks": list(self.sinks),
                "broken": list(self.broken),
            }
        )


def token_norms(dump: HiddenDump, sample: str | int = 0) -> TokenNorms:
    """The norms of one sample.

    Args:
        dump: opened.
        sample: its number in the dump, or its name.

    Raises:
        UsageError: the dump has no such sample.
        CheckpointError: the sample cannot be read.
    """
    import torch

    from eagle3diag.hidden.rowstats import one_thread, row_stats

    if not dump.samples:
        raise CheckpointError(f"{escaped(dump.path, 200)}: no sample to look at")
    names = [ref.name for ref in dump.samples]
    number = sample if isinstance(sample, int) else names.index(sample) if sample in names else -1
    if not 0 <= number < len(names):
        told = f"{len(names)} samples, {escaped(names[0])} to {escaped(names[-1])}"
        raise UsageError(f"{escaped(dump.path, 200)}: no sample {escaped(str(sample))}; there are {told}")
    read = dump.read(dump.samples[number])
    norms: list[tuple[float, ...]] = []
    medians: list[float] = []
    sinks: set[int] = set()
    broken: set[int] = set()
    with one_thread():
        for slot in dump.slots:
            stats = row_stats(read.states[slot.position])
            l2 = torch.where(stats.finite, stats.l2, torch.full_like(stats.l2, float("nan")))
            inner = l2[1:][stats.finite[1:]]
            median = float(inner.median()) if len(inner) else float("nan")
            norms.append(tuple(l2.tolist()))
            medians.append(median)
            broken |= set(torch.nonzero(~stats.finite).flatten().tolist())
            sinks |= set(torch.nonzero(stats.finite & (stats.l2 >= SINK * median)).flatten().tolist()) if median > 0 else set()
    return TokenNorms(
        path=dump.path,
        sample=names[number],
        slots=dump.slots,
        token_ids=tuple(int(i) for i in read.token_ids.tolist()),
        l2=tuple(norms),
        medians=tuple(medians),
        sinks=tuple(sorted(sinks)),
        broken=tuple(sorted(broken)),
    )
