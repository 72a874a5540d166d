"""The wiring a draft was trained with, as far as it is recorded: dialects section 3.1.

A flag may mean another thing in another framework, and some frameworks ignore what their own config says. What no file records (an
unstated ``norm_before_residual`` in a hand-made export) takes the framework's default; only a dump can prove it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from eagle3diag.checkpoint.dialects import MODELOPT_KEYS, speculators_version
from eagle3diag.checkpoint.fields import as_bool, as_mapping
from eagle3diag.checkpoint.model import Algorithm, AuxIds, ConfigFile, Dialect
from eagle3diag.checkpoint.wiring import Fc, Mapping_, Wiring
from eagle3diag.provenance import Valued

__all__ = ["residual_default", "trained_wiring"]

Head = Literal["draft", "target", "embedding"]


def residual_default(configs: tuple[ConfigFile, ...]) -> tuple[bool, str]:
    """What an unstated ``norm_before_residual`` was in training, and why.

    speculators up to 0.3 always normed the residual and 0.4 did so unless told otherwise (4e2e6407); its later class default is False, and
    no other trainer knows the flag.
    """
    for config in configs:
        if config.schema == "speculators":
            version = speculators_version(config.data)
            if version is not None and version < (0, 5):
                return True, f"speculators {version[0]}.{version[1]} norms the residual"
            return False, "class default of speculators"
    return False, "trainers other than speculators never norm the residual"


def trained_wiring(
    dialect: Dialect,
    algorithm: Algorithm,
    values: Mapping[str, Valued[Any]],
    aux: AuxIds,
    canonical: Mapping[str, str],
    configs: tuple[ConfigFile, ...],
) -> Wiring:
    """The wiring as trained, from the normalised values of the spec (by field name)."""
    config = configs[0].data if configs else {}
    eagle = as_mapping(config.get("eagle_config")) or {}
    by_modelopt = dialect.name.startswith(("modelopt", "mla")) and any(k in eagle for k in MODELOPT_KEYS)

    def flag(name: str) -> bool:
        return values[name].value is True

    residual = flag("norm_before_residual")
    version = next((v for c in configs if c.schema == "speculators" and (v := speculators_version(c.data)) is not None), None)
    if version is not None and version < (0, 4):
        residual = True  # the flag could not be switched off
    norm_output, final_norm = flag("norm_output"), True
    if dialect.name.startswith("specforge"):
        # SpecForge's own norm_output is the final norm in front of the head; what it feeds back is always pre-norm
        norm_output, final_norm = False, not (values["norm_output"].known and values["norm_output"].value is False)
    elif by_modelopt:
        stated = as_bool(eagle.get("use_last_layernorm"))
        final_norm = "norm.weight" in canonical if stated is None else stated
    theta, scaling = values["rope_theta"].value, values["rope_scaling"].value
    if dialect.name in ("angelslim", "safeailab") and dialect.confidence != "low":
        theta, scaling = 10000.0, None  # their training code knows no other base, whatever the config says
    uses_aux = values["use_aux_hidden_state"].value is not False and algorithm not in ("eagle1", "hass")
    fc: Fc = "applied" if uses_aux or algorithm in ("eagle1", "hass") else ("bypassed" if "fc.weight" in canonical else "absent")
    trained_embedding = algorithm == "peagle" or any(c.data.get("embed_requires_grad") is True for c in configs)
    return Wiring(
        aux_layers=aux.hf,
        state="aux" if uses_aux else "final",
        fc=fc,
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_before_residual=residual,
        norm_output=norm_output,
        final_norm=final_norm,
        double_norm=by_modelopt and dialect.name in ("modelopt", "mla-eagle3"),
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_window=values["sliding_window"].value,
        mapping=_mapping(values, canonical),
        embedding="draft" if trained_embedding else "target",
        head=_head(values, canonical),
    )


def _mapping(values: Mapping[str, Valued[Any]], canonical: Mapping[str, str]) -> Mapping_:
    vocab, draft = values["vocab_size"].value, values["draft_vocab_size"].value
    if vocab is not None and draft is not None and draft >= vocab:
        return "none"
    if "d2t" in canonical:
        return "offset"
    return "missing" if vocab is not None and draft is not None and draft > 0 else "none"


def _head(values: Mapping[str, Valued[Any]], canonical: Mapping[str, str]) -> Head:
    if "lm_head.weight" in canonical:
        return "draft"
    if values["tie_word_embeddings"].value is True:
        return "embedding"
    vocab, draft = values["vocab_size"].value, values["draft_vocab_size"].value
    reduced = vocab is not None and draft is not None and 0 < draft < vocab
    return "draft" if reduced else "target"
