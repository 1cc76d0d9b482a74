"""Rotates q in place, and writes the rotated k and v into their cache slots: kernels/rope.py and kernels/kv_write.py in one.

    q = rope(q),    k_cache[page, offset] = rope(k),    v_cache[page, offset] = v,    page, offset = divmod(slot, page_size)

Conventions are theirs: q, k and v may be views into one fused qkv tensor; the rotary dimension may be a part of the
head; a negative slot skips the row's write (its q is rotated all the same); page strides are free and offsets 64-bit; a
position outside the tables makes NaN here and an IndexError in the reference, a slot past the last page is skipped here
and an IndexError there.

k itself is left alone unless `rotate_k`: writing it back is 8 % more bytes at 32 query and 8 key heads, and attention
reads the cache. A probed step asks for it, because probes look at k as attention sees it.

A program turns a share of a token's query heads and the same share of its key heads (usually all), so that position,
slot and table row are read once. Does not know which layer's caches it gets. Rejected: programs of their own for keys
and values (they end in one small wave after the queries').
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import triton
import triton.language as tl

from kernels.common import FENCE, check_devices, check_tensor, check_written, fenced, make_generator, power_of_two
from kernels.kv_write import find_slot, kv_write_loop, kv_write_ref
from kernels.rope import cut_heads, load_halves, rope_loop, rope_ref, rotated, table_row
from kernels.spec import Bad, Case, KernelSpec

Written = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rope_kv_write_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, rotate_k: bool = False,
) -> Written:  # fmt: skip
    """q [t, Hq, D], k [t, Hk, D], v [t, Hk, Dv], cos and sin [P, R/2] fp32, positions [t] int64, k_cache [pages,
    page_size, Hk, D], v_cache [.., Dv], slot_mapping [t] int64 -> (q, k, k_cache, v_cache), written in place: q, the
    caches' slots and, with rotate_k, k."""
    turned = k if rotate_k else k.clone()
    rope_ref(q, turned, cos, sin, positions)
    kv_write_ref(turned, v, k_cache, v_cache, slot_mapping)
    return q, k, k_cache, v_cache


@triton.jit(do_not_specialize=["num_positions", "num_slots"])
def _rope_kv_write_kernel(
    q, k, v, cos, sin, positions, k_cache, v_cache, slot_mapping, num_positions, num_slots,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_cos, stride_sin,
    stride_kp, stride_ks, stride_kch, stride_vp, stride_vs, stride_vch,
    HQ: tl.constexpr, HK: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROTATE_K: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_head = block * BLOCK_HQ + tl.arange(0, BLOCK_HQ).to(tl.int64)  # head-major tensors have far heads
    head = block * BLOCK_HK + tl.arange(0, BLOCK_HK).to(tl.int64)
    f = tl.arange(0, BLOCK_F)[None, :]
    col_v = tl.arange(0, BLOCK_DV)[None, :]
    k_row = k + token * stride_kt
    v_row = v + token * stride_vt + (head * stride_vh)[:, None]
    # asked for before position and slot: the loads do not wait for one another
    q1, q2, q_at, q_mask = load_halves(q + token * stride_qt, q_head, HQ, stride_qh, H, BLOCK_F)
    k1, k2, k_at, k_mask = load_halves(k_row, head, HK, stride_kh, H, BLOCK_F)
    values = tl.load(v_row + col_v, mask=(head < HK)[:, None] & (col_v < DV), other=0.0)
    page, offset, inside = find_slot(slot_mapping, token, num_slots, PAGE_SIZE)
    c, s = table_row(cos, sin, positions, token, num_positions, stride_cos, stride_sin, H, BLOCK_F)
    written = (head < tl.where(inside, HK, 0))[:, None]
    tl.store(v_cache + page * stride_vp + offset * stride_vs + (head * stride_vch)[:, None] + col_v, values,
             mask=written & (col_v < DV))  # fmt: skip
    q1, q2 = rotated(q1, q2, c, s)
    tl.store(q_at, q1, mask=q_mask)
    tl.store(q_at + H, q2, mask=q_mask)
    k1, k2 = rotated(k1, k2, c, s)
    k_slot = k_cache + page * stride_kp + offset * stride_ks + (head * stride_kch)[:, None]
    tl.store(k_slot + f, k1, mask=written & (f < H))
    tl.store(k_slot + H + f, k2, mask=written & (f < H))
    if ROTATE_K:
        tl.store(k_at, k1, mask=k_mask)
        tl.store(k_at + H, k2, mask=k_mask)
    if D > 2 * H:  # dimensions behind the rotary ones
        col = 2 * H + tl.arange(0, BLOCK_REST)[None, :]
        rest = tl.load(k_row + (head * stride_kh)[:, None] + col, mask=(head < HK)[:, None] & (col < D), other=0.0)
        tl.store(k_slot + col, rest, mask=written & (col < D))


def rope_kv_write(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, rotate_k: bool = False,
) -> Written:  # fmt: skip
    """See rope_kv_write_ref."""
    check_tensor("q", q, (None, None, None))
    t, hq, d = q.shape
    check_tensor("k", k, (t, None, d), (q.dtype,))
    hk, h = k.shape[1], cos.shape[1] if isinstance(cos, torch.Tensor) and cos.dim() == 2 else 0
    check_tensor("v", v, (t, hk, None), (q.dtype,))
    check_tensor("cos", cos, (None, None), (torch.float32,))
    if not 1 <= 2 * h <= d:
        raise ValueError(f"cos has {h} columns: rotary dimension {2 * h} must be 2..{d}, the head dimension")
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,))
    check_tensor("positions", positions, (t,), (torch.int64,))
    check_tensor("k_cache", k_cache, (None, None, hk, d), (q.dtype,))
    pages, page_size, dv = k_cache.shape[0], k_cache.shape[1], v.shape[2]
    check_tensor("v_cache", v_cache, (pages, page_size, hk, dv), (q.dtype,))
    check_tensor("slot_mapping", slot_mapping, (t,), (torch.int64,))
    for name, x in (("q", q), ("k", k), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_written(name, x)
    check_devices(
        q=q, k=k, v=v, cos=cos, sin=sin, positions=positions, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping
    )  # fmt: skip
    if t == 0:
        return q, k, k_cache, v_cache
    block_f = power_of_two(h)
    blocks, block_hq, block_hk = cut_heads(hq, hk, max(block_f, power_of_two(dv) // 2))
    _rope_kv_write_kernel[(t, blocks)](
        q, k, v, cos, sin, positions, k_cache, v_cache, slot_mapping, cos.shape[0], pages * page_size,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos.stride(0), sin.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        HQ=hq, HK=hk, H=h, D=d, DV=dv, PAGE_SIZE=max(1, page_size), ROTATE_K=bool(rotate_k), BLOCK_HQ=block_hq, BLOCK_HK=block_hk,
        BLOCK_F=block_f, BLOCK_REST=power_of_two(max(1, d - 2 * h)), BLOCK_DV=power_of_two(dv), num_warps=4,
    )  # fmt: skip
    return q, k, k_cache, v_cache


def rope_kv_write_loop(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor, rotate_k: bool = False,
) -> Generator[None, None, Written]:  # fmt: skip
    """rope_kv_write_ref, a token an iteration."""
    for i in range(q.shape[0]):
        row = slice(i, i + 1)
        turned = k[row] if rotate_k else k[row].clone()
        for _ in rope_loop(q[row], turned, cos, sin, positions[row]):
            pass
        for _ in kv_write_loop(turned, v[row], k_cache, v_cache, slot_mapping[row]):
            pass
        yield
    return q, k, k_cache, v_cache


def make_inputs(
    device: str, dtype: torch.dtype, seed: int, tokens: int, hq: int, hk: int, d: int, dv: int = 0, r: int = 0, fused: bool = True,
    rows: int = 64, page_size: int = 16, pages: int = 8, layers: int = 1, padding: int = 0, rotate_k: bool = False,
) -> dict:  # fmt: skip
    """fused: q, k and v are views into rows of [q | k | v]; r = 0 rotates the whole head; rows: the tables' length. The
    caches are views into one NaN arena whose pages hold `layers` layers; the last `padding` rows have slot -1."""
    g = make_generator(device, seed)
    dv, r = dv or d, r or d
    if fused:
        qkv = fenced(g, (tokens, (hq + hk) * d + hk * dv), dtype)
        q, k, v = qkv.split([hq * d, hk * d, hk * dv], 1)
        q, k, v = q.unflatten(1, (hq, d)), k.unflatten(1, (hk, d)), v.unflatten(1, (hk, dv))
    else:
        q, k = fenced(g, (tokens, hq, d), dtype, row_pad=3), fenced(g, (tokens, hk, d), dtype)
        v = fenced(g, (tokens, hk, dv), dtype, row_pad=5)
    angles = torch.arange(rows, device=device)[:, None] * 10000.0 ** -(torch.arange(0, r, 2, device=device)[None, :] / r)
    cos, sin = fenced(g, (rows, r // 2), torch.float32), fenced(g, (rows, r // 2), torch.float32)
    k_page, v_page = page_size * hk * d, page_size * hk * dv
    stride = layers * (k_page + v_page)
    arena = torch.full((pages * stride + 2 * FENCE,), float("nan"), dtype=dtype, device=device)
    at = FENCE + (layers - 1) * (k_page + v_page)  # the last layer
    slots = torch.randperm(pages * page_size, generator=g, device=device)[:tokens]
    slots[tokens - padding :] = -1
    return {
        "q": q,
        "k": k,
        "v": v,
        "cos": cos.copy_(angles.cos()),
        "sin": sin.copy_(angles.sin()),
        "positions": torch.randint(0, rows, (tokens,), generator=g, device=device),
        "k_cache": arena.as_strided((pages, page_size, hk, d), (stride, hk * d, d, 1), at),
        "v_cache": arena.as_strided((pages, page_size, hk, dv), (stride, hk * dv, dv, 1), at + k_page),
        "slot_mapping": slots,
        "rotate_k": rotate_k,
    }


def _flops(inputs: Mapping) -> int:
    return 3 * 2 * inputs["cos"].shape[1] * inputs["q"].shape[0] * (inputs["q"].shape[1] + inputs["k"].shape[1])


def _bytes(inputs: Mapping) -> int:
    q, k, v, cos = (inputs[n] for n in ("q", "k", "v", "cos"))
    t, r = q.shape[0], 2 * cos.shape[1]
    moved = 2 * t * q.shape[1] * r + 2 * k.numel() + 2 * v.numel() + (t * k.shape[1] * r if inputs["rotate_k"] else 0)
    return moved * q.element_size() + t * (r * 4 + 2 * 8)


SPEC = KernelSpec(
    name="rope_kv_write",
    formula="q = rope(q), k_cache[slot] = rope(k), v_cache[slot] = v, slot = slot_mapping[i] >= 0",
    fn=rope_kv_write,
    ref=rope_kv_write_ref,
    make_inputs=make_inputs,
    outputs=("q", "k", "k_cache", "v_cache"),
    cases=(
        Case("fused_9_3_64", {"tokens": 17, "hq": 9, "hk": 3, "d": 64}),
        Case("rotate_k", {"tokens": 5, "hq": 4, "hk": 2, "d": 100, "rotate_k": True}),
        Case("partial_100_of_128", {"tokens": 3, "hq": 4, "hk": 2, "d": 128, "r": 100, "rotate_k": True}),
        Case("partial_2_of_13", {"tokens": 3, "hq": 1, "hk": 1, "d": 13, "r": 2}),
        Case("padding_rows", {"tokens": 17, "hq": 2, "hk": 2, "d": 40, "padding": 6, "rotate_k": True}),
        Case("only_padding", {"tokens": 3, "hq": 2, "hk": 1, "d": 40, "padding": 3}),
        Case("arena_of_3_layers", {"tokens": 17, "hq": 5, "hk": 3, "d": 126, "layers": 3, "page_size": 8}),
        Case("d192_dv128_separate", {"tokens": 3, "hq": 3, "hk": 2, "d": 192, "dv": 128, "fused": False, "page_size": 128, "pages": 2}),
        Case("many_heads", {"tokens": 3, "hq": 40, "hk": 33, "d": 256}),
    ),
    bench_cases=(
        Case("t8192_32_8_128", {"tokens": 8192, "hq": 32, "hk": 8, "d": 128, "rows": 8192, "pages": 1024, "layers": 4}),
        Case("t64_9_3_64", {"tokens": 64, "hq": 9, "hk": 3, "d": 64, "rows": 8192, "pages": 1024, "layers": 30}),
        Case("t8192_rotate_k", {"tokens": 8192, "hq": 32, "hk": 8, "d": 128, "rows": 8192, "pages": 1024, "rotate_k": True}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("q", lambda q: q[0]),
        Bad("q", lambda q: q[:1].expand(17, -1, -1)),
        Bad("k", lambda k: k[:-1]),
        Bad("k", lambda k: k.half()),
        Bad("k", lambda k: k[..., :-1]),
        Bad("v", lambda v: v[:-1]),
        Bad("v", lambda v: v[:, :-1]),
        Bad("v", lambda v: v.half()),
        Bad("cos", lambda cos: cos.half()),
        Bad("cos", lambda cos: torch.zeros(64, 33)),
        Bad("cos", lambda cos: cos[0]),
        Bad("sin", lambda sin: sin[:, :-1]),
        Bad("positions", lambda positions: positions.int()),
        Bad("positions", lambda positions: positions[:-1]),
        Bad("k_cache", lambda cache: cache[:, :, :1]),
        Bad("k_cache", lambda cache: cache[:1].expand(8, -1, -1, -1)),
        Bad("v_cache", lambda cache: cache[:-1]),
        Bad("v_cache", lambda cache: cache[..., ::2]),
        Bad("slot_mapping", lambda slots: slots.int()),
        Bad("slot_mapping", lambda slots: slots[:-1]),
    ),
    tolerance={torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    loop=rope_kv_write_loop,
    loop_iterations=lambda inputs: inputs["q"].shape[0],
)
