"""Which wirings would give the acceptance that a log shows: each is run on a dump, and compared with the log's counts.

A log tells how often each position was accepted, or the mean alone. A wiring is compatible where no position, and not the length, lies
more than three standard errors away; the error holds the log's own, the dump's (its rows resemble each other, so blocks of them are
drawn) and what separates a dump from service: other texts, and drafts that start where the last one ended. Counts cannot separate every
two causes; those they cannot are one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Piece, Shown, data
from eagle3diag.errors import CheckpointError

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import TargetSpec
    from eagle3diag.checkpoint.wiring import Wiring
    from eagle3diag.draft.measure import Bench
    from eagle3diag.draft.wirings import Candidate
    from eagle3diag.serving.model import ServingLog

__all__ = ["EXCLUDED", "OWN", "Compared", "Compatibility", "Observed", "Wirings", "observed"]

EXCLUDED = 3.0  #: standard errors from which a wiring is excluded
OTHER_TEXT = 0.05  # share of a rate by which service may differ from the dump, as one standard error
OTHER_START = 0.008  # rate by which drafts that begin where the last one ended may differ from those of every row, as one standard error
DRAWN = (0.02, 0.5)  # absolute and relative: how far a part that starts at random may lie from another draw of it, as one standard error
OWN = "as trained"
_ROWS = 100  # rows on which a wiring is first looked at
_HEAD_ROWS = "head cut to the target's first rows"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Observed(Piece):
    """What a log shows.

    Attributes:
        length: with the bonus token, in chains of ``k``; k as low as the log allows where it does not tell.
        joint: per position, empty where only the length is known.
        drafts: verifications, counted or estimated.
        error: of the length.
    """

    length: float
    k: int
    joint: tuple[float, ...]
    drafts: float
    error: float


def observed(log: ServingLog) -> Observed | None:
    """The log as something to compare with, None where it holds nothing."""
    from eagle3diag.serving.metrics import alpha_of, error_of

    if log.acceptance_length is None:
        return None
    k = log.k or (min(log.k_possible) if log.k_possible else max(1, math.ceil(log.acceptance_length - 1)))
    joint = log.per_position
    error = log.error
    if error is None:
        alpha = alpha_of(min(log.acceptance_length, k + 0.999), k)
        error = error_of(tuple(alpha**i for i in range(1, k + 1)), max(1.0, log.weight))
    return Observed(length=log.acceptance_length, k=k, joint=joint, drafts=log.weight, error=error)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compared(Piece):
    """One wiring beside the log.

    Attributes:
        name, kind: the difference to the wiring at hand in words; ``as trained`` for that itself.
        joint, length: on the dump, over the log's positions as far as the dump was run.
        z: distance from the log in standard errors, the largest over positions and length; ``counts_z`` without the allowance for other
        texts.
        group: wirings of one group cannot be separated by these counts; 0 where excluded.
    """

    name: str
    kind: str
    joint: tuple[float, ...]
    length: float
    z: float
    counts_z: float
    group: int = 0
    change: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    usual: int = 0

    @property
    def compatible(self) -> bool:
        """Whether the log does not exclude it."""
        return self.z <= EXCLUDED

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one entry."""
        return data(
            {
                "name": self.name,
                "kind": self.kind,
                "joint": [round(j, 4) for j in self.joint],
                "expected_length": round(self.length, 4),
                "z": round(self.z, 2) if math.isfinite(self.z) else None,
                "counts_z": round(self.counts_z, 2) if math.isfinite(self.counts_z) else None,
                "compatible": self.compatible,
                "group": self.group,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Compatibility(Shown):
    """Every wiring that was compared, the nearest first."""

    seen: Observed
    compared: tuple[Compared, ...]
    steps: int
    rows: int
    notes: tuple[str, ...] = ()

    @property
    def own(self) -> Compared:
        """The wiring at hand."""
        return next(c for c in self.compared if c.name == OWN)

    @property
    def compatible(self) -> tuple[Compared, ...]:
        """Those the log does not exclude."""
        return tuple(c for c in self.compared if c.compatible)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``compatible``."""
        return data(
            {
                "observed": {
                    "length": round(self.seen.length, 4),
                    "k": self.seen.k,
                    "per_position": [round(j, 4) for j in self.seen.joint],
                },
                "excluded_from": EXCLUDED,
                "rows": self.rows,
                "wirings": [c.to_dict() for c in self.compared],
                "notes": list(self.notes),
            }
        )


class Wirings:
    """Every single fault of one draft on one dump: run when first needed, compared with as many logs as wanted.

    Args:
        bench: the draft on the dump; its wiring is the one at hand.
        target: opened, or None.
        extra: further wirings, for instance the one an engine would run.
    """

    def __init__(self, bench: Bench, target: TargetSpec | None = None, *, extra: Iterable[Candidate] = ()) -> None:
        self.bench, self.target, self.extra = bench, target, tuple(extra)
        self._pool: list[Candidate] | None = None
        self._rates: dict[tuple[str, int], _Rates | str] = {}

    def pool(self) -> list[Candidate]:
        """What is compared beside the wiring at hand, each once."""
        if self._pool is None:
            from eagle3diag.draft.scope import scope_of
            from eagle3diag.draft.wirings import alternatives

            scope = scope_of(self.bench, self.target)
            some = {_key(c): c for c in alternatives(self.bench.base, scope, pairs=False, damage=True)}
            some |= {_key(c): c for c in self.extra if c.change}
            base = self.bench.base
            if scope.reduced and not scope.first_rows and base.head not in ("target-first-rows", "uninitialised"):
                # those rows are not at hand: under the draft's mapping they agree as seldom as a head drawn at random
                drawn = next((c for c in some.values() if c.change.get("head", (None, None))[1] == "uninitialised"), None)
                if drawn is not None and len(drawn.change) == 1:
                    change = {"head": (base.head, "target-first-rows")}
                    some["first rows"] = replace(drawn, name=f"{_HEAD_ROWS} (not at hand; taken to do as a random one)", change=change)
            self._pool = list(some.values())
        return self._pool

    def rates(self, wiring: Wiring, key: str, steps: int) -> _Rates | str:
        """Joint rates of a wiring, or why it cannot be run; ``steps`` of -1 for the first on a few samples."""
        if (key, steps) not in self._rates:
            try:
                self._rates[key, steps] = _rates(self.bench, wiring, abs(steps), few=steps < 0)
            except CheckpointError as error:
                self._rates[key, steps] = str(error)
        return self._rates[key, steps]

    def compare(self, seen: Observed, *, alone: bool = False, progress: Callable[[str], None] | None = None) -> Compatibility:
        """All of them beside one log.

        Args:
            seen: of the log.
            alone: the wiring at hand alone, which is enough where the log does not exclude it.
            progress: told in words what is being run.

        Raises:
            CheckpointError: the wiring at hand cannot be run.
        """
        steps = min(seen.k, self.bench.steps)
        notes: list[str] = []
        own = self.rates(self.bench.base, "", steps)
        if isinstance(own, str):
            raise CheckpointError(own)
        out = [_judge(OWN, "", own, seen, steps, {})]
        for n, c in enumerate(() if alone else self.pool()):
            if progress is not None:
                progress(f"wiring {n + 1} of {len(self.pool())}: {c.name}")
            key = _key(c)
            first = self._rates.get((key, steps)) or self.rates(c.wiring, key, -1)
            if isinstance(first, str):
                notes.append(f"not compared: {c.name}: {first}")
                continue
            far = _hopeless(first, seen, c.kind == "never loaded")
            whole = first if far else self.rates(c.wiring, key, steps)
            if isinstance(whole, _Rates):
                out.append(_judge(c.name, c.kind, whole, seen, len(whole.joint), dict(c.change)))
        if seen.k > self.bench.steps:
            notes.append(
                f"the log's chains of {seen.k} are compared by their first {self.bench.steps} positions"
                if seen.joint
                else f"the log's chains are {seen.k} long, the dump was run for {self.bench.steps}: further steps are extrapolated"
            )
        ordered = sorted(out, key=lambda c: (not c.compatible, round(c.counts_z, 1), c.name != OWN, c.name))
        rows = len(self.bench.all(self.bench.base))
        return Compatibility(seen=seen, compared=tuple(_grouped(ordered, seen)), steps=steps, rows=rows, notes=tuple(notes))


def _key(c: Candidate) -> str:
    return repr(sorted(c.change.items(), key=lambda item: item[0]))


@dataclass(slots=True)
class _Rates:
    """Joint rates of a wiring with their errors, and of the length."""

    joint: list[float]
    errors: list[float]
    length_error: float


def _rates(bench: Bench, wiring: Any, steps: int, *, few: bool = False) -> _Rates:
    import torch

    from eagle3diag.draft.bootstrap import blocks, resampled
    from eagle3diag.draft.measure import joined

    m = joined([bench.run(i, wiring, steps=steps) for i in range(_few(bench) if few else len(bench.samples))])
    alive = m.right[:, :steps].to(torch.float64).cumprod(1)
    n, block = len(alive), blocks(m.sample, m.row)
    spread = resampled(torch.cat([alive, alive.sum(1, keepdim=True)], 1), block).std(0).tolist()
    joint = alive.mean(0).tolist()
    floor = [math.sqrt(max(p * (1 - p), 1.0 / n) / n) for p in joint]
    return _Rates(joint, [max(a, b) for a, b in zip(spread[:-1], floor, strict=True)], max(spread[-1], floor[0]))


def _few(bench: Bench) -> int:
    """Samples that show whether a wiring is far off: a quarter of them, as many as hold some rows."""
    n, rows = 0, 0
    for i in range(len(bench.samples)):
        n, rows = i + 1, rows + int(bench.rows(i, bench.base).counted(bench.steps).sum())
        if 4 * n >= len(bench.samples) and rows >= _ROWS:
            break
    return n


def _hopeless(first: _Rates, seen: Observed, drawn: bool) -> bool:
    """Whether the first step alone is too far away for any course of the later ones."""
    p, error = first.joint[0], first.errors[0]
    if drawn:
        error = math.hypot(error, DRAWN[0] + DRAWN[1] * p)
    if seen.joint:
        own = math.sqrt(max(seen.joint[0] * (1 - seen.joint[0]), 1 / seen.drafts) / seen.drafts)
        return abs(p - seen.joint[0]) > 6 * math.hypot(error, own, OTHER_TEXT * max(p, seen.joint[0]))
    room = 6 * math.hypot(error * seen.k, seen.error, OTHER_TEXT * max(p, seen.length - 1))
    return not p - room <= seen.length - 1 <= seen.k * p + room


def _judge(name: str, kind: str, r: _Rates, seen: Observed, steps: int, change: dict[str, Any]) -> Compared:
    from eagle3diag.serving.metrics import extended

    joint = tuple(extended(r.joint, seen.k)) if not seen.joint else tuple(r.joint)
    length = 1.0 + sum(joint)
    z = counts = 0.0

    def drawn(p: float) -> float:
        return DRAWN[0] + DRAWN[1] * p if kind == "never loaded" else 0.0

    if seen.joint:
        for p, error, at in zip(r.joint, r.errors, seen.joint, strict=False):
            by_text = OTHER_TEXT * max(p, at)
            own = math.sqrt(max(at * (1 - at), 1 / seen.drafts) / seen.drafts)
            counts = max(counts, abs(p - at) / math.hypot(error, own, drawn(p)))
            z = max(z, abs(p - at) / math.hypot(error, own, by_text, OTHER_START, drawn(p)))
        part = 1.0 + sum(seen.joint[: len(r.joint)])
        gap, own = abs(1.0 + sum(r.joint) - part), seen.error
        reached = part - 1
    else:
        gap, own, reached = abs(length - seen.length), seen.error, seen.length - 1
        if steps == 1 and seen.k > 1:  # only the first step was run: it was too far away for the rest to matter
            gap = max(gap, 6 * math.hypot(r.length_error, own, OTHER_TEXT * max(sum(joint), reached), drawn(sum(joint))) * 1.01)
    by_draw = drawn(sum(r.joint))
    counts = max(counts, gap / math.hypot(r.length_error, own, by_draw))
    z = max(z, gap / math.hypot(r.length_error, own, OTHER_TEXT * max(sum(r.joint), reached), OTHER_START, by_draw))
    return Compared(name=name, kind=kind, joint=joint, length=length, z=z, counts_z=counts, change=change)


def _grouped(ordered: Sequence[Compared], seen: Observed) -> Iterable[Compared]:
    """Numbers the groups: a compatible wiring joins the first group whose head these counts cannot tell it from."""
    heads: list[Compared] = []
    for c in ordered:
        if not c.compatible:
            yield c
            continue
        for i, head in enumerate(heads):
            if not _separable(c, head, seen):
                yield replace(c, group=i + 1)
                break
        else:
            heads.append(c)
            yield replace(c, group=len(heads))


def _separable(a: Compared, b: Compared, seen: Observed) -> bool:
    if seen.joint:
        for p, q in zip(a.joint, b.joint, strict=False):
            error = math.sqrt(max(p * (1 - p), q * (1 - q), 1 / seen.drafts) / seen.drafts)
            if abs(p - q) > EXCLUDED * math.hypot(error, OTHER_TEXT * max(p, q)):
                return True
        return False
    return abs(a.length - b.length) > EXCLUDED * math.hypot(seen.error, OTHER_TEXT * max(a.length, b.length))
