"""The row of request chips: who waits, prefills, decodes, was preempted or has finished at one step. Pure.

Reads the rows of that step and the small tables; of the history only the tokens of those who got none in it (who waits,
reads or was stopped), in one pass. Identity colours are the views' own (viz/select.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from engine.trace import FINISH_REASONS, WAIT_REASONS, Trace
from viz.select import hues as hues_of
from viz.select import prompt_len

MAX_CHIPS = 40
RECENT_FINISHED = 4
_ORDER = {"decode": 0, "prefill": 0, "preempted": 1, "waiting": 2, "finished": 3}

Slots = Callable[[Trace, tuple[int, ...], str | None], Mapping[int, int | None]]


def chips(trace: Trace, step: int | None, selection: str | None = None, slots: Slots = hues_of) -> dict[str, object]:
    """{"items": [{id, request, name, slot, state, tokens, max, done, of, why, prompt}], "more": how many were left out}."""
    at = trace.clamp(step)
    if at is None:
        return {"items": [], "more": 0}
    now = trace.step(at)
    ended = trace.rows("finishes", trace.first_step or 0, at)
    finished_now = set(now.finishes["seq_id"].tolist())
    items: dict[int, dict[str, object]] = {}
    ended = ended[-(RECENT_FINISHED + len(finished_now)) :]
    last = _last_tokens(trace, at, (*ended["seq_id"].tolist(), *now.waits["seq_id"].tolist(), *now.works["seq_id"].tolist()))
    for row in ended:
        seq_id = int(row["seq_id"])
        items[seq_id] = _chip(trace, seq_id, "finished", last, FINISH_REASONS[int(row["reason"])].value)
    preempted = set(trace.rows("preempts", trace.first_step or 0, at)["seq_id"].tolist())
    for row in now.waits:
        seq_id = int(row["seq_id"])
        state = "preempted" if seq_id in preempted else "waiting"
        items[seq_id] = _chip(trace, seq_id, state, last, WAIT_REASONS[int(row["reason"])].value)
    has_cache = trace.config_at(at).get("mode") != "none"
    for row in now.works:
        seq_id = int(row["seq_id"])
        if seq_id in finished_now:
            continue
        computed = int(row["start"]) + int(row["num_tokens"])
        state = "decode" if _writes(row, prompt_len(trace, seq_id), has_cache) else "prefill"
        items[seq_id] = _chip(trace, seq_id, state, last, "", computed)
    hues = slots(trace, tuple(s for s, c in items.items() if c["state"] != "finished"), selection)
    ordered = sorted(items.items(), key=lambda pair: (_ORDER[str(pair[1]["state"])], pair[0]))
    for seq_id, chip in ordered:
        chip["slot"] = hues.get(seq_id)
    return {"items": [c for _, c in ordered[:MAX_CHIPS]], "more": max(len(ordered) - MAX_CHIPS, 0)}


def _writes(work: np.void, prompt: int, has_cache: bool) -> bool:
    """Whether a work is for a token after the prompt. Without a cache all that is known is computed again for each."""
    if has_cache:
        return int(work["start"]) >= prompt and not work["num_recomputed"]
    return int(work["start"]) + int(work["num_tokens"]) > prompt or bool(work["num_recomputed"])


def _last_tokens(trace: Trace, at: int, seq_ids: tuple[int, ...]) -> dict[int, int]:
    """seq_id → position of the last token that it had been given by a step; who has none is not in it."""
    now = trace.rows("tokens", at, at)
    found = dict(zip(now["seq_id"].tolist(), now["position"].tolist()))
    others = [seq_id for seq_id in seq_ids if seq_id not in found]
    if others:
        rows = trace.rows("tokens", 0, at)  # tokens outlive the steps that a full ring dropped
        rows = rows[np.isin(rows["seq_id"], others)]
        found |= dict(zip(rows["seq_id"].tolist(), rows["position"].tolist()))
    return found


def _chip(trace: Trace, seq_id: int, state: str, last: Mapping[int, int], why: str = "", computed: int = 0) -> dict[str, object]:
    """`last`: position of each sequence's last token; from it follows how many it has."""
    info, prompt = trace.sequences.get(seq_id), prompt_len(trace, seq_id)
    tokens = last[seq_id] - prompt + 1 if seq_id in last else 0
    return {
        "id": f"seq:{seq_id}",
        "request": info.request_id if info else None,
        "name": trace.name(seq_id),
        "state": state,
        "tokens": max(tokens, 0),
        "max": info.max_tokens if info else 0,
        "done": min(computed, prompt),
        "of": prompt,
        "why": why,
        "prompt": (info.prompt if info else "")[:200],
    }
