"""From logits to tokens. A token is a function of (its logits row, its parameters, its uniform) only.

Each sampled sequence brings one uniform in [0, 1) that depends on (seed, sample index, position), so a
neighbour, another row, another batch size or a preemption cannot change what it draws. Greedy rows take the
lowest id among equal logits. Drawing is by inverse CDF over the kept probabilities: in id order when nothing
is cut off, else in descending order of probability (stable, so ties keep id order).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.request import SamplingParams


def uniform(seed: int, sample: int, position: int) -> float:
    """The random number of one position: Philox 4×64 with key (seed, sample) and counter (position)."""
    bits = np.random.Philox(key=np.array([seed, sample], np.uint64), counter=np.array([position, 0, 0, 0], np.uint64))
    return float(np.random.Generator(bits).random())


@dataclass(frozen=True)
class SampleRows:
    """What to draw: one entry a sampled sequence, in the order of the batch's logits rows.

    Args:
        seq_ids, row_slots: who gets the token, and where `last_token` keeps it (0: nowhere yet).
        params, uniforms: per entry.
    """

    seq_ids: tuple[int, ...]
    row_slots: np.ndarray
    params: tuple[SamplingParams, ...]
    uniforms: tuple[float, ...]

    @property
    def all_greedy(self) -> bool:
        return all(p.greedy for p in self.params)


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
