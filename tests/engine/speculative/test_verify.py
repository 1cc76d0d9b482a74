"""The rows of a verification against the same written out on the host."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculative.tree import EMPTY
from engine.speculative.verify import verification
from tests.engine.speculative.trees import batch_of, trees

PAGE, WIDTH = 4, 12


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(trees(most=9), st.integers(0, 20)), min_size=1, max_size=4), st.integers(0, 3))
def test_rows_are_each_sequences_root_and_then_its_drafts(sequences, more):
    some, known = [t for t, _ in sequences], [n for _, n in sequences]
    room = max(map(len, some)) + more
    table = torch.from_numpy(np.random.default_rng(0).permutation(len(some) * WIDTH).reshape(len(some), WIDTH) + 1).int()
    roots = torch.arange(100, 100 + len(some))
    v = verification(batch_of(some, room), roots, torch.tensor(known).int(), table, PAGE)
    tokens, positions, slots, masks, counts = [], [], [], [], []
    for i, (tree, n) in enumerate(sequences):
        if n == 0:  # padding
            counts.append(0)
            continue
        counts.append(len(tree) + 1)
        tokens += [100 + i, *tree.tokens.tolist()]
        positions += [n - 1, *tree.positions(n - 1).tolist()]
        slots += [int(table[i, p // PAGE]) * PAGE + p % PAGE for p in range(n - 1, n + len(tree))]
        masks += [0, *tree.masks().tolist()]
    total = len(some) * (room + 1)
    for found, wanted in (
        (v.tokens, tokens),
        (v.positions, positions),
        (v.slots, slots),
        (v.tree.mask, masks),
        (v.tree.positions, positions),
    ):
        assert found.tolist() == wanted + [0] * (total - len(wanted))
    assert v.cu_seqlens.tolist() == np.cumsum([0, *counts]).tolist()
    assert v.seq_lens.tolist() == [n + len(t) if n else 0 for t, n in sequences]
    assert v.tree.lens.tolist() == [len(t) if n else 0 for t, n in sequences]
    for i, (tree, n) in enumerate(sequences):
        if n:
            assert v.by_row(v.tokens)[i].tolist() == [100 + i, *tree.tokens.tolist(), *[100 + i] * (room - len(tree))]


def test_a_batch_without_drafts_is_a_decode_step():
    v = verification(batch_of([EMPTY, EMPTY], 2), torch.tensor([7, 8]), torch.tensor([3, 5]).int(), torch.ones(2, 2).int(), PAGE)
    assert v.tokens.tolist() == [7, 8, 0, 0, 0, 0] and v.cu_seqlens.tolist() == [0, 1, 2] and v.tree.lens.tolist() == [0, 0]
