"""Inside the engine: what each part does in a step, who gets what, and how a request leaves and comes back."""

from __future__ import annotations

from collections.abc import Mapping

from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, Said, TryThis
from viz.moments import begun, computed, end_of, ended, grown, long_prompt, names, reading, resumed, victims, writing
from viz.select import prompt_len
from viz.theme import duration
from viz.views.engine_map import CLOCKS

# ---- one step, part by part ----


def _arrived(trace: Trace, step: int) -> Mapping[str, object]:
    ids = begun(trace, step)["seq_id"].tolist()
    return {"who": names(trace, ids), "n": sum(prompt_len(trace, i) for i in ids)}


def _given(trace: Trace, step: int) -> Mapping[str, object]:
    (seq_id, page), *_ = grown(trace, step).items()
    pool = trace.pool_at(step)
    return {"who": names(trace, [seq_id]), "page": page, "free": pool.num_free, "total": pool.num_pages}


def _dealt(trace: Trace, step: int) -> Mapping[str, object]:
    work, budget = long_prompt(trace, step), int(trace.step(step).step["token_budget"])
    return {
        "who": names(trace, [work["seq_id"]]), "n": int(work["num_tokens"]), "budget": budget,
        "others": names(trace, writing(trace, step)["seq_id"]),
    }  # fmt: skip


def _clocks(trace: Trace, step: int) -> dict[tuple[str, str], int]:
    """(part, clock) → µs."""
    row = trace.step(step).step
    return {(part, clock): int(row[f"{clock}_us"]) for part, clocks in CLOCKS.items() for clock in clocks}


def _slowest(trace: Trace, step: int) -> tuple[str, str]:
    found = _clocks(trace, step)
    return max(found, key=found.get)


def _time(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    found, slowest = _clocks(trace, decided), _slowest(trace, decided)
    return {"part": Said(f"{_OWN}clock.{slowest[1]}"), "time": duration(found[slowest]), "total": duration(sum(found.values()))}


def _drawn(trace: Trace, step: int) -> Mapping[str, object]:
    rows = computed(trace, step)
    silent = names(trace, rows["seq_id"][rows["samples"] == 0])
    drawn = Said("tokens", {"n": len(trace.rows("tokens", step, step))})
    return {"n": int(rows["num_tokens"].sum()), "drawn": drawn, "who": silent}


# ---- out and back ----


def _lost(trace: Trace, step: int) -> Mapping[str, object]:
    row = victims(trace, step)[0]
    return {"who": names(trace, [row["seq_id"]]), "n": int(row["num_tokens"])}


def _victim(trace: Trace, step: int) -> int:
    return int(victims(trace, step)[0]["seq_id"])


def _makers_of_room(trace: Trace, asked: int, decided: int) -> tuple[int, ...]:
    """Who came to an end between the preemption and the return."""
    steps = trace.rows("steps", asked + 1, decided)["step_id"].tolist()
    return tuple(seq_id for step in steps for seq_id in ended(trace, step))


def _again(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    rows = resumed(trace, decided)
    work = rows[rows["seq_id"] == _victim(trace, asked)][0]
    return {
        "who": names(trace, [work["seq_id"]]), "others": names(trace, _makers_of_room(trace, asked, decided)),
        "steps": decided - asked,
    }  # fmt: skip


def _back(trace: Trace, step: int) -> Mapping[str, object]:
    rows = resumed(trace, step)
    return {"who": names(trace, rows["seq_id"]), "n": int(rows["num_recomputed"].sum()), "all": sum(map(end_of, rows))}


_OWN = "chapter.engine_insides."

WORDS = {
    f"{_OWN}title": "Inside the engine",
    f"{_OWN}question": "Who decides what the next step computes, and where does its time go?",
    f"{_OWN}front": (
        "The front end turned the text of {who} into {n:,} token. Now the scheduler decides how many of them a step takes.",
        "The front end turned the text of {who} into {n:,} tokens. Now the scheduler decides how many of them a step takes.",
    ),
    f"{_OWN}cache": "{who} needed more room: the KV cache manager gave it block {page:,}. Of {total:,} blocks {free:,} are free.",
    f"{_OWN}deal": "A step has room for {budget:,} tokens. First one each for {others}, then {n:,} for {who}'s prompt.",
    f"{_OWN}deal.ask": "Click the part of the engine whose time bar will be the longest in the next step.",
    f"{_OWN}deal.reveal": "{part} took {time} of {total}.",
    f"{_OWN}clock.schedule": "The scheduler's plan (schedule)",
    f"{_OWN}clock.commit": "Taking the result (commit, in the scheduler)",
    f"{_OWN}clock.build": "Building the batch (build, in the model executor)",
    f"{_OWN}clock.run": "Running the model (run, in the model executor)",
    f"{_OWN}clock.settle": "Waiting for the device (settle, under the sampler)",
    f"{_OWN}draw": "The model executor computed {n:,} tokens in one pass. The sampler drew {drawn}: none for {who}, whose prompt goes on.",
    f"{_OWN}draw.try": "Set run_ahead to 1: the next step is planned before this one's tokens are back.",
    f"{_OWN}out": (
        "No block was free. The scheduler moved {who} to preempted and let go of what it had computed: {n:,} token.",
        "No block was free. The scheduler moved {who} to preempted and let go of what it had computed: {n:,} tokens.",
    ),
    f"{_OWN}out.ask": "Click a request that will finish before {who} may go on.",
    f"{_OWN}out.reveal": "{others} finished and made room. After {steps:,} steps {who} came back.",
    f"{_OWN}back": "Running again: {who}. Of {all:,} tokens {n:,} are computed once more, then the text goes on where it was.",
}

CHAPTER = Chapter(
    name="engine_insides",
    order=50,
    preset="long",
    beats=(
        Beat(
            f"{_OWN}front", ("engine_map", "tokens"), preset="long",
            until=lambda trace, step: len(begun(trace, step)) > 0,
            fields=_arrived,
        ),
        Beat(
            f"{_OWN}cache", ("engine_map", "blocks"),
            until=lambda trace, step: bool(grown(trace, step)),
            select=lambda trace, step: f"seq:{next(iter(grown(trace, step)))}",
            fields=_given,
        ),
        Beat(
            f"{_OWN}deal", ("engine_map", "batching"),
            until=lambda trace, step: long_prompt(trace, step) is not None,
            fields=_dealt,
            predict=Predict(
                f"{_OWN}deal.ask", ("box",),
                lambda trace, asked, decided: frozenset({f"box:{_slowest(trace, decided)[0]}"}),
                f"{_OWN}deal.reveal",
                until=lambda trace, asked, step: any(_clocks(trace, step).values()),
                found=_time,
            ),
        ),
        Beat(
            f"{_OWN}draw", ("engine_map", "tokens"),
            until=lambda trace, step: len(reading(trace, step)) > 0 and len(writing(trace, step)) > 0,
            fields=_drawn,
            try_this=TryThis(f"{_OWN}draw.try", "run_ahead", 1),
        ),
        Beat(
            f"{_OWN}out", ("engine_map", "batching"), preset="flood",
            until=lambda trace, step: len(victims(trace, step)) > 0,
            select=lambda trace, step: f"seq:{_victim(trace, step)}",
            fields=_lost,
            predict=Predict(
                f"{_OWN}out.ask", ("seq",),
                lambda trace, asked, decided: frozenset(f"seq:{i}" for i in _makers_of_room(trace, asked, decided)),
                f"{_OWN}out.reveal", fields=_lost,
                until=lambda trace, asked, step: _victim(trace, asked) in resumed(trace, step)["seq_id"].tolist(),
                found=_again,
            ),
        ),
        Beat(
            f"{_OWN}back", ("engine_map", "batching"),
            until=lambda trace, step: len(resumed(trace, step)) > 0,
            select=lambda trace, step: f"seq:{int(max(resumed(trace, step), key=end_of)['seq_id'])}",
            fields=_back,
        ),
    ),
    words=WORDS,
)  # fmt: skip
