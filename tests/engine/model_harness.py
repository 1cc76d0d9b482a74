"""Runs a model without scheduler or pool: one arena, sequences written one after the other, logits of every row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.attention.full import FullAttention, bytes_per_token
from engine.batch import Batch, HostBatch
from engine.models.base import Model
from engine.ops import Ops, torch_ops
from engine.probe import NO_PROBE

PAGE = 16


def make_batch(chunks: list[tuple[list[int], int, list[int]]]) -> Batch:
    """chunks: (token ids, position of the first one, pages) a sequence."""
    positions = [np.arange(start, start + len(ids)) for ids, start, _ in chunks]
    tables = [np.asarray(pages, dtype=np.int64) for _, _, pages in chunks]
    slots = [table[p // PAGE] * PAGE + p % PAGE for table, p in zip(tables, positions)]
    width = max(len(t) for t in tables)
    lengths = [len(ids) for ids, _, _ in chunks]
    token_ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _, _ in chunks])
    host = HostBatch(
        token_ids=token_ids,
        from_row=np.zeros(len(token_ids), dtype=bool),
        rows=np.arange(len(chunks)),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        seq_lens=np.asarray([start + len(ids) for ids, start, _ in chunks], dtype=np.int32),
        block_table=np.stack([np.pad(t, (0, width - len(t))) for t in tables]).astype(np.int32),
        logits_rows=np.arange(len(token_ids)),
        copies=np.zeros((0, 2), dtype=np.int64),
    )
    names = ("token_ids", "positions", "slot_mapping", "cu_seqlens", "seq_lens", "block_table", "logits_rows")
    return Batch(**{name: torch.from_numpy(getattr(host, name)) for name in names}, host=host)


class Harness:
    """One model, one arena of NaN, one sequence at pages 1, 2, …"""

    def __init__(self, model: Model, length: int = 256, ops: Ops | None = None) -> None:
        self.model, self.ops = model, ops or torch_ops()
        dtype = model.embedding.dtype
        self.pages = list(range(1, -(-length // PAGE) + 1))
        elements = PAGE * bytes_per_token(model.config, 1)
        arena = torch.full((len(self.pages) + 1, elements), float("nan"), dtype=dtype).view(torch.uint8)
        self.attention = FullAttention(model.config, arena, PAGE, dtype, self.ops)

    @torch.inference_mode()
    def logits(self, ids: list[int], start: int = 0, probe=NO_PROBE) -> torch.Tensor:
        """fp32 [len(ids), vocab] of tokens at positions start, start + 1, …"""
        batch = make_batch([(ids, start, self.pages)])
        return self.model.logits(self.model.forward(batch, self.attention, self.ops, probe))

    def greedy(self, ids: list[int], new: int, stop: frozenset[int] = frozenset()) -> list[int]:
        """New ids: prefill, then one token a step."""
        out = [int(self.logits(ids)[-1].argmax())]
        while len(out) < new and out[-1] not in stop:
            out.append(int(self.logits([out[-1]], len(ids) + len(out) - 1)[-1].argmax()))
        return out


def save_hf(model, folder: Path, **config_changes) -> Path:
    """A transformers model as a checkpoint folder, and config.json changed."""
    import json

    model.save_pretrained(folder)
    if config_changes:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config_changes}))
    return folder
