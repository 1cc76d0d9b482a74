"""Recordings: what is saved comes back, and no file can do more than be refused with a sentence (TRAPS I, R1, R3)."""

from __future__ import annotations

import json
import os
import resource
import time
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import engine.core
from engine import recording
from engine.errors import EngineError
from engine.recording import clip, decode, encode, load, save
from engine.trace import TABLES, KernelReport, SequenceInfo, StepError, TensorSample, Trace
from tests.engine.audit import knob
from tests.engine.lives import random_life
from tests.factories import add, make_core, make_trace, prompt_of, run, trace_of


@pytest.fixture(scope="module")
def trace() -> Trace:
    busy = make_trace()
    meta = {**busy.meta, "versions": {"numpy": "2"}, "date": "2026-11-30", "eos_token_ids": frozenset({2, 1}), "loss": float("nan")}
    report = KernelReport("rope", "torch", "cpu", float("inf"), 1e-3, False, "it did not compile")
    sample = TensorSample(3, "attention.q", 1, np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    error = StepError(2, "step_failed", "Step 2 failed: 火 <b>", (1, 2))
    tables = {name: getattr(busy, name) for name in TABLES}
    return Trace(tables, busy.sequences, busy.token_texts, meta, (report, sample), (error,))


@pytest.fixture(scope="module")
def data(trace) -> bytes:
    return encode(trace)


def exercise(trace: Trace) -> None:
    """Everything that a view may ask of a trace."""
    ids = trace.steps["step_id"].tolist()
    for step in ids[:40]:
        trace.step(step)
        pool = trace.pool_at(step)
        assert pool.num_free >= 0 and pool.owners is not None
        trace.computed_at(step)
        trace.page_size_at(step), trace.num_pages_at(step), trace.config_at(step)
    for seq_id in list(trace.sequences)[:40]:
        for step in (None, *ids[:10]):
            trace.text_of(seq_id, step)
            trace.tokens_of(seq_id, step)
        trace.name(seq_id)


def refused(data: bytes, code: str = "recording_corrupt") -> str:
    """The sentence with which these bytes are refused: quickly, and in bounded memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(EngineError) as caught:
        decode(data)
    assert caught.value.code == code, caught.value.sentence
    assert time.monotonic() - began < 5  # about 0.1 s on a free core; the bound only catches a hang
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000
    assert caught.value.sentence.endswith(".") and len(caught.value.sentence) < 400
    return caught.value.sentence


def same(a: Trace, b: Trace) -> None:
    for name in TABLES:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert dict(a.sequences) == dict(b.sequences) and dict(a.token_texts) == dict(b.token_texts) and a.errors == b.errors


# ---- what is saved comes back ----


def test_a_recording_gives_back_the_same_tables_words_and_artifacts(trace, data):
    back = decode(data)
    same(trace, back)
    assert back.meta["source"] == "recording" and back.meta["configs"] == trace.meta["configs"]
    assert back.meta["eos_token_ids"] == (1, 2) and back.meta["loss"] is None
    report, sample = back.artifacts
    assert report == trace.artifacts[0]
    np.testing.assert_array_equal(sample.values, trace.artifacts[1].values)
    assert (sample.step_id, sample.name, sample.layer, sample.provenance) == (3, "attention.q", 1, "measured")
    for step in trace.steps["step_id"].tolist():
        assert dict(back.pool_at(step).tables) == dict(trace.pool_at(step).tables)
        assert back.computed_at(step) == trace.computed_at(step)
    assert all(back.text_of(i) == trace.text_of(i) for i in trace.sequences)
    assert not back.steps.flags.writeable


def test_saving_twice_and_saving_what_was_loaded_gives_equal_bytes(trace, data, tmp_path):
    save(trace, tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_an_empty_trace_and_a_trace_with_strange_text_can_be_saved():
    same(decode(encode(Trace())), Trace())
    info = SequenceInfo(1, 1, 0, "A", "half \ud800 ${x} `{{y}}` </script> \x00 \u202e", (1, 2), 5, 0.7, 2**62, -3, 0, "main")
    back = decode(encode(Trace(sequences={1: info}, token_texts={5: "\ud83d"}, meta={"note": "\udfff"})))
    assert back.sequences[1] == replace(info, prompt=info.prompt.replace("\ud800", "?"))
    assert back.token_texts == {5: "?"} and back.meta["note"] == "?"


def test_the_manifest_is_strict_json_in_one_key(data):
    """R3: Python writes NaN by default; a strict reader refuses it."""

    def no_constant(word):
        raise AssertionError(word)

    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert set(header["__metadata__"]) == {"manifest"}
    manifest = json.loads(header["__metadata__"]["manifest"], parse_constant=no_constant)
    assert manifest["format"] == "glass-recording" and manifest["artifacts"][0]["max_error"] == "inf"


@pytest.mark.parametrize("seed", range(6))
def test_any_life_survives_a_recording(seed):
    life = random_life(seed, 40)
    trace = life.store.snapshot()
    back = decode(encode(trace))
    same(trace, back)
    assert encode(back) == encode(trace)
    exercise(back)


# ---- the file system ----


def test_a_failed_save_says_why_and_leaves_nothing_behind(trace, tmp_path, monkeypatch):
    (tmp_path / "old").write_bytes(b"precious")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording.os, "fsync", full)
    with pytest.raises(EngineError, match="No space left on device") as caught:
        save(trace, tmp_path / "old")
    assert caught.value.code == "recording_not_saved"
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_bytes() == b"precious"
    with pytest.raises(EngineError) as caught:
        save(trace, tmp_path / "no" / "such" / "folder")
    assert caught.value.code == "recording_not_saved"


def test_a_missing_file_and_a_folder_are_refused_with_a_sentence(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(EngineError, match="cannot be opened") as caught:
            load(path)
        assert caught.value.code == "recording_missing"


# ---- a stranger's file ----


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict | bytes, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def with_manifest(data: bytes, **changes: object) -> bytes:
    header, body = header_of(data)
    manifest = json.loads(header["__metadata__"]["manifest"])
    header["__metadata__"]["manifest"] = json.dumps(manifest | changes)
    return with_header(header, body)


def with_entry(data: bytes, name: str = "works.start", **changes: object) -> bytes:
    header, body = header_of(data)
    header[name] |= changes
    return with_header(header, body)


def with_column(trace: Trace, table: str, field: str | None, change) -> bytes:
    tables = {name: getattr(trace, name).copy() for name in TABLES}
    change(tables[table] if field is None else tables[table][field])
    return encode(Trace(tables, trace.sequences, trace.token_texts, trace.meta, trace.artifacts, trace.errors))


def test_a_newer_version_is_named_as_such(data):
    assert "format 2" in refused(with_manifest(data, version=2), "recording_newer")
    assert "version" in refused(with_manifest(data, version=0))
    assert "version" in refused(with_manifest(data, version="1"))
    assert "not a recording of this engine" in refused(with_manifest(data, format="other"))


@pytest.mark.parametrize("tenth", range(10))
def test_a_file_cut_at_each_tenth_is_refused(data, tenth):
    refused(data[: len(data) * tenth // 10])


def test_impossible_headers_are_refused_before_they_are_believed(data):
    for length in (2**63, 2**64 - 1, len(data), 2**31):
        assert "header" in refused(length.to_bytes(8, "little") + data[8:])
    assert "JSON" in refused(with_header(b"[" * 1_000_000, b""))
    assert "JSON" in refused(with_header(b'{"a":' * 1_000_000, b""))
    assert "JSON" in refused(with_header(b"\xff\xfe{}", b""))
    assert "JSON" in refused(with_header(b'{"x": ' + b"9" * 5_000_000 + b"}", b""))
    assert "claims 9,000,000 bytes" in refused(with_header(b" " * 9_000_000, b""))
    assert "object" in refused(with_header(b"[]", b""))
    assert "manifest" in refused(with_header({}, b""))
    assert "twice" in refused(with_header(b'{"a": {}, "a": {}}', b""))
    assert "too many" in refused(with_header({f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(50_000)}, b""))
    refused(with_header(b"{" + b",".join(b'"%d":0' % i for i in range(600_000)) + b"}", b""))


def test_impossible_tensors_are_refused_before_they_are_read(trace, data):
    header, body = header_of(data)
    begin, end = header["works.start"]["data_offsets"]
    wrong = ([end, begin], [begin, end + 4], [0, end - begin], [begin, 2**62], [-4, end], [begin], [begin + 0.0, end], None, [True, end])
    for offsets in wrong:
        refused(with_entry(data, data_offsets=offsets))
    for shape in ([2**31, 2**31], [2**62], [-1], [], "x", [1] * 1000, [[1]], [len(trace.works), 0]):
        refused(with_entry(data, shape=shape))
    for dtype in ("F4", "BF16", "X", None, ["I32"], "F32"):
        refused(with_entry(data, dtype=dtype))
    neighbour = header["works.row"]["data_offsets"]
    assert "overlap" in refused(with_entry(data, data_offsets=neighbour))
    refused(with_header(header, body + b"tail"))
    refused(with_header(header, body[:-1]))
    refused(with_header({k: v for k, v in header.items() if k != "works.start"}, body))
    extra = header | {"evil": {"dtype": "U8", "shape": [0], "data_offsets": [len(body), len(body)]}}
    assert "evil" in refused(with_header(extra, body))


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [
        ("steps", "step_id", 3), ("steps", "event_end", 2**40), ("steps", "event_end", -1), ("steps", "config", 9), ("steps", "config", -1),
        ("steps", "start_us", -5), ("works", "seq_id", 10_000), ("works", "num_tokens", 0), ("works", "start", -1),
        ("works", "start", 2**31 - 1), ("works", "samples", 2), ("tokens", "num_top", 6), ("tokens", "token_id", -1),
        ("tokens", "seq_id", 0), ("waits", "reason", 200), ("waits", "needed", -1), ("finishes", "reason", 4),
        ("texts", "offset", 2**62), ("texts", "offset", -1), ("texts", "num_bytes", 2**31 - 1),
        ("events", "op", 0), ("events", "op", 8), ("events", "page", -1), ("events", "page", 2**30), ("events", "owner", -2),
        ("events", "index", 2**30), ("keyframes", "event_at", 2**40), ("keyframes", "op", 8), ("preempts", "has_cause", 2),
        ("preempts", "for_seq_id", 999), ("works", "step_id", 10**6),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused(trace, table, field, value):
    rows = len(getattr(trace, table))
    assert rows

    def change(column):
        column[rows // 2 if field not in ("for_seq_id", "event_at") else 0] = value

    refused(with_column(trace, table, field, change))


def test_words_out_of_range_are_refused(data):
    header, _ = header_of(data)
    manifest = json.loads(header["__metadata__"]["manifest"])
    first, *rest = manifest["sequences"]
    for change in (
        {"seq_id": -1}, {"seq_id": 2**40}, {"seq_id": rest[0]["seq_id"]}, {"name": "x" * 1000}, {"name": 5}, {"num_prompt_tokens": 10**9},
        {"num_prompt_tokens": 0}, {"temperature": "hot"}, {"seed": 2**64}, {"prompt": None}, {"room": "r" * 1000},
    ):  # fmt: skip
        refused(with_manifest(data, sequences=[first | change, *rest]))
    refused(with_manifest(data, sequences=rest))
    refused(with_manifest(data, sequences=7))
    refused(with_manifest(data, token_texts=[[1, "x" * 1000]]))
    refused(with_manifest(data, token_texts=[[1]]))
    refused(with_manifest(data, errors=[{"step_id": 1}]))
    refused(with_manifest(data, configs=[{"page_size": 0}]))
    refused(with_manifest(data, configs=[{"num_pages": 2**40}]))
    refused(with_manifest(data, artifacts=[{"type": "Evil"}]))
    refused(with_manifest(data, artifacts=[]))  # the probed array belongs to nobody
    refused(with_manifest(data, meta={"x": "y" * 100_000}))
    refused(with_manifest(data, meta={"event_base": "0"}))
    refused(with_manifest(data, meta={"text_base": -1}))
    refused(with_manifest(data, meta=[]))
    deep: object = 1
    for _ in range(50):
        deep = {"a": deep}
    refused(with_manifest(data, meta=deep))
    header["__metadata__"]["manifest"] = '{"format": NaN}'
    assert "strict JSON" in refused(with_header(header, header_of(data)[1]))
    header["__metadata__"]["manifest"] = '{"format": 1e999}'
    refused(with_header(header, header_of(data)[1]))


def test_texts_that_would_unpack_to_more_than_the_file_are_refused(trace):
    def all_of_it(texts):
        texts["offset"], texts["num_bytes"] = 0, len(trace.text_bytes)

    assert "overlap" in refused(with_column(trace, "texts", None, all_of_it))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 2**30), st.integers(1, 255)), min_size=1, max_size=4), in_header=st.booleans())
def test_flipped_bytes_give_a_usable_trace_or_a_sentence(data, flips, in_header):
    broken = bytearray(data)
    limit = 8 + int.from_bytes(data[:8], "little") if in_header else len(broken)
    for at, flip in flips:
        broken[at % limit] ^= flip
    try:
        back = decode(bytes(broken))
    except EngineError as error:
        assert error.code in ("recording_corrupt", "recording_newer")
    else:
        exercise(back)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.data())
def test_nonsense_within_the_ranges_gives_a_usable_trace_or_a_sentence(trace, choice):
    """Values that pass for real ones: the log may release what was never held, tables may contradict each other."""
    table = choice.draw(st.sampled_from([n for n in TABLES if n != "text_bytes"]))
    field = choice.draw(st.sampled_from(TABLES[table].names))
    low, high = choice.draw(st.sampled_from(((0, 12), (0, 300), (-1, 7))))

    def shuffle(rows):
        rng = np.random.default_rng(choice.draw(st.integers(0, 1000)))
        column = rows[field]
        some = rng.random(len(rows)) < 0.3
        column[some] = rng.integers(max(low, 0) if column.dtype == np.uint8 else low, min(high, 255), column[some].shape)

    try:
        back = decode(with_column(trace, table, None, shuffle))
    except EngineError as error:
        assert error.code == "recording_corrupt"
    else:
        exercise(back)


# ---- parts of a run ----


@pytest.mark.parametrize("seed", range(8))
def test_a_clip_shows_each_of_its_steps_as_the_whole_does(seed, monkeypatch):
    monkeypatch.setattr(engine.core, "KEYFRAME_EVERY", 8)
    life = random_life(seed, 40, ring_bytes=(2**24, 8000)[seed % 2])
    whole = life.store.snapshot()
    ids = whole.steps["step_id"].tolist()
    for first, last in ((ids[0], ids[-1]), (ids[len(ids) // 3], ids[2 * len(ids) // 3]), (ids[len(ids) // 2],) * 2, (ids[0], ids[1])):
        part = clip(whole, first, last)
        assert part.steps["step_id"].tolist() == [i for i in ids if first <= i <= last]
        for step in part.steps["step_id"].tolist():
            a, b = part.pool_at(step), whole.pool_at(step)
            assert dict(a.tables) == dict(b.tables) and a.num_free == b.num_free
            assert (a.cached == b.cached).all() and (a.pending == b.pending).all() and (a.ref_counts == b.ref_counts).all()
            assert step == last or part.computed_at(step) == whole.computed_at(step)
            for name in ("works", "waits", "tokens", "finishes", "preempts"):
                np.testing.assert_array_equal(getattr(part.step(step), name), getattr(whole.step(step), name))
        for seq_id in np.unique(part.works["seq_id"]).tolist():
            assert part.text_of(seq_id) == whole.text_of(seq_id, last)
            assert part.name(seq_id) == whole.name(seq_id)
        again = decode(encode(part))
        same(part, again)
        assert len(encode(part)) <= len(encode(whole)) + 4096


def test_a_clip_remembers_how_far_a_prompt_had_come_that_waits_in_all_its_steps():
    core = make_core(pages=32, page_size=4, max_num_batched_tokens=6)
    for length, most in ((1, 20), (1, 20), (9, 4)):
        add(core, length, most)
    core.step()
    knob(core, "max_num_batched_tokens", 2)  # the two that decode use it up
    for _ in range(8):
        core.step()
    whole = trace_of(core)
    part = clip(whole, 4, 6)
    assert 3 not in part.works["seq_id"] and part.computed_at(5)[3] == whole.computed_at(5)[3] == 4
    assert decode(encode(part)).computed_at(5)[3] == 4


def test_a_clip_outside_the_run_is_empty_and_can_be_saved(trace):
    assert len(clip(trace, 10_000, 20_000)) == 0
    assert len(decode(encode(clip(trace, 10_000, 20_000)))) == 0


def test_a_clip_keeps_only_the_words_it_needs():
    core = make_core(pages=32, page_size=4)
    for size in range(1, 9):
        add(core, prompt_of(size, size), 4)
        run(core)
    whole = trace_of(core)
    part = clip(whole, whole.last_step - 2, whole.last_step)
    assert set(part.sequences) == {8} and len(part.token_texts) < len(whole.token_texts)
