"""The kernel figures that have a target, each with its peers timed in the same run on the same device. CUDA only.

Inputs are larger than the L2 cache (or rotate among as many sets as exceed it), bfloat16, do_bench medians; decoding at
batch 1 is timed as replays of one CUDA graph. Rejected as a peer: SDPA's default backend, which is slower than cuDNN's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from benchmarks.report import Report
from kernels.attention import attention_flops, counts, make_inputs
from kernels.registry import load_specs
from kernels.spec import KernelSpec

RUNS = 5
BF16 = torch.bfloat16
PAGES = (128, 64, 16)  # page sizes that prefill is timed with; the first one is the figure
RAGGED = torch.randint(16, 2049, (64,), generator=torch.Generator().manual_seed(0)).tolist()


def ms(call: Callable[[], object]) -> float:
    return do_bench(call, warmup=50, rep=200, return_mode="median")


def in_turn(calls: dict[str, Callable[[], object]], runs: int = RUNS) -> dict[str, list[float]]:
    """Milliseconds of each call, timed in alternation; a peer that cannot run here is left out and says why."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(runs):
        for name in list(calls)[:: -1 if run % 2 else 1]:
            if name not in times:
                continue
            try:
                times[name].append(ms(calls[name]))
            except (RuntimeError, AttributeError, ImportError) as error:
                if name == "ours":
                    raise
                print(f"  {name} left out: {str(error).splitlines()[0][:150]}")
                del times[name]
    return times


def backend(which: SDPBackend, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with sdpa_kernel(which):
            return call()

    return run


@cache
def compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(mask: Callable | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
    """A compiled FlexAttention call; the block mask is made once, outside of the time."""
    from torch.nn.attention.flex_attention import create_block_mask

    compiled = compiled_flex()
    blocks = None if mask is None else create_block_mask(mask, None, None, q.shape[2], k.shape[2], device="cuda")
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])


def dense(inputs: dict, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V gathered from their pages and padded to the longest: [b, Hk, n, D]."""
    size, longest, out = inputs["k_cache"].shape[1], max(lengths), []
    for kept in (inputs["k_cache"], inputs["v_cache"]):
        pages = inputs["block_table"][:, : -(-longest // size)].long()
        out.append(kept[pages].flatten(1, 2)[:, :longest].transpose(1, 2).contiguous().nan_to_num_())
    return out[0], out[1]


def prefill_causal(report: Report, specs: dict[str, KernelSpec], d: int, target: float) -> None:
    """4 x 32 heads x 4,096 tokens, each head with keys of its own."""
    dense_qkv = [torch.randn(4, 32, 4096, d, device="cuda", dtype=BF16) for _ in range(3)]
    call = lambda: F.scaled_dot_product_attention(*dense_qkv, is_causal=True)  # noqa: E731
    peers = in_turn(
        {"SDPA, cuDNN": backend(SDPBackend.CUDNN_ATTENTION, call), "SDPA, FlashAttention-2": backend(SDPBackend.FLASH_ATTENTION, call)}
    )
    ours, flops = {}, 0
    for size in PAGES:
        inputs = make_inputs("cuda", BF16, 0, "4096:4096x4", 32, 32, d, page_size=size, lse=False)
        flops = attention_flops(inputs)
        ours[size] = in_turn({"ours": lambda inputs=inputs: specs["flash_prefill"].fn(**inputs)})["ours"]
        if size == PAGES[0]:
            inputs["block_table"][:, :-1] = torch.arange(4 * 4096 // size, device="cuda", dtype=torch.int32).view(4, -1)
            inputs["k_cache"].nan_to_num_(), inputs["v_cache"].nan_to_num_()
            in_order = in_turn({"ours": lambda inputs=inputs: specs["flash_prefill"].fn(**inputs)})["ours"]
        del inputs
    rate = lambda times: [flops / t / 1e9 for t in times]  # noqa: E731
    known = {name: statistics.median(rate(times)) for name, times in peers.items()}
    known["ours, pages in order (dense)"] = statistics.median(rate(in_order))
    for size in PAGES:
        name = f"prefill_causal_d{d}_tflops" if size == PAGES[0] else f"prefill_causal_d{d}_page{size}_tflops"
        note = f"paged K/V, page size {size}, pages in random order; 4 x 32 x 4096, causal flops; SDPA reads contiguous K/V"
        report.add(name, rate(ours[size]), "TFLOP/s", target=target if size == PAGES[0] else None, peers=known, note=note)


def prefill_ragged(report: Report, specs: dict[str, KernelSpec]) -> None:
    """64 sequences of 16 to 2,048 tokens, 32/8 heads of 128."""
    inputs = make_inputs("cuda", BF16, 0, " ".join(f"{n}:{n}" for n in RAGGED), 32, 8, 128, lse=False)
    k, v = dense(inputs, RAGGED)
    longest, total = max(RAGGED), sum(RAGGED)
    padded = torch.randn(64, 32, longest, 128, device="cuda", dtype=BF16)
    owner = torch.repeat_interleave(torch.arange(64), torch.tensor(RAGGED)).cuda()
    packed = (
        torch.randn(1, 32, total, 128, device="cuda", dtype=BF16),
        *(torch.randn(1, 8, total, 128, device="cuda", dtype=BF16) for _ in range(2)),
    )
    mask = lambda b, h, i, j: (owner[i] == owner[j]) & (i >= j)  # noqa: E731
    wide = [x.repeat_interleave(4, 1) for x in (k, v)]  # cuDNN's own grouping is not offered by every version
    times = in_turn(
        {
            "ours": lambda: specs["flash_prefill"].fn(**inputs),
            "padded SDPA, cuDNN": backend(
                SDPBackend.CUDNN_ATTENTION, lambda: F.scaled_dot_product_attention(padded, *wide, is_causal=True)
            ),
            "padded SDPA, FlashAttention-2": backend(
                SDPBackend.FLASH_ATTENTION, lambda: F.scaled_dot_product_attention(padded, k, v, is_causal=True, enable_gqa=True)
            ),
            "FlexAttention, packed": flex(mask, *packed),
        }
    )
    peers = {name: statistics.median(t) for name, t in times.items() if name != "ours"}
    note = f"64 sequences, {total:,} tokens, 32/8 heads of 128, page size 16; the target is the fastest peer"
    report.add("prefill_ragged_ms", times["ours"], "ms", higher_is_better=False, target=min(peers.values()), peers=peers, note=note)


def decode(report: Report, specs: dict[str, KernelSpec], name: str, b: int, keys: int, target: float) -> None:
    """TB/s of K and V read at one query a sequence, 32/8 heads of 128."""
    inputs = make_inputs("cuda", BF16, 0, f"1:{keys}x{b}", 32, 8, 128, lse=False)
    k, v = dense(inputs, [keys] * b)
    q = inputs["q"].view(b, 1, 32, 128).transpose(1, 2)
    sdpa = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
    grouped = q.reshape(b, 8, 4, 128)  # the group as query rows: the same sum, and K is read once
    times = in_turn(
        {
            "ours": lambda: specs["flash_decode"].fn(**inputs),
            "SDPA, FlashAttention-2, on gathered K/V": backend(SDPBackend.FLASH_ATTENTION, sdpa),
            "SDPA, group as queries, on gathered K/V": lambda: F.scaled_dot_product_attention(grouped, k, v),
            "FlexAttention on gathered K/V": flex(None, q, k, v),
        }
    )
    read = 2 * counts(inputs)[1] * 8 * 128 * 2
    rates = {who: [read / t / 1e9 for t in runs] for who, runs in times.items()}
    peers = {who: statistics.median(runs) for who, runs in rates.items() if who != "ours"}
    note = f"batch {b}, {keys:,} keys, page size 16, 32/8 heads of 128; K and V bytes only; the peers' gathering is not in their time"
    report.add(name, rates["ours"], "TB/s", target=target, peers=peers, note=note)


def replay_us(calls: list[Callable[[], object]]) -> list[float]:
    """Microseconds a call in replays of one graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(RUNS * 4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return times[RUNS:]


def decode_batch_1(report: Report, specs: dict[str, KernelSpec]) -> None:
    """One sequence of 1,024 keys; 48 layers in turn, so that the L2 cache holds none of them."""
    layers = [make_inputs("cuda", BF16, seed, "1:1024", 32, 8, 128, lse=False) for seed in range(48)]
    own = replay_us([lambda inputs=inputs: specs["flash_decode"].fn(**inputs) for inputs in layers])
    gathered = [(x["q"].reshape(1, 8, 4, 128), *dense(x, [1024])) for x in layers]
    peers = {"SDPA, group as queries, on gathered K/V": replay_us([lambda x=x: F.scaled_dot_product_attention(*x) for x in gathered])}
    try:
        calls = [flex(None, x["q"].view(1, 1, 32, 128).transpose(1, 2), *kv[1:]) for x, kv in zip(layers, gathered, strict=True)]
        peers["FlexAttention on gathered K/V"] = replay_us(calls)
    except (RuntimeError, ImportError) as error:
        print(f"  FlexAttention left out: {str(error).splitlines()[0][:150]}")
    known = {name: statistics.median(runs) for name, runs in peers.items()}
    note = "batch 1, 1,024 keys, page size 16, 32/8 heads of 128, reduction included; one graph of 48 layers, replayed"
    report.add("decode_b1_kv1k_us", own, "µs", higher_is_better=False, target=12, peers=known, note=note)


def copy_gbps() -> float:
    """Bytes read and written by a copy of 2 GB."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / ms(lambda: y.copy_(x)) / 1e6


def torch_peers(name: str) -> dict[str, Callable[..., object]]:
    """The same operation by torch, eager and compiled."""

    def add_rms_norm(x, residual, weight, eps):
        residual = residual + x
        return F.rms_norm(residual, weight.shape, weight, eps), residual

    def silu_mul(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    def rope_kv_write(q, k, v, cos, sin, positions, k_cache, v_cache, slot_mapping, rotate_k=False):
        c, s = (torch.cat([x[positions]] * 2, -1).unsqueeze(1).to(q.dtype) for x in (cos, sin))
        turn = lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)  # noqa: E731
        q, k = q * c + turn(q) * s, k * c + turn(k) * s
        at = slot_mapping // k_cache.shape[1], slot_mapping % k_cache.shape[1]
        k_cache.index_put_(at, k), v_cache.index_put_(at, v)
        return q

    eager = {"add_rms_norm": add_rms_norm, "silu_mul": silu_mul, "rope_kv_write": rope_kv_write}[name]
    return {"torch": eager, "torch.compile": torch.compile(eager)}


COPY_DIMS = {
    "add_rms_norm": {"tokens": 8192, "d": 4096},
    "silu_mul": {"tokens": 8192, "n": 14336},
    "rope_kv_write": {"tokens": 8192, "hq": 32, "hk": 8, "d": 128},
}


def memory_bound(report: Report, spec: KernelSpec) -> None:
    """Percent of the copy bandwidth measured in the same run, at the 8,192-token benchmark case."""
    wanted = COPY_DIMS[spec.name]
    case = next(c for c in spec.bench_cases if wanted.items() <= dict(c.dims).items())
    inputs = spec.make_inputs("cuda", BF16, 0, **case.dims)
    calls = {"ours": lambda: spec.fn(**inputs)}
    calls |= {who: lambda call=call: call(**inputs) for who, call in torch_peers(spec.name).items()}
    copy, times = copy_gbps(), in_turn(calls)
    share = {who: [100 * spec.bytes(inputs) / t / 1e6 / copy for t in runs] for who, runs in times.items()}
    peers = {who: statistics.median(runs) for who, runs in share.items() if who != "ours"}
    note = f"{case.name}: {spec.bytes(inputs) / 1e6:,.0f} MB by the SPEC's formula; a copy of 2 GB moved {copy:,.0f} GB/s"
    report.add(f"{spec.name}_copy_pct", share["ours"], "%", target=80, peers=peers, note=note)


def targets(report: Report, args: argparse.Namespace) -> None:
    """Every figure that has a target."""
    if args.device == "cpu" or not torch.cuda.is_available():
        print("targets: they are a GPU's")
        return
    specs = load_specs()
    with torch.inference_mode():
        prefill_causal(report, specs, 128, 450)
        prefill_causal(report, specs, 64, 350)
        for name in COPY_DIMS:
            memory_bound(report, specs[name])
        prefill_ragged(report, specs)
        decode(report, specs, "decode_b32_kv4k_tbps", 32, 4096, 3.5)
        decode_batch_1(report, specs)
        decode(report, specs, "decode_b1_kv128k_tbps", 1, 131072, 2.5)
