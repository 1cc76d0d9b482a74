"""Many rooms and many viewers on one public server: latency, memory, and whether anybody's tokens changed.

    python -m benchmarks.rooms [--seconds 600] [--rooms 20] [--viewers 50] [--model FOLDER] [--json FILE]

`python app.py --public` runs in a process of its own. Every room has a host who sends seeded prompts at a speaker's
pace; the other viewers watch by link. Clients are sockets that return a credit after each frame, as a browser does; they
share this machine's cores with the server. Afterwards each prompt is run alone, in a room that is alone, and the tokens
are compared; then every room is left to end, and as many are opened again as there were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import torch
from websockets.asyncio.client import connect

from benchmarks.browser import app, free_port
from benchmarks.report import Report, main
from benchmarks.stage import tiny_model
from engine.build import device_name
from engine.recording import decode as decode_recording
from viz.stage.codec import decode

PROMPTS = tuple(
    {"text": text, "seed": seed, "temperature": 0.8, "max_tokens": 40, "chat": False}
    for seed, text in enumerate(("Tell me about rain.", "A cat reads a book.", "Count to ten.", "Why is the sky blue?", "Name a bird."), 11)
)
ROUND_S = 12.0  # two prompts a round stay below the page's limit of prompts a minute
PACE = 4  # steps a second, as a speaker plays them
IDLE_MINUTES = 0.4
WARM_UP = 0.2  # of the time


class Client:
    """One tab. `latencies`: milliseconds from the server's stamp to arrival."""

    def __init__(self, address: str, number: int) -> None:
        self.address, self.number = address, number
        self.latencies: list[tuple[float, float]] = []
        self.known: dict[str, object] = {}
        self.problems: list[str] = []
        self._waiting: dict[int, asyncio.Future] = {}
        self._asked = 0
        self._open = asyncio.Event()

    async def run(self, **hello: str) -> None:
        where = urlsplit(self.address)
        headers = {"X-Forwarded-For": f"198.51.100.{self.number % 250}"}  # each its own visitor
        panels = [{"view": name, "w": 620, "h": 480} for name in ("blocks", "batching")]
        async with connect(f"ws://{where.netloc}/glass/ws", max_size=None, additional_headers=headers) as self.ws:
            await self.say(t="hello", credit=2, person=secrets.token_hex(18), panels=panels, **hello)
            async for message in self.ws:
                await self._take(message)

    async def _take(self, message: bytes) -> None:
        header, _ = decode(message)
        kind = header["t"]
        if kind == "frames":
            self.latencies.append((time.monotonic(), time.time() * 1000 - header["stamp"]))
            self.known |= header
            self.problems += [str(header["fault"])] if "fault" in header else []
            await self.say(t="drawn")
        elif kind == "ping":
            await self.say(t="pong")
        elif kind == "reply":
            self._waiting.pop(header["id"]).set_result(header["result"])
        elif kind in ("welcome", "moved"):
            self.known |= header
            self._open.set()
        elif kind == "error":
            self.problems.append(str(header["sentence"]))

    async def say(self, **message: object) -> None:
        await self.ws.send(json.dumps(message))

    async def ask(self, name: str, /, **args: object) -> dict:
        await asyncio.wait_for(self._open.wait(), 30)
        self._asked += 1
        answer = self._waiting[self._asked] = asyncio.get_running_loop().create_future()
        await self.say(t="command", id=self._asked, name=name, args=args)
        reply = await asyncio.wait_for(answer, 60)
        if not reply.get("ok"):
            self.problems.append(str(reply.get("sentence")))
        return reply

    async def tokens(self) -> dict[tuple[str, int], list[list[int]]]:
        """(prompt, seed) → the tokens of every finished sequence of it in the room's recording."""
        url = f"{self.address}glass/recording?viewer={self.known['viewer']}"
        content = await asyncio.to_thread(saved, url)
        trace = await asyncio.to_thread(decode_recording, content)
        ended, found = set(trace.finishes["seq_id"].tolist()), {}
        for seq_id, info in trace.sequences.items():
            if seq_id in ended:
                found.setdefault((info.prompt, info.seed), []).append(trace.tokens_of(seq_id)["token_id"].tolist())
        return found


def saved(url: str, patience: float = 60.0) -> bytes:
    """A room's recording. One is made at a time on the server; who comes meanwhile is asked to come again."""
    end = time.monotonic() + patience
    while True:
        try:
            return urllib.request.urlopen(url).read()
        except urllib.error.HTTPError as error:
            if error.code != 409 or time.monotonic() > end:
                raise
            time.sleep(0.5)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.1)
    return bool(condition())


def is_quiet(client: Client) -> bool:
    status = client.known.get("status") or {}
    return not status.get("running") and not status.get("queued")


class Host(Client):
    """Opens a room and keeps it busy until `end`. `outcomes`: what its prompts gave, by prompt."""

    def __init__(self, address: str, number: int, end: float) -> None:
        super().__init__(address, number)
        self.end = end
        self.outcomes: list[tuple[tuple[str, int], list[int]]] = []

    async def work(self) -> None:
        chance = random.Random(self.number)
        await self.ask("prompt", **PROMPTS[self.number % len(PROMPTS)])
        await until(lambda: self.known.get("people"))
        await self.ask("pace", value=PACE)
        while time.monotonic() < self.end:
            began = time.monotonic()
            for prompt in chance.sample(PROMPTS, 2):
                await self.ask("prompt", **prompt)
                await asyncio.sleep(chance.random())
            await asyncio.sleep(max(ROUND_S - (time.monotonic() - began), 0))
        await self.ask("pace", value=None)
        await until(lambda: is_quiet(self))
        for key, runs in (await self.tokens()).items():
            self.outcomes += [(key, run) for run in runs]


def processes(port: int) -> list[int]:
    """The server and its children."""
    parents, found = {}, []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                str(port) in (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:20]
                and "app.py" in (entry / "cmdline").read_text()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found + [child for child, parent in parents.items() if parent in found and child not in found]


def rss_mb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/status").read_text()
        total += int(text.split("VmRSS:")[1].split()[0])
    return total / 1024


async def alone(address: str) -> dict[tuple[str, int], list[int]]:
    """Every prompt by itself, in a room that is alone."""
    client = Client(address, 200)
    task = asyncio.create_task(client.run())
    found = {}
    await until(client._open.is_set)
    for prompt in PROMPTS:
        await client.ask("prompt", **prompt)
        await until(lambda: client.known.get("people"))
        await asyncio.sleep(0.5)
        await until(lambda: is_quiet(client))
    for key, runs in (await client.tokens()).items():
        found[key] = runs[-1]
    task.cancel()
    return found


async def load(address: str, port: int, args: argparse.Namespace) -> dict[str, object]:
    end = time.monotonic() + args.seconds
    hosts = [Host(address, i, end) for i in range(args.rooms)]
    tasks = [asyncio.create_task(h.run()) for h in hosts]
    await asyncio.gather(*(asyncio.wait_for(h._open.wait(), 60) for h in hosts))
    work = [asyncio.create_task(h.work()) for h in hosts]
    await until(lambda: all(h.known.get("people") for h in hosts), 120)
    watchers = [Client(address, 100 + i) for i in range(args.viewers - args.rooms)]
    for i, watcher in enumerate(watchers):
        people = hosts[i % args.rooms].known["people"]
        tasks.append(asyncio.create_task(watcher.run(room=people["room"], join=people["links"]["watch"])))
    began, samples = time.monotonic(), []
    pids = processes(port)
    while time.monotonic() < end:
        await asyncio.sleep(2)
        samples.append((time.monotonic(), rss_mb(pids)))
    await asyncio.gather(*work)
    people = [h.known["people"] for h in hosts]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    warm = began + WARM_UP * args.seconds
    late = [ms for c in (*hosts, *watchers) for at, ms in c.latencies if warm <= at <= end]
    memory = [mb for at, mb in samples if at >= warm]
    return {
        "latencies": sorted(late), "memory": memory, "outcomes": [o for h in hosts for o in h.outcomes],
        "problems": [p for c in (*hosts, *watchers) for p in c.problems], "rooms": len({p["room"] for p in people}),
    }  # fmt: skip


async def reopened(address: str, rooms: int) -> int:
    """How many rooms can be opened at once."""
    clients = [Client(address, i) for i in range(rooms)]
    tasks = [asyncio.create_task(c.run()) for c in clients]
    await asyncio.gather(*(asyncio.wait_for(c._open.wait(), 60) for c in clients))
    replies = await asyncio.gather(*(c.ask("prompt", **PROMPTS[0]) for c in clients))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return sum(bool(r.get("ok")) for r in replies)


async def loaded(address: str) -> None:
    """Until a visitor would be given a room."""
    client = Client(address, 240)
    task = asyncio.create_task(client.run())
    ready: Callable[[], object] = lambda: ((client.known.get("status") or {}).get("engine") or {}).get("state") == "idle"  # noqa: E731
    assert await until(ready, 300), "the model was not loaded"
    task.cancel()


def once(work: Callable[..., Awaitable], *args: object) -> object:
    return asyncio.run(work(*args))


def rooms(report: Report, args: argparse.Namespace) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", args.model or str(tiny_model(Path(folder)))] if args.model != "default" else []
        flags = ["--public", "--rooms", str(args.rooms), "--room-minutes", str(IDLE_MINUTES), "--proxies", "1", "--dtype", "float32"]
        with app([*model, *flags, "--device", args.device], port=port) as address:
            once(loaded, address)
            found = once(load, address, port, args)
            late = found["latencies"]
            print(f"p95 {late[int(0.95 * (len(late) - 1))]:.1f} ms, now the tokens and what is left", flush=True)
            time.sleep(60 * IDLE_MINUTES * 1.5 + 6)
            solo = once(alone, address)
            time.sleep(60 * IDLE_MINUTES * 1.5 + 6)
            again = once(reopened, address, args.rooms)
    for problem in found["problems"][:5]:
        print("  a client was told:", problem)
    wrong = sum(tokens != solo.get(key) for key, tokens in found["outcomes"] if key in solo)
    late, memory = found["latencies"], found["memory"]
    note = f"{found['rooms']} rooms at {PACE} steps/s, {args.viewers} viewers with two views each, {args.seconds:g} s, clients on the same cores"
    half = max(len(memory) // 4, 1)
    growth = sum(memory[-half:]) / half - sum(memory[:half]) / half
    report.add(
        "rooms_frame_p95_ms",
        [late[int(0.95 * (len(late) - 1))]],
        "ms",
        higher_is_better=False,
        target=300,
        note=f"{note}; {len(late):,} frames",
    )
    report.add("rooms_frame_median_ms", [late[len(late) // 2]], "ms", higher_is_better=False, note=note)
    report.add("rooms_frames_per_s", [len(late) / (args.seconds * (1 - WARM_UP))], "1/s", note=note)
    report.add("rooms_rss_growth_mb", [growth], "MB", higher_is_better=False, note=f"{note}; from {memory[0]:.0f} MB after warm-up")
    report.add(
        "rooms_token_mismatches", [wrong], "requests", higher_is_better=False, target=0,
        note=f"of {len(found['outcomes'])} finished requests against the same prompt and seed alone, float32",
    )  # fmt: skip
    report.add(
        "rooms_left", [args.rooms - again], "rooms", higher_is_better=False, target=0, note="after the idle time, by opening them all again"
    )
    report.add("rooms_pages_back", [again / args.rooms], "share", target=1.0, note=f"{again} of {args.rooms} leases could be taken again")
    report.add(
        "rooms_problems",
        [len(found["problems"])],
        "sentences",
        higher_is_better=False,
        target=0,
        note="refusals and errors that clients got",
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rooms", type=int, default=20)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--model", help='checkpoint folder, or "default"; without it a tiny random model')


if __name__ == "__main__":
    device = lambda args: device_name(torch.device("cuda" if args.device == "cuda" else "cpu"))  # noqa: E731
    raise SystemExit(main("rooms", {"rooms": rooms}, device, options))
