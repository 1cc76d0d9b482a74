"""A bad argument raises ValueError that names it, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.registry import load_specs
from kernels.spec import KernelSpec

SPECS = load_specs()
ANYWHERE: dict[str, Callable] = {
    "complex": lambda x: x.to(torch.complex64),
    "list": lambda x: x.tolist(),
    "elsewhere": lambda x: x.to("meta"),
}


def inputs_of(spec: KernelSpec) -> dict:
    return spec.make_inputs("cpu", torch.float32, 0, **spec.cases[0].dims)


def spoiled() -> list:
    """What is wrong for every tensor argument, then what each SPEC adds."""
    found = []
    for spec in SPECS.values():
        tensors = [name for name, x in inputs_of(spec).items() if isinstance(x, torch.Tensor)]
        for way, spoil in ANYWHERE.items():
            # the first tensor says where the others must be
            names = tensors[1:] if way == "elsewhere" else tensors
            found += [pytest.param(spec, name, spoil, id=f"{spec.name}-{name}-{way}") for name in names]
        found += [pytest.param(spec, bad.argument, bad.spoil, id=f"{spec.name}-{bad.argument}-{i}") for i, bad in enumerate(spec.bad)]
    return found


@pytest.mark.parametrize("spec, argument, spoil", spoiled())
def test_a_bad_argument_is_named(spec: KernelSpec, argument: str, spoil: Callable) -> None:
    inputs = inputs_of(spec)
    inputs[argument] = spoil(inputs[argument])
    with pytest.raises(ValueError, match=rf"^{argument}\b"):
        spec.fn(**inputs)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_spec_says_what_it_refuses(spec: KernelSpec) -> None:
    assert spec.bad, f"kernels/{spec.name}.py: SPEC.bad is empty; give it a Bad for each shape, stride or number that {spec.name} refuses"
    unknown = {bad.argument for bad in spec.bad} - set(inputs_of(spec))
    assert not unknown, f"kernels/{spec.name}.py: SPEC.bad names {sorted(unknown)}, which make_inputs does not make"


@pytest.mark.parametrize("page_size", [4, 24, 256])
def test_a_page_size_that_is_no_power_of_two_from_8_to_128_is_refused(page_size: int) -> None:
    spec = SPECS["flash_prefill"]
    inputs = spec.make_inputs("cpu", torch.float32, 0, "1:9", 4, 2, 32, page_size=page_size)
    with pytest.raises(ValueError, match=r"^k_cache has page size"):
        spec.fn(**inputs)
