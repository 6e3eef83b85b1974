"""The explorer's web server: one page, a few JSON addresses, nothing loaded from elsewhere.

It answers only requests whose Host and Origin name this server, sends strict headers, and runs one attack at a time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lipkit.errors import LipkitError, OptionError, rewording
from lipkit.text import visible

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from lipkit.explorer.runs import ExploredRun

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def is_loopback(host: str) -> bool:
    """True if the name or address can only mean this machine.

    >>> [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "192.168.0.2", "example.org")]
    [True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def authorities(host: str, port: int) -> set[str]:
    """The values of the Host header that name this server.

    >>> sorted(authorities("127.0.0.1", 80))
    ['127.0.0.1:80', '[::1]:80', 'localhost:80']
    """
    names = {"127.0.0.1", "localhost", "[::1]"} if is_loopback(host) else {f"[{host}]" if ":" in host else host}
    return {f"{name}:{port}" for name in names}


def refused(headers: Headers, allowed: Collection[str]) -> int:
    """The status to refuse a request with: a foreign Host, Origin or site (DNS rebinding, other pages); else 0."""
    names = ("host", "origin", "sec-fetch-site")
    hosts, origins, sites = ([value.lower() for value in headers.getlist(name)] for name in names)
    try:
        pages = [urlsplit(origin) for origin in origins]
    except ValueError:
        return 400  # no address at all
    # For links and images on a foreign page, browsers send no Origin, but a Sec-Fetch-Site that is foreign.
    own = len(hosts) == 1 and hosts[0] in allowed and {"same-origin", "none"}.issuperset(sites)
    return 0 if own and all(page.scheme == "http" and page.netloc in allowed for page in pages) else 403


Message = MutableMapping[str, Any]
App = Callable[[Message, Any, Any], Awaitable[None]]
STATIC = {"explore.js": "text/javascript; charset=utf-8", "explore.css": "text/css; charset=utf-8"}


def make_app(runs: Sequence[ExploredRun], allowed: Collection[str], ends: Callable[[], bool] = bool) -> App:
    """The ASGI application for one or two opened runs, which answers requests to itself alone, with `HEADERS`.

    Args:
        runs: from `lipkit.explorer.open_runs`.
        allowed: accepted values of the Host header.
        ends: returns True once the server shuts down; waiting attacks are then dropped.

    Raises:
        OptionError: fastapi or jinja2 is not installed.
    """
    try:
        import jinja2
        from fastapi import FastAPI, HTTPException, Request, Response
        from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
        from starlette.datastructures import Headers, MutableHeaders
    except ImportError as error:
        raise OptionError(f'expected fastapi and jinja2 to explore: pip install "lipkit[serve]" ({error})') from error
    # No interactive documentation: FastAPI's pages load scripts from elsewhere.
    app = FastAPI(title="lipkit explorer", docs_url=None, redoc_url=None, openapi_url=None)
    largest = max(run.largest for run in runs)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=visible)
    template = environment.from_string(_text("templates/explore.html.j2"))

    @app.exception_handler(LipkitError)
    async def _wrong(_: Any, error: LipkitError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=422)

    @app.get("/")
    def _page() -> HTMLResponse:
        return HTMLResponse(template.render(runs=runs, classes=[run.name for run in runs]))

    @app.get("/static/{name}")
    def _static(name: str) -> Response:
        if name not in STATIC:
            raise HTTPException(404)
        return Response(_text(f"static/{name}"), media_type=STATIC[name])

    @app.get("/api/runs")
    def _runs() -> dict[str, Any]:
        return {"largest": largest, "runs": [run.summary(largest) for run in runs]}

    @app.get("/api/runs/{number}/page")
    def _thumbnails(number: int, start: int = 0, count: int = 24) -> list[dict[str, Any]]:
        return _chosen(number).page(start, count)

    @app.get("/api/runs/{number}/samples/{index}")
    def _sample(number: int, index: int) -> dict[str, Any]:
        return _chosen(number).sample(index)

    one = asyncio.Lock()

    async def _attack(request: Any, number: int, index: int, eps: float) -> Any:
        async with one:  # waiting here occupies no thread, so other requests are answered
            if ends() or await request.is_disconnected():
                return Response(status_code=499)
            return await asyncio.to_thread(_chosen(number).attack, index, eps)

    _attack.__annotations__["request"] = Request  # set here: FastAPI would look up a string in this module's globals
    app.get("/api/runs/{number}/samples/{index}/attack")(_attack)

    def _chosen(number: int) -> ExploredRun:
        if not 0 <= number < len(runs):
            raise OptionError(f"expected a run between 0 and {len(runs) - 1}, got {number}")
        return runs[number]

    async def guarded(scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        """The application behind `refused`. A middleware of FastAPI would hide that a client is gone."""
        if status := refused(Headers(scope=scope), allowed) if scope["type"] == "http" else 0:
            answer = PlainTextResponse("expected a request to this server from its own page\n", status)
            return await answer(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        return await app(scope, receive, with_headers)

    return guarded


def listen(host: str = "127.0.0.1", port: int = 0, allow_remote: bool = False) -> tuple[socket.socket, str]:
    """Open the page's port: (socket, address of the page). Early requests wait until `serve` answers them.

    Args:
        host: address to listen on; only loopback without ``allow_remote``.
        port: 0 takes a free one.
        allow_remote: serve to other machines as well. There are no passwords.

    Raises:
        OptionError: an address beyond loopback, a port that cannot be opened, or uvicorn is not installed.
    """
    if not is_loopback(host) and not allow_remote:
        raise OptionError(
            f"host: expected a loopback address such as 127.0.0.1, got {host!r}: the explorer has no passwords; "
            "--allow-remote serves it to everyone who can reach that address"
        )
    if importlib.util.find_spec("uvicorn") is None:
        raise OptionError('expected uvicorn to explore: pip install "lipkit[serve]"')
    with rewording(OptionError, f"expected a free port on {host}, got port {port}: ", OSError, OverflowError):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
    return listener, f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"


def serve(runs: Sequence[ExploredRun], listener: socket.socket, host: str = "127.0.0.1") -> None:
    """Serve ``runs`` (see `open_runs`) on the socket ``listener`` (see `listen`) of ``host``, until interrupted.

    Raises:
        KeyboardInterrupt: at the end. OptionError: fastapi or jinja2 is not installed.
    """
    import uvicorn

    with listener:
        app = make_app(runs, authorities(host, listener.getsockname()[1]), lambda: server.should_exit)
        # The lambda above reads `server` only during an attack, when the name is bound.
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False, lifespan="off"))
        server.run(sockets=[listener])
        raise KeyboardInterrupt  # only a signal ends it, which the event loop may have swallowed


def _text(name: str) -> str:
    return resources.files("lipkit.explorer").joinpath(name).read_text(encoding="utf-8")
