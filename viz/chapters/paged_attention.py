"""PagedAttention: blocks anywhere, found through a table; shared, copied on write, taken back when none is free."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.trace import Op, Trace
from viz.chapter import Beat, Chapter, Predict, Said, TryThis
from viz.moments import begun, computed, events, full, grown, longest, names, read, resumed, shared_tails, victims
from viz.select import padded

# ---- growth ----


def _laid_out(trace: Trace, step: int) -> Mapping[str, object]:
    seq_id = int(longest(computed(trace, step))["seq_id"])
    pool = trace.pool_at(step)
    return {
        "who": names(trace, [seq_id]), "pages": pool.num_pages, "size": trace.page_size_at(step),
        "blocks": Said("blocks", {"n": len(pool.tables[seq_id])}),
    }  # fmt: skip


def _has_blocks(trace: Trace, step: int) -> bool:
    work = longest(computed(trace, step))
    return work is not None and int(work["seq_id"]) in trace.pool_at(step).tables


def _is_full(trace: Trace, step: int) -> Mapping[str, object]:
    seq_id = full(trace, step)[0]
    return {"who": names(trace, [seq_id]), "n": len(trace.pool_at(step).tables[seq_id])}


def _could_take(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    """Every block that was free, with the one that was taken."""
    pool = trace.pool_at(asked)
    free = np.flatnonzero((pool.ref_counts == 0) & ~pool.pending)
    return frozenset(f"page:{page}" for page in free.tolist() if page) | {f"page:{grown(trace, decided)[full(trace, asked)[0]]}"}


def _took(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    seq_id = full(trace, asked)[0]
    return {"who": names(trace, [seq_id]), "page": grown(trace, decided)[seq_id]}


def _reserved(trace: Trace, step: int) -> Mapping[str, object]:
    slabs, pool = padded(trace, step), trace.pool_at(step)
    held = int(np.count_nonzero(pool.ref_counts[1:])) * trace.page_size_at(step)
    return {"n": slabs.stored, "held": held, "reserved": slabs.reserved}


# ---- sharing ----


def _offered(trace: Trace, step: int) -> np.void | None:
    """A prompt that has been computed to its end and of which full blocks can now be found."""
    pool = trace.pool_at(step)
    return next((w for w in read(trace, step) if any(pool.cached[page] for page in pool.tables.get(int(w["seq_id"]), ()))), None)


def _offer(trace: Trace, step: int) -> Mapping[str, object]:
    return {"who": names(trace, [_offered(trace, step)["seq_id"]])}


def _hits(trace: Trace, step: int) -> np.ndarray:
    rows = begun(trace, step)
    return rows[rows["num_cached"] > 0]


def _pages_hit(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    shared = events(trace, decided, Op.SHARE)
    return frozenset(f"page:{int(p)}" for p in shared["page"][np.isin(shared["owner"], _hits(trace, decided)["seq_id"])])


def _hit(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    rows = _hits(trace, decided)
    blocks = Said("blocks", {"n": len(_pages_hit(trace, asked, decided))})
    return {
        "who": names(trace, rows["seq_id"]),
        "cached": int(rows["num_cached"].sum()),
        "blocks": blocks,
        "n": int(rows["num_tokens"].sum()),
    }


def _sharers(trace: Trace, step: int) -> tuple[int, ...]:
    """Who holds the first block that is shared and has room."""
    return trace.pool_at(step).owners[shared_tails(trace, step)[0]]


def _samples(trace: Trace, step: int) -> Mapping[str, object]:
    ids = _sharers(trace, step)
    blocks = Said("blocks", {"n": len(trace.pool_at(step).tables[ids[0]])})
    return {"who": names(trace, ids), "n": len(ids), "blocks": blocks}


def _copied(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    rows = events(trace, decided, Op.COPY)
    return {"page": int(rows["page"][0]), "n": len(rows), "who": names(trace, rows["owner"])}


# ---- taking back ----


def _is_short(trace: Trace, step: int) -> bool:
    return len(full(trace, step)) > trace.pool_at(step).num_free


def _short(trace: Trace, step: int) -> Mapping[str, object]:
    ids = full(trace, step)
    return {"who": names(trace, ids), "n": len(ids), "free": trace.pool_at(step).num_free}


def _pages_lost(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    tables = trace.pool_at(asked).tables
    return frozenset(f"page:{page}" for i in victims(trace, decided)["seq_id"].tolist() for page in tables.get(i, ()))


def _lost(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    rows = victims(trace, decided)
    blocks = Said("blocks", {"n": int(rows["num_pages"].sum())})
    return {"who": names(trace, rows["seq_id"]), "blocks": blocks, "n": int(rows["num_tokens"].sum())}


def _back(trace: Trace, step: int) -> Mapping[str, object]:
    rows = resumed(trace, step)
    return {"who": names(trace, rows["seq_id"]), "n": int(rows["num_recomputed"].sum()), "cached": int(rows["num_cached"].sum())}


_OWN = "chapter.paged_attention."

WORDS = {
    f"{_OWN}title": "PagedAttention",
    f"{_OWN}question": "Where does the cache lie, and what happens when it is full?",
    f"{_OWN}table": "The cache is {pages:,} blocks of {size:,} tokens. {who} holds {blocks}; its block table says which, in order.",
    f"{_OWN}full": (
        "{who}'s block is full to its last place. Its next token needs another one.",
        "{who}'s {n:,} blocks are full to the last place. Its next token needs another one.",
    ),
    f"{_OWN}full.ask": "Click a block that {who} may get.",
    f"{_OWN}full.reveal": "{who} got block {page:,}. Any free block would do: the table keeps the order, so neighbours are not needed.",
    f"{_OWN}padded": (
        "Blocks of {held:,} places hold {n:,} token. Slabs for the longest possible answers would take {reserved:,}.",
        "Blocks of {held:,} places hold {n:,} tokens. Slabs for the longest possible answers would take {reserved:,}.",
    ),
    f"{_OWN}offer": "{who}'s prompt is computed. Each full block of it can now be found again by its content.",
    f"{_OWN}offer.ask": "The next request begins with the same instructions. Click a block that it will not compute itself.",
    f"{_OWN}offer.reveal": "{who} found {cached:,} tokens in {blocks} of the cache and computed only the other {n:,}.",
    f"{_OWN}offer.try": "Switch prefix_caching off: each request computes the same instructions again.",
    f"{_OWN}samples": "{who} answer the same prompt. They share its {blocks}; the last one still has room.",
    f"{_OWN}samples.ask": "Each now writes its own next token. Click the block that must be copied first.",
    f"{_OWN}samples.reveal": (
        "Block {page:,} was copied once, for {who}. Whoever is left keeps the original.",
        "Block {page:,} was copied {n:,} times, for {who}. Whoever is left keeps the original.",
    ),
    f"{_OWN}short": (
        "{n:,} request needs a new block for its next token ({who}). Free blocks: {free:,}.",
        "{n:,} requests need a new block for their next token ({who}). Free blocks: {free:,}.",
    ),
    f"{_OWN}short.ask": "Somebody must give its blocks back. Click a block that will be taken away.",
    f"{_OWN}short.reveal": (
        "Last to come, first to go: {who} gave back {blocks} with K and V of {n:,} token and must wait.",
        "Last to come, first to go: {who} gave back {blocks} with K and V of {n:,} tokens and must wait.",
    ),
    f"{_OWN}back": (
        "Back again: {who}. {n:,} token is computed once more, {cached:,} were still in the cache; then the text goes on.",
        "Back again: {who}. {n:,} tokens are computed once more, {cached:,} were still in the cache; then the text goes on.",
    ),
    f"{_OWN}back.try": "Set num_pages to 96: there is room for all, and nobody has to give a block back.",
}

CHAPTER = Chapter(
    name="paged_attention",
    order=40,
    preset="ragged",
    beats=(
        Beat(
            f"{_OWN}table", ("blocks", "tokens"), preset="ragged", until=_has_blocks,
            select=lambda trace, step: f"seq:{int(longest(computed(trace, step))['seq_id'])}",
            fields=_laid_out,
        ),
        Beat(
            f"{_OWN}full", ("blocks", "tokens"),
            until=lambda trace, step: bool(full(trace, step)),
            select=lambda trace, step: f"seq:{full(trace, step)[0]}",
            fields=_is_full,
            predict=Predict(
                f"{_OWN}full.ask", ("page",), _could_take, f"{_OWN}full.reveal", fields=_is_full,
                until=lambda trace, asked, step: full(trace, asked)[0] in grown(trace, step),
                found=_took,
            ),
        ),
        Beat(
            f"{_OWN}padded", ("blocks",),
            until=lambda trace, step: bool(grown(trace, step)),
            select=lambda trace, step: f"seq:{next(iter(grown(trace, step)))}",
            fields=_reserved,
            compare=("mode", "paged", "contiguous"),
        ),
        Beat(
            f"{_OWN}offer", ("blocks", "tokens"), preset="shared",
            until=lambda trace, step: _offered(trace, step) is not None,
            select=lambda trace, step: f"seq:{int(_offered(trace, step)['seq_id'])}",
            fields=_offer,
            predict=Predict(
                f"{_OWN}offer.ask", ("page",), _pages_hit, f"{_OWN}offer.reveal",
                until=lambda trace, asked, step: len(_hits(trace, step)) > 0,
                found=_hit,
            ),
            try_this=TryThis(f"{_OWN}offer.try", "prefix_caching", False),
            compare=("prefix_caching", True, False),
        ),
        Beat(
            f"{_OWN}samples", ("blocks", "tokens"), preset="samples",
            until=lambda trace, step: bool(shared_tails(trace, step)),
            select=lambda trace, step: f"seq:{_sharers(trace, step)[0]}",
            fields=_samples,
            predict=Predict(
                f"{_OWN}samples.ask", ("page",),
                lambda trace, asked, decided: frozenset(f"page:{page}" for page in events(trace, decided, Op.COPY)["page"].tolist()),
                f"{_OWN}samples.reveal",
                until=lambda trace, asked, step: len(events(trace, step, Op.COPY)) > 0,
                found=_copied,
            ),
        ),
        Beat(
            f"{_OWN}short", ("blocks", "batching"), preset="flood", until=_is_short, fields=_short,
            predict=Predict(
                f"{_OWN}short.ask", ("page",), _pages_lost, f"{_OWN}short.reveal",
                until=lambda trace, asked, step: len(victims(trace, step)) > 0,
                found=_lost,
            ),
        ),
        Beat(
            f"{_OWN}back", ("blocks", "batching"),
            until=lambda trace, step: len(resumed(trace, step)) > 0,
            select=lambda trace, step: f"seq:{int(resumed(trace, step)[0]['seq_id'])}",
            fields=_back,
            try_this=TryThis(f"{_OWN}back.try", "num_pages", 96),
        ),
    ),
    words=WORDS,
)  # fmt: skip
