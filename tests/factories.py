"""Small engines for tests: real scheduler, pages, batches and records; only the model is a stand-in.

FakeRunner keeps one token id a cache slot, exactly where a real model would keep K/V, and derives the next
token from every token that it finds through the block table. A wrong table, a stale or shared page, a missing
copy or a step that reads what was not written changes the text.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import torch

from engine.batch import HostBatch
from engine.config import EngineConfig, ModelSource, with_knob
from engine.core import EngineCore
from engine.plan import Sampled, StepResult
from engine.request import Request, SamplingParams
from engine.sampler import SampleRows, describe, sample
from engine.store import TraceStore
from engine.trace import Trace

VOCAB = 97
POISON = -7  # what a slot holds before it is written


class FakePending:
    def __init__(self, result: StepResult) -> None:
        self.result = result

    def settle(self) -> StepResult:
        return self.result


class FakeRunner:
    """Behaves like ModelRunner; its model is a checksum of all tokens up to and including the last."""

    def __init__(self, config: EngineConfig) -> None:
        self.fail_on: set[int] = set()  # step ids that raise
        self.num_runs = 0
        self.configure(config)

    def configure(self, config: EngineConfig) -> None:
        self.top = config.top_logprobs
        shape = (config.cache.num_pages, config.cache.page_size)
        if getattr(self, "shape", None) == shape:  # as ModelRunner: the arena stays unless its shape changes
            return
        self.shape, self.page_size = shape, config.cache.page_size
        self.slots = np.full((config.cache.num_pages + 1) * config.cache.page_size, POISON, np.int64)
        self.last_token = np.zeros(4096, np.int64)

    graphs = None

    def capture_next(self) -> None:
        return None

    def run(self, step_id: int, host: HostBatch, rows: SampleRows, probe=None, graphs: bool = True) -> FakePending:
        if step_id in self.fail_on:
            raise RuntimeError("the fake device was told to fail")
        self.num_runs += 1
        for source, target in host.copies:
            pages = self.slots.reshape(-1, self.page_size)
            pages[target] = pages[source]
        ids = host.token_ids.copy()
        of_token = np.repeat(host.rows, np.diff(host.cu_seqlens))
        ids[host.from_row] = self.last_token[of_token[host.from_row]]
        self.slots[host.slot_mapping] = ids
        logits = torch.stack([self._logits(host, int(row)) for row in host.logits_rows]) if len(host.logits_rows) else torch.zeros(0, VOCAB)
        tokens = sample(logits, rows) if len(logits) else torch.zeros(0, dtype=torch.int64)
        self.last_token[rows.row_slots] = tokens.numpy()
        chosen, tops, values = describe(logits, tokens, self.top)
        sampled = tuple(
            Sampled(seq_id, int(t), float(c), tuple(i.tolist()), tuple(v.tolist()))
            for seq_id, t, c, i, v in zip(rows.seq_ids, tokens, chosen, tops, values, strict=True)
        )
        return FakePending(StepResult(step_id, sampled))

    def _logits(self, host: HostBatch, token_row: int) -> torch.Tensor:
        i = int(np.searchsorted(host.cu_seqlens, token_row, side="right")) - 1
        positions = np.arange(host.positions[token_row] + 1)
        slots = host.block_table[i, positions // self.page_size] * self.page_size + positions % self.page_size
        return fake_logits(self.slots[slots])


def fake_logits(tokens: np.ndarray) -> torch.Tensor:
    """fp32 [VOCAB]: a function of the whole sequence, never of anything else."""
    assert (tokens != POISON).all(), "the step read a cache slot that was never written"
    seed = zlib.crc32(np.asarray(tokens, np.int64).tobytes())
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32))


def fake_continuation(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """What a greedy fake model writes after a prompt, computed without any cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(fake_logits(np.array(tokens)).argmax()))
    return tokens[len(prompt) :]


class FakeText:
    """A TextStream: each token is one word; stop strings match whole words."""

    def __init__(self, request: Request) -> None:
        self.stop = set(request.sampling.stop)
        self.stopped = False

    def push(self, token_id: int) -> tuple[str, bool]:
        word = piece(token_id)
        self.stopped = self.stopped or word.strip() in self.stop
        return ("", True) if self.stopped else (word, False)

    def flush(self) -> str:
        return ""


WORDS = (
    "the cat sat on a mat and then it ran to see what was in that big red box by our old door so we all went up "
    "with them for some tea at two but no one had any cups left from last time they came here he said ok let us go now"
).split()


def piece(token_id: int) -> str:
    return " " + WORDS[token_id % len(WORDS)]


def make_config(pages: int = 16, page_size: int = 4, max_model_len: int = 512, **knobs: object) -> EngineConfig:
    """A resolved config for FakeRunner; `knobs` by name as in engine.config.KNOBS."""
    config = EngineConfig(source=ModelSource(model="fake", device="cpu", dtype="float32", backend="torch"), max_model_len=max_model_len)
    config = replace(config, cache=replace(config.cache, num_pages=pages, page_size=page_size))
    for name, value in knobs.items():
        config = with_knob(config, name, value)
    return config


def make_core(
    pages: int = 16, page_size: int = 4, eos: frozenset[int] = frozenset(), max_model_len: int = 512, **knobs: object
) -> EngineCore:
    config = make_config(pages, page_size, max_model_len, **knobs)
    return EngineCore(config, FakeRunner(config), FakeText, eos)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCAB, length).tolist())


def add(core: EngineCore, prompt: tuple[int, ...] | int, max_tokens: int = 8, priority: int = 0, **sampling: object) -> tuple[int, ...]:
    """Queue a prompt (or a random one of that length); returns the seq_ids."""
    ids = prompt_of(prompt, seed=prompt) if isinstance(prompt, int) else prompt
    text = "".join(map(piece, ids)).strip()
    return core.add(text, ids, SamplingParams(max_tokens=max_tokens, **sampling), priority=priority)[1]


def run(core: EngineCore, limit: int = 10_000) -> None:
    """Step until nothing is left, auditing after each step."""
    for _ in range(limit):
        if not core.has_work:
            return
        core.step()
        for room in core.rooms.values():
            room.scheduler.check_integrity()
    raise AssertionError(f"still working after {limit} steps")


def trace_of(core: EngineCore, room: str = "main", max_bytes: int = 2**28) -> Trace:
    """A Trace of all that a core has done so far."""
    store = TraceStore(max_bytes, piece, {"model": {"name": "fake", "parameters": 0}, "device": "test", "source": "live"})
    store.apply(core.rooms[room].recorder.drain())
    return store.snapshot()


def make_trace(**knobs: object) -> Trace:
    """A busy run: three ragged prompts, a shared prefix, a long prompt in chunks, preemption, an abort, n = 2."""
    settings = {"pages": 12, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, **knobs}
    core = make_core(**settings)
    add(core, prompt_of(5, 1), 12)
    add(core, prompt_of(11, 2), 10)
    add(core, prompt_of(2, 3), 6)
    for _ in range(4):
        core.step()
    add(core, (*prompt_of(11, 2)[:8], 5, 6, 7), 8)
    add(core, prompt_of(30, 4), 6)
    for _ in range(5):
        core.step()
    add(core, prompt_of(6, 5), 6, n=2, temperature=0.8, seed=7)
    core.abort(4)
    run(core)
    return trace_of(core)
