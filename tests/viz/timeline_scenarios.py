"""Traces with timelines, for tests of views only: plausible rows that nobody measured."""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.artifacts import HOST_ROW, KERNEL_ROW, STAGES, Timeline
from engine.trace import TABLES, Trace
from tests.viz.kernel_scenarios import CPU, GPU, cards, with_artifacts

OPS = ("decode_qkv", "flash_decode", "decode_linear", "decode_gate_up", "decode_linear")


def timeline(
    graph_size: int = 0, step_id: int = 4, steps: int = 6, layers: int = 4, kernel_ns: int = 3000, gap_ns: int = 27_000,
    between_ns: int = 90_000, source: str = "CUPTI", named: bool = True, **changes: object,
) -> Timeline:  # fmt: skip
    """Each step: embedding, five kernels a layer, lm_head, sample. Every wait is `gap_ns`, that before the next step
    `between_ns`."""
    per_step = [("embedding", 0), *((op, layer) for layer in range(layers) for op in OPS), ("lm_head", layers), ("sample", layers)]
    names = [*STAGES, "cudaLaunchKernel", "cudaGraphLaunch", *dict.fromkeys(op for op, _ in per_step), "void at::_kernel<float, 4>(int)"]
    index = {name: i for i, name in enumerate(names)}
    host, kernels, starts, now = [], [], [], 0
    for step in range(steps):
        starts.append(now)
        begin = now
        for stage in STAGES[:2]:
            host.append((index[stage], step, now, now + 4000))
            now += 5000
        first_launch, at = now, now + 5000
        for i, (op, layer) in enumerate(per_step):
            launch = -1
            if source == "CUPTI":
                if graph_size == 0 or i == 0:
                    kind = "cudaGraphLaunch" if graph_size else "cudaLaunchKernel"
                    host.append((index[kind], step, at - 5000, at - 2000))
                launch = len(host) - 1
            kernels.append((index[op] if named else -1, index[op] if named else len(names) - 1, layer, step, launch, at, at + kernel_ns))
            at += kernel_ns + gap_ns
        at -= gap_ns
        host.append((index["launch"], step, first_launch, at - 3000))
        host.append((index["sync"], step, at - 2000, at + 1000))
        host.append((index["commit"], step, at + 2000, at + 9000))
        now = max(at + between_ns - 15_000, begin + 1)
    order = sorted(range(len(host)), key=lambda i: host[i][2])
    place = {old: new for new, old in enumerate(order)}
    rows = np.array([(n, k, layer, s, place.get(launch, -1), a, b) for n, k, layer, s, launch, a, b in kernels], KERNEL_ROW)
    it = {
        "step_id": step_id, "device": GPU if source == "CUPTI" else CPU, "dtype": "bfloat16", "source": source, "graph_size": graph_size,
        "num_seqs": 1, "num_layers": layers, "resolution_ns": 32.0, "plain_us": 800.0, "names": tuple(names),
        "host": np.array([host[i] for i in order], HOST_ROW), "kernels": rows, "steps": np.array([*starts, now], np.int64),
    }  # fmt: skip
    return Timeline(**{**it, **changes})


def off(**changes: object) -> Timeline:
    return timeline(**changes)


def on(**changes: object) -> Timeline:
    return timeline(**{"graph_size": 1, "gap_ns": 300, "between_ns": 20_000, **changes})


def cpu(**changes: object) -> Timeline:
    it = {
        "source": "CPU operations",
        "kernel_ns": 200_000,
        "gap_ns": 21_000,
        "between_ns": 1_800_000,
        "dtype": "float32",
        "plain_us": 63_000.0,
    }
    return timeline(**{**it, **changes})


def run_on(device: str, *artifacts: object) -> Trace:
    """The busy run, as if on this device."""
    trace = with_artifacts(*artifacts)
    tables = {name: getattr(trace, name) for name in TABLES}
    return Trace(tables, trace.sequences, trace.token_texts, {**trace.meta, "device": device}, artifacts, trace.errors)


def both() -> Trace:
    return run_on(GPU, *cards(), off(), on())


def only_off() -> Trace:
    return run_on(GPU, off(num_seqs=3, layers=30), off(step_id=9, gap_ns=90_000))


def only_on() -> Trace:
    return run_on(GPU, on(num_seqs=7, graph_size=8, layers=30))


def only_cpu() -> Trace:
    return run_on(CPU, *cards(), cpu(layers=30))


def cpu_beside_gpu() -> Trace:
    return run_on(CPU, cpu(), off(layers=30), on(layers=30))


def unnamed() -> Trace:
    return run_on(GPU, off(named=False, unseen=("not_named",)), on(named=False, unseen=("lost", "not_named"), resolution_ns=1000.0))


def broken() -> Trace:
    """Too short, empty, or with names that nobody gave."""
    nasty = '<img src=x onerror="alert(1)">\u202e' + "x" * 300
    none = np.zeros(0, KERNEL_ROW)
    short = timeline(steps=2), timeline(kernels=none), timeline(kernels=none, host=np.zeros(0, HOST_ROW), names=())
    return run_on(GPU, *short, cpu(device=nasty), off(names=(nasty,) * 20, device=nasty, plain_us=0.0))


TIMELINE_MAKERS = {f.__name__: f for f in (both, only_off, only_on, only_cpu, cpu_beside_gpu, unnamed, broken)}


@cache
def timelines(name: str) -> Trace:
    return TIMELINE_MAKERS[name]()
