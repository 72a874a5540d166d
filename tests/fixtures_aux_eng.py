"""One firing and one quiet case for every AUX and ENG code: the same draft, one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3diag.rules.case import make_case
from eagle3diag.rules.model import Case
from tests.factory import HIDDEN, VOCAB, speculators_config, tiny_config, tiny_target, tiny_tensors, trained, write_draft

OLD_SGLANG, SGLANG, OLD_VLLM, VLLM = "sglang==0.5.9", "sglang==0.5.23", "vllm==0.16.0", "vllm==0.33.0"
START_SGLANG = "python -m sglang.launch_server --model-path t --speculative-algorithm {} --speculative-draft-model-path d {}"
START_VLLM = "vllm serve t --speculative-config '{}'"
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 61,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
    },
}

Fixture = Callable[[Path], Case]


def sglang(
    folder: Path,
    engine: str = SGLANG,
    *,
    ids: tuple[int, ...] | None = None,
    target: dict[str, Any] | None = None,
    algorithm: str | None = None,
    chain: str = "",
    launch: str | None = None,
    weights: bool = False,
    embed: bool = False,
    second: dict[str, Any] | None = None,
    aux: str | None = "nested",
    **change: Any,
) -> Case:
    """A tiny draft in the layout SGLang wants, with its target, served by one version."""
    layer = "midlayer" if engine == OLD_SGLANG else "layers.0"
    extra = {} if second is None else {"config_speculators": second}
    draft = write_draft(folder / "draft", tiny_tensors(layer=layer, embed=embed), tiny_config(aux=aux, ids=ids, **change), **extra)
    line = launch or (START_SGLANG.format(algorithm, chain) if algorithm else None)
    return make_case(draft, engine=engine, target=tiny_target(folder / "target", weights=weights, **(target or {})), launch=line)


def vllm(
    folder: Path,
    engine: str = VLLM,
    *,
    ids: tuple[int, ...] | None = None,
    aux: str | None = "top",
    target: dict[str, Any] | None = None,
    speculative: str | None = None,
    launch: str | None = None,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    **change: Any,
) -> Case:
    """A tiny draft in the layout vLLM wants, with its target, served by one version."""
    written = config or tiny_config(aux=aux, ids=ids, **change)
    draft = write_draft(folder / "draft", tensors or tiny_tensors(), written)
    line = launch or (START_VLLM.format(speculative) if speculative else None)
    return make_case(draft, engine=engine, target=tiny_target(folder / "target", **(target or {})), launch=line)


def one_aux(folder: Path, engine: str) -> Case:
    """A draft of a single aux layer as wide as itself."""
    change: dict[str, Any] = {"num_aux_hidden_states": 1}
    config = tiny_config(aux="nested", ids=(5,), **change) if engine == SGLANG else tiny_config(ids=(6,), **change)
    draft = write_draft(folder / "draft", tiny_tensors(n_aux=1), config)
    return make_case(draft, engine=engine, target=tiny_target(folder / "target"))


def residual(folder: Path, *, stated: bool) -> Case:
    """A speculators config with and without ``norm_before_residual``."""
    config = speculators_config()
    if not stated:
        del config["norm_before_residual"]
    return vllm(folder, config=config)


def other_embedding(folder: Path, *, trained_own: bool) -> Case:
    """A draft that ships an embedding, its own or the target's, on an engine that replaces it."""
    tensors = tiny_tensors(embed=True)
    if trained_own:
        tensors["embed_tokens.weight"] = (4 * trained("own.embed", VOCAB, HIDDEN, seed=9)).to(tensors["embed_tokens.weight"].dtype)
    draft = write_draft(folder / "draft", tensors, tiny_config(aux="nested"))
    return make_case(draft, engine=SGLANG, target=tiny_target(folder / "target", weights=True))


GOOD = '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}'
CHAIN = "--speculative-num-steps {} --speculative-eagle-topk {} --speculative-num-draft-tokens {}"

FIRING: dict[str, Fixture] = {
    "AUX401": lambda d: sglang(d, ids=(2, 6, 9), second=speculators_config()),
    "AUX402": lambda d: vllm(d, OLD_VLLM, aux="nested", ids=(3, 4, 10)),
    "AUX403": lambda d: vllm(d, ids=(9, 2, 6)),
    "AUX404": lambda d: sglang(d, OLD_SGLANG, target=KIMI),
    "AUX405": lambda d: sglang(d, algorithm="EAGLE"),
    "AUX406": lambda d: sglang(d, OLD_SGLANG, ids=(2, 4, 9)),
    "AUX407": lambda d: vllm(d, aux=None, target={"num_hidden_layers": 5}),
    "ENG501": lambda d: vllm(d, speculative='{"model": "/data/eagle-runs/draft", "num_speculative_tokens": 3}'),
    "ENG502": lambda d: sglang(d, norm_before_residual=True),
    "ENG503": lambda d: sglang(d, algorithm="EAGLE3", chain=CHAIN.format(4, 1, 24)),
    "ENG504": lambda d: vllm(d, OLD_VLLM, target=KIMI),
    "ENG505": lambda d: other_embedding(d, trained_own=True),
    "ENG506": lambda d: sglang(d, algorithm="EAGLE3", chain="--quantization fp8"),
    "ENG507": lambda d: sglang(d, OLD_SGLANG),
    "ENG508": lambda d: sglang(d, "sglang==0.5.99"),
}

QUIET: dict[str, Fixture] = {
    "AUX401": lambda d: sglang(d, ids=(1, 5, 8), second=speculators_config()),
    "AUX402": lambda d: vllm(d, OLD_VLLM, ids=(3, 4, 10)),
    "AUX403": lambda d: vllm(d, ids=(2, 6, 9)),
    "AUX404": lambda d: sglang(d, target=KIMI),
    "AUX405": lambda d: sglang(d, algorithm="EAGLE3"),
    "AUX406": lambda d: sglang(d, OLD_SGLANG, ids=(1, 5, 8)),
    "AUX407": lambda d: vllm(d, aux=None),
    "ENG501": lambda d: vllm(d, speculative=GOOD),
    "ENG502": lambda d: vllm(d, norm_before_residual=True),
    "ENG503": lambda d: sglang(d, algorithm="EAGLE3", chain=CHAIN.format(4, 1, 5)),
    "ENG504": lambda d: vllm(d, OLD_VLLM),
    "ENG505": lambda d: vllm(d, tensors=tiny_tensors(embed=True)),
    "ENG506": lambda d: sglang(d, algorithm="EAGLE3", chain="--quantization fp8 --speculative-draft-model-quantization unquant"),
    "ENG507": lambda d: sglang(d, SGLANG),
    "ENG508": lambda d: sglang(d, SGLANG),
}
