"""The reader's side of a run: applies TraceDeltas, keeps them within a byte bound, hands out Trace snapshots.

Buffers grow by doubling and are never written twice, so a snapshot is a handful of slices. Past the bound the
oldest half is thinned to the steps that matter (somebody joined, finished or was preempted, or the step
failed); what stays too large is dropped, oldest first. Step ids are never reused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from engine.trace import TABLES, SequenceInfo, StepError, TensorSample, Trace, TraceDelta

ARTIFACT_BYTES = 64 * 2**20  # budget for probed arrays


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
        self.version += 1

    def snapshot(self) -> Trace:
        """The records as they are now; never changes."""
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
        for token_id in ids - self._token_texts.keys():
            self._token_texts[token_id] = self._piece(token_id)

    def _keep_artifacts(self, artifacts: tuple[object, ...]) -> None:
        self._artifacts += artifacts
        probed = [a for a in self._artifacts if isinstance(a, TensorSample)]
        used = sum(a.values.nbytes for a in probed)
        for oldest in probed:
            if used <= ARTIFACT_BYTES:
                break
            self._artifacts.remove(oldest)
            used -= oldest.values.nbytes

    # ---- the bound ----

    def _evict(self) -> None:
        steps = self._columns["steps"].view()
        middle = int(steps["step_id"][len(steps) // 2])
        special = {int(i) for name in ("preempts", "finishes") for i in self._columns[name].view()["step_id"]}
        special |= {e.step_id for e in self._errors}
        works = self._columns["works"].view()
        joins = works[(works["num_cached"] > 0) | (works["start"] == 0)]
        special |= set(joins["step_id"].tolist())
        keep = np.array([int(i) >= middle or int(i) in special for i in steps["step_id"]])
        self._keep_steps(steps["step_id"][keep])
        if self.nbytes > 0.8 * self.max_bytes:
            steps = self._columns["steps"].view()
            self._keep_steps(steps["step_id"][len(steps) // 2 :])
            self._drop_log()

    def _keep_steps(self, step_ids: np.ndarray) -> None:
        """Drop rows of every other step. Tokens and texts stay as long as their sequence's newest step does."""
        first = int(step_ids[0]) if len(step_ids) else 0
        for name in ("steps", "works", "waits", "preempts", "finishes"):
            rows = self._columns[name].view()
            self._columns[name].replace(rows[np.isin(rows["step_id"], step_ids)])
        tokens = self._columns["tokens"].view()
        live = np.unique(tokens["seq_id"][tokens["step_id"] >= first])
        for name in ("tokens", "texts"):
            rows = self._columns[name].view()
            self._columns[name].replace(rows[np.isin(rows["seq_id"], live)])

    def _drop_log(self) -> None:
        """Forget events before the last keyframe that the oldest kept step needs, and text nobody refers to."""
        steps, frames = self._columns["steps"].view(), self._columns["keyframes"].view()
        if not len(steps):
            return
        usable = frames["event_at"][frames["event_at"] <= steps["event_end"][0]]
        if len(usable):
            at = int(usable.max())
            self._columns["events"].replace(self._columns["events"].view()[at - self._event_base :])
            self._columns["keyframes"].replace(frames[frames["event_at"] >= at])
            self._event_base = at
        texts = self._columns["texts"].view()
        start = int(texts["offset"].min()) if len(texts) else self._text_base + len(self._columns["text_bytes"])
        self._columns["text_bytes"].replace(self._columns["text_bytes"].view()[start - self._text_base :])
        self._text_base = start
        kept = {int(i) for i in np.unique(self._columns["works"].view()["seq_id"])}
        kept |= {int(i) for i in np.unique(self._columns["waits"].view()["seq_id"])}
        newest = max(self._sequences, default=0)
        self._sequences = {i: info for i, info in self._sequences.items() if i in kept or i > newest - 1000}
