"""vLLM's ``SpecDecoding metrics`` line, every layout, as columns of counts.

``Accepted`` and ``Drafted`` are sums over the logging interval, the per-position rates joint. 0.8.5 prints a mean length without the bonus
token, 0.9.0 and later with it; 0.8.4 prints no length; the V0 engine printed another line whose rate counts matches after the first miss.
Source: vllm_transitions.md 4, engines.md 6 (v1/spec_decode/metrics.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eagle3diag.serving.lines_sglang import TIME, clock

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Counts", "V0Line", "throughputs", "v0_lines", "vllm_counts"]

_LINE = re.compile(
    rb"SpecDecoding metrics: (?:Draft acceptance rate: ([\d.na]+)%, )?(?:Mean acceptance length: ([\d.]+|nan), )?"
    rb"(?:Accepted throughput: [\d.]+ tokens/s, Drafted throughput: [\d.]+ tokens/s, )?"
    rb"Accepted: (\d{1,15}) tokens, Drafted: (\d{1,15}) tokens(?:, Per-position acceptance rate: (\d\.\d{3}(?:, \d\.\d{3})*))?"
    rb"(?:, Avg Draft acceptance rate: ([\d.na]+)%)?"
)
#: the three numbers that the sums need, for the bulk of a long log
_BULK = re.compile(rb"Accepted: (\d{1,15}) tokens, Drafted: (\d{1,15}) tokens, Per-position acceptance rate: ([\d., ]*\d)")
_ENGINE = re.compile(rb"Engine (\d+): $")
_THROUGHPUT = re.compile(rb"Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: ([\d.]+) tokens/s, Running: (\d+) reqs")
_V0 = re.compile(
    rb"Speculative metrics: Draft acceptance rate: ([\d.]+), System efficiency: ([\d.]+), Number of speculative tokens: (\d+), "
    rb"Number of accepted tokens: (\d+), Number of draft tokens: (\d+), Number of emitted tokens: (\d+)"
)
_PID = re.compile(rb"\((?:EngineCore|APIServer|Worker)[^\s)]*(?: pid=\d+)?\)")
_MARK = b"SpecDecoding metrics: "
_SLACK = 0.0051


@dataclass(slots=True)
class Counts:
    """One block of lines with one chain length, one entry each.

    Attributes:
        accepted, drafted, drafts: float64; ``drafts`` follows from the chain length, or where that does not fit from the printed mean.
        mean: as printed, NaN where not.
        positions: [lines, k] joint rates as printed; no columns where none are printed.
        k: chain length, None where the line does not tell.
        times: seconds since the beginning of the year or None.
        labels: engine -> indices.
        unbonused: lines whose printed mean leaves the bonus token out.
        wrong: lines whose numbers do not follow from each other, with how.
    """

    accepted: NDArray[Any]
    drafted: NDArray[Any]
    drafts: NDArray[Any]
    mean: NDArray[Any]
    positions: NDArray[Any]
    k: int | None
    times: Sequence[float | None] = ()
    labels: dict[str, list[int]] = field(default_factory=dict)
    unbonused: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class V0Line:
    """A line of the V0 engine, summed."""

    k: int
    accepted: int
    drafted: int
    emitted: int


def vllm_counts(data: bytes, *, fine: bool, last: bool = False) -> list[Counts]:
    """The metric lines of a block, one ``Counts`` for each chain length.

    Args:
        data: whole lines.
        fine: read every line's time and process too.
        last: the final line may be cut; it is dropped where its numbers do not follow from each other.
    """
    if _MARK not in data:
        return []
    if not fine:
        try:
            return _bulk(data)
        except ValueError:  # a line that is no number where one should stand
            pass
    rows = _fine(data)
    by_k: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        if row[3] != b"0":
            by_k.setdefault(row[4].count(b".") if row[4] else 0, []).append(row)
    out = [_of(some) for some in by_k.values()]
    if last and rows and rows[-1][3] != b"0":
        k = rows[-1][4].count(b".") if rows[-1][4] else 0
        usual = max(by_k, key=lambda n: len(by_k[n]))
        whole = bool(rows[-1][5])  # the last number of the line is there
        if k != usual or (not whole and _of([rows[-1]]).wrong):  # cut: what is left of it is no measurement
            by_k[k].pop()
            out = [_of(some) for some in by_k.values() if some]
    return out


def _bulk(data: bytes) -> list[Counts]:
    rows = _BULK.findall(data)
    if not rows:
        return []
    accepted, drafted, positions = zip(*rows, strict=True)
    if len(set(map(len, positions))) == 1:
        some = [(accepted, drafted, positions)]
    else:
        by_k: dict[int, list[tuple[bytes, bytes, bytes]]] = {}
        for row in rows:
            by_k.setdefault(len(row[2]), []).append(row)
        some = [tuple(zip(*group, strict=True)) for group in by_k.values()]  # type: ignore[misc]
    return [_columns(a, d, p, None) for a, d, p in some if any(x != b"0" for x in d)]


def _fine(data: bytes) -> list[tuple[Any, ...]]:
    out = []
    for m in _LINE.finditer(data):
        start = data.rfind(b"\n", 0, m.start()) + 1
        named = _ENGINE.search(data, max(start, m.start() - 24), m.start())
        process = None if named else _PID.search(data, start, m.start())
        label = named[1] if named else process[0] if process else b""
        out.append((*(g or b"" for g in m.groups()), clock(TIME.search(data, start, m.start())), label))
    return out


def _of(rows: list[tuple[Any, ...]]) -> Counts:
    """Lines of one chain length, with all they say."""
    old, mean, accepted, drafted, positions, share, times, labels = zip(*rows, strict=True)
    out = _columns(accepted, drafted, positions, (old, mean, share))
    out.times = times
    for i, label in enumerate(labels):
        name = label.decode("ascii", "replace")
        out.labels.setdefault(f"Engine {name}" if name.isdigit() else name.strip("()"), []).append(i)
    return out


def _columns(accepted: Sequence[bytes], drafted: Sequence[bytes], positions: Sequence[bytes], told: tuple[Any, Any, Any] | None) -> Counts:
    import numpy as np

    n, k = len(accepted), positions[0].count(b".")
    a, d = np.fromiter(map(float, accepted), float, n), np.fromiter(map(float, drafted), float, n)
    rates = np.zeros((n, 0))
    if k:
        rates = _rates(b", ".join(positions), n * k).reshape(n, k)
    mean, was_old = np.full(n, np.nan), np.zeros(n, bool)
    if told is not None:
        mean = np.fromiter((float(m or b"nan") for m in told[1]), float, n)
        was_old = np.fromiter((bool(o) for o in told[0]), bool, n)
    drafts, unbonused, wrong = _drafts(k, a, d, mean, rates, was_old)
    if told is not None:
        share = np.fromiter((float(one or two or b"nan") for one, two in zip(told[0], told[2], strict=True)), float, n)
        wrong |= np.abs(100 * a / np.maximum(d, 1) - share) > 0.0501
    bad = np.flatnonzero(wrong)
    words = [_words(accepted[i], drafted[i], told[1][i] if told else b"", positions[i]) for i in bad[:20]]
    return Counts(
        accepted=a,
        drafted=d,
        drafts=drafts,
        mean=mean,
        positions=rates,
        k=k or None,
        unbonused=int(unbonused.sum()),
        wrong=words + ["…"] * max(0, len(bad) - 20),
    )


def _rates(text: bytes, n: int) -> NDArray[Any]:
    """``0.812, 0.610, ...`` as numbers; at once where each has the usual three places."""
    import numpy as np

    if len(text) == 7 * n - 2:
        letters = np.frombuffer(text + b", ", np.uint8).reshape(n, 7)
        digits = letters[:, (0, 2, 3, 4)] - np.uint8(48)
        if (letters[:, 1] == 46).all() and (letters[:, 5] == 44).all() and (digits < 10).all():
            return np.asarray((digits @ np.array((1000.0, 100.0, 10.0, 1.0))) / 1000.0)
    return np.fromiter(map(float, text.split(b", ")), float, n)


def _drafts(k: int, a: Any, d: Any, mean: Any, rates: Any, old: Any) -> tuple[Any, Any, Any]:
    """Verifications of each line, whether its mean leaves the bonus token out, whether its numbers contradict each other.

    Chains may be shorter than the number of positions printed, so that drafted / k is only the first guess: the mean decides, and the
    positions, which share the denominator.
    """
    import numpy as np

    guess = d / k if k else np.full(len(a), np.nan)
    per = a / np.where(guess > 0, guess, np.nan)
    plus, minus = np.abs(mean - 1 - per) <= _SLACK, np.abs(mean - per) <= _SLACK
    unbonused = old & minus & ~plus
    known = np.where(unbonused, mean, mean - 1)
    total = rates.sum(1) if k else np.full(len(a), np.nan)
    # a shorter chain now and then: the positions or the mean give the verifications
    by_sum = np.where(total > 0, a / np.where(total > 0, total, np.nan), np.nan)
    by_mean = np.where(known > 0.02, a / np.where(known > 0.02, known, np.nan), np.nan)
    slack = _SLACK + 0.0006 * k
    agree = np.abs(np.where(np.isnan(known), per, known) - per) <= _SLACK
    agree &= (np.abs(total - per) <= slack) | np.isnan(total)
    other = np.where(np.isnan(by_sum), by_mean, by_sum)
    variable = ~agree & (other >= guess * 0.999) & (np.abs(np.where(np.isnan(known), total, known) - total) <= slack) & (k > 0)
    drafts = np.where(agree | np.isnan(other), guess, np.where(variable | np.isnan(guess), other, guess))
    wrong = (~agree & ~variable & ~np.isnan(per)) | (a > d)
    drafts = np.where(np.isnan(drafts), by_mean, drafts)
    drafts = np.where(a > d, 0.0, drafts)  # no verification accepts more than was drafted: reported, and left out of the sums
    return drafts, unbonused, wrong


def _words(accepted: bytes, drafted: bytes, mean: bytes, positions: bytes) -> str:
    told = f"accepted {accepted.decode()}, drafted {drafted.decode()}" + (f", mean length {mean.decode()}" if mean else "")
    return told + (f", positions {positions.decode()}" if positions else "")


def throughputs(data: bytes) -> list[tuple[float, int]]:
    """(generated tokens per second, running requests) of vLLM's general line, idle ones left out."""
    if b"Avg generation throughput" not in data:
        return []
    return [(float(t), int(n)) for t, n in _THROUGHPUT.findall(data) if float(t) > 0 and int(n) > 0]


def v0_lines(data: bytes) -> list[V0Line]:
    """Lines of the V0 engine; each holds totals since the start."""
    if b"Speculative metrics: " not in data:
        return []
    return [V0Line(int(k), int(a), int(d), int(e)) for _, _, k, a, d, e in _V0.findall(data)]
