"""The formats of dump files, each recognised by its arrays' shapes and companions.

The same key means different things: ``hidden_states`` is the stack of all states (speculators), the final one (ModelOpt) or the
fused aux states (AngelSlim); ``hidden_state`` is the final one (SpecForge) or the aux states (speculators before 0.3). So a name
opens a guess and the widths decide it. Keys, shapes and norm status after the writers' own code (speculators 0.2 to 0.9, SpecForge
0.2.0, ModelOpt 0.47, AngelSlim 0.5, EAGLE, vLLM 0.33, SGLang 0.5.23).
"""

from __future__ import annotations

from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.hidden.formats_files import Array, Contents
from eagle3diag.hidden.formats_layout import Layout, Piece, axis_words
from eagle3diag.hidden.model import DumpIssue, NormStatus, Slot

__all__ = ["recognise"]


def recognise(contents: Contents, hidden: int | None = None) -> Layout:
    """The layout of one sample.

    Args:
        contents: the arrays of a file.
        hidden: width of the target's states, where known.

    Raises:
        CheckpointError: no format that is known, with what was found instead.
    """
    ids = _ids(contents)
    if ids is None:
        raise CheckpointError(f"{contents.name}: no token ids (an integer array input_ids or token_ids); {_found(contents)}")
    for claim in (_portable, _stacked):
        layout = claim(contents, ids, hidden)
        if layout is not None:
            return layout
    raise CheckpointError(f"{contents.name}: no known dump format; {_found(contents)}")


def _found(contents: Contents) -> str:
    shown = [f"{escaped(k, 40)} {a.dtype} {list(a.shape)}" for k, a in list(contents.arrays.items())[:6]]
    return f"it holds {', '.join(shown)}" if shown else "it holds no arrays"


def _ids(contents: Contents) -> str | None:
    for key in ("input_ids", "token_ids", "tokens"):
        array = contents.arrays.get(key)
        if array is not None and array.whole and len(_squeezed(array, 1)) == 1:
            return key
    return None


def _squeezed(array: Array, ndim: int) -> tuple[int, ...]:
    """The shape without leading axes of one."""
    shape = array.shape
    while len(shape) > ndim and shape[0] == 1:
        shape = shape[1:]
    return shape


def _mask(contents: Contents, tokens: int) -> tuple[str | None, tuple[DumpIssue, ...]]:
    array = contents.arrays.get("loss_mask")
    if array is None:
        return None, ()
    shape = _squeezed(array, 1)
    numel = 1
    for n in shape:
        numel *= n
    if numel != tokens:
        return None, (DumpIssue("mask", "", f"loss_mask has shape {list(array.shape)} for {tokens} tokens", {"shape": list(array.shape)}),)
    if len(shape) != 1:
        message = f"loss_mask has shape {list(array.shape)}, expected [{tokens}]: against [batch, tokens] it broadcasts to a square"
        return "loss_mask", (DumpIssue("mask", "", message, {"shape": list(array.shape)}),)
    return "loss_mask", ()


_EXTRAS = {
    "target_argmax": "target_argmax",
    "topk_ids": "target_topk_ids",
    "topk_logprobs": "target_topk_logprobs",
    "logsumexp": "target_logsumexp",
}


def _portable(contents: Contents, ids: str, hidden: int | None) -> Layout | None:
    """``hidden_states.K`` per HF index, ``final_prenorm`` or ``final_postnorm``, and what the target predicted."""
    indexed = sorted(
        (int(k.removeprefix("hidden_states.")), k)
        for k, a in contents.arrays.items()
        if k.startswith("hidden_states.") and k.removeprefix("hidden_states.").isdecimal() and a.floating and len(_squeezed(a, 2)) == 2
    )
    finals: list[tuple[str, NormStatus]] = [("final_prenorm", "pre"), ("final_postnorm", "post"), ("final", "unknown")]
    final = next(((k, s) for k, s in finals if k in contents.arrays and contents.arrays[k].floating), None)
    if contents.kind != "safetensors" or (not indexed and final is None):
        return None
    keys = [k for _, k in indexed] + ([final[0]] if final else [])
    widths = [_squeezed(contents.arrays[k], 2)[-1] for k in keys]
    width = hidden if hidden in widths else max(set(widths), key=widths.count)
    tokens = _squeezed(contents.arrays[ids], 1)[0]
    lengths = [_squeezed(contents.arrays[k], 2)[0] for k in keys]
    mask, issues = _mask(contents, tokens)
    odd = [f"{k} {list(contents.arrays[k].shape)}" for k, w in zip(keys, widths, strict=True) if w != width]
    if odd:
        issues += (DumpIssue("shape", "", f"states of another width than {width}: {', '.join(odd)}", {"hidden": width}),)
    if len(set(lengths)) > 1:
        issues += (DumpIssue("length", "", f"states of {min(lengths)} to {max(lengths)} rows", {"rows": sorted(set(lengths))}),)
    shift = _index_shift(contents.metadata.get("index_convention", ""))
    slots = [Slot(i, k + shift, "aux", key) for i, (k, key) in enumerate(indexed)]
    if final:
        slots.append(Slot(len(slots), None, "final", final[0]))
    said = "metadata index_convention" if "index_convention" in contents.metadata else "no index_convention in the metadata, HF assumed"
    return Layout(
        format="portable",
        evidence=(f"{len(indexed)} arrays hidden_states.K [tokens, {width}]{f' and {final[0]}' if final else ''}", said),
        hidden=width,
        slots=tuple(slots),
        pieces=tuple(Piece(s.name) for s in slots),
        ids=ids,
        tokens=tokens,
        rows=min(lengths),
        final_norm=final[1] if final else "unknown",
        axis=axis_words(False),
        mask=mask,
        extras={f: k for f, k in _EXTRAS.items() if k in contents.arrays},
        issues=issues,
        metadata=contents.metadata,
    )


def _index_shift(text: str) -> int:
    """What to add to a recorded index to get the HF one, after the words of ``index_convention``."""
    low = text.lower()
    if "hf" in low or "output_hidden_states" in low or "vllm" in low:
        return 0
    return 1 if any(word in low for word in ("layer output", "output of layer", "after layer", "sglang")) else 0


def _stacked(contents: Contents, ids: str, hidden: int | None) -> Layout | None:
    """``hidden_states`` [tokens, A + 1, hidden] beside ``token_ids``: speculators 0.5 and later, and vLLM's connector, which it uses."""
    array = contents.arrays.get("hidden_states")
    if array is None or not array.floating:
        return None
    shape = _squeezed(array, 3)
    tokens = _squeezed(contents.arrays[ids], 1)[0]
    if len(shape) != 3 or (len(array.shape) == 3 and array.shape[0] == 1 and shape[1] == tokens and tokens > 1):
        return None
    planes_axis, why = _planes_axis(shape, tokens)
    planes, rows = shape[planes_axis], shape[1 - planes_axis]
    mask, issues = _mask(contents, tokens)
    if planes == 0:
        raise CheckpointError(f"{contents.name}: hidden_states {list(array.shape)} has no plane")
    slots = tuple(
        Slot(i, None, "final" if i == planes - 1 else "aux", f"hidden_states[:, {i}]" if planes_axis else f"hidden_states[{i}]")
        for i in range(planes)
    )
    return Layout(
        format="speculators",
        evidence=(f"hidden_states {list(array.shape)} beside {ids} [{tokens}]", why, "last plane is the final state before the norm"),
        hidden=shape[2],
        slots=slots,
        pieces=tuple(Piece("hidden_states", i, planes_axis) for i in range(planes)),
        ids=ids,
        tokens=tokens,
        rows=rows,
        final_norm="pre",
        axis=axis_words(True, planes_axis == 1),
        mask=mask,
        issues=issues,
        metadata=contents.metadata,
    )


def _planes_axis(shape: tuple[int, ...], tokens: int) -> tuple[int, str]:
    """Which of the first two axes counts planes, and why."""
    first, second = shape[0], shape[1]
    if first == tokens:
        return 1, "first axis is as long as the token ids" if second != tokens else "both axes are as long as the token ids: tokens first"
    if second == tokens:
        return 0, "second axis is as long as the token ids: slots stand first"
    axis = 1 if second <= first else 0
    return axis, f"neither axis has the {tokens} tokens; the shorter one ({shape[axis]}) counts slots"
