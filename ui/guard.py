"""The outermost layer of the web server: what it lets in, and what every answer carries.

A request passes when all of these hold: its `Host` is a name of this server (so a foreign name that was
pointed at this machine opens nothing), a browser that sends it does so for our own page (`Origin` is the
`Host`; `Sec-Fetch-Site` agrees), it names one of the few paths that the page uses, and its body is not
huge. Everything else of the web framework, such as its API, uploads and file routes, is closed here,
whatever a later version adds to it.
"""

from __future__ import annotations

import logging
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ui.address import ip_address, is_loopback

MAX_BODY_BYTES = 16 * 1024**2

OPEN_PATHS = frozenset(
    {
        "/",
        "/config",
        "/login",
        "/logout",
        "/theme.css",
        "/favicon.ico",
        "/manifest.json",
        "/robots.txt",
        "/gradio_api/app_id",
        "/gradio_api/cancel",
        "/gradio_api/component_server",
        "/gradio_api/queue/data",
        "/gradio_api/queue/join",
        "/gradio_api/reset",
        "/gradio_api/run/predict",  # handlers that do not wait in the queue, by number
    }
)
OPEN_FOLDERS = ("/assets/", "/static/", "/gradio_api/heartbeat/")
PARTS_OF_PAGES = frozenset({"/theme.css", "/favicon.ico", "/manifest.json"})
"""What a page may name as a picture, a style or the like. The rest is asked for by our script or opened by
a person; else a message could hold a picture whose address is /logout."""

OPEN_METHODS = frozenset({"GET", "HEAD", "POST"})

CONTENT_POLICY = (
    "default-src 'self'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; "  # Gradio compiles templates in the browser
    "style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; "
    "font-src 'self' data:; "
    "worker-src 'self' blob:; "
    "frame-ancestors 'none'; "
    "object-src 'none'; "
    "base-uri 'self'; "
    "form-action 'self'"
)
ANSWER_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Robots-Tag": "noindex, nofollow",
}

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

_SAME_SITE = re.compile(r";\s*samesite=[^;]*", re.IGNORECASE)

_log = logging.getLogger(__name__)


class Hosts:
    """The names under which this server may be addressed. The port is not compared, because a tunnel or
    a container may publish the server at another one."""

    def __init__(self, bound_to: str) -> None:
        self._names = {bound_to.lower(), *_LOOPBACK_NAMES}
        self.links: set[str] = set()
        self._any_address = not is_loopback(bound_to)
        if self._any_address:
            machine = socket.gethostname().lower()
            short = machine.partition(".")[0]
            self._names |= {machine, short, f"{short}.local"}

    def add_link(self, address: str) -> None:
        """Accept the name of a share link, and pages from there: they are ours, even if the tunnel passes
        their requests on under another `Host`."""
        link = urlsplit(address)
        self._names.add(str(link.hostname))
        self.links.add(f"{link.scheme}://{link.netloc}")

    def __contains__(self, name: str) -> bool:
        # Others reach us at addresses that we cannot know. Unlike a name, a bare address that leads
        # here cannot be somebody else's page that was pointed here.
        return name in self._names or (self._any_address and ip_address(name) is not None)


@dataclass(frozen=True, slots=True)
class _Refusal:
    status: int
    sentence: str


_WRONG_HOST = _Refusal(403, "This server does not answer to that name; open it at the address it printed.")
_WRONG_ORIGIN = _Refusal(403, "This request does not come from Keepwarm's own page, so it was refused.")
_NOT_FOUND = _Refusal(404, "There is nothing here.")
_WRONG_METHOD = _Refusal(405, "This server answers to GET, HEAD and POST only.")
_TOO_LARGE = _Refusal(413, "That is more than this server takes in one request; nothing was changed.")


class Guard:
    """ASGI middleware around the whole web application, for http and websocket alike."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on with the answer's headers added."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, _bounded(receive), _hardened(send))
            return
        _log.info("refused %r with %d", scope["path"], refusal.status)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            answer = PlainTextResponse(refusal.sentence, refusal.status)
            await answer(scope, receive, _hardened(send))

    def _refusal(self, scope: Scope) -> _Refusal | None:
        headers = Headers(scope=scope)
        return self._refuse_sender(scope, headers) or _refuse_request(scope, headers)

    def _refuse_sender(self, scope: Scope, headers: Headers) -> _Refusal | None:
        hosts = headers.getlist("host")
        host = _authority(f"//{hosts[0]}") if len(hosts) == 1 else None
        if host is None or host[0] not in self._hosts:
            return _WRONG_HOST
        for origin in headers.getlist("origin"):
            if origin not in self._hosts.links and not _same_place(origin, hosts[0]):
                return _WRONG_ORIGIN
        if _from_elsewhere(headers) and not _opens_page(scope, headers):
            return _WRONG_ORIGIN
        return None


def _refuse_request(scope: Scope, headers: Headers) -> _Refusal | None:
    if scope["path"] not in OPEN_PATHS and not _in_open_folder(scope["path"]):
        return _NOT_FOUND
    if headers.get("sec-fetch-dest", "empty") not in ("empty", "document") and not _is_part(scope["path"]):
        return _NOT_FOUND
    if scope["type"] == "http" and scope["method"] not in OPEN_METHODS:
        return _WRONG_METHOD
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 12 or int(length) > MAX_BODY_BYTES:
        return _TOO_LARGE
    return None


def _is_part(path: str) -> bool:
    return path in PARTS_OF_PAGES or _in_open_folder(path)


def _in_open_folder(path: str) -> bool:
    return path.startswith(OPEN_FOLDERS) and ".." not in path and "\\" not in path and "//" not in path


def _from_elsewhere(headers: Headers) -> bool:
    """True when a browser says that another site, or another port of this machine, sent this."""
    return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


def _opens_page(scope: Scope, headers: Headers) -> bool:
    """A link to the page may stand anywhere, as long as it opens the page whole and as its own window."""
    opening = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    return scope["path"] == "/" and scope.get("method") == "GET" and opening == ("navigate", "document")


def _same_place(origin: str, host: str) -> bool:
    """Whether `origin` names the host and port that the request went to. `null` names no place."""
    scheme = origin.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        return False
    place = _authority(origin)
    return place is not None and place == _authority(f"{scheme}://{host}")


def _authority(url: str) -> tuple[str, int] | None:
    """The (lower-case name, port) of a URL of nothing but scheme, name and port; None when it is more."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return parts.hostname.removesuffix("."), port


def _bounded(receive: Receive) -> Receive:
    """A body that says nothing of its length ends, as if the sender had gone, once it is too long."""
    num_bytes = 0

    async def bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        return {"type": "http.disconnect"} if num_bytes > MAX_BODY_BYTES else message

    return bounded


def _hardened(send: Send) -> Send:
    """Adds our headers, and keeps login cookies from travelling with requests of other sites."""

    async def hardened(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            headers = MutableHeaders(scope=message)
            for name, value in ANSWER_HEADERS.items():
                headers[name] = value
            cookies = headers.getlist("set-cookie")
            del headers["set-cookie"]
            for cookie in cookies:
                headers.append("set-cookie", _own_site_only(cookie))
        await send(message)

    return hardened


def _own_site_only(cookie: str) -> str:
    return _SAME_SITE.sub("", cookie) + "; SameSite=Lax"
