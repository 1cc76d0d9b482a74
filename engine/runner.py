"""ModelRunner: weights, the arena, and one step on the device. Knows no requests, queues or pages' owners.

run() only launches; PendingStep.settle() waits and brings the tokens back in one copy. On a CPU the work is
done by the time run() returns, and settle() is a formality; the callers cannot tell.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.full import FullAttention, bytes_per_token
from engine.batch import HostBatch, to_device
from engine.cache import KVLayout, full_layout
from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineError
from engine.models.base import Model
from engine.ops import Ops
from engine.plan import Sampled, StepResult
from engine.probe import NO_PROBE
from engine.sampler import SampleRows, describe, sample

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def layout_of(config: ModelConfig, page_size: int, dtype: str) -> KVLayout:
    """How the arena is cut for a model."""
    return full_layout(config.num_layers, bytes_per_token(config, DTYPES[dtype].itemsize), page_size)


def free_bytes(device: torch.device) -> int:
    """Memory that the arena may take: most of a GPU's, half of a CPU's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.85)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def check_memory(wanted: int, free: int) -> None:
    """Raises EngineError "pool_too_large"."""
    if wanted > free:
        sentence = f"A cache of {wanted / 2**20:,.0f} MiB was asked for, but only {free / 2**20:,.0f} MiB may be used here."
        raise EngineError("pool_too_large", sentence, wanted=wanted, free=free)


@dataclass(frozen=True)
class PendingStep:
    """A launched step. settle() may be called once."""

    step_id: int
    seq_ids: tuple[int, ...]
    returned: torch.Tensor | None  # [s, 2 + 2 * width] float64 on the host: token, logprob, top ids, top logprobs;
    # without tracing [s, 1]: the token alone
    done: torch.cuda.Event | None = None

    def settle(self) -> StepResult:
        """Wait for the device and unpack."""
        if self.returned is None:
            return StepResult(self.step_id, ())
        if self.done is not None:
            self.done.synchronize()
        sampled = []
        width = (self.returned.shape[1] - 2) // 2
        for seq_id, (token, *rest) in zip(self.seq_ids, self.returned.tolist(), strict=True):
            logprob, *tops = rest or (0.0,)
            if math.isnan(logprob):
                raise FloatingPointError("the model's scores are not numbers; its weights may be broken")
            sampled.append(Sampled(seq_id, int(token), logprob, tuple(map(int, tops[:width])), tuple(tops[width:])))
        return StepResult(self.step_id, tuple(sampled))


class ModelRunner:
    """Runs host batches on one device.

    Args:
        model: weights and forward pass.
        config: resolved.
        ops: the backend's kernels.
    """

    def __init__(self, model: Model, config: EngineConfig, ops: Ops) -> None:
        self.model = model
        self.ops = ops
        self.device = torch.device(config.source.device)
        self.last_token = torch.zeros(257, dtype=torch.int64, device=self.device)
        self.arena: torch.Tensor | None = None
        self.configure(config)

    def configure(self, config: EngineConfig) -> bool:
        """Cut the arena to config.cache.num_pages if its shape changed. Nothing may be in flight.

        Returns whether what was cached is still there: it moves along into a larger arena if both fit side by side.
        Raises EngineError "pool_too_large" and keeps the old one.
        """
        layout = layout_of(self.model.config, config.cache.page_size, config.source.dtype)
        shape = (config.cache.num_pages + 1, layout.page_bytes)  # page 0 is the sink
        survived = self.arena is not None and self.arena.shape == shape
        if not survived:
            survived = self._recut(shape)
        self.config = config
        self.attention = FullAttention(self.model.config, self.arena, config.cache.page_size, DTYPES[config.source.dtype], self.ops)
        return survived

    def _recut(self, shape: tuple[int, int]) -> bool:
        """A new arena of this shape; True if the old one's pages are in it."""
        old, free, wanted = self.arena, free_bytes(self.device), shape[0] * shape[1]
        check_memory(wanted, free + (0 if old is None else old.nbytes))
        if old is not None and old.shape[1] == shape[1] and len(old) < shape[0] and wanted <= free:
            self.arena = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            self.arena[: len(old)] = old
            return True
        self.attention = self.arena = old = None  # free the old one first
        self.arena = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return False

    @torch.inference_mode()
    def run(self, step_id: int, host: HostBatch, rows: SampleRows, probe=NO_PROBE) -> PendingStep:
        """Launch one step.

        Args:
            rows: one entry for each of host.logits_rows.
        """
        if len(host.copies):
            self.attention.copy_pages(torch.from_numpy(host.copies).to(self.device))
        if host.num_tokens == 0:
            return PendingStep(step_id, (), None)
        batch = to_device(host, self.device, self.last_token, self.attention.plan(host))
        hidden = self.model.forward(batch, self.attention, self.ops, probe)
        if not rows.seq_ids:
            return PendingStep(step_id, (), None)
        logits = self.model.logits(hidden[batch.logits_rows])
        tokens = sample(logits, rows)
        self._remember(rows.row_slots, tokens)
        columns = [tokens[:, None].double()]
        if self.config.tracing:
            chosen, top_ids, top_logprobs = describe(logits, tokens, self.config.top_logprobs)
            columns += [chosen[:, None].double(), top_ids.double(), top_logprobs.double()]
        packed = torch.cat(columns, dim=1)
        if self.device.type == "cpu":
            return PendingStep(step_id, rows.seq_ids, packed)
        returned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        returned.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return PendingStep(step_id, rows.seq_ids, returned, done)

    def _remember(self, row_slots: np.ndarray, tokens: torch.Tensor) -> None:
        """Keep each row's newest token on the device for a step that is planned before this one returns."""
        if int(row_slots.max()) >= len(self.last_token):
            grown = self.last_token.new_zeros(2 * int(row_slots.max()) + 1)
            grown[: len(self.last_token)] = self.last_token
            self.last_token = grown
        self.last_token[torch.from_numpy(row_slots).to(self.device)] = tokens
