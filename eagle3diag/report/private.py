"""A report is passed on: it must not tell whose machine made it. The home folder becomes ``~`` in everything that leaves."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["shared", "without_home"]


@cache
def _pattern(home: str) -> re.Pattern[str] | None:
    spelled = {home, str(Path(home).resolve())} | {home.replace("\\", "\\\\")}
    known = sorted((s.rstrip("/\\") for s in spelled if len(Path(s).parts) > 1), key=len, reverse=True)
    if not known:
        return None
    return re.compile(rf"(?<![\w.\-])(?:{'|'.join(map(re.escape, known))})(?![\w.\-])")


def without_home(text: str) -> str:
    """``text`` with every path below the home folder beginning with ``~``."""
    pattern = _pattern(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises where there is none
    return text if pattern is None else pattern.sub("~", text)


def shared(data: Any) -> Any:
    """Plain data (mappings, lists, text) with `without_home` applied to all text in it, keys included."""
    if isinstance(data, str):
        return without_home(data)
    if isinstance(data, dict):
        return {shared(k): shared(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [shared(v) for v in data]
    return data
