"""What to look at in one step. Nothing looked at costs one attribute test a point.

A model calls `probe.keep("attention.q", layer, tensor)` at each point that it names; whether anything is
copied is decided by the Probe that the step was given. Kept tensors become numpy arrays after the step.

A probe may also stand between the parts of the step (`around`): put a clock around each operation
(engine/profile.py), or run a traced kernel at one layer (engine/tiles.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.batch import HostBatch
    from engine.plan import StepPlan

POINTS = ("embedding", "attention.q", "attention.k", "attention.v", "attention.out", "mlp.out", "hidden")


@dataclass(frozen=True, slots=True)
class Parts:
    """What the runner computes a step with: engine/models/base.py's Model, engine/attention/base.py's Attention,
    engine/ops.py's Ops, and (logits, SampleRows) -> tokens."""

    model: object
    attention: object
    ops: object
    sample: Callable


class StepProbe:
    """A probe of one step.

    Args:
        step_id: of the step that took it; None: none yet. Set by the core (engine/core.py).
    """

    active = True
    keeps = False  # whether it asks for named points: fused operations have none of them

    def __init__(self) -> None:
        self.step_id: int | None = None

    def wants(self, plan: StepPlan) -> bool:
        """Whether this is the step."""
        return bool(plan.works)

    def around(self, parts: Parts, host: HostBatch) -> Parts:
        """The parts to compute the step with; what a probe puts in their place gives the same results."""
        return parts

    def keep(self, name: str, layer: int, tensor) -> None:
        """A named point of the forward pass."""

    def arrays(self) -> dict[tuple[str, int], object]:
        """(name, layer) → float32 numpy array, once the step has settled."""
        return {}


@dataclass
class Probe(StepProbe):
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
    step_id: int | None = None

    keeps = True

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

    active = keeps = False
    keep: Callable = staticmethod(lambda name, layer, tensor: None)
    wants: Callable = staticmethod(lambda plan: False)

    def arrays(self) -> dict:
        return {}


NO_PROBE = NoProbe()
