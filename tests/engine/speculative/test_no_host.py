"""Drafting, accepting and moving ask the host nothing, so that a CUDA graph can hold them: they run on fake tensors.

A fake tensor has a shape and no values: reading one (item, tolist, a boolean index) raises. The kernels that draw the
line themselves (attention, K/V writes) are replaced by ones that only have shapes.
"""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from engine.attention.full import FullAttention, bytes_per_token
from engine.speculative import device
from engine.speculative.accept import distribution, follow, reject, typical
from engine.speculative.base import DraftOptions, Shape, make_state
from engine.speculative.compact import move_tokens, moves
from engine.speculative.registry import build_drafter
from engine.speculative.rows import Draws, newest_rows
from engine.speculative.verify import verification
from tests.engine.speculative.heads_of import random_head
from tests.engine.speculative.reference import ROOM, small_target

B, PAGE = 3, 4


def silent(target):
    """The same target with operations that have shapes only."""
    ops = replace(
        target.ops, kv_write=lambda *a, **k: None, flash_prefill=lambda q, *a, **k: torch.empty_like(q),
        flash_decode=lambda q, *a, **k: torch.empty_like(q), rope=lambda q, k, *a: None,
    )  # fmt: skip
    return replace(target, ops=ops)


def fake_rows(per=2):
    lens, table = torch.zeros(B, dtype=torch.int32), torch.zeros(B, 8, dtype=torch.int32)
    return newest_rows(torch.zeros(B, 32, dtype=torch.int64), lens, table, per, PAGE)


OPTIONS = [
    DraftOptions("ngram", depth=4, width=3, budget=8), DraftOptions("medusa", depth=3, budget=9),
    DraftOptions("eagle", shape=Shape.DYNAMIC, depth=4, width=3, budget=12), DraftOptions("mtp", depth=2, budget=2),
    DraftOptions("draft_model", shape=Shape.STATIC, depth=3, width=2, budget=6), DraftOptions("draft_model", depth=3, budget=3, drawn=True),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"{o.drafter}{'-drawn' if o.drawn else ''}")
def test_a_whole_step_runs_without_a_value(options, tmp_path):
    target = silent(small_target())
    if options.drafter in ("medusa", "eagle", "mtp"):
        options = replace(options, source=random_head(target, options.drafter, tmp_path))
    drafter = build_drafter(target, options, ROOM)
    arena = torch.zeros(9, PAGE * bytes_per_token(target.config, 4), dtype=torch.uint8)
    attention = FullAttention(target.config, arena, PAGE, torch.float32, target.ops)
    state = make_state(drafter, target, 9, PAGE, attention)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        rows = fake_rows()
        each = [torch.ones(B), torch.zeros(B, dtype=torch.int64), torch.ones(B)]
        drafts = drafter.propose(rows, state, Draws(*each) if options.drawn else None)
        n = drafts.tokens.shape[1]
        assert drafts.tokens.shape == (B, drafter.nodes) and drafts.masks().shape == drafts.depths().shape == (B, n)
        drafts = drafts.limit(torch.full((B,), 3))
        v = verification(drafts, rows.tokens[rows.last], rows.seq_lens, rows.block_table, PAGE)
        assert v.by_row(v.positions).shape == (B, n + 1) and v.tree.mask.shape == v.slots.shape == (B * (n + 1),)
        vocab = target.config.vocab_size
        p = distribution(torch.zeros(B * (n + 1), vocab), *(x.repeat_interleave(n + 1) for x in each)).view(B, n + 1, vocab)
        outs = [follow(drafts, torch.zeros(B, n + 1, dtype=torch.int64)), typical(drafts, p, torch.zeros(B, n + 1, dtype=torch.int64))]
        if options.drawn:
            outs.append(reject(drafts, p, torch.zeros(B, drafts.max_depth + 1, drafts.max_width + 1, dtype=torch.float64)))
        for out in outs:
            assert out.tokens(drafts).shape == (B, drafts.max_depth + 1)
            source, destination = moves(out.path, torch.zeros(B, dtype=torch.int64), rows.block_table, PAGE)
            move_tokens(torch.zeros_like(arena), target.config, PAGE, torch.float32, source, destination)
            if drafter.feature_width:
                values = torch.zeros(B, n + 1, drafter.feature_width)
                fake = replace(state, features=torch.zeros(9, PAGE, drafter.feature_width))
                fake.keep_accepted(out.rows(), values, torch.zeros(B, dtype=torch.int64), rows.block_table)


def test_a_question_to_the_host_would_be_seen():
    with FakeTensorMode():
        batch = device.chains(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            bool(batch.lens.sum() > 0)
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            batch.tokens[batch.valid]
