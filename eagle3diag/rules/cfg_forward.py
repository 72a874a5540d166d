"""CFG, third part: facts of the config that change the forward pass without changing a shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import config_file, is_eagle3, label, named, stated
from eagle3diag.rules.registry import finding, rule


@rule("CFG108", severity=Severity.WARNING, needs=("draft", "target|launch"))
def short_context(case: Case) -> Iterator[Finding]:
    """The draft's `max_position_embeddings` is below the target's or the served context.

    ## What is wrong
    The draft is limited to fewer positions than the requests it will see.

    ## Why it costs acceptance
    SGLang up to 0.5.0rc2 only warns, from 0.5.1 it refuses to start. vLLM's first runner stops drafting for the whole batch as soon as
    one request passes the limit, and its metrics leave those steps out: acceptance looks healthy while nothing is sped up. Other
    versions read past the end of the rotary table.

    ## How it is detected
    The draft's limit is compared with the context on the launch line where one is given, else with the target's.

    ## How to fix it
    Set `max_position_embeddings` in the draft's config to the target's. It only sizes the rotary table; no weight depends on it. Whether
    the draft is any good beyond the length it was trained on is another question.

    ## Engine versions
    SGLang all (refuses from 0.5.1); vLLM 0.8.5 and newer; vLLM 0.27 and newer raises the value for the second runner.

    ## Source
    vLLM 0.16.0 `v1/worker/gpu_model_runner.py:485-490, 3704-3706`, vLLM 0.33.0 `config/speculative.py:1501-1511`; public reports:
    vllm 48894, sglang 6783 and 10713.
    """
    limit = case.spec.max_position
    if limit.kind != "config" or limit.value is None:
        return
    reach = limit.value
    scaling = case.spec.rope_scaling.value
    if scaling and (case.served is None or case.served.contract.engine == "vllm"):  # vLLM derives yarn's length itself
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and isinstance(original, int) and not isinstance(factor, bool):
            reach = max(reach, int(factor * original))
    context = case.launch.context if case.launch is not None else None
    if context is not None:
        needed, whose = context, "the served context"
    elif case.target is not None and case.target.max_position.value is not None:
        needed, whose = case.target.max_position.value, "the target's context"
    else:
        return
    if reach < needed:
        yield finding(
            "CFG108",
            f"draft limited to {reach:,} positions, {whose} is {needed:,}",
            evidence={"draft max_position_embeddings": limit.value, whose: needed, "read from": limit.where},
            remedy=f"Set max_position_embeddings to {needed} in {config_file(case)}; it only sizes the rotary table.",
            where=limit.where,
            engines=label(case),
        )


def _scaling(raw: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A scaling dict reduced to what it says: no nulls, one spelling of the type, no M-RoPE (CFG114); None where nothing is scaled."""
    if not raw:
        return None
    kind = raw.get("rope_type", raw.get("type", "default"))
    rest = {k: v for k, v in raw.items() if v is not None and k not in ("rope_type", "type", "rope_theta") and "mrope" not in k}
    return None if kind in ("default", "mrope", None) and not rest else {"rope_type": kind, **rest}


@rule("CFG109", severity=Severity.INFO)
def rope(case: Case) -> Iterator[Finding]:
    """RoPE theta or scaling is missing, is in a schema the engine does not read, or differs from the target's.

    ## What is wrong
    The rotary base or scaling the engine would run is not the one the config states, or none is stated and readers fall back to
    theta 10000, or the value differs from the target's.

    ## Why it costs acceptance
    With another base than in training attention looks at the wrong distances; the loss grows with position. A difference from the
    target alone is no fault: the right value is the one the draft was trained with.

    ## How it is detected
    The stated theta and scaling are compared with what the engine's contract would run (a warning where they differ) and with the
    target's (information only).

    ## How to fix it
    Write both schemas: `rope_theta` (and `rope_scaling`) for older readers, `rope_parameters` for newer ones, with the value used in
    training.

    ## Engine versions
    `rope_parameters` is read from SGLang 0.5.10 and vLLM 0.12.0; older ones take theta 10000 where only that is written. vLLM's MLA
    draft class loses `rope_theta` in 0.18 to 0.27 where nothing is scaled.

    ## Source
    vLLM 0.12.0 `transformers_utils/config.py:301`, 0.18.0 `model_executor/models/deepseek_eagle3.py:76-82`; public reports:
    SpecForge 265 and 702, vllm-project/speculators 555 and 574.
    """
    if not is_eagle3(case) or not case.draft.configs:
        return
    spec, target = case.spec, case.target
    theta, scaling = spec.rope_theta, spec.rope_scaling
    stated_theta = theta.value if theta.kind == "config" else None
    run = case.served.wiring if case.served is not None else None
    if run is not None:
        wrong: dict[str, dict[str, Any]] = {}
        if stated_theta is not None and run.rope_theta is not None and abs(stated_theta - run.rope_theta) > 1e-6 * stated_theta:
            wrong["rope_theta"] = {"config": stated_theta, "engine": run.rope_theta}
        if scaling.kind == "config" and _scaling(scaling.value) != _scaling(run.rope_scaling):
            wrong["rope_scaling"] = {"config": _scaling(scaling.value), "engine": _scaling(run.rope_scaling)}
        if wrong:
            words = " and ".join(f"{k} {escaped(v['engine'])} where the config states {escaped(v['config'])}" for k, v in wrong.items())
            yield finding(
                "CFG109",
                f"{label(case)[0]} would run {words}",
                severity=Severity.WARNING,
                evidence={**wrong, "read from": theta.where},
                remedy="Write rope_theta and rope_scaling at the top level beside rope_parameters, or use a version that reads the latter.",
                where=theta.where,
                engines=label(case),
            )
            return
    of_target = target.rope_theta.value if target is not None and target.rope_theta.known else None
    ours = stated_theta if stated_theta is not None else (run.rope_theta if run is not None and run.rope_theta is not None else 10000.0)
    evidence = {"draft rope_theta": stated_theta, "readers run": ours, "target rope_theta": of_target}
    if stated_theta is None and (of_target is None or of_target != ours):
        yield finding(
            "CFG109",
            f"no rope_theta recorded: readers run {ours:g}" + (f", the target has {of_target:g}" if of_target is not None else ""),
            evidence=evidence,
            remedy="Right only if the draft was trained with that base: write the value used in training into the config.",
            where=theta.where,
        )
    elif of_target is not None and of_target != ours:
        yield finding(
            "CFG109",
            f"rope_theta {ours:g} differs from the target's {of_target:g}",
            evidence=evidence,
            remedy="No fault in itself: the right value is the one the draft was trained with.",
            where=theta.where,
        )
    elif (
        target is not None
        and target.rope_scaling.known
        and scaling.known
        and _scaling(scaling.value) != _scaling(target.rope_scaling.value)
    ):
        yield finding(
            "CFG109",
            "rope_scaling differs from the target's",
            evidence={"draft": _scaling(scaling.value), "target": _scaling(target.rope_scaling.value)},
            remedy="No fault in itself: the right scaling is the one the draft was trained with.",
            where=scaling.where,
        )


def _flag(case: Case, *keys: str) -> tuple[bool, str]:
    """Whether one of the flags is set to true, and the place that says so (or would)."""
    for key in keys:
        said = stated(case, key)
        if said.value is True:
            return True, said.place
    return False, stated(case, keys[0]).place


@rule("CFG110", severity=Severity.WARNING)
def norm_flags(case: Case) -> Iterator[Finding]:
    """A norm flag without its tensors, tensors without their flag, or flags that exclude each other.

    ## What is wrong
    `norm_before_fc` goes with `input_norm.weight`, `fc_norm` (SGLang also: `use_aux_norm`) with `fc_norm.0.weight` and so on. One is
    there without the other, or both flags are set although the trainer knows only one at a time.

    ## Why it costs acceptance
    A flag without tensors normalises by ones; tensors without a flag are dropped by SGLang and vLLM, so a trained norm does not run.

    ## How it is detected
    Flags (top level or under `eagle_config`) against tensor names.

    ## How to fix it
    Set the flag as in training, or export the tensor again. A converter that copies flags but not tensors (speculators before the fix)
    leaves exactly this.

    ## Engine versions
    `norm_before_fc`: SGLang 0.5.17, vLLM 0.18.0. `fc_norm`: SGLang 0.5.12, vLLM 0.22.0. Older ones know neither.

    ## Source
    speculators 0.9.0 `models/eagle3/config.py:89-96` (mutually exclusive); both engines' loaders run on small checkpoints; public reports:
    vllm 38111 and 46488.
    """
    if not is_eagle3(case) or not case.draft.tensors or not case.draft.configs:
        return
    have = case.spec.canonical
    chunks = sorted(n for n in have if n.startswith("fc_norm."))
    before, before_at = _flag(case, "norm_before_fc")
    each, each_at = _flag(case, "fc_norm", "use_aux_norm")
    for flag, place, tensors, wanted in (
        (before, before_at, ["input_norm.weight"] if "input_norm.weight" in have else [], "input_norm.weight"),
        (each, each_at, chunks, "fc_norm.0.weight"),
    ):
        key = "norm_before_fc" if wanted.startswith("input") else "fc_norm"
        if flag and not tensors:
            yield finding(
                "CFG110",
                f"{key} is set but {wanted} is not in the file: the norm would run with ones",
                evidence={"flag": place, "tensors": []},
                remedy=f"Export {wanted} again, or clear {key} if the draft was trained without it.",
                where=place,
                engines=label(case),
            )
        elif tensors and not flag:
            yield finding(
                "CFG110",
                f"{named(have[n] for n in tensors)} in the file but {key} is not set: the trained norm does not run",
                evidence={"flag": f"{place}: not true", "tensors": [have[n] for n in tensors]},
                remedy=f'Set "{key}": true in {config_file(case)} if the draft was trained with it.',
                where=have[tensors[0]],
                engines=label(case),
            )
    if before and each:
        yield finding(
            "CFG110",
            "norm_before_fc and fc_norm are both set: the trainer rejects that, and engines would apply both",
            evidence={"norm_before_fc": before_at, "fc_norm": each_at},
            remedy="Keep the one the draft was trained with.",
            where=each_at,
        )


_VISION = ("vl", "vision", "omni", "conditionalgeneration", "multimodal", "image")


def _sees(case: Case) -> bool:
    """Whether something says the target is multimodal, so that an M-RoPE section belongs into the draft."""
    if case.target is not None:
        return "mrope" in str(dict(case.target.rope_scaling.value or {})) or _visual(
            f"{case.target.architecture.value} {case.target.model_type.value} {case.target.text_architecture.value}"
        )
    nested = case.draft.config.get("speculators_config")
    verifier = nested.get("verifier") if isinstance(nested, Mapping) else None
    return _visual(
        f"{case.draft.config.get('target_model_type')} {case.draft.config.get('model_type')} {case.spec.architecture.value} {verifier}"
    )


def _visual(text: str) -> bool:
    return any(word in text.lower() for word in _VISION)


@rule("CFG114", severity=Severity.WARNING)
def leftovers(case: Case) -> Iterator[Finding]:
    """Leftovers in the config change the forward pass: an M-RoPE section in a text draft, a sliding window the engine ignores.

    ## What is wrong
    The config still carries a piece of the model it was derived from (`mrope_section`, `mrope_interleaved`, `type: mrope`), or it states
    a sliding window that this engine does not apply.

    ## Why it costs acceptance
    M-RoPE makes engines take the three-axis position path for a text draft: vLLM fails in it, SGLang computes other angles. A draft
    trained with a window and served with full attention sees keys it never learnt to weigh; the longer the context, the more.

    ## How it is detected
    M-RoPE keys in `rope_scaling` or `rope_parameters` while nothing (target, verifier, model type) says the target is multimodal. The
    window of the config against the window of the engine's wiring.

    ## How to fix it
    Remove the M-RoPE keys. For the window: SGLang 0.5.12 and newer takes `--speculative-draft-window-size`; vLLM honours
    `sliding_window` with `layer_types`.

    ## Engine versions
    M-RoPE: SGLang from 0.5.2, vLLM. Sliding window: ignored by SGLang unless given on the command line.

    ## Source
    vLLM 0.33.0 `model_executor/models/llama.py:185-204`, SGLang (no read of `layer_types` in any version); public reports:
    vllm-project/speculators 598 and 684.
    """
    if not is_eagle3(case):
        return
    keys = []
    for where in ("rope_scaling", "rope_parameters"):
        said = stated(case, where)
        if isinstance(said.value, Mapping):
            keys += [f"{said.place}.{escaped(k)}" for k in said.value if "mrope" in str(k)]
            keys += [f"{said.place}.{k}: mrope" for k in ("type", "rope_type") if said.value.get(k) == "mrope"]
    if keys and not _sees(case):
        yield finding(
            "CFG114",
            f"M-RoPE left over in a text draft: {named(keys, 2)}",
            evidence={"keys": keys},
            remedy="Remove the mrope keys from the draft's config; keep them only if target and training were multimodal.",
            where=keys[0],
            engines=label(case),
        )
    window = case.spec.wiring.sliding_window
    if window is None or case.served is None or case.served.wiring.sliding_window == window:
        return
    launch = case.launch.options.get("speculative-draft-window-size") if case.launch is not None else None
    if launch is not None and str(launch) == str(window):
        return
    runs = case.served.wiring.sliding_window
    yield finding(
        "CFG114",
        f"trained with a sliding window of {window:,} tokens, {label(case)[0]} runs {'full attention' if runs is None else f'{runs:,}'}",
        evidence={"config": window, "engine": runs, "read from": case.spec.sliding_window.where},
        remedy=f"--speculative-draft-window-size {window} (SGLang 0.5.12 and newer)"
        if case.served.contract.engine == "sglang"
        else "Use a version that honours layer_types and sliding_window.",
        where=case.spec.sliding_window.where,
        engines=label(case),
    )


@rule("CFG115", severity=Severity.INFO)
def no_aux_ids(case: Case) -> Iterator[Finding]:
    """No aux layer ids are recorded: every engine will guess.

    ## What is wrong
    Neither the config nor a second config says which target layers feed the draft.

    ## Why it costs acceptance
    Engines fall back to HF layers 2, N//2 and N-3. That is what most trainers use, but not all, and nothing in the file proves it.

    ## How it is detected
    None of the known keys is there (`eagle_aux_hidden_state_layer_ids` at the top level or under `eagle_config`,
    `aux_hidden_states_layer_ids`). Information where the guess hits the layers the draft was trained on, or where those are unknown; a
    warning where the trainer's own default is another.

    ## How to fix it
    Write the ids into the config: HF indices at the top level for vLLM, one less under `eagle_config` for SGLang.

    ## Engine versions
    All.

    ## Source
    SGLang 0.5.23 `spec_aux_hidden_state.py:185-196`, vLLM 0.33.0 `v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:113-148`; speculators 0.3
    and 0.4 captured one layer later (`custom_worker.py:52-60`).
    """
    spec = case.spec
    if not is_eagle3(case) or not case.draft.configs or spec.aux.raw is not None or spec.use_aux_hidden_state.value is False:
        return
    trained = spec.aux.hf or spec.wiring.aux_layers
    guess = case.served.aux.prefill_hf if case.served is not None else None
    missed = trained is not None and guess is not None and tuple(trained) != tuple(guess)
    yield finding(
        "CFG115",
        "no aux layer ids recorded: engines capture their default layers"
        + (f" HF {list(guess)}" if guess is not None else " [2, N//2, N-3]")
        + (f", the trainer's default is HF {list(trained or ())}" if missed else ""),
        severity=Severity.WARNING if missed else None,
        evidence={
            "captured": list(guess) if guess is not None else None,
            "trained on": list(trained) if trained is not None else "not recorded",
        },
        remedy="Record the layers used in training: HF indices at the top level for vLLM, one less under eagle_config for SGLang.",
        where=spec.aux.where,
        engines=label(case),
    )
