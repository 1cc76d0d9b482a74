"""One token a row of logits, drawn on the device: greedy, temperature, top-k, top-p, by inverse CDF or by Gumbel noise.

    p = softmax(logits / temperature) over the kept ids,    token = first id at which the running sum of p exceeds uniform

Kept are the top_k largest logits (0: all) and of those the ones before which less than top_p of the mass lies (1: all).
The running sum goes in id order when neither is set, else from the largest logit down. Temperature 0 is greedy. Among
equal logits the lowest id comes first, everywhere. With `seeds` in place of `uniform` the token is the kept id that has
the largest logit / temperature + g, g = -log(-log(1 - r)), r from Philox 4x32-10 with key seed and counter (id, position).

A row's token depends on its own logits and parameters alone: work is cut by vocabulary size, never by batch, and masses
are whole numbers of 2^-40 of the largest, whose sum has no order. Logits below e^-28 of the largest are never drawn.
exp is fp32: where a uniform lies closer than some 1e-6 to the edge between two ids, rounding decides.

Supported: up to 262,144 ids; any top_k and top_p, any mix of rows. Anything that is not a number counts as infinity, and
infinities share the mass, so that a broken row gives a valid id. Nothing waits for the device.

Two launches. The first cuts each row into chunks and finds their best id, their mass and the largest logit of every 32.
In the second one program draws a row. The top_k-th largest of those maxima bounds the top_k-th logit from below, so what
lies above it, mostly few more than top_k, is gathered and searched in registers: the id is the low part of a 50-bit key
that orders the row without ties, and each question ("which key has this much mass above it?") is a bisection of its bits.
Where too much lies above the bound (a flat row with top_p, top_k in the thousands) the upper 18 bits are bisected by
reading the row itself, from L2, and what shares them is gathered.

Rejected: sorting the row (a nucleus is small); rejection sampling (another token for the same uniform); histograms with
atomics (fp sums in any order, and logits crowd in few bins); fp32 masses (sums of a large vocabulary are not monotone).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import triton
import triton.language as tl

from kernels.common import check_devices, check_tensor, fenced, make_generator, power_of_two
from kernels.spec import Bad, Case, KernelSpec

ID_BITS = 18
MAX_V = 1 << ID_BITS
CHUNK = 4096  # logits of a program of the first launch
GROUP = 32  # logits that share a maximum
CANDIDATES = 4096  # gathered logits
NUCLEUS = 512  # groups looked at for top_p without top_k
DRAW_WARPS = 8
REALS = (torch.float32, torch.float64)


def order_keys(x: torch.Tensor) -> torch.Tensor:
    """fp32 [..., v] -> int64: larger logits have larger keys, and of equal ones the lower id. What is not a number is
    infinity; -0 is 0."""
    x = torch.where(x.isnan(), torch.inf, x) + 0.0
    bits = x.contiguous().view(torch.int32).long()
    key = torch.where(bits < 0, -1 - bits, bits + (1 << 31))
    return (key << ID_BITS) | (MAX_V - 1 - torch.arange(x.shape[-1], device=x.device))


def gumbel_ref(seeds: torch.Tensor, positions: torch.Tensor, v: int) -> torch.Tensor:
    """The noise of rows, fp64 [s, v]: Philox 4x32-10 with key seed and counter (id, position), its first word.
    seeds, positions: [s] int64."""
    word = 0xFFFFFFFF
    ids, seeds, positions = torch.arange(v, device=seeds.device)[None, :], seeds[:, None], positions[:, None]
    c = [ids, positions & word, (positions >> 32) & word, torch.zeros_like(ids)]
    k = [seeds & word, (seeds >> 32) & word]
    for _ in range(10):
        (low_a, high_a), (low_b, high_b) = _product(0xD2511F53, c[0]), _product(0xCD9E8D57, c[2])
        c = [high_b ^ c[1] ^ k[0], low_b, high_a ^ c[3] ^ k[1], low_a]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return -torch.log(-torch.log1p(-(c[0].double() + 0.5) * 2.0**-32))


def _product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high word of the product of 32-bit words; int64 cannot hold it."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = (low >> 16) + (high & 0xFFFF)
    return (low & 0xFFFF) | ((middle & 0xFFFF) << 16), (high >> 16) + (middle >> 16)


def sample_ref(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    uniform: torch.Tensor | None = None, seeds: torch.Tensor | None = None, positions: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See the module's formula.

    Args:
        logits: [s, v] fp32; rows may lie apart.
        temperature: [s] fp32 or fp64; 0: greedy.
        top_k: [s] int32; 0: all.
        top_p: [s] fp32 or fp64, above 0; 1: all.
        uniform: [s] fp32 or fp64 in [0, 1); None: draw by Gumbel noise.
        seeds, positions: [s] int64; only without uniform.

    Returns:
        tokens [s] int64.
    """
    tokens = torch.where(logits.isnan(), torch.inf, logits).argmax(-1)
    rows = zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True)
    for i, (t, k, p) in enumerate(rows):
        if t > 0:
            u = None if uniform is None else float(uniform[i])
            noise = None if seeds is None else gumbel_ref(seeds[i : i + 1], positions[i : i + 1], logits.shape[1])[0]
            tokens[i] = draw_ref(logits[i], t, k, p, u, noise)
    return tokens


def draw_ref(x: torch.Tensor, t: float, k: int, p: float, u: float | None, noise: torch.Tensor | None) -> torch.Tensor:
    """One row [v] of sample_ref: temperature t, top_k k, top_p p, uniform u or Gumbel noise [v]."""
    x = torch.where(x.isnan(), torch.inf, x).double()
    x = torch.where(x == x.max(), 0.0, (x - x.max()) / t)
    ids = None
    if k > 0 or p < 1:
        ids = x.sort(descending=True, stable=True).indices[: k if k > 0 else None]
        x = x[ids]
    mass = x.softmax(-1)
    if p < 1:
        mass = torch.where(mass.cumsum(-1) - mass < p, mass, 0.0)
    if u is None:
        at = (mass.log() + (noise if ids is None else noise[ids])).argmax()
    else:
        cdf = mass.cumsum(-1)
        at = torch.searchsorted(cdf, cdf.new_tensor([u]) * cdf[-1], right=True)[0]
        at = torch.minimum(at, mass.nonzero()[-1, 0])  # rounding may put u past the end
    return at if ids is None else ids[at]


@triton.jit
def load_logits(row, ids, mask):
    """Logits with -0 as 0 and what is not a number as infinity; -inf outside the mask."""
    x = tl.load(row + ids, mask=mask, other=float("-inf"))
    x = tl.where(x == 0.0, 0.0, x)
    return tl.where(x != x, float("inf"), x)


@triton.jit
def order_key(x):
    """int64 in [0, 2^32): ordered as x."""
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit
def full_key(x, ids, ID_BITS: tl.constexpr):
    """int64 >= 0: ordered as x, equal ones by falling id."""
    return (order_key(x) << ID_BITS) | ((1 << ID_BITS) - 1 - ids.to(tl.int64))


@triton.jit
def id_of(key, ID_BITS: tl.constexpr):
    return (1 << ID_BITS) - 1 - (key & ((1 << ID_BITS) - 1))


@triton.jit
def _logit_of(key, ID_BITS: tl.constexpr):
    top = key >> ID_BITS
    bits = tl.where(top >= 2147483648, top - 2147483648, -1 - top)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _share(x, largest, t):
    """exp((x - largest) / t): 1 for the largest, infinite or not."""
    return tl.where(x == largest, 1.0, tl.exp((x - largest) / t))


@triton.jit
def _whole(share):
    """A share of the largest's mass as a whole number of 2^-40."""
    return (share * 1099511627776.0).to(tl.int64)


@triton.jit
def _target(fraction, total):
    """The whole number below which this fraction of a total lies: 0..total-1."""
    at = (fraction * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(at, total - 1), 0)


@triton.jit
def _noise(seed, position, ids):
    """Gumbel noise: -log(-log(1 - r)), r = (word + 1/2) / 2^32. Small r decide, so they keep their digits."""
    c0 = ids.to(tl.uint32)
    zero = c0 * 0
    word, _, _, _ = tl.philox_impl(
        c0, zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32), zero,
        zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    r = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = r * (1.0 + r * (0.5 + r * (0.3333333333333333 + r * 0.25)))
    return -tl.log(tl.where(r < 0.015625, series, -tl.log(tl.maximum(1.0 - r, 1.1641532182693481e-10))))


@triton.jit
def _find(keys, weights, target, BITS: tl.constexpr):
    """The largest key that has, with what lies above it, more than `target` of the weights."""
    one = tl.full((), 1, tl.int64)
    found = tl.full((), 0, tl.int64)
    for i in range(BITS):
        trial = found | (one << (BITS - 1 - i))
        found = tl.where(tl.sum(tl.where(keys >= trial, weights, 0)) > target, trial, found)
    return found


@triton.jit
def _row_weight(
    row, low, largest, t, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Mass (COUNT: number) of a row's logits whose key is at least `low`. Compares numbers, which is cheaper than making
    keys: above low's logit, or equal to it and no higher an id."""
    top = low >> ID_BITS
    below = top < 8388607  # -inf's key: lower ones stand for no number
    edge = below | (top == 2147483647)  # -0's key, which no logit has
    least = tl.where(below, float("-inf"), tl.where(edge, 0.0, _logit_of(low, ID_BITS)))
    last = tl.where(edge, 1 << ID_BITS, id_of(low, ID_BITS)).to(tl.int32)
    weight = tl.zeros([BLOCK], tl.int64)  # summed up once, behind the loop
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_logits(row, ids, ids < V)
        one = tl.full([BLOCK], 1, tl.int64) if COUNT else _whole(_share(x, largest, t))
        weight += tl.where((ids < V) & ((x > least) | ((x == least) & (ids <= last))), one, 0)
    return tl.sum(weight, axis=0)


@triton.jit
def _row_find(
    row, candidates, low, target, largest, t, COUNT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """_find over a whole row, of which keys under `low` weigh nothing. The upper bits are searched in the row; what shares
    them is gathered, if it is few, and searched in registers."""
    LOWER: tl.constexpr = ID_BITS + 14
    one = tl.full((), 1, tl.int64)
    found = tl.full((), 0, tl.int64)
    for i in range(18):
        trial = found | (one << (LOWER + 17 - i))
        above = _row_weight(row, tl.maximum(trial, low), largest, t, COUNT, V, BLOCK, ID_BITS)
        found = tl.where(above > target, trial, found)
    rest = target - _row_weight(row, tl.maximum(found + (one << LOWER), low), largest, t, COUNT, V, BLOCK, ID_BITS)
    bottom = tl.maximum(found, low)
    tl.debug_barrier()  # an earlier search may still read the list
    n = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = load_logits(row, ids, ids < V)
        key = full_key(x, ids, ID_BITS)
        kept = (ids < V) & (key >= bottom) & (key < found + (one << LOWER))
        place = n + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(candidates + place, key, mask=kept & (place < BLOCK))
        n += tl.sum(kept.to(tl.int32), axis=0)
    tl.debug_barrier()
    if n <= BLOCK:
        lane = tl.arange(0, BLOCK)
        keys = tl.load(candidates + lane, mask=lane < n, other=-1)
        weight = (keys >= 0).to(tl.int64) if COUNT else _whole(_share(_logit_of(keys, ID_BITS), largest, t))
        found += _find(tl.where(keys >= 0, keys - found, -1), tl.where(keys >= 0, weight, 0), rest, LOWER)
    else:
        for i in range(LOWER):
            trial = found | (one << (LOWER - 1 - i))
            above = _row_weight(row, tl.maximum(trial, low), largest, t, COUNT, V, BLOCK, ID_BITS)
            found = tl.where(above > target, trial, found)
    return found


@triton.jit
def _scan_kernel(
    logits, temperature, seeds, positions, best_score, best_id, chunk_max, chunk_sum, group_max, stride, groups,
    GUMBEL: tl.constexpr, V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits + row * stride, ids, ids < V)
    t = tl.load(temperature + row).to(tl.float32)
    warm = t > 0.0
    safe = tl.where(warm, t, 1.0)
    largest = tl.max(x, axis=0)
    score = x
    if GUMBEL:
        noisy = x / safe + _noise(tl.load(seeds + row), tl.load(positions + row), ids)
        score = tl.where(ids < tl.where(warm, V, 0), noisy, x)
    best = tl.max(score, axis=0)
    at = row * CHUNKS + chunk
    tl.store(best_score + at, best)
    tl.store(best_id + at, tl.min(tl.where((score == best) & (ids < V), ids, V - 1), axis=0))
    tl.store(chunk_max + at, largest)
    tl.store(chunk_sum + at, tl.sum(tl.where(ids < V, _share(x, largest, safe), 0.0), axis=0))
    group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
    tl.store(group_max + row * groups + group, tl.max(tl.reshape(x, [CHUNK // GROUP, GROUP]), axis=1), mask=group < groups)


@triton.jit
def _draw_kernel(
    logits, temperature, top_k, top_p, uniform, seeds, positions, best_score, best_id, chunk_max, chunk_sum, group_max,
    group_list, candidates, tokens, stride,
    GUMBEL: tl.constexpr, V: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    CANDIDATES: tl.constexpr, NUCLEUS: tl.constexpr, ID_BITS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    t = tl.load(temperature + row).to(tl.float32)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row).to(tl.float64)
    c = tl.arange(0, BLOCK_C)
    there = c < CHUNKS
    score = tl.load(best_score + row * CHUNKS + c, mask=there, other=float("-inf"))
    best = tl.load(best_id + row * CHUNKS + c, mask=there, other=V - 1)
    token = tl.min(tl.where(score == tl.max(score, axis=0), best, V - 1), axis=0).to(tl.int64)
    cut = (k > 0) | (p < 1.0)
    if t > 0.0:
        peak = tl.load(chunk_max + row * CHUNKS + c, mask=there, other=float("-inf"))
        part = tl.load(chunk_sum + row * CHUNKS + c, mask=there, other=0.0)
        largest = tl.max(peak, axis=0)
        mass = tl.where(there, _whole(_share(peak, largest, t) * part), 0)  # [BLOCK_C] of each chunk
        total = tl.sum(mass, axis=0)
        if cut:
            token = _draw_cut(
                line, t, k, p, uniform + row if not GUMBEL else uniform, seeds + row if GUMBEL else seeds,
                positions + row if GUMBEL else positions, largest, total, group_max + row * GROUPS, group_list + row * GROUPS,
                candidates + row * CANDIDATES, GUMBEL, V, GROUPS, GROUP, CANDIDATES, NUCLEUS, ID_BITS, BLOCK_G,
            )  # fmt: skip
        elif not GUMBEL:
            # the chunk, then the id in it, by the chunk's own largest: it has mass whatever the row's largest is
            u = tl.load(uniform + row).to(tl.float64)
            chunk = tl.sum((tl.cumsum(mass, axis=0) <= _target(u, total)).to(tl.int32), axis=0)
            before = tl.sum(tl.where(c < chunk, mass, 0), axis=0).to(tl.float64)
            own = tl.sum(tl.where(c == chunk, mass, 0), axis=0).to(tl.float64)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load_logits(line, ids, ids < V)
            weight = tl.where(ids < V, _whole(_share(x, tl.max(x, axis=0), t)), 0)
            inner = tl.sum(weight, axis=0)
            rest = _target(tl.minimum(tl.maximum((u * total.to(tl.float64) - before) / own, 0.0), 1.0), inner)
            token = (chunk * CHUNK + tl.sum((tl.cumsum(weight, axis=0) <= rest).to(tl.int32), axis=0)).to(tl.int64)
    tl.store(tokens + row, token)


@triton.jit
def _draw_cut(
    line, t, k, p, uniform, seed, position, largest, total, group_max, group_list, candidates,
    GUMBEL: tl.constexpr, V: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CANDIDATES: tl.constexpr,
    NUCLEUS: tl.constexpr, ID_BITS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A token of a row that top_k or top_p cuts. total: the mass of the whole row."""
    BITS: tl.constexpr = 32 + ID_BITS
    k = tl.minimum(k, V)
    # the k-th largest of the groups' maxima: at least k logits are no smaller
    g = tl.arange(0, BLOCK_G)
    tops = order_key(tl.load(group_max + g, mask=g < GROUPS, other=float("-inf")))
    tops = tl.where(g < GROUPS, tops, -1)
    bound = _find(tops, (g < GROUPS).to(tl.int64), tl.where(k > 0, k, NUCLEUS) - 1, 32)
    chosen = tops >= bound
    tl.store(group_list + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, g, mask=chosen)
    lists = tl.sum(chosen.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads of this program read the list
    n = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    lane = tl.arange(0, CANDIDATES)
    while (start < lists) & (n <= CANDIDATES):
        at = start + lane // GROUP
        ids = tl.load(group_list + at, mask=at < lists, other=0) * GROUP + lane % GROUP
        valid = (at < lists) & (ids < V)
        x = load_logits(line, ids, valid)
        kept = valid & (order_key(x) >= bound)
        place = n + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(candidates + place, full_key(x, ids, ID_BITS), mask=kept & (place < CANDIDATES))
        n += tl.sum(kept.to(tl.int32), axis=0)
        start += CANDIDATES // GROUP
    tl.debug_barrier()
    keys = tl.load(candidates + lane, mask=lane < n, other=-1)
    weight = tl.where(keys >= 0, _whole(_share(_logit_of(keys, ID_BITS), largest, t)), 0)
    wanted = tl.maximum(tl.ceil(p * total.to(tl.float64)).to(tl.int64), 1)
    low = tl.full((), 0, tl.int64)  # what is kept has at least this key
    if (n <= CANDIDATES) & ((k > 0) | (tl.sum(weight, axis=0) >= wanted)):
        if k > 0:
            low = _find(keys, (keys >= 0).to(tl.int64), (k - 1).to(tl.int64), BITS)
            weight = tl.where(keys >= low, weight, 0)
        if p < 1.0:
            if k > 0:
                wanted = tl.maximum(tl.ceil(p * tl.sum(weight, axis=0).to(tl.float64)).to(tl.int64), 1)
            low = _find(keys, weight, wanted - 1, BITS)
            weight = tl.where(keys >= low, weight, 0)
        if GUMBEL:
            ids = id_of(keys, ID_BITS)
            score = _logit_of(keys, ID_BITS) / t + _noise(tl.load(seed), tl.load(position), ids)
            score = tl.where(weight > 0, score, float("-inf"))
            token = tl.min(tl.where(score == tl.max(score, axis=0), ids, V - 1), axis=0)
        else:
            drawn = _find(keys, weight, _target(tl.load(uniform).to(tl.float64), tl.sum(weight, axis=0)), BITS)
            token = id_of(drawn, ID_BITS)
    else:
        if k > 0:
            low = _row_find(line, candidates, low, (k - 1).to(tl.int64), largest, t, True, V, CANDIDATES, ID_BITS)
        kept_mass = _row_weight(line, low, largest, t, False, V, CANDIDATES, ID_BITS)
        if p < 1.0:
            if k > 0:
                wanted = tl.maximum(tl.ceil(p * kept_mass.to(tl.float64)).to(tl.int64), 1)
            low = _row_find(line, candidates, low, tl.minimum(wanted, kept_mass) - 1, largest, t, False, V, CANDIDATES, ID_BITS)
            kept_mass = _row_weight(line, low, largest, t, False, V, CANDIDATES, ID_BITS)
        if GUMBEL:
            top = tl.full((), float("-inf"), tl.float32)
            token = tl.full((), V - 1, tl.int64)
            for first in range(0, V, CANDIDATES):
                ids = first + lane
                x = load_logits(line, ids, ids < V)
                score = x / t + _noise(tl.load(seed), tl.load(position), ids)
                kept = (ids < V) & (full_key(x, ids, ID_BITS) >= low) & (_whole(_share(x, largest, t)) > 0)
                score = tl.where(kept, score, float("-inf"))
                here = tl.max(score, axis=0)
                at_here = tl.min(tl.where(score == here, ids, V - 1), axis=0).to(tl.int64)
                token = tl.where(here > top, at_here, token)
                top = tl.maximum(top, here)
        else:
            target = _target(tl.load(uniform).to(tl.float64), kept_mass)
            token = id_of(_row_find(line, candidates, low, target, largest, t, False, V, CANDIDATES, ID_BITS), ID_BITS)
    return token


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    uniform: torch.Tensor | None = None, seeds: torch.Tensor | None = None, positions: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See sample_ref."""
    check_logits(logits)
    s, v = logits.shape
    check_tensor("temperature", temperature, (s,), REALS)
    check_tensor("top_k", top_k, (s,), (torch.int32,))
    check_tensor("top_p", top_p, (s,), REALS)
    tensors = {"logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    gumbel = seeds is not None
    if gumbel:
        if uniform is not None:
            raise ValueError("uniform and seeds exclude one another")
        check_tensor("seeds", seeds, (s,), (torch.int64,))
        check_tensor("positions", positions, (s,), (torch.int64,))
        tensors |= {"seeds": seeds, "positions": positions}
    else:
        check_tensor("uniform", uniform, (s,), REALS)
        tensors["uniform"] = uniform
    check_devices(**tensors)
    chunks, groups = triton.cdiv(v, CHUNK), triton.cdiv(v, GROUP)

    def scratch(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((s, columns), dtype=dtype, device=logits.device)

    tokens = torch.empty(s, dtype=torch.int64, device=logits.device)
    if s == 0:
        return tokens
    best_score, chunk_max, chunk_sum = (scratch(chunks, torch.float32) for _ in range(3))
    best_id, group_max = scratch(chunks, torch.int32), scratch(groups, torch.float32)
    chunk, held = (min(most, max(GROUP, power_of_two(v))) for most in (CHUNK, CANDIDATES))
    _scan_kernel[(chunks, s)](
        logits, temperature, seeds, positions, best_score, best_id, chunk_max, chunk_sum, group_max, logits.stride(0), groups,
        GUMBEL=gumbel, V=v, CHUNKS=chunks, CHUNK=chunk, GROUP=GROUP, num_warps=8,
    )  # fmt: skip
    _draw_kernel[(s,)](
        logits, temperature, top_k, top_p, uniform, seeds, positions, best_score, best_id, chunk_max, chunk_sum, group_max,
        scratch(groups, torch.int32), scratch(held, torch.int64), tokens, logits.stride(0),
        GUMBEL=gumbel, V=v, CHUNKS=chunks, GROUPS=groups, CHUNK=chunk, GROUP=GROUP, CANDIDATES=held,
        NUCLEUS=min(NUCLEUS, 1 + groups // 2), ID_BITS=ID_BITS, BLOCK_C=power_of_two(chunks), BLOCK_G=power_of_two(groups),
        num_warps=DRAW_WARPS,
    )  # fmt: skip
    return tokens


def check_logits(logits: torch.Tensor) -> None:
    """Raise ValueError naming logits unless they are fp32 [s, 1..MAX_V]."""
    check_tensor("logits", logits, (None, None), (torch.float32,))
    if not 1 <= logits.shape[1] <= MAX_V:
        raise ValueError(f"logits have {logits.shape[1]} columns, must be 1..{MAX_V}")


def sample_loop(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
    uniform: torch.Tensor | None = None, seeds: torch.Tensor | None = None, positions: torch.Tensor | None = None,
) -> Generator[None, None, torch.Tensor]:  # fmt: skip
    """sample_ref, a row an iteration."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for i in range(logits.shape[0]):
        row = [None if x is None else x[i : i + 1] for x in (logits, temperature, top_k, top_p, uniform, seeds, positions)]
        tokens[i] = sample_ref(*row)[0]
        yield
    return tokens


def make_inputs(
    device: str, dtype: torch.dtype, seed: int, rows: int, v: int, temperature: float = 0.8, k: int = 0, p: float = 1.0,
    mixed: bool = False, gumbel: bool = False, pad: int = 0, scale: float = 3.0,
) -> dict:  # fmt: skip
    """Logits are fp32, rounded to dtype: half precision makes ties. mixed: of each five rows one is greedy, one has the
    temperature alone, one top_k, one top_p, one all three."""
    g = make_generator(device, seed)
    logits = fenced(g, (rows, v), torch.float32, row_pad=pad, scale=scale)
    logits.copy_(logits.to(dtype))
    kind = torch.arange(rows, device=device) % 5 if mixed else torch.full((rows,), 4, device=device)

    def among(kinds: tuple[int, ...], value: float, other: float) -> torch.Tensor:
        chosen = torch.isin(kind, torch.tensor(kinds, device=device))
        return fenced(g, (rows,), torch.float32).copy_(torch.where(chosen, value, other))

    inputs = {
        "logits": logits,
        "temperature": among((1, 2, 3, 4), temperature, 0.0),
        "top_k": among((2, 4), float(k), 0.0).int(),
        "top_p": among((3, 4), p, 1.0),
    }
    if gumbel:
        inputs["seeds"] = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=g, device=device)
        inputs["positions"] = torch.randint(0, 1 << 40, (rows,), generator=g, device=device)
    else:
        drawn = torch.rand(rows, generator=g, device=device, dtype=torch.float64)
        inputs["uniform"] = fenced(g, (rows,), torch.float64).copy_(drawn)
    return inputs


def _flops(inputs: Mapping) -> int:
    return 4 * inputs["logits"].numel()


def _bytes(inputs: Mapping) -> int:
    return 4 * inputs["logits"].numel() + inputs["logits"].shape[0] * (4 + 4 + 4 + 8 + 8)


SPEC = KernelSpec(
    name="sample",
    formula="token = first id at which the running sum of softmax(logits / temperature) over the kept ids exceeds uniform",
    fn=sample,
    ref=sample_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("mixed_v1000", {"rows": 5, "v": 1000, "k": 5, "p": 0.9, "mixed": True}),
        Case("gumbel_mixed_v1000", {"rows": 5, "v": 1000, "k": 5, "p": 0.9, "mixed": True, "gumbel": True}),
        Case("greedy_v63", {"rows": 5, "v": 63, "temperature": 0.0}),
        Case("temperature_v100_strided", {"rows": 7, "v": 100, "pad": 9}),
        Case("temperature_v9000", {"rows": 4, "v": 9000, "scale": 1.0}),
        Case("top_k_50_v5000", {"rows": 3, "v": 5000, "k": 50}),
        Case("top_k_1_v63", {"rows": 3, "v": 63, "k": 1}),
        Case("top_k_more_than_v63", {"rows": 3, "v": 63, "k": 100}),
        Case("top_k_1000_p_v5000", {"rows": 1, "v": 5000, "k": 1000, "p": 0.95, "temperature": 2.0}),
        Case("top_p_v9000", {"rows": 2, "v": 9000, "p": 0.9, "temperature": 0.5}),
        Case("top_p_flat_v5000", {"rows": 1, "v": 5000, "p": 0.95, "temperature": 4.0}),
        Case("top_k_4500_flat_v5000", {"rows": 1, "v": 5000, "k": 4500, "p": 0.99, "temperature": 4.0}),
        Case("gumbel_flat_v5000", {"rows": 1, "v": 5000, "p": 0.95, "temperature": 4.0, "gumbel": True}),
        Case("v1", {"rows": 3, "v": 1, "mixed": True, "k": 3, "p": 0.5}),
    ),
    bench_cases=(
        Case("greedy_s64_v128256", {"rows": 64, "v": 128256, "temperature": 0.0}),
        Case("temperature_s64_v128256", {"rows": 64, "v": 128256}),
        Case("gumbel_s64_v128256", {"rows": 64, "v": 128256, "gumbel": True}),
        Case("top_k50_s64_v128256", {"rows": 64, "v": 128256, "k": 50}),
        Case("top_k1000_s64_v128256", {"rows": 64, "v": 128256, "k": 1000}),
        Case("top_p90_s64_v128256", {"rows": 64, "v": 128256, "p": 0.9, "temperature": 0.5}),
        Case("top_p95_flat_s64_v128256", {"rows": 64, "v": 128256, "p": 0.95, "temperature": 4.0}),
        Case("mixed_s1_v49152", {"rows": 1, "v": 49152, "k": 50, "p": 0.9}),
        Case("mixed_s64_v262144", {"rows": 64, "v": 262144, "k": 50, "p": 0.9, "mixed": True}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("logits", lambda logits: logits[0]),
        Bad("logits", lambda logits: logits.half()),
        Bad("logits", lambda logits: logits[:, :0]),
        Bad("logits", lambda logits: logits.t().contiguous().t()),
        Bad("logits", lambda logits: torch.zeros(1).expand(5, MAX_V + 1)),
        Bad("temperature", lambda temperature: temperature[:-1]),
        Bad("temperature", lambda temperature: temperature.half()),
        Bad("top_k", lambda top_k: top_k.long()),
        Bad("top_k", lambda top_k: top_k[:-1]),
        Bad("top_p", lambda top_p: top_p[:-1]),
        Bad("uniform", lambda uniform: uniform[:-1]),
        Bad("uniform", lambda uniform: None),
    ),
    empty_dims={"rows": 0},
    tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    loop=sample_loop,
    loop_iterations=lambda inputs: inputs["logits"].shape[0],
)
