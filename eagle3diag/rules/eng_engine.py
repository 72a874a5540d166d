"""ENG, second part: tensors the engine replaces, quantisation, quirks of a version, versions not on record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import is_eagle3, label, shape_of, stated
from eagle3diag.rules.registry import finding, rule

_APART = 1e-2  # relative distance from which two tables are not the same at another precision: bf16 rounding stays below 4e-3


@rule("ENG505", severity=Severity.INFO, needs=("draft", "engine"))
def replaced(case: Case) -> Iterator[Finding]:
    """The engine replaces the draft's embedding or lm_head with the target's.

    ## What is wrong
    Usually nothing: the draft was trained with the target's frozen embedding, and sharing it saves memory. It matters where the draft
    *trained* the tensor that is replaced.

    ## Why it costs acceptance
    A draft that learned its own embedding (or head) is run with another one: every input (or every score) is off.

    ## How it is detected
    By this version's rule for replacing. A warning where the tensor was trained (`embed_requires_grad`, or the framework trains it) and
    is not known to equal the target's, or where it differs from the target's although the config says nothing; equal tables are compared
    by value where both are at hand.

    ## How to fix it
    Use an engine that keeps the draft's own (vLLM 0.11.1 and newer), or train with the embedding frozen.

    ## Engine versions
    SGLang: embedding always, unless `target_hidden_size` is present and differs. vLLM 0.9.1 to 0.11.0: where the shapes agree. lm_head:
    SGLang with `draft_vocab_size: null`, vLLM 0.11.0 with a full vocabulary.

    ## Source
    Facts of the engines, section 2.3; vLLM transitions, section 1.
    """
    served = case.served
    if served is None or served.refused is not None or served.algorithm != "eagle3" or not is_eagle3(case):
        return
    for canonical, what in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "lm_head")):
        name = case.spec.canonical.get(canonical)
        if name is None or name not in served.tensors or served.tensors[name].fate != "replaced":
            continue
        trained = _trained(case, what)
        apart = _distance(case, name, what)
        differs = None if apart is None else apart > _APART
        harm = differs is not False and (trained is True or (differs is True and trained is None))
        title = f"{served.contract.label} replaces the draft's {what} ({escaped(name)}) with the target's"
        if harm:
            title += ", although the draft trained its own" if trained else f", which differs by {apart:.0%}"
        elif trained is False:
            title += ": it was trained with the target's"
        elif differs is False:
            title += ": the two are equal"
        yield finding(
            "ENG505",
            title,
            severity=Severity.WARNING if harm else Severity.INFO,
            evidence={
                "tensor": escaped(name),
                "shape": list(shape_of(case, canonical) or ()),
                "trained": trained,
                "relative_distance": apart,
                "why": escaped(served.tensors[name].why, 160),
            },
            remedy="Use an engine that keeps the draft's own table (vLLM 0.11.1 or newer)." if harm else "Nothing to do.",
            where=name,
            engines=label(case),
        )


def _trained(case: Case, what: str) -> bool | None:
    """Whether the draft trained this tensor: by the config, else by what the framework does; None where neither says so."""
    if what == "embedding":
        flag = stated(case, "embed_requires_grad").value
        if isinstance(flag, bool):
            return flag
        return None if case.spec.wiring.embedding == "target" else True
    return case.spec.wiring.head == "draft"


def _distance(case: Case, name: str, what: str) -> float | None:
    """Relative L2 distance of the draft's table from the target's; None where one of them is not at hand, inf where the shapes differ."""
    target = case.target
    if not case.has("values") or target is None or target.checkpoint is None or target.rows:
        return None
    other = target.embed if what == "embedding" else target.head
    if other is None or other not in target.checkpoint.tensors:
        return None
    mine, theirs = case.draft.tensors[name], target.checkpoint.tensors[other]
    if mine.shape != theirs.shape:
        return None
    a, b = case.draft.read(name), target.checkpoint.read(other)
    squared = total = 0.0
    for i in range(0, a.shape[0], 4096):  # rows at a time: a float64 copy of a whole table is gigabytes
        x, y = a[i : i + 4096].double(), b[i : i + 4096].double()
        squared += float((x - y).square().sum())
        total += float(y.square().sum())
    return float((squared / total) ** 0.5) if total > 0 else None


@rule("ENG506", severity=Severity.WARNING, needs=("draft", "engine", "target|launch"))
def quantisation(case: Case) -> Iterator[Finding]:
    """Quantisation is inherited by the draft, or the target's residual stream is rotated.

    ## What is wrong
    The server's quantisation is applied to a draft that was trained and saved without it; or the target was quantised with a rotation of
    its residual stream, so that its hidden states live in another basis than the ones the draft was trained on.

    ## Why it costs acceptance
    A draft of one layer has no redundancy to absorb 4- or 8-bit weights. States in a rotated basis mean nothing to `fc` at all.

    ## How it is detected
    The launch line's quantisation and this version's rule for handing it on; the quantisation section of the target's config for a rotation
    (QuaRot, SpinQuant, transform_config).

    ## How to fix it
    SGLang 0.5.7 and newer: `--speculative-draft-model-quantization unquant`. A rotated target: train on its own states, or use a
    quantisation that leaves the residual stream alone.

    ## Engine versions
    SGLang: all; before 0.5.7 it cannot be switched off. vLLM: 0.11.0 only applies the target's.

    ## Source
    Facts of the engines, section 1.2; vLLM transitions, section 1; field reports I2 to I5.
    """
    served = case.served
    if served is None or not is_eagle3(case):
        return
    policy = served.contract["quantization"]
    own = bool(case.draft.config.get("quantization_config"))
    launch = case.launch
    asked = launch.quantization if launch is not None else None
    unquant = launch is not None and (launch.draft_quantization or "").lower() in ("unquant", "none")
    if policy.startswith("inherited") and asked and not own:
        if not (unquant and policy == "inherited-unless-unquant"):
            can = policy == "inherited-unless-unquant"
            yield finding(
                "ENG506",
                f"--quantization {escaped(asked)} is inherited by the draft, whose own config names no quantisation",
                evidence={
                    "quantization": escaped(asked),
                    "draft_quantization": escaped(launch.draft_quantization) if launch else None,
                    "rule": policy,
                },
                remedy="Add --speculative-draft-model-quantization unquant."
                if can
                else "Use SGLang 0.5.7 or newer with --speculative-draft-model-quantization unquant.",
                where="launch line",
                engines=label(case),
            )
    elif policy == "target" and not own and case.target is not None and case.target.quantization.value:
        yield finding(
            "ENG506",
            f"{served.contract.label} applies the target's quantisation ({escaped(case.target.quantization.value)}) to the draft's layers",
            evidence={"target_quantization": escaped(case.target.quantization.value), "rule": policy},
            remedy="Use vLLM 0.11.1 or newer, where the draft keeps its own.",
            where="target: quantization_config",
            engines=label(case),
        )
    sign = _rotation(case)
    if sign:
        yield finding(
            "ENG506",
            f"the target's quantisation rotates its residual stream ({escaped(sign, 100)}): the aux states are in another basis",
            evidence={"sign": escaped(sign, 100)},
            remedy="Use this draft only if it was trained on the rotated target's own states.",
            where="target: quantization_config",
        )


def _rotation(case: Case) -> str:
    """Words in the target's quantisation config that name a rotation of the residual stream; empty without."""
    return "" if case.target is None else _rotating(case.target.quantization_config, 0)


def _rotating(section: Mapping[str, Any], depth: int) -> str:
    for key, value in section.items():
        if depth == 0 and key == "transform_config" and isinstance(value, Mapping) and value.get("config_groups"):
            groups = value["config_groups"]
            # compressed-tensors names SpinQuant's rotations R1 to R4; only R1 turns the residual stream, the others stay inside a layer
            if isinstance(groups, Mapping) and any(str(g).upper() == "R1" for g in groups):
                return f"transform_config {'/'.join(map(str, groups))}"
            continue
        words = f"{key} {value}".lower() if isinstance(value, str) or value is True else ""
        if any(w in words for w in ("quarot", "spinquant", "spin_quant", "rotate", "rotation")):
            return f"{key}: {value}"
        if isinstance(value, Mapping) and depth < 4 and key != "transform_config":
            found = _rotating(value, depth + 1)
            if found:
                return found
    return ""


@rule("ENG507", severity=Severity.INFO, needs=("draft", "engine"))
def quirk(case: Case) -> Iterator[Finding]:
    """A position or feedback quirk of this version costs some acceptance.

    ## What is wrong
    Nothing in the draft. This version runs the steps after the first in a way that differs from training, for example one position
    further on.

    ## Why it costs acceptance
    The relative distance between the drafted tokens and the context is off by one from the second step; the effect is small and the same
    for every draft.

    ## How it is detected
    Recorded for the version.

    ## How to fix it
    Upgrade if you compare numbers between versions; nothing to do otherwise.

    ## Engine versions
    SGLang up to 0.5.11: one position is skipped before the second draft step.

    ## Source
    Facts of the engines, section 5.
    """
    served = case.served
    if served is None or served.refused is not None or served.algorithm != "eagle3":
        return
    for behaviour, text in served.quirks.items():
        yield finding(
            "ENG507",
            escaped(text, 240),
            evidence={"behaviour": behaviour, "source": served.contract.facts[behaviour].source},
            remedy="Worth an upgrade only where numbers of different versions are compared.",
            where=behaviour,
            engines=label(case),
        )


@rule("ENG508", severity=Severity.INFO, needs=("engine",))
def not_on_record(case: Case) -> Iterator[Finding]:
    """The engine version is not on record: the nearest contract was used, or a source scan took its place.

    ## What is wrong
    Nothing in the draft: what this exact version does was never recorded.

    ## Why it costs acceptance
    It does not; but the findings hold for the version they name.

    ## How it is detected
    The version asked for is not among the recorded releases.

    ## How to fix it
    Name a recorded release, or read the findings as those of the neighbour.

    ## Engine versions
    Any that was not recorded; TensorRT-LLM and llama.cpp, whose facts were read in their repositories and are undated.

    ## Source
    The contracts themselves (`eagle3diag/engines/contracts`).
    """
    served = case.served
    if served is None:
        return
    contract = served.contract
    if contract.version == "undated":
        title = f"the facts of {contract.engine} were read in its repository and belong to no release: yours may differ"
    elif contract.origin != "recorded":
        title = f"the facts of {contract.label} come from a scan of {escaped(contract.origin, 120)}, not from the record"
    elif not contract.on_record:
        title = f"{contract.engine} {escaped(contract.asked)} is not on record: judged as {contract.version}, the nearest recorded release"
    else:
        return
    yield finding(
        "ENG508",
        title,
        evidence={"asked": escaped(contract.asked), "used": contract.version, "origin": escaped(contract.origin, 120)},
        remedy="Hold what matters against your version." if contract.version == "undated" else "Name a recorded release to be sure.",
        where="engine",
        engines=label(case),
    )
