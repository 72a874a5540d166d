"""Capture hidden states from a running server, by the ways SGLang and vLLM have of handing them out, as a portable dump.

SGLang answers ``/generate`` with ``return_hidden_states`` in JSON (``meta_info.hidden_states``): the states in front of ``fc`` side by side
where auxiliary states are captured, the final state after the norm where not. vLLM's ``ExampleHiddenStatesConnector`` writes one file
a request, named in the answer, which has to be readable here. Neither says which layers it hands out, so they are told, or follow from
what the server says of itself and the target's config; they are never guessed. Facts: engines.md section 8.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3diag.errors import CheckpointError, UsageError, escaped
from eagle3diag.hidden.capture import Capture, CapturedSample
from eagle3diag.hidden.capture_texts import Text, read_texts, text_of, tokenised
from eagle3diag.hidden.portable import read_metadata, write_sample
from eagle3diag.serving.server import LARGE, ServerInfo, address, ask, server_info

if TYPE_CHECKING:
    import torch

    from eagle3diag.checkpoint.model import TargetSpec

__all__ = ["capture_server"]

Progress = Callable[[int, int, str], None]
_SGLANG_START = "start it with --enable-return-hidden-states (0.4.8 and newer) and --disable-radix-cache"
_VLLM_START = "start it with method extract_hidden_states and the ExampleHiddenStatesConnector (vLLM 0.17 and newer)"


# ---------------------------------------------------------------- which layers


def _layers(info: ServerInfo, given: Sequence[int] | None, target: TargetSpec | None) -> tuple[int, ...] | None:
    """HF indices of the states side by side; None where the server hands out the final state only.

    Raises:
        UsageError: they cannot be known.
    """
    if given is not None:
        if not given or any(k < 0 for k in given) or list(given) != sorted(set(given)):
            raise UsageError(f"--layers {list(given)}: give the HF indices the server hands out, ascending, each once")
        return tuple(given)
    if info.engine == "vllm":
        raise UsageError(
            "vLLM does not say which layers it writes: give --layers with the ids of its draft_model_config, which are HF indices"
        )
    settings = info.settings
    asked = settings.get("return_aux_hidden_state_layer_ids")
    if str(settings.get("speculative_algorithm") or "").upper() != "EAGLE3" and not asked:
        return None
    config: Mapping[str, Any] | None = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": asked}} if isinstance(asked, list) else None
    draft = settings.get("speculative_draft_model_path")
    if config is None and settings.get("enable_return_aux_hidden_states"):
        config = {}
    elif config is None and isinstance(draft, str) and Path(draft).is_dir():
        from eagle3diag.checkpoint.open import open_checkpoint

        config = open_checkpoint(draft).config
    if config is not None and target is not None:
        from eagle3diag.engines.capture import capture
        from eagle3diag.engines.contract import load_contract

        aux = capture(load_contract("sglang", info.version or None), config, target)
        if aux.prefill_hf:
            return aux.prefill_hf
    need = "give --target-config with the target's config, or --layers" if config is not None else "give --layers"
    raise UsageError(f"the server hands out auxiliary states and does not say of which layers: {need} with their HF indices")


def _split(
    states: torch.Tensor, layers: tuple[int, ...] | None, hidden: int | None, count: int | None, where: str
) -> tuple[dict[int, torch.Tensor], torch.Tensor | None, str]:
    """``(states by HF index, final state or None, its norm status)`` of rows as the server gives them."""
    width = int(states.shape[-1])
    if layers is None or (hidden is not None and width == hidden and len(layers) != 1):
        if hidden is not None and width != hidden:
            raise CheckpointError(f"{where}: states of width {width:,} where the target's are {hidden:,} wide; give --layers")
        return {}, states, "post"
    if width % len(layers) or (hidden is not None and width != hidden * len(layers)):
        wide = f"{hidden * len(layers):,}" if hidden is not None else f"a multiple of {len(layers)}"
        raise CheckpointError(f"{where}: states of width {width:,} for {len(layers)} layers, expected {wide}; --layers names others")
    one = width // len(layers)
    parts = {k: states[:, i * one : (i + 1) * one] for i, k in enumerate(layers)}
    return parts, parts.pop(count, None) if count is not None else None, "pre"


# ---------------------------------------------------------------- one text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Token ids [tokens], how many are the prompt, rows of states [tokens, width], and where from for messages."""

    ids: torch.Tensor
    prompt: int
    states: torch.Tensor
    where: str


def _words(text: Text) -> str:
    return text.raw if text.raw is not None else "\n".join(content for _, content in text.messages) + (text.answer or "")


def _input(text: Text, tokenizer: Any, chat: bool) -> tuple[list[int] | str, int | None, bool]:
    """``(token ids or plain text, prompt tokens where known, whether the server is to write an answer)``."""
    if text.ids or tokenizer is not None:
        prompt, answer = tokenised(text, tokenizer, chat=chat)
        return [*prompt, *(answer or [])], len(prompt), answer is None
    return _words(text), None, text.raw is None and text.answer is None


def _sglang(base: str, given: list[int] | str, prompt: int | None, new: int, where: str) -> _Answer:
    from eagle3diag.hidden.formats_json import response_parts

    body: dict[str, Any] = {"input_ids": given} if isinstance(given, list) else {"text": given}
    body |= {"sampling_params": {"temperature": 0, "max_new_tokens": new}, "return_hidden_states": True}
    if not isinstance(given, list):  # the ids of the prompt come with its log-probabilities
        body |= {"return_logprob": True, "logprob_start_len": 0}
    answer = ask(base, "/generate", body, limit=LARGE)
    answer = answer[0] if isinstance(answer, list) and answer else answer
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or not meta.get("hidden_states"):
        raise CheckpointError(f"{where}: the server's answer holds no hidden states; {_SGLANG_START}")
    if meta.get("cached_tokens"):
        raise CheckpointError(
            f"{where}: {escaped(meta['cached_tokens'], 12)} tokens came from the server's cache and have no states; {_SGLANG_START}"
        )
    if isinstance(given, list):
        answer = {**answer, "input_ids": given}
    held = response_parts(answer, where)
    ids = held.reader("input_ids")
    told = prompt if prompt is not None else meta.get("prompt_tokens")
    return _Answer(
        ids=ids,
        prompt=told if isinstance(told, int) and 0 < told <= len(ids) else len(ids),
        states=held.reader("hidden_states"),
        where=where,
    )


def _vllm(base: str, model: str, given: list[int] | str, prompt: int | None, new: int, where: str, storage: Path | None) -> _Answer:
    body = {"model": model, "prompt": given, "max_tokens": new, "temperature": 0, "kv_transfer_params": {"include_output_tokens": new > 1}}
    answer = ask(base, "/v1/completions", body, limit=LARGE)
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    named = params.get("hidden_states_path") if isinstance(params, dict) else None
    if not isinstance(named, str):
        raise CheckpointError(f"{where}: the server's answer names no file of hidden states; {_VLLM_START}")
    ids, states = _connector_file(Path(named), storage, where)
    usage = answer.get("usage")
    told = prompt if prompt is not None else usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return _Answer(ids=ids, prompt=told if isinstance(told, int) and 0 < told <= len(ids) else len(ids), states=states, where=where)


def _connector_file(named: Path, storage: Path | None, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and states of a file vLLM's connector wrote, once it is complete."""
    from safetensors import SafetensorError, safe_open

    path = named if storage is None else storage / named.name
    shown = escaped(path, 160)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{where}: the server names {shown}, which is no safetensors file")
    _await_writer(path)
    if not path.is_file():
        hint = (
            "give --storage with the folder it is mounted at here" if storage is None else "is --storage the server's shared_storage_path?"
        )
        raise CheckpointError(f"{where}: the server wrote {shown}, which is not here; {hint}")
    try:
        with safe_open(path, "pt") as file:
            missing = {"token_ids", "hidden_states"} - set(file.keys())
            if missing:
                raise CheckpointError(f"{where}: {shown} lacks {', '.join(sorted(missing))}")
            ids, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{where}: {shown} cannot be read ({escaped(error, 80)})") from None
    if ids.ndim != 1 or states.ndim != 3 or len(ids) != len(states):
        raise CheckpointError(f"{where}: {shown} holds token_ids {list(ids.shape)} and hidden_states {list(states.shape)}")
    return ids, states.flatten(1)


def _await_writer(path: Path) -> None:
    """Wait for the lock the writer holds while the file is incomplete (releases from 0.22.0 have one)."""
    import time

    lock = path.with_name(path.name + ".lock")
    if not lock.is_file():
        return
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return
    end = time.monotonic() + 60
    with lock.open("rb") as held:
        while time.monotonic() < end:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.05)


# ---------------------------------------------------------------- the capture


def capture_server(
    url: str,
    texts: str | os.PathLike[str] | Iterable[object],
    out: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    target: TargetSpec | None = None,
    tokenizer: Any = None,
    new_tokens: int = 128,
    max_tokens: int = 2048,
    chat: bool = True,
    storage: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Capture:
    """Have a running server run texts, and write the states it hands out as a portable dump.

    Args:
        url: ``http://HOST:PORT`` of an SGLang server (0.4.6 and newer) or a vLLM server (0.17 and newer) started to hand out states.
        texts: a file (see ``read_texts``), or prompts, token id lists, or objects as a JSON line holds them.
        out: the dump, a folder; a capture that was stopped goes on there.
        layers: HF indices the server hands out, ascending; needed where they do not follow from what it says.
        target: the target's config: its width and layer count.
        tokenizer: of the target (transformers), for the chat template; without it prompts are sent as plain text.
        new_tokens: longest answer to a prompt without one.
        max_tokens: longest sample; what is over is cut at the end.
        chat: put prompts through the chat template, where there is a tokenizer.
        storage: where the folder vLLM writes to is mounted here.
        progress: called with (samples done, samples, file).

    Raises:
        UsageError: no server's URL, or layers that cannot be known.
        CheckpointError: the server cannot be reached or hands out no states, or the dump cannot be written.
    """
    given = read_texts(Path(texts)) if isinstance(texts, (str, os.PathLike)) else [text_of(t, f"text {i}") for i, t in enumerate(texts)]
    if not given:
        raise UsageError("no text to capture")
    for name, value, least in (("new_tokens", new_tokens, 1), ("max_tokens", max_tokens, 2)):
        if value < least:
            raise UsageError(f"{name} is {value}; give {least} or more")
    base, info = address(url), server_info(url)
    chosen = _layers(info, layers, target)
    folder = Path(out)
    tell = progress or (lambda done, total, file: None)
    samples: list[CapturedSample] = []
    tell(0, len(given), "")
    for i, text in enumerate(given):
        file, where = f"sample_{i}.safetensors", f"text {i}"
        run = {"server": info.engine, "model": info.model, "text": text.key(), "layers": chosen, "new": new_tokens, "max": max_tokens}
        key = hashlib.sha256(json.dumps({**run, "chat": chat and tokenizer is not None}, sort_keys=True).encode()).hexdigest()[:32]
        there = read_metadata(folder / file)
        if there.get("capture_key") == key:
            tokens, prompt = int(there["tokens"]), int(there["prompt_tokens"])
            samples.append(CapturedSample(file=file, tokens=tokens, prompt_tokens=prompt, resumed=True))
        else:
            sent, prompt_tokens, write = _input(text, tokenizer, chat)
            if isinstance(sent, list) and len(sent) >= max_tokens:
                sent, write = sent[:max_tokens], False
            new = min(new_tokens, max_tokens - len(sent)) if write and isinstance(sent, list) else new_tokens if write else 1
            if info.engine == "sglang":
                answer = _sglang(base, sent, prompt_tokens, new, where)
            else:
                answer = _vllm(base, info.model, sent, prompt_tokens, new, where, None if storage is None else Path(storage))
            samples.append(_written(folder / file, answer, chosen, target, info, key, max_tokens))
        tell(i + 1, len(given), samples[-1].file)
    names = read_metadata(folder / samples[0].file).get("stored", "").split()
    final: Literal["pre", "post", "none"] = "post" if "post" in names else "pre" if "pre" in names else "none"
    stored = tuple(sorted(int(k) for k in names if k.isdigit()))
    return Capture(path=escaped(folder, 200), target=info.model, layers=stored, samples=tuple(samples), final=final)


def _written(
    path: Path, answer: _Answer, layers: tuple[int, ...] | None, target: TargetSpec | None, info: ServerInfo, key: str, most: int
) -> CapturedSample:
    import torch

    rows = min(len(answer.ids), len(answer.states), most)
    if abs(len(answer.ids) - len(answer.states)) > 1:
        raise CheckpointError(
            f"{answer.where}: {len(answer.states):,} rows of states for {len(answer.ids):,} tokens; the server cut or cached some"
        )
    ids, prompt = answer.ids[:rows], min(answer.prompt, rows)
    hidden, count = (target.hidden_size.value, target.num_layers.value) if target is not None else (None, None)
    states, final, norm = _split(answer.states[:rows], layers, hidden, count, answer.where)
    metadata = {
        "mode": f"server: {info.engine} {info.version}".strip(),
        "tokens": str(rows),
        "prompt_tokens": str(prompt),
        "stored": " ".join([*map(str, states), *([norm] if final is not None else [])]),
        "capture_key": key,
    }
    mask = torch.arange(rows) >= prompt
    write_sample(
        path,
        token_ids=ids,
        states=states,
        final=final,
        final_norm=norm,
        loss_mask=mask if bool(mask.any()) else None,
        target=info.model,
        metadata=metadata,
    )
    return CapturedSample(file=path.name, tokens=rows, prompt_tokens=prompt, resumed=False)
