"""One error root for everything a user's input can cause.

Every message is one line: what, where, both numbers, next step. The command line prints it on stderr
and exits with status 2; nothing below it ever shows a traceback for bad input.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "Eagle3DiagError", "UsageError", "escaped"]


def escaped(text: object, limit: int = 60) -> str:
    """Text from a file, safe for a terminal: control and bidirectional characters escaped, cut.

    Args:
        text: anything; its ``str`` is shown.
        limit: longest result in characters before it is cut with an ellipsis.

    Returns:
        A one-line string without control, format (RTL) or surrogate characters.
    """
    raw = str(text)
    cut = raw[:limit]
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in cut)
    return safe if len(raw) <= limit else safe + "…"


class Eagle3DiagError(Exception):
    """Root of all errors raised on purpose; ``str(error)`` is one printable line."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class CheckpointError(Eagle3DiagError):
    """A file or folder cannot be read as a checkpoint, config or dump."""


class UsageError(Eagle3DiagError):
    """The request itself makes no sense: unknown engine, option, layout or rule code."""
