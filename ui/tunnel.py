"""The public link: Gradio's tunnel from its share server to a port of this machine.

The tunnel is a program that Gradio downloads once and runs. Whatever goes wrong with that is one
TunnelFailed; the page itself goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from pathlib import Path
from urllib.parse import urlsplit

from gradio import networking, tunneling

_log = logging.getLogger(__name__)


class TunnelFailed(Exception):
    """There is no public link; the message says why, as a clause without a full stop."""


def open_tunnel(host: str, port: int, token: str, certificate_path: Path | None = None) -> str:
    """The public https address of what listens at `host`, `port` here. Takes seconds; raises TunnelFailed.

    `token` is a secret of this run. `certificate_path` takes the share server's certificate; None leaves
    Gradio's choice, a folder in the current directory.
    """
    told = io.StringIO()
    try:
        _remove_altered_program()
        if certificate_path is not None:
            networking.CERTIFICATE_PATH = str(certificate_path)  # pyright: ignore[reportPrivateImportUsage]
        with contextlib.redirect_stderr(told):  # the program's own log is for us, not for people
            address: str | None = networking.setup_tunnel(host, port, token, None, None)
    except Exception as exc:
        _log.info("no tunnel: %s", told.getvalue(), exc_info=exc)
        lines = str(exc).splitlines() or [type(exc).__name__]
        raise TunnelFailed(lines[0].rstrip(". ")) from exc
    if not address:
        raise TunnelFailed("the share server gave no address")
    return urlsplit(address)._replace(scheme="https").geturl()


def close_tunnels() -> None:
    """End every tunnel of this process."""
    with contextlib.redirect_stdout(io.StringIO()):
        for tunnel in tunneling.CURRENT_TUNNELS:
            tunnel.kill()
    tunneling.CURRENT_TUNNELS.clear()


def _remove_altered_program() -> None:
    """Gradio checks the program only while it downloads it, and leaves one that failed the check in place,
    where the next start would run it."""
    program = Path(tunneling.BINARY_PATH)
    expected = tunneling.CHECKSUMS.get(tunneling.BINARY_URL)
    if program.exists() and expected not in (None, hashlib.sha256(program.read_bytes()).hexdigest()):
        program.unlink()
