"""The job `kernel`: runs a kernel on chosen shapes, checks it against its reference, and times it.

Kernel, graph replay, torch operations and a Python loop are timed on the same inputs; where no GPU is, the kernel and its
error are missing, and said so by None and NaN. Shapes may be a visitor's: names, types and sizes are checked before
anything is allocated. Rejected: eval of a shape text, and allocating first.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.artifacts import KernelRun
from engine.build import device_name
from engine.clock import graph_us, median_us
from engine.core import EngineCore
from engine.errors import EngineError, reason_of
from engine.kernel_cards import MAX_FLOPS, MAX_INPUT_BYTES, attention_size, fits, said
from engine.ops import distance, outputs_of
from kernels.registry import load_specs
from kernels.spec import Case, KernelSpec

if TYPE_CHECKING:
    from engine.jobs import Job

MAX_DIM, MAX_TEXT = 2**24, 500
LOOP_S, LOOP_SLICE_S = 0.5, 0.05
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# ---- sizes ----


class _Counter(TorchDispatchMode):
    """Adds up what is allocated, and the largest single tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.seen[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return out


def input_bytes(spec: KernelSpec, dims: Mapping[str, object], dtype: torch.dtype) -> int:
    """About what make_inputs allocates at a time, without allocating it. Raises what make_inputs raises."""
    if "sequences" in dims:
        return attention_size(dims, dtype.itemsize)[0]
    with FakeTensorMode(), _Counter() as counter:
        kept = spec.make_inputs("cpu", dtype, 0, **dims)
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in kept.values() if isinstance(x, torch.Tensor)}
    return sum(storages.values()) + max(counter.seen.values(), default=0)


# ---- what was asked for ----


def chosen(
    core: EngineCore, name: str, case: str | None, dims: Mapping[str, object] | None, dtype: str | None
) -> tuple[KernelSpec, Case, torch.dtype]:
    """What to run. Raises EngineError "unknown_kernel", "unknown_case", "bad_shapes", "shapes_too_large"."""
    spec = load_specs().get(name) if isinstance(name, str) else None
    if spec is None:
        raise EngineError("unknown_kernel", f"There is no kernel called {str(name)[:40]!r}.", name=str(name)[:40])
    kind = DTYPES.get(core.config.source.dtype if dtype is None else dtype if isinstance(dtype, str) else "")
    if kind is None or kind not in spec.tolerance:
        known, got = ", ".join(str(d)[6:] for d in spec.tolerance), str(dtype)[:40]
        raise EngineError("bad_shapes", f"{spec.name} runs in {known}, not in {got}.", kernel=spec.name, dtypes=known)
    cases = (*spec.bench_cases, *spec.cases)
    if dims is not None:
        found = Case("chosen", _checked(spec, dims))
    elif case is None:
        found = next(c for c in cases if fits(spec, c, core.runner.device.type) and (not c.dtypes or kind in c.dtypes))
    else:
        found = next((c for c in cases if c.name == case), None)
        if found is None:
            sentence = f"{spec.name} has no case called {str(case)[:40]!r}."
            raise EngineError("unknown_case", sentence, kernel=spec.name, name=str(case)[:40])
    if found.dtypes and kind not in found.dtypes:
        known = ", ".join(str(d)[6:] for d in found.dtypes)
        raise EngineError("bad_shapes", f"The case {found.name} runs in {known} only.", kernel=found.name, dtypes=known)
    _check_size(spec, found, kind, core.runner.device.type)
    return spec, found, kind


def _checked(spec: KernelSpec, dims: object) -> dict[str, object]:
    """Dimensions of somebody's own: known names, right types, nothing beyond all bounds."""
    known = list(inspect.signature(spec.make_inputs).parameters.values())[3:]
    if not isinstance(dims, Mapping) or any(name not in [p.name for p in known] for name in dims):
        names = ", ".join(p.name for p in known)
        raise EngineError("bad_shapes", f"{spec.name} takes the dimensions {names}.", kernel=spec.name, dims=names)
    missing = ", ".join(p.name for p in known if p.default is p.empty and p.name not in dims)
    if missing:
        raise EngineError("bad_shapes", f"{spec.name} needs a value for {missing}.", kernel=spec.name, missing=missing)
    for p in known:
        if p.name not in dims:
            continue
        value, optional = dims[p.name], p.default in (0, "") and p.default is not p.empty
        ok = {
            "int": isinstance(value, int) and not isinstance(value, bool) and (0 if optional else 1) <= value <= MAX_DIM,
            "float": isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and abs(value) <= 1e6,
            "bool": isinstance(value, bool),
            "str": isinstance(value, str) and len(value) <= MAX_TEXT and (optional or bool(value.strip())),
        }.get(str(p.annotation), False)
        if not ok:
            got = str(value)[:40]
            raise EngineError("bad_shapes", f"{p.name} of {spec.name} cannot be {got!r}.", kernel=spec.name, name=p.name, value=got)
    return dict(dims)


def _check_size(spec: KernelSpec, case: Case, dtype: torch.dtype, device: str) -> None:
    if case in spec.cases:
        return
    try:
        size = input_bytes(spec, case.dims, dtype)
        flops = attention_size(case.dims, dtype.itemsize)[1] if "sequences" in case.dims else 0
    except Exception as error:
        sentence = f"{spec.name} cannot be run on these shapes: {reason_of(error)}."
        raise EngineError("bad_shapes", sentence, kernel=spec.name, reason=reason_of(error)) from error
    most = MAX_INPUT_BYTES[device]
    if size > most:
        sentence = f"These shapes need {size / 2**20:,.0f} MiB; at most {most / 2**20:,.0f} MiB may be used here. Choose smaller ones."
        raise EngineError("shapes_too_large", sentence, mib=-(-size // 2**20), limit=most // 2**20)
    if flops > MAX_FLOPS[device]:
        sentence = f"These shapes take {flops / 1e9:,.0f} GFLOP a run, which is too long here. Choose smaller ones."
        raise EngineError("shapes_too_large", sentence, gflop=round(flops / 1e9))


# ---- the job ----


def kernel_run(job: Job, spec: KernelSpec, case: Case, dtype: torch.dtype) -> Iterator[tuple[float, str]]:
    """The job's slices. What cannot be run ends it with a note."""
    try:
        yield from _run(job, spec, case, dtype)
    except torch.cuda.OutOfMemoryError:
        job.note = f"There is not enough memory to run {spec.name} on these shapes."
    except (ValueError, RuntimeError, AssertionError, IndexError, TypeError) as error:
        job.note = f"{spec.name} could not be run on these shapes: {reason_of(error)}."


def _run(job: Job, spec: KernelSpec, case: Case, dtype: torch.dtype) -> Iterator[tuple[float, str]]:
    device = job.core.runner.device
    on_gpu = device.type == "cuda"
    yield 0.05, f"Making inputs for {spec.name}"
    inputs = spec.make_inputs(str(device), dtype, 0, **case.dims)
    flops, moved, steps = spec.flops(inputs), spec.bytes(inputs), spec.loop_iterations(inputs) if spec.loop_iterations else 0
    if flops > MAX_FLOPS[device.type]:
        job.note = f"These shapes take {flops / 1e9:,.0f} GFLOP a run, which is too long here. Choose smaller ones."
        return
    error, kernel_us, replay_us = float("nan"), None, None
    if on_gpu:
        yield 0.15, f"Checking {spec.name} against its reference"
        want = outputs_of(spec, spec.ref, spec.make_inputs(str(device), dtype, 0, **case.dims))
        got = outputs_of(spec, spec.fn, spec.make_inputs(str(device), dtype, 0, **case.dims))
        error = max((distance(a.float(), b.float()) for a, b in zip(got, want, strict=True)), default=0.0)
        del want, got
        yield 0.3, f"Timing {spec.name}"
        kernel_us = median_us(lambda: spec.fn(**inputs), device)
        yield 0.45, f"Timing {spec.name} in a CUDA graph"
        replay_us = _in_a_graph(spec, inputs, device)
    yield 0.6, f"Timing {spec.name} as torch operations"
    torch_us = median_us(lambda: spec.ref(**inputs), device, most=30)
    loop_us, ran = None, 0
    if spec.loop is not None:
        clock = _LoopClock(spec.loop(**spec.make_inputs(str(device), dtype, 0, **case.dims)), device)
        while clock.slice():
            yield 0.75, f"Timing {spec.name} as a Python loop"
        loop_us, ran = clock.us, clock.ran
    job.publish(
        KernelRun(
            spec.name, case.name, said(case.dims)[:2000], str(dtype)[6:], device_name(device), error, spec.tolerance[dtype],
            int(flops), int(moved), kernel_us, replay_us, torch_us, loop_us, int(steps), ran,
        )
    )  # fmt: skip


def _in_a_graph(spec: KernelSpec, inputs: dict, device: torch.device) -> float | None:
    """None where it cannot be captured."""
    try:
        return graph_us(lambda: spec.fn(**inputs), device)
    except RuntimeError:
        return None


class _LoopClock:
    """Runs a kernel's Python loop for LOOP_S in all, a slice at a time."""

    def __init__(self, loop: Iterator, device: torch.device) -> None:
        self._loop, self._device = loop, device
        self.ran, self._spent = 0, 0.0

    def slice(self) -> bool:
        """Whether there is more to run."""
        began, more = time.perf_counter(), True
        while more and time.perf_counter() - began < LOOP_SLICE_S:
            try:
                next(self._loop)
                self.ran += 1
            except StopIteration:
                more = False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._spent += time.perf_counter() - began
        return more and self._spent < LOOP_S

    @property
    def us(self) -> float | None:
        return self._spent / self.ran * 1e6 if self.ran else None
