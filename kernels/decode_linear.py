"""A sublayer's output projection added to the residual stream, for the few rows of a decode step.

    residual = round(residual + round(x weight^T + bias))

The product is rounded to the tensors' type before it is added, as the eager `x = x + F.linear(y, w)` does. One kernel in
place of a matmul and an addition. See kernels/gemv.py for how the weight is read.

Rejected: splitting k over programs with atomic additions (the order of sums would change from run to run).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.common import check_devices, check_tensor, check_written, fenced, make_generator
from kernels.gemv import add_product, check_rows, let_next_begin, load_rows, load_weight, shape_of, wait_for_inputs
from kernels.spec import Bad, Case, KernelSpec


def decode_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """x [b, k], weight [n, k], residual [b, n], bias [n] or None -> residual, written in place. pdl: no meaning here."""
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return residual.add_(y)


@triton.jit(do_not_specialize=["rows"])
def _decode_linear_kernel(
    x, weight, bias, residual, rows, stride_x, stride_w, stride_r, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_B)
    out_mask, row_mask = out < N, row < rows
    w = load_weight(weight, out, out_mask, 0, stride_w, K, BLOCK_K)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_B], tl.float32)
    v = load_rows(x, x, row, row_mask, 0.0, 0, stride_x, K, BLOCK_K, False)
    acc = add_product(acc, w, v, BLOCK_B)
    for start in range(BLOCK_K, K, BLOCK_K):
        w = load_weight(weight, out, out_mask, start, stride_w, K, BLOCK_K)
        v = load_rows(x, x, row, row_mask, 0.0, start, stride_x, K, BLOCK_K, False)
        acc = add_product(acc, w, v, BLOCK_B)
    let_next_begin(PDL)
    if BIAS:
        acc += tl.load(bias + out, mask=out_mask, other=0.0).to(tl.float32)[:, None]
    at = residual + row.to(tl.int64)[None, :] * stride_r + out[:, None]
    mask = out_mask[:, None] & row_mask[None, :]
    before = tl.load(at, mask=mask, other=0.0)
    after = before.to(tl.float32) + acc.to(before.dtype).to(tl.float32)
    tl.store(at, after.to(before.dtype), mask=mask)


def decode_linear(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """x [b, k], weight [n, k], residual [b, n], bias [n] or None -> residual, written in place; b at most MAX_ROWS.
    pdl: the kernel before it on the stream lets its successor begin early, and so does this one."""
    check_tensor("x", x, (None, None))
    check_rows("x", x)
    b, k = x.shape
    check_tensor("weight", weight, (None, k), (x.dtype,))
    n = weight.shape[0]
    check_tensor("residual", residual, (b, n), (x.dtype,))
    if bias is not None:
        check_tensor("bias", bias, (n,), (x.dtype,))
    check_written("residual", residual)
    check_devices(x=x, weight=weight, residual=residual, **({} if bias is None else {"bias": bias}))
    if b == 0 or n == 0:
        return residual
    block_b, block_k = shape_of(b, k, x.element_size() == 2)
    block_n = 8 if block_b == 1 else 16
    _decode_linear_kernel[(triton.cdiv(n, block_n),)](
        x, weight, bias, residual, b, x.stride(0), weight.stride(0), residual.stride(0), N=n, K=k, BIAS=bias is not None,
        BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_B=block_b, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return residual


def decode_linear_loop(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None, pdl: bool = False
) -> Generator[None, None, torch.Tensor]:
    """decode_linear_ref, one output column an iteration."""
    for i in range(weight.shape[0]):
        y = (x.float() @ weight[i].float()) + (0.0 if bias is None else bias[i].float())
        residual[:, i] += y.to(x.dtype)
        yield
    return residual


def make_inputs(device: str, dtype: torch.dtype, seed: int, tokens: int, k: int, n: int, bias: bool = False) -> dict:
    g = make_generator(device, seed)
    return {
        "x": fenced(g, (tokens, k), dtype, row_pad=5), "weight": fenced(g, (n, k), dtype, scale=k**-0.5),
        "residual": fenced(g, (tokens, n), dtype), "bias": fenced(g, (n,), dtype) if bias else None,
    }  # fmt: skip


def _flops(inputs: Mapping) -> int:
    return 2 * inputs["x"].shape[0] * inputs["weight"].numel()


def _bytes(inputs: Mapping) -> int:
    x, weight, residual = inputs["x"], inputs["weight"], inputs["residual"]
    return (x.numel() + weight.numel() + 2 * residual.numel()) * x.element_size()


SPEC = KernelSpec(
    name="decode_linear",
    formula="residual = residual + (x weight^T + bias)",
    fn=decode_linear,
    ref=decode_linear_ref,
    make_inputs=make_inputs,
    outputs=("residual",),
    cases=(
        Case("b1_576", {"tokens": 1, "k": 576, "n": 576}),
        Case("b3_1536_576", {"tokens": 3, "k": 1536, "n": 576}),
        Case("b1_k1100_n63", {"tokens": 1, "k": 1100, "n": 63}),
        Case("b17_bias", {"tokens": 17, "k": 100, "n": 33, "bias": True}),
        Case("b64_k13", {"tokens": 64, "k": 13, "n": 5}),
    ),
    bench_cases=(
        Case("b1_1536_576", {"tokens": 1, "k": 1536, "n": 576}),
        Case("b32_1536_576", {"tokens": 32, "k": 1536, "n": 576}),
        Case("b1_3072_1024", {"tokens": 1, "k": 3072, "n": 1024}),
    ),
    flops=_flops,
    bytes=_bytes,
    bad=(
        Bad("x", lambda x: x[0]),
        Bad("x", lambda x: torch.zeros(65, x.shape[1])),
        Bad("weight", lambda w: w[:, :-1]),
        Bad("weight", lambda w: w.half()),
        Bad("residual", lambda r: r[:, :-1]),
        Bad("residual", lambda r: r[:, :1].expand(-1, r.shape[1])),
    ),
    loop=decode_linear_loop,
    loop_iterations=lambda inputs: inputs["weight"].shape[0],
    tolerance={torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2},
)
