"""The scrubber's picture: the whole run in at most 512 bins. Pure.

Each bin says how full its steps were (largest share of the token budget) and whether somebody joined,
finished or was preempted in it.
"""

from __future__ import annotations

import numpy as np

from engine.trace import Trace
from viz.select import admitted

MAX_BINS = 512
JOIN, FINISH, PREEMPT, FAILED = 1, 2, 4, 8


def timeline(trace: Trace, bins: int = MAX_BINS) -> tuple[dict[str, object], list[np.ndarray]]:
    """({"first", "last", "bins"}, [load uint8 [bins], flags uint8 [bins]])."""
    first, last = trace.first_step, trace.last_step
    if first is None or last is None:
        return {"first": None, "last": None, "bins": 0}, [np.zeros(0, np.uint8), np.zeros(0, np.uint8)]
    span = last - first + 1
    bins = min(bins, span)
    works, steps = trace.works, trace.steps
    works = works[np.searchsorted(works["step_id"], first) :]
    per_step = np.bincount(works["step_id"] - first, weights=works["num_tokens"], minlength=span)[:span]
    budget = np.zeros(span)
    budget[steps["step_id"] - first] = steps["token_budget"]
    share = np.divide(per_step, budget, out=np.zeros(span), where=budget > 0)
    # a square root, so that a decode step of few tokens is still seen beside a full prefill
    load = np.zeros(bins)
    np.maximum.at(load, _bin(np.arange(span), span, bins), np.sqrt(np.clip(share, 0, 1)))
    flags = np.zeros(bins, np.uint8)
    for ids, flag in (
        (admitted(works)["step_id"], JOIN),
        (trace.finishes["step_id"], FINISH),
        (trace.preempts["step_id"], PREEMPT),
        (steps["step_id"][steps["failed"] > 0], FAILED),
    ):
        inside = ids[(ids >= first) & (ids <= last)] - first
        flags[np.unique(_bin(inside, span, bins))] |= flag
    return {"first": first, "last": last, "bins": bins}, [np.rint(load * 255).astype(np.uint8), flags]


def _bin(offsets: np.ndarray, span: int, bins: int) -> np.ndarray:
    return offsets.astype(np.int64) * bins // span
