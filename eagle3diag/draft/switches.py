"""The switches of a wiring, one by one, and what the draft makes of a dump under any setting of them.

A switch is a field of the wiring with the values that the dump and the draft's tensors can show, the wiring at hand first; they are the
single faults of ``wirings``. A ``Switchboard`` runs settings on few rows, so that an answer comes while somebody waits, and keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from eagle3diag.checkpoint.model import TargetSpec
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.measure import Bench, Measured
from eagle3diag.draft.scope import scope_of
from eagle3diag.draft.served import ServedAcceptance, served_acceptance
from eagle3diag.draft.wirings import alternatives, field_words, value_words
from eagle3diag.errors import UsageError, escaped
from eagle3diag.hidden.rowstats import one_thread

__all__ = ["Switch", "Switchboard", "affordable_rows", "switches"]

_OPERATIONS = 6e10  #: a second or two of two laptop cores
_ALONE = 3e10  #: up to which one thread is as quick, and several wait for each other on a busy machine
_LEAST, _MOST = 64, 1000  #: rows
_VALUES = 10  #: of one switch
#: in the order data flows; what is not named follows
_ORDER = (
    "aux_layers",
    "aux_norm",
    "fc",
    "norm_before_fc",
    "fc_norm",
    "concat",
    "norm_before_residual",
    "norm_output",
    "final_norm",
    "double_norm",
    "deep_layer_norm",
    "rope_theta",
    "rope_scaling",
    "position_gap",
    "sliding_window",
    "token_shift",
    "state_shift",
    "embedding",
    "head",
    "mapping",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One field of the wiring.

    Attributes:
        field: its name.
        label: in words.
        values: the one at hand first.
        words: of each value.
    """

    field: str
    label: str
    values: tuple[Any, ...]
    words: tuple[str, ...]

    @property
    def flag(self) -> bool:
        """On or off, nothing else."""
        return {type(v) for v in self.values} == {bool} and len(self.values) == 2


def switches(bench: Bench, target: TargetSpec | None = None) -> tuple[Switch, ...]:
    """What can be switched, in the order data flows.

    Args:
        bench: the draft on a dump; its wiring is the one at hand.
        target: opened, or None.
    """
    found: dict[str, list[Any]] = {}
    for one in alternatives(bench.base, scope_of(bench, target), pairs=False, damage=True):
        names = [n for n in one.change if n != "aux_layers_verify"]
        if len(names) == 1 and names[0] != "unfilled":
            values = found.setdefault(names[0], [getattr(bench.base, names[0])])
            if len(values) < _VALUES and one.change[names[0]][1] not in values:
                values.append(one.change[names[0]][1])
    order = {name: k for k, name in enumerate(_ORDER)}
    return tuple(
        Switch(field=n, label=field_words(n), values=tuple(found[n]), words=tuple(value_words(n, v) for v in found[n]))
        for n in sorted(found, key=lambda n: order.get(n, len(order)))
    )


def affordable_rows(bench: Bench) -> int:
    """Rows that one setting can be run on while somebody waits, bounded; the same everywhere."""
    return int(min(_MOST, max(_LEAST, _OPERATIONS / _operations(bench))))


def _operations(bench: Bench) -> float:
    """Of one row: two a parameter and step."""
    aside = ("embed_tokens.weight", "d2t", "t2d")
    parameters = sum(t.numel() for name, t in bench.weights.tensors.items() if name not in aside)
    return 2.0 * max(1, parameters) * bench.steps


class Switchboard:
    """Settings of the switches, each run once.

    Attributes:
        bench: on the rows that are run.
        switches: what can be set.
    """

    def __init__(self, bench: Bench, target: TargetSpec | None = None) -> None:
        """On as many of the bench's rows as can be afforded."""
        self.switches = switches(bench, target)
        self.bench = bench.within(affordable_rows(bench))
        self._own: Measured | None = None
        self._known: dict[str, ServedAcceptance] = {}

    def wiring(self, chosen: Mapping[str, Any]) -> Wiring:
        """The wiring at hand with some fields set.

        Args:
            chosen: value by field; a field left out stays.

        Raises:
            UsageError: a field that cannot be switched here.
        """
        known = {s.field for s in self.switches}
        odd = [n for n in chosen if n not in known]
        if odd:
            raise UsageError(f"no switch {', '.join(map(escaped, odd))}: there are {', '.join(sorted(known))}")
        base = self.bench.base
        wiring = replace(base, **{n: v for n, v in chosen.items() if v != getattr(base, n)})
        return replace(wiring, aux_layers_verify=None) if wiring.aux_layers != base.aux_layers else wiring

    def measure(self, chosen: Mapping[str, Any]) -> ServedAcceptance:
        """The wiring at hand and the one with some fields set, on the same rows.

        Raises:
            UsageError: a field that cannot be switched here.
            CheckpointError: this setting cannot be run on this dump.
        """
        wiring = self.wiring(chosen)
        key = repr(sorted(wiring.to_dict().items()))
        if key not in self._known:
            rows = sum(len(sample.token_ids) for sample, _ in self.bench.samples)
            with one_thread() if rows * _operations(self.bench) <= _ALONE else nullcontext():
                if self._own is None:
                    self._own = self.bench.all(self.bench.base)
                self._known[key] = served_acceptance(self.bench, wiring, trained=self._own)
        return self._known[key]
