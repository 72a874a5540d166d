"""KEY, first part: names. Which tensors are missing, which nobody reads, and what the decoder layer is called.

The three speak about one fault once: where the layer's spelling explains dropped tensors and parameters left at their start value, KEY203
says so and KEY201 and KEY202 leave them out; a missing head is KEY206's; tensors beyond the configured layers are KEY207's.
"""

from __future__ import annotations

from collections.abc import Iterator

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import (
    expected_tensors,
    is_eagle3,
    label,
    layer_names,
    named,
    reduced_vocabulary,
    refused_tensor,
    stated,
    wrapped,
)
from eagle3diag.rules.registry import finding, rule

_STARTS = {
    "uninitialised": "whatever memory holds",
    "ones": "ones",
    "random": "random numbers",
    "zeros": "zeros",
    "identity": "the identity (draft ids taken for token ids)",
}


def unmapped_layers(case: Case) -> dict[str, list[str]]:
    """Decoder-layer tensors by a spelling this engine version does not map, where that costs the layer."""
    served = case.served
    if served is None or not is_eagle3(case) or not any(n.startswith("layers.") for n in served.never_filled):
        return {}
    maps = served.contract["layer_names"]
    bare_model = served.contract["name_prefix"] == "name-then-model"
    lost = set(served.dropped())
    out = {}
    for prefix, names in layer_names(case).items():
        bare = next((prefix.removeprefix(w) for w in _silent_wrappers(case) if prefix.startswith(w)), prefix)  # a wrapper alone: KEY201
        gone = [n for n in names if n in lost]
        if gone and not _mapped(bare, maps, bare_model):
            out[prefix] = gone
    return out


def _silent_wrappers(case: Case) -> dict[str, list[str]]:
    """Wrapper prefixes behind which this engine (or, without one, every engine) passes over the draft without stopping."""
    return {w: names for w, names in wrapped(case).items() if not any(refused_tensor(case, n) for n in names)}


def _mapped(prefix: str, maps: list[str], bare_model: bool) -> bool:
    bare = prefix.removeprefix("model.") if bare_model else prefix
    parts = bare.split(".")
    general = "layers.N." if parts[0] == "layers" and len(parts) == 3 else bare
    return bare in maps or general in maps


def _mapping_versions(case: Case, prefix: str) -> str:
    """The releases of this engine that map a spelling, as a range in words."""
    from eagle3diag.engines.contract import load_contract, releases

    served = case.served
    if served is None:
        return ""
    contract = served.contract
    good = []
    every = releases(contract.engine)
    for version in every:
        other = load_contract(contract.engine, version, draft_class=contract.draft_class)
        if _mapped(prefix, other["layer_names"], other["name_prefix"] == "name-then-model"):
            good.append(version)
    if not good:
        return "no version on record"
    return f"{good[0]} and newer" if good[-1] == every[-1] else f"{good[0]} to {good[-1]}"


@rule("KEY203", severity=Severity.ERROR, needs=("draft", "engine"))
def layer_prefix(case: Case) -> Iterator[Finding]:
    """The decoder layer is spelled with a prefix this engine version does not map: it is dropped or refused.

    ## What is wrong
    SGLang up to 0.5.11 knows the draft's decoder layer as `midlayer.` only. A file that says `layers.0.` (speculators, ModelOpt, most
    exports for vLLM) loses the whole layer there. Wrapped names (`model.layers.0.`, `midlayer.0.`) meet the same fate elsewhere.

    ## Why it costs acceptance
    SGLang 0.4.9 to 0.5.11 drops the tensors without a word and runs attention and MLP on uninitialised memory: the acceptance length is
    near 1.00. Older SGLang and vLLM stop with a `KeyError` or `ValueError`.

    ## How it is detected
    The prefix of the layer's tensors against the spellings the contract lists, and the fate of those tensors.

    ## How to fix it
    Use a version that maps the prefix (SGLang 0.5.12 and newer knows both), or rename: `eagle3diag convert DRAFT OUT --to sglang`.

    ## Engine versions
    SGLang 0.4.5 to 0.5.11 for `layers.0.`; vLLM for `model.`-prefixed names; all for `midlayer.0.`.

    ## Source
    Both engines' loaders run on small checkpoints under each spelling; SGLang 0.5.9 and 0.5.12 `models/llama_eagle3.py` (`load_weights`,
    `legacy_name_map`), vLLM 0.33.0 `model_executor/models/llama_eagle3.py`.
    """
    served = case.served
    if served is None:
        return
    for prefix, names in unmapped_layers(case).items():
        maps = served.contract["layer_names"]
        lost = sum(case.draft.tensors[n].nbytes for n in names)
        spelling = "midlayer" if prefix.endswith("midlayer.") else prefix.rstrip(".")
        loud = served.refused is not None and any(served.tensors[n].why.startswith("refused") for n in names)
        fate = "refused" if loud else "dropped in silence"
        versions = _mapping_versions(case, prefix)
        known = " and ".join(m + "*" for m in maps)
        wrapper = next((prefix.removesuffix(m.replace("N", "0")) for m in maps if prefix.endswith("." + m.replace("N", "0"))), "")
        rename = (
            f"Strip '{escaped(wrapper)}' from the names"
            if wrapper
            else f"Rename the layer: eagle3diag convert DRAFT OUT --to {served.contract.engine}"
        )
        yield finding(
            "KEY203",
            f"{escaped(spelling)}.*: {len(names)} tensors ({lost:,} bytes) are {fate}, {label(case)[0]} maps only {known}",
            evidence={
                "prefix in the file": prefix,
                "mapped by this version": maps,
                "tensors": len(names),
                "bytes": lost,
                "names": names,
                f"{served.contract.engine} versions that map it": versions,
                **({"predicted message": served.refused.message} if loud and served.refused else {"layer starts as": _layer_start(case)}),
            },
            remedy=rename + ("" if versions.startswith("no ") else f"; or use {served.contract.engine} {versions}") + ".",
            where=prefix,
            engines=label(case),
        )


def _layer_start(case: Case) -> str:
    starts = {s for n, s in case.served.never_filled.items() if n.startswith("layers.")} if case.served is not None else set()
    return ", ".join(sorted(starts))


def _unfilled(case: Case) -> dict[str, str]:
    """Parameters left at their start value that KEY201 has to speak about: ``{canonical: start}``."""
    served = case.served
    if served is None:
        return {n: "" for n in expected_tensors(case.spec) if n not in case.spec.canonical}
    if served.refused is not None and served.refused.fact == "missing":
        return {}  # this version checks for missing tensors and says so: ENG504
    behind = {n for names in _silent_wrappers(case).values() for n in names}
    layer_explained = bool(unmapped_layers(case))
    deep = served.wiring.deep_layer_norm
    unused = {"hidden_norm": "input_layernorm", "input_layernorm": "hidden_norm"}[deep]
    held, configured = case.spec.layers_in_file, case.spec.num_layers.value or 1
    out = {}
    for name, start in served.never_filled.items():
        if start == "target" or name in ("lm_head.weight", "d2t"):
            continue  # KEY206, VAL307
        if name == "embed_tokens.weight" and stated(case, "target_hidden_size").value is None and stated(case, "target_hidden_size").there:
            continue  # CFG111: with the null gone the engine takes the target's
        file = case.spec.canonical.get(name)
        if file is not None and refused_tensor(case, file):
            continue  # in the file, but of a shape that is refused: KEY204, CFG105, CFG107
        if name.startswith("layers."):
            number = int(name.split(".")[1])
            if (layer_explained and _found_as(case, name) not in behind) or (number > 0 and name.endswith(f".{unused}.weight")):
                continue
            if held and held <= number < configured:
                continue  # KEY207
        out[name] = start
    return out


def _found_as(case: Case, canonical: str) -> str:
    """A tensor in the file that is this one under a name the reader does not know (``module.fc.weight``), else nothing."""
    file = case.spec.canonical.get(canonical)
    if file is not None:
        return "" if case.served is None or refused_tensor(case, file) else file
    tails = [canonical]
    if canonical.startswith("layers.0."):
        tails.append("midlayer." + canonical.removeprefix("layers.0."))
    return next((n for n in case.draft.tensors for t in tails if n.endswith("." + t)), "")


@rule("KEY201", severity=Severity.ERROR)
def missing_tensor(case: Case) -> Iterator[Finding]:
    """An expected tensor is missing and the engine will not say so.

    ## What is wrong
    A parameter of the draft has no tensor in the file, or only one under a name the reader does not know.

    ## Why it costs acceptance
    No engine reports a missing parameter: norms start as ones, `fc` as random numbers, other matrices as whatever memory holds. The
    server starts and accepts next to nothing.

    ## How it is detected
    With an engine: the parameters its loader leaves unfilled. Without: the tensors every EAGLE-3 reader needs. `embed_tokens` is not
    among them where the engine takes the target's.

    ## How to fix it
    Export the checkpoint again from the training run. Where the tensor is there under a wrapper's prefix (`module.`, `draft_model.`),
    strip the prefix.

    ## Engine versions
    All, except vLLM 0.9.0, which stops. SGLang 0.4.5 to 0.4.8 also builds `fc` with a bias no trainer writes.

    ## Source
    Both engines' loaders run on small checkpoints without one tensor; vLLM 0.33.0 `model_loader/default_loader.py:512-523` (the
    check that is switched off); public reports: vllm-project/speculators 1114 and 358.
    """
    if not is_eagle3(case) or not case.draft.tensors or any(i.kind == "shard-missing" for i in case.draft.issues):
        return  # tensors of an absent shard: KEY208
    gone = _unfilled(case)
    if not case.has("values") and "d2t" not in case.spec.canonical and reduced_vocabulary(case):
        gone["d2t"] = "identity"  # VAL307 says so where values are read
    bias = gone.pop("fc.bias", None)
    wanted_bias = stated(case, "bias").value is True
    if bias is not None:
        yield finding(
            "KEY201",
            f"fc.bias is not in the file: {label(case)[0]} adds a random constant to every fused state",
            severity=None if wanted_bias else Severity.WARNING,
            evidence={"parameter": "fc.bias", "starts as": bias},
            remedy="Export fc.bias, or clear bias in the config."
            if wanted_bias
            else "Use SGLang 0.4.9 or newer: this version builds fc with a bias no trainer writes.",
            where="fc.bias",
            engines=label(case),
        )
    for wrapper, names in _silent_wrappers(case).items():
        behind = [n for n in gone if _found_as(case, n) in names] if case.served is not None else []
        gone = {n: start for n, start in gone.items() if n not in behind}
        lost = sum(case.draft.tensors[n].nbytes for n in names)
        who = f"{label(case)[0]} reads" if case.served is not None else "engines read"
        yield finding(
            "KEY201",
            f"{len(names)} tensors ({lost:,} bytes) stand behind '{escaped(wrapper)}': {who} none of {named(names, 2)}, and nobody says so",
            evidence={"prefix": wrapper, "tensors": names, "bytes": lost, "left at their start value": behind},
            remedy=f"Strip '{escaped(wrapper)}' from the names and save again.",
            where=wrapper,
            engines=label(case),
        )
    for start in dict.fromkeys(gone.values()):
        names = [n for n, s in gone.items() if s == start]
        known = {n: w for n in names if (w := _found_as(case, n))}
        who = f"{label(case)[0]} starts" if case.served is not None else "engines start"
        effect = f"{who} from {_STARTS[start]}, without a word" if start in _STARTS else "no reader will say so"
        hint = f"; the file has {named(known.values(), 1)}, a name it does not know" if known else ""
        yield finding(
            "KEY201",
            f"{named(names)} missing: {effect}{hint}",
            evidence={
                "parameters": names,
                "start as": start or "not known without an engine",
                **({"in the file as": known} if known else {}),
            },
            remedy="Rename them and save again." if known else "Export the draft again; the training run has these tensors.",
            where=names[0],
            engines=label(case),
        )


#: rotary tables that old model classes saved as buffers
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


@rule("KEY202", severity=Severity.WARNING, needs=("draft", "engine"))
def unread_tensor(case: Case) -> Iterator[Finding]:
    """A tensor nobody reads.

    ## What is wrong
    The file holds tensors that reach no parameter of this engine version: biases, q/k norms, an extra layer, a head under another name.

    ## Why it costs acceptance
    If it was trained, the draft that runs is not the draft that was trained. SGLang since 0.4.9 and vLLM (for biases, since 0.25) say
    nothing about it.

    ## How it is detected
    The fate of every tensor in the virtual load. Tensors skipped on purpose (`t2d`), rotary tables, and
    those another finding explains are left out.

    ## How to fix it
    Use an engine that reads them, or train without them. What was never trained may be deleted.

    ## Engine versions
    SGLang 0.4.9 and newer; vLLM 0.25 and newer for biases and `input_norm`; older vLLM stops instead.

    ## Source
    Both engines' loaders run on small checkpoints with one tensor too many; vLLM 0.25.0 `model_executor/models/utils.py:402` (biases).
    """
    served = case.served
    if served is None or not is_eagle3(case):
        return
    explained = {n for group in (unmapped_layers(case), _silent_wrappers(case)) for names in group.values() for n in names}
    explained |= {w for n in (*_unfilled(case), "lm_head.weight") if (w := _found_as(case, n))}
    layers = case.spec.num_layers.value or 1
    flags = {"input_norm.": "norm_before_fc", "fc_norm.": "fc_norm"}
    back = {v: k for k, v in case.spec.canonical.items()}
    unread = []
    for name in served.dropped():
        canonical = back.get(name, name)
        if refused_tensor(case, name) or (canonical.startswith("fc.") and case.spec.use_aux_hidden_state.value is False):
            continue  # loud: ENG504; a draft without aux states needs no fc
        number = canonical.split(".")[1] if canonical.startswith("layers.") else "0"
        if name in explained or (number.isdigit() and int(number) >= layers):
            continue  # KEY203, KEY201, KEY206, KEY207
        if canonical == "lm_head.weight" and case.spec.tie_word_embeddings.value is True:
            continue  # CFG106
        if any(canonical.startswith(p) and stated(case, flag).value is not True for p, flag in flags.items()):
            continue  # CFG110
        if name.endswith(_DERIVED):
            continue  # computed from the config by every engine: nothing trained is lost
        unread.append(name)
    if unread:
        lost = sum(case.draft.tensors[n].nbytes for n in unread)
        yield finding(
            "KEY202",
            f"{named(unread)} ({lost:,} bytes) read by nobody: {label(case)[0]} drops {'them' if len(unread) > 1 else 'it'} in silence",
            severity=Severity.ERROR if reduced_vocabulary(case) and any(back.get(n) == "d2t" for n in unread) else None,
            evidence={"tensors": unread, "bytes": lost, "why": {n: served.tensors[n].why for n in unread}},
            remedy="Serve with an engine that reads them, or delete them if they were never trained.",
            where=unread[0],
            engines=label(case),
        )


@rule("KEY206", severity=Severity.ERROR, needs=("draft", "engine"))
def missing_head(case: Case) -> Iterator[Finding]:
    """lm_head is missing although the engine will not borrow the target's.

    ## What is wrong
    The file has no `lm_head.weight`, and this engine neither takes the target's head nor could use it over a reduced vocabulary.

    ## Why it costs acceptance
    SGLang scores with uninitialised memory. vLLM shares the target's head, cuts it to the first rows and maps those ids as if they were
    the draft's: fluent logits, wrong tokens. The acceptance length is 1.00 either way.

    ## How it is detected
    The head of the engine's effective wiring.

    ## How to fix it
    Export `lm_head.weight`. For a frozen head these are the target's rows selected by `t2d`.

    ## Engine versions
    SGLang all (except `draft_vocab_size: null` over the whole vocabulary from 0.5.2); vLLM all over a reduced vocabulary.

    ## Source
    vLLM 0.33.0 `layers/logits_processor.py:198`, 0.11.1 `v1/spec_decode/eagle.py:1069`; both engines' loaders run without a head.
    """
    served = case.served
    if served is None or not is_eagle3(case) or not case.draft.tensors:
        return
    head, file = served.wiring.head, case.spec.canonical.get("lm_head.weight")
    if file is not None and (served.tensors[file].fate != "dropped" or refused_tensor(case, file)):
        return
    if head == "embedding" or not (head in ("uninitialised", "target-first-rows") or served.never_filled.get("lm_head.weight") in _STARTS):
        return
    other = _found_as(case, "lm_head.weight")
    if any(other in names for names in _silent_wrappers(case).values()):
        return  # KEY201
    what = "scores with the first rows of the target's head" if head == "target-first-rows" else "scores with uninitialised memory"
    yield finding(
        "KEY206",
        f"lm_head.weight is missing: {label(case)[0]} {what}"
        + (f"; the file has {escaped(other, 90)}, a name it does not know" if other else ""),
        evidence={
            "head in this engine": head,
            "draft_vocab_size": case.spec.draft_vocab_size.value,
            "vocab_size": case.spec.vocab_size.value,
        },
        remedy=f"Rename {escaped(other, 90)} to lm_head.weight."
        if other
        else "Export lm_head.weight; where the head was frozen it is the target's rows selected by t2d.",
        where="lm_head.weight",
        engines=label(case),
    )
