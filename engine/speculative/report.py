"""What a head would have gained on texts that it has not seen: the real drafter, over recorded greedy answers.

Greedy decoding accepts a draft exactly if it is the answer's next token, so an answer that was recorded once tells for any
drafter what would have been accepted: no verification needs to run. The drafter is the one that the engine uses, built from
the file that ships, with its own K/V and the target's features.

    tokens a step = accepted drafts + 1 (the bonus)

Does not know training. Speed is not measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.speculative.accept import follow
from engine.speculative.answers import Answer
from engine.speculative.base import Drafter, DraftState, Target, make_state
from engine.speculative.losses import watch
from engine.speculative.medusa import Medusa
from engine.speculative.rows import Rows

PAGE = 16
AT_ONCE = 8


@dataclass(frozen=True)
class Report:
    """Args: reached[d - 1]: the share of steps that accepted at least d drafts."""

    steps: int
    tokens_per_step: float
    reached: tuple[float, ...]


@torch.inference_mode()
def replay(drafter: Drafter, target: Target, answers: Sequence[Answer], until=None) -> Report:
    """Draft through recorded answers. Steps whose tree would go past an answer's end do not count.

    Args:
        until: asked between batches; true: stop there.
    """
    counts: list[int] = []
    longest = drafter.max_depth
    usable = sorted((a for a in answers if len(a.tokens) - a.num_prompt > longest + 1), key=lambda a: len(a.tokens))
    for start in range(0, len(usable), AT_ONCE):
        if counts and until is not None and until():
            break
        counts += _replay(drafter, target, usable[start : start + AT_ONCE])
    reached = tuple(float(np.mean([c >= d for c in counts])) if counts else 0.0 for d in range(1, longest + 1))
    return Report(len(counts), 1 + float(np.mean(counts)) if counts else 1.0, reached)


def _replay(drafter: Drafter, target: Target, some: Sequence[Answer]) -> list[int]:
    device, length = target.device, max(len(a.tokens) for a in some)
    width = -(-(length + drafter.slots_ahead + 1) // PAGE)
    table = (1 + torch.arange(len(some) * width, device=device)).view(len(some), width).int()
    state = make_state(drafter, target, 1 + len(some) * width, PAGE)
    tokens = torch.zeros(len(some), length, dtype=torch.int64, device=device)
    for row, answer in zip(tokens, some, strict=True):
        row[: len(answer.tokens)] = torch.from_numpy(answer.tokens)
    if drafter.feature_width:
        _keep(drafter, target, state, table, tokens)
    counts, drafted, roots = [], [0] * len(some), [a.num_prompt for a in some]
    while True:
        live = [i for i, a in enumerate(some) if roots[i] + drafter.max_depth + 1 < len(a.tokens)]
        if not live:
            return counts
        rows = rows_of(tokens, table, live, [drafted[i] for i in live], [roots[i] + 1 for i in live])
        drafts = drafter.propose(rows, state)
        ahead = torch.cat([torch.zeros_like(drafts.parents[:, :1]), drafts.depths()], 1)  # [b, n + 1] depth of each row
        next_at = torch.tensor([roots[i] for i in live], device=device)[:, None] + 1 + ahead
        accepted = follow(drafts, tokens[live].gather(1, next_at.clamp(max=length - 1))).count.tolist()
        for i, count in zip(live, accepted, strict=True):
            drafted[i] = roots[i] + 1
            roots[i] += count + 1
        counts += accepted


def _keep(drafter: Drafter, target: Target, state: DraftState, table: torch.Tensor, tokens: torch.Tensor) -> None:
    """The target's features of all tokens, in their slots."""
    seen = watch(target.model, tokens, drafter.taps)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    slots = table.long()[:, positions // PAGE] * PAGE + positions % PAGE
    state.keep_features(slots.flatten(), drafter.store(seen.taps.flatten(0, 1)))


def rows_of(tokens: torch.Tensor, table: torch.Tensor, live: list[int], starts: list[int], stops: list[int]) -> Rows:
    """Rows of tokens [starts, stops) of the live sequences."""
    counts = np.array(stops) - np.array(starts)
    cu = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])
    put = lambda x: torch.from_numpy(np.asarray(x)).to(tokens.device)  # noqa: E731
    of, at, mine = put(np.repeat(live, counts)), put(positions), table[live]

    def slot(position: torch.Tensor) -> torch.Tensor:
        return table[of, torch.div(position, PAGE, rounding_mode="floor")].long() * PAGE + position % PAGE

    return Rows(
        tokens[of, at], at, slot(at), slot((at - 1).clamp(min=0)), put(cu.astype(np.int32)), put(np.array(stops, np.int32)), mine,
        put(cu[1:] - 1), int(counts.max()), tokens[live],
    )  # fmt: skip


@torch.inference_mode()
def head_accuracies(drafter: Medusa, target: Target, answers: Sequence[Answer], heads: int, width: int) -> np.ndarray:
    """float64 [heads, width]: how often head h's r-th guess was the answer's token, over all roots of these answers."""
    hits, count = np.zeros((heads, width)), np.zeros(heads)
    for answer in answers:
        tokens = torch.from_numpy(answer.tokens).to(target.device)
        final = watch(target.model, tokens[None], drafter.taps).final[0]
        roots = torch.arange(answer.num_prompt, len(tokens) - 1, device=target.device)
        for part in roots.split(256):
            best = drafter.head_logits(final[part - 1], tokens[part], heads).topk(width, -1).indices  # [m, heads, width]
            for h in range(heads):
                there = part + 1 + h < len(tokens)
                label = tokens[(part + 1 + h).clamp(max=len(tokens) - 1)]
                hits[h] += ((best[:, h] == label[:, None]) & there[:, None]).sum(0).cpu().numpy()
                count[h] += int(there.sum())
    return hits / np.maximum(count, 1)[:, None]
