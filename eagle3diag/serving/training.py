"""What a training run says of its own draft: speculators, SpecForge, EAGLE, Automodel, ModelOpt. Each by its own definition.

speculators: ``full_acc_k`` joint, ``cond_acc_k`` conditional, argmax inside the draft's vocabulary. EAGLE and SpecForge: marginal.
Sources: dialects.md 6, field_reports.md 3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eagle3diag.errors import CheckpointError, UsageError, escaped
from eagle3diag.serving.model import Training
from eagle3diag.serving.responses import literal

__all__ = ["read_training", "training_of"]

_LIMIT = 64 << 20
_DICT = re.compile(r"\{[^{}]{4,20000}\}")
_FORCED = "teacher-forced on training or validation text: service feeds the draft its own tokens, on its own texts"
_INSIDE = "judged inside the draft's vocabulary: tokens outside it are not counted as misses"
_INDEPENDENT = "marginal rates: a chain multiplies them as if steps were independent"
_AUTOMODEL = re.compile(r"train_acc=(\d*\.?\d+)(?:[^\n]*?train_tau_sim=(\d*\.?\d+))?")

Kind = Literal["joint", "marginal", "conditional"]

#: (pattern of the key, kind, framework, caveats); the first group is the step
_KEYS: tuple[tuple[re.Pattern[str], Kind, str, tuple[str, ...]], ...] = (
    (re.compile(r"(?:^|[/_])full_acc_(\d+)(?:_epoch)?$"), "joint", "speculators", (_FORCED, _INSIDE)),
    (re.compile(r"(?:^|[/_])cond_acc_(\d+)(?:_epoch)?$"), "conditional", "speculators", (_FORCED, _INSIDE)),
    (re.compile(r"^(?:test|eval|val)/(\d+)_acc$"), "marginal", "EAGLE", (_FORCED, _INDEPENDENT)),
    (re.compile(r"^(?:train)/(\d+)_acc$"), "marginal", "EAGLE", (_FORCED, _INDEPENDENT, "on the training text itself")),
    (re.compile(r"^(?:eval|test|val)/acc_(\d+)$"), "marginal", "SpecForge", (_FORCED, _INDEPENDENT)),
    (re.compile(r"^(?:eval|test|val)/(?:acceptance_rate|accept_rate)_(\d+)$"), "marginal", "SpecForge", (_FORCED, _INDEPENDENT)),
    (re.compile(r"^train/acc_(\d+)$"), "marginal", "SpecForge", (_FORCED, _INDEPENDENT, "on the training text itself")),
    (re.compile(r"^(?:train/)?(?:acceptance_rate|accept_rate)_(\d+)$"), "marginal", "SpecForge", (_FORCED, _INDEPENDENT)),
    (re.compile(r"^(?:[\w/]*/)?(?:train|eval)_acc(?:uracy)?[_/](\d+)$"), "marginal", "ModelOpt", (_FORCED, _INSIDE, _INDEPENDENT)),
)


def _flat(data: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if isinstance(data, Mapping) and depth < 6:
        for key, value in list(data.items())[:5000]:
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                out |= _flat(value, f"{name}/", depth + 1)
            else:
                out[name] = value
    elif isinstance(data, list) and data and depth < 3:
        return _flat(data[-1], prefix, depth + 1)  # a history: the last entry stands
    return out


def _number(value: Any) -> float | None:
    if isinstance(value, list) and value:
        value = value[-1]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15 else None


def training_of(data: Any, where: str) -> Training | None:
    """The metrics of a decoded document, None where none are known."""
    flat = {k: n for k, v in _flat(data).items() if (n := _number(v)) is not None}
    stated = _stated(flat)
    for pattern, kind, framework, caveats in _KEYS:
        at = {int(m[1]): v for k, v in flat.items() if (m := pattern.search(k)) and len(m[1]) < 3}
        first = min(at, default=0)
        rates = [at[i] for i in range(first, first + len(at)) if i in at]
        if not rates or first > 1:
            continue
        if max(rates) > 1.0 and max(rates) <= 100.0:
            rates = [r / 100 for r in rates]
        if all(0 <= r <= 1 for r in rates):
            return Training(source=f"{framework}, {where}", kind=kind, rates=tuple(rates), length=stated, caveats=caveats)
    one = next((flat[k] for k in ("train_acc", "val_acc", "eval/acc", "accuracy", "acc") if 0 < flat.get(k, 0) <= 1), None)
    if one is not None:
        return Training(source=f"first-step accuracy, {where}", kind="marginal", rates=(one,), length=stated, caveats=(_FORCED,))
    if stated is not None:
        return Training(source=where, kind="length", length=stated, caveats=(_FORCED,))
    return None


def _stated(flat: Mapping[str, float]) -> float | None:
    """A length the run states, with the bonus token: SpecForge's and speculators' sums leave it out."""
    for name, value in flat.items():
        last = name.rsplit("/", 1)[-1]
        if last == "simulated_acc_len" and value >= 0:
            return 1.0 + value
        if last in ("train_tau_sim", "tau_sim", "acceptance_length", "accept_length", "eal") and value >= 1:
            return value
        if last == "ratio" and "accept" in flat and "count" in flat and value >= 1:
            return value
    return None


def read_training(path: str | Path) -> Training:
    """The metrics in a file: JSON, JSON lines (the last line stands), or a log in which a dict was printed.

    Raises:
        CheckpointError: not there.
        UsageError: nothing known in it.
    """
    at = Path(path)
    if at.is_dir():
        at = at / "val_metrics.json"
    if not at.is_file():
        raise CheckpointError(f"{escaped(path, 200)}: no such file of training metrics")
    if at.stat().st_size > _LIMIT:
        raise UsageError(f"{escaped(path, 200)}: {at.stat().st_size:,} bytes, training metrics are smaller than {_LIMIT:,}")
    found = training_text(at.read_text("utf-8", "replace"), at.name)
    if found is None:
        raise UsageError(
            f"{escaped(path, 200)}: no training metrics known in it; known are speculators val_metrics.json, SpecForge and EAGLE "
            "accuracies by step, ModelOpt's and Automodel's lines, or one 'acc'"
        )
    return found


def training_text(text: str, where: str) -> Training | None:
    """The last metrics in a text of any of the forms; None where there are none."""
    try:
        return training_of(json.loads(text), where)
    except (ValueError, RecursionError):
        pass
    for m in reversed(list(_DICT.finditer(text))[-2000:]):
        data: Any = None
        try:
            data = json.loads(m[0])
        except (ValueError, RecursionError):
            data = literal(m[0])
        if isinstance(data, dict) and (found := training_of(data, where)) is not None:
            return found
    lines = _AUTOMODEL.findall(text)
    if lines:
        acc, tau = lines[-1]
        length = float(tau) if tau else None
        return Training(
            source=f"Automodel, {where}",
            kind="marginal",
            rates=(float(acc),),
            length=length,
            caveats=(_FORCED, "on the training text itself"),
        )
    return None
