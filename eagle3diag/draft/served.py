"""What an engine's wiring costs: the wiring it would run beside the one the draft was trained with, on the same rows.

Tensors the engine drops without putting anything in their place (biases, norms of queries and keys) are taken out; parameters it never
fills are drawn (`model`). The loss is in tokens per verification, with an interval, and in nats, which sees smaller differences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.display import Piece, Shown, data
from eagle3diag.draft.bootstrap import Effect, blocks, paired
from eagle3diag.draft.lengths import Rates, expected_lengths, interval, rates
from eagle3diag.draft.measure import Bench, Measured
from eagle3diag.draft.race import difference
from eagle3diag.draft.wirings import described

__all__ = ["Acceptance", "ServedAcceptance", "served_acceptance"]

_SURE = 2.0  #: z from which a loss is one
_FLOOR = 0.01  #: nats below which nothing is lost


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Acceptance(Piece):
    """One wiring's acceptance on a dump: rates per step, expected length of chains of each k with its 95 % interval."""

    wiring: Wiring
    rates: Rates
    expected_length: dict[int, float]
    interval: dict[int, tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one side."""
        return data(
            {
                "joint": [round(j, 6) for j in self.rates.joint],
                "marginal": [round(m, 6) for m in self.rates.marginal],
                "expected_length": {str(k): round(v, 6) for k, v in self.expected_length.items()},
                "interval": {str(k): [round(a, 6), round(b, 6)] for k, (a, b) in self.interval.items()},
                "n": self.rates.rows,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServedAcceptance(Shown):
    """The trained and the served wiring on one dump.

    Attributes:
        tokens: paired difference in tokens per verification of the longest chain, served minus trained; negative is a loss.
        nats: paired difference in nats per token, served minus trained; positive is a loss.
        change: in words, what the engine runs in place of what was trained; empty where they are the same.
        dropped: canonical names of tensors the engine leaves out.
    """

    trained: Acceptance
    served: Acceptance
    tokens: Effect
    nats: Effect
    change: str
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def loss(self) -> float:
        """Tokens per verification lost."""
        return -self.tokens.mean

    @property
    def significant(self) -> bool:
        """Whether something is lost, beyond what these rows leave open and beyond a hundredth of a nat."""
        return (self.tokens.z < -_SURE) or (self.nats.z > _SURE and self.nats.mean >= _FLOOR)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``acceptance`` in ``serve``."""
        return data(
            {
                "definition": "1 + sum of the first k joint top-1 rates, every counted row of the dump a start; teacher-forced",
                "trained": self.trained.to_dict(),
                "served": self.served.to_dict(),
                "change": self.change,
                "loss": round(self.loss, 6),
                "loss_z": _finite(-self.tokens.z),
                "delta_nll": _finite(self.nats.mean),
                "delta_nll_z": _finite(self.nats.z),
                "significant": self.significant,
                "dropped": list(self.dropped),
                "notes": list(self.notes),
            }
        )


def _finite(value: float) -> float | None:
    return round(value, 6) if abs(value) < float("inf") else None


def served_acceptance(bench: Bench, served: Wiring, *, dropped: Iterable[str] = (), trained: Measured | None = None) -> ServedAcceptance:
    """Run both wirings.

    Args:
        bench: its wiring is the trained one.
        served: what the engine runs.
        dropped: canonical names of tensors that the engine does not load and that nothing replaces.
        trained: the bench's wiring, where it was measured already.

    Raises:
        CheckpointError: the dump does not hold the states the engine would hand over, or a table is missing.
    """
    left = tuple(sorted(n for n in dropped if n in bench.weights.tensors and n not in _ELSEWHERE and n not in served.unfilled))
    other = replace(bench, weights=bench.weights.without(left)) if left else bench
    if served.rope_theta is None:
        served = replace(served, rope_theta=bench.base.rope_theta)
    if bench.weights.sizes.layers == 1:  # nothing it could decide
        served = replace(served, deep_layer_norm=bench.base.deep_layer_norm)
    a = bench.all(bench.base) if trained is None else trained
    same = not left and not bench.base.differences(served)
    b = a if same else other.all(served)
    block = blocks(a.sample, a.row)
    lengths = [1.0 + m.right.to(torch.float64).cumprod(1).sum(1) for m in (a, b)]
    words = "" if same else described(bench.base, served) if bench.base.differences(served) else ""
    if left:
        words = "; ".join(w for w in (words, f"{len(left)} tensors left out ({left[0]}{', …' if len(left) > 1 else ''})") if w)
    return ServedAcceptance(
        trained=_acceptance(bench.base, a, block),
        served=_acceptance(served, b, block),
        tokens=paired(lengths[1] - lengths[0], block),
        nats=paired(difference(b, a), block),
        change=words,
        dropped=left,
        notes=bench.notes,
    )


#: what the wiring itself decides
_ELSEWHERE = frozenset({"lm_head.weight", "embed_tokens.weight", "d2t", "t2d", "fc.weight", "norm.weight"})


def _acceptance(wiring: Wiring, m: Measured, block: torch.Tensor) -> Acceptance:
    r = rates(m.right)
    return Acceptance(wiring=wiring, rates=r, expected_length=expected_lengths(r.joint), interval=interval(m.right, block))
