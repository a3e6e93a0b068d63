"""Memory that requests share: counted, bounded, free again."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.held import HeldBytes
from gateway.metering import CallMeter
from gateway.rpc.servicer import GatewayServicer
from gateway.uploads import Uploads
from mimo.errors import InvalidRequest, Overloaded, Reason
from mimo.metrics import Metrics
from mimo.store.memory_store import MemoryStore
from mimo.v1 import gateway_pb2
from tests.support.faces import ScriptedPipeline, catalog
from tests.support.media import gradient, image_file

PICTURE = image_file(gradient(8, 8))


def test_all_together_hold_no_more_than_there_is() -> None:
    memory = HeldBytes(10)
    with memory.holding() as first, memory.holding() as second:
        first(4)
        second(6)
        with pytest.raises(Overloaded):
            first(1)
    with memory.holding() as third:
        third(10)


def test_a_request_that_alone_is_too_large_is_not_told_to_come_back() -> None:
    with HeldBytes(10).holding() as hold:
        hold(4)
        with pytest.raises(InvalidRequest) as caught:
            hold(7)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


def servicer(memory: HeldBytes) -> GatewayServicer:
    uploads = Uploads(MemoryStore())
    meter = CallMeter(Metrics("gateway"), "grpc")
    pipeline = ScriptedPipeline()
    return GatewayServicer(pipeline, catalog(), uploads, meter, memory)  # type: ignore[arg-type]


async def upload(
    first: asyncio.Event, rest: asyncio.Event
) -> AsyncIterator[gateway_pb2.UploadMediaRequest]:
    """A picture in two pieces. Sets ``first`` once that is taken, waits for ``rest``."""
    yield gateway_pb2.UploadMediaRequest(data=PICTURE[:20])
    first.set()
    await rest.wait()
    yield gateway_pb2.UploadMediaRequest(data=PICTURE[20:])


async def test_uploads_over_grpc_count_while_they_come() -> None:
    face = servicer(HeldBytes(len(PICTURE) + 10))
    began, at_once, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    at_once.set()
    slow = asyncio.create_task(face.UploadMedia(upload(began, go_on), None))
    await began.wait()
    with pytest.raises(Overloaded):
        await face.UploadMedia(upload(asyncio.Event(), at_once), None)
    go_on.set()
    assert (await slow).bytes == len(PICTURE)
    assert (await face.UploadMedia(upload(asyncio.Event(), at_once), None)).bytes == len(PICTURE)
