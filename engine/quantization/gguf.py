"""GGUF files to a Hugging Face checkpoint folder, with weights widened to float32.

The `gguf` package reads the container and knows every block layout. What is ours: the names, the config, and the
order of q and k rows. llama.cpp stores Llama's q and k with the two halves of each head interleaved (its rope
turns neighbours); here rope turns halves, so the rows go back, q by the query heads and k by the KV heads. Qwen's
are stored as they are. A family says which of it is its own (Family.gguf, gguf_interleaved).

float32 holds a dequantised value exactly up to its own rounding; float16 or bfloat16 would quantise a second time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from engine.errors import EngineError
from engine.models.registry import load_families
from engine.quantization.base import Format

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def convert(file: Path, folder: Path, progress: Callable[[float, str], None]) -> str:
    """Write `file` as a checkpoint into `folder`; returns the precision for people.

    Raises:
        EngineError: "bad_checkpoint" for a damaged file, "unsupported_model" for what is not done here, by name.
    """
    progress(0.0, f"Reading {file.name}")
    reader = open_gguf(file)
    config = read_config(reader)
    progress(0.1, "Building the tokenizer")
    write_tokenizer(file, reader, folder, config["max_position_embeddings"])
    weights, total = {}, len(reader.tensors)
    for index, tensor in enumerate(reader.tensors):
        name, values = read_tensor(tensor, config)
        weights[name] = torch.from_numpy(values)
        progress(0.3 + 0.5 * index / total, f"Dequantising {name}")
    progress(0.8, "Writing weights")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes for its owner alone
    progress(1.0, f"Converted {file.name}")
    return "float32" if (kind := main_type(reader)) == "F32" else f"float32, dequantised from {kind}"


def open_gguf(file: Path) -> GGUFReader:
    """A reader.

    Raises:
        EngineError: "bad_checkpoint".
    """
    try:
        return GGUFReader(file)
    except Exception as error:  # the package raises whatever numpy raised
        sentence = f"The checkpoint is not usable: {file.name} is no readable GGUF file."
        raise EngineError("bad_checkpoint", sentence, file=file.name) from error


def main_type(reader: GGUFReader) -> str:
    """The type that most weights are stored in: "Q4_1"."""
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    return sizes.most_common(1)[0][0]


def read_config(reader: GGUFReader) -> dict:
    """The config.json that describes the same model."""
    arch = _value(reader, "general.architecture")
    family = next((family for family in load_families().values() if family.gguf and family.gguf == arch), None)
    if family is None:
        raise _refuse(f"the GGUF architecture {str(arch)[:40]}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in tensors:
        raise _refuse("rope factors stored in a GGUF file")
    scaling = _value(reader, f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise _refuse(f"the rope kind {str(scaling)[:40]} in a GGUF file")
    if "token_embd.weight" not in tensors:
        raise EngineError("bad_checkpoint", "The checkpoint is not usable: the GGUF file has no embeddings.", file="token_embd.weight")
    hidden, heads = int(_value(reader, f"{arch}.embedding_length")), int(_value(reader, f"{arch}.attention.head_count"))
    dim = int(_value(reader, f"{arch}.attention.key_length", hidden // heads))
    if (rotated := int(_value(reader, f"{arch}.rope.dimension_count", dim))) != dim:
        raise _refuse(f"a partial rotary embedding ({rotated} of {dim})")
    rope = {"rope_type": "default", "rope_theta": _short(_value(reader, f"{arch}.rope.freq_base", 10000.0))}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": _short(_value(reader, f"{arch}.rope.scaling.factor"))}
    eos = [i for i in (_value(reader, f"tokenizer.ggml.{key}_token_id", None) for key in ("eos", "eot")) if i is not None]
    return {
        "architectures": [family.architectures[0]],
        "model_type": family.name,
        "hidden_size": hidden,
        "intermediate_size": int(_value(reader, f"{arch}.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, f"{arch}.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_value(reader, f"{arch}.attention.head_count_kv", heads)),
        "head_dim": dim,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": int(_value(reader, f"{arch}.context_length")),
        "rms_norm_eps": _short(_value(reader, f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id", None),
        "eos_token_id": sorted(set(eos)) if len(set(eos)) > 1 else eos[0] if eos else None,
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id", None),
        "dtype": "float32",
    }


def read_tensor(tensor, config: dict) -> tuple[str, np.ndarray]:
    """A tensor's checkpoint name and float32 values, q and k rows in the order that our rope wants."""
    name, kind = tensor.name.rsplit(".", 1)
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
    part = block[2] if block else name
    known = BLOCK.get(part) if block else TOP.get(part)
    if known is None or kind not in ("weight", "bias"):
        raise _refuse(f"the GGUF tensor {tensor.name[:60]}")
    try:
        values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type)).astype(np.float32, copy=False)
    except NotImplementedError:
        raise _refuse(f"the GGUF type {tensor.tensor_type.name}") from None
    values = values.reshape([int(n) for n in reversed(tensor.shape)])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part)
    if heads and load_families()[config["model_type"]].gguf_interleaved:
        if values.shape[0] % (2 * heads):
            sentence = f"The checkpoint is not usable: {tensor.name} has {values.shape[0]} rows, which is not {heads} heads."
            raise EngineError("bad_checkpoint", sentence, file=tensor.name)
        values = unpermute(values, heads)
    path = f"model.layers.{block[1]}.{known}" if block else known
    return f"{path}.{kind}", np.array(values, order="C")  # owned: F32 is a view of the file


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (x0, y0, x1, y1, …) back to (x0, x1, …, y0, y1, …)."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_tokenizer(file: Path, reader: GGUFReader, folder: Path, max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json. transformers rebuilds the tokenizer; it knows no splitting rule for
    SmolLM's `tokenizer.ggml.pre` and leaves digits together, so that rule is put back here."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:  # not in every transformers; where it is missing, no rule is put in by transformers either
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        GGUF_PRE_TOKENIZER_SPLITS = {}

    model, pre = _value(reader, "tokenizer.ggml.model", None), _value(reader, "tokenizer.ggml.pre", None)
    if model == "gpt2" and pre not in {"smollm", "gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}:
        raise _refuse(f"the GGUF pre-tokenizer {str(pre)[:40]}")
    found = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    backend = found.backend_tokenizer
    if pre == "smollm":
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(folder / "tokenizer.json"))
    special = {key: getattr(found, key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    names = {key: str(token) for key, token in special.items() if token is not None}
    template = {"chat_template": found.chat_template} if found.chat_template else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "model_max_length": max_length}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **names, **template}, indent=2) + "\n", encoding="utf-8")


_REQUIRED = object()


def _value(reader: GGUFReader, key: str, default: object = _REQUIRED):
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise EngineError("bad_checkpoint", f"The checkpoint is not usable: the GGUF file does not state {key}.", file=key)
    return default


def _short(value: float) -> float:
    """The shortest decimal that is this float32: 9.99999974e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _refuse(what: str) -> EngineError:
    return EngineError("unsupported_model", f"This model needs {what}, which is not supported.", what=what)


FORMAT = Format(name="GGUF", suffix=".gguf", convert=convert)
