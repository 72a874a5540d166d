"""vLLM's server side of a draft, in its source: the config it makes of the file's, the runner's ids, what is shared with the target.

Readers as in ``draft``; the two model runners are told apart where they differ.
"""

from __future__ import annotations

import ast
import re

from eagle3diag.engines.scan.classes import dotted
from eagle3diag.engines.scan.draft import Code, Draft, Found, Reader, reader
from eagle3diag.engines.scan.ids import default_aux, id_meaning, id_places
from eagle3diag.engines.scan.source import pinned

__all__ = ["read_vllm"]

read_vllm: dict[str, Reader] = {}
_ALGOS = "transformers_utils/configs/speculators/algos.py"
_V1 = "v1/worker/gpu_model_runner.py"
_V2 = ("v1/worker/gpu/spec_decode", "v1/worker/gpu/model_runner.py")
_CONFIGS = ("config/speculative.py", "config/__init__.py", "config.py")


# ---------------------------------------------------------------- the config it makes


def _converter(d: Draft) -> Code:
    return d.function(_ALGOS, "update_eagle3")


def _has_converter(d: Draft) -> bool:
    return _ALGOS in d.classes.source


@reader(read_vllm, "reads_speculators")
def _reads_speculators(d: Draft) -> Found | None:
    return _has_converter(d), "read", _ALGOS


@reader(read_vllm, "speculators_copies")
def _speculators_copies(d: Draft) -> Found | None:
    if not _has_converter(d):
        return [], "read", _ALGOS
    code = _converter(d)
    keys = re.findall(r"\w+\['(\w+)'\] = config_dict", code.text)
    order = ["draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids", "norm_before_fc"]
    known = [k for k in [*order, "fc_norm", "norm_output"] if k in keys]
    return ([*known, *dict.fromkeys(k for k in keys if k not in known)], "read", code.where) if code else None


@reader(read_vllm, "speculators_architecture")
def _speculators_architecture(d: Draft) -> Found | None:
    if not _has_converter(d):
        return "none", "read", _ALGOS
    code = _converter(d)
    return ("by-model-type" if "model_type" in code.text else "llama"), "read", code.where


@reader(read_vllm, "speculators_types")
def _speculators_types(d: Draft) -> Found | None:
    if not _has_converter(d):
        return [], "read", _ALGOS
    names = re.findall(r"@register_speculator\('(\w+)'\)", d.file(_ALGOS).text)
    return [n for n in names if n in ("eagle3", "peagle")], "read", _ALGOS


@reader(read_vllm, "speculators_residual_default")
def _speculators_residual_default(d: Draft) -> Found | None:
    code = _converter(d)
    match = re.search(r"config_dict\.get\('norm_before_residual', (True|False)\)", code.text)
    return (match.group(1) == "True", "read", code.where) if match else None


@reader(read_vllm, "method_rule")
def _method_rule(d: Draft) -> Found | None:
    for path in _CONFIGS:
        tree = d.classes.source.tree(path)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.If) and "'eagle-' in " in ast.unparse(node.test):
                rules: list[list[str]] = []
                at: ast.stmt | None = node
                while isinstance(at, ast.If):
                    texts = re.findall(r"'(eagle3?-?)' in ", ast.unparse(at.test))
                    method = next(
                        (s.value.value for s in at.body if isinstance(s, ast.Assign) and dotted(s.targets[0]).endswith("method")
                         and isinstance(s.value, ast.Constant)), None
                    )  # fmt: skip
                    rules += [[t, str(method)] for t in texts if method]
                    at = at.orelse[0] if len(at.orelse) == 1 else None
                return rules, "read", f"{path}:{node.lineno}"
    return None


# ---------------------------------------------------------------- aux states


def _runner_code(d: Draft, name: str) -> Code:
    if d.runner == "v2":
        for path in d.classes.source.mentions(name, *_V2):
            code = d.function(path, name)
            if code:
                return code
        return Code()
    return d.function(_V1, name)


@reader(read_vllm, "runner_captures")
def _runner_captures(d: Draft) -> Found | None:
    folders = _V2 if d.runner == "v2" else (_V1,)
    if not any(True for _ in d.classes.source.under(*folders)):
        return (False, "read", folders[0]) if d.runner == "v2" and _V1 in d.classes.source else None
    hits = d.classes.source.mentions("set_aux_hidden_state_layers", *folders)
    return (bool(hits), "read", hits[0] if hits else folders[0])


@reader(read_vllm, "aux_ids_from")
def _aux_ids_from(d: Draft) -> Found | None:
    captures = _runner_captures(d)
    if captures is None:
        return None
    for name in ("_get_eagle3_aux_layers_from_config", "get_eagle3_aux_layers_from_config"):
        code = _runner_code(d, name)
        if code:
            return id_places(code.node), "read", code.where
    folders = _V2 if d.runner == "v2" else (_V1,)
    for path in d.classes.source.mentions("eagle_aux_hidden_state_layer_ids", *folders):
        places = id_places(d.classes.source.tree(path))
        if places:
            return places, "read", path
    return [], "read", captures[2]


reader(read_vllm, "id_meaning")(id_meaning)
reader(read_vllm, "default_aux")(default_aux)


@reader(read_vllm, "use_aux_flag")
def _use_aux_flag(d: Draft) -> Found | None:
    honoured = "use_aux_hidden_state" in d.init.text
    if not honoured:
        return False, "read", d.init.where or d.lm.where
    captures = _runner_captures(d)
    if captures is None or not captures[0]:
        return (False, "inferred", captures[2]) if captures is not None else None
    if d.runner == "v2":
        asks = d.classes.source.mentions('use_aux_hidden_state"', *_V2) or d.classes.source.mentions("use_aux_hidden_state'", *_V2)
        return (True, "read", asks[0]) if asks else ("refuse", "inferred", captures[2])
    asks = d.classes.source.mentions('"use_aux_hidden_state"', "v1/spec_decode", _V1)
    return (True, "read", asks[0]) if asks else ("refuse", "inferred", captures[2])


@reader(read_vllm, "cuda_graph_uses_ids")
def _cuda_graph_uses_ids(d: Draft) -> Found | None:
    return (True, "inferred", _V1) if _V1 in d.classes.source else None


@reader(read_vllm, "eagle_config_null")
def _eagle_config_null(d: Draft) -> Found | None:
    if "eagle_config" not in d.init.text:
        return "accepted", "inferred", d.lm.where
    tolerant = re.search(r"'eagle_config', None\) or \{\}|eagle_config is not None", d.init.text)
    return ("accepted" if tolerant else "refuse"), "read", d.init.where


# ---------------------------------------------------------------- shared with the target


def _sharing(d: Draft) -> list[Code]:
    """Functions that share tables with the target, the runner's own."""
    if d.runner == "v2" and "v1/worker/gpu/spec_decode/eagle/utils.py" in d.classes.source:
        return [d.file("v1/worker/gpu/spec_decode/eagle/utils.py")]
    for path in ("v1/spec_decode/llm_base_proposer.py", "v1/spec_decode/eagle.py"):
        own = [d.function(path, n) for n in ("_maybe_share_embeddings", "_maybe_share_lm_head")]
        if any(own):
            return [c for c in own if c]
        code = d.function(path, "load_model")
        if code:
            return [code]
    return []


@reader(read_vllm, "embedding")
def _embedding(d: Draft) -> Found | None:
    if d.runner == "v2":
        return None
    for code in _sharing(d):
        if "embed_tokens" not in code.text:
            continue
        if "has_own_embed_tokens" in code.text:
            return "own-unless-equal", "read", code.where
        if re.search(r"embed_tokens\.weight\.shape == [\w.]*embed_tokens\.weight\.shape", code.text):
            return "target-if-same-shape", "read", code.where
    return None


@reader(read_vllm, "embedding_exempt")
def _embedding_exempt(d: Draft) -> Found | None:
    return ("none", "inferred", _sharing(d)[0].where) if _sharing(d) else None


@reader(read_vllm, "lm_head_missing")
def _lm_head_missing(d: Draft) -> Found | None:
    for code in _sharing(d):
        if "has_own_lm_head" in code.text:
            return "target", "read", code.where
    return None


@reader(read_vllm, "lm_head_replaced")
def _lm_head_replaced(d: Draft) -> Found | None:
    for code in _sharing(d):
        if "has_own_lm_head" in code.text:
            return "never", "read", code.where
    return None


# ---------------------------------------------------------------- server


@reader(read_vllm, "max_position")
def _max_position(d: Draft) -> Found | None:
    if d.runner != "v1" or _V1 not in d.classes.source:
        return None
    checked = "effective_drafter_max_model_len" in d.classes.source.text(_V1)
    return ("stops-drafting" if checked else "unchecked"), "read" if checked else "inferred", _V1


@reader(read_vllm, "rope_keys")
def _rope_keys(d: Draft) -> Found | None:
    if d.kind == "mla":
        rebuilt = "'deepseek_yarn'" in d.layer_init.text
        return ("mla-rebuilt" if rebuilt else "parameters-first"), "read", d.layer_init.where
    code = d.file("transformers_utils/config.py")
    if not code:
        return None
    if "rope_parameters" not in code.text:
        return "legacy", "read", code.where
    lowest, upper = pinned(d.classes.source.requires)
    if not lowest and upper is None:
        return None
    return (
        ("parameters-transformers4" if upper is not None and upper <= (5,) else "parameters-first"),
        "inferred",
        d.classes.source.requires,
    )


@reader(read_vllm, "quantization")
def _quantization(d: Draft) -> Found | None:
    hits = d.mentions("get_draft_quant_config")
    return ("own", "read", hits) if hits else None


def _metrics(d: Draft) -> Code:
    return d.file("v1/spec_decode/metrics.py")


@reader(read_vllm, "accept_length")
def _accept_length(d: Draft) -> Found | None:
    code = _metrics(d)
    if "mean_acceptance_length" not in code.text:
        return None
    bonus = re.search(r"mean_acceptance_length = 1 \+ ", code.text)
    return ("with-bonus" if bonus else "without-bonus"), "read", code.where


@reader(read_vllm, "accept_rate")
def _accept_rate(d: Draft) -> Found | None:
    code = _metrics(d)
    return ("drafts", "read", code.where) if re.search(r"num_accepted_tokens / num_draft_tokens", code.text) else None


@reader(read_vllm, "runner_default")
def _runner_default(d: Draft) -> Found | None:
    code = d.file("config/vllm.py")
    if "V2_MODEL_RUNNER" in code.text or d.runner is None:
        return None  # the conditions are too many to be read as one word: the record says which
    return {"mode": "never", "archs": [], "quantised": False}, "read", code.where or "config"
