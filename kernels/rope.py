"""Rotary position embedding of q and k, in place, rotate-half style (Hugging Face).

    x1 = x[..., :h], x2 = x[..., h:2h], h = R/2, c = cos[positions], s = sin[positions]
    x1' = x1*c - x2*s,    x2' = x2*c + x1*s,    x[..., R:] stays

q and k may be views into one fused qkv tensor: every stride but the last is free. The tables are fp32 and carry
whatever a rope variant does (scaling, magnitude), so this file knows no variant. Computed in fp32, rounded once.

A position outside the tables is a caller's error: the reference raises IndexError; the kernel never reads outside
the tables and makes the row NaN, so that the error shows.

Rejected: computing cos and sin here (fp32 sin of large angles is slow and the variants would come in), interleaved
pairs (loaders permute such checkpoints instead), a launch each for q and k.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import triton
import triton.language as tl

from kernels.common import check_devices, check_tensor, check_written, fenced, make_generator, power_of_two
from kernels.spec import Bad, Case, KernelSpec


def rope_ref(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [t, Hq, D], k [t, Hk, D], cos and sin [P, R/2] fp32, positions [t] int64 -> (q, k), rotated in place."""
    c = cos.index_select(0, positions).unsqueeze(1)  # [t, 1, R/2]
    s = sin.index_select(0, positions).unsqueeze(1)
    h = c.shape[-1]
    for x in (q, k):
        x1, x2 = x[..., :h], x[..., h : 2 * h]
        if x.dtype is torch.float32:
            x1s = x1 * s
            x1.mul_(c).addcmul_(x2, s, value=-1)
            x2.mul_(c).add_(x1s)
        else:
            y1, y2 = x1.float(), x2.float()
            x1.copy_(y1 * c - y2 * s)
            x2.copy_(y2 * c + y1 * s)
    return q, k


@triton.jit
def table_row(
    cos, sin, positions, token, num_positions, stride_cos, stride_sin, H: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """(c, s) [1, BLOCK_F] of a token. A position outside the tables gives NaN, never a stray read."""
    position = tl.load(positions + token)
    f = tl.arange(0, BLOCK_F)  # frequencies
    inside = (position >= 0) & (position < num_positions)
    lanes = f < tl.where(inside, H, 0)
    poison = tl.where(inside, 0.0, float("nan"))
    c = tl.load(cos + position * stride_cos + f, mask=lanes, other=0.0) + poison
    s = tl.load(sin + position * stride_sin + f, mask=lanes, other=0.0) + poison
    return c[None, :], s[None, :]


@triton.jit
def rotated(x1, x2, c, s):
    """Both halves in x1's type. Computed in fp32, rounded once."""
    y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
    return (y1 * c - y2 * s).to(x1.dtype), (y2 * c + y1 * s).to(x1.dtype)


@triton.jit
def load_halves(x, head, heads, stride_h, H: tl.constexpr, BLOCK_F: tl.constexpr):
    """(x1, x2, where x1 is, mask) of a token's heads, [heads, BLOCK_F] each."""
    f = tl.arange(0, BLOCK_F)
    mask = (head < heads)[:, None] & (f < H)[None, :]
    at = x + head[:, None] * stride_h + f[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + H, mask=mask, other=0.0), at, mask


@triton.jit(do_not_specialize=["num_positions"])
def _rope_kernel(
    q, k, cos, sin, positions, num_positions, stride_qt, stride_qh, stride_kt, stride_kh, stride_cos, stride_sin,
    HQ: tl.constexpr, HK: tl.constexpr, H: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_head = block * BLOCK_HQ + tl.arange(0, BLOCK_HQ).to(tl.int64)  # head-major tensors have far heads
    k_head = block * BLOCK_HK + tl.arange(0, BLOCK_HK).to(tl.int64)
    # asked for before the position: the loads do not wait for one another
    q1, q2, q_at, q_mask = load_halves(q + token * stride_qt, q_head, HQ, stride_qh, H, BLOCK_F)
    k1, k2, k_at, k_mask = load_halves(k + token * stride_kt, k_head, HK, stride_kh, H, BLOCK_F)
    c, s = table_row(cos, sin, positions, token, num_positions, stride_cos, stride_sin, H, BLOCK_F)
    q1, q2 = rotated(q1, q2, c, s)
    tl.store(q_at, q1, mask=q_mask)
    tl.store(q_at + H, q2, mask=q_mask)
    k1, k2 = rotated(k1, k2, c, s)
    tl.store(k_at, k1, mask=k_mask)
    tl.store(k_at + H, k2, mask=k_mask)


def cut_heads(hq: int, hk: int, block_f: int) -> tuple[int, int, int]:
    """(programs a token, query heads of each, key heads of each): each turns its share of both."""
    blocks = 1
    while power_of_two(triton.cdiv(hq, blocks)) * block_f > 2048 or power_of_two(triton.cdiv(hk, blocks)) * block_f > 2048:
        blocks *= 2
    return blocks, power_of_two(triton.cdiv(hq, blocks)), power_of_two(triton.cdiv(hk, blocks))


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [t, Hq, D], k [t, Hk, D], cos and sin [P, R/2] fp32, positions [t] int64 -> (q, k), rotated in place."""
    check_tensor("q", q, (None, None, None))
    t, hq, d = q.shape
    check_tensor("k", k, (t, None, d), (q.dtype,))
    check_tensor("cos", cos, (None, None), (torch.float32,))
    h, hk = cos.shape[1], k.shape[1]
    if not 1 <= 2 * h <= d:
        raise ValueError(f"cos has {h} columns: rotary dimension {2 * h} must be 2..{d}, the head dimension")
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,))
    check_tensor("positions", positions, (t,), (torch.int64,))
    check_written("q", q)
    check_written("k", k)
    check_devices(q=q, k=k, cos=cos, sin=sin, positions=positions)
    if t == 0:
        return q, k
    block_f = power_of_two(h)
    blocks, block_hq, block_hk = cut_heads(hq, hk, block_f)
    _rope_kernel[(t, blocks)](
        q, k, cos, sin, positions, cos.shape[0], q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0),
        sin.stride(0), HQ=hq, HK=hk, H=h, BLOCK_HQ=block_hq, BLOCK_HK=block_hk, BLOCK_F=block_f, num_warps=4,
    )  # fmt: skip
    return q, k


def rope_loop(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """rope_ref, a token an iteration."""
    h = cos.shape[1]
    for i in range(q.shape[0]):
        c, s = cos[positions[i]], sin[positions[i]]
        for x in (q[i], k[i]):
            x1, x2 = x[:, :h].float(), x[:, h : 2 * h].float()
            x[:, :h], x[:, h : 2 * h] = x1 * c - x2 * s, x2 * c + x1 * s
        yield
    return q, k


def make_inputs(
    device: str, dtype: torch.dtype, seed: int, tokens: int, hq: int, hk: int, d: int, r: int = 0, fused: bool = True, rows: int = 64
) -> dict:
    """fused: q and k are views into rows of [q | k | v]; r = 0 rotates the whole head; rows: the tables' length."""
    g = make_generator(device, seed)
    if fused:
        qkv = fenced(g, (tokens, (hq + 2 * hk) * d), dtype)
        q, k = qkv[:, : hq * d].unflatten(1, (hq, d)), qkv[:, hq * d : (hq + hk) * d].unflatten(1, (hk, d))
    else:
        q, k = fenced(g, (tokens, hq, d), dtype, row_pad=3), fenced(g, (tokens, hk, d), dtype)
    r = r or d
    angles = torch.arange(rows, device=device)[:, None] * 10000.0 ** -(torch.arange(0, r, 2, device=device)[None, :] / r)
    cos, sin = fenced(g, (rows, r // 2), torch.float32), fenced(g, (rows, r // 2), torch.float32)
    positions = torch.randint(0, rows, (tokens,), generator=g, device=device)
    return {"q": q, "k": k, "cos": cos.copy_(angles.cos()), "sin": sin.copy_(angles.sin()), "positions": positions}


def _flops(inputs: Mapping) -> int:
    return 3 * 2 * inputs["cos"].shape[1] * inputs["q"].shape[0] * (inputs["q"].shape[1] + inputs["k"].shape[1])


def _bytes(inputs: Mapping) -> int:
    q, k, cos, positions = (inputs[n] for n in ("q", "k", "cos", "positions"))
    rotated = q.shape[0] * (q.shape[1] + k.shape[1]) * 2 * cos.shape[1]
    return 2 * rotated * q.element_size() + 2 * q.shape[0] * cos.shape[1] * 4 + positions.numel() * 8


SPEC = KernelSpec(
    name="rope",
    formula="x1' = x1*cos[positions] - x2*sin[positions], x2' = x2*cos[positions] + x1*sin[positions], x in {q, k}",
    fn=rope,
    ref=rope_ref,
    make_inputs=make_inputs,
    outputs=("q", "k"),
    cases=(
        Case("fused_9_3_64", {"tokens": 17, "hq": 9, "hk": 3, "d": 64}),
        Case("partial_100_of_128", {"tokens": 3, "hq": 4, "hk": 2, "d": 128, "r": 100}),
        Case("d80_separate", {"tokens": 3, "hq": 5, "hk": 1, "d": 80, "fused": False}),
        Case("d126", {"tokens": 1, "hq": 2, "hk": 2, "d": 126}),
        Case("many_heads", {"tokens": 3, "hq": 40, "hk": 33, "d": 256}),
        Case("r2", {"tokens": 3, "hq": 1, "hk": 1, "d": 13, "r": 2}),
    ),
    bench_cases=(
        Case("t8192_32_8_128", {"tokens": 8192, "hq": 32, "hk": 8, "d": 128, "rows": 8192}),
        Case("t64_9_3_64", {"tokens": 64, "hq": 9, "hk": 3, "d": 64, "rows": 8192}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("q", lambda q: q[0]),
        Bad("q", lambda q: q[:1].expand(17, -1, -1)),
        Bad("k", lambda k: k[:-1]),
        Bad("k", lambda k: k.half()),
        Bad("k", lambda k: k[..., :-1]),
        Bad("cos", lambda cos: cos.half()),
        Bad("cos", lambda cos: torch.zeros(64, 33)),
        Bad("sin", lambda sin: sin[:, :-1]),
        Bad("sin", lambda sin: sin[:-1]),
        Bad("positions", lambda positions: positions.int()),
        Bad("positions", lambda positions: positions[:-1]),
    ),
    tolerance={torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    loop=rope_loop,
    loop_iterations=lambda inputs: inputs["q"].shape[0],
)
