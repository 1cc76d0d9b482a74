"""A small engine for drafters: target, paged cache, drafts, verification with the tree as a mask, acceptance, compaction.

Every fourth verification of a sequence is checked against a full recompute of each path, without a cache or a tree. Only the order of the
calls is what an engine must do; nothing here is scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.full import FullAttention, bytes_per_token
from engine.config import ModelConfig, RopeConfig
from engine.models.decoder import Decoder, decoder_params
from engine.ops import torch_ops
from engine.speculative.accept import Accepted, follow
from engine.speculative.base import FINAL, DraftOptions, Room, Target, make_state
from engine.speculative.compact import move_tokens, moves
from engine.speculative.layers import Where, planned, run_layers
from engine.speculative.registry import build_drafter
from engine.speculative.rows import Rows
from engine.speculative.tree import ROOT, DraftTree
from engine.speculative.verify import verification
from tests.engine.model_harness import Harness

PAGE = 4
ROOM = Room(window=256, pool_tokens=4096)


def small_config(**changes) -> ModelConfig:
    stated = dict(
        family="llama", num_layers=3, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=24,
        max_position_embeddings=256, rms_norm_eps=1e-5, rope=RopeConfig(10_000.0, 8),
    )  # fmt: skip
    return ModelConfig(**{**stated, **changes})


def small_weights(config: ModelConfig, seed: int = 0, scale: float = 0.35) -> dict[str, torch.Tensor]:
    """Random weights of a model whose text depends on all of its context; fp32."""
    g = torch.Generator().manual_seed(seed)
    weights = {p.name: torch.randn(*p.shape, generator=g) * scale for p in decoder_params(config)}
    for name in weights:
        if "norm" in name:
            weights[name] = 1 + weights[name] * 0.3
    weights["model.embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size, generator=g)
    return weights


def small_target(seed=0, **changes) -> Target:
    config = small_config(**changes)
    return Target(Decoder(config, small_weights(config, seed)), torch_ops())


@dataclass
class Sequence:
    tokens: list[int]
    prompt: int
    pages: list[int]
    drafted: int = 0  # tokens that the drafter has seen as rows
    steps: list[tuple[DraftTree, Accepted]] = field(default_factory=list)

    @property
    def root(self) -> int:
        return len(self.tokens) - 1

    def slot(self, position: int) -> int:
        return self.pages[position // PAGE] * PAGE + position % PAGE


def table(sequences: list[Sequence]) -> torch.Tensor:
    """int32 [b, w], padded with the sink."""
    width = max(len(s.pages) for s in sequences)
    return torch.tensor([s.pages + [0] * (width - len(s.pages)) for s in sequences]).int()


class Loop:
    """Args: pages of all sequences together; choose: (logits, position) → token, greedy if None; checked: recompute at times.

    On another device: make and use it under `with torch.device(…)`, unchecked."""

    def __init__(self, target: Target, options: DraftOptions, pages: int = 96, choose=None, checked: bool = True) -> None:
        self.target, self.options, self.checked = target, options, checked
        self.drafter = build_drafter(target, options, ROOM)
        elements = PAGE * bytes_per_token(target.config, 4)
        arena = torch.full((pages + 1, elements // 4), float("nan")).view(torch.uint8)  # what nobody wrote must not be read
        self.attention = FullAttention(target.config, arena, PAGE, torch.float32, target.ops)
        self.state = make_state(self.drafter, target, pages + 1, PAGE, self.attention)
        for kept in (self.state.kv.arena.view(torch.float32) if self.state.own else None, self.state.features):
            if kept is not None:
                kept.fill_(float("nan"))
        self.free = list(range(1, pages + 1))
        self.choose = choose or (lambda logits, position: logits.argmax(-1))
        self.sequences: list[Sequence] = []

    # ---- the target ----

    def forward(self, where: Where, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden after the last norm, what the drafter keeps of each row)."""
        model, ops, taps = self.target.model, self.target.ops, {}
        x = run_layers(
            model, model.layers, ops.embedding(tokens, model.embedding), planned(where, self.attention), self.attention, ops,
            lambda layer, x: taps.__setitem__(layer, x.clone()),
        )  # fmt: skip
        taps[FINAL] = ops.rms_norm(x, model.norm, model.config.rms_norm_eps)
        wanted = self.drafter.taps
        return taps[FINAL], self.drafter.store(torch.cat([taps[t] for t in wanted], 1)) if wanted else taps[FINAL][:, :0]

    def rows(self, of: list[tuple[Sequence, int, int]]) -> Rows:
        """Tokens start to stop of each sequence."""
        positions = [list(range(a, b)) for _, a, b in of]
        counts = [len(p) for p in positions]
        cu = np.cumsum([0, *counts])
        length = max(len(s.tokens) for s, *_ in of)
        flat = lambda f: torch.tensor([f(s, p) for (s, *_), ps in zip(of, positions, strict=True) for p in ps])  # noqa: E731
        return Rows(
            flat(lambda s, p: s.tokens[p]), flat(lambda s, p: p), flat(lambda s, p: s.slot(p)),
            flat(lambda s, p: s.slot(p - 1) if p else 0),
            torch.tensor(cu.tolist()).int(), torch.tensor([b for *_, b in of]).int(), table([s for s, *_ in of]),
            torch.tensor((cu[1:] - 1).tolist()), max(counts), torch.tensor([s.tokens + [0] * (length - len(s.tokens)) for s, *_ in of]),
        )  # fmt: skip

    def prefill(self, s: Sequence, start: int, stop: int) -> torch.Tensor:
        """Logits after the last of these prompt tokens; the drafter sees them as rows."""
        r = self.rows([(s, start, stop)])
        hidden, kept = self.forward(Where(r.positions, r.slots, r.block_table, r.cu_seqlens, r.seq_lens, r.max_query_len), r.tokens)
        if self.drafter.feature_width:
            self.state.keep_features(r.slots, kept)
        if self.drafter.catch_up:
            self.drafter.extend(r, self.state)
            s.drafted = stop
        return self.target.model.logits(hidden[-1:])

    # ---- sequences ----

    def add(self, prompt: list[int], chunk: int | None = None, shares: Sequence | None = None, new: int = 64) -> Sequence:
        """Prefill in chunks, after a prefix hit on another sequence's full pages."""
        hit = 0
        if shares is not None:
            same = next(
                (i for i, (a, b) in enumerate(zip(prompt, shares.tokens, strict=False)) if a != b), min(len(prompt), len(shares.tokens))
            )
            hit = min(same, len(prompt) - 1) // PAGE * PAGE
        needed = -(-(len(prompt) + new + 70) // PAGE) - hit // PAGE
        pages = (shares.pages[: hit // PAGE] if shares else []) + [self.free.pop(0) for _ in range(needed)]
        s = Sequence(list(prompt), len(prompt), pages, drafted=hit)
        for start in range(hit, len(prompt), chunk or len(prompt)):
            logits = self.prefill(s, start, min(len(prompt), start + (chunk or len(prompt))))
        s.tokens.append(int(self.choose(logits[0], s.root)))
        self.sequences.append(s)
        return s

    def step(self, sequences: list[Sequence], room: list[int] | None = None) -> None:
        """Draft, verify, accept, compact; room: nodes allowed, a sequence."""
        rows = self.rows([(s, s.drafted if self.drafter.catch_up else s.root, len(s.tokens)) for s in sequences])
        drafts = self.drafter.propose(rows, self.state)
        if room is not None:
            drafts = drafts.limit(torch.tensor(room))
        trees = drafts.trees()
        for s, tree in zip(sequences, trees, strict=True):
            s.drafted = len(s.tokens)
            assert len(tree) <= self.drafter.nodes and tree.depths.max(initial=0) <= self.drafter.max_depth
        known = torch.tensor([len(s.tokens) for s in sequences]).int()
        v = verification(drafts, rows.tokens[rows.last], known, rows.block_table, PAGE)
        where = Where(v.positions, v.slots, rows.block_table, v.cu_seqlens, v.seq_lens, drafts.tokens.shape[1] + 1, v.tree)
        hidden, kept = (v.by_row(x) for x in self.forward(where, v.tokens))
        logits, positions = self.target.model.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1), v.by_row(v.positions).tolist()
        chosen = torch.tensor(
            [[int(self.choose(x, p)) for x, p in zip(*pair, strict=True)] for pair in zip(logits, positions, strict=True)]
        )  # fmt: skip
        if self.checked:
            for s, tree, mine in zip(sequences, trees, logits, strict=True):
                if len(s.steps) % 4 == 1:
                    self.check(s, tree, mine)
        out = follow(drafts, chosen)
        roots = known.long() - 1
        source, destination = moves(out.path, roots, rows.block_table, PAGE)
        move_tokens(self.attention.arena, self.target.config, PAGE, torch.float32, source, destination)
        if self.drafter.feature_width:
            self.state.keep_accepted(out.rows(), kept, roots, rows.block_table)
        for s, tree, path, count, new in zip(
            sequences, trees, out.path.tolist(), out.count.tolist(), out.tokens(drafts).tolist(), strict=True
        ):
            s.steps.append((tree, Accepted(tuple(path[:count]), new[count])))
            s.tokens += new[: count + 1]

    def check(self, s: Sequence, tree: DraftTree, logits: torch.Tensor) -> None:
        """Logits of root and nodes are those of each path computed from nothing."""
        for node in range(ROOT, len(tree)):
            text = s.tokens + (tree.tokens[tree.path(node)].tolist() if node != ROOT else [])
            torch.testing.assert_close(logits[node + 1], Harness(self.target.model, 256).logits(text)[-1], rtol=2e-3, atol=2e-3)

    def run(self, sequences: list[Sequence], new: int, room=None) -> None:
        """Until each has `new` tokens; those that are done leave the batch."""
        while alive := [s for s in sequences if len(s.tokens) < s.prompt + new]:
            self.step(alive, None if room is None else [room() for _ in alive])


def plain_greedy(target: Target, prompt: list[int], new: int) -> list[int]:
    """The engine's own forward pass, one token at a time."""
    return Harness(target.model, 256).greedy(prompt, new)


def mean_accepted(s: Sequence) -> float:
    """Drafts accepted a step, the bonus not counted."""
    return float(np.mean([len(a.path) for _, a in s.steps]))


def is_perfect(s: Sequence) -> bool:
    """Every step's path ended in a leaf. (A node's best child is in the tree if any of its children is.)"""
    return all(len(t) and not t.children(a.path[-1] if a.path else ROOT) for t, a in s.steps)
