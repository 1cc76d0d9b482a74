"""MTP: one extra block of the model that predicts the token after the next one, as DeepSeek-V3 and Gemma train theirs.

    x = fc[norm(f), norm(embedding(token))]     f: the final hidden state of the token before
    h' = norm(block(x)),   logits = lm_head(h')

A chain: for a second guess h' takes f's place. Tensors: fc, layer.*, norm, token_norm, feature_norm.
"""

from __future__ import annotations

import torch

from engine.speculative.autoregressive import Autoregressive, Growth, growth_of
from engine.speculative.base import FINAL, DrafterSpec, DraftOptions, Shape, Target
from engine.speculative.draft_model import early_exit
from engine.speculative.eagle import one_layer
from engine.speculative.heads import Head, load_head


class MTP(Autoregressive):
    """A head's block after the target's last."""

    name = "mtp"
    taps = (FINAL,)

    def __init__(self, target: Target, head: Head, growth: Growth) -> None:
        hidden = target.config.hidden_size
        super().__init__(target, early_exit(target.model, 1), [head.layer("layer.", target)], growth)
        self.fc, self.norm = head.take("fc", hidden, 2 * hidden), head.take("norm", hidden)
        self.token_norm, self.feature_norm = head.take("token_norm", hidden), head.take("feature_norm", hidden)
        self.feature_width, self.parameters, self.kv = hidden, head.parameters, one_layer(target.config)

    def enter(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        ops, eps = self.target.ops, self.target.config.rms_norm_eps
        embedded = ops.rms_norm(ops.embedding(tokens, self.target.model.embedding), self.token_norm, eps)
        return ops.linear(torch.cat([ops.rms_norm(before.contiguous(), self.feature_norm, eps), embedded], 1), self.fc)

    def leave(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.target.ops.rms_norm(x, self.norm, self.target.config.rms_norm_eps)
        return normed, normed


def build(target: Target, options: DraftOptions) -> MTP:
    head = load_head(options.source, "mtp", target)
    return MTP(target, head, growth_of(options, options.shape or DRAFTER.shapes[0], target.config.vocab_size))


DRAFTER = DrafterSpec("mtp", (Shape.CHAIN,), build, trained=True, drawn=True)
