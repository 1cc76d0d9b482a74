"""Device work that is not a step: queued, run on the engine's thread between steps, cancellable, bounded.

A job is a generator over the core that yields (fraction done, text) after each slice; what it finds goes into
the trace as artifacts. Adding a job is one function in JOBS.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping

from engine.core import EngineCore
from engine.errors import EngineError
from engine.ops import choose_ops
from engine.probe import POINTS, Probe
from engine.recorder import Record
from engine.runner import DTYPES

TIMEOUT_S = 20.0
_numbers = itertools.count(1)


class Job:
    """A running job. `probe_for` lets it look into the next step; `saw` tells it what that step was."""

    def __init__(self, name: str, work: Callable[[Job], Iterator[tuple[float, str]]], timeout: float = TIMEOUT_S) -> None:
        self.number = next(_numbers)
        self.name = name
        self.fraction, self.text = 0.0, name
        self.probe: Probe | None = None
        self.room = "main"
        self.record: Record | None = None
        self._artifacts: list[object] = []
        self._deadline = time.monotonic() + timeout
        self._work = work(self)

    def advance(self) -> bool:
        """One slice; True when it is over (done, failed or out of time)."""
        if time.monotonic() > self._deadline:
            self._work.close()
            return True
        try:
            self.fraction, self.text = next(self._work)
            return False
        except StopIteration:
            return True

    def publish(self, artifact: object) -> None:
        self._artifacts.append(artifact)

    def take_artifacts(self) -> list[object]:
        taken = self._artifacts[:]
        self._artifacts.clear()
        return taken

    def probe_for(self, room: str) -> Probe | None:
        """The probe that the next step of `room` should carry."""
        return self.probe if room == self.room and self.record is None else None

    def saw(self, record: Record) -> None:
        if self.probe is not None and self.record is None:
            self.record = record


def start_job(core: EngineCore, name: str, args: Mapping[str, object]) -> Job:
    """Raises EngineError for an unknown job or bad arguments."""
    make = JOBS.get(name)
    if make is None:
        raise EngineError("unknown_job", f"There is no job called {name!r}.", name=str(name)[:80])
    return make(core, **args)


def probe_step(core: EngineCore, points: tuple[str, ...] = POINTS, layers: tuple[int, ...] = (0,)) -> Job:
    """Keep named tensors of the next step; they appear in the trace as TensorSamples of that step."""
    unknown = [p for p in points if p not in POINTS]
    if unknown:
        raise EngineError("unknown_probe", f"There is no probe point called {unknown[0]!r}.", name=unknown[0])

    def work(job: Job) -> Iterator[tuple[float, str]]:
        job.probe = Probe(frozenset(points), frozenset(layers))
        while job.record is None:
            yield 0.0, "waiting for the next step"

    return Job("probe", work)


def check_kernels(core: EngineCore) -> Job:
    """Each kernel in use against its reference again; KernelReports go into the trace."""

    def work(job: Job) -> Iterator[tuple[float, str]]:
        yield 0.0, "checking kernels"
        source = core.config.source
        for report in choose_ops(source.backend, core.runner.device, DTYPES[source.dtype])[1]:
            job.publish(report)

    return Job("check_kernels", work)


JOBS: dict[str, Callable[..., Job]] = {"probe": probe_step, "check_kernels": check_kernels}
