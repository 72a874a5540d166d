"""SRV806, SRV807 and SRV809: the course over context, whether it pays, and whether the log can be read at all."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.registry import NotJudged, finding, rule
from eagle3diag.rules.srv_look import judged

__all__: list[str] = []

_EVEN = 0.995  # of the baseline: as fast, by what throughputs are worth


@rule("SRV806", severity=Severity.WARNING, needs=("log",))
def context(case: Case) -> Iterator[Finding]:
    """Acceptance decays with context length.

    ## What is wrong
    The longer the context of the requests, the fewer drafted tokens are accepted.

    ## Why it costs acceptance
    A draft trained on short texts, with another rope scaling than the target's, or served past its `max_position_embeddings`, does not know
    what to do with far positions.

    ## How it is detected
    Windows are sorted by tokens in the cache per running request. The shortest quarter is compared with the longest, which has to be three
    times as long and 1,000 tokens at least: a fall of 0.15 tokens and a quarter of the accepted ones, beyond four standard errors, with the
    contexts between going the same way, or of half the accepted ones in one step.

    ## How to fix it
    Compare rope base and scaling with the target's (CFG109), `max_position_embeddings` with the served context (CFG108); train on longer
    texts, or give the draft a sliding window where the engine honours it; switch speculation off for long contexts.

    ## Engine versions
    SGLang's log tells the context; vLLM's does not. vLLM ignores a draft's `sliding_window`.

    ## Source
    Field reports H5 (2.30 at 2k to 1.08 at 20k), H1 to H4, H6.
    """
    from eagle3diag.serving.patterns import decay

    log = judged(case)
    if not log.contexts:
        raise NotJudged("the log does not tell the context of its requests (SGLang's decode lines do)")
    seen = decay(log.contexts)
    if seen is None:
        return
    yield finding(
        "SRV806",
        f"acceptance length {seen.short:.2f} at about {seen.short_context:,.0f} tokens of context, {seen.long:.2f} at "
        f"{seen.long_context:,.0f}",
        evidence={
            "short_context": round(seen.short_context),
            "short_length": round(seen.short, 4),
            "long_context": round(seen.long_context),
            "long_length": round(seen.long, 4),
            "standard_errors": round(seen.z, 1),
            "by_context": [[round(c.context), round(c.length, 3), c.windows] for c in log.contexts],
        },
        remedy="Compare rope and max_position_embeddings with the target's and the served context (CFG108, CFG109); train on longer texts.",
        where="context",
    )


@rule("SRV807", severity=Severity.WARNING, needs=("log", "baseline"))
def pays(case: Case) -> Iterator[Finding]:
    """Speculation does not pay: it is slower than plain decoding at this acceptance.

    ## What is wrong
    Fewer tokens per second with the draft than without it.

    ## Why it costs acceptance
    It does not; the acceptance is too low for what a verification and its drafts cost.

    ## How it is detected
    The log's throughput against the one given with `--baseline`, half a per cent allowed. From both follow the cost of a verification in
    plain decoding steps and the length at which speculation would break even; the cost is split into one plain step and equal draft steps
    to say which chain would be best.

    ## How to fix it
    Shorter chains, where drafting costs more than it brings; a better draft; no speculation at high load. Measure the baseline under the
    same load: SGLang caps running requests at 48 with speculation.

    ## Engine versions
    All: it does not depend on the engine.

    ## Source
    Field reports G15 (base 222 tokens/s, with a draft 160 at length 1.86).
    """
    from eagle3diag.serving.payoff import payoff

    log = judged(case)
    assert case.baseline is not None
    one = payoff(log, case.baseline)
    if one is None:
        raise NotJudged("the log tells no throughput")
    if one.speedup >= _EVEN:
        return
    title = (
        f"{one.measured:.1f} tokens/s with speculation, {one.baseline:g} without: at length {one.length:.2f}"
        + (f" of at most {one.k + 1}" if one.k else "")
        + f" a verification costs {one.cost:.2f} plain steps, so it would break even at length {one.cost:.2f}"
    )
    remedy = "Compare under the same load"
    if one.best_k == 0:
        remedy += (
            "; no chain length would be faster than plain decoding at this acceptance: switch speculation off, or train a better draft."
        )
    elif one.best_k is not None and one.best_speedup is not None:
        best = f"{one.best_speedup:.2f} times plain decoding (if a verification costs one step)"
        remedy += f"; a chain of {one.best_k} would be the best, at {best}."
    else:
        remedy += "; shorten the chain, or switch speculation off at this load."
    yield finding("SRV807", title, evidence=one.to_dict(), remedy=remedy, where="throughput")


@rule("SRV809", severity=Severity.INFO, needs=("log",))
def readable(case: Case) -> Iterator[Finding]:
    """The log cannot be read, or several engines are interleaved in it.

    ## What is wrong
    No line says anything on speculation; or lines of several engines or ranks alternate; or a file breaks off.

    ## Why it costs acceptance
    It does not. Without a line nothing can be judged; with several engines a mean of their lengths would be wrong, so counts are summed.

    ## How it is detected
    By the formats of both engines in all recorded versions. An error where nothing was read.

    ## How to fix it
    SGLang prints acceptance in its decode lines, every 40 steps; vLLM in `SpecDecoding metrics` lines, unless statistics are switched off
    (`--disable-log-stats`). If there are none, speculation may be off: look at the start of the log for the algorithm.

    ## Engine versions
    SGLang 0.4.6 to 0.5.23, vLLM 0.8.4 to 0.33.0.

    ## Source
    engines.md 6, vllm_transitions.md 4, field reports 3.
    """
    log = case.log
    assert log is not None
    if not log.readable:
        if log.training is not None:
            yield finding(
                "SRV809",
                f"no serving log: these are training metrics ({log.training.source})",
                evidence=log.training.to_dict(),
                remedy="Give them beside a serving log: eagle3diag check DRAFT --log FILE --metrics THIS.",
            )
            return
        if log.drafted:
            yield finding(
                "SRV809",
                f"{log.accepted:,} of {log.drafted:,} drafted tokens accepted ({100 * (log.acceptance_rate or 0):.1f} %), but neither "
                "chain nor length is printed (vLLM 0.8.4): no acceptance length follows",
                evidence={"accepted": log.accepted, "drafted": log.drafted},
                remedy="Give the log from its start, where the engine prints num_speculative_tokens: the length is 1 + rate x k.",
            )
            return
        launched = log.launched
        off = "" if launched.source == "" or launched.method else f" ({launched.source} names no speculative algorithm: it may be off)"
        yield finding(
            "SRV809",
            f"nothing on speculation in {escaped(log.path, 120)}, {log.bytes:,} bytes{off}",
            severity=Severity.ERROR,
            evidence={
                "files": [escaped(f, 120) for f in log.files[:8]],
                "bytes": log.bytes,
                "engine": launched.engine,
                "version": launched.version,
            },
            remedy="Give the log of the server itself, from a time with requests; vLLM prints nothing with --disable-log-stats.",
        )
        return
    if len(log.by_engine) > 1:
        shown = ", ".join(f"{e.label} {e.length:.2f}" for e in log.by_engine[:6])
        how = "their counts are summed" if log.drafts else "their windows are weighted by running requests"
        yield finding(
            "SRV809",
            f"{len(log.by_engine)} engines or ranks are interleaved ({shown}): {how}, {log.acceptance_length:.2f} in all",
            evidence={"engines": [e.to_dict() for e in log.by_engine[:32]]},
            remedy="Judge each engine by its own lines where they should not be alike.",
        )
    for t in log.traps:
        if t.kind == "foreign":
            yield finding("SRV809", t.text, evidence=dict(t.evidence), remedy="Give each engine's log by itself.")
    broken = [n for n in log.notes if "breaks off" in n]
    if broken:
        yield finding("SRV809", broken[0], evidence={"notes": broken}, remedy="Copy the file again if more is wanted.")
