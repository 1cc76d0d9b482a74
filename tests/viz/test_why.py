"""Why a request is where it is: every number of a sentence is the record's or, at that moment, the scheduler's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.config import with_knob
from engine.plan import WaitReason
from engine.recording import load
from engine.trace import WAIT_REASONS, SequenceInfo, Trace
from tests.factories import add, make_core, make_trace, prompt_of, run, trace_of
from tests.viz.scenarios import MAKERS, scenario
from viz.registry import load_words
from viz.words.why import shortage, why, why_selected

LANGUAGES = load_words()
RECORDINGS = sorted((Path(__file__).resolve().parents[2] / "assets" / "recordings").glob("*.glass"))


def said(trace: Trace, name: str, step: int, **options: object) -> str:
    seq_id = next(i for i, info in trace.sequences.items() if info.name == name)
    return " ".join(why(trace, seq_id, step, **options))


def waits_of(trace: Trace, reason: WaitReason):
    return [row for row in trace.waits if WAIT_REASONS[row["reason"]] is reason]


def named(trace: Trace, row) -> str:
    return said(trace, trace.name(int(row["seq_id"])), int(row["step_id"]))


def without(trace: Trace, table: str) -> Trace:
    names = ("steps", "works", "tokens", "waits", "finishes", "preempts", "events", "keyframes")
    return Trace({n: getattr(trace, n) for n in names if n != table}, trace.sequences, trace.token_texts, trace.meta)


# ---- everybody, always ----


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", [n for n in MAKERS if n not in ("empty", "long", "large_pool")])
def test_everybody_has_a_reason_at_every_step(name: str, language: str) -> None:
    trace = scenario(name)
    for step in trace.steps["step_id"].tolist():
        for seq_id in trace.sequences:
            lines = why(trace, seq_id, step, language)
            assert lines and all(line and "{" not in line for line in lines)
            assert trace.name(seq_id) in lines[0]
            assert "does not say" not in lines[0]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("file", RECORDINGS, ids=lambda f: f.stem)
def test_the_shipped_recordings_say_why(file: Path, language: str) -> None:
    trace = load(file)
    for step in trace.steps["step_id"].tolist():
        for seq_id in trace.sequences:
            assert trace.name(seq_id) in why(trace, seq_id, step, language)[0]
    for row in trace.preempts:
        assert shortage(trace, trace.step(int(row["step_id"])), row) is not None


def test_an_unknown_request_an_empty_trace_and_a_hostile_name() -> None:
    trace = scenario("busy")
    assert why(trace, 999, 3) == () and why(Trace(), 1, None) == ()
    odd = {
        i: SequenceInfo(**{f: getattr(s, f) for f in s.__dataclass_fields__} | {"name": "{x}<b>" * 9}) for i, s in trace.sequences.items()
    }
    tables = {n: getattr(trace, n) for n in ("steps", "works", "tokens", "waits", "finishes", "preempts", "events", "keyframes")}
    for step in trace.steps["step_id"].tolist():
        for seq_id in odd:
            assert "{x}<b>" in why(Trace(tables, odd, {}, trace.meta), seq_id, step)[0]


def test_a_selection_of_one_request_is_told_and_others_are_not() -> None:
    trace = scenario("busy")
    assert why_selected(trace, "seq:1", 2) == why(trace, 1, 2) == why_selected(trace, "token:1:6", 2)
    assert why_selected(trace, "page:1", 2) == why_selected(trace, None, 2) == why_selected(trace, "seq:999", 2) == ()


# ---- in the batch, before it, after it ----


def test_reading_a_prompt_in_chunks_then_decoding_then_ending() -> None:
    core = make_core(max_num_batched_tokens=16, pages=32)
    add(core, 40, 3)
    run(core)
    trace = trace_of(core)
    assert said(trace, "A", 0) == "A reads its prompt: tokens 1 to 16 of 40."
    assert said(trace, "A", 2).startswith(
        "A reads its prompt: tokens 33 to 40 of 40. The prompt is complete, and A got its 1st of at most 3 tokens."
    )
    assert said(trace, "A", 3) == "A is decoding: its 2nd of at most 3 tokens."
    assert said(trace, "A", 4) == "A ended in step 4: it reached its limit of 3 tokens. It gave back 11 blocks."


def test_a_prefix_hit_is_said_and_a_later_arrival_is_not_there_yet() -> None:
    core = make_core(pages=64)
    add(core, prompt_of(33, 1), 2)
    run(core)
    add(core, prompt_of(33, 1), 2)
    run(core)
    trace = trace_of(core)
    assert said(trace, "B", 0) == "B is not there yet in step 0; it appears in step 2."
    assert "B reads its prompt: tokens 33 to 33 of 33. It found 32 tokens of its prompt in the cache" in said(trace, "B", 2)


def test_a_request_that_no_step_has_seen_is_queued_and_a_paused_room_is_named() -> None:
    core = make_core()
    add(core, 6, 2)
    core.step()
    add(core, 6, 2)
    trace = trace_of(core)
    assert said(trace, "B", 0) == "B is queued: no step has run since it came."
    assert said(trace, "B", 0, paused=True) == "B is queued: the room is paused. Press Play or Step to go on."
    core = make_core()
    add(core, 6, 2)
    assert said(trace_of(core), "A", None) == "A is queued: no step has run since it came."


def test_a_step_that_only_reports_says_that_the_room_is_paused() -> None:
    core = make_core()
    add(core, 6, 9)
    add(core, 6, 9)
    core.step()
    core.abort(1)
    core.report("main")
    trace = trace_of(core)
    rows = waits_of(trace, WaitReason.PAUSED)
    assert rows and all("the room is paused" in named(trace, row) for row in rows)


def test_without_a_cache_a_decode_computes_everything_again() -> None:
    core = make_core(pages=32, mode="none", max_num_batched_tokens=64)
    add(core, 10, 4)
    run(core)
    assert said(trace_of(core), "A", 2) == "A keeps no cache: it computes all its 12 tokens for its 3rd of at most 4 tokens."


def test_a_failed_step_is_named() -> None:
    trace = scenario("broken")
    assert said(trace, "A", 2).startswith("A ended in step 2: it ended with an error.")


# ---- preempted ----


@pytest.mark.parametrize(
    "knobs", [{}, {"run_ahead": 1}, {"prefix_caching": False}, {"chunked_prefill": False}, {"policy": "priority"}], ids=str
)
def test_a_preemption_gives_the_numbers_that_the_scheduler_had(knobs: dict) -> None:
    """Blocks needed and free are not in the record: they must be what the scheduler saw when it chose the victim."""
    core = make_core(pages=24, page_size=4, max_num_seqs=6, max_num_batched_tokens=32, **knobs)
    scheduler = core.rooms["main"].scheduler
    true, short, original, count = {}, [0], scheduler._withdraw_and_preempt, scheduler._pages_short

    def counted(seq, end):
        short[0] = count(seq, end)
        return short[0]

    def watch(victim, cause, draft):
        free = scheduler.pool.num_free
        true[(scheduler._next_step, victim.seq_id)] = (short[0] + free, free, victim.num_computed)
        return original(victim, cause, draft)

    scheduler._pages_short, scheduler._withdraw_and_preempt = counted, watch
    for i, (length, most) in enumerate(((12, 30), (20, 30), (9, 24), (30, 20), (17, 22))):
        add(core, prompt_of(length, length), most, priority=i % 3)
    add(core, prompt_of(5, 77), 12, n=3, temperature=0.9, seed=5)
    run(core)
    trace = trace_of(core)
    assert len(trace.preempts) >= 3 and len(true) == len(trace.preempts)
    for row in trace.preempts:
        step, seq_id, cause = int(row["step_id"]), int(row["seq_id"]), int(row["for_seq_id"])
        needed, free, lost = true[(step, seq_id)]
        found = shortage(trace, trace.step(step), row)
        assert found is not None and (found.needed, found.free) == (needed, free), (step, seq_id, cause)
        if any(f["seq_id"] == seq_id and f["step_id"] < step for f in trace.finishes):
            continue  # planned ahead while its last step was still on the device
        text = " ".join(why(trace, seq_id, step))
        assert f"was preempted in step {step}" in text and f"needed {needed} block" in text
        assert ("none was free" if free == 0 else f"{free} was free" if free == 1 else f"only {free} were free") in text
        assert f"gave back {row['num_pages']} block" in text and f"compute {lost} token" in text
        assert ("fewer if the cache still holds some" in text) == (knobs.get("prefix_caching", True) is True)


def test_a_preemption_says_who_came_last_or_had_the_lowest_priority() -> None:
    trace = scenario("preempted")
    row = trace.preempts[0]
    name = trace.name(int(row["seq_id"]))
    assert f"and {name} came last of those running." in said(trace, name, int(row["step_id"]))
    core = make_core(pages=8, page_size=4, policy="priority")
    add(core, 8, 14, priority=5)
    add(core, 11, 14, priority=1)
    run(core)
    trace = trace_of(core)
    assert "and A had the lowest priority (5) of those running." in said(trace, "A", int(trace.preempts["step_id"][0]))


def test_whoever_finds_no_block_for_itself_is_not_said_to_give_them_to_another() -> None:
    core = make_core(pages=8, page_size=4)
    add(core, 10, 12)
    add(core, 11, 12)
    run(core)
    trace = trace_of(core)
    own = [row for row in trace.preempts if row["for_seq_id"] == row["seq_id"]]
    assert own
    text = named(trace, own[0])
    assert re.search(r"it needed 1 block, none was free, and nobody ranks below it\.", text)
    step = int(own[0]["step_id"]) + 1
    later = said(trace, trace.name(int(own[0]["seq_id"])), step)
    assert f"It was preempted in step {step - 1} for want of blocks and lost {own[0]['num_tokens']} tokens." in later


def test_a_changed_knob_is_named_with_both_values() -> None:
    core = make_core(pages=16, page_size=4)
    add(core, 6, 9)
    core.step()
    core.step()
    core.reconfigure(with_knob(core.rooms["main"].config, "page_size", 8))
    run(core)
    trace = trace_of(core)
    step = int(trace.preempts["step_id"][0])
    assert f"A was preempted in step {step}: block size went from 4 to 8, which empties the cache." in said(trace, "A", step)


def test_computing_again_says_how_much_and_since_when() -> None:
    trace = scenario("preempted")
    back = trace.works[trace.works["resumed"] > 0][0]
    name, step = trace.name(int(back["seq_id"])), int(back["step_id"])
    lost = trace.preempts[trace.preempts["seq_id"] == back["seq_id"]][0]
    text = said(trace, name, step)
    assert f"{name} computes {back['num_recomputed']} tokens again" in text
    assert f"preempted in step {lost['step_id']} for {trace.name(int(lost['for_seq_id']))} and lost {lost['num_tokens']} tokens" in text


# ---- waiting ----


def test_waiting_for_blocks_gives_what_it_needs_and_what_is_free() -> None:
    trace = make_trace()
    rows = waits_of(trace, WaitReason.NO_FREE_PAGES)
    assert rows
    for row in rows:
        text = named(trace, row)
        assert f"it needs {row['needed']} block" in text
        assert (
            f"{row['available']} is free"
            if row["available"] == 1
            else f"{row['available']} are free"
            if row["available"]
            else "none is free"
        ) in text


def test_blocks_in_a_row_are_asked_for_where_slabs_are_contiguous() -> None:
    trace = scenario("slabs")
    rows = waits_of(trace, WaitReason.NO_FREE_PAGES)
    assert rows and all(f"needs {r['needed']} blocks in a row; the longest free run is {r['available']}." in named(trace, r) for r in rows)


def test_all_slots_taken_names_who_has_them() -> None:
    core = make_core(pages=32, max_num_seqs=2)
    for n in (5, 6, 7):
        add(core, n, 6)
    core.step()
    assert said(trace_of(core), "C", 0) == "C waits: all 2 batch slots are taken, by A and B."


def test_a_budget_that_is_used_up_names_who_has_it() -> None:
    core = make_core(pages=32, max_num_batched_tokens=8)
    add(core, 12, 4)
    add(core, 5, 4)
    core.step()
    assert said(trace_of(core), "B", 0) == "B waits: this step's 8 tokens are all given out, to A. It has 5 tokens to compute."


def test_without_chunks_a_prompt_waits_for_a_step_that_takes_it_whole() -> None:
    core = make_core(pages=32, max_num_batched_tokens=16, chunked_prefill=False)
    add(core, 10, 6)
    add(core, 9, 6)
    core.step()
    text = said(trace_of(core), "B", 0)
    assert (
        text
        == "B waits: it has 9 tokens to compute, and 6 of this step's 16 are left. Chunked prefill is off, so a prompt is computed in one piece."
    )


def test_a_sample_says_how_far_the_prompt_is() -> None:
    core = make_core(pages=32, max_num_batched_tokens=8)
    add(core, 20, 5, n=2, temperature=0.8, seed=7)
    run(core)
    trace = trace_of(core)
    assert said(trace, "A·2", 1) == "A·2 waits: A·1 computes the prompt that they share, 16 of 20 tokens so far."
    assert said(trace, "A·2", 2) == "A·2 starts on the prompt that A·1 computed, and got its 1st of at most 5 tokens."


def test_a_static_batch_says_how_many_are_left_and_who() -> None:
    trace = scenario("static")
    for row in waits_of(trace, WaitReason.STATIC_BATCH):
        assert re.search(rf"must end first; {row['available']} of it (is|are) left: \w", named(trace, row))


def test_the_queue_names_who_is_first_and_what_it_would_need_itself() -> None:
    trace = scenario("busy")
    rows = waits_of(trace, WaitReason.QUEUE_ORDER)
    assert rows
    for row in rows:
        text = named(trace, row)
        assert "is before it in the queue, and nobody overtakes." in text and f"It would need {row['needed']} block" in text


def test_nobody_joins_in_a_step_that_took_blocks_from_somebody() -> None:
    found = 0
    for name in ("busy", "preempted", "crowded"):
        trace = scenario(name)
        for row in waits_of(trace, WaitReason.PREEMPTION):
            now = trace.step(int(row["step_id"]))
            if row["seq_id"] not in now.preempts["seq_id"]:
                found += 1
                victims = {trace.name(int(i)) for i in now.preempts["seq_id"]}
                assert "nobody is admitted in such a step" in named(trace, row) and any(v in named(trace, row) for v in victims)
    assert found


def test_in_flight_says_that_the_next_token_needs_the_last() -> None:
    core = make_core(run_ahead=1, pages=32)
    add(core, 5, 3)
    add(core, 6, 9)
    run(core)
    trace = trace_of(core)
    rows = waits_of(trace, WaitReason.IN_FLIGHT)
    texts = [named(trace, row) for row in rows]
    assert texts == ["A ended in step 2: it reached its limit of 3 tokens. It gave back 2 blocks."]  # of a plan made before it ended
    assert "still being computed" in " ".join(why(without(trace, "finishes"), 1, int(rows[0]["step_id"])))


def test_every_reason_of_the_scheduler_has_its_own_sentence() -> None:
    for language, table in LANGUAGES.items():
        assert all(f"why.wait.{reason.value}" in table for reason in WaitReason), language
