"""The open connections to the servers of a store. Each is one operation's at a time."""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio.cluster import RedisCluster

from mimo.store.resp import Resp


class Links:
    """Connections to the servers of ``client``, a client of redis-py, standalone or of a Cluster.

    The client says where a name lies and how to get in; nothing else is asked of it here.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._is_cluster = isinstance(client, RedisCluster)
        self._is_outdated = False
        self._idle: dict[str, list[Resp]] = defaultdict(list)  # by server

    @asynccontextmanager
    async def to(self, name: str) -> AsyncIterator[Resp]:
        """A connection to the server that holds ``name``. It is closed if the block raises.

        Raises OSError, RedisError and RedisClusterException when there is none to be had.
        """
        server, make = await self._locate(name)
        link = await self._take(server) or await _open(make())
        try:
            yield link
        except BaseException:
            await link.close()
            raise
        if link.is_idle:
            self._idle[server].append(link)
        else:
            await link.close()

    def relearn(self) -> None:
        """Something went wrong: names of a Cluster may lie elsewhere now."""
        self._is_outdated = True

    async def aclose(self) -> None:
        for links in self._idle.values():
            while links:
                await links.pop().close()

    async def _take(self, server: str) -> Resp | None:
        """An idle connection that the server has not closed meanwhile."""
        links = self._idle[server]
        while links:
            link = links.pop()
            if link.is_idle:
                return link
            await link.close()
        return None

    async def _locate(self, name: str) -> tuple[str, Any]:
        """The server that holds a name, and what makes a connection to it."""
        if not self._is_cluster:
            return "", self._client.connection_pool.make_connection
        if self._is_outdated:
            self._is_outdated = False
            await self._client.aclose()
        await self._client.initialize()
        node = self._client.get_node_from_key(name)
        return node.name, lambda: node.connection_class(**node.connection_kwargs)


async def _open(connection: Any) -> Resp:
    try:
        await connection.connect()
        return Resp(connection)
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
