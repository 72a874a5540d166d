"""Outputs appear whole or not at all: written beside their place under another name, then moved there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from eagle3diag.errors import UsageError, escaped

__all__ = ["place", "write_text"]


def place(path: str | Path, what: str = "output") -> Path:
    """Where ``path`` leads, links followed, if a file can be written there; asked before any work is done.

    Args:
        what: is to be written, for the message.

    Raises:
        UsageError: it is a folder, a device or a pipe, or its folder is missing or cannot be written to.
    """
    goal = Path(os.path.realpath(path))
    if goal.is_dir():
        why = "is a folder"
    elif not goal.parent.is_dir():
        why = "is in a folder that does not exist"
    elif Path(path).exists() and not Path(path).is_file():  # a device: moving a file there would take its place
        why = "is no ordinary file"
    elif not os.access(goal.parent, os.W_OK):
        why = "is in a folder that cannot be written to"
    else:
        return goal
    raise UsageError(f"no place for the {what}: {escaped(path, 200)} {why}; choose another with -o")


def write_text(path: str | Path, text: str) -> Path:
    """Write ``text`` as UTF-8 to ``path``.

    Raises:
        UsageError: there is no place for it, or no room on the disk; nothing is left behind then.
    """
    goal = place(path)
    try:
        handle, name = tempfile.mkstemp(prefix=".eagle3diag.", dir=goal.parent)
    except OSError as error:
        raise _unwritten(path, error) from None
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
            f.write(text)
        umask = os.umask(0)  # mkstemp makes private files; an output is an ordinary one
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        part.replace(goal)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _unwritten(path, error) from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return Path(path)


def _unwritten(path: str | Path, error: OSError) -> UsageError:
    return UsageError(f"{escaped(path, 200)} was not written: {error.strerror or type(error).__name__}; choose another place with -o")
