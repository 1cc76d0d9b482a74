"""What the fused decode kernels share: a few rows times a weight, with RMSNorm in front. No kernel of its own.

A decode step multiplies 1 to 64 rows with every weight once, so a weight's bytes are its time. One program owns BLOCK_N rows
of the weight and all of the step's rows. With one row the products are summed directly (no tensor core is fed by one
row); with more they are a tl.dot whose M is the weight's rows and whose N the step's.

Launched with programmatic dependent launch (PDL), a program loads its first tile of weights before it waits for the kernel
before it: weights depend on nobody. Everything else is read after the wait.

Summing order differs from cuBLAS's: results agree to rounding, not bit by bit (tests compare with fp32 references).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

from kernels.common import power_of_two

MAX_ROWS = 64


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Until the kernel before this one has written what this one reads."""
    if PDL:
        tlx.gdc_wait()


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """The kernel after this one may begin to load its weights."""
    if PDL:
        tlx.gdc_launch_dependents()


@triton.jit
def load_weight(weight, row, rows_mask, start, stride_w, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of a weight [n, K], zeros outside."""
    col = start + tl.arange(0, BLOCK_K)
    at = row.to(tl.int64)[:, None] * stride_w + col[None, :]
    return tl.load(weight + at, mask=rows_mask[:, None] & (col < K)[None, :], other=0.0)


@triton.jit
def inverse_rms(x, row, rows_mask, stride_x, eps, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr):
    """[BLOCK_B] fp32: rsqrt(mean(x^2) + eps) of each row."""
    total = tl.zeros([BLOCK_B], tl.float32)
    for start in range(0, K, BLOCK_K):
        col = start + tl.arange(0, BLOCK_K)
        at = row.to(tl.int64)[:, None] * stride_x + col[None, :]
        v = tl.load(x + at, mask=rows_mask[:, None] & (col < K)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(v * v, axis=1)
    return tl.rsqrt(total / K + eps)


@triton.jit
def load_rows(
    x, norm, row, rows_mask, scale, start, stride_x, K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """[BLOCK_B, BLOCK_K] of x, normalised as kernels/rms_norm.py does it where NORM."""
    col = start + tl.arange(0, BLOCK_K)
    mask = rows_mask[:, None] & (col < K)[None, :]
    v = tl.load(x + row.to(tl.int64)[:, None] * stride_x + col[None, :], mask=mask, other=0.0)
    if NORM:
        w = tl.load(norm + col, mask=col < K, other=0.0)
        y = (v.to(tl.float32) * scale[:, None]).to(v.dtype)
        v = (y.to(tl.float32) * w.to(tl.float32)[None, :]).to(v.dtype)
    return v


@triton.jit
def add_product(acc, w, v, BLOCK_B: tl.constexpr):
    """acc [BLOCK_N, BLOCK_B] + w [BLOCK_N, BLOCK_K] times v [BLOCK_B, BLOCK_K], transposed."""
    if BLOCK_B == 1:
        return acc + tl.sum(w.to(tl.float32) * v.to(tl.float32), axis=1)[:, None]
    else:
        return tl.dot(w, tl.trans(v), acc, input_precision="ieee")


def shape_of(rows: int, k: int, half: bool) -> tuple[int, int]:
    """(BLOCK_B, BLOCK_K) for `rows` step rows of `k` columns."""
    block_b = 1 if rows == 1 else max(16, power_of_two(rows))
    most = (1024 if half else 512) if block_b == 1 else (256 if half else 64)
    return block_b, min(max(16, power_of_two(k)), most)


def check_rows(name: str, x: torch.Tensor) -> None:
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"{name} has {x.shape[0]} rows, must be at most {MAX_ROWS}: cuBLAS is the better choice beyond")
