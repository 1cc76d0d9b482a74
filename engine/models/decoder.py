"""What Llama-like decoders share: their config, their checkpoint's tensors, and the forward pass.

    x = embedding[token_ids]
    each layer:  x += o(attend(rope(q), rope(k), v))      of rms_norm(x)
                 x += down(silu(gate) * up)               of rms_norm(x)
    hidden = rms_norm(x),  logits = hidden @ lm_head'

A family file names its options and overrides `queries_keys` where it does more between projection and rope;
the step itself is written once. q, k, v and gate, up are fused when the model is built: two matmuls less a layer.
Knows nothing of pages, requests or sampling. Rejected: nn.Module (a call costs more than a small layer's norm).

Probe points: "embedding" (layer 0), "attention.q" and ".k" as attention sees them (after norm and rope),
"attention.v", "attention.out" [t, heads, head_dim] before the output projection, "mlp.out" [t, hidden] before it is
added, "hidden" [t, hidden]: the residual stream after the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention.base import Attention, Projection, Rope
from engine.batch import Batch
from engine.config import ModelConfig
from engine.models.base import Param
from engine.models.parse import broken, real, refuse, token_ids, whole
from engine.models.rope import parse_rope, rope_tables
from engine.ops import Ops

HEAD_CHUNK = 8192  # vocabulary rows widened at a time where no matmul writes fp32 from half precision
FEW_ROWS = 16  # more are cuBLAS's


def decoder_config(family: str, config: Mapping, *, head_dim: int | None = None) -> ModelConfig:
    """The ModelConfig of a Llama-like decoder.

    Args:
        head_dim: the family's own default; None is hidden_size / heads.
    """
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise refuse(f"{str(method or 'some kind of')[:40]} quantised weights (quantization_config)")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise refuse(f"the activation {str(act)[:40]}")
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    kv_heads = whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise broken(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    if head_dim is None and config.get("head_dim") is None and hidden % heads:
        raise broken(f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})")
    dim = whole(config, "head_dim", head_dim or hidden // heads)
    if dim % 2:
        raise refuse(f"an odd head_dim ({dim})")
    length = whole(config, "max_position_embeddings", 2048)
    return ModelConfig(
        family=family,
        num_layers=whole(config, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=whole(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        vocab_size=whole(config, "vocab_size"),
        max_position_embeddings=length,
        rms_norm_eps=real(config, "rms_norm_eps", 1e-6),
        rope=parse_rope(config, dim, length),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        bos_token_id=whole(config, "bos_token_id", None, low=0),
    )


def decoder_params(config: ModelConfig, qk_norm: bool = False, output_bias: bool = True) -> tuple[Param, ...]:
    """Every checkpoint tensor. Splitting follows heads and columns: rows of q, k, v, gate, up; columns of o, down.

    Args:
        qk_norm: norms of each query and key head.
        output_bias: config.attention_bias means q, k, v and o together, as in Hugging Face's Llama; False: q, k and v
            alone, as in Qwen2 (whose config.json does not mention them: its parse would state attention_bias).
    """
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    qkv_bias, o_bias = config.attention_bias, config.attention_bias and output_bias
    params = [Param("model.embed_tokens.weight", (config.vocab_size, hidden), 0), Param("model.norm.weight", (hidden,))]
    if not config.tie_word_embeddings:
        params.append(Param("lm_head.weight", (config.vocab_size, hidden), 0))
    linears = (
        ("self_attn.q_proj", q, hidden, 0, qkv_bias), ("self_attn.k_proj", kv, hidden, 0, qkv_bias),
        ("self_attn.v_proj", kv, hidden, 0, qkv_bias), ("self_attn.o_proj", hidden, q, 1, o_bias),
        ("mlp.gate_proj", inner, hidden, 0, config.mlp_bias), ("mlp.up_proj", inner, hidden, 0, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, 1, config.mlp_bias),
    )
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        params += [Param(f"{at}{norm}.weight", (hidden,)) for norm in ("input_layernorm", "post_attention_layernorm")]
        if qk_norm:
            params += [Param(f"{at}self_attn.{norm}.weight", (dim,)) for norm in ("q_norm", "k_norm")]
        for name, rows, columns, axis, bias in linears:
            params.append(Param(f"{at}{name}.weight", (rows, columns), axis))
            if bias:
                params.append(Param(f"{at}{name}.bias", (rows,), 0 if axis == 0 else None))
    return tuple(params)


@dataclass(slots=True)
class Layer:
    """One layer's weights, fused. Biases are None where the model has none."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate, hidden], gate first
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


class Decoder:
    """A Llama-like decoder ready to run.

    Args:
        weights: by checkpoint name; emptied while the layers are fused, so that no weight is held twice.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.embedding = weights.pop("model.embed_tokens.weight")
        self.norm = weights.pop("model.norm.weight")
        if config.tie_word_embeddings:
            self.lm_head = self.embedding = matmul_layout([self.embedding])
        else:
            self.lm_head = matmul_layout([weights.pop("lm_head.weight")])
        self.layers = [_take_layer(weights, f"model.layers.{index}.") for index in range(config.num_layers)]
        self.cos, self.sin = rope_tables(config.rope, config.max_position_embeddings, self.embedding.device)

    def queries_keys(self, layer: Layer, q: torch.Tensor, k: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """What a family does to q and k [t, heads, head_dim] before rope. Nothing here."""
        return q, k

    def forward(self, batch: Batch, attention: Attention, ops: Ops, probe) -> torch.Tensor:
        """Hidden states [t, hidden] after the final norm."""
        if ops.fused and not probe.keeps:
            return self._few_rows(batch, attention, ops) if self._fits(batch) else self._many_rows(batch, attention, ops)
        config, eps, positions = self.config, self.config.rms_norm_eps, batch.positions
        heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        parts, rows, watched = (heads, kv, kv), len(batch.token_ids), probe.keeps
        x = ops.embedding(batch.token_ids, self.embedding)
        if watched:
            probe.keep("embedding", 0, x)
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(ops.rms_norm(x, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
            q, k, v = qkv.view(rows, heads + 2 * kv, dim).split(parts, 1)  # views [t, heads, head_dim]
            q, k = self.queries_keys(layer, q, k, ops)
            ops.rope(q, k, self.cos, self.sin, positions)
            attention.write(index, k, v, batch)
            out = attention.attend(index, q, batch)  # [t, heads, head_dim]
            if watched:
                _keep_attention(probe, index, q, k, v, out)
            x = x + ops.linear(out.reshape(rows, heads * dim), layer.o, layer.o_bias)
            gate_up = ops.linear(ops.rms_norm(x, layer.post_norm, eps), layer.gate_up, layer.gate_up_bias)
            y = ops.linear(ops.silu_mul(gate_up), layer.down, layer.down_bias)
            x = x + y
            if watched:
                probe.keep("mlp.out", index, y)
                probe.keep("hidden", index, x)
        return ops.rms_norm(x, self.norm, eps)

    def _fits(self, batch: Batch) -> bool:
        """Whether the decode kernels can run this batch: few rows, and nothing between projection and rope."""
        return len(batch.token_ids) <= FEW_ROWS and type(self).queries_keys is Decoder.queries_keys

    def _few_rows(self, batch: Batch, attention: Attention, ops: Ops) -> torch.Tensor:
        """Five kernels a layer, bound by reading the weights once; each lets the next begin to load its own (PDL)."""
        eps, rows = self.config.rms_norm_eps, len(batch.token_ids)
        x = ops.embedding(batch.token_ids, self.embedding)  # the residual stream, written in place
        rope, pdl = Rope(self.cos, self.sin), x.is_cuda
        for index, layer in enumerate(self.layers):
            q = attention.project_and_write(index, x, Projection(layer.input_norm, eps, layer.qkv, layer.qkv_bias), rope, batch)
            out = attention.attend(index, q, batch).view(rows, -1)
            ops.decode_linear(out, layer.o, x, layer.o_bias, pdl)
            y = ops.decode_gate_up(x, layer.post_norm, layer.gate_up, eps, layer.gate_up_bias, pdl)
            ops.decode_linear(y, layer.down, x, layer.down_bias, pdl)
        return ops.rms_norm(x, self.norm, eps)

    def _many_rows(self, batch: Batch, attention: Attention, ops: Ops) -> torch.Tensor:
        """cuBLAS's matmuls between fused memory-bound kernels."""
        config, eps, rows = self.config, self.config.rms_norm_eps, len(batch.token_ids)
        heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        x, rope = ops.embedding(batch.token_ids, self.embedding), Rope(self.cos, self.sin)
        y = ops.rms_norm(x, self.layers[0].input_norm, eps)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            q, k, v = ops.linear(y, layer.qkv, layer.qkv_bias).view(rows, heads + 2 * kv, dim).split((heads, kv, kv), 1)
            q, k = self.queries_keys(layer, q, k, ops)
            attention.rotate_and_write(index, q, k, v, rope, batch)
            out = attention.attend(index, q, batch)
            y = ops.linear(out.reshape(rows, heads * dim), layer.o, layer.o_bias)
            y, x = ops.add_rms_norm(y, x, layer.post_norm, eps)
            y = ops.linear(ops.silu_mul(ops.linear(y, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)
            y, x = ops.add_rms_norm(y, x, next_norm, eps)
        return y

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [s, vocab] of the chosen rows [s, hidden]."""
        return fp32_linear(hidden, self.lm_head)


def fp32_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [s, n] times weight [v, n], transposed, written in fp32 whatever the weights' type.

    Rounding half-precision logits to their own type would make ties of values that differ (bf16 logits of 16 to 32
    lie 0.125 apart). CUDA has a matmul that writes fp32; elsewhere the weights are widened a chunk at a time.
    """
    if weight.dtype is torch.float32:
        return F.linear(x, weight)
    if weight.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    wide = x.float()
    return torch.cat([F.linear(wide, part.float()) for part in weight.split(HEAD_CHUNK)], dim=1)


def matmul_layout(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts [n_i, k] as one weight [sum n_i, k].

    float32 on a CPU is laid out column by column: one or two rows times such a weight, which is what decoding is,
    took 25.6 ms where the usual layout took 35.7 (SmolLM2-135M's layers, MKL, two cores); at four rows and more it
    loses about 15 %. Half precision showed no difference, and cuBLAS takes either.
    """
    if parts[0].dtype is not torch.float32 or parts[0].device.type != "cpu":
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    out = torch.empty(parts[0].shape[1], sum(len(part) for part in parts))
    start = 0
    for part in parts:
        out[:, start : start + len(part)] = part.t()
        start += len(part)
    return out.t()


def _take_layer(weights: dict[str, torch.Tensor], at: str) -> Layer:
    def fused(*names: str, kind: str = "weight") -> torch.Tensor | None:
        parts = [weights.pop(f"{at}{name}.{kind}", None) for name in names]
        if kind == "bias" and parts[0] is None:
            return None
        return matmul_layout(parts) if kind == "weight" else torch.cat(parts)

    qkv, gate_up = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
    return Layer(
        input_norm=weights.pop(f"{at}input_layernorm.weight"),
        post_norm=weights.pop(f"{at}post_attention_layernorm.weight"),
        qkv=fused(*qkv), qkv_bias=fused(*qkv, kind="bias"),
        o=fused("self_attn.o_proj"), o_bias=fused("self_attn.o_proj", kind="bias"),
        gate_up=fused(*gate_up), gate_up_bias=fused(*gate_up, kind="bias"),
        down=fused("mlp.down_proj"), down_bias=fused("mlp.down_proj", kind="bias"),
        q_norm=weights.pop(f"{at}self_attn.q_norm.weight", None),
        k_norm=weights.pop(f"{at}self_attn.k_norm.weight", None),
    )


def _keep_attention(probe, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        probe.keep(f"attention.{name}", layer, tensor)
