"""The ring: bounded, cheap, faithful; snapshots that never change."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import engine.core
from engine.recorder import pack
from engine.store import ARTIFACT_BYTES, TraceStore
from engine.trace import TABLES, Op, SequenceInfo, StepError, TensorSample, TraceDelta
from tests.engine.audit import Watch, check_replay, knob, make_lazy_core
from tests.engine.lives import random_life
from tests.engine.test_recorder import make_record
from tests.factories import add, piece, prompt_of


def info(seq_id: int, tokens: int = 4) -> SequenceInfo:
    return SequenceInfo(seq_id, seq_id, 0, f"R{seq_id}", "p", tuple(range(tokens)), 10**6, 0.0, 0, 0, 0, "main")


def decode_steps(first: int, count: int, seq_id: int = 1, page_size: int = 16) -> TraceDelta:
    """`count` steps of one request that writes one token each, as the recorder packs them."""
    tables = {name: np.zeros(count, dtype) for name, dtype in TABLES.items()}
    ids = np.arange(first, first + count)
    for name in ("steps", "works", "tokens", "texts"):
        tables[name]["step_id"] = ids
    for name in ("works", "tokens", "texts"):
        tables[name]["seq_id"] = seq_id
    tables["works"]["start"], tables["works"]["num_tokens"], tables["works"]["samples"] = 4 + ids, 1, 1
    tables["tokens"]["position"], tables["tokens"]["token_id"], tables["tokens"]["num_top"] = 5 + ids, ids % 97, 5
    tables["texts"]["offset"], tables["texts"]["num_bytes"] = 5 * ids, 5
    tables["text_bytes"] = np.full(5 * count, 97, np.uint8)
    taken = ids[ids % page_size == 0]
    tables["events"] = np.zeros(len(taken), TABLES["events"])
    tables["events"]["op"], tables["events"]["page"], tables["events"]["owner"] = Op.ALLOC, 1 + taken // page_size, seq_id
    tables["events"]["index"] = taken // page_size
    tables["steps"]["event_end"] = ids // page_size + 1
    frames = [row for i in ids[ids % 256 == 0].tolist() for row in keyframe(i // page_size + 1, seq_id)]
    tables["keyframes"] = np.array(frames, TABLES["keyframes"])
    for name in ("waits", "preempts", "finishes"):
        tables[name] = tables[name][:0]
    return TraceDelta(tables)


def keyframe(pages: int, seq_id: int) -> list[tuple]:
    return [(pages, 0, 0, 0, 0), *((pages, Op.ALLOC, page + 1, seq_id, page) for page in range(pages))]


def test_a_hundred_thousand_steps_of_one_request_fit():
    store = TraceStore(256 * 2**20, piece)
    store.apply(TraceDelta(sequences=(info(1),)))
    for first in range(0, 100_000, 2000):  # texts of 2,000 tokens: a request every 2,000 steps
        seq_id = 1 + first // 2000
        delta = decode_steps(first, 2000, seq_id)
        delta.tables["keyframes"] = delta.tables["keyframes"][:0]
        store.apply(TraceDelta(delta.tables, sequences=(info(seq_id),)))
    trace = store.snapshot()
    assert len(trace) == 100_000 and trace.first_step == 0 and store.nbytes < 64 * 2**20
    assert len(trace.tokens_of(50)) == 2000 and len(trace.text_of(50)) == 10_000


def test_the_bound_holds_after_every_delta_even_a_huge_one():
    store = TraceStore(200_000, piece)
    first = 0
    for count in (50, 300, 5000, 20, 700, 1, 3000):
        delta = decode_steps(first, count, seq_id=1 + first // 500)
        store.apply(TraceDelta(delta.tables, sequences=tuple(info(i) for i in {1 + first // 500})))
        first += count
        assert store.nbytes <= 200_000
        trace = store.snapshot()
        assert trace.last_step == first - 1 and (np.diff(trace.steps["step_id"]) > 0).all()


def test_joins_finishes_preemptions_and_failures_are_kept_longest():
    store = TraceStore(300_000, piece)
    marked = {40: "finishes", 60: "preempts", 80: "fails", 100: "join", 110: "chunk"}
    for step in range(2500):
        delta = decode_steps(step, 1)
        tables, errors = delta.tables, ()
        tables["keyframes"] = tables["keyframes"][:0]
        what = marked.get(step)
        if what in ("finishes", "preempts"):
            tables[what] = np.zeros(1, TABLES[what])
            tables[what]["step_id"], tables[what]["seq_id"] = step, 1
        elif what == "fails":
            errors = (StepError(step, "step_failed", "No."),)
        elif what == "join":
            tables["works"]["start"] = 0
        elif what == "chunk":
            tables["works"]["samples"] = 0
        store.apply(TraceDelta(tables, sequences=(info(1),) if step == 0 else (), errors=errors))
        if len(store.snapshot()) < step + 1:
            break
    kept = store.snapshot().steps["step_id"].tolist()
    assert step > 1000 and set(marked) <= set(kept) and kept[-1] == step
    assert 41 not in kept and kept[len(kept) // 2] > 500
    assert len(store.snapshot().tokens_of(1)) == step + 1, "the text of a living request stays whole"
    assert len(store.snapshot().text_of(1)) == 5 * (step + 1)


def test_a_thinned_and_dropped_ring_still_rebuilds_every_pool(monkeypatch):
    monkeypatch.setattr(engine.core, "KEYFRAME_EVERY", 8)
    core = make_lazy_core(pages=10, page_size=4, max_num_batched_tokens=12)
    watch, store = Watch(core), TraceStore(12_000, piece)
    dropped = False
    for i in range(60):
        add(core, prompt_of(3 + i % 9, i), 4 + i % 5)
        for _ in range(5):
            core.step()
        store.apply(core.rooms["main"].recorder.drain())
        trace = store.snapshot()
        assert store.nbytes <= 12_000
        check_replay(watch, trace)
        dropped = dropped or trace.meta["event_base"] > 0
        for seq_id in np.unique(trace.works["seq_id"]).tolist():
            assert seq_id in trace.sequences
            assert trace.text_of(seq_id) == "".join(map(piece, watch.made.get(seq_id, ())))
    assert dropped and trace.meta["text_base"] > 0


def test_a_dropped_ring_remembers_how_far_a_waiting_prompt_had_come():
    core = make_lazy_core(pages=64, page_size=4, max_num_batched_tokens=6, max_model_len=2000)
    watch, store = Watch(core), TraceStore(12_000, piece)
    add(core, 1, 90)
    add(core, 1, 90)
    add(core, 9, 4)
    core.step()
    knob(core, "max_num_batched_tokens", 2)  # the two that decode use it up
    for _ in range(80):
        core.step()
        store.apply(core.rooms["main"].recorder.drain())
    trace = store.snapshot()
    assert trace.first_step > 2 and 3 not in trace.works["seq_id"]
    check_replay(watch, trace)
    assert trace.computed_at(trace.last_step)[3] == 4


@pytest.mark.parametrize("seed", range(6))
def test_snapshots_never_change(seed):
    """Each life drains now and then into a small ring; what was taken before stays as it was."""
    import tests.engine.lives as lives

    taken = []

    class Keeping(TraceStore):
        def apply(self, delta):
            super().apply(delta)
            trace = self.snapshot()
            taken.append((trace, {name: getattr(trace, name).copy() for name in TABLES}, dict(trace.token_texts), dict(trace.sequences)))

    original, lives.TraceStore = lives.TraceStore, Keeping
    try:
        random_life(seed, 40, ring_bytes=6000)
    finally:
        lives.TraceStore = original
    assert taken
    for trace, tables, words, sequences in taken:
        for name in TABLES:
            np.testing.assert_array_equal(getattr(trace, name), tables[name])
        assert dict(trace.token_texts) == words and dict(trace.sequences) == sequences


def test_a_reader_on_another_thread_never_sees_half_a_delta():
    store = TraceStore(150_000, piece)
    store.apply(TraceDelta(sequences=(info(1),)))
    wrong, done = [], threading.Event()

    def read():
        while not done.is_set():
            time.sleep(0.0005)
            trace = store.snapshot()
            if len(trace):
                ends, base = trace.steps["event_end"], trace.meta["event_base"]
                if len(trace.works) != len(trace.steps) or ends[-1] - base != len(trace.events):
                    wrong.append(trace.last_step)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for first in range(0, 6_000, 20):
        store.apply(decode_steps(first, 20))
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_probed_arrays_have_a_budget_of_their_own_and_reports_stay():
    store = TraceStore(2**20, piece)
    store.apply(TraceDelta(artifacts=("a report",)))
    size = ARTIFACT_BYTES // 4
    for step in range(9):
        store.apply(TraceDelta(artifacts=(TensorSample(step, "hidden", 0, np.zeros(size // 4, np.float32)),)))
    kept = store.snapshot().artifacts
    assert kept[0] == "a report" and [a.step_id for a in kept[1:]] == [5, 6, 7, 8]


def test_a_delta_with_nothing_in_it_changes_nothing_but_the_version():
    store = TraceStore(2**20, piece)
    before = store.version
    store.apply(TraceDelta(pack([], 0)))
    assert len(store.snapshot()) == 0 and store.version == before + 1


def test_every_token_that_is_shown_has_a_word():
    store = TraceStore(2**20, piece)
    store.apply(TraceDelta(pack([make_record()], 0), sequences=(info(5),)))
    assert {0, 1, 2, 3, 77} <= set(store.snapshot().token_texts)
