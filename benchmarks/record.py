"""Records the examples that ship: each preset, run as the page runs it, with the comparisons that chapters show of it.

    python -m benchmarks.record --out assets/recordings [--name h200] [--only PRESET] [--device cuda] [--model …]

A recording is a real run on this machine; its device, date and commit are in it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from engine.compare import last_requests
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.recording import save
from engine.session import Session
from engine.trace import Comparison, Trace
from engine.workloads import WORKLOADS
from viz.registry import load_chapters

PATIENCE_S = 180


def comparisons(preset: str) -> list[tuple[str, tuple]]:
    """(knob, values) of the beats that compare modes of a preset."""
    found = []
    for chapter in load_chapters().values():
        run = chapter.preset
        for beat in chapter.beats:
            run = beat.preset or run
            if beat.compare is not None and run == preset:
                found.append((beat.compare[0], tuple(beat.compare[1:])))
    return list(dict.fromkeys(found))


def record(session: Session, preset: str) -> Trace:
    """One preset in a room of its own, so that its numbers begin at zero."""
    session.open_room(preset)
    try:
        session.run_workload(WORKLOADS[preset], room=preset)
        session.wait_idle(preset)
        prompts, names = last_requests(session.trace(preset), -1)
        for knob, values in comparisons(preset):
            begun, before = time.monotonic(), _num_comparisons(session.trace(preset))
            args = {"knob": knob, "values": values, "prompts": prompts, "names": names}
            session.ask("job", room=preset, name="compare", args=args)
            while _num_comparisons(session.trace(preset)) == before:
                if time.monotonic() - begun > PATIENCE_S:
                    raise TimeoutError(f"{preset}: comparing {knob} took too long. {session.status(preset).sentence}")
                time.sleep(0.05)
        return session.trace(preset)
    finally:
        session.close_room(preset)


def _num_comparisons(trace: Trace) -> int:
    return sum(isinstance(a, Comparison) for a in trace.artifacts)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--name", default="h200", help="ends the file names")
    p.add_argument("--only", action="append", choices=sorted(WORKLOADS))
    p.add_argument("--model")
    p.add_argument("--device", default="auto")
    args = p.parse_args()
    session = Session(EngineConfig(ModelSource(args.model, args.device), CacheConfig(num_pages=96))).start().wait_ready(600)
    try:
        for preset in args.only or WORKLOADS:
            trace = record(session, preset)
            save(trace, args.out / f"{preset}-{args.name}.glass")
            print(f"{preset}: {len(trace)} steps, {_num_comparisons(trace)} comparisons", flush=True)
    finally:
        session.close()


if __name__ == "__main__":
    main()
