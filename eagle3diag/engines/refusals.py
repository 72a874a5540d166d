"""Loud failures, in the order an engine meets them: while the class is built, at start, and at the first request.

The texts follow the engines' own messages closely enough to be recognised in a log. What is merely wrong and stays silent is not here;
it shows in the tensors' fates and the wiring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3diag.checkpoint.model import Checkpoint, DraftSpec, TargetSpec
from eagle3diag.engines.model import AuxCapture, Contract, Launch, Refusal
from eagle3diag.engines.parameters import uses_aux
from eagle3diag.engines.targets import target_support
from eagle3diag.engines.view import EngineView, Sizes

__all__ = ["construction", "draft_dtype", "later", "served_context", "start"]

_OVERRIDE = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def construction(view: EngineView, s: Sizes, contract: Contract, spec: DraftSpec, algorithm: str) -> Iterator[Refusal]:
    """Refusals while the draft class is chosen and built, first met first."""
    c = view.config
    if view.refusal is not None:
        yield view.refusal
    if algorithm == "eagle" and contract["eagle_path"] == "bypass-if-eagle-arch" and not view.stand_in:
        arch = view.architecture or ""
        if not arch.startswith("Eagle"):
            yield Refusal(
                "construct",
                f"ValueError: Model architectures ['Eagle{arch}'] are not supported for now",
                "method eagle puts 'Eagle' before the architecture, and that class is not registered",
                "eagle_path",
            )
    layers = c.get("num_hidden_layers")
    if contract["draft_layers"] == "one" and isinstance(layers, int) and layers != 1:
        text = "ValueError: EAGLE3 currently only supports 1 layer" if contract.engine != "llama.cpp" else "not taken for an EAGLE-3 draft"
        yield Refusal("construct", text, f"num_hidden_layers is {layers}", "draft_layers")
    if "target_hidden_size" in c and c["target_hidden_size"] is None and contract["target_hidden_null"] == "refuse":
        yield Refusal(
            "construct",
            "TypeError: unsupported operand type(s) for *: 'NoneType' and 'int'",
            "target_hidden_size is null",
            "target_hidden_null",
        )
    # a tied head never reads draft_vocab_size until the logits are cut to it (behaviour eagle_path: bypass-cut)
    tied = contract["tie"] == "embedding" and view.flag("tie_word_embeddings") and contract["eagle_path"] == "bypass"
    if not view.stand_in and not tied and c.get("draft_vocab_size") is None:
        stated = "draft_vocab_size" in c
        if contract["draft_vocab_null" if stated else "draft_vocab_absent"] == "refuse":
            text = (
                "TypeError: unsupported operand type(s) for -: 'NoneType' and 'NoneType'"
                if stated
                else "AttributeError: 'LlamaConfig' object has no attribute 'draft_vocab_size'"
            )
            yield Refusal(
                "construct",
                text if contract.engine != "llama.cpp" else "not taken for an EAGLE-3 draft",
                "draft_vocab_size is " + ("null" if stated else "absent"),
                "draft_vocab_null" if stated else "draft_vocab_absent",
            )
    if contract.draft_class == "mla" and contract.engine == "sglang" and s.q_lora is None and not view.stand_in:
        yield Refusal(
            "construct",
            "ValueError: Eagle3 MLA layer requires q_lora_rank in the draft config",
            "q_lora_rank is null or absent",
            "architectures",
        )


def served_context(target: TargetSpec | None, launch: Launch | None) -> tuple[int | None, str]:
    """Context length the server runs with, in tokens, and where that is from."""
    if launch is not None and launch.context is not None:
        return launch.context, "launch line"
    if target is not None and target.max_position.value is not None:
        return target.max_position.value, f"target: {target.max_position.where}"
    return None, "unknown"


def start(
    view: EngineView,
    s: Sizes,
    contract: Contract,
    target: TargetSpec | None,
    launch: Launch | None,
    aux: AuxCapture,
    filled: Mapping[str, str],
    algorithm: str,
) -> Iterator[Refusal]:
    """Refusals between loading and the first request."""
    if contract["max_position"] == "refuse":
        context, where = served_context(target, launch)
        limit = derived_context(view.config)
        override = launch is not None and launch.env.get(_OVERRIDE, "").lower() in ("1", "true")
        if context is not None and limit is not None and context > limit and not override:
            yield Refusal(
                "start",
                f"ValueError: Warning: Target model's context_length ({context}) is greater than the derived context_length ({limit}).",
                f"the draft's max_position_embeddings is {limit}, the served context {context} ({where}); {_OVERRIDE}=1 raises it",
                "max_position",
            )
    if algorithm == "eagle3" and contract["d2t_missing"] == "refuse" and "d2t" not in filled:
        yield Refusal(
            "start",
            "AttributeError: 'LlamaForCausalLMEagle3' object has no attribute 'hot_token_id'",
            "the file holds no d2t, which this version asks for in any case",
            "d2t_missing",
        )
    support = target_support(contract, target, launch)
    if algorithm == "eagle3" and support.refusal is not None and (support.always or uses_aux(view, contract)):
        yield Refusal("start", support.refusal, support.message, "target support")


def derived_context(config: Mapping[str, Any]) -> int | None:
    """Context length an engine derives from a config: positions times the factor of a scaling that stretches them."""
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
        return None
    scaling = config.get("rope_scaling")
    if (
        isinstance(scaling, dict)
        and "original_max_position_embeddings" not in scaling
        and scaling.get("rope_type", scaling.get("type")) != "llama3"
    ):
        factor = scaling.get("factor")
        if isinstance(factor, int | float) and factor > 1:
            return int(limit * factor)
    return limit


def draft_dtype(view: EngineView, contract: Contract) -> str | None:
    """dtype the engine gives the draft under ``--dtype auto``; None where it takes the target's."""
    if contract["dtype"] != "own":
        return None
    stated = next((view.config[k] for k in contract["dtype_keys"] if isinstance(view.config.get(k), str)), None)
    name = (stated or "float32").removeprefix("torch.")
    return "float16" if name == "float32" else name


def later(
    view: EngineView,
    s: Sizes,
    contract: Contract,
    draft: Checkpoint,
    target: TargetSpec | None,
    launch: Launch | None,
    aux: AuxCapture,
    filled: Mapping[str, str],
    algorithm: str,
) -> Iterator[str]:
    """Loud failures at the first forward, one line each."""
    if algorithm == "eagle3" and aux.loud and aux.problem and target_support(contract, target, launch).refusal is None:
        yield aux.problem
    if contract["n_aux_buffers"] == "target-config" and s.n_aux != 3 and algorithm == "eagle3":
        yield f"{s.n_aux} states: {contract.label} sizes idle and draft-extend buffers by the target's config, which means 3"
    if contract["use_aux_flag"] == "refuse" and view.eagle_config.get("use_aux_hidden_state", True) is False:
        yield f"use_aux_hidden_state is false: {contract.label} still hands over {s.n_aux} states but skips fc, so the widths disagree"
    yield from _width(view, s, contract, aux, algorithm)
    if (
        algorithm == "eagle"
        and s.hidden
        and s.target_hidden
        and s.hidden != s.target_hidden
        and contract["fc_condition"] == "width-differs"
    ):
        yield f"launched as EAGLE: the target's last state is {s.target_hidden} wide, fc expects {s.n_aux * s.target_hidden}"
    d2t = filled.get("d2t")
    if (
        d2t is not None
        and contract["d2t_float"] == "fails-on-use"
        and draft.tensors[d2t].dtype[:1] in ("F", "B")
        and draft.tensors[d2t].dtype != "BOOL"
    ):
        yield f"{d2t} is {draft.tensors[d2t].dtype}: IndexError, tensors used as indices must be long, int, byte or bool tensors"
    own, asked = draft_dtype(view, contract), (launch.options.get("dtype") if launch is not None else None)
    if own is not None and not view.stand_in and target is not None and target.dtype.value is not None and asked in (None, "auto"):
        served = target.dtype.value.removeprefix("torch.")
        served = "float16" if served == "float32" else served
        if own != served:
            keys = " or ".join(contract["dtype_keys"])
            yield (
                f"the draft would run in {own} ({keys} says {_stated(view, contract)}), the target in {served}: "
                "RuntimeError, expected m1 and m2 to have the same dtype"
            )


def _stated(view: EngineView, contract: Contract) -> str:
    return str(next((view.config[k] for k in contract["dtype_keys"] if view.config.get(k) is not None), "nothing"))


def _width(view: EngineView, s: Sizes, contract: Contract, aux: AuxCapture, algorithm: str) -> Iterator[str]:
    """The states handed over do not fit ``fc``."""
    if algorithm != "eagle3" or aux.hook is False or aux.loud or not s.target_hidden or not uses_aux(view, contract):
        return
    count = len(aux.prefill_hf) if aux.prefill_hf is not None else len(set(aux.ids)) if aux.ids is not None else None
    if count is None or count == s.n_aux:
        return
    got, want = count * s.target_hidden, s.n_aux * s.target_hidden
    if contract["fc_condition"] == "width-differs" and got == s.hidden:
        return  # bypassed in silence
    yield (
        f"{count} states of width {s.target_hidden} are handed over ({got}), fc is built for {s.n_aux} ({want}): "
        "RuntimeError, mat1 and mat2 shapes cannot be multiplied"
    )
