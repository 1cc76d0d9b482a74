"""The engine on a GPU with Triton kernels. fp32 must write transformers' tokens; bf16 may differ only at near ties."""

from __future__ import annotations

import pytest
import torch

from engine.build import build_core
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.jobs import start_job
from engine.ladder import WAYS
from engine.messages import Prompt
from engine.request import SamplingParams
from engine.session import Session
from engine.trace import KernelReport
from engine.workloads import WORKLOADS

pytestmark = pytest.mark.gpu
TEXTS = [line.text for w in WORKLOADS.values() for line in w.lines][:12]
NEW = 48


def make(folder, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    config = EngineConfig(ModelSource(str(folder), "cuda", dtype), CacheConfig(num_pages=1024), SchedulerConfig(16, 128))
    core, loaded = build_core(config)
    assert core.runner.ops.backend == "triton"
    reports = [a for a in core.rooms["main"].recorder.drain().artifacts if isinstance(a, KernelReport)]
    assert [r.name for r in reports if not r.passed] == [], "every kernel must pass its start-up check"
    return core, loaded


def generate(core, prompts, **knobs):
    config = core.config
    for name, value in knobs.items():
        config = with_knob(config, name, value)
    core.reconfigure(config)
    order = [core.add("", ids, SamplingParams(max_tokens=NEW))[1][0] for ids in prompts]
    found = {i: [] for i in order}
    while core.has_work:
        record = core.step()
        if record is None:
            continue
        assert record.error is None, record.error
        accepted = dict(record.committed.accepted)
        for sampled in [s for s in record.result.sampled if s.seq_id in accepted]:
            found[sampled.seq_id].append(sampled)
    return [found[i] for i in order]


def hf(folder, dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to("cuda").eval()


@pytest.mark.parametrize("knobs", [{}, {"run_ahead": 1}, {"num_pages": 40}, {"mode": "none"}, {"mode": "contiguous"}], ids=str)
def test_fp32_tokens_equal_transformers(smollm2, knobs):
    core, loaded = make(smollm2.path, "float32")
    prompts = [loaded.tokenizer.encode(t)[:300] for t in TEXTS[: 4 if "mode" in knobs else 12]]
    model = hf(smollm2.path, torch.float32)
    expected = []
    for ids in prompts:
        batch = torch.tensor([ids], device="cuda")
        out = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(ids) :].tolist())
    assert [[s.token_id for s in row] for row in generate(core, prompts, **knobs)] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_flips_only_where_the_margin_is_within_twice_the_error(smollm2, dtype):
    core, loaded = make(smollm2.path, dtype)
    prompts = [loaded.tokenizer.chat([{"role": "user", "content": text}])[1] for text in TEXTS]
    rows = generate(core, prompts)
    model = hf(smollm2.path, torch.float32)
    flips, error, margins, count = 0, 0.0, [], 0
    for ids, row in zip(prompts, rows, strict=True):
        tokens = [s.token_id for s in row]
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *tokens]], device="cuda")).logits[0, len(ids) - 1 : -1].float()
        reference = logits.log_softmax(-1).cpu()
        for sampled, expected in zip(row, reference, strict=True):
            count += 1
            ours = torch.tensor(sampled.top_logprobs)
            error = max(error, (ours - expected[list(sampled.top_ids)]).abs().max().item())
            margin = (expected.max() - expected[sampled.token_id]).item()
            if margin > 0:
                flips += 1
                margins.append(margin)
    print(f"\n{dtype}: {flips} flips in {count} tokens, largest error {error:.4f}, largest margin {max(margins, default=0):.4f}")
    assert error < 1.0, "far beyond rounding"
    assert max(margins, default=0.0) <= 2 * error
    assert flips < 0.1 * count


def test_the_core_runs_in_its_own_process_by_default(smollm2):
    session = Session(EngineConfig(ModelSource(str(smollm2.path)), CacheConfig(num_pages=64))).start().wait_ready()
    try:
        handle = session.add("The capital of France is", SamplingParams(max_tokens=8))
        session.wait(handle.seq_ids)
        assert session._process is not None
        assert session.meta["backend"] == "triton" and session.meta["dtype"] == "bfloat16"
        assert "Paris" in session.trace().text_of(handle.seq_ids[0])
    finally:
        session.close()


def test_every_rung_of_the_ladder_runs_and_the_device_is_timed(smollm2):
    """In fp32, so that every rung must write transformers' tokens."""
    core, loaded = make(smollm2.path, "float32")
    prompts = tuple(Prompt(text, tuple(loaded.tokenizer.encode(text)), SamplingParams()) for text in TEXTS[:8])
    job, found = start_job(core, "ladder", {"prompts": prompts}), []
    while not job.advance():
        found += job.take_artifacts()
    it = [*found, *job.take_artifacts()][-1]
    job.close()
    assert [r.name for r in it.measured] == [way.name for way in WAYS], [(r.name, r.state, r.why, r.detail) for r in it.rungs]
    assert [r.num_differ for r in it.measured] == [0] * len(WAYS)
    assert all(r.busy is not None and 0 < r.busy <= 1 for r in it.measured)
    assert core.runner.ops.fused and core.rooms.keys() == {"main"}


def test_a_steps_gpu_time_is_between_its_launch_and_its_return(smollm2):
    core, loaded = make(smollm2.path, "bfloat16")
    generate(core, [loaded.tokenizer.encode(TEXTS[0])])
    steps = core.rooms["main"].recorder.drain().tables["steps"]
    one_after_the_other = steps["run_us"] + steps["settle_us"]
    assert (steps["gpu_us"] > 0).all() and (steps["gpu_us"] <= one_after_the_other + 50).all() and (steps["sample_us"] == 0).all()
