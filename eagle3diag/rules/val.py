"""VAL: what the values of the tensors say. NaN and constants, matrices nobody trained; the vocabulary mapping and the comparisons follow
in `val_map` and `val_pair`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eagle3diag.errors import escaped
from eagle3diag.rules import val_map, val_pair  # registers VAL304 to VAL310
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.registry import finding, rule
from eagle3diag.rules.val_look import STRONG, Look, Suspect, group_of, looks, replaced, suspects, trained_by

__all__ = ["constant", "fresh", "not_finite", "val_map", "val_pair"]

BF16_STEP = 2**-7  #: from 1 to the next larger BF16 number

_MOST = 12  # findings of one kind before the rest is summed up


@rule("VAL301", severity=Severity.ERROR, needs=("values",))
def not_finite(case: Case) -> Iterator[Finding]:
    """A tensor holds NaN or infinite values.

    ## What is wrong
    One element that is NaN or infinite is enough: every hidden state that meets it becomes NaN, and with it all logits of the draft.

    ## Why it costs acceptance
    The draft's top token no longer depends on its input. Nothing is accepted, or, where an engine compares against NaN, everything: the
    acceptance length is 1 or exactly k + 1.

    ## How it is detected
    Minimum and maximum of every floating-point tensor; where they are not finite, NaN and infinities are counted and the first is located.
    A warning where the engine puts the target's tensor in place of this one.

    ## How to fix it
    Go back to a checkpoint before the loss became NaN. An embedding or head that is NaN throughout was never filled: speculators
    initialises both with NaN and fills them from the verifier, so save after that step, or copy the target's rows.

    ## Engine versions
    All: no engine looks.

    ## Source
    speculators 0.9 `models/eagle3/model.py:73-76` (unfilled embedding and head are NaN); public report of acceptance 1 or k + 1 with NaN
    logits.
    """
    bad = [k for k in looks(case) if k.scan.nan or k.scan.inf]
    for look in bad[:_MOST]:
        s = look.scan
        what = " and ".join(
            f"{n:,} {word}" for n, word in ((s.nan, "NaN"), (s.inf, "infinite values" if s.inf > 1 else "infinite value")) if n
        )
        share = (s.nan + s.inf) / s.info.numel
        whole = share > 0.5 and look.role in ("embed", "head")
        instead = replaced(case, look)
        yield finding(
            "VAL301",
            f"{escaped(look.name, 90)} holds {what}" + (" throughout: it was never filled" if whole else f", the first at {s.place}"),
            severity=Severity.WARNING if instead else None,
            evidence={
                "tensor": escaped(look.name, 90),
                "shape": list(s.info.shape),
                "nan": s.nan,
                "inf": s.inf,
                "first": s.place,
                "share": share,
                **({"note": instead} if instead else {}),
            },
            remedy="Save it again after it was filled from the target, or copy the target's rows."
            if whole
            else "Take an earlier checkpoint, from before the loss became NaN, or repair the tensor from one.",
            where=look.name,
        )
    if len(bad) > _MOST:
        rest = bad[_MOST:]
        yield finding(
            "VAL301",
            f"{len(rest)} more tensors hold NaN or infinite values",
            evidence={"tensors": [escaped(k.name, 90) for k in rest[:100]]},
            remedy="Take an earlier checkpoint, from before the loss became NaN.",
        )


@rule("VAL302", severity=Severity.ERROR, needs=("values",))
def constant(case: Case) -> Iterator[Finding]:
    """A weight is all zero or constant.

    ## What is wrong
    Every element of a matrix, or of a norm, has the same value. A norm of ones is no fault (it may have been trained in a precision
    in which it cannot move), nor is a bias of zeros.

    ## Why it costs acceptance
    A projection of zeros takes its block out of the draft (attention or MLP give nothing); zeros in `fc` or the head leave no information
    at all; a norm of zeros silences what follows it.

    ## How it is detected
    Minimum equals maximum over a matrix or a norm. A warning where at least a quarter of the rows or columns of `fc` or an MLP matrix is
    zero (a part that was never written), where a norm is constant but neither zero nor one, and where the engine replaces the tensor.

    ## How to fix it
    Find the tensor in the training run's own file: zeros are what a sharded save leaves of parameters it did not gather, and what an
    allocation leaves that nobody fills. Convert again with a converter that refuses to leave a parameter out.

    ## Engine versions
    All: no engine looks.

    ## Source
    Arithmetic of the forward pass; loaders allocate with `torch.empty`, whose memory often is zero.
    """
    every = sorted(_constants(case), key=lambda f: f.severity.rank)
    yield from every[:_MOST]
    if len(every) > _MOST:
        rest = every[_MOST:]
        yield finding(
            "VAL302",
            f"{len(rest)} more tensors are constant or zero in part",
            severity=rest[0].severity,
            evidence={"tensors": [escaped(f.where, 90) for f in rest[:100]]},
            remedy="Take them from the training run's own checkpoint.",
        )


def _constants(case: Case) -> Iterator[Finding]:
    """One finding a tensor, in file order."""
    for look in looks(case):
        s = look.scan
        if (
            look.role == "mapping"
            or (look.role == "other" and len(s.info.shape) < 2)
            or "scale" in look.canonical
            or "zero_point" in look.canonical
        ):
            continue
        name = escaped(look.name, 90)
        instead = replaced(case, look)
        about: dict[str, Any] = {"tensor": name, "shape": list(s.info.shape), **({"note": instead} if instead else {})}
        if s.constant and not look.ones and not (look.role == "other" and s.info.numel <= 4096):
            value = "zero" if s.low == 0 else f"{s.low:.6g}"
            milder = bool(instead) or (look.role == "norm" and s.low != 0)
            yield finding(
                "VAL302",
                f"{name} is {value} everywhere" + (f" ({s.info.numel:,} elements)" if s.low == 0 else ""),
                severity=Severity.WARNING if milder else None,
                evidence=about | {"value": s.low, "elements": s.info.numel},
                remedy="Take the tensor from the training run's own checkpoint; nothing trained is constant.",
                where=look.name,
            )
        elif look.ones and len(s.info.shape) >= 2:
            yield finding(
                "VAL302",
                f"{name} is one everywhere ({s.info.numel:,} elements)",
                evidence=about | {"value": 1.0, "elements": s.info.numel},
                remedy="Take the tensor from the training run's own checkpoint; nothing trained is constant.",
                where=look.name,
            )
        elif (look.role == "fc" or ".mlp." in look.canonical) and max(s.zero_rows, s.zero_columns) >= 0.25:
            side, share = ("rows", s.zero_rows) if s.zero_rows >= s.zero_columns else ("columns", s.zero_columns)
            yield finding(
                "VAL302",
                f"{share:.0%} of the {side} of {name} are zero: a part of it was never written",
                severity=Severity.WARNING,
                evidence=about | {f"zero_{side}": share},
                remedy="Compare with the training run's own checkpoint; the zero part takes no part in the forward pass.",
                where=look.name,
            )


@rule("VAL303", severity=Severity.ERROR, needs=("values",))
def fresh(case: Case) -> Iterator[Finding]:
    """A weight looks freshly initialised: never trained, or never loaded by a converter.

    ## What is wrong
    The values are what an initialiser leaves (independent draws from a normal or uniform law, norms exactly one) or what unfilled memory
    holds. A converter that does not know a name keeps the model's own start value, reports success, and saves it.

    ## Why it costs acceptance
    A random decoder layer or fusion layer destroys the features the rest was trained on: acceptance length about 1.0. One random matrix
    is enough.

    ## How it is detected
    Independence is tested, not typical numbers: mean, skew, tail, spread of row and column norms, row and column means, correlation of
    rows, and the largest eigenvalue against the Marchenko-Pastur edge, each as a z value under independent draws. All must stay within 6
    (the eigenvalue within -8 and 9) for a matrix to count as fresh: any initialiser, scale, dtype and shape passes, nothing well trained
    does. Of 11,772 simulated initialisations from 16 x 512 to 8192 x 2048 none left these limits; the least conspicuous matrix of a
    draft trained on as little as 58,400 tokens has its eigenvalue at 1,100. Up to 1,024 rows and 4,096 columns spread over the matrix
    are looked at; fewer than 4,096 elements are not judged. `orthogonal_` alone draws no independent elements: it is known by rows that
    are perpendicular and of one length but for rounding, in matrices no taller than wide.
    After a training of a few dozen steps a matrix may still look fresh, so the surroundings decide. One among trained ones is an error
    where those are far from noise (median strength of 2: singular value three times the noise edge, or row norms that vary by 30 %, or
    excess kurtosis 2); where they are not, it is a warning if its law and scale are those of a known initialiser to half a per cent, else
    information. Where no matrix was trained, it is an error if law and scale of four in five are those of one initialiser, and information
    if the norms moved, but so little that the matrices need not show it. Norms that are exactly one support the verdict; alone they are
    a warning where the matrices or other norms are well trained (a converter lost them, or pure BF16 froze them), else information.
    Values beyond 64, or vanishing ones, are bit patterns of other data, and an error.
    The embedding is never more than a warning here, since engines may take the target's; with the target's table at hand, VAL308 judges it.

    ## How to fix it
    Look in the source checkpoint for the tensor under another name (`midlayer.*` for `layers.0.*`), rename it, and convert again:
    `eagle3diag diff SOURCE CONVERTED` shows what was lost, `eagle3diag convert` renames and refuses to drop anything. If the source has
    it too, it was not trained.

    ## Engine versions
    All: a full set of names and shapes loads without a word everywhere.

    ## Source
    speculators' converter before the rename of 2026-03-24 (pull requests 358 and 360, issue 1114); Schott 2005 and Johnstone 2001 for the
    laws.
    """
    every = looks(case)
    found = [s for s in suspects(case, every) if not (s.look.role == "embed" and _target_table(case))]
    strength, trained = trained_by(every)
    around = {"trained_matrices": trained, "their_median_strength": round(strength, 2)}
    groups: dict[str, list[Suspect]] = {}
    for s in found:
        groups.setdefault(group_of(s.look), []).append(s)
    for group, members in groups.items():
        yield _fresh_finding(group, members, every, around)
    yield from _ones(every, {g for g in groups if g.startswith("layers.")}, trained > 0 and strength >= STRONG)


def _target_table(case: Case) -> bool:
    return case.target is not None and case.target.checkpoint is not None and case.target.embed is not None


def _fresh_finding(group: str, members: list[Suspect], every: tuple[Look, ...], around: dict[str, Any]) -> Finding:
    worst = min((s.severity for s in members), key=lambda s: s.rank)
    garbage = [s for s in members if s.found.verdict == "garbage"]
    matrices = [f for k in every if group_of(k) == group for f in k.scan.fresh.values()]
    norms = [k for k in every if group_of(k) == group and k.role == "norm"]
    ones = [k for k in norms if k.ones]
    first = garbage[0] if garbage else members[0]
    if len(members) == 1:
        who, verb = escaped(first.label, 100), "looks"
    elif len(members) == len(matrices):
        who, verb = f"{group}: all {len(members)} matrices", "look"
    else:
        who, verb = f"{group}: {len(members)} of {len(matrices)} matrices ({', '.join(escaped(s.label, 90) for s in members[:4])})", "look"
    if garbage:
        kind = f"{'hold' if verb == 'look' else 'holds'} uninitialised memory: {first.found.why}"
    else:
        drawn = first.origin or f"{first.found.law or 'independent draws'}, std {first.found.std:.4g}"
        kind = f"{verb} freshly initialised ({drawn})"
        if worst is Severity.INFO:
            kind = f"{verb} as an initialiser left {'it' if verb == 'looks' else 'them'}, or moved too little to tell"
    also = f"; its {len(ones)} norms are exactly 1" if ones and len(ones) == len(norms) else ""
    evidence: dict[str, Any] = {
        "tensors": [
            {
                "tensor": escaped(s.label, 100),
                "verdict": s.found.verdict,
                "law": s.found.law,
                "std": float(f"{s.found.std:.4g}"),
                "fits": s.origin,
                "farthest": f"{s.found.strangest[0]} {s.found.strangest[1]:.1f} sigma" if s.found.z else s.found.why,
                "spike": round(s.found.spike, 3) if s.found.z else None,
            }
            for s in members[:50]
        ],
        "norms_exactly_one": [escaped(k.name, 90) for k in ones],
        **around,
    }
    return finding(
        "VAL303",
        f"{who} {kind}{also}",
        severity=worst,
        evidence=evidence,
        remedy="Compare with the checkpoint it was converted from: the tensor stands there under another name, or was never trained. "
        "Rename and convert again.",
        where=first.look.name if len(members) == 1 else group,
    )


def _ones(every: tuple[Look, ...], told: set[str], well_trained: bool) -> Iterator[Finding]:
    """Norms that are exactly one in a layer whose matrices are trained: lost in a conversion, or frozen by training in pure BF16."""
    norms = [k for k in every if k.role == "norm" and k.canonical.startswith("layers.") and group_of(k) not in told]
    ones = [k for k in norms if k.ones]
    if not ones:
        return
    moved = [k for k in norms if not k.ones]
    names = ", ".join(escaped(k.name, 90) for k in ones[:4])
    if moved:
        well_trained = max(k.scan.off_one for k in moved) > BF16_STEP  # then BF16 froze none of them
        most = max(moved, key=lambda k: k.scan.off_one)
        title = f"{names}: exactly 1 everywhere, while {escaped(most.name, 90)} moved by {most.scan.off_one:.3f}"
        remedy = "If it was trained, it was lost in a conversion: compare with the training run's own checkpoint."
    else:
        title = f"all {len(ones)} norms of the decoder layers are exactly 1"
        remedy = "Training in pure BF16 leaves norms at 1; otherwise compare with the training run's own checkpoint."
    yield finding(
        "VAL303",
        title,
        severity=Severity.WARNING if well_trained else Severity.INFO,
        evidence={"norms_exactly_one": [escaped(k.name, 90) for k in ones]},
        remedy=remedy,
        where=ones[0].name,
    )
