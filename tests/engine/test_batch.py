"""build_host against a token-by-token construction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import build_host, to_device
from engine.plan import StepPlan, Work
from tests.engine.audit import Watch, make_lazy_core
from tests.engine.lives import random_life
from tests.factories import add, prompt_of, run


def naive(plan, sequences, pool) -> dict[str, list]:
    """What each array must be, one token at a time."""
    out: dict[str, list] = {name: [] for name in ("token_ids", "from_row", "rows", "positions", "slot_mapping", "seq_lens", "logits_rows")}
    out["cu_seqlens"] = [0]
    for work in plan.works:
        seq, table = sequences[work.seq_id], pool.table(work.seq_id)
        for position in range(work.start, work.start + work.num_tokens):
            known = position < len(seq.tokens)
            out["token_ids"].append(seq.tokens[position] if known else 0)
            out["from_row"].append(not known)
            out["positions"].append(position)
            out["slot_mapping"].append(table[position // pool.page_size] * pool.page_size + position % pool.page_size)
        out["rows"].append(work.row)
        out["cu_seqlens"].append(len(out["token_ids"]))
        out["seq_lens"].append(work.start + work.num_tokens)
        out["logits_rows"] += [len(out["token_ids"]) - 1] * len(work.sample_seq_ids)
    return out


def check(plan, sequences, pool) -> int:
    host, want = build_host(plan, sequences, pool), naive(plan, sequences, pool)
    for name, values in want.items():
        np.testing.assert_array_equal(getattr(host, name), values, err_msg=name)
    widest = max((len(pool.table(w.seq_id)) for w in plan.works), default=0)
    assert host.block_table.shape == (len(plan.works), widest)
    for row, work in zip(host.block_table, plan.works, strict=True):
        table = pool.table(work.seq_id)
        assert row[: len(table)].tolist() == table and not row[len(table) :].any()
    assert host.copies.tolist() == [list(copy) for copy in plan.copies]
    assert host.num_tokens == plan.num_tokens
    assert host.max_query_len == max((w.num_tokens for w in plan.works), default=0)
    types = {"token_ids": "i8", "from_row": "?", "rows": "i8", "positions": "i8", "slot_mapping": "i8", "cu_seqlens": "i4"}
    types |= {"seq_lens": "i4", "block_table": "i4", "logits_rows": "i8", "copies": "i8"}
    assert all(getattr(host, name).dtype == np.dtype(kind) for name, kind in types.items())
    return int(host.from_row.sum())


@pytest.mark.parametrize("seed", range(8))
def test_every_step_of_a_random_life(seed, monkeypatch):
    import engine.core

    inner, flown = engine.core.build_host, []

    def checked(plan, sequences, pool):
        flown.append(check(plan, sequences, pool))
        return inner(plan, sequences, pool)

    monkeypatch.setattr(engine.core, "build_host", checked)
    life = random_life(seed, 40, run_ahead=seed % 2, mode="paged")
    assert len(flown) == len(life.watch.plans)


def test_a_token_in_flight_comes_from_its_row_slot_not_from_its_place():
    core = make_lazy_core(pages=32, run_ahead=1)
    Watch(core)
    for length in (3, 4, 5):
        add(core, length, 6)
    core.step()
    core.abort(1)
    scheduler = core.rooms["main"].scheduler
    plan = scheduler.schedule()
    assert [w.row for w in plan.works] == [2, 3]  # batch places 0 and 1
    host = build_host(plan, scheduler.sequences, scheduler.pool)
    assert host.from_row.tolist() == [True, True] and host.token_ids.tolist() == [0, 0]
    last_token = torch.tensor([90, 91, 92, 93])
    batch = to_device(host, torch.device("cpu"), last_token)
    assert batch.token_ids.tolist() == [92, 93]
    assert host.token_ids.tolist() == [0, 0]


def test_run_ahead_writes_what_the_synchronous_run_writes():
    texts = []
    for run_ahead in (0, 1):
        core = make_lazy_core(pages=64, run_ahead=run_ahead, max_num_batched_tokens=9)
        watch = Watch(core)
        for length in (3, 14, 1, 7):
            add(core, length, 9)
        run(core)
        texts.append(watch.made)
    assert texts[0] == texts[1]


def test_an_empty_plan_gives_empty_arrays():
    plan = StepPlan(0, "main", (), (), (), (), 16, 4)
    check(plan, {}, make_lazy_core().rooms["main"].scheduler.pool)


def test_several_samples_of_one_prompt_want_the_same_row():
    core = make_lazy_core(pages=32)
    scheduler = core.rooms["main"].scheduler
    add(core, prompt_of(6, 1), 4, n=3, temperature=1.0, seed=1)
    add(core, prompt_of(2, 2), 4)
    plan = scheduler.schedule()
    host = build_host(plan, scheduler.sequences, scheduler.pool)
    assert host.logits_rows.tolist() == [5, 5, 5, 7]
    assert isinstance(plan.works[0], Work) and plan.works[0].sample_seq_ids == (1, 2, 3)
