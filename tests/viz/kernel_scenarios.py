"""Traces with artifacts about kernels, for tests of views only: plausible numbers that nobody measured.

A real run gives the steps; the artifacts are made here: two devices, prefill and decode, all and none of each kind, and
broken ones, as a stranger's file may have them.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from engine.artifacts import FULL, PARTLY, TILE, Ceilings, KernelCard, KernelRun, OpTime, StepProfile, TileTrace, TrafficRun
from engine.trace import TABLES, Trace
from tests.factories import make_trace

GPU, CPU = "NVIDIA H200", "x86-64 CPU, 2 threads"


def with_artifacts(*artifacts: object, trace: Trace | None = None) -> Trace:
    """A run of the real scheduler (None: the busy one), with these artifacts."""
    trace = make_trace() if trace is None else trace
    tables = {name: getattr(trace, name) for name in TABLES}
    return Trace(tables, trace.sequences, trace.token_texts, trace.meta, artifacts, trace.errors)


def tile_trace(step: int = 4, sequences: tuple[tuple[int, int, int], ...] = ((1, 128, 128),), **changes: object) -> TileTrace:
    """Causal tiles of every Q-block and key head, as the kernel visits them."""
    it = {
        "step_id": step, "layer": 0, "kernel": "flash_prefill", "device": GPU, "provenance": "recomputed", "difference": 0.003,
        "dtype": "bfloat16", "heads": 9, "kv_heads": 3, "head_dim": 64, "page_size": 16, "window": 0, "softcap": 0.0, "scale": 0.125,
        "block_q": 16, "block_m": 64, "block_n": 64, "num_splits": 1, "launch_us": 9.5, **changes,
    }  # fmt: skip
    rows, program, clock = [], 0, 0
    for seq_id, queries, keys in sequences:
        for first in range(0, queries, it["block_q"]):
            n = min(it["block_q"], queries - first)
            q_start = keys - queries + first
            for kv_head in range(it["kv_heads"]):
                for split in range(it["num_splits"]):
                    starts = range(0, q_start + n, it["block_n"])
                    for k_start in [k for i, k in enumerate(starts) if i % it["num_splits"] == split]:
                        k_stop = min(k_start + it["block_n"], q_start + n)
                        kind = FULL if k_stop <= q_start + 1 else PARTLY
                        rows.append((seq_id, kv_head, split, program, q_start, n, k_start, k_stop, kind, program % 132, clock, clock + 9))
                        clock += 10
                    program += 1
    tiles, rows_m = np.array(rows, TILE), it["block_m"]
    count = len(tiles)
    logs = {name: np.full((count, rows_m), np.nan, np.float32) for name in ("m", "l", "rescale")}
    last = sequences[0] if sequences else (0, 1, 1)
    row_tiles = (
        np.flatnonzero((tiles["seq_id"] == last[0]) & (tiles["kv_head"] == 0)).astype(np.int32)[-1:] if count else np.zeros(0, np.int32)
    )
    d = it["head_dim"]
    return TileTrace(
        **it, sequences=sequences, tiles=tiles, **logs, row_seq_id=last[0], row_position=last[2] - 1, row_head=0, row_tiles=row_tiles,
        acc=np.zeros((len(row_tiles), d), np.float32), scores=np.zeros(last[2], np.float32), plain=np.zeros(d, np.float32),
    )  # fmt: skip


def ceilings(device: str = GPU, **changes: object) -> Ceilings:
    if device == GPU:
        it = {"copy_gbps": 4250.0, "matmul_tflops": 784.0, "launch_us": 2.1, "python_us": 0.125, "dtype": "bfloat16"}
        it["levels"] = (("L1", 1 << 17, 26_000.0), ("L2", 1 << 24, 9_400.0))
    else:
        it = {"copy_gbps": 21.0, "matmul_tflops": 0.11, "launch_us": 1.4, "python_us": 0.05, "dtype": "float32"}
        it["levels"] = (("L2", 1 << 19, 88.0),)
    return Ceilings(**{"device": device, **it, **changes})


def traffic_run(of: TileTrace, flash_us: float | None = 9.5, naive_us: float | None = 61.0) -> TrafficRun:
    return TrafficRun(of.step_id, of.layer, of.kernel, of.device, flash_us, naive_us)


_MODEL = {"layers": 30, "hidden": 576, "inner": 1536, "heads": 9, "kv_heads": 3, "d": 64, "vocab": 49_152}


def profile(step: int = 4, prefill: int = 0, decode: int = 3, device: str = GPU, keys: int = 200) -> StepProfile:
    """A step of a small Llama, eager: every operation's FLOPs and bytes by formula, its times by a plain model of a device."""
    m, rows, itemsize = _MODEL, prefill + decode, 2 if device == GPU else 4
    copy, matmul = (3.4e12, 5.5e14) if device == GPU else (16e9, 8e10)
    floor, host = (2.2, 14.0) if device == GPU else (2.0, 0.0)

    def linear(n: int, k: int) -> tuple[int, int]:
        return 2 * rows * n * k, itemsize * (n * k + rows * (n + k))

    qkv = (m["heads"] + 2 * m["kv_heads"]) * m["d"]
    attention = 4 * rows * keys * m["heads"] * m["d"], itemsize * keys * m["kv_heads"] * m["d"] * 2 * max(decode, 1)
    hidden = rows * m["hidden"] * itemsize
    layer = {
        "rms_norm": (4 * rows * m["hidden"], 4 * hidden), "qkv_proj": linear(qkv, m["hidden"]),
        "rope_kv_write": (3 * rows * qkv, 2 * rows * qkv * itemsize),
        "attention": attention, "o_proj": linear(m["hidden"], m["hidden"]), "gate_up_proj": linear(2 * m["inner"], m["hidden"]),
        "silu_mul": (5 * rows * m["inner"], 3 * rows * m["inner"] * itemsize), "down_proj": linear(m["hidden"], m["inner"]),
    }  # fmt: skip
    ops, clock = [], 0.0

    def run(name: str, at: int, flops: int, num_bytes: int) -> None:
        nonlocal clock
        us = max(flops / matmul, num_bytes / copy) * 1e6 + floor
        ops.append(OpTime(name, at, clock, us, host or us, flops, num_bytes, rows))
        clock += max(us, host)

    run("embedding", 0, 0, 2 * hidden)
    for at in range(m["layers"]):
        for name, (flops, num_bytes) in layer.items():
            run(name, at, flops, num_bytes)
    run("lm_head", m["layers"], *linear(m["vocab"], m["hidden"]))
    run("argmax", m["layers"], rows * m["vocab"], rows * m["vocab"] * 4)
    return StepProfile(step, device, "bfloat16" if device == GPU else "float32", clock, prefill, decode, max(decode, 1), tuple(ops))


_FORMULAS = {
    "argmax_sample": "token = argmax(logits / temperature + gumbel(seed, position))",
    "embedding": "out[i] = table[token_ids[i]]",
    "flash_decode": "out = softmax(scale * q.k over keys j <= position) v, split over the keys and reduced",
    "flash_prefill": "out = softmax(softcap*tanh(scale*q.k/softcap) over keys j <= position, j > position - window) v",
    "kv_write": "k_cache[slot // page_size, slot % page_size] = k[i], v_cache likewise, slot = slot_mapping[i] >= 0",
    "naive_attention": "s = scale * q k^T, p = softmax(s), out = p v",
    "rms_norm": "out = x * rsqrt(mean(x^2) + eps) * weight",
    "rope": "x1' = x1*cos[positions] - x2*sin[positions], x2' = x2*cos[positions] + x1*sin[positions], x in {q, k}",
    "silu_mul": "out = silu(x[:, :n]) * x[:, n:]",
}


def card(name: str, **changes: object) -> KernelCard:
    it = {
        "formula": _FORMULAS.get(name, "out = x"), "text": f"{name}: what it does.\n\nRejected: everything else.",
        "reference": f"def {name}_ref(x):\n    return x.float()\n", "source": f"@triton.jit\ndef _{name}_kernel(x, out):\n    pass\n",
        "cases": (("t8192_n14336", "tokens 8192, n 14336"), ("n63", "tokens 3, n 63")),
        "backend": "" if name == "naive_attention" else "triton",
    }  # fmt: skip
    return KernelCard(**{"name": name, **it, **changes})


def cards() -> tuple[KernelCard, ...]:
    return tuple(card(name) for name in _FORMULAS)


def kernel_run(name: str = "silu_mul", **changes: object) -> KernelRun:
    it = {
        "case": "t8192_n14336", "shapes": "tokens 8192, n 14336", "dtype": "bfloat16", "device": GPU, "max_error": 0.0031,
        "tolerance": 0.008, "flops": 587_202_560, "bytes": 704_643_072, "kernel_us": 197.0, "graph_us": 194.0, "torch_us": 574.0,
        "loop_us": 38.5, "loop_iterations": 8192, "loop_ran": 64,
    }  # fmt: skip
    return KernelRun(**{"name": name, **it, **changes})


def on_cpu(name: str = "rms_norm", **changes: object) -> KernelRun:
    """The Triton kernel could not run; the reference, torch and the loop did, all iterations of it."""
    it = {
        "case": "n63", "shapes": "tokens 17, n 63", "dtype": "float32", "device": CPU, "max_error": 2.4e-7, "tolerance": 2e-6,
        "flops": 4284, "bytes": 8820, "kernel_us": None, "graph_us": None, "torch_us": 21.5, "loop_us": 13.2,
        "loop_iterations": 17, "loop_ran": 17,
    }  # fmt: skip
    return kernel_run(name, **{**it, **changes})


# ---- traces, by what they show ----


def prefill() -> Trace:
    """One long prompt on a GPU: Flash far below naive, compute-bound matmuls, a kernel that ran."""
    tiles = tile_trace(4, ((1, 1500, 1500),), block_q=42, block_m=128)
    profiles = profile(2, 0, 2), profile(3, 0, 8), profile(4, 1500, 0, keys=750)
    return with_artifacts(*cards(), tiles, traffic_run(tiles), ceilings(), *profiles, kernel_run())


def decode() -> Trace:
    """A batch that writes, split over the keys; nearly everything waits for its launch."""
    batch = tuple((i, 1, 90 + 37 * i) for i in range(1, 9))
    tiles = tile_trace(9, batch, kernel="flash_decode", block_q=1, block_m=16, num_splits=2, layer=7)
    profiles = tuple(profile(step, 0, 2 + step, keys=100 + step) for step in range(1, 10))
    fast = {"kernel_us": 11.4, "graph_us": None, "torch_us": 96.0, "loop_us": 71.0, "loop_iterations": 1024}
    return with_artifacts(*cards(), tiles, ceilings(), *profiles, kernel_run("flash_decode", flops=9_000_000, bytes=4_500_000, **fast))


def cpu() -> Trace:
    """Traced in the interpreter: no SM, no time; a chunk beside decodes."""
    tiles = tile_trace(
        7, ((1, 1, 60), (2, 37, 37), (3, 20, 75)), device=CPU, provenance="measured", difference=0.0, dtype="float32", launch_us=0.0
    )
    return with_artifacts(*cards()[:5], tiles, traffic_run(tiles, None, None), ceilings(CPU), profile(7, 57, 1, CPU), on_cpu("embedding"))


def short_chunk() -> Trace:
    """Flash asks for more than naive moves: few heads a key head, small tiles."""
    tiles = tile_trace(3, ((1, 8, 640),), heads=3, kv_heads=3, head_dim=128, block_q=1, block_m=16, block_n=128)
    return with_artifacts(card("rms_norm"), tiles, kernel_run("rms_norm", max_error=0.02, loop_us=None))


def nothing_yet() -> Trace:
    """The live engine before anybody pressed a button: only the cards."""
    return with_artifacts(*cards())


def only_ceilings() -> Trace:
    return with_artifacts(*cards(), ceilings())


def no_ceilings() -> Trace:
    tiles = tile_trace(4)
    return with_artifacts(*cards(), tiles, profile(4, 37, 2), kernel_run("rms_norm"))


def unusable() -> Trace:
    """What a stranger's file may hold: zeros, NaN, nothing, markup, names without end."""
    nan, nasty = float("nan"), '<img src=x onerror="alert(1)">\u202e' + "x" * 300
    hollow = tile_trace(4, heads=0), tile_trace(4, head_dim=0), tile_trace(4, heads=10), tile_trace(4, ())
    tops = ceilings(copy_gbps=nan), ceilings(matmul_tflops=0.0), ceilings(launch_us=nan, levels=((nasty, -1, nan),))
    ops = (
        OpTime(nasty, 0, 0.0, nan, -3.0, 0, 0, 0),
        OpTime("", -1, nan, 1e-9, 1e30, 10**30, 1, -4),
        OpTime("a\nb", 0, 0.0, 2.0, 1.0, 5, 0, 1),
    )
    profiles = StepProfile(4, GPU, nasty, nan, -1, 0, 0, ops), StepProfile(5, nasty, "", 0.0, 0, 0, 0, ())
    runs = (
        kernel_run(nasty, loop_us=nan, kernel_us=-1.0, graph_us=0.0),
        kernel_run("silu_mul", max_error=nan, tolerance=nan, flops=0, bytes=0, loop_iterations=0),
    )
    odd = card(nasty, formula=nasty, cases=(), text="", reference="", source="", backend=nasty), card("silu_mul", formula="")
    return with_artifacts(*odd, *hollow, *tops, *profiles, *runs)


KERNEL_MAKERS = {f.__name__: f for f in (prefill, decode, cpu, short_chunk, nothing_yet, only_ceilings, no_ceilings, unusable)}


@cache
def kernels(name: str) -> Trace:
    return KERNEL_MAKERS[name]()
