"""What views and benchmarks ask of a Timeline: the steady part of a burst, when the device was busy, and every wait. Pure.

The steady part goes from the first kernel of the second step to the first kernel of the last: whole steps, each with the
wait before the next. Busy is the union of the kernels' intervals over that time; copies between host and device are no work
of the device's and count as waiting. A gap stands between a kernel and the next one: from when all before it have ended to
when it begins, 0 where they touch or overlap. With programmatic dependent launch a kernel's interval includes its wait for
the one before, which CUPTI cannot tell apart: then busy is an upper bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.artifacts import Timeline, of_kind
from engine.trace import Trace
from viz.layout import visible

COARSE_NS = 100.0  # a clock with longer ticks says nothing of single kernels
_BINS = 10.0 ** np.arange(-1, 5.01, 0.5)  # µs
_TEMPLATE = re.compile(r"^(?:void |static )*")


@dataclass(frozen=True)
class Burst:
    """A Timeline with what was counted in it. Times in ns. `foreign`: it is of another machine than the
    run, out of a recording."""

    it: Timeline
    foreign: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.it.source == "CUPTI"

    @property
    def graphs(self) -> bool:
        return self.it.graph_size > 0

    @property
    def side(self) -> str:
        """Unique among bursts that are shown together."""
        return "cpu" if not self.is_gpu else "on" if self.graphs else "off"

    @property
    def is_coarse(self) -> bool:
        return self.it.resolution_ns > COARSE_NS

    @cached_property
    def rows(self) -> np.ndarray:
        """int64 [k]: places in it.kernels of those that compute."""
        copies = np.array([name.startswith("Mem") for name in self.it.names], bool)
        return np.flatnonzero(~copies[self.it.kernels["kernel"]]) if len(self.it.kernels) else np.zeros(0, np.int64)

    @cached_property
    def start(self) -> np.ndarray:
        return self.it.kernels["start_ns"][self.rows]

    @cached_property
    def stop(self) -> np.ndarray:
        return self.it.kernels["stop_ns"][self.rows]

    @cached_property
    def firsts(self) -> np.ndarray:
        """int64: place in `rows` of each step's first kernel, in order."""
        return np.flatnonzero(np.diff(self.it.kernels["step"][self.rows], prepend=-1) > 0) if len(self.rows) else np.zeros(0, np.int64)

    @cached_property
    def usable(self) -> bool:
        """Three steps or more, each with kernels, so that one lies between others."""
        begins = self.start[self.firsts]
        return len(begins) >= 3 and bool((np.diff(begins) > 0).all())

    @property
    def first(self) -> int:
        """Place in `rows` where the steady part begins; the one where it ends is `last`."""
        return int(self.firsts[1])

    @property
    def last(self) -> int:
        return int(self.firsts[-1])

    @property
    def tokens(self) -> int:
        return len(self.firsts) - 2

    @property
    def wall(self) -> int:
        return int(self.start[self.last] - self.start[self.first])

    @cached_property
    def covered(self) -> np.ndarray:
        """int64 [k]: when everything up to and including each kernel has ended."""
        return np.maximum.accumulate(self.stop)

    @cached_property
    def gaps(self) -> np.ndarray:
        """int64 [kernels of the steady part]: behind each of them."""
        i = np.arange(self.first, self.last)
        return np.maximum(self.start[i + 1] - self.covered[i], 0)

    @property
    def busy_share(self) -> float:
        return 1.0 - float(self.gaps.sum()) / self.wall

    @property
    def mean_gap_us(self) -> float:
        return float(self.gaps.mean()) / 1e3

    @property
    def kernels(self) -> float:
        """A step's."""
        return (self.last - self.first) / self.tokens

    @property
    def token_us(self) -> float:
        """Of a step, with the profiler attached."""
        return self.wall / self.tokens / 1e3

    @cached_property
    def token(self) -> tuple[int, int]:
        """Places in `rows` of one whole step: the one of median length; the second is the next step's first kernel."""
        lengths = np.diff(self.start[self.firsts[1:]])
        k = 1 + int(np.argsort(lengths, kind="stable")[(len(lengths) - 1) // 2])
        return int(self.firsts[k]), int(self.firsts[k + 1])

    @property
    def zero(self) -> int:
        return int(self.start[self.token[0]])

    @property
    def length(self) -> int:
        """Of that step."""
        return int(self.start[self.token[1]]) - self.zero

    def name(self, i: int) -> str:
        """What the kernel at a place of `rows` is called: its operation, else its function."""
        row = self.it.kernels[self.rows[i]]
        return visible(self.it.names[row["name"]]) if row["name"] >= 0 else brief_name(self.it.names[row["kernel"]])

    def is_named(self, i: int) -> bool:
        return bool(self.it.kernels["name"][self.rows[i]] >= 0)

    def layer(self, i: int) -> int | None:
        layer = int(self.it.kernels["layer"][self.rows[i]])
        return layer if 0 <= layer < self.it.num_layers else None

    @cached_property
    def layers(self) -> dict[int, tuple[int, int]]:
        """layer → (begin, end) of its kernels in the shown step, ns."""
        a, b = self.token
        found: dict[int, tuple[int, int]] = {}
        for i in range(a, b):
            layer = self.layer(i)
            if layer is not None:
                low, high = found.get(layer, (int(self.start[i]), 0))
                found[layer] = min(low, int(self.start[i])), max(high, int(self.stop[i]))
        return found

    def longest(self, most: int) -> list[int]:
        """Places in `rows` of the kernels of the shown step behind which it waited longest."""
        a, b = self.token
        gaps = self.gaps[a - self.first : b - self.first]
        order = np.argsort(-gaps, kind="stable")[:most]
        return [a + int(k) for k in order if gaps[k] > 0]

    def gap(self, i: int) -> tuple[int, int]:
        """(begin, end) of the wait behind a kernel."""
        return int(self.covered[i]), max(int(self.start[i + 1]), int(self.covered[i]))

    def meanwhile(self, i: int) -> str:
        """What the host did for most of the wait behind a kernel: a stage, "" where it was in none."""
        begin, end = self.gap(i)
        spent: dict[str, int] = {}
        for row in self.it.host:
            name = self.it.names[row["name"]]
            if not name.startswith("cu"):
                spent[name] = spent.get(name, 0) + max(min(int(row["stop_ns"]), end) - max(int(row["start_ns"]), begin), 0)
        best = max(spent, key=spent.get, default="")
        return best if best and 2 * spent[best] >= end - begin > 0 else ""

    @cached_property
    def histogram(self) -> np.ndarray:
        """int64 [bins + 1]: gaps below the first edge of BINS, between the edges, above the last."""
        return np.bincount(np.searchsorted(_BINS, self.gaps / 1e3, side="right"), minlength=len(_BINS) + 1)


def bins() -> np.ndarray:
    """Edges of the histogram, µs."""
    return _BINS


def brief_name(function: str) -> str:
    """A kernel's function for a person: without its types and arguments."""
    name = re.split(r"[<(]", _TEMPLATE.sub("", visible(function)), maxsplit=1)[0]
    return name.rpartition("::")[2].strip("_") or visible(function)[:24] or "?"


def bursts(trace: Trace, step: int) -> tuple[Burst, ...]:
    """Of the step nearest to this one, graphs off before on; a CPU's first. Of another device the newest."""
    found: dict[str, Burst] = {}
    here = trace.meta.get("device")
    usable = [burst for it in of_kind(trace, Timeline) if (burst := Burst(it, here not in (None, it.device))).usable]
    for is_gpu in (False, True):
        mine = [burst for burst in usable if burst.is_gpu == is_gpu]
        near = min(reversed(mine), key=lambda burst: abs(burst.it.step_id - step), default=None)
        for burst in mine:
            if (burst.it.step_id, burst.it.device) == (near.it.step_id, near.it.device):
                found[burst.side] = burst
    return tuple(found[side] for side in ("cpu", "off", "on") if side in found)
