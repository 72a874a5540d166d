"""Launch lines of both engines: parse, judge by themselves, and say which algorithm the engine would run.

``parse_launch`` finds the server command in whatever was pasted (``launch_words``), splits its options (``launch_options``) and reads
them as the engine does (``launch_sglang``, ``launch_vllm``). What is wrong with the line alone is kept as ``Launch.problems``; what is
wrong together with a draft or a target is a rule's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3diag.engines.model import Contract, Launch

__all__ = ["effective_method", "parse_launch"]


def parse_launch(text: str) -> Launch:
    """The server command in ``text``: a shell line or script, a Dockerfile, compose or Kubernetes YAML, a JSON list, or options alone.

    Returns:
        The parsed line; ``problems`` holds what is wrong with it by itself.

    Raises:
        UsageError: no server command in the text, or the text is empty or absurdly long.
    """
    from eagle3diag.engines.launch_words import find_command

    command = find_command(text)
    if command.engine == "sglang":
        from eagle3diag.engines.launch_sglang import read_sglang

        return read_sglang(command, text)
    from eagle3diag.engines.launch_vllm import read_vllm

    return read_vllm(command, text)


def effective_method(launch: Launch | None, contract: Contract, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The algorithm this engine version runs for a launch line.

    Args:
        launch: the parsed line; None where none was given, then EAGLE-3 is assumed.
        contract: the engine version (behaviour ``method_rule``: pairs of text in the draft path and method, tried in order).
        config: the draft's config as a tool would load it.

    Returns:
        ``(method, why)``: ``eagle3``, ``eagle`` (EAGLE-1; NEXTN is the same), ``draft_model`` or another name the line gives; None where
        the line switches no speculation on. ``why`` says where that comes from.
    """
    if launch is None:
        return "eagle3", "no launch line: EAGLE-3 assumed"
    from eagle3diag.engines.launch_options import not_told, unread_file

    method, file = launch.method, unread_file(launch.options)
    if not_told(method):
        return "eagle3", f"method {method} is a variable that is not told: EAGLE-3 assumed"
    if method is None and launch.draft is None and file is not None:
        return "eagle3", f"further options stand in {file}, which is not read: EAGLE-3 assumed"
    if launch.engine == "sglang":
        if method is None:
            return None, "no --speculative-algorithm"
        name = {"NEXTN": "eagle", "STANDALONE": "draft_model"}.get(method.upper(), method.lower())
        return name, f"--speculative-algorithm {method}" + (" (the same as EAGLE)" if method.upper() == "NEXTN" else "")
    speculative = launch.options.get("speculative-config")
    named = any(n in launch.options for n in ("spec-method", "spec-model", "spec-tokens", "speculative-model", "num-speculative-tokens"))
    if method is not None:
        return method.lower(), f"method {method} on the launch line"
    if speculative is not None and not isinstance(speculative, Mapping):
        return "eagle3", "the speculative configuration cannot be read: EAGLE-3 assumed"
    if speculative is None and not named:
        kind = config.get("speculators_model_type")
        if config.get("speculators_config") and isinstance(kind, str):
            # the speculators repository itself is the model: the method is locked to its type
            return ("eagle3" if kind == "peagle" else kind), f"speculators_model_type {kind} of the served repository"
        if any(not_told(v) for v in launch.options.values()):
            return "eagle3", "the line holds a variable that is not told: EAGLE-3 assumed"
        return None, "no --speculative-config"
    path = launch.draft
    if path is None or not_told(path):
        return "eagle3", "the draft path is not told: EAGLE-3 assumed"
    for piece, found in contract["method_rule"]:
        if piece in path.lower():
            return found, f"no method given, and the path {path} contains {piece!r}"
    pieces = " or ".join(repr(piece) for piece, _ in contract["method_rule"])
    return "draft_model", f"no method given, and the path {path} does not contain {pieces}"
