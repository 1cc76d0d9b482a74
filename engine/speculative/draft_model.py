"""A smaller model with the same tokenizer drafts for the large one: a checkpoint of its own, or the target's first layers.

Early exit (no source): the first k layers, then the target's last norm and LM head. Its K/V are the target's own, written
by verification anyway: no cache, no weights, no catching up. A checkpoint keeps K/V of its own beside the target's.

Rejected: a tokenizer of its own with texts translated between the two (guesses no longer match token by token).
"""

from __future__ import annotations

import copy

import torch

from engine.errors import EngineError
from engine.models.base import count_parameters
from engine.models.decoder import Decoder
from engine.models.loading import load_model
from engine.models.registry import load_families
from engine.speculative.autoregressive import Autoregressive, Growth, growth_of
from engine.speculative.base import DrafterSpec, DraftOptions, Shape, Target, check_vocabulary
from engine.speculative.heads import fingerprint


class DraftModel(Autoregressive):
    """`model` drafts. shares_kv: it is the beginning of the target."""

    name = "draft_model"

    def __init__(self, target: Target, model: Decoder, growth: Growth, own: bool) -> None:
        super().__init__(target, model, model.layers, growth)
        self.kv = model.config if own else None
        self.shares_kv, self.catch_up = not own, own
        self.parameters = count_parameters(load_families()[model.config.family].params(model.config)) if own else 0

    def enter(self, tokens: torch.Tensor, before: None) -> torch.Tensor:
        return self.target.ops.embedding(tokens, self.body.embedding)

    def leave(self, x: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, self.target.ops.rms_norm(x, self.body.norm, self.body.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.body.logits(hidden)


def early_exit(model: Decoder, layers: int) -> Decoder:
    """The same weights, the first layers only."""
    part = copy.copy(model)
    part.layers = model.layers[:layers]
    return part


def build(target: Target, options: DraftOptions) -> DraftModel:
    growth = growth_of(options, options.shape or DRAFTER.shapes[0], target.config.vocab_size)
    if options.source is None:
        total = len(target.model.layers)
        layers = max(1, total // 4) if options.layers is None else options.layers
        if not 1 <= layers <= total:
            rule = f"a whole number from 1 to {total}"
            sentence = f"layers must be {rule} for the drafter draft_model, got {layers}."
            raise EngineError("bad_draft_options", sentence, name="layers", rule=rule, value=str(layers), drafter="draft_model")
        return DraftModel(target, early_exit(target.model, layers), growth, own=False)
    loaded = load_model(options.source, target.device, target.dtype)
    check_vocabulary(loaded.folder.name, (loaded.config.vocab_size, fingerprint(loaded.tokenizer)), target)
    return DraftModel(target, loaded.model, growth, own=True)


DRAFTER = DrafterSpec("draft_model", (Shape.CHAIN, Shape.STATIC, Shape.DYNAMIC), build, drawn=True)
