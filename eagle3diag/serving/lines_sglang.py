"""SGLang's decode line, 0.4.6 to 0.5.23, as columns.

The line holds means over a window of steps and no counts: length (bonus token counted), since 0.5.4 a rate, requests in flight, tokens in
the cache, throughput. At first every line's rate, time and rank are read as well (``fine``); after that only what the sums need.
Source: engines.md 6 (managers/scheduler.py, scheduler_metrics_mixin.py, scheduler_components/metrics_reporter.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TIME", "Windows", "clock", "sglang_windows"]

#: requests, tokens, length (below 1 nothing was verified), rate, throughput; nothing in between holds a bracket, so a line cut by another
#: is not bridged
_LINE = re.compile(
    rb"#running-req: (\d+), #(?:full )?token: (\d+),(?:[^,\[\n]*,){1,12}? accept len: ([1-9]\d{0,5}\.\d\d),(?: accept rate: (\d+\.\d\d),)?"
    rb"[^\[(\n]*\(token/s\): (\d+\.\d+)"
)
#: the same without the rate, for the bulk of a long log
_BULK = re.compile(
    rb"#running-req: (\d+), #(?:full )?token: (\d+),(?:[^,\[\n]*,){1,12}? accept len: ([1-9]\d{0,5}\.\d\d),[^\[(\n]*\(token/s\): (\d+\.\d+)"
)
#: less than the whole line: a fragment, or a layout of another fork
_PART = re.compile(rb"(?<!block )accept len: ([1-9]\d{0,5}\.\d\d)(?:, accept rate: (\d+\.\d\d))?(?=[,\s]|$)")
_RUNNING = re.compile(rb"#running-req: (\d+)")
_TOKENS = re.compile(rb"#(?:full )?token: (\d+)")
_SPEED = re.compile(rb"\(token/s\): (\d+\.\d+)")
TIME = re.compile(rb"(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_RANK = re.compile(rb"\[[^\]\n]*?\d\d:\d\d:\d\d((?: (?:DP|PP|TP|EP)\d+)+)\]")
_MARK = b"accept len: "


@dataclass(slots=True)
class Windows:
    """One block of windows, one entry each.

    Attributes:
        length, running, tokens, speed: float64; NaN where not printed (``running`` is 1 then).
        pairs: (length, rate) as printed -> windows; the rate is empty where none is printed.
        times: seconds since the beginning of the year or None, one a window, or only the first and last window's.
        ranks: label -> indices, empty where not read.
    """

    length: NDArray[Any]
    running: NDArray[Any]
    tokens: NDArray[Any]
    speed: NDArray[Any]
    pairs: Counter[tuple[bytes, bytes]]
    times: Sequence[float | None] = ()
    ranks: dict[str, list[int]] = field(default_factory=dict)


def clock(match: re.Match[bytes] | None) -> float | None:
    """Seconds since the beginning of a leap year."""
    if match is None:
        return None
    month, day, hour, minute, second = map(int, match.groups())
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60):
        return None
    days = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)[month - 1] + day - 1
    return ((days * 24 + hour) * 60 + minute) * 60.0 + second


def sglang_windows(data: bytes, *, fine: bool) -> Windows | None:
    """The decode lines of a block; None where there are none."""
    if _MARK not in data:
        return None
    return _fine(data) if fine else _bulk(data)


def _bulk(data: bytes) -> Windows | None:
    rows = _BULK.findall(data)
    if not rows:
        return None
    import numpy as np

    running, tokens, length, speed = (np.fromiter(map(float, column), float, len(rows)) for column in zip(*rows, strict=True))
    ends = [clock(TIME.search(data)), clock(TIME.search(data, data.rfind(b"\n", 0, len(data) - 1) + 1))]
    times = ends if len(rows) > 1 else ends[:1]
    return Windows(length=length, running=np.maximum(running, 1.0), tokens=tokens, speed=speed, pairs=Counter(), times=times)


def _fine(data: bytes) -> Windows | None:
    """Line by line, with rate, time and rank, and what a fragment still says."""
    rows = _rows(data)
    if not rows:
        return None
    import numpy as np

    running, tokens, length, rate, speed, times, ranks = zip(*rows, strict=True)
    by_rank: dict[str, list[int]] = {}
    for i, label in enumerate(ranks):
        by_rank.setdefault(label.decode("ascii", "replace").strip(), []).append(i)
    return Windows(
        length=np.array(list(map(float, length))),
        running=np.maximum(np.array(list(map(float, running))), 1.0),
        tokens=np.array(list(map(float, tokens))),
        speed=np.array(list(map(float, speed))),
        pairs=Counter(zip(length, rate, strict=True)),
        times=times,
        ranks=by_rank,
    )


def _rows(data: bytes) -> list[tuple[Any, ...]]:
    out: list[tuple[Any, ...]] = []
    for line in data.split(b"\n"):
        if _MARK not in line:
            continue
        whole = _LINE.search(line)
        time, rank = clock(TIME.search(line)), _RANK.search(line)
        label = rank[1] if rank else b""
        if whole is not None:
            out.append((whole[1], whole[2], whole[3], whole[4] or b"", whole[5], time, label))
            continue
        part = _PART.search(line)
        if part is not None:
            one, two, three = _RUNNING.search(line), _TOKENS.search(line), _SPEED.search(line)
            numbers = (one[1] if one else b"1", two[1] if two else b"nan", part[1], part[2] or b"", three[1] if three else b"nan")
            out.append((*numbers, time, label))
    return out
