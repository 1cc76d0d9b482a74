"""A Trace in which the texts of some requests cannot be read: what a host hid from everybody in the room.

Nothing else changes: lengths, steps, blocks and clocks stay as they were, so every view still tells the truth about
them. Token ids of a hidden sequence become HIDDEN, its prompt a sentence; the alternatives that were considered and
whatever was probed go too. What is left cannot be turned back into the text, also not in a saved recording.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from engine.trace import TABLES, SequenceInfo, TensorSample, Trace

HIDDEN = 2**31 - 1  # a token id beyond every vocabulary
MARK = "▒"
SENTENCE = "hidden by the host"


def veiled(trace: Trace, requests: Collection[int]) -> Trace:
    """The same run without the prompts and outputs of these requests (by request_id)."""
    hidden = {i for i, info in trace.sequences.items() if info.request_id in requests}
    if not hidden:
        return trace
    tables = {name: _table(getattr(trace, name), hidden) for name in TABLES if name not in ("texts", "text_bytes")}
    tables["texts"], tables["text_bytes"] = _texts(trace, hidden)
    sequences = {i: _sequence(info) if i in hidden else info for i, info in trace.sequences.items()}
    steps = set(trace.works["step_id"][np.isin(trace.works["seq_id"], list(hidden))].tolist())
    artifacts = tuple(a for a in trace.artifacts if not (isinstance(a, TensorSample) and a.step_id in steps))
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


def _texts(trace: Trace, hidden: set[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden texts become as many bytes of "."."""
    rows, content = trace.texts, trace.text_bytes.copy()
    starts = rows["offset"] - int(trace.meta.get("text_base", 0))
    for at in np.flatnonzero(np.isin(rows["seq_id"], list(hidden))).tolist():
        content[starts[at] : starts[at] + rows["num_bytes"][at]] = ord(".")
    return rows, content
