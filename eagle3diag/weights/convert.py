"""Rewrite a draft for another reader: the same bytes under other names, the same facts in another config.

Lossless or not at all. What the goal cannot hold is found twice: from the table of what each reader honours, and by reading
the planned result back before a byte is written and comparing its facts with the source's. Either stops the conversion unless
allowed by name. The output appears whole, by renaming a finished folder into place, never inside the source.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3diag.checkpoint.model import Checkpoint, ConfigFile, DraftSpec, TensorInfo
from eagle3diag.checkpoint.spec import draft_spec
from eagle3diag.display import Shown
from eagle3diag.errors import CheckpointError, UsageError, escaped
from eagle3diag.weights.layouts import Goal, aux_places, config_for, goal_name, lacking, parse_goal
from eagle3diag.weights.pieces import Piece, fused_parts, piece_blocks, role

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["Conversion", "convert"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversion(Shown):
    """What a conversion did.

    Attributes:
        written: the new folder.
        to: the layout, with the release if one was named.
        renamed: spelling in the source -> spelling in the result, where they differ; parts of a fused tensor are joined by a plus sign.
        translated: fact -> how it was written, where that is not the source's way.
        lost: names of the facts the goal cannot hold, allowed by the caller.
        reasons: each of them in words.
        left: other files of the source folder, which were not copied.
        notes: what a user of the result should know.
        tensors, bytes: written.
    """

    written: str
    to: str
    renamed: Mapping[str, str]
    translated: Mapping[str, str]
    lost: tuple[str, ...]
    reasons: Mapping[str, str]
    left: tuple[str, ...]
    notes: tuple[str, ...]
    tensors: int
    bytes: int

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of ``convert``."""
        return {
            "schema": 1,
            "written": self.written,
            "to": self.to,
            "renamed": dict(self.renamed),
            "translated": dict(self.translated),
            "lost": list(self.lost),
            "reasons": dict(self.reasons),
            "left": list(self.left),
            "notes": list(self.notes),
            "tensors": self.tensors,
            "bytes": self.bytes,
        }


def convert(
    draft: Checkpoint | str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str,
    *,
    allow: Iterable[str] = (),
) -> Conversion:
    """Rewrite a draft in another layout.

    Args:
        draft: opened, or a path to open.
        out: the folder to make; it may exist if it is empty.
        to: ``sglang``, ``vllm``, ``speculators``, or an engine with its release: ``sglang==0.5.9``.
        allow: names of facts that may be lost, as the error lists them.

    Raises:
        CheckpointError: the draft cannot be opened, or changed or ended while being read.
        UsageError: an unknown layout, an output place that will not do, no EAGLE-3 draft, or a fact that would be lost.

    Example:
        >>> import tempfile
        >>> made = convert("data_samples/smollm2-eagle3/draft", f"{tempfile.mkdtemp()}/out", "sglang==0.5.9")
        >>> made.renamed["layers.0.mlp.up_proj.weight"], made.lost
        ('midlayer.mlp.up_proj.weight', ())
    """
    if not isinstance(draft, Checkpoint):
        from eagle3diag.checkpoint.open import open_checkpoint

        draft = open_checkpoint(draft)
    goal = parse_goal(to)
    place = _place(draft, Path(out))
    spec = draft_spec(draft)
    shown = escaped(draft.path, 300)
    if spec.algorithm != "eagle3":
        raise UsageError(
            f"{shown}: looks like {spec.algorithm}, not EAGLE-3 ({'; '.join(spec.dialect.evidence)}); only EAGLE-3 drafts convert"
        )
    if not draft.tensors or not draft.configs:
        raise UsageError(f"{shown}: {len(draft.tensors)} tensors and {len(draft.configs)} configs; a conversion needs both")
    pieces = _split(draft, spec)
    spec = replace(spec, canonical={c: p.info.name for c, p in pieces.items()})
    places, doubt = aux_places(spec, goal)
    gone = lacking(draft, spec, goal)
    if doubt:
        gone["aux_ids"] = (doubt, ())
    if spec.aux.formula != "default" and spec.aux.raw is None and goal.layout != "speculators":
        gone["aux_ids"] = ("no ids recorded, and this trainer took its layers one later than every reader's default", ())
    dropped = {name for _, names in gone.values() for name in names}
    named = {goal_name(c, goal, spec): p for c, p in pieces.items() if c not in dropped}
    config = config_for(draft, spec, goal, places)
    after = draft_spec(_planned(draft, named, config))
    reasons = {name: why for name, (why, _) in gone.items()}
    for fact, (was, now) in _differences(spec, after).items():
        if fact not in reasons and not any(fact in _FOLLOWS.get(name, ()) for name in gone):
            reasons[fact] = f"{fact} {was} would be read as {now}"
    if "mla" in gone:
        raise UsageError(f"{shown}: the {goal.text} layout has no place for {gone['mla'][0]}; convert to an engine that runs it")
    refused = [n for n in reasons if n not in set(allow)]
    if refused:
        said = "; ".join(f"{escaped(n)}: {escaped(reasons[n], 160)}" for n in refused)
        raise UsageError(f"{shown}: the {goal.text} layout cannot hold {said}. Allow by name (--allow NAME) what may be lost")
    written = _write(draft, named, config, place)
    renamed: dict[str, list[str]] = {}
    for name, piece in named.items():
        renamed.setdefault(piece.info.name, []).append(name)
    return Conversion(
        written=str(place),
        to=goal.text,
        renamed={a: " + ".join(b) for a, b in renamed.items() if b != [a]},
        translated=_translated(draft, spec, config),
        lost=tuple(reasons),
        reasons=reasons,
        left=_left(draft),
        notes=_notes(draft, spec, goal, places),
        tensors=len(named),
        bytes=written,
    )


def _place(draft: Checkpoint, out: Path) -> Path:
    """The output folder, checked: outside the source, and not there yet or empty."""
    try:
        place = out.resolve()
    except (OSError, RuntimeError, ValueError):
        raise UsageError(f"{escaped(out, 300)}: not a usable path; name another place") from None
    if place.exists() and not place.is_dir():
        raise UsageError(f"{escaped(out, 300)}: not a folder; name one that does not exist yet")
    if place.is_dir() and any(place.iterdir()):
        raise UsageError(f"{escaped(out, 300)}: not empty; name a folder that does not exist yet")
    source = Path(draft.path)
    if source.exists():
        folder = (source if source.is_dir() else source.parent).resolve()
        if place == folder or folder in place.parents:
            inside = f"lies inside the source folder {escaped(folder, 300)}"
            raise UsageError(f"{escaped(out, 300)}: {inside}; nothing is written there, name another place")
    return place


def _split(draft: Checkpoint, spec: DraftSpec) -> dict[str, Piece]:
    """Every tensor by canonical name, fused ones taken apart.

    Raises:
        UsageError: two tensors mean the same one, or a fused one has not the rows the config asks for.
    """
    standing = {file: canonical for canonical, file in spec.canonical.items()}
    double = [n for n in draft.tensors if n not in standing]
    if double:
        raise UsageError(
            f"{escaped(draft.path, 300)}: {escaped(double[0])} stands there a second time under another name; remove one of the two"
        )
    heads, kv, width = spec.num_heads.value or 0, spec.num_kv_heads.value or 0, spec.head_dim.value or 0
    rows = {"q_proj": heads * width, "k_proj": kv * width, "v_proj": kv * width}
    out: dict[str, Piece] = {}
    for name, info in draft.tensors.items():
        parts = fused_parts(standing[name])
        if not parts:
            out[standing[name]] = Piece(info)
            continue
        total = info.shape[0] if info.shape else 0
        sizes = [rows.get(role(p), total // len(parts)) for p in parts]
        if sum(sizes) != total or 0 in sizes or role(parts[0]) == "q_a_proj":
            asked = " + ".join(map(str, sizes))
            shown = escaped(draft.path, 300)
            raise UsageError(f"{shown}: cannot take {escaped(name)} apart: {total} rows, the config makes them {asked}")
        start = 0
        for part, size in zip(parts, sizes, strict=True):
            out[part] = Piece(info, start, start + size)
            start += size
    return dict(sorted(out.items()))


def _planned(draft: Checkpoint, named: Mapping[str, Piece], config: Mapping[str, Any]) -> Checkpoint:
    """The result as it would open, from its headers."""
    tensors = {n: TensorInfo(n, p.info.dtype, p.shape, _bytes(p), "model.safetensors", None) for n, p in sorted(named.items())}
    schema: Any = "speculators" if "speculators_model_type" in config else "flat"
    return Checkpoint(path=draft.path, files=("model.safetensors",), tensors=tensors, configs=(ConfigFile("config.json", schema, config),))


#: facts that change with a lost one
_FOLLOWS = {"use_aux_hidden_state": ("state", "fc"), "layers": ("layers_in_file",), "aux_ids": ("aux_layers",)}

#: facts whose meaning the wiring holds; their spelling may differ
_BY_WIRING = (
    *("architecture", "norm_output", "rope_theta", "rope_scaling", "norm_before_residual"),
    *("norm_before_fc", "fc_norm", "sliding_window"),
)


def _differences(before: DraftSpec, after: DraftSpec) -> dict[str, tuple[Any, Any]]:
    """Facts the result would be read with that are not the source's; what the source did not know may become known."""
    out = before.wiring.differences(after.wiring)
    own_head = "lm_head.weight" in before.canonical
    for name, value in before.values().items():
        if name in _BY_WIRING or (name == "tie_word_embeddings" and own_head):
            continue
        now = getattr(after, name).value
        if value.value is not None and now != value.value:
            out[name] = (value.value, now)
    if before.layers_in_file != after.layers_in_file:
        out["layers_in_file"] = (before.layers_in_file, after.layers_in_file)
    if before.aux.formula != after.aux.formula and before.aux.raw is None:
        out["aux_ids"] = (before.aux.formula, after.aux.formula)
    return out


def _bytes(piece: Piece) -> int:
    count = piece.elements[1]
    return piece.info.nbytes if piece.start is None else count * (piece.info.nbytes // max(piece.info.numel, 1))


def _write(draft: Checkpoint, named: Mapping[str, Piece], config: Mapping[str, Any], place: Path) -> int:
    """Write the folder beside its place and rename it there; the bytes of tensor data."""
    try:
        text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    except ValueError:
        raise UsageError(f"{escaped(draft.path, 300)}: the config holds an infinite number; replace it by a finite one") from None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{place.name[:40]}.", dir=place.parent))
    except OSError as error:
        raise UsageError(f"{escaped(place, 300)}: cannot be made ({(error.strerror or 'refused').lower()}); name another place") from None
    try:
        with (temporary / "model.safetensors").open("wb") as f:
            total = _tensors(f, draft, named)
            f.flush()
            os.fsync(f.fileno())
        (temporary / "config.json").write_text(text, encoding="utf-8")
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)
        if place.is_dir():
            place.rmdir()  # empty, as seen above; a file put there meanwhile makes this fail
        temporary.rename(place)
    except OSError as error:
        raise UsageError(
            f"{escaped(place, 300)}: writing failed ({(error.strerror or 'refused').lower()}); nothing was left behind"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return total


def _tensors(f: BinaryIO, draft: Checkpoint, named: Mapping[str, Piece]) -> int:
    """A safetensors file: header padded to 8 bytes, widest elements first so that each tensor is aligned, then by name."""
    order = sorted(named.items(), key=lambda item: (-(item[1].info.nbytes // max(item[1].info.numel, 1)), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, piece in order:
        size = _bytes(piece)
        header[name] = {"dtype": piece.info.dtype, "shape": list(piece.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    f.write(len(text).to_bytes(8, "little") + text)
    for name, piece in order:
        done = 0
        for view in piece_blocks(draft, piece):
            f.write(view)
            done += len(view)
        if done != _bytes(piece):
            raise CheckpointError(f"{draft.path}: {escaped(name)} gave {done} of {_bytes(piece)} bytes: the file changed; run again")
    return at


def _translated(draft: Checkpoint, spec: DraftSpec, config: Mapping[str, Any]) -> dict[str, str]:
    """Facts the result states otherwise than the source, in words."""
    out: dict[str, str] = {}
    source = draft.configs[0].data
    if spec.aux.raw is not None and spec.aux.hf is not None:
        top, nested = (
            config.get("eagle_aux_hidden_state_layer_ids"),
            (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"),
        )
        ways = [f"top level {top} (HF indices)"] if top is not None else []
        ways += [f"eagle_config {nested} (layer outputs)"] if nested is not None else []
        out["aux layers"] = f"{spec.aux.where} {list(spec.aux.raw)} -> {', '.join(ways)}"
    was, now = source.get("architectures"), config["architectures"]
    if was != now:
        out["architectures"] = f"{escaped(was)} -> {now}"
    if spec.dialect.name.startswith("specforge") and "norm_output" in source:
        out["norm_output"] = (
            f"{escaped(source['norm_output'])} means the final norm in SpecForge; not written, since readers take it for the feedback"
        )
    if config["tie_word_embeddings"] is not bool(spec.tie_word_embeddings.value):
        out["tie_word_embeddings"] = "true -> false: the draft has its own lm_head"
    if spec.wiring.rope_theta != spec.rope_theta.value or spec.wiring.rope_scaling != spec.rope_scaling.value:
        said = f"theta {spec.rope_theta.value}, scaling {spec.rope_scaling.value}"
        out["rope"] = (
            f"{escaped(said, 120)} in the config -> theta {spec.wiring.rope_theta}, scaling {spec.wiring.rope_scaling}, as trained"
        )
    elif not {"rope_theta", "rope_parameters"} <= set(source):
        out["rope"] = f"theta {spec.wiring.rope_theta} written in both schemas (rope_theta and rope_parameters)"
    if "transformer_layer_config" in config and "transformer_layer_config" not in source:
        out["layer config"] = "top level -> transformer_layer_config"
    elif "transformer_layer_config" in source and "transformer_layer_config" not in config:
        out["layer config"] = "transformer_layer_config -> top level"
    return out


def _left(draft: Checkpoint) -> tuple[str, ...]:
    """Files of the source folder that were not copied: neither its weights nor the config the result was made from."""
    source = Path(draft.path)
    folder = source if source.is_dir() else source.parent
    used = {*draft.files, *(c.file for c in draft.configs[:1]), "model.safetensors.index.json", "pytorch_model.bin.index.json"}
    try:
        return tuple(sorted(escaped(p.name) for p in folder.iterdir() if p.name not in used)) if source.is_dir() else ()
    except OSError:
        return ()


def _notes(draft: Checkpoint, spec: DraftSpec, goal: Goal, places: Mapping[str, list[int]]) -> tuple[str, ...]:
    def notes() -> Iterator[str]:
        nested = places.get("nested")
        if goal.layout == "sglang" and nested and nested[0] != 1:
            yield f"on DeepSeek and Kimi targets SGLang 0.5.13 and newer take {nested} as HF indices, since they do not start with 1"
        if spec.aux.raw is None:
            yield "no aux layer ids recorded: every reader takes its default layers"
        elif not spec.aux.settled and len(spec.aux.readings) > 1:
            yield f"ids read as HF {list(spec.aux.hf or ())}: {spec.aux.readings[0].why}"
        methods = (draft.configs[0].data.get("speculators_config") or {}) if goal.layout != "speculators" else {}
        listed = methods.get("proposal_methods") if isinstance(methods, Mapping) else None
        if isinstance(listed, list) and listed and isinstance(listed[0], Mapping) and isinstance(listed[0].get("speculative_tokens"), int):
            yield f"{listed[0]['speculative_tokens']} speculative tokens were recorded: an option of the launch line there"
        if "embed_tokens.weight" not in spec.canonical:
            yield "no embed_tokens: the engine shares the target's"

    return tuple(notes())
