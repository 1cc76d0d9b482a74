"""KV groups: what each kind of layer keeps of a token, and how many tokens fit one page of the arena.

All groups share pages of equal bytes; a group with smaller tokens fits more of them. Today's models have one
group (full attention of every layer). A sliding-window, latent or recurrent group adds a KVGroup here and a
variant in engine/attention.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that keep the same things.

    Args:
        kind: the attention variant's file name ("full", …).
        layers: layer numbers.
        bytes_per_token: over all its layers.
    """

    kind: str
    layers: tuple[int, ...]
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How the arena is cut: page_bytes is the first group's page_size tokens."""

    groups: tuple[KVGroup, ...]
    page_size: int

    @property
    def page_bytes(self) -> int:
        return self.groups[0].bytes_per_token * self.page_size


def full_layout(num_layers: int, bytes_per_token: int, page_size: int) -> KVLayout:
    """One group of full attention."""
    return KVLayout((KVGroup("full", tuple(range(num_layers)), bytes_per_token),), page_size)
