"""Glass Engine's page: `python app.py`. Layout and wiring only; what is shown lives in viz/, what runs in engine/."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gradio as gr

from engine.audience import LiveSource, recording_from
from engine.config import CacheConfig, EngineConfig, ModelSource
from engine.errors import EngineError
from engine.recording import load
from engine.session import Session
from viz.registry import load_views
from viz.stage.hub import Hub
from viz.stage.page import stage_html
from viz.stage.routes import routes
from viz.stage.source import RecordingSource
from viz.stage.switch import SwitchingSource
from viz.words.caption import caption

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
    p.add_argument("--own-process", action=argparse.BooleanOptionalAction, help="engine in a process of its own (default: on a GPU)")
    p.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
    p.add_argument("--port", type=int, default=int(os.environ.get("GRADIO_SERVER_PORT", "7860")))
    return p


def source_of(args: argparse.Namespace) -> SwitchingSource:
    """A recording, or a live engine that begins to load at once. Raises EngineError."""
    if args.recording:
        return SwitchingSource(RecordingSource(load(args.recording)), recording_from)
    config = EngineConfig(ModelSource(args.model, args.device, args.dtype, args.backend), CacheConfig(num_pages=args.pages))
    return SwitchingSource(LiveSource(Session(config, own_process=args.own_process).start()), recording_from)


def page() -> gr.Blocks:
    """One element that fills the window; everything in it is the stage's."""
    html, css, js = stage_html()
    with gr.Blocks(title="Glass Engine", analytics_enabled=False, fill_width=True, fill_height=True) as demo:
        gr.HTML(html_template=html, css_template=css, js_on_load=js, elem_id="stage", apply_default_css=False)
    return demo


def check_port(host: str, port: int) -> None:
    """Raises EngineError "port_in_use" before anything is loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineError("port_in_use", f"Port {port} on {host} cannot be used: {error.strerror}. Try --port {port + 1}.") from None


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, or 2 with a sentence."""
    args = parser().parse_args(argv)
    try:
        check_port(args.host, args.port)
        source = source_of(args)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    serve(source, args)
    print(f"Glass Engine: http://{'localhost' if args.host in ('0.0.0.0', '127.0.0.1') else args.host}:{args.port}", flush=True)
    return wait_forever()


def serve(source: SwitchingSource, args: argparse.Namespace) -> None:
    """Start the web server; returns at once."""
    hub = Hub(source, load_views(), caption=caption, default_views=("blocks", "batching"), title="Glass Engine")
    page().launch(
        server_name=args.host, server_port=args.port, app_kwargs={"routes": routes(hub)}, ssr_mode=False, css=PAGE_CSS,
        footer_links=[], quiet=True, prevent_thread_lock=True,
    )  # fmt: skip


def wait_forever() -> int:
    """Until Ctrl-C."""
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
