"""DMP601 to DMP605: is a dump readable, whole, made of states, and do its rows belong to its tokens?

Each row is blamed once: what is garbage is not searched for NaN, what is not whole is not aligned (``hidden.scan``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3diag.errors import escaped
from eagle3diag.rules.dmp_view import evidence, names, row_words, share
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.registry import NotJudged, finding, rule

__all__: list[str] = []

_LISTED = 8


@rule("DMP601", severity=Severity.ERROR, needs=("dump-file",))
def unreadable(case: Case) -> Iterator[Finding]:
    """The dump, or some of its files, cannot be read or are of no known format.

    ## What is wrong
    A file is cut, damaged, of a format no trainer or server writes, or it holds other states than its neighbours.

    ## Why it costs acceptance
    A trainer that skips such files trains on less than it was given; one that does not stops, or pads what is missing.

    ## How it is detected
    Every file is opened from its header: arrays, shapes and companions have to make a known format, and the same one throughout. Files of
    the majority are judged further, the others are left out and named here. Reading a sample must give what its header said.

    ## How to fix it
    Dump those samples again; do not mix runs in one folder. If every file is of a format that is not known, convert it to the portable
    format (`eagle3diag.hidden.portable.write_sample`).

    ## Engine versions
    All: it does not depend on the engine.

    ## Source
    Formats: dialects 4.4; reports SpecForge d287b1f8, vLLM blog issue 184 (axis order in another order than documented).
    """
    dump = case.dump
    assert dump is not None
    bad = [(i.file, i.message, Severity.ERROR) for i in dump.issues if i.kind == "unreadable"]
    bad += [(i.file, i.message, Severity.WARNING) for i in dump.issues if i.kind not in ("unreadable", "length", "mask")]
    if len(dump):
        bad += [(name, why, Severity.ERROR) for name, why in evidence(case).scan.unread]
    for severity in (Severity.ERROR, Severity.WARNING):
        group = [(file, message) for file, message, s in bad if s is severity]
        if not group:
            continue
        if not len(dump):
            title = f"the dump cannot be read: {group[0][1]}"
        else:
            what = "cannot be read" if severity is Severity.ERROR else "differ from the rest"
            title = f"{len(group)} file{'s' if len(group) > 1 else ''} of the dump {what}: {group[0][1]}"
        yield finding(
            "DMP601",
            title,
            severity=severity,
            evidence={"format": dump.format, "files": [{"file": f, "why": m} for f, m in group[:_LISTED]], "in_all": len(group)},
            remedy="Dump these samples again, or leave them out of the folder: what is trained on must be readable, and of one kind.",
            where=escaped(group[0][0] or dump.path, 200),
        )


@rule("DMP602", severity=Severity.ERROR, needs=("dump",))
def lengths(case: Case) -> Iterator[Finding]:
    """Hidden rows and token ids differ in length.

    ## What is wrong
    A sample has fewer, or more, rows of states than tokens. Nothing in the file says which tokens have no state.

    ## Why it costs acceptance
    A trainer that cuts to the shorter length pairs states with the tokens of other positions: the draft learns noise.

    ## How it is detected
    The lengths the headers state, and those found on reading, for every slot. Where one end of the tokens fits the rows (rows of equal
    tokens resemble each other), the evidence says which end is missing.

    ## How to fix it
    Dump again with prefix caching off (vLLM `--no-enable-prefix-caching`, SGLang `--disable-radix-cache`), without speculation, and
    reject samples whose lengths differ. Do not cut or pad.

    ## Engine versions
    vLLM 0.22 with prefix caching; SGLang with a radix-cache hit, and `return_hidden_states` under any speculative mode.

    ## Source
    vllm#44485, SpecForge c7fc438e, sglang#26163, openvino#33975.
    """
    dump = case.dump
    assert dump is not None
    scan = evidence(case).scan
    wrong: dict[str, tuple[int, list[int]]] = {}
    for ref in dump.samples:
        if ref.tokens is not None and ref.rows is not None and ref.tokens != ref.rows:
            wrong[ref.name] = (ref.tokens, [ref.rows])
    for s in scan.samples:
        rows = sorted({len(r.l2) for r in s.rows.values()})
        if rows and rows != [s.tokens]:
            wrong[s.name] = (s.tokens, rows)
    inner = [i for i in dump.issues if i.kind == "length"]
    if not wrong and not inner:
        return
    if wrong:
        name, (tokens, rows) = next(iter(wrong.items()))
        title = f"{escaped(name)} has {' and '.join(map(str, rows))} rows of states for {tokens} tokens"
        title += f", and {len(wrong) - 1} more of {len(dump)} samples differ too" if len(wrong) > 1 else f" (1 of {len(dump)} samples)"
        place = name
    else:
        title, place = inner[0].message, inner[0].file
    listed = [{"sample": n, "tokens": t, "rows": r} for n, (t, r) in list(wrong.items())[:_LISTED]]
    yield finding(
        "DMP602",
        title,
        evidence={
            "samples": listed,
            "in_all": len(wrong),
            "issues": [i.message for i in inner[:_LISTED]],
            "missing": _missing_end(case, wrong),
        },
        remedy="Dump these samples again with prefix caching and speculation off, and reject a sample whose lengths differ.",
        where=escaped(place, 200),
    )


def _missing_end(case: Case, wrong: dict[str, tuple[int, list[int]]]) -> str | None:
    """Which end of the tokens the rows of the first short sample fit, in words; None where that cannot be told."""
    from eagle3diag.hidden.alignment import identity_scores

    dump = case.dump
    assert dump is not None
    for ref in dump.samples:
        if ref.name not in wrong or len(wrong[ref.name][1]) != 1:
            continue
        sample = dump.read(ref)
        slot = next((s for s in dump.slots if s.hf != 0), None)
        if slot is None:
            return None
        states = sample.states[slot.position]
        rows, tokens = len(states), len(sample.token_ids)
        if not 0 < rows < tokens or rows > 4096:
            return None
        good = states.float().isfinite().all(-1)
        first = identity_scores(states, sample.token_ids[:rows], good, 0).now
        last = identity_scores(states, sample.token_ids[tokens - rows :], good, 0).now
        if max(first, last) < 8 or min(first, last) > 0.7 * max(first, last):
            return None
        gone = tokens - rows
        return f"{ref.name}: the states of the {'last' if first > last else 'first'} {gone} tokens are missing"
    return None


def _slot_rows(case: Case, kind: str) -> list[dict[str, Any]]:
    """Where rows are ``nan``, ``zero`` or ``garbage``: one entry per sample and slot."""
    from eagle3diag.hidden.scan import spans

    dump = case.dump
    assert dump is not None
    out = []
    moved: dict[str, list[int]] = {}
    for shifted in evidence(case).alignment.found:
        moved.setdefault(shifted.sample, []).append(shifted.shift)
    for s in evidence(case).scan.samples:
        for slot in dump.slots:
            rows = s.rows[slot.position]
            hit = getattr(rows, kind).clone()
            if kind == "zero":  # what a shift left empty belongs to the shift (DMP605)
                for m in moved.get(s.name, ()):
                    hit[: max(0, -m)] = False
                    hit[len(hit) - max(0, m) :] = False
            if bool(hit.any()):
                runs = spans(hit)
                entry: dict[str, Any] = {
                    "sample": s.name,
                    "slot": slot.name,
                    "hf": slot.hf,
                    "rows": row_words(runs),
                    "count": int(hit.sum()),
                }
                if kind == "nan":
                    entry["values"], entry["only_inf"], entry["first_row_only"] = rows.holes, rows.infinite, runs == ((0, 0),)
                else:
                    entry["at_end"] = runs[-1][1] == len(rows.l2) - 1
                out.append(entry)
    return out


@rule("DMP603", severity=Severity.ERROR, needs=("dump",))
def holes(case: Case) -> Iterator[Finding]:
    """NaN or Inf among the hidden states.

    ## What is wrong
    Some states are not numbers. Training goes on with a loss of NaN, or the loader drops the sample without a word.

    ## Why it costs acceptance
    One NaN in a batch poisons every weight it reaches; samples that are dropped are not trained on.

    ## How it is detected
    Every row of every slot is reduced to its norm, which is finite only if every value is. Rows that are random bits as a whole are
    left to DMP604.

    ## How to fix it
    Find the first slot and row named here in the run that dumped it. Inf in the first row alone is the sink token beyond float16's 65,504:
    dump in bfloat16.

    ## Engine versions
    All: it does not depend on the engine.

    ## Source
    SpecForge#104, speculators#615, #966 and #994.
    """
    found = _slot_rows(case, "nan")
    if not found:
        return
    scan = evidence(case).scan
    samples = list(dict.fromkeys(e["sample"] for e in found))
    slots = list(dict.fromkeys(e["slot"] for e in found))
    only_inf = all(e["only_inf"] for e in found)
    overflow = only_inf and all(e["first_row_only"] for e in found)
    where = f"{found[0]['rows']} of {escaped(found[0]['slot'])} in {escaped(found[0]['sample'])}"
    yield finding(
        "DMP603",
        f"{'Inf' if only_inf else 'NaN or Inf'} in {where}; {share(len(samples), scan)}, {len(slots)} of {len(scan.dump.slots)} slots",
        evidence={"places": found[:_LISTED], "in_all": len(found), "slots": slots, "samples": names(samples)},
        remedy="Dump in bfloat16: the first token's state exceeds float16's 65,504."
        if overflow
        else "Drop these samples and look for the cause in the run that dumped them, at the slot and row named; do not train on them.",
        where=escaped(found[0]["slot"], 200),
    )


@rule("DMP604", severity=Severity.ERROR, needs=("dump",))
def garbage(case: Case) -> Iterator[Finding]:
    """Garbage or zero rows: an uninitialised tail, a short read.

    ## What is wrong
    Some rows were never written: zeros, one constant, the bits of other data, or noise without the structure of a state.

    ## Why it costs acceptance
    The draft is trained to predict tokens from nothing; on random bits the loss explodes.

    ## How it is detected
    Per row: nothing but one value; sizes spread over far more powers of two than a state's (standard deviation of log2|x| above 5 bits;
    states 1.6 to 2.6, random bits 9 to 73); a norm 30 times below the slot's median; or a tail of eight rows or more whose kurtosis over
    channels is that of noise where the rows before have outlier channels. HF index 0 is exempt from zeros: a padding token's embedding
    may be zero.

    ## How to fix it
    Dump these samples again; a reader must check how many bytes it got.

    ## Engine versions
    All: it does not depend on the engine.

    ## Source
    SpecForge d287b1f8 (short zero-copy read accepted).
    """
    for kind, what in (("zero", "zero or constant"), ("garbage", "garbage")):
        found = _slot_rows(case, kind)
        if not found:
            continue
        scan = evidence(case).scan
        samples = list(dict.fromkeys(e["sample"] for e in found))
        first = found[0]
        tail = " at the end" if first["at_end"] else ""
        yield finding(
            "DMP604",
            f"{first['rows']}{tail} of {escaped(first['slot'])} in {escaped(first['sample'])} "
            f"{'are' if first['count'] > 1 else 'is'} {what}; {share(len(samples), scan)}",
            evidence={"kind": what, "places": found[:_LISTED], "in_all": len(found), "samples": names(samples)},
            remedy="Dump these samples again, and check in the writer or reader how many rows really arrived; do not train on them.",
            where=escaped(first["slot"], 200),
        )


@rule("DMP605", severity=Severity.ERROR, needs=("dump",))
def misaligned(case: Case) -> Iterator[Finding]:
    """Rows misaligned with the tokens: shifted, or another sample's.

    ## What is wrong
    Row t does not hold the state of token t: everything is some places late or early, or two samples' states changed places.

    ## Why it costs acceptance
    The draft learns to predict from the wrong position. Trained on it, it is useless; served with states taken rightly, it is worse.

    ## How it is detected
    Rows of equal tokens resemble each other in every layer of a transformer: the shift at which they resemble most is where the rows
    belong, and under whose tokens they do tells swapped samples. With the target's tables (or the rows beside a portable dump) the final
    state must prefer the next token through norm and head, and HF index 0 must be the embedding row. A shift is named only where it scores
    8 times its own noise and the right place scores below 0.85 of it. Skipped where no sample has tokens enough to tell.

    ## How to fix it
    Fix the writer: pair each request's states with its own tokens (batches and chunked prefill change the order), and store the state
    of token t in row t. Shift in the trainer, not in the dump.

    ## Engine versions
    All: it does not depend on the engine.

    ## Source
    speculators#279 and #283, SpecForge 9ca23a3d, sglang#26163; alignment: dialects 4.3.
    """
    e = evidence(case)
    if not e.alignment.judged and not e.alignment.found:
        raise NotJudged("too few rows, or tokens too seldom repeated, to tell where the rows belong")
    groups: dict[tuple[str, int], list[Any]] = {}
    for m in e.alignment.found:
        groups.setdefault((m.kind, m.shift), []).append(m)
    for (kind, shift), members in groups.items():
        first = max(members, key=lambda m: m.fits - m.here)
        samples = list(dict.fromkeys(m.sample for m in members))
        many = share(len(samples), e.scan)
        if kind == "shift":
            n = abs(shift)
            title = f"states are {n} row{'s' if n > 1 else ''} {'late' if shift < 0 else 'early'} against the tokens in {many}"
            title += f", rows {first.rows[0]} to {first.rows[1]} only" if first.rows is not None else ""
        elif kind == "swapped":
            title = f"{escaped(first.sample)} holds the states of {escaped(first.other)}'s tokens; {many}"
        else:
            title = f"the states of {escaped(first.sample)} belong to no tokens of this dump; {many}"
        yield finding(
            "DMP605",
            title,
            evidence={
                "kind": kind,
                "shift": shift,
                "by": first.by,
                "score_there": first.fits,
                "score_here": first.here,
                "slots": list(first.slots),
                "rows": None if first.rows is None else list(first.rows),
                "samples": [{"sample": m.sample, "fits": m.other or m.sample, "slots": list(m.slots)} for m in members[:_LISTED]],
            },
            remedy="Fix the writer so that row t holds the state of token t of the same request, and dump again."
            if kind != "shift"
            else f"Write the state that now stands in row t to row t {'-' if shift < 0 else '+'} {abs(shift)}, and dump again.",
            where=escaped(samples[0], 200),
        )
