"""What an engine's loader does with the names in a draft's file, in its source: renames, prefixes, what is skipped, unknown, missing.

Readers as in ``draft``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from eagle3diag.engines.scan.classes import calls, dotted
from eagle3diag.engines.scan.draft import Code, Draft, Found, Reader, reader

__all__ = ["read_loading"]

read_loading: dict[str, Reader] = {}


@reader(read_loading, "architectures")
def _architectures(d: Draft) -> Found | None:
    return dict(d.known), "read", d.lm.where


@reader(read_loading, "architecture_rename")
def _architecture_rename(d: Draft) -> Found | None:
    if d.engine == "sglang":
        return "as-is", "inferred", d.lm.where
    code = d.file("transformers_utils/configs/eagle.py")
    branch = re.search(r"""method == 'eagle3':(.*?)(?:elif|else:)\s*(?:method|\n)""", code.text, re.S) or re.search(
        r"method == 'eagle3':(.*)", code.text, re.S
    )
    text = branch.group(1)[:900] if branch else ""
    if "Eagle3" in text:
        return "keep" if "endswith('Eagle3')" in text else "prefix", "read", code.where
    return ("ignored", "read", code.where) if code and "Eagle3" not in code.text else None


def _renames(d: Draft) -> list[list[str]] | None:
    """Renames applied to every name, in order; None where the loop renames in a way that is not understood."""
    rules: list[list[str]] = []
    for code in (d.load, d.inner_load) if d.inner_load is not d.load else (d.load,):
        if code.node is None:
            continue
        for node in ast.walk(code.node):
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and dotted(node.iter.func).endswith("_map.items"):
                rules += [["substring", k, v] for k, v in _dict_of(code.node, dotted(node.iter.func)[: -len(".items")])]
        for call in calls(code.node):
            texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if dotted(call.func) == "re.sub" and len(texts) == 2:
                pattern, new = texts
                anchored = pattern.startswith("^")
                plain = re.sub(r"\\(.)", r"\1", pattern.lstrip("^"))
                rules.append(["prefix" if anchored else "substring", plain, new])
            elif isinstance(call.func, ast.Attribute) and call.func.attr == "replace" and len(texts) == 2 and "layer" in "".join(texts):
                rules.append(["substring", texts[0], texts[1]])
        for name, how in (("orig_to_new_substr", "substring"), ("orig_to_new_prefix", "prefix")):
            for call in _mappers(d, code):
                rules += [[how, k, v] for k, v in _keyword_dict(call, name)]
    unique: list[list[str]] = []
    for rule in rules:
        if rule not in unique:
            unique.append(rule)
    return unique


def _mappers(d: Draft, code: Code) -> Iterator[ast.Call]:
    """``WeightsMapper(...)`` calls at the class that loads: as an attribute, or inside the method."""
    if code.owner is not None:
        for node in code.owner.node.body:
            if (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and isinstance(node.value, ast.Call)
                and dotted(node.value.func) == "WeightsMapper"
            ):
                yield node.value


def _keyword_dict(call: ast.Call, name: str) -> list[tuple[str, str]]:
    for word in call.keywords:
        if word.arg == name and isinstance(word.value, ast.Dict):
            return _pairs(word.value)
    return []


def _pairs(node: ast.Dict) -> list[tuple[str, str]]:
    return [
        (k.value, v.value)
        for k, v in zip(node.keys, node.values, strict=True)
        if isinstance(k, ast.Constant) and isinstance(v, ast.Constant) and isinstance(k.value, str) and isinstance(v.value, str)
    ]


def _dict_of(node: ast.AST, name: str) -> list[tuple[str, str]]:
    for n in ast.walk(node):
        if isinstance(n, ast.Assign) and dotted(n.targets[0]) == name and isinstance(n.value, ast.Dict):
            return _pairs(n.value)
    return []


@reader(read_loading, "rename")
def _rename(d: Draft) -> Found | None:
    rules = _renames(d)
    return None if rules is None or not d.load else (rules, "read", d.load.where)


@reader(read_loading, "layer_parameter")
def _layer_parameter(d: Draft) -> Found | None:
    if d.model is None:
        return None
    if any(True for _ in d.classes.assigns(d.model, "midlayer")):
        return "midlayer", "read", d.model.where
    return ("layers.N", "read", d.model.where) if any(True for _ in d.classes.assigns(d.model, "layers")) else None


@reader(read_loading, "layer_names")
def _layer_names(d: Draft) -> Found | None:
    parameter, rules = _layer_parameter(d), _renames(d)
    if parameter is None or rules is None or not d.load:
        return None

    def reaches(name: str) -> bool:
        for how, old, new in rules:
            name = name.replace(old, new) if how == "substring" else new + name[len(old) :] if name.startswith(old) else name
        return name.startswith("midlayer." if parameter[0] == "midlayer" else "layers.0.")

    layered = "layers.N." if parameter[0] == "layers.N" else "layers.0."
    names = [n for n, probe in (("midlayer.", "midlayer.x"), (layered, "layers.0.x")) if reaches(probe)]
    return names, "read", d.load.where


@reader(read_loading, "name_prefix")
def _name_prefix(d: Draft) -> Found | None:
    text = d.load.text
    if re.search(r"f'model\.\{\w+\}' if \w+ not in params_dict else|if \w+ in params_dict else f'model\.", text):
        return "name-then-model", "read", d.load.where
    if re.search(r"if not \w+\.startswith\('lm_head", text) and "f'model." in text:
        return "model-unless-lm_head-prefix", "read", d.load.where
    if "'lm_head' not in " in text and re.search(r"'model\.' \+|f'model\.", text):
        return "always-model" if "super().load_weights" in text else "model-unless-lm_head", "read", d.load.where
    return None


@reader(read_loading, "d2t_names")
def _d2t_names(d: Draft) -> Found | None:
    text = d.load.text
    if re.search(r"\.replace\('d2t', '\w+'\)", text):
        return "replace", "read", d.load.where
    if "endswith('.d2t')" in text:
        return "suffix", "read", d.load.where
    return ("substring", "read", d.load.where) if "'d2t' in " in text else None


@reader(read_loading, "skip")
def _skip(d: Draft) -> Found | None:
    text = d.load.text
    if not text:
        return None
    rules: list[list[str]] = []
    if "endswith('.t2d')" in text:
        rules.append(["suffix", "t2d"])
    elif "'t2d' in " in text or "'t2d' not in " in text:
        rules.append(["substring", "t2d"])
    if d.engine == "vllm":
        if "rotary_emb.inv_freq" in d.file("model_executor/models/utils.py").text or "rotary_emb.inv_freq" in text:
            rules.append(["substring", "rotary_emb.inv_freq"])
        if "'mask_hidden'" in text:
            rules.append(["substring", "mask_hidden"])
    return rules, "read", d.load.where


@reader(read_loading, "skip_without_flag")
def _skip_without_flag(d: Draft) -> Found | None:
    if not d.load:
        return None
    pairs = re.findall(
        r"if not self\.model\.(\w+):\s+(?:orig_to_new_substr\['([\w.]+)'\] = None|skip_substrs\.append\('([\w.]+)'\))", d.load.text
    )
    return [[a or b, flag] for flag, a, b in pairs], "read", d.load.where


def _lookup(d: Draft, stacked: bool) -> str | None:
    """What happens to a name no parameter has: in the branch for stacked projections, or in the one for all others."""
    code = d.inner_load
    if code.node is None:
        return None
    loop = next(
        (n for n in ast.walk(code.node) if isinstance(n, ast.For) and "stacked_params_mapping" in ast.unparse(n.iter)), None
    )  # the inner loop over q, k, v, gate, up
    if loop is None:
        return "auto" if "AutoWeightsLoader" in code.text else None
    outer = next((n for n in ast.walk(code.node) if isinstance(n, ast.For) and n is not loop and any(m is loop for m in ast.walk(n))), None)
    body = list(loop.body) if stacked else list(loop.orelse) or _after(outer, loop)
    nodes = [n for s in body for n in ast.walk(s)]
    # a guard for biases alone lets all other names through
    tests = [(n, ast.unparse(n.test)) for n in nodes if isinstance(n, ast.If)]
    guards = [n for n, test in tests if "params_dict" in test and "endswith" not in test]
    if any("logger.warning" in ast.unparse(n) for n in guards):
        return "warn"
    leaves = any(isinstance(s, ast.Continue) for n in guards for s in n.body)
    if stacked and leaves and not loop.orelse:  # on to the next pair, and behind the loop to the look-up of all others
        return "falls-through"
    if guards:
        return "silent"
    return "KeyError" if any(isinstance(n, ast.Subscript) and dotted(n.value) == "params_dict" for n in nodes) else None


def _after(outer: ast.For | None, loop: ast.For) -> list[ast.stmt]:
    if outer is None:
        return []
    at = next((i for i, s in enumerate(outer.body) if s is loop), None)
    return outer.body[at + 1 :] if at is not None else []


def _unknown_how(d: Draft, stacked: bool) -> Found | None:
    how = _lookup(d, stacked)
    if how == "falls-through":
        how = _lookup(d, False)
    if how == "auto":
        utils = d.file("model_executor/models/utils.py")
        how = "ValueError" if "There is no module or parameter named" in utils.text else None
    return None if how is None else (how, "read", d.inner_load.where)


@reader(read_loading, "unknown_stacked")
def _unknown_stacked(d: Draft) -> Found | None:
    return _unknown_how(d, True)


@reader(read_loading, "unknown")
def _unknown(d: Draft) -> Found | None:
    return _unknown_how(d, False)


@reader(read_loading, "unknown_bias")
def _unknown_bias(d: Draft) -> Found | None:
    plain = _unknown_how(d, False)
    if plain is None:
        return None
    if plain[0] in ("silent", "warn") and d.engine == "sglang":
        return "drop", "read", plain[2]
    if "endswith('.bias')" in d.inner_load.text:
        return "drop", "read", d.inner_load.where
    utils = d.file("model_executor/models/utils.py")
    if plain[0] == "ValueError" and re.search(r"ignore_unexpected_suffixes.*'\.bias'", utils.text):
        return "drop", "read", utils.where
    return "as-unknown", "read", plain[2]


@reader(read_loading, "missing")
def _missing(d: Draft) -> Found | None:
    if d.load.node is None:
        return None
    returned = [n for n in ast.walk(d.load.node) if isinstance(n, ast.Return) and n.value is not None]
    return "refuse" if returned and d.engine == "vllm" else "silent", "read", d.load.where


@reader(read_loading, "mismatch")
def _mismatch(d: Draft) -> Found | None:
    path = "srt/model_loader/weight_utils.py" if d.engine == "sglang" else "model_executor/model_loader/weight_utils.py"
    code = d.function(path, "default_weight_loader")
    return ("refuse", "read", code.where) if "assert param.size() == loaded_weight.size()" in code.text else None


@reader(read_loading, "linear_start")
def _linear_start(d: Draft) -> Found | None:
    path = "srt/layers/linear.py" if d.engine == "sglang" else "model_executor/layers/linear.py"
    return ("uninitialised", "read", path) if "torch.empty" in d.file(path).text else None


@reader(read_loading, "norm_start")
def _norm_start(d: Draft) -> Found | None:
    path = "srt/layers/layernorm.py" if d.engine == "sglang" else "model_executor/layers/layernorm.py"
    return ("ones", "read", path) if "torch.ones" in d.file(path).text else None


@reader(read_loading, "d2t_missing")
def _d2t_missing(d: Draft) -> Found | None:
    if d.engine == "sglang":
        return "identity" if "self.hot_token_id = None" in d.lm_init.text else "refuse", "read", d.lm_init.where
    return ("identity", "read", d.lm_init.where) if re.search(r"draft_id_to_target_id = .*torch\.zeros", d.lm_init.text, re.S) else None


@reader(read_loading, "d2t_applied")
def _d2t_applied(d: Draft) -> Found | None:
    if re.search(r"if 'd2t' not in \w*loaded\w*:\s+self\.draft_id_to_target_id = None", d.load.text):
        return False, "read", d.load.where
    return (True, "read", d.load.where) if d.load else None


@reader(read_loading, "d2t_full_vocab")
def _d2t_full_vocab(d: Draft) -> Found | None:
    unset = re.search(r"else:\s+self\.draft_id_to_target_id = None", d.lm_init.text)
    return "refuse" if unset else "accepted", "read", d.lm_init.where


@reader(read_loading, "d2t_length")
def _d2t_length(d: Draft) -> Found | None:
    if re.search(r"self\.hot_token_id = loaded_weight \+ torch\.arange", d.load.text):
        return "unchecked", "read", d.load.where
    return ("refuse", "read", d.lm_init.where) if "nn.Parameter(torch.zeros" in d.lm_init.text else None


@reader(read_loading, "d2t_float")
def _d2t_float(d: Draft) -> Found | None:
    if re.search(r"self\.hot_token_id = loaded_weight \+ torch\.arange", d.load.text):
        return "fails-on-use", "read", d.load.where
    return ("cast", "read", d.lm_init.where) if re.search(r"torch\.zeros\(.*dtype=torch\.(?:long|int)", d.lm_init.text, re.S) else None


@reader(read_loading, "d2t_out_of_range")
def _d2t_out_of_range(d: Draft) -> Found | None:
    code = d.code(d.lm, "compute_logits")
    if d.engine == "vllm":
        return ("fails-on-use", "inferred", code.where) if "[:, targets]" in code.text else None
    return ("silent", "inferred", d.load.where) if d.load else None
