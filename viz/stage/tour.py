"""Plays chapters: where each room is in the talk, what has been asked, who guessed what.

A room has one Talk (viz/stage/talk.py). Going to a beat runs its workload to its moment (viz/stage/walk.py) and keeps
what was found there, a Place; going back shows a Place again and runs nothing. A prediction is asked at its beat's place and decided
by the next record that decides it. The browser is told which views, step and selection to show (`go`); it is followed
there until somebody looks elsewhere. Knows nothing of roles: gates of the hub refuse who may not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from viz.chapter import Beat, Chapter, Job
from viz.select import comparison, comparison_id
from viz.stage.codec import encode
from viz.stage.hub import Hub, Refused, failure_of
from viz.stage.talk import Place, Talk, contents, tell
from viz.stage.viewer import Viewer
from viz.stage.walk import NO_ENGINE, SLOWLY, Left, Ours, Speed, Walk
from viz.words.catalogue import words

ENDS = ("preset", "live", "open_recording")  # commands of a person that leave the chapter once they are done
TAKES_OVER = (*ENDS, "play", "pause", "step", "seek", "prompt", "abort", "restart")  # that end a walk, not the chapter
FOR_GUESTS = ("prompt", "abort")  # of these, what others may say without taking over
MAX_GUESSES = 1000  # a beat
KEPT_S = 30.0  # a talk whose room is empty: a reload comes back within it
ENGINE_GONE = ("engine_not_ready", "engine_dead", "no_answer")


class Tour:
    """Every room's Talk, on a hub.

    Args:
        chapters: name → Chapter, in the order of the talk.
    """

    def __init__(self, hub: Hub, chapters: Mapping[str, Chapter], speed: Speed = SLOWLY) -> None:
        self._hub, self._chapters, self._speed = hub, dict(chapters), speed
        self._talks: dict[str, Talk] = {}
        hub.handlers |= {
            "chapter": self._said_chapter, "beat": self._said_beat, "guess": self._said_guess, "chapter_try": self._said_try,
            "chapter_end": self._said_end,
        }  # fmt: skip
        hub.parts |= {"tour": self._told, "chapters": self._contents}
        hub.acted.append(self._overheard)
        hub.done.append(self._left_by)
        hub.left.append(self._emptied)

    # ---- what people say ----

    async def _said_chapter(self, viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        """{name, beat, link}: begin, at the first beat or (a link) at another one."""
        chapter = self._chapters.get(str(args.get("name")))
        if chapter is None:
            raise Refused("unknown_chapter", "There is no chapter of that name. Choose one from the menu.")
        beat = args.get("beat", 0)
        beat = min(max(beat, 0), len(chapter.beats) - 1) if type(beat) is int else 0
        await self._begin(viewer, chapter, beat, linked=args.get("link") is True)
        return {"ok": True}

    async def _said_beat(self, viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        """{by: ±1}: the clicker. Forward means: hurry, or the answer, or the next beat, or the next chapter."""
        back, talk = args.get("by") == -1, self._talks.get(viewer.room)
        if talk is None:
            if not back and self._chapters:
                await self._begin(viewer, next(iter(self._chapters.values())), 0)
        elif talk.phase == "going" and not back:
            if talk.walk is not None:
                talk.walk.hurry.set()
        elif talk.phase == "asked" and not back:
            self._go(talk, viewer, self._arrive if talk.replaced else self._decide)
        elif talk.place is None and not back:
            self._go(talk, viewer, self._arrive)
        else:
            return await self._turn(talk, viewer, -1 if back else 1)
        return {"ok": True}

    async def _turn(self, talk: Talk, viewer: Viewer, by: int) -> Mapping[str, object]:
        target = self._beside(talk, by)
        if target is None:
            return {"ok": True} if by < 0 else {"ok": True, "sentence": words(viewer.state.language)("ui.chapter.over")}
        chapter, beat = target
        if (chapter.name, beat) in talk.places:
            talk.stop()
            talk.chapter, talk.beat = chapter, beat
            self._go(talk, viewer, self._return)
        elif by < 0:
            return {"ok": True}  # nobody has been there
        elif chapter is not talk.chapter and not talk.linked:
            await self._begin(viewer, chapter, 0, talk)
        else:
            talk.chapter, talk.beat = chapter, beat
            self._go(talk, viewer, self._arrive)
        return {"ok": True}

    def _beside(self, talk: Talk, by: int) -> tuple[Chapter, int] | None:
        if 0 <= talk.beat + by < len(talk.chapter.beats):
            return talk.chapter, talk.beat + by
        order = list(self._chapters.values())
        at = order.index(talk.chapter) + by
        return (order[at], 0 if by > 0 else len(order[at].beats) - 1) if 0 <= at < len(order) else None

    async def _said_guess(self, viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        """{mark}: a guess, or a vote."""
        talk, mark = self._talks.get(viewer.room), args.get("mark")
        place = talk.place if talk is not None and talk.phase == "asked" else None
        if place is None:
            raise Refused("not_asked", "Nothing is being asked now.")
        if not isinstance(mark, str) or len(mark) > 200 or mark.split(":")[0] not in talk.now.predict.marks:
            raise Refused("bad_guess", "That cannot be guessed here. Click one of the marks that the question is about.")
        if viewer.person in place.guesses or len(place.guesses) < MAX_GUESSES:
            place.guesses[viewer.person] = mark
        self._hub.touch(viewer.room)
        return {"ok": True}

    async def _said_try(self, viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        """The beat's workload again from its beginning, with the knob that the beat offers."""
        talk = self._talks.get(viewer.room)
        if talk is None or talk.offer is None:
            raise Refused("nothing_to_try", "There is nothing to try here. Go to a beat that offers it.")
        self._go(talk, viewer, self._try)
        return {"ok": True}

    async def _said_end(self, viewer: Viewer, args: Mapping[str, object]) -> Mapping[str, object]:
        self._end(viewer.room)
        return {"ok": True}

    def _overheard(self, viewer: Viewer, name: str, args: Mapping[str, object]) -> None:
        """Somebody does something by hand."""
        talk = self._talks.get(viewer.room)
        if talk is None or talk.walk is None or name not in TAKES_OVER or isinstance(args, Ours):
            return
        if name not in FOR_GUESTS or viewer is talk.walk.viewer:
            talk.stop()
            talk.phase = "here"
            self._hub.touch(viewer.room)

    def _left_by(self, room: str, name: str, args: Mapping[str, object]) -> None:
        """Something has been done by hand; what was refused leaves no chapter."""
        if name in ENDS and not isinstance(args, Ours):
            self._end(room)

    def _end(self, room: str) -> None:
        talk = self._talks.pop(room, None)
        if talk is not None:
            talk.stop()
            self._hub.touch(room)

    def _emptied(self, viewer: Viewer) -> None:
        for room in [room for room in self._talks if not self._hub.in_room(room)]:
            asyncio.get_running_loop().call_later(KEPT_S, self._forget, room, self._talks[room])

    def _forget(self, room: str, talk: Talk) -> None:
        if self._talks.get(room) is talk and not self._hub.in_room(room):
            self._end(room)

    # ---- to another chapter ----

    async def _begin(self, viewer: Viewer, chapter: Chapter, beat: int, before: Talk | None = None, linked: bool = False) -> None:
        """The chapter's run is the engine's where there is one; a link into the place where newcomers are plays the
        recording. `before`: the talk that goes on."""
        status = self._hub.source.status(viewer.room)
        recorded = not _has_engine(status) or (linked and bool(status.get("intro")))
        if before is None:
            self._end(viewer.room)
        else:
            before.stop()
        if not recorded and not status.get("live"):
            try:
                await self._hub.act(viewer, "live", Ours())
            except Exception as error:  # no room is left: the recording goes on
                recorded = True
                viewer.post(encode({"t": "error", **failure_of(error)}))
        old = self._talks.pop(viewer.room, None)
        if old is not None and old is not before:
            old.stop()
        talk = Talk(viewer.room, chapter, recorded, beat, linked=linked)
        if before is not None:
            self._talks.pop(before.room, None)
            talk.places, talk.serial = before.places, before.serial
        self._talks[viewer.room] = talk
        self._go(talk, viewer, self._arrive, hurry=linked)

    # ---- on the way ----

    def _go(self, talk: Talk, viewer: Viewer, act: Callable[[Talk], Awaitable[None]], hurry: bool = False) -> None:
        """Do it in a task of its own: nobody waits for a walk."""
        talk.stop()
        talk.phase = "going"
        talk.walk = Walk(self._hub, viewer, self._speed, hurry)
        talk.task = asyncio.get_running_loop().create_task(self._guard(talk, talk.walk, act))
        self._hub.touch(talk.room)

    async def _guard(self, talk: Talk, walk: Walk, act: Callable[[Talk], Awaitable[None]]) -> None:
        """Whatever happens on the way, the next press of the clicker goes on."""
        try:
            await act(talk)
        except Left:
            pass
        except Exception as error:
            if not talk.recorded and getattr(error, "code", "") in ENGINE_GONE:
                return self._carry_on_recorded(talk, walk)
            self._put_up_with(talk, walk, error)
        finally:
            if talk.walk is walk:
                talk.task = talk.walk = None
                if talk.phase == "going":
                    talk.phase = "here"
                self._hub.touch(talk.room)

    def _carry_on_recorded(self, talk: Talk, walk: Walk) -> None:
        """The engine is gone: the same beat, on the recording."""
        talk.recorded = True
        talk.places = {key: place for key, place in talk.places.items() if place.recorded}
        self._go(talk, walk.viewer, self._arrive, hurry=True)

    def _put_up_with(self, talk: Talk, walk: Walk, error: Exception) -> None:
        walk.viewer.post(encode({"t": "error", **failure_of(error)}))
        if talk.place is None:
            last = self._hub.source.trace(talk.room).last_step or 0
            views = self._known(talk.now.views)
            talk.places[talk.chapter.name, talk.beat] = Place("", True, last, missed=True, views=views, note="ui.chapter.failed")
            talk.show(None, views, None)
        elif talk.now.predict is not None and talk.place.decided is None:
            talk.place.unanswered = True

    async def _arrive(self, talk: Talk) -> None:
        """To the beat where the talk is said to be, over those before it that share its run."""
        target = talk.beat
        if talk.replaced and not talk.begins_a_run:
            talk.forget_run()
        talk.replaced = False
        while talk.beat and not talk.begins_a_run and (talk.chapter.name, talk.beat - 1) not in talk.places:
            talk.beat -= 1
        while True:
            await self._find(talk)
            if talk.beat == target:
                break
            if talk.now.predict is not None and not talk.place.missed:
                await self._decide(talk)
            talk.beat += 1
        self._ask(talk)

    async def _find(self, talk: Talk) -> None:
        walk, beat, name = talk.walk, talk.now, talk.chapter.name
        views = self._known(beat.views)
        talk.phase = "going"
        talk.show(None, views, None)
        self._hub.touch(talk.room)
        if talk.begins_a_run:
            run = beat.preset or talk.chapter.preset
            begin = await walk.start(run, talk.recorded)
        else:
            before = talk.places[name, talk.beat - 1]
            run, begin = before.run or talk.chapter.preset, before.end
            await walk.return_to(run, talk.recorded)
        step = await walk.until(beat.until, begin)
        place = Place(run, talk.recorded, walk.trace.last_step or 0, missed=True, views=views, note="ui.chapter.missed")
        if step is not None and beat.job is not None:
            place.step, place.note = step, "ui.chapter.notRecorded" if talk.recorded else "ui.chapter.notMade"
            at = await self._make(walk, beat.job, step, beat.select(walk.trace, step))
            step = at
        if step is not None:
            place = Place(run, talk.recorded, step, views=views)
            await asyncio.to_thread(place.read, walk.trace, beat)
            await self._compare(walk, beat, place)
        talk.places[name, talk.beat] = place
        talk.show(None if step is None else await walk.seek(step), place.views, place.select)

    async def _make(self, walk: Walk, job: Job, step: int, select: str | None) -> int | None:
        """The step at which what a job made is to be seen; None where it was not made, which the page says."""
        try:
            return await walk.make(job, step, select)
        except Left:
            raise
        except Exception as error:  # the talk goes on without it, but not without its engine
            if getattr(error, "code", "") in ENGINE_GONE:
                raise
            walk.viewer.post(encode({"t": "error", **failure_of(error)}))
            return None

    async def _compare(self, walk: Walk, beat: Beat, place: Place) -> None:
        """Run it, where there is an engine; a recording may bring its own."""
        if beat.compare is None:
            return
        knob, *values = beat.compare
        name = comparison_id(knob, values[-1])
        if walk.status.get("compare"):
            try:
                await walk.say("compare", knob=knob, values=values)
            except Left:
                raise
            except Exception as error:  # another job runs: the beat stands without it
                return walk.viewer.post(encode({"t": "error", **failure_of(error)}))
        elif comparison(walk.trace, name) is None:
            place.note = "ui.chapter.compareLive"
            return
        place.views, place.select = self._known(("compare", *place.views)), name

    def _ask(self, talk: Talk) -> None:
        place = talk.place
        talk.phase = "here"
        if talk.now.predict is not None and not place.missed:
            talk.phase = "revealed" if place.decided is not None or place.unanswered else "asked"

    async def _decide(self, talk: Talk) -> None:
        """On to the step that answers the question."""
        walk, place, predict = talk.walk, talk.place, talk.now.predict
        await walk.return_to(place.run, place.recorded)
        talk.show(None, place.views, place.select)
        self._hub.touch(talk.room)
        step, note = place.step, "ui.chapter.unanswered"
        if predict.until is not None:
            step = await walk.until(lambda trace, at: predict.until(trace, place.step, at), place.step + 1)
        if step is not None and predict.job is not None:
            note = "ui.chapter.notRecorded" if place.recorded else "ui.chapter.notMade"
            step = await self._make(walk, predict.job, step, place.select)
        if step is None:
            place.unanswered, place.note = True, note
        else:
            await asyncio.to_thread(place.answer, walk.trace, predict, step)
            place.views = self._known(predict.views) if predict.views else place.views
        talk.show(None if step is None else await walk.seek(step), place.views, place.select)
        self._ask(talk)

    async def _try(self, talk: Talk) -> None:
        """It plays on by itself; what was found before can still be looked at, and the talk goes on with a run of its own."""
        place, offer = talk.place, talk.now.try_this
        talk.replaced = True
        await talk.walk.start_with(place.run, offer.knob, offer.value)
        talk.show(None, place.views, None)
        self._ask(talk)

    async def _return(self, talk: Talk) -> None:
        """A place that was reached before, as it was left."""
        walk, place = talk.walk, talk.place
        if place.run:
            await walk.return_to(place.run, place.recorded)
        talk.show(await walk.seek(place.end), place.views, place.select)
        self._ask(talk)

    def _known(self, views: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(v for v in views if v in self._hub.views)[:3] or self._hub.default_views

    # ---- what a browser is told ----

    def _contents(self, viewer: Viewer) -> object:
        return contents(self._chapters.values(), viewer.state.language)

    def _told(self, viewer: Viewer) -> object:
        talk = self._talks.get(viewer.room)
        if talk is None:
            return None
        ends = {"first": self._beside(talk, -1) is None, "last": self._beside(talk, 1) is None}
        return tell(talk, viewer.person, viewer.state.language) | ends


def _has_engine(status: Mapping[str, object]) -> bool:
    engine = status if status.get("live") else status.get("engine") or {}
    return bool(engine.get("live")) and engine.get("state") not in NO_ENGINE
