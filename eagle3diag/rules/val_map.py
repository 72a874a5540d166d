"""VAL, the vocabulary mapping: VAL304 to VAL307.

A map can go wrong in ways that look alike (absolute ids leave the vocabulary, hold no duplicates, and disagree with t2d all at once). So
the map is diagnosed once, the most specific explanation wins, and each rule speaks only for its own: one fault, one code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import is_eagle3, reduced_vocabulary, shape_of
from eagle3diag.rules.registry import finding, rule

if TYPE_CHECKING:
    import torch

__all__ = ["MapFacts", "diagnose", "map_facts"]

Fault = Literal["", "range", "absolute", "arange", "duplicate", "not-whole", "t2d", "empty", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapFacts:
    """The mapping as the file holds it.

    Attributes:
        d2t: whole numbers [draft vocabulary], int64, or None where absent, empty, or not whole numbers.
        t2d: mask [vocabulary], or None.
        vocab: size of the target vocabulary as the draft states it, None where unknown.
        draft: size of the draft vocabulary: rows of the head, else as configured, else length of d2t.
        reduced: whether the draft scores fewer tokens than the vocabulary has; None where unknown.
        names: names in the file of ``d2t`` and ``t2d``.
        problem: why ``d2t`` cannot be read as a map, or empty.
        beyond: the problem is whole numbers far outside any vocabulary.
    """

    d2t: torch.Tensor | None
    t2d: torch.Tensor | None
    vocab: int | None
    draft: int | None
    reduced: bool | None
    names: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    beyond: bool = False

    @property
    def ids(self) -> torch.Tensor | None:
        """Target ids by draft id, ``i + d2t[i]``."""
        import torch

        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t))


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is wrong with the map: the fault, in words, with numbers."""

    fault: Fault
    title: str = ""
    remedy: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    mild: bool = False


def map_facts(case: Case) -> MapFacts:
    """Reads d2t and t2d.

    Raises:
        CheckpointError: they cannot be read.
    """
    import torch

    names = {k: case.spec.canonical[k] for k in ("d2t", "t2d") if case.spec.canonical.get(k) in case.draft.tensors}
    raw = {k: case.draft.read(n).reshape(-1) for k, n in names.items()}
    head = shape_of(case, "lm_head.weight")
    stated = case.spec.draft_vocab_size.value
    d2t, problem = None, ""
    if "d2t" in raw and raw["d2t"].numel():
        values = raw["d2t"]
        if values.is_floating_point() or values.is_complex():
            wide = values.to(torch.float64)
            if not bool(torch.isfinite(wide).all()) or not bool((wide == wide.round()).all()) or float(wide.abs().max()) > 2**53:
                problem = f"{int((~(wide == wide.round())).sum()):,} of {wide.numel():,} entries are no whole numbers"
            else:
                d2t = wide.to(torch.int64)
        else:
            d2t = values.to(torch.int64)
    beyond = d2t is not None and (int(d2t.max()) > 2**40 or int(d2t.min()) < -(2**40))
    if d2t is not None and beyond:  # their sum with the index must not overflow
        problem, d2t = f"entries lie between {int(d2t.min())} and {int(d2t.max())}: bit patterns of other data", None
    t2d = raw["t2d"] != 0 if "t2d" in raw and raw["t2d"].numel() else None
    vocab = case.spec.vocab_size.value or (len(t2d) if t2d is not None else None)
    if vocab is None and case.target is not None:
        vocab = case.target.vocab_size.value
    draft = head[0] if head else stated if stated and stated > 0 else len(d2t) if d2t is not None else None
    reduced = draft < vocab if draft is not None and vocab is not None else reduced_vocabulary(case)
    return MapFacts(d2t=d2t, t2d=t2d, vocab=vocab, draft=draft, reduced=reduced, names=names, problem=problem, beyond=beyond)


def diagnose(m: MapFacts) -> Diagnosis:
    """The most specific explanation of what is wrong with a map; fault ``""`` where nothing is."""
    import torch

    if "d2t" not in m.names or (m.d2t is None and not m.problem):
        return _missing(m)
    if m.problem:
        title = f"d2t points outside the vocabulary: {m.problem}" if m.beyond else f"d2t cannot be a map of tokens: {m.problem}"
        return Diagnosis(fault="range" if m.beyond else "not-whole", title=title, remedy=_REBUILD, evidence={"problem": m.problem})
    d2t, ids = m.d2t, m.ids
    assert d2t is not None
    assert ids is not None
    n = len(d2t)
    if not bool(d2t.any()):
        # ids 0 .. n-1: right for a whole vocabulary, and for a mask that really is that prefix only by accident
        if not m.reduced or n < 2:
            return _against_t2d(m, ids) if m.reduced is False else Diagnosis(fault="")
        return Diagnosis(
            fault="empty",
            title=f"d2t is zero throughout although the draft scores {m.draft:,} of {m.vocab:,} tokens: "
            f"draft ids are taken for token ids 0 to {n - 1:,}",
            remedy=_from_t2d(m) or "Rebuild d2t as selected ids - arange from the training run's vocabulary mapping and save it again.",
            evidence={"d2t_nonzero": 0, "draft_vocab": m.draft, "vocab": m.vocab, "t2d_true": None if m.t2d is None else int(m.t2d.sum())},
        )
    chosen = None if m.t2d is None else m.t2d.nonzero().reshape(-1)
    if chosen is not None and torch.equal(ids.sort().values, chosen) and _in_range(ids, m.vocab):
        return _against_t2d(m, ids)
    absolute = _absolute(m, d2t, ids, chosen)
    if absolute is not None:
        return absolute
    outside = ~_inside(ids, m.vocab)
    if bool(outside.any()):
        first = int(outside.to(torch.uint8).argmax())
        limit = f"{m.vocab - 1:,}" if m.vocab else "…"
        return Diagnosis(
            fault="range",
            title=f"d2t sends {int(outside.sum()):,} of {n:,} draft ids outside the vocabulary 0 to {limit}: "
            f"id {first:,} goes to {first:,} + {int(d2t[first]):,} = {int(ids[first]):,}",
            remedy=_REBUILD,
            evidence={"outside": int(outside.sum()), "first": first, "lowest": int(ids.min()), "highest": int(ids.max()), "vocab": m.vocab},
        )
    values, counts = torch.unique(ids, return_counts=True)
    if len(values) < n:
        worst = int(counts.argmax())
        return Diagnosis(
            fault="duplicate",
            title=f"d2t sends {n - len(values):,} of {n:,} draft ids to a token another one has: "
            f"token {int(values[worst]):,} is reached {int(counts[worst]):,} times",
            remedy=_REBUILD,
            evidence={"duplicates": n - len(values), "token": int(values[worst]), "times": int(counts[worst]), "distinct": len(values)},
        )
    return _against_t2d(m, ids)


_REBUILD = "Rebuild it: d2t[i] = (target id of draft id i) - i, int64, from the training run's vocabulary mapping."


def _from_t2d(m: MapFacts) -> str:
    """The remedy where t2d holds the selection."""
    if m.t2d is None or m.draft is None or int(m.t2d.sum()) != m.draft or bool(m.t2d[: m.draft].all()):
        return ""
    return "t2d holds the selection: d2t = t2d.nonzero().flatten() - arange (if the trainer sorted the ids, as all but ModelOpt do)."


def _distinct(numbers: torch.Tensor) -> int:
    return len(set(numbers.tolist()))


def _inside(ids: torch.Tensor, vocab: int | None) -> torch.Tensor:
    return (ids >= 0) if vocab is None else (ids >= 0) & (ids < vocab)


def _in_range(ids: torch.Tensor, vocab: int | None) -> bool:
    return bool(_inside(ids, vocab).all())


def _missing(m: MapFacts) -> Diagnosis:
    if not m.reduced:
        return Diagnosis(fault="")
    there = "d2t" in m.names
    what = "d2t is empty" if there else "no d2t" if m.t2d is not None else "no vocabulary mapping (d2t)"
    return Diagnosis(
        fault="missing",
        title=f"{what} although the draft scores {m.draft or 0:,} of {m.vocab or 0:,} tokens: draft ids are taken for token ids",
        remedy=_from_t2d(m)
        or "Save d2t (and t2d) from the training run's vocabulary mapping with the weights; a side file is not read by any engine.",
        evidence={
            "draft_vocab": m.draft,
            "vocab": m.vocab,
            "d2t": "empty" if there else None,
            "t2d_true": None if m.t2d is None else int(m.t2d.sum()),
        },
    )


def _absolute(m: MapFacts, d2t: torch.Tensor, ids: torch.Tensor, chosen: torch.Tensor | None) -> Diagnosis | None:
    """Token ids (or a plain count) where offsets belong; None where the numbers do not say so.

    Offsets of sorted ids repeat wherever two neighbouring tokens were chosen, about n^2 / V times even for tokens picked at random; those
    of unsorted ids are partly negative. Token ids are distinct and never negative.
    """
    import torch

    n = len(d2t)
    if n < 2 or not _in_range(d2t, m.vocab):
        return None
    evidence: dict[str, Any] = {"first": d2t[:5].tolist(), "highest_id": int(ids.max()), "vocab": m.vocab}
    sound = _in_range(ids, m.vocab) and _distinct(ids) == n
    step = d2t[1:] - d2t[:-1]
    if chosen is not None and torch.equal(d2t.sort().values, chosen):
        proof = "t2d marks exactly these ids"
    elif torch.equal(d2t, torch.arange(n)):
        if sound and n < 16:
            return None
        return Diagnosis(
            fault="arange",
            title=f"d2t counts 0, 1, 2, … {n - 1:,}: as offsets that sends draft id i to token 2i",
            remedy="For a whole vocabulary d2t is all zero (or absent); for a reduced one it is selected ids - arange.",
            evidence=evidence,
        )
    elif _distinct(d2t) < n:
        return None
    elif not sound:
        proof = "they are distinct ids within the vocabulary; as offsets they leave it or repeat"
    elif chosen is None and m.vocab and n * n >= 12 * m.vocab and bool((step > 0).all()) and _distinct(step) > 1:
        proof = f"{n:,} ascending numbers without a repeat, where offsets of chosen tokens repeat"
    else:
        return None
    within = f" in a vocabulary of {m.vocab:,}" if m.vocab else ""
    return Diagnosis(
        fault="absolute",
        title=f"d2t holds token ids instead of offsets ({', '.join(map(str, d2t[:4].tolist()))} …): "
        f"as offsets they reach {int(ids.max()):,}{within}",
        remedy="Subtract the position: d2t = d2t - arange(len(d2t)), int64, and save again.",
        evidence=evidence | {"proof": proof},
    )


def _against_t2d(m: MapFacts, ids: torch.Tensor) -> Diagnosis:
    """A map sound by itself, compared with the mask."""
    if m.t2d is None:
        return Diagnosis(fault="")
    mask, n = m.t2d, len(ids)
    marked = int(mask.sum())
    kept = ids[(ids >= 0) & (ids < len(mask))]
    agree = int(mask[kept].sum())
    length = m.vocab is not None and len(mask) != m.vocab
    evidence: dict[str, Any] = {"t2d_true": marked, "draft_ids": n, "marked_of_them": agree, "t2d_length": len(mask), "vocab": m.vocab}
    if marked == n and agree == n:
        if not length:
            return Diagnosis(fault="")
        return Diagnosis(
            fault="t2d",
            title=f"t2d has {len(mask):,} entries for a vocabulary of {m.vocab:,}, though it marks the tokens d2t names",
            remedy="Engines ignore t2d; trainers that load the draft again do not: save it with the configured length.",
            evidence=evidence,
            mild=True,
        )
    if m.reduced is False and not bool((ids != ids.new_tensor(range(n))).any()) and marked in (0, len(mask)):
        return Diagnosis(fault="")  # whole vocabulary: a mask of ones or zeros (the buffers' start values) is never read
    if length and len(mask) == n:
        title = f"t2d has {len(mask):,} entries, one per draft id, where one per token of the vocabulary ({m.vocab:,}) belongs"
    elif marked != n:
        title = f"t2d marks {marked:,} tokens, d2t names {n:,}" + (f"; {agree:,} are the same" if agree != min(n, marked) else "")
    else:
        title = f"t2d marks other tokens than d2t names: {agree:,} of {n:,} agree" + _shift(ids, mask)
    return Diagnosis(
        fault="t2d",
        title=title,
        remedy="One of the two belongs to another mapping (a stale cache). Engines read d2t only: make sure it is the one trained with, "
        "and derive t2d from it.",
        evidence=evidence,
    )


def _shift(ids: torch.Tensor, mask: torch.Tensor) -> str:
    """``; they are d2t's ids + 1`` where one shift explains the difference."""
    size = len(mask)
    for by in (1, -1, 2, -2):
        if bool(mask[(ids + by) % size].all()):
            return f"; t2d's are d2t's {'+' if by > 0 else '-'} {abs(by)}"
    return ""


_kept: list[tuple[Case, Diagnosis]] = []


def _diagnosis(case: Case) -> Diagnosis:
    for known, d in _kept:
        if known is case:
            return d
    d = diagnose(map_facts(case)) if is_eagle3(case) or case.spec.algorithm == "peagle" else Diagnosis(fault="")
    _kept[:] = [(case, d)]
    return d


def _found(case: Case, code: str, faults: tuple[Fault, ...], where: str = "d2t") -> Iterator[Finding]:
    d = _diagnosis(case)
    if d.fault in faults:
        name = escaped(case.spec.canonical.get(where, where), 90)
        yield finding(
            code,
            d.title,
            severity=Severity.WARNING if d.mild else None,
            evidence={"tensor": name, **d.evidence},
            remedy=d.remedy,
            where=name,
        )


@rule("VAL304", severity=Severity.ERROR, needs=("values",))
def outside_vocabulary(case: Case) -> Iterator[Finding]:
    """The map d2t points outside the vocabulary.

    ## What is wrong
    Draft id i stands for target token i + d2t[i]; some of these are negative or beyond the last token.

    ## Why it costs acceptance
    An engine that indexes with them stops at the first use, or reads other memory and proposes wrong tokens.

    ## How it is detected
    i + d2t[i] for every entry, against `vocab_size`. Where the numbers are token ids instead of offsets, VAL305 says so instead.

    ## How to fix it
    Rebuild d2t from the training run's vocabulary mapping: selected token ids minus their positions, int64.

    ## Engine versions
    SGLang never looks; vLLM compares only the length, and fails with an index error at the first logits.

    ## Source
    Engines 2.4; loader runs, "shapes".
    """
    yield from _found(case, "VAL304", ("range",))


@rule("VAL305", severity=Severity.ERROR, needs=("values",))
def no_offsets(case: Case) -> Iterator[Finding]:
    """The map d2t holds absolute ids, duplicates, or a plain count instead of offsets.

    ## What is wrong
    Every engine adds the position: target = i + d2t[i]. Absolute token ids, or 0, 1, 2, …, then name other tokens; with duplicates two
    draft ids propose the same token and another is never proposed.

    ## Why it costs acceptance
    The draft may be right and is still misread: acceptance about 1.0 with absolute ids.

    ## How it is detected
    Absolute ids: t2d marks exactly the numbers in d2t; or they are distinct ids within the vocabulary while, taken as offsets, they leave
    it or repeat.
    A plain count: d2t equals 0, 1, 2, … and t2d does not mark every second token. Duplicates: two equal i + d2t[i]. Entries that are no
    whole numbers count here too. An order by frequency (ModelOpt) is no fault.

    ## How to fix it
    Absolute ids: subtract the position, d2t - arange. Otherwise rebuild d2t from the training run's vocabulary mapping.

    ## Engine versions
    All: target = i + d2t[i] in SGLang (`hot_token_id`) and vLLM (`draft_id_to_target_id`).

    ## Source
    Engines 2.4; dialects 2 and 5 (all five training frameworks write offsets).
    """
    yield from _found(case, "VAL305", ("absolute", "arange", "duplicate", "not-whole"))


@rule("VAL306", severity=Severity.ERROR, needs=("values",))
def masks_disagree(case: Case) -> Iterator[Finding]:
    """The mask t2d disagrees with d2t.

    ## What is wrong
    t2d marks the target tokens the draft can propose, d2t names them; they differ in number or in place.

    ## Why it costs acceptance
    Engines read only d2t. A t2d of another mapping shows that a stale vocabulary cache was mixed in, and the head was trained with one of
    the two: if that is not d2t, every proposal is the wrong token.

    ## How it is detected
    The set of i + d2t[i] against the positions where t2d is not zero, in any order. A t2d that is absent is fine, one of another length
    than the vocabulary that marks the right tokens is a warning. Silent where d2t by itself is faulty (VAL304, VAL305, VAL307).

    ## How to fix it
    Find out which mapping the head was trained with, take its d2t, and derive t2d from it.

    ## Engine versions
    All ignore t2d.

    ## Source
    Engines 2.4; speculators issues 602 and 1081 (stale `d2t.npy` and `t2d.npy` are used again).
    """
    yield from _found(case, "VAL306", ("t2d",), "t2d")


@rule("VAL307", severity=Severity.ERROR, needs=("values",))
def never_filled(case: Case) -> Iterator[Finding]:
    """The vocabulary mapping is missing or was never populated although the vocabulary is reduced.

    ## What is wrong
    The draft scores fewer tokens than the target has, and nothing says which: d2t is absent, empty, or all zero (its start value).

    ## Why it costs acceptance
    Draft ids are taken for token ids 0 to D - 1, so almost every proposal is another token: acceptance about 1.1.

    ## How it is detected
    Rows of the head (or `draft_vocab_size`) below `vocab_size`, and no entry of d2t other than zero. With a whole vocabulary an all-zero
    d2t is right.

    ## How to fix it
    Where t2d is there and the trainer sorts its ids (all but ModelOpt): d2t = t2d.nonzero().flatten() - arange. Otherwise take the
    mapping from the training run; a side file (`eagle_meta.pt`, `vocab_mapping.pt`) is read by no engine.

    ## Engine versions
    SGLang 0.4.5 to 0.4.8 stop; later ones and vLLM take draft ids for token ids without a word.

    ## Source
    Loader runs, "missing keys"; NeMo Automodel pull request 2447; EAGLE issue 222 (the all-zero map of a whole vocabulary).
    """
    yield from _found(case, "VAL307", ("empty", "missing"))
