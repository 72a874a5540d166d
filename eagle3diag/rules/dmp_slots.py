"""DMP606 to DMP608: do the slots fit the draft, is the final state on the side of the norm its format means, what does the mask choose?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3diag.errors import escaped
from eagle3diag.rules.aux_view import matches_default, shown, view_of
from eagle3diag.rules.dmp_view import Evidence, evidence, names, share
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import is_eagle3
from eagle3diag.rules.registry import NotJudged, finding, rule
from eagle3diag.rules.thinking import thinking_tags

__all__: list[str] = []

_LISTED = 8
_NO_EMBEDDING = 0.5  #: learned positions or a norm on the embedding leave more than this of the row
_PLAIN_TEXT = ("given",)  #: what a capture of plain text notes: nobody asked and nobody answered, every token is text


@rule("DMP606", severity=Severity.ERROR, needs=("dump", "draft"))
def slots(case: Case) -> Iterator[Finding]:
    """Layer slots do not fit the draft: number, width, order or identity.

    ## What is wrong
    The draft's fc expects certain layers side by side in a certain order; the dump holds others, fewer, or the same in another order.

    ## Why it costs acceptance
    fc was fitted to particular states at particular columns. Other widths crash; another order or layer gives noise.

    ## How it is detected
    Number and width against the draft's fc and the target. Where the dump records layers, the draft's own must be among them. The order is
    read from the states: the residual stream grows with depth and turns towards the final state, and only where both say the same, by a
    factor of 1.3 between neighbours, is it held against the order recorded. A slot whose rows are the embedding rows is HF index 0,
    whatever it is called; two slots of equal bits are one. A layer taken one too early or late cannot be seen in a dump that records none:
    compare it with a dump that does (`eagle3diag.hidden.identity.compare`).

    ## How to fix it
    Dump the layers the draft was trained on, in its order; or point the draft's config at the layers that are there.

    ## Engine versions
    All: it does not depend on the engine.

    ## Source
    Dialects 4.1 and 4.4; `eagle3diag` sample dumps (norms 66, 152, 555, 765 at HF 2, 15, 27 and the end of 30 layers).
    """
    dump, spec = case.dump, case.spec
    assert dump is not None
    if not is_eagle3(case) or spec.use_aux_hidden_state.value is False:
        raise NotJudged("the draft takes no auxiliary states")
    e = evidence(case)
    wide = spec.target_hidden_size.value or (case.target.hidden_size.value if case.target is not None else None) or spec.hidden_size.value
    if wide is not None and dump.hidden != wide:
        yield _slots(f"states are {dump.hidden} wide, the draft takes {wide}", {"dump_hidden": dump.hidden, "draft_takes": wide}, dump.path)
        return
    aux = dump.aux
    labelled = bool(aux) and all(s.hf is not None for s in aux)
    wanted = spec.wiring.aux_layers
    expected = spec.n_aux.value
    if not aux:
        yield _slots(
            f"the dump holds the final state only, the draft takes {expected or 'several'} aux states",
            {"slots": [], "n_aux": expected},
            dump.path,
        )
        return
    found = False
    for f in _missing(case) if labelled else _number(case):
        found = True
        yield f
    for f in (*_same(e), *_embedding(case, e, wanted, labelled)):
        found = True
        yield f
    if not found and not e.alignment.found and not e.rotated:
        yield from _order(e, labelled)


def _slots(title: str, evidence_: dict[str, Any], where: str, remedy: str = "") -> Finding:
    return finding(
        "DMP606",
        title,
        evidence=evidence_,
        remedy=remedy or "Dump the layers the draft was trained on, side by side in its order, from the target it was trained for.",
        where=escaped(where, 200),
    )


def _missing(case: Case) -> Iterator[Finding]:
    dump, spec = case.dump, case.spec
    assert dump is not None
    there = tuple(s.hf for s in dump.aux if s.hf is not None)
    view = view_of(case)
    readings = [tuple(view.meant)] if view.meant else []
    if not view.settled and not matches_default(view):
        readings += [r.hf for r in view.ids.readings]
    layers = case.target.num_layers.value if case.target is not None else None
    beyond = [k for k in there if k < 0 or (layers is not None and k > layers)]
    if beyond:
        yield _slots(
            f"the dump records HF layers {shown(tuple(beyond))}, the target has 0 to {layers}",
            {"recorded": list(there), "target_layers": layers},
            dump.path,
        )
        return
    if not readings:
        if spec.n_aux.value is not None and len(there) < spec.n_aux.value:
            yield from _number(case)
        return
    if any(set(r) <= set(there) for r in readings):
        return
    lacking = sorted(set(readings[0]) - set(there))
    yield _slots(
        f"the draft takes HF layers {shown(readings[0])}, the dump records {shown(there)}: {shown(tuple(lacking))} missing",
        {"draft_takes": list(readings[0]), "recorded": list(there), "missing": lacking, "recorded_in": escaped(spec.aux.where)},
        dump.path,
    )


def _number(case: Case) -> Iterator[Finding]:
    dump, n = case.dump, case.spec.n_aux.value
    assert dump is not None
    aux = len(dump.aux)
    if n is None or aux == n:
        return
    closing = " and a final one" if dump.final is not None else ""
    yield _slots(
        f"the dump holds {aux} aux state{'s' if aux > 1 else ''}{closing} per token, the draft takes {n}",
        {"aux_slots": aux, "n_aux": n, "final": dump.final is not None, "slots": [s.name for s in dump.slots]},
        dump.path,
        f"Dump {n} aux layers and the final state. A stack of {n} planes without the final state is not what trainers read: they take the "
        "last plane for the final state."
        if dump.final is not None and aux == n - 1
        else "",
    )


def _same(e: Evidence) -> Iterator[Finding]:
    from eagle3diag.hidden.slotchecks import equal_slots

    for a, b in equal_slots(e.scan):
        if "final" in (a.role, b.role) and None not in (a.hf if a.role == "aux" else b.hf,):
            continue  # the last layer's output recorded under its index and as the final state
        yield _slots(f"{escaped(a.name)} and {escaped(b.name)} hold the same bits", {"slots": [a.name, b.name]}, b.name)


def _embedding(case: Case, e: Evidence, wanted: tuple[int, ...] | None, labelled: bool) -> Iterator[Finding]:
    from eagle3diag.hidden.slotchecks import embedding_slots, is_embedding

    if e.tables is None or e.alignment.found or e.rotated:
        return
    likeness = embedding_slots(e.scan, e.tables)
    aux = e.scan.dump.aux
    for at, slot in enumerate(aux):
        cosine = likeness.get(slot.position)
        if cosine is None:
            continue
        meant = slot.hf if labelled else wanted[at] if wanted and len(wanted) == len(aux) else None
        facts = {"slot": slot.name, "recorded_hf": slot.hf, "cosine_with_embedding": round(cosine, 3)}
        if is_embedding(cosine) and meant != 0 and (meant is not None or wanted is None or 0 not in wanted):
            called = f"stands for HF {meant}" if meant is not None else "should be a layer's state"
            yield _slots(f"{escaped(slot.name)} {called} but holds the embedding rows, HF 0", facts, slot.name)
        elif cosine < _NO_EMBEDDING and meant == 0 and e.tables.source != "draft":
            yield _slots(
                f"{escaped(slot.name)} stands for HF 0 but does not hold the embedding rows (cosine {cosine:.2f})", facts, slot.name
            )


def _order(e: Evidence, labelled: bool) -> Iterator[Finding]:
    if e.depth is None or not e.depth.wrong:
        return
    odd = e.depth.misplaced
    if odd is not None:
        slot, like = odd.pairs[0]
        facts = [{"slot": a.name, "hf": a.hf, "resembles": b.name, "which_is_hf": b.hf} for a, b in odd.pairs]
        if odd.exchanged is not None:
            one, two = (escaped(s.name) for s in odd.exchanged)
            title, slot = f"{one} and {two} hold each other's layer: each resembles the other's neighbours", odd.exchanged[0]
        else:
            title = (
                f"{escaped(slot.name)} resembles {escaped(like.name)} more than the layers next to it: it holds another layer than recorded"
            )
        yield _slots(title, {"slots": facts, "exchanged": odd.exchanged and [s.name for s in odd.exchanged]}, slot.name)
        return
    assert e.depth.seen is not None
    seen, meant = e.depth.seen, e.depth.meant
    name = {s.position: s.name for s in e.scan.dump.slots}
    yield _slots(
        f"aux slots stand in another order of depth than {'recorded' if labelled else 'the draft takes them'}: by their states "
        f"{' < '.join(escaped(name[p]) for p in seen.order)}",
        {
            "by_states": [name[p] for p in seen.order],
            "expected": [name[p] for p in meant],
            "rms": {name[p]: round(v, 3) for p, v in seen.rms.items()},
            "cosine_with_the_end": {name[p]: round(v, 3) for p, v in seen.cosine.items()},
        },
        name[seen.order[0]],
    )


@rule("DMP607", severity=Severity.WARNING, needs=("dump", "target"))
def final_norm(case: Case) -> Iterator[Finding]:
    """The last hidden state is before the final norm where after is needed, or the reverse.

    ## What is wrong
    Trainers differ: speculators stores the final state before the target's last norm and applies it itself, SpecForge, ModelOpt and
    AngelSlim store it after and apply only the head. A dump of the other kind is normed twice, or not at all.

    ## Why it costs acceptance
    The target distribution the draft is trained on is another one than the target's; it learns the wrong answers, without an error.

    ## How it is detected
    A state after RMSNorm, divided by the norm's weight, has RMS 1 in every row (spread 0.0001 in float16); one before has any RMS, spread
    0.1 and more. What is found is compared with what the format means. Needs the norm's weight (the target's folder, or the rows beside
    a portable dump); skipped where the format does not say which of the two it holds.

    ## How to fix it
    Dump the other one, or say so where the format allows (ModelOpt `hidden_states_prenorm`, portable `final_prenorm` and
    `final_postnorm`).

    ## Engine versions
    SGLang's `return_hidden_states` gives the state after the norm, vLLM's connector the one before.

    ## Source
    Dialects 4.2: speculators a54a7283 (gpt-oss acceptance 25 to 40 % after the fix), AngelSlim hook with a warning only.
    """
    dump, e = case.dump, evidence(case)
    assert dump is not None
    if dump.final is None:
        raise NotJudged("the dump holds no final state")
    if e.tables is None or e.tables.final_norm is None:
        raise NotJudged("no weight of the target's final norm at hand: give the target's folder, not its config alone")
    if case.target is not None and not _rms_normed(case):
        raise NotJudged("the target's final norm is no RMSNorm")
    if any(r.slot is dump.final for r in e.rotated):
        raise NotJudged("the final state is rotated (DMP609): its channels are not the norm's")
    fact = e.norm
    if fact is None:
        raise NotJudged("too few sound rows of the final state, or a norm of another width")
    if dump.final_norm == "unknown":
        raise NotJudged(f"{dump.format} does not say whether its final state is before or after the norm (these are {fact.status})")
    if fact.status in ("unknown", dump.final_norm):
        return
    said, is_ = ({"pre": "before", "post": "after"}[x] for x in (dump.final_norm, fact.status))
    yield finding(
        "DMP607",
        f"the final state is {is_} the target's norm, {dump.format} means it {said}: RMS(h / w) {fact.rms:.3g}, spread {fact.spread:.2g}",
        evidence={
            "format_means": dump.final_norm,
            "found": fact.status,
            "rms_over_weight": fact.rms,
            "spread": fact.spread,
            "rows": fact.rows,
        },
        remedy=f"Dump the state {said} the norm, or tell the trainer: it would {'skip' if fact.status == 'pre' else 'apply'} the norm "
        f"{'although it is needed' if fact.status == 'pre' else 'a second time'}.",
        where=escaped(dump.final.name, 200),
    )


def _rms_normed(case: Case) -> bool:
    """Whether the config speaks of an RMS norm, or of no norm at all."""
    assert case.target is not None
    config = case.target.checkpoint.config if case.target.checkpoint is not None else {}
    keys = {str(k) for k in config} | {str(k) for v in config.values() if isinstance(v, dict) for k in v}
    return any("rms" in k or k == "norm_eps" for k in keys) or not any("layer_norm" in k or "layernorm" in k for k in keys)


@rule("DMP608", severity=Severity.WARNING, needs=("dump",))
def loss_mask(case: Case) -> Iterator[Finding]:
    """The loss mask chooses nothing, everything, has the wrong shape, or leaves out the thinking.

    ## What is wrong
    The mask says which tokens are trained on: the answers. All zero, nothing is; all one, the prompts are too; with an extra axis it
    broadcasts to a square; without the thinking span, a reasoning target's longest part is never learned.

    ## Why it costs acceptance
    At serving time the draft proposes answer tokens, thinking included. What it never saw it guesses badly; what it saw too much of (the
    same system prompt thousands of times) takes the place of the rest.

    ## How it is detected
    Masks of every sample: all zero in half of them or more, or all one (the last token aside) in all; shapes on opening. One sample
    without a true position (an answer cut off) is only worth knowing. Captures of plain text are meant to be all one. Thinking tags are
    taken from the dump's metadata, the target's or the draft's tokenizer files, or the known ids of Qwen3 and DeepSeek-R1 vocabularies;
    without them that part is not judged.

    ## How to fix it
    Rebuild the mask with the chat template the target is served with; look at one sample's masked text before a long run.

    ## Engine versions
    All: it does not depend on the engine. ModelOpt's default mask is all one (`answer_only_loss` False).

    ## Source
    speculators#346, SpecForge d8f97e49, dialects 4.3.
    """
    dump, e = case.dump, evidence(case)
    assert dump is not None
    from eagle3diag.hidden.tokenchecks import mask_facts, unmasked_thinking

    shapes = [i for i in dump.issues if i.kind == "mask"]
    if shapes:
        yield finding(
            "DMP608",
            f"{shapes[0].message}; {len(shapes)} of {len(dump.samples)} samples",
            evidence={"issues": [{"file": i.file, "why": i.message, **i.evidence} for i in shapes[:_LISTED]]},
            remedy="Store the mask with one value per token, [tokens].",
            where=escaped(shapes[0].file, 200),
        )
    facts = mask_facts(e.scan)
    if not facts.masked:
        if shapes:
            return
        raise NotJudged("the dump holds no loss mask")
    if facts.empty:
        all_ = 2 * len(facts.empty) >= facts.masked
        yield finding(
            "DMP608",
            f"the loss mask is zero throughout in {share(len(facts.empty), e.scan)}: nothing of them is trained on",
            severity=Severity.WARNING if all_ else Severity.INFO,
            evidence={"empty": names(facts.empty), "in_all": len(facts.empty), "masked": facts.masked},
            remedy="Rebuild the mask: the pattern that finds the answers does not match this chat template."
            if all_
            else "Look at one of these samples: an answer that was cut off has nothing to train on, anything else is a fault.",
            where="loss_mask",
        )
    if facts.full and dump.metadata.get("text") not in _PLAIN_TEXT:
        all_ = len(facts.full) == facts.masked
        yield finding(
            "DMP608",
            f"the loss mask is one throughout in {share(len(facts.full), e.scan)}: prompts are trained on like answers",
            severity=Severity.WARNING if all_ else Severity.INFO,
            evidence={"full": names(facts.full), "in_all": len(facts.full), "masked": facts.masked},
            remedy="Mask the prompts (ModelOpt: `answer_only_loss`), unless this is plain text without prompts.",
            where="loss_mask",
        )
    tags = thinking_tags(case)
    if tags is None:
        return
    left = unmasked_thinking(e.scan, tags.ids)
    if left:
        name, (first, last) = next(iter(left.items()))
        yield finding(
            "DMP608",
            f"the thinking is left out of the loss mask: tokens {first} to {last} of {escaped(name)}; {share(len(left), e.scan)}",
            evidence={"samples": names(left), "in_all": len(left), "tags": list(tags.ids), "tags_from": tags.source},
            remedy="Train on the thinking too: at serving time the draft has to propose it. Check how the chat template treats its tags.",
            where="loss_mask",
        )
