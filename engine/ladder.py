"""The job `ladder`: the same requests on one rung after another, from transformers' `generate` to everything switched on.

Every rung gets the same prompts, all at once, greedy, and makes the same number of tokens of each; its tokens are compared
with the first rung's and differences are counted. A rung runs as often as a second allows, at most five times; the run
in the middle is kept. Before that it runs once unmeasured (kernels compile, graphs are captured). A rung that has ended is
published at once: the LadderRun so far, which replaces the one before.

Time is that of the rung alone: clocks stand still between two slices, in which other rooms take their steps. A slice is
one call of `generate`, or two seconds of engine steps. The size of the workload follows the machine: the slowest rung, which
computes everything anew for each token, is tried with three tokens, and as many are asked for as `seconds` allow.

Knows no pictures; where another implementation comes from is `core.peer`'s (engine/peer.py). Rejected: sizes by device name,
rungs that take turns (each would pay for the other's cold caches), a peer's batching (its own server is another program).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from engine.artifacts import LadderRun, Rung
from engine.build import device_name
from engine.config import EngineConfig, with_knob
from engine.cupti import attach, with_profiler
from engine.errors import EngineError, reason_of, tell
from engine.messages import Prompt
from engine.peer import Late
from engine.request import Request, SamplingParams
from engine.runner import free_bytes

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.jobs import Job

LADDER_S = 180.0
SECONDS = 10.0  # that the slowest rung should take
RUNG_S = 60.0  # and no rung more than this
SLICE_S = 2.0
SIZES = (8, 12, 16, 24, 32, 48)  # tokens a request
MOST_REQUESTS = {"cpu": 4, "cuda": 8}
REPEATS, REPEAT_S = 5, 1.0
TRIAL = 3  # tokens
PROFILED = 8  # decode steps under the profiler
CHANGED = "A knob that all rooms share was turned meanwhile."

ALONE = {
    "mode": "contiguous", "batching": "static", "max_num_seqs": 1, "max_num_batched_tokens": 512, "prefix_caching": False,
    "chunked_prefill": True, "cuda_graphs": False, "run_ahead": 0,
}  # fmt: skip
TOGETHER = ALONE | {"mode": "paged", "batching": "continuous", "max_num_seqs": max(MOST_REQUESTS.values())}


@dataclass(frozen=True, slots=True)
class Way:
    """A rung as it is run. `caches`: of the peer's `generate`; None: our engine, with these knobs and with or without fused
    kernels. `lacks`: (core) -> why it cannot run here (RUNG_REASONS), "" where it can."""

    name: str
    switched: tuple[str, ...]
    caches: bool | None = None
    knobs: Mapping[str, object] = field(default_factory=dict)
    fused: bool = False
    lacks: Callable[[EngineCore], str] = lambda core: ""


def _no_peer(core: EngineCore) -> str:
    if core.peer is None:
        return "no_peer"
    weights = sum(w.nbytes for w in _weights(core.runner.model)) if hasattr(core.runner, "model") else 0
    return "no_memory" if 1.5 * weights > free_bytes(core.runner.device) else ""


def _weights(model: object) -> list[torch.Tensor]:
    parts = [model, *getattr(model, "layers", ())]
    found = {id(t): t for part in parts for t in _tensors(part)}
    return list(found.values())


def _tensors(part: object) -> list[torch.Tensor]:
    names = getattr(part, "__dataclass_fields__", None) or vars(part)
    return [value for name in names if isinstance(value := getattr(part, name), torch.Tensor)]


def _no_kernels(core: EngineCore) -> str:
    return "" if getattr(core.runner, "on_kernels", False) else "no_kernels"


def _no_graphs(core: EngineCore) -> str:
    if not core.config.runner.fused and not _no_kernels(core):
        return "fused_off"  # graphs are captured with the engine's own kernels
    return "" if core.runner.graphs is not None else "no_graphs"


def _no_overlap(core: EngineCore) -> str:
    return _no_graphs(core) if core.runner.device.type == "cuda" else "no_overlap"


WAYS = (
    Way("hf_no_cache", (), caches=False, lacks=_no_peer),
    Way("hf_cache", ("cache",), caches=True, lacks=_no_peer),
    Way("eager", ("engine",), knobs=ALONE),
    Way("batching", ("paged", "batching"), knobs=TOGETHER),
    Way("fused", ("fused",), knobs=TOGETHER, fused=True, lacks=_no_kernels),
    Way("graphs", ("graphs",), knobs=TOGETHER | {"cuda_graphs": True}, fused=True, lacks=_no_graphs),
    Way("overlap", ("run_ahead",), knobs=TOGETHER | {"cuda_graphs": True, "run_ahead": 1}, fused=True, lacks=_no_overlap),
)
assert len({way.name for way in WAYS}) == len(WAYS)


def check(prompts: Sequence[Prompt], seconds: float) -> None:
    """Raises EngineError "bad_ladder"."""
    fits = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds <= RUNG_S
    if not prompts or not all(p.token_ids for p in prompts) or not fits:
        raise EngineError("bad_ladder", "The ladder cannot be run so. Start it from its picture.")


def climbed(job: Job, prompts: Sequence[Prompt], seconds: float) -> Iterator[tuple[float, str]]:
    """The job's slices. What it has measured when it ends early stays."""
    ladder = _Ladder(job, prompts, seconds)
    try:
        yield from ladder.slices()
    except GeneratorExit:
        ladder.end("cancelled")
        raise
    finally:
        ladder.close()


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens and seconds since all requests arrived, a row a request."""

    ids: tuple[tuple[int, ...], ...]
    times: tuple[tuple[float, ...], ...]
    wall_s: float

    @property
    def per_s(self) -> float:
        return sum(map(len, self.ids)) / self.wall_s


class _Ladder:
    """Invariant: what is published names every rung; those that have not ended "wait"."""

    def __init__(self, job: Job, prompts: Sequence[Prompt], seconds: float) -> None:
        self._job, self._core, self._seconds = job, job.core, seconds
        self._device: torch.device = job.core.runner.device
        most = MOST_REQUESTS.get(self._device.type, MOST_REQUESTS["cpu"])
        self._prompts = list(prompts)[:most]
        self._new = SIZES[0]
        self._trial = 0.0  # seconds a token
        self._key, self._first = secrets.token_hex(6), ()
        self._rungs = {way.name: Rung(way.name, way.switched) for way in WAYS}
        self._peer: object | None = None
        self._deadline = time.perf_counter() + LADDER_S

    # ---- from rung to rung ----

    def slices(self) -> Iterator[tuple[float, str]]:
        yield 0.0, "Speed ladder: how much work suits this machine?"
        attach(self._core.runner)  # before graphs are captured for a rung
        yield from self._size()
        self._publish()
        for number, way in enumerate(WAYS):
            if time.perf_counter() > self._deadline:
                return self.end("late")
            if way.caches is None:
                self.close()  # the peer's copy of the weights is not needed any more
            for _ in self._climb(way):
                yield (number + 0.5) / len(WAYS), f"Speed ladder: rung {number + 1} of {len(WAYS)}"
            self._publish()

    def end(self, state: str) -> None:
        """Those that still wait will not be run."""
        if any(rung.state == "waits" for rung in self._rungs.values()) and self._trial:
            self._rungs = {n: replace(r, state=state) if r.state == "waits" else r for n, r in self._rungs.items()}
            self._publish()

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()
            self._peer = None

    def _publish(self) -> None:
        device = device_name(self._device)
        lengths = tuple(len(p.token_ids) for p in self._prompts)
        self._job.publish(
            LadderRun(
                self._key, device, self._core.config.source.dtype, self._prompts[0].prompt, lengths, self._new,
                round(self._trial * 1e6), tuple(self._rungs.values()),
            )
        )  # fmt: skip

    def _size(self) -> Iterator[tuple[float, str]]:
        """Choose how many tokens of how many requests: what the slowest rung can make in its seconds."""
        prompt = self._prompts[0].token_ids
        if not _no_peer(self._core):
            try:
                self._peer = self._core.peer()
            except Exception as error:
                tell(error)
                self._fail(("hf_no_cache", "hf_cache"), f"{reason_of(error)}")
        yield 0.02, "Speed ladder: how much work suits this machine?"
        times: list[float] = []
        for _ in range(2):  # the first warms up
            times = yield from self._try(prompt)
        self._trial = max((times[-1] - times[0]) / (TRIAL - 1), 1e-6)
        for count in range(len(self._prompts), 0, -1):
            sizes = [n for n in SIZES if n * count * self._trial <= self._seconds]
            if sizes and self._fits(count, sizes[-1]):
                break
        self._prompts, self._new = self._prompts[:count], sizes[-1] if sizes else SIZES[0]

    def _try(self, prompt: Sequence[int]) -> Iterator[tuple[float, str]]:
        """Seconds at which each token of a trial came."""
        if self._peer is not None:
            try:
                found = self._peer.generate(prompt, TRIAL, False, time.perf_counter() + RUNG_S)[1]
                yield 0.05, "Speed ladder: how much work suits this machine?"
                return found
            except Exception as error:
                tell(error)
                self._fail(("hf_no_cache", "hf_cache"), f"{reason_of(error)}")
                self.close()
        run = None
        for found in self._steps(WAYS[2], self._prompts[:1], TRIAL):
            run = found
            yield 0.05, "Speed ladder: how much work suits this machine?"
        return list(run.times[0])

    def _fits(self, count: int, new: int) -> bool:
        cache = self._config(WAYS[2]).cache
        pages = sum(-(-(len(p.token_ids) + new) // cache.page_size) for p in self._prompts[:count])
        return pages <= cache.num_pages

    def _fail(self, names: Sequence[str], detail: str) -> None:
        for name in names:
            self._rungs[name] = replace(self._rungs[name], state="failed", detail=detail[:300])

    # ---- one rung ----

    def _climb(self, way: Way) -> Iterator[None]:
        """Slices; its Rung is in place when it has ended."""
        rung = self._rungs[way.name]
        why = "" if rung.state == "failed" else way.lacks(self._core)
        if way.caches is not None and self._peer is None and not why and rung.state != "failed":
            why = "no_peer"
        if why:
            self._rungs[way.name] = replace(rung, state="skipped", why=why)
        if why or rung.state == "failed":
            return
        try:
            yield from self._measure(way)
        except Late:
            self._rungs[way.name] = replace(rung, state="late")
        except EngineError as error:
            self._fail((way.name,), error.sentence)
        except Exception as error:  # the others can still be climbed
            tell(error)
            self._fail((way.name,), f"{reason_of(error)}")

    def _measure(self, way: Way) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        yield from self._prepare(way)
        for _ in self._runs(way, self._prompts, 2, begun):
            yield
        runs: list[_Run] = []
        while not runs or (len(runs) < REPEATS and sum(run.wall_s for run in runs) < REPEAT_S):
            run = None
            for found in self._runs(way, self._prompts, self._new, begun):
                run = found
                yield
            runs.append(run)
        middle = sorted(runs, key=lambda run: run.per_s)[(len(runs) - 1) // 2]
        rung = self._rung(way, middle, runs)
        if self._device.type == "cuda":
            yield
            rung = replace(rung, busy=self._busy(way, rung.each_us))
        self._rungs[way.name] = rung

    def _prepare(self, way: Way) -> Iterator[None]:
        """Graphs must be there before they are timed."""
        graphs = self._core.runner.graphs if way.knobs.get("cuda_graphs") else None
        while graphs is not None and not any(size >= len(self._prompts) for size in graphs.sizes):
            if self._core.runner.capture_next() is None:
                raise EngineError("ladder_stopped", f"The graphs could not be captured: {graphs.failed or 'there are none'}.")
            yield

    def _rung(self, way: Way, run: _Run, runs: Sequence[_Run]) -> Rung:
        self._first = self._first or run.ids
        differ = [sum(a != b for a, b in zip(mine, its)) for mine, its in zip(run.ids, self._first, strict=True)]
        micro = tuple(tuple(round(t * 1e6) for t in row) for row in run.times)
        return Rung(
            way.name, way.switched, "measured", wall_us=max(round(run.wall_s * 1e6), 1), runs=tuple(r.per_s for r in runs),
            token_us=micro, token_ids=run.ids[0], pieces=self._pieces(run.ids[0]),
            num_differ=sum(differ), differing=sum(n > 0 for n in differ),
        )  # fmt: skip

    def _pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """The text that each token of the first request makes certain; the last one's with what was held back."""
        prompt = self._prompts[0]
        text = self._core.housing.new_text(Request(0, "A", prompt.prompt, prompt.token_ids, _greedy(len(ids))))
        found = [text.push(token)[0] for token in ids]
        return (*found[:-1], found[-1] + text.flush()) if found else ()

    # ---- runs: generators of None, and of a _Run at last ----

    def _runs(self, way: Way, prompts: Sequence[Prompt], new: int, begun: float) -> Iterator[_Run | None]:
        made = self._calls(way, prompts, new, begun) if way.caches is not None else self._steps(way, prompts, new, begun)
        yield from made

    def _calls(self, way: Way, prompts: Sequence[Prompt], new: int, begun: float) -> Iterator[_Run | None]:
        """The peer, one request after the other; a slice is a call."""
        ids, rows, at = [], [], 0.0
        for prompt in prompts:
            asked = time.perf_counter()
            tokens, times = self._peer.generate(prompt.token_ids, new, way.caches, begun + RUNG_S)
            rows.append(tuple(at + t - asked for t in times))
            ids.append(tuple(tokens))
            at += time.perf_counter() - asked
            yield None
        yield _Run(tuple(ids), tuple(rows), rows[-1][-1])

    def _steps(self, way: Way, prompts: Sequence[Prompt], new: int, begun: float | None = None) -> Iterator[_Run | None]:
        """Our engine, in a scratch room; a slice is as many steps as two seconds take."""
        begun = time.perf_counter() if begun is None else begun
        room, core = self._job.open_scratch(self._config(way)), self._core
        config, pool, number = room.config, room.scheduler.pool, 1
        ids, rows = [[] for _ in prompts], [[] for _ in prompts]
        inside = 0.0  # seconds of earlier slices
        for prompt in prompts:
            core.add("", prompt.token_ids, _greedy(new), room=room.name)
        while room.has_work:
            with _operations(core.runner, way.fused):
                opened, is_open = time.perf_counter(), True
                while is_open:
                    record = core.step(room.name, alone=True)
                    is_open = room.has_work and time.perf_counter() < opened + SLICE_S
                    now = inside + time.perf_counter() - opened
                    if record is not None and record.error is not None:
                        raise EngineError("ladder_stopped", record.error.sentence)
                    for seq_id, token in record.committed.accepted if record is not None else ():
                        ids[seq_id - number].append(token)
                        rows[seq_id - number].append(now)
                inside += time.perf_counter() - opened
            if time.perf_counter() > begun + RUNG_S:
                raise Late
            yield None
            if room.config != config or room.scheduler.pool is not pool:
                raise EngineError("ladder_stopped", CHANGED)
        core.close_room(room.name)
        yield _Run(tuple(map(tuple, ids)), tuple(map(tuple, rows)), max(row[-1] for row in rows))

    def _config(self, way: Way) -> EngineConfig:
        """The asking room's, with the rung's knobs."""
        config = self._core.rooms[self._job.room].config
        for name, value in way.knobs.items():
            config = with_knob(config, name, value)
        return config

    # ---- how busy the GPU is ----

    def _busy(self, way: Way, each_us: float) -> float | None:
        """Kernel time a token (of one at a time, else of all in a step) over the time between two tokens, which was measured
        without the profiler: attached, it slows the host, not the kernels."""
        try:
            many, few = (self._kernel_us(way, n) for n in (PROFILED + 1, 1))
        except Exception as error:  # a profiler that fails spoils no measurement
            tell(error)
            return None
        if many is None or few is None or not each_us or many <= few:
            return None
        return min((many - few) / PROFILED / each_us, 1.0)

    def _kernel_us(self, way: Way, new: int) -> float | None:
        """µs in which a kernel ran, while a run made so many tokens."""
        prompts = self._prompts[:1] if way.knobs.get("max_num_seqs", 1) == 1 else self._prompts

        def run() -> None:
            for _ in self._runs(way, prompts, new, time.perf_counter()):
                pass

        return kernel_us(with_profiler(self._device, run))


def kernel_us(events: Sequence[object]) -> float | None:
    """µs in which at least one of Kineto's events ran on the device; None where there is none."""
    on_device = [e for e in events if e.device_type() != torch.autograd.DeviceType.CPU and e.duration_ns() > 0]
    total, until = 0, 0
    for start, length in sorted((e.start_ns(), e.duration_ns()) for e in on_device):
        total += max(start + length - max(start, until), 0)
        until = max(until, start + length)
    return total / 1e3 if on_device else None


@contextlib.contextmanager
def _operations(runner: object, fused: bool) -> Iterator[None]:
    """The runner's operations joined or not, for a slice: everybody else's steps find their own."""
    ops, attention = getattr(runner, "ops", None), getattr(runner, "attention", None)
    if ops is None or ops.fused == (fused and runner.on_kernels):
        yield
        return
    before = attention.ops
    runner.ops = replace(ops, fused=fused and runner.on_kernels)
    attention.ops = runner.ops
    try:
        yield
    finally:
        runner.ops, attention.ops = ops, before


def _greedy(new: int) -> SamplingParams:
    return SamplingParams(max_tokens=new, ignore_eos=True)
