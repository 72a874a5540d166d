"""The causes by name, what each finding bears on, and which experiment separates two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from eagle3diag.rules.model import Case, Finding
    from eagle3diag.serving.compatible import Compatibility

__all__ = ["CAUSES", "CODES", "FAULTS", "WIRING_KINDS", "experiment"]

CAUSES = {
    "states": "other target states reach the draft than it was trained on (layers, order, norm, shift)",
    "weights": "parts of the draft do not reach the engine: dropped, never filled or replaced",
    "mapping": "vocabulary mapping or head are not the draft's own",
    "recurrence": "what one draft step feeds to the next is not what it was trained with",
    "method": "the engine does not run this draft as EAGLE-3",
    "config": "the draft's config says another wiring than the one it was trained with",
    "file": "the checkpoint itself is damaged or never was trained",
    "nan": "logits are not numbers",
    "target": "the draft belongs to another target",
    "engine": "the checkpoint is innocent: the engine or its settings lose the acceptance",
    "weak": "wiring sound, draft weak: acceptance is what training gave",
    "sound": "nothing is wrong: acceptance is what this draft gives",
    "texts": "the texts in service are not those it was trained and measured on",
    "context": "long contexts: the draft does not reach as far as the requests",
    "repetition": "the output repeats itself, which flatters the draft",
    "metric": "the number is misread: it is defined otherwise than it looks",
    "simulated": "acceptance is simulated",
}

#: faults of wiring and files, as against the engine, the texts and the reader
FAULTS = ("states", "weights", "mapping", "recurrence", "method", "config", "file", "target", "nan")

#: code -> kinds of cause it bears on
CODES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("AUX401", "AUX402", "AUX403", "AUX404", "AUX405", "AUX406", "AUX407", "ENG506"), ("states",)),
    **dict.fromkeys(("KEY201", "KEY202", "KEY203", "KEY204", "KEY205", "KEY207", "KEY208", "KEY210", "ENG505", "VAL308"), ("weights",)),
    **dict.fromkeys(("KEY206", "KEY209", "CFG105", "CFG106", "VAL304", "VAL305", "VAL306", "VAL307", "VAL309", "AGR704"), ("mapping",)),
    **dict.fromkeys(("ENG502", "ENG507", "CFG110", "AGR702"), ("recurrence",)),
    **dict.fromkeys(("ENG501", "CFG104", "CFG113"), ("method",)),
    **dict.fromkeys(("VAL301", "AGR705"), ("nan", "file")),
    **dict.fromkeys(("VAL302", "VAL303"), ("file",)),
    **dict.fromkeys(("AGR701", "AGR703", "CFG109"), ("config",)),
    **dict.fromkeys(("CFG108", "CFG114"), ("context",)),
    "CFG112": ("target",),
    "ENG503": ("engine",),
    "SRV805": ("repetition",),
}

#: field of a ``Wiring`` that differs -> kind of cause
WIRING_KINDS = {
    **dict.fromkeys(("aux_layers", "aux_layers_verify", "state", "fc", "token_shift", "state_shift", "concat", "aux_norm"), "states"),
    **dict.fromkeys(("mapping", "head"), "mapping"),
    **dict.fromkeys(("embedding", "unfilled"), "weights"),
    **dict.fromkeys(("norm_output", "norm_before_residual", "final_norm", "double_norm", "deep_layer_norm", "position_gap"), "recurrence"),
    **dict.fromkeys(("rope_theta", "rope_scaling", "norm_before_fc", "fc_norm"), "config"),
    "sliding_window": "context",
}


class _Ranked(Protocol):
    """What is needed of a cause here."""

    @property
    def kind(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def members(self) -> tuple[str, ...]: ...


_REFERENCE = (
    "Serve a published draft for this target on the same server with the same flags and give its log as --control-log: it "
    "tells the engine from the draft."
)
_DUMP = (
    "Capture a dump of the target on some of the served prompts (eagle3diag capture TARGET --text FILE -o DUMP) and add "
    "--dump: it tells what the draft can do."
)
_STATES = (
    "Compare the states themselves: take the engine's own (eagle3diag capture http://HOST:PORT, or its dump) and run "
    "eagle3diag norms on both dumps; layers are told by identity, not by counts."
)
_SERVE = (
    "Let the tool serve it: add --engine E==V, --target and --launch; it lists tensor by tensor what that version loads, and "
    "which layers it captures."
)
_TEXTS = (
    "Dump some of the prompts that are really served and run eagle3diag agree on them: if agreement is as low there, the "
    "texts differ; if not, the wiring does."
)
_TRAIN = "Measure a later or longer-trained checkpoint of the same run at the same k: if length follows training, the wiring is sound."
_NAN = "Look at the answers of a few requests, and run the same prompts with another attention backend."

#: either of two kinds -> what separates them, the first that fits
_BETWEEN: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset(("weak", "texts")), _TEXTS),
    (frozenset(("sound", "weak")), _TRAIN),
    (frozenset(("nan", "repetition")), _NAN),
)


def experiment(causes: Sequence[_Ranked], case: Case, compared: Compatibility | None, errors: Sequence[Finding] = ()) -> str:
    """What to do next to tell the first two causes apart, or to test the only one.

    Args:
        causes: the likeliest first.
        case: says what was given already.
        compared: the wirings on the dump, or None.
        errors: findings of the files and the engine that are errors; one that bears on the first cause is mended before anything is tried.
    """
    live = [c for c in causes if not getattr(c, "excluded", False)][:2]
    kinds = frozenset(c.kind for c in live)
    known = next((f for f in errors if live and live[0].kind in CODES.get(f.code, ())), None)
    if known is not None:
        return f"{known.code} needs no experiment: mend it as it says, serve again and give the new log. What is left then is worth a look."
    for pair, text in _BETWEEN:
        if pair <= kinds:
            return text
    if live and len(live[0].members) > 1:
        return _within(live[0].members, compared)
    if len(live) == 2 and live[0].group and live[1].group:
        return _within((live[0].members[0], live[1].members[0]), compared)
    if "nan" in kinds:
        return _NAN
    if "engine" in kinds and case.control is None:
        return _REFERENCE
    if kinds & set(FAULTS) and case.served is None and case.has("draft"):
        return _SERVE
    if case.dump is None and case.has("draft"):
        return _DUMP
    if not case.has("draft"):
        return "Check the draft together with this log: eagle3diag check DRAFT --log FILE --target T --engine E==V [--dump D]."
    if "states" in kinds:
        return _STATES
    if kinds & {"texts", "sound"}:
        return _TEXTS
    if "weak" in kinds:
        return _TRAIN
    return _REFERENCE if case.control is None else _STATES


def _within(members: Sequence[str], compared: Compatibility | None) -> str:
    """What tells wirings of a group apart: the position at which they differ most, with the verifications it takes; else the states."""
    by_name = {c.name: c for c in compared.compared} if compared is not None else {}
    a, b = (by_name.get(m) for m in members[:2])
    if a is None or b is None:
        return _STATES
    gaps = [(abs(p - q), i) for i, (p, q) in enumerate(zip(a.joint, b.joint, strict=False))]
    gap, at = max(gaps, default=(0.0, 0))
    if gap < 0.01:
        return f"Counts will not separate '{a.name}' from '{b.name}'. {_STATES}"
    p, q = a.joint[at], b.joint[at]
    need = round(9 * (p * (1 - p) + q * (1 - q)) / gap**2)
    return (
        f"'{a.name}' and '{b.name}' differ most at position {at + 1} ({100 * p:.1f} % against {100 * q:.1f} %): per-position counts of "
        f"about {max(50, need):,} verifications on the dump's own prompts would tell. Or: {_STATES}"
    )
