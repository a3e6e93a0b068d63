"""Clients of the commands: what they are told and what they tell."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import typer

from mimo.cli.chat import chat
from mimo.cli.client import MAX_INLINE_BYTES, Attachment, GrpcClient, RestClient, Turn
from mimo.errors import DeadlineExceeded
from mimo.v1 import gateway_pb2, gateway_pb2_grpc


class SilentGateway(gateway_pb2_grpc.GatewayServicer):
    """Takes uploads and never answers."""

    async def UploadMedia(
        self, requests: AsyncIterator[gateway_pb2.UploadMediaRequest], context: Any
    ) -> gateway_pb2.UploadMediaResponse:
        await asyncio.Event().wait()
        raise AssertionError


async def test_an_upload_has_the_deadline_of_its_call() -> None:
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServicer_to_server(SilentGateway(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcClient(f"127.0.0.1:{port}", timeout_s=0.2)
    attachment = Attachment("image", "a.png", bytes(MAX_INLINE_BYTES + 1))
    try:
        with pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(30):
                await anext(client.ask([Turn("user", "?", (attachment,))]))
    finally:
        await client.close()
        await server.stop(None)


@pytest.mark.parametrize(
    "given, asked",
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080/v1/chat/completions"),
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080/v1/chat/completions"),
        ("https://mimo.example", "https://mimo.example/v1/chat/completions"),
    ],
)
async def test_a_rest_address_needs_no_scheme_and_may_have_the_path(given: str, asked: str) -> None:
    urls = []

    def answer(request: httpx.Request) -> httpx.Response:
        urls.append(str(request.url))
        return httpx.Response(200, text="data: [DONE]\n\n")

    client = RestClient(given)
    await client._http.aclose()
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    assert [piece async for piece in client.ask([Turn("user", "?")])] == []
    await client.close()
    assert urls == [asked]


def test_a_conversation_is_not_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        chat(as_json=True)
    assert "--json needs a question" in capsys.readouterr().err
