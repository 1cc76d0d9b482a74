"""How likely the drawn tokens and their best rivals were: log-probabilities of raw logits.

    norm = log(sum(exp(logits))),    chosen = logits[tokens] - norm,    logprobs = logits[ids] - norm,    ids: the `width` largest

ids run from the largest logit down, the lowest id first among equal ones. Two launches: chunks of a row give their sum
and their own largest, then one program joins a row's chunks. The logits are read once, and nothing is sorted. A row with
something that is no number has no log-probabilities: all are NaN, and its ids are valid. A token outside the row gives
NaN (an IndexError in the reference). Knows no temperature: this describes the model, not the draw.

Rejected: torch.topk (which of several equal logits it names is not said), width without a limit (each is one more pass
over registers).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import triton
import triton.language as tl

from kernels.common import check_devices, check_tensor, fenced, make_generator, power_of_two
from kernels.sample import CHUNK, ID_BITS, MAX_V, check_logits, full_key, id_of, order_keys
from kernels.spec import Bad, Case, KernelSpec

MAX_WIDTH = 8
Described = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def describe_ref(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> Described:
    """logits [s, v] fp32, tokens [s] int64 -> (chosen [s] fp32, ids [s, w] int64, logprobs [s, w] fp32), w = min(width, v)."""
    norm = logits.logsumexp(-1, keepdim=True)
    ids = MAX_V - 1 - (order_keys(logits).topk(min(width, logits.shape[1]), -1).values & (MAX_V - 1))
    return (logits.gather(1, tokens[:, None]) - norm)[:, 0], ids, logits.gather(1, ids) - norm


@triton.jit
def _top_kernel(
    logits, chunk_max, chunk_sum, tops, stride,
    V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = ids < V
    raw = tl.load(logits + row * stride + ids, mask=mask, other=float("-inf"))
    x = tl.where(raw != raw, float("inf"), tl.where(raw == 0.0, 0.0, raw))
    largest = tl.max(x, axis=0)
    share = tl.where(raw == largest, 1.0, tl.exp(raw - largest))  # no number stays none
    at = row * CHUNKS + chunk
    tl.store(chunk_max + at, largest)
    tl.store(chunk_sum + at, tl.sum(tl.where(mask, share, 0.0), axis=0))
    keys = tl.where(mask, full_key(x, ids, ID_BITS), -1)
    for i in tl.static_range(WIDTH):
        top = tl.max(keys, axis=0)
        tl.store(tops + at * WIDTH + i, top)
        keys = tl.where(keys == top, -1, keys)


@triton.jit
def _join_kernel(
    logits, tokens, chunk_max, chunk_sum, tops, chosen, ids, logprobs, stride,
    V: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, ID_BITS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    peak = tl.load(chunk_max + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    part = tl.load(chunk_sum + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    largest = tl.max(peak, axis=0)
    norm = largest + tl.log(tl.sum(tl.where(peak == largest, 1.0, tl.exp(peak - largest)) * part, axis=0))
    token = tl.load(tokens + row)
    inside = (token >= 0) & (token < V)
    tl.store(chosen + row, tl.load(logits + row * stride + token, mask=inside, other=float("nan")) - norm)
    w = tl.arange(0, BLOCK_W)
    keys = tl.load(tops + row * CHUNKS * WIDTH + w, mask=w < CHUNKS * WIDTH, other=-1)
    for i in tl.static_range(WIDTH):
        top = tl.max(keys, axis=0)
        best = id_of(top, ID_BITS)
        tl.store(ids + row * WIDTH + i, best)
        tl.store(logprobs + row * WIDTH + i, tl.load(logits + row * stride + best) - norm)
        keys = tl.where(keys == top, -1, keys)


def describe(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> Described:
    """See describe_ref. width: 0 to MAX_WIDTH."""
    check_logits(logits)
    s, v = logits.shape
    check_tensor("tokens", tokens, (s,), (torch.int64,))
    check_devices(logits=logits, tokens=tokens)
    if not 0 <= width <= MAX_WIDTH:
        raise ValueError(f"width is {width}, must be 0..{MAX_WIDTH}")
    width, chunks = min(width, v), triton.cdiv(v, CHUNK)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    chosen, ids, logprobs = made(s), made(s, width, dtype=torch.int64), made(s, width)
    if s == 0:
        return chosen, ids, logprobs
    chunk_max, chunk_sum, tops = made(s, chunks), made(s, chunks), made(s, chunks, width, dtype=torch.int64)
    _top_kernel[(chunks, s)](
        logits, chunk_max, chunk_sum, tops, logits.stride(0),
        V=v, CHUNKS=chunks, CHUNK=min(CHUNK, power_of_two(v)), WIDTH=width, ID_BITS=ID_BITS, num_warps=8,
    )  # fmt: skip
    _join_kernel[(s,)](
        logits, tokens, chunk_max, chunk_sum, tops, chosen, ids, logprobs, logits.stride(0),
        V=v, CHUNKS=chunks, WIDTH=width, ID_BITS=ID_BITS, BLOCK_C=power_of_two(chunks), BLOCK_W=power_of_two(max(1, chunks * width)),
        num_warps=4,
    )  # fmt: skip
    return chosen, ids, logprobs


def describe_loop(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> Generator[None, None, Described]:
    """describe_ref, a row an iteration."""
    rows = []
    for i in range(logits.shape[0]):
        rows.append(describe_ref(logits[i : i + 1], tokens[i : i + 1], width))
        yield
    return tuple(torch.cat(part) for part in zip(*rows)) if rows else describe_ref(logits, tokens, width)


def make_inputs(device: str, dtype: torch.dtype, seed: int, rows: int, v: int, width: int = 5, pad: int = 0, scale: float = 3.0) -> dict:
    """Logits are fp32, rounded to dtype: half precision makes ties."""
    g = make_generator(device, seed)
    logits = fenced(g, (rows, v), torch.float32, row_pad=pad, scale=scale)
    logits.copy_(logits.to(dtype))
    return {"logits": logits, "tokens": torch.randint(0, v, (rows,), generator=g, device=device), "width": width}


def _flops(inputs: Mapping) -> int:
    return (3 + inputs["width"]) * inputs["logits"].numel()


def _bytes(inputs: Mapping) -> int:
    s = inputs["logits"].shape[0]
    return 4 * inputs["logits"].numel() + s * (8 + 4 + inputs["width"] * (8 + 4))


SPEC = KernelSpec(
    name="describe",
    formula="norm = log(sum(exp(logits))), chosen = logits[tokens] - norm, logprobs = logits[ids] - norm",
    fn=describe,
    ref=describe_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("v1000_strided", {"rows": 5, "v": 1000, "pad": 7}),
        Case("v9000_w8", {"rows": 2, "v": 9000, "width": 8}),
        Case("v63_w1", {"rows": 3, "v": 63, "width": 1}),
        Case("v100_w0", {"rows": 3, "v": 100, "width": 0}),
        Case("v3_w5", {"rows": 3, "v": 3}),
        Case("v1", {"rows": 2, "v": 1}),
        Case("large", {"rows": 3, "v": 1000, "scale": 3000.0}),
    ),
    bench_cases=(
        Case("s64_v128256", {"rows": 64, "v": 128256}),
        Case("s1_v49152", {"rows": 1, "v": 49152}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("logits", lambda logits: logits[0]),
        Bad("logits", lambda logits: logits.half()),
        Bad("logits", lambda logits: logits[:, :0]),
        Bad("logits", lambda logits: logits[:, ::2]),
        Bad("logits", lambda logits: torch.zeros(1).expand(5, MAX_V + 1)),
        Bad("tokens", lambda tokens: tokens[:-1]),
        Bad("tokens", lambda tokens: tokens.int()),
        Bad("width", lambda width: -1),
        Bad("width", lambda width: MAX_WIDTH + 1),
    ),
    empty_dims={"rows": 0},
    tolerance={torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6},
    loop=describe_loop,
    loop_iterations=lambda inputs: inputs["logits"].shape[0],
)
