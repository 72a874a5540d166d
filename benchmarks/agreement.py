"""The plain draft's forward beside that of the library the sample's draft was trained with: same rows, same steps, same threads.

Prints seconds and the ratio, and how far the logits are apart. Exits with 1 where ours is slower or the logits differ, and with 2 where
speculators is not installed (``pip install -e '.[parity]'``, then ``pip install --no-deps speculators==0.9.0``). Its eager attention is
used, the quicker of its two on a CPU. The two alternate; the best of several rounds counts.

Run: ``python benchmarks/agreement.py [--rounds 7] [--threads 1] [--steps 4] [--rows 0]``
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "data_samples" / "smollm2-eagle3"
LAYERS = (2, 15, 27)


def theirs(folder: Path, tables: Any, threads: int) -> Any:
    """speculators' model of the sample's draft, float32, eager attention."""
    import torch
    from safetensors.torch import load_file
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    flat = json.loads((SAMPLE / "draft" / "config.json").read_text(encoding="utf-8"))
    layer = {k: v for k, v in flat.items() if k not in ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    method = {"proposal_type": "greedy", "speculative_tokens": 3}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": flat["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer | {"pad_token_id": None},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = Eagle3SpeculatorConfig.from_pretrained(folder)
    read.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(read).float().eval()
    model.load_state_dict(load_file(SAMPLE / "draft" / "model.safetensors"), strict=False)
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
        model.embed_tokens.weight[tables.token_ids] = tables.embedding.float()
    torch.set_num_threads(threads)
    return model


def best(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Least seconds of each call, taken in turns."""
    found = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            found[i] = min(found[i], time.perf_counter() - start)
    return found


def main() -> int:
    """Exit status: 0 where ours is not slower and says the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=0, help="rows of one text; 0 for the sample's own 191, more repeats it")
    options = parser.parse_args()
    if importlib.util.find_spec("speculators") is None:
        print("speculators is not installed: pip install -e '.[parity]', then pip install --no-deps speculators==0.9.0", file=sys.stderr)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch
    from safetensors.torch import load_file

    from eagle3diag.checkpoint.open import open_checkpoint
    from eagle3diag.checkpoint.spec import draft_spec
    from eagle3diag.checkpoint.target import open_target
    from eagle3diag.draft.model import PlainDraft
    from eagle3diag.draft.rows import make_rows
    from eagle3diag.draft.tables import load_tables
    from eagle3diag.draft.weights import DraftWeights
    from eagle3diag.hidden.model import Sample, Slot

    t = load_file(SAMPLE / "dumps" / "sample_0.safetensors")
    again = 1 if options.rows <= 0 else -(-(options.rows + 1) // len(t["input_ids"]))
    length = len(t["input_ids"]) if options.rows <= 0 else options.rows + 1
    slots = tuple(Slot(i, k, "aux", f"hidden_states.{k}") for i, k in enumerate(LAYERS))
    sample = Sample(
        name="sample_0",
        token_ids=t["input_ids"].repeat(again)[:length],
        states={s.position: t[s.name].repeat(again, 1)[:length] for s in slots},
        loss_mask=t["loss_mask"].repeat(again)[:length],
    )
    draft = open_checkpoint(SAMPLE / "draft")
    spec = draft_spec(draft)
    tables = load_tables(open_target(SAMPLE / "target"), draft, spec)
    rows = make_rows(sample, slots, spec.wiring)
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        model = theirs(Path(name), tables, options.threads)
    plain = PlainDraft(DraftWeights.load(draft, spec), spec, spec.wiring, tables)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0]))
    states, ids, documents = rows.states.float().flatten(1)[None], rows.tokens(0)[None], torch.zeros(1, len(rows), dtype=torch.long)
    keep = rows.counted(options.steps)

    @torch.no_grad()
    def run_theirs() -> object:
        logits.clear()
        return model(
            hidden_states=states, input_ids=ids, document_ids=documents, position_ids=rows.positions[None], ttt_steps=options.steps
        )

    own = plain.run(rows, options.steps)
    run_theirs()
    apart = 0.0
    for step, (a, b) in enumerate(zip(own, logits, strict=True)):
        valid = len(rows) - step
        apart = max(apart, float((a.logits[:valid] - b[:valid]).abs().max() / b[:valid].abs().max()))
    seconds = best(
        options.rounds,
        run_theirs,
        lambda: plain.run(rows, options.steps),
        lambda: plain.run(rows, options.steps, where=keep),
    )
    ratio = seconds[0] / seconds[1]
    print(f"{len(rows)} rows, {options.steps} steps, {options.threads} thread(s), float32, best of {options.rounds}")
    print(f"logits          {apart:.1e} apart, relative (below 1e-4)")
    print(f"speculators     {seconds[0]:.3f} s")
    print(f"plain draft     {seconds[1]:.3f} s, ratio {ratio:.2f} (at least 1.00)")
    print(f"  counted rows  {seconds[2]:.3f} s, ratio {seconds[0] / seconds[2]:.2f}: the {int(keep.sum())} rows that agreement looks at")
    return int(ratio < 1.0 or apart >= 1e-4)


if __name__ == "__main__":
    sys.exit(main())
