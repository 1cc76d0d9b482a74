"""flash_prefill's kernel for Hopper GPUs (compute capability 9.0), in Gluon: three roles instead of one. No SPEC of its own.

A program has two consumers of one warpgroup each (64 lanes: rows x group, as in flash_prefill) and a producer warp. The
producer takes Q-blocks from a counter, heaviest first, and streams their pages through the tensor copy engine into a ring
of K and V tiles; a page is a tile, a part of one, or several tiles. A consumer goes through the tiles from the last to
the first: it starts q k^T of a tile and p v of the tile before, and computes the softmax while p v is still running. The
two consumers take turns at starting their products, so that one's softmax runs beside the other's products.

Measured on an H200 (4x32x4096 causal, TFLOP/s, cuDNN beside it): d = 128 576 with pauses between runs and 518 without,
for the power limit sets the clock (cuDNN 517 to 546); d = 64 387 (413). Pages of 16 cost 8 % (d = 128) and 2 %: 32 small
copies a tile, sent by one warp. Rejected there: a program per Q-block (501, 360); a fixed share of the Q-blocks for each
program (406, 277: unbalanced); no turns (541, 366); tiles of 64 keys (364, 240); three consumers for d = 64 (358:
registers spill). Triton's own pipelining gives 445 and 365: it waits for p v before the softmax.

Deliberately does not know windows, soft caps and draft trees: flash_prefill's Triton kernel, its interpretable twin, has
them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention import find_sequence

LANES = 128  # of a program
BLOCK_N = 128  # keys of a tile
HEADS_AT_ONCE = 8  # key heads whose Q-blocks run side by side: their keys stay in L2

_find_sequence = gluon.jit(find_sequence.fn)
# Triton 3.9 has new names
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def _view(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return buffer.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def _view(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def _next_block(
    counter, cu_seqlens_q, seq_lens, t, b, blocks, min_query_len,
    HK: gl.constexpr, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The next Q-block with rows of ours: (found, sequence, first row, row behind the sequence, keys, key head, tiles)."""
    n = 0
    found = 0
    s = 0
    first = 0
    q_stop = 0
    seq_len = 0
    kv_head = 0
    tiles = 0
    while (found == 0) & (n < blocks * HK):
        n = gl.atomic_add(counter, 1)
        if n < blocks * HK:
            some = n // (blocks * HEADS) * HEADS
            width = gl.minimum(HK - some, HEADS)
            rest = n - some * blocks
            block = blocks - 1 - rest // width
            kv_head = some + rest % width
            s = _find_sequence(cu_seqlens_q, b, block, BLOCK_Q)
            q_start = gl.load(cu_seqlens_q + s)
            q_stop = t
            seq_len = 0
            ours = True
            if s < b:
                q_stop = gl.load(cu_seqlens_q + s + 1)
                seq_len = gl.load(seq_lens + s)
                ours = q_stop - q_start >= min_query_len
            first = q_start + (block - (q_start // BLOCK_Q + s)) * BLOCK_Q
            if (first < q_stop) & ours:
                found = 1
                key_high = gl.minimum(seq_len, seq_len - q_stop + first + BLOCK_Q)
                tiles = (gl.maximum(key_high, 0) + BLOCK_N - 1) // BLOCK_N
    return found, s, first, q_stop, seq_len, kv_head, tiles


@gluon.jit
def _load_tile(
    k_map, v_map, k_parts, v_parts, k_full, k_empty, v_full, v_empty, table, turn, start, seq_len, kv_head,
    k_ratio, v_ratio, stride_kh, stride_vh,
    PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sends for the keys [start, start + BLOCK_N) once their place in the ring is free."""
    ROWS: gl.constexpr = min(PAGE_SIZE, BLOCK_N)
    CHUNKS: gl.constexpr = BLOCK_N // ROWS
    HALVES: gl.constexpr = D // 64
    stage = turn % STAGES
    phase = ((turn // STAGES) & 1) ^ 1
    pages = ()
    for c in gl.static_range(CHUNKS):
        position = start + c * ROWS
        pages = pages + (gl.load(table + position // PAGE_SIZE, mask=position < seq_len, other=0),)  # noqa: RUF005 (Gluon knows no *)
    mbarrier.wait(k_empty.index(stage), phase)
    mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
    for c in gl.static_range(CHUNKS):
        slot = pages[c] * k_ratio + (start + c * ROWS) % PAGE_SIZE
        for h in gl.static_range(HALVES):
            part = k_parts.index((stage * HALVES + h) * CHUNKS + c)
            _copy(k_map, [slot, kv_head * stride_kh + h * 64], k_full.index(stage), part)
    mbarrier.wait(v_empty.index(stage), phase)
    mbarrier.expect(v_full.index(stage), BLOCK_N * D * 2)
    for c in gl.static_range(CHUNKS):
        slot = pages[c] * v_ratio + (start + c * ROWS) % PAGE_SIZE
        for h in gl.static_range(HALVES):
            part = v_parts.index((stage * HALVES + h) * CHUNKS + c)
            _copy(v_map, [slot, kv_head * stride_vh + h * 64], v_full.index(stage), part)


@gluon.jit
def _produce(
    k_map, v_map, k_parts, v_parts, k_full, k_empty, v_full, v_empty, note, note_full, note_empty, counter,
    block_table, cu_seqlens_q, seq_lens, t, b, blocks, min_query_len, stride_bt, k_ratio, v_ratio, stride_kh, stride_vh,
    HK: gl.constexpr, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: a note for each Q-block (first row, row behind the sequence, keys, key head, tiles, 1), then its tiles."""
    VEC: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    field = gl.arange(0, 8, layout=VEC)
    turn = 0  # tiles so far
    notes = 0
    found, s, first, q_stop, seq_len, kv_head, tiles = _next_block(
        counter, cu_seqlens_q, seq_lens, t, b, blocks, min_query_len, HK, HEADS, BLOCK_Q, BLOCK_N
    )
    while found > 0:
        mbarrier.wait(note_empty.index(notes % 2), ((notes // 2) & 1) ^ 1)
        written = gl.where(field == 3, kv_head, gl.where(field == 4, tiles, 1))
        written = gl.where(field == 0, first, gl.where(field == 1, q_stop, gl.where(field == 2, seq_len, written)))
        note.index(notes % 2).store(written)
        mbarrier.arrive(note_full.index(notes % 2), count=1)
        notes += 1
        table = block_table + s.to(gl.int64) * stride_bt
        head = kv_head
        keys = seq_len
        todo = tiles
        if todo > 0:
            _load_tile(
                k_map, v_map, k_parts, v_parts, k_full, k_empty, v_full, v_empty, table, turn, (todo - 1) * BLOCK_N, keys, head,
                k_ratio, v_ratio, stride_kh, stride_vh, PAGE_SIZE, BLOCK_N, D, STAGES,
            )  # fmt: skip
        # looked up while the consumers are busy
        found, s, first, q_stop, seq_len, kv_head, tiles = _next_block(
            counter, cu_seqlens_q, seq_lens, t, b, blocks, min_query_len, HK, HEADS, BLOCK_Q, BLOCK_N
        )
        for j in range(1, todo):
            _load_tile(
                k_map, v_map, k_parts, v_parts, k_full, k_empty, v_full, v_empty, table, turn + j, (todo - 1 - j) * BLOCK_N,
                keys, head, k_ratio, v_ratio, stride_kh, stride_vh, PAGE_SIZE, BLOCK_N, D, STAGES,
            )  # fmt: skip
        turn += todo
    mbarrier.wait(note_empty.index(notes % 2), ((notes // 2) & 1) ^ 1)
    note.index(notes % 2).store(gl.zeros([8], gl.int32, layout=VEC))
    mbarrier.arrive(note_full.index(notes % 2), count=1)


@gluon.jit
def _softmax(x, m, l, exponent, row_position, position, seq_len, MASKED: gl.constexpr):
    """As in flash_prefill: (p, what the old sums shrink by, m, l)."""
    if MASKED:
        seen = (position[None, :] <= row_position[:, None]) & (position < seq_len)[None, :]
        x = gl.where(seen, x, float("-inf"))
    m_new = gl.maximum(m, gl.max(x, axis=1))
    m_safe = m_new
    if MASKED:
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)  # a lane that has seen no key yet
    top = m_safe * exponent
    p = gl.exp2(x * exponent - top[:, None])
    shrink = gl.exp2(m * exponent - top)
    return p, shrink, m_new, l * shrink + gl.sum(p, axis=1)


@gluon.jit
def _step(
    turn, start, order, round, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, m, l, acc, p, row_position, seq_len,
    exponent, WHO: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    S: gl.constexpr, O: gl.constexpr, P: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Scores of tile `turn`, and acc += p v of the tile before it, whose p is given."""
    stage = turn % STAGES
    mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
    mbarrier.wait(order.index(WHO), (round & 1) ^ (1 - WHO))
    nothing = gl.zeros([64, BLOCK_N], gl.float32, layout=S)
    x_later = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    before = (turn - 1) % STAGES
    phase = ((turn - 1) // STAGES) & 1
    if LATE:
        p = gl.convert_layout(p.to(q_tile.dtype), P)
    mbarrier.wait(v_full.index(before), phase)
    acc_later = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
    mbarrier.arrive(order.index(1 - WHO), count=1)
    x = warpgroup_mma_wait(1, deps=[x_later])
    mbarrier.arrive(k_empty.index(stage), count=1)
    position = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
    p, shrink, m, l = _softmax(x, m, l, exponent, row_position, position, seq_len, MASKED)
    if LATE:
        # over since long: its branch keeps ptxas from waiting for acc before the exponentials
        mbarrier.wait(v_full.index(before), phase)
    acc, l = warpgroup_mma_wait(0, deps=[acc_later, l])
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
    if not LATE:
        p = gl.convert_layout(p.to(q_tile.dtype), P)
    return m, l, acc, p


@gluon.jit
def _consume(
    q, out, lse, sinks, q_tiles, k_parts, v_parts, k_full, k_empty, v_full, v_empty, note, note_full, note_empty, order, scale,
    stride_qt, stride_qh, stride_ot, stride_oh,
    WHO: gl.constexpr, HQ: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, SINKS: gl.constexpr, RETURN_LSE: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the lanes [64 * WHO, 64 * WHO + 64) of each Q-block that is noted."""
    dtype: gl.constexpr = q.dtype.element_ty
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    VEC: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ROWS: gl.constexpr = min(PAGE_SIZE, BLOCK_N)
    CHUNKS: gl.constexpr = BLOCK_N // ROWS
    HALVES: gl.constexpr = D // 64
    k_tiles = _view(k_parts, dtype, [STAGES, BLOCK_N, D], SHARED)
    v_tiles = _view(v_parts, dtype, [STAGES, BLOCK_N, D], SHARED)
    q_tile = q_tiles.index(WHO)
    log2e: gl.constexpr = 1.4426950408889634
    exponent = scale * log2e
    field = gl.arange(0, 8, layout=VEC)
    turn = 0  # tiles so far
    round = 0  # steps so far
    notes = 0
    more = 1
    while more > 0:
        mbarrier.wait(note_full.index(notes % 2), (notes // 2) & 1)
        read = note.index(notes % 2).load(VEC)
        first = gl.sum(gl.where(field == 0, read, 0), axis=0)
        q_stop = gl.sum(gl.where(field == 1, read, 0), axis=0)
        seq_len = gl.sum(gl.where(field == 2, read, 0), axis=0)
        kv_head = gl.sum(gl.where(field == 3, read, 0), axis=0)
        tiles = gl.sum(gl.where(field == 4, read, 0), axis=0)
        more = gl.sum(gl.where(field == 5, read, 0), axis=0)
        mbarrier.arrive(note_empty.index(notes % 2), count=1)
        notes += 1
        if more > 0:
            lane = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, FLAT))
            col = gl.arange(0, D, layout=gl.SliceLayout(0, FLAT))
            row = first + lane // GROUP
            head = kv_head * GROUP + lane % GROUP
            active = (lane < BLOCK_Q * GROUP) & (row < q_stop)
            q_at = row.to(gl.int64) * stride_qt + head * stride_qh
            q_tile.store(gl.load(q + q_at[:, None] + col[None, :], mask=active[:, None], other=0.0))
            fence_async_shared()

            s_lane = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
            s_row = first + s_lane // GROUP
            row_position = seq_len - q_stop + s_row
            m = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
            l = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S))
            acc = gl.zeros([64, D], gl.float32, layout=O)
            if tiles > 0:
                # every lane sees the first `full` tiles
                full = gl.maximum(seq_len - q_stop + first + (WHO * 64) // GROUP + 1, 0) // BLOCK_N
                full = gl.minimum(full, tiles - 1)
                start = (tiles - 1) * BLOCK_N
                stage = turn % STAGES
                mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
                nothing = gl.zeros([64, BLOCK_N], gl.float32, layout=S)
                x_later = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                x = warpgroup_mma_wait(0, deps=[x_later])
                mbarrier.arrive(k_empty.index(stage), count=1)
                position = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
                p, _, m, l = _softmax(x, m, l, exponent, row_position, position, seq_len, True)
                if not LATE:
                    p = gl.convert_layout(p.to(dtype), P)
                if start + BLOCK_N > seq_len:
                    # slots behind the sequence may hold NaN, and 0 * NaN is NaN. Both consumers write the same zeros
                    mbarrier.wait(v_full.index(stage), (turn // STAGES) & 1)
                    for c in range((seq_len - start) // ROWS, CHUNKS):
                        slot = gl.arange(0, ROWS, layout=gl.SliceLayout(1, PART))
                        kept = (start + c * ROWS + slot < seq_len)[:, None]
                        for h in gl.static_range(HALVES):
                            part = v_parts.index((stage * HALVES + h) * CHUNKS + c)
                            v = part.load(PART)
                            part.store(gl.where(kept, v, gl.zeros_like(v)))
                    fence_async_shared()
                for j in range(1, tiles - full):
                    m, l, acc, p = _step(
                        turn + j, start - j * BLOCK_N, order, round + j - 1, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full,
                        v_empty, m, l, acc, p, row_position, seq_len, exponent, WHO, True, BLOCK_N, STAGES, S, O, P, LATE,
                    )  # fmt: skip
                for j in range(tiles - full, tiles):
                    m, l, acc, p = _step(
                        turn + j, start - j * BLOCK_N, order, round + j - 1, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full,
                        v_empty, m, l, acc, p, row_position, seq_len, exponent, WHO, False, BLOCK_N, STAGES, S, O, P, LATE,
                    )  # fmt: skip
                turn += tiles
                round += tiles - 1
                last = (turn - 1) % STAGES
                if LATE:
                    p = gl.convert_layout(p.to(dtype), P)
                mbarrier.wait(v_full.index(last), ((turn - 1) // STAGES) & 1)
                acc_later = warpgroup_mma(p, v_tiles.index(last), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc_later])
                mbarrier.arrive(v_empty.index(last), count=1)

            empty = l == 0.0
            top = gl.where(empty, 0.0, m * exponent)  # in units of exp2
            s_head = kv_head * GROUP + s_lane % GROUP
            s_active = (s_lane < BLOCK_Q * GROUP) & (s_row < q_stop)
            share = 1.0 / gl.where(empty, 1.0, l)
            if SINKS:
                sink = gl.load(sinks + s_head, mask=s_active, other=0.0) * log2e
                with_sink = gl.where(empty, 0.0, gl.maximum(top, sink))
                l = l * gl.exp2(top - with_sink) + gl.exp2(sink - with_sink)
                share = gl.exp2(top - with_sink) / l
                top = with_sink
            acc = acc * gl.convert_layout(share, gl.SliceLayout(1, O))[:, None]
            out_at = row.to(gl.int64) * stride_ot + head * stride_oh
            gl.store(out + out_at[:, None] + col[None, :], gl.convert_layout(acc.to(dtype), FLAT), mask=active[:, None])
            if RETURN_LSE:
                ln2: gl.constexpr = 0.6931471805599453
                value = gl.where(empty, float("-inf"), (top + gl.log2(gl.where(empty, 1.0, l))) * ln2)
                gl.store(lse + s_row.to(gl.int64) * HQ + s_head, value, mask=s_active)


@gluon.jit(do_not_specialize=["t", "b", "blocks", "scale", "min_query_len", "stride_bt", "k_ratio", "v_ratio"])
def _flash_hopper_kernel(
    q, k_map, v_map, block_table, cu_seqlens_q, seq_lens, sinks, out, lse, counter, t, b, blocks, scale, min_query_len,
    stride_qt, stride_qh, stride_bt, k_ratio, v_ratio, stride_kh, stride_vh, stride_ot, stride_oh,
    HQ: gl.constexpr, HK: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, SINKS: gl.constexpr,
    RETURN_LSE: gl.constexpr, HEADS: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    LATE: gl.constexpr, REGISTERS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    ROWS: gl.constexpr = min(PAGE_SIZE, BLOCK_N)
    # in memory a tile is [D // 64][BLOCK_N][64]; a part of it is what one copy brings
    PARTS: gl.constexpr = STAGES * (BLOCK_N // ROWS) * (D // 64)
    WHO_0: gl.constexpr = 0
    WHO_1: gl.constexpr = 1
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, D], SHARED)
    k_parts = gl.allocate_shared_memory(dtype, [PARTS, ROWS, 64], SHARED)
    v_parts = gl.allocate_shared_memory(dtype, [PARTS, ROWS, 64], SHARED)
    note = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    note_full = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    note_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    order = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(note_full.index(i), count=1)
        mbarrier.init(note_empty.index(i), count=2)
        mbarrier.init(order.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                q, out, lse, sinks, q_tiles, k_parts, v_parts, k_full, k_empty, v_full, v_empty, note, note_full, note_empty, order,
                scale, stride_qt, stride_qh, stride_ot, stride_oh,
                WHO_0, HQ, GROUP, PAGE_SIZE, BLOCK_Q, BLOCK_N, D, STAGES, SINKS, RETURN_LSE, LATE,
            )),
            (_consume, (
                q, out, lse, sinks, q_tiles, k_parts, v_parts, k_full, k_empty, v_full, v_empty, note, note_full, note_empty, order,
                scale, stride_qt, stride_qh, stride_ot, stride_oh,
                WHO_1, HQ, GROUP, PAGE_SIZE, BLOCK_Q, BLOCK_N, D, STAGES, SINKS, RETURN_LSE, LATE,
            )),
            (_produce, (
                k_map, v_map, k_parts, v_parts, k_full, k_empty, v_full, v_empty, note, note_full, note_empty, counter,
                block_table, cu_seqlens_q, seq_lens, t, b, blocks, min_query_len, stride_bt, k_ratio, v_ratio, stride_kh, stride_vh,
                HK, HEADS, PAGE_SIZE, BLOCK_Q, BLOCK_N, D, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, FEW],
    )  # fmt: skip


@lru_cache
def _multiprocessors(index: int) -> int | None:
    """Of a Hopper GPU; None: another device."""
    return torch.cuda.get_device_properties(index).multi_processor_count if torch.cuda.get_device_capability(index) == (9, 0) else None


def _copyable(cache: torch.Tensor) -> bool:
    """The cache can be seen as rows of slots: whole slots between pages, heads side by side, all aligned."""
    pages, page_size, hk, d = cache.shape
    stride_p, stride_s, stride_h, _ = cache.stride()
    if stride_s <= 0 or stride_p < stride_s or stride_p % stride_s or stride_h < 0 or (hk - 1) * stride_h + d > stride_s:
        return False
    rows = (pages - 1) * (stride_p // stride_s) + page_size
    return cache.data_ptr() % 16 == 0 and stride_s % 8 == 0 and stride_h % 8 == 0 and rows < 2**31


def fits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, max_query_len: int) -> bool:
    """Whether these arguments of flash_prefill (without window, softcap and tree) can run here, and gain by it."""
    d, dv, group = q.shape[2], v_cache.shape[3], q.shape[1] // k_cache.shape[2]
    if not (q.is_cuda and q.element_size() == 2 and d == dv and d in (64, 128) and group * max_query_len >= LANES):
        return False
    return _multiprocessors(q.device.index) is not None and _copyable(k_cache) and _copyable(v_cache)


def _make_map(cache: torch.Tensor) -> TensorDescriptor:
    pages, page_size, hk, d = cache.shape
    stride_p, stride_s, stride_h, _ = cache.stride()
    shape = [(pages - 1) * (stride_p // stride_s) + page_size, (hk - 1) * stride_h + d]
    return TensorDescriptor(cache, shape, [stride_s, 1], [min(page_size, BLOCK_N), 64], gl.NVMMASharedLayout(128, 16, rank=2))


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, sinks: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None,
    min_query_len: int,
) -> None:  # fmt: skip
    """Writes out and, unless None, lse. Arguments as flash_prefill's, for which fits() holds."""
    (t, hq, d), (_, page_size, hk, _), b = q.shape, k_cache.shape, seq_lens.shape[0]
    block_q = LANES // (hq // hk)
    blocks = t // block_q + b + 1
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    (k_page, k_slot, k_head, _), (v_page, v_slot, v_head, _) = k_cache.stride(), v_cache.stride()
    _flash_hopper_kernel[(min(blocks * hk, _multiprocessors(q.device.index)),)](
        q, _make_map(k_cache), _make_map(v_cache), block_table, cu_seqlens_q, seq_lens, sinks, out, lse, counter, t, b, blocks,
        float(scale), min_query_len, q.stride(0), q.stride(1), block_table.stride(0), k_page // k_slot, v_page // v_slot,
        k_head, v_head, out.stride(0), out.stride(1),
        HQ=hq, HK=hk, GROUP=hq // hk, D=d, PAGE_SIZE=page_size, SINKS=sinks is not None, RETURN_LSE=lse is not None,
        HEADS=HEADS_AT_ONCE, BLOCK_Q=block_q, BLOCK_N=BLOCK_N, num_warps=4, **_resources(d),
    )  # fmt: skip


def _resources(d: int) -> dict[str, int | bool]:
    """Tiles in the ring; whether p is kept in fp32 until its product starts (fewer instructions, twice the registers, which
    d = 128 has not); registers of a consumer's and of the producer's threads, 504 in all."""
    if d == 64:
        return {"STAGES": 3, "LATE": True, "REGISTERS": 232, "FEW": 40}
    return {"STAGES": 2, "LATE": False, "REGISTERS": 240, "FEW": 24}
