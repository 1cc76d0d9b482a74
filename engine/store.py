"""The reader's side of a run: applies TraceDeltas, keeps them within a byte bound, hands out Trace snapshots.

Buffers grow by doubling and are never written twice, so a snapshot is a handful of slices. Each apply() publishes
the next one whole, so that readers on other threads never see half of a delta. Past the bound the oldest half is
thinned to the steps that matter (somebody joined, read its prompt, finished or was preempted, or the step failed);
what stays too large is dropped, oldest first. Step ids are never reused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from engine.artifacts import Ceilings, KernelCard, KernelRun, LadderRun, StepProfile, TileTrace, Timeline, TrafficRun
from engine.trace import TABLES, Comparison, KernelReport, SequenceInfo, StepError, TensorSample, Trace, TraceDelta

ARTIFACT_BYTES = 64 * 2**20  # budget for probed arrays and tile traces together
MAX_COMPARISONS = 4  # the newest; each may take half a megabyte of a recording's manifest
NEWEST = {  # so many of a kind are kept
    Comparison: MAX_COMPARISONS, KernelReport: 200, KernelCard: 100, KernelRun: 200, TileTrace: 24, TrafficRun: 100, StepProfile: 32,
    Ceilings: 4, Timeline: 12, LadderRun: 8,
}  # fmt: skip
_TOKEN_BYTES = TABLES["tokens"].itemsize + TABLES["texts"].itemsize + 8  # and the text itself, about


def _size(artifact: object) -> int:
    """Bytes of an artifact that has arrays."""
    if isinstance(artifact, TensorSample):
        return artifact.values.nbytes
    if isinstance(artifact, TileTrace):
        return sum(getattr(artifact, name).nbytes for name in ("tiles", "m", "l", "rescale", "row_tiles", "acc", "scores", "plain"))
    if isinstance(artifact, Timeline):
        return artifact.host.nbytes + artifact.kernels.nbytes + artifact.steps.nbytes
    return 0


class _Column:
    """A growing array. `view()` is a read-only slice that later growth does not touch."""

    def __init__(self, dtype: np.dtype) -> None:
        self._data = np.zeros(256, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def append(self, rows: np.ndarray) -> None:
        size = self._size + len(rows)
        if size > len(self._data):
            grown = np.zeros(max(size, 2 * len(self._data)), self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : size] = rows
        self._size = size

    def view(self) -> np.ndarray:
        return self._data[: self._size]

    def replace(self, rows: np.ndarray) -> None:
        self._data, self._size = np.concatenate([rows, np.zeros(256, rows.dtype)]), len(rows)

    @property
    def nbytes(self) -> int:
        return self._size * self._data.dtype.itemsize


class TraceStore:
    """One room's records.

    Args:
        max_bytes: bound of the tables.
        piece: token id -> the text to show for it; None leaves token texts to the caller.
        meta: facts that every snapshot carries.
    """

    def __init__(self, max_bytes: int, piece: Callable[[int], str] | None = None, meta: Mapping[str, object] | None = None) -> None:
        self.max_bytes = max_bytes
        self.version = 0
        self._piece = piece
        self._meta = dict(meta or {})
        self._columns = {name: _Column(dtype) for name, dtype in TABLES.items()}
        self._sequences: dict[int, SequenceInfo] = {}
        self._token_texts: dict[int, str] = {}
        self._artifacts: list[object] = []
        self._errors: list[StepError] = []
        self._configs: list[Mapping[str, object]] = []
        self._event_base = 0
        self._text_base = 0
        self._snapshot = self._take()

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def apply(self, delta: TraceDelta) -> None:
        """Take new rows. Called by one thread; snapshots may be taken by others."""
        for name, rows in delta.tables.items():
            self._columns[name].append(rows)
        if delta.sequences:
            self._sequences = {**self._sequences, **{info.seq_id: info for info in delta.sequences}}
        self._configs += delta.configs
        self._errors = (self._errors + list(delta.errors))[-1000:]
        self._keep_artifacts(delta.artifacts)
        self._name_tokens(delta)
        self._meta.update(delta.meta)
        if self.nbytes > self.max_bytes:
            self._evict()
        self._snapshot = self._take()
        self.version += 1

    def snapshot(self) -> Trace:
        """The records as they were after the last delta; never changes."""
        return self._snapshot

    def _take(self) -> Trace:
        tables = {name: column.view() for name, column in self._columns.items()}
        meta = {**self._meta, "configs": tuple(self._configs), "event_base": self._event_base, "text_base": self._text_base}
        return Trace(tables, self._sequences, self._token_texts, meta, tuple(self._artifacts), tuple(self._errors))

    def _name_tokens(self, delta: TraceDelta) -> None:
        if self._piece is None:
            return
        ids = {i for info in delta.sequences for i in info.prompt_token_ids}
        tokens = delta.tables.get("tokens")
        if tokens is not None and len(tokens):
            ids.update(tokens["token_id"].tolist())
            ids.update(tokens["top_ids"].ravel().tolist())
        new = ids - self._token_texts.keys()
        if new:  # snapshots share the old one
            self._token_texts = self._token_texts | {token_id: self._piece(token_id) for token_id in sorted(new)}

    def _keep_artifacts(self, artifacts: tuple[object, ...]) -> None:
        if not artifacts:
            return
        kept, used, counts, ladders = [], 0, Counter(), set()
        for artifact in reversed([*self._artifacts, *artifacts]):  # the newest arrays that fit the budget
            kind, size = type(artifact), _size(artifact)
            if kind is LadderRun:
                if artifact.key in ladders:  # an earlier state of one that went on
                    continue
                ladders.add(artifact.key)
            used += size
            counts[kind] += 1
            if not (size and used > ARTIFACT_BYTES) and counts[kind] <= NEWEST.get(kind, counts[kind]):
                kept.append(artifact)
        self._artifacts = kept[::-1]

    # ---- the bound ----

    def _evict(self) -> None:
        steps = self._columns["steps"].view()["step_id"].copy()
        middle = steps[len(steps) // 2]
        self._keep_steps(steps[(steps >= middle) | np.isin(steps, self._special())])
        while self.nbytes > 0.8 * self.max_bytes and len(self._columns["steps"]) > 1:
            steps = self._columns["steps"].view()["step_id"].copy()
            self._drop_before(len(steps) // 2)

    def _special(self) -> np.ndarray:
        """Steps in which something happened to somebody, apart from one more token."""
        works = self._columns["works"].view()
        joins = works[(works["num_cached"] > 0) | (works["start"] == 0) | (works["samples"] == 0)]
        ids = [joins["step_id"], *(self._columns[name].view()["step_id"] for name in ("preempts", "finishes"))]
        return np.unique(np.concatenate([*ids, np.array([e.step_id for e in self._errors], np.int32)]))

    def _drop_before(self, index: int) -> None:
        """Forget every step before this one, and what only they needed."""
        steps = self._columns["steps"].view()["step_id"].copy()
        self._meta["computed_before"] = {str(i): n for i, n in self._take().computed_at(int(steps[index - 1])).items()}
        self._keep_steps(steps[index:])
        self._drop_log()
        self._drop_texts()
        tables = ("works", "waits", "tokens", "preempts", "finishes", "texts")
        kept = {int(i) for name in tables for i in np.unique(self._columns[name].view()["seq_id"])}
        kept |= {int(i) for i in np.unique(self._columns["preempts"].view()["for_seq_id"])}
        newest = max(self._sequences, default=0)  # those that have not run yet
        self._sequences = {i: info for i, info in self._sequences.items() if i in kept or i > newest - 1000}

    def _keep_steps(self, step_ids: np.ndarray) -> None:
        """Drop rows of every other step. Tokens and texts stay as long as their sequence's newest step does, unless
        the old ones of living sequences alone would fill the ring."""
        first = int(step_ids[0]) if len(step_ids) else 0
        for name in ("steps", "works", "waits", "preempts", "finishes"):
            rows = self._columns[name].view()
            self._columns[name].replace(rows[np.isin(rows["step_id"], step_ids)])
        tokens = self._columns["tokens"].view()
        live = np.unique(tokens["seq_id"][tokens["step_id"] >= first])
        old = np.isin(tokens["seq_id"], live) & (tokens["step_id"] < first)
        if 2 * np.count_nonzero(old) * _TOKEN_BYTES > self.max_bytes:
            live = live[:0]
        for name in ("tokens", "texts"):
            rows = self._columns[name].view()
            self._columns[name].replace(rows[np.isin(rows["seq_id"], live) | (rows["step_id"] >= first)])

    def _drop_log(self) -> None:
        """Forget events before the last keyframe that the oldest kept step needs."""
        end = self._columns["steps"].view()["event_end"][0]
        frames = self._columns["keyframes"].view()
        usable = frames["event_at"][frames["event_at"] <= end]
        if len(usable):
            at = int(usable[-1])
            self._columns["events"].replace(self._columns["events"].view()[at - self._event_base :])
            self._columns["keyframes"].replace(frames[frames["event_at"] >= at])
            self._event_base = at

    def _drop_texts(self) -> None:
        """Forget text that nobody refers to; what is left keeps its offsets."""
        texts = self._columns["texts"].view()
        start = int(texts["offset"].min()) if len(texts) else self._text_base + len(self._columns["text_bytes"])
        self._columns["text_bytes"].replace(self._columns["text_bytes"].view()[start - self._text_base :])
        self._text_base = start
