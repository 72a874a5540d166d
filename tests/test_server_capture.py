"""Capturing from a running server: a local one that answers with the shapes SGLang and vLLM have (facts/engines.md section 8)."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3diag.checkpoint.target import open_target
from eagle3diag.cli import main
from eagle3diag.errors import CheckpointError, UsageError
from eagle3diag.hidden.dumps import open_dump
from eagle3diag.serving.server import server_info
from eagle3diag.serving.server_capture import capture_server
from tests.factory import tiny_target

HIDDEN = 64


def state(token: int, place: int) -> list[float]:
    """A state that tells its token and its place, so that a shift by one row or one layer shows."""
    return [float(token), float(place)] + [0.25] * (HIDDEN - 2)


class Fake:
    """What the server is: settable by a test, noted by it."""

    def __init__(self) -> None:
        self.routes: dict[str, object] = {}
        self.asked: list[tuple[str, dict]] = []

    def __enter__(self) -> Fake:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def answer(self, body: dict | None) -> None:
                fake.asked.append((self.path, body or {}))
                found = fake.routes.get(self.path)
                code, value = 404, {"detail": "Not Found"}
                if callable(found):
                    code, value = found(body)
                elif found is not None:
                    code, value = 200, found
                raw = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(code)
                if code in (301, 307):
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def posts(self, path: str) -> list[dict]:
        return [body for at, body in self.asked if at == path]


@pytest.fixture
def fake():
    with Fake() as server:
        yield server


def sglang(fake: Fake, *, aux: int = 3, cached: int = 0, **settings: object) -> None:
    """An SGLang server: rows of ``aux`` states side by side, or of the final one (``aux=0``)."""
    fake.routes["/server_info"] = {
        "model_path": "org/target", "version": "0.5.23", "speculative_algorithm": "EAGLE3" if aux else None, "internal_states": [{}],
    } | settings  # fmt: skip

    def row(token: int) -> list[float]:
        return [x for place in range(aux or 1) for x in state(token, place)]

    def generate(body: dict) -> tuple[int, object]:
        assert body["return_hidden_states"] is True
        prompt = body.get("input_ids") or [100 + len(w) for w in body["text"].split()]
        new = body["sampling_params"]["max_new_tokens"]
        output = [500 + i for i in range(new)]
        meta = {
            "id": "x", "finish_reason": {"type": "length"}, "prompt_tokens": len(prompt), "completion_tokens": new, "cached_tokens": cached,
            "hidden_states": [[row(t) for t in prompt], *(row(t) for t in output[:-1])],
        }  # fmt: skip
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = [[None, t, None] for t in prompt]
        return 200, {"text": "…", "output_ids": output, "meta_info": meta}

    fake.routes["/generate"] = generate


def vllm(fake: Fake, folder: Path, *, layers: int = 4, delay: float = 0.0) -> None:
    """A vLLM server whose connector writes into ``folder``, under a lock where ``delay`` says how long writing takes."""
    fake.routes["/version"] = {"version": "0.33.0"}
    fake.routes["/v1/models"] = {"object": "list", "data": [{"id": "org/target", "owned_by": "vllm"}]}
    folder.mkdir(exist_ok=True)

    def complete(body: dict) -> tuple[int, object]:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [100 + len(w) for w in body["prompt"].split()]
        output = [500 + i for i in range(body["max_tokens"])]
        ids = prompt + (output[:-1] if body["kv_transfer_params"]["include_output_tokens"] else [])
        states = torch.tensor([[state(t, k) for k in range(layers)] for t in ids], dtype=torch.bfloat16)
        path = folder / f"cmpl-{len(fake.asked)}.safetensors"
        lock = path.with_name(path.name + ".lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(delay)
            save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
            lock.close()

        threading.Thread(target=write).start()
        return 200, {
            "id": "cmpl", "choices": [{"text": "…"}], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(output)},
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }  # fmt: skip

    fake.routes["/v1/completions"] = complete


def only(path: Path):
    dump = open_dump(str(path))
    return dump, next(iter(dump))


# ---------------------------------------------------------------- SGLang


def test_sglang_auxiliary_states_are_told_apart(fake, tmp_path):
    sglang(fake)
    got = capture_server(fake.url, [[7, 8, 9]], tmp_path / "dump", layers=[2, 5, 9], new_tokens=4)
    assert (got.target, got.layers, got.final) == ("org/target", (2, 5, 9), "none")
    dump, sample = only(tmp_path / "dump")
    assert dump.format == "portable"
    assert [s.hf for s in dump.slots] == [2, 5, 9]
    assert sample.token_ids.tolist() == [7, 8, 9, 500, 501, 502]  # the last token was never fed back
    for position in range(3):
        rows = sample.states[position]
        assert rows[:, 0].tolist() == [7, 8, 9, 500, 501, 502]
        assert set(rows[:, 1].tolist()) == {position}
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 3


def test_sglang_without_auxiliary_states_hands_out_the_final_one_after_its_norm(fake, tmp_path):
    sglang(fake, aux=0)
    got = capture_server(fake.url, [[7, 8, 9]], tmp_path / "dump", new_tokens=2)
    assert (got.layers, got.final) == ((), "post")
    dump, sample = only(tmp_path / "dump")
    assert dump.final_norm == "post"
    assert dump.final is not None
    assert sample.states[dump.final.position].shape == (4, HIDDEN)


def test_plain_text_takes_its_ids_from_the_log_probabilities(fake, tmp_path):
    sglang(fake)
    capture_server(fake.url, ["one three fiver"], tmp_path / "dump", layers=[1, 2, 3], new_tokens=3)
    assert fake.posts("/generate")[0]["text"] == "one three fiver"
    _, sample = only(tmp_path / "dump")
    assert sample.token_ids.tolist() == [103, 105, 105, 500, 501]


def test_a_given_answer_is_read_and_not_written_again(fake, tmp_path):
    sglang(fake)
    text = {"input_ids": [1, 2, 3, 4, 5], "prompt_tokens": 2}
    capture_server(fake.url, [text], tmp_path / "dump", layers=[1, 2, 3], new_tokens=50)
    assert fake.posts("/generate")[0]["sampling_params"]["max_new_tokens"] == 1
    _, sample = only(tmp_path / "dump")
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, True, True, True]


def test_layers_follow_from_the_servers_own_ids_and_the_target(fake, tmp_path):
    target = open_target(tiny_target(tmp_path / "target", architectures=["LlamaForCausalLM"], num_hidden_layers=12, hidden_size=HIDDEN))
    sglang(fake, speculative_algorithm="EAGLE3", enable_return_aux_hidden_states=True, return_aux_hidden_state_layer_ids=[1, 4, 8])
    assert capture_server(fake.url, [[7, 8]], tmp_path / "a", target=target, new_tokens=1).layers == (2, 5, 9)
    sglang(fake, enable_return_aux_hidden_states=True)
    assert capture_server(fake.url, [[7, 8]], tmp_path / "b", target=target, new_tokens=1).layers == (2, 6, 9)


def test_layers_that_cannot_be_known_are_asked_for(fake, tmp_path):
    sglang(fake, speculative_draft_model_path="/only/on/the/server")
    with pytest.raises(UsageError, match="--layers"):
        capture_server(fake.url, [[7, 8]], tmp_path / "a")
    sglang(fake, return_aux_hidden_state_layer_ids=[1, 4, 8])
    with pytest.raises(UsageError, match="--target-config"):
        capture_server(fake.url, [[7, 8]], tmp_path / "b")
    for wrong in ([], [3, 2], [2, 2], [-1, 2]):
        with pytest.raises(UsageError, match="ascending"):
            capture_server(fake.url, [[7, 8]], tmp_path / "c", layers=wrong)


def test_widths_that_do_not_fit_the_layers(fake, tmp_path):
    sglang(fake)
    with pytest.raises(CheckpointError, match="192 for 5 layers"):
        capture_server(fake.url, [[7, 8]], tmp_path / "a", layers=[1, 2, 3, 4, 5])
    target = open_target(tiny_target(tmp_path / "target", hidden_size=HIDDEN * 2))
    with pytest.raises(CheckpointError, match="expected 384"):
        capture_server(fake.url, [[7, 8]], tmp_path / "b", layers=[1, 2, 3], target=target)


def test_cached_prompts_and_servers_that_hand_out_nothing_are_told(fake, tmp_path):
    sglang(fake, cached=2)
    with pytest.raises(CheckpointError, match="disable-radix-cache"):
        capture_server(fake.url, [[7, 8, 9]], tmp_path / "a", layers=[1, 2, 3])
    fake.routes["/generate"] = {"text": "…", "output_ids": [5], "meta_info": {"prompt_tokens": 1}}
    with pytest.raises(CheckpointError, match="enable-return-hidden-states"):
        capture_server(fake.url, [[7, 8, 9]], tmp_path / "a", layers=[1, 2, 3])
    refusal = {"error": {"message": "The server is not configured to return the hidden states. \x1b[31m"}}
    fake.routes["/generate"] = lambda body: (400, refusal)
    with pytest.raises(CheckpointError, match="HTTP 400: The server is not configured") as error:
        capture_server(fake.url, [[7, 8, 9]], tmp_path / "a", layers=[1, 2, 3])
    assert "\x1b" not in str(error.value)
    assert not (tmp_path / "a").exists()


def test_a_capture_goes_on_where_it_stopped(fake, tmp_path):
    sglang(fake)
    texts = [[1, 2, 3], [4, 5, 6]]
    capture_server(fake.url, texts[:1], tmp_path / "dump", layers=[1, 2, 3], new_tokens=2)
    got = capture_server(fake.url, texts, tmp_path / "dump", layers=[1, 2, 3], new_tokens=2)
    assert [s.resumed for s in got.samples] == [True, False]
    assert len(fake.posts("/generate")) == 2
    again = capture_server(fake.url, texts, tmp_path / "dump", layers=[1, 2, 4], new_tokens=2)
    assert [s.resumed for s in again.samples] == [False, False]


# ---------------------------------------------------------------- vLLM


@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_vllm_files_are_read_once_they_are_whole(fake, tmp_path, delay):
    vllm(fake, tmp_path / "states", delay=delay)
    got = capture_server(fake.url, [[7, 8, 9]], tmp_path / "dump", layers=[2, 5, 9, 12], new_tokens=3)
    assert got.layers == (2, 5, 9, 12)
    _, sample = only(tmp_path / "dump")
    assert sample.token_ids.tolist() == [7, 8, 9, 500, 501]
    for position in range(4):
        assert set(sample.states[position][:, 1].tolist()) == {position}
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 2


def test_vllm_with_a_target_knows_which_state_is_the_last(fake, tmp_path):
    vllm(fake, tmp_path / "states")
    target = open_target(tiny_target(tmp_path / "target", num_hidden_layers=12, hidden_size=HIDDEN))
    got = capture_server(fake.url, [[7, 8, 9]], tmp_path / "dump", layers=[2, 5, 9, 12], target=target, new_tokens=2)
    assert (got.layers, got.final) == ((2, 5, 9), "pre")
    assert open_dump(str(tmp_path / "dump")).final_norm == "pre"


def test_vllm_files_elsewhere_and_answers_without_one(fake, tmp_path):
    vllm(fake, tmp_path / "states")
    with pytest.raises(UsageError, match="--layers"):
        capture_server(fake.url, [[7, 8]], tmp_path / "dump")
    original = fake.routes["/v1/completions"]

    def elsewhere(body: dict) -> tuple[int, object]:
        code, answer = original(body)
        name = Path(answer["kv_transfer_params"]["hidden_states_path"]).name
        return code, answer | {"kv_transfer_params": {"hidden_states_path": f"/mnt/server/{name}"}}

    fake.routes["/v1/completions"] = elsewhere
    with pytest.raises(CheckpointError, match="--storage"):
        capture_server(fake.url, [[7, 8]], tmp_path / "dump", layers=[1, 2, 3, 4])
    got = capture_server(fake.url, [[7, 8]], tmp_path / "dump", layers=[1, 2, 3, 4], storage=tmp_path / "states")
    assert len(got.samples) == 1
    for named in (None, "/etc/passwd"):
        fake.routes["/v1/completions"] = {"choices": [], "kv_transfer_params": {"hidden_states_path": named} if named else None}
        with pytest.raises(CheckpointError, match=r"Connector|no safetensors"):
            capture_server(fake.url, [[7, 8]], tmp_path / "other", layers=[1, 2, 3, 4])


# ---------------------------------------------------------------- servers at large


def test_what_a_server_is(fake):
    sglang(fake)
    info = server_info(fake.url + "/v1/")
    assert (info.engine, info.version, info.model) == ("sglang", "0.5.23", "org/target")
    fake.routes["/get_server_info"] = fake.routes.pop("/server_info") | {"version": "0.4.9"}
    assert server_info(fake.url).version == "0.4.9"
    fake.routes.clear()
    with pytest.raises(CheckpointError, match="neither SGLang"):
        server_info(fake.url)
    fake.routes["/server_info"] = b"<html>"
    with pytest.raises(CheckpointError, match="neither SGLang"):
        server_info(fake.url)


@pytest.mark.parametrize("url", ["http://", "ftp://host", "http://user:pw@host", "http://host:99999", "http://host?x=1"])
def test_urls_that_are_none(url):
    with pytest.raises(UsageError):
        server_info(url)


def test_a_server_that_is_down_or_sends_on(fake, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be reached"):
        server_info("http://127.0.0.1:9")
    sglang(fake)
    fake.routes["/generate"] = lambda body: (307, {})
    with pytest.raises(CheckpointError, match="HTTP 307"):
        capture_server(fake.url, [[1, 2]], tmp_path / "dump", layers=[1, 2, 3])


def test_the_command(fake, tmp_path, capsys):
    sglang(fake)
    (tmp_path / "texts.txt").write_text("hello there\nand again\n")
    out = tmp_path / "dump"
    arguments = ["capture", fake.url, "--text", str(tmp_path / "texts.txt"), "-o", str(out), "--layers", "2,5,9", "--new-tokens", "2"]
    assert main([*arguments, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [s["file"] for s in data["samples"]] == ["sample_0.safetensors", "sample_1.safetensors"]
    assert main(arguments) == 0
    assert "HF 2, 5, 9." in capsys.readouterr().out
    for wrong in (["--device", "cuda"], ["--for", str(tmp_path)], ["--no-decode"]):
        assert main([*arguments, *wrong]) == 2
    assert main(["capture", str(tmp_path), "--text", "x", "-o", str(out), "--storage", "y"]) == 2
    assert main([*arguments[:6], "--layers", "all"]) == 2
    assert capsys.readouterr().err.count("\n") == 5
