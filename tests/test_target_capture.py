"""Capture from real transformers models, tiny and random: states are where HF puts them, and the dump is one that opens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3diag.checkpoint.target import open_target
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.hidden import capture_target
from eagle3diag.hidden.capture import Capture, capture, default_layers
from eagle3diag.hidden.capture_target import load_target
from eagle3diag.hidden.capture_texts import read_texts, text_of
from eagle3diag.hidden.dumps import open_dump

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCAB, WIDE, LAYERS = 96, 32, 6
SHAPE = {"vocab_size": VOCAB, "hidden_size": WIDE, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
SHAPE |= {"max_position_embeddings": 256, "eos_token_id": 95, "bos_token_id": 1, "pad_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 5.0}),
    "gpt2": ("GPT2Config", {}),
    "mla": (
        "DeepseekV3Config",
        {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"first_k_dense_replace": LAYERS, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 16},
    ),
}


def model_of(family: str = "llama", **change: Any) -> Any:
    name, more = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SHAPE, **more, **change)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny-llama"
    model_of().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<s>", "user", "assistant", *[f"w{i}" for i in range(4, 95)], "</s>"]
    held = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    held.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=held, unk_token="<unk>", eos_token="</s>", bos_token="<s>")
    made.chat_template = (
        "<s>{% for m in messages %} {{ m['role'] }} {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} assistant {% endif %}"
    )
    return made


IDS = [1, 2, *range(10, 20)]


def ids(*values: int, prompt: int = 4) -> dict[str, Any]:
    return {"input_ids": list(values) or IDS, "prompt_tokens": prompt}


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path / "target")
    result = capture(tmp_path / "target", [ids()], tmp_path / "dump", layers="all", topk=5, store="float32")
    assert result.layers == tuple(range(LAYERS))
    dump = open_dump(tmp_path / "dump")
    assert (dump.format, dump.final_norm, dump.hidden) == ("portable", "pre", WIDE)
    sample = dump.read(dump.samples[0])
    assert sample.token_ids.tolist() == IDS
    with torch.no_grad():
        out = model(torch.tensor([IDS]), output_hidden_states=True)
        for slot in dump.aux:
            assert slot.hf is not None
            torch.testing.assert_close(sample.states[slot.position], out.hidden_states[slot.hf][0])
        final = load_target(tmp_path / "target").norm(sample.states[LAYERS])
    torch.testing.assert_close(final, out.hidden_states[-1][0])
    truth = out.logits[0].log_softmax(-1)
    assert sample.target_argmax is not None
    assert sample.target_argmax.tolist() == truth.argmax(-1).tolist()
    assert sample.topk_ids is not None
    torch.testing.assert_close(sample.topk_logprobs, truth.gather(-1, sample.topk_ids))
    torch.testing.assert_close(sample.logsumexp, out.logits[0].logsumexp(-1))
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [False] * 4 + [True] * 8
    # the cache gives the same as one prefill, to rounding
    assert [d.hf for d in result.decode] == [*range(LAYERS), None]
    assert all(d.rows == 8 and 0 <= d.mean <= d.worst < 1e-4 and d.cosine > 0.999 for d in result.decode)
    assert result.argmax_differs == 0


def test_the_answer_is_the_greedy_one(tmp_path: Path, llama: Path) -> None:
    result = capture(llama, [list(IDS[:4])], tmp_path / "d", new_tokens=10)
    sample = next(iter(open_dump(tmp_path / "d")))
    model = load_target(llama).model
    truth = model.generate(torch.tensor([IDS[:4]]), max_new_tokens=10, do_sample=False)[0]
    assert sample.token_ids.tolist() == truth.tolist()
    assert result.samples[0].prompt_tokens == 4
    assert sample.loss_mask is not None
    assert int(sample.loss_mask.sum()) == len(truth) - 4


def test_an_answer_ends_at_the_end_token(tmp_path: Path) -> None:
    model = model_of()
    first = int(model(torch.tensor([IDS[:4]])).logits[0, -1].argmax())
    model.generation_config.eos_token_id = first
    model.save_pretrained(tmp_path / "t")
    capture(tmp_path / "t", [list(IDS[:4])], tmp_path / "d", new_tokens=10)
    assert next(iter(open_dump(tmp_path / "d"))).token_ids.tolist() == [*IDS[:4], first]


def test_a_decode_fault_shows_in_the_layers_behind_it(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = capture_target.load_target

    def faulty(*args: Any, **more: Any) -> Any:
        target = honest(*args, **more)

        def hook(_: Any, given: tuple[Any, ...], out: Any) -> Any:
            state = out[0] if isinstance(out, tuple) else out
            changed = state * 1.05 if state.shape[1] == 1 else state
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        target.layers[2].register_forward_hook(hook)
        return target

    monkeypatch.setattr("eagle3diag.hidden.capture.load_target", faulty)
    result = capture(llama, [ids()], tmp_path / "d", layers="all", decode_out=tmp_path / "decoded", store="float32")
    worst = {d.hf: d.worst for d in result.decode}
    assert all(worst[k] < 1e-5 for k in (0, 1, 2))
    assert all(worst[k] > 0.01 for k in (3, 4, 5, None))
    a, b = next(iter(open_dump(tmp_path / "d"))), next(iter(open_dump(tmp_path / "decoded")))
    assert torch.equal(a.token_ids, b.token_ids)
    torch.testing.assert_close(a.states[3][:4], b.states[3][:4])
    assert not torch.allclose(a.states[3][4:], b.states[3][4:])


def test_a_capture_goes_on_where_it_stopped(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [ids(), ids(*IDS[::-1]), ids(*IDS, *IDS)]
    seen: list[tuple[int, int, str]] = []

    def stop(done: int, total: int, file: str) -> None:
        seen.append((done, total, file))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(llama, texts, tmp_path, progress=stop)
    assert seen == [(0, 3, ""), (1, 3, "sample_0.safetensors"), (2, 3, "sample_1.safetensors")]
    before = (tmp_path / "sample_0.safetensors").stat().st_mtime_ns
    whole = capture(llama, texts, tmp_path)
    assert [s.resumed for s in whole.samples] == [True, True, False]
    assert (tmp_path / "sample_0.safetensors").stat().st_mtime_ns == before

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is left to capture")

    monkeypatch.setattr("eagle3diag.hidden.capture.load_target", never)
    again = capture(llama, texts, tmp_path)  # all there: the target is not even loaded
    assert all(s.resumed for s in again.samples)
    assert again.decode == whole.decode
    monkeypatch.undo()
    other = capture(llama, texts, tmp_path, topk=3)  # other settings: captured anew
    assert not any(s.resumed for s in other.samples)
    (tmp_path / "sample_1.safetensors").write_bytes((tmp_path / "sample_1.safetensors").read_bytes()[:-5])
    assert [s.resumed for s in capture(llama, texts, tmp_path, topk=3).samples] == [True, False, True]


def test_a_broken_off_sample_leaves_no_file(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eagle3diag.hidden.portable.os.fsync", full)
    with pytest.raises(CheckpointError, match="cannot be written: no space left"):
        capture(llama, [ids()], tmp_path / "d")
    assert not list((tmp_path / "d").iterdir())


def test_rows_stand_in_for_the_target(tmp_path: Path, llama: Path) -> None:
    result = capture(llama, [ids()], tmp_path / "d", extra_ids=[90, 91])
    assert result.rows is not None
    rows = open_target(result.rows)
    assert rows.rows
    assert rows.num_layers.value == LAYERS
    assert rows.checkpoint is not None
    assert rows.embed is not None
    assert rows.head == "lm_head"
    known = rows.checkpoint.read("token_ids").long()
    assert set(IDS) | {90, 91} <= set(known.tolist())
    sample = next(iter(open_dump(tmp_path / "d")))
    assert sample.topk_ids is not None
    assert set(sample.topk_ids.flatten().tolist()) <= set(known.tolist())
    model = load_target(llama).model
    torch.testing.assert_close(rows.checkpoint.read(rows.embed).float(), model.get_input_embeddings().weight[known])
    torch.testing.assert_close(rows.checkpoint.read("lm_head").float(), model.get_output_embeddings().weight[known])
    before = (tmp_path / "d" / "target" / "rows.safetensors").stat().st_mtime_ns
    capture(llama, [ids()], tmp_path / "d", extra_ids=[90, 91])
    assert (tmp_path / "d" / "target" / "rows.safetensors").stat().st_mtime_ns == before
    assert capture(llama, [ids()], tmp_path / "none", rows=False).rows is None
    assert not (tmp_path / "none" / "target").exists()


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    model_of(tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path / "t")
    capture(tmp_path / "t", [ids()], tmp_path / "d")
    rows = open_target(tmp_path / "d" / "target")
    assert rows.head == rows.embed == "embed_tokens"
    assert rows.checkpoint is not None
    assert rows.checkpoint.tensors["embed_tokens"].dtype == "BF16"  # stored so, run in float32, the same numbers


def test_states_too_large_for_float16_are_stored_in_bfloat16(tmp_path: Path) -> None:
    model = model_of()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e7)
    model.save_pretrained(tmp_path / "t")
    capture(tmp_path / "t", [ids()], tmp_path / "d", decode=False)
    sample = next(iter(open_dump(tmp_path / "d")))
    assert sample.states[0].dtype == torch.bfloat16
    assert bool(sample.states[0].isfinite().all())


def test_prompts_go_through_the_chat_template(tmp_path: Path, llama: Path) -> None:
    result = capture(llama, ["w7 w8", {"prompt": "w7 w8", "response": "w9 w10"}, {"text": "w7 w8 w9"}], tmp_path / "d", new_tokens=3)
    asked, answered, raw = open_dump(tmp_path / "d")
    assert asked.token_ids[:5].tolist() == [1, 2, 7, 8, 3]
    assert answered.token_ids.tolist() == [1, 2, 7, 8, 3, 9, 10, 95]
    assert raw.token_ids.tolist() == [7, 8, 9]
    assert [s.prompt_tokens for s in result.samples] == [5, 5, 1]
    plain = tmp_path / "plain"
    capture(llama, ["w7 w8"], plain, new_tokens=3, chat=False)
    assert next(iter(open_dump(plain))).token_ids[:2].tolist() == [7, 8]


def test_layers_can_be_chosen(tmp_path: Path, llama: Path) -> None:
    assert capture(llama, [ids()], tmp_path / "a", layers=[4, 2, LAYERS]).layers == (2, 4)
    assert capture(llama, [ids()], tmp_path / "b").layers == default_layers(LAYERS)
    with pytest.raises(UsageError, match="HF index 7 where the target has 6 layers"):
        capture(llama, [ids()], tmp_path / "c", layers=[7])


def test_the_default_layers_of_a_real_target() -> None:
    assert default_layers(30) == (0, 1, 2, 3, 14, 15, 16, 26, 27, 28)
    assert default_layers(1) == (0,)


def test_long_texts_are_cut_and_long_prompts_refused(tmp_path: Path, llama: Path) -> None:
    assert capture(llama, [ids()], tmp_path / "a", max_tokens=6).samples[0].tokens == 6
    assert capture(llama, [list(IDS[:4])], tmp_path / "b", max_tokens=6, new_tokens=20).samples[0].tokens <= 6
    with pytest.raises(CheckpointError, match="a prompt has 12 tokens, at most 5"):
        capture(llama, [list(IDS)], tmp_path / "c", max_tokens=6)


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"new_tokens": 0}, UsageError, "new_tokens is 0"),
        ({"topk": -1}, UsageError, "topk is -1"),
        ({"store": "int8"}, UsageError, "store is 'int8'"),
        ({"dtype": "int8"}, UsageError, "no dtype 'int8'"),
        ({"texts": []}, UsageError, "no text"),
        ({"texts": [[1, 2, 96]]}, CheckpointError, "token id 96 where tiny-llama has 96 tokens"),
        ({"texts": [3.5]}, CheckpointError, "text 0: no text"),
        ({"target_path": "/nowhere"}, CheckpointError, "no such folder"),
    ],
)
def test_what_cannot_be_captured_is_told(tmp_path: Path, llama: Path, more: dict[str, Any], error: type[Exception], says: str) -> None:
    given: dict[str, Any] = {"target_path": llama, "texts": [ids()], "out": tmp_path / "d", **more}
    with pytest.raises(error, match=says):
        capture(**given)
    assert not (tmp_path / "d").exists()


def test_a_target_that_does_not_load_is_told_in_one_line(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody"}))
    with pytest.raises(CheckpointError, match="transformers cannot load it") as told:
        load_target(tmp_path)
    assert "\n" not in str(told.value)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two").mkdir(exist_ok=True)
        (tmp_path / "two" / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        load_target(tmp_path / "two")
    bare = tmp_path / "bare"
    model_of().save_pretrained(bare)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        capture(bare, ["hello"], tmp_path / "d")


def test_without_transformers_the_extra_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"eagle3diag\[target\]"):
        load_target(llama)


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key matrix in the order GGUF stores them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _write_gguf(path: Path, model: Any) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    held = model.state_dict()
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    inner = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    inner |= {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    inner |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    for k in range(LAYERS):
        names |= {f"model.layers.{k}.{a}.weight": f"blk.{k}.{b}.weight" for a, b in inner.items()}
    for ours, theirs in names.items():
        weight = held[ours]
        if "q_proj" in ours or "k_proj" in ours:
            weight = _permuted(weight, 4 if "q_proj" in ours else 2)
        writer.add_tensor(theirs, weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_target_gives_the_same_states(tmp_path: Path, llama: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "g").mkdir()
    _write_gguf(tmp_path / "g" / "tiny.F32.gguf", load_target(llama).model)
    capture(llama, [ids()], tmp_path / "a", store="float32", layers="all")
    from_folder = capture(tmp_path / "g", [ids()], tmp_path / "b", store="float32", layers="all")
    assert from_folder.target == "tiny.F32"
    a, b = next(iter(open_dump(tmp_path / "a"))), next(iter(open_dump(tmp_path / "b")))
    for k in a.states:
        torch.testing.assert_close(a.states[k], b.states[k])
    rows = open_target(tmp_path / "b" / "target")
    assert rows.rows
    assert rows.num_layers.value == LAYERS
    assert capture(tmp_path / "g" / "tiny.F32.gguf", [ids()], tmp_path / "b", store="float32", layers="all").samples[0].resumed


def test_texts_from_files(tmp_path: Path) -> None:
    plain = tmp_path / "a.txt"
    plain.write_text("first\n\n  second one \n", encoding="utf-8")
    assert [t.messages for t in read_texts(plain)] == [(("user", "first"),), (("user", "second one"),)]
    lines = tmp_path / "a.jsonl"
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    lines.write_text("\n".join(map(json.dumps, [{"conversations": turns}, {"prompt": "p"}, ids(), {"text": "t"}])))
    chat, prompt, tokens, raw = read_texts(lines)
    assert (chat.messages, chat.answer) == ((("system", "s"), ("user", "q")), "a")
    assert (prompt.messages, prompt.answer) == ((("user", "p"),), None)
    assert (tokens.ids, tokens.prompt_tokens) == (tuple(IDS), 4)
    assert raw.raw == "t"
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps([{"prompt": "p"}, {"prompt": "q"}], indent=1))
    assert len(read_texts(whole)) == 2
    assert text_of(chat) is chat


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no text in it"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'{"prompt": ', "line 1: not readable as JSON"),
        (b'{"x": 1}', "line 1: no text"),
        (b'{"messages": [{"role": "assistant", "content": "a"}]}', "no turn in front"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "only texts are captured"),
    ],
)
def test_files_without_texts(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=says):
        read_texts(path)


def test_a_capture_shows_itself(tmp_path: Path, llama: Path) -> None:
    result = capture(llama, [ids()], tmp_path / "d")
    assert isinstance(result, Capture)
    assert result.target == "tiny-llama"
