"""A store behind TLS and an ACL that allows no more than the layout needs."""

import asyncio
import secrets
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mimo.errors import ConfigError
from mimo.metrics import Metrics
from mimo.store import EmbeddingKey, LookupStatus, Manifest, open_store
from mimo.store.redis_client import connect
from mimo.store.redis_store import RedisLimits, RedisStore
from mimo.tensor import RawTensor
from tests.support.redis import ValkeyProcess, free_port

TENSOR = RawTensor("bfloat16", (64, 8), bytes(range(256)) * 4)
PASSWORD = "p@ss/word"
ACL = ("~{ek1:*", "~{alias:*", "&ek1:*", "-@all", "+@read", "+@write", "+@pubsub")
ACL += ("+@transaction", "+@scripting", "+@connection", "-@dangerous", "+info")
PATIENT = RedisLimits(timeout_s=30.0)


async def exercise(store: RedisStore) -> None:
    """Every operation of a store."""
    key = EmbeddingKey(secrets.token_hex(32))
    manifest = Manifest.describe(key, TENSOR, encoder_fingerprint="e0", encode_ms=20.0)
    assert await store.acquire_lease(key, "me", 60.0)
    assert not await store.acquire_lease(key, "other", 60.0)
    assert await store.renew_lease(key, "me", 60.0)
    async with store.watch(key) as wait, asyncio.timeout(30):
        await store.release_lease(key, "me")
        while not await store.acquire_lease(key, "other", 60.0):
            await wait(30.0)
    assert await store.put(manifest, TENSOR) == manifest
    assert (await store.get(key)).tensor == TENSOR
    await store.put_alias("ab" * 32, b"plan")
    assert await store.get_alias("ab" * 32) == b"plan"


@pytest.fixture
async def guarded(redis_server: ValkeyProcess) -> str:
    """The URL of a user who may do what we do and nothing else."""
    admin = connect(redis_server.url)
    await admin.execute_command("ACL", "SETUSER", "mimo", "on", f">{PASSWORD}", *ACL)
    await admin.execute_command("ACL", "SETUSER", "default", "off")
    await admin.aclose()
    path = redis_server.url.removeprefix("unix://")
    return f"unix://mimo:p%40ss%2Fword@{path}"


async def test_an_acl_may_be_as_narrow_as_the_layout(guarded: str) -> None:
    store = RedisStore.from_url(guarded, Metrics("vision"), limits=PATIENT)
    await exercise(store)
    await store.aclose()


async def test_a_wrong_password_is_an_empty_store(guarded: str) -> None:
    store = open_store(guarded.replace("word", "sword"), Metrics("vision"))
    assert (await store.find(EmbeddingKey("ab" * 32))).status is LookupStatus.TIMEOUT
    await store.aclose()


def test_credentials_and_tls_options_of_a_cluster_reach_its_nodes() -> None:
    client = connect(
        "rediss+cluster://mimo:p%40ss%2Fword@a:1,b:2?ssl_ca_certs=/ca.pem&ssl_check_hostname=false"
    )
    options = client.nodes_manager.connection_kwargs
    assert (options["username"], options["password"]) == ("mimo", PASSWORD)
    assert options["ssl_ca_certs"] == "/ca.pem"


@pytest.mark.parametrize("url", ["http://a", "redis://a:port", "redis+cluster://a:port"])
def test_a_url_that_cannot_be_used_is_named_without_its_password(url: str) -> None:
    scheme, _, rest = url.partition("://")
    with pytest.raises(ConfigError, match=rest) as caught:
        connect(f"{scheme}://mimo:secret@{rest}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2/word@host:6379",  # not percent-encoded: taken for host and port
        "redis+cluster://:hunter2/word@host:6379",
        "redis://:a?hunter2@host:port",
        "redis://host:port?password=hunter2",
        "redis://host:port?password=a@hunter2",
        "mimo:hunter2@host:6379",
    ],
)
def test_no_piece_of_a_password_is_told(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url)
    assert "hunter2" not in str(caught.value)


# ── TLS: the server that comes with the tests has none ──


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """Port and CA certificate of a server that speaks nothing but TLS."""
    binary, openssl = shutil.which("redis-server"), shutil.which("openssl")
    if binary is None or openssl is None:
        pytest.skip("needs redis-server with TLS and openssl (Debian: apt install redis-server)")
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    port = free_port()
    server = subprocess.Popen(
        [
            *(binary, "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"),
            *("--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem"),
            *("--tls-ca-cert-file", "cert.pem", "--save", "", "--requirepass", "secret"),
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if server.poll() is not None:
                pytest.skip("this redis-server was built without TLS")
        yield port, tmp_path / "cert.pem"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
async def tls_store(tls_server: tuple[int, Path]) -> AsyncIterator[RedisStore]:
    port, certificate = tls_server
    url = f"rediss://:secret@localhost:{port}?ssl_ca_certs={certificate}"
    store = RedisStore.from_url(url, Metrics("vision"), limits=PATIENT)
    yield store
    await store.aclose()


async def test_a_store_behind_tls_does_everything(tls_store: RedisStore) -> None:
    await exercise(tls_store)


async def test_a_server_with_an_unknown_certificate_is_an_empty_store(
    tls_server: tuple[int, Path],
) -> None:
    port, _ = tls_server
    store = open_store(f"rediss://:secret@localhost:{port}", Metrics("vision"))
    assert (await store.find(EmbeddingKey("ab" * 32))).status is LookupStatus.TIMEOUT
    await store.aclose()
