"""SGLang's server command: options -> ``Launch``, and what is wrong with the line by itself.

Facts of the engines, section 7. The draft tree: the first step yields ``topk`` candidates, every further step ``topk * topk``; the
verified tokens are the root and the best of those, so ``--speculative-num-draft-tokens`` cannot exceed one more than their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3diag.engines.launch_options import Options, integer, not_told, split_options, unread_file
from eagle3diag.engines.launch_words import Command
from eagle3diag.engines.model import Launch, LaunchProblem
from eagle3diag.errors import escaped

__all__ = ["read_sglang", "tree_capacity"]

#: options whose names are completed and whose misspellings are told
KNOWN = (
    "speculative-algorithm",
    "speculative-draft-model-path",
    "speculative-draft-model-revision",
    "speculative-draft-model-quantization",
    "speculative-draft-load-format",
    "speculative-draft-window-size",
    "speculative-draft-attention-backend",
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
    "speculative-token-map",
    "speculative-attention-mode",
    "speculative-accept-threshold-single",
    "speculative-accept-threshold-acc",
    "speculative-moe-runner-backend",
)
_NAMES = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "LOOKAHEAD", "DFLASH", "DSPARK", "MTP", "FROZEN_KV_MTP"}
_CHAIN = ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens")


def read_sglang(command: Command, text: str) -> Launch:
    """A SGLang command as a ``Launch``; never raises."""
    options, positional, _ = split_options(command.words, KNOWN)
    for alias, name in (
        ("speculative-draft-model", "speculative-draft-model-path"),
        ("speculative-draft", "speculative-draft-model-path"),
        ("model", "model-path"),
    ):
        if alias in options:
            options.setdefault(name, options.pop(alias))
    problems: list[LaunchProblem] = []
    numbers: list[int | None] = []
    for name in _CHAIN:
        value, readable = integer(options.get(name))
        numbers.append(value)
        if not readable:
            shown = escaped(options[name]) if options[name] is not True else "nothing"
            problems.append(LaunchProblem("chain", f"--{name} is no whole number: {shown}", {name: shown}, "error", "give a whole number"))
    method = _text(options.get("speculative-algorithm"))
    launch = Launch(
        engine="sglang",
        text=text,
        method=method,
        target=_text(options.get("model-path")) or (positional[0] if positional else None),
        draft=_text(options.get("speculative-draft-model-path")),
        steps=numbers[0],
        topk=numbers[1],
        draft_tokens=numbers[2],
        aux_ids=_ids(options),
        context=integer(options.get("context-length"))[0],
        quantization=_text(options.get("quantization")),
        draft_quantization=_text(options.get("speculative-draft-model-quantization")),
        cuda_graph=not _on(options.get("disable-cuda-graph")),
        version=command.version,
        env=command.env,
        options=options,
    )
    problems += _algorithm(launch)
    if not any(p.kind == "chain" for p in problems):
        problems += _chain(launch, [name in options for name in _CHAIN])
    problems += _others(launch)
    return _with(launch, problems)


def _with(launch: Launch, problems: list[LaunchProblem]) -> Launch:
    from dataclasses import replace

    return replace(launch, problems=tuple(problems))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else value[0] if isinstance(value, list) else None


def _on(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() in ("true", "1", "yes"))


def _ids(options: Options) -> tuple[int, ...] | None:
    """Layer ids of the dump mode (0.5.23), in which no draft is loaded."""
    value = options.get("return-aux-hidden-state-layer-ids")
    ids = [integer(v)[0] for v in (value if isinstance(value, list) else [value])]
    return tuple(i for i in ids if i is not None) if value is not None and None not in ids else None


def _algorithm(launch: Launch) -> Iterator[LaunchProblem]:
    method = launch.method
    if unread_file(launch.options) is not None:
        return  # the rest may stand there
    used = [n for n in (*_CHAIN, "speculative-draft-model-path") if n in launch.options]
    if method is None:
        if used:
            yield LaunchProblem(
                "algorithm",
                f"--{used[0]} is given but --speculative-algorithm is not: the target is served alone, without a draft",
                {"given": used},
                "error",
                "add --speculative-algorithm EAGLE3",
            )
        return
    if not_told(method) or method.upper() in _NAMES:
        if method.upper() in ("EAGLE3", "EAGLE", "STANDALONE") and "speculative-draft-model-path" not in launch.options:
            yield LaunchProblem(
                "other",
                f"--speculative-algorithm {method} without --speculative-draft-model-path: SGLang takes the target for the draft",
                {"speculative-algorithm": method},
                "error",
                "add --speculative-draft-model-path with the folder of this draft",
            )
        return
    yield LaunchProblem(
        "algorithm",
        f"--speculative-algorithm {escaped(method)} is no algorithm SGLang knows",
        {"speculative-algorithm": escaped(method), "known": sorted(_NAMES)},
        "error",
        f"write {_closest(method.upper(), _NAMES) or 'EAGLE3'}",
    )


def tree_capacity(steps: int, topk: int) -> int:
    """Most tokens one verification can hold: the root, ``topk`` after the first step, ``topk ** 2`` after each further one."""
    return 1 + topk + (steps - 1) * topk * topk


def _chain(launch: Launch, given: list[bool]) -> Iterator[LaunchProblem]:
    steps, topk, tokens = launch.steps, launch.topk, launch.draft_tokens
    shown = dict(zip(("steps", "topk", "draft_tokens"), (steps, topk, tokens), strict=True))
    bad = [name for name, value in shown.items() if value is not None and value <= 0]
    if bad:
        yield LaunchProblem("chain", f"{bad[0]} is {shown[bad[0]]}, must be 1 or more", shown, "error", "give 1 or more")
        return
    if any(given) and not all(given) and not (given == [True, True, False] and topk == 1) and unread_file(launch.options) is None:
        missing = [f"--{n}" for n, g in zip(_CHAIN, given, strict=True) if not g]
        yield LaunchProblem(
            "chain",
            f"{' and '.join(missing)} not given while the other chain options are: SGLang chooses all three or none",
            shown,
            "error",
            "give --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens, or none of them",
        )
        return
    if steps is None or topk is None or tokens is None:
        return
    if topk == 1 and tokens != steps + 1:
        yield LaunchProblem(
            "chain",
            f"a chain (topk 1) of {steps} steps verifies {steps + 1} tokens, {tokens} asked for: SGLang sets "
            f"--speculative-num-draft-tokens to {steps + 1} with a warning",
            shown | {"expected_draft_tokens": steps + 1},
            "warning",
            f"write --speculative-num-draft-tokens {steps + 1}, or --speculative-num-steps {tokens - 1}"
            if tokens > 1
            else f"write --speculative-num-draft-tokens {steps + 1}",
        )
    elif topk > 1 and tokens > tree_capacity(steps, topk):
        most = tree_capacity(steps, topk)
        yield LaunchProblem(
            "chain",
            f"{steps} steps with topk {topk} make at most {most} tokens to verify, {tokens} asked for",
            shown | {"capacity": most},
            "error",
            f"write --speculative-num-draft-tokens {most} or less",
        )
    elif topk > 1 and tokens < steps + 1:
        yield LaunchProblem(
            "chain",
            f"{tokens} draft tokens cannot hold one branch of {steps} steps: at most {tokens - 1} drafted tokens are accepted, the last "
            f"{steps - tokens + 1} steps are wasted",
            shown,
            "warning",
            f"write --speculative-num-draft-tokens {steps + 1} or more",
        )


def _others(launch: Launch) -> Iterator[LaunchProblem]:
    file = unread_file(launch.options)
    if file is not None:
        yield LaunchProblem(
            "other", f"options in {escaped(file)} are not read here", {"config": escaped(file)}, "info", "give them on the line"
        )
    fake = launch.env.get("SGLANG_SIMULATE_ACC_LEN") or launch.env.get("SIMULATE_ACC_LEN")
    if fake and fake not in ("-1", "0", "0.0", "-1.0"):
        yield LaunchProblem(
            "other",
            f"SGLANG_SIMULATE_ACC_LEN={escaped(fake)}: every acceptance number of this server is made up",
            {"SGLANG_SIMULATE_ACC_LEN": escaped(fake)},
            "warning",
            "unset SGLANG_SIMULATE_ACC_LEN",
        )
    if "speculative-token-map" in launch.options and (launch.method or "").upper() == "EAGLE3":
        yield LaunchProblem(
            "other",
            "--speculative-token-map is ignored for EAGLE3: the draft's own d2t maps its vocabulary",
            {"speculative-token-map": escaped(launch.options["speculative-token-map"])},
            "info",
            "remove the option",
        )
    for name in launch.options:
        if name.startswith("spec") and name not in KNOWN and (near := _closest(name, KNOWN)):
            yield LaunchProblem("unknown-flag", f"--{escaped(name)} is no SGLang option", {"near": near}, "error", f"write --{near}")


def _closest(word: str, known: Any) -> str | None:
    """The known name a misspelt one was meant to be; None where nothing is really near."""
    from difflib import SequenceMatcher

    best = max(known, key=lambda k: SequenceMatcher(None, word, k).ratio())
    return str(best) if SequenceMatcher(None, word, best).ratio() >= 0.9 or word.replace("-", "").replace("_", "") == best else None
