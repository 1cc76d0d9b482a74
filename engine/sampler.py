"""From logits to tokens. A token is a function of (its logits row, its parameters, its uniform) only.

Each sampled sequence brings one uniform in [0, 1) that depends on (seed, sample index, position), so a
neighbour, another row, another batch size or a preemption cannot change what it draws. Greedy rows take the
lowest id among equal logits. Drawing is by inverse CDF over the kept probabilities: in id order when nothing
is cut off, else in descending order of probability (stable, so ties keep id order).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from engine.request import SamplingParams
from engine.steady import Members, SteadyPlan


def uniform(seed: int, sample: int, position: int) -> float:
    """The random number of one position: Philox 4×64 with key (seed, sample) and counter (position)."""
    bits = np.random.Philox(key=np.array([seed, sample], np.uint64), counter=np.array([position, 0, 0, 0], np.uint64))
    return float(np.random.Generator(bits).random())


def uniforms(seeds: np.ndarray, samples: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uniform() of many at once: uint64 arrays that broadcast → float64."""
    seeds, samples, positions = np.broadcast_arrays(seeds, samples, positions)
    key = [seeds.astype(np.uint64), samples.astype(np.uint64)]
    counter = [positions.astype(np.uint64) + np.uint64(1), *(np.zeros(seeds.shape, np.uint64) for _ in range(3))]
    for _ in range(10):
        (high0, low0), (high1, low1) = _multiply(counter[0], _PHILOX_M[0]), _multiply(counter[2], _PHILOX_M[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [part + bump for part, bump in zip(key, _PHILOX_W, strict=True)]
    return (counter[0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


_PHILOX_M = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_PHILOX_W = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))


def _multiply(a: np.ndarray, b: int) -> tuple[np.ndarray, np.ndarray]:
    """(high, low) 64 bits of uint64 products."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    b_high, b_low = np.uint64(b >> 32), np.uint64(b & 0xFFFFFFFF)
    a_high, a_low = a >> half, a & mask
    low, middle = a_low * b_low, a_high * b_low
    middle += low >> half
    other = (middle & mask) + a_low * b_high
    return a_high * b_high + (middle >> half) + (other >> half), a * np.uint64(b)


@dataclass(frozen=True)
class SampleRows:
    """What to draw: one entry a sampled sequence, in the order of the batch's logits rows.

    Args:
        seq_ids, row_slots: who gets the token, and where `last_token` keeps it (0: nowhere yet).
        params, uniforms: per entry; a greedy one's number is not read.
    """

    seq_ids: tuple[int, ...]
    row_slots: np.ndarray
    params: tuple[SamplingParams, ...]
    uniforms: tuple[float, ...]

    @cached_property
    def all_greedy(self) -> bool:
        return all(p.greedy for p in self.params)


class SteadyRows:
    """SampleRows of a cohort's steps: what does not change is made once, random numbers for BLOCK steps at a time."""

    BLOCK = 32

    def __init__(self, members: Members) -> None:
        self.members = members
        params = tuple(seq.request.sampling for seq in members.seqs)
        self._rows = SampleRows(members.ids, members.rows, params, (0.0,) * len(params))
        self._block, self._first = np.zeros((0, len(params))), 0

    def at(self, plan: SteadyPlan) -> SampleRows:
        """What its step draws."""
        if self._rows.all_greedy:
            return self._rows
        if not 0 <= plan.ahead - self._first < len(self._block):
            self._first, self._block = plan.ahead, self._draw(plan.ahead)
        return replace(self._rows, uniforms=tuple(self._block[plan.ahead - self._first].tolist()))

    def _draw(self, ahead: int) -> np.ndarray:
        """float64 [BLOCK, n]; 0 for the greedy."""
        seqs = self.members.seqs
        warm = np.array([not p.greedy for p in self._rows.params])
        seeds = np.array([seq.request.sampling.seed or 0 for seq in seqs], np.uint64)
        samples = np.array([seq.sample for seq in seqs], np.uint64)
        positions = self.members.starts + 1 + ahead + np.arange(self.BLOCK)[:, None]
        return np.where(warm, uniforms(seeds, samples, positions), 0.0)


def sample(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """int64 [s] tokens from fp32 logits [s, vocab]."""
    tokens = logits.argmax(dim=-1)
    if rows.all_greedy:
        return tokens
    for i, (params, u) in enumerate(zip(rows.params, rows.uniforms, strict=True)):
        if not params.greedy:
            tokens[i] = draw(logits[i], params, u)
    return tokens


def draw(logits: torch.Tensor, params: SamplingParams, u: float) -> torch.Tensor:
    """One token from one row [vocab]: temperature, then top-k, then top-p, then the inverse CDF at u."""
    scaled = (logits.double() - logits.max()) / params.temperature  # the largest is 0: no temperature overflows
    ids = None
    if params.top_k is not None or params.top_p < 1:
        keep = min(params.top_k or len(scaled), len(scaled))
        ids = torch.sort(scaled, descending=True, stable=True).indices[:keep]
        scaled = scaled[ids]
    probabilities = torch.softmax(scaled, dim=-1)
    if params.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # mass of everything more probable
        probabilities = torch.where(before < params.top_p, probabilities, 0.0)
    cdf = probabilities.cumsum(-1)
    at = torch.searchsorted(cdf, cdf.new_tensor([u]) * cdf[-1], right=True)[0]
    last = probabilities.nonzero()[-1, 0]  # rounding may put u past the end
    at = torch.minimum(at, last)
    return at if ids is None else ids[at]


def describe(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the raw logits: (chosen [s], top ids [s, width], top log-probabilities [s, width])."""
    norm = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None]) - norm
    if width == 0:
        empty = logits.new_zeros((len(logits), 0))
        return chosen[:, 0], empty.long(), empty
    values, ids = logits.topk(min(width, logits.shape[-1]), dim=-1)
    return chosen[:, 0], ids, values - norm
