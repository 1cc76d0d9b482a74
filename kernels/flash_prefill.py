"""FlashAttention over paged keys and values for a ragged batch: any number of queries a sequence.

Arguments, formula and reference are in kernels/attention.py.

One program a (Q-block, key head). The rows of a Q-block are queries x group, so a page is read once for all heads that
share it. Online softmax in units of the raw dot product, p = exp2((x - m) * c) with the scale folded into c: the
subtraction comes before the scaling, so scores near -6e4 keep their digits. Blocks that every row sees run first and
unmasked. The grid depends on t and b alone.

Rejected: a finite mask value as -inf (wrong for very negative scores), one program a query head (reads each page
Hq / Hk times).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention import HostPlan, Tree, attention_bytes, attention_flops, attention_ref, check_attention, find_sequence, make_inputs
from kernels.common import power_of_two
from kernels.spec import Bad, Case, KernelSpec


@triton.jit
def _key_blocks(
    q, k_cache, v_cache, table, m, l, acc, row_position, key_low, key_high, start, stop, scale, exponent, softcap,
    stride_kp, stride_ks, stride_vp, stride_vs,
    PAGE_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Folds the keys [start, stop) into (m, l, acc). Unmasked: every row sees all of them."""
    col_d = tl.arange(0, BLOCK_D)
    col_v = tl.arange(0, BLOCK_DV)
    for block in range(start, stop, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        readable = (position >= key_low) & (position < key_high)
        if MASKED:
            page = tl.load(table + position // PAGE_SIZE, mask=readable, other=0).to(tl.int64)
        else:
            page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
        slot = position % PAGE_SIZE
        k_at = k_cache + (page * stride_kp + slot * stride_ks)[None, :] + col_d[:, None]  # [BLOCK_D, BLOCK_N]
        v_at = v_cache + (page * stride_vp + slot * stride_vs)[:, None] + col_v[None, :]  # [BLOCK_N, BLOCK_DV]
        if MASKED:
            k = tl.load(k_at, mask=readable[None, :] & (col_d < D)[:, None], other=0.0)
        elif D == BLOCK_D:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(col_d < D)[:, None], other=0.0)
        x = tl.dot(q, k, input_precision="ieee")  # [BLOCK_M, BLOCK_N], fp32
        if SOFTCAP:
            # tanh(y) = 1 - 2 / (exp(2y) + 1): exact limits for large |y|
            x = softcap * (1.0 - 2.0 / (tl.exp(x * (2.0 * scale / softcap)) + 1.0))
        if MASKED:
            seen = readable[None, :] & (position[None, :] <= row_position[:, None])
            if WINDOW > 0:
                seen = seen & (position[None, :] > row_position[:, None] - WINDOW)
            x = tl.where(seen, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, axis=1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        p = tl.exp2((x - m_safe[:, None]) * exponent)
        shrink = tl.exp2((m - m_safe) * exponent)
        l = l * shrink + tl.sum(p, axis=1)
        m = m_new
        if MASKED:
            v = tl.load(v_at, mask=readable[:, None] & (col_v < DV)[None, :], other=0.0)
        elif DV == BLOCK_DV:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(col_v < DV)[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return m, l, acc


@triton.jit(do_not_specialize=["t", "b", "scale", "softcap"])
def _flash_prefill_kernel(
    q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out, lse, t, b, scale, softcap,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_bt,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, RETURN_LSE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    s = find_sequence(cu_seqlens_q, b, block, BLOCK_Q)
    # the rows behind the last sequence are a sequence b without keys
    q_start = tl.load(cu_seqlens_q + s)
    q_stop = t
    seq_len = 0
    if s < b:
        q_stop = tl.load(cu_seqlens_q + s + 1)
        seq_len = tl.load(seq_lens + s)
    first = q_start + (block - (q_start // BLOCK_Q + s)) * BLOCK_Q  # first row of q in this block
    if first < q_stop:
        lane = tl.arange(0, BLOCK_M)
        row = first + lane // GROUP
        head = kv_head * GROUP + lane % GROUP
        active = (lane < BLOCK_Q * GROUP) & (row < q_stop)
        row_position = seq_len - q_stop + row  # may be negative: a row before the first key
        col_d = tl.arange(0, BLOCK_D)
        at = row.to(tl.int64) * stride_qt + head * stride_qh
        q_tile = tl.load(q + at[:, None] + col_d[None, :], mask=active[:, None] & (col_d < D)[None, :], other=0.0)

        first_position = seq_len - q_stop + first
        key_high = tl.minimum(seq_len, first_position + BLOCK_Q)
        key_low = 0
        full_stop = 0
        if WINDOW > 0:
            key_low = tl.maximum(first_position - WINDOW + 1, 0)
        else:
            full_stop = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
        start = key_low // BLOCK_N * BLOCK_N

        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        log2e: tl.constexpr = 1.4426950408889634
        exponent = log2e if SOFTCAP else scale * log2e
        k_head = k_cache + kv_head * stride_kh
        v_head = v_cache + kv_head * stride_vh
        table = block_table + s.to(tl.int64) * stride_bt
        if WINDOW == 0:
            m, l, acc = _key_blocks(
                q_tile, k_head, v_head, table, m, l, acc, row_position, key_low, key_high, 0, full_stop,
                scale, exponent, softcap, stride_kp, stride_ks, stride_vp, stride_vs,
                PAGE_SIZE, D, DV, WINDOW, SOFTCAP, False, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
            start = full_stop
        m, l, acc = _key_blocks(
            q_tile, k_head, v_head, table, m, l, acc, row_position, key_low, key_high, start, key_high,
            scale, exponent, softcap, stride_kp, stride_ks, stride_vp, stride_vs,
            PAGE_SIZE, D, DV, WINDOW, SOFTCAP, True, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

        empty = l == 0.0
        acc = acc / tl.where(empty, 1.0, l)[:, None]
        col_v = tl.arange(0, BLOCK_DV)
        out_row = row.to(tl.int64) * HQ + head
        tl.store(out + out_row[:, None] * DV + col_v[None, :], acc.to(out.dtype.element_ty),
                 mask=active[:, None] & (col_v < DV)[None, :])  # fmt: skip
        if RETURN_LSE:
            ln2: tl.constexpr = 0.6931471805599453
            value = m * (exponent * ln2) + tl.log(tl.where(empty, 1.0, l))
            tl.store(lse + out_row, tl.where(empty, float("-inf"), value), mask=active)


def flash_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: Tree | None = None, return_lse: bool = False, host: HostPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See attention_ref."""
    check_attention(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_query_len, window, softcap, sinks, tree)
    (t, hq, d), (_, page_size, hk, dv), b = q.shape, v_cache.shape, seq_lens.shape[0]
    out = torch.empty((t, hq, dv), dtype=q.dtype, device=q.device)
    lse = torch.empty((t, hq), dtype=torch.float32, device=q.device) if return_lse else None
    if t > 0:
        group, wide, half = hq // hk, max(power_of_two(d), power_of_two(dv)), q.element_size() == 2
        # fp32 runs on FMA units and spills early; 16-bit rows come in the tensor cores' 64
        largest = (128 if wide <= 128 else 64) if half else (32 if wide <= 128 else 16)
        block_m = max(16, power_of_two(group), min(largest, power_of_two(group * max_query_len)))
        block_n = (64 if wide <= 128 else 32) if half else (32 if wide <= 128 else 16)
        block_q = block_m // group if max_query_len > 1 else 1
        grid = (t // block_q + b + 1, hk)
        _flash_prefill_kernel[grid](
            q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out, lse, t, b, float(scale),
            1.0 if softcap is None else float(softcap), q.stride(0), q.stride(1), *k_cache.stride()[:3],
            *v_cache.stride()[:3], block_table.stride(0),
            HQ=hq, GROUP=group, D=d, DV=dv, PAGE_SIZE=page_size, WINDOW=window or 0, SOFTCAP=softcap is not None,
            RETURN_LSE=return_lse, BLOCK_Q=block_q, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_D=max(16, power_of_two(d)), BLOCK_DV=max(16, power_of_two(dv)),
            num_warps=8 if block_m * wide >= (8192 if half else 4096) else 4, num_stages=2,
        )  # fmt: skip
    return (out, lse) if return_lse else out


_MIXED = "1:33 5:40 17:17 1:1 3:16"
SPEC = KernelSpec(
    name="flash_prefill",
    formula="out = softmax(softcap*tanh(scale*q.k/softcap) over keys j <= position, j > position - window) v",
    fn=flash_prefill,
    ref=attention_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("decode_9_3_64", {"sequences": "1:1 1:15 1:16 1:17 1:33 1:100", "hq": 9, "hk": 3, "d": 64}),
        Case("mixed_9_3_64", {"sequences": _MIXED, "hq": 9, "hk": 3, "d": 64, "layers": 3}),
        Case("prefill_63_100", {"sequences": "63:63 100:100", "hq": 4, "hk": 2, "d": 64}),
        Case("verify_after_cache", {"sequences": "4:63 8:100 2:17", "hq": 4, "hk": 1, "d": 32, "page_size": 8}),
        Case("d40", {"sequences": _MIXED, "hq": 2, "hk": 2, "d": 40}),
        Case("d72", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 72, "page_size": 32}),
        Case("d80", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 80}),
        Case("d96", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 96}),
        Case("d112", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 112, "page_size": 64}),
        Case("d192_dv128", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 192, "dv": 128, "page_size": 128}),
        Case("d256", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 256}),
        Case("d16", {"sequences": _MIXED, "hq": 3, "hk": 1, "d": 16}),
        Case("d13_dv7", {"sequences": _MIXED, "hq": 3, "hk": 1, "d": 13, "dv": 7}),
        Case("window_4", {"sequences": _MIXED + " 1:100", "hq": 4, "hk": 2, "d": 32, "window": 4}),
        Case("window_33", {"sequences": "1:33 1:34 40:80 1:100", "hq": 4, "hk": 2, "d": 32, "window": 33}),
        Case("window_1", {"sequences": _MIXED, "hq": 2, "hk": 2, "d": 16, "window": 1}),
        Case("softcap_50", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 64, "softcap": 50.0, "q_scale": 40.0}),
        Case("softcap_window", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 32, "softcap": 5.0, "window": 9}),
        Case("rows_without_keys", {"sequences": "5:3 1:0 3:0 1:20 4:4", "hq": 4, "hk": 2, "d": 32, "pad_rows": 5}),
        Case("decode_padding", {"sequences": "1:17 1:0 1:3", "hq": 9, "hk": 3, "d": 64, "pad_rows": 3}),
        Case("decode_gaps", {"sequences": "0:9 1:17 0:0 1:3 0:5", "hq": 4, "hk": 2, "d": 32, "pad_rows": 1}),
        Case("no_lse", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 32, "pad_rows": 1, "lse": False}),
        Case("group_71", {"sequences": "1:40 3:17", "hq": 71, "hk": 1, "d": 64}),
        Case("ragged_1000", {"sequences": "7:1000", "hq": 2, "hk": 1, "d": 64, "lse": False}),
    ),
    bench_cases=(
        Case("decode_b32_kv4096_32_8_128", {"sequences": "1:4096x32", "hq": 32, "hk": 8, "d": 128, "lse": False}),
        Case("prefill_4x2048_32_8_128", {"sequences": "2048:2048x4", "hq": 32, "hk": 8, "d": 128, "lse": False}),
        Case("decode_b1_kv1000_9_3_64", {"sequences": "1:1000", "hq": 9, "hk": 3, "d": 64, "lse": False}),
        Case("two_chunks_30_decodes_9_3_64", {"sequences": "512:1024x2 1:700x30", "hq": 9, "hk": 3, "d": 64, "lse": False}),
    ),
    flops=attention_flops,
    bytes=attention_bytes,
    bad=(
        Bad("q", lambda q: q[:, :7]),
        Bad("q", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)),
        Bad("q", lambda q: q.double()),
        Bad("k_cache", lambda cache: cache[..., :-1]),
        Bad("k_cache", lambda cache: cache.half()),
        Bad("v_cache", lambda cache: cache[:-1]),
        Bad("v_cache", lambda cache: cache[:, :, :1]),
        Bad("block_table", lambda table: table.long()),
        Bad("block_table", lambda table: table[:-1]),
        Bad("cu_seqlens_q", lambda cu: cu[:-1]),
        Bad("cu_seqlens_q", lambda cu: cu.long()),
        Bad("seq_lens", lambda lens: lens.float()),
        Bad("scale", lambda scale: 0.0),
        Bad("scale", lambda scale: float("inf")),
        Bad("softcap", lambda softcap: -50.0),
        Bad("softcap", lambda softcap: 0.0),
        Bad("window", lambda window: 0),
        Bad("max_query_len", lambda n: 0),
    ),
    empty_dims={"sequences": ""},
    tolerance={torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2},
)
