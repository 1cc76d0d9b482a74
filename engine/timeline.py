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

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.artifacts import HOST_ROW, KERNEL_ROW, Timeline
from engine.build import device_name
from engine.burst_rows import Clock, Known, Marks, Operations, Rows, known_kernels, named, rows_of, tick_ns
from engine.config import EngineConfig, with_knob
from engine.cupti import attach, with_profiler
from engine.errors import EngineError
from engine.probe import NO_PROBE, Parts, StepProbe
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
MODES = (False, True)  # graphs off, on
TOO_MANY = "These requests do not fit into the cache together. Choose a step with fewer of them."


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
        attach(self.core.runner)
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

    def _run(self, sink: Clock | Marks, steps: int) -> None:
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
                    watch.end_build()
                    sink.end()
        finally:
            watch.undo()

    # ---- on a CPU ----

    def _on_cpu(self, plain_us: float) -> Timeline:
        clock = Clock()
        self.probe = NO_PROBE if self.graphs else Operations(clock.call)  # a replay has no operations that could be clocked
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
        marks = Marks()
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
        marks = Marks()
        if not self.graphs:
            self.probe = Operations(marks.call)
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
