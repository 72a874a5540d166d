"""Handlers of the commands that measure: hidden states, agreement, wirings, and the capture of a target."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from eagle3diag.cli.output import outside, show
from eagle3diag.errors import UsageError, escaped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from eagle3diag.report.layout import View

STEPS = 4
ROWS, OBSERVED_ROWS = 4000, 1500  #: read for a ranking, and where every wiring runs on all of them


def _views(*results: object) -> Callable[[], Sequence[View]]:
    def made() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(r) for r in results]

    return made


def _told(text: str) -> None:
    """Progress, for people only: a terminal on stderr."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{escaped(text, 120)}", end="", file=sys.stderr, flush=True)


def _done() -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def norms(a: argparse.Namespace) -> int:
    """The profile of a dump, or its comparison with another."""
    from eagle3diag.hidden.dumps import open_dump
    from eagle3diag.hidden.norms import profile
    from eagle3diag.report import jsonout

    dump = open_dump(a.dump)
    second = None if a.other is None else open_dump(a.other)
    with ExitStack() as stack:
        pool = None
        if a.workers is not None and a.workers > 1:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import get_context

            pool = stack.enter_context(ProcessPoolExecutor(a.workers, mp_context=get_context("spawn")))
        found = profile(dump, executor=pool, full=a.full)
    title = f"eagle3diag norms {a.dump}"
    if second is None:
        show(a, lambda: jsonout.profiled(dump, found), _views(found), title)
        return 0
    from eagle3diag.hidden.identity import compare

    comparison = compare(dump, second)
    show(a, lambda: jsonout.profiled(dump, found, comparison), _views(comparison, found), f"{title} {a.other}")
    return 0


def agree(a: argparse.Namespace) -> int:
    """Agreement of a draft with the target on a dump."""
    from eagle3diag.draft.agreement import agreement
    from eagle3diag.report import jsonout
    from eagle3diag.report.opened import opened

    one, tokens = opened(a.draft, a.dump, a.target), a.tokens or "forced"
    found = agreement(
        one.checkpoint, one.spec, one.dump, one.target, steps=a.steps or STEPS, on_policy=tokens == "on-policy", max_rows=a.rows
    )
    show(a, lambda: jsonout.agreed(found, tokens), _views(found), f"eagle3diag agree {a.draft} {a.dump}")
    return 0


def wirings(a: argparse.Namespace) -> int:
    """What a dump, or an observed length, says of the wiring."""
    from eagle3diag.draft.measure import Bench
    from eagle3diag.draft.observed import explain
    from eagle3diag.draft.ranking import rank_bench
    from eagle3diag.report import jsonout
    from eagle3diag.report.opened import opened

    one = opened(a.draft, a.dump, a.target)
    rows = a.rows or (ROWS if a.observed is None else OBSERVED_ROWS)
    bench = Bench.prepare(one.checkpoint, one.spec, one.dump, one.target, steps=a.steps or STEPS, max_rows=rows)
    seen = None
    try:
        if a.observed is not None:
            seen = explain(bench, a.observed, one.target, pairs=not a.quick, progress=_told)
        found = rank_bench(bench, one.target, quick=a.quick, progress=_told)
    finally:
        _done()
    results = (found,) if seen is None else (seen, found)
    show(a, lambda: jsonout.ranked(found, seen), _views(*results), f"eagle3diag wirings {a.draft} {a.dump}")
    return 0


def _layers(text: str | None) -> Any:
    """``2,15,27`` or ``all``."""
    if text is None or text == "all":
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--layers {escaped(text)}: give HF indices separated by commas, e.g. 2,15,27, or all") from None


def _vocabulary(draft: str) -> Sequence[int]:
    """The target ids that a draft can name."""
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec
    from eagle3diag.draft.sources import target_ids
    from eagle3diag.draft.weights import DraftWeights

    checkpoint = open_checkpoint(draft)
    spec = draft_spec(checkpoint)
    weights = DraftWeights.load(checkpoint, spec)
    ids: list[int] = target_ids(weights, spec.wiring, weights.sizes.draft_vocab).tolist()
    return ids


def capture(a: argparse.Namespace) -> int:
    """A target's states over texts, as a portable dump."""
    if a.target.lower().startswith(("http://", "https://")):
        from eagle3diag.cli.sources import capture_server

        return capture_server(a, _layers(a.layers))
    if a.target_config is not None or a.storage is not None:
        raise UsageError("--target-config and --storage are for a server: give its http://HOST:PORT as TARGET")
    from eagle3diag.hidden.capture import capture
    from eagle3diag.report import jsonout

    layers = _layers(a.layers)
    for out in (a.out, a.decode_out):
        if out is not None:
            outside(a, out)
    if a.no_decode and a.decode_out is not None:
        raise UsageError("--decode-output wants the states of decoding, --no-decode leaves decoding out: give one of them")
    extra = () if a.draft is None else _vocabulary(a.draft)
    given = {"new_tokens": a.new_tokens, "max_tokens": a.max_tokens, "device": a.device, "dtype": a.dtype, "decode_out": a.decode_out}
    try:
        found = capture(
            a.target,
            a.text,
            a.out,
            layers=layers,
            decode=not a.no_decode,
            chat=not a.no_chat,
            extra_ids=extra,
            progress=lambda done, total, file: _told(f"{done} of {total} texts{f', {file}' if file else ''}"),
            **{k: v for k, v in given.items() if v is not None},
        )
    finally:
        _done()
    show(a, lambda: jsonout.captured(found), _views(found))
    return 0
