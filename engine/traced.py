"""Launches a traced attention kernel on the tensors of one layer of one step, and gives its log as numpy arrays.

Knows kernels and tensors, no requests and no steps: engine/tiles.py says which they are of, engine/interpreted.py runs
the same function in a child without a GPU. A run keeps acc of one program, so where the keys of the chosen query row are
split over several, the sequence is run once more for each of the others, its key head alone: the sums are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from engine.errors import EngineError
from kernels.flash_decode import MAX_QUERIES, flash_decode, locate, plan_decode
from kernels.flash_prefill import find_lane, flash_prefill, plan_prefill, takes_hopper
from kernels.tile_log import TileLog, make_log

KERNELS = ("flash_prefill", "flash_decode")


@dataclass(frozen=True)
class Operands:
    """What one attention launch reads. Tensors lie on one device, lengths on the host.

    Args:
        q: [t, heads, head_dim].
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim].
        block_table: int32 [b, max_blocks].
        queries, keys: of each of the b sequences; together `queries` are the t rows.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    scale: float
    window: int | None = None
    softcap: float | None = None

    def arguments(self) -> dict[str, object]:
        """As the kernels and their reference take them."""
        ints = {"dtype": torch.int32, "device": self.q.device}
        return {
            "q": self.q, "k_cache": self.k_cache, "v_cache": self.v_cache, "block_table": self.block_table,
            "cu_seqlens_q": torch.tensor(self.starts, **ints), "seq_lens": torch.tensor(self.keys, **ints), "scale": self.scale,
            "max_query_len": max(self.queries), "window": self.window, "softcap": self.softcap,
        }  # fmt: skip

    @property
    def starts(self) -> list[int]:
        """First row of each sequence, and the number of rows."""
        return [0, *accumulate(self.queries)]

    def only(self, sequence: int, kv_head: int | None = None) -> Operands:
        """One sequence of the batch; with `kv_head` also of its heads only those of this key head. Views."""
        start, queries = self.starts[sequence], self.queries[sequence]
        q, caches = self.q[start : start + queries], (self.k_cache, self.v_cache)
        if kv_head is not None:
            group = self.q.shape[1] // self.k_cache.shape[2]
            q = q[:, kv_head * group : (kv_head + 1) * group]
            caches = tuple(cache[:, :, kv_head : kv_head + 1] for cache in caches)
        table = self.block_table[sequence : sequence + 1]
        return Operands(q, *caches, table, (queries,), (self.keys[sequence],), self.scale, self.window, self.softcap)

    def compact(self) -> Operands:
        """A copy that holds the pages of these sequences alone, in the order in which they are first used."""
        page_size, table = self.k_cache.shape[1], self.block_table.cpu().numpy()
        needed = [-(-n // page_size) for n in self.keys]
        used = np.concatenate([table[i, :n] for i, n in enumerate(needed)])
        pages, first = np.unique(used, return_index=True)
        pages = pages[np.argsort(first)]
        place = {page: at for at, page in enumerate(pages.tolist())}
        small = np.zeros((len(needed), max(needed)), np.int32)
        for i, n in enumerate(needed):
            small[i, :n] = [place[page] for page in table[i, :n].tolist()]
        at = torch.from_numpy(pages.astype(np.int64)).to(self.q.device)
        caches = (cache.index_select(0, at) for cache in (self.k_cache, self.v_cache))
        return Operands(
            self.q.clone(),
            *caches,
            torch.from_numpy(small).to(self.q.device),
            self.queries,
            self.keys,
            self.scale,
            self.window,
            self.softcap,
        )


def has_twin(it: Operands, kernel: str) -> bool:
    """Whether the engine's own launch runs another kernel than a traced one: Gluon's on Hopper, which is not traced."""
    plain = it.window is None and it.softcap is None
    return kernel == "flash_prefill" and plain and takes_hopper(it.q, it.k_cache, it.v_cache, max(it.queries))


@dataclass(frozen=True)
class Blocks:
    """How a launch is cut. `programs`, `tiles`: the size of its log. `given`: what the kernel is called with."""

    kernel: str
    block_q: int
    block_m: int
    block_n: int
    num_splits: int
    programs: int
    tiles: int
    given: tuple[tuple[str, int | None], ...]

    @property
    def log_bytes(self) -> int:
        return self.programs * self.tiles * (12 * self.block_m + 40)


def plan(kernel: str, it: Operands, block_m: int | None = None, block_n: int | None = None, num_splits: int | None = None) -> Blocks:
    """The launch that these choices give; None: the kernel's own choice. Raises EngineError "bad_tiles"."""
    table, page_size, longest = it.block_table, it.k_cache.shape[1], max(it.queries)
    try:
        if kernel == "flash_prefill":
            if num_splits not in (None, 1):
                raise ValueError(f"num_splits is {num_splits}, but flash_prefill splits no keys")
            p = plan_prefill(it.q, it.v_cache, len(it.keys), longest, table.shape[1] * page_size, block_m, block_n)
            given = (("block_m", p.block_m), ("block_n", p.block_n))
            return Blocks(kernel, p.block_q, p.block_m, p.block_n, 1, p.programs, p.tiles, given)
        if longest > MAX_QUERIES:
            raise ValueError(f"flash_decode takes sequences of at most {MAX_QUERIES} queries, this step has {longest}")
        d = plan_decode(it.q, it.k_cache, it.v_cache, table, longest, it.window, num_splits, block_n)
        if block_m not in (None, d.block_m):
            raise ValueError(f"block_m is {block_m}, but flash_decode takes {d.block_m} here")
        given = (("num_splits", d.num_splits), ("block_n", d.block_n))
        group = it.q.shape[1] // it.k_cache.shape[2]
        return Blocks(kernel, d.block_m // group, d.block_m, d.block_n, d.num_splits, d.programs, d.tiles, given)
    except ValueError as error:
        raise EngineError("bad_tiles", f"The kernel cannot be run so: {error}.", why=str(error)) from error


def count_tiles(it: Operands, blocks: Blocks) -> int:
    """About how many tiles are visited: those that no window hides, of every Q-block and key head."""
    total = 0
    for queries, keys in zip(it.queries, it.keys, strict=True):
        for first in range(0, queries, blocks.block_q):
            low, high = keys - queries + first, keys - queries + min(first + blocks.block_q, queries)
            begin = 0 if it.window is None else max(low - it.window + 1, 0) // blocks.block_n
            total += -(-high // blocks.block_n) - begin
    return total * it.k_cache.shape[2]


def launch(it: Operands, blocks: Blocks, log: TileLog | None = None) -> torch.Tensor:
    """out [t, heads, head_dim]."""
    run = flash_prefill if blocks.kernel == "flash_prefill" else flash_decode
    return run(**it.arguments(), **dict(blocks.given), log=log)


def lanes_of(it: Operands, blocks: Blocks, sequence: int, query: int, head: int) -> list[tuple[int, int]]:
    """(program, lane) of a sequence's query, one for each split."""
    hq, hk = it.q.shape[1], it.k_cache.shape[2]
    if blocks.kernel == "flash_prefill":
        p = plan_prefill(it.q, it.v_cache, len(it.keys), max(it.queries), 1, blocks.block_m, blocks.block_n)
        return [find_lane(p, it.starts[:-1], it.starts[sequence] + query, head, hq, hk)]
    d = plan_decode(it.q, it.k_cache, it.v_cache, it.block_table, max(it.queries), it.window, blocks.num_splits, blocks.block_n)
    return [locate(d, hq, hk, max(it.queries), sequence, query, head, split) for split in range(blocks.num_splits)]


def trace(it: Operands, blocks: Blocks, sequence: int, query: int, head: int) -> tuple[torch.Tensor, TileLog, list[torch.Tensor]]:
    """Run with a log: (out, the run's log, the chosen row's acc [tiles, head_dim] in each split)."""
    lanes = lanes_of(it, blocks, sequence, query, head)
    log = _log_for(it, blocks, lanes[0])
    out, accs = launch(it, blocks, log), [log.acc]
    if len(lanes) > 1:
        group = it.q.shape[1] // it.k_cache.shape[2]
        part = it.only(sequence, head // group)
        same = plan(blocks.kernel, part, None, blocks.block_n, blocks.num_splits)
        for chosen in lanes_of(part, same, 0, query, head % group)[1:]:
            more = _log_for(part, same, chosen)
            launch(part, same, more)
            accs.append(more.acc)
    return out, log, accs


def _log_for(it: Operands, blocks: Blocks, chosen: tuple[int, int]) -> TileLog:
    return make_log(blocks.programs, blocks.tiles, blocks.block_m, it.v_cache.shape[3], chosen, it.q.device)


def arrays_of(log: TileLog, accs: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """A traced run on the host: the log's fields, and "acc" [splits, tiles, head_dim]."""
    found = {name: getattr(log, name).cpu().numpy() for name in ("owner", "span", "kind", "sm", "time", "m", "l", "rescale")}
    found["acc"] = torch.stack(accs).cpu().numpy()
    return found
