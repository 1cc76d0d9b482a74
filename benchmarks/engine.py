"""The engine against transformers in the same process, and against itself with something switched off.

    python -m benchmarks.engine [--device cpu|cuda] [--only ITEM]

Greedy, end-of-text ignored on both sides, the default model; each figure is the median of alternating runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch

from benchmarks.report import Report, main
from engine.build import build_core, device_name, settle_source
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig, with_knob
from engine.core import EngineCore
from engine.jobs import start_job
from engine.loop import REPORTS_PER_S
from engine.plan import Clocks
from engine.recorder import Recorder
from engine.request import SamplingParams
from engine.runner import DTYPES
from engine.tiles import PastStep
from viz.timelines import Burst

PROMPT = "The history of the lighthouse begins on a small island in the north, where"
ENDLESS = SamplingParams(max_tokens=96, ignore_eos=True)


@cache
def engine(device: str) -> tuple[EngineCore, object]:
    config = EngineConfig(ModelSource(device=device), CacheConfig(num_pages=512, prefix_caching=False), SchedulerConfig(8, 512))
    return build_core(config)


@cache
def transformers_model(device: str):
    from transformers import AutoModelForCausalLM

    core, loaded = engine(device)
    model = AutoModelForCausalLM.from_pretrained(loaded.folder.path, dtype=DTYPES[core.config.source.dtype])
    return model.to(core.runner.device).eval()


def prompts(count: int, device: str) -> list[tuple[int, ...]]:
    _, loaded = engine(device)
    return [loaded.tokenizer.encode(f"{PROMPT} number {i}") for i in range(count)]


def run_engine(device: str, token_ids: list[tuple[int, ...]], sampling: SamplingParams, together: bool) -> float:
    """Tokens a second, wall clock from the first prompt's arrival to the last token."""
    core, _ = engine(device)
    started, made = time.perf_counter(), 0
    for group in [token_ids] if together else [[ids] for ids in token_ids]:
        for ids in group:
            core.add("", ids, sampling)
        while core.has_work:
            record = core.step()
            made += len(record.result.sampled) if record else 0
    elapsed = time.perf_counter() - started
    core.rooms["main"].recorder.drain()
    return made / elapsed


def run_transformers(device: str, ids: tuple[int, ...], sampling: SamplingParams) -> float:
    model = transformers_model(device)
    batch = torch.tensor([ids], device=model.device)
    n = sampling.max_tokens
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0
        )
    return (out.shape[1] - len(ids)) / (time.perf_counter() - started)


def batch1(report: Report, args: argparse.Namespace) -> None:
    """Batch 1: our engine over transformers' generate, alternating."""
    device = settle_source(ModelSource(device=args.device)).device
    ids = prompts(1, device)
    warm = replace(ENDLESS, max_tokens=8)
    run_engine(device, ids, warm, True), run_transformers(device, ids[0], warm)
    ours, theirs = [], []
    for _ in range(5):
        ours.append(run_engine(device, ids, ENDLESS, True))
        theirs.append(run_transformers(device, ids[0], ENDLESS))
    peer = sorted(theirs)[len(theirs) // 2]
    report.add(f"{device}_batch1_tps", ours, "tok/s", peers={"transformers generate": peer}, note=f"{ENDLESS.max_tokens} new tokens")
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    report.add(f"{device}_batch1_vs_transformers", ratios, "×", target=1.0, note="paired runs in one process")


def batch8(report: Report, args: argparse.Namespace) -> None:
    """Eight requests at once over one after the other."""
    device = settle_source(ModelSource(device=args.device)).device
    ids, sampling = prompts(8, device), replace(ENDLESS, max_tokens=48)
    run_engine(device, ids, replace(ENDLESS, max_tokens=8), True)
    together, serial = [], []
    for _ in range(3):
        together.append(run_engine(device, ids, sampling, True))
        serial.append(run_engine(device, ids, sampling, False))
    report.add(f"{device}_batch8_tps", together, "tok/s", peers={"one by one": sorted(serial)[1]})
    report.add(f"{device}_batch8_vs_serial", [a / b for a, b in zip(together, serial, strict=True)], "×", target=2.0)


def tracing(report: Report, args: argparse.Namespace) -> None:
    """Recording on against off: alternating segments of the same running batch, paired."""
    device = settle_source(ModelSource(device=args.device)).device
    core, _ = engine(device)
    for count, name in ((1, f"tracing_overhead_{device}_pct"), (8, f"tracing_overhead_{device}_b8_pct")):
        report.add(
            name, paired_overhead(core, prompts(count, device)), "%", higher_is_better=False, target=3.0,
            note="median over pairs of neighbouring segments, order alternating; on: log-probabilities and "
            "alternatives computed, records packed and drained as for a page",
        )  # fmt: skip


def paired_overhead(core: EngineCore, token_ids: list[tuple[int, ...]], pairs: int = 20, steps: int = 12) -> list[float]:
    """Percent that tracing adds, one figure a pair of segments. Batch membership never changes between them."""
    room = core.rooms["main"]
    for ids in token_ids:
        core.add("", ids, replace(ENDLESS, max_tokens=2 * pairs * steps + 2 * steps))
    for _ in range(steps):
        core.step()
    differences = []
    for pair in range(pairs):
        times = {}
        for on in (True, False) if pair % 2 else (False, True):
            core.config = core.runner.config = replace(core.config, tracing=on)
            room.recorder = Recorder()
            started = time.perf_counter()
            for _ in range(steps):
                core.step()
            if on:
                room.recorder.drain()
            times[on] = time.perf_counter() - started
        differences.append(100 * (times[True] / times[False] - 1))
    for seq in list(room.scheduler.running):
        core.abort(seq.request.request_id)
    while core.has_work:
        core.step()
    core.config = core.runner.config = replace(core.config, tracing=True)
    return differences


@cache
def quick_engine(device: str, tracing: bool = True) -> EngineCore:
    """Everything on: graphs captured, fused kernels, one step planned ahead."""
    scheduler, pages = SchedulerConfig(256, 8192, run_ahead=1), 8192 if device.startswith("cuda") else 768
    core, _ = build_core(
        EngineConfig(ModelSource(device=device), CacheConfig(num_pages=pages, prefix_caching=False), scheduler, tracing=tracing)
    )
    while core.capture_next():
        pass
    return core


class Page:
    """Drains a core's records as often as the engine's loop does for a page."""

    def __init__(self, core: EngineCore) -> None:
        self.recorder, self.next = core.rooms["main"].recorder, time.monotonic() + 1 / REPORTS_PER_S

    def look(self) -> None:
        if time.monotonic() >= self.next:
            self.recorder.drain()
            self.next = time.monotonic() + 1 / REPORTS_PER_S


def decoding(core: EngineCore, count: int, new: int) -> None:
    """Bring a core to where `count` requests decode and nothing else happens."""
    g = torch.Generator().manual_seed(count)
    for _ in range(count):
        core.add("", tuple(torch.randint(3, 40_000, (32,), generator=g).tolist()), SamplingParams(max_tokens=new, ignore_eos=True))
    for _ in range(8):
        core.step()


def end_all(core: EngineCore) -> None:
    for seq in list(core.rooms["main"].scheduler.running):
        core.abort(seq.request.request_id)
    while core.has_work:
        core.step()
    core.rooms["main"].recorder.drain()


def overhead(report: Report, args: argparse.Namespace) -> None:
    """Tracing on against off at full speed: two engines in one process, alternating segments of a batch that decodes."""
    device = settle_source(ModelSource(device=args.device)).device
    on_gpu, engines = device != "cpu", {on: quick_engine(device, on) for on in (True, False)}
    for count, steps in ((1, 100 if on_gpu else 8), (64, 40 if on_gpu else 2)):
        for core in engines.values():
            decoding(core, count, 22 * steps + 32)
        differences = []
        for pair in range(20):
            times = {}
            for on in (True, False) if pair % 2 else (False, True):
                core, page = engines[on], Page(engines[on])
                started = time.perf_counter()
                for _ in range(steps):
                    core.step()
                    page.look()
                page.recorder.drain()
                times[on] = time.perf_counter() - started
            differences.append(100 * (times[True] / times[False] - 1))
        for core in engines.values():
            end_all(core)
        report.add(
            f"tracing_overhead_b{count}_pct", differences, "%", higher_is_better=False, target=3.0,
            note=f"median over 20 pairs of neighbouring segments of {steps} steps, order alternating, on {device}; run ahead, graphs where "
            "there are any; on: log-probabilities and alternatives computed, records packed and drained as for a page",
        )  # fmt: skip


def host(report: Report, args: argparse.Namespace) -> None:
    """Host time of a step with 64 requests decoding: all of it, and what of it the device waits for."""
    device = settle_source(ModelSource(device=args.device)).device
    core, steps = quick_engine(device), 200 if device != "cpu" else 6
    decoding(core, 64, 6 * steps + 32)
    exposed, total = [], []
    for _ in range(5):
        gaps, clocks = host_times(core, steps)
        exposed += gaps
        total.append(sum(c.schedule_us + c.build_us + c.commit_us + (c.run_us if device != "cpu" else 0) for c in clocks) / len(clocks))
    end_all(core)
    parts = "schedule, build, launch and commit" if device != "cpu" else "schedule, build and commit (a CPU computes where it launches)"
    report.add(
        "host_total_b64_us" if device != "cpu" else "cpu_host_total_b64_us",
        total,
        "µs",
        higher_is_better=False,
        note=f"{parts}, tracing on",
    )
    if exposed:
        report.add(
            "host_exposed_us", exposed, "µs", higher_is_better=False, target=50,
            note="64 decoding, run ahead: mean time a step between CUDA events at the end of a step and at the beginning of the next, "
            "records drained 30 times a second meanwhile",
        )  # fmt: skip


def host_times(core: EngineCore, steps: int) -> tuple[list[float], list[Clocks]]:
    """([mean µs a step for which the device had nothing to do], [] on a CPU; clocks of each step)."""
    run, marks, clocks, page = core.runner.run, [], [], Page(core)

    def marked(*args, **more):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        pending = run(*args, **more)
        stop.record()
        marks.append((start, stop))
        return pending

    if core.runner.device.type == "cuda":
        core.runner.run = marked
    try:
        for _ in range(steps):
            record = core.step()
            clocks += [record.clocks] if record else []
            page.look()
    finally:
        core.runner.run = run
    if not marks:
        return [], clocks
    torch.cuda.synchronize()
    gaps = [before[1].elapsed_time(after[0]) * 1e3 for before, after in pairwise(marks)]
    return [sum(gaps) / len(gaps)], clocks


def wall_tps(core: EngineCore, prompts: list[tuple[int, ...]], new: int) -> float:
    """Tokens a second, wall clock from the step that gave the first token to the last one's."""
    for ids in prompts:
        core.add("", ids, SamplingParams(max_tokens=new, ignore_eos=True))
    first, made = None, 0
    while core.has_work:
        record = core.step()
        made += len(record.committed.accepted) if record else 0
        if made and first is None:
            first, given = time.perf_counter(), made
    elapsed = time.perf_counter() - first
    core.rooms["main"].recorder.drain()
    return (made - given) / elapsed


def graphs(report: Report, args: argparse.Namespace) -> None:
    """Decoding by captured graphs, tracing on. CUDA only."""
    device = settle_source(ModelSource(device=args.device)).device
    if device == "cpu":
        print("graphs: they are a GPU's")
        return
    core, g = quick_engine(device), torch.Generator().manual_seed(0)
    random = lambda n: tuple(torch.randint(3, 40_000, (n,), generator=g).tolist())  # noqa: E731
    wall_tps(core, [random(32)], 32)
    report.add("batch1_tps", [wall_tps(core, [random(32)], 256) for _ in range(5)], "tok/s", target=2000, note="32 in, 256 out, tracing on")
    for size, name in ((1, "graph_step_us"), (64, "graph_step_b64_us")):
        report.add(name, core.runner.graphs.replay_us(size), "µs", higher_is_better=False, target=450 if size == 1 else None,
                   note=f"replays of the graph of {size}, one after the other, as last used")  # fmt: skip
    lengths = torch.randint(16, 256, (256,), generator=g).tolist()
    wall_tps(core, [random(n) for n in lengths], 8)
    runs = [wall_tps(core, [random(n) for n in lengths], 128) for _ in range(3)]
    report.add(
        "continuous256_tps",
        runs,
        "tok/s",
        target=60_000,
        note="256 requests at once, 16 to 255 in, 128 out, tracing on; from the first token",
    )


def bursts(core: EngineCore, token_ids: list[tuple[int, ...]], graphs: bool, times: int) -> list[Burst]:
    """Timelines of these requests decoding together, taken by the engine's own job."""
    found = []
    for _ in range(times):
        job = start_job(core, "timeline", {"past": PastStep(0, (), tuple(token_ids), ()), "modes": (graphs,)})
        while not job.advance():
            pass
        job.close()
        if job.note:
            raise SystemExit(f"error: {job.note}")
        found += [burst for burst in map(Burst, job.take_artifacts()) if burst.usable]
    return found


def gaps(report: Report, args: argparse.Namespace) -> None:
    """Waits between kernels of a decode step at batch 1, replayed as a graph and launched one by one. CUDA only."""
    device = settle_source(ModelSource(device=args.device)).device
    if device == "cpu":
        print("gaps: they are a GPU's")
        return
    core, g = quick_engine(device), torch.Generator().manual_seed(0)
    ids = [tuple(torch.randint(3, 40_000, (32,), generator=g).tolist())]
    for graphs, prefix, peers in ((True, "graph", {"vLLM 0.20.2 with graphs": (6.7, 42)}), (False, "eager", {"transformers": (29, 6)})):
        found = bursts(core, ids, graphs, 5)
        work = statistics.median(b.busy_share * b.token_us for b in found)
        plain = statistics.median(b.it.plain_us for b in found)
        note = (
            f"CUPTI over {found[0].tokens} steady steps each; {found[0].kernels:.0f} kernels a token, union {work:.0f} µs, a step takes "
            f"{plain:.0f} µs without the profiler ({100 * work / plain:.0f} % busy). CUPTI does not see when a dependency wait ends, so "
            "a kernel's interval includes it; unseen: " + (", ".join(sorted({u for b in found for u in b.it.unseen})) or "nothing")
        )
        report.add(f"{prefix}_gap_us", [b.mean_gap_us for b in found], "µs", higher_is_better=False,
                   peers={name: gap for name, (gap, _) in peers.items()}, note=f"mean wait between kernels. {note}")  # fmt: skip
        report.add(f"{prefix}_busy_pct", [100 * b.busy_share for b in found], "%", target=80 if graphs else None,
                   peers={name: busy for name, (_, busy) in peers.items()}, note=note)  # fmt: skip


def launches(report: Report, args: argparse.Namespace) -> None:
    """Batch 1 with several steps a launch, from one to as many as there may be. CUDA only."""
    device = settle_source(ModelSource(device=args.device)).device
    if device == "cpu":
        print("launches: on a CPU nothing is launched")
        return
    core, prompt = quick_engine(device), tuple(range(100, 132))
    for steps in (2, 4, 8):
        core.reconfigure(with_knob(core.config, "steps_per_launch", steps))
        wall_tps(core, [prompt], 32)
        runs = [wall_tps(core, [prompt], 256) for _ in range(3)]
        report.add(f"batch1_steps{steps}_tps", runs, "tok/s", note=f"as batch1_tps, {steps} steps a launch")
    core.reconfigure(with_knob(core.config, "steps_per_launch", 1))


ITEMS = {
    "batch1": batch1, "batch8": batch8, "tracing": tracing, "graphs": graphs, "gaps": gaps, "launches": launches, "host": host, "overhead": overhead,
}  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main("engine", ITEMS, lambda args: device_name(torch.device(settle_source(ModelSource(device=args.device)).device))))
