"""KernelSpec and Case: what a kernel file declares about itself. Dataclasses without methods.

Tests, benchmarks, the start-up check and the kernel page all read the same SPEC; nothing about a kernel is
written twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One set of shapes. `name` is unique in its kernel; `dims` are make_inputs' keyword arguments; `dtypes`
    limits the types it is run in (empty: float32, float16, bfloat16)."""

    name: str
    dims: Mapping[str, int | float | bool | str]
    dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class KernelSpec:
    """A kernel's declaration.

    Args:
        name: the file's name.
        formula: one line of mathematics, with the kernel's own argument names.
        fn: launches the Triton kernel. Same signature as `ref`.
        ref: torch, computes in fp32 and returns the inputs' type: specification, oracle, CPU production path.
        make_inputs: (device, dtype, seed, **dims) -> keyword arguments of fn and ref.
        outputs: names of the arguments written in place, or () when the return value is the output.
        cases: for tests: odd shapes first.
        bench_cases: for benchmarks.
        flops, bytes: (inputs) -> int, from the shapes alone (attention: and the lengths). Bytes: each input read
            once, each output written once.
        tolerance: dtype -> largest allowed max |out − ref| / max(1, max |ref|).
        compiled_only: cannot run in Triton's interpreter (inline PTX, Gluon).
    """

    name: str
    formula: str
    fn: Callable[..., torch.Tensor]
    ref: Callable[..., torch.Tensor]
    make_inputs: Callable[..., dict]
    outputs: tuple[str, ...]
    cases: tuple[Case, ...]
    bench_cases: tuple[Case, ...]
    flops: Callable[[Mapping], int]
    bytes: Callable[[Mapping], int]
    tolerance: Mapping[torch.dtype, float]
    compiled_only: bool = False
