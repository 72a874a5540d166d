"""What the SRV rules and the explanation share: is there enough to judge, and what was to be expected of this draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3diag.rules.model import Case
from eagle3diag.rules.registry import NotJudged

if TYPE_CHECKING:
    from eagle3diag.serving.model import ServingLog

__all__ = ["Expected", "from_dump", "from_training", "judged", "own_chain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A prediction for the log's chain.

    Attributes:
        source: ``the dump`` or where the training metrics come from.
        length: tokens per verification in chains of ``k``, bonus token counted.
        error: standard error of it.
        joint: per position.
        assumes: what was assumed to get from what was measured to ``k``, empty where nothing.
        caveats: why service may give less although nothing is wrong.
    """

    source: str
    length: float
    error: float
    joint: tuple[float, ...]
    k: int
    assumes: str = ""
    caveats: tuple[str, ...] = ()


def judged(case: Case) -> ServingLog:
    """The log, where it says enough to judge.

    Raises:
        NotJudged: nothing on acceptance, or too few verifications.
    """
    from eagle3diag.serving.patterns import LEAST, enough

    assert case.log is not None
    if not case.log.readable:
        raise NotJudged("the log says nothing on acceptance (SRV809)")
    if not enough(case.log):
        raise NotJudged(f"{case.log.weight:,.0f} verifications in the log; at least {LEAST} are needed")
    return case.log


def own_chain(log: ServingLog) -> int:
    """The log's chain length, the shortest that fits where it does not tell, 1 where nothing tells."""
    return log.k or (min(log.k_possible) if log.k_possible else 1)


def from_dump(case: Case, k: int) -> Expected:
    """What the trained wiring gets on the dump.

    Raises:
        NotJudged: the dump is at fault or too small, or the draft cannot be run on it.
    """
    from eagle3diag.rules.agr_look import look
    from eagle3diag.serving.metrics import extended

    agreement = look(case).agreement
    measured = [s.joint for s in agreement.steps]
    joint = extended(measured, k)
    at = min(k, len(measured))
    low, high = agreement.interval.get(at, (0.0, 0.0))
    beyond = f"steps beyond {len(measured)} keep what step {len(measured)} keeps" if k > len(measured) else ""
    return Expected(source="the dump", length=1.0 + sum(joint), error=max((high - low) / 3.92, 1e-3), joint=joint, k=k, assumes=beyond)


def from_training(case: Case, k: int) -> Expected:
    """What the training run's own metrics promise.

    Raises:
        NotJudged: they state a length for a chain nobody names, longer than the log's.
    """
    t = case.training
    assert t is not None
    if not t.rates:
        if t.length is None:
            raise NotJudged("the training metrics hold no acceptance")
        return Expected(source=t.source, length=t.length, error=0.05, joint=(), k=k, caveats=t.caveats, assumes="the run's own chain")
    beyond = ""
    if k > len(t.rates):
        beyond = "each later step keeps two thirds of the first's rate" if len(t.rates) == 1 else "later steps keep what the last one keeps"
    return Expected(
        source=t.source, length=t.expected(k), error=0.02, joint=t.joint(k), k=k, assumes=beyond, caveats=(*t.caveats, *_optimistic(t.kind))
    )


def _optimistic(kind: str) -> tuple[str, ...]:
    return () if kind == "joint" else (f"{kind} rates are turned into a chain by multiplying them",)
