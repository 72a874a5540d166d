"""``check --headers-only`` on a draft of 4.7 GB: how much of it is read, and how long it takes beside a bare listing of its keys.

The draft has the shapes of a full-size one (hidden 7168, vocabulary 163840); its header is real and its data a hole in the file. What is
read is taken from ``/proc/PID/io`` of the finished process: ``rchar`` of the check, less that of the same check on a twin of 512 times
smaller sides (so the same imports), plus the twin's whole size, bounds what was read of the large file. Exits with 1 where that reaches
1 MB or the check takes more than 1.5 times the listing. Timings are fresh processes in turn on a warm page cache; medians count. Both
find byte code from the round before, as installed packages do (where Python may not write any, a source tree is compiled at every start).

Run: ``python benchmarks/headers_only.py [--rounds 15] [--engine sglang==0.5.9]``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_BYTES, LIMIT_RATIO = 1_000_000, 1.5
BARE = "import sys; from safetensors import safe_open\nwith safe_open(sys.argv[1], framework='np') as f: print(len(list(f.keys())))"


def sides(small: int) -> dict[str, int]:
    """Hidden size, MLP width, vocabulary, draft vocabulary and heads of the full-size draft, or of one `small` times smaller."""
    full = {"hidden": 7168, "inter": 18432, "vocab": 163840, "draft_vocab": 32000, "heads": 64}
    return {k: max(1, v // small) for k, v in full.items()}


def write(folder: Path, small: int = 1) -> Path:
    """A draft folder whose weights are a header and a hole."""
    s = sides(small)
    h, inter, q = s["hidden"], s["inter"], s["heads"] * 128
    shapes = {
        "embed_tokens.weight": [s["vocab"], h],
        "fc.weight": [h, 3 * h],
        "layers.0.hidden_norm.weight": [h],
        "layers.0.input_layernorm.weight": [h],
        "layers.0.mlp.down_proj.weight": [h, inter],
        "layers.0.mlp.gate_proj.weight": [inter, h],
        "layers.0.mlp.up_proj.weight": [inter, h],
        "layers.0.post_attention_layernorm.weight": [h],
        "layers.0.self_attn.k_proj.weight": [q, 2 * h],
        "layers.0.self_attn.o_proj.weight": [h, q],
        "layers.0.self_attn.q_proj.weight": [q, 2 * h],
        "layers.0.self_attn.v_proj.weight": [q, 2 * h],
        "lm_head.weight": [s["draft_vocab"], h],
        "norm.weight": [h],
    }
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    entries = [(name, shape, "BF16", 2) for name, shape in shapes.items()]
    for name, shape, dtype, size in [*entries, ("d2t", [s["draft_vocab"]], "I64", 8), ("t2d", [s["vocab"]], "BOOL", 1)]:
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        f.truncate(8 + len(raw) + at)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": h, "intermediate_size": inter,
        "vocab_size": s["vocab"], "draft_vocab_size": s["draft_vocab"],
        "num_attention_heads": s["heads"], "num_key_value_heads": s["heads"], "head_dim": 128,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 50000.0, "max_position_embeddings": 262144, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measured(command: list[str], cache: str) -> tuple[float, int | None, int]:
    """Seconds, bytes read by system calls (None where the system does not say), and exit status of one process."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": cache}
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment)
    if not hasattr(os, "waitid") or not Path("/proc/self/io").exists():
        child.wait()
        return time.perf_counter() - begin, None, child.returncode
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but its counters are still there
    seconds = time.perf_counter() - begin
    counters = dict(line.split(": ") for line in Path(f"/proc/{child.pid}/io").read_text().splitlines())
    child.wait()
    return seconds, int(counters["rchar"]), child.returncode


def main(argv: list[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engine", help="serve the draft with this engine too (needs its contract read; not part of the claim)")
    a = parser.parse_args(argv)
    more = ["--engine", a.engine] if a.engine else []
    with tempfile.TemporaryDirectory() as name:
        large, twin = write(Path(name) / "large"), write(Path(name) / "twin", 512)
        check = [sys.executable, "-m", "eagle3diag", "check", str(large), "--headers-only", *more]
        bare = [sys.executable, "-c", BARE, str(large / "model.safetensors")]
        cache = str(Path(name) / "bytecode")
        timed: dict[str, list[float]] = {"check": [], "bare": []}
        for at in range(a.rounds + 1):
            for what, command in (("check", check), ("bare", bare)) if at % 2 else (("bare", bare), ("check", check)):
                seconds, read, code = measured(command, cache)
                if code not in (0, 1):
                    print(f"{what} ended with status {code}")
                    return 1
                if at:  # the first round fills the page cache and writes byte code
                    timed[what].append(seconds)
                if what == "check":
                    total = read
        twin_read = measured([*check[:4], str(twin), *check[5:]], cache)[1]
        start_read = measured([sys.executable, "-c", "pass"], cache)[1]
        size, twin_size = ((d / "model.safetensors").stat().st_size for d in (large, twin))
    times = {k: statistics.median(v) for k, v in timed.items()}
    ratio = times["check"] / times["bare"]
    good = ratio <= LIMIT_RATIO
    print(f"draft of {size / 1e9:.2f} GB")
    if total is None or twin_read is None or start_read is None:
        print("bytes read: this system does not count them")
    else:
        bound = total - twin_read + twin_size
        good = good and bound < LIMIT_BYTES
        print(f"bytes read of the draft: at most {max(bound, 0):,} (limit {LIMIT_BYTES:,})")
        print(f"bytes read by the whole process beyond a bare start, its own modules among them: {total - start_read:,}")
    print(f"check --headers-only {times['check']:.3f} s, bare listing {times['bare']:.3f} s: ratio {ratio:.2f} (limit {LIMIT_RATIO})")
    print("ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
