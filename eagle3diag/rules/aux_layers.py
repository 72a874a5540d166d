"""AUX: which target states reach the draft, against the ones it was trained on.

What the engine captures is read off ``ServedDraft.aux``, what was meant off the recorded ids (``aux_view``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import escaped
from eagle3diag.rules.aux_view import (
    KEYS,
    View,
    could_be_default,
    ids_to_write,
    matches_default,
    serving_aux,
    shown,
    target_fails,
    view_of,
    write_advice,
)
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import is_eagle3, label, shape_of
from eagle3diag.rules.registry import NotJudged, finding, rule

if TYPE_CHECKING:
    from eagle3diag.engines.model import AuxCapture, ServedDraft


@rule("AUX401", severity=Severity.WARNING, needs=("draft", "engine"))
def other_layers(case: Case) -> Iterator[Finding]:
    """The engine would capture other layers than the draft was trained on.

    ## What is wrong
    The recorded ids and the engine count layers differently. An id `k` is the *input* of layer k (HF index k) to vLLM and the *output* of
    layer k (HF index k+1) to SGLang, with exceptions for some targets that changed between versions. The same numbers are then other
    states.

    ## Why it costs acceptance
    `fc` was fitted to particular states. Neighbouring layers resemble them, so nothing crashes and the draft still gets some tokens right;
    acceptance is lower from the first token on.

    ## How it is detected
    The HF indices this engine version captures for this target (recorded contract) are compared with those the draft was trained on. What
    was meant is told by, in this order: a second source (the other config in the folder, the recorded trainer), which makes it an error;
    the reading in which the ids equal the default layers 2, N//2, N-3, where exactly one does; the habit of the framework and the config
    key. The last two make it a warning, and the finding says which it went by.

    ## How to fix it
    Write the ids in the convention of the engine (the finding names them), or convert the draft with `eagle3diag convert`.

    ## Engine versions
    SGLang: id k captures HF k+1; DeepSeek, Kimi-K2 and GLM4-MoE-Lite targets from 0.5.13: only if the first id is 1, else HF k; gpt-oss
    from 0.5.17: HF k if the largest id equals the layer count. vLLM: id k captures HF k, in every version.

    ## Source
    Facts of the engines, section 3.1; dialects, section 4.1; the target classes of both engines were run (capture runs).
    """
    served = serving_aux(case)
    if served is None or (served.aux.ids is None and served.aux.unread):
        return  # AUX402 speaks
    if target_fails(case):
        yield from _once_it_captures(case, served)
        return  # AUX404 speaks
    view, captured = view_of(case), served.aux.prefill_hf
    if view.meant is None or captured is None or tuple(sorted(set(view.meant))) == captured:
        return
    if len(captured) < len(set(served.aux.ids or captured)):
        return  # AUX403 speaks: some of them cannot be captured at all
    meant = tuple(sorted(set(view.meant)))
    by = "a second source" if view.settled else "the default layers" if matches_default(view) else "habit"
    raw = list(view.ids.raw) if view.ids.raw is not None else None
    yield finding(
        "AUX401",
        f"HF layers {shown(captured)} reach the draft, it was trained on HF {shown(meant)}"
        + (f": ids {raw} are read in another convention" if raw is not None else ": the engine's default is not this trainer's"),
        severity=Severity.ERROR if view.settled else Severity.WARNING,
        evidence={
            "ids": raw,
            "read_from": served.aux.source,
            "captured_hf": list(captured),
            "trained_hf": list(meant),
            "went_by": by,
            "because": view.why,
            "ids_to_write": ids_to_write(case, served, meant),
        },
        remedy=write_advice(case, served, meant),
        where=view.ids.where,
        engines=label(case),
    )


def _once_it_captures(case: Case, served: ServedDraft) -> Iterator[Finding]:
    """The target hands out nothing in this version: the ids' convention is still worth knowing for the version that does."""
    view, ids = view_of(case), served.aux.ids
    if view.meant is None or ids is None:
        raise NotJudged("the target hands out no states in this version, so there is nothing to compare")
    add = 1 if served.contract["id_meaning"] == "output" else 0
    read, meant = tuple(sorted({k + add for k in ids})), tuple(sorted(set(view.meant)))
    if read == meant:
        return
    engine = served.contract.engine
    yield finding(
        "AUX401",
        f"ids {list(ids)} mean HF {shown(meant)} to this draft; where {engine} supports this target, its usual rule reads HF {shown(read)}",
        severity=Severity.INFO,
        evidence={"ids": list(ids), "general_rule_hf": list(read), "trained_hf": list(meant), "because": view.why},
        remedy=f"Before serving with a version that supports this target, write {[k - add for k in meant]}, or check that version.",
        where=view.ids.where,
        engines=label(case),
    )


@rule("AUX402", severity=Severity.WARNING, needs=("draft", "engine"))
def unread_ids(case: Case) -> Iterator[Finding]:
    """Aux layer ids stand where this engine does not read them: it falls back to its default.

    ## What is wrong
    Ids are recorded, but under a key this engine version never looks at. It takes its default layers 2, N//2, N-3 without a word.

    ## Why it costs acceptance
    Unless the draft was trained on exactly those layers, `fc` is fed states it has never seen.

    ## How it is detected
    The places that hold ids are compared with the places this version and runner read (recorded contract). It is only worth knowing (info)
    where the default layers are the ones the draft was trained on.

    ## How to fix it
    Move the ids to the key this engine reads, in its own convention; the finding names both.

    ## Engine versions
    SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids` only, from 0.4.9. vLLM reads the top-level key from 0.11.1; the nested
    one from 0.22 in the V1 runner only. AngelSlim's `aux_hidden_states_layer_ids` is read by no engine.

    ## Source
    Facts of the engines, section 3.2; vLLM transitions, section 2.
    """
    served = serving_aux(case)
    if served is None or served.aux.ids is not None or not served.aux.unread:
        return
    view = view_of(case)
    place, ids = next(iter(served.aux.unread.items()))
    default = served.aux.prefill_hf
    hits = matches_default(view)
    if hits is None and view.meant is not None:
        hits = True  # without a target: these are the default layers of a target as deep as the ids suggest
    taken = f"its default, HF {shown(default)}" if default else "its default, HF 2, N//2, N-3"
    harm = "the layers the draft was trained on" if hits else f"the draft was trained on HF {shown(view.meant)}"
    yield finding(
        "AUX402",
        f"ids {list(ids)} in {escaped(place)} are not read by {served.contract.label}: it takes {taken}; {harm}",
        severity=Severity.INFO if hits else Severity.WARNING,
        evidence={
            "unread": {escaped(k): list(v) for k, v in served.aux.unread.items()},
            "reads": [KEYS.get(place, place) for place in served.contract["aux_ids_from"]],
            "captured_hf": list(default) if default else None,
            "trained_hf": list(view.meant) if view.meant else None,
            "because": view.why,
        },
        remedy=write_advice(case, served, view.meant) if view.meant else "",
        where=place,
        engines=label(case),
    )


@rule("AUX403", severity=Severity.WARNING)
def odd_ids(case: Case) -> Iterator[Finding]:
    """Aux layer ids are out of range, negative, duplicated or not ascending.

    ## What is wrong
    The list of ids cannot be captured as it stands, or not in the order it is written in.

    ## Why it costs acceptance
    Engines concatenate the captured states in ascending layer order and drop duplicates. A list in another order permutes the columns of
    `fc`; a state that does not exist leaves the concatenation too narrow, which crashes or, where the width happens to be the draft's own,
    skips `fc` in silence.

    ## How it is detected
    The recorded list is tested by itself, and in every possible reading against the target's layer count; with an engine, against what that
    version captures for this target. An error where a state can never be captured.

    ## How to fix it
    Record the ids ascending, each once, between the first and the last layer; if the draft was trained with the states in another order,
    permute the column blocks of `fc.weight` accordingly.

    ## Engine versions
    All. Out of range is silent in most targets, an IndexError or "captured 2 of 3 aux hidden states" in others.

    ## Source
    Facts of the engines, section 3.1; capture runs.
    """
    view = view_of(case)
    raw = view.ids.raw
    if raw is None or not raw or not is_eagle3(case):
        return
    served = serving_aux(case)
    aux = served.aux if served is not None and served.aux.ids is not None and not target_fails(case) else None
    evidence: dict[str, Any] = {"ids": list(raw), "target_layers": view.depth}
    if aux is not None:
        evidence |= {"captured_hf": list(aux.prefill_hf) if aux.prefill_hf is not None else None, "engine": escaped(aux.problem, 200)}

    def say(title: str, remedy: str, severity: Severity) -> Finding:
        return finding("AUX403", title, severity=severity, evidence=evidence, remedy=remedy, where=view.ids.where, engines=label(case))

    impossible = _impossible(view, aux)
    if impossible:
        depth = view.depth
        yield say(
            f"ids {list(raw)}: {impossible}",
            f"The target has layers 0 to {depth - 1}; name the layers the draft was trained on." if depth else "Name existing layers.",
            Severity.ERROR,
        )
    elif min(raw) < 0:
        yield say(
            f"ids {list(raw)}: {min(raw)} is negative; engines do not count from the end", "Count from the first layer.", Severity.WARNING
        )
    if len(set(raw)) < len(raw):
        columns = shape_of(case, "fc.weight")
        width = case.spec.target_hidden_size.value or case.spec.hidden_size.value
        wide = columns is not None and width is not None and columns[1] == len(raw) * width
        twice = sorted({k for k in raw if raw.count(k) > 1})
        yield say(
            f"ids {list(raw)}: {shown(tuple(twice))} listed twice; engines capture each layer once, {len(set(raw))} states, not {len(raw)}",
            "List each layer once; fc needs one block of columns a layer.",
            Severity.ERROR if wide else Severity.WARNING,
        )
    if list(raw) != sorted(raw):
        yield say(
            f"ids {list(raw)} are not ascending: engines concatenate the states in the order {sorted(raw)}",
            "If the draft was trained in the order written, permute the column blocks of fc.weight; then write the ids ascending.",
            Severity.WARNING,
        )


def _impossible(view: View, aux: AuxCapture | None) -> str:
    """Why a state can never be captured; empty where all can, or nothing tells."""
    if aux is not None and aux.ids is not None:
        short = aux.prefill_hf is None or len(aux.prefill_hf) < len(set(aux.ids))
        if short and aux.problem:
            return escaped(aux.problem, 200)
    readings = [r.hf for r in view.ids.readings] or [view.ids.raw or ()]
    if all(min(hf) < 0 for hf in readings if hf):
        return "a negative id is captured by no engine"
    if view.depth is not None and all(max(hf) > view.depth for hf in readings if hf):
        return f"HF {max(max(hf) for hf in readings if hf)} is beyond the {view.depth} layers of the target"
    return ""


@rule("AUX406", severity=Severity.WARNING, needs=("draft", "engine"))
def graph_override(case: Case) -> Iterator[Finding]:
    """CUDA-graph verify steps use other layers than prefill.

    ## What is wrong
    This version captures its CUDA graphs before it applies the configured ids. Prefill and eager batches hand over the configured layers,
    every graph-replayed verify step the default ones.

    ## Why it costs acceptance
    The first step after a prompt is drafted from the right states, all later ones from others.

    ## How it is detected
    The layers captured in prefill are compared with those in graph-replayed steps (recorded contract). Harmless, and not reported, where
    the two coincide; info where the graph-replayed ones are the layers the draft was trained on.

    ## How to fix it
    Use SGLang 0.5.11 or newer, or start with `--disable-cuda-graph`.

    ## Engine versions
    SGLang 0.4.9 to 0.5.10.

    ## Source
    Facts of the engines, section 3.3.
    """
    served = serving_aux(case)
    if served is None or served.aux.ids is None or target_fails(case):
        return
    view, prefill, verify = view_of(case), served.aux.prefill_hf, served.aux.verify_hf
    if prefill is None or verify == prefill:
        return
    if verify is None:  # no target: only what holds for every depth
        graphs = case.launch is None or case.launch.cuda_graph
        if not graphs or served.contract["cuda_graph_uses_ids"] or could_be_default(prefill):
            return
    hits = verify is not None and view.meant is not None and verify == tuple(sorted(view.meant))
    yield finding(
        "AUX406",
        f"graph-replayed verify steps use HF {shown(verify) if verify else '2, N//2, N-3'}, prefill uses HF {shown(prefill)}",
        severity=Severity.INFO if hits else Severity.WARNING,
        evidence={
            "prefill_hf": list(prefill or ()),
            "verify_hf": list(verify) if verify else "2, N//2, N-3",
            "trained_hf": list(view.meant) if view.meant else None,
        },
        remedy="Use SGLang 0.5.11 or newer, or start the server with --disable-cuda-graph.",
        where=served.aux.source,
        engines=label(case),
    )
