"""Runs one SPEC x case x type and says what is wrong with it. Used compiled, interpreted and for the references."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.common import FENCE
from kernels.spec import Case, KernelSpec

ALL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Verdict:
    error: float
    problems: tuple[str, ...]


def dtypes_of(case: Case, among: tuple[torch.dtype, ...] = ALL_DTYPES) -> tuple[torch.dtype, ...]:
    return tuple(d for d in among if not case.dtypes or d in case.dtypes)


@contextlib.contextmanager
def nan_filled_outputs() -> Iterator[None]:
    """torch.empty returns NaN: an element the kernel forgets shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    before, torch.utils.deterministic.fill_uninitialized_memory = torch.utils.deterministic.fill_uninitialized_memory, True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)


def whole_storage(x: torch.Tensor) -> torch.Tensor:
    """Every element of the buffer x is a view into, guards included."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (storage.nbytes() // x.element_size(),))


def unfenced(x: torch.Tensor) -> bool:
    """A floating-point tensor whose buffer does not begin and end with FENCE elements of NaN outside of it."""
    if not x.is_floating_point():
        return False
    buffer, start = whole_storage(x), x.storage_offset()
    stop = start + (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) if x.numel() else 0)
    return start < FENCE or buffer.numel() - stop < FENCE or not bool(buffer[:FENCE].isnan().all() and buffer[-FENCE:].isnan().all())


def as_tuple(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def distance(out: torch.Tensor, ref: torch.Tensor) -> float:
    """max |out - ref| / max(1, max |ref|) over finite ref; inf where one has a NaN or infinity that the other has not."""
    if out.shape != ref.shape or out.dtype != ref.dtype:
        return float("inf")
    out, ref = out.double(), ref.double()
    finite = torch.isfinite(ref)
    same = torch.where(finite, torch.isfinite(out), (out == ref) | (out.isnan() & ref.isnan()))
    if not bool(same.all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    return float((out - ref)[finite].abs().max()) / max(1.0, float(ref[finite].abs().max()))


def check_case(spec: KernelSpec, case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Verdict:
    ours, theirs, pristine = (spec.make_inputs(device, dtype, seed, **case.dims) for _ in range(3))
    problems, error = [], 0.0
    for name, x in pristine.items():
        if isinstance(x, torch.Tensor) and unfenced(x):
            problems.append(f"make_inputs of {spec.name} does not guard {name} with NaN on both sides: use kernels.common.fenced")
    with nan_filled_outputs():
        out = as_tuple(spec.fn(**ours))
    ref = as_tuple(spec.ref(**theirs))
    if len(out) != len(ref):
        problems.append(f"{len(out)} results, reference {len(ref)}")
    pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(out, ref))]
    # outputs in place: their whole buffers, so that a write outside them shows
    pairs += [(f"buffer of {name}", whole_storage(ours[name]), whole_storage(theirs[name])) for name in spec.outputs]
    for name, a, b in pairs:
        e = distance(a, b)
        error = max(error, e)
        if e > spec.tolerance[dtype]:
            problems.append(f"{name}: distance {e:.3g} above {spec.tolerance[dtype]:.3g}")
        if not spec.outputs and bool(a.isnan().any()):
            problems.append(f"{name}: NaN")
    for i, name in enumerate(spec.outputs):
        if out[i].data_ptr() != ours[name].data_ptr():
            problems.append(f"result {i} is not the argument {name}")
    for name, x in pristine.items():
        if isinstance(x, torch.Tensor) and name not in spec.outputs:
            for who, inputs in (("kernel", ours), ("reference", theirs)):
                if not torch.equal(whole_storage(x).view(torch.uint8), whole_storage(inputs[name]).view(torch.uint8)):
                    # q of a fused qkv tensor shares its buffer with k: what is written in place differs there
                    if any(x.untyped_storage().data_ptr() == pristine[o].untyped_storage().data_ptr() for o in spec.outputs):
                        continue
                    problems.append(f"the {who} changed its input {name}")
    return Verdict(error, tuple(problems))
