"""What a host hid is nowhere in the trace that others get, however old it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.request import SamplingParams
from engine.store import TraceStore
from engine.trace import TensorSample, TraceDelta
from engine.veil import SENTENCE, veiled
from tests.factories import add, make_core, piece, prompt_of, run, trace_of

SECRET = b"secret"


def with_a_secret(core, store: TraceStore, request_id: int) -> TraceDelta:
    """What the core recorded, with the texts of one request replaced by as many bytes of SECRET."""
    delta = core.rooms["main"].recorder.drain()
    texts, content = delta.tables["texts"], delta.tables["text_bytes"].copy()
    begin = int(store.snapshot().meta["text_base"]) + len(store.snapshot().text_bytes)
    for row in texts[texts["seq_id"] == request_id]:
        at, n = int(row["offset"]) - begin, int(row["num_bytes"])
        content[at : at + n] = np.frombuffer((SECRET * n)[:n], np.uint8)
    return replace(delta, tables={**delta.tables, "text_bytes": content})


@pytest.fixture(scope="module")
def evicted():
    """A ring so full that the rows of request 2's texts are gone, while its bytes lie between those of 1, which goes on."""
    core, store = make_core(pages=400, max_model_len=2000), TraceStore(24_000, piece)
    core.add("", prompt_of(3, 1), SamplingParams(1200, ignore_eos=True))
    core.add("", prompt_of(3, 2), SamplingParams(12, ignore_eos=True))
    for _ in range(900):
        core.step()
        store.apply(with_a_secret(core, store, 2))
        trace = store.snapshot()
        if not (trace.texts["seq_id"] == 2).any() and SECRET[:3] in trace.text_bytes.tobytes():
            return trace
    raise AssertionError("the ring kept the rows or dropped the bytes")


def test_a_text_whose_rows_the_ring_dropped_is_hidden_too(evicted):
    found = veiled(evicted, {2})
    assert not any(SECRET[i : i + 3] in found.text_bytes.tobytes() for i in range(4))
    assert found.text_of(1) == evicted.text_of(1) != "" and len(found.text_bytes) == len(evicted.text_bytes)


def test_also_where_nothing_else_of_the_request_is_left(evicted):
    sequences = {i: info for i, info in evicted.sequences.items() if i != 2}
    trace = type(evicted)(
        {t: getattr(evicted, t) for t in ("steps", "works", "tokens", "texts", "text_bytes")}, sequences, meta=evicted.meta
    )
    assert SECRET[:3] not in veiled(trace, {2}).text_bytes.tobytes()


def test_what_was_probed_in_a_step_of_a_hidden_request_goes_or_in_one_that_is_no_longer_known():
    core = make_core(pages=32)
    add(core, 5, 3)
    run(core)
    add(core, 6, 3)
    run(core)
    steps = {i: int(trace_step) for i, trace_step in ((1, 0), (2, core.rooms["main"].scheduler._next_step - 1), (3, 10**6))}
    for step in steps.values():
        core.rooms["main"].recorder.artifact(TensorSample(step, "hidden", 0, np.zeros(3, np.float32)))
    trace = trace_of(core)
    assert [a.step_id for a in veiled(trace, {2}).artifacts] == [0] and veiled(trace, {2}).sequences[2].prompt == SENTENCE
    assert veiled(trace, {99}) is trace and veiled(trace, ()) is trace
