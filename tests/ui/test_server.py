"""A small page on a real port of this machine, attacked over the wire."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import gradio as gr
import httpx
import pytest
from gradio import networking, tunneling

from tests.ui.own_loop import run
from ui.address import AddressRefused, claim_address
from ui.login import Account, owner_of
from ui.server import Server, ServerSettings, serve, start

ANNA = Account("anna", "correct horse")
BEN = Account("ben", "battery staple")


def owner_of_visitor(request: gr.Request) -> str:
    return owner_of(request)


def small_page() -> gr.Blocks:
    """Made within a running loop, because Gradio makes one where there is none and never closes it."""
    return run(_small_page())


async def _small_page() -> gr.Blocks:
    """A box whose text comes back with its owner, in two steps."""
    with gr.Blocks(analytics_enabled=False) as page:
        box = gr.Textbox()
        answer = gr.Textbox()

        def reply(text: str, request: gr.Request) -> Iterator[str]:
            yield "…"
            yield f"{owner_of(request)} says {text}"

        box.submit(reply, box, answer, api_name="reply")
        box.change(owner_of_visitor, None, answer, queue=False)
    return page


@pytest.fixture(scope="module", autouse=True)
def quiet_gradio() -> Iterator[None]:
    """As the app has it: no table of all events after each one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_ANALYTICS_CACHE_FREQUENCY", "1000000")
        yield


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder as the app has it: a database, and the temporary folder that Gradio may use."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "keepwarm.sqlite").write_bytes(b"SQLite format 3\0 private")
    (folder / "temporary").mkdir()
    (folder / "temporary" / "upload.txt").write_text("private")
    return folder


@pytest.fixture(scope="module")
def guarded(data_folder: Path) -> Iterator[Server]:
    """Served to two people with passwords."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(data_folder / "temporary"))
        with start(small_page(), ServerSettings(port=0, accounts=(ANNA, BEN)), say=lambda _: None) as server:
            yield server


@pytest.fixture(scope="module")
def unguarded() -> Iterator[Server]:
    """Served to whoever sits at this machine."""
    with start(small_page(), ServerSettings(port=0), say=lambda _: None) as server:
        yield server


def visit(server: Server, cookies: httpx.Cookies | None = None) -> httpx.Client:
    return httpx.Client(base_url=server.address, trust_env=False, cookies=cookies)


def signed_in(server: Server, account: Account) -> httpx.Client:
    return visit(server, log_in(server, account).cookies)


def log_in(server: Server, account: Account) -> httpx.Response:
    credentials = {"username": account.name, "password": account.password}
    answer = httpx.post(f"{server.address}/login", data=credentials, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer


def ask(client: httpx.Client, text: str) -> str:
    """What the page shows in the end, over the same routes as a browser."""
    session = secrets.token_hex(8)
    joined = client.post(
        "/gradio_api/queue/join", json={"data": [text], "fn_index": 0, "session_hash": session}
    )
    assert joined.status_code == 200, joined.text
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as stream:
        for line in stream.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line else {}
            if event.get("msg") == "process_completed":
                assert event["success"], event
                return str(event["output"]["data"][0])
    raise AssertionError("the stream ended without a result")


def shown_config(html: str) -> str:
    return html.partition("window.gradio_config = ")[2].partition(";</script>")[0]


def test_without_logins_the_page_works_and_belongs_to_local(unguarded: Server) -> None:
    with visit(unguarded) as client:
        assert client.get("/").status_code == 200
        assert ask(client, "hello") == "local says hello"


def test_handlers_outside_the_queue_know_the_owner_and_those_inside_cannot_be_called_past_it(
    guarded: Server,
) -> None:
    with signed_in(guarded, ANNA) as anna:
        outside = anna.post("/gradio_api/run/predict", json={"data": [], "fn_index": 1, "session_hash": "x"})
        assert outside.json()["data"] == ["anna"]
        inside = anna.post(
            "/gradio_api/run/predict", json={"data": ["hi"], "fn_index": 0, "session_hash": "x"}
        )
        assert inside.status_code == 404


def test_a_login_opens_the_page_and_every_request_carries_its_name(guarded: Server) -> None:
    with signed_in(guarded, ANNA) as anna, signed_in(guarded, BEN) as ben:
        assert ask(anna, "hello") == "anna says hello"
        assert ask(ben, "hello") == "ben says hello"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/config"),
        ("POST", "/gradio_api/queue/join"),
        ("GET", "/gradio_api/queue/data?session_hash=x"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/gradio_api/run/predict"),
    ],
)
def test_without_a_login_nothing_of_the_page_can_be_had(guarded: Server, method: str, path: str) -> None:
    forged = httpx.Cookies(
        {f"access-token-{secrets.token_urlsafe(32)}": "x", "access-token-unsecure-": "None"}
    )
    body = {"data": ["hi"], "fn_index": 0, "session_hash": "x"} if method == "POST" else None
    for cookies in (None, forged):
        with visit(guarded, cookies) as client:
            assert client.request(method, path, json=body).status_code == 401


def test_the_login_page_tells_nothing_about_the_page_behind_it(guarded: Server) -> None:
    with visit(guarded) as client:
        html = client.get("/").text
    assert '"auth_required":true' in shown_config(html)
    assert "reply" not in shown_config(html)
    assert '"named_endpoints":{},"unnamed_endpoints":{}' in html


@pytest.mark.parametrize(("name", "password"), [("anna", "wrong"), ("nobody", "correct horse"), ("ben", " ")])
def test_a_wrong_password_opens_nothing(guarded: Server, name: str, password: str) -> None:
    with visit(guarded) as client:
        answer = client.post("/login", data={"username": name, "password": password})
        assert answer.status_code == 400
        assert not answer.headers.get_list("set-cookie")
        assert client.get("/config").status_code == 401


def test_a_login_cookie_is_for_our_own_page_only_and_ends_with_the_logout(guarded: Server) -> None:
    with signed_in(guarded, ANNA) as anna:
        for cookie in log_in(guarded, ANNA).headers.get_list("set-cookie"):
            assert "HttpOnly" in cookie
            assert cookie.endswith("SameSite=Lax")
            assert "none" not in cookie.lower()
        assert anna.get("/config").status_code == 200
        foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert anna.get("/logout", headers=foreign).status_code == 403
        assert anna.get("/config").status_code == 200
        anna.get("/logout")
        assert anna.get("/config").status_code == 401


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://localhost"])
def test_a_page_of_another_origin_cannot_use_a_visitors_login(guarded: Server, origin: str) -> None:
    with signed_in(guarded, ANNA) as anna:
        body = {"data": ["hi"], "fn_index": 0, "session_hash": "x"}
        answer = anna.post("/gradio_api/queue/join", json=body, headers={"Origin": origin})
        assert answer.status_code == 403
        assert anna.get("/config", headers={"Origin": origin}).status_code == 403
        assert anna.get("/config", headers={"Origin": guarded.address}).status_code == 200


def test_a_foreign_host_name_is_refused_even_with_a_login(guarded: Server) -> None:
    with signed_in(guarded, ANNA) as anna:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "abc.gradio.live"):
            assert anna.get("/", headers={"Host": host}).status_code == 403, host


def test_no_route_serves_files_of_the_data_folder(guarded: Server, data_folder: Path) -> None:
    database, upload = data_folder / "keepwarm.sqlite", data_folder / "temporary" / "upload.txt"
    paths = [f"/gradio_api/file={database}", f"/gradio_api/file={upload}", f"/gradio_api/file/{database}"]
    paths += [
        f"/gradio_api/file={upload.parent}/../keepwarm.sqlite",
        f"/file={database}",
        f"/static/{database}",
    ]
    for folder in ("static", "assets", "svelte"):
        for up in ("../", "..%2f", "%2e%2e/", "..\\", "..%5c", "....//"):
            paths.append(f"/{folder}/{up * 12}{str(database)[1:]}")
    with signed_in(guarded, ANNA) as anna, socket.create_connection(socket_address(guarded)) as raw:
        cookies = "; ".join(f"{name}={value}" for name, value in anna.cookies.items())
        reader = raw.makefile("rb")
        for path in paths:  # a client library would tidy the dots away
            raw.sendall(
                f"GET {path} HTTP/1.1\r\nHost: {guarded.address[7:]}\r\nCookie: {cookies}\r\n\r\n".encode()
            )
            status, body = read_answer(reader)
            assert status in (403, 404), path
            assert b"private" not in body, path


def socket_address(server: Server) -> tuple[str, int]:
    host, port = server.address.removeprefix("http://").split(":")
    return host, int(port)


def read_answer(reader: BinaryIO) -> tuple[int, bytes]:
    """Status and body of one answer with a known length."""
    status = int(reader.readline().split()[1])
    length = 0
    while header := reader.readline().strip().lower():
        if header.startswith(b"content-length:"):
            length = int(header.split(b":")[1])
    return status, reader.read(length)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/info"),
        ("GET", "/gradio_api/openapi.json"),
        ("GET", "/gradio_api/token"),
        ("POST", "/gradio_api/upload"),
        ("POST", "/gradio_api/call/reply"),
        ("POST", "/gradio_api/run/reply"),
        ("POST", "/gradio_api/api/reply"),
        ("GET", "/gradio_api/runs"),
        ("GET", "/monitoring"),
        ("GET", "/gradio_api/deep_link?session_hash=x"),
        ("GET", "/gradio_api/proxy=http://127.0.0.1"),
    ],
)
def test_the_frameworks_api_is_closed_even_with_a_login(guarded: Server, method: str, path: str) -> None:
    with signed_in(guarded, ANNA) as anna:
        assert (
            anna.request(method, path, json={"data": ["hi"]} if method == "POST" else None).status_code == 404
        )


def test_nothing_is_on_offer_that_was_switched_off(guarded: Server) -> None:
    with signed_in(guarded, ANNA) as anna:
        html = anna.get("/").text
    config = json.loads(shown_config(html))
    assert config["username"] == "anna"
    assert config["footer_links"] == []
    assert not config.get("run_history")
    assert not config.get("pwa")
    assert not config.get("mcp_server")
    assert {handler["api_visibility"] for handler in config["dependencies"]} == {"private"}
    assert '"named_endpoints":{},"unnamed_endpoints":{}' in html


def test_a_huge_request_is_refused(unguarded: Server) -> None:
    with visit(unguarded) as client:
        answer = client.post("/gradio_api/queue/join", content=b"x" * (17 * 1024**2))
        assert answer.status_code == 413


def test_an_address_in_use_is_refused_in_one_sentence(unguarded: Server) -> None:
    host, port = socket_address(unguarded)
    with pytest.raises(AddressRefused, match=rf"Port {port} at {host} cannot be used .*--port"):
        claim_address(host, port)


def test_an_address_that_another_program_takes_meanwhile_is_refused_in_one_sentence() -> None:
    first, second = claim_address("127.0.0.1", 0), None
    try:
        second = claim_address("127.0.0.1", first.getsockname()[1])  # both are bound, neither listens yet
        first.listen()
        with pytest.raises(AddressRefused, match=r"could not be served .* choose another --port\."):
            start(small_page(), ServerSettings(), listener=second, say=lambda _: None)
        assert second.fileno() == -1, "the socket was closed again"
    finally:
        first.close()
        if second is not None:
            second.close()


def test_an_unknown_address_is_refused_in_one_sentence() -> None:
    with pytest.raises(AddressRefused, match="choose another"):
        claim_address("no-such-host.invalid", 0)
    with pytest.raises(AddressRefused, match="--host"):
        claim_address("192.0.2.1", 0)


def test_a_closed_server_frees_its_port_and_ends_open_streams() -> None:
    server = start(small_page(), ServerSettings(port=0), say=lambda _: None)
    address = socket_address(server)
    with visit(server) as client, client.stream("GET", "/gradio_api/heartbeat/abc") as stream:
        assert next(stream.iter_lines()) == "data: ALIVE"
        server.close()
        server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    claim_address(*address).close()


def test_an_interrupt_while_serving_closes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[Server] = []

    def interrupted(server: Server) -> None:
        servers.append(server)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve(small_page(), ServerSettings(port=0), say=lambda _: None)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(socket_address(servers[0]))


def shared(monkeypatch: pytest.MonkeyPatch, tunnel: object, **settings: object) -> tuple[Server, list[str]]:
    """A shared server whose tunnel is set up by `tunnel`, and what it told; the caller closes it."""
    monkeypatch.setattr(networking, "setup_tunnel", tunnel)
    told: list[str] = []
    server = start(small_page(), ServerSettings(port=0, share=True, **settings), say=told.append)  # pyright: ignore[reportArgumentType]
    return server, told


def no_tunnel(*_: object) -> str:
    raise RuntimeError("Could not get share link from Gradio API Server.\nwith a second line")


def empty_tunnel(*_: object) -> None:
    return None


@pytest.mark.parametrize("tunnel", [no_tunnel, empty_tunnel])
def test_without_a_tunnel_the_page_goes_on_locally_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tunnel: object
) -> None:
    server, told = shared(monkeypatch, tunnel, accounts=(ANNA,))
    with server, signed_in(server, ANNA) as anna:
        assert server.share_address is None
        assert told[0] == f"Keepwarm is running at {server.address}"
        assert told[1].startswith("The share link could not be made (")
        assert told[1].endswith(" without it.")
        assert "\n" not in told[1]
        assert server.address in told[1]
        assert ask(anna, "hello") == "anna says hello"


def working_tunnel(host: str, port: int, token: str, *_: object) -> str:
    return f"http://abc{port}.gradio.live"


def test_a_share_link_asks_for_a_made_up_password_and_is_the_only_new_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, told = shared(monkeypatch, working_tunnel)
    with server:
        link = server.share_address
        assert link is not None
        assert link.startswith("https://abc")
        assert told[1] == f"Share link: {link}"
        words = told[2].split()
        assert words[3] == "keepwarm"
        assert len(words[-1]) >= 16
        through = {"Host": link.removeprefix("https://"), "Origin": link}
        with visit(server) as client:
            assert client.get("/config", headers=through).status_code == 401
            assert client.get("/", headers={"Host": "other.gradio.live"}).status_code == 403
            assert (
                client.get("/", headers={**through, "Origin": "https://other.gradio.live"}).status_code == 403
            )
            page = client.get("/", headers=through).text
            assert "amazonaws" not in page, "a share link serves our own files, not those of another host"
        with signed_in(server, Account(words[3], words[-1])) as friend:
            assert friend.get("/config", headers=through).status_code == 200


def test_two_shared_pages_have_different_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    passwords: list[str] = []
    for _ in range(2):
        server, told = shared(monkeypatch, working_tunnel)
        server.close()
        passwords.append(told[-1].split()[-1])
    assert passwords[0] != passwords[1]


def test_a_page_for_the_whole_network_asks_for_a_password_too() -> None:
    told: list[str] = []
    with start(small_page(), ServerSettings(host="0.0.0.0", port=0), say=told.append) as server:
        assert server.address.startswith("http://127.0.0.1:")
        assert told[-1].startswith("Sign in as keepwarm with the password ")
        with visit(server) as client:
            assert client.get("/config").status_code == 401
    assert not ServerSettings(host="127.0.0.1").is_reachable_by_others


def test_passwords_given_on_the_command_line_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    server, told = shared(monkeypatch, working_tunnel, accounts=(ANNA,))
    server.close()
    assert not any(ANNA.password in sentence for sentence in told)


def test_a_tunnel_program_that_is_not_gradios_is_never_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "frpc"
    expected = hashlib.sha256(b"the real one").hexdigest()
    monkeypatch.setattr(tunneling, "BINARY_PATH", str(program))
    monkeypatch.setattr(tunneling, "CHECKSUMS", {tunneling.BINARY_URL: expected})
    there: list[bool] = []

    def tunnel(*_: object) -> str:
        there.append(program.exists())
        return "https://abc.gradio.live"

    for content in (b"something else", b"the real one"):
        program.write_bytes(content)
        server, _ = shared(monkeypatch, tunnel)
        server.close()
    assert there == [False, True]


@pytest.mark.parametrize(("host", "port"), [("", 7860), ("127.0.0.1", -1), ("127.0.0.1", 65536)])
def test_settings_without_a_possible_address_are_refused(host: str, port: int) -> None:
    with pytest.raises(ValueError, match="no server can listen"):
        ServerSettings(host=host, port=port)
