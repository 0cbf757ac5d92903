"""The guard around a bare web application: what gets through, what is refused, what answers carry."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from tests.ui.own_loop import run
from ui.guard import ANSWER_HEADERS, MAX_BODY_BYTES, Guard, Hosts

HOME = "127.0.0.1:7860"


@dataclass
class Answer:
    """What came back, and what the application behind the guard saw of the body."""

    status: int = 0
    headers: Headers = field(default_factory=Headers)
    text: str = ""
    closed: bool = False
    seen: list[Message] = field(default_factory=list[Message])


def ask(
    path: str = "/",
    *,
    method: str = "GET",
    host: str | None = HOME,
    hosts: Hosts | None = None,
    kind: str = "http",
    body: tuple[bytes, ...] = (b"",),
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Answer:
    """One request through the guard to an application that says yes to everything."""
    answer = Answer()
    named = headers if host is None else {**headers, "host": host}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in named.items()]
    scope: Scope = {"type": kind, "method": method, "path": path, "headers": raw}
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]

    async def yes(scope: Scope, receive: Receive, send: Send) -> None:
        answer.seen.extend([await receive() for _ in body])
        cookies = [
            (b"set-cookie", b"token=1; HttpOnly; Path=/; SameSite=none; Secure"),
            (b"set-cookie", b"plain=2; Path=/"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": cookies})
        await send({"type": "http.response.body", "body": b"yes"})

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], Headers(raw=message["headers"])
        elif message["type"] == "http.response.body":
            answer.text += message.get("body", b"").decode()
        else:
            answer.closed = message == {"type": "websocket.close", "code": 1008}

    run(Guard(yes, hosts or Hosts("127.0.0.1"))(scope, receive, send))
    return answer


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7860", "localhost:9999", "localhost", "LOCALHOST.:1", "[::1]:7860"]
)
def test_this_machines_own_names_are_answered_at_any_port(host: str) -> None:
    assert ask(host=host).text == "yes"


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.9:7860",
        "localhost@evil.example",
        "localhost/evil",
        "localhost:port",
        "[::1",
        "localhost?x",
        "evil.example:127.0.0.1",
    ],
)
def test_a_foreign_name_pointed_at_this_machine_opens_nothing(host: str | None) -> None:
    answer = ask(host=host)
    assert (answer.status, answer.seen) == (403, [])
    assert "name" in answer.text


def test_a_server_for_the_network_answers_to_its_addresses_and_its_names_only() -> None:
    network = Hosts("0.0.0.0")
    machine = socket.gethostname()
    for host in ("192.168.1.20:7860", "[fe80::1]:7860", f"{machine}:7860", f"{machine.split('.')[0]}.local"):
        assert ask(host=host, hosts=network).status == 200, host
    assert ask(host="evil.example", hosts=network).status == 403


def test_a_share_link_is_answered_once_it_is_known_whatever_host_its_tunnel_names() -> None:
    hosts = Hosts("127.0.0.1")
    origin = {"Origin": "https://abc.gradio.live"}
    assert ask(host="abc.gradio.live", hosts=hosts, headers=origin).status == 403
    assert ask(host=HOME, hosts=hosts, headers=origin).status == 403
    hosts.add_link("https://abc.gradio.live")
    assert ask(host="abc.gradio.live", hosts=hosts, headers=origin).status == 200
    assert ask(host=HOME, hosts=hosts, headers=origin).status == 200
    assert ask(host=HOME, hosts=hosts, headers={"Origin": "http://abc.gradio.live"}).status == 403
    assert ask(host="other.gradio.live", hosts=hosts).status == 403


@pytest.mark.parametrize("kind", ["image", "video", "style", "iframe", "script", "object"])
def test_a_message_cannot_sign_somebody_out_by_naming_that_address_as_a_picture(kind: str) -> None:
    for path in ("/logout", "/", "/gradio_api/queue/join"):
        assert ask(path, headers={"Sec-Fetch-Dest": kind, "Sec-Fetch-Site": "same-origin"}).status == 404
    for path in ("/favicon.ico", "/theme.css", "/assets/index.js", "/static/img/logo.svg"):
        assert ask(path, headers={"Sec-Fetch-Dest": kind, "Sec-Fetch-Site": "same-origin"}).status == 200


@pytest.mark.parametrize("kind", ["document", "empty", None])
def test_what_a_person_opens_or_our_script_asks_for_is_answered(kind: str | None) -> None:
    sent = {} if kind is None else {"Sec-Fetch-Dest": kind}
    assert ask("/logout", headers=sent).status == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "",
        "http://127.0.0.1:7861",
        "http://localhost:7860",
        "http://127.0.0.1",
        "file://127.0.0.1:7860",
        "https://127.0.0.1",
        "http://127.0.0.1:7860.evil.example",
        "http://[::1",
        "http://user@127.0.0.1:7860",
        "http://127.0.0.1:7860/path",
    ],
)
def test_a_page_from_anywhere_else_may_not_send_anything(origin: str) -> None:
    answer = ask("/gradio_api/queue/join", method="POST", headers={"Origin": origin})
    assert (answer.status, answer.seen) == (403, [])


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (HOME, f"http://{HOME}"),
        ("localhost", "http://localhost:80"),
        ("localhost:443", "https://localhost"),
        ("[::1]:7860", "http://[::1]:7860"),
        ("LocalHost:5", "http://localhost:5"),
    ],
)
def test_our_own_page_may_send(host: str, origin: str) -> None:
    assert ask("/gradio_api/queue/join", method="POST", host=host, headers={"Origin": origin}).status == 200


def test_a_preflight_of_another_site_is_refused_without_a_word_on_what_it_may() -> None:
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = ask("/config", method="OPTIONS", headers=preflight)
    assert answer.status == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def fetched(site: str, mode: str, destination: str) -> dict[str, str]:
    """What a browser tells about a request, whether or not it has an origin to tell."""
    return {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": destination}


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything-new"])
def test_a_request_that_a_browser_calls_foreign_is_refused_even_without_an_origin(site: str) -> None:
    assert ask("/logout", headers=fetched(site, "navigate", "document")).status == 403
    assert ask("/", headers=fetched(site, "no-cors", "image")).status == 403
    assert ask("/", headers=fetched(site, "navigate", "iframe")).status == 403


def test_a_link_on_another_site_may_open_the_page() -> None:
    opening = fetched("cross-site", "navigate", "document")
    assert ask("/", headers=opening).status == 200
    assert ask("/", method="POST", headers=opening).status == 403


def test_a_browser_on_our_own_page_and_a_typed_address_are_let_in() -> None:
    assert ask("/config", headers=fetched("same-origin", "cors", "empty")).status == 200
    assert ask("/config", headers=fetched("none", "navigate", "document")).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/info",
        "/gradio_api/openapi.json",
        "/gradio_api/upload",
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/call/send",
        "/gradio_api/run/send",
        "/gradio_api/api/send",
        "/gradio_api/token",
        "/gradio_api/user",
        "/gradio_api/proxy=http://x",
        "/gradio_api/runs",
        "/gradio_api/deep_link",
        "/gradio_api/vibe-code",
        "/gradio_api/dev/reload",
        "/gradio_api/startup-events",
        "/monitoring",
        "/monitoring/summary",
        "/docs",
        "/openapi.json",
        "/gradio_api/mcp",
        "/something/new",
        "/assets/../config.json",
        "/static/..\\secret",
        "/assets//etc/passwd",
        "//",
        "/config/",
    ],
)
def test_what_the_page_does_not_use_is_not_there(path: str) -> None:
    answer = ask(path)
    assert (answer.status, answer.seen) == (404, [])


@pytest.mark.parametrize("path", ["/", "/config", "/assets/index.js", "/static/img/logo.svg", "/theme.css"])
def test_what_the_page_uses_is_there(path: str) -> None:
    assert ask(path).status == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_methods_that_the_page_never_uses_are_refused(method: str) -> None:
    assert ask(method=method).status == 405


@pytest.mark.parametrize("length", [str(MAX_BODY_BYTES + 1), "9" * 5000, "-1", "many"])
def test_a_body_announced_as_too_large_is_not_read(length: str) -> None:
    answer = ask("/gradio_api/queue/join", method="POST", headers={"Content-Length": length})
    assert (answer.status, answer.seen) == (413, [])


def test_a_body_that_grows_too_large_unannounced_is_cut_off() -> None:
    half = b"x" * (MAX_BODY_BYTES // 2)
    answer = ask("/gradio_api/queue/join", method="POST", body=(half, half, b"x"))
    assert [message["type"] for message in answer.seen] == ["http.request", "http.request", "http.disconnect"]


@pytest.mark.parametrize(("path", "host"), [("/", HOME), ("/", "evil.example"), ("/nothing", HOME)])
def test_every_answer_forbids_framing_and_content_of_other_hosts(path: str, host: str) -> None:
    headers = ask(path, host=host).headers
    assert {name: headers.get(name) for name in ANSWER_HEADERS} == ANSWER_HEADERS
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "img-src 'self' data: blob:" in policy
    assert "frame-ancestors 'none'" in policy
    assert "http" not in policy
    assert "*" not in policy


def test_cookies_do_not_travel_with_requests_of_other_sites() -> None:
    assert ask().headers.getlist("set-cookie") == [
        "token=1; HttpOnly; Path=/; Secure; SameSite=Lax",
        "plain=2; Path=/; SameSite=Lax",
    ]


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {"Host": "evil.example"}),
        ("/", {"Host": HOME, "Origin": "http://evil.example"}),
        ("/ws", {"Host": HOME}),
    ],
)
def test_a_foreign_websocket_is_closed_before_it_opens(path: str, headers: dict[str, str]) -> None:
    answer = ask(path, kind="websocket", host=None, headers=headers)
    assert answer.closed
    assert not answer.seen


def test_two_host_headers_are_one_too_many() -> None:
    reached: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 403

    async def receive() -> Message:
        return {"type": "http.request"}

    raw = [(b"host", HOME.encode()), (b"host", b"evil.example")]
    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": raw}
    run(Guard(app, Hosts("127.0.0.1"))(scope, receive, send))
    assert reached == []


def test_start_and_end_of_the_server_pass_through() -> None:
    reached: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["type"])

    async def nothing(*_: Message) -> Message:
        return {}

    run(Guard(app, Hosts("127.0.0.1"))({"type": "lifespan"}, nothing, nothing))  # pyright: ignore[reportArgumentType]
    assert reached == ["lifespan"]
