"""What every benchmark prints and keeps: one row a result, written to disk as soon as it is known.

`benchmarks/results/<device>/<benchmark>.json` holds {"device", "versions", "commit", "date", "command",
"results": [{"name", "value", "unit", "higher_is_better", "target", "runs", "peers", "note"}]}; a run of some
results keeps the others.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from engine.build import commit, versions

RESULTS = Path(__file__).parent / "results"


class Report:
    """Collects results of one benchmark.

    Args:
        benchmark: the module's name.
        device: what it ran on.
        path: where to write; None: benchmarks/results/<device>/<benchmark>.json.
    """

    def __init__(self, benchmark: str, device: str, path: Path | None = None) -> None:
        self.device = device
        self.path = path or RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") / f"{benchmark}.json"
        self.results: dict[str, dict] = {}
        if self.path.exists():
            self.results = {r["name"]: r for r in json.loads(self.path.read_text())["results"]}

    def add(
        self,
        name: str,
        runs: Sequence[float],
        unit: str,
        *,
        higher_is_better: bool = True,
        target: float | None = None,
        peers: Mapping[str, float] | None = None,
        note: str = "",
    ) -> float:
        """Keep the median of `runs`, print it, write the file."""
        value = statistics.median(runs)
        self.results[name] = {
            "name": name,
            "value": round(value, 4),
            "unit": unit,
            "higher_is_better": higher_is_better,
            "target": target,
            "runs": [round(r, 4) for r in runs],
            "peers": {k: round(v, 4) for k, v in (peers or {}).items()},
            "note": note,
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        met = "" if target is None else "met" if (value >= target) == higher_is_better or value == target else "MISSED"
        spread = f"({min(runs):.4g} … {max(runs):.4g}, {len(runs)} runs)" if len(runs) > 1 else ""
        wanted = "" if target is None else f"target {'≥' if higher_is_better else '≤'} {target:g} {met}"
        print(f"{name:32s} {value:12.4g} {unit:10s} {spread:34s} {wanted} {peers or ''}", flush=True)
        self._write()
        return value

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = {"device": self.device, "versions": versions(), "commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        command = "python -m " + " ".join([Path(sys.argv[0]).parent.name + "." + Path(sys.argv[0]).stem, *sys.argv[1:]])
        text = json.dumps(
            {**head, "command": command, "results": list(self.results.values())}, indent=1, ensure_ascii=False, allow_nan=False
        )
        self.path.write_text(text + "\n")


def main(
    benchmark: str,
    items: Mapping[str, Callable[[Report, argparse.Namespace], None]],
    device: Callable[[argparse.Namespace], str],
    extra=None,
) -> int:
    """The command line of every benchmark: [--only NAME] [--device cuda|cpu] [--json FILE]."""
    p = argparse.ArgumentParser(prog=f"python -m benchmarks.{benchmark}")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--only", action="append", choices=sorted(items), help="run these items")
    p.add_argument("--json", nargs="?", const="", metavar="FILE", help="where to write (without FILE: benchmarks/results/)")
    if extra:
        extra(p)
    args = p.parse_args()
    report = Report(benchmark, device(args), Path(args.json) if args.json else None)
    for name, item in items.items():
        if not args.only or name in args.only:
            item(report, args)
    return 0
