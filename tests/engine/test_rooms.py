"""Rooms on one core: knobs of their own, pages and rows that come back, turns, and records that say where nothing lies."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from engine.config import KNOBS, Scope, with_knob, with_room_knobs, with_wide_parts
from engine.errors import EngineError
from engine.jobs import Job
from engine.request import FinishReason, SamplingParams
from engine.trace import TABLES
from tests.engine.audit import Watch, check_replay, knob, make_lazy_core
from tests.factories import fake_continuation, make_core, prompt_of, run, trace_of


def open_room(core, name: str, **knobs: object):
    return core.open_room(name, with_room_knobs(core.housing.defaults, knobs))


def audit(core) -> None:
    core.arena.check_integrity()
    for name, room in core.rooms.items():
        room.scheduler.check_integrity()
        assert tuple(core.arena.leases[name]) == room.scheduler.pool.pages and room.scheduler.pool.num_pages == room.config.cache.num_pages
    assert set(core.arena.leases) == set(core.rooms)
    used = [s.row for room in core.rooms.values() for s in room.scheduler.running]
    assert sorted(core.rows._used) == sorted(used), "rows leak, or two rooms share one"


def refused(code: str):
    class Refusal:
        def __enter__(self):
            self.raises = pytest.raises(EngineError)
            self.caught = self.raises.__enter__()
            return self

        def __exit__(self, *what):
            swallowed = self.raises.__exit__(*what)
            assert self.caught.value.code == code, self.caught.value.code
            assert self.caught.value.sentence.endswith(".")
            return swallowed

    return Refusal()


# ---- knobs ----


def test_a_rooms_knobs_are_its_own_and_engine_wide_ones_are_everybodys():
    core = make_lazy_core(pages=16, max_num_seqs=4)
    open_room(core, "b", max_num_seqs=2, num_pages=8)
    assert {n for n, k in KNOBS.items() if k.scope is Scope.ENGINE} == {"page_size", "fused"}
    knob(core, "max_num_batched_tokens", 7)
    core.reconfigure(with_knob(core.rooms["b"].config, "run_ahead", 1), "b")
    main, b = core.rooms["main"].config, core.rooms["b"].config
    assert (main.scheduler.max_num_batched_tokens, main.scheduler.run_ahead, main.scheduler.max_num_seqs) == (7, 0, 4)
    assert (b.scheduler.max_num_batched_tokens, b.scheduler.run_ahead, b.scheduler.max_num_seqs) == (256, 1, 2)
    core.reconfigure(with_knob(b, "page_size", 8), "b")
    main, b = core.rooms["main"].config, core.rooms["b"].config
    assert main.cache.page_size == b.cache.page_size == core.config.cache.page_size == 8
    assert (main.cache.num_pages, b.cache.num_pages, main.scheduler.max_num_batched_tokens) == (16, 8, 7)
    assert {r.scheduler.pool.page_size for r in core.rooms.values()} == {8}
    core.reconfigure(with_knob(with_knob(b, "fused", False), "cuda_graphs", False), "b")
    main, b = core.rooms["main"].config, core.rooms["b"].config
    assert (main.runner.fused, b.runner.fused, core.config.runner.fused) == (False, False, False)
    assert (main.runner.cuda_graphs, b.runner.cuda_graphs) == (True, False)
    audit(core)
    assert trace_of(core, "b").num_pages_at(0) == 8 and trace_of(core).num_pages_at(0) == 16
    for name, value in (("page_size", 4), ("fused", True)):
        with refused("engine_wide_knob"):
            open_room(core, "c", **{name: value})


def test_a_room_that_changes_its_pages_leaves_the_others_theirs():
    core = make_lazy_core(pages=16)
    open_room(core, "b", num_pages=8)
    core.add("", prompt_of(9, 1), SamplingParams(max_tokens=20), room="b")
    core.add("", prompt_of(9, 2), SamplingParams(max_tokens=20))
    for _ in range(4):
        core.step()
    kept = core.rooms["b"].scheduler.pool
    knob(core, "num_pages", 12)
    assert core.rooms["b"].scheduler.pool is kept and kept.tables and not core.rooms["main"].scheduler.pool.tables
    assert core.arena.num_free == 4
    audit(core)
    run(core)
    for room, seed in (("b", 1), ("main", 2)):
        trace = trace_of(core, room)
        assert trace.tokens_of(1)["token_id"].tolist() == fake_continuation(prompt_of(9, seed), 20)
        assert len(trace.preempts) == (room == "main")


def test_an_arena_that_grows_without_moving_its_contents_makes_others_recompute_and_no_text_changes():
    core = make_lazy_core(pages=16)
    watch = Watch(core)
    core.add("", prompt_of(9, 2), SamplingParams(max_tokens=20))
    for _ in range(4):
        core.step()
    open_room(core, "b", num_pages=8)  # the fake device never moves what is cached
    audit(core)
    run(core)
    trace = trace_of(core)
    assert trace.tokens_of(1)["token_id"].tolist() == fake_continuation(prompt_of(9, 2), 20)
    assert trace.preempts["seq_id"].tolist() == [1]
    check_replay(watch, trace)


def test_a_fixed_arena_refuses_what_it_does_not_have_and_changes_nothing():
    core = make_core(pages=16)
    core.reconfigure(replace(core.config, cache=replace(core.config.cache, arena_pages=40)))
    open_room(core, "b", num_pages=20)
    assert core.arena.num_pages == 40 and core.arena.num_free == 4
    before, config = dict(core.arena.leases), core.config
    with refused("pool_too_large"):
        knob(core, "num_pages", 21)
    with refused("no_room"):
        open_room(core, "c", num_pages=5)
    assert dict(core.arena.leases) == before and core.config == config == core.rooms["main"].config
    knob(core, "num_pages", 20)
    audit(core)
    core.close_room("b")
    open_room(core, "c", num_pages=20)
    audit(core)


def test_a_device_that_has_not_the_memory_refuses_and_nothing_has_changed():
    core = make_core(pages=16)
    core.add("", prompt_of(9, 2), SamplingParams(max_tokens=20))
    core.step()
    configure = core.runner.configure

    def refuse(config):
        if config.cache.num_pages > 30:
            raise EngineError("pool_too_large", "There is no memory for that.")
        return configure(config)

    core.runner.configure = refuse
    pool = core.rooms["main"].scheduler.pool
    with refused("no_room"):
        open_room(core, "b", num_pages=20)
    with refused("pool_too_large"):
        knob(core, "num_pages", 31)
    assert core.rooms["main"].scheduler.pool is pool and list(core.rooms) == ["main"] and core.arena.num_pages == 16
    audit(core)
    run(core)
    assert trace_of(core).tokens_of(1)["token_id"].tolist() == fake_continuation(prompt_of(9, 2), 20)


# ---- opening and closing ----


def test_what_cannot_be_opened_or_found_is_said():
    core = make_core(pages=8)
    core.reconfigure(replace(core.config, max_rooms=2))
    open_room(core, "b", num_pages=4)
    for name, code in (
        ("b", "room_exists"),
        ("", "bad_room"),
        ("x" * 81, "bad_room"),
        ("a\nb", "bad_room"),
        (3, "bad_room"),
        ("c", "no_room"),
    ):
        with refused(code):
            open_room(core, name, num_pages=4)
    core.open_room("job", scratch=True)  # a job's is no room of the public's
    for call in (core.close_room, core.step, core.report, lambda n: core.abort(1, n), lambda n: core.reconfigure(core.config, n)):
        with refused("unknown_room"):
            call("nowhere")
    with refused("unknown_room"):
        core.add("", (1,), SamplingParams(), room="nowhere")


def test_closing_a_room_ends_its_requests_in_its_record_and_returns_everything():
    core = make_lazy_core(pages=16, run_ahead=1)
    open_room(core, "b", num_pages=8)
    watch = Watch(core, "b")
    for seed in range(3):
        core.add("", prompt_of(7, seed), SamplingParams(max_tokens=30), room="b")
    for _ in range(4):
        core.step("b")
    core.recorder = core.close_room("b").recorder
    assert watch.ended == dict.fromkeys((1, 2, 3), FinishReason.ABORT)
    assert set(core.rooms) == {"main"} and core.arena.num_free == 8 and not core.rows._used
    audit(core)
    tables = core.recorder.drain().tables
    assert len(tables["finishes"]) == 3
    open_room(core, "b", num_pages=8)
    core.add("", prompt_of(7, 0), SamplingParams(max_tokens=3), room="b")
    run(core)
    trace = trace_of(core, "b")
    assert trace.works["num_cached"].tolist()[0] == 0, "a room of the same name finds nothing of the old one"
    assert (trace.first_step, trace.name(1)) == (0, "A")


@pytest.mark.parametrize("seed", range(40))
def test_rooms_that_come_and_go_return_every_page_and_row(seed):
    rng = Random(seed)
    core = make_lazy_core(pages=rng.randint(4, 12), run_ahead=rng.choice((0, 1)), max_num_batched_tokens=rng.choice((5, 64)))
    if seed % 2:
        core.reconfigure(replace(core.config, cache=replace(core.config.cache, arena_pages=40), max_rooms=4))
    watches = {"main": Watch(core)}
    asked: dict[str, list[int]] = {"main": []}
    opened = 0
    for _ in range(60):
        dice, names = rng.random(), sorted(core.rooms)
        room = rng.choice(names) if names else None
        try:
            if dice < 0.1 or room is None:
                opened += 1
                name = f"r{opened}"
                open_room(core, name, num_pages=rng.randint(3, 12), max_num_seqs=rng.randint(1, 3))
                watches[name], asked[name] = Watch(core, name), []
            elif dice < 0.3:
                params = SamplingParams(max_tokens=rng.randint(1, 12), temperature=rng.choice((0.0, 0.9)), seed=1, n=rng.choice((1, 1, 2)))
                asked[room].append(core.add("", prompt_of(rng.randint(1, 20), rng.randint(0, 3)), params, room=room)[0].request_id)
            elif dice < 0.35 and asked[room]:
                core.abort(rng.choice(asked[room]), room)
            elif dice < 0.4:
                core.close_room(room)
            elif dice < 0.45:
                change = rng.choice(
                    (("num_pages", 6), ("num_pages", 10), ("mode", "none"), ("mode", "paged"), ("page_size", rng.choice((4, 8))))
                )
                core.reconfigure(with_knob(core.rooms[room].config, *change), room)
            else:
                core.step()
        except EngineError as error:
            assert error.code in ("no_room", "pool_too_large", "prompt_exceeds_pool")
        core.runner.poison_free_pages()
        audit(core)
    run(core)
    for name in core.rooms:
        check_replay(watches[name], trace_of(core, name))
    for name in list(core.rooms):
        core.close_room(name)
        audit(core)
    assert core.arena.num_free == core.arena.num_pages and not core.rows._used and not core.has_work
    for watch in watches.values():  # whatever happened, nobody got a token that belongs to somebody else
        for seq_id, got in watch.made.items():
            seq = watch.seen[seq_id]
            if seq.request.sampling.greedy:
                assert got == fake_continuation(seq.request.prompt_token_ids, len(got))


# ---- isolation, turns, records ----


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_busy_rooms_write_what_each_writes_alone_greedy_and_seeded(run_ahead):
    def fill(core, room: str, salt: int) -> None:
        for i in range(4):
            params = SamplingParams(max_tokens=12, temperature=0.9 * (i % 2), seed=salt + i)
            core.add("", prompt_of(5 + 4 * i, salt + i), params, room=room)

    names = [f"r{i}" for i in range(5)]
    shared = make_lazy_core(pages=14, run_ahead=run_ahead)
    for i, name in enumerate(names):
        open_room(shared, name, num_pages=14)
        fill(shared, name, 10 * i)
    run(shared)
    for i, name in enumerate(names):
        alone = make_lazy_core(pages=14, run_ahead=run_ahead)
        fill(alone, "main", 10 * i)
        run(alone)
        a, b = trace_of(shared, name), trace_of(alone)
        for table in TABLES:
            columns = TABLES[table].names or ()
            for column in (c for c in columns if not c.endswith("_us") and c != "row"):
                np.testing.assert_array_equal(getattr(a, table)[column], getattr(b, table)[column], err_msg=f"{name}: {table}.{column}")


def test_turns_go_round_however_rooms_come_and_go():
    core = make_core(pages=12)
    for name in ("c", "a", "b"):
        open_room(core, name, num_pages=12)
        core.add("", prompt_of(3, 1), SamplingParams(max_tokens=30), room=name)
    turns = [core.step().plan.room for _ in range(6)]
    assert turns == ["c", "a", "b"] * 2
    core.close_room("a")
    open_room(core, "d", num_pages=12)
    core.add("", prompt_of(3, 1), SamplingParams(max_tokens=30), room="d")
    turns = [core.step().plan.room for _ in range(9)]
    assert all(len(set(turns[at : at + 3])) == 3 for at in range(7)), turns


def test_a_room_hits_no_page_of_another_though_the_prompt_is_the_same():
    core = make_core(pages=16)
    open_room(core, "b", num_pages=16)
    for room in ("main", "main", "b", "b"):
        core.add("", prompt_of(13, 1), SamplingParams(max_tokens=2), room=room)
        run(core)
    for room in ("main", "b"):
        assert trace_of(core, room).works["num_cached"][[0, 2]].tolist() == [0, 12]
    a, b = (set(core.rooms[name].scheduler.pool._page_of) for name in ("main", "b"))
    assert a and b and not a & b


@pytest.mark.parametrize("mode", ["paged", "contiguous"])
def test_a_lease_far_up_the_arena_is_drawn_like_one_at_its_beginning(mode):
    core = make_core(pages=24, mode=mode, max_num_seqs=4)
    for name in ("gap", "b"):
        open_room(core, name, num_pages=24)
    core.close_room("gap")
    for room in ("main", "b"):
        for seed in range(5):
            core.add("", prompt_of(9 + seed, seed % 2), SamplingParams(max_tokens=8, n=1 + seed % 2, seed=1, temperature=0.8), room=room)
        run(core)
    assert min(core.rooms["b"].scheduler.pool.pages) == 49
    a, b = trace_of(core), trace_of(core, "b")
    np.testing.assert_array_equal(a.events, b.events)
    np.testing.assert_array_equal(a.keyframes, b.keyframes)
    for step in a.steps["step_id"].tolist():
        one, other = a.pool_at(step), b.pool_at(step)
        assert one.num_pages == other.num_pages == 24 and one.tables == other.tables
        assert (b.num_pages_at(step), b.computed_at(step)) == (24, a.computed_at(step))


def test_a_scattered_lease_still_gives_contiguous_slabs():
    core = make_core(pages=4)
    for name in "abc":
        open_room(core, name, num_pages=4)
    core.reconfigure(replace(core.config, cache=replace(core.config.cache, arena_pages=16)))
    core.close_room("a"), core.close_room("c")
    open_room(core, "d", num_pages=8, mode="contiguous")
    assert core.rooms["d"].scheduler.pool.pages == (5, 6, 7, 8, 13, 14, 15, 16)
    core.add("", prompt_of(20, 1), SamplingParams(max_tokens=12), room="d")
    run(core)
    assert trace_of(core, "d").tokens_of(1)["token_id"].tolist() == fake_continuation(prompt_of(20, 1), 12)


# ---- jobs, faults, records ----


def test_a_job_runs_requests_in_a_room_of_its_own_that_nobody_sees():
    core = make_core(pages=16)
    core.add("", prompt_of(9, 2), SamplingParams(max_tokens=6))
    made: list[int] = []

    def work(job):
        room = job.open_scratch(with_knob(core.rooms[job.room].config, "mode", "none"))
        core.add("", prompt_of(9, 2), SamplingParams(max_tokens=6), room=room.name)
        while room.has_work:
            record = core.step(room.name)
            made.extend(token for _, token in record.committed.accepted)
            yield len(made) / 6, "again"

    job, clock, done = Job(core, "compare", work), core.housing.clock.busy_us, False
    while not done:
        done = job.advance()
        assert len(core.rooms) == 2 and core.rooms_in_turn() == ["main"]
    assert core.housing.clock.busy_us == clock, "a job's time is on nobody's clock"
    job.close()
    assert made == fake_continuation(prompt_of(9, 2), 6) and list(core.rooms) == ["main"]
    audit(core)
    run(core)
    assert trace_of(core).tokens_of(1)["token_id"].tolist() == made


def test_a_failed_launch_returns_its_record():
    core = make_core()
    core.runner.fail_on.add(0)
    core.add("", prompt_of(4), SamplingParams(max_tokens=3))
    record = core.step()
    assert record.error.code == "step_failed" and record.plan.step_id == 0


def test_a_record_holds_all_that_it_takes_to_run_it_again():
    params = SamplingParams(9, 0.7, 5, 0.9, 3, 1, ("tea",), (50,), True)
    core = make_core()
    core.add("", prompt_of(4), params)
    info = trace_of(core).sequences[1]
    again = SamplingParams(
        info.max_tokens, info.temperature, info.top_k, info.top_p, info.seed, 1, info.stop, info.stop_token_ids, info.ignore_eos
    )
    assert again == params


def test_engine_wide_parts_and_a_rooms_own_are_kept_apart():
    base = make_core().config
    own = replace(with_knob(with_knob(base, "num_pages", 3), "policy", "priority"), top_logprobs=2)
    mixed = with_wide_parts(own, with_knob(base, "page_size", 32))
    assert (mixed.cache.num_pages, mixed.scheduler.policy.value, mixed.top_logprobs, mixed.cache.page_size) == (3, "priority", 5, 32)
