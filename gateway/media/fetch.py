"""Fetching media by URL without becoming a client's way into our network.

Every hop resolves its host once, all addresses must be public, and the connection goes to an
address that was checked. TLS still verifies the host's name. Redirects start over. There are no
cookies, credentials, proxies or kept connections.
"""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpcore

from gateway.held import Hold
from gateway.items import Modality
from gateway.media.address import Network, is_public
from gateway.media.faults import beyond
from gateway.media.limits import MIB
from gateway.media.url import ParsedUrl, parse_url, resolve_location
from mimo.errors import InvalidRequest, Reason

Resolve = Callable[[str, int], Awaitable[list[str]]]

_DNS_TIMEOUT_S = 2.0
_CONNECT_TIMEOUT_S = 3.0  # TCP, and again for TLS
_READ_TIMEOUT_S = 5.0
_TOTAL_TIMEOUT_S = {Modality.IMAGE: 10.0, Modality.AUDIO: 20.0, Modality.VIDEO: 30.0}
_SLOW_AFTER_S = 5.0
_SLOW_BYTES_PER_S = 32 * 1024
_MAX_ADDRESSES = 16
_MAX_DIALS = 4
_MAX_REDIRECTS = 3
_MAX_HEADER_BYTES = 32 * 1024
_MAX_PER_HOST = 4
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """What may be fetched. ``domains`` None is any public host, else exact names or ``*.suffix``.

    ``denied`` are networks of the deployment. ``exempt`` are networks that may be fetched from
    although they are not public; empty unless somebody spells them out.
    """

    allow_http: bool = False
    ports: frozenset[int] = frozenset({80, 443})
    domains: tuple[str, ...] | None = None
    denied: tuple[Network, ...] = ()
    exempt: tuple[Network, ...] = ()


class Fetcher:
    """Downloads media. Every failure is InvalidRequest with a URL reason and no address in it."""

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        user_agent: str = "mimo-gateway",
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._user_agent = user_agent
        self._resolver = ThreadPoolExecutor(4, thread_name_prefix="media-dns")
        self._resolve = resolve or self._getaddrinfo
        self._tls = tls or _tls_context()
        self._clock = clock
        self._per_host: dict[str, tuple[asyncio.Semaphore, int]] = {}

    def close(self) -> None:
        self._resolver.shutdown(wait=False, cancel_futures=True)

    async def fetch(
        self,
        url: str,
        *,
        modality: Modality | None,
        max_bytes: int,
        hold: Hold = lambda _: None,
        policy: FetchPolicy | None = None,
    ) -> bytes:
        """The body behind ``url``. ``hold`` counts its bytes as they come and may refuse them;
        ``policy`` replaces the service's for one tenant."""
        policy = policy or self._policy
        timeout_s = _TOTAL_TIMEOUT_S[modality or Modality.VIDEO]
        try:
            async with asyncio.timeout(timeout_s):
                return await self._follow(parse_url(url), modality, max_bytes, hold, policy)
        except (TimeoutError, httpcore.TimeoutException) as error:
            raise _too_slow() from error
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError) as error:
            raise _failed("could not connect or the connection broke") from error

    async def _follow(
        self,
        url: ParsedUrl,
        modality: Modality | None,
        max_bytes: int,
        hold: Hold,
        policy: FetchPolicy,
    ) -> bytes:
        seen = set()
        for _ in range(_MAX_REDIRECTS + 1):
            if str(url) in seen:
                raise _failed("redirects in a circle")
            seen.add(str(url))
            _check_policy(url, policy)
            async with self._host_slot(url.host):
                body = await self._get(url, modality, max_bytes, hold, policy)
            if isinstance(body, bytes):
                return body
            if url.scheme == "https" and body.scheme == "http":
                raise _blocked()
            url = body
        raise _failed(f"more than {_MAX_REDIRECTS} redirects")

    async def _get(
        self,
        url: ParsedUrl,
        modality: Modality | None,
        max_bytes: int,
        hold: Hold,
        policy: FetchPolicy,
    ) -> bytes | ParsedUrl:
        """The body, or where a redirect leads."""
        backend = _GuardedBackend(self._resolve, policy)
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._tls,
            max_keepalive_connections=0,
            http1=True,
            http2=False,
            retries=0,
            network_backend=backend,
        )
        host = f"[{url.host}]" if ":" in url.host else url.host
        default = 443 if url.scheme == "https" else 80
        headers = [
            ("Host", host if url.port == default else f"{host}:{url.port}"),
            ("User-Agent", self._user_agent),
            ("Accept", f"{modality.value}/*" if modality else "*/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        target = httpcore.URL(
            scheme=url.scheme, host=url.host, port=url.port, target=url.target.encode("ascii")
        )
        timeouts = {
            "connect": _CONNECT_TIMEOUT_S,
            "read": _READ_TIMEOUT_S,
            "write": _READ_TIMEOUT_S,
            "pool": _CONNECT_TIMEOUT_S,
        }
        async with (
            pool,
            pool.stream(
                "GET", target, headers=headers, extensions={"timeout": timeouts}
            ) as response,
        ):
            return await self._read(url, response, max_bytes, hold)

    async def _read(
        self, url: ParsedUrl, response: httpcore.Response, max_bytes: int, hold: Hold
    ) -> bytes | ParsedUrl:
        headers = {name.lower(): value for name, value in response.headers}
        if sum(len(name) + len(value) + 4 for name, value in response.headers) > _MAX_HEADER_BYTES:
            raise _failed("its headers are too large")
        if response.status in _REDIRECTS:
            return resolve_location(url, headers.get(b"location", b"").decode("latin-1"))
        if response.status != 200:
            raise _failed(f"HTTP {response.status}")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise _failed("the server compressed it")
        announced = headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > max_bytes:
            raise _too_large(max_bytes)
        body = bytearray()
        start = self._clock()
        async for piece in response.aiter_stream():
            body += piece
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            hold(len(piece))
            elapsed = self._clock() - start
            if elapsed > _SLOW_AFTER_S and len(body) < elapsed * _SLOW_BYTES_PER_S:
                raise _too_slow()
        return bytes(body)

    @contextlib.asynccontextmanager
    async def _host_slot(self, host: str) -> AsyncIterator[None]:
        """At most four downloads from one host at a time."""
        slots, users = self._per_host.get(host, (asyncio.Semaphore(_MAX_PER_HOST), 0))
        self._per_host[host] = slots, users + 1
        try:
            async with slots:
                yield
        finally:
            slots, users = self._per_host.pop(host)
            if users > 1:
                self._per_host[host] = slots, users - 1

    async def _getaddrinfo(self, host: str, port: int) -> list[str]:
        """In threads of its own: a slow name server must not starve other work."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._resolver,
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _GuardedBackend(httpcore.AsyncNetworkBackend):
    """Dials only addresses that it has resolved and checked itself.

    The library above still sees the host's name: for the Host header, for SNI and for the
    certificate.
    """

    def __init__(self, resolve: Resolve, policy: FetchPolicy) -> None:
        self._resolve = resolve
        self._policy = policy
        self._dialler = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        last: Exception | None = None
        for address in (await self._checked(host, port))[:_MAX_DIALS]:
            try:
                stream = await self._dialler.connect_tcp(address, port, timeout=timeout)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
                continue
            peer = stream.get_extra_info("server_addr")
            if not peer or ipaddress.ip_address(peer[0]) != ipaddress.ip_address(address):
                await stream.aclose()
                raise _blocked()
            return stream
        raise last or httpcore.ConnectError("no address")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise _blocked()

    async def sleep(self, seconds: float) -> None:
        await self._dialler.sleep(seconds)

    async def _checked(self, host: str, port: int) -> list[str]:
        """Every address of the host, if all of them may be dialled: a mixed answer is an attack."""
        try:
            async with asyncio.timeout(_DNS_TIMEOUT_S):
                addresses = await self._resolve(host, port)
        except TimeoutError as error:
            raise _too_slow() from error
        except (OSError, UnicodeError) as error:
            raise _failed("its host name is unknown") from error
        if not 0 < len(addresses) <= _MAX_ADDRESSES:
            raise _failed("its host name is unknown")
        for address in addresses:
            if not is_public(address, denied=self._policy.denied, exempt=self._policy.exempt):
                raise _blocked()
        return addresses


def _check_policy(url: ParsedUrl, policy: FetchPolicy) -> None:
    if url.scheme == "http" and not policy.allow_http:
        raise InvalidRequest("invalid URL: only https is allowed", reason=Reason.URL_INVALID)
    if url.port not in policy.ports:
        raise InvalidRequest("invalid URL: this port is not allowed", reason=Reason.URL_INVALID)
    if policy.domains is not None and not any(_matches(url.host, d) for d in policy.domains):
        raise _blocked()
    if url.is_literal and not is_public(url.host, denied=policy.denied, exempt=policy.exempt):
        raise _blocked()


def _matches(host: str, domain: str) -> bool:
    return host.endswith(domain[1:]) if domain.startswith("*.") else host == domain


def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _blocked() -> InvalidRequest:
    """One sentence for every blocked target, so that it tells nothing about our network."""
    return InvalidRequest("this URL is not allowed", reason=Reason.URL_BLOCKED)


def _failed(why: str) -> InvalidRequest:
    return InvalidRequest(f"media could not be fetched: {why}", reason=Reason.URL_FETCH_FAILED)


def _too_slow() -> InvalidRequest:
    return InvalidRequest("fetching media took too long", reason=Reason.URL_FETCH_TIMEOUT)


def _too_large(max_bytes: int) -> InvalidRequest:
    return beyond(
        "bytes",
        f"over {max_bytes}",
        max_bytes,
        f"media behind the URL is larger than {max_bytes / MIB:g} MiB",
    )
