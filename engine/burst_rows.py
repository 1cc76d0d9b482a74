"""Clocks and marks around what a burst of steps does, and what the profiler's events say of them. Knows no jobs and no rooms.

Stages and operations are timed by the host's clock (Clock), or marked as numbered ranges that the profiler records (Marks), so
that they stand on one clock with its launches and kernels. `rows_of` links kernels to launches by CUPTI's correlation, `known_kernels`
gives each kernel of a marked step its operation, and `named` lends those names to the kernels of steps without marks, by
their place. What does not add up is said, and never guessed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.probe import Parts, StepProbe
from engine.profile import MARK
from engine.ranges import named_parts

MAX_FUNCTION = 400  # characters of a kernel's name
NO_OPERATION = ("", -1)
COPY = "Mem"  # begins the names of copies and fills


@dataclass(frozen=True, slots=True)
class Kernel:
    """What ran on the device, ns of the profiler's clock. `launch`: place of the host row that launched it, -1: none."""

    function: str
    step: int
    launch: int
    start: int
    stop: int
    operation: str = ""
    layer: int = -1


@dataclass(frozen=True, slots=True)
class Rows:
    """`host`: (name, step, start, stop)."""

    host: list[tuple[str, int, int, int]]
    kernels: list[Kernel]


class Operations(StepProbe):
    """Lets `call` run each operation of an eager step."""

    def __init__(self, call: Callable) -> None:
        super().__init__()
        self._call = call

    def around(self, parts: Parts, host) -> Parts:
        return named_parts(parts, self._call)


class Clock:
    """Stages and operations by the host's own clock."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int, int]] = []
        self.operations: list[Kernel] = []
        self.step = 0
        self._open: list[tuple[str, int]] = []

    def begin(self, name: str) -> None:
        self._open.append((name, time.perf_counter_ns()))

    def end(self) -> None:
        stop = time.perf_counter_ns()
        name, start = self._open.pop()
        self.rows.append((name, self.step, start, stop))

    def call(self, name: str, layer: int, run: Callable[[], object]) -> object:
        start = time.perf_counter_ns()
        out = run()
        self.operations.append(Kernel(name, self.step, -1, start, time.perf_counter_ns(), name, layer))
        return out


class Marks:
    """Stages and operations as numbered ranges that the profiler records."""

    def __init__(self) -> None:
        self.names: list[tuple[str, int]] = []  # (stage, step), or (operation, -2 - layer)
        self.step = 0
        self._open: list[object] = []

    def begin(self, name: str, where: int | None = None) -> None:
        mark = torch.profiler.record_function(f"{MARK}{len(self.names)}")
        self.names.append((name, self.step if where is None else where))
        mark.__enter__()
        self._open.append(mark)

    def end(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def call(self, name: str, layer: int, run: Callable[[], object]) -> object:
        self.begin(name, -2 - layer)
        try:
            return run()
        finally:
            self.end()


def tick_ns(clock: Callable[[], int], readings: int = 2000) -> float:
    """The smallest step of a clock that was seen."""
    seen = np.array([clock() for _ in range(readings)], np.int64)
    steps = np.diff(seen)
    return float(steps[steps > 0].min(initial=1_000_000_000))


# ---- what the profiler says ----


def _sorted_out(events: list) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[str, int, int]], list]:
    """(marks: number → (start, stop); launches: correlation → (name, start, stop); what ran on the device, by start)."""
    marks, launches, ran = {}, {}, []
    for e in events:
        name, start = e.name(), e.start_ns()
        if e.device_type() != torch.autograd.DeviceType.CPU:
            if not name.startswith(MARK):
                ran.append(e)
        elif name.startswith(MARK):
            marks[int(name.removeprefix(MARK))] = (start, start + e.duration_ns())
        elif name.startswith("cu") and any(word in name for word in ("Launch", "Memcpy", "Memset")):
            launches[e.correlation_id()] = (name, start, start + e.duration_ns())
    return marks, launches, sorted(ran, key=lambda e: e.start_ns())


def rows_of(events: list, names: Sequence[tuple[str, int]]) -> tuple[Rows, list[int], bool] | None:
    """(rows, when each step began and the last ended, whether launches have no kernel); None where a mark is missing or no
    kernel was seen.

    Args:
        names: (stage, step) of each mark.
    """
    marks, launches, ran = _sorted_out(events)
    if sorted(marks) != list(range(len(names))):
        return None
    steps = sorted((marks[i], step) for i, (name, step) in enumerate(names) if name == "step")
    begins, ends = [span[0] for span, _ in steps], [span[1] for span, _ in steps]
    host = [(name, step, *marks[i]) for i, (name, step) in enumerate(names) if name != "step"]
    at: dict[int, int] = {}
    for correlation, (name, start, stop) in launches.items():
        step = int(np.searchsorted(begins, start, side="right")) - 1
        if step >= 0 and start <= ends[step]:
            at[correlation] = len(host)
            host.append((name, step, start, stop))
    kernels, seen, broken = [], set(), False
    for e in ran:
        row = at.get(e.correlation_id())
        if row is None:
            continue
        if e.start_ns() <= 0 or e.duration_ns() < 0:
            broken = True
            continue
        seen.add(row)
        kernels.append(Kernel(e.name()[:MAX_FUNCTION], host[row][1], row, e.start_ns(), e.start_ns() + e.duration_ns()))
    if not kernels:
        return None
    lost = broken or any("Launch" in host[row][0] and row not in seen for row in at.values())
    return Rows(host, kernels), [*begins, ends[-1]], lost


Known = tuple[str, str, int]  # (function, operation, layer) of a kernel


def known_kernels(events: list, names: Sequence[tuple[str, int]]) -> list[Known]:
    """What ran within the marks "step", by start: each with the operation during whose call the host launched it, or with
    none. [] where a mark is missing."""
    marks, launches, ran = _sorted_out(events)
    if sorted(marks) != list(range(len(names))):
        return []
    whole = [marks[i] for i, (name, where) in enumerate(names) if where >= 0 and name == "step"]
    calls = sorted((marks[i], name, -2 - where) for i, (name, where) in enumerate(names) if where < -1)
    begins = [span[0] for span, _, _ in calls]
    found = []
    for e in ran:
        _, at, _ = launches.get(e.correlation_id(), ("", -1, -1))
        if not any(a <= at <= b for a, b in whole):
            continue
        i = int(np.searchsorted(begins, at, side="right")) - 1
        inside = i >= 0 and at <= calls[i][0][1]
        found.append((e.name()[:MAX_FUNCTION], *(calls[i][1:] if inside else NO_OPERATION)))
    return found


def named(rows: Rows, known: Sequence[Known], launched_by: str) -> tuple[Rows, tuple[str, ...]]:
    """Kernels with their operations by their place in a step, and what could not be named. Copies have no operation.

    Args:
        launched_by: what a launch's name must contain for its kernels to be among the known ones; "": any.
    """
    known = [kernel for kernel in known if not kernel[0].startswith(COPY)]
    of_step: dict[int, list[int]] = {}
    for i, k in enumerate(rows.kernels):
        if launched_by in rows.host[k.launch][0] and not k.function.startswith(COPY):
            of_step.setdefault(k.step, []).append(i)
    alike = [mine for mine in of_step.values() if known and len(mine) == len(known)]
    if not alike:
        return rows, ("not_named",)
    kernels, differ = list(rows.kernels), len(alike) < len(of_step)
    for mine in alike:
        for i, (function, operation, layer) in zip(mine, known, strict=True):
            same = kernels[i].function == function
            differ |= not same
            if same:
                kernels[i] = replace(kernels[i], operation=operation, layer=layer)
    return Rows(rows.host, kernels), ("partly_named",) if differ else ()
