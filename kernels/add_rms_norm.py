"""Adds a sublayer's output to the residual stream and normalises the sum, in place: one pass in place of two.

    residual = round(residual + x),    x = round(residual * rsqrt(mean(residual^2) + eps)) * weight

The sum is rounded to the tensors' type before its square is taken, as the eager `x = x + y` does, and the normalised
value before it meets the weight, as kernels/rms_norm.py does: fused and unfused agree bit by bit in the reference.

Both arguments are overwritten: x [t, d] holds the normalised rows afterwards, residual [t, d] the stream. A caller
that wants to keep the sublayer's output (a probe) copies it before. One program holds a few whole rows in registers.

Rejected: a fresh tensor for the normalised rows (an allocation a layer; nobody reads x again), and passing the sum on in
fp32 (more exact, and another model than the checkpoint's own code runs).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import triton
import triton.language as tl

from kernels.common import check_devices, check_tensor, check_written, fenced, make_generator, power_of_two
from kernels.rms_norm import MAX_D, rms_norm_ref
from kernels.spec import Bad, Case, KernelSpec


def add_rms_norm_ref(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [t, d], residual [t, d], weight [d] -> (x, residual), both written in place: normalised rows, new residual."""
    residual.add_(x)
    return x.copy_(rms_norm_ref(residual, weight, eps)), residual


@triton.jit(do_not_specialize=["rows", "eps"])
def _add_rms_norm_kernel(
    x, residual, weight, rows, eps, stride_x, stride_r,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    col = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mask = (row < rows)[:, None] & (col < D)[None, :]
    x_at = x + (row * stride_x)[:, None] + col[None, :]
    r_at = residual + (row * stride_r)[:, None] + col[None, :]
    # padding lanes are 0: neutral in the sum of squares
    a = tl.load(x_at, mask=mask, other=0.0)
    b = tl.load(r_at, mask=mask, other=0.0)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    v = (a.to(tl.float32) + b.to(tl.float32)).to(b.dtype)
    tl.store(r_at, v, mask=mask)
    y = v.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None]
    y = y.to(v.dtype).to(tl.float32) * w[None, :]
    tl.store(x_at, y.to(v.dtype), mask=mask)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [t, d], residual [t, d], weight [d] -> (x, residual), both written in place: normalised rows, new residual."""
    check_tensor("x", x, (None, None))
    t, d = x.shape
    if not 1 <= d <= MAX_D:
        raise ValueError(f"x has {d} columns, must be 1..{MAX_D}")
    check_tensor("residual", residual, (t, d), (x.dtype,))
    check_tensor("weight", weight, (d,))
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, must be >= 0")
    check_written("x", x)
    check_written("residual", residual)
    check_devices(x=x, residual=residual, weight=weight)
    if t == 0:
        return x, residual
    if x.data_ptr() == residual.data_ptr():
        raise ValueError("residual is x itself: both are written")
    block_d = power_of_two(d)
    block_r = max(1, min(16, 1024 // block_d))
    _add_rms_norm_kernel[(triton.cdiv(t, block_r),)](
        x, residual, weight, t, float(eps), x.stride(0), residual.stride(0),
        D=d, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=min(16, max(4, block_d // 1024)),
    )  # fmt: skip
    return x, residual


def add_rms_norm_loop(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor]]:
    """add_rms_norm_ref, a row an iteration."""
    for i in range(x.shape[0]):
        residual[i] += x[i]
        y = residual[i].float()
        y = y * torch.rsqrt((y * y).mean() + eps)
        x[i] = weight * y.to(x.dtype)
        yield
    return x, residual


def make_inputs(device: str, dtype: torch.dtype, seed: int, tokens: int, d: int, pad: int = 0) -> dict:
    """x [tokens, d] with `pad` elements of NaN between its rows."""
    g = make_generator(device, seed)
    x, residual = fenced(g, (tokens, d), dtype, row_pad=pad), fenced(g, (tokens, d), dtype)
    return {"x": x, "residual": residual, "weight": fenced(g, (d,), dtype), "eps": 1e-5}


def _flops(inputs: Mapping) -> int:
    return 5 * inputs["x"].numel()


def _bytes(inputs: Mapping) -> int:
    x, weight = inputs["x"], inputs["weight"]
    return 4 * x.numel() * x.element_size() + weight.numel() * weight.element_size()


SPEC = KernelSpec(
    name="add_rms_norm",
    formula="residual += x, x = residual * rsqrt(mean(residual^2) + eps) * weight",
    fn=add_rms_norm,
    ref=add_rms_norm_ref,
    make_inputs=make_inputs,
    outputs=("x", "residual"),
    cases=(
        Case("d63_strided", {"tokens": 17, "d": 63, "pad": 5}),
        Case("d576", {"tokens": 17, "d": 576}),
        Case("d13", {"tokens": 3, "d": 13}),
        Case("d100", {"tokens": 1, "d": 100}),
        Case("d1", {"tokens": 3, "d": 1}),
        Case("d1000_strided", {"tokens": 3, "d": 1000, "pad": 24}),
        Case("d4096", {"tokens": 2, "d": 4096}),
    ),
    bench_cases=(
        Case("t8192_d4096", {"tokens": 8192, "d": 4096}),
        Case("t64_d576", {"tokens": 64, "d": 576}),
        Case("t1_d4096", {"tokens": 1, "d": 4096}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("x", lambda x: x.double()),
        Bad("x", lambda x: x[0]),
        Bad("x", lambda x: x[:, :0]),
        Bad("x", lambda x: x.t().contiguous().t()),
        Bad("x", lambda x: x[:1].expand(17, -1)),
        Bad("residual", lambda residual: residual.half()),
        Bad("residual", lambda residual: residual[:-1]),
        Bad("residual", lambda residual: residual[:1].expand(17, -1)),
        Bad("weight", lambda weight: weight[:-1]),
        Bad("weight", lambda weight: torch.zeros(126)[::2]),
        Bad("eps", lambda eps: -1e-5),
        Bad("eps", lambda eps: float("nan")),
    ),
    tolerance={torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2},
    loop=add_rms_norm_loop,
    loop_iterations=lambda inputs: inputs["x"].shape[0],
)
