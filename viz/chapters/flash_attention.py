"""FlashAttention: tiles of the score matrix, the softmax of one row while it meets them, the bytes that are never moved.

Everything said here is counted by the views that show it, from what the traced kernel wrote down.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.artifacts import TileTrace
from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, Said, TryThis
from viz.measured import brief
from viz.moments import deep_chunk, end_of, long_read, long_writer, names, writing
from viz.theme import data_size
from viz.tiles import differences, matrix, shown
from viz.view import ViewState
from viz.views.flash_tiles import number
from viz.views.memory_traffic import PARTS, Traffic, traffic
from viz.views.sm_timeline import launches

SMALL = 16  # rows and keys of a tile: small enough that a short prompt has many
SPLITS = 4
KEPT = 0.5  # a part of the traffic of which a decode still moves so much has not shrunk

# ---- tiles ----


def _prompt(trace: Trace, step: int) -> np.void | None:
    """The longest prompt that was read in one piece, if it is longer than a tile."""
    work = long_read(trace, step)
    return work if work is not None and work["num_tokens"] > SMALL else None


def _select_prompt(trace: Trace, step: int) -> str | None:
    work = _prompt(trace, step)
    return None if work is None else f"seq:{int(work['seq_id'])}"


def _square(trace: Trace, step: int) -> Mapping[str, object]:
    work = _prompt(trace, step)
    n = int(work["num_tokens"])
    return {"who": names(trace, [work["seq_id"]]), "n": n, "pairs": n * (n + 1) // 2}


def _of_prompt(trace: Trace, step: int) -> TileTrace:
    return shown(trace, step, _select_prompt(trace, step))


def _visits(it: TileTrace) -> np.ndarray:
    """int64 [tiles]: how many tiles the program of each visits."""
    _, at, counts = np.unique(it.tiles["program"], return_inverse=True, return_counts=True)
    return counts[at]


def _longest_rows(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    """Query rows whose program visited the most tiles."""
    it = _of_prompt(trace, decided)
    counts = _visits(it)
    tiles = it.tiles[counts == counts.max()]
    return frozenset(f"query:{int(t['seq_id'])}:{p}" for t in tiles for p in range(int(t["q_start"]), int(t["q_start"] + t["num_q"])))


def _visited(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    it = _of_prompt(trace, decided)
    of, counts = matrix(it, it.row_seq_id, it.row_kv_head), _visits(it)
    who = names(trace, dict.fromkeys(it.tiles["seq_id"][counts == counts.max()].tolist()))
    return {"who": names(trace, [it.row_seq_id]), "longest": who, "most": int(counts.max()), "n": of.visited, "skipped": of.skipped}


# ---- one row ----


def _followed(trace: Trace, step: int) -> Mapping[str, object]:
    it = _of_prompt(trace, step)
    return {"who": names(trace, [it.row_seq_id]), "position": it.row_position + 1, "n": len(it.row_tiles)}


def _first_tile(trace: Trace, step: int) -> str | None:
    it = _of_prompt(trace, step)
    return None if it is None else f"tile:{int(it.row_tiles[0])}"


def _last_tile(trace: Trace, step: int) -> str | None:
    it = _of_prompt(trace, step)
    return None if it is None else f"tile:{int(it.row_tiles[-1])}"


def _peaks(it: TileTrace) -> tuple[int, ...]:
    """Tiles of the followed row that hold its largest score (several where scores are alike)."""
    most = it.scores.max()
    spans = ((int(i), it.tiles[i]) for i in it.row_tiles)
    return tuple(i for i, t in spans if it.scores[int(t["k_start"]) : int(t["k_stop"])].max() == most)


def _peak(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    it = _of_prompt(trace, decided)
    at = it.row_tiles.tolist().index(_peaks(it)[0]) + 1
    said = {"nth": int(it.scores.argmax()) + 1, "m": number(float(it.scores.max())), "at": at, "of": len(it.row_tiles)}
    after = Said(f"{_OWN}after.{'none' if at == 1 else 'shrunk'}", {"n": at - 1})
    return {"who": names(trace, [it.row_seq_id]), "after": after, **said}


def _exact(trace: Trace, step: int) -> Mapping[str, object]:
    it = _of_prompt(trace, step)
    return {**_followed(trace, step), "difference": number(float(differences(it)[-1]))}


# ---- bytes ----


def _select_chunk(trace: Trace, step: int) -> str | None:
    work = deep_chunk(trace, step)
    return None if work is None else f"seq:{int(work['seq_id'])}"


def _bytes(trace: Trace, step: int, select: str | None) -> Traffic:
    return traffic(trace, ViewState(step=step, selection=select))


def _moved(trace: Trace, step: int) -> Mapping[str, object]:
    work, of = deep_chunk(trace, step), _bytes(trace, step, _select_chunk(trace, step))
    kept = of.parts["naive"]["scores"] + of.parts["naive"]["p"]
    return {
        "who": names(trace, [work["seq_id"]]), "n": int(work["num_tokens"]), "keys": end_of(work),
        "naive": data_size(of.total("naive")), "flash": data_size(of.total("flash")), "scores": data_size(kept),
    }  # fmt: skip


def _reader(trace: Trace, asked: int) -> int:
    return int(deep_chunk(trace, asked)["seq_id"])


def _writes(trace: Trace, asked: int, step: int) -> bool:
    """Whether the prompt is read, and its request writes."""
    return _reader(trace, asked) in writing(trace, step)["seq_id"].tolist()


def _still_moved(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    """Naive's parts that a decode still moves most of."""
    select = f"seq:{_reader(trace, asked)}"
    before, after = (_bytes(trace, step, select).parts["naive"] for step in (asked, decided))
    kept = [part for part in PARTS if before[part] and after[part] >= KEPT * before[part]]
    return frozenset(f"{kind}:naive:{part}" for kind in ("area", "part") for part in kept)


def _shrunk(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    select = f"seq:{_reader(trace, asked)}"
    before, after = (_bytes(trace, step, select).parts["naive"] for step in (asked, decided))
    return {
        "who": names(trace, [_reader(trace, asked)]), "k0": data_size(before["k"]), "k1": data_size(after["k"]),
        "scores0": data_size(before["scores"]), "scores1": data_size(after["scores"]),
    }  # fmt: skip


# ---- where tiles run ----


def _select_writer(trace: Trace, step: int) -> str | None:
    work = long_writer(trace, step)
    return None if work is None else f"seq:{int(work['seq_id'])}"


def _split(trace: Trace, step: int) -> Mapping[str, object]:
    found = launches(trace, step, _select_writer(trace, step))
    one, other = found[0], found[-1]
    most = [int(np.diff(of.first_of, append=len(of.it.tiles)).max()) for of in (one, other)]
    said = {"programs": one.programs, "tiles": most[0], "n": other.it.num_splits, "after": other.programs, "tiles_after": most[1]}
    timed = one is not other and one.is_timed and other.is_timed
    time = Said(f"{_OWN}time", {"before": brief(one.end / 1000), "after": brief(other.end / 1000)}) if timed else Said(f"{_OWN}no_time")
    return {**said, "time": time}


_OWN = "chapter.flash_attention."

WORDS = {
    f"{_OWN}title": "FlashAttention",
    f"{_OWN}question": "How can attention be exact without ever writing down its scores?",
    f"{_OWN}tiles": (
        "Each token looks at itself and all before it: {who} needs {pairs:,} score of {n:,} rows. FlashAttention cuts them into tiles.",
        "Each token looks at itself and all before it: {who} needs {pairs:,} scores of {n:,} rows. FlashAttention cuts them into tiles.",
    ),
    f"{_OWN}tiles.ask": "A program takes a few rows and visits their tiles. Click a row whose program will visit the most tiles.",
    f"{_OWN}tiles.reveal": (
        "The last rows of {longest}: {most:,} tiles each. Of {who}'s tiles the kernel visited {n:,} and never touched {skipped:,}."
    ),
    f"{_OWN}softmax": (
        "Followed: {who}'s token {position:,}. It meets {n:,} tile and keeps only a max, a sum and acc.",
        "Followed: {who}'s token {position:,}. It meets {n:,} tiles one after the other and keeps only a max, a sum and acc.",
    ),
    f"{_OWN}softmax.ask": "Whenever a larger score comes, the old sum shrinks. Click the tile that sets the row's final maximum.",
    f"{_OWN}softmax.reveal": "Tile {at:,} of {of:,}: key {nth:,} has the largest score, {m}. {after}",
    f"{_OWN}after.none": "No later tile changed the maximum.",
    f"{_OWN}after.shrunk": (
        "What {n:,} tile before had summed was scaled down to it.",
        "What {n:,} tiles before had summed was scaled down to it.",
    ),
    f"{_OWN}exact": "After the last of {n:,} tiles acc ÷ l differs from plain softmax by {difference}: rounding, no approximation.",
    f"{_OWN}traffic": "{n:,} rows of {who} look at {keys:,} keys. Naive moves {naive}, {scores} of it scores and P; Flash asks for {flash}.",
    f"{_OWN}traffic.ask": "Soon {who} decodes: one row instead of {n:,}. Click a part of naive's bytes that will not shrink with it.",
    f"{_OWN}traffic.reveal": "K and V: K {k0}, then {k1}; scores {scores0}, then {scores1}. Each new token reads the whole cache of its request.",
    f"{_OWN}traffic.try": "Set max_num_batched_tokens to 256: more rows share each tile of K and V.",
    f"{_OWN}splits": (
        "Decoding: {programs:,} program, up to {tiles:,} tiles long. With the keys in {n:,} parts: {after:,}, up to {tiles_after:,} long. {time}",
        "Decoding: {programs:,} programs, up to {tiles:,} tiles long. With the keys in {n:,} parts: {after:,}, up to {tiles_after:,} long. {time}",
    ),
    f"{_OWN}time": "{before} became {after}.",
    f"{_OWN}no_time": "On a GPU they would run side by side.",
}

_PROMPT_TILES = ("tiles", {"block_m": SMALL, "block_n": SMALL, "kernel": "flash_prefill"})
_CHUNK_TILES = ("tiles", {"block_m": 64, "block_n": 64, "kernel": "flash_prefill"})  # a GPU's own choice for 64 wide heads

CHAPTER = Chapter(
    name="flash_attention",
    order=60,
    preset="ragged",
    beats=(
        Beat(
            f"{_OWN}tiles", ("mask", "tokens"), preset="ragged",
            until=lambda trace, step: _prompt(trace, step) is not None,
            select=_select_prompt, fields=_square,
            predict=Predict(
                f"{_OWN}tiles.ask", ("query",), _longest_rows, f"{_OWN}tiles.reveal", until=None, found=_visited,
                job=_PROMPT_TILES, views=("mask", "flash_tiles"),
            ),
        ),
        Beat(
            f"{_OWN}softmax", ("flash_tiles",),
            until=lambda trace, step: _prompt(trace, step) is not None,
            select=_first_tile, fields=_followed, job=_PROMPT_TILES,
            predict=Predict(
                f"{_OWN}softmax.ask", ("tile",),
                lambda trace, asked, decided: frozenset(f"tile:{i}" for i in _peaks(_of_prompt(trace, decided))),
                f"{_OWN}softmax.reveal", until=None, found=_peak,
                select=lambda trace, asked, decided: f"tile:{_peaks(_of_prompt(trace, decided))[0]}",
            ),
        ),
        Beat(
            f"{_OWN}exact", ("flash_tiles",),
            until=lambda trace, step: _prompt(trace, step) is not None,
            select=_last_tile, fields=_exact, job=_PROMPT_TILES,
        ),
        Beat(
            f"{_OWN}traffic", ("memory_traffic",), preset="long",
            until=lambda trace, step: deep_chunk(trace, step) is not None,
            select=_select_chunk, fields=_moved, job=_CHUNK_TILES,
            predict=Predict(
                f"{_OWN}traffic.ask", ("area", "part"), _still_moved, f"{_OWN}traffic.reveal", fields=_moved, until=_writes, found=_shrunk,
                job=("tiles", {"kernel": "flash_decode", "splits": 1}),
            ),
            try_this=TryThis(f"{_OWN}traffic.try", "max_num_batched_tokens", 256),
        ),
        Beat(
            f"{_OWN}splits", ("sm_timeline", "flash_tiles"),
            until=lambda trace, step: long_writer(trace, step) is not None,
            select=_select_writer, fields=_split, job=("tiles", {"kernel": "flash_decode", "splits": SPLITS}),
        ),
    ),
    words=WORDS,
)  # fmt: skip
