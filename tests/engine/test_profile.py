"""A profiled step: every operation once, with its work by formula, and nothing else changed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import engine.profile
from engine.artifacts import StepProfile, of_kind
from engine.audience import LiveSource
from engine.build import build_core
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.jobs import start_job
from engine.probe import NO_PROBE
from engine.profile import attributed, weights_of
from engine.request import SamplingParams
from tests.engine.test_session import make_session, until

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


@pytest.fixture
def core(tiny_llama):
    return build_core(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=64), SchedulerConfig(4, 64)))[0]


def add(core, length: int, salt: int = 0, **sampling: object) -> tuple[int, ...]:
    ids = tuple(np.random.default_rng(salt).integers(1, 250, length).tolist())
    return core.add("", ids, SamplingParams(**{"max_tokens": 8, "ignore_eos": True} | sampling))[1]


def profiled(core) -> StepProfile:
    job = start_job(core, "profile", {})
    while not job.advance():
        record = core.step("main", job.probe_for("main") or NO_PROBE)
        if record is not None:
            job.saw(record)
    job.close()
    assert not job.note, job.note
    (found,) = job.take_artifacts()
    return found


LAYER = ["rms_norm", "qkv", "rope", "kv_write", "attention", "o", "rms_norm", "gate_up", "silu_mul", "down"]


def test_every_operation_of_the_step_is_there_once_in_order_with_its_layer(core):
    add(core, 20)
    add(core, 7, 1)
    it = profiled(core)
    assert [op.name for op in it.ops] == ["embedding", *LAYER, *LAYER, "rms_norm", "lm_head", "sample"]
    assert [op.layer for op in it.ops] == [0] * 11 + [1] * 10 + [2] * 3
    assert (it.prefill_tokens, it.decode_tokens, it.num_seqs, it.dtype) == (27, 0, 2, "float32")
    assert [op.rows for op in it.ops[:-2]] == [27] * 22 and [op.rows for op in it.ops[-2:]] == [2, 2]


def test_a_mixed_step_says_what_was_prompt_and_what_was_not(core):
    add(core, 20)
    core.step()
    core.step()
    add(core, 9, 1)
    it = profiled(core)
    assert (it.prefill_tokens, it.decode_tokens, it.num_seqs) == (9, 1, 2)


def test_work_is_counted_by_formula(core):
    add(core, 20)
    add(core, 7, 1)
    it = profiled(core)
    config, m = core.runner.model.config, 27
    hidden, inner, dim, heads, kv = config.hidden_size, config.intermediate_size, config.head_dim, config.num_heads, config.num_kv_heads
    by_name = {op.name: op for op in it.ops}
    for name, n, k, rows in (
        ("qkv", (heads + 2 * kv) * dim, hidden, m), ("o", hidden, heads * dim, m), ("gate_up", 2 * inner, hidden, m), ("down", hidden, inner, m),
        ("lm_head", config.vocab_size, hidden, 2),
    ):  # fmt: skip
        assert by_name[name].flops == 2 * rows * n * k and by_name[name].bytes == 4 * (rows * k + n * k + rows * n), name
    pairs = 20 * 21 // 2 + 7 * 8 // 2
    assert by_name["attention"].flops == 4 * pairs * heads * dim
    assert by_name["attention"].bytes >= 4 * 2 * m * (heads + kv) * dim
    assert by_name["silu_mul"].bytes == 4 * 3 * m * inner and by_name["rms_norm"].flops == 4 * m * hidden


def test_times_follow_one_another_within_the_step(core):
    add(core, 40)
    began = time.perf_counter()
    it = profiled(core)
    spent = (time.perf_counter() - began) * 1e6
    ends = [op.start_us + op.device_us for op in it.ops]
    assert it.ops[0].start_us == 0 and all(a <= b.start_us for a, b in zip(ends, it.ops[1:]))
    assert all(op.device_us > 0 and op.device_us == op.host_us for op in it.ops)
    assert ends[-1] <= it.wall_us <= spent


def test_a_profiled_step_gives_the_same_tokens_and_leaves_the_runner_as_it_was(core):
    parts = core.runner.model, core.runner.attention, core.runner.ops, core.runner.attention.ops
    texts = []
    for looks in (False, True):
        (seq_id,) = add(core, 20, temperature=0.8, seed=3)
        probed = None
        core.step()
        if looks:
            probed = profiled(core).step_id
        while core.has_work:
            core.step()
        tables = core.rooms["main"].recorder.drain().tables
        tokens = tables["tokens"][tables["tokens"]["seq_id"] == seq_id]
        texts.append(tokens["token_id"].tolist())
        assert tables["steps"]["step_id"][tables["steps"]["probed"] == 1].tolist() == ([] if probed is None else [probed])
        core.forget("main")
    assert texts[0] == texts[1] and len(texts[0]) == 8
    now = core.runner.model, core.runner.attention, core.runner.ops, core.runner.attention.ops
    assert all(a is b for a, b in zip(now, parts, strict=True))


def test_fused_kernels_appear_by_the_name_of_the_operation_that_was_called(core):
    runner = core.runner
    runner.ops = replace(runner.ops, fused=True)
    runner.attention.ops = runner.ops
    add(core, 20)
    core.step()
    decode = profiled(core)
    fused = ["decode_qkv", "attention", "decode_linear", "decode_gate_up", "decode_linear"]
    assert [op.name for op in decode.ops] == ["embedding", *fused, *fused, "rms_norm", "lm_head", "sample"]
    hidden, inner = runner.model.config.hidden_size, runner.model.config.intermediate_size
    assert 0 <= decode.ops[4].flops - 2 * 2 * inner * hidden < 2000 and [op.layer for op in decode.ops[1:11]] == [0] * 5 + [1] * 5


def test_a_step_that_samples_nothing_is_profiled_too(core):
    core.reconfigure(with_knob(core.config, "max_num_batched_tokens", 16))
    add(core, 40)
    it = profiled(core)
    assert it.ops[-1].name == "rms_norm" and it.prefill_tokens == 16 and it.wall_us >= it.ops[-1].start_us


def test_a_formula_that_fails_does_not_end_the_step(core, monkeypatch):
    def broken(inputs):
        raise ValueError("no formula")

    spec = engine.profile.load_specs()["silu_mul"]
    monkeypatch.setattr(engine.profile, "load_specs", lambda: {"silu_mul": replace(spec, flops=broken)})
    add(core, 10)
    it = profiled(core)
    assert [(op.flops, op.bytes, op.rows) for op in it.ops if op.name == "silu_mul"] == [(0, 0, 0)] * 2


def test_a_step_that_fails_ends_the_job_with_a_note(core, monkeypatch):
    add(core, 10)
    monkeypatch.setattr(core.runner.model, "logits", lambda hidden: 1 / 0)
    job = start_job(core, "profile", {})
    while not job.advance():
        job.saw(core.step("main", job.probe_for("main") or NO_PROBE))
    assert "failed" in job.note and not job.take_artifacts()


def test_weights_are_known_by_field_and_layer(core):
    model = core.runner.model
    names = weights_of(model)
    assert names[id(model.layers[1].qkv)] == ("qkv", 1) and names[id(model.embedding)] == ("embedding", 0)
    assert names[id(model.norm)] == ("norm", 2) and names[id(model.layers[0].post_norm)] == ("post_norm", 0)


# ---- what CUPTI says ----


@dataclass(frozen=True)
class Event:
    what: str
    where: object
    start: int
    length: int
    correlation: int = 0

    def name(self) -> str:
        return self.what

    def device_type(self) -> object:
        return self.where

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.length

    def correlation_id(self) -> int:
        return self.correlation


EVENTS = [
    Event("cudaLaunchKernel", CPU, 900, 5, 1), Event("warm up", CUDA, 950, 10, 1),
    Event("glass:0", CPU, 1000, 100), Event("aten::linear", CPU, 1001, 90, 2), Event("cudaLaunchKernel", CPU, 1010, 5, 2),
    Event("cuLaunchKernelEx", CPU, 1050, 5, 3), Event("gemm", CUDA, 3000, 400, 2), Event("bias", CUDA, 3400, 100, 3),
    Event("glass:1", CPU, 1200, 50), Event("cuLaunchKernel", CPU, 1210, 5, 4), Event("norm", CUDA, 3600, 200, 4),
    Event("cudaLaunchKernel", CPU, 1180, 5, 5), Event("between", CUDA, 3500, 100, 5), Event("glass:1", CUDA, 3600, 200),
]  # fmt: skip


def test_kernels_belong_to_the_range_in_which_the_host_launched_them():
    assert attributed(EVENTS, 2) == [(2.0, 0.5), (2.6, 0.2)]
    assert attributed(EVENTS[::-1], 2) == [(2.0, 0.5), (2.6, 0.2)]


def test_a_session_that_lost_a_kernel_or_a_mark_is_not_believed():
    assert attributed([e for e in EVENTS if e.what != "norm"], 2) is None
    assert attributed([e for e in EVENTS if e.what != "glass:0"], 2) is None
    assert attributed(EVENTS, 3) is None and attributed([], 0) == []


# ---- as the page asks ----


def test_the_page_gets_a_profile_of_the_next_step_and_the_ceilings(tiny_llama):
    session = make_session(tiny_llama)
    until(lambda: session.is_ready)
    source = LiveSource(session)
    source.do_pause("main", {})
    session.add("one two three", SamplingParams(max_tokens=4))
    source.do_profile("main", {})
    source.do_step("main", {})
    until(lambda: of_kind(source.trace("main"), StepProfile))
    until(lambda: session.status().progress is None)
    (found,) = of_kind(source.trace("main"), StepProfile)
    assert found.step_id == source.trace("main").last_step and len(found.ops) == 24
    session.close()


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("decode", [False, True])
def test_on_a_gpu_every_operation_has_its_kernels_time(smollm2, decode):
    core, _ = build_core(
        EngineConfig(ModelSource(str(smollm2.path), "cuda", "bfloat16"), CacheConfig(num_pages=512), SchedulerConfig(8, 1024))
    )
    add(core, 500, max_tokens=30)
    if decode:
        for _ in range(4):
            core.step()
    for _ in range(2):  # the first step of a kind may compile
        it = profiled(core)
        add(core, 500, it.step_id, max_tokens=30)
    assert all(op.device_us > 0 and op.host_us > 0 and op.start_us >= 0 for op in it.ops)
    assert max(op.start_us + op.device_us for op in it.ops) <= it.wall_us * 1.5
    names = {op.name for op in it.ops}
    assert {"embedding", "lm_head", "sample"} <= names and names & {"flash_prefill", "flash_decode"}
    assert sum(op.flops for op in it.ops if op.name == "lm_head") == 2 * it.ops[-1].rows * 576 * 49152
