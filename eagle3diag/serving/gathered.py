"""From sums to a result: the length over its best basis, k and where it comes from, SGLang's rate, the traps, the arithmetic checked."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

from eagle3diag.serving.launchlines import LaunchFacts, from_options
from eagle3diag.serving.lines_vllm import V0Line
from eagle3diag.serving.metrics import error_of, joint_of_histogram
from eagle3diag.serving.model import Launched, ServingLog, Training, Trap
from eagle3diag.serving.prometheus import Scrape, read_scrape
from eagle3diag.serving.rates import BONUS, DRAFTS, USUAL, RateReading, reading
from eagle3diag.serving.responses import Documents, read_document
from eagle3diag.serving.scripts import Stated
from eagle3diag.serving.tally import Tally

__all__ = ["Gathered"]

_INTERVAL = 40  # SGLang's --decode-log-interval, in steps
_KINDS = 64  # kinds of window length that are told apart in the result


class Gathered:
    """What the readers fill."""

    def __init__(self, path: str, files: tuple[str, ...], version: str | None = None) -> None:
        self.path, self.files, self.version = path, files, version
        self.tally, self.facts, self.documents, self.stated = Tally(), LaunchFacts(), Documents(), Stated()
        self.scrape: Scrape | None = None
        self.training: Training | None = None
        self.notes: list[str] = []
        self.v0: list[V0Line] = []
        self.bytes = 0
        self._speed = [0.0, 0.0, 0.0]  # tokens per second, running, windows

    def document(self, data: Any) -> int:
        """A JSON document; the number of records found."""
        return read_document(data, self.tally, self.documents)

    def scraped(self, text: str) -> None:
        """A scrape of metrics."""
        self.scrape = read_scrape(text, self.tally)

    def speeds(self, some: list[tuple[float, int]]) -> None:
        """vLLM's general line."""
        for speed, running in some:
            self._speed[0] += speed
            self._speed[1] += running
            self._speed[2] += 1

    # ------------------------------------------------------------------ the result
    def result(self) -> ServingLog:
        """Everything as one."""
        t = self.tally
        if self.v0 and not t.drafts:
            self._old_engine()
        launched, version, version_source = self._launched()
        bare = t.bare if t.bare[1] and not t.drafts else None
        if bare and launched.steps:
            t.add_one("vLLM line without a length", accepted=bare[0], drafts=bare[1] / launched.steps, drafted=bare[1], k=launched.steps)
            bare = None
        traps: list[Trap] = []
        engine = self._engine(launched)
        length, basis, error = self._length()
        rate, pairs = self._rate((version or self.version) if engine == "sglang" else None)
        k, k_source, possible = self._k(launched, rate)
        joint = self._joint(k)
        counted = basis == "counts"
        drafts = round(t.drafts) if counted else None
        mismatches = self._mismatches()
        if basis == "windows" and t.drafts:
            traps.append(Trap("foreign", _foreign(t), {"windows": t.windows, "drafts counted elsewhere": round(t.drafts)}))
        if rate is not None and rate.definition == "none":
            mismatches.append(_no_rate(rate, version or self.version))
        if any(b > a + 1e-6 for a, b in pairwise(joint)):
            mismatches.append(f"positions rise ({', '.join(f'{100 * p:.1f}' for p in joint[:8])} %): joint rates only fall")
        told = dict.fromkeys((f"{name} {n}" for name, n in t.formats.items()))
        log = ServingLog(
            path=self.path,
            files=self.files,
            formats=dict(t.formats),
            engine=engine,
            version=version,
            version_source=version_source,
            launched=launched,
            acceptance_length=length,
            basis=basis,
            error=error if error is not None or not counted else error_of(joint or (max(0.0, (length or 1.0) - 1),), t.drafts),
            accepted=round(bare[0]) if bare else round(t.accepted) if counted and t.drafts else None,
            drafted=round(bare[1]) if bare else self._drafted(k) if counted and t.drafts else None,
            drafts=drafts if t.drafts else None,
            estimated_drafts=round(t.weight * (launched.interval or _INTERVAL)) if basis == "windows" else None,
            k=k,
            k_source=k_source,
            k_possible=possible,
            per_position=joint if counted else (),
            histogram=tuple(t.histogram) if t.histogram and sum(t.histogram) == round(t.drafts) else None,
            rate_definition=rate.definition if rate is not None else "",
            printed_rate=_mean_rate(pairs),
            mean_of_windows=self._window_mean(basis),
            mean_of_requests=t.request_lengths[0] / t.request_lengths[1] if t.request_lengths[1] else None,
            requests=int(t.request_lengths[1]),
            windows=t.windows if basis == "windows" else t.lines or sum(t.formats.values()),
            lengths=_kinds(t.pairs) if basis == "windows" else {},
            throughput=self._throughput(basis),
            running=self._running(basis),
            by_engine=t.shares(),
            series=t.course.told(),
            contexts=t.contexts() if basis == "windows" else (),
            checked=t.lines
            + self.documents.checked
            + self.stated.checked
            + (self.scrape.checked if self.scrape else 0)
            + sum(pairs.values()),
            mismatches=tuple(mismatches),
            warnings=self.facts.warnings(),
            training=self.training,
            notes=tuple(self._told_notes(told)),
            bytes=self.bytes,
        )
        from eagle3diag.serving.traps import traps_of

        return replace(log, traps=(*traps, *traps_of(log, rate, self)))

    def _old_engine(self) -> None:
        """The last line of vLLM's V0 engine holds the totals; its rate counts matches after the first miss, the emitted tokens do not."""
        one = self.v0[-1]
        drafts = one.drafted / one.k if one.k else 0.0
        if drafts:
            self.tally.add_one("vLLM V0 line", accepted=max(0.0, one.emitted - drafts), drafts=drafts, drafted=one.drafted, k=one.k)

    def _launched(self) -> tuple[Launched, str | None, str]:
        found = self.facts.told()
        docs = self.documents
        if docs.options and not found.options:
            versions = {docs.engine: docs.version} if docs.engine and docs.version else {}
            found = from_options(docs.options, engine=docs.engine, source="server_info", versions=versions, starts=1)
        if self.scrape is not None and self.scrape.steps and found.steps is None:
            found = replace(found, steps=self.scrape.steps, draft_tokens=self.scrape.draft_tokens)
        return found, found.version, f"{found.source or 'a line of the log'}" if found.version else ""

    def _engine(self, launched: Launched) -> str | None:
        t = self.tally
        kinds = Counter({"sglang": 0, "vllm": 0})
        for name, n in t.formats.items():
            kinds["sglang" if name.startswith("SGLang") else "vllm" if name.startswith("vLLM") else "other"] += n
        by = kinds.most_common(1)[0]
        if by[1] and by[0] != "other":
            return by[0]
        return launched.engine or self.documents.engine

    def _length(self) -> tuple[float | None, Any, float | None]:
        """(length, basis, error where it is not one of counts)."""
        t = self.tally
        if t.drafts > 0 and t.lines + sum(n for f, n in t.formats.items() if f != "SGLang decode line") >= t.windows:
            return 1.0 + t.accepted / t.drafts, "counts", None
        if t.windows:
            mean = t.weighted / t.weight
            effective = t.weight**2 / t.weights2
            varies = max(0.0, t.squared / t.weight - mean * mean)
            return mean, "windows", max(math.sqrt(varies / max(1.0, effective - 1)), 0.005 / math.sqrt(effective))
        if t.drafts > 0:
            return 1.0 + t.accepted / t.drafts, "counts", None
        if self.documents.lifetime:
            return sum(self.documents.lifetime) / len(self.documents.lifetime), "lifetime", None
        if self.scrape is not None and self.scrape.lengths:
            return sum(self.scrape.lengths) / len(self.scrape.lengths), "stated", None
        if self.documents.bench:
            weight = sum(w for _, w, _ in self.documents.bench)
            return sum(x * w for x, w, _ in self.documents.bench) / weight, "stated", None
        if self.stated.lengths:
            return self.stated.lengths[-1], "stated", None
        return None, "counts", None

    def _rate(self, version: str | None) -> tuple[RateReading | None, dict[tuple[float, float], int]]:
        pairs: dict[tuple[float, float], int] = {}
        for (length, rate), n in self.tally.pairs.items():
            if rate:
                pairs[float(length), float(rate)] = pairs.get((float(length), float(rate)), 0) + n
        return (reading(pairs, version), pairs) if pairs else (None, pairs)

    def _k(self, launched: Launched, rate: RateReading | None) -> tuple[int | None, str, tuple[int, ...]]:
        t = self.tally
        if t.k and t.drafts:
            k, n = t.k.most_common(1)[0]
            others = tuple(sorted(x for x in t.k if x != k))
            why = "drafted / drafts" if not others else f"drafted / drafts in {n} of {sum(t.k.values())} records"
            return k, why, (k, *others) if others else ()
        if launched.steps is not None:
            return launched.steps, launched.source or "the launch", ()
        if launched.draft_tokens is not None and launched.topk in (None, 1):
            return launched.draft_tokens - 1, f"{launched.source or 'the launch'}: draft tokens - 1", ()
        if rate is not None and rate.tokens:
            possible = tuple(n - 1 for n in rate.tokens)
            if min(possible) >= USUAL:
                return None, "accept rate divides by too many tokens for a chain: a tree's", ()
            if len(possible) == 1:
                return possible[0], "accept rate and accept len", ()
            return None, "accept rate and accept len allow several", possible if len(possible) < 20 else ()
        return None, "", ()

    def _joint(self, k: int | None) -> tuple[float, ...]:
        t = self.tally
        if t.histogram and sum(t.histogram) == round(t.drafts):
            return joint_of_histogram(t.histogram)
        if t.position_drafts > 0 and t.position_drafts >= 0.99 * t.drafts:
            rates = [min(1.0, n / t.position_drafts) for n in t.at_position]
            return tuple(rates[:k] if k else rates)
        return ()

    def _drafted(self, k: int | None) -> int | None:
        t = self.tally
        if t.has_drafted:
            return round(t.drafted)
        return round(t.drafts * k) if k and len(t.k) == 1 else None

    def _window_mean(self, basis: str) -> float | None:
        t = self.tally
        if basis == "windows":
            return t.plain / t.windows
        return t.line_mean / t.lines if t.lines else None

    def _throughput(self, basis: str) -> float | None:
        t = self.tally
        if basis == "windows" and t.speeds:
            return t.speed / t.speeds
        if self._speed[2]:
            return self._speed[0] / self._speed[2]
        told = [s for _, _, s in self.documents.bench if s]
        return sum(told) / len(told) if told else self.scrape.speed if self.scrape else None

    def _running(self, basis: str) -> float | None:
        t = self.tally
        if basis == "windows" and t.speeds:
            return t.running / t.speeds
        return self._speed[1] / self._speed[2] if self._speed[2] else None

    def _mismatches(self) -> list[str]:
        out = list(self.tally.wrong) + self.documents.wrong + self.stated.wrong + (self.scrape.wrong if self.scrape else [])
        return out[:50]

    def _told_notes(self, formats: dict[str, None]) -> list[str]:
        notes = [f"read: {', '.join(formats)}"] if formats else []
        if self.facts.starts > 1:
            notes.append(f"the engine was started {self.facts.starts} times; the last start's options are used")
        if self.scrape is not None and self.scrape.unread:
            notes.append(f"{self.scrape.unread} lines of the metrics cannot be read (cut?)")
        if self.scrape is not None and self.scrape.restarts:
            notes.append("counters fell: the engine was restarted, both runs are summed")
        if self.documents.first_token:
            notes.append(
                f"{self.documents.first_token} requests without counts: completion_tokens / spec_verify_ct counts the "
                "token of the prefill too"
            )
        return [*notes, *self.notes]


def _kinds(pairs: Counter[tuple[bytes, bytes]]) -> dict[float, int]:
    out: Counter[float] = Counter()
    for (length, _), n in pairs.items():
        out[float(length)] += n
    return dict(sorted(out.items())) if len(out) <= _KINDS else {}


def _no_rate(rate: RateReading, version: str | None) -> str:
    """A rate that its version's definition does not give, with the definition that would."""
    told = "accept rate does not follow from accept len"
    other = next((d for d in (BONUS, DRAFTS) if rate.both[d]), None)
    if version is None or other is None:
        return f"{told} by any definition"
    when = "0.5.4 to 0.5.10, which counts the bonus token" if other == BONUS else "0.5.11 on, which leaves the bonus token out"
    return f"{told} as SGLang {version} defines it, but does as SGLang {when}: is that the version?"


def _mean_rate(pairs: dict[tuple[float, float], int]) -> float | None:
    total = sum(pairs.values())
    return sum(rate * n for (_, rate), n in pairs.items()) / total if total else None


def _foreign(t: Tally) -> str:
    other = ", ".join(f for f in t.formats if f != "SGLang decode line")
    return f"two engines' lines stand in this log: SGLang's are used, {other} left out"
