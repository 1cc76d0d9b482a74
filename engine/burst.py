"""The engine for the length of one call: where a GPU is lent, and there is no process to keep it in (ZeroGPU).

`burst()` is a synchronous generator: it builds a core in the process that the GPU is lent to, gives it the commands that
are waiting, drives the same Loop turn by turn and yields batches of the same messages that a thread or a process sends
(engine/session.py), until nothing is left to do or its time is nearly up. Arguments and batches are pickled on the way;
what was begun and not ended in time ends with a sentence. It raises nothing: what a worker raises arrives without
its words. Knows nothing of who lends the GPU. Rejected: commands that reach a running burst (there is no way in).
"""

from __future__ import annotations

import queue
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import EngineError, reason_of
from engine.ledger import Start
from engine.messages import Command, Died, Ready
from engine.session import reopen

BATCH_S = 1 / 30
HEARTBEAT_S = 0.25  # an empty batch: whoever iterates can stop us only when we yield


@dataclass(frozen=True, slots=True)
class Order:
    """A command that waits, and the numbers that were promised to the request that it makes."""

    command: Command
    request: int
    sequence: int
    name: int


def burst(config: EngineConfig, starts: Mapping[str, Start], orders: Sequence[Order], seconds: float) -> Iterator[list[object]]:
    """Batches of messages (engine/messages.py): Ready, then answers and reports; Died if it cannot go on.

    Args:
        config: the model's files are on this machine already.
        starts: the rooms that are concerned, and where their numbering begins.
        orders: every one is carried out before the first step.
        seconds: when they are over, counted from here, what still runs ends.
    """
    deadline = time.monotonic() + seconds
    from engine.build import build_core, facts  # torch comes with it: only where the device is
    from engine.loop import Loop

    try:
        core, loaded = build_core(config)
        reopen(core, starts)
        yield [Ready(core.config, loaded.folder, facts(core, loaded), tuple(core.rooms))]
    except EngineError as error:
        yield [Died(error.sentence)]
        return
    except Exception as error:
        yield [Died(f"The engine could not start: {reason_of(error)}.", traceback.format_exc())]
        return
    waiting, sent = deque(orders), []

    def receive(timeout: float) -> Command | None:
        if waiting:
            order = waiting.popleft()
            room = order.command.args.get("room")
            if room in core.rooms:
                core.number_from(room, order.request, order.sequence, order.name)
            return order.command
        if loop.is_idle:
            return None
        raise queue.Empty

    loop = Loop(core, receive, sent.append)
    yield from _batches(
        loop, sent, deadline, f"The burst's {seconds:.0f} seconds were over before this was done. Send it again for another burst."
    )


def _batches(loop, sent: list[object], deadline: float, late: str) -> Iterator[list[object]]:
    yielded, ended = 0.0, False
    for _ in loop.turns():
        now = time.monotonic()
        if now >= deadline and not ended:
            ended = True
            loop.end_all(late)
        if now - yielded >= (BATCH_S if sent else HEARTBEAT_S):
            yielded, batch = now, sent[:]
            sent.clear()
            yield batch
    if sent:
        yield sent[:]
