"""Named ranges around the stages of a step and the operations of a layer; where they are not on, nothing of this runs.

`watch(core, sink)` puts calls of sink.begin(name) and sink.end() around what the core calls anyway: schedule, build,
launch, sync, commit, and with `operations` every operation of an eager step, by its name and layer. It wraps methods of this
core's own objects, so that the step itself has no branch for it. `nvtx_sink()` makes them NVTX ranges, which Nsight Systems
shows by the same names as the page; engine/timeline.py times them. A replayed graph is one launch: its operations
have no ranges, and it is the timeline that names its kernels.

Rejected: a context manager in each stage of engine/core.py (some microseconds a step for those who never look).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from engine.errors import EngineError
from engine.ops import CALLED
from engine.probe import NO_PROBE, Parts

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.rooms import Room
    from engine.runner import ModelRunner

Call = Callable[[str, int, Callable[[], object]], object]  # (operation, layer, run) -> what run returns


class Sink(Protocol):
    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


def nvtx_sink() -> Sink:
    """NVTX ranges. Raises EngineError "no_nvtx" where torch has none."""
    try:
        return _Nvtx()
    except RuntimeError as error:
        raise EngineError("no_nvtx", "This torch was built without NVTX. Start without --nvtx.") from error


class _Nvtx:
    def __init__(self) -> None:
        self.begin, self.end = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
        self.begin("glass: ranges are on")  # where torch was built without NVTX this raises, and not in the first step
        self.end()


class _Settles:
    """A launched step whose settle() has a range."""

    def __init__(self, pending: object, watch: Watch) -> None:
        self._pending, self._watch = pending, watch

    def settle(self) -> object:
        with self._watch.within("sync"):
            return self._pending.settle()

    def __getattr__(self, name: str) -> object:
        return getattr(self._pending, name)


class Watch:
    """Invariant: every begin has its end, also where a stage raises; `undo` leaves all objects as they were."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._builds = False
        self._replaced: list[tuple[object, str]] = []

    @contextmanager
    def within(self, name: str):
        """A range. What lies between the plan and the launch is "build"."""
        self.end_build()
        self.sink.begin(name)
        try:
            yield
        finally:
            self.sink.end()

    def end_build(self) -> None:
        """The step launches, or launches nothing."""
        if self._builds:
            self._builds = False
            self.sink.end()

    def _replace(self, owner: object, name: str, value: object) -> None:
        setattr(owner, name, value)
        self._replaced.append((owner, name))

    def undo(self) -> None:
        self.end_build()
        for owner, name in reversed(self._replaced):
            delattr(owner, name)  # the class's own shows again
        self._replaced.clear()

    def room(self, room: Room) -> None:
        scheduler = room.scheduler
        if "schedule" in vars(scheduler):
            return
        schedule, commit = scheduler.schedule, scheduler.commit

        def planned(*args, **kwargs):
            with self.within("schedule"):
                plan = schedule(*args, **kwargs)
            self.sink.begin("build")
            self._builds = True
            return plan

        def committed(*args, **kwargs):
            with self.within("commit"):
                return commit(*args, **kwargs)

        self._replace(scheduler, "schedule", planned)
        self._replace(scheduler, "commit", committed)

    def runner(self, runner: ModelRunner, operations: bool = False) -> None:
        run, run_several, make_parts = runner.run, getattr(runner, "run_several", None), getattr(runner, "_parts", None)

        def launched(*args, **kwargs):
            with self.within("launch"):
                return _Settles(run(*args, **kwargs), self)

        def launched_together(*args, **kwargs):
            steps = run_several(*args, **kwargs)
            while True:
                with self.within("launch"):
                    pending = next(steps, None)
                if pending is None:
                    return
                yield _Settles(pending, self)

        self._replace(runner, "run", launched)
        if run_several is not None:
            self._replace(runner, "run_several", launched_together)
        if operations and make_parts is not None:
            self._replace(runner, "_parts", lambda host, probe: named_parts(make_parts(host, probe), self.call))

    def core(self, core: EngineCore, operations: bool) -> None:
        """All rooms, also those that open later."""
        self.runner(core.runner, operations)
        step = core.step

        def stepped(room: str | None = None, probe=NO_PROBE, alone: bool = False):
            for each in core.rooms.values():
                self.room(each)
            self.end_build()
            self.sink.begin("step")
            try:
                return step(room, probe, alone)
            finally:
                self.end_build()
                self.sink.end()

        self._replace(core, "step", stepped)

    def call(self, name: str, layer: int, run: Callable[[], object]) -> object:
        self.sink.begin(f"layer {layer}: {name}")
        try:
            return run()
        finally:
            self.sink.end()


def watch(core: EngineCore, sink: Sink, operations: bool = True) -> Watch:
    """Ranges around everything that this core does from now on."""
    made = Watch(sink)
    made.core(core, operations)
    return made


# ---- operations by name ----


def named_parts(parts: Parts, call: Call) -> Parts:
    """The parts of a step with `call` around each operation: kernels go by their own names, matmuls by their weight's."""
    known = weights_of(parts.model)
    after = max((layer for _, layer in known.values()), default=0)
    on_reference, at = parts.ops.backend == "torch", [0]

    def named(name: str, operation: Callable, is_matmul: bool) -> Callable:
        def run(*args, **kwargs):
            field, at[0] = next((known[id(a)] for a in args if id(a) in known), (name, at[0]))
            return call(field if is_matmul else name, at[0], lambda: operation(*args, **kwargs))

        return run

    wrapped = {}
    for name in (*CALLED, "linear"):
        shown = "attention" if on_reference and name.startswith("flash_") else name
        wrapped[name] = named(shown, getattr(parts.ops, name), name == "linear")
    ops, attention = replace(parts.ops, **wrapped), copy.copy(parts.attention)
    attention.ops = ops
    sample = parts.sample
    return Parts(_Named(parts.model, call, after), attention, ops, lambda logits, rows: call("sample", after, lambda: sample(logits, rows)))


class _Named:
    """A model whose LM head is an operation too."""

    def __init__(self, model: object, call: Call, after: int) -> None:
        self._model, self._call, self._after = model, call, after

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._call("lm_head", self._after, lambda: self._model.logits(hidden))

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def weights_of(model) -> dict[int, tuple[str, int]]:
    """id of each weight → (its field, layer); what comes before the layers counts as the first, what comes after them as
    one behind the last."""
    found = {}
    for index, layer in enumerate(model.layers):
        names = [f.name for f in fields(layer)] if is_dataclass(layer) else list(vars(layer))
        for name in names:
            value = getattr(layer, name)
            if isinstance(value, torch.Tensor):
                found[id(value)] = (name, index)
    found[id(model.norm)] = ("norm", len(model.layers))
    found[id(model.embedding)] = ("embedding", 0)
    return found
