"""A client's channel before a server that takes its time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from mimo.rpc.channel import open_channel

GREETING_S = 0.5  # of a server whose machine is busy, or which is far away


@asynccontextmanager
async def late_server() -> AsyncIterator[str]:
    """Connections are taken at once, but nothing is said on them for a while."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            try:
                while data := await reader.read(1 << 16):
                    writer.write(data)
            finally:
                writer.close()
            await writer.wait_closed()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.append(task)
        await asyncio.sleep(GREETING_S)
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, behind_writer), pass_on(behind_reader, writer))

    connections: list[asyncio.Task[None]] = []
    async with await asyncio.start_server(late, "127.0.0.1", 0) as front:
        yield f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
    await server.stop(None)
    await asyncio.gather(*connections)


async def test_a_server_that_is_slow_to_greet_is_waited_for() -> None:
    async with late_server() as address, open_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = await check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
