"""The draft class's sizes, flags and forward pass, in an engine's source: what ``fc`` is built for, when it runs, which keys are read.

A flag counts as honoured where the draft's own classes read its key, and as ignored where none of their files holds the word. Readers as
in ``draft``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from eagle3diag.engines.scan.classes import calls, dotted
from eagle3diag.engines.scan.draft import Code, Draft, Found, Reader, reader

__all__ = ["config_reads", "read_forward"]

read_forward: dict[str, Reader] = {}
_IDS = "eagle_aux_hidden_state_layer_ids"


def config_reads(node: ast.AST | None) -> Iterator[tuple[int, str, str]]:
    """``(line, key, place)`` of every config key a function reads, in order; place is ``nested`` (``eagle_config``) or ``top``."""
    found: list[tuple[int, int, str, str]] = []
    for n in ast.walk(node) if node is not None else ():
        owner: ast.AST | None = None
        key: Any = None
        if isinstance(n, ast.Call) and dotted(n.func) in ("getattr", "hasattr") and len(n.args) >= 2:
            owner, key = n.args[0], n.args[1]
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "get" and n.args:
            owner, key = n.func.value, n.args[0]
        elif isinstance(n, ast.Subscript):
            owner, key = n.value, n.slice
        elif isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.In | ast.NotIn):
            owner, key = n.comparators[0], n.left
        elif isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load):
            owner, key = n.value, n.attr
        name = dotted(owner) if owner is not None else ""
        word = key.value if isinstance(key, ast.Constant) else key
        if isinstance(word, str) and name.rpartition(".")[2].endswith("config"):
            place = "nested" if name.rpartition(".")[2] == "eagle_config" else "top"
            found.append((n.lineno, n.col_offset, word, place))  # type: ignore[attr-defined]
    for line, _, word, place in sorted(found):
        yield line, word, place


def _assigned(code: Code, target: str) -> ast.expr | None:
    """The last value assigned to ``self.x`` in a function, conditional branches included."""
    value = None
    for n in ast.walk(code.node) if code.node is not None else ():
        if isinstance(n, ast.Assign | ast.AnnAssign) and n.value is not None:
            to = n.targets[0] if isinstance(n, ast.Assign) else n.target
            value = n.value if dotted(to) == target else value
    return value


def _fc(d: Draft) -> ast.Call | None:
    value = _assigned(d.init, "self.fc")
    return value if isinstance(value, ast.Call) else None


# ---------------------------------------------------------------- sizes


@reader(read_forward, "draft_layers")
def _draft_layers(d: Draft) -> Found | None:
    for code in (d.lm_init, d.init):
        if re.search(r"num_hidden_layers != 1:\s+raise", code.text):
            return "one", "read", code.where
    layers = _assigned(d.init, "self.layers")
    text = ast.unparse(layers) if layers is not None else ""
    if re.search(r"in range\([\w.]*num_hidden_layers", text) or "make_layers" in text:
        return "any", "read", d.init.where
    return ("one-built", "read", d.init.where) if text and " for " not in text else None


@reader(read_forward, "n_aux")
def _n_aux(d: Draft) -> Found | None:
    if d.init.node is None or d.init.owner is None:
        return None
    nodes: list[ast.AST] = [d.init.node]
    for call in calls(d.init.node):  # a helper of the same file that is given the config
        if isinstance(call.func, ast.Name) and any("config" in dotted(a) for a in call.args) and "aux" in call.func.id:
            helper = d.function(d.init.owner.path, call.func.id)
            if helper.node is not None:
                nodes.append(helper.node)
    names = {("num_aux_layers", "top"): "num_aux_layers", ("num_aux_hidden_states", "top"): "num_aux_hidden_states"}
    names |= {(_IDS, "nested"): "nested-ids", (_IDS, "top"): "top-ids"}
    places = list(dict.fromkeys(names[k, p] for n in nodes for _, k, p in config_reads(n) if (k, p) in names))
    text = "\n".join(ast.unparse(n) for n in nodes)
    fixed = re.search(r"hidden_size\w* \* (\d+)\b", text)
    if fixed and not places:
        return [fixed.group(1)], "read", d.init.where
    default = re.search(r"else (\d+)\b|return (\d+)\b", text)
    return ([*places, default.group(1) or default.group(2)], "read", d.init.where) if places and default else None


@reader(read_forward, "draft_vocab_absent")
def _draft_vocab_absent(d: Draft) -> Found | None:
    if not d.lm_init:
        return None
    if "'draft_vocab_size', None)" not in d.lm_init.text:
        return "refuse", "read", d.lm_init.where
    return "target-head" if "load_lm_head_from_target = True" in d.lm_init.text else "vocab_size", "read", d.lm_init.where


@reader(read_forward, "draft_vocab_null")
def _draft_vocab_null(d: Draft) -> Found | None:
    if not d.lm_init:
        return None
    if re.search(r"draft_vocab_size(?:', None\))? is None:", d.lm_init.text) is None:
        return "refuse", "read", d.lm_init.where
    return "target-head" if "load_lm_head_from_target = True" in d.lm_init.text else "vocab_size", "read", d.lm_init.where


@reader(read_forward, "target_hidden_null")
def _target_hidden_null(d: Draft) -> Found | None:
    if "target_hidden_size" not in d.init.text:
        return None
    tolerant = re.search(r"'target_hidden_size', None\) or ", d.init.text)
    return "accepted" if tolerant else "refuse", "read", d.init.where


# ---------------------------------------------------------------- fc


@reader(read_forward, "fc_start")
def _fc_start(d: Draft) -> Found | None:
    call = _fc(d)
    if call is None:
        return None
    return "random" if dotted(call.func) in ("nn.Linear", "torch.nn.Linear") else "uninitialised", "read", d.init.where


@reader(read_forward, "fc_bias")
def _fc_bias(d: Draft) -> Found | None:
    call = _fc(d)
    if call is None:
        return None
    bias = next((w.value for w in call.keywords if w.arg == "bias"), None)
    if bias is None:
        return ("always", "read", d.init.where) if dotted(call.func).endswith("nn.Linear") else None
    if isinstance(bias, ast.Constant):
        return "always" if bias.value else "never", "read", d.init.where
    return ("config", "read", d.init.where) if "'bias'" in ast.unparse(bias) else None


def _fc_call(d: Draft) -> tuple[Code, ast.Call, list[ast.AST]] | None:
    """Where ``fc`` runs, and what stands around it: the model's forward, or the method that combines the states."""
    for code, name in (
        (d.code(d.model, "forward"), "self.fc"),
        (d.code(d.lm, "combine_hidden_states"), "self.model.fc"),
        (d.code(d.lm, "forward"), "self.model.fc"),
    ):
        if code.node is None:
            continue
        parents = {c: n for n in ast.walk(code.node) for c in ast.iter_child_nodes(n)}
        for call in calls(code.node):
            if dotted(call.func) == name:
                around: list[ast.AST] = []
                at: ast.AST = call
                while at in parents:
                    at = parents[at]
                    around.append(at)
                return code, call, around
    return None


@reader(read_forward, "fc_condition")
def _fc_condition(d: Draft) -> Found | None:
    found = _fc_call(d)
    if found is None:
        return None
    code, _, around = found
    for node in around:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            if test.count("shape") >= 2 and "!=" in test:
                return "width-differs", "read", code.where
    return "always", "read", code.where


# ---------------------------------------------------------------- flags


def _key(d: Draft, key: str) -> list[tuple[str, str]]:
    """``[(place, where)]`` of the reads of a key in the draft's own classes."""
    found = []
    for code in (d.layer_init, d.init, d.lm_init):
        found += [(place, code.where) for _, word, place in config_reads(code.node) if word == key]
    return found


@reader(read_forward, "norm_before_residual")
def _norm_before_residual(d: Draft) -> Found | None:
    hits = _key(d, "norm_before_residual")
    if hits:
        return "config", "read", hits[0][1]
    return None if d.mentions("norm_before_residual") else ("ignored", "read", d.lm.where)


@reader(read_forward, "norm_before_fc")
def _norm_before_fc(d: Draft) -> Found | None:
    hits = _key(d, "norm_before_fc")
    places = [p for p, _ in hits]
    if not hits:
        return None if d.mentions("input_norm") and d.mentions("norm_before_fc") else ([], "read", d.lm.where)
    return [p for p in ("nested", "top") if p in places], "read", hits[0][1]


def _norms_applied(d: Draft) -> bool:
    for code in (d.code(d.model, "forward"), d.code(d.lm, "combine_hidden_states"), d.code(d.lm, "forward")):
        if re.search(r"\.fc_norm\b", code.text):
            return True
    return False


@reader(read_forward, "fc_norm")
def _fc_norm(d: Draft) -> Found | None:
    if "self.fc_norm" in d.init.text:
        return "config" if _norms_applied(d) else "loaded-not-applied", "read", d.init.where
    return None if d.mentions("fc_norm") else ("ignored", "read", d.lm.where)


@reader(read_forward, "fc_norm_keys")
def _fc_norm_keys(d: Draft) -> Found | None:
    keys = list(dict.fromkeys(k for _, k, _ in config_reads(d.init.node) if k in ("fc_norm", "use_aux_norm")))
    return (keys, "read", d.init.where) if keys else None


@reader(read_forward, "norm_output")
def _norm_output(d: Draft) -> Found | None:
    hits = _key(d, "norm_output")
    if hits:
        return "config", "read", hits[0][1]
    return None if d.mentions("norm_output") else ("ignored", "read", d.lm.where)


@reader(read_forward, "tie")
def _tie(d: Draft) -> Found | None:
    if re.search(r"tie_word_embeddings:\s+self\.lm_head = self\.model\.embed_tokens", d.lm_init.text):
        return "embedding", "read", d.lm_init.where
    return None if "tie_word_embeddings" in d.lm_init.text else ("ignored", "read", d.lm_init.where)


@reader(read_forward, "sliding_window")
def _sliding_window(d: Draft) -> Found | None:
    if "target_layer_count" in d.lm_init.text or "layer_types" in d.layer_init.text:
        return "config", "read", d.lm_init.where
    return None if "layer_types" in d.init.text else ("ignored", "inferred", d.lm_init.where)


# ---------------------------------------------------------------- layer


@reader(read_forward, "qkv_bias")
def _qkv_bias(d: Draft) -> Found | None:
    value = _assigned(d.layer_init, "self.self_attn.qkv_proj")
    if isinstance(value, ast.Call):
        bias = next((w.value for w in value.keywords if w.arg == "bias"), None)
        if isinstance(bias, ast.Constant):
            return "config" if bias.value else "never", "read", d.layer_init.where
        text = ast.unparse(bias) if bias is not None else ""
        if isinstance(bias, ast.Name):
            text = next(
                (ast.unparse(n.value) for n in ast.walk(d.layer_init.node or ast.Module([], []))
                 if isinstance(n, ast.Assign) and dotted(n.targets[0]) == bias.id), ""
            )  # fmt: skip
        return ("config", "read", d.layer_init.where) if "attention_bias" in text else None
    return ("never", "read", d.layer_init.where) if d.kind == "mla" and d.layer is not None else None


@reader(read_forward, "qk_norm")
def _qk_norm(d: Draft) -> Found | None:
    attention = d.classes.attribute(d.layer, "self_attn") if d.layer is not None else None
    if attention is None:
        return None
    if d.kind == "mla":
        return "never", "read", attention.where
    return "always" if any(True for _ in d.classes.assigns(attention, "q_norm")) else "never", "read", attention.where


@reader(read_forward, "o_bias")
def _o_bias(d: Draft) -> Found | None:
    if d.kind != "llama" or d.layer is None:
        return None
    code = d.code(d.layer, "__init__", d.layer_init.owner)
    match = re.search(r"attention_bias = (getattr\(config, '\w+', False\)(?: or getattr\(config, '\w+', False\))*)", code.text)
    return (re.findall(r"'(\w+)'", match.group(1)), "read", code.where) if match else None


@reader(read_forward, "mlp_bias")
def _mlp_bias(d: Draft) -> Found | None:
    if d.kind != "llama" or d.layer is None:
        return None
    own = _assigned(d.layer_init, "self.mlp")
    text = ast.unparse(own) if own is not None else d.code(d.layer, "__init__", d.layer_init.owner).text
    return "config" if "mlp_bias" in text else "ignored", "read", d.layer_init.where


@reader(read_forward, "deep_layer_norm")
def _deep_layer_norm(d: Draft) -> Found | None:
    code = d.code(d.layer, "forward")
    pairs = re.findall(r"hidden_states, residual = self\.(\w+)\(hidden_states, residual\)", code.text)
    deeper = [p for p in pairs if p != "post_attention_layernorm"]
    return (deeper[0], "read", code.where) if deeper else None


@reader(read_forward, "rope_default_theta")
def _rope_default_theta(d: Draft) -> Found | None:
    if d.kind != "llama" or d.engine != "sglang":
        return None
    code = d.code(d.layer, "__init__", d.layer_init.owner)
    match = re.search(r"'rope_theta', (\d+)\)", code.text)
    return (float(match.group(1)), "read", code.where) if match else None


@reader(read_forward, "mrope")
def _mrope(d: Draft) -> Found | None:
    if d.engine == "sglang":
        if d.kind != "llama":
            return None
        return "config" if "mrope_section" in d.init.text else "ignored", "read", d.init.where
    return None


@reader(read_forward, "eagle_path")
def _eagle_path(d: Draft) -> Found | None:
    if d.engine == "sglang":
        cut = re.search(r"\.vocab_size = .*draft_vocab_size", d.lm_init.text)
        return "bypass-cut" if cut else "bypass", "inferred", d.lm_init.where
    code = d.file("transformers_utils/configs/eagle.py")
    return ("bypass-if-eagle-arch", "read", code.where) if "startswith('Eagle')" in code.text else None


@reader(read_forward, "id_order")
def _id_order(d: Draft) -> Found | None:
    return "ascending", "inferred", "states are kept in the order of the target's loop"
