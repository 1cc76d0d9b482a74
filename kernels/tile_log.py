"""TileLog: what a traced attention kernel writes down about each tile that it visits. No kernel of its own.

A tile is one key block met by one program. A program is a (Q-block, key head) of flash_prefill, a (sequence, key head,
split) of flash_decode; its rows ("lanes") are queries x group: lane i is query i // group of the block, head
kv_head * group + i % group. Tracing is a compile-time variant: with TRACE false nothing of it is compiled.

Every field is one tensor; what a program never visited keeps the value it was made with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

SKIPPED, FULL, PARTLY = 0, 1, 2  # kind: never visited; every lane sees every key; some see only some


class TileLog(NamedTuple):
    """Args:
    owner: int32 [programs, 5]: sequence, first query row in q, key head, split, queries in it; -1: an idle program.
    span: int32 [programs, tiles, 2]: first key of the tile, and the key behind its last one.
    kind: int32 [programs, tiles].
    sm: int32 [programs, tiles]; -1 where it cannot be read (interpreter).
    time: int64 [programs, tiles, 2]: globaltimer in ns at start and stop; 0 where it cannot be read.
    m: fp32 [programs, tiles, lanes]: running max of the scores after this tile, in units of x (attention_ref).
    l: fp32 [programs, tiles, lanes]: running sum of exp(x - m) after this tile.
    rescale: fp32 [programs, tiles, lanes]: exp(m before - m after), what the old sum and acc were multiplied with.
    acc: fp32 [tiles, Dv]: of the chosen program and lane after each tile, not yet divided by l.
    chosen: (program, lane) whose acc is kept.
    """

    owner: torch.Tensor
    span: torch.Tensor
    kind: torch.Tensor
    sm: torch.Tensor
    time: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor
    rescale: torch.Tensor
    acc: torch.Tensor
    chosen: tuple[int, int]


def make_log(programs: int, tiles: int, lanes: int, dv: int, chosen: tuple[int, int], device: torch.device | str) -> TileLog:
    """An empty log. Memory: about programs * tiles * (12 * lanes + 40) bytes."""
    grid = (programs, tiles)
    ints = {"dtype": torch.int32, "device": device}
    return TileLog(
        torch.full((programs, 5), -1, **ints), torch.zeros((*grid, 2), **ints), torch.full(grid, SKIPPED, **ints),
        torch.full(grid, -1, **ints), torch.zeros((*grid, 2), dtype=torch.int64, device=device),
        *(torch.full((*grid, lanes), float("nan"), dtype=torch.float32, device=device) for _ in range(3)),
        torch.full((tiles, dv), float("nan"), dtype=torch.float32, device=device), chosen,
    )  # fmt: skip
