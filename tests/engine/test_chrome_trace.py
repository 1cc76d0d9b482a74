"""The Chrome trace: strict JSON, relative times, spans that nest and never overlap, lengths as recorded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.chrome_trace import ENGINE, REQUESTS, STAGES, STEPS, chrome_trace, free_blocks
from engine.recording import load
from engine.trace import TABLES, SequenceInfo, Trace
from tests.factories import make_trace
from tests.viz import scenarios

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
