"""The nouns of this room: what one engine version does (``Contract``), and a draft seen through it (``ServedDraft``).

A contract is data: one ``Fact`` per behaviour, each with its source and how it is known. Code asks the contract and never the version.
``ServedDraft`` is the heart of the tool: most ENG, KEY and AUX findings are read off it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.display import Piece, Shown, data

if TYPE_CHECKING:
    from eagle3diag.engines.scan.target import ScannedTarget

__all__ = ["AuxCapture", "Contract", "Fact", "Fate", "FcState", "Launch", "LaunchProblem", "Refusal", "ServedDraft", "Status", "TensorFate"]

Status = Literal["run", "read", "inferred"]
Fate = Literal["loaded", "dropped", "truncated", "skipped", "replaced"]


@dataclass(frozen=True, slots=True, repr=False)
class Fact(Piece):
    """One behaviour of one engine version.

    ``status``: ``run`` (the engine's own code was executed), ``read`` (read in its source) or ``inferred`` (from control flow).
    """

    value: Any
    source: str
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Contract(Shown):
    """What one engine version does with one class of draft.

    Attributes:
        engine: ``sglang``, ``vllm``, ``tensorrt-llm`` or ``llama.cpp``.
        version: the recorded release whose facts these are.
        asked: the version that was asked for; differs from ``version`` where it is not on record.
        runner: ``v1``/``v2`` for vLLM, else None.
        facts: behaviour name -> Fact (names: the index of ``engines/contracts``).
        origin: ``recorded``, or the path of a source scan.
        scanned: of a source scan, what it says of the target class; a recorded contract has none.
    """

    engine: str
    version: str
    asked: str
    runner: str | None
    draft_class: str
    facts: Mapping[str, Fact]
    origin: str = "recorded"
    scanned: ScannedTarget | None = None

    def __getitem__(self, behaviour: str) -> Any:
        """The value of a behaviour.

        Raises:
            KeyError: no such behaviour in this contract (a bug here, not in the input).
        """
        return self.facts[behaviour].value

    @property
    def on_record(self) -> bool:
        """False where the nearest recorded version, or a source scan, stands in for the one asked for."""
        return self.origin == "recorded" and self.version == self.asked

    @property
    def label(self) -> str:
        """``sglang 0.5.9``, ``vllm 0.33.0 (v2 runner)``, ``sglang 0.5.9 (scanned)``."""
        if self.version == "undated":
            return f"{self.engine} (facts undated)"
        told = [*([f"{self.runner} runner"] if self.runner else []), *(["scanned"] if self.origin != "recorded" else [])]
        return f"{self.engine} {self.asked}" + (f" ({', '.join(told)})" if told else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, every fact with its source."""
        return data(
            {
                "engine": self.engine,
                "version": self.asked,
                "contract": self.version,
                "runner": self.runner,
                "draft_class": self.draft_class,
                "origin": self.origin,
                "facts": {n: {"value": f.value, "status": f.status, "source": f.source} for n, f in self.facts.items()},
            }
        )


@dataclass(frozen=True, slots=True, repr=False)
class Refusal(Piece):
    """The engine stops before the first request, loudly.

    ``stage``: ``construct``, ``load_weights`` or ``start``; ``message`` the predicted text.
    """

    stage: Literal["construct", "load_weights", "start"]
    message: str
    why: str = ""  #: the reason in our words
    fact: str = ""  #: behaviour it follows from


@dataclass(frozen=True, slots=True, repr=False)
class TensorFate(Piece):
    """What became of one tensor of the file."""

    fate: Fate
    as_: str  #: the engine's parameter, or the target's tensor that replaced it; empty where dropped
    why: str = ""

    def to_dict(self) -> dict[str, str]:
        """JSON shape of ``serve``."""
        return {"fate": self.fate, "as": self.as_} | ({"why": self.why} if self.why else {})


@dataclass(frozen=True, slots=True, repr=False)
class FcState(Piece):
    """Whether the fusion layer runs.

    ``bypassed_at_width``: a hidden state of this width skips fc without a word; None where that never happens.
    """

    runs: bool
    width_in: int | None
    bypassed_at_width: int | None

    def to_dict(self) -> dict[str, Any]:
        """JSON shape of ``serve``."""
        return {"runs": self.runs, "width_in": self.width_in, "bypassed_at_width": self.bypassed_at_width}


@dataclass(frozen=True, slots=True, repr=False)
class AuxCapture(Piece):
    """Which target states reach the draft.

    Attributes:
        ids: the ids this engine takes, as it reads them; None where it uses its default.
        source: config place, launch option, or ``default [2, N//2, N-3]``.
        prefill_hf: HF indices captured in eager and prefill steps, ascending; None where unknown (no target) or impossible.
        verify_hf: the same in graph-replayed verify steps.
        unread: recorded ids at places this engine does not read: ``{place: ids}``.
        problem: why capture fails or is short, in one line; empty where it works.
        loud: True where that problem raises (at start, load or first forward).
        hook: False where this target class cannot hand out aux states in this version; None without a target.
        shift: what the engine adds to a configured id to get the HF index (1 or 0); None with default ids.
    """

    ids: tuple[int, ...] | None
    source: str
    prefill_hf: tuple[int, ...] | None
    verify_hf: tuple[int, ...] | None
    unread: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    problem: str = ""
    loud: bool = False
    hook: bool | None = None
    shift: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON shape of ``serve``."""
        return {
            "ids": _listed(self.ids),
            "source": self.source,
            "prefill_hf": _listed(self.prefill_hf),
            "verify_hf": _listed(self.verify_hf),
            "unread": {where: list(ids) for where, ids in self.unread.items()},
            "problem": self.problem,
            "loud": self.loud,
            "hook": self.hook,
            "shift": self.shift,
        }


def _listed(ids: tuple[int, ...] | None) -> list[int] | None:
    return None if ids is None else list(ids)


@dataclass(frozen=True, slots=True, repr=False)
class LaunchProblem(Piece):
    """Something wrong with a launch line: ``kind`` is ``algorithm``, ``chain``, ``length``, ``quantization``, ``unknown-flag`` or
    ``other``.

    ``severity`` is ``error`` where the server would not start or not speculate, ``info`` where nothing is lost.
    """

    kind: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    severity: Literal["error", "warning", "info"] = "warning"
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Launch(Shown):
    """A parsed launch line.

    Attributes:
        engine: ``sglang`` or ``vllm``.
        method: the algorithm as written (``EAGLE3``, ``eagle``, …), None where not given.
        target, draft: paths as written.
        steps, topk, draft_tokens: chain flags (vLLM: ``draft_tokens`` = num_speculative_tokens).
        aux_ids: layer ids given on the line, else None.
        context: served context length in tokens where given.
        quantization, draft_quantization: as written.
        cuda_graph: False where graphs are switched off on the line.
        runner: ``v1``/``v2`` where an environment variable on the line decides.
        env: environment assignments in front of the command.
        options: every option as written, by its long name without dashes, ``_`` replaced by ``-``.
        problems: what is wrong with the line by itself (chain flags, unreadable JSON …).
    """

    engine: str
    text: str
    method: str | None = None
    target: str | None = None
    draft: str | None = None
    steps: int | None = None
    topk: int | None = None
    draft_tokens: int | None = None
    aux_ids: tuple[int, ...] | None = None
    context: int | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    cuda_graph: bool = True
    runner: str | None = None
    version: str | None = None  #: engine version where the line names one (a container tag)
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[LaunchProblem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the line, how it is understood, and what is wrong with it."""
        told = {n: getattr(self, n) for n in self.__slots__ if n not in ("aux_ids", "env", "options", "problems")}
        wrong = [{"kind": p.kind, "severity": p.severity, "message": p.message, "remedy": p.remedy} for p in self.problems]
        return data({**told, "aux_ids": _listed(self.aux_ids), "env": dict(self.env), "options": dict(self.options), "problems": wrong})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServedDraft(Shown):
    """A checkpoint seen through a contract: what that engine version really runs.

    Attributes:
        refused: loud stop before the first request, or None.
        tensors: by the name in the file, what became of it.
        never_filled: canonical parameter names no tensor reached -> what they start as: ``uninitialised``, ``ones``, ``random``,
            ``zeros``, ``target``.
        fc: whether the fusion layer runs.
        aux: which target states reach the draft.
        wiring: the effective wiring.
        algorithm: what the engine runs: ``eagle3``, ``eagle`` (EAGLE-1 path) or ``draft_model``.
        fails_later: loud failures after the start (first request), in words.
        ignored: config flags the draft sets that this version does not honour: ``{flag: why}``.
        defaulted: flags absent from the config that this version fills with another default than the trainer: ``{flag: why}``.
        quirks: position or feedback quirks of this version: ``{behaviour: text}``.
        trained: the wiring the draft was trained with, to compare ``wiring`` with; None where nobody told.
        target_layers: decoder layers of the target; None without one.
    """

    contract: Contract
    refused: Refusal | None
    tensors: Mapping[str, TensorFate]
    never_filled: Mapping[str, str]
    fc: FcState
    aux: AuxCapture
    wiring: Wiring
    algorithm: str = "eagle3"
    fails_later: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    defaulted: Mapping[str, str] = field(default_factory=dict)
    quirks: Mapping[str, str] = field(default_factory=dict)
    launch: Launch | None = None
    trained: Wiring | None = None
    target_layers: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """One element of the JSON list of ``serve``."""
        contract, refusal = self.contract, self.refused
        return data(
            {
                "schema": 1,
                "engine": contract.engine,
                "version": contract.asked,
                "contract": contract.version,
                "on_record": contract.on_record,
                "origin": contract.origin,
                "runner": contract.runner,
                "refused": None if refusal is None else {"stage": refusal.stage, "message": refusal.message, "why": refusal.why},
                "fails_later": list(self.fails_later),
                "algorithm": self.algorithm,
                "tensors": {name: fate.to_dict() for name, fate in self.tensors.items()},
                "never_filled": dict(self.never_filled),
                "fc": self.fc.to_dict(),
                "aux": self.aux.to_dict(),
                "wiring": self.wiring.to_dict(),
                "ignored": dict(self.ignored),
                "defaulted": dict(self.defaulted),
                "quirks": dict(self.quirks),
            }
        )

    def dropped(self) -> tuple[str, ...]:
        """Names in the file that reach nothing, on-purpose skips (t2d) left out."""
        return tuple(n for n, f in self.tensors.items() if f.fate == "dropped")
