"""Contracts: the recorded facts of one engine version, picked from the data files.

``contracts/*.toml`` hold one value per behaviour per version range, each with its source and how it is known. Loading a contract is
picking, for each behaviour, the one entry whose range, runner and draft class fit; code never asks for a version. A version not on
record takes the nearest older release and says so (``Contract.on_record``); rule ENG508 reports it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from eagle3diag.engines import versions
from eagle3diag.engines.model import Contract, Fact, Launch
from eagle3diag.errors import UsageError, escaped

__all__ = ["ENGINES", "behaviours", "engine_source", "load_contract", "parse_engine", "releases", "runner_for"]

ENGINES = ("sglang", "vllm", "tensorrt-llm", "llama.cpp")
SCANNED = ("sglang", "vllm")  #: engines whose source can be scanned
_DATA = Path(__file__).parent / "contracts"


@lru_cache(maxsize=4)
def _data(engine: str) -> dict[str, Any]:
    if engine not in ENGINES:
        raise UsageError(f"unknown engine '{escaped(engine)}': known are {', '.join(ENGINES)}, written as sglang==0.5.9")
    with (_DATA / f"{engine.replace('-', '_').replace('.', '_')}.toml").open("rb") as file:
        return tomllib.load(file)


def releases(engine: str) -> tuple[str, ...]:
    """Releases on record, oldest first.

    Raises:
        UsageError: unknown engine.
    """
    return tuple(_data(engine)["releases"])


def undated(engine: str) -> bool:
    """True for an engine whose facts were read in its repository and belong to no release."""
    return bool(_data(engine).get("undated", False))


def runners(engine: str) -> tuple[str, ...]:
    """Model runners the engine's contracts tell apart; empty for one runner."""
    return tuple(_data(engine)["runners"])


def draft_classes(engine: str) -> tuple[str, ...]:
    """Classes of draft the engine's contracts tell apart."""
    return tuple(_data(engine)["draft_classes"])


def behaviours(engine: str) -> dict[str, str]:
    """Behaviour name -> what its values mean."""
    return {name: entry["doc"] for name, entry in _data(engine)["behaviour"].items()}


def engine_source(text: str) -> tuple[str, str] | None:
    """``"sglang@/srv/fork"`` -> ``("sglang", "/srv/fork")``; None where a release is named, not a place.

    Raises:
        UsageError: an engine whose source is not scanned, or no place after the ``@``.
    """
    name, sep, place = text.strip().partition("@")
    if not sep:
        return None
    name = name.strip().lower()
    if name not in SCANNED or not place.strip():
        raise UsageError(f"--engine {escaped(text)}: expected ENGINE@PATH with ENGINE one of {', '.join(SCANNED)} and PATH its source")
    return name, place.strip()


def parse_engine(text: str) -> tuple[str, str | None]:
    """``"sglang==0.5.9"`` -> ``("sglang", "0.5.9")``; without a version the second is None. Of ``ENGINE@PATH`` it is the source's own.

    Raises:
        UsageError: unknown engine, no form of ``ENGINE[==VERSION]``, or no such engine at the path.
    """
    copy = engine_source(text)
    if copy is not None:
        from eagle3diag.engines.scan.source import open_source

        return copy[0], open_source(copy[1], copy[0]).version
    name, sep, version = text.strip().partition("==")
    name = name.strip().lower()
    if name not in ENGINES or (sep and not version.strip()):
        raise UsageError(f"--engine {escaped(text)}: expected ENGINE or ENGINE==VERSION with ENGINE one of {', '.join(ENGINES)}")
    version = version.strip()
    return name, (version[1:] if version[:1] in "vV" and version[1:2].isdigit() else version) or None


def _fits(entry: Mapping[str, Any], version: str, runner: str | None, draft_class: str) -> bool:
    if entry.get("runner", runner) != runner or entry.get("draft", draft_class) != draft_class:
        return False
    since, until = entry.get("since"), entry.get("until")
    return (since is None and until is None) or versions.within(version, since, until)


def facts_of(engine: str, version: str, runner: str | None, draft_class: str) -> dict[str, Fact]:
    """All facts of one recorded release; a behaviour with no entry is left out (a test forbids that)."""
    facts = {}
    for name, table in _data(engine)["behaviour"].items():
        for entry in table["is"]:
            if _fits(entry, version, runner, draft_class):
                facts[name] = Fact(entry["value"], entry["source"], entry["status"])
                break
    return facts


def load_contract(engine: str, version: str | None = None, *, runner: str | None = None, draft_class: str = "llama") -> Contract:
    """The contract of one engine version.

    Args:
        engine: one of ``ENGINES``.
        version: a release; None takes the newest on record. One not on record takes the nearest older one. An engine whose facts are
            undated has one record, whatever is asked.
        runner: ``v1`` or ``v2`` for vLLM; None takes ``v1``.
        draft_class: ``llama``, ``qwen3`` or ``mla``; a class the engine does not have takes ``llama``.

    Raises:
        UsageError: unknown engine, runner, or a version that is none.
    """
    known = releases(engine)
    asked = version or known[-1]
    recorded = asked if asked in known else known[-1] if undated(engine) else versions.nearest(asked, known)
    valid = runners(engine)
    if runner is not None and runner not in valid:
        raise UsageError(f"unknown runner '{escaped(runner)}' for {engine}: {', '.join(valid) or 'it has one runner'}")
    picked = runner or (valid[0] if valid else None)
    draft = draft_class if draft_class in draft_classes(engine) else "llama"
    return Contract(
        engine=engine, version=recorded, asked=asked, runner=picked, draft_class=draft, facts=facts_of(engine, recorded, picked, draft)
    )


def runner_for(
    engine: str, version: str | None, target_arch: str | None, *, quantised: bool = False, moe: bool = False, launch: Launch | None = None
) -> tuple[str | None, str]:
    """Which model runner serves this target, and why.

    The launch line's ``VLLM_USE_V2_MODEL_RUNNER`` decides; otherwise behaviour ``runner_default`` does. Without a target architecture, a
    version whose default depends on it takes the older runner and says so.

    Returns:
        ``("v1" | "v2" | None, reason)``; None for an engine with one runner.
    """
    if not runners(engine):
        return None, "one runner"
    if launch is not None and launch.runner is not None:
        return launch.runner, "VLLM_USE_V2_MODEL_RUNNER in the launch line"
    default = load_contract(engine, version, runner="v1")["runner_default"]
    mode, archs = default["mode"], default["archs"]
    if mode == "all":
        return "v2", "default for every target"
    if mode == "never":
        return "v1", "default of this version"
    if target_arch is None:
        return "v1", "the default depends on the target, and none was given"
    listed = target_arch in archs or (mode == "dense" and not moe)
    if listed and (default["quantised"] or not quantised):
        return "v2", f"default for {target_arch}"
    return "v1", f"not the default for {target_arch}"
