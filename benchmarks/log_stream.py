"""How fast a log is read, against ``grep -c accept`` on the same file, and in how much memory.

Two logs are written: one in which 2 % of the lines are decode lines, one in which all are. Each is read by the command ``eagle3diag log``
and counted by grep, a few times in turn, process start included; the ratio of the medians is what counts. Required: half the rate of grep
on the first, a twentieth on the second, and memory that does not grow with the file.

    python benchmarks/log_stream.py [--mb 1000] [--engine sglang|vllm] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

#: once, not timed: how many lines were read, in how much memory
READ = """
import resource, sys
from eagle3diag.serving.logs import open_log
print(open_log(sys.argv[1]).windows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def line(r: random.Random, i: int, engine: str) -> str:
    """One decode line of an engine."""
    clock = f"{i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}"
    if engine == "vllm":
        accepted, drafts = r.randint(200, 400), 300
        rates = ", ".join(f"{accepted / drafts * share:.3f}" for share in (0.5, 0.3, 0.2))
        return (
            f"(APIServer pid=4117) INFO 07-20 {clock} [metrics.py:101] SpecDecoding metrics: Mean acceptance length: "
            f"{1 + accepted / drafts:.2f}, Accepted throughput: {accepted / 10:.2f} tokens/s, Drafted throughput: 90.00 tokens/s, "
            "Accepted: "
            f"{accepted} tokens, Drafted: {3 * drafts} tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate: "
            f"{accepted / drafts / 3 * 100:.1f}%\n"
        )
    length = r.uniform(1.5, 2.5)
    return (
        f"[2026-02-11 {clock} TP0] Decode batch, #running-req: {r.randint(1, 8)}, #token: {r.randint(500, 20000)}, token usage: 0.01, "
        f"accept len: {length:.2f}, accept rate: {(length - 1) / 3:.2f}, cuda graph: True, gen throughput (token/s): "
        f"{r.uniform(100, 300):.2f}, "
        "#queue-req: 0\n"
    )


def other(r: random.Random, i: int) -> str:
    """One line of something else."""
    return (
        f'[2026-02-11 {i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d}] INFO:     127.0.0.1:{r.randint(30000, 60000)} - "POST '
        f'/v1/chat/completions HTTP/1.1" 200 OK request {r.getrandbits(64):016x} finished\n'
    )


def write(path: Path, mb: int, share: float, engine: str) -> None:
    """A log of ``mb`` megabytes in which ``share`` of the lines match."""
    r = random.Random(1)
    part = "".join(line(r, i, engine) if r.random() < share else other(r, i) for i in range(50_000)).encode()
    with path.open("wb") as f:
        for _ in range(-(-mb * 1_000_000 // len(part))):
            f.write(part)


def measure(path: Path, rounds: int) -> dict[str, float]:
    """Seconds of each, by turns, and the peak memory."""
    ours, grep, counted = [], [], 0
    for _ in range(rounds):
        start = time.perf_counter()
        counted = int(subprocess.run(["grep", "-c", "accept", str(path)], capture_output=True, text=True, check=True).stdout)
        grep.append(time.perf_counter() - start)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "eagle3diag", "log", str(path), "--format", "json"], capture_output=True, check=True)
        ours.append(time.perf_counter() - start)
    out = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True).stdout.split()
    windows, peak = int(out[0]), int(out[1])
    if windows != counted:
        raise SystemExit(f"{windows:,} windows read, grep counts {counted:,} lines")
    size = path.stat().st_size / 1e6
    return {
        "mb": round(size),
        "lines": counted,
        "mb_per_s": round(size / median(ours), 1),
        "grep_mb_per_s": round(size / median(grep), 1),
        "ratio": round(median(grep) / median(ours), 3),
        "peak_mib": round(peak / 1024),
    }


def main() -> int:
    """Write, measure, compare."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--mb", type=int, default=1000)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    ap.add_argument("--json", action="store_true")
    a = ap.parse_args()
    out = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, share, least in (("2 % matching", 0.02, 0.5), ("all matching", 1.0, 0.05)):
            path = Path(folder) / "server.log"
            write(path, a.mb, share, a.engine)
            out[name] = {**measure(path, a.rounds), "required": least}
            path.unlink()
    if a.json:
        print(json.dumps(out, indent=2))
    for name, m in out.items() if not a.json else ():
        verdict = "ok" if m["ratio"] >= m["required"] else "TOO SLOW"
        print(
            f"{name}: {m['mb']} MB, {m['lines']:,} lines: {m['mb_per_s']} MB/s, grep {m['grep_mb_per_s']} MB/s, ratio {m['ratio']} "
            f"(at least {m['required']}): {verdict}; peak memory {m['peak_mib']} MiB"
        )
    return int(any(m["ratio"] < m["required"] for m in out.values()))


if __name__ == "__main__":
    raise SystemExit(main())
