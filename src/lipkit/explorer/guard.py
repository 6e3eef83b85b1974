"""Who may talk to the explorer: requests whose Host and Origin are this very server, answered with strict headers."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from lipkit.errors import OptionError

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

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]


def is_loopback(host: str) -> bool:
    """True for a name or address that can only be this machine.

    >>> [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "192.168.0.2", "example.org")]
    [True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, allow_remote: bool) -> None:
    """Refuse to listen where other machines could connect, unless told to.

    Raises:
        OptionError: an address beyond loopback without ``allow_remote``.
    """
    if not is_loopback(host) and not allow_remote:
        raise OptionError(
            f"host: expected a loopback address such as 127.0.0.1, got {host!r}: the explorer has no passwords; "
            "--allow-remote serves it to everyone who can reach that address"
        )


def authorities(host: str, port: int) -> set[str]:
    """The values of the Host header that name this server.

    >>> sorted(authorities("127.0.0.1", 80))
    ['127.0.0.1:80', '[::1]:80', 'localhost:80']
    """
    names = {"127.0.0.1", "localhost", "[::1]"} if is_loopback(host) else {f"[{host}]" if ":" in host else host}
    return {f"{name}:{port}" for name in names}


class Guard:
    """ASGI middleware: 403 for a foreign Host or Origin (DNS rebinding, other pages), and the headers above.

    Args:
        app: what answers.
        allowed: values of the Host header, from :func:`authorities`.
    """

    def __init__(self, app: App, allowed: Collection[str]) -> None:
        self.app, self.allowed = app, frozenset(allowed)

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http" or not self._welcome(scope.get("headers", [])):
            if scope["type"] == "http":
                await _refuse(send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        await self.app(scope, receive, answer)

    def _welcome(self, headers: Collection[tuple[bytes, bytes]]) -> bool:
        found: dict[bytes, list[str]] = {b"host": [], b"origin": []}
        for key, value in headers:
            if key.lower() in found:
                found[key.lower()].append(value.decode("latin-1").lower())
        if len(found[b"host"]) != 1 or found[b"host"][0] not in self.allowed:
            return False
        for origin in found[b"origin"]:
            parts = urlsplit(origin)
            if parts.scheme != "http" or parts.netloc not in self.allowed:
                return False
        return True


async def _refuse(send: Send) -> None:
    body = b"expected a request to this server from its own page\n"
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
