"""Views of the hidden room: what a dump holds, the norms of its states, two dumps compared, and what a capture wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3diag.report.layout import Block, View, count, figure_text, table

if TYPE_CHECKING:
    from eagle3diag.hidden.capture import Capture
    from eagle3diag.hidden.identity import DumpComparison
    from eagle3diag.hidden.model import HiddenDump, Slot
    from eagle3diag.hidden.norms import NormProfile
    from eagle3diag.hidden.tokens import TokenNorms

__all__ = [
    "capture_records",
    "capture_view",
    "comparison_records",
    "comparison_view",
    "dump_records",
    "dump_view",
    "profile_records",
    "profile_view",
    "sink_text",
    "slot_name",
    "state_name",
    "tokens_records",
    "tokens_view",
]

FORMATS = {
    "portable": "eagle3diag itself",
    "speculators": "speculators 0.5 and newer",
    "speculators-legacy": "speculators 0.3 and 0.4",
    "speculators-v0": "speculators before 0.3",
    "specforge": "SpecForge",
    "modelopt": "ModelOpt",
    "angelslim": "AngelSlim",
    "eagle1": "EAGLE",
    "vllm-connector": "vLLM's hidden-states connector",
    "sglang-json": "SGLang's meta_info.hidden_states",
    "baldeagle": "BaldEagle",
    "torchspec": "TorchSpec",
}
NORMS = {
    "pre": "before the target's final norm",
    "post": "after the target's final norm",
    "unknown": "whether before or after the norm is not said",
}

OFF = 0.02  #: mean relative error; rounding gives 1e-6 in float32 and up to 0.01 in bfloat16


def slot_name(slot: Slot) -> str:
    """``HF 15``, ``slot 2`` where no layer is recorded, ``final``."""
    if slot.role == "final":
        return "final"
    return f"slot {slot.position}" if slot.hf is None else f"HF {slot.hf}"


def state_name(name: str) -> str:
    """The same from the name alone: ``hidden_states.15`` is ``HF 15``."""
    number = name.removeprefix("hidden_states.")
    return f"HF {number}" if number != name and number.isdecimal() else "final" if name.startswith("final_") else name


def dump_records(dump: HiddenDump) -> list[dict[str, Any]]:
    """One row a sample: name, file, tokens, rows."""
    return [{"sample": r.name, "file": r.file, "tokens": r.tokens, "rows": r.rows} for r in dump.samples]


def dump_view(dump: HiddenDump) -> View:
    """Format, slots and samples, problems first."""
    states = ", ".join(slot_name(s) for s in dump.slots) or "none"
    summary = (
        f"{count(len(dump.samples), 'sample')} in the format of {FORMATS.get(dump.format, dump.format)}, states of width {dump.hidden:,}"
    )
    final = "no final state" if dump.final is None else f"final state {NORMS[dump.final_norm]}"
    return View(
        title=f"Dump {dump.path}",
        summary=summary + (f"; {count(len(dump.issues), 'problem')} seen" if dump.issues else ""),
        status="error" if dump.issues else "none",
        blocks=tuple(Block(status="error", code=i.kind, title=i.message) for i in dump.issues[:20]),
        tables=(
            table(
                "States of each token, as stored",
                ("slot", "state", "found as"),
                ((s.position, slot_name(s), s.name) for s in dump.slots),
                limit=200,
            ),
            table("Samples", ("sample", "tokens", "rows"), ((r.name, r.tokens, r.rows) for r in dump.samples), limit=12),
        ),
        notes=(
            *(("Next: eagle3diag check DRAFT --dump DUMP says which of this harms training.",) if dump.issues else ()),
            f"States: {states}; {final}.",
            *(f"Recognised by: {e}." for e in dump.evidence),
        ),
    )


def profile_records(profile: NormProfile) -> list[dict[str, Any]]:
    """One row a slot, as in the JSON output."""
    return [layer.to_dict() for layer in profile.layers]


def sink_text(profile: NormProfile) -> str:
    """The first token against the others, in words."""
    ratios = [(x.first_l2_mean / x.l2_mean, x) for x in profile.layers if x.first_rows and x.rows and x.l2_mean > 0]
    if not ratios:
        return "no first token to compare"
    most, where = max(ratios, key=lambda r: r[0])
    if most < 3:
        return "the first token is like the others"
    times = f"{figure_text(most, 3)} times the norm of the others at {slot_name(where.slot)}"
    return f"the first token is a sink: {times}, and kept out of the means"


def profile_view(profile: NormProfile) -> View:
    """Norms by slot; what is not finite, all zero or unreadable first."""
    broken = sum(x.nonfinite for x in profile.layers)
    zero = sum(x.zero for x in profile.layers if x.slot.hf != 0)
    told = [f"{count(n, 'row')} {what}" for n, what in ((broken, "with NaN or Inf"), (zero, "of zeros")) if n]
    told += [f"{count(len(profile.problems), 'sample')} that cannot be read"] if profile.problems else []
    full = any(x.channels is not None for x in profile.layers)
    final = profile.final_norm != "unknown" and any(x.slot.role == "final" for x in profile.layers)
    head = ["state", "L2 mean", "L2 median", "RMS", "mean", "max abs", "first token L2", "NaN or Inf", "zero"]
    rows = []
    for x in profile.layers:
        d = x.to_dict()
        row = [slot_name(x.slot), *(figure_text(d[k]) for k in ("l2_mean", "l2_median", "rms_mean", "mean", "max_abs", "first_l2_mean"))]
        row += [f"{x.nonfinite:,}", f"{x.zero:,}"]
        if full:
            channels = ", ".join(f"{c['channel']} ({figure_text(c['times_median'], 3)}x)" for c in d.get("outlier_channels", [])[:4])
            row += [figure_text(d.get("kurtosis_median"), 3), channels or "none"]
        rows.append(row)
    head += ["kurtosis", "outlier channels"] if full else []
    return View(
        title=f"Norms of {profile.path}",
        summary=f"{count(profile.tokens, 'token')} in {count(profile.samples, 'sample')}: {'; '.join([*told, sink_text(profile)])}",
        status="error" if told else "none",
        blocks=tuple(Block(status="error", code=name, title=why) for name, why in profile.problems[:20]),
        tables=(
            table(
                "States by layer, first tokens apart",
                head,
                rows,
                status=("error" if x.nonfinite or (x.zero and x.slot.hf != 0) else "none" for x in profile.layers),
                limit=200,
            ),
        ),
        notes=(
            *(("Next: eagle3diag check DRAFT --dump DUMP names what is broken and how to mend it.",) if told else ()),
            "L2: length of a token's state; RMS: the same over the square root of its width.",
            *((f"The final state is {NORMS[profile.final_norm]}.",) if final else ()),
        ),
    )


def tokens_records(norms: TokenNorms) -> list[dict[str, Any]]:
    """One row a token: place, id, and its norm in each slot."""
    names = [slot_name(s) for s in norms.slots]
    return [
        {"token": t, "id": i, **{n: row[t] if t < len(row) else None for n, row in zip(names, norms.l2, strict=False)}}
        for t, i in enumerate(norms.token_ids)
    ]


def tokens_view(norms: TokenNorms) -> View:
    """One sample: its sinks and broken rows by name."""
    told = [f"{count(len(norms.broken), 'row')} with NaN or Inf"] if norms.broken else []
    told.append(f"{count(len(norms.sinks), 'sink')}" if norms.sinks else "no sink")
    marked = sorted({*norms.sinks, *norms.broken})
    rows = (
        (
            t,
            norms.token_ids[t] if t < len(norms.token_ids) else "none",
            "NaN or Inf" if t in norms.broken else figure_text(norms.times_median(t), 3),
        )
        for t in marked
    )
    medians = ((slot_name(s), figure_text(m)) for s, m in zip(norms.slots, norms.medians, strict=False))
    return View(
        title=f"Sample {norms.sample} of {norms.path}",
        summary=f"{count(len(norms.token_ids), 'token')}: {', '.join(told)}",
        status="error" if norms.broken else "none",
        tables=(
            table("Tokens that stand out", ("token", "id", "norm, times the median"), rows),
            table("Median norm without the first token", ("state", "L2"), medians, limit=200),
        ),
    )


def comparison_records(comparison: DumpComparison) -> list[dict[str, Any]]:
    """One row a state of the first dump, as in the JSON output."""
    rows: list[dict[str, Any]] = comparison.to_dict()["layers"]
    return rows


def comparison_view(comparison: DumpComparison) -> View:
    """What the comparison says in one sentence; then where each state is, and where it should be."""
    rows, status = [], []
    for m in comparison.layers:
        late = "0" if not m.best_shift else f"{abs(m.best_shift)} {'late' if m.best_shift > 0 else 'early'}"
        there = (state_name(m.expected) if m.expected else "not known", figure_text(m.cosine, 4), figure_text(m.error, 2))
        best = (state_name(m.best) if m.same else f"none (nearest {state_name(m.best)})", late, figure_text(m.best_cosine, 4))
        rows.append((state_name(m.slot), *there, *best, figure_text(m.best_error, 2)))
        right = m.same and not m.best_shift and m.expected in (None, m.best)
        status.append("none" if right else "error")
    same = comparison.verdict == "the same states"
    head = ("first dump", "should be", "cosine", "error", "is", "tokens", "its cosine", "its error")
    return View(
        title=f"{comparison.a} against {comparison.b}",
        summary=comparison.verdict if not same else f"the same states in both, within a relative error of {_worst(comparison)}",
        status="ok" if same else "error",
        tables=(table("State by state, in the second dump", head, rows, status=status, limit=200),),
        notes=(
            *(() if same else ("Next: take the states under 'should be' where the first dump is made, then compare again.",)),
            f"First dump: {comparison.a}. Second dump, the one to trust: {comparison.b}.",
            f"On {count(comparison.rows, 'row')} of {count(comparison.samples, 'pair')} of samples with the same tokens, medians of rows. "
            "Equal layers differ by hundredths at most, neighbouring ones by a tenth or more.",
        ),
    )


def _worst(comparison: DumpComparison) -> str:
    return figure_text(max((m.best_error for m in comparison.layers), default=None), 2)


def capture_records(capture: Capture) -> list[dict[str, Any]]:
    """One row a layer: how far cached decoding is from one prefill."""
    names = ("hf", "rows", "mean", "worst", "cosine")
    return [{n: getattr(d, n) for n in names} for d in capture.decode] or [
        {"file": s.file, "tokens": s.tokens, "prompt_tokens": s.prompt_tokens} for s in capture.samples
    ]


def capture_view(capture: Capture) -> View:
    """What was written, and whether decoding with the cache agrees with one prefill."""
    resumed = sum(s.resumed for s in capture.samples)
    tokens = sum(s.tokens for s in capture.samples)
    told = (
        f"wrote {count(len(capture.samples), 'sample')} with {count(tokens, 'token')} of {capture.target or 'the target'} to {capture.path}"
    )
    if resumed:
        told += f" ({resumed:,} of them there already)"
    mean = max((d.mean for d in capture.decode), default=0.0)
    if capture.decode:
        told += f"; decoding with the cache is off one prefill by {figure_text(mean, 2)} of its norm"
        told += f" and chose {count(capture.argmax_differs, 'other token')}" if capture.argmax_differs else ""
    rows = (
        (
            "final" if d.hf is None else f"HF {d.hf}",
            f"{d.rows:,}",
            figure_text(d.mean, 2),
            figure_text(d.worst, 2),
            figure_text(d.cosine, 6),
        )
        for d in capture.decode
    )
    stored = [*([f"HF {', '.join(map(str, capture.layers))}"] if capture.layers else [])]
    if capture.final != "none":
        stored.append(f"the last one {'before' if capture.final == 'pre' else 'after'} the final norm")
    notes = [f"States: {', and '.join(stored)}."]
    if capture.rows:
        notes.append(f"A review needs no target: give --target {capture.rows}.")
    return View(
        title="Capture",
        summary=told,
        status="warning" if mean > OFF else "ok",
        tables=(
            table(
                "Cached decoding against one prefill", ("state", "rows", "mean relative error", "worst", "least cosine"), rows, limit=200
            ),
            table(
                "Samples", ("file", "tokens", "of them prompt"), ((s.file, s.tokens, s.prompt_tokens) for s in capture.samples), limit=12
            ),
        ),
        notes=tuple(notes),
    )
