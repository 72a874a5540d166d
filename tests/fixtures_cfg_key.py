"""For every CFG and KEY rule one case that makes it speak and a close neighbour that must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Case
from tests.factory import AUX_LAYER_OUTPUT, speculators_config, tiny_config, tiny_target, tiny_tensors, write_draft

Fixture = Callable[[Path], Case]

OLD, NEW, VLLM = "sglang==0.5.9", "sglang==0.5.23", "vllm==0.33.0"


def case(
    tmp: Path,
    tensors: Any = None,
    config: Any = None,
    *,
    engine: str | None = None,
    target: Any = None,
    launch: str | None = None,
    **extra: Any,
) -> Case:
    """A case of a tiny draft; ``target`` is a dict of changes to the tiny target's config."""
    folder = write_draft(
        tmp / "draft", tiny_tensors() if tensors is None else tensors, tiny_config() if config is None else config, **extra
    )
    where = None if target is None else tiny_target(tmp / "target", **target)
    return make_case(folder, engine=engine, target=where, launch=launch)


def sglang(**change: Any) -> dict[str, Any]:
    return tiny_config(aux="nested", **change)


def with_tensor(name: str, value: torch.Tensor, **kw: Any) -> dict[str, torch.Tensor]:
    return tiny_tensors(**kw) | {name: value}


def _config_text(tmp: Path, text: str) -> Case:
    folder = write_draft(tmp / "draft", tiny_tensors(), None)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return make_case(folder)


def _eagle1(tmp: Path, engine: str | None) -> Case:
    t = tiny_tensors(drop=["layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"])
    t["fc.weight"] = t["fc.weight"][:, :128]
    for p in "qkv":
        t[f"layers.0.self_attn.{p}_proj.weight"] = t[f"layers.0.self_attn.{p}_proj.weight"][:, :64]
    return case(tmp, t, tiny_config(aux=None, drop=["draft_vocab_size"], architectures=["LlamaForCausalLM"]), engine=engine)


def _sharded(tmp: Path, *, complete: bool) -> Case:
    from safetensors.torch import save_file

    t = tiny_tensors()
    folder = write_draft(tmp / "draft", None, tiny_config())
    names = sorted(t)
    parts = {"model-00001-of-00002.safetensors": names[:6], "model-00002-of-00002.safetensors": names[6:]}
    for file, held in parts.items():
        if complete or file.startswith("model-00001"):
            save_file({n: t[n].contiguous() for n in held}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f for f, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return make_case(folder)


def _truncated(tmp: Path, share: float) -> Case:
    folder = write_draft(tmp / "draft", tiny_tensors(), tiny_config())
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * share)])
    return make_case(folder)


def _odd_names(tmp: Path) -> Case:
    t = {f"thing.{i}": torch.rand(4, 4) for i in range(3)}
    return case(tmp, t, {"hidden_size": 4, "num_hidden_layers": 1})


MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "type": "mrope"}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention"], "use_sliding_window": True}

FIRING: dict[str, Fixture] = {
    "CFG101": lambda p: _config_text(p, '{"architectures": ['),
    "CFG102": _odd_names,
    "CFG103": lambda p: case(p, config=sglang(), config_speculators=speculators_config(ids=[0, 2, 6])),
    "CFG104": lambda p: case(p, config=sglang(architectures=["Qwen3ForCausalLM"]), engine=NEW),
    "CFG105": lambda p: case(p, config=tiny_config(drop=["draft_vocab_size"]), engine=NEW),
    "CFG106": lambda p: case(p, config=sglang(tie_word_embeddings=True), engine=NEW),
    "CFG107": lambda p: case(p, config=tiny_config(num_attention_heads=8, drop=["head_dim"])),
    "CFG108": lambda p: case(p, config=tiny_config(max_position_embeddings=2048), target={}),
    "CFG109": lambda p: case(
        p,
        tiny_tensors(layer="midlayer"),
        sglang(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, drop=["rope_theta"]),
        engine=OLD,
    ),
    "CFG110": lambda p: case(p, config=tiny_config(norm_before_fc=True)),
    "CFG111": lambda p: case(p, config=sglang(target_hidden_size=None)),
    "CFG112": lambda p: case(p, target={"hidden_size": 96, "num_attention_heads": 6}),
    "CFG113": lambda p: _eagle1(p, NEW),
    "CFG114": lambda p: case(p, config=tiny_config(rope_scaling=MROPE), target={}),
    "CFG115": lambda p: case(p, config=tiny_config(aux=None), engine=VLLM, target={}),
    "KEY201": lambda p: case(p, tiny_tensors(layer="midlayer", drop=["fc.weight"]), sglang(), engine=OLD),
    "KEY202": lambda p: case(p, with_tensor("layers.0.self_attn.q_proj.bias", torch.rand(64).bfloat16()), sglang(), engine=NEW),
    "KEY203": lambda p: case(p, config=sglang(), engine=OLD),
    "KEY204": lambda p: case(p, config=tiny_config(intermediate_size=96)),
    "KEY205": lambda p: case(p, config=tiny_config(ids=[2, 6, 9, 11])),
    "KEY206": lambda p: case(p, tiny_tensors(layer="midlayer", lm_head=False), sglang(), engine=OLD),
    "KEY207": lambda p: case(p, config=tiny_config(num_hidden_layers=2)),
    "KEY208": lambda p: _sharded(p, complete=False),
    "KEY209": lambda p: case(p, tiny_tensors() | {"d2t": tiny_tensors()["d2t"].float()}, sglang(), engine=NEW),
    "KEY210": lambda p: _truncated(p, 0.7),
}

QUIET: dict[str, Fixture] = {
    "CFG101": lambda p: _config_text(p, json.dumps(tiny_config())),
    "CFG102": lambda p: case(p, config=speculators_config()),
    # the same layers in the two conventions: ids differ, meaning does not
    "CFG103": lambda p: case(p, config=sglang(ids=AUX_LAYER_OUTPUT), config_speculators=speculators_config()),
    "CFG104": lambda p: case(p, config=tiny_config(architectures=["LlamaForCausalLM"]), engine=VLLM),  # vLLM renames it
    "CFG105": lambda p: case(p, tiny_tensors(draft_vocab=256), tiny_config(draft_vocab_size=256)),
    "CFG106": lambda p: case(p, tiny_tensors(draft_vocab=256, lm_head=False), tiny_config(tie_word_embeddings=True, draft_vocab_size=256)),
    "CFG107": lambda p: case(p, tiny_tensors(head_dim=32), tiny_config(head_dim=32)),  # heads x head_dim need not be hidden
    "CFG108": lambda p: case(
        p,
        config=sglang(max_position_embeddings=2048),
        target={},
        launch="sglang serve --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path d --context-length 2048",
    ),
    "CFG109": lambda p: case(
        p, config=sglang(rope_parameters={"rope_theta": 1e5, "rope_type": "default"}, drop=["rope_theta"]), engine=NEW, target={}
    ),
    "CFG110": lambda p: case(p, tiny_tensors(input_norm=True), tiny_config(norm_before_fc=True)),
    "CFG111": lambda p: case(p, config=speculators_config(target_hidden_size=None)),
    "CFG112": lambda p: case(p, target={}),
    "CFG113": lambda p: case(p, engine=VLLM),
    "CFG114": lambda p: case(
        p,
        config=tiny_config(rope_scaling=MROPE),
        target={"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"},
    ),
    "CFG115": lambda p: case(p, config=sglang(), engine=VLLM, target={}),  # recorded, though not where this engine reads: AUX402
    "KEY201": lambda p: case(p, tiny_tensors(embed=False, t2d=False), engine=VLLM),
    "KEY202": lambda p: case(p, engine=NEW),  # t2d is skipped on purpose
    "KEY203": lambda p: case(p, tiny_tensors(layer="midlayer"), sglang(), engine=OLD),
    "KEY204": lambda p: case(p, tiny_tensors(layers=2), tiny_config(num_hidden_layers=2)),  # deeper layers read 1 x hidden
    "KEY205": lambda p: case(p, tiny_tensors(n_aux=4), tiny_config(ids=[2, 4, 6, 9])),
    "KEY206": lambda p: case(p, tiny_tensors(draft_vocab=256, lm_head=False), tiny_config(draft_vocab_size=256), engine=VLLM),
    "KEY207": lambda p: case(p, tiny_tensors(layers=2), tiny_config(num_hidden_layers=2)),
    "KEY208": lambda p: _sharded(p, complete=True),
    "KEY209": lambda p: case(p, {k: v.float() if k.endswith("norm.weight") else v for k, v in tiny_tensors().items()}),
    "KEY210": lambda p: _truncated(p, 1.0),
}
