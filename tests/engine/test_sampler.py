"""S6 at its root: a token is a function of (logits row, parameters, uniform); and the distribution is the asked one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.request import SamplingParams
from engine.sampler import SampleRows, describe, draw, sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5])


def rows(*entries: tuple[SamplingParams, float]) -> SampleRows:
    params, uniforms = zip(*entries, strict=True)
    return SampleRows(tuple(range(len(params))), np.arange(len(params)), params, uniforms)


def wanted(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution, written down directly in float64."""
    x = logits.double().numpy() / params.temperature
    p = np.exp(x - x.max())
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    keep = order[: params.top_k or len(p)]
    p /= p[keep].sum()
    mass, nucleus = 0.0, []
    for i in keep:
        nucleus.append(i)
        mass += p[i]
        if mass >= params.top_p:
            break
    out = np.zeros(len(p))
    out[nucleus] = p[nucleus] / p[nucleus].sum()
    return out


SETTINGS = [
    {"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 3.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_k": 100}, {"temperature": 1.0, "top_p": 0.6}, {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "top_p": 0.95}, {"temperature": 1.3, "top_k": 4, "top_p": 0.7},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_follow_the_asked_distribution(settings):
    """Chi-square over 4,000 positions of one seed: the uniforms are the engine's own."""
    params = SamplingParams(seed=7, **settings)
    expected = wanted(LOGITS, params)
    n = 4000
    counts = np.bincount([int(draw(LOGITS, params, uniform(7, 0, position))) for position in range(n)], minlength=len(LOGITS))
    assert not counts[expected == 0].any(), "a token that was cut off was drawn"
    seen = expected > 0
    chi2 = float(((counts[seen] - n * expected[seen]) ** 2 / (n * expected[seen])).sum())
    freedom = int(seen.sum()) - 1
    assert chi2 <= freedom + 4 * np.sqrt(2 * freedom) + 1e-9, (counts, n * expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_whole_unit_interval_maps_onto_the_distribution(settings):
    """On an even grid of uniforms the shares are exact to the grid: no statistics."""
    params = SamplingParams(**settings)
    n = 2000
    counts = np.bincount([int(draw(LOGITS, params, (i + 0.5) / n)) for i in range(n)], minlength=len(LOGITS))
    assert np.abs(counts / n - wanted(LOGITS, params)).max() <= 1.5 / n


def test_the_ends_of_the_interval_stay_inside_what_is_kept():
    for settings in SETTINGS:
        params = SamplingParams(**settings)
        for u in (0.0, 1 - 2**-53, 5e-324):
            assert wanted(LOGITS, params)[int(draw(LOGITS, params, u))] > 0


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.zeros(3, 1000)
    logits[1, [17, 400, 999]] = 5.0
    logits[2] = -torch.inf
    logits[2, 3:] = 1e-30
    greedy = SamplingParams()
    assert sample(logits, rows((greedy, 0.0), (greedy, 0.9), (greedy, 0.5))).tolist() == [0, 17, 3]


def test_top_k_ties_keep_the_lowest_ids():
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 3.0])
    drawn = {int(draw(logits, SamplingParams(temperature=1.0, top_k=2), u)) for u in np.linspace(0, 0.999, 50)}
    assert drawn == {1, 2}


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_even():
    for u in (0.0, 0.3, 0.999):
        assert int(draw(LOGITS, SamplingParams(temperature=5e-324), u)) == 0
        assert int(draw(LOGITS * 1e30, SamplingParams(temperature=1e-300, top_k=3, top_p=0.5), u)) == 0
        assert int(draw(LOGITS, SamplingParams(temperature=1e308), u)) == int(u * len(LOGITS))


def test_forbidden_tokens_are_never_drawn():
    logits = LOGITS.clone()
    logits[[0, 3, 7]] = -torch.inf
    for cut in ({}, {"top_k": 8}, {"top_p": 0.9999}):
        params = SamplingParams(temperature=1.0, **cut)
        assert not {int(draw(logits, params, u)) for u in np.linspace(0, 1 - 1e-12, 300)} & {0, 3, 7}


def test_a_row_does_not_know_its_neighbours():
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    mine = (SamplingParams(temperature=0.8, top_k=9, top_p=0.8), 0.37)
    others = [(SamplingParams(), 0.0), (SamplingParams(temperature=3.0), 0.9), (SamplingParams(temperature=0.1, top_k=2), 0.5)]
    alone = int(sample(logits[2:3], rows(mine))[0])
    for place in range(4):
        batch = [*others[:place], mine, *others[place:]]
        picked = torch.stack([logits[(i * 5) % 6] for i in range(4)])
        picked[place] = logits[2]
        assert int(sample(picked, rows(*batch))[place]) == alone


def test_the_uniform_is_a_function_of_seed_sample_and_position():
    values = {(s, i, p): uniform(s, i, p) for s in (0, 1, 2**63 - 1) for i in range(3) for p in (0, 1, 2, 5000)}
    assert len(set(values.values())) == len(values)
    assert all(0 <= v < 1 for v in values.values())
    assert all(uniform(*key) == v for key, v in reversed(values.items()))
    assert uniform(42, 0, 7) == 0.4074136540795371, "recorded runs can no longer be repeated"


def test_uniforms_are_even_along_positions_and_across_seeds():
    for key in (lambda i: (3, 0, i), lambda i: (i, 0, 5), lambda i: (3, i, 5)):
        values = [uniform(*key(i)) for i in range(4000)]
        counts = np.histogram(values, 20, (0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 19 + 4 * np.sqrt(38)
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06


def test_log_probabilities_are_of_the_raw_logits():
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    chosen, ids, values = describe(logits, torch.tensor([3, 0]), 3)
    want = torch.log_softmax(logits, -1)
    assert torch.allclose(chosen, want[[0, 1], [3, 0]])
    assert ids[0, :2].tolist() == [0, 7] and torch.allclose(values, want.gather(1, ids))
    chosen, ids, values = describe(logits, torch.tensor([3, 0]), 0)
    assert ids.shape == values.shape == (2, 0) and len(chosen) == 2
    assert describe(logits, torch.tensor([3, 0]), 20)[1].shape == (2, 8)
