"""The nouns of this room: what a checkpoint is, before anybody judges it.

``Checkpoint`` holds where it lies, its configs as read and its tensors from headers alone; ``read`` and ``blocks`` are the only
things that touch tensor data. Deviations that do not stop reading become ``Issue``s; rules turn them into findings. ``DraftSpec``
and ``TargetSpec`` are the normalised facts, every value a ``Valued``. Aux layers are HF indices everywhere inside:
``k`` is ``output_hidden_states[k]``, 0 the embedding output, ``k`` the input of decoder layer ``k`` (0-based).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.display import Piece, Shown, data
from eagle3diag.provenance import Valued

if TYPE_CHECKING:
    import torch

__all__ = [
    "Algorithm",
    "AuxIds",
    "Checkpoint",
    "ConfigFile",
    "Dialect",
    "DraftSpec",
    "Issue",
    "IssueKind",
    "Reading",
    "TargetSpec",
    "TensorInfo",
]

Algorithm = Literal["eagle3", "eagle1", "hass", "peagle", "dflash", "mtp", "unknown"]

IssueKind = Literal[
    "config-unreadable",  # config.json is no JSON object, has a wrong encoding, or is absent
    "data-truncated",  # header sound, data section shorter than it describes
    "data-trailing",  # bytes after the last tensor
    "offsets-overlap",
    "offsets-hole",
    "duplicate-name",  # a JSON key twice in one header; the loader keeps the last
    "header-padding",  # loads, though the format forbids it (leading space, NUL)
    "shard-missing",
    "shard-twice",  # one tensor in two shards
    "shard-unlisted",  # tensor listed in the index but not in its file, or in a file but not listed
    "odd-name",  # a tensor name with control characters or of absurd length
    "metadata",  # __metadata__ value that is not a string
]


@dataclass(frozen=True, slots=True, repr=False)
class Issue(Piece):
    """A deviation that did not stop the reading."""

    kind: IssueKind
    file: str
    message: str  #: one printable line with both numbers
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {"kind": self.kind, "file": self.file, "message": self.message}


@dataclass(frozen=True, slots=True, repr=False)
class TensorInfo(Piece):
    """One tensor as its header states it; nothing of its data was read."""

    name: str  #: as spelled in the file
    dtype: str  #: safetensors spelling: F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U8 BOOL …
    shape: tuple[int, ...]
    nbytes: int
    file: str  #: file name relative to the checkpoint
    offset: int | None  #: absolute byte offset in ``file``; None for a pickle

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for d in self.shape:
            n *= d
        return n

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of ``inspect``."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "bytes": self.nbytes, "file": self.file}


@dataclass(frozen=True, slots=True, repr=False)
class ConfigFile(Piece):
    """One JSON config as read, and which schema it is in."""

    file: str
    schema: Literal["flat", "speculators", "target", "unknown"]
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checkpoint(Shown):
    """A draft (or target) on disk: configs and tensor headers; data only on request.

    Attributes:
        path: what the user gave (a folder, a file or a URL), as text.
        files: weight files, relative names, in reading order.
        tensors: by the name spelled in the file, sorted by name.
        configs: every JSON config found beside the weights, the one tools load by default first.
        issues: deviations that did not stop the reading.
        form: ``safetensors``, ``sharded``, ``torch``, ``training_state``, or ``none`` (configs only).
        extras: other files of interest found (``hf_quant_config.json``, ``val_metrics.json`` …), relative names.
    """

    path: str
    files: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    configs: tuple[ConfigFile, ...]
    issues: tuple[Issue, ...] = ()
    form: str = "safetensors"
    extras: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)  #: bytes of each weight file
    reader: Callable[[TensorInfo], torch.Tensor] | None = None
    blocker: Callable[[TensorInfo, int], Iterator[memoryview]] | None = None
    remote: bool = False  #: read over the network: headers only, ``read`` and ``blocks`` raise

    @property
    def config(self) -> Mapping[str, Any]:
        """The config a tool would load by default (``config.json``), or an empty mapping."""
        return self.configs[0].data if self.configs else {}

    @property
    def bytes_total(self) -> int:
        """Bytes of all tensors, from the headers."""
        return sum(t.nbytes for t in self.tensors.values())

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON: what ``inspect`` says of the files."""
        return {
            "path": self.path,
            "form": self.form,
            "configs": [{"file": c.file, "schema": c.schema} for c in self.configs],
            "tensors": [t.to_dict() for t in self.tensors.values()],
            "issues": [i.to_dict() for i in self.issues],
            "extras": list(self.extras),
        }

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor on the CPU, in its stored dtype.

        Raises:
            CheckpointError: unknown name, or the file changed or ended while being read.
        """
        from eagle3diag.errors import CheckpointError, escaped

        if name not in self.tensors or self.reader is None:
            raise CheckpointError(f"{self.path}: no tensor {escaped(name)} to read")
        return self.reader(self.tensors[name])

    def blocks(self, name: str, block: int = 1 << 20) -> Iterator[memoryview]:
        """The raw little-endian bytes of one tensor, in order, at most ``block`` bytes each.

        A block is a view of a reused buffer, valid until the next one is asked for.

        Raises:
            CheckpointError: unknown name, or the file changed or ended while being read.
        """
        from eagle3diag.errors import CheckpointError, escaped

        if name not in self.tensors or self.blocker is None:
            raise CheckpointError(f"{self.path}: no tensor {escaped(name)} to read")
        return self.blocker(self.tensors[name], block)


@dataclass(frozen=True, slots=True, repr=False)
class Dialect(Piece):
    """Which training framework wrote the draft, and how sure that is.

    Attributes:
        name: ``speculators``, ``specforge``, ``specforge-training``, ``safeailab``, ``modelopt``, ``modelopt-megatron``,
            ``modelopt-megatron-deep``, ``angelslim``, ``flat-export`` (table (a) row 9b), ``mla-eagle3``, ``eagle1``, ``hass``,
            ``peagle``, ``dflash``, ``mtp``, ``engine-dump``, ``unknown``.
        confidence: ``high``, ``medium`` or ``low``.
        evidence: what was seen, in words.
    """

    name: str
    confidence: Literal["high", "medium", "low"]
    evidence: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {"name": self.name, "confidence": self.confidence, "evidence": list(self.evidence)}


@dataclass(frozen=True, slots=True, repr=False)
class Reading(Piece):
    """One way to understand recorded aux layer ids."""

    convention: Literal["hf", "layer-output"]
    hf: tuple[int, ...]  #: HF indices, in the order recorded
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class AuxIds(Piece):
    """Recorded aux layer ids and what they can mean.

    Attributes:
        raw: the numbers as recorded, in order; None where nothing is recorded.
        where: ``config.json: eagle_config.eagle_aux_hidden_state_layer_ids`` …
        readings: the likelier first; two where the convention is ambiguous.
        settled: True where a second source or the dialect's own rule leaves no doubt.
        formula: what the trainer takes when told none: ``default`` (HF 2, N//2, N-3) or ``default-one-late`` (speculators up to 0.4).
    """

    raw: tuple[int, ...] | None
    where: str
    readings: tuple[Reading, ...] = ()
    settled: bool = False
    formula: str = "default"

    @property
    def hf(self) -> tuple[int, ...] | None:
        """The likelier reading as HF indices, or None."""
        return self.readings[0].hf if self.readings else None

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON, every reading included."""
        readings = [{"convention": r.convention, "hf": list(r.hf), "why": r.why} for r in self.readings]
        return {"raw": None if self.raw is None else list(self.raw), "where": self.where, "settled": self.settled, "readings": readings}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DraftSpec(Shown):
    """The normalised facts of a draft.

    ``canonical`` maps canonical tensor names (``layers.0.self_attn.q_proj.weight``, ``fc.weight``, ``d2t`` …, table (b) of the dialects)
    to the names in the file. A fused ``qkv_proj``/``gate_up_proj`` is found under its canonical fused name.
    """

    dialect: Dialect
    algorithm: Algorithm
    architecture: Valued[str | None]
    draft_class: Literal["llama", "qwen3", "mla"]
    hidden_size: Valued[int | None]
    target_hidden_size: Valued[int | None]
    vocab_size: Valued[int | None]
    draft_vocab_size: Valued[int | None]
    intermediate_size: Valued[int | None]
    num_layers: Valued[int | None]  #: decoder layers of the draft as configured
    layers_in_file: int  #: decoder layers found among the tensors
    num_heads: Valued[int | None]
    num_kv_heads: Valued[int | None]
    head_dim: Valued[int | None]
    n_aux: Valued[int | None]  #: aux states concatenated in front of fc
    rms_norm_eps: Valued[float | None]
    rope_theta: Valued[float | None]
    rope_scaling: Valued[Mapping[str, Any] | None]
    max_position: Valued[int | None]
    sliding_window: Valued[int | None]
    tie_word_embeddings: Valued[bool | None]
    attention_bias: Valued[bool | None]
    mlp_bias: Valued[bool | None]
    norm_before_residual: Valued[bool | None]
    norm_before_fc: Valued[bool | None]
    fc_norm: Valued[bool | None]
    norm_output: Valued[bool | None]
    use_aux_hidden_state: Valued[bool | None]
    dtype: Valued[str | None]  #: as configured: bfloat16, float16 …
    verifier: Valued[str | None]  #: recorded target, name or path
    aux: AuxIds
    canonical: Mapping[str, str]
    wiring: Wiring  #: the wiring the draft was trained with, as far as it is recorded

    def values(self) -> dict[str, Valued[Any]]:
        """Every ``Valued`` field by name, in declaration order."""
        return {n: getattr(self, n) for n in self.__slots__ if isinstance(getattr(self, n), Valued)}

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON: what ``inspect`` says of the draft."""
        return data(
            {
                "dialect": self.dialect.to_dict(),
                "algorithm": self.algorithm,
                "spec": {name: value.to_dict() for name, value in self.values().items()},
                "aux": self.aux.to_dict(),
                "wiring": self.wiring.to_dict(),
                "canonical": dict(self.canonical),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TargetSpec(Shown):
    """The normalised facts of a target (verifier), from its config; tensors only where its weights are there.

    Attributes:
        architecture: ``architectures[0]`` of the outer config, what engines dispatch on.
        text_architecture: of the nested text config where it names one.
        embed, head, final_norm: tensor names in ``checkpoint``; ``head`` equals ``embed`` where the target ties them.
        quantization_config: the quantisation section of the config as written, empty without.
        rows: True where the tensors are the portable sample's selected rows (``rows.safetensors``) and not whole tables.
    """

    path: str
    architecture: Valued[str | None]
    text_architecture: Valued[str | None]
    model_type: Valued[str | None]
    hidden_size: Valued[int | None]
    num_layers: Valued[int | None]
    vocab_size: Valued[int | None]
    num_heads: Valued[int | None]
    num_kv_heads: Valued[int | None]
    head_dim: Valued[int | None]
    max_position: Valued[int | None]
    rope_theta: Valued[float | None]
    rope_scaling: Valued[Mapping[str, Any] | None]
    tie_word_embeddings: Valued[bool | None]
    dtype: Valued[str | None]
    quantization: Valued[str | None]
    checkpoint: Checkpoint | None = None
    embed: str | None = None
    head: str | None = None
    final_norm: str | None = None
    rows: bool = False
    quantization_config: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, Valued[Any]]:
        """Every ``Valued`` field by name, in declaration order."""
        return {n: getattr(self, n) for n in self.__slots__ if isinstance(getattr(self, n), Valued)}

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return data(
            {
                "path": self.path,
                "spec": {name: value.to_dict() for name, value in self.values().items()},
                "embed": self.embed,
                "head": self.head,
                "final_norm": self.final_norm,
                "rows": self.rows,
            }
        )
