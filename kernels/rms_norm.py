"""RMSNorm over the last dimension, with the rounding of Hugging Face's Llama.

    out[..., i] = round(x[..., i] * rsqrt(mean(x^2) + eps)) * weight[i]

The normalised value is rounded to x's type *before* it meets the weight, as LlamaRMSNorm does; one rounding at the
end would be more exact and would differ from the checkpoints' own code in bf16.

One program holds a few whole rows in registers: x is read once. Rows may lie apart (the q or k heads inside a fused
qkv tensor), so x has up to two leading dimensions with strides of their own; the inner one's size is compiled in, so
that a row number is split without a division. Does not know what a head is.

Rejected: a two-pass loop over d (reads x twice; no model's d needs it: 65,536 fits), and `.contiguous()` for strided x
(an extra round trip of the whole tensor).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.common import FLOATS, check_devices, check_tensor, fenced, make_generator, power_of_two
from kernels.spec import Bad, Case, KernelSpec

MAX_D = 65536


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., d], weight [d] -> [..., d]."""
    if x.dtype is weight.dtype is torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)  # one call; nothing is rounded in between
    y = x.float()
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype)).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "eps"])
def _rms_norm_kernel(
    x, weight, out, rows, eps, stride_outer, stride_inner,
    INNER: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    col = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = (row < rows)[:, None] & (col < D)[None, :]
    if INNER == 1:
        start = row * stride_outer
    else:
        start = (row // INNER) * stride_outer + (row % INNER) * stride_inner
    # padding lanes are 0: neutral in the sum of squares
    v = tl.load(x + start[:, None] + col[None, :], mask=mask, other=0.0)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    y = v.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None]
    y = y.to(v.dtype).to(tl.float32) * w[None, :]
    tl.store(out + row[:, None] * D + col[None, :], y.to(v.dtype), mask=mask)


def _leading(x: torch.Tensor) -> tuple[int, int, int, int]:
    """The leading dimensions as two: (rows, inner, stride_outer, stride_inner); inner is 1 where one will do."""
    dims = [(n, s) for n, s in zip(x.shape[:-1], x.stride()[:-1]) if n != 1]
    merged: list[tuple[int, int]] = []
    for n, s in dims:
        if merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    if len(merged) > 2:
        raise ValueError(f"x has strides {x.stride()}: its leading dimensions do not merge into two")
    (outer, stride_outer), (inner, stride_inner) = (merged + [(1, 0)] * (2 - len(merged)))[:2]
    return outer * inner, inner, stride_outer, stride_inner


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., d], weight [d] -> [..., d], contiguous. See the module's formula."""
    if not isinstance(x, torch.Tensor) or x.dim() < 1 or x.dtype not in FLOATS:
        raise ValueError("x must be a float32, float16 or bfloat16 tensor [..., d]")
    d = x.shape[-1]
    if not 1 <= d <= MAX_D or (d > 1 and x.stride(-1) != 1):
        raise ValueError(f"x has last dimension {d} with stride {x.stride(-1)}, must be 1..{MAX_D} with stride 1")
    check_tensor("weight", weight, (d,))
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, must be >= 0")
    check_devices(x=x, weight=weight)
    rows, inner, stride_outer, stride_inner = _leading(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_d = power_of_two(d)
    block_r = max(1, min(16, 1024 // block_d))
    _rms_norm_kernel[(triton.cdiv(rows, block_r),)](
        x, weight, out, rows, float(eps), stride_outer, stride_inner,
        INNER=inner, D=d, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=min(16, max(4, block_d // 1024)),
    )  # fmt: skip
    return out


def make_inputs(device: str, dtype: torch.dtype, seed: int, tokens: int, d: int, heads: int = 0, pad: int = 0) -> dict:
    """heads = 0: x [tokens, d] with `pad` elements between rows; else x [tokens, heads, d] inside rows of
    heads*d + pad, as the q heads of a fused qkv tensor."""
    g = make_generator(device, seed)
    shape = (tokens, heads, d) if heads else (tokens, d)
    return {"x": fenced(g, shape, dtype, row_pad=pad), "weight": fenced(g, (d,), dtype), "eps": 1e-5}


def rms_norm_loop(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Generator[None, None, torch.Tensor]:
    """rms_norm_ref, a row an iteration."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for row in np.ndindex(*x.shape[:-1]):
        y = x[row].float()
        y = y * torch.rsqrt((y * y).mean() + eps)
        out[row] = weight * y.to(x.dtype)
        yield
    return out


def _flops(inputs: Mapping) -> int:
    return 4 * inputs["x"].numel()


def _bytes(inputs: Mapping) -> int:
    x, weight = inputs["x"], inputs["weight"]
    return 2 * x.numel() * x.element_size() + weight.numel() * weight.element_size()


SPEC = KernelSpec(
    name="rms_norm",
    formula="out = x * rsqrt(mean(x^2) + eps) * weight",
    fn=rms_norm,
    ref=rms_norm_ref,
    make_inputs=make_inputs,
    outputs=(),
    cases=(
        Case("d13", {"tokens": 3, "d": 13}),
        Case("d63_strided", {"tokens": 17, "d": 63, "pad": 5}),
        Case("d100", {"tokens": 1, "d": 100}),
        Case("d1", {"tokens": 3, "d": 1}),
        Case("d576", {"tokens": 17, "d": 576}),
        Case("d1000_strided", {"tokens": 3, "d": 1000, "pad": 24}),
        Case("qk_heads", {"tokens": 17, "d": 64, "heads": 3, "pad": 192}),
        Case("qk_heads_odd", {"tokens": 3, "d": 100, "heads": 5, "pad": 7}),
        Case("d4096", {"tokens": 2, "d": 4096}),
    ),
    bench_cases=(
        Case("t8192_d4096", {"tokens": 8192, "d": 4096}),
        Case("t64_d576", {"tokens": 64, "d": 576}),
        Case("t8192_h32_d128", {"tokens": 8192, "d": 128, "heads": 32, "pad": 2048}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("x", lambda x: x.double()),
        Bad("x", lambda x: x.t().contiguous().t()),
        Bad("x", lambda x: torch.zeros(2, 9, 3, 7, 13)[:, ::2, :2, ::3]),
        Bad("x", lambda x: torch.zeros(())),
        Bad("weight", lambda weight: weight[:-1]),
        Bad("weight", lambda weight: torch.zeros(26)[::2]),
        Bad("eps", lambda eps: -1e-5),
        Bad("eps", lambda eps: float("nan")),
    ),
    tolerance={torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2},
    loop=rms_norm_loop,
    loop_iterations=lambda inputs: math.prod(inputs["x"].shape[:-1]),
)
