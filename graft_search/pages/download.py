"""GET of a page from the public internet, within limits of time and size.

A policy chooses the address, so the download must not reach the services of this machine and its network:
the host is resolved here, every address must be public, and the connection goes to the address that was
checked, after each redirect too. Proxies of the environment are not used, since they would resolve the
name again.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
import urllib.parse
import zlib
from email.message import Message as Headers
from typing import NamedTuple

MAX_REDIRECTS = 5
PORTS = (80, 443)
"""Ports of public pages; another one needs `allow_private`."""
USER_AGENT = "graft-fetch/1.0"
_MOVED = (301, 302, 303, 307, 308)


class PageError(Exception):
    """A page that could not be read; the text continues "cannot read URL: "."""


class Page(NamedTuple):
    url: str
    """The address after redirects."""
    content_type: str
    charset: str | None
    body: bytes


def download(url: str, *, timeout: float, max_bytes: int, allow_private: bool = False) -> Page:
    """The page at `url`; at most `max_bytes` of it, in at most `timeout` seconds altogether."""
    end = time.monotonic() + timeout
    for _ in range(MAX_REDIRECTS + 1):
        answer = _get(url, end, max_bytes, allow_private)
        if isinstance(answer, Page):
            return answer
        url = urllib.parse.urljoin(url, answer)
    raise PageError(f"more than {MAX_REDIRECTS} redirects")


def _get(url: str, end: float, max_bytes: int, allow_private: bool) -> Page | str:
    """The page, or the address that it points to."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise PageError(f"not an address: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PageError("an address begins with http:// or https:// and names a host")
    if port not in PORTS and not allow_private:
        raise PageError(f"port {port} is not one of a public page (80, 443)")
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(parts.query, safe="=&%:@!$'()*+,;/?~-._[]")
    connection = http.client.HTTPConnection(parts.hostname, port)
    try:
        connection.sock = sock = _connect(parts.hostname, port, end, allow_private)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection.sock = sock = context.wrap_socket(sock, server_hostname=parts.hostname)
        connection.request(
            "GET",
            f"{path}?{query}" if query else path,
            headers={
                "Host": parts.netloc.rpartition("@")[2],
                "User-Agent": USER_AGENT,
                "Accept": "text/html,text/plain;q=0.9,*/*;q=0.1",
                "Accept-Encoding": "identity",
                "Connection": "close",
            },
        )
        reply = connection.getresponse()
        location = reply.getheader("location")
        if reply.status in _MOVED and location:
            return location
        if reply.status != 200:
            raise PageError(f"the server answered {reply.status} {reply.reason}")
        body = _read(reply, sock, end, max_bytes)
        return Page(url, *_kind(reply.headers), _unpacked(body, reply, max_bytes))
    except TimeoutError:
        raise PageError("no complete answer in time") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise PageError(f"{type(error).__name__}: {error}"[:200]) from None
    finally:
        connection.close()


def _connect(host: str, port: int, end: float, allow_private: bool) -> socket.socket:
    """A connection to an address of `host` that was checked."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PageError(f"no host {host!r}: {error.strerror or error}") from None
    addresses = [str(entry[4][0]) for entry in found]
    private = [one for one in addresses if not is_public(one)]
    if private and not allow_private:
        named = host if host == private[0] else f"{host}, {private[0]},"
        raise PageError(
            f"{named} is an address of this machine or its network; only public pages are read "
            "(allow_private)"
        )
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), timeout=_seconds_left(end))
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
    return socket.create_connection((addresses[-1], port), timeout=_seconds_left(end))


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet.

    >>> [is_public(one) for one in ("93.184.216.34", "127.0.0.1", "10.1.2.3", "::ffff:10.0.0.1")]
    [True, False, False, False]
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    # an IPv4 address inside an IPv6 one reaches the IPv4 host
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if inner is not None:
            found = inner
        elif found in ipaddress.ip_network("64:ff9b::/96"):
            return False
    return found.is_global and not found.is_multicast


def _read(
    reply: http.client.HTTPResponse, connection: socket.socket, end: float, most: int
) -> bytes:
    body = bytearray()
    while len(body) < most and not reply.isclosed():  # from Python 3.12 on its last piece closes it
        # of one recv: a server that sends slowly must not renew it
        connection.settimeout(_seconds_left(end))
        if not (piece := reply.read1(min(65536, most - len(body)))):
            break
        body += piece
    return bytes(body)


def _seconds_left(end: float) -> float:
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _kind(headers: Headers) -> tuple[str, str | None]:
    return headers.get_content_type(), headers.get_content_charset()


def _unpacked(body: bytes, reply: http.client.HTTPResponse, most: int) -> bytes:
    """The body; some servers compress without being asked."""
    encoding = (reply.getheader("content-encoding") or "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise PageError(f"the content encoding {encoding!r} is not supported")
    try:
        return zlib.decompressobj(47 if encoding == "gzip" else 15).decompress(body, most)
    except zlib.error as error:
        raise PageError(f"the compressed answer is damaged: {error}") from None
