"""The job `profile`: one step with a clock around every operation.

A ProfileProbe stands between the model and its operations for one step: the kernels of engine/ops.py, the matmuls (named by
the weight that they multiply with), the LM head, the choice of tokens. A step without it is not touched. The step runs
eagerly, on the same kernels as otherwise; its time is in no average.

    CPU    perf_counter around each call
    GPU    CUPTI (torch.profiler): the duration of each kernel, given to the operation during whose call the host launched it;
           host_us is that call

Work is by formula: the SPECs' own for kernels, 2·m·n·k for matmuls. Attention counts the sequences that the kernel takes.
Kernels that overlap on a GPU (programmatic dependent launch) wait within their own duration, so operations may add up to
more than the step. Deliberately does not know what an operation computes. Rejected: a device synchronisation after each
operation (it hides overlap and adds its own time), patching torch.nn.functional (every caller in the process would see it).
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.artifacts import OpTime, StepProfile
from engine.batch import HostBatch
from engine.build import device_name
from engine.cupti import Session, attach
from engine.errors import EngineError
from engine.ops import CALLED
from engine.probe import Parts, StepProbe
from engine.ranges import weights_of
from kernels.flash_decode import MAX_QUERIES
from kernels.registry import load_specs

if TYPE_CHECKING:
    from engine.jobs import Job
    from engine.recorder import Record

PROFILE_S = 60.0
MARK = "glass:"  # before the number of an operation, in the profiler's records


class Work(NamedTuple):
    """By formula. `rows`: tokens."""

    flops: int
    bytes: int
    rows: int


@dataclass
class _Called:
    """One call of an operation. Seconds of perf_counter."""

    name: str
    layer: int
    start: float
    stop: float
    work: Work | tuple  # or the key under which it will be counted


class ProfileProbe(StepProbe):
    """Invariant: an operation runs exactly as without the probe; only clocks are read around it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.calls: list[_Called] = []
        self.wall_s = 0.0
        self._layer, self._began, self._ended = 0, 0.0, 0.0
        self._weights: dict[int, tuple[str, int]] = {}  # id of a weight → (its field, layer)
        self._lengths: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64),) * 2
        self._seen: dict[tuple, tuple] = {}  # what to count, by operation and shapes: once the step is over
        self._specs = load_specs()
        self._profiler = Session() if device.type == "cuda" else None
        self.device_times: list[tuple[float, float]] | None = None  # (start_us since the step began, device_us) a call

    # ---- between the parts ----

    def around(self, parts: Parts, host: HostBatch) -> Parts:
        self._lengths = (np.diff(host.cu_seqlens).astype(np.int64), host.seq_lens.astype(np.int64))
        self._weights = weights_of(parts.model)
        on_reference = parts.ops.backend == "torch"
        timed = {}
        for name in (*CALLED, "linear"):
            shown = "attention" if on_reference and name.startswith("flash_") else name
            timed[name] = self._timed(shown, getattr(parts.ops, name), self._specs.get(name))
        ops = replace(parts.ops, **timed)
        attention = copy.copy(parts.attention)
        attention.ops = ops
        if self._profiler is not None:
            self._profiler.start(self.device)
        self._began = self._ended = time.perf_counter()
        return Parts(_TimedModel(parts.model, self), attention, ops, self._timed_sample(parts.sample))

    def arrays(self) -> dict:
        """The step has settled: the clocks stop. Nothing is kept as an array."""
        if self._profiler is not None:
            self.device_times = attributed(self._profiler.stop(self.device), len(self.calls))
        self.wall_s = self._ended - self._began
        return {}

    def call(self, name: str, layer: int, work: Work | tuple, run: Callable[[], object]) -> object:
        """Run an operation with the clock around it."""
        if self._profiler is not None:
            with torch.profiler.record_function(f"{MARK}{len(self.calls)}"):
                start = time.perf_counter()
                out = run()
                stop = time.perf_counter()
        else:
            start = time.perf_counter()
            out = run()
            stop = time.perf_counter()
        self.calls.append(_Called(name, layer, start, stop, work))
        self._ended = time.perf_counter()
        return out

    def finish(self) -> None:
        """The step's last operation has been launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._ended = time.perf_counter()

    def _timed(self, name: str, operation: Callable, spec) -> Callable:
        def timed(*args, **kwargs):
            field, self._layer = next((self._weights[id(a)] for a in args if id(a) in self._weights), (name, self._layer))
            known = field if spec is None else name  # a matmul has no kernel of its own: it goes by its weight
            key = self._note(spec, operation, args, kwargs)
            return self.call(known, self._layer, key, lambda: operation(*args, **kwargs))

        return timed

    def _timed_sample(self, sample: Callable) -> Callable:
        def timed(logits: torch.Tensor, rows) -> torch.Tensor:
            work = Work(logits.numel(), logits.nbytes, len(logits))
            out = self.call("sample", self._after, work, lambda: sample(logits, rows))
            self.finish()
            return out

        return timed

    @property
    def _after(self) -> int:
        """The layer number of what follows the last one."""
        return max((layer for _, layer in self._weights.values()), default=0)

    # ---- work by formula ----

    def _note(self, spec, operation: Callable, args: tuple, kwargs: Mapping) -> tuple:
        """The key under which this call's work will be counted: the same operation on the same shapes does the same."""
        key = (id(operation), tuple(a.shape for a in args if isinstance(a, torch.Tensor)), kwargs.get("min_query_len"))
        if key not in self._seen:
            shapes = tuple(map(_shape_of, args)), {name: _shape_of(a) for name, a in kwargs.items()}
            self._seen[key] = (spec, operation, *shapes)
        return key

    def work_of(self, call: _Called) -> Work:
        """Zeros where the formula does not know the arguments."""
        if isinstance(call.work, Work):
            return call.work
        found = self._seen[call.work]
        if not isinstance(found, Work):
            try:
                found = self._count(*found)
            except (TypeError, ValueError, KeyError, AttributeError, StopIteration, RuntimeError):
                found = Work(0, 0, 0)
            self._seen[call.work] = found
        return found

    def _count(self, spec, operation: Callable, args: tuple, kwargs: Mapping) -> Work:
        if spec is None:
            x, weight = args[0], args[1]
            m, (n, k) = x.numel() // x.shape[-1], weight.shape
            return Work(2 * m * n * k, (m * k + n * k + m * n) * x.element_size(), m)
        bound = inspect.signature(operation).bind(*args, **kwargs)
        bound.apply_defaults()
        inputs = dict(bound.arguments)
        if "cu_seqlens_q" in inputs:
            inputs |= self._attended(spec.name, inputs)
        rows = next(x.shape[0] for x in inputs.values() if isinstance(x, torch.Tensor))
        return Work(int(spec.flops(inputs)), int(spec.bytes(inputs)), int(rows))

    def _attended(self, name: str, inputs: Mapping) -> dict[str, object]:
        """The sequences that this kernel takes, with their lengths on the host (asking the device would make it wait)."""
        queries, keys = self._lengths
        if name == "flash_decode":
            mine = queries <= MAX_QUERIES
        else:
            mine = queries >= (inputs.get("min_query_len") or 1)
        cu = np.concatenate([[0], np.cumsum(queries[mine])])
        return {
            "q": inputs["q"][: int(cu[-1])], "cu_seqlens_q": torch.from_numpy(cu), "seq_lens": torch.from_numpy(keys[mine]),
        }  # fmt: skip


def _shape_of(value: object) -> object:
    """A tensor without its storage, so that nothing of the step is kept alive."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class _TimedModel:
    """A model whose LM head has a clock around it."""

    def __init__(self, model, probe: ProfileProbe) -> None:
        self._model, self._probe = model, probe

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._model.lm_head
        (n, k), m, size = weight.shape, len(hidden), hidden.element_size()
        work = Work(2 * m * n * k, (m * k + n * k) * size + 4 * m * n, m)
        return self._probe.call("lm_head", self._probe._after, work, lambda: self._model.logits(hidden))

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


# ---- CUPTI ----


def attributed(events: list, count: int) -> list[tuple[float, float]] | None:
    """Kineto's events as (start since the first operation, duration) of the marked ranges 0 … count - 1, microseconds; None
    where one of them has no kernel, or no mark. A kernel belongs to the range in which the host launched it."""
    on_device = {e: e.device_type() != torch.autograd.DeviceType.CPU for e in events}
    ranges: dict[int, tuple[int, int]] = {}
    launched: dict[int, int] = {}  # correlation → when the host launched it
    for e in events:
        if on_device[e]:
            continue
        if e.name().startswith(MARK):
            ranges[int(e.name().removeprefix(MARK))] = (e.start_ns(), e.start_ns() + e.duration_ns())
        elif e.name().startswith("cu"):  # cudaLaunchKernel, cuLaunchKernelEx, …
            launched[e.correlation_id()] = e.start_ns()
    if sorted(ranges) != list(range(count)):
        return None
    starts = np.array([ranges[i][0] for i in range(count)])
    stops = np.array([ranges[i][1] for i in range(count)])
    first, spent = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    for e in events:
        at = launched.get(e.correlation_id()) if on_device[e] and not e.name().startswith(MARK) else None
        if at is None:
            continue
        i = int(np.searchsorted(starts, at, side="right")) - 1
        if i >= 0 and at <= stops[i]:
            first[i] = min(first[i], e.start_ns())
            spent[i] += e.duration_ns()
    if not (spent > 0).all():
        return None
    return [(max(a - int(starts[0]), 0) / 1e3, d / 1e3) for a, d in zip(first.tolist(), spent.tolist())]


# ---- the job ----


def profiled_step(job: Job) -> Iterator[tuple[float, str]]:
    """The job's slices. A step that cannot be profiled ends it with a note."""
    core = job.core
    device = core.runner.device
    if device.type == "cuda":
        yield 0.0, "Starting the profiler"
        attach(core.runner)
    probe = ProfileProbe(device)
    job.probe, job.waits = probe, True
    while job.record is None:
        yield 0.1, "Waiting for the next step"
    if job.record.error is not None or job.record.plan.step_id != probe.step_id:
        job.note = "The step that was to be profiled failed. Try another one."
        return
    try:
        job.publish(profile_of(probe, job.record, device_name(device), core.config.source.dtype))
    except EngineError as error:
        job.note = error.sentence


def profile_of(probe: ProfileProbe, record: Record, device: str, dtype: str) -> StepProfile:
    """Raises EngineError "profile_incomplete"."""
    if probe.device.type == "cuda" and probe.device_times is None:
        raise EngineError("profile_incomplete", "The profiler lost kernels of that step. Profile another one.")
    began = probe.calls[0].start if probe.calls else 0.0
    host = [((c.start - began) * 1e6, (c.stop - c.start) * 1e6) for c in probe.calls]
    ops = [
        OpTime(c.name, c.layer, start, spent, host_us, *probe.work_of(c))
        for c, (start, spent), (_, host_us) in zip(probe.calls, probe.device_times or host, host, strict=True)
    ]
    works = record.plan.works
    decode = sum(w.num_tokens for w in works if w.num_tokens - w.num_draft == 1)
    return StepProfile(probe.step_id, device, dtype, probe.wall_s * 1e6, record.plan.num_tokens - decode, decode, len(works), tuple(ops))
