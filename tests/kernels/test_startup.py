"""The check at start: every kernel of the folder is reported, those that Ops names are used when they pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine import ops
from kernels.registry import load_specs

CPU = torch.device("cpu")
SPECS = {name: replace(spec, fn=spec.ref) for name, spec in load_specs().items()}  # kernels that a CPU can run


def start(monkeypatch: pytest.MonkeyPatch, backend: str = "triton", **more):
    monkeypatch.setattr(ops, "load_specs", lambda: {**SPECS, **more})
    chosen, reports = ops.choose_ops(backend, CPU, torch.float32)
    return chosen, {report.name: report for report in reports}


def test_everything_that_ops_names_has_a_kernel() -> None:
    assert set(ops.CALLED) <= set(load_specs())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_kernel_that_no_model_calls_is_reported_too(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    _, reports = start(monkeypatch, backend, toy=replace(SPECS["silu_mul"], name="toy"))
    assert set(reports) == {*SPECS, "toy"} and all(report.passed for report in reports.values())
    assert backend == "torch" or ("no model" in reports["toy"].detail and not reports["rope"].detail)


def test_a_kernel_that_is_wrong_raises_or_has_no_case_is_replaced_by_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**inputs) -> None:
        raise RuntimeError("no compiler")

    chosen, reports = start(
        monkeypatch,
        rms_norm=replace(SPECS["rms_norm"], fn=lambda x, weight, eps: x),
        rope=replace(SPECS["rope"], fn=broken),
        kv_write=replace(SPECS["kv_write"], cases=()),
    )
    for name, said in (("rms_norm", ""), ("rope", "no compiler"), ("kv_write", "no case")):
        assert not reports[name].passed and reports[name].backend == "torch" and said in reports[name].detail
        assert getattr(chosen, name) is SPECS[name].ref
    assert chosen.backend == "triton" and reports["silu_mul"].backend == "triton"
