"""The command line: parse, call the library, print; nothing is computed here.

``main`` returns the exit status and never raises for anything a user or a file can cause: 0 answered, nothing at the fail
level; 1 findings; 2 no answer (usage, unusable input, a rule that crashed), with one line on stderr. The result goes to stdout
and nothing else does. Parsers are built without touching the rooms; each handler imports what it needs, so that
``check --headers-only`` stays quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from eagle3diag.errors import Eagle3DiagError, UsageError, escaped

if TYPE_CHECKING:
    from eagle3diag.report.layout import View

__all__ = ["entry", "main"]

FORMATS = ("text", "json", "html", "markdown")
EPILOG = "exit status: 0 answered, nothing at the fail level; 1 findings; 2 no answer, with one line on stderr"
MAX_LAUNCH_BYTES = 1 << 20


class _Parser(argparse.ArgumentParser):
    """One line instead of usage and error, no abbreviations, an option given twice is an error and not a silent override."""

    def __init__(self, **kw: Any) -> None:
        super().__init__(allow_abbrev=False, **kw)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{escaped(message, 300)}; '{self.prog} --help' lists what there is")


class _Once(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice")
        setattr(namespace, self.dest, values)


def _parser() -> argparse.ArgumentParser:
    top = _Parser(prog="eagle3diag", description="Diagnose EAGLE-3 speculative-decoding drafts, without a GPU or an engine.", epilog=EPILOG)
    top.add_argument("--version", action="store_true", help="print the version and stop")
    sub = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")

    def command(name: str, run: Callable[[argparse.Namespace], int], about: str, formats: tuple[str, ...] = FORMATS) -> _Parser:
        p = sub.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", epilog=EPILOG)
        p.set_defaults(run=run)
        p.add_argument("--format", choices=formats, action=_Once, help="how to print the result (default: text)")
        p.add_argument("-o", "--output", metavar="FILE", action=_Once, help="write the result there instead of stdout, whole or not at all")
        return p

    def engine(p: _Parser, many: bool) -> None:
        how = {"action": "append", "default": []} if many else {"action": _Once}
        p.add_argument("--engine", metavar="E[==V]", help="e.g. sglang==0.5.9; without a version, the newest on record", **how)

    def about_case(p: _Parser, many: bool) -> None:
        p.add_argument("draft", metavar="DRAFT", help="folder or file of the draft checkpoint")
        p.add_argument("--target", metavar="TARGET", action=_Once, help="folder or config.json of the target model")
        engine(p, many)
        launch = p.add_mutually_exclusive_group()
        launch.add_argument("--launch", metavar="LINE", action=_Once, help="the launch line, quoted")
        launch.add_argument("--launch-file", metavar="FILE", action=_Once, help="a file that holds the launch line")

    p = command("check", _check, "judge a draft: what is wrong, the evidence, the fix", (*FORMATS, "sarif"))
    about_case(p, many=False)
    p.add_argument("--other", metavar="DRAFT2", action=_Once, help="a second draft to compare the tensors with")
    p.add_argument(
        "--dump", metavar="DUMP", action=_Once, help="file or folder of the target's hidden states, to judge and to run the draft on"
    )
    p.add_argument("--headers-only", action="store_true", help="read no tensor value; rules on values are listed as skipped")
    p.add_argument("--fail-on", choices=("error", "warning"), action=_Once, help="least severity for exit status 1 (default: error)")

    p = command("inspect", _inspect, "say what a draft is: dialect, facts with their source, tensors")
    p.add_argument("draft", metavar="DRAFT")

    p = command("serve", _serve, "say what engine versions would really run, tensor by tensor and layer by layer")
    about_case(p, many=True)

    p = command("diff", _diff, "compare two checkpoints: names (renames understood), shapes, dtypes, values, config")
    p.add_argument("a", metavar="A")
    p.add_argument("b", metavar="B")
    p.add_argument("--values", action="store_true", help="compare tensor values too, not only headers")

    p = command("convert", _convert, "rewrite a draft for another reader, lossless", ("text", "json"))
    p.add_argument("draft", metavar="DRAFT")
    p.add_argument("out", metavar="OUT", help="folder to write; must not be there yet")
    p.add_argument("--to", metavar="LAYOUT", required=True, action=_Once, help="sglang, vllm or speculators")
    p.add_argument("--allow", metavar="FACT", action="append", default=[], help="a fact that may be lost, by the name the refusal gives it")

    p = command("rules", _rules, "list the rules, or explain one", ("text", "json", "markdown"))
    p.add_argument("code", metavar="CODE", nargs="?")

    command("demo", _demo, "check the packaged sample draft, sound and with faults planted", ("text", "json"))

    p = command("report", _report, "render the full report of a draft to one HTML file", ("text", "json"))
    about_case(p, many=True)
    p.add_argument("--other", metavar="DRAFT2", action=_Once, help="a second draft to compare with")

    p = command("notebook", _notebook, "run a packaged notebook on your files and render it to one HTML file", ("text", "json"))
    p.add_argument("name", metavar="NAME", nargs="?", help="without a name: list them, with their parameters")
    p.add_argument("-p", dest="parameters", metavar=("KEY", "VALUE"), nargs=2, action="append", default=[], help="a parameter; repeatable")
    return top


def _write(path: str, text: str) -> None:
    """``text`` into ``path``, whole or not at all."""
    from eagle3diag.report.files import write_text

    write_text(path, text)


def _place(a: argparse.Namespace, output: str) -> None:
    """Refuse an output inside a checkpoint that was only to be read."""
    from pathlib import Path

    folder = Path(output).parent.resolve()
    for role in ("draft", "target", "other", "dump", "a", "b"):
        given = getattr(a, role, None)
        if given and folder == Path(given).resolve():
            raise UsageError(
                f"{escaped(output, 200)} would lie in the checkpoint folder {escaped(given, 200)}: choose another place with -o"
            )


def _emit(a: argparse.Namespace, text: str) -> None:
    if a.output:
        _write(a.output, text + "\n")
    else:
        print(text)


def _show(a: argparse.Namespace, data: Callable[[], Any], views: Callable[[], Sequence[View]], title: str = "") -> None:
    """One result in the format asked for; only that form is computed."""
    form = a.format or "text"
    if form == "json":
        from eagle3diag.report.jsonout import dumps

        _emit(a, dumps(data()))
    elif form == "html":
        from eagle3diag.report.html import page

        _emit(a, page(title, views()))
    elif form == "markdown":
        from eagle3diag.report.markdown import of

        _emit(a, "\n".join(of(v) for v in views()))
    else:
        from eagle3diag.report.text import colour_wanted
        from eagle3diag.report.text import of as text_of

        colour = not a.output and colour_wanted(sys.stdout)
        _emit(a, "\n\n".join(text_of(v, colour=colour) for v in views()))


def _launch(a: argparse.Namespace) -> str | None:
    if a.launch_file is None:
        return None if a.launch is None else str(a.launch)
    from pathlib import Path

    with Path(a.launch_file).open("rb") as f:
        raw = f.read(MAX_LAUNCH_BYTES + 1)
    if len(raw) > MAX_LAUNCH_BYTES:
        raise UsageError(f"{escaped(a.launch_file)}: more than {MAX_LAUNCH_BYTES:,} bytes, no launch line is that long")
    return raw.decode("utf-8", "replace")


def _check(a: argparse.Namespace) -> int:
    from eagle3diag.report import jsonout
    from eagle3diag.rules.case import check

    report = check(a.draft, target=a.target, engine=a.engine, launch=_launch(a), other=a.other, dump=a.dump, headers_only=a.headers_only)

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(report)]

    if a.format == "sarif":
        from eagle3diag.report.sarif import render

        _emit(a, render(report))
    else:
        _show(a, lambda: jsonout.checked(report), views, f"eagle3diag check {a.draft}")
    crashed = [o for o in report.outcomes if o.status == "crashed"]
    if crashed:
        codes = ", ".join(o.code for o in crashed)
        print(f"eagle3diag: {codes} crashed ({escaped(crashed[0].why, 120)}): a fault in eagle3diag, please report it", file=sys.stderr)
        return 2
    fail = {"error": 0, "warning": 1}[a.fail_on or "error"]
    return int(any(f.severity.rank <= fail for f in report.findings))


def _inspect(a: argparse.Namespace) -> int:
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec
    from eagle3diag.report import jsonout

    checkpoint = open_checkpoint(a.draft)
    spec = draft_spec(checkpoint)

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(spec), view(checkpoint)]

    _show(a, lambda: jsonout.inspected(checkpoint, spec), views, f"eagle3diag inspect {a.draft}")
    return 0


def _serve(a: argparse.Namespace) -> int:
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

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(s) for s in all_served]

    _show(a, lambda: [jsonout.served(s) for s in all_served], views, f"eagle3diag serve {a.draft}")
    return 0


def _diff(a: argparse.Namespace) -> int:
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.report import jsonout
    from eagle3diag.weights.diff import diff

    result = diff(open_checkpoint(a.a), open_checkpoint(a.b), values=a.values)

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(result)]

    _show(a, lambda: jsonout.diffed(result), views, f"eagle3diag diff {a.a} {a.b}")
    return 0


def _convert(a: argparse.Namespace) -> int:
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.report import jsonout
    from eagle3diag.weights.convert import convert

    result = convert(open_checkpoint(a.draft), a.out, a.to, allow=tuple(a.allow))

    def views() -> Sequence[View]:
        from eagle3diag.report.views import view

        return [view(result)]

    _show(a, lambda: jsonout.converted(result), views)
    return 0


def _rules(a: argparse.Namespace) -> int:
    from eagle3diag.report import catalogue

    rules = catalogue.rules(a.code)
    _show(a, lambda: catalogue.data(rules), lambda: [catalogue.view(rules)])
    return 0


def _demo(a: argparse.Namespace) -> int:
    from eagle3diag.report import demo

    stories = demo.run()
    _show(a, lambda: demo.data(stories), lambda: demo.views(stories))
    return int(not all(s.found for s in stories))


def _rendered(a: argparse.Namespace, name: str, params: dict[str, Any]) -> int:
    from eagle3diag.report import notebooks

    out = a.output or f"{notebooks.stem(name)}.html"
    if not a.output:
        _place(a, out)
    done = notebooks.run(name, params, out)
    if a.format == "json":
        from eagle3diag.report.jsonout import dumps

        print(dumps(done.to_dict()))
    else:
        print(f"wrote {escaped(done.html, 300)} ({done.bytes:,} bytes); the executed notebook is beside it: {escaped(done.notebook, 300)}")
    return 0


def _report(a: argparse.Namespace) -> int:
    given = {"draft": a.draft, "target": a.target, "engines": ", ".join(a.engine), "launch": _launch(a), "other": a.other}
    return _rendered(a, "report", given)


def _notebook(a: argparse.Namespace) -> int:
    if a.name is None:
        from eagle3diag.report import notebooks

        names = notebooks.available()
        _show(a, lambda: notebooks.listing(names), lambda: [notebooks.listing_view(names)])
        return 0
    params: dict[str, Any] = {}
    for key, value in a.parameters:
        if key in params:
            raise UsageError(f"parameter {escaped(key)} is given twice")
        params[key] = value
    return _rendered(a, a.name, params)


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    a = parser.parse_args(argv)
    if a.version:
        from eagle3diag import __version__

        print(f"eagle3diag {__version__}")
        return 0
    if a.command is None:
        raise UsageError("no command given; try 'eagle3diag check DRAFT' or 'eagle3diag demo', 'eagle3diag --help' lists all")
    if a.output:
        _place(a, a.output)
    status: int = a.run(a)
    sys.stdout.flush()
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments without the program's name; ``None`` takes those of the process.

    Returns:
        The exit status.
    """
    try:
        return _run(argv)
    except SystemExit as stop:  # argparse after --help
        return stop.code if isinstance(stop.code, int) else 0
    except Eagle3DiagError as error:
        line = str(error)
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except KeyboardInterrupt:
        line = "stopped"
    except OSError as error:
        where = f"{escaped(error.filename, 200)}: " if error.filename else ""
        line = f"{where}{error.strerror or type(error).__name__}"
    except MemoryError:
        line = "out of memory; try --headers-only, which reads no tensor data"
    except RecursionError:
        line = "an input is nested too deeply to be read"
    except Exception as error:  # a bug here; a user gets one line, a developer asks for more
        if os.environ.get("EAGLE3DIAG_TRACEBACK"):
            raise
        line = f"a fault in eagle3diag, please report it: {type(error).__name__}: {error} (EAGLE3DIAG_TRACEBACK=1 shows where)"
    print(f"eagle3diag: {escaped(line, 2000)}", file=sys.stderr)
    return 2


def _silence_stdout() -> None:
    """Point stdout at nothing: the reader went away, and the interpreter's last flush must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def entry() -> int:
    """What the console script runs: library warnings would be noise on stderr, and a stream that cannot spell a sign shows ``?``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if not sys.warnoptions:
        import warnings

        warnings.simplefilter("ignore")
    return main()
