"""Where the page listens: claimed before anything slow happens, so that a busy port is told at once."""

from __future__ import annotations

import ipaddress
import os
import socket

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Every address of this machine, and the one of them that this machine itself should use."""


class AddressRefused(Exception):
    """The page cannot be served at that address; the message says why and what to do."""


def claim_address(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; port 0 takes a free one. Raises AddressRefused."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise AddressRefused(
            f"This machine does not know the address {host!r}; choose another --host."
        ) from exc
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    claimed = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere this option lets two servers share one port
            claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind(address)
    except OSError as exc:
        claimed.close()
        raise AddressRefused(
            f"Port {port} at {host} cannot be used ({exc.strerror or exc}); "
            "stop what uses it, or choose another --port or --host."
        ) from exc
    return claimed


def is_loopback(host: str) -> bool:
    """True when nobody but this machine can reach what listens at `host`."""
    address = ip_address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


def ip_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `name` spells out; None when it is a name that somebody has to look up."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
