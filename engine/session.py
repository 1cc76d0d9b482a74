"""Session: the engine as the page and the command line hold it. Commands in, records out; never a tensor.

The core runs in a thread of this process or in a process of its own behind the same methods. Everything a
caller may touch here is plain data: prompts are tokenised on this side, refusals come back as EngineError,
records arrive as TraceDeltas and are kept in one Ledger a room. If the core dies, all rooms' records stay, the
requests that it took with it end with a sentence, and restart() begins a new one in which every room is open again
and whose step, sequence and request numbers go on.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import multiprocessing
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from engine.config import EngineConfig, with_wide_parts
from engine.errors import EngineError, reason_of, tell
from engine.ledger import Ledger, Start
from engine.loop import Loop
from engine.messages import Answer, Closed, Command, Died, Progress, Prompt, Ready, Report
from engine.request import FinishReason, SamplingParams
from engine.rooms import unknown_room
from engine.tokenizer import TextTokenizer
from engine.trace import Trace
from engine.workloads import Workload

ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Handle:
    """A request that was taken."""

    request_id: int
    name: str
    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """What the page shows besides the trace."""

    state: str  # "loading", "running", "paused", "idle", "dead"; "closed": there is no such room
    pace: float | None = None
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    progress: Progress | None = None
    sentence: str = ""  # why it is dead, or what just went wrong


Starts = Mapping[str, Start] | None  # the rooms to open again; None: a first start


def _serve(config: EngineConfig, starts: Starts, receive: Callable[[float], object], send: Callable[[object], None]) -> None:
    """Build a core and run its loop. The body of the thread or the child process."""
    from engine.build import build_core, facts  # torch is imported here, not by whoever holds a Session
    from engine.models.loading import advised

    # What is imported lives as long as the process. A full collection that walks it stops page and engine for half a second.
    gc.collect()
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)  # a process that ends takes down everything
    try:
        core, loaded = build_core(config, lambda fraction, text: send(Progress(fraction, text)))
        reopen(core, starts)
        send(Ready(core.config, loaded.folder, facts(core, loaded), tuple(core.rooms)))
    except EngineError as error:
        send(Died(advised(error, config.source.model).sentence))
        return
    except MemoryError:
        send(Died("The engine could not start: there is not enough memory for this model. Close other programs or use a smaller one."))
        return
    except Exception as error:
        send(Died(f"The engine could not start: {reason_of(error)}.", traceback.format_exc()))
        return
    Loop(core, receive, send).run()


def reopen(core, starts: Starts) -> None:
    """Open the rooms that a dead core had, with their knobs and numbers. One that does not fit any more stays closed."""
    if starts is None:
        return
    if "main" not in starts and starts:
        core.close_room("main")
    for name, start in starts.items():
        with contextlib.suppress(EngineError):
            if name != "main":
                core.open_room(name, start.settings)
            core.begin_at(start, name)
            if name == "main" and start.settings is not None:
                core.reconfigure(start.settings)


def _serve_process(config: EngineConfig, starts: Starts, inbox, outbox) -> None:
    """The child process. It ends when its parent is gone, however that happened: it must not keep a GPU."""
    parent, looked = multiprocessing.parent_process(), time.monotonic()

    def receive(timeout: float) -> object:
        nonlocal looked
        try:
            return _get(inbox, timeout)
        except queue.Empty:
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                if not parent.is_alive():
                    outbox.cancel_join_thread()  # nobody reads any more; a last message must arrive otherwise
                    return None
            raise

    _serve(config, starts, receive, outbox.put)


def _get(inbox, timeout: float):
    return inbox.get_nowait() if timeout <= 0 else inbox.get(timeout=timeout)


class Session:
    """One engine. `config` is the room main's, with everything engine-wide; config_of() is any room's.

    Args:
        config: need not be resolved.
        own_process: run the core in a process of its own; None: on a GPU yes, on a CPU no.
    """

    def __init__(self, config: EngineConfig, *, own_process: bool | None = None) -> None:
        self.config = config
        self.meta: Mapping[str, object] = {}
        self._own_process = own_process
        self._tokenizer: TextTokenizer | None = None
        self._born = config
        self._ledgers: dict[str, Ledger] = {}
        self._last_request = 0
        self._answers: dict[int, Future] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._progress: Progress | None = None
        self._sentence = ""
        self._state = "new"
        self._generation = 0
        self._wide_version = 0
        self.version = 0  # grows with every message; version_of() with what concerns a room

    # ---- life ----

    def start(self) -> Session:
        """Begin loading; returns at once. `wait_ready` waits."""
        self._launch(None)
        return self

    def wait_ready(self, timeout: float = 600.0, progress: Callable[[Progress], None] | None = None) -> Session:
        """Wait for the model. Raises EngineError "engine_dead" with the reason if it cannot be loaded."""
        deadline, shown = time.monotonic() + timeout, None
        with self._changed:
            while self._state == "loading":
                if not self._changed.wait(min(0.5, max(deadline - time.monotonic(), 0))) and time.monotonic() >= deadline:
                    raise EngineError("load_timeout", f"The model was not ready after {timeout:.0f} seconds.", seconds=timeout)
                if progress and self._progress is not shown and self._progress is not None:
                    shown = self._progress
                    progress(shown)
        if self._state == "dead":
            raise EngineError("engine_dead", self._sentence)
        return self

    def close(self) -> None:
        """Stop the loop; records stay readable."""
        if self._state in ("new", "closed"):
            return
        self._state = "closed"
        self._inbox.put(None)
        if self._worker.is_alive():
            self._worker.join(10)
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    def restart(self) -> None:
        """A new core after the old one died; numbering goes on, records stay."""
        with self._changed:
            if self._state != "dead":
                return
            starts = {name: ledger.bury(self._sentence) for name, ledger in self._ledgers.items()} if self.meta else None
            if starts:
                beyond = max(self._last_request + 1, *(start.request for start in starts.values()))
                starts = {name: replace(start, request=beyond) for name, start in starts.items()}
            self._launch(starts)

    # ---- rooms ----

    @property
    def rooms(self) -> tuple[str, ...]:
        """Names of the rooms that are open; after a death, of those that restart() opens again."""
        with self._changed:
            return tuple(self._ledgers)

    def open_room(self, name: str, knobs: Mapping[str, object] | None = None) -> None:
        """Open a room with the knobs that the engine was started with, these changed.

        Raises EngineError: "no_room" (the limit or the pages do not allow another), "room_exists", "bad_room".
        """
        self.ask("open_room", name=name, knobs=dict(knobs or {}))

    def close_room(self, name: str) -> None:
        """End a room's requests and forget it; a Trace that somebody holds stays whole. Raises "unknown_room"."""
        if self._state == "dead":
            with self._changed:
                self._ledger(name)
                del self._ledgers[name]
            return
        self.ask("close_room", name=name)

    def config_of(self, room: str = "main") -> EngineConfig:
        """The knobs in force in a room. Raises EngineError "unknown_room"."""
        report = self._ledger(room).report
        return report.config if report else self.config

    def _ledger(self, room: str) -> Ledger:
        ledger = self._ledgers.get(room)
        if ledger is None:
            raise unknown_room(room)
        return ledger

    # ---- requests ----

    def prompt(
        self, text: str, sampling: SamplingParams, *, chat: bool = False, system: str = "", priority: int = 0, after_steps: int = 0
    ) -> Prompt:
        """Tokenise a prompt. Raises EngineError: "prompt_empty", "prompt_too_long", "bad_text"."""
        if not text.strip():
            raise EngineError("prompt_empty", "The prompt is empty; type at least one character.")
        tokenizer = self.tokenizer
        limit = int(self.config.max_model_len or 0)
        if limit and len(text) > 64 * limit:  # no token is that long: refuse before spending seconds on it
            raise EngineError(
                "prompt_too_long",
                f"The prompt has {len(text):,} characters; this model reads at most {limit - 1:,} tokens. Shorten it.",
                num_characters=len(text), limit=limit - 1,
            )  # fmt: skip
        if chat and tokenizer.has_chat_template:
            messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]
            _, ids = tokenizer.chat(messages)
        else:
            ids = tokenizer.encode(text)
        return Prompt(text, tuple(ids), sampling, priority, after_steps)

    def add(
        self, text: str, sampling: SamplingParams, *, room: str = "main", chat: bool = False, system: str = "", priority: int = 0
    ) -> Handle:
        """Queue a prompt. Raises EngineError when it is refused."""
        prompt = self.prompt(text, sampling, chat=chat, system=system, priority=priority)
        return self._queue(prompt, room)

    def add_ids(self, text: str, token_ids: Sequence[int], sampling: SamplingParams, *, room: str = "main", priority: int = 0) -> Handle:
        """Queue token ids as they are."""
        return self._queue(Prompt(text, tuple(token_ids), sampling, priority), room)

    def _queue(self, prompt: Prompt, room: str) -> Handle:
        vocab = (self.meta.get("model") or {}).get("vocab_size", 0)
        if vocab and prompt.token_ids and not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < vocab:
            raise EngineError("bad_token", f"Token ids must be from 0 to {vocab - 1:,}.", vocab_size=vocab)
        if self._state == "ready":
            ledger = self._ledger(room)
            ledger.sentence = ""  # what went wrong before is old news; not after the answer, the first step may have failed by then
            ledger.version += 1
        handle = Handle(*self.ask("add", room=room, prompt=prompt))
        self._last_request = max(self._last_request, handle.request_id)
        return handle

    def script(self, workload: Workload) -> tuple[Prompt, ...]:
        """A workload's prompts, tokenised."""
        return tuple(
            self.prompt(
                line.text, SamplingParams(line.max_tokens, line.temperature, n=line.n), chat=line.chat, system=line.system,
                priority=line.priority, after_steps=line.after_steps,
            )
            for line in workload.lines
        )  # fmt: skip

    def run_workload(self, workload: Workload, *, room: str = "main", with_knobs: bool = True) -> None:
        """End what runs in the room, set the workload's knobs (or leave them as they are), start its script."""
        self.ask("workload", room=room, prompts=self.script(workload), knobs=dict(workload.knobs) if with_knobs else {})

    def ask(self, name: str, /, **args: object) -> object:
        """Send a command and wait for its answer. Raises EngineError, also when the core is not there."""
        number, answer = next(self._numbers), Future()
        with self._changed:  # or it would be asked of an engine that has just died, and nobody would answer
            if self._state != "ready":
                sentence = self._sentence or ("The model is still loading." if self._state == "loading" else "The engine is not running.")
                raise EngineError("engine_not_ready", sentence, state=self._state)
            self._answers[number] = answer
            self._inbox.put(Command(number, name, args))
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            with self._changed:
                self._answers.pop(number, None)
            raise EngineError("no_answer", f"The engine did not answer within {ANSWER_S:.0f} seconds.", seconds=ANSWER_S) from None

    def wait(self, seq_ids: Sequence[int], timeout: float = 600.0, *, room: str = "main") -> dict[int, FinishReason]:
        """Wait until these sequences of a room have ended. Raises EngineError "engine_dead", "timeout", "unknown_room"."""
        deadline, ledger = time.monotonic() + timeout, self._ledger(room)
        with self._changed:
            while any(i not in ledger.finished for i in seq_ids):
                if self._state == "dead":
                    raise EngineError("engine_dead", self._sentence)
                if self._ledgers.get(room) is not ledger:
                    raise unknown_room(room)
                if not self._changed.wait(max(min(deadline - time.monotonic(), 1.0), 0)) and time.monotonic() >= deadline:
                    raise EngineError("timeout", f"The answer was not complete after {timeout:.0f} seconds.", seconds=timeout)
            return {i: ledger.finished[i] for i in seq_ids}

    def wait_idle(self, room: str = "main", timeout: float = 600.0) -> None:
        """Wait until the room has nothing left to do. Raises EngineError "engine_dead" or "timeout"."""
        deadline = time.monotonic() + timeout
        while not self.ask("is_idle", room=room):
            if time.monotonic() >= deadline:
                raise EngineError("timeout", f"The work was not done after {timeout:.0f} seconds.", seconds=timeout)
            with self._changed:
                self._changed.wait(0.2)

    # ---- what happened ----

    @property
    def tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            raise EngineError("engine_not_ready", self._sentence or "The model is still loading.", state=self._state)
        return self._tokenizer

    @property
    def alive(self) -> frozenset[int]:
        """Numbers of the requests, of all rooms, that were reported and have not ended."""
        with self._changed:
            return frozenset(i for ledger in self._ledgers.values() for i in ledger.alive.values())

    @property
    def burst(self) -> str | None:
        """Where the engine runs in bursts (engine/burst_session.py): "idle", "wanted" or "running". None: it is always there."""
        return None

    @property
    def is_ready(self) -> bool:
        return self._state == "ready"

    def version_of(self, room: str = "main") -> int:
        """Changes with what a viewer of the room can see: something of the room, or of the engine as a whole."""
        ledger = self._ledgers.get(room)
        return -1 - self._wide_version if ledger is None else self._wide_version + ledger.version

    def trace(self, room: str = "main") -> Trace:
        """The room's records; an empty Trace where there is no such room."""
        ledger = self._ledgers.get(room)
        return ledger.store.snapshot() if ledger else Trace(meta=self.meta)

    def status(self, room: str = "main") -> Status:
        if self._state != "ready":
            return Status(self._state, progress=self._progress, sentence=self._sentence)
        ledger = self._ledgers.get(room)
        if ledger is None:
            return Status("closed", sentence=unknown_room(room).sentence)
        report = ledger.report
        if report is None:
            return Status("idle", sentence=ledger.sentence)
        return Status(report.state, report.pace, ledger.names(report.waiting), ledger.names(report.running), report.job, ledger.sentence)

    # ---- inside: the worker and its messages ----

    def _launch(self, starts: Starts) -> None:
        self._state, self._sentence, self._process = "loading", "", None
        self._generation += 1
        self._wide_version += 1
        config = with_wide_parts(self._born, self.config)
        generation = self._generation
        own = self._own_process
        if own is None:
            own = self.config.source.device.startswith("cuda") or (self.config.source.device == "auto" and _has_gpu())
        if own:
            context = multiprocessing.get_context("spawn")
            self._inbox, outbox = context.Queue(), context.Queue()
            self._process = context.Process(
                target=_serve_process, args=(config, starts, self._inbox, outbox), daemon=True, name="engine-core"
            )
            self._process.start()
            body, args = self._read_process, (self._process, outbox, generation)
        else:
            self._inbox = inbox = queue.Queue()
            body, args = _serve, (config, starts, lambda timeout: _get(inbox, timeout), lambda message: self._take(message, generation))
        self._worker = threading.Thread(target=body, args=args, daemon=True, name="engine")
        self._worker.start()

    def _read_process(self, process, outbox, generation: int) -> None:
        while True:
            alive = process.is_alive()  # asked first: what it said last is in the queue by then
            try:
                self._take(outbox.get(timeout=0.5), generation)
            except queue.Empty:
                if not alive:
                    self._take(Died(f"The engine stopped: {_exit(process.exitcode)}."), generation)
                    return
                if self._state == "closed" or generation != self._generation:
                    return

    def _take(self, message: object, generation: int) -> None:
        """A message of the core, on the reader's thread."""
        if generation != self._generation or self._state == "closed":
            return
        with self._changed:
            self.version += 1
            if isinstance(message, Report):
                self._take_report(message)
            elif isinstance(message, Closed):
                self._ledgers.pop(message.room, None)
            elif isinstance(message, Answer):
                self._take_answer(message)
            else:
                self._wide_version += 1
                self._take_state(message)
            self._changed.notify_all()

    def _take_state(self, message: Progress | Ready | Died) -> None:
        """Something that concerns every room."""
        if isinstance(message, Progress):
            self._progress = message
        elif isinstance(message, Ready):
            self.config, self.meta = message.config, message.meta
            self._tokenizer = TextTokenizer.load(message.folder.path)
            self._ledgers = {name: self._ledgers.get(name) or self._new_ledger() for name in message.rooms}
            self._progress, self._state = None, "ready"
        elif isinstance(message, Died) and self._state != "dead":
            tell(message.detail)
            self._state, self._sentence = "dead", message.sentence
            for answer in self._answers.values():
                answer.set_exception(EngineError("engine_dead", message.sentence))
            self._answers.clear()

    def _take_report(self, report: Report) -> None:
        if report.room not in self._ledgers:
            self._ledgers[report.room] = self._new_ledger()
        self._ledgers[report.room].take(report)
        self.config = report.config if report.room == "main" else with_wide_parts(self.config, report.config)

    def _new_ledger(self) -> Ledger:
        return Ledger(self.config.trace_bytes, self._tokenizer.piece, self.meta, self.version)

    def _take_answer(self, answer: Answer) -> None:
        future = self._answers.pop(answer.number, None)
        if future is None:
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)


def _exit(code: int | None) -> str:
    """How a process ended. -9 is what Linux does to one that took too much memory."""
    return "its process was killed, perhaps for want of memory" if code == -9 else f"its process ended with exit code {code}"


def _has_gpu() -> bool:
    from torch import cuda

    return cuda.is_available()
