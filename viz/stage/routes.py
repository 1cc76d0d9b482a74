"""The stage over HTTP: one WebSocket, its polling fallback, the page's own files and plotly.min.js.

`routes(hub)` is all that an application mounts; paths begin with /glass. Only pages of the same host may
connect: a browser tells where a page came from, and a stranger's page must not drive an engine on localhost.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from ipaddress import ip_address
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from viz.calculator import calculator
from viz.stage import export, page
from viz.stage.codec import encode
from viz.stage.hub import Hub, Refused, failure_of, parse
from viz.stage.refusal import GONE, failure
from viz.stage.viewer import Viewer

HELLO_SECONDS = 10.0
UPLOAD_SECONDS = 60.0  # what takes longer is given up: nobody else can open a recording meanwhile


def routes(hub: Hub, *, with_page: bool = False) -> list[BaseRoute]:
    """What an application mounts. `with_page` adds the standalone page at /glass/ (a server without Gradio)."""
    saves, uploads = export.Desk(export.SAVES_PER_MINUTE), asyncio.Lock()
    found: list[BaseRoute] = [
        WebSocketRoute("/glass/ws", lambda ws: _socket(hub, ws), name="glass-ws"),
        Route("/glass/poll", _of(hub, _poll), methods=["POST"]),
        Route("/glass/static/{name}", _static, methods=["GET"]),
        Route("/glass/plotly.min.js", _plotly, methods=["GET"]),
        Route("/glass/calculator", _of(hub, _calculator), methods=["GET"]),
        Route("/glass/recording", _of(hub, _save, saves), methods=["GET"]),
        Route("/glass/recording", _of(hub, _open, uploads), methods=["POST"]),
        *export.routes(hub),
    ]
    if with_page:
        found.append(Route("/glass/", lambda _: HTMLResponse(page.standalone_page(hub.title)), methods=["GET"]))
    return found


def _of(hub: Hub, handler: Callable, *more: object) -> Callable:
    async def bound(request: Request) -> Response:
        return await handler(hub, request, *more)

    return bound


def same_host(connection: HTTPConnection, local: bool = False) -> bool:
    """A browser's Origin must be the host that it talks to, under whatever name the proxy in front gives it (a Space tells
    its own); tools that send none are let in. `local`: that host must be this machine by its own name, or a stranger's
    page could have its name lead here and be of the same host."""
    if local and not is_local(connection.headers.get("host", "")):
        return False
    origin = connection.headers.get("origin")
    if not origin or origin == "null":
        return origin is None
    forwarded = connection.headers.get("x-forwarded-host", "").split(",")[0].strip()
    names = {connection.headers.get("host", ""), forwarded, *os.environ.get("SPACE_HOST", "").split(",")}
    return urlsplit(origin).netloc.lower() in {name.strip().lower() for name in names} - {""}


def is_local(host: str) -> bool:
    """Whether a host, with a port or without, is this machine by a name that cannot be given to another."""
    with contextlib.suppress(ValueError):
        name = host if host.count(":") > 1 and host[:1] != "[" else urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    return False


def address_of(connection: HTTPConnection, proxies: int = 0) -> str:
    """The client's address: what the outermost trusted proxy saw. Entries further left are whatever the client says."""
    hops = [hop.strip() for hop in connection.headers.get("x-forwarded-for", "").split(",") if hop.strip()]
    if 0 < proxies <= len(hops):
        return hops[-proxies][:60]
    return connection.client.host if connection.client else ""


# ---- WebSocket ----


async def _socket(hub: Hub, ws: WebSocket) -> None:
    if not same_host(ws, hub.config.local):
        return await ws.close(1008)
    await ws.accept()
    viewer: Viewer | None = None
    try:
        said = parse((await asyncio.wait_for(ws.receive_text(), HELLO_SECONDS))[: hub.config.max_message]) or {}
        if said.get("t") != "hello":
            return await ws.close(1002)
        try:
            viewer = await hub.join(said, "websocket", address_of(ws, hub.config.proxies))
        except Exception as error:
            await ws.send_bytes(encode({"t": "error", **failure_of(error)}))
            return await ws.close(1013)
        sender = asyncio.create_task(_send(hub, ws, viewer))
        try:
            while True:
                hub.receive(viewer, await asyncio.wait_for(ws.receive_text(), hub.config.silence))
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sender
    except (WebSocketDisconnect, TimeoutError, KeyError, RuntimeError):  # KeyError: a binary message
        pass
    finally:
        if viewer is not None:
            await hub.leave(viewer)
        if ws.application_state is not WebSocketState.DISCONNECTED:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(ws.close(1011), 1.0)


async def _send(hub: Hub, ws: WebSocket, viewer: Viewer) -> None:
    ping = encode({"t": "ping"})
    while not viewer.gone:
        message = await hub.next(viewer, hub.config.ping)
        await ws.send_bytes(ping if message is None else message)


# ---- polling ----


async def _poll(hub: Hub, request: Request) -> Response:
    if not same_host(request, hub.config.local):
        return Response(status_code=403)
    body = await _body(request, 4 * hub.config.max_message)
    if body is None:
        return Response(status_code=413)
    address = address_of(request, hub.config.proxies)
    found = await hub.poll(request.query_params.get("viewer"), body.decode(errors="replace"), address)
    return Response(found, media_type="application/octet-stream", headers={"cache-control": "no-store"})


async def _body(request: Request, limit: int) -> bytes | None:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


# ---- the calculator ----


async def _calculator(hub: Hub, request: Request) -> Response:
    viewer = hub.viewers.get(request.query_params.get("viewer", ""))
    meta = hub.source.trace(viewer.room).meta if viewer is not None else {}
    return JSONResponse(calculator(meta, request.query_params.get("language", "en")[:5]), headers={"cache-control": "no-store"})


# ---- recordings ----


async def _save(hub: Hub, request: Request, desk: export.Desk) -> Response:
    viewer = hub.viewers.get(request.query_params.get("viewer", ""))
    save = getattr(hub.source, "save_recording", None)
    if viewer is None:
        return JSONResponse(GONE, 404)
    if save is None:
        return JSONResponse(failure("nothing_to_save", "There is nothing to save here."), 404)
    try:
        hub.check(viewer, "save_recording", {})
        async with desk.turn(viewer.person):
            name, content = await save(viewer.room, viewer.id)
    except Exception as error:
        return JSONResponse(failure_of(error), 409)
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(name)}", "cache-control": "no-store"}
    return Response(content, media_type="application/octet-stream", headers=headers)


async def _open(hub: Hub, request: Request, uploads: asyncio.Lock) -> Response:
    """Who may not, or has to wait, is refused before the file is read."""
    viewer = hub.viewers.get(request.query_params.get("viewer", ""))
    take = getattr(hub.source, "open_recording", None)
    if viewer is None:
        return JSONResponse(GONE, 404)
    if take is None or not same_host(request, hub.config.local):
        return JSONResponse(failure("cannot_open", "A recording cannot be opened here."), 404)
    name, room = request.query_params.get("name", "")[:200], viewer.room
    try:
        hub.check(viewer, "open_recording", {})
        if uploads.locked():
            raise Refused("upload_busy", "Somebody is opening a recording just now. Try again in a moment.")
        async with uploads:
            content = await _upload(request, hub.config.max_upload)
            if viewer.gone or viewer.room != room:
                return JSONResponse(GONE, 404)
            return JSONResponse(await hub.perform(viewer, "open_recording", {}, lambda: take(room, viewer.id, name, content)))
    except Exception as error:
        return JSONResponse(failure_of(error), 413 if getattr(error, "code", "") == "too_large" else 409)


async def _upload(request: Request, limit: int) -> bytes:
    """Raises Refused."""
    try:
        content = await asyncio.wait_for(_body(request, limit), UPLOAD_SECONDS)
    except TimeoutError:
        raise Refused("upload_slow", "The file took too long to arrive. Try again over a faster network.") from None
    if content is None:
        most = limit >> 20
        raise Refused("too_large", f"The file is larger than {most} MiB. Save fewer steps.", limit=most)
    return content


# ---- files ----


@cache
def _asset(name: str) -> tuple[bytes, bytes, str, str] | None:
    """(content, gzipped, media type, etag)."""
    if name == "plotly.min.js":
        content, media = (files("plotly") / "package_data" / "plotly.min.js").read_bytes(), "text/javascript"
    elif name == "stage.js":
        content, media = page.script().encode(), "text/javascript"
    elif name == "stage.css":
        content, media = page.styles().encode(), "text/css"
    else:
        return None
    return content, gzip.compress(content, 6, mtime=0), media, f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'


async def _static(request: Request) -> Response:
    return await _file(request, request.path_params["name"])


async def _plotly(request: Request) -> Response:
    return await _file(request, "plotly.min.js", forever=request.query_params.get("v") == version("plotly"))


async def _file(request: Request, name: str, forever: bool = False) -> Response:
    found = await asyncio.to_thread(_asset, name)
    if found is None:
        return Response(status_code=404)
    content, packed, media, etag = found
    headers = {"etag": etag, "vary": "accept-encoding", "x-content-type-options": "nosniff"}
    headers["cache-control"] = "public, max-age=31536000, immutable" if forever else "no-cache"
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if _takes_gzip(request.headers):
        headers["content-encoding"] = "gzip"
        content = packed
    return Response(content, media_type=media, headers=headers)


def _takes_gzip(headers: Headers) -> bool:
    offered = [part.strip().split(";") for part in headers.get("accept-encoding", "").split(",")]
    return any(o[0].strip() in ("gzip", "*") and not any(p.strip() in ("q=0", "q=0.0") for p in o[1:]) for o in offered)
