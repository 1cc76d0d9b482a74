"""Decode steps as CUDA graphs: one captured launch for a batch size, replayed with new numbers in fixed buffers.

A decode step is one in which every sequence computes one token and gets one. It takes the smallest captured size that
holds it; rows behind the last sequence are padding: row slot 0, no keys, nothing written, nobody reads their token.
What a step needs goes to the device in one copy (`Inbox`), its block tables as changes to a table that stays there
by row slot. Sampling, log-probabilities and the newest token of each row are inside the graph.

Sizes are captured between steps (`capture_next`); until then, and for steps that do not fit, the runner runs eagerly
with the same kernels. Knows no requests; does not decide when a step may use a graph beyond its shape.

A recorder (cuda_recorder) makes a replay of a function; `again` is one that just runs it, so that padding, packing and
table changes are tested on a CPU. Rejected: a graph for each exact batch size (capture time and memory for nothing), copying whole
block tables every step (0.5 MB at 256 sequences).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.batch import Batch, HostBatch
from engine.errors import reason_of
from engine.sampler import SampleRows

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
IN_FLIGHT = 3  # host buffers of a graph's inputs: one being filled, two whose copies may not have happened yet


@dataclass(frozen=True)
class Field:
    """An array of the inbox: `n` numbers of one type from byte `at` on."""

    name: str
    dtype: np.dtype
    at: int
    n: int


def layout(size: int, changes: int) -> tuple[tuple[Field, ...], int]:
    """The inbox of a batch size and its length in bytes; wide types first, so that each begins aligned."""
    wanted = [(name, np.dtype(np.int64), size) for name in ("token_ids", "from_row", "positions", "slot_mapping", "rows")]
    wanted += [(name, np.dtype(np.int64), changes) for name in ("change_at", "change_to")]
    wanted += [("uniform", np.dtype(np.float64), size), ("seq_lens", np.dtype(np.int32), size)]
    wanted += [("temperature", np.dtype(np.float32), size), ("top_k", np.dtype(np.int32), size), ("top_p", np.dtype(np.float32), size)]
    fields, at = [], 0
    for name, dtype, n in wanted:
        fields.append(Field(name, dtype, at, n))
        at += n * dtype.itemsize
    return tuple(fields), at


class Inbox:
    """The numbers of one step, as named arrays over one buffer, on the host and on the device."""

    def __init__(self, size: int, changes: int, device: torch.device) -> None:
        fields, length = layout(size, changes)
        cuda = device.type == "cuda"
        self._hosts = [torch.zeros(length, dtype=torch.uint8, pin_memory=cuda) for _ in range(IN_FLIGHT)]
        self._arrays = [{f.name: h.numpy()[f.at : f.at + f.n * f.dtype.itemsize].view(f.dtype) for f in fields} for h in self._hosts]
        self._buffer = torch.zeros(length, dtype=torch.uint8, device=device)
        types = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32, "float64": torch.float64}
        self.device = {f.name: self._buffer[f.at : f.at + f.n * f.dtype.itemsize].view(types[f.dtype.name]) for f in fields}
        self._turn = 0
        self._greedy = [False] * IN_FLIGHT
        self._sent: list[torch.cuda.Event | None] = [None] * IN_FLIGHT  # when each was read

    @property
    def is_greedy(self) -> bool:
        """What the arrays to be filled say of sampling already: every row is greedy."""
        return self._greedy[self._turn]

    @is_greedy.setter
    def is_greedy(self, value: bool) -> None:
        self._greedy[self._turn] = value

    def next(self) -> dict[str, np.ndarray]:
        """The arrays to fill for the next step. Waits where the device has not yet read what they held: several rooms that
        run ahead may be that far in front of it."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self) -> None:
        self._buffer.copy_(self._hosts[self._turn], non_blocking=True)
        if self._buffer.is_cuda:
            self._sent[self._turn] = torch.cuda.Event()
            self._sent[self._turn].record()


class Tables:
    """Block tables by row slot, kept on the device.

    Invariant: after the changes of a step, the device's row equals the sequence's table as far as that is long. What
    is behind it is stale and never read.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.width = width
        self.device = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._known = np.zeros((rows, width), np.int32)  # what the device has, or will have once everything sent has arrived

    def changes(self, rows: np.ndarray, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(flat index, page) of the entries that differ from what the device has; from now on it has them."""
        known = self._known[rows, : tables.shape[1]]
        at, column = np.nonzero(known != tables)
        self._known[rows[at], column] = tables[at, column]
        return rows[at] * self.width + column, tables[at, column].astype(np.int64)

    def forget(self) -> None:
        """Nothing is known of what the device has: every entry differs."""
        self._known.fill(-1)

    def write(self, at: np.ndarray, to: np.ndarray) -> None:
        """Send entries at once, outside a graph."""
        device = self.device.device
        self.device.view(-1)[torch.from_numpy(at).to(device)] = torch.from_numpy(to.astype(np.int32)).to(device)


class Forward(Protocol):
    """The whole step on the device, as the runner runs it: (batch, inbox arrays) -> packed results [size, columns]."""

    def __call__(self, batch: Batch, inbox: dict[str, torch.Tensor]) -> torch.Tensor: ...


@dataclass
class _Graph:
    inbox: Inbox
    replay: Callable[[], object]
    step: Callable[[], torch.Tensor]  # keeps alive what the captured launches read
    packed: torch.Tensor | None = None


class DecodeGraphs:
    """The captured sizes of one runner.

    Args:
        forward: the step on the device.
        rows: row slots that have a place on the device; a step with a higher one runs eagerly.
        width: pages of the longest sequence.
        largest: most sequences of a step.
        record: captures a function, (function) -> replay.
    """

    def __init__(
        self, forward: Forward, device: torch.device, rows: int, width: int, largest: int,
        record: Callable[[Callable], Callable[[], object]],
    ) -> None:  # fmt: skip
        self._forward, self._device, self._record = forward, device, record
        self.tables = Tables(rows, width, device)
        self._rows = rows
        self.wanted = [n for n in SIZES if n < largest] + [min(n for n in (*SIZES, largest) if n >= largest)]
        self._graphs: dict[int, _Graph] = {}
        self.failed = ""  # why no more is captured

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those that can be replayed now."""
        return tuple(sorted(self._graphs))

    @property
    def missing(self) -> tuple[int, ...]:
        return () if self.failed else tuple(n for n in self.wanted if n not in self._graphs)

    def capture_next(self) -> int | None:
        """Capture one more size, the smallest missing; nothing may be in flight on the device that it would delay.
        Returns it, None if there is none or capturing failed (then `failed` says why)."""
        if not self.missing:
            return None
        size = self.missing[0]
        try:
            self._graphs[size] = self._capture(size)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            self.failed = reason_of(error)
            return None
        return size

    def size_for(self, host: HostBatch) -> int | None:
        """The captured size for a step; None if it is no decode step or none is large enough."""
        n = len(host.rows)
        if n == 0 or host.num_tokens != n or len(host.logits_rows) != n or int(host.rows.max()) >= self._rows:
            return None
        return next((size for size in self.sizes if size >= n), None)

    def run(self, size: int, host: HostBatch, rows: SampleRows) -> torch.Tensor:
        """One step on the device: its packed results [n, columns], until the next replay. Whoever wants them later copies them
        on the same stream: other rooms' steps may be launched before this one is settled."""
        try:
            return self._run(size, host, rows)
        except Exception:
            self.tables.forget()  # what was counted as sent may not have been
            raise

    def _run(self, size: int, host: HostBatch, rows: SampleRows) -> torch.Tensor:
        graph, n = self._graphs[size], len(host.rows)
        at, to = self.tables.changes(host.rows, host.block_table)
        if len(at) > 2 * size:
            self.tables.write(at, to)
            at, to = at[:0], to[:0]
        box = graph.inbox.next()
        for name in ("token_ids", "from_row", "positions", "slot_mapping", "rows", "seq_lens"):
            box[name][:n] = getattr(host, name)
            box[name][n:] = -1 if name == "slot_mapping" else 0
        box["change_at"][: len(at)], box["change_at"][len(at) :] = at, 0  # entry 0 belongs to row slot 0, which nobody reads
        box["change_to"][: len(to)], box["change_to"][len(to) :] = to, 0
        if not (rows.all_greedy and graph.inbox.is_greedy):
            for name, values, neutral in sampling_arrays(rows):
                box[name][:n], box[name][n:] = values, neutral
            graph.inbox.is_greedy = rows.all_greedy
        graph.inbox.send()
        graph.replay()
        return graph.packed[:n]

    def replay_us(self, size: int, times: int = 30) -> list[float]:
        """Microseconds of replays of a captured size with the numbers of its last step. Waits for the device; CUDA only."""
        found = []
        for _ in range(times):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._graphs[size].replay()
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop) * 1e3)
        return found

    def run_eagerly(self, size: int) -> None:
        """What a size holds once more, launch by launch in the order of the capture, with the numbers of its last step. The
        rows of that step have gone on since: what it writes for them is void, so nobody may need them any more."""
        self._graphs[size].step()

    def _capture(self, size: int) -> _Graph:
        inbox = Inbox(size, 2 * size, self._device)
        inbox.next()["slot_mapping"][:] = -1
        inbox.send()
        box = inbox.device
        ids = torch.arange(size + 1, device=self._device)
        cu_seqlens, host = ids.int(), decode_host(size)

        def step() -> torch.Tensor:
            self.tables.device.view(-1).index_put_((box["change_at"],), box["change_to"].int())
            table = self.tables.device.index_select(0, box["rows"])
            batch = Batch(
                box["token_ids"], box["positions"], box["slot_mapping"], cu_seqlens, box["seq_lens"], table, ids[:-1], host
            )  # fmt: skip
            return self._forward(batch, box)

        step()  # compiles what is new at this size
        graph = _Graph(inbox, step, step)

        def keep() -> None:
            graph.packed = step()

        graph.replay = self._record(keep)
        return graph


def decode_host(size: int) -> HostBatch:
    """What launches ask of the host half of a decode step: its shape."""
    none, ids = np.zeros(0, np.int64), np.arange(size, dtype=np.int64)
    return HostBatch(
        token_ids=ids, from_row=ids > 0, rows=ids, positions=ids, slot_mapping=ids, cu_seqlens=np.arange(size + 1, dtype=np.int32),
        seq_lens=np.ones(size, np.int32), block_table=np.zeros((size, 1), np.int32), logits_rows=ids, copies=none.reshape(0, 2),
    )  # fmt: skip


def sampling_arrays(rows: SampleRows) -> tuple[tuple[str, list[float] | list[int], float], ...]:
    """(name, values, what padding has) of what the sampling kernel reads."""
    params = rows.params
    return (
        ("temperature", [p.temperature for p in params], 0.0),
        ("top_k", [p.top_k or 0 for p in params], 0),
        ("top_p", [p.top_p for p in params], 1.0),
        ("uniform", list(rows.uniforms), 0.0),
    )


def again(function: Callable) -> Callable[[], object]:
    """A recorder without a graph."""
    return function


def cuda_recorder(pool: object | None = None) -> Callable[[Callable], Callable[[], object]]:
    """Captures into CUDA graphs that share one memory pool."""
    state = {"pool": pool}

    def record(function: Callable) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=state["pool"]):
            function()
        state["pool"] = graph.pool()
        return graph.replay

    return record
