"""Draft trees in numpy against a brute force, and the same trees on the device against numpy."""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.speculative import device
from engine.speculative.tree import (
    EMPTY,
    MAX_NODES,
    ROOT,
    DraftTree,
    Topology,
    chain,
    chain_topology,
    expected_length,
    full_topology,
    rerank,
    static_tree,
)
from kernels.attention import MAX_DRAFTS, random_tree
from tests.engine.speculative.trees import batch_of, trees


def ancestors(tree, node):
    """Straight from the definition."""
    found = set()
    while node != ROOT:
        found.add(node)
        node = int(tree.parents[node])
    return found


@settings(deadline=None)
@given(trees(most=MAX_NODES))
def test_masks_depths_and_paths_are_those_of_the_definition(tree):
    for i, (mask, depth, position) in enumerate(zip(tree.masks(), tree.depths, tree.positions(7), strict=True)):
        seen = ancestors(tree, i)
        assert {j for j in range(64) if int(mask) >> j & 1} == seen
        assert depth == len(seen) and position == 7 + len(seen)
        assert tree.path(i) == sorted(seen)
        assert tree.confidences[i] == np.prod([tree.probabilities[j] for j in seen])
    assert sorted(i for node in range(ROOT, len(tree)) for i in tree.children(node)) == list(range(len(tree)))


@settings(deadline=None)
@given(trees(), st.integers(0, 22), st.integers(0, 6))
def test_a_cut_tree_keeps_parents_and_what_is_most_confident(tree, budget, depth):
    cut = tree.cut(budget, depth)
    reachable = [i for i in range(len(tree)) if tree.depths[i] <= depth]
    assert len(cut) == min(budget, len(reachable))
    assert (cut.depths <= depth).all()
    best = sorted((tree.confidences[i] for i in reachable), reverse=True)[:budget]
    assert sorted(cut.confidences, reverse=True) == pytest.approx(best)


def test_a_cut_is_the_best_subtree_that_there_is():
    rng = np.random.default_rng(0)
    for _ in range(20):
        parents = np.array([rng.integers(ROOT, i) if i else ROOT for i in range(8)])
        tree = DraftTree(np.arange(8), parents, rng.random(8))
        for budget in range(9):
            subtrees = [c for c in combinations(range(8), budget) if all(parents[i] == ROOT or parents[i] in c for i in c)]
            best = max(sum(tree.confidences[list(c)]) for c in subtrees)
            assert tree.cut(budget).confidences.sum() == pytest.approx(best)


@settings(deadline=None)
@given(st.lists(trees(), min_size=1, max_size=4))
def test_the_device_says_of_a_batch_what_numpy_says_of_each_tree(some):
    batch, n = batch_of(some), max(map(len, some))
    assert batch.trees() == some
    for i, tree in enumerate(some):
        assert batch.masks()[i, : len(tree)].tolist() == tree.masks().tolist()
        assert batch.depths()[i, : len(tree)].tolist() == tree.depths.tolist()
        assert batch.valid[i].tolist() == [j < len(tree) for j in range(n)]
        for budget in range(1, len(tree) + 1):
            one = torch.from_numpy(tree.confidences)[None]
            nodes = device.rerank(one, budget)
            assert nodes[0].tolist() == rerank(tree.confidences, budget).tolist()
            assert device.keep(torch.from_numpy(np.array(tree.parents))[None], nodes)[0].tolist() == tree.cut(budget).parents.tolist()
    assert batch.limit(torch.full((len(some),), 3)).trees() == [t.keep(range(min(3, len(t)))) for t in some]


def test_the_bits_of_the_64th_node_survive_the_sign():
    long = chain(range(64))
    assert long.masks()[63] == -1 and long.masks()[62] == 2**63 - 1
    batch = device.chains(torch.arange(64)[None], torch.ones(1, 64), torch.tensor([64]))
    assert batch.masks()[0].tolist() == long.masks().tolist()


def test_masks_are_those_that_the_attention_kernels_take():
    """kernels/attention.py makes its random trees by its own rule; from its bits the parents, from the parents our bits."""
    assert MAX_DRAFTS == MAX_NODES
    kernel = random_tree([(65, 100)], [64], 0, torch.Generator().manual_seed(3), "cpu")
    bits = [int(m) & (2**64 - 1) for m in kernel.mask[1:].tolist()]
    parents = [max((j for j in range(i) if b >> j & 1), default=ROOT) for i, b in enumerate(bits)]
    tree = DraftTree(np.arange(64), np.array(parents), np.ones(64))
    assert tree.masks().tolist() == kernel.mask[1:].tolist()
    assert tree.positions(100 - 65).tolist() == kernel.positions[1:].tolist()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_merged_chains_hold_every_beginning_once(data):
    w, d = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    tokens = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=d, max_size=d), min_size=w, max_size=w))
    lens = data.draw(st.lists(st.integers(0, d), min_size=w, max_size=w))
    tree = device.merge_chains(torch.tensor(tokens)[None], torch.tensor(lens)[None]).trees()[0]
    found = [tuple(tree.tokens[tree.path(i)].tolist()) for i in range(len(tree))]
    wanted = {tuple(t[:n]) for t, length in zip(tokens, lens, strict=True) for n in range(1, length + 1)}
    assert len(found) == len(set(found)) and set(found) == wanted
    assert sorted(tree.depths) == tree.depths.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_static_tree_is_the_best_one_by_brute_force(data):
    heads, k, budget = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(0, 5))
    accuracies = np.array(data.draw(st.lists(st.lists(st.integers(0, 20), min_size=k, max_size=k), min_size=heads, max_size=heads))) / 60
    tree = static_tree(accuracies, budget)
    paths = [p for d in range(1, heads + 1) for p in product(range(k), repeat=d)]
    values = sorted((float(np.prod([accuracies[i, r] for i, r in enumerate(p)])) for p in paths), reverse=True)[:budget]
    assert len(tree) == len([v for v in values if v > 0])
    assert expected_length(tree, accuracies) == pytest.approx(sum(values))
    assert list(tree.depths) == sorted(tree.depths)


def test_shapes_that_are_asked_for_by_name():
    assert chain_topology(3) == Topology((-1, 0, 1), (0, 0, 0))
    assert full_topology([2, 2]) == Topology((-1, -1, 0, 0, 1, 1), (0, 1, 0, 1, 0, 1))
    assert full_topology([2, 2]).depths == (1, 1, 2, 2, 2, 2) and full_topology([4, 4]).width == 4


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: chain(range(65)), "65 nodes"),
        (lambda: DraftTree([1, 2], [-1, 1], [1, 1]), "does not come before"),
        (lambda: DraftTree([1, 2], [1, -1], [1, 1]), "does not come before"),
        (lambda: DraftTree([1, 2], [-2, 0], [1, 1]), "does not come before"),
        (lambda: DraftTree([5, 5], [-1, -1], [1, 1]), "same token"),
        (lambda: DraftTree([5, 6], [-1, -1], [1, 1.5]), "outside 0 to 1"),
        (lambda: DraftTree([5, 6], [-1, -1], [1, float("nan")]), "outside 0 to 1"),
        (lambda: DraftTree([5, 6], [-1], [1, 1]), "differ in length"),
        (lambda: chain([1, 2, 3]).keep([0, 2]), "without its parent"),
        (lambda: Topology((-1, -1), (0, 0)), "same guess"),
        (lambda: chain_topology(4).require(3), "4 deep and the drafter has 3 heads"),
        (lambda: static_tree(np.ones((2, 2)) / 2, 65), "65 nodes"),
    ],
)
def test_a_tree_that_cannot_be_verified_is_refused_with_a_sentence(make, says):
    with pytest.raises(EngineError, match=says) as refused:
        make()
    assert refused.value.code == "bad_draft_tree"


def test_siblings_of_different_parents_may_be_equal_and_values_are_frozen():
    tree = DraftTree([5, 6, 7, 7], [-1, -1, 0, 1], np.ones(4))
    with pytest.raises(ValueError, match="read-only"):
        tree.tokens[0] = 1
    assert len(EMPTY) == 0 and EMPTY.masks().shape == (0,) and EMPTY.cut(0) is EMPTY
