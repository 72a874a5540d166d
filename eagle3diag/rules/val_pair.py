"""VAL, comparisons: the draft's tables with the target's (VAL308, VAL309), and a draft with another one (VAL310).

Tables are compared on up to a thousand rows; of a whole target that is a thousand spread over the vocabulary, of the portable sample
those it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from eagle3diag.checkpoint.model import Checkpoint, TargetSpec
from eagle3diag.checkpoint.names import canonical_name
from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.registry import finding, rule
from eagle3diag.rules.val_map import diagnose, map_facts
from eagle3diag.weights.fresh import freshness, spread
from eagle3diag.weights.related import Relation, relation
from eagle3diag.weights.scan import nearest_rows, sampled_rows

if TYPE_CHECKING:
    import torch

__all__ = ["unrelated_counterpart", "unrelated_embedding", "unrelated_head"]

_ROWS = 1024
_FLOATS = ("F64", "F32", "F16", "BF16")


def _table(target: TargetSpec | None, which: Literal["embed", "head"]) -> tuple[Checkpoint, str]:
    """The target's checkpoint and the name of its table.

    Raises:
        CheckpointError: it is not there, so there is nothing to compare with.
    """
    name = None if target is None else target.embed if which == "embed" else target.head
    if target is None or target.checkpoint is None or name is None or name not in target.checkpoint.tensors:
        what = "embedding" if which == "embed" else "head"
        raise CheckpointError(f"{target.path if target else 'target'}: the target's {what} is not there; give a folder with its weights")
    dtype = target.checkpoint.tensors[name].dtype
    if dtype not in _FLOATS or len(target.checkpoint.tensors[name].shape) != 2:
        raise CheckpointError(f"{target.path}: the target's {escaped(name)} is {escaped(dtype)}, which cannot be compared")
    return target.checkpoint, name


def _comparable(case: Case, canonical: str, source: Checkpoint, name: str) -> str | None:
    """The draft's table by its name in the file; None where it has none.

    Raises:
        CheckpointError: the two cannot be compared (width, dtype).
    """
    mine = case.spec.canonical.get(canonical)
    if mine is None or mine not in case.draft.tensors:
        return None
    info, theirs = case.draft.tensors[mine], source.tensors[name]
    if info.dtype not in _FLOATS or len(info.shape) != 2:
        raise CheckpointError(f"{case.draft.path}: {escaped(mine)} is {escaped(info.dtype)} {list(info.shape)}, which cannot be compared")
    if info.shape[1] != theirs.shape[1]:
        raise CheckpointError(
            f"{escaped(mine)} is {info.shape[1]:,} wide, the target's {escaped(name)} {theirs.shape[1]:,}: they cannot be compared"
        )
    return mine


def _rows_of(target: TargetSpec, source: Checkpoint, name: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the target's table for some tokens: float32 [n, width], and the positions in ``tokens`` [n] they belong to."""
    import torch

    if target.rows:
        listed = source.read("token_ids").to(torch.int64)
        at = torch.full((int(max(listed.max(), tokens.max())) + 1,), -1, dtype=torch.int64)
        at[listed] = torch.arange(len(listed))
        row = at[tokens]
    else:
        row = torch.where(tokens < source.tensors[name].shape[0], tokens, torch.full_like(tokens, -1))
    position = (row >= 0).nonzero().reshape(-1)
    position = position[torch.tensor(spread(len(position), _ROWS), dtype=torch.int64)]
    order = row[position].argsort()
    position = position[order]
    return sampled_rows(source, name, row[position].tolist()), position


def _numbers(r: Relation) -> dict[str, Any]:
    return {
        "rows": r.rows,
        "median_cosine": round(r.median, 4),
        "cosine_of_other_rows": round(r.chance, 4),
        "scale": round(r.scale, 4),
        **({"neighbourhoods": round(r.arranged, 3)} if r.kind in ("rearranged", "unrelated") else {}),
    }


@rule("VAL308", severity=Severity.WARNING, needs=("values", "target"))
def unrelated_embedding(case: Case) -> Iterator[Finding]:
    """The draft's embedding differs from the target's: random, or trained on purpose.

    ## What is wrong
    The draft brings its own embedding. Equal to the target's it is redundant; trained further it is right only in an engine that keeps it;
    random it is right nowhere.

    ## Why it costs acceptance
    Engines decide by their own rule whose embedding is used (ENG505). A trained one that is replaced costs acceptance, a random one that
    is kept costs all of it.

    ## How it is detected
    Cosine of the draft's rows with the target's, token by token, on up to 1,024 rows. Equal up to rounding: nothing. Same directions:
    trained from the target's. Else unrelated; then independence (VAL303) tells a random table from one trained from scratch. Information
    where the config says `embed_requires_grad` or the draft is a P-EAGLE one, whose embedding is trained; a warning otherwise.

    ## How to fix it
    Trained on purpose: serve it with an engine that keeps it. Random: delete `embed_tokens.weight` from the file, every engine then takes
    the target's; or copy the target's table.

    ## Engine versions
    SGLang overwrites it (unless `target_hidden_size` is set and differs), vLLM keeps what is not equal to the target's.

    ## Source
    Engines 2.3; public reports of overwritten and of random embeddings.
    """
    import torch

    source, name = _table(case.target, "embed")
    mine = _comparable(case, "embed_tokens.weight", source, name)
    if mine is None or case.target is None:
        return
    theirs, tokens = _rows_of(case.target, source, name, torch.arange(case.draft.tensors[mine].shape[0]))
    own = sampled_rows(case.draft, mine, tokens.tolist())
    r = relation(own, theirs)
    if r.kind in ("equal", "unknown"):
        return
    flag = case.draft.config.get("embed_requires_grad") is True
    shown = escaped(mine, 90)
    evidence = {"tensor": shown, "embed_requires_grad": flag, **_numbers(r)}
    if r.kind == "drifted":
        yield finding(
            "VAL308",
            f"{shown} was trained from the target's: median cosine {r.median:.3f} with the target's rows",
            severity=Severity.INFO if flag or case.spec.algorithm == "peagle" else None,
            evidence=evidence,
            remedy="Serve it with an engine that keeps the draft's embedding; if it was not meant to be trained, delete it from the file.",
            where=mine,
        )
        return
    f = freshness(own)
    random = f.verdict in ("fresh", "garbage")
    kind = (
        "is random"
        if random
        else "is unrelated to the target's, trained from scratch"
        if r.kind == "rearranged"
        else "is unrelated to the target's"
    )
    yield finding(
        "VAL308",
        f"{shown} {kind}: median cosine {r.median:.3f} with the target's rows, {r.chance:.3f} with other rows",
        severity=Severity.INFO if (flag or case.spec.algorithm == "peagle") and r.kind == "rearranged" and not random else None,
        evidence=evidence | {"values": f.why, "std": float(f"{f.std:.4g}")},
        remedy="Delete it from the file, so that every engine takes the target's, or copy the target's table."
        if random
        else "Make sure target and tokenizer are those the draft was trained with; then use an engine that keeps the draft's embedding.",
        where=mine,
    )


@rule("VAL309", severity=Severity.WARNING, needs=("values", "target"))
def unrelated_head(case: Case) -> Iterator[Finding]:
    """The draft's lm_head is unrelated to the target's rows that the map selects.

    ## What is wrong
    Row i of the head should belong to token i + d2t[i]: a copy of the target's row, one trained from it, or one trained from scratch.
    Here it belongs to no such token, or demonstrably to another.

    ## Why it costs acceptance
    The draft scores one token and the engine proposes another: acceptance about 1.0.

    ## How it is detected
    Cosine of the head's rows with the target's rows of the same tokens, on up to 1,024 rows, against rows of other tokens. Where they are
    no
    closer, 32 rows are looked up in the whole target table: rows found at other tokens (cosine above 0.9) are an error, and are named.
    A head trained from scratch has another basis and no cosine, but its rows lie together where the target's do: the correlation of
    pairwise cosines, six standard deviations above that of shuffled rows, clears it. Silent where the map itself is faulty or the head is
    freshly initialised (VAL303 to VAL307 speak for those).

    ## How to fix it
    The head and d2t come from different mappings or targets: take both from the same checkpoint of the training run.

    ## Engine versions
    All: no engine compares.

    ## Source
    speculators >= 0.5 freezes the head as the verifier's rows[t2d] (`model.py:70-71, 206-208`); other trainers train it.
    """
    import torch

    source, name = _table(case.target, "head")
    mine = _comparable(case, "lm_head.weight", source, name)
    if mine is None or case.target is None:
        return
    m = map_facts(case)
    if diagnose(m).fault not in ("", "t2d"):
        return
    rows = case.draft.tensors[mine].shape[0]
    ids = m.ids if m.ids is not None else torch.arange(rows)
    if len(ids) != rows or int(ids.min()) < 0:
        return
    theirs, draft_ids = _rows_of(case.target, source, name, ids)
    order = draft_ids.argsort()
    draft_ids, theirs = draft_ids[order], theirs[order]
    own = sampled_rows(case.draft, mine, draft_ids.tolist())
    r = relation(own, theirs)
    if r.kind not in ("unrelated", "rearranged") or freshness(own).verdict in ("fresh", "garbage"):
        return
    shown = escaped(mine, 90)
    few = torch.tensor(spread(len(own), 32), dtype=torch.int64)
    best, at = nearest_rows(source, name, own[few])
    found = at if not case.target.rows else source.read("token_ids").to(torch.int64)[at]
    elsewhere = (best > 0.9) & (found != ids[draft_ids[few]])
    evidence = {"tensor": shown, "target": escaped(name), **_numbers(r)}
    if int(elsewhere.sum()) >= max(3, len(few) // 10):
        i = int(elsewhere.to(torch.uint8).argmax())
        d = int(draft_ids[few[i]])
        yield finding(
            "VAL309",
            f"{shown} holds the target's rows of other tokens: row {d:,} is token {int(found[i]):,}'s, d2t makes it token {int(ids[d]):,}",
            severity=Severity.ERROR,
            evidence=evidence | {"looked_up": len(few), "found_elsewhere": int(elsewhere.sum())},
            remedy="Head and d2t belong to different mappings: take both from the same checkpoint of the training run.",
            where=mine,
        )
        return
    if r.kind == "rearranged":
        return
    yield finding(
        "VAL309",
        f"{shown} is unrelated to the target's rows: median cosine {r.median:.3f}, with other rows {r.chance:.3f}",
        evidence=evidence,
        remedy="Make sure target, tokenizer and d2t are those the draft was trained with.",
        where=mine,
    )


@rule("VAL310", severity=Severity.WARNING, needs=("values", "other"))
def unrelated_counterpart(case: Case) -> Iterator[Finding]:
    """A tensor is unrelated to its counterpart in the compared checkpoint.

    ## What is wrong
    Two files of one draft (before and after a conversion, two epochs) agree in most matrices, and in one they have nothing in common.

    ## Why it costs acceptance
    A converter that loses a tensor saves its start value instead: see VAL303.

    ## How it is detected
    Cosine of every matrix with its counterpart, renames understood. A finding where it is below 0.05 while another matrix of `fc` or the
    decoder layers is above 0.5. Where all of these are unrelated, the two are different training runs: information. Head and embedding
    are no evidence for kinship, since both may be the target's.

    ## How to fix it
    Convert again and compare: the tensor of the source stands under a name the converter does not know.

    ## Engine versions
    All: the file is wrong, not the engine.

    ## Source
    speculators pull request 360 (a lost rename left the decoder layer random).
    """
    from eagle3diag.weights.diff import diff

    if case.other is None:
        return
    d = diff(case.draft, case.other, values=True)
    guessed = {r.before for r in d.renamed if r.by == "shape and position"}
    meaning = {file: canonical for canonical, file in case.spec.canonical.items()}
    kin: list[tuple[str, float]] = []
    strangers: list[tuple[str, str, float]] = []
    for v in d.values:
        info = case.draft.tensors.get(v.name)
        canonical = meaning.get(v.name) or canonical_name(v.name)
        flat = info is not None and (len(info.shape) < 2 or info.dtype not in _FLOATS)
        if v.cosine is None or flat or v.name in guessed or ".bias" in canonical:
            continue
        trained_here = canonical.startswith(("fc.", "layers."))
        if v.cosine > 0.5 and trained_here:
            kin.append((v.name, v.cosine))
        elif abs(v.cosine) < max(0.05, 5 / max(v.elements, 1) ** 0.5):
            strangers.append((v.name, canonical, v.cosine))
    if not strangers:
        return
    names = ", ".join(escaped(n, 90) for n, _, _ in strangers[:4]) + (f" and {len(strangers) - 4} more" if len(strangers) > 4 else "")
    evidence = {
        "unrelated": {escaped(n, 90): round(c, 4) for n, _, c in strangers[:100]},
        "related": {escaped(n, 90): round(c, 4) for n, c in kin[:100]},
        "other": escaped(case.other.path, 200),
    }
    if kin:
        yield finding(
            "VAL310",
            f"{names}: unrelated to the other checkpoint (cosine {strangers[0][2]:.3f}), while {len(kin)} matrices agree",
            evidence=evidence,
            remedy="One of the two lost it: see which looks freshly initialised (VAL303), and convert again.",
            where=strangers[0][0],
        )
    else:
        yield finding(
            "VAL310",
            f"nothing in common with the other checkpoint ({len(strangers)} matrices compared): another training run",
            severity=Severity.INFO,
            evidence=evidence,
            remedy="Compare with the checkpoint this one was made from.",
        )
