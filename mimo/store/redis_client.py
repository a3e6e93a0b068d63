"""From a store URL to a client of its server.

    redis://[user[:password]@]host:port[/db]     rediss:// with TLS
    unix:///path/of/socket
    redis+cluster://[user[:password]@]host:port[,host:port...]     rediss+cluster:// with TLS

TLS options are query parameters: ``?ssl_ca_certs=/ca.pem&ssl_certfile=…&ssl_keyfile=…``.
"""

from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException

from mimo.errors import ConfigError

_PLAIN = ("redis", "rediss", "unix")
_CLUSTER = ("redis+cluster", "rediss+cluster")


def connect(url: str) -> "Redis | RedisCluster":
    """A client that connects on first use. Raises ConfigError for a URL it cannot read."""
    # A retried SET NX cannot tell its own first attempt from another writer: never retry.
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": None,
    }
    scheme = url.partition("://")[0]
    try:
        if scheme in _CLUSTER:
            return _connect_cluster(url, **options)
        if scheme in _PLAIN:
            client: Redis = Redis.from_url(url, **options)
            return client
    except (ValueError, TypeError, RedisClusterException):
        # The reason stays here: it may quote a piece of a password that was taken for a port.
        raise ConfigError(
            f"cannot use the store URL {_without_secrets(url)}: expected {scheme}://"
            f"{'/path' if scheme == 'unix' else 'user:password@host:port'}, with special "
            "characters of the password percent-encoded, and options that redis-py knows"
        ) from None
    raise ConfigError(
        f"cannot use the store URL {_without_secrets(url)}: "
        "expected redis://, rediss://, unix://, redis+cluster:// or memory://"
    )


def _connect_cluster(url: str, **options: Any) -> RedisCluster:
    """Any of the nodes will do; all share credentials and TLS options."""
    parts = urlsplit(url)
    credentials, separator, addresses = parts.netloc.rpartition("@")
    nodes = [urlsplit(f"//{address}") for address in addresses.split(",")]
    scheme = parts.scheme.removesuffix("+cluster")
    shared: Any = parse_url(f"{scheme}://{credentials}{separator}node?{parts.query}")
    for name in ("host", "port", "connection_class"):
        shared.pop(name, None)
    return RedisCluster(
        startup_nodes=[ClusterNode(node.hostname or "", node.port or 6379) for node in nodes],
        require_full_coverage=False,
        ssl=scheme == "rediss",
        **{**shared, **options},
    )


def _without_secrets(url: str) -> str:
    """Scheme and address. A password may be before them or in the query; where it cannot be told
    which is which, there is no address."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    credentials, _, address = rest.rpartition("@")
    address = "…" if "?" in credentials else address.partition("?")[0]
    return f"{scheme}{separator}{address}"
