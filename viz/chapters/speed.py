"""Speed: the same requests on a ladder of engines, and where the time of one step goes.

What is asked about the ladder is answered by clocks on the machine that runs it; the sentences hold whichever rungs could
be run there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.artifacts import LadderRun, Rung
from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, Said, TryThis
from viz.measured import brief, times
from viz.moments import begun, going_on, names, writing
from viz.theme import duration, percent
from viz.views.speed_ladder import TALK, factor, fastest, newest, per_second
from viz.views.step_anatomy import Anatomy, anatomy

LADDER = ("ladder", {})

# ---- the ladder ----


def _ladder(trace: Trace) -> LadderRun | None:
    """The one on the picture; where a beat stands on it, two rungs or more of it were measured."""
    return newest(trace)


def _named(rung: Rung) -> Said:
    return Said(f"{_OWN}rung.{rung.name}") if f"{_OWN}rung.{rung.name}" in WORDS else Said(f"{_OWN}rung.other")


def _rung(trace: Trace, *wanted: str) -> Rung | None:
    """The last of these that was measured."""
    return next((rung for name in reversed(wanted) for rung in _ladder(trace).measured if rung.name == name), None)


def _start(trace: Trace, step: int) -> Mapping[str, object]:
    it = _ladder(trace)
    return {"requests": len(it.prompt_tokens), "new": it.new_tokens, "n": len(it.measured)}


def _winner(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    return frozenset({f"rung:{fastest(_ladder(trace)).name}"})


def _won(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    it = _ladder(trace)
    best = fastest(it)
    return {"who": _named(best), "speed": per_second(best.per_s), "times": times(factor(it, best)), "first": _named(it.measured[0])}


def _cached(trace: Trace, step: int) -> Mapping[str, object]:
    without, cached, ours = _rung(trace, "hf_no_cache"), _rung(trace, "hf_cache"), _rung(trace, "eager")
    if without is None or cached is None:
        return {"what": Said(f"{_OWN}cache.none")}
    fields = {"speed0": per_second(without.per_s), "speed1": per_second(cached.per_s)}
    if ours is None:
        return {"what": Said(f"{_OWN}cache.theirs", fields)}
    return {"what": Said(f"{_OWN}cache.both", fields | {"speed2": per_second(ours.per_s)})}


def _together(trace: Trace, step: int) -> Mapping[str, object]:
    alone, together = _rung(trace, "eager"), _rung(trace, "batching")
    if alone is None or together is None:
        return {"what": Said(f"{_OWN}together.none")}
    fields = {"speed0": per_second(alone.per_s), "speed1": per_second(together.per_s)}
    fields |= {"each0": brief(alone.each_us), "each1": brief(together.each_us)}
    return {"what": Said(f"{_OWN}together.{'slower' if together.each_us > alone.each_us else 'as_fast'}", fields)}


def _here(trace: Trace, step: int) -> Mapping[str, object]:
    it, last, before = _ladder(trace), _rung(trace, "fused", "graphs", "overlap"), _rung(trace, "batching")
    fields = {"low": TALK[0], "high": TALK[1], "factor": TALK[2], "times": times(factor(it, fastest(it)))}
    if last is None or before is None:
        return fields | {"what": Said(f"{_OWN}here.no_gpu")}
    return fields | {"what": Said(f"{_OWN}here.gpu", {"times": times(last.per_s / before.per_s)})}


def _select(*wanted: str):
    def chosen(trace: Trace, step: int) -> str | None:
        if _ladder(trace) is None:  # asked before its job is done
            return None
        rung = _rung(trace, *wanted) or fastest(_ladder(trace))
        return None if rung is None else f"rung:{rung.name}"

    return chosen


# ---- a step ----


def _at(trace: Trace, step: int) -> Anatomy:
    return anatomy(trace, trace.step(step).step)


def _timed(trace: Trace, step: int) -> bool:
    """Somebody writes and goes on, and clocks ran: the next step is timed too."""
    return len(writing(trace, step)) > 0 and len(going_on(trace, step)) > 0 and len(_at(trace, step).parts) >= 2


def _one_step(trace: Trace, step: int) -> Mapping[str, object]:
    it = _at(trace, step)
    part = Said(f"{_OWN}part.{_kind(it)}", {"time": brief(it.parts[it.longest]), "share": percent(it.parts[it.longest], it.total)})
    return {"total": duration(it.total), "n": it.num_sampled, "who": names(trace, writing(trace, step)["seq_id"]), "part": part}


def _kind(it: Anatomy) -> str:
    return f"{it.longest}.cpu" if it.longest in ("launch", "sync") and not it.is_gpu else it.longest


def _next_timed(trace: Trace, asked: int, step: int) -> bool:
    return bool(_at(trace, step).parts)


def _longest(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    return frozenset({f"part:{_at(trace, decided).longest}"})


def _took(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    it = _at(trace, decided)
    said = {"time": brief(it.parts[it.longest]), "share": percent(it.parts[it.longest], it.total)}
    return {"part": Said(f"{_OWN}part.{_kind(it)}", said), "total": duration(it.total)}


def _reads(trace: Trace, step: int) -> bool:
    return len(begun(trace, step)) > 0 and bool(_at(trace, step).parts)


def _reading(trace: Trace, step: int) -> Mapping[str, object]:
    it, host = _at(trace, step), ("schedule", "build", "detokenise", "commit", "record")
    rest = sum(it.parts.get(part, 0) for part in host)
    tokens = int(np.sum(begun(trace, step)["num_tokens"]))
    return {"who": names(trace, begun(trace, step)["seq_id"]), "n": tokens, "total": duration(it.total), "host": percent(rest, it.total)}


_OWN = "chapter.speed."

WORDS = {
    f"{_OWN}title": "Faster, rung by rung",
    f"{_OWN}question": "From a plain loop to an engine: what makes it faster, and where does a step's time go?",
    f"{_OWN}reading": (
        "{who} began: {n:,} prompt token in a step of {total}. Planning, building, text and record took {host} of it.",
        "{who} began: {n:,} prompt tokens in a step of {total}. Planning, building, text and record took {host} of it.",
    ),
    f"{_OWN}start": (
        "The same {requests:,} requests, {new:,} tokens each, on {n:,} rung of a ladder: same weights, one more thing switched on a rung.",
        "The same {requests:,} requests, {new:,} tokens each, on {n:,} rungs of a ladder: same weights, one more thing switched on a rung.",
    ),
    f"{_OWN}start.ask": "All lanes start now. Click the one that will make the most tokens a second.",
    f"{_OWN}start.reveal": "{who}: {speed} tokens a second, {times} as many as {first}.",
    f"{_OWN}rung.hf_no_cache": "transformers without a cache",
    f"{_OWN}rung.hf_cache": "transformers with its cache",
    f"{_OWN}rung.eager": "this engine, one request at a time",
    f"{_OWN}rung.batching": "this engine with paged blocks and batches",
    f"{_OWN}rung.fused": "this engine with fused kernels",
    f"{_OWN}rung.graphs": "this engine with CUDA graphs",
    f"{_OWN}rung.overlap": "this engine with overlapped steps",
    f"{_OWN}rung.other": "a later rung",
    f"{_OWN}cache": "{what}",
    f"{_OWN}cache.both": "The KV cache: {speed0} → {speed1} tok/s in transformers. This engine, as plain, one at a time: {speed2} tok/s.",
    f"{_OWN}cache.theirs": "The KV cache: {speed0} → {speed1} tok/s in transformers. Without it each token computes the whole text again.",
    f"{_OWN}cache.none": "Without a KV cache each token computes the whole text again; that rung could not be measured here.",
    f"{_OWN}together": "{what}",
    f"{_OWN}together.slower": (
        "Together: {speed0} → {speed1} tok/s. But each answer's next token takes {each1} instead of {each0}: a batch has a price."
    ),
    f"{_OWN}together.as_fast": (
        "Together: {speed0} → {speed1} tok/s, and each answer's next token comes as soon: {each1} instead of {each0}."
    ),
    f"{_OWN}together.none": "Running requests together could not be measured here.",
    f"{_OWN}here": "The talk: {low} → {high} tok/s, {factor}×. Here: {times}. {what}",
    f"{_OWN}here.gpu": "Fused kernels, graphs and overlap alone make {times}.",
    f"{_OWN}here.no_gpu": "Fused kernels, graphs and overlap need a GPU.",
    f"{_OWN}step": "One step for {who}, taken apart: {total}. {part}.",
    f"{_OWN}step.ask": "Click the part that will take the longest in the next step.",
    f"{_OWN}step.reveal": "{part}, in a step of {total}.",
    f"{_OWN}step.try": "Set run_ahead to 1: the next step is planned while this one runs. On a CPU nothing can overlap.",
    f"{_OWN}part.schedule": "The plan took the longest, {time} ({share})",
    f"{_OWN}part.build": "Building the batch took the longest, {time} ({share})",
    f"{_OWN}part.launch": "Launching took the longest, {time} ({share}): the CPU cannot keep up",
    f"{_OWN}part.launch.cpu": "Computing took the longest, {time} ({share}); on a CPU launching is computing",
    f"{_OWN}part.sample": "Choosing tokens took the longest, {time} ({share})",
    f"{_OWN}part.sync": "Waiting for the GPU took the longest, {time} ({share})",
    f"{_OWN}part.sync.cpu": "Taking the tokens took the longest, {time} ({share})",
    f"{_OWN}part.detokenise": "Making text took the longest, {time} ({share})",
    f"{_OWN}part.commit": "Taking the result took the longest, {time} ({share})",
    f"{_OWN}part.record": "Making the record took the longest, {time} ({share})",
}

CHAPTER = Chapter(
    name="speed",
    order=90,
    preset="one",
    beats=(
        Beat(
            f"{_OWN}start", ("speed_ladder",), preset="one", select=lambda trace, step: "race:0", fields=_start, job=LADDER,
            predict=Predict(
                f"{_OWN}start.ask", ("rung",), _winner, f"{_OWN}start.reveal", until=None, found=_won,
                select=lambda trace, asked, decided: f"rung:{fastest(_ladder(trace)).name}",
            ),
        ),
        Beat(f"{_OWN}cache", ("speed_ladder",), select=_select("hf_cache"), fields=_cached, job=LADDER),
        Beat(f"{_OWN}together", ("speed_ladder",), select=_select("batching"), fields=_together, job=LADDER),
        Beat(f"{_OWN}here", ("speed_ladder",), fields=_here, job=LADDER),
        Beat(
            f"{_OWN}step", ("step_anatomy", "tokens"), until=_timed, fields=_one_step,
            predict=Predict(
                f"{_OWN}step.ask", ("part",), _longest, f"{_OWN}step.reveal", until=_next_timed, found=_took,
            ),
            try_this=TryThis(f"{_OWN}step.try", "run_ahead", 1),
        ),
        Beat(f"{_OWN}reading", ("step_anatomy", "batching"), preset="ragged", until=_reads, fields=_reading),
    ),
    words=WORDS,
)  # fmt: skip
