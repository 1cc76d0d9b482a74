"""Which drafts the target accepts, and the token that it adds: three rules, each in numpy for one tree and on the device
for a batch without asking the host.

Rows: a verification gives the target's logits after the root (row 0) and after each node i (row i + 1).

follow   The target has chosen a token at each row, with the engine's own sampler and the uniform of that row's position.
         A node is accepted if it is what its parent's row chose; the chosen token of the last accepted row is the bonus.
         Lossless for drafts made without chance, greedy or with temperature, and more: the tokens are those that plain
         decoding would have drawn. It is what the rejection rule becomes when q is one-hot: child x is accepted with p(x).
reject   For drafts that were drawn: a child x of a row is accepted with probability min(1, p(x) / q(x)); if not, p becomes
         norm(max(p - q, 0)), x is taken out of q, and the next sibling is tried; after the last one the token is drawn from
         what p has become (SpecInfer, EAGLE, recursive speculative decoding). The output is distributed as p. q must be
         what the child was drawn from, after temperature, top-k and top-p (transformers#47932).
typical  LOSSY (Medusa): a node is accepted if p(x) > min(epsilon, delta · exp(-H(p))). Longer answers a step, another
         distribution.

Accepted drafts do not count the bonus token; tokens a step are count + 1.

Does not know drafters or caches. Rejected: accepting by p/q without the residual (the answer is then not distributed as p;
a test shows it), Medusa's table of retrieved paths (a path follows from parents).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.request import SamplingParams
from engine.speculative.device import DraftBatch, step_up
from engine.speculative.tree import ROOT, DraftTree

EPSILON, DELTA = 0.09, 0.3  # Medusa's


@dataclass(frozen=True)
class Accepted:
    """One tree's outcome.

    Args:
        path: accepted nodes, from the root's child down.
        bonus: the token that the target adds after the last of them.
    """

    path: tuple[int, ...]
    bonus: int


@dataclass(frozen=True)
class AcceptedBatch:
    """Outcomes on the device.

    Args:
        path: int64 [b, max_depth]: accepted nodes from the root's child down; ROOT behind them.
        count: int64 [b]: how many.
        bonus: int64 [b].
    """

    path: torch.Tensor
    count: torch.Tensor
    bonus: torch.Tensor

    def tokens(self, drafts: DraftBatch) -> torch.Tensor:
        """int64 [b, max_depth + 1]: accepted tokens, then the bonus, then zeros."""
        picked = torch.where(self.path >= 0, drafts.tokens.gather(1, self.path.clamp(min=0)), 0)
        out = torch.cat([picked, torch.zeros_like(self.count)[:, None]], 1)
        return out.scatter(1, self.count[:, None], self.bonus[:, None])

    def rows(self) -> torch.Tensor:
        """int64 [b, max_depth + 1]: the root's row and those of the accepted nodes; -1 behind them. Where features lie."""
        root = torch.zeros_like(self.count)[:, None]
        return torch.cat([root, torch.where(self.path >= 0, self.path + 1, -1)], 1)


# ---- random numbers and the target's distribution ----


def uniforms(seed: int, sample: int, position: int, depth: int, width: int) -> np.ndarray:
    """What `reject` draws for a root's children at `position` and below: float64 [depth + 1, width + 1] in [0, 1).

    [d, w] tests the w-th sibling at position + d, [d, width] draws the token there. Philox with key (seed, sample) and
    counter (position, 1 + w): never the plain sampler's, whose second word is 0.
    """
    out = np.zeros((depth + 1, width + 1))
    key = np.array([seed, sample], np.uint64)
    for d in range(depth + 1):
        for w in range(width + 1):
            which = 1 if w == width else w + 2  # the draw's number does not depend on the width
            bits = np.random.Philox(key=key, counter=np.array([position + d, which, 0, 0], np.uint64))
            out[d, w] = np.random.Generator(bits).random()
    return out


def distribution_ref(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """float64 [vocab]: what engine/sampler.py draws from: temperature, top-k, top-p; one-hot at temperature 0."""
    out = np.zeros(len(logits))
    if params.greedy:
        out[int(logits.argmax())] = 1.0
        return out
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    order = np.argsort(-scaled, kind="stable")[: params.top_k]
    kept = np.exp(scaled[order])
    kept /= kept.sum()
    kept[np.cumsum(kept) - kept >= params.top_p] = 0.0
    out[order] = kept / kept.sum()
    return out


def distribution(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The same for rows [s, vocab] of their own parameters [s], fp64. top_k 0 keeps all; temperature 0 is one-hot."""
    best = logits.argmax(-1, keepdim=True)
    scaled = (logits.double() - logits.gather(1, best)) / torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    values, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    place = torch.arange(logits.shape[1], device=logits.device)
    values = torch.where((top_k[:, None] > 0) & (place >= top_k[:, None]), -torch.inf, values)
    kept = torch.softmax(values, -1)
    kept = torch.where(kept.cumsum(-1) - kept < top_p[:, None].double(), kept, 0.0)
    out = torch.zeros_like(scaled).scatter_(1, ids, kept / kept.sum(-1, keepdim=True))
    greedy = torch.zeros_like(scaled).scatter_(1, best, 1.0)
    return torch.where(temperature[:, None] > 0, out, greedy)


# ---- follow ----


def follow_ref(tree: DraftTree, chosen: np.ndarray) -> Accepted:
    """chosen: int64 [n + 1], the target's token at each row."""
    path, at = [], ROOT
    while (found := [i for i in tree.children(at) if tree.tokens[i] == chosen[at + 1]]) != []:
        at = found[0]
        path.append(at)
    return Accepted(tuple(path), int(chosen[at + 1]))


def follow(drafts: DraftBatch, chosen: torch.Tensor) -> AcceptedBatch:
    """chosen: int64 [b, n + 1]."""
    wanted = chosen.gather(1, drafts.parents + 1)
    return _longest(drafts, drafts.tokens == wanted, chosen)


def _longest(drafts: DraftBatch, hit: torch.Tensor, chosen: torch.Tensor, score: torch.Tensor | None = None) -> AcceptedBatch:
    """The longest path of hits [b, n]; among equals that of the best score [b, n], else the first."""
    good, at, depth = hit & drafts.valid, drafts.parents, torch.ones_like(drafts.parents)
    whole = good
    for _ in range(drafts.max_depth - 1):
        whole = whole & ((at < 0) | good.gather(1, at.clamp(min=0)))
        depth = depth + (at >= 0)
        at = step_up(drafts.parents, at)
    reached = torch.where(whole, depth, 0)
    count = reached.amax(1)
    best = reached == count[:, None]
    place = best.to(torch.int8) if score is None else torch.where(best & whole, score, -torch.inf)
    last = torch.where(count > 0, place.argmax(1), ROOT)
    return AcceptedBatch(_climb(drafts, last, depth), count, chosen.gather(1, last[:, None] + 1)[:, 0])


def _climb(drafts: DraftBatch, last: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """int64 [b, max_depth]: the path that ends in `last` [b]."""
    out = torch.full((len(last), drafts.max_depth + 1), ROOT, dtype=torch.int64, device=last.device)
    node = last[:, None]
    for _ in range(drafts.max_depth):
        column = torch.where(node >= 0, depth.gather(1, node.clamp(min=0)) - 1, drafts.max_depth)  # the last one is thrown away
        out.scatter_(1, column, node)
        node = step_up(drafts.parents, node)
    return out[:, :-1]


# ---- reject ----


def reject_ref(tree: DraftTree, p: np.ndarray, q: np.ndarray, u: np.ndarray) -> Accepted:
    """Recursive rejection down one tree.

    Args:
        p, q: float64 [n + 1, vocab] of each row: the target's distribution, and what the row's children were drawn from,
            in the tree's order without replacement.
        u: float64 [depth + 1, width + 1], see uniforms().
    """
    path, at = [], ROOT
    while True:
        target, draft, tests = p[at + 1], q[at + 1], u[len(path)]
        for w, child in enumerate(tree.children(at)):
            token = int(tree.tokens[child])
            if draft[token] <= 0:  # q had fewer tokens than the tree has places: this one was never drawn
                continue
            if tests[w] * draft[token] < target[token]:
                at = child
                path.append(child)
                break
            target, draft = residual_ref(target, draft, token)
        else:
            return Accepted(tuple(path), draw_ref(target, tests[-1]))


def residual_ref(p: np.ndarray, q: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
    """What is left to match after `token`, drawn from q, was rejected."""
    left = np.maximum(p - q, 0)
    p = left / left.sum() if left.sum() > 0 else p  # p = q up to rounding: a rejection has probability 0
    q = q.copy()
    q[token] = 0
    return p, q / q.sum() if q.sum() > 0 else q


def draw_ref(p: np.ndarray, u: float) -> int:
    """Inverse CDF in id order."""
    cdf = p.cumsum()
    return min(int(np.searchsorted(cdf, u * cdf[-1], side="right")), int(np.flatnonzero(p)[-1]))


def reject(drafts: DraftBatch, p: torch.Tensor, u: torch.Tensor) -> AcceptedBatch:
    """As reject_ref for a batch with drafts.q; p [b, n + 1, vocab] fp64, u [b, max_depth + 1, max_width + 1] fp64."""
    b = len(drafts.tokens)
    at = torch.full((b, 1), ROOT, dtype=torch.int64, device=p.device)
    alive = torch.ones(b, 1, dtype=torch.bool, device=p.device)
    rank, valid = _sibling_rank(drafts.parents), drafts.valid
    path, bonus = [], torch.zeros(b, dtype=torch.int64, device=p.device)
    for d in range(drafts.max_depth + 1):
        row = (at + 1)[:, :, None].expand(-1, -1, p.shape[2])
        target, draft = p.gather(1, row)[:, 0], drafts.q.gather(1, row)[:, 0].double()
        taken = torch.full_like(at, ROOT)
        for w in range(drafts.max_width if d < drafts.max_depth else 0):
            match = (drafts.parents == at) & (rank == w) & valid
            child = match.to(torch.int8).argmax(1, keepdim=True)
            token = drafts.tokens.gather(1, child)
            given = draft.gather(1, token)  # 0: q had fewer tokens than the tree has places, and this one was never drawn
            there = match.any(1, keepdim=True) & (taken < 0) & (given > 0)
            yes = there & (u[:, d, w, None] * given < target.gather(1, token))
            taken = torch.where(yes, child, taken)
            target, draft = _residual(target, draft, token, there & ~yes)
        drawn = _draw(target, u[:, d, -1])
        stops = alive & (taken < 0)
        bonus = torch.where(stops[:, 0], drawn, bonus)
        alive = alive & (taken >= 0)
        at = torch.where(alive, taken, at)
        if d < drafts.max_depth:
            path.append(torch.where(alive, taken, ROOT))
    walked = torch.cat(path, 1) if path else torch.zeros(b, 0, dtype=torch.int64, device=p.device)
    return AcceptedBatch(walked, (walked >= 0).sum(1), bonus)


def _sibling_rank(parents: torch.Tensor) -> torch.Tensor:
    """int64 [b, n]: how many siblings come before."""
    n = parents.shape[1]
    before = torch.ones(n, n, dtype=torch.bool, device=parents.device).tril(-1)
    return ((parents[:, :, None] == parents[:, None, :]) & before).sum(2)


def _residual(p: torch.Tensor, q: torch.Tensor, token: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left = (p - q).clamp(min=0)
    mass = left.sum(1, keepdim=True)
    rest = q.scatter(1, token, 0.0)
    kept = rest.sum(1, keepdim=True)
    p = torch.where(where & (mass > 0), left / mass.clamp(min=1e-300), p)
    return p, torch.where(where, rest / kept.clamp(min=1e-300), q)


def _draw(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """int64 [b]."""
    cdf = p.cumsum(1)
    at = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0]
    ids = torch.arange(p.shape[1], device=p.device)
    return torch.minimum(at, torch.where(p > 0, ids, 0).amax(1))


# ---- typical ----


def threshold_ref(p: np.ndarray, epsilon: float, delta: float) -> float:
    """min(epsilon, delta · exp(-H(p))), H in nats."""
    some = p[p > 0]
    return min(epsilon, delta * float(np.exp((some * np.log(some)).sum())))


def typical_ref(tree: DraftTree, p: np.ndarray, chosen: np.ndarray, epsilon: float = EPSILON, delta: float = DELTA) -> Accepted:
    """The longest path of typical tokens, among equals the most probable, then the first.

    Args:
        p: float64 [n + 1, vocab]: the target's distribution at each row.
        chosen: int64 [n + 1]: the token to add, should the path end there.
    """
    best, score, value = ROOT, (0, 0.0), np.zeros(len(tree))
    good = np.zeros(len(tree), bool)
    for i, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        given = p[parent + 1, token]
        good[i] = given > threshold_ref(p[parent + 1], epsilon, delta) and (parent == ROOT or good[parent])
        if good[i]:
            value[i] = np.log(given) + (0.0 if parent == ROOT else value[parent])
            if best == ROOT or (int(tree.depths[i]), value[i]) > score:
                best, score = i, (int(tree.depths[i]), value[i])
    return Accepted(tuple(tree.path(best)), int(chosen[best + 1]))


def typical(drafts: DraftBatch, p: torch.Tensor, chosen: torch.Tensor, epsilon: float = EPSILON, delta: float = DELTA) -> AcceptedBatch:
    """As typical_ref for a batch: p [b, n + 1, vocab] fp64, chosen [b, n + 1]."""
    limit = (delta * torch.exp((p * p.clamp(min=1e-300).log()).sum(2))).clamp(max=epsilon)  # [b, n + 1]
    row = drafts.parents + 1
    given = p.gather(1, row[:, :, None].expand(-1, -1, p.shape[2])).gather(2, drafts.tokens[:, :, None])[:, :, 0]
    log, at = given.clamp(min=1e-300).log(), drafts.parents
    score = log
    for _ in range(drafts.max_depth - 1):
        score = score + torch.where(at >= 0, log.gather(1, at.clamp(min=0)), 0.0)
        at = step_up(drafts.parents, at)
    return _longest(drafts, given > limit.gather(1, row), chosen, score)
