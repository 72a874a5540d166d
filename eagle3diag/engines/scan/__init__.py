"""Read the engine you have: parse an installed, forked or patched SGLang or vLLM and tell what *this* copy does with a draft.

Nothing is imported, built or run. Every behaviour of a contract gets a value: read in the source, inferred from it, or, where this scan
cannot tell, the one recorded for the nearest release; each says which. The result is a ``Contract`` like any other, so that serving,
checking and the rules work on it unchanged (``--engine sglang@PATH``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from eagle3diag.display import Piece, Shown, data
from eagle3diag.engines import versions
from eagle3diag.engines.contract import draft_classes, facts_of, releases, runner_for, runners
from eagle3diag.engines.model import Contract, Fact
from eagle3diag.engines.scan.classes import Classes
from eagle3diag.engines.scan.draft import Draft, draft_architectures, open_draft
from eagle3diag.engines.scan.forward import read_forward
from eagle3diag.engines.scan.loading import read_loading
from eagle3diag.engines.scan.sglang import read_sglang
from eagle3diag.engines.scan.source import Source, open_source
from eagle3diag.engines.scan.target import ScannedTarget, scan_target
from eagle3diag.engines.scan.vllm import read_vllm
from eagle3diag.errors import UsageError, escaped

if TYPE_CHECKING:
    from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
    from eagle3diag.engines.model import Launch, ServedDraft

__all__ = ["EngineScan", "ScannedField", "scan", "scanned_contract"]

How = Literal["read", "inferred", "recorded"]
_SERVER = {"sglang": read_sglang, "vllm": read_vllm}


@dataclass(frozen=True, slots=True, repr=False)
class ScannedField(Piece):
    """One behaviour: its value, how it is known, and where from."""

    value: Any
    status: How
    source: str

    def to_dict(self) -> dict[str, Any]:
        """JSON shape inside ``scan``."""
        return data({"value": self.value, "status": self.status, "source": self.source})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineScan(Shown):
    """What one copy of an engine does with a draft and a target.

    Attributes:
        engine: ``sglang`` or ``vllm``.
        source: where the copy lies.
        version: what its package says it is; None where it does not say.
        nearest: the recorded release that stands in for what could not be read.
        nearest_by: ``version``, or ``agreement`` (the release whose record agrees with most that was read).
        runner: ``v1``/``v2`` for vLLM.
        draft_class: ``llama``, ``qwen3`` or ``mla``.
        draft: the class that reads the draft: name, place, architectures; empty where this copy has no such class.
        target: what it says of the target class asked for; None where none was.
        fields: every behaviour of a contract.
        notes: what could not be read, and what was assumed.
        served: the draft given, as this copy would run it.
    """

    engine: str
    source: str
    version: str | None
    nearest: str
    nearest_by: Literal["version", "agreement"]
    runner: str | None
    draft_class: str
    draft: Mapping[str, Any]
    target: ScannedTarget | None
    fields: Mapping[str, ScannedField]
    notes: tuple[str, ...] = ()
    served: ServedDraft | None = field(default=None, compare=False)

    def to_contract(self) -> Contract:
        """The same facts as a contract, usable wherever a recorded one is."""
        recorded = _recorded(self.engine, self.nearest, self.runner, self.draft_class)
        facts = {}
        for name, one in self.fields.items():
            status = recorded[name].status if one.status == "recorded" else one.status
            facts[name] = Fact(one.value, one.source, status)
        return Contract(
            engine=self.engine,
            version=self.nearest,
            asked=self.version or "of unknown version",
            runner=self.runner,
            draft_class=self.draft_class,
            facts=facts,
            origin=self.source,
            scanned=self.target,
        )

    def counts(self) -> dict[str, int]:
        """How many behaviours were read, inferred, and taken from the record."""
        return {how: sum(f.status == how for f in self.fields.values()) for how in ("read", "inferred", "recorded")}

    def to_dict(self) -> dict[str, Any]:
        """JSON shape of ``scan``."""
        body: dict[str, Any] = {
            "engine": self.engine,
            "source": self.source,
            "version": self.version,
            "nearest": {"release": self.nearest, "by": self.nearest_by},
            "runner": self.runner,
            "target": None if self.target is None else _target_dict(self.target),
            "draft": dict(self.draft),
            "fields": {n: f.to_dict() for n, f in sorted(self.fields.items())},
            "counts": self.counts(),
            "notes": list(self.notes),
        }
        if self.served is not None:
            aux, refused = self.served.aux, self.served.refused
            body["draft"]["served"] = {
                "refused": None if refused is None else refused.message,
                "dropped": list(self.served.dropped()),
                "never_filled": dict(self.served.never_filled),
                "ids": None if aux.ids is None else list(aux.ids),
                "ids_from": aux.source,
                "prefill_hf": None if aux.prefill_hf is None else list(aux.prefill_hf),
                "verify_hf": None if aux.verify_hf is None else list(aux.verify_hf),
                "ignored": dict(self.served.ignored),
            }
        return body


def _number(text: str) -> int | str:
    return int(text) if text.lstrip("+-").isdigit() else text


def _target_dict(target: ScannedTarget) -> dict[str, Any]:
    rules = target.behaviour
    return {
        "arch": target.arch,
        "found": target.found,
        "captures": bool(target.hook and rules is not None and rules.captures in ("stream", "mlp-branch")),
        "hook": target.hook,
        "what": None if rules is None else rules.captures,
        "default_hf": [_number(t) for t in target.default],
        "shift": _number(target.shift) if target.shift else None,
        "rules": None
        if rules is None
        else {"ids": rules.ids, "store": rules.store, "zero": rules.zero, "last": rules.last, "short": rules.short, "error": rules.error},
        "model_types": list(target.allowed),
        "where": list(target.where),
        "status": target.status,
    }


def _recorded(engine: str, release: str, runner: str | None, draft_class: str) -> dict[str, Fact]:
    return facts_of(engine, release, runner, draft_class if draft_class in draft_classes(engine) else "llama")


def _read(draft: Draft, tables: tuple[Mapping[str, Callable[[Draft], Any]], ...], notes: list[str]) -> dict[str, ScannedField]:
    """What every reader says; one that meets code it cannot follow leaves its field to the record, and is noted."""
    found: dict[str, ScannedField] = {}
    for table in tables:
        for name, look in table.items():
            try:
                got = look(draft)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
                notes.append(f"{name}: the source is written in a way this scan does not follow ({type(error).__name__})")
                continue
            if got is not None:
                value, status, where = got
                found[name] = ScannedField(value, "inferred" if status == "inferred" else "read", where)
    return found


def _nearest(
    source: Source, runner: str | None, draft_class: str, read: Mapping[str, ScannedField]
) -> tuple[str, Literal["version", "agreement"]]:
    known = releases(source.engine)
    if source.version is not None:
        try:
            return versions.nearest(source.version, known), "version"
        except UsageError:
            pass
    best, most = known[-1], -1
    for release in known:
        facts = _recorded(source.engine, release, runner, draft_class)
        agree = sum(name in facts and facts[name].value == one.value for name, one in read.items())
        if agree >= most:
            best, most = release, agree
    return best, "agreement"


def scan(
    source: str | os.PathLike[str],
    target_arch: str | None = None,
    *,
    draft: str | os.PathLike[str] | Checkpoint | None = None,
    engine: str | None = None,
    runner: str | None = None,
    draft_class: str | None = None,
    text_arch: str | None = None,
) -> EngineScan:
    """Read one copy of an engine.

    Args:
        source: a folder (package, source tree, environment), a wheel or archive, a wheel's URL, or the name of the installed engine.
        target_arch: architecture of the target, as its ``config.json`` names it.
        draft: a draft checkpoint; tells which draft class is meant, and is served with the result.
        engine: ``sglang`` or ``vllm``, where the folder may hold both.
        runner: ``v1`` or ``v2`` for vLLM; None takes the default recorded for the nearest release and this target.
        draft_class: ``llama``, ``qwen3`` or ``mla``; None takes the draft's, else ``llama``.
        text_arch: architecture of the text model inside a multimodal target.

    Raises:
        UsageError: nothing there, no engine in it, or an unknown runner.
        CheckpointError: the draft cannot be read.
    """
    opened = open_source(source, engine)
    classes = Classes(opened)
    checkpoint = spec = None
    if draft is not None:
        checkpoint, spec = _draft(draft)
    got = _scan(classes, target_arch, runner, draft_class or (spec.draft_class if spec is not None else None), text_arch)
    if checkpoint is None or spec is None:
        return got
    if draft_class is None:
        seen = _class_by_view(checkpoint, spec, got.to_contract())
        if seen is not None and seen != got.draft_class:
            got = _scan(classes, target_arch, runner, seen, text_arch)
    from eagle3diag.engines.serve import serve

    target = _named_target(target_arch, text_arch)
    return replace(got, served=serve(checkpoint, got.engine, target=target, spec=spec, contract=got.to_contract()))


def _named_target(arch: str | None, text_arch: str | None) -> TargetSpec | None:
    """A target of which nothing is known but its class."""
    if arch is None:
        return None
    from eagle3diag.checkpoint.model import TargetSpec
    from eagle3diag.provenance import Valued, absent

    none: Any = absent("only the architecture is given")
    names = ("model_type", "hidden_size", "num_layers", "vocab_size", "num_heads", "num_kv_heads", "head_dim", "max_position", "rope_theta")
    rest = dict.fromkeys((*names, "rope_scaling", "tie_word_embeddings", "dtype", "quantization"), none)
    inner: Any = Valued(text_arch, "config", "given") if text_arch else none
    return TargetSpec(path=arch, architecture=Valued(arch, "config", "--target-arch"), text_architecture=inner, **rest)


def _draft(draft: str | os.PathLike[str] | Checkpoint) -> tuple[Checkpoint, DraftSpec]:
    from eagle3diag.checkpoint.model import Checkpoint
    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec

    checkpoint = draft if isinstance(draft, Checkpoint) else open_checkpoint(os.fspath(draft))
    return checkpoint, draft_spec(checkpoint)


def _class_by_view(checkpoint: Checkpoint, spec: DraftSpec, contract: Contract) -> str | None:
    from eagle3diag.engines.view import engine_view

    return engine_view(checkpoint, spec, contract).draft_class


def _scan(classes: Classes, target_arch: str | None, runner: str | None, draft_class: str | None, text_arch: str | None) -> EngineScan:
    source = classes.source
    engine = source.engine
    valid = runners(engine)
    if runner is not None and runner not in valid:
        raise UsageError(f"unknown runner '{escaped(runner)}' for {engine}: {', '.join(valid) or 'it has one runner'}")
    if runner is None and valid:
        known = releases(engine)
        near = versions.nearest(source.version, known) if source.version is not None else known[-1]
        runner = runner_for(engine, near, text_arch or target_arch)[0]
    if draft_class not in draft_classes(engine):  # an engine without a class of that kind reads it as a Llama draft, or not at all
        draft_class = None if draft_class is None else "llama"
    notes: list[str] = []
    known_classes = draft_architectures(classes)
    draft = open_draft(classes, draft_class, runner)
    kind = draft_class or (draft.kind if draft is not None else "llama")
    read: dict[str, ScannedField] = {}
    about: dict[str, Any] = {"class": None, "architectures": {a: k for a, (k, _) in known_classes.items()}, "kind": kind}
    if draft is None:
        has = ", ".join(sorted({k for k, _ in known_classes.values()})) or "none"
        notes.append(f"no EAGLE-3 draft class of kind {kind} in this source (it has {has}): its behaviours are taken from the record")
        read["architectures"] = ScannedField(about["architectures"], "read", "no class maps a reduced vocabulary and fuses states")
    else:
        read = _read(draft, (read_loading, read_forward, _SERVER[engine]), notes)
        about |= {
            "class": draft.lm.name,
            "where": draft.lm.where,
            "model": None if draft.model is None else draft.model.where,
            "layer": None if draft.layer is None else draft.layer.where,
        }
    nearest, by = _nearest(source, runner, kind, read)
    recorded = _recorded(engine, nearest, runner, kind)
    fields = {
        name: read[name] if name in read else ScannedField(fact.value, "recorded", f"recorded for {nearest}: {fact.source}")
        for name, fact in recorded.items()
    }
    target = scan_target(classes, target_arch, text_arch) if target_arch is not None else None
    if target is not None:
        notes += target.notes
    if by == "agreement":
        notes.append(f"the source states no version: what is not read is taken from {nearest}, whose record agrees with most that is")
    elif source.version is not None and source.version != nearest:
        notes.append(f"{engine} {escaped(source.version)} is not on record: what is not read is taken from {nearest}")
    return EngineScan(
        engine=engine,
        source=source.origin,
        version=source.version,
        nearest=nearest,
        nearest_by=by,
        runner=runner,
        draft_class=kind,
        draft=about,
        target=target,
        fields=fields,
        notes=(*notes, *source.notes),
    )


def scanned_contract(
    engine: str, place: str, draft: Checkpoint, spec: DraftSpec, target: TargetSpec | None = None, launch: Launch | None = None
) -> Contract:
    """The contract of a copy of an engine, for one draft and target (``--engine sglang@PATH``).

    Raises:
        UsageError: nothing there, or no such engine in it.
    """
    arch = text = None
    quantised = launch is not None and bool(launch.quantization)
    moe = False
    if target is not None:
        from eagle3diag.engines.targets import built_class, not_dense

        arch, text = built_class(engine, target, launch), target.text_architecture.value
        quantised = quantised or bool(target.quantization.value)
        moe = not_dense(target)
    classes = Classes(open_source(place, engine))
    version = classes.source.version
    known = releases(engine)
    near = versions.nearest(version, known) if version is not None else known[-1]
    runner, _ = runner_for(engine, near, text or arch, quantised=quantised, moe=moe, launch=launch)
    got = _scan(classes, arch, runner, spec.draft_class, text)
    seen = _class_by_view(draft, spec, got.to_contract())
    if seen is not None and seen != got.draft_class:
        got = _scan(classes, arch, runner, seen, text)
    return got.to_contract()
