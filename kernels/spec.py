"""KernelSpec, Case and Bad: what a kernel file declares about itself. Dataclasses without methods.

Tests, benchmarks and the engine's start-up check read the same SPEC; nothing about a kernel is written twice.

What make_inputs owes the tests:
    - one seed, the same values, on every call;
    - every floating-point tensor lies inside a larger buffer that begins and ends with NaN (kernels.common.fenced, or
      FENCE elements of NaN around an arena that several arguments share), so that a read or write outside it shows;
    - with `empty_dims` there is nothing to compute, and fn returns what ref returns before it launches anything (an
      empty grid is an error on CUDA).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Case:
    """One set of shapes. `name` is unique in its kernel; `dims` are make_inputs' keyword arguments; `dtypes`
    limits the types it is run in (empty: float32, float16, bfloat16)."""

    name: str
    dims: Mapping[str, int | float | bool | str]
    dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class Bad:
    """One argument spoiled: fn must raise a ValueError that begins with its name, before anything is launched.

    Wrong types, lists in place of tensors and tensors elsewhere than the first are tried for every tensor argument by
    themselves; this is for shapes, strides and numbers. `spoil` gets the argument as make_inputs makes it for the
    kernel's first case, in float32 on a CPU, and must not change it."""

    argument: str
    spoil: Callable


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
        bad: arguments to refuse; at least one.
        tolerance: dtype -> largest allowed max |out − ref| / max(1, max |ref|).
        loop: the same operation as a Python loop, one row, key or token an iteration, for the kernel page: a generator with
            `ref`'s arguments that yields after each iteration and returns what ref returns (tests run it to its end).
        loop_iterations: (inputs) -> int, how often it yields.
        empty_dims: changes to a case's dims that leave nothing to compute.
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
    bad: tuple[Bad, ...] = ()
    loop: Callable[..., Generator[None, None, object]] | None = None
    loop_iterations: Callable[[Mapping], int] | None = None
    empty_dims: Mapping[str, int | str] = field(default_factory=lambda: {"tokens": 0})
    compiled_only: bool = False
