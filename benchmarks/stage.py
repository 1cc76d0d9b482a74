"""The stage in real Chromium: updates a second, latency, memory, and what watching costs the engine.

    python -m benchmarks.stage [--only ITEM] [--minutes 10]

`updates` and `heap` drive a tiny random model, so that the engine is never what limits them; `watched` runs the
default model. Engine, server and browser share this machine's cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.browser import app, free_port, page, say, wait_live
from benchmarks.report import Report, main
from engine.build import device_name

ENDLESS = {"max_tokens": 900, "chat": False}


def tiny_model(folder: Path) -> Path:
    from tests.conftest import make_tiny

    return make_tiny(folder)


def keep_busy(opened, count: int = 6) -> None:
    """Refill the batch so that steps never run out."""
    alive = opened.evaluate("(window.glass.stage.status.running || []).length + (window.glass.stage.status.queued || []).length")
    for i in range(count - alive):
        say(opened, "prompt", text=f"benchmark {i} " + "x" * (7 * i), **ENDLESS)


def updates(report: Report, args: argparse.Namespace) -> None:
    """Draws a second and latency with both views open, the engine at 60 steps a second."""
    with tempfile.TemporaryDirectory() as folder, app(["--model", str(tiny_model(Path(folder)))]) as address, page(address) as opened:
        wait_live(opened)
        say(opened, "pace", value=60)
        rates, p95s = [], []
        for _ in range(5):
            keep_busy(opened)
            opened.wait_for_timeout(1500)
            before = opened.evaluate("window.glass.stats.updates")
            opened.evaluate("window.glass.stats.latencies.length = 0")
            began = time.perf_counter()
            opened.wait_for_timeout(6000)
            rates.append((opened.evaluate("window.glass.stats.updates") - before) / (time.perf_counter() - began))
            latencies = sorted(opened.evaluate("window.glass.stats.latencies"))
            p95s.append(latencies[int(0.95 * (len(latencies) - 1))])
        report.add("stage_updates_per_s", rates, "1/s", target=20, note="blocks and batching open, 1280×720, engine paced at 60 steps/s")
        report.add(
            "stage_latency_p95_ms", p95s, "ms", higher_is_better=False, target=200, note="server stamp of the newest record to drawn"
        )


def heap(report: Report, args: argparse.Namespace) -> None:
    """JS heap after forced collections, over `--minutes` of running, after one minute of warm-up."""
    with tempfile.TemporaryDirectory() as folder, app(["--model", str(tiny_model(Path(folder)))]) as address, page(address) as opened:
        wait_live(opened)
        say(opened, "pace", value=30)
        session = opened.context.new_cdp_session(opened)

        def used() -> float:
            for _ in range(3):
                session.send("HeapProfiler.collectGarbage")
            return session.send("Runtime.getHeapUsage")["usedSize"] / 2**20

        samples = []
        for second in range(0, int(60 * (args.minutes + 1)), 15):
            keep_busy(opened)
            opened.wait_for_timeout(15_000)
            if second >= 45:
                samples.append(used())
                print(
                    f"  {second + 15} s: {samples[-1]:.2f} MB, {opened.evaluate('document.getElementsByTagName(`*`).length')} nodes",
                    flush=True,
                )
        tail = statistics.median(samples[-4:]) - statistics.median(samples[:4])
        report.add(
            "stage_heap_growth_mb", [tail], "MB", higher_is_better=False, target=5,
            note=f"{args.minutes:g} minutes after one of warm-up; median of the last four samples minus the first four",
        )  # fmt: skip


def watched(report: Report, args: argparse.Namespace) -> None:
    """Tokens a second of the default model: a page with both views open against nobody watching, alternating.

    App, engine thread and this benchmark share one process; Chromium is its own. Watched and headless differ only in
    whether the page is open.
    """
    import app as glass
    from engine.request import SamplingParams

    port = free_port()
    arguments = glass.parser().parse_args(["--port", str(port), "--no-own-process"])
    source = glass.source_of(arguments)
    session = source.base.session.wait_ready()
    glass.serve(source, arguments)
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)

    def rate() -> float:
        began = time.perf_counter()
        handles = [session.add(f"Write a long story about the number {i}.", sampling) for i in range(4)]
        session.wait([i for h in handles for i in h.seq_ids])
        return 4 * sampling.max_tokens / (time.perf_counter() - began)

    with page(f"http://localhost:{port}/") as opened:
        seen, alone = [], []
        for turn in range(6):
            for shown, runs in ((True, seen), (False, alone)) if turn % 2 else ((False, alone), (True, seen)):
                opened.goto(f"http://localhost:{port}/" if shown else "about:blank")
                opened.wait_for_timeout(5000)  # past the page's own start, and past the grace after it left
                runs.append(rate())
    report.add(
        "watched_vs_headless", [a / b for a, b in zip(seen, alone, strict=True)], "×", target=0.8,
        peers={"watched tok/s": statistics.median(seen), "headless tok/s": statistics.median(alone)},
        note="four requests at once, free run, both views open; engine, server and browser on the same cores",
    )  # fmt: skip


ITEMS = {"updates": updates, "watched": watched, "heap": heap}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10)


if __name__ == "__main__":
    raise SystemExit(main("stage", ITEMS, lambda args: device_name(torch.device("cpu")), options))
