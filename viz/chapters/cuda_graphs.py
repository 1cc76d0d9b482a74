"""CUDA graphs: a token is many small kernels, and who starts them one by one lets the device wait.

Every number is of a burst (engine/timeline.py) of the requests of the step that is shown. Without a GPU there is no graph: then
the CPU's own operations are told, and that a graph would need a GPU. Which steps a graph can replay is read from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.trace import Trace
from viz.chapter import Beat, Chapter, Predict, Said, TryThis
from viz.measured import brief
from viz.moments import all_write, begun, computed, going_on, names, reading, writing
from viz.theme import duration
from viz.timelines import Burst, bursts
from viz.views.kernel_gaps import foremost, share

_OWN = "chapter.cuda_graphs."
_STAGES = ("schedule", "build", "launch", "sync", "commit")


def _found(trace: Trace, step: int) -> tuple[Burst, ...]:
    """This run's own bursts of a step."""
    return tuple(b for b in bursts(trace, step) if b.it.step_id == step and not b.foreign)


def _said(b: Burst) -> dict[str, object]:
    return {"kernels": f"{b.kernels:,.0f}", "busy": share(b.busy_share), "gap": brief(b.mean_gap_us), "token": duration(b.token_us)}


def _mine(b: Burst) -> str:
    return "gpu" if b.is_gpu else "cpu"


# ---- one writes, then three ----


def _alone(trace: Trace, step: int) -> bool:
    """One writes, alone, and goes on."""
    return len(computed(trace, step)) == len(writing(trace, step)) == len(going_on(trace, step)) == 1


def _more_write(trace: Trace, asked: int, step: int) -> bool:
    """Three or more write and go on, and nobody reads."""
    return all_write(trace, step) and len(going_on(trace, step)) >= 3


def _waits(trace: Trace, step: int) -> Mapping[str, object]:
    b = foremost(_found(trace, step))
    return {"what": Said(f"{_OWN}waits.{_mine(b)}", _said(b))}


def _figures(b: Burst) -> dict[str, float]:
    """By the marks of the view."""
    return {"kernels": b.kernels, "gap": b.mean_gap_us, "token": b.token_us}


def _steady(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    """The figure that changed least."""
    before, after = (_figures(_found(trace, step)[-1]) for step in (asked, decided))
    changes = {name: abs(after[name] / before[name] - 1) if before[name] else 1.0 for name in before}
    return frozenset(f"figure:{name}" for name, change in changes.items() if change == min(changes.values()))


def _shared(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    before, after = (_found(trace, step)[-1] for step in (asked, decided))
    each = duration(after.token_us / max(after.it.num_seqs, 1))
    return {
        "kernels": f"{after.kernels:,.0f}",
        "one": duration(before.token_us),
        "all": duration(after.token_us),
        "each": each,
        "n": after.it.num_seqs,
    }


def _longest(trace: Trace, step: int) -> str | None:
    """The mark of the longest wait."""
    found = _found(trace, step)
    places = foremost(found).longest(1) if found else []
    return f"gap:{foremost(found).side}-{places[0]}" if places else None


def _why(trace: Trace, step: int) -> Mapping[str, object]:
    b = foremost(_found(trace, step))
    place = b.longest(1)[0]
    begin, end = b.gap(place)
    stage = b.meanwhile(place)
    why = Said(f"{_OWN}why.{stage if stage in _STAGES else 'none'}")
    return {"time": brief((end - begin) / 1e3), "name": b.name(place)[:30], "why": why}


def _graph(trace: Trace, step: int) -> Mapping[str, object]:
    found = {b.side: b for b in _found(trace, step)}
    if "on" not in found:
        return {"what": Said(f"{_OWN}graph.none", _said(next(iter(found.values()))))}
    on = found["on"]
    if "off" not in found:
        return {"what": Said(f"{_OWN}graph.alone", _said(on))}
    off, now = _said(found["off"]), _said(on)
    return {"what": Said(f"{_OWN}graph.both", {**now, "busy0": off["busy"], "token0": off["token"]})}


# ---- which steps a graph can replay ----


def _reads_on(trace: Trace, step: int) -> bool:
    """A prompt's first chunk beside others that write; several steps full of it are left."""
    budget = int(trace.step(step).step["token_budget"])
    left = set(reading(trace, step, left=4 * budget)["seq_id"].tolist())
    return len(writing(trace, step)) > 0 and bool(left & set(begun(trace, step)["seq_id"].tolist()))


def _several(trace: Trace, step: int) -> tuple[int, ...]:
    """seq_ids that compute more than one token."""
    works = computed(trace, step)
    return tuple(works["seq_id"][works["num_tokens"] > 1].tolist())


def _who(trace: Trace, step: int) -> Mapping[str, object]:
    return {"who": names(trace, writing(trace, step)["seq_id"]), "reader": names(trace, _several(trace, step))}


def _hinders(trace: Trace, asked: int, decided: int) -> frozenset[str]:
    return frozenset(f"seq:{seq_id}" for seq_id in _several(trace, decided))


def _chunk(trace: Trace, asked: int, decided: int) -> Mapping[str, object]:
    works = computed(trace, decided)
    return {"reader": names(trace, _several(trace, decided)), "n": int(works["num_tokens"].max())}


def _again(trace: Trace, step: int) -> Mapping[str, object]:
    b = foremost(_found(trace, step))
    return {"who": names(trace, writing(trace, step)["seq_id"]), "gap": brief(b.mean_gap_us), "share": share(1 - b.busy_share)}


WORDS = {
    f"{_OWN}title": "CUDA graphs",
    f"{_OWN}question": "Why does a GPU wait for its CPU, and what does a graph change?",
    f"{_OWN}waits": "{what}",
    f"{_OWN}waits.gpu": (
        "One token takes {kernels} kernels. Launched one by one the GPU works {busy} of the time and waits {gap} after each."
    ),
    f"{_OWN}waits.cpu": "One token takes {kernels} operations. Python starts each: {busy} of the time is work, {gap} lie between two.",
    f"{_OWN}waits.ask": "Soon three write at once. Click the figure in a frame that stays as it is.",
    f"{_OWN}waits.reveal": (
        "{kernels} again: each serves the whole batch. A step took {one} for one and {all} for {n:,}: {each} a token.",
        "{kernels} again: each serves the whole batch. A step took {one} for one and {all} for {n:,}: {each} a token.",
    ),
    f"{_OWN}longest": "The longest wait of this step is {time}, after {name}: {why}",
    f"{_OWN}why.schedule": "the CPU is planning the next step.",
    f"{_OWN}why.build": "the CPU is putting the next step's inputs together.",
    f"{_OWN}why.launch": "the CPU is still on its way to the next launch.",
    f"{_OWN}why.sync": "the CPU is waiting for the results itself.",
    f"{_OWN}why.commit": "the CPU is taking in the tokens of this step.",
    f"{_OWN}why.none": "the CPU is between two stages of a step.",
    f"{_OWN}graph": "{what}",
    f"{_OWN}graph.both": "Replayed as a graph, one launch starts all {kernels} kernels: busy {busy0} → {busy}, a step {token0} → {token}.",
    f"{_OWN}graph.alone": "Replayed as a graph, one launch starts all {kernels} kernels: busy {busy}, a step takes {token}.",
    f"{_OWN}graph.none": "A graph is recorded once and replayed by one launch. It needs a GPU: here all {kernels} are started one by one.",
    f"{_OWN}graph.try": "Set run_ahead to 1: the CPU plans the next step while this one still runs.",
    f"{_OWN}reads": "{who} write one token each, and {reader} begins to read a long prompt in chunks.",
    f"{_OWN}reads.ask": "A graph holds steps in which everybody computes one token. Click who keeps the next step from being replayed.",
    f"{_OWN}reads.reveal": (
        "{reader} reads {n:,} token in it, and another number later. Such a step is launched kernel by kernel.",
        "{reader} reads {n:,} tokens in it, and another number later. Such a step is launched kernel by kernel.",
    ),
    f"{_OWN}again": ("{who} write again. The talk saw waits of about 100 µs without graphs; here the mean is {gap}, {share} of the time."),
}

CHAPTER = Chapter(
    name="cuda_graphs",
    order=80,
    preset="shared",
    beats=(
        Beat(
            f"{_OWN}waits", ("kernel_gaps",), preset="shared", until=_alone, fields=_waits, job=("timeline", {}),
            predict=Predict(
                f"{_OWN}waits.ask", ("figure",), _steady, f"{_OWN}waits.reveal", until=_more_write, found=_shared, job=("timeline", {}),
            ),
        ),
        Beat(f"{_OWN}longest", ("kernel_gaps",), select=_longest, fields=_why, job=("timeline", {})),
        Beat(
            f"{_OWN}graph", ("kernel_gaps",), fields=_graph, job=("timeline", {}),
            try_this=TryThis(f"{_OWN}graph.try", "run_ahead", 1),
        ),
        Beat(
            f"{_OWN}reads", ("batching",), preset="long", until=_reads_on, fields=_who,
            predict=Predict(f"{_OWN}reads.ask", ("seq",), _hinders, f"{_OWN}reads.reveal", found=_chunk),
        ),
        Beat(f"{_OWN}again", ("kernel_gaps",), until=all_write, fields=_again, job=("timeline", {})),
    ),
    words=WORDS,
)  # fmt: skip
