"""Sessions of torch.profiler with CUPTI, alike for everybody who takes one. Knows no steps, marks or names.

CUDA graphs that were captured before the first session of a process are unknown to CUPTI, and some versions of torch fail to
replay them once it has been taken down (pytorch#75504): `attach` has them captured again, and CUPTI stays up.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

WARM_UP = 8  # launches with which a session begins: CUPTI may lose the first ones


class Session:
    """Between start() and stop() every launch and kernel of this process is seen."""

    def __init__(self) -> None:
        os.environ.setdefault("TEARDOWN_CUPTI", "0")  # torch/profiler/profiler.py says the same of graphs
        kinds = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])

    def start(self, device: torch.device) -> None:
        self._profile.start()
        x = torch.zeros(1, device=device)
        for _ in range(WARM_UP):
            x.add_(1.0)
        torch.cuda.synchronize(device)

    def stop(self, device: torch.device) -> list:
        """Kineto's events. Also to be called where what was watched raised."""
        try:
            torch.cuda.synchronize(device)
        finally:
            self._profile.stop()
        return list(self._profile.profiler.kineto_results.events())


def with_profiler(device: torch.device, run: Callable[[], object]) -> list:
    """Kineto's events of what `run` does."""
    session = Session()
    session.start(device)
    try:
        run()
    finally:
        events = session.stop(device)
    return events


def attach(runner) -> None:
    """Before a session of the engine's process: graphs that no session has seen are captured again, between steps."""
    if runner.device.type == "cuda" and not runner.profiled:
        with_profiler(runner.device, lambda: None)
        runner.drop_graphs()
        runner.profiled = True
