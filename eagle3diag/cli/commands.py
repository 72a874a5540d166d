"""Handlers of the commands that judge files: call the library, hand the result on, give the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle3diag.cli.output import emit, outside, place, show
from eagle3diag.errors import UsageError, escaped

if TYPE_CHECKING:
    from eagle3diag.report.acceptance import EngineAcceptance
    from eagle3diag.report.layout import View
    from eagle3diag.rules.model import Report

MAX_LAUNCH_BYTES = 1 << 20


def _launch(a: argparse.Namespace) -> str | None:
    if a.launch_file is None:
        return None if a.launch is None else str(a.launch)
    from pathlib import Path

    with Path(a.launch_file).open("rb") as f:
        raw = f.read(MAX_LAUNCH_BYTES + 1)
    if len(raw) > MAX_LAUNCH_BYTES:
        raise UsageError(f"{escaped(a.launch_file)}: more than {MAX_LAUNCH_BYTES:,} bytes, no launch line is that long")
    return raw.decode("utf-8", "replace")


def check(a: argparse.Namespace) -> int:
    """The verdict on a draft; exit status by the findings, 2 where a rule crashed."""
    from eagle3diag.rules.case import check

    report = check(
        a.draft,
        target=a.target,
        engine=a.engine,
        launch=_launch(a),
        other=a.other,
        dump=a.dump,
        log=a.log,
        control=a.control,
        baseline=a.baseline,
        metrics=a.metrics,
        headers_only=a.headers_only,
    )
    return judged(a, report, f"eagle3diag check {a.draft}")


def judged(a: argparse.Namespace, report: Report, title: str) -> int:
    """Shows a report, with what explains a log's number where there is one; the exit status by ``--fail-on``."""
    from eagle3diag.report import jsonout

    explanation = None
    if report.case.log is not None and a.format != "sarif":
        from eagle3diag.rules.explain import explain

        explanation = explain(report)

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        log = [view(report.case.log)] if report.case.log is not None and report.case.log.readable else []
        return [view(report), *([view(explanation)] if explanation is not None else []), *log]

    if a.format == "sarif":
        from eagle3diag.report.sarif import render

        emit(a, render(report))
    else:
        show(a, lambda: jsonout.checked(report, explanation), views, title)
    crashed = [o for o in report.outcomes if o.status == "crashed"]
    if crashed:
        codes = ", ".join(o.code for o in crashed)
        print(f"eagle3diag: {codes} crashed ({escaped(crashed[0].why, 120)}): a fault in eagle3diag, please report it", file=sys.stderr)
        return 2
    fail = {"error": 0, "warning": 1}[a.fail_on or "error"]
    return int(any(f.severity.rank <= fail for f in report.findings))


def inspect(a: argparse.Namespace) -> int:
    """What a draft is, from its headers and configs."""
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec
    from eagle3diag.report import jsonout

    checkpoint = open_checkpoint(a.draft)
    spec = draft_spec(checkpoint)

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(spec), view(checkpoint)]

    show(a, lambda: jsonout.inspected(checkpoint, spec), views, f"eagle3diag inspect {a.draft}")
    return 0


def serve(a: argparse.Namespace) -> int:
    """What each engine version would run; with a dump, the acceptance it would have."""
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec
    from eagle3diag.engines.serve import serve
    from eagle3diag.report import jsonout

    if not a.engine:
        raise UsageError("serve needs at least one --engine, e.g. --engine sglang==0.5.9 --engine vllm")
    checkpoint = open_checkpoint(a.draft)
    spec = draft_spec(checkpoint)
    target = launch = None
    if a.target is not None:
        from eagle3diag.checkpoint.target import open_target

        target = open_target(a.target)
    line = _launch(a)
    if line is not None:
        from eagle3diag.engines.launch import parse_launch

        launch = parse_launch(line)
    all_served = [serve(checkpoint, engine=e, target=target, launch=launch, spec=spec) for e in a.engine]
    measured: tuple[EngineAcceptance | None, ...] = (None,) * len(all_served)
    if a.dump is not None:
        from eagle3diag.checkpoint.spec import resolved, state_width
        from eagle3diag.hidden.dumps import open_dump
        from eagle3diag.report.acceptance import acceptances

        spec = spec if target is None else resolved(spec, target.num_layers.value)
        measured = acceptances(checkpoint, spec, open_dump(a.dump, hidden=state_width(spec, target)), all_served, target)
    pairs = list(zip(all_served, measured, strict=True))

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(one) for pair in pairs for one in pair if one is not None]

    show(a, lambda: [jsonout.served(s, m) for s, m in pairs], views, f"eagle3diag serve {a.draft}")
    return 0


def diff(a: argparse.Namespace) -> int:
    """What differs between two checkpoints."""
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.report import jsonout
    from eagle3diag.weights.diff import diff

    result = diff(open_checkpoint(a.a), open_checkpoint(a.b), values=a.values)

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(result)]

    show(a, lambda: jsonout.diffed(result), views, f"eagle3diag diff {a.a} {a.b}")
    return 0


def convert(a: argparse.Namespace) -> int:
    """The draft in the layout of another reader."""
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.report import jsonout
    from eagle3diag.weights.convert import convert

    result = convert(open_checkpoint(a.draft), a.out, a.to, allow=tuple(a.allow))

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(result)]

    show(a, lambda: jsonout.converted(result), views)
    return 0


def rules(a: argparse.Namespace) -> int:
    """The catalogue, or one rule."""
    from eagle3diag.report import catalogue

    rules = catalogue.rules(a.code)
    show(a, lambda: catalogue.data(rules), lambda: [catalogue.view(rules)])
    return 0


def demo(a: argparse.Namespace) -> int:
    """The sample draft, sound and with planted faults; exit status 1 where one is not told."""
    from eagle3diag.report import demo

    stories = demo.run()
    show(a, lambda: demo.data(stories), lambda: demo.views(stories))
    return int(not all(s.found for s in stories))


def _rendered(a: argparse.Namespace, name: str, params: dict[str, Any]) -> int:
    from eagle3diag.report import notebooks

    out = a.output or f"{notebooks.stem(name)}.html"
    if not a.output:
        place(a, out)
    outside(argparse.Namespace(**params), out)
    done = notebooks.run(name, params, out)
    if a.format == "json":
        from eagle3diag.report.jsonout import dumps

        print(dumps(done.to_dict()))
    else:
        print(f"wrote {escaped(done.html, 300)} ({done.bytes:,} bytes); the executed notebook is beside it: {escaped(done.notebook, 300)}")
    return 0


def report(a: argparse.Namespace) -> int:
    """The report notebook on the files given; as Markdown or SARIF, what it would say, without the notebook."""
    given: dict[str, Any] = {
        "draft": a.draft,
        "target": a.target,
        "engines": ", ".join(a.engine) or None if a.log else ", ".join(a.engine),
        "launch": _launch(a),
        "other": a.other,
        "dump": a.dump,
        "log": a.log,
    }
    if a.format in ("markdown", "sarif"):
        return _quoted(a, given)
    return _rendered(a, "report", given)


def _quoted(a: argparse.Namespace, given: dict[str, Any]) -> int:
    from eagle3diag.report.study import study

    done = study(**given)
    if a.format == "sarif":
        from eagle3diag.report.sarif import render

        emit(a, render(*done.reports))
    else:
        from eagle3diag.report.markdown import quoted

        emit(a, quoted(done, given))
    return 0


def notebook(a: argparse.Namespace) -> int:
    """A packaged notebook on the files given, or the list of them."""
    if a.name is None:
        from eagle3diag.report import notebooks

        names = notebooks.available()
        show(a, lambda: notebooks.listing(names), lambda: [notebooks.listing_view(names)])
        return 0
    params: dict[str, Any] = {}
    for key, value in a.parameters:
        if key in params:
            raise UsageError(f"parameter {escaped(key)} is given twice")
        params[key] = value
    return _rendered(a, a.name, params)
