"""SGLang's server side of a draft, in its source: which ids reach the target, what graph replays use, what the log divides.

Readers as in ``draft``; they look at the runner, the speculative workers, the config and the metrics, wherever a release keeps them.
"""

from __future__ import annotations

import ast
import re

from eagle3diag.engines.scan.classes import calls
from eagle3diag.engines.scan.draft import Code, Draft, Found, Reader, reader
from eagle3diag.engines.scan.ids import IDS, default_aux, id_meaning, id_places
from eagle3diag.engines.scan.source import pinned
from eagle3diag.engines.scan.target import scan_target

__all__ = ["read_sglang"]

read_sglang: dict[str, Reader] = {}
_RUNNER = "srt/model_executor"
_WORKERS = "srt/speculative"
_HOOK = "set_eagle3_layers_to_capture"


def _strings(tree: ast.AST | None) -> set[str]:
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)} if tree is not None else set()


# ---------------------------------------------------------------- dispatch


@reader(read_sglang, "other_architecture")
def _other_architecture(d: Draft) -> Found | None:
    code = d.file("srt/model_loader/utils.py")
    return ("refuse", "inferred", code.where) if "are not supported for now" in code.text or "raise ValueError" in code.text else None


@reader(read_sglang, "reads_speculators")
def _reads_speculators(d: Draft) -> Found | None:
    hits = d.classes.source.mentions("speculators_config", "srt/configs", "srt/models", "srt/utils", "srt/speculative", _RUNNER)
    return (False, "read", "srt/configs") if not hits else None


def _unless_speculators(value: object) -> Reader:
    def read(d: Draft) -> Found | None:
        plain = _reads_speculators(d)
        return None if plain is None else (value, plain[1], plain[2])

    return read


read_sglang["speculators_copies"] = _unless_speculators([])
read_sglang["speculators_types"] = _unless_speculators([])
read_sglang["speculators_architecture"] = _unless_speculators("none")
read_sglang["speculators_residual_default"] = _unless_speculators(False)


# ---------------------------------------------------------------- aux states


@reader(read_sglang, "aux_ids_from")
def _aux_ids_from(d: Draft) -> Found | None:
    source = d.classes.source
    for path in source.mentions(IDS, _RUNNER):
        places = id_places(source.tree(path))
        if places:
            return places, "read", path
    hooked = source.mentions(_HOOK, _RUNNER)
    return ([], "read", hooked[0]) if hooked else None


reader(read_sglang, "id_meaning")(id_meaning)
reader(read_sglang, "default_aux")(default_aux)


@reader(read_sglang, "runner_captures")
def _runner_captures(d: Draft) -> Found | None:
    hits = d.classes.source.mentions(_HOOK, _RUNNER)
    return (True, "read", hits[0]) if hits else None


@reader(read_sglang, "cuda_graph_uses_ids")
def _cuda_graph_uses_ids(d: Draft) -> Found | None:
    source = d.classes.source
    places = _aux_ids_from(d)
    if places is None:
        return None
    if not places[0]:
        return True, "inferred", places[2]
    for path in source.mentions(_HOOK, _RUNNER):
        if "graph_runner" in path:
            tree = source.tree(path)
            for call in calls(tree, _HOOK) if tree is not None else ():
                if not call.args and not call.keywords:
                    return False, "read", f"{path}:{call.lineno}"
    return True, "read", places[2]


@reader(read_sglang, "use_aux_flag")
def _use_aux_flag(d: Draft) -> Found | None:
    source = d.classes.source
    hits = [p for p in source.mentions("use_aux_hidden_state", _RUNNER) if "use_aux_hidden_state" in _strings(source.tree(p))]
    if hits:
        return True, "read", hits[0]
    hooked = source.mentions(_HOOK, _RUNNER)
    return (False, "read", hooked[0]) if hooked else None


@reader(read_sglang, "eagle_config_null")
def _eagle_config_null(d: Draft) -> Found | None:
    source = d.classes.source
    looked = list(source.under(_WORKERS))
    for path in source.mentions("eagle_config", _WORKERS):
        text = d.file(path).text
        if re.search(r"eagle_config = getattr\([^\n]*'eagle_config', \{\}\)\n[^\n]*eagle_config\.get\(", text):
            return "refuse", "read", path
    return ("accepted", "inferred", _WORKERS) if looked else None


@reader(read_sglang, "n_aux_buffers")
def _n_aux_buffers(d: Draft) -> Found | None:
    for path in d.classes.source.mentions("num_aux_hidden_states", _WORKERS):
        tree = d.classes.source.tree(path)
        for f in ast.walk(tree) if tree is not None else ():
            if isinstance(f, ast.FunctionDef) and "num_aux_hidden_states" in _strings(f) and "target_worker" in ast.unparse(f):
                return "target-config", "read", f"{path}:{f.lineno}"
    return ("draft", "inferred", _WORKERS) if any(True for _ in d.classes.source.under(_WORKERS)) else None


@reader(read_sglang, "replay_buffer")
def _replay_buffer(d: Draft) -> Found | None:
    files = [p for p in d.classes.source.under(_WORKERS) if "draft_extend_cuda_graph_runner" in p]
    for path in files:
        if re.search(r"hidden_states\.shape\[1\] == [\w.]*hidden_states\.shape\[1\]", d.file(path).text):
            return "stale", "read", path
    return ("none", "read", files[0]) if files else None


@reader(read_sglang, "two_batch_overlap")
def _two_batch_overlap(d: Draft) -> Found | None:
    for arch in ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"):
        target = scan_target(d.classes, arch)
        if target.hook and target.behaviour is not None:
            return ("partial" if target.behaviour.short == "silent" else "refuse"), "inferred", target.where[-1]
    return None


# ---------------------------------------------------------------- forward and embedding


@reader(read_sglang, "position_gap")
def _position_gap(d: Draft) -> Found | None:
    for name in ("eagle_worker.py", "eagle_worker_v2.py"):
        code = d.function(f"{_WORKERS}/{name}", "draft_forward")
        add, run = code.text.find("positions.add_(1)"), re.search(r"runner\.forward\(|\.forward\(", code.text)
        if add >= 0 and run is not None:
            return int(add < run.start()), "read", code.where
    return None


@reader(read_sglang, "rope_keys")
def _rope_keys(d: Draft) -> Found | None:
    if d.layer is None:
        return None
    own = d.layer_init
    code = d.code(d.layer, "__init__", own.owner) if d.kind == "llama" else own
    if not code:
        return None
    return "parameters-first" if "rope_parameters" in code.text else "legacy", "read", code.where


@reader(read_sglang, "embedding")
def _embedding(d: Draft) -> Found | None:
    for path in d.classes.source.mentions(".set_embed", _WORKERS):
        return "target-always", "read", path
    return None


@reader(read_sglang, "embedding_exempt")
def _embedding_exempt(d: Draft) -> Found | None:
    code = d.code(d.lm, "set_embed")
    if not code:
        return None
    if re.search(r"target_hidden_size != self\.config\.hidden_size", code.text) is None:
        return "none", "read", code.where
    null_counts = "target_hidden_size is not None" not in code.text
    return "target_hidden_size-differs" + ("-or-null" if null_counts else ""), "read", code.where


@reader(read_sglang, "lm_head_missing")
def _lm_head_missing(d: Draft) -> Found | None:
    return ("uninitialised", "inferred", d.lm_init.where) if "ParallelLMHead" in d.lm_init.text else None


@reader(read_sglang, "lm_head_replaced")
def _lm_head_replaced(d: Draft) -> Found | None:
    return ("never", "inferred", d.lm_init.where) if d.lm_init else None


# ---------------------------------------------------------------- server


@reader(read_sglang, "max_position")
def _max_position(d: Draft) -> Found | None:
    code = d.file("srt/configs/model_config.py")
    if "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" not in code.text:
        return None
    lenient = re.search(r"'SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN', default='True'", code.text, re.I)
    return "warn" if lenient else "refuse", "read", code.where


@reader(read_sglang, "dtype")
def _dtype(d: Draft) -> Found | None:
    code = d.function("srt/configs/model_config.py", "_get_and_verify_dtype")
    return ("own", "read", code.where) if re.search(r"config_dtype == torch\.float32", code.text) else None


@reader(read_sglang, "dtype_keys")
def _dtype_keys(d: Draft) -> Found | None:
    lowest, _ = pinned(d.classes.source.requires)
    if not lowest:
        return None
    return (["dtype", "torch_dtype"] if lowest >= (4, 56) else ["torch_dtype"]), "inferred", d.classes.source.requires


@reader(read_sglang, "quantization")
def _quantization(d: Draft) -> Found | None:
    holders = d.classes.source.mentions("speculative_draft_model_quantization", "srt/server_args.py", "srt/arg_groups")
    for path in holders:
        if re.search(r"speculative_draft_model_quantization == 'unquant'", d.file(path).text):
            return "inherited-unless-unquant", "read", path
    return ("inherited", "read", "srt/server_args.py") if "srt/server_args.py" in d.classes.source else None


@reader(read_sglang, "auto_chain")
def _auto_chain(d: Draft) -> Found | None:
    for path in d.classes.source.mentions("auto_choose_speculative_params", "srt/server_args.py", "srt/arg_groups", _WORKERS):
        for name in ("auto_choose_speculative_params", "_auto_choose_speculative_params"):
            code = d.function(path, name)
            chains = re.findall(r"return \((\d+), (\d+), (\d+)\)", code.text)
            if chains:
                return [int(n) for n in chains[-1]], "read", code.where
    return None


def _metrics(d: Draft) -> Code | None:
    for path in d.classes.source.mentions("accept len", "srt/managers", "srt/observability"):
        tree = d.classes.source.tree(path)
        for f in ast.walk(tree) if tree is not None else ():
            if isinstance(f, ast.FunctionDef) and "accept len: " in _strings(f):
                return Code(ast.unparse(f), f"{path}:{f.lineno}", f)
    return None


@reader(read_sglang, "accept_rate")
def _accept_rate(d: Draft) -> Found | None:
    code = _metrics(d)
    if code is None:
        return None
    if "accept rate" not in code.text:
        return "none", "read", code.where
    if re.search(r"speculative_num_draft_tokens - 1", code.text):
        return "drafts", "read", code.where
    if re.search(r"total_draft_tokens = [\w.]+ \* num_draft_tokens", code.text):
        return "with-bonus", "read", code.where
    return ("with-bonus-steps", "read", code.where) if re.search(r"speculative_num_steps or 0\) \+ 1", code.text) else None
