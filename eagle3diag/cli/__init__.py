"""The command line: parse, call the library, print; nothing is computed here.

``main`` returns the exit status and never raises for anything a user or a file can cause: 0 answered, nothing at the fail
level; 1 findings; 2 no answer (usage, unusable input, a rule that crashed), with one line on stderr. The result goes to stdout
and nothing else does. ``parser`` says what can be asked; ``commands``, ``measures``,
``serving`` and ``sources`` answer: each handler imports what it needs, so that ``check --headers-only`` stays quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from eagle3diag.cli.output import place
from eagle3diag.cli.parser import build_parser
from eagle3diag.errors import Eagle3DiagError, UsageError, escaped

__all__ = ["entry", "main"]


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    a = build_parser(words[0] if words else None).parse_args(words)
    if a.version:
        from eagle3diag import __version__

        print(f"eagle3diag {__version__}")
        return 0
    if a.command is None:
        raise UsageError("no command given; try 'eagle3diag check DRAFT' or 'eagle3diag demo', 'eagle3diag --help' lists all")
    if a.output:
        place(a, a.output)
    module, name = a.handler
    status: int = getattr(import_module(f"eagle3diag.cli.{module}"), name)(a)
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
        line = "out of memory: check --headers-only reads no tensor data, agree and wirings read fewer rows with --rows N"
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
