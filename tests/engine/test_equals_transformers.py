"""Greedy tokens of the default model equal transformers' generate, in every way the engine can run them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.build import build_core
from engine.config import CacheConfig, CacheMode, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.request import SamplingParams
from engine.session import Session
from engine.workloads import ARTICLE, WORKLOADS

LENGTHS = (5, 8, 13, 16, 17, 31, 32, 33, 47, 64, 96, 100, 128, 160, 200, 250, 300, 350, 430, 500)
NEW = 16


@pytest.fixture(scope="module")
def engine(smollm2):
    """(core, loaded), built once; tests change its knobs."""
    config = EngineConfig(ModelSource(str(smollm2.path), "cpu", "float32"), CacheConfig(num_pages=320), SchedulerConfig(20, 512))
    return build_core(config)


@pytest.fixture(scope="module")
def prompts(engine):
    """Twenty prompts of 5 to 500 tokens; some share a beginning, so that prefixes can be hit."""
    _, loaded = engine
    stories = " ".join(line.text for w in WORKLOADS.values() for line in w.lines)
    pools = [loaded.tokenizer.encode(text) for text in (ARTICLE, stories)]
    return [pools[i % 2][: LENGTHS[i]] if i % 3 else pools[i % 2][i : i + LENGTHS[i]] for i in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def expected(engine, prompts, smollm2):
    """What transformers writes, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()
    found = []
    for ids in prompts:
        batch = torch.tensor([ids])
        out = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(out[0, len(ids) :].tolist())
    assert len({tuple(f) for f in found}) > 12, "the prompts must lead to different texts"
    return found


def run(core, prompts, together=True):
    """Token ids of each prompt, and how often somebody was preempted."""
    tokens, preemptions, hits = {}, 0, 0
    order = []
    for group in [prompts] if together else [[p] for p in prompts]:
        order += [core.add("", ids, SamplingParams(max_tokens=NEW))[1][0] for ids in group]
        while core.has_work:
            record = core.step()
            if record is None:
                continue
            assert record.error is None, record.error
            preemptions += len(record.plan.preempted)
            hits += sum(w.num_cached for w in record.plan.works if not w.resumed)
            for seq_id, token in record.committed.accepted:
                tokens.setdefault(seq_id, []).append(token)
            core.rooms["main"].scheduler.check_integrity()
    return [tokens[i] for i in order], preemptions, hits


KNOBS = {
    "num_pages": 320,
    "max_num_seqs": 20,
    "max_num_batched_tokens": 512,
    "prefix_caching": False,
    "chunked_prefill": True,
    "run_ahead": 0,
    "steps_per_launch": 1,
}


@pytest.mark.parametrize(
    "name, knobs, together",
    [
        ("alone", {}, False),
        ("together", {}, True),
        ("small chunks", {"max_num_batched_tokens": 48}, True),
        ("no chunks", {"chunked_prefill": False}, True),
        ("prefix caching", {"prefix_caching": True}, True),
        ("prefix caching, alone, twice over", {"prefix_caching": True}, False),
        ("preemption", {"num_pages": 40, "prefix_caching": False, "max_num_batched_tokens": 100}, True),
        ("preemption and prefix caching", {"num_pages": 40, "prefix_caching": True, "max_num_batched_tokens": 100}, True),
        ("run-ahead", {"run_ahead": 1, "prefix_caching": True}, True),
        ("several steps a launch", {"run_ahead": 1, "steps_per_launch": 8}, True),
        ("small pages", {"page_size": 4, "num_pages": 1280}, True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tokens_equal_transformers(engine, prompts, expected, name, knobs, together):
    core, _ = engine
    config = core.config
    for knob, value in {**KNOBS, "page_size": 16, **knobs}.items():
        config = with_knob(config, knob, value)
    core.reconfigure(config)
    got, preemptions, hits = run(core, prompts, together)
    assert got == expected
    assert ("preemption" in name) == (preemptions > 0), "the case must really preempt"
    if name.startswith("prefix"):
        assert run(core, prompts, together)[0] == expected
        assert hits > 0, "the case must really hit the cache"


@pytest.mark.parametrize("mode", [CacheMode.CONTIGUOUS, CacheMode.NONE])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_baseline_modes_write_the_same(engine, prompts, expected, mode, batching):
    core, _ = engine
    config = core.config
    for knob, value in {**KNOBS, "page_size": 16, "mode": mode, "batching": batching, "max_num_seqs": 4}.items():
        config = with_knob(config, knob, value)
    core.reconfigure(config)
    some = list(range(0, 12, 2))
    got, _, _ = run(core, [prompts[i] for i in some])
    assert got == [expected[i] for i in some]
    core.reconfigure(replace(core.config, cache=replace(core.config.cache, mode=CacheMode.PAGED)))


def test_the_core_in_its_own_process_writes_the_same(smollm2, prompts, expected):
    config = EngineConfig(ModelSource(str(smollm2.path), "cpu", "float32"), CacheConfig(num_pages=320), SchedulerConfig(20, 512))
    session = Session(config, own_process=True).start().wait_ready()
    try:
        handles = [session.add_ids("", ids, SamplingParams(max_tokens=NEW)) for ids in prompts]
        session.wait([h.seq_ids[0] for h in handles], 300)
        trace = session.trace()
        assert [trace.tokens_of(h.seq_ids[0])["token_id"].tolist() for h in handles] == expected
    finally:
        session.close()
