"""A Session whose core exists only in bursts: each is one call of a function that a GPU is lent to (engine/burst.py).

Everything else stays here, where no GPU is: the model's files and tokenizer, rooms, knobs, records. A prompt, an example or
a job waits in the queue and starts a burst; what comes while one runs waits for the next, and has its number already:
nobody else gives numbers, so a burst is told which to use. What is cached goes with the burst, which the records say
when the next one begins. A burst that fails, or is cut short, is a sentence; the next can be tried.

`lend()` is called where the one who pays for a GPU can be seen (a Gradio event): the next burst runs in that context.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from engine.burst import Order, burst
from engine.config import EngineConfig, knob_values, with_knob, with_room_knobs, with_wide_parts
from engine.errors import EngineError, reason_of, tell
from engine.ledger import Start
from engine.messages import Answer, Command, Died, Progress, Prompt, Ready, Report
from engine.pages import Arena, PagePool
from engine.request import FinishReason, Request, letters
from engine.rows import RowSlots
from engine.scheduler import Scheduler
from engine.session import Session, Starts, Status
from engine.trace import TraceDelta

BURST_S = 60  # what is asked for; as long as a worker of ZeroGPU lives by default
SPARE_S = 10.0  # of these, for the worker's start and its last words
RESERVED_FOR_A_JOB = 256  # request numbers
WAITING = Progress(0.05, "Waiting for a GPU")


@dataclass
class _Room:
    """What the next burst finds in a room. `later_*`: numbers for the lines of scripts that come once steps have run."""

    settings: EngineConfig
    sequence: int = 1
    name: int = 0
    later_sequences: int = 0
    later_names: int = 0


@dataclass
class _Run:
    """A burst under way."""

    rooms: frozenset[str]
    promised: dict[str, list[int]] = field(default_factory=dict)  # room -> sequences
    ready: bool = False
    fault: str = ""
    stop: str = ""  # why it should end


class BurstSession(Session):
    """Args:
    config: need not be resolved.
    gpu: makes of a generator function one that runs where a GPU is, like `spaces.GPU(duration=BURST_S)`.
    seconds: how long a burst may be.
    patience: seconds to wait for lend() before a burst starts without.
    """

    def __init__(self, config: EngineConfig, gpu: Callable, *, seconds: float = BURST_S - SPARE_S, patience: float = 0.0) -> None:
        super().__init__(config, own_process=False)
        self._call = gpu(burst)
        self._seconds, self._patience = seconds, patience
        self._lent: contextvars.Context | None = None
        self._orders: list[Order] = []
        self._asked: dict[int, str] = {}  # number of a command -> its room
        self._rooms: dict[str, _Room] = {}
        self._next_request = 1
        self._later_requests = 0
        self._run: _Run | None = None

    # ---- life ----

    def _launch(self, starts: Starts) -> None:
        self._state, self._sentence, self._process = "loading", "", None
        self._generation += 1
        self._wide_version += 1
        self._inbox: queue.Queue = queue.Queue()
        self._worker = threading.Thread(target=self._live, args=(self._generation,), daemon=True, name="bursts")
        self._worker.start()

    def _live(self, generation: int) -> None:
        """Fetch the model, then one burst after another."""
        from engine.build import find_model
        from engine.models.loading import advised

        try:
            ready = find_model(self._born, lambda fraction, text: self._take(Progress(fraction, text), generation))
            self._take(ready, generation)
        except EngineError as error:
            return self._take(Died(advised(error, self._born.source.model).sentence), generation)
        except Exception as error:
            return self._take(Died(f"The engine could not start: {reason_of(error)}.", traceback.format_exc()), generation)
        while self._wait_for_orders():
            self._burst(generation)

    def close(self) -> None:
        """End the burst under way, if there is one; records stay readable."""
        with self._changed:
            if self._state in ("new", "closed"):
                return
            self._state = "closed"
            if self._run is not None:
                self._run.stop = "The engine was closed."
            self._changed.notify_all()
        self._worker.join(10)

    def lend(self, context: contextvars.Context) -> None:
        """Run the next burst in this context: who asked for it can be seen there."""
        with self._changed:
            if self._orders:
                self._lent = context
                self._changed.notify_all()

    def _wait_for_orders(self) -> bool:
        """False when the session is closed. An order may be withdrawn while somebody to pay for it is waited for."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._orders or self._state == "closed")
                self._changed.wait_for(lambda: self._lent or not self._orders or self._state == "closed", self._patience)
                if self._orders or self._state == "closed":
                    return self._state != "closed"

    # ---- a burst ----

    def _burst(self, generation: int) -> None:
        with self._changed:
            orders, starts, run = self._begin()
            context, self._lent = self._lent or contextvars.Context(), None
            config = with_wide_parts(self._born, self.config)
            config = replace(config, cache=replace(config.cache, arena_pages=None))  # of the rooms that are concerned, not of all
        try:
            batches = self._call(config, starts, orders, self._seconds)
            fault = context.run(self._read, batches, run, generation)
        except Exception as error:
            fault = sentence_of(error)
        with self._changed:
            self._end(run, run.stop or run.fault or fault)

    def _begin(self) -> tuple[tuple[Order, ...], dict[str, Start], _Run]:
        orders, self._orders = tuple(self._orders), []
        named = {str(order.command.args["room"]) for order in orders}
        starts = {}
        for name in named & self._ledgers.keys():
            room, ledger = self._rooms[name], self._ledgers[name]
            starts[name] = replace(ledger.rest(), request=1, sequence=1, name=0, settings=room.settings)
            room.sequence, room.name = room.sequence + room.later_sequences, room.name + room.later_names
            room.later_sequences = room.later_names = 0
        self._next_request, self._later_requests = self._next_request + self._later_requests, 0
        self._run = run = _Run(frozenset(starts))
        for order in orders:
            prompt = order.command.args.get("prompt")
            if isinstance(prompt, Prompt):
                run.promised.setdefault(str(order.command.args["room"]), []).extend(_sequences(order, prompt))
        self._note_change(named)
        return orders, starts, run

    def _read(self, batches: Iterator[list[object]], run: _Run, generation: int) -> str:
        """Take what a burst says. Why it went wrong, or ""."""
        try:
            for batch in batches:
                for message in batch:
                    self._take(message, generation)
                if run.stop:
                    batches.close()
        except Exception as error:
            return sentence_of(error)
        return "" if run.ready else "The burst ended before the engine was there."

    def _end(self, run: _Run, fault: str) -> None:
        """Whoever is still in hand has ended, in the records too."""
        self._run = None
        for name in run.rooms & self._ledgers.keys():
            ledger, room = self._ledgers[name], self._rooms[name]
            said = fault or "The burst ended before its requests did."
            if ledger.alive:
                ledger.rest(said)
                ledger.sentence = said
            for seq_id in run.promised.get(name, ()):
                ledger.finished.setdefault(seq_id, FinishReason.ERROR)
            if ledger.report is not None and run.ready:
                room.settings = ledger.report.config
            if fault:
                ledger.sentence = fault
        self._note_change(run.rooms)

    def _note_change(self, rooms) -> None:
        self.version += 1
        for name in rooms & self._ledgers.keys():
            self._ledgers[name].version += 1
        self._changed.notify_all()

    # ---- its messages ----

    def _take_state(self, message: Progress | Ready | Died) -> None:
        if self._state != "ready":
            super()._take_state(message)
            if self._state == "ready":
                self._rooms = {name: self._rooms.get(name) or _Room(self.config) for name in self._ledgers}
        elif isinstance(message, Ready) and self._run is not None:
            self._run.ready, self.meta = True, message.meta
            for name in self._run.rooms & self._ledgers.keys():
                self._ledgers[name].store.apply(TraceDelta(meta=message.meta))
        elif isinstance(message, Died) and self._run is not None:
            tell(message.detail)
            self._run.fault = message.sentence

    def _take_report(self, report: Report) -> None:
        if report.room in self._ledgers:  # it may have been closed meanwhile
            super()._take_report(report)

    def _take_answer(self, answer: Answer) -> None:
        """Who asked has his answer already; a refusal is told to the room."""
        room = self._asked.pop(answer.number, None)
        if answer.error is not None and room in self._ledgers:
            self._ledgers[room].sentence = answer.error.sentence
            self._ledgers[room].version += 1

    # ---- what can be asked for ----

    @property
    def burst(self) -> str | None:
        return "running" if self._run is not None else "wanted" if self._orders else "idle"

    def config_of(self, room: str = "main") -> EngineConfig:
        ledger = self._ledger(room)
        running = self._run is not None and room in self._run.rooms and ledger.report is not None
        return ledger.report.config if running else self._rooms[room].settings

    def status(self, room: str = "main") -> Status:
        ledger, run = self._ledgers.get(room), self._run
        if self._state != "ready" or ledger is None:
            return super().status(room)
        if run is not None and room in run.rooms:
            return super().status(room) if run.ready else Status("running", progress=WAITING, sentence=ledger.sentence)
        queued = tuple(letters(o.name) for o in self._orders if o.command.name == "add" and o.command.args["room"] == room)
        return Status("idle", waiting=queued, sentence=ledger.sentence)

    def ask(self, name: str, /, **args: object) -> object:
        if self._state != "ready":
            return super().ask(name, **args)  # refuses
        act = getattr(self, f"_do_{name}", None)
        if act is None:
            sentence = "Here a GPU is lent for a short burst at a time: it cannot be paused or slowed. Look back with the arrows instead."
            raise EngineError("not_in_bursts", sentence)
        with self._changed:
            room = args.get("room", args.get("name") if name == "close_room" else None)
            if room is not None:
                self._ledger(str(room))
            answer = act(**args)
            self._note_change({str(room or args.get("name", ""))})
        return answer

    def _do_add(self, room: str, prompt: Prompt) -> tuple[int, str, tuple[int, ...]]:
        self._check(room, prompt)
        order = self._order(Command(next(self._numbers), "add", {"room": room, "prompt": prompt}), [prompt], 1)
        return order.request, letters(order.name), tuple(_sequences(order, prompt))

    def _check(self, room: str, prompt: Prompt) -> None:
        """Refuse now what a burst would refuse."""
        config = self._rooms[room].settings
        page_size, length = config.cache.page_size, int(self.config.max_model_len or 0)
        pages = min(config.cache.num_pages or length, -(-length // page_size))
        pool = PagePool(Arena(pages).lease(room, pages), page_size, room.encode())
        scheduler = Scheduler(replace(config, max_model_len=length), pool, lambda request: None, room, RowSlots())
        scheduler.check_fits(Request(0, "", prompt.prompt, prompt.token_ids, replace(prompt.sampling, seed=0), room))

    def _do_workload(self, room: str, prompts: tuple[Prompt, ...], knobs: Mapping[str, object]) -> None:
        config = self.config_of(room)
        for knob, value in knobs.items():
            config = with_knob(config, knob, value)
        lines = sorted(prompts, key=lambda p: p.after_steps)
        at_once = sum(line.after_steps <= 0 for line in lines) or min(len(lines), 1)
        self._order(Command(next(self._numbers), "workload", {"room": room, "prompts": prompts, "knobs": dict(knobs)}), lines, at_once)

    def _do_job(self, name: str, args: Mapping[str, object], room: str = "main") -> int:
        order = self._order(Command(next(self._numbers), "job", {"name": name, "args": args, "room": room}), [], 0)
        self._later_requests += RESERVED_FOR_A_JOB
        return order.command.number

    def _order(self, command: Command, lines: list[Prompt], at_once: int) -> Order:
        """Queue a command with the numbers of its requests: those that it makes at once, and later ones after everybody's."""
        room_name = str(command.args["room"])
        room = self._rooms[room_name]
        order = Order(command, self._next_request, room.sequence, room.name)
        self._next_request, room.name = self._next_request + at_once, room.name + at_once
        room.sequence += sum(line.sampling.n for line in lines[:at_once])
        self._later_requests += len(lines) - at_once
        room.later_names += len(lines) - at_once
        room.later_sequences += sum(line.sampling.n for line in lines[at_once:])
        self._asked[command.number] = room_name
        self._orders.append(order)
        return order

    def _do_abort(self, room: str, request_id: int | None) -> bool:
        """Nobody reaches a burst that runs; one that runs for this room alone can be ended as a whole."""
        mine = [o for o in self._orders if o.command.args["room"] == room and request_id in (None, o.request)]
        self._withdraw(mine)
        for order in mine:
            if isinstance(order.command.args.get("prompt"), Prompt):
                done = dict.fromkeys(_sequences(order, order.command.args["prompt"]), FinishReason.ABORT)
                self._ledgers[room].finished.update(done)
        run = self._run
        if mine or run is None or room not in run.rooms:
            return bool(mine)
        if request_id is not None or run.rooms != {room}:
            raise EngineError("burst_running", "A burst is under way and cannot be changed. It ends by itself within a minute.")
        run.stop = "The burst was stopped."
        return True

    def _do_cancel_job(self) -> bool:
        jobs = [o for o in self._orders if o.command.name == "job"]
        self._withdraw(jobs)
        return bool(jobs)

    def _withdraw(self, orders: list[Order]) -> None:
        self._orders = [o for o in self._orders if o not in orders]
        if not self._orders:
            self._lent = None  # who lent a GPU for them does not pay for the next

    def _do_is_idle(self, room: str) -> bool:
        waits = any(o.command.args["room"] == room for o in self._orders)
        return not waits and (self._run is None or room not in self._run.rooms)

    def _do_play(self, room: str) -> None:
        """A burst starts by itself as soon as something waits."""

    def _do_knobs(self, knobs: Mapping[str, object], room: str = "main") -> dict[str, object]:
        if self._run is not None:
            raise EngineError("burst_running", "A burst is under way and cannot be changed. It ends by itself within a minute.")
        config = self.config_of(room)
        for name, value in knobs.items():
            config = with_knob(config, name, value)
        self._rooms[room].settings = config
        self.config = config if room == "main" else with_wide_parts(self.config, config)
        for other in self._rooms.values():
            other.settings = with_wide_parts(other.settings, config)
        return knob_values(config)

    def _do_open_room(self, name: str, knobs: Mapping[str, object]) -> None:
        if name in self._ledgers:
            raise EngineError("room_exists", f"There is a room called “{name}” already; enter it or choose another name.", name=name)
        limit = self.config.max_rooms
        if len(self._ledgers) >= limit:
            raise EngineError("no_room", f"All {limit} rooms are taken. Wait until one closes.", limit=limit)
        self._rooms[name] = _Room(with_room_knobs(with_wide_parts(self._born, self.config), knobs))
        self._ledgers[name] = self._new_ledger()

    def _do_close_room(self, name: str) -> None:
        with contextlib.suppress(EngineError):  # a burst that runs for others as well goes on
            self._do_abort(name, None)
        del self._ledgers[name], self._rooms[name]


def _sequences(order: Order, prompt: Prompt) -> range:
    return range(order.sequence, order.sequence + prompt.sampling.n)


def sentence_of(error: BaseException) -> str:
    """Why a burst could not be had. Gradio's errors, which ZeroGPU raises, have a message that may be HTML."""
    said = re.sub(r"<[^>]*>", "", str(getattr(error, "message", None) or error))
    if said.strip() == "GPU task aborted":
        return "The GPU was taken back before the burst had ended. What was waiting can be sent again."
    said = " ".join(said.split()).partition(" Try re-running outside of examples")[0]  # there are none here
    return f"There was no burst: {reason_of(RuntimeError(said))}."
