"""Moving an accepted path: every slot against a dictionary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.full import FullAttention, bytes_per_token
from engine.config import ModelConfig, RopeConfig
from engine.ops import torch_ops
from engine.speculative.compact import move_features, move_tokens, moves, slots_of
from engine.speculative.tree import ROOT
from tests.engine.speculative.trees import trees

CONFIG = ModelConfig("llama", 3, 8, 8, 2, 2, 4, 8, 128, 1e-5, RopeConfig(10_000.0, 4))
PAGE = 4


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(trees(most=12), st.integers(0, 9)), min_size=1, max_size=3),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_accepted_path_ends_where_plain_decoding_would_have_put_it(sequences, data, dtype):
    width = 6
    order = data.draw(st.permutations(range(1, 1 + width * len(sequences))))
    table = torch.tensor(order, dtype=torch.int32).view(len(sequences), width)
    arena = torch.zeros(1 + width * len(sequences), PAGE * bytes_per_token(CONFIG, dtype.itemsize), dtype=torch.uint8)
    attention = FullAttention(CONFIG, arena, PAGE, dtype, torch_ops())
    stamp = torch.arange(len(arena) * PAGE).view(len(arena), PAGE, 1, 1)  # every slot says its own number
    for layer in range(3):
        attention.k[layer].copy_(stamp + 0.25 * layer)
        attention.v[layer].copy_(stamp + 0.25 * layer + 0.125)
    before = [(attention.k[layer].clone(), attention.v[layer].clone()) for layer in range(3)]
    paths = []
    for tree, _ in sequences:
        node = data.draw(st.integers(ROOT, len(tree) - 1))
        paths.append(tree.path(node))
    depth = max(map(len, paths))
    path = torch.tensor([[*p, *[ROOT] * (depth - len(p))] for p in paths], dtype=torch.int64).view(len(paths), depth)
    source, destination = moves(path, torch.tensor([root for _, root in sequences]), table, PAGE)
    assert move_tokens(arena, CONFIG, PAGE, dtype, source, destination) is arena

    def slot(i, position):
        return int(table[i, position // PAGE]) * PAGE + position % PAGE

    wanted = {s: s for s in range(len(arena) * PAGE)}  # slot → whose contents
    for i, (p, (_, root)) in enumerate(zip(paths, sequences, strict=True)):
        wanted.update({slot(i, root + d): slot(i, root + 1 + node) for d, node in enumerate(p, start=1)})
    index = torch.tensor([wanted[s] for s in range(len(wanted))])
    for layer, (k, v) in enumerate(before):
        for now, was in ((attention.k[layer], k), (attention.v[layer], v)):
            assert torch.equal(now.reshape(-1, 8), was.reshape(-1, 8)[index])


def test_a_path_that_reads_what_it_writes_is_read_first():
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    source, destination = moves(torch.tensor([[1, 3, 4]]), torch.tensor([2]), table, PAGE)
    assert source.tolist() == [[8, 10, 11]] and destination.tolist() == [[7, 8, 9]]  # 8 is both
    features = torch.arange(12.0).view(3, PAGE, 1)
    assert move_features(features, source, destination).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 10, 11, 10, 11]


def test_a_chain_moves_nothing_and_positions_outside_the_table_are_the_sink():
    table = torch.tensor([[5, 6]], dtype=torch.int32)
    source, destination = moves(torch.tensor([[0, 1, ROOT]]), torch.tensor([3]), table, PAGE)
    assert not source.any() and not destination.any()
    assert slots_of(table, torch.tensor([[-1, 0, 7, 8, 99]]), PAGE).tolist() == [[0, 20, 27, 0, 0]]


def test_the_test_above_would_see_a_copy_that_overwrites_its_own_source():
    features = np.arange(12.0)
    for source, destination in reversed([(8, 7), (10, 8), (11, 9)]):  # one after the other, deepest first
        features[destination] = features[source]
    assert features.tolist() != pytest.approx([0, 1, 2, 3, 4, 5, 6, 8, 10, 11, 10, 11])
