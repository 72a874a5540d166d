"""Views of the serving room: a log in one arithmetic, whether it pays, and what explains its number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Block, Table, View, count, percent, table

if TYPE_CHECKING:
    from eagle3diag.rules.explain import Explanation
    from eagle3diag.serving.compatible import Compatibility
    from eagle3diag.serving.model import ServingLog
    from eagle3diag.serving.payoff import Payoff

__all__ = [
    "compatibility_records",
    "compatibility_view",
    "explanation_records",
    "explanation_view",
    "length_words",
    "log_records",
    "log_view",
    "payoff_records",
    "payoff_view",
]

BASES = {
    "counts": "accepted tokens and verifications summed over all lines",
    "windows": "printed means, weighted by running requests: the log holds no counts",
    "lifetime": "the mean the engine keeps since its start",
    "stated": "as stated, without counts",
}

#: what SGLang's rate counts, in words
RATES = {"none": "which does not follow from the length by any definition", "unknown": "by one of two definitions"}


def length_words(log: ServingLog) -> str:
    """``1.49 (1.48 to 1.51)`` of at most k + 1."""
    if log.acceptance_length is None:
        return "no acceptance length"
    interval = "" if log.interval is None else f" ({log.interval[0]:.2f} to {log.interval[1]:.2f})"
    most = f" of at most {log.k + 1}" if log.k is not None else ""
    return f"{log.acceptance_length:.2f}{interval}{most}"


def log_records(log: ServingLog) -> list[dict[str, Any]]:
    """One row a stretch of the log."""
    return [{"time": p.time, "acceptance_length": p.length, "throughput": p.throughput, "windows": p.windows} for p in log.series]


def _chain(log: ServingLog) -> str:
    if log.k is not None:
        return f"{log.k} ({log.k_source})"
    return f"not told: {log.k_source}" if log.k_source else "not told"


def _facts(log: ServingLog) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("acceptance length, bonus token counted", length_words(log)),
        ("taken over", BASES[log.basis]),
        ("longest chain k", _chain(log)),
        ("accepted of drafted tokens", _share(log)),
    ]
    if log.drafts is not None:
        rows.append(("verifications", f"{log.drafts:,}"))
    elif log.estimated_drafts:
        rows.append(("verifications, estimated", f"{log.estimated_drafts:,}"))
    if log.rate_definition and log.printed_rate is not None:
        rows.append(("printed accept rate", f"{log.printed_rate:.2f}, {RATES.get(log.rate_definition, log.rate_definition)}"))
    if log.mean_of_requests is not None:
        rows.append((f"mean of {count(log.requests, 'request')}", f"{log.mean_of_requests:.3f}"))
    elif log.mean_of_windows is not None:
        rows.append((f"mean of {count(log.windows, 'line')}", f"{log.mean_of_windows:.3f}"))
    if log.throughput is not None:
        running = f" with {log.running:.1f} requests running" if log.running is not None else ""
        rows.append(("tokens per second", f"{log.throughput:.1f}{running}"))
    rows.append(("engine", " ".join(x for x in (log.engine, log.version) if x) or "not told"))
    rows += list(log.launched.to_dict().items())
    return rows


def _share(log: ServingLog) -> str:
    if log.acceptance_rate is None:
        return "not told"
    of = f" ({log.accepted:,} of {log.drafted:,})" if log.accepted is not None and log.drafted is not None else ""
    return percent(log.acceptance_rate) + of


def log_view(log: ServingLog) -> View:
    """The length first, then positions, engines, contexts, and the lines that matter."""
    if not log.readable:
        told = f"training metrics: {log.training.source}" if log.training is not None else "nothing on speculation could be read"
        return View(title=f"Log {log.path}", summary=told, status="none" if log.training is not None else "error", notes=log.notes)
    tables = [table("In one arithmetic", ("number", "value"), _facts(log))]
    if log.per_position:
        pairs = zip(log.per_position, log.conditional, strict=True)
        rows = ((i + 1, percent(joint), percent(cond)) for i, (joint, cond) in enumerate(pairs))
        tables.append(table("Accepted by position", ("position", "joint: it and all before", "conditional: if all before"), rows))
    if log.histogram is not None:
        tables.append(table("Verifications by accepted tokens", ("accepted", "verifications"), enumerate(log.histogram)))
    if log.by_engine:
        rows_ = ((e.label, e.windows, f"{e.length:.3f}", "–" if e.drafts is None else f"{e.drafts:,.0f}") for e in log.by_engine)
        tables.append(table("By engine or rank", ("engine", "lines", "length", "verifications"), rows_))
    if len(log.contexts) > 1:
        shown = (
            (f"{c.context:,.0f}", f"{c.length:.2f}", "–" if c.throughput is None else f"{c.throughput:.1f}", c.windows)
            for c in log.contexts
        )
        tables.append(table("By context of a request", ("tokens of context", "length", "tokens/s of a request", "windows"), shown))
    if log.warnings:
        tables.append(table("Lines that matter", ("line", "what follows", "times"), ((w.text, w.means, w.count) for w in log.warnings)))
    checked = f"Arithmetic checked on {log.checked:,} printed numbers: {len(log.mismatches)} do not follow." if log.checked else ""
    notes = [f"{n}." if n.startswith("vLLM") else f"{n[:1].upper()}{n[1:]}." for n in (*(t.text for t in log.traps), *log.notes)]
    return View(
        title=f"Log {log.path}",
        summary=f"acceptance length {length_words(log)}, {count(log.windows, 'line')} of {log.engine or 'an unknown engine'}",
        tables=tuple(tables),
        notes=tuple(n for n in (checked, *notes) if n),
    )


def payoff_records(pay: Payoff) -> list[dict[str, Any]]:
    """One row a context, or the whole."""
    if pay.by_context:
        return [{"context": c, "speedup": s} for c, s in pay.by_context]
    return [{"context": None, "speedup": pay.speedup}]


def payoff_view(pay: Payoff) -> View:
    """Faster or slower, the cost of a verification, the length to reach, the best chain."""
    word = "faster" if pay.pays else "slower"
    rows: list[tuple[str, str]] = [
        ("with speculation", f"{pay.measured:.1f} tokens/s at length {pay.length:.2f}" + (f", k = {pay.k}" if pay.k else "")),
        ("without", f"{pay.baseline:g} tokens/s"),
        ("a verification with its drafts costs", f"{pay.cost:.2f} plain decoding steps"),
        ("breaks even at a length of", f"{pay.cost:.2f}"),
    ]
    if pay.draft_cost is not None and pay.best_k is not None and pay.best_speedup is not None:
        rows.append(("a draft step costs, if a verification costs one step", f"{pay.draft_cost:.2f} plain steps"))
        best = (
            f"{pay.best_k}: {pay.best_speedup:.2f} times plain decoding" if pay.best_k else "none: plain decoding is faster at any length"
        )
        rows.append(("best chain at this acceptance", best))
    tables = [table("Does it pay", ("what", "value"), rows)]
    if pay.by_context:
        tables.append(
            table("By context", ("tokens of context", "times plain decoding"), ((f"{c:,.0f}", f"{s:.2f}") for c, s in pay.by_context))
        )
    return View(
        title="Does speculation pay",
        summary=f"{pay.speedup:.2f} times plain decoding: {word}",
        status="ok" if pay.pays else "warning",
        tables=tuple(tables),
        notes=("The baseline has to be measured with as many requests in flight. By context it is held constant.",),
    )


def compatibility_records(found: Compatibility) -> list[dict[str, Any]]:
    """One row a wiring, as in the JSON output."""
    return [c.to_dict() for c in found.compared]


def compatibility_view(found: Compatibility) -> View:
    """Which wirings the log allows, the nearest first."""
    from eagle3diag.serving.compatible import OWN

    own, allowed = next((c for c in found.compared if c.name == OWN), None), found.compatible
    k = found.seen.k
    if own is None:
        told = "was compared with no wiring as trained"
    else:
        told = "allows the wiring as trained" if own.compatible else f"excludes the wiring as trained ({own.z:.1f} standard errors)"
    rows = (
        (
            c.name,
            "yes" if c.compatible else "no",
            c.group or "–",
            f"{c.z:.1f}".replace("inf", "beyond measure"),
            f"{c.length:.2f}",
            " ".join(percent(j).removesuffix(" %") for j in c.joint),
        )
        for c in found.compared
    )
    return View(
        title="Wirings that would give this log",
        summary=f"the log {told}; {len(allowed)} of {count(len(found.compared), 'wiring')} are compatible with it",
        status="skipped" if own is None else "ok" if own.compatible else "warning",
        tables=(
            table(
                f"On {count(found.rows, 'row')} of the dump, chains of {k}",
                ("wiring", "compatible", "group", "standard errors away", "length", "joint by position, %"),
                rows,
                status=("ok" if c.compatible else "none" for c in found.compared),
            ),
        ),
        notes=("Wirings of one group cannot be told apart by these counts.", *(f"{n[:1].upper()}{n[1:]}." for n in found.notes)),
    )


def explanation_records(found: Explanation) -> list[dict[str, Any]]:
    """One row a cause, as in the JSON output."""
    return [c.to_dict() for c in found.causes]


def explanation_view(found: Explanation) -> View:
    """The causes in order, each with what speaks for and against it, and what to do next."""
    live = [c for c in found.causes if not c.excluded]
    out = [c for c in found.causes if c.excluded]
    blocks = tuple(
        Block(
            status="none",
            code=f"{n}.",
            title=c.name,
            evidence=(("for", "; ".join(c.for_) or "nothing"), ("against", "; ".join(c.against) or "nothing")),
        )
        for n, c in enumerate(live, 1)
    )
    tables: tuple[Table, ...] = ()
    if out:
        rows = ((c.name, "; ".join(c.against)) for c in out)
        tables = (table("Ruled out", ("cause", "by"), rows),)
    tied = [c for c in live if abs(c.score - live[0].score) < 1e-9]
    first = f"likeliest: {live[0].name}" if live else "nothing that was tried explains it"
    if len(tied) > 1:
        first = f"{len(tied)} causes fit equally well, what was given does not tell them apart: {'; '.join(c.name for c in tied[:4])}"
        first += f"; and {len(tied) - 4} more" if len(tied) > 4 else ""
    return View(
        title=f"Why a length of {found.observed:.2f}",
        summary=first,
        blocks=blocks,
        tables=tables,
        notes=(f"Next experiment: {found.experiment}", *(f"{n[:1].upper()}{n[1:]}." for n in found.notes)),
    )
