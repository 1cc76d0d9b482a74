"""What ZeroGPU does to a function, without a GPU: each call is a forked worker, whose arguments and items are pickled.

As in the package of this name: only synchronous functions; the worker is killed when its time is over, which the caller
sees as a gradio.Error; an exception in it arrives as the name of its class; closing the generator stops the worker at its
next item. Beyond it, the caller's process must be clean at each call: no engine was built there, no CUDA was begun.

The folder FAKE_GPU holds "log" (a JSON line a call) and what a test wants to happen: "quota" (the call is refused), "die"
(the worker ends after so many items), "seconds" (its time) and "slow" (seconds before it begins).
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import multiprocessing
import os
import pickle
import sys
import threading
import time
from pathlib import Path

import gradio as gr
from gradio.context import LocalContext

FOLDER = Path(os.environ["FAKE_GPU"])
CONTEXT = multiprocessing.get_context("fork")


def GPU(task=None, *, duration=60):
    if task is None:
        return functools.partial(GPU, duration=duration)
    assert inspect.isgeneratorfunction(task), "only synchronous generators are faked"

    @functools.wraps(task)
    def called(*args):
        request = LocalContext.request.get(None)
        log = {"parent": os.getpid(), "visitor": request is not None, "dirt": _dirt(), "seconds": duration}
        if _wish("quota"):
            raise gr.Error("You have exceeded your <b>free ZeroGPU</b> quota (60s requested vs. 3s left). Try again in 1:00:00. ")
        reader, writer = CONTEXT.Pipe(duplex=False)
        stop = CONTEXT.Event()
        worker = CONTEXT.Process(target=_work, args=(task, pickle.dumps(args), writer, stop), daemon=True)
        worker.start()
        writer.close()
        with (FOLDER / "log").open("a") as file:
            file.write(json.dumps({**log, "worker": worker.pid}) + "\n")
        timer = threading.Timer(float(_wish("seconds") or duration), worker.kill)
        timer.start()
        try:
            yield from _items(reader, stop)
        finally:
            timer.cancel()
            worker.join()

    return called


def _items(reader, stop):
    while True:
        try:
            kind, payload = pickle.loads(reader.recv_bytes())
        except EOFError:
            raise gr.Error("GPU task aborted", title="ZeroGPU worker error") from None
        if kind == "error":
            raise gr.Error(payload, title="ZeroGPU worker error")
        if kind == "end":
            return
        try:
            yield payload
        except GeneratorExit:
            stop.set()
            while pickle.loads(reader.recv_bytes())[0] == "item":
                pass
            raise


def _work(task, args: bytes, writer, stop) -> None:
    die = int(_wish("die") or 0)
    time.sleep(float(_wish("slow") or 0))
    try:
        items = task(*pickle.loads(args))
        for number, item in enumerate(items, 1):
            if stop.is_set():
                items.close()
                break
            writer.send_bytes(pickle.dumps(("item", item)))
            if number == die:
                os._exit(9)
    except Exception as error:
        writer.send_bytes(pickle.dumps(("error", type(error).__name__)))
    writer.send_bytes(pickle.dumps(("end", None)))


def _wish(name: str) -> str:
    path = FOLDER / name
    return path.read_text() if path.exists() else ""


def _dirt() -> list[str]:
    """What must not be in the process that is forked."""
    torch, core = sys.modules.get("torch"), sys.modules.get("engine.core")
    found = ["CUDA"] if torch is not None and torch.cuda.is_initialized() else []
    if core is not None and any(type(thing) is core.EngineCore for thing in gc.get_objects()):
        found.append("an engine")
    return found
