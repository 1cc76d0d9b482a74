"""Kernel cards, runs on chosen shapes, ceilings: read from the kernels themselves, bounded before anything is allocated."""

from __future__ import annotations

import inspect
import math
import time

import pytest
import torch

from engine.artifacts import Ceilings, KernelCard, KernelRun, of_kind
from engine.audience import LiveSource
from engine.build import build_core
from engine.ceilings import cpu_caches
from engine.config import CacheConfig, EngineConfig, ModelSource, SchedulerConfig
from engine.errors import EngineError
from engine.jobs import start_job
from engine.kernel_cards import attention_size, cards, fits
from engine.kernel_page import input_bytes
from engine.ops import CALLED, torch_ops
from engine.recording import decode, encode
from kernels.registry import load_specs
from tests.engine.test_session import make_session, until
from tests.factories import make_core

SPECS = load_specs()


@pytest.fixture(scope="module")
def core(tiny_llama):
    return build_core(EngineConfig(ModelSource(str(tiny_llama), "cpu", "float32"), CacheConfig(num_pages=16), SchedulerConfig(4, 64)))[0]


def run(core, job: str, **args: object) -> object:
    it = start_job(core, job, args)
    slowest = 0.0
    while True:
        began = time.perf_counter()
        if it.advance():
            break
        slowest = max(slowest, time.perf_counter() - began)
    it.close()
    assert not it.note, it.note
    (found,) = it.take_artifacts()
    return found


# ---- cards ----


@pytest.fixture(scope="module")
def by_name() -> dict[str, KernelCard]:
    return {card.name: card for card in cards(torch_ops(), torch.device("cpu"))}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_card_holds_what_the_file_says(by_name, name):
    card, spec = by_name[name], SPECS[name]
    assert (
        card.formula == spec.formula
        and card.text
        and card.text == inspect.cleandoc(inspect.getmodule(spec.ref if spec.fn is None else spec.fn).__doc__)
    )
    assert inspect.getsource(spec.ref).strip() in card.reference
    assert "@triton.jit" in card.source and f"def {spec.fn.__name__}(" in card.source
    assert card.backend == ("torch" if name in CALLED else "")
    compile(card.reference, name, "exec")
    compile(card.source, name, "exec")
    declared = {case.name for case in (*spec.bench_cases, *spec.cases)}
    assert {case for case, _ in card.cases} <= declared and {case.name for case in spec.cases} <= {case for case, _ in card.cases}


def test_a_reference_comes_with_what_it_calls_of_its_file(by_name):
    reference = by_name["flash_prefill"].reference
    for helper in ("def attention_ref(", "def plan_host(", "def _plan_chunk(", "def _take(", "class HostPlan"):
        assert reference.count(helper) == 1, helper
    assert "def make_inputs" not in reference and "def check_attention" not in reference


def test_a_card_says_that_a_kernel_is_used(by_name):
    ops = torch_ops()
    used = {card.name: card.backend for card in cards(type(ops)(**{**vars(ops), "silu_mul": SPECS["silu_mul"].fn}), torch.device("cpu"))}
    assert used["silu_mul"] == "triton" and used["rms_norm"] == "torch"


def test_every_room_has_the_cards_from_the_start_and_they_survive_a_recording(tiny_llama):
    session = make_session(tiny_llama)
    until(lambda: session.is_ready)
    until(lambda: of_kind(session.trace(), KernelCard))
    found = of_kind(session.trace(), KernelCard)
    assert [card.name for card in found] == sorted(SPECS)
    assert of_kind(decode(encode(session.trace())), KernelCard) == found
    session.close()


# ---- a run ----


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_kernel_can_be_run_from_its_page(core, name):
    case = SPECS[name].cases[0]
    it = run(core, "kernel", name=name, case=case.name, dtype=None if not case.dtypes else str(case.dtypes[0])[6:])
    assert isinstance(it, KernelRun) and (it.name, it.case) == (name, case.name) and it.torch_us > 0
    assert it.kernel_us is None and it.graph_us is None and math.isnan(it.max_error), "no kernel of ours runs on a CPU"
    inputs = SPECS[name].make_inputs("cpu", torch.float32, 0, **case.dims)
    assert it.flops == SPECS[name].flops(inputs) and it.bytes > 0
    if SPECS[name].loop is not None:
        assert it.loop_us > 0 and 0 < it.loop_ran <= it.loop_iterations == SPECS[name].loop_iterations(inputs)


def test_a_long_loop_is_stopped_after_half_a_second_and_says_how_far_it_came(core):
    it = run(core, "kernel", name="rms_norm", dims={"tokens": 200_000, "d": 16})
    assert it.case == "chosen" and it.shapes == "tokens 200000, d 16" and 0 < it.loop_ran < it.loop_iterations == 200_000
    assert it.loop_us * it.loop_ran < 2e6


def test_chosen_shapes_are_those_that_run(core):
    it = run(core, "kernel", name="silu_mul", dims={"tokens": 30, "n": 70}, dtype="bfloat16")
    assert it.bytes == 30 * 70 * 3 * 2 and it.dtype == "bfloat16" and it.tolerance == SPECS["silu_mul"].tolerance[torch.bfloat16]


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ({"name": "no such"}, "unknown_kernel"), ({"name": None}, "unknown_kernel"), ({"name": ["silu_mul"]}, "unknown_kernel"),
        ({"name": "silu_mul", "case": "no such"}, "unknown_case"), ({"name": "silu_mul", "case": {}}, "unknown_case"),
        ({"name": "silu_mul", "dtype": "int8"}, "bad_shapes"), ({"name": "silu_mul", "dtype": 3}, "bad_shapes"),
        ({"name": "silu_mul", "dims": {"tokens": 3}}, "bad_shapes"), ({"name": "silu_mul", "dims": []}, "bad_shapes"),
        ({"name": "silu_mul", "dims": {"tokens": 3, "n": 4, "evil": 1}}, "bad_shapes"), ({"name": "silu_mul", "dims": {"tokens": 0, "n": 4}}, "bad_shapes"),
        ({"name": "silu_mul", "dims": {"tokens": True, "n": 4}}, "bad_shapes"), ({"name": "silu_mul", "dims": {"tokens": 2.0, "n": 4}}, "bad_shapes"),
        ({"name": "silu_mul", "dims": {"tokens": 2, "n": 4, "scale": float("inf")}}, "bad_shapes"),
        ({"name": "silu_mul", "dims": {"tokens": -5, "n": 4}}, "bad_shapes"), ({"name": "silu_mul", "dims": {"tokens": 2**40, "n": 4}}, "bad_shapes"),
        ({"name": "silu_mul", "dims": {"tokens": 2**24, "n": 2**24}}, "shapes_too_large"),
        ({"name": "silu_mul", "case": "t8192_n14336"}, "shapes_too_large"),
        ({"name": "rope", "dims": {"tokens": 2**20, "hq": 64, "hk": 8, "d": 128}}, "shapes_too_large"),
        ({"name": "flash_prefill", "dims": {"sequences": "1:1x999999999", "hq": 1, "hk": 1, "d": 16}}, "bad_shapes"),
        ({"name": "flash_prefill", "dims": {"sequences": "1:1 " * 200, "hq": 1, "hk": 1, "d": 16}}, "bad_shapes"),
        ({"name": "flash_prefill", "dims": {"sequences": "1:9999999x99", "hq": 1, "hk": 1, "d": 16}}, "shapes_too_large"),
        ({"name": "flash_prefill", "dims": {"sequences": "9000:9000x2", "hq": 32, "hk": 1, "d": 64}}, "shapes_too_large"),
        ({"name": "flash_prefill", "dims": {"sequences": "; drop", "hq": 1, "hk": 1, "d": 16}}, "bad_shapes"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_before_anything_is_made(core, args, code):
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        start_job(core, "kernel", args)
    assert caught.value.code == code and caught.value.sentence.endswith(".") and time.monotonic() - began < 10


def test_shapes_that_contradict_each_other_end_the_job_with_a_sentence(core):
    job = start_job(core, "kernel", {"name": "flash_prefill", "dims": {"sequences": "3:9", "hq": 3, "hk": 2, "d": 16}})
    while not job.advance():
        pass
    assert job.note.startswith("flash_prefill could not be run on these shapes: ") and not job.take_artifacts()


@pytest.mark.parametrize("name", sorted(SPECS))
def test_sizes_are_counted_without_being_allocated(name):
    """Against what is really made; attention counts by its own formula."""
    spec = SPECS[name]
    for case in spec.cases[:3]:
        made = spec.make_inputs("cpu", torch.float32, 0, **case.dims)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in made.values() if isinstance(x, torch.Tensor)}
        counted = input_bytes(spec, case.dims, torch.float32)
        assert counted >= 0.9 * sum(storages.values()) - 4096 and counted <= 8 * sum(storages.values()) + 65_536, case.name


def test_an_attention_case_that_a_cpu_cannot_finish_is_not_offered_there():
    spec = SPECS["flash_prefill"]
    large = [case for case in spec.bench_cases if attention_size(case.dims, 4)[1] > 1e11]
    assert large and not any(fits(spec, case, "cpu") for case in large) and all(fits(spec, case, "cuda") for case in large)


# ---- ceilings ----


def test_ceilings_are_measured_in_bounded_time_and_ordered_as_hardware_is(core):
    began = time.monotonic()
    it = run(core, "ceilings")
    assert isinstance(it, Ceilings) and time.monotonic() - began < 20  # about 0.6 s on a free core
    assert min(it.copy_gbps, it.matmul_tflops, it.launch_us, it.python_us) > 0 and it.python_us < it.launch_us
    assert [name.split(",")[0] for name, _, _ in it.levels] == [*(name for name, _ in cpu_caches()), "memory"]
    sizes = [size for _, size, _ in it.levels]
    assert sizes == sorted(sizes) and all(rate > 0 for _, _, rate in it.levels) and it.levels[-1][2] == it.copy_gbps


def test_a_kernel_page_needs_no_model():
    with pytest.raises(EngineError, match="no kernel called"):
        start_job(make_core(), "kernel", {"name": "x"})


# ---- as the page asks ----


def test_the_page_gets_a_run_and_ceilings_and_refusals(tiny_llama):
    session = make_session(tiny_llama)
    until(lambda: session.is_ready)
    source = LiveSource(session)
    source.do_kernel("main", {"name": "rms_norm", "case": "d576"})
    until(lambda: of_kind(source.trace("main"), KernelRun))
    until(lambda: session.status().progress is None)
    source.do_ceilings("main", {})
    until(lambda: of_kind(source.trace("main"), Ceilings), 60)
    with pytest.raises(EngineError, match="no kernel called"):
        source.do_kernel("main", {})
    trace = source.trace("main")
    assert encode(decode(encode(trace))) == encode(trace)
    session.close()


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(SPECS))
def test_on_a_gpu_a_kernel_is_checked_and_timed_in_every_way(name):
    core = make_gpu_core()
    it = run(core, "kernel", name=name, dtype="bfloat16" if torch.bfloat16 in SPECS[name].tolerance else None)
    assert it.max_error <= it.tolerance and it.kernel_us > 0 and it.torch_us > 0 and (it.graph_us is None or it.graph_us > 0)


@pytest.mark.gpu
def test_on_a_gpu_the_ceilings_are_those_of_the_machine():
    it = run(make_gpu_core(), "ceilings")
    assert it.copy_gbps > 100 and it.matmul_tflops > 10 and [name for name, _, _ in it.levels] == ["L2", "memory"]


def make_gpu_core():
    """A stand-in's core on the GPU: these jobs need a device and no model."""
    core = make_core()
    core.runner.device = torch.device("cuda")
    return core
