"""Decode steps as CUDA graphs: one captured launch for a batch size, replayed with new numbers in fixed buffers.

A decode step is one in which every sequence computes one token and gets one. It takes the smallest captured size that
holds it; rows behind the last sequence are padding: row slot 0, no keys, nothing written, nobody reads their token.
What a step needs goes to the device in one copy (`Inbox`), its block tables as changes to a table that stays there
by row slot. Sampling, log-probabilities and the newest token of each row are inside the graph.

Sizes are captured between steps (`capture_next`); until then, and for steps that do not fit, the runner runs eagerly
with the same kernels. Knows no requests; does not decide when a step may use a graph beyond its shape.

Several steps of a cohort (engine/steady.py) may go in one launch: between two replays a second, tiny graph (`advance`) moves
positions, slots and lengths on, and stops rows that drew a stop id or their last token: they write nothing more.

A recorder (cuda_recorder) makes a replay of a function; `again` is one that just runs it, so that padding, packing and
table changes are tested on a CPU. Rejected: a graph for each exact batch size (capture time and memory for nothing), copying whole
block tables every step (0.5 MB at 256 sequences).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.batch import Batch, HostBatch, SteadyHost
from engine.errors import reason_of
from engine.sampler import SampleRows

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
MOST_STEPS = 8  # of a launch
STOPS = 4  # stop ids that the device knows of a row; the host knows all
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
    wanted += [("stops", np.dtype(np.int64), size * STOPS), ("left", np.dtype(np.int64), size), ("tick", np.dtype(np.int64), 1)]
    wanted += [("later", np.dtype(np.float64), size * (MOST_STEPS - 1))]  # uniforms of the steps after the first
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

    def note(self, at: np.ndarray, to: np.ndarray) -> None:
        """These entries (flat index, page) are sent by somebody else."""
        self._known.reshape(-1)[at] = to

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
    advance: Callable[[], object] | None = None
    keep: Callable | None = None
    packed: torch.Tensor | None = None


class DecodeGraphs:
    """The captured sizes of one runner.

    Args:
        forward: the step on the device.
        rows: row slots that have a place on the device; a step with a higher one runs eagerly.
        width: pages of the longest sequence.
        largest: most sequences of a step.
        record: captures a function, (function) -> replay.
        page_size: tokens a page.
    """

    def __init__(
        self, forward: Forward, device: torch.device, rows: int, width: int, largest: int,
        record: Callable[[Callable], Callable[[], object]], page_size: int = 16,
    ) -> None:  # fmt: skip
        self._page_size = page_size
        self._seen: tuple[object, int] = (None, 0)  # members and step of the cohort whose tables the device has
        self.last_token: torch.Tensor | None = None  # int64 [row slots]; with it, launches of several steps are captured too
        self.checks = False  # compare what the device moved on with what the host says (waits for it)
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

    def size_for(self, host: HostBatch | SteadyHost) -> int | None:
        """The captured size for a step; None if it is no decode step or none is large enough."""
        n = len(host.rows)
        if n == 0 or host.num_tokens != n or len(host.logits_rows) != n or int(host.rows.max()) >= self._rows:
            return None
        return next((size for size in self.sizes if size >= n), None)

    def run(self, size: int, host: HostBatch | SteadyHost, rows: SampleRows) -> torch.Tensor:
        """One step on the device: its packed results [n, columns], until the next replay. Whoever wants them later copies them
        on the same stream: other rooms' steps may be launched before this one is settled."""
        (packed,) = self.run_several(size, [host], [rows])
        return packed

    def run_several(self, size: int, hosts: list[HostBatch | SteadyHost], rows: list[SampleRows]) -> Iterator[torch.Tensor]:
        """As run(), for steps of one cohort, the first of which decides who takes part: rows of those who are no longer members
        stay, and say nothing. Each result is to be copied before the next is asked for."""
        try:
            self._send(size, hosts, rows)
            graph = self._graphs[size]
            for step, host in enumerate(hosts):
                if step:
                    graph.advance()
                    if self.checks:
                        self._check(graph, hosts[0], host)
                graph.replay()
                yield graph.packed[: len(hosts[0].rows)]
        except Exception:
            self.tables.forget()  # what was counted as sent may not have been
            self._seen = (None, 0)
            raise

    def _send(self, size: int, hosts: list[HostBatch | SteadyHost], rows: list[SampleRows]) -> None:
        graph, host, n = self._graphs[size], hosts[0], len(hosts[0].rows)
        at, to = self._changes(hosts)
        if len(at) > 2 * size:
            self.tables.write(at, to)
            at, to = at[:0], to[:0]
        box = graph.inbox.next()
        for name in ("token_ids", "from_row", "positions", "slot_mapping", "rows", "seq_lens"):
            box[name][:n] = getattr(host, name)
            box[name][n:] = -1 if name == "slot_mapping" else 0
        box["change_at"][: len(at)], box["change_at"][len(at) :] = at, 0  # entry 0 belongs to row slot 0, which nobody reads
        box["change_to"][: len(to)], box["change_to"][len(to) :] = to, 0
        if not (rows[0].all_greedy and graph.inbox.is_greedy):
            for name, values, neutral in sampling_arrays(rows[0]):
                box[name][:n], box[name][n:] = values, neutral
            graph.inbox.is_greedy = rows[0].all_greedy
        if len(hosts) > 1:
            _fill_later(box, size, hosts, rows)
        graph.inbox.send()

    def _changes(self, hosts: list[HostBatch | SteadyHost]) -> tuple[np.ndarray, np.ndarray]:
        """(flat index, page) of what the device's tables lack. A cohort that goes on where it was knows it."""
        found = []
        for host in hosts:
            if not isinstance(host, SteadyHost):
                self._seen = (None, 0)
                return self.tables.changes(host.rows, host.block_table)
            if self._seen != (host.members, host.ahead - 1) and not found:
                found.append(self.tables.changes(host.rows, host.block_table))
            elif host.new_pages is not None:
                places, columns, pages = host.new_pages
                at = host.rows[places] * self.tables.width + columns
                self.tables.note(at, pages)
                found.append((at, pages.astype(np.int64)))
            self._seen = (host.members, host.ahead)
        if len(found) == 1:
            return found[0]
        none = np.zeros(0, np.int64)
        return tuple(np.concatenate([none, *(part[i] for part in found)]) for i in (0, 1))

    def _check(self, graph: _Graph, first: SteadyHost, host: SteadyHost) -> None:
        """Raises AssertionError unless every row that the device still runs is where the host says."""
        box = {name: graph.inbox.device[name].cpu().numpy() for name in ("positions", "slot_mapping", "seq_lens")}
        of = np.flatnonzero(np.isin(first.members.seq_ids, host.members.seq_ids))
        runs = box["seq_lens"][of] > 0
        assert not np.delete(box["seq_lens"], of).any(), "the device runs a row that has ended"
        for name in box:
            assert (box[name][of][runs] == getattr(host, name)[runs]).all(), f"{name}: the device says otherwise than the host"

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

        def advance() -> None:
            advance_inbox(box, self.last_token, self.tables.device, self._page_size)

        if self.last_token is not None:
            advance()
            graph.advance = self._record(advance)
            graph.keep = advance
        return graph


def advance_inbox(box: dict[str, torch.Tensor], last_token: torch.Tensor, tables: torch.Tensor, page_size: int) -> None:
    """In place: what the next step of the same rows reads. Nothing in it asks the host.

    A row goes on unless its newest token is one of its stops or was its last: then it has no keys and no slot, as padding.
    """
    size = len(box["rows"])
    newest = last_token.index_select(0, box["rows"])
    stopped = (box["stops"].view(size, STOPS) == newest[:, None]).any(dim=1)
    box["left"].sub_(1)
    runs = (box["seq_lens"] > 0) & (box["left"] > 0) & ~stopped
    box["positions"].copy_(torch.where(runs, box["positions"] + 1, 0))  # a row that has ended would run out of the rotary tables
    page = tables.index_select(0, box["rows"]).gather(1, (box["positions"] // page_size)[:, None])[:, 0]
    box["slot_mapping"].copy_(torch.where(runs, page.long() * page_size + box["positions"] % page_size, -1))
    box["seq_lens"].copy_(torch.where(runs, box["seq_lens"] + 1, 0))
    box["from_row"].fill_(1)
    box["uniform"].copy_(box["later"].view(MOST_STEPS - 1, size).index_select(0, box["tick"])[0])
    box["tick"].add_(1).clamp_(max=MOST_STEPS - 2)


def _fill_later(box: dict[str, np.ndarray], size: int, hosts: list[SteadyHost], rows: list[SampleRows]) -> None:
    """What advance_inbox reads of the steps after the first."""
    first, n = hosts[0].members, len(hosts[0].rows)
    box["stops"].reshape(size, STOPS)[:n] = first.stops[:, :STOPS]
    box["stops"].reshape(size, STOPS)[n:] = -1
    box["left"][:n] = sum(np.isin(first.seq_ids, host.members.seq_ids) for host in hosts)
    box["left"][n:] = 0
    box["tick"][0] = 0
    if not rows[0].all_greedy:
        later = box["later"].reshape(MOST_STEPS - 1, size)
        for step, (host, drawn) in enumerate(zip(hosts[1:], rows[1:], strict=True)):
            later[step, :n][np.isin(first.seq_ids, host.members.seq_ids)] = drawn.uniforms


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
