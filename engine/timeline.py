"""The job `timeline`: a burst of decode steps under a profiler, launch by launch and kernel by kernel.

The requests of a step run again in a scratch room from where that step left them, with CUDA graphs off and then on, so
that both can be compared: same tokens, same lengths, same knobs. Those steps are in nobody's record and in no average.

    GPU    CUPTI (torch.profiler): the stages of a step are marked ranges, launches and kernels are CUPTI's, linked by its
           correlation. A further step, launched one by one with a mark around each operation, tells which kernel belongs to
           which operation and layer; kernels of the burst take these names by their place, also those of a replayed graph,
           whose nodes run in the order of the capture. If another number of kernels came, none is named.
    CPU    a clock around each stage and each operation: the host runs them itself, what lies between is Python.

With programmatic dependent launch a kernel's time includes its wait for the one before: CUPTI cannot see when that ended.
Deliberately does not know what is drawn of it. Rejected: marks around each operation within the burst (they cost more than the
gaps that are to be seen), steps of the room itself (its pace and its pauses lie between them).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.artifacts import HOST_ROW, KERNEL_ROW, Timeline
from engine.build import device_name
from engine.config import EngineConfig, with_knob
from engine.errors import EngineError
from engine.probe import NO_PROBE, Parts, StepProbe
from engine.profile import MARK
from engine.ranges import Watch, named_parts
from engine.request import SamplingParams

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.jobs import Job
    from engine.rooms import Room

TIMELINE_S = 60.0
STEPS = 8  # of a burst
WARM, PLAIN, SPARE = 3, 5, 4  # steps before it: to warm up, to be timed without a profiler; and beyond it
READY = 500  # steps within which all requests must decode
MAX_WARM_UP = 8  # launches with which a profiler begins: CUPTI may lose the first ones of a session
MAX_FUNCTION = 400  # characters of a kernel's name
MODES = (False, True)  # graphs off, on
NO_OPERATION = ("", -1)
TOO_MANY = "These requests do not fit into the cache together. Choose a step with fewer of them."
COPY = "Mem"  # begins the names of copies and fills


def check(core: EngineCore, sequences: Sequence[Sequence[int]], modes: Sequence[bool]) -> None:
    """Raises EngineError for what cannot be run."""
    if not sequences or not all(sequences):
        raise EngineError("nothing_to_compare", "There is nothing to run again yet. Send a prompt or start an example first.")
    if not modes or any(type(mode) is not bool for mode in modes):
        raise EngineError("bad_comparison", "A timeline is taken with CUDA graphs off, on, or both.")
    if getattr(core.runner, "_parts", None) is None:
        raise EngineError("no_model", "This engine has no model whose steps could be timed.")


def bursts(job: Job, step_id: int, sequences: Sequence[tuple[int, ...]], modes: Sequence[bool]) -> Iterator[tuple[float, str]]:
    """The job's slices. What cannot be run ends it with a note; bursts that were taken before stay."""
    able = [graphs for graphs in modes if not graphs or job.core.runner.graphs is not None] or [False]
    try:
        for i, graphs in enumerate(able):
            for fraction, text in _Burst(job, step_id, sequences, graphs).slices():
                yield (i + fraction) / len(able), text
    except EngineError as error:
        job.note = error.sentence


class _Burst:
    """One burst in a scratch room, which is closed when it ends."""

    def __init__(self, job: Job, step_id: int, sequences: Sequence[tuple[int, ...]], graphs: bool) -> None:
        self.job, self.core, self.step_id, self.sequences, self.graphs = job, job.core, step_id, sequences, graphs
        self.device = job.core.runner.device
        self.probe: StepProbe = NO_PROBE
        self.ran_size = 0  # of the graph that the newest step replayed
        self.room: Room

    def slices(self) -> Iterator[tuple[float, str]]:
        config = with_knob(self.core.rooms[self.job.room].config, "mode", "paged")
        config = replace(config, runner=replace(config.runner, cuda_graphs=self.graphs))
        self._attach()
        self.room = self.job.open_scratch(self._with_pages(config))
        yield 0.05, "Reading the requests again"
        yield from self._until_all_decode()
        while self.graphs and self._size() is None:
            if self.core.runner.capture_next() is None:
                raise EngineError(
                    "timeline_stopped", "No CUDA graph could be captured for so many requests. The timeline with graphs off stays."
                )
            yield 0.5, "Capturing a CUDA graph"
        plain_us = self._plain_us()
        yield 0.6, "Timing decode steps under the profiler"
        self.job.publish(self._on_gpu(plain_us) if self.device.type == "cuda" else self._on_cpu(plain_us))
        self.core.close_room(self.room.name)
        yield 1.0, "Timing decode steps under the profiler"

    def _tokens(self, config: EngineConfig) -> int:
        """That each request may write: those that are read first write while the others are read."""
        budget = config.scheduler.max_num_batched_tokens
        reading = sum(map(len, self.sequences)) // max(budget - len(self.sequences), 1) + 2 * len(self.sequences)
        return reading + WARM + PLAIN + STEPS + SPARE

    def _with_pages(self, config: EngineConfig) -> EngineConfig:
        """Room for all of them to the end, so that none is preempted in the middle of the burst."""
        size, more = config.cache.page_size, self._tokens(config) + 1
        wanted = sum(-(-(len(ids) + more) // size) for ids in self.sequences)
        return with_knob(config, "num_pages", wanted) if wanted > (config.cache.num_pages or 0) else config

    def _attach(self) -> None:
        """The first profiler of a process loads CUPTI. Graphs that were captured before are not known to it (and some versions
        of torch fail to replay them, pytorch#75504): they are captured again."""
        runner = self.core.runner
        if self.device.type == "cuda" and not runner.profiled:
            with_profiler(self.device, lambda: None)
            runner.drop_graphs()
            runner.profiled = True

    def _until_all_decode(self) -> Iterator[tuple[float, str]]:
        sampling = SamplingParams(max_tokens=self._tokens(self.room.config), ignore_eos=True, seed=0)
        for ids in self.sequences:
            self.core.add("", tuple(ids), sampling, room=self.room.name)
        for _ in range(READY):
            record = self._step()
            works = () if record is None else record.plan.works
            if len(works) == len(self.sequences) and all(w.num_tokens == 1 for w in works):
                return
            yield 0.1, "Reading the requests again"
            if not self.room.has_work:
                break
        raise EngineError("timeline_stopped", TOO_MANY)

    def _step(self):
        record = self.core.step(self.room.name, self.probe, alone=True)
        if record is not None and record.error is not None:
            raise EngineError("timeline_stopped", f"The timeline ended: {record.error.sentence}")
        if record is not None:
            self.ran_size = record.result.graph_size
        return record

    def _decode(self) -> None:
        """A step in which every request computes its token."""
        record = self._step()
        if record is None or len(record.plan.works) != len(self.sequences):
            raise EngineError("timeline_stopped", TOO_MANY)

    def _size(self) -> int | None:
        """The captured size that the room's steps take."""
        return next((n for n in self.core.runner.graphs.sizes if n >= len(self.sequences)), None)

    def _plain_us(self) -> float:
        """Median of steps without a profiler."""
        for _ in range(WARM):
            self._decode()
        found = []
        for _ in range(PLAIN):
            began = time.perf_counter()
            self._decode()
            found.append((time.perf_counter() - began) * 1e6)
        return statistics.median(found)

    def _run(self, sink: _Clock | _Marks, steps: int) -> None:
        """So many steps, each in a range "step" and its stages in ranges of their own."""
        watch = Watch(sink)
        watch.room(self.room)
        watch.runner(self.core.runner)
        try:
            for sink.step in range(steps):
                sink.begin("step")
                try:
                    self._decode()
                finally:
                    watch._end_build()
                    sink.end()
        finally:
            watch.undo()

    # ---- on a CPU ----

    def _on_cpu(self, plain_us: float) -> Timeline:
        clock = _Clock()
        self.probe = NO_PROBE if self.graphs else _Operations(clock.call)  # a replay has no operations that could be clocked
        try:
            self._run(clock, STEPS)
        finally:
            self.probe = NO_PROBE
        rows = Rows(
            [(name, step, a, b) for name, step, a, b in clock.rows if name != "step"], sorted(clock.operations, key=lambda k: k.start)
        )
        boundaries = [a for name, _, a, _ in clock.rows if name == "step"] + [clock.rows[-1][3]]
        return self._timeline("CPU operations", plain_us, tick_ns(time.perf_counter_ns), rows, boundaries, (), self.ran_size)

    # ---- on a GPU ----

    def _on_gpu(self, plain_us: float) -> Timeline:
        marks = _Marks()
        events = with_profiler(self.device, lambda: self._run(marks, STEPS))
        found = rows_of(events, marks.names)
        if found is None:
            raise EngineError("profile_incomplete", "The profiler lost kernels of those steps. Take another timeline.")
        rows, boundaries, lost = found
        ran_size = self.ran_size
        rows, unnamed = named(rows, self._reference(), "GraphLaunch" if self.graphs else "")
        times = np.unique([t for k in rows.kernels for t in (k.start, k.stop)])
        resolution = float(np.diff(times).min()) if len(times) > 1 else 0.0
        return self._timeline("CUPTI", plain_us, resolution, rows, boundaries, (*(["lost"] if lost else []), *unnamed), ran_size)

    def _reference(self) -> list[Known]:
        """Kernels in the order of their launches, of a step or of what the graph holds, each with its operation."""
        marks = _Marks()
        if not self.graphs:
            self.probe = _Operations(marks.call)
            events = with_profiler(self.device, lambda: self._run(marks, 1))
            self.probe = NO_PROBE
            return known_kernels(events, marks.names)
        runner, graphs, size = self.core.runner, self.core.runner.graphs, self._size()
        saved = runner.model, runner.attention, runner.ops
        parts = named_parts(Parts(*saved, runner._sample), marks.call)

        @torch.inference_mode()
        def again() -> None:
            marks.begin("step")
            graphs.run_eagerly(size)
            marks.end()

        runner.model, runner.attention, runner.ops = parts.model, parts.attention, parts.ops
        try:
            events = with_profiler(self.device, again)
        finally:
            runner.model, runner.attention, runner.ops = saved
        return known_kernels(events, marks.names)

    def _timeline(
        self, source: str, plain_us: float, resolution: float, rows: Rows, boundaries: Sequence[int], unseen: tuple[str, ...], ran_size: int
    ) -> Timeline:
        names: dict[str, int] = {}
        index = lambda name: names.setdefault(name, len(names))  # noqa: E731
        zero = boundaries[0]
        order = sorted(range(len(rows.host)), key=lambda i: rows.host[i][2])
        place = {old: new for new, old in enumerate(order)}
        host = [(index(rows.host[i][0]), rows.host[i][1], rows.host[i][2] - zero, rows.host[i][3] - zero) for i in order]
        kernels = [
            (
                index(k.operation) if k.operation else -1,
                index(k.function),
                k.layer,
                k.step,
                place.get(k.launch, -1),
                k.start - zero,
                k.stop - zero,
            )
            for k in rows.kernels
        ]
        return Timeline(
            self.step_id, device_name(self.device), self.core.config.source.dtype, source, ran_size, len(self.sequences),
            self.core.runner.model.config.num_layers, resolution, plain_us, tuple(names), np.array(host, HOST_ROW),
            np.array(kernels, KERNEL_ROW), np.array(boundaries, np.int64) - zero, unseen,
        )  # fmt: skip


# ---- clocks and marks ----


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


class _Operations(StepProbe):
    """Lets `call` run each operation of an eager step."""

    def __init__(self, call: Callable) -> None:
        super().__init__()
        self._call = call

    def around(self, parts: Parts, host) -> Parts:
        return named_parts(parts, self._call)


class _Clock:
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


class _Marks:
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


def with_profiler(device: torch.device, run: Callable[[], object]) -> list:
    """Kineto's events of what `run` does."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # or graphs fail once CUPTI comes back (torch/profiler/profiler.py)
    kinds = torch.profiler.ProfilerActivity
    profile = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
    profile.start()
    try:
        x = torch.zeros(1, device=device)
        for _ in range(MAX_WARM_UP):
            x.add_(1.0)
        torch.cuda.synchronize(device)
        run()
        torch.cuda.synchronize(device)
    finally:
        profile.stop()
    return list(profile.profiler.kineto_results.events())


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
