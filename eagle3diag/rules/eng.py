"""ENG: what the engine does with the draft that its files do not show: algorithm, flags, refusals, replaced tensors, quirks.

Nearly everything is read off ``ServedDraft`` and the parsed launch line; the two wirings (trained and served) tell which ignored flag
matters to *this* draft.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import label
from eagle3diag.rules.registry import finding, rule

if TYPE_CHECKING:
    from eagle3diag.engines.model import ServedDraft

#: algorithms under which a draft of each kind is sound
_SOUND = {
    "eagle3": ("eagle3",),
    "unknown": ("eagle3",),
    "eagle1": ("eagle",),
    "hass": ("eagle",),
    "peagle": ("eagle3", "peagle"),
    "dflash": ("dflash",),
    "mtp": ("mtp", "eagle"),
}
_SPELLED = {
    ("sglang", "eagle3"): "--speculative-algorithm EAGLE3",
    ("sglang", "eagle"): "--speculative-algorithm EAGLE",
    ("sglang", "dflash"): "--speculative-algorithm DFLASH",
    ("vllm", "eagle3"): '"method": "eagle3"',
    ("vllm", "eagle"): '"method": "eagle"',
    ("vllm", "dflash"): '"method": "dflash"',
    ("vllm", "mtp"): '"method": "mtp"',
}


@rule("ENG501", severity=Severity.ERROR, needs=("draft", "launch", "engine"))
def wrong_algorithm(case: Case) -> Iterator[Finding]:
    """The launch line runs the wrong algorithm or method for this draft.

    ## What is wrong
    The line starts the draft as something else than what it was trained as: EAGLE or NEXTN (EAGLE-1), a plain draft model, or no
    speculation at all. vLLM guesses the method from the *path* where none is given: `eagle-` anywhere in it means EAGLE-1, even in
    `/data/eagle-runs/llama_eagle3`.

    ## Why it costs acceptance
    As EAGLE-1 the target hands over its last state only: `fc` is skipped, the trained lm_head is replaced by the target's and the
    vocabulary mapping is not applied. Nothing crashes; the acceptance length is 1.00.

    ## How it is detected
    The algorithm is taken from the launch line; where vLLM's method is not given, by the same rule of this version.

    ## How to fix it
    Give it explicitly: `--speculative-algorithm EAGLE3` (SGLang), `"method": "eagle3"` (vLLM).

    ## Engine versions
    All. vLLM up to 0.10.1.1 takes `eagle3-` in the path for EAGLE-1 too.

    ## Source
    Facts of the engines, sections 4 and 7; vLLM transitions, section 1; field report C6.
    """
    from eagle3diag.engines.launch import effective_method

    launch, served = case.launch, case.served
    if launch is None or served is None:
        return
    sound = _SOUND.get(case.spec.algorithm, ("eagle3",))
    spelled = _SPELLED.get((launch.engine, sound[0]), sound[0])
    told = [p for p in launch.problems if p.kind == "algorithm"]
    method, why = effective_method(launch, served.contract, case.draft.config)
    if not told and method in sound:
        return
    if told:
        title, remedy = told[0].message, told[0].remedy
    elif method is None:
        title, remedy = f"the launch line switches no speculation on ({escaped(why, 120)}): the draft is not used", f"Add {spelled}."
    else:
        kind = "an EAGLE-3 draft" if sound[0] == "eagle3" else f"a draft of the kind {case.spec.algorithm}"
        title = f"{kind} is run as {_called(method)}: {escaped(why, 160)}"
        if method == "eagle" and sound[0] == "eagle3" and served.refused is None:
            title += "; fc is skipped and the acceptance length falls to about 1"
        remedy = f"Give {spelled} on the launch line."
    evidence = {
        "runs": method,
        "trained_as": case.spec.algorithm,
        "why": escaped(why, 200),
        "method_given": escaped(launch.method) if launch.method else None,
        "draft": escaped(launch.draft, 120) if launch.draft else None,
    }
    yield finding("ENG501", title, evidence=evidence, remedy=remedy, where="launch line", engines=label(case))


def _called(method: str) -> str:
    names = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "draft_model": "a plain draft model", "dflash": "DFlash", "mtp": "MTP"}
    return names.get(method, escaped(method))


#: wiring fields a config flag decides, and whose difference another family does not report
_FLAGS = {
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
    "state": "use_aux_hidden_state",
    "deep_layer_norm": "next_layer_regular",
}
_MEANS: dict[str, dict[Any, str]] = {
    "norm_before_residual": {
        True: "the residual of the first layer is the normalised state",
        False: "the residual of the first layer is the raw state",
    },
    "norm_before_fc": {True: "the concatenated states are normalised before fc", False: "fc is fed the raw states"},
    "fc_norm": {True: "each state is normalised before fc", False: "fc is fed the raw states"},
    "norm_output": {True: "the state fed back is after the final norm", False: "the state fed back is before the final norm"},
    "state": {"aux": "three aux states are fed through fc", "final": "the target's last state is fed, without fc"},
}


@rule("ENG502", severity=Severity.WARNING, needs=("draft", "engine"))
def flag_ignored(case: Case) -> Iterator[Finding]:
    """A flag the draft relies on is ignored, or defaulted differently, by this engine version.

    ## What is wrong
    The config sets a flag this version never reads, or leaves out a flag whose default the engine and the trainer choose differently. The
    forward pass that is served is not the one that was trained.

    ## Why it costs acceptance
    A normalised instead of a raw residual, a norm that is skipped, or a state fed back after instead of before the final norm shifts every
    activation that follows. The draft still runs, and is wrong more often; a wrong fed-back state costs more with every step.

    ## How it is detected
    The wiring this version would run is compared with the wiring the draft was trained with. Only flags that change this draft are
    reported.

    ## How to fix it
    Where a default differs, write the flag explicitly. Where a flag is not read, use an engine or version that reads it.

    ## Engine versions
    `norm_before_residual`: never read by SGLang; vLLM 0.10.1+, and true where a speculators config leaves it out. `fc_norm`,
    `norm_output`: SGLang 0.5.12+ (MLA class 0.5.13+), vLLM 0.22+ (speculators configs 0.25+). `norm_before_fc`: SGLang 0.5.17+, vLLM
    0.18+ (speculators 0.19+). `use_aux_hidden_state: false`: SGLang 0.5.8+, vLLM 0.12+.

    ## Source
    Facts of the engines, sections 1.2, 1.3 and 9; dialects, section 3.1; vLLM transitions, sections 1 and 5.
    """
    served = case.served
    if served is None or _not_built(served) or served.algorithm != "eagle3" or case.spec.algorithm not in ("eagle3", "unknown", "peagle"):
        return
    trained = case.spec.wiring
    for field, flag in _FLAGS.items():
        want, runs = getattr(trained, field), getattr(served.wiring, field)
        if want == runs or (field == "deep_layer_norm" and not _deep_norms(case, want)):
            continue
        if field in ("norm_before_fc", "fc_norm") and not served.fc.runs:
            continue  # AUX405: nothing in front of fc runs either
        if field in ("norm_before_fc", "fc_norm") and getattr(case.spec, flag).kind == "shape":
            continue  # CFG110: told by the tensor, the config never sets the flag
        reason = served.ignored.get(flag) or served.defaulted.get(flag) or served.ignored.get(field) or served.defaulted.get(field)
        defaulted = flag in served.defaulted or field in served.defaulted
        stated = getattr(case.spec, flag, None)
        how = "fills in another default for" if defaulted else "does not honour" if stated is not None and stated.known else "does not read"
        if field == "deep_layer_norm":
            title = f"{served.contract.label} normalises the input of draft layers after the first with {runs}, trained with {want}"
            remedy = "Serve a draft of several layers with vLLM, whose layers read input_layernorm."
            remedy = remedy if served.contract.engine == "sglang" else "Serve this draft with SGLang, whose deeper layers read hidden_norm."
        else:
            means = _MEANS[field]
            title = f"{served.contract.label} {how} {flag}: trained so that {means[want]}, served so that {means[runs]}"
            shown = str(want).lower() if isinstance(want, bool) else str(want)
            remedy = (
                f'Write "{flag}": {shown} into the config.'
                if defaulted
                else f"Use an engine version that reads {flag}, or retrain without it."
            )
        yield finding(
            "ENG502",
            title,
            evidence={
                "flag": flag,
                "trained": want,
                "served": runs,
                "recorded": str(stated) if stated is not None else None,
                "reason": escaped(reason, 200) if reason else None,
            },
            remedy=remedy,
            where=flag,
            engines=label(case),
        )
    yield from _ambiguous_norm_output(case, served)


def _ambiguous_norm_output(case: Case, served: ServedDraft) -> Iterator[Finding]:
    """norm_output is not read, and the names alone do not tell which of its two meanings the trainer had (dialects 3.1)."""
    spec, dialect = case.spec, case.spec.dialect
    if spec.norm_output.value is not True or not spec.norm_output.known or spec.wiring.norm_output or served.wiring.norm_output:
        return
    if not dialect.name.startswith("specforge") or dialect.confidence == "high":
        return
    yield finding(
        "ENG502",
        f"{served.contract.label} does not read norm_output: no loss if SpecForge trained this draft (a final norm), a wrong state "
        "fed back if another trainer did",
        evidence={"flag": "norm_output", "recorded": str(spec.norm_output), "dialect": dialect.name, "confidence": dialect.confidence},
        remedy="Use an engine version that reads norm_output, unless SpecForge trained this draft: then set it to false.",
        where="norm_output",
        engines=label(case),
    )


def _deep_norms(case: Case, name: str) -> bool:
    """Whether a layer after the first is built and its norm stands in the file under this name; one renamed for SGLang has the other."""
    layers = min(case.spec.layers_in_file, case.spec.num_layers.value or 1)
    return any(f"layers.{i}.{name}.weight" in case.spec.canonical for i in range(1, layers))


def _not_built(served: ServedDraft) -> bool:
    """The engine does not get as far as a forward pass that could be compared."""
    return served.refused is not None and served.refused.stage == "construct"


@rule("ENG503", severity=Severity.WARNING, needs=("launch",))
def chain_flags(case: Case) -> Iterator[Finding]:
    """Chain flags of the launch line are inconsistent, or the line cannot be started as it stands.

    ## What is wrong
    Draft tokens, steps and top-k do not fit together, one of them is missing, or the speculative configuration is not what the engine reads
    (invalid JSON, a misspelt option, an option of the other engine).

    ## Why it costs acceptance
    A chain (top-k 1) verifies steps + 1 tokens: fewer cap the acceptance length, more are cut with a warning. A tree that asks for more
    tokens than its branches hold crashes. Simulated acceptance makes every number meaningless.

    ## How it is detected
    The line is parsed as the engine parses it. A tree of s steps and top-k t holds 1 + t + (s - 1) t^2 tokens.

    ## How to fix it
    Chain: `--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4`. vLLM: give `num_speculative_tokens`.

    ## Engine versions
    All; SGLang chooses all three flags by target where none is given.

    ## Source
    Facts of the engines, section 7; field report J10.
    """
    launch = case.launch
    if launch is None:
        return
    from_config = any(c.schema == "speculators" for c in case.draft.configs)
    for problem in launch.problems:
        if problem.kind == "algorithm":
            continue  # ENG501 speaks
        severity = Severity(problem.severity)
        if from_config and "missing" in problem.message and problem.kind == "chain" and severity is Severity.ERROR:
            severity = Severity.WARNING  # a speculators config names a number of its own
        yield finding(
            "ENG503",
            problem.message,
            severity=severity,
            evidence=dict(problem.evidence),
            remedy=problem.remedy[:1].upper() + problem.remedy[1:] + ("" if problem.remedy.endswith(".") or not problem.remedy else "."),
            where="launch line",
            engines=label(case),
        )


@rule("ENG504", severity=Severity.ERROR, needs=("draft", "engine"))
def refused(case: Case) -> Iterator[Finding]:
    """The engine will refuse to load this draft.

    ## What is wrong
    This version stops with an exception: while it builds the draft, while it loads the tensors, at start, or at the first request.

    ## Why it costs acceptance
    Nothing is served. The message is often far from the cause, which is why it is predicted here together with the reason.

    ## How it is detected
    The draft is loaded by the recorded rules of this version (names, shapes, config keys, target support); the first step that raises is
    reported with its message.

    ## How to fix it
    Mend what the reason names; other findings say how. `eagle3diag convert` writes the layout an engine wants.

    ## Engine versions
    As recorded for each version; predictions are held against the engines' own loaders.

    ## Source
    Loader runs; facts of the engines, sections 1, 2 and 9 ("loud").
    """
    served = case.served
    if served is None:
        return
    stage = {"construct": "while building the draft", "load_weights": "while loading the tensors", "start": "at start"}
    if served.refused is not None:
        said = served.refused
        yield finding(
            "ENG504",
            f"{served.contract.label} refuses this draft {stage[said.stage]}: {escaped(said.message, 200)}",
            evidence={"stage": said.stage, "message": escaped(said.message, 400), "why": escaped(said.why, 200), "behaviour": said.fact},
            remedy=f"{said.why[:1].upper()}{said.why[1:]}: mend that, or use another engine version."
            if said.why
            else "Use another engine version.",
            where=said.stage,
            engines=label(case),
        )
    if _not_built(served):
        return
    how = "loads this draft and fails" if served.refused is None else "would, once that is mended, fail"
    for text in served.fails_later:
        yield finding(
            "ENG504",
            f"{served.contract.label} {how} at the first request: {escaped(text, 200)}",
            evidence={"stage": "first request", "message": escaped(text, 400)},
            remedy="Mend that, or use another engine version.",
            where="first request",
            engines=label(case),
        )
