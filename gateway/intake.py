"""Bytes that a client sends in pieces: no more than a limit, and not too slowly."""

import asyncio
from collections.abc import AsyncIterable

from mimo.errors import DeadlineExceeded, InvalidRequest

PATIENCE_S = 30.0  # and another second for each MiB that has come


async def collect(
    pieces: AsyncIterable[bytes],
    limit: int,
    too_large: InvalidRequest,
    patience_s: float = PATIENCE_S,
) -> bytes:
    """All pieces. Raises ``too_large`` as soon as there are more than ``limit`` bytes, and
    DeadlineExceeded when they come too slowly."""
    began = asyncio.get_running_loop().time()
    data = bytearray()
    try:
        async with asyncio.timeout(patience_s) as patience:
            async for piece in pieces:
                data += piece
                if len(data) > limit:
                    raise too_large
                patience.reschedule(began + patience_s + len(data) / (1 << 20))
    except TimeoutError:
        raise DeadlineExceeded("the request's data came too slowly", stage="body") from None
    return bytes(data)
