"""A serving log as evidence: opened, with what it says of the engine and the launch; and a case of a log alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING

from eagle3diag.errors import Eagle3DiagError, escaped
from eagle3diag.rules.model import Case, Report

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import Checkpoint
    from eagle3diag.engines.model import Launch
    from eagle3diag.serving.model import ServingLog, Training

__all__ = ["check_log", "engine_of_log", "launch_of", "log_case", "opened_log", "opened_training"]

Source = str | PathLike[str]


def opened_log(log: Source | Sequence[str] | ServingLog, version: str | None = None) -> ServingLog:
    """The log, read; ``version`` of SGLang decides what its rate means where the log does not tell."""
    from eagle3diag.serving.model import ServingLog

    if isinstance(log, ServingLog):
        return log
    from eagle3diag.serving.logs import open_log

    return open_log(fspath(log) if isinstance(log, (str, PathLike)) else list(log), version=version)


def opened_training(metrics: Source | Training | None, draft: Checkpoint | None = None) -> tuple[Training | None, tuple[str, ...]]:
    """Training metrics: the file given, else the ``val_metrics.json`` that a trainer left beside the draft."""
    from eagle3diag.serving.model import Training

    if isinstance(metrics, Training):
        return metrics, ()
    from eagle3diag.serving.training import read_training

    if metrics is not None:
        return read_training(fspath(metrics)), ()
    if draft is None or draft.remote or "val_metrics.json" not in draft.extras:
        return None, ()
    from pathlib import Path

    at = Path(draft.path)
    try:
        found = read_training((at if at.is_dir() else at.parent) / "val_metrics.json")
    except Eagle3DiagError:
        return None, ()
    return found, (f"training metrics taken from val_metrics.json beside the draft ({found.source})",)


def engine_of_log(log: ServingLog) -> str | None:
    """``sglang==0.5.9`` where the log names engine and version, and the engine is one on record."""
    if log.engine not in ("sglang", "vllm") or log.version is None:
        return None
    from eagle3diag.engines.versions import parse

    try:
        parse(log.version)
    except Eagle3DiagError:
        return None
    return f"{log.engine}=={log.version}"


def launch_of(log: ServingLog) -> Launch | None:
    """The launch as the log tells it: a line that was echoed, or the options the engine printed; None where it tells none."""
    from eagle3diag.engines.launch import parse_launch

    launched = log.launched
    line = launched.line
    if line is None and launched.engine == "sglang" and launched.options:
        line = "python -m sglang.launch_server" + _flags(
            ("--model-path", launched.target),
            ("--speculative-algorithm", launched.method),
            ("--speculative-draft-model-path", launched.draft),
            ("--speculative-num-steps", launched.steps),
            ("--speculative-eagle-topk", launched.topk),
            ("--speculative-num-draft-tokens", launched.draft_tokens),
        )
    if line is None and launched.engine == "vllm" and launched.method is not None:
        import json

        spec = {"method": launched.method, "model": launched.draft, "num_speculative_tokens": launched.steps}
        told = json.dumps({k: v for k, v in spec.items() if v is not None})
        line = f"vllm serve {shlex.quote(launched.target or 'target')} --speculative-config {shlex.quote(told)}"
    if line is None:
        return None
    try:
        return parse_launch(line)
    except Eagle3DiagError:
        return None


def _flags(*pairs: tuple[str, object]) -> str:
    return "".join(f" {name} {shlex.quote(str(value))}" for name, value in pairs if value is not None)


def contradictions(log: ServingLog, engine: str | None, version: str | None) -> tuple[str, ...]:
    """Where the log names another engine or version than the one that is judged."""
    out = []
    if engine is not None and log.engine is not None and log.engine != engine:
        out.append(f"the log is {log.engine}'s, the draft is judged for {engine}")
    elif version is not None and log.version is not None and log.version != version:
        out.append(f"the log says {log.engine} {escaped(log.version)}, the draft is judged for {version}")
    return tuple(out)


def log_case(
    log: Source | Sequence[str] | ServingLog,
    *,
    control: Source | ServingLog | None = None,
    baseline: float | None = None,
    metrics: Source | Training | None = None,
) -> Case:
    """A case of a log alone: there is no draft in it.

    Raises:
        CheckpointError: an input is not there.
        UsageError: an input cannot be read.
    """
    from eagle3diag.checkpoint.model import Checkpoint
    from eagle3diag.checkpoint.spec import draft_spec

    read = opened_log(log)
    nothing = Checkpoint(path=read.path, files=(), tensors={}, configs=(), form="none")
    training, _ = opened_training(metrics)
    return Case(
        draft=nothing,
        spec=draft_spec(nothing),
        log=read,
        control=None if control is None else opened_log(control),
        baseline=baseline,
        training=training or read.training,
        headers_only=True,
    )


def check_log(
    log: Source | Sequence[str] | ServingLog,
    *,
    control: Source | ServingLog | None = None,
    baseline: float | None = None,
    metrics: Source | Training | None = None,
    select: Iterable[str] = ("SRV",),
) -> Report:
    """The SRV rules over a log alone; arguments as in ``log_case``."""
    from eagle3diag.rules.registry import run

    return run(log_case(log, control=control, baseline=baseline, metrics=metrics), select)
