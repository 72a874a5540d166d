"""A checkpoint seen through a contract: the virtual server.

``serve`` asks, in the order an engine starts: which algorithm, which class, which sizes (``view``, ``parameters``), what the loader does
(``load``), what is replaced or missing afterwards (here), which target states reach the draft (``capture``), and what the forward pass
then is (``forward``). A refusal (``refusals``) does not end the simulation: the first one is kept and the rest is still told, since the
user has to mend all of it.
"""

from __future__ import annotations

from typing import Any

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
from eagle3diag.engines.capture import capture
from eagle3diag.engines.contract import engine_source, load_contract, parse_engine, runner_for
from eagle3diag.engines.forward import flags_defaulted, flags_ignored, quirks, wiring
from eagle3diag.engines.launch import effective_method
from eagle3diag.engines.load import Loaded, load
from eagle3diag.engines.model import AuxCapture, Contract, FcState, Launch, Refusal, ServedDraft, TensorFate
from eagle3diag.engines.parameters import Parameter, build_parameters, uses_aux, wants_norm_before_fc
from eagle3diag.engines.refusals import construction, later, start
from eagle3diag.engines.targets import not_dense
from eagle3diag.engines.view import EngineView, Sizes, engine_view, sizes

__all__ = ["contract_for", "serve"]


def contract_for(
    engine: str, draft: Checkpoint, spec: DraftSpec, target: TargetSpec | None = None, launch: Launch | None = None
) -> Contract:
    """The contract that serves this draft: version as asked, runner by target and launch line, class by architecture.

    Args:
        engine: ``sglang==0.5.9``, ``vllm`` (newest on record), or ``sglang@PATH`` for the source of a copy of the engine.

    Raises:
        UsageError: no such engine.
    """
    copy = engine_source(engine)
    if copy is not None:
        from eagle3diag.engines.scan import scanned_contract

        return scanned_contract(*copy, draft, spec, target, launch)
    name, version = parse_engine(engine)
    if version is None and launch is not None and launch.engine == name:
        version = launch.version
    arch = None
    if target is not None:
        arch = target.text_architecture.value or target.architecture.value
    quantised = bool(target is not None and target.quantization.value) or bool(launch is not None and launch.quantization)
    runner, _ = runner_for(name, version, arch, quantised=quantised, moe=target is not None and not_dense(target), launch=launch)
    first = load_contract(name, version, runner=runner)
    seen = engine_view(draft, spec, first).draft_class or spec.draft_class
    return load_contract(name, version, runner=runner, draft_class=seen)


def _after_load(
    loaded: Loaded, params: dict[str, Parameter], view: EngineView, s: Sizes, contract: Contract, algorithm: str
) -> dict[str, str]:
    """Replace what the engine replaces after loading, and name what nothing filled."""
    never = {
        slot.canonical: param.start for param in params.values() for slot in param.slots.values() if slot.canonical not in loaded.filled
    }
    embed, head = "embed_tokens.weight", "lm_head.weight"
    if target_embedding(view, s, contract, has_own=embed in loaded.filled):
        if embed in loaded.filled:
            name = loaded.filled[embed]
            loaded.fates[name] = TensorFate("replaced", "the target's embedding", "the engine sets the target's embedding after loading")
        elif embed in never or contract["embedding"] == "refuse-own":
            never[embed] = "target"
    if head in loaded.filled and (target_head(view, s, contract) or algorithm == "eagle"):
        name = loaded.filled[head]
        loaded.fates[name] = TensorFate("replaced", "the target's lm_head", "the engine sets the target's head after loading")
    elif head in never and (contract["lm_head_missing"] == "target" or target_head(view, s, contract) or algorithm == "eagle"):
        never[head] = "target"
    if not contract["d2t_applied"] and "d2t" in loaded.filled:
        loaded.fates[loaded.filled["d2t"]] = TensorFate("dropped", "", "this version forgets the mapping after loading it")
    return never


def target_embedding(view: EngineView, s: Sizes, contract: Contract, *, has_own: bool) -> bool:
    """Whether the target's embedding ends up in the draft (behaviours ``embedding``, ``embedding_exempt``)."""
    policy, exempt = contract["embedding"], contract["embedding_exempt"]
    same_width = s.target_hidden == s.hidden
    if policy == "target-always":
        if "target_hidden_size" in view.config and exempt != "none":
            stated = view.config["target_hidden_size"]
            if stated is None:
                return bool(exempt == "target_hidden_size-differs")
            return bool(stated == s.hidden)
        return True
    if policy == "target-if-same-shape":
        return same_width
    if policy == "refuse-own":
        return True
    return not has_own and same_width


def target_head(view: EngineView, s: Sizes, contract: Contract) -> bool:
    """Whether the target's lm_head replaces the draft's own."""
    if contract["lm_head_replaced"] == "same-shape" and s.draft_vocab == s.vocab and s.target_hidden == s.hidden:
        return True
    if view.config.get("draft_vocab_size") is not None:
        return False
    rule = contract["draft_vocab_null" if "draft_vocab_size" in view.config else "draft_vocab_absent"]
    return bool(rule == "target-head") and not (contract["tie"] == "embedding" and view.flag("tie_word_embeddings"))


def _overlap_loses(contract: Contract, target: TargetSpec | None, launch: Launch | None) -> bool:
    """Two-batch overlap leaves one of a DeepSeek target's states (behaviour ``two_batch_overlap``)."""
    if launch is None or "enable-two-batch-overlap" not in launch.options or target is None:
        return False
    arch = str(target.text_architecture.value or target.architecture.value or "")
    return contract["two_batch_overlap"] == "partial" and arch.startswith(("Deepseek", "Kimi"))


def _fc(view: EngineView, s: Sizes, contract: Contract, algorithm: str, aux: AuxCapture, overlap: bool) -> FcState:
    width = s.n_aux * s.target_hidden if s.target_hidden else None
    own = s.hidden if contract["fc_condition"] == "width-differs" else None
    arrives = width
    if algorithm == "eagle" or overlap or not uses_aux(view, contract):
        arrives = s.target_hidden
    elif aux.prefill_hf is not None and s.target_hidden and aux.hook is not False:
        arrives = len(aux.prefill_hf) * s.target_hidden
    runs = arrives != s.hidden if contract["fc_condition"] == "width-differs" else algorithm != "eagle" and uses_aux(view, contract)
    return FcState(bool(runs), width, own)


def serve(
    draft: Checkpoint,
    engine: str,
    *,
    target: TargetSpec | None = None,
    launch: Launch | None = None,
    spec: DraftSpec | None = None,
    contract: Contract | None = None,
) -> ServedDraft:
    """What one engine version makes of a draft.

    Args:
        draft: opened checkpoint; only headers are read.
        engine: ``sglang==0.5.9``, ``vllm==0.33.0``, a name alone for the newest on record, or ``sglang@PATH`` to read a copy of it.
        target: for capture, vocabulary and length questions.
        launch: a parsed launch line of the same engine.
        contract: serve with this contract instead of the recorded one.

    Raises:
        UsageError: no such engine or version.

    Example:
        >>> from eagle3diag import open_checkpoint
        >>> served = serve(open_checkpoint("data_samples/smollm2-eagle3/draft"), "sglang==0.5.9")
        >>> served.tensors["layers.0.mlp.up_proj.weight"].fate, served.tensors["fc.weight"].fate
        ('dropped', 'loaded')
    """
    if spec is None:
        from eagle3diag.checkpoint.spec import draft_spec

        spec = draft_spec(draft)
    contract = contract or contract_for(engine, draft, spec, target, launch)
    view = engine_view(draft, spec, contract)
    method, why = effective_method(launch, contract, draft.config)
    algorithm = method or "eagle3"
    s = sizes(view, contract, spec)
    target_vocab = target.vocab_size.value if target is not None else None
    params = build_parameters(view, s, contract, target_vocab)
    tied = contract["tie"] == "embedding" and view.flag("tie_word_embeddings")
    flags = {"use_aux_hidden_state": uses_aux(view, contract), "norm_before_fc": wants_norm_before_fc(view, contract)}
    loaded = load(draft.tensors, params, contract, tied=tied, flags=flags)
    never = _after_load(loaded, params, view, s, contract, algorithm)
    aux = capture(contract, draft.config or view.config, target, launch, s.hidden)
    if algorithm != "eagle3":
        aux = _no_aux(aux, why)
    refused = _first(view, s, contract, algorithm, loaded, never, aux, spec, target, launch)
    fc = _fc(view, s, contract, algorithm, aux, _overlap_loses(contract, target, launch))
    return ServedDraft(
        contract=contract,
        refused=refused,
        tensors={n: loaded.fates[n] for n in draft.tensors},
        never_filled=dict(sorted(never.items())),
        fc=fc,
        aux=aux,
        wiring=wiring(view, s, contract, spec, aux, fc, loaded.filled, never, algorithm),
        algorithm=algorithm,
        fails_later=tuple(later(view, s, contract, draft, target, launch, aux, loaded.filled, algorithm)),
        ignored=flags_ignored(view, contract, spec, draft),
        defaulted=flags_defaulted(view, contract, spec),
        quirks=quirks(contract),
        launch=launch,
        trained=spec.wiring,
        target_layers=None if target is None else target.num_layers.value,
    )


def _no_aux(aux: AuxCapture, why: str) -> AuxCapture:
    return AuxCapture(ids=None, source=f"not asked for: {why}", prefill_hf=None, verify_hf=None, unread=aux.unread, hook=aux.hook)


def _first(
    view: EngineView, s: Sizes, contract: Contract, algorithm: str, loaded: Loaded, never: dict[str, str], aux: AuxCapture, *rest: Any
) -> Refusal | None:
    """The first loud stop, in the order an engine starts."""
    spec, target, launch = rest
    for refusal in construction(view, s, contract, spec, algorithm):
        return refusal
    if loaded.failures:
        return loaded.failures[0]
    if contract["missing"] == "refuse":
        absent = sorted(n for n, start_value in never.items() if start_value != "target")
        if absent:
            text = f"ValueError: Following weights were not initialized from checkpoint: {absent}"
            return Refusal(
                "load_weights",
                text if contract.engine == "vllm" else f"{absent[0]} is needed and not in the file",
                "this version checks for missing tensors",
                "missing",
            )
    for refusal in start(view, s, contract, target, launch, aux, loaded.filled, algorithm):
        return refusal
    return None
