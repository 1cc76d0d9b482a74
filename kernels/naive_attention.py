"""Attention that materialises its scores in HBM: the baseline that FlashAttention is measured against.

Arguments and reference are in kernels/attention.py. Three kernels, each from HBM to HBM:

    S = cap(scale * Q K^T), -inf where hidden     fp32 [Hq, t, keys]
    P = softmax(S) row by row                     in q's type [Hq, t, keys]
    out = P V

keys is the block table's width in slots; a row uses its sequence's keys, rounded up to BLOCK_N. As in the textbook's
version the part above the diagonal is computed and written too, each query head reads K and V by itself, and S and P
cost what naive_bytes() says: quadratic in the length, where FlashAttention's traffic is linear.

Does not know sinks and draft trees: they would show nothing more about memory. Rejected: torch's unfused operations
(they cannot read pages; gathering K and V first would be a fourth pass and hide the comparison).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import pairwise

import torch
import triton
import triton.language as tl

from kernels.attention import HostPlan, Tree, attention_bytes, attention_flops, attention_ref, check_attention, find_sequence, make_inputs
from kernels.common import power_of_two
from kernels.spec import Bad, Case, KernelSpec

BLOCK_N = 64
SOFTMAX_STEP = 1024


@triton.jit
def _find_rows(cu_seqlens_q, seq_lens, t, b, BLOCK_Q: tl.constexpr):
    """(sequence, first row of q, row behind its last one, its keys) of this program; behind the last sequence: no keys."""
    s = find_sequence(cu_seqlens_q, b, tl.program_id(0), BLOCK_Q)
    q_start = tl.load(cu_seqlens_q + s)
    q_stop = t
    seq_len = 0
    if s < b:
        q_stop = tl.load(cu_seqlens_q + s + 1)
        seq_len = tl.load(seq_lens + s)
    return s, q_start + (tl.program_id(0) - (q_start // BLOCK_Q + s)) * BLOCK_Q, q_stop, seq_len


@triton.jit(do_not_specialize=["t", "b", "scale", "softcap"])
def _scores_kernel(
    q, k_cache, block_table, cu_seqlens_q, seq_lens, scores, t, b, scale, softcap,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_bt, stride_xh, stride_xt,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    s, first, q_stop, seq_len = _find_rows(cu_seqlens_q, seq_lens, t, b, BLOCK_Q)
    start = tl.program_id(1) * BLOCK_N
    if (first < q_stop) & (start < seq_len):
        head = tl.program_id(2).to(tl.int64)
        row = first + tl.arange(0, BLOCK_Q)
        key = start + tl.arange(0, BLOCK_N)
        col = tl.arange(0, BLOCK_D)
        active, readable = row < q_stop, key < seq_len
        position = seq_len - q_stop + row
        seen = readable[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
            # a slot that no row of the sequence sees may hold anything
            readable = readable & (key > seq_len - q_stop + tl.load(cu_seqlens_q + s) - WINDOW)
        q_at = row.to(tl.int64) * stride_qt + head * stride_qh
        q_tile = tl.load(q + q_at[:, None] + col[None, :], mask=active[:, None] & (col < D)[None, :], other=0.0)
        page = tl.load(block_table + s.to(tl.int64) * stride_bt + key // PAGE_SIZE, mask=readable, other=0).to(tl.int64)
        k_at = page * stride_kp + (key % PAGE_SIZE) * stride_ks + head // GROUP * stride_kh
        k = tl.load(k_cache + k_at[:, None] + col[None, :], mask=readable[:, None] & (col < D)[None, :], other=0.0)
        x = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            # tanh(y) = 1 - 2 / (exp(2y) + 1): exact limits for large |y|
            x = softcap * (1.0 - 2.0 / (tl.exp(x * (2.0 * scale / softcap)) + 1.0))
        else:
            x = x * scale
        at = head * stride_xh + row.to(tl.int64) * stride_xt
        tl.store(scores + at[:, None] + key[None, :], tl.where(seen, x, float("-inf")), mask=active[:, None])


@triton.jit(do_not_specialize=["t", "b"])
def _softmax_kernel(
    scores, probs, cu_seqlens_q, seq_lens, lse, t, b, stride_xh, stride_xt,
    HQ: tl.constexpr, RETURN_LSE: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program a (row, head). The second pass finds the row in the cache that the first one filled."""
    _, row, q_stop, seq_len = _find_rows(cu_seqlens_q, seq_lens, t, b, 1)
    if row < q_stop:
        head = tl.program_id(1).to(tl.int64)
        at = head * stride_xh + row.to(tl.int64) * stride_xt
        keys = tl.cdiv(seq_len, BLOCK_N) * BLOCK_N
        m = tl.full([], float("-inf"), tl.float32)
        l = tl.zeros([], tl.float32)
        for start in range(0, keys, STEP):
            key = start + tl.arange(0, STEP)
            x = tl.load(scores + at + key, mask=key < keys, other=float("-inf"))
            m_new = tl.maximum(m, tl.max(x, axis=0))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            l = l * tl.exp(m - m_safe) + tl.sum(tl.exp(x - m_safe), axis=0)
            m = m_new
        empty = l == 0.0
        m_safe = tl.where(empty, 0.0, m)
        l_safe = tl.where(empty, 1.0, l)
        for start in range(0, keys, STEP):
            key = start + tl.arange(0, STEP)
            x = tl.load(scores + at + key, mask=key < keys, other=float("-inf"))
            tl.store(probs + at + key, (tl.exp(x - m_safe) / l_safe).to(probs.dtype.element_ty), mask=key < keys)
        if RETURN_LSE:
            tl.store(lse + row.to(tl.int64) * HQ + head, tl.where(empty, float("-inf"), m_safe + tl.log(l_safe)))


@triton.jit(do_not_specialize=["t", "b"])
def _values_kernel(
    probs, v_cache, block_table, cu_seqlens_q, seq_lens, out, t, b, stride_xh, stride_xt, stride_vp, stride_vs, stride_vh, stride_bt,
    HQ: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    s, first, q_stop, seq_len = _find_rows(cu_seqlens_q, seq_lens, t, b, BLOCK_Q)
    if first < q_stop:
        head = tl.program_id(1).to(tl.int64)
        row = first + tl.arange(0, BLOCK_Q)
        active = row < q_stop
        col = tl.arange(0, BLOCK_DV)
        low = 0
        if WINDOW > 0:  # what no row of the sequence sees is not read
            low = tl.maximum(seq_len - q_stop + tl.load(cu_seqlens_q + s) - WINDOW + 1, 0)
        acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
        at = head * stride_xh + row.to(tl.int64) * stride_xt
        for start in range(0, seq_len, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            readable = (key >= low) & (key < seq_len)
            p = tl.load(probs + at[:, None] + key[None, :], mask=active[:, None], other=0.0)
            page = tl.load(block_table + s.to(tl.int64) * stride_bt + key // PAGE_SIZE, mask=readable, other=0).to(tl.int64)
            v_at = page * stride_vp + (key % PAGE_SIZE) * stride_vs + head // GROUP * stride_vh
            v = tl.load(v_cache + v_at[:, None] + col[None, :], mask=readable[:, None] & (col < DV)[None, :], other=0.0)
            acc = tl.dot(p, v, acc, input_precision="ieee")
        out_row = row.to(tl.int64) * HQ + head
        tl.store(out + out_row[:, None] * DV + col[None, :], acc.to(out.dtype.element_ty), mask=active[:, None] & (col < DV)[None, :])


def naive_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: Tree | None = None, return_lse: bool = False, host: HostPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See attention_ref. Takes Hq * t * keys * (4 + q's element size) bytes of scratch memory.

    Raises:
        ValueError: naming an argument that cannot be taken; sinks and tree must be None.
    """
    check_attention(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_query_len, window, softcap, sinks, tree)
    for name, x in (("sinks", sinks), ("tree", tree)):
        if x is not None:
            raise ValueError(f"{name} must be None: naive_attention does not know it")
    (t, hq, d), (_, page_size, hk, dv), (b, blocks) = q.shape, v_cache.shape, block_table.shape
    out = torch.empty((t, hq, dv), dtype=q.dtype, device=q.device)
    lse = torch.empty((t, hq), dtype=torch.float32, device=q.device) if return_lse else None
    if t > 0:
        keys = -(-blocks * page_size // BLOCK_N) * BLOCK_N
        scores = torch.empty((hq, t, keys), dtype=torch.float32, device=q.device)
        probs = torch.empty((hq, t, keys), dtype=q.dtype, device=q.device)
        half = q.element_size() == 2  # fp32 runs on FMA units and spills early
        block_q = max(16, min(64 if half else 16, power_of_two(max_query_len)))
        q_blocks = t // block_q + b + 1
        same = {
            "GROUP": hq // hk,
            "PAGE_SIZE": page_size,
            "WINDOW": window or 0,
            "BLOCK_Q": block_q,
            "BLOCK_N": BLOCK_N,
            "num_warps": 4 if half else 8,
        }
        if keys > 0:
            _scores_kernel[(q_blocks, keys // BLOCK_N, hq)](
                q, k_cache, block_table, cu_seqlens_q, seq_lens, scores, t, b, float(scale), 1.0 if softcap is None else float(softcap),
                q.stride(0), q.stride(1), *k_cache.stride()[:3], block_table.stride(0), scores.stride(0), scores.stride(1),
                **same, D=d, SOFTCAP=softcap is not None, BLOCK_D=max(16, power_of_two(d)),
            )  # fmt: skip
        _softmax_kernel[(t + b + 1, hq)](
            scores, probs, cu_seqlens_q, seq_lens, lse, t, b, scores.stride(0), scores.stride(1),
            HQ=hq, RETURN_LSE=return_lse, BLOCK_N=BLOCK_N, STEP=SOFTMAX_STEP,
        )  # fmt: skip
        _values_kernel[(q_blocks, hq)](
            probs, v_cache, block_table, cu_seqlens_q, seq_lens, out, t, b, probs.stride(0), probs.stride(1), *v_cache.stride()[:3],
            block_table.stride(0), **same, HQ=hq, DV=dv, BLOCK_DV=max(16, power_of_two(dv)), num_stages=2,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def naive_bytes(inputs: Mapping) -> int:
    """HBM bytes that the three kernels move when each reads its inputs once and writes its output once:

    q, k -> S;  S -> P;  P, v -> out, with S and P of Hq * n_q * (keys up to BLOCK_N) elements a sequence.
    """
    (t, hq, d), (_, _, hk, dv), size = inputs["q"].shape, inputs["v_cache"].shape, inputs["q"].element_size()
    queries = [b - a for a, b in pairwise(inputs["cu_seqlens_q"].tolist())]
    pairs = keys = 0
    for n_q, length in zip(queries, inputs["seq_lens"].tolist()):
        pairs += n_q * -(-length // BLOCK_N) * BLOCK_N
        keys += length if n_q else 0
    matrices = hq * pairs * 2 * (4 + size)  # both written once and read once
    return matrices + (t * hq * (d + dv) + keys * hk * (d + dv)) * size + (4 * t * hq if inputs["return_lse"] else 0)


def naive_attention_loop(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: Tree | None = None, return_lse: bool = False, host: HostPlan | None = None,
) -> Generator[None, None, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """One query row an iteration, all its scores at once."""
    (t, hq, _), (_, page_size, hk, dv) = q.shape, v_cache.shape
    out = torch.zeros((t, hq, dv), dtype=torch.float32, device=q.device)
    lse = torch.full((t, hq), -torch.inf, device=q.device)
    for s, ((first, behind), length) in enumerate(zip(pairwise(cu_seqlens_q.tolist()), seq_lens.tolist())):
        for row in range(first, behind):
            position = length - behind + row
            low = 0 if window is None else max(0, position - window + 1)
            key = torch.arange(low, max(low, position + 1), device=q.device)
            if len(key):
                at = (block_table[s, key // page_size].long(), key % page_size)
                k, v = (cache[at].float().repeat_interleave(hq // hk, 1) for cache in (k_cache, v_cache))  # [keys, Hq, D]
                x = scale * torch.einsum("hd,khd->hk", q[row].float(), k)
                if softcap is not None:
                    x = softcap * torch.tanh(x / softcap)
                lse[row] = torch.logsumexp(x, -1)
                out[row] = torch.einsum("hk,khd->hd", torch.softmax(x, -1), v)
            yield
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


_MIXED = "1:33 5:40 17:17 1:1 3:16"
SPEC = KernelSpec(
    name="naive_attention",
    formula="S = scale*q.k, P = softmax(S), out = P v, with S and P written to HBM",
    fn=naive_attention,
    ref=attention_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("decode_9_3_64", {"sequences": "1:1 1:15 1:16 1:17 1:33 1:100", "hq": 9, "hk": 3, "d": 64}),
        Case("mixed_9_3_64", {"sequences": _MIXED, "hq": 9, "hk": 3, "d": 64, "layers": 3}),
        Case("prefill_63_100", {"sequences": "63:63 100:100", "hq": 4, "hk": 2, "d": 64}),
        Case("chunk_after_cache", {"sequences": "4:63 20:100 2:17", "hq": 2, "hk": 1, "d": 40, "page_size": 8}),
        Case("row_longer_than_a_step", {"sequences": "2:1100", "hq": 2, "hk": 1, "d": 32, "lse": False}),
        Case("d72", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 72, "page_size": 32}),
        Case("d192_dv128", {"sequences": _MIXED, "hq": 2, "hk": 1, "d": 192, "dv": 128, "page_size": 128}),
        Case("d256", {"sequences": _MIXED, "hq": 2, "hk": 1, "d": 256}),
        Case("d13_dv7", {"sequences": _MIXED, "hq": 3, "hk": 1, "d": 13, "dv": 7}),
        Case("window_4", {"sequences": _MIXED + " 1:100", "hq": 4, "hk": 2, "d": 32, "window": 4}),
        Case("window_33", {"sequences": "1:33 1:34 40:80 1:100", "hq": 4, "hk": 2, "d": 32, "window": 33}),
        Case("softcap_50", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 64, "softcap": 50.0, "q_scale": 40.0}),
        Case("softcap_window", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 32, "softcap": 5.0, "window": 9}),
        Case("rows_without_keys", {"sequences": "5:3 1:0 3:0 1:20 4:4", "hq": 4, "hk": 2, "d": 32, "pad_rows": 5}),
        Case("gaps", {"sequences": "0:9 1:17 0:0 1:3 0:5", "hq": 4, "hk": 2, "d": 32, "pad_rows": 1}),
    ),
    bench_cases=(
        Case("prefill_4x2048_32_8_128", {"sequences": "2048:2048x4", "hq": 32, "hk": 8, "d": 128, "lse": False}),
        Case("decode_b32_kv4096_32_8_128", {"sequences": "1:4096x32", "hq": 32, "hk": 8, "d": 128, "lse": False}),
        Case("prefill_1x1000_9_3_64", {"sequences": "1000:1000", "hq": 9, "hk": 3, "d": 64, "lse": False}),
    ),
    flops=attention_flops,
    bytes=attention_bytes,
    bad=(
        Bad("q", lambda q: q[:, :7]),
        Bad("q", lambda q: q.double()),
        Bad("k_cache", lambda cache: cache[..., :-1]),
        Bad("k_cache", lambda cache: cache.half()),
        Bad("v_cache", lambda cache: cache[:-1]),
        Bad("block_table", lambda table: table.long()),
        Bad("cu_seqlens_q", lambda cu: cu[:-1]),
        Bad("seq_lens", lambda lens: lens.float()),
        Bad("scale", lambda scale: 0.0),
        Bad("softcap", lambda softcap: -50.0),
        Bad("window", lambda window: 0),
        Bad("max_query_len", lambda n: 0),
        Bad("sinks", lambda sinks: torch.zeros(9)),
        Bad("tree", lambda tree: Tree(torch.zeros(6).int(), torch.zeros(6).long(), torch.zeros(6).int())),
    ),
    empty_dims={"sequences": ""},
    tolerance={torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2},
    loop=naive_attention_loop,
    loop_iterations=lambda inputs: int(inputs["cu_seqlens_q"][-1]),
)
