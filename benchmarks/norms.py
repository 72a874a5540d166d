"""Norm profile against reading and copying the same dump once: `python benchmarks/norms.py [--gb 1] [--workers 2]`.

Builds a dump of float16 states in a temporary folder, as vLLM's connector writes them, [tokens, 4, 4096]. The baseline reads every file
into fresh memory and copies it once; the profile gives L2, mean and largest value of every row. Both run in one thread of a process of
their own, alternately; the best of three counts. Peak memory is what the kernel says (VmHWM). Exit status 1 where the rate is below 0.4
of the baseline or the peak above 1 GiB. ``--full`` and ``--workers`` are timed beside it, without a budget.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS, SLOTS, HIDDEN = 1024, 4, 4096
FLOOR, LIMIT = 0.4, 1 << 30


def build(folder: Path, gb: float) -> int:
    """Writes the dump; returns its bytes of states."""
    import torch
    from safetensors.torch import save_file

    one = ROWS * SLOTS * HIDDEN * 2
    files = max(2, round(gb * 1e9 / one))
    base = torch.randn(ROWS, SLOTS, HIDDEN).half()
    for i in range(files):
        states = base * (1.0 + i % 7 / 8)
        save_file({"hidden_states": states, "token_ids": torch.arange(ROWS)}, folder / f"hs_{i}.safetensors")
    return files * one


def peak() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def baseline(folder: Path) -> None:
    """Read every file into memory and copy it once."""
    import torch

    for path in sorted(folder.glob("*.safetensors")):
        raw = torch.empty(path.stat().st_size, dtype=torch.uint8)
        with path.open("rb", buffering=0) as f:
            view, at = memoryview(raw.numpy()), 0
            while at < len(view):
                at += f.readinto(view[at:]) or 0
        raw.clone()


def child(what: str, folder: Path, workers: int) -> None:
    """One measurement in a process of its own; prints seconds and peak memory."""
    import torch

    from eagle3diag.hidden.dumps import open_dump
    from eagle3diag.hidden.norms import profile

    torch.set_num_threads(1)
    if what == "read":
        start = time.perf_counter()
        baseline(folder)
    else:
        dump = open_dump(folder)
        start = time.perf_counter()
        if what == "pool":
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import get_context

            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                profile(dump, executor=pool)
        else:
            profile(dump, full=what == "full")
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak()}))


def measured(what: str, folder: Path, workers: int) -> dict[str, float]:
    """``child`` in a fresh interpreter."""
    command = [sys.executable, __file__, "--child", what, "--folder", str(folder), "--workers", str(workers)]
    out: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    return out


def main() -> int:
    """Build, measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the dump in GB (default 1; the budget is stated for 4)")
    parser.add_argument("--workers", type=int, default=2, help="processes of the pool that is timed beside it")
    parser.add_argument("--full", action="store_true", help="time channel statistics and kurtosis too")
    parser.add_argument("--child", choices=("read", "norms", "full", "pool"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if a.child:
        child(a.child, a.folder, a.workers)
        return 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        size = build(folder, a.gb)
        runs = {what: [] for what in ("read", "norms")}
        for _ in range(3):
            for what, found in runs.items():
                found.append(measured(what, folder, a.workers))
        best = {what: min(r["seconds"] for r in found) for what, found in runs.items()}
        top = max(r["peak"] for r in runs["norms"])
        ratio = best["read"] / best["norms"]
        for what, seconds in best.items():
            print(f"{what:6} {size / 1e9:.2f} GB in {seconds:.2f} s: {size / 1e9 / seconds:.2f} GB/s")
        print(f"norms: {ratio:.2f} of the rate of reading and copying (at least {FLOOR}), peak {top / 2**20:.0f} MiB (below 1024)")
        for what in ("pool", *(("full",) if a.full else ())):
            seconds = measured(what, folder, a.workers)["seconds"]
            print(
                f"{what:6} {size / 1e9 / seconds:.2f} GB/s, no budget"
                + (f", {a.workers} processes with their start" if what == "pool" else "")
            )
    return int(ratio < FLOOR or top >= LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
