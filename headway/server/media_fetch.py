"""Pictures that a client names by an address: off unless domains are allowed, and then only what a stranger may have fetched.

A server that fetches what clients name can be made to ask its own neighbours. So: the host must be allowed by name; all of its
addresses must be public; the connection goes to an address that was checked, not to what the name resolves to a moment later;
redirects pass through the same checks; there are limits of size, of time and of redirects. One parser reads an address, once:
what it found is what is asked for.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from urllib.parse import urljoin, urlsplit

from headway.multimodal.images import MAX_FILE_BYTES
from headway.server.errors import ApiError, refuse

SECONDS: Final = 10.0
"""By the clock, for one picture, redirects included."""
MAX_REDIRECTS: Final = 3
MAX_URL_CHARS: Final = 2048
_REDIRECTS: Final = (301, 302, 303, 307, 308)


class Target(NamedTuple):
    """A checked address."""

    scheme: str
    host: str
    port: int
    path: str


Resolve = Callable[[str, int], Sequence[str]]
"""Name and port -> addresses."""


def fetch(url: str, domains: Sequence[str], where: str, resolve: Resolve | None = None) -> bytes:
    """The file at ``url``.

    Args:
        domains: hosts that may be asked; ".example.org" allows all below it.
        where: the field, for messages.
        resolve: of names, public addresses only; None: the system's.

    Raises:
        ApiError: it is not allowed, not there, too large or too slow.
    """
    deadline = time.monotonic() + SECONDS
    for _ in range(MAX_REDIRECTS + 1):
        target = check_url(url, domains, where)
        addresses = (resolve or public_addresses)(target.host, target.port)
        if not addresses:
            raise refuse(f"{where}: {target.host} has no public address", where)
        status, location, data = _get(target, addresses[0], deadline, where)
        if status not in _REDIRECTS:
            return data
        if not location:
            raise refuse(f"{where}: a redirect without an address", where)
        url = urljoin(f"{target.scheme}://{target.host}:{target.port}{target.path}", location)
    raise refuse(f"{where}: more than {MAX_REDIRECTS} redirects", where)


def check_url(url: str, domains: Sequence[str], where: str) -> Target:
    """The parts of an address that may be fetched. Raises ApiError."""
    if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise refuse(f"{where}: not a plain http address of up to {MAX_URL_CHARS} characters", where)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refuse(f"{where}: not an address", where) from None
    if parts.scheme not in ("http", "https"):
        raise refuse(
            f"{where}: images come as data URLs (data:image/...;base64,...){', or by http' if domains else ''}; "
            f"not by {parts.scheme[:20] or 'nothing'!r}",
            where,
        )
    host = (parts.hostname or "").lower().rstrip(".")
    if "@" in parts.netloc or not host:
        raise refuse(f"{where}: an address with a user, or without a host", where)
    if not domains:
        raise refuse(
            f"{where}: this server fetches no images; send a data URL, or start it with --allowed-media-domains", where
        )
    if not any(host == each.lower() or (each.startswith(".") and host.endswith(each.lower())) for each in domains):
        raise refuse(f"{where}: {host[:200]} is not among --allowed-media-domains", where)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path)


def public_addresses(host: str, port: int) -> list[str]:
    """The host's addresses; none if one of them is not public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = [str(each[4][0]) for each in found]
    return addresses if all(map(is_public, addresses)) else []


def is_public(address: str) -> bool:
    """Whether an address is of the public internet."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            ip = inner
        elif ip in ipaddress.ip_network("64:ff9b::/96"):  # NAT64: the last four bytes are an IPv4 address
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _get(target: Target, address: str, deadline: float, where: str) -> tuple[int, str | None, bytes]:
    """Status, where it leads, and the body of one request to a checked address."""
    connection = http.client.HTTPConnection(target.host, target.port)
    try:
        raw = socket.create_connection((address, target.port), timeout=_left(deadline))
        if target.scheme == "https":
            raw = ssl.create_default_context().wrap_socket(raw, server_hostname=target.host)
        connection.sock = raw
        connection.request("GET", target.path, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
        answer = connection.getresponse()
        if answer.status in _REDIRECTS:
            return answer.status, answer.headers.get("Location"), b""
        if answer.status != 200:
            raise refuse(f"{where}: {target.host} answered {answer.status}", where)
        length = answer.headers.get("Content-Length", "0")
        if length.isdigit() and int(length) > MAX_FILE_BYTES:
            raise _too_large(where)
        pieces: list[bytes] = []
        size = 0
        while True:
            raw.settimeout(_left(deadline))
            piece = answer.read1(2**16)
            if not piece:
                return 200, None, b"".join(pieces)
            size += len(piece)
            if size > MAX_FILE_BYTES:
                raise _too_large(where)
            pieces.append(piece)
    except TimeoutError:
        raise refuse(f"{where}: {target.host} takes longer than {SECONDS:g} seconds", where) from None
    except (OSError, http.client.HTTPException) as error:
        raise refuse(f"{where}: {target.host} cannot be read ({type(error).__name__})", where) from None
    finally:
        connection.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _too_large(where: str) -> ApiError:
    return refuse(f"{where}: the image has more than {MAX_FILE_BYTES} bytes", where)
