"""Numbers, texts and axes that the views of kernels share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from tests.viz.kernel_scenarios import CPU, GPU, ceilings, with_artifacts
from viz import measured
from viz.layout import Sheet
from viz.measured import LogScale, brief, fit_lines, nearest, positive, times, window
from viz.view import ViewState


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (0.5, 0.5), (0, 0.0), (-1, 0.0), (math.nan, 0.0), (math.inf, 0.0), (None, 0.0), ("7", 0.0), (True, 0.0), (10**400, 0.0)],
)
def test_only_a_finite_number_above_zero_was_measured(value: object, number: float) -> None:
    assert positive(value) == number


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.0012, "1.2 ns"), (0.089, "89 ns"), (0.49, "0.49 µs"), (3.24, "3.2 µs"), (38.4, "38 µs"), (9.97, "10 µs"), (1240, "1.24 ms")],
)
def test_short_times_keep_two_digits(us: float, text: str) -> None:
    assert brief(us) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.004, "1.00×"), (1.04, "1.04×"), (1.4, "1.4×"), (6.66, "6.7×"), (17.6, "18×"), (9613, "9,600×")]
)
def test_a_ratio_has_as_many_digits_as_say_something(ratio: float, text: str) -> None:
    assert times(ratio) == text


@dataclass
class At:
    step_id: int
    name: str = ""


def test_the_nearest_artifact_belongs_to_a_step_and_of_several_the_last_made() -> None:
    found = [At(2), At(8, "old"), At(8, "new"), At(4)]
    assert [nearest(found, s).step_id for s in (0, 3, 5, 6, 7, 99)] == [2, 4, 4, 4, 8, 8]
    assert nearest(found, 8).name == "new" and nearest([], 3) is None


def test_ceilings_are_the_newest_whole_ones_of_a_device_whatever_stands_in_brackets_behind_it() -> None:
    trace = with_artifacts(ceilings(copy_gbps=1.0), ceilings(copy_gbps=2.0), ceilings(copy_gbps=math.nan), ceilings(CPU))
    assert measured.ceilings(trace, GPU).copy_gbps == 2.0 and measured.ceilings(trace).device == CPU
    assert measured.ceilings(trace, f"{CPU} (Triton interpreter)").device == CPU
    assert measured.ceilings(trace, f"{GPU} NVL") is None and measured.ceilings(with_artifacts(), GPU) is None


def test_a_number_is_never_parted_from_its_unit() -> None:
    sheet = Sheet(ViewState())
    text = "It took 315 ms and 4.25 TB/s or 12 % of 159 MiB at 31 FLOP/byte"
    for columns in range(14, 60):
        lines = fit_lines(sheet, columns * sheet.advance, 9, text)
        assert " ".join(lines) == text
        for unit in ("ms", "TB/s", "%", "MiB", "FLOP/byte"):
            assert not any(line == unit or line.startswith(f"{unit} ") for line in lines)


def test_the_longest_form_that_fits_is_taken_and_the_last_is_cut() -> None:
    sheet = Sheet(ViewState())
    room = 10 * sheet.advance
    assert fit_lines(sheet, room, 2, "one two three four five six", "one two three") == ["one two", "three"]
    assert fit_lines(sheet, room, 1, "one two three four") == ["one two …"] and fit_lines(sheet, room, 0, "one two three four") == []


@pytest.mark.parametrize(("count", "chosen", "most"), [(5, 0, 9), (20, 0, 5), (20, 19, 5), (20, 10, 5), (20, 10, 1), (0, 0, 4)])
def test_a_window_holds_the_chosen_place(count: int, chosen: int, most: int) -> None:
    shown = window(count, chosen, most)
    assert len(shown) == min(count, most) and (not count or chosen in shown)


def test_equal_ratios_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    axis = LogScale.over([1, 1000], 0, 300)
    assert axis(10) - axis(1) == pytest.approx(axis(1000) - axis(100)) and 0 < axis(1) < axis(1000) < 300
    assert axis.decades(9) == [1.0, 10.0, 100.0, 1000.0] and axis.decades(2) == [1.0, 100.0] and len(axis.decades(1)) == 1
    assert axis(0) == 0 and axis(1e99) == 300
    one = LogScale.over([5.0], 0, 100)
    assert one.low < math.log10(5) < one.high and LogScale.over([], 0, 100).high > LogScale.over([], 0, 100).low
