"""CFG, second part: sizes in the config against the tensors, and against the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import config_file, file_name, is_eagle3, label, numbers, reduced_vocabulary, shape_of, stated
from eagle3diag.rules.registry import finding, rule


@rule("CFG105", severity=Severity.ERROR)
def draft_vocabulary(case: Case) -> Iterator[Finding]:
    """`draft_vocab_size` is absent, null, not positive, above the vocabulary, or not the number of lm_head rows.

    ## What is wrong
    The config does not say correctly how many tokens the draft's head scores.

    ## Why it costs acceptance
    SGLang stops where the key is absent; where it is null it puts the target's head in place of the trained one. vLLM takes the whole
    vocabulary and then meets a head and a mapping of another size.

    ## How it is detected
    The key as written against `vocab_size` and the rows of `lm_head.weight`. A draft over the whole vocabulary may leave the key out
    where the engine copes.

    ## How to fix it
    Set `draft_vocab_size` to the number of rows of `lm_head.weight` (for a whole vocabulary: `vocab_size`).

    ## Engine versions
    SGLang all (null: target's head from 0.5.2, stops before); vLLM absent or null means `vocab_size` from 0.11.0, stops before.

    ## Source
    SGLang 0.5.23 `models/llama_eagle3.py:290-330`; both engines' loaders run on small checkpoints; public reports:
    SafeAILab/EAGLE 249 and 214, NVIDIA-NeMo/Automodel 2260.
    """
    if not is_eagle3(case) or not case.draft.configs:
        return
    said = stated(case, "draft_vocab_size")
    head = shape_of(case, "lm_head.weight")
    mapping = shape_of(case, "d2t")
    rows = head[0] if head else None
    seen = rows if rows is not None else (mapping[0] if mapping else None)
    whole = numbers(case.spec).get("vocab_size")
    evidence = {"draft_vocab_size": said.value, "vocab_size": whole, "lm_head rows": rows, "d2t length": mapping[0] if mapping else None}
    remedy = f"Set draft_vocab_size to {seen if seen is not None else whole} in {config_file(case)}."

    def found(title: str, severity: Severity | None = None) -> Finding:
        return finding("CFG105", title, severity=severity, evidence=evidence, remedy=remedy, where=said.place, engines=label(case))

    value = said.value
    if value is None:
        word = "null" if said.there else "absent"
        against = f"lm_head.weight has {rows:,} rows" if rows is not None else f"d2t maps {seen:,} tokens" if seen is not None else ""
        refused = case.served is not None and case.served.refused is not None and case.served.refused.fact.startswith("draft_vocab")
        if (seen is not None and whole is not None and seen < whole) or refused:
            yield found(f"draft_vocab_size is {word}" + (f" although {against}" if against else ""))
        elif case.served is None:  # harmless where the whole vocabulary is scored, except that SGLang's Llama class stops on it
            yield found(f"draft_vocab_size is {word}: SGLang needs it, vLLM takes vocab_size", Severity.WARNING)
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return  # CFG111
    if value <= 0:
        yield found(
            f"draft_vocab_size is {escaped(value)}, it has to be positive" + (f"; lm_head.weight has {rows:,} rows" if rows else "")
        )
    elif whole is not None and value > whole:
        yield found(f"draft_vocab_size {value:,} is above vocab_size {whole:,}")
    elif rows is not None and rows != value:
        name = file_name(case.spec, "lm_head.weight")
        yield found(f"draft_vocab_size is {value:,} but {escaped(name)} has {rows:,} rows")


@rule("CFG106", severity=Severity.ERROR)
def tied_head(case: Case) -> Iterator[Finding]:
    """`tie_word_embeddings` is true although the draft has its own lm_head or a reduced vocabulary.

    ## What is wrong
    The flag says the head is the embedding table. This draft has a head of its own, or scores fewer tokens than the embedding has rows.

    ## Why it costs acceptance
    SGLang then uses the embedding table (the target's) as head and drops the trained `lm_head.weight` without a word; over a reduced
    vocabulary the ids do not fit either. Training libraries that honour the flag resize or overwrite the head when resuming.

    ## How it is detected
    The flag together with an `lm_head.weight` in the file or a draft vocabulary below the vocabulary. An error where the engine uses
    the embedding as head, a warning where it ignores the flag.

    ## How to fix it
    Set `tie_word_embeddings` to false.

    ## Engine versions
    SGLang all. vLLM never reads the flag.

    ## Source
    Both engines' loaders run on small checkpoints; public reports: sgl-project/SpecForge 139, Tencent/AngelSlim 16.
    """
    tie = case.spec.tie_word_embeddings
    if not is_eagle3(case) or tie.kind != "config" or tie.value is not True:
        return
    head = shape_of(case, "lm_head.weight")
    reduced = reduced_vocabulary(case)
    if head is None and not reduced:
        return
    ignored = case.served is not None and case.served.refused is None and case.served.wiring.head != "embedding"
    what = f"the file has its own {escaped(file_name(case.spec, 'lm_head.weight'))} {list(head)}" if head else "the vocabulary is reduced"
    then = f"{label(case)[0]} ignores the flag, SGLang would drop the head" if ignored else "the trained head is thrown away"
    yield finding(
        "CFG106",
        f"tie_word_embeddings is true but {what}: {then}",
        severity=Severity.WARNING if ignored else None,
        evidence={"tie_word_embeddings": True, "lm_head": list(head) if head else None, "reduced vocabulary": reduced},
        remedy=f"Set tie_word_embeddings to false in {config_file(case)}.",
        where=tie.where,
        engines=label(case),
    )


def attention_rows(case: Case) -> dict[str, tuple[int, int]]:
    """Sizes set by the head counts: ``{name in file: (found, by the config)}`` where they differ."""
    n = numbers(case.spec)
    wanted: dict[str, tuple[int, int]] = {}  # part -> (axis, size)
    if case.spec.draft_class == "mla":
        nope, rope, v = (stated(case, k).value for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if "num_heads" in n and all(isinstance(x, int) and not isinstance(x, bool) for x in (nope, rope, v)):
            wanted = {
                "q_b_proj": (0, n["num_heads"] * (nope + rope)),
                "kv_b_proj": (0, n["num_heads"] * (nope + v)),
                "o_proj": (1, n["num_heads"] * v),
            }
    elif "num_heads" in n and "head_dim" in n:
        q, kv = n["num_heads"] * n["head_dim"], n["num_kv_heads"] * n["head_dim"]
        wanted = {"q_proj": (0, q), "k_proj": (0, kv), "v_proj": (0, kv), "o_proj": (1, q), "qkv_proj": (0, q + 2 * kv)}
    out: dict[str, tuple[int, int]] = {}
    for i in range(case.spec.layers_in_file):
        for part, (axis, size) in wanted.items():
            canonical = f"layers.{i}.self_attn.{part}.weight"
            shape = shape_of(case, canonical)
            if shape is not None and len(shape) == 2 and shape[axis] != size:
                out[file_name(case.spec, canonical)] = (shape[axis], size)
    return out


@rule("CFG107", severity=Severity.ERROR)
def head_counts(case: Case) -> Iterator[Finding]:
    """Heads, kv heads or head_dim disagree with the q/k/v/o shapes.

    ## What is wrong
    `num_attention_heads` x `head_dim` is not the number of q rows (or kv heads x `head_dim` not that of k and v). Often `head_dim` is
    not written and `hidden_size / num_attention_heads` is another number.

    ## Why it costs acceptance
    Too few rows stop the load; too many are cut off silently by both engines, and the attention runs on a part of its heads.

    ## How it is detected
    Shapes of q, k, v and o against the config, `head_dim` defaulting to `hidden_size // num_attention_heads` as in every reader.

    ## How to fix it
    Write `head_dim`, `num_attention_heads` and `num_key_value_heads` as in training.

    ## Engine versions
    All.

    ## Source
    Both engines' loaders run on small checkpoints; public reports: SafeAILab/EAGLE 223 and 315, vllm-project/speculators 134.
    """
    if not is_eagle3(case):
        return
    wrong = attention_rows(case)
    if not wrong:
        return
    n = numbers(case.spec)
    own = case.spec.head_dim.kind == "config"
    name, (got, want) = next(iter(wrong.items()))
    how = f"{n.get('num_heads')} heads, {n.get('num_kv_heads')} kv heads, head_dim {n.get('head_dim')}" + (
        "" if own else " (hidden_size / heads: not written)"
    )
    yield finding(
        "CFG107",
        f"{escaped(name, 90)} has {got:,}, {how} make {want:,}" + (f"; {len(wrong) - 1} more tensors disagree" if len(wrong) > 1 else ""),
        evidence={"config": how, **{k: {"file": a, "config": b} for k, (a, b) in wrong.items()}},
        remedy=f"Write num_attention_heads, num_key_value_heads and head_dim as in training into {config_file(case)}.",
        where=case.spec.num_heads.where,
        engines=label(case),
    )


def _trained_width(case: Case) -> tuple[int | None, str]:
    """Width of the target states the draft was built for, and where that is read."""
    spec, fc = case.spec, shape_of(case, "fc.weight")
    if spec.target_hidden_size.kind == "config" and spec.target_hidden_size.value is not None:
        return spec.target_hidden_size.value, spec.target_hidden_size.where
    for count in (len(set(spec.aux.raw)) if spec.aux.raw else 0, 3):
        if (
            fc is not None
            and len(fc) == 2
            and count
            and fc[1] % count == 0
            and case.target is not None
            and fc[1] // count == case.target.hidden_size.value
        ):
            return fc[1] // count, "shape of fc.weight"
    return spec.hidden_size.value, spec.hidden_size.where


def _other_depth(case: Case, layers: int) -> int | None:
    """The layer count whose default ids are recorded, where it is clearly not this target's."""
    depths = {r.hf[2] + 3 for r in case.spec.aux.readings if len(r.hf) == 3 and list(r.hf) == [2, (r.hf[2] + 3) // 2, r.hf[2]]}
    # one off is the other convention or a trainer's own formula (gpt-oss heads), two or more is another model
    return min(depths) if depths and all(abs(d - layers) > 1 for d in depths) else None


@rule("CFG112", severity=Severity.ERROR, needs=("draft", "target"))
def other_target(case: Case) -> Iterator[Finding]:
    """The draft does not belong to this target.

    ## What is wrong
    Hidden size, vocabulary, layer count or recorded verifier are not those of the target given.

    ## Why it costs acceptance
    Another width stops the load. Another vocabulary makes the mapping point at other words; another model of the same shape hands out
    states the draft never saw.

    ## How it is detected
    Target width (`target_hidden_size`, else `fc`, else `hidden_size`), `vocab_size`, ids that are the default of another depth, and
    `speculators_config.verifier` against the target's config. A vocabulary padded to another multiple and an architecture or depth
    that differs alone are warnings.

    ## How to fix it
    Check against, and serve with, the target the draft was trained for; fine-tuned targets need a draft trained on them.

    ## Engine versions
    All.

    ## Source
    SGLang 0.5.23 `models/llama.py:910-918` (embedding), speculators 0.9.0 `models/eagle3/core.py:164-190` (verifier); public reports:
    vllm-project/speculators 188, SafeAILab/EAGLE 98.
    """
    target, spec = case.target, case.spec
    if target is None or not (case.draft.configs or case.draft.tensors):
        return

    def found(what: str, ours: Any, theirs: Any, where: str, severity: Severity | None = None) -> Finding:
        return finding(
            "CFG112",
            f"{what}: draft {escaped(ours)}, target {escaped(theirs)}",
            severity=severity,
            evidence={"fact": what, "draft": ours, "target": theirs, "draft read from": where, "target config": target.path},
            remedy="Give the target this draft was trained for.",
            where=where,
        )

    width, place = _trained_width(case)
    sizes_agree = True
    if width is not None and target.hidden_size.value is not None and width != target.hidden_size.value:
        sizes_agree = False
        yield found("hidden size of the target", width, target.hidden_size.value, place)
    ours, theirs = spec.vocab_size, target.vocab_size
    if ours.value is not None and theirs.value is not None and ours.value != theirs.value:
        padded = abs(ours.value - theirs.value) < 1024 and max(ours.value, theirs.value) % 64 == 0 and theirs.value > 8192
        sizes_agree = sizes_agree and padded
        yield found("vocabulary size", ours.value, theirs.value, ours.where, Severity.WARNING if padded else None)
    if not sizes_agree:
        return  # one wrong target is one fault; the rest follows from it
    layers = target.num_layers.value
    depth = _other_depth(case, layers) if layers is not None else None
    if depth is not None:
        yield found("layer count (the recorded ids are the default of that depth)", depth, layers, spec.aux.where, Severity.WARNING)
    verifier = _verifier_architecture(case)
    known = {target.architecture.value, target.text_architecture.value}
    if verifier is not None and target.architecture.value is not None and verifier not in known:
        yield found(
            "architecture of the verifier",
            verifier,
            target.architecture.value,
            f"{config_file(case)}: speculators_config.verifier",
            Severity.WARNING,
        )


def _verifier_architecture(case: Case) -> str | None:
    """The verifier's architecture where it is recorded; early speculators wrote the draft's own there, which says nothing."""
    nested = case.draft.config.get("speculators_config")
    verifier = nested.get("verifier") if isinstance(nested, Mapping) else None
    names = verifier.get("architectures") if isinstance(verifier, Mapping) else None
    first = names[0] if isinstance(names, list) and names else None
    if not isinstance(first, str) or "eagle" in first.lower() or "speculator" in first.lower():
        return None
    return first
