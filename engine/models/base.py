"""What a model family declares (FAMILY in its file) and what the runner needs of a model.

A parameter is named as in the checkpoint and declares the axis along which several GPUs would split it;
loaders take (rank, world), so sharding needs no change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
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


def count_parameters(params: Iterable[Param]) -> int:
    """Weights as the checkpoint keeps them: biases and norms too, tied embeddings once."""
    return sum(prod(param.shape) for param in params)


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
        name: config.json's model_type, which is also the file's name and what `parse` puts into ModelConfig.family.
        architectures: Hugging Face class names that it reads.
        parse: config.json (with generation_config's EOS ids merged) → ModelConfig; refuses what is not
            supported by name (EngineError "unsupported_model").
        params: ModelConfig → every checkpoint tensor that must be there. A checkpoint with another weight or bias is
            refused: what nobody reads would be missing from the result.
        build: (ModelConfig, weights by checkpoint name, already on device and in dtype) → Model.
        gguf: general.architecture of its GGUF files; "" where GGUF is not read. Tensors' names are in
            engine/quantization/gguf.py.
        gguf_interleaved: llama.cpp stores its q and k rows with the two halves of each head interleaved.
    """

    name: str
    architectures: tuple[str, ...]
    parse: Callable[[Mapping], ModelConfig]
    params: Callable[[ModelConfig], tuple[Param, ...]]
    build: Callable[[ModelConfig, dict[str, torch.Tensor]], Model]
    gguf: str = ""
    gguf_interleaved: bool = False
