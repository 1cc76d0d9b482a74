"""The super-sequence: tokens of all requests lie end to end in one pass, and a mask keeps them apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, TryThis
from viz.moments import all_write, begun, computed, end_of, going_on, last_chunk, long_prompt, longest, names, work_of

# ---- prompts end to end ----


def _ragged(trace: Trace, step: int) -> bool:
    """Two prompts or more begin in one step, and not all are equally long."""
    return len(set(begun(trace, step)["num_tokens"].tolist())) >= 2


def _end_to_end(trace: Trace, step: int) -> Mapping[str, object]:
    rows = begun(trace, step)["num_tokens"]
    return {"count": len(rows), "n": int(rows.sum()), "longest": int(rows.max()), "padded": int(rows.max()) * len(rows)}


def _shortest(trace: Trace, step: int) -> int | None:
    """Of those that go on, beside others in the step, the one with fewest rows."""
    rows = going_on(trace, step)
    if not len(rows) or len(computed(trace, step)) < 2:
        return None
    return int(rows["seq_id"][np.argmin(rows["num_tokens"])])


def _asks_shortest(trace: Trace, step: int) -> Mapping[str, object]:
    return {"who": names(trace, [_shortest(trace, step)])}


def _visible(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    """Rows of the step that was asked about whose keys the next token saw."""
    seq_id = _shortest(trace, asked)
    return frozenset(f"query:{seq_id}:{p}" for p in range(int(work_of(trace, decided, seq_id)["start"])))


def _saw(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    seq_id = _shortest(trace, asked)
    return {"who": names(trace, [seq_id]), "n": end_of(work_of(trace, decided, seq_id))}


def _one_row_each(trace: Trace, step: int) -> Mapping[str, object]:
    rows = computed(trace, step)
    work = longest(rows)
    return {"count": len(rows), "who": names(trace, [work["seq_id"]]), "n": int(work["start"])}


# ---- a chunk beside single tokens ----


def _mixed(trace: Trace, step: int) -> Mapping[str, object]:
    work = long_prompt(trace, step)
    total = int(computed(trace, step)["num_tokens"].sum())
    return {"who": names(trace, [work["seq_id"]]), "n": int(work["num_tokens"]), "total": total}


def _without_token(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    """The rows, in the step that was asked about, of those who get none; who joined after it has no rows there."""
    rows = computed(trace, decided)
    works = [work_of(trace, asked, i) for i in rows["seq_id"][rows["samples"] == 0].tolist()]
    return frozenset(f"query:{int(w['seq_id'])}:{p}" for w in works if w is not None for p in range(end_of(w)))


def _silent(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    rows = computed(trace, decided)
    return {"who": names(trace, rows["seq_id"][rows["samples"] == 0]), "n": int(rows["num_tokens"][rows["samples"] == 0].sum())}


def _complete(trace: Trace, step: int) -> Mapping[str, object]:
    work = last_chunk(trace, step)
    budget = int(trace.step(step).step["token_budget"])
    return {"who": names(trace, [work["seq_id"]]), "n": end_of(work), "budget": budget}


_OWN = "chapter.super_sequence."

WORDS = {
    f"{_OWN}title": "One super-sequence and its mask",
    f"{_OWN}question": "How can prompts of different lengths go through the model together, without padding?",
    f"{_OWN}end_to_end": "{count:,} prompts lie end to end: {n:,} rows. Padded to {longest:,} tokens each they would need {padded:,}.",
    f"{_OWN}mask": "The mask keeps them apart. A token sees its own request, up to itself, and nothing else.",
    f"{_OWN}mask.ask": "Each row is also a key for later tokens. Click a row that {who}'s next token may see.",
    f"{_OWN}mask.reveal": "{who}'s next token saw {n:,} keys: all of its own request, itself included, and no other.",
    f"{_OWN}rows": (
        "Now {count:,} requests bring one row each. {who}'s row sees itself and {n:,} key from the cache.",
        "Now {count:,} requests bring one row each. {who}'s row sees itself and {n:,} keys from the cache.",
    ),
    f"{_OWN}mixed": "{total:,} rows in one pass: {n:,} of {who}'s long prompt, beside single tokens of those who write.",
    f"{_OWN}mixed.ask": "Click a row of a request that gets no new token from the next step.",
    f"{_OWN}mixed.reveal": "{who}: {n:,} more rows of its prompt, but not the last one. Only the last row says what comes next.",
    f"{_OWN}complete": "{who}'s prompt ends here. Its last row sees all {n:,} tokens and gives the first new one.",
    f"{_OWN}complete.try": "Set max_num_batched_tokens to 256: a step takes more rows, so the prompt needs fewer chunks.",
    f"{_OWN}unchunked": "Without chunks {who}'s {n:,} tokens do not fit into a step of {budget:,}: it waits until nobody else computes.",
}

CHAPTER = Chapter(
    name="super_sequence",
    order=30,
    preset="ragged",
    beats=(
        Beat(f"{_OWN}end_to_end", ("mask", "tokens"), preset="ragged", until=_ragged, fields=_end_to_end),
        Beat(
            f"{_OWN}mask", ("mask", "tokens"),
            until=lambda trace, step: _shortest(trace, step) is not None,
            predict=Predict(
                f"{_OWN}mask.ask", ("query",), _visible, f"{_OWN}mask.reveal", fields=_asks_shortest,
                until=lambda trace, asked, step: work_of(trace, step, _shortest(trace, asked)) is not None,
                found=_saw,
            ),
        ),
        Beat(
            f"{_OWN}rows", ("mask", "kv_cache"), until=all_write,
            select=lambda trace, step: f"seq:{int(longest(computed(trace, step))['seq_id'])}",
            fields=_one_row_each,
        ),
        Beat(
            f"{_OWN}mixed", ("mask", "batching"), preset="long",
            until=lambda trace, step: long_prompt(trace, step) is not None,
            fields=_mixed,
            predict=Predict(f"{_OWN}mixed.ask", ("query",), _without_token, f"{_OWN}mixed.reveal", found=_silent),
        ),
        Beat(
            f"{_OWN}complete", ("mask", "batching"),
            until=lambda trace, step: last_chunk(trace, step) is not None,
            select=lambda trace, step: f"seq:{int(last_chunk(trace, step)['seq_id'])}",
            fields=_complete,
            try_this=TryThis(f"{_OWN}complete.try", "max_num_batched_tokens", 256),
        ),
        Beat(
            f"{_OWN}unchunked", ("batching",),
            until=lambda trace, step: last_chunk(trace, step) is not None,
            fields=_complete,
            compare=("chunked_prefill", True, False),
        ),
    ),
    words=WORDS,
)  # fmt: skip
