"""Growing trees: dynamic against EAGLE-2 written out, drawn drafts against the law, and the costs that are said beforehand."""

import numpy as np
import pytest
import torch

from engine.request import SamplingParams
from engine.speculative.accept import distribution_ref, reject
from engine.speculative.grow import StaticGrowth, dynamic_slots, grow_dynamic
from engine.speculative.rows import Draws
from engine.speculative.tree import ROOT, chain_topology, full_topology, static_tree

V = 8
CPU = torch.device("cpu")


def table(seed):
    """What a drafter says after a path, any path."""
    return lambda path: np.random.default_rng([seed, *[t + 1 for t in path]]).normal(0, 2, V).astype(np.float32)


class Recorder:
    """A Stepper that knows the path of every node by `above`, and checks that `bits` says the same."""

    def __init__(self, law):
        self.law, self.paths, self.ran = law, None, []

    def __call__(self, tokens, above, bits, depth, first):
        b, m = tokens.shape
        before = self.paths or [[()] for _ in range(b)]
        self.paths = [[(*before[i][above[i, j]], int(tokens[i, j])) for j in range(m)] for i in range(b)]
        self.ran = [*(self.ran or [[] for _ in range(b)])]
        for i in range(b):
            self.ran[i] += self.paths[i]
            for j, path in enumerate(self.paths[i]):
                assert len(path) == depth and len(self.ran[i]) - m == first
                seen = {self.ran[i][k] for k in range(64) if int(bits[i, j]) >> k & 1}
                assert seen == {path[:d] for d in range(1, depth + 1)}
        return torch.from_numpy(np.stack([[self.law(p) for p in paths] for paths in self.paths]))


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def eagle2(law, depth, width, budget):
    """{path: probability of its last token} of the tree, from the paper: expand the best, then rerank all."""
    confidence, frontier = {(): 1.0}, [()]
    own = {}
    for _ in range(depth):
        children = []
        for path in frontier:
            p = softmax(law(path))
            for t in np.argsort(-p, kind="stable")[:width]:
                child = (*path, int(t))
                own[child], confidence[child] = p[t], confidence[path] * p[t]
                children.append(child)
        frontier = sorted(children, key=lambda c: -confidence[c])[:width]
    return {p: own[p] for p in sorted(own, key=lambda c: -confidence[c])[:budget]}


@pytest.mark.parametrize(("depth", "width", "budget"), [(1, 3, 2), (3, 2, 5), (4, 3, 12), (5, 4, 60), (2, 8, 64)])
def test_a_dynamic_tree_is_eagle_2s(depth, width, budget):
    for seed in range(5):
        law = table(seed)
        recorder = Recorder(law)
        budget_here = min(budget, width + (depth - 1) * width * width)
        tree = grow_dynamic(torch.from_numpy(np.stack([law(())] * 2)), recorder, depth, width, budget_here).trees()[1]
        found = {tuple(tree.tokens[tree.path(i)].tolist()): tree.probabilities[i] for i in range(len(tree))}
        wanted = eagle2(law, depth, width, budget_here)
        assert found.keys() == wanted.keys() and found == pytest.approx(wanted, rel=1e-4)
        assert len(recorder.ran[0] if recorder.ran else []) == dynamic_slots(depth, width)


@pytest.mark.parametrize(
    "topology", [chain_topology(4), full_topology([3, 2, 2]), static_tree(np.array([[0.6, 0.2, 0.1], [0.5, 0.3, 0.1]]), 7)]
)
def test_a_static_tree_takes_each_rank_where_the_topology_says(topology):
    law = table(7)
    growth, recorder = StaticGrowth(topology, CPU), Recorder(law)
    tree = growth.grow(torch.from_numpy(np.stack([law(())] * 3)), recorder).trees()[2]
    assert tree.parents.tolist() == list(topology.parents)
    for i, (parent, rank) in enumerate(zip(topology.parents, topology.ranks, strict=True)):
        p = softmax(law(tuple(tree.tokens[tree.path(parent)].tolist()) if parent != ROOT else ()))
        assert tree.tokens[i] == np.argsort(-p, kind="stable")[rank]
        assert tree.probabilities[i] == pytest.approx(p[tree.tokens[i]], rel=1e-4)
    assert growth.slots == len(set(topology.parents) - {ROOT}) == len(recorder.ran[2])


def test_drafts_drawn_by_chance_and_rejected_give_the_targets_law():
    """From the drafter's logits to the token that comes out: the q that is handed on is the q that was drawn from."""
    trials, g = 60_000, torch.Generator().manual_seed(0)
    logits = torch.from_numpy(table(3)(()))
    draws = Draws(torch.full((trials,), 2.5), torch.full((trials,), 5), torch.full((trials,), 0.99), g)
    drafts = StaticGrowth(full_topology([2]), CPU).grow(logits.expand(trials, V), None, draws)
    assert (drafts.tokens[:, 0] != drafts.tokens[:, 1]).all()
    q = drafts.q[0, 0].double()
    assert q.max() < 0.7 and (q > 0.02).sum() >= 3  # there is something to draw
    assert np.bincount(drafts.tokens[:, 0], minlength=V) / trials == pytest.approx(q.numpy(), abs=0.01)
    p = torch.softmax(0.3 * logits.double() + 0.3 * torch.from_numpy(table(4)(())).double(), 0)
    rows = p.expand(trials, 3, V)
    out = reject(drafts, rows, torch.rand(trials, 2, 3, generator=g, dtype=torch.float64))
    first = np.bincount(out.tokens(drafts)[:, 0], minlength=V) / trials
    assert np.abs(first - p.numpy()).sum() / 2 < 0.01 and out.count.double().mean() > 0.2
    greedy = StaticGrowth(full_topology([2]), CPU).grow(
        logits.expand(9, V), None, Draws(torch.zeros(9), torch.zeros(9).long(), torch.ones(9), g)
    )
    assert (greedy.tokens[:, 0] == logits.argmax()).all() and (greedy.q[:, 0].max(1).values == 1).all()


def test_every_row_of_q_is_what_its_children_were_drawn_from():
    g, b = torch.Generator().manual_seed(1), 40
    law, topology = table(5), full_topology([2, 2, 1])
    draws = Draws(torch.full((b,), 1.7), torch.full((b,), 6), torch.full((b,), 0.98), g)
    drafts = StaticGrowth(topology, CPU).grow(torch.from_numpy(np.stack([law(())] * b)), Recorder(law), draws)
    params = SamplingParams(temperature=1.7, top_k=6, top_p=0.98)
    for i, tree in enumerate(drafts.trees()):
        for row in sorted(set(topology.parents)):
            path = tuple(tree.tokens[tree.path(row)].tolist()) if row != ROOT else ()
            wanted = distribution_ref(law(path), params)
            assert drafts.q[i, row + 1].numpy() == pytest.approx(wanted, abs=1e-5)
            for child in tree.children(row):
                assert tree.probabilities[child] == pytest.approx(wanted[tree.tokens[child]], abs=1e-5)
