"""Fetching by URL, against a scripted server on loopback and an injected resolver."""

import asyncio
import ipaddress
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gateway.assembly import fetch_policy
from gateway.config import GatewayConfig
from gateway.held import HeldBytes, Hold
from gateway.items import Modality
from gateway.media.address import is_public
from gateway.media.fetch import Fetcher, FetchPolicy
from mimo.errors import ConfigError, InvalidRequest, Reason

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
Respond = Callable[[asyncio.StreamWriter, list[str]], Awaitable[None]]


@dataclass
class Resolver:
    """Answers from a table and remembers what was asked."""

    table: dict[str, list[str]]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.table:
            raise OSError("unknown name")
        return self.table[host]


class Server:
    """Counts connections; ``respond`` writes the answer, given the request's lines."""

    def __init__(self, respond: Respond) -> None:
        self.requests: list[list[str]] = []
        self.port = 0
        self._respond = respond

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head.decode().split("\r\n"))
            await self._respond(writer, self.requests[-1])
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(respond: Respond, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(respond)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield server


def answer(
    body: bytes = b"picture", status: str = "200 OK", headers: tuple[str, ...] = ()
) -> Respond:
    async def respond(writer: asyncio.StreamWriter, lines: list[str]) -> None:
        head = [f"HTTP/1.1 {status}", *headers]
        if not any(line.lower().startswith("content-length") for line in headers):
            head.append(f"Content-Length: {len(body)}")
        writer.write("\r\n".join([*head, "", ""]).encode() + body)

    return respond


def policy(server: Server, **changes: object) -> FetchPolicy:
    """Plain HTTP to loopback on the server's port: spelled out, never a default."""
    base = FetchPolicy(allow_http=True, ports=frozenset({server.port}), exempt=(LOOPBACK,))
    return replace(base, **changes)  # type: ignore[arg-type]


async def fetch(
    server: Server,
    path: str = "/a.png",
    *,
    host: str = "media.example.com",
    max_bytes: int = 1000,
    resolver: Resolver | None = None,
    rules: FetchPolicy | None = None,
    clock: Callable[[], float] | None = None,
    hold: Hold = lambda _: None,
) -> bytes:
    resolver = resolver or Resolver({host: ["127.0.0.1"]})
    options = {} if clock is None else {"clock": clock}
    fetcher = Fetcher(rules or policy(server), resolve=resolver, **options)
    try:
        url = f"http://{host}:{server.port}{path}"
        return await fetcher.fetch(url, modality=Modality.IMAGE, max_bytes=max_bytes, hold=hold)
    finally:
        fetcher.close()


async def refused(server: Server, **arguments: object) -> Reason:
    with pytest.raises(InvalidRequest) as caught:
        await fetch(server, **arguments)  # type: ignore[arg-type]
    assert "127.0.0.1" not in caught.value.message
    return caught.value.reason


async def test_a_public_looking_host_is_fetched_with_bare_headers() -> None:
    resolver = Resolver({"media.example.com": ["127.0.0.1"]})
    async with serving(answer()) as server:
        assert await fetch(server, "/a?b=c", resolver=resolver) == b"picture"
        request, *headers = server.requests[0]
        names = {line.partition(":")[0].lower() for line in headers if line}
        assert request == "GET /a?b=c HTTP/1.1"
        assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}
        assert f"Host: media.example.com:{server.port}" in headers
        assert resolver.asked == ["media.example.com"]  # once


async def test_a_body_counts_as_it_comes_and_may_be_refused() -> None:
    async with serving(answer()) as server:
        held: list[int] = []
        assert await fetch(server, hold=held.append) == b"picture"
        assert sum(held) == len(b"picture")
        with HeldBytes(2).holding() as hold, pytest.raises(InvalidRequest) as caught:
            await fetch(server, hold=hold)
        assert caught.value.reason is Reason.REQUEST_TOO_LARGE


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["10.1.2.3"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["93.184.215.14", "127.0.0.1"],
    ],
)
async def test_names_that_lead_inside_are_never_dialled(addresses: list[str]) -> None:
    async with serving(answer()) as server:
        rules = policy(server, exempt=())
        resolver = Resolver({"media.example.com": addresses})
        assert await refused(server, resolver=resolver, rules=rules) == Reason.URL_BLOCKED
        assert server.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:7f00:1]", "①②⑦.⓪.⓪.①"])
async def test_addresses_spelled_out_are_never_dialled(host: str) -> None:
    async with serving(answer()) as server:
        resolver = Resolver({})
        reason = await refused(
            server, host=host, resolver=resolver, rules=policy(server, exempt=())
        )
        assert reason == Reason.URL_BLOCKED
        assert resolver.asked == [] and server.requests == []


async def test_nothing_internal_is_reachable_by_default() -> None:
    async with serving(answer()) as server:
        assert await refused(server, rules=FetchPolicy()) == Reason.URL_INVALID  # http
        rules = FetchPolicy(allow_http=True)
        assert await refused(server, rules=rules) == Reason.URL_INVALID  # the port
        assert server.requests == []


async def test_only_listed_domains_when_there_is_a_list() -> None:
    async with serving(answer()) as server:
        for domains in (("media.example.com",), ("*.example.com",)):
            assert await fetch(server, rules=policy(server, domains=domains)) == b"picture"
        for domains in ((), ("example.com",), ("*.a.example.com",)):
            rules = policy(server, domains=domains)
            assert await refused(server, rules=rules) == Reason.URL_BLOCKED


async def test_a_redirect_is_followed_after_a_full_check() -> None:
    async def respond(writer: asyncio.StreamWriter, lines: list[str]) -> None:
        if lines[0].startswith("GET /first"):
            await answer(status="302 Found", headers=("Location: /second",))(writer, lines)
        else:
            await answer(b"second")(writer, lines)

    resolver = Resolver({"media.example.com": ["127.0.0.1"]})
    async with serving(respond) as server:
        assert await fetch(server, "/first", resolver=resolver) == b"second"
        assert resolver.asked == ["media.example.com"] * 2


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("http://inside.example.com:{port}/", Reason.URL_BLOCKED),
        ("http://169.254.169.254:{port}/latest/meta-data", Reason.URL_BLOCKED),
        ("http://localhost:{port}/", Reason.URL_BLOCKED),
        ("http://2130706433:{port}/", Reason.URL_INVALID),
        ("http://media.example.com:6379/", Reason.URL_INVALID),
        ("file:///etc/passwd", Reason.URL_INVALID),
        ("", Reason.URL_FETCH_FAILED),
    ],
)
async def test_a_redirect_leads_nowhere_else(location: str, reason: Reason) -> None:
    async def respond(writer: asyncio.StreamWriter, lines: list[str]) -> None:
        target = location.format(port=server.port)
        await answer(status="301 Moved", headers=(f"Location: {target}",))(writer, lines)

    resolver = Resolver({"media.example.com": ["127.0.0.1"], "inside.example.com": ["10.0.0.9"]})
    async with serving(respond) as server:
        assert await refused(server, resolver=resolver) == reason
        assert len(server.requests) == 1


async def test_redirects_end() -> None:
    async def respond(writer: asyncio.StreamWriter, lines: list[str]) -> None:
        step = int(lines[0].split()[1].lstrip("/"))
        location = f"Location: /{step + 1}"
        await answer(status="307 Temporary", headers=(location,))(writer, lines)

    async with serving(respond) as server:
        assert await refused(server, path="/0") == Reason.URL_FETCH_FAILED
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("respond", "reason"),
    [
        (answer(status="404 Not Found"), Reason.URL_FETCH_FAILED),
        (answer(status="500 Oops"), Reason.URL_FETCH_FAILED),
        (answer(status="206 Partial Content"), Reason.URL_FETCH_FAILED),
        (answer(headers=("Content-Encoding: gzip",)), Reason.URL_FETCH_FAILED),
        (answer(headers=("X: " + "y" * 40_000,)), Reason.URL_FETCH_FAILED),
        (answer(headers=("Content-Length: 100",)), Reason.URL_FETCH_FAILED),
        (answer(b"x" * 1001), Reason.MEDIA_LIMIT),
        (answer(headers=("Content-Length: 99999999999",)), Reason.MEDIA_LIMIT),
    ],
)
async def test_bad_answers(respond: Respond, reason: Reason) -> None:
    async with serving(respond) as server:
        assert await refused(server) == reason


async def test_an_endless_body_is_cut_off() -> None:
    async def respond(writer: asyncio.StreamWriter, lines: list[str]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
            await writer.drain()

    async with serving(respond) as server:
        assert await refused(server) == Reason.MEDIA_LIMIT


async def test_a_trickle_is_too_slow() -> None:
    ticks = iter(range(0, 10_000, 3))

    async def respond(writer: asyncio.StreamWriter, lines: list[str]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(respond) as server:
        reason = await refused(server, clock=lambda: float(next(ticks)))
        assert reason == Reason.URL_FETCH_TIMEOUT


async def test_an_unknown_name_and_a_closed_port() -> None:
    async with serving(answer()) as server:
        assert await refused(server, resolver=Resolver({})) == Reason.URL_FETCH_FAILED
        rules = policy(server)
    assert await refused(server, rules=rules) == Reason.URL_FETCH_FAILED  # nobody listens now


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_the_certificate_must_name_the_host(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-days", "2", "-subj", "/CN=media.example.com", "-keyout", str(key)]
        + ["-addext", "subjectAltName=DNS:media.example.com", "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    resolver = Resolver({name: ["127.0.0.1"] for name in ("media.example.com", "x.example.com")})
    async with serving(answer(), tls=context) as server:

        async def get(host: str, tls: ssl.SSLContext | None) -> bytes:
            fetcher = Fetcher(policy(server), resolve=resolver, tls=tls)
            try:
                url = f"https://{host}:{server.port}/"
                return await fetcher.fetch(url, modality=None, max_bytes=100)
            finally:
                fetcher.close()

        assert await get("media.example.com", trusting) == b"picture"
        for host, tls in (("x.example.com", trusting), ("media.example.com", None)):
            with pytest.raises(InvalidRequest) as caught:
                await get(host, tls)
            assert caught.value.reason == Reason.URL_FETCH_FAILED


# ── what operators say ──


def test_options_become_a_policy() -> None:
    config = GatewayConfig(
        media_domains="Example.org, *.b.example", media_denied_networks="9.0.0.0/8, 2600::/16"
    )
    rules = fetch_policy(config)
    assert rules.domains == ("example.org", "*.b.example")
    assert not is_public("9.9.9.9", denied=rules.denied)
    assert not is_public("2600::1", denied=rules.denied)
    assert is_public("8.8.8.8", denied=rules.denied)
    assert fetch_policy(GatewayConfig()).domains is None
    with pytest.raises(ConfigError, match="--media-denied-networks"):
        fetch_policy(GatewayConfig(media_denied_networks="9.0.0.1/8"))
