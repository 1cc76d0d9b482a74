"""Heads for tests: random ones, and ones whose right answer is known."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.speculative.base import FINAL, Target
from engine.speculative.heads import save_head, shape_of


def card(target: Target, method: str, **more) -> dict:
    return {"method": method, "target": shape_of(target), "vocabulary": target.vocabulary, **more}


def layer_tensors(target: Target, make) -> dict[str, torch.Tensor]:
    c = target.config
    qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return {
        "layer.input_norm": torch.ones(c.hidden_size), "layer.post_norm": torch.ones(c.hidden_size),
        "layer.qkv": make(qkv, c.hidden_size), "layer.o": make(c.hidden_size, c.num_heads * c.head_dim),
        "layer.gate_up": make(2 * c.intermediate_size, c.hidden_size), "layer.down": make(c.hidden_size, c.intermediate_size),
    }  # fmt: skip


def random_head(target: Target, method: str, folder: Path, **more) -> str:
    """A head of a method with random weights: drafts of no worth, which must change nothing."""
    g, hidden = torch.Generator().manual_seed(1), target.config.hidden_size

    def make(*shape):
        return torch.randn(*shape, generator=g) * 0.3

    if method == "medusa":
        heads = more.setdefault("heads", 3)
        more = {"blocks": 1, "accuracies": [[0.4, 0.2, 0.1, 0.05]] * heads, **more}
        tensors = {f"{h}.0.weight": make(hidden, hidden) for h in range(heads)} | {f"{h}.0.bias": make(hidden) for h in range(heads)}
        if more.get("sees_token"):
            tensors |= {f"{h}.token": make(hidden, hidden) for h in range(heads)}
    else:
        tensors = {"fc": make(hidden, 2 * hidden), "norm": torch.ones(hidden), **layer_tensors(target, make)}
        if method == "mtp" or len(more.get("taps", ())) == 3:
            tensors |= {"token_norm": torch.ones(hidden), "feature_norm": torch.ones(hidden)}
        if len(more.get("taps", ())) == 3:
            tensors["fuse"] = make(hidden, 3 * hidden)
        if method == "eagle":
            more.setdefault("taps", [FINAL])
    path = folder / f"{method}-{len(list(folder.iterdir()))}.safetensors"
    save_head(path, card(target, method, **more), tensors)
    return str(path)


def perfect_head(target: Target, method: str, folder: Path) -> str:
    """For a target of one layer: the target's own layer after its own embedding; features are multiplied with zero.

    Weights are stored in bfloat16, so the target's are rounded to it first (small_one_layer)."""
    layer, hidden = target.model.layers[0], target.config.hidden_size
    zero, eye = torch.zeros(hidden, hidden), torch.eye(hidden)
    tensors = {
        "fc": torch.cat([eye, zero] if method == "eagle" else [zero, eye], 1), "norm": target.model.norm,
        "layer.input_norm": layer.input_norm, "layer.post_norm": layer.post_norm, "layer.qkv": layer.qkv, "layer.o": layer.o,
        "layer.gate_up": layer.gate_up, "layer.down": layer.down,
    }  # fmt: skip
    more = {"taps": [FINAL]} if method == "eagle" else {}
    if method == "mtp":
        tensors |= {"token_norm": torch.ones(hidden), "feature_norm": torch.ones(hidden)}
    path = folder / f"perfect-{method}.safetensors"
    save_head(path, card(target, method, **more), {k: v.clone() for k, v in tensors.items()})
    return str(path)
