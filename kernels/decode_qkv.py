"""The first half of an attention layer for the few rows of a decode step: RMSNorm, QKV projection, RoPE, KV-cache write.

    y = rms_norm(x, norm, eps),    [q | k | v] = y weight^T + bias
    q = rope(q),    k_cache[slot] = rope(k),    v_cache[slot] = v,    slot = slot_mapping[i] >= 0

One kernel in place of four; k and v only ever exist in the cache. Roundings are those of kernels/rms_norm.py, a projection
in the tensors' type and kernels/rope.py. A program owns BLOCK_F pairs of dimensions of one head, the two that RoPE turns into each other,
so that nothing needs to be exchanged. Not for models that normalise q and k between projection and RoPE.

As in kernels/rope_kv_write.py a negative slot writes nothing and a position outside the tables makes its row NaN.
See kernels/gemv.py for how the weight is read.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.common import FENCE, check_devices, check_tensor, check_written, fenced, make_generator
from kernels.gemv import add_product, check_rows, inverse_rms, let_next_begin, load_rows, load_weight, shape_of, wait_for_inputs
from kernels.kv_write import kv_write_ref
from kernels.rms_norm import rms_norm_ref
from kernels.rope import rope_ref
from kernels.spec import Bad, Case, KernelSpec

Written = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def decode_qkv_ref(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    bias: torch.Tensor | None = None, pdl: bool = False,
) -> Written:  # fmt: skip
    """x [b, n], norm [n], weight [(Hq + 2 Hk) D, n], cos and sin [P, R/2] fp32, positions and slot_mapping [b] int64,
    q [b, Hq, D], k_cache and v_cache [pages, page_size, Hk, D], bias [(Hq + 2 Hk) D] or None -> (q, k_cache, v_cache),
    written in place. pdl: no meaning here."""
    (b, hq, d), hk = q.shape, k_cache.shape[2]
    y = rms_norm_ref(x, norm, eps).float()
    qkv = F.linear(y, weight.float(), None if bias is None else bias.float()).to(x.dtype).view(b, hq + 2 * hk, d)
    own_q, k, v = qkv.split((hq, hk, hk), 1)
    rope_ref(own_q, k, cos, sin, positions)
    q.copy_(own_q)
    kv_write_ref(k, v, k_cache, v_cache, slot_mapping)
    return q, k_cache, v_cache


@triton.jit(do_not_specialize=["rows", "eps", "num_positions", "num_slots"])
def _decode_qkv_kernel(
    x, norm, weight, bias, cos, sin, positions, slot_mapping, q, k_cache, v_cache, rows, eps, num_positions, num_slots,
    stride_x, stride_w, stride_cos, stride_sin, stride_qt, stride_qh,
    stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    pair = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)  # of dimensions; HALF of them are turned
    row = tl.arange(0, BLOCK_B)
    row_mask, pair_mask = row < rows, pair < D // 2
    turned = pair < HALF
    one = tl.where(turned, pair, HALF + pair)  # behind the turned ones: [2 HALF, 2 HALF + rest/2) and its second half
    two = tl.where(turned, pair + HALF, D // 2 + pair)
    w1 = load_weight(weight, head * D + one, pair_mask, 0, stride_w, K, BLOCK_K)
    w2 = load_weight(weight, head * D + two, pair_mask, 0, stride_w, K, BLOCK_K)
    wait_for_inputs(PDL)
    scale = inverse_rms(x, row, row_mask, stride_x, eps, K, BLOCK_K, BLOCK_B)
    v = load_rows(x, norm, row, row_mask, scale, 0, stride_x, K, BLOCK_K, True)
    x1 = add_product(tl.zeros([BLOCK_F, BLOCK_B], tl.float32), w1, v, BLOCK_B)
    x2 = add_product(tl.zeros([BLOCK_F, BLOCK_B], tl.float32), w2, v, BLOCK_B)
    for start in range(BLOCK_K, K, BLOCK_K):
        v = load_rows(x, norm, row, row_mask, scale, start, stride_x, K, BLOCK_K, True)
        x1 = add_product(x1, load_weight(weight, head * D + one, pair_mask, start, stride_w, K, BLOCK_K), v, BLOCK_B)
        x2 = add_product(x2, load_weight(weight, head * D + two, pair_mask, start, stride_w, K, BLOCK_K), v, BLOCK_B)
    let_next_begin(PDL)
    if BIAS:
        x1 += tl.load(bias + head * D + one, mask=pair_mask, other=0.0).to(tl.float32)[:, None]
        x2 += tl.load(bias + head * D + two, mask=pair_mask, other=0.0).to(tl.float32)[:, None]
    x1, x2 = x1.to(v.dtype).to(tl.float32), x2.to(v.dtype).to(tl.float32)
    mask = pair_mask[:, None] & row_mask[None, :]  # [BLOCK_F, BLOCK_B]
    if head < HQ + HK:
        position = tl.load(positions + row, mask=row_mask, other=0)
        inside = (position >= 0) & (position < num_positions)
        poison = tl.where(inside, 0.0, float("nan"))[None, :]
        angle = mask & turned[:, None] & inside[None, :]
        c = tl.load(cos + position[None, :] * stride_cos + pair[:, None], mask=angle, other=0.0) + poison
        s = tl.load(sin + position[None, :] * stride_sin + pair[:, None], mask=angle, other=0.0) + poison
        y1 = tl.where(turned[:, None], x1 * c - x2 * s, x1)
        y2 = tl.where(turned[:, None], x2 * c + x1 * s, x2)
        x1, x2 = y1, y2
    if head < HQ:
        at = q + row.to(tl.int64)[None, :] * stride_qt + head * stride_qh
        tl.store(at + one[:, None], x1.to(v.dtype), mask=mask)
        tl.store(at + two[:, None], x2.to(v.dtype), mask=mask)
    else:
        slot = tl.load(slot_mapping + row, mask=row_mask, other=-1)
        kept = (slot >= 0) & (slot < num_slots)
        slot = tl.where(kept, slot, 0)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        mask = mask & kept[None, :]
        if head < HQ + HK:
            at = k_cache + (page * stride_kp + offset * stride_ks + (head - HQ) * stride_kh)[None, :]
        else:
            at = v_cache + (page * stride_vp + offset * stride_vs + (head - HQ - HK) * stride_vh)[None, :]
        tl.store(at + one[:, None], x1.to(v.dtype), mask=mask)
        tl.store(at + two[:, None], x2.to(v.dtype), mask=mask)


def decode_qkv(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    bias: torch.Tensor | None = None, pdl: bool = False,
) -> Written:  # fmt: skip
    """See decode_qkv_ref; b at most MAX_ROWS, D and D - R even. pdl: the kernel before it on the stream lets its successor
    begin early, and so does this one."""
    check_tensor("x", x, (None, None))
    check_rows("x", x)
    b, n = x.shape
    check_tensor("norm", norm, (n,), (x.dtype,))
    check_tensor("q", q, (b, None, None), (x.dtype,))
    _, hq, d = q.shape
    check_tensor("k_cache", k_cache, (None, None, None, d), (x.dtype,))
    pages, page_size, hk, _ = k_cache.shape
    check_tensor("v_cache", v_cache, (pages, page_size, hk, d), (x.dtype,))
    check_tensor("weight", weight, ((hq + 2 * hk) * d, n), (x.dtype,))
    check_tensor("cos", cos, (None, None), (torch.float32,))
    half = cos.shape[1]
    if d % 2 or not 1 <= 2 * half <= d:
        raise ValueError(f"cos has {half} columns: rotary dimension {2 * half} must be 2..{d}, the head dimension, which must be even")
    check_tensor("sin", sin, tuple(cos.shape), (torch.float32,))
    check_tensor("positions", positions, (b,), (torch.int64,))
    check_tensor("slot_mapping", slot_mapping, (b,), (torch.int64,))
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), (x.dtype,))
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, must be >= 0")
    for name, written in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_written(name, written)
    check_devices(
        x=x, norm=norm, weight=weight, cos=cos, sin=sin, positions=positions, slot_mapping=slot_mapping, q=q, k_cache=k_cache,
        v_cache=v_cache, **({} if bias is None else {"bias": bias}),
    )  # fmt: skip
    if b == 0:
        return q, k_cache, v_cache
    block_b, block_k = shape_of(b, n, x.element_size() == 2)
    block_f = 4 if block_b == 1 else 16
    _decode_qkv_kernel[(hq + 2 * hk, triton.cdiv(d // 2, block_f))](
        x, norm, weight, bias, cos, sin, positions, slot_mapping, q, k_cache, v_cache, b, float(eps), cos.shape[0],
        pages * page_size, x.stride(0), weight.stride(0), cos.stride(0), sin.stride(0), q.stride(0), q.stride(1),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        HQ=hq, HK=hk, D=d, HALF=half, PAGE_SIZE=page_size, K=n, BIAS=bias is not None,
        BLOCK_F=block_f, BLOCK_K=block_k, BLOCK_B=block_b, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return q, k_cache, v_cache


def decode_qkv_loop(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, slot_mapping: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    bias: torch.Tensor | None = None, pdl: bool = False,
) -> Generator[None, None, Written]:  # fmt: skip
    """decode_qkv_ref, a row an iteration."""
    for i in range(x.shape[0]):
        row = slice(i, i + 1)
        decode_qkv_ref(x[row], norm, weight, eps, cos, sin, positions[row], slot_mapping[row], q[row], k_cache, v_cache, bias)
        yield
    return q, k_cache, v_cache


def make_inputs(
    device: str, dtype: torch.dtype, seed: int, tokens: int, n: int, hq: int, hk: int, d: int, r: int = 0, rows: int = 64,
    page_size: int = 16, pages: int = 8, layers: int = 1, padding: int = 0, bias: bool = False,
) -> dict:  # fmt: skip
    """r = 0 turns the whole head; rows: the tables' length; the caches are views into one NaN arena whose pages hold `layers`
    layers; the last `padding` rows have slot -1."""
    g = make_generator(device, seed)
    r, part, width = r or d, page_size * hk * d, (hq + 2 * hk) * d
    stride = 2 * layers * part
    arena = torch.full((pages * stride + 2 * FENCE,), float("nan"), dtype=dtype, device=device)
    at = FENCE + 2 * (layers - 1) * part
    shape, strides = (pages, page_size, hk, d), (stride, hk * d, d, 1)
    angles = torch.arange(rows, device=device)[:, None] * 10000.0 ** -(torch.arange(0, r, 2, device=device)[None, :] / r)
    cos, sin = fenced(g, (rows, r // 2), torch.float32), fenced(g, (rows, r // 2), torch.float32)
    slots = torch.randperm(pages * page_size, generator=g, device=device)[:tokens]
    slots[tokens - padding :] = -1
    return {
        "x": fenced(g, (tokens, n), dtype, row_pad=5), "norm": fenced(g, (n,), dtype),
        "weight": fenced(g, (width, n), dtype, scale=n**-0.5), "eps": 1e-5, "cos": cos.copy_(angles.cos()), "sin": sin.copy_(angles.sin()),
        "positions": torch.randint(0, rows, (tokens,), generator=g, device=device), "slot_mapping": slots,
        "q": fenced(g, (tokens, hq, d), dtype), "k_cache": arena.as_strided(shape, strides, at),
        "v_cache": arena.as_strided(shape, strides, at + part), "bias": fenced(g, (width,), dtype) if bias else None,
    }  # fmt: skip


def _flops(inputs: Mapping) -> int:
    x, weight, q, cos = (inputs[n] for n in ("x", "weight", "q", "cos"))
    turned = x.shape[0] * (q.shape[1] + inputs["k_cache"].shape[2]) * cos.shape[1]
    return 2 * x.shape[0] * weight.numel() + 4 * x.numel() + 6 * turned


def _bytes(inputs: Mapping) -> int:
    x, weight, cos = (inputs[n] for n in ("x", "weight", "cos"))
    moved = (x.numel() + weight.numel() + weight.shape[1] + x.shape[0] * weight.shape[0]) * x.element_size()
    return moved + x.shape[0] * (2 * cos.shape[1] * 4 + 2 * 8)


SPEC = KernelSpec(
    name="decode_qkv",
    formula="q = rope(y Wq^T), k_cache[slot] = rope(y Wk^T), v_cache[slot] = y Wv^T, y = rms_norm(x, norm, eps)",
    fn=decode_qkv,
    ref=decode_qkv_ref,
    make_inputs=make_inputs,
    outputs=("q", "k_cache", "v_cache"),
    cases=(
        Case("b1_smollm2", {"tokens": 1, "n": 576, "hq": 9, "hk": 3, "d": 64, "layers": 2}),
        Case("b3_padding", {"tokens": 3, "n": 100, "hq": 3, "hk": 1, "d": 40, "padding": 1}),
        Case("b1_partial", {"tokens": 1, "n": 63, "hq": 2, "hk": 2, "d": 32, "r": 12, "page_size": 8}),
        Case("b17_bias_partial", {"tokens": 17, "n": 70, "hq": 2, "hk": 1, "d": 24, "r": 8, "bias": True}),
        Case("b1_k1100", {"tokens": 1, "n": 1100, "hq": 1, "hk": 1, "d": 16}),
        Case("b64_d80", {"tokens": 64, "n": 48, "hq": 2, "hk": 1, "d": 80}),
    ),
    bench_cases=(
        Case("b1_576_9_3_64", {"tokens": 1, "n": 576, "hq": 9, "hk": 3, "d": 64, "layers": 30, "rows": 8192}),
        Case("b32_576_9_3_64", {"tokens": 32, "n": 576, "hq": 9, "hk": 3, "d": 64, "layers": 30, "rows": 8192, "pages": 64}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("x", lambda x: x[0]),
        Bad("x", lambda x: torch.zeros(65, x.shape[1])),
        Bad("norm", lambda w: w[:-1]),
        Bad("weight", lambda w: w[:-1]),
        Bad("weight", lambda w: w.half()),
        Bad("eps", lambda eps: -1.0),
        Bad("cos", lambda cos: cos.half()),
        Bad("cos", lambda cos: torch.zeros(64, 33)),
        Bad("sin", lambda sin: sin[:-1]),
        Bad("positions", lambda p: p.int()),
        Bad("slot_mapping", lambda s: s.int()),
        Bad("q", lambda q: q[0]),
        Bad("q", lambda q: q[:, :1].expand(-1, q.shape[1], -1)),
        Bad("k_cache", lambda cache: cache.half()),
        Bad("k_cache", lambda cache: cache[:, :, :, :-1]),
        Bad("v_cache", lambda cache: cache[:-1]),
    ),
    loop=decode_qkv_loop,
    loop_iterations=lambda inputs: inputs["x"].shape[0],
    tolerance={torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2},
)
