"""Decode steps through the fixed buffers of a graph: what is replayed equals what runs eagerly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.batch import HostBatch
from engine.build import build_core
from engine.config import CacheConfig, EngineConfig, ModelSource, RunnerConfig, SchedulerConfig
from engine.core import EngineCore
from engine.graphs import SIZES, DecodeGraphs, Inbox, Tables, again, decode_host, layout
from engine.request import SamplingParams
from engine.sampler import SampleRows

PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 17, 40, 9, 26)]
GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


def make(folder: Path, graphs: bool, **scheduler: int) -> EngineCore:
    config = EngineConfig(
        ModelSource(str(folder), "cpu", "float32"), CacheConfig(num_pages=40), SchedulerConfig(**{"max_num_seqs": 5, **scheduler}),
        RunnerConfig(graphs),
    )  # fmt: skip
    core, _ = build_core(config)
    core.runner.record_graph = again
    core.runner.ops = replace(core.runner.ops, is_captured=True)
    while core.capture_next():
        pass
    return core


def outputs(core: EngineCore, sampling: SamplingParams = GREEDY) -> tuple[dict[int, list[int]], list[int]]:
    """(tokens by sequence, graph size of every step)."""
    found, sizes = {}, []
    for ids in PROMPTS:
        core.add("", ids, sampling)
    while core.has_work:
        record = core.step()
        if record is None:
            continue
        sizes.append(record.result.graph_size)
        for seq_id, token in record.committed.accepted:
            found.setdefault(seq_id, []).append(token)
    return found, sizes


@pytest.mark.parametrize("scheduler", [{}, {"run_ahead": 1}, {"max_num_batched_tokens": 16}], ids=str)
def test_tokens_are_the_same_with_graphs_and_without(tiny_llama: Path, scheduler: dict) -> None:
    eager, none = outputs(make(tiny_llama, False, **scheduler))
    graphs, sizes = outputs(make(tiny_llama, True, **scheduler))
    assert graphs == eager and set(none) == {0}
    assert {8, 0} <= set(sizes)  # five decodes take the graph of eight; prompts run eagerly


def test_pages_that_were_taken_away_and_given_to_others_are_followed(tiny_llama: Path) -> None:
    def small(graphs: bool) -> EngineCore:
        core = make(tiny_llama, graphs)
        core.reconfigure(replace(core.config, cache=replace(core.config.cache, num_pages=12)))
        while core.capture_next():
            pass
        return core

    eager, _ = outputs(small(False))
    core = small(True)
    graphs, sizes = outputs(core)
    assert graphs == eager and max(sizes) > 0
    assert any(len(r.plan.preempted) for r in core.rooms["main"].recorder._records)


@pytest.mark.parametrize("more", [{}, {"top_k": 7}, {"top_p": 0.6}], ids=str)
def test_a_graph_draws_the_tokens_that_an_eager_step_draws(tiny_llama: Path, more: dict) -> None:
    warm = replace(GREEDY, temperature=0.8, seed=7, **more)
    (graphs, sizes), (eager, _) = outputs(make(tiny_llama, True), warm), outputs(make(tiny_llama, False), warm)
    assert graphs == eager and max(sizes) > 0


def test_another_arena_or_other_results_void_the_graphs(tiny_llama: Path) -> None:
    core = make(tiny_llama, True)
    before = core.runner.graphs
    assert before.sizes and not before.missing
    core.config = core.runner.config = replace(core.config, tracing=False)
    assert core.runner.graphs is not before and not core.runner.graphs.sizes
    core.runner.configure(replace(core.config, cache=replace(core.config.cache, page_size=8)))
    assert core.runner.graphs.tables.width == 2 * before.tables.width


def test_a_batch_larger_than_the_largest_graph_or_with_a_prompt_has_none() -> None:
    graphs = DecodeGraphs(lambda batch, box: torch.zeros(len(batch.token_ids), 1), torch.device("cpu"), 64, 4, 8, again)
    while graphs.capture_next():
        pass
    assert graphs.sizes == SIZES[:4]
    assert [graphs.size_for(decode_host(n)) for n in (1, 3, 8, 9)] == [1, 4, 8, None]
    prompt = replace(decode_host(2), token_ids=np.zeros(5, np.int64))
    assert graphs.size_for(prompt) is None
    assert graphs.size_for(replace(decode_host(2), rows=np.array([1, 64]))) is None


def test_a_capture_that_fails_says_why_and_is_not_tried_again() -> None:
    def forward(batch, box):
        if len(batch.token_ids) > 2:
            raise RuntimeError("out of memory")
        return torch.zeros(len(batch.token_ids), 1)

    graphs = DecodeGraphs(forward, torch.device("cpu"), 64, 4, 64, again)
    captured = []
    while size := graphs.capture_next():
        captured.append(size)
    assert captured == [1, 2] and "out of memory" in graphs.failed and not graphs.missing
    assert graphs.size_for(decode_host(2)) == 2 and graphs.size_for(decode_host(3)) is None


def test_what_the_graph_reads_is_what_the_step_says_and_padding_is_neutral() -> None:
    seen = {}

    def forward(batch, box):
        seen.update({name: value.clone() for name, value in box.items()}, table=batch.block_table.clone())
        return torch.arange(len(batch.token_ids), dtype=torch.float64)[:, None]

    graphs = DecodeGraphs(forward, torch.device("cpu"), 64, 4, 8, again)
    while graphs.capture_next():
        pass
    table = np.array([[3, 9, 0], [4, 0, 0], [5, 6, 7]], np.int32)
    host = HostBatch(
        np.array([11, 0, 13]), np.array([False, True, False]), np.array([2, 9, 5]), np.array([20, 3, 33]), np.array([148, 67, 113]),
        np.arange(4, dtype=np.int32), np.array([21, 4, 34], np.int32), table, np.arange(3), np.zeros((0, 2), np.int64),
    )  # fmt: skip
    rows = SampleRows((1, 2, 3), host.rows, (GREEDY, replace(GREEDY, temperature=0.5, top_k=7, top_p=0.9), GREEDY), (0.0, 0.25, 0.0))
    for _ in range(2):  # the second time nothing has changed
        assert graphs.run(4, host, rows).tolist() == [[0], [1], [2]]
        assert seen["token_ids"].tolist() == [11, 0, 13, 0] and seen["from_row"].tolist() == [0, 1, 0, 0]
        assert seen["slot_mapping"].tolist() == [148, 67, 113, -1] and seen["seq_lens"].tolist() == [21, 4, 34, 0]
        assert seen["rows"].tolist() == [2, 9, 5, 0] and seen["table"][:3, :3].tolist() == table.tolist()
        assert seen["temperature"].tolist() == [0, 0.5, 0, 0] and seen["top_k"].tolist() == [0, 7, 0, 0]
        assert seen["uniform"].tolist() == [0, 0.25, 0, 0] and seen["top_p"].tolist() == pytest.approx([1, 0.9, 1, 1])
    assert seen["change_at"].tolist() == [0] * 8


def test_the_inbox_keeps_every_array_aligned_and_apart() -> None:
    for size in (1, 3, 256):
        fields, length = layout(size, 2 * size)
        assert all(f.at % f.dtype.itemsize == 0 for f in fields)
        ends = [f.at + f.n * f.dtype.itemsize for f in fields]
        assert ends[-1] == length and all(end == after.at for end, after in zip(ends, fields[1:]))
    box = Inbox(2, 4, torch.device("cpu"))
    box.next()["uniform"][:] = (0.5, 0.25)
    box.send()
    box.next()["uniform"][:] = 9  # of the step after: not sent
    assert box.device["uniform"].tolist() == [0.5, 0.25]


def test_rows_that_stop_sampling_are_greedy_again() -> None:
    seen = []

    def forward(batch, box):
        seen.append(box["temperature"].tolist())
        return torch.zeros(len(batch.token_ids), 1)

    graphs = DecodeGraphs(forward, torch.device("cpu"), 64, 4, 8, again)
    graphs.capture_next()
    host, warm = decode_host(1), replace(GREEDY, temperature=0.5)
    for params in (*[warm] * 4, *[GREEDY] * 7, warm):
        graphs.run(1, host, SampleRows((1,), host.rows, (params,), (0.0,)))
    assert seen[1:] == [[0.5]] * 4 + [[0.0]] * 7 + [[0.5]]


def test_a_step_that_breaks_makes_the_next_one_send_its_whole_table() -> None:
    seen, broken = [], []

    def forward(batch, box):
        if broken:
            raise RuntimeError(broken.pop())
        seen.append(batch.block_table[0, :2].tolist())
        return torch.zeros(len(batch.token_ids), 1)

    graphs = DecodeGraphs(forward, torch.device("cpu"), 64, 4, 8, again)
    graphs.capture_next()
    host = replace(decode_host(1), rows=np.array([5]), block_table=np.array([[7, 8]], np.int32))
    rows = SampleRows((1,), host.rows, (GREEDY,), (0.0,))
    graphs.run(1, host, rows)
    graphs.tables.device.zero_()  # as if nothing had arrived
    broken.append("lost")
    with pytest.raises(RuntimeError):
        graphs.run(1, host, rows)
    graphs.tables.device.zero_()
    graphs.run(1, host, rows)
    assert seen[-1] == [7, 8]


def test_a_table_sends_what_changed_and_nothing_twice() -> None:
    tables = Tables(8, 4, torch.device("cpu"))
    at, to = tables.changes(np.array([3, 1]), np.array([[5, 6], [7, 0]], np.int32))
    assert sorted(zip(at.tolist(), to.tolist())) == [(4, 7), (12, 5), (13, 6)]
    tables.write(at, to)
    assert tables.device[3].tolist() == [5, 6, 0, 0] and tables.device[1].tolist() == [7, 0, 0, 0]
    assert len(tables.changes(np.array([1, 3]), np.array([[7, 0], [5, 6]], np.int32))[0]) == 0
    assert tables.changes(np.array([3]), np.array([[5, 2, 8]], np.int32))[1].tolist() == [2, 8]


def test_rooms_that_run_ahead_share_the_graphs_and_not_each_others_results(tiny_llama: Path) -> None:
    """More steps are in flight than one room could have: nobody waits for the others' results."""

    def tokens(graphs: bool) -> dict[str, list[int]]:
        core = make(tiny_llama, graphs, run_ahead=1)
        names = [f"room {i}" for i in range(6)]
        for i, name in enumerate(names):
            core.open_room(name, replace(core.config, cache=replace(core.config.cache, num_pages=8)))
            core.add("", tuple(range(5 + i, 20 + i)), GREEDY, room=name)
        while core.capture_next():
            pass
        found: dict[str, list[int]] = {name: [] for name in names}
        while core.has_work:
            record = core.step()
            if record is not None:
                assert record.error is None
                found[record.plan.room] += [token for _, token in record.committed.accepted]
        return found

    assert tokens(True) == tokens(False)
