"""Row slots: where the device keeps what it knows of a running sequence between steps.

One RowSlots serves every room of an engine, because the runner's persistent state (`last_token`) is one array:
two rooms with a row 1 each would overwrite each other's tokens in steps that run ahead. Row 0 is the sink.
"""

from __future__ import annotations

import heapq


class RowSlots:
    """Leases row numbers from 1 on, the lowest free one first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._used: set[int] = set()

    def take(self) -> int:
        row = heapq.heappop(self._free) if self._free else len(self._used) + 1
        self._used.add(row)
        return row

    def give_back(self, row: int) -> None:
        self._used.remove(row)
        heapq.heappush(self._free, row)

    def is_used(self, row: int) -> bool:
        return row in self._used
