"""ModelRunner: weights, the arena, and one step on the device. Knows no requests, queues or pages' owners.

run() only launches; PendingStep.settle() waits and brings the tokens back in one copy. On a CPU the work is
done by the time run() returns, and settle() is a formality; the callers cannot tell.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.attention.full import FullAttention, bytes_per_token
from engine.batch import Batch, HostBatch, SteadyHost, to_device
from engine.cache import KVLayout, full_layout
from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineError
from engine.graphs import DecodeGraphs, cuda_recorder, sampling_arrays
from engine.models.base import Model
from engine.ops import Ops
from engine.plan import StepResult
from engine.probe import NO_PROBE, Parts
from engine.sampler import SampleRows, describe, sample

ROWS = 8192  # row slots whose newest token and block table stay on the device
LARGEST_GRAPH = 256  # sequences
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
    graph_size: int = 0
    began: torch.cuda.Event | None = None
    sample_us: int = 0
    of: np.ndarray | None = None  # int64: whose rows of `returned` are meant, where not all are

    def settle(self) -> StepResult:
        """Wait for the device and unpack."""
        if self.returned is None:
            return StepResult(self.step_id, (), self.graph_size)
        if self.done is not None:
            self.done.synchronize()
        values = self.returned.numpy() if self.of is None else self.returned.numpy()[self.of]
        if values.shape[1] > 1 and np.isnan(values[:, 1]).any():
            raise FloatingPointError("the model's scores are not numbers; its weights may be broken")
        gpu_us = 0 if self.began is None else round(self.began.elapsed_time(self.done) * 1e3)
        return StepResult.of_values(self.step_id, self.seq_ids, values, self.graph_size, gpu_us, self.sample_us)


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
        self.on_kernels = ops.backend == "triton"
        self.device = torch.device(config.source.device)
        self.last_token = torch.zeros(ROWS, dtype=torch.int64, device=self.device)
        self.arena: torch.Tensor | None = None
        self.attention: FullAttention | None = None
        self._graphs: DecodeGraphs | None = None
        self._made_for: tuple = ()
        self.record_graph = cuda_recorder() if self.device.type == "cuda" else None
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
        self.ops = replace(self.ops, fused=config.runner.fused and self.on_kernels)
        if self.attention is None or self.attention.arena is not self.arena or self.attention.page_size != config.cache.page_size:
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
    def run(self, step_id: int, host: HostBatch, rows: SampleRows, probe=NO_PROBE, graphs: bool = True) -> PendingStep:
        """Launch one step.

        Args:
            rows: one entry for each of host.logits_rows.
            graphs: a captured graph may run it.
        """
        if int(rows.row_slots.max(initial=0)) >= len(self.last_token):
            self.last_token = torch.cat([self.last_token, torch.zeros_like(self.last_token)])
        if len(host.copies):
            self.attention.copy_pages(torch.from_numpy(host.copies).to(self.device))
        if host.num_tokens == 0:
            return PendingStep(step_id, (), None)
        began = self._stamp()
        size = self.graphs.size_for(host) if graphs and not probe.active and self.graphs is not None else None
        if size is not None:
            return self._return(step_id, rows, self.graphs.run(size, host, rows), size, began)
        parts = self._parts(host, probe)
        batch = to_device(host, self.device, self.last_token, parts.attention.plan(host))
        hidden = parts.model.forward(batch, parts.attention, parts.ops, probe)
        if not rows.seq_ids:
            return PendingStep(step_id, (), None)
        logits, asked = parts.model.logits(hidden[batch.logits_rows]), time.perf_counter()
        tokens = parts.sample(logits, rows)
        sample_us = 0 if self.device.type == "cuda" else round((time.perf_counter() - asked) * 1e6)
        packed = self._pack(logits, tokens, torch.from_numpy(rows.row_slots).to(self.device))
        return self._return(step_id, rows, packed, 0, began, sample_us)

    def _stamp(self) -> torch.cuda.Event | None:
        """An event before a step's first operation; no clock of a CPU needs one, and who keeps no record reads none."""
        if self.device.type != "cuda" or not self.config.tracing:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @torch.inference_mode()
    def run_several(
        self, step_ids: list[int], hosts: list[SteadyHost], rows: list[SampleRows], graphs: bool = True
    ) -> Iterator[PendingStep]:
        """Launch several steps of one cohort, one after the other, none of which waits for the host."""
        size = self.graphs.size_for(hosts[0]) if graphs and self.graphs is not None else None
        if size is None:
            for step_id, host, drawn in zip(step_ids, hosts, rows, strict=True):
                yield self.run(step_id, host, drawn, graphs=False)
            return
        first, replays = hosts[0].members, iter(self.graphs.run_several(size, hosts, rows))
        for step_id, host, drawn in zip(step_ids, hosts, rows, strict=True):
            began, packed = self._stamp(), next(replays)
            of = None if host.members is first else np.flatnonzero(np.isin(first.seq_ids, host.members.seq_ids))
            yield replace(self._return(step_id, drawn, packed, size, began), of=of)

    def _parts(self, host: HostBatch, probe) -> Parts:
        """What a step is computed with; a probe may stand between."""
        parts = Parts(self.model, self.attention, self.ops, self._sample)
        return probe.around(parts, host) if probe.active else parts

    @torch.inference_mode()
    def score(self, host: HostBatch, tokens: np.ndarray, probe=NO_PROBE) -> np.ndarray:
        """A step whose tokens are known already: their log-probabilities. Nothing is sampled; waits for the device.

        Args:
            tokens: int64 [s], one for each of host.logits_rows.
        Returns:
            float64 [s].
        """
        parts = self._parts(host, probe)
        batch = to_device(host, self.device, self.last_token, parts.attention.plan(host))
        hidden = parts.model.forward(batch, parts.attention, parts.ops, probe)
        if not len(tokens):
            return np.zeros(0)
        logits = parts.model.logits(hidden[batch.logits_rows])
        return describe(logits, torch.from_numpy(tokens).to(self.device), 0)[0].double().cpu().numpy()

    def _decode(self, batch: Batch, inbox: dict[str, torch.Tensor]) -> torch.Tensor:
        """A decode step as a graph holds it: nothing in it asks the host."""
        newest = self.last_token.index_select(0, inbox["rows"])
        batch = replace(batch, token_ids=torch.where(inbox["from_row"] > 0, newest, batch.token_ids))
        logits = self.model.logits(self.model.forward(batch, self.attention, self.ops, NO_PROBE))
        tokens = self.ops.sample(logits, *(inbox[name] for name in ("temperature", "top_k", "top_p", "uniform")))
        return self._pack(logits, tokens, inbox["rows"])

    def _sample(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """int64 [s]. The kernel draws as a graph does; where it does not run, torch is quicker than its reference."""
        if not self.on_kernels:
            return sample(logits, rows)
        types = {"top_k": torch.int32, "uniform": torch.float64}
        arrays = [
            torch.tensor(values, dtype=types.get(name, torch.float32)).to(self.device, non_blocking=True)
            for name, values, _ in sampling_arrays(rows)
        ]
        return self.ops.sample(logits, *arrays)

    def _pack(self, logits: torch.Tensor, tokens: torch.Tensor, row_slots: torch.Tensor) -> torch.Tensor:
        """Keep each row's newest token for a step that is planned before this one returns, and put together what the host
        gets: float64 [s, 2 + 2 * width], without tracing [s, 1]."""
        self.last_token.index_copy_(0, row_slots, tokens)
        columns = [tokens[:, None].double()]
        if self.config.tracing:
            chosen, top_ids, top_logprobs = (self.ops.describe if self.on_kernels else describe)(logits, tokens, self.config.top_logprobs)
            columns += [chosen[:, None].double(), top_ids.double(), top_logprobs.double()]
        return torch.cat(columns, dim=1)

    def _return(self, step_id: int, rows: SampleRows, packed: torch.Tensor, graph_size: int = 0, began=None, sample_us: int = 0) -> PendingStep:
        """Start the one copy back, into memory of the step's own: other rooms' steps may come before it is settled."""
        if self.device.type == "cpu":
            return PendingStep(step_id, rows.seq_ids, packed.clone(), None, graph_size, None, sample_us)
        returned = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        returned.copy_(packed, non_blocking=True)
        done = torch.cuda.Event(enable_timing=began is not None)
        done.record()
        return PendingStep(step_id, rows.seq_ids, returned, done, graph_size, began)

    # ---- graphs ----

    profiled = False  # a profiler was attached before the graphs were captured, so that it sees what they hold

    def drop_graphs(self) -> None:
        """They are captured again, between steps. The device must be idle."""
        self._graphs, self._made_for = None, ()

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The decode graphs of this device, None where there can be none. What they were captured with is in their addresses:
        another arena or another kind of result voids them."""
        if self.record_graph is None or not self.ops.is_captured:
            return None
        made_for = (self.attention, self.ops.fused, id(self.last_token), self.config.tracing, self.config.top_logprobs)
        if made_for != self._made_for:
            length = self.config.max_model_len or self.model.config.max_position_embeddings
            width = -(-length // self.config.cache.page_size)
            self._graphs = DecodeGraphs(
                self._decode, self.device, len(self.last_token), width, LARGEST_GRAPH, self.record_graph, self.config.cache.page_size
            )
            self._graphs.last_token = self.last_token
            self._made_for = made_for
        return self._graphs

    @torch.inference_mode()
    def capture_next(self) -> int | None:
        """Capture one more decode graph if one is missing; its size. Between steps only."""
        return self.graphs.capture_next() if self.graphs is not None else None
