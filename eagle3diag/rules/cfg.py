"""CFG, first part: can the config be read, in which schema is it, and which class would an engine make of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3diag.checkpoint.configs import compare_configs, default_reader, layer_part
from eagle3diag.checkpoint.field_types import type_problems
from eagle3diag.checkpoint.model import ConfigFile
from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import config_file, is_eagle3, label, named
from eagle3diag.rules.registry import finding, rule

_ARCHITECTURE_FACTS = ("architectures", "architecture_rename", "other_architecture", "reads_speculators", "speculators_architecture")

#: sizes without which no reader can build the draft
_ESSENTIAL = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")

_WORDS = {bool: "true or false", str: "text"}

_NAMES = {
    "eagle1": "EAGLE-1",
    "hass": "HASS",
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "mtp": "a multi-token-prediction (MTP) head",
}


@rule("CFG101", severity=Severity.ERROR)
def unreadable_config(case: Case) -> Iterator[Finding]:
    """A config file is unreadable or absent.

    ## What is wrong
    `config.json` (or a second config beside it) is not one JSON object: cut short, empty, in another encoding, with a byte order
    mark, or not there at all.

    ## Why it costs acceptance
    No engine starts without `config.json`. Where only a second config is unreadable, the facts that would settle an ambiguity (which
    aux layers were meant) are lost.

    ## How it is detected
    The file is read as UTF-8 and parsed strictly. An unreadable `config.json` is an error, any other config a warning.

    ## How to fix it
    Copy the config again from the training run, or restore it from version control; save it as UTF-8 without BOM.

    ## Engine versions
    All.

    ## Source
    The JSON format (RFC 8259); every engine parses `config.json` before it looks at a tensor.
    """
    for issue in case.draft.issues:
        if issue.kind == "config-unreadable":
            main = issue.file == "config.json"
            yield finding(
                "CFG101",
                issue.message,
                severity=None if main else Severity.WARNING,
                evidence={"file": issue.file, **issue.evidence},
                remedy="Copy the config from the training run again and save it as UTF-8 JSON."
                if main
                else f"Engines load config.json; repair or remove {escaped(issue.file)}, so that it cannot mislead.",
                where=issue.file,
            )


@rule("CFG102", severity=Severity.INFO)
def unrecognised_dialect(case: Case) -> Iterator[Finding]:
    """The training framework is not recognised, or only with low confidence.

    ## What is wrong
    Nothing yet: config and tensor names do not say clearly which framework wrote this draft.

    ## Why it costs acceptance
    Each framework has its own defaults for what it does not write down (id convention, norm flags, fed-back state). Without knowing the
    framework these stay guesses.

    ## How it is detected
    The decision table of the dialects, first match wins; the evidence lists what was seen.

    ## How to fix it
    Keep the config as the trainer wrote it. A draft trained by your own script is well served by the flat schema with every flag written
    out.

    ## Engine versions
    None: engines do not care who wrote a draft.

    ## Source
    What the writers of each framework put into config and tensors; the table is `eagle3diag/checkpoint/dialects.py`.
    """
    dialect = case.spec.dialect
    if (dialect.name == "unknown" or dialect.confidence == "low") and case.draft.configs:
        what = "not recognised" if dialect.name == "unknown" else f"taken for {dialect.name} with low confidence"
        yield finding(
            "CFG102",
            f"training framework {what}",
            evidence={"dialect": dialect.name, "confidence": dialect.confidence, "seen": list(dialect.evidence)},
            remedy="Read the recorded facts in `eagle3diag inspect` and check those that came from a default.",
        )


_FACT_WORDS = {"aux_layers_hf": "aux layers (as HF indices)"}


def _same_layers(case: Case, main: ConfigFile, other: tuple[int, ...]) -> bool:
    """Whether the ids of the default config mean the same layers in the engine that reads them as the other config says."""
    if case.served is None or main is not case.draft.configs[0]:
        return False
    aux = case.served.aux
    if aux.ids is None or aux.shift is None:
        return False
    return sorted(i + aux.shift for i in aux.ids) == sorted(other)


@rule("CFG103", severity=Severity.WARNING)
def configs_disagree(case: Case) -> Iterator[Finding]:
    """Two configs in one folder disagree, or the one loaded by default is in a schema its reader does not know.

    ## What is wrong
    The folder holds more than one draft config, typically a flat `config.json` and a nested `config_speculators.json`, and they state
    different values for the same fact. Or the file named `config.json` is in the schema of another tool than the one that will load it.

    ## Why it costs acceptance
    Tools open `config.json` and nothing else, so whatever the other file says is lost. Where the two name different aux layers, one of
    them feeds the draft states it never saw in training.

    ## How it is detected
    Facts are compared by meaning: `eagle_config` ids `[1, 14, 26]` (layer outputs) and top-level ids `[2, 15, 27]` (HF indices) are the
    same layers and agree. Where an engine is given, its own reading of the ids counts.

    ## How to fix it
    Find out from the training run which value is right, correct the other file, or keep one file only. `eagle3diag convert` writes the
    config one engine reads.

    ## Engine versions
    All. SGLang reads only the flat schema; vLLM both since 0.10.1; the speculators library only its own.

    ## Source
    SGLang 0.5.9 `model_executor/model_runner.py:355-368` (ids under `eagle_config` only), vLLM 0.33.0 `transformers_utils/config.py:364`
    and `transformers_utils/configs/speculators/algos.py` (nested configs), speculators 0.9.0 `config.py:214`.
    """
    configs = [c for c in case.draft.configs if c.schema in ("flat", "speculators")]
    if len(configs) < 2:
        return
    main, disagreed = configs[0], False
    for other in configs[1:]:
        differing = [
            (fact, here, there)
            for fact, here, there in compare_configs(main, other)
            if not (fact == "aux_layers_hf" and _same_layers(case, main, there))
        ]
        if differing:
            disagreed = True
            words = "; ".join(f"{_FACT_WORDS.get(f, f)} {_shown(a)} against {_shown(b)}" for f, a, b in differing[:3])
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            yield finding(
                "CFG103",
                f"{escaped(main.file)} and {escaped(other.file)} disagree: {words}{more}",
                evidence={
                    **{f: {main.file: a, other.file: b} for f, a, b in differing},
                    "schema": {main.file: main.schema, other.file: other.schema},
                    f"{main.file} is": default_reader(main),
                    f"{other.file} is": default_reader(other),
                },
                remedy=f"Engines load {escaped(main.file)} and never open {escaped(other.file)}: write what is right there.",
                where=other.file,
            )
    yield from (f for f in _wrong_schema(case, main, configs[1:]) if not (disagreed and f.severity is Severity.INFO))


def _shown(value: Any) -> str:
    return escaped(list(value) if isinstance(value, tuple) else value)


def _wrong_schema(case: Case, main: ConfigFile, others: list[ConfigFile]) -> Iterator[Finding]:
    """The reader's own schema lies in a file it never opens."""
    if main.file != "config.json":
        return
    readers = default_reader(main)
    engine = case.served.contract.engine if case.served is not None else None
    suffering = [t for t, how in readers.items() if how != "reads" and (engine is None or t == engine)]
    helped = [(t, o.file) for t in suffering for o in others if default_reader(ConfigFile("config.json", o.schema, o.data))[t] == "reads"]
    if not helped:
        return
    tool, file = helped[0]
    yield finding(
        "CFG103",
        f"config.json is in the {main.schema} schema, which {' and '.join(dict(helped))} cannot read; {escaped(file)} is never opened",
        # without an engine this only says who can load the folder; with one it says that this engine cannot
        severity=None if engine is not None else Severity.INFO,
        evidence={"config.json": main.schema, **{o.file: o.schema for o in others}, "config.json is": readers},
        remedy=f"For {tool}, put the content of {escaped(file)} into config.json of a copy of the folder.",
        where="config.json",
    )


@rule("CFG104", severity=Severity.ERROR, needs=("draft", "engine"))
def wrong_architecture(case: Case) -> Iterator[Finding]:
    """`architectures` is not accepted by the engine, or dispatches to another class than an EAGLE-3 draft.

    ## What is wrong
    Engines choose the draft's class by `architectures[0]`. This one is unknown to the engine version, or names a class that is not an
    EAGLE-3 draft (a plain causal language model under EAGLE-3 tensors), or the whole config is in a schema the engine cannot read.

    ## Why it costs acceptance
    The engine stops at start, often with an error about something else: `KeyError: midlayer...`, a q_proj of twice the width,
    `hot_token_id`. The tensors are innocent.

    ## How it is detected
    The architecture string is looked up in the recorded registry of that version, after the renames it applies.

    ## How to fix it
    `LlamaForCausalLMEagle3` is read by SGLang and by vLLM 0.10.2 and newer; `eagle3diag convert` writes config and names for one engine.

    ## Engine versions
    All; the names a version accepts are in its contract (`eagle3diag serve`).

    ## Source
    SGLang 0.5.9 `model_loader/utils.py:55-85`; vLLM 0.33.0 `model_executor/models/registry.py:698-714` and
    `transformers_utils/configs/eagle.py:48-70`; per version in `eagle3diag/engines/contracts`.
    """
    served = case.served
    if served is None or not is_eagle3(case):
        return  # CFG113
    refused = served.refused
    if refused is None or refused.fact not in _ARCHITECTURE_FACTS or not case.draft.configs:
        return
    found = case.spec.architecture.value
    known = served.contract.facts["architectures"].value
    names = list(known) if isinstance(known, dict | list | tuple) else []
    nested = case.draft.configs[0].schema == "speculators" and not served.contract["reads_speculators"]
    said = (
        f"a speculators config (architectures {escaped(found)})" if nested else f"architectures {escaped(found) if found else 'not stated'}"
    )
    yield finding(
        "CFG104",
        f"{said} is not read as an EAGLE-3 draft by {served.contract.label}",
        evidence={"architectures": found, "read by this version": names, "predicted message": refused.message},
        remedy=f"Convert it: eagle3diag convert DRAFT OUT --to {served.contract.engine}"
        if nested
        else f"Set architectures to [{names[0] if names else 'LlamaForCausalLMEagle3'}] in {config_file(case)}.",
        where=case.spec.architecture.where,
        engines=label(case),
    )


#: null is a fault only in newer config classes, which check types strictly
_MORE = {"use_cache": bool, "hidden_act": str}


@rule("CFG111", severity=Severity.WARNING)
def wrong_type(case: Case) -> Iterator[Finding]:
    """A field is null or of the wrong type where readers need a value.

    ## What is wrong
    A number is written as text, a list, a fraction or null; a flag is not true or false; `eagle_config` is null.

    ## Why it costs acceptance
    Readers multiply and index with these values: `target_hidden_size: null` stops SGLang (`None * 3`) and vLLM. Others swallow the
    error and take a default in silence, as SGLang does for the aux layer ids of a null `eagle_config`.

    ## How it is detected
    Every known field against the type its readers need. Null counts only where no reader has a default for it, and is an error in the
    sizes without which nothing can be built. `draft_vocab_size: null` is CFG105's. A null `eagle_config` is information where the given
    engine version accepts it.

    ## How to fix it
    Write the value used in training, or remove the key where it was null.

    ## Engine versions
    All. Config classes of transformers 5 check types strictly (`use_cache expected bool, got None`).

    ## Source
    SGLang 0.5.9 `speculative/eagle_worker.py:195-199`, 0.5.23 `models/llama_eagle3.py:132-214`; public reports: sglang 21274,
    NVIDIA/Model-Optimizer 1417.
    """
    if not case.draft.configs:
        return
    config = case.draft.configs[0]
    problems = [(k, v, need) for k, v, need in type_problems(config) if not k.endswith("draft_vocab_size") or v is not None]
    _, layer = layer_part(config)
    problems += [(k, layer[k], _WORDS[t]) for k, t in _MORE.items() if k in layer and not isinstance(layer[k], t)]
    for key, value, need in problems:
        contract = case.served.contract if case.served is not None else None
        if key == "target_hidden_size" and value is None and contract is not None and contract["target_hidden_null"] == "accepted":
            continue
        build = key.rsplit(".", 1)[-1] in _ESSENTIAL or (key == "draft_vocab_size" and value is not None)
        harmless = key == "eagle_config" and value is None and contract is not None and contract["eagle_config_null"] == "accepted"
        yield finding(
            "CFG111",
            f"{escaped(key)} is {'null' if value is None else escaped(repr(value))}, readers need {need}",
            severity=Severity.ERROR if build else Severity.INFO if harmless else None,
            evidence={"key": key, "value": value, "needed": need},
            remedy=f"Write the value used in training into {escaped(config.file)}" + (", or remove the key." if value is None else "."),
            where=f"{config.file}: {key}",
            engines=label(case),
        )


@rule("CFG113", severity=Severity.ERROR)
def other_algorithm(case: Case) -> Iterator[Finding]:
    """Another generation or algorithm, not EAGLE-3.

    ## What is wrong
    Tensors and config are those of EAGLE-1, HASS, P-EAGLE, DFlash or an MTP head. They look alike from outside: one decoder layer and
    an `fc`.

    ## Why it costs acceptance
    An EAGLE-3 class wants three target states in `fc`, a head and a vocabulary mapping. With another draft it stops, or leaves what is
    missing at its start value.

    ## How it is detected
    `fc` of width 2H without `hidden_norm` is EAGLE-1 (HASS with extra layer norms); `mask_hidden` is P-EAGLE; a top-level
    `hidden_norm` with q_proj over H is DFlash; `mtp.`, `mtp_layers.` or `eh_proj` is MTP. Without an engine this is information only.

    ## How to fix it
    Serve it under its own method (`EAGLE` for EAGLE-1, the engine's MTP, DFlash or P-EAGLE method), or take the EAGLE-3 draft.

    ## Engine versions
    All. P-EAGLE is served by vLLM since 0.22.0.

    ## Source
    speculators 0.5.0 `convert/eagle/eagle_converter.py:45-48`, vLLM 0.22.0 `model_executor/models/registry.py`; public report:
    SafeAILab/EAGLE 214.
    """
    if is_eagle3(case):
        return
    name = _NAMES.get(case.spec.algorithm, case.spec.algorithm)
    served = case.served
    own = {"eagle1": "eagle", "hass": "eagle", "peagle": "eagle3"}.get(case.spec.algorithm, case.spec.algorithm)
    at_home = served is not None and served.refused is None and served.algorithm == own  # its own method: nothing to mend
    if at_home and served is not None and case.spec.algorithm == "peagle":  # a class of its own, with parallel drafting, in vLLM only
        at_home = served.contract.engine == "vllm" and "peagle" in str(case.spec.architecture.value).lower()
    yield finding(
        "CFG113",
        f"this is {name}, not EAGLE-3",
        severity=None if served is not None and not at_home else Severity.INFO,
        evidence={"algorithm": case.spec.algorithm, "seen": list(case.spec.dialect.evidence), "tensors": named(case.draft.tensors, 6)},
        remedy=f"Serve {name} under its own method, or give the EAGLE-3 draft.",
        engines=label(case),
    )
