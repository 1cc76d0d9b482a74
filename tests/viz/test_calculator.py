"""The KV cache calculator: the talk's number, this model's, and the browser's arithmetic against Python's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.trace import Trace
from tests.viz.test_stage_browser import CHROMIUM, browser, stage, until  # noqa: F401 (fixtures)
from tests.viz.test_stage_support import HandSource, upto
from viz.calculator import CacheShape, calculator, digits, of_model, ratio, result, size

GIB = 1 << 30
H200 = {"device": "NVIDIA H200", "device_memory_bytes": 150_110_011_392}
SMOL = {
    "model": {"name": "SmolLM2", "layers": 30, "kv_heads": 3, "head_dim": 64, "max_model_len": 8192},
    "kv_bytes_per_token": 23_040,
    "configs": ({"max_num_seqs": 8},),
    **H200,
}
SHAPES = (
    CacheShape(), CacheShape(1, 1, 1, 1, 1, 0.5), CacheShape(1, 9, 1024, 1, 64, 1), CacheShape(3, 61, 131_072, 1, 576, 2), CacheShape(batch=17),
    CacheShape(65_536, 1024, 16_777_216, 8, 128, 4),
)  # fmt: skip


def test_it_opens_on_the_talks_numbers_and_they_make_192_gib() -> None:
    form = calculator(H200)
    assert CacheShape(**form["values"]) == CacheShape(16, 96, 32_768, 8, 128, 2) and CacheShape().num_bytes == 192 * GIB
    total, compared = result(CacheShape(), form)
    assert total == "2 × 16 × 96 × 32,768 × 8 × 128 × 2 = 192 GiB"
    assert compared == "192 GiB = 1.4 × the memory of this device (NVIDIA H200, 140 GiB)"


def test_the_formula_names_the_factors_in_the_order_of_the_fields() -> None:
    form = calculator({})
    assert [f["name"] for f in form["fields"]] == list(CacheShape.__dataclass_fields__)
    assert form["formula"] == "2 × batch × layers × sequence × KV heads × head_dim × bytes"


def test_the_loaded_model_is_a_preset_and_agrees_with_what_the_engine_counts() -> None:
    shape = of_model(SMOL)
    assert shape == CacheShape(8, 30, 8192, 3, 64, 2)
    assert replace(shape, batch=1, sequence=1).num_bytes == SMOL["kv_bytes_per_token"]
    presets = {p["name"]: p for p in calculator(SMOL)["presets"]}
    assert presets["model"]["label"] == "This model: SmolLM2" and CacheShape(**presets["model"]["values"]) == shape


@pytest.mark.parametrize("meta", [{}, {"model": None}, {"model": "x"}, {"model": {"layers": 0}}, {"device_memory_bytes": "many"}])
def test_a_record_that_says_little_gets_the_talks_numbers_and_a_sentence(meta: dict) -> None:
    form = calculator(meta)
    assert [p["name"] for p in form["presets"]] == ["talk"] and form["memory"] is None
    assert result(CacheShape(), form)[1] == "The memory of this device is not recorded."


def test_halves_are_rounded_up() -> None:
    assert (digits(1.125), digits(12.25), digits(192.5), digits(1.0)) == ("1.13", "12.3", "193", "1")
    assert (size(1.125 * GIB), size(512), ratio(1.25, 1), ratio(1, 8)) == ("1.13 GiB", "512 B", "1.3", "0.13")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_browser_computes_what_python_computes(stage) -> None:  # noqa: F811
    class Source(HandSource):
        def trace(self, room: str) -> Trace:
            found = upto(super().trace(room), 20)
            return Trace({"steps": found.steps, "works": found.works}, found.sequences, {}, {**found.meta, **SMOL})

    form = calculator(SMOL)
    with stage(Source()) as page:
        page.keyboard.press("i")
        until(page, "document.querySelectorAll('.glass-calculator input').length === 5")
        assert page.locator(".glass-calculator .glass-what").inner_text() == result(CacheShape(), form)[0]
        for shape in SHAPES:
            *numbers, width = (getattr(shape, f["name"]) for f in form["fields"])
            for i, number in enumerate(numbers):
                page.locator(".glass-calculator input").nth(i).fill(str(number))
            page.locator(".glass-calculator select").select_option(f"{width:g}")
            said = tuple(page.locator(f".glass-calculator [role=status] {p}").inner_text() for p in (".glass-what", ".glass-detail"))
            assert said == result(shape, form)
        page.locator(".glass-calculator button").nth(1).click()
        assert page.locator(".glass-calculator .glass-what").inner_text() == result(of_model(SMOL), form)[0]
        page.locator(".glass-calculator input").first.fill("")
        assert page.locator(".glass-calculator .glass-what").inner_text() == "—"
