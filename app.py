"""Glass Engine's page: `python app.py`. Layout and wiring only; what is shown lives in viz/, what runs in engine/."""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import errno
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gradio as gr

from engine.artifacts import Timeline, of_kind
from engine.audience import Hosting, LiveSource, for_many, rooms_that_fit
from engine.burst_session import BURST_S, BurstSession
from engine.chrome_trace import chrome_trace
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.errors import EngineError
from engine.recording import clip, decode, encode, load
from engine.session import Session
from engine.trace import Trace
from engine.workloads import WORKLOADS
from viz.registry import load_chapters, load_views
from viz.stage.export import offer_timeline
from viz.stage.hub import Hub, HubConfig
from viz.stage.limits import MAX_PER_ADDRESS, MAX_UPLOAD, PUBLIC
from viz.stage.lobby import Lobby, Shelf
from viz.stage.page import stage_html
from viz.stage.people import NO_LIMITS, People
from viz.stage.pins import Pins, offer_links
from viz.stage.routes import is_local, routes
from viz.stage.source import RecordingSource
from viz.stage.tour import Tour
from viz.words.caption import caption

RECORDINGS = Path(__file__).parent / "assets" / "recordings"
IS_SPACE = "SPACE_ID" in os.environ
IS_ZERO_GPU = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")  # as the package `spaces` decides
PATIENCE_S = 2.5
PAGE_CSS = """
html, body, gradio-app { margin: 0; padding: 0; overflow: hidden; }
.gradio-container, .gradio-container main, .gradio-container .wrap, #stage, #stage > * { margin: 0 !important; padding: 0 !important; max-width: none !important; gap: 0 !important; border: 0 !important; }
footer { display: none !important; }
"""  # noqa: E501


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description="See how LLMs are served fast.")
    p.add_argument("--model", help="checkpoint folder or Hub id; without it SmolLM2-135M-Instruct")
    p.add_argument("--recording", metavar="FILE", help="show a recording; no model and no GPU are needed")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"))
    p.add_argument("--backend", default="auto", choices=("auto", "torch", "triton"))
    p.add_argument("--pages", type=int, default=96, help="blocks of the KV cache (96 can still be read from the last row)")
    p.add_argument(
        "--public", action=argparse.BooleanOptionalAction, default=IS_SPACE,
        help="for strangers: a room for each visitor, with limits, closed when it is idle (default: on a Hugging Face Space)",
    )  # fmt: skip
    p.add_argument("--rooms", type=int, help="most rooms at a time with --public (default: 20, fewer where memory is small)")
    p.add_argument("--room-minutes", type=float, default=2, help="after so many idle minutes a room ends, with --public")
    p.add_argument("--proxies", type=int, default=int(IS_SPACE), help="trusted proxies in front of this server")
    p.add_argument("--own-process", action=argparse.BooleanOptionalAction, help="engine in a process of its own (default: on a GPU)")
    p.add_argument("--nvtx", action="store_true", help="name stages and operations for Nsight Systems")
    p.add_argument(
        "--host", default=os.environ.get("GRADIO_SERVER_NAME") or ("0.0.0.0" if IS_SPACE else "127.0.0.1"),
        help="on a loopback address only pages of this machine are let in; behind a proxy say --proxies too",
    )  # fmt: skip
    p.add_argument("--port", type=int, default=os.environ.get("GRADIO_SERVER_PORT") or "7860")
    return p


def shipped(preset: str) -> Trace | None:
    """The recording of a preset that comes with the product."""
    found = sorted(RECORDINGS.glob(f"{preset}-*.glass")) if preset in WORKLOADS else []
    return read_once(found[0]) if found else None


@cache
def shipped_timelines() -> tuple[Timeline, ...]:
    """A GPU's, for a page without one: those of the first recording that brings any."""
    found = (of_kind(trace, Timeline) for preset in ("shared", *WORKLOADS) if (trace := shipped(preset)) is not None)
    return next((timelines for timelines in found if timelines), ())


@cache
def read_once(path: Path) -> Trace:
    """A Trace never changes, so all newcomers may share it."""
    return load(path)


def source_of(args: argparse.Namespace) -> Lobby:
    """A recording, or a live engine that begins to load at once. Raises EngineError."""
    shelf = Shelf(decode, shipped, Pins(encode, decode, clip))
    if args.recording:
        return Lobby(RecordingSource(load(args.recording)), shelf, public=args.public)
    check_model(args.model)
    source = ModelSource(args.model, args.device, args.dtype, args.backend)
    config = EngineConfig(source, CacheConfig(num_pages=args.pages), nvtx=args.nvtx)
    hosting = Hosting(60 * args.room_minutes) if args.public else None
    config = for_many(config, args.rooms or rooms_that_fit()) if args.public else config
    return Lobby(LiveSource(session_of(config, args).start(), hosting=hosting, beside=shipped_timelines), shelf, public=args.public)


def session_of(config: EngineConfig, args: argparse.Namespace) -> Session:
    """On ZeroGPU the engine runs in bursts, whose GPU the visitor's quota pays for: the page has PATIENCE_S to say who asks."""
    if IS_ZERO_GPU:
        import spaces  # before anything touches CUDA; elsewhere it need not be there

        return BurstSession(config, spaces.GPU(duration=BURST_S), patience=PATIENCE_S)
    return Session(config, own_process=args.own_process)


def page(lend: Callable[[contextvars.Context], None] | None = None) -> gr.Blocks:
    """One element that fills the window; everything in it is the stage's. `lend` takes the context of a Gradio event, in
    which ZeroGPU sees the visitor."""
    html, css, js = stage_html()
    with gr.Blocks(title="Glass Engine", analytics_enabled=False, fill_width=True, fill_height=True) as demo:
        stage = gr.HTML(html_template=html, css_template=css, js_on_load=js, elem_id="stage", apply_default_css=False)
        if lend is not None:
            stage.submit(lambda: lend(contextvars.copy_context()), show_progress="hidden", api_visibility="private")
    return demo


def check_port(host: str, port: int) -> None:
    """Raises EngineError "port_in_use" before anything is loaded."""
    if not 1 <= port <= 65_535:
        raise EngineError("bad_port", f"A port is a number from 1 to 65535, not {port}. Try --port 7860.")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise EngineError("bad_host", f"There is no address called {host[:200]} here. Try --host 127.0.0.1.") from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            other = port + 1 if 1024 <= port < 65_535 else 7861
            raise EngineError("port_in_use", f"Port {port} on {host} cannot be used: {error.strerror}. Try --port {other}.") from None


def check_rooms(minutes: float, rooms: int | None) -> None:
    """Raises EngineError "bad_option"."""
    if not minutes > 0:
        raise EngineError("bad_option", f"--room-minutes must be more than 0, not {minutes:g}. Try --room-minutes 10.")
    if rooms is not None and rooms < 1:
        raise EngineError("bad_option", f"--rooms must be at least 1, not {rooms}. Try --rooms 20.")


def check_model(model: str | None) -> None:
    """Refuses a folder that cannot be loaded before a page is served. Raises EngineError."""
    if model:
        from engine.models.loading import check_folder  # brings torch, which a recording does not need

        check_folder(model)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 2 with a sentence."""
    args = parser().parse_args(argv)
    try:
        check_rooms(args.room_minutes, args.rooms)
        check_port(args.host, args.port)
        source = source_of(args)
        serve(source, args)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {trouble(error, args.port)}", file=sys.stderr)
        return 2
    print(f"Glass Engine: http://{'localhost' if args.host in ('0.0.0.0', '127.0.0.1') else args.host}:{args.port}", flush=True)
    return wait_forever(getattr(source.base, "session", None))


def trouble(error: OSError, port: int) -> str:
    """What went wrong outside, as a sentence. Between check_port and now somebody may have taken the port."""
    if error.errno == errno.EADDRINUSE or "empty port" in str(error):  # the latter is Gradio's own, without a number
        return f"Port {port} was taken meanwhile. Try another one with --port."
    reason = " ".join((error.strerror or str(error) or "the system does not say why").split())
    return f"The start failed: {reason.rstrip('.')}{f' ({error.filename})' if error.filename else ''}."


def serve(source: Lobby, args: argparse.Namespace) -> None:
    """Start the web server; returns at once."""
    limits = {"max_per_address": MAX_PER_ADDRESS, "max_upload": MAX_UPLOAD} if args.public else {}
    config = HubConfig(proxies=args.proxies, local=is_local(args.host) and not args.proxies, **limits)
    hub = Hub(source, load_views(), caption=caption, default_views=("blocks", "batching"), title="Glass Engine", config=config)
    People(hub, PUBLIC if args.public else NO_LIMITS)
    offer_links(hub, source.shelf.pinned)
    offer_timeline(hub, chrome_trace)
    Tour(hub, load_chapters())
    page(getattr(getattr(source.base, "session", None), "lend", None)).launch(
        server_name=args.host, server_port=args.port, app_kwargs={"routes": routes(hub)}, ssr_mode=False, css=PAGE_CSS,
        footer_links=[], quiet=True, prevent_thread_lock=True,
    )  # fmt: skip


def wait_forever(session: Session | None) -> int:
    """Until Ctrl-C. That a model cannot be loaded is said here too; the page stays and offers to try again."""
    with contextlib.suppress(KeyboardInterrupt):
        try:
            if session is not None:
                session.wait_ready(float("inf"))
        except EngineError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
