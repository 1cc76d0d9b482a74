"""Softmax attention of a ragged super-sequence over paged keys and values.

    out[i] = sum_j p[j] v[j],   p = softmax_j(x[j]),   x[j] = cap(scale * q[i].k[j]),   cap(x) = softcap*tanh(x/softcap)

Query i of a sequence with n_q queries sits at position seq_len - n_q + i and sees the keys j <= its position, with a
window only j > position - window (itself and window - 1 before it). Prefill, chunk, decode and verification are
values of n_q. Key j lives in page block_table[s, j // page_size], slot j % page_size. Query heads share key heads in
groups of Hq / Hk. A row that sees no key, and a row behind the last sequence, gives 0 and lse = -inf.

Nothing but visible keys is ever read: stale slots may hold NaN, table entries outside may hold anything.

Kernel: one program a (Q-block, key head). The rows of a Q-block are queries x group, so a page is read once for all
heads that share it. Online softmax in units of the raw dot product, p = exp2((x - m) * c) with the scale folded into
c: the subtraction comes before the scaling, so scores near -6e4 keep their digits. Blocks that every row sees run
first and unmasked. The grid depends on t and b alone.

Reference: the production path on a CPU. Sequences with n_q = 1 and similar length are one gather and one SDPA call with
the group as query rows; the others run one by one on exactly their valid slice. The indices depend on the step, not
on the layer: build a HostPlan once a step with plan_host() and pass it as `host`.

Rejected: a finite mask value as -inf (wrong for very negative scores), giving SDPA the stale slots with a mask (0 * NaN
is NaN), one program a query head (reads each page Hq / Hk times). Not yet here: split-KV, tensor descriptors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.common import FENCE, check_devices, check_tensor, fenced, make_generator, power_of_two
from kernels.spec import Bad, Case, KernelSpec

SCORES_AT_ONCE = 1 << 26  # the reference's largest score matrix, in elements
PADDED_KEYS = 1024  # the reference reads this many keys for nothing rather than make one more call


@dataclass(frozen=True)
class _Gather:
    """Key slots to read: `pages[i], offsets[i]` for key i. `memo` keeps, by cache name and layout, the same as one
    index and the buffer it is read into: fresh memory for every layer costs more in page faults than the attention."""

    pages: torch.Tensor
    offsets: torch.Tensor
    memo: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class _Decodes:
    """Sequences with one query each: `rows` of q, `n` sequences padded to `keys` keys. Padding repeats a valid slot
    and is hidden by `mask` [n, 1, 1, keys] (None: nothing is padded)."""

    rows: slice | torch.Tensor
    n: int
    keys: int
    gather: _Gather
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Chunk:
    """Query rows [start, stop) of one sequence that see some key. `causal`: they are its first ones, no window."""

    start: int
    stop: int
    gather: _Gather
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True)
class HostPlan:
    """What the reference reads in one step, the same for every layer with this window. Invariant: each row of q that
    sees a key is in exactly one item; `covered` says that these are all rows."""

    window: int | None
    decodes: tuple[_Decodes, ...]
    chunks: tuple[_Chunk, ...]
    covered: bool


def plan_host(
    block_table: torch.Tensor | np.ndarray,
    cu_seqlens_q: torch.Tensor | np.ndarray | Sequence[int],
    seq_lens: torch.Tensor | np.ndarray | Sequence[int],
    page_size: int,
    num_rows: int,
    window: int | None = None,
    device: torch.device | str = "cpu",
) -> HostPlan:
    """The step's indices and masks. num_rows: the rows of q, padding included."""
    table, cu, lens = (x.cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (block_table, cu_seqlens_q, seq_lens))
    queries = cu[1:] - cu[:-1]

    def gather(sequence: np.ndarray, position: np.ndarray) -> _Gather:
        pages = table[sequence, position // page_size].astype(np.int64).reshape(-1)
        offsets = (position % page_size).astype(np.int64).reshape(-1)
        return _Gather(torch.from_numpy(pages).to(device), torch.from_numpy(offsets).to(device))

    single = np.flatnonzero((queries == 1) & (lens > 0))
    counts = lens[single] if window is None else np.minimum(lens[single], window)
    decodes = [_plan_decodes(cu[of], lens[of], n, of, gather, device) for of, n in _similar(single, counts)]
    chunks = [
        _plan_chunk(s, int(cu[s + 1]), int(queries[s]), int(lens[s]), window, gather, device)
        for s in np.flatnonzero((queries > 1) & (lens > 0)).tolist()
    ]
    covered = sum(it.n for it in decodes) + sum(it.stop - it.start for it in chunks) == num_rows
    return HostPlan(window, tuple(decodes), tuple(chunks), covered)


def _similar(sequences: np.ndarray, counts: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(sequences, their key counts) in groups that waste at most PADDED_KEYS when padded to their longest."""
    groups: list[list[int]] = []
    waste = 0
    for i in np.argsort(-counts, kind="stable").tolist():  # longest first
        waste += int(counts[groups[-1][0]] - counts[i]) if groups else PADDED_KEYS + 1
        if waste > PADDED_KEYS:
            groups.append([])
            waste = 0
        groups[-1].append(i)
    return [(sequences[sorted(g)], counts[sorted(g)]) for g in groups]


def _plan_decodes(
    rows: np.ndarray, lens: np.ndarray, n: np.ndarray, sequences: np.ndarray, gather: Callable[..., _Gather], device: torch.device | str
) -> _Decodes:
    keys = int(n.max())
    j = np.arange(keys)[None, :]
    # behind a sequence's n keys its last one is repeated: a valid slot, so no stale value is read
    g = gather(sequences[:, None], np.minimum((lens - n)[:, None] + j, (lens - 1)[:, None]))
    mask = None
    if n.min() < keys:
        hidden = np.where(j < n[:, None], np.float32(0), np.float32(-np.inf))
        mask = torch.from_numpy(hidden)[:, None, None, :].to(device)
    if rows[-1] - rows[0] == len(rows) - 1:
        return _Decodes(slice(int(rows[0]), int(rows[-1]) + 1), len(rows), keys, g, mask)
    return _Decodes(torch.from_numpy(rows.astype(np.int64)).to(device), len(rows), keys, g, mask)


def _plan_chunk(
    sequence: int, stop: int, n_q: int, length: int, window: int | None, gather: Callable[..., _Gather], device: torch.device | str
) -> _Chunk:
    visible = min(n_q, length)  # the rows before sit at negative positions
    first = length - visible  # position of the first visible row
    low = 0 if window is None else max(0, first - window + 1)
    causal = first == 0 and (window is None or window >= length)
    mask = None
    if not causal:
        row, key = torch.arange(first, length, device=device)[:, None], torch.arange(low, length, device=device)[None, :]
        seen = key <= row if window is None else (key <= row) & (key > row - window)
        mask = torch.where(seen, 0.0, -torch.inf)
    return _Chunk(stop - visible, stop, gather(np.asarray(sequence), np.arange(low, length)), mask, causal)


def _take(name: str, cache: torch.Tensor, gather: _Gather) -> torch.Tensor:
    """cache [pages, page_size, Hk, D] -> [keys, Hk, D], fp32. Where pages are whole slots apart the arena is one long
    list of slots, and index_select is 4x faster than indexing by two tensors. The next call with this name and gather
    overwrites the result."""
    (stride_p, stride_s, stride_h, stride_d), (pages, page_size, hk, d) = cache.stride(), cache.shape
    if stride_s <= 0 or stride_p % stride_s:
        return cache[gather.pages, gather.offsets].float()
    ratio = stride_p // stride_s
    key = (name, ratio, hk, d, cache.dtype)
    kept = gather.memo.get(key)
    if kept is None:
        index = gather.pages * ratio + gather.offsets
        kept = gather.memo[key] = (index, cache.new_empty(index.shape[0], hk, d))
    slots = cache.as_strided(((pages - 1) * ratio + page_size, hk, d), (stride_s, stride_h, stride_d))
    return torch.index_select(slots, 0, kept[0], out=kept[1]).float()


def _attend_ref(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None, causal: bool,
    softcap: float | None, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """q [n, H, m, D], k [n, Hk, keys, D], v [n, Hk, keys, Dv] -> out [n, H, m, Dv], lse [n, H, m]. Each row sees a key."""
    if softcap is None and not return_lse:
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa), None
    (n, h, m, _), hk, keys, dv = q.shape, k.shape[1], k.shape[2], v.shape[3]
    out, lse = q.new_empty(n, h, m, dv), q.new_empty(n, h, m)
    if causal:
        mask = q.new_full((m, keys), -torch.inf).triu_(1)
    step = max(1, SCORES_AT_ONCE // (n * h * keys))
    for a in range(0, m, step):
        part = slice(a, min(a + step, m))
        rows = q[:, :, part].reshape(n, hk, -1, q.shape[3])  # group and queries as rows of one matmul
        x = torch.matmul(rows, k.transpose(2, 3)).mul_(scale).view(n, h, -1, keys)
        if softcap is not None:
            x = torch.tanh_(x.div_(softcap)).mul_(softcap)
        if mask is not None:
            x += mask if mask.shape[-2] == 1 else mask[part]
        lse[:, :, part] = torch.logsumexp(x, -1)
        p = torch.softmax(x, -1).view(n, hk, -1, keys)
        out[:, :, part] = torch.matmul(p, v).view(n, h, -1, dv)
    return out, lse


def paged_attention_ref(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    return_lse: bool = False, host: HostPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Same arguments as paged_attention."""
    (t, hq, d), hk, dv = q.shape, k_cache.shape[2], v_cache.shape[3]
    if host is None:
        host = plan_host(block_table, cu_seqlens_q, seq_lens, k_cache.shape[1], t, window, q.device)
    elif host.window != window:
        raise ValueError(f"host was planned for window {host.window}, not {window}")
    make = q.new_empty if host.covered else q.new_zeros
    out = lse = None
    if return_lse:
        lse = torch.full((t, hq), -torch.inf, dtype=torch.float32, device=q.device)
    for it in host.decodes:
        k = _take("k", k_cache, it.gather).view(it.n, it.keys, hk, d).transpose(1, 2)
        v = _take("v", v_cache, it.gather).view(it.n, it.keys, hk, dv).transpose(1, 2)
        rows = q[it.rows].float().unflatten(1, (hk, hq // hk))  # [n, Hk, group, D]: the group as query rows
        o, part = _attend_ref(rows, k, v, scale, it.mask, False, softcap, return_lse)
        o = o.reshape(it.n, hq, dv)
        if return_lse:
            lse[it.rows] = part.reshape(it.n, hq)
        if it.n == t and isinstance(it.rows, slice):
            out = o.to(q.dtype)
            continue
        out = make(t, hq, dv) if out is None else out
        out[it.rows] = o.to(q.dtype)
    for it in host.chunks:
        k, v = (_take(n, x, it.gather).transpose(0, 1)[None] for n, x in (("k", k_cache), ("v", v_cache)))
        rows = q[it.start : it.stop].float().transpose(0, 1)[None]
        o, part = _attend_ref(rows, k, v, scale, it.mask, it.causal, softcap, return_lse)
        out = make(t, hq, dv) if out is None else out
        out[it.start : it.stop] = o[0].transpose(0, 1)
        if return_lse:
            lse[it.start : it.stop] = part[0].transpose(0, 1)
    if out is None:
        out = make(t, hq, dv)
    return (out, lse) if return_lse else out


@triton.jit
def _find_sequence(cu_seqlens_q, b, block, BLOCK_Q: tl.constexpr):
    """The sequence that owns this Q-block: s owns the blocks from cu_seqlens_q[s] // BLOCK_Q + s on."""
    low = 0
    high = b
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_q + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


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
def _paged_attention_kernel(
    q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out, lse, t, b, scale, softcap,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_bt,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, RETURN_LSE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    s = _find_sequence(cu_seqlens_q, b, block, BLOCK_Q)
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


def _check(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    check_tensor("q", q, (None, None, None))
    _, hq, d = q.shape
    check_tensor("k_cache", k_cache, (None, None, None, d), (q.dtype,))
    pages, page_size, hk, _ = k_cache.shape
    check_tensor("v_cache", v_cache, (pages, page_size, hk, None), (q.dtype,))
    check_tensor("seq_lens", seq_lens, (None,), (torch.int32,))
    b = seq_lens.shape[0]
    check_tensor("block_table", block_table, (b, None), (torch.int32,))
    check_tensor("cu_seqlens_q", cu_seqlens_q, (b + 1,), (torch.int32,))
    if page_size < 8 or page_size > 128 or page_size & (page_size - 1):
        raise ValueError(f"k_cache has page size {page_size}, must be a power of two from 8 to 128")
    if hk == 0 or hq % hk or hq // hk > 128:
        raise ValueError(f"q has {hq} heads, must be 1 to 128 times the {hk} heads of k_cache")
    for name, n in (("q", d), ("v_cache", v_cache.shape[3])):
        if not 1 <= n <= 256:
            raise ValueError(f"{name} has head dimension {n}, must be 1 to 256")
    for name, value in (("scale", scale), ("softcap", 1.0 if softcap is None else softcap)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}, must be positive")
    for name, value in (("max_query_len", max_query_len), ("window", 1 if window is None else window)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    check_devices(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    return_lse: bool = False, host: HostPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See the module's formula.

    Args:
        q: [t, Hq, D]; strides free but the last. Rows from cu_seqlens_q[b] on are padding.
        k_cache, v_cache: [pages, page_size, Hk, D] and [.., Dv]; strides free but the last.
        block_table: [b, max_blocks] int32: page of keys j*page_size and on. Only entries of visible keys are read.
        cu_seqlens_q: [b + 1] int32: sequence s owns the query rows cu_seqlens_q[s] to cu_seqlens_q[s + 1].
        seq_lens: [b] int32: keys the last query of the sequence sees.
        scale: positive; multiplies q.k.
        max_query_len: no sequence has more queries; chooses the block shape only.
        window: keys a query sees, itself included; None: all.
        softcap: see the formula; None: none.
        return_lse: also return the natural log of the softmax denominator, fp32 [t, Hq].
        host: for the reference only; plan_host() of the same lengths and table.

    Returns:
        out [t, Hq, Dv] in q's type, with return_lse (out, lse).
    """
    _check(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_query_len, window, softcap)
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
        _paged_attention_kernel[grid](
            q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out, lse, t, b, float(scale),
            1.0 if softcap is None else float(softcap), q.stride(0), q.stride(1), *k_cache.stride()[:3],
            *v_cache.stride()[:3], block_table.stride(0),
            HQ=hq, GROUP=group, D=d, DV=dv, PAGE_SIZE=page_size, WINDOW=window or 0, SOFTCAP=softcap is not None,
            RETURN_LSE=return_lse, BLOCK_Q=block_q, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_D=max(16, power_of_two(d)), BLOCK_DV=max(16, power_of_two(dv)),
            num_warps=8 if block_m * wide >= (8192 if half else 4096) else 4, num_stages=2,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def make_inputs(
    device: str, dtype: torch.dtype, seed: int, sequences: str, hq: int, hk: int, d: int, dv: int = 0, page_size: int = 16,
    window: int = 0, softcap: float = 0.0, pad_rows: int = 0, layers: int = 1, lse: bool = True, q_scale: float = 1.0,
) -> dict:  # fmt: skip
    """sequences: "n_q:seq_len n_q:seq_len ..", `x4` repeats one. Caches are views into one arena of NaN in which only
    the sequences' own slots are written; table entries behind a sequence point at a page of NaN. pad_rows: query rows
    behind the last sequence, NaN. window, softcap = 0: none."""
    g = make_generator(device, seed)
    dv = dv or d
    pairs = []
    for item in sequences.split():
        pair, _, times = item.partition("x")
        pairs += [tuple(int(n) for n in pair.split(":"))] * int(times or 1)
    needed = [-(-length // page_size) for _, length in pairs]
    pages, k_page, v_page = sum(needed) + 2, page_size * hk * d, page_size * hk * dv
    stride = layers * (k_page + v_page)
    arena = torch.full((pages * stride + 2 * FENCE,), float("nan"), dtype=dtype, device=device)
    at = FENCE + (layers - 1) * (k_page + v_page)
    k_cache = arena.as_strided((pages, page_size, hk, d), (stride, hk * d, d, 1), at)
    v_cache = arena.as_strided((pages, page_size, hk, dv), (stride, hk * dv, dv, 1), at + k_page)
    order = torch.randperm(pages, generator=g, device=device).to(torch.int32)
    block_table = order[-1].expand(len(pairs), max(needed, default=0) + 1).contiguous()
    used = 0
    for s, ((_, length), n) in enumerate(zip(pairs, needed)):
        block_table[s, :n] = order[used : used + n]
        used += n
        position = torch.arange(length, device=device)
        slot = (block_table[s].long()[position // page_size], position % page_size)
        for cache, width in ((k_cache, d), (v_cache, dv)):
            cache[slot] = torch.randn(length, hk, width, generator=g, device=device).to(dtype)
    cu = [0]
    for n_q, _ in pairs:
        cu.append(cu[-1] + n_q)
    # q is the front of a fused qkv row
    qkv = fenced(g, (cu[-1] + pad_rows, (hq + hk) * d), dtype, scale=q_scale)
    qkv[cu[-1] :] = float("nan")
    return {
        "q": qkv[:, : hq * d].unflatten(1, (hq, d)),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "cu_seqlens_q": torch.tensor(cu, dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([length for _, length in pairs], dtype=torch.int32, device=device),
        "scale": d**-0.5,
        "max_query_len": max((n_q for n_q, _ in pairs), default=1),
        "window": window or None,
        "softcap": softcap or None,
        "return_lse": lse,
    }


def _counts(inputs: Mapping) -> tuple[int, int]:
    """(pairs of query and visible key, keys seen by any query), over all sequences."""
    cu, lens, window = inputs["cu_seqlens_q"].tolist(), inputs["seq_lens"].tolist(), inputs["window"]
    pairs = keys = 0
    for n_q, length in zip((b - a for a, b in pairwise(cu)), lens):
        seen = np.arange(length - n_q, length) + 1
        seen = np.clip(seen, 0, window)
        pairs += int(seen.sum())
        keys += min(length, n_q - 1 + (window or length)) if n_q else 0
    return pairs, keys


def _flops(inputs: Mapping) -> int:
    q, v_cache = inputs["q"], inputs["v_cache"]
    return 2 * _counts(inputs)[0] * q.shape[1] * (q.shape[2] + v_cache.shape[3])


def _bytes(inputs: Mapping) -> int:
    q, (_, page_size, hk, dv) = inputs["q"], inputs["v_cache"].shape
    t, hq, d = q.shape
    keys = _counts(inputs)[1]
    moved = t * hq * (d + dv) + keys * hk * (d + dv)
    return moved * q.element_size() + 4 * (keys // page_size) + (4 * t * hq if inputs["return_lse"] else 0)


_MIXED = "1:33 5:40 17:17 1:1 3:16"
SPEC = KernelSpec(
    name="paged_attention",
    formula="out = softmax(softcap*tanh(scale*q.k/softcap) over keys j <= position, j > position - window) v",
    fn=paged_attention,
    ref=paged_attention_ref,
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
    flops=_flops,
    bytes=_bytes,
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
