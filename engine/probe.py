"""Which named points of the forward pass to keep in a step. Nothing kept costs one attribute test a point.

A model calls `probe.keep("attention.q", layer, tensor)` at each point that it names; whether anything is
copied is decided by the Probe that the step was given. Kept tensors become numpy arrays after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

POINTS = ("embedding", "attention.q", "attention.k", "attention.v", "attention.out", "mlp.out", "hidden")


@dataclass
class Probe:
    """Keeps (name, layer) → tensor for the points asked for.

    Args:
        points: names from POINTS.
        layers: layers to keep; empty keeps every layer.
        max_bytes: budget; past it points are dropped and `dropped` counts them.
    """

    points: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()
    max_bytes: int = 64 * 2**20
    kept: dict[tuple[str, int], object] = field(default_factory=dict)
    dropped: int = 0
    used: int = 0

    active = True

    def keep(self, name: str, layer: int, tensor) -> None:
        if name not in self.points or (self.layers and layer not in self.layers):
            return
        size = tensor.numel() * 4
        if self.used + size > self.max_bytes:
            self.dropped += 1
            return
        self.used += size
        self.kept[name, layer] = tensor.detach().float().clone()

    def arrays(self) -> dict[tuple[str, int], object]:
        """(name, layer) → float32 numpy array. Waits for the device."""
        return {key: tensor.cpu().numpy() for key, tensor in self.kept.items()}


class NoProbe:
    """Keeps nothing."""

    active = False
    keep: Callable = staticmethod(lambda name, layer, tensor: None)

    def arrays(self) -> dict:
        return {}


NO_PROBE = NoProbe()
