"""The Chrome trace: strict JSON, relative times, spans that nest and never overlap, lengths as recorded."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from engine.chrome_trace import BURSTS, DEVICE_TRACK, ENGINE, HOST_TRACK, LAUNCH_TRACK, REQUESTS, STAGES, STEPS, chrome_trace, free_blocks
from engine.recording import load
from engine.trace import TABLES, SequenceInfo, Trace
from tests.factories import make_trace
from tests.viz import scenarios
from tests.viz.kernel_scenarios import with_artifacts
from tests.viz.timeline_scenarios import cpu, off, on, timeline

RECORDINGS = sorted((Path(__file__).parents[2] / "assets" / "recordings").glob("*.glass"))
TRACES = {name: getattr(scenarios, name) for name in ("empty", "one_step", "long", "preempted", "broken")}
TRACES |= {path.stem: (lambda path=path: load(path)) for path in RECORDINGS}


def refuse(word: str) -> float:
    raise AssertionError(word)


def read(text: str) -> dict:
    return json.loads(text, parse_constant=refuse)


def spans(made: dict, track: int) -> list[dict]:
    found = [e for e in made["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (ENGINE, track)]
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))


@pytest.fixture(scope="module", params=TRACES)
def pair(request) -> tuple[Trace, dict]:
    trace = TRACES[request.param]()
    return trace, read(chrome_trace(trace))


def test_spans_have_positive_times_and_lengths_and_nest_on_every_track(pair):
    trace, made = pair
    assert made["otherData"]["steps"] == len(trace)
    timed = [e for e in made["traceEvents"] if e["ph"] != "M"]
    assert all(type(e["ts"]) is int and e["ts"] > 0 for e in timed)
    assert all(type(e["dur"]) is int and e["dur"] > 0 for e in timed if e["ph"] == "X")
    for track in {e["tid"] for e in timed}:
        open_: list[int] = []
        for span in spans(made, track):
            while open_ and open_[-1] <= span["ts"]:
                open_.pop()
            assert not open_ or span["ts"] + span["dur"] <= open_[-1], span
            open_.append(span["ts"] + span["dur"])
            assert len(open_) <= (2 if track == STEPS else 1)


def test_every_stage_is_as_long_as_the_record_says(pair):
    trace, made = pair
    for stage in STAGES:
        want = {int(s["step_id"]): int(s[f"{stage}_us"]) for s in trace.steps if s[f"{stage}_us"]}
        assert {e["args"]["step"]: e["dur"] for e in spans(made, STEPS) if e["name"] == stage} == want
    works = {e["args"]["step"]: e["args"]["tokens_computed"] for e in spans(made, STEPS) if e["name"].startswith("step ")}
    assert works == {s: int(trace.step(s).works["num_tokens"].sum()) for s in works}


def test_every_request_has_a_track_that_counts_all_its_tokens(pair):
    trace, made = pair
    for seq_id, info in trace.sequences.items():
        mine = spans(made, REQUESTS + seq_id)
        assert {e["name"] for e in mine} <= {"waiting", "prefill", "decode", "recompute", "preempted"}
        ran = [e for e in mine if e["name"] in ("prefill", "decode", "recompute")]
        failed = set(trace.steps["step_id"][trace.steps["failed"] > 0].tolist())
        works = trace.works[(trace.works["seq_id"] == seq_id) & ~np.isin(trace.works["step_id"], list(failed))]
        assert sum(e["args"]["tokens"] for e in ran) >= works["num_tokens"].sum()
        names = [e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name" and e["tid"] == REQUESTS + seq_id]
        assert names == [f"request {info.name}"]


def test_the_counters_are_the_pool_and_the_plan(pair):
    trace, made = pair
    ids = trace.steps["step_id"].tolist()
    assert free_blocks(trace, trace.steps) == [trace.pool_at(s).num_free for s in ids]
    counted = [e["args"]["tokens"] for e in made["traceEvents"] if e["ph"] == "C" and e["name"] == "tokens per step"]
    assert counted == [int(trace.step(s).works["num_tokens"].sum()) for s in ids]


def test_a_preempted_request_says_so():
    made = read(chrome_trace(scenarios.preempted()))
    assert any(e["name"] == "preempted" for e in made["traceEvents"])
    finished = [e for e in made["traceEvents"] if e["name"].startswith("finished")]
    assert len(finished) == 5 and all(e["ph"] == "i" for e in finished)


def test_what_is_computed_again_is_called_so_and_no_prompt():
    trace = make_trace(mode="none", pages=32)
    made = read(chrome_trace(trace))
    again = {int(s): int((trace.works["seq_id"][trace.works["num_recomputed"] > 0] == s).sum()) for s in trace.sequences}
    for seq_id, steps in again.items():
        counted = [e["args"] for e in spans(made, REQUESTS + seq_id) if e["name"] == "recompute"]
        assert sum(a["last_step"] - a["first_step"] + 1 for a in counted) == steps
    assert max(again.values()) > 3 and any(e["name"] == "prefill" for e in made["traceEvents"])


def test_overlapping_and_nonsensical_clocks_still_give_a_trace_that_can_be_drawn():
    trace = scenarios.long()
    steps = trace.steps.copy()
    steps["start_us"] = 2**61 + steps["step_id"].astype(np.int64) * 10
    steps["run_us"], steps["settle_us"] = 700, -5
    made = read(chrome_trace(Trace({**{t: getattr(trace, t) for t in TABLES}, "steps": steps}, trace.sequences, meta=trace.meta)))
    test_spans_have_positive_times_and_lengths_and_nest_on_every_track((steps, made))
    assert max(e["ts"] for e in made["traceEvents"] if "ts" in e) < 2**40


def test_only_the_newest_steps_travel_and_hostile_names_stay_text():
    trace = scenarios.long()
    made = read(chrome_trace(trace, 100))
    assert made["otherData"]["steps"] == 100 and made["otherData"]["steps_recorded"] == len(trace)
    info = SequenceInfo(1, 1, 0, "</script>\ud800", "", (1,), 1, 0.0, 0, 0, 0, "main")
    text = chrome_trace(Trace(sequences={1: info}, meta={"model": {"name": "<img>\u2028"}, "device": float("nan")}))
    assert "request </script>" in json.dumps(read(text)) and text.isascii()


# ---- bursts ----


def of_burst(*timelines: object) -> list[list[dict]]:
    """Events by process."""
    made = read(chrome_trace(with_artifacts(*timelines)))["traceEvents"]
    return [[e for e in made if e["pid"] == BURSTS + i] for i in range(len(timelines))]


def test_a_burst_is_a_process_of_its_own_with_host_launches_and_device():
    for it, events in zip((off(), on()), of_burst(off(), on()), strict=True):
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert names == {HOST_TRACK: "host: stages", LAUNCH_TRACK: "host: launches", DEVICE_TRACK: "GPU"}
        kernels = [e for e in events if e["ph"] == "X" and e["cat"] == "device"]
        assert [e["name"] for e in kernels] == [it.names[i] for i in it.kernels["name"]]
        assert [round(e["dur"] * 1e3) for e in kernels] == (it.kernels["stop_ns"] - it.kernels["start_ns"]).tolist()
        begins = np.array([round(e["ts"] * 1e3) for e in kernels])
        assert (np.diff(begins) == np.diff(it.kernels["start_ns"])).all() and all(e["ts"] > 0 for e in events if e["ph"] != "M")
        assert {e["args"]["layer"] for e in kernels} == set(range(5))
        host = [e for e in events if e["ph"] == "X" and e["cat"] == "host"]
        assert len(host) == len(it.host) and {e["name"] for e in host if e["tid"] == HOST_TRACK} == set(
            ("schedule", "build", "launch", "sync", "commit")
        )


def test_an_arrow_goes_from_each_launch_to_its_first_kernel():
    for it, events in zip((off(), on()), of_burst(off(), on()), strict=True):
        begins = {e["id"]: e for e in events if e["ph"] == "s"}
        ends = {e["id"]: e for e in events if e["ph"] == "f"}
        assert begins.keys() == ends.keys() and len(begins) == len(set(it.kernels["launch"].tolist()))
        slices = {(e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
        for key, arrow in begins.items():
            from_, to = slices[arrow["tid"], arrow["ts"]], slices[ends[key]["tid"], ends[key]["ts"]]
            assert from_["tid"] == LAUNCH_TRACK and to["cat"] == "device" and ends[key]["bp"] == "e"
            assert arrow["name"] == ends[key]["name"] and arrow["cat"] == ends[key]["cat"], "Perfetto joins what is alike"
            if it.graph_size:
                assert from_["name"] == "cudaGraphLaunch" and to["name"] == "embedding"


def test_arrows_of_two_bursts_are_never_joined():
    one, other = of_burst(off(), off())
    assert not {e["id"] for e in one if e["ph"] == "s"} & {e["id"] for e in other if e["ph"] == "s"}


def test_kernels_that_overlap_keep_their_length_on_a_second_track():
    (events,) = of_burst(timeline(gap_ns=-1000))
    kernels = [e for e in events if e["ph"] == "X" and e["cat"] == "device"]
    assert {e["tid"] for e in kernels} == {DEVICE_TRACK, DEVICE_TRACK + 1} and {e["dur"] for e in kernels} == {3.0}
    for track in (DEVICE_TRACK, DEVICE_TRACK + 1):
        mine = [e for e in kernels if e["tid"] == track]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(mine))


def test_operations_of_a_cpu_have_no_launches_and_no_arrows():
    (events,) = of_burst(cpu())
    assert not [e for e in events if e["ph"] in "sf"] and "operations" in {e["args"].get("name") for e in events if e["ph"] == "M"}
