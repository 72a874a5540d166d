"""DMP609 and DMP610: is the norm profile one a healthy target can have, and do equal prefixes have equal states?"""

from __future__ import annotations

from collections.abc import Iterator

from eagle3diag.errors import escaped
from eagle3diag.rules.dmp_view import evidence, share
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.registry import NotJudged, finding, rule

__all__: list[str] = []

_LISTED = 8


@rule("DMP609", severity=Severity.WARNING, needs=("dump",))
def profile(case: Case) -> Iterator[Finding]:
    """The norm profile is abnormal: a rotated residual stream, a slot out of scale, a sample unlike the others.

    ## What is wrong
    The states are not in the basis or on the scale the draft is served with: a quantised target whose residual stream is rotated (QuaRot,
    SpinQuant), a slot that was multiplied or divided on the way, samples of another model or run.

    ## Why it costs acceptance
    fc and the norms of the draft know single channels. After a rotation every channel is a mixture; acceptance falls to chance although
    all norms look right.

    ## How it is detected
    Rotated (an error): the kurtosis over channels is that of noise, below 3.5 where trained models show 20 to 150, and either the first
    token's sink, several times the usual norm, has no outlier channel either, or nothing fits the target's own tables although equal
    tokens clearly resemble each other. Out of scale (an error): neighbouring slots regressed on each other are off by 16 or more (0.8 to
    2.5 is usual). Unlike the others: a sample's median norm off by a factor of 2 and ten deviations, from four samples on.

    ## How to fix it
    Dump from the model as it is served, unrotated; undo scale factors; do not mix runs.

    ## Engine versions
    vLLM quantised with R1 rotations (compressed-tensors transforms): see ENG506.

    ## Source
    Sun et al. 2024 (massive activations), Ashkboos et al. 2024 (QuaRot). Sample dumps: kurtosis 22 to 155 at HF 1 to 28,
    2.9 to 3.0 rotated.
    """
    from eagle3diag.hidden.normchecks import jumps, scales

    dump, e = case.dump, evidence(case)
    assert dump is not None
    if not e.scan.samples or not any(bool(r.good[1:].any()) for s in e.scan.samples for r in s.rows.values()):
        raise NotJudged("no sound row to judge")
    if e.rotated:
        worst = max(e.rotated, key=lambda r: (r.sink is not None, r.sink or 0))
        proof = (
            f"the sink of {worst.sink:.0f} times the usual norm has kurtosis {worst.sink_kurtosis:.1f}"
            if worst.sink is not None and worst.sink_kurtosis is not None
            else f"nothing fits the target's tables (score {worst.lost:.1f})"
        )
        some = f" in {share(len(worst.samples), e.scan)}" if worst.samples else ""
        yield finding(
            "DMP609",
            f"the residual stream is rotated{some}: kurtosis over channels {worst.kurtosis:.1f} (noise is 3) in {len(e.rotated)} of "
            f"{len(dump.slots)} slots, {proof}",
            severity=Severity.ERROR,
            evidence={
                "slots": [
                    {"slot": r.slot.name, "hf": r.slot.hf, "kurtosis": r.kurtosis, "sink": r.sink, "sink_kurtosis": r.sink_kurtosis}
                    for r in e.rotated
                ],
                "samples": list(worst.samples[:_LISTED]) or "all",
            },
            remedy="Dump from the target without rotation (R1 off), or train and serve on the rotated one alike.",
            where=escaped(worst.slot.name, 200),
        )
    order = e.depth.meant if e.depth is not None and not e.depth.wrong else ()  # DMP606 speaks where they stand in another order
    by_position = {s.position: s for s in dump.aux}
    stream = [by_position[p] for p in order] + ([dump.final] if dump.final is not None and not e.normed and order else [])
    for odd in scales(e.scan, stream):
        yield finding(
            "DMP609",
            f"{escaped(odd.slot.name)} is out of scale: {odd.factor:.3g} times what {escaped(odd.against.name)} leads to expect",
            severity=Severity.ERROR,
            evidence={"slot": odd.slot.name, "hf": odd.slot.hf, "factor": odd.factor, "against": odd.against.name},
            remedy="Look for a scale that was applied or dropped on the way to this slot (a quantisation scale, an embedding multiplier).",
            where=escaped(odd.slot.name, 200),
        )
    unlike = [j for j in jumps(e.scan) if j.sample not in e.damaged]
    if unlike:
        first = max(unlike, key=lambda j: abs(j.factor - 1))
        samples = list(dict.fromkeys(j.sample for j in unlike))
        yield finding(
            "DMP609",
            f"the states of {escaped(first.sample)} are {first.factor:.3g} times the size of the other samples' "
            f"in {escaped(first.slot.name)}; {share(len(samples), e.scan)}",
            evidence={"samples": [{"sample": j.sample, "slot": j.slot.name, "factor": j.factor} for j in unlike[:_LISTED]]},
            remedy="Find out which run, model or dtype these samples came from, and dump them again with the others'.",
            where=escaped(first.sample, 200),
        )


@rule("DMP610", severity=Severity.WARNING, needs=("dump",))
def prefixes(case: Case) -> Iterator[Finding]:
    """The same prefix has different states in two samples.

    ## What is wrong
    A causal model gives equal beginnings equal states. Where they differ, one of them was computed with something else in front: a cache
    that leaked from another request, other weights, another system prompt that was cut from the tokens.

    ## Why it costs acceptance
    Such states are not those of serving; if many samples are concerned the draft is trained on noise.

    ## How it is detected
    Samples are ordered by their tokens; neighbours that share four or more first tokens are compared row by row. A relative difference
    above 0.2 in the median row is named (numerics of other batches and kernels stay below a few hundredths). Runs of one token (image
    placeholders, padding) end the prefix. Samples that DMP602 to DMP605 or DMP609 blame are left out.

    ## How to fix it
    Compute one of the two alone and compare; turn prefix caching off when dumping.

    ## Engine versions
    speculators 0.4 generator with batches; SGLang data parallel dumps.

    ## Source
    speculators#279, sgl-jax#334.
    """
    from eagle3diag.hidden.normchecks import jumps
    from eagle3diag.hidden.tokenchecks import conflicts

    e = evidence(case)
    found, pairs = conflicts(e.scan, e.damaged | {j.sample for j in jumps(e.scan)})
    if not pairs:
        raise NotJudged("no two samples share their first tokens")
    if not found:
        return
    worst = max(found, key=lambda c: c.difference)
    yield finding(
        "DMP610",
        f"{escaped(worst.samples[0])} and {escaped(worst.samples[1])} share their first {worst.tokens} tokens but not their states: "
        f"relative difference {worst.difference:.2f} in {escaped(worst.slot.name)}, from row {worst.first} on; "
        f"{len(found)} of {pairs} pairs",
        evidence={
            "pairs": [
                {"samples": list(c.samples), "tokens": c.tokens, "slot": c.slot.name, "difference": c.difference, "first_row": c.first}
                for c in found[:_LISTED]
            ],
            "compared": pairs,
        },
        remedy="Compute one of the two alone and see which it equals; dump again with prefix caching off.",
        where=escaped(worst.samples[0], 200),
    )
