"""The KV cache: a prompt is computed once, then each step computes one token and reads K and V of all before it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, Said, TryThis
from viz.moments import computed, end_of, ended, going_on, half_full, longest, names, read, work_of, writing
from viz.theme import data_size

CHEAPER = 4  # the cache has saved this factor when its beat comes


# ---- prefill and decode ----


def _whole(trace: Trace, step: int) -> np.void | None:
    """The longest prompt that this step computed in one piece."""
    rows = read(trace, step)
    return longest(rows[rows["start"] == 0])


def _decode(trace: Trace, step: int) -> np.void | None:
    ids = going_on(trace, step)["seq_id"]
    rows = writing(trace, step)
    return longest(rows[np.isin(rows["seq_id"], ids)])


def _prefilled(trace: Trace, step: int) -> Mapping[str, object]:
    work = _whole(trace, step)
    return {"who": names(trace, [work["seq_id"]]), "n": int(work["num_tokens"])}


def _decoded(trace: Trace, step: int) -> Mapping[str, object]:
    work = _decode(trace, step)
    return {"who": names(trace, [work["seq_id"]]), "n": int(work["start"])}


# ---- which block the next step reads and writes ----


def _grower(trace: Trace, step: int) -> int | None:
    """The one with most blocks among those whose last block has tokens and room."""
    tables = trace.pool_at(step).tables
    return max(half_full(trace, step), key=lambda i: (len(tables[i]), -i), default=None)


def _select(trace: Trace, step: int) -> str | None:
    seq_id = _grower(trace, step)
    return None if seq_id is None else f"seq:{seq_id}"


def _holds(trace: Trace, step: int) -> Mapping[str, object]:
    seq_id, size = _grower(trace, step), trace.page_size_at(step)
    end = end_of(work_of(trace, step, seq_id))
    table = trace.pool_at(step).tables[seq_id]
    return {"who": names(trace, [seq_id]), "n": len(table), "size": size, "used": end % size, "tokens": end}


def _computes(trace: Trace, asked: int, step: int) -> bool:
    return work_of(trace, step, _grower(trace, asked)) is not None


def _pages_read(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    """The blocks with all tokens before the one that was computed."""
    seq_id = _grower(trace, asked)
    start = int(work_of(trace, decided, seq_id)["start"])
    table = trace.pool_at(asked).tables[seq_id]
    return frozenset(f"page:{page}" for page in table[: -(-start // trace.page_size_at(asked))])


def _page_written(trace: Trace, asked: int, decided: int) -> int:
    seq_id = _grower(trace, asked)
    start = int(work_of(trace, decided, seq_id)["start"])
    return trace.pool_at(asked).tables[seq_id][start // trace.page_size_at(asked)]


def _found(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    seq_id, size = _grower(trace, asked), trace.page_size_at(asked)
    start, blocks = int(work_of(trace, decided, seq_id)["start"]), len(_pages_read(trace, asked, decided))
    page = _page_written(trace, asked, decided)
    return {"who": names(trace, [seq_id]), "tokens": start, "n": blocks, "page": page, "place": start % size + 1, "size": size}


# ---- what it saves, and what it takes ----


def _steps_of(trace: Trace, seq_id: int, step: int) -> np.ndarray:
    rows = trace.rows("works", 0, step)
    return rows[rows["seq_id"] == seq_id]


def _spent(trace: Trace, step: int) -> tuple[int, int, int, int]:
    """(seq_id, steps, tokens computed, tokens that a run without a cache would have computed) of the longest."""
    seq_id = int(longest(computed(trace, step))["seq_id"])
    rows = _steps_of(trace, seq_id, step)
    return seq_id, len(rows), int(rows["num_tokens"].sum()), int((rows["start"] + rows["num_tokens"]).sum())


def _is_cheaper(trace: Trace, step: int) -> bool:
    if not len(writing(trace, step)):
        return False
    _, _, once, without = _spent(trace, step)
    return without >= CHEAPER * once or not len(going_on(trace, step))


def _saved(trace: Trace, step: int) -> Mapping[str, object]:
    seq_id, steps, once, without = _spent(trace, step)
    return {"who": names(trace, [seq_id]), "n": steps, "once": once, "without": without}


def _select_longest(trace: Trace, step: int) -> str | None:
    work = longest(computed(trace, step))
    return None if work is None else f"seq:{int(work['seq_id'])}"


def _ended(trace: Trace, step: int) -> np.void | None:
    rows = computed(trace, step)
    return longest(rows[np.isin(rows["seq_id"], ended(trace, step))])


def _price(trace: Trace, step: int) -> Mapping[str, object]:
    work, each = _ended(trace, step), trace.meta.get("kv_bytes_per_token")
    tokens = Said("tokens", {"n": end_of(work)})
    known = isinstance(each, int) and each > 0
    price = Said(f"{_OWN}price", {"tokens": tokens, "each": data_size(each), "total": data_size(each * end_of(work))}) if known else tokens
    return {"who": names(trace, [work["seq_id"]]), "price": price}


_OWN = "chapter.kv_cache."

WORDS = {
    f"{_OWN}title": "The KV cache",
    f"{_OWN}question": "Why is the whole text not computed again for each new token?",
    f"{_OWN}prefill": (
        "{who}'s prompt is {n:,} token. Its K and V are kept.",
        "{who}'s {n:,} prompt tokens go through the model in one step. K and V of each are kept: that is the cache.",
    ),
    f"{_OWN}decode": "Now a step computes only {who}'s newest token. It reads K and V of the {n:,} before it.",
    f"{_OWN}read": (
        "K and V lie in blocks of {size:,} tokens. {who} holds {n:,} block for its {tokens:,} tokens.",
        "K and V lie in blocks of {size:,} tokens. {who} holds {n:,} blocks for its {tokens:,} tokens.",
    ),
    f"{_OWN}read.ask": "Click a block that {who}'s next token will read.",
    f"{_OWN}read.reveal": (
        "It read {n:,} block: {who}'s own {tokens:,} tokens, and nobody else's.",
        "It read {n:,} blocks: {who}'s own {tokens:,} tokens, and nobody else's.",
    ),
    f"{_OWN}write": "Each step adds K and V of one token to {who}. What is there already is never written again.",
    f"{_OWN}write.ask": "Click the block that gets K and V of {who}'s next token.",
    f"{_OWN}write.reveal": "They went to block {page:,}, place {place:,} of {size:,}: {who}'s last block, right after its last token.",
    f"{_OWN}saved": (
        "{who} has computed {once:,} tokens in {n:,} step. Without a cache it would have been {without:,}.",
        "{who} has computed {once:,} tokens in {n:,} steps. Without a cache it would have been {without:,}.",
    ),
    f"{_OWN}saved.try": "Set mode to none: nothing is kept, and each step computes all tokens again.",
    f"{_OWN}price_of": "The cache costs memory. {who} is done and gives back {price}.",
    f"{_OWN}price": "{tokens} × {each} = {total}",
}

CHAPTER = Chapter(
    name="kv_cache",
    order=10,
    preset="ragged",
    beats=(
        Beat(
            f"{_OWN}prefill", ("kv_cache", "tokens"), preset="ragged",
            until=lambda trace, step: _whole(trace, step) is not None,
            select=lambda trace, step: f"seq:{int(_whole(trace, step)['seq_id'])}",
            fields=_prefilled,
        ),
        Beat(
            f"{_OWN}decode", ("kv_cache", "tokens"),
            until=lambda trace, step: _decode(trace, step) is not None,
            select=lambda trace, step: f"seq:{int(_decode(trace, step)['seq_id'])}",
            fields=_decoded,
        ),
        Beat(
            f"{_OWN}read", ("blocks", "kv_cache"),
            until=lambda trace, step: _grower(trace, step) is not None,
            select=_select, fields=_holds,
            predict=Predict(
                f"{_OWN}read.ask", ("page",), _pages_read, f"{_OWN}read.reveal", fields=_holds, until=_computes, found=_found,
            ),
        ),
        Beat(
            f"{_OWN}write", ("blocks", "kv_cache"),
            until=lambda trace, step: _grower(trace, step) is not None,
            select=_select, fields=_holds,
            predict=Predict(
                f"{_OWN}write.ask", ("page",),
                lambda trace, asked, decided: frozenset({f"page:{_page_written(trace, asked, decided)}"}),
                f"{_OWN}write.reveal", fields=_holds, until=_computes, found=_found,
            ),
        ),
        Beat(
            f"{_OWN}saved", ("kv_cache",), until=_is_cheaper, select=_select_longest, fields=_saved,
            try_this=TryThis(f"{_OWN}saved.try", "mode", "none"),
            compare=("mode", "paged", "none"),
        ),
        Beat(
            f"{_OWN}price_of", ("blocks", "batching"),
            until=lambda trace, step: _ended(trace, step) is not None,
            fields=_price,
        ),
    ),
    words=WORDS,
)  # fmt: skip
