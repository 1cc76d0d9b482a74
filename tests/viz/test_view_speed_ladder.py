"""The ladder's picture: bars to scale from zero, factors, the talk's line, a race by the measured times, reasons."""

from __future__ import annotations

import pytest

from benchmarks.browser import chromium, page
from engine.artifacts import of_kind
from engine.recording import decode, encode
from engine.trace import Trace
from tests.viz.ladder_scenarios import LADDERS, cancelled, cpu, gpu, partial
from tests.viz.scenarios import scenario
from tests.viz.test_stage_support import serve
from tests.viz.valid import check_frame
from viz.registry import load_views
from viz.stage.hub import Hub, HubConfig
from viz.stage.source import RecordingSource
from viz.view import ViewState, render
from viz.views.speed_ladder import RACE, TALK, newest, race_us, typed_by

VIEW = load_views()["speed_ladder"]
SIZES = (
    (960, 540), (732, 426), (484, 403), (1242, 426), (732, 306), (484, 283), (1116, 786), (1882, 839), (360, 437), (1242, 255), (390, 300),
    (200, 120),
)  # fmt: skip
SELECTIONS = (None, "race:0", "race:7", f"race:{RACE}", "race:99", "race:²", "race:", "rung:batching", "rung:none", "race:play")


def draw(trace: Trace, selection: str | None = None, size: tuple[int, int] = (1242, 560)):
    state = ViewState(size=size, selection=selection)
    frame = render(VIEW, trace, state)
    check_frame(frame, state)
    return frame


def texts(frame) -> str:
    return " ".join(label.text for label in frame.labels)


@pytest.mark.parametrize("theme", ["light", "projector"])
@pytest.mark.parametrize("name", LADDERS)
def test_every_ladder_is_a_valid_frame_at_every_size_as_bars_and_as_a_race(name: str, theme: str) -> None:
    for size in SIZES:
        for selection in (None, "race:7"):
            state = ViewState(size=size, theme=theme, selection=selection)
            check_frame(render(VIEW, LADDERS[name](), state), state)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_selection_is_a_valid_frame(selection: str | None) -> None:
    for make in LADDERS.values():
        state = ViewState(theme="dark", selection=selection)
        check_frame(render(VIEW, make(), state), state)


def test_without_a_ladder_it_says_how_to_climb_one_and_offers_it() -> None:
    frame = draw(scenario("busy"))
    assert "Climb the ladder" in frame.summary and [offer.job for offer in frame.offers] == ["ladder"] and not frame.marks


def test_bars_begin_at_zero_and_are_as_long_as_their_rungs_are_fast() -> None:
    it = newest(gpu())
    frame = draw(gpu())
    bars = {s.name.removeprefix("bar "): s for s in frame.series if s.name.startswith("bar ")}
    assert len({round(float(s.x[0]) - s.width / 2, 2) for s in bars.values()}) == 1
    best = max(it.measured, key=lambda r: r.per_s)
    for rung in it.measured:
        assert bars[rung.name].width == pytest.approx(max(bars[best.name].width * rung.per_s / best.per_s, 1.0), rel=0.01)
    line = next(s for s in frame.series if s.name == "the talk")
    first, left = it.measured[0], float(bars[best.name].x[0]) - bars[best.name].width / 2
    assert float(line.x[0]) - left == pytest.approx(bars[best.name].width * TALK[2] * first.per_s / best.per_s, rel=0.01)


def test_values_factors_and_the_talks_figures_are_printed() -> None:
    said = texts(draw(cpu()))
    assert "5.26 tok/s, 1×" in said or "5.26 tok/s, 1.00×" in said
    assert "5.5×" in said and "5.97 → 94.84 tok/s, 15.88×" in said
    assert "not run: a CPU has no CUDA graphs" in said and "GPU busy" not in said


def test_on_a_gpu_the_columns_say_first_token_each_token_and_busy() -> None:
    said = texts(draw(gpu(), size=(1882, 839)))
    assert all(word in said for word in ("first token, then each", "GPU busy", "6 %", "91 %", "550 µs, 550 µs", "14,545 tok/s, 1,100×"))


def test_tokens_that_differ_are_said() -> None:
    assert "17 of 192 tokens differ from the first rung's (requests: 1)" in texts(draw(gpu(), "rung:fused", (1882, 839)))
    assert "Its tokens are the first rung's" in texts(draw(gpu(), "rung:graphs", (1882, 839)))


def test_a_ladder_that_goes_on_or_was_cancelled_says_so() -> None:
    assert "2 of 7 rungs so far" in draw(partial()).summary and "not yet" in texts(draw(partial()))
    assert "Cancelled after 3 of 7 rungs" in draw(cancelled()).summary


def test_a_race_types_what_the_host_had_at_that_time_and_nothing_more() -> None:
    it = newest(cpu())
    for k in (0, 3, 11, RACE):
        now = race_us(it, k)
        for rung in it.measured:
            there = sum(t <= now for t in rung.token_us[0])
            assert typed_by(rung, now) == "".join(rung.pieces[:there])
        frame = draw(cpu(), f"race:{k}")
        made = {s.name.removeprefix("made "): s.width for s in frame.series if s.name.startswith("made ")}
        whole = next(s.width for s in frame.series if s.name.startswith("lane "))
        for rung in it.measured:
            there = sum(t <= now for row in rung.token_us for t in row)
            assert made.get(rung.name, 0) == pytest.approx(whole * there / rung.num_tokens, rel=0.01)
    assert race_us(it, RACE) == max(r.wall_us for r in it.measured)


def test_at_its_start_a_race_tells_nobody_how_it_ends() -> None:
    for trace in (gpu(), cpu()):
        it, frame = newest(trace), draw(trace, "race:0")
        told = texts(frame) + frame.summary + "".join(m.text + m.detail for m in frame.marks if m.id.startswith("rung:"))
        assert "×" not in told and all(f"{r.per_s:.1f}" not in told for r in it.measured)
        assert {m.id for m in frame.marks} >= {f"race:{k}" for k in range(RACE + 1)} | {f"rung:{r.name}" for r in it.measured}


def test_the_badge_says_measured_and_in_a_race_replayed() -> None:
    assert draw(gpu()).badges[0].kind == draw(gpu(), "race:2").badges[0].kind == "measured"
    assert "replayed" in draw(gpu(), "race:2").badges[0].text and "H200" in draw(gpu()).badges[0].text


def test_the_newest_ladder_is_shown_and_a_recording_keeps_the_picture() -> None:
    assert newest(partial()) is of_kind(partial(), type(newest(partial())))[-1] or len(newest(partial()).measured) == 2
    back = decode(encode(gpu()))
    one, again = render(VIEW, gpu(), ViewState()), render(VIEW, back, ViewState())
    assert one.labels == again.labels and one.marks == again.marks


@pytest.mark.skipif(chromium() is None, reason="needs Chromium")
def test_in_the_browser_a_race_runs_through_its_moments_and_ends_in_bars() -> None:
    hub = Hub(RecordingSource(cpu(), playing=False), load_views(), default_views=("speed_ladder",), config=HubConfig(max_fps=60))
    play = """() => {
      const panel = glass.stage.shown()[0], mark = panel.marks().find((m) => m[0] === "race:play");
      const box = panel.painter.box(mark, panel.axes), at = panel.plot.getBoundingClientRect();
      return [at.left + box.x + box.w / 2, at.top + box.y + box.h / 2];
    }"""
    seen = """() => { if (!window.seen) { window.seen = []; setInterval(() => {
      const said = glass.stage.state.selection; if (said !== seen.at(-1)) seen.push(said); }, 20); } return true; }"""
    with serve(hub) as address, page(address + "?views=speed_ladder") as opened:
        opened.wait_for_function("window.glass && glass.stage.shown()[0].marks().some((m) => m[0] === 'race:play')")
        opened.evaluate(seen)
        opened.mouse.click(*opened.evaluate(play))
        opened.wait_for_function(f"seen.includes('race:{RACE}') && glass.stage.state.selection === null", timeout=30_000)
        moments = [said for said in opened.evaluate("seen") if said]
        assert moments == [f"race:{k}" for k in range(RACE + 1)]
        opened.mouse.click(*opened.evaluate(play))
        opened.wait_for_function("glass.stage.state.selection === 'race:3'", timeout=30_000)
        opened.evaluate("glass.stage.select('rung:eager')")
        opened.wait_for_timeout(1200)
        assert opened.evaluate("glass.stage.state.selection") == "rung:eager", "another choice ends it"
