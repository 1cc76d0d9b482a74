"""What the attention kernels share: their arguments, the reference, test inputs, counts. No kernel of its own.

Softmax attention of a ragged super-sequence over paged keys and values:

    out[i] = sum_j p[j] v[j],   p = softmax_j(x[j]),   x[j] = cap(scale * q[i].k[j]),   cap(x) = softcap*tanh(x/softcap)

Query i of a sequence with n_q queries sits at position seq_len - n_q + i and sees the keys j <= its position, with a
window only j > position - window (itself and window - 1 before it). Prefill, chunk, decode and verification are
values of n_q. Key j lives in page block_table[s, j // page_size], slot j % page_size. Query heads share key heads in
groups of Hq / Hk. A row that sees no key, and a row behind the last sequence, gives 0 and lse = -inf.

Sinks (GPT-OSS): one logit a query head joins the softmax's sum and has no value: l += exp(sink). A row that sees no
key gives 0 and lse = -inf with sinks too.

Draft trees (Tree): a sequence's last `lens[s]` tokens are drafts. A query sees every key before the drafts that its
position and window allow, and of the drafts those whose bit is set in its mask, whatever their slot.

Nothing but visible keys is ever read: stale slots may hold NaN, table entries outside may hold anything.

Reference: the production path on a CPU. Sequences with n_q = 1 and similar length are one gather and one SDPA call with
the group as query rows; the others run one by one on exactly their valid slice. The indices depend on the step, not
on the layer: build a HostPlan once a step with plan_host() and pass it as `host`.

Rejected: giving SDPA the stale slots with a mask (0 * NaN is NaN); trees as a full mask matrix (64 drafts fit an int64).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.common import FENCE, check_devices, check_tensor, fenced, make_generator

SCORES_AT_ONCE = 1 << 26  # the reference's largest score matrix, in elements
PADDED_KEYS = 1024  # the reference reads this many keys for nothing rather than make one more call


MAX_DRAFTS = 64  # of a sequence: the bits of a mask


class Tree(NamedTuple):
    """The drafts of a batch.

    Args:
        lens: int32 [b]: the sequence's last lens[s] tokens are drafts, at most MAX_DRAFTS; 0: none.
        mask: int64 [t]: bit i of a row: it sees draft i of its sequence (itself and its ancestors; those outside a
            window are the caller's to clear). Rows of sequences without drafts are not read.
        positions: int32 [t]: the row's position; a draft's is its depth behind the last token that is no draft. Rows of
            sequences without drafts are not read.
    """

    lens: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor


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
    tree: Tree | None = None,
) -> HostPlan:
    """The step's indices and masks. num_rows: the rows of q, padding included."""
    table, cu, lens = (x.cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (block_table, cu_seqlens_q, seq_lens))
    queries = cu[1:] - cu[:-1]
    drafts = np.zeros_like(lens) if tree is None else tree.lens.cpu().numpy()

    def gather(sequence: np.ndarray, position: np.ndarray) -> _Gather:
        pages = table[sequence, position // page_size].astype(np.int64).reshape(-1)
        offsets = (position % page_size).astype(np.int64).reshape(-1)
        return _Gather(torch.from_numpy(pages).to(device), torch.from_numpy(offsets).to(device))

    single = np.flatnonzero((queries == 1) & (lens > 0) & (drafts == 0))
    counts = lens[single] if window is None else np.minimum(lens[single], window)
    decodes = [_plan_decodes(cu[of], lens[of], n, of, gather, device) for of, n in _similar(single, counts)]
    chunks = [
        _plan_chunk(s, int(cu[s + 1]), int(queries[s]), int(lens[s]), window, gather, device)
        for s in np.flatnonzero((queries > 1) & (lens > 0) & (drafts == 0)).tolist()
    ]
    chunks += [
        _plan_tree(s, int(cu[s]), int(cu[s + 1]), int(lens[s]), int(drafts[s]), window, tree, gather, device)
        for s in np.flatnonzero((queries > 0) & (lens > 0) & (drafts > 0)).tolist()
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


def _plan_tree(
    sequence: int, start: int, stop: int, length: int, drafts: int, window: int | None, tree: Tree, gather: Callable[..., _Gather],
    device: torch.device | str,
) -> _Chunk:  # fmt: skip
    """Every row of a sequence with drafts, under a mask of its own."""
    key = torch.arange(length)[None, :]
    position, bits = tree.positions[start:stop].cpu().long()[:, None], tree.mask[start:stop].cpu()[:, None]
    seen = (key <= position) & (key < length - drafts)
    if window is not None:
        seen &= key > position - window
    seen |= (key >= length - drafts) & ((bits >> (key - (length - drafts)).clamp(min=0)) & 1).bool()
    mask = torch.where(seen, 0.0, -torch.inf).to(device)
    return _Chunk(start, stop, gather(np.asarray(sequence), np.arange(length)), mask, False)


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
    softcap: float | None, sinks: torch.Tensor | None, return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """q [n, H, m, D], k [n, Hk, keys, D], v [n, Hk, keys, Dv], sinks like lse -> out [n, H, m, Dv], lse [n, H, m]."""
    if softcap is None and sinks is None and not return_lse:
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
    if sinks is not None:  # its share of the sum goes to no value
        with_sink = torch.logaddexp(lse, sinks)
        out, lse = out * torch.exp(lse - with_sink).unsqueeze(-1), with_sink
    return out, lse


def attention_ref(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, tree: Tree | None = None, return_lse: bool = False, host: HostPlan | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See the module's formula.

    Args:
        q: [t, Hq, D]; strides free but the last. Rows from cu_seqlens_q[b] on are padding.
        k_cache, v_cache: [pages, page_size, Hk, D] and [.., Dv]; strides free but the last.
        block_table: [b, max_blocks] int32: page of keys j*page_size and on. Only entries of visible keys are read.
        cu_seqlens_q: [b + 1] int32: sequence s owns the query rows cu_seqlens_q[s] to cu_seqlens_q[s + 1].
        seq_lens: [b] int32: keys the last query of the sequence sees; with drafts, keys there are.
        scale: positive; multiplies q.k.
        max_query_len: no sequence has more queries; chooses the block shape only.
        window: keys a query sees, itself included; None: all.
        softcap: see the formula; None: none.
        sinks: [Hq] fp32, in units of x; None: none.
        tree: the batch's drafts; None: none.
        return_lse: also return the natural log of the softmax denominator, fp32 [t, Hq].
        host: plan_host() of the same lengths and table, if there is one already.

    Returns:
        out [t, Hq, Dv] in q's type, with return_lse (out, lse).
    """
    (t, hq, d), hk, dv = q.shape, k_cache.shape[2], v_cache.shape[3]
    if host is None:
        host = plan_host(block_table, cu_seqlens_q, seq_lens, k_cache.shape[1], t, window, q.device, tree)
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
        grouped = None if sinks is None else sinks.float().view(1, hk, hq // hk)
        o, part = _attend_ref(rows, k, v, scale, it.mask, False, softcap, grouped, return_lse)
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
        per_head = None if sinks is None else sinks.float().view(1, hq, 1)
        o, part = _attend_ref(rows, k, v, scale, it.mask, it.causal, softcap, per_head, return_lse)
        out = make(t, hq, dv) if out is None else out
        out[it.start : it.stop] = o[0].transpose(0, 1)
        if return_lse:
            lse[it.start : it.stop] = part[0].transpose(0, 1)
    if out is None:
        out = make(t, hq, dv)
    return (out, lse) if return_lse else out


@triton.jit
def find_sequence(cu_seqlens_q, b, block, BLOCK_Q: tl.constexpr):
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


def check_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor, scale: float, max_query_len: int, window: int | None, softcap: float | None,
    sinks: torch.Tensor | None, tree: Tree | None,
) -> None:  # fmt: skip
    """Raise ValueError naming the argument that no attention kernel takes."""
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
    more = {}
    if sinks is not None:
        check_tensor("sinks", sinks, (hq,), (torch.float32,))
        more["sinks"] = sinks
    if tree is not None:
        if not isinstance(tree, Tree):
            raise ValueError(f"tree must be a kernels.attention.Tree, not {type(tree).__name__}")
        for name, n, dtype in (("lens", b, torch.int32), ("mask", q.shape[0], torch.int64), ("positions", q.shape[0], torch.int32)):
            more[f"tree.{name}"] = getattr(tree, name)
            check_tensor(f"tree.{name}", more[f"tree.{name}"], (n,), (dtype,))
    check_devices(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, **more
    )  # fmt: skip


def make_inputs(
    device: str, dtype: torch.dtype, seed: int, sequences: str, hq: int, hk: int, d: int, dv: int = 0, page_size: int = 16,
    window: int = 0, softcap: float = 0.0, sinks: bool = False, drafts: str = "", pad_rows: int = 0, layers: int = 1,
    lse: bool = True, q_scale: float = 1.0,
) -> dict:  # fmt: skip
    """sequences: "n_q:seq_len n_q:seq_len ..", `x4` repeats one. Caches are views into one arena of NaN in which only
    the sequences' own slots are written; table entries behind a sequence point at a page of NaN. pad_rows: query rows
    behind the last sequence, NaN. window, softcap = 0: none. drafts: how many of each sequence's last tokens are drafts,
    as "0 5 12", in a random tree."""
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
        "sinks": fenced(g, (hq,), torch.float32) if sinks else None,
        "tree": random_tree(pairs, [int(n) for n in drafts.split()], pad_rows, g, device) if drafts else None,
        "return_lse": lse,
    }


def random_tree(pairs: list[tuple[int, int]], lens: list[int], pad_rows: int, generator: torch.Generator, device: str) -> Tree:
    """Each draft's parent is an earlier draft or the last token before the drafts. pairs: (n_q, seq_len)."""
    mask, positions = [], []
    for (n_q, length), n in zip(pairs, lens, strict=True):
        parents = [int(torch.randint(-1, i, (1,), generator=generator, device=generator.device)) for i in range(n)]
        bits = []
        for i, parent in enumerate(parents):
            bits.append((1 << i) | (bits[parent] if parent >= 0 else 0))
        before = [(0, position) for position in range(length - n_q, length - n)]
        rows = before + [(b, length - n - 1 + b.bit_count()) for b in bits][n - min(n, n_q) :]
        mask += [b - (1 << 64) if b >> 63 else b for b, _ in rows]
        positions += [position for _, position in rows]
    mask += [-1] * pad_rows  # nobody reads them
    positions += [1] * pad_rows
    return Tree(
        torch.tensor(lens, dtype=torch.int32, device=device),
        torch.tensor(mask, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
    )


def counts(inputs: Mapping) -> tuple[int, int]:
    """(pairs of query and visible key, keys seen by any query), over all sequences."""
    cu, lens, window = inputs["cu_seqlens_q"].tolist(), inputs["seq_lens"].tolist(), inputs["window"]
    pairs = keys = 0
    for n_q, length in zip((b - a for a, b in pairwise(cu)), lens):
        seen = np.arange(length - n_q, length) + 1
        seen = np.clip(seen, 0, window)
        pairs += int(seen.sum())
        keys += min(length, n_q - 1 + (window or length)) if n_q else 0
    return pairs, keys


def attention_flops(inputs: Mapping) -> int:
    q, v_cache = inputs["q"], inputs["v_cache"]
    return 2 * counts(inputs)[0] * q.shape[1] * (q.shape[2] + v_cache.shape[3])


def attention_bytes(inputs: Mapping) -> int:
    q, (_, page_size, hk, dv) = inputs["q"], inputs["v_cache"].shape
    t, hq, d = q.shape
    keys = counts(inputs)[1]
    moved = t * hq * (d + dv) + keys * hk * (d + dv)
    return moved * q.element_size() + 4 * (keys // page_size) + (4 * t * hq if inputs["return_lse"] else 0)
