"""Trace → arrays: identity, slots, queue, pages, slabs, the folded mask, tokens. Oracles are written apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.trace import WORK, Trace, WaitReason
from tests.factories import add, fake_continuation, make_core, prompt_of, run, trace_of
from tests.viz.scenarios import MAKERS, scenario
from viz.fold import Sees, fold, sees, share
from viz.lanes import Cell, lanes, queue
from viz.select import PageState, hues, identity, live_at, newest_tokens, padded, page_cells, selected, tail, token_ids
from viz.theme import HUES, NUM_REQUEST_COLORS

BUSY = [name for name in MAKERS if name != "empty"]


# ---- identity ----


def test_requests_that_live_together_never_share_a_hue() -> None:
    for name in ("busy", "preempted", "static", "long"):
        trace = scenario(name)
        for step in trace.steps["step_id"].tolist():
            live = live_at(trace, step)
            requests = {trace.sequences[i].request_id: identity(trace, step).slot(i) for i in live}
            if len(requests) <= NUM_REQUEST_COLORS:
                assert None not in requests.values() and len(set(requests.values())) == len(requests), (name, step)


def test_a_request_keeps_its_hue_for_life_and_its_samples_share_it() -> None:
    trace = scenario("busy")
    seen: dict[int, set] = {}
    for step in trace.steps["step_id"].tolist():
        for seq_id in live_at(trace, step):
            seen.setdefault(trace.sequences[seq_id].request_id, set()).add(identity(trace, step).slot(seq_id))
    assert all(len(slots) == 1 for slots in seen.values())


def test_beyond_six_only_the_selected_request_is_coloured() -> None:
    trace = scenario("crowded")
    live = live_at(trace, 0)
    assert len(live) > NUM_REQUEST_COLORS
    assert {identity(trace, 0).slot(i) for i in live} == {None}
    chosen = identity(trace, 0, f"seq:{live[3]}")
    assert [i for i in live if chosen.slot(i) is not None] == [live[3]]
    assert hues(trace, live, f"seq:{live[3]}") == {i: chosen.slot(i) for i in live}


def test_the_stage_gets_the_same_hues_as_the_views() -> None:
    trace = scenario("busy")
    for step in (0, 5, 12):
        live = live_at(trace, step)
        assert hues(trace, live, None) == {i: identity(trace, step).slot(i) for i in live}


def test_the_codes_of_an_array_are_the_codes_of_its_elements() -> None:
    trace = scenario("busy")
    who, seq_ids = identity(trace, 9), np.array([[1, 2, 3], [3, -1, 1]])
    assert who.codes(seq_ids).tolist() == [[who.code(i) for i in line] for line in seq_ids.tolist()]
    assert who.codes(seq_ids[:0]).shape == (0, 3) and [HUES[who.code(i)] for i in (1, 2, 3)] == [who.color(i) for i in (1, 2, 3)]


def test_a_selection_speaks_of_sequences() -> None:
    trace = scenario("busy")
    assert selected(trace, 3, "seq:2") == (2,) == selected(trace, 3, "token:2:12") == selected(trace, 3, "query:2:5")
    assert selected(trace, 3, "page:1") == trace.pool_at(3).owners[1]
    for nothing in (None, "", "seq:", "seq:x", "seq:99", "page:", "page:0", "step:3", "seq:²", "seq:" + "9" * 30):
        assert selected(trace, 3, nothing) == ()


# ---- slots ----


@pytest.mark.parametrize("name", BUSY)
def test_each_cell_of_a_slot_is_the_work_that_ran_there(name: str) -> None:
    trace = scenario(name)
    first, last = trace.first_step, min(trace.last_step, trace.first_step + 80)
    found = lanes(trace, first, last, last - first + 1)
    works = {(int(w["row"]), int(w["step_id"])): w for w in trace.rows("works", first, last)}
    failed = set(trace.steps["step_id"][trace.steps["failed"] > 0].tolist())
    for row in range(1, len(found.cells) + 1):
        for step in range(first, last + 1):
            cell, work = Cell(int(found.cells[row - 1, step - first])), works.get((row, step))
            if work is None:
                assert cell in (Cell.IDLE, Cell.HELD, Cell.NOTHING)
                continue
            assert found.seqs[row - 1, step - first] == work["seq_id"]
            prompt = trace.sequences[int(work["seq_id"])].num_prompt_tokens
            want = Cell.FAILED if step in failed else Cell.RECOMPUTE if work["num_recomputed"] else Cell.PREFILL
            assert cell == (want if step in failed or work["num_recomputed"] or work["start"] < prompt else Cell.DECODE)
    assert found.num_tokens.sum() == trace.rows("works", first, last)["num_tokens"].sum()


def test_steps_after_the_shown_one_are_blank() -> None:
    found = lanes(scenario("busy"), 0, 5, 20)
    assert (found.cells[:, 6:] == Cell.NOTHING).all() and (found.cells[:, :6] != Cell.NOTHING).all()


def test_a_sequence_that_gets_no_tokens_keeps_its_slot_in_the_picture() -> None:
    core = make_core(max_num_seqs=2, max_num_batched_tokens=1, pages=8)
    add(core, 1, 6)
    core.step()
    add(core, 1, 6)  # one token a step: they take turns or one waits in its slot
    run(core)
    trace = trace_of(core)
    found = lanes(trace, 0, trace.last_step, trace.last_step + 1)
    slots = {int(w["seq_id"]): int(w["row"]) for w in trace.works}
    for wait in trace.waits:
        seq_id, step = int(wait["seq_id"]), int(wait["step_id"])
        worked = trace.works[(trace.works["seq_id"] == seq_id) & (trace.works["step_id"] < step)]
        if len(worked):
            assert found.cells[slots[seq_id] - 1, step] == Cell.HELD


@pytest.mark.parametrize("name", ["busy", "preempted", "static", "ahead"])
def test_the_queue_and_the_slots_never_hold_the_same_sequence(name: str) -> None:
    trace = scenario(name)
    for step in trace.steps["step_id"].tolist():
        waiting = set(queue(trace, step)["seq_id"].tolist())
        found = lanes(trace, max(step - 20, 0), step, 21)
        sitting = {int(i) for i in found.seqs[:, step - max(step - 20, 0)] if i > 0}
        assert not waiting & sitting, (name, step)
        assert set(trace.rows("works", step, step)["seq_id"].tolist()) <= sitting


def test_without_a_cache_a_running_request_still_sits_in_its_slot() -> None:
    """There nobody holds pages between steps, so pages do not tell who runs."""
    core = make_core(mode="none", pages=24, max_num_batched_tokens=8, max_num_seqs=2)
    add(core, 5, 6)
    add(core, 6, 6)
    run(core)
    trace = trace_of(core)
    waits = [w for w in trace.waits if w["seq_id"] in trace.rows("works", 0, int(w["step_id"]))["seq_id"]]
    assert waits
    assert all(w["seq_id"] not in queue(trace, int(w["step_id"]))["seq_id"] for w in waits)


def test_a_preempted_request_is_back_in_the_queue() -> None:
    trace = scenario("preempted")
    assert len(trace.preempts)
    for row in trace.preempts:
        assert row["seq_id"] in queue(trace, int(row["step_id"]))["seq_id"]


# ---- pages ----


@pytest.mark.parametrize("name", BUSY)
def test_page_cells_equal_the_pool(name: str) -> None:
    trace = scenario(name)
    for step in trace.steps["step_id"].tolist()[:: max(len(trace) // 12, 1)]:
        pool, cells = trace.pool_at(step), page_cells(trace, step)
        assert cells.num_pages == pool.num_pages
        for page in range(1, pool.num_pages + 1):
            owners = pool.owners.get(page, ())
            assert cells.num_owners[page] == pool.ref_counts[page] == len(owners)
            assert tuple(i for i in cells.owners[page].tolist() if i >= 0) == owners[:3]
            want = (
                PageState.HELD if owners else PageState.PENDING if pool.pending[page]
                else PageState.CACHED if pool.cached[page] else PageState.FREE
            )  # fmt: skip
            assert cells.state[page] == want
        assert cells.num_pages - cells.count(PageState.HELD) - cells.count(PageState.PENDING) == pool.num_free


@pytest.mark.parametrize("name", BUSY)
def test_a_page_is_as_full_as_its_owner_has_tokens(name: str) -> None:
    trace = scenario(name)
    for step in trace.steps["step_id"].tolist()[:: max(len(trace) // 12, 1)]:
        cells, computed = page_cells(trace, step), trace.computed_at(step)
        want: dict[int, int] = {}
        for seq_id, table in trace.pool_at(step).tables.items():
            for index, page in enumerate(table):
                want[page] = max(want.get(page, 0), max(0, min(cells.page_size, computed[seq_id] - index * cells.page_size)))
        assert {p: int(cells.used[p]) for p in want} == want


@pytest.mark.parametrize("name", ["busy", "preempted", "ahead", "slabs"])
def test_stored_tokens_follow_from_the_works(name: str) -> None:
    trace = scenario(name)
    for step in trace.steps["step_id"].tolist():
        for seq_id, stored in trace.computed_at(step).items():
            rows = trace.works[(trace.works["seq_id"] == seq_id) & (trace.works["step_id"] <= step)]
            if len(rows):
                assert stored == rows[-1]["start"] + rows[-1]["num_tokens"]


def test_padded_slabs_are_the_formula() -> None:
    core = make_core(pages=20, page_size=4)
    add(core, 5, 12)
    add(core, 9, 500)  # longer than the pool: capped at 80
    core.step()
    trace = trace_of(core)
    found = padded(trace, 0)
    assert [(s.stored, s.reserved) for s in found.slabs] == [(5, 17), (9, 80)]
    assert found.waste == pytest.approx(1 - 14 / 97) and found.limit == 80


# ---- the mask ----


def brute_force(works: np.ndarray) -> dict[tuple[int, int, int, int], bool]:
    """(query seq, query position, key seq, key position) → allowed, for every pair of the step."""
    pairs = {}
    for q in works:
        for position in range(q["start"], q["start"] + q["num_tokens"]):
            for k in works:
                for key in range(k["start"] + k["num_tokens"]):
                    pairs[int(q["seq_id"]), int(position), int(k["seq_id"]), key] = q["seq_id"] == k["seq_id"] and key <= position
    return pairs


def works_of(shares: list[tuple[int, int]]) -> np.ndarray:
    rows = np.zeros(len(shares), WORK)
    for i, (start, n) in enumerate(shares):
        rows[i]["seq_id"], rows[i]["start"], rows[i]["num_tokens"] = i + 1, start, n
    return rows


shares = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(shares, st.integers(1, 40), st.integers(5, 90))
def test_every_cell_says_what_all_its_pairs_say(asked: list[tuple[int, int]], rows: int, cols: int) -> None:
    works = works_of(asked)
    folded = fold(works, rows, cols)
    grid, truth = sees(folded), brute_force(works)
    assert grid.shape == (folded.num_rows, folded.num_cols)
    for q in folded.blocks:
        for i, query in enumerate(q.rows):
            for k in folded.blocks:
                col = k.col0
                for key in (*k.cached, *k.new):
                    pairs = {
                        truth[q.seq_id, a, k.seq_id, b]
                        for a in range(query.first, query.last + 1) for b in range(key.first, key.last + 1)
                    }  # fmt: skip
                    got = {Sees(int(v)) for v in grid[q.row0 + i, col : col + key.width]}
                    if q.seq_id != k.seq_id:
                        want = {Sees.OTHER}
                    else:
                        want = {Sees.PART} if len(pairs) == 2 else {Sees.ALLOWED} if pairs == {True} else {Sees.CAUSAL}
                    assert got == want
                    col += key.width


@settings(max_examples=80, deadline=None)
@given(shares, st.integers(1, 40), st.integers(5, 90))
def test_folding_loses_no_position(asked: list[tuple[int, int]], rows: int, cols: int) -> None:
    folded = fold(works_of(asked), rows, cols)
    assert len(folded.blocks) + folded.hidden == len(asked)
    for block in folded.blocks:
        new = [p for s in block.new for p in range(s.first, s.last + 1)]
        old = [p for s in block.cached for p in range(s.first, s.last + 1)]
        assert new == list(range(block.start, block.start + block.num_tokens)) and old == list(range(block.start))
        assert block.rows == block.new


def test_a_preferred_request_is_among_those_shown() -> None:
    works = works_of([(3, 1)] * 30)
    assert 30 in [b.seq_id for b in fold(works, 5, 50, prefer=(30,)).blocks]


def test_sharing_gives_small_wishes_in_full() -> None:
    assert share([1, 100, 2], 13) == [1, 10, 2]
    assert share([5, 5], 100) == [5, 5]
    assert share([9, 9], 2) == [1, 1]


# ---- tokens ----


def test_the_tail_is_the_end_of_the_whole_text() -> None:
    core = make_core(pages=64)
    prompt = prompt_of(9, 1)
    add(core, prompt, 30)
    run(core)
    trace = trace_of(core)
    whole = [*prompt, *fake_continuation(prompt, 30)]
    for limit in (1, 5, 30, 35, 100):
        got = tail(trace, 1, trace.last_step, limit)
        assert [t.position for t in got] == list(range(39))[-limit:]
        assert [t.text for t in got] == [trace.token_text(i) for i in whole[-limit:]]
        assert all((t.step_id is None) == (t.position < 9) for t in got)
    assert token_ids(trace, 1, trace.last_step) == dict(enumerate(whole))


def test_a_token_that_is_part_of_a_character_shows_what_became_certain() -> None:
    trace = scenario("busy")
    first = trace.tokens[0]
    cut = Trace(
        {name: getattr(trace, name) for name in ("steps", "works", "tokens", "texts", "text_bytes")},
        trace.sequences, {**trace.token_texts, int(first["token_id"]): "\ufffd"}, trace.meta,
    )  # fmt: skip
    got = tail(cut, int(first["seq_id"]), int(first["step_id"]), 1)[0]
    assert "\ufffd" not in got.text and got.text == trace.token_text(int(first["token_id"]))


def test_wait_reasons_are_all_known_to_the_views() -> None:
    seen = {int(code) for name in BUSY for code in scenario(name).waits["reason"]}
    assert len(seen) >= 5 and max(seen) < len(WaitReason)


def test_tokens_are_found_also_while_another_thread_empties_the_memo() -> None:
    class Emptied(dict):
        def __setitem__(self, key, value) -> None:
            """As if another thread had drawn many steps right after."""

    found, trace = [], scenario("busy")
    for memo in ({}, Emptied()):
        trace.__dict__["_token_windows"] = memo
        found.append(newest_tokens(trace, 1, trace.last_step, 5).tobytes())
    del trace.__dict__["_token_windows"]
    assert found[0] == found[1] != b""
