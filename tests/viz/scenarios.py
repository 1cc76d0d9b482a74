"""Traces that every view must survive, from the real scheduler with a stand-in model."""

from __future__ import annotations

from functools import cache

from engine.compare import last_requests
from engine.jobs import start_job
from engine.trace import TABLES, Trace
from tests.factories import add, make_core, make_trace, prompt_of, run, trace_of
from tests.viz import kernel_scenarios, ladder_scenarios, tile_scenarios, timeline_scenarios


def empty() -> Trace:
    return Trace()


def one_step() -> Trace:
    core = make_core()
    add(core, 5, 3)
    core.step()
    return trace_of(core)


def long() -> Trace:
    """700 steps and more, 9 live at times, a pool of 96 blocks."""
    core = make_core(pages=96, page_size=16, max_num_seqs=8, max_num_batched_tokens=64)
    for i in range(40):
        add(core, prompt_of(3 + 17 * i % 120, i), 20 + 13 * i % 90)
    run(core)
    return trace_of(core)


def preempted() -> Trace:
    """Two preemptions with recomputation; a queue behind a request that waits for blocks."""
    core = make_core(pages=24, page_size=8, max_num_seqs=4, max_num_batched_tokens=32)
    for length, most in ((40, 40), (50, 60), (30, 34), (60, 34)):
        add(core, prompt_of(length, length), most)
    for _ in range(6):
        core.step()
    add(core, prompt_of(80, 6), 34)
    run(core)
    return trace_of(core)


def broken() -> Trace:
    """A step that failed, an aborted request, and life after both."""
    core = make_core()
    add(core, 6, 8)
    add(core, 9, 8)
    core.step()
    core.runner.fail_on = {2}
    core.step()
    core.step()
    add(core, 4, 5)
    add(core, 7, 5)
    core.step()
    core.abort(3)
    run(core)
    return trace_of(core)


def crowded() -> Trace:
    """Twelve at once: more than hues."""
    core = make_core(pages=64, page_size=4, max_num_seqs=12, max_num_batched_tokens=64)
    for i in range(12):
        add(core, prompt_of(4 + i, i), 6 + i)
    run(core)
    return trace_of(core)


def large_pool() -> Trace:
    core = make_core(pages=3000, page_size=16, max_num_seqs=40, max_num_batched_tokens=512)
    for i in range(60):
        add(core, prompt_of(30 + 5 * i, i), 20)
    run(core)
    return trace_of(core)


def ahead() -> Trace:
    core = make_core(run_ahead=1, max_num_seqs=3)
    for i in range(4):
        add(core, prompt_of(3 + i, i), 6)
    run(core)
    return trace_of(core)


def static() -> Trace:
    return make_trace(batching="static")


def slabs() -> Trace:
    return make_trace(mode="contiguous", pages=24)


def no_cache() -> Trace:
    return make_trace(mode="none", pages=24, max_num_batched_tokens=64)


def hostile() -> Trace:
    """Text that would run, break a layout or hide elsewhere."""
    core = make_core()
    add(core, 6, 8)
    run(core)
    trace = trace_of(core)
    nasty = ['<img src=x onerror="alert(1)">', "${7*7}", "`{{x}}`", "</script>", "<b>", "\u202eabc", "x" * 10_000, "漢字🙂", "\n\t\r\x00"]
    ids = sorted(trace.token_texts)
    texts = {**trace.token_texts, **{i: nasty[n % len(nasty)] for n, i in enumerate(ids)}}
    return Trace(
        {name: getattr(trace, name) for name in ("steps", "works", "tokens", "waits", "finishes", "events", "keyframes")},
        trace.sequences, texts, {**trace.meta, "device": "<b>${x}", "date": "</script>", "source": "recording"},
    )  # fmt: skip


COMPARED = ("none", "contiguous", "static", "chunked", "prefixes", "swapped")


@cache
def compared(kind: str) -> Trace:
    """A run with the real comparison of two modes."""
    knob, values, knobs = {
        "none": ("mode", ("paged", "none"), {}),
        "contiguous": ("mode", ("paged", "contiguous"), {}),
        "static": ("batching", ("continuous", "static"), {"max_num_seqs": 3}),
        "chunked": ("chunked_prefill", (True, False), {"max_num_batched_tokens": 8}),
        "prefixes": ("prefix_caching", (True, False), {}),
        "swapped": ("mode", ("none", "paged"), {"max_num_seqs": 2}),
    }[kind]
    core = make_core(**{"pages": 48, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, **knobs})
    add(core, prompt_of(5, 1), 12)
    add(core, prompt_of(11, 2), 10)
    for _ in range(4):
        core.step()
    add(core, (*prompt_of(11, 2)[:8], 5, 6, 7), 8)
    add(core, prompt_of(30, 4), 6)
    add(core, prompt_of(6, 5), 6, n=2, temperature=0.8, seed=7)
    run(core)
    before = trace_of(core)
    prompts, names = last_requests(before)
    job = start_job(core, "compare", {"knob": knob, "values": values, "prompts": prompts, "names": names})
    while not job.advance():
        pass
    job.close()
    tables = {name: getattr(before, name) for name in TABLES}
    return Trace(tables, before.sequences, before.token_texts, before.meta, tuple(job.take_artifacts()))


def with_comparison() -> Trace:
    return compared("contiguous")


def with_timelines() -> Trace:
    return timeline_scenarios.timelines("both")


def with_kernels() -> Trace:
    return kernel_scenarios.kernels("prefill")


def with_tiles() -> Trace:
    return tile_scenarios.cached()


def with_ladder() -> Trace:
    return ladder_scenarios.gpu()


def broken_artifacts() -> Trace:
    return kernel_scenarios.kernels("unusable")


TILE_VIEWS, KERNEL_VIEWS = ("flash_tiles", "sm_timeline"), ("memory_traffic", "roofline", "kernel_page")


@cache
def own_traces(view: str) -> tuple[Trace, ...]:
    """Traces with what a view of artifacts is about; none for a view of the steps themselves."""
    if view == "compare":
        return tuple(compared(kind) for kind in COMPARED)
    if view == "kernel_gaps":
        return tuple(map(timeline_scenarios.timelines, timeline_scenarios.TIMELINE_MAKERS))
    if view == "speed_ladder":
        return tuple(make() for make in ladder_scenarios.LADDERS.values())
    if view in TILE_VIEWS:
        return tuple(make() for make in tile_scenarios.TRACES.values())
    return tuple(kernel_scenarios.kernels(name) for name in kernel_scenarios.KERNEL_MAKERS) if view in KERNEL_VIEWS else ()


_RUNS = (empty, one_step, long, preempted, broken, crowded, large_pool, ahead, static, slabs, no_cache, hostile)
_WITH_ARTIFACTS = (with_comparison, with_kernels, with_timelines, with_tiles, with_ladder, broken_artifacts)
MAKERS = {f.__name__: f for f in (*_RUNS, *_WITH_ARTIFACTS)} | {"busy": make_trace}


@cache
def scenario(name: str) -> Trace:
    return MAKERS[name]()


def some_steps(trace: Trace, most: int = 8) -> list[int | None]:
    """None, the first, the last, and some between; those with preemptions and failures among them."""
    ids = trace.steps["step_id"].tolist()
    picked = ids[:: max(len(ids) // most, 1)] + ids[-1:]
    picked += trace.preempts["step_id"].tolist()[:3] + trace.steps["step_id"][trace.steps["failed"] > 0].tolist()
    return [None, *dict.fromkeys(picked)]
