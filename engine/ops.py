"""The operations a model is made of, each either a Triton kernel or its torch reference.

choose_ops() checks every Triton kernel of the folder against its reference on small inputs and reports it. Those
that Ops names are what models call: one that passes is used, one that fails is replaced by its reference and says so
in its KernelReport. This is the only file of the engine that knows kernels by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace

import torch
import torch.nn.functional as F

from engine.trace import KernelReport
from kernels.attention import plan_host
from kernels.registry import load_specs
from kernels.spec import KernelSpec


@dataclass(frozen=True)
class Ops:
    """Callables by kernel name; signatures are in each kernel's file. A field without a default is a kernel."""

    rms_norm: Callable
    rope: Callable
    silu_mul: Callable
    kv_write: Callable
    embedding: Callable
    add_rms_norm: Callable
    rope_kv_write: Callable
    decode_qkv: Callable
    decode_linear: Callable
    decode_gate_up: Callable
    flash_prefill: Callable
    flash_decode: Callable
    block_copy: Callable
    sample: Callable
    describe: Callable
    backend: str = "torch"
    fused: bool = False  # models take the fused operations where they have them
    is_captured: bool = False  # nothing in it asks the host: a CUDA graph may hold it
    plan_attention: Callable = plan_host  # the reference's indices and masks, once a step for all layers
    linear: Callable = F.linear  # cuBLAS's and MKL's; here so that a profiled step can put a clock around them


CALLED = tuple(f.name for f in fields(Ops) if f.default is MISSING)


def torch_ops() -> Ops:
    """Every operation by its reference."""
    specs = load_specs()
    return Ops(**{name: specs[name].ref for name in CALLED})


def choose_ops(backend: str, device: torch.device, dtype: torch.dtype) -> tuple[Ops, tuple[KernelReport, ...]]:
    """Ops for a backend, with a report for each kernel of the folder, called or not.

    Args:
        backend: "torch" or "triton".
    """
    ops, specs = torch_ops(), load_specs()
    if backend == "torch":
        return ops, tuple(KernelReport(name, "torch", str(device), 0.0, 0.0, True, "the reference itself") for name in specs)
    reports = tuple(check_kernel(spec, device, dtype) for spec in specs.values())
    sound = {report.name: specs[report.name].fn for report in reports if report.passed and report.name in CALLED}
    return replace(ops, **sound, backend="triton", is_captured=set(sound) == set(CALLED)), reports


def check_kernel(spec: KernelSpec, device: torch.device, dtype: torch.dtype) -> KernelReport:
    """Run a kernel's first two cases against its reference; never raises."""
    worst, tolerance, detail = 0.0, 0.0, "" if spec.name in CALLED else "no model calls it"
    try:
        tolerance = spec.tolerance[dtype]
        cases = [case for case in spec.cases if not case.dtypes or dtype in case.dtypes][:2]
        if not cases:
            raise LookupError(f"no case in {dtype}")
        for case in cases:
            got, want = (outputs_of(spec, run, spec.make_inputs(device, dtype, 0, **case.dims)) for run in (spec.fn, spec.ref))
            for a, b in zip(got, want, strict=True):
                worst = max(worst, distance(a.float(), b.float()))
    except Exception as error:  # a kernel that does not compile here must not stop the engine
        worst, detail = float("inf"), f"{type(error).__name__}: {error}"[:500]
    passed = worst <= tolerance
    used = "triton" if passed else "torch"
    return KernelReport(spec.name, used, str(device), worst, tolerance, passed, detail)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a − b| / max(1, max |b|); untouched slots are NaN in both and count as equal, in one as infinite."""
    same = (a == b) | (a.isnan() & b.isnan())
    error = torch.where(same, 0.0, (a - b).abs()).max().item() / max(1.0, b.nan_to_num().abs().max().item())
    return error if error == error else float("inf")


def outputs_of(spec: KernelSpec, run: Callable, inputs: dict) -> list[torch.Tensor]:
    out = run(**inputs)
    if spec.outputs:
        return [inputs[name] for name in spec.outputs]
    return [t for t in (out if isinstance(out, tuple) else (out,))]
