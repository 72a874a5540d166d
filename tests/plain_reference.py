"""The draft's forward written a second time, row by row and key by key, for the plain draft to be held against.

Nothing is shared with the library: numpy in float64, an explicit list of visible keys per row, one head at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[np.float64]]


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turn(x: Array, position: int, theta: float, dim: int, interleaved: bool) -> Array:
    """Rotate one head's first ``dim`` numbers, pair by pair."""
    out = x.copy()
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = position * theta ** (-2 * i / dim)
        out[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        out[b] = x[b] * np.cos(angle) + x[a] * np.sin(angle)
    return out


class Reference:
    """``tensors`` under canonical names; ``wiring`` as keyword arguments of the library's Wiring."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], table: torch.Tensor, **o: Any) -> None:
        self.t = {k: v.double().numpy() for k, v in tensors.items() if k not in ("d2t", "t2d")}
        self.embedding = table.double().numpy()
        self.o = {"heads": 4, "kv": 2, "head_dim": 16, "rotary": 16, "theta": 100000.0, "eps": 1e-5, "layers": 1, "mla": None, **o}

    def w(self, name: str) -> Array:
        return self.t[name]

    def lin(self, x: Array, name: str) -> Array:
        y = self.t[f"{name}.weight"] @ x
        return y + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else y

    def fuse(self, states: Array) -> Array:
        """states [slots, width] of one token."""
        o, eps = self.o, self.o["eps"]
        flat = states.reshape(-1)
        if o.get("fc", "applied") != "applied":
            return states[-1]
        if o.get("norm_before_fc"):
            flat = rms(flat, self.w("input_norm.weight"), eps)
        if o.get("fc_norm"):
            flat = np.concatenate([rms(c, self.w(f"fc_norm.{i}.weight"), eps) for i, c in enumerate(flat.reshape(len(states), -1))])
        return self.lin(flat, "fc")

    def qkv(self, x: Array, at: str, position: int) -> tuple[list[Array], list[Array], list[Array]]:
        """Queries, keys and values of one row, a list of heads each."""
        o, eps = self.o, self.o["eps"]
        theta = o["theta"]
        if o["mla"] is not None:
            nope, rope, value, lora = o["mla"]
            q = self.lin(rms(self.lin(x, f"{at}q_a_proj"), self.w(f"{at}q_a_layernorm.weight"), eps), f"{at}q_b_proj")
            packed = self.lin(x, f"{at}kv_a_proj_with_mqa")
            kv = self.lin(rms(packed[:lora], self.w(f"{at}kv_a_layernorm.weight"), eps), f"{at}kv_b_proj")
            shared = turn(packed[lora:], position, theta, rope, True)
            qs = [np.concatenate((h[:nope], turn(h[nope:], position, theta, rope, True))) for h in q.reshape(o["heads"], -1)]
            parts = kv.reshape(o["heads"], nope + value)
            return qs, [np.concatenate((p[:nope], shared)) for p in parts], [p[nope:] for p in parts]
        out = []
        for name, heads in (("q", o["heads"]), ("k", o["kv"]), ("v", o["kv"])):
            rows = list(self.lin(x, f"{at}{name}_proj").reshape(heads, o["head_dim"]))
            if name != "v":
                norm = self.t.get(f"{at}{name}_norm.weight")
                rows = [rms(r, norm, eps) if norm is not None else r for r in rows]
                rows = [turn(r, position, theta, o["rotary"], False) for r in rows]
            out.append(rows)
        for n in (1, 2):
            out[n] = [h for h in out[n] for _ in range(o["heads"] // o["kv"])]
        return out[0], out[1], out[2]

    def run(self, states: Array, tokens: list[list[int]]) -> list[Array]:
        """Logits of each step: states [rows, slots, width]; ``tokens[step][row]``."""
        o, eps = self.o, self.o["eps"]
        n, window = len(states), o.get("sliding_window")
        h = [self.fuse(s) for s in states]
        memory: list[list[list[Any]]] = []  # [step][layer][row] -> (keys, values)
        logits = []
        for step, ids in enumerate(tokens):
            memory.append([[] for _ in range(o["layers"])])
            z = list(h)
            for i in range(o["layers"]):
                at = f"layers.{i}."
                queries, residuals = [], []
                for r in range(n):
                    if i == 0:
                        e = rms(self.embedding[ids[r]], self.w(f"{at}input_layernorm.weight"), eps)
                        u = rms(z[r], self.w(f"{at}input_layernorm.weight"), eps) if o.get("double_norm") else z[r]
                        u = rms(u, self.w(f"{at}hidden_norm.weight"), eps)
                        residuals.append(u if o.get("norm_before_residual") else z[r])
                        x = np.concatenate((u, e) if o.get("concat") == "hidden-first" else (e, u))
                    else:
                        residuals.append(z[r])
                        x = rms(z[r], self.w(f"{at}{o.get('deep_layer_norm', 'input_layernorm')}.weight"), eps)
                    position = r + 1 + step + (o.get("position_gap", 0) if step else 0)
                    q, k, v = self.qkv(x, f"{at}self_attn.", position)
                    queries.append(q)
                    memory[step][i].append((k, v))
                for r in range(n):
                    seen = [memory[0][i][j] for j in range(r + 1) if window is None or r - j < window]
                    seen += [memory[s][i][r] for s in range(1, step + 1)]
                    heads = []
                    for head, q in enumerate(queries[r]):
                        scores = np.array([q @ k[head] for k, _ in seen]) / np.sqrt(len(q))
                        p = np.exp(scores - scores.max())
                        heads.append(sum(a * v[head] for a, (_, v) in zip(p / p.sum(), seen, strict=True)))
                    z[r] = residuals[r] + self.lin(np.concatenate(heads), f"{at}self_attn.o_proj")
                    m = rms(z[r], self.w(f"{at}post_attention_layernorm.weight"), eps)
                    gate = self.lin(m, f"{at}mlp.gate_proj")
                    z[r] = z[r] + self.lin(gate / (1 + np.exp(-gate)) * self.lin(m, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")
            normed = [rms(x, self.w("norm.weight"), eps) for x in z]
            logits.append(np.stack([self.lin(a if o.get("final_norm", True) else b, "lm_head") for a, b in zip(normed, z, strict=True)]))
            h = normed if o.get("norm_output") else z
        return logits
