"""Looks token ids up in the embedding table.

    out[i] = weight[token_ids[i]]

An id outside the table is a caller's error: the reference raises IndexError; the kernel never reads outside the table
and makes the row NaN, so that the error shows. Row offsets are 64-bit: 262,144 rows of 8,192 are past 2^31.

Does not know a tokenizer. Rejected: a scale here (Gemma multiplies by sqrt(n): one more multiplication elsewhere is
cheaper than an option that one family uses).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.common import check_devices, check_tensor, fenced, make_generator, power_of_two
from kernels.spec import Bad, Case, KernelSpec


def embedding_ref(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """token_ids [t] int64, weight [v, n] -> [t, n]."""
    return F.embedding(token_ids, weight)


@triton.jit(do_not_specialize=["v"])
def _embedding_kernel(token_ids, weight, out, v, stride_w, N: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    mask = col < N
    token_id = tl.load(token_ids + row)
    inside = (token_id >= 0) & (token_id < v)
    y = tl.load(weight + token_id * stride_w + col, mask=col < tl.where(inside, N, 0), other=float("nan"))
    tl.store(out + row * N + col, y, mask=mask)


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """token_ids [t] int64, weight [v, n] -> [t, n], contiguous. See the module's formula."""
    check_tensor("token_ids", token_ids, (None,), (torch.int64,))
    check_tensor("weight", weight, (None, None))
    check_devices(token_ids=token_ids, weight=weight)
    t, n = token_ids.shape[0], weight.shape[1]
    out = torch.empty((t, n), dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    block_n = min(4096, power_of_two(n))
    _embedding_kernel[(t, triton.cdiv(n, block_n))](
        token_ids, weight, out, weight.shape[0], weight.stride(0), N=n, BLOCK_N=block_n, num_warps=4 if block_n >= 1024 else 2
    )
    return out


def embedding_loop(token_ids: torch.Tensor, weight: torch.Tensor) -> Generator[None, None, torch.Tensor]:
    """embedding_ref, a token an iteration."""
    out = torch.empty((token_ids.shape[0], weight.shape[1]), dtype=weight.dtype, device=weight.device)
    for i, token_id in enumerate(token_ids.tolist()):
        out[i] = weight[token_id]
        yield
    return out


def make_inputs(device: str, dtype: torch.dtype, seed: int, tokens: int, v: int, n: int, pad: int = 0) -> dict:
    """The first and the last id are among the ids; `pad` elements of NaN between the table's rows."""
    g = make_generator(device, seed)
    token_ids = torch.randint(0, v, (tokens,), generator=g, device=device)
    token_ids[:1], token_ids[1:2] = v - 1, 0
    return {"token_ids": token_ids, "weight": fenced(g, (v, n), dtype, row_pad=pad)}


def _flops(inputs: Mapping) -> int:
    return 0


def _bytes(inputs: Mapping) -> int:
    token_ids, weight = inputs["token_ids"], inputs["weight"]
    return token_ids.numel() * (2 * weight.shape[1] * weight.element_size() + 8)


SPEC = KernelSpec(
    name="embedding",
    formula="out[i] = weight[token_ids[i]]",
    fn=embedding,
    ref=embedding_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("n63_strided", {"tokens": 17, "v": 100, "n": 63, "pad": 5}),
        Case("n576", {"tokens": 3, "v": 1000, "n": 576}),
        Case("n1", {"tokens": 3, "v": 13, "n": 1}),
        Case("n100", {"tokens": 1, "v": 63, "n": 100}),
        Case("n5000", {"tokens": 2, "v": 7, "n": 5000}),
    ),
    bench_cases=(
        Case("t8192_n4096", {"tokens": 8192, "v": 128256, "n": 4096}),
        Case("t64_n576", {"tokens": 64, "v": 49152, "n": 576}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("token_ids", lambda token_ids: token_ids.int()),
        Bad("token_ids", lambda token_ids: token_ids[None]),
        Bad("weight", lambda weight: weight[0]),
        Bad("weight", lambda weight: weight.double()),
        Bad("weight", lambda weight: weight.t()),
    ),
    tolerance={torch.float32: 0.0, torch.float16: 0.0, torch.bfloat16: 0.0},
    loop=embedding_loop,
    loop_iterations=lambda inputs: inputs["token_ids"].shape[0],
)
