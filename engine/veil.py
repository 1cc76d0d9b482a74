"""A Trace in which the texts of some requests cannot be read: what a host hid from everybody in the room.

Nothing else changes: lengths, steps, blocks and clocks stay as they were, so every view still tells the truth about
them. Token ids of a hidden sequence become HIDDEN, its prompt a sentence; the alternatives that were considered and
whatever was probed go too. What is left cannot be turned back into the text, also not in a saved recording.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from engine.artifacts import TileTrace
from engine.trace import TABLES, SequenceInfo, TensorSample, Trace

HIDDEN = 2**31 - 1  # a token id beyond every vocabulary
MARK = "▒"
SENTENCE = "hidden by the host"


def veiled(trace: Trace, requests: Collection[int]) -> Trace:
    """The same run without the prompts and outputs of these requests (by request_id)."""
    if not requests:
        return trace
    hidden = {i for i, info in trace.sequences.items() if info.request_id in requests}
    content = _text_bytes(trace, hidden)
    if not hidden and np.array_equal(content, trace.text_bytes):
        return trace
    tables = {name: _table(getattr(trace, name), hidden) for name in TABLES} | {"text_bytes": content}
    sequences = {i: _sequence(info) if i in hidden else info for i, info in trace.sequences.items()}
    looks = (TensorSample, TileTrace)
    artifacts = tuple(a for a in trace.artifacts if not isinstance(a, looks) or _is_visible(trace, a.step_id, hidden))
    used = {t for info in sequences.values() for t in info.prompt_token_ids}
    used |= {int(t) for name in ("token_id", "top_ids") for t in np.unique(tables["tokens"][name])}
    words = {i: text for i, text in trace.token_texts.items() if i in used} | {HIDDEN: MARK}
    return Trace(tables, sequences, words, trace.meta, artifacts, trace.errors)


def _sequence(info: SequenceInfo) -> SequenceInfo:
    return replace(info, prompt=SENTENCE, prompt_token_ids=(HIDDEN,) * info.num_prompt_tokens, stop=(), stop_token_ids=())


def _table(rows: np.ndarray, hidden: set[int]) -> np.ndarray:
    """Rows with the token ids of hidden sequences replaced, in whatever columns the table keeps them."""
    names = [n for n in rows.dtype.names or () if n in ("token_id", "token_ids", "top_ids")]
    if not names or "seq_id" not in rows.dtype.names:
        return rows
    rows = rows.copy()
    mine = np.isin(rows["seq_id"], list(hidden))
    for name in names:
        rows[name][mine] = HIDDEN
    return rows


def _is_visible(trace: Trace, step_id: int, hidden: set[int]) -> bool:
    """Whether all that a step computed may be seen. A step whose works were dropped may have computed anything."""
    works = trace.rows("works", step_id, step_id)
    return len(works) > 0 and not np.isin(works["seq_id"], list(hidden)).any()


def _text_bytes(trace: Trace, hidden: set[int]) -> np.ndarray:
    """As many bytes, "." but for the texts that may be seen. A full ring (engine/store.py) drops rows of texts and keeps
    bytes that lie between others, so what no row claims may be anybody's."""
    rows = trace.texts[~np.isin(trace.texts["seq_id"], list(hidden))]
    num_bytes, starts = len(trace.text_bytes), rows["offset"] - int(trace.meta.get("text_base", 0))
    depth = np.zeros(num_bytes + 1, np.int64)  # how many ranges cover a byte, as differences
    np.add.at(depth, np.clip(starts, 0, num_bytes), 1)
    np.add.at(depth, np.clip(starts + rows["num_bytes"], 0, num_bytes), -1)
    return np.where(np.cumsum(depth[:-1]) > 0, trace.text_bytes, np.uint8(ord(".")))
