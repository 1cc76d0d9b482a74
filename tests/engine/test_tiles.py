"""Tile traces: the kernel's own numbers are an online softmax of the step's data, live or computed again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import engine.tiles
from engine.artifacts import FULL, PARTLY, TileTrace, TrafficRun, of_kind
from engine.audience import LiveSource
from engine.build import build_core
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.errors import EngineError
from engine.interpreted import Interpreter, read_frame, write_frame
from engine.jobs import start_job
from engine.probe import NO_PROBE
from engine.recording import decode, encode
from engine.request import SamplingParams
from engine.store import TraceStore
from engine.tiles import PastStep, past_step
from engine.trace import Trace
from engine.traced import Operands, count_tiles, plan, trace
from tests.engine.test_session import make_session, until
from tests.factories import make_core

VOCAB = 250


@pytest.fixture(scope="module")
def built(tiny_llama):
    """One core for the whole file, so that its interpreter stays warm."""
    return build_core(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=64), SchedulerConfig(4, 48)))


@pytest.fixture
def core(built):
    core = built[0]
    yield core
    for seq in [*core.rooms["main"].scheduler.running, *core.rooms["main"].scheduler.waiting]:
        core.abort(seq.request.request_id)
    while core.has_work:
        core.step()
    core.reconfigure(built[0].housing.defaults)
    core.forget("main")


class Watched:
    """Steps a core, keeps its records, runs jobs beside its steps as the loop does."""

    def __init__(self, core) -> None:
        self.core, self.store = core, TraceStore(2**26, lambda i: str(i), {})
        core.rooms["main"].recorder.drain()

    def add(self, length: int, salt: int = 0, **sampling: object) -> tuple[int, ...]:
        ids = tuple(np.random.default_rng(salt).integers(1, VOCAB, length).tolist())
        return self.core.add("", ids, SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | sampling))[1]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step()

    @property
    def trace(self) -> Trace:
        self.store.apply(self.core.rooms["main"].recorder.drain())
        return self.store.snapshot()

    def run(self, steps: bool = True, **args: object):
        """The job with what it published."""
        job = start_job(self.core, "tiles", args)
        deadline = time.monotonic() + 60
        while not job.advance():
            assert time.monotonic() < deadline
            if steps and job.probe is not None and job.record is None and self.core.has_work:
                record = self.core.step("main", job.probe_for("main") or NO_PROBE)
                if record is not None:
                    job.saw(record)
        job.close()
        return job, job.take_artifacts()

    def traced(self, **args: object) -> TileTrace:
        job, found = self.run(**args)
        assert not job.note, job.note
        (it,) = found
        return it


def lane_of(it: TileTrace, tile: int) -> int:
    return (it.row_position - int(it.tiles["q_start"][tile])) * it.group + it.row_head % it.group


def check_row(it: TileTrace, v: np.ndarray | None = None) -> None:
    """m, l, rescale (and acc over v [keys, head_dim]) of the chosen row against an online softmax over its scores."""
    assert len(it.row_tiles) and (it.tiles["seq_id"][it.row_tiles] == it.row_seq_id).all()
    scores, ends = it.scores.astype(np.float64), []
    split, m, l, acc = -1, -np.inf, 0.0, np.zeros(it.head_dim)
    for k, tile in enumerate(it.row_tiles.tolist()):
        row, lane = it.tiles[tile], lane_of(it, tile)
        if row["split"] != split:
            if split >= 0:
                ends.append((m, l, it.acc[k - 1]))
            split, m, l, acc = row["split"], -np.inf, 0.0, np.zeros(it.head_dim)
        x = scores[row["k_start"] : row["k_stop"]]
        m_new = max(m, x.max())
        rescale = np.exp(m - m_new) if np.isfinite(m) else 0.0
        p = np.exp(x - m_new) if np.isfinite(m_new) else np.zeros_like(x)
        m, l = m_new, l * rescale + p.sum()
        np.testing.assert_allclose(it.m[tile, lane], m, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(it.l[tile, lane], l, rtol=1e-4)
        np.testing.assert_allclose(it.rescale[tile, lane], rescale, rtol=1e-4, atol=1e-6)
        if v is not None:
            acc = acc * rescale + p @ v[row["k_start"] : row["k_stop"]]
            np.testing.assert_allclose(it.acc[k], acc, rtol=1e-4, atol=1e-4)
    ends.append((m, l, it.acc[-1]))
    top = max(m for m, _, _ in ends)
    weights = [np.exp(m - top) for m, _, _ in ends]
    out = sum(w * a for w, (_, _, a) in zip(weights, ends)) / sum(w * l for w, (_, l, _) in zip(weights, ends))
    np.testing.assert_allclose(out, it.plain, rtol=1e-4, atol=1e-5)


def check_tiles(it: TileTrace) -> None:
    """Each program's tiles follow one another and together hold every key that one of its rows sees, by their kind."""
    assert not np.isnan(it.m[it.row_tiles]).all() and it.m.shape == (len(it.tiles), it.block_m)
    other = (it.tiles["seq_id"] != it.row_seq_id) | (it.tiles["kv_head"] != it.row_kv_head)
    assert np.isnan(it.m[other]).all() and np.isnan(it.l[other]).all() and np.isnan(it.rescale[other]).all()
    seen = {}
    for row in it.tiles:
        low, high = row["q_start"], row["q_start"] + row["num_q"] - 1
        assert row["kind"] == (FULL if row["k_stop"] <= low + 1 else PARTLY) or row["k_stop"] - row["k_start"] < it.block_n
        seen.setdefault((row["seq_id"], row["kv_head"], low, high), []).append((row["k_start"], row["k_stop"]))
    for (_, _, _, high), spans in seen.items():
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == high + 1 and all(a[1] == b[0] for a, b in pairwise(spans))
    for seq_id, queries, keys in it.sequences:
        for kv_head in range(it.kv_heads):
            mine = sorted((low, high) for s, h, low, high in seen if (s, h) == (seq_id, kv_head))
            assert mine[0][0] == keys - queries and mine[-1][1] == keys - 1
    assert (np.diff(it.tiles["program"]) >= 0).all() and (it.tiles["sm"] == -1).all() and not it.tiles["stop_ns"].any()


# ---- the next step ----


@pytest.mark.parametrize("choice", [{}, {"block_m": 16, "block_n": 16}, {"block_m": 64, "block_n": 32, "position": 11}], ids=str)
def test_a_live_prompts_log_is_an_online_softmax_of_its_own_scores(core, choice):
    it = Watched(core)
    it.add(33)
    it.add(9, 1)
    found = it.traced(layer=1, head=3, **choice)
    assert found.provenance == "measured" and found.kernel == "flash_prefill" and found.difference == 0
    assert found.sequences == ((found.row_seq_id, 33, 33), (found.row_seq_id + 1, 9, 9)) and "interpreter" in found.device
    assert found.row_position == choice.get("position", 32) and (found.heads, found.kv_heads, found.head_dim) == (4, 2, 16)
    check_tiles(found)
    check_row(found)
    assert np.isneginf(found.scores[found.row_position + 1 :]).all() and np.isfinite(found.scores[: found.row_position + 1]).all()


def test_the_accumulator_is_what_the_values_of_the_step_give(core):
    it = Watched(core)
    it.add(40)
    job, (found,) = it.run(layer=0, head=2, block_m=16, block_n=16)
    operands = job.probe.operands
    v = operands.v_cache[operands.block_table[0].long(), :, found.row_kv_head].flatten(0, 1)[:40].double().numpy()
    assert len(found.row_tiles) == 3
    check_row(found, v)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_a_decodes_splits_each_have_their_softmax_and_together_the_plain_one(core, splits):
    it = Watched(core)
    it.add(45)
    it.add(20, 1)
    it.step(2)
    found = it.traced(layer=1, head=1, num_splits=splits, block_n=16)
    assert found.kernel == "flash_decode" and found.num_splits == splits and len(found.sequences) == 2
    assert len(set(found.tiles["split"][found.row_tiles].tolist())) == splits
    check_tiles(found)
    check_row(found)


def test_a_prompt_chunk_and_decodes_in_one_step_are_traced_as_the_engine_launches_them(core):
    it = Watched(core)
    it.add(5)
    it.step(2)
    it.add(40, 1)
    prefill = it.traced(layer=0, head=0)
    assert prefill.kernel == "flash_prefill" and [q for _, q, _ in prefill.sequences] == [40]
    it.add(40, 2)
    decode = it.traced(layer=0, head=0, kernel="flash_decode")
    assert decode.kernel == "flash_decode" and [q for _, q, _ in decode.sequences] == [1, 1]
    for found in (prefill, decode):
        check_row(found)
        check_tiles(found)


def test_a_traced_step_gives_the_same_tokens_and_says_that_it_was_probed(core):
    texts = []
    for traced in (False, True):
        it = Watched(core)
        (seq_id,) = it.add(30, max_tokens=6)
        it.step(2)
        if traced:
            found = it.traced(layer=1, head=0)
        while core.has_work:
            core.step()
        texts.append(it.trace.tokens_of(seq_id)["token_id"].tolist())
        probed = it.trace.steps["step_id"][it.trace.steps["probed"] == 1].tolist()
        assert probed == ([found.step_id] if traced else [])
        core.forget("main")
    assert texts[0] == texts[1] and len(texts[0]) == 6


def test_with_run_ahead_the_record_is_that_of_the_traced_step(core):
    core.reconfigure(with_knob(core.config, "run_ahead", 1))
    it = Watched(core)
    (seq_id,) = it.add(20)
    it.step(3)
    found = it.traced(layer=0, head=0)
    works = it.trace.rows("works", found.step_id, found.step_id)
    assert found.sequences == ((seq_id, 1, int(works["start"][0]) + 1),)
    assert it.trace.steps["probed"][it.trace.steps["step_id"] == found.step_id] == 1


def test_the_job_waits_for_a_step_that_has_the_row(core):
    it = Watched(core)
    (first,), (second,) = it.add(48), it.add(48, 1)
    found = it.traced(layer=0, head=0, seq_id=second)
    assert found.row_seq_id == second and it.trace.rows("works", 0, found.step_id)["seq_id"].tolist().count(first) >= 1


def test_what_goes_wrong_in_the_probe_is_a_note_and_the_step_goes_on(core, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such luck")

    it = Watched(core)
    (seq_id,) = it.add(20)
    monkeypatch.setattr(engine.tiles, "_choose", broken)
    job, found = it.run(layer=0, head=0)
    assert not found and job.note == "The traced kernel could not be run: no such luck."
    assert len(it.trace.tokens_of(seq_id)) == 1 and not it.trace.errors


def test_a_step_that_fails_ends_the_job_with_a_note(core, monkeypatch):
    it = Watched(core)
    it.add(20)
    monkeypatch.setattr(core.runner.model, "logits", lambda hidden: 1 / 0)
    job, found = it.run(layer=0, head=0)
    assert not found and "failed" in job.note


def test_half_precision_is_traced_as_it_is_and_bfloat16_is_widened_and_said(tiny_llama):
    for dtype, shown in (("float16", "float16"), ("bfloat16", "float32")):
        config = EngineConfig(ModelSource(str(tiny_llama), "cpu", dtype), CacheConfig(num_pages=16), SchedulerConfig(4, 48))
        it = Watched(build_core(config)[0])
        it.add(20)
        found = it.traced(layer=0, head=0)
        assert found.dtype == shown and ("widened" in found.device) == (dtype == "bfloat16")
        tile = found.row_tiles[-1]
        np.testing.assert_allclose(found.acc[-1] / found.l[tile, lane_of(found, tile)], found.plain, rtol=5e-3, atol=5e-3)


# ---- a step that is past ----


def same_numbers(a: TileTrace, b: TileTrace) -> None:
    assert (a.tiles == b.tiles).all() and a.sequences == b.sequences and a.row_tiles.tolist() == b.row_tiles.tolist()
    for name in ("m", "l", "rescale", "acc", "scores", "plain"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("knobs", [{}, {"max_num_batched_tokens": 16}, {"mode": "none"}, {"mode": "contiguous"}], ids=str)
@pytest.mark.parametrize("decodes", [0, 3])
def test_computed_again_a_step_shows_what_it_showed_live(core, knobs, decodes):
    config = core.config
    for name, value in knobs.items():
        config = with_knob(config, name, value)
    core.reconfigure(config)
    it = Watched(core)
    it.add(37)
    it.add(11, 1, temperature=0.9, seed=4)
    it.step(decodes + (3 if decodes and knobs.get("max_num_batched_tokens") else 0))
    live = it.traced(layer=1, head=2)
    it.step(4)
    before = dict(core.rooms["main"].scheduler.pool.tables)
    core.reconfigure(with_knob(core.config, "max_num_batched_tokens", 24))  # other chunks than live
    again = it.traced(steps=False, layer=1, head=2, past=past_step(it.trace, live.step_id))
    assert again.provenance == "recomputed" and again.step_id == live.step_id and again.difference < 1e-4
    same_numbers(live, again)
    assert core.rooms["main"].scheduler.pool.tables == before and list(core.rooms) == ["main"] and list(core.arena.leases) == ["main"]


def test_the_difference_is_that_of_the_recorded_tokens(core):
    it = Watched(core)
    it.add(20)
    it.step(3)
    past = past_step(it.trace, it.trace.last_step)
    ((of, token, logprob),) = past.sampled
    shifted = replace(past, sampled=((of, token, logprob - 0.25),))
    assert it.traced(steps=False, layer=0, head=0, past=shifted).difference == pytest.approx(0.25, abs=1e-4)
    other = replace(past, sampled=((of, (token + 1) % VOCAB, logprob),))
    assert it.traced(steps=False, layer=0, head=0, past=other).difference > 1e-3


def test_samples_of_one_prompt_and_shared_prefixes_can_be_computed_again(core):
    it = Watched(core)
    it.add(20, n=3, temperature=1.0, seed=2)
    it.step(1)
    prompt = past_step(it.trace, it.trace.last_step)
    assert len(prompt.works) == 1 and [s[0] for s in prompt.sampled] == [0, 0, 0]
    assert it.traced(steps=False, layer=0, head=0, past=prompt).difference < 1e-4
    it.step(2)
    it.add(20)  # hits what the first one published
    live = it.traced(layer=0, head=0, kernel="flash_prefill")
    again = it.traced(steps=False, layer=0, head=0, kernel="flash_prefill", past=past_step(it.trace, live.step_id))
    assert again.difference < 1e-4
    same_numbers(live, again)


def test_a_step_is_refused_that_is_not_in_the_record_or_lost_its_tokens(core):
    it = Watched(core)
    (seq_id,) = it.add(20)
    it.step(3)
    whole = it.trace
    for step in (-1, whole.last_step + 1):
        with pytest.raises(EngineError, match="is not in the record"):
            past_step(whole, step)
    lost = Trace({"steps": whole.steps, "works": whole.works, "tokens": whole.tokens[1:]}, whole.sequences, {}, whole.meta)
    with pytest.raises(EngineError, match="are not in the record any more") as caught:
        past_step(lost, whole.last_step)
    assert caught.value.code == "not_recorded"
    core.abort(whole.sequences[seq_id].request_id)
    core.step()
    with pytest.raises(EngineError, match="computed nothing"):
        past_step(it.trace, it.trace.last_step)


# ---- refusals ----


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"layer": 2}, "unknown_layer"), ({"layer": -1}, "unknown_layer"), ({"layer": True}, "unknown_layer"), ({"layer": "0"}, "unknown_layer"),
        ({"head": 4}, "unknown_head"), ({"head": 1.5}, "unknown_head"), ({"seq_id": 99_999}, "unknown_sequence"),
        ({"block_m": 17}, "bad_tiles"), ({"block_m": 8}, "bad_tiles"), ({"block_n": 512}, "bad_tiles"), ({"block_n": "16"}, "bad_tiles"),
        ({"block_m": 0}, "bad_tiles"), ({"num_splits": 0}, "bad_tiles"), ({"num_splits": 4096}, "bad_tiles"), ({"kernel": "softmax"}, "bad_tiles"),
        ({"position": -1}, "unknown_position"), ({"position": [1]}, "unknown_position"),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused_with_a_sentence(core, args, code):
    with pytest.raises(EngineError) as caught:
        start_job(core, "tiles", args)
    assert caught.value.code == code and caught.value.sentence.endswith(".")


def test_a_past_step_is_refused_by_its_own_rows_and_size(core, monkeypatch):
    past = PastStep(3, ((1, 0, 20), (2, 30, 1)), (tuple(range(20)), tuple(range(31))), ())
    for args, code in (
        ({"seq_id": 3}, "unknown_sequence"), ({"position": 40}, "unknown_position"), ({"seq_id": 1, "position": 20}, "unknown_position"),
        ({"seq_id": 1, "kernel": "flash_decode"}, "bad_tiles"),
    ):  # fmt: skip
        with pytest.raises(EngineError) as caught:
            start_job(core, "tiles", {"past": past, **args})
        assert caught.value.code == code, args
    monkeypatch.setitem(engine.tiles.MAX_AGAIN, "cpu", 50)
    with pytest.raises(EngineError, match="at most 50 can be computed again"):
        start_job(core, "tiles", {"past": past})


def test_a_launch_of_too_many_tiles_is_refused_and_one_sequence_alone_is_taken_before(core, monkeypatch):
    it = Watched(core)
    it.add(24)
    it.add(24, 1)
    monkeypatch.setattr(engine.tiles, "MAX_INTERPRETED", 10)
    found = it.traced(layer=0, head=0, block_m=16, block_n=16)
    assert len(found.sequences) == 1 and len(found.tiles) <= 10
    monkeypatch.setattr(engine.tiles, "MAX_INTERPRETED", 1)
    it.add(24, 2)
    job, found = it.run(layer=0, head=0, block_m=16, block_n=16)
    assert not found and "takes up to 1. Choose larger tiles or a shorter sequence." in job.note


def test_the_interpreter_gets_larger_tiles_where_there_would_be_many(core, monkeypatch):
    it = Watched(core)
    it.add(48)
    monkeypatch.setattr(engine.tiles, "FEW_TILES", 6)
    found = it.traced(layer=0, head=0)
    assert (found.block_m, found.block_n) == (64, 64) and len(found.tiles) <= 6
    check_row(found)


def test_an_engine_without_a_model_refuses():
    with pytest.raises(EngineError, match="no model"):
        start_job(make_core(), "tiles", {})


def test_combinations_that_a_kernel_does_not_take_end_with_a_sentence(core):
    it = Watched(core)
    it.add(30)
    job, found = it.run(layer=0, head=0, num_splits=4)
    assert not found and "flash_prefill splits no keys" in job.note
    job, found = it.run(layer=0, head=0, block_m=64)
    assert not found and "flash_decode takes" in job.note


# ---- the interpreter's child ----


def operands(queries: int, keys: int, dtype=torch.float32, **more: object) -> Operands:
    g = torch.Generator().manual_seed(1)
    q = torch.randn(queries, 4, 16, generator=g).to(dtype)
    k, v = (torch.randn(-(-keys // 16), 16, 2, 16, generator=g).to(dtype) for _ in range(2))
    return Operands(q, k, v, torch.arange(len(k), dtype=torch.int32)[None], (queries,), (keys,), 0.25, **more)


def request(it: Operands, kernel: str = "flash_prefill", **choice: object) -> tuple[dict, dict]:
    values = {
        "limit_s": 60, "kernel": kernel, "choice": choice, "row": [0, it.queries[0] - 1, 3], "queries": it.queries, "keys": it.keys,
        "scale": it.scale, "window": it.window, "softcap": it.softcap,
    }  # fmt: skip
    return values, {name: getattr(it, name).numpy() for name in ("q", "k_cache", "v_cache", "block_table")}


@pytest.mark.parametrize("more", [{"window": 7}, {"softcap": 3.0}, {"window": 20, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("queries", [1, 30])
def test_windows_and_caps_are_in_the_log_as_in_plain_softmax(core, more, queries):
    it = operands(queries, 40, **more)
    kernel = "flash_decode" if queries == 1 else "flash_prefill"
    run = core.interpreter.run(*request(it, kernel, block_n=16))
    assert run.wait(60)
    arrays = run.result()[1]
    blocks = plan(kernel, it, None, 16)
    target = engine.tiles.Target(kernel, (0,), (5,), 0, queries - 1, 39)
    found = engine.tiles.assemble(it, blocks, target, engine.tiles.Asked(0, 3), arrays, 7, "x", "measured", 0.0, 0.0)
    check_row(found)
    if "window" in more:
        assert np.isfinite(found.scores).sum() == more["window"]
    np.testing.assert_allclose(arrays["out"][-1, 3], found.plain, rtol=1e-4, atol=1e-5)
    assert count_tiles(it, blocks) == len(found.tiles)


def test_cancelling_a_job_ends_the_child_and_the_next_one_gets_another(core):
    it = Watched(core)
    it.add(48)
    job = start_job(core, "tiles", {"layer": 0, "head": 0, "block_m": 16, "block_n": 16})
    while core.interpreter._child is None or job.text != "Running the kernel in Triton's interpreter":
        job.advance()
        if job.probe_for("main") is not None:
            job.saw(core.step("main", job.probe_for("main")))
    child = core.interpreter._child
    assert child.poll() is None
    job.close()
    until(lambda: child.poll() is not None, 60)
    assert not job.take_artifacts() and list(core.rooms) == ["main"]
    check_row(it.traced(layer=0, head=0))
    assert core.interpreter._child is not child


def test_cancelled_while_a_step_is_computed_again_the_pages_are_back(core):
    it = Watched(core)
    it.add(48)
    it.step(4)
    core.reconfigure(with_knob(core.config, "max_num_batched_tokens", 8))
    past = past_step(it.trace, it.trace.last_step)
    for slices in (1, 3, 6):
        job = start_job(core, "tiles", {"past": past})
        for _ in range(slices):
            job.advance()
        job.close()
        assert list(core.rooms) == ["main"] and list(core.arena.leases) == ["main"] and not job.take_artifacts()


def test_the_child_is_kept_says_what_was_wrong_and_is_replaced_when_it_died():
    interpreter = Interpreter()
    bad = interpreter.run(*request(operands(5, 5), "flash_prefill", block_m=17))
    assert bad.wait(60)
    child = interpreter._child
    with pytest.raises(EngineError, match="block_m is 17"):
        bad.result()
    good = interpreter.run(*request(operands(5, 5)))
    assert good.wait(60) and good.result()[1]["out"].shape == (5, 4, 16) and interpreter._child is child
    child.kill()
    child.wait()
    good = interpreter.run(*request(operands(5, 5)))
    assert good.wait(60) and good.result()
    slow = interpreter.run(*request(operands(600, 600), block_m=16, block_n=16))
    interpreter._child.kill()
    assert slow.wait(20)
    with pytest.raises(EngineError, match="stopped before it was done"):
        slow.result()


def test_the_child_ends_when_its_time_is_up_and_when_nobody_is_there():
    interpreter = Interpreter()
    values, arrays = request(operands(600, 600), block_m=16, block_n=16)
    run = interpreter.run({**values, "limit_s": 1}, arrays)
    assert run.wait(30)
    with pytest.raises(EngineError, match="stopped before it was done"):
        run.result()
    child = interpreter._start()
    child.stdin.close()
    until(lambda: child.poll() is not None, 60)
    child = interpreter._child = interpreter._start()
    del interpreter
    until(lambda: child.poll() is not None, 60)


def test_a_frame_that_is_none_is_refused(tmp_path):
    path = tmp_path / "frame"
    with open(path, "wb") as file:
        write_frame(file, {"a": [1, None]}, {"x": np.arange(3)})
    with open(path, "rb") as file:
        values, arrays = read_frame(file)
        assert values == {"a": [1, None]} and arrays["x"].tolist() == [0, 1, 2] and read_frame(file) is None
    path.write_bytes((2**40).to_bytes(8, "little") + b"x")
    with open(path, "rb") as file, pytest.raises(ValueError, match="a frame of"):
        read_frame(file)
    path.write_bytes((100).to_bytes(8, "little") + b"x")
    with open(path, "rb") as file:
        assert read_frame(file) is None


def test_without_the_interpreter_the_child_refuses_to_begin():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "engine.interpreted"], env=env, capture_output=True, timeout=60, input=b"")
    assert done.returncode != 0 and b"before triton" in done.stderr


# ---- as the page asks ----


@pytest.fixture
def source(tiny_llama):
    session = make_session(tiny_llama)
    until(lambda: session.is_ready)
    yield LiveSource(session)
    session.close()


def test_the_page_gets_a_trace_of_the_next_step_and_of_one_that_is_past(source):
    session = source.session
    source.do_pause("main", {})
    session.add("one two three four five six", SamplingParams(max_tokens=6, ignore_eos=True))
    source.do_tiles("main", {"layer": 1, "head": 2})
    source.do_play("main", {})
    until(lambda: of_kind(source.trace("main"), TileTrace), 60)
    (live,) = of_kind(source.trace("main"), TileTrace)
    session.wait_idle()
    until(lambda: session.status().progress is None)
    source.do_tiles("main", {"step": live.step_id, "layer": 1, "head": 2, "block_n": 16, "block_m": 16})
    until(lambda: len(of_kind(source.trace("main"), TileTrace)) == 2, 60)
    again = of_kind(source.trace("main"), TileTrace)[1]
    assert (live.provenance, again.provenance, again.step_id, again.block_n) == ("measured", "recomputed", live.step_id, 16)
    check_row(again)
    trace = source.trace("main")
    back = decode(encode(trace))
    assert encode(back) == encode(trace) and len(of_kind(back, TileTrace)) == 2
    with pytest.raises(EngineError, match="is not in the record"):
        source.do_tiles("main", {"step": 10_000})
    with pytest.raises(EngineError, match="not known"):
        source.do_tiles("main", {"step": "1"})


def test_a_job_for_a_step_that_never_comes_is_cancelled_and_says_what_it_waits_for(source):
    source.do_tiles("main", {})
    until(lambda: source.status("main")["progress"] is not None)
    assert source.status("main")["progress"]["text"] == "Waiting for the next step"
    source.session.ask("cancel_job")
    until(lambda: source.status("main")["progress"] is None)


# ---- on a GPU ----


@pytest.mark.gpu
def test_on_a_gpu_the_step_itself_is_traced_with_sm_and_time(smollm2):
    core, _ = build_core(
        EngineConfig(ModelSource(str(smollm2.path), "cuda", "bfloat16"), CacheConfig(num_pages=512), SchedulerConfig(8, 1024))
    )
    it = Watched(core)
    it.add(700)
    it.add(200, 1)
    job, found = it.run(layer=3, head=5)
    assert not job.note, job.note
    traffic, live = found
    assert isinstance(traffic, TrafficRun) and traffic.flash_us > 0 and traffic.naive_us > traffic.flash_us / 2
    assert live.provenance == "measured" and live.launch_us == traffic.flash_us and live.dtype == "bfloat16"
    assert (live.tiles["sm"] >= 0).all() and (live.tiles["stop_ns"] > 0).all() and live.tiles["start_ns"].min() == 0
    tile = live.row_tiles[-1]
    np.testing.assert_allclose(live.acc[-1] / live.l[tile, lane_of(live, tile)], live.plain, rtol=0.02, atol=0.02)
    it.step(3)
    _, (_, decode) = it.run(layer=3, head=5, num_splits=4)
    assert decode.kernel == "flash_decode" and len(set(decode.tiles["split"][decode.row_tiles].tolist())) == 4
    _, (_, again) = it.run(steps=False, layer=3, head=5, past=past_step(it.trace, live.step_id))
    assert again.difference < 0.3 and again.sequences == live.sequences and again.tiles["k_stop"].tolist() == live.tiles["k_stop"].tolist()


@pytest.mark.gpu
def test_on_a_gpu_the_traced_launch_gives_what_the_untraced_one_gives():
    from engine.traced import launch

    for queries, kernel in ((300, "flash_prefill"), (1, "flash_decode")):
        it = operands(queries, 300, torch.bfloat16)
        it = replace(it, **{name: getattr(it, name).cuda() for name in ("q", "k_cache", "v_cache", "block_table")})
        blocks = plan(kernel, it)
        torch.testing.assert_close(trace(it, blocks, 0, queries - 1, 3)[0], launch(it, blocks), rtol=0.02, atol=0.02)
