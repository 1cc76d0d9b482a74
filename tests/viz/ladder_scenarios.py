"""Traces with a LadderRun, for tests of views only: plausible numbers that nobody measured. The rungs are the engine's own."""

from __future__ import annotations

from dataclasses import replace

from engine.artifacts import LadderRun, Rung
from engine.ladder import WAYS
from engine.trace import Trace
from tests.viz.kernel_scenarios import CPU, GPU, with_artifacts

ANSWER = " The sky is blue because the air scatters the blue light of the sun more than the red, so it comes from everywhere.".split(" ")
GPU_MS = {"hf_no_cache": 77, "hf_cache": 72, "eager": 23, "batching": 23.5, "fused": 9, "graphs": 0.61, "overlap": 0.55}  # a step
CPU_MS = {"hf_no_cache": 190, "hf_cache": 61, "eager": 50, "batching": 138}
ALONE = ("hf_no_cache", "hf_cache", "eager")


def rung(name: str, step_ms: float, requests: int, new: int, **changes: object) -> Rung:
    """As its clocks would be if every step took as long."""
    rows = [[round(1000 * step_ms * (1 + i + (r * new if name in ALONE else 0))) for i in range(new)] for r in range(requests)]
    wall = max(row[-1] for row in rows)
    per_s = requests * new / wall * 1e6
    pieces = tuple(" " + (ANSWER[1:] * 9)[i] for i in range(new))
    way = next(way for way in WAYS if way.name == name)
    it = Rung(
        name, way.switched, "measured", wall_us=wall, runs=(per_s * 0.97, per_s, per_s * 1.04), token_us=tuple(map(tuple, rows)),
        token_ids=tuple(range(new)), pieces=pieces,
    )  # fmt: skip
    return replace(it, **changes)


def ladder(times: dict[str, float], device: str, requests: int, new: int, **states: Rung) -> LadderRun:
    rungs = [rung(w.name, times[w.name], requests, new) if w.name in times else Rung(w.name, w.switched) for w in WAYS]
    rungs = tuple(states.get(r.name, r) for r in rungs)
    dtype = "bfloat16" if device == GPU else "float32"
    return LadderRun("k" + device[:3], device, dtype, "Why is the sky blue?", (36,) * requests, new, 77_000, rungs)


def busy(it: LadderRun) -> LadderRun:
    shares = (0.06, 0.06, 0.18, 0.2, 0.3, 0.83, 0.91)
    return replace(it, rungs=tuple(replace(r, busy=s) if r.state == "measured" else r for r, s in zip(it.rungs, shares)))


def skipped(name: str, why: str, state: str = "skipped", detail: str = "") -> Rung:
    way = next(way for way in WAYS if way.name == name)
    return Rung(name, way.switched, state, why, detail)


def gpu() -> Trace:
    it = busy(ladder(GPU_MS, GPU, 8, 24))
    flipped = tuple(replace(r, num_differ=17, differing=1) if r.name == "fused" else r for r in it.rungs)
    return with_artifacts(replace(it, rungs=flipped))


def on_cpu() -> LadderRun:
    whys = {"fused": "no_kernels", "graphs": "no_graphs", "overlap": "no_overlap"}
    return ladder(CPU_MS, CPU, 4, 12, **{name: skipped(name, why) for name, why in whys.items()})


def cpu() -> Trace:
    return with_artifacts(on_cpu())


def partial() -> Trace:
    return with_artifacts(on_cpu(), ladder({n: GPU_MS[n] for n in ("hf_no_cache", "hf_cache")}, GPU, 8, 16))


def cancelled() -> Trace:
    left = {n: skipped(n, "", "cancelled") for n in ("batching", "fused", "graphs", "overlap")}
    return with_artifacts(ladder({n: CPU_MS[n] * 1.3 for n in ALONE}, CPU, 2, 8, **left))


def begun() -> Trace:
    """Nothing has been measured yet."""
    return with_artifacts(ladder({}, CPU, 1, 8))


def unlucky() -> Trace:
    """No peer, a rung that failed with a long sentence, one that was late; markup in what a stranger's file says."""
    nasty = '<img src=x onerror="alert(1)">\u202e' + "x" * 250
    states = {"hf_no_cache": skipped("hf_no_cache", "no_memory"), "hf_cache": skipped("hf_cache", "no_memory")}
    states |= {"batching": skipped("batching", "", "failed", nasty), "graphs": skipped("graphs", "", "late")}
    it = ladder({"eager": 23, "fused": 9, "overlap": 0.9}, GPU, 1, 48, **states)
    odd = replace(it.rungs[-1], name=nasty, pieces=tuple(nasty for _ in range(48)))
    return with_artifacts(replace(it, device=nasty, prompt=nasty, rungs=(*it.rungs[:-1], odd)))


LADDERS = {f.__name__: f for f in (gpu, cpu, partial, cancelled, begun, unlucky)}
