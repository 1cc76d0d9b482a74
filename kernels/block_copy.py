"""Copies whole pages of the cache's arena, in place: copy-on-write when a shared page is about to be written.

    arena[destination] = arena[source]    for each (source, destination) of copies

Destinations are distinct and no source is a destination of the same call: all copies run at once and in any order. (The
pool gives it: a destination is fresh from the free list, a source is still leased.) A page is bytes here: every layer's
keys and values move together, 16 bytes a thread at a time. Offsets are 64-bit.

A page number outside the arena is the caller's error: the kernel skips the pair and never writes outside; the reference
raises IndexError, except that it takes negative numbers from the end as torch does.

Does not know layers, types or owners. Rejected: torch.index_copy_ (gathers the sources into a second buffer first, twice
the traffic), one copy_ a page (a launch each).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import triton
import triton.language as tl

from kernels.common import FENCE, check_devices, check_tensor, check_written, make_generator
from kernels.spec import Bad, Case, KernelSpec

WORDS = 2048  # of 8 bytes a program


def block_copy_ref(arena: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """arena uint8 [pages, page_bytes], copies int64 [c, 2] (source, destination) -> arena, written in place."""
    arena[copies[:, 1]] = arena[copies[:, 0]]
    return arena


@triton.jit
def _block_copy_kernel(arena, copies, pages, page_words, stride_p, stride_c, BLOCK: tl.constexpr):
    """arena in words of 8 bytes; pages begin at multiples of two words."""
    pair = copies + tl.program_id(0).to(tl.int64) * stride_c
    source, destination = tl.load(pair), tl.load(pair + 1)
    inside = (source >= 0) & (source < pages) & (destination >= 0) & (destination < pages)
    if inside:
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = word < page_words // 2 * 2
        stride = (stride_p // 2).to(tl.int64) * 2  # says that it is even: two words are one access
        tl.store(arena + destination * stride + word, tl.load(arena + source * stride + word, mask=mask, other=0), mask=mask)


def block_copy(arena: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    """arena uint8 [pages, page_bytes], copies int64 [c, 2] (source, destination) -> arena, written in place.

    Pages begin at addresses and have lengths that are multiples of 16 bytes.

    Raises:
        ValueError: naming the argument that cannot be taken.
    """
    check_tensor("arena", arena, (None, None), (torch.uint8,))
    check_tensor("copies", copies, (None, 2), (torch.int64,))
    check_written("arena", arena)
    check_devices(arena=arena, copies=copies)
    (pages, page_bytes), count = arena.shape, copies.shape[0]
    for what, n in (("address", arena.data_ptr()), ("page size", page_bytes), ("page stride", arena.stride(0))):
        if n % 16:
            raise ValueError(f"arena has {what} {n}, must be a multiple of 16 bytes")
    if count == 0 or arena.numel() == 0:
        return arena
    words = arena.as_strided((pages, page_bytes), (arena.stride(0), 1)).view(torch.int64)
    _block_copy_kernel[(count, triton.cdiv(words.shape[1], WORDS))](
        words, copies, pages, words.shape[1], words.stride(0), copies.stride(0), BLOCK=WORDS, num_warps=4
    )
    return arena


def block_copy_loop(arena: torch.Tensor, copies: torch.Tensor) -> Generator[None, None, torch.Tensor]:
    """One page an iteration."""
    for source, destination in copies.tolist():
        arena[destination].copy_(arena[source])
        yield
    return arena


def make_inputs(device: str, dtype: torch.dtype, seed: int, pages: int, elements: int, copies: int, gap: int = 0) -> dict:
    """A page is `elements` numbers of dtype, `gap` NaN lie between two pages. Sources may repeat."""
    g = make_generator(device, seed)
    stride = elements + gap
    buffer = torch.full((2 * FENCE + pages * stride,), float("nan"), dtype=dtype, device=device)
    values = buffer[FENCE : FENCE + pages * stride].view(pages, stride)[:, :elements]
    values.copy_(torch.randn(pages, elements, generator=g, device=device))
    order = torch.randperm(pages, generator=g, device=device)
    few = max(1, (pages - copies) * 3 // 4)
    sources = order[copies:][torch.randint(few, (copies,), generator=g, device=device)] if copies else order[:0]
    return {"arena": values.view(torch.uint8), "copies": torch.stack([sources, order[:copies]], 1)}


def _bytes(inputs: Mapping) -> int:
    return inputs["copies"].shape[0] * (2 * inputs["arena"].shape[1] + 16)


SPEC = KernelSpec(
    name="block_copy",
    formula="arena[destination] = arena[source] for each (source, destination) of copies",
    fn=block_copy,
    ref=block_copy_ref,
    make_inputs=make_inputs,
    outputs=("arena",),
    cases=(
        Case("p9_e1000", {"pages": 9, "elements": 1000, "copies": 4}),
        Case("p9_e1000_gap", {"pages": 9, "elements": 1000, "copies": 4, "gap": 24}),
        Case("one_of_two", {"pages": 2, "elements": 8, "copies": 1}),
        Case("many_blocks", {"pages": 7, "elements": 16 * 1024 + 8, "copies": 3}),
        Case("wide_gap", {"pages": 63, "elements": 104, "copies": 31, "gap": 1000}),
    ),
    bench_cases=(
        Case("c4096_64k", {"pages": 16384, "elements": 32768, "copies": 4096}),
        Case("c4_360k", {"pages": 512, "elements": 184320, "copies": 4}),
    ),
    flops=lambda inputs: 0,
    bytes=_bytes,
    bad=(
        Bad("arena", lambda arena: arena[0]),
        Bad("arena", lambda arena: arena[:, :-1]),
        Bad("arena", lambda arena: arena[:, 1:-15]),
        Bad("arena", lambda arena: arena[:, ::2]),
        Bad("arena", lambda arena: arena.view(torch.int8)),
        Bad("arena", lambda arena: arena[:1].expand(9, -1)),
        Bad("copies", lambda copies: copies.int()),
        Bad("copies", lambda copies: copies[:, :1]),
        Bad("copies", lambda copies: copies.t().contiguous().t()),
    ),
    empty_dims={"copies": 0},
    tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    loop=block_copy_loop,
    loop_iterations=lambda inputs: inputs["copies"].shape[0],
)
