"""The engine map's numbers are those of the tables, counted here in other ways; everybody stands in one place."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from engine.trace import FINISH_REASONS, Trace
from tests.factories import add, make_core, prompt_of, run, trace_of
from tests.viz.scenarios import scenario
from tests.viz.valid import check_frame
from viz.stepfacts import CLOCKS, facts
from viz.view import Frame, ViewState, render
from viz.views.engine_map import AREAS, BOXES, FILES, VIEW
from viz.words.caption import reason_words

SIZES = ((1240, 560), (960, 540), (460, 520), (480, 440), (360, 437))  # beside each other; narrower; below; tight; a phone


@cache
def decoding() -> Trace:
    core = make_core(pages=32, page_size=4)
    for length in (3, 5, 6):
        add(core, length, 9)
    run(core)
    return trace_of(core)


@cache
def chunks() -> Trace:
    core = make_core(pages=32, max_num_batched_tokens=16)
    add(core, 40, 3)
    run(core)
    return trace_of(core)


@cache
def paused() -> Trace:
    """An abort while the room is paused: step 2 only reports."""
    core = make_core(pages=32)
    for length in (6, 9, 4):
        add(core, length, 8)
    core.step()
    core.step()
    core.abort(2)
    core.report("main")
    run(core)
    return trace_of(core)


def frame(trace: Trace, step: int, size: tuple[int, int] = SIZES[0]) -> Frame:
    state = ViewState(step=step, size=size)
    made = render(VIEW, trace, state)
    check_frame(made, state)
    return made


def texts(made: Frame) -> list[str]:
    return [label.text for label in made.labels]


def places(made: Frame) -> dict[str, list[str]]:
    """Where the marks of chips say that they are: area → letters."""
    found: dict[str, list[str]] = {"waiting": [], "running": [], "preempted": [], "done": []}
    for mark in made.marks:
        if mark.id.startswith("seq:"):
            name, _, rest = mark.text.partition(" is ")
            found[rest.split(":")[0]].append(name)
    return found


def free_pages(trace: Trace, step: int) -> set[int]:
    pool = trace.pool_at(step)
    return set((np.flatnonzero((pool.ref_counts[1:] == 0) & ~pool.pending[1:]) + 1).tolist())


# ---- five moments ----


def test_decode_only() -> None:
    trace, step = decoding(), 3
    f, said = facts(trace, step), texts(frame(trace, step))
    assert (f.scheduled, f.logits, f.sampled, f.new) == (3, 3, 3, ())
    assert places(frame(trace, step)) == {"waiting": [], "running": ["A", "B", "C"], "preempted": [], "done": []}
    assert {"waiting 0", "running 3", "preempted 0", "done 0", "3 requests"} <= set(said)
    lost, got = free_pages(trace, step - 1) - free_pages(trace, step), free_pages(trace, step) - free_pages(trace, step - 1)
    assert (f.taken, f.freed, f.shared) == (len(lost), len(got), 0)
    assert any(text.startswith(f"{len(lost)} block") and text.endswith("taken") for text in said)
    assert f"then {len(free_pages(trace, step))} of 32 free" in said and "in this step:" in said


def test_a_chunk_of_a_prompt_is_scheduled_and_nothing_sampled() -> None:
    trace = chunks()
    f = facts(trace, 1)
    assert (f.scheduled, f.logits, f.sampled, f.taken) == (16, 0, 0, 4)
    said = texts(frame(trace, 1, SIZES[2]))
    assert "16 tokens scheduled" in said and "0 tokens sampled" in said and "nobody new" in said
    assert any(text.startswith("4 taken · 0 refs added · 0 freed") for text in said)
    assert facts(trace, 0).prompt_tokens == 40 and "new: A, 40 prompt tokens" in texts(frame(trace, 0, SIZES[2]))


def test_who_was_preempted_stands_apart_until_it_comes_back() -> None:
    trace = scenario("preempted")
    lost = trace.preempts[0]
    step, name = int(lost["step_id"]), trace.name(int(lost["seq_id"]))
    back = next(int(w["step_id"]) for w in trace.works if w["seq_id"] == lost["seq_id"] and w["step_id"] > step)
    for at in range(step - 2, back + 2):
        where = places(frame(trace, at))
        assert (name in where["preempted"]) == (step <= at < back), at
        assert (name in where["running"]) == (at < step or at >= back), at
        assert set(where["waiting"]).isdisjoint(where["preempted"])
    assert facts(trace, step).freed >= int(lost["num_pages"]) > 0


def test_an_abort_while_paused_computes_nothing_and_has_no_times() -> None:
    trace = paused()
    step = int(trace.finishes["step_id"][0])
    assert not len(trace.rows("works", step, step)) and FINISH_REASONS[int(trace.finishes["reason"][0])].value == "abort"
    made = frame(trace, step)
    where = places(made)
    assert where["done"] == ["B"] and where["running"] == ["A", "C"] and not where["waiting"]
    f = facts(trace, step)
    assert (f.scheduled, f.sampled, f.freed) == (0, 0, int(trace.finishes["num_pages"][0]))
    assert f.idle == {i for i in trace.sequences if trace.name(i) in "AC"}
    assert "done: abort" in texts(made) and not f.is_timed
    assert [b.kind for b in made.badges] == ["state"] and not [s for s in made.series if s.name.startswith("clock")]
    assert not [s for s in made.series if s.name == "arrow"]
    detail = next(m.detail for m in made.marks if m.text == "A is running")
    assert detail == "A waits: the room is paused"


def test_a_failed_step_ends_its_requests_and_samples_nothing() -> None:
    trace = scenario("broken")
    step = int(trace.steps["step_id"][trace.steps["failed"] > 0][0])
    made, f = frame(trace, step), facts(trace, step)
    assert f.failed and (f.logits, f.sampled) == (0, 0) and f.scheduled == int(trace.rows("works", step, step)["num_tokens"].sum()) > 0
    assert places(made)["done"] == ["A", "B"] and "failed" in texts(made) and texts(made).count("done: error") == 2
    assert "failed" in made.summary


# ---- always ----


@pytest.mark.parametrize("name", ["busy", "preempted", "broken", "long", "ahead", "static", "slabs", "no_cache", "crowded"])
def test_blocks_are_conserved_and_everybody_stands_in_one_place(name: str) -> None:
    trace = scenario(name)
    for step in trace.steps["step_id"].tolist()[:120]:
        f = facts(trace, step)
        here = (*f.waiting, *f.running, *f.preempted, *(i for i, _ in f.done))
        assert len(here) == len(set(here))
        tables = ("works", "waits", "finishes")
        assert set(here) == {i for t in tables for i in trace.rows(t, step, step)["seq_id"].tolist()}
        assert set(trace.rows("preempts", step, step)["seq_id"].tolist()) <= {*f.preempted, *(i for i, _ in f.done)}
        assert f.sampled == len(trace.rows("tokens", step, step)) and f.free == len(free_pages(trace, step))
        if step:
            change = len(free_pages(trace, step - 1)) - f.free
            assert f.taken - f.freed <= change <= f.taken - f.freed + f.shared  # a shared block was free (cached) or held


def test_new_requests_are_counted_once_each() -> None:
    for name in ("busy", "long", "broken"):
        trace = scenario(name)
        found = [i for step in trace.steps["step_id"].tolist() for i in facts(trace, step).new]
        assert sorted(found) == sorted(trace.sequences)


def test_without_the_step_before_nothing_is_invented() -> None:
    trace = scenario("busy")
    later = Trace(
        {n: trace.rows(n, 5, 9) for n in ("steps", "works", "tokens", "waits", "finishes", "preempts")} | {"events": trace.events},
        trace.sequences, trace.token_texts, trace.meta,
    )  # fmt: skip
    f = facts(later, 5)
    assert (f.new, f.prompt_tokens, f.taken, f.shared, f.freed) == (None,) * 5
    assert {"? blocks taken", "? references added", "? blocks freed"} <= set(texts(frame(later, 5)))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_arrows_are_as_wide_as_their_tokens_are_many(size: tuple[int, int]) -> None:
    trace = chunks()
    made = frame(trace, 0, size)
    arrows = [s for s in made.series if s.name == "arrow"]
    assert len(arrows) == 3 and len([s for s in made.series if s.name == "no flow"]) == 2  # no logits, no tokens
    wide = [(s.y - s.base)[0] if size[0] > 700 else s.x.max() - s.x.min() - 11 for s in arrows]  # a head is wider
    assert wide[1] / wide[0] == pytest.approx(16 / 40, rel=0.05) and wide[1] == pytest.approx(wide[2])


@pytest.mark.parametrize("size", SIZES[:4], ids=str)
def test_clocks_are_printed_and_drawn_on_one_scale(size: tuple[int, int]) -> None:
    trace = decoding()
    row, made = trace.rows("steps", 3, 3)[0], frame(trace, 3, size)
    clocks = [c for names in CLOCKS.values() for c in names]
    assert sorted(clocks) == ["build", "commit", "run", "schedule", "settle"]
    long = {c: next(s.width for s in made.series if s.name == f"clock {c}") for c in clocks}
    scale = max(long.values()) / max(int(row[f"{c}_us"]) for c in clocks)
    for clock in clocks:
        assert long[clock] == pytest.approx(max(int(row[f"{clock}_us"]) * scale, 1.0), rel=0.01)
        assert any(text.startswith(f"{clock} ") for text in texts(made))
    assert "times: test" in [b.text for b in made.badges if b.kind == "measured"]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_chips_lie_inside_their_area_in_the_scheduler(size: tuple[int, int]) -> None:
    for name in ("busy", "preempted", "crowded"):
        trace = scenario(name)
        for step in (1, 9, 12):
            made = frame(trace, step, size)
            box = next(m for m in made.marks if m.id == "box:scheduler")
            for mark in (m for m in made.marks if m.id.startswith("seq:") and not m.text.endswith("done")):
                area = next(a for a in AREAS if f"is {a}" in mark.text)
                shape = next(s for s in made.series if s.name == f"area {area}")
                assert box.x0 <= mark.x0 and mark.x1 <= box.x1 and shape.base[0] <= mark.y0 and mark.y1 <= shape.y[0] + 3
            assert [m.id for m in made.marks if m.id.startswith("box:")] == [f"box:{b}" for b in BOXES]


def test_a_waiting_chip_tells_its_reason_in_words() -> None:
    trace = scenario("busy")
    waits = {int(w["seq_id"]): reason_words(w, trace) for w in trace.rows("waits", 9, 9)}
    details = {int(m.id[4:]): m.detail for m in frame(trace, 9).marks if m.id.startswith("seq:")}
    assert waits and all(details[i] == said for i, said in waits.items())


def test_where_arrows_have_no_room_for_words_the_boxes_say_them() -> None:
    said = texts(frame(decoding(), 3, SIZES[3]))
    assert {"nobody new", "3 tokens scheduled", "3 tokens sampled", "3 requests"} <= set(said)


def test_files_exist() -> None:
    engine = Path(__file__).resolve().parents[2] / "engine"
    assert all((engine / name).is_file() for name in FILES.values())


def test_prompts_that_share_blocks_are_counted_as_shared() -> None:
    core = make_core(pages=64)
    add(core, prompt_of(33, 1), 2)
    run(core)
    add(core, prompt_of(33, 1), 2)
    core.step()
    trace = trace_of(core)
    assert facts(trace, trace.last_step).shared == 8 and "8 references added" in texts(frame(trace, trace.last_step))


def test_a_phone_shows_the_boxes_below_each_other_without_clocks() -> None:
    made = frame(decoding(), 3, SIZES[4])
    boxes = [m for m in made.marks if m.id.startswith("box:")]
    assert [m.id for m in boxes] == [f"box:{b}" for b in BOXES] and all(a.y1 < b.y0 for a, b in pairwise(boxes))
    assert places(made)["running"] == ["A", "B", "C"] and not [s for s in made.series if s.name.startswith("clock")]
    assert {"nobody new", "3 tokens scheduled", "3 requests", "3 rows of logits", "3 tokens sampled"} <= set(texts(made))
    assert [b.kind for b in made.badges] == ["state"]


def test_samples_that_share_a_prompt_begin_with_one_row_of_logits() -> None:
    core = make_core(pages=32)
    add(core, prompt_of(9, 1), 4, n=3, temperature=0.7, seed=1)
    core.step()
    trace = trace_of(core)
    f, said = facts(trace, 0), " ".join(texts(frame(trace, 0)))
    assert (f.logits, f.sampled) == (1, 3) and "1 row of logits → 3 samples" in said and "3 rows" not in said


@pytest.mark.parametrize("size", [(1242, 606), (1242, 426), (732, 426)])
def test_samples_that_wait_say_where_they_start(size: tuple[int, int]) -> None:
    core = make_core(pages=32, max_num_seqs=8)
    add(core, prompt_of(9, 1), 4, n=3, temperature=0.7, seed=1)
    core.step()
    made = frame(trace_of(core), 0, size)
    said = " ".join(texts(made))
    assert ("from A·1's prompt" if size[1] < 500 and size[0] > 1000 else "A·2 and A·3 start from A·1's prompt") in said


def test_the_first_reason_stands_under_the_waiting_chips_where_it_fits() -> None:
    trace = scenario("preempted")
    step = next(s for s in range(5, 40) if facts(trace, s).waiting and not facts(trace, s).preempted)
    first = facts(trace, step).waiting[0]
    why = next(reason_words(w, trace) for w in trace.rows("waits", step, step) if w["seq_id"] == first)
    assert why in " ".join(texts(frame(trace, step, (1500, 700))))
