"""Puts a finished page on the network, and takes it off again.

Gradio's page is mounted in a web server of our own: the address is claimed before anything slow happens,
the guard is outermost, the framework never has to call itself through somebody's proxy, and a share link
serves the same local files as the local address does. What others can reach always asks for a login.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import fastapi
import gradio as gr
import uvicorn
from gradio.routes import App
from starlette.routing import Mount

from ui.address import ANY_ADDRESS, AddressRefused, claim_address, is_loopback
from ui.guard import MAX_BODY_BYTES, Guard, Hosts
from ui.login import Account, Login, generated_account
from ui.tunnel import TunnelFailed, close_tunnels, open_tunnel

SHUTDOWN_S = 2
"""How long an open page may hold up the end of the server."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where and for whom to serve. Port 0 takes a free one. Without `accounts` anybody who reaches the
    address is `local`; when that could be other people, an account with a random password is added.

    `max_threads` bounds the handlers that run at once, `max_waiting` those in line behind them.
    `certificate_path` is where the share server's certificate goes.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    share: bool = False
    accounts: tuple[Account, ...] = ()
    max_threads: int = 128
    max_waiting: int = 64
    certificate_path: Path | None = None

    def __post_init__(self) -> None:
        if not self.host or not 0 <= self.port <= 65535:
            raise ValueError(f"no server can listen at {self.host!r}, port {self.port}")

    @property
    def is_reachable_by_others(self) -> bool:
        """True when the page is not for this machine alone."""
        return self.share or not is_loopback(self.host)


def _print_at_once(sentence: str) -> None:
    print(sentence, flush=True)


def serve(
    demo: gr.Blocks,
    settings: ServerSettings,
    looks: Mapping[str, object] | None = None,
    *,
    listener: socket.socket | None = None,
    say: Callable[[str], None] = _print_at_once,
) -> None:
    """Serve until KeyboardInterrupt, which is passed on once the server has ended. See `start`."""
    with start(demo, settings, looks, listener=listener, say=say) as server:
        server.wait()


def start(
    demo: gr.Blocks,
    settings: ServerSettings,
    looks: Mapping[str, object] | None = None,
    *,
    listener: socket.socket | None = None,
    say: Callable[[str], None] = _print_at_once,
) -> Server:
    """Serve in the background; use the result as a context, or call its `close`.

    `looks`: theme, css, js and head. `listener`: what `claim_address` gave; None claims now. `say` gets
    the address, the share link or why there is none, and a made-up password. Raises AddressRefused.
    """
    server = Server(demo, settings, looks or {}, listener or claim_address(settings.host, settings.port))
    try:
        server.open()
        server.announce(say)
    except BaseException:
        server.close()
        raise
    return server


class Server:
    """One page being served. Made by `start`."""

    def __init__(
        self, demo: gr.Blocks, settings: ServerSettings, looks: Mapping[str, object], listener: socket.socket
    ) -> None:
        self._demo = demo
        self._settings = settings
        self._looks = looks
        self._listener = listener
        self._port: int = listener.getsockname()[1]
        self.share_address: str | None = None
        self.made_up_account: Account | None = None
        if settings.is_reachable_by_others and not settings.accounts:
            self.made_up_account = generated_account()
        self._hosts = Hosts(settings.host)
        self._web_app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self._uvicorn = uvicorn.Server(_web_server(Guard(self._web_app, self._hosts)))
        self._thread = threading.Thread(target=self._run, name="web server", daemon=True)
        self._failure: BaseException | None = None

    @property
    def address(self) -> str:
        """The page's address on this machine."""
        host = self._local_host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    @property
    def _local_host(self) -> str:
        return ANY_ADDRESS.get(self._settings.host, self._settings.host)

    def open(self) -> None:
        """Begin to answer; returns once it does."""
        self._thread.start()
        while not self._uvicorn.started and self._thread.is_alive():
            self._thread.join(0.02)
        if isinstance(self._failure, OSError):  # another program was faster to listen
            raise AddressRefused(
                f"The page could not be served at {self.address} ({self._failure.strerror}); "
                "choose another --port."
            ) from self._failure
        if self._failure is not None:
            raise self._failure

    def announce(self, say: Callable[[str], None]) -> None:
        """Make the share link if one is wanted, and tell where the page is and how to get in."""
        say(f"Keepwarm is running at {self.address}")
        if self._settings.host in ANY_ADDRESS:
            say(f"Other machines find it at http://{socket.gethostname()}:{self._port}")
        if self._settings.share:
            say(self._share())
        if self.made_up_account is not None:
            say(f"Sign in as {self.made_up_account.name} with the password {self.made_up_account.password}")

    def wait(self) -> None:
        """Block while the page is served. Raises what ended the server, if anything did."""
        while self._thread.is_alive():
            self._thread.join(0.5)  # a join without a limit cannot be interrupted everywhere
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Take the page off the network; open pages get a moment to finish. Idempotent."""
        close_tunnels()
        log = logging.getLogger("uvicorn.error")
        if self._thread.is_alive():
            log.setLevel(logging.CRITICAL)  # that streams are cut is no error now
            self._demo.is_running = False
            self._demo._queue.close()  # pyright: ignore[reportPrivateUsage]
            for page in _gradio_apps(self._web_app):
                page.stop_event.set()
            self._uvicorn.should_exit = True
            self._thread.join(SHUTDOWN_S + 5)
            log.setLevel(logging.NOTSET)
        self._listener.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:  # handed to whoever waits, in `open` or `wait`
            self._failure = exc

    async def _serve(self) -> None:
        """Mounts the page here, because Gradio makes an event loop where none runs, and never closes it."""
        accounts = self._settings.accounts or tuple(filter(None, [self.made_up_account]))
        _mount(self._demo, self._web_app, self._settings, self._looks, accounts)
        await self._uvicorn.serve(sockets=[self._listener])

    def _share(self) -> str:
        """The sentence with the link, or with the reason why there is none."""
        certificate = self._settings.certificate_path
        try:
            link = open_tunnel(self._local_host, self._port, self._demo.share_token, certificate)
        except TunnelFailed as exc:
            return f"The share link could not be made ({exc}); Keepwarm goes on at {self.address} without it."
        self._hosts.add_link(link)
        self.share_address = link
        return f"Share link: {link}"


def _web_server(app: Guard) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )


def _mount(
    demo: gr.Blocks,
    web_app: fastapi.FastAPI,
    settings: ServerSettings,
    looks: Mapping[str, object],
    accounts: tuple[Account, ...],
) -> None:
    """Put the page into the web application. What Gradio would offer beyond the page (API, run history,
    monitoring, file routes, tool server) is switched off as well as closed by the guard."""
    demo.max_threads = settings.max_threads
    demo.queue(api_open=False, max_size=settings.max_waiting, default_concurrency_limit=8)
    for handler in demo.fns.values():
        handler.api_visibility = "private"
    gr.mount_gradio_app(  # pyright: ignore[reportUnknownMemberType]
        web_app,
        demo,
        path="/",
        server_name=settings.host,
        server_port=settings.port,
        auth=Login(accounts).check if accounts else None,
        auth_message="Sign in to see your chats.",
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        show_error=False,
        max_file_size=MAX_BODY_BYTES,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        **looks,  # pyright: ignore[reportArgumentType]
    )


def _gradio_apps(web_app: fastapi.FastAPI) -> list[App]:
    mounted = [route.app for route in web_app.routes if isinstance(route, Mount)]
    return [app for app in mounted if isinstance(app, App)]
