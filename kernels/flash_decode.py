"""FlashAttention for sequences with few queries: paged decode and verification, the keys split over programs (split-KV).

Arguments, formula and reference are in kernels/attention.py; the loop form below is the same sum, one key at a time.

One program a (sequence, key head, split); its rows are queries x group, so a page is read once for all heads that share
it. A split folds its share of the keys into (m, l, acc) by online softmax, a second kernel merges the splits of one row:

    M = max_k m_k,   w_k = exp(m_k - M),   out = sum_k w_k acc_k / (sum_k w_k l_k + exp(sink - M))

With one split the first kernel writes the output itself. How many splits there are follows from shapes alone, so the
grid is static; which keys a split gets follows from seq_lens on the device. So a captured CUDA graph stays right while
sequences grow. Unless the caller says how many splits, a sequence uses as many as its share of all the batch's keys earns
(one long sequence among short ones would else keep a few programs busy long after the others). Splits that got no keys
say l = 0 and nothing else; the merge does not read their acc.

Sequences with more than MAX_QUERIES queries are another kernel's: their rows are left as they are. Rows behind the last
sequence are zeroed here.

Does not know which sequences decode and which verify: both are a number of queries.

Rejected: switching to splits by batch size (the sum's order would change when a request joins); one program a query head
(reads each page Hq / Hk times); the last program of a row merging behind an atomic counter (the counter must be zero
before each launch: one more kernel, or state that two streams would share).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer, smid

from kernels.attention import HostPlan, Tree, attention_bytes, attention_flops, attention_ref, check_attention, make_inputs
from kernels.common import check_devices, check_tensor, check_written, power_of_two
from kernels.spec import Bad, Case, KernelSpec
from kernels.tile_log import TileLog

MAX_QUERIES = 8
SPLIT_LIMIT = 128  # a row's splits are merged by one program
ASSUMED_SMS = 132  # where there is no GPU to ask (interpreter): an H200's
STAGE_BYTES = 1 << 15  # a tile of K and V: two programs of these on an SM keep its share of the memory's bandwidth busy


class DecodePlan(NamedTuple):
    """A launch's shape, from shapes alone.

    Args:
        block_m: rows ("lanes") of a program: queries x group, padded.
        block_n: keys of a tile.
        num_splits: programs that share the keys of one row.
        programs: of the first kernel, all sequences, key heads and splits.
        tiles: that a program visits at most.
    """

    block_m: int
    block_n: int
    num_splits: int
    programs: int
    tiles: int


class _Launch(NamedTuple):
    """What the compiler is told, beside the block shapes."""

    num_warps: int
    num_stages: int
    pdl: bool


@triton.jit
def _sees(key, readable, position, bits, draft_start, WINDOW: tl.constexpr, TREE: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: the keys that each lane sees."""
    seen = readable[None, :] & (key[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (key[None, :] > position[:, None] - WINDOW)
    if TREE:
        draft = key - draft_start
        bit = tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)
        ancestor = ((bits[:, None] >> bit[None, :]) & 1) != 0
        seen = tl.where((draft >= 0)[None, :], readable[None, :] & ancestor, seen)
    return seen


@triton.jit
def _finish(m, l, exponent, sink, SINKS: tl.constexpr):
    """(what acc is multiplied with, lse): the sink joins the sum, a row without keys gives 0 and -inf."""
    ln2: tl.constexpr = 0.6931471805599453
    empty = l == 0.0
    top = m * (exponent * ln2)
    factor = tl.where(empty, 0.0, 1.0)
    if SINKS:
        larger = tl.maximum(tl.where(empty, 0.0, top), sink)
        factor = tl.where(empty, 0.0, tl.exp(top - larger))
        l = l * factor + tl.exp(sink - larger)
        top = larger
    l = tl.where(empty, 1.0, l)
    return factor / l, tl.where(empty, float("-inf"), top + tl.log(l))


@triton.jit
def _count_used(
    cu_seqlens_q, seq_lens, blocks, b, num_splits, slots, rows,
    MAX_QUERIES: tl.constexpr, WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Splits that a sequence with this many key blocks uses: its part of `slots` programs, `rows` programs a split."""
    i = tl.arange(0, BLOCK_B)
    queries = tl.load(cu_seqlens_q + i + 1, mask=i < b, other=0) - tl.load(cu_seqlens_q + i, mask=i < b, other=0)
    keys = tl.load(seq_lens + i, mask=(i < b) & (queries > 0) & (queries <= MAX_QUERIES), other=0)
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW + BLOCK_N)
    total = tl.sum(tl.cdiv(keys, BLOCK_N).to(tl.float32), axis=0)
    earned = blocks * (slots / (tl.maximum(total, 1.0) * rows))
    return tl.minimum(tl.maximum((earned + 0.5).to(tl.int32), 1), num_splits)


@triton.jit(do_not_specialize=["t", "b", "num_splits", "slots", "scale", "softcap", "tiles", "chosen_program", "chosen_lane"])
def _flash_decode_kernel(
    q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks, tree_lens, tree_mask, tree_positions,
    out, lse, part_m, part_l, part_acc, log_owner, log_span, log_kind, log_sm, log_time, log_m, log_l, log_rescale, log_acc,
    t, b, num_splits, slots, scale, softcap, tiles, chosen_program, chosen_lane,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_bt, stride_ot, stride_oh,
    HK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr, PARTS: tl.constexpr,
    MAX_QUERIES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, TREE: tl.constexpr,
    DIRECT: tl.constexpr, RETURN_LSE: tl.constexpr, TRACE: tl.constexpr, TIMED: tl.constexpr, PDL: tl.constexpr, SOON: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    # neighbours in the launch order are the heads of one split: a page of all heads is one stretch of memory; splits come
    # last, since the later ones have the fewest keys
    rest = tl.program_id(0)
    kv_head = (rest % HK).to(tl.int64)
    rest = rest // HK
    part = rest % PARTS
    rest = rest // PARTS
    s = (rest % b).to(tl.int64)
    split = rest // b
    q_start = tl.load(cu_seqlens_q + s)
    q_stop = tl.load(cu_seqlens_q + s + 1)
    seq_len = tl.load(seq_lens + s)
    first = q_start + part * BLOCK_Q  # first row of q in this program
    col_v = tl.arange(0, BLOCK_DV)
    if (q_stop - q_start <= MAX_QUERIES) & (first < q_stop):
        lane = tl.arange(0, BLOCK_M)
        row = first + lane // GROUP
        head = kv_head * GROUP + lane % GROUP
        active = (lane < BLOCK_Q * GROUP) & (row < q_stop)
        position = seq_len - q_stop + row  # may be negative: a row before the first key
        bits = position
        draft_start = seq_len
        first_position = seq_len - q_stop + first
        key_high = tl.minimum(seq_len, first_position + BLOCK_Q)
        if TREE:
            drafts = tl.load(tree_lens + s)
            drafted = active & (lane < drafts * BLOCK_M)  # all lanes or none
            draft_start = seq_len - drafts
            bits = tl.load(tree_mask + row, mask=drafted, other=0)
            position = tl.where(drafted, tl.load(tree_positions + row, mask=drafted, other=0), position)
            key_high = tl.where(drafts > 0, seq_len, key_high)
            if WINDOW > 0:
                first_position = tl.minimum(tl.min(tl.where(active, position, seq_len)), draft_start + WINDOW - 1)
        key_low = 0
        if WINDOW > 0:
            key_low = tl.maximum(first_position - WINDOW + 1, 0)
        start = key_low // BLOCK_N * BLOCK_N
        blocks = tl.cdiv(tl.maximum(key_high - start, 0), BLOCK_N)
        used = num_splits
        if BLOCK_B > 0:  # share the programs that run at once out by length
            used = _count_used(cu_seqlens_q, seq_lens, blocks, b, num_splits, slots, HK * PARTS, MAX_QUERIES, WINDOW, BLOCK_B, BLOCK_N)
        share = tl.cdiv(blocks, used) * BLOCK_N
        start += split * share
        stop = tl.minimum(start + share, key_high)
        if PDL:  # the merge may take its place on the GPU now, and wait there; beside a long loop it would be in the way
            soon = stop - start <= SOON * BLOCK_N
            if soon:
                gdc_launch_dependents()

        col_d = tl.arange(0, BLOCK_D)
        q_at = row.to(tl.int64) * stride_qt + head * stride_qh
        wanted = active
        if BLOCK_B > 0:  # many programs have no keys
            wanted = active & (lane < tl.where(start < stop, BLOCK_M, 0))
        q_tile = tl.load(q + q_at[:, None] + col_d[None, :], mask=wanted[:, None] & (col_d < D)[None, :], other=0.0)
        k_head = k_cache + kv_head * stride_kh
        v_head = v_cache + kv_head * stride_vh
        table = block_table + s * stride_bt
        log2e: tl.constexpr = 1.4426950408889634
        exponent = log2e if SOFTCAP else scale * log2e  # p = exp2((x - m) * exponent): subtract first, then scale
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        if TRACE:
            program = ((s * HK + kv_head) * PARTS + part) * num_splits + split
            tile = program * tiles
            if start < stop:
                owner = log_owner + program * 5
                tl.store(owner, s.to(tl.int32))
                tl.store(owner + 1, first)
                tl.store(owner + 2, kv_head.to(tl.int32))
                tl.store(owner + 3, split)
                tl.store(owner + 4, tl.minimum(q_stop - first, BLOCK_Q))
        # page numbers are loaded one block ahead, so that loads of K and V depend on none of their own iteration and are
        # kept in flight over several
        key = start + tl.arange(0, BLOCK_N)
        page = tl.load(table + key // PAGE_SIZE, mask=(key >= key_low) & (key < stop), other=0)
        for block in range(start, stop, BLOCK_N):
            if TRACE and TIMED:
                tl.store(log_time + tile * 2, globaltimer())
                tl.store(log_sm + tile, smid())
            key = block + tl.arange(0, BLOCK_N)
            readable = (key >= key_low) & (key < key_high)
            seen = _sees(key, readable, position, bits, draft_start, WINDOW, TREE)
            if TREE:  # a draft that is no row's ancestor is not read
                readable = tl.max((seen & active[:, None]).to(tl.int32), axis=0) > 0
            ahead = key + BLOCK_N
            page_ahead = tl.load(table + ahead // PAGE_SIZE, mask=ahead < stop, other=0)
            page, slot = page.to(tl.int64), key % PAGE_SIZE
            k_at = k_head + (page * stride_kp + slot * stride_ks)[:, None] + col_d[None, :]
            k = tl.load(k_at, mask=readable[:, None] & (col_d < D)[None, :], other=0.0)  # [BLOCK_N, BLOCK_D]
            x = tl.dot(q_tile, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N], fp32
            if SOFTCAP:
                # tanh(y) = 1 - 2 / (exp(2y) + 1): exact limits for large |y|
                x = softcap * (1.0 - 2.0 / (tl.exp(x * (2.0 * scale / softcap)) + 1.0))
            x = tl.where(seen, x, float("-inf"))
            m_new = tl.maximum(m, tl.max(x, axis=1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
            p = tl.exp2((x - m_safe[:, None]) * exponent)
            rescale = tl.exp2((m - m_safe) * exponent)
            l = l * rescale + tl.sum(p, axis=1)
            m = m_new
            v_at = v_head + (page * stride_vp + slot * stride_vs)[:, None] + col_v[None, :]
            v = tl.load(v_at, mask=readable[:, None] & (col_v < DV)[None, :], other=0.0)  # [BLOCK_N, BLOCK_DV]
            if v.dtype == tl.float32:  # a tile's sum by itself, else a thread adds up all keys one after the other
                acc = tl.fma(acc, tl.broadcast_to(rescale[:, None], acc.shape), tl.dot(p, v, input_precision="ieee"))
            else:
                acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
            page = page_ahead
            if TRACE:
                tl.store(log_span + tile * 2, tl.maximum(block, key_low))
                tl.store(log_span + tile * 2 + 1, tl.minimum(block + BLOCK_N, stop))
                hidden = active[:, None] & ((key >= key_low) & (key < key_high))[None, :] & ~seen
                hidden = tl.max(tl.max(hidden.to(tl.int32), axis=1), axis=0)
                tl.store(log_kind + tile, 1 + hidden)
                lanes = tile * BLOCK_M + lane
                tl.store(log_m + lanes, m if SOFTCAP else m * scale, mask=active)
                tl.store(log_l + lanes, l, mask=active)
                tl.store(log_rescale + lanes, rescale, mask=active)
                if program == chosen_program:
                    kept = tl.sum(tl.where((lane == chosen_lane)[:, None], acc, 0.0), axis=0)
                    tl.store(log_acc + (tile - program * tiles) * DV + col_v, kept, mask=col_v < DV)
                if TIMED:
                    tl.store(log_time + tile * 2 + 1, globaltimer())
                tile += 1

        if DIRECT:
            sink = m
            if SINKS:
                sink = tl.load(sinks + head, mask=active, other=0.0)
            factor, value = _finish(m, l, exponent, sink, SINKS)
            out_at = row.to(tl.int64) * stride_ot + head * stride_oh
            tl.store(out + out_at[:, None] + col_v[None, :], (acc * factor[:, None]).to(out.dtype.element_ty),
                     mask=active[:, None] & (col_v < DV)[None, :])  # fmt: skip
            if RETURN_LSE:
                tl.store(lse + row.to(tl.int64) * (HK * GROUP) + head, value, mask=active)
        else:
            line = ((s * HK + kv_head) * PARTS + part) * (BLOCK_Q * GROUP) + lane
            at = line * num_splits + split
            tl.store(part_m + at, m, mask=active)
            tl.store(part_l + at, l, mask=active)
            if start < stop:
                tl.store(part_acc + at[:, None] * DV + col_v[None, :], acc, mask=active[:, None] & (col_v < DV)[None, :])

    if (split == 0) & (part == 0):  # the rows behind the last sequence, shared out over the sequences
        member = tl.arange(0, BLOCK_M)
        head = kv_head * GROUP + member
        inside = member < GROUP
        padding = tl.load(cu_seqlens_q + b) + s
        while padding < t:
            tl.store(out + (padding * stride_ot + head * stride_oh)[:, None] + col_v[None, :],
                     tl.zeros([BLOCK_M, BLOCK_DV], out.dtype.element_ty), mask=inside[:, None] & (col_v < DV)[None, :])  # fmt: skip
            if RETURN_LSE:
                tl.store(lse + padding * (HK * GROUP) + head, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=inside)
            padding += b


@triton.jit(do_not_specialize=["num_splits", "scale"])
def _merge_splits_kernel(
    part_m, part_l, part_acc, cu_seqlens_q, sinks, out, lse, num_splits, scale, stride_ot, stride_oh,
    HK: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr, MAX_QUERIES: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, STEP: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program a (head, query, sequence): merges the splits' (m, l, acc), BLOCK_S of them or STEP of acc at a time."""
    head, query, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q_start = tl.load(cu_seqlens_q + s)
    queries = tl.load(cu_seqlens_q + s + 1) - q_start
    if PDL:  # outside of any condition: a grid that never waits could end before the one it depends on
        gdc_wait()
    if (queries <= MAX_QUERIES) & (query < queries):
        lane = query % BLOCK_Q * GROUP + head % GROUP
        line = ((s * HK + head // GROUP) * PARTS + query // BLOCK_Q) * (BLOCK_Q * GROUP) + lane
        at = line * num_splits
        log2e: tl.constexpr = 1.4426950408889634
        exponent = log2e if SOFTCAP else scale * log2e
        split = tl.arange(0, BLOCK_S)
        ms = tl.load(part_m + at + split, mask=split < num_splits, other=float("-inf"))
        ls = tl.load(part_l + at + split, mask=split < num_splits, other=0.0)
        m = tl.max(ms, axis=0)
        m_safe = tl.where(m == float("-inf"), 0.0, m)
        l = tl.sum(ls * tl.exp2((ms - m_safe) * exponent), axis=0)
        col = tl.arange(0, BLOCK_DV)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        for low in range(0, num_splits, STEP):
            some = low + tl.arange(0, STEP)
            weight = tl.exp2((tl.load(part_m + at + some, mask=some < num_splits, other=float("-inf")) - m_safe) * exponent)
            wanted = tl.load(part_l + at + some, mask=some < num_splits, other=0.0) > 0.0  # the others wrote no acc
            part = tl.load(part_acc + (at + some)[:, None] * DV + col[None, :], mask=wanted[:, None] & (col < DV)[None, :], other=0.0)
            acc += tl.sum(part * weight[:, None], axis=0)
        sink = m
        if SINKS:
            sink = tl.load(sinks + head)
        factor, value = _finish(m, l, exponent, sink, SINKS)
        row = (q_start + query).to(tl.int64)
        tl.store(out + row * stride_ot + head * stride_oh + col, (acc * factor).to(out.dtype.element_ty), mask=col < DV)
        if RETURN_LSE:
            tl.store(lse + row * (HK * GROUP) + head, value)


SOON = 8  # tiles of a program that ends so soon that the merge may be launched beside it
TILES_ALONE = 64  # a program may have this many tiles to itself before splits are made for it
CROWD = 8  # times as many programs as run at once, at most; most of them would find nothing to do


@lru_cache
def _count_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else ASSUMED_SMS


def _widths(d: int, dv: int) -> tuple[int, int]:
    """BLOCK_D, BLOCK_DV."""
    return max(16, power_of_two(d)), max(16, power_of_two(dv))


def _launch(block_m: int, d: int, dv: int, itemsize: int) -> _Launch:
    """3 stages: two tiles on their way while one is computed with. fp32 runs on FMA units and spills early."""
    wide = max(_widths(d, dv))
    return _Launch(8 if block_m * wide >= (8192 if itemsize == 2 else 2048) else 4, 3, True)


def _slots(device: torch.device, tile_bytes: int) -> int:
    """Programs that the GPU runs at once."""
    return _count_sms(device) * min(4, max(1, 2 * STAGE_BYTES // tile_bytes))


def _parts(block_m: int, group: int, max_query_len: int) -> int:
    """Programs that share the queries of a sequence."""
    return -(-min(max_query_len, MAX_QUERIES) // (block_m // group))


def plan_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, max_query_len: int,
    window: int | None = None, num_splits: int | None = None, block_n: int | None = None,
) -> DecodePlan:  # fmt: skip
    """The launch that flash_decode makes of these arguments; see there.

    Raises:
        ValueError: num_splits or block_n is out of range.
    """
    (_, hq, d), (_, page_size, hk, dv), (b, blocks) = q.shape, v_cache.shape, block_table.shape
    group, width, itemsize = hq // hk, sum(_widths(d, dv)), q.element_size()
    largest = (128 if width <= 256 else 64) if itemsize == 2 else 16
    block_m = max(16, power_of_two(group), min(largest, power_of_two(group * min(max_query_len, MAX_QUERIES))))
    if block_n is None:
        block_n = max(16, min(64, STAGE_BYTES // (power_of_two(width) * itemsize)))
    allowed = [n for n in (16, 32, 64, 128) if n * width * itemsize <= 2 * STAGE_BYTES]
    if block_n not in allowed:
        raise ValueError(f"block_n is {block_n}, must be one of {allowed} for these head dimensions and this type")
    longest = blocks * page_size
    if window is not None:
        longest = min(longest, window + MAX_QUERIES + block_n)
    tiles = max(1, -(-longest // block_n))
    rows = b * hk * _parts(block_m, group, max_query_len)  # programs of one split
    shared = num_splits is None  # by length: a short batch may leave all tiles of a sequence to one program
    if num_splits is None:
        slots = _slots(q.device, block_n * width * itemsize)
        filling, fair = slots // max(1, rows), min(round(tiles / TILES_ALONE), CROWD * slots // max(1, rows))
        num_splits = max(1, min(tiles, SPLIT_LIMIT, max(filling, fair)))
    if not 1 <= num_splits <= SPLIT_LIMIT:
        raise ValueError(f"num_splits is {num_splits}, must be 1 to {SPLIT_LIMIT}")
    return DecodePlan(block_m, block_n, num_splits, rows * num_splits, tiles if shared and b > 1 else -(-tiles // num_splits))


def locate(plan: DecodePlan, hq: int, hk: int, max_query_len: int, sequence: int, query: int, head: int, split: int) -> tuple[int, int]:
    """(program, lane) in a TileLog of a sequence's query 0..7, query head and split."""
    group = hq // hk
    part, query = divmod(query, plan.block_m // group)
    row = (sequence * hk + head // group) * _parts(plan.block_m, group, max_query_len) + part
    return row * plan.num_splits + split, query * group + head % group


def _check_log(log: TileLog, plan: DecodePlan, dv: int) -> None:
    if not isinstance(log, TileLog):
        raise ValueError(f"log must be a kernels.tile_log.TileLog, not {type(log).__name__}")
    grid = (plan.programs, plan.tiles)
    lanes, ints = (*grid, plan.block_m), (torch.int32,)
    for name, shape, dtypes in (
        ("owner", (plan.programs, 5), ints), ("span", (*grid, 2), ints), ("kind", grid, ints), ("sm", grid, ints),
        ("time", (*grid, 2), (torch.int64,)), ("m", lanes, (torch.float32,)), ("l", lanes, (torch.float32,)),
        ("rescale", lanes, (torch.float32,)), ("acc", (plan.tiles, dv), (torch.float32,)),
    ):  # fmt: skip
        x = getattr(log, name)
        check_tensor(f"log.{name}", x, shape, dtypes)
        if not x.is_contiguous():
            raise ValueError(f"log.{name} must be contiguous")


def flash_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: Tree | None = None, return_lse: bool = False, host: HostPlan | None = None,
    out: torch.Tensor | None = None, num_splits: int | None = None, log: TileLog | None = None, block_n: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See attention_ref, and beyond it:

    Args:
        out: [t, Hq, Dv] in q's type, written in place: rows of sequences with at most MAX_QUERIES queries, and zeros
            behind the last sequence. None: a new one, in which the other rows hold anything; so does lse, always new.
        num_splits: programs that share a row's keys equally, 1 to SPLIT_LIMIT. None: enough to fill the GPU and to
            break up the longest sequence possible; each sequence uses as many of them as its length earns.
        log: written in place, of the shape that plan_decode says; a slower variant of the kernel.
        block_n: keys of a tile: 16, 32, 64 or 128. None: by head dimension and type.

    Raises:
        ValueError: naming the argument that cannot be taken.
    """
    check_attention(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_query_len, window, softcap, sinks, tree)
    (t, hq, d), dv, b = q.shape, v_cache.shape[3], seq_lens.shape[0]
    plan = plan_decode(q, k_cache, v_cache, block_table, max_query_len, window, num_splits, block_n)
    if out is None:
        out = torch.empty((t, hq, dv), dtype=q.dtype, device=q.device)
    else:
        check_tensor("out", out, (t, hq, dv), (q.dtype,))
        check_written("out", out)
        check_devices(q=q, out=out)
    if log is not None:
        _check_log(log, plan, dv)
        check_devices(q=q, **{f"log.{name}": x for name, x in log._asdict().items() if name != "chosen"})
    lse = torch.empty((t, hq), dtype=torch.float32, device=q.device) if return_lse else None
    if b == 0 and t > 0:  # nothing but padding
        out.zero_()
        if return_lse:
            lse.fill_(-torch.inf)
    elif t > 0:
        _run(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_query_len, window, softcap, sinks, tree,
             out, lse, log, plan, _launch(plan.block_m, d, dv, q.element_size()), num_splits is None and b > 1)  # fmt: skip
    return (out, lse) if return_lse else out


def _run(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_query_len, window, softcap, sinks, tree,
         out, lse, log: TileLog | None, plan: DecodePlan, launch: _Launch, by_length: bool) -> None:  # fmt: skip
    """Both launches, of checked arguments."""
    (_, hq, d), (_, page_size, hk, dv), b = q.shape, v_cache.shape, seq_lens.shape[0]
    group, splits = hq // hk, plan.num_splits
    block_q, parts, (block_d, block_dv) = plan.block_m // group, _parts(plan.block_m, group, max_query_len), _widths(d, dv)
    slots = _slots(q.device, plan.block_n * (block_d + block_dv) * q.element_size())
    pdl = launch.pdl and splits > 1 and q.is_cuda
    part_ml = part_acc = None
    if splits > 1:
        lines = b * hk * parts * block_q * group
        part_ml = torch.empty((2, lines, splits), dtype=torch.float32, device=q.device)
        part_acc = torch.empty((lines, splits, dv), dtype=torch.float32, device=q.device)
    part_m, part_l = (None, None) if part_ml is None else part_ml.unbind()
    same = {
        "HK": hk, "GROUP": group, "DV": dv, "PARTS": parts, "MAX_QUERIES": MAX_QUERIES, "SOFTCAP": softcap is not None,
        "SINKS": sinks is not None, "RETURN_LSE": lse is not None, "PDL": pdl, "BLOCK_Q": block_q, "BLOCK_DV": block_dv,
    }  # fmt: skip
    _flash_decode_kernel[(plan.programs,)](
        q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, sinks, *(tree or (None,) * 3), out, lse, part_m, part_l, part_acc,
        *(log[:-1] if log else (None,) * 9), q.shape[0], b, splits, slots, float(scale), 1.0 if softcap is None else float(softcap), plan.tiles,
        *(log.chosen if log else (0, 0)), q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        block_table.stride(0), out.stride(0), out.stride(1), **same, D=d, PAGE_SIZE=page_size, WINDOW=window or 0,
        TREE=tree is not None, DIRECT=splits == 1, TRACE=log is not None, TIMED=log is not None and q.is_cuda,
        SOON=SOON, BLOCK_B=power_of_two(b) if by_length and splits > 1 else 0,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_D=block_d, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    if splits > 1:
        block_s = power_of_two(splits)
        step = min(block_s, max(1, 8192 // block_dv))
        more = {"launch_pdl": True} if pdl else {}
        _merge_splits_kernel[(hq, min(max_query_len, MAX_QUERIES), b)](
            part_m, part_l, part_acc, cu_seqlens_q, sinks, out, lse, splits, float(scale), out.stride(0), out.stride(1),
            **same, BLOCK_S=block_s, STEP=step, num_warps=4 if step * block_dv >= 2048 else 1, **more,
        )  # fmt: skip


def _visible(inputs: Mapping) -> Iterator[tuple[int, int, np.ndarray]]:
    """(sequence, row of q, keys that it sees) for every row of a sequence."""
    cu, lens, tree = inputs["cu_seqlens_q"].tolist(), inputs["seq_lens"].tolist(), inputs["tree"]
    drafts = [0] * len(lens) if tree is None else tree.lens.tolist()
    for s, ((first, behind), length) in enumerate(zip(pairwise(cu), lens)):
        keys = np.arange(length)
        for row in range(first, behind):
            position = length - behind + row if not drafts[s] else int(tree.positions[row])
            seen = keys <= position
            if inputs["window"] is not None:
                seen &= keys > position - inputs["window"]
            if drafts[s]:
                draft = keys - (length - drafts[s])
                ancestor = (np.int64(int(tree.mask[row])) >> np.maximum(draft, 0)) & 1
                seen = np.where(draft >= 0, ancestor == 1, seen)
            yield s, row, keys[seen]


def flash_decode_loop(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: Tree | None = None, return_lse: bool = False, host: HostPlan | None = None,
) -> Generator[None, None, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Online softmax, one (row, key) an iteration, all heads at once. Sequences of any length."""
    (t, hq, _), (_, page_size, hk, dv) = q.shape, v_cache.shape
    out = torch.zeros((t, hq, dv), dtype=torch.float32, device=q.device)
    lse = torch.full((t, hq), -torch.inf, device=q.device)
    rows = {"cu_seqlens_q": cu_seqlens_q, "seq_lens": seq_lens, "tree": tree, "window": window}
    for s, row, keys in _visible(rows):
        m, l, acc = torch.full_like(lse[0], -torch.inf), torch.zeros_like(lse[0]), out[row]
        for j in keys.tolist():
            at = (block_table[s, j // page_size], j % page_size)
            k, v = (cache[at].float().repeat_interleave(hq // hk, 0) for cache in (k_cache, v_cache))  # [Hq, D], [Hq, Dv]
            x = scale * (q[row].float() * k).sum(-1)
            if softcap is not None:
                x = softcap * torch.tanh(x / softcap)
            m_new = torch.maximum(m, x)
            rescale, p = torch.exp(m - m_new), torch.exp(x - m_new)
            m, l = m_new, l * rescale + p
            acc.mul_(rescale[:, None]).addcmul_(p[:, None], v)
            yield
        if len(keys):
            lse[row] = m + torch.log(l)
            if sinks is not None:
                lse[row] = torch.logaddexp(lse[row], sinks)
            acc.mul_(torch.exp(m - lse[row])[:, None])
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


_FEW = "1:1 1:15 1:16 1:17 1:33 1:100"
_MIXED = "1:33 5:40 8:17 1:1 3:16"
SPEC = KernelSpec(
    name="flash_decode",
    formula="out = softmax(softcap*tanh(scale*q.k/softcap) over keys j <= position, j > position - window) v, keys split and merged by lse",
    fn=flash_decode,
    ref=attention_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("decode_9_3_64", {"sequences": _FEW, "hq": 9, "hk": 3, "d": 64}),
        Case("verify_9_3_64", {"sequences": _MIXED, "hq": 9, "hk": 3, "d": 64, "layers": 3}),
        Case("one_1000", {"sequences": "1:1000", "hq": 4, "hk": 2, "d": 64, "lse": False}),
        Case("verify_63_100", {"sequences": "4:63 8:100 2:17", "hq": 4, "hk": 1, "d": 32, "page_size": 8}),
        Case("d40", {"sequences": _MIXED, "hq": 2, "hk": 2, "d": 40}),
        Case("d72", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 72, "page_size": 32}),
        Case("d80", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 80}),
        Case("d96", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 96}),
        Case("d112", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 112, "page_size": 64}),
        Case("d128", {"sequences": _MIXED, "hq": 8, "hk": 2, "d": 128}),
        Case("d192_dv128", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 192, "dv": 128, "page_size": 128}),
        Case("d256", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 256}),
        Case("d13_dv7", {"sequences": _MIXED, "hq": 3, "hk": 1, "d": 13, "dv": 7}),
        Case("d1_dv1", {"sequences": _MIXED, "hq": 2, "hk": 1, "d": 1, "dv": 1}),
        Case("window_4", {"sequences": _MIXED + " 1:100", "hq": 4, "hk": 2, "d": 32, "window": 4}),
        Case("window_33", {"sequences": "1:33 1:34 8:80 1:100", "hq": 4, "hk": 2, "d": 32, "window": 33}),
        Case("window_1", {"sequences": _MIXED, "hq": 2, "hk": 2, "d": 16, "window": 1}),
        Case("softcap_50", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 64, "softcap": 50.0, "q_scale": 40.0}),
        Case("softcap_window", {"sequences": _MIXED, "hq": 4, "hk": 2, "d": 32, "softcap": 5.0, "window": 9}),
        Case("sinks", {"sequences": _MIXED + " 1:0 3:2", "hq": 4, "hk": 2, "d": 64, "sinks": True, "pad_rows": 2}),
        Case("sinks_window_softcap", {"sequences": "1:100 6:90", "hq": 4, "hk": 1, "d": 32, "sinks": True, "window": 40, "softcap": 5.0}),
        Case("drafts", {"sequences": "6:40 8:90 1:33 3:20", "hq": 4, "hk": 2, "d": 64, "drafts": "5 7 0 3"}),
        Case("drafts_behind_the_queries", {"sequences": "3:80 2:70", "hq": 4, "hk": 2, "d": 32, "drafts": "64 5", "pad_rows": 1}),
        Case(
            "drafts_window_sinks", {"sequences": "6:90 8:40 1:33", "hq": 4, "hk": 2, "d": 32, "drafts": "5 8 0", "window": 7, "sinks": True}
        ),
        Case("rows_without_keys", {"sequences": "5:3 1:0 3:0 1:20 4:4", "hq": 4, "hk": 2, "d": 32, "pad_rows": 5}),
        Case("decode_gaps", {"sequences": "0:9 1:17 0:0 1:3 0:5", "hq": 4, "hk": 2, "d": 32, "pad_rows": 1}),
        Case("only_padding", {"sequences": "", "hq": 4, "hk": 2, "d": 32, "pad_rows": 3}),
        Case("group_71", {"sequences": "1:40 3:17", "hq": 71, "hk": 1, "d": 64}),
    ),
    bench_cases=(
        Case("b32_kv4096_32_8_128", {"sequences": "1:4096x32", "hq": 32, "hk": 8, "d": 128, "lse": False}),
        Case("b1_kv1024_32_8_128", {"sequences": "1:1024", "hq": 32, "hk": 8, "d": 128, "lse": False}),
        Case("b1_kv131072_32_8_128", {"sequences": "1:131072", "hq": 32, "hk": 8, "d": 128, "lse": False}),
        Case("b1_kv1000_9_3_64", {"sequences": "1:1000", "hq": 9, "hk": 3, "d": 64, "lse": False}),
        Case("b64_kv1000_9_3_64", {"sequences": "1:1000x64", "hq": 9, "hk": 3, "d": 64, "lse": False}),
        Case("verify8_b32_kv4096_32_8_128", {"sequences": "8:4096x32", "hq": 32, "hk": 8, "d": 128, "lse": False}),
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
        Bad("window", lambda window: 0),
        Bad("sinks", lambda sinks: torch.zeros(8)),
        Bad("sinks", lambda sinks: torch.zeros(9, dtype=torch.float64)),
        Bad("tree", lambda tree: torch.zeros(6)),
        Bad("max_query_len", lambda n: 0),
    ),
    empty_dims={"sequences": ""},
    tolerance={torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2},
    loop=flash_decode_loop,
    loop_iterations=lambda inputs: sum(len(keys) for _, _, keys in _visible(inputs)),
)
