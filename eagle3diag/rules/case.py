"""From what the user hands in to a ``Case``: open, normalise, parse, serve, once.

An explicit engine wins; without one the launch line tells it, with its version where a container tag names one. Serving is
imported inside the functions, so that a check without an engine pays nothing for the contracts.
"""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING

from eagle3diag.checkpoint.model import Checkpoint, TargetSpec
from eagle3diag.errors import CheckpointError, UsageError, escaped
from eagle3diag.rules.model import Case, Report

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eagle3diag.engines.model import Launch
    from eagle3diag.hidden.model import HiddenDump
    from eagle3diag.serving.model import ServingLog, Training

__all__ = ["check", "make_case"]

Source = str | PathLike[str]


def _engine(engine: str | None, launch: Launch | None) -> tuple[str | None, list[str]]:
    """The engine to serve with, as ``name==version`` or ``name@place``, and what has to be said about the choice.

    Raises:
        UsageError: no such engine, or the launch line belongs to another one.
    """
    if engine is None and launch is None:
        return None, []
    notes: list[str] = []
    if engine is None and launch is not None:
        name, version = launch.engine, launch.version
        notes.append(f"engine {name} taken from the launch line")
    else:
        from eagle3diag.engines.contract import engine_source, parse_engine

        copy = engine_source(str(engine))
        if copy is not None:
            if launch is not None and launch.engine != copy[0]:
                raise UsageError(
                    f"--engine {escaped(engine)} but the launch line starts {launch.engine}: give its source, or leave --engine out"
                )
            return f"{copy[0]}@{copy[1]}", [f"{copy[0]} is read from its source at {escaped(copy[1], 120)}"]
        name, version = parse_engine(str(engine))
        if launch is not None and launch.engine != name:
            raise UsageError(f"--engine {escaped(engine)} but the launch line starts {launch.engine}: give that, or leave --engine out")
        if version is None and launch is not None and launch.version is not None:
            version = launch.version
            notes.append(f"{name} {version} taken from the launch line")
    if version is None:
        from eagle3diag.engines.contract import releases, undated

        version = releases(name)[-1]
        if undated(name):
            return f"{name}=={version}", [*notes, f"the facts of {name} are undated"]
        notes.append(f"no {name} version given: {version}, the newest on record, is used; give --engine {name}==VERSION for another")
    return f"{name}=={version}", notes


def _dump(source: Source | HiddenDump, hidden: int | None) -> HiddenDump:
    """The dump opened (states of width ``hidden`` where that is known).

    One that is there but cannot be read stays in the case as a finding to be made, because the draft is still to be judged.

    Raises:
        CheckpointError: nothing is there.
    """
    from pathlib import Path

    from eagle3diag.errors import CheckpointError
    from eagle3diag.hidden.model import DumpIssue, HiddenDump

    if isinstance(source, HiddenDump):
        return source
    from eagle3diag.hidden.dumps import open_dump

    path = fspath(source)
    try:
        return open_dump(path, hidden=hidden)
    except CheckpointError as error:
        if not Path(path).exists():
            raise
        issue = DumpIssue("unreadable", Path(path).name, str(error))
        return HiddenDump(path=path, format="unknown", evidence=(), hidden=0, slots=(), final_norm="unknown", samples=(), issues=(issue,))


def _part_read(dump: HiddenDump) -> list[str]:
    """Says so where the dump is too large to be read whole for a check."""
    from eagle3diag.hidden.scan import chosen

    read, of = len(chosen(dump)), len(dump)
    return [f"{read:,} of {of:,} samples of the dump are judged, evenly spaced; 'eagle3diag norms' reads all"] if read < of else []


def _version(engine: str | None, name: str) -> str | None:
    """The version in ``--engine`` where it is that engine's."""
    first, _, version = (engine or "").partition("==")
    return version if first == name and version else None


def make_case(
    draft: Source | Checkpoint,
    *,
    target: Source | TargetSpec | None = None,
    engine: str | None = None,
    launch: str | Launch | None = None,
    other: Source | Checkpoint | None = None,
    dump: Source | HiddenDump | None = None,
    log: Source | ServingLog | None = None,
    control: Source | ServingLog | None = None,
    baseline: float | None = None,
    metrics: Source | Training | None = None,
    headers_only: bool = False,
    like: Case | None = None,
) -> Case:
    """Opens everything once and serves the draft where an engine is known.

    Args:
        draft: path, URL or an opened checkpoint.
        target: path of a target's config or folder, or an opened one.
        engine: ``sglang==0.5.9``, ``vllm`` for the newest on record, or ``sglang@PATH`` to read a copy of the engine.
        launch: the launch line as text, or parsed.
        other: a second draft to compare with.
        dump: file or folder of hidden states of the target, or an opened one.
        log: of a server that ran this draft: a file, a folder of rotated files, ``http://HOST:PORT``, or an opened one.
        control: the same server's log with another draft.
        baseline: its tokens per second without a draft.
        metrics: of the training run; ``val_metrics.json`` beside the draft where None.
        headers_only: forbid reading tensor data; always so where a draft is remote.
        like: a case on the same draft and dump with another engine: what was measured there is not measured again.

    Raises:
        CheckpointError: an input cannot be read.
        UsageError: engine or launch line make no sense, or a dump is given although no value may be read.
    """
    if (control is not None or baseline is not None) and log is None:
        raise UsageError("a control log and a baseline are compared with a log: give --log too")
    if headers_only and dump is not None:
        raise UsageError("a dump is read for its values: leave --headers-only out, or --dump")
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec, resolved, state_width

    opened = draft if isinstance(draft, Checkpoint) else open_checkpoint(fspath(draft))
    if not opened.tensors and not opened.issues:
        what = f"0 tensors in {opened.files[0]}" if opened.files else "a config and no weights"
        raise CheckpointError(
            f"{escaped(opened.path, 200)}: {escaped(what)}, so there is no draft to judge; "
            "expected model.safetensors, an index of shards, or a .bin/.pt file"
        )
    spec = draft_spec(opened)
    wanted: TargetSpec | None = None
    if target is not None and not isinstance(target, TargetSpec):
        from eagle3diag.checkpoint.target import open_target

        wanted = open_target(fspath(target))
    elif target is not None:
        wanted = target
    if wanted is not None:
        spec = resolved(spec, wanted.num_layers.value)
    parsed: Launch | None = None
    if isinstance(launch, str):
        from eagle3diag.engines.launch import parse_launch

        parsed = parse_launch(launch)
    elif launch is not None:
        parsed = launch
    told: ServingLog | None = None
    training: Training | None = None
    asked = engine
    if log is not None:
        from eagle3diag.rules.logcase import engine_of_log, launch_of, opened_log

        told = opened_log(log, _version(engine, "sglang"))
        if engine is None and parsed is None:
            parsed, engine = launch_of(told), engine_of_log(told)
            if engine is None:
                parsed = None
    chosen, notes = _engine(engine, parsed)
    if told is not None and asked is None and launch is None and chosen is not None:
        notes = [f"engine {chosen} taken from the log", *(["launch options taken from the log"] if parsed is not None else [])]
    served = None
    if chosen is not None:
        from eagle3diag.engines.serve import serve

        served = serve(opened, chosen, target=wanted, launch=parsed, spec=spec)
    second = other if isinstance(other, Checkpoint) or other is None else open_checkpoint(fspath(other))
    held = None
    if dump is not None:
        held = _dump(dump, state_width(spec, wanted))
        notes += _part_read(held)
    if told is not None:
        from eagle3diag.rules.logcase import contradictions

        if served is not None:
            notes += contradictions(told, served.contract.engine, served.contract.asked)
    if told is not None or metrics is not None:
        from eagle3diag.rules.logcase import opened_training

        training, said = opened_training(metrics, opened)
        notes += said
    beside = None
    if control is not None:
        from eagle3diag.rules.logcase import opened_log

        beside = opened_log(control, _version(engine, "sglang"))
    return Case(
        draft=opened,
        spec=spec,
        target=wanted,
        served=served,
        launch=parsed,
        other=second,
        dump=held,
        log=told,
        control=beside,
        baseline=baseline,
        training=training,
        headers_only=headers_only or opened.remote or (second is not None and second.remote),
        notes=tuple(notes),
        **({} if like is None else {"workings": like.workings}),
    )


def check(
    draft: Source | Checkpoint,
    *,
    target: Source | TargetSpec | None = None,
    engine: str | None = None,
    launch: str | Launch | None = None,
    other: Source | Checkpoint | None = None,
    dump: Source | HiddenDump | None = None,
    log: Source | ServingLog | None = None,
    control: Source | ServingLog | None = None,
    baseline: float | None = None,
    metrics: Source | Training | None = None,
    headers_only: bool = False,
    like: Case | None = None,
    select: Iterable[str] | None = None,
) -> Report:
    """``make_case`` and every rule over it; arguments as there.

    Args:
        select: rule codes or families; all where None.

    Raises:
        CheckpointError: an input cannot be read.
        UsageError: engine, launch line or a selected code make no sense.

    Example:
        >>> report = check("data_samples/smollm2-eagle3/draft", engine="sglang==0.5.9", headers_only=True)
        >>> report.verdict, report.findings[0].code
        ('broken', 'KEY203')
    """
    from eagle3diag.rules.registry import run

    case = make_case(
        draft,
        target=target,
        engine=engine,
        launch=launch,
        other=other,
        dump=dump,
        log=log,
        control=control,
        baseline=baseline,
        metrics=metrics,
        headers_only=headers_only,
        like=like,
    )
    return run(case, select)
