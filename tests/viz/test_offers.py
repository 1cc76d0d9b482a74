"""What a picture offers to have done, and the texts beside it: who decides the arguments, who may ask, what is seen."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from engine.trace import TABLES, Trace
from tests.viz.test_people import Person as Tab
from tests.viz.test_people import host_and_guest, stage  # noqa: F401
from tests.viz.test_stage_browser import browser, until  # noqa: F401
from tests.viz.test_stage_browser import pytestmark as needs_chromium
from tests.viz.test_stage_browser import stage as pages  # noqa: F401
from tests.viz.test_stage_support import HOSTILE, VIEWS, HandSource, _view, caption, make_trace
from viz.stage.composer import Composer
from viz.stage.export import Film
from viz.stage.limits import Limits
from viz.stage.offers import chosen, take_offer
from viz.stage.parts import panel
from viz.stage.refusal import Refused
from viz.stage.source import RecordingSource
from viz.view import OFFERED_JOBS, Badge, Document, Frame, Offer, View, ViewState, render

CODE = "def f(x):\n    return x  # " + HOSTILE[0] + "\n" + "\n".join(f"line {i}" for i in range(200))


def _offering(trace: Trace, state: ViewState) -> Frame:
    step = trace.clamp(state.step)
    axes = {"xaxis": {"range": [0, 1], "visible": False}, "yaxis": {"range": [1, 0], "visible": False}}
    offers = (
        Offer("this", "Trace this step", "tiles", (("Trace this step", {"step": step, "wide": state.size[0]}),)),
        Offer(
            "size",
            "Tile sizes",
            "tiles",
            (("16 × 16", {"step": step, "block": 16}), (f"32 × 32 {HOSTILE[0]}", {"step": step, "block": 32})),
        ),
        Offer("no", "Time it", "kernel", (("Time it", {}),), "This needs a GPU."),
    )
    texts = (Document("Formula", "out = a · b", "formula"), Document("Source", CODE, "code"), Document("Why", HOSTILE[1] * 40))
    return Frame("offering", "Offering", (Badge("state"),), axes, summary=f"Step {step}", offers=offers, documents=texts)


OFFERING = _view("offering", "Offering", "What can be asked for?", _offering)
ALL = VIEWS | {"offering": OFFERING}


@pytest.fixture
def room(stage):  # noqa: F811
    """People of a room who look at a picture that offers something."""

    def build(*args, **options):
        made = stage(*args, **options)
        made.hub.views["offering"] = OFFERING
        return made

    return build


def look(tab: Tab, step: int | None = 7) -> None:
    tab.say(t="view", state={"step": step}, panels=[{"view": "offering", "w": 640, "h": 400}])


# ---- the server ----


def test_an_offer_of_no_known_job_or_without_a_choice_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="'abort'"):
        Offer("x", "X", "abort", (("X", {}),))
    with pytest.raises(ValueError, match="no choice"):
        Offer("x", "X", OFFERED_JOBS[0], ())


def test_the_arguments_come_from_the_picture_that_the_viewer_sees(room) -> None:
    made = room()
    with made.open() as ws:
        tab = Tab(ws)
        look(tab)
        assert tab.ask("offer", view="offering", id="this", choice=0, step=99, args={"step": 99})["ok"]
        assert made.source.commands[-1] == ("tiles", {"step": 7, "wide": 640})
        assert tab.ask("offer", view="offering", id="size", choice=1)["ok"]
        assert made.source.commands[-1] == ("tiles", {"step": 7, "block": 32})
        look(tab, None)
        assert tab.ask("offer", view="offering", id="this", choice=0)["ok"]
        assert made.source.commands[-1][1]["step"] == 60, "who follows sees the newest step"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"view": "nowhere", "id": "this", "choice": 0}, "unknown_view"),
        ({"view": ["offering"], "id": "this", "choice": 0}, "unknown_view"),
        ({"view": "offering", "id": "that", "choice": 0}, "offer_gone"),
        ({"view": "offering", "id": {"a": 1}, "choice": 0}, "offer_gone"),
        ({"view": "offering", "id": "size", "choice": 2}, "offer_gone"),
        ({"view": "offering", "id": "size", "choice": -1}, "offer_gone"),
        ({"view": "offering", "id": "size", "choice": True}, "offer_gone"),
        ({"view": "offering", "id": "size"}, "offer_gone"),
        ({"view": "offering", "id": "size", "choice": 0, "label": "64 × 64"}, "offer_gone"),
        ({"view": "offering", "id": "no", "choice": 0}, "offer_greyed"),
        ({}, "unknown_view"),
    ],
)
def test_what_is_not_offered_is_refused_and_starts_nothing(room, said: dict, code: str) -> None:
    made = room()
    with made.open() as ws:
        tab = Tab(ws)
        look(tab)
        before = len(made.source.commands)
        reply = tab.ask("offer", **said)
        assert (reply["ok"], reply["code"]) == (False, code) and reply["sentence"] and len(made.source.commands) == before


@pytest.mark.parametrize("job", OFFERED_JOBS)
def test_nobody_starts_a_job_past_the_pictures(room, job: str) -> None:
    made = room()
    with made.open() as ws:
        tab = Tab(ws)
        assert tab.ask(job, step=1, block=10**9)["code"] == "only_offered"
        assert not [name for name, _ in made.source.commands if name == job]


def test_a_label_that_has_moved_to_another_place_is_still_what_was_pressed() -> None:
    offer = Offer("x", "X", "tiles", (("A", {"n": 1}), ("B", {"n": 2})))
    assert chosen(offer, 0, "A") == chosen(offer, 1, "A") == {"n": 1} and chosen(offer, 7, "B") == {"n": 2}
    with pytest.raises(Refused):
        chosen(offer, 0, "C")


def test_only_the_host_may_take_an_offer(room) -> None:
    made = room()
    with made.open() as a, made.open() as b:
        host, guest = host_and_guest(made, a, b)
        assert guest.ask("offer", view="offering", id="this", choice=0)["code"] == "host_only"
        assert not made.source.commands
        assert host.ask("offer", view="offering", id="this", choice=0)["ok"]


def test_an_offer_counts_as_a_measurement_of_its_person(room) -> None:
    made = room(limits=Limits(jobs_per_minute=2))
    with made.open() as ws:
        tab = Tab(ws)
        replies = [tab.ask("offer", view="offering", id="this", choice=0) for _ in range(3)]
        assert [r["ok"] for r in replies] == [True, True, False] and replies[-1]["code"] == "jobs_per_minute"


def test_a_recording_computes_nothing() -> None:
    trace = make_trace(20)
    source = RecordingSource(trace)
    source.viewer_joined("main", "v")
    act = lambda name, args: source.command("main", "v", name, args)  # noqa: E731
    reply = asyncio.run(take_offer(OFFERING, trace, ViewState(step=3), {"id": "this", "choice": 0}, act))
    assert (reply["ok"], reply["code"]) == (False, "recording")


# ---- what travels ----


def test_arguments_stay_on_the_server_and_documents_travel_once() -> None:
    found = panel(render(OFFERING, make_trace(20), ViewState(step=3)))
    assert '"block"' not in found.figure and '"wide"' not in found.figure and "Tile sizes" in found.figure
    entry, _, have = found.message({}, 0)
    assert "documents" in entry and "figure" in entry
    other = panel(render(OFFERING, make_trace(20), ViewState(step=4)))
    entry, _, _ = other.message(have, 0)
    assert "documents" not in entry and "figure" not in entry and "items" in entry


def test_a_file_keeps_the_documents_once() -> None:
    composer = Composer(HandSource(), ALL, caption, lambda trace, live, selection: dict.fromkeys(live), {})
    film = Film("T", ((OFFERING, (640, 400)),), ViewState(), (1280, 720))
    one = film.develop(composer, make_trace(20), make_trace(20).steps["step_id"][:2], 0)[0]
    assert abs(len(film.develop(composer, make_trace(20), make_trace(20).steps["step_id"][:12], 0)[0]) - len(one)) < 3000


def test_a_very_long_document_is_cut() -> None:
    def figure(trace: Trace, state: ViewState) -> Frame:
        return replace(_offering(trace, state), documents=(Document("Long", "x" * 10**6),))

    view = View("offering", "O", "?", figure, lambda trace, state: "s")
    assert len(panel(render(view, make_trace(20), ViewState(step=3))).documents) < 70_000


# ---- the page ----


@pytest.fixture
def offering(pages):  # noqa: F811
    def open_(**options):
        def prepare(page) -> None:
            page.hub.views["offering"] = OFFERING

        return pages(views=("batching",), query="?views=offering", prepare=prepare, **options)

    return open_


def asked(page) -> list[dict]:
    return [args for name, args in page.source.commands if name == "tiles"]


def heard(page, count: int) -> dict:
    for _ in range(200):
        if len(asked(page)) >= count:
            return asked(page)[-1]
        page.wait_for_timeout(20)
    raise AssertionError(page.source.commands)


@needs_chromium
def test_a_button_and_a_menu_ask_the_engine_by_pointer_and_by_keys(offering) -> None:
    with offering() as page:
        page.click("text=Trace this step")
        assert heard(page, 1)["step"] == 60
        page.click("text=Tile sizes")
        assert page.locator(".glass-choices:visible .glass-item").all_text_contents() == ["16 × 16", f"32 × 32 {HOSTILE[0]}"]
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        assert heard(page, 2)["block"] == 32 and page.locator(".glass-choices:visible").count() == 0
        page.keyboard.press("Enter")  # the button has the focus again
        page.keyboard.press("Escape")
        assert page.locator(".glass-choices:visible").count() == 0 and page.evaluate("document.activeElement.textContent") == "Tile sizes"
        page.click("text=Time it", force=True)
        until(page, "!glass.stage.notice.hidden && glass.stage.noticeText.textContent === 'This needs a GPU.'")
        assert page.evaluate("window.canary") is None


@needs_chromium
def test_on_a_recording_it_says_that_the_engine_is_needed(offering) -> None:
    with offering(source=RecordingSource(make_trace(60), playing=False)) as page:
        assert page.text_content(".glass-lacks") == "Needs the live engine: this is a recording."
        assert page.locator(".glass-offer[aria-disabled=true]").count() == 3
        page.click("text=Tile sizes", force=True)
        assert page.locator(".glass-choices").count() == 0


@needs_chromium
def test_documents_are_text_beside_the_picture_and_below_it_on_a_phone(offering) -> None:
    boxes = (
        "[document.querySelector('.glass-plot'), document.querySelector('.glass-documents')].map((e) => e.getBoundingClientRect().toJSON())"
    )
    for size in ((1280, 720), (390, 844)):
        with offering(size=size) as page:
            until(page, "glass.stage.models.get('offering').documents && document.querySelector('.glass-page pre')")
            plot, texts = page.evaluate(boxes)
            assert (plot["right"] <= texts["left"] + 1) if size[0] > 700 else (plot["bottom"] <= texts["top"] + 1)
            assert plot["width"] > 300 and plot["height"] > 140 and texts["height"] > 100
            for _ in range(100):
                told = page.hub.viewers[page.evaluate("glass.stage.link.viewer")].panels
                if abs(dict(told)["offering"][0] - plot["width"]) < 21:
                    break
                page.wait_for_timeout(50)
            assert abs(dict(told)["offering"][0] - plot["width"]) < 21 and abs(dict(told)["offering"][1] - plot["height"]) < 21
            page.click("role=tab[name=Source]")
            assert page.text_content(".glass-page") == CODE and page.locator(".glass-page img").count() == 0
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.className") == "glass-page"
            page.keyboard.press("ArrowDown")
            page.wait_for_function("document.querySelector('.glass-page').scrollTop > 0")
            step = page.evaluate("glass.stage.state.step")
            assert step is None, "arrows inside a text scroll it and do nothing else"


@needs_chromium
def test_targets_are_large_on_a_phone_letters_can_be_read_and_axe_finds_nothing_serious(offering) -> None:
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed")
    for size, theme, least in (((1280, 720), "light", 28), ((1280, 720), "projector", 28), ((390, 844), "dark", 44)):
        with offering(size=size) as page:
            page.evaluate(f"glass.stage.setTheme({theme!r})")
            until(page, "document.querySelector('.glass-page pre')")
            page.click("role=tab[name=Source]")
            low = page.evaluate(
                "[...document.querySelectorAll('.glass-offer, .glass-doctab')].map((e) => e.getBoundingClientRect().height)"
            )
            assert min(low) >= least and len(low) == 6
            font = (
                "[...document.querySelectorAll('.glass-offers *, .glass-documents *')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
            )
            assert min(page.evaluate(font)) >= (22 if theme == "projector" else 16)
            page.click("text=Tile sizes")
            found = [v for v in axe.Axe().run(page)["violations"] if v["impact"] in ("serious", "critical")]
            assert not found, [(v["id"], [n["html"][:160] for n in v["nodes"]][:4]) for v in found]
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_what_a_job_found_is_shown_at_once_also_to_who_looks_at_a_past_step(room) -> None:
    made = room()
    with made.open() as ws:
        tab = Tab(ws)
        look(tab)
        seen = tab.take("frames")
        while not seen.get("panels"):
            tab.drawn()
            seen = tab.take("frames")
        before = made.source.trace("main")
        found = Trace({name: getattr(before, name) for name in TABLES}, before.sequences, before.token_texts, before.meta, (object(),))
        made.source.trace = lambda room: found
        made.source.moves += 1
        began = time.monotonic()
        while True:
            tab.drawn()
            header = tab.take("frames")
            if "panels" in header:
                break
        assert time.monotonic() - began < 1.5, "sooner than the pictures of a past step are drawn again anyway"
