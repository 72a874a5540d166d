"""The formats of dump files, each recognised by its arrays' shapes and companions.

The same key means different things: ``hidden_states`` is the stack of all states (speculators), the final one (ModelOpt) or the
fused aux states (AngelSlim); ``hidden_state`` is the final one (SpecForge) or the aux states (speculators before 0.3). So a name
opens a guess and the widths decide it. Keys, shapes and norm status after the writers' own code (speculators 0.2 to 0.9, SpecForge
0.2.0, ModelOpt 0.47, AngelSlim 0.5, EAGLE, BaldEagle, TorchSpec, vLLM 0.33, SGLang 0.5.23).
"""

from __future__ import annotations

from eagle3diag.errors import CheckpointError, escaped
from eagle3diag.hidden.formats_beside import Hints, layer_ids
from eagle3diag.hidden.formats_files import IDS, Contents, squeezed
from eagle3diag.hidden.formats_layout import Layout, Piece, axis_words
from eagle3diag.hidden.model import DumpIssue, NormStatus, Slot

__all__ = ["Foreign", "recognise"]

_EXTRAS = {
    "target_argmax": "target_argmax",
    "topk_ids": "target_topk_ids",
    "topk_logprobs": "target_topk_logprobs",
    "logsumexp": "target_logsumexp",
}
#: format, key of the aux states, key of the final state, norm status of the final state as the format writes it
_PAIRS: tuple[tuple[str, str, str, NormStatus], ...] = (
    ("specforge", "aux_hidden_state", "hidden_state", "post"),
    ("modelopt", "aux_hidden_states", "hidden_states", "post"),
    ("angelslim", "hidden_states", "target_hiddens", "post"),
    ("speculators-v0", "hidden_state", "target", "post"),
    ("baldeagle", "hidden_state", "target_hidden_states", "unknown"),
    ("torchspec", "hidden_states", "last_hidden_states", "unknown"),
)
_SINGLE = ("hidden_state", "hidden_states", "aux_hidden_state", "aux_hidden_states")
_STATES = frozenset((*_SINGLE, *(k for _, *keys, _ in _PAIRS for k in keys), "final_prenorm", "final_postnorm")) - {"target"}


class Foreign(CheckpointError):
    """A readable file that is no sample and does not look as if it should be one: a token count, a vocabulary map, embedding rows."""


def recognise(contents: Contents, hints: Hints) -> Layout:
    """The layout of one sample.

    Args:
        contents: the arrays of a file.
        hints: what is known from elsewhere: the width of a state, layer ids beside the file.

    Raises:
        Foreign: nothing in it is named or shaped like states.
        CheckpointError: no format that is known, with what was found instead.
    """
    states = [k for k, a in contents.arrays.items() if a.floating and (k in _STATES or k.startswith(("hidden_states.", "hidden_state.")))]
    if not states:
        raise Foreign(f"{_at(contents)}: no hidden states; {_found(contents)}")
    ids = next((k for k in IDS if k in contents.arrays), None)
    if ids is None or not contents.arrays[ids].whole or len(squeezed(contents.arrays[ids].shape, 1)) != 1:
        what = f"{ids} is {contents.arrays[ids].dtype} {list(contents.arrays[ids].shape)}" if ids else _found(contents)
        raise CheckpointError(f"{_at(contents)}: no token ids (integers input_ids or token_ids [tokens]); {what}")
    for claim in (_portable, _listed, _paired, _stacked, _alone):
        layout = claim(contents, ids, hints)
        if layout is not None:
            return layout
    raise CheckpointError(f"{_at(contents)}: no known dump format; {_found(contents)}")


def _at(contents: Contents) -> str:
    return escaped(contents.name, 300)


def _found(contents: Contents) -> str:
    some = [f"{escaped(k, 40)} {a.dtype} {list(a.shape)}" for k, a in list(contents.arrays.items())[:6]]
    more = f" and {len(contents.arrays) - 6} more" if len(contents.arrays) > 6 else ""
    return f"it holds {', '.join(some)}{more}" if some else "it holds no arrays"


def _tokens(contents: Contents, ids: str) -> int:
    return squeezed(contents.arrays[ids].shape, 1)[0]


def _layout(
    contents: Contents,
    ids: str,
    *,
    format: str,
    evidence: tuple[str, ...],
    hidden: int,
    slots: tuple[Slot, ...],
    pieces: tuple[Piece, ...],
    rows: int,
    final_norm: NormStatus,
    axis: str,
    issues: tuple[DumpIssue, ...] = (),
) -> Layout:
    """What all formats share: ids, mask, companions."""
    tokens = _tokens(contents, ids)
    mask, odd = _mask(contents, tokens)
    extras = {f: k for f, k in _EXTRAS.items() if k in contents.arrays}
    for key in list(extras.values()):
        length = squeezed(contents.arrays[key].shape, 2 if key.startswith("target_topk") else 1)[:1]
        if length != (tokens,):
            odd += (_issue("length", f"{key} has shape {list(contents.arrays[key].shape)} for {tokens} tokens"),)
    metadata = dict(contents.metadata)
    note = metadata.pop("note", "") if contents.kind == "json" else ""
    return Layout(
        format=format,
        evidence=(*evidence, note) if note else evidence,
        hidden=hidden,
        slots=slots,
        pieces=pieces,
        ids=ids,
        tokens=tokens,
        rows=rows,
        final_norm=final_norm if any(s.role == "final" for s in slots) else "unknown",
        axis=axis,
        mask=mask,
        extras=extras,
        issues=(*odd, *issues),
        metadata=metadata,
    )


def _issue(kind: str, message: str) -> DumpIssue:
    return DumpIssue(kind, "", message)


def _mask(contents: Contents, tokens: int) -> tuple[str | None, tuple[DumpIssue, ...]]:
    array = contents.arrays.get("loss_mask")
    if array is None:
        return None, ()
    shape = squeezed(array.shape, 1)
    numel = 1
    for n in shape:
        numel *= n
    if numel != tokens:
        return None, (_issue("mask", f"loss_mask has shape {list(array.shape)} for {tokens} tokens"),)
    if len(shape) != 1:
        message = f"loss_mask has shape {list(array.shape)}, expected [{tokens}]: against [batch, tokens] it broadcasts to a square"
        return "loss_mask", (_issue("mask", message),)
    return "loss_mask", ()


def _numbered(contents: Contents, prefix: str) -> list[tuple[int, str]]:
    return sorted(
        (int(k.removeprefix(prefix)), k)
        for k, a in contents.arrays.items()
        if k.startswith(prefix) and k.removeprefix(prefix).isdecimal() and a.floating and len(squeezed(a.shape, 2)) == 2
    )


def _each(contents: Contents, keys: list[str], hidden: int | None) -> tuple[int, int, tuple[DumpIssue, ...]]:
    """(width, rows, issues) of states that each stand under a key of their own."""
    shapes = [squeezed(contents.arrays[k].shape, 2) for k in keys]
    widths, lengths = [s[1] for s in shapes], [s[0] for s in shapes]
    width = hidden if hidden in widths else max(set(widths), key=widths.count)
    issues: tuple[DumpIssue, ...] = ()
    odd = [f"{k} {list(s)}" for k, s in zip(keys, shapes, strict=True) if s[1] != width]
    if odd:
        issues += (_issue("shape", f"states of another width than {width}: {', '.join(odd)}"),)
    if len(set(lengths)) > 1:
        issues += (
            _issue("length", f"states of {min(lengths)} to {max(lengths)} rows: {keys[lengths.index(min(lengths))]} is the shortest"),
        )
    return width, min(lengths), issues


def _portable(contents: Contents, ids: str, hints: Hints) -> Layout | None:
    """``hidden_states.K`` per HF index, ``final_prenorm`` or ``final_postnorm``, and what the target predicted."""
    indexed = _numbered(contents, "hidden_states.")
    names: list[tuple[str, NormStatus]] = [("final_prenorm", "pre"), ("final_postnorm", "post")]
    final = next((n for n in names if n[0] in contents.arrays and len(squeezed(contents.arrays[n[0]].shape, 2)) == 2), None)
    if contents.kind != "safetensors" or (not indexed and final is None):
        return None
    width, rows, issues = _each(contents, [k for _, k in indexed] + ([final[0]] if final else []), hints.hidden)
    convention = contents.metadata.get("index_convention")
    shift = _index_shift(convention or "")
    slots = [Slot(i, k + shift, "aux", key) for i, (k, key) in enumerate(indexed)]
    if final:
        slots.append(Slot(len(slots), None, "final", final[0]))
    said = f"index_convention '{escaped(convention, 60)}'" if convention else "no index_convention in the metadata: HF indices"
    return _layout(
        contents,
        ids,
        format="portable",
        evidence=(f"{len(indexed)} arrays hidden_states.K [tokens, {width}]{f' and {final[0]}' if final else ''}", said),
        hidden=width,
        slots=tuple(slots),
        pieces=tuple(Piece(s.name) for s in slots),
        rows=rows,
        final_norm=final[1] if final else "unknown",
        axis=axis_words(False),
        issues=issues,
    )


def _index_shift(text: str) -> int:
    """What to add to a recorded index to get the HF one, after the words of ``index_convention``."""
    low = text.lower()
    if "hf" in low or "output_hidden_states" in low or "vllm" in low:
        return 0
    return 1 if any(word in low for word in ("layer output", "output of layer", "after layer", "sglang")) else 0


def _listed(contents: Contents, ids: str, hints: Hints) -> Layout | None:
    """speculators 0.3 and 0.4: a list of A + 1 states, the last one final; ``data_config.json`` beside it names the layers."""
    entries = _numbered(contents, "hidden_states.")
    if not entries or [i for i, _ in entries] != list(range(len(entries))):
        return None
    keys = [k for _, k in entries]
    width, rows, issues = _each(contents, keys, hints.hidden)
    last = len(keys) - 1
    named, why = layer_ids(contents, hints, last, after_layer=True)
    slots = tuple(
        Slot(i, named[i] if i < len(named) else None, "final" if i == last else "aux", f"hidden_states[{i}]") for i in range(last + 1)
    )
    # the writer captured the last layer before the final norm in some versions and after it in others
    return _layout(
        contents,
        ids,
        format="speculators-legacy",
        evidence=(f"hidden_states is a list of {len(keys)} arrays [tokens, {width}]", *why, "whether the last one is normed, no file says"),
        hidden=width,
        slots=slots,
        pieces=tuple(Piece(k) for k in keys),
        rows=rows,
        final_norm="unknown",
        axis=axis_words(False),
        issues=issues,
    )


def _paired(contents: Contents, ids: str, hints: Hints) -> Layout | None:
    """An array of fused aux states and one of final states; the wider one is the aux."""
    arrays, tokens = contents.arrays, _tokens(contents, ids)
    for name, aux, final, norm in _PAIRS:
        if aux not in arrays or final not in arrays or not arrays[aux].floating or not arrays[final].floating:
            continue
        last = squeezed(arrays[final].shape, 2)
        issues: tuple[DumpIssue, ...] = ()
        wide, narrow = arrays[aux].shape[-1:], arrays[final].shape[-1:]
        if wide < narrow and wide != (0,) and len(squeezed(arrays[aux].shape, 2)) == 2:
            issues += (
                _issue("shape", f"{final} is {narrow[0]} wide and {aux} {wide[0]}: read as {name} with the two the other way round"),
            )
            aux, final, last = final, aux, squeezed(arrays[aux].shape, 2)
        if len(last) != 2 or not last[1]:
            raise CheckpointError(f"{_at(contents)}: {final} has shape {list(arrays[final].shape)}, expected [tokens, hidden]")
        hidden = last[1]
        planes, pieces, rows, axis = _fused(contents, aux, hidden, tokens)
        if rows != last[0]:
            issues += (_issue("length", f"{aux} has {rows} rows, {final} {last[0]}"),)
        if name == "modelopt" and "hidden_states_prenorm" in contents.values:
            norm = "pre" if contents.values["hidden_states_prenorm"] else "post"
        if name == "torchspec" and hints.prenorm is not None:
            norm = "pre" if hints.prenorm else "post"
        named, why = layer_ids(contents, hints, planes)
        slots = [Slot(i, named[i] if i < len(named) else None, "aux", _piece_words(p)) for i, p in enumerate(pieces)]
        evidence = f"{aux} {list(arrays[aux].shape)} is {planes} times as wide as {final} {list(arrays[final].shape)}"
        return _layout(
            contents,
            ids,
            format=name,
            evidence=(evidence, *why),
            hidden=hidden,
            slots=(*slots, Slot(planes, None, "final", final)),
            pieces=(*pieces, Piece(final)),
            rows=min(rows, last[0]),
            final_norm=norm,
            axis=axis,
            issues=issues,
        )
    return None


def _fused(contents: Contents, key: str, hidden: int, tokens: int) -> tuple[int, tuple[Piece, ...], int, str]:
    """(planes, pieces, rows, axis words) of aux states side by side [rows, planes * hidden], or stacked."""
    shape = contents.arrays[key].shape
    flat = squeezed(shape, 2)
    if len(flat) == 2:
        planes, rest = divmod(flat[1], hidden)
        if rest or not planes:
            raise CheckpointError(
                f"{_at(contents)}: {key} is {flat[1]} wide, no multiple of the state's width {hidden}; {_found(contents)}"
            )
        return planes, tuple(Piece(key, first=i * hidden, last=(i + 1) * hidden) for i in range(planes)), flat[0], "tokens, slots * hidden"
    if len(flat) != 3 or flat[2] != hidden:
        raise CheckpointError(f"{_at(contents)}: {key} has shape {list(shape)}, expected [tokens, slots * {hidden}]")
    axis, _ = _planes_axis(flat, tokens)
    return flat[axis], tuple(Piece(key, i, axis) for i in range(flat[axis])), flat[1 - axis], axis_words(True, axis == 1)


def _piece_words(piece: Piece) -> str:
    if piece.plane is not None:
        return f"{piece.key}[:, {piece.plane}]" if piece.axis else f"{piece.key}[{piece.plane}]"
    return piece.key if piece.last is None else f"{piece.key}[:, {piece.first}:{piece.last}]"


def _stacked(contents: Contents, ids: str, hints: Hints) -> Layout | None:
    """``hidden_states`` [tokens, A + 1, hidden] beside ``token_ids``: vLLM's connector, and speculators 0.5 and later, which uses it."""
    array = contents.arrays.get("hidden_states")
    tokens = _tokens(contents, ids)
    if array is None or not array.floating or len(squeezed(array.shape, 3)) != 3 or contents.kind == "json":
        return None
    shape = squeezed(array.shape, 3)
    if shape[0] == 1 and shape[1] == tokens != 1:  # [1, tokens, hidden] is a batch of one, not one slot
        return None
    axis, why = _planes_axis(shape, tokens)
    planes, rows = shape[axis], shape[1 - axis]
    if not planes or not shape[2]:
        raise CheckpointError(f"{_at(contents)}: hidden_states has shape {list(array.shape)}, expected [tokens, slots, hidden]")
    pieces = tuple(Piece("hidden_states", i, axis) for i in range(planes))
    named, told = layer_ids(contents, hints, planes - 1)
    slots = tuple(
        Slot(i, named[i] if i < len(named) else None, "final" if i == planes - 1 else "aux", _piece_words(p)) for i, p in enumerate(pieces)
    )
    by_vllm = hints.locks and not hints.dataset
    return _layout(
        contents,
        ids,
        format="vllm-connector" if by_vllm else "speculators",
        evidence=(
            f"hidden_states {list(array.shape)} beside {ids} [{tokens}]",
            why,
            "a .lock beside it and no data set: vLLM's connector"
            if by_vllm
            else "speculators, or vLLM's connector by itself: the same file",
            *told,
            "the last plane is taken for the final state before the norm",
        ),
        hidden=shape[2],
        slots=slots,
        pieces=pieces,
        rows=rows,
        final_norm="pre",
        axis=axis_words(True, axis == 1),
    )


def _planes_axis(shape: tuple[int, ...], tokens: int) -> tuple[int, str]:
    """Which of the first two axes counts planes, and why."""
    first, second = shape[0], shape[1]
    if first == tokens:
        return (
            1,
            "the first axis is as long as the token ids" if second != tokens else "both axes are as long as the token ids: tokens first",
        )
    if second == tokens:
        return 0, "the second axis is as long as the token ids: slots stand first"
    axis = 1 if second <= first else 0
    return axis, f"neither axis has the {tokens} tokens; the shorter one ({shape[axis]}) counts slots"


def _alone(contents: Contents, ids: str, hints: Hints) -> Layout | None:
    """One array of states: EAGLE's final one, SpecForge's for DFlash, SGLang's answer; its width tells final from fused aux states."""
    key = next((k for k in _SINGLE if k in contents.arrays and contents.arrays[k].floating), None)
    shape = squeezed(contents.arrays[key].shape, 2) if key else ()
    if key is None or len(shape) != 2 or not shape[1]:
        return None
    width, known = shape[1], hints.hidden
    if known and width % known:
        raise CheckpointError(f"{_at(contents)}: {key} is {width} wide, no multiple of the target's {known}; another target's dump?")
    planes = width // known if known else 1
    json = contents.kind == "json"
    format = "sglang-json" if json else "eagle1" if planes == 1 and not key.startswith("aux") else "specforge"
    if planes == 1 and not key.startswith("aux"):
        slots: tuple[Slot, ...] = (Slot(0, None, "final", key),)
        pieces: tuple[Piece, ...] = (Piece(key),)
        why: tuple[str, ...] = () if known else ("one state taken for granted: give the target, or hidden=, if several stand side by side",)
    else:
        pieces = _fused(contents, key, known or width, _tokens(contents, ids))[1]
        named, why = layer_ids(contents, hints, planes)
        slots = tuple(Slot(i, named[i] if i < len(named) else None, "aux", _piece_words(p)) for i, p in enumerate(pieces))
    where = "meta_info.hidden_states" if json else key
    return _layout(
        contents,
        ids,
        format=format,
        evidence=(f"{where} {list(contents.arrays[key].shape)} beside {ids} and no other state", *why),
        hidden=known or width,
        slots=slots,
        pieces=pieces,
        rows=shape[0],
        final_norm="post",
        axis="tokens, hidden" if len(slots) == 1 else "tokens, slots * hidden",
    )
