"""The real TinyStories model: the engine writes the story that a float32 reference writes from the raw file.

The reference below is llama2.c's forward pass in numpy, read from its own .bin layout (rope turns neighbours), so
neither our conversion nor transformers has a part in it.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from engine.request import SamplingParams
from engine.session import Session
from tests.engine.stories import BOS, convert_stories, stories_data

NEW = 160


@pytest.fixture(scope="module")
def source():
    found = stories_data()
    if found is None:
        pytest.skip("../shared/data has no stories260K.bin")
    return found


class Llama2C:
    """One token at a time, every key and value kept."""

    def __init__(self, raw: bytes) -> None:
        self.dim, self.hidden, self.layers, self.heads, self.kv, vocab, _ = struct.unpack("<7i", raw[:28])
        data, at, size = np.frombuffer(raw, "<f4", offset=28), 0, self.dim // self.heads
        d, n = self.dim, self.layers
        shapes = dict(
            embed=(abs(vocab), d), att_norm=(n, d), wq=(n, d, d), wk=(n, self.kv * size, d), wv=(n, self.kv * size, d), wo=(n, d, d),
            ffn_norm=(n, d), w1=(n, self.hidden, d), w2=(n, d, self.hidden), w3=(n, self.hidden, d), norm=(d,),
        )  # fmt: skip
        for name, shape in shapes.items():
            count = int(np.prod(shape))
            setattr(self, name, data[at : at + count].reshape(shape))
            at += count
        self.size, self.keys, self.values = size, [[] for _ in range(n)], [[] for _ in range(n)]

    def step(self, token: int, position: int) -> np.ndarray:
        def rms(x, weight):
            return x / np.sqrt((x * x).mean() + np.float32(1e-5)) * weight

        def turn(x):
            angle = position * 10000.0 ** (-np.arange(0, self.size, 2) / self.size)
            cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            even, odd = x[:, 0::2], x[:, 1::2]
            return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

        x = self.embed[token]
        for layer in range(self.layers):
            h = rms(x, self.att_norm[layer])
            q = turn((self.wq[layer] @ h).reshape(self.heads, self.size))
            self.keys[layer].append(turn((self.wk[layer] @ h).reshape(self.kv, self.size)))
            self.values[layer].append((self.wv[layer] @ h).reshape(self.kv, self.size))
            k = np.repeat(np.stack(self.keys[layer]), self.heads // self.kv, 1)  # [keys, heads, size]
            v = np.repeat(np.stack(self.values[layer]), self.heads // self.kv, 1)
            scores = np.einsum("hd,khd->hk", q, k) / np.float32(np.sqrt(self.size))
            weights = np.exp(scores - scores.max(1, keepdims=True))
            weights /= weights.sum(1, keepdims=True)
            x = x + self.wo[layer] @ np.einsum("hk,khd->hd", weights, v).ravel()
            h = rms(x, self.ffn_norm[layer])
            gate = self.w1[layer] @ h
            x = x + self.w2[layer] @ (gate / (1 + np.exp(-gate)) * (self.w3[layer] @ h))
        return self.embed @ rms(x, self.norm)

    def greedy(self, prompt: list[int], new: int) -> list[int]:
        tokens = list(prompt)
        for position in range(len(prompt) + new - 1):
            logits = self.step(tokens[position], position)
            if position >= len(prompt) - 1:
                tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]


def test_the_engine_writes_the_story_that_the_float32_reference_writes(source, tmp_path_factory):
    folder = convert_stories(source, tmp_path_factory.mktemp("stories"))
    config = EngineConfig(ModelSource(str(folder), "cpu", "float32"), CacheConfig(num_pages=40, page_size=16), SchedulerConfig(4, 24))
    session = Session(config, own_process=False).start().wait_ready(60)
    try:
        prompts = [[BOS], [BOS, *session.tokenizer.encode("Once upon a time, Tim had a red ball.", special=False)]]
        handles = [session.add_ids("", ids, SamplingParams(max_tokens=NEW, ignore_eos=True)) for ids in prompts]
        session.wait([h.seq_ids[0] for h in handles])
        raw = (source / "stories260K.bin").read_bytes()
        for handle, ids in zip(handles, prompts, strict=True):
            expected = Llama2C(raw).greedy(ids, NEW)
            assert session.trace().tokens_of(handle.seq_ids[0])["token_id"].tolist() == expected
            assert session.trace().text_of(handle.seq_ids[0]).strip() == session.tokenizer.decode(expected).strip()
        assert session.trace().text_of(handles[0].seq_ids[0]).strip().startswith("Once upon a time")
    finally:
        session.close()
