"""``diff --values`` on two 500 MB BF16 drafts of 15 tensors of which one differs: right, fast, and flat in memory.

Prints what was found, the ratio of the rate to that at which torch reads both files once, and the peak resident memory of the process that
did it; the full statistics of every tensor are timed apart. Exits with 1 where the answer is wrong, the ratio is below 0.7 or the peak
reaches 1 GiB. Every timing is a fresh process on a warm page cache; the best of several rounds counts, the two alternate.

Run: ``python benchmarks/diff_values.py [--rounds 5] [--scale 1.0]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
H, INTER, VOCAB, VOCAB_DRAFT = 3072, 8192, 128256, 32000
CHANGED = "layers.0.mlp.down_proj.weight"

READ = """
import sys, time, json
import torch
from safetensors import safe_open
torch.set_num_threads(1)
start = time.perf_counter()
total = 0
for path in sys.argv[1:3]:
    with safe_open(path, "pt") as f:
        for name in f.keys():
            t = f.get_tensor(name)
            total += t.view(-1).view(torch.uint8).clone().numel()
print(json.dumps({"seconds": time.perf_counter() - start, "bytes": total}))
"""

DIFF = """
import sys, time, json, resource
import torch
torch.set_num_threads(1)
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.weights.diff import diff
def peak():
    try:  # ru_maxrss is inherited from the parent across exec, the high-water mark is this process's own
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
start = time.perf_counter()
found = diff(open_checkpoint(sys.argv[1]), open_checkpoint(sys.argv[2]), values=True).to_dict()
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak": peak(), "found": found}))
"""

STATS = """
import sys, time, json
import torch
torch.set_num_threads(1)
from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.weights.stats import tensor_stats
start = time.perf_counter()
c = open_checkpoint(sys.argv[1])
for name in c.tensors:
    tensor_stats(c, name)
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def write(folder: Path, scale: float) -> tuple[Path, Path, dict[str, float]]:
    """Both drafts, and what the difference really is (float64, by torch)."""
    import torch
    from safetensors.torch import save_file

    h, inter = int(H * scale**0.5) // 64 * 64, int(INTER * scale**0.5) // 64 * 64
    layer = "layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, 3 * h),
        f"{layer}.self_attn.q_proj.weight": (h, 2 * h),
        f"{layer}.self_attn.k_proj.weight": (h // 3, 2 * h),
        f"{layer}.self_attn.v_proj.weight": (h // 3, 2 * h),
        f"{layer}.self_attn.o_proj.weight": (h, h),
        f"{layer}.mlp.gate_proj.weight": (inter, h),
        f"{layer}.mlp.up_proj.weight": (inter, h),
        f"{layer}.mlp.down_proj.weight": (h, inter),
        "lm_head.weight": (VOCAB_DRAFT, h),
        "norm.weight": (h,),
    }
    shapes |= {f"{layer}.{n}.weight": (h,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    g = torch.Generator().manual_seed(0)
    tensors = {n: (0.02 * torch.randn(s, generator=g)).to(torch.bfloat16) for n, s in shapes.items()}
    tensors["norm.weight"][5] = float("nan")
    tensors["d2t"] = torch.arange(VOCAB_DRAFT)
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[::4][:VOCAB_DRAFT] = True
    tensors["t2d"] = mask
    config = json.dumps(
        {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": h, "num_hidden_layers": 1, "draft_vocab_size": VOCAB_DRAFT}
    )
    paths = []
    truth: dict[str, float] = {}
    for side in ("a", "b"):
        if side == "b":
            before = tensors[CHANGED].double()
            tensors[CHANGED][::7, 3] += 0.0625
            after = tensors[CHANGED].double()
            d = after - before
            truth = {
                "max_abs": float(d.abs().max()),
                "relative": float(d.norm() / before.norm()),
                "differ": float((d != 0).double().mean()),
            }
            tensors = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
        path = folder / side
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(config, encoding="utf-8")
        paths.append(path)
    return paths[0], paths[1], truth


def child(code: str, *arguments: Path) -> dict[str, object]:
    """Run a piece of code in its own interpreter; its last line is JSON."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True, env=env)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Exit status: 0 where all three promises hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the drafts, 1.0 for about 500 MB each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        a, b, truth = write(Path(name), options.scale)
        files = (a / "model.safetensors", b / "model.safetensors")
        size = sum(f.stat().st_size for f in files)
        for f in files:
            f.read_bytes()
        read, run, result = [], [], {}
        for _ in range(options.rounds):
            read.append(float(str(child(READ, *files)["seconds"])))
            result = child(DIFF, a, b)
            run.append(float(str(result["seconds"])))
        stats = float(str(child(STATS, a)["seconds"]))
    found = dict(result["found"])  # type: ignore[call-overload]
    values = {v["name"]: v for v in found["values"]}
    changed = [n for n, v in values.items() if not v["equal"]]
    wrong = []
    if changed != [CHANGED]:
        wrong.append(f"changed tensors {changed}, expected [{CHANGED!r}]")
    for key, want in truth.items():
        got = values[CHANGED][key]
        if got is None or abs(got - want) > 1e-6 * want:
            wrong.append(f"{key} {got}, expected {want}")
    if values["norm.weight"]["nan"] != [1, 1] or not values["norm.weight"]["equal"]:
        wrong.append(f"norm.weight {values['norm.weight']}, expected one NaN on each side and equal")
    if found["added"] or found["removed"] or len(found["renamed"]) != 10 or len(values) != 15:
        wrong.append(f"added {found['added']}, removed {found['removed']}, {len(found['renamed'])} renamed, {len(values)} compared of 15")
    ratio, peak = min(read) / min(run), int(str(result["peak"]))
    print(f"two drafts, {size / 1e6:,.0f} MB together, 15 tensors, one changed ({values[CHANGED]['elements']:,} elements)")
    print(f"answer          {'right' if not wrong else 'WRONG: ' + '; '.join(wrong)}")
    print(f"torch reads     {min(read):.3f} s  {size / min(read) / 1e9:.2f} GB/s")
    print(f"diff --values   {min(run):.3f} s  {size / min(run) / 1e9:.2f} GB/s, ratio {ratio:.2f} (at least 0.70)")
    print(f"peak memory     {peak / 2**20:,.0f} MiB (below 1,024)")
    print(f"all statistics  {stats:.3f} s for one draft, {size / 2 / stats / 1e9:.2f} GB/s")
    return int(bool(wrong) or ratio < 0.7 or peak >= 2**30)


if __name__ == "__main__":
    sys.exit(main())
