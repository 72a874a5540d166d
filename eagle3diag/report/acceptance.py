"""The acceptance a draft was trained for, beside the one each engine's wiring would give it, on the same rows of the same dump.

The dump is read once for all engines. An engine that refuses the draft, or one whose wiring wants a state the dump does not hold, has no
number, and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eagle3diag.display import Shown, data

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
    from eagle3diag.checkpoint.wiring import Wiring
    from eagle3diag.draft.measure import Bench
    from eagle3diag.draft.served import Acceptance, ServedAcceptance
    from eagle3diag.engines.model import ServedDraft
    from eagle3diag.hidden.model import HiddenDump

__all__ = ["EngineAcceptance", "acceptances", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineAcceptance(Shown):
    """One engine on one dump.

    Attributes:
        engine: its label.
        dump: path.
        trained: acceptance of the wiring the draft was trained with.
        result: both wirings side by side; None where the engine's cannot be run, and then ``why`` says so.
    """

    engine: str
    dump: str
    trained: Acceptance
    result: ServedAcceptance | None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """``acceptance`` in the JSON of ``serve``."""
        if self.result is not None:
            return data({"dump": self.dump, **self.result.to_dict(), "why": ""})
        return data({"dump": self.dump, "trained": self.trained.to_dict(), "served": None, "why": self.why})


def acceptances(
    draft: Checkpoint,
    spec: DraftSpec,
    dump: HiddenDump,
    served: Sequence[ServedDraft],
    target: TargetSpec | None = None,
    *,
    steps: int = 4,
    max_rows: int | None = None,
) -> tuple[EngineAcceptance, ...]:
    """One acceptance an engine, in the order given.

    Args:
        draft, spec, dump, target: opened.
        served: the draft as each engine runs it.
        steps: draft steps, the longest chain.
        max_rows: read about as many rows.

    Raises:
        CheckpointError: draft and dump do not fit, or nothing says what the target chose.
    """
    from eagle3diag.draft.measure import Bench

    return measured(Bench.prepare(draft, spec, dump, target, steps=steps, max_rows=max_rows), served)


def measured(bench: Bench, served: Sequence[ServedDraft]) -> tuple[EngineAcceptance, ...]:
    """`acceptances` on rows that are already read."""
    from eagle3diag.draft.served import served_acceptance
    from eagle3diag.errors import CheckpointError

    rows = bench.all(bench.base)
    own = served_acceptance(bench, bench.base, trained=rows).trained
    found = []
    for one in served:
        result, why = None, ""
        if one.refused is not None:
            why = f"the engine refuses this draft ({one.refused.stage})"
        else:
            try:
                result = served_acceptance(bench, _as_run(one.wiring, bench), dropped=_dropped(one, bench.spec), trained=rows)
            except CheckpointError as error:
                why = str(error)
        found.append(EngineAcceptance(engine=one.contract.label, dump=bench.path, trained=own, result=result, why=why))
    return tuple(found)


def _as_run(served: Wiring, bench: Bench) -> Wiring:
    """The engine's wiring while it drafts an answer: the layers of graph-replayed verification, and as trained what no file says."""
    base = bench.base
    return replace(
        served,
        aux_layers=served.aux_layers_verify or served.aux_layers or base.aux_layers,
        aux_layers_verify=None,
        rope_theta=base.rope_theta if served.rope_theta is None else served.rope_theta,
        deep_layer_norm=base.deep_layer_norm if bench.weights.sizes.layers < 2 else served.deep_layer_norm,
    )


def _dropped(served: ServedDraft, spec: DraftSpec) -> list[str]:
    """Canonical names of the tensors that reach nothing."""
    fates = served.tensors
    return [name for name, file in spec.canonical.items() if file in fates and fates[file].fate in ("dropped", "skipped")]
