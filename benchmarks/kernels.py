"""The figures with a target (kernel_targets.py), then every kernel on its SPEC's bench_cases, against its reference.

    python -m benchmarks.kernels [--device cpu|cuda] [--only targets|KERNEL]

On CUDA bfloat16, triton.testing.do_bench (cold L2; a call shorter than its launch measures the launch). On a CPU the
kernels cannot run: the references are timed in float32, and cases too large for it are left out. GB/s and TFLOP/s are
the SPEC's formulas over the measured time. Each figure is the median of alternating runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from triton.testing import do_bench

from benchmarks.kernel_targets import targets
from benchmarks.report import Report, main
from engine.build import device_name, settle_source
from engine.config import ModelSource
from kernels.registry import load_specs
from kernels.spec import Case, KernelSpec

RUNS = 5
CPU_FLOPS, CPU_BYTES = 10**10, 5 * 10**8  # a case with more takes minutes on a CPU


def seconds(call: Callable[[], object], device: str) -> float:
    """Median time of a call."""
    if device == "cuda":
        return do_bench(call, return_mode="median") / 1e3
    call()
    times, started = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - started < 0.2 and len(times) < 1000):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def measure(report: Report, spec: KernelSpec, case: Case, device: str) -> None:
    """Time, bandwidth and arithmetic of one case."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = spec.make_inputs(device, dtype, 0, **case.dims)
    flops, moved, name = spec.flops(inputs), spec.bytes(inputs), f"{spec.name}_{case.name}"
    if device == "cpu" and (flops > CPU_FLOPS or moved > CPU_BYTES):
        print(f"{name}: too large for a CPU")
        return
    calls = {who: partial(getattr(spec, who), **inputs) for who in (("ref",) if device == "cpu" else ("fn", "ref"))}
    times: dict[str, list[float]] = {who: [] for who in calls}
    for run in range(RUNS):
        for who in list(calls)[:: -1 if run % 2 else 1]:
            times[who].append(seconds(calls[who], device))
    own, ref = times.get("fn", times["ref"]), statistics.median(times["ref"])
    dims = ", ".join(f"{key} {value}" for key, value in case.dims.items())
    note = ("Triton kernel, " if "fn" in calls else "torch reference, ") + f"{str(dtype).removeprefix('torch.')}: {dims}"

    def add(unit: str, suffix: str, figure: Callable[[float], float], higher: bool) -> None:
        peers = {"torch reference": figure(ref)} if "fn" in calls else {}
        report.add(f"{name}_{suffix}", [figure(t) for t in own], unit, higher_is_better=higher, peers=peers, note=note)

    add("µs", "us", lambda t: t * 1e6, False)
    add("GB/s", "gbps", lambda t: moved / t / 1e9, True)
    if flops and device == "cuda":
        add("TFLOP/s", "tflops", lambda t: flops / t / 1e12, True)


def kernel(spec: KernelSpec, report: Report, args: argparse.Namespace) -> None:
    """Every bench_case of a kernel."""
    device = settle_source(ModelSource(device=args.device)).device
    with torch.inference_mode():
        for case in spec.bench_cases:
            measure(report, spec, case, device)


ITEMS = {"targets": targets} | {name: partial(kernel, spec) for name, spec in load_specs().items()}

if __name__ == "__main__":
    raise SystemExit(main("kernels", ITEMS, lambda args: device_name(torch.device(settle_source(ModelSource(device=args.device)).device))))
