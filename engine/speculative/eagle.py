"""EAGLE: one decoder layer that continues the target's features, and guesses a token from each by the target's LM head.

    EAGLE-1/2   x = fc[embedding(token), f]        f: the final hidden state of the token before
                f' = norm(layer(x))                feature and what the LM head reads
    EAGLE-3     g = fuse[low, middle, high]        residual streams of three of the target's layers, kept as one
                x = fc[norm(embedding(token)), norm(g)],   g' = layer(x),   LM head reads norm(g')

Guesses are fed back with the drafter's own features; the tree grows by confidence (EAGLE-2). After a verification the
accepted tokens are run again with the target's features. Tensors: fc, layer.*, norm; EAGLE-3: fuse, token_norm, feature_norm.

Rejected: feeding EAGLE-3's layer 2 · hidden wide inputs (fc to hidden keeps the engine's layer, at the same number of
weights), features kept at three times the width.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.config import ModelConfig
from engine.speculative.autoregressive import Autoregressive, Growth, growth_of
from engine.speculative.base import FINAL, DrafterSpec, DraftOptions, Shape, Tap, Target
from engine.speculative.draft_model import early_exit
from engine.speculative.heads import Head, bad_head, load_head


class Eagle(Autoregressive):
    """A head's layer on the target's features."""

    name = "eagle"

    def __init__(self, target: Target, head: Head, growth: Growth) -> None:
        config, hidden = target.config, target.config.hidden_size
        body = early_exit(target.model, 1)  # for its shapes and rope
        super().__init__(target, body, [head.layer("layer.", target)], growth)
        self.fc, self.norm = head.take("fc", hidden, 2 * hidden), head.take("norm", hidden)
        self.taps = taps_of(head, target)
        self.fuse = None if self.taps == (FINAL,) else head.take("fuse", hidden, len(self.taps) * hidden)
        self.norms = None if self.fuse is None else (head.take("token_norm", hidden), head.take("feature_norm", hidden))
        self.feature_width, self.parameters = hidden, head.parameters
        self.kv = one_layer(config)

    def store(self, features: torch.Tensor) -> torch.Tensor:
        return features if self.fuse is None else self.target.ops.linear(features, self.fuse)

    def enter(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        ops, eps = self.target.ops, self.target.config.rms_norm_eps
        embedded = ops.embedding(tokens, self.target.model.embedding)
        if self.norms is not None:
            embedded, before = ops.rms_norm(embedded, self.norms[0], eps), ops.rms_norm(before.contiguous(), self.norms[1], eps)
        return ops.linear(torch.cat([embedded, before.to(embedded.dtype)], 1), self.fc)

    def leave(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.target.ops.rms_norm(x, self.norm, self.target.config.rms_norm_eps)
        return (normed, normed) if self.fuse is None else (x, normed)


def one_layer(config: ModelConfig) -> ModelConfig:
    """The shape of a head's own K/V: one layer like the target's."""
    return replace(config, num_layers=1)


def taps_of(head: Head, target: Target) -> tuple[Tap, ...]:
    """The card's taps: "final", or three layers of the target."""
    taps = head.card.get("taps")
    layers = target.config.num_layers
    ok = isinstance(taps, list) and (taps == [FINAL] or (len(taps) == 3 and all(isinstance(i, int) and 0 <= i < layers for i in taps)))
    if not ok:
        raise bad_head(head.file, "its card does not say which features it reads")
    return tuple(taps)


def build(target: Target, options: DraftOptions) -> Eagle:
    head = load_head(options.source, "eagle", target)
    return Eagle(target, head, growth_of(options, options.shape or DRAFTER.shapes[0], target.config.vocab_size))


DRAFTER = DrafterSpec("eagle", (Shape.DYNAMIC, Shape.CHAIN, Shape.STATIC), build, trained=True, drawn=True)
