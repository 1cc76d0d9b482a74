"""The Qwen3 family (dense): Llama's decoder with a norm of each query and key head before rope.

head_dim is the config's own (128 when unstated) and not hidden_size / heads. Sliding windows are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from engine.config import ModelConfig
from engine.models.base import Family
from engine.models.decoder import Decoder, Layer, decoder_config, decoder_params
from engine.models.parse import refuse
from engine.ops import Ops

HEAD_DIM = 128


class Qwen3(Decoder):
    """Normalises q and k over head_dim."""

    def queries_keys(self, layer: Layer, q: torch.Tensor, k: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.config.rms_norm_eps
        return ops.rms_norm(q, layer.q_norm, eps), ops.rms_norm(k, layer.k_norm, eps)


def parse(config: Mapping) -> ModelConfig:
    """config.json → ModelConfig."""
    kinds = config.get("layer_types")
    if config.get("use_sliding_window") or any(kind != "full_attention" for kind in (kinds if isinstance(kinds, list) else ())):
        raise refuse("sliding-window layers (use_sliding_window)")
    return decoder_config("qwen3", {**config, "mlp_bias": False}, head_dim=HEAD_DIM)


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    parse=parse,
    params=partial(decoder_params, qk_norm=True),
    build=Qwen3,
    gguf="qwen3",
)
