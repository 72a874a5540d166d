"""Small engine sources in the shape of real ones, to be patched as forks are: nothing here can be imported, and nothing has to be."""

from __future__ import annotations

from pathlib import Path

TARGET = """
from torch import nn
from sglang.srt.models.inner import ToyModel


class ToyForCausalLM(nn.Module):
    def __init__(self, config, quant_config=None, prefix=""):
        self.config = config
        self.model = self._init_model(config)
        self.capture_aux_hidden_states = False

    def _init_model(self, config):
        return ToyModel(config)

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        if not self.pp_group.is_last_rank:
            return
        self.capture_aux_hidden_states = True
        if layer_ids is None:
            num_layers = self.config.num_hidden_layers
            self.model.layers_to_capture = [2, num_layers // 2, num_layers - 3]
        else:
            self.model.layers_to_capture = [val + 1 for val in layer_ids]


class ToyVLForConditionalGeneration(nn.Module):
    def __init__(self, config):
        self.language_model = ToyForCausalLM(config.text_config)


EntryClass = [ToyForCausalLM, ToyVLForConditionalGeneration]
"""

INNER = """
class ToyModel(nn.Module):
    def __init__(self, config):
        self.layers_to_capture = []

    def forward(self, input_ids, positions, forward_batch):
        hidden_states = self.embed_tokens(input_ids)
        residual = None
        aux_hidden_states = []
        for i in range(self.start_layer, self.end_layer):
            if i in self.layers_to_capture:
                aux_hidden_states.append(hidden_states + residual)
            layer = self.layers[i]
            hidden_states, residual = layer(positions, hidden_states, forward_batch, residual)
        return hidden_states, aux_hidden_states
"""

DRAFT = """
import torch
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class LlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_id=0, quant_config=None, prefix=""):
        super().__init__(config, layer_id, quant_config, prefix)
        self.self_attn.qkv_proj = QKVParallelLinear(2 * self.hidden_size, 1, 1, 1, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size)

    def forward(self, positions, embeds, hidden_states, forward_batch, residual):
        residual = hidden_states
        embeds = self.input_layernorm(embeds)
        hidden_states = self.hidden_norm(hidden_states)
        return hidden_states, residual


class LlamaModel(nn.Module):
    def __init__(self, config, quant_config=None, prefix=""):
        if hasattr(config, "target_hidden_size"):
            self.hidden_size_in = config.target_hidden_size
        else:
            self.hidden_size_in = config.hidden_size
        self.fc = torch.nn.Linear(self.hidden_size_in * 3, config.hidden_size, bias=getattr(config, "bias", False))
        self.midlayer = LlamaDecoderLayer(config, 0, quant_config, prefix)

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        embeds = self.embed_tokens(input_ids)
        hidden_states = forward_batch.spec_info.hidden_states
        if hidden_states.shape[-1] != embeds.shape[-1]:
            hidden_states = self.fc(hidden_states)
        return self.norm(hidden_states, None)


class LlamaForCausalLMEagle3(LlamaForCausalLM):
    def __init__(self, config, quant_config=None, prefix=""):
        if self.config.num_hidden_layers != 1:
            raise ValueError("EAGLE3 currently only supports 1 layer")
        self.model = LlamaModel(config)
        if self.config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            if config.draft_vocab_size is None:
                self.load_lm_head_from_target = True
                config.draft_vocab_size = config.vocab_size
            self.lm_head = ParallelLMHead(config.draft_vocab_size, config.hidden_size)
        self.hot_token_id = None

    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        stacked_params_mapping = [(".qkv_proj", ".q_proj", "q")]
        for name, loaded_weight in weights:
            if "d2t" in name:
                self.hot_token_id = loaded_weight + torch.arange(loaded_weight.shape[0])
                continue
            if "t2d" in name:
                continue
            for param_name, weight_name, shard_id in stacked_params_mapping:
                if weight_name not in name:
                    continue
                name = name.replace(weight_name, param_name)
                param_name = f"model.{name}" if name not in params_dict else name
                if param_name in params_dict:
                    param = params_dict[param_name]
                break
            else:
                param_name = name if name in params_dict else f"model.{name}"
                if param_name in params_dict:
                    param = params_dict[param_name]


EntryClass = [LlamaForCausalLMEagle3]
"""

BASE = """
class LlamaDecoderLayer(nn.Module):
    def __init__(self, config, layer_id=0, quant_config=None, prefix=""):
        rope_theta = getattr(config, "rope_theta", 10000)
        attention_bias = getattr(config, "attention_bias", False) or getattr(config, "bias", False)


class LlamaForCausalLM(nn.Module):
    def set_embed(self, embed):
        if hasattr(self.config, "target_hidden_size") and self.config.target_hidden_size != self.config.hidden_size:
            return
        self.model.embed_tokens.weight = embed


EntryClass = [LlamaForCausalLM]
"""

RUNNER = """
class ModelRunner:
    def __init__(self):
        eagle_config = getattr(draft_model_config.hf_config, "eagle_config", None)
        self.eagle_use_aux_hidden_state = eagle_config.get("use_aux_hidden_state", True)
        self.eagle_aux_hidden_state_layer_ids = eagle_config["eagle_aux_hidden_state_layer_ids"]

    def initialize(self):
        self.model.set_eagle3_layers_to_capture(self.eagle_aux_hidden_state_layer_ids)
"""

WORKER = """
class EAGLEWorker:
    def __init__(self):
        self.draft_model_runner.model.set_embed(embed)

    def draft_forward(self, forward_batch):
        for i in range(self.speculative_num_steps):
            logits_output = self.draft_model_runner.forward(forward_batch).logits_output
            forward_batch.positions.add_(1)
"""

FILES = {
    "srt/models/toy.py": TARGET,
    "srt/models/inner.py": INNER,
    "srt/models/llama.py": BASE,
    "srt/models/llama_eagle3.py": DRAFT,
    "srt/model_executor/model_runner.py": RUNNER,
    "srt/speculative/eagle_worker.py": WORKER,
}


def write_sglang(folder: Path, version: str | None = "0.5.9", **changes: str | tuple[str, str] | None) -> Path:
    """A toy SGLang below ``folder``; returns the folder to scan.

    Args:
        version: what its package states; None states nothing.
        changes: by the file's stem, a new text, ``(old, new)`` to patch it, or None to leave it out.
    """
    package = folder / "python" / "sglang"
    for path, text in FILES.items():
        change = changes.get(Path(path).stem, text)
        if change is None:
            continue
        if isinstance(change, tuple):
            assert change[0] in text, change[0]
            change = text.replace(*change)
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(change, encoding="utf-8")
    if version is not None:
        (package / "version.py").write_text(f'__version__ = "{version}"\n', encoding="utf-8")
    return folder
