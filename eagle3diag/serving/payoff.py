"""Does it pay: the speed-up of speculation from two measured throughputs, the length at which it breaks even, and the best chain.

One verification yields ``length`` tokens and takes as long as ``cost`` plain decoding steps, so the speed-up is length / cost. Two measured
throughputs give the cost: 54.8 tokens/s at length 1.8 against 90 without is a cost of 1.8 x 90 / 54.8 = 2.96 plain steps, which is also the
length at which speculation breaks even. To say which chain would be best, the cost is split: one plain step for the verification, the
rest in equal parts for the k draft steps. That split is an assumption and is named as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3diag.display import Shown
from eagle3diag.serving.metrics import alpha_of, extended, geometric
from eagle3diag.serving.model import ServingLog

__all__ = ["Payoff", "payoff", "speedup"]

_LONGEST = 16  # chains tried


def speedup(length: float, draft_cost: float, k: int, verify_cost: float = 1.0) -> float:
    """Tokens per unit of time against plain decoding.

    Args:
        length: tokens per verification, bonus counted.
        draft_cost, verify_cost: of one draft step and of one verification, in plain decoding steps.
        k: draft steps.
    """
    return length / (verify_cost + k * draft_cost)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Payoff(Shown):
    """What speculation makes of decoding.

    Attributes:
        length, k: as served; k None where not known.
        measured, baseline: tokens per second with and without.
        speedup: measured / baseline.
        cost: plain decoding steps that one verification with its drafts takes; the length at which speculation breaks even.
        draft_cost: of one draft step in plain steps, under the split named above; None without k, or where the cost is below one step.
        best_k, best_speedup: the chain length from 1 to 16 that would be fastest, by the positions of the log or an even rate.
        by_context: (context, speed-up) where the log tells throughput by context.
    """

    length: float
    k: int | None
    measured: float
    baseline: float
    draft_cost: float | None = None
    best_k: int | None = None
    best_speedup: float | None = None
    by_context: tuple[tuple[float, float], ...] = ()
    running: float | None = None

    @property
    def speedup(self) -> float:
        """Measured over baseline."""
        return self.measured / self.baseline

    @property
    def cost(self) -> float:
        """Plain steps per verification."""
        return self.length * self.baseline / self.measured

    @property
    def pays(self) -> bool:
        """Whether it is faster at all."""
        return self.speedup > 1.0

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``payoff``."""
        return {
            "acceptance_length": round(self.length, 4),
            "k": self.k,
            "measured": round(self.measured, 3),
            "baseline": self.baseline,
            "speedup": round(self.speedup, 4),
            "cost_in_plain_steps": round(self.cost, 4),
            "break_even_length": round(self.cost, 4),
            "draft_step_cost": None if self.draft_cost is None else round(self.draft_cost, 4),
            "best_k": self.best_k,
            "best_speedup": None if self.best_speedup is None else round(self.best_speedup, 4),
            "by_context": [{"context": round(c), "speedup": round(s, 4)} for c, s in self.by_context],
            "assumes": "baseline measured with as many requests in flight; best chain: a verification costs one plain step at any length",
        }


def payoff(log: ServingLog, baseline: float) -> Payoff | None:
    """The pay-off of a log against plain decoding; None where the log tells no throughput or length.

    Args:
        log: with throughput.
        baseline: tokens per second of plain decoding under the same load.
    """
    if log.acceptance_length is None or not log.throughput or baseline <= 0:
        return None
    contexts = tuple((c.context, c.throughput / baseline) for c in log.contexts if c.throughput and c.windows >= 3 and log.running == 1.0)
    one = Payoff(
        length=log.acceptance_length,
        k=log.k,
        measured=log.throughput,
        baseline=baseline,
        by_context=contexts,
        running=log.running,
    )
    if not log.k or one.cost <= 1.0:
        return one
    draft = (one.cost - 1.0) / log.k
    best, fastest = best_chain(log.per_position, log.acceptance_length, log.k, draft)
    return replace(one, draft_cost=draft, best_k=best, best_speedup=fastest)


def best_chain(positions: Sequence[float], length: float, k: int, draft_cost: float) -> tuple[int, float]:
    """The chain length that would be fastest, and its speed-up; 0 and 1.0 where plain decoding is."""
    if positions:
        joint = extended(positions, _LONGEST)
        lengths = [1.0 + sum(joint[:n]) for n in range(1, _LONGEST + 1)]
    else:
        alpha = alpha_of(length, k)
        lengths = [geometric(alpha, n) for n in range(1, _LONGEST + 1)]
    best, n = max((speedup(x, draft_cost, n), -n) for n, x in enumerate(lengths, 1))
    return (-n, best) if best > 1.0 else (0, 1.0)
