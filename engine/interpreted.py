"""Traced kernels without a GPU: a child process runs them in Triton's interpreter.

The interpreter must be chosen before triton is imported (TRITON_INTERPRET), so it cannot run in the engine's own process.
`python -m engine.interpreted` reads requests from its standard input and answers on its standard output: eight bytes of
length, then tensors in safetensors, the rest as JSON in their metadata; nothing that could execute code. One child is
kept for the next request, since importing torch and triton takes seconds; it ends when nobody asks for IDLE_S, when
the engine's process ends, or when a request is cancelled. A request that takes longer than its limit ends it too.

float32 and float16 only: the interpreter gets bfloat16 matmuls wrong. Rejected: multiprocessing (pickle, and a forked
child would have triton imported already).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack

from engine.errors import EngineError

IDLE_S = 120
MAX_FRAME = 256 * 2**20
ROOT = Path(__file__).resolve().parent.parent
Message = tuple[Mapping[str, object], Mapping[str, np.ndarray]]  # (plain values, arrays)


# ---- frames ----


def write_frame(file: BinaryIO, values: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    data = pack({name: np.ascontiguousarray(a) for name, a in arrays.items()}, {"values": json.dumps(values)})
    file.write(len(data).to_bytes(8, "little"))
    file.write(data)
    file.flush()


def read_frame(file: BinaryIO) -> Message | None:
    """None at the end of the stream. Raises ValueError for what is no frame."""
    head = file.read(8)
    if len(head) < 8:
        return None
    length = int.from_bytes(head, "little")
    if not 8 <= length <= MAX_FRAME:
        raise ValueError(f"a frame of {length:,} bytes")
    data = file.read(length)
    if len(data) < length:
        return None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["values"]), unpack(data)


# ---- the engine's side ----


class Run:
    """A request under way. `wait()` says whether it is over; `cancel()` ends it and the child."""

    def __init__(self, child: subprocess.Popen, values: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
        self._child = child
        self._answer: Message | None = None
        self._over = threading.Event()
        threading.Thread(target=self._talk, args=(values, arrays), daemon=True, name="interpreter").start()

    def _talk(self, values: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the child is gone: there is no answer
            write_frame(self._child.stdin, values, arrays)
            self._answer = read_frame(self._child.stdout)
        self._over.set()

    def wait(self, seconds: float) -> bool:
        return self._over.wait(seconds)

    def result(self) -> Message:
        """Once it is over. Raises EngineError "interpreter_failed"."""
        if self._answer is None:
            raise EngineError("interpreter_failed", "Triton's interpreter stopped before it was done. Try fewer or larger tiles.")
        values, arrays = self._answer
        if "error" in values:
            raise EngineError("interpreter_failed", f"The kernel could not be run in Triton's interpreter: {values['error']}.")
        return values, arrays

    def cancel(self) -> None:
        _end(self._child)


class Interpreter:
    """The child, started when it is first needed. One request at a time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None

    def run(self, values: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> Run:
        """Send a request; `values["limit_s"]` bounds its time."""
        if self._child is None or self._child.poll() is not None:
            self._child = self._start()
        return Run(self._child, values, arrays)

    def _start(self) -> subprocess.Popen:
        paths = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
        child = subprocess.Popen(
            [sys.executable, "-m", "engine.interpreted"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )
        weakref.finalize(self, _end, child)  # also when the interpreter of Python ends
        return child


def _end(child: subprocess.Popen) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()


# ---- the child's side ----


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before triton is imported"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when it ends
    os.nice(5)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not stand between the answers
    import torch

    torch.set_num_threads(1)
    while select.select([0], [], [], IDLE_S)[0]:
        request = read_frame(sys.stdin.buffer)
        if request is None:
            return
        signal.alarm(int(request[0]["limit_s"]))
        try:
            values, arrays = {}, answer(*request)
        except Exception as error:
            values, arrays = {"error": f"{type(error).__name__}: {error}"[:500]}, {}
        signal.alarm(0)
        write_frame(answers, values, arrays)


def answer(values: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Trace one launch: engine/traced.py's Operands and choices in, the arrays of the row's logs and "out" back."""
    import torch

    from engine.traced import Operands, arrays_of, plan, trace

    tensors = {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}
    numbers = {name: values[name] for name in ("scale", "window", "softcap")}
    it = Operands(**tensors, queries=tuple(values["queries"]), keys=tuple(values["keys"]), **numbers)
    blocks = plan(values["kernel"], it, **values["choice"])
    out, log, accs = trace(it, blocks, *values["row"])
    return {"out": out.numpy(), **arrays_of(log, accs)}


if __name__ == "__main__":
    main()
