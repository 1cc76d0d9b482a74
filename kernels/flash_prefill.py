"""FlashAttention over paged keys and values for a ragged batch: any number of queries a sequence.

Arguments, formula and reference are in kernels/attention.py; what a traced run writes down, in kernels/tile_log.py.

One program a (Q-block, key head). The rows ("lanes") of a Q-block are queries x group, so a page is read once for all
heads that share it. Online softmax on raw dot products with the scale folded into exp2. Key blocks that every lane sees
run unmasked; a window's first ones and the last ones (diagonal, drafts) run masked. The grid depends on t, b and the
heads alone, so a captured graph stays right when sequences grow. Programs start with a sequence's last Q-blocks, the
heaviest, a few key heads at a time, whose keys then stay in L2.

16-bit batches on a Hopper GPU without window, soft cap or drafts, nearly all of a step's work there, are
kernels/flash_hopper.py's; a traced run and one with tile sizes of the caller's are this kernel's everywhere.

Deliberately does not know who takes the sequences below min_query_len, nor what a step is.

Rejected: a finite mask value as -inf (wrong for very negative scores), one program a query head (reads each page
Hq / Hk times), heaviest Q-blocks of all heads first (128 heads' keys do not fit in L2).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention import (
    HostPlan,
    Tree,
    attention_bytes,
    attention_flops,
    attention_ref,
    check_attention,
    find_sequence,
    make_inputs,
)
from kernels.common import check_tensor, check_written, power_of_two
from kernels.spec import Bad, Case, KernelSpec
from kernels.tile_log import TileLog

try:
    from kernels import flash_hopper
except ImportError:  # a Triton without Gluon
    flash_hopper = None

HEADS_AT_ONCE = 8  # key heads whose Q-blocks run side by side


@triton.jit
def _now(after):
    """globaltimer in ns once every element of `after` is known."""
    t = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,f", [after], dtype=tl.int64, is_pure=False, pack=1)
    return tl.max(t, axis=0)


@triton.jit
def _key_blocks(
    q, k_cache, v_cache, k_map, v_map, table, m, l, acc, active, row_position, bits, key_low, key_high, draft_start,
    start, stop, kv_head, scale, exponent, softcap,
    stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    log, log_row, log_tiles, log_lanes, log_lane, origin,
    PAGE_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TREE: tl.constexpr, PRECISE: tl.constexpr, MASKED: tl.constexpr, MAPPED: tl.constexpr, TRACE: tl.constexpr,
    TIMED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Folds the keys [start, stop) into (m, l, acc). Unmasked: every lane sees all of them."""
    col_d = tl.arange(0, BLOCK_D)
    col_v = tl.arange(0, BLOCK_DV)
    for block in range(start, stop, BLOCK_N):
        if TRACE:
            begun = tl.zeros([], tl.int64)
            if TIMED:
                begun = _now(l)
        position = block + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        readable = (position >= key_low) & (position < key_high)
        if MAPPED and not MASKED:  # the whole block lies in one page
            page = tl.load(table + block // PAGE_SIZE)
            slot = block % PAGE_SIZE
            k = k_map.load([page * (stride_kp // stride_ks).to(tl.int32) + slot, (kv_head * stride_kh).to(tl.int32)])
            k = tl.trans(k)  # [BLOCK_D, BLOCK_N]
        else:
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
            if TREE:
                draft = position - draft_start
                bit = (bits[:, None] >> tl.maximum(draft, 0).to(tl.int64)[None, :]) & 1
                seen = (seen & (draft < 0)[None, :]) | ((bit != 0) & ((draft >= 0) & readable)[None, :])
            x = tl.where(seen, x, float("-inf"))
        m_new = tl.maximum(m, tl.max(x, axis=1))
        m_safe = m_new
        if MASKED:
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a lane that has seen no key yet
        if PRECISE:
            p = tl.exp2((x - m_safe[:, None]) * exponent)
            shrink = tl.exp2((m - m_safe) * exponent)
        else:
            # one FMA. The rounding of m * exponent is the same in p, shrink and lse, and cancels
            p = tl.exp2(tl.fma(x, tl.full(x.shape, exponent, tl.float32), (m_safe * -exponent)[:, None].broadcast_to(x.shape)))
            shrink = tl.exp2(m * exponent - m_safe * exponent)
        l = l * shrink + tl.sum(p, axis=1)
        m = m_new
        if MAPPED and not MASKED:
            v = v_map.load([page * (stride_vp // stride_vs).to(tl.int32) + slot, (kv_head * stride_vh).to(tl.int32)])
        elif MASKED:
            v = tl.load(v_at, mask=readable[:, None] & (col_v < DV)[None, :], other=0.0)
        elif DV == BLOCK_DV:
            v = tl.load(v_at)
        else:
            v = tl.load(v_at, mask=(col_v < DV)[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        if TRACE:
            log_span, log_kind, log_sm, log_time, log_m, log_l, log_rescale, log_acc = log
            tile = (block - origin) // BLOCK_N
            if tile < log_tiles:
                lane = tl.arange(0, m.shape[0])
                at = log_row * log_tiles + tile
                tl.store(log_span + at * 2, tl.maximum(block, key_low))
                tl.store(log_span + at * 2 + 1, tl.minimum(block + BLOCK_N, key_high))
                kind = tl.full([], 1, tl.int32)
                if MASKED:
                    hidden = active[:, None] & readable[None, :] & (x == float("-inf"))
                    kind += tl.max(tl.max(hidden.to(tl.int32), axis=1), axis=0)
                tl.store(log_kind + at, kind)
                tl.store(log_m + at * log_lanes + lane, m * (exponent * 0.6931471805599453), mask=active)
                tl.store(log_l + at * log_lanes + lane, l, mask=active)
                tl.store(log_rescale + at * log_lanes + lane, shrink, mask=active)
                if log_lane >= 0:
                    chosen = tl.sum(tl.where((lane == log_lane)[:, None], acc, 0.0), axis=0)
                    tl.store(log_acc + tile * DV + col_v, chosen, mask=col_v < DV)
                if TIMED:
                    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
                    tl.store(log_sm + at, sm)
                    tl.store(log_time + at * 2, begun)
                    tl.store(log_time + at * 2 + 1, _now(l + tl.max(acc, axis=1)))
    return m, l, acc


@triton.jit(do_not_specialize=["t", "b", "blocks", "scale", "softcap", "min_query_len", "stride_bt", "log_program", "log_lane"])
def _flash_prefill_kernel(
    q, k_cache, v_cache, k_map, v_map, block_table, cu_seqlens_q, seq_lens, sinks, tree_lens, tree_mask, tree_positions,
    out, lse, t, b, blocks, scale, softcap, min_query_len,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_bt, stride_ot, stride_oh,
    log_owner, log_span, log_kind, log_sm, log_time, log_m, log_l, log_rescale, log_acc,
    log_tiles, log_lanes, log_program, log_lane,
    HQ: tl.constexpr, HK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr, RETURN_LSE: tl.constexpr,
    PRECISE: tl.constexpr, MAPPED: tl.constexpr, TRACE: tl.constexpr, TIMED: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    # the order in which programs start: HEADS key heads at a time; of these the last Q-blocks first
    pid = tl.program_id(0)
    some = pid // (blocks * HEADS) * HEADS
    width = tl.minimum(HK - some, HEADS)
    pid -= some * blocks
    block = blocks - 1 - pid // width
    kv_head = (some + pid % width).to(tl.int64)
    s = find_sequence(cu_seqlens_q, b, block, BLOCK_Q)
    # the rows behind the last sequence are a sequence b without keys
    q_start = tl.load(cu_seqlens_q + s)
    q_stop = t
    seq_len = 0
    ours = True
    if s < b:
        q_stop = tl.load(cu_seqlens_q + s + 1)
        seq_len = tl.load(seq_lens + s)
        ours = q_stop - q_start >= min_query_len
    first = q_start + (block - (q_start // BLOCK_Q + s)) * BLOCK_Q  # first row of q in this block
    if (first < q_stop) & ours:
        lane = tl.arange(0, BLOCK_M)
        row = first + lane // GROUP
        head = kv_head * GROUP + lane % GROUP
        active = (lane < BLOCK_Q * GROUP) & (row < q_stop)
        row_position = seq_len - q_stop + row  # may be negative: a row before the first key
        col_d = tl.arange(0, BLOCK_D)
        at = row.to(tl.int64) * stride_qt + head * stride_qh
        q_tile = tl.load(q + at[:, None] + col_d[None, :], mask=active[:, None] & (col_d < D)[None, :], other=0.0)

        # every lane sees the keys [full_start, full_stop), no lane one outside [key_low, key_high)
        low_position = seq_len - q_stop + first
        high_position = seq_len - q_stop + tl.minimum(first + BLOCK_Q, q_stop) - 1
        key_high = high_position + 1
        draft_start = seq_len
        bits = tl.zeros([1], tl.int64)
        if TREE:
            drafts = tl.load(tree_lens + s, mask=s < b, other=0)
            draft_start = seq_len - drafts
            drafted = active & (drafts + lane > lane)  # a vector: the interpreter takes no scalar in a mask
            row_position = tl.load(tree_positions + row, mask=drafted, other=0) + tl.where(drafted, 0, row_position)
            bits = tl.load(tree_mask + row, mask=drafted, other=0)
            low_position = tl.min(tl.where(active, row_position, low_position), axis=0)
            if high_position >= draft_start:
                key_high = seq_len
        full_stop = tl.maximum(tl.minimum(low_position + 1, draft_start), 0) // BLOCK_N * BLOCK_N
        key_low = 0
        origin = 0
        full_start = 0
        if WINDOW > 0:
            key_low = tl.minimum(tl.maximum(low_position - WINDOW + 1, 0), draft_start)
            origin = key_low // BLOCK_N * BLOCK_N
            full_start = (tl.maximum(high_position - WINDOW + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            if full_start >= full_stop:
                full_start = origin
                full_stop = origin

        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        log2e: tl.constexpr = 1.4426950408889634
        exponent = log2e if SOFTCAP else scale * log2e
        k_head = k_cache + kv_head * stride_kh
        v_head = v_cache + kv_head * stride_vh
        table = block_table + s.to(tl.int64) * stride_bt
        log = 0
        log_row = 0
        lane_kept = -1
        if TRACE:
            log = (log_span, log_kind, log_sm, log_time, log_m, log_l, log_rescale, log_acc)
            program = block * HK + kv_head  # not the order in which they start
            log_row = program
            lane_kept = tl.where(program == log_program, log_lane, -1)
            owner = log_owner + program * 5
            tl.store(owner, tl.where(s < b, s, -1))
            tl.store(owner + 1, first)
            tl.store(owner + 2, kv_head.to(tl.int32))
            tl.store(owner + 3, 0)
            tl.store(owner + 4, tl.minimum(first + BLOCK_Q, q_stop) - first)
        if WINDOW > 0:
            m, l, acc = _key_blocks(
                q_tile, k_head, v_head, k_map, v_map, table, m, l, acc, active, row_position, bits, key_low, key_high,
                draft_start, origin, full_start, kv_head, scale, exponent, softcap,
                stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
                log, log_row, log_tiles, log_lanes, lane_kept, origin,
                PAGE_SIZE, D, DV, WINDOW, SOFTCAP, TREE, PRECISE, True, MAPPED, TRACE, TIMED, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        m, l, acc = _key_blocks(
            q_tile, k_head, v_head, k_map, v_map, table, m, l, acc, active, row_position, bits, key_low, key_high,
            draft_start, full_start, full_stop, kv_head, scale, exponent, softcap,
            stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
            log, log_row, log_tiles, log_lanes, lane_kept, origin,
            PAGE_SIZE, D, DV, WINDOW, SOFTCAP, TREE, PRECISE, False, MAPPED, TRACE, TIMED, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip
        m, l, acc = _key_blocks(
            q_tile, k_head, v_head, k_map, v_map, table, m, l, acc, active, row_position, bits, key_low, key_high,
            draft_start, full_stop, key_high, kv_head, scale, exponent, softcap,
            stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
            log, log_row, log_tiles, log_lanes, lane_kept, origin,
            PAGE_SIZE, D, DV, WINDOW, SOFTCAP, TREE, PRECISE, True, MAPPED, TRACE, TIMED, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

        empty = l == 0.0
        top = tl.where(empty, 0.0, m * exponent)  # in units of exp2
        if SINKS:
            sink = tl.load(sinks + head, mask=active, other=0.0) * log2e
            with_sink = tl.where(empty, 0.0, tl.maximum(top, sink))
            l = l * tl.exp2(top - with_sink) + tl.exp2(sink - with_sink)
            acc *= tl.exp2(top - with_sink)[:, None]
            top = with_sink
        acc = acc / tl.where(empty, 1.0, l)[:, None]
        col_v = tl.arange(0, BLOCK_DV)
        out_at = row.to(tl.int64) * stride_ot + head * stride_oh
        tl.store(out + out_at[:, None] + col_v[None, :], acc.to(out.dtype.element_ty),
                 mask=active[:, None] & (col_v < DV)[None, :])  # fmt: skip
        if RETURN_LSE:
            ln2: tl.constexpr = 0.6931471805599453
            value = (top + tl.log2(tl.where(empty, 1.0, l))) * ln2
            tl.store(lse + row.to(tl.int64) * HQ + head, tl.where(empty, float("-inf"), value), mask=active)


class PrefillPlan(NamedTuple):
    """How flash_prefill cuts a batch. Program block * Hk + kv_head: Q-blocks of a sequence follow one another.

    Args:
        block_q: queries of a Q-block.
        block_m: lanes of a program; block_q * group of them at most are in use.
        block_n: keys of a tile.
        programs, tiles: what a TileLog must hold (make_log(programs, tiles, block_m, ..)).
    """

    block_q: int
    block_m: int
    block_n: int
    programs: int
    tiles: int


def plan_prefill(
    q: torch.Tensor, v_cache: torch.Tensor, num_sequences: int, max_query_len: int, max_seq_len: int,
    block_m: int | None = None, block_n: int | None = None,
) -> PrefillPlan:  # fmt: skip
    """The tiles of flash_prefill for these arguments. Raises ValueError naming block_m or block_n."""
    (t, hq, d), (_, page_size, hk, dv) = q.shape, v_cache.shape
    group, wide, half = hq // hk, max(power_of_two(d), power_of_two(dv)), q.element_size() == 2
    least = max(16, power_of_two(group))
    # measured on an H200: 64 rows suit narrow heads (four programs an SM), 128 rows d = 128. fp32 runs on FMA units and
    # spills early. Where a tile lies in one page, smaller ones come through the copy engine and fit twice an SM
    largest, keys = (64, 32) if wide > 128 else (128, 64 if page_size >= 64 else 128) if wide > 64 else (64, 64)
    if not half:
        largest, keys = (32, 32) if wide <= 128 else (16, 16)
    if block_m is None:
        block_m = max(least, min(largest, power_of_two(group * max_query_len)))
    elif block_m != power_of_two(block_m) or not least <= block_m <= 128:
        raise ValueError(f"block_m is {block_m}, must be a power of two from {least} to 128")
    if block_n is None:
        block_n = keys
    elif block_n != power_of_two(block_n) or not 16 <= block_n <= 128:
        raise ValueError(f"block_n is {block_n}, must be a power of two from 16 to 128")
    block_q = block_m // group if max_query_len > 1 else 1
    programs = (t // block_q + num_sequences + 1) * hk
    return PrefillPlan(block_q, block_m, block_n, programs, -(-max_seq_len // block_n))


def find_lane(plan: PrefillPlan, cu_seqlens_q: Sequence[int], row: int, head: int, hq: int, hk: int) -> tuple[int, int]:
    """(program, lane) that computes query row `row` of q for query head `head`."""
    s = max(i for i, start in enumerate(cu_seqlens_q) if start <= row)
    start, group = cu_seqlens_q[s], hq // hk
    block, query = divmod(row - start, plan.block_q)
    return (start // plan.block_q + s + block) * hk + head // group, query * group + head % group


def _resources(plan: PrefillPlan, wide: int, half: bool, mapped: bool) -> dict[str, int]:
    """Warps of a program and depth of its load pipeline."""
    if not half:
        return {"num_warps": 8 if plan.block_m * wide >= 4096 else 4, "num_stages": 2}
    small = plan.block_m * wide < 8192 or (mapped and plan.block_n <= 64 and wide <= 128)
    return {"num_warps": 4 if small else 8, "num_stages": 3 if wide <= 64 and plan.block_n <= 64 else 2}


def _make_map(cache: torch.Tensor, block_n: int) -> TensorDescriptor | None:
    """The cache as rows of slots for the tensor copy engine, or None where it cannot be seen so."""
    pages, page_size, hk, d = cache.shape
    stride_p, stride_s, stride_h, _ = cache.stride()
    width, size = (hk - 1) * stride_h + d, cache.element_size()
    whole = stride_s > 0 and stride_p % stride_s == 0 and stride_p >= stride_s and stride_h >= 0 and width <= stride_s
    aligned = cache.data_ptr() % 16 == 0 and stride_s * size % 16 == 0 and stride_h * size % 16 == 0
    if not (whole and aligned and page_size >= block_n and d >= 16 and d == power_of_two(d) and size == 2):
        return None
    rows = (pages - 1) * (stride_p // stride_s) + page_size
    if rows >= 2**31:
        return None
    return TensorDescriptor(cache, [rows, width], [stride_s, 1], [block_n, d])


def _check_extra(t: int, hq: int, dv: int, q: torch.Tensor, out: torch.Tensor | None, min_query_len: int, log: TileLog | None) -> None:
    if out is not None:
        check_tensor("out", out, (t, hq, dv), (q.dtype,))
        check_written("out", out)
        if out.device != q.device:
            raise ValueError(f"out is on {out.device}, q on {q.device}")
    if min_query_len < 1:
        raise ValueError(f"min_query_len is {min_query_len}, must be at least 1")
    if log is not None and not isinstance(log, TileLog):
        raise ValueError(f"log must be a kernels.tile_log.TileLog, not {type(log).__name__}")


def takes_hopper(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, max_query_len: int) -> bool:
    """Whether a launch without window, softcap, tree, log and tile sizes of the caller's runs kernels/flash_hopper.py."""
    return flash_hopper is not None and flash_hopper.fits(q, k_cache, v_cache, max_query_len)


def flash_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: Tree | None = None, return_lse: bool = False, host: HostPlan | None = None,
    out: torch.Tensor | None = None, min_query_len: int = 1, log: TileLog | None = None,
    block_m: int | None = None, block_n: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See attention_ref.

    Args:
        out: [t, Hq, Dv] in q's type to write to; None: a new one.
        min_query_len: rows of sequences with fewer queries are another kernel's: theirs of out and lse are left alone.
        log: filled by a variant compiled for it; its size: plan_prefill. What does not fit is not written.
        block_m, block_n: lanes of a program and keys of a tile, powers of two; None: chosen by shape.
    """
    check_attention(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_query_len, window, softcap, sinks, tree)
    (t, hq, d), (_, page_size, hk, dv), b = q.shape, v_cache.shape, seq_lens.shape[0]
    _check_extra(t, hq, dv, q, out, min_query_len, log)
    plan = plan_prefill(q, v_cache, b, max_query_len, block_table.shape[1] * page_size, block_m, block_n)
    if log is not None and (log.owner.shape[0] < plan.programs or log.m.shape[2] < plan.block_m or log.acc.shape[1] != dv):
        raise ValueError(
            f"log holds {log.owner.shape[0]} programs of {log.m.shape[2]} lanes and {log.acc.shape[1]} columns, "
            f"needs {plan.programs}, {plan.block_m} and {dv}"
        )
    out = torch.empty((t, hq, dv), dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty((t, hq), dtype=torch.float32, device=q.device) if return_lse else None
    plain = window is None and softcap is None and tree is None and log is None and block_m is None and block_n is None
    if t > 0 and plain and takes_hopper(q, k_cache, v_cache, max_query_len):
        flash_hopper.launch(
            q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, sinks, out, lse, min_query_len
        )  # fmt: skip
    elif t > 0:
        wide, half = max(power_of_two(d), power_of_two(dv)), q.element_size() == 2
        k_map = v_map = None
        if q.is_cuda and d == dv:
            k_map, v_map = _make_map(k_cache, plan.block_n), _make_map(v_cache, plan.block_n)
        mapped = k_map is not None and v_map is not None
        tree_lens, tree_mask, tree_positions = (None, None, None) if tree is None else tree
        fields, chosen = ((None,) * 9, (-1, -1)) if log is None else (log[:9], log.chosen)
        tiles, lanes = (0, 0) if log is None else (log.kind.shape[1], log.m.shape[2])
        _flash_prefill_kernel[(plan.programs,)](
            q, k_cache, v_cache, k_map if mapped else None, v_map if mapped else None, block_table, cu_seqlens_q, seq_lens,
            sinks, tree_lens, tree_mask, tree_positions, out, lse, t, b, plan.programs // hk, float(scale),
            1.0 if softcap is None else float(softcap), min_query_len, q.stride(0), q.stride(1), *k_cache.stride()[:3],
            *v_cache.stride()[:3], block_table.stride(0), out.stride(0), out.stride(1), *fields, tiles, lanes, *chosen,
            HQ=hq, HK=hk, GROUP=hq // hk, D=d, DV=dv, PAGE_SIZE=page_size, WINDOW=window or 0, SOFTCAP=softcap is not None,
            SINKS=sinks is not None, TREE=tree is not None, RETURN_LSE=return_lse, PRECISE=not half, MAPPED=mapped,
            TRACE=log is not None, TIMED=log is not None and q.is_cuda, HEADS=HEADS_AT_ONCE,
            BLOCK_Q=plan.block_q, BLOCK_M=plan.block_m, BLOCK_N=plan.block_n,
            BLOCK_D=max(16, power_of_two(d)), BLOCK_DV=max(16, power_of_two(dv)),
            **_resources(plan, wide, half, mapped),
        )  # fmt: skip
    return (out, lse) if return_lse else out


def attend_loop(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: Tree | None = None, return_lse: bool = False, host: HostPlan | None = None,
) -> Generator[None, None, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """attention_ref as a Python loop: one (query, head) an iteration."""
    (t, hq, _), (_, page_size, hk, dv) = q.shape, v_cache.shape
    out = q.new_zeros(t, hq, dv)
    lse = torch.full((t, hq), -torch.inf, dtype=torch.float32, device=q.device)
    cu, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
    drafts = [0] * len(lens) if tree is None else tree.lens.tolist()
    for s, length in enumerate(lens):
        for row in range(cu[s], cu[s + 1]):
            position, mask = length - cu[s + 1] + row, 0
            if drafts[s]:
                position, mask = int(tree.positions[row]), int(tree.mask[row])
            before = length - drafts[s]
            low = 0 if window is None else max(0, position - window + 1)
            seen = [j for j in range(low, min(position + 1, before))] + [before + i for i in range(drafts[s]) if mask >> i & 1]
            key = torch.tensor(seen, dtype=torch.long, device=q.device)
            page = block_table[s].long()[key // page_size]
            for head in range(hq):
                if seen:
                    at = (page, key % page_size, head // (hq // hk))
                    x = scale * (k_cache[at].float() @ q[row, head].float())
                    x = x if softcap is None else softcap * torch.tanh(x / softcap)
                    logits = x if sinks is None else torch.cat([x, sinks[head : head + 1]])
                    lse[row, head] = torch.logsumexp(logits, 0)
                    out[row, head] = (torch.exp(x - lse[row, head]) @ v_cache[at].float()).to(q.dtype)
                yield
    return (out, lse) if return_lse else out


def loop_iterations(inputs: Mapping) -> int:
    return int(inputs["cu_seqlens_q"][-1]) * inputs["q"].shape[1]


_MIXED = "1:33 5:40 17:17 1:1 3:16"
_DRAFTS = {"sequences": "1:20 6:40 9:9 12:100 3:50", "drafts": "0 5 4 12 8", "hq": 4, "hk": 2, "d": 32}
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
        Case("d1", {"sequences": _MIXED, "hq": 2, "hk": 1, "d": 1}),
        Case("window_4", {"sequences": _MIXED + " 1:100", "hq": 4, "hk": 2, "d": 32, "window": 4}),
        Case("window_33", {"sequences": "1:33 1:34 40:80 1:100", "hq": 4, "hk": 2, "d": 32, "window": 33}),
        Case("window_1", {"sequences": _MIXED, "hq": 2, "hk": 2, "d": 16, "window": 1}),
        Case("window_250", {"sequences": "20:400 70:300", "hq": 4, "hk": 2, "d": 64, "window": 250}),
        Case("softcap_50", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 64, "softcap": 50.0, "q_scale": 40.0}),
        Case("softcap_window", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 32, "softcap": 5.0, "window": 9}),
        Case("rows_without_keys", {"sequences": "5:3 1:0 3:0 1:20 4:4", "hq": 4, "hk": 2, "d": 32, "pad_rows": 5}),
        Case("decode_padding", {"sequences": "1:17 1:0 1:3", "hq": 9, "hk": 3, "d": 64, "pad_rows": 3}),
        Case("decode_gaps", {"sequences": "0:9 1:17 0:0 1:3 0:5", "hq": 4, "hk": 2, "d": 32, "pad_rows": 1}),
        Case("no_lse", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 32, "pad_rows": 1, "lse": False}),
        Case("group_71", {"sequences": "1:40 3:17", "hq": 71, "hk": 1, "d": 64}),
        Case("ragged_1000", {"sequences": "7:1000", "hq": 2, "hk": 1, "d": 64, "lse": False}),
        Case("heads_10", {"sequences": "9:40 1:30", "hq": 10, "hk": 10, "d": 32}),
        Case("pages_128", {"sequences": "150:300 130:130", "hq": 4, "hk": 2, "d": 64, "page_size": 128}),
        Case("pages_128_d128", {"sequences": "33:290 200:200", "hq": 2, "hk": 2, "d": 128, "page_size": 128, "layers": 2}),
        Case("sinks", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 64, "sinks": True}),
        Case("sinks_without_keys", {"sequences": "5:3 1:0 1:20", "hq": 4, "hk": 2, "d": 32, "sinks": True, "pad_rows": 2}),
        Case("sinks_softcap", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 32, "sinks": True, "softcap": 5.0, "q_scale": 9.0}),
        Case("sinks_window", {"sequences": "40:80 1:100", "hq": 8, "hk": 1, "d": 64, "sinks": True, "window": 17}),
        Case("tree", _DRAFTS | {"pad_rows": 2}),
        Case("tree_64", {"sequences": "65:300 30:90", "drafts": "64 0", "hq": 2, "hk": 1, "d": 64}),
        Case("tree_window", _DRAFTS | {"window": 19}),
        Case("tree_all", _DRAFTS | {"window": 7, "softcap": 4.0, "sinks": True}),
    ),
    bench_cases=(
        Case("prefill_4x4096_32_32_128", {"sequences": "4096:4096x4", "hq": 32, "hk": 32, "d": 128, "page_size": 128, "lse": False}),
        Case("prefill_4x4096_32_32_64", {"sequences": "4096:4096x4", "hq": 32, "hk": 32, "d": 64, "page_size": 128, "lse": False}),
        Case("prefill_4x2048_32_8_128", {"sequences": "2048:2048x4", "hq": 32, "hk": 8, "d": 128, "lse": False}),
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
        Bad("sinks", lambda sinks: torch.zeros(3)),
        Bad("tree", lambda tree: (1, 2, 3)),
    ),
    loop=attend_loop,
    loop_iterations=loop_iterations,
    empty_dims={"sequences": ""},
    tolerance={torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2},
)
