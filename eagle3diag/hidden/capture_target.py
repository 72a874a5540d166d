"""A causal LM from a local folder, and its residual stream read where every engine reads it.

States are taken with hooks, at the input of each decoder layer (HF index k is the input of layer k) and of the final norm, so that
the last state is there before its norm, which ``output_hidden_states`` does not give. GGUF files are dequantised by transformers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3diag.checkpoint.rawfile import shown
from eagle3diag.errors import CheckpointError, UsageError, escaped

if TYPE_CHECKING:
    import torch

__all__ = ["FINAL", "Tap", "Target", "identity", "load_target"]

#: key of the last layer's output, before the final norm, among captured states
FINAL = -1
_LAYERS = ("layers", "h", "blocks", "decoder_layers")
_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "final_norm")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Target:
    """A loaded target.

    Attributes:
        name: of the folder or file.
        model: the transformers model, in eval mode.
        tokenizer: or None.
        layers: its decoder layers.
        norm: its final norm.
        stop: ids that end an answer.
        config_file: its config.json; None for a GGUF file.
    """

    name: str
    model: Any
    tokenizer: Any
    layers: tuple[Any, ...]
    norm: Any
    stop: frozenset[int]
    config_file: Path | None = None

    @property
    def cache_name(self) -> str:
        """What ``forward`` calls its cache: ``cache`` since transformers 5.24, ``past_key_values`` before."""
        from inspect import signature

        return "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        import torch

        found = self.model.get_input_embeddings().weight.device
        return found if isinstance(found, torch.device) else torch.device("cpu")

    def config(self) -> dict[str, Any]:
        """Its config as the folder has it, or as transformers made it from a GGUF file."""
        import json

        if self.config_file is not None:
            held = json.loads(self.config_file.read_text(encoding="utf-8"))
            return held if isinstance(held, dict) else {}
        held = {k: v for k, v in self.model.config.to_dict().items() if k != "quantization_config"}  # the weights are dequantised
        return {**held, "architectures": [type(self.model).__name__]}


def _place(path: str | os.PathLike[str]) -> tuple[Path, Path | None]:
    """The folder, and the GGUF file in it if that is what is to be loaded."""
    given = Path(path)
    if given.is_file() and given.suffix == ".gguf":
        return given.parent, given
    if not given.is_dir():
        raise CheckpointError(f"{shown(given)}: no such folder; capture needs the target's weights in a local folder, or a .gguf file")
    ggufs = sorted(given.glob("*.gguf"))
    if (given / "config.json").is_file() or not ggufs:
        return given, None
    if len(ggufs) > 1:
        raise CheckpointError(f"{shown(given)}: {len(ggufs)} .gguf files; give one of them, such as {shown(ggufs[0])}")
    return given, ggufs[0]


def identity(path: str | os.PathLike[str]) -> str:
    """A short digest that changes when the target's files do (names, sizes, times), read without loading it.

    Raises:
        CheckpointError: no such folder.
    """
    folder, gguf = _place(path)
    kinds = (".safetensors", ".bin", ".json", ".model")
    files = [gguf] if gguf else sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in kinds)
    told = hashlib.sha256()
    for file in files:
        status = file.stat()
        told.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return told.hexdigest()[:16]


def load_target(path: str | os.PathLike[str], *, device: str = "cpu", dtype: str | None = None) -> Target:
    """Load a target.

    Args:
        path: a folder with a causal LM of any transformers architecture, a folder with one ``.gguf`` file, or the file.
        device: where it runs.
        dtype: torch's name; by default float32 on the CPU and the stored one elsewhere.

    Raises:
        UsageError: transformers is not installed, or no such dtype or device.
        CheckpointError: transformers cannot load it, or its layers are not where they are looked for.
    """
    import torch

    folder, gguf = _place(path)
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise UsageError("capture needs transformers: pip install 'eagle3diag[target]'") from None
    name = dtype or ("float32" if device == "cpu" else "auto")
    kind = "auto" if name == "auto" else getattr(torch, name, None)
    if kind != "auto" and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise UsageError(f"no dtype '{escaped(name, 20)}'; give float32, bfloat16 or float16")
    more = {"gguf_file": gguf.name} if gguf else {}
    try:
        with _quiet(transformers):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=kind, **more)
            model = model.to(device).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
        said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CheckpointError(f"{shown(gguf or folder)}: transformers cannot load it: {escaped(said, 200)}") from None
    tokenizer: Any = None
    try:
        with _quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **more)
    except Exception:  # no tokenizer there, or one this version cannot read: ids can be given instead
        tokenizer = None
    layers, norm = _parts(model, gguf or folder)
    return Target(
        name=gguf.stem if gguf else folder.resolve().name,
        model=model,
        tokenizer=tokenizer,
        layers=layers,
        norm=norm,
        stop=_stop(model),
        config_file=None if gguf else folder / "config.json",
    )


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and warnings of a library on a terminal that shows our own."""
    import io

    log = transformers.utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the bar of a GGUF file knows no switch
            yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()


def _parts(model: Any, path: Path) -> tuple[tuple[Any, ...], Any]:
    """The decoder layers and the final norm."""
    import torch

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for root in (decoder, getattr(decoder, "decoder", None), getattr(model, "model", None), getattr(model, "transformer", None)):
        layers = next((v for n in _LAYERS if isinstance(v := getattr(root, n, None), torch.nn.ModuleList)), None)
        norm = next((v for n in _NORMS if isinstance(v := getattr(root, n, None), torch.nn.Module)), None)
        if layers is not None and len(layers) and norm is not None:
            return tuple(layers), norm
    raise CheckpointError(f"{shown(path)}: {type(model).__name__} keeps its layers or its final norm where they are not looked for")


def _stop(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (getattr(model, "generation_config", None), model.config):
        ends = getattr(config, "eos_token_id", None)
        found |= {ends} if isinstance(ends, int) else set(ends or ())
    return frozenset(found)


@dataclass(slots=True, eq=False)
class Tap:
    """Hooks on a target; after a forward, ``states`` holds [tokens, hidden] of each tapped HF index and of ``FINAL``."""

    target: Target
    wanted: frozenset[int]
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Tap:
        for k, layer in enumerate(self.target.layers):
            if k in self.wanted:
                self._handles.append(layer.register_forward_pre_hook(self._keep(k), with_kwargs=True))
        self._handles.append(self.target.norm.register_forward_pre_hook(self._keep(FINAL), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _keep(self, k: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            if given is None or given.ndim != 3 or given.shape[0] != 1:
                shape = "nothing" if given is None else f"shape {list(given.shape)}"
                raise CheckpointError(f"{self.target.name}: layer {k} is given {shape}, expected [1, tokens, hidden]: not a plain decoder")
            self.states[k] = given[0].detach()

        return hook

    def forward(self, ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Run ``ids`` [tokens] after what ``cache`` holds: logits [tokens, vocabulary] and the cache.

        Raises:
            CheckpointError: the target cannot run them.
        """
        import torch

        self.states.clear()
        name = self.target.cache_name
        try:
            with torch.no_grad():
                out = self.target.model(input_ids=ids[None].to(self.target.device), **{name: cache}, use_cache=True)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
            said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise CheckpointError(f"{self.target.name}: cannot run {len(ids)} tokens: {escaped(said, 200)}") from None
        missing = sorted((self.wanted | {FINAL}) - self.states.keys())
        if missing:
            raise CheckpointError(f"{self.target.name}: layer {missing[0]} was not run; not a plain decoder")
        return out.logits[0], getattr(out, name, None)
