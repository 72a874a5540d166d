"""Outputs appear whole or not at all: written beside their place under another name, then moved there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from eagle3diag.errors import UsageError, escaped

__all__ = ["write_text"]


def write_text(path: str | Path, text: str) -> Path:
    """Write ``text`` as UTF-8 to ``path``.

    Raises:
        UsageError: the folder is not there.
        OSError: it is not writable, or the disk is full; nothing is left behind then.
    """
    goal = Path(path)
    if not goal.parent.is_dir():
        raise UsageError(f"{escaped(goal, 200)}: its folder does not exist, nothing was written")
    handle, name = tempfile.mkstemp(prefix=".eagle3diag.", dir=goal.parent)
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
            f.write(text)
        umask = os.umask(0)  # mkstemp makes private files; an output is an ordinary one
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        part.replace(goal)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return goal
