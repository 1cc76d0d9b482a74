"""The rules that accept drafts: numpy against the definition, the device against numpy, and the distribution of what comes out.

The distributions are measured with many drafts at once: one batch entry a trial, drafts drawn as the rule asks.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampler import draw
from engine.speculative import accept
from engine.speculative.accept import follow, follow_ref, reject, reject_ref, typical, typical_ref, uniforms
from engine.speculative.device import DraftBatch
from engine.speculative.tree import ROOT, DraftTree, full_topology
from tests.engine.speculative.trees import batch_of, trees

V = 8


def unpack(out):
    """AcceptedBatch → a list of Accepted."""
    return [
        accept.Accepted(tuple(p[:n]), bonus) for p, n, bonus in zip(out.path.tolist(), out.count.tolist(), out.bonus.tolist(), strict=True)
    ]


def small(tree):
    """The same shape over a vocabulary of 8, siblings still distinct."""
    kept: list[int] = []
    for i, parent in enumerate(tree.parents.tolist()):
        if tree.children(parent).index(i) < V and (parent == ROOT or parent in kept):
            kept.append(i)
    tree = tree.keep(kept)
    return DraftTree([tree.children(int(p)).index(i) for i, p in enumerate(tree.parents)], tree.parents, tree.probabilities)


def random_rows(rng, rows, sparse=False):
    p = rng.dirichlet(np.full(V, 0.4), rows)
    if sparse:
        p[rng.random((rows, V)) < 0.4] = 0
        p[:, 0] += 1e-3
    return p / p.sum(1, keepdims=True)


@settings(deadline=None)
@given(st.lists(trees(most=12).map(small), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_following_takes_the_longest_path_of_chosen_tokens(some, seed):
    rng = np.random.default_rng(seed)
    room = max(map(len, some)) + 2
    chosen = rng.integers(0, 3, (len(some), room + 1))
    got = unpack(follow(batch_of(some, room), torch.from_numpy(chosen)))
    for tree, row, found in zip(some, chosen, got, strict=True):
        fits = [i for i in range(len(tree)) if all(tree.tokens[j] == row[tree.parents[j] + 1] for j in tree.path(i))]
        longest = max(fits, key=lambda i: tree.depths[i], default=ROOT)
        assert found == follow_ref(tree, row) == accept.Accepted(tuple(tree.path(longest)), int(row[longest + 1]))


@settings(max_examples=150, deadline=None)
@given(st.lists(trees(most=10).map(small), min_size=1, max_size=3), st.integers(0, 2**32 - 1), st.booleans())
def test_rejection_on_the_device_is_rejection_in_numpy(some, seed, sparse):
    rng = np.random.default_rng(seed)
    room = max(map(len, some)) + 1
    p, q = (np.stack([random_rows(rng, room + 1, sparse) for _ in some]) for _ in "pq")
    batch = batch_of(some, room, torch.from_numpy(q))
    u = rng.random((len(some), batch.max_depth + 1, batch.max_width + 1))
    got = unpack(reject(batch, torch.from_numpy(p), torch.from_numpy(u)))
    assert got == [reject_ref(t, *rows) for t, *rows in zip(some, p, q, u, strict=True)]


@settings(max_examples=100, deadline=None)
@given(st.lists(trees(most=10).map(small), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_typical_acceptance_on_the_device_is_that_in_numpy(some, seed):
    rng = np.random.default_rng(seed)
    room = max(map(len, some)) + 1
    p = np.stack([random_rows(rng, room + 1) for _ in some])
    chosen = rng.integers(0, V, (len(some), room + 1))
    got = unpack(typical(batch_of(some, room), torch.from_numpy(p), torch.from_numpy(chosen)))
    assert got == [typical_ref(t, *rows) for t, *rows in zip(some, p, chosen, strict=True)]


def test_typical_acceptance_takes_what_is_likely_or_what_an_uncertain_row_allows():
    sure, flat = np.array([0.95, 0.04, 0.01, 0, 0, 0, 0, 0.0]), np.full(V, 1 / V)
    p = np.stack([sure, flat, sure])
    assert typical_ref(DraftTree([0, 3], [ROOT, 0], [1, 1]), p, np.array([0, 1, 2])).path == (0, 1)  # 1/8 > 0.3 · exp(-log 8)
    assert typical_ref(DraftTree([1], [ROOT], [1]), p, np.array([0, 1])) == accept.Accepted((), 0)
    assert accept.threshold_ref(sure, 0.09, 0.3) == 0.09 and accept.threshold_ref(flat, 0.09, 0.3) == pytest.approx(0.3 / 8)


def test_tokens_and_rows_of_an_outcome_are_laid_out_for_the_next_step():
    tree = DraftTree([4, 5, 6], [ROOT, ROOT, 1], [1, 1, 1])
    batch = batch_of([tree, tree])
    out = follow(batch, torch.tensor([[5, 0, 6, 7], [1, 2, 3, 0]]))
    assert out.tokens(batch).tolist() == [[5, 6, 7], [1, 0, 0]]
    assert out.rows().tolist() == [[0, 2, 3], [0, -1, -1]]


# ---- what comes out is distributed as the target says ----

PARAMS = SamplingParams(temperature=0.7, top_k=5, top_p=0.95)
DRAFT = SamplingParams(temperature=0.7, top_k=5)  # always five tokens to draw three from


def law(prefix, seed):
    """Logits [V] after a prefix: the target's with seed 1, the drafter's with seed 2."""
    return np.random.default_rng([seed, *[t + 1 for t in prefix]]).normal(0, 1.5, V)


def tables(shape):
    """p and q by prefix up to the shape's depth: {prefix: [V]}."""
    prefixes = [x for d in range(len(shape) + 1) for x in product(range(V), repeat=d)]
    made = [{x: accept.distribution_ref(law(x, s), params) for x in prefixes} for s, params in ((1, PARAMS), (2, DRAFT))]
    return made[0], made[1]


def drawn_trees(shape, q, trials, rng):
    """Tokens [trials, n] of a full tree whose children are drawn without replacement, and prefixes by row."""
    topology = full_topology(shape)
    tokens = np.zeros((trials, len(topology)), np.int64)
    for t in range(trials):
        prefix = {ROOT: ()}
        left = {}
        for i, parent in enumerate(topology.parents):
            rest = left.setdefault(parent, q[prefix[parent]].copy())
            tokens[t, i] = accept.draw_ref(rest, rng.random())
            rest[tokens[t, i]] = 0
            prefix[i] = (*prefix[parent], int(tokens[t, i]))
    return topology, tokens


def outcome_histogram(shape, trials, rule, seed=0):
    """How often each first token comes out, and the target's law of it."""
    rng = np.random.default_rng(seed)
    p, q = tables(shape)
    topology, tokens = drawn_trees(shape, q, trials, rng)
    parents = np.array(topology.parents)
    rows_p, rows_q = (np.zeros((trials, len(parents) + 1, V)) for _ in "pq")
    for t in range(trials):
        prefix = {ROOT: ()}
        for i, parent in enumerate(topology.parents):
            prefix[i] = (*prefix[parent], int(tokens[t, i]))
        for i, x in prefix.items():
            rows_p[t, i + 1], rows_q[t, i + 1] = p[x], q[x]
    batch = DraftBatch(
        torch.from_numpy(tokens), torch.from_numpy(np.tile(parents, (trials, 1))), torch.ones(trials, len(parents)),
        torch.full((trials,), len(parents)), topology.depth, topology.width, torch.from_numpy(rows_q),
    )  # fmt: skip
    u = torch.from_numpy(rng.random((trials, topology.depth + 1, topology.width + 1)))
    out = rule(batch, torch.from_numpy(rows_p), u)
    return p, out.tokens(batch).numpy(), out.count.numpy()


def chi_square(counts, law):
    """Pearson's statistic over what the law allows, in standard deviations above its mean; infinite if it forbids some."""
    if counts[law == 0].sum():
        return np.inf
    counts, wanted = counts[law > 0], law[law > 0] * counts.sum()
    degrees = len(wanted) - 1
    return (((counts - wanted) ** 2 / wanted).sum() - degrees) / np.sqrt(2 * degrees) if degrees else 0.0


def distances(shape, rule, trials=20_000):
    """(chi-square excess, total variation) of the first token, and of the second after the commonest first."""
    p, tokens, count = outcome_histogram(shape, trials, rule)
    first = np.bincount(tokens[:, 0], minlength=V)
    found = [(chi_square(first, p[()]), np.abs(first / trials - p[()]).sum() / 2)]
    head = int(first.argmax())
    after = tokens[(tokens[:, 0] == head) & (count >= 1), 1]  # a second token was settled in the same step
    second = np.bincount(after, minlength=V)
    found.append((chi_square(second, p[(head,)]), np.abs(second / max(1, len(after)) - p[(head,)]).sum() / 2))
    return found, count.mean()


def reject_without_residual(drafts, p, u):
    """The wrong rule: accept by p / q, and where nothing is accepted draw from p itself."""
    real = accept._residual
    accept._residual = lambda p, q, token, where: (p, real(p, q, token, where)[1])
    try:
        return reject(drafts, p, u)
    finally:
        accept._residual = real


def reject_with_stale_q(drafts, p, u):
    """The wrong rule: a second sibling is tested as if the first could have been drawn again."""
    real = accept._residual
    accept._residual = lambda p, q, token, where: (real(p, q, token, where)[0], q)
    try:
        return reject(drafts, p, u)
    finally:
        accept._residual = real


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (3, 2)])
def test_rejection_leaves_the_targets_distribution_as_it_is(shape):
    found, accepted = distances(shape, reject, 50_000)
    assert accepted > 0.3  # the drafts are of use, or the test would show nothing
    for chi, variation in found:
        assert chi < 4 and variation < 0.01


@pytest.mark.parametrize(
    ("shape", "wrong"),
    [
        ((1, 1), reject_without_residual),
        ((2, 1), reject_without_residual),
        ((3, 2), reject_without_residual),
        ((3, 2), reject_with_stale_q),
    ],
)
def test_a_wrong_rule_is_found_out_by_the_same_figures(shape, wrong):
    found, _ = distances(shape, wrong)
    assert max(chi for chi, _ in found) > 20


def test_the_unprocessed_q_of_a_processed_draw_is_found_out():
    """transformers#47932: drafts drawn with top-k and temperature, tested with the raw softmax."""

    def raw_q(drafts, p, u):
        raw = torch.softmax(torch.from_numpy(law((), 2)), 0)
        changed = drafts.q.clone()
        changed[:, 0] = raw
        return reject(DraftBatch(drafts.tokens, drafts.parents, drafts.probabilities, drafts.lens, 2, 1, changed), p, u)

    assert distances((1, 1), raw_q)[0][0][0] > 20


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(temperature=1.0), SamplingParams(temperature=0.3, top_k=2)])
def test_following_the_samplers_choices_gives_the_tokens_of_plain_sampling(params):
    """Drafts without chance: not only the distribution, each token is what plain decoding draws with the same uniform."""
    rng = np.random.default_rng(4)
    accepted = 0
    for _ in range(400):
        u = rng.random(3)
        plain: list[int] = []
        for d in range(3):
            plain.append(int(draw(torch.from_numpy(law(plain, 1)).float(), params, u[d])))
        top = np.argsort(-law((), 1))[:2]
        tokens, parents = [int(top[0]), int(top[1])], [ROOT, ROOT]
        for parent in (0, 1):
            tokens.append(int(law((tokens[parent],), 1).argmax()))
            parents.append(parent)
        tree = DraftTree(tokens, parents, np.ones(4))
        rows = [(), *[tuple(tree.tokens[tree.path(i)].tolist()) for i in range(4)]]
        chosen = np.array([int(draw(torch.from_numpy(law(x, 1)).float(), params, u[len(x)])) for x in rows])
        out = follow_ref(tree, chosen)
        got = [*tree.tokens[list(out.path)].tolist(), out.bonus]
        assert got == plain[: len(got)]
        accepted += len(out.path)
    assert accepted > 200


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(temperature=1.3), SamplingParams(temperature=0.5, top_p=0.6), SamplingParams()])
def test_the_distribution_is_the_one_that_the_sampler_draws_from(params):
    logits = np.random.default_rng(1).normal(0, 2, (6, V)).astype(np.float32)
    logits[2] = 0.5  # ties
    got = accept.distribution(
        torch.from_numpy(logits), torch.full((6,), params.temperature), torch.full((6,), params.top_k or 0), torch.full((6,), params.top_p)
    ).numpy()
    grid = (np.arange(4000) + 0.5) / 4000
    for row, law_ in zip(logits, got, strict=True):
        assert law_ == pytest.approx(accept.distribution_ref(row, params), abs=1e-7)  # the temperature is fp32 there
        drawn = [int(draw(torch.from_numpy(row), params, float(u))) for u in grid[::8]] if not params.greedy else [int(row.argmax())]
        assert np.abs(np.bincount(drawn, minlength=V) / len(drawn) - law_).max() < 0.005


def test_uniforms_depend_on_seed_sample_position_and_nothing_else():
    wide, narrow = uniforms(3, 0, 10, 4, 3), uniforms(3, 0, 12, 1, 1)
    assert wide.shape == (5, 4) and (narrow[:, 0] == wide[2:4, 0]).all() and (narrow[:, -1] == wide[2:4, -1]).all()
    assert len({*wide.ravel(), *uniforms(3, 1, 10, 4, 3).ravel(), *uniforms(4, 0, 10, 4, 3).ravel()}) == 60
