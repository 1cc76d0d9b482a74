"""Ranges: each stage and operation of a step by its name, balanced, and gone without a trace."""

from __future__ import annotations

import pytest
import torch

from engine.build import build_core
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from engine.errors import EngineError
from engine.generate import config_from, parser
from engine.ranges import nvtx_sink, watch
from engine.request import SamplingParams


class FakeNvtx:
    """Ranges as a tree: (name, [children])."""

    def __init__(self) -> None:
        self.top: list = []
        self.open: list = [("", self.top)]

    def range_push(self, name: str) -> None:
        node = (name, [])
        self.open[-1][1].append(node)
        self.open.append(node)

    def range_pop(self) -> None:
        assert len(self.open) > 1, "a range was closed twice"
        self.open.pop()

    @property
    def steps(self) -> list:
        assert len(self.open) == 1, "a range was left open"
        return [children for name, children in self.top if name == "step"]


@pytest.fixture
def nvtx(monkeypatch) -> FakeNvtx:
    made = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", made)
    return made


@pytest.fixture
def core(tiny_llama):
    return build_core(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=64), SchedulerConfig(4, 64)))[0]


def add(core) -> None:
    core.add("", tuple(range(5, 15)), SamplingParams(max_tokens=3, ignore_eos=True))


def names(children: list) -> list[str]:
    return [name for name, _ in children]


def test_each_stage_and_each_layers_operations_have_ranges_by_the_pages_names(core, nvtx):
    add(core)
    watch(core, nvtx_sink())
    core.step()
    (stages,) = nvtx.steps
    assert names(stages) == ["schedule", "build", "launch", "sync", "commit"]
    operations = names(stages[2][1])
    assert operations[:3] == ["layer 0: embedding", "layer 0: rms_norm", "layer 0: qkv"] and "layer 1: attention" in operations
    assert operations[-2:] == ["layer 2: lm_head", "layer 2: sample"] and len(operations) == 24


def test_tokens_are_the_same_with_ranges_and_steps_go_on_after_they_are_off(core, nvtx):
    texts = []
    for on in (False, True, False):
        ranges = watch(core, nvtx_sink()) if on else None
        add(core)
        tokens = []
        while core.has_work:
            record = core.step()
            tokens += [token for _, token in record.committed.accepted] if record else []
        texts.append(tokens)
        if ranges:
            ranges.undo()
        core.forget("main")
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 3 and len(nvtx.steps) == 3
    assert (
        not {"run", "_parts"} & set(vars(core.runner)) and "schedule" not in vars(core.rooms["main"].scheduler) and "step" not in vars(core)
    )


def test_a_room_that_opens_later_has_them_too(core, nvtx):
    watch(core, nvtx_sink())
    core.open_room("later")
    core.add("", tuple(range(5, 15)), SamplingParams(max_tokens=1), room="later")
    core.step()
    assert names(nvtx.steps[0])[0] == "schedule"


def test_a_step_that_fails_leaves_no_range_open(core, nvtx, monkeypatch):
    watch(core, nvtx_sink())
    monkeypatch.setattr(core.runner.model, "logits", lambda hidden: 1 / 0)
    add(core)
    assert core.step().error is not None
    assert names(nvtx.steps[0])[:3] == ["schedule", "build", "launch"]


def test_where_torch_has_no_nvtx_it_says_so_at_the_start(monkeypatch):
    def missing(name: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    with pytest.raises(EngineError, match="NVTX"):
        nvtx_sink()


def test_an_engine_that_is_asked_for_them_has_them_and_others_have_none(tiny_llama, nvtx, core):
    config = EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=64), SchedulerConfig(4, 64), nvtx=True)
    named = build_core(config)[0]
    for each in (named, core):
        add(each)
        each.step()
    assert len(nvtx.steps) == 1 and "run" not in vars(core.runner)


def test_the_command_lines_have_the_switch():
    assert config_from(parser().parse_args(["--prompt", "x", "--nvtx"])).nvtx and not config_from(parser().parse_args([])).nvtx
