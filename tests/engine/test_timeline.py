"""A burst: every operation and stage once, in order, linked and named; what the profiler lost or cannot name is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import engine.cupti
import engine.timeline
from engine.artifacts import STAGES, Timeline, of_kind
from engine.audience import LiveSource
from engine.build import build_core
from engine.burst_rows import Rows, known_kernels, named, rows_of
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from engine.errors import EngineError
from engine.graphs import again
from engine.jobs import start_job
from engine.profile import MARK
from engine.request import SamplingParams
from engine.tiles import PastStep
from engine.timeline import STEPS
from tests.engine.test_profile import CPU, CUDA, Event
from tests.engine.test_session import make_session, until

PAST = PastStep(3, ((1, 9, 1), (2, 4, 1)), (tuple(range(5, 15)), tuple(range(40, 45))), ())
LAYER = ["rms_norm", "qkv", "rope", "kv_write", "attention", "o", "rms_norm", "gate_up", "silu_mul", "down"]
STEP = ["embedding", *LAYER, *LAYER, "rms_norm", "lm_head", "sample"]


@pytest.fixture
def core(tiny_llama):
    return build_core(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=64), SchedulerConfig(4, 64)))[0]


def run(core, past: PastStep = PAST, **args: object) -> tuple[list[Timeline], str]:
    job = start_job(core, "timeline", {"past": past, **args})
    while not job.advance():
        pass
    job.close()
    return job.take_artifacts(), job.note


def named_rows(it: Timeline, step: int) -> list[tuple[str, int]]:
    return [(it.names[k["name"]], int(k["layer"])) for k in it.kernels if k["step"] == step]


# ---- on this CPU ----


def test_every_operation_of_every_step_is_there_once_in_order_with_its_layer(core):
    (it,), note = run(core)
    assert not note and (it.step_id, it.source, it.graph_size, it.num_seqs, it.num_layers) == (3, "CPU operations", 0, 2, 2)
    assert len(it.steps) == STEPS + 1 and it.steps[0] == 0
    for step in range(STEPS):
        assert named_rows(it, step) == list(zip(STEP, [0] * 11 + [1] * 10 + [2] * 3))


def test_times_do_not_overlap_and_lie_within_their_step_and_its_launch(core):
    (it,), _ = run(core)
    assert (it.kernels["start_ns"][1:] >= it.kernels["stop_ns"][:-1]).all() and (it.kernels["stop_ns"] >= it.kernels["start_ns"]).all()
    launch = {int(h["step"]): h for h in it.host if it.names[h["name"]] == "launch"}
    for k in it.kernels:
        step = int(k["step"])
        assert launch[step]["start_ns"] <= k["start_ns"] <= k["stop_ns"] <= launch[step]["stop_ns"]
        assert it.steps[step] <= k["start_ns"] <= k["stop_ns"] <= it.steps[step + 1]
    assert it.plain_us > 0 and 0 < it.resolution_ns < 1e6


def test_each_step_has_its_stages_in_order_apart_from_each_other(core):
    (it,), _ = run(core)
    for step in range(STEPS):
        mine = it.host[it.host["step"] == step]
        assert [it.names[h["name"]] for h in mine] == list(STAGES)
        assert (mine["start_ns"][1:] >= mine["stop_ns"][:-1]).all()


def test_a_burst_leaves_the_room_the_clock_and_the_runner_as_they_were(core):
    core.add("", tuple(range(5, 15)), SamplingParams(max_tokens=8))
    core.step()
    room = core.rooms["main"]
    before = room.clock.busy_us, room.num_requests, set(core.rooms), dict(vars(core.runner)).keys(), core.runner.ops
    run(core)
    assert before == (room.clock.busy_us, room.num_requests, set(core.rooms), dict(vars(core.runner)).keys(), core.runner.ops)
    assert "schedule" not in vars(room.scheduler) and core.has_work
    assert len(room.recorder.drain().tables["steps"]) == 1


def test_a_step_that_fails_ends_the_burst_with_a_sentence_and_closes_its_room(core, monkeypatch):
    monkeypatch.setattr(core.runner.model, "logits", lambda hidden: 1 / 0)
    made, note = run(core)
    assert not made and "failed" in note and set(core.rooms) == {"main"} and "run" not in vars(core.runner)


def test_requests_that_fill_the_cache_get_pages_for_the_burst(core):
    core.reconfigure(replace(core.config, cache=replace(core.config.cache, num_pages=20)))
    (it,), note = run(core, PastStep(3, (), tuple(tuple(range(3, 150)) for _ in range(2)), ()))
    assert not note and it.num_seqs == 2 and core.rooms["main"].config.cache.num_pages == 20


def test_requests_that_cannot_decode_together_end_it_with_a_sentence(core):
    made, note = run(core, PastStep(3, (), tuple(tuple(range(3, 9)) for _ in range(5)), ()))
    assert not made and "do not fit" in note and set(core.rooms) == {"main"}, "at most four are computed at once here"


def test_requests_that_are_read_one_after_the_other_still_decode_together(core):
    core.reconfigure(replace(core.config, scheduler=replace(core.config.scheduler, max_num_batched_tokens=16)))
    long = PastStep(3, (), (tuple(range(5, 10)), tuple(range(3, 240)), tuple(range(7, 90))), ())
    (it,), note = run(core, long)
    assert not note and it.num_seqs == 3 and len(it.kernels) == STEPS * len(STEP)


def test_both_modes_are_taken_one_after_the_other_where_there_are_graphs(core):
    core.runner.record_graph = again
    core.runner.ops = replace(core.runner.ops, is_captured=True)
    made, note = run(core)
    assert not note and [it.graph_size for it in made] == [0, 2]
    assert len(made[1].kernels) == 0, "operations of a replay cannot be clocked on a CPU"
    assert [it.graph_size for it in run(core, modes=(True,))[0]] == [2]


def test_without_graphs_the_burst_is_taken_with_them_off(core):
    assert [it.graph_size for it in run(core, modes=(True,))[0]] == [0]


def test_what_cannot_be_run_is_refused_at_once(core):
    for args in ({"past": replace(PAST, token_ids=())}, {"past": PAST, "modes": ()}, {"past": PAST, "modes": ("off",)}):
        with pytest.raises(EngineError):
            start_job(core, "timeline", args)


def test_what_a_graph_holds_can_be_named_by_running_it_once_more(core, monkeypatch):
    """The `again` recorder stands for a graph: its function runs with named operations and the runner stays as it was."""
    core.runner.record_graph = again
    core.runner.ops = replace(core.runner.ops, is_captured=True)
    seen: list[list[tuple[str, int]]] = []

    def without_profiler(device, function):
        function()
        return []

    monkeypatch.setattr(engine.timeline, "with_profiler", without_profiler)
    monkeypatch.setattr(engine.timeline, "known_kernels", lambda events, names: seen.append(list(names)) or [])

    def reference(burst, plain_us):
        runner = burst.core.runner
        saved = runner.model, runner.attention, runner.ops
        burst._reference()
        assert all(a is b for a, b in zip((runner.model, runner.attention, runner.ops), saved, strict=True))

    monkeypatch.setattr(engine.timeline._Burst, "_on_cpu", reference)
    run(core, modes=(True,))
    operations = [(name, -2 - where) for name, where in seen[0] if name != "step"]
    assert [name for name, _ in operations] == STEP
    assert operations[1] == ("rms_norm", 0) and operations[11] == ("rms_norm", 1)


def matmuls_as_kernels(launch: str):
    """A profiler as on a GPU: torch's own marks of this CPU, and for each matmul that ran a launch and a kernel in its place."""

    def with_profiler(device, function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        events = list(profile.profiler.kineto_results.events())
        ran = sorted((e for e in events if e.name() in ("aten::mm", "aten::addmm")), key=lambda e: e.start_ns())
        made = [Event(launch, CPU, e.start_ns(), 10, 10**6 + i) for i, e in enumerate(ran)]
        return [*events, *made, *(Event(e.name(), CUDA, e.start_ns() + 20, 50, 10**6 + i) for i, e in enumerate(ran))]

    return with_profiler


@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpus_burst_from_marks_to_names(core, monkeypatch, graphs):
    core.runner.record_graph = again
    core.runner.ops = replace(core.runner.ops, is_captured=True)
    monkeypatch.setattr(engine.timeline, "with_profiler", matmuls_as_kernels("cudaGraphLaunch" if graphs else "cudaLaunchKernel"))
    monkeypatch.setattr(engine.timeline._Burst, "_on_cpu", engine.timeline._Burst._on_gpu)
    (it,), note = run(core, modes=(graphs,))
    assert not note and it.source == "CUPTI" and not it.unseen and it.graph_size == (2 if graphs else 0)
    matmuls = [("qkv", 0), ("o", 0), ("gate_up", 0), ("down", 0), ("qkv", 1), ("o", 1), ("gate_up", 1), ("down", 1), ("lm_head", 2)]
    for step in range(STEPS):
        assert named_rows(it, step) == matmuls
    launches = it.host[it.kernels["launch"]]
    assert (it.kernels["start_ns"] - launches["start_ns"] == 20).all() and (launches["step"] == it.kernels["step"]).all()
    stages = [it.names[h["name"]] for h in it.host if not it.names[h["name"]].startswith("cuda")]
    assert stages == list(STAGES) * STEPS
    assert all(it.steps[k["step"]] <= k["start_ns"] for k in it.kernels)


def test_graphs_from_before_the_first_profiler_are_captured_again_once(core, monkeypatch):
    core.runner.record_graph = again
    core.runner.ops = replace(core.runner.ops, is_captured=True)
    sessions = []
    monkeypatch.setattr(engine.cupti, "with_profiler", lambda device, run: sessions.append(device) or run())
    while core.capture_next():
        pass
    before = core.runner.graphs
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "device", torch.device("cuda"))
        for _ in range(2):
            engine.cupti.attach(core.runner)
    assert len(sessions) == 1 and core.runner.graphs is not before and not core.runner.graphs.sizes


# ---- what CUPTI says ----


NAMES = [("step", 0), ("launch", 0), ("sync", 0), ("step", 1), ("launch", 1), ("sync", 1)]
GRAPHS = [
    Event("cudaLaunchKernel", CPU, 900, 5, 1), Event("warm up", CUDA, 950, 10, 1),
    Event(f"{MARK}0", CPU, 1000, 1000), Event(f"{MARK}1", CPU, 1010, 90), Event(f"{MARK}2", CPU, 1200, 700),
    Event("aten::copy_", CPU, 1015, 9, 2), Event("cudaMemcpyAsync", CPU, 1020, 5, 2), Event("Memcpy HtoD", CUDA, 1030, 20, 2),
    Event("cudaGraphLaunch", CPU, 1050, 10, 3), Event("norm", CUDA, 1100, 200, 3), Event("gemm", CUDA, 1290, 300, 3),
    Event("sample", CUDA, 1700, 100, 3), Event(f"{MARK}1", CUDA, 1100, 700),
    Event(f"{MARK}3", CPU, 2100, 900), Event(f"{MARK}4", CPU, 2110, 90), Event(f"{MARK}5", CPU, 2300, 600),
    Event("cudaGraphLaunch", CPU, 2150, 10, 4), Event("norm", CUDA, 2200, 200, 4), Event("gemm", CUDA, 2390, 300, 4),
    Event("sample", CUDA, 2800, 100, 4),
]  # fmt: skip
KNOWN = [("norm", "rms_norm", 0), ("gemm", "lm_head", 2), ("sample", "sample", 2)]


def test_kernels_of_a_replay_are_linked_to_the_launch_of_their_step():
    for events in (GRAPHS, GRAPHS[::-1]):
        rows, boundaries, lost = rows_of(events, NAMES)
        assert boundaries == [1000, 2100, 3000] and not lost
        assert [(k.function, k.step, rows.host[k.launch][0]) for k in rows.kernels] == [
            ("Memcpy HtoD", 0, "cudaMemcpyAsync"), *((f, s, "cudaGraphLaunch") for s in (0, 1) for f in ("norm", "gemm", "sample")),
        ]  # fmt: skip
        assert [(name, step) for name, step, _, _ in rows.host if name in STAGES] == [n for n in NAMES if n[0] != "step"]


def test_kernels_of_a_replay_take_their_names_by_the_order_of_the_capture():
    rows, _, _ = rows_of(GRAPHS, NAMES)
    found, unseen = named(rows, KNOWN, "GraphLaunch")
    assert not unseen
    assert [(k.operation, k.layer) for k in found.kernels] == [("", -1), *[("rms_norm", 0), ("lm_head", 2), ("sample", 2)] * 2]


def test_another_number_of_kernels_names_none_and_another_function_not_that_one():
    rows, _, _ = rows_of(GRAPHS, NAMES)
    for known in (KNOWN[:2], [*KNOWN, KNOWN[0]], []):
        same, unseen = named(rows, known, "GraphLaunch")
        assert same == rows and unseen == ("not_named",)
    found, unseen = named(rows, [KNOWN[0], ("other gemm", "o", 1), KNOWN[2]], "GraphLaunch")
    assert unseen == ("partly_named",) and [k.operation for k in found.kernels][1:4] == ["rms_norm", "", "sample"]


def test_copies_do_not_count_and_a_step_with_another_number_of_kernels_is_not_named():
    rows, _, _ = rows_of(GRAPHS, NAMES)
    assert named(rows, [("Memset", "", -1), *KNOWN], "") == named(rows, KNOWN, "GraphLaunch")
    more = [*GRAPHS, Event("another", CUDA, 2950, 10, 4)]
    rows, _, _ = rows_of(more, NAMES)
    found, unseen = named(rows, KNOWN, "GraphLaunch")
    assert unseen == ("partly_named",) and [bool(k.operation) for k in found.kernels] == [False, True, True, True, *[False] * 4]


def test_a_session_that_lost_kernels_says_so_and_one_without_marks_is_not_believed():
    assert rows_of([e for e in GRAPHS if e.correlation != 4 or e.where is CPU], NAMES)[2]
    assert rows_of([replace(e, start=0) if e.what == "gemm" and e.correlation == 3 else e for e in GRAPHS], NAMES)[2]
    assert rows_of([e for e in GRAPHS if e.what != f"{MARK}4"], NAMES) is None
    assert rows_of([e for e in GRAPHS if e.where is CPU], NAMES) is None and rows_of([], NAMES) is None


def test_known_kernels_are_those_launched_within_an_operations_mark():
    names = [("step", 0), ("rms_norm", -2), ("lm_head", -4)]
    events = [
        Event("cudaLaunchKernel", CPU, 900, 5, 1), Event("warm up", CUDA, 950, 10, 1), Event(f"{MARK}0", CPU, 1000, 500),
        Event(f"{MARK}1", CPU, 1010, 50), Event("cudaLaunchKernel", CPU, 1020, 5, 2), Event("norm", CUDA, 2000, 5, 2),
        Event("cudaLaunchKernel", CPU, 1070, 5, 3), Event("glue", CUDA, 2010, 5, 3),
        Event(f"{MARK}2", CPU, 1100, 50), Event("cuLaunchKernelEx", CPU, 1110, 5, 4), Event("gemm", CUDA, 2020, 5, 4),
        Event("cudaLaunchKernel", CPU, 1120, 5, 5), Event("cast", CUDA, 2030, 5, 5),
        Event("cudaLaunchKernel", CPU, 1600, 5, 6), Event("after", CUDA, 2040, 5, 6),
    ]  # fmt: skip
    assert known_kernels(events, names) == [("norm", "rms_norm", 0), ("glue", "", -1), ("gemm", "lm_head", 2), ("cast", "lm_head", 2)]
    assert known_kernels(events[:3] + events[4:], names) == []


def test_rows_without_kernels_are_not_named():
    assert named(Rows([("launch", 0, 0, 1)], []), KNOWN, "") == (Rows([("launch", 0, 0, 1)], []), ("not_named",))


# ---- as the page asks ----


def test_the_page_gets_a_timeline_of_the_step_that_it_shows(tiny_llama):
    session = make_session(tiny_llama)
    until(lambda: session.is_ready)
    source = LiveSource(session)
    session.add("one two three", SamplingParams(max_tokens=4))
    until(lambda: (source.trace("main").last_step or 0) >= 2)
    source.do_timeline("main", {"step": 1})
    until(lambda: of_kind(source.trace("main"), Timeline))
    (found,) = of_kind(source.trace("main"), Timeline)
    assert found.step_id == 1 and found.num_seqs == 1 and np.isfinite(found.plain_us)
    with pytest.raises(EngineError):
        source.do_timeline("main", {"step": 10_000})
    session.close()


# ---- on a GPU ----


@pytest.mark.gpu
def test_on_a_gpu_every_kernel_is_named_with_graphs_off_and_on(smollm2):
    core, _ = build_core(
        EngineConfig(ModelSource(str(smollm2.path), "cuda", "bfloat16"), CacheConfig(num_pages=512), SchedulerConfig(8, 1024))
    )
    made, note = run(core, PastStep(3, (), (tuple(range(5, 200)),), ()))
    assert not note and [it.source for it in made] == ["CUPTI", "CUPTI"] and made[0].graph_size == 0 and made[1].graph_size == 1
    for it in made:
        assert "lost" not in it.unseen and "not_named" not in it.unseen, it.unseen
        assert (it.kernels["start_ns"] > 0).all() and (it.kernels["launch"] >= 0).all()
        layers = {int(layer) for layer in it.kernels["layer"]}
        assert set(range(30)) <= layers
    graph = made[1]
    launches = {graph.names[graph.host["name"][k["launch"]]] for k in graph.kernels if k["layer"] >= 0}
    assert all("GraphLaunch" in name for name in launches)
