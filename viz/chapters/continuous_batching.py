"""Continuous batching: requests share each step, leave when they are done and join while others write."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, Said, TryThis
from viz.moments import all_write, begun, chunks, computed, ended, going_on, last_chunk, names, reading, writing

# ---- three together ----


def _together(trace: Trace, step: int) -> Mapping[str, object]:
    rows = computed(trace, step)
    return {"who": names(trace, rows["seq_id"]), "n": int(rows["num_tokens"].sum())}


def _first_out(trace: Trace, step: int) -> Mapping[str, object]:
    rest = going_on(trace, step)["seq_id"]
    return {"who": names(trace, ended(trace, step)), "others": names(trace, rest), "n": len(rest)}


# ---- one comes while others write ----


def _joiner(trace: Trace, step: int) -> np.void | None:
    """Who began in this step beside others that write, and has more of its prompt to read than one token."""
    rows, left = begun(trace, step), reading(trace, step, left=2)["seq_id"]
    rows = rows[np.isin(rows["seq_id"], left)]
    return rows[0] if len(rows) and len(_others(trace, step)) else None


def _others(trace: Trace, step: int) -> np.ndarray:
    """seq_ids that write and go on."""
    ids = going_on(trace, step)["seq_id"]
    return ids[np.isin(ids, writing(trace, step)["seq_id"])]


def _joined(trace: Trace, step: int) -> Mapping[str, object]:
    who, budget = _joiner(trace, step)["seq_id"], int(trace.step(step).step["token_budget"])
    return {"who": names(trace, [who]), "others": names(trace, _others(trace, step)), "budget": budget}


def _most(trace: Trace, step: int) -> np.ndarray:
    rows = computed(trace, step)
    return rows[rows["num_tokens"] == rows["num_tokens"].max(initial=0)]


def _shares(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    rows, most = computed(trace, decided), _most(trace, decided)
    return {"who": names(trace, most["seq_id"]), "n": int(most["num_tokens"][0]), "total": int(rows["num_tokens"].sum())}


def _chunked(trace: Trace, step: int) -> Mapping[str, object]:
    who = int(last_chunk(trace, step)["seq_id"])
    rows = chunks(trace, who, step)
    given = trace.rows("tokens", int(rows["step_id"][0]), step)
    first = computed(trace, int(rows["step_id"][0]))["seq_id"]
    return {
        "who": names(trace, [who]),
        "n": int(rows["num_tokens"].sum()),
        "steps": len(rows),
        "given": Said("tokens", {"n": int(np.count_nonzero(given["seq_id"] != who))}),
        "others": names(trace, first[first != who]),
    }


_OWN = "chapter.continuous_batching."

WORDS = {
    f"{_OWN}title": "Continuous batching",
    f"{_OWN}question": "Why does a short question not wait for a long one?",
    f"{_OWN}together": "One step computes {who} together: {n:,} tokens in one pass through the model.",
    f"{_OWN}write": "Now each of them gets one token a step, each at its own place in its own text.",
    f"{_OWN}write.ask": "Click the request that will finish first.",
    f"{_OWN}write.reveal": "First out: {who}, in step {step:,}.",
    f"{_OWN}out": (
        "{who} left the batch at once, and somebody else may take the slot. The other one writes on: {others}.",
        "{who} left the batch at once, and somebody else may take the slot. The other {n:,} write on: {others}.",
    ),
    f"{_OWN}out.try": "Set max_num_seqs to 2: there are two slots, and the third request waits until one is free.",
    f"{_OWN}join": "{who} joined in the middle of the others' answers ({others}). They did not have to end first.",
    f"{_OWN}join.ask": "A step has room for {budget:,} tokens. Click the request that gets most of the next step.",
    f"{_OWN}join.reveal": "{who} got {n:,} of the {total:,} tokens. Whoever writes was served first, with one token.",
    f"{_OWN}chunks": "{who}'s {n:,} prompt tokens were spread over {steps:,} steps. Meanwhile the others wrote {given}.",
    f"{_OWN}static": "In static batches {who} would have waited: {others} sat in a batch that had to end first.",
    f"{_OWN}static.try": "Set batching to static: whoever comes later waits for the end of the running batch.",
}

CHAPTER = Chapter(
    name="continuous_batching",
    order=20,
    preset="ragged",
    beats=(
        Beat(
            f"{_OWN}together", ("batching", "tokens"), preset="ragged",
            until=lambda trace, step: len(computed(trace, step)) >= 2,
            fields=_together,
        ),
        Beat(
            f"{_OWN}write", ("batching", "tokens"), until=all_write,
            predict=Predict(
                f"{_OWN}write.ask", ("seq",),
                lambda trace, asked, decided: frozenset(f"seq:{i}" for i in ended(trace, decided)),
                f"{_OWN}write.reveal",
                until=lambda trace, asked, step: bool(ended(trace, step)),
                found=lambda trace, asked, decided: {"who": names(trace, ended(trace, decided)), "step": decided},
            ),
        ),
        Beat(
            f"{_OWN}out", ("batching", "tokens"),
            until=lambda trace, step: bool(ended(trace, step)) and len(going_on(trace, step)) > 0,
            fields=_first_out,
            try_this=TryThis(f"{_OWN}out.try", "max_num_seqs", 2),
        ),
        Beat(
            f"{_OWN}join", ("batching", "tokens"), preset="long",
            until=lambda trace, step: _joiner(trace, step) is not None,
            select=lambda trace, step: f"seq:{int(_joiner(trace, step)['seq_id'])}",
            fields=_joined,
            predict=Predict(
                f"{_OWN}join.ask", ("seq",),
                lambda trace, asked, decided: frozenset(f"seq:{int(i)}" for i in _most(trace, decided)["seq_id"]),
                f"{_OWN}join.reveal", fields=_joined, found=_shares,
            ),
        ),
        Beat(
            f"{_OWN}chunks", ("batching", "tokens"),
            until=lambda trace, step: last_chunk(trace, step) is not None,
            select=lambda trace, step: f"seq:{int(last_chunk(trace, step)['seq_id'])}",
            fields=_chunked,
        ),
        Beat(
            f"{_OWN}static", ("batching",),
            until=lambda trace, step: last_chunk(trace, step) is not None,
            fields=_chunked,
            try_this=TryThis(f"{_OWN}static.try", "batching", "static"),
            compare=("batching", "continuous", "static"),
        ),
    ),
    words=WORDS,
)  # fmt: skip
