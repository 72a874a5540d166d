"""Run an engine's loader on names and shapes alone: which tensor lands where, what stays unfilled, what is refused.

The loop follows the engines' own ``load_weights``: names are visited in sorted order, renamed, matched against the vocabulary mapping,
the names skipped on purpose and the stacked projections, then looked up among the parameters. How each step goes is asked of the contract
(behaviours ``rename``, ``name_prefix``, ``d2t_names``, ``skip``, ``skip_without_flag``, ``unknown…``). After the first loud failure the
engine would have stopped; the loop goes on to say what became of the rest, and keeps the first failure. Held against recorded runs of the
real loaders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eagle3diag.checkpoint.model import TensorInfo
from eagle3diag.engines.model import Contract, Refusal, TensorFate
from eagle3diag.engines.parameters import Parameter
from eagle3diag.errors import escaped

__all__ = ["Loaded", "load"]

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_MLA = ("q_a_proj", "kv_a_proj_with_mqa")
MAPPING = "d2t"


@dataclass(slots=True)
class Loaded:
    """What one loading pass did.

    ``fates`` by the name in the file; ``filled`` canonical name -> file name that filled it last; ``failures`` in the order they were met.
    """

    fates: dict[str, TensorFate] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)
    failures: list[Refusal] = field(default_factory=list)

    def fill(self, canonical: str, name: str, fate: TensorFate) -> None:
        """Note that ``name`` filled ``canonical``; a tensor it overwrites reached nothing."""
        before = self.filled.get(canonical)
        if before is not None and before != name:
            self.fates[before] = TensorFate("dropped", "", f"overwritten by {name}")
        self.filled[canonical] = name
        self.fates[name] = fate

    def fail(self, refusal: Refusal) -> None:
        """Note a loud failure."""
        self.failures.append(refusal)


def _rename(name: str, rules: list[list[str]], many: bool = False) -> str:
    for how, old, new in rules:
        if how == "substring":
            name = name.replace(old, new)
        elif how == "layers":  # one layer bears no number, several do
            first = old if many else f"{old}0."
            name = new + name.removeprefix(first) if name.startswith(first) else name
        elif name.startswith(old):
            name = new + name[len(old) :]
    return name


def _matches(name: str, how: str, text: str) -> bool:
    return text in name if how == "substring" else name == text or (how != "exact" and name.endswith("." + text))


def _stacked(name: str, draft_class: str, engine: str) -> tuple[str, str] | None:
    """(projection, name of the fused parameter) where the loader's stacked map takes the name."""
    pairs = [(p, "gate_up_proj") for p in _GATE_UP]
    if draft_class == "mla":
        pairs += [(p, "fused_qkv_a_proj_with_mqa" if engine == "sglang" else "fused_qkv_a_proj") for p in _MLA]
    else:
        pairs = [(p, "qkv_proj") for p in _QKV] + pairs
    for projection, fused in pairs:
        if "." + projection in name:
            return projection, name.replace("." + projection, "." + fused)
    return None


def _size(shape: tuple[int | None, ...]) -> str:
    return "torch.Size([" + ", ".join("?" if d is None else str(d) for d in shape) + "])"


def _fit(param: Parameter, slot_rows: int | None, got: tuple[int, ...], whole: bool) -> str:
    """``ok``, ``cut`` (surplus silently left out) or ``refuse`` for a tensor of shape ``got``."""
    want = (param.shape[0] if whole else slot_rows, *param.shape[1:])
    if len(got) != len(want):
        return "refuse"
    differ = [i for i, (g, w) in enumerate(zip(got, want, strict=True)) if w is not None and g != w]
    if not differ:
        return "ok"
    cut_at = {"column": 0, "row": 1}.get(param.how)
    expected = want[cut_at] if cut_at is not None else None
    if cut_at is not None and differ == [cut_at] and expected is not None and got[cut_at] > expected:
        return "cut"
    return "refuse"


def _mismatch(engine: str, param: Parameter, name: str, info: TensorInfo, rows: int | None) -> Refusal:
    got = _size(info.shape)
    want = _size((rows, *param.shape[1:]))
    if param.how == "vocab":
        text = (
            f"AssertionError: self.org_vocab_size={param.shape[0]} self.use_presharded_weights=False "
            f"loaded_weight.shape[output_dim]={info.shape[0] if info.shape else 0}"
            if engine == "sglang"
            else "AssertionError"
        )
    elif engine == "vllm" and param.name == "model.fc.weight":
        text = f"AssertionError: Tried to load weights of size {got} to a parameter of size {want}"
    elif param.how == "exact":
        text = f"AssertionError: Attempted to load weight ({got}) into parameter ({want})"
    else:
        text = f"AssertionError: param_data.shape={want} loaded_weight.shape={got}"
    return Refusal(
        "load_weights",
        text,
        f"{name} is {list(info.shape)}, {param.name} needs {['?' if d is None else d for d in (rows, *param.shape[1:])]}",
        "mismatch",
    )


class _Loader:
    """One pass over the names; state lives here so that each step stays small."""

    def __init__(self, params: Mapping[str, Parameter], contract: Contract, *, tied: bool, flags: Mapping[str, bool]) -> None:
        self.params = params
        self.contract = contract
        self.tied = tied
        self.many = any(p.startswith("model.midlayer.0.") for p in params)
        self.off = [text for text, flag in contract["skip_without_flag"] if not flags.get(flag, False)]
        self.out = Loaded()

    def visit(self, name: str, info: TensorInfo) -> None:
        c = self.contract
        renamed = _rename(name, c["rename"], self.many) if c["d2t_names"] != "replace" else name
        how = c["d2t_names"]
        if any(_matches(renamed, kind, text) for kind, text in c["skip"]) and not (how == "substring" and MAPPING in renamed):
            self.out.fates[name] = TensorFate("skipped", "", "skipped on purpose")
        elif how not in ("replace", "parameter") and _matches(renamed, how, MAPPING):
            self.out.fill(MAPPING, name, TensorFate("loaded", "hot_token_id" if c.engine == "sglang" else MAPPING))
        elif how == "replace":
            self._vllm(name, info)
        else:
            self._sglang(name, renamed, info)

    # ---- SGLang and others: one flat look-up with a prefix rule
    def _sglang(self, name: str, renamed: str, info: TensorInfo) -> None:
        rule = self.contract["name_prefix"]
        if rule == "always-model":
            if self.tied and "lm_head.weight" in renamed:
                self.out.fates[name] = TensorFate("dropped", "", "tie_word_embeddings: the embedding takes the head's place")
                return
            candidates = [renamed if "lm_head" in renamed else "model." + renamed]
        elif rule == "name-then-model":
            candidates = [renamed, "model." + renamed]
        else:
            candidates = [renamed if renamed.startswith("lm_head.") else "model." + renamed]
        for full in candidates:
            if self._place(name, full, info):
                return
        self._unknown(name, candidates[-1])

    # ---- vLLM: "model." unless lm_head, then the module tree
    def _vllm(self, name: str, info: TensorInfo) -> None:
        full = name
        if MAPPING in name:
            full = name.replace(MAPPING, "draft_id_to_target_id")
        elif "lm_head" not in name:
            full = "model." + name
        if any(text in full for text in self.off):
            self.out.fates[name] = TensorFate("dropped", "", "its flag is off in the config")
            return
        if full.startswith("model."):
            full = "model." + _rename(full[len("model.") :], self.contract["rename"])
        if not self._place(name, full, info):
            self._unknown(name, full)

    def _place(self, name: str, full: str, info: TensorInfo) -> bool:
        projection = ""
        param = self.params.get(full)
        stacked = _stacked(full, self.contract.draft_class, self.contract.engine)
        if stacked is not None:
            projection, fused = stacked
            param = self.params.get(fused)
        if param is None:
            return False
        if projection and projection not in param.slots:
            return False
        whole = not projection
        rows = param.shape[0] if whole else param.slots[projection].rows
        fit = _fit(param, rows, info.shape, whole)
        if fit == "cut" and self.contract["mismatch"] == "refuse-any":
            fit = "refuse"
        if fit == "refuse" and not (param.name == "draft_id_to_target_id" and self.contract["d2t_length"] == "unchecked"):
            self.out.fail(_mismatch(self.contract.engine, param, name, info, rows))
            self.out.fates[name] = TensorFate("dropped", "", "shape refused")
            return True
        fate = (
            TensorFate("truncated", param.name, f"shape {list(info.shape)} cut to {[rows, *param.shape[1:]]} without a word")
            if fit == "cut"
            else TensorFate("loaded", param.name)
        )
        for slot in param.slots.values() if whole else (param.slots[projection],):
            self.out.fill(slot.canonical, name, fate)
        return True

    def _unknown(self, name: str, full: str) -> None:
        c = self.contract
        if full.endswith(".bias") and c["unknown_bias"] == "drop":
            self.out.fates[name] = TensorFate("dropped", "", "no such bias in this class; dropped without a word")
            return
        stacked = _stacked(full, c.draft_class, c.engine)
        how = c["unknown_stacked" if stacked else "unknown"]
        if c.engine == "vllm" and not full.startswith("model."):
            how = "ValueError"  # outside LlamaModel the module tree is walked in every version
        if how in ("silent", "warn"):
            self.out.fates[name] = TensorFate(
                "dropped", "", "no parameter of that name; " + ("a warning in the log" if how == "warn" else "dropped without a word")
            )
            return
        shown = stacked[1] if stacked and how == "KeyError" else full
        if how == "KeyError":
            text = f"KeyError: '{shown.removeprefix('model.') if c.engine == 'vllm' else shown}'"
        else:
            text = f"ValueError: There is no module or parameter named '{self._first_missing(full)}'"
            text = text if c.engine != "llama.cpp" else f"ValueError: Can not map tensor '{name}'"
        self.out.fates[name] = TensorFate("dropped", "", "refused: no parameter of that name")
        self.out.fail(Refusal("load_weights", text, f"{escaped(name, 120)} has no place in this version's draft class", "unknown"))

    def _first_missing(self, full: str) -> str:
        parts = full.split(".")
        for n in range(1, len(parts) + 1):
            at = ".".join(parts[:n])
            if not any(p == at or p.startswith(at + ".") for p in self.params):
                return at.removeprefix("model.") if at != "model" else at
        return full.removeprefix("model.")


def load(
    tensors: Mapping[str, TensorInfo], params: Mapping[str, Parameter], contract: Contract, *, tied: bool, flags: Mapping[str, bool]
) -> Loaded:
    """Fates of all tensors under this contract.

    Args:
        tensors: by file name, shapes from headers.
        params: what the engine built (``build_parameters``).
        tied: the config says ``tie_word_embeddings`` and this engine heeds it.
        flags: effective values of the flags named in ``skip_without_flag``.
    """
    loader = _Loader(params, contract, tied=tied, flags=flags)
    for name in sorted(tensors):
        loader.visit(name, tensors[name])
    return loader.out
