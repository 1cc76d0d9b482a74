"""The row of request chips: who waits, prefills, decodes, was preempted or has finished at one step. Pure.

Reads only the rows of that step and the small tables, never the whole history, so its cost does not grow
with the run. Identity colours are the views' own (viz/select.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from engine.trace import FINISH_REASONS, WAIT_REASONS, Trace
from viz.select import hues as hues_of

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
    for row in ended[-(RECENT_FINISHED + len(finished_now)) :]:
        seq_id = int(row["seq_id"])
        last = trace.rows("tokens", int(row["step_id"]), int(row["step_id"]))
        why = FINISH_REASONS[int(row["reason"])].value
        items[seq_id] = _chip(trace, seq_id, "finished", last[last["seq_id"] == seq_id], why)
    preempted = set(trace.rows("preempts", trace.first_step or 0, at)["seq_id"].tolist())
    for row in now.waits:
        seq_id = int(row["seq_id"])
        state = "preempted" if seq_id in preempted else "waiting"
        got = now.tokens[:0]
        if state == "preempted":  # what it wrote before is not lost
            got = trace.rows("tokens", trace.first_step or 0, at)
            got = got[got["seq_id"] == seq_id]
        items[seq_id] = _chip(trace, seq_id, state, got, WAIT_REASONS[int(row["reason"])].value)
    for row in now.works:
        seq_id = int(row["seq_id"])
        if seq_id in finished_now:
            continue
        got = now.tokens[now.tokens["seq_id"] == seq_id]
        computed = int(row["start"]) + int(row["num_tokens"])
        info = trace.sequences.get(seq_id)
        decode = info is not None and int(row["start"]) >= info.num_prompt_tokens
        items[seq_id] = _chip(trace, seq_id, "decode" if decode else "prefill", got, "", computed)
    hues = slots(trace, tuple(s for s, c in items.items() if c["state"] != "finished"), selection)
    ordered = sorted(items.items(), key=lambda pair: (_ORDER[str(pair[1]["state"])], pair[0]))
    for seq_id, chip in ordered:
        chip["slot"] = hues.get(seq_id)
    return {"items": [c for _, c in ordered[:MAX_CHIPS]], "more": max(len(ordered) - MAX_CHIPS, 0)}


def _chip(trace: Trace, seq_id: int, state: str, got: np.ndarray, why: str = "", computed: int = 0) -> dict[str, object]:
    """`got`: the sequence's newest TOKEN rows, which carry positions; from them follows how many it has."""
    info = trace.sequences.get(seq_id)
    prompt = info.num_prompt_tokens if info else 0
    tokens = int(got["position"].max()) - prompt + 1 if len(got) else max(computed - prompt, 0)
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
