"""vLLM's server command: options and the speculative JSON -> ``Launch``, and what is wrong with the line by itself.

The speculative configuration comes as JSON (``--speculative-config``, ``-sc``), as dotted options (``-sc.method eagle3``), as the short
options ``--spec-method/--spec-model/--spec-tokens`` or, long ago, as ``--speculative-model --num-speculative-tokens``. JSON that the
engine would not read (a Python dict, quotes eaten by the shell) is understood as far as possible and reported.
Facts of the engines, section 7; option names as in vLLM's own argument parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from eagle3diag.engines.launch_options import Options, integer, not_told, split_options, unread_file
from eagle3diag.engines.launch_words import Command
from eagle3diag.engines.model import Launch, LaunchProblem
from eagle3diag.errors import escaped

__all__ = ["read_vllm"]

KNOWN = ("speculative-config", "spec-method", "spec-model", "spec-tokens", "speculative-model", "num-speculative-tokens")
_METHODS = (
    "eagle3",
    "eagle",
    "draft_model",
    "ngram",
    "ngram_gpu",
    "medusa",
    "mlp_speculator",
    "suffix",
    "mtp",
    "dflash",
    "dspark",
    "extract_hidden_states",
    "custom_class",
    "peagle",
)
_WITHOUT_DRAFT = ("ngram", "ngram_gpu", "suffix", "extract_hidden_states", "mtp", "custom_class")
_SHORT = {
    "spec-method": "method",
    "spec-model": "model",
    "spec-tokens": "num_speculative_tokens",
    "speculative-model": "model",
    "num-speculative-tokens": "num_speculative_tokens",
}


def read_vllm(command: Command, text: str) -> Launch:
    """A vLLM command as a ``Launch``; never raises."""
    options, positional, given = split_options(command.words, KNOWN)
    problems: list[LaunchProblem] = []
    speculative = _speculative(options, problems)
    tokens, readable = integer(speculative.get("num_speculative_tokens"))
    if not readable:
        shown = escaped(speculative["num_speculative_tokens"])
        problems.append(LaunchProblem("chain", f"num_speculative_tokens is no whole number: {shown}", {}, "error", "give a whole number"))
    runner = {"1": "v2", "true": "v2", "0": "v1", "false": "v1"}.get(command.env.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower())
    launch = Launch(
        engine="vllm",
        text=text,
        method=_text(speculative.get("method")),
        target=_text(options.get("model")) or (positional[0] if positional else None),
        draft=_text(speculative.get("model")),
        draft_tokens=tokens,
        context=_length(options.get("max-model-len")),
        quantization=_text(options.get("quantization") or options.get("-q")),
        draft_quantization=_text(speculative.get("quantization")),
        cuda_graph=not ("enforce-eager" in options and str(options["enforce-eager"]).lower() not in ("false", "0")),
        runner=runner,
        version=command.version,
        env=command.env,
        options=options | ({"speculative-config": speculative} if speculative else {}),
    )
    if any(n in _SHORT or n.split(".")[0] in ("speculative-config", "-sc") for n in given):
        problems += _judged(launch, speculative, readable)
    problems += _foreign(options)
    file = unread_file(options)
    if file is not None:
        shown = escaped(file)
        problems.append(LaunchProblem("other", f"options in {shown} are not read here", {"config": shown}, "info", "give them on the line"))
    return replace(launch, problems=tuple(problems))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _length(value: Any) -> int | None:
    """``--max-model-len``: ``8192``, ``16k`` (x 1000) or ``16K`` (x 1024)."""
    m = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([kKmM]?)", str(value).strip())
    factor = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}
    return int(float(m[1]) * factor[m[2]]) if m else None


# ---- the speculative configuration ------------------------------------------------------------------------------------------------


def _speculative(options: Options, problems: list[LaunchProblem]) -> dict[str, Any]:
    """All spellings merged: the JSON, dotted options over it, the short options last."""
    out: dict[str, Any] = {}
    for name in [n for n in ("speculative-config", "-sc") if n in options]:
        raw = options.pop(name)
        out |= _json(raw, problems)
        options["speculative-config"] = raw  # stays as written where it could not be read
    for dotted in [n for n in options if re.match(r"(speculative-config|-sc)\.", n)]:
        key = dotted.split(".", 1)[1].rstrip("+")
        out[key.replace("-", "_")] = options.pop(dotted)
    for short, key in _SHORT.items():
        if short not in options:
            continue
        if key in out and short.startswith("spec-"):
            problems.append(
                LaunchProblem(
                    "other",
                    f"--{short} and the same key of --speculative-config exclude each other: vLLM refuses to start",
                    {short: escaped(options[short]), key: escaped(out[key])},
                    "error",
                    f"keep one of the two for {key}",
                )
            )
        out[key] = options[short]
    return {k.replace("-", "_"): v for k, v in out.items()}


def _json(value: Any, problems: list[LaunchProblem]) -> Mapping[str, Any]:
    text = " ".join(value) if isinstance(value, list) else value
    if not isinstance(text, str):
        problems.append(_unreadable("--speculative-config has no value", "", "give the JSON in single quotes"))
        return {}
    try:
        read = json.loads(text)
        if isinstance(read, dict):
            return read
    except (ValueError, RecursionError):
        pass
    if "{" not in text or text.startswith(("${", "$(", "{{")):
        if not not_told(text):
            problems.append(_unreadable("--speculative-config is no JSON object", text, "give the JSON in single quotes"))
        return {}
    try:
        unescaped = json.loads(text.replace('\\"', '"'))  # quoted once more by whatever the line was copied from
        if isinstance(unescaped, dict):
            return unescaped
    except (ValueError, RecursionError):
        pass
    python = _literal(text)
    if python:
        why = "--speculative-config is no valid JSON (a comma before the closing brace): vLLM refuses to start"
        if re.search(r"'|\b(True|False|None)\b", text):
            why = "--speculative-config is a Python dict, not JSON (single quotes, True, None): vLLM's json.loads refuses it"
        problems.append(_unreadable(why, text, f"write --speculative-config '{json.dumps(python)}'"))
        return python
    salvaged = _salvaged(text)
    why = "--speculative-config is no valid JSON: vLLM refuses to start"
    remedy = "put the JSON in single quotes, with double quotes inside"
    if salvaged and '"' not in text and "'" not in text:
        why = "--speculative-config reached vLLM without its quotes (the shell removed them)"
    if salvaged and "$" not in text:
        remedy += f": --speculative-config '{json.dumps(salvaged)}'"
    problems.append(_unreadable(why, text, remedy))
    return salvaged


def _unreadable(why: str, text: str, remedy: str) -> LaunchProblem:
    return LaunchProblem("other", why, {"speculative-config": escaped(text, 160)}, "error", remedy)


def _literal(text: str) -> dict[str, Any]:
    import ast

    if len(text) > 20000:
        return {}
    try:
        read = ast.literal_eval(text)
        json.dumps(read)
    except Exception:  # ValueError, SyntaxError, RecursionError, MemoryError, TypeError: whatever the text provokes, it is no dict
        return {}
    return read if isinstance(read, dict) and all(isinstance(k, str) for k in read) else {}


def _salvaged(text: str) -> dict[str, Any]:
    """``key: value`` pairs of a broken object, one level deep."""
    pairs = re.findall(r"[\"']?([A-Za-z_][\w-]*)[\"']?\s*:\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s,\"'{}\[\]]+))", text)
    out: dict[str, Any] = {}
    for key, double, single, bare in pairs:
        number, readable = integer(bare) if bare else (None, False)
        out[key] = number if readable and number is not None else double or single or bare
    return out


# ---- judged -----------------------------------------------------------------------------------------------------------------------


def _judged(launch: Launch, speculative: Mapping[str, Any], readable: bool) -> Iterator[LaunchProblem]:
    method, tokens = launch.method, launch.draft_tokens
    if method and method not in _METHODS and not method.endswith("_mtp") and not not_told(method):
        near = next((m for m in _METHODS if m.replace("_", "") == re.sub(r"[\s_-]", "", method.lower())), "eagle3")
        yield LaunchProblem(
            "algorithm",
            f"method {escaped(method)!r} is none vLLM knows",
            {"method": escaped(method), "known": list(_METHODS)},
            "error",
            f'write "method": "{near}"',
        )
    if not speculative:
        return
    if not launch.draft and method not in _WITHOUT_DRAFT:
        yield LaunchProblem(
            "other",
            "the speculative configuration names no draft model: vLLM refuses to start",
            {"method": method},
            "error",
            'add "model" with the folder of this draft',
        )
    if tokens is not None and tokens <= 0:
        yield LaunchProblem(
            "chain",
            f"num_speculative_tokens is {tokens}, must be 1 or more",
            {"num_speculative_tokens": tokens},
            "error",
            'write "num_speculative_tokens": 3',
        )
    elif tokens is None and readable and "num_speculative_tokens" not in speculative and not any("per_batch" in k for k in speculative):
        yield LaunchProblem(
            "chain",
            "num_speculative_tokens is missing: vLLM refuses to start",
            {"given": sorted(speculative)},
            "error",
            'add "num_speculative_tokens": 3',
        )
    if "tensor_parallel_size" in speculative:
        yield LaunchProblem(
            "other",
            "tensor_parallel_size is no key of the speculative configuration: vLLM refuses to start",
            {"tensor_parallel_size": escaped(speculative["tensor_parallel_size"])},
            "error",
            "write draft_tensor_parallel_size",
        )
    fakes = [k for k in speculative if k.startswith("synthetic_acceptance")]
    if fakes or speculative.get("rejection_sample_method") == "synthetic":
        yield LaunchProblem(
            "other",
            f"{fakes[0] if fakes else 'rejection_sample_method synthetic'}: every acceptance number of this server is made up",
            {k: escaped(speculative[k]) for k in fakes},
            "warning",
            "remove it to measure this draft",
        )


def _foreign(options: Options) -> Iterator[LaunchProblem]:
    """SGLang's options on a vLLM line."""
    foreign = [n for n in options if re.match(r"speculative-(algorithm|draft-model-path|num-steps|eagle-topk|num-draft-tokens)$", n)]
    if foreign:
        yield LaunchProblem(
            "unknown-flag",
            f"--{foreign[0]} is an option of SGLang, vLLM refuses it",
            {"options": foreign},
            "error",
            'write --speculative-config \'{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}\'',
        )
