"""What a model family declares (FAMILY in its file) and what the runner needs of a model.

A parameter is named as in the checkpoint and declares the axis along which several GPUs would split it;
loaders take (rank, world), so sharding needs no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.base import Attention
from engine.batch import Batch
from engine.config import ModelConfig
from engine.ops import Ops


@dataclass(frozen=True, slots=True)
class Param:
    """One checkpoint tensor. `shard_axis` None: every rank keeps the whole."""

    name: str
    shape: tuple[int, ...]
    shard_axis: int | None = None


class Model(Protocol):
    """A decoder ready to run. Holds weights; knows nothing of pages, requests or sampling."""

    config: ModelConfig

    def forward(self, batch: Batch, attention: Attention, ops: Ops, probe) -> torch.Tensor:
        """Hidden states [t, hidden] after the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [s, vocab] of the chosen rows [s, hidden]."""


@dataclass(frozen=True)
class Family:
    """A model family.

    Args:
        name: ModelConfig.family.
        architectures: Hugging Face class names that it reads.
        parse: config.json (with generation_config's EOS ids merged) → ModelConfig; refuses what is not
            supported by name (EngineError "unsupported_model").
        params: ModelConfig → every checkpoint tensor that must be there.
        build: (ModelConfig, weights by checkpoint name, already on device and in dtype) → Model.
    """

    name: str
    architectures: tuple[str, ...]
    parse: Callable[[Mapping], ModelConfig]
    params: Callable[[ModelConfig], tuple[Param, ...]]
    build: Callable[[ModelConfig, dict[str, torch.Tensor]], Model]
