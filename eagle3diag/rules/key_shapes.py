"""KEY, second part: shapes and layer counts against the config, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator

from eagle3diag.errors import escaped
from eagle3diag.rules.model import Case, Finding, Severity
from eagle3diag.rules.reading import config_int, file_name, is_eagle3, label, numbers, shape_of, stated
from eagle3diag.rules.registry import finding, rule


def _expected_shapes(case: Case) -> dict[str, tuple[int | None, ...]]:
    """Canonical name -> shape by the config, None for a size it does not state. Head counts (CFG107), head rows (CFG105) and the
    width of fc (KEY205) have rules of their own and are left open here."""
    n = numbers(case.spec)
    h, inter = n.get("hidden_size"), n.get("intermediate_size")
    draft, whole = n.get("draft_vocab_size"), n.get("vocab_size")
    wide = n.get("target_hidden_size", h)
    out: dict[str, tuple[int | None, ...]] = {
        "fc.weight": (h, None),
        "norm.weight": (h,),
        "lm_head.weight": (None, h),
        "embed_tokens.weight": (whole, h),
    }
    head = shape_of(case, "lm_head.weight")
    out["d2t"] = (head[0] if head else draft,)  # a head that disagrees with the config is CFG105's
    out["t2d"] = (whole,)
    for name in case.spec.canonical:
        if name.startswith("fc_norm."):
            out[name] = (wide,)
    fc = shape_of(case, "fc.weight")
    if fc is not None and len(fc) == 2:
        out["input_norm.weight"] = (fc[1],)
    for i in range(case.spec.layers_in_file):
        at = f"layers.{i}."
        into = None if h is None else 2 * h if i == 0 else h
        for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            out[f"{at}{part}.weight"] = (h,)
        for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa"):
            out[f"{at}self_attn.{part}.weight"] = (None, into)
        out[f"{at}self_attn.o_proj.weight"] = (h, None)
        out[f"{at}mlp.gate_proj.weight"] = out[f"{at}mlp.up_proj.weight"] = (inter, h)
        out[f"{at}mlp.gate_up_proj.weight"] = (None if inter is None else 2 * inter, h)
        out[f"{at}mlp.down_proj.weight"] = (h, inter)
    return out


@rule("KEY204", severity=Severity.ERROR)
def wrong_shape(case: Case) -> Iterator[Finding]:
    """A shape disagrees with the config.

    ## What is wrong
    A tensor has another shape than `hidden_size`, `intermediate_size` or `vocab_size` of the config make it. The first decoder layer
    reads embedding and state side by side, so its q, k and v are 2 x hidden wide; deeper layers are 1 x hidden wide.

    ## Why it costs acceptance
    Most mismatches stop the load. Too many rows of gate and up, and too many columns of down, are cut off silently by both engines.

    ## How it is detected
    Header shapes against the sizes the config states. `t2d` is read by no engine, so its length is a warning.

    ## How to fix it
    Take config and weights from the same training run.

    ## Engine versions
    All.

    ## Source
    Both engines' loaders run on small checkpoints with other shapes; public reports: deepseek-ai/DeepSpec 44, SpecForge 76, vllm 33330.
    """
    if not is_eagle3(case):
        return
    wrong: dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]] = {}
    for canonical, want in _expected_shapes(case).items():
        shape = shape_of(case, canonical)
        if shape is None:
            continue
        if len(shape) != len(want) or any(w is not None and s != w for s, w in zip(shape, want, strict=False)):
            wrong[canonical] = (shape, want)
    if wrong.get("embed_tokens.weight") and "hidden_size" not in numbers(case.spec):
        del wrong["embed_tokens.weight"]
    for group in ([c for c in wrong if c != "t2d"], [c for c in wrong if c == "t2d"]):
        if not group:
            continue
        shape, want = wrong[group[0]]
        name = file_name(case.spec, group[0])
        words = " x ".join("any" if w is None else f"{w:,}" for w in want)
        more = f"; {len(group) - 1} more tensors disagree" if len(group) > 1 else ""
        yield finding(
            "KEY204",
            f"{escaped(name, 90)} is {' x '.join(f'{s:,}' for s in shape)}, the config makes it {words}{more}",
            severity=Severity.WARNING if group == ["t2d"] else None,
            evidence={
                "sizes in the config": numbers(case.spec),
                **{file_name(case.spec, c): {"file": list(wrong[c][0]), "config": list(wrong[c][1])} for c in group},
            },
            remedy="Take config.json and weights from the same training run.",
            where=name,
            engines=label(case),
        )


@rule("KEY205", severity=Severity.ERROR)
def fc_width(case: Case) -> Iterator[Finding]:
    """The input width of `fc` is not (number of aux layers) x (target hidden size).

    ## What is wrong
    `fc` fuses the captured target states, side by side. Its width does not fit the number of recorded layer ids, or the width of one
    state is not the recorded `target_hidden_size`.

    ## Why it costs acceptance
    The engine stops at load or at the first request; or, where the width happens to equal the hidden size, `fc` is skipped in silence.

    ## How it is detected
    Columns of `fc.weight` against the distinct recorded ids (`num_aux_hidden_states` wins; 3 where nothing is recorded) times
    `target_hidden_size` (`hidden_size` where that is not recorded).

    ## How to fix it
    Record exactly the layers the draft was trained on, without the verifier's last layer that some dumps add; write
    `target_hidden_size` where target and draft differ in width.

    ## Engine versions
    All. Other numbers than 3 need SGLang 0.5.12 or vLLM 0.22.0.

    ## Source
    SGLang 0.5.12 `models/llama_eagle3.py:218`, vLLM 0.22.0 `model_executor/models/llama_eagle3.py:180-185`; public reports: vllm 54526 and
    18906, sglang 24663, vllm-project/speculators 839.
    """
    fc = shape_of(case, "fc.weight")
    if not is_eagle3(case) or fc is None or len(fc) != 2 or case.spec.use_aux_hidden_state.value is False:
        return
    n, spec = numbers(case.spec), case.spec
    wide = n.get("target_hidden_size", n.get("hidden_size"))
    if wide is None:
        return
    recorded = stated(case, "num_aux_hidden_states").value
    if isinstance(recorded, int) and not isinstance(recorded, bool) and recorded > 0:
        count, whence = recorded, "num_aux_hidden_states"
    elif spec.aux.raw:
        count, whence = len(set(spec.aux.raw)), spec.aux.where
    else:
        count, whence = 3, "nothing recorded: 3"
    if fc[1] == count * wide:
        return
    name = file_name(spec, "fc.weight")
    fits = f": that is {fc[1] // wide} states" if fc[1] % wide == 0 else ""
    target = case.target.hidden_size.value if case.target is not None else None
    missing_width = "target_hidden_size" not in n and target is not None and fc[1] == count * target
    yield finding(
        "KEY205",
        f"{escaped(name)} takes {fc[1]:,} columns{fits}, {count} aux layers of width {wide:,} make {count * wide:,}",
        evidence={"fc columns": fc[1], "aux layers": count, "counted from": whence, "state width": wide, "target hidden size": target},
        remedy=f"Write target_hidden_size: {target} into the config."
        if missing_width
        else "Record exactly the layers the draft was trained on.",
        where=name,
        engines=label(case),
    )


@rule("KEY207", severity=Severity.ERROR)
def layer_count(case: Case) -> Iterator[Finding]:
    """Decoder layers in the file and `num_hidden_layers` disagree.

    ## What is wrong
    The config declares another number of draft layers than the file holds.

    ## Why it costs acceptance
    Declared but missing layers start as uninitialised memory without a message; layers in the file beyond the declared number are
    dropped (SGLang) or refused (vLLM). Converters with a one-layer skeleton leave the latter.

    ## How it is detected
    Distinct layer numbers among the tensor names against `num_hidden_layers`.

    ## How to fix it
    Set `num_hidden_layers` to the number of layers trained, or export the missing layers.

    ## Engine versions
    All. More than one layer needs SGLang 0.5.12 or vLLM 0.11.1.

    ## Source
    Both engines' loaders run with another layer count; SGLang 0.5.12 and vLLM 0.11.1 `models/llama_eagle3.py`; public report:
    vllm-project/speculators 812.
    """
    declared, held = config_int(case.spec.num_layers), case.spec.layers_in_file
    if declared is None or held == 0 or declared == held:
        return
    yield finding(
        "KEY207",
        f"num_hidden_layers is {declared:,}, the file holds {held:,} decoder layer{'s' if held > 1 else ''}",
        evidence={"num_hidden_layers": declared, "layers in the file": held, "read from": case.spec.num_layers.where},
        remedy=f"Set num_hidden_layers to {held}"
        + (", or export the missing layers." if declared > held else " if all of them were trained."),
        where=case.spec.num_layers.where,
        engines=label(case),
    )
