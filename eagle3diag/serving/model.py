"""The nouns of this room: what a log says of speculation (``ServingLog``), in one arithmetic, each number with its definition.

Everywhere here the acceptance length counts the bonus token: 1 + accepted / drafts, where a draft is one verification. Per-position rates
are joint: position i counts where positions 0 to i were all accepted, so they sum to the length minus 1. Engines print other definitions;
they are translated once, when read, and what was translated is listed among the traps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from eagle3diag.display import Piece, Shown, data
from eagle3diag.serving.metrics import conditional

__all__ = ["Basis", "ContextBin", "EngineShare", "Launched", "Point", "Seen", "ServingLog", "Training", "Trap"]

Basis = Literal["counts", "windows", "lifetime", "stated"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Point(Piece):
    """A stretch of the log: windows that follow each other.

    Attributes:
        time: seconds since the beginning of the year at its first window, None where lines carry no time.
        length: acceptance length, the stretch pooled.
        throughput: tokens per second, mean of its windows, None where not printed.
        windows: lines it is made of.
    """

    time: float | None
    length: float
    throughput: float | None
    windows: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ContextBin(Piece):
    """Windows whose requests had between ``low`` and ``high`` tokens of context.

    ``error`` is the standard error of ``length`` over the windows.
    """

    low: float
    high: float
    context: float
    length: float
    error: float
    windows: int
    throughput: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one bin."""
        return {
            "context": round(self.context),
            "low": round(self.low),
            "high": round(self.high),
            "acceptance_length": round(self.length, 4),
            "standard_error": round(self.error, 4),
            "windows": self.windows,
            "throughput": None if self.throughput is None else round(self.throughput, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineShare(Piece):
    """What one of several engines or ranks contributed."""

    label: str
    windows: int
    length: float
    drafts: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of one share."""
        drafts = None if self.drafts is None else round(self.drafts)
        return {"engine": self.label, "windows": self.windows, "acceptance_length": round(self.length, 4), "drafts": drafts}


@dataclass(frozen=True, slots=True, repr=False)
class Seen(Piece):
    """A line that matters: ``key`` names what it means, ``text`` is how it read, ``means`` what follows."""

    key: str
    text: str
    means: str
    count: int = 1


@dataclass(frozen=True, slots=True, repr=False)
class Trap(Piece):
    """A number that is not what it looks like.

    ``kind``: ``bonus in rate``, ``ambiguous rate``, ``above one``, ``bonus left out``, ``beyond k``, ``requests``, ``simulated``,
    ``long chain``, ``tree``, ``old engine``, ``name``, ``mismatch``, ``foreign``.
    """

    kind: str
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Launched(Piece):
    """What the log says of the launch, None where it does not.

    Attributes:
        source: the kind of line it was read from.
        aux_layers: ids as printed, with ``aux_text`` the line's words.
        options: what was read, by the engine's own names.
        line: a launch line that stands in the log, as text.
    """

    engine: str | None = None
    version: str | None = None
    method: str | None = None
    target: str | None = None
    draft: str | None = None
    steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    interval: int | None = None
    aux_layers: tuple[int, ...] | None = None
    aux_text: str = ""
    source: str = ""
    line: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    starts: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``launch``; what is not known is left out."""
        names = ("method", "target", "draft", "steps", "topk", "draft_tokens", "source", "line")
        known = {n: getattr(self, n) for n in names if getattr(self, n) not in (None, "")}
        if self.aux_layers is not None:
            known["aux_layers"] = list(self.aux_layers)
        return known


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Training(Piece):
    """What a training run says of its own draft.

    Attributes:
        source: framework and file.
        rates: per step, as ``kind`` says: ``joint``, ``marginal`` or ``conditional``.
        length: tokens per verification that the run itself states, bonus token counted, None where it does not.
        caveats: why service may give less, in words.
    """

    source: str
    kind: Literal["joint", "marginal", "conditional", "length"]
    rates: tuple[float, ...] = ()
    length: float | None = None
    caveats: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``training``."""
        return data(
            {
                "source": self.source,
                "kind": self.kind,
                "rates": [round(r, 6) for r in self.rates],
                "stated_length": self.length,
                "expected_length": {str(k): round(self.expected(k), 4) for k in (1, 3, 5)} if self.rates else {},
                "caveats": list(self.caveats),
            }
        )

    def joint(self, k: int) -> tuple[float, ...]:
        """Joint rates of a chain of k; beyond what was measured, each step keeps what the last kept, a first step alone two thirds."""
        from eagle3diag.serving.metrics import extended, joint_of

        if not self.rates:
            return ()
        return extended(joint_of(self.rates, self.kind), k)

    def expected(self, k: int) -> float:
        """Tokens per verification of a chain of k."""
        return self.length if self.length is not None and not self.rates else 1.0 + sum(self.joint(k))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServingLog(Shown):
    """A log, read.

    Attributes:
        path, files: what was given, and what was read.
        formats: kind of line or document -> how many.
        engine, version: as told by its lines; ``version_source`` says which.
        acceptance_length: pooled, with the bonus token; ``basis`` says over what: ``counts`` (drafts and accepted tokens summed),
            ``windows`` (printed means weighted by running requests), ``lifetime`` (a mean the engine keeps) or ``stated``.
        error: standard error of the length; ``interval`` is 95 %.
        accepted, drafted, drafts: summed; None where the log holds no counts. ``estimated_drafts`` where they can be estimated.
        k: longest chain, by ``k_source``; ``k_possible`` where several fit.
        per_position: joint.
        histogram: verifications by number of accepted tokens, where told.
        rate_definition: SGLang's ``accept rate``: ``with bonus``, ``drafts only``, ``unknown``; empty where none is printed.
        mean_of_windows, mean_of_requests: unweighted.
        lengths: how many windows printed each length (two decimals); empty where too many kinds.
        throughput: tokens per second of one engine, mean over windows; ``running`` mean requests in flight.
        checked, mismatches: lines whose arithmetic was checked, and those that failed, in words.
    """

    path: str
    files: tuple[str, ...] = ()
    formats: Mapping[str, int] = field(default_factory=dict)
    engine: str | None = None
    version: str | None = None
    version_source: str = ""
    launched: Launched = field(default_factory=Launched)
    acceptance_length: float | None = None
    basis: Basis = "counts"
    error: float | None = None
    accepted: int | None = None
    drafted: int | None = None
    drafts: int | None = None
    estimated_drafts: int | None = None
    k: int | None = None
    k_source: str = ""
    k_possible: tuple[int, ...] = ()
    per_position: tuple[float, ...] = ()
    histogram: tuple[int, ...] | None = None
    rate_definition: str = ""
    printed_rate: float | None = None
    mean_of_windows: float | None = None
    mean_of_requests: float | None = None
    requests: int = 0
    windows: int = 0
    lengths: Mapping[float, int] = field(default_factory=dict)
    throughput: float | None = None
    running: float | None = None
    by_engine: tuple[EngineShare, ...] = ()
    series: tuple[Point, ...] = ()
    contexts: tuple[ContextBin, ...] = ()
    checked: int = 0
    mismatches: tuple[str, ...] = ()
    warnings: tuple[Seen, ...] = ()
    traps: tuple[Trap, ...] = ()
    training: Training | None = None
    notes: tuple[str, ...] = ()
    bytes: int = 0

    @property
    def readable(self) -> bool:
        """Whether anything on acceptance was read."""
        return self.acceptance_length is not None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens, no bonus."""
        if self.drafted:
            return (self.accepted or 0) / self.drafted
        if self.acceptance_length is not None and self.k:
            return (self.acceptance_length - 1) / self.k
        return None

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """Per position: accepted, given that all before were."""
        return conditional(self.per_position)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % of the acceptance length."""
        if self.acceptance_length is None or self.error is None:
            return None
        return max(1.0, self.acceptance_length - 1.96 * self.error), self.acceptance_length + 1.96 * self.error

    @property
    def weight(self) -> float:
        """Verifications it rests on, counted or estimated."""
        return float(self.drafts or self.estimated_drafts or self.windows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of ``log``."""
        return {
            "path": self.path,
            "files": list(self.files),
            "formats": dict(self.formats),
            "engine": self.engine,
            "version": self.version,
            "version_source": self.version_source,
            "acceptance_length": _round(self.acceptance_length),
            "basis": self.basis,
            "standard_error": _round(self.error),
            "interval": None if self.interval is None else [_round(x) for x in self.interval],
            "accepted": self.accepted,
            "drafted": self.drafted,
            "drafts": self.drafts,
            "estimated_drafts": self.estimated_drafts,
            "k": self.k,
            "k_source": self.k_source,
            "k_possible": list(self.k_possible),
            "acceptance_rate": _round(self.acceptance_rate),
            "printed_rate": _round(self.printed_rate),
            "rate_definition": self.rate_definition,
            "per_position": [_round(p) for p in self.per_position],
            "conditional": [_round(p) for p in self.conditional],
            "histogram": None if self.histogram is None else list(self.histogram),
            "mean_of_windows": _round(self.mean_of_windows),
            "mean_of_requests": _round(self.mean_of_requests),
            "requests": self.requests,
            "windows": self.windows,
            "throughput": _round(self.throughput),
            "running": _round(self.running),
            "by_engine": [e.to_dict() for e in self.by_engine],
            "contexts": [c.to_dict() for c in self.contexts],
            "launch": self.launched.to_dict(),
            "warnings": [{"key": w.key, "line": w.text, "means": w.means, "count": w.count} for w in self.warnings],
            "traps": [{"kind": t.kind, "says": t.text, **t.evidence} for t in self.traps],
            "checked": self.checked,
            "mismatches": list(self.mismatches),
            "training": None if self.training is None else self.training.to_dict(),
            "notes": list(self.notes),
        }


def _round(value: float | None) -> float | None:
    return None if value is None else round(float(value), 6)
