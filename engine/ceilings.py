"""The job `ceilings`: what this device can do at most, measured in about two seconds.

Copies of several times the caches give the memory's bandwidth (bytes read + written), smaller ones that of the caches; a large
square matmul gives the arithmetic. Best of repeated runs: a ceiling is not an average. Sizes follow the device and stay
within its free memory. Knows no kernels of ours.

On a CPU the caches are measured on one core with memmove, less the time of a call that copies next to nothing; memory and
matmul with torch on all its threads. Rejected: datasheet figures (this machine is the one that runs), numpy for the
small copies (its own loop, not the cache, was the limit: 25 to 33 GB/s at every size).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.artifacts import Ceilings
from engine.build import device_name
from engine.clock import graph_us, median_us
from engine.runner import free_bytes

if TYPE_CHECKING:
    from engine.jobs import Job

SLICE_S = 0.15  # a measurement's share of the engine's thread before the next step
CPU_COPY_BYTES = 256 * 2**20  # at least; both buffers together
GPU_COPY_BYTES = 2 * 2**30
LINE = 64  # bytes
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def measured_ceilings(job: Job) -> Iterator[tuple[float, str]]:
    """The job's slices, one measurement each."""
    device, dtype = job.core.runner.device, job.core.config.source.dtype
    python_us = _python_us()
    yield 0.1, "Measuring this machine: a Python loop, a launch"
    launch_us = _launch_us(device)
    yield 0.2, "Measuring this machine: the caches"
    levels = []
    for name, size, rate in _cache_levels(device):
        levels.append((name, size, rate))
        yield 0.2 + 0.1 * len(levels), "Measuring this machine: the caches"
    size, copy_gbps = _memory(device)
    levels.append(("memory", size, copy_gbps))
    yield 0.7, "Measuring this machine: a large matmul"
    tflops = _matmul(device, dtype)
    job.publish(Ceilings(device_name(device), dtype, copy_gbps, tflops, launch_us, python_us, tuple(levels)))


def _best(run: Callable[[], object], times: int, seconds: float = SLICE_S) -> float:
    """Seconds of the fastest of at most `times` runs, at least two."""
    best, deadline = float("inf"), time.perf_counter() + seconds
    for i in range(times):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
        if i and time.perf_counter() > deadline:
            break
    return best


def _python_us() -> float:
    def loop() -> None:
        for _ in range(20_000):
            pass

    return _best(loop, 20) / 20_000 * 1e6


def _launch_us(device: torch.device) -> float:
    """The host's time to call a torch operation on one number (on a GPU: to launch its kernel)."""
    x = torch.zeros(1, device=device)

    def calls() -> None:
        for _ in range(200):
            x.add_(1.0)

    calls()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _best(calls, 20) / 200 * 1e6


# ---- memory ----


def _memory(device: torch.device) -> tuple[int, float]:
    """(bytes of both buffers, GB/s)."""
    if device.type == "cuda":
        half = min(GPU_COPY_BYTES, free_bytes(device) // 4) // 2
        return 2 * half, _copy_on_gpu(device, half, 1)
    largest = max((size for _, size in cpu_caches()), default=0)
    half = min(max(CPU_COPY_BYTES, 8 * largest), free_bytes(device) // 4) // 2 // LINE * LINE
    a, b = (torch.empty(half // 4) for _ in range(2))
    a.fill_(1.0)
    b.copy_(a)
    return 2 * half, 2 * half / _best(lambda: b.copy_(a), 6, 0.6) / 1e9


def _cache_levels(device: torch.device) -> Iterator[tuple[str, int, float]]:
    """(name, working set, GB/s) of each cache."""
    if device.type == "cuda":
        l2 = int(torch.cuda.get_device_properties(device).L2_cache_size)
        yield "L2", l2 // 2, _copy_on_gpu(device, l2 // 4, 20)
        return
    nothing = _memmove(LINE, LINE, 0.0)
    for name, size in cpu_caches():
        half = size * 3 // 8 // LINE * LINE
        yield f"{name}, one core", 2 * half, 2 * half / _memmove(half, half, nothing) / 1e9


def cpu_caches() -> list[tuple[str, int]]:
    """("L1", bytes), … that Linux tells of; the instructions' is none of them."""
    found = {}
    for folder in sorted(CACHES.glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                found[f"L{int(level)}"] = int(size.rstrip("K")) * 1024
        except (OSError, ValueError):
            continue
    return sorted((name, size) for name, size in found.items() if 4096 <= size <= 2**30)


def _memmove(length: int, apart: int, nothing: float) -> float:
    """Seconds of copying `length` bytes by as much, less `nothing`; never below a thousandth of it."""
    data = np.ones(length + apart + 4096, np.uint8)
    at = data.ctypes.data + -data.ctypes.data % 4096
    times, copy = max(1, 2_000_000 // length), ctypes.memmove
    times = min(times, 5000)

    def copies() -> None:
        for _ in range(times):
            copy(at, at + apart, length)

    spent = _best(copies, 30) / times
    return max(spent - nothing, spent / 10)


def _copy_on_gpu(device: torch.device, half: int, copies: int) -> float:
    """GB/s of copying `half` bytes, `copies` times in one CUDA graph, so that no launch is in the way."""
    a = torch.ones(half // 4, device=device)
    b = torch.empty_like(a)
    return 2 * half / graph_us(lambda: b.copy_(a), device, copies) / 1e3


# ---- arithmetic ----


def _matmul(device: torch.device, dtype: str) -> float:
    """TFLOP/s of a square matmul in the engine's type."""
    kind = getattr(torch, dtype)
    if device.type == "cuda":
        n = 8192
        a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * n**3 / median_us(lambda: torch.mm(a, b, out=out), device, 0.3) / 1e6
    n = 768
    a, b = (torch.randn(n, n).to(kind) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    return 2 * n**3 / _best(lambda: torch.mm(a, b, out=out), 10, 0.4) / 1e12
