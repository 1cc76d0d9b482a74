"""Writes the step's keys and values into their cache slots, in place.

    k_cache[slot // page_size, slot % page_size] = k[i],    v_cache likewise,    slot = slot_mapping[i]

A negative slot skips the row on purpose: padding rows use it. No slot is ever reached by wrapping (-1 // 16 is page
-1, the last one). Pages may lie anywhere in one arena: every cache stride but the last is free, and page offsets are
64-bit (page 7,800 of stride 276,480 is past 2^31). A slot past the last page is a caller's error: the reference
raises IndexError, the kernel skips it and never writes outside the cache. Two rows with one slot: the later wins in
the reference, either in the kernel.

k and v of a token go in one program, which asks for both before it knows the slot. Does not know block tables or
owners. Rejected: a sink page for padding rows inside this kernel (the caller may still do so), and one launch each for
k and v.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import triton
import triton.language as tl

from kernels.common import FENCE, check_devices, check_tensor, check_written, fenced, make_generator, power_of_two
from kernels.spec import Bad, Case, KernelSpec

FEW_ROWS = 3  # up to here copies row by row beat building an index


def kv_write_ref(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k [t, Hk, D], v [t, Hk, Dv], k_cache [pages, page_size, Hk, D], v_cache [.., Dv], slot_mapping [t] int64
    -> (k_cache, v_cache), written in place."""
    page_size = k_cache.shape[1]
    if slot_mapping.shape[0] <= FEW_ROWS and not slot_mapping.is_cuda:
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                page, offset = divmod(slot, page_size)
                k_cache[page, offset].copy_(k[i])
                v_cache[page, offset].copy_(v[i])
        return k_cache, v_cache
    kept = slot_mapping >= 0
    if not bool(kept.all()):
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    page = slot_mapping.div(page_size, rounding_mode="floor")
    at = (page, slot_mapping - page * page_size)
    k_cache.index_put_(at, k)
    v_cache.index_put_(at, v)
    return k_cache, v_cache


@triton.jit
def find_slot(slot_mapping, token, num_slots, PAGE_SIZE: tl.constexpr):
    """(page, offset in it, whether the slot is in the cache) of a token, 64-bit; page 0 where it is not."""
    slot = tl.load(slot_mapping + token).to(tl.int64)
    inside = (slot >= 0) & (slot < num_slots)
    slot = tl.where(inside, slot, 0)  # before any division: a negative slot has no page
    return slot // PAGE_SIZE, slot % PAGE_SIZE, inside


@triton.jit(do_not_specialize=["num_slots"])
def _kv_write_kernel(
    k, v, k_cache, v_cache, slot_mapping, num_slots, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_kp, stride_ks, stride_kch, stride_vp, stride_vs, stride_vch,
    PAGE_SIZE: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]  # a head-major cache has far heads
    col = tl.arange(0, BLOCK_D)[None, :]
    col_v = tl.arange(0, BLOCK_DV)[None, :]
    mask = (head < HK) & (col < D)
    mask_v = (head < HK) & (col_v < DV)
    row = tl.load(k + token * stride_kt + head * stride_kh + col, mask=mask, other=0.0)
    row_v = tl.load(v + token * stride_vt + head * stride_vh + col_v, mask=mask_v, other=0.0)
    page, offset, inside = find_slot(slot_mapping, token, num_slots, PAGE_SIZE)
    written = head < tl.where(inside, HK, 0)
    tl.store(k_cache + page * stride_kp + offset * stride_ks + head * stride_kch + col, row, mask=written & (col < D))
    tl.store(v_cache + page * stride_vp + offset * stride_vs + head * stride_vch + col_v, row_v, mask=written & (col_v < DV))


def kv_write(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k [t, Hk, D], v [t, Hk, Dv], k_cache [pages, page_size, Hk, D], v_cache [.., Dv], slot_mapping [t] int64
    -> (k_cache, v_cache), written in place."""
    check_tensor("k", k, (None, None, None))
    t, hk, d = k.shape
    check_tensor("v", v, (t, hk, None), (k.dtype,))
    check_tensor("k_cache", k_cache, (None, None, hk, d), (k.dtype,))
    pages, page_size, dv = k_cache.shape[0], k_cache.shape[1], v.shape[2]
    check_tensor("v_cache", v_cache, (pages, page_size, hk, dv), (k.dtype,))
    check_tensor("slot_mapping", slot_mapping, (t,), (torch.int64,))
    check_written("k_cache", k_cache)
    check_written("v_cache", v_cache)
    check_devices(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    if t == 0 or pages * page_size == 0:
        return k_cache, v_cache
    block_d, block_dv = power_of_two(d), power_of_two(dv)
    block_h = min(power_of_two(hk), max(1, 2048 // max(block_d, block_dv)))
    _kv_write_kernel[(t, triton.cdiv(hk, block_h))](
        k, v, k_cache, v_cache, slot_mapping, pages * page_size, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3], PAGE_SIZE=page_size, HK=hk, D=d, DV=dv,
        BLOCK_H=block_h, BLOCK_D=block_d, BLOCK_DV=block_dv, num_warps=4,
    )  # fmt: skip
    return k_cache, v_cache


def kv_write_loop(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """kv_write_ref, a token an iteration."""
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_cache.shape[1])
            k_cache[page, offset], v_cache[page, offset] = k[i], v[i]
        yield
    return k_cache, v_cache


def make_inputs(
    device: str, dtype: torch.dtype, seed: int, tokens: int, hk: int, d: int, dv: int = 0, page_size: int = 16,
    pages: int = 8, layers: int = 1, padding: int = 0, v_pad: int = 3,
) -> dict:  # fmt: skip
    """The caches are views into one NaN arena whose pages hold `layers` layers of K and V; the last `padding` rows
    have slot -1; k is a view into a wider row, as from a fused projection, v too, by `v_pad` elements."""
    g = make_generator(device, seed)
    dv = dv or d
    k_page, v_page = page_size * hk * d, page_size * hk * dv
    stride = layers * (k_page + v_page)
    arena = torch.full((pages * stride + 2 * FENCE,), float("nan"), dtype=dtype, device=device)
    at = FENCE + (layers - 1) * (k_page + v_page)  # the last layer
    k_cache = arena.as_strided((pages, page_size, hk, d), (stride, hk * d, d, 1), at)
    v_cache = arena.as_strided((pages, page_size, hk, dv), (stride, hk * dv, dv, 1), at + k_page)
    slots = torch.randperm(pages * page_size, generator=g, device=device)[:tokens]
    slots[tokens - padding :] = -1
    k, v = fenced(g, (tokens, hk, d), dtype, row_pad=hk * d), fenced(g, (tokens, hk, dv), dtype, row_pad=v_pad)
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slots}


def _flops(inputs: Mapping) -> int:
    return 0


def _bytes(inputs: Mapping) -> int:
    k, v = inputs["k"], inputs["v"]
    return 2 * (k.numel() + v.numel()) * k.element_size() + inputs["slot_mapping"].numel() * 8


SPEC = KernelSpec(
    name="kv_write",
    formula="k_cache[slot // page_size, slot % page_size] = k[i], v_cache likewise, slot = slot_mapping[i] >= 0",
    fn=kv_write,
    ref=kv_write_ref,
    make_inputs=make_inputs,
    outputs=("k_cache", "v_cache"),
    cases=(
        Case("t17_3_64", {"tokens": 17, "hk": 3, "d": 64}),
        Case("t1_1_100", {"tokens": 1, "hk": 1, "d": 100}),
        Case("arena_of_3_layers", {"tokens": 17, "hk": 3, "d": 63, "layers": 3, "page_size": 8}),
        Case("padding_rows", {"tokens": 17, "hk": 2, "d": 40, "padding": 6}),
        Case("only_padding", {"tokens": 3, "hk": 2, "d": 40, "padding": 3}),
        Case("d192_dv128", {"tokens": 3, "hk": 2, "d": 192, "dv": 128, "page_size": 128, "pages": 2}),
        Case("d13_dv1", {"tokens": 5, "hk": 5, "d": 13, "dv": 1, "layers": 2}),
    ),
    bench_cases=(
        Case("t8192_8_128", {"tokens": 8192, "hk": 8, "d": 128, "pages": 1024, "layers": 4, "v_pad": 1024}),
        Case("t64_3_64", {"tokens": 64, "hk": 3, "d": 64, "pages": 1024, "layers": 30, "v_pad": 192}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("k", lambda k: k[0]),
        Bad("v", lambda v: v[:-1]),
        Bad("v", lambda v: v.half()),
        Bad("k_cache", lambda cache: cache[:, :, :1]),
        Bad("k_cache", lambda cache: cache.half()),
        Bad("k_cache", lambda cache: cache[:1].expand(8, -1, -1, -1)),
        Bad("v_cache", lambda cache: cache[:-1]),
        Bad("v_cache", lambda cache: cache[..., ::2]),
        Bad("slot_mapping", lambda slots: slots.int()),
        Bad("slot_mapping", lambda slots: slots[:-1]),
    ),
    tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    loop=kv_write_loop,
    loop_iterations=lambda inputs: inputs["k"].shape[0],
)
