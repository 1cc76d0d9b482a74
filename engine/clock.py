"""Times a function on a device: the median of repeated runs, each with cold caches on a GPU. Knows no kernels.

On a GPU events bracket each run, and a buffer larger than the L2 is cleared before it, so that a run reads from memory
as it does within a step. Rejected: the mean (one interruption spoils it), one event pair around many runs (warm caches).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20  # larger than any L2


def median_us(run: Callable[[], object], device: torch.device, seconds: float = 0.1, most: int = 100) -> float:
    """Microseconds of one run: at least three runs, at most `most`, for about `seconds`. The first one warms up."""
    if device.type == "cuda":
        return _on_cuda(run, device, seconds, most)
    run()
    times, deadline = [], time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < most):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _on_cuda(run: Callable[[], object], device: torch.device, seconds: float, most: int) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    run()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    flush.zero_()
    run()
    torch.cuda.synchronize(device)
    count = max(3, min(most, int(seconds / max(time.perf_counter() - began, 1e-6))))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, stop in pairs:
        flush.zero_()
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(stop) for start, stop in pairs) * 1e3


def graph_us(run: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    """Microseconds of one run when `runs` of them are replayed in a CUDA graph: no launch from the host, warm caches."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    graph.replay()
    times = []
    for _ in range(7):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(stop) * 1e3 / runs)
    return statistics.median(times)
