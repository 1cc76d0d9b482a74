"""The real 260k-parameter TinyStories model in llama2.c's own format, as a Hugging Face folder.

The data lies beside the repository (../shared/data) and is no part of it; `stories_data()` is None where it is absent.
The old layout: seven int32, then fp32 tensors in a fixed order, each kind for all layers. Its rope turns neighbours,
so q and k rows are put in Hugging Face's order (halves).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

BOS, EOS = 1, 2


def stories_data() -> Path | None:
    """The folder that holds stories260K.bin and tok512.bin."""
    folder = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return folder if (folder / "stories260K.bin").is_file() and (folder / "tok512.bin").is_file() else None


def convert_stories(source: Path, folder: Path) -> Path:
    """A whole checkpoint in `folder` (made when needed), tokenizer.json included."""
    raw = (source / "stories260K.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("<7i", raw[:28])
    data, at = np.frombuffer(raw, dtype="<f4", offset=28), 0
    head_dim = dim // heads
    kv = kv_heads * head_dim

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return data[at - count : at].reshape(shape)

    def halves(rows: np.ndarray, n: int) -> np.ndarray:
        return rows.reshape(n, head_dim // 2, 2, dim).swapaxes(1, 2).reshape(rows.shape)

    shared = vocab > 0
    vocab = abs(vocab)
    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    order = (
        ("input_layernorm", (dim,)), ("self_attn.q_proj", (dim, dim)), ("self_attn.k_proj", (kv, dim)), ("self_attn.v_proj", (kv, dim)),
        ("self_attn.o_proj", (dim, dim)), ("post_attention_layernorm", (dim,)), ("mlp.gate_proj", (hidden, dim)),
        ("mlp.down_proj", (dim, hidden)), ("mlp.up_proj", (hidden, dim)),
    )  # fmt: skip
    for name, shape in order:
        for index, part in enumerate(take(layers, *shape)):
            rows = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(name)
            weights[f"model.layers.{index}.{name}.weight"] = halves(part, rows) if rows else part
    weights["model.norm.weight"] = take(dim)
    take(2, length, head_dim // 2)  # rope tables, computed anew
    if not shared:
        weights["lm_head.weight"] = take(vocab, dim)
    assert at == len(data), "the file is not in the layout that was expected"
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": dim,
        "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": length, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": shared, "bos_token_id": BOS, "eos_token_id": EOS,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.from_numpy(np.array(values, dtype=np.float32)) for name, values in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    _tokenizer(StoriesVocabulary.load(source)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}))
    return folder


def _tokenizer(known: StoriesVocabulary) -> Tokenizer:
    """The same vocabulary as a Hugging Face tokenizer: merges in the order of the pieces' scores."""
    tokens = ["<unk>", "<s>", "</s>", *(piece.decode().replace(" ", "▁") for piece in known.pieces[3:])]
    vocab, merges = {token: index for index, token in enumerate(tokens)}, []
    for index in sorted(range(3, len(tokens)), key=lambda i: -known.scores[i]):
        token = tokens[index]
        if not token.startswith("<0x"):
            merges += [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in vocab and token[at:] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


@dataclass(frozen=True)
class StoriesVocabulary:
    """tok512.bin: pieces and their scores, enough to encode and decode as llama2.c does."""

    pieces: tuple[bytes, ...]
    scores: tuple[float, ...]

    @classmethod
    def load(cls, source: Path) -> StoriesVocabulary:
        raw, at, pieces, scores = (source / "tok512.bin").read_bytes(), 4, [], []
        while at < len(raw):
            score, length = struct.unpack_from("<fi", raw, at)
            pieces.append(raw[at + 8 : at + 8 + length])
            scores.append(score)
            at += 8 + length
        return cls(tuple(pieces), tuple(scores))

    def encode(self, text: str) -> list[int]:
        """BOS, then the best-scoring merges of the text behind a blank."""
        known = {piece: index for index, piece in reversed(list(enumerate(self.pieces)))}
        ids = [known[b" "]] if text else []
        for char in text:
            spelled = char.encode()
            ids += [known[spelled]] if spelled in known else [3 + byte for byte in spelled]
        while True:
            pairs = [(self.pieces[a] + self.pieces[b], i) for i, (a, b) in enumerate(pairwise(ids))]
            pairs = [(self.scores[known[joined]], -i) for joined, i in pairs if joined in known]
            if not pairs:
                return [BOS, *ids]
            at = -max(pairs)[1]
            ids[at : at + 2] = [known[self.pieces[ids[at]] + self.pieces[ids[at + 1]]]]

    def decode(self, ids: list[int]) -> str:
        out, previous = b"", None
        for token_id in ids:
            piece = self.pieces[token_id]
            if piece.startswith(b"<0x") and len(piece) == 6:
                piece = bytes([int(piece[3:5], 16)])
            if previous == BOS:
                piece = piece.removeprefix(b" ")
            previous = token_id
            out += b"" if token_id in (BOS, EOS) else piece
        return out.decode("utf-8", "replace")
