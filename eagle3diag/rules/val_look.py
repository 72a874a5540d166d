"""What the value rules share: one pass over the draft's tensors for all of them, what each tensor is for, and which of them look untrained.

Each tensor is read once for VAL301 to VAL303 together; the result of the last draft is kept. Whether a single matrix that looks fresh is
a fault depends on its neighbours: in a draft trained for a hundred steps a slow matrix may not have left the noise yet, in a
trained one it was never loaded. So the neighbours' distance from noise is part of the verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec
from eagle3diag.checkpoint.names import canonical_name
from eagle3diag.errors import CheckpointError
from eagle3diag.rules.model import Case, Severity
from eagle3diag.weights.fresh import Freshness, origin
from eagle3diag.weights.scan import Scan, scan

__all__ = ["Look", "Suspect", "group_of", "looks", "replaced", "suspects", "trained_by"]

Role = Literal["fc", "layer", "head", "embed", "norm", "mapping", "other"]

STRONG = 2.0  #: neighbours count as well trained from here on: median of their ``Freshness.strength``
_SHARP = 0.005  # a known scale is evidence only where the width of the match is below this


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One tensor of the draft after the pass.

    Attributes:
        name: as spelled in the file.
        canonical: its canonical name.
        role: what it is for.
        scan: what was seen.
    """

    name: str
    canonical: str
    role: Role
    scan: Scan

    @property
    def ones(self) -> bool:
        """A vector that is exactly one everywhere: what a norm starts as."""
        return self.scan.constant and self.scan.low == 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A matrix, or a part of a fused one, that nobody trained.

    Attributes:
        part: label within a fused matrix, else empty.
        found: the numerics.
        origin: the initialiser whose scale fits, or empty.
        severity: error, or less where the neighbours leave doubt.
    """

    look: Look
    part: str
    found: Freshness
    origin: str
    severity: Severity

    @property
    def label(self) -> str:
        """``layers.0.self_attn.qkv_proj.weight (v rows)``."""
        return f"{self.look.name} ({self.part} rows)" if self.part else self.look.name


def _role(canonical: str, dimensions: int) -> Role:
    if canonical in ("d2t", "t2d"):
        return "mapping"
    if (dimensions == 1 and canonical.endswith("norm.weight")) or canonical.startswith("fc_norm."):
        return "norm"
    if dimensions < 2:
        return "other"
    root = canonical.partition(".")[0]
    roles: dict[str, Role] = {"fc": "fc", "layers": "layer", "mtp_layers": "layer", "lm_head": "head", "embed_tokens": "embed"}
    return roles.get(root, "other")


def group_of(look: Look) -> str:
    """Tensors are reported by these: ``layers.0``, else the tensor itself."""
    parts = look.canonical.split(".")
    return ".".join(parts[:2]) if parts[0] in ("layers", "mtp_layers") and len(parts) > 2 else look.canonical


def _parts(spec: DraftSpec, canonical: str, shape: tuple[int, ...]) -> dict[str, tuple[int, int]] | None:
    """Rows of the pieces of a fused projection; None where it is none, or the config's sizes do not add up."""
    rows = shape[0] if len(shape) == 2 else 0
    if ".gate_up_proj." in canonical and rows and rows % 2 == 0:
        return {"gate": (0, rows // 2), "up": (rows // 2, rows)}
    heads, kv, width = spec.num_heads.value, spec.num_kv_heads.value, spec.head_dim.value
    if ".qkv_proj." in canonical and heads and kv and width and (heads + 2 * kv) * width == rows:
        q, k = heads * width, kv * width
        return {"q": (0, q), "k": (q, q + k), "v": (q + k, rows)}
    return None


_last: list[tuple[Checkpoint, tuple[Look, ...] | CheckpointError]] = []


def looks(case: Case) -> tuple[Look, ...]:
    """Every tensor whose values can be looked at, in file order.

    Raises:
        CheckpointError: a tensor cannot be read (truncated, changed meanwhile).
    """
    for checkpoint, known in _last:
        if checkpoint is case.draft:
            if isinstance(known, CheckpointError):
                raise known
            return known
    try:
        found: tuple[Look, ...] | CheckpointError = tuple(_all(case))
    except CheckpointError as error:
        found = error
    _last[:] = [(case.draft, found)]
    if isinstance(found, CheckpointError):
        raise found
    return found


def _all(case: Case) -> list[Look]:
    meaning = {file: canonical for canonical, file in case.spec.canonical.items()}
    out = []
    for name, info in case.draft.tensors.items():
        canonical = meaning.get(name) or canonical_name(name)
        seen = scan(case.draft, name, parts=_parts(case.spec, canonical, info.shape))
        if seen is not None:
            out.append(Look(name=name, canonical=canonical, role=_role(canonical, len(info.shape)), scan=seen))
    return out


def replaced(case: Case, look: Look) -> str:
    """What the engine puts in this tensor's place, in words, or an empty string."""
    fate = case.served.tensors.get(look.name) if case.served is not None else None
    return f"{case.served.contract.label} puts {fate.as_} in its place" if case.served and fate and fate.fate == "replaced" else ""


def trained_by(every: tuple[Look, ...]) -> tuple[float, int]:
    """How far the fusion layer and the decoder layers are from noise: median strength of those that were trained, and how many they are."""
    found = [f.strength for k in every if k.role in ("fc", "layer") for f in k.scan.fresh.values() if f.verdict == "trained"]
    return (median(found), len(found)) if found else (0.0, 0)


def suspects(case: Case, every: tuple[Look, ...]) -> list[Suspect]:
    """Matrices that look untrained, each with the severity its neighbours justify."""
    configured = case.draft.config.get("initializer_range")
    configured = float(configured) if isinstance(configured, (int, float)) and 0 < configured < 10 else None
    found = [
        (look, part, f, origin(f, look.scan.info.shape, configured))
        for look in every
        if look.role not in ("norm", "mapping")
        for part, f in look.scan.fresh.items()
        if f.verdict in ("fresh", "garbage")
    ]
    strength, trained = trained_by(every)
    ruled = _one_rule([(look, f) for look, _, f, _ in found if look.role in ("fc", "layer")])
    # what an initialiser certainly made: independent, of its law, and of its scale
    certain = [f.near and (bool(source) or id(f) in ruled) for _, _, f, source in found]
    body = [sure for (look, _, f, _), sure in zip(found, certain, strict=True) if look.role in ("fc", "layer") and f.verdict == "fresh"]
    share = sum(body) / len(body) if body else 0.0
    # many matrices of exactly the start's law and scale leave less room for chance than a single one
    enough = STRONG / 2 if sum(body) >= 4 and share >= 0.8 else STRONG
    whole = _untouched(every) if share >= 0.8 else set()
    out = []
    for (look, part, f, source), sure in zip(found, certain, strict=True):
        if f.verdict == "garbage" or group_of(look) in whole:
            severity = Severity.ERROR
        elif not trained and _barely(every, [f for _, _, f, _ in found]):
            severity = Severity.INFO
        elif not trained:  # nothing in this draft was trained, as far as can be seen
            severity = Severity.ERROR if share >= 0.8 or not body else Severity.WARNING if share >= 0.5 else Severity.INFO
        elif strength >= enough and (sure or f.quiet):
            severity = Severity.ERROR
        elif sure and source and 4 * f.error < _SHARP:
            severity = Severity.WARNING
        else:
            severity = Severity.INFO
        out.append(Suspect(look=look, part=part, found=f, origin=source, severity=_for_role(case, look, severity)))
    return out


def _barely(every: tuple[Look, ...], found: list[Freshness]) -> bool:
    """Whether the norms say that a short training moved everything by too little to be seen in the matrices.

    Adam moves elements about as far, norms up to a few times farther than matrices. A matrix moved by m / 5 grows by (m / 5 std)^2 / 2 in
    scale; where that would not be seen, norms off one prove a training. Where it would, the matrices lack what the norms got, so they
    were lost.
    """
    moved = [k.scan.off_one for k in every if k.role == "norm" and group_of(k).startswith("layers.") and not k.scan.constant]
    seen = [f for f in found if f.verdict == "fresh" and f.std < 0.5]  # nobody starts a training at a scale of one
    if not moved or not seen:
        return False
    m = median(moved) / 5
    return median((m / f.std) ** 2 / 2 / f.error for f in seen) < 5.0


def _one_rule(found: list[tuple[Look, Freshness]]) -> set[int]:
    """Matrices (by identity) whose scales follow one initialiser's rule with one constant, whatever that is; at least three of a law."""
    rules: tuple[Callable[[int, int], float], ...] = (
        lambda i, o: 1.0,
        lambda i, o: i**0.5,
        lambda i, o: (i + o) ** 0.5,
        lambda i, o: o**0.5,
    )
    best: set[int] = set()
    for law in {f.law for _, f in found if f.law}:
        for rule in rules:
            scaled = [(f.std * rule(k.scan.info.shape[-1], k.scan.info.shape[-2]), f) for k, f in found if f.law == law]
            middle, reference = sorted(scaled, key=lambda pair: pair[0])[len(scaled) // 2]
            fits = {id(f) for value, f in scaled if abs(value / middle - 1) < 4 * (f.error**2 + reference.error**2) ** 0.5 + 1e-4}
            if len(fits) >= 3 and len(fits) > len(best):
                best = fits
    return best


def _untouched(every: tuple[Look, ...]) -> set[str]:
    """Decoder layers in which every matrix is fresh and every norm is exactly one: together no accident of a short training."""
    layers = {group_of(k) for k in every if k.role == "layer"}
    out = set()
    for layer in layers:
        mine = [k for k in every if group_of(k) == layer]
        verdicts = [f.verdict for k in mine if k.role == "layer" for f in k.scan.fresh.values()]
        norms = [k.ones for k in mine if k.role == "norm"]
        if norms and all(norms) and verdicts.count("fresh") >= 4 and set(verdicts) <= {"fresh", "unjudged"}:
            out.add(layer)
    return out


def _for_role(case: Case, look: Look, severity: Severity) -> Severity:
    """No worse than a warning for what an engine may replace, no worse than information for what it surely does not use."""
    worst = Severity.ERROR
    if look.role in ("embed", "other") or (look.role == "head" and replaced(case, look)):
        worst = Severity.WARNING
    if (look.role == "embed" and replaced(case, look)) or (look.role == "fc" and case.spec.use_aux_hidden_state.value is False):
        worst = Severity.INFO
    return max(severity, worst, key=lambda s: s.rank)
