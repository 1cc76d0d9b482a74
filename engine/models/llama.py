"""The Llama family: Llama 2 and 3, SmolLM2, TinyLlama and what else says LlamaForCausalLM.

Grouped-query attention, SwiGLU, RMSNorm, rotary embeddings (plain, linear, dynamic, llama3, yarn), optional biases,
tied or untied embeddings, head_dim stated or hidden_size / heads.
"""

from __future__ import annotations

from engine.models.base import Family
from engine.models.decoder import Decoder, decoder_config, decoder_params

FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    parse=lambda config: decoder_config("llama", config),
    params=decoder_params,
    build=Decoder,
    gguf="llama",
    gguf_interleaved=True,
)
