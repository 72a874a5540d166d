"""AUX, second part: can this target hand out states at all, and does ``fc`` run on what it hands out."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3diag.checkpoint.aux_ids import default_layers
from eagle3diag.errors import escaped
from eagle3diag.rules.aux_view import serving_aux, shown
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import is_eagle3, label, shape_of
from eagle3diag.rules.registry import finding, rule

_SHALLOWEST = 7  # layers: the least with 2 < N//2 < N-3


@rule("AUX404", severity=Severity.ERROR, needs=("target", "engine"))
def target_without_hook(case: Case) -> Iterator[Finding]:
    """The target architecture cannot hand out aux states in this engine version.

    ## What is wrong
    EAGLE-3 needs the target's model class to hand out hidden states of three layers. This version's class for this architecture does not
    have that hook, or has it and captures nothing.

    ## Why it costs acceptance
    The server stops at start in most versions (AttributeError, RuntimeError). Where it does not, the draft is fed nothing useful and the
    acceptance length is 1.

    ## How it is detected
    The architecture in the target's config is looked up in the recorded table of classes and first versions. A class on no list is
    assumed to capture as most do, and that is said (info).

    ## How to fix it
    Use an engine version that has the hook (the finding names the first on record), or patch the target class.

    ## Engine versions
    Per architecture; for example KimiK25ForConditionalGeneration: SGLang 0.5.10, vLLM 0.18.0.

    ## Source
    Facts of the engines, section 3.4; vLLM transitions, section 3; capture runs.
    """
    from eagle3diag.engines.capture import target_support
    from eagle3diag.engines.versions import at_least

    served, target = case.served, case.target
    if served is None or target is None or served.algorithm != "eagle3" or not is_eagle3(case):
        return
    support = target_support(served.contract, target, case.launch)
    captures = support.behaviour.captures if support.behaviour is not None else "stream"
    if support.hook is None and support.message:
        yield finding(
            "AUX404",
            escaped(support.message, 240),
            severity=Severity.INFO,
            evidence={"target": escaped(target.architecture.value), "engine": served.contract.label},
            remedy="Look for set_eagle3_layers_to_capture or SupportsEagle3 in the class of this target.",
            where="target: architectures",
            engines=label(case),
        )
    if support.hook is not False and support.refusal is None and captures == "stream":
        return
    engine, name = served.contract.engine, escaped(target.architecture.value)
    later = support.since if support.since and not at_least(served.contract.version, support.since) else None
    if later:
        remedy = f"Use {engine} {later} or newer, the first on record that hands out aux states for this target."
    elif support.since:
        remedy = f"Go back to {engine} {support.since}, the first on record that works with this target, or use the other engine."
    else:
        remedy = f"No {engine} version on record hands out aux states for this target: use the other engine, or patch the class."
    yield finding(
        "AUX404",
        f"{name} cannot hand out aux states in {served.contract.label}" + (f", first in {later}" if later else ""),
        evidence={
            "target": name,
            "engine": served.contract.label,
            "because": escaped(support.message, 240),
            "predicted_error": escaped(support.refusal, 200) if support.refusal else None,
            "first_version": support.since,
        },
        remedy=remedy,
        where="target: architectures",
        engines=label(case),
    )


@rule("AUX405", severity=Severity.ERROR, needs=("draft", "engine"))
def fc_bypassed(case: Case) -> Iterator[Finding]:
    """The fusion layer `fc` would be bypassed.

    ## What is wrong
    SGLang runs `fc` only if the width of the incoming state differs from the width of the embeddings. A state that is as wide as the draft
    (one target state instead of three) skips it, without a message. vLLM does the same when it takes the draft for an EAGLE-1 one.

    ## Why it costs acceptance
    The draft layer is fed a raw target state instead of the fused one it was trained on; the acceptance length is about 1.00.

    ## How it is detected
    From the algorithm on the launch line (EAGLE or NEXTN hands over one final state) and from the number of captured layers times the
    target's width, against the draft's width. Quiet where the draft was trained without `fc`.

    ## How to fix it
    Launch with `--speculative-algorithm EAGLE3` (vLLM: `"method": "eagle3"`). A draft with a single aux layer as wide as itself cannot be
    served by SGLang; use vLLM, or fold `fc` into the layer.

    ## Engine versions
    SGLang: all versions, both draft classes. vLLM: method `eagle` with an architecture that starts with `Eagle`.

    ## Source
    Facts of the engines, section 4; loader runs, "fc bypass".
    """
    served = case.served
    trained = case.spec.wiring.fc == "applied" and case.spec.use_aux_hidden_state.value is not False
    if served is None or served.refused is not None or not trained or not is_eagle3(case):
        return
    if served.fc.runs and served.wiring.fc != "bypassed":
        return
    fc = shape_of(case, "fc.weight")
    own = case.spec.hidden_size.value or (fc[0] if fc else None)
    if served.wiring.fc != "bypassed" and own is None:
        return
    cause = (
        f"launched as {served.algorithm.upper()}, the target hands over one final state"
        if served.algorithm != "eagle3"
        else f"{case.spec.n_aux.value or 1} aux state of width {case.spec.target_hidden_size.value or own}"
    )
    expects = f"fc {list(fc)} expects {fc[1]}" if fc else "fc expects more"
    yield finding(
        "AUX405",
        f"fc is bypassed: a state of width {own} meets embeddings of width {own}, {expects}; {cause}",
        evidence={"state_width": own, "embedding_width": own, "fc": list(fc) if fc else None, "algorithm": served.algorithm},
        remedy='Launch with --speculative-algorithm EAGLE3 (vLLM: "method": "eagle3").'
        if served.algorithm != "eagle3"
        else "SGLang cannot serve this draft as it is: use vLLM, or train on more than one layer.",
        where="fc.weight",
        engines=label(case),
    )


@rule("AUX407", severity=Severity.WARNING, needs=("draft", "target"))
def shallow_target(case: Case) -> Iterator[Finding]:
    """The target is too shallow for the default layer formula.

    ## What is wrong
    The default layers 2, N//2, N-3 of a target with fewer than seven layers coincide, change order or lie outside the model.

    ## Why it costs acceptance
    Fewer than three different states are captured: `fc` crashes on the width, or is fed other columns than it was trained on.

    ## How it is detected
    From the target's layer count, where no ids are recorded or the engine does not read them.

    ## How to fix it
    Record ids that exist and are different, in the place and convention the engine reads.

    ## Engine versions
    All: the formula is the same in every engine and trainer.

    ## Source
    Dialects, section 4.1; field report D8.
    """
    depth = case.target.num_layers.value if case.target is not None else None
    if depth is None or depth >= _SHALLOWEST or not is_eagle3(case) or case.spec.use_aux_hidden_state.value is False:
        return
    served = serving_aux(case)
    guesses = served.aux.ids is None if served is not None else case.spec.aux.raw is None
    if not guesses:
        return
    layers = default_layers(depth)
    yield finding(
        "AUX407",
        f"a target of {depth} layers has no three default layers: 2, N//2, N-3 give HF {shown(layers)}",
        evidence={"target_layers": depth, "default_hf": list(layers), "least": _SHALLOWEST},
        remedy="Record the layers the draft was trained on, where this engine reads them.",
        where="target: num_hidden_layers",
        engines=label(case),
    )
